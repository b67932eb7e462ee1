"""Importing hodiff, all of it, replaces nothing of PyTorch's; neither does a call, once it has ended."""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil, sys, types
import torch, torch._dynamo, torch.utils.checkpoint, torch._inductor.compile_fx
import torch.distributed.tensor, torch.fx.experimental.proxy_tensor
from torch._ops import _higher_order_ops
from torch.utils.data import DataLoader

def names():
    found = {}
    for module in [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "torch"]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if callable(value):
                found[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(module.__name__, name, key): each for key, each in vars(value).items() if callable(each)}
    for name, operator in _higher_order_ops.items():
        found |= {(name, key): each for key, each in vars(operator).items() if callable(each)}
    return found

def changed(before):
    now = names()
    return sorted(str(key) for key in before if now.get(key) is not before[key])

x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: x.sin().sum(), backend="eager")(x).backward()  # what PyTorch's compiler does itself
torch.optim.SGD([x], lr=0.1).step()
before = names()
import hodiff
for found in pkgutil.walk_packages(hodiff.__path__, "hodiff."):
    if "__main__" not in found.name:
        importlib.import_module(found.name)
print(changed(before))
x = torch.ones(3)
model = torch.nn.Linear(3, 1)
hodiff.hvp(lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1].sum(), x, x)
hodiff.hessian(lambda m: m(x).sin().sum(), model)
loss = lambda m: hodiff.laplacian(lambda z: m(z).sin().sum(), x, batch_ndim=0)
hodiff.compile_step(loss, model, backend="replay")().backward()
print(changed(before))
"""


@pytest.mark.wide
def test_nothing_of_pytorch_is_replaced() -> None:
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert run.stdout.splitlines() == ["[]", "[]"], run.stdout + run.stderr
