"""A drawing of the graph, with what its nodes saved, is made after backward() has freed it.

After https://github.com/szagoruyko/pytorchviz/pull/49
"""

import torch
from torch import nn

SAVED_PREFIX = "_saved_"


class Dot:
    def __init__(self):
        self.nodes = []


def get_fn_attrs(fn):
    attrs = {}
    for attr in dir(fn):
        if attr.startswith(SAVED_PREFIX):
            val = getattr(fn, attr)
            attrs[attr[len(SAVED_PREFIX) :]] = tuple(val.shape) if torch.is_tensor(val) else str(val)
    return attrs


def make_dot(var):
    dot, seen, todo = Dot(), set(), [var.grad_fn]
    while todo:
        fn = todo.pop()
        if fn is None or fn in seen:
            continue
        seen.add(fn)
        dot.nodes.append((fn.name(), get_fn_attrs(fn)))
        todo.extend(u for u, _ in fn.next_functions)
    return dot


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
y = model(torch.randn(5, 3)).mean()
optimizer.zero_grad()
y.backward()
optimizer.step()
drawn = len(make_dot(y).nodes)
