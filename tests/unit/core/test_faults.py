"""An exception that is no failure of what was tried passes every fallback: a time limit, a class of its own."""

import functools
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff._core import _messages, _reverse, _versions
from hodiff._core._arguments import is_set
from hodiff._core._faults import interrupts, is_fault
from hodiff.calculus import _factors, _first, _per_sample
from hodiff.curvature import _memory
from hodiff.fields import _expansions
from hodiff.sparse import _tracer
from tests.support.modules import Cube

D = torch.float64
X = torch.linspace(-1, 1.5, 4, dtype=D)


class Limit(RuntimeError):
    """A time limit of the user's."""


class Handlers:
    """The ways to write a handler."""

    def method(self, number: int, frame: Any) -> None:
        raise RuntimeError("time is up")

    def __call__(self, number: int, frame: Any) -> None:
        raise RuntimeError("time is up")


def handler(number: int, frame: Any, *, error: type[Exception] = RuntimeError) -> None:
    raise error("time is up")


def deeper(number: int, frame: Any) -> None:
    handler(number, frame)


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], None]]:
    """Sets the handler of SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def raised(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "written",
    [handler, deeper, functools.partial(handler, error=ValueError), Handlers().method, Handlers()],
    ids=["function", "function that calls another", "partial", "method", "object"],
)
def test_what_a_handler_raises_is_no_fault(written: Any, alarm: Callable[[Any], None]) -> None:
    alarm(written)
    error = raised(lambda: signal.raise_signal(signal.SIGUSR1))
    assert interrupts(error)
    assert not is_fault(error)


@pytest.mark.parametrize("error", [RuntimeError("vmap"), NotImplementedError(), ValueError(), IndexError(), OSError()])
def test_what_code_raises_is_a_fault(error: Exception, alarm: Callable[[Any], None]) -> None:
    alarm(handler)

    def fails() -> None:
        raise error

    assert is_fault(raised(fails))
    assert not interrupts(error)


@pytest.mark.parametrize("error", [Limit(), TimeoutError(), MemoryError(), torch.OutOfMemoryError(), StopIteration()])
def test_other_classes_mean_something_to_their_makers(error: Exception) -> None:
    assert not is_fault(error)


# --- the fallbacks: what they try, where it is interrupted, and that they fall back where it fails


def tall() -> Any:
    return hodiff.jacobian(lambda x: torch.outer(torch.linspace(1, 2, 300, dtype=D), x).sin().flatten(), X)


def many_rows() -> Any:
    return hodiff.jacobian(lambda x: Cube.apply(x), X)


def products_of_samples() -> Any:
    return hodiff.gram(lambda w, b: (b @ w).sin(), X, torch.eye(4, dtype=D))


def per_sample() -> Any:
    return hodiff.per_sample_grad(lambda w, b: (w * b).sum(-1) ** 2, X, torch.eye(4, dtype=D), chunk_size=9)


def square() -> Any:
    return hodiff.per_sample_grad(lambda w, b: (w * b) ** 2, X, torch.eye(4, dtype=D))


def pattern() -> Any:
    return hodiff.sparse_jacobian(lambda x: nn.functional.layer_norm(x.reshape(2, 2), (2,)).reshape(-1), X).to_dense()


def container() -> bool:
    """Whether a number of a file is read, or passed over."""
    with tempfile.TemporaryDirectory() as group:
        (Path(group) / "memory.max").write_text("4096", "ascii")
        return _memory._number(Path(group) / "memory.max") in (4096, None)


def wide() -> Any:
    net = nn.Sequential(nn.Linear(24, 512), nn.Tanh(), nn.Linear(512, 1)).to(D)
    with torch.no_grad():
        for index, p in enumerate(net.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel(), dtype=D) + index).reshape(p.shape) / 8)
    points = torch.cos(torch.arange(24 * 1024, dtype=D)).reshape(1024, 24)
    return hodiff.laplacian(net, points, create_graph=False)


FALLBACKS: dict[str, tuple[Callable[[], Any], Any, str, int]] = {  # the call; whose attribute fails, at which use
    "columns to rows": (tall, _first, "_columns_of", 1),
    "a batch of vectors to one at a time": (many_rows, _reverse, "_vjps_batched", 1),
    "samples under vmap to rows": (per_sample, _per_sample, "_chunk", 1),
    "rows in factors to rows": (products_of_samples, _factors._Reading, "_rows_of", 1),
    "samples crossed to not known": (square, _per_sample.Samples, "with_rows", 1),
    "a decomposition to the plain answer": (pattern, _tracer.Tracer, "__enter__", 2),
    "blocks of samples to the whole batch": (wide, _expansions, "by_jets", 2),
    "memory that the machine tells": (lambda: _memory.free_bytes(torch.device("cpu")) > 0, Path, "read_text", 1),
    "memory that the container tells": (container, Path, "read_text", 1),
}


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, failure: Callable[[], object]) -> list[int]:
    """Let a function fail at its use number `at`; the list counts."""
    original, uses = getattr(owner, name), [0]

    def failing(*args: Any, **kwargs: Any) -> Any:
        uses[0] += 1
        if uses[0] == at:
            failure()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return uses


@pytest.mark.parametrize("error", [Limit, TimeoutError, MemoryError, RuntimeError, ValueError, OSError])
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_time_limit_passes(
    name: str, error: type[Exception], alarm: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, owner, attribute, at = FALLBACKS[name]
    alarm(functools.partial(handler, error=error))
    fail(monkeypatch, owner, attribute, at, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(error, match="time is up"):
        call()


@pytest.mark.parametrize("error", [Limit, TimeoutError, MemoryError])
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_class_of_its_own_passes(name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    call, owner, attribute, at = FALLBACKS[name]

    def stop() -> None:
        raise error("enough")

    fail(monkeypatch, owner, attribute, at, stop)
    with pytest.raises(error, match="enough"):
        call()


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_failure_takes_the_other_route(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, owner, attribute, at = FALLBACKS[name]
    expected = call()

    def stop() -> None:
        raise OSError("not here") if owner is Path else RuntimeError("not here")

    uses = fail(monkeypatch, owner, attribute, at, stop)
    torch.testing.assert_close(call(), expected)
    assert uses[0] >= at


# --- what asks again, and what explains, passes over the user's own exceptions, but not over a handler's


@pytest.mark.parametrize("error", [Limit, TimeoutError, RuntimeError])
def test_a_time_limit_passes_a_check_of_derivatives(error: type[Exception], alarm: Callable[[Any], None]) -> None:
    """In float64, where a failure of f lets it be checked in its own dtype."""
    alarm(functools.partial(handler, error=error))
    with pytest.raises(error, match="time is up"):
        hodiff.check_derivatives(stopped(lambda: signal.raise_signal(signal.SIGUSR1)), X.float())

    def fail() -> None:
        raise error("not in float64")

    assert hodiff.check_derivatives(stopped(fail), X.float()).dtype == torch.float32


def stopped(stop: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    """A function that is stopped in float64."""

    def f(x: Tensor) -> Tensor:
        if x.dtype == D:
            stop()
        return (x**3).sum()

    return f


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="compiled steps need PyTorch 2.13")
@pytest.mark.parametrize("error", [Limit, TimeoutError, RuntimeError])
@pytest.mark.parametrize("at", ["make_fx", "standalone_compile"])
def test_a_time_limit_passes_a_compilation(
    at: str, error: type[Exception], alarm: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo makes its own exceptions of it, and inductor of those."""
    from hodiff.steps import _graph

    alarm(functools.partial(handler, error=error))
    owner = _graph if at == "make_fx" else pytest.importorskip("torch._inductor")
    uses = fail(monkeypatch, owner, at, 1, lambda: signal.raise_signal(signal.SIGUSR1))
    w = torch.ones(2, requires_grad=True)
    step = hodiff.compile_step(lambda w, x: (w * x).sum() ** 2, w)
    with pytest.raises(error, match="time is up"):
        step(X[:2].float())
    assert uses == [1] and not step.report.reasons


def test_a_time_limit_passes_an_explanation(alarm: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """f is called once more to find its line: that may be what takes too long."""
    alarm(functools.partial(handler, error=TimeoutError))
    calls = []

    def cut(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            signal.raise_signal(signal.SIGUSR1)
        return x.detach().sum()

    with pytest.raises(TimeoutError, match="time is up"):
        hodiff.grad(cut, X)
    calls[:] = [1] * 10


def test_a_time_limit_passes_a_flag(alarm: Callable[[Any], None]) -> None:
    class Slow:
        def __bool__(self) -> bool:
            signal.raise_signal(signal.SIGUSR1)
            return True

    alarm(functools.partial(handler, error=TimeoutError))
    with pytest.raises(TimeoutError, match="time is up"):
        is_set(Slow(), "flag")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("moment", ["_vmap_increment_nesting", "_vmap_decrement_nesting"])
def test_an_interrupt_between_the_lines_of_vmap_is_neither_lost_nor_leaves_a_level(
    moment: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's context fails in its wake, taking down a level that is not there, or leaves one up."""
    from torch._functorch import vmap

    entered = torch._C._functorch if direct else vmap
    theirs, interrupted = getattr(entered, moment), []

    def interrupt(*args: Any) -> Any:
        if interrupted:
            return theirs(*args)
        interrupted.append(True)
        raise KeyboardInterrupt

    f = lambda x: (x**3).sum()
    expected = hodiff.hessian(f, X)
    with monkeypatch.context() as patched:
        patched.setattr(entered, moment, interrupt)
        patched.setattr(_versions._Batches, "direct", direct)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            hodiff.hessian(f, X)
    assert interrupted
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert torch.equal(hodiff.hessian(f, X), expected)


def test_an_operation_of_which_the_engine_says_that_it_has_no_derivative_is_named() -> None:
    error = _messages.engine_error(RuntimeError("derivative for aten::frobnicate is not implemented"))
    assert str(error) == "PyTorch has no derivative of frobnicate."


def test_an_error_of_the_engine_is_chained() -> None:
    x = X.clone().requires_grad_()
    loss = (x**3).sum()
    loss.backward()
    with pytest.raises(hodiff.GraphError, match=r"(?is)freed|retain_graph") as caught:
        hodiff.grad(loss, x)
    if caught.value.__cause__ is not None:
        assert "second time" in str(caught.value.__cause__)
