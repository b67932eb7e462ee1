"""The Nyström preconditioner: exact where it must be, and worth its products."""

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.operators import D, X, draw
from tests.support.properties import agree

N = 120
Q, _ = torch.linalg.qr(draw(N, N, seed=4))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values: Tensor) -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(Q @ torch.diag(values) @ Q.T)


def test_it_is_the_inverse_of_what_it_has_seen_whole() -> None:
    """Of rank 5 with 5 vectors, or of full rank: the inverse itself, but for the one factor beside the range."""
    values = torch.cat([torch.zeros(N - 5, dtype=D), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=D)])
    A = with_spectrum(values)
    P = hodiff.nystrom(A, 7, 0.3, generator=seeded(0))
    agree(P.dense(), torch.linalg.inv(A.dense() + 0.3 * torch.eye(N, dtype=D)), 1e-7)
    B = with_spectrum(torch.linspace(0.5, 3, N, dtype=D))
    agree(
        hodiff.nystrom(B, N, 0.1, generator=seeded(0)).dense(),
        torch.linalg.inv(B.dense() + 0.1 * torch.eye(N, dtype=D)),
        1e-8,
    )


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_very_small_and_very_large_operators(scale: float) -> None:
    values = torch.linspace(0.0, 3.0, N, dtype=D)
    one, A = (hodiff.nystrom(with_spectrum(s * values), 9, s * 0.1, generator=seeded(1)) for s in (1.0, scale))
    agree(A.dense() * scale, one.dense(), 1e-8)


def test_it_is_what_the_paper_says() -> None:
    values = 2.0 ** -torch.arange(N, dtype=D)
    A, mu = with_spectrum(values), 1e-3
    P = hodiff.nystrom(A, 6, mu, generator=seeded(3))
    omega, _ = torch.linalg.qr(torch.randn(6, N, dtype=D, generator=seeded(3)).T)
    Y = A.dense() @ omega
    near = Y @ torch.linalg.solve(omega.T @ Y, Y.T)
    found, vectors = torch.linalg.eigh((near + near.T) / 2)
    U, last = vectors[:, -6:], found[-6]
    expected = U @ torch.diag(1 / (found[-6:] + mu)) @ U.T + (torch.eye(N, dtype=D) - U @ U.T) / (last + mu)
    agree(P.dense(), expected, 1e-6)
    assert P.symmetric and P.T is P and torch.linalg.eigvalsh(P.dense()).min() > 0


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_it_saves_products_where_eigenvalues_decay(method: str) -> None:
    A, b, mu = with_spectrum(1e4 * 0.7 ** torch.arange(N, dtype=D)), draw(N), 1e-2
    plain = hodiff.solve(A, b, damping=mu, method=method)
    before = A.products
    P = hodiff.nystrom(A, 40, mu, generator=seeded(0))
    assert A.products - before == 40
    found = hodiff.solve(A, b, damping=mu, method=method, preconditioner=P)
    assert found.converged and found.products <= 15 and plain.products > 3 * found.products
    agree(found.value, torch.linalg.solve(A.dense() + mu * torch.eye(N, dtype=D), b), 1e-5)


def test_it_has_the_structure_of_the_point_and_blocks() -> None:
    point = {"w": draw(3), "b": draw(1)}
    H = hodiff.HessianOperator(lambda p: ((X @ p["w"] + p["b"]) ** 2).sum(), point)
    P = hodiff.nystrom(H, 4, 0.5, generator=seeded(0))
    v = {"w": draw(3, seed=1), "b": draw(1, seed=1)}
    agree(P.flatten(P @ v), P.dense() @ P.flatten(v), 1e-10)
    agree(P @ draw(4, 3), P.dense() @ draw(4, 3), 1e-10)
    agree(P.block("w").dense(), P.dense()[:3, :3], 1e-10)
    found = hodiff.solve(H, v, damping=0.5, preconditioner=P)
    assert found.converged and found.products <= 3
    assert "rank 4, shift 0.5" in repr(P)


def test_beside_the_range_it_divides_by_the_shift_alone() -> None:
    """What is added to make the sketch definite is taken off: with it, 1e-9 would be 1e-7 in single precision."""
    A = hodiff.MatrixOperator(torch.eye(1, 50).squeeze(0))
    P = hodiff.nystrom(A, 4, 1e-9, generator=seeded(0))
    agree(P.dense().diagonal()[1:], torch.full((49,), 1e9), 1e-5)


def test_zero_and_single_precision() -> None:
    zero = hodiff.MatrixOperator(torch.zeros(9, dtype=D))
    agree(hodiff.nystrom(zero, 3, 0.5).dense(), 2 * torch.eye(9, dtype=D), 1e-12)
    low = hodiff.MatrixOperator((1e3 * 0.7 ** torch.arange(N, dtype=D)).float())
    found = hodiff.solve(
        low, torch.ones(N), damping=0.1, preconditioner=hodiff.nystrom(low, 40, 0.1, generator=seeded(0))
    )
    assert found.converged and found.products < 15


BAD = {
    "nystrom: this MatrixOperator is not known to be symmetric": lambda A: hodiff.nystrom(
        hodiff.MatrixOperator(draw(3, 3)), 2, 1.0
    ),
    "rank: got 121": lambda A: hodiff.nystrom(A, 121, 1.0),
    "rank: got 0": lambda A: hodiff.nystrom(A, 0, 1.0),
    "shift: got 0.0, expected a positive": lambda A: hodiff.nystrom(A, 3, 0.0),
    "nystrom is for positive semidefinite": lambda A: hodiff.nystrom(A, 40, 1.0),
    "generator: got an int": lambda A: hodiff.nystrom(A, 3, 1.0, generator=0),
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD[pattern](with_spectrum(torch.linspace(-5, 10, N, dtype=D)))
