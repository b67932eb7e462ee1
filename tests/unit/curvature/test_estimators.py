"""Eigenpairs, solves, traces and diagonals: right on hard spectra, honest about errors, calibrated.

Statistical tests state their budget: `runs` seeds, and a bound that a right estimator fails less than once in 10^4.
"""

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.operators import LABELS, D, X, draw, network, predict, split
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
    with (
        pytest.warns(hodiff.HodiffWarning, match="not finite(?s:.*)sqrt at 0"),
        pytest.raises(hodiff.GraphError, match="not finite"),
    ):
        hodiff.eigsh(H, 1)


def test_a_system_of_an_entry_that_is_none_is_refused() -> None:
    A = torch.eye(4)
    A[0, 0] = math.nan
    with pytest.raises(hodiff.GraphError, match=r"a product is not finite"):
        hodiff.solve(hodiff.MatrixOperator(A), torch.ones(4), method="gmres")


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


MANY = with_spectrum(torch.logspace(0, 2, 90, dtype=D))
LOOKED_AT = {
    "trace": lambda look: hodiff.trace(MANY, samples=20, generator=seeded(0), callback=look),
    "diagonal": lambda look: hodiff.diagonal(MANY, samples=20, generator=seeded(0), callback=look),
    "logdet": lambda look: hodiff.logdet(MANY, samples=20, steps=4, shift=30.0, generator=seeded(0), callback=look),
    "spectral_density": lambda look: hodiff.spectral_density(
        MANY, samples=20, steps=4, generator=seeded(0), callback=look
    ),
    "eigsh": lambda look: hodiff.eigsh(MANY, 2, generator=seeded(0), callback=look),
    "solve": lambda look: hodiff.solve(MANY, torch.ones(90, dtype=D), callback=look),
}


def test_who_takes_a_callback() -> None:
    functions = {name: getattr(hodiff, name) for name in hodiff.__all__}
    taken = {n for n, f in functions.items() if inspect.isfunction(f) and "callback" in inspect.signature(f).parameters}
    assert taken == set(LOOKED_AT)


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_callback_sees_the_record_grow_into_the_result(name: str) -> None:
    seen: list[Any] = []
    found = LOOKED_AT[name](seen.append)
    products = [record.products for record in seen]
    assert len(seen) > 1 and products == sorted(set(products)) and products[0] > 0 and products[-1] <= found.products
    assert {type(record) for record in seen} == {type(found)}
    what = "nodes" if name == "spectral_density" else "value"
    torch.testing.assert_close(getattr(seen[-1], what), getattr(found, what), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("function", [hodiff.trace, hodiff.diagonal])
@pytest.mark.parametrize(("samples", "spent"), [(15, 15), (16, 16), (17, 16), (64, 16)])
def test_a_tolerance_waits_for_sixteen_vectors(function: Any, samples: int, spent: int) -> None:
    """Vectors of signs have no error at a diagonal matrix: the first look is enough."""
    A = hodiff.MatrixOperator(torch.diag(torch.linspace(1, 2, 90, dtype=D)))
    found = function(A, samples=samples, rtol=1e-3, generator=seeded(0))
    assert found.products == spent and found.converged


BAD_CALLS = {
    r"eigsh: this MatrixOperator is not known to be symmetric": lambda A: hodiff.eigsh(
        hodiff.MatrixOperator(draw(3, 3))
    ),
    r"k: got 200": lambda A: hodiff.eigsh(A, 200),
    r"which: got 'LA'": lambda A: hodiff.eigsh(A, which="LA"),
    r"wrap it: hodiff\.MatrixOperator\(A\)": lambda A: hodiff.eigsh(draw(3, 3)),
    r"got an int": lambda A: hodiff.trace(3),
    r"is 2 x 3, expected a square": lambda A: hodiff.trace(hodiff.MatrixOperator(draw(2, 3))),
    r"samples: got 0": lambda A: hodiff.trace(A, samples=0),
    r"rtol: the error of one random vector is unknown": lambda A: hodiff.trace(A, samples=1, rtol=0.1),
    r"rtol: the error of one random vector": lambda A: hodiff.diagonal(A, vectors=torch.ones(120, dtype=D), rtol=0.1),
    r"vectors: some entries are not finite": lambda A: hodiff.trace(A, vectors=draw(120) / 0),
    r"vectors: got none": lambda A: hodiff.diagonal(A, vectors=draw(120, 0)),
    r"trace: the operator has no columns; is it the block of an empty leaf": lambda A: hodiff.trace(
        hodiff.HessianOperator(lambda p: p["a"] ** 2, {"a": draw(1), "b": draw(0)}).block("b")
    ),
    r"blocks: got 'x'": lambda A: hodiff.trace(A, blocks="x"),
    r"blocks: these come from z \* A z, so they need method='hutchinson', not 'hutch\+\+'": lambda A: hodiff.trace(
        A, blocks=["x"], method="hutch++"
    ),
    r"block: 'y' matches no leaf": lambda A: hodiff.trace(A, blocks=["y"]),
    r"callback: got an int": lambda A: hodiff.trace(A, callback=1),
    r"probes: got 'uniform'": lambda A: hodiff.trace(A, probes="uniform"),
    r"method: got 'x-trace'": lambda A: hodiff.trace(A, method="x-trace"),
    r"method: got 'x'": lambda A: hodiff.diagonal(A, method="x"),
    r"rtol: got 0": lambda A: hodiff.trace(A, rtol=0),
    r"generator: got an int": lambda A: hodiff.diagonal(A, generator=0),
    r"method: got 'lu'": lambda A: hodiff.solve(A, draw(120), method="lu"),
    r"b has shape": lambda A: hodiff.solve(A, draw(5)),
    r"start: got 1 vector, but b holds 2": lambda A: hodiff.solve(A, draw(120, 2), start=draw(120)),
    r"not finite": lambda A: hodiff.solve(A, draw(120) / 0),
    r"damping: got 'x'": lambda A: hodiff.solve(A, draw(120), damping="x"),
    r"preconditioner has shape \(3, 3\)": lambda A: hodiff.solve(
        A, draw(120), preconditioner=hodiff.MatrixOperator(draw(3))
    ),
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


def test_several_pairs_whose_residuals_rounding_left_above_the_tolerance():
    turn, _ = torch.linalg.qr(torch.randn(400, 400, generator=seeded(0)))
    spectrum = torch.linspace(1, 2, 400)
    A = hodiff.MatrixOperator((turn * spectrum) @ turn.T, symmetric=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.ConvergenceWarning)  # single precision may not allow it
        found = hodiff.eigsh(A, 6, rtol=1e-7, generator=seeded(0))
    torch.testing.assert_close(found.value, spectrum.flip(0)[:6], rtol=1e-5, atol=0)


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
    """A peer stops after ten iterations silently, at residuals of 1e-5, 2e-3 and 0.14."""
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
    with pytest.warns(hodiff.ConvergenceWarning, match="budget of products is spent"):
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


@pytest.mark.table(plain=2)
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


# --- vectors of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 8, 20])
def test_with_vectors_of_ones_own_the_estimates_are_means_over_them(number: int) -> None:
    """Mean, and the standard error with n - 1, by the textbook; whole blocks, parts of one, and several."""
    A, V = with_spectrum(SPREAD[::4]), draw(30, number, seed=7)
    dense = A.dense()
    forms, entries = (V * (dense @ V)).sum(0), V * (dense @ V)
    state = torch.get_rng_state()
    found = hodiff.trace(A, vectors=V)
    agree(found.value, forms.mean(), 1e-12)
    agree(found.stderr, forms.std() / number**0.5, 1e-12)
    assert found.products == number
    found = hodiff.diagonal(A, vectors=V)
    agree(found.value, entries.mean(1), 1e-12)
    agree(found.stderr, entries.std(1) / number**0.5, 1e-12)
    assert found.products == number and torch.equal(torch.get_rng_state(), state)


def test_vectors_of_ones_own_in_hutch_plus_plus() -> None:
    """Half of them span the sketch; a matrix of rank 3 is then known, whatever the others are."""
    A = with_spectrum(torch.cat([torch.zeros(57, dtype=D), torch.tensor([1.0, 2.0, 4.0], dtype=D)]))
    found = hodiff.trace(A, method="hutch++", vectors=draw(60, 7))
    agree(found.value, torch.tensor(7.0, dtype=D), 1e-10)
    assert found.stderr < 1e-10 and found.products == 3 + 3 + 4


def test_vectors_of_ones_own_in_other_spellings() -> None:
    H = hodiff.HessianOperator(lambda p: (p["a"] ** 3).sum() * p["b"].sum(), {"a": draw(3), "b": draw(2)})
    V = draw(5, 6, seed=1)
    expected = hodiff.trace(H, vectors=V).value
    for spelled in (H.unflatten(V), list(H.unflatten(V).values()), V.numpy(), V.tolist()):
        agree(hodiff.trace(H, vectors=spelled).value, expected, 1e-12)
    for one in (V[:, 0], H.unflatten(V[:, 0]), V[:, :1]):
        found, entries = hodiff.trace(H, vectors=one), hodiff.diagonal(H, vectors=one)
        agree(found.value, V[:, 0] @ H.dense() @ V[:, 0], 1e-12)
        agree(H.flatten(entries.value), V[:, 0] * (H.dense() @ V[:, 0]), 1e-12)
        assert (found.stderr, found.converged, entries.stderr, entries.converged) == (None,) * 4
    with pytest.raises(hodiff.InputError, match=r"vectors has shape \(4, 6\)"):
        hodiff.diagonal(H, vectors=V[:4])


def test_vectors_that_are_all_the_same_say_as_much_as_one() -> None:
    """Two equal vectors, or opposite ones, agree without telling an error: 0 would be a claim."""
    A, z = with_spectrum(SPREAD), draw(len(SPREAD), seed=3).sign()
    for V in (torch.stack([z, z], 1), torch.stack([z, -z, z], 1)):
        found, entries, logs = (
            hodiff.trace(A, vectors=V),
            hodiff.diagonal(A, vectors=V),
            hodiff.logdet(A, shift=20.0, vectors=V),
        )
        agree(found.value, z @ A.dense() @ z, 1e-12)
        agree(entries.value, z * (A.dense() @ z), 1e-12)
        assert found.stderr is entries.stderr is logs.stderr is hodiff.spectral_density(A, vectors=V).stderr is None
        assert found.products == 1
        with pytest.raises(hodiff.InputError, match="the error of one random vector is unknown"):
            hodiff.trace(A, vectors=V, rtol=0.1)
        sketched = hodiff.trace(A, vectors=V, method="hutch++")
        agree(sketched.value, z @ A.dense() @ z, 1e-10)
        assert sketched.stderr is None and sketched.converged is None


def test_vectors_that_repeat_others_are_told() -> None:
    A, V = with_spectrum(SPREAD), draw(len(SPREAD), 6, seed=3).sign()
    hodiff.trace(A, vectors=V)
    again = torch.cat([V, -V[:, 1:3], V[:, :1]], 1)
    for estimate in (hodiff.trace, hodiff.diagonal, hodiff.spectral_density):
        with pytest.warns(hodiff.HodiffWarning, match="3 of 9 repeat others"):
            estimate(A, vectors=again)
    few = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, 1.0]], dtype=D)  # of two entries: as it happens
    assert hodiff.trace(hodiff.MatrixOperator(torch.eye(2, dtype=D)), vectors=few).stderr == 0


@pytest.mark.parametrize(("scale", "dtype"), [(1e-170, D), (1e170, D), (1e-28, torch.float32), (1e28, torch.float32)])
def test_errors_have_a_place_where_squares_have_none(scale: float, dtype: torch.dtype) -> None:
    """Squares of such entries are zero or infinite: a standard error was, too, and any tolerance met."""
    one, V = with_spectrum(SPREAD), draw(len(SPREAD), 20, seed=3)
    A = hodiff.MatrixOperator((one.dense() * scale).to(dtype))
    far = 1e-10 if dtype is D else 1e-4
    for method in ("hutchinson", "hutch++"):
        found, expected = (
            hodiff.trace(A, vectors=V.to(dtype), method=method),
            hodiff.trace(one, vectors=V, method=method),
        )
        agree(found.stderr.to(D) / scale, expected.stderr, far)
    found, expected = hodiff.diagonal(A, vectors=V.to(dtype)), hodiff.diagonal(one, vectors=V)
    agree(found.stderr.to(D) / scale, expected.stderr, far)
    agree(found.value.to(D) / scale, expected.value, far)
    with pytest.warns(hodiff.ConvergenceWarning, match="of the diagonal, more than rtol"):
        assert not hodiff.diagonal(A, vectors=V.to(dtype), rtol=1e-3).converged
    b = draw(len(SPREAD), seed=5)
    damped = with_spectrum(SPREAD + 6)
    B = hodiff.MatrixOperator((damped.dense() * scale).to(dtype))
    for method in ("cg", "minres", "gmres"):
        solved = hodiff.solve(B, b.to(dtype), method=method)
        assert solved.converged and solved.residual < (1e-7 if dtype is D else 1e-3)
        agree(solved.value.to(D) * scale, torch.linalg.solve(damped.dense(), b), 1e-6 if dtype is D else 1e-3)
        with pytest.raises(hodiff.InputError, match=r"the solution's largest entry is about .* cannot represent"):
            hodiff.solve(B, (b / scale if scale < 1 else b / scale**0.9).to(dtype), method=method)


def test_what_is_drawn_has_the_law_that_was_asked_for() -> None:
    seen: list[Tensor] = []

    def f(x: Tensor) -> Tensor:
        return (x**2).sum() / 2

    H = hodiff.HessianOperator(f, torch.zeros(500, dtype=D))
    product = H._multiply
    H._multiply = lambda parts, count: (seen.append(parts[0]), product(parts, count))[1]  # type: ignore[method-assign]
    hodiff.diagonal(H, samples=80, generator=seeded(0))
    signs = torch.cat([part.reshape(-1) for part in seen])
    assert set(signs.tolist()) == {1.0, -1.0} and abs(float(signs.mean())) < 4 / 200
    seen.clear()
    found = hodiff.diagonal(H, samples=80, probes="gaussian", generator=seeded(0))
    normal = torch.cat([part.reshape(-1) for part in seen])
    assert abs(float(normal.mean())) < 4 / 200 and float(normal.var()) == pytest.approx(1, abs=0.04)
    assert float(normal.pow(4).mean()) == pytest.approx(3, abs=0.3)
    assert found.value.mean() == pytest.approx(1, abs=0.04) and found.stderr.mean() > 0.1


@pytest.mark.parametrize(("method", "spent"), [("hutchinson", 40), ("hutch++", 60)])
def test_samples_are_how_many_vectors_are_drawn(method: str, spent: int) -> None:
    assert hodiff.trace(with_spectrum(SPREAD), method=method, samples=40).products == spent


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_sums_of_half_precision_are_not_taken_in_it(method: str, dtype: torch.dtype) -> None:
    """The trace is 200 000, beyond float16; summed in bfloat16 it would stop at 512."""
    A = hodiff.MatrixOperator(torch.full((100_000,), 2.0, dtype=dtype))
    found = hodiff.trace(A, method=method, samples=8)
    assert found.value.dtype == torch.float32 and float(found.value) == pytest.approx(200_000, rel=1e-3)
    few = hodiff.MatrixOperator(torch.full((100,), 1000.0, dtype=dtype))
    assert float(hodiff.trace(few, samples=100).value) == 100_000


def test_estimates_of_a_half_precision_matrix_are_those_of_its_values() -> None:
    half = (200 * draw(60, 60)).half()
    half = ((half + half.T) / 2).half()
    A, exact = hodiff.MatrixOperator(half), hodiff.MatrixOperator(half.double())
    V = draw(60, 20).sign()
    found, expected = hodiff.diagonal(A, vectors=V.half()), hodiff.diagonal(exact, vectors=V)
    assert found.value.dtype == torch.float16
    agree(found.stderr.double(), expected.stderr, 2e-3)  # squares of 1000 leave float16
    agree(found.value.double(), expected.value, 2e-3)
    top = hodiff.eigsh(hodiff.MatrixOperator(torch.full((300, 300), 300.0).half()), 1)
    assert top.converged and float(top.value) == pytest.approx(90_000, rel=1e-2) and top.value.dtype == torch.float32


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_long_system_in_half_precision(method: str) -> None:
    n = 200_000
    values = torch.linspace(1, 2, n)
    found = hodiff.solve(hodiff.MatrixOperator(values.half()), torch.ones(n).half(), method=method)
    assert found.converged and found.value.dtype == torch.float16
    agree(found.value.float(), 1 / values, 2e-2)


# --- the best iterate -------------------------------------------------------------------------------------------------


def test_negative_curvature_ends_with_the_best_iterate_and_not_the_last() -> None:
    values = torch.cat([torch.linspace(1, 10, 40, dtype=D), torch.tensor([-0.01], dtype=D)])
    b = draw(41)
    b[-1] *= 0.1
    x, r, d = torch.zeros(41, dtype=D), b.clone(), b.clone()
    iterates = [x]
    while float(d @ (values * d)) > 0:  # conjugate gradients by the textbook
        step = (r @ r) / (d @ (values * d))
        x, before = x + step * d, r
        r = r - step * values * d
        d = r + (r @ r) / (before @ before) * d
        iterates.append(x)
    residuals = torch.stack([(b - values * x).norm() for x in iterates]) / b.norm()
    best = int(residuals.argmin())
    assert 0 < best < len(iterates) - 1 and residuals[best] < 0.8 * residuals[-1]  # what makes the test one
    with pytest.warns(hodiff.ConvergenceWarning, match="negative or zero curvature"):
        found = hodiff.solve(hodiff.MatrixOperator(values), b)
    agree(found.value, iterates[best], 1e-6)
    assert found.residual == pytest.approx(float(residuals[best]), rel=1e-6)


# --- the diagonal of a sum of few outer products ----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", ["auto", 1, 4])
@pytest.mark.parametrize(("kind", "passes"), [("empirical", 1), ("mc", 2), ("exact", 2)])
def test_the_diagonal_of_a_fisher_matrix_takes_a_pass_for_each_score(kind: str, passes: int, chunk: object) -> None:
    """For all samples at once: their own, of the labels drawn, or one less than there are classes."""
    F = hodiff.FisherOperator(
        predict, torch.nn.CrossEntropyLoss(), network(), data=split(X, LABELS), kind=kind, samples=2,
        chunk_size=chunk,
    )  # fmt: skip
    dense = F.dense().diagonal()
    found = hodiff.diagonal(F, method="exact")
    assert found.products == passes
    agree(F.flatten(found.value), dense, 1e-12)
    agree(hodiff.trace(F, samples=39).value, dense.sum(), 1e-12)
    block = F.block("3")
    agree(block.flatten(hodiff.diagonal(block, method="exact").value), dense[24:], 1e-12)


def test_the_diagonal_of_a_fisher_matrix_of_other_outputs() -> None:
    """Independent entries in `"mc"` of squared errors; several outputs, and more dimensions, in `"empirical"`."""
    mc = hodiff.FisherOperator(predict, torch.nn.MSELoss(), network(), data=[(X[:4], X[:4])], kind="mc", samples=3)
    agree(mc.flatten(hodiff.diagonal(mc, method="exact").value), mc.dense().diagonal(), 1e-12)
    both = lambda m, b: {"a": m(b), "b": torch.sin(m(b)[:, :2, None] * m(b)[:, None])}
    loss = lambda o, b: (o["a"].square().sum() + (o["b"] ** 3).sum(), len(b))
    F = hodiff.FisherOperator(both, loss, network(), data=[X], kind="empirical")
    found = hodiff.diagonal(F, method="exact")
    assert found.products == 1
    agree(F.flatten(found.value), F.dense().diagonal(), 1e-12)


def test_a_search_that_had_no_products_left_to_look_beside_it_has_not_converged() -> None:
    """Its pair is one, and another eigenvalue may be larger."""
    A = hodiff.MatrixOperator(torch.diag(torch.linspace(0, 1, 200, dtype=D).index_fill(0, torch.tensor(199), 50.0)))
    search = lambda products: hodiff.eigsh(A, 1, products=products, generator=torch.Generator().manual_seed(0))
    with pytest.warns(hodiff.ConvergenceWarning, match="after 12 products the largest residual"):
        found = search(12)
    assert not found.converged and found.residual < 1e-12
    assert search(30).converged


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_estimators_in_half_precision(dtype: torch.dtype) -> None:
    x = torch.ones(100_000, dtype=dtype)
    H = hodiff.HessianOperator(lambda z: (z.float() ** 2).sum(), x)
    found = hodiff.trace(H, samples=4, generator=torch.Generator().manual_seed(0))
    assert abs(float(found.value) / 200_000 - 1) < 1e-2


SAMPLES, CLASSES = draw(10, 4, seed=1), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))


def linear(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return m(batch[0])


def layer(dtype: torch.dtype = D) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def test_sampled_fisher_does_not_shrink_with_the_number_of_samples() -> None:
    make = lambda kind, **options: hodiff.FisherOperator(
        linear, nn.CrossEntropyLoss(), layer(torch.bfloat16), data=[(SAMPLES.bfloat16(), CLASSES)], kind=kind, **options
    )
    sampled = make("mc", samples=3000, generator=torch.Generator().manual_seed(0)).dense().double().trace()
    assert sampled == pytest.approx(float(make("exact").dense().double().trace()), rel=0.03)


def test_hutchpp_in_half_precision() -> None:
    A = hodiff.MatrixOperator(torch.diag(2.0 ** -torch.arange(60.0)).bfloat16())
    assert float(hodiff.trace(A, method="hutch++", samples=30).value) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("name", ["trace", "diagonal"])
@pytest.mark.parametrize("samples", [1, 100])
def test_an_entry_that_is_none_is_said(name: str, samples: int) -> None:
    """Others raise: of a diagonal the other entries are worth having."""
    A = hodiff.MatrixOperator(torch.tensor([[float("nan"), 0.0], [0.0, 2.0]]))
    with pytest.warns(hodiff.HodiffWarning, match=rf"{name}: the result is not finite, so the operator has NaN"):
        value = getattr(hodiff, name)(A, samples=samples).value
    assert value.isnan().any()


@pytest.mark.parametrize("name", ["trace", "diagonal"])
def test_an_entry_that_is_none_is_said_once(name: str, recwarn: pytest.WarningsRecorder) -> None:
    """By the product, which knows the operations; and not in other words by the estimator."""
    H = hodiff.HessianOperator(lambda z: (z.abs() ** 1.5).sum(), torch.tensor([0.0, 1.0, 2.0]))
    assert getattr(hodiff, name)(H).value.isnan().any()
    [warned] = recwarn
    assert "Operations in f with such points: a power of 0" in str(warned.message)


def test_a_callbacks_exception_is_the_users() -> None:
    def seen(record: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hodiff.solve(hodiff.MatrixOperator(torch.eye(2) * 2), torch.ones(2), callback=seen)


@pytest.mark.parametrize("number", [2, 8, 32])
def test_the_error_of_a_differentiable_diagonal_is_that_of_its_mean(number: int) -> None:
    """Rows of single vectors, and their spread over the root of how many there are."""
    A = hodiff.MatrixOperator(draw(40, 40, seed=3) @ draw(40, 40, seed=3).T)
    vectors = torch.sign(draw(40, number, seed=4))
    plain = hodiff.diagonal(A, vectors=vectors)
    recorded = hodiff.diagonal(A, vectors=vectors, create_graph=True)
    terms = vectors * (A @ vectors)
    agree(recorded.stderr, terms.std(1) / number**0.5, 1e-12)
    agree(recorded.stderr, plain.stderr, 1e-12)
    agree(recorded.value, terms.mean(1), 1e-12)


def test_blocks_of_an_exact_trace_are_exact() -> None:
    model = nn.Sequential(nn.Linear(3, 2, dtype=D), nn.Tanh(), nn.Linear(2, 1, dtype=D))
    H = hodiff.HessianOperator(lambda model: model(X[:, :3]).square().sum(), model)
    found = hodiff.trace(H, blocks=["0.*", "2.weight"], samples=1000, rtol=0.1)
    for name, part in found.blocks.items():
        assert part.stderr == 0 and part.converged
        agree(part.value, H.block(name).dense().trace(), 1e-12)
    assert found.stderr == 0 and found.converged
