"""A solution of equations attached to the graph: frozen linear systems,
and the links that they make.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _settings, _versions
from hodiff._core._tree import Leaves, Vectors
from hodiff.curvature._krylov import column, listed, norms, number
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import check_rtol, default_rtol
from hodiff.curvature._records import SolveRecord, Status
from hodiff.errors import ConvergenceWarning, GraphError, InputError

Solver = Callable[..., tuple[SolveRecord[Tensor], "str | None"]]
"""Solves an operator's system for a flat right-hand side, with `preconditioner=` and `rtol=`;
says what went wrong.
"""


GROWS = (
    "the Neumann series diverges: an eigenvalue of J / scale is not within the unit circle around "
    "1. Give a larger scale=, damping=, or method='gmres'."
)


class CallSite(NamedTuple):
    """The line of the user's that a call stands in."""

    file: str
    number: int
    module: str
    registry: Any

    @classmethod
    def now(cls) -> CallSite:
        """The line of the call being made."""
        frame = inspect.currentframe()
        for _ in range(_arguments.outside() - 1):
            frame = frame.f_back if frame else None
        if frame is None:
            return cls("<unknown>", 0, "<unknown>", {})
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        return cls(
            frame.f_code.co_filename, frame.f_lineno, names.get("__name__", "<unknown>"), registry
        )

    def warn(self, text: str) -> None:
        """A ConvergenceWarning there, also from a backward pass elsewhere."""
        warnings.warn_explicit(
            text, ConvergenceWarning, self.file, self.number, self.module, self.registry
        )


class ImplicitSystem:
    """J and Jᵀ at a solution, and how systems with them are solved;
    what fails is said of the line of the call.
    """

    def __init__(
        self,
        operator: LinearOperator,
        name: str,
        line: CallSite,
        *,
        solver: Solver,
        preconditioner: LinearOperator | None,
        rtol: float | None,
        order: int,
        steps: bool = False,
        stacked: bool = False,
        fatal: Mapping[Status, str] = MappingProxyType({}),
    ) -> None:
        """The system of `operator`, which is Jᵀ.

        With `steps` its solver takes so many, to no tolerance. A `stacked` one is of several
        solutions, each link of them one tensor, as flat rows. `fatal` says why there is no
        solution where it ends so.
        """
        self.operator = operator
        self.name = name
        self.line = line
        self.order = order
        self._solver = solver
        self._preconditioner = preconditioner
        self._steps = steps
        self._stacked = stacked
        self._size = operator._domain.size
        self._fatal = {"divergence": GROWS, **fatal}
        check_rtol(rtol)
        # What is differentiated again has the errors of several solves in it.
        default = default_rtol(operator.dtype) * (1 if order == 1 else 1e-2)
        self._rtol = max(default, 4 * torch.finfo(operator.dtype).eps) if rtol is None else rtol

    def vectors(self, parts: Sequence[Tensor]) -> Tensor:
        """The vector of a link, flat; as rows those of several solutions, or of samples."""
        parts = [part.detach() for part in parts]
        if self._stacked:
            return parts[0]
        flat = self.operator._domain.join(parts, None)
        return flat.reshape(-1, self._size) if self.operator._domain.batch else flat

    def _parts(self, vectors: Tensor) -> Leaves:
        domain = self.operator._domain
        return (
            [vectors]
            if self._stacked
            else domain.split(vectors.reshape((*domain.batch, self._size)))
        )

    def solved(
        self, v: Sequence[Tensor], *, transposed: bool, least: list[float] | None = None
    ) -> Leaves:
        """J⁻ᵀ v, or J⁻¹ v, to a tolerance relative to each |v|, or to a larger `least`."""
        vectors = self.vectors(v)
        known, lengths = None, listed(norms(vectors.double()))
        sizes = [*zip(lengths, least or [0.0] * len(lengths), strict=True)]
        counts = [float(size > 2 * self._rtol * most) for size, most in sizes]
        if not (all(counts) and all(size < torch.inf for size in lengths)):
            known = vectors.isfinite().all(-1, keepdim=True)
            vectors = torch.where(known, vectors, 0.0) * column(number(counts, vectors), vectors)
            if not bool(vectors.any()):
                return self._parts(torch.where(known, vectors, torch.nan))
        operator, preconditioner = self.operator, self._preconditioner
        if not transposed and not operator.symmetric:
            operator, preconditioner = (
                operator.T,
                None if preconditioner is None else preconditioner.T,
            )
        rows = vectors.ndim == 2
        given = Vectors("rows", [vectors], len(vectors), operator._domain.tree) if rows else vectors
        with _settings.grad_mode(False):  # what is differentiable of it, the caller's node says
            looser = [min(0.5, self._rtol * max(1.0, most / (size or 1.0))) for size, most in sizes]
            solution, trouble = self._solver(
                operator,
                given,
                preconditioner=preconditioner,
                rtol=None if self._steps else looser,
            )
        value = solution.value if known is None else torch.where(known, solution.value, torch.nan)
        if trouble:
            value = torch.where(self._report(solution).to(value.device), torch.nan, value)
        return self._parts(value)

    def _report(self, record: SolveRecord[Tensor]) -> Tensor:
        """Warn where a solution is less exact than asked for; raise, or of samples say which,
        where there is none.
        """
        place = f"{self.name}, called at {self.line.file}:{self.line.number}"
        batch = torch.Size() if self._stacked else self.operator._domain.batch
        residual = torch.as_tensor(record.residual, device="cpu")
        fatal = record.status in self._fatal
        lost = (residual > (1 if self._steps else 1e-2)) & fatal
        if batch and record.direction is not None:
            lost |= record.direction.any(1).cpu()
        if fatal and (record.status != "stagnation" or bool(lost.any())):
            why = f"{self._fatal[record.status]} Relative residual {float(residual.max()):.2g}"
            spent = f"after {record.products} products"
            if not batch:
                raise GraphError(f"{place}: {why} {spent}.")
            self.line.warn(
                f"{place}: {why} {spent}{told(lost.reshape(batch))}, whose derivatives are nan; "
                f"those of the other samples are right."
            )
        met = False if record.converged is None else record.converged
        rest = ~(lost | torch.as_tensor(met, device="cpu"))
        if bool(rest.any()) and not (fatal and self._steps):
            self.line.warn(
                f"{place}: after {record.products} products the linear system of the derivative "
                f"has a relative residual of {float(residual[rest].max()):.2g} "
                f"(rtol={self._rtol:g}){told(rest.reshape(batch or -1))}, and derivatives are off "
                f"by about that times its condition number. Allow more products=, give a "
                f"preconditioner=, or add damping=."
            )
        return lost[..., None]


def told(which: Tensor) -> str:
    """The samples concerned, in words; nothing, of a single one."""
    if which.ndim == 0 or which.numel() == 1:
        return ""
    numbers = which.nonzero().squeeze(-1).tolist()
    first = ", ".join(map(str, numbers[:3]))
    more = ", ..." if len(numbers) > 3 else ""
    return f" for {len(numbers)} of {which.numel()} samples (number {first}{more})"


# --- attaching a solution to the graph, so that derivatives of it are those of the implicit
# function theorem With the residual \(F(x, \theta)\), zero at \(x^*\), and its Jacobian \(J\) by
# *x*, frozen there, the links
#
# \[ x_j = x_{j-1} - J^{-1} F(x_{j-1}, \theta), \qquad x_0 = x^* \text{ without a graph} \]
#
# all have the value \(x^*\), and the j-th has its first j derivatives: each link is a step of
# Newton's iteration with a frozen Jacobian, which gains an order. (One link is the usual surrogate;
# its second derivative is silently wrong.)


class Chain:
    """The links of one solution.

    Attributes:
        system: The systems with its Jacobian.
        values: The solution.
        scale: Of what links are given.
    """

    def __init__(self, system: ImplicitSystem, values: Leaves) -> None:
        self.system = system
        self.values = values
        self.scale = Scale()

    def link(self, number: int, before: Sequence[Tensor], residual: Sequence[Tensor]) -> Leaves:
        """The next x, from the last one and the residual there."""
        return list(_Link.apply(self, number, *before, *residual))


class Scale:
    """The sizes of the right-hand sides that a reverse pass meets one after the other.

    What an inner link is given is, but for a new part, what the solve of the outer one left: small,
    and to be solved for relative to the whole. The same holds, from the inside out, where the pass
    is differentiated.

    Attributes:
        derived: The scale of the derivatives of what this pass solves.
    """

    derived: Scale

    def __init__(self) -> None:
        self._pass = -1
        self._largest: list[float] = []

    def met(self, vectors: Tensor) -> list[float]:
        """The largest of each before in this pass; these count from now on."""
        now = _versions.pass_at_hand()
        sizes = listed(norms(vectors.double()))
        if now != self._pass:
            self._pass = now
            self._largest = [0.0] * len(sizes)
            self.derived = Scale()
        before = self._largest
        self._largest = [max(most, size) for most, size in zip(before, sizes, strict=True)]
        return before


class _Link(torch.autograd.Function):
    """x - J⁻¹ r, whose value is the solution."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.chain, ctx.number = chain, number
        ctx.save_for_backward(*tensors[len(chain.values) :])
        return tuple(value.clone() for value in chain.values)

    @staticmethod
    def backward(ctx: Any, *v: Tensor) -> tuple[Any, ...]:
        chain, residual = ctx.chain, ctx.saved_tensors
        if any(map(_versions.is_batched, v)):
            raise InputError(
                f"{chain.system.name}: the backward pass solves a linear system, which torch.vmap "
                f"cannot batch. Use hodiff.jacobian or hodiff.hessian, which then take one vector "
                f"at a time."
            )
        if not torch.is_grad_enabled():
            # All links have the same first derivative: the innermost solves once for what they all
            # are given.
            u = chain.system.solved(v, transposed=True) if ctx.number == 1 else None
            return (
                None,
                None,
                *v,
                *((None for _ in residual) if u is None else (-part for part in u)),
            )
        u = list(_Solve.apply(chain.system, True, chain.scale, *v))
        if ctx.number == 1:
            u = _limited(chain.system, chain.system.order - 1, u, residual)
        return None, None, *v, *(-part for part in u)


class _Solve(torch.autograd.Function):
    """J⁻ᵀ v, or J⁻¹ v: linear in v, so that its derivative is the other one."""

    @staticmethod
    def forward(
        ctx: Any, system: ImplicitSystem, transposed: bool, scale: Scale, *v: Tensor
    ) -> tuple[Tensor, ...]:
        least = scale.met(system.vectors(v))
        ctx.system = system
        ctx.transposed = transposed
        ctx.scale = scale.derived
        return tuple(system.solved(v, transposed=transposed, least=least))

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Solve.apply(ctx.system, not ctx.transposed, ctx.scale, *w)


def _limited(
    system: ImplicitSystem, left: int, u: Sequence[Tensor], residual: Sequence[Tensor]
) -> Leaves:
    """A stand-in for the innermost residual in a differentiable pass, itself differentiable so many
    times more.

    With nothing left, everything that the solution depends on is reached through a node that
    raises.
    """
    guards = _OrderExceeded.apply(system, *residual) if not left else residual
    return list(_OrderGuard.apply(system, left, len(u), *u, *guards, *residual))


class _OrderGuard(torch.autograd.Function):
    """The identity, which counts the passes through it that are differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, system: ImplicitSystem, left: int, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.system, ctx.left = system, left
        ctx.save_for_backward(*tensors[2 * count :])
        return tuple(part.view_as(part) for part in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> tuple[Any, ...]:
        residual = ctx.saved_tensors
        through = (
            _limited(ctx.system, max(ctx.left - 1, 0), w, residual)
            if torch.is_grad_enabled()
            else list(w)
        )
        # not None: the guards' node must run
        nothing = [torch.zeros_like(part) for part in residual]
        return None, None, None, *through, *nothing, *nothing


class _OrderExceeded(torch.autograd.Function):
    """Raises where a pass goes through it to what the solution depends on."""

    @staticmethod
    def forward(ctx: Any, system: ImplicitSystem, *residual: Tensor) -> tuple[Tensor, ...]:
        ctx.system = system
        return tuple(part.view_as(part) for part in residual)

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> Any:
        system = ctx.system
        inside = (
            "Call solve inside the function that a hodiff call differentiates so often: "
            "there it allows as many."
        )
        raise GraphError(
            f"{system.name}, called at {system.line.file}:{system.line.number}, allows derivatives "
            f"up to order {system.order}, and this one is higher and would be wrong. "
            + (inside if system.name == "solve" else f"Pass order={system.order + 1}.")
        )
