"""Sparse, nested and meta tensors inside of `f`, or as the point: right, or refused by name."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from tests.support.properties import ERRORS, right_or_refused

D = torch.float64


INDEX = torch.tensor([[0, 1, 2], [1, 2, 0]])


CROW, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0])


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


def coo(z: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDEX, z, (3, 3)).to_dense().pow(3).sum()


def csr(z: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(CROW, COLUMNS, z, (3, 3)).to_dense().pow(3).sum()


CURVED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "hessian": lambda f: (hodiff.hessian(f, POINT), torch.diag(6 * POINT)),
    "hvp": lambda f: (hodiff.hvp(f, POINT, torch.ones_like(POINT)), 6 * POINT),
    "hessian_diagonal": lambda f: (hodiff.hessian_diagonal(f, POINT), 6 * POINT),
    "HessianOperator": lambda f: (hodiff.HessianOperator(f, POINT) @ torch.ones_like(POINT), 6 * POINT),
    "cross_hessian": lambda f: (
        hodiff.cross_hessian(lambda z, y: f(z) * y.sum(), POINT, torch.ones(1, dtype=D)), 3 * POINT[:, None] ** 2
    ),
    "cross_hvp": lambda f: (
        hodiff.cross_hvp(lambda z, y: f(z) * y.sum(), POINT, *(torch.ones(1, dtype=D),) * 2), 3 * POINT**2
    ),
    "laplacian, reverse": lambda f: (
        hodiff.laplacian(f, POINT, batch_ndim=0, method="reverse").detach(), (6 * POINT).sum()
    ),
    "laplacian": lambda f: (hodiff.laplacian(f, POINT, batch_ndim=0).detach(), (6 * POINT).sum()),
    "grad": lambda f: (hodiff.grad(f, POINT), 3 * POINT**2),
    "jvp": lambda f: (hodiff.jvp(f, POINT, torch.ones_like(POINT))[1], (3 * POINT**2).sum()),
    "GaussNewtonOperator": lambda f: (
        hodiff.GaussNewtonOperator(
            lambda z, batch: f(z).reshape(1), lambda out, batch: ((out**2).sum() / 2, 1), POINT, data=[0]
        ) @ torch.ones_like(POINT),
        3 * POINT**2 * (3 * POINT**2).sum(),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CURVED)
@pytest.mark.parametrize("f", [coo, csr], ids=["coo", "csr"])
def test_sparse_constructors(f: Any, name: str) -> None:
    try:
        got, expected = CURVED[name](f)
    except ERRORS as error:
        assert re.search(r"sparse_(coo|csr|compressed)_tensor", str(error)), f"the error lacks the name: {error}"
        return
    got = got[1] if isinstance(got, tuple) else got
    torch.testing.assert_close(got.reshape(expected.shape), expected)


@pytest.mark.filterwarnings("ignore")
def test_constant_sparse_matrices_stay_right() -> None:
    A = torch.sparse_coo_tensor(INDEX, POINT, (3, 3))
    f = lambda z: torch.sparse.mm(A, z[:, None]).pow(3).sum()
    dense = A.to_dense()
    expected = dense.T @ torch.diag(6 * (dense @ POINT)) @ dense
    torch.testing.assert_close(hodiff.hessian(f, POINT), expected)


def test_meta_tensors() -> None:
    x = torch.ones(3, device="meta", dtype=D)
    try:
        got = hodiff.hvp(lambda z: (z**3).sum(), x, torch.ones_like(x))
    except ERRORS as error:
        assert "meta" in str(error)
    else:
        assert got.shape == x.shape and got.device == x.device


def test_nested_tensors() -> None:
    make = lambda: torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        constant = make()
        f = lambda z: (torch.nested.to_padded_tensor(constant * 2.0, 0.0) * z).pow(2).sum()
        x = torch.ones(2, 3, dtype=D)
        mask = torch.tensor([[4.0, 4, 0], [4, 4, 4]], dtype=D)
        for _ in range(2):
            torch.testing.assert_close(hodiff.grad(f, x), 2 * mask)
        inner = lambda z: (
            torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([z[0, :2], z[1]]), 0.0).pow(3).sum()
        )
        right_or_refused(lambda: hodiff.grad(inner, x), 3 * torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=D), "nested")
        right_or_refused(
            lambda: (hodiff.HessianOperator(inner, x) @ x).reshape(2, 3),
            6 * torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=D),
            "nested",
        )


def test_a_sparse_embedding_of_computed_weights() -> None:
    index = torch.tensor([0, 2])
    f = lambda z: F.embedding(index, (z**2).reshape(3, 1), sparse=True).pow(2).sum()
    expected = 4 * POINT**3 * torch.tensor([1.0, 0, 1], dtype=D)
    right_or_refused(lambda: hodiff.grad(f, POINT), expected, "sparse")
    right_or_refused(lambda: hodiff.hessian(f, POINT), torch.diag(3 * expected / POINT), "sparse")


# --- pairs of reals: PyTorch takes them for complex numbers where they begin at an even place of memory


def cubed(z: Tensor) -> Tensor:
    """(a + ib)^3 of pairs of reals."""
    return torch.view_as_real(torch.view_as_complex(z.view(-1, 2)) ** 3).flatten()


def test_rows_of_a_jacobian_of_pairs_of_reals() -> None:
    """As part of five outputs, whose rows begin at odd places, too, where a batch of passes cannot be made."""
    x = torch.tensor([0.3, -0.8, 1.4, 0.6], dtype=D)
    J = hodiff.jacobian(lambda z: torch.cat([cubed(z), z[:1] ** 2]), x)
    expected = torch.zeros(5, 4, dtype=D)
    for at in (0, 2):
        slope = 3 * torch.complex(x[at], x[at + 1]) ** 2
        expected[at : at + 2, at : at + 2] = torch.tensor([[slope.real, -slope.imag], [slope.imag, slope.real]])
    expected[4, 0] = 2 * x[0]
    torch.testing.assert_close(J, expected)


def test_pairs_of_reals_at_an_odd_place() -> None:
    """Plain PyTorch fails in the first gradient already; the way out is right."""
    f = lambda z: torch.cat([z[:1], cubed(z)]).square().sum()
    x = torch.tensor([0.3, -0.8, 1.4, 0.6], dtype=D)
    with pytest.raises(hodiff.GraphError, match=r"write torch.stack\(\[z.real, z.imag\], -1\)"):
        hodiff.grad(f, x)

    def other(z: Tensor) -> Tensor:
        c = torch.complex(z[::2], z[1::2]) ** 3
        return torch.cat([z[:1], torch.stack([c.real, c.imag], -1).flatten()]).square().sum()

    squared = x.view(-1, 2).square().sum(1, keepdim=True)  # |c^3|^2 = |c|^6
    expected = (6 * squared**2 * x.view(-1, 2)).flatten()
    expected[0] += 2 * x[0]
    torch.testing.assert_close(hodiff.grad(other, x), expected)
