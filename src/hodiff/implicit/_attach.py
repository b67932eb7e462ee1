r"""Attaching a solution to the graph, so that derivatives of it are those of the implicit function theorem.

With the residual \(F(x, \theta)\), zero at \(x^*\), and its Jacobian \(J\) by *x*, frozen there, the links

\[ x_j = x_{j-1} - J^{-1} F(x_{j-1}, \theta), \qquad x_0 = x^* \text{ without a graph} \]

all have the value \(x^*\), and the j-th has its first j derivatives: each link is a step of Newton's iteration with a
frozen Jacobian, which gains an order. (One link is the usual surrogate; its second derivative is wrong, silently.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import GraphError, InputError
from hodiff.implicit._system import System

Parts = list[Tensor]


class Chain:
    """The links of one solution.

    Attributes:
        system: The systems with its Jacobian.
        values: The solution.
        scale: Of what links are given.
    """

    def __init__(self, system: System, values: Parts) -> None:
        self.system = system
        self.values = values
        self.scale = Scale()

    def link(self, number: int, before: Sequence[Tensor], residual: Sequence[Tensor]) -> Parts:
        """The next x, from the last one and the residual there."""
        return list(_Link.apply(self, number, *before, *residual))


class Scale:
    """How large the right-hand sides are that a reverse pass meets one after the other.

    What an inner link is given is, but for a new part, what the solve of the outer one left: small, and to be solved
    for relative to the whole. The same holds, from the inside out, where the pass is differentiated.

    Attributes:
        derived: The scale of the derivatives of what this pass solves.
    """

    derived: Scale

    def __init__(self) -> None:
        self._pass, self._largest = -1, 0.0

    def met(self, v: Sequence[Tensor]) -> float:
        """The largest before in this pass; this one counts from now on."""
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self._pass = now
            self._largest = 0.0
            self.derived = Scale()
        before = self._largest
        self._largest = max(before, sum(float(part.detach().double().square().sum()) for part in v) ** 0.5)
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
        if any(map(torch._C._functorch.is_batchedtensor, v)):  # pyright: ignore[reportAttributeAccessIssue]
            raise InputError(
                f"{chain.system.name}: its backward pass solves a linear system, which torch.vmap cannot batch. Use "
                f"hodiff.jacobian or hodiff.hessian, which then take one vector at a time."
            )
        if not torch.is_grad_enabled():
            # All links have the same first derivative: the innermost solves once for what they all are given.
            u = chain.system.solved(v, transposed=True) if ctx.number == 1 else None
            return None, None, *v, *((None for _ in residual) if u is None else (-part for part in u))
        u = list(_Solve.apply(chain.system, True, chain.scale, *v))
        if ctx.number == 1:
            u = _limited(chain.system, chain.system.order - 1, u, residual)
        return None, None, *v, *(-part for part in u)


class _Solve(torch.autograd.Function):
    """J⁻ᵀ v, or J⁻¹ v: linear in v, so that its derivative is the other one."""

    @staticmethod
    def forward(ctx: Any, system: System, transposed: bool, scale: Scale, *v: Tensor) -> tuple[Tensor, ...]:
        least = scale.met(v)
        ctx.system = system
        ctx.transposed = transposed
        ctx.scale = scale.derived
        return tuple(system.solved(v, transposed=transposed, least=least))

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_Solve.apply(ctx.system, not ctx.transposed, ctx.scale, *w)


def _limited(system: System, left: int, u: Sequence[Tensor], residual: Sequence[Tensor]) -> Parts:
    """What a differentiable pass gives the innermost residual, itself differentiable so many times more.

    With nothing left, everything that the solution depends on is reached through a node that raises.
    """
    guards = _Beyond.apply(system, *residual) if not left else residual
    return list(_Counted.apply(system, left, len(u), *u, *guards, *residual))


class _Counted(torch.autograd.Function):
    """The identity, which counts the passes through it that are differentiated again."""

    @staticmethod
    def forward(ctx: Any, system: System, left: int, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.system, ctx.left = system, left
        ctx.save_for_backward(*tensors[2 * count :])
        return tuple(part.view_as(part) for part in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> tuple[Any, ...]:
        residual = ctx.saved_tensors
        through = _limited(ctx.system, max(ctx.left - 1, 0), w, residual) if torch.is_grad_enabled() else list(w)
        nothing = [torch.zeros_like(part) for part in residual]  # not None: the guards' node must run
        return None, None, None, *through, *nothing, *nothing


class _Beyond(torch.autograd.Function):
    """Raises where a pass goes through it to what the solution depends on."""

    @staticmethod
    def forward(ctx: Any, system: System, *residual: Tensor) -> tuple[Tensor, ...]:
        ctx.system = system
        return tuple(part.view_as(part) for part in residual)

    @staticmethod
    def backward(ctx: Any, *w: Tensor) -> Any:
        system = ctx.system
        raise GraphError(
            f"{system.name}, called at {system.line.file}:{system.line.number}: was attached for derivatives up to "
            f"order {system.order}, and this is one more, which would be wrong. Pass order={system.order + 1}."
        )
