"""Every rule is `torch.optim`, value for value, and differentiable by every number in it."""

import dataclasses

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import InputError, rules
from tests.support.differences import first_difference, relative_error

D = torch.float64
TARGET = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=D)

OPTIONS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.2, "maximize": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.1}),
    ("Adam", {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.1, "betas": (0.5, 0.6), "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.3}),
    ("AdamW", {"lr": 0.1, "betas": (0.5, 0.6)}),
]  # fmt: skip
ROWS = pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{','.join(o)}" for n, o in OPTIONS])


def loss(p: Tensor) -> Tensor:
    return ((p - TARGET).square() * torch.tensor([1.0, 0.2, 3.0, 0.5], dtype=D)).sum() + p.prod().sin()


def uphill(p: Tensor) -> Tensor:
    return -loss(p)


def start() -> Tensor:
    return torch.tensor([1.5, 0.4, -0.3, 0.9], dtype=D)


@pytest.fixture
def double():
    """As the optimizers hold their steps in the default dtype."""
    torch.set_default_dtype(D)
    yield
    torch.set_default_dtype(torch.float32)


@ROWS
def test_a_rule_is_the_optimizer(name: str, options: dict, double: None) -> None:
    p, inner = start().requires_grad_(), uphill if options.get("maximize") else loss
    optimizer = getattr(torch.optim, name)([p], **options, foreach=False)
    path = []
    for _ in range(20):
        optimizer.zero_grad()
        inner(p).backward()
        optimizer.step()
        path.append(p.detach().clone())
    q, state = start(), None
    for step, expected in enumerate(path, start=1):
        q, state = getattr(rules, name)(**options)(q, hodiff.grad(inner, q), state, step)
        torch.testing.assert_close(q, expected, rtol=4e-14, atol=4e-14)


REACHED = [("a",), ("a", "b"), ("b",), ("a",), ("a", "b"), ("a", "b"), ("b",), ("a", "b")]
"""What a loss reaches in each step; `c` in none."""


def some_of(p: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return sum((loss(p[name]) for name in names), torch.zeros((), dtype=D))


@pytest.mark.parametrize("way", ["recorded", "segments", "first_order", "no_grad", "continued"])
@ROWS
def test_what_f_does_not_reach_stays_as_it_is(name: str, options: dict, way: str, double: None) -> None:
    """As where `.grad` is None: no decay, no momentum, and the step does not count."""
    options = {"weight_decay": 0.1, **options, "maximize": False}
    p = {n: (start() * t).requires_grad_() for n, t in (("a", 1.0), ("b", 1.3), ("c", 0.7))}
    optimizer = getattr(torch.optim, name)(p.values(), **options, foreach=False)
    first = {n: t.detach().clone() for n, t in p.items()}
    for names in REACHED:
        optimizer.zero_grad()
        some_of(p, names).backward()
        optimizer.step()
    rule = getattr(rules, name)(**options)
    more = {"segments": 3} if way == "segments" else {"first_order": True} if way == "first_order" else {}
    with torch.set_grad_enabled(way != "no_grad"):
        if way == "continued":
            half, state = hodiff.unroll(some_of, first, rule, REACHED[:3], return_state=True)
            got = hodiff.unroll(some_of, half, rule, REACHED[3:], state=state)
        else:
            got = hodiff.unroll(some_of, first, rule, REACHED, **more)
    for n, expected in p.items():
        torch.testing.assert_close(got[n].detach(), expected.detach(), rtol=4e-14, atol=4e-14)
    assert torch.equal(got["c"].detach(), first["c"])


@ROWS
def test_derivatives_past_what_f_does_not_reach(name: str, options: dict) -> None:
    options = {"weight_decay": 0.1, **options, "maximize": False} | ({} if name == "SGD" else {"eps": 0.05})
    direction = torch.tensor([0.4, -0.7, 1.1, 0.2], dtype=D)

    def after(t: Tensor, segments: int | None = None) -> Tensor:
        point = {n: start() + t * s * direction for n, s in (("a", 1.0), ("b", -0.5), ("c", 2.0))}
        rule = getattr(rules, name)(**{**options, "lr": 0.1 * options["lr"]})
        final = hodiff.unroll(some_of, point, rule, REACHED, segments=segments)
        return sum((final[n] @ direction.flip(0) for n in final), torch.zeros((), dtype=D))

    zero = torch.zeros((), dtype=D)
    expected = first_difference(lambda t: after(zero + t).detach(), 1e-3)
    for segments in (None, 3):
        assert relative_error(hodiff.grad(lambda t, s=segments: after(t, s), zero), expected) < 1e-7


def test_a_decay_of_zero_that_is_a_tensor_is_differentiated_by() -> None:
    """After one step p (1 - lr w) - lr g, whose derivative by the decay w is -lr p."""
    decay, p = torch.zeros((), dtype=D, requires_grad=True), start()
    q, _ = rules.SGD(lr=0.1, weight_decay=decay)(p, loss(p).expand(p.shape), None, 1)
    (by_decay,) = torch.autograd.grad(q.sum(), decay)
    torch.testing.assert_close(by_decay, -0.1 * p.sum())


def test_a_state_is_of_its_rule_and_of_its_parameters() -> None:
    """Its dict may have another order; another rule's, or one of other parameters, is refused."""
    p, g = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}, {"b": torch.full((2,), 3.0), "a": torch.ones(2)}
    rule = rules.SGD(lr=0.1, momentum=0.9)
    q, state = rule(p, g, None, 1)
    expected = rule(q, g, state, 2)[0]
    turned = rule({"b": q["b"], "a": q["a"]}, g, state, 2)[0]
    assert list(turned) == ["b", "a"] and all(torch.equal(turned[n], expected[n]) for n in p)
    listed = rule(q, g, [state["SGD"]["params['a']"], state["SGD"]["params['b']"]], 2)[0]
    assert all(torch.equal(listed[n], expected[n]) for n in p)
    with pytest.raises(InputError, match=r"state belongs to SGD, expected one of Adam"):
        rules.Adam()(q, g, state, 2)
    with pytest.raises(InputError, match=r"state belongs to the parameters .*'b'.*expected .*'c'"):
        rule({"a": p["a"], "c": p["b"]}, {"a": g["a"], "c": g["b"]}, state, 2)
    with pytest.raises(InputError, match=r"state: momentum of params\['a'\] has shape \(2,\), expected \(3,\)"):
        rule({"a": torch.ones(3), "b": p["b"]}, {"a": torch.ones(3), "b": g["b"]}, state, 2)
    assert rule(p, {"a": None, "b": g["b"]}, None, 1)[0]["a"] is p["a"]


def hypers(rule: rules.Rule) -> list[str]:
    found = [f.name for f in dataclasses.fields(rule) if not isinstance(f.default, bool) and f.name != "betas"]
    return found + (["beta1", "beta2"] if hasattr(rule, "betas") else [])


def with_value(rule: rules.Rule, name: str, value: float | Tensor) -> rules.Rule:
    if name.startswith("beta"):
        betas = list(rule.betas)
        betas[int(name[-1]) - 1] = value
        return dataclasses.replace(rule, betas=tuple(betas))
    return dataclasses.replace(rule, **{name: value})


@ROWS
def test_a_rule_differentiates_by_every_number(name: str, options: dict) -> None:
    """Seven steps, by the number, by what f closes over, and by the start."""
    smooth = {} if name == "SGD" else {"eps": 0.05}  # of 1e-8, differences are those of rounding
    rule = getattr(rules, name)(**{**options, **smooth, "lr": 0.1 * options["lr"]})
    inner = uphill if options.get("maximize") else loss
    weight = direction = torch.tensor([0.4, -0.7, 1.1, 0.2], dtype=D)

    def after(rule: rules.Rule, theta: Tensor, p: Tensor) -> Tensor:
        final = hodiff.unroll(lambda p: inner(p * theta), p, rule, 7)
        return (weight * final).sum()

    ones = torch.ones(4, dtype=D)
    for hyper in hypers(rule):
        before = getattr(rule, "betas", (0, 0))[int(hyper[-1]) - 1] if hyper[:4] == "beta" else getattr(rule, hyper)
        if before == 0 and hyper != "weight_decay":
            continue  # without a momentum, its buffer is another rule's
        before = before or 0.01  # a weight decay below 0 is refused
        value = torch.tensor(float(before), dtype=D, requires_grad=True)
        (got,) = torch.autograd.grad(after(with_value(rule, hyper, value), ones, start()), value)
        step = min(0.02 * before, 0.05 * (1 - before)) if 0 < before < 1 else 1e-3
        expected = first_difference(
            lambda t, h=hyper, b=before: after(with_value(rule, h, b + t), ones, start()).detach(), step
        )
        assert abs(got - expected) <= 1e-7 * max(1.0, abs(expected)), hyper
    theta, p = ones.clone().requires_grad_(), start().requires_grad_()
    got = torch.autograd.grad(after(rule, theta, p), [theta, p])
    moved = [
        first_difference(lambda t: after(rule, ones + t * direction, start()).detach(), 1e-3),
        first_difference(lambda t: after(rule, ones, start() + t * direction).detach(), 1e-3),
    ]
    for gradient, expected in zip(got, moved, strict=True):
        assert relative_error((gradient * direction).sum(), expected) < 1e-8


@ROWS
def test_second_derivatives(name: str, options: dict) -> None:
    rule, direction = getattr(rules, name)(**options), torch.tensor([0.4, -0.7, 1.1, 0.2], dtype=D)
    inner = uphill if options.get("maximize") else loss
    after = lambda theta: hodiff.unroll(lambda p: inner(p * theta), start(), rule, 4).square().sum()
    ones = torch.ones(4, dtype=D)
    got = hodiff.hvp(after, ones, direction)
    expected = first_difference(lambda t: hodiff.grad(after, ones + t * direction), 1e-3)
    assert relative_error(got, expected) < 1e-7


def test_momentum_keeps_its_first_gradient() -> None:
    """torch.optim.SGD(momentum=..., differentiable=True) detaches it; with one step its gradient is missing."""
    theta = torch.tensor(2.0, dtype=D, requires_grad=True)
    rule = rules.SGD(lr=0.1, momentum=0.9)
    p = hodiff.unroll(lambda p: (theta * p**2).sum(), torch.ones(1, dtype=D), rule, 1)
    assert torch.autograd.grad(p.sum(), theta)[0] == pytest.approx(-0.2)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_gradients_that_are_exactly_zero(name: str) -> None:
    """Below a layer that begins at zero; stock rules give NaN there, for every parameter."""
    rule, count = getattr(rules, name)(lr=0.1, eps=1e-2), 8
    inner = lambda p, theta: (p[1] * (theta * p[0]).tanh() - 1).square().sum()
    zero = torch.zeros(1, dtype=D)

    def after(theta: Tensor) -> Tensor:
        p = hodiff.unroll(inner, (torch.ones(1, dtype=D), zero), rule, count, args=(theta,))
        return (p[0] * p[1]).sum()

    theta = torch.tensor(0.7, dtype=D)
    got = hodiff.grad(after, theta)
    assert relative_error(got, first_difference(lambda t: after(theta + t).detach(), 1e-4)) < 1e-7


def test_the_derivative_at_a_zero_gradient_is_true() -> None:
    """One step of Adam moves by lr g / (|g| + eps): its derivative by g at 0 is lr / eps."""
    theta = torch.tensor(0.0, dtype=D, requires_grad=True)
    p = hodiff.unroll(lambda p: (theta * p).sum(), torch.zeros(1, dtype=D), rules.Adam(lr=0.1, eps=1e-3), 1)
    assert torch.autograd.grad(p.sum(), theta)[0] == pytest.approx(-0.1 / 1e-3)


def test_one_number_for_each_leaf() -> None:
    p = {"a": torch.ones(2, dtype=D), "b": torch.ones(3, dtype=D)}
    lr = {"b": torch.tensor(0.2, dtype=D, requires_grad=True), "a": torch.tensor([0.1, 0.3], dtype=D)}
    rule = rules.Adam(lr=lr, betas=({"a": 0.0, "b": 0.0}, 0.0), eps=0.0)
    new = hodiff.unroll(lambda p: p["a"].sum() - p["b"].sum(), p, rule, 1)
    torch.testing.assert_close(new["a"].detach(), torch.tensor([0.9, 0.7], dtype=D))
    assert torch.autograd.grad(new["b"].sum(), lr["b"])[0] == 3


@pytest.mark.table(plain=1)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_rule_is_a_pure_function_also_in_transforms(name: str) -> None:
    """Where values cannot be looked at; one row of gradients holds a zero."""
    rule, g = getattr(rules, name)(lr=0.1, eps=1e-2), torch.tensor([[0.3, -1.2], [0.0, 2.0]], dtype=D)
    step = lambda g: rule(torch.ones(2, dtype=D), g, None, 1)[0]
    rows = torch.stack([step(row) for row in g])
    assert torch.equal(torch.vmap(step)(g), rows)
    jacobian = torch.func.vmap(torch.func.jacrev(step))(g)
    torch.testing.assert_close(jacobian, torch.stack([hodiff.jacobian(step, row) for row in g]))
    torch.testing.assert_close(torch.compile(step, backend="eager")(g[1]), rows[1])


BAD = {
    "a word": (lambda: rules.SGD(lr="0.1"), r"SGD: lr: got '0.1', expected a number"),
    "a flag for a number": (lambda: rules.SGD(lr=True), r"lr: got True"),
    "a number for a flag": (lambda: rules.SGD(momentum=0.9, nesterov=1), r"nesterov: got 1, expected True or False"),
    "nesterov alone": (lambda: rules.SGD(nesterov=True), r"nesterov needs momentum"),
    "one beta": (lambda: rules.Adam(betas=(0.9,)), r"betas: got \(0.9,\), expected a pair"),
    "a beta of one": (lambda: rules.Adam(betas=(0.9, 1.0)), r"betas: got \(0.9, 1.0\), expected two numbers .*below 1"),
    "a beta that is none": (lambda: rules.Adam(betas=(0.9, None)), r"betas: got None"),
    "another structure": (
        lambda: rules.SGD(lr={"a": 0.1})({"a": torch.ones(1), "b": torch.ones(1)}, {"a": 0, "b": 0}, None, 1),
        r"lr must .*like the parameters: lr has a dict with keys \['a'\]",
    ),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_options(row: str) -> None:
    call, pattern = BAD[row]
    with pytest.raises(InputError, match=pattern):
        call()
