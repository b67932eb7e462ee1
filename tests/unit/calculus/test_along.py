"""Derivatives along lines against the dense Hessian of each output."""

import pytest
import torch

from hodiff._core._call import call
from hodiff._core._graph import OutputGraph
from hodiff.fields import _expansions
from hodiff.fields._field import Directions, FieldCall
from hodiff.penalties import _jacobian
from tests.support.properties import agree
from tests.unit.jets.oracle import nested

D = torch.float64
X = torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(0))
V = torch.randn(2, 4, 3, dtype=D, generator=torch.Generator().manual_seed(1))

FUNCTIONS = {
    "several": lambda x: torch.stack([torch.sin(x).prod(-1), x[:, 0] ** 2 * x[:, 1], x.sum(-1)], 1).reshape(4, 3, 1),
    "one": lambda x: torch.exp(x).prod(-1),
    "linear": lambda x: x.sum(-1),
    "each entry": lambda x: x**3,
}


def dense(f, v):
    """By nested reverse passes of plain PyTorch along the line."""
    _, first, second = nested(f, X, [v], 2)
    return first.detach(), 2 * second.detach()


def along(graph, vectors):
    """First and second derivatives of all outputs along one line."""
    first = _jacobian._pushed(graph, graph.outputs, vectors, differentiated=True)
    return first, _jacobian._pushed(graph, first, vectors, differentiated=False)


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_by_entries_and_by_lines(name, create_graph):
    f = FUNCTIONS[name]
    field = FieldCall("laplacian", f, X, create_graph=create_graph, chunk_size=1).checked()
    _, firsts, seconds = _expansions.by_reverse(field, Directions(V, groups=2), V[0], first=True)
    drifted, _ = dense(f, V[0])
    for k, v in enumerate(V):
        first, second = dense(f, v)
        agree(firsts[k].detach(), first)
        agree(seconds[k].detach(), second + drifted)
        with OutputGraph(call(f, X, passes=4, batch_ndim=1, create_graph=create_graph)) as graph:
            found = along(graph, [v])
        agree(found[0].detach(), first)
        agree(found[1].detach(), second)


def test_by_lines_of_several_points():
    a, b = X[0], X[1]
    f = lambda p: p["a"] * torch.sin(p["b"])
    with OutputGraph(call(f, {"a": a, "b": b}, passes=4)) as graph:
        first, second = along(graph, [V[0, 0], V[0, 1]])
    v, w = V[0, 0], V[0, 1]
    agree(first.detach(), v * b.sin() + a * w * b.cos())
    agree(second.detach(), 2 * v * w * b.cos() - a * w**2 * b.sin())
