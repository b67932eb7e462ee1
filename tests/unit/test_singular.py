"""The first derivative of a determinant that is 0: PyTorch's, without a graph, is 0 whatever it should be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import GraphError

D = torch.float64
A = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D)
COFACTORS = torch.tensor([[4.0, -2.0], [-2.0, 1.0]], dtype=D)
BATCH = torch.stack([A, torch.eye(2, dtype=D)])

RUNS: dict[str, Callable[[], Any]] = {
    "grad": lambda: hodiff.grad(torch.det, A),
    "linalg": lambda: hodiff.grad(torch.linalg.det, A),
    "vjp": lambda: hodiff.vjp(torch.det, A, torch.ones((), dtype=D)),
    "jacobian": lambda: hodiff.jacobian(torch.det, A),
    "a batch": lambda: hodiff.grad(lambda z: torch.det(z).sum(), BATCH),
    "batch_ndim": lambda: hodiff.grad(torch.det, BATCH, batch_ndim=1),
    "multi_grad": lambda: hodiff.multi_grad([torch.det], A),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match=r"det is 0 at a matrix whose determinant is 0, .* create_graph=True"):
        RUNS[name]()


def test_a_tensor_too() -> None:
    x = A.clone().requires_grad_()
    with pytest.raises(GraphError, match=r"det is 0 at a matrix whose determinant is 0, .* create_graph=True"):
        hodiff.grad(torch.det(x), x)


def test_the_way_out_is_right() -> None:
    torch.testing.assert_close(hodiff.grad(torch.det, A, create_graph=True).detach(), COFACTORS)


def test_others_are_as_they_were() -> None:
    f: Callable[[Tensor], Tensor] = lambda z: torch.det(z + torch.eye(2, dtype=D))
    torch.testing.assert_close(hodiff.grad(f, A), torch.tensor([[5.0, -2.0], [-2.0, 2.0]], dtype=D))
