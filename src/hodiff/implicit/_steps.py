"""The steps of an inner optimisation, on flat lists of tensors: a gradient by the road, and the rule."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core import _modes, _reverse, _tree
from hodiff._core._call import Call, call
from hodiff._core._graph import Graph
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.implicit._met import Met

Update = Callable[[list[Tensor], list[Tensor | None], Any, int], tuple[list[Tensor], Any]]
"""A rule, on lists of leaves; the gradient is None by what `f` does not reach in a step."""


class Progress(NamedTuple):
    """Where an optimisation stands: the parameters, the rule's state, the steps taken."""

    params: list[Tensor]
    state: Any
    step: int


class Steps:
    """An inner loss and a rule, ready to take steps."""

    def __init__(
        self,
        f: Callable[..., Any],
        where: Where,
        update: Update,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        first_order: bool,
    ) -> None:
        self.where = where
        self._update = update
        self._first_order = first_order
        self._met: Met | None = None
        self._recorded, self._plain = (
            call(f, where, passes=1, create_graph=create_graph, args=args, kwargs=kwargs)
            for create_graph in (True, False)
        )

    def under(self, mode: TorchFunctionMode) -> Steps:
        """The same steps, whose function and rule run under a mode."""
        other = copy.copy(self)
        other._recorded, other._plain = (
            given._replace(what=_under(mode, given.what)) for given in (self._recorded, self._plain)
        )
        other._update = _under(mode, self._update)
        if isinstance(mode, Met):
            other._met = mode
        return other

    def resume(self, state: Any) -> Progress:
        """The start; or a point further on, from a state that was returned."""
        if state is None:
            return Progress(self.where.tensors, None, 0)
        if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], int)):
            raise InputError("state: expected what hodiff.unroll(..., return_state=True) returned beside the result.")
        return Progress(self.where.tensors, state[1], state[0])

    def run(self, now: Progress, batches: Sequence[Any], *, record: bool) -> Progress:
        """Some steps; with `record` their graph is kept, in everything."""
        if not record:
            with _modes.recording(), _modes.grad_mode(False):
                start = [p.detach() for p in now.params]
                return self._take(Progress(start, _detached(now.state), now.step), batches)
        if self._first_order:
            return self._take(now, batches)
        given, begins = self._recorded, now.params is self.where.tensors
        with Graph(_with(given, batches[0]), None if begins else _tracked(now.params)) as ev:
            for number, batch in enumerate(batches):
                if number:
                    ev.move(_tracked(now.params), _with(given, batch).args)
                missed: set[int] = set()
                gradient = _reverse.pull(ev, [ev.scalars()], [None], differentiated=True, missed=missed)
                now = self._step(ev.leaves, gradient, missed, now)
        return now

    def _take(self, now: Progress, batches: Sequence[Any]) -> Progress:
        """Some steps by gradients that are constants, of which no graph stays; the rule runs in the caller's mode."""
        recorded = torch.is_grad_enabled()
        given = self._plain
        params = now.params
        with Graph(_with(given, batches[0]), self._begun(params)) as ev:
            for number, batch in enumerate(batches):
                if number:
                    ev.move(self._begun(params), _with(given, batch).args)
                if self._met is not None:
                    self._met.end()
                missed: set[int] = set()
                gradient = _reverse.gradient(ev, missed=missed)
                with _modes.grad_mode(recorded):
                    now = self._step(params, gradient, missed, now)
                params = now.params
        return now

    def _begun(self, params: Sequence[Tensor]) -> list[Tensor]:
        leaves = [p.detach().requires_grad_() for p in params]
        if self._met is not None:
            self._met.begin(leaves)
        return leaves

    def _step(self, params: list[Tensor], gradient: list[Tensor], missed: set[int], now: Progress) -> Progress:
        """One step of the rule."""
        reached = [None if number in missed else part for number, part in enumerate(gradient)]
        new, state = self._update(params, reached, now.state, now.step + 1)
        for before, after, name in zip(params, new, self.where.names, strict=True):
            if not isinstance(after, Tensor) or after.shape != before.shape or after.dtype != before.dtype:
                got = f"{after.dtype}, {tuple(after.shape)}" if isinstance(after, Tensor) else type(after).__name__
                raise InputError(
                    f"rule: made {got} of {name}, which is {before.dtype}, {tuple(before.shape)}; hyperparameters "
                    f"that are tensors have one element, or a leaf's shape, and no other dtype than it."
                )
        return Progress(new, state, now.step + 1)


def _tracked(params: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that can be differentiated by, constants (the end of steps that were not recorded) too."""
    return [p if p.requires_grad else p.detach().requires_grad_() for p in params]


def _with(given: Call, batch: Sequence[Any]) -> Call:
    return given._replace(args=(*batch, *given.args)) if batch else given


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with _modes.on(mode):
            return function(*args, **kwargs)

    return functools.update_wrapper(inside, function)


def _detached(state: Any) -> Any:
    return _tree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, state)
