"""Every rule against two oracles that know nothing of Taylor mode, at orders 1 to 5."""

import pytest
import torch

import hodiff
from hodiff._core import _substitutes
from hodiff.jets import _pushforward, rules
from hodiff.jets._jet import RULES
from hodiff.jets._series import entry
from tests.support.differences import first_difference
from tests.unit.jets.cases import NORMS, OTHERS, UNARY, D
from tests.unit.jets.oracle import error, nested, pushed

rules.read("")  # all of them

EVERY = {**UNARY, **OTHERS}
ORDER = 5
BY_FALLBACK = {
    "prod",
    "cumprod",
    "solve",
    "slogdet",
    "atan2",
    "hypot",
    "logaddexp",
    "i0",
    "cross_entropy",
    "mse",
    "mse with a target",
}


@pytest.fixture
def x():
    return torch.rand(5, 3, dtype=D) * 1.5 + 0.5


@pytest.fixture
def path(x):
    return [torch.randn_like(x), torch.randn_like(x)]


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", EVERY)
def test_against_nested_reverse_mode(name, x, path):
    """Along a curved path, so that coefficients meet in every way."""
    order = 3 if name in BY_FALLBACK else ORDER
    f = EVERY[name]
    for k, (got, expected) in enumerate(zip(pushed(f, x, path, order), nested(f, x, path, order), strict=True)):
        assert error(got, expected) < 2e-12 * 10**k, f"order {k}"


@pytest.mark.table(wide=30)
@pytest.mark.parametrize("name", [name for name in (*EVERY, *NORMS) if name != "power of zero"])  # it detaches
def test_against_differences_of_the_order_below(name, x, path):
    """Each order is the derivative of the one before, down to the value; no backward formula is involved."""
    order = 2 if name in BY_FALLBACK else ORDER
    f, v = {**EVERY, **NORMS}[name], path[0] * 0.3
    coefficients = pushed(f, x, [v], order)
    for k in range(1, order + 1):
        below = lambda h, k=k: pushed(f, x + h * v, [v], k - 1)[k - 1] if k > 1 else f(x + h * v)
        assert error(coefficients[k] * k, first_difference(below, 5e-3)) < 3e-7, f"order {k}"


@pytest.mark.parametrize("name", NORMS)
def test_norms_against_their_definition(name, x, path):
    definition = {
        "layer_norm": lambda x: _substitutes.layer_norm(
            x, (3,), torch.tensor([1.0, 2.0, 0.5], dtype=D), torch.ones(3, dtype=D)
        ),
        "instance_norm": lambda x: _substitutes.instance_norm(x[None].sin()),
        "weight_norm": lambda x: _substitutes.weight_norm(x, x.exp()[:, :1], 0),
        "weight_norm, columns": lambda x: _substitutes.weight_norm(x, x.exp()[:1], 1),
        "weight_norm of a constant": lambda x: x.exp()[:, :1] / 3**0.5 * torch.ones(5, 3, dtype=D),
    }[name]
    for got, expected in zip(pushed(NORMS[name], x, path, ORDER), nested(definition, x, path, ORDER), strict=True):
        assert error(got, expected) < 1e-9


@pytest.mark.table(wide=30)
@pytest.mark.parametrize("name", EVERY)
def test_gradients_by_parameters(name, x, path):
    f, order = EVERY[name], 2 if name in BY_FALLBACK else 3
    w = torch.ones(3, dtype=D, requires_grad=True)
    g = lambda x: f(x * w)

    def gradient(coefficients):
        loss = sum((c * torch.cos(torch.arange(c.numel(), dtype=D)).reshape(c.shape)).sum() for c in coefficients)
        return torch.autograd.grad(loss, w)[0]

    assert error(gradient(pushed(g, x, path, order)), gradient(nested(g, x, path, order))) < 1e-9


@pytest.mark.table(wide=60)
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("name", [*EVERY, *NORMS])
def test_collapsing_is_summing(name, order, x, path):
    """Sums of the top coefficient, in one group, in two, and weighted, are sums of the single ones."""
    f = {**EVERY, **NORMS}[name]
    first, second = torch.randn(4, 5, 3, dtype=D), torch.randn(4, 1, 3, dtype=D)
    seeds = [first, second]
    single, expansion = _pushforward.push(f, [x], [seeds], order, record=False)
    single = entry(_pushforward.coefficients(single, expansion), order, 4)
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=D)
    for groups, expected in {1: single.sum(0, keepdim=True), 2: single.unflatten(0, (2, 2)).sum(1)}.items():
        top = [first, second.sum(0, keepdim=True) if groups == 1 else second.unflatten(0, (2, 2)).sum(1)]
        output, expansion = _pushforward.push(
            f, [x], [top if order == 2 else seeds], order, groups=groups, record=False
        )
        assert error(entry(_pushforward.coefficients(output, expansion), order, groups), expected) < 1e-10
    output, expansion = _pushforward.push(f, [x], [[first]], order, groups=1, weights=weights, record=False)
    plain, unweighted = _pushforward.push(f, [x], [[first]], order, record=False)
    expected = entry(_pushforward.coefficients(plain, unweighted), order, 4)
    expected = (expected * weights.reshape(4, *[1] * (expected.ndim - 1))).sum(0, keepdim=True)
    assert error(entry(_pushforward.coefficients(output, expansion), order, 1), expected) < 1e-10


NESTING = [
    name
    for name in EVERY
    if name not in BY_FALLBACK and name not in ("max_pool", "nan_to_num", "interpolate", "complex views")
]


@pytest.mark.table(wide=30)
@pytest.mark.parametrize("name", NESTING)
def test_jets_nest(name, x):
    """d²/ds² of d²/dt² along other directions is the mixed coefficient."""
    f, v, w = EVERY[name], torch.randn_like(x), torch.randn_like(x)

    def inner(y):
        return pushed(f, y, [w], 2)[2]

    got = pushed(inner, x, [v], 2)[2]
    expected = nested(lambda y: nested(f, y, [w], 2)[2], x, [v], 2)[2]
    assert error(got, expected) < 1e-9


def test_every_rule_is_used():
    """A rule that no case reaches is not proven."""
    used = set()

    class Tally:
        def count(self, name, kind, seconds):
            used.add(name)

    x = torch.rand(5, 3, dtype=D) + 0.5
    for f in {**EVERY, **NORMS}.values():
        _pushforward.push(f, [x], [[torch.ones_like(x).unsqueeze(0)]], 1, record=False, counter=Tally().count)
    proven = {RULES.known[name].apply for name in used if name in RULES.known}
    unproven = {n for n, r in RULES.known.items() if r.kind in ("elementwise", "bilinear") and r.apply not in proven}
    assert not unproven, "add to UNARY or OTHERS, in tests/unit/jets/cases.py, functions that use these"


REFUSED_OF_COMPLEX = {
    "abs": lambda z: z.abs(),
    "angle": lambda z: z.angle(),
    "norm": lambda z: z.norm(),
    "vdot": lambda z: torch.vdot(z[0], z[1]).real,
    "exp": lambda z: z.exp().real,
    "pow": lambda z: (z**2).real,
    "var": lambda z: z.var(),
    "mH": lambda z: z.mH.real,
    "to real": lambda z: z.to(D),
    "where": lambda z: torch.where(z.real > 0, z, 0).real,
}


@pytest.mark.parametrize("name", REFUSED_OF_COMPLEX)
def test_what_no_rule_is_right_of_with_complex_values_is_refused(name, x, path):
    with pytest.raises(hodiff.GraphError, match=r"no rule for .*(real|complex)"):
        pushed(lambda x: REFUSED_OF_COMPLEX[name](torch.fft.fft(x)), x, path, 2)


def test_a_complex_output_is_refused(x):
    with pytest.raises(hodiff.InputError, match="is complex; return a real quantity"):
        hodiff.laplacian(lambda x: torch.fft.fft(x)[:, 0], x)


def test_a_real_value_made_complex_is_no_constant(x):
    """Beside another term that depends on x, a part that is lost is not seen."""
    f = lambda x: x.square().sum(-1) + x.to(torch.complex128).real.square().sum(-1)
    assert torch.equal(hodiff.laplacian(f, x, method="jets"), torch.full((5,), 12.0, dtype=D))
