"""Models that processes share: the derivatives of one process with all the data, and errors on all of them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.curvature._memory import LiveBytes
from tests.support.processes import Ranks
from tests.support.releases import SHARDS

pytestmark = SHARDS

D = torch.float64
TOLERANCE = 1e-10


class Layer(nn.Module):
    """A residual block; with `again`, under an activation checkpoint of its own."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.again = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6), again
        self.register_buffer("calls", torch.zeros((), dtype=D))

    def inner(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x))


class Words(nn.Module):
    """Two blocks between tied embeddings of 5 words; the number of words is no multiple of the ranks'."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList([Layer(again=False), Layer(again=True)])
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def built() -> Words:
    torch.manual_seed(0)
    return Words().to(D)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, (12,), generator=generator), torch.randint(5, (12,), generator=generator)


def mean(words: Tensor, targets: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(words), targets)


def summed(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def ours(rank: int) -> Callable[[nn.Module], Tensor]:
    """The mean over this rank's share; the mean of all ranks' is the mean over the data."""
    words, targets = data()
    return mean(words[rank :: dist.get_world_size()], targets[rank :: dist.get_world_size()])


def mesh(*names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    return init_device_mesh("cpu", (world,) if not names else (2, world // 2), mesh_dim_names=names or None)


def fully_sharded(over: Any = None, *, layers: bool = True, root: bool = True) -> Words:
    from torch.distributed.fsdp import fully_shard

    model, over = built(), over or mesh()
    for layer in model.layers if layers else ():
        fully_shard(layer, mesh=over)
    if root:
        fully_shard(model, mesh=over)
    return model


def parallel(model: Words, over: Any) -> Words:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, over, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def both_ways() -> Words:
    """Tensor parallel in the layers, and sharded over the other half of the mesh."""
    from torch.distributed.fsdp import fully_shard

    two = mesh("data", "tensor")
    model = parallel(built(), two["tensor"])
    for layer in model.layers:
        fully_shard(layer, mesh=two["data"])
    fully_shard(model, mesh=two["data"])
    return model


MODELS: dict[str, Callable[[], Words]] = {
    "layers and root": fully_sharded,
    "root alone": lambda: fully_sharded(layers=False),
    "tensor parallel": lambda: parallel(built(), mesh()),
    "replicated shards": lambda: fully_sharded(mesh("replicate", "shard")),
    "both": both_ways,
}
ONE, TWO = ("layers and root", "root alone", "tensor parallel"), ("replicated shards", "both")


def drawn(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A vector, whole, and as the parameters are placed."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(2)
    whole = {name: torch.randn(p.shape, dtype=D, generator=generator) for name, p in built().named_parameters()}
    placed = dict(whole)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            placed[name] = distribute_tensor(whole[name], p.device_mesh, [each_dim(x) for x in p.placements])
            placed[name] = like(p, whole[name]) if [*placed[name].placements] != [*p.placements] else placed[name]
    return whole, placed


def each_dim(placement: Any) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(placement.dim) if type(placement).__name__ == "_StridedShard" else placement


def like(p: Any, whole: Tensor) -> Any:
    """A whole tensor placed as a parameter, by way of the entries' own numbers."""
    from torch.distributed.tensor import DTensor

    flat = torch.arange(whole.numel(), dtype=D).view(whole.shape)
    local = entries(p, flat)
    part = whole.reshape(-1)[local.long().reshape(-1)].view(local.shape)
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def entries(p: Any, numbers: Tensor) -> Tensor:
    """The numbers of the entries that this process has of a parameter that two meshes cut."""
    for at in reversed(range(p.device_mesh.ndim)):
        placement = p.placements[at]
        if not placement.is_replicate():
            parts = numbers.chunk(p.device_mesh.size(at), placement.dim)
            number = p.device_mesh.get_local_rank(at)
            numbers = parts[number] if number < len(parts) else numbers.narrow(placement.dim, 0, 0)
    return numbers


def apart(got: Any, expected: dict[str, Tensor], model: nn.Module | None = None) -> float:
    """How far a result is from that of one process; infinite where it is not placed as the parameters."""
    from torch.distributed.tensor import DTensor

    worst = 0.0
    parameters = dict(model.named_parameters()) if model is not None else {}
    for name, value in got.items():
        p, whole = parameters.get(name), expected[name]
        if isinstance(p, DTensor):
            if not isinstance(value, DTensor) or value.placements != p.placements or value.shape != p.shape:
                return float("inf")
            whole, value = like(p, whole).to_local(), value.to_local()
        worst = max([worst, *(value - whole).abs().reshape(-1).tolist()])
    return worst if len(got) == len(expected) else float("inf")


def share_of(name: str, rank: int) -> Callable[[nn.Module], Tensor]:
    """The function of a rank: a tensor-parallel model has the same data everywhere."""
    if name == "tensor parallel":
        return mean(*data())
    if name == "both":
        words, targets = data()
        return mean(words[rank // 2 :: 2], targets[rank // 2 :: 2])
    return ours(rank)


def calls(rank: int, name: str) -> dict[str, float]:
    """The distance of each call from one process with all the data."""
    model, plain, all_of_it = MODELS[name](), built(), mean(*data())
    f, (whole, v) = share_of(name, rank), drawn(model)
    scale = torch.tensor(0.7, dtype=D)
    value, slope = hodiff.value_and_grad(f, model)
    some = lambda m: hodiff.select(m, "layers.0", "*.bias")
    scaled = lambda f: lambda model, s: f(model) * s**3
    turned = lambda f: lambda s, model: f(model) * s**3
    decayed = lambda f: lambda m: f(m) + sum(full(p).pow(4).sum() for p in m.layers[0].parameters())
    gradient = hodiff.grad(f, model)
    f(model).backward()
    bits = all(torch.equal(local(p.grad), local(gradient[key])) for key, p in model.named_parameters())
    model.zero_grad()
    return {
        "the bits of .grad": 0.0 if bits else 1.0,
        "grad": apart(gradient, hodiff.grad(all_of_it, plain), model),
        "value": float(value - all_of_it(plain)),
        "value_and_grad": apart(slope, gradient_of(plain), model),
        "hvp": apart(hodiff.hvp(f, model, v), hodiff.hvp(all_of_it, plain, whole), model),
        "cross_hvp": apart(
            hodiff.cross_hvp(scaled(f), model, scale, scale),
            hodiff.cross_hvp(scaled(all_of_it), plain, scale, scale),
            model,
        ),
        "cross_hvp, turned": float(
            hodiff.cross_hvp(turned(f), scale, model, v) - hodiff.cross_hvp(turned(all_of_it), scale, plain, whole)
        ),
        "select": apart(
            hodiff.grad(lambda s: f(s.module), some(model)),
            hodiff.grad(lambda s: all_of_it(s.module), some(plain)),
            model,
        ),
        "parameters alone": apart(
            hodiff.grad(lambda s: full(s["layers.0.up.bias"]).exp().sum(), hodiff.select(model, "layers.0.up.bias")),
            {"layers.0.up.bias": plain.layers[0].up.bias.detach().exp()},
            model,
        ),
        "parameters read outside": apart(
            hodiff.hvp(decayed(f), model, v), hodiff.hvp(decayed(all_of_it), plain, whole), model
        )
        if name != "both"
        else 0.0,
    }


def gradient_of(plain: nn.Module) -> dict[str, Tensor]:
    return hodiff.grad(mean(*data()), plain)


def full(p: Any) -> Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def local(p: Any) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(request.param, __name__)
    yield group
    group.close()


def values(outcomes: list[Any]) -> list[Any]:
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_derivatives_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    if name in TWO and len(ranks.processes) < 4:
        pytest.skip("a mesh of two by two")
    for found in values(ranks(calls, name)):
        assert all(abs(error) < TOLERANCE for error in found.values()), found


CUTS = (5, 4, 3)
SHARES = {2: [[0, 2], [1]], 4: [[0], [1], [2], []]}


def operators(rank: int, name: str, empty: bool) -> dict[str, float]:
    model, plain = MODELS[name](), built()
    whole, v = drawn(model)
    batches = [*zip(data()[0].split(CUTS), data()[1].split(CUTS), strict=True)]
    mine = batches if name == "tensor parallel" or (empty and not rank) else []
    if name != "tensor parallel" and not empty:
        mine = [batches[number] for number in SHARES[dist.get_world_size()][rank]]
    loss = lambda outputs, batch: (F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1]))
    predict = lambda model, batch: model(batch[0])
    kinds = {
        "Hessian": lambda m, d, **o: hodiff.HessianOperator(summed, m, data=d, **o),
        "Gauss-Newton": lambda m, d, **o: hodiff.GaussNewtonOperator(predict, loss, m, data=d, **o),
        "closed form": lambda m, d, **o: hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), m, data=d, **o),
    }
    found: dict[str, float] = {}
    for kind, make in kinds.items():
        for budget in (0.5, 0) if kind != "closed form" else (0.5,):
            H, one = make(model, mine, memory_budget=budget), make(plain, batches)
            found[f"{kind}, {budget}"] = max(
                apart(H @ v, one @ whole, model), apart(H.gradient, one.gradient, model), float(H.value - one.value)
            )
    two = {key: stacked(x) for key, x in v.items()}
    H = kinds["Hessian"](model, mine)
    both, one = H @ two, H @ v
    errors = [(local(both[key])[1] - 2 * local(x)).abs().reshape(-1).tolist() for key, x in one.items()]
    found["two vectors"] = max(error for each in errors for error in each)
    return found


def stacked(x: Any) -> Any:
    """A vector and its double."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(x, DTensor):
        return torch.stack([x, 2 * x])
    part = torch.stack([x.to_local(), 2 * x.to_local()])
    placements = [Shard(each.dim + 1) if isinstance(each, Shard) else each for each in x.placements]
    shape, stride = (2, *x.shape), (x.numel(), *x.stride())
    return DTensor.from_local(part, x.device_mesh, placements, run_check=False, shape=shape, stride=stride)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", ["layers and root", "tensor parallel"])
def test_operators_are_those_of_one_process(ranks: Ranks, name: str, empty: bool) -> None:
    """Shares are ragged, and the last rank may have no batch."""
    if empty and name == "tensor parallel":
        pytest.skip("all ranks have all the data")
    for found in values(ranks(operators, name, empty)):
        assert all(abs(error) < TOLERANCE for error in found.values()), found


def built_of(plain: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model, which are made the same on all ranks."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randn(p.shape, dtype=D, generator=generator))
    return plain.state_dict()


def odd_models(rank: int) -> dict[str, float]:
    """Frozen parameters, a mesh that is a part of the world, batches without samples, and half precision."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    found: dict[str, float] = {}
    frozen, plain = fully_sharded(), built()
    for each in (frozen, plain):
        each.layers[0].requires_grad_(False)
        each.layers[1].norm.requires_grad_(False)
    whole, v = drawn(frozen)
    some = lambda x: {key: x[key] for key, p in plain.named_parameters() if p.requires_grad}
    product = hodiff.hvp(mean(*data()), plain, some(whole))
    got = hodiff.hvp(ours(rank), frozen, some(v))
    found["frozen"] = apart(got, product, frozen)
    H, one = hodiff.HessianOperator(ours(rank), frozen), hodiff.HessianOperator(mean(*data()), plain)
    found["frozen, eigsh"] = float(hodiff.eigsh(H, 1, rtol=1e-9).value - hodiff.eigsh(one, 1, rtol=1e-9).value)
    part = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    if rank < 2:
        model = fully_sharded(part)
        words, targets = data()
        share, (whole, v) = mean(words[rank::2], targets[rank::2]), drawn(model)
        found["part"] = apart(hodiff.hvp(share, model, v), hodiff.hvp(mean(*data()), built(), whole), model)
        batches = [*zip(words.split(CUTS), targets.split(CUTS), strict=True)][rank::2]
        H, one = hodiff.HessianOperator(summed, model, data=batches), hodiff.HessianOperator(mean(*data()), built())
        found["part, eigsh"] = float(hodiff.eigsh(H, 1, rtol=1e-9).value - hodiff.eigsh(one, 1, rtol=1e-9).value)
    words, targets = data()  # PyTorch's second derivative of LayerNorm cannot take no samples
    model, plain = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).to(D) for _ in range(2))
    model.load_state_dict(built_of(plain))
    fully_shard(model, mesh=mesh())
    x = torch.nn.functional.one_hot(words, 5)[:, :3].to(D)
    mine = (x, targets) if not rank else (x[:0], targets[:0])
    H, one = (hodiff.HessianOperator(summed, m, data=[d]) for m, d in ((model, mine), (plain, (x, targets))))
    found["no samples"] = apart(H @ H.gradient, one @ one.gradient, model)
    for dtype, most in ((torch.bfloat16, 0.1), (torch.float16, 0.02)):
        half, plain = built().to(dtype), built().to(dtype)
        for layer in half.layers:
            fully_shard(layer, mesh=mesh())
        fully_shard(half, mesh=mesh())
        f = lambda m: F.cross_entropy(m(words).float(), targets)
        v = {name: torch.ones_like(p.detach()) for name, p in half.named_parameters()}
        one = hodiff.hvp(f, plain, {name: torch.ones_like(p) for name, p in plain.named_parameters()})
        size = max(float(x.abs().max()) for x in one.values())
        got = {name: x.to_local().double() for name, x in hodiff.hvp(f, half, v).items()}
        wide = {name: like(p, one[name].double()).to_local() for name, p in half.named_parameters()}
        worst = max([0.0, *(e for n in wide for e in (got[n] - wide[n]).abs().reshape(-1).tolist())]) / size
        found[str(dtype)] = 0.0 if worst < most else worst
    return found


def test_odd_models(ranks: Ranks) -> None:
    for found in values(ranks(odd_models)):
        assert all(abs(error) < TOLERANCE for error in found.values()), found


def steps(model: nn.Module, rank: int, between: Callable[[], object]) -> list[Tensor]:
    """The losses of three training steps, and the parameters after them."""
    optimizer, f, losses = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), ours(rank), list[Tensor]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = f(model)
        loss.backward()
        optimizer.step()
        losses += [loss.detach()]
        between()
    return [*losses, *(local(p.detach()).clone() for p in model.parameters())]


def untouched(rank: int) -> dict[str, bool]:
    model = fully_sharded()
    _, v = drawn(model)
    seen: list[str] = []
    model.layers[0].register_forward_hook(lambda *_: seen.append("hook"))
    parts = [*model.modules()]
    tables = lambda: [(*part._forward_pre_hooks.items(), *part._forward_hooks.items()) for part in parts]
    hooks, forms, slots = tables(), [part.forward for part in parts], [*model.parameters()]
    hodiff.hvp(ours(rank), model, v)
    found = {
        "no gradient": all(p.grad is None for p in model.parameters()),
        "hooks": tables() == hooks and [part.forward for part in parts] == forms,
        "the user's own ran": bool(seen),
        "parameters": [*map(id, model.parameters())] == [*map(id, slots)],
        "sharded": not any(type(p.data) is Tensor for p in model.parameters()),
        "buffers": float(model.layers[0].calls) == 0,
    }
    with torch.no_grad():
        model(data()[0])  # after which the root's parameters are whole
    gradient = hodiff.grad(ours(rank), model)
    found["after a forward pass"] = apart(gradient, gradient_of(built()), model) < TOLERANCE
    calls = lambda m: lambda: (hodiff.hvp(ours(rank), m, v), hodiff.HessianOperator(ours(rank), m) @ v)
    one, other = fully_sharded(), fully_sharded()
    with_calls, without = steps(one, rank, calls(one)), steps(other, rank, lambda: None)
    found["the same training"] = all(map(torch.equal, with_calls, without))
    return found


def test_the_model_is_as_before(ranks: Ranks) -> None:
    for found in values(ranks(untouched)):
        assert all(found.values()), found


def held(rank: int) -> tuple[float, float, int]:
    """The peak of a product beyond the parameters and the vector, what is left, and the largest block: in numbers."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(12)]
    model, x = nn.Sequential(*layers).to(D), torch.ones(1, 16, dtype=D)
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    v = {name: torch.ones_like(p.detach()) for name, p in model.named_parameters()}
    f = lambda m: m(x).square().mean()
    hodiff.hvp(f, model, v)
    with LiveBytes() as live:
        product = hodiff.hvp(f, model, v)
    left = live.now / 8 - sum(local(x).numel() for x in product.values())
    return live.peak / 8, left, sum(full(p).numel() for p in layers[0].parameters())


def test_a_product_holds_its_shards_and_some_copies_of_a_block(ranks: Ranks) -> None:
    for most, left, block in values(ranks(held)):
        assert most < 1.2 * 12 * block / len(ranks.processes) + 7 * block
        assert left < block / 4


class Failing(list[Any]):
    """Batches of which the last rank cannot read the second."""

    def __iter__(self) -> Iterator[Any]:
        yield self[0]
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("a file is missing")
        yield from self[1:]


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (hodiff.HodiffError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def faults(rank: int) -> dict[str, tuple[str, float]]:
    model, odd = fully_sharded(), rank == dist.get_world_size() - 1
    _, v = drawn(model)
    f, batches = ours(rank), [data()] * 3

    def fails(m: nn.Module) -> Tensor:
        if odd:
            raise ValueError("no such file")
        return f(m)

    H, K = (hodiff.HessianOperator(summed, model, data=batches) for _ in range(2))
    H @ v, K @ v
    programs = {
        "before its first gather": lambda: hodiff.hvp(fails, model, v),
        "another vector": lambda: hodiff.hvp(f, model, {} if odd else v),
        "another number of vectors": lambda: H @ ({key: stacked(x) for key, x in v.items()} if odd else v),
        "another derivative": lambda: hodiff.grad(f, model) if odd else hodiff.hvp(f, model, v),
        "another operator": lambda: (H if odd else K) @ v,
        "another step": lambda: H.refresh().value if odd else H @ v,
        "data": lambda: hodiff.HessianOperator(summed, model, data=Failing(batches)) @ v,
        "a call and a product": lambda: hodiff.grad(f, model) if odd else K @ v,
    }
    found = {}
    for name, program in programs.items():
        begun = time.perf_counter()
        words = said(program)
        found[name] = words, time.perf_counter() - begun
    with torch.no_grad():
        if odd:
            local(model.layers[0].up.weight.detach()).add_(1)
    found["other parameters"] = said(lambda: K @ v), 0.0
    found["afterwards"] = said(lambda: hodiff.hvp(f, model, v)), 0.0
    return found


def test_a_rank_that_fails_is_known_before_the_others_wait(ranks: Ranks) -> None:
    found = values(ranks(faults))
    for name in found[0]:
        words = [each[name][0] for each in found]
        if name == "afterwards":
            assert not any(words), words
            continue
        assert all(words), (name, words)
        assert all(each[name][1] < ranks.timeout / 4 for each in found), (name, found)
        own = "no such file", "a file is missing", "expected a dict", "have changed since"
        if any(word in words[-1] for word in own):
            assert all(f"rank {len(found) - 1} failed" in each for each in words[:-1]), (name, words)


def lost(rank: int, how: str) -> str:
    model = fully_sharded()
    f, last = ours(rank), rank == dist.get_world_size() - 1

    def leaves(m: nn.Module) -> Tensor:
        result = f(m)
        if last:  # the others wait for its backward pass
            if how == "dies":
                import os
                import signal

                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("after its first gather")
        return result

    begun = time.perf_counter()
    words = said(lambda: hodiff.grad(leaves, model))
    if last:
        time.sleep(8)
    return f"{words} {time.perf_counter() - begun:.0f} s"


@pytest.mark.wide
@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_rank_that_is_lost_is_an_error_within_the_timeout(how: str) -> None:
    group = Ranks(2, __name__, timeout=4)
    try:
        living, lost_one = group(lost, how)
        assert living.value.startswith("GraphError: fully_shard: this process could not exchange shards"), living
        assert living.seconds < 8
        assert "exit code -9" in lost_one.error if how == "dies" else "ValueError" in lost_one.value
    finally:
        group.close()


def refusals(rank: int) -> dict[str, str]:
    from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    over, f = mesh(), ours(rank)
    model, tensors = fully_sharded(over), parallel(built(), over)
    whole, v = drawn(model)
    flat = torch.ones(sum(p.numel() for p in built().parameters()), dtype=D)
    H, T = hodiff.HessianOperator(f, model), hodiff.HessianOperator(f, tensors)
    differing = {name: x + rank if not hasattr(x, "placements") else x for name, x in drawn(tensors)[1].items()}
    moved = {key: distribute_tensor(x, over, [Replicate()]) for key, x in whole.items()}
    with_policy = lambda **options: fully_shard(built(), mesh=over, **options)
    listed = built()
    fully_shard([*listed.layers], mesh=over)
    ignored = built()
    fully_shard(ignored, mesh=over, ignored_params={ignored.layers[0].down.weight})
    predict = lambda m, batch: m(batch[0])
    across = built()
    fully_shard(across, mesh=over, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.shape[-1] % 4 == 0 else None)
    loss = nn.CrossEntropyLoss()
    programs = {
        "flat": lambda: H @ flat,
        "whole": lambda: hodiff.hvp(f, model, whole),
        "placed otherwise": lambda: hodiff.hvp(f, model, moved),
        "dense": lambda: H.dense(),
        "dense, tensor parallel": lambda: T.dense(),
        "nystrom": lambda: hodiff.nystrom(H + 1.0, 2, 0.1),
        "create_graph": lambda: hodiff.grad(f, model, create_graph=True),
        "batch_ndim": lambda: hodiff.grad(f, model, batch_ndim=1),
        "a tensor": lambda: hodiff.grad(torch.ones((), requires_grad=True), model),
        "checkpoint": lambda: hodiff.hvp(f, model, v, checkpoint="layers.*"),
        "process_group": lambda: hodiff.HessianOperator(summed, model, data=[], process_group=dist.group.WORLD),
        "mc": lambda: hodiff.FisherOperator(predict, loss, tensors, data=[data()], kind="mc"),
        "per_sample_grad": lambda: hodiff.per_sample_grad(lambda m, x: m(x), tensors, data()[0]),
        "sparse": lambda: hodiff.sparse_hessian(f, tensors),
        "no root": lambda: hodiff.grad(f, fully_sharded(over, root=False)),
        "offloaded": lambda: hodiff.grad(f, with_policy(offload_policy=CPUOffloadPolicy(pin_memory=False))),
        **{
            f"precision, {kind}": lambda kind=kind: hodiff.grad(
                f, with_policy(mp_policy=MixedPrecisionPolicy(**{kind: torch.bfloat16}))
            )
            for kind in ("param_dtype", "reduce_dtype", "output_dtype")
        },
        "copies that differ": lambda: hodiff.hvp(f, tensors, differing),
        "listed": lambda: hodiff.grad(f, listed),
        "ignored": lambda: hodiff.grad(f, ignored),
        "FSDP1": lambda: hodiff.grad(f, FullyShardedDataParallel(built(), device_id=torch.device("cpu"))),
    }
    found = {name: said(program) for name, program in programs.items()}
    found["served: other dimensions"] = str(apart(hodiff.grad(f, across), gradient_of(built()), across) < TOLERANCE)
    return found


NAMES = ("sharded", "shard", "DTensor", "checkpoint: the groups")


def test_what_is_not_served_is_refused_by_name(ranks: Ranks) -> None:
    for found in values(ranks(refusals)):
        assert found.pop("served: other dimensions") == "True"
        for name, words in found.items():
            assert words.startswith("InputError: ") and any(word in words for word in NAMES), (name, words)
