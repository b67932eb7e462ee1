"""Functions with a removable singularity at 0: right there at every order, by mpmath; a graph of them is refused."""

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _near_zero, _versions

POINTS = [0.0, 1e-12, 1e-9, -1e-7, 1e-4, -3e-3, 0.05, -0.0999, 0.1001, 0.7, -0.999, 1.001, 2.5]
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[object], object]]] = {
    "sinc": (torch.sinc, lambda t: mpmath.sincpi(t)),
    "sinc, method": (lambda x: x.sinc(), lambda t: mpmath.sincpi(t)),
    "i0": (torch.special.i0, lambda t: mpmath.besseli(0, t)),
    "i0, method": (lambda x: x.i0(), lambda t: mpmath.besseli(0, t)),
    "i1": (torch.special.i1, lambda t: mpmath.besseli(1, t)),
}
if not _versions.BESSEL_IS_CONSTANT:
    FUNCTIONS |= {
        "bessel_j0": (torch.special.bessel_j0, lambda t: mpmath.besselj(0, t)),
        "bessel_j1": (torch.special.bessel_j1, lambda t: mpmath.besselj(1, t)),
        "modified_bessel_i0": (torch.special.modified_bessel_i0, lambda t: mpmath.besseli(0, t)),
        "modified_bessel_i1": (torch.special.modified_bessel_i1, lambda t: mpmath.besseli(1, t)),
    }


def exact(name: str, n: int) -> Tensor:
    """By the Taylor coefficients of a 60-digit evaluation."""
    with mpmath.workdps(60):
        return torch.tensor([float(mpmath.diff(FUNCTIONS[name][1], mpmath.mpf(x), n)) for x in POINTS]).double()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_order_by_reverse_passes_and_by_jets(name: str, n: int) -> None:
    x, f, expected = torch.tensor(POINTS, dtype=torch.float64), FUNCTIONS[name][0], exact(name, n)
    if n == 2:
        torch.testing.assert_close(hodiff.hessian_diagonal(lambda z: f(z).sum(), x), expected, rtol=1e-7, atol=1e-8)
    if n == 3:
        ones = torch.ones_like(x)
        found = hodiff.grad(lambda z: hodiff.hvp(lambda y: f(y).sum(), z, ones).sum(), x)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(hodiff.nth_derivative(f, x, n), expected, rtol=1e-7, atol=1e-8)
    series = [torch.ones_like(x)] + [torch.zeros_like(x)] * (n - 1)
    torch.testing.assert_close(hodiff.jet(f, x, series)[1][n - 1], expected, rtol=1e-7, atol=1e-8)


def test_i1e_on_either_side_of_its_kink() -> None:
    x = torch.tensor([-1e-4, 1e-5, 0.4, 3.0], dtype=torch.float64)
    with mpmath.workdps(60):
        scaled = lambda t: mpmath.besseli(1, t) * mpmath.exp(-abs(t))
        expected = torch.tensor(
            [float(mpmath.diff(scaled, mpmath.mpf(v), 3, h=mpmath.mpf("1e-12"))) for v in x.tolist()]
        )
    found = hodiff.nth_derivative(torch.special.i1e, x, 3)
    torch.testing.assert_close(
        hodiff.grad(
            lambda z: hodiff.hvp(lambda y: torch.special.i1e(y).sum(), z, torch.ones_like(z)).sum(), x
        ),
        expected.double(), rtol=1e-7, atol=1e-8,
    )  # fmt: skip
    torch.testing.assert_close(found[2:], expected.double()[2:], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", [0, 1])
def test_the_scaled_ones_by_both_routes_and_at_their_kink_the_mean_of_its_sides(kind: int, n: int) -> None:
    f, points = (torch.special.i0e, torch.special.i1e)[kind], [0.0, 1e-9, -1e-6, 1e-3, 0.4, -2.0]
    with mpmath.workdps(60):
        side = lambda t, sign: mpmath.diff(lambda u: mpmath.besseli(kind, u) * mpmath.exp(-sign * u), mpmath.mpf(t), n)
        expected = [side(t, 1 if t > 0 else -1) if t else (side(t, 1) + side(t, -1)) / 2 for t in points]
    x, wanted = torch.tensor(points, dtype=torch.float64), torch.tensor([float(v) for v in expected]).double()
    torch.testing.assert_close(hodiff.nth_derivative(f, x, n), wanted, rtol=1e-6, atol=1e-7)
    series = [torch.ones_like(x)] + [torch.zeros_like(x)] * (n - 1)
    torch.testing.assert_close(hodiff.jet(f, x, series)[1][n - 1], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if name.startswith(("bessel_j0", "i0", "modified_bessel_i0"))]
)
def test_a_biharmonic_at_zero(name: str) -> None:
    f = FUNCTIONS[name][0]
    found = hodiff.biharmonic(lambda z: f(z).sum(-1), torch.zeros(2, 3, dtype=torch.float64), method="reverse")
    torch.testing.assert_close(found, torch.full_like(found, 3 * 0.375))


def test_the_distance_that_is_refused_grows_with_the_rounding() -> None:
    x = torch.tensor([0.02], requires_grad=True)
    with pytest.raises(hodiff.GraphError, match=r"i1 are wrong near 0.*closer than 0\.07"):
        hodiff.hvp(torch.special.i1(x).sum(), x, torch.ones_like(x))


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *[("sinc", 2), ("i0", 3), ("i1", 2), ("i1", 3)],
        *[(name, 2 if name[-1] == "1" else 3) for name in FUNCTIONS if "bessel" in name],
    ],
)
def test_a_graph_that_has_them_already_is_refused_near_zero_only(name: str, order: int) -> None:
    f = FUNCTIONS[name][0]
    near = torch.tensor([1e-4, 1.0], dtype=torch.float64, requires_grad=True)
    far = torch.tensor([0.3, 1.0], dtype=torch.float64, requires_grad=True)
    again = order == 3
    with pytest.raises(hodiff.GraphError, match=f"(?s){name} are wrong near 0.*function"):
        hodiff.hvp(f(near).square().sum(), near, torch.ones_like(near), create_graph=again)
    g = lambda z: f(z).square().sum()
    found = hodiff.hvp(g(far), far, torch.ones_like(far), create_graph=again)
    torch.testing.assert_close(found.detach(), hodiff.hvp(g, far.detach(), torch.ones_like(far)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_kernel(dtype: torch.dtype) -> None:
    from hodiff._core import _near_zero

    x = torch.linspace(-3, 3, 31).to(dtype)
    for ours, theirs in (
        (_near_zero.sinc, torch.sinc),
        *((function, getattr(torch.special, name)) for name, function in _near_zero.BESSEL.items()),
    ):
        if dtype == torch.float32 or theirs is torch.sinc:
            assert ours(x).dtype == dtype
            torch.testing.assert_close(
                ours(x),
                theirs(x),
                rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
                atol=1e-2 if dtype == torch.bfloat16 else 1e-6,
            )


def test_the_series_is_for_small_numbers_of_either_sign() -> None:
    x = torch.linspace(-9, 9, 37, dtype=torch.float64)
    for name, function in _near_zero.BESSEL.items():
        torch.testing.assert_close(function(x), getattr(torch.special, name)(x))
        assert function(x, out=torch.empty_like(x)).equal(getattr(torch.special, name)(x))
