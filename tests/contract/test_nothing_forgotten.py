"""What the first tests did not see when bugs were planted: restoration, stale caches, fallbacks, second runs."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import hodiff
from hodiff._core import _call, _independence, _messages, _settings, _vectors, _versions
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._where import Where
from hodiff.errors import BatchMixingWarning, CustomFunctionWarning, GraphError, HodiffWarning, InputError

X = torch.tensor([0.3, -0.7, 1.1])


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


# --- what an evaluation borrows comes back


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

    with pytest.raises(ZeroDivisionError, match="of ours"), Graph(call(f, X, passes=2)) as ev:
        torch.autograd.grad(ev.outputs, ev.leaves, create_graph=True)
        raise ZeroDivisionError("of ours")


def test_cudnn_is_switched_back():
    before = torch.backends.cudnn.enabled
    try:
        for wanted in (True, False):
            torch.backends.cudnn.enabled = wanted
            undo = []
            _settings.no_cudnn.enter(undo)
            assert not torch.backends.cudnn.enabled
            _settings.undo_all(undo)
            assert torch.backends.cudnn.enabled is wanted
    finally:
        torch.backends.cudnn.enabled = before


class Keeps(nn.Module):
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
    model = Keeps(how)
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
    model, seen = Keeps("new attribute"), []

    def f(x):
        with torch.no_grad():
            hodiff.grad(model, X)
        seen.append("kept" in model.__dict__)
        return x.sum()

    hodiff.grad(f, X)
    assert seen == [False]


def test_a_hidden_leaf_collects_no_gradient():
    w = torch.ones(3, requires_grad=True)
    with Graph(call(lambda x: (w * x**2).sum(), X, passes=1, create_graph=True)) as ev:
        (gradient,) = torch.autograd.grad(ev.outputs, ev.leaves, create_graph=True)
    gradient.sum().backward()
    assert w.grad is not None
    assert ev.leaves[0].grad is None


def test_an_argument_in_place_reaches_nothing_of_the_callers():
    x = X.clone().requires_grad_() * 1
    before = x.detach().clone()
    with pytest.raises((RuntimeError, GraphError), match=r"[Ii]n.?place"):
        hodiff.grad(lambda z: z.mul_(2).sum(), x, create_graph=True)
    assert torch.equal(x.detach(), before)


def test_a_table_in_a_closure_keeps_its_graph_where_the_result_does():
    table = nn.Embedding(4, 3, max_norm=10.0)
    index = torch.tensor([1, 2])
    result = hodiff.grad(lambda x: (table(index) * x**2).sum(), X, create_graph=True)
    (found,) = torch.autograd.grad(result.sum(), table.weight)
    expected = torch.zeros(4, 3)
    expected[index] = 2 * X
    torch.testing.assert_close(found, expected)


# --- what f draws


def drawing(constant):
    def f(x):
        return (torch.rand(3) * x**2 * constant).sum()

    return f


def test_a_run_for_tensors_of_inference_mode_draws_what_the_first_one_drew():
    with torch.inference_mode():
        constant = torch.full((3,), 2.0)
    torch.manual_seed(1)
    found = hodiff.grad(drawing(constant), X)
    after = torch.rand(1)
    torch.manual_seed(1)
    expected = hodiff.grad(drawing(constant.clone()), X)
    assert torch.equal(found, expected)
    assert torch.equal(after, torch.rand(1))


def test_a_run_for_a_weight_norm_draws_what_the_first_one_drew():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))

    def f(model):
        return (model(X) * torch.rand(1)).square().sum()

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
    with pytest.raises(GraphError, match="cut"):
        hodiff.grad(f, X)
    assert len(calls) == 2
    assert torch.equal(torch.rand(1), after)


def test_an_inference_tensor_that_f_changes_stays_changed():
    with torch.inference_mode():
        one, constant = torch.ones(3), torch.ones(3)

    def f(x):
        x = x * one  # which makes f run again, with copies
        constant.add_(1)
        return (x * constant).sum()

    torch.testing.assert_close(hodiff.grad(f, X), torch.full((3,), 2.0))


def test_half_precision_is_drawn_in_single():
    like = torch.empty((), dtype=torch.float16)
    for law in ("gaussian", "rademacher"):
        given = [torch.Generator().manual_seed(3) for _ in range(2)]
        half = _vectors.draw((50,), like, law, given[0])
        single = _vectors.draw((50,), like.float(), law, given[1])
        assert torch.equal(half, single.half())


# --- results, leftovers, leaves


def test_a_result_is_a_constant_to_a_later_call():
    """Its graph leads to a leaf of ours; but the caller was given it, and may well use it."""
    result = hodiff.grad(lambda x: (x**3).sum(), X, create_graph=True)
    torch.testing.assert_close(hodiff.grad(lambda y: (y * result).sum(), X), (3 * X**2))


def test_what_f_kept_of_a_differentiable_call_is_no_constant():
    kept = []

    def f(x):
        kept.append(x.sin())
        return (kept[0] * x).sum()

    hodiff.grad(f, X, create_graph=True)
    with pytest.raises(GraphError, match="kept"):
        hodiff.grad(f, X, create_graph=True)


def test_a_point_that_is_no_leaf_is_reached_past_the_argument():
    x = X.clone().requires_grad_() * 1
    with pytest.raises(GraphError, match="other than through its argument"):
        hodiff.grad(lambda z: (z * x).sum(), x)


def test_a_constant_gradient_of_a_given_tensor_stays_connected():
    x = X.clone().requires_grad_()
    result = hodiff.grad((3 * x).sum(), x, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], torch.zeros(3))


def test_no_vectors_give_no_products():
    result = hodiff.hvp(lambda x: (x**3).sum(), X, torch.empty(0, 3), create_graph=True)
    assert result.shape == (0, 3)


def test_a_gradient_spread_over_two_entries_has_memory_for_both():
    result = hodiff.grad(lambda x: x.sum(), torch.zeros(2))
    result[0] = 5
    assert result.tolist() == [5, 1]


def test_a_sum_that_overflows_is_no_infinite_entry():
    result = quietly(hodiff.hvp, lambda x: 1.5e38 * (x**2).sum(), torch.zeros(2), torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3e38))


def test_the_last_of_single_passes_frees(monkeypatch):
    kept, grad = [], _versions.grad

    def spy(*args, keep, build):
        kept.append(keep)
        return grad(*args, keep=keep, build=build)

    monkeypatch.setattr(_versions, "grad", spy)
    hodiff.hessian(lambda x: (x**3).sum(), X, chunk_size=1)
    assert kept == [True, True, True, False]


def test_a_subclass_sees_the_passes():
    class Watched(torch.Tensor):
        seen: ClassVar[list] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    hodiff.grad(lambda x: (x**2).sum(), X.as_subclass(Watched))
    assert torch.autograd.grad in Watched.seen


# --- orders, and what is remembered of operations


def test_an_enclosing_call_counts_towards_the_order():
    def f(norm):
        return lambda x: (norm(x) ** 3).sum()

    def nested(norm):
        return lambda x: (hodiff.grad(f(norm), x) ** 2).sum()

    def by_definition(x):
        centred = x - x.mean()
        return centred / (centred.square().mean() + 1e-5).sqrt()

    x = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64)
    found = hodiff.hvp(nested(lambda x: nn.functional.layer_norm(x, (4,))), x, x.cos())
    torch.testing.assert_close(found, hodiff.hvp(nested(by_definition), x, x.cos()))


def test_a_norm_that_did_not_matter_once_may_matter_later():
    norm, head = nn.LayerNorm(3), torch.ones(3, requires_grad=True)

    def loss(x):
        return ((norm(x) * head) ** 3).sum()

    x = X.clone().requires_grad_()
    hodiff.hvp(loss(x), head, X, create_graph=True)
    with pytest.raises(GraphError, match="third derivative"):
        hodiff.hvp(loss(x), x, X, create_graph=True)


def test_an_operation_that_is_right_at_second_order_is_searched_at_third():
    def f(x):
        stats = [torch.zeros(2), torch.ones(2)]
        rows = torch.ops.aten._batch_norm_with_update(x, torch.ones(2), torch.zeros(2), *stats, 0.1, 1e-5)[0]
        return (rows**3).sum()

    x = torch.randn(4, 2)
    hodiff.hvp(f, x, x)
    with pytest.raises(GraphError, match="third derivative"):
        hodiff.hvp(f, x, x, create_graph=True)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def test_what_is_allowed_once_is_not_allowed_later():
    def f(x):
        return (Once.apply(x) * x).sum()

    for allow in ("Once", Once, [Once]):
        hodiff.hvp(f, X, X, allow=allow)
    with pytest.raises(GraphError, match="once_differentiable"):
        hodiff.hvp(f, X, X)


def test_a_function_is_warned_of_once():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def vjp(ctx, g):  # as good as `backward`
            return 3 * g * ctx.saved_tensors[0] ** 2

    def f(x):
        return Cube.apply(x).sum()

    with pytest.warns(CustomFunctionWarning, match="Cube"):
        first = hodiff.hvp(f, X, X)
    assert torch.equal(quietly(hodiff.hvp, f, X, X), first)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_batch_norm_is_told_each_time_it_mixes(create_graph):
    norm, x = nn.BatchNorm1d(3), torch.randn(5, 3)

    def product():
        return hodiff.hvp(lambda x: (norm(x) ** 3).sum(1), x, x, batch_ndim=1, create_graph=create_graph)

    for _ in range(2):
        with pytest.warns(BatchMixingWarning, match="BatchNorm"):
            product()
    norm.eval()
    quietly(product)


def test_a_graph_freed_under_a_function_of_the_users():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    x = X.clone().requires_grad_()
    loss = Square.apply(x).sum()
    loss.backward()
    with pytest.raises(GraphError, match="already been freed"):
        hodiff.grad(loss, x)


def test_a_transform_of_forward_mode_is_refused_by_taylor_mode():
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.jvp(lambda z: hodiff.nth_derivative(torch.sin, z, 3), (X,), (X,))


def test_a_tall_jacobian_in_the_function_of_another():

    def tall(x):
        return torch.outer(x, x).flatten().sin()

    def outer(x):
        inner = hodiff.jacobian(tall, X, create_graph=False).sum()
        return tall(x) * inner

    expected = hodiff.jacobian(tall, X) * hodiff.jacobian(tall, X).sum()
    torch.testing.assert_close(hodiff.jacobian(outer, X), expected)
    assert not _call.inside()


# --- explanations


def failure(error):
    return _messages.Failure(error, None, None, [], [], [], [], False)


def test_an_error_is_explained_once(monkeypatch):
    monkeypatch.setattr(_messages, "explainer", lambda failure: "because")
    error = GraphError("it fails.")
    for _ in range(2):
        _messages.complete(failure(error))
    assert str(error).count("because") == 1


def test_an_explanation_asks_for_no_other(monkeypatch):
    asked = []

    def explain(failure):
        asked.append(failure.error)
        if len(asked) < 5:
            _messages.complete(globals()["failure"](GraphError("another")))
        return "because"

    monkeypatch.setattr(_messages, "explainer", explain)
    _messages.complete(failure(GraphError("it fails.")))
    assert len(asked) == 1


# --- points


def test_a_module_that_holds_its_parent_is_walked_once():
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].add_module("parent", model)
    assert Where(model).names == ["0.weight", "0.bias"]


def test_excluded_by_the_second_name_of_a_tied_parameter():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(hodiff.select(model, exclude="1.weight")) == ["0.bias", "1.bias"]


def test_a_module_given_as_both_points():
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match="given twice"):
        hodiff.cross_hessian(lambda a, b: a(X).sum() * b(X).sum(), model, model)


def test_a_vector_by_name_in_another_precision():
    model = nn.Linear(3, 1)
    v = {name: torch.ones_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    with pytest.raises(InputError, match="float64"):
        hodiff.hvp(lambda model: model(X).square().sum(), model, v)


def test_one_sample_is_not_evaluated_to_see_whether_it_mixes():
    calls = []

    def f(x):
        calls.append(1)
        return x.square().sum(1)

    _independence.check(f, torch.ones(1, 3), batch_ndim=1)
    assert not calls


def test_derivatives_in_double_precision_take_buffers_along():
    model = nn.Linear(3, 2)
    model.register_buffer("matrix", torch.ones(2, 2))
    hodiff.check_derivatives(lambda model: (model(X.to(model.weight.dtype)) @ model.matrix).square().sum(), model)
