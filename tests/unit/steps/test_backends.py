"""What runs the list of operations of a step: kernels, or one function of Python."""

import contextlib
import copy
import math
import sys
import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff._core._versions import RELEASE
from tests.unit.steps.cases import KINDS, NETS, forces, plain
from tests.unit.steps.support import MARKS, gradients, of_gradient_alone, off, tangent

pytestmark = MARKS
BY_INDUCTOR = [
    "forces", "penalty", "residual", "weight_hvp", "field", "critic", "third", "product", "flat", "inner_step",
    "batched_rows", "func_jacobian", "func_grad", "samples", "pair", "point_grad", "force_loss", "dense_hessian",
    "tangents", "few_partials",
]  # fmt: skip


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
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


def test_a_backend_is_given_the_numbers_of_a_lazy_view(monkeypatch) -> None:
    """As the test above has it, without a compiler."""
    from torch._dynamo.backends import registry

    from hodiff.steps import _backends

    monkeypatch.setattr(registry, "lookup_backend", lambda name: lambda traced, stand_ins: lambda *given: given)
    for kind, made in LAZY.items():
        plain, lazy = torch.ones(4), made()
        first, second = _backends.compiled(mock.Mock(), [], [plain, lazy, 3], "other")(plain, lazy, 3)[:2]
        assert first is plain and torch.equal(second, lazy + 0), kind
        assert not (second.is_neg() or second.is_conj() or second._is_zerotensor()), kind


@pytest.mark.nightly
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


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.nightly
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
    with mock.patch.object(_graph, "replayed", lambda traced: seen.append(traced) or traced):
        hodiff.compile_step(tangent, deep(), backend="replay", fallback="raise")(torch.randn(5, 3))
    assert not any("efficientzerotensor" in str(node.target) for node in seen[0].graph.nodes)


@pytest.mark.nightly
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


def called_by_name() -> dict[str, list]:
    """Of each operation that has a plain name the arguments that it is called with in lists of steps, and more."""
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    single, whole = x.float(), torch.arange(12).reshape(4, 3)
    of_two = [[(x, y), {}], [(x, y[0]), {}], [(single, x), {}], [(whole, single), {}], [(x[0, 0], single), {}]]
    by_number = [[(x, 2), {}], [(x, 0.1), {}], [(single, 0.1), {}], [(whole, 2), {}], [(whole, 0.5), {}]]
    of_one = [[(x,), {}], [(single,), {}], [(x.T,), {}]]
    double = {"dtype": torch.float64}
    return {
        **{f"{name}.Tensor": of_two for name in ("mul", "add", "sub", "div")},
        **{f"{name}.Scalar": by_number for name in ("mul", "add", "sub", "div")},
        **dict.fromkeys(("t", "tanh", "neg", "exp", "sin", "cos", "sqrt", "reciprocal", "sigmoid"), of_one),
        "mm": [[(x, y.T), {}], [(single, single.T), {}]],
        "addmm": [[(x[0, :3], x[:3, :3], x[:3]), {}], [(x[:3], x[:3], y[:3]), {"beta": 0.5, "alpha": 2}]],
        "bmm": [[(x[None], y.T[None]), {}]],
        "pow.Tensor_Scalar": by_number,
        "sum": [*of_one, [(single,), double], [(whole,), {}]],
        "mean": [*of_one, [(single,), double]],
        "sum.dim_IntList": [[(x, [0]), {}], [(x, [0, 1], True), {}], [(single, [1]), double], [(x, []), {}]],
        "select.int": [[(x, 1, 2), {}], [(x, 0, -1), {}]],
        "unsqueeze": [[(x, 1), {}], [(x, -1), {}]],
        "squeeze.dim": [[(x[:, :1], 1), {}], [(x, 1), {}]],
        "transpose.int": [[(x, 0, 1), {}]],
        "permute": [[(x, [1, 0]), {}]],
        "clone": [*of_one, [(x.T,), {"memory_format": torch.contiguous_format}]],
        "cat": [[([x, y],), {}], [([x, y], 1), {}], [([x, single], -1), {}]],
        "ones_like": [*of_one, [(x,), {"pin_memory": False, "dtype": torch.float32}]],
        "zeros_like": [*of_one, [(x,), {"pin_memory": False}]],
        "where.self": [[(x > 0, x, y), {}], [(x > 0, x, single[0]), {}]],
        "view": [[(x, [2, 6]), {}], [(x, [-1]), {}]],
        "expand": [[(x[:1], [4, 3]), {}], [(x[:1], [2, -1, 3]), {}]],
    }


def test_a_plain_name_gives_the_bits_of_its_operation() -> None:
    from hodiff.steps import _backends

    calls = called_by_name()
    assert calls.keys() == _backends._PLAIN
    for name, cases in calls.items():
        base, _, overload = name.partition(".")
        node = mock.Mock(target=getattr(getattr(torch.ops.aten, base), overload or "default"))
        plain_name = _backends._called(node)
        for args, kwargs in cases:
            ours, theirs = plain_name(*args, **kwargs), node.target(*args, **kwargs)
            assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), name
            assert torch.equal(ours, theirs) or ours.isnan().equal(theirs.isnan()), name


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["forces", "samples", "dense_hessian", "pair"])
def test_the_text_and_the_list_give_the_same_bits(kind: str) -> None:
    """Of one size of batch, and of sizes that vary; by names, and by the operations as they are listed."""
    from hodiff.steps import _backends

    batches, results = [torch.randn(n, 3) for n in (5, 7, 9)], []
    as_listed = mock.patch.object(_backends, "replayed", lambda traced: traced)
    for way in (contextlib.nullcontext(), mock.patch("hodiff.steps._graph.replayed", as_listed.new)):
        torch.manual_seed(0)
        net = NETS["residual"]()
        step = hodiff.compile_step(KINDS[kind], net, backend="replay", fallback="raise")
        with way:
            results.append([each for x in batches for each in step.value_and_grad(x)[1].values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_replay_runs_a_penalty_through_batch_norm() -> None:
    """Its backward pass in training reads no running statistics, though it is given them."""
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    other, x = copy.deepcopy(net), torch.randn(5, 3)
    step = hodiff.compile_step(of_gradient_alone, net, backend="replay", fallback="raise")
    for call in range(6):
        for module in (net, other):
            module.zero_grad()
            module.train(call < 3)
        step(x).backward()
        of_gradient_alone(other, x).backward()
        assert off(gradients(net), gradients(other)) <= 1e-13
        assert off([*net.buffers()], [*other.buffers()]) == 0


@pytest.mark.parametrize("value", [0.1, -0.0, math.inf, -math.inf, 1e-300, 3, True])
def test_a_number_is_written_as_it_is(value: float) -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (w * x.clamp(max=value) + torch.full_like(x, value).copysign(x.new_tensor(value))).sum()

    w, x = torch.ones(3, requires_grad=True), torch.tensor([-1.0, 0.0, 1.0])
    step = hodiff.compile_step(loss, w, backend="replay", fallback="raise")
    for _ in range(3):  # the third is not checked
        assert torch.equal(step(x).nan_to_num(7.0), loss(w, x).nan_to_num(7.0))


def test_results_are_freed_after_their_last_use() -> None:
    """A list of twenty operations on a large tensor holds a few at once."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.sin()
        return (w * x).sum()

    w, x, alive = torch.ones(1, requires_grad=True), torch.ones(64), []
    sines: list[weakref.ref] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sines.append(weakref.ref(result))
            alive.append(sum(each() is not None for each in sines))
            return result

    ran, replay = [], hodiff.steps.CompiledStep._replay

    def noted(self, graph, inputs):
        ran.append((graph, inputs))
        return replay(self, graph, inputs)

    with mock.patch.object(hodiff.steps.CompiledStep, "_replay", noted):
        step = hodiff.compile_step(loss, w, backend="replay", fallback="raise")
        step(x)
    with Watch(), torch.no_grad():
        ran[0][0].run(*ran[0][1])
    assert len(alive) >= 20 and max(alive) <= 6


def test_replay_keeps_what_acts_and_gives_no_result() -> None:
    """Draws that nobody reads, and assertions."""

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
