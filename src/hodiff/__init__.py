"""hodiff: higher-order gradients for PyTorch, right, fast, and explained.

A map of the library:

* first derivatives: `grad`, `value_and_grad`, `vjp`, `jvp`, `jacobian`, `per_sample_grad`, `gram`
* second derivatives: `hvp`, `hessian`, `value_grad_and_hessian`, `cross_hessian`, `cross_hvp`,
  `hessian_diagonal`
* any order, elementwise: `nth_derivative`, `derivatives`
* gradient penalties: `gradient_penalty`, on which `wgan_gp_penalty`, `r1_penalty`,
  `eikonal_penalty` and the like stand; `jacobian_penalty`, `hessian_penalty`, `curvature_penalty`,
  `sliced_score_matching_loss`, `PathLengthPenalty`
* fields, by Taylor mode: `laplacian`, `value_grad_and_laplacian`, `second_order_operator`,
  `biharmonic`, `divergence`, `value_and_divergence`, `curl`, `partial`, `partials`,
  `derivatives_of`, `jet`; `hodiff.jets.report`
* where: tensors, containers of them, modules, and `select`ed parameters
* curvature without the matrix: `HessianOperator`, `GaussNewtonOperator`, `FisherOperator`,
  `JacobianOperator`, `MatrixOperator`, all `LinearOperator`s; `trace`, `diagonal`, `eigsh`,
  `spectral_density`, `logdet`, `solve` take any,
  and `nystrom` is a preconditioner
* training with curvature: `LevenbergMarquardt`, an optimizer of residuals
* through solutions: `hodiff.implicit` (`argmin`, `root`, `fixed_point`); through the steps of an
  optimizer: `unroll`, by the update rules of `hodiff.rules`
* sparse: `sparse_hessian`, `sparse_jacobian`; patterns, colors and plans in `hodiff.sparse`
* graphs explained: `hodiff.graph` (`inspect`, `predict`, `watch`, `explain` and more);
  `multi_grad`, for several losses
* training steps compiled, derivatives and all: `compile_step`
* memory: `twice_differentiable`, for loops of your own through attention and cross-entropy
* verification: `check_derivatives`
* errors and warnings: `HodiffError` and the like

Every function takes *what* (a function, or a tensor already computed) and *where* (the point).
Given a function, hodiff builds the graph and frees it; given a tensor, the graph is yours and
stays.
"""

import functools
import pkgutil
import typing

from hodiff._core import _needed

try:
    from hodiff._core import _call, _compiled_callers, _kernels, _messages, _settings, _where

    with _settings.Scope(_settings.without_collections):
        from hodiff.calculus._first import grad, jacobian, jvp, value_and_grad, vjp
        from hodiff.calculus._second import (
            cross_hessian,
            cross_hvp,
            hessian,
            hessian_diagonal,
            hvp,
            value_grad_and_hessian,
        )
        from hodiff.errors import (
            BatchMixingWarning,
            ConvergenceWarning,
            CustomFunctionWarning,
            DerivativeError,
            GraphError,
            HodiffError,
            HodiffWarning,
            InputError,
            RandomnessWarning,
        )
        from hodiff.fields._second_order import laplacian, value_grad_and_laplacian
except (AttributeError, ImportError) as error:
    raise _needed.in_words(error) from error

if typing.TYPE_CHECKING:
    from hodiff import graph as graph
    from hodiff import implicit as implicit
    from hodiff import jets as jets
    from hodiff import plotting as plotting
    from hodiff import rules as rules
    from hodiff import sparse as sparse
    from hodiff._core._modules import Selection, select
    from hodiff.calculus._higher import derivatives, nth_derivative
    from hodiff.calculus._multi import multi_grad
    from hodiff.calculus._per_sample import gram, per_sample_grad
    from hodiff.curvature import (
        FisherOperator,
        GaussNewtonOperator,
        HessianOperator,
        JacobianOperator,
        LevenbergMarquardt,
        LinearOperator,
        MatrixOperator,
        diagonal,
        eigsh,
        logdet,
        nystrom,
        solve,
        spectral_density,
        trace,
    )
    from hodiff.fields._operators import (
        biharmonic,
        curl,
        divergence,
        second_order_operator,
        value_and_divergence,
    )
    from hodiff.fields._partial import derivatives_of, jet, partial, partials
    from hodiff.implicit._unroll import unroll
    from hodiff.memory import twice_differentiable
    from hodiff.penalties._gradient import (
        dragan_penalty,
        eikonal_penalty,
        gradient_norm_penalty,
        gradient_penalty,
        interpolate,
        r1_penalty,
        r2_penalty,
        sample_norm,
        wgan_gp_penalty,
    )
    from hodiff.penalties._jacobian import (
        PathLengthPenalty,
        curvature_penalty,
        hessian_penalty,
        jacobian_penalty,
        sliced_score_matching_loss,
    )
    from hodiff.sparse._plan import sparse_hessian, sparse_jacobian
    from hodiff.steps import compile_step
    from hodiff.verify import check_derivatives

__version__ = "0.1.0"

__all__ = [
    "BatchMixingWarning",
    "ConvergenceWarning",
    "CustomFunctionWarning",
    "DerivativeError",
    "FisherOperator",
    "GaussNewtonOperator",
    "GraphError",
    "HessianOperator",
    "HodiffError",
    "HodiffWarning",
    "InputError",
    "JacobianOperator",
    "LevenbergMarquardt",
    "LinearOperator",
    "MatrixOperator",
    "PathLengthPenalty",
    "RandomnessWarning",
    "Selection",
    "biharmonic",
    "check_derivatives",
    "compile_step",
    "cross_hessian",
    "cross_hvp",
    "curl",
    "curvature_penalty",
    "derivatives",
    "derivatives_of",
    "diagonal",
    "divergence",
    "dragan_penalty",
    "eigsh",
    "eikonal_penalty",
    "grad",
    "gradient_norm_penalty",
    "gradient_penalty",
    "gram",
    "hessian",
    "hessian_diagonal",
    "hessian_penalty",
    "hvp",
    "interpolate",
    "jacobian",
    "jacobian_penalty",
    "jet",
    "jvp",
    "laplacian",
    "logdet",
    "multi_grad",
    "nth_derivative",
    "nystrom",
    "partial",
    "partials",
    "per_sample_grad",
    "r1_penalty",
    "r2_penalty",
    "sample_norm",
    "second_order_operator",
    "select",
    "sliced_score_matching_loss",
    "solve",
    "sparse_hessian",
    "sparse_jacobian",
    "spectral_density",
    "trace",
    "twice_differentiable",
    "unroll",
    "value_and_divergence",
    "value_and_grad",
    "value_grad_and_hessian",
    "value_grad_and_laplacian",
    "vjp",
    "wgan_gp_penalty",
]

_compiled_callers.publish(vars())


def _explain(failure: _messages.Failure) -> str:
    if lacking := _needed.lacks("graph"):
        _messages.warn_once(
            f"{lacking}; so why a graph cannot give what was asked is not explained."
        )
        return ""
    from hodiff.graph import _failure

    return _failure.words(failure)


def _later(place: str) -> typing.Any:
    """A function of a room that the foundation asks where it must, loaded when it is asked."""
    find = functools.cache(functools.partial(pkgutil.resolve_name, place))

    def call(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return find()(*args, **kwargs)

    return call


_messages.explainer = _explain
_where.lay_out = _later("hodiff.sharded._layout:of")
_call.check_samples = _later("hodiff._core._independence:check")
_kernels.OURS.update(
    scaled_dot_product_attention=_later("hodiff.memory._attention:attention"),
    cross_entropy_loss=_later("hodiff.memory._cross_entropy:cross_entropy"),
)

# What most programs need none of, or a little.
__getattr__, __dir__ = _compiled_callers.names(
    globals(),
    {
        "_core._modules": ("Selection", "select"),
        "calculus._higher": ("derivatives", "nth_derivative"),
        "calculus._multi": ("multi_grad",),
        "calculus._per_sample": ("gram", "per_sample_grad"),
        "curvature": (
            "FisherOperator",
            "GaussNewtonOperator",
            "HessianOperator",
            "JacobianOperator",
            "LevenbergMarquardt",
            "LinearOperator",
            "MatrixOperator",
            "diagonal",
            "eigsh",
            "logdet",
            "nystrom",
            "solve",
            "spectral_density",
            "trace",
        ),
        "fields._operators": (
            "biharmonic",
            "curl",
            "divergence",
            "second_order_operator",
            "value_and_divergence",
        ),
        "fields._partial": ("derivatives_of", "jet", "partial", "partials"),
        "graph": (),
        "implicit": (),
        "implicit._unroll": ("unroll",),
        "jets": (),
        "memory": ("twice_differentiable",),
        "penalties._gradient": (
            "dragan_penalty",
            "eikonal_penalty",
            "gradient_norm_penalty",
            "gradient_penalty",
            "interpolate",
            "r1_penalty",
            "r2_penalty",
            "sample_norm",
            "wgan_gp_penalty",
        ),
        "penalties._jacobian": (
            "PathLengthPenalty",
            "curvature_penalty",
            "hessian_penalty",
            "jacobian_penalty",
            "sliced_score_matching_loss",
        ),
        "plotting": (),
        "rules": (),
        "sparse": (),
        "sparse._plan": ("sparse_hessian", "sparse_jacobian"),
        "steps": ("compile_step",),
        "verify": ("check_derivatives",),
    },
)
