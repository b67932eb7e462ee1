"""The first derivative of a determinant that is 0: PyTorch's, without a graph, is 0 whatever it should be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.differences import first_difference, gradient_by_differences, relative_error

D = torch.float64
A = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D)
COFACTORS = torch.tensor([[4.0, -2.0], [-2.0, 1.0]], dtype=D)
BATCH = torch.stack([A, torch.eye(2, dtype=D)])
OF_BATCH = torch.stack([COFACTORS, torch.eye(2, dtype=D)])


def entry(z: Tensor) -> Tensor:
    """A determinant as a vector of one."""
    return torch.det(z).reshape(1)


def tensor_form(call: Callable[[Tensor, Tensor], Any]) -> Any:
    x = A.clone().requires_grad_()
    return call(torch.det(x * 1), x)


RUNS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "grad": (lambda: hodiff.grad(torch.det, A), COFACTORS),
    "linalg": (lambda: hodiff.grad(torch.linalg.det, A), COFACTORS),
    "create_graph": (lambda: hodiff.grad(torch.det, A, create_graph=True).detach(), COFACTORS),
    "value_and_grad": (lambda: hodiff.value_and_grad(torch.det, A)[1], COFACTORS),
    "vjp": (lambda: hodiff.vjp(torch.det, A, torch.ones((), dtype=D)), COFACTORS),
    "vjp of many": (lambda: hodiff.vjp(torch.det, A, torch.ones(2, dtype=D)), torch.stack([COFACTORS] * 2)),
    "jvp": (lambda: hodiff.jvp(torch.det, A, A.cos()), (COFACTORS * A.cos()).sum()),
    "jacobian": (lambda: hodiff.jacobian(torch.det, A), COFACTORS),
    "rows": (lambda: hodiff.jacobian(torch.det, BATCH).sum(0), OF_BATCH),
    "sparse": (lambda: hodiff.sparse_jacobian(entry, A).to_dense().reshape(2, 2), COFACTORS),
    "a batch": (lambda: hodiff.grad(lambda z: torch.det(z).sum(), BATCH), OF_BATCH),
    "batch_ndim": (lambda: hodiff.grad(torch.det, BATCH, batch_ndim=1), OF_BATCH),
    "transposed operator": (
        lambda: (hodiff.JacobianOperator(entry, A).T @ torch.ones(1, dtype=D)).reshape(2, 2),
        COFACTORS,
    ),
    "a tensor": (lambda: tensor_form(hodiff.grad), COFACTORS),
    "multi_grad": (lambda: hodiff.multi_grad([torch.det, torch.trace], A)[0], COFACTORS),
    "multi_grad, shared": (
        lambda: hodiff.multi_grad([lambda _, t: torch.det(t), lambda _, t: t.sum()], A, shared=lambda z: z * 1)[0],
        COFACTORS,
    ),
    "multi_grad, tensors": (lambda: tensor_form(lambda y, x: hodiff.multi_grad([y, x.sum()], x)[0]), COFACTORS),
    "multi_grad, released": (
        lambda: tensor_form(lambda y, x: hodiff.multi_grad([y, x.sin().sum()], x, release=True)[0]),
        COFACTORS,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_cofactors(name: str) -> None:
    call, expected = RUNS[name]
    found = call()
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_any_rank(rank: int) -> None:
    """Of a rank below n - 1 it is 0."""
    matrix = torch.diag(torch.tensor([2.0, 3.0, 5.0, 7.0][:rank] + [0.0] * (3 - rank), dtype=D))[[1, 0, 2]]
    assert relative_error(hodiff.grad(torch.det, matrix), gradient_by_differences(torch.det, matrix, 1e-3)) < 1e-8
    v = torch.linspace(-1, 1.3, 9, dtype=D).reshape(3, 3)
    expected = first_difference(lambda t: hodiff.grad(torch.det, matrix + t * v))
    if rank == 2:
        assert relative_error(hodiff.hvp(torch.det, matrix, v), expected) < 1e-6


def test_through_steps_of_an_optimizer() -> None:
    def trained(scale: Tensor) -> Tensor:
        return hodiff.unroll(lambda z: torch.det(z * scale), A, hodiff.rules.SGD(lr=0.1), 2).sum()

    one = torch.ones((), dtype=D)
    assert relative_error(hodiff.grad(trained, one), gradient_by_differences(trained, one, 1e-3)) < 1e-7


def test_others_are_as_they_were() -> None:
    f: Callable[[Tensor], Tensor] = lambda z: torch.det(z + torch.eye(2, dtype=D))
    torch.testing.assert_close(hodiff.grad(f, A), torch.tensor([[5.0, -2.0], [-2.0, 2.0]], dtype=D))
