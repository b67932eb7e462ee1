"""`LevenbergMarquardt` on problems with known answers: NIST's curves, functions of Moré, Garbow and Hillstrom."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit, least_squares
from torch import Tensor

import hodiff

D = torch.float64
exp = torch.exp


def fit(f: Callable[[Any], Tensor], start: Any, steps: int, *, search: bool = False) -> hodiff.LevenbergMarquardt:
    """Steps until it says that it converged; *start* is changed in place."""
    optimizer = hodiff.LevenbergMarquardt(f, start, search=search)
    for _ in range(steps):
        optimizer.step()
        if optimizer.last.converged:
            break
    return optimizer


# --- NIST StRD: data sets, models, and how many digits are certified


def lines() -> Iterator[list[str]]:
    """Of each data set: its name, two starts, the certified parameters and standard errors, the data."""
    text = (Path(__file__).parent / "nist.txt").read_text("utf-8")
    return (block.splitlines() for block in text.split("\n\n")[1:])  # the first names the source


def table(rows: list[str]) -> Tensor:
    return torch.tensor([[float(entry) for entry in row.split()] for row in rows], dtype=D)


NIST = {name: (table(starts), table(data)) for name, *starts, data in ((*b[:5], b[5:]) for b in lines())}


def waves(b, x):
    turn = lambda period: 2 * math.pi * x / period
    first = b[0] + b[1] * turn(12).cos() + b[2] * turn(12).sin()
    return first + sum(b[k + 1] * turn(b[k]).cos() + b[k + 2] * turn(b[k]).sin() for k in (3, 6))


def peaks(b, x):
    peak = lambda height, place, width: height * exp(-(((x - place) / width) ** 2))
    return b[0] * exp(-b[1] * x) + peak(*b[2:5]) + peak(*b[5:8])


def cubics(b, x):
    return (b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3) / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def decays(b, x):
    return b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x) + b[4] * exp(-b[5] * x)


def chwirut(b, x):
    return exp(-b[0] * x) / (b[1] + b[2] * x)


MODELS = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": lambda b, x: b[0] * (1 - exp(-b[1] * x)),
    "Chwirut1": chwirut,
    "Chwirut2": chwirut,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": waves,
    "Eckerle4": lambda b, x: b[0] / b[1] * exp(-(((x - b[2]) / b[1]) ** 2) / 2),
    "Gauss1": peaks,
    "Gauss2": peaks,
    "Gauss3": peaks,
    "Hahn1": cubics,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": decays,
    "Lanczos2": decays,
    "Lanczos3": decays,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * exp(-x * b[3]) + b[2] * exp(-x * b[4]),
    "Misra1a": lambda b, x: b[0] * (1 - exp(-b[1] * x)),
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x, z: b[0] - b[1] * x * exp(-b[2] * z),
    "Rat42": lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x: b[0] - b[1] * x - (b[2] / (x - b[3])).atan() / math.pi,
    "Thurber": cubics,
}
CURVES = [(name, start) for name in MODELS for start in (0, 1)]


def digits(name: str, start: int, steps: int = 200, *, search: bool = False) -> tuple[float, hodiff.LevenbergMarquardt]:
    """How many digits of the worst parameter are the certified ones: at most eleven are known."""
    starts, data = NIST[name]
    y = data[:, 0].log() if name == "Nelson" else data[:, 0]
    b = starts[start].clone()
    optimizer = fit(lambda b: MODELS[name](b, *data.T[1:]) - y, b, steps, search=search)
    return -math.log10(float(((b - starts[2]) / starts[2]).abs().max())), optimizer


@pytest.mark.table()
@pytest.mark.parametrize(("name", "start"), CURVES)
def test_curves_to_the_last_digits(name: str, start: int) -> None:
    correct, optimizer = digits(name, start)
    assert correct > 9.5
    assert optimizer.last.converged and "converged" in repr(optimizer.last)


@pytest.mark.table()
@pytest.mark.parametrize(("name", "start"), CURVES)
def test_certified_standard_errors(name: str, start: int) -> None:
    """Of Lanczos1 up to a factor: its residuals are the rounding of its data."""
    starts, data = NIST[name]
    last = digits(name, start)[1].last
    found, covariance = last.standard_errors(), last.covariance()
    if name == "Lanczos1":
        found = found * starts[3, 0] / found[0]
    assert float((found / starts[3] - 1).abs().max()) < 1e-9
    torch.testing.assert_close(covariance.diagonal().sqrt(), last.standard_errors())
    torch.testing.assert_close(covariance, covariance.T)
    leverages = last.leverages()
    assert leverages.shape == data[:, 0].shape and 0 <= float(leverages.min()) <= float(leverages.max()) <= 1 + 1e-12
    assert float(leverages.sum()) == pytest.approx(len(found), rel=1e-12)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_covariance_is_that_of_scipy(absolute: bool) -> None:
    """By finite differences there, so to some digits."""
    x = torch.linspace(0, 4, 30, dtype=D)
    y, sigma = 2.5 * exp(-1.3 * x) + 0.5 + 0.2 * (7 * x).sin(), 0.2 + 0.1 * x
    b = torch.ones(3, dtype=D)
    last = fit(lambda b: (b[0] * exp(-b[1] * x) + b[2] - y) / sigma, b, 100).last
    curve = lambda x, p, q, r: p * np.exp(-q * x) + r
    given = {"sigma": sigma.numpy(), "absolute_sigma": absolute}
    _, expected = curve_fit(curve, x.numpy(), y.numpy(), p0=[1, 1, 1], **given, xtol=1e-14, ftol=1e-14)
    torch.testing.assert_close(last.covariance(absolute_sigma=absolute), torch.tensor(expected), rtol=1e-5, atol=1e-9)


def test_of_a_line_all_is_known() -> None:
    x = torch.linspace(-1, 2, 9, dtype=D)
    y = 3 + 2 * x + x.mul(5).sin()
    last = fit(
        lambda b: b["a"] + b["b"] * x - y, {"a": torch.zeros((), dtype=D), "b": torch.zeros(1, dtype=D)}, 50
    ).last
    apart, N = x - x.mean(), len(x)
    slope = (apart @ y) / (apart @ apart)
    variance = (y - y.mean() - slope * apart).square().sum() / (N - 2)
    var_b = variance / (apart @ apart)
    var_a = variance / N + x.mean() ** 2 * var_b
    expected = torch.stack([torch.stack([var_a, -x.mean() * var_b]), torch.stack([-x.mean() * var_b, var_b])])
    torch.testing.assert_close(last.covariance(), expected)
    torch.testing.assert_close(last.covariance(absolute_sigma=True), expected / variance)
    torch.testing.assert_close(last.leverages(), 1 / N + apart**2 / (apart @ apart))


def test_where_there_is_no_covariance() -> None:
    """Of an earlier step, of too few residuals, without room for J, and of parameters that do the same."""
    A, b = torch.randn(9, 3, dtype=D), torch.zeros(3, dtype=D)
    at_hand = r"covariance: the Jacobian is at hand in the last step's record alone"
    optimizer = hodiff.LevenbergMarquardt(lambda b: A @ b - 1, b)
    optimizer.step()
    first = optimizer.last
    assert first.leverages().shape == (9,)
    copied = copy.deepcopy(optimizer)
    optimizer.step()
    assert optimizer.last.covariance().shape == copied.last.covariance().shape == (3, 3)
    for ask in (first.covariance, first.standard_errors, first.leverages):
        with pytest.raises(hodiff.InputError, match=at_hand):
            ask()
    for rows, options in ((A[:3], {}), (A, {"memory_budget": 200})):
        few = hodiff.LevenbergMarquardt(lambda b, rows=rows: rows @ b - 1, b, **options)
        few.step()
        with pytest.raises(hodiff.InputError, match=at_hand):
            few.last.covariance()
    for same in (torch.zeros(3, 3, dtype=D), torch.ones(3, 3, dtype=D)):
        singular = hodiff.LevenbergMarquardt(lambda b, same=same: A @ same @ b - 1, b)
        singular.step()
        with pytest.raises(hodiff.InputError, match=r"do not determine all parameters.*J'J is singular"):
            singular.last.covariance()


@pytest.mark.parametrize(("name", "start"), [("Lanczos2", 1), ("MGH10", 1)])
def test_rounding_of_the_residuals_does_not_end_a_fit(name: str, start: int) -> None:
    """They are small differences of large numbers: the loss rounds at far more than 1e-12 of itself."""
    correct, optimizer = digits(name, start)
    assert correct > 9.5 and optimizer.last.converged
    assert optimizer.last.damping < 1e-6  # it was not raised until steps vanish


@pytest.mark.parametrize("name", ["Kirby2", "MGH10"])
def test_the_search_does_not_say_that_it_converged_where_its_damping_holds_parameters_back(name: str) -> None:
    """Their columns differ by five decades and more, and by search the damping stays above 1e-13 of the largest."""
    correct, optimizer = digits(name, 1, 500, search=True)
    assert correct > 9.5 and optimizer.last.converged


@pytest.mark.nightly
def test_how_many_curves_are_fitted() -> None:
    """As the page says."""
    found = [digits(*curve)[0] for curve in CURVES]
    assert (sum(d >= 8 for d in found), sum(d >= 9.9 for d in found)) == (54, 54)


# --- Moré, Garbow, Hillstrom (1981). Testing unconstrained optimization software. TOMS 7, 17: what is a closed form


def numbers(last: int) -> Tensor:
    return torch.arange(1, last + 1, dtype=D)


def helix(x):
    theta = torch.atan2(x[1], x[0]) / (2 * math.pi)
    return torch.stack([10 * (x[2] - 10 * theta), 10 * (x[:2].norm() - 1), x[2]])


def freudenstein(x):
    first = -13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1]
    return torch.stack([first, -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1]])


def gulf(x):
    t = numbers(99) / 100
    y = 25 + (-50 * t.log()) ** (2 / 3)
    return exp(-((y - x[1]).abs() ** x[2]) / x[0]) - t


def box(x):
    t = numbers(10) / 10
    return exp(-t * x[0]) - exp(-t * x[1]) - x[2] * (exp(-t) - exp(-10 * t))


def powell(x):
    a, b, c, d = x.reshape(-1, 4).T
    return torch.cat([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2])


def wood(x):
    curved = [10 * (x[1] - x[0] ** 2), 1 - x[0], 90**0.5 * (x[3] - x[2] ** 2), 1 - x[2]]
    return torch.stack([*curved, 10**0.5 * (x[1] + x[3] - 2), (x[1] - x[3]) / 10**0.5])


def brown_dennis(x):
    t = numbers(20) / 5
    return (x[0] + t * x[1] - exp(t)) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def biggs(x):
    t = numbers(13) / 10
    y = exp(-t) - 5 * exp(-10 * t) + 3 * exp(-4 * t)
    return x[2] * exp(-t * x[0]) - x[3] * exp(-t * x[1]) + x[5] * exp(-t * x[4]) - y


def watson(x):
    t, j = (numbers(29) / 29).unsqueeze(1), torch.arange(len(x), dtype=D)
    slope = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1)
    inner = slope - (x * t**j).sum(1) ** 2 - 1
    return torch.cat([inner, x[:1], (x[1] - x[0] ** 2 - 1).reshape(1)])


def rosenbrock(x):
    return torch.cat([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]])


def penalty_1(x):
    return torch.cat([1e-5**0.5 * (x - 1), (x @ x - 0.25).reshape(1)])


def penalty_2(x):
    n, a = len(x), 1e-5**0.5
    y = exp(numbers(n) / 10)[1:] + exp(numbers(n) / 10)[:-1]
    waves = [a * (exp(x[1:] / 10) + exp(x[:-1] / 10) - y), a * (exp(x[1:] / 10) - math.exp(-0.1))]
    return torch.cat([(x[0] - 0.2).reshape(1), *waves, (numbers(n).flip(0) @ x**2 - 1).reshape(1)])


def variably_dimensioned(x):
    s = (numbers(len(x)) @ (x - 1)).reshape(1)
    return torch.cat([x - 1, s, s**2])


def trigonometric(x):
    return len(x) - x.cos().sum() + numbers(len(x)) * (1 - x.cos()) - x.sin()


def brown_almost_linear(x):
    return torch.cat([x[:-1] + x.sum() - (len(x) + 1), (x.prod() - 1).reshape(1)])


def boundary_value(x):
    h = 1 / (len(x) + 1)
    t, zero = h * numbers(len(x)), x.new_zeros(1)
    return 2 * x - torch.cat([zero, x[:-1]]) - torch.cat([x[1:], zero]) + h**2 * (x + t + 1) ** 3 / 2


def integral_equation(x):
    h = 1 / (len(x) + 1)
    t = h * numbers(len(x))
    kernel = torch.minimum(t, t.unsqueeze(1)) * (1 - torch.maximum(t, t.unsqueeze(1)))
    return x + h * kernel @ (x + t + 1) ** 3 / 2


def tridiagonal(x):
    zero = x.new_zeros(1)
    return (3 - 2 * x) * x - torch.cat([zero, x[:-1]]) - 2 * torch.cat([x[1:], zero]) + 1


def banded(x):
    apart = numbers(len(x)) - numbers(len(x)).unsqueeze(1)
    near = ((apart >= -5) & (apart <= 1) & (apart != 0)).to(D)
    return x * (2 + 5 * x**2) + 1 - near @ (x * (1 + x))


def full_rank(x):
    return torch.cat([x, x.new_zeros(len(x))]) - x.sum() / len(x) - 1


def rank_one(x):
    return numbers(2 * len(x)) * (numbers(len(x)) @ x) - 1


def rank_one_with_zeros(x):
    inner = torch.arange(0, 2 * len(x) - 1, dtype=D)
    return torch.cat([inner, torch.zeros(1, dtype=D)]) * (numbers(len(x))[1:-1] @ x[1:-1]) - 1


def chebyquad(x):
    terms = [torch.ones_like(x), 2 * x - 1]
    for _ in range(len(x) - 1):
        terms.append(2 * (2 * x - 1) * terms[-1] - terms[-2])
    means = torch.stack(terms[1:]).mean(1)
    return means + torch.tensor([1 / (k**2 - 1) if k % 2 == 0 else 0.0 for k in range(1, len(x) + 1)], dtype=D)


DOWN_TO_0 = 1 - numbers(10) / 10
INSIDE_0_1 = numbers(10) / 11
MORE_GARBOW_HILLSTROM = {
    "Rosenbrock": (rosenbrock, [-1.2, 1.0]),
    "Freudenstein and Roth": (freudenstein, [0.5, -2.0]),
    "Powell, badly scaled": (
        lambda x: torch.stack([1e4 * x[0] * x[1] - 1, exp(-x[0]) + exp(-x[1]) - 1.0001]),
        [0.0, 1.0],
    ),
    "Brown, badly scaled": (lambda x: torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2]), [1.0, 1.0]),
    "Beale": (
        lambda x: torch.stack([c - x[0] * (1 - x[1] ** k) for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))]),
        [1.0, 1.0],
    ),
    "Jennrich and Sampson": (
        lambda x: 2 + 2 * numbers(10) - exp(numbers(10) * x[0]) - exp(numbers(10) * x[1]),
        [0.3, 0.4],
    ),
    "helical valley": (helix, [-1.0, 0.0, 0.0]),
    "Gulf": (gulf, [5.0, 2.5, 0.15]),
    "Box": (box, [0.0, 10.0, 20.0]),
    "Powell, singular": (powell, [3.0, -1.0, 0.0, 1.0]),
    "Wood": (wood, [-3.0, -1.0, -3.0, -1.0]),
    "Brown and Dennis": (brown_dennis, [25.0, 5.0, -5.0, -1.0]),
    "Biggs": (biggs, [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]),
    "Watson, 6": (watson, [0.0] * 6),
    "Watson, 9": (watson, [0.0] * 9),
    "Rosenbrock, 10": (rosenbrock, [-1.2, 1.0] * 5),
    "Powell, singular, 12": (powell, [3.0, -1.0, 0.0, 1.0] * 3),
    "penalty 1": (penalty_1, numbers(10)),
    "penalty 2": (penalty_2, [0.5] * 10),
    "variably dimensioned": (variably_dimensioned, DOWN_TO_0),
    "trigonometric": (trigonometric, [0.1] * 10),
    "Brown, almost linear": (brown_almost_linear, [0.5] * 10),
    "boundary value": (boundary_value, INSIDE_0_1 * (INSIDE_0_1 - 1)),
    "integral equation": (integral_equation, INSIDE_0_1 * (INSIDE_0_1 - 1)),
    "Broyden, tridiagonal": (tridiagonal, [-1.0] * 10),
    "Broyden, banded": (banded, [-1.0] * 10),
    "linear, full rank": (full_rank, [1.0] * 10),
    "linear, rank one": (rank_one, [1.0] * 10),
    "linear, rank one, zeros": (rank_one_with_zeros, [1.0] * 10),
    "Chebyquad, 8": (chebyquad, numbers(8) / 9),
}


@pytest.mark.table()
@pytest.mark.parametrize("name", MORE_GARBOW_HILLSTROM)
def test_no_higher_than_scipy(name: str) -> None:
    f, start = MORE_GARBOW_HILLSTROM[name]
    x = torch.as_tensor(start, dtype=D).clone()
    cost = lambda x: float(f(torch.as_tensor(x, dtype=D)).square().sum()) / 2
    options = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    theirs = least_squares(
        lambda x: f(torch.tensor(x)).numpy(),
        x.clone().numpy(),
        jac=lambda x: hodiff.jacobian(f, torch.tensor(x)).numpy(),
        method="lm",
        **options,
    )
    fit(f, x, 500)
    assert cost(x) <= theirs.cost * (1 + 1e-8) + 1e-24
