"""Hypothesis strategies: random functions, points, containers.

A function is an expression tree that evaluates itself on a tensor (``expression(x)``), that SymPy understands
(``expression.sympy(t)``, for trees without roll), and that prints as the formula it is, so that a falsifying example
can be read.  All are smooth everywhere and grow slowly, so that float64 differences stay sharp.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Expression:
    """A node: the name of its operation, and its operands."""

    operation: str
    operands: tuple["Expression", ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return OPERATIONS[self.operation][0](x, *(operand(x) for operand in self.operands))

    def sympy(self, t: Any) -> Any:
        return OPERATIONS[self.operation][1](t, *(operand.sympy(t) for operand in self.operands))

    def __repr__(self) -> str:
        return f"{self.operation}({', '.join(map(repr, self.operands))})" if self.operands else self.operation


def _constant(value: float) -> tuple[Callable, Callable]:
    return lambda x: torch.full_like(x, value), lambda t: sympy.Rational(value)


def _sympy_softplus(t: Any, a: Any) -> Any:
    return sympy.log(1 + sympy.exp(a))


# name: (on tensors, in SymPy); the first argument is always x itself
OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Any]]] = {
    "x": (lambda x: x, lambda t: t),
    "half": _constant(0.5),
    "minus_two": _constant(-2.0),
    "sin": (lambda x, a: torch.sin(a), lambda t, a: sympy.sin(a)),
    "tanh": (lambda x, a: torch.tanh(a), lambda t, a: sympy.tanh(a)),
    "gauss": (lambda x, a: torch.exp(-a * a), lambda t, a: sympy.exp(-a * a)),
    "square": (lambda x, a: a**2, lambda t, a: a**2),
    "softplus": (lambda x, a: F.softplus(a, threshold=50.0), _sympy_softplus),
    "roll": (lambda x, a: torch.roll(a, 1, -1) if a.ndim else a, None),
    "add": (lambda x, a, b: a + b, lambda t, a, b: a + b),
    "mul": (lambda x, a, b: a * b, lambda t, a, b: a * b),
    "sub": (lambda x, a, b: a - b, lambda t, a, b: a - b),
    "angle": (lambda x, a, b: torch.atan2(a, b * b + 1), lambda t, a, b: sympy.atan(a / (b * b + 1))),
}
UNARY = ("sin", "tanh", "gauss", "square", "softplus")
BINARY = ("add", "mul", "sub", "angle")


def expressions(roll: bool = True, leaves: int = 5) -> st.SearchStrategy[Expression]:
    """Random expressions in which x occurs; ``roll=False``: elementwise ones, which SymPy can differentiate."""
    x = Expression("x")
    unary = st.sampled_from(UNARY + ("roll",) * roll)
    base = st.sampled_from([x, x, x, Expression("half"), Expression("minus_two")])
    trees = st.recursive(
        base,
        lambda inner: st.one_of(
            st.builds(lambda o, a: Expression(o, (a,)), unary, inner),
            st.builds(lambda o, a, b: Expression(o, (a, b)), st.sampled_from(BINARY), inner, inner),
        ),
        max_leaves=leaves,
    )
    return trees.filter(mentions_x)


def mentions_x(expression: Expression) -> bool:
    return expression.operation == "x" or any(map(mentions_x, expression.operands))


@dataclass(frozen=True)
class Scalar:
    """An expression made scalar by weights without symmetries; over the last ``event`` dimensions (None: over all)."""

    expression: Expression
    event: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.expression(x)
        dims = tuple(range(x.ndim)) if self.event is None else tuple(range(x.ndim - self.event, x.ndim))
        shape = [x.shape[d] for d in dims]
        count = int(torch.Size(shape).numel())
        weights = torch.cos(1.3 * torch.arange(count, dtype=x.dtype, device=x.device)).reshape(shape) + 0.2
        return (weights * y).sum(dims) if dims else weights * y


def scalars(roll: bool = True, leaves: int = 5) -> st.SearchStrategy[Scalar]:
    return expressions(roll, leaves).map(Scalar)


shapes = st.sampled_from([(), (1,), (3,), (4,), (2, 3), (1, 4), (2, 1, 2)])


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> st.SearchStrategy[Tensor]:
    """Points in [-1.5, 1.5], zero and repeated entries included."""
    count = int(torch.Size(shape).numel())
    entries = st.floats(-1.5, 1.5, width=16, allow_subnormal=False)
    return st.lists(entries, min_size=count, max_size=count).map(lambda e: torch.tensor(e, dtype=dtype).reshape(shape))


points = shapes.flatmap(values)


def direction(like: Tensor, seed: int = 0, many: int | None = None) -> Tensor:
    """A seeded random vector like a tensor, or ``many`` of them stacked."""
    generator = torch.Generator().manual_seed(seed)
    shape = like.shape if many is None else (many, *like.shape)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(like.dtype)


Pair = namedtuple("Pair", ["first", "second"])

# structures of where: name -> (build it from two tensors, read the two tensors from it)
CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda t: (t[0], t[1])),
    "list": (lambda a, b: [a, b], lambda t: (t[0], t[1])),
    "dict": (lambda a, b: {"z": a, "b": b}, lambda t: (t["z"], t["b"])),
    "namedtuple": (Pair, lambda t: (t.first, t.second)),
    "nested": (lambda a, b: {"deep": [(a,), Pair(b, ())]}, lambda t: (t["deep"][0][0], t["deep"][1].first)),
}
