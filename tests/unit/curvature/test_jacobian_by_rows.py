"""Products of a Jacobian with its transpose, by the rows in factors, against the Jacobian itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hodiff

D = torch.float64


class Case(NamedTuple):
    """A Jacobian, and whether its rows are known in factors."""

    J: hodiff.JacobianOperator
    known: bool = True


def network(numbers: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, numbers)).double()


def bent(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin()


def over(model: nn.Module, *counts: int, f: Callable[..., Any] = bent) -> hodiff.JacobianOperator:
    batches = [torch.randn(count, 4, dtype=D) for count in counts]
    return hodiff.JacobianOperator(f, model, data=batches)


def mixing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 2)).double()


CASES: dict[str, Callable[[], Case]] = {
    "numbers": lambda: Case(over(network(3), 5)),
    "one number": lambda: Case(over(network(1), 5, f=lambda m, x: bent(m, x).squeeze(1))),
    "batches": lambda: Case(over(network(2), 5, 1, 3)),
    "a table for each": lambda: Case(over(network(6), 5, f=lambda m, x: bent(m, x).view(-1, 3, 2))),
    "two outputs": lambda: Case(over(network(3), 5, f=lambda m, x: (bent(m, x), m(x) ** 2)), False),
    "mixed": lambda: Case(over(mixing(), 5), False),
    "more than 64": lambda: Case(over(network(65), 2), False),
    "of a tensor": lambda: Case(
        hodiff.JacobianOperator(lambda x: torch.stack([x.sin().sum(), x.prod()]), torch.rand(3, dtype=D)), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_with_the_transpose(name: str) -> None:
    torch.manual_seed(0)
    J, known = CASES[name]()
    matrix = J.dense()
    outer, inner = J @ J.T, J.T @ J
    before = J.products
    torch.testing.assert_close(outer.dense(), matrix @ matrix.T)
    assert (J.products - before < len(matrix)) == known
    found = hodiff.diagonal(outer, method="exact")
    torch.testing.assert_close(outer.flatten(found.value), (matrix @ matrix.T).diagonal())
    assert found.route == ("rows" if known else "columns")
    found = hodiff.diagonal(inner, method="exact")
    torch.testing.assert_close(inner.flatten(found.value), (matrix.T @ matrix).diagonal())


def test_the_thin_side() -> None:
    """Determinants, solutions and multiples of J'J + λ take no product for each column."""
    torch.manual_seed(0)
    J = over(network(2), 5, 3)
    A = 2 * (J.T @ J) + 0.1
    matrix = A.dense()
    before = A.products
    torch.testing.assert_close(hodiff.logdet(A).value, matrix.logdet())
    b = torch.randn(len(matrix), dtype=D)
    torch.testing.assert_close(hodiff.solve(A, b).value, torch.linalg.solve(matrix, b))
    assert A.products - before < 10


def test_each_sample_has_a_jacobian_of_its_own() -> None:
    x = torch.randn(4, 3, dtype=D)
    J = hodiff.JacobianOperator(lambda x: x.sin() * x.sum(1, keepdim=True), x, batch_ndim=1)
    matrix = J.dense()
    torch.testing.assert_close((J @ J.T).dense(), matrix @ matrix.mT)
    found = hodiff.diagonal(J.T @ J, method="exact").value
    torch.testing.assert_close(found, (matrix.mT @ matrix).diagonal(dim1=1, dim2=2))
