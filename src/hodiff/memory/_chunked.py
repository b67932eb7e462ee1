"""The common part of our kernels: Functions whose results are made chunk by chunk,
of tensors that they serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff._core import _call, _settings, _versions
from hodiff._core._versions import uncompiled

# --- what kernels and blocks ask of PyTorch by private names --------------------------------------

_torch: Any = torch


def fused_attention(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's kernel for processors, which gives the logarithms of its sums as well."""
    return _torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)


def fused_attention_backward(*args: Any, **kwargs: Any) -> Any:
    """The derivative of that kernel."""
    return _torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, **kwargs)


def is_in_a_batch_of_passes(x: Any) -> bool:
    """Whether a tensor is of PyTorch's older `vmap`, that of `is_grads_batched`."""
    return isinstance(x, Tensor) and _torch._C._functorch.is_legacy_batchedtensor(x)


def is_compiled() -> bool:
    """Whether compiled code runs, which has first derivatives alone."""
    return _torch._guards.TracingContext.try_get() is not None


SIZE = 2**18
"""The elements of one temporary of a chunk: those of a few stay in the processor's cache."""

BIG = 2**24
"""Those on other devices, where each operation costs a launch."""

PLAIN = (Tensor, torch.nn.Parameter)

Tensors = tuple[Tensor | None, ...]


class Chunked(Function):
    """A `Function` of tensors, and last of one opaque object. Under `torch.vmap` it runs by sample.

    (A tuple of options would get dimensions of its own from `torch.vmap`.) Absent cotangents are
    None.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep tracers out: below a compiled caller's passes the Function runs as it is."""
        super().__init_subclass__(**kwargs)
        for name in ("backward", "jvp"):
            setattr(cls, name, staticmethod(_by_sample(getattr(cls, name))))
        for name in ("forward", "backward", "jvp", "setup_context"):
            uncompiled(getattr(cls, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the arguments, for a pass or for a tangent."""
        *tensors, ctx.form = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @classmethod
    def vmap(  # pyright: ignore[reportIncompatibleMethodOverride] - of the class that is asked
        cls, info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[Any, Any]:
        """Each sample by itself: as fast as a batch of them, without expanded copies."""
        results = _stacked(cls.apply, info.batch_size, in_dims, args)
        if isinstance(results, Tensor):
            return results, 0
        return results, tuple(None if result is None else 0 for result in results)


def _stacked(
    function: Callable[..., Any],
    size: int,
    dims: Sequence[int | None],
    args: Sequence[Any],
) -> Any:
    """The results of all samples, along a first dimension."""
    made: list[Any] = []
    for at in range(size):
        pairs = zip(args, dims, strict=True)
        made += [function(*(x if dim is None else x.select(dim, at) for x, dim in pairs))]
    if isinstance(made[0], Tensor):
        return torch.stack(made)
    each = zip(*made, strict=True)
    return tuple(None if parts[0] is None else torch.stack(parts) for parts in each)


def _by_sample(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """A derivative of something; below `is_grads_batched`, which has few rules, it runs by sample.

    The level is looked for: the thread of a pass does not know it. A tensor that is not of a level
    gets an expanded dimension there, of the size that is asked for: 0.
    """

    def call(ctx: Any, *given: Any) -> Any:
        if all(x is None for x in given):
            return (None,) * len(ctx.needs_input_grad)
        batched = next(filter(is_in_a_batch_of_passes, given), None)
        if batched is None:
            return derivative(ctx, *given)
        remove = _torch._remove_batch_dim
        level = next(n for n in range(1, 65) if len(remove(batched, n, 0, 0)))
        apart = [remove(x, level, 0, 0) if is_in_a_batch_of_passes(x) else () for x in given]
        args = [part if len(part) else x for x, part in zip(given, apart, strict=True)]
        dims = [0 if len(part) else None for part in apart]
        made = _stacked(partial(call, ctx), max(map(len, apart)), dims, args)
        each = made if isinstance(made, tuple) else (made,)
        results = [None if x is None else _torch._add_batch_dim(x, 0, level) for x in each]
        return tuple(results) if isinstance(made, tuple) else results[0]

    return call


def plus(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Tensors:
    """The sum of two lists of gradients, in which None is 0."""
    given = [[x for x in pair if x is not None] for pair in zip(a, b, strict=True)]
    return tuple(reduce(torch.add, parts) if parts else None for parts in given)


Plain = Callable[..., Tensors]


def placed(places: Sequence[int], values: Sequence[Any], among: Sequence[Any]) -> list[Any]:
    """A list with these values at some places."""
    at = dict(zip(places, values, strict=True))
    return [at.get(place, other) for place, other in enumerate(among)]


def _varying(arguments: Sequence[Any]) -> list[int]:
    return [at for at, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point()]


def pulled_back(function: Plain, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Tensors:
    """The gradients of plain operations by their arguments; None for what has no floating point."""
    varying = _varying(arguments)
    given = [at for at, cotangent in enumerate(cotangents) if cotangent is not None]

    def chosen(*tensors: Tensor) -> tuple[Any, ...]:
        made = function(*placed(varying, tensors, arguments))
        return tuple(made[at] for at in given)

    pull: Any = torch.func.vjp(chosen, *(arguments[at] for at in varying))[1]
    gradients = pull(tuple(cotangents[at] for at in given))
    return tuple(placed(varying, gradients, [None] * len(arguments)))


def size(x: Tensor) -> int:
    """The most elements of a chunk's temporary."""
    return SIZE if x.device.type == "cpu" else BIG


def pushed(function: Plain, arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensors:
    """The derivative of plain operations along tangents. In a `jvp`, forward mode is off.

    A pass is linear in its cotangents, and its derivative by those is the wanted one.
    """
    varying = _varying(arguments)
    made: Any = function(*arguments)
    nothing = [None] * len(made)
    given = [at for at, x in enumerate(made) if x is not None]

    def pull(*cotangents: Tensor) -> tuple[Any, ...]:
        gradients = pulled_back(function, arguments, placed(given, cotangents, nothing))
        return tuple(gradients[at] for at in varying)

    pairs = [(arguments[at], tangents[at]) for at in varying]
    along = tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)
    push: Any = torch.func.vjp(pull, *(torch.zeros_like(made[at]) for at in given))[1]
    return tuple(placed(given, push(along), nothing))


def varies(x: Any) -> bool:
    """Whether a derivative by a tensor may be asked for."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    if (x.requires_grad and torch.is_grad_enabled()) or _versions.is_wrapped(x):
        return True
    return _call.tangents() and _call.carries_tangent(x)


def served(*tensors: Any) -> bool:
    """Whether tensors are what our kernels are for: strided, real, no stand-ins of a tracer.

    For zero tensors PyTorch gives a kernel one number, expanded, of which its fused attention reads
    on.
    """
    # forward mode through forward mode: a Function's `jvp` loses the outer one
    levels = (_versions.transforms() or ()) if _call.tangents() else ()
    nests = sum(level.key().name == "Jvp" for level in levels) > 1
    return not (_settings.tracing() or nests) and all(
        type(x) in PLAIN
        and x.layout == torch.strided
        and x.numel()
        and not (x.is_complex() or x._is_zerotensor())
        for x in tensors
        if x is not None
    )
