"""A model under `fully_shard`: two ways to its curvature, and training with a penalty.

torchrun --nproc-per-node 2 sharded_parameters.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.func import functional_call

import hodiff


def loss(model, batch):
    """The sum over a batch, and its weight."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def plain_copy(sharded, build_model):
    """All parameters, gathered once into a model of its own on every rank."""
    plain = build_model()
    plain.load_state_dict(
        {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    )
    return plain


def like(parameter, shard):
    """A local shard as a part of a tensor that is sharded as a parameter is."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, shape=parameter.shape, stride=parameter.stride()
    )


def product_by_shards(sharded, shell, batches, v):
    """The Hessian of the sum over all ranks' data, times v, in local shards."""
    named = dict(sharded.named_parameters())

    def summed(shards):
        whole = {
            # ranks' gradients are added up
            name: like(p, shards[name]).full_tensor(grad_placements=[Partial()])
            for name, p in named.items()
        }
        return sum(
            loss(lambda inputs: functional_call(shell, whole, (inputs,)), batch)[0]
            for batch in batches
        )

    shards = {name: p.to_local().detach() for name, p in named.items()}
    return hodiff.hvp(summed, shards, v)


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
            loss = model(x).square().mean()  # before the penalty
            q = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(q).cos().sum(), q, create_graph=True)
            total = loss + slope.square().sum(1).mean()
            total.backward()
        optimizer.step()  # changes the shards
        history.append(total.item())
    return history


def main() -> None:
    """The largest eigenvalue, a product by both ways, and steps with a penalty."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    inputs, targets = (
        torch.tensor(digits.data[:150] / 16),
        torch.tensor(digits.target[:150]),
    )
    # two batches, and one
    share = list(zip(inputs.split(50), targets.split(50), strict=True))[rank::world]

    def build_model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)
        ).double()

    sharded = build_model()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(sharded, mesh=mesh)

    plain = plain_copy(sharded, build_model)
    H = hodiff.HessianOperator(loss, plain, data=share, process_group=dist.group.WORLD)
    top = hodiff.eigsh(H, 1, generator=torch.Generator().manual_seed(0)).value.item()
    # the seed is the same on every rank
    v = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    expected = H @ v

    shards = {
        name: distribute_tensor(v[name], mesh, p.placements).to_local()
        for name, p in sharded.named_parameters()
    }
    found = product_by_shards(sharded, build_model(), share, shards)
    error = max(
        (like(p, found[name]).full_tensor() / len(inputs) - expected[name])
        .abs()
        .max()
        .item()
        for name, p in sharded.named_parameters()
    )
    if rank == 0:
        print(f"largest eigenvalue {top:.6f}")
        print("the product by shards is that of the plain copy:", error < 1e-14)

    whole, shards = train(plain, inputs), train(sharded, inputs)
    agree = all(abs(a - b) < 1e-12 for a, b in zip(whole, shards, strict=True))
    if rank == 0:
        print("whole  ", *(f"{value:.6f}" for value in whole))
        print("sharded", *(f"{value:.6f}" for value in shards))
        print("each step with a penalty is that of the whole model:", agree)
        print("the loss falls:", whole[-1] < whole[0])
    dist.destroy_process_group()


main()
