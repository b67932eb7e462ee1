"""Process-wide settings that `f` must run without, or with.

They are *counted*: the first call that needs one switches it, the last one restores it. Nested context
managers would race between threads and leave the process changed (measured: fused attention and cuDNN
off for good).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Counted:
    """A process-wide switch: on while anyone is inside, restored by the last one out."""

    def __init__(self, switch: Callable[[], Callable[[], None]]) -> None:
        self._switch = switch
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] | None = None

    def enter(self) -> Callable[[], None]:
        """Switch it, unless someone has; what is returned leaves it."""
        with self._lock:
            if not self._users:
                self._restore = self._switch()
            self._users += 1
        return self.leave

    def leave(self) -> None:
        """Restore it, unless someone still needs it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._restore is not None:
                restore, self._restore = self._restore, None
                restore()


def _plain_attention() -> Callable[[], None]:
    """Attention by matrix products: the fused kernels have no second derivative."""
    cuda = torch.backends.cuda
    undo: list[tuple[Callable[[bool], None], bool]] = []
    for enabled, enable, wanted in (
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
    ):
        before = enabled()
        if before is not wanted:
            enable(wanted)
            undo += [(enable, before)]

    def restore() -> None:
        for enable, before in undo:
            enable(before)

    return restore


def _eager() -> Callable[[], None]:
    """Compiled functions run as plain PyTorch: compiled code has no second derivative."""
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _no_cudnn() -> Callable[[], None]:
    """Native RNN kernels: cuDNN's have no second derivative."""
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False

    def restore() -> None:
        torch.backends.cudnn.enabled = enabled

    return restore


plain_attention = Counted(_plain_attention)
eager = Counted(_eager)
no_cudnn = Counted(_no_cudnn)
