"""Curvature of a model that is sharded over processes, and training it with a penalty.

torchrun --nproc-per-node 2 sharded_models.py
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import distribute_tensor

import hodiff


def build_model():
    """A network in three blocks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 8),
        torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(8, 8)),
        torch.nn.Linear(8, 10),
    ).double()


def loss(model, batch):
    """The sum over a batch, and its weight."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(model, x, steps=4):
    """A loss and a penalty of the squared slope, for some steps."""
    if isinstance(model, FSDPModule):
        # The second pass needs the whole parameters.
        model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        with hodiff.twice_differentiable():  # shards the model again when it closes
            value = model(x).square().mean()  # before the penalty
            q = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(q).cos().sum(), q, create_graph=True)
            total = value + slope.square().sum(1).mean()
            total.backward()
        optimizer.step()  # changes the shards
        history.append(total.item())
    return history


def main() -> None:
    """Gradients, products, an eigenvalue beside those of one process; training."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    inputs, targets = (
        torch.tensor(digits.data[:150] / 16),
        torch.tensor(digits.target[:150]),
    )
    # two batches, and one
    batches = list(zip(inputs.split(60), targets.split(60), strict=True))
    share = batches[rank::world]

    model, mesh = build_model(), init_device_mesh("cpu", (world,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # a call of its own data: the mean over the ranks, as backward() has it
    mine = inputs[rank::world], targets[rank::world]
    mean = lambda m: F.cross_entropy(m(mine[0]), mine[1])  # noqa: E731
    gradient = hodiff.grad(mean, model)
    mean(model).backward()
    same = all(
        torch.equal(p.grad.to_local(), gradient[name].to_local())
        for name, p in model.named_parameters()
    )
    model.zero_grad()

    # an operator: all ranks' batches, by their weights
    plain = build_model()
    H = hodiff.HessianOperator(loss, model, data=share)
    one = hodiff.HessianOperator(loss, plain, data=batches)
    v = {name: torch.randn_like(p) for name, p in plain.named_parameters()}  # one seed
    placed = {
        name: distribute_tensor(v[name], mesh, p.placements)
        for name, p in model.named_parameters()
    }
    product, expected = H @ placed, one @ v
    error = max((product[n].full_tensor() - expected[n]).abs().max() for n in v)
    pairs = hodiff.eigsh(H, 2)  # on vectors that stay sharded
    exact = hodiff.eigsh(one, 2).value  # the same, where everything fits
    whole, shards = train(plain, inputs), train(model, inputs)
    agree = all(abs(a - b) < 1e-12 for a, b in zip(whole, shards, strict=True))
    if rank == 0:
        weight = product["0.weight"]
        shape = tuple(weight.to_local().shape)
        print(f"{weight.placements} of {tuple(weight.shape)}: {shape}")
        print("grad is what backward() leaves, to the bit:", same)
        print("H v is that of one process:", error.item() < 1e-14)
        vectors = pairs.vectors["0.weight"]
        print(
            "eigenvalues",
            pairs.value.numpy().round(6),
            "of one process",
            exact.numpy().round(6),
        )
        print(f"eigenvectors: {vectors.placements} of {tuple(vectors.shape)}")
        print("each step with a penalty is that of the whole model:", agree)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends as Python does


main()
