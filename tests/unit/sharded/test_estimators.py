"""Estimators of models that processes share: the numbers of one process, and the same ones on all of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.processes import Ranks
from tests.support.releases import SHARDS
from tests.unit.sharded.test_sharded_models import (
    MODELS,
    ONE,
    TOLERANCE,
    TWO,
    D,
    built,
    data,
    like,
    local,
    mean,
    said,
    share_of,
    values,
)

pytestmark = SHARDS

COUNT = 3
"""So many vectors are given to those that take random ones."""


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.wide)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(request.param, __name__)
    yield group
    group.close()


def given(model: nn.Module, count: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A vector, or several, whole, and as the parameters are placed."""
    generator = torch.Generator().manual_seed(3)
    lead = () if count is None else (count,)
    whole = {
        name: torch.randn((*lead, *p.shape), dtype=D, generator=generator) for name, p in built().named_parameters()
    }
    return whole, {name: placed(p, whole[name], count) for name, p in model.named_parameters()}


def placed(p: Any, whole: Tensor, count: int | None) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(p, DTensor):
        return whole
    if count is None:
        return like(p, whole)
    part = torch.stack([like(p, each).to_local() for each in whole])
    placements = [
        each
        if each.is_replicate()
        else type(each)(each.dim + 1, split_factor=each.split_factor)
        if hasattr(each, "split_factor")
        else Shard(each.dim + 1)
        for each in p.placements
    ]
    size = p.numel()
    return DTensor.from_local(
        part, p.device_mesh, placements, run_check=False, shape=whole.shape, stride=(size, *p.stride())
    )


def apart(got: Any, expected: dict[str, Tensor], model: nn.Module, count: int | None = None) -> float:
    """How far a vector is from that of one process; infinite where it is not placed as the parameters."""
    worst = 0.0
    for name, p in model.named_parameters():
        reference = placed(p, expected[name], count)
        if type(got[name]) is not type(reference) or got[name].shape != reference.shape:
            return float("inf")
        if hasattr(reference, "placements") and [*got[name].placements] != [*reference.placements]:
            return float("inf")
        worst = max([worst, *(local(got[name]) - local(reference)).abs().reshape(-1).tolist()])
    return worst


def operators(rank: int, name: str) -> tuple[nn.Module, nn.Module, Any, Any, Any, Any]:
    """A model and a plain one, the Hessian and a definite Gauss-Newton matrix of each."""
    model, plain = MODELS[name](), built()
    H, one = hodiff.HessianOperator(share_of(name, rank), model), hodiff.HessianOperator(mean(*data()), plain)
    batches, world = [*zip(data()[0].split(3), data()[1].split(3), strict=True)], dist.get_world_size()
    mine = {"tensor parallel": batches, "both": batches[rank // 2 :: 2]}.get(name, batches[rank::world])
    predict = lambda m, batch: m(batch[0])
    loss = lambda outputs, batch: (F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1]))
    G, whole = (hodiff.GaussNewtonOperator(predict, loss, m, data=d) for m, d in ((model, mine), (plain, batches)))
    return model, plain, H, one, G + 1.0, whole + 1.0


class Compared:
    """A model's operators beside those of one process with all the data, and what was found of them.

    Attributes:
        found: How far each result is from that of one process.
        numbers: What all ranks must have to the bit.
    """

    def __init__(self, rank: int, name: str) -> None:
        self.model, _, self.H, self.one, self.G, self.whole = operators(rank, name)
        self.found, self.numbers = dict[str, float](), list[Any]()

    def same(self, what: str, got: Any, expected: Any) -> None:
        self.found[what] = float((torch.as_tensor(got) - torch.as_tensor(expected)).abs().max())
        self.numbers.append(torch.as_tensor(got).tolist())

    def vectors(self, what: str, got: Any, expected: dict[str, Tensor], count: int | None = None) -> None:
        self.found[what] = apart(got, expected, self.model, count)


FEW = "layers.0.norm", "layers.1.up.bias"


def traces(c: Compared) -> None:
    z, placed_z = given(c.model, COUNT)
    for what, options in {"trace": {}, "blocks": {"blocks": ["layers.0", "embed"]}}.items():
        a, e = hodiff.trace(c.H, vectors=placed_z, **options), hodiff.trace(c.one, vectors=z, **options)
        c.same(what, a.value, e.value)
        c.same(f"{what}, stderr", a.stderr, e.stderr)
        for key, part in a.blocks.items():
            c.same(f"{what}, {key}", part.value, e.blocks[key].value)
    c.same("exact", hodiff.trace(c.H.block(*FEW)).value, hodiff.trace(c.one.block(*FEW)).value)
    a, e = (hodiff.trace(A, vectors=v, method="hutch++") for A, v in ((c.H, placed_z), (c.one, z)))
    c.same("hutch++", a.value, e.value)
    c.numbers.append(hodiff.trace(c.H, samples=2).value.item())


def diagonals(c: Compared) -> None:
    z, placed_z = given(c.model, COUNT)
    a, e = hodiff.diagonal(c.H, vectors=placed_z, rtol=10), hodiff.diagonal(c.one, vectors=z, rtol=10)
    c.vectors("diagonal", a.value, e.value)
    c.vectors("stderr", a.stderr, e.stderr)
    a, e = (hodiff.diagonal(A.block(*FEW), method="exact").value for A in (c.H, c.one))
    parameters = dict(c.model.named_parameters())
    parts = [local(a[key]) - local(placed(parameters[key], e[key], None)) for key in e]
    c.found["exact"] = max([0.0, *torch.cat([part.reshape(-1) for part in parts]).abs().tolist()])


def eigenpairs(c: Compared) -> None:
    for which, k in (("largest", 2), ("smallest", 1)):
        options = {"which": which, "rtol": 1e-8}
        a, e = hodiff.eigsh(c.H, k, **options), hodiff.eigsh(c.one, k, **options)
        c.same(which, a.value, e.value)
        c.numbers.append([a.residual.tolist(), a.products])
        image, rest = c.H @ a.vectors, list[Tensor]()
        for key, x in a.vectors.items():
            rest += [(local(image[key]) - a.value.view(-1, *[1] * (x.ndim - 1)) * local(x)).reshape(-1)]
        c.found[f"{which}, vectors"] = 1e-3 * max([0.0, *torch.cat(rest).abs().tolist()])
        c.found[f"{which}, converged"] = 0.0 if a.converged else 1.0
    a, e = hodiff.eigsh(c.G, 1, basis=8, rtol=1e-7), hodiff.eigsh(c.whole, 1, rtol=1e-7)
    c.same("restarted", a.value, e.value)


def solutions(c: Compared) -> None:
    b, placed_b = given(c.model, None)
    x = hodiff.solve(c.whole, b, rtol=1e-13).value
    for method in ("cg", "minres", "gmres"):
        a = hodiff.solve(c.G, placed_b, method=method, rtol=1e-12)
        c.vectors(method, a.value, x)
        c.numbers.append([torch.as_tensor(a.residual).tolist(), a.products, a.status])
    start = {name: 0.3 * part for name, part in placed_b.items()}
    c.vectors("from a start", hodiff.solve(c.G, placed_b, start=start, rtol=1e-12).value, x)
    inverse = c.G * -0.1 + 1.0
    c.vectors("preconditioned", hodiff.solve(c.G, placed_b, preconditioner=inverse, rtol=1e-12).value, x)
    sides, placed_sides = given(c.model, 2)
    a, e = hodiff.solve(c.G, placed_sides, rtol=1e-12), hodiff.solve(c.whole, sides, rtol=1e-13)
    c.vectors("several", a.value, e.value, 2)
    options = {"method": "neumann", "iterations": 3, "scale": 5.0}
    c.vectors("neumann", hodiff.solve(c.G, placed_b, **options).value, hodiff.solve(c.whole, b, **options).value)


def densities(c: Compared) -> None:
    z, placed_z = given(c.model, COUNT)
    a, e = (hodiff.spectral_density(A, vectors=v, steps=6) for A, v in ((c.H, placed_z), (c.one, z)))
    c.same("nodes", a.nodes, e.nodes)
    c.same("weights", a.weights, e.weights)
    options = {"shift": 1.0, "rtol": 0.5, "steps": 8}
    a, e = (hodiff.logdet(A, vectors=v, **options) for A, v in ((c.G, placed_z), (c.whole, z)))
    c.same("logdet", a.value / 300, e.value / 300)


PARTS = {part.__name__: part for part in (traces, diagonals, eigenpairs, solutions, densities)}


def estimates(rank: int, name: str, part: str) -> tuple[dict[str, float], list[Any]]:
    compared = Compared(rank, name)
    PARTS[part](compared)
    return compared.found, compared.numbers


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_estimates_are_those_of_one_process_and_the_same_everywhere(ranks: Ranks, name: str, part: str) -> None:
    if name in TWO and len(ranks.processes) < 4:
        pytest.skip("a mesh of two by two")
    outcomes = values(ranks(estimates, name, part))
    for found, numbers in outcomes:
        assert all(error < TOLERANCE for error in found.values()), {k: e for k, e in found.items() if not e < TOLERANCE}
        assert numbers == outcomes[0][1]


def random_trace(rank: int, name: str) -> float:
    H = hodiff.HessianOperator(share_of(name, rank), MODELS[name]())
    return hodiff.trace(H, samples=4, probes="gaussian", generator=torch.Generator().manual_seed(5)).value.item()


def test_random_vectors_are_the_same_however_the_model_is_shared(ranks: Ranks) -> None:
    names = [*ONE, *(TWO if len(ranks.processes) == 4 else ())]
    found = [value for name in names for value in values(ranks(random_trace, name))]
    assert max(found) - min(found) < TOLERANCE
    assert abs(found[0] - EXPECTED) < TOLERANCE  # with two processes and with four


EXPECTED = 21.725203272947972


def locally(rank: int, name: str) -> dict[str, float]:
    """The errors of calls whose sums are this process's own."""
    from hodiff.curvature._krylov import Inner

    right = Inner.sums, Inner.leaf_sums
    Inner.sums = lambda self, f, *vectors: f(*vectors)  # type: ignore[method-assign]
    Inner.leaf_sums = lambda self, pieces: torch.stack([part.sum(-1) for part in pieces])  # type: ignore[method-assign]
    try:
        model, _, H, one, G, whole = operators(rank, name)
        z, placed_z = given(model, COUNT)
        b, placed_b = given(model, None)
        fixed = {"iterations": 4}
        density = [hodiff.spectral_density(A, vectors=v, steps=5).nodes for A, v in ((H, placed_z), (one, z))]
        return {
            "trace": float(hodiff.trace(H, vectors=placed_z).value - hodiff.trace(one, vectors=z).value),
            "solve": apart(hodiff.solve(G, placed_b, **fixed).value, hodiff.solve(whole, b, **fixed).value, model),
            "density": float((density[0] - density[1]).abs().max()),
        }
    finally:
        Inner.sums, Inner.leaf_sums = right  # type: ignore[method-assign]


def test_sums_of_one_process_alone_are_seen(ranks: Ranks) -> None:
    for name in ("layers and root", "tensor parallel"):
        for found in values(ranks(locally, name)):
            assert all(abs(error) > 1e3 * TOLERANCE for error in found.values()), found


def refusals(rank: int) -> dict[str, str]:
    model, _, H, one, G, _ = operators(rank, "layers and root")
    _, b = given(model, None)
    size = one.shape[0]
    flat = hodiff.MatrixOperator(torch.ones(size, dtype=D))
    odd = rank == dist.get_world_size() - 1
    infinite = {name: x * (float("nan") if odd else 1.0) for name, x in b.items()}
    programs: dict[str, Callable[[], Any]] = {
        "create_graph": lambda: hodiff.trace(H, create_graph=True),
        "a preconditioner": lambda: hodiff.solve(G, b, preconditioner=flat),
        "a sum": lambda: hodiff.trace(H + flat),
        "another model": lambda: H + one,
        "flatten": lambda: H.flatten(b),
        "nystrom": lambda: hodiff.nystrom(G, 2, 0.1),
        "generator": lambda: hodiff.trace(H, samples=2, generator=torch.Generator().manual_seed(rank)),
        "not finite on one": lambda: hodiff.solve(G, infinite),
        "vectors not finite on one": lambda: hodiff.trace(H, vectors=infinite),
    }
    found = {name: said(program) for name, program in programs.items()}
    found["afterwards"] = said(lambda: hodiff.solve(G, b))
    return found


def test_refusals_are_those_of_all(ranks: Ranks) -> None:
    for found in values(ranks(refusals)):
        assert not found.pop("afterwards")
        assert all(words.startswith("InputError: ") for words in found.values()), found


def faults(rank: int) -> dict[str, str]:
    """The words of the last rank's own error, and of the others."""
    model, _, H, _, G, _ = operators(rank, "layers and root")
    _, b = given(model, None)
    odd, looks = rank == dist.get_world_size() - 1, []

    def look(record: Any) -> None:
        looks.append(record)
        if odd and len(looks) == 3:
            raise ValueError("a full disk")

    found = {
        "solve": said(lambda: hodiff.solve(G, b, callback=look, method="minres")),
        "eigsh": said(lambda: (looks.clear(), hodiff.eigsh(H, 3, basis=8, callback=look))),
        "another estimator": said(lambda: hodiff.trace(H) if odd else hodiff.solve(G, b)),
    }
    return found | {"afterwards": said(lambda: hodiff.solve(G, b))}


def test_a_rank_that_fails_between_products_is_known_to_all(ranks: Ranks) -> None:
    outcomes = ranks(faults)
    found = values(outcomes)
    last = len(found) - 1
    for name in ("solve", "eigsh"):
        assert found[-1][name] == "ValueError: a full disk"
        assert all(f"rank {last} failed" in each[name] and "sharded model: " in each[name] for each in found[:-1]), (
            found
        )
    assert all("sharded model: the ranks are at different steps" in each["another estimator"] for each in found), found
    assert not any(each["afterwards"] for each in found), found
    assert max(outcome.seconds for outcome in outcomes) < ranks.timeout
