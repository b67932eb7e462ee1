"""Blocks that keep only what enters them (`checkpoint=`): right wherever the plain route is, and lean; each refusal."""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.curvature._memory import LiveBytes
from hodiff.memory import _blocks
from tests.support.architectures import ARCHITECTURES
from tests.support.differences import relative_error
from tests.support.modules import Case
from tests.support.releases import CHECKPOINTS

pytestmark = CHECKPOINTS

D = torch.float64
NAMES = "layers.*"


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = D) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).to(dtype)


X = numbers(4, 6)


class Net(nn.Module):
    """Some layers, one after the other; with `own` under checkpoints of the model's own."""

    def __init__(self, layers: list[nn.Module], own: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.before, self.layers, self.after = nn.Linear(6, 6), nn.ModuleList(layers), nn.Linear(6, 1)
        self.own, self.reentrant = own, reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant) if self.own else layer(h)
        return self.after(h).square().mean()


class Layer(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = norm or nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def made(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, 0.0, 0.5)
    return model.to(D)


def like(model: nn.Module) -> dict[str, Tensor]:
    return {name: numbers(*p.shape, seed=7).to(p) for name, p in model.named_parameters() if p.requires_grad}


def loss(model: nn.Module) -> Tensor:
    return model(X)


def flat(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(-1)
    return torch.cat([flat(part) for part in (value.values() if isinstance(value, dict) else value)])


def agree(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert relative_error(flat(found), flat(expected)) <= tolerance


# --- models whose blocks are hard -----------------------------------------------------------------


class Keywords(Layer):
    def forward(self, x: Tensor, *, scale: Any = None) -> Any:  # type: ignore[override]
        return {"h": super().forward(x) * scale[0], "n": 3, "same": x, "twice": (x.sin(), None)}


class WithKeywords(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.layers:
            found = layer(h, scale=[h.mean(), 2.0])
            assert found["n"] == 3 and found["same"] is h and found["twice"][1] is None
            h = found["h"] + found["twice"][0] * found["same"]
        return self.after(h).square().mean()


class Tokens(nn.Module):
    """The first block takes integers; the embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(5, 6), Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tensor([[0, 3, 1], [4, 2, 3]])
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy((h @ self.layers[0].weight.T).flatten(0, 1), torch.arange(6) % 5)


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in [*self.layers, *self.layers]:
            h = layer(h).tanh()
        return self.after(h).square().mean()


class Parts(nn.Module):
    """A block with blocks inside, which match the pattern too; one is shared, and a parameter is of outside."""

    def __init__(self, shared: nn.Module, whole: list[Any]) -> None:
        super().__init__()
        self.first, self.shared, self.whole = Layer(), shared, whole

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.first(x)) * self.whole[0].scale


class Nested(Net):
    def __init__(self) -> None:
        shared, whole = Layer(), list[Any]()
        super().__init__([Parts(shared, whole), Parts(shared, whole)])
        self.scale = nn.Parameter(torch.ones(6))
        whole.append(self)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h += x
        F.silu(h, inplace=True)
        h[:, 0] *= 2
        return self.narrow(self.wide(h))


class Cut(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.wide(x).sin()
        return self.narrow(self.wide(x) * target) + x.detach().cos() * self.norm(x)


class Captures(Net):
    """A checkpointed function reads a tensor of outside that is computed, by its closure."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        gate = torch.sigmoid(h.mean(0))
        for layer in self.layers:
            h = checkpoint(lambda z, layer=layer: layer(z) * gate, h, use_reentrant=False)
        return self.after(h).square().mean()


class PastItsArgument(Net):
    """A checkpointed function reads its argument a second time, and what depends on it, by its closure."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.layers:
            gate = torch.sigmoid(h.sum(0))
            h = checkpoint(lambda z, layer=layer, h=h: layer(z) * h.sin(), h, use_reentrant=False)
            h = checkpoint(lambda z, layer=layer, gate=gate: layer(z) * gate, h, use_reentrant=False)
        return self.after(h).square().mean()


class ByHand(Net):
    """f differentiates through the blocks itself."""

    def forward(self, x: Tensor) -> Tensor:
        z = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(super().forward(z), z, create_graph=True)
        return g.square().sum()


class Inside(Layer):
    """A call of hodiff inside of a block."""

    def forward(self, x: Tensor) -> Tensor:
        return x + hodiff.grad(lambda z: self.narrow(self.wide(z).sin()).square().sum(), x.sin())


class ByFunc(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda z: self.narrow(self.wide(z).sin()).square().sum())(x.sin())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: Net([Layer(), Layer(), Layer()]),
    "keywords and containers": lambda: WithKeywords([Keywords(), Keywords()]),
    "tokens, tied": Tokens,
    "called twice": lambda: Twice([Layer(), Layer()]),
    "nested, shared": Nested,
    "in place inside": lambda: Net([InPlace(), InPlace()]),
    "stop-gradients": lambda: Net([Cut(), Cut()]),
    "batch norm, training": lambda: Net([Layer(nn.BatchNorm1d(6)), Layer(nn.BatchNorm1d(6))]),
    "batch norm": lambda: Net([Layer(nn.BatchNorm1d(6)), Layer(nn.BatchNorm1d(6))]).eval(),
    "dropout": lambda: Net([nn.Sequential(Layer(), nn.Dropout(0.4)), nn.Sequential(Layer(), nn.Dropout(0.4))]),
    "a view": lambda: Net([Layer(), nn.Flatten(), Layer()]),
    "by hand": lambda: ByHand([Layer(), Layer()]),
    "hodiff inside": lambda: Net([Inside(), Layer()]),
    "torch.func inside": lambda: Net([ByFunc(), Layer()]),
    "weight norm": lambda: Net([nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), Layer()]),
    "checkpoints inside": lambda: Net([Layer(), Layer()], own=True),
}
OWN: dict[str, Callable[[], nn.Module]] = {
    "non-reentrant": lambda: Net([Layer(), Layer()], own=True),
    "reentrant": lambda: Net([Layer(), Layer()], own=True, reentrant=True),
    "a closure": lambda: Captures([Layer(), Layer()]),
    "its argument again": lambda: PastItsArgument([Layer(), Layer()]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_product_by_named_blocks_is_the_plain_one(name: str) -> None:
    products = []
    for blocks in (False, NAMES):
        model = made(MODELS[name]())
        before = {key: buffer.clone() for key, buffer in model.named_buffers()}
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error", hodiff.HodiffWarning)
            products += [hodiff.hvp(loss, model, like(model), checkpoint=blocks)]
        products += [torch.rand(1)]  # as much was drawn
        assert all(torch.equal(buffer, before[key]) for key, buffer in model.named_buffers())
        assert all("_compiled_call_impl" not in part.__dict__ for part in model.modules())
    agree(products[2], products[0])
    assert torch.equal(products[3], products[1])


@pytest.mark.parametrize("name", OWN)
def test_a_product_by_the_models_own_checkpoints(name: str) -> None:
    model = made(OWN[name]())
    with warnings.catch_warnings():
        warnings.simplefilter("error", hodiff.HodiffWarning)
        found = hodiff.hvp(loss, model, like(model), checkpoint=True)
    model.reentrant = False  # type: ignore[assignment]
    agree(found, hodiff.hvp(loss, model, like(model)))
    assert _blocks._CALLED not in vars(_blocks._checkpointed) or not watched()


def test_options_of_a_models_own_checkpoints_are_not_the_blocks() -> None:
    class Options(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.before(x)
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
            return self.after(h).square().mean()

    model = made(Options([Layer(), Layer()]))
    agree(hodiff.hvp(loss, model, like(model), checkpoint=True), hodiff.hvp(loss, model, like(model)))


def watched() -> bool:
    return vars(_blocks._checkpointed)[_blocks._CALLED].__module__ == _blocks.__name__


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_zoo(case: Case) -> None:
    """By inputs and parameters at once, every module that the model calls a block."""
    found: list[Any] = []
    for blocks in (False, "*"):
        s = case.build()
        if not like(s.model) or not [*s.model.children()] or not s.x.is_floating_point():
            pytest.skip("no modules, or no parameters")
        v = [numbers(*s.x.shape, seed=1), like(s.model)]
        torch.manual_seed(2)
        try:
            found += [hodiff.hvp(lambda p, s=s: s.loss(p[1], p[0]), [s.x, s.model], v, checkpoint=blocks)]
        except hodiff.GraphError as error:
            found += [error]
    if isinstance(found[0], hodiff.GraphError):
        assert str(found[1])[:60] == str(found[0])[:60]
    else:
        agree(found[1], found[0])


# --- other routes through the same blocks ---------------------------------------------------------


def test_several_vectors_and_two_points() -> None:
    model = made(Net([Layer(), Layer()]))
    v = {name: torch.stack([x, x.sin(), 2 * x]) for name, x in like(model).items()}
    agree(hodiff.hvp(loss, model, v, checkpoint=NAMES), hodiff.hvp(loss, model, v))
    f = lambda s, m: m(X * s)
    s = torch.tensor(1.3, dtype=D)
    expected = hodiff.cross_hvp(f, s, model, like(model))
    agree(hodiff.cross_hvp(f, s, model, like(model), checkpoint=NAMES), expected)


def test_some_parameters_and_the_inputs_of_a_model() -> None:
    model = made(Net([Layer(), Layer()]))
    some = hodiff.select(model, "layers.0.*")
    v = {name: x for name, x in like(model).items() if name in some}
    f = lambda chosen: chosen.module(X)
    agree(hodiff.hvp(f, some, v, checkpoint=NAMES), hodiff.hvp(f, some, v))
    agree(hodiff.hvp(model, X, X.sin(), checkpoint=NAMES), hodiff.hvp(model, X, X.sin()))


def test_each_sample_has_its_own() -> None:
    class Samples(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.layers[0](self.before(x))).squeeze(-1).square()

    model = made(Samples([Layer()]))
    expected = hodiff.hvp(model, X, X.cos(), batch_ndim=1)
    agree(hodiff.hvp(model, X, X.cos(), batch_ndim=1, checkpoint=NAMES), expected)
    mixing = made(Samples([Layer(nn.BatchNorm1d(6))]))
    with pytest.warns(hodiff.BatchMixingWarning, match="samples"):
        hodiff.hvp(mixing, X, X.cos(), batch_ndim=1, checkpoint=NAMES)


@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(6)], ids=["layer norm", "batch norm"])
def test_a_third_derivative_against_differences(norm: nn.Module | None) -> None:
    """After the call: blocks run again as they were. Written out, as by the plain route."""
    model = made(Net([Layer(norm), Layer()]))
    v, p = like(model), model.before.weight

    def total(create: bool) -> Tensor:
        products = hodiff.hvp(loss, model, v, create_graph=create, checkpoint=NAMES)
        return flat(products).square().sum()

    (found,) = torch.autograd.grad(total(True), p)
    step, along = 1e-5, numbers(*p.shape, seed=5)
    with torch.no_grad():
        p += step * along
        up = total(False)
        p -= 2 * step * along
        down = total(False)
        p += step * along
    torch.testing.assert_close((found * along).sum(), (up - down) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_third_derivative_through_recurrent_blocks(kind: type[nn.Module]) -> None:
    """They keep their parameters in a list, and take it for current by weak references."""
    model = made(nn.ModuleList([nn.Linear(6, 6), kind(6, 6, batch_first=True)]))
    f = lambda m: (m[1](m[0](X)[:, None])[0] * X[:, None].cos()).sum()
    total = lambda m, **blocks: flat(hodiff.hvp(f, m, like(model), **blocks)).square().sum()
    agree(hodiff.grad(lambda m: total(m, checkpoint="1"), model), hodiff.grad(total, model))


def test_parameters_that_are_held_in_another_place_too_are_not_lost() -> None:
    class ByReference(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if getattr(self, "held", lambda: None)() is not self.weight:
                self.held, self.kept = weakref.ref(self.weight), [self.weight]
            elif self.weight is not real[0]:  # as of a list that is refreshed by setting alone
                return torch.tanh(x @ real[0].T)
            return torch.tanh(x @ self.kept[0].T)

    model = made(nn.Sequential(nn.Linear(6, 6), ByReference(6, 6, bias=False)))
    real = [model[1].weight]
    total = lambda m: flat(hodiff.hvp(lambda m: m(X).sin().sum(), m, like(model), checkpoint="1")).square().sum()
    with pytest.raises(hodiff.GraphError, match=r"does not read what its first run read.*weak references"):
        hodiff.grad(total, model)


def test_inside_another_call() -> None:
    model = made(Net([Layer(), Layer()]))
    f = lambda s: flat(hodiff.hvp(lambda m: m(X * s), model, like(model), checkpoint=NAMES)).sum()
    plain = lambda s: flat(hodiff.hvp(lambda m: m(X * s), model, like(model))).sum()
    s = torch.tensor(0.7, dtype=D)
    agree(hodiff.grad(f, s), hodiff.grad(plain, s))


def test_parameters_that_are_computed() -> None:
    model = made(Net([Layer(), Layer()], own=True))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    f = lambda s: functional_call(model, {name: s * p for name, p in parameters.items()}, (X,))
    s, v = torch.tensor(0.7, dtype=D), torch.tensor(1.0, dtype=D)
    agree(hodiff.hvp(f, s, v, checkpoint=True), hodiff.hvp(f, s, v))


def test_precision_is_that_of_the_first_run() -> None:
    model = made(Net([Layer(), Layer()])).float()
    v = like(model)

    def f(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(X.float()).float()

    plain = hodiff.hvp(f, model, v)
    agree(hodiff.hvp(f, model, v, checkpoint=NAMES), plain, 0.02)
    assert relative_error(flat(hodiff.hvp(lambda m: m(X.float()), model, v)), flat(plain)) > 1e-4


def test_inference_mode_around() -> None:
    model = made(Net([Layer(), Layer()]))
    expected = hodiff.hvp(loss, model, like(model))
    with torch.inference_mode():
        agree(hodiff.hvp(loss, model, like(model), checkpoint=NAMES), expected)
    with torch.no_grad():
        agree(hodiff.hvp(loss, model, like(model), checkpoint=NAMES), expected)


@pytest.mark.table(wide=3)
@pytest.mark.parametrize("form", ["argument", "closure", "nested"])
def test_what_inference_mode_has_made(form: str) -> None:
    """It keeps no count of writes; a block that runs again gets the copy that it had."""
    model = made(Net([Layer(), Layer()]))
    expected = hodiff.hvp(lambda m: m(X).square().sum(), model, like(model))
    with torch.inference_mode():
        x = X.clone()
    once = lambda run, *args: checkpoint(run, *args, use_reentrant=False)

    def f(m: nn.Module) -> Tensor:
        runs = {
            "argument": lambda: once(m, x),
            "closure": lambda: once(lambda: m(x)),
            "nested": lambda: once(lambda: once(lambda: m(x))),
        }
        return runs[form]().square().sum()

    agree(hodiff.hvp(f, model, like(model), checkpoint=True), expected)
    if form == "argument":  # PyTorch's own checkpoint refuses it
        with pytest.raises(RuntimeError, match="Inference tensors") as caught:
            hodiff.hvp(f, model, like(model))
        assert "clone it outside that mode" in "".join(caught.value.__notes__)
    else:
        agree(hodiff.hvp(f, model, like(model)), expected)


def test_hooks_of_modules() -> None:
    model = made(Net([Layer(), Layer()]))
    seen: list[float] = []
    model.layers[0].register_forward_hook(lambda module, args, output: output * 2)
    model.layers[1].register_forward_pre_hook(lambda module, args: (seen.append(1.0), args)[1])
    agree(hodiff.hvp(loss, model, like(model), checkpoint=NAMES), hodiff.hvp(loss, model, like(model)))
    assert seen
    model.layers[0].register_full_backward_hook(lambda module, grads, outputs: tuple(g * 2 for g in grads))
    with pytest.warns(hodiff.HodiffWarning, match="hook"):
        hodiff.hvp(loss, model, like(model), checkpoint=NAMES)


# --- blocks that cannot run again keep their graph, and it is said --------------------------------


class ChangesIts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return super().forward(x)


class ReturnsParts(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, -1)


class Joins(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.layers:
            h = torch.cat(layer(h), -1)
        return self.after(h).square().mean()


class Reads(Layer):
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.bias


class Attaches(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.bias = self.before.bias.sin()  # type: ignore[assignment]
        return super().forward(x)


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "changes its argument": (lambda: Net([ChangesIts(), Layer()]), r"layers\.0 keeps .* changes an argument in place"),
    "two of one memory": (lambda: Joins([ReturnsParts()]), "two tensors that share memory"),
    "reads a tensor of outside": (lambda: Attaches([Reads()]), "computed outside it"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_block_that_keeps_its_graph_is_right_and_named(name: str) -> None:
    build, text = WHOLE[name]
    model = made(build())
    expected = hodiff.hvp(loss, model, like(model))
    with pytest.warns(hodiff.HodiffWarning, match=text):
        agree(hodiff.hvp(loss, model, like(model), checkpoint=NAMES), expected)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * ctx.saved_tensors[0] ** 2 * g


class WithCube(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Cube.apply(x))


def test_an_operation_inside_is_refused_as_outside() -> None:
    model = made(Net([WithCube()]))
    with pytest.raises(hodiff.GraphError, match="Cube is @once_differentiable"):
        hodiff.hvp(loss, model, like(model), checkpoint=NAMES)
    model = made(Net([Hidden()]))
    with pytest.raises(hodiff.GraphError, match="multi_margin_loss"):
        hodiff.hvp(loss, model, like(model), checkpoint=NAMES)


class Hidden(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x)) + F.multi_margin_loss(x, torch.arange(4), p=2)


def test_a_block_that_computes_something_else_later_is_refused() -> None:
    calls: list[int] = []

    class Grows(Layer):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)[: 4 - len(calls) % 2]

    model = made(Net([Grows()]))
    with pytest.raises(hodiff.GraphError, match="something different from its first run"):
        hodiff.hvp(loss, model, like(model), checkpoint=NAMES)


def test_a_constant_that_is_changed_before_it_runs_again() -> None:
    model, mask = made(Net([Layer()])), torch.ones(6, dtype=D)

    def f(m: Any) -> Tensor:
        h = checkpoint(lambda x, scale: m.layers[0](x) * scale, m.before(X), mask, use_reentrant=False)
        mask.mul_(2)
        return m.after(h).square().mean()

    with pytest.raises(hodiff.GraphError, match="changed in place since"):
        hodiff.hvp(f, model, like(model), checkpoint=True)


# --- what is refused ------------------------------------------------------------------------------


def test_what_names_no_block() -> None:
    model = made(Net([Layer()]))
    v = like(model)
    for wrong, text in {
        "layer.*": "matches no module of x. Its modules: layers",
        "*.nothing": "matches no module",
        "layers.0.wide.*": "matches no module",
    }.items():
        with pytest.raises(hodiff.InputError, match=text):
            hodiff.hvp(loss, model, v, checkpoint=wrong)
    with pytest.raises(hodiff.InputError, match="f calls torch"):
        hodiff.hvp(loss, model, v, checkpoint=True)
    with pytest.raises(hodiff.InputError, match="f calls none of the modules after"):
        hodiff.hvp(lambda m: m.before(X).square().sum(), model, v, checkpoint="after")
    with pytest.raises(hodiff.InputError, match="expected True, False, or names"):
        hodiff.hvp(loss, model, v, checkpoint=3)  # type: ignore[call-overload]
    with pytest.raises(hodiff.InputError, match="Give the model as the point"):
        hodiff.hvp(lambda x: x.square().sum(), X, X, checkpoint=NAMES)
    for make in OPERATORS.values():  # before anything is evaluated
        with pytest.raises(hodiff.InputError, match="matches no module"):
            make(model, checkpoint="layer.*")
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match="f is a tensor"):
        hodiff.HessianOperator(model(x), x, checkpoint=True)
    with pytest.raises(hodiff.InputError, match="f is a tensor"):
        hodiff.hvp(model(x), x, X, checkpoint=NAMES)
    agree(hodiff.hvp(loss, model, v, checkpoint="layers"), hodiff.hvp(loss, model, v))  # of a list its items


# --- whose blocks they are ------------------------------------------------------------------------


def test_everything_is_put_back_where_f_raises() -> None:
    model = made(Net([Layer()], own=True))

    def f(m: nn.Module) -> Tensor:
        m(X)
        raise KeyError("mine")

    for blocks in (True, NAMES):
        with pytest.raises(KeyError, match="mine"):
            hodiff.hvp(f, model, like(model), checkpoint=blocks)
    assert all("_compiled_call_impl" not in part.__dict__ for part in model.modules())
    assert _blocks._met.open == [[None]] and not _blocks.watch_calls.on


def test_another_threads_checkpoints_are_its_own() -> None:
    model, other = made(Net([Layer()], own=True)), made(Net([Layer()], own=True))
    expected = torch.autograd.grad(other(X), other.before.weight)[0]
    found: list[Tensor] = []

    def theirs() -> None:
        found.extend(torch.autograd.grad(other(X), other.before.weight))

    def f(m: nn.Module) -> Tensor:
        thread = threading.Thread(target=theirs, daemon=True)
        thread.start()
        thread.join(timeout=60)
        return m(X)

    agree(hodiff.hvp(f, model, like(model), checkpoint=True), hodiff.hvp(loss, model, like(model)))
    agree(found[0], expected)


def test_two_threads_with_one_model_as_the_function() -> None:
    model = made(Net([Layer(), nn.Sequential(Layer())]))
    expected = hodiff.hvp(model, X, X.sin())
    products: list[Tensor] = []

    def work() -> None:
        for _ in range(5):
            products.append(hodiff.hvp(model, X, X.sin(), checkpoint=NAMES))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(products) == 15
    for product in products:
        agree(product, expected)
    assert all("_compiled_call_impl" not in part.__dict__ for part in model.modules())


def test_a_selective_checkpoint_stays_what_it_is() -> None:
    used: list[int] = []

    def contexts() -> Any:
        used.append(1)
        return checkpoints.noop_context_fn()

    model = made(Net([Layer()]))

    def f(m: Any) -> Tensor:
        h = checkpoint(m.layers[0], m.before(X), use_reentrant=False, context_fn=contexts)
        return m.after(h).square().mean()

    found = hodiff.hvp(f, model, like(model), checkpoint="before")
    assert used
    agree(found, hodiff.hvp(loss, model, like(model)))


# --- memory, in bytes -----------------------------------------------------------------------------


def peak(call: Callable[[], object]) -> int:
    call()
    with LiveBytes() as live:
        call()
    return live.peak


def deep(layers: int) -> tuple[nn.Module, Callable[[nn.Module], Tensor], int]:
    model, x = made(Net([Layer() for _ in range(layers)])), numbers(4000, 6)
    return model, lambda m: m(x), x.nbytes


@pytest.mark.parametrize("layers", [4, 12])
def test_a_product_keeps_what_enters_blocks_and_one_block(layers: int) -> None:
    model, f, size = deep(layers)
    v = like(model)
    plain, lean = (peak(lambda b=b: hodiff.hvp(f, model, v, checkpoint=b)) for b in (False, NAMES))
    assert lean <= (22 + 2 * layers) * size and plain >= 10 * layers * size
    if layers == 12:
        assert lean <= peak(lambda: hodiff.grad(f, model))


# --- operators ------------------------------------------------------------------------------------


DATA = [(numbers(4, 6, seed=s), numbers(4, 1, seed=s + 9)) for s in range(3)]


class Predicts(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.layers:
            h = layer(h)
        return self.after(h)


def predict(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def summed(outputs: Tensor, batch: Any) -> tuple[Tensor, float]:
    return (outputs - batch[1]).cosh().sum(), float(len(outputs))


OPERATORS: dict[str, Callable[..., Any]] = {
    "Hessian": lambda model, **o: hodiff.HessianOperator(
        lambda m, batch: summed(predict(m, batch), batch), model, data=DATA, **o
    ),
    "Gauss-Newton": lambda model, **o: hodiff.GaussNewtonOperator(predict, nn.MSELoss(), model, data=DATA, **o),
    "Gauss-Newton of a function": lambda model, **o: hodiff.GaussNewtonOperator(predict, summed, model, data=DATA, **o),
    "Fisher": lambda model, **o: hodiff.FisherOperator(
        predict, nn.MSELoss(), model, data=DATA, kind="mc", samples=2,
        generator=torch.Generator().manual_seed(1), **o,
    ),
    "empirical Fisher": lambda model, **o: hodiff.FisherOperator(
        predict, nn.MSELoss(), model, data=DATA, kind="empirical", **o
    ),
}  # fmt: skip


@pytest.mark.parametrize("budget", [0.5, 0], ids=["kept", "not kept"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, budget: float) -> None:
    model = made(Predicts([Layer(), Layer(nn.BatchNorm1d(6))]))
    before = {key: buffer.clone() for key, buffer in model.named_buffers()}
    plain, lean = (OPERATORS[name](model, memory_budget=budget, checkpoint=b) for b in (False, NAMES))
    v = like(model)
    several = {key: torch.stack([x, x.sin()]) for key, x in v.items()}
    for vector in (v, v, several):  # a first product, one of what is kept, and several
        agree(lean @ vector, plain @ vector)
    agree(lean.gradient, plain.gradient)
    assert torch.equal(lean.value, plain.value)
    part = {key: x for key, x in v.items() if key.startswith("layers.1.")}
    agree(lean.block("layers.1.*") @ part, plain.block("layers.1.*") @ part)
    assert lean.cost().passes == plain.cost().passes
    assert all(torch.equal(buffer, before[key]) for key, buffer in model.named_buffers())


@pytest.mark.wide
def test_a_matrix_and_the_derivative_of_a_solution() -> None:
    model = made(Predicts([Layer()]))
    for name in ("Hessian", "empirical Fisher"):
        plain, lean = (OPERATORS[name](model, checkpoint=b) for b in (False, NAMES))
        agree(lean.dense(), plain.dense())

    def trace(s: Tensor, b: Any) -> Tensor:
        A = hodiff.HessianOperator(lambda m: predict(m, [X * s]).cosh().sum(), model, checkpoint=b)
        return hodiff.trace(A, vectors=torch.eye(A.shape[0], dtype=D)[:, :2], create_graph=True).value

    s = torch.tensor(0.9, dtype=D)
    agree(hodiff.grad(lambda s: trace(s, NAMES), s), hodiff.grad(lambda s: trace(s, False), s))


class Unknown(torch.autograd.Function):
    """Without a derivative in forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


class WithUnknown(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Unknown.apply(x))


FORWARD = {
    "forward mode": (lambda: Layer(), 1),
    "stop-gradients": (lambda: Cut(), 1),
    "dropout": (lambda: nn.Sequential(Layer(), nn.Dropout(0.3)), 1),
    "no forward mode": (lambda: WithUnknown(), 1),
    "derivatives of its own": (lambda: Inside(), 0),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_both_routes_of_a_jvp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, tried = FORWARD[name]
    model = made(Predicts([build(), build()]))
    calls: list[str] = []
    pushed = _blocks.Tangents._pushed
    monkeypatch.setattr(
        _blocks.Tangents, "_pushed", lambda self, v, first: (calls.append("forward"), pushed(self, v, first))[1]
    )
    torch.manual_seed(5)
    plain = OPERATORS["Gauss-Newton"](model) @ like(model)
    torch.manual_seed(5)
    lean = OPERATORS["Gauss-Newton"](model, checkpoint=NAMES)
    agree(lean @ like(model), plain)
    assert len(calls) == tried * len(DATA)


@pytest.mark.parametrize("checkpoint_", [False, NAMES], ids=["plain", "blocks"])
@pytest.mark.parametrize("name", ["Hessian", "Gauss-Newton"])
@pytest.mark.parametrize("budget", [0.5, 0], ids=["kept", "not kept"])
def test_cost_tells_the_peak(name: str, checkpoint_: Any, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Predicts([Layer() for _ in range(6)]))
    monkeypatch.setattr(
        "tests.unit.memory.test_blocks.DATA", [(numbers(1000, 6, seed=s), numbers(1000, 1)) for s in (1, 2)]
    )
    make = lambda: OPERATORS[name](model, checkpoint=checkpoint_, memory_budget=budget)
    state = torch.get_rng_state()
    told = make().cost()
    assert torch.equal(torch.get_rng_state(), state)
    found = peak(lambda: make() @ like(model))
    assert abs(told.peak_bytes - found) <= 0.15 * found
    assert "peak of the first: " in str(told)


def test_when_memory_has_run_out() -> None:
    def f(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for call in (lambda: hodiff.hvp(f, X, X), lambda: hodiff.HessianOperator(f, X) @ X):
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            call()
        assert any("checkpoint=" in note for note in caught.value.__notes__)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        hodiff.grad(f, X)
    assert not getattr(caught.value, "__notes__", ())


# --- what is not the same when it runs again ---


class Cache:
    """An object that keeps what it is given, as a key-value cache."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return torch.cat(self.kept)


class Changing(nn.Module):
    """A layer that reads something that changes between two runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.count = nn.Linear(6, 6), kind, [0]
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.kind == "generator":
            return y * torch.rand(6, generator=self.generator, dtype=D)
        if self.kind == "NumPy":
            return y * float(np.random.default_rng(self.count[0]).random()) if self.step() else y
        if self.kind == "shuffled":
            return torch.tanh(y[np.random.default_rng(self.step()).permutation(len(y))])
        if self.kind == "one entry":
            return y + torch.arange(y.numel()).eq(5 * self.step()).view_as(y)
        if self.kind == "counter":
            self.step()
            return torch.tanh(self.linear(x) * self.count[0])
        if self.kind == "dict":
            beside["n"] = beside.get("n", 0) + 1
            return y * beside["n"]
        if self.kind == "list":
            beside.append(y)
            return y
        kept = beside.update(y)
        return x + torch.softmax(x @ kept.T, -1) @ kept

    def step(self) -> int:
        self.count[0] += 1
        return self.count[0]


@pytest.mark.parametrize("dtype", [D, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["shuffled", "one entry"])
def test_a_change_of_places_or_of_one_entry_among_many_is_seen(kind: str, dtype: torch.dtype) -> None:
    model, x = nn.ModuleList([Changing(kind)]).to(dtype), numbers(4000, 6, dtype=dtype)
    with pytest.raises(hodiff.GraphError, match="computes something different from its first run"):
        hodiff.hvp(lambda m: m[0](x).square().sum(), model, like(model), checkpoint="*")


@pytest.mark.parametrize("kind", ["generator", "NumPy", "counter", "dict", "list", "cache"])
def test_a_block_that_is_another_when_it_runs_again_is_refused(kind: str) -> None:
    model = nn.ModuleList([Changing(kind)]).to(D)
    beside: Any = {"dict": {}, "list": [], "cache": Cache()}.get(kind)

    def f(model: nn.ModuleList) -> Tensor:
        return model[0](X, beside).square().sum()

    v = like(model)
    words = "changes a list or a dict" if kind in ("dict", "list") else "something different from its first run"
    with pytest.raises(hodiff.GraphError, match=words):
        hodiff.hvp(f, model, v, checkpoint="*")
    G = hodiff.GaussNewtonOperator(
        lambda m, batch: m[0](batch[0], Cache() if kind == "cache" else beside), nn.MSELoss(), model, data=[(X, X)],
        checkpoint="*",
    )  # fmt: skip
    with pytest.raises(hodiff.GraphError, match=f"{words}|when it runs again"):
        G @ v


def test_a_buffer_that_is_replaced_by_each_run_is_refused_where_it_matters() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("mean", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
            return torch.tanh(y * self.mean)

    model = nn.Sequential(Layer()).to(D)
    G = hodiff.GaussNewtonOperator(lambda m, batch: m(batch[0]), nn.MSELoss(), model, data=[(X, X)], checkpoint="*")
    with pytest.raises(hodiff.GraphError, match="something different when it runs again"):
        G @ like(model)


class Table(nn.Embedding):
    """By the function, which takes places counted from the end, too."""

    padding = 0

    def forward(self, at: Tensor) -> Tensor:
        return F.embedding(at, self.weight, self.padding)


@pytest.mark.parametrize("padding", [0, 2, -1, -3])
def test_the_padding_of_an_embedding_is_a_constant_in_both_directions(padding: int) -> None:
    """The matrix is symmetric, and that without blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Table(4, 2), nn.Tanh(), nn.Linear(2, 2)).to(D)
    model[0].padding = padding
    data = [(torch.tensor([0, 1, 2, 3]), torch.zeros(4, 2, dtype=D))]
    made = [
        hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.MSELoss(), model, data=data, checkpoint=blocks).dense()
        for blocks in (False, "*")
    ]
    torch.testing.assert_close(*made, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cache", [True, False])
def test_blocks_inside_the_callers_autocast(cache: bool) -> None:
    """What autocast has kept of a first run has a graph of its own: a block that runs again casts anew."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))
    x, v = torch.randn(6, 4), {name: torch.randn_like(p) for name, p in net.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
        ours, plain = (
            hodiff.hvp(lambda m: m(x).float().square().sum(), net, v, checkpoint=blocks) for blocks in ("*", False)
        )
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=0.05, atol=0.05 * float(plain[name].abs().max()))
