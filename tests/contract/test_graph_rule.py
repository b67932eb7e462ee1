"""Promises 2, 3 and 4: who builds the graph owns it; create_graph means one thing; nothing else is touched."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hodiff
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph
from hodiff.errors import GraphError
from tests.support.differences import relative_error
from tests.support.ledger import flags, leftovers, snapshot, without_collector
from tests.support.modules import BY_NAME, weighted_sum
from tests.support.oracle import trainable
from tests.support.properties import right_or_refused

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
V = torch.cos(torch.arange(6, dtype=D))


def f(x: Tensor) -> Tensor:
    return torch.tanh(torch.sin(x).cumsum(0) * x).square().sum()


def elementwise(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.exp(-(x**2))


def two(x: Tensor, y: Tensor) -> Tensor:
    return (torch.sin(x) * torch.exp(y) * x).sum() * y.sum()


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum()


FUNCTION_FORMS = {
    "grad": lambda x, **k: hodiff.grad(f, x, **k),
    "value_and_grad": lambda x, **k: hodiff.value_and_grad(f, x, **k),
    "vjp": lambda x, **k: hodiff.vjp(elementwise, x, V, **k),
    "jvp": lambda x, **k: hodiff.jvp(elementwise, x, V, **k),
    "jacobian": lambda x, **k: hodiff.jacobian(elementwise, x, **k),
    "jacobian, chunks": lambda x, **k: hodiff.jacobian(elementwise, x, chunk_size=2, **k),
    "hessian": lambda x, **k: hodiff.hessian(f, x, **k),
    "hessian, rows": lambda x, **k: hodiff.hessian(f, x, chunk_size=1, **k),
    "hessian, matrix": lambda x, **k: hodiff.hessian(f, x, matrix=True, **k),
    "value_grad_and_hessian": lambda x, **k: hodiff.value_grad_and_hessian(f, x, **k),
    "hvp": lambda x, **k: hodiff.hvp(f, x, V, **k),
    "hvp, many": lambda x, **k: hodiff.hvp(f, x, torch.stack([V, 2 * V, V**2]), **k),
    "cross_hessian": lambda x, **k: hodiff.cross_hessian(two, x, V, **k),
    "cross_hvp": lambda x, **k: hodiff.cross_hvp(two, x, V, V, **k),
    "hessian_diagonal": lambda x, **k: hodiff.hessian_diagonal(f, x, **k),
    "nth_derivative": lambda x, **k: hodiff.nth_derivative(elementwise, x, 3, **k),
    "derivatives": lambda x, **k: hodiff.derivatives(elementwise, x, 3, **k),
    "multi_grad": lambda x, **k: hodiff.multi_grad([f, lambda x: elementwise(x).sum()], x, **k),
    "multi_grad, shared": lambda x, **k: hodiff.multi_grad([product, product], x, shared=elementwise, **k),
}
forms = pytest.mark.parametrize("name", FUNCTION_FORMS)


def tensors_of(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in tensors_of(part)]


# --- the function form frees ------------------------------------------------------------------------------------------


@forms
def test_nothing_but_the_result_lives_on(name: str) -> None:
    left, result, ledger = leftovers(lambda: FUNCTION_FORMS[name](X))
    assert ledger.work() > 5  # the ledger saw the call
    assert left == 0, ledger.makers()
    assert all(not t.requires_grad and t.grad_fn is None for t in tensors_of(result))


@forms
def test_an_exception_of_f_passes_unchanged_and_leaves_the_switches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*points: Tensor) -> Tensor:
        points[0].sin().exp()
        raise ZeroDivisionError("mine")

    for function in ("f", "elementwise", "two", "product"):
        monkeypatch.setitem(globals(), function, failing)
    before = flags()
    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        FUNCTION_FORMS[name](X)
    assert flags() == before


@forms
def test_create_graph_keeps_exactly_until_the_result_dies(name: str) -> None:
    x = X.clone().requires_grad_()
    left, result, ledger = leftovers(lambda: FUNCTION_FORMS[name](x, create_graph=True))
    assert left > 0
    assert any(t.requires_grad for t in tensors_of(result))
    with without_collector():
        del result
        assert ledger.alive() == 0


MODEL_CALLS = {
    "grad": lambda m, x: hodiff.grad(lambda n: weighted_sum(n(x)), m),
    "hvp": lambda m, x: hodiff.hvp(
        lambda n: weighted_sum(n(x)), m, {n: torch.ones_like(p) for n, p in trainable(m).items()}
    ),
    "hessian": lambda m, x: hodiff.hessian(lambda n: weighted_sum(n(x)), m, matrix=True),
    "closure": lambda m, x: hodiff.hvp(lambda y: weighted_sum(m(y)), x, torch.ones_like(x)),
    "module as f": lambda m, x: hodiff.jacobian(m, x),
}
MODULES = [
    "BatchNorm1d, train",
    "BatchNorm1d, eval",
    "LayerNorm",
    "spectral_norm",
    "weight_norm",
    "tied weights",
    "frozen first layer",
    "checkpoint, non-reentrant",
    "checkpoint of BatchNorm1d",
    "LSTM",
    "InstanceNorm1d, tracking, train",
]


@pytest.mark.parametrize("call", MODEL_CALLS)
@pytest.mark.parametrize("module", MODULES)
def test_module_calls_leave_no_memory_and_no_trace(module: str, call: str) -> None:
    setting = BY_NAME[module].build()
    model, x = setting.model, setting.x
    fired: list[str] = []
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.register_hook(lambda g, n=name: fired.append(n))
            p.register_post_accumulate_grad_hook(lambda q, n=name: fired.append(n))
    before, switches, version = snapshot(model), flags(), x._version
    left, _, ledger = leftovers(lambda: MODEL_CALLS[call](model, x))
    assert left == 0, ledger.makers()
    assert snapshot(model) == before
    assert flags() == switches
    assert fired == []
    assert (x._version, x.requires_grad, x.grad) == (version, False, None)


@pytest.mark.parametrize("module", ["spectral_norm, by hook", "weight_norm, by hook"])
@pytest.mark.parametrize("call", MODEL_CALLS)
def test_hook_based_modules_keep_their_state(module: str, call: str) -> None:
    """Their ``module.weight`` is a plain attribute that stock PyTorch rebinds at each forward: memory is theirs."""
    setting = BY_NAME[module].build()
    before = snapshot(setting.model)
    first = MODEL_CALLS[call](setting.model, setting.x)
    assert snapshot(setting.model) == before
    again = MODEL_CALLS[call](setting.model, setting.x)
    first, again = (t.values() if isinstance(t, dict) else [t] for t in (first, again))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_failing_f_restores_the_module() -> None:
    setting = BY_NAME["BatchNorm1d, train"].build()
    before, switches = snapshot(setting.model), flags()

    def failing(model: nn.Module) -> Tensor:
        model(setting.x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        hodiff.hvp(failing, setting.model, {n: torch.ones_like(p) for n, p in setting.model.named_parameters()})
    with pytest.raises(KeyError, match="mine"):
        hodiff.grad(lambda x: failing(setting.model), setting.x)
    assert snapshot(setting.model) == before
    assert flags() == switches


def test_existing_grad_and_graph_of_the_caller_survive() -> None:
    """An encoder's graph, built outside, shares its parameters with the call; it must not be freed or fed."""
    setting = BY_NAME["LayerNorm"].build()
    model, x = setting.model, setting.x
    outside = model(x).sum()
    hodiff.hvp(setting.of_model, model, {n: torch.ones_like(p) for n, p in model.named_parameters()})
    outside.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    hodiff.grad(setting.of_model, model)
    assert all(torch.equal(p.grad, expected[n]) for n, p in model.named_parameters())


# --- the tensor form never frees --------------------------------------------------------------------------------------

TENSOR_FORMS = {
    "grad": lambda loss, y, x, **k: hodiff.grad(loss, x, **k),
    "value_and_grad": lambda loss, y, x, **k: hodiff.value_and_grad(loss, x, **k),
    "vjp": lambda loss, y, x, **k: hodiff.vjp(y, x, V, **k),
    "jvp": lambda loss, y, x, **k: hodiff.jvp(y, x, V, **k),
    "jacobian": lambda loss, y, x, **k: hodiff.jacobian(y, x, **k),
    "hessian": lambda loss, y, x, **k: hodiff.hessian(loss, x, **k),
    "value_grad_and_hessian": lambda loss, y, x, **k: hodiff.value_grad_and_hessian(loss, x, **k),
    "hvp": lambda loss, y, x, **k: hodiff.hvp(loss, x, V, **k),
    "hessian_diagonal": lambda loss, y, x, **k: hodiff.hessian_diagonal(loss, x, **k),
    "nth_derivative": lambda loss, y, x, **k: hodiff.nth_derivative(y, x, 2, **k),
    "multi_grad": lambda loss, y, x, **k: hodiff.multi_grad([loss, loss], x, **k),
}


def graph() -> tuple[Tensor, Tensor, Tensor]:
    x = X.clone().requires_grad_()
    y = elementwise(x)
    return (y * torch.tanh(y)).sum(), y, x


@pytest.mark.parametrize("name", TENSOR_FORMS)
@pytest.mark.parametrize("create_graph", [None, True, False])
def test_tensor_form_leaves_the_graph_to_its_owner(name: str, create_graph: bool | None) -> None:
    loss, _, x = graph()
    loss.backward()
    expected = x.grad.clone()
    loss, y, x = graph()
    for _ in range(2):
        TENSOR_FORMS[name](loss, y, x, create_graph=create_graph)
        assert x.grad is None
    loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("name", TENSOR_FORMS)
def test_tensor_form_equals_function_form(name: str) -> None:
    loss, y, x = graph()
    total = lambda x: (elementwise(x) * torch.tanh(elementwise(x))).sum()
    what = {"vjp": elementwise, "jvp": elementwise, "jacobian": elementwise, "nth_derivative": elementwise}.get(
        name, total
    )
    got = TENSOR_FORMS[name](loss, y, x)
    expected = TENSOR_FORMS[name](what, what, X)
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b)


def test_tensor_form_of_a_non_leaf_and_of_module_parameters() -> None:
    setting = BY_NAME["GELU"].build()
    hidden = setting.model[0](setting.x)
    loss = weighted_sum(setting.model[2](setting.model[1](hidden)))
    by_function = hodiff.hessian(lambda h: weighted_sum(setting.model[2](setting.model[1](h))), hidden.detach())
    torch.testing.assert_close(hodiff.hessian(loss, hidden), by_function)
    by_name = hodiff.grad(loss, setting.model)
    assert list(by_name) == [n for n, _ in setting.model.named_parameters()]
    loss.backward()
    assert all(torch.equal(by_name[n], p.grad) for n, p in setting.model.named_parameters())


# --- modes ------------------------------------------------------------------------------------------------------------

MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", enabled=False),
}


@forms
@pytest.mark.parametrize("mode", MODES)
def test_works_under_any_mode(name: str, mode: str) -> None:
    expected = FUNCTION_FORMS[name](X)
    with MODES[mode]():
        before = flags()
        got = FUNCTION_FORMS[name](X)
        assert flags() == before
    for a, b in zip(tensors_of(got), tensors_of(expected), strict=True):
        torch.testing.assert_close(a.clone(), b)
        assert not a.requires_grad


@forms
def test_works_with_inference_tensors(name: str) -> None:
    with torch.inference_mode():
        x = X.clone()
    assert x.is_inference()
    for a, b in zip(tensors_of(FUNCTION_FORMS[name](x)), tensors_of(FUNCTION_FORMS[name](X)), strict=True):
        torch.testing.assert_close(a.clone(), b)


def test_works_with_a_model_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
        x = torch.randn(4, 6, dtype=D)
    before = snapshot(model)
    plain = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    plain.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    where = {"m": model, "x": x}
    ours = hodiff.grad(lambda t: weighted_sum(t["m"](t["x"])), where)
    theirs = hodiff.grad(lambda t: weighted_sum(t["m"](t["x"])), {"m": plain, "x": x.clone()})
    for a, b in zip([ours["x"], *ours["m"].values()], [theirs["x"], *theirs["m"].values()], strict=True):
        torch.testing.assert_close(a.clone(), b)
    assert snapshot(model) == before
    ones = torch.ones(4, 6, dtype=D)
    through = hodiff.hvp(lambda y: weighted_sum(model(y)), x, ones)  # met only through a closure
    torch.testing.assert_close(through.clone(), hodiff.hvp(lambda y: weighted_sum(plain(y)), x.clone(), ones))
    assert snapshot(model) == before


@pytest.mark.parametrize("anomaly", [False, True])
def test_grad_mode_of_f_is_on_and_the_callers_is_kept(anomaly: bool) -> None:
    seen = []

    def spy(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return (x**3).sum()

    with torch.no_grad():
        hodiff.hvp(spy, X, V)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        hodiff.hvp(spy, X, V)
        assert torch.is_inference_mode_enabled()
    assert seen == [(True, False)] * 2


def test_randomness_is_drawn_by_f_as_by_any_call() -> None:
    """One draw per evaluation of f, none of hodiff's own: five training steps see five masks."""
    dropout = nn.Dropout(0.5)
    torch.manual_seed(3)
    dropout(X)
    after_one = torch.get_rng_state()
    torch.manual_seed(3)
    hodiff.hvp(lambda x: (dropout(x) ** 3).sum(), X, V)
    assert torch.equal(torch.get_rng_state(), after_one)
    masks = {tuple((hodiff.grad(lambda x: dropout(x).sum(), X) == 0).tolist()) for _ in range(8)}
    assert len(masks) > 1


# --- create_graph -----------------------------------------------------------------------------------------------------


def test_create_graph_defaults_to_false_and_nested_calls_compose() -> None:
    """d/dx of sum(H v) of sum(x^4): 12 x^2 v, then 24 x v."""
    quartic = lambda x: (x**4).sum()
    assert not hodiff.hvp(quartic, X.clone().requires_grad_(), V).requires_grad
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.hvp(quartic, x, V).sum(), X), 24 * X * V)
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.grad(quartic, x).sum(), X), 12 * X**2)
    torch.testing.assert_close(
        hodiff.hessian_diagonal(lambda x: hodiff.nth_derivative(lambda t: t**4, x, 2).sum(), X),
        torch.full_like(X, 24.0),
    )
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.hessian(quartic, x).sum(), X), 24 * X)
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.jvp(lambda t: t**4, x, V).sum(), X), 12 * X**2 * V)
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.vjp(lambda t: t**4, x, V).sum(), X), 12 * X**2 * V)
    torch.testing.assert_close(hodiff.grad(lambda x: hodiff.jacobian(lambda t: t**4, x).sum(), X), 12 * X**2)
    torch.testing.assert_close(hodiff.jacobian(lambda x: hodiff.grad(quartic, x), X), torch.diag(12 * X**2))
    torch.testing.assert_close(
        hodiff.grad(lambda x: hodiff.cross_hessian(lambda a, b: (a**2 * b**2).sum(), x, x).sum(), X), 8 * X
    )


def test_three_levels_deep() -> None:
    """Derivatives of x^5 by nesting gradients: 5x^4, 20x^3, 60x^2, 120x."""
    fifth = lambda x: (x**5).sum()
    g = fifth
    for expected in (5 * X**4, 20 * X**3, 60 * X**2, 120 * X):
        inner = g
        torch.testing.assert_close(hodiff.grad(inner, X), expected)
        g = lambda x, inner=inner: hodiff.grad(inner, x).sum()


def test_no_grad_inside_f_makes_an_inner_call_detached() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = hodiff.grad(lambda t: (t**3).sum(), x)
        assert not inner.requires_grad
        return (inner * x).sum()

    torch.testing.assert_close(hodiff.grad(f, X), 3 * X**2)


def test_explicit_create_graph_wins_inside_f_and_under_no_grad() -> None:
    def f(x: Tensor) -> Tensor:
        inner = hodiff.grad(lambda t: (t**3).sum(), x, create_graph=False)
        return (inner * x).sum()

    torch.testing.assert_close(hodiff.grad(f, X), 3 * X**2)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        g = hodiff.grad(lambda t: (t**3).sum(), x, create_graph=True)
    assert g.requires_grad
    torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 6 * X)


def test_create_graph_reaches_where_and_closures() -> None:
    """The Laplacian-loss mistake: with a detached default the weight would learn nothing."""
    x, w = X.clone().requires_grad_(), torch.tensor(0.7, dtype=D, requires_grad=True)
    out = hodiff.hvp(lambda t: (w * t**4).sum(), x, V, create_graph=True)
    gx, gw = torch.autograd.grad(out.sum(), (x, w))
    torch.testing.assert_close(gx, 24 * 0.7 * X * V)
    torch.testing.assert_close(gw, (12 * X**2 * V).sum())


def test_create_graph_is_differentiable_in_the_vector_and_in_args() -> None:
    x, v, a = (t.clone().requires_grad_() for t in (X, V, V + 2))
    out = hodiff.hvp(lambda t, a: (a * t**3).sum(), x, v, args=(a,), create_graph=True)
    gv, ga = torch.autograd.grad(out.sum(), (v, a))
    torch.testing.assert_close(gv, 6 * (V + 2) * X)
    torch.testing.assert_close(ga, 6 * X * V)


def test_create_graph_of_a_module_reaches_its_parameters() -> None:
    setting = BY_NAME["GELU"].build()
    parameters = dict(setting.model.named_parameters())
    product = hodiff.grad(setting.of_model, setting.model, create_graph=True)
    norm = sum(g.square().sum() for g in product.values())
    norm.backward()
    twice_hg = hodiff.hvp(setting.of_model, setting.model, {n: g.detach() for n, g in product.items()})
    for name, p in parameters.items():
        torch.testing.assert_close(p.grad, 2 * twice_hg[name])


def test_a_constant_result_has_zero_derivative_by_the_point_and_no_hidden_leaf() -> None:
    """A linear function's gradient is constant: differentiable by a point that requires grad, by nothing else."""
    assert not hodiff.grad(lambda t: (2 * t).sum(), X, create_graph=True).requires_grad
    x = X.clone().requires_grad_()
    constant = hodiff.grad(lambda t: (2 * t).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(constant.sum(), x)[0], torch.zeros_like(X))
    assert torch.equal(
        hodiff.hessian(lambda t: hodiff.grad(lambda s: (2 * s).sum(), t).sum(), X), torch.zeros(6, 6, dtype=D)
    )
    torch.testing.assert_close(hodiff.hvp(lambda t: (2 * t).sum(), X, V), torch.zeros_like(X))


def test_value_is_detached_unless_differentiable() -> None:
    w = torch.ones(6, dtype=D, requires_grad=True)
    value, g = hodiff.value_and_grad(lambda x: (w * x**2).sum(), X)
    assert not value.requires_grad and not g.requires_grad
    value, g = hodiff.value_and_grad(lambda x: (w * x**2).sum(), X, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value + g.sum(), w)[0], X**2 + 2 * X)


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["BatchNorm1d, train", "TransformerEncoderLayer", "spectral_norm"])
def test_eight_threads_on_one_module(module: str) -> None:
    setting = BY_NAME[module].build()
    vector = {n: torch.cos(p.detach()) for n, p in setting.model.named_parameters()}
    tasks = [
        lambda: torch.cat([t.flatten() for t in hodiff.hvp(setting.of_model, setting.model, vector).values()]),
        lambda: hodiff.hvp(setting.of_input, setting.x, torch.ones_like(setting.x)),
        lambda: torch.cat([t.flatten() for t in hodiff.grad(setting.of_model, setting.model).values()]),
        lambda: hodiff.grad(lambda x: setting.of_input(x), setting.x),
    ] * 2
    before, switches = snapshot(setting.model), flags()
    serial = [task() for task in tasks]
    results: list[Tensor | Exception | None] = [None] * len(tasks)
    barrier = threading.Barrier(len(tasks))

    def work(i: int) -> None:
        try:
            barrier.wait(timeout=30)
            for _ in range(3):
                results[i] = tasks[i]()
        except Exception as error:  # shown by the assertion below
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    for got, expected in zip(results, serial, strict=True):
        assert isinstance(got, Tensor), repr(got)
        assert relative_error(got, expected) < 1e-12
    assert flags() == switches
    assert snapshot(setting.model) == before


def test_ledger_counts_what_a_careless_call_keeps() -> None:
    """The memory tests could not fail if the ledger were blind."""
    kept = []

    def careless() -> Tensor:
        x = X.clone().requires_grad_()
        y = f(x)
        kept.append(y)
        return torch.autograd.grad(y, x, create_graph=True)[0].detach()

    left, _, ledger = leftovers(careless)
    assert left >= 3 * X.nbytes, ledger.makers()  # cumsum, tanh and the like are saved for the backward pass


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


class Squared(nn.Module):
    """It computes from its weight once, and keeps the result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0], dtype=D))
        self.c: Tensor | None = None

    def forward(self) -> Tensor:
        if self.c is None:
            self.c = self.w**2
        return (self.c * self.w).sum()


class Square(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w**2


def test_a_lazily_cached_tensor() -> None:
    m = Squared()
    expected = {"w": 3 * m.w.detach() ** 2}
    torch.testing.assert_close(hodiff.grad(lambda m: m(), m), expected)
    right_or_refused(lambda: hodiff.grad(lambda m: m(), m), expected, r"\bc\b")


def test_a_lazily_cached_tensor_between_the_batches_of_an_operator() -> None:
    m = Squared()
    w = m.w.detach()
    loss = lambda m, batch: (m() * batch, 1)
    right_or_refused(lambda: hodiff.HessianOperator(loss, m, data=[1.0, 3.0]).dense(), torch.diag(6 * w * 2), r"\bc\b")


def test_nothing_of_ours_stays_in_the_users_module() -> None:
    """Their own backward afterwards: right, or it says what happened; not a smaller gradient."""
    m = Squared()
    hodiff.grad(lambda m: m(), m)
    m().backward()
    assert m.w.grad is not None
    torch.testing.assert_close(m.w.grad, 3 * m.w.detach() ** 2)


def test_parametrize_cached() -> None:
    m = nn.Linear(2, 1, bias=False).double()
    parametrize.register_parametrization(m, "weight", Square())
    raw = m.parametrizations.weight.original.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=D)
    f = lambda m: (m(x) ** 2).sum()
    y = (raw**2 * x).sum()
    expected = {"parametrizations.weight.original": 4 * y * raw * x}
    with parametrize.cached():
        for _ in range(2):
            torch.testing.assert_close(hodiff.grad(f, m), expected)
        f(m).backward()
    torch.testing.assert_close(m.parametrizations.weight.original.grad, expected["parametrizations.weight.original"])


def test_parametrize_cached_already_filled_by_the_user() -> None:
    m = nn.Linear(2, 1, bias=False).double()
    parametrize.register_parametrization(m, "weight", Square())
    raw = m.parametrizations.weight.original.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=D)
    f = lambda m: (m(x) ** 2).sum()
    with parametrize.cached():
        f(m)
        expected = {"parametrizations.weight.original": 4 * (raw**2 * x).sum() * raw * x}
        torch.testing.assert_close(hodiff.grad(f, m), expected)


class Stateful(nn.Module):
    """A recurrent module that keeps its state between calls, without detaching it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=D))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.w * x if self.state is None else self.state * self.w + x
        return self.state


def test_a_recurrent_state() -> None:
    m, x = Stateful(), torch.tensor(2.0, dtype=D)
    hodiff.grad(lambda m: m(x), m)
    right_or_refused(lambda: hodiff.grad(lambda m: m(x), m), {"w": x}, "state")


def test_a_state_in_a_closure() -> None:
    kept: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        if not kept:
            kept.append(z**2)
        return (kept[0] * z).sum()

    expected = hodiff.grad(f, POINT)
    torch.testing.assert_close(expected, 3 * POINT**2)
    right_or_refused(lambda: hodiff.grad(f, POINT), expected, r"(?i)ended|earlier|previous|kept|evaluation")


@pytest.mark.parametrize("reached", ["the point", "a closure"])
def test_a_table_that_renormalizes_itself_is_refused_and_left_alone(reached: str) -> None:
    """Plain PyTorch changes it in place, and differentiates at another point than the value's."""
    table = nn.Embedding(3, 2, max_norm=0.5).double()
    before = table.weight.detach().clone()
    with pytest.raises(hodiff.InputError, match=r"Embedding\(max_norm=...\).*max_norm to None"):
        if reached == "the point":
            hodiff.grad(lambda m: (m(torch.tensor([0, 2])) ** 3).sum(), table)
        else:
            hodiff.grad(lambda y: (table(torch.tensor([0, 1])) * y).sum(), torch.ones(2, dtype=D))
    assert torch.equal(table.weight, before)
    table.max_norm, table.weight.data = None, table.weight.data.renorm(2, 0, 0.5)  # as the error says
    found = hodiff.grad(lambda m: (m(torch.tensor([0, 2])) ** 3).sum(), table)["weight"]
    torch.testing.assert_close(found[[0, 2]], 3 * table.weight.detach()[[0, 2]] ** 2)


THREE = torch.tensor([0.3, -0.7, 1.1])


def test_a_hidden_leaf_collects_no_gradient():
    w = torch.ones(3, requires_grad=True)
    with OutputGraph(call(lambda x: (w * x**2).sum(), THREE, passes=1, create_graph=True)) as graph:
        (gradient,) = torch.autograd.grad(graph.outputs, graph.leaves, create_graph=True)
    gradient.sum().backward()
    assert w.grad is not None
    assert graph.leaves[0].grad is None


def test_an_argument_in_place_reaches_nothing_of_the_callers():
    x = THREE.clone().requires_grad_() * 1
    before = x.detach().clone()
    with pytest.raises((RuntimeError, GraphError), match=r"[Ii]n.?place"):
        hodiff.grad(lambda z: z.mul_(2).sum(), x, create_graph=True)
    assert torch.equal(x.detach(), before)


def drawing(constant):
    def f(x):
        return (torch.rand(3) * x**2 * constant).sum()

    return f


def test_a_run_for_tensors_of_inference_mode_draws_what_the_first_one_drew():
    with torch.inference_mode():
        constant = torch.full((3,), 2.0)
    torch.manual_seed(1)
    found = hodiff.grad(drawing(constant), THREE)
    after = torch.rand(1)
    torch.manual_seed(1)
    expected = hodiff.grad(drawing(constant.clone()), THREE)
    assert torch.equal(found, expected)
    assert torch.equal(after, torch.rand(1))


def test_a_run_for_a_weight_norm_draws_what_the_first_one_drew():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))

    def f(model):
        return (model(THREE) * torch.rand(1)).square().sum()

    torch.manual_seed(1)
    value = f(model).detach()
    after = torch.rand(1)
    torch.manual_seed(1)
    torch.testing.assert_close(hodiff.value_grad_and_hessian(f, model)[0], value)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("fails", [False, True])
def test_an_explanation_draws_nothing(fails):
    calls = []

    def f(x):
        calls.append(1)
        if fails and len(calls) > 1:
            raise ZeroDivisionError
        return (torch.rand(3) * x.detach()).sum()

    torch.manual_seed(1)
    torch.rand(3)
    after = torch.rand(1)
    torch.manual_seed(1)
    with pytest.raises(GraphError, match="is cut"):
        hodiff.grad(f, THREE)
    assert len(calls) == 2
    assert torch.equal(torch.rand(1), after)


def test_an_inference_tensor_that_f_changes_stays_changed():
    with torch.inference_mode():
        one, constant = torch.ones(3), torch.ones(3)

    def f(x):
        x = x * one  # which makes f run again, with copies
        constant.add_(1)
        return (x * constant).sum()

    torch.testing.assert_close(hodiff.grad(f, THREE), torch.full((3,), 2.0))


def test_a_result_is_a_constant_to_a_later_call():
    """Its graph leads to a leaf of ours; but the caller was given it, and may well use it."""
    result = hodiff.grad(lambda x: (x**3).sum(), THREE, create_graph=True)
    torch.testing.assert_close(hodiff.grad(lambda y: (y * result).sum(), THREE), (3 * THREE**2))


def test_what_f_kept_of_a_differentiable_call_is_no_constant():
    kept = []

    def f(x):
        kept.append(x.sin())
        return (kept[0] * x).sum()

    hodiff.grad(f, THREE, create_graph=True)
    with pytest.raises(GraphError, match="kept"):
        hodiff.grad(f, THREE, create_graph=True)


def test_a_point_that_is_no_leaf_is_reached_past_the_argument():
    x = THREE.clone().requires_grad_() * 1
    with pytest.raises(GraphError, match="other than through its argument"):
        hodiff.grad(lambda z: (z * x).sum(), x)


def test_a_constant_gradient_of_a_given_tensor_stays_connected():
    x = THREE.clone().requires_grad_()
    result = hodiff.grad((3 * x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], torch.zeros(3))
