"""Functions with a removable singularity at 0: right there at every order, by mpmath; a graph of them is refused."""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _messages, _substitutes, _versions

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
    with pytest.raises(hodiff.GraphError, match=r"i1 are wrong near 0.*closer to 0 than 0\.07"):
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
    x = torch.linspace(-3, 3, 31).to(dtype)
    for ours, theirs in (
        (_substitutes.sinc, torch.sinc),
        *((function, getattr(torch.special, name)) for name, function in _substitutes.BESSEL.items()),
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
    for name, function in _substitutes.BESSEL.items():
        torch.testing.assert_close(function(x), getattr(torch.special, name)(x))


def stack(*entries: Tensor) -> Tensor:
    return torch.stack(entries)


D = torch.float64
PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: stack(x, x.cos(), x + 1).prod(),
    "torch.prod": lambda x: torch.prod(stack(x, x.cos(), x + 1)),
    "prod of a dimension": lambda x: stack(x, x.cos(), x + 1)[:, None].prod(0, keepdim=True)[0, 0],
    "cumprod": lambda x: stack(x, x.cos(), x + 1).cumprod(0)[2],
    "names of NumPy's": lambda x: torch.prod(stack(x, x.cos(), x + 1)[:, None], axis=0, keepdims=True)[0, 0],
    "torch.cumprod": lambda x: torch.cumprod(stack(x, x.cos(), x + 1)[:, None], dim=0)[2, 0],
}


@pytest.mark.parametrize("x", [0.0, 1e-30, 1e-12, -1e-8, 1e-4, 0.3])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_an_entry_near_zero(name: str, x: float) -> None:
    f, point = PRODUCTS[name], torch.tensor(x, dtype=D)
    with mpmath.workdps(60):
        exact = [float(mpmath.diff(lambda t: t * mpmath.cos(t) * (t + 1), mpmath.mpf(x), n)) for n in (1, 2, 3, 4)]
    assert float(hodiff.hessian(f, point)) == pytest.approx(exact[1], rel=1e-6)
    assert float(hodiff.grad(lambda z: hodiff.hessian(f, z), point)) == pytest.approx(exact[2], rel=1e-9)
    again = hodiff.grad(lambda z: hodiff.grad(lambda y: hodiff.hessian(f, y), z), point)
    assert float(again) == pytest.approx(exact[3], rel=1e-9)
    series = [torch.ones_like(point)] + 3 * [torch.zeros_like(point)]
    assert [float(c) for c in hodiff.jet(f, point, series)[1]] == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("n", "near", "far"), [(2, 1e-9, 1e-6), (3, 1e-5, 1e-2)])
def test_a_graph_of_a_product_is_refused_near_zero_only(name: str, n: int, near: float, far: float) -> None:
    x, z = (torch.tensor(value, dtype=D, requires_grad=True) for value in (near, far))
    with pytest.raises(hodiff.GraphError, match=f"order {n} through PyTorch's (cum)?prod is wrong .*near 0.*function"):
        hodiff.nth_derivative(PRODUCTS[name](x), x, n)
    found = hodiff.nth_derivative(PRODUCTS[name](z), z, n)
    torch.testing.assert_close(found, hodiff.nth_derivative(PRODUCTS[name], z.detach(), n))


def test_products_are_those_of_the_kernel() -> None:
    x = torch.randn(3, 5, 4, dtype=D)
    for dim in (0, 1, -1):
        torch.testing.assert_close(_substitutes.cumprod(x, dim), x.cumprod(dim))
        for keep in (False, True):
            torch.testing.assert_close(_substitutes.prod(x, dim, keep), x.prod(dim, keep))
    whole = torch.arange(1, 5)
    for given in (x, whole, whole > 2, x[:0], x[0, 0, 0]):
        assert _substitutes.prod(given).dtype == given.prod().dtype
        torch.testing.assert_close(_substitutes.prod(given), given.prod())
        torch.testing.assert_close(_substitutes.prod(given, dtype=torch.float32), given.prod(dtype=torch.float32))
        torch.testing.assert_close(_substitutes.cumprod(given, 0), given.cumprod(0))


NORMS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "vector_norm": lambda v, p: torch.linalg.vector_norm(v, p),
    "of a dimension": lambda v, p: torch.linalg.vector_norm(v[None], ord=p, dim=1, keepdim=True)[0, 0],
    "norm": lambda v, p: v.norm(p=p),
    "torch.norm": lambda v, p: torch.norm(v[None], p, dim=(1,))[0],
}
OTHERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "linalg.norm": lambda v, p: torch.linalg.norm(v, p),
    "dist": lambda v, p: torch.dist(v, torch.zeros_like(v), p),
    "pairwise_distance": lambda v, p: torch.nn.functional.pairwise_distance(v, torch.zeros_like(v), p, eps=0.0),
    "renorm": lambda v, p: 0.5 / torch.renorm(v[None], p, 0, 0.5)[0, 1],
}


@pytest.mark.parametrize("x", [0.0, 1e-9, 1e-3, 0.4])
@pytest.mark.parametrize(("p", "n"), [(4, 4), (4, 2), (6, 6)])
@pytest.mark.parametrize("name", [*NORMS, *OTHERS])
def test_norms_of_even_powers_with_an_entry_of_zero(name: str, p: int, n: int, x: float) -> None:
    norm = (NORMS | OTHERS)[name]
    f: Callable[[Tensor], Tensor] = lambda x: norm(stack(x, torch.ones_like(x)), p)
    point = torch.tensor(x, dtype=D)
    with mpmath.workdps(60):
        exact = float(mpmath.diff(lambda t: (t**p + 1) ** (mpmath.mpf(1) / p), mpmath.mpf(x), n, h=mpmath.mpf(1e-9)))
    if name == "renorm" and x == 0 and n == p:
        with pytest.raises(hodiff.GraphError, match=r"PyTorch's \d-norm is 0 where an entry is 0"):
            hodiff.nth_derivative(f, point, n)
        return
    assert float(hodiff.nth_derivative(f, point, n)) == pytest.approx(exact, rel=1e-6, abs=1e-8)
    if n < 5:
        g: Callable[[Tensor], Any] = f
        for _ in range(n):
            g = lambda z, g=g: hodiff.grad(g, z)
        if name in NORMS or x:
            assert float(g(point)) == pytest.approx(exact, rel=1e-6, abs=1e-8)
        elif n == 4:
            with pytest.raises(hodiff.GraphError, match=r"PyTorch's \d-norm is 0 where .*vector_norm"):
                g(point)


@pytest.mark.parametrize("name", [*NORMS, *OTHERS])
def test_a_graph_of_such_a_norm_is_refused_at_zero_only(name: str) -> None:
    norm = (NORMS | OTHERS)[name]

    def derivative(x: float, n: int) -> Tensor:
        point = torch.tensor(x, dtype=D, requires_grad=True)
        return hodiff.nth_derivative(norm(stack(point, torch.ones_like(point)), 4), point, n)

    with pytest.raises(hodiff.GraphError, match=r"order 4 of PyTorch's 4-norm is 0 where an entry is 0"):
        derivative(0.0, 4)
    assert float(derivative(0.0, 3)) == 0
    with mpmath.workdps(60):
        exact = float(mpmath.diff(lambda t: (t**4 + 1) ** mpmath.mpf("0.25"), mpmath.mpf("0.1"), 4))
    assert float(derivative(0.1, 4)) == pytest.approx(exact)


def test_norms_of_zeros_and_of_great_numbers_are_those_of_the_kernel() -> None:
    written = _substitutes.norm(torch.linalg.vector_norm, "ord")
    for v in (torch.zeros(3, 2), torch.tensor([[1e30, 1e-30], [torch.inf, 2.0]]), torch.randn(3, 2)):
        for options in ({}, {"dim": 0}, {"dim": (0, 1), "keepdim": True}, {"dim": 1, "dtype": D}):
            torch.testing.assert_close(written(v, 4, **options), torch.linalg.vector_norm(v, 4, **options))
    x = torch.zeros(2, requires_grad=True)
    assert torch.autograd.grad(written(x, 4), x)[0].equal(torch.zeros(2))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_jets_of_tails_of_the_normal_distribution(n: int) -> None:
    points = [-5.0, -1.0, 0.0, 0.7, 1.9, 2.1, 5.0, 30.0, 100.0]
    x = torch.tensor(points, dtype=D)
    functions: dict[str, Callable[[Any], Any]] = {
        "erfcx": lambda t: mpmath.erfc(t) * mpmath.exp(t * t),
        "log_ndtr": lambda t: mpmath.log(mpmath.erfc(t / mpmath.sqrt(2)) / 2),
    }
    for name, function in functions.items():
        sign = -1 if name == "log_ndtr" else 1
        with mpmath.workdps(80):
            found = [mpmath.diff(function, mpmath.mpf(v), n, h=mpmath.mpf("1e-7")) for v in points]
        series = [sign * torch.ones_like(x)] + [torch.zeros_like(x)] * (n - 1)
        jets = hodiff.jet(getattr(torch.special, name), sign * x, series)[1][n - 1]
        torch.testing.assert_close(jets, torch.tensor([float(v) for v in found], dtype=D), rtol=1e-8, atol=1e-300)


@pytest.mark.parametrize(
    "f",
    [
        *(torch.sinc, torch.prod, lambda x: x.cumprod(0)[1], torch.linalg.det, lambda x: (x**x).sum()),
        lambda x: torch.dist(x, 0 * x, 4),
    ],
)
def test_a_graph_that_was_freed_says_so(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.full((2, 2), 0.3, dtype=D, requires_grad=True)
    value = f(x * 1).sum()
    value.backward()
    with pytest.raises(hodiff.GraphError, match="already been freed"):
        hodiff.hvp(value, x, torch.ones_like(x), create_graph=True)


def test_a_checkpoint_of_what_is_written_out_is_right() -> None:
    f = lambda p: checkpoint(lambda a, b: a**b, p[0], p[1], use_reentrant=False)
    found = hodiff.hessian(f, torch.tensor([2.0, 0.0], dtype=D))
    expected = torch.tensor([[0.0, 0.5], [0.5, math.log(2) ** 2]], dtype=D)
    torch.testing.assert_close(found, expected)
    found = hodiff.hessian(f, torch.tensor([2.0, 0.5], dtype=D))
    torch.testing.assert_close(found[0, 1], 2**-0.5 * (1 + 0.5 * torch.tensor(2.0, dtype=D).log()))


@pytest.mark.parametrize("x", [0.0, 1e-12, 1e-7])
@pytest.mark.parametrize("name", ["sinc_", "i0_", "cumprod_"])
def test_functions_that_write_into_a_view_are_right_at_second_order(name: str, x: float) -> None:
    """In one more run of f; of a tensor there is a warning, where its gradient's graph shows a division."""
    runs = []

    def f(t: Tensor) -> Tensor:
        runs.append(0)
        y = torch.stack([t, t.cos(), t + 1])
        getattr(y[:], name)(*((0,) if name == "cumprod_" else ()))
        return y.sum()

    one = {"sinc_": mpmath.sincpi, "i0_": lambda t: mpmath.besseli(0, t)}.get(name)
    with mpmath.workdps(60):
        c = mpmath.cos
        whole = lambda t: one(t) + one(c(t)) + one(t + 1) if one else t + t * c(t) + t * c(t) * (t + 1)
        exact = float(mpmath.diff(whole, mpmath.mpf(x), 2))
    assert float(hodiff.hessian(f, torch.tensor(x, dtype=D))) == pytest.approx(exact, rel=1e-7)
    assert len(runs) == 2
    t = torch.tensor(x, dtype=D, requires_grad=True)
    if x == 1e-12 and name != "i0_":
        with pytest.warns(hodiff.HodiffWarning, match=r"written into a view in place.*order 2.*no underscore"):
            hodiff.hessian(f(t), t)


def test_a_scattered_product_in_a_view_is_named() -> None:
    def f(t: Tensor) -> Tensor:
        y = torch.stack([t, t.cos(), t + 1])
        y[:].scatter_reduce_(0, INDEX, y.cos().detach(), "prod")
        return y.sum()

    with pytest.warns(hodiff.HodiffWarning, match=r"written into a view in place.*order 2"):
        hodiff.hessian(f, torch.tensor(1e-12, dtype=D))


@pytest.mark.filterwarnings("error")
def test_what_else_is_written_to_a_view_costs_no_run() -> None:
    runs = []

    def f(x: Tensor) -> Tensor:
        runs.append(0)
        y = torch.zeros(3, dtype=D)
        y[:2] = x
        y[1] *= 2
        y[0] = 1 / (1e-9 + x[0])
        return y.square().sum()

    x = torch.tensor([1e-9, 2.0], dtype=D)
    found = hodiff.hessian(f, x)
    assert len(runs) == 1
    t = x.clone().requires_grad_()
    torch.testing.assert_close(hodiff.hessian(f(t), t), found)


def test_lists_of_norms_and_roots() -> None:
    norm = lambda x: torch._foreach_norm([torch.stack([x, torch.ones_like(x)])], 4)[0]
    g: Callable[[Tensor], Any] = norm
    for _ in range(4):
        g = lambda z, g=g: hodiff.grad(g, z)
    assert float(g(torch.tensor(0.0, dtype=D))) == pytest.approx(6)
    root = lambda x: torch._foreach_sqrt([5 * x * x])[0] ** 2
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        hodiff.grad(lambda z: hodiff.grad(lambda y: hodiff.hessian(root, y), z), torch.tensor(1e-7, dtype=D))


def test_what_is_written_to_out_is_as_it_was() -> None:
    given, out = torch.tensor([1.0, 2.0, 3.0], dtype=D), torch.empty(3, dtype=D)
    for function in (lambda: torch.cumprod(given, 0, out=out), lambda: torch.special.i0(given, out=out)):
        f = lambda x, function=function: x**4 * function().sum()
        found = hodiff.grad(lambda x, f=f: hodiff.hessian(f, x), torch.ones((), dtype=D))
        assert float(found) == pytest.approx(24 * float(out.sum()))


@pytest.mark.parametrize("name", ["sinc_", "i0_", "cumprod_"])
def test_functions_that_write_into_a_view_are_written_out(name: str) -> None:
    """The fourth derivative, of x and of 2 x beside 0."""

    def f(x: Tensor) -> Tensor:
        y = torch.stack([x, 2 * x])
        getattr(y[:], name)(*((0,) if name == "cumprod_" else ()))
        return y.sum()

    exact = {"sinc_": 17 * math.pi**4 / 5, "i0_": 17 * 3 / 8, "cumprod_": 0.0}
    g = f
    for _ in range(3):
        g = lambda z, g=g: hodiff.grad(g, z)
    assert float(hodiff.grad(g, torch.tensor(1e-9, dtype=torch.float64))) == pytest.approx(exact[name], abs=1e-6)


# --- products of what is scattered ------------------------------------------------------------------------------------

GROUPS = torch.tensor([0, 0, 2, 0, 2, 2])
GROUPS_2D = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 0]])
INDEX = torch.tensor([1, 1, 0])


def of_groups(start: Tensor, x: Tensor) -> Tensor:
    """What a scattered product of six is, by multiplying."""
    return torch.stack([start[0] * x[0] * x[1] * x[3], start[1], start[2] * x[2] * x[4] * x[5]])


def written_into(call: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def f(start: Tensor) -> Tensor:
        start = start * 1
        call(start)
        return start

    return f


SCATTERED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "scatter_reduce": (lambda s, x: torch.scatter_reduce(s, 0, GROUPS, x, "prod"), of_groups),
    "a method": (lambda s, x: s.scatter_reduce(0, GROUPS, x, reduce="prod"), of_groups),
    "in place": (
        lambda s, x: written_into(lambda y: y.scatter_reduce_(0, GROUPS, src=x, reduce="prod"))(s),
        of_groups,
    ),
    "without what is there": (
        lambda s, x: s.scatter_reduce(-1, GROUPS, x, "prod", include_self=False),
        lambda s, x: of_groups(torch.ones_like(s), x) * torch.stack([s[1] ** 0, s[1], s[1] ** 0]),
    ),
    "of rows": (
        lambda s, x: s.repeat(3, 2).scatter_reduce(1, GROUPS_2D[:2], x.repeat(2, 1)[:, :3], "prod").square().sum(0),
        lambda s, x: torch.stack(
            [
                (s[0] * x[0] * x[1]) ** 2 + (s[0] * x[1]) ** 2 + s[0] ** 2,
                (s[1] * x[2]) ** 2 + (s[1] * x[0] * x[2]) ** 2 + s[1] ** 2,
                3 * s[2] ** 2,
                *(3 * part**2 for part in s),
            ]
        ),
    ),
    "index_reduce": (
        lambda s, x: s.reshape(3, 1).repeat(1, 2).index_reduce(0, INDEX, x.reshape(3, 2), "prod"),
        lambda s, x: torch.stack(
            [s[0] * x[4:], s[1] * x[:2] * x[2:4], torch.stack([s[2], s[2]])]  # the third is left
        ),
    ),
    "index_reduce in place": (
        lambda s, x: written_into(lambda y: y.index_reduce_(0, INDEX, source=x[:3], reduce="prod"))(s),
        lambda s, x: torch.stack([s[0] * x[2], s[1] * x[0] * x[1], s[2]]),
    ),
}
FACTORS = {
    "regular": [0.7, -1.2, 0.5, 2.0, 1.1, -0.4],
    "a zero": [0.0, -1.2, 0.5, 2.0, 1.1, -0.4],
    "zeros": [0.0, 0.0, 0.5, 0.0, 1.1, 0.0],
    "near zero": [1e-9, -1e-8, 0.5, 1e-9, 1.1, -1e-8],
    "underflow": [1e-200, 1e-200, 0.5, 1e150, 1e-170, -1e-170],
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_products(name: str, factors: str) -> None:
    scattered, multiplied = SCATTERED[name]
    start, x = torch.tensor([1.5, 0.8, -0.6], dtype=D), torch.tensor(FACTORS[factors], dtype=D)
    v = (start.cos(), torch.arange(6, dtype=D).cos())

    def derivatives(f: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        total = lambda point: (f(*point) * torch.arange(1, f(*point).numel() + 1).reshape(f(*point).shape)).sum()
        along = lambda point: sum((part * w).sum() for part, w in zip(hodiff.hvp(total, point, v), v, strict=True))
        return [*hodiff.grad(total, (start, x)), *hodiff.hvp(total, (start, x), v), *hodiff.grad(along, (start, x))]

    torch.testing.assert_close(scattered(start, x), multiplied(start, x))
    for found, expected in zip(derivatives(scattered), derivatives(multiplied), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14 if factors == "regular" else 1e-300)


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", ["scatter_reduce", "index_reduce"])
def test_a_graph_of_a_scattered_product_is_refused_where_it_is_wrong(name: str) -> None:
    def derivative(factors: str, n: int) -> Tensor:
        x = torch.tensor(FACTORS[factors], dtype=D, requires_grad=True)
        value = SCATTERED[name][0](torch.ones(3, dtype=D), x).sum()
        return hodiff.grad(value, x) if n == 1 else hodiff.hvp(value, x, torch.ones_like(x))

    if name == "scatter_reduce":
        with pytest.raises(hodiff.GraphError, match=rf"order 1 through PyTorch's {name} is wrong where an entry is ne"):
            derivative("underflow", 1)
    with pytest.raises(hodiff.GraphError, match=rf"order 2 through PyTorch's {name} is wrong where an entry is near 0"):
        derivative("near zero", 2)
    derivative("near zero", 1)
    derivative("a zero", 2)


UNDERFLOW = torch.tensor([1e-200, 3e-200, 1e-3, 2.0], dtype=D)
FLOWING: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "prod": (torch.prod, [3e-200 * 2e-3, 1e-200 * 2e-3, 0, 0]),
    "of a column": (lambda x: x.reshape(2, 2).T.prod(1)[0], [1e-3, 0, 1e-200, 0]),
    "of a row": (lambda x: x.reshape(2, 2).prod(1)[0], [3e-200, 1e-200, 0, 0]),
    "cumprod": (lambda x: x.cumprod(0)[1], [3e-200, 1e-200, 0, 0]),
}


@pytest.mark.parametrize("name", FLOWING)
def test_first_derivatives_of_products_that_underflow(name: str) -> None:
    f, expected = FLOWING[name][0], torch.tensor(FLOWING[name][1], dtype=D)
    torch.testing.assert_close(hodiff.grad(f, UNDERFLOW), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(hodiff.vjp(f, UNDERFLOW, torch.ones((), dtype=D)), expected, rtol=1e-12, atol=0)
    x = UNDERFLOW.clone().requires_grad_()
    if name == "of a column":
        torch.testing.assert_close(hodiff.grad(f(x), x), expected, rtol=1e-12, atol=0)
    else:
        with pytest.raises(hodiff.GraphError, match=r"prod is wrong where an entry is near 0"):
            hodiff.grad(f(x), x)


# --- norms and roots that are near 0 themselves -----------------------------------------------------------------------

LOST = r"contains a norm, a standard deviation or a square root .* near 0.*few correct digits.*x\.square\(\)\.sum\(\)"
ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector_norm": lambda t: torch.linalg.vector_norm(torch.stack([t, 2 * t])) ** 2,
    "norm": lambda t: torch.stack([t, 2 * t]).norm() ** 2,
    "matrix_norm": lambda t: torch.linalg.matrix_norm(torch.stack([t, 2 * t])[None]) ** 2,
    "dist": lambda t: torch.dist(torch.stack([t, 2 * t]), torch.zeros(2, dtype=D)) ** 2,
    "pairwise_distance": lambda t: F.pairwise_distance(
        torch.stack([t, 2 * t]), torch.zeros(2, dtype=D), eps=0.0
    ).square(),
    "sqrt": lambda t: (5 * t * t).sqrt() ** 2,
    "hypot": lambda t: torch.hypot(t, 2 * t).square(),
    "of another power": lambda t: torch.linalg.vector_norm(torch.stack([t, 2 * t]), 4) ** 2,
    "of an odd power": lambda t: torch.linalg.vector_norm(torch.stack([t, 2 * t]), 3) ** 2,
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_norm_near_zero_is_named_at_higher_orders(name: str) -> None:
    f = ROOTS[name]
    near, far = torch.tensor(1e-7, dtype=D), torch.tensor(1e-3, dtype=D)
    fourth = lambda x: hodiff.grad(lambda z: hodiff.grad(lambda y: hodiff.hessian(f, y), z), x)
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        fourth(near)
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        hodiff.nth_derivative(f, near, 4)
    x = near.clone().requires_grad_()
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        hodiff.nth_derivative(f(x), x, 4)
    assert float(fourth(far)) == pytest.approx(0, abs=1e-3)  # and no warning
    assert float(hodiff.nth_derivative(f, far, 4)) == pytest.approx(0, abs=1e-3)
    assert float(hodiff.hessian(f, near)) == pytest.approx(float(hodiff.hessian(f, far)), rel=1e-6)


@pytest.mark.parametrize("p", [3, 4, 6])
def test_a_norm_of_zeros_is_named_where_pytorch_has_zeros(p: float) -> None:
    f = lambda t: torch.linalg.vector_norm(torch.stack([t, 2 * t]), p) ** 2
    zero = torch.tensor(0.0, dtype=D)
    x = zero.clone().requires_grad_()
    for what in (f, f(x)):
        with pytest.warns(hodiff.HodiffWarning, match=LOST):
            hodiff.hvp(what, x, torch.ones_like(x))
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        hodiff.grad(lambda z: hodiff.hvp(f, z, torch.ones_like(z)), zero)
    with pytest.warns(hodiff.HodiffWarning, match=LOST):
        hodiff.nth_derivative(f, zero, 2)
    assert float(hodiff.grad(f, zero)) == 0


EMPTY: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "a number, along": (lambda x: x.cumprod(0), torch.tensor(1.5, dtype=D)),
    "a number": (lambda x: x.prod(), torch.tensor(1.5, dtype=D)),
    "nothing": (lambda x: x.prod(), torch.zeros(0, dtype=D)),
    "nothing, along": (lambda x: x.cumprod(0), torch.zeros(0, dtype=D)),
    "empty rows": (lambda x: x.prod(1, keepdim=True), torch.zeros(2, 0, dtype=D)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_products_of_one_factor_or_none(name: str) -> None:
    f, x = EMPTY[name]
    value, derivatives = hodiff.jet(f, x, [torch.ones_like(x)] * 2)
    assert value.equal(f(x)) and _substitutes.prod(x).equal(torch.prod(x))
    assert derivatives[0].equal(torch.ones_like(value) if x.numel() else torch.zeros_like(value))


# --- every spelling of what is written out ----------------------------------------------------------------------------

MATRIX = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D)


def three(x: Tensor) -> Tensor:
    return torch.stack([x, x.cos(), x + 1])


Given = Callable[[Tensor], tuple[Any, ...]]
ALL: dict[str, tuple[Given, int]] = {
    **{
        name: (lambda x: (three(x),), 3)
        for name in ("sinc", "prod", "sqrt", "i0e", "i1e", *FUNCTIONS)
        if "," not in name
    },
    "cumprod": (lambda x: (three(x), 0), 3),
    "logcumsumexp": (lambda x: (three(x), 0), 3),
    "scatter_reduce": (lambda x: (three(x), 0, INDEX, three(x).cos(), "prod"), 3),
    "index_reduce": (lambda x: (three(x), 0, INDEX, three(x).cos(), "prod"), 3),
    "pow": (lambda x: (x[None] + 2, x[None]), 3),
    "float_power": (lambda x: (x[None] + 2, x[None]), 3),
    "norm": (lambda x: (three(x), 4), 4),
    "vector_norm": (lambda x: (three(x), 4), 4),
    "renorm": (lambda x: (three(x)[None], 4, 0, 0.5), 4),
    "dist": (lambda x: (three(x), torch.zeros(3, dtype=D), 4), 4),
    "det": (lambda x: (MATRIX + x * torch.eye(2, dtype=D),), 3),
}
"""What each is given, of which an entry is x, and an order to which PyTorch's own is wrong."""
ELSEWHERE = (
    "slogdet logdet solve solve_ex tensorsolve orgqr householder_product weight_norm batch_norm layer_norm group_norm "
)
ELSEWHERE += "instance_norm cond switch while_loop map_impl scan associative_scan flex_attention rpow hardsigmoid"
"""Right near 0, and written out for another reason."""


def plain(name: str) -> str:
    """The name of a function, without what tells its spelling."""
    return re.sub(r"^(__|_)?(foreach_|special_|linalg_)?|_*(\..*)?$", "", name)


def test_each_definition_is_among_them() -> None:
    constants = {plain(name) for name in _messages.CONSTANTS}
    written = {plain(getattr(each, "__name__", "")) for each in (*_substitutes._REPLACED, *_substitutes._TOLD)}
    known = {plain(name.rpartition(".")[2]) for name, _ in _messages.DIVIDING.values()}
    others = [name for name in (written | known | {*_versions.PRODUCTS.values()}) - set(ALL) - constants if name]
    assert not [name for name in others if not any(piece in name for piece in ELSEWHERE.split())], others


def spellings(name: str) -> dict[str, Callable[..., Any]]:
    """Every function, method and operator that PyTorch has for it: in place, of lists, by overloads."""
    found: dict[str, Callable[..., Any]] = {}
    places = {"torch": torch, "special": torch.special, "linalg": torch.linalg, "Tensor": Tensor, "F": F}
    for place, prefix, ending in itertools.product(
        (*places, "aten"), ("", "special_", "linalg_", "_linalg_", "_foreach_"), ("", "_")
    ):
        function = getattr(places.get(place, torch.ops.aten), prefix + name + ending, None)
        if function is not None:
            found[f"{place}.{prefix}{name}{ending}"] = function
            if place == "aten":
                found |= {
                    f"{place}.{prefix}{name}{ending}.{each}": getattr(function, each) for each in function.overloads()
                }
    return found


def written_as(spelling: str, function: Callable[..., Any], given: Given, view: bool) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        first, *rest = given(x)
        whole = first[None] * 1
        first = whole[0] if view else first * 1
        if "_foreach_" in spelling:
            result = function([first], *([each] if isinstance(each, Tensor) else each for each in rest))
            result = result[0]
        else:
            result = function(first, *rest)
        result = whole if view else result
        return (result[0] if isinstance(result, tuple) else result).sum()

    return f


@pytest.mark.filterwarnings("error::hodiff.HodiffWarning")
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("x", [0.0, 1e-9])
@pytest.mark.parametrize("name", ALL)
def test_every_spelling_is_right_or_refused(name: str, x: float) -> None:
    given, order = ALL[name]
    point, (first, *others) = torch.tensor(x, dtype=D), spellings(name).items()

    def derivatives(f: Callable[[Tensor], Tensor]) -> Iterator[float | str]:
        for n in range(2, order + 1):
            g = f
            for _ in range(n - 1):
                g = lambda z, g=g: hodiff.grad(g, z)
            try:
                yield float(hodiff.grad(g, point))
            except (hodiff.GraphError, hodiff.HodiffWarning) as error:
                yield str(error)

    expected = list(derivatives(written_as(*first, given, False)))
    seen = 0
    for spelling, function in others:
        for view in (False, True) if spelling.partition(".")[2].partition(".")[0].endswith("_") else (False,):
            f = written_as(spelling, function, given, view)
            try:
                assert float(f(point)) == pytest.approx(float(written_as(*first, given, False)(point)))
            except (TypeError, RuntimeError, AttributeError):  # an overload for other arguments
                continue
            seen += 1
            for n, (found, right) in enumerate(zip(derivatives(f), expected, strict=True), 2):
                refused = isinstance(found, str) and re.search(r"PyTorch|\*\* b|singular|near 0|not finite", found)
                same = right == found or (isinstance(right, float) and found == pytest.approx(right, 1e-6, 1e-6, True))
                assert refused or same, (spelling, view, n)
    assert seen
