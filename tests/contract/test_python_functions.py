"""Promise 1 where a Python `autograd.Function` is met at the second order or above: right, refused, or said."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff import CustomFunctionWarning, GraphError
from hodiff._core import _python_functions
from tests.support.callers import CALLERS, SCALE, Caller, D
from tests.support.modules import Cube
from tests.support.releases import CHECKPOINTS

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
BOTH = r"(?s)not the derivative of the gradient: \S+ against \S+,.*allow="
UNVERIFIED = r"(?s)could not confirm here.*check_derivatives"


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a Function from another test."""
    for name in ("_findings", "_places"):
        monkeypatch.setattr(_python_functions, name, type(_python_functions._findings)())


class WrongSecond(Cube):
    """Its backward is cut off from its argument."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.detach() ** 2 * g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / (1 + 5 * x.abs()) ** 2


class _CubesSlope(torch.autograd.Function):
    """3 x², whose own derivative has been cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 3 * x**2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 6 * ctx.saved_tensors[0].detach() * g


class WrongThird(Cube):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _CubesSlope.apply(ctx.saved_tensors[0]) * g


def through(function: Any) -> Callable[..., Tensor]:
    return lambda z, *rest: SCALE * function.apply(z).sin() + z.exp()


def outcome(call: Callable[[], object]) -> list[str]:
    """What an error or warnings say."""
    raised = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except hodiff.HodiffError as error:
            raised += [str(error)]
    return raised + [str(w.message) for w in caught if issubclass(w.category, CustomFunctionWarning)]


# --- every public name ------------------------------------------------------------------------------------------------

SECOND = [caller for caller in CALLERS if caller.order >= 2]
LOSSES = [caller for caller in CALLERS if caller.order < 2 and caller.name.endswith(("penalty", "Penalty", "loss"))]

OTHERWISE = {
    "jet": "NoRule: it has no second route",
    "jets.report": "it gives no derivative",
    "check_derivatives": "it holds everything against differences itself",
}


@pytest.mark.parametrize("caller", [*SECOND, *LOSSES], ids=repr)
def test_a_wrong_one_is_caught_by_every_name(caller: Caller) -> None:
    if caller.name == "jets.report":
        assert "autograd.Function" in str(caller.run(caller.shaped(through(WrongSecond)), X, ()))
        return
    pattern = {"jet": "no rule for a Python autograd.Function", "check_derivatives": "disagrees"}.get(
        caller.name, "not the derivative of the gradient: "
    )
    first = outcome(lambda: caller(through(WrongSecond), X))
    _python_functions._places.clear()  # as from another line
    later = outcome(lambda: caller(through(WrongSecond), X))
    for said in (first, later):
        assert any(pattern in each for each in said), said


@pytest.mark.parametrize("caller", [*SECOND, *LOSSES], ids=repr)
def test_of_a_right_one_nothing_is_said(caller: Caller) -> None:
    """Nor by any name of first order."""
    if caller.name not in OTHERWISE:
        assert not any("Function" in said for said in outcome(lambda: caller(through(Cube), X)))


@pytest.mark.parametrize("caller", [c for c in CALLERS if c.order < 2], ids=repr)
def test_a_first_derivative_is_what_the_class_wrote(caller: Caller) -> None:
    with torch.no_grad():
        assert not outcome(lambda: caller(through(WrongSecond), X)) or caller.name.startswith("implicit")


# --- three outcomes ---------------------------------------------------------------------------------------------------


CONTRADICTED = [(f, dtype) for f in (WrongSecond, StraightThrough, Reversed) for dtype in (torch.float32, D)]


@pytest.mark.parametrize(("function", "dtype"), [*CONTRADICTED, (Spike, D)], ids=str)
def test_numbers_that_contradict_are_both_said(function: Any, dtype: torch.dtype) -> None:
    """Surrogates too, on purpose: a Hessian through them is refused, a loss of theirs is trained with."""
    x = torch.tensor([0.25, -0.75, 1.5, 1.0], dtype=dtype)
    f = lambda x: ((function.apply(x) * x.sin() - 1) ** 2 + x**4).sum()
    for _ in range(3):
        with pytest.raises(GraphError, match=BOTH + repr(function.__name__)) as error:
            hodiff.hvp(f, x, torch.ones_like(x))
    assert "straight-through, surrogate or reversed" in str(error.value)
    scale = torch.ones((), dtype=dtype, requires_grad=True)
    (said,) = outcome(lambda: hodiff.gradient_penalty(lambda x: scale * f(x)[None], x[None]))
    assert re.search(BOTH, said)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.hvp(f, x, torch.ones_like(x), allow=function)
        hodiff.hvp(f, x, torch.ones_like(x), allow=function.__name__)


def test_the_numbers_are_those_of_the_product_and_of_the_gradient() -> None:
    x = torch.tensor(0.5, dtype=D)
    f = lambda x: WrongSecond.apply(x) + x**2
    with pytest.raises(GraphError, match=r"gradient: \S+ against \S+,") as error:
        hodiff.hvp(f, x, torch.ones_like(x))
    product, difference = (float(word.strip(",")) for word in str(error.value).split(": ", 1)[1].split()[0:3:2])
    assert abs(product / difference - 2 / (2 + 6 * 0.5)) < 1e-4


def test_a_function_wrong_at_the_third_order_only() -> None:
    f = lambda x: WrongThird.apply(x).sum()
    assert not outcome(lambda: hodiff.hvp(f, X, X))
    with pytest.warns(CustomFunctionWarning, match=BOTH):
        hodiff.hvp(f, X, X, create_graph=True)
    with pytest.raises(GraphError, match=BOTH):
        hodiff.nth_derivative(lambda x: WrongThird.apply(x), X, 3)


def _net(*layers: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 24), *layers, nn.Linear(24, 1)).to(dtype)


class Cubes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(x)


class Counted(Cubes):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Cube.apply(x) * (1 + self.calls / 7)


SURROUNDINGS: dict[str, Callable[[], list[nn.Module]]] = {
    "nothing": lambda: [Cubes()],
    "ReLU": lambda: [nn.ReLU(), Cubes()],
    "before ReLU": lambda: [Cubes(), nn.Linear(24, 24), nn.ReLU()],
    "dropout": lambda: [Cubes(), nn.Dropout(0.5)],
    "BatchNorm": lambda: [nn.BatchNorm1d(24), Cubes(), nn.BatchNorm1d(24)],
    "LayerNorm": lambda: [nn.LayerNorm(24), Cubes()],
    "counts": lambda: [Counted()],
    "max": lambda: [nn.Unflatten(1, (1, 24)), nn.MaxPool1d(1), nn.Flatten(), Cubes()],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, D], ids=str)
@pytest.mark.parametrize("rows", [4, 512])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_a_right_one_is_never_refused(name: str, rows: int, dtype: torch.dtype) -> None:
    net = _net(*SURROUNDINGS[name](), dtype=dtype)
    x = torch.randn(rows, 3, dtype=dtype)
    loss = lambda model: model(x).float().square().mean()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    said = outcome(lambda: hodiff.hvp(loss, net, {k: torch.ones_like(p) for k, p in net.named_parameters()}))
    said += outcome(lambda: hodiff.hvp(lambda x: net(x).float().square().mean(), x, torch.ones_like(x)))
    assert not any("not the derivative" in each for each in said)
    if dtype is D and name in ("nothing", "dropout", "BatchNorm", "LayerNorm"):
        assert not said
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (ctx.saved_tensors[0] > 0)


def _rectified(entries: int, rows: int, seed: int) -> tuple[Callable[[Any], Tensor], Any]:
    drawn = torch.Generator().manual_seed(seed)
    points, w = torch.randn(rows, 3, generator=drawn), torch.randn(3, generator=drawn)
    rest = points[:, entries:].sum(1) + 0.1
    mean = lambda w: Rectified.apply(points[:, :entries] @ w + rest).mean() + (w**4).sum()
    return mean, w[:entries]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [100, 10_000, 300_000])
@pytest.mark.parametrize("entries", [1, 2, 3])
def test_many_kinks_are_no_contradiction(entries: int, rows: int, seed: int) -> None:
    """Differences of such a gradient settle, at the density of the kinks; the product, which has none, is right."""
    f, w = _rectified(entries, rows, seed)
    assert not any("not the derivative" in said for said in outcome(lambda: hodiff.hvp(f, w, w)))
    parts = [*w]
    apart = lambda parts: f(torch.stack(parts))
    assert not any("not the derivative" in said for said in outcome(lambda: hodiff.hvp(apart, parts, parts)))


# --- once, and of what ------------------------------------------------------------------------------------------------


class Calls:
    """A function that counts how often it is called."""

    def __init__(self, function: Any = Cube) -> None:
        self.count, self.function = 0, function

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.function.apply(x).sum() + x.exp().sum()


def spent(f: Calls, call: Callable[[], object]) -> int:
    before = f.count
    outcome(call)
    return f.count - before


def test_six_evaluations_once() -> None:
    f = Calls()
    call = lambda: hodiff.hvp(f, X, X)
    assert [spent(f, call) for _ in range(3)] == [7, 1, 1]
    operator = Calls()
    assert spent(operator, lambda: hodiff.HessianOperator(lambda x: operator(x), X).dense()) == 7
    many = Calls()
    assert spent(many, lambda: hodiff.hessian(lambda x: many(x), X)) == 7


def test_once_for_each_class_code_order_and_precision() -> None:
    f = Calls()
    made = lambda: lambda x: f(x)
    another = lambda x: f(x)
    call = lambda g, x=X, **k: spent(f, lambda: hodiff.hvp(g, x, x, **k))
    assert [call(made()) for _ in range(3)] == [7, 1, 1]
    assert [call(another) for _ in range(2)] == [7, 1]
    assert [call(made(), X.float()) for _ in range(2)] == [7, 1]
    assert [call(made(), create_graph=True) for _ in range(2)] == [7, 1]
    f.function = type("Other", (Cube,), {})
    assert [call(made()) for _ in range(2)] == [7, 1]


def test_what_the_call_returns_is_as_without() -> None:
    """The same numbers drawn by f, the same state of the generator afterwards, the same result."""
    f = lambda x: (Cube.apply(x) * torch.rand_like(x)).sum()
    results = []
    for allow in ("Cube", ()):
        torch.manual_seed(3)
        results += [(hodiff.hvp(f, X, X, allow=allow), torch.rand(2))]
    for held, plain in zip(*results, strict=True):
        assert torch.equal(held, plain)


def test_a_failure_beside_the_point_is_no_failure_of_the_call() -> None:
    def f(x: Tensor) -> Tensor:
        if not torch.equal(x.detach(), X):
            raise ValueError("elsewhere")
        return Cube.apply(x).sum()

    with pytest.warns(CustomFunctionWarning, match=UNVERIFIED):
        torch.testing.assert_close(hodiff.hvp(f, X, X), 6 * X * X)


@CHECKPOINTS
def test_blocks_that_run_again() -> None:
    for function, said in ((Cube, False), (WrongSecond, True)):

        class Layer(nn.Linear):
            def forward(self, x: Tensor, function: Any = function) -> Tensor:
                return function.apply(super().forward(x))

        torch.manual_seed(1)
        net = nn.Sequential(Layer(3, 4), Layer(4, 1)).to(D)
        v = {name: torch.ones_like(p) for name, p in net.named_parameters()}
        texts = outcome(lambda net=net, v=v: hodiff.hvp(lambda m: m(X).sum(), net, v, checkpoint="*"))
        assert any("not the derivative" in each for each in texts) is said


# --- where there is no look -------------------------------------------------------------------------------------------


class Labelled(Tensor):
    pass


def _traced(f: Calls) -> object:
    return make_fx(lambda x: hodiff.grad(f, x, create_graph=True))(X)


def _nested(f: Calls) -> object:
    """A transform around: refused as ever, or a constant."""
    return torch.vmap(lambda shift: hodiff.hvp(lambda x: f(x) * shift, X, X, create_graph=False), randomness="same")(
        torch.ones(2, dtype=D)
    )


def _tangent(f: Calls) -> object:
    with torch.autograd.forward_ad.dual_level():
        return hodiff.hvp(f, X, X)


def _tensor(f: Calls) -> object:
    x = X.clone().requires_grad_()
    return hodiff.hvp(f(x), x, X)


NO_LOOK: dict[str, Callable[[Calls], object]] = {
    "traced": _traced,
    "transformed": _nested,
    "forward mode": _tangent,
    "a tensor": _tensor,
    "sharded": lambda f: hodiff.hvp(f, X.as_subclass(Labelled), X),
    "another accepted": lambda f: hodiff.hvp(
        lambda x: f(x) + StraightThrough.apply(x).square().sum(), X, X, allow="StraightThrough"
    ),
}


@pytest.mark.parametrize("name", NO_LOOK)
def test_no_look_where_none_can_be_taken(name: str) -> None:
    f = Calls()
    said = outcome(lambda: NO_LOOK[name](f))
    assert f.count <= 2  # of `vmap` and a tracer, that of PyTorch
    assert any("could not confirm here" in each or "torch.func transform" in each for each in said), said


def test_none_where_other_processes_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    f = Calls()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.warns(CustomFunctionWarning, match=UNVERIFIED):
        hodiff.hvp(f, X, X)
    assert f.count == 1


def test_none_inside_another() -> None:
    """A call inside f is held in f's first run, not in those of the look at f."""
    f = Calls()
    outer = lambda x: hodiff.grad(f, x).square().sum() + Cube.apply(x).sum()
    assert spent(f, lambda: hodiff.hvp(outer, X, X)) == 7 + 6


def test_unverified_is_said_at_each_place_once() -> None:
    x = X.clone().requires_grad_()
    loss = Cube.apply(x).sum()

    def here() -> object:
        return hodiff.hvp(loss, x, X)

    def there() -> object:
        return hodiff.hvp(loss, x, X)

    assert [len(outcome(call)) for call in (here, here, there, there)] == [1, 0, 1, 0]
    other = type("Other", (Cube,), {}).apply(x).sum()
    loss = other
    assert len(outcome(here)) == 1


def test_a_surrogate_is_told_of_each_function_that_a_line_differentiates() -> None:
    """A helper is one line for all that it is given."""

    def penalty(f: Callable[[Tensor], Tensor]) -> object:
        return hodiff.gradient_norm_penalty(f, X.clone().requires_grad_())

    def once(x: Tensor) -> Tensor:
        return WrongSecond.apply(x).sum()

    def twice(x: Tensor) -> Tensor:
        return 2 * WrongSecond.apply(x).sum()

    assert [len(outcome(lambda f=f: penalty(f))) for f in (once, once, twice, twice)] == [1, 0, 1, 0]


class Scaled(torch.autograd.Function):
    """Right by the first argument, cut off from the other."""

    @staticmethod
    def forward(ctx: Any, scale: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(scale, x)
        return scale * x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        scale, x = ctx.saved_tensors
        return g * x**3, g * 3 * scale * x.detach() ** 2


def test_one_code_is_held_again_where_it_is_another_function() -> None:
    """Of other parameters, or with another module in its closure: by ways that the first did not take."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.point = (nn.Parameter(X.clone()) for _ in range(2))

        def forward(self) -> Tensor:
            return Scaled.apply(self.scale, self.point).sum()

    model = Mixed()
    f = lambda _: model()
    for pattern, words in (("scale", 0), ("point", 1), ("*", 1), ("scale", 0)):
        where = hodiff.select(model, pattern)
        v = {name: torch.ones_like(x) for name, x in where.items()}
        assert len(outcome(lambda where=where, v=v: hodiff.hvp(f, where, v))) == words, pattern

    def around(given: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        return lambda x: Scaled.apply(*given(x)).sum()

    for given, words in ((lambda x: (x, X), 0), (lambda x: (X, x), 1)):
        assert len(outcome(lambda given=given: hodiff.hvp(around(given), X, X))) == words


@CHECKPOINTS
def test_one_code_is_held_again_where_a_block_is_another_function() -> None:
    """What a block that runs again holds is in a graph of its own."""

    def blocks(given: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
        block = lambda z: Scaled.apply(*given(z))
        return lambda x: checkpoint(block, x, use_reentrant=False).sum()

    for given, words in ((lambda x: (x, X), 0), (lambda x: (X, x), 1)):
        assert len(outcome(lambda given=given: hodiff.hvp(blocks(given), X, X, checkpoint=True))) == words


def test_a_jacobian_product_asks_for_no_second_derivative() -> None:
    """It is held by the linearity of J'u in u, of which a Function with a wrong second derivative has nothing wrong."""
    f = lambda x: WrongSecond.apply(x).sin()
    assert not outcome(lambda: hodiff.jvp(f, X, X))
    torch.testing.assert_close(hodiff.jvp(f, X, X), (X**3).cos() * 3 * X**2 * X)
