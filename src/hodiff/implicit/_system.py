"""The linear system of an implicit derivative: Jᵀ u = v at a solution, through a graph that is kept."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hodiff._core import _checks, _modes, _nodes, _reverse
from hodiff._core._graph import Graph
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import default_rtol
from hodiff.curvature._records import SolveRecord
from hodiff.curvature._solve import Method, attempt
from hodiff.curvature._space import Parts, Space
from hodiff.errors import ConvergenceWarning, GraphError


class Line(NamedTuple):
    """The line of the user's that a call stands in."""

    file: str
    number: int
    module: str
    registry: Any

    @classmethod
    def now(cls) -> Line:
        """That of the call being made."""
        frame = inspect.currentframe()
        for _ in range(_checks.outside() - 1):
            frame = frame.f_back if frame else None
        if frame is None:
            return cls("<unknown>", 0, "<unknown>", {})
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        return cls(frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry)

    def warn(self, text: str) -> None:
        """A ConvergenceWarning there, also from a backward pass elsewhere."""
        warnings.warn_explicit(text, ConvergenceWarning, self.file, self.number, self.module, self.registry)


@final
class Transposed(LinearOperator):
    """Jᵀ at a solution, by reverse passes through the graph of the residual; J itself by the derivative of those."""

    def __init__(self, ev: Graph, residual: Parts, *, symmetric: bool) -> None:
        super().__init__()
        self._ev = ev
        self._residual = residual
        self._symmetric = symmetric
        self._space = Space(ev.leaves, ev.where.names, ev.where.tree(), f"like {ev.where.name}")
        self._linear: tuple[Parts, Parts] | None = None
        self._calls_back = _nodes.runs_hooks(_nodes.survey([part for part in residual if part.requires_grad]))

    @property
    def _domain(self) -> Space:
        return self._space

    @property
    def _range(self) -> Space:
        return self._space

    @property
    def symmetric(self) -> bool:
        """Whether J is the Hessian of a function."""
        return self._symmetric

    def ready(self) -> AbstractContextManager[Any]:
        """The state in which passes may run."""
        return self._ev.resumed() if self._calls_back else _modes.recording()

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        with self.ready():
            return _reverse.products(self._ev, self._residual, parts, count, chunk_size=None)

    def _times(self, flat: Tensor) -> Tensor:
        """As for any operator; but what it gives is read alone, and need not be memory of its own."""
        self._count(1)
        with self.ready():
            parts = _reverse.writable(self._ev, self._space.split(flat))
            return self._space.join(_reverse.pull(self._ev, self._residual, parts), None)

    def push(self, parts: Parts, count: int | None) -> Parts:
        """J v."""
        with self.ready():
            if self._linear is None:
                cotangents = [torch.ones_like(part, requires_grad=True) for part in self._residual]
                self._linear = cotangents, _reverse.transposed(self._ev, self._residual, cotangents)
            cotangents, pulled = self._linear
            return _reverse.products(self._ev, pulled, parts, count, chunk_size=None, inputs=cotangents)

    def _transposed(self) -> LinearOperator:
        return Jacobian(self)

    def _chunk(self, count: int) -> int:
        return count

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        raise NotImplementedError

    def _about(self) -> str:
        return "at a solution"


@final
class Jacobian(LinearOperator):
    """J, the transpose of that."""

    def __init__(self, turned: Transposed) -> None:
        super().__init__()
        self._turned = turned

    @property
    def _domain(self) -> Space:
        return self._turned._domain

    @property
    def _range(self) -> Space:
        return self._turned._domain

    @property
    def symmetric(self) -> bool:
        """Not as far as is known."""
        return False

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._turned.push(parts, count)

    def _transposed(self) -> LinearOperator:
        return self._turned

    def _chunk(self, count: int) -> int:
        return count

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        raise NotImplementedError

    def _about(self) -> str:
        return "at a solution"


class System:
    """J and Jᵀ at a solution, and how systems with them are solved; what fails is said of the line of the call."""

    def __init__(
        self,
        operator: Transposed,
        name: str,
        line: Line,
        *,
        method: Method,
        damping: float,
        preconditioner: LinearOperator | None,
        rtol: float | None,
        products: int | None,
        order: int,
    ) -> None:
        self.operator = operator
        self.name = name
        self.line = line
        self.order = order
        self._method: Method = method
        self._damping = damping
        self._preconditioner = preconditioner
        self._products = products
        # What is differentiated again has the errors of several solves in it.
        default = default_rtol(operator.dtype) * (1 if order == 1 else 1e-2)
        self._rtol = max(default, 4 * torch.finfo(operator.dtype).eps) if rtol is None else rtol

    def solved(self, v: Sequence[Tensor], *, transposed: bool, least: float = 0.0) -> Parts:
        """J⁻ᵀ v, or J⁻¹ v; to a tolerance relative to |v|, or to `least` where that is larger."""
        space = self.operator._domain
        flat = space.join([part.detach() for part in v], None)
        size = float(flat.norm())
        if not size or size <= 2 * self._rtol * least:
            return space.split(torch.zeros_like(flat))
        if not bool(flat.isfinite().all()):
            return space.split(torch.full_like(flat, torch.nan))
        operator, preconditioner = self.operator, self._preconditioner
        if not transposed and not operator.symmetric:
            operator, preconditioner = operator.T, None if preconditioner is None else preconditioner.T
        with _modes.grad_mode(False):  # what is differentiable of it, the caller's node says
            found, trouble = attempt(
                operator,
                flat,
                method=self._method,
                damping=self._damping,
                preconditioner=preconditioner,
                rtol=min(0.5, self._rtol * max(1.0, least / size)),
                products=self._products,
            )
        if trouble:
            self._report(found)
        return space.split(found.value)

    def _report(self, found: SolveRecord[Tensor]) -> None:
        """Raise where there is no solution to speak of; warn where it is less exact than asked for."""
        place = f"{self.name}, called at {self.line.file}:{self.line.number}"
        if found.status == "negative curvature":
            raise GraphError(
                f"{place}: the second derivative of f at x_star has a direction of negative or zero curvature, so "
                f"x_star is no isolated minimum: a saddle point (method='minres' differentiates it as a stationary "
                f"point), or a flat direction (damping= adds to the curvature). Relative residual {found.residual:.2g}."
            )
        if found.status == "stagnation" and found.residual > 1e-2:
            raise GraphError(
                f"{place}: the linear system of the derivative is singular: the solution is not isolated, so that its "
                f"derivative does not exist (relative residual {found.residual:.2g} after {found.products} products). "
                f"Use damping=, or add a term to f that makes the solution unique."
            )
        self.line.warn(
            f"{place}: after {found.products} products the linear system of the derivative has a relative residual of "
            f"{found.residual:.2g} (rtol={self._rtol:g}), and derivatives are off by about that times its condition. "
            f"Allow more by products=, give a preconditioner=, or add damping=."
        )
