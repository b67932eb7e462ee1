"""Every field operator against closed forms, by both routes; gradients; bad input."""

import contextlib
import math
import warnings
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import hodiff
from tests.support.modules import Cube
from tests.support.properties import agree, right_or_refused

D = torch.float64
ROUTES = pytest.mark.parametrize("method", ["jets", "reverse"])


@pytest.fixture
def x():
    return torch.randn(6, 3, dtype=D)


def gaussian(x):
    return torch.exp(-x.square().sum(-1) / 2)


def quartic(x):
    return x.square().sum(-1) ** 2


def smooth(x):
    return torch.sin(x[..., 0] * x[..., 1]) * torch.exp(x[..., 2] * 0.5) + x[..., 0] ** 3


def hessian(f, x):
    return torch.stack([torch.autograd.functional.hessian(f, point) for point in x])


@ROUTES
def test_closed_forms(x, method):
    r2 = x.square().sum(-1)
    agree(hodiff.laplacian(gaussian, x, method=method), (r2 - 3) * gaussian(x))
    agree(hodiff.laplacian(quartic, x, method=method), 20 * r2)
    harmonic = lambda x: torch.exp(x[:, 0]) * torch.sin(x[:, 1]) + x[:, 2]
    assert float(hodiff.laplacian(harmonic, x, method=method).abs().max()) < 1e-14
    agree(hodiff.biharmonic(quartic, x, method=method), torch.full((6,), 120.0, dtype=D))
    agree(hodiff.biharmonic(gaussian, x, method=method), (r2**2 - 10 * r2 + 15) * gaussian(x))


@ROUTES
def test_shapes_follow_the_function(x, method):
    for f in (smooth, lambda x: smooth(x)[:, None], lambda x: torch.stack([smooth(x), gaussian(x)], 1)[..., None]):
        value, gradient, second = hodiff.value_grad_and_laplacian(f, x, method=method)
        assert value.shape == second.shape == f(x).shape
        several = f(x).numel() > 6
        assert gradient.shape == ((6, 2, 1, 3) if several else (6, 3))
    point = x[0]
    assert hodiff.laplacian(smooth, point, batch_ndim=0, method=method).shape == ()
    grid = x.reshape(2, 3, 3)
    agree(hodiff.laplacian(smooth, grid, batch_ndim=2, method=method), hodiff.laplacian(smooth, x).reshape(2, 3))
    image = torch.randn(4, 2, 2, dtype=D)
    agree(hodiff.laplacian(lambda x: x.pow(3).sum((1, 2)), image, method=method), 6 * image.sum((1, 2)))
    assert hodiff.laplacian(lambda x: smooth(x), torch.empty(0, 3, dtype=D)).shape == (0,)


EVERY = {
    "laplacian": lambda x, **kw: hodiff.laplacian(smooth, x, **kw),
    "value_grad_and_laplacian": lambda x, **kw: hodiff.value_grad_and_laplacian(smooth, x, **kw),
    "second_order_operator": lambda x, **kw: hodiff.second_order_operator(smooth, x, x[0], x[1], **kw),
    "divergence": lambda x, **kw: hodiff.divergence(torch.sin, x, **kw),
    "curl": lambda x, **kw: hodiff.curl(lambda x: x.roll(1, -1) ** 2, x, **kw),
    "biharmonic": lambda x, **kw: hodiff.biharmonic(smooth, x, **kw),
    "partial, mixed": lambda x, **kw: hodiff.partial(smooth, x, (0, 1), **kw),
    "partial, of fourth order": lambda x, **kw: hodiff.partial(smooth, x, (0, 0, 1, 2), **kw),
    "partials": lambda x, **kw: tuple(hodiff.partials(smooth, x, [0, (1, 1), (0, 1, 2)], **kw)),
}


@ROUTES
@pytest.mark.parametrize("name", EVERY)
def test_the_numbers_do_not_depend_on_who_records(name, method, x):
    expected = EVERY[name](x, method="reverse", create_graph=True)
    agree(EVERY[name](x, method=method, create_graph=True), expected)
    agree(EVERY[name](x, method=method, create_graph=False), expected)
    agree(EVERY[name](x, create_graph=False), expected)
    with torch.no_grad():
        agree(EVERY[name](x, method=method), expected)
        agree(EVERY[name](x, method=method, create_graph=True), expected)


@ROUTES
def test_a_result_that_is_not_recorded_is_new_memory(x, method):
    kept = x.clone()
    value, _, _ = hodiff.value_grad_and_laplacian(lambda x: x, x, method=method, create_graph=False)
    value.zero_()
    agree(x, kept)


@ROUTES
def test_no_samples(method):
    none = torch.empty(0, 3, dtype=D)
    several = lambda x: torch.stack([smooth(x), gaussian(x)], 1)
    assert hodiff.laplacian(smooth, none, method=method).shape == (0,)
    assert hodiff.laplacian(several, none, method=method).shape == (0, 2)
    assert hodiff.laplacian(smooth, none, method=method, create_graph=False).shape == (0,)
    assert [part.shape for part in hodiff.value_grad_and_laplacian(several, none, method=method)[1:]] == [
        (0, 2, 3),
        (0, 2),
    ]
    assert hodiff.partial(several, none, (0, 0, 1), method=method).shape == (0, 2)
    assert hodiff.divergence(lambda x: x**3, none, method=method).shape == (0,)


@ROUTES
def test_value_gradient_laplacian(x, method):
    value, gradient, second = hodiff.value_grad_and_laplacian(smooth, x, method=method)
    agree(value, smooth(x))
    agree(gradient, torch.stack([torch.autograd.functional.jacobian(smooth, point) for point in x]))
    agree(second, hessian(smooth, x).diagonal(dim1=1, dim2=2).sum(1))
    w = torch.tensor([0.0, 1.0, -2.0], dtype=D)
    _, gradient, second = hodiff.value_grad_and_laplacian(smooth, x, weight=w, method=method)
    agree(gradient, torch.stack([torch.autograd.functional.jacobian(smooth, point) for point in x]))
    agree(second, (hessian(smooth, x).diagonal(dim1=1, dim2=2) * w).sum(1))


def weights(kind):
    generator = torch.Generator().manual_seed(1)
    square = lambda a: a @ a.mT
    draw = lambda *shape: torch.randn(*shape, dtype=D, generator=generator)
    return {
        "diagonal": draw(3),
        "positive diagonal": draw(3).abs(),
        "zero diagonal": torch.zeros(3, dtype=D),
        "matrix": draw(3, 3),
        "rank one": draw(3, 1) @ torch.ones(1, 3, dtype=D),
        "positive matrix": square(draw(3, 3)),
        "zero matrix": torch.zeros(3, 3, dtype=D),
        "factor": draw(3, 2),
        "wide factor": draw(3, 5),
        "matrix per sample": draw(6, 3, 3),
        "positive matrix per sample": square(draw(6, 3, 3)),
        "factor per sample": draw(6, 3, 2),
    }[kind]


KINDS = (
    "diagonal",
    "positive diagonal",
    "zero diagonal",
    "matrix",
    "rank one",
    "positive matrix",
    "zero matrix",
    "factor",
    "wide factor",
    "matrix per sample",
    "positive matrix per sample",
    "factor per sample",
)


def as_matrix(weight):
    if weight.ndim == 1:
        return weight.diag()
    return weight @ weight.mT if weight.shape[-1] != weight.shape[-2] else weight


@ROUTES
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_matrices(x, kind, differentiated, method):
    weight = weights(kind).requires_grad_(differentiated)
    H = hessian(smooth, x)
    expected = (as_matrix(weight) * H).sum((-1, -2))
    got = hodiff.second_order_operator(smooth, x, weight, method=method)
    agree(got.detach(), expected.detach(), floor=1e-10)
    if differentiated:
        cotangent = torch.arange(1, 7, dtype=D)
        one, two = (torch.autograd.grad(value, weight, cotangent)[0] for value in (got, expected))
        agree(one, two, floor=1e-10)


@ROUTES
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "diagonal" in kind])
def test_factors_of_the_coordinates(x, kind, differentiated, method):
    weight = weights(kind).requires_grad_(differentiated)
    got = hodiff.laplacian(smooth, x, weight=weight, method=method)
    agree(got.detach(), (hessian(smooth, x).diagonal(dim1=1, dim2=2) * weight.detach()).sum(1), floor=1e-10)
    if differentiated:
        found = torch.autograd.grad(got, weight, torch.ones(6, dtype=D))[0]
        agree(found, hessian(smooth, x).diagonal(dim1=1, dim2=2).sum(0), floor=1e-10)


@ROUTES
@pytest.mark.parametrize("kind", ["diagonal", "matrix", "factor", "matrix per sample"])
def test_second_order_operator(x, kind, method):
    C, b, c = weights(kind), torch.randn(3, dtype=D), torch.randn(6, dtype=D)
    gradient = torch.stack([torch.autograd.functional.jacobian(smooth, point) for point in x])
    second = (as_matrix(C) * hessian(smooth, x)).sum((-1, -2))
    agree(hodiff.second_order_operator(smooth, x, C, b, c, method=method), second + gradient @ b + c * smooth(x))
    drift = torch.randn(6, 3, dtype=D)
    got = hodiff.second_order_operator(smooth, x, C, drift, 2.0, method=method)
    agree(got, second + (gradient * drift).sum(1) + 2 * smooth(x))
    agree(hodiff.second_order_operator(smooth, x, C, method=method), second)


@ROUTES
def test_coefficients_that_depend_on_the_point(x, method):
    """The gradient by x of C(x) : Hess f + b(x) · grad f, against plain nested autograd."""

    def ours(x):
        C = torch.diag_embed(x.square()) + x[:, :, None] * x[:, None]
        return hodiff.second_order_operator(smooth, x, C, x.sin(), method=method, create_graph=True).sum()

    def plain(x):
        C = torch.diag_embed(x.square()) + x[:, :, None] * x[:, None]
        (g,) = torch.autograd.grad(smooth(x).sum(), x, create_graph=True)
        H = torch.stack([torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0] for i in range(3)], 1)
        return ((C * H).sum((1, 2)) + (x.sin() * g).sum(1)).sum()

    x = x.requires_grad_()
    agree(torch.autograd.grad(ours(x), x)[0], torch.autograd.grad(plain(x), x)[0])


@ROUTES
def test_divergence_and_curl(x, method):
    A = torch.randn(3, 3, dtype=D)
    field = lambda x: torch.sin(x @ A.T)
    J = torch.cos(x @ A.T)[:, :, None] * A
    agree(hodiff.divergence(field, x, method=method), J.diagonal(dim1=1, dim2=2).sum(1))
    expected = torch.stack([J[:, 2, 1] - J[:, 1, 2], J[:, 0, 2] - J[:, 2, 0], J[:, 1, 0] - J[:, 0, 1]], 1)
    agree(hodiff.curl(field, x, method=method), expected)
    flat = lambda x: torch.stack([-(x[:, 1] ** 2), x[:, 0] ** 3], 1)
    agree(hodiff.curl(flat, x[:, :2], method=method), 3 * x[:, 0] ** 2 + 2 * x[:, 1])
    gradient = lambda x: torch.stack([torch.cos(x[:, 0]) * x[:, 1], torch.sin(x[:, 0]), 2 * x[:, 2]], 1)
    assert float(hodiff.curl(gradient, x, method=method).abs().max()) < 1e-14


INDICES = [(), (0,), (0, 0), (0, 1), (2, 0, 0), (0, 1, 2), (1, 1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0, 0), (2, 2, 2)]


@ROUTES
def test_partials_against_sympy(x, method):
    symbols = sympy.symbols("a b c")
    a, b, c = symbols
    expression = sympy.sin(a * b) * sympy.exp(c / 2) + a**3 + sympy.tanh(a + 2 * b - c)
    f = lambda x: smooth(x) + torch.tanh(x[:, 0] + 2 * x[:, 1] - x[:, 2])
    together = hodiff.partials(f, x, INDICES, method=method)
    for index in INDICES:
        exact = sympy.lambdify(
            symbols, sympy.diff(expression, *(symbols[i] for i in index)) if index else expression, "math"
        )
        expected = torch.tensor([exact(*point) for point in x.tolist()], dtype=D)
        agree(together[tuple(sorted(index))].detach(), expected, 1e-10)
        if index:
            agree(hodiff.partial(f, x, index, method=method).detach(), expected, 1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_random_expressions_against_sympy(seed):
    import random

    pick = random.Random(seed)
    a, b = symbols = sympy.symbols("a b")
    unary = [sympy.sin, sympy.cos, sympy.exp, sympy.tanh, lambda e: sympy.sqrt(2 + e**2), lambda e: 1 / (2 + e**2)]

    def grow(depth):
        if not depth:
            return pick.choice([a, b, a + b, a * b / 2, sympy.Rational(1, 3)])
        kind = pick.randrange(3)
        if kind == 0:
            return pick.choice(unary)(grow(depth - 1) / 2)
        left, right = grow(depth - 1), grow(depth - 1)
        return left * right if kind == 1 else left + right

    expression = grow(3) + a * b
    f = lambda x: sympy.lambdify(symbols, expression, _torch_functions())(x[:, 0], x[:, 1]) + 0 * x[:, 0]
    x = torch.rand(4, 2, dtype=D)
    exact = sympy.lambdify(symbols, sympy.diff(expression, a, 2) + sympy.diff(expression, b, 2), "math")
    expected = torch.tensor([exact(*point) for point in x.tolist()], dtype=D)
    agree(hodiff.laplacian(f, x), expected, 1e-11)
    fourth = sympy.lambdify(symbols, sympy.diff(expression, a, 2, b, 2), "math")
    expected = torch.tensor([fourth(*point) for point in x.tolist()], dtype=D)
    agree(hodiff.partial(f, x, (0, 0, 1, 1)), expected, 1e-10)


def _torch_functions():
    names = ("sin", "cos", "exp", "tanh", "sqrt")
    return {name: lambda v, name=name: getattr(torch if hasattr(v, "shape") else math, name)(v) for name in names}


def test_jet_of_a_path():
    t = torch.tensor(0.3, dtype=D)
    one, zero = torch.tensor(1.0, dtype=D), torch.tensor(0.0, dtype=D)
    value, found = hodiff.jet(torch.exp, t, [one, zero, zero])
    agree([value, *found], [t.exp()] * 4)
    _, scaled = hodiff.jet(torch.exp, t, [one, zero, zero], scaled=True)
    agree(scaled, [t.exp(), t.exp() / 2, t.exp() / 6])
    path = [torch.tensor(2.0, dtype=D), torch.tensor(3.0, dtype=D)]  # x = 0.3 + 2 t + 3/2 t²
    _, (first, second) = hodiff.jet(lambda x: x**2, t, path)
    agree([first, second], [2 * t * 2, 2 * 4 + 2 * t * 3])
    (value, other), (row,) = hodiff.jet(lambda a, b: (a * b, a + b), (t, one), ([one], [one]))
    agree([value, other, *row], [t, t + 1, t + 1, torch.tensor(2.0, dtype=D)])


def layer_norm_net():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(16, 1)).to(D)


@ROUTES
def test_training_through_layer_norm(x, method):
    """The gradient of a Laplacian loss, where PyTorch's own double-backward loop is 10 % off and more."""
    net = layer_norm_net()
    parameters = [p for p in net.parameters() if p.ndim == 2]

    def loss(laplacian):
        return laplacian.square().mean()

    ours = torch.autograd.grad(loss(hodiff.laplacian(net, x, method=method)), parameters)
    from hodiff._core._substitutes import ExactNorms

    with ExactNorms():
        exact = torch.autograd.grad(loss(by_loop(net, x)), parameters)
    stock = torch.autograd.grad(loss(by_loop(net, x)), parameters)
    size = torch.cat([g.flatten() for g in exact]).norm()
    error = lambda found: float(torch.cat([(a - b).flatten() for a, b in zip(found, exact, strict=True)]).norm() / size)
    assert error(ours) < 1e-12
    assert error(stock) > 0.03


def by_loop(f, x):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    return sum(torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1]))


@ROUTES
def test_parameter_gradient_against_differences(x, method):
    from tests.support.differences import first_difference

    net = layer_norm_net()
    direction = torch.randn_like(net[3].weight)
    start = net[3].weight.detach().clone()

    def loss(step):
        with torch.no_grad():
            net[3].weight.copy_(start + step * direction)
        return hodiff.laplacian(net, x, method=method).square().mean()

    expected = first_difference(lambda h: loss(h).detach(), 1e-3)
    (gradient,) = torch.autograd.grad(loss(0.0), net[3].weight)
    agree((gradient * direction).sum(), expected, 1e-7)


@ROUTES
def test_create_graph(x, method):
    net = layer_norm_net()
    call = lambda **kwargs: hodiff.laplacian(net, x, method=method, **kwargs)
    assert call().requires_grad
    assert not call(create_graph=False).requires_grad
    with torch.no_grad():
        assert not call().requires_grad
        assert call(create_graph=True).requires_grad
    assert not hodiff.laplacian(smooth, x, method=method).requires_grad  # nothing to differentiate by
    leaf = x.clone().requires_grad_()
    for f in (smooth, quartic):
        (got,) = torch.autograd.grad(hodiff.laplacian(f, leaf, method=method).sum(), leaf)
        assert got.shape == x.shape and leaf.grad is None


def test_gradient_of_a_laplacian(x):
    got = hodiff.grad(lambda x: hodiff.laplacian(quartic, x).sum(), x)
    agree(got, 40 * x)


def test_tensor_form(x):
    x = x.requires_grad_()
    u = smooth(x)
    agree(hodiff.laplacian(u, x).detach(), hodiff.laplacian(smooth, x.detach()))
    agree(hodiff.divergence(field := x**3, x).detach(), 3 * x.detach().square().sum(1))
    assert field.requires_grad
    u.sum().backward()  # the graph is still there
    with pytest.raises(hodiff.InputError, match="needs the function"):
        hodiff.laplacian(u, x, method="jets")
    with pytest.raises(hodiff.InputError, match="biharmonic needs the function"):
        hodiff.biharmonic(u, x)


@ROUTES
@pytest.mark.parametrize("probes", ["rademacher", "gaussian", "coordinates"])
def test_estimates(probes, method):
    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=D)
    f = lambda x: torch.exp(0.3 * x @ torch.linspace(-1, 1, 8, dtype=D)) + (x**3).sum(-1)
    exact = hodiff.laplacian(f, x)
    count = 6 if probes == "coordinates" else 400
    found = hodiff.laplacian(
        f, x, samples=count, probes=probes, method=method, generator=torch.Generator().manual_seed(1)
    )
    again = hodiff.laplacian(f, x, samples=count, probes=probes, generator=torch.Generator().manual_seed(1))
    agree(found.value, again.value)
    assert found.value.shape == found.stderr.shape == (4,) and found.samples == count
    assert bool(((found.value - exact).abs() < 5 * found.stderr + 1e-12).all())
    assert bool((found.stderr > 0).all())


def test_some_coordinates_stand_for_all():
    """Where all second derivatives are alike, any of them tell the Laplacian; with weights, their mean does."""
    x = torch.randn(2, 6, dtype=D)
    found = hodiff.laplacian(lambda x: x.square().sum(-1), x, samples=2, probes="coordinates")
    agree(found.value, torch.full((2,), 12.0, dtype=D))
    weight = torch.arange(1.0, 7.0, dtype=D)
    few = [
        hodiff.laplacian(lambda x: x.square().sum(-1), x, weight=weight, samples=3, probes="coordinates").value[0]
        for _ in range(400)
    ]
    assert abs(float(torch.stack(few).mean()) - 42) < 1.5


def test_a_million_coordinates_are_not_written_out():
    """A matrix of them would be terabytes; the Laplacian of the network has a closed form."""
    size, weight = 10**6, torch.randn(10**6).abs()
    torch.manual_seed(0)
    layer = torch.nn.Linear(size, 4)
    x = torch.randn(3, size)
    found = hodiff.laplacian(lambda x: layer(x).sin().sum(-1), x, weight=weight, samples=16, probes="coordinates")
    with torch.no_grad():
        exact = -layer(x).sin() @ (weight * layer.weight.square()).sum(1)
    assert bool(((found.value - exact).abs() < 5 * found.stderr).all())
    found.value.sum().backward()
    assert float(layer.weight.grad.abs().max()) > 0


@ROUTES
def test_positive_factors_of_random_directions(method):
    """Signs times the roots of the weights: exact for a diagonal Hessian."""
    x, weight = torch.randn(2, 3, dtype=D), torch.tensor([1.0, 0.0, 2.5], dtype=D)
    found = hodiff.laplacian(lambda x: (x**3).sum(-1), x, weight=weight, samples=3, method=method)
    agree(found.value, (6 * x * weight).sum(-1))


@ROUTES
def test_partials_of_several_outputs_that_are_not_recorded(x, method):
    f = lambda x: torch.stack([smooth(x), quartic(x), smooth(2 * x)], 1)
    found = hodiff.partials(f, x, [(0,), (0, 1), (2, 2)], method=method, create_graph=False)
    for index, got in zip(found.indices, found, strict=True):
        each = [hodiff.partial(lambda x, k=k: f(x)[:, k], x, index, method="reverse") for k in range(3)]
        agree(got, torch.stack(each, 1).detach())


def test_partials_draw_once_whichever_route_is_chosen(x):
    """The components are counted in an evaluation, which the one of the other route repeats."""
    drawing = lambda x: torch.stack([smooth(x) * torch.rand(len(x), dtype=D), quartic(x), smooth(2 * x)], 1)
    torch.manual_seed(0)
    found = hodiff.partials(drawing, x, [(0,), (2, 2)])
    after = torch.get_rng_state()
    torch.manual_seed(0)
    factor = torch.rand(len(x), dtype=D)
    assert torch.equal(after, torch.get_rng_state())
    for index, got in zip(found.indices, found, strict=True):
        agree(got[:, 0].detach(), factor * hodiff.partial(smooth, x, index).detach())


def test_estimates_are_unbiased_and_their_error_is_what_they_say():
    x = torch.randn(1, 5, dtype=D).expand(4000, 5)
    A = torch.randn(5, 5, dtype=D)
    f = lambda x: ((x @ A) * x).sum(-1)
    for kwargs in ({}, {"probes": "gaussian"}, {"weight": torch.tensor([1.0, 0, 2, 0, 1], dtype=D)}):
        found = hodiff.laplacian(f, x, samples=4, **kwargs)
        exact = hodiff.laplacian(f, x[:1], weight=kwargs.get("weight"))
        spread = found.value.std()
        assert abs(float(found.value.mean() - exact)) < 4 * float(spread) / 4000**0.5
        assert 0.85 < float(found.stderr.square().mean().sqrt() / spread) < 1.15
    everything = hodiff.laplacian(f, x[:1], samples=5, probes="coordinates")
    agree(everything.value, hodiff.laplacian(f, x[:1]))
    assert everything.stderr.item() == 0
    assert hodiff.laplacian(f, x[:1], samples=1).stderr is None
    divergence = hodiff.divergence(lambda x: x @ A, x, samples=8)
    assert abs(float(divergence.value.mean() - A.trace())) < 5 * float(divergence.stderr.mean()) / 4000**0.5


BAD = {
    "no point": (lambda x: hodiff.laplacian(smooth), "missing"),
    "integers": (lambda x: hodiff.laplacian(smooth, x.long()), "dtype"),
    "no batch": (lambda x: hodiff.laplacian(smooth, x[0, 0]), "too few dimensions"),
    "no coordinates": (lambda x: hodiff.laplacian(smooth, x[:, :0]), "have no coordinates"),
    "scalar": (lambda x: hodiff.laplacian(lambda x: x.pow(3).sum(), x), "must begin with"),
    "tuple": (lambda x: hodiff.laplacian(lambda x: (x, x), x), "tuple"),
    "method": (lambda x: hodiff.laplacian(smooth, x, method="forward"), "expected .auto., .jets. or .reverse."),
    "probes": (lambda x: hodiff.laplacian(smooth, x, samples=2, probes="normal"), "probes: got 'normal'"),
    "samples": (lambda x: hodiff.laplacian(smooth, x, samples=0), "samples: got 0"),
    "coordinates": (lambda x: hodiff.laplacian(smooth, x, samples=4, probes="coordinates"), "only 3 coordinates"),
    "weight": (lambda x: hodiff.laplacian(smooth, x, weight=torch.ones(2, dtype=D)), r"weight has shape \(2,\)"),
    "weight dtype": (lambda x: hodiff.laplacian(smooth, x, weight=torch.ones(3)), "weight is torch.float32"),
    "weight of three": (
        lambda x: hodiff.value_grad_and_laplacian(smooth, x, weight=torch.eye(3, dtype=D)),
        r"weight has shape \(3, 3\).*one factor per .*second_order_operator",
    ),
    "weight, a matrix": (
        lambda x: hodiff.laplacian(smooth, x, weight=torch.eye(3, dtype=D)),
        r"weight has shape \(3, 3\).*one factor per .*second_order_operator",
    ),
    "weight, a number": (lambda x: hodiff.laplacian(smooth, x, weight=2.0), "weight: got the float 2.0"),
    "negative weight": (
        lambda x: hodiff.laplacian(smooth, x, weight=-torch.ones(3, dtype=D), samples=2),
        "must not be negative",
    ),
    "generator": (
        lambda x: hodiff.laplacian(smooth, x, samples=2, generator=3),
        "generator: got an int, expected torch",
    ),
    "generator of a divergence": (
        lambda x: hodiff.divergence(torch.sin, x, generator=3, samples=2),
        "generator: got an",
    ),
    "probes of a divergence": (lambda x: hodiff.divergence(torch.sin, x, samples=2, probes="no"), "probes: got 'no'"),
    "C": (lambda x: hodiff.second_order_operator(smooth, x, torch.ones(2, dtype=D)), r"C has shape \(2,\)"),
    "C dtype": (lambda x: hodiff.second_order_operator(smooth, x, torch.ones(3)), r"C is torch.float32.*C\.to\(x\)"),
    "not a function": (lambda x: hodiff.laplacian(3.0, x), "got a float"),
    "b": (lambda x: hodiff.second_order_operator(smooth, x, torch.ones(3, dtype=D), torch.ones(2, dtype=D)), "b has"),
    "c": (
        lambda x: hodiff.second_order_operator(smooth, x, torch.ones(3, dtype=D), c=torch.ones(2, 6, dtype=D)),
        "c has shape .* does not broadcast",
    ),
    "vector field": (lambda x: hodiff.divergence(smooth, x), "needs a vector"),
    "curl": (lambda x: hodiff.curl(lambda x: x, torch.ones(2, 4, dtype=D)), "a curl needs"),
    "index": (lambda x: hodiff.partial(smooth, x, (0, 3)), "coordinates 0 to 2"),
    "indices": (lambda x: hodiff.partials(smooth, x, []), "got none"),
    "index of a float": (lambda x: hodiff.partial(smooth, x, 1.0), r"index: got 1\.0, expected a tuple"),
    "index of a bool": (lambda x: hodiff.partial(smooth, x, True), r"index: got True, expected a tuple"),
    "index of text": (lambda x: hodiff.partial(smooth, x, "x"), "index: got 'x', expected a tuple"),
    "no index": (lambda x: hodiff.partial(smooth, x, ()), r"index: got an empty one, .* f\(x\)"),
    "indices of a number": (
        lambda x: hodiff.partials(smooth, x, 1),
        r"indices: got 1, expected .*\[\(0,\), \(0, 1\)\]",
    ),
    "index type": (lambda x: hodiff.partials(smooth, x, ["x"]), "expected a tuple of coordinates"),
    "image": (lambda x: hodiff.partial(lambda x: x, torch.ones(1, 2, 2, dtype=D), 0), "need vectors"),
    "series": (lambda x: hodiff.jet(torch.sin, x, [x[0]]), "series: got"),
    "empty series": (lambda x: hodiff.jet(torch.sin, x, []), "at least one tensor"),
    "count of series": (lambda x: hodiff.jet(torch.mul, (x, x), ([x],)), "got 1 for 2 primals"),
}


def test_jet_does_not_advise_a_method_that_it_lacks(x):
    with pytest.raises(hodiff.GraphError, match=r"no rule for lstm.*hodiff\.jet has no other") as caught:
        hodiff.jet(lambda x: nn.LSTM(3, 2).to(D)(x)[0], x, [x])
    assert "method=" not in str(caught.value)
    with pytest.raises(hodiff.GraphError, match=r"Use torch\.no_grad\(\)"):  # advice of its own stays
        hodiff.jet(lambda x: torch.inference_mode()(torch.sin)(x), x, [x])


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, x):
    call, message = BAD[name]
    with pytest.raises(hodiff.InputError, match=message):
        call(x)


@pytest.mark.parametrize("method", ["auto", "jets", "reverse"])
def test_what_does_not_depend_on_the_point_raises(x, method):
    with pytest.raises(hodiff.GraphError, match=r"does not depend|carries no graph"):
        hodiff.laplacian(lambda _: torch.ones(6, dtype=D), x, method=method)
    with pytest.raises(hodiff.GraphError, match=r"does not depend|carries no graph"):
        hodiff.laplacian(lambda x: x.detach().sum(-1), x, method=method)
    leaf = x.requires_grad_()
    with pytest.raises(hodiff.GraphError, match="other than through its argument"):
        hodiff.laplacian(lambda z: (z * leaf).sum(-1), leaf, method=method)


def test_batch_norm_in_training_raises_by_any_automatic_choice(x):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    with pytest.raises(hodiff.GraphError, match="mixes the samples"):
        hodiff.laplacian(net, x)
    net.eval()
    agree(hodiff.laplacian(net, x).detach(), hodiff.laplacian(net, x, method="reverse").detach())


def test_args_and_kwargs(x):
    f = lambda x, a, *, b: a * (x**b).sum(-1)
    for method in ("jets", "reverse"):
        agree(hodiff.laplacian(f, x, args=(2.0,), kwargs={"b": 3}, method=method), 12 * x.sum(-1))
    agree(hodiff.biharmonic(f, x, args=(2.0,), kwargs={"b": 4}), torch.full((6,), 2 * 24.0 * 3, dtype=D))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_high_derivatives_use_one_expansion(n):
    x = torch.linspace(-1, 1, 5, dtype=D)
    for k, found in enumerate(hodiff.derivatives(lambda x: torch.exp(-2 * x), x, n)):
        agree(found, (-2.0) ** k * torch.exp(-2 * x))
    w = torch.tensor(1.5, dtype=D, requires_grad=True)
    found = hodiff.nth_derivative(lambda x: torch.sin(w * x), x, n, create_graph=True)
    (got,) = torch.autograd.grad(found.sum(), w)
    phase = torch.sin(w.detach() * x + n * torch.pi / 2)
    next_phase = torch.cos(w.detach() * x + n * torch.pi / 2)
    agree(got, (n * 1.5 ** (n - 1) * phase + 1.5**n * x * next_phase).sum())
    with pytest.raises(hodiff.InputError, match="not elementwise"):
        hodiff.nth_derivative(lambda x: x * x.flip(0), x, n)


@pytest.mark.parametrize("method", ["jets", "reverse"])
def test_fields_of_linear_functions_are_differentiable_zeros(method: str) -> None:
    x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    f = lambda z: z @ weight
    assert torch.equal(hodiff.biharmonic(f, x, method=method), torch.zeros(3, dtype=torch.float64))
    for found in (hodiff.laplacian(f, x, method=method), hodiff.partial(f, x, (0, 0), method=method)):
        (g,) = torch.autograd.grad(found.sum(), x)
        assert torch.equal(g, torch.zeros_like(x))


class Straight(torch.autograd.Function):
    """Its derivative is its backward's, not its forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize("method", ["auto", "reverse"])
def test_fields_through_a_function_of_the_users(method: str) -> None:
    x = torch.tensor([[0.7, -1.3]], dtype=D)
    fresh = type("Fresh", (Cube,), {})  # of each class it is told once
    told = pytest.warns(hodiff.HodiffWarning, match=r"Function|Fresh")  # of the route; the numbers are held, and right
    with told if method == "auto" else contextlib.nullcontext():
        got = hodiff.laplacian(lambda z: (fresh.apply(z) * z).sum(-1), x, method=method)
    torch.testing.assert_close(got, (12 * x**2).sum(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = hodiff.laplacian(lambda z: (Straight.apply(z) * z).sum(-1), x, method=method)
    torch.testing.assert_close(got, torch.full((1,), 4.0, dtype=D))


def test_high_orders_through_a_function_of_the_users() -> None:
    x = torch.tensor([0.7, -1.3], dtype=D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right_or_refused(
            lambda: hodiff.nth_derivative(lambda z: Cube.apply(z) * z, x, 4), torch.full_like(x, 24.0), "Cube"
        )


def test_fields_by_reverse_mode_under_inference_mode():
    with torch.inference_mode():
        x = torch.linspace(0, 1, 12, dtype=D).reshape(4, 3)
        found = hodiff.laplacian(lambda z: z.sin().sum(1), x, method="reverse")
    torch.testing.assert_close(found.clone(), -x.clone().sin().sum(1))


def test_a_matrix_of_second_order_in_half_precision():
    x = torch.linspace(0.1, 1, 12).reshape(4, 3).bfloat16()
    found = hodiff.second_order_operator(lambda z: z.square().sum(1), x, torch.eye(3).bfloat16())
    torch.testing.assert_close(found, torch.full((4,), 6.0).bfloat16())


def power(x: Tensor) -> Tensor:
    return (x.abs() ** 1.5).sum(-1)


ORIGIN = torch.zeros(2, 2, dtype=D)
WITHOUT_A_VALUE = {
    "laplacian": lambda **given: hodiff.laplacian(power, ORIGIN, **given),
    "value_grad_and_laplacian": lambda **given: hodiff.value_grad_and_laplacian(power, ORIGIN, **given),
    "biharmonic": lambda **given: hodiff.biharmonic(power, ORIGIN, **given),
    "second_order_operator": lambda **given: hodiff.second_order_operator(
        power, ORIGIN, torch.eye(2, dtype=D), **given
    ),
    "partial": lambda **given: hodiff.partial(power, ORIGIN, (0, 0), **given),
    "third partial": lambda **given: hodiff.partial(power, ORIGIN, (0, 0, 0), **given),
    "divergence": lambda **given: hodiff.divergence(lambda x: x.abs() ** 0.5, ORIGIN, **given),
    "curl": lambda **given: hodiff.curl(lambda x: x.flip(-1).abs() ** 0.5, ORIGIN, **given),
}


@pytest.mark.parametrize("create_graph", [None, False])
@pytest.mark.parametrize("method", ["auto", "reverse"])
@pytest.mark.parametrize("name", WITHOUT_A_VALUE)
def test_a_derivative_that_does_not_exist_is_said(name: str, method: str, create_graph: bool | None) -> None:
    """By each route, also of a loss; and not where the function itself has no number there, or x is none."""
    with pytest.warns(hodiff.HodiffWarning, match="the result is not finite, although x and f"):
        WITHOUT_A_VALUE[name](method=method, create_graph=create_graph)


def test_a_function_without_a_value_has_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hodiff.laplacian(lambda x: x.log().sum(-1), ORIGIN).isfinite().any()
        assert not hodiff.laplacian(lambda x: (x**3).sum(-1), ORIGIN + math.inf).isfinite().any()
