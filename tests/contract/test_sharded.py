"""Parameters, points and vectors that are sharded over processes: refused under every public name that does not serve
them, with a way out (`tests/unit/sharded` has those that do).

Stock PyTorch's gradient by such parameters is None silently, and a second pass finds them freed.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hodiff
from tests.support.callers import CALLERS, PLAIN, D
from tests.support.processes import Ranks

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
NO_TENSORS_OF_THE_USERS = {
    "select", "Selection", "trace", "diagonal", "eigsh", "spectral_density", "logdet",
    "sparse.color", "graph.inspect", "graph.predict", "graph.shared", "graph.release", "graph.explain",
    "twice_differentiable",
}  # fmt: skip
"""What their rows in `callers` make of a point holds none of its entries in a place that could be sharded."""
SERVED = {"grad", "value_and_grad", "hvp", "cross_hvp", "HessianOperator", "GaussNewtonOperator"}
"""They take sharded points."""
FIRST_ORDER = {
    "grad", "value_and_grad", "vjp", "jacobian", "per_sample_grad", "gram", "sparse_jacobian",
    "sparse.plan_jacobian", "multi_grad",
}  # fmt: skip
"""One derivative by the inputs of a sharded module is right, and theirs has no graph."""


class Entrywise(nn.Module):
    """A function whose results have its argument's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7, -1.2, 0.4], dtype=D))

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * z.sin() * z


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """A process of its own: those that have loaded DTensors look for them."""
    ranks = Ranks(1, __name__)
    yield ranks
    ranks.close()


def sharded() -> tuple[Any, nn.Module, nn.Module]:
    """How a tensor is sharded; a module as it is, and under `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = Entrywise()
    fully_shard(model, mesh=mesh)
    return lambda tensor: distribute_tensor(tensor.clone(), mesh, [Shard(0)]), Entrywise(), model


def said(call: Callable[[], Any]) -> Any:
    """What a call returned, or the words of our error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except hodiff.HodiffError as error:
            return f"{type(error).__name__}: {error}"


def points(rank: int) -> dict[str, Any]:
    shard, _, _ = sharded()
    x = shard(X)
    found = {
        caller.name: said(lambda caller=caller: caller(lambda z: z.sin() * z, x))
        for caller in CALLERS
        if caller.name not in SERVED
    }
    return found | {
        name: said(lambda call=call: call(x))
        for name, call in PLAIN.items()
        if name not in NO_TENSORS_OF_THE_USERS | SERVED
    }


def test_every_name_refuses_a_sharded_point_or_vector(one: Ranks) -> None:
    (outcome,) = one(points)
    assert not outcome.error, outcome
    for name, words in outcome.value.items():
        assert isinstance(words, str), name
        assert words.startswith("InputError: ") and "is a DTensor" in words and "full_tensor(" in words, (name, words)


def modules(rank: int) -> dict[str, tuple[Any, Any, bool]]:
    _, plain, model = sharded()
    found = {}
    for caller in CALLERS:
        got = said(lambda caller=caller: caller(model, X))
        found[caller.name] = got, [t.detach() for t in caller(plain, X)], bool(torch.equal(model(X), plain(X)))
    return found


def test_every_name_refuses_what_frees_its_parameters_between_passes(one: Ranks) -> None:
    (outcome,) = one(modules)
    assert not outcome.error, outcome
    for name, (got, expected, as_before) in outcome.value.items():
        assert as_before, f"{name}: the model's next forward is another"
        if name in FIRST_ORDER:
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs)
        else:
            assert isinstance(got, str), name
            assert got.startswith("InputError: f: Entrywise is sharded (fully_shard)"), (name, got)


def by_parameters(rank: int) -> list[Any]:
    _, _, model = sharded()
    loss = lambda m: m(X).square().sum()
    batch = lambda m, x: m(x)
    mean = lambda outputs, x: (outputs.square().sum(), len(outputs))
    return [
        said(call)
        for call in (
            lambda: hodiff.hessian(loss, hodiff.select(model, "scale")),
            lambda: hodiff.gradient_norm_penalty(loss, model),
            lambda: hodiff.FisherOperator(batch, mean, model, data=[X], kind="empirical"),
            lambda: hodiff.JacobianOperator(batch, model, data=[X]),
            lambda: hodiff.check_derivatives(loss, model),
            lambda: hodiff.unroll(loss, model, hodiff.rules.SGD(lr=0.1), 2),
            lambda: hodiff.jacobian(loss, {"a": model}),
            lambda: hodiff.multi_grad([loss], model),
        )
    ]


def test_sharded_parameters_are_no_point(one: Ranks) -> None:
    (outcome,) = one(by_parameters)
    assert not outcome.error, outcome
    for words in outcome.value:
        assert isinstance(words, str) and "Entrywise is sharded (fully_shard)" in words, words
        assert "full_tensor()" in words and "'Hessians of a sharded model'" in words


def values(rank: int) -> list[Any]:
    """Of tensors that the user computed himself, and of vectors in containers."""
    shard, plain, model = sharded()
    x = X.clone().requires_grad_()
    point = {"a": X, "b": X[0]}
    H = hodiff.HessianOperator(lambda p: plain(p["a"] * p["b"]).sum(), point)
    vectors = ({"a": shard(X), "b": X[0]}, [X, shard(X[0])], shard(torch.ones(9, dtype=D)))
    return [
        said(lambda: hodiff.hvp(model(x).square().sum(), x, X)),
        *(said(lambda v=v: H @ v) for v in vectors),
        *(said(lambda v=v: hodiff.hvp(lambda p: plain(p["a"] * p["b"]).sum(), point, v)) for v in vectors),
        said(lambda: hodiff.MatrixOperator(shard(torch.eye(3)))),
    ]


def test_values_and_vectors(one: Ranks) -> None:
    (outcome,) = one(values)
    assert not outcome.error, outcome
    freed, *vectors = outcome.value
    assert "GraphError: " in freed and "sharded over processes (fully_shard)" in freed, freed
    for words in vectors:
        assert isinstance(words, str) and "is a DTensor" in words and "full_tensor()" in words, words


def test_every_name_is_looked_at() -> None:
    assert dist.is_available()
    names = {caller.name for caller in CALLERS}
    assert names >= FIRST_ORDER and set(PLAIN) >= NO_TENSORS_OF_THE_USERS and names | set(PLAIN) >= SERVED
