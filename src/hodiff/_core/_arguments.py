"""Arguments that public functions share: their types, their spellings, their checks."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from hodiff._core import _settings, _tree, _versions
from hodiff._core._faults import interrupts
from hodiff.errors import GraphError, InputError

__all__ = [
    "Allowed",
    "Checkpoint",
    "ChunkSize",
    "Probes",
    "SupportsArray",
    "as_called",
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


F = TypeVar("F", bound=Callable[..., Any])


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
            from hodiff._core._elsewhere import Misfit, unmet

            raise Misfit(unmet(public, kwargs, str(error))) from None

    call.__module__ = package  # where `pickle` finds it
    return call  # pyright: ignore[reportReturnType]


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
    value: Any,
    name: str,
    *,
    least: float = -math.inf,
    below: float = math.inf,
    positive: bool = False,
    more: str = "",
) -> None:
    """Raise unless `value` is a finite number of at least `least`, or `positive`, and below
    `below`; `more` is said of what is expected.
    """
    least = math.ulp(0.0) if positive else least
    # As nearly always.
    if value.__class__ in (float, int) and least <= value <= LARGEST and value < below:
        return
    if not is_number(value) or not least <= value < below:
        bound = "" if least == -math.inf or positive else f" of at least {least}"
        bound += "" if below == math.inf else f", below {below:g}"
        number = "positive number" if positive else "number"
        raise InputError(f"{name}: got {shown(value)}, expected a {number}{bound}{more}.")


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


SMALL = 2**30
"""Bytes of a tensor that nobody need ask the machine about."""


def check_room(what: str, shape: Sequence[int], like: Tensor, way_out: str) -> None:
    """Raise for a tensor larger than the memory of its device, before PyTorch asks for that."""
    size = math.prod(shape) * like.element_size()
    if size > SMALL and size > (whole := memory_on(like.device)):
        raise InputError(
            f"{what} would hold {' x '.join(f'{side:,}' for side in shape)} numbers, "
            f"{size / 1e9:,.0f} GB, but {like.device} has {whole / 1e9:,.0f} GB. {way_out}"
        )


def memory_on(device: torch.device) -> float:
    """The bytes of memory of a device; infinite where nobody says."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return math.inf


def as_called(what: Any) -> Any:
    """A function as it is called: of a compiled module the one behind the wrapper, since compiled
    code has no second derivative, whose names and parameters are the ones people know.
    """
    if isinstance(what, nn.Module):
        return next(what.children(), what) if type(what).__name__ == "OptimizedModule" else what
    if isinstance(what, type) and issubclass(what, nn.Module):
        raise InputError(f"f: got the class {what.__name__}; give an instance of it.")
    return what


# --- what stands for a tensor where a vector is wanted --------------------------------------------


class SupportsArray(Protocol):
    """An array that NumPy can read, for the type checker."""

    def __array__(self) -> Any: ...


def check_dense(value: Tensor, name: str, advice: str = "") -> None:
    """Raise where a tensor is nested or sparse."""
    if value.is_nested or value.layout is not torch.strided:
        layout = "nested" if value.is_nested else str(value.layout)
        raise InputError(f"{name}: got a {layout} tensor; give a dense one{advice}.")


# --- parameters that are sharded over processes: recognized, and refused with what works instead --
# A gradient by shards is None in PyTorch, silently, and a model under `fully_shard` frees what a
# second pass needs. Whoever has such tensors has imported the module that defines them.


LOADED_BY = "torch.distributed.tensor"
"""The module without which there are no such tensors: who calls the checks asks for it first,
which costs nothing.
"""


WAY_OUT = (
    "hodiff.grad, value_and_grad, hvp, cross_hvp, HessianOperator and GaussNewtonOperator take "
    "sharded parameters. For other calls gather the shards once into a plain copy of the model "
    "(p.full_tensor() for each parameter p), and share the data through an operator's "
    "process_group=. The documentation has both, "
    "under 'Hessians of a sharded model'."
)


TENSORS = frozenset((Tensor, nn.Parameter))
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
