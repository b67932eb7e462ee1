"""Promise 7: errors teach.  Every kind of bad input, and the words its error must contain: what was got, what to do."""

import collections
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff import BatchMixingWarning, CustomFunctionWarning, GraphError, HodiffError, InputError
from hodiff._core import _lending, _reverse
from tests.support.modules import Cube, CubeOnce, weighted_sum
from tests.support.properties import ERRORS

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
V = torch.cos(torch.arange(6, dtype=D))


def cubes(x: Tensor) -> Tensor:
    return (x**3).sum()


def model_and_data() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(5, 3, dtype=D)


CALLS = {  # every function that takes a scalar f and a point
    "grad": lambda f, x, **k: hodiff.grad(f, x, **k),
    "value_and_grad": lambda f, x, **k: hodiff.value_and_grad(f, x, **k),
    "hvp": lambda f, x, **k: hodiff.hvp(f, x, V, **k),
    "hessian": lambda f, x, **k: hodiff.hessian(f, x, **k),
    "value_grad_and_hessian": lambda f, x, **k: hodiff.value_grad_and_hessian(f, x, **k),
    "hessian_diagonal": lambda f, x, **k: hodiff.hessian_diagonal(f, x, **k),
}
calls = pytest.mark.parametrize("name", CALLS)


def test_exception_tree() -> None:
    assert issubclass(InputError, ValueError) and issubclass(InputError, HodiffError)
    assert issubclass(GraphError, RuntimeError) and issubclass(GraphError, HodiffError)
    assert issubclass(hodiff.DerivativeError, AssertionError) and issubclass(hodiff.DerivativeError, HodiffError)
    assert issubclass(hodiff.HodiffWarning, UserWarning)
    assert issubclass(CustomFunctionWarning, hodiff.HodiffWarning)
    assert issubclass(BatchMixingWarning, hodiff.HodiffWarning)


# --- what f returns ---------------------------------------------------------------------------------------------------


@calls
def test_output_not_scalar(name: str) -> None:
    with pytest.raises(InputError, match=r"(?is)\(6,\).*(batch_ndim|jacobian|sum)"):
        CALLS[name](lambda x: x**2, X)


@calls
def test_output_not_a_tensor(name: str) -> None:
    with pytest.raises(InputError, match=r"(?is)float"):
        CALLS[name](lambda x: float((x.detach() ** 2).sum()), X)


@calls
def test_output_none(name: str) -> None:
    with pytest.raises(InputError, match=r"(?is)None"):
        CALLS[name](lambda x: None, X)


@calls
def test_output_integer(name: str) -> None:
    with pytest.raises((InputError, GraphError), match=r"(?is)int64|depend|integer|floating"):
        CALLS[name](lambda x: (x > 0).sum(), X)


@calls
def test_output_complex(name: str) -> None:
    with pytest.raises(InputError, match=r"(?is)complex"):
        CALLS[name](lambda x: torch.complex(x, x).sum(), X)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_one_element_is_a_scalar_of_any_shape(shape: tuple[int, ...]) -> None:
    torch.testing.assert_close(hodiff.grad(lambda x: cubes(x).reshape(shape), X), 3 * X**2)
    torch.testing.assert_close(hodiff.hvp(lambda x: cubes(x).reshape(shape), X, V), 6 * X * V)


def test_batch_output_of_the_wrong_size() -> None:
    x = X.reshape(3, 2)
    with pytest.raises(InputError, match=r"(?is)batch_ndim.*\(3, 2\)|\(3, 2\).*batch_ndim"):
        hodiff.grad(lambda t: t**2, x, batch_ndim=1)
    with pytest.raises(InputError, match=r"(?is)batch"):
        hodiff.grad(lambda t: t.sum(), x, batch_ndim=1)
    with pytest.raises(InputError, match=r"(?is)batch_ndim"):
        hodiff.grad(lambda t: t.sum(-1), x, batch_ndim=3)


@pytest.mark.parametrize("bad", [-1, 0.5, True, "1"])
def test_batch_ndim_itself(bad: object) -> None:
    with pytest.raises(InputError, match=r"(?is)batch_ndim"):
        hodiff.grad(cubes, X, batch_ndim=bad)


def test_nth_derivative_wants_an_elementwise_shape() -> None:
    with pytest.raises(InputError, match=r"(?is)shape|elementwise"):
        hodiff.nth_derivative(cubes, X, 2)
    with pytest.raises(InputError, match=r"(?is)shape|elementwise"):
        hodiff.derivatives(lambda x: x[:-1], X, 2)
    with pytest.raises(InputError, match=r"(?is)tensor"):
        hodiff.nth_derivative(lambda t: t["a"], {"a": X}, 2)


@pytest.mark.parametrize("f", [lambda x: x.cumsum(0) ** 2, lambda x: x * x.sum(), lambda x: torch.roll(x, 1) ** 3])
def test_nth_derivative_of_a_function_that_mixes_entries(f: object) -> None:
    """The sum of a Jacobian's row is not the derivative of an entry."""
    for n in (1, 2):
        with pytest.raises(InputError, match=r"(?is)elementwise.*(hessian|jacobian)"):
            hodiff.nth_derivative(f, X, n)
    with pytest.raises(InputError, match=r"(?is)elementwise.*(hessian|jacobian)"):
        hodiff.derivatives(f, X, 2)


# --- where ------------------------------------------------------------------------------------------------------------

BAD_POINTS = {
    "integer": (torch.arange(6), r"int64.*(float|double)"),
    "boolean": (torch.ones(6, dtype=torch.bool), r"bool"),
    "complex": (X.to(torch.complex128), r"complex"),
    "sparse": (torch.eye(3, dtype=D).to_sparse(), r"sparse.*dense"),
    "empty tuple": ((), r"empty|no tensor|without any tensor"),
    "empty list": ([], r"empty|no tensor|without any tensor"),
    "empty dict": ({}, r"empty|no tensor|without any tensor"),
    "nested empty": ({"a": [], "b": ()}, r"empty|no tensor|without any tensor"),
    "a number": (3.0, r"3\.0.*torch\.tensor"),
    "a string": ("x", r"str.*tensor"),
    "None": (None, r"None.*tensor"),
    "a number inside": ({"a": X, "b": 3}, r"\bb\b.*\b3\b"),
    "an integer tensor inside": ([X, torch.arange(3)], r"1.*int64"),
    "a set": ({1.0}, r"set"),
}


@calls
@pytest.mark.parametrize("point", BAD_POINTS)
def test_bad_point(name: str, point: str) -> None:
    x, pattern = BAD_POINTS[point]
    with pytest.raises(InputError, match=rf"(?is){pattern}"):
        CALLS[name](lambda x: cubes(X), x)


@calls
def test_generator_of_parameters_is_refused_by_name(name: str) -> None:
    model, data = model_and_data()
    with pytest.raises(InputError, match=r"(?is)generator.*(list\(|module|model)"):
        CALLS[name](lambda p: model(data).sum(), model.parameters())
    with pytest.raises(InputError, match=r"(?is)generator|iterator"):
        CALLS[name](lambda p: model(data).sum(), iter([X]))


def test_module_without_trainable_parameters() -> None:
    model, data = model_and_data()
    model.requires_grad_(False)
    with pytest.raises(InputError, match=r"(?is)frozen|trainable|requires_grad"):
        hodiff.grad(lambda m: m(data).sum(), model)
    with pytest.raises(InputError, match=r"(?is)parameter"):
        hodiff.grad(lambda m: m(X).sum(), nn.Tanh())


@pytest.mark.parametrize("function", [
    hodiff.grad, hodiff.value_and_grad, hodiff.jacobian, hodiff.hessian, hodiff.hessian_diagonal,
    hodiff.value_grad_and_hessian,
])  # fmt: skip
def test_point_missing(function: object) -> None:
    """hodiff evaluates; it returns no functions.  A bare TypeError of Python's would not say what to write."""
    with pytest.raises(InputError, match=rf"(?is)hodiff\.{function.__name__}\(f, x"):
        function(cubes)


@calls
@pytest.mark.parametrize("bad", [3.0, None, "f", [1]])
def test_f_is_neither_function_nor_tensor(name: str, bad: object) -> None:
    with pytest.raises(InputError, match=r"(?is)(callable|function).*tensor|tensor.*(callable|function)"):
        CALLS[name](bad, X)


# --- vectors ----------------------------------------------------------------------------------------------------------

BAD_VECTORS = {
    "shape": (torch.ones(5, dtype=D), r"\(5,\).*\(6,\)|\(6,\).*\(5,\)"),
    "two extra dimensions": (torch.ones(2, 2, 6, dtype=D), r"\(2, 2, 6\)"),
    "as many as entries": (torch.ones(6, 6, dtype=D), r"\(6, 6\).*\[\w\] for rows"),
    "neither rows nor columns": (torch.ones(5, 2, dtype=D), r"\(5, 2\).*\(6,\)"),
    "0-d": (torch.ones((), dtype=D), r"\(\)"),
    "dtype": (torch.ones(6, dtype=torch.float32), r"float32.*float64|float64.*float32"),
    "integer": (torch.ones(6, dtype=torch.int64), r"int64"),
    "complex": (torch.ones(6, dtype=torch.complex128), r"complex"),
    "device": (torch.ones(6, dtype=D, device="meta"), r"meta"),
    "a number": (1.0, r"float"),
    "a list of too few numbers": ([1.0] * 5, r"5"),
    "a tuple of two tensors": ((V, V), r"tuple|structure"),
    "a dict": ({"x": V}, r"dict|structure"),
    "None": (None, r"None"),
}
VECTOR_CALLS = {
    "hvp": lambda v: hodiff.hvp(cubes, X, v),
    "cross_hvp": lambda v: hodiff.cross_hvp(lambda x, y: (x * y).sum(), 2 * X, X, v),
    "jvp": lambda v: hodiff.jvp(lambda x: x**3, X, v),
    "vjp": lambda v: hodiff.vjp(lambda x: x**3, X, v),
}


@pytest.mark.parametrize("call", VECTOR_CALLS)
@pytest.mark.parametrize("vector", BAD_VECTORS)
def test_bad_vector(call: str, vector: str) -> None:
    v, pattern = BAD_VECTORS[vector]
    with pytest.raises(InputError, match=rf"(?is){pattern}"):
        VECTOR_CALLS[call](v)


Pair = collections.namedtuple("Pair", ["a", "b"])
BAD_STRUCTURES = {
    "missing key": ({"a": X, "b": X}, {"a": V}, r"\bb\b"),
    "extra key": ({"a": X}, {"a": V, "z": V}, r"\bz\b"),
    "wrong key": ({"a": X}, {"z": V}, r"\b[az]\b"),
    "too short": ((X, X), (V,), r"2|structure|length"),
    "leaf shape": ({"a": X, "b": X}, {"a": V, "b": V[:2]}, r"\bb\b.*\(2,\)"),
    "mixed one and many": ({"a": X, "b": X}, {"a": V, "b": torch.stack([V, V])}, r"different numbers|\b[ab]\b"),
    "different numbers of vectors": ((X, X), (torch.stack([V, V]), torch.stack([V, V, V])), r"2.*3|3.*2"),
    "flat for a pair, too short": (Pair(X, X), torch.cat([V, V])[1:], r"Pair|structure|Tensor|11"),
}


@pytest.mark.parametrize("case", BAD_STRUCTURES)
def test_bad_structure(case: str) -> None:
    x, v, pattern = BAD_STRUCTURES[case]
    f = lambda t: sum(cubes(leaf) for leaf in (t.values() if isinstance(t, dict) else t))
    with pytest.raises(InputError, match=rf"(?is){pattern}"):
        hodiff.hvp(f, x, v)


def test_vector_for_a_module() -> None:
    model, data = model_and_data()
    loss = lambda m: weighted_sum(m(data))
    good = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(InputError, match=r"(?is)2\.bias"):
        hodiff.hvp(loss, model, {n: v for n, v in good.items() if n != "2.bias"})
    with pytest.raises(InputError, match=r"(?is)dict|name|structure"):
        hodiff.hvp(loss, model, list(good.values())[1:])
    hodiff.hvp(loss, model, dict(reversed(good.items())))  # the order of a dict means nothing


def test_tied_parameter_in_a_vector_goes_by_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False)).double()
    model[2].weight = model[0].weight
    loss = lambda m: weighted_sum(m(torch.ones(1, 2, dtype=D)))
    assert list(hodiff.grad(loss, model)) == ["0.weight"]
    w = torch.ones(2, 2, dtype=D)
    with pytest.raises(InputError, match=r"(?is)2\.weight"):
        hodiff.hvp(loss, model, {"0.weight": w, "2.weight": w})


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "many"])
def test_chunk_size(bad: object) -> None:
    with pytest.raises(InputError, match=r"(?is)chunk_size"):
        hodiff.hessian(cubes, X, chunk_size=bad)


# --- graphs -----------------------------------------------------------------------------------------------------------


@calls
def test_tensor_without_graph(name: str) -> None:
    with pytest.raises(GraphError, match=r"(?is)graph|no_grad|detach"):
        CALLS[name](cubes(X), X.clone().requires_grad_())


@calls
def test_loss_that_does_not_depend_on_x(name: str) -> None:
    other = X.clone().requires_grad_()
    with pytest.raises(GraphError, match=r"(?is)depend"):
        CALLS[name](cubes(other), X.clone().requires_grad_())
    with pytest.raises(GraphError, match=r"(?is)depend"):
        CALLS[name](lambda x: cubes(other), X)
    with pytest.raises(GraphError, match=r"(?is)depend|detach|graph"):
        CALLS[name](lambda x: cubes(x.detach()), X)
    with pytest.raises(GraphError, match=r"(?is)depend|graph"):
        CALLS[name](lambda x: torch.zeros((), dtype=D), X)


@calls
def test_tensor_form_with_a_point_that_needs_no_grad(name: str) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises((GraphError, InputError), match=r"(?is)requires_grad|depend"):
        CALLS[name](cubes(x), X)


def test_unused_input() -> None:
    f = lambda t: cubes(t["a"])
    point = {"a": X, "b": X[:2]}
    g = hodiff.grad(f, point)
    assert torch.equal(g["b"], torch.zeros(2, dtype=D))
    torch.testing.assert_close(g["a"], 3 * X**2)
    with pytest.raises(GraphError, match=r"(?is)depend.*\bb\b|\bb\b.*depend"):
        hodiff.grad(f, point, strict=True)
    with pytest.raises(GraphError, match=r"(?is)depend.*\bb\b|\bb\b.*depend"):
        hodiff.hvp(f, point, {"a": V, "b": V[:2]}, strict=True)
    with pytest.raises(GraphError, match=r"(?is)depend.*\bb\b|\bb\b.*depend"):
        hodiff.hessian(f, point, strict=True)


def test_unused_parameter_gives_zeros_and_its_name_under_strict() -> None:
    model, data = model_and_data()
    model.extra = nn.Parameter(torch.ones(2, dtype=D))
    loss = lambda m: weighted_sum(m[2](m[1](m[0](data))))
    assert torch.equal(hodiff.grad(loss, model)["extra"], torch.zeros(2, dtype=D))
    with pytest.raises(GraphError, match=r"(?is)extra"):
        hodiff.grad(loss, model, strict=True)


def test_strict_accepts_a_linear_dependence() -> None:
    """A zero second derivative is not a missing dependence."""
    f = lambda t: cubes(t["a"]) + t["b"].sum()
    got = hodiff.hvp(f, {"a": X, "b": X}, {"a": V, "b": V}, strict=True)
    torch.testing.assert_close(got, {"a": 6 * X * V, "b": torch.zeros_like(X)})


@calls
def test_bypassed_argument(name: str) -> None:
    """``lambda p: loss(model(x))`` ignores p: the silent zeros of torch.autograd.functional."""
    weight = nn.Parameter(X.clone())
    with pytest.raises(GraphError, match=r"(?is)argument"):
        CALLS[name](lambda w: cubes(weight), weight)
    with pytest.raises(GraphError, match=r"(?is)argument"):
        CALLS[name](lambda w: cubes(weight) + cubes(w), weight)


def test_bypassed_parameters() -> None:
    model, data = model_and_data()
    p = list(model.parameters())
    with pytest.raises(GraphError, match=r"(?is)argument"):
        hodiff.grad(lambda p: weighted_sum(model(data)), p)
    with pytest.raises(GraphError, match=r"(?is)argument"):
        hodiff.hvp(lambda p: weighted_sum(model(data)), p, [torch.ones_like(q) for q in p])
    with pytest.raises(GraphError, match=r"(?is)argument"):
        hodiff.jacobian(lambda w: model(data), model[0].weight)
    torch.testing.assert_close(  # through the module it is the same object, so this is not a mistake
        hodiff.grad(lambda m: weighted_sum(model(data)), model), hodiff.grad(lambda m: weighted_sum(m(data)), model)
    )


@calls
def test_freed_graph(name: str) -> None:
    x = X.clone().requires_grad_()
    loss = cubes(x)
    loss.backward()
    with pytest.raises(GraphError, match=r"(?is)freed|retain_graph"):
        CALLS[name](loss, x)


def test_engine_errors_are_chained() -> None:
    x = X.clone().requires_grad_()
    loss = cubes(x)
    loss.backward()
    with pytest.raises(GraphError, match=r"(?is)freed|retain_graph") as info:
        hodiff.grad(loss, x)
    if info.value.__cause__ is not None:
        assert "second time" in str(info.value.__cause__)


def test_f_that_edits_its_argument() -> None:
    def edits(x: Tensor) -> Tensor:
        return cubes(x.mul_(2))

    x = X.clone()
    for call in (lambda: hodiff.grad(edits, x), lambda: hodiff.hvp(edits, x, V), lambda: hodiff.jacobian(edits, x)):
        with pytest.raises(RuntimeError, match=r"(?is)in[- ]place.*clone\(\)"):  # f's own error, with a note
            call()
        assert torch.equal(x, X)


def test_f_that_edits_a_saved_tensor() -> None:
    def edits(x: Tensor) -> Tensor:
        y = torch.exp(x)
        z = (y**2).sum()
        y.add_(1)
        return z

    with pytest.raises(GraphError, match=r"(?is)in-?place"):
        hodiff.grad(edits, X)


def test_repeated_tensor() -> None:
    """In the function form each slot is a variable; in the tensor form stock PyTorch gives the total in both."""
    torch.testing.assert_close(hodiff.grad(lambda p: (p[0] ** 2 * p[1]).sum(), (X, X)), (2 * X * X, X**2))
    x = X.clone().requires_grad_()
    with pytest.raises(InputError, match=r"(?is)twice|repeat|same tensor|more than once"):
        hodiff.grad((x**3).sum(), (x, x))


def test_args_with_a_tensor() -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(InputError, match=r"(?is)args"):
        hodiff.grad(cubes(x), x, args=(1,))
    with pytest.raises(InputError, match=r"(?is)kwargs"):
        hodiff.grad(cubes(x), x, kwargs={"a": 1})


def test_args_must_be_a_tuple() -> None:
    with pytest.raises(InputError, match=r"(?is)args.*tuple"):
        hodiff.grad(lambda x, a: (x * a).sum(), X, args=X)
    with pytest.raises(InputError, match=r"(?is)kwargs"):
        hodiff.grad(lambda x, a: (x * a).sum(), X, kwargs=[1])


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 2.0, True, "2", None, torch.tensor(2)])
@pytest.mark.parametrize("function", [hodiff.nth_derivative, hodiff.derivatives])
def test_bad_order(function: object, bad: object) -> None:
    with pytest.raises(InputError, match=r"\bn: got .*expected"):
        function(torch.sin, X, bad)


def test_order_zero_is_the_function() -> None:
    torch.testing.assert_close(hodiff.nth_derivative(torch.sin, X, 0), torch.sin(X))
    (only,) = hodiff.derivatives(torch.sin, X, 0)
    torch.testing.assert_close(only, torch.sin(X))


# --- select -----------------------------------------------------------------------------------------------------------


def test_select_unknown_pattern_lists_near_matches() -> None:
    model, _ = model_and_data()
    with pytest.raises(InputError, match=r"(?is)0\.wieght.*0\.weight"):
        hodiff.select(model, "0.wieght")
    named = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(InputError, match=r"(?is)haed.*head"):
        hodiff.select(named, "haed")
    with pytest.raises(InputError, match=r"(?is)Head"):
        hodiff.select(named, "Head.*")  # case-sensitive


def test_select_frozen_only() -> None:
    model, _ = model_and_data()
    model[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"(?is)frozen|requires_grad"):
        hodiff.select(model, "0.*")
    assert list(hodiff.select(model, "*.weight")) == ["2.weight"]


def test_select_excluding_all_and_not_a_module() -> None:
    model, _ = model_and_data()
    with pytest.raises(InputError, match=r"(?is)exclude"):
        hodiff.select(model, "0.*", exclude="0.*")
    with pytest.raises(InputError, match=r"(?is)module"):
        hodiff.select(X, "0.*")
    assert list(hodiff.select(model)) == [n for n, _ in model.named_parameters()]  # no pattern: all of them
    with pytest.raises(InputError, match=r"(?is)nothing"):
        hodiff.select(model, "0.*", exclude="nothing")


# --- around a call ----------------------------------------------------------------------------------------------------


@calls
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_inside_torch_func(name: str, transform: str) -> None:
    def outer(x: Tensor) -> Tensor:
        out = CALLS[name](cubes, x)
        leaf = out if isinstance(out, Tensor) else out[1]
        return leaf.sum()

    with pytest.raises(InputError, match=r"(?is)torch\.func.*(batch_ndim|hodiff)"):
        {
            "vmap": lambda: torch.func.vmap(outer)(X.reshape(1, 6)),
            "grad": lambda: torch.func.grad(outer)(X),
            "jvp": lambda: torch.func.jvp(outer, (X,), (V,)),
        }[transform]()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_module(backend: str) -> None:
    """Derivatives of a compiled module are right: hodiff calls the original."""
    warnings.simplefilter("ignore")  # torch's own deprecations while Dynamo is imported
    model, data = model_and_data()
    compiled = torch.compile(model, backend=backend)
    vector = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    expected = hodiff.hvp(lambda m: weighted_sum(m(data)), model, vector)
    got = hodiff.hvp(lambda m: weighted_sum(m(data)), compiled, vector)
    for name in expected:
        torch.testing.assert_close(got[name.removeprefix("_orig_mod.")], expected[name])
    by_closure = hodiff.hvp(lambda x: weighted_sum(compiled(x)), data, torch.ones_like(data))
    torch.testing.assert_close(by_closure, hodiff.hvp(lambda x: weighted_sum(model(x)), data, torch.ones_like(data)))


def test_compiled_tensor_form_is_refused() -> None:
    warnings.simplefilter("ignore")
    model, data = model_and_data()
    x = data.clone().requires_grad_()
    loss = weighted_sum(torch.compile(model, backend="aot_eager")(x))
    with pytest.raises(GraphError, match=r"(?is)compile"):
        hodiff.hvp(loss, x, torch.ones_like(x))


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_batch_norm_under_batch_ndim_warns() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=D)
    with pytest.warns(BatchMixingWarning, match=r"(?is)batch_?norm.*eval"):
        hodiff.grad(lambda t: model(t), x, batch_ndim=1)
    with pytest.warns(BatchMixingWarning, match=r"(?is)batch_?norm.*eval"):
        hodiff.hessian(lambda t: model(t), x, batch_ndim=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.grad(lambda t: model(t).sum(), x)
        model.eval()
        hodiff.grad(lambda t: model(t), x, batch_ndim=1)


def test_custom_function_warns_where_it_cannot_be_held() -> None:
    class Fresh(Cube):
        pass

    f = lambda x: Fresh.apply(x).sum()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.grad(f, X)  # a first derivative is what the class wrote
    x = X.clone().requires_grad_()
    with pytest.warns(CustomFunctionWarning, match=r"(?is)Fresh.*check_derivatives"):
        got = hodiff.hvp(f(x), x, V)
    torch.testing.assert_close(got, 6 * X * V)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.hvp(f, X, V)  # held, and right

    class Second(Cube):
        pass

    with pytest.warns(CustomFunctionWarning, match=r"(?is)Second"):
        hodiff.hessian(Second.apply(x).sum(), x)


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize("spread", [lambda y, x: y, lambda y, x: y + x**3, lambda y, x: y * x])
def test_once_differentiable_raises_unless_allowed(spread: object) -> None:
    """autograd.grad gives 6x of 2 + 6x and says nothing."""
    f = lambda x: spread(CubeOnce.apply(x), x).sum()
    assert torch.isfinite(hodiff.grad(f, X)).all()
    for call in (
        lambda **k: hodiff.hvp(f, X, V, **k),
        lambda **k: hodiff.hessian(f, X, **k),
        lambda **k: hodiff.hessian_diagonal(f, X, **k),
        lambda **k: hodiff.nth_derivative(lambda x: spread(CubeOnce.apply(x), x), X, 2, **k),
    ):
        with pytest.raises(GraphError, match=r"(?is)CubeOnce.*allow"):
            call()
    try:  # allowed, its own second derivative is dropped: what is left may not need a graph at all
        hodiff.hvp(f, X, V, allow=("CubeOnce",))
        hodiff.hvp(f, X, V, allow=(CubeOnce,))
    except GraphError as error:
        pytest.fail(f"allow= did not allow: {error}")


def test_allow_of_another_name_does_not_allow() -> None:
    with pytest.raises(GraphError, match=r"(?is)CubeOnce"):
        hodiff.hvp(lambda x: CubeOnce.apply(x).sum(), X, V, allow=("Other",))


def test_no_reference_cycle_keeps_an_error_s_tensors() -> None:
    """After the error is handled its graph must be gone with the next collection, or a retry runs out of memory."""
    import weakref

    def failing() -> weakref.ref:
        holder, bags = nn.Linear(2, 2).double(), torch.tensor([[0, 1], [2, 2]])
        try:
            hodiff.hvp(
                lambda x: nn.functional.embedding_bag(bags, holder(x)).exp().sum(), X.reshape(3, 2), V.reshape(3, 2)
            )
        except GraphError:
            return weakref.ref(holder)
        pytest.fail("embedding_bag has no second derivative")

    reference = failing()
    gc.collect()
    assert reference() is None


# --- how f is called --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "points", "args", "kwargs", "words"),
    [
        (lambda a, b: a, [(X, X)], (), {}, "missing a required argument: 'b'.*container is one point.*cross_hessian"),
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
    assert isinstance(error, InputError) and re.search(words, str(error)), error


def test_a_type_error_of_f_itself_is_left_alone() -> None:
    assert _lending.signature_error(TypeError("inside"), lambda x: x + "a", [X], (), {}) is None
    assert _lending.signature_error(TypeError("no signature"), type, [X], (), {}) is None


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: hodiff.hessian(lambda x: (x**3).sum(), x), r"200,000 x 200,000 numbers, 320 GB.*hodiff\.hvp.*_diag"),
        (lambda x: hodiff.value_grad_and_hessian(lambda x: (x**3).sum(), x, matrix=True), "HessianOperator"),
        (lambda x: hodiff.cross_hessian(lambda x, y: (x * y).sum(), x, x.clone()), "HessianOperator"),
        (lambda x: hodiff.jacobian(lambda x: x**3, x), r"200,000 x 200,000 .*hodiff\.jvp"),
        (
            lambda x: hodiff.hessian(lambda x: (x**3).sum(-1), x.reshape(2, -1), batch_ndim=1),
            "2 x 100,000 x 100,000 numbers, 160 GB",
        ),
    ],
)
def test_what_is_larger_than_the_machine_is_refused_with_its_size(call, words, monkeypatch) -> None:
    monkeypatch.setattr(_reverse, "memory_on", lambda device: 64e9)
    with pytest.raises(InputError, match=r"x: the result would hold .* cpu has 64 GB") as caught:
        call(torch.zeros(200_000, dtype=D))
    assert re.search(words, str(caught.value))


def test_the_machine_says_what_memory_it_has() -> None:
    assert 1e8 < _reverse.memory_on(torch.device("cpu")) < 1e15
    assert _reverse.memory_on(torch.device("meta")) == float("inf")
    with_samples = torch.ones(3, 4, dtype=D)  # far below: nobody is asked
    assert hodiff.hessian(lambda x: (x**3).sum(-1), with_samples, batch_ndim=1).shape == (3, 4, 4)


def test_several_outputs_of_each_sample_name_a_way_out() -> None:
    x = X.reshape(1, 2, 3)
    with pytest.raises(InputError, match=r"f\(x\)\[\.\.\., 0\].*hodiff\.jacobian\(f, x, batch_ndim=2\)"):
        hodiff.hessian(lambda x: x**2, x, batch_ndim=2)
    with pytest.raises(InputError, match="not reduced over the batch"):
        hodiff.hessian(lambda x: x.sum(), x, batch_ndim=2)


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


@pytest.mark.parametrize("n", [2, 3, 4])  # at zeros the first derivative is right: no entry has one by another
@pytest.mark.parametrize("of", ["nth_derivative", "derivatives"])
def test_a_function_that_mixes_entries_is_refused(of: str, n: int) -> None:
    with pytest.raises(hodiff.InputError, match=r"(?i)entr|element"):
        getattr(hodiff, of)(lambda x: x * x.roll(1), torch.zeros(3, dtype=D), n)


NET = nn.Linear(3, 2).double()


BATCH = (torch.ones(4, 3, dtype=D), torch.zeros(4, 2, dtype=D))


predict = lambda m, batch: m(batch[0])


ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "FisherOperator without kind": (
        lambda: hodiff.FisherOperator(predict, nn.MSELoss(), NET, data=[BATCH]),  # type: ignore[call-arg]
        "kind",
    ),
    "Gauss-Newton, a functional loss": (
        lambda: hodiff.GaussNewtonOperator(predict, F.mse_loss, NET, data=[BATCH]) @ torch.ones(8, dtype=D),
        "(?i)loss.*(batch|nn.MSELoss)",
    ),
    "Gauss-Newton, operands swapped": (
        lambda: hodiff.GaussNewtonOperator(nn.MSELoss(), predict, NET, data=[BATCH]) @ torch.ones(8, dtype=D),
        "(?i)predict|loss",
    ),
    "Gauss-Newton, a functional loss in place of predict": (
        lambda: hodiff.GaussNewtonOperator(F.mse_loss, predict, NET, data=[BATCH]),
        "the order is predict, loss, where",
    ),
    "a penalty of a critic that takes labels, without them": (
        lambda: hodiff.gradient_penalty(lambda x, labels: (x * labels).sum(-1), torch.ones(3, 2)),
        "f cannot be called with the 1 positional argument.*'labels'.*args=",
    ),
    "a penalty, samples and critic swapped": (
        lambda: hodiff.gradient_penalty(torch.ones(3, 2), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))),
        "The function comes first and the samples second",
    ),
    "Gauss-Newton, predict of the batch alone": (
        lambda: hodiff.GaussNewtonOperator(lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=[BATCH])
        @ torch.ones(8, dtype=D),
        "predict.*batch",
    ),
    "Fisher, predict of the batch alone": (
        lambda: hodiff.FisherOperator(
            lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=[BATCH], kind="exact"
        ) @ torch.ones(8, dtype=D),
        "predict.*batch",
    ),
    "hessian of two arguments": (
        lambda: hodiff.hessian(lambda a, b: (a * b).sum(), (POINT, POINT)),
        r"(?i)one argument|tuple|f\(\(|unpack",
    ),
    "cross_hessian of one argument": (
        lambda: hodiff.cross_hessian(lambda p: (p[0] * p[1]).sum(), POINT, POINT),
        r"(?i)two arguments|f\(x, y\)",
    ),
    "retain_graph": (
        lambda: hodiff.grad(lambda z: z.sum(), POINT, retain_graph=True),  # type: ignore[call-arg]
        "retain_graph",
    ),
    "a dense Hessian of 160 GB": (
        lambda: hodiff.hessian(lambda z: (z**3).sum(), torch.ones(200_000)),
        "(?i)GB|GiB|HessianOperator|memory",
    ),
    "batch_ndim=2 of several outputs": (
        lambda: hodiff.hessian(lambda z: z, torch.ones(2, 2, 3, dtype=D), batch_ndim=2),
        "(?i)jacobian|sum|one output",
    ),
    "interpolate, a feature mismatch": (
        lambda: hodiff.interpolate(torch.ones(4, 3), torch.ones(4, 5)),
        r"^(?!.*\[:n\]).*\(4, 5\)",
    ),
    "Fisher, a loss that is not a likelihood": (
        lambda: hodiff.FisherOperator(predict, nn.HuberLoss(), NET, data=[BATCH], kind="exact")
        @ torch.ones(8, dtype=D),
        "(?i)HuberLoss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused_in_our_words(name: str) -> None:
    call, words = ARGUMENTS[name]
    with pytest.raises((*ERRORS, TypeError), match=f"(?s){words}") as caught:
        call()
    if name != "retain_graph":  # Python's own words name it; ours must, where Python's are about something else
        assert isinstance(caught.value, hodiff.HodiffError), repr(caught.value)
