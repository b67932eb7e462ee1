"""What `argmin`, `root` and `fixed_point` share: the residual at a point, the checks there, and the chain of links."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _checks, _modes, _nesting, _nodes, _refusals, _reverse, _tree
from hodiff._core._call import Call, call
from hodiff._core._graph import Graph
from hodiff._core._random_state import RandomState
from hodiff._core._where import Where
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._solve import Method
from hodiff.errors import GraphError, InputError
from hodiff.implicit._attach import Chain
from hodiff.implicit._system import Line, System, Transposed

Kind = Literal["argmin", "root", "fixed_point"]
Parts = list[Tensor]


class Given(NamedTuple):
    """The options, as they were given."""

    order: int | None
    method: Method
    damping: float
    preconditioner: LinearOperator | None
    rtol: float | None
    products: int | None
    polish: int
    gradient_tol: float | None


def attached(
    kind: Kind, f: Callable[..., Any], x_star: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, given: Given
) -> Any:
    """The solution, attached to the graph of everything that `f` depends on."""
    if torch.is_inference_mode_enabled():
        with _modes.recording(), _modes.grad_mode(False):
            return attached(kind, f, x_star, args, kwargs, given)
    _nesting.refuse_transforms(batched=True)
    where, line = Where(x_star, "x_star"), Line.now()
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(f"f: is a {type(f).__name__}; expected a function, which is evaluated at x_star.")
    order = _order(given.order)
    _checks.check_integer(given.polish, "polish", least=0)
    limit = given.gradient_tol
    number = _checks.is_number(limit) or (isinstance(limit, float) and limit == math.inf)
    if limit is not None and not (number and limit >= 0):
        raise InputError(f"gradient_tol: got {limit!r}, expected a number of 0 or more, or None.")
    # The residual at the values alone; and in a differentiable result with as many derivatives as there are links.
    linked = call(f, where, passes=1, create_graph=True, args=args, kwargs=kwargs)._replace(order=1 + order)
    plain = linked._replace(create_graph=False, keep=True, order=2)
    problem = Problem(kind, where, given, order, line)
    values = [tensor.detach().clone() for tensor in where.tensors]
    for name, value in zip(where.names, values, strict=True):
        if not bool(value.isfinite().all()):
            raise InputError(f"{name}: has entries that are not finite, so it is no solution.")
    for _ in range(given.polish):
        values = problem.polished(plain, values)
    if not torch.is_grad_enabled():
        problem.solved(*problem.residual(plain, _leaves(values)), values)
        return where.result(values)
    x = _leaves(values)
    ev, residual = problem.residual(linked, x)
    # Passes for a first derivative free this graph after their linear system, so that it may serve for both.
    first = (ev.kept(), residual) if order == 1 else problem.residual(plain, _leaves(values))
    chain = Chain(problem.solved(*first, values), values)
    survey = _nodes.survey([part for part in residual if part.requires_grad])
    if survey.leaf_ids() <= set(map(id, ev.leaves)):
        if _nesting.state.running and not _nesting.inside():
            return where.result(values)  # a value is asked for: by `check_derivatives`, beside the point
        raise GraphError(
            f"{kind}: the solution does not depend on anything: f reaches no tensor that requires grad besides "
            f"its argument. {_refusals.USUAL_CAUSES} For the value alone, call it under torch.no_grad()."
        )
    x = chain.link(1, values, residual)
    for number in range(2, order + 1):
        _, residual = problem.residual(linked, x)
        x = chain.link(number, x, problem.held(residual, x, values))
    _nodes.mark_results(x)
    return where.result(x)


def _leaves(values: Parts) -> Parts:
    return [value.clone().requires_grad_() for value in values]


def _order(order: int | None) -> int:
    if order is not None:
        return _checks.check_integer(order, "order", least=1)
    return _nesting.outer_order()


class Problem:
    """The residual whose zero is the solution: a gradient, F(x), or x - g(x)."""

    def __init__(self, kind: Kind, where: Where, given: Given, order: int, line: Line) -> None:
        self.kind: Kind = kind
        self._random = RandomState.of(where.tensors[0].device)  # each evaluation draws what the first one drew
        self._given = given
        self._order = order
        self._line = line

    def residual(self, asked: Call, at: Sequence[Tensor]) -> tuple[Graph, Parts]:
        """The residual at some leaves, and its graph."""
        self._random.restore()
        with Graph(asked, at) as ev:
            return ev, self._residual(ev)

    def held(self, residual: Parts, x: Parts, values: Parts) -> Parts:
        """The residual of the solution that `damping` holds near where it is."""
        damping = self._given.damping
        if not damping:
            return residual
        return [r + damping * (part - value) for r, part, value in zip(residual, x, values, strict=True)]

    def _residual(self, ev: Graph) -> Parts:
        if self.kind == "argmin":
            return _reverse.pull(ev, [ev.scalars()], [None], differentiated=True)
        outputs = self._like_x(ev)
        if self.kind == "root":
            return outputs
        return [leaf - output for leaf, output in zip(ev.leaves, outputs, strict=True)]

    def _like_x(self, ev: Graph) -> Parts:
        """What `f` returned, in the order of the point's leaves."""
        tree, name = ev.where.tree(), "F(x)" if self.kind == "root" else "g(x)"
        ev.tensors()
        different = _tree.difference(tree, _tree.flatten(ev.outputs)[2], name)
        outputs = [] if different else _tree.leaves_like(tree, ev.outputs)
        for leaf, output, where in zip(ev.leaves, outputs, ev.where.names, strict=False):
            if output.shape != leaf.shape or output.dtype != leaf.dtype:
                different = f"for {where} it is {_kind(output)}, expected {_kind(leaf)}"
        if different:
            raise InputError(
                f"f: must return what is like x_star (for a module, a dict by parameter name), with as many equations "
                f"as unknowns: {different}."
            )
        return outputs

    def _system(self, ev: Graph, residual: Parts) -> System:
        given = self._given
        return System(
            Transposed(ev, residual, symmetric=self.kind == "argmin"),
            self.kind,
            self._line,
            method=given.method,
            damping=given.damping,
            preconditioner=given.preconditioner,
            rtol=given.rtol,
            products=given.products,
            order=self._order,
        )

    def polished(self, plain: Call, values: Parts) -> Parts:
        """A step of Newton's method."""
        ev, residual = self.residual(plain, _leaves(values))
        step = self._system(ev, residual).solved(residual, transposed=False)
        return [value - part for value, part in zip(values, step, strict=True)]

    def solved(self, ev: Graph, residual: Parts, values: Parts) -> System:
        """The linear system at a point. Warn where that is not a solution."""
        system = self._system(ev, residual)
        self._check(system, values, [part.detach() for part in residual])
        return system

    def _check(self, system: System, values: Parts, residual: Parts) -> None:
        """Warn where derivatives are off by about as much as the residual is, relatively."""
        space = system.operator._domain
        r, x = space.join(residual, None), space.join(values, None)
        size = float(r.norm())
        if not size:
            return
        if not torch.isfinite(r).all():
            raise InputError(f"{self.kind}: {WHAT[self.kind]} is not finite at x_star.")
        if not bool(x.any()):
            x = torch.ones_like(x)
        with _modes.grad_mode(False):
            scale = float(system.operator._times(x).norm())  # of a linear problem, the residual at zero
        limit = self._given.gradient_tol
        if limit is None:
            limit = 1e-3 if torch.finfo(r.dtype).bits > 16 else 0.1
        if size > limit * scale:
            off = size / scale if scale else float("inf")
            self._line.warn(
                f"{self.kind}: x_star is not the solution: {WHAT[self.kind]} has {off:.2g} times its size at zero, and "
                f"derivatives are off by about as much, relatively, or more. Solve further, take Newton steps by "
                f"polish=1, or accept it by gradient_tol=."
            )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}, {tuple(tensor.shape)}"


WHAT: dict[Kind, str] = {"argmin": "the gradient of f", "root": "F(x)", "fixed_point": "x - g(x)"}
