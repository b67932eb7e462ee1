"""Arguments that public functions share: their types, their spellings, their checks."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import sys
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from hodiff._core import _settings, _tree, _versions
from hodiff._core._faults import interrupts
from hodiff.errors import GraphError, HodiffError, InputError

__all__ = [
    "Allowed",
    "Checkpoint",
    "ChunkSize",
    "NoNumber",
    "Probes",
    "SupportsArray",
    "Unlike",
    "allowed",
    "check_arguments",
    "check_batch",
    "check_chunk_size",
    "check_container",
    "check_integer",
    "check_number",
    "check_option",
    "check_output",
    "check_real_tensor",
    "check_rows",
    "is_number",
    "is_set",
    "kind",
    "outside",
    "plural",
    "shown",
]

Allowed = Sequence[str | type] | str | type
"""`allow=`: the `autograd.Function` classes, or their names,
whose second derivative is accepted as it is.
"""

ChunkSize = int | Literal["auto"]
"""How many vectors one pass takes; `"auto"` bounds its memory."""

Checkpoint = bool | str
"""What of `f` runs again in each pass: nothing, its own checkpoints, the modules so named."""


Probes = Literal["rademacher", "gaussian"]
"""The law of random vectors v; E[v vᵀ] = I under both."""


def check_option(value: Any, vocabulary: Any, name: str) -> None:
    """Raise unless `value` is a word of the vocabulary, one of the `Literal`s above."""
    words = vocabulary.__args__
    # An array would compare by entries. (`type`: the tracer of 2.12 does not know a `__class__`.)
    if type(value) is not str or value not in words:
        *others, final = [f'"{word}"' for word in words]
        raise InputError(f"{name}: got {value!r}, expected {', '.join(others)} or {final}.")


class AllowedNames(tuple[str | type, ...]):
    """Names and classes that `allowed` has checked."""

    __slots__ = ()


def allowed(allow: Any) -> Sequence[str | type]:
    """`allow=` as a sequence; raise unless it holds names and classes."""
    if allow.__class__ is AllowedNames or (allow.__class__ is tuple and not allow):
        return allow
    names = (allow,) if isinstance(allow, (str, type)) else allow
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(
        isinstance(n, (str, type)) for n in names
    ):
        raise InputError(
            f"allow: got {kind(allow)}, expected names or classes of autograd.Functions."
        )
    return AllowedNames(names)


def is_set(value: Any, name: str) -> bool:
    """Whether a flag is on; raise for what is neither true nor false, as an array, or a word:
    "no" would be true.
    """
    if value is True or value is False:  # as nearly always
        return value
    try:
        if bool(value == bool(value)):
            return bool(value)
    except Exception as error:  # it is not a flag then, whatever it is
        if interrupts(error):
            raise
    raise InputError(f"{name}: got {shown(value)}, expected True or False.")


class NoAttribute(HodiffError, AttributeError):
    """A name that an object does not have: `hasattr` is False, and the error says what to write."""


class Unlike(ABC):  # noqa: B024
    """A value taken for a tensor or for another library's object:
    its errors say what to write instead.
    """

    def _instead(self, name: str) -> str:
        """The spelling to use for an attribute of this name."""
        keys = (f"{cls.__name__}.{end}" for cls in type(self).__mro__ for end in (name, "*"))
        return next(ELSEWHERE[key] for key in keys if key in ELSEWHERE)

    if not TYPE_CHECKING:  # a checker of types says it before anything runs

        def __getattr__(self, name: str) -> Any:
            """Names of other libraries, and slips."""
            # a property whose computation met such an error: that is the one to show
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            words = f"{kind(self)} has no attribute {name!r}: {self._instead(name)}"
            raise NoAttribute(words, name=name, obj=None)  # Python would add names that are near

        def __format__(self, spec: str) -> str:
            """Refuse the format of a number."""
            if spec:
                raise InputError(
                    f"{kind(self)} has no format {spec!r}: {self._instead('__format__')}"
                )
            return str(self)

        def __len__(self) -> NoReturn:
            """PyTorch and NumPy ask it of sequences."""
            raise TypeError(f"{kind(self)} has no length: {self._instead('__len__')}")

        def __bool__(self) -> bool:
            """Without a length it is an object as any other."""
            return True


class NoNumber(Unlike):
    """A record whose number is its value: arithmetic with the record itself is a slip."""

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """NumPy would make an array that holds the record, and fail later and elsewhere."""
        raise TypeError(f"{kind(self)} is not an array: {self._instead('')}")

    def _instead(self, name: str) -> str:
        return f"it is a record with fields .{', .'.join(vars(self))}."

    def _refuse(self, *others: object) -> NoReturn:
        raise InputError(f"{kind(self)} is not a number: {self._instead('')}")

    if not TYPE_CHECKING:
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
        __rtruediv__ = __neg__ = __matmul__ = __rmatmul__ = __pow__ = __float__ = _refuse
        __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __abs__ = __int__ = __round__ = _refuse
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            """Whether it is the same record; a number is no record, and `False` would hide that."""
            return self._refuse() if isinstance(other, (numbers.Number, Tensor)) else self is other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse the record as an argument of PyTorch."""
        given = _tree.flatten([*args, *(kwargs or {}).values()])[0]
        next(value for value in given if isinstance(value, NoNumber))._refuse()


# --- names, keywords and positions of other libraries: one table, and who asks it -----------------


_WAYS = (
    # names of the package
    ("hodiff.", "argmin root fixed_point", "write hodiff.implicit.{}."),
    (
        "hodiff.",
        "explain inspect lifetime monitor predict release shared watch",
        "write hodiff.graph.{}.",
    ),
    ("hodiff.", "color plan_hessian plan_jacobian sparsity_pattern", "write hodiff.sparse.{}."),
    ("hodiff.", "SGD Adagrad Adam AdamW RMSprop", "write hodiff.rules.{}."),
    (
        "hodiff.",
        "rules.Lion rules.LAMB rules.Muon rules.NAdam rules.RAdam rules.Adamax rules.LBFGS",
        "a rule is also any function (params, grads, state, step) -> (params, state).",
    ),
    ("hodiff.", "report", "write hodiff.jets.{}."),
    ("hodiff.", "convergence", "write hodiff.plotting.{}."),
    ("hodiff.", "gradient autograd", "write hodiff.grad(f, x)."),
    ("hodiff.", "grad_and_value", "write hodiff.value_and_grad(f, x), the value first."),
    ("hodiff.", "jacrev jacfwd jac", "write hodiff.jacobian(f, x)."),
    ("hodiff.", "jacobian_vector_product linearize", "write hodiff.jvp(f, x, v)."),
    ("hodiff.", "vector_jacobian_product", "write hodiff.vjp(f, x, u)."),
    ("hodiff.", "vhp", "write hodiff.hvp(f, x, v): a Hessian is symmetric."),
    ("hodiff.", "hessian_vector_product hessian_vector", "write hodiff.hvp(f, x, v)."),
    ("hodiff.", "vmap", "write hodiff.grad(f, x, batch_ndim=1), which other calls take, too."),
    ("hodiff.", "functional_call make_functional", "give the module itself: f(model)."),
    ("hodiff.", "derivative diff", "write hodiff.nth_derivative(f, x, n), or hodiff.partial."),
    ("hodiff.", "per_example_grad BatchGrad", "write hodiff.per_sample_grad(f, model, batch)."),
    ("hodiff.", "ntk empirical_ntk", "write hodiff.gram(f, model, batch)."),
    ("hodiff.", "div jacobian_trace", "write hodiff.divergence(f, x)."),
    ("hodiff.", "laplace forward_laplacian", "write hodiff.laplacian(f, x)."),
    ("hodiff.", "gradcheck gradgradcheck", "write hodiff.check_derivatives(f, x)."),
    ("hodiff.", "compile", "write hodiff.compile_step(loss, model)."),
    (
        "hodiff.",
        "GradientPenalty gp gp_loss",
        "write hodiff.wgan_gp_penalty(D, real, fake), or hodiff.gradient_penalty(D, x).",
    ),
    (
        "hodiff.",
        "HessianLinearOperator HVPOperator Hessian",
        "write hodiff.HessianOperator(f, model).",
    ),
    (
        "hodiff.",
        "GGNLinearOperator GGN GGNOperator",
        "write hodiff.GaussNewtonOperator(predict, loss, model, data=data).",
    ),
    (
        "hodiff.",
        "FisherMCLinearOperator EFLinearOperator FIM Fisher",
        "write hodiff.FisherOperator(predict, loss, model, data=data, kind='exact').",
    ),
    (
        "hodiff.",
        "KFACLinearOperator KFAC EKFACLinearOperator Shampoo",
        "hodiff approximates no curvature by factors; hodiff.GaussNewtonOperator is exact.",
    ),
    (
        "hodiff.",
        "eigenvalues eigenvectors eigs eigh eigvalsh lobpcg power_iteration "
        "compute_hessian_eigenthings",
        "write hodiff.eigsh(hodiff.HessianOperator(f, model), k).",
    ),
    ("hodiff.", "lanczos slq density", "write hodiff.spectral_density(H), or hodiff.eigsh(H, k)."),
    (
        "hodiff.",
        "hutchinson_trace hutchinson hutchpp xtrace hessian_trace",
        "write hodiff.trace(hodiff.HessianOperator(f, model)).",
    ),
    ("hodiff.", "hutchinson_diag diag xdiag", "write hodiff.diagonal(H)."),
    (
        "hodiff.",
        "cg conjugate_gradient minres ihvp inverse_hvp inverse lissa neumann",
        "write hodiff.solve(H, b) for the inverse of an operator times b.",
    ),
    ("hodiff.", "slogdet log_det", "write hodiff.logdet(H)."),
    ("hodiff.", "LM least_squares curve_fit", "write hodiff.LevenbergMarquardt(residuals, model)."),
    ("hodiff.", "custom_root", "write hodiff.implicit.root(F, x)."),
    ("hodiff.", "custom_fixed_point", "write hodiff.implicit.fixed_point(g, x)."),
    # attributes of values, by their class; * is any other
    (
        "LinearOperator.",
        "toarray todense to_dense numpy tolist item A",
        "its matrix is the tensor H.dense().",
    ),
    (
        "LinearOperator.",
        "eigenvalues eigvals eigvalsh eig eigh eigs eigsh",
        "write hodiff.eigsh(H, k).",
    ),
    ("LinearOperator.", "diag diagonal", "write hodiff.diagonal(H)."),
    ("LinearOperator.", "trace", "write hodiff.trace(H)."),
    ("LinearOperator.", "det slogdet logdet", "write hodiff.logdet(H)."),
    (
        "LinearOperator.",
        "inverse inv pinv solve cholesky",
        "write hodiff.solve(H, b) for its inverse times b.",
    ),
    ("LinearOperator.", "mv mm matmul matmat dot apply", "write H @ v."),
    ("LinearOperator.", "t transpose mT H adjoint", "write H.T."),
    ("LinearOperator.", "norm", "write H.dense().norm()."),
    ("LinearOperator.", "size ndim dim numel __len__", "its size is H.shape."),
    (
        "LinearOperator.",
        "to cpu cuda double float half",
        "it has the dtype and device of its point; convert that, and make it again.",
    ),
    (
        "LinearOperator.",
        "detach requires_grad backward",
        "its products are detached; for derivatives use hodiff.hvp, jvp or vjp.",
    ),
    (
        "LinearOperator.",
        "value gradient",
        "only the Hessian and Gauss-Newton operators evaluate a function.",
    ),
    (
        "LinearOperator.",
        "*",
        "write H @ v for a product; hodiff.eigsh, trace, diagonal, logdet and solve take H.",
    ),
    ("Plan.", "*", "plan(x) is the matrix at x, plan.values(x) are its entries."),
    (
        "CompiledStep.",
        "*",
        "value = step(*batch) is the loss, and value.backward() its gradient; parameters are those "
        "of the model.",
    ),
    # keywords: what ends in = is ours, the first that a function has; else a sentence
    ("", "tol= atol= tolerance= epsilon= eps=", "rtol= gradient_tol="),
    ("", "maxiter= max_iter= num_iters= iters= n_iter=", "iterations= products= steps="),
    ("", "n_samples= num_samples= num_matvecs= n_v= num_vecs= num_probes=", "samples="),
    ("", "bins= num_bins= grid=", "points="),
    ("", "sigma= bandwidth=", "width="),
    ("", "distribution= sampler=", "probes="),
    ("", "loader= dataloader= dataset=", "data="),
    ("", "num_data= batch_size_fn=", "batch_weight="),
    ("", "progressbar= verbose= disp=", "progress="),
    ("", "x0= init= init_x=", "start="),
    ("", "M= precond= P=", "preconditioner="),
    ("", "lam= mu= jitter=", "damping= shift= weight="),
    ("", "lambda_gp= lambda_= gp_weight= gp_lambda= coef= scale=", "weight= gamma="),
    ("", "p= norm_type=", "ord="),
    ("", "k= center=", "target="),
    ("", "vectorize= chunks= batch_size=", "chunk_size="),
    ("", "return_out= outputs=", "return_outputs="),
    ("", "mode= strategy= outer_jacobian_strategy=", "method= backend="),
    (
        "",
        "seed= key= rng= random_state=",
        "Random vectors come from generator=torch.Generator().manual_seed(0), or from "
        "torch.manual_seed.",
    ),
    (
        "",
        "argnums= argnum= inputs= wrt=",
        "The derivative is by the argument after the function; for several give one tuple, "
        "(x, y), which the function takes as one argument.",
    ),
    (
        "",
        "allow_unused= materialize_grads=",
        "Zeros stand for what does not matter where another tensor does; strict=False gives them "
        "always.",
    ),
    ("", "grad_outputs= grad_output= cotangents=", "For a vector in front: hodiff.vjp(f, x, u)."),
    (
        "",
        "retain_graph= keep_graph= free_graph=",
        "Given a function, hodiff builds the graph and frees it; given a tensor, the graph is "
        "yours and stays.",
    ),
    (
        "",
        "device= dtype=",
        "Results have the device and dtype of the point: convert that.",
    ),
    ("", "lr= learning_rate=", "The step is chosen by damping=, which needs no rate."),
    ("unroll.", "lr= learning_rate= optimizer=", "The rule has it: hodiff.rules.SGD(lr=0.1)."),
    ("compile_step.", "mode= fullgraph= dynamic=", "A step is always one graph; backend= is all."),
    ("compile_step.", "optimizer=", "The loop steps it, after value.backward()."),
    ("eigsh.", "top_n= n= num_eigenthings= n_components=", "Write hodiff.eigsh(H, k)."),
    ("eigsh.", "maxiter= max_iter= num_iters=", "products="),
    (
        "partial.",
        "i= j= dim= dims=",
        "Write hodiff.partial(f, x, (0, 1)) for the second by x0, x1.",
    ),
    # positions; what is missing
    ("", "'x'", "hodiff returns values, not functions, so the point is given as well."),
    ("", "'v' 'u'", "hodiff returns values, not functions, so the vector is given as well."),
    (
        "",
        "grad() value_and_grad() jacobian() hessian() hessian_diagonal() value_grad_and_hessian()",
        "Several points are one tuple, (x, y), which f takes as one argument; data for f go to "
        "args=(y,).",
    ),
    ("", "hvp() jvp() vjp()", "Data for f go to args=(y,)."),
    ("", "per_sample_grad() gram()", "The batch is one argument, which f receives: (x, y)."),
    (
        "",
        "gradient_penalty()",
        "Between two batches: hodiff.wgan_gp_penalty(D, real, fake), with its weight=10.",
    ),
    ("", "wgan_gp_penalty() dragan_penalty()", "The factor is weight=10, labels args=(labels,)."),
    ("", "r1_penalty() r2_penalty()", "The factor is gamma=10, and labels are args=(labels,)."),
    (
        "",
        "laplacian() value_grad_and_laplacian() divergence() biharmonic() curl()",
        "The coordinates are one tensor, (N, D); columns that are not differentiated go to "
        "args=(t,).",
    ),
    ("", "partial()", "The coordinates to differentiate by are one tuple: (0, 1)."),
    (
        "",
        "eigsh() trace() diagonal() logdet() spectral_density() solve() nystrom()",
        "An operator comes first: H = hodiff.HessianOperator(loss, model).",
    ),
    ("", "multi_grad()", "The losses are one list: hodiff.multi_grad([a, b], model)."),
    (
        "",
        "argmin() root() fixed_point()",
        "Solve first, with any solver: the solution is the second argument.",
    ),
    (
        "",
        "LevenbergMarquardt()",
        "Its residuals are a function: hodiff.LevenbergMarquardt(lambda model, batch: model(batch) "
        "- y, model).",
    ),
    (
        "",
        "GaussNewtonOperator() FisherOperator()",
        "Outputs and loss are apart: predict(model, batch), loss(outputs, targets), model.",
    ),
    ("", "HessianOperator() JacobianOperator()", "A function, then the model: (f, model)."),
    ("", "monitor()", "Each root has a name of yours: hodiff.graph.monitor(loss=loss)."),
    ("", "compile_step()", "The model comes second: hodiff.compile_step(loss, model)."),
    ("", "unroll()", "A function, the start, a rule, a number: (f, x, hodiff.rules.SGD(0.1), 10)."),
    (
        "",
        "twice_differentiable() watch() lifetime()",
        "It is a context: a with block holds what it is for.",
    ),
)
ELSEWHERE = {f"{at}{each}": way.format(each) for at, names, way in _WAYS for each in names.split()}
"""What to write, by a name, keyword or position of other libraries."""

F = TypeVar("F", bound=Callable[..., Any])


class Misfit(InputError, TypeError):
    """Arguments that a signature does not have, for which Python raises a `TypeError`."""


def taught(public: F, package: str) -> F:
    """A public function that says what to write where its signature is not met; a class, whose
    `__init__` does.
    """
    if inspect.isclass(public) and "__init__" in vars(public):
        public.__init__ = taught(public.__init__, public.__module__)
    if inspect.isclass(public) or hasattr(public, "__wrapped__"):
        return public  # pyright: ignore[reportReturnType]

    @functools.wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return public(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # of what it ran
            raise Misfit(_unmet(public, kwargs, str(error))) from None

    call.__module__ = package  # where `pickle` finds it
    return call  # pyright: ignore[reportReturnType]


def _unmet(public: Callable[..., Any], kwargs: Mapping[str, Any], reason: str) -> str:
    """The words for arguments that a signature does not have, of which Python gives the reason."""
    parameters = inspect.signature(public).parameters
    name = public.__qualname__.removesuffix(".__init__")
    named = [f"{each}=" for each, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    given = (
        "**" * (p.kind is p.VAR_KEYWORD) + each
        for each, p in parameters.items()
        if f"{each}=" not in named and each != "self"
    )
    word = next((f"{each}=" for each in kwargs if each not in parameters), "")
    reason = reason.partition("() ")[2].partition(". Did")[0]
    missing = reason.partition(": ")[2].partition(" ")[0].strip(",")
    keys = (f"{name}.{word}", word) if word else (missing, f"{name}()")
    way = next((ELSEWHERE[key] for key in keys if key in ELSEWHERE), "=")
    if way.endswith("="):
        ours = [each for each in way.split() if each in named]
        way = f"Write {ours[0]}." if ours else f"Its keywords: {', '.join(named)}."
    package = "hodiff" if name in dir(sys.modules["hodiff"]) else public.__module__.split("._")[0]
    return f"{package}.{name}({', '.join(given)}): {reason}. {way}"


# --- checks, made before anything is computed -----------------------------------------------------


LARGEST = 2**63 - 1
"""The largest integer that PyTorch takes."""


ACCEPTED = (
    "a tensor, a container of tensors (tuple, list, dict, nested), an nn.Module, "
    "or hodiff.select(module, ...)"
)


def check_real_tensor(value: Any, name: str, *, shards: bool = False) -> None:
    """Raise unless `value` is a strided, real floating-point tensor; a DTensor with `shards`."""
    if value.__class__ is not Tensor and not isinstance(value, Tensor):
        raise InputError(f"{name}{_not_a_tensor(value)}")
    if not shards and value.__class__ not in TENSORS and is_dtensor(value):
        raise InputError(f"{name} is a DTensor, of which each process holds a shard. {WAY_OUT}")
    if value.dtype.is_floating_point:
        if value.dtype.itemsize == 1:
            raise InputError(
                f"{name} has dtype {value.dtype}, a storage-only dtype; convert it (x.half())."
            )
        if value.is_meta:
            if value.__class__.__module__.startswith("hodiff."):  # a jet, of which no rule runs
                raise InputError(
                    "PyTorch's overrides are switched off here (DisableTorchFunctionSubclass); "
                    "this call needs them. Call it outside."
                )
            raise InputError(
                f"{name} is on the meta device, whose tensors hold no numbers; give a real one."
            )
        if value.layout is not torch.strided or value.is_nested:  # asked here too: it saves a call
            check_dense(value, name, " (x.to_dense(), or its .values())")
        if value.__class__ not in TENSORS:
            check_class(value, name)
        return
    if value.is_complex():
        raise InputError(
            f"{name} is complex ({value.dtype}); hodiff differentiates with respect to real "
            f"variables. Pass torch.view_as_real(z) and let f begin with "
            f"torch.view_as_complex(...)."
        )
    raise InputError(
        f"{name} has dtype {value.dtype}; derivatives need a real floating-point tensor. "
        f"Convert it (x.double()), or pass it to f through args= or kwargs= if it is data."
    )


def check_class(value: Tensor, name: str) -> None:
    """Raise for a tensor of a class that computes by itself: a mask, a wrapper, a stand-in."""
    stand_ins = "torch._subclasses." if _settings.tracing() else "hodiff."
    known = ("hodiff.", "torch.distributed.", stand_ins)
    if not _versions.has_numbers(value) and not value.__class__.__module__.startswith(known):
        raise InputError(
            f"{name}: got {kind(value)}, a tensor whose class computes by itself or holds no "
            f"numbers. Use an ordinary tensor; f may make such a one of it, and back."
        )


def _not_a_tensor(value: Any) -> str:
    if inspect.isgenerator(value) or hasattr(value, "__next__"):
        return (
            " is a generator (model.parameters()?), which can be read only once. Pass the module "
            "itself; f then receives the module, and results are a dict by parameter name."
        )
    if isinstance(value, (bool, int, float)):
        return (
            f": got the {type(value).__name__} {value!r}, expected a floating-point tensor: "
            f"torch.tensor({float(value)})."
        )
    if isinstance(value, nn.Module):
        return (
            f": got the module {type(value).__name__}, expected a tensor; the function comes first."
        )
    if callable(value) and not isinstance(value, type):
        return (
            f": got a function; the function comes first and the point second. Expected {ACCEPTED}."
        )
    if type(value).__module__ == "numpy":
        return f": got {kind(value)}; convert it: torch.from_numpy(array)."
    return f": got {kind(value)}, expected {ACCEPTED}."


def check_integer(value: Any, name: str, *, least: int) -> int:
    """Raise unless `value` is an int of at least `least`."""
    if value.__class__ is int and least <= value <= LARGEST:  # as nearly always
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        size = value.__class__ is int and value > LARGEST
        bound = "at most 64 bits" if size else f"at least {least}"
        raise InputError(f"{name}: got {shown(value)}, expected an integer of {bound}.")
    return value


_SHORT = (str, int, float, tuple, type(None))


def shown(value: Any) -> str:
    """A value for a sentence: as it is written where that is short, else its type."""
    return repr(value) if isinstance(value, _SHORT) else kind(value)


def kind(value: object) -> str:
    """The kind of a value, for a sentence: "None", "an int", "an EigenRecord", "a list of 3"."""
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    name = "function" if inspect.isroutine(value) else type(value).__name__
    if type(value).__module__.startswith("numpy"):
        return f"a NumPy {name.removeprefix('nd')}"
    spelled = name[:2].isupper() and name[0] in "FHLMNRSX"  # as in "an LSTM"
    article = "an" if spelled or name[0] in "AEIOaeio" else "a"
    return f"{article} {name}" + (
        f" of {len(value)}" if isinstance(value, (list, tuple, set)) else ""
    )


def plural(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite float, or an int that PyTorch takes."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def check_number(
    value: Any, name: str, *, least: float = -math.inf, below: float = math.inf
) -> None:
    """Raise unless `value` is a finite number of at least `least`, and below `below`."""
    # As nearly always.
    if value.__class__ in (float, int) and least <= value <= LARGEST and value < below:
        return
    if not is_number(value) or not least <= value < below:
        bound = "" if least == -math.inf else f" of at least {least}"
        bound += "" if below == math.inf else f", below {below:g}"
        raise InputError(f"{name}: got {shown(value)}, expected a number{bound}.")


def check_chunk_size(value: int | str) -> int | None:
    """The chunk size as an int, or None for `"auto"`."""
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f'chunk_size: got {shown(value)}, expected an integer of at least 1, or "auto".'
        )
    return value


_HINTS = {
    "tuple": " Return the loss alone; to return (loss, extra), pass has_aux=True, which "
    "hodiff.grad, value_and_grad, hvp, hessian, hessian_diagonal and the fields take.",
    "function": " Call what it returns.",
    "NoneType": " Does it end without a return statement?",
}


def check_output(value: Any, name: str = "f(x)") -> Tensor:
    """Raise unless `value`, an output of `f`, is a real floating-point tensor."""
    if value.__class__ is not Tensor and not isinstance(value, Tensor):
        hint = _HINTS.get("tuple" if isinstance(value, tuple) else type(value).__name__, "")
        raise InputError(f"f returned {kind(value)}, expected a tensor.{hint}")
    if value.dtype.is_floating_point:
        if value.layout is not torch.strided or value.is_nested:
            layout, way_out = (
                ("nested", ".values()") if value.is_nested else (str(value.layout), ".to_dense()")
            )
            raise InputError(
                f"f: {name} is a {layout} tensor; return a dense one (its {way_out}), "
                "or a sum of it."
            )
        if value.__class__ not in TENSORS:
            check_class(value, f"f: {name}")
        return value
    if value.is_complex():
        raise InputError(
            f"f: {name} is complex; return a real quantity (its .real, .abs(), or view_as_real)."
        )
    raise InputError(
        f"f: {name} has dtype {value.dtype}, which has no derivative; "
        "return a floating-point tensor."
    )


def check_scalars(output: Tensor, batch_ndim: int, batch: torch.Size) -> None:
    """Raise unless `output` is one element, or one element per sample of `batch`."""
    if batch_ndim == 0:
        if output.numel() != 1:
            raise InputError(
                f"f returned shape {tuple(output.shape)}, expected one element. Reduce it (.sum(), "
                f".mean()), or take the derivatives of all outputs: hodiff.jacobian "
                f"(hodiff.sparse_jacobian). If each row is an independent sample, pass "
                f"batch_ndim=1 to a function that takes it."
            )
        return
    if tuple(output.shape[:batch_ndim]) != tuple(batch) or output.numel() != batch.numel():
        averaged = (
            " (a mean over the batch would scale every gradient by 1/N)" if not output.ndim else ""
        )
        more = output.ndim - batch_ndim
        total = "sum(-1)" if more == 1 else f"flatten({batch_ndim}).sum(-1)"
        way_out = (
            f" For several outputs per sample, take one at a time (lambda x: f(x)[..., "
            f"{', '.join('0' * more)}]), reduce them (lambda x: f(x).{total}), or use "
            f"hodiff.jacobian(f, x, batch_ndim={batch_ndim})."
            if tuple(output.shape[:batch_ndim]) == tuple(batch)
            else " Return one number per sample, not reduced over the batch. "
            "(A single sample needs a batch dimension: x[None].)"
        )
        raise InputError(
            f"f returned shape {tuple(output.shape)}{averaged}, expected one element per sample: "
            f"{tuple(batch)}, or {tuple(batch)} followed by ones, for "
            f"batch_ndim={batch_ndim}.{way_out}"
        )


def check_batch(tensors: list[Tensor], names: list[str], batch_ndim: int) -> torch.Size:
    """The shape of the batch that all `tensors` share in their leading dimensions."""
    check_integer(batch_ndim, "batch_ndim", least=0)
    first = tensors[0].shape[:batch_ndim]
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.ndim < batch_ndim:
            raise InputError(
                f"{name} has shape {tuple(tensor.shape)}, "
                f"too few dimensions for batch_ndim={batch_ndim}."
            )
        if tensor.shape[:batch_ndim] != first:
            raise InputError(
                f"{name} has batch shape {tuple(tensor.shape[:batch_ndim])}, but {names[0]} has "
                f"{tuple(first)}; with batch_ndim={batch_ndim} all must agree. The function comes "
                f"first and the samples second; parameters are not samples: use batch_ndim=0 for "
                f"them."
            )
    return first


def check_rows(value: Tensor, batch: Sequence[int], returned: str = "f returned") -> None:
    """Raise unless a tensor, of whatever the words say, has the batch in front."""
    if tuple(value.shape[: len(batch)]) != tuple(batch):
        raise InputError(
            f"{returned} shape {tuple(value.shape)}; with batch_ndim={len(batch)} the shape must "
            f"begin with {tuple(batch)}, one row per sample. (A single point is batch_ndim=0.)"
        )


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame runs a module of this package; `hodiff_experiments` is the user's."""
    return f"{frame.f_globals.get('__name__', '')}.".startswith("hodiff.")


def outside() -> int:
    """The stack level, as `warnings` counts, of the first frame that is not ours."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    return level


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise unless `args` is a tuple (or list) and `kwargs` a mapping."""
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args: got {kind(args)}, expected a tuple of arguments for f: args=(data,)."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs: got {kind(kwargs)}, expected a dict of keyword arguments for f.")
    for name in kwargs or ():
        if not isinstance(name, str):
            raise InputError(
                f"kwargs: got {kind(name)} as a key, expected names of arguments of f."
            )


def check_container(tree: _tree.Tree, count: int, name: str) -> None:
    """Raise for an empty container."""
    if not count:
        raise InputError(
            f"{name}: got {_tree.describe(tree)}, which holds no tensor; expected {ACCEPTED}."
        )


# --- what stands for a tensor where a vector is wanted --------------------------------------------


class SupportsArray(Protocol):
    """An array that NumPy can read, for the type checker."""

    def __array__(self) -> Any: ...


def check_dense(value: Tensor, name: str, advice: str = "") -> None:
    """Raise where a tensor is nested or sparse."""
    if value.is_nested or value.layout is not torch.strided:
        layout = "nested" if value.is_nested else str(value.layout)
        raise InputError(f"{name}: got a {layout} tensor; give a dense one{advice}.")


def as_tensors(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Any:
    """NumPy arrays, also in a container, and lists of numbers as tensors;
    anything else as it is.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            check_dense(value, name)
        return value
    if isinstance(value, Mapping) and not isinstance(value, dict):
        value = dict(value)
    if _is_array(value) or _is_numbers(value):
        return _tensor(value, dtype, device, name)
    if _tree.is_container(value) and any(map(_is_array, _tree.flatten(value, name)[0])):
        return _tree.tree_map(
            lambda leaf: _tensor(leaf, dtype, device, name) if _is_array(leaf) else leaf, value
        )
    return value


def tree_of_listed_leaves(value: Any, tree: _tree.Tree, number: int) -> _tree.Tree:
    """The structure of a list (or tuple) of the leaves in the order of the point,
    where it is no such point.
    """
    if not isinstance(value, (list, tuple)) or len(value) != number:
        return None
    if not all(isinstance(part, Tensor) for part in value):
        return None
    _, _, leaves = _tree.flatten(value)
    return leaves if _tree.difference(tree, leaves, "") else None


def _tensor(value: Any, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """Numbers from elsewhere, copied, in the precision of flat vectors."""
    if _is_array(value):
        if value.dtype.kind not in "fiu":
            raise InputError(f"{name}: got an array of {value.dtype}, expected real numbers.")
        double = dtype is torch.float64
        value = torch.from_numpy(
            value.astype("float64" if double else "float32", order="C", copy=True)
        )
        return value.to(device, dtype)
    try:
        return torch.tensor(value, dtype=dtype, device=device)
    except ValueError as error:
        raise InputError(
            f"{name}: got a nested list whose rows differ in length ({error})."
        ) from error


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # who has an array has imported it
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_numbers(value: Any, depth: int = 0) -> bool:
    """Whether this is a list of numbers, or of such lists, and no list in itself."""
    if not isinstance(value, (list, tuple)) or not value or depth > _tree.DEEPEST:
        return False
    return all(
        _is_numbers(item, depth + 1) or (isinstance(item, numbers.Real) and type(item) is not bool)
        for item in value
    )


# --- parameters that are sharded over processes: recognized, and refused with what works instead --
# A gradient by shards is None in PyTorch, silently, and a model under `fully_shard` frees what a
# second pass needs. Whoever has such tensors has imported the module that defines them.


LOADED_BY = "torch.distributed.tensor"
"""The module without which there are no such tensors: who calls the checks asks for it first,
which costs nothing.
"""


def may_be_shared() -> bool:
    """Whether there may be modules that belong to several processes:
    what makes them has been loaded.
    """
    return LOADED_BY in sys.modules or _versions.REPLICATED_BY in sys.modules


WAY_OUT = (
    "hodiff.grad, value_and_grad, hvp, cross_hvp, HessianOperator and GaussNewtonOperator take "
    "sharded parameters. For other calls gather the shards once into a plain copy of the model "
    "(p.full_tensor() for each parameter p), and share the data through an operator's "
    "process_group=. The documentation has both, "
    "under 'Hessians of a sharded model'."
)


TENSORS = frozenset((Tensor, nn.Parameter))
WHOLE: set[type] = {*TENSORS, type(None)}
"""Classes of tensors and modules that are known to be nobody's shards."""


def check_vectors(value: Any, name: str) -> None:
    """Raise for vectors of such a class, DTensors among them, alone or in a container."""
    if TENSORS.issuperset(map(type, value.values() if isinstance(value, dict) else (value,))):
        return
    for leaf in _tree.flatten(value, name)[0]:
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            check_class(leaf, name)
        if is_dtensor(leaf):
            raise InputError(
                f"{name} is a DTensor, of which each process holds a shard, but the point is an "
                f"ordinary tensor. Give the full tensor, v.full_tensor(), which is the same on "
                f"every process."
            )


def check_modules(modules: Iterable[nn.Module], name: str, *, shards: bool = False) -> None:
    """Raise for a module under `fully_shard`, or one that has DTensors for parameters.

    With `shards` only for what no call takes.
    """
    for module in modules:
        if module.__class__ not in WHOLE:
            _check_class(module, name, shards)
        for path, parameter in module._parameters.items():
            if parameter.__class__ not in WHOLE and not shards and is_dtensor(parameter):
                raise InputError(
                    f"{name}: the parameter {path!r} is a DTensor, sharded over processes. "
                    f"{WAY_OUT}"
                )


def _check_class(module: nn.Module, name: str, shards: bool) -> None:
    kind = module.__class__
    replicated = any(
        base.__module__ == _versions.REPLICATED_BY for base in kind.__mro__
    )  # each such module has its own class
    if (
        replicated
        and not sys.modules[_versions.REPLICATED_BY].replicate.state(module).has_initialized
    ):
        raise InputError(
            f"{name}: a module under torch.distributed's replicate() has not run yet. Its first "
            f"forward pass registers its parameters and buffers, and writes into them, so it may "
            f"not see ours: run it once before, model(x)."
        )
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if shards and issubclass(kind, FSDPModule):
            return
        if issubclass(kind, (FSDPModule, FullyShardedDataParallel)):
            plain = next(
                (k.__name__ for k in kind.__mro__ if not k.__name__.startswith(("FSDP", "Fully"))),
                "",
            )
            raise InputError(
                f"{name}: {plain} is sharded (fully_shard), and its parameters are freed between "
                f"passes, which this call does not serve. {WAY_OUT}"
            )
    WHOLE.add(kind)


NODE = "RegisterPostBackwardFunction"
"""The Function by which `fully_shard` notices, in the first pass,
that a module's parameters may be freed.
"""


def freed() -> GraphError:
    """The error for a second pass over a graph that needs such parameters:
    PyTorch may end the process there.
    """
    return GraphError.about(
        "the memory of a tensor that the graph needs is freed between passes, "
        "so there is no second derivative. A model that is sharded over processes (fully_shard) "
        "does that: compute the tensor with a plain copy of it (p.full_tensor() for each parameter "
        "p); the documentation has more, under 'Several processes'. Reversible blocks do it, too: "
        "use plain ones."
    )


def is_dtensor(value: Any) -> bool:
    """Whether a tensor is sharded over processes."""
    if LOADED_BY not in sys.modules:
        return False
    # which waits where another thread has only begun to load it
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
