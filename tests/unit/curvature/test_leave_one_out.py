"""XTrace, XNysTrace and XDiag: equal to their definition, and better where the spectrum decays."""

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.operators import D, draw
from tests.support.properties import agree

N = 60
Q, _ = torch.linalg.qr(draw(N, N, seed=4))
DECAYING = Q @ torch.diag(0.8 ** torch.arange(N, dtype=D)) @ Q.T
INDEFINITE = Q @ torch.diag(torch.linspace(-5, 10, N, dtype=D)) @ Q.T
SKEWED = DECAYING + 0.1 * torch.triu(draw(N, N, seed=2), 1)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def signs(number: int, seed: int = 0) -> Tensor:
    return draw(N, number, seed=seed).sign()


def without(columns: Tensor, i: int) -> Tensor:
    return torch.cat([columns[:, :i], columns[:, i + 1 :]], 1)


def leaving_one_out(A: Tensor, omega: Tensor) -> Tensor:
    """XDiag's estimates by their definition, as rows."""
    found = []
    for i in range(omega.shape[1]):
        q, _ = torch.linalg.qr(A @ without(omega, i))
        left = A - q @ (q.T @ A)
        found.append((q @ (q.T @ A)).diagonal() + omega[:, i] * (left @ omega[:, i]))
    return torch.stack(found)


def error(estimates: Tensor, without_one: Tensor) -> Tensor:
    """The geometric mean of the estimates' spread and of the jackknife."""
    number = len(estimates)
    jackknife = (number - 1) / number * (without_one - without_one.mean()).square().sum()
    return (jackknife * estimates.var() / number) ** 0.25


def traces(A: Tensor, omega: Tensor) -> Tensor:
    """XTrace's estimates by their definition."""
    found = []
    for i in range(omega.shape[1]):
        q, _ = torch.linalg.qr(A @ without(omega, i))
        rest = omega[:, i] - q @ (q.T @ omega[:, i])
        found.append((q.T @ A @ q).trace() + rest @ A @ rest)
    return torch.stack(found)


def nystrom_traces(A: Tensor, omega: Tensor) -> Tensor:
    """XNysTrace's estimates by their definition."""
    found = []
    for i in range(omega.shape[1]):
        others = without(omega, i)
        Y = A @ others
        near = Y @ torch.linalg.solve(others.T @ Y, Y.T)
        found.append(near.trace() + omega[:, i] @ (A - near) @ omega[:, i])
    return torch.stack(found)


@pytest.mark.parametrize("A", [DECAYING, INDEFINITE, SKEWED], ids=["decaying", "indefinite", "not symmetric"])
def test_xtrace_and_xdiag_are_what_the_definition_says(A: Tensor) -> None:
    """For each vector: the part in the range of A times the others exactly, and the rest by that vector alone."""
    omega = signs(7)
    diagonals = leaving_one_out(A, omega)
    found, estimates = hodiff.trace(hodiff.MatrixOperator(A), method="xtrace", vectors=omega), traces(A, omega)
    agree(found.value, estimates.mean(), 1e-10)
    agree(found.stderr, error(estimates, torch.stack([traces(A, without(omega, i)).mean() for i in range(7)])), 1e-9)
    assert found.products == 14 and found.converged is None
    entries = hodiff.diagonal(hodiff.MatrixOperator(A), method="xdiag", vectors=omega)
    agree(entries.value, diagonals.mean(0), 1e-10)
    fewer = torch.stack([leaving_one_out(A, without(omega, i)).mean(0) for i in range(7)])
    jackknife, spread = 6 / 7 * (fewer - fewer.mean(0)).square().sum(0), diagonals.var(0) / 7
    agree(entries.stderr, (jackknife * spread) ** 0.25, 1e-10)


def test_xnystrace_is_what_the_definition_says() -> None:
    A = DECAYING + 0.01 * torch.eye(N, dtype=D)
    omega = signs(7)
    estimates = nystrom_traces(A, omega)
    fewer = torch.stack([nystrom_traces(A, without(omega, i)).mean() for i in range(7)])
    found = hodiff.trace(hodiff.MatrixOperator(A), method="xnystrace", vectors=omega)
    agree(found.value, estimates.mean(), 1e-9)
    agree(found.stderr, error(estimates, fewer), 1e-8)
    assert found.products == 7


@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_gaussian_vectors_know_the_trace_of_a_multiple_of_the_identity(method: str) -> None:
    """The part outside the others' range is given its mean squared length, N less their number: nothing is left."""
    found = hodiff.trace(hodiff.MatrixOperator(3 * torch.eye(N, dtype=D)), method=method, samples=7, probes="gaussian")
    agree(found.value, torch.tensor(3.0 * N, dtype=D), 1e-10)
    assert found.stderr < 1e-10


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_xnystrace_takes_off_what_it_adds_to_make_the_matrix_definite(probes: str) -> None:
    """An exact product in single precision: one entry is 1, and many are zero."""
    A = hodiff.MatrixOperator(torch.eye(1, 20_000).squeeze(0))
    found = hodiff.trace(A, method="xnystrace", samples=8, probes=probes, generator=seeded(0))
    agree(found.value, torch.ones(()), 1e-5)


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_their_standard_errors_are_calibrated(method: str, probes: str) -> None:
    """80 runs, unbiased; the error is known within a factor: geometric mean of a bound below and one above."""
    A, truth = hodiff.MatrixOperator(DECAYING), float(DECAYING.trace())
    samples = 10 if method == "xtrace" else 20
    runs = [hodiff.trace(A, method=method, samples=samples, probes=probes, generator=seeded(s)) for s in range(80)]
    errors = torch.tensor([float(run.value) - truth for run in runs])
    bars = torch.tensor([float(run.stderr) for run in runs])
    assert abs(float(errors.mean())) <= 4 * float(errors.std()) / 80**0.5
    ratio = float(bars.square().mean().sqrt() / errors.square().mean().sqrt())
    assert 0.8 <= ratio <= 2.2
    plain = [hodiff.trace(A, samples=20, probes=probes, generator=seeded(s)) for s in range(80)]
    worse = torch.tensor([float(run.value) - truth for run in plain])
    assert errors.square().mean().sqrt() < worse.square().mean().sqrt() / (1.5 if method == "xtrace" else 5)


FLAT = {"one eigenvalue": torch.ones(N, dtype=D), "two": torch.cat([torch.ones(30), 5 * torch.ones(30)]).to(D)}


@pytest.mark.parametrize("name", FLAT)
def test_xdiag_knows_its_error_where_the_spectrum_does_not_decay(name: str) -> None:
    """The spread of its estimates alone says 0.7 of it: they share what each pair of vectors does."""
    A = hodiff.MatrixOperator((Q * FLAT[name]) @ Q.T)
    runs = [hodiff.diagonal(A, method="xdiag", samples=10, generator=seeded(s)) for s in range(40)]
    errors = torch.stack([run.value - A.dense().diagonal() for run in runs])
    bars = torch.stack([run.stderr for run in runs])
    assert 0.9 <= float(bars.norm() / errors.norm()) <= 1.15
    assert float((errors.abs() <= 2 * bars).double().mean()) >= 0.85  # of few vectors: a t distribution


def test_images_that_point_the_same_way() -> None:
    """Their triangular factor has no positive entry, and what counts as nothing is by its size."""
    A = torch.diag(torch.tensor([1.0, 0.3, 0.2, 0.1], dtype=D))
    omega = torch.tensor([[1, 1], [1, 1], [1, -1], [-1, 1]], dtype=D)
    assert torch.linalg.qr(A @ omega)[1].max() == 0
    agree(hodiff.trace(hodiff.MatrixOperator(A), method="xtrace", vectors=omega).value, traces(A, omega).mean(), 1e-12)


def test_xdiag_of_two_vectors_is_estimated_each_from_the_other() -> None:
    omega = signs(2)
    found = hodiff.diagonal(hodiff.MatrixOperator(INDEFINITE), method="xdiag", vectors=omega)
    agree(found.value, leaving_one_out(INDEFINITE, omega).mean(0), 1e-10)
    fewer = torch.stack([omega[:, i] * (INDEFINITE @ omega[:, i]) for i in (1, 0)])
    jackknife, spread = fewer.var(0) / 2, leaving_one_out(INDEFINITE, omega).var(0) / 2
    agree(found.stderr, (jackknife * spread) ** 0.25, 1e-10)


@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_matrices_of_low_rank_are_known(method: str, rank: int) -> None:
    values = torch.zeros(N, dtype=D)
    values[:rank] = torch.arange(1, rank + 1, dtype=D)
    A = hodiff.MatrixOperator(Q @ torch.diag(values) @ Q.T)
    found = hodiff.trace(A, method=method, vectors=signs(8))
    agree(found.value, values.sum(), 1e-8)
    assert found.stderr < 1e-7
    entries = hodiff.diagonal(A, method="xdiag", vectors=signs(8))
    agree(entries.value, A.dense().diagonal(), 1e-8)
    assert entries.stderr.max() < 1e-7


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_very_small_and_very_large_matrices(scale: float) -> None:
    A, one, omega = hodiff.MatrixOperator(DECAYING * scale), hodiff.MatrixOperator(DECAYING), signs(7)
    for estimate, methods in ((hodiff.trace, ("xtrace", "xnystrace")), (hodiff.diagonal, ("xdiag",))):
        for method in methods:
            found, expected = (estimate(operator, method=method, vectors=omega) for operator in (A, one))
            agree(found.value / scale, expected.value, 1e-8)
            agree(found.stderr / scale, expected.stderr, 1e-6)


def test_enough_vectors_are_exact_and_one_says_nothing_about_its_error() -> None:
    A = hodiff.MatrixOperator(INDEFINITE)
    for samples in (30, 60):
        found = hodiff.trace(A, method="xtrace", samples=samples)
        agree(found.value, INDEFINITE.trace(), 1e-10)
        assert found.stderr == 0 and found.products == N
    agree(hodiff.trace(A, method="xtrace", vectors=signs(N + 5)).value, INDEFINITE.trace(), 1e-10)
    agree(hodiff.diagonal(A, method="xdiag", samples=30).value, INDEFINITE.diagonal(), 1e-10)
    one = signs(1)
    for method in ("hutchinson", "hutch++", "xtrace"):
        found = hodiff.trace(A, method=method, vectors=one)
        agree(found.value, (one.T @ INDEFINITE @ one)[0, 0], 1e-10)
        assert found.stderr is None and found.converged is None


def test_xnystrace_refuses_what_is_not_semidefinite() -> None:
    with pytest.raises(hodiff.InputError, match=r"semidefinite.* use method='xtrace'"):
        hodiff.trace(hodiff.MatrixOperator(INDEFINITE), method="xnystrace", vectors=signs(9))


@pytest.mark.parametrize("method", ["xtrace", "xnystrace"])
def test_single_precision(method: str) -> None:
    low = hodiff.MatrixOperator(DECAYING.float())
    found = hodiff.trace(low, method=method, vectors=signs(25).float())
    assert found.value.dtype == torch.float32 and found.stderr is not None
    assert float(found.value) == pytest.approx(float(DECAYING.trace()), rel=2e-2)


def test_a_tolerance_is_looked_at() -> None:
    A = hodiff.MatrixOperator(DECAYING)
    assert hodiff.trace(A, method="xtrace", samples=25, rtol=0.1, generator=seeded(0)).converged
    with pytest.warns(hodiff.ConvergenceWarning, match="more than rtol=1e-07"):
        hodiff.trace(A, method="xtrace", samples=6, rtol=1e-7)
    assert hodiff.diagonal(A, method="xdiag", samples=25, rtol=0.5, generator=seeded(0)).converged


# --- blocks, from the same products -----------------------------------------------------------------------------------


def three() -> tuple[hodiff.HessianOperator, Tensor]:
    point = {"a": draw(4), "b": draw(3, 2), "c": draw(5)}
    f = lambda p: (p["a"].sum() * p["b"].sum() + 3) ** 2 + (p["c"] ** 4).sum() + (p["b"] ** 3).sum()
    H = hodiff.HessianOperator(f, point)
    return H, H.dense()


def test_traces_of_blocks_come_from_the_same_products() -> None:
    H, dense = three()
    V = draw(15, 9)
    before = H.products
    found = hodiff.trace(H, blocks=["a", "b", "[bc]"], vectors=V)
    assert H.products - before == found.products == 9
    terms = V * (dense @ V)
    for name, rows in {"a": slice(0, 4), "b": slice(4, 10), "[bc]": slice(4, 15)}.items():
        part = terms[rows].sum(0)
        agree(found.blocks[name].value, part.mean(), 1e-10)
        agree(found.blocks[name].stderr, part.std() / 3, 1e-10)
    agree(found.value, terms.sum(0).mean(), 1e-10)
    exact = hodiff.trace(H, blocks=["a", "c"], samples=20)
    agree(exact.blocks["c"].value, dense[10:, 10:].trace(), 1e-10)
    assert exact.blocks["a"].stderr == 0 and exact.blocks["a"].converged is None


def test_traces_of_blocks_are_calibrated() -> None:
    H, dense = three()
    runs = [hodiff.trace(H, blocks=["b"], vectors=draw(15, 8, seed=s).sign()).blocks["b"] for s in range(120)]
    truth = float(dense[4:10, 4:10].trace())
    inside = sum(abs(float(run.value) - truth) <= 2.4 * float(run.stderr) for run in runs) / 120  # t with 7 degrees
    assert 0.88 <= inside <= 0.995


def test_blocks_of_a_kept_graph_share_one_evaluation() -> None:
    """The top eigenvalue of each block, from one pass over the data."""
    calls = []

    def loss(p: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        calls.append(1)
        return ((batch @ p["a"]).tanh() * p["b"].square().sum()).square().sum(), len(batch)

    H = hodiff.HessianOperator(loss, {"a": draw(3), "b": draw(2)}, data=[draw(6, 3), draw(4, 3, seed=1)])
    top = {name: hodiff.eigsh(H.block(name), 1).value[0] for name in ("a", "b")}
    assert len(calls) == 2
    dense = H.dense()
    agree(top["a"], torch.linalg.eigvalsh(dense[:3, :3])[-1], 1e-8)
    agree(top["b"], torch.linalg.eigvalsh(dense[3:, 3:])[-1], 1e-8)


def test_the_running_mean_by_callback() -> None:
    A, V = hodiff.MatrixOperator(INDEFINITE), signs(20)
    seen: list[hodiff.curvature._records.TraceRecord] = []
    hodiff.trace(A, vectors=V, callback=seen.append)
    forms = (V * (INDEFINITE @ V)).sum(0)
    assert [record.products for record in seen] == [8, 16, 20]
    for record in seen:
        agree(record.value, forms[: record.products].mean(), 1e-12)
    entries: list[hodiff.curvature._records.DiagonalRecord] = []
    hodiff.diagonal(A, vectors=V, callback=entries.append)
    for record in entries:
        agree(record.value, (V * (INDEFINITE @ V))[:, : record.products].mean(1), 1e-12)
