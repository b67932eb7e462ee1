"""An operator is refused once a module of its point went from `train()` to `eval()`, or back; and its blocks."""

import pytest
import torch
from torch import nn

import hodiff
from tests.support.operators import D, X, draw

MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 1)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.0)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1)),
    "attention": lambda: nn.Sequential(nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0)),
}


def operator(model):
    return hodiff.HessianOperator(lambda m: m(X).square().sum(), model)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::hodiff.RandomnessWarning")
def test_a_mode_that_was_switched(name):
    model = MODELS[name]().double()
    H = operator(model)
    v = draw(H.shape[1])
    before = H @ v
    model[0].eval()
    with pytest.raises(hodiff.GraphError, match=r"train\(\)\s+or eval\(\) was called\. H\.refresh\(\)"):
        H @ v
    model.train()
    assert torch.equal(H @ v, before)
    model.eval()
    with pytest.raises(hodiff.GraphError, match=r"eval\(\) was called"):
        H @ v
    torch.testing.assert_close(H.refresh() @ v, operator(model) @ v)


def test_a_mode_that_was_switched_before_the_first_product():
    model = MODELS["dropout"]().double()
    H = operator(model)
    model.eval()
    with pytest.raises(hodiff.GraphError, match=r"eval\(\) was called"):
        H @ draw(H.shape[1])


def test_parts_that_are_replaced_are_seen_all_the_same():
    model = MODELS["layers"]().double()
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
