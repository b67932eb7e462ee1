"""What an operator's function reads besides its arguments is compared at each product, as parameters are."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.curvature._staleness import variables
from tests.support.operators import LABELS, D, X, draw, network
from tests.support.properties import agree

DATA = [(X, LABELS)]
Finish = Callable[[Tensor, Any], Any]


def summed(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.pow(4).sum(), len(batch[0])


OPERATORS: dict[str, tuple[Finish, Callable[[Any, nn.Module], Any]]] = {
    "Hessian": (summed, lambda f, m: hodiff.HessianOperator(f, m, data=DATA)),
    "Hessian, nothing kept": (summed, lambda f, m: hodiff.HessianOperator(f, m, data=DATA, memory_budget=0)),
    "Gauss-Newton": (
        lambda outputs, batch: outputs,
        lambda f, m: hodiff.GaussNewtonOperator(f, summed, m, data=DATA),
    ),
    "Gauss-Newton, its loss": (
        summed,
        lambda f, m: hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), lambda_of(f), m, data=DATA, memory_budget=0.5),
    ),
    "Fisher": (
        lambda outputs, batch: outputs,
        lambda f, m: hodiff.FisherOperator(f, nn.CrossEntropyLoss(), m, data=DATA, kind="exact"),
    ),
    "Jacobian": (lambda outputs, batch: outputs, lambda f, m: hodiff.JacobianOperator(f, m, data=DATA)),
}


def lambda_of(f: Any) -> Any:
    """A loss in place of a function of the point: its first argument is the outputs."""
    return functools.partial(f, called=lambda outputs, inputs: outputs)


def amount(value: Any) -> Any:
    """How a value enters."""
    if isinstance(value, nn.Module):
        return value(torch.ones(2, 3, dtype=D)).sin().mean()
    if isinstance(value, Tensor):
        return value.mean()
    if isinstance(value, tuple):
        return amount(value[0])
    return value if isinstance(value, float) else len(value) if isinstance(value, str) else 1.0


PLACES = ("closure", "global", "partial", "keyword", "method", "object")
NOT_SET = ("partial", "keyword")
"""Where the object stays what it is."""
GLOBAL: Any = None


def of_model(model: Any, inputs: Tensor) -> Tensor:
    return model(inputs)


def reading(place: str, value: Any, finish: Finish) -> tuple[Any, Callable[[Any], None]]:
    """A function that reads a value in some place, and what puts another there."""

    def closing(m: Any, b: Any, called: Any = of_model) -> Any:
        return finish(called(m, b[0]) * amount(value), b)

    def put(new: Any) -> None:
        nonlocal value
        value = new

    def put_globally(new: Any) -> None:
        globals()["GLOBAL"] = new

    def taking(value: Any, m: Any, b: Any, called: Any = of_model) -> Any:
        return finish(called(m, b[0]) * amount(value), b)

    def by_keyword(m: Any, b: Any, called: Any = of_model, *, value: Any) -> Any:
        return finish(called(m, b[0]) * amount(value), b)

    class Owner:
        def method(self, m: Any, b: Any, called: Any = of_model) -> Any:
            self.calls = self.calls + 1
            return finish(called(m, b[0]) * amount(self.value), b)

        __call__ = method
        calls = 0

    put_globally(value)
    held = Owner()
    held.value = value
    functions = {
        "closure": closing,
        "global": lambda m, b, called=of_model: finish(called(m, b[0]) * amount(GLOBAL), b),
        "partial": functools.partial(taking, value),
        "keyword": functools.partial(by_keyword, value=value),
        "method": held.method,
        "object": held,
    }
    puts = {"closure": put, "global": put_globally}
    return functions[place], puts.get(place, lambda new: setattr(held, "value", new))


def teacher(dtype: torch.dtype = D) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype).eval()


def written(change: Callable[[Any], object]) -> Callable[[Any], Any]:
    def write(value: Any) -> Any:
        with torch.no_grad():
            change(value)
        return value

    return write


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number": (lambda: 1.0, lambda value: 2.0),
    "a string": (lambda: "one", lambda value: "three"),
    "a tuple": (lambda: (1.0, "a"), lambda value: (2.0, "a")),
    "another tensor": (lambda: torch.ones(2, dtype=D), lambda value: value + 1),
    "a tensor in place": (lambda: torch.ones(2, dtype=D), written(lambda value: value.add_(1))),
    "a tensor of a tuple": (lambda: (torch.ones(2, dtype=D),), written(lambda value: value[0].add_(1))),
    "another module": (teacher, lambda value: nn.Linear(3, 2, dtype=D)),
    "a module's weight": (teacher, written(lambda value: value[0].weight.mul_(2))),
    "a module's buffer": (teacher, written(lambda value: value[1].running_mean.add_(1))),
    "a parameter replaced": (teacher, written(lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(2, dtype=D))))),
    "a module's mode": (teacher, lambda value: value.train()),
}  # fmt: skip
WRITES = [name for name, (make, change) in CHANGES.items() if change(value := make()) is value]
CASES = [
    (operator, place, change)
    for operator in OPERATORS
    for place in PLACES
    for change in CHANGES
    if change in WRITES or place not in NOT_SET
]


@pytest.mark.parametrize(("operator", "place", "change"), CASES)
def test_what_has_changed_is_named_until_refresh(operator: str, place: str, change: str) -> None:
    finish, make = OPERATORS[operator]
    new, another = CHANGES[change]
    value, model = new(), network()
    f, put = reading(place, value, finish)
    A, v = make(f, model), draw(39)
    before = A @ v
    agree(A @ v, before, 0)
    value = another(value)
    put(value)
    names = {"partial": "argument 1", "global": "GLOBAL", "method": "self.value", "object": "self.value"}
    match = rf"besides its arguments has changed.*\({names.get(place, 'value')}.*\)\. H\.refresh\(\)"
    for call in (lambda: A @ v, A.dense, lambda: A.value):
        with pytest.raises(hodiff.GraphError, match=match):
            call()
    after = A.refresh() @ v
    assert (after - before).norm() > 1e-6 * before.norm()
    agree(after, make(reading(place, value, finish)[0], model) @ v, 1e-12)


def test_further_arguments_of_the_operator() -> None:
    scale, lam, x = torch.ones(3, dtype=D), torch.ones(3, dtype=D), draw(3)
    H = hodiff.HessianOperator(
        lambda x, s, *, lam: (s * x.pow(4)).sum() + (lam * x**2).sum(), x, args=(scale,), kwargs={"lam": lam}
    )
    for tensor, name in ((scale, "argument 1"), (lam, "lam")):
        H.refresh() @ x
        tensor.mul_(2)
        with pytest.raises(hodiff.GraphError, match=rf"has changed.*\({name}\)"):
            H @ x
    agree(H.refresh() @ x, 12 * scale * x**3 + 2 * lam * x)


def other_object(make: Callable[[], Any]) -> Callable[[], tuple[Any, Callable[[], None]]]:
    def reads() -> tuple[Any, Callable[[], None]]:
        thing = make()

        def f(x: Tensor) -> Tensor:
            return x.pow(4).sum() * (thing is not None)

        def change() -> None:
            nonlocal thing
            thing = make()

        return f, change

    return reads


OBJECTS = {
    "generator": torch.Generator,
    "loader": lambda: torch.utils.data.DataLoader([1, 2]),
    "logger": SimpleNamespace,
    "list": list,
    "function": lambda: lambda: None,
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_another_object(kind: str) -> None:
    f, change = other_object(OBJECTS[kind])()
    x = draw(3)
    H = hodiff.HessianOperator(f, x)
    H @ x
    change()
    with pytest.raises(hodiff.GraphError, match=r"\(thing\)"):
        H @ x


# --- what is no change ------------------------------------------------------------------------------------------------


def silent_equal() -> tuple[Any, Any]:
    value: Any = (1.0, "ab", (10**6, 2))

    def f(x: Tensor) -> Tensor:
        return x.pow(4).sum() * value[0]

    def change() -> None:
        nonlocal value
        value = (float("1.0"), "".join(["a", "b"]), (int("1000000"), 2))

    return f, change


def silent_counter() -> tuple[Any, Any]:
    calls, seen, last = 0, torch.zeros(1), None

    def f(x: Tensor) -> Tensor:
        nonlocal calls, last
        calls, last = calls + 1, x.detach()
        seen.add_(1)
        return x.pow(4).sum() * (last is not None)

    return f, lambda: f(draw(3))


def silent_own_attribute() -> tuple[Any, Any]:
    class Owner:
        calls = 0
        cache: Any = None

        def loss(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.cache = x.detach() if self.cache is None else self.cache
            return x.pow(4).sum()

    owner = Owner()
    return owner.loss, lambda: owner.loss(draw(3))


def silent_batch_norm() -> tuple[Any, Any]:
    norm = teacher().train()
    return lambda x: (norm(X[:, :3]).mean() + x).pow(4).sum(), lambda: norm(X[:, :3])


def silent_deleted() -> tuple[Any, Any]:
    value = torch.ones(3, dtype=D)

    def f(x: Tensor) -> Tensor:
        return (value * x.pow(4)).sum()

    def change() -> None:
        nonlocal value
        del value

    return f, change


def silent_lent() -> tuple[Any, Any]:
    net = teacher()

    def f(x: Tensor) -> Tensor:
        return (net(x[None]).sum() + x).pow(4).sum()

    return f, lambda: hodiff.grad(lambda net: net(X[:, :3]).square().sum(), net)


def silent_statistics_in_training() -> tuple[Any, Any]:
    norm = nn.BatchNorm1d(3).double()
    return (lambda x: (norm.weight.detach() * x).pow(4).sum()), lambda: norm(X[:, :3])


def silent_unrelated() -> tuple[Any, Any]:
    owner = SimpleNamespace(step=0)

    def f(x: Tensor) -> Tensor:
        return x.pow(4).sum() * (owner is not None)

    return f, lambda: setattr(owner, "step", 1)


SILENT = {name.removeprefix("silent_"): make for name, make in globals().items() if name.startswith("silent_")}


@pytest.mark.parametrize("what", SILENT)
def test_no_false_alarm(what: str) -> None:
    f, change = SILENT[what]()
    x = draw(3)
    H = hodiff.HessianOperator(f, x)
    before = H @ x
    change()
    agree(H @ x, before, 0)


def test_products_inside_a_loan_of_what_it_closes_over() -> None:
    """Another call's leaves stand for the parameters then, which is no change."""
    net, x = teacher(), draw(3)
    H = hodiff.HessianOperator(lambda x: (net(x[None]).sum() + x).pow(4).sum(), x)
    expected = H @ x

    def f(net: nn.Module) -> Tensor:
        with torch.no_grad():
            agree(H @ x, expected)
        return net(X[:, :3]).sum()

    hodiff.grad(f, net)
    agree(H @ x, expected)


def test_an_operator_made_inside_a_loan() -> None:
    net, x, made = teacher(), draw(3), []

    def f(net: nn.Module) -> Tensor:
        with torch.no_grad():
            H = hodiff.HessianOperator(lambda x: (net(x[None]).sum().detach() + x).pow(4).sum(), x)
            H @ x
            made.append(H)
        return net(X[:, :3]).sum()

    hodiff.grad(f, net)
    made[0] @ x


def test_what_a_function_names() -> None:
    inner, stored, unused = 1, 2, 3

    def f() -> Any:
        nonlocal stored
        stored = 4
        return [inner + k for k in range(len(DATA))], summed

    def g() -> int:
        return unused

    assert variables(f).keys() == {"inner", "DATA", "summed", "self"} and g() == 3
    assert variables(f, assigned=True).keys() == {"inner", "stored", "DATA", "summed", "self"}
    assert variables(torch.sin).keys() <= {"self"}
