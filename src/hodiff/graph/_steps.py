"""The steps of PyTorch's own optimizers, of which a recorder sees no call, only what they changed.

A step makes five to fifteen calls per parameter, and an explanation needs none of them: the mode is off the stack for
as long. It is taken off by the hook that an optimizer calls before a step, and put back when the step has ended in
whatever way: what the hook returns is held by the frame that called it, and goes with that frame.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from hodiff.graph import _traits


class _Away(NamedTuple):
    """While the mode is off the stack: how many others are on it, the leaves with their versions, and the place."""

    depth: int
    leaves: list[tuple[Tensor, int]]
    place: int


class _Step(tuple[Any, Any]):
    """The arguments of a step. When they go, it has ended."""

    back: Callable[[], None]

    def __del__(self) -> None:
        self.back()


@final
class Steps:
    """Takes a mode off the stack for each step.

    `place` numbers the line of a frame; `changed` is told which leaves a step changed, and the number of its line.
    """

    def __init__(
        self, mode: TorchFunctionMode, place: Callable[[FrameType], int], changed: Callable[[list[Tensor], int], None]
    ) -> None:
        self._mode = mode
        self._place = place
        self._changed = changed
        self._away: _Away | None = None
        self._thread = 0

    def enter(self) -> None:
        """The mode was pushed by this thread."""
        self._thread = threading.get_ident()
        register_optimizer_step_pre_hook(self._before)

    def leave(self) -> None:
        """The mode is to be popped."""
        self.settle()
        hooks = _traits.hooks_before_steps()
        for key, hook in list(hooks.items()):  # in one step of the interpreter: other threads register theirs
            if getattr(hook, "__self__", None) is self:
                del hooks[key]

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        self._back()  # from a step that raised, if someone still holds its error
        given = (*args[1:], *kwargs.values())  # a closure asks for passes
        if any(value is not None for value in given) or not _is_plain(optimizer):
            return None
        if any(not isinstance(getattr(hook, "__self__", None), Steps) for hook in _traits.step_hooks(optimizer)):
            return None
        if not _traits.innermost(self._mode):
            return None
        TorchFunctionMode.__exit__(self._mode, None, None, None)
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"]]
        versions = [(leaf, _traits.version(leaf)) for leaf in leaves]
        self._away = _Away(_traits.modes(), versions, self._place(sys._getframe(1)))
        step = _Step((args, kwargs))
        step.back = self._back
        return step

    def _back(self) -> None:
        """The step has ended: note what it changed, and see the calls again."""
        away = self._away
        if away is None or threading.get_ident() != self._thread or _traits.modes() != away.depth:
            return
        self.settle()
        TorchFunctionMode.__enter__(self._mode)

    def settle(self) -> None:
        """Note what a step changed that had not ended."""
        away, self._away = self._away, None
        if away is not None:
            self._changed([leaf for leaf, before in away.leaves if _traits.version(leaf) != before], away.place)


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is PyTorch's own, and makes no graph."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and not any(group.get("differentiable") for group in optimizer.param_groups)
