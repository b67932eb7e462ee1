"""`spectral_density` and `logdet` against all eigenvalues, and their errors against what they are."""

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hodiff
from hodiff.curvature import _krylov
from hodiff.curvature._density import Overlaps
from tests.support.operators import D, draw
from tests.support.properties import agree

N = 150
Q, _ = torch.linalg.qr(draw(N, N, seed=4))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_spectrum(values: Tensor) -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(Q @ torch.diag(values) @ Q.T)


SPECTRA = {
    "spread": torch.linspace(-5, 10, N, dtype=D),
    "clustered": torch.cat([torch.full((100,), 1.0, dtype=D), torch.full((50,), 5.0, dtype=D)]),
    "degenerate": torch.full((N,), 3.0, dtype=D),
    "singular": torch.cat([torch.zeros(100, dtype=D), torch.linspace(1, 2, 50, dtype=D)]),
    "zero": torch.zeros(N, dtype=D),
    "spiked": torch.cat([torch.linspace(0, 1, N - 3, dtype=D), torch.tensor([50.0, 80.0, -90.0], dtype=D)]),
    "huge": 1e170 * torch.linspace(1, 2, N, dtype=D),
    "tiny": 1e-170 * torch.linspace(1, 2, N, dtype=D),
}


def gaussians(values: Tensor, grid: Tensor, width: float) -> Tensor:
    """The exact density."""
    z = (grid[:, None] - values) / width
    return torch.exp(-0.5 * z * z).sum(1) / (len(values) * width * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("name", SPECTRA)
def test_the_density_lies_in_its_band(name: str) -> None:
    """20 vectors: of the points with any density, nearly all lie within four standard errors (they are correlated)."""
    values = SPECTRA[name]
    found = hodiff.spectral_density(with_spectrum(values), vectors=draw(N, 20, seed=1).sign(), steps=40, points=200)
    assert found.stderr is not None and not found.exact
    true = gaussians(values, found.grid, found.width)
    top = float(true.max())
    outside = (found.value - true).abs() > 4 * found.stderr + 1e-3 * top
    assert outside.double().mean() < 0.02
    step = float(found.grid[1] - found.grid[0])
    assert float(found.value.sum()) * step == pytest.approx(1, rel=2e-3)
    agree(found.weights.sum(1), torch.ones(20, dtype=D), 1e-10)
    assert found.products <= 20 * 40


def test_nodes_and_weights_are_gauss_rules() -> None:
    """Of m steps: exact for polynomials of degree 2m - 1 in the measure of each vector, Gaussian ones too."""
    A, V = with_spectrum(SPECTRA["spread"]), draw(N, 3, seed=2)
    found = hodiff.spectral_density(A, vectors=V, steps=4)
    assert found.products == 12 and found.nodes.shape == found.weights.shape == (3, 4)
    dense = A.dense() / 10
    for power in range(8):
        moments = (V * (torch.linalg.matrix_power(dense, power) @ V)).sum(0) / N
        agree((found.weights * (found.nodes / 10) ** power).sum(1), moments, 1e-10)
        mean, error = found.mean(lambda t, power=power: (t / 10) ** power)
        agree(mean, moments.mean(), 1e-10)
        assert error is not None
        agree(error, moments.std() / 3**0.5, 1e-8)


def orthogonal_lanczos(dense: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights with every vector made orthogonal to all before, twice."""
    basis = [v / v.norm()]
    for _ in range(steps - 1):
        w = dense @ basis[-1]
        for _ in range(2):
            w = w - torch.stack(basis).T @ (torch.stack(basis) @ w)
        basis.append(w / w.norm())
    V = torch.stack(basis)
    nodes, vectors = torch.linalg.eigh(V @ dense @ V.T)
    return nodes, vectors[0].square()


ISOLATED = torch.tensor([1e3, 500.0, -200.0], dtype=D)


def test_vectors_are_made_orthogonal_where_that_is_needed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, orthogonalized = [0], _krylov.Inner.orthogonalized

    def counting(*given: Any) -> Any:
        made[0] += 1
        return orthogonalized(*given)

    monkeypatch.setattr(_krylov.Inner, "orthogonalized", counting)
    A, V = with_spectrum(SPECTRA["spread"]), draw(N, 4, seed=1)
    for dtype, least, most in ((D, 0, 0), (torch.float32, 0.04, 0.14)):
        made[0] = 0
        hodiff.spectral_density(hodiff.MatrixOperator(A.dense().to(dtype)), vectors=V.to(dtype), steps=60)
        assert least <= made[0] / (4 * 60) <= most


def test_a_process_may_end_before_the_others() -> None:
    V = draw(N, 3, seed=1)
    V[:, 1] = torch.eye(N, dtype=D)[7]
    found = hodiff.spectral_density(hodiff.MatrixOperator(torch.arange(1.0, N + 1, dtype=D)), vectors=V, steps=20)
    assert bool(torch.isfinite(found.nodes).all())
    agree(found.weights[1] @ found.nodes[1], torch.tensor(8.0 / N, dtype=D), 1e-12)
    agree(found.weights[2] @ found.nodes[2], V[:, 2].square() @ torch.arange(1.0, N + 1, dtype=D) / N, 1e-10)


def test_a_nearly_exhausted_process_stays_orthogonal() -> None:
    """Eigenvalues that fall to rounding: the nodes are the large ones, each once."""
    values = 0.8 ** torch.arange(N, dtype=D)
    found = hodiff.spectral_density(with_spectrum(values), vectors=draw(N, 2, seed=7).sign(), steps=100)
    for nodes in found.nodes:
        agree(nodes.sort(descending=True).values[:80], values[:80], 1e-9)


def test_how_far_from_orthogonal_is_foreseen() -> None:
    """Simon's recurrence against the products of the vectors of a process that nothing keeps orthogonal."""
    values = torch.cat([torch.logspace(-6, 1, N - 3, dtype=D), ISOLATED]) / 1e3
    dense = (Q @ torch.diag(values) @ Q.T).float()
    v, before, beta = draw(N, seed=9).float(), torch.zeros(N), 0.0
    v = v / v.norm()
    basis = [v]
    diagonal, beside = torch.zeros((1, 30), dtype=D), torch.zeros((1, 30), dtype=D)
    foreseen = Overlaps(diagonal, beside, torch.finfo(torch.float32).eps)
    for j in range(30):
        w = dense @ v
        alpha = torch.dot(v, w)
        w = w - alpha * v - beta * before
        beta = w.norm()
        diagonal[:, j], beside[:, j] = alpha, beta
        (asked,) = (bool(foreseen.to_orthogonalize(j, torch.ones(1, dtype=D))),)
        before, v = v, w / beta
        true = float((torch.stack(basis) @ v).abs().max())
        basis.append(v)
        if true > 3e-4:
            assert asked
            return
        assert not asked or true > 1e-7
    pytest.fail("nothing was lost")


@pytest.mark.parametrize("dtype", [D, torch.float32])
def test_a_long_process_stays_orthogonal(dtype: torch.dtype) -> None:
    """Otherwise eigenvalues that are found early come back as ghosts, and share their weight."""
    values = torch.cat([torch.logspace(-6, 1, N - 3, dtype=D), ISOLATED])
    A = (Q @ torch.diag(values) @ Q.T).to(dtype)
    V = draw(N, 3, seed=7).sign().to(dtype)
    found = hodiff.spectral_density(hodiff.MatrixOperator((A + A.T) / 2), vectors=V, steps=60)
    for number in range(3):
        nodes, weights = orthogonal_lanczos(A.double(), V[:, number].double(), 60)
        slack = 50 * torch.finfo(dtype).eps
        agree(found.nodes[number].max(), nodes.max(), slack)
        agree(found.nodes[number].min(), nodes.min(), slack)
        for value in ISOLATED.tolist():
            near, expected = (abs(theta - value) < 0.1 for theta in (found.nodes[number], nodes))
            assert int(near.sum()) == int(expected.sum()) == 1
            agree(found.weights[number][near], weights[expected], 1e3 * torch.finfo(dtype).eps ** 0.75)
        for f in (torch.abs, torch.square, lambda t: 1 / (1 + t.abs())):
            agree((f(found.nodes[number]) * found.weights[number]).sum(), (f(nodes) * weights).sum(), 20 * slack)


@pytest.mark.parametrize("number", [1, 7, 8, 9, 20])
def test_vectors_are_taken_some_at_a_time(number: int) -> None:
    A, V = with_spectrum(SPECTRA["spread"]), draw(N, number, seed=3)
    seen: list[int] = []
    found = hodiff.spectral_density(A, vectors=V, steps=5, callback=lambda record: seen.append(len(record.nodes)))
    alone = [hodiff.spectral_density(A, vectors=V[:, i], steps=5) for i in range(number)]
    agree(found.nodes, torch.cat([one.nodes for one in alone]), 1e-9)
    agree(found.weights, torch.cat([one.weights for one in alone]), 1e-9)
    assert seen == [min(8 * i, number) for i in range(1, -(-number // 8) + 1)]
    assert alone[0].stderr is None and (found.stderr is None) == (number == 1)


def test_enough_products_give_all_eigenvalues() -> None:
    values = SPECTRA["spread"]
    found = hodiff.spectral_density(with_spectrum(values), samples=10, steps=50, width=0.5)
    agree(found.nodes[0], values, 1e-10)
    agree(found.value, gaussians(values, found.grid, 0.5), 1e-10)
    assert found.exact and found.products == N and found.stderr is not None and found.stderr.abs().max() == 0
    agree(found.at(values, 0.3)[0], gaussians(values, values, 0.3), 1e-10)
    huge = hodiff.spectral_density(with_spectrum(SPECTRA["huge"]))
    agree(huge.nodes[0] / 1e170, SPECTRA["huge"] / 1e170, 1e-10)


def test_what_is_drawn_follows_the_generator() -> None:
    A = with_spectrum(SPECTRA["spread"])
    one, same, other = (hodiff.spectral_density(A, samples=3, steps=6, generator=seeded(s)).nodes for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    normal = hodiff.spectral_density(A, samples=9, steps=3, probes="gaussian", generator=seeded(1))
    assert normal.weights.sum(1).std() > 0.01  # |z|² / D


def test_single_precision_and_structure() -> None:
    H = hodiff.HessianOperator(
        lambda p: (p["a"] ** 4).sum() + (p["b"] ** 2).sum() * 3, {"a": torch.ones(60), "b": torch.zeros(40)}
    )
    found = hodiff.spectral_density(H, samples=8, steps=4, generator=seeded(0))
    heavy = found.weights > 1e-6
    assert set(found.nodes[heavy].round(decimals=3).tolist()) == {6.0, 12.0}
    fraction, error = found.mean(lambda t: (t > 9).double())
    assert float(fraction) == pytest.approx(0.6, abs=1e-5) and float(error) < 1e-5


def test_the_spectrum_of_a_classifier_of_digits_lies_in_its_band() -> None:
    """Of a trained network: the density, the part of the spectrum in bins, the largest eigenvalue, two moments."""
    torch.manual_seed(0)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data[:300] / 16), torch.tensor(digits.target[:300])
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    H = hodiff.HessianOperator(lambda model: F.cross_entropy(model(inputs), targets), model)
    exact = torch.linalg.eigvalsh(H.dense())
    found = hodiff.spectral_density(H, vectors=draw(len(exact), 8, seed=1).sign(), steps=50)
    assert found.stderr is not None
    true = gaussians(exact, found.grid, found.width)
    outside = (found.value - true).abs() > 3 * found.stderr + 1e-3 * float(true.max())
    assert outside.double().mean() < 0.05
    assert float(found.nodes.max()) == pytest.approx(float(exact[-1]), rel=1e-6)
    bins: list[Callable[[Tensor], Tensor]] = [torch.abs, torch.square]
    for low, high in pairwise([-1.0, -0.01, 0.01, 0.1, 1.0, 10.0]):
        bins.append(lambda t, low=low, high=high: ((t > low) & (t <= high)).double())
    for f in bins:
        value, error = found.mean(f)
        assert error is not None
        assert abs(float(value - f(exact).mean())) <= 4 * float(error) + 2 / len(exact)


# --- logdet -----------------------------------------------------------------------------------------------------------

POSITIVE = {
    "flat": torch.linspace(0.1, 10, N, dtype=D),
    "clustered": SPECTRA["clustered"],
    "degenerate": SPECTRA["degenerate"],
    "spiked": torch.cat([torch.linspace(0.5, 1, N - 3, dtype=D), torch.tensor([50.0, 80.0, 100.0], dtype=D)]),
    "huge": SPECTRA["huge"],
    "tiny": SPECTRA["tiny"],
}


@pytest.mark.parametrize("name", POSITIVE)
def test_log_determinants_are_calibrated(name: str) -> None:
    """40 runs of 6 vectors: within three standard errors (t with 5 degrees: 97 %), without a bias."""
    values = POSITIVE[name]
    A, truth = with_spectrum(values), float(values.log().sum())
    runs = [hodiff.logdet(A, vectors=draw(N, 6, seed=s).sign(), steps=30) for s in range(40)]
    errors = torch.tensor([float(run.value) - truth for run in runs])
    bars = torch.tensor([float(run.stderr) for run in runs])
    slack = 1e-9 * abs(truth)
    assert ((errors.abs() <= 3 * bars + slack).double().mean()) >= 0.85
    assert abs(float(errors.mean())) <= 4 * float(errors.std()) / 40**0.5 + slack
    assert all(run.converged is None for run in runs)


@pytest.mark.parametrize("steps", [6, 20, 60])
def test_too_few_steps_are_told_from_too_few_vectors(steps: int) -> None:
    """A spectrum over eight decades: Gauss's rules converge slowly, and all vectors agree on the wrong value."""
    values = torch.logspace(-8, 0, N, dtype=D)
    truth = float(values.log().sum())
    with pytest.warns(hodiff.ConvergenceWarning, match=f"rules of {steps} steps is about .* allow more steps"):
        found = hodiff.logdet(with_spectrum(values), vectors=draw(N, 6).sign(), steps=steps)
    assert abs(float(found.value) - truth) <= 2 * float(found.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shifted = hodiff.logdet(with_spectrum(values), shift=0.1, vectors=draw(N, 6).sign(), steps=60)
    assert abs(float(shifted.value) - float((values + 0.1).log().sum())) <= 4 * float(shifted.stderr)


def test_an_exhausted_space_has_no_error_of_its_rule() -> None:
    """Three eigenvalues: the fourth step finds nothing, and what it changed of the third's rule is not an error."""
    values = torch.cat(
        [torch.full((90,), 1.0, dtype=D), torch.full((50,), 5.0, dtype=D), torch.full((10,), 30.0, dtype=D)]
    )
    V = draw(N, 6)
    logs = (V.square() * values.log()[:, None]).sum(0)
    for steps in (3, 4):
        found = hodiff.logdet(hodiff.MatrixOperator(values), vectors=V, steps=steps)
        agree(found.value, logs.mean(), 1e-9)
        agree(found.stderr, logs.std() / 6**0.5, 1e-9)


def test_the_error_of_a_rule_is_judged_by_how_fast_rules_converge() -> None:
    """Signs see a diagonal matrix without spread: what is left is the error of the rule."""
    A, truth = hodiff.MatrixOperator(torch.linspace(1, 2, 400, dtype=D)), torch.linspace(1, 2, 400, dtype=D).log().sum()
    with pytest.warns(hodiff.ConvergenceWarning, match="rules of 8 steps is about 2"):
        found = hodiff.logdet(A, samples=3, steps=8)
    assert abs(found.value - truth) < found.stderr < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an error in the last digits is none that steps would mend
        found = hodiff.logdet(A, samples=3, steps=12)
    agree(found.value, truth, 1e-12)


def test_exact_stopping_and_single_vectors() -> None:
    A, values = with_spectrum(POSITIVE["flat"]), POSITIVE["flat"]
    found = hodiff.logdet(A, shift=0.5)
    agree(found.value, (values + 0.5).log().sum(), 1e-10)
    assert found.stderr == 0 and found.products == N
    found = hodiff.logdet(A, vectors=draw(N, 40).sign(), steps=20, rtol=0.05)
    assert found.converged and found.products < 40 * 20
    one = hodiff.logdet(A, vectors=draw(N).sign(), steps=20)
    assert one.stderr is None and one.converged is None
    with pytest.warns(hodiff.ConvergenceWarning, match="more than rtol=1e-06"):
        assert not hodiff.logdet(A, vectors=draw(N, 4).sign(), steps=20, rtol=1e-6).converged


@pytest.mark.parametrize("steps", [3, 40])
def test_no_log_determinant_of_what_is_not_positive(steps: int) -> None:
    for values in (SPECTRA["spread"], SPECTRA["singular"]):
        with pytest.raises(hodiff.InputError, match=r"eigenvalue of about .* with shift=0 is not positive"):
            hodiff.logdet(with_spectrum(values), vectors=draw(N, 4), steps=steps if values[0] < 0 else 60)
    with pytest.raises(hodiff.InputError, match="larger shift="):
        hodiff.logdet(with_spectrum(SPECTRA["singular"]))
    assert float(
        hodiff.logdet(hodiff.MatrixOperator(2 * torch.eye(3, dtype=D)), samples=1, steps=1).value
    ) == pytest.approx(3 * math.log(2))
    found = hodiff.logdet(with_spectrum(SPECTRA["spread"]), shift=6, vectors=draw(N, 4).sign())
    assert abs(float(found.value) - float((SPECTRA["spread"] + 6).log().sum())) <= 5 * float(found.stderr)


BAD = {
    "spectral_density: this MatrixOperator is not known to be symmetric": lambda A: hodiff.spectral_density(
        hodiff.MatrixOperator(draw(3, 3))
    ),
    "steps: got 0": lambda A: hodiff.spectral_density(A, steps=0),
    "width: got 0": lambda A: hodiff.spectral_density(A, width=0),
    "vectors: one of them is zero": lambda A: hodiff.logdet(A, shift=9, vectors=torch.zeros(len(A.dense()), dtype=D)),
    "points: got 1": lambda A: hodiff.spectral_density(A, points=1),
    "shift: got 'x'": lambda A: hodiff.logdet(A, shift="x"),
    "rtol: the error of one random vector": lambda A: hodiff.logdet(A, samples=1, rtol=0.1),
    r"logdet: .* use half the log-determinant of A\.T @ A": lambda A: hodiff.logdet(hodiff.MatrixOperator(draw(3, 3))),
}


@pytest.mark.parametrize("pattern", BAD)
def test_bad_calls(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        BAD[pattern](with_spectrum(SPECTRA["spread"]))


def test_entries_that_are_no_numbers_are_named() -> None:
    A = torch.ones(300)
    A[5] = math.nan
    with pytest.raises(hodiff.GraphError, match="spectral_density: a product is not finite"):
        hodiff.spectral_density(hodiff.MatrixOperator(torch.eye(5, dtype=D) * math.nan), samples=5, steps=5)
    with pytest.raises(hodiff.GraphError, match="spectral_density: a product is not finite"):
        hodiff.spectral_density(hodiff.MatrixOperator(A), samples=2, steps=3)


def test_no_log_determinant_of_what_is_positive_by_rounding() -> None:
    with pytest.raises(hodiff.InputError, match=r"about 1e-18, which with shift=0 is not positive \(up to rounding\)"):
        hodiff.logdet(hodiff.MatrixOperator(torch.tensor([1.0, 1e-18], dtype=D)))


def test_a_process_that_ends_early_says_nothing_of_zero() -> None:
    """Two values far from zero: rules of two nodes in rooms for more, whose grid reaches no further than they do."""
    values = torch.cat([torch.full((N // 2,), 100.0, dtype=D), torch.full((N - N // 2,), 101.0, dtype=D)])
    found = hodiff.spectral_density(with_spectrum(values), samples=4, steps=20, generator=seeded(0))
    assert 90 < float(found.grid.min()) < 100 and 101 < float(found.grid.max()) < 111
    assert float(found.width) < 1
