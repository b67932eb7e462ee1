"""An operator goes on after `eval()` where no module looks at its mode, and is refused where one may."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from tests.support.operators import D, X, draw

PLAIN = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Tanh()),
    "group norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4)),
}


class ByAttribute(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class ByName(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + getattr(self, "training"))  # noqa: B009


class InAHelper(nn.Linear):
    @property
    def scale(self):
        return 1 + self.training

    def forward(self, x):
        return super().forward(x) * self.scale


class InALambda(nn.Linear):
    def forward(self, x):
        scaled = [lambda y: y * (1 + self.training)]
        return scaled[0](super().forward(x))


def doubled(forward):
    @functools.wraps(forward)
    def wrapped(self, x):
        return forward(self, x) + forward(self, x)

    return wrapped


class Decorated(nn.Linear):
    @doubled
    def forward(self, x):
        return super().forward(x) * (1 + self.training)


def replaced():
    layer = nn.Linear(3, 1)
    layer.forward = lambda x: F.linear(x, layer.weight) * (1 + layer.training)
    return layer


def hooked():
    layer = nn.Linear(3, 1)
    layer.register_forward_hook(lambda module, args, y: y * (1 + module.training))
    return layer


MODAL = {
    "dropout": lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.0)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0)),
    "attribute": lambda: ByAttribute(3, 1),
    "by name": lambda: ByName(3, 1),
    "property": lambda: InAHelper(3, 1),
    "lambda": lambda: InALambda(3, 1),
    "decorator": lambda: Decorated(3, 1),
    "replaced forward": replaced,
    "hook": hooked,
}


def operator(model):
    return hodiff.HessianOperator(lambda m: m(X).square().sum(), model)


@pytest.mark.parametrize("name", PLAIN)
def test_the_mode_does_not_matter(name):
    model = PLAIN[name]().double()
    H = operator(model)
    v = draw(H.shape[1])
    before = H @ v
    assert torch.equal(H.T @ v, before)
    model.eval()
    assert torch.equal(H @ v, before)
    torch.testing.assert_close(operator(model) @ v, before)
    model.train()
    assert torch.equal(H @ v, before)


@pytest.mark.parametrize("name", MODAL)
@pytest.mark.filterwarnings("ignore::hodiff.RandomnessWarning")
def test_the_mode_may_matter(name):
    model = MODAL[name]().double()
    H = operator(model)
    H @ draw(H.shape[1])
    model.eval()
    with pytest.raises(hodiff.GraphError, match=r"train\(\)\s+and eval\(\) switched"):
        H @ draw(H.shape[1])
    found = H.refresh() @ draw(H.shape[1])
    torch.testing.assert_close(found, operator(model) @ draw(H.shape[1]))


def test_a_function_that_asks_the_model():
    model = PLAIN["layers"]().double()
    H = hodiff.HessianOperator(lambda m: m(X).square().sum() * (2 if m.training else 1), model)
    H @ draw(H.shape[1])
    model.eval()
    with pytest.raises(hodiff.GraphError, match="switched"):
        H @ draw(H.shape[1])


def test_parts_that_are_replaced_are_seen_all_the_same():
    model = PLAIN["layers"]().double()
    H = operator(model)
    H @ draw(H.shape[1])
    model[3] = nn.Linear(4, 1).double()
    with pytest.raises(hodiff.GraphError, match="was replaced"):
        H @ draw(H.shape[1])


def test_blocks_of_containers_by_name_are_counted_in_the_whole():
    point = {"a": draw(2), "b": [draw(2, 2), draw(3)]}
    H = hodiff.HessianOperator(lambda p: ((p["b"][0] @ p["a"]).sum() * p["b"][1].sum()) ** 2, point)
    dense = H.dense()
    assert H.products == 9
    for pattern, rows in (("a", slice(0, 2)), ("b", slice(2, 9)), ("b.1", slice(6, 9)), ("x['b'][0]", slice(2, 6))):
        before, block = H.products, H.block(pattern)
        v = draw(block.shape[1])
        torch.testing.assert_close(block @ v, dense[rows, rows] @ v)
        assert block.products == 1 and H.products == before + 1
        assert hodiff.trace(block, samples=20).products == H.products - before - 1
    nested = H.block("b").block("*0*")
    before = H.products
    nested @ draw(4)
    assert H.products == before + 1
    pair = hodiff.HessianOperator(lambda p: (p[0] * p[1]).sum() ** 2, (draw(2), draw(2)))
    torch.testing.assert_close(pair.block("1").dense(), pair.dense()[2:, 2:])
    assert D is torch.float64
