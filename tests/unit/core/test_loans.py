import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _lending, _locks
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph
from hodiff._core._modules import ParameterLoan, StateLoan
from hodiff._core._where import Where
from hodiff.errors import HodiffWarning
from tests.support.limits import in_threads


def state_loan():
    return StateLoan(call(torch.sum, torch.ones(2), passes=1))


def test_parameters_are_replaced_wherever_they_occur_and_come_back():
    m = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    m[1].weight = m[0].weight
    weight, alias = m[0].weight, torch.zeros(2, 2)
    loan = ParameterLoan(Where(m))
    loan.take()
    loan.put([alias, *Where(m).tensors[1:]])
    assert m[0].weight is alias
    assert m[1].weight is alias
    loan.close()
    assert m[0].weight is weight
    assert m[1].weight is weight
    assert list(m[0]._parameters) == ["weight", "bias"]


def test_a_thread_of_the_engine_does_not_wait_for_another_call():
    """All passes of a device go through one thread, so those of the call that it waits for could not run."""
    m, found = nn.Linear(2, 2), []
    loan = ParameterLoan(Where(m))
    loan.take()

    def node():  # with PyTorch's thread-local values of the thread that began the pass
        torch._C._stash_obj_in_tls(_locks._KEY, -1)
        with pytest.raises(hodiff.GraphError, match="a copy of the module for each thread"):
            state_loan().take([m])
        found.append(True)

    thread = threading.Thread(target=node, daemon=True)
    thread.start()
    thread.join(5)
    loan.close()
    thread.join(5)
    assert found


def test_the_flat_weights_of_an_rnn_come_back_too():
    rnn = nn.LSTM(2, 3)
    real = list(rnn.parameters())
    hodiff.grad(lambda m: m(torch.ones(2, 1, 2))[0].sum(), rnn)
    assert all(a is b for a, b in zip(rnn._flat_weights, real, strict=True))
    hodiff.grad(lambda m: m["inner"](torch.ones(2, 1, 2))[0].sum(), nn.ModuleDict({"inner": rnn}))
    assert all(a is b for a, b in zip(rnn._flat_weights, real, strict=True))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("made", ["before", "there"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.Linear])
def test_a_product_inside_gives_back_what_the_call_around_has_lent(kind, made, create_graph):
    """It evaluates the operator there, and the function goes on with the leaves that it had."""
    model, x = kind(3, 2).double(), torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
    real = [*model.parameters()]

    def loss(m):
        outputs = m(x)
        return (outputs[0] if isinstance(outputs, tuple) else outputs).pow(3).sum()

    H = hodiff.HessianOperator(lambda m, _: (loss(m), 1), model, data=[()], memory_budget=0)
    v = torch.ones(H.shape[0], dtype=torch.float64)

    def f(m):
        first = loss(m)
        with torch.no_grad():
            _ = (H if made == "before" else hodiff.HessianOperator(loss, model)) @ v
        return first + loss(m)

    found = hodiff.grad(f, model, create_graph=create_graph)
    for got, expected in zip(found.values(), torch.autograd.grad(2 * loss(model), real), strict=True):
        torch.testing.assert_close(got, expected)
    assert all(now is before for now, before in zip(model.parameters(), real, strict=True))
    assert all(any(now is before for before in real) for now in getattr(model, "_flat_weights", ()))


def test_buffers_are_clones_until_the_last_borrower_leaves():
    norm = nn.BatchNorm1d(2)
    mean = norm.running_mean
    outer, inner = state_loan(), state_loan()
    outer.take([norm])
    clone = norm.running_mean
    inner.take([norm])
    assert clone is not mean
    assert norm.running_mean is clone
    inner.close()
    assert norm.running_mean is clone
    outer.close()
    assert norm.running_mean is mean


def test_a_buffer_that_requires_grad_stays_an_input_of_f():
    m = nn.Module()
    m.register_buffer("scale", torch.ones(2, requires_grad=True))
    loan = state_loan()
    scale = m.scale
    loan.take([m])
    assert m.scale is scale
    loan.close()


def test_another_thread_waits_and_reads_the_real_parameters():
    m = nn.Linear(2, 2)
    weight = m.weight
    loan = ParameterLoan(Where(m))
    loan.take()
    loan.put([torch.zeros(2, 2), torch.zeros(2)])
    seen = []

    def read():
        seen.append(Where(m).tensors[0])

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(0.1)
    assert seen == []
    loan.close()
    thread.join(10)
    assert seen == [weight]


def test_a_circle_of_waiting_threads_raises_instead_of_hanging():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    others = {module: Where(module) for module in (first, second)}
    ready = threading.Barrier(2)
    raised = []

    def take(mine, other):
        loan, another = ParameterLoan(Where(mine)), ParameterLoan(others[other])
        try:
            loan.take()
            ready.wait(10)
            another.take()
            another.close()
        except hodiff.GraphError as error:
            raised.append(str(error))
        finally:
            loan.close()

    in_threads(lambda: take(first, second), lambda: take(second, first))
    assert len(raised) == 1
    assert "each waits for the other" in raised[0]


def test_scripted_modules_are_refused():
    scripted = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(hodiff.InputError, match=r"TorchScript .* eager module"):
        hodiff.grad(lambda m: m(torch.ones(2)).sum(), scripted)


class Keeps(nn.Module):
    """A module that keeps what it computes: a hidden state, and a cache filled at its first call."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.state, self.cache, self.calls = torch.zeros(2), None, 0

    def forward(self, x):
        self.calls += 1
        if self.cache is None:
            self.cache = [self.w**2]
        self.state = torch.tanh(self.state + self.cache[0] * x)
        return self.state.sum()


def test_attributes_in_which_f_leaves_its_graph_are_put_back():
    m, x = Keeps(), torch.tensor([0.3, -0.2])
    first = hodiff.grad(lambda m: m(x), m)
    assert m.cache is None
    assert torch.equal(m.state, torch.zeros(2))
    assert m.calls == 1  # the rest is as any call of it would leave it
    assert torch.equal(hodiff.grad(lambda m: m(x), m)["w"], first["w"])
    torch.testing.assert_close(first["w"], (1 - torch.tanh(m.w**2 * x) ** 2) * 2 * m.w * x, check_stride=False)


def test_attributes_of_a_module_met_only_through_a_closure_too():
    m, x = Keeps(), torch.tensor([0.3, -0.2])
    hodiff.hvp(m, x, x)
    assert m.cache is None
    assert not m.state.requires_grad


def test_the_users_own_values_in_attributes_stay():
    m = Keeps()
    m.cache = theirs = [torch.ones(2)]
    hodiff.grad(lambda m: m(m.w), m)
    assert m.cache is theirs


def test_a_value_kept_elsewhere_is_refused_by_name():
    m, kept = Keeps(), {}

    def f(m):
        if "h" not in kept:
            kept["h"] = m.w**2
        return (kept["h"] * m.w).sum()

    hodiff.grad(f, m)
    with pytest.raises(hodiff.GraphError, match="kept from an earlier hodiff call"):
        hodiff.grad(f, m)


def test_the_refusal_names_the_attribute():
    m = Keeps()
    m.memory = []

    def f(m):
        if not m.memory:
            m.memory.append(m.w**2)
        return (m.memory[0] * m.w).sum()

    hodiff.grad(f, m)
    with pytest.raises(hodiff.GraphError, match="attribute 'memory' of the module"):
        hodiff.grad(f, m)


def test_parametrize_cached_is_filled_anew_by_each_call():
    class Square(nn.Module):
        def forward(self, w):
            return w**2

    m = nn.Linear(2, 1, bias=False).double()
    nn.utils.parametrize.register_parametrization(m, "weight", Square())
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    expected = hodiff.grad(lambda m: m(x).sum(), m)
    with nn.utils.parametrize.cached():
        m(x)
        theirs = dict(nn.utils.parametrize._cache)
        for _ in range(2):
            found = hodiff.grad(lambda m: m(x).sum(), m)
            assert all(torch.equal(a, b) for a, b in zip(found.values(), expected.values(), strict=True))
        assert nn.utils.parametrize._cache == theirs


@pytest.mark.parametrize("point", ["the module", "a tensor"])
def test_a_second_run_of_f_begins_as_the_first_one_did(point):
    """A weight norm is written out in another run; what the first one left in a buffer or an attribute is gone."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(2, 1))
            self.register_buffer("calls", torch.zeros(()))
            self.kept = None

        def forward(self, x):
            self.calls += 1
            self.kept = self.inner.bias.exp().sum() if self.kept is None else self.kept * 10
            return self.inner(x).square().sum() * self.calls + self.kept

    model, x = Counting(), torch.ones(3, 2)
    if point == "the module":
        value, _, _ = hodiff.value_grad_and_hessian(lambda model: model(x), model)
    else:
        value, _, _ = hodiff.value_grad_and_hessian(model, x)
    assert model.calls == 0
    assert model.kept is None
    torch.testing.assert_close(value, Counting.forward(model, x).detach())


class Within(torch.autograd.Function):
    """The identity; its backward is a reverse pass inside the reverse pass, as that of an activation checkpoint."""

    @staticmethod
    def forward(ctx: object, held: list[Tensor], x: Tensor) -> Tensor:
        ctx.held, ctx.x = held, x
        return held[0].detach()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> tuple[None, Tensor]:
        return None, *torch.autograd.grad(ctx.held[0], ctx.x, g)


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
def test_a_pass_in_a_thread_of_the_engine_s_has_the_modules_of_the_one_that_waits_for_it() -> None:
    """On a GPU that is every pass. On a processor the engine goes to another thread from the 60th pass in a pass on."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(6, 3)
    threads = set()

    def inner(m: nn.Module, weights: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return (weights * m(inputs)[:, 0].square()).mean()

    def outer(weights: Tensor, depth: int) -> Tensor:
        final = hodiff.unroll(inner, model, hodiff.rules.SGD(lr=0.1), 4, segments=2, args=(weights,))
        value = torch.func.functional_call(model, final, (inputs,)).square().sum()  # lends the model
        for _ in range(depth):
            value = Within.apply([value], weights)
        return value

    expected = hodiff.grad(outer, torch.ones(6), args=(0,))
    assert len(threads) == 1
    found: list[Tensor] = []
    call = lambda: found.append(hodiff.grad(outer, torch.ones(6), args=(70,)))
    thread = threading.Thread(target=call, daemon=True)  # so that a deadlock fails, and does not hang
    thread.start()
    thread.join(60)
    assert found and torch.equal(found[0], expected)
    assert len(threads) == 3


def joined(job):
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(None)  # without a limit: that is what is told


def submitted(job):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job).result()


def mapped(job):
    with ThreadPoolExecutor(1) as pool:
        list(pool.map(lambda _: job(), [0]))


def shut_down(job):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(job)


@pytest.mark.table(wide=4)
@pytest.mark.parametrize("wait", [joined, submitted, mapped, shut_down])
def test_a_function_that_waits_for_a_thread_with_a_call_on_the_module(wait):
    model, errors = nn.Linear(2, 1), []

    def job():
        try:
            hodiff.grad(lambda x: model(x).sum(), torch.ones(1, 2))
        except hodiff.GraphError as error:
            errors.append(str(error))

    def f(model):
        wait(job)
        return model(torch.ones(1, 2)).sum()

    [[gradient, *_]] = in_threads(lambda: [*hodiff.grad(f, model).values()], seconds=30)
    assert torch.equal(gradient, torch.ones(1, 2))
    assert "whose f waits for this thread to end: neither would go on" in errors[0]
    assert len(errors) == 1


@pytest.mark.wide
def test_a_function_that_waits_for_a_while_only(monkeypatch):
    """Or computes, while a thread waits for the module: that goes on, when it can."""
    monkeypatch.setattr(_locks, "LOOK", 0.01)
    model, found, threads = nn.Linear(2, 1), [], []
    call = lambda: hodiff.grad(lambda x: model(x).sum(), torch.ones(1, 2))

    def f(model, wait):
        for _ in range(2):
            thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
            threads.append(thread)
            thread.start()
            wait(thread)
        return model(torch.ones(1, 2)).sum()

    others = threading.Thread(target=time.sleep, args=(0.2,), daemon=True)
    waits = [lambda t: t.join(0.2), lambda t: time.sleep(0.2), lambda t: others.join(None)]
    others.start()
    for wait in waits:
        [[gradient, *_]] = in_threads(lambda wait=wait: [*hodiff.grad(f, model, args=(wait,)).values()], seconds=30)
        assert torch.equal(gradient, torch.ones(1, 2))
    for thread in threads:
        thread.join(30)
    expected = call()
    assert len(found) == 6 and all(torch.equal(each, expected) for each in found)


def test_parameters_that_are_not_differentiated_in_are_not_recorded_unless_they_may_be_later():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    recorded = []

    def f(some):
        recorded.append(some.module[0].weight.requires_grad)
        return some.module(torch.ones(1, 2)).sum()

    hodiff.grad(f, hodiff.select(net, "2.*"))
    hodiff.grad(f, hodiff.select(net, "2.*"), create_graph=True)
    assert recorded == [False, True]
    assert net[0].weight.requires_grad


D = torch.float64


@pytest.mark.parametrize("of", ["hessian", "hvp", "HessianOperator"])
def test_a_hook_that_changes_gradients_is_told(of: str) -> None:
    x = torch.tensor([1.0, 2.0], dtype=D)

    def f(z: Tensor) -> Tensor:
        h = 2 * z
        if h.requires_grad:
            h.register_hook(lambda g: 3 * g)
        return (h**2).sum()

    calls = {
        "hessian": lambda: hodiff.hessian(f, x),
        "hvp": lambda: hodiff.hvp(f, x, torch.ones_like(x)),
        "HessianOperator": lambda: hodiff.HessianOperator(f, x) @ torch.ones_like(x),
    }
    with pytest.warns(hodiff.HodiffWarning, match="hook"):
        calls[of]()


REGISTER = {
    "after": lambda m, factor: m.register_full_backward_hook(lambda m, given, out: factor and (factor * given[0],)),
    "before": lambda m, factor: m.register_full_backward_pre_hook(lambda m, out: factor and (factor * out[0],)),
    "not full": lambda m, factor: m.register_backward_hook(
        lambda m, given, out: factor and tuple(g * factor for g in given)
    ),
}


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
@pytest.mark.parametrize("factor", [None, 3])
@pytest.mark.parametrize("place", ["f", "closure", "where"])
@pytest.mark.parametrize("kind", REGISTER)
def test_a_hook_of_a_module_that_changes_gradients_is_told(kind: str, place: str, factor: int | None) -> None:
    """However the module comes into f; and a hook that only looks on is not."""
    m = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    REGISTER[kind](m[1], factor)
    x = torch.tensor([[1.0, 2.0]], dtype=D)
    calls = {
        "f": lambda: hodiff.hvp(m, x, x),
        "closure": lambda: hodiff.hvp(lambda z: m(z).sum(), x, x),
        "where": lambda: hodiff.hvp(lambda m: m(x).square().sum(), m, dict(m.named_parameters())),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        calls[place]()
    told = [str(w.message) for w in caught if issubclass(w.category, hodiff.HodiffWarning)]
    assert ["hook" in text for text in told] == ([True] if factor else [])


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_pytorchs_own_hooks_are_no_function_of_the_users() -> None:
    """A module hook goes through BackwardHookFunction, which is PyTorch's; that it may change gradients is told."""
    m = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    m[0].register_full_backward_hook(lambda module, given, out: None)
    x = torch.ones(1, 3, dtype=D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hodiff.hvp(lambda z: m(z).pow(2).sum(), x, x)
    assert not [w for w in caught if issubclass(w.category, hodiff.CustomFunctionWarning)]


@pytest.mark.parametrize("create_graph", [False, True])
def test_leaves_of_parameters_pass_for_parameters(create_graph):
    m = nn.Linear(2, 1).double()
    f = lambda m: sum((p**2).sum() for p in m.parameters() if isinstance(p, nn.Parameter)) + 0 * m.weight.sum()
    found = hodiff.grad(f, m, create_graph=create_graph)
    torch.testing.assert_close(found, {name: 2 * p.detach() for name, p in m.named_parameters()})
    torch.testing.assert_close(hodiff.hessian(f, m, matrix=True), 2 * torch.eye(3, dtype=D))
    assert not isinstance(found["bias"], nn.Parameter)


def test_frozen_parameters_pass_for_parameters_too():
    m = nn.Linear(2, 1).double()
    m.bias.requires_grad_(False)
    seen = []
    hodiff.grad(lambda m: seen.append(isinstance(m.bias, nn.Parameter)) or m.weight.sum(), m)
    assert seen == [True]


X = torch.tensor([0.3, -0.7, 1.1])


def test_backward_hooks_of_a_module_are_the_same_afterwards():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    handle = model[1].register_full_backward_hook(lambda module, given, received: None)
    before = model[1]._backward_hooks
    v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    hodiff.hvp(lambda model: model(X).square().sum(), model, v)
    assert model[1]._backward_hooks is before
    handle.remove()


def test_registering_hooks_is_pytorchs_own_afterwards():
    before = torch.Tensor.register_hook
    hodiff.hvp(lambda x: x.square().sum(), X, X)
    assert torch.Tensor.register_hook is before


def test_a_hook_changes_gradients_as_in_plain_pytorch():
    def f(x):
        h = 2 * x
        if h.requires_grad:
            h.register_hook(lambda g: 3 * g)
        return (h**2).sum()

    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    with pytest.warns(HodiffWarning, match="hook"):
        torch.testing.assert_close(hodiff.hvp(f, X, torch.ones(3)), second)


def test_a_hook_in_an_inner_call_is_told_there():
    def inner(x):
        h = 2 * x
        h.register_hook(lambda g: 3 * g)
        return (h**2).sum()

    def outer(x):
        with torch.no_grad():
            constant = hodiff.hvp(inner, X, X)
        return (x * constant).sum()

    with pytest.warns(HodiffWarning, match="hook"):
        hodiff.grad(outer, X)


def test_hooks_are_not_told_where_an_error_is():
    def f(x):
        h = 2 * x
        h.register_hook(lambda g: 3 * g)
        return (h**2).sum()

    with pytest.raises(ZeroDivisionError, match="of ours"), OutputGraph(call(f, X, passes=2)) as graph:
        torch.autograd.grad(graph.outputs, graph.leaves, create_graph=True)
        raise ZeroDivisionError("of ours")


class Remembers(nn.Module):
    """Keeps what it computed, one way or another."""

    def __init__(self, how):
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.how = how
        self.cache = {}

    def forward(self, x):
        result = self.inner(x)
        if self.how == "new attribute":
            self.kept = result
        elif self.how == "new dict":
            self.cache = {"kept": [result]}
        return result.square().sum()


@pytest.mark.parametrize("how", ["new attribute", "new dict"])
@pytest.mark.parametrize("point", ["module", "closure"])
def test_what_a_module_keeps_goes_with_the_call(how, point):
    model = Remembers(how)
    hodiff.grad(lambda model: model(X), model) if point == "module" else hodiff.grad(model, X)
    assert "kept" not in model.__dict__
    assert model.cache == {}


def test_what_is_kept_on_the_module_of_the_point_itself():
    layer = nn.Linear(3, 1)

    def f(layer):
        layer.kept = layer(X)
        return layer.kept.sum()

    hodiff.grad(f, layer)
    assert "kept" not in layer.__dict__


def test_what_a_forward_hook_keeps_on_a_layer():
    layer = nn.Linear(3, 1)
    model = nn.Sequential(layer)

    def keep(module, given, result):
        module.kept = result

    handle = layer.register_forward_hook(keep)
    hodiff.grad(lambda x: model(x).sum(), X)
    assert "kept" not in layer.__dict__
    handle.remove()


def test_what_an_inner_call_meets_is_tidied_by_it():
    """The leaves of an inner evaluation end with it: what a module keeps of them is gone before f goes on."""
    model, seen = Remembers("new attribute"), []

    def f(x):
        with torch.no_grad():
            hodiff.grad(model, X)
        seen.append("kept" in model.__dict__)
        return x.sum()

    hodiff.grad(f, X)
    assert seen == [False]


class Scaled(nn.Module):
    """With a buffer that counts, and one that it multiplies by; in its forward, or in a checkpoint of that."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.BatchNorm1d(2))
        self.checkpointed = checkpointed
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.checkpointed:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[return-value]
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x) * self.scale).tanh().sum()


GIVEN = {
    "a constant": lambda z: torch.tensor([1.0, 0.5]),
    "what depends on x": lambda z: z[0] * 1,
    "a parameter": lambda z: nn.Parameter(torch.tensor([1.0, 0.5])),
}
FAILING = {"by name": {"nope": torch.ones(2)}, "in the forward": {"scale": torch.ones(5)}}


def entries(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    tables = [(path, {**module._parameters, **module._buffers}) for path, module in model.named_modules()]
    return {f"{path}.{name}": (t, t.detach().clone()) for path, table in tables for name, t in table.items()}


def unchanged(model: nn.Module, before: dict[str, tuple[Tensor, Tensor]]) -> bool:
    now = entries(model)
    return all(now[name][0] is tensor and now[name][1].equal(value) for name, (tensor, value) in before.items())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("given", GIVEN)
def test_a_functional_call_leaves_buffers_as_they_were(given: str, checkpointed: bool, again: bool) -> None:
    x, model = torch.tensor([[0.3, 0.7], [1.1, -0.2]]), Scaled(checkpointed)
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    statistics = {"inner.0.running_mean": torch.ones(2), "inner.0.running_var": torch.ones(2)}
    before = entries(model)

    def f(z: Tensor) -> Tensor:
        kept = {name: value.clone() for name, value in statistics.items()}
        value = torch.func.functional_call(model, {**weights, **kept, "scale": GIVEN[given](z)}, (z,))
        return value + model(z) if again else value

    leaf = x.clone().requires_grad_()
    hodiff.hvp(f, leaf, x, create_graph=True).sum().backward()
    assert unchanged(model, before)
    hodiff.grad(f, x)
    hodiff.grad(lambda z: hodiff.hvp(f, z, x).sum(), x)
    swapped = lambda m: torch.func.functional_call(m, {"scale": torch.ones(2)}, (x,))
    hodiff.hvp(swapped, model, dict(model.named_parameters()))
    assert unchanged(model, before)


@pytest.mark.parametrize("name", FAILING)
def test_a_functional_call_that_fails_leaves_buffers_as_they_were(name: str) -> None:
    x, model = torch.tensor([[0.3, 0.7], [1.1, -0.2]]), Scaled()
    before = entries(model)
    with pytest.raises(RuntimeError, match=r"nope|size of tensor"):
        hodiff.hvp(lambda z: torch.func.functional_call(model, FAILING[name], (z,), strict=name == "by name"), x, x)
    assert unchanged(model, before)


def test_a_functional_call_of_an_embedding_that_renormalizes_is_refused() -> None:
    table = nn.Embedding(3, 2, max_norm=0.1)
    before = entries(table)
    f = lambda w: torch.func.functional_call(table, {"weight": w * 1}, (torch.arange(3),)).square().sum()
    with pytest.raises(hodiff.InputError, match="max_norm to None"):
        hodiff.grad(f, torch.full((3, 2), 0.01))
    assert unchanged(table, before)


@pytest.mark.parametrize(
    ("f", "points", "args", "kwargs", "words"),
    [
        (
            lambda a, b: a,
            [(X, X)],
            (),
            {},
            "missing a required argument: 'b'.*container is one point.*cross_hessian",
        ),
        (lambda a, b: a, [{"a": X, "b": X}], (), {}, "container is one point"),
        (lambda x: x, [X, X], (), {}, r"too many positional arguments.*points one by one: f\(x, y\)"),
        (lambda x, data: x, [X], (), {}, r"missing a required argument: 'data'.*args=\(data,\)"),
        (lambda x: x, [X], (1,), {}, "2 positional arguments.*the point first, then args= and kwargs="),
        (lambda x: x, [X], (), {"scale": 2}, r"unexpected keyword argument 'scale'"),
        (nn.Linear(6, 1), [X, X], (), {}, "points one by one"),
    ],
)
def test_a_call_that_cannot_be_is_explained(f, points, args, kwargs, words) -> None:
    error = _lending.signature_error(TypeError("raw"), f, points, args, kwargs)
    assert isinstance(error, hodiff.InputError) and re.search(words, str(error)), error


def test_a_type_error_of_f_itself_is_left_alone() -> None:
    assert _lending.signature_error(TypeError("inside"), lambda x: x + "a", [X], (), {}) is None
    assert _lending.signature_error(TypeError("no signature"), type, [X], (), {}) is None
