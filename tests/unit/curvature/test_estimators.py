"""Eigenpairs, solves, traces and diagonals: right on hard spectra, honest about errors, calibrated.

Statistical tests state their budget: `runs` seeds, and a bound that a right estimator fails less than once in 10^4.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.operators import D, X, draw
from tests.support.properties import agree


def with_spectrum(values: Tensor, seed: int = 0) -> hodiff.MatrixOperator:
    q, _ = torch.linalg.qr(draw(len(values), len(values), seed=seed))
    A = q @ torch.diag(values) @ q.T
    return hodiff.MatrixOperator((A + A.T) / 2)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- eigsh ------------------------------------------------------------------------------------------------------------

SPREAD = torch.linspace(-5, 10, 120, dtype=D)


def spiked(*spikes: float) -> Tensor:
    values = torch.linspace(0, 1, 120, dtype=D)
    values[-len(spikes) :] = torch.tensor(spikes, dtype=D)
    return values


SPECTRA = {
    "spread": SPREAD,
    "two isolated": spiked(50.0, 100.0),
    "double": spiked(50.0, 100.0, 100.0),
    "triple and cluster": spiked(99.9999, 100.0, 100.0, 100.0),
    "identity": torch.ones(60, dtype=D),
    "minus identity": -torch.ones(60, dtype=D),
    "zero": torch.zeros(30, dtype=D),
    "low rank": torch.cat([torch.zeros(80, dtype=D), torch.tensor([3.0, 3.0, 7.0], dtype=D)]),
    "tiny": torch.tensor([2.0, -1.0], dtype=D),
    "decaying": 0.7 ** torch.arange(100, dtype=D),
    "large scale": 1e8 * SPREAD,
}


@pytest.mark.parametrize("which", ["largest", "smallest", "magnitude"])
@pytest.mark.parametrize("name", SPECTRA)
def test_eigenvalues_with_their_multiplicities(name: str, which: str) -> None:
    values = SPECTRA[name]
    A, k = with_spectrum(values), min(5, len(values))
    found = hodiff.eigsh(A, k, which=which, generator=seeded(1))
    rank = {"largest": values, "smallest": -values, "magnitude": values.abs()}[which]
    expected = values[rank.argsort(descending=True)[:k]]
    scale = float(values.abs().max())
    assert found.converged
    got = found.value.abs() if which == "magnitude" else found.value  # 5 and -5 may come in either order
    torch.testing.assert_close(
        got, expected.abs() if which == "magnitude" else expected, rtol=0, atol=1e-7 * scale + 1e-14
    )
    vectors = found.vectors
    assert vectors.shape == (len(values), k)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(k, dtype=D), rtol=0, atol=1e-10)
    true = (A @ vectors - vectors * found.value).norm(dim=0)
    torch.testing.assert_close(found.residual, true, rtol=1e-3, atol=1e-12 * scale + 1e-15)
    assert found.residual.max() <= 2e-8 * scale + 1e-14
    assert found.products <= A.products


def test_no_ghosts_in_a_long_run() -> None:
    """Without reorthogonalisation 90 steps found the value 100 twelve times and 50 ten times."""
    values = torch.linspace(0, 1, 200, dtype=D)
    values[-2:] = torch.tensor([50.0, 100.0], dtype=D)
    found = hodiff.eigsh(with_spectrum(values), 90, basis=120).value
    torch.testing.assert_close(found, values.flip(0)[:90], rtol=0, atol=1e-6)


def test_single_precision_and_tolerances() -> None:
    A = hodiff.MatrixOperator(SPREAD.float())
    found = hodiff.eigsh(A, 4, rtol=1e-6)
    assert found.converged and found.value.dtype == torch.float32
    torch.testing.assert_close(found.value, SPREAD.flip(0)[:4].float(), rtol=0, atol=2e-5)


def test_out_of_products_warns_and_gives_the_residuals() -> None:
    with pytest.warns(hodiff.ConvergenceWarning, match=r"after \d+ products the largest residual is .*rtol=1e-08"):
        found = hodiff.eigsh(with_spectrum(SPREAD), 3, products=12)
    assert not found.converged and found.residual.max() > 1e-3 and found.products <= 12


def test_products_that_are_not_finite_are_named() -> None:
    H = hodiff.HessianOperator(lambda x: x.sqrt().sum(), torch.zeros(3))
    with pytest.raises(hodiff.GraphError, match="not finite"):
        hodiff.eigsh(H, 1)


def test_eigenvectors_of_a_hessian_have_the_structure_of_the_point() -> None:
    point = {"w": draw(3, 2), "b": draw(2)}
    H = hodiff.HessianOperator(lambda p: ((X @ p["w"] + p["b"]).square()).sum(), point)
    found = hodiff.eigsh(H, 2)
    agree(found.value, torch.linalg.eigvalsh(H.dense()).flip(0)[:2], 1e-9)
    assert H.unflatten(found.vectors)["w"].shape == (2, 3, 2)


def test_generators_decide_the_start() -> None:
    A = with_spectrum(SPREAD)
    one, same = (hodiff.eigsh(A, 2, generator=seeded(3)).vectors for _ in range(2))
    assert torch.equal(one, same)
    torch.manual_seed(5)
    first = hodiff.trace(A, samples=8).value
    assert hodiff.trace(A, samples=8).value != first  # None is not a seed
    torch.manual_seed(5)
    assert hodiff.trace(A, samples=8).value == first


BAD_CALLS = {
    r"eigsh: MatrixOperator is not known to be symmetric": lambda A: hodiff.eigsh(hodiff.MatrixOperator(draw(3, 3))),
    r"k: got 200": lambda A: hodiff.eigsh(A, 200),
    r"which: got 'LA'": lambda A: hodiff.eigsh(A, which="LA"),
    r"write hodiff\.MatrixOperator\(A\)": lambda A: hodiff.eigsh(draw(3, 3)),
    r"got a int": lambda A: hodiff.trace(3),
    r"is 2 x 3; expected a square": lambda A: hodiff.trace(hodiff.MatrixOperator(draw(2, 3))),
    r"samples: got 3": lambda A: hodiff.trace(A, samples=3),
    r"probes: got 'uniform'": lambda A: hodiff.trace(A, probes="uniform"),
    r"method: got 'xtrace'": lambda A: hodiff.trace(A, method="xtrace"),
    r"method: got 'x'": lambda A: hodiff.diagonal(A, method="x"),
    r"rtol: got 0": lambda A: hodiff.trace(A, rtol=0),
    r"generator: is a int": lambda A: hodiff.diagonal(A, generator=0),
    r"method: got 'lu'": lambda A: hodiff.solve(A, draw(120), method="lu"),
    r"b: has shape": lambda A: hodiff.solve(A, draw(5)),
    r"b: holds 2 vectors": lambda A: hodiff.solve(A, draw(120, 2)),
    r"not finite": lambda A: hodiff.solve(A, draw(120) / 0),
    r"damping: got 'x'": lambda A: hodiff.solve(A, draw(120), damping="x"),
    r"preconditioner: is \(3, 3\)": lambda A: hodiff.solve(A, draw(120), preconditioner=hodiff.MatrixOperator(draw(3))),
    r"not positive definite": lambda A: hodiff.solve(
        A, draw(120), preconditioner=hodiff.MatrixOperator(-(SPREAD**2) - 1)
    ),
}


@pytest.mark.parametrize("pattern", BAD_CALLS)
def test_bad_calls(pattern: str) -> None:
    A = with_spectrum(SPREAD)
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD_CALLS[pattern](A)
    assert A.products == 0 or pattern == "not positive definite"


# --- solve ------------------------------------------------------------------------------------------------------------

POSITIVE = torch.linspace(0.01, 10, 100, dtype=D)


def true_residual(A: hodiff.LinearOperator, x: Tensor, b: Tensor, damping: float = 0.0) -> float:
    return float((b - A @ x - damping * x).norm() / b.norm())


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("damping", [0.0, 0.1, 3.0])
def test_positive_definite_systems(method: str, damping: float) -> None:
    A, b = with_spectrum(POSITIVE), draw(100, seed=2)
    found = hodiff.solve(A, b, method=method, damping=damping, rtol=1e-9)
    assert found.status == "converged" and found.converged
    assert true_residual(A, found.value, b, damping) == pytest.approx(found.residual, rel=1e-2)
    assert found.residual <= 1e-9
    expected = torch.linalg.solve(A.dense() + damping * torch.eye(100, dtype=D), b)
    torch.testing.assert_close(found.value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("damping", [1e-1, 1e-2, 1e-3])
def test_the_tolerance_is_kept_on_an_ill_conditioned_gauss_newton_matrix(damping: float) -> None:
    """A peer stops after ten iterations without a word, at residuals of 1e-5, 2e-3 and 0.14."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    data = [(draw(30, 5), torch.arange(30) % 3)]
    G = hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), torch.nn.CrossEntropyLoss(), model, data=data)
    b = draw(57, seed=1)
    found = hodiff.solve(G, G.unflatten(b), damping=damping, rtol=1e-8)
    assert found.converged and list(found.value) == [n for n, _ in model.named_parameters()]
    assert true_residual(G, G.flatten(found.value), b, damping) <= 1.01e-8


def test_indefinite_systems() -> None:
    A, b = with_spectrum(SPREAD), draw(120, seed=3)
    with pytest.warns(hodiff.ConvergenceWarning, match=r"negative or zero curvature.*minres"):
        found = hodiff.solve(A, b)
    assert (found.converged, found.status) == (False, "negative curvature")
    d = found.direction
    assert d @ (A @ d) <= 0
    found = hodiff.solve(A, b, method="minres", rtol=1e-8)
    assert found.converged and true_residual(A, found.value, b) <= 1.01e-8 and found.direction is None


def test_singular_and_hopeless_systems_say_so() -> None:
    singular = hodiff.MatrixOperator(torch.cat([torch.zeros(1, dtype=D), torch.ones(9, dtype=D)]))
    b = torch.ones(10, dtype=D)
    for method in ("cg", "minres"):
        with pytest.warns(hodiff.ConvergenceWarning, match="damping"):
            found = hodiff.solve(singular, b, method=method)
        assert not found.converged and found.residual == pytest.approx(true_residual(singular, found.value, b))
    # The null vector is met after some steps, when rounding has left it a tiny curvature: no step follows it.
    A = with_spectrum(torch.arange(6.0, dtype=D))
    with pytest.warns(hodiff.ConvergenceWarning, match="negative or zero curvature"):
        found = hodiff.solve(A, draw(6))
    assert found.status == "negative curvature" and found.products <= 8 and found.residual <= 1
    assert (A @ found.direction).norm() <= 1e-12 * found.direction.norm()
    with pytest.warns(hodiff.ConvergenceWarning, match="products ran out"):
        found = hodiff.solve(with_spectrum(POSITIVE), draw(100), products=5)
    assert found.status == "budget" and found.products <= 5


def test_zero_right_hand_side_costs_nothing() -> None:
    found = hodiff.solve(with_spectrum(POSITIVE), torch.zeros(100, dtype=D))
    assert found.products == 0 and found.value.abs().max() == 0 and found.converged


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_preconditioner_and_start(method: str) -> None:
    values = torch.logspace(0, 6, 200, dtype=D)
    A, b = hodiff.MatrixOperator(values), draw(200)
    inverse = hodiff.MatrixOperator(1 / (values * (1 + 0.01 * torch.sin(values))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.ConvergenceWarning)
        plain = hodiff.solve(A, b, method=method, rtol=1e-6)
    found = hodiff.solve(A, b, method=method, preconditioner=inverse, rtol=1e-6)
    assert found.converged and found.products < plain.products / 4
    assert true_residual(A, found.value, b) <= 1.01e-6
    assert hodiff.solve(A, b, method=method, start=b / values, rtol=1e-6).products == 1


def test_single_precision_reports_the_true_residual() -> None:
    A, b = hodiff.MatrixOperator(POSITIVE.float()), draw(100).float()
    found = hodiff.solve(A, b, rtol=1e-5)
    assert found.converged and true_residual(A, found.value, b) <= 1.01e-5
    with pytest.warns(hodiff.ConvergenceWarning, match="rounding|products"):
        assert not hodiff.solve(A, b, rtol=1e-12).converged


# --- trace and diagonal -----------------------------------------------------------------------------------------------


def coverage(estimates: list[tuple[float, float]], truth: float) -> float:
    """How often the truth lies within two standard errors."""
    return sum(abs(value - truth) <= 2 * stderr for value, stderr in estimates) / len(estimates)


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_standard_errors_of_the_trace_are_calibrated(method: str, probes: str) -> None:
    """400 runs of 60 products: within two standard errors 95 % (t with 19 degrees: 94 %); 4 sigma is 4.8 %."""
    A = with_spectrum(SPREAD)
    runs = [hodiff.trace(A, method=method, samples=60, probes=probes, generator=seeded(s)) for s in range(400)]
    estimates = [(float(run.value), float(run.stderr)) for run in runs]
    truth = float(SPREAD.sum())
    assert 0.89 <= coverage(estimates, truth) <= 0.985
    values = torch.tensor([value for value, _ in estimates])
    bias, spread = float(values.mean()) - truth, float(values.std())
    assert abs(bias) <= 4 * spread / math.sqrt(400)
    stderr = torch.tensor([error for _, error in estimates]).square().mean().sqrt()
    assert 0.85 <= float(stderr) / spread <= 1.15


def test_hutch_plus_plus_beats_hutchinson_on_a_decaying_spectrum() -> None:
    """40 runs of 60 products each: the root mean square error falls by 5 or more (it is about 100)."""
    values = 1 / torch.arange(1, 301, dtype=D) ** 2
    A, truth = with_spectrum(values), float(values.sum())
    errors = {
        method: torch.tensor([
            float(hodiff.trace(A, method=method, samples=60, generator=seeded(s)).value) - truth for s in range(40)
        ]).square().mean().sqrt()
        for method in ("hutchinson", "hutch++")
    }  # fmt: skip
    assert errors["hutch++"] < errors["hutchinson"] / 5


def test_trace_stops_at_its_tolerance() -> None:
    A = with_spectrum(POSITIVE.repeat(3))
    found = hodiff.trace(A, samples=290, rtol=0.05, generator=seeded(0))
    assert found.converged and found.products < 200 and float(found.stderr / found.value) <= 0.05
    with pytest.warns(hodiff.ConvergenceWarning, match="more than rtol"):
        assert not hodiff.trace(A, samples=20, rtol=1e-4).converged


def test_enough_products_give_exact_answers() -> None:
    A = with_spectrum(SPREAD)
    found = hodiff.trace(A, samples=120)
    agree(found.value, SPREAD.sum(), 1e-12)
    assert found.stderr == 0 and found.products == 120
    agree(hodiff.diagonal(A, samples=500).value, A.dense().diagonal(), 1e-12)
    agree(hodiff.diagonal(A, method="exact").value, A.dense().diagonal(), 1e-12)


def test_standard_errors_of_the_diagonal_are_calibrated() -> None:
    """60 entries, 50 runs of 40 products: 3000 intervals (entries correlate; bounds are wide)."""
    A = with_spectrum(SPREAD[::2])
    truth = A.dense().diagonal()
    inside = [
        ((found.value - truth).abs() <= 2 * found.stderr).double().mean()
        for found in (hodiff.diagonal(A, samples=40, generator=seeded(s)) for s in range(50))
    ]
    assert 0.92 <= float(torch.stack(inside).mean()) <= 0.97


def test_diagonal_has_the_structure_of_the_point_and_stops() -> None:
    point = (draw(4), draw(100))
    H = hodiff.HessianOperator(lambda p: (p[0] ** 3).sum() + (p[1] ** 2).sum() + 0.01 * p[1].sum() ** 2, point)
    found = hodiff.diagonal(H, samples=90, rtol=0.1, generator=seeded(0))
    assert found.converged and found.products < 90 and found.value[1].shape == (100,)
    with pytest.warns(hodiff.ConvergenceWarning, match="more than rtol"):
        hodiff.diagonal(H, samples=20, rtol=1e-6)


def test_chunks_do_not_change_the_probes() -> None:
    f = lambda x: (x.cumsum(0) ** 3).sum()
    one, many = (hodiff.HessianOperator(f, draw(200), chunk_size=size) for size in (1, 64))
    agree(hodiff.trace(one, generator=seeded(1)).value, hodiff.trace(many, generator=seeded(1)).value, 1e-12)
