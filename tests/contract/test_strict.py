"""Promise 5: what does not matter gives zeros when another one matters; when none does, `strict=` says what then."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff

D = torch.float64
N = 3
"""Samples, outputs and losses: each function takes `rows(a, b)`, `(N,)`, as what it wants."""
Rows = Callable[[Tensor, Tensor], Tensor]
Point = dict[str, Tensor]
ONES = {"a": torch.ones(N, 2, dtype=D), "b": torch.ones(N, 2, dtype=D)}


def scalar(rows: Rows) -> Callable[[Point], Tensor]:
    return lambda p: rows(p["a"], p["b"]).sum()


def scalar_of_two(rows: Rows) -> Callable[[Point, Point], Tensor]:
    return lambda x, y: rows(x["a"] * y["a"], x["b"] * y["b"]).sum()


def several(rows: Rows) -> Callable[[Point], Tensor]:
    return lambda p: rows(p["a"], p["b"])


CALLS: dict[str, Callable[..., Any]] = {
    "grad": lambda rows, p, **k: hodiff.grad(scalar(rows), p, **k),
    "value_and_grad": lambda rows, p, **k: hodiff.value_and_grad(scalar(rows), p, **k)[1],
    "vjp": lambda rows, p, **k: hodiff.vjp(several(rows), p, torch.ones(N, dtype=D), **k),
    "jvp": lambda rows, p, **k: hodiff.jvp(several(rows), p, ONES, **k),
    "jacobian": lambda rows, p, **k: hodiff.jacobian(several(rows), p, **k),
    "hessian": lambda rows, p, **k: hodiff.hessian(scalar(rows), p, matrix=True, **k),
    "value_grad_and_hessian": lambda rows, p, **k: hodiff.value_grad_and_hessian(scalar(rows), p, **k)[1:],
    "hvp": lambda rows, p, **k: hodiff.hvp(scalar(rows), p, ONES, **k),
    "hessian_diagonal": lambda rows, p, **k: hodiff.hessian_diagonal(scalar(rows), p, **k),
    "cross_hessian": lambda rows, p, **k: hodiff.cross_hessian(
        scalar_of_two(rows), p, {n: t + 1 for n, t in p.items()}, **k
    ),
    "cross_hvp": lambda rows, p, **k: hodiff.cross_hvp(
        scalar_of_two(rows), p, {n: t + 1 for n, t in p.items()}, ONES, **k
    ),
    "per_sample_grad": lambda rows, p, **k: hodiff.per_sample_grad(
        lambda p, batch: rows(p["a"], p["b"]), p, torch.ones(N), **k
    ),
    "gram": lambda rows, p, **k: hodiff.gram(lambda p, batch: rows(p["a"], p["b"]), p, torch.ones(N), **k),
    "multi_grad": lambda rows, p, **k: hodiff.multi_grad([scalar(rows), scalar(rows)], p, **k),
    "gradient_penalty": lambda rows, p, **k: hodiff.gradient_penalty(several(rows), p, target=0, **k),
    "gradient_norm_penalty": lambda rows, p, **k: hodiff.gradient_norm_penalty(scalar(rows), p, target=0, **k),
    "HessianOperator": lambda rows, p, **k: hodiff.HessianOperator(scalar(rows), p, **k).dense(),
}  # fmt: skip
TAKES_NO_GRAPH = ("HessianOperator",)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in (value.values() if isinstance(value, dict) else value) for t in tensors(part)]


def point(*, requires_grad: bool = False) -> Point:
    return {name: part.clone().requires_grad_(requires_grad) for name, part in ONES.items()}


@pytest.mark.names
def test_each_public_function_with_the_keyword_is_here() -> None:
    taken = {
        name
        for name in hodiff.__all__
        if not (inspect.isclass(value := getattr(hodiff, name)) and issubclass(value, BaseException))
        and "strict" in inspect.signature(value).parameters
    }
    assert taken == set(CALLS), "say in CALLS how each is called"
    for name in taken:
        assert inspect.signature(getattr(hodiff, name)).parameters["strict"].default is None, name


each = pytest.mark.parametrize("name", CALLS)
OTHER = torch.ones(N, dtype=D, requires_grad=True)
NOTHING: dict[str, Rows] = {
    "a constant": lambda a, b: torch.ones(N, dtype=D),
    "detached": lambda a, b: (a * b).detach().sum(1),
    "of other tensors": lambda a, b: OTHER.exp(),
}


@pytest.mark.table(wide=60)
@pytest.mark.filterwarnings("ignore:no trainable tensor")  # a penalty of zeros trains nothing, and says so
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("strict", [None, True, False])
@pytest.mark.parametrize("what", NOTHING)
@each
def test_where_nothing_matters(name: str, what: str, strict: bool | None, create_graph: bool) -> None:
    p, options = point(requires_grad=create_graph), {} if name in TAKES_NO_GRAPH else {"create_graph": create_graph}
    if strict is not False:
        with pytest.raises(hodiff.GraphError, match=r"does not depend on|carries no graph"):
            CALLS[name](NOTHING[what], p, strict=strict, **options)
        return
    found = tensors(CALLS[name](NOTHING[what], p, strict=False, **options))
    shapes = [part.shape for part in found]
    assert all(not part.any() for part in found)
    assert shapes == [part.shape for part in tensors(CALLS[name](lambda a, b: (a * b).sum(1), p, **options))]


@pytest.mark.parametrize("strict", [None, True, False])
@each
def test_where_some_of_it_matters(name: str, strict: bool | None) -> None:
    rows: Rows = lambda a, b: (a**3).sum(1)
    p, options = point(), {"create_graph": False} if name.endswith("penalty") else {}
    if strict:
        with pytest.raises(hodiff.GraphError, match=r"strict=True: .*does not depend on .*\['b'\]"):
            CALLS[name](rows, p, strict=True, **options)
        return
    found = tensors(CALLS[name](rows, p, strict=strict, **options))
    whole = tensors(CALLS[name](lambda a, b: (a**3).sum(1) + 0 * b.sum(1), p, **options))
    assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    assert any(part.any() for part in found)


@pytest.mark.parametrize("strict", [None, True, False])
@each
def test_a_path_past_the_argument_is_refused_whatever_is_said(name: str, strict: bool | None) -> None:
    p = point(requires_grad=True)
    for rows in (lambda a, b: (p["a"] ** 2).sum(1), lambda a, b: (p["a"] * a * b).sum(1)):
        with pytest.raises(hodiff.GraphError, match="other than through its argument"):
            CALLS[name](rows, p, strict=strict)


@pytest.mark.parametrize("strict", [None, True, False])
@each
def test_nor_past_one_that_is_detached(name: str, strict: bool | None) -> None:
    """The parameters were copied out of the model, detached, and `f` ignores them: no case of isolated atoms."""
    own = point(requires_grad=True)
    with pytest.raises(hodiff.GraphError, match="computed from other tensors"):
        CALLS[name](lambda a, b: (own["a"] ** 2).sum(1), {n: t.detach() for n, t in own.items()}, strict=strict)


@pytest.mark.parametrize("strict", [None, True, False])
def test_the_tensor_form_has_the_same_rule(strict: bool | None) -> None:
    p = point(requires_grad=True)
    for loss in (OTHER.sum(), torch.ones((), dtype=D)):
        if strict is False:
            found = hodiff.grad(loss, p, strict=False)
            assert all(torch.equal(found[name], torch.zeros(N, 2, dtype=D)) for name in p)
            assert not hodiff.hvp(loss, p, ONES, strict=False)["a"].any()
            continue
        with pytest.raises(hodiff.GraphError, match=r"does not depend on|carries no graph"):
            hodiff.grad(loss, p, strict=strict)


@pytest.mark.parametrize("wrong", ["no", 2, [True]], ids=str)
@each
def test_it_is_one_of_three(name: str, wrong: Any) -> None:
    with pytest.raises(hodiff.InputError, match=r"strict: got .*expected True or False"):
        CALLS[name](lambda a, b: (a * b).sum(1), point(), strict=wrong)


def test_isolated_atoms_train_on_their_energies() -> None:
    """What `strict=False` is for: energies that no position matters to have forces of zero; a loss of both trains."""
    positions, bias = torch.ones(1, 3, dtype=D), torch.ones((), dtype=D, requires_grad=True)
    energy, minus = hodiff.value_and_grad(lambda x: 2 * bias, positions, create_graph=True, strict=False)
    loss = (energy - 1) ** 2 + minus.square().sum()
    assert torch.equal(torch.autograd.grad(loss, bias)[0], torch.tensor(4.0, dtype=D))


# --- without strict, what is not used has zeros -----------------------------------------------------------------------


def test_an_unused_entry_has_zeros() -> None:
    point = {"a": torch.linspace(-1, 1.5, 6, dtype=D), "b": torch.ones(2, dtype=D)}
    found = hodiff.grad(lambda t: (t["a"] ** 3).sum(), point)
    assert torch.equal(found["b"], torch.zeros(2, dtype=D))
    torch.testing.assert_close(found["a"], 3 * point["a"] ** 2)


def test_an_unused_parameter_has_zeros() -> None:
    model = torch.nn.Linear(3, 1, dtype=D)
    model.extra = torch.nn.Parameter(torch.ones(2, dtype=D))
    assert torch.equal(hodiff.grad(lambda m: m(torch.ones(3, dtype=D)).sum(), model)["extra"], torch.zeros(2, dtype=D))


def test_strict_accepts_a_linear_dependence() -> None:
    """A zero second derivative is not a missing dependence."""
    x, v = torch.linspace(-1, 1.5, 6, dtype=D), torch.cos(torch.arange(6, dtype=D))
    found = hodiff.hvp(lambda t: (t["a"] ** 3).sum() + t["b"].sum(), {"a": x, "b": x}, {"a": v, "b": v}, strict=True)
    torch.testing.assert_close(found, {"a": 6 * x * v, "b": torch.zeros_like(x)})
