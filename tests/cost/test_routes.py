"""Promise 6, where a call chooses between routes: what each side of the choice costs, in evaluations and passes.

A route that is never taken, because it always fails, costs what the other one does; so both sides are counted. Choices
by an argument (an order, `method=`, `chunk_size=`) are in test_passes.py, those of a tall Jacobian in
tests/unit/calculus/test_tall_jacobian.py, blocks of samples in test_fields.py, graphs that are kept for some batches
alone in tests/unit/curvature/test_data.py, segments of an unrolled solution in tests/unit/implicit.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from tests.support.passes import Count

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
V = torch.cos(torch.arange(6, dtype=D))
MANY = torch.stack([V * k for k in range(1, 8)])
BATCH = torch.randn(5, 3, dtype=D, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([True, False] * 3)


def loss(x: Tensor) -> Tensor:
    return torch.tanh(x.cumsum(0) * x).square().sum()


def samples(x: Tensor) -> Tensor:
    return torch.tanh(x.cumsum(-1) * x).square().sum(-1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Looks(Cube):
    """Its backward looks at a value, as `torch.vmap` does not allow."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g if bool(g.isfinite().all()) else g


def cube(x: Tensor) -> Tensor:
    """A stranger to Taylor mode."""
    return Cube.apply(x)


with torch.inference_mode():
    THEIRS = torch.ones(6, dtype=D)


def weighted(w: Tensor, b: Tensor) -> Tensor:
    return (w * b).tanh().sum(-1) ** 2


def hessian(f: Callable[[Tensor], Tensor], **options: Any) -> hodiff.HessianOperator:
    """Over two batches."""
    batches = [torch.tensor(1.0), torch.tensor(2.0)]
    return hodiff.HessianOperator(lambda x, b: (f(x * b), 1.0), X, data=batches, **options)


def one_by_one(f: Callable[[Tensor], Tensor]) -> hodiff.HessianOperator:
    return hodiff.HessianOperator(f, X, chunk_size=1)


def products(f: Callable[[Tensor], Tensor], **options: Any) -> None:
    H = hessian(f, **options)
    H @ V
    H @ V


def weight_norm(x: Tensor) -> Tensor:
    return torch._weight_norm(x.reshape(2, 3), x[:2, None] + 2, 0).sin().sum()


# For each choice and side of it: the call, f, evaluations of f, and passes.
ROUTES: dict[str, dict[str, tuple[Callable[[Any], object], Callable[..., Any], int, int]]] = {
    "several vectors": {
        "in a batch": (lambda f: hodiff.hvp(f, X, MANY), loss, 1, 1 + 1),
        "apart, where their batch is wrong": (
            lambda f: hodiff.hvp(f, X, MANY), lambda x: loss(x.masked_select(MASK)), 1, 1 + 7),
        "apart, where the batch fails": (
            lambda f: hodiff.vjp(f, X, MANY), lambda x: Looks.apply(x), 1, 1 + 7),
        "apart, where they are large": (
            lambda f: hodiff.vjp(f, X, MANY), lambda x: x.repeat(40_000).reshape(-1, 6).mean(0), 1, 7),
    },
    "jvp": {
        "through operations": (lambda f: hodiff.jvp(f, X, V), torch.sin, 1, 2),
        "through a Function": (lambda f: hodiff.jvp(f, X, V), cube, 1, 3),
    },
    "per_sample_grad": {
        "in factors": (lambda f: hodiff.per_sample_grad(f, X[:3], BATCH), weighted, 1, 1 + 1),
        "in factors, of a random f": (
            lambda f: hodiff.per_sample_grad(f, X[:3], BATCH), lambda w, b: F.dropout(weighted(w, b)), 1, 1 + 1),
        "samples apart": (lambda f: hodiff.per_sample_grad(f, X[:3], BATCH, chunk_size=100), weighted, 2, 1 + 1),
        "rows, of a random f": (
            lambda f: hodiff.per_sample_grad(f, X[:3], BATCH, chunk_size=100),
            lambda w, b: F.dropout(weighted(w, b)), 1, 1),
        "rows, where samples mix": (
            lambda f: hodiff.per_sample_grad(f, X[:3], BATCH, chunk_size=100),
            lambda w, b: weighted(w, b - b.mean(0)), 2, 1),
        "rows, where f looks at a value": (
            lambda f: hodiff.per_sample_grad(f, X[:3], BATCH, chunk_size=100),
            lambda w, b: weighted(w, b) if w.sum() < 9 else w, 2, 1),
        "rows, to be differentiated": (
            lambda f: hodiff.per_sample_grad(f, X[:3], BATCH, create_graph=True), weighted, 1, 1),
    },
    "gram": {
        "in factors": (lambda f: hodiff.gram(f, X[:3], BATCH), weighted, 1, 1 + 1),
        "rows, to be differentiated": (
            lambda f: hodiff.gram(f, X[:3], BATCH, create_graph=True), weighted, 1, 1),
    },
    "evaluation": {
        "once": (lambda f: hodiff.hvp(f, X, V), loss, 1, 2),
        "again, with norms written out": (lambda f: hodiff.hvp(f, X, V), weight_norm, 2, 2),
        "again, with normal tensors": (lambda f: hodiff.hvp(f, X, V), lambda x: (x**3 * THEIRS).sum(), 2, 2),
    },
    "products of an operator": {
        "of kept graphs": (products, loss, 2, 2 + 2 * 2),
        "of new ones": (  # and the value and gradient of both, which tell how large the graphs are
            lambda f: products(f, memory_budget=0), loss, 2 * 2, 2 * 2 * 2),
    },
    "nth_derivative": {
        "by Taylor mode": (lambda f: hodiff.nth_derivative(f, X, 4), torch.sin, 1, 0),
        "by passes": (lambda f: hodiff.nth_derivative(f, X, 4), cube, 1 + 1, 4 + 4),
    },
    "laplacian": {
        "by Taylor mode": (lambda f: hodiff.laplacian(f, BATCH), samples, 1, 0),
        "by passes": (lambda f: hodiff.laplacian(f, BATCH), lambda x: cube(x).sum(-1), 1 + 1, 1 + 1),
    },
    "partial": {
        "by Taylor mode": (lambda f: hodiff.partial(f, BATCH, (0, 0, 1, 2)), samples, 1, 0),
        "by passes": (lambda f: hodiff.partial(f, BATCH, (0, 0, 1, 2)), lambda x: cube(x.cumsum(-1)).sum(-1), 1 + 1, 4),
    },
    "sparse Jacobian": {
        "by columns": (  # found by one pass over one evaluation; a product for each of two colors, of one pass
            lambda f: hodiff.sparse_jacobian(f, X, chunk_size=1), lambda x: x.sin() * x[0], 1 + 1, 1 + 1 + 2),
        "by rows": (
            lambda f: hodiff.sparse_jacobian(f, X, chunk_size=1),
            lambda x: torch.cat([x.sin(), x.sum()[None]]), 1 + 1, 1 + 2),
    },
    "divergence": {
        "by Taylor mode": (lambda f: hodiff.divergence(f, BATCH), lambda x: x.sin() * x.sum(-1, keepdim=True), 1, 0),
        "by passes": (lambda f: hodiff.divergence(f, BATCH), lambda x: cube(x) * x.sum(-1, keepdim=True), 1 + 1, 3),
    },
    "trace": {
        "estimated": (lambda f: hodiff.trace(one_by_one(f), samples=4), loss, 1, 1 + 4),
        "exact": (lambda f: hodiff.trace(one_by_one(f), samples=7), loss, 1, 1 + 6),
    },
    "diagonal": {
        "estimated": (lambda f: hodiff.diagonal(one_by_one(f), samples=4), loss, 1, 1 + 4),
        "exact": (lambda f: hodiff.diagonal(one_by_one(f), samples=7), loss, 1, 1 + 6),
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize(("choice", "side"), [(choice, side) for choice, sides in ROUTES.items() for side in sides])
def test_each_side_of_a_choice(choice: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, f, evaluations, passes = ROUTES[choice][side]
    call(Count(monkeypatch).of(f))  # a Python Function is held against differences, once
    count = Count(monkeypatch)
    call(count.of(f))
    assert (count.evaluations, count.passes) == (evaluations, passes)
