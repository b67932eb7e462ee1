"""What a step leaves behind, by each way it can run: numbers of the eager loss, and nothing else that is not its."""

import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support import audit
from tests.unit.steps.support import MARKS

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")]


class Net(nn.Module):
    """With a buffer that its forward changes, and a parameter that was frozen before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def loss(net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().requires_grad_()
    y = net(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    value = slope.square().mean() + (y * torch.rand_like(y)).mean()
    return value, {"y": y, "turned": y.T, "weight": net.last.weight}


def branched(net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by a branch on data, which no trace follows."""
    return loss(net, x) if float(x.sum()) < 1e9 else loss(net, -x)


def drawn(net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with a draw of Python's, which no trace may keep."""
    value, aux = loss(net, x)
    return value + random.random(), aux


def shown(net: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The same where Dynamo's own trace has to stop."""
    torch._dynamo.graph_break()
    return loss(net, x)


@contextmanager
def packed() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        yield


# loss, options, how many calls come before, what is on around the call, and whether a copy is made
WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any], int, Any, bool]] = {
    "the first call": (loss, {"fallback": "raise"}, 0, nullcontext, False),
    "a call that is compared": (loss, {"fallback": "raise"}, 3, nullcontext, False),
    "a call that is not": (loss, {"fallback": "raise"}, 4, nullcontext, False),
    "by a backend of PyTorch's": (loss, {"fallback": "raise", "backend": "aot_eager"}, 4, nullcontext, False),
    "a copy": (loss, {"fallback": "raise"}, 2, nullcontext, True),
    "eager, the first call": (branched, {}, 0, nullcontext, False),
    "eager for good": (branched, {}, 2, nullcontext, False),
    "eager, a draw of Python's": (drawn, {}, 0, nullcontext, False),
    "eager, a break": (shown, {}, 1, nullcontext, False),
    "eager for once": (loss, {}, 3, packed, False),
}
AUX = [True, False]
CALLS = ["value_and_grad", "backward"]
EACH = list(itertools.product(WAYS, CALLS, AUX))


def made(way: str, aux: bool) -> tuple[Any, Any, Net, Callable[..., Any], Any]:
    f, options, before, around, copied = WAYS[way]
    torch.manual_seed(0)
    random.seed(0)
    net = Net()
    f = f if aux else (lambda net, x, f=f: f(net, x)[0])
    where = hodiff.select(net, "first.weight", "norm.weight", "last.weight")
    step = hodiff.compile_step(
        lambda where, x: f(where.module, x), where, has_aux=aux, **{"backend": "replay", **options}
    )
    for _ in range(before):
        step.value_and_grad(torch.randn(5, 3))
    if copied:
        step = copy.deepcopy(step)
        where = step._where
        net = where.module
    return step, where, net, f, around


@pytest.fixture(scope="module", autouse=True)
def once_before() -> None:
    """The first step of a process loads the compiler, and watches threads from then on."""
    hodiff.compile_step(lambda w: w**2, torch.ones((), requires_grad=True), backend="replay").value_and_grad()


def numbers() -> tuple[Any, ...]:
    return random.getstate(), torch.get_rng_state().tolist()


def state(net: Net) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in net.state_dict().items()}


def taken(call: str, step: Any, net: Net, x: Tensor, aux: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Value, aux, gradients by name."""
    if call == "value_and_grad":
        value, gradient = step.value_and_grad(x)
        value, beside = value if aux else (value, {})
        return value, beside, dict(gradient)
    result = step(x)
    value, beside = result if aux else (result, {})
    value.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for p in net.parameters():
        p.grad = None
    return value.detach(), beside, gradients


@pytest.mark.parametrize(("way", "call", "aux"), EACH)
def test_a_step_leaves_what_its_loss_does(way: str, call: str, aux: bool) -> None:
    step, where, net, f, around = made(way, aux)
    x, other = torch.randn(5, 3), copy.deepcopy(net)
    before, flags = numbers(), {name: p.requires_grad for name, p in net.named_parameters()}

    # by hand, on a copy, from the same random state
    for name, p in other.named_parameters():
        p.requires_grad_(name in where)
    value = f(other, x)
    value, beside = value if aux else (value, {})
    value.backward()
    expected = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    after = numbers()
    random.setstate(before[0]), torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))

    seen: list[Any] = []
    handles = [p.register_hook(seen.append) for p in net.parameters() if p.requires_grad]
    switches = audit.process()
    with around():
        got, got_beside, got_gradients = taken(call, step, net, x, aux)
    assert not audit.differences(switches, audit.process())
    for handle in handles:
        handle.remove()
    torch.testing.assert_close((got, got_beside), (value.detach(), beside), check_dtype=True)
    torch.testing.assert_close(got_gradients, expected)
    torch.testing.assert_close(net.state_dict(), other.state_dict())
    assert numbers() == after
    assert {name: p.requires_grad for name, p in net.named_parameters()} == flags
    assert all(p.grad is None for p in net.parameters())
    assert all(m.training for m in net.modules())
    assert not [m for m in net.modules() if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks]
    assert bool(seen) == (call == "backward" or "eager" in way)

    parts = [*got_beside.values(), *got_gradients.values(), got]
    assert not any(part.requires_grad or part.grad_fn is not None for part in parts)
    kept = [*net.parameters(), *net.buffers(), x]
    for one, part in enumerate(parts):
        others = [*parts[:one], *parts[one + 1 :], *kept]
        copies = [each.detach().clone() for each in others]
        part.add_(1.0)
        assert all(torch.equal(each, kept) for each, kept in zip(others, copies, strict=True)), one

    # what was changed above is no memory of the next call
    again, theirs = torch.randn(5, 3), copy.deepcopy(net)
    before = numbers()
    for name, p in theirs.named_parameters():
        p.requires_grad_(name in where)
    value = f(theirs, again)
    (value[0] if aux else value).backward()
    random.setstate(before[0]), torch.set_rng_state(torch.tensor(before[1], dtype=torch.uint8))
    got, _, got_gradients = taken(call, step, net, again, aux)
    torch.testing.assert_close(got, (value[0] if aux else value).detach())
    torch.testing.assert_close(
        got_gradients, {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    )

    def once() -> list[weakref.ref[Tensor]]:
        x = torch.randn(5, 3)
        with around():
            value, beside, gradients = taken(call, step, net, x, aux)
        return [weakref.ref(each) for each in (x, value, *beside.values(), *gradients.values())]

    left = once()
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("eager")])
def test_where_it_shall_raise_each_call_raises(way: str, call: str) -> None:
    f, _, before, around, _ = WAYS[way]
    net = Net()
    step = hodiff.compile_step(f, net, has_aux=True, backend="replay", fallback="raise")
    for _ in range(before if f is loss else 0):
        step.value_and_grad(torch.randn(5, 3))
    for _ in range(3):
        with pytest.raises(hodiff.GraphError, match="runs uncompiled"), around():
            taken(call, step, net, torch.randn(5, 3), True)
    assert len(step.report.reasons) == 1


def test_parameters_that_are_tied_after_a_call_are_one() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    step = hodiff.compile_step(lambda net, x: net(x).square().mean(), net, backend="replay")
    x = torch.randn(5, 3)
    step.value_and_grad(x)
    net[2].weight = net[0].weight
    with pytest.warns(hodiff.HodiffWarning, match="two of its tensors have become one"):
        step.value_and_grad(x)
    for _ in range(2):
        _, found = step.value_and_grad(x)
        _, expected = hodiff.value_and_grad(lambda net, x=x: net(x).square().mean(), net)
        torch.testing.assert_close(found, expected)
