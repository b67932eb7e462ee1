"""Faults that one look at a graph tells before anything is differentiated,
and the words for them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import (
    _call,
    _messages,
    _nodes,
    _versions,
)
from hodiff._core._arguments import outside
from hodiff.errors import BatchMixingWarning, GraphError, HodiffWarning

__all__ = [
    "MIXING",
    "bypass",
    "is_even",
    "judge",
    "of_a_block",
    "warn_if_near",
]


def independent(module_slice: bool, unused: list[str], has_graph: bool) -> GraphError:
    """The error for a result that depends on nothing it could be differentiated by."""
    names = listed(unused)
    if has_graph:
        return GraphError(
            f"the result does not depend on {names}; it was computed from other tensors. "
            + (
                "Use the argument that f is given; .data and .item() of it cut the path, "
                "and leave no trace."
                if module_slice
                else "Give the tensors it was computed from, not copies, "
                "views or detached versions of them."
            )
        )
    source = "the output of f" if module_slice else "f"
    return GraphError.about(
        f"{source} carries no graph: every path from {names} to the result is cut.",
        advice=USUAL_CAUSES,
    )


USUAL_CAUSES = (
    "Usual causes: a gradient taken without create_graph=True, .detach(), .data or .item(), a "
    "torch.no_grad() block, NumPy, an integer or boolean step (argmax, a comparison), a function "
    "that PyTorch treats as constant (torch.special.airy_ai), or torch.tensor(...) of a result."
)


def listed(names: list[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def bypass(name: str) -> GraphError:
    """The error for an `f` that does not use what it was given."""
    return GraphError(
        f"f reaches {name} other than through its argument, and that path would be missing from "
        f"the derivative. Use the argument that f is given; for the parameters of a model, pass "
        f"the model itself: hodiff.grad(lambda model: loss(model(x)), model). If it is meant as a "
        f"constant, close over {name}.detach() instead."
    )


def judge(
    graph: _nodes.Survey,
    leaves: Sequence[Tensor],
    order: int,
    allow: Collection[str | type],
    unheld: dict[type, frozenset[object]] | None = None,
) -> bool:
    """Raise, or warn, for every operation through which a derivative of that order is not right.

    Python Functions that nobody has verified are added to `unheld`, with the operations beside them
    and the arguments of which they are functions; without that, they are warned of.

    Returns:
        Whether a pass must be recorded to be right, though its result is detached.
    """
    unremarkable, recorded = _nodes.UNREMARKABLE[order], False
    functions: dict[type, frozenset[object]] = {}
    _versions.prove()
    for kind in graph.kinds:
        if kind in unremarkable:
            continue
        remarks = [
            remark for name, least, remark in REMARKS if order >= least and name in kind.__name__
        ]
        for remark in remarks:
            recorded |= _said(remark, min(order, HIGHEST), graph.of(kind), leaves)
        if remarks:
            continue
        if _nodes.is_function(kind):
            function = _versions.function_of(kind)
            from hodiff._core._python_functions import is_unknown

            if is_unknown(function, graph.of(kind), leaves, allow):
                functions[function] = _nodes.varying(graph.of(kind)) | graph.names()
        else:
            unremarkable.add(kind)
    if unheld is None and functions:
        from hodiff._core import _python_functions

        _python_functions.warn_of(functions)
    elif unheld is not None:
        unheld.update(
            {each: way | unheld.get(each, frozenset()) for each, way in functions.items()}
        )
    return recorded


def _said(remark: Remark, order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> bool:
    """Make a remark, for which what nodes have saved may be read: of a graph that is there no more,
    say that.
    """
    try:
        with _versions.without_modes():  # it is we who look, not `f`
            return remark(order, nodes, leaves) is True
    except RuntimeError as error:
        ours = _messages.engine_error(error)
        if ours is None:
            raise
        raise ours from error


_STATISTICS = _nodes.Rare(
    "NativeLayerNormBackward0",
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "NativeBatchNormLegitBackward0",
    "NativeBatchNormLegitBackward1",
    "BatchNormWithUpdateBackward0",
    of_which=lambda node: (
        "NativeBatchNorm" not in node.__class__.__name__ or _versions.is_training(node)
    ),
)
"""Norms by the statistics of what they are given: layer norm, instance norm,
batch norm in training mode.
"""


def has_norm_weights(graph: _nodes.Survey, leaves: Sequence[Tensor]) -> bool:
    """Whether weights of such norms are among the leaves, or depend on them.

    The batching rule of the norms' backward writes the gradient by a weight with the statistics as
    constants: the graph of a batched pass is wrong there, silently.
    """
    weights = map(_versions.weight, _STATISTICS.among(graph))
    return _nodes.reaches([weight for weight in weights if weight is not None], leaves)


def batched_norm() -> GraphError:
    """The error for a batched pass of `f`'s own through such a norm,
    where that is not written out.
    """
    return GraphError.about(
        "f takes derivatives in a batched pass (torch.vmap, torch.func.jacrev) through PyTorch's "
        "kernel of a norm, with respect to its weights among others. Their derivative is silently "
        "wrong: PyTorch treats the statistics as constants there. Instead of "
        "torch.native_layer_norm or native_batch_norm call F.layer_norm or F.batch_norm, which "
        "hodiff computes from their definitions, or take the derivatives with hodiff.jacobian.",
        operations=["nativelayernorm", "nativebatchnorm"],
    )


def of_a_block(
    graph: _nodes.Survey, tensors: Sequence[Any], context: Any
) -> tuple[frozenset[str], GraphError | None, bool]:
    """The verdict on a block, whose graph is hidden from the evaluation that it runs in.

    Returns:
        The names of its nodes; what is refused, which the evaluation raises if it cannot be fixed;
        and whether a pass must be recorded.
    """
    names = graph.names()
    if names & _messages.WRITTEN_AT_SOME and loses_digits(graph):
        names |= {_messages.DIGITS}
    refused, recorded = None, False
    try:
        recorded = judge(graph, tensors, context.call.order, context.call.allow, context.unheld)
    except GraphError as error:
        refused = error
    if context.call.batch_ndim and MIXING.among(graph):
        warn_of_mixing(context.call.batch_ndim)
    return frozenset(names), refused, recorded


def loses_digits(graph: _nodes.Survey) -> bool:
    """Whether second derivatives of powers, products or determinants must be written out here."""
    with _versions.without_modes():  # as there
        for node in graph.named(_messages.POWER):
            kept = _versions.power(node)
            # At a base of 0 the second derivative by the exponent is not a number.
            if kept is not None and (bool((kept[0] == 0).any()) or _loses_part(node, 0)):
                return True
        return (
            any(_versions.argument(node) == 0 for node in graph.named(_messages.ZERO_POWER))
            or any(
                _divides(node, 2) or _meets_zeros(node) for node in graph.named(*_versions.PRODUCTS)
            )
            or any(_inverts(node, 2) for node in graph.named(_messages.DET))
            or any(map(_nodes.hides, graph.named(_messages.VIEW)))
            or any(map(_versions.lacks_weight, graph.named(*_messages.NORMS)))
        )


def _divides(node: Any, order: int) -> bool:
    """Whether a product has entries, not 0 and so small that few digits are left
    of a derivative of that order; of a first one, whichever was found to underflow.
    """
    if order < 2:
        return True
    sizes = [x.detach().abs() for x in _versions.factors(node)]
    return any(
        bool(((x != 0) & (x < torch.finfo(x.dtype).eps ** (1 / (2 * order - 2)))).any())
        for x in sizes
    )


def _meets_zeros(node: Any) -> bool:
    """Whether a scattered product has zeros:
    PyTorch has no second derivative where two are in one place.
    """
    factors = _versions.factors(node)
    return len(factors) > 1 and any(bool((x == 0).any()) for x in factors)


def _inverts(node: Any, order: int) -> bool:
    """Whether few digits are left of a derivative of that order of a determinant.

    PyTorch divides by the pivots; where the determinant is below a bound of its own, by differences
    of singular values, which is wrong for complex matrices, and from the third order on for all.
    """
    matrix, pivots, value = (part.detach() for part in _versions.determinant(node))
    size, eps = pivots.abs(), torch.finfo(pivots.dtype).eps
    least = eps ** (0.75 / (order - 1))
    tiny = value.abs() < 100 * eps
    if bool((~tiny & (size < least * size.amax(-1, True)).any(-1)).any()):
        return True
    if order >= 3 or matrix.is_complex() or not bool(tiny.any()):
        return bool(tiny.any())
    values = torch.linalg.svdvals(matrix[tiny])
    return bool((values.diff() >= -least * values[..., :-1]).any())


def is_even(p: Any) -> bool:
    """Whether the norm of that power is smooth where single entries are 0, and PyTorch's is not."""
    return isinstance(p, (int, float)) and p >= 4 and p % 2 == 0 and not math.isinf(p)


def _is_near(order: int, size: Tensor, *, at_zero: bool = False) -> bool:
    """Whether a norm or a root has entries so small that few digits of such a derivative are left.

    A derivative of what is smooth there, as its square is: it is made of parts that are as large as
    the root's power 2 - order, and cancel. With `at_zero`, entries that are 0 count: PyTorch has
    zeros there.
    """
    if _call.is_hidden(size) or not _versions.has_numbers(size):
        return False
    near = size.detach() < (torch.finfo(size.dtype).eps ** (0.75 / (order - 2)) if order > 2 else 0)
    return bool(((near & (size != 0)) | ((size == 0) & at_zero)).any())


NEAR = (
    "f contains a norm, a standard deviation or a square root that is near 0. "
    "A derivative of order {order} has few correct digits, or none, "
    "if f itself is smooth there, as norm(x) ** 2 is: large terms cancel. "
    "Write x.square().sum(), or x.var() for std(x) ** 2. (If f has a kink or a cusp there, "
    "ignore this warning.)"
)


def warn_if_near(order: int, size: Tensor, *, at_zero: bool = False) -> None:
    """Say that a derivative of that order is lost, where it is."""
    if _is_near(order, size, at_zero=at_zero):
        warnings.warn(NEAR.format(order=order), HodiffWarning, stacklevel=outside())


def _is_small(node: Any, order: int) -> bool:
    """Whether a norm or a root is near 0, or a norm is 0, where PyTorch's second derivative is."""
    name = type(node).__name__
    # of lists, or another that its name is a part of
    if name not in {*_versions.NORMS, *_versions.ROOTS} - {"RenormBackward0"}:
        return False
    p, size = _versions.root_of(node)
    zeros = name in _versions.DEVIATIONS or (3 <= p < torch.inf and name not in _versions.ROOTS)
    return size.is_floating_point() and _is_near(order, size, at_zero=zeros)


def _loses_part(node: Any, most: int, least: int = 0) -> bool:
    """Whether a power has entries with a positive base whose varying exponent is `least`, ...,
    `most`.

    PyTorch's rule for the base is 0 where the exponent is, as if that were constant; the rule of
    the gradient's power is so at 1, and so on.
    """
    kept = _versions.power(node)
    if kept is None or not kept[2]:
        return False
    base, exponent, _ = kept
    positive = base != 0 if base.is_complex() else base > 0
    return any(bool((positive & (exponent == k)).any()) for k in range(least, most + 1))


def refuse_hidden(
    graph: _nodes.Survey,
    gradient: _nodes.Survey,
    leaves: Sequence[Tensor],
    order: int,
    *,
    given: bool,
) -> None:
    """Raise, or warn, for what a graph hides, and its gradient's graph shows: powers, lower by 1.

    Where the graph was `given`, nothing that a write to a view hides has been written out.
    """
    unary = given and any(map(_nodes.hides, graph.named(_messages.VIEW)))
    divided = [*_versions.PRODUCTS, *(["DivBackward0"] if unary else [])]
    for remark, names in (HIDDEN_POWER, [_messages.POWER]), (HIDDEN_PRODUCT, divided):
        hidden = [node for node in gradient.named(*names) if node not in graph.visited]
        _said(remark, order, hidden, leaves)


Remark = Callable[[int, list[Any], Sequence[Tensor]], bool | None]
"""Raises or warns of such a derivative; True where a pass must be recorded to be right."""


def _watch_spectrum(order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> None:
    from hodiff._core._values import watch_spectrum

    watch_spectrum(order, nodes, leaves)


class Row(NamedTuple):
    """A remark on nodes of which something holds, and that lead to a leaf.

    Attributes:
        operation: A piece of their names, for who looks for the place; empty where it is a warning.
        text: What is said, of a derivative of `{order}`; of the first of them, by `told`, `{it}`.
        wrong: What holds of such a node, for that order.
        told: What is said of it.
    """

    operation: str
    text: str
    wrong: Callable[[Any, int], object] = lambda node, order: True
    told: Callable[[Any], object] = str

    def __call__(self, order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> None:
        """Raise, or warn, where it holds of a node that leads to a leaf."""
        met = [node for node in nodes if self.wrong(node, order)]
        if not _nodes.reaches(met, leaves):
            return
        powers = " or ".join(map(str, range(order - 1)))
        text = self.text.format(order=order, powers=powers, it=self.told(met[0]))
        if self.operation:
            raise GraphError.about(text, operations=[self.operation])
        warnings.warn(text, HodiffWarning, stacklevel=outside())


SCATTER = "AsStridedScatterBackward0"
# the kernels of other devices have not been tried
ATTENTION = "ScaledDotProductFlashAttentionForCpuBackward0"
_IS_WRONG: dict[str, Callable[[Any], bool]] = {
    SCATTER: lambda node: True,
    _messages.DET: _versions.is_singular,
    ATTENTION: lambda node: _versions.rounds_rows(node) is not False,
    **dict.fromkeys(_versions.PRODUCTS, _versions.underflows),
}
WRONG_AT_ONCE = _nodes.Rare(*_IS_WRONG, of_which=lambda node: _IS_WRONG[type(node).__name__](node))
"""What has a wrong first gradient, or may, where that cannot be seen; `det`,
in a pass not recorded.
"""


WRITTEN = _nodes.Rare(
    "CudnnRnnBackward0",
    "BlockFunctionBackward",  # which hides what is below
    *_messages.WRITTEN_OUT,
    *_messages.WRITTEN_AT_SOME,
    of_which=lambda node: (
        type(node).__name__ not in _messages.NORMS or _versions.lacks_weight(node)
    ),
)
"""What may be written out at second order, or done by another kernel."""


BIASED = _nodes.Rare(*_messages.NORMS, of_which=_versions.lacks_weight)


FUNCTION = "Give hodiff the function instead of its value"
KERNEL = "the gradient of PyTorch's fused attention on the CPU is"
MASKED = "a row that is fully masked by a large finite number (finfo.min, -1e9)"
MASK_WAY_OUT = (
    "Compute it inside `with hodiff.twice_differentiable():`, use a boolean or -inf mask for such "
    "rows, or give hodiff the function instead of its value."
)
SPARSE_WAY_OUT = (
    "is silently wrong: PyTorch treats the backward of that constructor as a constant. "
)


def _third(layer: str) -> str:
    return (
        f"a third derivative through PyTorch's {layer} is silently wrong (by 3-81 %), and this "
        f"graph allows one. {FUNCTION}: hodiff.hvp(f, x, v, create_graph=True) and nested hodiff "
        "calls compute the norm from its definition."
    )


def _sparse(operation: str, constructor: str) -> tuple[Row, Row]:
    """The sparse matrices that we return, and a constructor of the user's."""
    ours = (
        "a second derivative through the sparse matrix that sparse_hessian or sparse_jacobian "
        f"returned {SPARSE_WAY_OUT}Use its entries, hodiff.sparse.plan_hessian(f, x).values(x) (or "
        "plan_jacobian), or the dense matrix, hodiff.hessian or hodiff.jacobian with matrix=True; "
        "these have derivatives of any order."
    )
    theirs = (
        f"a second derivative through torch.{constructor} of values that are differentiated "
        f"{SPARSE_WAY_OUT}Write the values into a dense tensor, x.new_zeros(shape).index_put("
        "indices, values), or gather and sum them (index_add); a constant sparse matrix and "
        "dense.to_sparse() are right as they are."
    )
    return Row(operation, ours, lambda node, order: _nodes.is_result(node)), Row(operation, theirs)


BIAS = Row(
    "norm",
    "a second derivative with respect to the bias of a norm without a weight is silently wrong. "
    f"{FUNCTION}, or add the bias after the norm.",
)
POWER = Row(
    "pow",
    "a derivative of order {order} of a ** b is silently wrong in PyTorch where b is {powers} and "
    f"is differentiated: a part of it is taken as 0. {FUNCTION}, or write torch.exp(b * a.log()); "
    "if the power is written into a view (x[i].pow_(b)), make it a new tensor.",
    lambda node, order: _loses_part(node, order - 2),
)
SMALL = Row("", NEAR, _is_small)
HIDDEN_POWER = POWER._replace(wrong=lambda node, order: _loses_part(node, order - 3, -1))
HIDDEN_PRODUCT = Row(
    "",
    "an operation was written into a view in place (y[i].cumprod_(0), y[i].sinc_()), which hides "
    "it, and its gradient divides by a number near 0: if it is a product or sinc, a derivative of "
    f"order {{order}} has few correct digits, or none. {FUNCTION}, or use the version that makes a "
    "new tensor (no underscore).",
    _divides,
)
THIRD = {
    "NativeLayerNormBackwardBackward0": Row("nativelayernorm", _third("layer_norm")),
    # by fixed statistics it is right
    "NativeBatchNormBackwardBackward0": Row(
        "nativebatchnorm",
        _third("batch_norm or instance_norm"),
        lambda node, order: _versions.was_training(node),
    ),
}
FIRST = {
    SCATTER: [
        Row(
            "asstridedscatter",
            "the gradient of PyTorch's as_strided_scatter is silently wrong: it goes to the "
            "entries that are overwritten, and not to those that stay. Write y = x.clone() and "
            "then y.as_strided(size, stride, offset).copy_(source), or use slice_scatter, "
            "select_scatter, diagonal_scatter or index_put.",
        )
    ],
    ATTENTION: [
        Row(
            "scaleddotproduct",
            f"{KERNEL} silently wrong (by 100 % and more) for {MASKED}. {MASK_WAY_OUT}",
            lambda node, order: _versions.rounds_rows(node),
        ),
        Row(
            "",
            f"{KERNEL} wrong for {MASKED}, and an activation checkpoint (or a hook) hides whether "
            f"there is such a row here. {MASK_WAY_OUT}",
        ),
    ],
    **{
        node: [
            Row(
                name,
                f"a derivative of order {{order}} through PyTorch's {name} is wrong where an entry "
                "is near 0 (it divides by the entries), as one is here. "
                f"{FUNCTION}; it then multiplies the entries one by one.",
                _divides,
            )
        ]
        for node, name in _versions.PRODUCTS.items()
    },
}
"""What is said of a first derivative, too."""


def _close(node: Any) -> float:
    """The size of an argument below which derivatives of what divides by it lose all digits."""
    return torch.finfo(_versions.argument(node).dtype).eps ** (1 / 6)


def _loses_power(node: Any, order: int) -> bool:
    """Whether a norm of an even power has lost a derivative at an entry that is 0."""
    if type(node).__name__ not in _versions.NORMS:
        return False
    p, x = _versions.norm_of(node)
    return is_even(p) and p <= order and bool((x == 0).any())


def _recorded(order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> bool:
    """Without a graph the gradient of a determinant that is 0 is 0, whatever it should be."""
    return any(map(_versions.is_singular, nodes))


_GIVEN: dict[str, Row] = {
    "WeightNormInterfaceBackward0": Row(
        "weightnorm",
        "a second derivative through PyTorch's weight_norm is silently wrong (by 30-120 %). "
        f"{FUNCTION}; it then computes the norm from its definition.",
    ),
    "EmbeddingBackward0": Row(
        "embedding",
        "a second derivative through an embedding with scale_grad_by_freq=True is wrong in "
        "PyTorch: its second backward leaves the scaling out. Use scale_grad_by_freq=False (it "
        "scales gradients and is not part of the function).",
        lambda node, order: _versions.scales_by_frequency(node),
    ),
    "linear_cross_entropy": Row(
        "linearcrossentropy",
        "a second derivative through linear_cross_entropy in its chunked form (options=...) is "
        "missing: PyTorch silently treats its gradient as a constant. Call it without options, "
        "or write F.cross_entropy(F.linear(x, weight), target).",
    ),
    "LogcumsumexpBackward0": Row(
        "logcumsumexp",
        "a second derivative through PyTorch's logcumsumexp is silently wrong where an incoming "
        "gradient is 0, and a third one not finite: its backward takes the logarithm. "
        f"{FUNCTION}.",
    ),
    _messages.DET: Row(
        "linalgdet",
        "a derivative of order {order} through PyTorch's det has few correct digits, or none, at a "
        "singular or nearly singular matrix, as there is here (it divides by pivots, or by "
        f"differences of singular values). {FUNCTION}; it then multiplies out determinants of up "
        "to three rows. Expand a larger one along a row, as det = a * d - b * c for two rows.",
        _inverts,
    ),
    _messages.POWER: POWER,
}
"""What is said of a second derivative, and of those above."""

HIGHEST = 9
"""The order of derivative up to which bounds on digits grow."""

REMARKS: list[tuple[str, int, Remark]] = [
    *((node, 2, row) for node, row in {**THIRD, **_GIVEN}.items()),
    *((node, 2, row) for node, rows in FIRST.items() if node != ATTENTION for row in rows),
    (_messages.DET, 2, _recorded),
    *(
        ("SparseCooTensorWithDimsAndTensorsBackward0", 2, row)
        for row in _sparse("sparsecootensor", "sparse_coo_tensor")
    ),
    *(
        ("SparseCompressedTensorBackward0", 2, row)
        for row in _sparse("sparsecompressedtensor", "sparse_csr_tensor (or csc, bsr)")
    ),
    *(
        (
            node,
            least,
            Row(
                name.rpartition(".")[2],
                f"higher derivatives through PyTorch's {name} are wrong near 0 (its formula "
                "divides by x), and an entry of its argument is closer to 0 than {it:.1g}. "
                f"{FUNCTION}; it then uses the series of {name} there.",
                lambda node, order: bool((_versions.argument(node).abs() < _close(node)).any()),
                _close,
            ),
        )
        for node, (name, least) in _messages.DIVIDING.items()
    ),
    *((name, 2, _watch_spectrum) for name in _versions.SPECTRA),
    *(
        (
            name,
            2,
            Row(
                "norm",
                "the derivative of order {it:g} of PyTorch's {it:g}-norm is 0 where an entry is 0, "
                f"as one is here, even where the true derivative is not. {FUNCTION}, and use "
                "torch.linalg.vector_norm in it, or write x.pow({it:g}).sum().pow(1 / {it:g}).",
                _loses_power,
                lambda node: _versions.norm_of(node)[0],
            ),
        )
        for name in _versions.NORMS
    ),
    *((name, 2, SMALL) for name in (*_versions.NORMS, *_versions.DEVIATIONS)),
    *((name, 3, SMALL) for name in _versions.ROOTS if name not in _versions.DEVIATIONS),
    (
        "BatchNormWithUpdateBackward0",
        3,
        Row(
            "batchnormwithupdate",
            "a third derivative through torch's _batch_norm_with_update is silently wrong. Use "
            "F.batch_norm, which hodiff computes from its definition.",
        ),
    ),
]
"""A piece of a node's class name, the order of derivative from which it matters,
and what is done about it.
"""


def refuse_first(graph: _nodes.Survey, leaves: Sequence[Tensor]) -> bool:
    """Refuse a first derivative: each operation is blamed for itself,
    where it leads to one of `leaves`.
    """
    nodes = WRONG_AT_ONCE.among(graph)
    for name, rows in FIRST.items() if nodes else ():
        for row in rows:
            row(1, [node for node in nodes if type(node).__name__ == name], leaves)
    return any(type(node).__name__ == _messages.DET for node in nodes)


def changed_in_place(name: str) -> GraphError:
    """The error for an `f` that writes into its argument."""
    return GraphError(
        f"f changes its argument ({name}) in place, so its derivative with respect to the original "
        f"value is lost; begin f with x = x.clone()."
    )


def leftover(names: str) -> GraphError:
    """The error for a value of an evaluation that has ended, met again in another."""
    return GraphError(
        f"f uses a value that it kept from an earlier hodiff call{names}: it was computed from "
        f"that call's leaves, so here it would be a constant, and its part of the derivative would "
        f"be missing. Clear what f keeps between calls (a cache, a global, a list, a hidden "
        f"state), or compute it inside f each time; if a constant is meant, keep it detached."
    )


def warn_of_hooks() -> None:
    """Say that a hook takes part in every pass."""
    warnings.warn(
        "a tensor hook (or a module's backward hook) inside f changes gradients. It acts in each "
        "reverse pass, as in plain PyTorch, so a second derivative contains its change twice and "
        "is not the derivative of the first. Remove the hook for this call, or write what it does "
        "into f.",
        HodiffWarning,
        stacklevel=outside(),
    )


MIXING = _nodes.Rare(
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    of_which=_versions.is_training,
)
"""Batch norms in training mode."""


def warn_of_mixing(batch_ndim: int) -> None:
    """Say that samples are not independent."""
    warnings.warn(
        f"batch_ndim={batch_ndim} treats samples as independent, but f runs BatchNorm in training "
        "mode, which mixes them: the result is the derivative of the sum over the batch, "
        "not each sample's own. Use model.eval(), or another norm.",
        BatchMixingWarning,
        stacklevel=outside(),
    )
