"""Checkpoints for `unroll`: a segment of steps keeps its start, and is taken again in the backward pass.

`torch.utils.checkpoint` around a segment saves nothing: each gradient inside unpacks saved tensors, and so takes
the segment again within itself. Here the steps are taken without a lasting graph; a Function stands for the
segment, and its backward takes them once more from the saved start, this time with their graph.

What `f` and the rule reach besides the parameters (closures, tensors of batches, parameters that are not in
*where*) is met while the steps are taken, as arguments of operations. The second time stand-ins take their place,
so that the segment's own part of a derivative ends there. What was not met would be missing: it is seen, in the
graph of the second time, and raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _modes, _nodes, _reverse, _tree
from hodiff._core._lending import mark_of
from hodiff._core._random_state import RandomState
from hodiff._core._where import Where
from hodiff.errors import GraphError, InputError
from hodiff.implicit._met import Instead, Met
from hodiff.implicit._steps import Progress, Steps


def run_segment(steps: Steps, now: Progress, batches: Sequence[Any]) -> Progress:
    """Some steps, behind one node."""
    met, replay = Met(), Replay(steps, now, batches)
    ends = steps.under(met).run(now, batches, record=False)
    start, thetas = [*now.params, *_tensors(now.state)], [*met.tensors.values(), *_others(steps.where)]
    replay.number, replay.thetas = len(start), thetas
    outputs = [*ends.params, *_tensors(ends.state)]
    replay.ends = [(output, output._version) for output in outputs]
    found = Segment.apply(replay, outputs, *start, *thetas)
    count = len(now.params)
    return Progress(list(found[:count]), _replaced(ends.state, found[count:]), ends.step)


def _others(where: Where) -> list[Tensor]:
    """The parameters of the point's modules that are not differentiated by: stand-ins hide them from `Met`."""
    own = set(map(id, where.tensors))
    slots = [slot.parameter for owned in where.owned for slot in owned.assembly.slots]
    return list({id(p): p for p in slots if p.requires_grad and id(p) not in own}.values())


class Replay:
    """How a segment is taken once more.

    Attributes:
        number: How many of the Function's tensors are the start: parameters, then the rule's state.
        thetas: The others, which the steps met.
        ends: The values that the steps led to, and the versions of those.
    """

    def __init__(self, steps: Steps, now: Progress, batches: Sequence[Any]) -> None:
        device = steps.where.tensors[0].device
        self._steps, self._batches = steps, batches
        self._state, self._step = now.state, now.step
        self._random, self._device = RandomState.of(device), device.type
        self._autocast = torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        self.number, self.thetas = 0, []
        self.ends: list[tuple[Tensor, int]] = []

    def pull(self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """What the cotangents of the end are, at the start and at everything that the steps met."""
        aliases = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        start, count = aliases[: self.number], len(self._steps.where.tensors)
        mode = Instead(self.thetas, aliases[self.number :])
        begin = Progress(start[:count], _replaced(self._state, start[count:]), self._step)
        dtype, enabled = self._autocast
        drawn = RandomState.of(self._random.device)
        self._random.restore()
        try:
            with _modes.grad_mode(True), _modes.autocast(self._device, dtype, enabled=enabled):
                ends = self._steps.under(mode).run(begin, self._batches, record=True)
        finally:
            drawn.restore()
        outputs = [*ends.params, *_tensors(ends.state)]
        self._compare(outputs)
        self._refuse_unmet(outputs, aliases, mode)
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        wanted = [alias for alias in aliases if alias.requires_grad]
        found = iter(_reverse.between([o for o, _ in pairs], wanted, [c for _, c in pairs], keep=False))
        return [next(found) if alias.requires_grad else None for alias in aliases]

    def _compare(self, outputs: Sequence[Tensor]) -> None:
        """Raise where the steps led elsewhere than the first time."""
        for output, (end, version) in zip(outputs, self.ends, strict=True):
            if end._version != version or not end.is_floating_point():
                continue
            off = float((output.detach() - end).abs().max()) if end.numel() else 0.0
            if off > torch.finfo(end.dtype).eps ** 0.5 * float(end.abs().max()):
                raise GraphError(
                    f"segments: the steps, taken again in the backward pass, led elsewhere (by {off:.2g}): something "
                    f"that f uses has changed since, or it draws random numbers that PyTorch's default generators "
                    f"do not give. Call backward before anything is changed (data, buffers, train() and eval()), or "
                    f"use segments=None."
                )

    @staticmethod
    def _refuse_unmet(outputs: Sequence[Tensor], aliases: Sequence[Tensor], mode: Instead) -> None:
        known = set(map(id, aliases))
        for leaf in _nodes.survey([o for o in outputs if o.requires_grad]).variables():
            if id(leaf) not in known and mark_of(leaf) is None and not mode.made(leaf):
                raise GraphError(
                    f"segments: f reaches a tensor of shape {tuple(leaf.shape)} that requires grad in a way that could "
                    f"not be seen (by an autograd.Function, or past PyTorch's modes), so its part of the derivative "
                    f"would be missing. Use segments=None."
                )


class Segment(torch.autograd.Function):
    """The steps of a segment, as one node."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, outputs: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The end, which is known already."""
        ctx.replay = replay
        ctx.save_for_backward(*tensors)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        """Take the steps once more, and pull back through their graph."""
        if torch.is_grad_enabled():
            raise GraphError(
                "unroll: with segments= only first derivatives are there, and this pass is to be differentiated "
                "again. Use segments=None."
            )
        return None, None, *ctx.replay.pull(ctx.saved_tensors, cotangents)


def _tensors(state: Any) -> list[Tensor]:
    """The tensors that a rule keeps from step to step."""
    found = []
    for leaf in _tree.flatten(state)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif not (leaf is None or isinstance(leaf, (bool, int, float, str))):
            raise InputError(
                f"rule: its state holds a {type(leaf).__name__}; with segments= it must be made of tensors and "
                f"numbers, in tuples, lists and dicts, so that it can be kept."
            )
    return found


def _replaced(state: Any, tensors: Sequence[Tensor]) -> Any:
    """A state with other tensors in the place of its own."""
    leaves, _, tree = _tree.flatten(state)
    new = iter(tensors)
    return _tree.rebuild(tree, iter([next(new) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
