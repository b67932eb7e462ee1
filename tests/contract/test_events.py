"""Resources and events: Ctrl-C at any moment leaves nothing behind, and eight threads get what one thread gets.

A resource is a public name called in one way, a context of the library, or an object that threads share. After each
event no switch, loan, lock or leaf of ours is left, and the numbers are right.

The suite interrupts each public name at a few moments, and each context of the library wherever it begins and ends;
`--all` does all at every moment. `python -m tests.abuse.signals` sends real signals.

What Python gives no place to prevent: an interrupt between a `with` block and `__exit__` finds nothing of ours running.
The state is then put back when the context is forgotten, which is when the interrupt's traceback is; see
`test_forgotten`.
"""

import ast
import contextlib
import functools
import gc
import importlib
import itertools
import linecache
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _kernels, _locks, _settings
from hodiff._core._where import Where
from hodiff.curvature import _memory
from hodiff.curvature._memory import LiveBytes
from hodiff.curvature._process_group import ProcessGroupSum
from hodiff.sparse import plan_hessian
from tests.meta.source import ROOT, library_files, tree
from tests.support import audit
from tests.support.audit import differences, process, taken_locks, unchanged
from tests.support.callers import CALLERS, SCALE, D, direction, generator, tensors
from tests.support.everything import ALONE, WITH_MODULES, of_module, with_a_module
from tests.support.interrupts import Interrupter, Kind, Seen, Stack
from tests.support.modules import Cube
from tests.support.processes import group_of_one
from tests.support.releases import CHECKPOINTS, SHARDS, STEPS
from tests.support.scene import Model, X

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
LOST = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""An interrupt in a finaliser, or in a generator that is thrown away, is printed by Python and lost."""

THREADS = 8

Call = Callable[..., Any]
"""Of a model, and of a point, which is the same one where none is given."""
CALLS: dict[str, Call] = {
    **{f"{c}, module in f": lambda m, x=X, c=c: c.run(c.shaped(m), x, ()) for c in CALLERS},
    **{f"{c}, module as point": lambda m, x=X, c=c: with_a_module(c, m, of_module(c)) for c in WITH_MODULES},
    **{name: lambda m, x=X, call=call: call(x) for name, call in ALONE.items()},
}
"""Each public name, in each way to call it."""


# --- the events -------------------------------------------------------------------------------------------------------


_tried: set[tuple[Kind, Stack]] = set()
"""Where a call of this process was interrupted: of a million moments some 35,000 differ."""


def interrupt(call: Call, moments: int | None, kind: Kind = "calls") -> None:
    """Interrupt a call at so many moments, by default at each whose stack was not tried before; look around after."""
    model = Model()
    run = lambda: call(model)
    torch.manual_seed(7)
    expected = tensors(run())
    count = Interrupter(kind=kind)
    count(run)
    places = list(dict.fromkeys(count.stacks))
    if moments is None:  # by the place: how many moments come before differs, with what is remembered and in sight
        places = [stack for stack in places if (kind, stack) not in _tried]
    else:
        step = max(1, count.moments // moments)
        places = list(range(1 + step // 2, count.moments + 1, step))[:moments]
    for at in places:
        _tried.add((kind, at))
        interrupter = Interrupter(at, kind)
        stopped = False
        try:
            with unchanged(model, X, SCALE):
                try:
                    interrupter(run)
                except KeyboardInterrupt as error:
                    error.__traceback__, stopped = None, True
        except AssertionError as error:
            raise AssertionError(f"interrupted at {interrupter.place}:\n{error}") from None
        assert stopped or interrupter.lost or not interrupter.place, f"swallowed at {interrupter.place}"
    assert not taken_locks()
    assert not model.fired
    torch.manual_seed(7)
    torch.testing.assert_close(tensors(run()), expected)


def least_limit() -> int:
    """The lowest limit of Python's stack here: what is below, Python refuses."""
    limit = 1
    while True:
        try:
            sys.setrecursionlimit(limit)
        except RecursionError:
            limit += 1
        else:
            return limit


def at_the_end_of_the_stack(call: Call) -> None:
    """Let a call begin so far below the limit, and further, until it has room: what undoes its steps needs some too."""
    model = Model()
    torch.manual_seed(7)
    expected = tensors(call(model))
    usual, held, room = sys.getrecursionlimit(), [], False
    for left in itertools.count(2):
        before = [process(), audit.of_module(model), audit.of_tensor(X)]
        limit = least_limit() + left
        sys.setrecursionlimit(limit)
        try:
            call(model)
            room = True
        except RecursionError as error:
            held.append(error)  # with its traceback: what is undone when that goes is undone too late
        finally:
            raised = sys.getrecursionlimit() - limit
            sys.setrecursionlimit(usual)
        changed = differences(before, [process(), audit.of_module(model), audit.of_tensor(X)])
        assert not changed and not raised, f"{left} frames: {changed}, {raised}"
        if room:
            break
    torch.manual_seed(7)
    torch.testing.assert_close(tensors(call(model)), expected)


def in_threads(task: Callable[[int], Any]) -> list[Any]:
    """What `THREADS` threads return that begin at once and take turns as often as they can."""
    results: list[Any] = [None] * THREADS
    barrier, interval = threading.Barrier(THREADS), sys.getswitchinterval()

    def work(number: int) -> None:
        barrier.wait(30)
        try:
            results[number] = task(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
    sys.setswitchinterval(1e-4)  # and at each operation of PyTorch, which lets go of the interpreter
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 100
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "threads each waits for the other"
    return results


def same_numbers(task: Callable[[int], Any], *models: Model) -> None:
    expected = [tensors(task(number)) for number in range(THREADS)]
    before = [process(), *map(audit.of_module, models)]
    for number, found in enumerate(in_threads(task)):
        assert not isinstance(found, BaseException), repr(found)
        torch.testing.assert_close(tensors(found), expected[number])
    assert not differences(before, [process(), *map(audit.of_module, models)])


def in_eight_threads(call: Call) -> None:
    model = Model()
    model.table.drop.eval()  # the threads draw from one generator, so that each would see other numbers in each run
    points = [X + torch.tensor(number, dtype=D) / 10 for number in range(THREADS)]
    same_numbers(lambda number: call(model, points[number]), model)


def repeated(task: Callable[[int], Any], often: int) -> None:
    """Each thread's task again and again: the same numbers as in one thread, each time."""
    expected = [tensors(task(number)) for number in range(THREADS)]

    def again(number: int) -> int:
        for _ in range(often):
            torch.testing.assert_close(tensors(task(number)), expected[number])
        return often

    assert in_threads(again) == [often] * THREADS


# --- public names -----------------------------------------------------------------------------------------------------

EVENTS: dict[str, Callable[[Call], None]] = {
    "interrupted": lambda call: interrupt(call, 4),
    "in eight threads": in_eight_threads,
}
ONE_THREAD = {"plotting.convergence"}  # matplotlib draws in one thread


@pytest.mark.table(wide=90)
@pytest.mark.parametrize(
    ("event", "name"),
    [
        *[pytest.param("interrupted", name, marks=LOST) for name in CALLS],
        *[("in eight threads", name) for name in CALLS if name not in ONE_THREAD],
    ],
)
def test_a_public_name(event: str, name: str) -> None:
    EVENTS[event](CALLS[name])


@LOST
@pytest.mark.parametrize("name", ["hvp, module as point", "laplacian, module in f", "jvp, module in f"])
def test_at_more_moments(name: str) -> None:
    interrupt(CALLS[name], 60)


@pytest.mark.table(wide=25)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ONE_THREAD])
def test_a_recursion_error_leaves_nothing(name: str) -> None:
    at_the_end_of_the_stack(CALLS[name])


def below_autograd(frame: Any) -> bool:
    """Whether a mode handles an operation: PyTorch records nothing there, whoever asks."""
    handlers = "__torch_dispatch__", "dispatch"  # the second is what `DispatchMode` puts around that of our own modes
    while frame is not None and frame.f_code.co_name not in handlers:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def handled(call: Callable[[], Any], kind: str) -> Iterator[Callable[[], Any]]:
    """What lets a handler of a kind run that makes a call."""
    if kind == "signal":
        before = signal.signal(signal.SIGUSR1, lambda number, frame: call())
        try:
            yield lambda: signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        return

    def collected(phase: str, info: Any) -> None:
        if phase == "start":
            call()

    gc.disable()  # when it comes by itself is another matter
    gc.callbacks.append(collected)
    try:
        yield lambda: gc.collect(0)
    finally:
        gc.callbacks.remove(collected)
        gc.enable()


@pytest.mark.table(wide=30)
@pytest.mark.parametrize("kind", ["signal", "collector"])
@pytest.mark.parametrize("name", [name for name in CALLS if "module" in name])
def test_a_handler_that_calls_on_the_model_at_hand(name: str, kind: str) -> None:
    """The call that it came into is right, and its own is right or refused, whatever the moment."""
    model = Model()
    model.table.drop.eval()  # both draw from one generator
    inner = lambda: CALLS["hvp, module as point"](model)
    outer = lambda: CALLS[name](model)
    expected, alone, said = tensors(outer()), tensors(inner()), list[str]()

    def handler() -> None:
        sys.setprofile(None)
        try:
            torch.testing.assert_close(tensors(inner()), alone)
            said.append("right")
        except (hodiff.GraphError, hodiff.InputError) as error:
            said.append(str(error))

    count = Interrupter()
    count(outer)
    with unchanged(model, X), handled(handler, kind) as now:
        for at in range(1, count.moments, max(1, count.moments // 25)):
            left = [at]

            def look(frame: Any, event: str, arg: Any, left: list[int] = left) -> None:
                if event in ("call", "c_return") and "hodiff" in frame.f_code.co_filename:
                    left[0] -= 1
                    if left[0] <= 0 and not below_autograd(frame):
                        now()

            sys.setprofile(look)
            try:
                found = outer()
            finally:
                sys.setprofile(None)
            torch.testing.assert_close(tensors(found), expected)
    refused = [each for each in said if each != "right"]
    refusals = "this call was made by the handler of a signal, or", "hodiff was called inside a torch.func transform"
    others = {each for each in refused if not each.startswith(refusals)}
    assert said and not others, others


# --- each context ---------------------------------------------------------------------------------------------------


def _cube(z: Any) -> torch.Tensor:
    return (z**3).sum()


def _with_data(f: Callable[..., Any] = _cube, **options: Any) -> Any:
    return hodiff.HessianOperator(lambda z, batch: (f(z), 1), X, data=[()], **options) @ direction(X)


class Block(torch.nn.Linear):
    def forward(self, input: Any) -> Any:
        return checkpoint(lambda z: super(Block, self).forward(z).sin(), input, use_reentrant=False)


def _swapped(_: Model) -> Any:
    block, x = Block(3, 3).double(), torch.ones(2, 3, dtype=torch.float64)
    point = {name: p.detach() for name, p in block.named_parameters()}
    return hodiff.grad(lambda p: torch.func.functional_call(block, p, (x,)).sum(), point)


def _checkpointed(_: Model) -> Any:
    H = hodiff.HessianOperator(lambda z: checkpoint(lambda y: y.sin() * y, z, use_reentrant=False).sum(), X)
    return H @ direction(X)


def _under(context: Callable[[], Any], call: Call) -> Call:
    def run(model: Model) -> Any:
        with context():
            return call(model)

    return run


def _explained(_: Model) -> str:
    """A pass that fails under a watch, which explains it."""
    a = X.clone().requires_grad_()
    with hodiff.graph.watch():
        loss = (a**2).sum()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as error:
            return error.__notes__[0]
    return ""


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


def _checked(f: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    def run(_: Model) -> None:
        with contextlib.suppress(hodiff.DerivativeError):
            hodiff.check_derivatives(f, X, generator=generator())

    return run


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    with group_of_one() as made:
        yield made


def _shared(_: Model) -> torch.Tensor:
    group_sum = ProcessGroupSum(dist.group.WORLD, Where(X), "HessianOperator", "auto")
    with group_sum.raise_on_all_ranks():
        return group_sum.sum("multiplies", [X])[0][0].clone()


def _fully_sharded(_: Model) -> Any:
    """A product of a sharded model, of one process."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(X.shape[-1], 2), nn.Tanh(), nn.Linear(2, 1)).to(X.dtype)
    fully_shard(model[0])
    fully_shard(model)
    v = {name: torch.ones_like(p.detach()) for name, p in model.named_parameters()}
    return hodiff.hvp(lambda m: m(X).square().sum(), model, v)


def _entered(context: Callable[[], Any]) -> Call:
    def run(_: Model) -> None:
        with context():
            pass

    return run


def _compared(_: Model) -> torch.Tensor:
    """A Function that nobody has met before; where there is a process group, `f` is not called again."""
    fresh = type("Fresh", (Cube,), {})
    with mock.patch.object(torch.distributed, "is_initialized", lambda: False):
        return hodiff.hvp(lambda z: fresh.apply(z).sum(), X, direction(X))


def _bfloat16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def _eager(_: Model) -> None:
    import torch._dynamo

    with _settings.Scope(_settings.eager.enter):
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"


def _of_inference(_: Model) -> Any:
    with torch.inference_mode():
        factor = torch.full_like(X, 3.0)
    return hodiff.hvp(lambda z: (z**3 * factor).sum(), X, direction(X))


def _hooked(z: torch.Tensor) -> torch.Tensor:
    y = z * z
    y.register_hook(lambda gradient: 2 * gradient)
    return y.sum()


def _inspected(_: Model) -> int:
    loss = _cube(X.clone().requires_grad_())
    with torch.inference_mode():
        return len(hodiff.graph.inspect(loss).nodes)


def _plain(_: Model) -> torch.Tensor:
    """Attention with dropout, which our kernel leaves to matrix products."""
    q = torch.ones(1, 1, 2, 2).requires_grad_()
    with hodiff.twice_differentiable():
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def _repeated(_: Model) -> torch.Tensor:
    x = X.clone().requires_grad_()
    with hodiff.twice_differentiable():
        value = checkpoint(torch.sin, x, use_reentrant=False).sum()
    return torch.autograd.grad(value, x)[0]


def _of_steps(module: str) -> Any:
    return importlib.import_module(f"hodiff.steps.{module}")


def _settings_of_steps() -> Any:
    return _of_steps("_dynamo").settings()


def _frozen(model: Model) -> None:
    """The parameters that a selection leaves out, as for a step."""
    step = hodiff.compile_step(lambda m: m(X).sum(), hodiff.select(model, next(iter(model.state_dict()))))
    with _settings.Scope(step._freeze):
        pass


def _in_blocks(model: Model) -> object:
    """By name; by the checkpoints of the function's own, one of them with a context; a product by forward mode."""

    def own(model: Model) -> torch.Tensor:
        y = checkpoint(model, X, use_reentrant=False)
        nothing = lambda: (contextlib.nullcontext(), contextlib.nullcontext())
        return checkpoint(torch.sin, y, use_reentrant=False, context_fn=nothing).sum()

    v = {name: torch.ones_like(p) for name, p in model.named_parameters() if p.requires_grad}
    G = hodiff.GaussNewtonOperator(
        lambda m, batch: m(batch[0]), torch.nn.MSELoss(), model, data=[(X, X)], checkpoint="*", memory_budget=0
    )
    return hodiff.hvp(own, model, v, checkpoint=True), G @ v


_OF_STEPS = _entered(_settings_of_steps)
_OF_INDUCTOR = _entered(
    lambda: _settings.Scope(functools.partial(importlib.import_module("hodiff.steps._backends")._set_inductor, True))
)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The switch of compiled code loads what it needs at its first use: a test that runs alone would see that."""
    undo: list[Any] = []
    _settings.eager.enter(undo)
    _settings.undo_all(undo)


ENTERED: dict[str, Call] = {
    "_core/_graph.py: OutputGraph": CALLS["hvp, module as point"],
    "_core/_hooks.py: Counted(_watch_hooks)": CALLS["hvp, module as point"],
    "_core/_kernels.py: Counted(_plain_attention)": _entered(lambda: _settings.Scope(_kernels.plain_attention.enter)),
    "_core/_hooks.py: Counted(_watch_checkpoints)": _entered(hodiff.twice_differentiable),
    "_core/_kernels.py: Scope(include)": _repeated,
    "__init__.py: Scope(_settings.without_collections)": _entered(
        lambda: _settings.Scope(_settings.without_collections)
    ),
    "memory/_attention.py: Scope(_kernels.plain_attention.enter)": _plain,
    "_core/_settings.py: Offered": _entered(hodiff.twice_differentiable),
    "_core/_python_functions.py: Scope(_comparing)": _compared,
    "_core/_hooks.py: Scope(enter)": _checkpointed,
    "memory/_blocks.py: Counted(_watch)": _in_blocks,
    "memory/_blocks.py: Scope(_level)": _in_blocks,
    "memory/_blocks.py: Scope(partial(_within, None))": _in_blocks,
    "memory/_blocks.py: Scope(partial(_within, _INSIDE))": _in_blocks,
    "memory/_blocks.py: Scope(self._watch)": _in_blocks,
    "_core/_hooks.py: Counted(_watch_modules)": CALLS["hvp, module in f"],
    "_core/_lending.py: EvaluationContext": _under(torch.inference_mode, CALLS["hvp, module as point"]),
    "_core/_settings.py: Scope(enter)": _under(_bfloat16, lambda _: _with_data(memory_budget=0)),
    "_core/_settings.py: Scope(partial(push_calls, mode))": _of_inference,
    "_core/_settings.py: Scope(partial(_push_operations, mode))": CALLS["sparse_hessian, module in f"],
    "_core/_settings.py: Counted(_keep_flags)": CALLS["sparse_hessian, module in f"],
    "_core/_settings.py: Counted(_eager)": _eager,
    "_core/_settings.py: Counted(_no_cudnn)": _entered(lambda: _settings.Scope(_settings.no_cudnn.enter)),
    "_core/_settings.py: Scope": _inspected,
    "curvature/_process_group.py: _exchanging": _shared,
    "curvature/_process_group.py: raise_on_all_ranks": _shared,
    "sharded/_ranks.py: exchanging": _fully_sharded,
    "sharded/_groups.py: Scope(partial(self._enter, held))": _fully_sharded,
    "curvature/_probes.py: EstimatorProgress": CALLS["trace"],
    "_core/_lending.py: Scope(resume)": _swapped,
    "_core/_graph.py: Watched": CALLS["laplacian, reverse, module in f"],
    "graph/_saved.py: Scope(_normal)": _inspected,
    "graph/_watch.py: Watch": CALLS["graph.watch"],
    "steps/_dynamo.py: Scope(_enter)": _OF_STEPS,
    "steps/_dynamo.py: Scope(_ask)": _entered(lambda: _settings.Scope(_of_steps("_dynamo")._ask)),
    "steps/_graph.py: Scope(partial(_as_it_was, given))": _entered(
        lambda: _settings.Scope(functools.partial(_of_steps("_graph")._as_it_was, [X.clone()]))
    ),
    "steps/_graph.py: Scope(partial(_open, mode))": _entered(
        lambda: _settings.Scope(functools.partial(_of_steps("_graph")._open, FakeTensorMode()))
    ),
    "steps/_backends.py: Scope(partial(_set_inductor, wrapper))": _OF_INDUCTOR,
    "steps/__init__.py: Scope(self._freeze)": _frozen,
    "sparse/_tracer.py: Counted(_watch)": CALLS["sparse_hessian, module in f"],
    "sparse/_tracer.py: Scope(enter)": CALLS["sparse_hessian, module in f"],
    "verify/_trace.py: altered": _checked(_hooked),
    "verify/__init__.py: Scope(partial(_ignore, CustomFunctionWarning))": _checked(torch.sin),
    "verify/__init__.py: Scope(partial(_ignore, Warning))": _checked(lambda z: _Wrong.apply(z).sum()),
    "verify/__init__.py: _watched": _checked(lambda z: _Wrong.apply(z).sum()),
    "verify/_trace.py: _Counting": _checked(_cube),
}  # fmt: skip
"""Each context of the library, by a call that enters it."""

NEW = {
    _in_blocks: CHECKPOINTS,
    _OF_STEPS: STEPS,
    _frozen: STEPS,
    _fully_sharded: SHARDS,
}
NAMES = [pytest.param(name, marks=NEW.get(call, ())) for name, call in ENTERED.items()]


def contexts() -> dict[str, tuple[str, list[str]]]:
    """Each context in the source: its file, and the names of functions one of which runs where it is entered."""
    found: dict[str, tuple[str, list[str]]] = {}
    for path in library_files():
        file = str(path.relative_to(ROOT / "src" / "hodiff"))
        for node in ast.walk(tree(path)):
            match node:
                case ast.ClassDef(name=name, bases=bases, body=body):
                    # A class that is a `Scope` may say what that enters.
                    ways = ["__enter__", *["_enter"] * any("Scope" in ast.unparse(base) for base in bases)]
                    ways = [way for way in ways if any(getattr(each, "name", "") == way for each in body)]
                    if ways:
                        found[f"{file}: {name}"] = file, [f"{name}.{way}" for way in ways]
                case ast.FunctionDef(name=name, decorator_list=marks) if any(
                    "contextmanager" in ast.unparse(mark) for mark in marks
                ):
                    found[f"{file}: {name}"] = file, [name]
                case ast.Call(
                    func=ast.Name(id="Scope" | "Counted" as kind) | ast.Attribute(attr="Scope" as kind), args=[argument]
                ):
                    made = re.findall(r"\w+", ast.unparse(argument).removeprefix("partial("))
                    # A function of another module runs there.
                    at = f"_core/{made[0]}.py" if (ROOT / f"src/hodiff/_core/{made[0]}.py").exists() else file
                    found[f"{file}: {kind}({ast.unparse(argument)})"] = at, [*made, *(f"_{part}" for part in made)]
    return found


def test_no_context_is_forgotten() -> None:
    assert set(ENTERED) == set(contexts())


@pytest.mark.parametrize("name", NAMES)
def test_the_call_enters_it(name: str) -> None:
    file, functions = contexts()[name]
    seen = Seen(lambda: ENTERED[name](Model())).names(file)
    assert any(each == function or each.endswith(f".{function}") for each in seen for function in functions), seen


@LOST
@pytest.mark.parametrize("kind", ["contexts", "lines"])
@pytest.mark.parametrize("name", NAMES)
def test_each_context(name: str, kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupt(ENTERED[name], 4, kind)


@LOST
@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["calls", "contexts", "lines"])
@pytest.mark.parametrize("name", [*CALLS, *NAMES])
def test_at_every_moment(name: str, kind: Kind) -> None:
    with warnings.catch_warnings():
        if name in ENTERED:
            warnings.simplefilter("ignore")
        interrupt({**CALLS, **ENTERED}[name], None, kind)


@LOST
def test_no_step_is_half_taken() -> None:
    """At any moment of its end all parameters are as they were, or all are the new ones."""
    optimizer = lambda w: hodiff.LevenbergMarquardt(lambda w: torch.cat(w) ** 2 - 30, w, momentum=0.1).step
    start = lambda: [torch.full((2,), 5.0 + k, dtype=torch.float64, requires_grad=True) for k in range(3)]
    optimizer(start())()  # what only a first call does
    after, count = start(), Interrupter()
    count(optimizer(after))
    taking = ["_take" in {code.co_name for code, _ in stack[1:]} for stack in count.stacks]
    ends = [at for at, inside in enumerate(taking, 1) if inside]
    assert ends and not any(map(torch.equal, start(), after))
    for at in ends:
        w = start()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at)(optimizer(w))
        assert any(all(map(torch.equal, w, whole)) for whole in (start(), after)), at


@LOST
def test_forgotten() -> None:
    """Where the interrupt comes before `__exit__`, the end of the traceback is the end of the context."""
    scope = _settings.Scope(_kernels.plain_attention.enter)
    with unchanged():
        scope.__enter__()
        assert not torch.backends.cuda.flash_sdp_enabled()
        del scope


@LOST
@pytest.mark.parametrize("context", [hodiff.graph.watch, hodiff.graph.lifetime])
def test_a_watch_whose_end_never_began(context: Callable[[], Any]) -> None:
    """It ends when nobody holds it, or by hand."""
    with unchanged():
        held = context().__enter__()
        assert (X.clone().requires_grad_() ** 2).sum().backward() is None and held.passes
        del held
    with unchanged():
        held = context().__enter__()
        held.close()
        held.close()


def nested(model: Model) -> Any:
    return hodiff.grad(lambda m: sum(g.sum() for g in hodiff.grad(lambda m: m(X).sin().sum(), m).values()), model)


def moments_of(names: tuple[str, ...]) -> list[int]:
    """The moments at which functions of these names begin, in a call inside another."""
    count = Interrupter()
    count(lambda: nested(Model()))
    begun = [event == "call" and place[0].co_name in names for event, place, *_ in count.stacks]
    assert sum(begun) > 3
    return [at for at, each in enumerate(begun, 1) if each]


@LOST
def test_forgotten_inside_another() -> None:
    """What an inner context found belongs to the outer one, which ends first; put back later, it would stay."""
    nested(model := Model())
    for at in moments_of(("__exit__", "close", "undo_all")):
        with unchanged(model, X), contextlib.suppress(KeyboardInterrupt):
            Interrupter(at)(lambda: nested(model))


@LOST
def test_an_end_that_was_interrupted_is_begun_again() -> None:
    """At once: nobody need forget the interrupt's traceback."""
    nested(model := Model())
    for at in moments_of(("close", "undo_all")):
        with unchanged(model, X):
            try:
                Interrupter(at)(lambda: nested(model))
            except KeyboardInterrupt as error:
                held = error
        assert held.__traceback__ is not None


# --- one object, many threads: 0 of 1,000 wrong -----------------------------------------------------------------------


BATCHES = [(X + number, X.sum(-1) - number) for number in range(3)]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(X.shape[-1], 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 1)).to(D).eval()


def squares(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    return (model(batch[0]).squeeze(-1) - batch[1]).square().sum(), len(batch[1])


def outputs(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def operator(**options: Any) -> hodiff.HessianOperator:
    return hodiff.HessianOperator(squares, network(), data=BATCHES, **options)


def vector(size: int, number: int) -> Tensor:
    return torch.randn(size, dtype=D, generator=torch.Generator().manual_seed(number))


def times(H: hodiff.LinearOperator) -> Callable[[int], Any]:
    """Products with one vector, as such and by name, and with several."""
    vectors = [vector(H.shape[1], number) for number in range(THREADS)]
    return lambda number: [H @ vectors[number], H @ torch.stack(vectors[number : number + 2], 1)]


def estimated(H: hodiff.LinearOperator) -> Callable[[int], Any]:
    def task(number: int) -> Any:
        generator = torch.Generator().manual_seed(number)
        found = hodiff.eigsh(H, 2, generator=generator)
        trace = hodiff.trace(H, samples=4, generator=generator)
        counts = torch.tensor([found.products, trace.products])  # those of other threads are not among them
        return [found.value, trace.value, hodiff.diagonal(H).value, counts]

    return task


def of_a_transpose() -> Callable[[int], Any]:
    J = hodiff.JacobianOperator(outputs, network(), data=BATCHES, memory_budget=0)
    vectors = [vector(J.shape[1], number) for number in range(THREADS)]
    return lambda number: J.T @ (J @ vectors[number])


def sparse_plan() -> Callable[[int], Any]:
    plan = plan_hessian(lambda x: (x[1:] * x[:-1]).square().sum(), torch.ones(6, dtype=D))
    return lambda number: plan.values(vector(6, number))


def expansions() -> Callable[[int], Any]:
    model = network()

    def task(number: int) -> Any:
        x, f = X + number, lambda x: model(x).squeeze(-1)
        return [hodiff.laplacian(f, x), hodiff.jet(f, x, [torch.ones_like(x), torch.zeros_like(x)])[-1]]

    return task


def operators_on_one_module() -> Callable[[int], Any]:
    model = network()

    def task(number: int) -> Any:
        H = hodiff.HessianOperator(squares, model, data=BATCHES[: 1 + number % 3], memory_budget=0.5 * (number % 2))
        G = hodiff.GaussNewtonOperator(outputs, nn.MSELoss(), model, data=[(x, y[:, None]) for x, y in BATCHES])
        v = vector(H.shape[0], number)
        return [H @ v, G @ v, H.gradient]

    return task


def fisher() -> Callable[[int], Any]:
    data = [(x, y[:, None]) for x, y in BATCHES]
    kinds = {kind: hodiff.FisherOperator(outputs, nn.MSELoss(), network(), data=data, kind=kind) for kind in ("exact",)}
    return lambda number: kinds["exact"] @ vector(kinds["exact"].shape[0], number)


SHARED: dict[str, Callable[[], Callable[[int], Any]]] = {
    "an operator": lambda: times(operator()),
    "an operator that keeps nothing": lambda: times(operator(memory_budget=0)),
    "a sum, damped": lambda: times((H := operator()) + 0.5 * H + 1.0),
    "a block": lambda: times(operator().block("0")),
    "a Jacobian and its transpose": of_a_transpose,
    "a Fisher operator": fisher,
    "estimators of one operator": lambda: estimated(operator()),
    "a plan": sparse_plan,
    "Taylor mode": expansions,
    "several operators on one module": operators_on_one_module,
}


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SHARED)
def test_one_object_for_all_threads(name: str, number: int) -> None:
    if name.startswith("estimators"):  # some hundred products each
        number = 1 + number // 25
    repeated(SHARED[name](), number)


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.nightly)])
def test_one_operator_over_a_group_of_one_process(group: Any, number: int) -> None:
    H = operator(process_group=group)
    v = vector(H.shape[0], 0)
    torch.testing.assert_close(H @ v, operator() @ v)
    repeated(times(H), number)
    if number > 3:
        repeated(estimated(H), 1)


def refreshing(H: Any, task: Callable[[int], Any]) -> Callable[[int], Any]:
    """Beside the task, every other thread's operator is evaluated anew, or closed and opened again."""

    def beside(number: int) -> Any:
        if number % 2:
            H.refresh()
        return task(number)

    return beside


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_products_beside_a_refresh(budget: float, number: int) -> None:
    H = operator(memory_budget=budget)
    repeated(refreshing(H, times(H)), number)
    if number > 3:
        repeated(refreshing(H, estimated(H)), 1)


def test_what_takes_several_products_stays_at_its_point() -> None:
    """A refresh in between, at other parameters, is as good as another thread's: no product of both."""
    model = network()
    H = hodiff.HessianOperator(squares, model, data=BATCHES)
    moved = []

    def move(record: Any) -> None:
        if not moved:
            with torch.no_grad():
                moved.extend(parameter.mul_(1.5) for parameter in model.parameters())
            H.refresh()

    with pytest.raises(hodiff.GraphError, match="parameters have changed since the operator was evaluated"):
        hodiff.eigsh(H, 2, callback=move)
    assert moved
    torch.testing.assert_close(H.dense(), hodiff.HessianOperator(squares, model, data=BATCHES).dense())


def test_products_are_counted_in_all_threads() -> None:
    H = operator()
    task = times(H.block("0") + 1.0)
    in_threads(lambda number: [task(number) for _ in range(20)])
    assert H.products == H.block("*").products + sum([1 + min(2, THREADS - number) for number in range(THREADS)]) * 20


def test_threads_that_wait_for_each_other_are_told() -> None:
    """One evaluates an operator and needs a module, whose owner needs that operator's evaluation."""
    model, inside, begun = network(), threading.Event(), threading.Event()

    class Data:
        def __iter__(self) -> Iterator[Any]:
            begun.set()
            inside.wait(30)
            yield BATCHES[0]

    H = hodiff.HessianOperator(squares, model, data=Data(), batch_weight=None)
    v = vector(H.shape[0], 0)

    def f(model: nn.Module) -> Tensor:
        loss = squares(model, BATCHES[0])[0]
        if not inside.is_set():
            inside.set()
            with torch.no_grad():
                H.__matmul__(v)
        return loss

    results: list[Any] = [None, None]

    def work(place: int, call: Callable[[], Any]) -> None:
        try:
            results[place] = call()
        except hodiff.GraphError as error:
            results[place] = error

    calls = [lambda: H @ v, lambda: hodiff.grad(f, model)]
    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(calls)]
    threads[0].start()
    assert begun.wait(30)  # in its data, where no module is needed: the other takes the module now
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    refused = [str(found) for found in results if isinstance(found, hodiff.GraphError)]
    assert len(refused) == 1
    assert "use each other's modules or operators" in refused[0]
    torch.testing.assert_close(H @ v, hodiff.HessianOperator(squares, model, data=BATCHES[:1]) @ v)


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_while_frames_are_read(collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read, seen = sys._current_frames, list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), read())[1])
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert not _locks._ends_after_this(threading.get_ident()) and seen == [False]
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_a_claim_that_is_lost_ends_with_its_object() -> None:
    what = object()
    held = _settings.owned(what)
    held.__enter__()  # and an interrupt keeps it from its end
    assert what in _locks._claims
    del held
    assert what not in _locks._claims


def test_the_running_mean_of_a_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal lengths L the mean after n calls is L (1 - 0.9^n), in whatever order they come."""
    lerp = Tensor.lerp
    monkeypatch.setattr(Tensor, "lerp", lambda *args: (time.sleep(1e-3), lerp(*args))[1])  # time for another thread
    penalty, w, noise = hodiff.PathLengthPenalty(decay=0.1), X, torch.ones(len(X), 1, 2, 2, dtype=D)
    in_threads(lambda number: [penalty(lambda w: w.sum(1)[:, None, None, None].expand(-1, 1, 2, 2), w, vectors=noise)
                               for _ in range(10)])  # fmt: skip
    assert penalty.lengths is not None
    length = float(penalty.lengths.mean())
    assert float(penalty.mean_length) == pytest.approx(length * (1 - 0.9 ** (10 * THREADS)), rel=1e-6)


def test_steps_of_least_squares_come_one_after_another() -> None:
    def run(calls: Callable[[Callable[[int], Any]], Any]) -> Tensor:
        x = torch.full((3,), 2.0, dtype=D)
        optimizer = hodiff.LevenbergMarquardt(lambda x: x**2 - 1, x)
        calls(lambda number: optimizer.step())
        return x

    torch.testing.assert_close(run(in_threads), run(lambda step: [step(number) for number in range(THREADS)]))


def test_a_cache_of_parametrizations_is_given_back() -> None:
    model = parametrizations.weight_norm(nn.Linear(X.shape[-1], 1).to(D))
    with parametrize.cached():
        theirs = parametrize._cache
        repeated(lambda number: hodiff.grad(lambda model: model(X + number).square().sum(), model), 3)
        assert parametrize._cache is theirs
        assert not theirs


def test_a_thread_that_was_woken_is_in_no_circle() -> None:
    """A waits for what B has given back already, and A has not run since: B may wait for A."""
    first, second, loan = object(), object(), object()
    other = threading.get_ident() + 1
    with _locks.lock:
        _locks._claims[first] = other, {loan: None}
        _locks._waiting[other] = [second]
        waiter = threading.Timer(0.2, lambda: _locks.release([first], loan))
        waiter.start()
        _locks.claim([first], loan)  # which waits, and does not raise
        _locks.release([first], loan)
        del _locks._waiting[other]


def test_the_gauge_of_bytes_counts_what_goes_in_the_middle_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveBytes() as live:
        kept = [torch.zeros(10), torch.zeros(10)]

        class Storage:
            _cdata = -1

            def nbytes(self) -> int:
                del kept[-1:]  # as the collector may, and other threads
                return 8

        storage = Storage()
        monkeypatch.setattr(_memory, "_storages", lambda values: [x for x in values if x is storage])
        live.__torch_dispatch__(lambda: storage, ())
        kept.clear()
        assert live.now == 8


def test_a_library_that_another_thread_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is there before its contents are; an import waits for them."""
    x = torch.ones(3, dtype=D)
    for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "scipy.sparse"):
        whole, waited = importlib.import_module(name), []

        class Loading(type(sys)):
            def __getattr__(self, wanted: str, whole: Any = whole, waited: list[str] = waited) -> Any:
                frame = sys._getframe(1)
                if "import" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
                    raise AttributeError(f"partially initialized module has no attribute {wanted!r}")
                waited.append(wanted)
                return getattr(whole, wanted)

        class Layer(nn.Linear):  # PyTorch's own tensors and a class that was looked at are known to be whole
            pass

        class Entries(torch.Tensor):
            pass

        monkeypatch.setitem(sys.modules, name, Loading(name))
        model = Layer(3, 1, dtype=D)
        v = {name: p.detach().as_subclass(Entries) for name, p in model.named_parameters()}
        hodiff.hvp(lambda m: m(x).square().sum(), model, v)
        plan_hessian(lambda x: x.pow(3).sum(), x, pattern=([0, 1, 2], [0, 1, 2]))
        assert waited, name
        monkeypatch.undo()
