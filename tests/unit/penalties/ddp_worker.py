"""What one of two processes does in `test_distributed`: each scenario once, its gradients into a file."""

import datetime
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hodiff

STEPS, RATE = 3, 0.5


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batch() -> Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def together(D: nn.Module, x: Tensor) -> Tensor:
    return F.softplus(-D(x)).mean() + hodiff.r1_penalty(D, x)


def alone(D: nn.Module, x: Tensor) -> Tensor:
    """A step without the loss: the last layer's bias is in no gradient by the input."""
    return hodiff.r1_penalty(D, x)


def through_the_module(D: nn.Module, x: Tensor) -> Tensor:
    inner = D.module if isinstance(D, DDP) else D
    return F.softplus(-D(x)).mean() + hodiff.r1_penalty(inner, x)


def jacobian_alone(D: nn.Module, x: Tensor) -> Tensor:
    return hodiff.jacobian_penalty(D, x, samples=None, weight=10.0)


def alone_by_hand(D: nn.Module, x: Tensor) -> Tensor:
    """A function hides the wrapper, so the caller adds the term."""
    penalty, outputs = hodiff.r1_penalty(lambda x: D(x), x, return_outputs=True)
    return penalty + 0 * outputs.sum()


SCENARIOS = {
    "together": (together, {}),
    "together, unused parameters": (together, {"find_unused_parameters": True}),
    "alone": (alone, {}),
    "alone, by hand": (alone_by_hand, {}),
    "Jacobian alone": (jacobian_alone, {}),
    "static graph, through the module": (through_the_module, {"static_graph": True}),
}
RAISES = {
    "static graph": lambda D, x: hodiff.r1_penalty(D, x),
    "static graph, hidden": lambda D, x: hodiff.r1_penalty(lambda x: D(x), x),
    "static graph, Jacobian": lambda D, x: hodiff.jacobian_penalty(lambda x: D(x), x),
}


def train(D: nn.Module, loss, x: Tensor) -> list[Tensor]:
    """The parameters after some steps."""
    optimizer = torch.optim.SGD(D.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(D, x).backward()
        optimizer.step()
    return [p.detach().clone() for p in D.parameters()]


def main(rank: int, folder: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Grad strides do not match")  # a note of DDP on performance
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    found: dict[str, object] = {}
    mine = batch().chunk(2)[rank]
    for name, (loss, options) in SCENARIOS.items():
        found[name] = train(DDP(critic(), **options), loss, mine)
    for name, call in RAISES.items():
        try:
            call(DDP(critic(), static_graph=True), mine)
        except hodiff.GraphError as error:
            found[name] = str(error)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
