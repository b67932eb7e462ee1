"""Stochastic Lanczos quadrature: eigenvalues and weights of Krylov spaces of random vectors.

A Lanczos process from z / |z| gives a tridiagonal matrix T; with its eigenvalues θ and the squares τ of the first
entries of its eigenvectors, |z|² Σ τ f(θ) is Gauss's rule for z'f(A)z, whose mean over z is the trace of f(A).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.curvature._lanczos import lanczos
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._probes import RandomVectors
from hodiff.curvature._space import sum_dtype

BASIS_BYTES = 256 * 2**20
"""What the bases of the random vectors that are advanced together may hold."""


class Rules(NamedTuple):
    """One Gauss rule for each random vector: nodes and weights `(K, steps)`, in double precision on the CPU.

    Weights are of the mean over eigenvalues: they add up to 1 in expectation. `coarser` are the rules of half and of a
    quarter of the steps, by which the error of a rule is judged (none where nodes are the eigenvalues); `whole` says
    which vectors have no part outside their rule, so that there is no such error.
    """

    nodes: Tensor
    weights: Tensor
    whole: Tensor
    coarser: tuple[tuple[Tensor, Tensor], ...]

    @property
    def exact(self) -> bool:
        """Whether the nodes are the eigenvalues."""
        return not self.coarser

    def means(self, f: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What each vector says of the mean of a function (of nodes and weights), `(K,)`, and its error by the rule.

        Of rules with ever twice as many nodes the differences fall by a factor r; those to come add up to r / (1 - r)
        of the last one, as in a geometric series.
        """
        fine = f(self.nodes, self.weights)
        if self.exact:
            return fine, torch.zeros((), device="cpu")
        half, quarter = (f(*rule) for rule in self.coarser)
        last, before = (float(((a - b) * ~self.whole).mean().abs()) for a, b in ((fine, half), (half, quarter)))
        ratio = min(last / before, 0.75) if before else 0.75
        return fine, torch.tensor(last * ratio / (1 - ratio), dtype=torch.float64, device="cpu")


def exact_rules(operator: LinearOperator) -> Rules:
    """All eigenvalues, each with the weight of one."""
    matrix = operator._dense().to(torch.float64 if operator.device.type != "mps" else torch.float32).cpu().double()
    unit = float(matrix.abs().max()) or 1.0
    values = torch.linalg.eigvalsh((matrix + matrix.T) / (2 * unit))[None] * unit
    return Rules(values, torch.full_like(values, 1 / len(matrix)), torch.ones(1, dtype=torch.bool, device="cpu"), ())


def rules(
    operator: LinearOperator, drawn: RandomVectors, steps: int, name: str, look: Callable[[Rules], bool]
) -> Rules:
    """The rules of all random vectors, some at a time; `look` sees them as they come, and may end it."""
    size, dtype = operator.shape[0], sum_dtype(operator.dtype)
    steps = min(steps, size)
    together = max(1, BASIS_BYTES // (size * (steps + 1) * torch.empty((), dtype=dtype, device="cpu").element_size()))
    count = min(together, 8)
    found = _of(operator, drawn.take(min(count, drawn.number)).to(dtype), steps, name)
    while not look(found) and len(found.nodes) < drawn.number:
        more = drawn.take(min(count, drawn.number - len(found.nodes))).to(dtype)
        found = _joined(found, _of(operator, more, steps, name))
    return found


def _joined(first: Rules, second: Rules) -> Rules:
    def pair(one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other])

    coarser = tuple((pair(a[0], b[0]), pair(a[1], b[1])) for a, b in zip(first.coarser, second.coarser, strict=True))
    nodes, weights = pair(first.nodes, second.nodes), pair(first.weights, second.weights)
    return Rules(nodes, weights, pair(first.whole, second.whole), coarser)


def _of(operator: LinearOperator, rows: Tensor, steps: int, name: str) -> Rules:
    diagonal, beside, whole, unit = lanczos(operator, rows, steps, name)
    squares = rows.double().square().sum(1).cpu() / operator.shape[0]
    fine, *coarser = (
        _gauss(diagonal[:, :count], beside[:, : count - 1], squares, unit)
        for count in (steps, -(-steps // 2), -(-steps // 4))
    )
    return Rules(*fine, whole, tuple(coarser))


def _gauss(diagonal: Tensor, beside: Tensor, squares: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    T = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    nodes, vectors = torch.linalg.eigh(T)
    return nodes * unit, vectors[:, 0].square() * squares[:, None]
