"""The state in which `f` runs: second derivatives possible, and the caller's settings restored.

Some settings are process-wide. They are *counted*: the first call that needs one switches it, the
last one restores it. Nested context managers would race between threads and leave the process
changed (measured: fused attention and cuDNN off for good).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core._swap import BufferLoan


class Counted:
    """A process-wide switch: on while anyone is inside, restored by the last one out."""

    def __init__(self, switch: Callable[[], Callable[[], None]]) -> None:
        self._switch = switch
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] | None = None

    def enter(self) -> None:
        """Switch it, unless someone has."""
        with self._lock:
            if not self._users:
                self._restore = self._switch()
            self._users += 1

    def leave(self) -> None:
        """Restore it, unless someone still needs it."""
        with self._lock:
            self._users -= 1
            if not self._users and self._restore is not None:
                self._restore()
                self._restore = None


def _plain_attention() -> Callable[[], None]:
    """Attention by matrix products: the fused kernels have no second derivative."""
    cuda = torch.backends.cuda
    flash, efficient, cudnn, math = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    cuda.enable_flash_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    cuda.enable_cudnn_sdp(False)
    cuda.enable_math_sdp(True)

    def restore() -> None:
        cuda.enable_flash_sdp(flash)
        cuda.enable_mem_efficient_sdp(efficient)
        cuda.enable_cudnn_sdp(cudnn)
        cuda.enable_math_sdp(math)

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


def _watch_modules() -> Callable[[], None]:
    """Lend every module's buffers at its first call inside an evaluation, however `f` reaches it."""
    return nn.modules.module.register_module_forward_pre_hook(_lend_buffers).remove


def _lend_buffers(module: nn.Module, args: Any) -> None:
    if state.loans and not isinstance(module, torch.jit.ScriptModule):
        state.loans[-1].take(module)


plain_attention = Counted(_plain_attention)
eager = Counted(_eager)
no_cudnn = Counted(_no_cudnn)
watch_modules = Counted(_watch_modules)


class _State(threading.local):
    """What this thread is evaluating, innermost last."""

    def __init__(self) -> None:
        self.loans: list[BufferLoan] = []
        self.orders: list[int] = []


state = _State()


def inside() -> bool:
    """Whether this code runs inside the `f` of another call."""
    return bool(state.orders)


def nested() -> bool:
    """Whether the evaluation at hand is itself inside the `f` of another."""
    return len(state.orders) > 1


def total_order(passes: int, create_graph: bool) -> int:
    """The highest derivative that a call's graph will see, those of an enclosing call included."""
    if not create_graph:
        return passes
    return passes + max(1, state.orders[-1] if state.orders else 1)


def recorded(create_graph: bool | None) -> bool:
    """Whether a result of the calculus keeps its graph: by default, inside the `f` of another call."""
    return inside() and torch.is_grad_enabled() if create_graph is None else bool(create_graph)


def loss_recorded(create_graph: bool | None) -> bool:
    """Whether a loss (a penalty, a field) keeps its graph: by default, where the caller's grad mode is on."""
    return torch.is_grad_enabled() if create_graph is None else bool(create_graph)


class RandomState(NamedTuple):
    """The state of the default generators that a function on a device may draw from."""

    device: torch.device
    states: tuple[Tensor, ...]

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """The state now: the CPU's, and the GPU's where the device is one."""
        cpu = torch.get_rng_state()
        return cls(device, (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,))

    def restore(self) -> None:
        """Put this state back."""
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.cuda.set_rng_state(self.states[1], self.device)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return any(not torch.equal(a, b) for a, b in zip(self.states, self.of(self.device).states, strict=True))


class Evaluating:
    """Holds an evaluation's loans and switches until its last pass has run."""

    __slots__ = ("_undo", "loan")

    def __init__(self, order: int) -> None:
        self._undo: list[Callable[[], object]] = []
        try:
            if torch.is_inference_mode_enabled():
                normal = torch.inference_mode(False)
                normal.__enter__()
                self.defer(lambda: normal.__exit__(None, None, None))
            if not torch.is_grad_enabled():
                torch.set_grad_enabled(True)
                self.defer(_grad_off)
            if order >= 2:
                self.also(plain_attention)
            if "torch._dynamo" in sys.modules:
                self.also(eager)
            self.also(watch_modules)
            self.loan = BufferLoan()
            self.defer(self.loan.close)
            state.loans.append(self.loan)
            state.orders.append(order)
            self.defer(_leave)
        except BaseException:
            self.close()
            raise

    def also(self, switch: Counted) -> None:
        """One more switch, left with the rest."""
        switch.enter()
        self._undo.append(switch.leave)

    def defer(self, function: Callable[[], object]) -> None:
        """Call `function` on closing."""
        self._undo.append(function)

    def close(self) -> None:
        """Undo everything, in reverse order; what fails does not keep the rest from being undone."""
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            if self._undo:
                self.close()


def _grad_off() -> None:
    torch.set_grad_enabled(False)


def _leave() -> None:
    state.loans.pop()
    state.orders.pop()
