"""A compiled step is the eager loss: the ways to write one, what changes between calls, and how training uses it."""

import contextlib
import copy
import enum
import gc
import importlib
import logging
import math
import operator
import pickle
import re
import sys
import threading
import warnings
import weakref
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core._versions import RELEASE
from hodiff.steps import _alarm
from tests.unit.steps.cases import KINDS, NETS, forces, plain, residual
from tests.unit.steps.changes import CHANGES, World

pytestmark = [
    pytest.mark.skipif(RELEASE < (2, 13), reason="compile_step asks for PyTorch 2.13"),
    pytest.mark.filterwarnings("default::hodiff.HodiffWarning", "ignore:.*:DeprecationWarning"),
]
LEFT = {
    "func_hessian": "forward mode over reverse mode, which Dynamo follows through some layers only",
    "batched_rows-groups": "PyTorch's own batching rule raises",
    "elementwise": "reads the first layer's bias",
    "field-attention": "an operator between two jets",
    "few_partials-attention": "an operator between two jets",
}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def off(ours: list, theirs: list) -> float:
    """The largest difference, relative to what is largest; infinite where one of two is missing."""
    scale = max([x.abs().max().item() for x in theirs if x is not None and x.numel()], default=1.0) or 1.0
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if (mine is None) != (other is None) or (mine is not None and mine.shape != other.shape):
            return float("inf")
        if mine is not None and mine.numel():
            worst = max(worst, (mine - other).abs().max().item() / scale)
    return worst


# --- the kinds of steps -----------------------------------------------------------------------------------------------


def kinds() -> list[tuple[str, str]]:
    pairs = [(kind, net) for kind in KINDS for net in NETS]
    return [pair for pair in pairs if pair[0] not in LEFT and "-".join(pair) not in LEFT]


@pytest.mark.drawn(5)
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


BY_INDUCTOR = [
    "forces", "penalty", "residual", "weight_hvp", "field", "critic", "third", "product", "flat", "inner_step",
    "batched_rows", "func_jacobian", "func_grad", "samples", "pair", "point_grad", "force_loss", "dense_hessian",
    "tangents", "few_partials",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning")  # inductor's own calls
@pytest.mark.parametrize("kind", BY_INDUCTOR if RELEASE[:2] == (2, 13) else BY_INDUCTOR[:6])
def test_a_step_by_inductor(kind: str) -> None:
    net, loss = NETS["tanh"](), KINDS[kind]
    step = hodiff.compile_step(loss, net, fallback="raise")
    for _ in range(2):
        x = torch.randn(5, 3)
        net.zero_grad()
        step(x).backward()
        _, by_name = hodiff.value_and_grad(loss, copy.deepcopy(net), args=(x,))
        ours = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        assert off(ours, list(by_name.values())) <= 1e-10


def test_kernels_are_kept_for_one_vector_width(monkeypatch) -> None:
    """The key of PyTorch's cache lacks it: a loop over 8 numbers at a time was taken for one over 4."""
    inductor = pytest.importorskip("torch._inductor")
    tags = []

    def noted(traced, *args: object, **kwargs: object):
        tags.append(torch.compiler.config.cache_key_tag)
        return traced

    monkeypatch.setattr(inductor, "standalone_compile", noted)
    with torch.compiler.config.patch(cache_key_tag="theirs"):  # monkeypatch would take it away for good
        for width in ("AVX2", "AVX512"):
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda width=width: width)
            hodiff.compile_step(plain, NETS["tanh"](), fallback="raise")(torch.randn(5, 3))
        assert tags == ["theirs AVX2", "theirs AVX512"] and torch.compiler.config.cache_key_tag == "theirs"


@pytest.mark.parametrize("raised", [0, 1, 2])
def test_what_has_no_form_in_cpp_is_called_from_python(raised: int, monkeypatch) -> None:
    inductor = pytest.importorskip("torch._inductor")
    asked = []

    def failing(traced, *args: object, **kwargs: object):
        asked.append(inductor.config.cpp_wrapper)
        if len(asked) <= raised:
            raise (
                RuntimeError("no such form") if raised == 1 else inductor.exc.InductorError(OSError("no compiler"), [])
            )
        return traced

    monkeypatch.setattr(inductor, "standalone_compile", failing)
    step, x = hodiff.compile_step(plain, NETS["tanh"](), fallback="raise"), torch.randn(5, 3)
    if raised < 2:
        step(x).backward()
    else:
        with pytest.raises(hodiff.GraphError, match=r"inductor fails \(OSError.*backend='replay' needs no compiler"):
            step(x)
    assert asked == [True, False, False][: raised + 1 if raised < 2 else 2] and not inductor.config.cpp_wrapper


def test_sizes_are_inputs_that_cpp_does_not_take(monkeypatch) -> None:
    inductor = pytest.importorskip("torch._inductor")
    asked = []

    def noted(traced, *args: object, **kwargs: object):
        asked.append(inductor.config.cpp_wrapper)
        return traced

    monkeypatch.setattr(inductor, "standalone_compile", noted)
    step = hodiff.compile_step(plain, NETS["tanh"](), fallback="raise")
    for count in (5, 6, 7):
        step(torch.randn(count, 3)).backward()
    assert asked == [True, False] and not step.report.eager


@pytest.mark.slow
@pytest.mark.parametrize(("points", "dtype", "calls"), [(128, "float32", 2), (127, "float32", 0), (128, "float64", 0)])
def test_tanh_of_many_float32_is_a_call_of_its_own(points: int, dtype: str, calls: int) -> None:
    """4,096 numbers in each of two layers; in the loops of inductor it takes three times as long."""
    from torch._inductor import lowering

    tanh = torch.ops.aten.tanh.default
    before = lowering.lowerings[tanh]
    kind = getattr(torch, dtype)
    net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(kind)
    step, x = hodiff.compile_step(forces, net, fallback="raise"), torch.randn(points, 3, dtype=kind)
    step(x).backward()
    assert lowering.lowerings[tanh] is before
    ours = gradients(net)
    net.zero_grad()
    forces(net, x).backward()
    assert off(ours, gradients(net)) <= (1e-12 if dtype == "float64" else 1e-5)
    for _ in range(3):  # the alarm looks at the first, second and fourth
        step(x)
    with torch.profiler.profile() as seen:
        step(x)
    assert sum(event.name == "aten::tanh" for event in seen.events()) == calls * torch.backends.mkl.is_available()


LAZY = {
    "negative": lambda: torch.randn(4, dtype=torch.complex128).conj().imag,
    "conjugate": lambda: torch.randn(4, dtype=torch.complex128).conj(),
    "zeros without memory": lambda: torch._efficientzerotensor((4,), dtype=torch.float64),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@pytest.mark.parametrize("kind", LAZY)
def test_kernels_see_the_numbers_of_a_lazy_view(kind: str) -> None:
    """Of PyTorch's own `torch.compile` they read the memory, without the sign that the view has (2.13 to 2.15)."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((w * x).exp().abs().square().sum(), x, create_graph=True)
        return slope.abs().square().sum()

    w = torch.randn(4, dtype=torch.float64, requires_grad=True)
    step = hodiff.compile_step(loss, w, fallback="raise")
    for _ in range(3):
        x = LAZY[kind]()
        value, gradient = step.value_and_grad(x)
        exact, theirs = hodiff.value_and_grad(loss, w, args=(x,))
        assert off([value, gradient], [exact, theirs]) <= 1e-12


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


def test_a_mistake_in_the_loss_has_its_line() -> None:
    """The trace takes it; the graph's error would say nothing of the loss."""

    def mixed(net: nn.Module, x: Tensor) -> Tensor:
        return net(x.float()).square().mean()

    with pytest.raises(RuntimeError, match="must have the same dtype") as told:
        hodiff.compile_step(mixed, nn.Linear(3, 1).double(), backend="replay")(torch.randn(4, 3))
    assert any(each.name == "mixed" for each in told.traceback) and told.value.__context__ is None


def test_a_reason_names_the_line_of_the_loss() -> None:
    def branching(net: nn.Module, x: Tensor) -> Tensor:
        value = net(x).square().mean()
        return value if torch.nn.Parameter(x).sum() > value else 2 * value

    step = hodiff.compile_step(branching, NETS["tanh"](), backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"\(line \d+ of test_steps.py: `return value if torch.nn.Parameter"):
        step(torch.randn(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bernoulli_by_inductor_draws_as_eager_does(dtype: torch.dtype) -> None:
    """Seldom zero, so that the alarm would see it late: PyTorch's decomposition draws float32 for float64."""

    def loss(w: Tensor, p: Tensor) -> Tensor:
        return (w * torch.bernoulli(p)).square().sum()

    w, p = torch.ones(1, requires_grad=True), torch.full((4, 5), 0.9, dtype=dtype).T
    step = hodiff.compile_step(loss, w, fallback="raise")
    for seed in range(40):
        torch.manual_seed(seed)
        value, after = step(p).detach(), torch.get_rng_state()
        torch.manual_seed(seed)
        assert value == loss(w, p) and torch.equal(after, torch.get_rng_state())


def tangent(net: nn.Module, x: Tensor) -> Tensor:
    return torch.func.jvp(net, (x,), (torch.ones_like(x),))[1].square().mean()


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check. is deprecated:FutureWarning")
def test_zeros_of_forward_mode_have_memory_in_kernels() -> None:
    """A process died of one."""
    net, x = deep(), torch.randn(5, 3)
    step = hodiff.compile_step(tangent, net, fallback="raise")
    for _ in range(3):
        value, gradient = step.value_and_grad(x)
        exact, theirs = hodiff.value_and_grad(tangent, net, args=(x,))
        assert off([value, *gradient.values()], [exact, *theirs.values()]) <= 1e-12


def test_no_list_holds_zeros_without_memory() -> None:
    from hodiff.steps import _graph

    seen = []
    with mock.patch.object(_graph, "replayed", lambda traced, in_script: seen.append(traced) or traced):
        hodiff.compile_step(tangent, deep(), backend="replay", fallback="raise")(torch.randn(5, 3))
    assert not any("efficientzerotensor" in str(node.target) for node in seen[0].graph.nodes)


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


@pytest.mark.slow
def test_inductor_draws_as_eager_does() -> None:
    limit = sys.getrecursionlimit()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    step, x = hodiff.compile_step(forces, net, fallback="raise"), torch.randn(5, 3)
    step(x)
    for seed in (1, 2, 3):  # the alarm looks at the first two of these
        torch.manual_seed(seed)
        net.zero_grad()
        step(x).backward()
        ours, after = gradients(net), torch.get_rng_state()
        torch.manual_seed(seed)
        net.zero_grad()
        forces(net, x).backward()
        assert off(ours, gradients(net)) <= 1e-10 and torch.equal(after, torch.get_rng_state())
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("kind", ["forces", "samples", "dense_hessian", "pair"])
def test_the_interpreter_and_python_give_the_same_bits(kind: str, monkeypatch) -> None:
    """Of one size of batch, and of sizes that vary; Python serves what the interpreter does not know."""
    from hodiff.steps import _backends

    def unknown(self, node):
        raise _backends._NotInterpreted

    batches, results = [torch.randn(n, 3) for n in (5, 7, 9)], []
    for interpreted in (True, False):
        torch.manual_seed(0)
        net = NETS["residual"]()
        step = hodiff.compile_step(KINDS[kind], net, backend="replay", fallback="raise")
        if not interpreted:
            monkeypatch.setattr(_backends.Script, "call_function", unknown)
        made = watched(monkeypatch)
        results.append([each for x in batches for each in step.value_and_grad(x)[1].values()])
        assert made[0] is interpreted
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def watched(monkeypatch) -> list[bool]:
    """Of each graph from now on whether the interpreter runs it."""
    from hodiff.steps import _backends, _graph

    made: list[bool] = []
    function = _backends.Script.function

    def noted(self):
        made[-1] = True
        return function(self)

    begin = _graph.replayed

    def replayed(*args, **kwargs):
        made.append(False)
        return begin(*args, **kwargs)

    monkeypatch.setattr(_backends.Script, "function", noted)
    monkeypatch.setattr(_graph, "replayed", replayed)
    return made


def test_the_interpreter_runs_a_penalty_through_batch_norm(monkeypatch) -> None:
    """Its backward pass in training reads no running statistics, though it is given them."""
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    other, x, made = copy.deepcopy(net), torch.randn(5, 3), watched(monkeypatch)
    step = hodiff.compile_step(of_gradient_alone, net, backend="replay", fallback="raise")
    for call in range(6):
        for module in (net, other):
            module.zero_grad()
            module.train(call < 3)
        step(x).backward()
        of_gradient_alone(other, x).backward()
        assert off(gradients(net), gradients(other)) <= 1e-13
        assert off([*net.buffers()], [*other.buffers()]) == 0
    assert made == [True, True]


def test_without_the_interpreter_python_runs_the_list(monkeypatch) -> None:
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step, made = hodiff.compile_step(forces, net, backend="replay", fallback="raise"), watched(monkeypatch)
    step(x).backward()
    ours = gradients(net)
    net.zero_grad()
    forces(net, x).backward()
    assert off(ours, gradients(net)) == 0 and made == [False]
    step(x)
    monkeypatch.delattr(torch.fx.graph_module._WrappedCall, "__call__")
    step(x)  # not held against eager; a module would hand the call on three times


class Keeping(nn.Module):
    """Its forward keeps something, as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.kept, self.count = nn.Linear(3, 1), how, {}, 0

    def forward(self, x):
        y = self.layer(x).sin()
        if self.how == "attribute":
            self.features = y
        if self.how == "entry":
            self.kept["features"] = y
        if self.how == "count":
            self.count += 1
        return y


def of_gradient_alone(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().mean()


STORED = "it stores a tensor in a Python object, as self.features = y in a forward does; return that as aux"


@pytest.mark.parametrize(
    ("loss", "how", "told"),
    [
        (of_gradient_alone, "attribute", STORED),  # of which PyTorch says no name
        (of_gradient_alone, "entry", STORED),
        (of_gradient_alone, "count", "it changes a Python object, where.count; return that as aux"),
        (plain, "attribute", "it changes a Python object, where.features; return that as aux"),
        (plain, "entry", "it changes a Python object, where.kept; return that as aux"),
    ],
)
def test_a_module_that_keeps_something_is_told_what(loss, how: str, told: str) -> None:
    step = hodiff.compile_step(loss, Keeping(how), backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=re.escape(told)):
        step(torch.randn(4, 3)).backward()
    assert step.report.eager == 1


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


ONLY_THE_ALARM = {"identity_of"}
"""What no guard sees: a plain `object()` put in the place of another."""


@pytest.mark.drawn(10)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen(name: str) -> None:
    """By guards and refusals alone: the alarm is off."""
    theirs, _, _ = trained(name, compiled=False)
    ours, _, step = trained(name, compiled=True, held=name in ONLY_THE_ALARM)
    assert max(off(mine, other) for mine, other in zip(ours, theirs, strict=True)) <= 1e-13, step.report


def test_a_key_of_an_object_and_a_caught_lookup_stay_eager() -> None:
    for name in ("dunder_dict_get", "try_key"):
        with pytest.warns(hodiff.HodiffWarning, match="not guarded; use get.*This step runs uncompiled"):
            trained(name, compiled=True)


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


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 3)])
def test_a_wrong_graph_ends_in_eager_and_names_the_operation(monkeypatch, norm) -> None:
    broken(monkeypatch, sines_are_cosines)
    net, x = nn.Sequential(norm(), NETS["tanh"]()), torch.randn(4, 3)
    start = copy.deepcopy(net)
    step = hodiff.compile_step(forces, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"differs from the eager one.*first operation that differs is tanh"):
        value = step(x)
    value.backward()
    forces(start, x).backward()
    assert off([*gradients(net), *net.buffers()], [*gradients(start), *start.buffers()]) == 0
    step(x)
    assert step.report.eager == 2 and step.report.checks == 1
    step = hodiff.compile_step(forces, net, backend="replay", fallback="raise")
    with pytest.raises(hodiff.GraphError, match="first operation that differs is tanh"):
        step(x)


def test_a_reason_is_said_where_dynamo_explains_nothing() -> None:
    net = NETS["tanh"]()
    net[1].register_full_backward_hook(lambda *_: None)
    step = hodiff.compile_step(forces, net, backend="replay")
    told = r"compiled: Module-level backwards hooks .*\w \(line \d+ of cases.py.*\)\. This step"
    with pytest.warns(hodiff.HodiffWarning, match=told):
        step(torch.ones(2, 3)).backward()
    assert step.report.eager == 1


def _marked(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


@pytest.mark.parametrize("mark", [Tensor.requires_grad_, _marked])
def test_a_tensor_marked_in_the_loss_has_a_reason_and_a_way_out(mark) -> None:
    net = NETS["tanh"]()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        x = mark(x)
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().mean() + net(x).mean()

    step = hodiff.compile_step(loss, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"sets it on a tensor from outside .*x\.detach\(\)"):
        value = step(torch.ones(2, 3))
    assert value == forces(net, torch.ones(2, 3)) and step.report.eager == 1
    out = hodiff.compile_step(forces, net, backend="replay", fallback="raise")  # begins as the reason says
    assert out(torch.ones(2, 3)) == value


@pytest.mark.parametrize("number", [lambda lr: lr, torch.tensor])
def test_a_learning_rate_read_from_an_optimizer_may_vary(number) -> None:
    net = NETS["tanh"]()
    group = torch.optim.SGD(net.parameters(), lr=0.1).param_groups[0]

    def scaled(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean() * number(group["lr"])

    def power(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).abs().pow(number(group["lr"])).mean()

    for loss in (scaled, power):
        step = hodiff.compile_step(loss, net, backend="replay")
        for lr in (0.1, 0.05, 0.02):
            group["lr"] = lr
            assert off([step(torch.ones(2, 3)).detach()], [loss(net, torch.ones(2, 3)).detach()]) <= 1e-14
        assert not step.report.reasons


ARITHMETIC = {
    "+ - *": (lambda n: 1 + 0.1 * n - -n, True),
    "/": (lambda n: n / 3, True),
    "1 /": (lambda n: 1 / (n + 1), False),  # Python raises for 1 / 0, and the interpreter does not
    "**": (lambda n: 0.9**n, False),
    "%": (lambda n: n % 0.7, False),
    "math": (lambda n: math.cos(n) + math.floor(n), False),
    "int": (lambda n: int(n) // 2, None),
    "large": (lambda n: int(n) * 10**12 * int(n) / 1e24, False),  # more than an integer of a kernel holds
}


@pytest.mark.parametrize("numbers", [(0.5, 1.7, 2.0, 3.25), (1, 2, 3000, 4)], ids=["float", "int"])
@pytest.mark.parametrize("kind", ARITHMETIC)
def test_a_number_that_varies_is_an_input_of_the_second_graph(kind: str, numbers, monkeypatch) -> None:
    of, interpreted = ARITHMETIC[kind]
    net, x, made = NETS["tanh"](), torch.randn(4, 3), watched(monkeypatch)

    def loss(net: nn.Module, x: Tensor, n: float) -> Tensor:
        return forces(net, x) * of(n) + x.new_full((2,), n).sum()

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in numbers:
        value, gradient = step.value_and_grad(x, n)
        exact, theirs = hodiff.value_and_grad(loss, net, args=(x, n))
        assert off([value, *gradient.values()], [exact, *theirs.values()]) == 0
    assert made == [True, isinstance(numbers[0], int) if interpreted is None else interpreted]


@pytest.mark.slow
def test_floats_that_vary_are_inputs_of_kernels() -> None:
    """Also in a process that has compiled one before: Dynamo remembers what it shall take for constants."""
    from torch._dynamo.symbolic_convert import TensorifyState

    net, x = NETS["tanh"](), torch.randn(4, 3)
    for of, _ in ARITHMETIC.values():

        def loss(net: nn.Module, x: Tensor, n: float, of=of) -> Tensor:
            return forces(net, x) * of(n)

        step = hodiff.compile_step(loss, net, fallback="raise")
        for n in (0.5, 1.7, 2.0, 3.25, 2.6):
            value, gradient = step.value_and_grad(x, n)
            exact, theirs = hodiff.value_and_grad(loss, net, args=(x, n))
            assert off([value, *gradient.values()], [exact, *theirs.values()]) <= 1e-10
        assert step.report.graphs == 2 and not TensorifyState.force_specializations


@pytest.mark.slow
@pytest.mark.parametrize("of", [lambda n: 10 // n, lambda n: 10 % (n - 3)])
def test_kernels_do_not_divide_by_zero(of) -> None:
    """They give 0, or end the process: so each number has a graph."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * of(n), net, fallback="raise")
    for n in (4, 5, 7):
        assert off([step(x, n).detach()], [(plain(net, x) * of(n)).detach()]) <= 1e-12
    with pytest.raises(ZeroDivisionError, match="by zero"):
        step(x, 0 if of(7) == 1 else 3)
    assert step.report.graphs == 3
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * (n // 3 + len(x) % 3), net, fallback="raise")
    for n in (4, 5, 7, 0, -4):
        step(x, n)
    assert step.report.graphs == 2


@pytest.mark.parametrize("calls", [3, 4])
def test_an_error_of_arithmetic_stays_an_error(calls: int) -> None:
    """At a call that is held against eager, and at one that is not."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * (1 / n), net, backend="replay", fallback="raise")
    for n in (1.5, 0.7, 0.3, 0.1)[:calls]:
        step(x, n)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        step(x, 0.0)
    assert step(x, 0.2) == plain(net, x) * (1 / 0.2) and step.report.graphs == 2


WRONG = {
    "1.0 // 0.1 is 10": (lambda n: n // 0.1, (1.0, 0.3, 0.6)),
    "in place": (lambda n: operator.ifloordiv(n, 0.1), (1.0, 0.3, 0.6)),
    "of a float": (lambda n: 1.0 // n, (0.3, 0.1, 0.7)),
    "(-1) ** 2 is -1": (lambda n: (-1) ** n, (3, 5, 4)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_the_tracer_gets_wrong_of_a_number_has_a_graph_for_each_value(kind: str) -> None:
    (of, numbers), net, x = WRONG[kind], NETS["tanh"](), torch.randn(4, 3)

    def loss(net: nn.Module, x: Tensor, n: float) -> Tensor:
        return plain(net, x) * of(n)

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in (*numbers, *numbers):
        assert step(x, n) == loss(net, x, n)
    assert step.report.graphs == 3


@pytest.mark.parametrize(
    ("of", "told"),
    [(lambda n: n // 0.1, "it uses // with a Python float"), (lambda n: (-1) ** n, "a power of a negative number")],
)
def test_what_the_tracer_gets_wrong_of_a_size_stays_eager(of, told: str) -> None:
    """Sizes stay inputs where numbers become constants."""
    net = NETS["tanh"]()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return plain(net, x) * of(len(x))

    step = hodiff.compile_step(loss, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=told):
        for x in map(torch.ones, [(3, 3), (5, 3), (4, 3), (6, 3)]):
            assert step(x) == loss(net, x)
    assert step.report.graphs == 1 and step.report.eager == 3


def test_a_ninth_graph_has_a_reason() -> None:
    net = NETS["tanh"]()
    step = hodiff.compile_step(lambda net, x, how: plain(net, x) * len(how), net, backend="replay")
    for n in range(8):
        step(torch.ones(2, 3), "a" * n)
    with pytest.warns(hodiff.HodiffWarning, match="it has eight graphs, .* as a tensor. This step runs uncompiled"):
        step(torch.ones(2, 3), "a" * 8)
    assert step.report.graphs == 8 and step.report.eager == 1


def test_a_number_that_a_tensor_holds_has_a_reason() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=None), NETS["tanh"]())
    step = hodiff.compile_step(plain, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"a number that a tensor holds, .* leave it in the tensor"):
        step(torch.randn(4, 3))


VARYING: dict[str, tuple] = {
    "probability": (lambda: nn.Dropout(0.5), "p", (0.5, 0.25, 0.25, 0.5, 0.75)),
    "momentum": (lambda: nn.BatchNorm1d(3), "momentum", (0.1, 0.2, 0.2, 0.1, 0.3)),
    "negative slope": (lambda: nn.LeakyReLU(0.1), "negative_slope", (0.1, 0.2, 0.2, 0.1, 0.3)),
}


@pytest.mark.parametrize("kind", VARYING)
def test_a_number_that_cannot_be_an_input_has_a_graph_for_each_value(kind: str) -> None:
    layer, name, values = VARYING[kind]
    net = nn.Sequential(layer(), NETS["tanh"]())
    other = copy.deepcopy(net)
    step, x = hodiff.compile_step(plain, net, backend="replay", fallback="raise"), torch.randn(4, 3)
    for value in values:
        setattr(net[0], name, value)
        setattr(other[0], name, value)
        torch.manual_seed(0)
        ours = step(x).detach()
        torch.manual_seed(0)
        assert ours == plain(other, x)
    assert step.report.graphs == (2 if kind == "negative slope" else 3)


def exponent(net: nn.Module, x: Tensor, n: float) -> Tensor:
    return (net(x).square() + 1).pow(n).mean()


def logarithm(net: nn.Module, x: Tensor, n: float) -> Tensor:
    return plain(net, x) * math.log(n)


@pytest.mark.parametrize("numbers", [(1.5, 2.5, 1.5, 3.5), (2, 3, 2, 4)], ids=["float", "int"])
@pytest.mark.parametrize("loss", [exponent, logarithm])
def test_an_argument_that_cannot_be_an_input_has_a_graph_for_each_value(loss, numbers) -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in numbers:
        assert step(x, n) == loss(net, x, n)
    assert step.report.graphs <= 3


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


@pytest.mark.slow
def test_a_graph_behind_an_argument_by_inductor() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(through, net, fallback="raise")
    for _ in range(3):
        through(net, x, net[0](x).tanh()).backward()
        exact = gradients(net)
        assert off([*step.value_and_grad(x, net[0](x).tanh())[1].values()], exact) <= 1e-12
        net.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("of", [lambda x, n: n * n * 0.5, lambda x, n: x.shape[0] * x.shape[0] * 1.0])
def test_products_of_integers_are_not_rounded_to_float32_by_kernels(of) -> None:
    net = NETS["tanh"]()
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * of(x, n), net, fallback="raise")
    for n in (3, 4, 5001, 7001):
        x = torch.randn(n, 3)
        assert abs(step(x, n) / (plain(net, x) * of(x, n)) - 1) <= 1e-12


def test_a_number_of_numpy_is_a_tensor_to_the_tracer() -> None:
    net, x = NETS["tanh"]().float(), torch.randn(4, 3, dtype=torch.float32)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * n, net, backend="replay")
    with pytest.warns(
        hodiff.HodiffWarning, match=r"torch.float64, and the eager one torch.float32; .* float\(number\)"
    ):
        assert step(x, np.float64(0.5)).dtype == torch.float32


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def test_an_enumeration_chooses() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)

    def loss(net: nn.Module, x: Tensor, kind: Kind) -> Tensor:
        return plain(net, x) * (2 if kind is Kind.ONE else 3)

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for kind in (Kind.ONE, Kind.TWO, Kind.ONE):
        assert step(x, kind) == loss(net, x, kind)
    assert step.report.graphs == 2


class Counting(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 1), how
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "buffer":
            self.count += 1
        if self.how == "mode":
            self.eval()
        return self.layer(x)


def variable(net: nn.Module, x: Tensor) -> Tensor:
    x = torch.autograd.Variable(x, requires_grad=True)
    return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].square().mean()


def of_an_iterator(net: nn.Module, x: Tensor) -> Tensor:
    found = torch.autograd.grad(plain(net, x), net.parameters(), create_graph=True)
    return sum(g.square().sum() for g in found)


def moved(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone()
    x.data += 1
    return plain(net, x)


def jacobian_of_slopes(net: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.hessian(lambda q: net(q).squeeze() + (q**2).sum()))(x).square().mean()


GENERATOR = torch.Generator()
TOLD = {
    "buffer": (plain, lambda: Counting("buffer"), r"where._buffers; write into a buffer in place"),
    "mode": (plain, lambda: Counting("mode"), r"where.training; call train\(\) or eval\(\) outside"),
    "variable": (variable, NETS["tanh"], r"torch.autograd.Variable; write x"),
    "iterator": (of_an_iterator, NETS["tanh"], r"net.parameters\(\); write list\(...\)"),
    "data": (moved, NETS["tanh"], r"it writes to .data; compute a tensor"),
    "tangent": (tangent, NETS["norm"], r"hodiff.jvp\(f, x, v, create_graph=True\) compiles"),
    "hessian": (jacobian_of_slopes, NETS["tanh"], r"use hodiff.hessian, or"),
    "generator": (
        lambda net, x: plain(net, x + torch.randn(3, generator=GENERATOR)), NETS["tanh"], r"such as a torch.Generator"
    ),
    "nothing": (lambda net, x: torch.tensor(3), NETS["tanh"], r"depends on nothing that requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TOLD)
def test_a_reason_says_what_to_write(kind: str) -> None:
    loss, net, told = TOLD[kind]
    step = hodiff.compile_step(loss, net(), backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=told):
        step(torch.randn(4, 3))


def test_calls_are_held_against_eager_at_powers_of_two() -> None:
    net = NETS["tanh"]()
    step = hodiff.compile_step(plain, net, backend="replay")
    for _ in range(9):
        step(torch.ones(2, 3)).backward()
    assert step.report.checks == 4 and step.report.calls == 9 and step.report.difference == 0


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


def test_replay_keeps_what_acts_and_gives_no_result() -> None:
    """Neither draws that nobody reads nor assertions are in the schemas that TorchScript's interpreter asks."""

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.rand(7)
        torch._assert_async((x < 5).all(), "too large")
        return forces(net, x)

    net = NETS["tanh"]()
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for _ in range(3):  # the third call is not checked
        x, before = torch.rand(4, 3), torch.get_rng_state()
        step(x)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        loss(net, x)
        assert torch.equal(torch.get_rng_state(), after)
    with pytest.raises(RuntimeError, match="too large"):
        step(x + 100)


def test_a_check_leaves_graphs_that_hold_buffers_as_they_are() -> None:
    net, x = nn.Sequential(nn.BatchNorm1d(3), NETS["tanh"]()), torch.randn(6, 3)
    step = hodiff.compile_step(plain, net, backend="replay", fallback="raise")
    before = net(x).mean()
    step(x)
    assert step.report.checks == 1
    before.backward()  # raises where a check has written into the statistics and counted it
    assert all(p.grad is not None for p in net.parameters())


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


def test_an_older_release_is_told(monkeypatch) -> None:
    monkeypatch.setattr("hodiff._core._versions.RELEASE", (2, 12))
    with pytest.raises(hodiff.HodiffError, match=r"needs PyTorch 2\.13"):
        hodiff.compile_step(plain, nn.Linear(1, 1))


def test_after_a_compilation_that_failed_the_next_is_whole() -> None:
    """What PyTorch leaves of it, collected later, would put back dispatch keys of then: no gradient any more."""
    x = torch.randn(5, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hodiff.compile_step(KINDS["func_hessian"], NETS["convolution"](), backend="replay")(x)
    step = hodiff.compile_step(KINDS["field"], NETS["residual"](), backend="replay", fallback="raise")
    step(x).backward()
    assert step.report.graphs == 1


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


def test_a_reentrant_checkpoint_stays_eager() -> None:
    """It reaches parameters by `backward()` alone, so that nothing could be compared."""

    def loss(net, x):
        return checkpoint(net, x, use_reentrant=True).square().mean()

    net, x = NETS["tanh"](), torch.randn(4, 3, requires_grad=True)
    step = hodiff.compile_step(loss, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match="checkpoint with use_reentrant=True.* This step runs uncompiled"):
        step(x).backward()
    ours = gradients(net)
    net.zero_grad()
    loss(net, x).backward()
    assert off(ours, gradients(net)) == 0 and step.report.eager == 1


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


@pytest.mark.parametrize("earlier", [False, True])
def test_of_a_wrong_shape_the_eager_loss_speaks_alone(earlier: bool, capfd, caplog) -> None:
    step = hodiff.compile_step(forces, NETS["tanh"](), backend="replay", fallback="raise")
    if earlier:
        step(torch.randn(4, 3))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        warnings.simplefilter("error")
        step(torch.randn(4, 2))
    assert not capfd.readouterr().err and not [each for each in caplog.records if each.levelno >= logging.WARNING]


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


def test_a_model_goes_with_its_step() -> None:
    def used() -> weakref.ref[nn.Module]:
        net = NETS["tanh"]()
        hodiff.compile_step(forces, net, backend="replay")(torch.randn(2, 3)).backward()
        return weakref.ref(net)

    net = used()
    gc.collect()
    assert net() is None


def test_words_for_a_backend_and_for_aux() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    with pytest.raises(hodiff.InputError, match=r"backend: got 'inductr', .*did you mean 'inductor'\?"):
        hodiff.compile_step(forces, net, backend="inductr")(x)
    with pytest.raises(hodiff.InputError, match=r"has_aux=True expects \(loss, extra\)"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hodiff.compile_step(forces, net, has_aux=True, backend="replay")(x)
