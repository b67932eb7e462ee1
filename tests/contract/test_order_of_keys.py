"""Dicts are matched by key, never by position: whatever meets a container given before, in any order of keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import rules
from tests.support.operators import draw

# Batches of vectors without a dimension for samples.
pytestmark = pytest.mark.filterwarnings("ignore:data. a batch gives outputs of one dimension")

D = torch.float64
A, B = torch.tensor([0.3, -1.2], dtype=D), torch.tensor([0.7, 1.9], dtype=D)
POINT = {"a": A, "b": {"c": B, "d": A + 1}}
VECTOR = {"a": B - 1, "b": {"c": A * 2, "d": A + B}}
ROWS = {"a": torch.stack([A, B, A + B]), "b": torch.stack([B, A - B, B * 2])}
OTHERS = {"a": ROWS["b"] - 0.3, "b": ROWS["a"].sin()}
DATA = [{"x": A, "y": B}, {"x": B, "y": A * B}]
Turn = Callable[[Any], Any]


def turned(value: Any) -> Any:
    """The same, each dict's keys in the opposite order."""
    return {key: turned(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


def loss(p: dict[str, Any]) -> Tensor:
    return (p["a"] ** 3 * p["b"]["c"]).sum() + (p["b"]["d"].sin() * p["a"].flip(0)).sum() + 5 * (p["b"]["c"] ** 2).sum()


def outputs(p: dict[str, Any]) -> dict[str, Any]:
    return {"u": p["a"] ** 2 * p["b"]["c"], "v": {"s": p["b"]["d"].exp(), "t": p["a"] * p["b"]["d"]}}


def critic(x: dict[str, Tensor]) -> Tensor:
    return (x["a"] ** 2 * 3).sum(1) + (x["b"].sin() * x["a"]).sum(1)


def on_batch(p: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (p["a"] * batch["x"] + p["b"]["c"] * batch["y"] ** 2 + p["b"]["d"]).sin().sum(), 2


def predict(p: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each batch has its outputs in the order of its own keys."""
    whole = {"x": p["a"] * batch["x"], "y": p["b"]["c"] ** 2 * batch["y"]}
    return {key: whole[key] for key in batch}


def spread(found: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (found["x"] ** 2 * found["y"]).sum(), 2


def second_half(t: Turn, rule: Any, **options: Any) -> Any:
    half, state = hodiff.unroll(loss, POINT, rule, 2, return_state=True)
    return hodiff.unroll(loss, t(half), rule, 3, state=state, **options)


def polished(t: Turn) -> Any:
    theta = torch.tensor(1.0, dtype=D, requires_grad=True)
    f = lambda p: ((p["a"] - theta) ** 2).sum() + 3 * ((p["b"]["c"] - p["a"]) ** 2).sum() + (p["b"]["d"] ** 2).sum()
    found = hodiff.implicit.argmin(f, t(POINT), polish=2)
    return [found, torch.autograd.grad((found["a"] + 2 * found["b"]["c"]).sum(), theta)]


def fixed(t: Turn) -> Any:
    theta = torch.tensor(1.0, dtype=D, requires_grad=True)
    g = lambda p: t({"a": p["b"]["c"] / 2, "b": {"c": p["b"]["d"] / 3 + theta, "d": p["a"].sin() / 4}})
    found = hodiff.implicit.fixed_point(g, POINT, polish=6)
    return [found, torch.autograd.grad((found["a"] + 2 * found["b"]["c"]).sum(), theta)]


def on_data(make: Callable[..., Any], *args: Any) -> Callable[[Turn], Any]:
    def rows(t: Turn) -> Any:
        A = make(*args, POINT, data=[DATA[0], t(DATA[1])])
        return [A @ t(VECTOR), A.value]

    return rows


def taking_back(t: Turn) -> Any:
    J = hodiff.JacobianOperator(predict, POINT, data=[DATA[0], t(DATA[1])])
    return [J.value, J.T @ t(J.value), J.dense()]


def planned(make: Callable[..., Any], f: Callable[..., Any]) -> Callable[[Turn], Any]:
    return lambda t: make(f, POINT)(t(VECTOR)).to_dense()


def at_other_outputs(t: Turn) -> Tensor:
    """What `f` returns changes its order after the plan is made."""
    made = hodiff.sparse.plan_jacobian(lambda p, order: order(outputs(p)), POINT, args=(lambda value: value,))
    return made(VECTOR, args=(t,)).to_dense()


def operator(use: Callable[[Any, Turn], Any]) -> Callable[[Turn], Any]:
    return lambda t: use(hodiff.HessianOperator(loss, POINT), t)


def seeded(f: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return f(*args, **options, generator=torch.Generator().manual_seed(0))


SIGNS = {name: torch.stack([rows, -rows, rows.cos()]) for name, rows in OTHERS.items()}
GRADS = {"a": B, "b": {"c": A, "d": B + 2}}
STEEP = {"a": 0.1, "b": {"c": 0.2, "d": 0.05}}
TABLE: dict[str, Callable[[Turn], Any]] = {
    "hvp": lambda t: hodiff.hvp(loss, POINT, t(VECTOR)),
    "jvp": lambda t: hodiff.jvp(outputs, POINT, t(VECTOR)),
    "vjp": lambda t: hodiff.vjp(outputs, POINT, t(outputs(VECTOR))),
    "cross_hvp": lambda t: hodiff.cross_hvp(lambda x, y: loss(x) * loss(y), POINT, VECTOR, t(GRADS)),
    "cross_hvp, its points": lambda t: hodiff.cross_hvp(lambda x, y: loss(x) * loss(y), t(POINT), VECTOR, GRADS),
    "multi_grad": lambda t: hodiff.multi_grad(
        {"s": lambda p, k: k["u"].sum(), "m": lambda p, k: k["v"]["t"].sum() + k["u"][0]}, POINT,
        shared=lambda p: t(outputs(p)),
    ),
    "per_sample_grad": lambda t: hodiff.per_sample_grad(
        lambda p, batch: (p["a"] * batch["a"] + p["b"]["c"] * batch["b"].sin()).sum(1), POINT, t(ROWS)
    ),
    "gram": lambda t: hodiff.gram(
        lambda p, batch: (p["a"] * batch["a"] + p["b"]["c"] * batch["b"].sin()).sum(1), POINT, t(ROWS)
    ),
    "HessianOperator": operator(lambda H, t: H @ t(VECTOR)),
    "flatten": operator(lambda H, t: H.flatten(t(VECTOR))),
    "solve": operator(lambda H, t: hodiff.solve(H, t(VECTOR), damping=50.0, start=t(GRADS)).value),
    "diagonal": operator(lambda H, t: hodiff.diagonal(H, vectors=t(VECTOR)).value),
    "trace": operator(lambda H, t: hodiff.trace(H, vectors=t(VECTOR)).value),
    "data": on_data(hodiff.HessianOperator, on_batch),
    "GaussNewtonOperator": on_data(hodiff.GaussNewtonOperator, predict, spread),
    "JacobianOperator": on_data(hodiff.JacobianOperator, predict),
    "JacobianOperator.T": taking_back,
    "plan_hessian": planned(hodiff.sparse.plan_hessian, loss),
    "plan_jacobian": planned(hodiff.sparse.plan_jacobian, outputs),
    "plan_jacobian, its outputs": at_other_outputs,
    "plan.lower": lambda t: hodiff.sparse.plan_hessian(loss, POINT).lower().values(t(VECTOR)),
    "unroll": lambda t: second_half(t, rules.SGD(lr=0.01, momentum=0.9)),
    "unroll by leaf": lambda t: second_half(t, rules.Adam(lr=t(STEEP))),
    "unroll in segments": lambda t: second_half(t, rules.SGD(lr=0.01, momentum=0.9), segments=2),
    "unroll by a function": lambda t: hodiff.unroll(
        loss, POINT, lambda p, g, s, n: (t({"a": p["a"] - g["a"] / 9, "b": p["b"]}), s), 2
    ),
    "a rule": lambda t: rules.SGD(lr=0.1)(POINT, t(GRADS), None, 1)[0],
    "argmin": polished,
    "fixed_point": fixed,
    "interpolate": lambda t: seeded(hodiff.interpolate, ROWS, t(OTHERS)),
    "wgan_gp_penalty": lambda t: seeded(hodiff.wgan_gp_penalty, critic, ROWS, t(OTHERS), create_graph=False),
    "hessian_penalty": lambda t: hodiff.hessian_penalty(critic, ROWS, vectors=t(SIGNS), create_graph=False),
    "sample_norm": lambda t: hodiff.sample_norm(t(ROWS)),
    "gradient_penalty": lambda t: hodiff.gradient_penalty(critic, t(ROWS), create_graph=False),
}  # fmt: skip


def same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert set(got) == set(expected)
        for key in expected:
            same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(got, expected, strict=True):
            same(one, other)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", TABLE)
def test_the_order_of_keys_does_not_matter(row: str) -> None:
    same(TABLE[row](turned), TABLE[row](lambda value: value))


# --- by number, and refused ------------------------------------------------------------------------------------------


def test_values_known_in_closed_form() -> None:
    """So that both orders are not wrong alike."""
    one = torch.ones(2, dtype=D)
    made = hodiff.sparse.plan_hessian(lambda p: (p["a"] ** 3).sum() + (p["b"] ** 2).sum(), {"a": one, "b": one})
    assert made({"b": one, "a": one}).to_dense().diag().tolist() == [6, 6, 2, 2]
    f = lambda p: (p["a"] ** 2).sum() + 10 * (p["b"] ** 2).sum()
    rule = rules.SGD(lr=0.01, momentum=0.9)
    half, state = hodiff.unroll(f, {"a": one, "b": one}, rule, 1, return_state=True)
    new = hodiff.unroll(f, {"b": half["b"], "a": half["a"]}, rule, 1, state=state)
    torch.testing.assert_close(new["a"].detach(), 0.9424 * one)
    torch.testing.assert_close(new["b"].detach(), 0.46 * one)
    w, data = torch.tensor([1.0, 2.0], dtype=D), [{"u": one, "v": one}, {"v": 2 * one, "u": 2 * one}]
    parts = lambda w, batch: {name: w["uv".index(name)] * rows for name, rows in batch.items()}
    J = hodiff.JacobianOperator(parts, w, data=data)
    assert J.value["u"].tolist() == [1, 1, 2, 2] and J.value["v"].tolist() == [2, 2, 4, 4]
    assert J.dense().tolist() == [[1, 0]] * 2 + [[2, 0]] * 2 + [[0, 1]] * 2 + [[0, 2]] * 2


def _planned(x: Any) -> Any:
    return hodiff.sparse.plan_hessian(loss, POINT)(x)


def _returned(first: Any, then: Any) -> Any:
    f = lambda x, kind: kind(x)
    return hodiff.sparse.plan_jacobian(f, A, args=(first,))(A, args=(then,))


class _Two(torch.nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        for name in (first, second):
            self.register_parameter(name, torch.nn.Parameter(A.clone()))


def _modules(*names: str) -> Any:
    made = hodiff.sparse.plan_hessian(lambda m: (m.a**3).sum() + (m.b**2).sum(), _Two("a", "b"))
    return made(_Two(*names))


def _batches(first: Any, then: Any) -> Any:
    data = [first, then]
    return hodiff.JacobianOperator(lambda w, kind: kind(w), A, data=data).value


REFUSED = {
    "a tuple": (lambda: _planned((A, B, A)), r"x: x is a tuple of 3, expected a dict with keys \['a', 'b'\], as when"),
    "a tuple inside": (
        lambda: _planned({"a": A, "b": (A, B)}), r"x: x\['b'\] is a tuple of 2, expected a dict with keys \['c', 'd'\]"
    ),
    "other keys": (lambda: _planned({"a": A, "c": B}), r"x: x has a dict with keys \['a', 'c'\], expected"),
    "other parameters": (lambda: _modules("b", "a"), r"x has the parameters \['b', 'a'\], expected \['a', 'b'\]"),
    "other outputs of a plan": (
        lambda: _returned(lambda x: {"u": x}, lambda x: {"v": x}), r"f: f\(x\) has a dict with keys \['v'\], expected"
    ),
    "other outputs of a batch": (
        lambda: _batches(lambda w: {"u": w}, lambda w: {"v": w}), r"predict: .*\['v'\], expected .*\['u'\], as for the"
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str) -> None:
    call, pattern = REFUSED[row]
    with pytest.raises(hodiff.InputError, match=pattern):
        call()


def test_a_plan_takes_a_list_for_a_tuple_and_any_array() -> None:
    numpy = pytest.importorskip("numpy")
    made = hodiff.sparse.plan_hessian(lambda x: (x[0] ** 3 * x[1]).sum(), (A, B))
    assert torch.equal(made([B, A]).to_dense(), made((B, A)).to_dense())
    turned = numpy.array([1.0, 2.0])[::-1]
    made = hodiff.sparse.plan_hessian(lambda x: (x**3).sum(), A)
    assert made(turned).to_dense().diag().tolist() == [12, 6]
    turned.flags.writeable = False
    assert made(turned).to_dense().diag().tolist() == [12, 6]


def test_operators_over_dicts_in_another_order_are_not_combined() -> None:
    f = lambda w: (w["a"] ** 3).sum() + (w["b"] ** 2).sum() * w["a"].sum()
    A = hodiff.HessianOperator(f, {"a": draw(2), "b": draw(2)})
    B = hodiff.HessianOperator(f, {"b": draw(2), "a": draw(2)})
    for combine in (lambda: A - B, lambda: A @ B):
        with pytest.raises(hodiff.InputError, match="order of keys"):
            combine()
