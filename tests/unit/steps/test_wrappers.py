"""Steps in several processes: gradients are reduced, or the call raises."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hodiff
from hodiff._core._versions import RELEASE
from tests.support.processes import Ranks
from tests.unit.steps.cases import NETS, forces

pytestmark = pytest.mark.skipif(RELEASE < (2, 13), reason="compile_step asks for PyTorch 2.13")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, __name__)
    yield ranks
    ranks.close()


class Stepped(nn.Module):
    """The documented way: a module whose forward is the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = NETS["tanh"]()
        self.step = hodiff.compile_step(forces, self.net, backend="replay", fallback="raise")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(x)


def said(call: Any) -> str:
    try:
        call()
    except hodiff.InputError as error:
        return str(error)
    return "nothing"


def trained(rank: int) -> list[Any]:
    """Gradients of two calls through the wrapper, of the mean loss by hand; what is said elsewhere."""
    data = torch.stack([torch.full((4, 3), 0.1), torch.full((4, 3), 0.7)])
    module = Stepped()
    module.step(data[rank])  # before it is wrapped
    wrapped = DistributedDataParallel(module)
    reduced = []
    for _ in range(2):
        module.zero_grad()
        wrapped(data[rank]).backward()
        reduced.append([p.grad.clone() for p in module.net.parameters()])
    mean = (forces(module.net, data[0]) + forces(module.net, data[1])) / 2
    expected = torch.autograd.grad(mean, list(module.net.parameters()))
    other = DistributedDataParallel(Inside(module.step))
    words = [said(lambda: module.step(data[rank])), said(lambda: other(data[rank]))]
    early = DistributedDataParallel(NETS["tanh"]())
    words.append(said(lambda: hodiff.compile_step(forces, early.module, backend="replay")(data[rank])))
    return [[[(a - b).abs().max().item() for a, b in zip(each, expected, strict=True)] for each in reduced], words]


class Inside(nn.Module):
    """Calls the step of another module inside a forward of its own wrapper."""

    def __init__(self, step: Any) -> None:
        super().__init__()
        self.own, self.steps = nn.Linear(1, 1), [step]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps[0](x) + self.own(x[:1, :1]).sum()


def test_gradients_are_reduced_or_the_call_raises(two: Ranks) -> None:
    for outcome in two(trained):
        assert not outcome.error, outcome
        differences, words = outcome.value
        assert max(max(each) for each in differences) < 1e-6
        assert all("DistributedDataParallel whose forward is not running" in text for text in words), words


def sharded(rank: int) -> list[str]:
    """What is said of a module under `fully_shard`: as a step is made of it, and as it is sharded later."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    early, late = NETS["tanh"](), NETS["tanh"]()
    fully_shard(early, mesh=mesh)
    words = [said(lambda: hodiff.compile_step(forces, early, backend="replay"))]
    step = hodiff.compile_step(forces, late, backend="replay")
    step(torch.ones(4, 3)).backward()
    late.zero_grad()
    fully_shard(late, mesh=mesh)
    return [*words, said(lambda: step(torch.ones(4, 3)))]


def test_a_sharded_module_is_refused(two: Ranks) -> None:
    for outcome in two(sharded):
        assert not outcome.error, outcome
        assert all("is sharded (fully_shard)" in text for text in outcome.value), outcome.value
