"""The places of our kernels, which a thread has for a while.

PyTorch's dispatcher looks for kernels under the keys that a call's tensors have, and under those
that the thread includes. Under a key that nothing else includes ours are in nobody's way: not in
another thread's, not after the block. And they are reached from everywhere: from PyTorch's own
layers, scripts, and blocks that a pass runs again. The public ways are not used, for what they cost
(docs/explain/versions.md): a mode that sees calls slows down each, and is off inside
`F.multi_head_attention_forward` and in a pass; a kernel by `torch.library` is for all threads.

Where that key cannot be had, which is said once, attention goes by PyTorch's matrix products while
anyone is inside, as in other threads: right at every order, with PyTorch's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

from hodiff._core import _call, _locks, _messages, _needed, _settings, _versions
from hodiff._core._settings import Counted, Scope, Undo

__all__ = ["OURS", "plain_attention", "repeatable", "without"]

# --- the key --------------------------------------------------------------------------------------

OURS: dict[str, Callable[..., Tensor]] = {}
"""The operations of `aten` that we have a kernel for, and the kernel.

`hodiff` puts those of `memory` here.
"""

registered: list[Any] = []  # held here, for what a library registers goes with it

_KEY = _versions.KERNEL_KEY
included = partial(bool if _KEY is None else _versions.is_included, _KEY)
"""Whether this thread has our kernels."""
without: Callable[[], _settings.Context] = partial(_versions.key_left_out, _KEY)
"""A block in which the thread does not have our kernels. It begins when it is entered."""
enter, leave = (partial(_versions.include, _KEY, on) for on in (True, False))


@cache  # what is cached costs no call
def available() -> bool:
    """Whether a thread can have our kernels. They are registered when this is first asked."""
    with _locks.lock:
        if not registered and _KEY is not None and not _versions.key_is_taken():
            _register()
    if not registered:
        why = _needed.lacks(_needed.KERNELS) or "No dispatch key is free for kernels of hodiff"
        _messages.warn_once(
            f"{why}; attention and cross-entropy take PyTorch's memory. All is right."
        )
    return bool(registered)


def _register() -> None:
    """Every other operation passes the key by, at no cost.

    Not by `torch.library.Library`: Python's `atexit` takes that away while threads, and functions
    that were registered there before PyTorch was loaded, still compute.
    """
    name = _versions.KERNEL_KEY_NAME
    others, ours, collectives = (_versions.library(of, __file__) for of in ("_", "aten", "c10d"))
    others.fallback(name, torch.library.fallthrough_kernel, False)
    for operation, kernel in OURS.items():
        ours.impl(operation, name, kernel, False)
    for operation in ("allreduce_", "broadcast_", "reduce_"):
        collectives.impl(operation, name, partial(_collective, operation), False)
    _versions.let_higher_order_operators_pass()
    registered.extend((others, ours, collectives))


def _collective(operation: str, tensors: list[Tensor], *args: Any) -> Any:
    """A collective that writes into its tensors, unseen by autograd:
    refused where a call differentiates them.
    """
    if (
        _call.state.running
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
    ):
        raise _messages.collective(operation.strip("_").replace("allreduce", "all_reduce"))
    with without():
        return getattr(torch.ops.c10d, operation)(tensors, *args)


def include(undo: Undo) -> None:
    """Let the thread have our kernels until it is undone; or plain attention."""
    if not available():
        plain_attention.enter(undo)
    elif not included():
        undo += [leave]
        enter()


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
    """A function for a checkpoint to run again at any time: with our kernels,
    if the thread has them now.
    """
    if not included():
        return run

    def again(*args: Any) -> Any:
        with Scope(include):
            return run(*args)

    return again
