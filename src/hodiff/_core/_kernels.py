"""Kernels of ours, which a thread has for a while: where they stand, and what they have in common.

PyTorch's dispatcher looks for kernels under the keys that a call's tensors have, and under those
that the thread includes. Under a key that nothing else includes ours are in nobody's way: not in
another thread's, not after the block. And they are reached from everywhere: from PyTorch's own
layers, scripts, and blocks that a pass runs again. (A mode that sees calls is off inside
`F.multi_head_attention_forward` and in a pass; an override is for all threads.)

Where that key cannot be had, which is said once, attention goes by PyTorch's matrix products while
anyone is inside, as in other threads: right at every order, with PyTorch's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.backends import cuda

from hodiff._core import _call, _locks, _needed, _settings, _versions
from hodiff._core._compiled_callers import uncompiled
from hodiff._core._settings import Counted, Scope, Undo
from hodiff.errors import InputError

_torch: Any = torch._C

# --- the key --------------------------------------------------------------------------------------

OURS = {
    "scaled_dot_product_attention": ("hodiff.memory._attention", "attention"),
    "cross_entropy_loss": ("hodiff.memory._cross_entropy", "cross_entropy"),
}
"""The operations that we have a kernel for: its module, loaded at the first call, and its name."""

registered: list[Any] = []  # held here, for what a library registers goes with it

_KEY = _versions.KERNEL_KEY
included = bool if _KEY is None else partial(_torch._dispatch_tls_is_dispatch_key_included, _KEY)
"""Whether this thread has our kernels."""
_include: Any = bool if _KEY is None else _torch._dispatch_tls_set_dispatch_key_included
enter = partial(_include, _KEY, True)
leave = partial(_include, _KEY, False)


def available() -> bool:
    """Whether a thread can have our kernels. They are registered when this is first asked."""
    if not registered:
        with _locks.lock:
            if not registered and _KEY is not None and not _versions.key_is_taken():
                _register()
        if not registered:
            why = _needed.lacks(_needed.KERNELS) or "No dispatch key is free for kernels of hodiff"
            _needed.warn(f"{why}; attention and cross-entropy take PyTorch's memory. All is right.")
    return bool(registered)


def _register() -> None:
    """Every other operation passes the key by, at no cost.

    Not by `torch.library.Library`: Python's `atexit` takes that away while threads, and functions that were registered
    there before PyTorch was loaded, still compute.
    """
    name = _versions.KERNEL_KEY_NAME
    others, ours = (_torch._dispatch_library("IMPL", of, name, __file__, 0) for of in ("_", "aten"))
    others.fallback(name, torch.library.fallthrough_kernel, False)
    for operation in OURS:
        ours.impl(operation, name, _loaded_late(operation), False)
    _versions.let_higher_order_operators_pass()
    registered.extend((others, ours))


def module_of(operation: str) -> Any:
    """The module of a kernel, loaded when it is first needed."""
    return import_module(OURS[operation][0])


def in_blocks(f: Any, where: Any, checkpoint: Any) -> Any:
    """`f` whose blocks run again in each pass, as `checkpoint=` says."""
    if checkpoint is False:
        return f
    if _versions.RELEASE < (2, 13):  # blocks that run again lose their graphs there
        raise InputError(f"checkpoint= needs PyTorch 2.13 or newer; this is {torch.__version__}. Leave it out.")
    _needed.check("checkpoint=")
    return import_module("hodiff.memory._blocks").in_blocks(f, where, checkpoint)


def _loaded_late(operation: str) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        return getattr(module_of(operation), OURS[operation][1])(*args, **kwargs)

    return call


def include(undo: Undo) -> None:
    """Let the thread have our kernels until it is undone; or plain attention."""
    if not available():
        plain_attention.enter(undo)
    elif not included():
        undo += [leave]
        enter()


def without() -> _settings.Context:
    """A block in which the thread does not have our kernels. It begins when it is entered."""
    return _torch._ExcludeDispatchKeyGuard(_torch.DispatchKeySet(_KEY))


# --- attention by matrix products -----------------------------------------------------------------


_SWITCHES: Sequence[tuple[Callable[[], bool], Callable[[bool], None], bool]] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
)
"""Of each kernel of PyTorch's: whether it is on, what switches it, and whether it is wanted."""


def _plain_attention(undo: Undo) -> None:
    """Attention by matrix products, which have second derivatives."""
    changes = [(put, wanted) for get, put, wanted in _SWITCHES if get() is not wanted]

    def restore() -> None:
        for put, wanted in changes:
            put(not wanted)

    undo += [restore]
    for put, wanted in changes:
        put(wanted)


plain_attention = Counted(_plain_attention)


def repeatable(run: Callable[..., Any]) -> Callable[..., Any]:
    """What a checkpoint runs again, whenever: with our kernels, if the thread has them now."""
    if not included():
        return run

    def again(*args: Any) -> Any:
        with Scope(include):
            return run(*args)

    return again


# --- Functions whose results are made chunk by chunk, of tensors that they serve ------------------


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
        """Nothing of it is traced: below a compiled caller's passes it runs as it is."""
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


def _in_a_batch_of_passes(x: Any) -> bool:
    """Whether a tensor is of PyTorch's older `vmap`, that of `is_grads_batched`."""
    key = _versions.BATCHED_KEY
    return key is not None and isinstance(x, Tensor) and _torch._dispatch_keys(x).has(key)


def _by_sample(derivative: Callable[..., Any]) -> Callable[..., Any]:
    """A derivative that runs by sample below `is_grads_batched`, which has few rules.

    The level is looked for: the thread of a pass does not know it. A tensor that is not of a level
    gets an expanded dimension there, of the size that is asked for: 0.
    """

    def call(ctx: Any, *given: Any) -> Any:
        batched = next(filter(_in_a_batch_of_passes, given), None)
        if batched is None:
            return derivative(ctx, *given)
        entries: Any = torch
        remove = entries._remove_batch_dim
        level = next(n for n in range(1, 65) if len(remove(batched, n, 0, 0)))
        apart = [remove(x, level, 0, 0) if _in_a_batch_of_passes(x) else () for x in given]
        args = [part if len(part) else x for x, part in zip(given, apart, strict=True)]
        dims = [0 if len(part) else None for part in apart]
        made = _stacked(partial(call, ctx), max(map(len, apart)), dims, args)
        each = made if isinstance(made, tuple) else (made,)
        results = [None if x is None else entries._add_batch_dim(x, 0, level) for x in each]
        return tuple(results) if isinstance(made, tuple) else results[0]

    return call


def plus(a: Tensors, b: Tensors) -> Tensors:
    """The sum of two lists of gradients, in which None is 0."""
    results: list[Tensor | None] = []
    for x, y in zip(a, b, strict=True):
        given = [each for each in (x, y) if each is not None]
        results += [given[0] + given[-1] if len(given) == 2 else (given or [None])[0]]
    return tuple(results)


Plain = Callable[..., Tensors]


def _varying(arguments: Sequence[Any]) -> list[int]:
    return [at for at, x in enumerate(arguments) if isinstance(x, Tensor) and x.is_floating_point()]


def pulled_back(function: Plain, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Tensors:
    """The gradients of plain operations by their arguments; None for what has no floating point."""
    varying = _varying(arguments)
    given = [at for at, cotangent in enumerate(cotangents) if cotangent is not None]

    def chosen(*tensors: Tensor) -> tuple[Any, ...]:
        every = [*arguments]
        for at, tensor in zip(varying, tensors, strict=True):
            every[at] = tensor
        made = function(*every)
        return tuple(made[at] for at in given)

    pull: Any = torch.func.vjp(chosen, *(arguments[at] for at in varying))[1]
    results: list[Tensor | None] = [None] * len(arguments)
    for at, gradient in zip(varying, pull(tuple(cotangents[at] for at in given)), strict=True):
        results[at] = gradient
    return tuple(results)


def size(x: Tensor) -> int:
    """How many elements a temporary of a chunk has at most."""
    return SIZE if x.device.type == "cpu" else BIG


def pushed(function: Plain, arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensors:
    """The derivative of plain operations along tangents. In a `jvp`, forward mode is off.

    A pass is linear in its cotangents, and its derivative by those is the wanted one.
    """
    varying = _varying(arguments)
    made: Any = function(*arguments)
    given = [at for at, x in enumerate(made) if x is not None]

    def pull(*cotangents: Tensor) -> tuple[Any, ...]:
        every: list[Any] = [None] * len(made)
        for at, cotangent in zip(given, cotangents, strict=True):
            every[at] = cotangent
        gradients = pulled_back(function, arguments, every)
        return tuple(gradients[at] for at in varying)

    pairs = [(arguments[at], tangents[at]) for at in varying]
    along = tuple(torch.zeros_like(x) if t is None else t for x, t in pairs)
    push: Any = torch.func.vjp(pull, *(torch.zeros_like(made[at]) for at in given))[1]
    results: list[Tensor | None] = [None] * len(made)
    for at, tangent in zip(given, push(along), strict=True):
        results[at] = tangent
    return tuple(results)


def nests_forward_mode() -> bool:
    """Whether forward mode goes through forward mode: a Function's `jvp` loses the outer one."""
    if not _call.tangents():
        return False
    levels = _torch._functorch.get_interpreter_stack() or ()
    return sum(level.key().name == "Jvp" for level in levels) > 1


def varies(x: Any) -> bool:
    """Whether a derivative by a tensor may be asked for."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return False
    if (x.requires_grad and torch.is_grad_enabled()) or _call.is_wrapped(x):
        return True
    return _call.tangents() and _call.carries_tangent(x)


def served(*tensors: Any) -> bool:
    """Whether tensors are what our kernels are for: strided, real, no stand-ins of a tracer.

    For zero tensors PyTorch gives a kernel one number, expanded, of which its fused attention reads on.
    """
    return not (_settings.tracing() or nests_forward_mode()) and all(
        type(x) in PLAIN and x.layout == torch.strided and x.numel() and not (x.is_complex() or x._is_zerotensor())
        for x in tensors
        if x is not None
    )
