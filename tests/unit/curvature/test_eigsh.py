"""`eigsh`: matrices that are symmetric up to rounding, at any scale; who looks on; memory."""

import math

import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

import hodiff
from tests.support.ledger import Ledger
from tests.support.operators import D, draw
from tests.support.properties import agree

N = 90


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal() -> Tensor:
    return torch.linalg.qr(draw(N, N, seed=4))[0]


# --- symmetric up to rounding, and any scale --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_a_matrix_that_rounding_has_made_asymmetric_is_symmetric(dtype: torch.dtype, scale: float) -> None:
    q, values = orthogonal().to(dtype), torch.linspace(-1, 5, N, dtype=dtype) * scale
    A = q @ torch.diag(values) @ q.T
    assert not torch.equal(A, A.T)
    operator = hodiff.MatrixOperator(A)
    assert operator.symmetric and operator.T is operator
    found = hodiff.eigsh(operator, 2)
    assert found.converged
    agree(found.value / scale, values.flip(0)[:2] / scale, 1e-5 if dtype == torch.float32 else 1e-10)
    A[0, 1] += 1e-3 * scale if dtype == torch.float32 else 1e-12 * scale
    assert not hodiff.MatrixOperator(A).symmetric
    with pytest.raises(hodiff.InputError, match="differs from its transpose"):
        hodiff.MatrixOperator(A, symmetric=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_entries_that_are_no_numbers_are_not_rounding(value: float) -> None:
    A = draw(3, 3)
    A[0, 0] = value
    assert not hodiff.MatrixOperator(A).symmetric


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("scale", [1e170, 1e-170, 1e300, 1e-300])
def test_eigenvalues_of_very_large_and_very_small_matrices(scale: float, which: str) -> None:
    values = torch.linspace(-5, 10, N, dtype=D)
    q = orthogonal()
    A = hodiff.MatrixOperator(scale * (q @ torch.diag(values) @ q.T))
    found = hodiff.eigsh(A, 3, which=which, basis=30)
    expected = -values[:3].neg() if which == "smallest" else values.flip(0)[:3]
    assert found.converged and found.residual.max() <= 2e-8 * 10 * scale
    agree(found.value / scale, expected, 1e-9)


def test_the_scale_is_found_where_the_first_products_are_zero() -> None:
    found = hodiff.eigsh(hodiff.MatrixOperator(torch.zeros(40, dtype=D)), 2)
    assert found.converged and found.value.abs().max() == 0
    spike = torch.zeros(40, dtype=D)
    spike[7] = 1e-200
    assert float(hodiff.eigsh(hodiff.MatrixOperator(spike), 1).value) == pytest.approx(1e-200)


# --- who looks on -----------------------------------------------------------------------------------------------------


def test_eigenpairs_by_callback() -> None:
    A = hodiff.MatrixOperator(torch.linspace(0, 10, 300, dtype=D) ** 2)
    seen: list[hodiff.curvature._records.EigenRecord] = []
    found = hodiff.eigsh(A, 2, generator=seeded(0), callback=seen.append)
    assert len(seen) > 4 and seen[-1].products <= found.products
    assert [record.products for record in seen] == sorted({record.products for record in seen})
    for record in seen[1:]:
        assert record.converged is None and record.vectors.shape == (300, 2)
        true = (A @ record.vectors - record.vectors * record.value).norm(dim=0)
        torch.testing.assert_close(record.residual, true, rtol=1e-2, atol=1e-8)
    assert torch.equal(hodiff.eigsh(A, 2, generator=seeded(0)).value, found.value)


BAD = {
    r"k: got 91, but the operator has 90": lambda A: hodiff.eigsh(A.T @ A, 91),
    r"eigsh: the operator is 2 x 3": lambda A: hodiff.eigsh(hodiff.MatrixOperator(draw(2, 3))),
    r"use scipy\.sparse\.linalg\.eigs\(A\.to_scipy\(\)\), or": lambda A: hodiff.eigsh(A),
    r"callback: got a str": lambda A: hodiff.eigsh(A.T @ A, callback="x"),
    r"rtol: got -1": lambda A: hodiff.eigsh(A.T @ A, rtol=-1),
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD[pattern](hodiff.MatrixOperator(draw(N, N)))


def test_the_way_out_of_a_matrix_that_is_not_symmetric() -> None:
    """SciPy's own search takes what the error names."""
    J = hodiff.JacobianOperator(lambda h: torch.tanh(h @ draw(12, 12)), 0.1 * draw(12, seed=1))
    expected = torch.linalg.eigvals(J.dense()).abs().max()
    found = scipy.sparse.linalg.eigs(J.to_scipy(), 1, return_eigenvectors=False)
    assert abs(found[0]) == pytest.approx(float(expected))


def test_who_is_out_of_products_is_told_what_helps() -> None:
    A = torch.diag(torch.ones(199, dtype=D), 1)
    with pytest.warns(hodiff.ConvergenceWarning, match=r"allow more products, or a larger basis\.$"):
        hodiff.eigsh(hodiff.MatrixOperator(A + A.T), 3, products=20)


class Peak(Ledger):
    """The most bytes alive after an operation."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.alive())
        return result


@pytest.mark.parametrize(("rtol", "most"), [(1e-4, 42), (1e-6, 75)])
def test_the_memory_of_a_basis(rtol: float, most: int) -> None:
    """In vectors of the operator's dtype: one basis of twenty, what is combined of it, and none of an earlier search.

    A basis of single precision, unless residuals are asked for that its rounding would hide.
    """
    expected = torch.linspace(-1, 1, 400, dtype=D) ** 15
    turn = torch.linalg.qr(draw(400, 400))[0]
    operator = hodiff.MatrixOperator((turn @ expected.diag() @ turn.T).float())
    with Peak() as ledger:
        found = hodiff.eigsh(operator, 2, basis=20, rtol=rtol, generator=seeded(0))
    assert found.converged
    torch.testing.assert_close(found.value.double(), expected.flip(0)[:2], rtol=1e-5, atol=0)
    assert ledger.most / (4 * 400) <= most


@pytest.mark.parametrize(("size", "top"), [(120, (9.5, 9.5)), (300, (9.2, 9.2, 9.2)), (500, (9.1, 9.1))])
@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
def test_copies_just_above_a_dense_rest(size: int, top: tuple[float, ...], which: str) -> None:
    """The search for a copy begins below the rest: it may not end before its first value has converged."""
    for seed in range(3):
        values = torch.cat([torch.linspace(0, 9, size - len(top), dtype=D), torch.tensor(top, dtype=D)])
        values = -values if which == "smallest" else values
        found = hodiff.eigsh(
            hodiff.MatrixOperator(values), len(top), which=which, generator=torch.Generator().manual_seed(seed)
        )
        assert found.converged
        torch.testing.assert_close(found.value.abs(), torch.tensor(top, dtype=D), rtol=1e-7, atol=0)
