"""Formulas of first order: what varies or not, layouts, precision, statistics; against PyTorch's double backward."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff.jets import _pushforward, rules
from hodiff.jets._jet import RULES
from hodiff.memory import _attention, _cross_entropy
from tests.support.differences import first_difference
from tests.unit.jets.oracle import lean, twice

rules.read("")  # all of them

D = torch.float64
WORDS = torch.tensor([[0, 2, 1], [3, 3, 0]])
CLASSES = torch.tensor([0, 3, -100, 1])
MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)

CASES = {
    "linear": (F.linear, [(2, 5, 3), (4, 3), (4,)]),
    "linear of a vector": (F.linear, [(3,), (4, 3), (4,)]),
    "linear to a number": (F.linear, [(5, 3), (3,)]),
    "matmul": (torch.matmul, [(2, 4, 3), (3, 5)]),
    "matmul of a vector": (torch.matmul, [(3,), (2, 3, 5)]),
    "bmm": (torch.bmm, [(2, 4, 3), (2, 3, 5)]),
    "conv1d": (lambda *a: F.conv1d(*a, stride=2, padding=1), [(2, 3, 7), (4, 3, 3), (4,)]),
    "conv2d, groups": (lambda *a: F.conv2d(*a, groups=2, dilation=2), [(2, 4, 6, 6), (6, 2, 2, 2), (6,)]),
    "conv2d of one": (lambda *a: F.conv2d(*a, padding="same"), [(3, 4, 4), (2, 3, 3, 3), (2,)]),
    "conv3d": (F.conv3d, [(1, 2, 3, 3, 3), (2, 2, 2, 2, 2)]),
    "conv_transpose2d": (
        lambda *a: F.conv_transpose2d(*a, stride=2, output_padding=1, groups=2),
        [(2, 4, 3, 3), (4, 1, 3, 3), (2,)],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4, 3), w, b), [(5, 4, 3), (4, 3), (4, 3)]),
    "layer_norm, weight alone": (lambda x, w: F.layer_norm(x, (4,), w), [(5, 3, 4), (4,)]),
    "layer_norm, plain": (lambda x: F.layer_norm(x, (4,)), [(5, 3, 4)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [(5, 3, 4), (4,)]),
    "rms_norm, plain": (lambda x: F.rms_norm(x, (3, 4), eps=1e-3), [(5, 3, 4)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)]),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(5, 3, 4), (3,), (3,)]),
    "batch_norm, plain": (lambda x: F.batch_norm(x, None, None, training=True), [(5, 3, 2, 2)]),
    "batch_norm, running": (
        lambda x, w, b: F.batch_norm(x, torch.arange(3.0, dtype=D), torch.arange(1.0, 4.0, dtype=D), w, b),
        [(5, 3, 4), (3,), (3,)],
    ),
    "batch_norm, by its other name": (
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, True),
        [(5, 3, 4), (3,), (3,)],
    ),
    "relu": (F.relu, [(4, 3)]),
    "tanh": (torch.tanh, [(4, 3)]),
    "sigmoid": (torch.sigmoid, [(4, 3)]),
    "gelu": (F.gelu, [(4, 3)]),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), [(4, 3)]),
    "silu": (F.silu, [(4, 3)]),
    "softmax": (lambda x: F.softmax(x, 0), [(4, 3)]),
    "log_softmax": (lambda x: F.log_softmax(x, -1), [(4, 3)]),
    "embedding": (lambda w: F.embedding(WORDS, w), [(4, 3)]),
    "embedding, padded": (lambda w: F.embedding(WORDS, w, padding_idx=-1), [(4, 3)]),
    "attention": (F.scaled_dot_product_attention, [(2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 5), (2, 1, 3, 3)]),
    "attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        [(2, 3, 4), (2, 5, 4), (2, 5, 4)],
    ),
    "attention, masked": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK, enable_gqa=True),
        [(2, 4, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4)],
    ),
    "cross_entropy": (lambda z: F.cross_entropy(z, CLASSES), [(4, 5)]),
    "cross_entropy, weighted": (
        lambda z: F.cross_entropy(
            z, CLASSES.reshape(2, 2), torch.arange(1.0, 6.0, dtype=D), reduction="none", label_smoothing=0.1
        ),
        [(2, 5, 2)],
    ),
    "cross_entropy, probabilities": (
        lambda z, p: F.cross_entropy(z, p.softmax(-1), reduction="sum", label_smoothing=0.2),
        [(4, 5), (4, 5)],
    ),
}


@pytest.fixture(params=["closed", "plain"])
def form(request, monkeypatch):
    """Attention and cross-entropy in closed form, and by plain operations, as for small ones."""
    if request.param == "closed":
        monkeypatch.setattr(_attention, "LEAST", 0)
        monkeypatch.setattr(_cross_entropy, "LEAST", 0)


def loss_of(f):
    def loss(*given):
        y = f(*given)
        weight = torch.cos(1.3 * torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)
        return (weight * (y.double() + y.double() ** 2)).sum()

    return loss


def given(shapes, layout="plain"):
    made = []
    for shape in shapes:
        x = torch.randn(*reversed(shape), dtype=D).permute(*reversed(range(len(shape))))
        made.append(x if layout == "turned" else x.contiguous())
    return made


def close(got, expected, tolerance=1e-11):
    pairs = [(got[0], expected[0]), *zip(got[1], expected[1], strict=True)]
    size = max(float(b.detach().abs().max()) for _, b in pairs) + 1
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * size, check_dtype=False)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", CASES)
def test_whatever_varies(name):
    """All arguments, some, each alone; the others constants."""
    f, shapes = CASES[name]
    x = given(shapes)
    for count in range(1, len(x) + 1):
        for places in combinations(range(len(x)), count):
            if name.startswith("attention") and places == (3,):
                continue  # PyTorch's matrix products have that, too; the closed form is asked below

            def f_of(*varying, places=places):
                every = [*x]
                for place, value in zip(places, varying, strict=True):
                    every[place] = value
                return f(*every)

            points = [x[place] for place in places]
            v = [torch.randn_like(point) for point in points]
            close(lean(loss_of(f_of), points, v), twice(loss_of(f_of), points, v))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", CASES)
def test_layouts(name):
    """Transposed memory, and a direction that is small and expands."""
    f, shapes = CASES[name]
    points = given(shapes, "turned")
    v = [torch.randn(1, *[1] * (x.ndim - 1), dtype=D).expand(x.shape) for x in points]
    close(lean(loss_of(f), points, v), twice(loss_of(f), points, v))


def test_every_formula_is_used():
    used = set()

    class Tally:
        def count(self, name, kind, seconds):
            if kind == "fused":
                used.add(RULES.first[name].apply)

    for f, shapes in CASES.values():
        points = given(shapes)
        seeds = [[torch.randn_like(x).unsqueeze(0)] for x in points]
        _pushforward.push(loss_of(f), points, seeds, 1, mixes=True, counter=Tally().count)
    large = {
        (1, 1, 1024, 4): lambda q: F.scaled_dot_product_attention(q, q.detach(), q.detach()),
        (64, 4096): lambda z: F.cross_entropy(z, torch.arange(64)),
    }
    for shape, f in large.items():
        x = torch.randn(shape)
        _pushforward.push(f, [x], [[x.unsqueeze(0)]], 1, counter=Tally().count)
    assert used == {rule.apply for rule in RULES.first.values()}, "add what uses it to CASES"


# --- precision ------------------------------------------------------------------------------------


EXACT = {"batch_norm, running"}  # its statistics are in double precision


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", sorted(CASES.keys() - EXACT - {"cross_entropy, weighted"}))
def test_half_precision(name):
    """Value and tangent in bfloat16 are right to its rounding, at sizes where sums in it would not be."""
    f, shapes = CASES[name]
    points = [x.bfloat16() for x in given(shapes)]
    v = [torch.randn_like(x) for x in points]

    def both(dtype):
        seeds = [[each.to(dtype).unsqueeze(0)] for each in v]
        output, expansion = _pushforward.push(f, [x.to(dtype) for x in points], seeds, 1, mixes=True)
        return _pushforward.coefficients(output, expansion)

    for got, expected in zip(both(torch.bfloat16), both(D), strict=True):
        assert got.dtype == torch.bfloat16
        size = float(expected.abs().max()) + 1
        torch.testing.assert_close(got.to(D), expected, rtol=0, atol=0.02 * size)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "batch_norm", "cross_entropy"])
def test_sums_in_half_precision_are_in_single(name):
    """Of 4,000 terms: a sum in bfloat16 ends where a term is less than its last digit."""
    f = {
        "softmax": lambda x: F.softmax(x, -1),
        "log_softmax": lambda x: F.log_softmax(x, -1),
        "layer_norm": lambda x: F.layer_norm(x, (4000,)),
        "rms_norm": lambda x: F.rms_norm(x, (4000,), eps=1e-5),
        "batch_norm": lambda x: F.batch_norm(x.T, None, None, training=True),
        "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([1, 5]), reduction="none"),
    }[name]
    x, v = torch.randn(2, 2, 4000, generator=torch.Generator().manual_seed(0)).bfloat16()
    v = v + 1

    def tangent(dtype):
        output, expansion = _pushforward.push(f, [x.to(dtype)], [[v.to(dtype).unsqueeze(0)]], 1, mixes=True)
        return _pushforward.coefficients(output, expansion)[1].to(D)

    got, expected = tangent(torch.bfloat16), tangent(D)
    assert float((got - expected).norm() / expected.norm()) < 6e-3


# --- batch norm: whose statistics, and when they move ---------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_move_as_in_one_evaluation(training):
    x = torch.randn(5, 3, 4, dtype=D)
    moved, expected = ([torch.zeros(3, dtype=D), torch.ones(3, dtype=D)] for _ in range(2))
    F.batch_norm(x, *expected, training=training, momentum=0.3)
    loss = lambda w: F.batch_norm(x, *moved, w, None, training, 0.3).square().sum()
    lean(loss, [torch.ones(3, dtype=D)], [torch.ones(3, dtype=D)])
    torch.testing.assert_close(moved, expected)


def test_statistics_of_a_module_stay():
    norm = nn.BatchNorm1d(3).double()
    x, kept = torch.randn(5, 3, dtype=D), {name: each.clone() for name, each in norm.named_buffers()}
    lean(lambda x: norm(x).square().sum(), [x], [x])
    torch.testing.assert_close(dict(norm.named_buffers()), kept)


def test_samples_mix_only_where_that_is_said():
    x = torch.randn(5, 3, dtype=D)
    f = lambda x: F.batch_norm(x, None, None, training=True)
    with pytest.raises(hodiff.GraphError, match="it mixes the samples of a batch"):
        _pushforward.push(f, [x], [[x.unsqueeze(0)]], 1)
    one = lambda x: F.batch_norm(x[:1], None, None, training=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        _pushforward.push(one, [x], [[x.unsqueeze(0)]], 1, mixes=True)


def test_jet_takes_the_statistics_of_a_batch():
    """A series of the whole function, which samples may mix; derivatives of samples are refused."""
    f = lambda x: F.batch_norm(x, None, None, training=True).pow(3)
    x, v = torch.randn(2, 5, 3, dtype=D)
    _, (first, second) = hodiff.jet(f, x, [v, torch.zeros_like(v)])
    for found, order in ((first, 1), (second, 2)):
        below = (lambda h: f(x + h * v)) if order == 1 else (lambda h: hodiff.jet(f, x + h * v, [v])[1][0])
        torch.testing.assert_close(found, first_difference(below, 1e-3), rtol=1e-8, atol=1e-8)
    with pytest.raises(hodiff.GraphError, match="it mixes the samples of a batch"):
        hodiff.divergence(f, x)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["attention, causal", "cross_entropy"])
def test_forward_mode_goes_through_it(name):
    f, shapes = CASES[name]
    points = given(shapes)
    loss = lambda x: loss_of(f)(*(x.squeeze() * point for point in points)).view(1, 1)
    slope = lambda x: hodiff.divergence(loss, x)
    x, one = torch.tensor([[0.7]], dtype=D), torch.ones(1, 1, dtype=D)
    _, found = torch.func.jvp(slope, (x,), (one,))
    expected = first_difference(lambda h: slope(x + h), 1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_a_layer_that_is_called_twice(monkeypatch):
    monkeypatch.setattr(_attention, "LEAST", 0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
    x = torch.randn(2, 3, 8, dtype=D)
    names = [name for name, _ in layer.named_parameters()]

    def loss(*parameters):
        call = lambda y: torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), y)
        return call(call(x)).sin().sum()

    points = [p.detach() for p in layer.parameters()]
    v = [p.cos() for p in points]
    close(lean(loss, points, v), twice(loss, points, v))
