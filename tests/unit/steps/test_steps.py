"""A compiled step is the eager loss: the ways to write one, what changes between calls, and how training uses it."""

import contextlib
import copy
import gc
import importlib
import math
import os
import pickle
import random
import threading
import warnings
import weakref
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.guards import GuardManagerWrapper
from torch.autograd import forward_ad

import hodiff
from hodiff._core._versions import RELEASE
from hodiff.steps import _alarm
from tests.unit.steps.cases import KINDS, NETS, forces, plain, residual
from tests.unit.steps.changes import CHANGES, World
from tests.unit.steps.support import MARKS, gradients, off

pytestmark = [*MARKS, pytest.mark.table(plain=1)]
LEFT = {
    **{
        f"func_hessian-{net}": "forward mode over reverse mode, which Dynamo follows through some layers only"
        for net in NETS
        if net != "residual"
    },
    "batched_rows-groups": "PyTorch's own batching rule raises",
    **{
        f"elementwise-{net}": "the net has no first layer that the loss could read the bias of"
        for net in ("residual", "attention", "convolution")
    },
}


# --- the kinds of steps -----------------------------------------------------------------------------------------------


def kinds() -> list[tuple[str, str]]:
    return [(kind, net) for kind in KINDS for net in NETS if f"{kind}-{net}" not in LEFT]


@pytest.mark.table()
@pytest.mark.parametrize(("kind", "name"), kinds())
def test_a_step_is_its_eager_loss(kind: str, name: str) -> None:
    """At the weights and data of the trace, and at two others."""
    net, loss = NETS[name](), KINDS[kind]
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for _ in range(3):
        x = torch.randn(5, 3)
        net.zero_grad()
        value = step(x)
        value.backward()
        twin = copy.deepcopy(net)
        exact, by_name = hodiff.value_and_grad(loss, twin, args=(x,))  # by the road: right through norms at order 3
        assert off([value.detach()], [exact]) <= 1e-13
        theirs = [by_name[n] for n, _ in net.named_parameters()]
        assert off([torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()], theirs) <= 1e-13
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert step.report.eager == 0 and step.report.graphs >= 1


def test_a_graph_that_cannot_be_run_leaves_the_eager_loss(monkeypatch) -> None:
    """A kernel's error is no error of the loss; what the graph has done until then is undone."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    twin, x = copy.deepcopy(net), torch.randn(5, 3)
    step = hodiff.compile_step(plain, net, backend="replay")
    replay = hodiff.steps.CompiledStep._replay

    def broken(self, graph, inputs):
        run = graph.run

        def failing(*given):
            run(*given)
            raise RuntimeError("mm_out(...) API call failed")

        with mock.patch.object(graph, "run", failing):
            return replay(self, graph, inputs)

    monkeypatch.setattr(hodiff.steps.CompiledStep, "_replay", broken)
    with pytest.warns(hodiff.HodiffWarning, match=r"its graph cannot be run: mm_out\(...\) API call failed. This step"):
        value = step(x)
    assert value == plain(twin, x) and step.report.eager == 1
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))


def test_the_rounding_of_float64_is_measured_where_float32_is_the_default() -> None:
    torch.set_default_dtype(torch.float32)
    net = NETS["tanh"]().double()
    step, x = hodiff.compile_step(plain, net, backend="replay", fallback="raise"), torch.randn(5, 3).double()
    moved = []
    replay = hodiff.steps.CompiledStep._replay

    def noted(self, graph, inputs):
        result = replay(self, graph, inputs)
        check = _alarm.EagerCheck(graph, inputs, _alarm.Before(graph, inputs), lambda: None, False)
        moved[:] = zip(inputs, check._moved(), strict=True)
        return result

    with mock.patch.object(hodiff.steps.CompiledStep, "_replay", noted):
        step(x)
    far = [float((a - b).detach().abs().max() / a.detach().abs().max()) for a, b in moved]
    assert 0 < max(far) < 1e-15


def test_threads_that_call_at_once_share_what_is_compiled() -> None:
    step = hodiff.compile_step(forces, NETS["tanh"](), backend="replay", fallback="raise")
    together, x = threading.Barrier(4), torch.randn(5, 3)

    def called() -> None:
        together.wait(60)
        step(x)

    threads = [threading.Thread(target=called, daemon=True) for _ in range(4)]
    [each.start() for each in threads]
    [each.join(120) for each in threads]
    assert step.report.graphs == 1 and step.report.calls == 4 and not step.report.eager


def test_warnings_of_pytorch_that_are_errors_end_no_compilation(monkeypatch) -> None:
    from hodiff.steps import _graph

    begin, before = _graph.make_fx, warnings.filters[:]

    def warned(*args, **kwargs):
        warnings.warn_explicit("old", DeprecationWarning, "old.py", 1, module="torch.jit")
        return begin(*args, **kwargs)

    monkeypatch.setattr(_graph, "make_fx", warned)
    step = hodiff.compile_step(forces, NETS["tanh"](), backend="replay", fallback="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.randn(5, 3))
    assert step.report.graphs == 1 and warnings.filters[:] == before


@pytest.mark.parametrize("backend", ["aot_eager", "replay"])
def test_a_loss_that_writes_into_memory_which_another_argument_has(backend: str) -> None:
    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return (w * y).sum() ** 2

    w = torch.ones(3, requires_grad=True)
    step, row = hodiff.compile_step(loss, w, backend=backend), torch.arange(18.0).reshape(6, 3)
    twin = row.clone()
    with contextlib.nullcontext() if backend == "replay" else pytest.warns(hodiff.HodiffWarning, match="shares memory"):
        value = step(row[:5], row[1:])
    assert value == loss(w, twin[:5], twin[1:]) and torch.equal(row, twin)


def shared_memory() -> dict:
    """Losses that read a tensor, write into its memory in some way, and read it again."""
    part, whole = torch.zeros(4), torch.zeros(4)

    def by(write):
        def loss(w: Tensor, x: Tensor) -> Tensor:
            before = 2 * part.view(2, 2)[0].sum() + whole.sum() + x.sum()
            write(part, whole, x)
            after = 3 * part.view(2, 2)[0].sum() + 5 * whole.sum() + 7 * x.sum()
            return (w.sum() * before + after) ** 2

        return loss

    view = whole[1:3]
    return {
        "a view of an input": by(lambda part, whole, x: part[:2].add_(1)),
        "a view of a view": by(lambda part, whole, x: part.view(2, 2).unbind()[0].chunk(2)[1].mul_(0).add_(2)),
        "an input that is a view": by(lambda part, whole, x: view.add_(1)),
        "an argument": by(lambda part, whole, x: x.detach().unsqueeze(0).select(1, 0).sub_(1)),
        "an entry": by(lambda part, whole, x: whole.__setitem__(2, 4.0)),
        "split": by(lambda part, whole, x: torch.split(whole, 2)[1].copy_(torch.ones(2))),
    }


@pytest.mark.table(plain=1)
@pytest.mark.parametrize("kind", shared_memory())
def test_what_is_written_by_a_view_is_read_anew(kind: str) -> None:
    """The alarm is off: equal operations on memory that is written between them are two."""
    losses = [shared_memory()[kind] for _ in range(2)]
    w = torch.ones(2, requires_grad=True)
    step = hodiff.compile_step(losses[0], w, backend="replay", fallback="raise")
    step._checked = lambda result, args, kwargs: result
    for n in (3, 3, 4, 5):
        x = torch.arange(float(n))
        twin = x.clone()
        value, gradient = step.value_and_grad(x)
        exact = losses[1](w, twin)
        assert value == exact and torch.equal(x, twin)
        assert torch.equal(gradient, torch.autograd.grad(exact, w)[0])
    assert not step.report.eager


def test_the_alarm_sees_what_is_wrong_at_the_inputs_themselves_alone(monkeypatch) -> None:
    """How the result moves with the inputs is no rounding, if where it moves to is the eager result."""
    step, x = hodiff.compile_step(plain, NETS["tanh"](), backend="replay"), torch.randn(5, 3)
    replay = hodiff.steps.CompiledStep._replay

    def wrong(self, graph, inputs):
        if not hasattr(graph, "right"):
            graph.right, graph.run = (
                graph.run,
                lambda *given: graph.right(*(-each if each is x else each for each in given)),
            )
        return replay(self, graph, inputs)

    monkeypatch.setattr(hodiff.steps.CompiledStep, "_replay", wrong)
    with pytest.warns(hodiff.HodiffWarning, match="its result differs from the eager one"):
        step(x)


OTHER_AUX = {
    "nothing": (lambda aux: aux, False),
    "a sample in 200 counted otherwise": (lambda aux: aux | {"hits": aux["hits"] * 0.995}, False),
    "one in ten": (lambda aux: aux | {"hits": aux["hits"] * 0.9}, True),
    "rounding of what is left of two equal numbers": (lambda aux: aux | {"left": aux["left"] * 2 + 1e-17}, False),
    "index of the largest": (lambda aux: aux | {"at": aux["at"] + 1}, False),
    "number": (lambda aux: aux | {"number": 4}, True),
    "large number": (lambda aux: aux | {"many": aux["many"] + 1}, False),
    "string": (lambda aux: aux | {"word": "train"}, True),
    "kind": (lambda aux: aux | {"word": None}, True),
    "dtype": (lambda aux: aux | {"at": aux["at"].double()}, True),
    "key": (lambda aux: {name: aux[name] for name in ("hits", "left", "at", "number", "word")}, True),
}


@pytest.mark.parametrize("off_by", [0.0, 0.005])
@pytest.mark.parametrize("other", OTHER_AUX)
def test_aux_is_held_against_the_eager_one(other: str, off_by: float, monkeypatch) -> None:
    """Also where rounding moves the loss as far as it is from the eager one."""
    change, wrong = OTHER_AUX[other]
    monkeypatch.setattr(_alarm.EagerCheck, "_distance", lambda *_: off_by)

    def loss(net: nn.Module, x: Tensor) -> tuple[Tensor, dict]:
        y = net(x)
        left = (y / 3 * 3 - y).norm()
        return forces(net, x), {
            "hits": 1 + (y > 0).sum() / 5,
            "left": left,
            "at": y.argmax(),
            "number": 3,
            "many": 2**70,
            "word": "eval",
        }

    net, x = NETS["tanh"](), torch.randn(5, 3)
    step = hodiff.compile_step(loss, net, has_aux=True, backend="replay")
    eager = step._whole
    step._whole = lambda x: (eager(x)[0], change(eager(x)[1]))
    with pytest.warns(hodiff.HodiffWarning, match="its aux differs") if wrong else contextlib.nullcontext():
        step(x)[0].backward()
    ours = gradients(net)
    net.zero_grad()
    loss(net, x)[0].backward()
    assert off(ours, gradients(net)) <= 1e-13 and step.report.eager == wrong


@pytest.mark.parametrize(("dtype", "off_by", "wrong"), [
    (torch.float64, 0.009, False), (torch.float64, 0.02, True), (torch.float32, 0.02, True),
    (torch.bfloat16, 0.05, False), (torch.bfloat16, 0.2, True),
])  # fmt: skip
def test_no_more_than_one_percent_is_taken_for_rounding(dtype, off_by: float, wrong: bool, monkeypatch) -> None:
    """Also where moved inputs move the result as far; but of numbers of two digits six percent.

    Buffers and random numbers are behind the check as behind one call.
    """
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), NETS["tanh"]()).to(dtype)
    twin, x = copy.deepcopy(net), torch.randn(4, 3, dtype=dtype)
    step = hodiff.compile_step(plain, net, backend="replay")
    monkeypatch.setattr(_alarm.EagerCheck, "_distance", lambda *_: off_by)
    told, drawn = "more than is taken for rounding", []
    for each, expected in ((partial(plain, twin), False), (step, wrong)):
        torch.manual_seed(0)
        with pytest.warns(hodiff.HodiffWarning, match=told) if expected else contextlib.nullcontext():
            each(x)
        drawn.append(torch.rand(()))
    assert step.report.eager == wrong and drawn[0] == drawn[1]
    assert off([*net.buffers()], [*twin.buffers()]) <= 4 * torch.finfo(dtype).eps


# --- what changes between calls ---------------------------------------------------------------------------------------


def trained(name: str, compiled: bool, held: bool = True) -> tuple[list, World, object]:
    """Six steps of one world, with a change after three: all that a step gives and leaves."""
    world = World()
    world.extra, world.autocast, world.make_x = (), False, None
    loss, change = CHANGES[name](world)
    step = hodiff.compile_step(loss, world.net, backend="replay") if compiled else partial(loss, world.net)
    if compiled and not held:
        step._checked = lambda result, args, kwargs: result
    seen: list = []
    torch.manual_seed(1)
    try:
        for turn in range(6):
            if turn == 3:
                torch.manual_seed(7)
                change()
            if hasattr(world, "each"):
                world.each()
            seen.append(one_step(world, step))
    finally:
        if hasattr(world, "restore"):
            world.restore()
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float64)
    return [*seen, [torch.get_rng_state().double()]], world, step


def one_step(world: World, step) -> list:
    x = world.make_x() if world.make_x else world.x
    others = [getattr(world, name) for name in ("free", "z") if hasattr(world, name)]
    others += list(world.other.parameters()) if hasattr(world, "other") else []
    others += [x] if x.is_leaf else []
    for each in others:
        each.grad = None
    if not hasattr(world, "keep"):
        world.net.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16) if world.autocast else contextlib.nullcontext():
        value = step(x, *world.extra)
    value.backward()
    left = [value.detach(), *gradients(world.net), *(each.grad for each in others), *world.net.buffers()]
    return [None if each is None else each.detach().clone() for each in left]


A_LOOKUP = "a lookup fails, and the loss catches that: that the name is missing has no guard"
A_CLASS = "an attribute of a class is replaced, or hidden by a new one"
ONLY_THE_ALARM = {
    "identity_of": "a plain object() takes the place of another",
    "sign_of_zero": "0.0 becomes -0.0",
    "ordered_dict": "the keys of an OrderedDict change places",
    "environment": "os.getenv is called",
    "recursion_limit": "sys.getrecursionlimit is called",
    "string_of_sizes": "a string is made of a size that varies",
    "global_hides_a_builtin": "a global is defined that hides a builtin",
    "method_of_tensor_replaced": "a method of torch.Tensor is replaced",
    "retained": "retain_grad() is called on an argument",
    "version": "an argument is changed in place, and its _version read",
    "base": "an argument becomes a view, and its _base is read",
    **dict.fromkeys(
        (
            "try_attr", "try_key", "try_module_attr", "environ_missing", "custom_mapping", "chainmap",
            "dunder_dict_get", "dunder_dict_in",
        ), A_LOOKUP,
    ),
    **dict.fromkeys(
        (
            "forward_patched_class", "call_patched_class", "class_method_patched", "attribute_hides_that_of_a_base",
            "attribute_hides_that_of_a_base_module", "attribute_hides_getattr_of_a_module",
            "property_hides_an_attribute", "dunder_getattr_shadow",
        ), A_CLASS,
    ),
}  # fmt: skip
"""What PyTorch does not guard, as docs/api/steps.md says."""
if RELEASE >= (2, 15):
    for seen in ("sign_of_zero", "attribute_hides_that_of_a_base", "attribute_hides_that_of_a_base_module"):
        del ONLY_THE_ALARM[seen]
if RELEASE >= (2, 14):
    ONLY_THE_ALARM["name_error"] = A_LOOKUP  # older ones cannot follow it


@pytest.mark.table()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen(name: str) -> None:
    """By guards and refusals alone: the alarm is off, but for what only its next look can see."""
    theirs, _, _ = trained(name, compiled=False)
    ours, _, step = trained(name, compiled=True, held=name in ONLY_THE_ALARM)
    assert max(off(mine, other) for mine, other in zip(ours, theirs, strict=True)) <= 1e-13, step.report
    assert name not in ONLY_THE_ALARM or "differs from the eager one" in step.report.reasons[-1]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONLY_THE_ALARM)
def test_what_only_the_alarm_sees_is_no_more_than_is_listed(name: str) -> None:
    theirs, _, _ = trained(name, compiled=False)
    ours, _, _ = trained(name, compiled=True, held=False)
    assert max(off(mine, other) for mine, other in zip(ours, theirs, strict=True)) > 1e-13, "take it off the list"


# --- the alarm --------------------------------------------------------------------------------------------------------


def broken(monkeypatch, change) -> None:
    """From now on graphs are wrong."""
    from hodiff.steps import _graph

    clean = _graph.clean

    def wrong(graph):
        clean(graph)
        change(graph)

    monkeypatch.setattr(_graph, "clean", wrong)


def sines_are_cosines(graph) -> None:
    for node in graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sin.default


@pytest.mark.table(plain=1)
@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 3)])
def test_a_wrong_graph_ends_in_eager(monkeypatch, norm) -> None:
    broken(monkeypatch, sines_are_cosines)
    net, x = nn.Sequential(norm(), NETS["tanh"]()), torch.randn(4, 3)
    start = copy.deepcopy(net)
    step = hodiff.compile_step(forces, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"differs from the eager one by .*more than is taken for rounding"):
        value = step(x)
    value.backward()
    forces(start, x).backward()
    assert off([*gradients(net), *net.buffers()], [*gradients(start), *start.buffers()]) == 0
    step(x)
    assert step.report.eager == 2 and step.report.checks == 1
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    with pytest.raises(hodiff.GraphError, match="differs from the eager one by"):
        step(x)


def through(net: nn.Module, x: Tensor, h: Tensor) -> Tensor:
    return forces(net, x) + h.square().mean()


@pytest.mark.parametrize("calls", ["all", "unchecked"])
@pytest.mark.parametrize("way", ["backward", "value_and_grad"])
def test_an_argument_may_be_computed_from_where(way: str, calls: str) -> None:
    """Its part of the gradient counts, and the comparison with eager does not free its graph."""
    net, x, apart = NETS["tanh"](), torch.randn(4, 3), torch.randn(4, 8, requires_grad=True)
    step = hodiff.compile_step(through, net, backend="replay", fallback="raise")
    for call in range(1, 9):
        of = net[0] if calls == "all" or call in (3, 5, 6, 7) else (lambda x: apart * 1)
        net.zero_grad()
        through(net, x, of(x).tanh()).backward()
        exact = gradients(net)
        net.zero_grad()
        if way == "backward":
            step(x, of(x).tanh()).backward()
            assert off(gradients(net), exact) <= 1e-14
        else:
            assert off([*step.value_and_grad(x, of(x).tanh())[1].values()], exact) <= 1e-14


@pytest.mark.wide
def test_a_graph_behind_an_argument_that_was_a_leaf_is_seen() -> None:
    """The loss differentiates through it, at a call that is not checked."""

    def loss(w: Tensor, y: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((w * y).sin().sum(), w, create_graph=True)
        return slope.square().sum()

    w, leaf = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    step = hodiff.compile_step(loss, w, backend="replay")
    for _ in range(2):
        step(leaf)
    with pytest.warns(hodiff.HodiffWarning, match="has a different graph than when it was traced"):
        value, gradient = step.value_and_grad(w.exp())
    exact = loss(w, w.exp())
    assert step.report.graphs == 1 and off([value, gradient], [exact, *torch.autograd.grad(exact, w)]) <= 1e-14


ALIKE = {
    "alpha": lambda w, x: (w.add(x, alpha=2), w.add(x, alpha=3)),
    "rounding": lambda w, x: (w * x.div(0.3, rounding_mode="floor"), w * x.div(0.3, rounding_mode="trunc")),
    "dtype": lambda w, x: (w * x.to(torch.bfloat16), w * x.to(torch.float32)),
    "kind of a number": lambda w, x: (w * (x > 0).mul(1).div(3), w * (x > 0).mul(True).logical_not()),
    "dimension": lambda w, x: (w * x.sum(0), w * x.sum(1)),
}
"""Operations that differ in an option alone."""


@pytest.mark.wide
@pytest.mark.parametrize("kind", ALIKE)
def test_operations_that_are_alike_are_not_one(kind: str) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        a, b = ALIKE[kind](w, x)
        return (a - b).square().sum()

    w, x = torch.rand(3, dtype=torch.float64, requires_grad=True), torch.randn(3, 3, dtype=torch.float64)
    step = hodiff.compile_step(loss, w, backend="replay", fallback="raise")
    exact = loss(w, x)
    value, gradient = step.value_and_grad(x)
    assert off([value, gradient], [exact, *torch.autograd.grad(exact, w)]) <= 1e-14 and exact > 1e-6


@pytest.mark.nightly
def test_a_graph_behind_an_argument_by_inductor() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(through, net, fallback="raise")
    for _ in range(3):
        through(net, x, net[0](x).tanh()).backward()
        exact = gradients(net)
        assert off([*step.value_and_grad(x, net[0](x).tanh())[1].values()], exact) <= 1e-12
        net.zero_grad()


@pytest.mark.wide
def test_calls_are_held_against_eager_at_powers_of_two_and_every_thousandth() -> None:
    net, x, held = NETS["tanh"](), torch.ones(2, 3), []
    step = hodiff.compile_step(plain, net, backend="replay")
    for call in range(1, 3002):
        before = step.report.checks
        step(x)
        held += [call] * (step.report.checks - before)
    assert held == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2000, 2048, 3000]
    assert step.report.calls == 3001 and step.report.difference == 0


@pytest.mark.table(plain=1)
@pytest.mark.parametrize(
    "loss",
    [
        lambda net, x: net(x).square().mean() + forces(net, x),  # the same rows twice: one operation, but two writes
        lambda net, x: (net(x), forces(net, x))[1],  # read for its statistics alone
        lambda net, x: (net[0](x), forces(net[1], x))[1],
    ],
)
def test_a_batch_norm_counts_each_call_also_one_that_nobody_reads(loss) -> None:
    net = nn.Sequential(nn.BatchNorm1d(3), NETS["tanh"]())
    twin = copy.deepcopy(net)
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for _ in range(3):  # the third call is not checked
        x = torch.randn(6, 3)
        for each, value in ((net, step(x)), (twin, loss(twin, x))):
            each.zero_grad()
            value.backward()
        assert off(gradients(net), gradients(twin)) == 0
        assert off(list(net.buffers()), list(twin.buffers())) == 0


def test_a_check_leaves_graphs_that_hold_buffers_as_they_are() -> None:
    net, x = nn.Sequential(nn.BatchNorm1d(3), NETS["tanh"]()), torch.randn(6, 3)
    step = hodiff.compile_step(plain, net, backend="replay", fallback="raise")
    before = net(x).mean()
    step(x)
    assert step.report.checks == 1
    before.backward()  # raises where a check has written into the statistics and counted it
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("where", ["everywhere", "in one sample"])
def test_a_loss_that_is_not_a_number_is_so_by_both(where: str) -> None:
    """At a call that is compared, too: the next is compiled as before."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(plain, net, backend="replay", fallback="raise")
    bad = x.clone()
    bad[0 if where == "in one sample" else slice(None)] = math.nan
    for given in (bad, bad, x, bad, x):
        net.zero_grad()
        value = step(given)
        value.backward()
        assert value.isnan() == given.isnan().any() and net[0].weight.grad.isnan().any() == given.isnan().any()
    assert step.report.eager == 0 and step.report.graphs == 1 and step.report.checks >= 3


@pytest.mark.wide
def test_rounding_of_low_precision_is_no_error() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 1)).float()
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    for _ in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = step(torch.randn(6, 3, dtype=torch.float32))
        value.backward()
    assert step.report.checks == 3


# --- training ---------------------------------------------------------------------------------------------------------


def clamped(p: Tensor) -> None:
    p.grad.clamp_(-0.1, 0.1)


def test_hooks_accumulation_scales_and_sums() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    twin = copy.deepcopy(net)
    step = hodiff.compile_step(residual, net, backend="replay", fallback="raise")
    for model, loss in ((net, step), (twin, partial(residual, twin))):
        model[0].weight.register_hook(lambda g: 2 * g)
        model[0].bias.register_post_accumulate_grad_hook(clamped)
        (3.0 * loss(x)).backward()
        value = loss(x)
        (value * value + model(x).mean()).backward()
    assert off(gradients(net), gradients(twin)) <= 1e-14


def test_a_hook_of_a_point_that_the_loss_differentiates_by_is_called() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3, requires_grad=True)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    step = hodiff.compile_step(loss, net, backend="replay")
    step(x)
    plain = step(x)
    x.register_hook(lambda g: 2 * g)
    for calls in (1, 2):  # not at a call that is compared with the eager loss alone
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = step(x)
        assert all("differentiates with respect to has a hook" in str(each.message) for each in caught)
        assert found.item() == pytest.approx(4 * plain.item(), rel=1e-6) and step.report.eager == calls


def test_a_scaler_clipping_and_accumulation_take_the_same_path() -> None:
    net = NETS["tanh"]()
    twin, batches = copy.deepcopy(net), torch.randn(6, 4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    for model, loss in ((net, step), (twin, partial(forces, twin))):
        optimizer, scaler = torch.optim.Adam(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**9)
        for number, x in enumerate(batches):
            scaler.scale(loss(x) / 2).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert off(list(net.parameters()), list(twin.parameters())) <= 1e-14


def test_lbfgs_takes_the_same_path() -> None:
    net, x = NETS["tanh"](), torch.randn(8, 3)
    twin = copy.deepcopy(net)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    for model, loss in ((net, step), (twin, partial(forces, twin))):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()  # noqa: B023
            value = loss(x)  # noqa: B023
            value.backward()
            return value

        optimizer.step(closure)
    assert off(list(net.parameters()), list(twin.parameters())) <= 1e-13


def test_the_value_hands_over_once_and_has_no_second_derivative() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    value = step(x)
    value.backward(retain_graph=True)
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()
    with pytest.raises(hodiff.GraphError, match="can be differentiated once"):
        torch.autograd.grad(step(x), list(net.parameters()), create_graph=True)
    value = step(x)
    with torch.no_grad():
        net[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_without_grad_mode_it_is_the_loss() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(plain, net, backend="replay", fallback="raise")
    with torch.no_grad():
        assert not step(x).requires_grad
        value, gradient = step.value_and_grad(x)
    assert torch.equal(value, plain(net, x).detach()) and net[0].weight.grad is None
    expected = torch.autograd.grad(plain(net, x), list(net.parameters()))
    assert off(list(gradient.values()), list(expected)) == 0
    assert list(gradient) == [name for name, _ in net.named_parameters()]


def test_aux_selections_and_containers() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)

    def loss(where, x):
        value = forces(where.module, x)
        return value, {"mean": where.module(x).mean(), "n": 3}

    step = hodiff.compile_step(loss, hodiff.select(net, "2.*"), has_aux=True, backend="replay", fallback="raise")
    value, aux = step(x)
    value.backward()
    assert not aux["mean"].requires_grad and aux["n"] == 3
    assert net[0].weight.grad is None and net[0].weight.requires_grad and net[2].weight.grad is not None
    (value, _), gradient = step.value_and_grad(x)
    assert list(gradient) == ["2.weight", "2.bias"] and torch.equal(gradient["2.weight"], net[2].weight.grad)

    w, b = torch.randn(3, requires_grad=True), torch.zeros((), requires_grad=True)
    step = hodiff.compile_step(lambda at, x: (x @ at["w"]).square().sum(), {"w": w, "b": b}, backend="replay")
    value, gradient = step.value_and_grad(x)
    assert torch.allclose(gradient["w"], 2 * x.T @ (x @ w)) and gradient["b"] == 0
    step(x).backward()
    assert b.grad is None and torch.allclose(w.grad, gradient["w"])


def module_loss(net, x):
    return forces(net, x)


def test_a_copy_is_a_step_of_its_own_parameters() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(module_loss, net, backend="replay", fallback="raise")
    step(x)
    for copied in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        copied(x).backward()
        assert net[0].weight.grad is None
        theirs = copied._where
        assert theirs is not net and theirs[0].weight.grad is not None


def test_two_networks_train_each_other() -> None:
    """A GAN: what is not in *where* gets what it gets in eager mode."""
    critic, maker = NETS["tanh"](), nn.Linear(2, 3)
    step = hodiff.compile_step(lambda maker, z: -critic(maker(z)).mean(), maker, backend="replay", fallback="raise")
    z = torch.randn(5, 2)
    step(z).backward()
    ours = [*gradients(maker), *gradients(critic)]
    maker.zero_grad(), critic.zero_grad()
    (-critic(maker(z)).mean()).backward()
    assert off(ours, [*gradients(maker), *gradients(critic)]) == 0


@pytest.mark.parametrize(
    ("loss", "where", "says"),
    [
        (3, nn.Linear(1, 1), "loss: got an int"),
        (plain, torch.zeros(2), "does not require grad"),
        (plain, nn.Tanh(), "no trainable parameter"),
    ],
)
def test_what_cannot_be_a_step(loss, where, says) -> None:
    with pytest.raises(hodiff.InputError, match=says):
        hodiff.compile_step(loss, where)


def test_a_loss_is_one_element_that_depends_on_where() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    with pytest.raises(hodiff.InputError, match=r"returned shape \(4, 1\), expected one element"):
        hodiff.compile_step(lambda net, x: net(x), net, backend="replay")(x)
    step = hodiff.compile_step(lambda w, x: net(x).mean(), torch.ones(2, requires_grad=True), backend="replay")
    with pytest.raises(hodiff.GraphError, match="does not depend on where"):
        step.value_and_grad(x)
    with pytest.raises(ZeroDivisionError, match="of the loss"):
        hodiff.compile_step(raising, net, backend="replay")(x)


def raising(net, x):
    raise ZeroDivisionError("of the loss")


def test_a_loss_that_raises_does_so_in_each_call() -> None:
    """An error of ours is raised as the graph is made, behind guards that then hold for a graph that is not there."""
    step = hodiff.compile_step(lambda net, x: hodiff.hvp(net, x, x).mean(), nn.Linear(3, 3), backend="replay")
    for _ in range(3):
        with pytest.raises(hodiff.InputError, match="expected one element"):
            step(torch.randn(4, 3))


def test_an_older_release_is_told(monkeypatch) -> None:
    monkeypatch.setattr("hodiff._core._needed.RELEASE", (2, 12))
    with pytest.raises(hodiff.HodiffError, match=r"needs PyTorch 2\.13"):
        hodiff.compile_step(plain, nn.Linear(1, 1))


@pytest.mark.wide
def test_after_a_compilation_that_failed_the_next_is_whole() -> None:
    """What PyTorch leaves of it, collected later, would put back dispatch keys of then: no gradient any more."""
    x = torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hodiff.compile_step(KINDS["func_hessian"], NETS["convolution"](), backend="replay")(x)
    step = hodiff.compile_step(KINDS["field"], NETS["residual"](), backend="replay", fallback="raise")
    step(x).backward()
    assert step.report.graphs == 1


@pytest.mark.table(plain=1)
@pytest.mark.parametrize("kind", ["weight_hvp", "point_grad"])
def test_a_step_is_traced_once(kind: str) -> None:
    """Also of a module point, whose classes are looked through for what is sharded, once something has loaded that."""
    importlib.import_module("torch.distributed.tensor")
    net = NETS["residual"]()
    step = hodiff.compile_step(KINDS[kind], net, backend="replay", fallback="raise")
    for _ in range(3):
        step(torch.randn(5, 3)).backward()
        hodiff.grad(lambda net: net(torch.ones(1, 2)).sum(), fresh_class())  # a class not met so far
    assert step.report.graphs == 1


def fresh_class() -> nn.Module:
    return type("Fresh", (nn.Linear,), {})(2, 1)


def test_parameters_can_be_swapped_between_calls() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    step(x).backward()
    net.zero_grad()
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.ones(8, 3)))
    step(x).backward()
    ours = gradients(net)
    net.zero_grad()
    forces(net, x).backward()
    assert off(ours, gradients(net)) == 0


def test_a_stance_of_the_compiler_is_kept() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay")
    with torch.compiler.set_stance("force_eager"), pytest.warns(hodiff.HodiffWarning, match="switched off. This call"):
        step(x).backward()
    assert step.report.graphs == 0
    step(x).backward()
    with torch.compiler.set_stance("force_eager"):
        step(x).backward()
    assert step.report.graphs == 1 and step.report.eager == 2


def test_an_assertion_on_numbers_is_kept() -> None:
    def loss(net, x):
        torch._assert_async(x.sum() < 10, "too large")  # an assert statement is pytest's own in a test
        return forces(net, x)

    step = hodiff.compile_step(loss, NETS["tanh"](), backend="replay", fallback="raise")
    step(torch.ones(2, 3))
    with pytest.raises((AssertionError, RuntimeError), match="too large"):
        step(torch.full((2, 3), 100.0))
    assert step.report.graphs == 1


@pytest.mark.wide
def test_threads_compile_steps_of_their_own_at_once() -> None:
    def work(x: Tensor) -> None:
        for _ in range(2):
            net = NETS["tanh"]()
            step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
            for _ in range(3):
                step(x).backward()
            counts.append(step.report.eager)

    counts: list[int] = []
    threads = [threading.Thread(target=work, args=(torch.randn(3 + n, 3),), daemon=True) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert counts == [0] * 6


@pytest.mark.parametrize("ended", [False, True])
def test_a_call_of_another_thread_keeps_a_step_from_being_compiled_for_once(ended: bool, monkeypatch) -> None:
    """What calls switch, they switch for all threads: Dynamo fails at it, in one of many ways."""
    net, x, inside, leave = NETS["tanh"](), torch.randn(4, 3), threading.Event(), threading.Event()
    step = hodiff.compile_step(forces, net, backend="replay")

    def f(z: Tensor) -> Tensor:
        inside.set()
        leave.wait(60)
        return z.sin().sum()

    other = threading.Thread(target=hodiff.grad, args=(f, torch.ones(2)), daemon=True)

    def compiled(*args: object, **kwargs: object) -> None:
        other.start()
        leave.set()
        other.join(60)
        raise KeyError("hodiff")

    if ended:
        monkeypatch.setattr(torch, "compile", compiled)
    else:
        other.start()
        inside.wait(60)
    with pytest.warns(hodiff.HodiffWarning, match="another thread was in a call of hodiff's.* This call"):
        step(x)
    assert step.report.eager == 1 and not step.report.graphs
    leave.set()
    other.join(60)
    monkeypatch.undo()
    step(x)
    assert step.report.eager == 1 and step.report.graphs == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo reads it
def test_a_step_inside_a_compiled_function_runs_beside_its_graphs() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    torch.compile(lambda x: 2 * step(x), backend="eager")(x).backward()
    ours = gradients(net)
    net.zero_grad()
    (2 * forces(net, x)).backward()
    assert off(ours, gradients(net)) < 1e-13


def test_a_tangent_reaches_the_value() -> None:
    w = torch.tensor(2.0, requires_grad=True)
    step = hodiff.compile_step(lambda w, x: (w * x).sin().sum(), w, backend="replay")
    step(torch.ones(2))
    with forward_ad.dual_level(), pytest.warns(hodiff.HodiffWarning, match="forward mode is on"):
        value = step(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
        tangent = forward_ad.unpack_dual(value).tangent
    torch.testing.assert_close(tangent, 4 * torch.tensor(2.0).cos())


def test_a_model_goes_with_its_step_and_so_do_graph_and_guards(monkeypatch) -> None:
    kept: list[weakref.ref] = []
    replay = hodiff.steps.CompiledStep._replay

    def noted(self, graph, inputs):
        kept.append(weakref.ref(graph))
        return replay(self, graph, inputs)

    def used() -> None:
        net = NETS["tanh"]()
        hodiff.compile_step(forces, net, backend="replay")(torch.randn(2, 3)).backward()
        kept.append(weakref.ref(net))

    def guards() -> int:
        gc.collect()
        return sum(type(each) is GuardManagerWrapper for each in gc.get_objects())

    monkeypatch.setattr(hodiff.steps.CompiledStep, "_replay", noted)
    before = guards()
    used()
    assert guards() <= before and [each() for each in kept] == [None, None]


def test_guards_that_fail_once_may_have_lost_an_exception() -> None:
    """Dynamo takes what a guard raises, a signal's handler in it, too, for a guard that does not hold."""
    from hodiff.steps import _dynamo

    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)
        step(torch.randn(5, 3))  # its guards fail, and another graph is made
    assert step.report.graphs == 2
    told = pytest.warns(hodiff.HodiffWarning, match="guards failed, and held when they were asked again")
    with mock.patch.object(_dynamo, "run", side_effect=hodiff.steps.Different), told:
        step(x).backward()
    assert step.report.graphs == 2 and not step.report.eager


# --- what a call leaves -----------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_frozen() -> None:
    net = NETS["tanh"]()
    net[0].bias.requires_grad_(False)
    step = hodiff.compile_step(lambda s, x: forces(s.module, x), hodiff.select(net, "2.*"), backend="replay")
    step(torch.randn(4, 3)).backward()
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True]


def test_a_step_keeps_nothing_of_a_call() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    for _ in range(2):
        value, gradients = step.value_and_grad(x)
    kept = [weakref.ref(tensor) for tensor in (x, value, *gradients.values())]
    assert value.grad_fn is None and all(g.grad_fn is None for g in gradients.values())
    del x, value, gradients
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)


def test_an_attempt_to_compile_draws_no_random_numbers_of_pythons() -> None:
    """It fails for half precision, once the loss has been traced."""
    net, x, values = NETS["tanh"]().half(), torch.randn(4, 3).half(), []
    loss = lambda net, x: plain(net, x) * random.random()
    step = hodiff.compile_step(loss, net, backend="replay")
    for each in (partial(loss, net), step):
        random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values.append(each(x).detach())
    assert torch.equal(*values) and step.report.eager == 1


def test_half_a_percent_that_no_rounding_explains_is_told(monkeypatch) -> None:
    net, x = NETS["tanh"]().double(), torch.randn(4, 3, dtype=torch.float64)
    step = hodiff.compile_step(plain, net, backend="replay")
    eager = step._whole
    step._whole = lambda x: 1.005 * eager(x)
    with pytest.warns(hodiff.HodiffWarning, match="more than is taken for rounding"):
        step(x)
    assert step.report.eager == 1


def test_the_aux_of_an_eager_call_is_detached() -> None:
    def loss(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        open(os.devnull).close()
        return plain(net, x), net(x)

    step = hodiff.compile_step(loss, NETS["tanh"](), has_aux=True, backend="replay")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value, aux = step(torch.randn(4, 3))
    assert step.report.eager == 1 and value.requires_grad and not aux.requires_grad


def test_two_turns_are_not_none() -> None:
    """Of a cube, where no shape tells that it was turned."""
    net, x = nn.Linear(3, 3), torch.randn(3, 3, 3)
    loss = lambda net, x: (net(x).transpose(0, 1).transpose(1, 2) * torch.arange(27.0).view(3, 3, 3)).square().mean()
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    assert float(step(x).detach()) == pytest.approx(float(loss(net, x).detach()), rel=1e-5)
    assert step.report.eager == 0
