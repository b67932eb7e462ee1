"""Activation checkpoints, whose blocks run again in passes that come after the call: with what the modules had then."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff import implicit, rules

D = torch.float64
X = torch.linspace(-1.0, 1.0, 12, dtype=D).reshape(4, 3).sin()


class Net(nn.Module):
    """A checkpoint whose block is a closure, reads a parameter without a call, and calls modules."""

    def __init__(self, norm: nn.Module | None = None, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, -0.5]))
        self.norm: nn.Module = norm or nn.Identity()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 1)
        self.again = again
        self.double()

    def block(self, x: Tensor) -> Tensor:
        if self.again:
            x = checkpoint(lambda z: (self.scale * z).sin(), x, use_reentrant=False)
        return self.norm(torch.tanh(self.inner(self.scale * x))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.block, x, use_reentrant=False)).square().mean()


def loss(model: nn.Module) -> Tensor:
    return model(X)


def total(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values.square().sum()
    return sum(map(total, values.values() if isinstance(values, dict) else values), torch.zeros((), dtype=D))


def pair(models: list[nn.Module]) -> Tensor:
    return models[0](X) * models[1](X + 0.1)


def nested(s: Tensor) -> Tensor:
    """A hodiff call in the function of another, at parameters that depend on its point."""
    model = Net()
    point = {name: s * value.detach() for name, value in model.named_parameters()}
    return total(hodiff.grad(lambda p: functional_call(model, p, (X,)), point, create_graph=True))


def unrolled(rule: Callable[[Tensor], Any], model: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    return lambda s: total(hodiff.unroll(loss, model(), rule(s), 3, **options))


def selected(s: Tensor) -> Tensor:
    model = Net()
    return total(hodiff.unroll(lambda _: model(X), hodiff.select(model, "inner.*"), rules.SGD(lr=s), 3))


def sample(s: Tensor) -> Callable[[Tensor], Tensor]:
    """For each sample a value."""
    model = Net(again=True)
    return lambda x: checkpoint(lambda z: model.block(s * z).sum(-1), x, use_reentrant=False)


def eval_norm() -> Net:
    return Net(nn.BatchNorm1d(3)).eval()


def solved(s: Tensor) -> Tensor:
    model = Net()
    z = torch.zeros(3, dtype=D)
    for _ in range(80):
        z = 0.3 * torch.cos(z + s.detach() * model(X).detach())
    return implicit.fixed_point(lambda z: 0.3 * torch.cos(z + s * model(X)), z).square().sum()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "SGD": unrolled(lambda s: rules.SGD(lr=s)),
    "Adam": unrolled(lambda s: rules.Adam(lr=s, eps=1e-3)),
    "momentum, in segments": unrolled(lambda s: rules.SGD(lr=s, momentum=0.9), segments=2),
    "a checkpoint in a checkpoint": unrolled(lambda s: rules.SGD(lr=s), lambda: Net(again=True)),
    "buffers": unrolled(lambda s: rules.SGD(lr=s), eval_norm),
    "statistics of the batch": unrolled(lambda s: rules.SGD(lr=s), lambda: Net(nn.BatchNorm1d(3))),
    "selected": selected,
    "two modules": lambda s: total(hodiff.unroll(pair, [Net(), Net(again=True)], rules.SGD(lr=s), 3)),
    "inside another call": lambda s: hodiff.grad(unrolled(lambda r: rules.SGD(lr=r)), s, create_graph=True),
    "a gradient": lambda s: total(hodiff.grad(lambda m: s * m(s * X), Net(), create_graph=True)),
    "a Laplacian": lambda s: hodiff.laplacian(sample(s), X, method="reverse", create_graph=True).sum(),
    "a fixed point": solved,
    "functional_call": nested,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_the_block_runs_again_with_what_it_had(case: str) -> None:
    f, step = CASES[case], 1e-5
    s = torch.tensor(0.3, dtype=D, requires_grad=True)
    [found] = torch.autograd.grad(f(s), s)
    with torch.no_grad():
        up, down = (s + step).requires_grad_(), (s - step).requires_grad_()
    expected = (f(up).detach() - f(down).detach()) / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_buffers_are_those_of_the_evaluation_and_stay_the_users() -> None:
    s = torch.tensor(0.3, dtype=D, requires_grad=True)
    model = eval_norm()
    [expected] = torch.autograd.grad(unrolled(lambda r: rules.SGD(lr=r), lambda: model)(s), s)
    after = unrolled(lambda r: rules.SGD(lr=r), lambda: model)(s)
    norm, parameters = model.norm._buffers, [*model.parameters()]
    mean: Tensor = norm["running_mean"]  # type: ignore[assignment]
    mean += 1.0
    kept = mean.clone()
    torch.testing.assert_close(torch.autograd.grad(after, s)[0], expected)
    assert norm["running_mean"] is mean and torch.equal(mean, kept)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in parameters)


def test_a_module_met_by_a_closure_keeps_its_statistics() -> None:
    norm = nn.BatchNorm1d(3).double()
    s = torch.tensor(0.3, dtype=D, requires_grad=True)
    g = hodiff.grad(lambda x: checkpoint(norm, s * x, use_reentrant=False).pow(3).sum(), X, create_graph=True)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    g.square().sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


class Remembers(nn.Module):
    """The block reads an attribute that the forward pass has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, -0.5], dtype=D))
        self.code: Any = [torch.zeros(3, dtype=D)]

    def forward(self, x: Tensor) -> Tensor:
        self.code = [torch.sin(self.weight * x[0])]
        return checkpoint(lambda z: (z * self.code[0]).tanh().square().sum(), x, use_reentrant=False)


def test_an_attribute_is_that_of_the_evaluation() -> None:
    def after(s: Tensor) -> Tensor:
        return total(hodiff.unroll(loss, model, rules.SGD(lr=s), 2))

    model, step = Remembers(), 1e-5
    code, s = model.code, torch.tensor(0.3, dtype=D, requires_grad=True)
    found = after(s)
    assert model.code is code
    [slope] = torch.autograd.grad(found, s)
    expected = (after(s + step) - after(s - step)).detach() / (2 * step)
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)
    assert model.code is code and not torch.any(code[0])


def test_attention_is_computed_as_in_the_call() -> None:
    """By matrix products, where the user's pass would else record a fused kernel the second time."""
    q = torch.linspace(-1, 1, 24, dtype=D).reshape(1, 2, 3, 4).sin()
    block = lambda z: F.scaled_dot_product_attention(z, z, z.cos()).sin()

    def slope(f: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = q.clone().requires_grad_()
        return torch.autograd.grad(hodiff.grad(lambda z: f(z).sum(), leaf, create_graph=True).square().sum(), leaf)[0]

    torch.testing.assert_close(slope(lambda z: checkpoint(block, z, use_reentrant=False)), slope(block))


def test_a_functional_call_within_f() -> None:
    """PyTorch alone runs the block again with the module's own parameters: 13-39 % off."""
    model = Net()
    theirs, values = model.inner, [value.clone() for value in model.parameters()]
    point = {name: value.detach() * 0.5 for name, value in model.named_parameters()}
    found = hodiff.grad(lambda p: functional_call(model, p, (X,)), point)
    for name, value in point.items():
        direction = torch.ones_like(value)
        at = lambda t, name=name, value=value, d=direction: functional_call(
            model, {**point, name: value + t * d}, (X,)
        ).detach()
        torch.testing.assert_close((found[name] * direction).sum(), (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-6, atol=1e-8)
    assert model.inner is theirs
    assert all(map(torch.equal, model.parameters(), values))


def test_another_thread_has_the_module_on_loan() -> None:
    """A pass of the user's, over the result of a call that has ended, waits until the other call is over."""
    model, lent, done, evaluations, after = Net(), threading.Event(), threading.Event(), [], {}
    s = torch.tensor(0.3, dtype=D, requires_grad=True)
    make = lambda: total(hodiff.grad(lambda m: s * m(s * X), model, create_graph=True))
    [expected] = torch.autograd.grad(make(), s)

    def waits(m: nn.Module) -> Tensor:
        evaluations.append(m)
        if len(evaluations) == 2:  # at the parameters after the first step
            lent.set()
            done.wait(0.3)
        return m(X)

    result = make()
    thread = threading.Thread(
        daemon=True, target=lambda: after.update(hodiff.unroll(waits, model, rules.SGD(lr=2.0), 2))
    )
    thread.start()
    assert lent.wait(5)
    [found] = torch.autograd.grad(result, s)
    done.set()
    thread.join(10)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(after, hodiff.unroll(loss, Net(), rules.SGD(lr=2.0), 2))


def test_the_graph_goes_with_its_last_reference() -> None:
    model = Remembers()
    s = torch.tensor(0.3, dtype=D, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        leaf = torch.ones(3, dtype=D) * s
        gone = weakref.ref(leaf)
        result = hodiff.grad(lambda m, x: m(x), model, args=(leaf * X,), create_graph=True)
        torch.autograd.grad(total(result), s, retain_graph=True)
        del leaf, result
        assert gone() is None
    finally:
        gc.enable()


def test_pytorch_has_its_name_back() -> None:
    theirs: Any = torch.utils.checkpoint._CheckpointFrame  # type: ignore[attr-defined]
    hodiff.grad(loss, Net())
    assert isinstance(theirs, type) and torch.utils.checkpoint._CheckpointFrame is theirs  # type: ignore[attr-defined]


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "pow": lambda x: (x * x + 1) ** x,
    "prod": lambda x: x.prod() * x,
    "det": lambda x: torch.linalg.det(x.reshape(2, 2)) * x,
    "layer_norm": lambda x: F.layer_norm(x, (4,), x.sin()),
    "norm": lambda x: torch.linalg.vector_norm(x, 4) * x,
    "nested": lambda x: checkpoint(lambda y: F.layer_norm(y, (4,)), x.sin(), use_reentrant=False) * x,
}
ORDERS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "hvp": lambda f, x: hodiff.hvp(f, x, x.cos()),
    "its gradient": lambda f, x: hodiff.grad(lambda z: (hodiff.hvp(f, z, x.cos()) * x).sum(), x),
    "recorded": lambda f, x: hodiff.grad(lambda z: hodiff.hvp(f, z, x.cos(), create_graph=True).sum(), x),
    "biharmonic": lambda f, x: hodiff.biharmonic(f, x, batch_ndim=0, method="reverse"),
    "by hand": lambda f, x: hodiff.grad(lambda z: torch.autograd.grad(f(z), z, create_graph=True)[0].sin().sum(), x),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_again_by_the_definitions_that_it_ran_by(name: str, order: str) -> None:
    """Norms, powers, products and determinants are written out at third order, and the block again."""
    x, block = torch.tensor([0.3, 0.8, -1.2, 0.5], dtype=D), BLOCKS[name]
    found = ORDERS[order](lambda z: checkpoint(block, z, use_reentrant=False).sin().sum(), x)  # type: ignore[union-attr]
    torch.testing.assert_close(found, ORDERS[order](lambda z: block(z).sin().sum(), x))


def test_nested_checkpoints_under_a_laplacian_that_is_differentiated() -> None:
    """Taylor mode, whose block PyTorch cannot run again inside another, leaves it to reverse mode, and says so."""
    once = lambda f: lambda z: checkpoint(f, z, use_reentrant=False)
    f: Any = once(lambda z: once(lambda y: y.sin().prod(-1))(z.cos()))
    x = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)
    loss = lambda z, f, **way: hodiff.laplacian(f, z, **way).square().sum()
    true = hodiff.grad(lambda z: loss(z, lambda z: z.cos().sin().prod(-1)), x)
    with pytest.raises(hodiff.GraphError, match="no rule for a checkpointed block, inside another checkpoint"):
        hodiff.grad(lambda z: loss(z, f, method="jets"), x)
    with pytest.warns(hodiff.HodiffWarning, match=r'inside another checkpoint.*method="reverse"'):
        torch.testing.assert_close(hodiff.grad(lambda z: loss(z, f), x), true)
    torch.testing.assert_close(hodiff.grad(lambda z: loss(z, f, method="reverse"), x), true)
    single = lambda z: loss(z, once(lambda z: z.cos().sin().prod(-1)))
    torch.testing.assert_close(hodiff.grad(single, x), true)


def test_what_is_recorded_of_a_block_is_differentiated_when_the_call_is_over() -> None:
    x = torch.tensor([0.3, 0.8, -1.2, 0.5], dtype=D, requires_grad=True)
    results = []
    for f in (BLOCKS["layer_norm"], lambda z: checkpoint(BLOCKS["layer_norm"], z, use_reentrant=False)):
        product = hodiff.hvp(lambda z, f=f: f(z).sin().sum(), x, x.detach().cos(), create_graph=True)
        results += [torch.autograd.grad(product.sin().sum(), x)[0]]
    torch.testing.assert_close(*results)


class Moving(nn.Module):
    """Blocks that read what changes while `f` runs: in the block itself, or after it."""

    def __init__(self, kind: str, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = nn.Linear(3, 3).double()
        self.linear = nn.utils.spectral_norm(linear) if kind == "spectral_norm" else linear
        self.kind, self.checkpointed, self.scale = kind, checkpointed, 1.0
        self.register_buffer("count", torch.ones((), dtype=D))

    def block(self, x: Tensor) -> Tensor:
        if self.kind == "a buffer, in place":
            self.count.mul_(1.5)
        if self.kind == "a buffer, anew":
            self.count = self.count * 1.5
        if self.kind == "an attribute":
            self.scale *= 1.5
        return (self.linear(x) * self.count.clone() * self.scale).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)  # type: ignore
            if self.kind == "after it":
                self.count.mul_(2.0)
                self.scale *= 2
        return x.sin().sum()


@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
@pytest.mark.parametrize("kind", ["spectral_norm", "a buffer, in place", "a buffer, anew", "an attribute", "after it"])
def test_a_block_runs_again_with_what_its_modules_had_as_it_began(kind: str) -> None:
    x, v = X.sin(), X.cos()
    runs: list[Callable[[nn.Module], Tensor]] = [
        lambda m: hodiff.grad(m, x),
        lambda m: hodiff.hvp(m, x, v),
        lambda m: total(hodiff.grad(lambda m: m(x), m)),
        lambda m: total(hodiff.hvp(lambda m: m(x), m, {name: p.detach() for name, p in m.named_parameters()})),
        lambda m: torch.autograd.grad(
            hodiff.grad(m, leaf := x.clone().requires_grad_(), create_graph=True).sum(), leaf
        )[0],
    ]
    for run in runs:
        torch.testing.assert_close(run(Moving(kind, True)), run(Moving(kind, False)))
