"""`unroll`: the hand-written loop, its derivatives, its options, and what must not change."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff import GraphError, InputError, rules
from tests.support.differences import first_difference, relative_error
from tests.support.modules import Cube

D = torch.float64
X = torch.randn(12, 4, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.randn(12, 1, dtype=D, generator=torch.Generator().manual_seed(1))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


class Problem:
    """A network, weights of samples, a rule with a learning rate: everything that a derivative may be taken by."""

    def __init__(self, rule: str = "SGD", **options: object) -> None:
        self.model = network()
        self.weights = torch.linspace(0.5, 1.5, 12, dtype=D).requires_grad_()
        self.lr = torch.tensor(0.1, dtype=D, requires_grad=True)
        self.rule = getattr(rules, rule)(lr=self.lr, **options)
        self.wheres = [self.weights, self.lr, *self.model.parameters()]

    def inner(self, model: nn.Module, rows: slice = slice(None)) -> Tensor:
        return (self.weights[rows, None] * (model(X[rows]) - Y[rows]).square()).mean()

    def outer(self, steps: object = 6, **options: object) -> Tensor:
        final = hodiff.unroll(self.inner, self.model, self.rule, steps, **options)
        return (functional_call(self.model, final, (X.flip(1),)) - Y).square().mean()

    def gradients(self, *args: object, **options: object) -> list[Tensor]:
        return list(torch.autograd.grad(self.outer(*args, **options), self.wheres))


def by_hand(problem: Problem, steps: int, momentum: float) -> Tensor:
    p, buffers = dict(problem.model.named_parameters()), None
    for _ in range(steps):
        loss = (problem.weights[:, None] * (functional_call(problem.model, p, (X,)) - Y).square()).mean()
        grads = torch.autograd.grad(loss, list(p.values()), create_graph=True)
        buffers = grads if buffers is None else [momentum * b + g for b, g in zip(buffers, grads, strict=True)]
        p = {name: value - problem.lr * b for (name, value), b in zip(p.items(), buffers, strict=True)}
    return (functional_call(problem.model, p, (X.flip(1),)) - Y).square().mean()


def close(got: list[Tensor], expected: list[Tensor], within: float = 1e-12) -> None:
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a.detach(), b.detach()) < within


def test_it_is_the_loop_by_hand() -> None:
    """Value, gradient, and a product with the Hessian by everything."""
    problem = Problem(momentum=0.9)
    losses = [problem.outer(6), by_hand(problem, 6, 0.9)]
    assert relative_error(*(loss.detach() for loss in losses)) < 1e-14
    firsts = [torch.autograd.grad(loss, problem.wheres, create_graph=True) for loss in losses]
    close(*firsts)
    sums = [sum(g.sin().sum() for g in first) for first in firsts]
    close(*(list(torch.autograd.grad(s, problem.wheres)) for s in sums), within=1e-11)


def test_inside_other_calls() -> None:
    """`hodiff.grad`, `hvp` and `hessian` outside, by the start of the steps as well, and a call inside `f`."""
    problem = Problem("Adam", eps=1e-2)
    theta = torch.tensor([0.3, -0.2], dtype=D)

    def inner(p: Tensor, theta: Tensor) -> Tensor:
        slope = hodiff.grad(lambda q: (q**4).sum() + (theta * q).sin().sum(), p)
        return slope.square().sum()

    def outer(theta: Tensor) -> Tensor:
        p = hodiff.unroll(inner, theta.cos(), rules.Adam(lr=0.05, eps=1e-2), 3, args=(theta,))
        return (p**3).sum()

    g = hodiff.grad(outer, theta)
    v = torch.tensor([1.0, 0.5], dtype=D)
    assert relative_error((g * v).sum(), first_difference(lambda t: outer(theta + t * v).detach(), 1e-3)) < 1e-8
    expected = first_difference(lambda t: hodiff.grad(outer, theta + t * v), 1e-3)
    assert relative_error(hodiff.hvp(outer, theta, v), expected) < 1e-7
    close([hodiff.hessian(outer, theta) @ v], [hodiff.hvp(outer, theta, v)], 1e-10)

    def meta(model: nn.Module) -> Tensor:
        return sum(p.square().sum() for p in hodiff.unroll(problem.inner, model, problem.rule, 3).values())

    got = hodiff.grad(meta, problem.model)
    expected = torch.autograd.grad(meta(problem.model), list(problem.model.parameters()))
    close(list(got.values()), list(expected))


# --- where ------------------------------------------------------------------------------------------------------------


def test_structures() -> None:
    f = lambda p: (p["a"][0] * p["b"]).sum() + p["a"][1].square().sum()
    where = {"a": (torch.ones(2, dtype=D), torch.full((3,), 2.0, dtype=D)), "b": torch.ones(2, dtype=D)}
    new = hodiff.unroll(f, where, rules.SGD(lr=0.5), 1)
    assert isinstance(new["a"], tuple)
    assert torch.equal(new["a"][1].detach(), torch.zeros(3, dtype=D))
    assert torch.equal(where["b"], torch.ones(2, dtype=D))
    model = network()
    chosen = hodiff.unroll(lambda s: s.module(X).square().sum(), hodiff.select(model, "2"), rules.SGD(lr=0.1), 2)
    assert list(chosen) == ["2.weight", "2.bias"]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    for segments in (None, "auto"):
        final = hodiff.unroll(lambda m: m(X).square().mean(), model, rules.Adam(lr=0.1), 4, segments=segments)
        sum(p.sum() for p in final.values()).backward()
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(p.grad is not None for p in parameters)  # the start matters
        model.zero_grad()


def test_results_share_no_memory_with_the_point() -> None:
    x = torch.ones(2, dtype=D)
    same = hodiff.unroll(lambda p: p.sum(), x, lambda params, grads, state, step: (params, state), 1)
    with torch.no_grad():
        same += 1
    assert torch.equal(x, torch.ones(2, dtype=D))


def test_a_table_that_is_renormalized_in_place_is_refused() -> None:
    """Its scaling depends on the steps before, and PyTorch takes it for a constant."""
    table = nn.Embedding(5, 3, max_norm=1.0, dtype=D)
    before = table.weight.detach().clone()
    with pytest.raises(hodiff.InputError, match="max_norm to None"):
        hodiff.unroll(lambda m: m(torch.tensor([0, 2])).square().sum(), table, rules.SGD(lr=0.1), 3)
    assert torch.equal(table.weight, before)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_a_rule_of_ones_own() -> None:
    def rule(params: dict, grads: dict, state: dict | None, step: int) -> tuple[dict, dict]:
        assert set(params) == set(grads) == {"a", "b"}
        state = {"t": torch.tensor(float(step))} if state is None else {"t": state["t"] + step}
        return {name: p - 0.1 * grads[name] for name, p in params.items()}, state

    where = {"a": torch.ones(2, dtype=D), "b": torch.ones(1, dtype=D)}
    f = lambda p: p["a"].square().sum() + p["b"].sum()
    new, (step, state) = hodiff.unroll(f, where, rule, 3, return_state=True)
    assert step == 3 and state["t"] == 6
    torch.testing.assert_close(new["a"].detach(), torch.full((2,), 0.8**3, dtype=D))


def test_steps_are_continued() -> None:
    """In two calls as in one: the state goes on, and its graph with it."""
    f = lambda p: (p - 1).square().sum() * 3 + (p**4).sum()
    lr, x = torch.tensor(0.05, dtype=D, requires_grad=True), torch.tensor([0.2, 2.0], dtype=D)
    for rule in (rules.Adam(lr=lr), rules.SGD(lr=lr, momentum=0.9), rules.AdamW(lr=lr)):
        whole = hodiff.unroll(f, x, rule, 7)
        half, state = hodiff.unroll(f, x, rule, 3, return_state=True)
        half = hodiff.unroll(f, half, rule, 4, state=state)
        assert torch.equal(whole, half)
        close(list(torch.autograd.grad(half.sum(), lr)), list(torch.autograd.grad(whole.sum(), lr)), 1e-12)


# --- options ----------------------------------------------------------------------------------------------------------


def test_batches() -> None:
    problem = Problem(momentum=0.5)
    rows = [slice(0, 5), slice(5, 9), slice(9, 12), slice(2, 8), slice(0, 12)]
    plain = problem.gradients(rows)
    close(problem.gradients(iter(rows)), plain, 1e-15)
    close(problem.gradients(iter(rows), segments=2), plain)


def test_last_steps_are_another_quantity() -> None:
    """The steps before count as a constant: that is a derivative from another start."""
    problem = Problem()
    early = hodiff.unroll(problem.inner, problem.model, problem.rule, 4)
    for parameter, value in zip(problem.model.parameters(), early.values(), strict=True):
        parameter.data = value.detach()
    expected = torch.autograd.grad(problem.outer(2), problem.wheres[:2])
    again = Problem()
    loss = again.outer(6, last=2)
    close(list(torch.autograd.grad(loss, again.wheres[:2], retain_graph=True)), list(expected))
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(loss, again.wheres[2])
    close([again.outer(6, last=9)], [again.outer(6)], 1e-15)


def test_first_order() -> None:
    """The gradient counts as a constant: by the learning rate and the start what is left is explicit."""
    f, lr = lambda p: (p**3).sum(), torch.tensor(0.1, dtype=D, requires_grad=True)
    x = torch.tensor([2.0], dtype=D, requires_grad=True)
    p = hodiff.unroll(f, x, rules.SGD(lr=lr), 1, first_order=True)
    by_lr, by_x = torch.autograd.grad(p.sum(), [lr, x])
    assert by_lr == -12 and by_x == 1
    torch.testing.assert_close(p.detach(), hodiff.unroll(f, x, rules.SGD(lr=lr), 1).detach())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_graph_is_kept_without_grad_mode(context: type) -> None:
    problem = Problem("Adam")
    expected = hodiff.unroll(problem.inner, problem.model, problem.rule, 4)
    for segments in (None, 2):
        with context():
            got = hodiff.unroll(problem.inner, problem.model, problem.rule, 4, segments=segments)
        assert not any(p.requires_grad for p in got.values())
        close(list(got.values()), [p.detach() for p in expected.values()], 1e-15)


@pytest.mark.parametrize("options", [{}, {"last": 1}, {"first_order": True}, {"segments": 2}], ids=str)
def test_a_start_and_batches_made_in_inference_mode(options: dict[str, Any]) -> None:
    with torch.inference_mode():
        start, batch = torch.full((2,), 0.5, dtype=D), torch.full((2,), 3.0, dtype=D)
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    found = []
    for x, b in ((start, batch), (start.clone(), batch.clone())):
        p = hodiff.unroll(lambda p, b: (b * p**2).sum(), x, rules.SGD(lr=lr, momentum=0.9), [b, b], **options)
        found.append((p.detach(), *torch.autograd.grad(p.sum(), lr)))
    close(found[0], found[1], 1e-15)
    assert start.is_inference() and start.tolist() == [0.5, 0.5]


# --- segments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("segments", [1, 3, 7, "auto"])
def test_segments_give_the_same_gradients(rule: str, segments: object) -> None:
    problem = Problem(rule, **({"momentum": 0.9} if rule == "SGD" else {}))
    close(problem.gradients(7, segments=segments), problem.gradients(7))


def test_segments_find_what_f_reaches() -> None:
    """Leaves and what was computed of them, both used; batches; frozen where, not frozen."""

    model = network()
    raw = torch.tensor([0.3, -0.4], dtype=D, requires_grad=True)
    made = raw.sigmoid() * raw
    images = [torch.randn(3, 4, dtype=D).requires_grad_() for _ in range(5)]
    kept = {"value": raw.exp().sum()}

    def inner(chosen: hodiff.Selection, batch: Tensor, *, scale: Tensor) -> Tensor:
        out = chosen.module(batch) * made[0] + raw.pow(3).sum() * kept["value"] + raw[1]
        nested = hodiff.grad(lambda z: (z * made[1]).sin().sum(), batch.detach() + made[0])
        return (out * scale).square().mean() + (out.mean() * nested.mean())

    scale = torch.tensor(0.9, dtype=D, requires_grad=True)

    def gradients(segments: object) -> list[Tensor]:
        where = hodiff.select(model, "2.*")
        final = hodiff.unroll(
            inner, where, rules.SGD(lr=0.05, momentum=0.8), images, segments=segments, kwargs={"scale": scale}
        )
        loss = sum(p.square().sum() for p in final.values()) * made.sum()
        return list(torch.autograd.grad(loss, [raw, scale, *images, *model.parameters()], retain_graph=True))

    close(gradients("auto"), gradients(None))


def test_segments_draw_the_same_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    found = []
    for segments in (None, 2):
        torch.manual_seed(5)
        final = hodiff.unroll(lambda m: m(X).square().mean(), model, rules.SGD(lr=lr), 4, segments=segments)
        drawn = torch.rand(1)
        found.append([*torch.autograd.grad(sum(p.sum() for p in final.values()), [lr, *model.parameters()]), drawn])
    close(*found)


def test_segments_keep_the_precision_of_their_steps() -> None:
    """The backward pass runs outside of autocast."""
    model, lr = network().float(), torch.tensor(0.1, requires_grad=True)
    found = []
    for segments in (None, 2):
        with torch.autocast("cpu", torch.bfloat16):
            final = hodiff.unroll(lambda m: m(X.float()).square().mean(), model, rules.SGD(lr=lr), 4, segments=segments)
        found.append([torch.autograd.grad(sum(p.sum() for p in final.values()), lr)[0]])
    close(*found, within=1e-6)


def test_segments_with_a_call_inside_f() -> None:
    """What it computes of the parameters is not a matter from outside, which would be kept with its graph."""
    theta, seen = torch.tensor([0.3, -0.2], dtype=D, requires_grad=True), []

    def inner(p: Tensor) -> Tensor:
        slopes = hodiff.jacobian(lambda q: q**4 + (theta * q).sin(), p)
        seen.append(weakref.ref(slopes))
        return slopes.square().sum()

    def gradients(segments: object) -> list[Tensor]:
        start = theta.cos()
        final = hodiff.unroll(inner, start, rules.SGD(lr=0.01, momentum=0.5), 4, segments=segments)
        assert any(ref() is not None for ref in seen) == (segments is None)
        return list(torch.autograd.grad((final**3).sum(), [theta, start]))

    close(gradients(2), gradients(None))


def test_segments_go_with_their_last_reference() -> None:
    def used() -> weakref.ref[Tensor]:
        weights = torch.ones(2, dtype=D, requires_grad=True)
        final = hodiff.unroll(lambda p: (weights * p).sum(), torch.ones(2, dtype=D), rules.SGD(lr=0.1), 4, segments=2)
        final.sum().backward()
        return weakref.ref(weights)

    gc.disable()
    try:
        assert used()() is None
    finally:
        gc.enable()


def test_a_backward_pass_through_segments_draws_nothing() -> None:
    """The steps are taken again with the numbers of the first time; the caller's next ones stay as they were."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    lr = torch.tensor(0.1, dtype=D, requires_grad=True)
    final = hodiff.unroll(lambda m: m(X).square().mean(), model, rules.SGD(lr=lr), 4, segments=2)
    before = torch.get_rng_state()
    sum(p.sum() for p in final.values()).backward(inputs=[lr])
    assert torch.equal(torch.get_rng_state(), before)


def test_segments_inside_a_call() -> None:
    problem = Problem("Adam")

    def outer(weights: Tensor, segments: object) -> Tensor:
        f = lambda m: (weights[:, None] * (m(X) - Y).square()).mean()
        final = hodiff.unroll(f, problem.model, rules.Adam(lr=0.05), 5, segments=segments)
        return sum(p.square().sum() for p in final.values())

    w = torch.ones(12, dtype=D)
    close([hodiff.grad(outer, w, args=(2,))], [hodiff.grad(outer, w, args=(None,))])
    with pytest.raises(GraphError, match=r"segments= allows first derivatives only"):
        hodiff.hvp(outer, w, w, args=(2,))


def test_segments_refuse_a_second_derivative() -> None:
    problem = Problem()
    with pytest.raises(GraphError, match=r"segments= allows first derivatives only.*segments=None"):
        torch.autograd.grad(problem.outer(4, segments=2), problem.lr, create_graph=True)


def test_segments_notice_that_f_has_changed() -> None:
    problem, data = Problem(), X.clone()
    f = lambda m: (m(data) - Y).square().mean()
    final = hodiff.unroll(f, problem.model, problem.rule, 4, segments=2)
    data.mul_(1.1)
    with pytest.raises(GraphError, match=r"segments: recomputed in the backward pass, the steps ended elsewhere"):
        sum(p.sum() for p in final.values()).backward()


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("largest", [0.0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("share", [-2.0, -0.5, 0.5, 2.0])
def test_how_far_segments_may_lead_elsewhere(share: float, largest: float, dtype: torch.dtype) -> None:
    """Half of the digits, of the largest entry: 0.5 and 2 of that."""
    rate = torch.ones((), dtype=dtype, requires_grad=True)
    slopes = torch.tensor([0.0, -largest, largest], dtype=dtype)
    final = hodiff.unroll(lambda p: (p * slopes).sum(), torch.zeros(3, dtype=dtype), rules.SGD(lr=rate), 1, segments=1)
    slopes[0] = share * torch.finfo(dtype).eps ** 0.5 * largest
    if abs(share) < 1 or not largest:
        final.sum().backward()
    else:
        with pytest.raises(
            GraphError, match=r"segments: recomputed in the backward pass, the steps ended elsewhere \(by [\d.e+-]+\)"
        ):
            final.sum().backward()


def test_segments_compare_only_what_the_steps_led_to() -> None:
    """Neither a result that was changed since, nor integers, nor what has no entries."""
    counted = lambda p, g, s, t: (
        {name: p[name] - g[name] for name in p},
        torch.ones((), dtype=torch.long) if s is None else s + 1,
    )
    start = {"some": torch.ones(2, dtype=D), "none": torch.ones(0, dtype=D)}
    weights = torch.tensor([1.0, 2.0], dtype=D, requires_grad=True)
    f = lambda p: (weights * p["some"]).sum() + p["none"].sum()
    final, (_, count) = hodiff.unroll(f, start, counted, 4, segments=2, return_state=True)
    assert int(count) == 4
    final["some"].mul_(3)
    final["some"].sum().backward()
    assert torch.equal(weights.grad, torch.full((2,), -12.0, dtype=D))


def unseen(p: Tensor, hidden: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return p * hidden


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize("past", [unseen, lambda p, hidden: p * Cube.apply(hidden)], ids=["mode off", "Function"])
def test_segments_see_all_or_refuse(past: object) -> None:
    hidden = torch.full((1,), 2.0, dtype=D, requires_grad=True)
    by = lambda segments: hodiff.unroll(
        lambda p: (past(p, hidden) * hidden).square().sum(), torch.ones(1, dtype=D), rules.SGD(lr=1e-3), 3,
        segments=segments,
    )  # fmt: skip
    try:
        got = torch.autograd.grad(by(2).sum(), hidden)
    except GraphError as error:
        assert "hodiff cannot see" in str(error)
    else:
        close(list(got), list(torch.autograd.grad(by(None).sum(), hidden)))


# --- refused ----------------------------------------------------------------------------------------------------------

ONE = torch.ones(1, dtype=D)
SQUARE = lambda p: p.square().sum()
REFUSED = {
    "no function": (lambda: hodiff.unroll(ONE, ONE, rules.SGD(), 2), r"f: got a Tensor, expected a function"),
    "no steps": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 0), r"steps: got 0"),
    "no batches": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), []), r"steps: got none"),
    "a tensor of steps": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), ONE), r"steps: got a Tensor"),
    "a float": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2.0), r"steps: got a float"),
    "a rule's class": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD, 2), r"rule: got the class SGD, not an instance"),
    "an optimizer": (
        lambda: hodiff.unroll(SQUARE, ONE, torch.optim.SGD([ONE.clone().requires_grad_()]), 2),
        r"rule: got an SGD; expected a rule such as hodiff\.rules\.SGD",
    ),
    "segments": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2, segments=0), r"segments: got 0"),
    "last": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2, last=0), r"last: got 0"),
    "a state of another": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2, state=[{}]), "state: expected"),
    "half a state": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2, state=(3,)), "state: expected"),
    "a state by name": (lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(), 2, state=("3", None)), "state: expected"),
    "a rule that returns one thing": (
        lambda: hodiff.unroll(SQUARE, ONE, lambda p, g, s, t: p - g, 2), r"rule returned a Tensor"
    ),
    "a rule that changes shapes": (
        lambda: hodiff.unroll(SQUARE, ONE, rules.SGD(lr=torch.ones(2, dtype=D)), 2), r"rule returned .*\(2,\) for where"
    ),
    "a rule that changes dtypes": (
        lambda: hodiff.unroll(SQUARE, torch.ones(2), rules.SGD(lr=torch.ones(2, dtype=D)), 2),
        r"rule returned torch.float64.* for where, which is torch.float32",
    ),
    "a rule that changes the structure": (
        lambda: hodiff.unroll(SQUARE, ONE, lambda p, g, s, t: ((p,), s), 2), r"rule .*unlike where"
    ),
    "a state that cannot be kept": (
        lambda: hodiff.unroll(SQUARE, ONE, lambda p, g, s, t: (p - g, object()), 4, segments=2), "the state holds a"
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str) -> None:
    call, pattern = REFUSED[row]
    with pytest.raises(InputError, match=pattern):
        call()


def test_an_argument_that_is_not_used() -> None:
    model = network()
    with pytest.raises(GraphError, match="other than through its argument"):
        hodiff.unroll(lambda p: model(X).square().sum(), list(model.parameters()), rules.SGD(), 2)
    used = itertools.count()
    with pytest.raises(GraphError, match="carries no graph"):
        hodiff.unroll(lambda p: (p if next(used) < 2 else p.detach()).square().sum(), ONE, rules.SGD(), 4)


UNUSED = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2},
    "Adam": {"lr": 0.1, "weight_decay": 0.2},
    "AdamW": {"lr": 0.1, "weight_decay": 0.2},
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("segments", [None, 2])
def test_a_parameter_rests_in_steps_that_do_not_use_it(name: str, segments: int | None) -> None:
    """As in torch.optim, where its `.grad` is None: no decay, no momentum, and its steps are not counted."""
    assert set(UNUSED) == set(rules.__all__) - {"Rule"}
    start = [torch.tensor([1.0, -2.0], dtype=D), torch.tensor([0.5, 3.0], dtype=D)]
    batches = [True, False, False, True, True, False]
    f = lambda p, both: (p[0] ** 4).sum() + ((p[1] * p[0]).sin().sum() if both else 0)
    options = {} if segments is None else {"segments": segments}
    found = hodiff.unroll(f, start, getattr(rules, name)(**UNUSED[name]), batches, **options)

    theirs = [nn.Parameter(x.clone()) for x in start]
    optimizer = getattr(torch.optim, name)(theirs, **UNUSED[name])
    for both in batches:
        optimizer.zero_grad()
        f(theirs, both).backward()
        optimizer.step()
    torch.testing.assert_close([x.detach() for x in found], [x.detach() for x in theirs], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("segments", [1, 2, 3, 5, 7, 100])
def test_any_number_of_segments(segments: int) -> None:
    problem = Problem()
    close(problem.gradients(5, segments=segments), problem.gradients(5))


@pytest.mark.parametrize("first", [torch.zeros(0, dtype=D), torch.zeros(2, dtype=D)], ids=["empty", "not empty"])
def test_segments_compare_all_parameters(first: Tensor) -> None:
    """A parameter without entries is none that has been compared."""
    theta, factor = torch.tensor(2.0, dtype=D, requires_grad=True), [1.0]
    f = lambda p: (p[0] ** 2).sum() + factor[0] * theta * (p[1] ** 2).sum()
    found = hodiff.unroll(f, [first, torch.ones(2, dtype=D)], rules.SGD(lr=0.1), 4, segments=2)
    factor[0] = 3.0
    with pytest.raises(GraphError, match=r"(?i)chang|elsewhere|other"):
        found[1].sum().backward()


def test_segments_find_what_is_passed_by_keyword_alone() -> None:
    theta = torch.tensor([0.3, -0.2], dtype=D, requires_grad=True)
    f = lambda w: F.linear(X[:, :4], w, bias=theta).square().mean()
    ends = [hodiff.unroll(f, torch.ones(2, 4, dtype=D), rules.SGD(lr=0.1), 4, **o) for o in ({}, {"segments": 2})]
    one, other = (torch.autograd.grad(end.sin().sum(), theta)[0] for end in ends)
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert bool(one.abs().min() > 1e-3)


def test_a_function_that_changes_its_argument() -> None:
    with pytest.raises(GraphError, match="in place"):
        hodiff.unroll(lambda p: p.detach().add_(1).sum() + p.sum(), ONE.clone(), rules.SGD(), 2)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def flat(parts: object) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        h = self.inputs(x)
        for layer, w in zip(self.layers, alpha.softmax(1), strict=True):
            h = w[0] * layer(h).tanh() + w[1] * F.softplus(layer(h)) + w[2] * h
        return self.output(h)


def test_darts_the_architect_s_step() -> None:
    """A step of momentum and weight decay, from where an optimizer stands; its gradient, without the difference."""
    torch.manual_seed(0)
    model, alpha, xi = Mixed().double(), 0.1 * randn(2, 3), 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=xi, momentum=0.9, weight_decay=3e-4)
    X, labels, train, valid = randn(40, 4), torch.arange(40) % 3, slice(0, 20), slice(20, 40)
    loss = lambda a, m, rows: F.cross_entropy(m(X[rows], a), labels[rows])
    for _ in range(3):
        optimizer.zero_grad()
        loss(alpha, model, train).backward()
        optimizer.step()
    names, leaves = zip(*model.named_parameters(), strict=True)
    buffers = [{"momentum": optimizer.state[p]["momentum_buffer"].clone()} for p in leaves]
    at = lambda a, w, rows: F.cross_entropy(functional_call(model, w, (X[rows], a)), labels[rows])

    def ours(a: Tensor) -> Tensor:
        rule = rules.SGD(lr=xi, momentum=0.9, weight_decay=3e-4)
        w = hodiff.unroll(lambda m: loss(a, m, train), model, rule, 1, state=(3, buffers))
        return at(a, w, valid)

    got = hodiff.grad(ours, alpha)

    # As it is written there: the unrolled model, its gradient v by the weights, two points along v.
    slope = torch.autograd.grad(loss(alpha, model, train), leaves)
    moved = [
        p - xi * (0.9 * b["momentum"] + g + 3e-4 * p).detach() for p, g, b in zip(leaves, slope, buffers, strict=True)
    ]
    w, a = {n: p.detach().requires_grad_() for n, p in zip(names, moved, strict=True)}, alpha.clone().requires_grad_()
    direct, *v = torch.autograd.grad(at(a, w, valid), [a, *w.values()])
    v = dict(zip(names, v, strict=True))
    R = 1e-2 / flat(v.values()).norm()
    side = lambda sign: hodiff.grad(
        at, alpha, args=({n: (p + sign * R * v[n]).detach() for n, p in model.named_parameters()}, train)
    )
    assert relative_error(got, direct - xi * (side(1) - side(-1)) / (2 * R)) < 1e-6
    assert relative_error(got, direct - xi * hodiff.cross_hvp(loss, alpha, model, v, args=(train,))) < 1e-12


def test_higher_five_steps() -> None:
    """Its few-shot example, small: batch norms in training, in-place ReLUs, gradients summed over tasks."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(16, 3),
    ).double()  # fmt: skip
    labels, tasks = torch.arange(3), [(randn(3, 1, 14, 14, seed=s), randn(3, 1, 14, 14, seed=s + 9)) for s in (1, 2)]
    query = lambda w, x: F.cross_entropy(functional_call(net, w, (x,)), labels)
    for support, held in tasks:
        w = hodiff.unroll(lambda m, x=support: F.cross_entropy(m(x), labels), net, hodiff.rules.SGD(lr=0.1), 5)
        query(w, held).backward()
    got = [p.grad for p in net.parameters()]
    expected = []
    for support, held in tasks:
        w = dict(net.named_parameters())
        for _ in range(5):
            grads = torch.autograd.grad(query(w, support), list(w.values()), create_graph=True)
            w = {n: p - 0.1 * g for (n, p), g in zip(w.items(), grads, strict=True)}
        expected.append(torch.autograd.grad(query(w, held), list(net.parameters())))
    assert relative_error(flat(got), flat([a + b for a, b in zip(*expected, strict=True)])) < 1e-12
