"""What runs on several processes inside `f`, or in a loop of the user's: right, or refused by name, on each rank."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

import hodiff
from hodiff._core import _versions
from tests.support.callers import CALLERS, SCALE, D
from tests.support.processes import Ranks
from tests.support.releases import marked, since

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
WEIGHTS = torch.tensor([0.7, -1.2, 0.4], dtype=D)
CALLED = {caller.name: caller for caller in CALLERS}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2, __name__)
    yield ranks
    ranks.close()


def on_each(ranks: Ranks, function: Callable[..., Any], *args: Any) -> list[Any]:
    outcomes = ranks(function, *args)
    for outcome in outcomes:
        assert not outcome.error, outcome
    return [outcome.value for outcome in outcomes]


def mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2,))


def said(call: Callable[[], Any]) -> Any:
    """What a call returned, or the words of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


# --- functions that close over DTensors: PyTorch's `from_local` has a backward without a graph ------------------------


def plain(z: Tensor) -> Tensor:
    return SCALE * z.sin() * (WEIGHTS * z) + z.pow(3)


def over_dtensors() -> Callable[[Tensor], Tensor]:
    """The same, whose gradient comes back in shards, and is redistributed."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    weights = distribute_tensor(WEIGHTS.clone(), mesh(), [Shard(0)])

    def function(z: Tensor) -> Tensor:
        whole = DTensor.from_local(z, weights.device_mesh, [Replicate()])
        return SCALE * (whole.sin() * (weights * whole)).full_tensor() + z.pow(3)

    return function


REFUSED = {
    "jet": "NoRule: Taylor mode has no rule for a Python autograd.Function",
    **dict.fromkeys(
        ("sparse_hessian", "sparse_jacobian", "sparse.sparsity_pattern", "sparse.plan_hessian", "sparse.plan_jacobian"),
        "InputError: the pattern of f(x) cannot be followed: got a DTensor",
    ),
}


def closure(rank: int, name: str) -> Any:
    return said(lambda: [t.detach() for t in CALLED[name](over_dtensors(), X)])


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="redistribute has no second derivative")
@pytest.mark.parametrize("name", CALLED)
def test_every_name_is_right_for_a_function_over_dtensors(two: Ranks, name: str) -> None:
    if name in REFUSED:
        assert all(found.startswith(REFUSED[name]) for found in on_each(two, closure, name))
        return
    expected = [t.detach() for t in CALLED[name](plain, X)]
    for found in on_each(two, closure, name):
        assert not isinstance(found, str), found
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def silent_and_first(rank: int) -> Any:
    """The warnings of an `hvp`, and whether a first gradient by plain PyTorch has a graph."""
    function = over_dtensors()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        allowed = hodiff.hvp(lambda z: function(z).sum(), X, X, allow=("_FromTorchTensor",))
        hodiff.hvp(lambda z: function(z).sum(), X, X)
    z = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(z).sum(), z)
    told = [str(each.message) for each in raised if issubclass(each.category, hodiff.HodiffWarning)]
    return allowed, told, first.requires_grad, first


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="redistribute has no second derivative")
def test_what_is_right_is_silent_and_first_derivatives_are_as_before(two: Ranks) -> None:
    z = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(plain(z).sum(), z)
    for allowed, told, graph, first in on_each(two, silent_and_first):
        torch.testing.assert_close(allowed, hodiff.hvp(lambda z: plain(z).sum(), X, X))
        assert told == [] and not graph
        torch.testing.assert_close(first, expected)


def first_with_a_graph(rank: int) -> list[tuple[Tensor, Tensor]]:
    """First gradients without a graph, which are PyTorch's, and with one, for each of their placements."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    weights, found = distribute_tensor(WEIGHTS.outer(WEIGHTS), mesh(), [Shard(1)]), []
    for placements in (None, [Replicate()], [Partial()]):
        z = X.clone().requires_grad_()
        whole = DTensor.from_local(z, mesh(), [Replicate()], grad_placements=placements)
        value = (whole @ weights).sin().full_tensor().sum()
        with hodiff.twice_differentiable():
            found.append([torch.autograd.grad(value, z, create_graph=graph)[0].detach() for graph in (True, False)])
    return found


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="redistribute has no second derivative")
def test_a_gradient_with_a_graph_is_placed_as_one_without(two: Ranks) -> None:
    for found in on_each(two, first_with_a_graph):
        for mine, theirs in found:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert not torch.equal(found[1][1], found[2][1])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def penalty(model: Callable[[Tensor], Tensor]) -> Tensor:
    z = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
    return slope.square().sum(1).mean()


def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    return model(2 * X).square().mean()


def tensor_parallel(rank: int) -> Tensor:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = network()
    parallelize_module(model, mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with hodiff.twice_differentiable():
        (penalty(model) + loss(model)).backward()
    gradient: Any = model[0].weight.grad
    return gradient.full_tensor()


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="redistribute has no second derivative")
def test_a_penalty_of_a_tensor_parallel_model(two: Ranks) -> None:
    model = network()
    (penalty(model) + loss(model)).backward()
    for found in on_each(two, tensor_parallel):
        torch.testing.assert_close(found, model[0].weight.grad)


# --- a loop around a model under `fully_shard` ------------------------------------------------------------------------


def fully_sharded(*, whole: bool = True) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    model: Any = network()
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh())
    model.set_reshard_after_backward(not whole)
    return model


ORDERS: dict[str, Callable[[nn.Module], Tensor]] = {
    "loss first": lambda model: loss(model) + penalty(model),
    "penalty": penalty,
    "loss": loss,
    "penalty first": lambda model: penalty(model) + loss(model),
}


def trained(model: nn.Module, order: str, *, passes: int = 1, late: bool = False) -> list[float]:
    """The losses of four steps; with `late`, the context has closed before the backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(passes):
            with hodiff.twice_differentiable():
                value = ORDERS[order](model)
                if not late:
                    value.backward()
            if late:
                value.backward()
                for part in model.modules():
                    getattr(part, "reshard", bool)()
        optimizer.step()
        values += [value.item()]
    return values


def loop(rank: int, order: str, options: dict[str, Any]) -> Any:
    return said(lambda: trained(fully_sharded(), order, **options))


OPTIONS = ({}, {"passes": 2}, {"late": True})


@pytest.mark.parametrize("options", OPTIONS, ids=["one pass", "accumulated", "late"])
@pytest.mark.parametrize("order", list(ORDERS)[:-1])
def test_steps_of_a_sharded_model_are_those_of_a_whole_one(two: Ranks, order: str, options: dict[str, Any]) -> None:
    expected = trained(network(), order, **options)
    assert expected[0] != expected[-1]
    for found in on_each(two, loop, order, options):
        assert found == pytest.approx(expected, rel=1e-9), found


@pytest.mark.parametrize("options", OPTIONS[:2], ids=["one pass", "accumulated"])
def test_a_gradient_that_was_left_behind_is_an_error(two: Ranks, options: dict[str, Any]) -> None:
    for found in on_each(two, loop, "penalty first", options):
        assert isinstance(found, str), found
        assert found.startswith("GraphError: fully_shard has left 2.weight without its gradient"), found
        assert "before the penalty" in found


def freed(rank: int) -> Any:
    def steps() -> Any:
        return trained(fully_sharded(whole=False), "loss first")

    def own() -> None:
        with hodiff.twice_differentiable():
            loss(fully_sharded())
            raise ValueError("the user's own")

    return said(steps), said(own), trained(fully_sharded(whole=False), "loss")


def test_parameters_freed_between_the_passes_are_named(two: Ranks) -> None:
    for words, own, values in on_each(two, freed):
        assert words.startswith("GraphError: a second pass through a model under fully_shard"), words
        assert "set_reshard_after_backward(False)" in words
        assert own == "ValueError: the user's own"
        assert values == pytest.approx(trained(network(), "loss"), rel=1e-9)


def hooks(rank: int) -> list[int]:
    """How many hooks of all modules there are before, inside and after; and after an error."""
    numbers = [len(nn.modules.module._global_forward_pre_hooks)]
    with hodiff.twice_differentiable():
        numbers += [len(nn.modules.module._global_forward_pre_hooks)]
    with pytest.raises(ValueError, match="own"), hodiff.twice_differentiable():
        raise ValueError("own")
    return [*numbers, len(nn.modules.module._global_forward_pre_hooks)]


def test_no_hook_stays(two: Ranks) -> None:
    for before, inside, after in on_each(two, hooks):
        assert (inside, after) == (before + 1, before)


# --- DistributedDataParallel, with and without a wrapper --------------------------------------------------------------

BY_PARAMETERS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda m: hodiff.grad(loss, m),
    "hvp": lambda m: hodiff.hvp(loss, m, {name: torch.ones_like(p) for name, p in m.named_parameters()}),
    "hessian": lambda m: hodiff.hessian(lambda _: loss(m), hodiff.select(m, "2.*")),
    "gradient_norm_penalty": lambda m: hodiff.gradient_norm_penalty(loss, m),
    "HessianOperator": lambda m: hodiff.HessianOperator(loss, m).value,
    "per_sample_grad": lambda m: hodiff.per_sample_grad(lambda m, z: m(z).square().sum(1), m, X),
    "gram": lambda m: hodiff.gram(lambda m, z: m(z).square().sum(1), m, X),
    "unroll": lambda m: hodiff.unroll(loss, m, hodiff.rules.SGD(lr=0.1), 2),
    "check_derivatives": lambda m: bool(hodiff.check_derivatives(loss, m)),
    "LevenbergMarquardt": lambda m: hodiff.LevenbergMarquardt(lambda m, z: m(z)[:, 0], m).step(X),
    "gradient_penalty by x": lambda m: hodiff.gradient_penalty(m, X),
    "hvp by x": lambda m: hodiff.hvp(lambda z: m(z).sum(), X, X),
}


def flat(value: Any) -> list[Tensor]:
    return [torch.as_tensor(leaf).detach() for leaf in _pytree.tree_leaves(value)]


def replicated(rank: int, name: str) -> Any:
    from torch.distributed._composable import replicate

    model = network()
    replicate(model)
    early = said(lambda: flat(BY_PARAMETERS[name](model)))
    model(X)
    return early, said(lambda: flat(BY_PARAMETERS[name](model)))


@pytest.mark.parametrize("name", BY_PARAMETERS)
def test_a_replicated_module_runs_once_before(two: Ranks, name: str) -> None:
    expected = flat(BY_PARAMETERS[name](network()))
    for early, late in on_each(two, replicated, name):
        assert isinstance(early, str) and "a module under torch.distributed's replicate() has not run yet" in early
        assert not isinstance(late, str), late
        for mine, theirs in zip(late, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def least_squares(rank: int) -> list[Any]:
    residuals = lambda model, z: model(z)[:, 0]
    wrapper = nn.parallel.DistributedDataParallel(network())
    return [
        said(lambda: hodiff.LevenbergMarquardt(residuals, wrapper)),
        said(lambda: hodiff.LevenbergMarquardt(residuals, {"a": nn.Sequential(wrapper)})),
        said(lambda: hodiff.LevenbergMarquardt(residuals, wrapper.module).step(X).item()),
    ]


def test_least_squares_refuses_a_wrapper(two: Ranks) -> None:
    alone = hodiff.LevenbergMarquardt(lambda model, z: model(z)[:, 0], network()).step(X).item()
    for *refused, inner in on_each(two, least_squares):
        for words in refused:
            assert isinstance(words, str), words
            assert words.startswith("InputError: where: the model is wrapped in DistributedDataParallel"), words
        assert inner == alone


# --- collectives inside `f` -------------------------------------------------------------------------------------------


def detached(rank: int) -> Any:
    """What is right: a number for a log, in `f` and beside it; a tensor with a graph outside of any call."""
    seen = []

    def logging(z: Tensor) -> Tensor:
        value = z.square().sum()
        logged = value.detach().clone()
        dist.all_reduce(logged)
        with torch.no_grad():
            copy = value.clone()
            dist.all_reduce(copy)
        seen.append((logged.item(), copy.item()))
        return value

    gradient = hodiff.grad(logging, X)
    outside = (X.clone().requires_grad_() * 1).sum()
    dist.all_reduce(outside)
    return gradient, seen, outside.item()


def test_a_collective_on_what_is_not_differentiated_is_let_through(two: Ranks) -> None:
    for gradient, seen, outside in on_each(two, detached):
        torch.testing.assert_close(gradient, 2 * X)
        both = pytest.approx(2 * X.square().sum().item())
        assert seen and all(pair == (both, both) for pair in seen)
        assert outside == pytest.approx(2 * X.sum().item())


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda value: dist.all_reduce(value),
    "broadcast": lambda value: dist.broadcast(value, 0),
    "reduce": lambda value: dist.reduce(value, 0, async_op=True),
}
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "value_and_grad": lambda f: hodiff.value_and_grad(f, X),
    "hvp": lambda f: hodiff.hvp(f, X, X),
    "laplacian": lambda f: hodiff.laplacian(f, X, batch_ndim=0),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, X).value,
}


def written(rank: int, name: str) -> list[Any]:
    def f(z: Tensor) -> Tensor:
        value = z.square().sum()
        IN_PLACE[name](value)
        return value

    return [said(lambda call=call: call(f)) for call in CALLS.values()]


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_collective_that_writes_into_what_is_differentiated_is_refused(two: Ranks, name: str) -> None:
    """The value was that of all ranks, and the derivative that of one."""
    for refused in on_each(two, written, name):
        for words in refused:
            assert isinstance(words, str), words
            assert words.startswith(f"GraphError: f calls torch.distributed.{name} on a tensor that is differentiated")


def differentiable(rank: int, functional: bool) -> Any:
    """A loss of both ranks' rows: its Hessian by this rank's copy, what was said, and the mean over the ranks."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed import nn as theirs

    def shared(z: Tensor) -> Tensor:
        part = (z * X[rank]).sum().exp()
        whole = collectives.all_reduce(part, "sum", dist.group.WORLD) if functional else theirs.all_reduce(part)
        return whole.square().sum()

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        mean = hodiff.grad(shared, SHARED), hodiff.hessian(shared, SHARED)
    for each in mean:
        dist.all_reduce(each)
    return [str(each.message) for each in raised if each.category is hodiff.CustomFunctionWarning], mean


SHARED = torch.tensor([0.2, -0.1, 0.3], dtype=D)


@pytest.mark.parametrize(
    "functional", marked([False, True], since((2, 13), "functional collectives end in the one in place"), [True])
)
def test_a_differentiable_collective_is_told_what_its_derivative_is(two: Ranks, functional: bool) -> None:
    whole = lambda z: (X @ z).exp().sum().square()
    for told, (gradient, matrix) in on_each(two, differentiable, functional):
        assert told and all("It communicates: the result is the derivative" in each for each in told), told
        torch.testing.assert_close(gradient / 2, hodiff.grad(whole, SHARED))
        torch.testing.assert_close(matrix / 2, hodiff.hessian(whole, SHARED))
