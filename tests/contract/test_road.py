"""One road for `f`: what a function may do to the library, and what each public name that takes one answers.

The rows are abuses, the columns every public name (`tests/support/callers.py`), and each row has one answer. What a
name cannot meet stands in `EXCEPTIONS`, with the reason. After each call nothing is left changed.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.callers import CALLERS, NOT_CALLED, PLAIN, SCALE, Caller, D, public, tensors
from tests.support.modules import Cube, CubeOnce

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)


def every(test: Callable[..., None]) -> Callable[..., None]:
    """Of each row the cells of twenty public names are drawn."""
    return pytest.mark.table(wide=20)(pytest.mark.parametrize("caller", CALLERS, ids=repr)(test))


EXCEPTIONS: dict[tuple[str, str], str] = {
    ("bypass", "check_derivatives"): "it differentiates a copy in float64, and finds the path by its differences",
    ("once", "check_derivatives"): "the same",
    **{
        ("bypass", name): "the samples are detached, as documented, so that path is a constant"
        for name in ("wgan_gp_penalty", "dragan_penalty", "r1_penalty", "r2_penalty")
    },
    ("bypass", "jets.report"): "it counts rules, and gives no derivative",
    ("detached", "jets.report"): "the same",
    ("no tensor", "jets.report"): "the same",
    ("hook", "jets.report"): "the same",
    ("detached", "implicit.argmin"): "beside what is cut nothing requires grad: a value, as of a frozen network",
    ("detached", "implicit.root"): "the same",
    ("detached", "cross_hessian"): "f depends on y, so what is cut from x is a zero, as promised",
    ("detached", "cross_hvp"): "the same",
    ("no tensor", "cross_hvp"): "what this table makes of the result for it is a tensor no more",
    ("no tensor", "cross_hessian"): "what this table makes of the result for it is a tensor no more",
    ("no tensor", "PathLengthPenalty"): "the same",
    ("hook", "check_derivatives"): "it finds the hook by its differences",
    ("cached", "jets.report"): "the same",
    ("cached", "check_derivatives"): "it checks the function that f has become, and says that f keeps something",
    ("once", "jets.report"): "the same: it says that there is no rule",
    ("dropout", "jets.report"): "the same",
    ("function", "jets.report"): "the same",
    ("function", "jet"): "Taylor coefficients have no second route, so it raises",
    ("once", "jet"): "the same, in other words",
    ("dropout", "nth_derivative"): "it evaluates again, to see whether entries are independent",
    ("dropout", "derivatives"): "the same",
    **{
        ("no tensor", f"implicit.{name}"): "what this table makes of the result for it is a tensor no more"
        for name in ("argmin", "root", "fixed_point")
    },
    **{
        ("hook on the point", f"implicit.{name}"): "its equation has the point beside f as well"
        for name in ("root", "fixed_point")
    },
    ("hook", "implicit.argmin"): "its linear system is indefinite then, which is said",
    ("dropout", "unroll"): "each step draws its own numbers",
    ("dropout", "check_derivatives"): "differences are made of many evaluations, with the numbers drawn again",
}


def skip(row: str, caller: Caller) -> None:
    reason = EXCEPTIONS.get((row, caller.name))
    if reason:
        pytest.skip(reason)


@pytest.mark.names
def test_every_public_name_is_in_a_table() -> None:
    """A new name must say here how it is called."""
    called = {caller.name.partition(",")[0] for caller in CALLERS}
    tables = called | set(PLAIN) | set(NOT_CALLED)
    assert not public() - tables, "say in tests/support/callers.py how these are called"
    assert not tables - public(), "these are no longer public"


@pytest.mark.names
@pytest.mark.parametrize("name", sorted({n for n in public() if n not in NOT_CALLED}))
def test_a_name_that_takes_a_function_is_called_with_one(name: str) -> None:
    """By its signature: what has a parameter for a function must not hide among those that take none."""
    module, _, short = name.rpartition(".")
    found = getattr(getattr(hodiff, module) if module else hodiff, short)
    takes = {"f", "predict", "critic"} & set(inspect.signature(found).parameters)
    if takes:
        assert name in {caller.name for caller in CALLERS}, "say in CALLERS, tests/support/callers.py, how it is called"


# --- what must be as it was ------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Parameters, buffers that move in training mode, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor([0.7, -1.2, 0.4], dtype=D))
        self.register_buffer("calls", torch.zeros((), dtype=D))
        self.note: Any = "as it was"

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.scale * z.sin() * z


def _modes() -> dict[str, Any]:
    cuda = torch.backends.cuda
    hooks = nn.modules.module
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.flags,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default dtype": torch.get_default_dtype(),
        "stance": dynamo._stance.stance if dynamo else "default",
        "hooks": (
            len(hooks._global_forward_pre_hooks), len(hooks._global_forward_hooks), len(hooks._global_backward_hooks),
            len(hooks._global_backward_pre_hooks),
        ),
        "torch functions": len(torch.overrides._get_current_function_mode_stack()),
        "saved tensors": torch._C._autograd._saved_tensors_hooks_is_enabled(),
    }  # fmt: skip


@contextmanager
def nothing_changes(model: Network, *points: Tensor) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers(), *points, SCALE]
    before = _modes(), dict(vars(model)), [(id(t), t._version, t.detach().clone(), t.grad) for t in tensors]
    names = {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    try:
        yield
    finally:
        modes, attributes, kept = before
        assert _modes() == modes
        assert set(vars(model)) == set(attributes) and model.note == attributes["note"]
        assert names == {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
        for t, (identity, version, value, gradient) in zip(tensors, kept, strict=True):
            assert id(t) == identity and t._version == version and t.grad is gradient
            assert torch.equal(t.detach(), value)
        assert not any(p._backward_hooks for p in model.parameters())


def call(caller: Caller, g: Callable[..., Tensor], x: Tensor = X, args: tuple[Any, ...] = ()) -> list[Tensor]:
    return [t.detach() for t in caller(g, x, args)]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.clone(), b.clone())


def wave(z: Tensor) -> Tensor:
    return SCALE * z.sin() * z


# --- the rows --------------------------------------------------------------------------------------------------------


@every
def test_a_network_in_a_closure(caller: Caller) -> None:
    """No abuse: the buffers move in `f`, and are as they were afterwards."""
    model = Network()
    with nothing_changes(model, X):
        got = call(caller, model)
    same(got, call(caller, lambda z: model.scale * z.sin() * z))


@every
def test_bypass(caller: Caller) -> None:
    skip("bypass", caller)
    x = X.clone().requires_grad_()
    with nothing_changes(Network(), x), pytest.raises(hodiff.GraphError, match="other than through"):
        caller(lambda z: SCALE * z * x, x)


@every
def test_in_place(caller: Caller) -> None:
    def g(z: Tensor) -> Tensor:
        z.mul_(2)
        return SCALE * z.sin() * z

    with nothing_changes(Network(), X):
        try:
            got = call(caller, g)
        except (hodiff.GraphError, RuntimeError) as error:
            assert re.search("(?i)in[- ]place", str(error)), str(error)
        else:  # Taylor mode follows it, on what stands for the argument
            same(got, call(caller, lambda z: SCALE * (2 * z).sin() * (2 * z)))


@every
def test_state_met_again(caller: Caller) -> None:
    """Kept from one call to the next, unknown to it: refused, or right."""
    skip("cached", caller)
    kept: list[Tensor] = []

    def g(z: Tensor) -> Tensor:
        if not kept or kept[0].shape != z.shape:
            kept[:] = [z.sin()]
        return SCALE * kept[0] * z

    expected = call(caller, wave)
    for _ in range(2):
        try:
            with nothing_changes(Network(), X):
                got = call(caller, g)
        except (hodiff.GraphError, hodiff.DerivativeError):
            continue
        same(got, expected)


@every
@pytest.mark.parametrize("place", ["where", "closure", "args"])
def test_inference_tensors(caller: Caller, place: str) -> None:
    if place == "args" and caller.name in ("jet", "multi_grad"):
        pytest.skip("it takes no args=")
    with torch.inference_mode():
        x, c = X.clone(), (X + 2).clone()
    g = lambda z, c: SCALE * z.sin() * z * c[: z.shape[0]]
    if place == "where":
        same(call(caller, wave, x), call(caller, wave))
    elif place == "closure":
        same(call(caller, lambda z: g(z, c)), call(caller, lambda z: g(z, X + 2)))
    else:
        same(call(caller, g, X, (c,)), call(caller, g, X, (X + 2,)))


@every
@pytest.mark.parametrize("made", ["before", "there"])
def test_under_inference_mode(caller: Caller, made: str) -> None:
    model = Network()
    with torch.inference_mode(), nothing_changes(model, X):
        got = [t.clone() for t in call(caller, wave, X if made == "before" else X.clone())]
    assert not any(t.requires_grad for t in got)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(got, call(caller, wave))


@pytest.mark.parametrize("name", sorted({c.name for c in CALLERS} | {n for n in PLAIN if not n.startswith("graph.")}))
def test_under_another_default_device(name: str) -> None:
    """A default device is for what the user makes. The meta device has no numbers: whatever went there is seen."""
    if name == "PathLengthPenalty":
        pytest.skip("it is a module, whose buffer is on the default device")
    caller = {c.name: c for c in CALLERS}.get(name)
    call = PLAIN[name] if caller is None else lambda x: caller.run(caller.shaped(wave), x, ())
    expected = call(X)
    with torch.device("meta"):
        got = call(X)
    same([t.detach() for t in tensors(got)], [t.detach() for t in tensors(expected)])


@every
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_a_function_of_the_users(caller: Caller) -> None:
    skip("function", caller)
    with nothing_changes(Network(), X):
        got = call(caller, lambda z: SCALE * Cube.apply(z))
    same(got, call(caller, lambda z: SCALE * z**3))


@every
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_once_differentiable(caller: Caller) -> None:
    """Refused where it is differentiated twice: by a loss whose graph is asked for, too."""
    skip("once", caller)
    g = lambda z: SCALE * CubeOnce.apply(z)
    with nothing_changes(Network(), X):
        try:
            got = call(caller, g)
        except hodiff.GraphError as error:
            assert re.search("once_differentiable", str(error)), str(error)
        else:
            assert caller.order < 2
            same(got, call(caller, lambda z: SCALE * z**3))


@every
def test_a_hook_that_changes_gradients(caller: Caller) -> None:
    """Second derivatives through it are what stock PyTorch makes of it: told, or refused. None is silent."""
    skip("hook", caller)
    if caller.order < 2:
        pytest.skip("one derivative is what the hook makes of it")

    def g(z: Tensor) -> Tensor:
        h = 2 * z
        if h.requires_grad:
            h.register_hook(lambda grad: 3 * grad)
        return SCALE * h.sin()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call(caller, g)
        except hodiff.GraphError as error:
            assert "hook" in str(error)
            return
    assert any("hook" in str(w.message) for w in caught), [str(w.message) for w in caught]


@every
@pytest.mark.filterwarnings("ignore:.*hook:hodiff.HodiffWarning")
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_hook_on_the_point_acts_once(caller: Caller, again: bool) -> None:
    """Also where a function runs again, by routes that are right for what it calls: as a hook on a copy."""
    skip("hook", caller)
    skip("hook on the point", caller)

    def g(z: Tensor, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: 3 * grad)
        return SCALE * (h.sin() + (nn.functional.hardsigmoid(h) if again else 0))

    def answer(f: Callable[[Tensor], Tensor]) -> Any:
        try:
            return call(caller, f)
        except hodiff.HodiffError as error:
            return str(error)

    ours, expected = answer(lambda z: g(z, z)), answer(lambda z: g(z, z.view_as(z)))
    if isinstance(ours, str) or isinstance(expected, str):
        assert ours == expected
    else:
        same(ours, expected)


@every
@pytest.mark.filterwarnings("ignore::hodiff.RandomnessWarning")
def test_dropout(caller: Caller) -> None:
    """The numbers that one call of `f` draws are drawn, and no others."""
    skip("dropout", caller)

    def g(z: Tensor) -> Tensor:
        return SCALE * z.sin() * z * (torch.rand(3, dtype=D) + 1)

    torch.manual_seed(11)
    call(caller, g)
    after = torch.get_rng_state()
    torch.manual_seed(11)
    torch.rand(3, dtype=D)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(11)
    mask = torch.rand(3, dtype=D) + 1
    torch.manual_seed(11)
    same(call(caller, g), call(caller, lambda z: SCALE * z.sin() * z * mask))


@every
def test_a_detached_result(caller: Caller) -> None:
    skip("detached", caller)
    with nothing_changes(Network(), X), pytest.raises(hodiff.GraphError, match=r"cut|does not depend"):
        caller(lambda z: (SCALE * z**2).detach(), X)


@every
@pytest.mark.parametrize("result", ["text", None, 1.5], ids=repr)
def test_a_result_that_is_no_tensor(caller: Caller, result: Any) -> None:
    skip("no tensor", caller)
    with (
        nothing_changes(Network(), X),
        pytest.raises(hodiff.InputError, match=r"returned (a|None)|got a \w+, expected"),
    ):
        caller.run(lambda z, *rest: result, X, ())


class Trouble(Exception):
    pass


class Abort(BaseException):
    pass


@every
@pytest.mark.parametrize(
    "error", [Trouble("of the user"), KeyboardInterrupt(), GeneratorExit(), StopIteration(3), Abort()], ids=repr
)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "at the second call"])
def test_an_exception_passes_unchanged(caller: Caller, error: BaseException, late: bool) -> None:
    model, calls = Network(), []

    def g(z: Tensor) -> Tensor:
        calls.append(1)
        value = model(z)
        if len(calls) > late:
            raise error
        return value

    random = torch.get_rng_state()
    with nothing_changes(model, X):
        try:
            caller(g, X)
        except BaseException as caught:
            assert caught is error
            assert not isinstance(caught, Trouble) or (caught.args == ("of the user",) and caught.__cause__ is None)
        else:
            assert late and len(calls) == 1, "the exception was swallowed"
    assert torch.equal(random, torch.get_rng_state())
    error.__traceback__ = None
    same(call(caller, wave), call(caller, wave))  # and the library works as before


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


with torch.inference_mode():
    MADE = torch.tensor([0.5, 2.0, -1.0], dtype=D)


INFERENCE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "closure": lambda: (hodiff.grad(lambda z: (z**2 * MADE).sum(), POINT), 2 * POINT * MADE),
    "closure, hvp": lambda: (
        hodiff.hvp(lambda z: (z**3 * MADE).sum(), POINT, torch.ones_like(POINT)), 6 * POINT * MADE
    ),
    "args": lambda: (hodiff.grad(lambda z, c: (z**2 * c).sum(), POINT, args=(MADE,)), 2 * POINT * MADE),
    "kwargs": lambda: (hodiff.grad(lambda z, c: (z**2 * c).sum(), POINT, kwargs={"c": MADE}), 2 * POINT * MADE),
    "data": lambda: (
        hodiff.HessianOperator(lambda z, batch: ((z**3 * batch[0]).sum(), 1), POINT, data=[(MADE,)])
        @ torch.ones_like(POINT),
        6 * POINT * MADE,
    ),
    "where": lambda: (hodiff.grad(lambda z: (z**2).sum(), MADE), 2 * MADE),
    "a field": lambda: (
        hodiff.laplacian(lambda z: (z**3 * MADE).sum(-1), POINT[None], create_graph=False)[0], (6 * POINT * MADE).sum()
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode], ids=["outside", "inside"])
@pytest.mark.parametrize("name", INFERENCE)
def test_data_made_under_inference_mode(name: str, mode: Any) -> None:
    with mode():
        got, expected = INFERENCE[name]()
    torch.testing.assert_close(got.clone(), expected.clone())
