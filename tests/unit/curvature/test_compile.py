"""`H.compile()`: the same products, or a reason. Most tests replay the traced pass; some ask the compiler."""

import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.curvature import _compilation
from tests.support.differences import relative_error
from tests.support.ledger import flags, snapshot
from tests.support.limits import in_threads
from tests.support.modules import ZOO
from tests.support.modules import Case as Module
from tests.support.operators import LABELS, D, X, draw, predict, squares, sum_of_cross_entropy


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The traced operations stand in for code that is made of them; what was to be compiled is listed."""
    asked: list[Any] = []

    def replayed(traced: Any, vectors: Any) -> Any:
        asked.append(traced)
        return traced.module

    monkeypatch.setattr(_compilation, "compile_traced", replayed)
    return asked


def data(*cuts: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(cuts), LABELS.split(cuts), strict=True))


def small() -> nn.Module:
    """A model that is traced quickly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()


def hessian(model: nn.Module | None = None, cuts: tuple[int, ...] = (6, 4), **options: Any) -> Any:
    return hodiff.HessianOperator(sum_of_cross_entropy, model or small(), data=data(*cuts), **options)


def gauss_newton(loss: Any = None) -> Any:
    targets = X if loss is squares else LABELS
    batches = list(zip(X.split([4, 4, 2]), targets.split([4, 4, 2]), strict=True))
    return hodiff.GaussNewtonOperator(predict, loss or nn.CrossEntropyLoss(), small(), data=batches)


def fisher(kind: Any) -> Any:
    options = {"samples": 2, "generator": torch.Generator().manual_seed(0)} if kind == "mc" else {}
    return hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), small(), data=data(4, 4, 2), kind=kind, **options)


SLOW = pytest.mark.slow
OPERATORS: dict[str, Callable[[], Any]] = {
    "Hessian": lambda: hessian(cuts=(4, 4, 2)),
    "Gauss-Newton": gauss_newton,
    "Gauss-Newton, any loss": lambda: gauss_newton(squares),
    "Fisher, exact": lambda: fisher("exact"),
    "Fisher, mc": lambda: fisher("mc"),
    "Fisher, empirical": lambda: fisher("empirical"),
}


@pytest.mark.parametrize(
    "name", [name if number in (0, 2, 4) else pytest.param(name, marks=SLOW) for number, name in enumerate(OPERATORS)]
)
def test_products_are_those_of_the_eager_operator(name: str, replay: list[Any]) -> None:
    compiled, eager = OPERATORS[name](), OPERATORS[name]()
    assert compiled.compiled is None
    assert compiled.compile() is compiled
    record = compiled.compiled
    assert (record.batches, record.compiled, record.shapes, record.eager) == (3, 3, 4, {})
    assert len(replay) == 4  # two shapes of batches, for one vector and for eight
    assert record.error < 1e-13 and record.seconds > 0
    V = draw(24, 11)
    products = compiled.products
    for vectors in (V[:, 0], V[:, :1], V[:, :3], V[:, :8], V):
        assert relative_error(compiled @ vectors, eager @ vectors) < 1e-13
    assert compiled.products == products + 1 + 1 + 3 + 8 + 11
    structured = compiled @ compiled.unflatten(V)
    assert relative_error(compiled.flatten(structured), eager @ V) < 1e-13
    assert relative_error(compiled.dense(), eager.dense()) < 1e-13
    seeded = lambda: torch.Generator().manual_seed(0)
    for estimate in (hodiff.trace, hodiff.diagonal):
        one, other = (estimate(A, samples=6, generator=seeded()).value for A in (compiled, eager))
        one, other = (A if isinstance(A, Tensor) else compiled.flatten(A) for A in (one, other))
        assert relative_error(one, other) < 1e-12
    assert relative_error((compiled + 0.5) @ V[:, 0], (eager + 0.5) @ V[:, 0]) < 1e-13
    assert ", compiled" in repr(compiled) and ", compiled" not in repr(eager)


def test_a_result_may_be_written_into(replay: list[Any]) -> None:
    x = draw(5)
    for f in (lambda x: x.sum(), lambda x: x.square().sum() / 2, lambda x: x[:2].prod() + x.square().sum()):
        H = hodiff.HessianOperator(f, x)
        v = draw(5, seed=1)
        expected = (H @ v).clone()
        H.compile()
        (H @ v).zero_()
        V = torch.stack([v] * 9, 1)
        (H @ V).zero_()
        assert torch.equal(v, draw(5, seed=1))
        assert relative_error(H @ v, expected) < 1e-14


def test_parts_of_a_result_share_no_memory(replay: list[Any]) -> None:
    """One tensor of the pass is both parts, each of which is divided by the weight."""
    loss = lambda p, batch: ((p[0] + p[1]).square().sum(), 4.0)
    H = hodiff.HessianOperator(loss, (draw(3), draw(3, seed=1)), data=[X]).compile()
    assert H.compiled.compiled == 1
    v = draw(3, seed=2)
    for found in (H @ (v, 2 * v), [part[7] for part in H @ (v.expand(9, 3), 2 * v.expand(9, 3))]):
        torch.testing.assert_close(found[0], 1.5 * v)
        found[0].zero_()
        torch.testing.assert_close(found[1], 1.5 * v)


STAYS_EAGER = {"its passes run Python"}
"""Reasons that modules of the zoo may have."""


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize(
    "module",
    [
        case if number % 9 == 1 else pytest.param(case, marks=SLOW)
        for number, case in enumerate(case for case in ZOO if "parameters" in case.wheres)
    ],
    ids=repr,
)
def test_the_module_zoo(module: Module, replay: list[Any]) -> None:
    against_the_eager_operator(module)


def against_the_eager_operator(module: Module) -> None:
    """One vector, eight and nine, of the modules' parameters; nothing of the user's is touched."""
    if module.verdict(2, "parameters") != "right":
        pytest.skip("has no second derivative")
    setting = module.build()
    torch.manual_seed(1)
    eager = hodiff.HessianOperator(setting.of_model, setting.model)
    V = draw(eager.shape[1], 9, seed=3)
    expected = eager @ V
    torch.manual_seed(1)
    H = hodiff.HessianOperator(setting.of_model, setting.model)
    H @ V[:, 0]
    before, switches, random = snapshot(setting.model), flags(), torch.get_rng_state()
    H.compile()
    for reason in H.compiled.eager.values():
        assert any(known in reason for known in STAYS_EAGER), reason
    for vectors, wanted in ((V[:, 1], expected[:, 1]), (V[:, :8], expected[:, :8]), (V, expected)):
        assert relative_error(H @ vectors, wanted) < 1e-10
    assert snapshot(setting.model) == before
    assert flags() == switches
    assert torch.equal(torch.get_rng_state(), random)


# --- what stays eager, and says so ------------------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    """x³, with a backward whose own derivative leaves torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return CubedBackward.apply(x, g)


class CubedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        x, g = ctx.saved_tensors
        if Cubed.by_value:
            return 6 * x * g * u * float(u.detach().sum()) / float(u.detach().sum()), 3 * x**2 * u
        through = torch.from_numpy(numpy.asarray(u.detach().numpy(), dtype="float64"))
        return 6 * x * g * through, 3 * x**2 * through


Cubed.by_value = False


class Checkpointed(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(rate))
        self.outer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=False))


def warned(H: Any, words: str) -> None:
    with pytest.warns(hodiff.HodiffWarning, match=words) as caught:
        H.compile()
    assert len([w for w in caught if "stay eager" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize("by_value", [False, True])
def test_numpy_in_a_backward_stays_eager(by_value: bool, replay: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cubed, "by_value", by_value)
    x = draw(5)
    H = hodiff.HessianOperator(lambda x: Cubed.apply(x).sum(), x)
    warned(H, "compile: 1 of 1 batches stay eager.*batch 0: " + (r"its backward, or a hook, reads" if by_value else ""))
    assert H.compiled.compiled == 0 and list(H.compiled.eager) == [0]
    v = draw(5, 3, seed=1)
    torch.testing.assert_close(H @ v, 6 * x[:, None] * v)
    assert ", compiled" not in repr(H)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_checkpoint_stays_eager(rate: float, replay: list[Any]) -> None:
    torch.manual_seed(3)
    model = Checkpointed(rate).double()
    f = lambda m: m(X).square().sum()
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.RandomnessWarning)
        H = hodiff.HessianOperator(f, model)
        v = draw(H.shape[1])
        expected = H @ v
        warned(H, "an activation checkpoint or a hook")
    assert relative_error(H @ v, expected) < 1e-14 and not replay


def test_a_pass_that_draws_is_refused(replay: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second guard, where the first did not see the checkpoint."""
    monkeypatch.setattr(_compilation.BatchGraph, "ready", lambda self: self.ev.resumed())
    torch.manual_seed(3)
    model = Checkpointed(0.5).double()
    with pytest.warns(hodiff.RandomnessWarning, match="draws random numbers"):
        H = hodiff.HessianOperator(lambda m: m(X).square().sum(), model)
        H @ draw(H.shape[1])
    for graph in H._graphs.kept_graphs().values():
        object.__setattr__(graph, "calls_back", False)
    warned(H, r"draws random numbers \(aten")


def test_what_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third guard, leaf by leaf: one that is small beside the others counts too."""
    x = (torch.ones(3, dtype=D), torch.ones(2, dtype=D))
    f = lambda p: (p[0] ** 3).sum() + 1e-6 * (p[1] ** 3).sum()

    def wrong(leaf: int) -> Callable[..., Any]:
        def compiled(traced: Any, vectors: Any) -> Any:
            def call(*arguments: Tensor) -> Any:
                found = list(traced.module(*arguments))
                found[leaf] = found[leaf] * (1 + 1e-6)
                return found

            return call

        return compiled

    for leaf in (0, 1):
        monkeypatch.setattr(_compilation, "compile_traced", wrong(leaf))
        H = hodiff.HessianOperator(f, x)
        warned(H, "differs from the eager one, by.*: PyTorch's compiler makes wrong code")
        torch.testing.assert_close((H @ x)[leaf], (6.0, 6e-6)[leaf] * x[leaf], rtol=1e-14, atol=0)


def test_a_leaf_of_rounding_noise_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bias before a batch norm: what counts there is the size of the whole."""

    def noisy(traced: Any, vectors: Any) -> Any:
        return lambda *arguments: [part + 1e-16 for part in traced.module(*arguments)]

    monkeypatch.setattr(_compilation, "compile_traced", noisy)
    H = hodiff.HessianOperator(lambda p: (p[0] ** 3).sum() + p[1].sum() ** 2 * 0, (draw(3), draw(2))).compile()
    assert (H.compiled.compiled, H.compiled.eager) == (1, {})


def test_products_that_are_not_finite_are_warned_of(replay: list[Any]) -> None:
    H = hodiff.HessianOperator(lambda x: (x**3).sum(), torch.ones(3, dtype=D)).compile()
    assert H.compiled.compiled == 1
    with pytest.warns(hodiff.HodiffWarning, match="the result is not finite"):
        H @ torch.full((3,), 1e308, dtype=D)


def test_wrong_code_for_several_vectors_leaves_that_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch's compiler makes of `index_add` where several vectors are multiplied at once."""

    def compiled(traced: Any, vectors: Any) -> Any:
        single = vectors[0].ndim == 1
        return traced.module if single else lambda *arguments: [-part for part in traced.module(*arguments)]

    monkeypatch.setattr(_compilation, "compile_traced", compiled)
    x = draw(5)
    H = hodiff.HessianOperator(lambda x: (x**3).sum(), x).compile()
    assert (H.compiled.compiled, H.compiled.eager) == (1, {})
    v = draw(5, 9, seed=1)
    torch.testing.assert_close(H @ v, 6 * x[:, None] * v)


def test_graphs_that_are_not_kept_stay_eager(replay: list[Any]) -> None:
    H = hessian(memory_budget=0)
    warned(H, r"2 of 2 batches stay eager.*batches 0, 1: its graph is not kept")
    v = draw(24)
    assert relative_error(H @ v, hessian() @ v) < 1e-13 and not replay


def test_many_shapes_are_not_compiled(replay: list[Any]) -> None:
    inputs, labels = draw(55, 3), torch.randint(3, (55,))
    cuts = range(1, 11)
    batches = list(zip(inputs.split(list(cuts)), labels.split(list(cuts)), strict=True))
    H = hodiff.HessianOperator(sum_of_cross_entropy, small(), data=batches, chunk_size=1)
    warned(H, "2 of 10 batches stay eager.*more than 8 shapes")
    whole = hodiff.HessianOperator(sum_of_cross_entropy, small(), data=[(inputs, labels)])
    v = draw(24, 9)
    assert relative_error(H @ v, whole @ v) < 1e-13
    assert "compiled (8 of 10)" in repr(H)


def test_code_belongs_to_operations_and_layouts(replay: list[Any]) -> None:
    """Batches of one shape share no code where `f` decides by values, or where they lie otherwise in memory."""
    x = draw(3, 3)

    def loss(x: Tensor, batch: Tensor) -> tuple[Tensor, float]:
        return ((x * batch).sin() if batch[0, 0] > 0 else (x * batch).exp()).sum(), 9.0

    one = draw(3, 3, seed=1).abs()
    for other, shapes in ((one + 1, 1), (-one, 2), (one.T.contiguous().T, 2)):
        H = hodiff.HessianOperator(loss, x, data=[one, other], chunk_size=1)
        eager = hodiff.HessianOperator(loss, x, data=[one, other])
        assert (H.compile().compiled.compiled, H.compiled.shapes) == (2, shapes)
        v = draw(3, 3, seed=2)
        assert relative_error(H @ v, eager @ v) < 1e-13


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = draw(5)
    with config.patch({"cpp.cxx": (None, "/nowhere/g++"), "fx_graph_cache": False}):
        H = hodiff.HessianOperator(lambda x: (x.sin() * x).sum(), x)
        warned(H, r"there is no compiler on this machine \(for a CPU PyTorch needs g\+\+")
    v = draw(5, seed=1)
    torch.testing.assert_close(H @ v, (2 * x.cos() - x * x.sin()) * v)


# --- lifetime ---------------------------------------------------------------------------------------------------------


def test_changed_parameters_still_raise_and_refresh_compiles_again(replay: list[Any]) -> None:
    model = small()
    H = hessian(model).compile()
    v = draw(24)
    asked = len(replay)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with pytest.raises(hodiff.GraphError, match=r"parameters changed.*H\.refresh\(\)"):
        H @ v
    H.refresh()
    assert ", compiled" not in repr(H).replace("not evaluated", "") or "not evaluated" in repr(H)
    assert relative_error(H @ v, hessian(model) @ v) < 1e-13
    assert len(replay) == asked and H.compiled.compiled == 2 and H.compiled.shapes == 0  # the code was there
    model[0].weight.data.mul_(1.5)
    with pytest.raises(hodiff.GraphError, match="parameters changed"):
        H @ v


def test_data_changed_in_place_raise() -> None:
    """Constants of a compiled pass lie in the batch's own memory: the engine's check is not there."""
    batches = [(x.clone(), y) for x, y in data(4, 6)]
    H = hodiff.HessianOperator(sum_of_cross_entropy, small(), data=batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compilation, "compile_traced", lambda traced, vectors: traced.module)
        H.compile()
    v = draw(24)
    H @ v
    batches[1][0].add_(1)
    with pytest.raises(hodiff.GraphError, match=r"changed in place.*H\.refresh\(\)"):
        H @ v


def test_closing_frees_and_blocks_are_eager(replay: list[Any]) -> None:
    H = hessian().compile()
    v = draw(12)
    block = H.block("0")
    assert block.compiled is None and ", compiled" not in repr(block)
    own = hessian().block("0").compile()
    assert own.compiled.compiled == 2
    assert relative_error(own @ v, block @ v) < 1e-13
    assert H.cost().cache_bytes > hessian_after_product().cost().cache_bytes
    H.close()
    assert not H._graphs.attached
    with pytest.raises(hodiff.GraphError, match="the operator is closed"):
        H @ draw(24)
    assert relative_error(H.refresh() @ draw(24), hessian() @ draw(24)) < 1e-13


def hessian_after_product() -> Any:
    H = hessian()
    H @ draw(24)
    return H


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_do_not_matter(mode: Any, replay: list[Any]) -> None:
    expected = hessian() @ draw(24, 9)
    H = hessian()
    H @ draw(24)  # evaluated outside
    with mode():
        H.compile()
        assert relative_error(H @ draw(24, 9), expected) < 1e-13
    assert relative_error(H @ draw(24, 9), expected) < 1e-13


def test_autocast_does_not_reach_compiled_passes(replay: list[Any]) -> None:
    x, v = draw(4, 4).float(), draw(4, 4, seed=1).float()
    H = hodiff.HessianOperator(lambda x: (x @ x @ x).sum(), x).compile()
    assert H.compiled.compiled == 1
    expected = H @ v
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(H @ v, expected)


def test_a_tangent_takes_the_eager_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code would drop it, silently: here the traced operations do, as a compiler's kernels."""

    def primal(traced: Any, vectors: Any) -> Any:
        return lambda *arguments: traced.module(*[forward_ad.unpack_dual(part).primal for part in arguments])

    monkeypatch.setattr(_compilation, "compile_traced", primal)
    H, v = hessian(), draw(24)
    expected = H @ v
    H.compile()
    assert H.compiled.compiled == 2
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(H @ forward_ad.make_dual(draw(24, seed=4), v)).tangent
    assert tangent is not None and relative_error(tangent, expected) < 1e-13


@pytest.mark.parametrize("kind", ["eager", "compiled", "matrix"])
def test_transforms_of_torch_are_refused(kind: str, replay: list[Any]) -> None:
    """A detached product would be a constant to them: half of the derivative of v'Hv."""
    H, v = hessian(cuts=(10,), chunk_size=1), draw(24)
    H @ v
    A = hodiff.MatrixOperator(H.dense()) if kind == "matrix" else H.compile() if kind == "compiled" else H
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda v: v @ (A @ v))(v)
    if kind != "matrix":
        with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
            torch.vmap(lambda v: A @ v)(v[None])


def test_threads_trace_one_after_another(replay: list[Any]) -> None:
    """PyTorch's flag for tracing was left set, and then every call of `torch.compile` in the process raised."""
    operators = [hessian(cuts=(10,), chunk_size=1) for _ in range(4)]
    start = threading.Barrier(4)
    in_threads(*[lambda H=H: (start.wait(30), H.compile()) for H in operators])
    assert [H.compiled.compiled for H in operators] == [1] * 4
    assert not torch.fx._symbolic_trace.is_fx_tracing()


@pytest.mark.parametrize("chunk", [1, 3, 8, 40])
def test_no_more_vectors_at_once_than_asked(chunk: int, replay: list[Any]) -> None:
    H = hessian(chunk_size=chunk).compile()
    assert len(replay) == (2 if chunk < 8 else 4)
    assert relative_error(H @ draw(24, 10), hessian() @ draw(24, 10)) < 1e-13


# --- the compiler -----------------------------------------------------------------------------------------------------


def test_compiled_by_inductor_and_found_again() -> None:
    """Of two batches with one shape the code is one; a second operator finds it on disk."""
    from torch._dynamo.utils import counters

    H = hessian(cuts=(5, 5)).compile()
    assert H.compiled.eager == {} and H.compiled.error < 1e-13
    V = draw(24, 9)
    assert relative_error(H @ V, hessian() @ V) < 1e-13
    assert relative_error(H @ V[:, 0], hessian() @ V[:, 0]) < 1e-13
    assert H.compiled.shapes == 2 and H.compiled.compiled == 2
    counters.clear()
    again = hessian(cuts=(5, 5)).compile()
    assert again.compiled.shapes == 2
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] >= 2
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


@SLOW
def test_compiled_results_have_memory_of_their_own() -> None:
    """The copies that a traced pass has are not optimised away."""
    p, v = (draw(3), draw(3, seed=1)), (draw(3, seed=2), draw(3, seed=3))
    for f in (
        lambda p: (p[0] + p[1]).square().sum() / 2,  # one tensor is both parts
        lambda p: (p[0] * p[1]).sum(),  # each vector is the other's result
        lambda p: p[0].sum() ** 2 / 2 + p[1].square().sum(),  # one number is all entries
    ):
        H, eager = hodiff.HessianOperator(f, p, chunk_size=1).compile(), hodiff.HessianOperator(f, p)
        assert H.compiled.compiled == 1
        for expected in (eager @ v, eager @ v):
            found = H @ v
            torch.testing.assert_close(found, expected)
            found[0].zero_()
            torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(v[1], draw(3, seed=3))


@SLOW
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_operators(name: str) -> None:
    compiled, eager = OPERATORS[name]().compile(), OPERATORS[name]()
    assert compiled.compiled.eager == {}
    V = draw(24, 9)
    assert relative_error(compiled @ V, eager @ V) < 1e-13


@SLOW
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("module", [case for case in ZOO if "parameters" in case.wheres], ids=repr)
def test_compiled_modules(module: Module) -> None:
    against_the_eager_operator(module)
