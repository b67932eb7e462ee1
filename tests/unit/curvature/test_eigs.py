"""Eigenvalues of operators that are not symmetric, and of those that are so up to rounding, at any scale."""

import math

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.ledger import Ledger
from tests.support.modules import two_layers
from tests.support.operators import D, X, draw
from tests.support.properties import agree

N = 90


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthogonal() -> Tensor:
    return torch.linalg.qr(draw(N, N, seed=4))[0]


def with_blocks(pairs: list[tuple[float, float]], reals: list[float]) -> Tensor:
    """Block diagonal: a ± bi for each pair, these real ones, and a bulk between -0.5 and 0.5."""
    parts = [torch.tensor([[a, b], [-b, a]], dtype=D) for a, b in pairs]
    bulk = torch.linspace(-0.5, 0.5, N - 2 * len(pairs) - len(reals), dtype=D)
    return torch.block_diag(*parts, torch.diag(torch.tensor(reals, dtype=D)), torch.diag(bulk))


def turned(A: Tensor) -> Tensor:
    """The same eigenvalues; eigenvectors as far from orthogonal as `S` is from a rotation."""
    S = torch.eye(N, dtype=D) + 0.06 * draw(N, N, seed=9)
    return torch.linalg.solve(S, A @ S)


MATRICES = {
    "random": draw(N, N) / N**0.5,
    "pairs": turned(with_blocks([(3, 2), (1, 4), (0, 2.5)], [5, -4.5, 2])),
    "double pair": orthogonal() @ with_blocks([(3, 2), (3, 2), (1, 1)], [2, 2, 2]) @ orthogonal().T,
    "clustered": orthogonal() @ with_blocks([], [3, 3.0001, 3.0002, 2.9999, 3, 3]) @ orthogonal().T,
    "symmetric, indefinite": draw(N, N) + draw(N, N).T,
    "low rank": draw(N, 3, seed=1) @ draw(3, N, seed=2),
    "identity": torch.eye(N, dtype=D),
    "zero": torch.zeros(N, N, dtype=D),
    "two": torch.tensor([[0.0, -2.0], [3.0, 0.0]], dtype=D),
    "huge": 1e170 * draw(N, N),
    "tiny": 1e-170 * draw(N, N),
}
RANKS = {"magnitude": torch.abs, "largest": torch.real, "smallest": lambda z: -z.real}


@pytest.mark.parametrize("which", RANKS)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("basis", [None, 30])
def test_eigenvalues_of_the_zoo(name: str, which: str, basis: int | None) -> None:
    A = MATRICES[name]
    k = min(6, len(A))
    found = hodiff.eigs(hodiff.MatrixOperator(A, symmetric=False), k, which=which, basis=basis, generator=seeded(0))
    scale = float(A.abs().max()) or 1.0
    true = torch.linalg.eigvals(A / scale)
    rank = RANKS[which]
    best = rank(true).sort(descending=True).values[:k]
    value = found.value / scale
    assert found.converged
    torch.testing.assert_close(rank(value), best, rtol=0, atol=2e-7)
    assert (value[:, None] - true).abs().min(1).values.max() < 2e-7
    x = found.vectors
    assert x.shape == (len(A), k) and x.is_complex()
    torch.testing.assert_close(x.norm(dim=0), torch.ones(k, dtype=D))
    rest = ((A / scale).to(x) @ x - x * value).norm(dim=0)
    torch.testing.assert_close(found.residual / scale, rest, rtol=1e-3, atol=1e-13)


def test_each_eigenvalue_comes_as_often_as_it_occurs() -> None:
    found = hodiff.eigs(hodiff.MatrixOperator(MATRICES["double pair"]), 4, generator=seeded(1))
    agree(found.value.imag.sort().values, torch.tensor([-2.0, -2.0, 2.0, 2.0], dtype=D), 1e-9)
    assert torch.linalg.matrix_rank(found.vectors, rtol=1e-6) == 4


def test_a_conjugate_pair_that_k_divides() -> None:
    found = hodiff.eigs(hodiff.MatrixOperator(MATRICES["pairs"]), 2, which="largest")
    agree(torch.view_as_real(found.value), torch.tensor([[5.0, 0.0], [3.0, 2.0]], dtype=D), 1e-7)


def test_a_matrix_far_from_normal_has_small_residuals_even_so() -> None:
    """A Jordan block of 8: an eigenvalue is known to the eighth root of the residual, which the docs say."""
    A = torch.block_diag(
        2 * torch.eye(8, dtype=D) + torch.diag(torch.ones(7, dtype=D), 1),
        torch.diag(torch.linspace(-1, 1, 50, dtype=D)),
    )
    found = hodiff.eigs(hodiff.MatrixOperator(A), 3, which="largest")
    assert found.converged and found.residual.max() < 2e-8 * A.norm()
    assert (found.value - 2).abs().max() < 10 * 1e-8 ** (1 / 8)


def test_schurs_form_of_some_eigenvalues() -> None:
    from hodiff.curvature._eigen import invariant

    A = draw(20, 20)
    order = lambda values: values.abs().argsort(descending=True, stable=True)
    basis, square = invariant(A, order, 7)
    count = basis.shape[1]
    agree(basis.T @ basis, torch.eye(count, dtype=D), 1e-12)
    agree(A @ basis, basis @ square, 1e-10)
    expected = torch.linalg.eigvals(A).abs().sort(descending=True).values[:count]
    agree(torch.linalg.eigvals(square).abs().sort(descending=True).values, expected, 1e-9)
    for column in range(count - 1):  # triangular but for the blocks of pairs
        assert square[column + 2 :, column].abs().max() < 1e-12 if column + 2 < count else True


def test_eigs_of_a_jacobian_and_out_of_products() -> None:
    W = draw(12, 12) / 4
    J = hodiff.JacobianOperator(lambda h: torch.tanh(h @ W), 0.1 * draw(12))
    expected = torch.linalg.eigvals(J.dense()).abs().max()
    agree(hodiff.eigs(J, 1).value[0].abs(), expected, 1e-8)
    found = hodiff.spectral_radius(J)
    agree(found.value, expected, 1e-8)
    assert found.converged and found.value.dtype == D and found.products <= J.products
    with pytest.warns(hodiff.ConvergenceWarning, match=r"eigs: after \d+ products the largest residual"):
        found = hodiff.eigs(hodiff.MatrixOperator(MATRICES["random"]), 3, products=12)
    assert not found.converged and found.products <= 12


def test_the_spectral_radius() -> None:
    """Of a symmetric operator by Lanczos; of another by Arnoldi, where power iteration would not settle."""
    A = hodiff.MatrixOperator(torch.cat([torch.linspace(0, 1, 200, dtype=D), torch.tensor([-7.0], dtype=D)]))
    agree(hodiff.spectral_radius(A).value, torch.tensor(7.0, dtype=D), 1e-8)
    turning = hodiff.MatrixOperator(MATRICES["pairs"])
    agree(hodiff.spectral_radius(turning, rtol=1e-10).value, torch.tensor(5.0, dtype=D), 1e-8)
    agree(hodiff.spectral_radius(hodiff.MatrixOperator(0.3 * orthogonal())).value, torch.tensor(0.3, dtype=D), 1e-6)
    seen: list[float] = []
    hodiff.spectral_radius(turning, callback=lambda record: seen.append(float(record.value)))
    assert seen and seen[-1] == pytest.approx(5, rel=1e-6)
    with pytest.warns(hodiff.ConvergenceWarning, match="spectral_radius: after"):
        assert not hodiff.spectral_radius(hodiff.MatrixOperator(draw(300, 300)), products=8).converged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    A = MATRICES["pairs"].to(dtype)
    found = hodiff.eigs(hodiff.MatrixOperator(A), 3)
    assert found.value.dtype == found.vectors.dtype == torch.complex64 and found.converged
    true = torch.linalg.eigvals(A.double()).abs().sort(descending=True).values[:3]
    agree(found.value.abs().double(), true, 2e-1 if dtype == torch.bfloat16 else 1e-2)


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
    other: list[hodiff.curvature._records.EigenRecord] = []
    hodiff.eigs(hodiff.MatrixOperator(MATRICES["pairs"]), 2, callback=other.append)
    assert other[-1].vectors.is_complex() and other[-1].vectors.shape == (N, 2)


BAD = {
    r"k: got 91, but the operator has 90": lambda A: hodiff.eigs(A, 91),
    r"which: got 'LM'": lambda A: hodiff.eigs(A, which="LM"),
    r"eigs: the operator is 2 x 3": lambda A: hodiff.eigs(hodiff.MatrixOperator(draw(2, 3))),
    r"spectral_radius: got a tensor, expected an operator; wrap it: hodiff\.MatrixOperator": lambda A: (
        hodiff.spectral_radius(draw(2, 2))
    ),
    r"use hodiff\.eigs, or": lambda A: hodiff.eigsh(A),
    r"callback: got a str": lambda A: hodiff.spectral_radius(A, callback="x"),
    r"rtol: got -1": lambda A: hodiff.spectral_radius(A, rtol=-1),
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD[pattern](hodiff.MatrixOperator(MATRICES["random"]))


@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_what_no_products_help_is_said_of_a_nilpotent_matrix(batch_ndim: int) -> None:
    """Of one shift of 200 entries each step finds the next; of a symmetric matrix that is not said."""
    A = torch.diag(torch.ones(199, dtype=D), 1)
    nilpotent = hodiff.MatrixOperator(torch.stack([A, A.T]) if batch_ndim else A, batch_ndim=batch_ndim)
    with pytest.warns(hodiff.ConvergenceWarning, match=r"or a larger basis \(if the matrix is far from normal"):
        hodiff.spectral_radius(nilpotent, products=120)
    symmetric = hodiff.MatrixOperator(A + A.T)
    with pytest.warns(hodiff.ConvergenceWarning, match=r"allow more products, or a larger basis\.$"):
        hodiff.eigsh(symmetric, 3, products=20)


def test_products_that_are_not_finite_are_named() -> None:
    A = torch.eye(4)
    A[0, 0] = math.nan
    for call in (
        lambda operator: hodiff.eigs(operator, 1),
        hodiff.spectral_radius,
        lambda operator: hodiff.solve(operator, torch.ones(4), method="gmres"),
    ):
        with pytest.raises(hodiff.GraphError, match=r"a product is not finite"):
            call(hodiff.MatrixOperator(A))


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


def test_what_eigs_is_given_is_left_alone() -> None:
    H = hodiff.HessianOperator(lambda w: ((X @ w) ** 4).sum(), draw(3))
    state = torch.get_rng_state()
    hodiff.eigs(H, 2, generator=seeded(2))
    assert torch.equal(torch.get_rng_state(), state)


def test_deq_spectral_radius():
    f, z = two_layers(4, 4), torch.randn(4, dtype=D)
    J = hodiff.JacobianOperator(lambda z: f(z), z)
    found = hodiff.spectral_radius(J)
    expected = torch.linalg.eigvals(J.dense()).abs().max()
    assert abs(float(getattr(found, "value", found)) - float(expected)) < 1e-6
