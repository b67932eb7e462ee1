"""Eight threads that differentiate at once, one module between them, get the numbers that one thread gets."""

import ast
import importlib
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hodiff
from hodiff._core import _locks
from hodiff._core._memory import LiveBytes
from hodiff.sparse import plan_hessian
from tests.meta.source import library_files, module_name, tree
from tests.support.audit import differences, of_module, process
from tests.support.callers import CALLERS, D, tensors
from tests.support.everything import ALONE, WITH_MODULES, with_a_module
from tests.support.everything import of_module as function_of_module
from tests.support.processes import group_of_one
from tests.support.scene import Model, X

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
THREADS = 8


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
    before = [process(), *map(of_module, models)]
    for number, found in enumerate(in_threads(task)):
        assert not isinstance(found, BaseException), repr(found)
        torch.testing.assert_close(tensors(found), expected[number])
    assert not differences(before, [process(), *map(of_module, models)])


def still(model: Model) -> Model:
    """Without dropout: the threads draw from one generator, so that each would see other numbers in each run."""
    model.table.drop.eval()
    return model


@pytest.mark.drawn(15)
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_module_in_the_function(caller: Any) -> None:
    model = still(Model())
    points = [X + torch.tensor(number, dtype=D) / 10 for number in range(THREADS)]
    same_numbers(lambda number: caller.run(caller.shaped(model), points[number], ()), model)


@pytest.mark.drawn(15)
@pytest.mark.parametrize("caller", WITH_MODULES, ids=repr)
def test_a_module_as_the_point(caller: Any) -> None:
    model = still(Model())
    same_numbers(lambda number: with_a_module(caller, model, function_of_module(caller)), model)


@pytest.mark.drawn(15)
@pytest.mark.parametrize("name", sorted(set(ALONE) - {"plotting.convergence"}))  # matplotlib draws in one thread
def test_without_a_function(name: str) -> None:
    points = [X + torch.tensor(number, dtype=D) / 10 for number in range(THREADS)]
    same_numbers(lambda number: ALONE[name](points[number]))


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


def repeated(task: Callable[[int], Any], often: int) -> None:
    """Each thread's task again and again: the same numbers as in one thread, each time."""
    expected = [tensors(task(number)) for number in range(THREADS)]

    def again(number: int) -> int:
        for _ in range(often):
            torch.testing.assert_close(tensors(task(number)), expected[number])
        return often

    assert in_threads(again) == [often] * THREADS


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHARED)
def test_one_object_for_all_threads(name: str, number: int) -> None:
    if name.startswith("estimators"):  # some hundred products each
        number = 1 + number // 25
    repeated(SHARED[name](), number)


@pytest.fixture
def group() -> Iterator[Any]:
    with group_of_one() as made:
        yield made


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("number", [3, pytest.param(125, marks=pytest.mark.slow)])
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
            begun.wait(30)
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
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    refused = [str(found) for found in results if isinstance(found, hodiff.GraphError)]
    assert len(refused) == 1
    assert "use each other's modules or operators" in refused[0]
    torch.testing.assert_close(H @ v, hodiff.HessianOperator(squares, model, data=BATCHES[:1]) @ v)


def test_a_claim_that_is_lost_ends_with_its_object() -> None:
    what = object()
    held = _locks.ThreadClaim(what)
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


def test_steps_of_newtons_method_come_one_after_another() -> None:
    def run(calls: Callable[[Callable[[int], Any]], Any]) -> Tensor:
        x = torch.full((3,), 2.0, dtype=D, requires_grad=True)
        optimizer = hodiff.NewtonCG([x], rtol=1e-9)
        calls(lambda number: optimizer.step(lambda: (x - 1).pow(4).sum()))
        return x.detach()

    torch.testing.assert_close(run(in_threads), run(lambda step: [step(number) for number in range(THREADS)]))


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


def test_the_gauge_of_bytes_counts_what_goes_in_the_middle_of_a_line() -> None:
    with LiveBytes() as live:
        kept = [torch.zeros(10), torch.zeros(10)]

        class Storage:
            _cdata = -1

            def nbytes(self) -> int:
                del kept[-1:]  # as the collector may, and other threads
                return 8

        storage = Storage()
        live._count(storage)
        kept.clear()
        assert live.now == 8


# --- what can change, and why threads may share it --------------------------------------------------------------------


LOCKED, CLAIMED, OWN = "under _locks.lock", "claimed", "one for each thread"
GROWS = "only grows, one entry at a time; who misses one looks again"
CACHE = "functools keeps a result once it is whole, and the same again is as good"
IMPORT = "filled while its module is imported"
ONE_STEP = "changed in one step of the interpreter"
SAME = "worked out once from what does not change: whoever comes second finds the same"

DISCIPLINE = {
    "_core._locks.lock": "the lock",
    "_core._locks._changed": LOCKED,
    "_core._locks._claims": LOCKED,
    "_core._locks._waiting": LOCKED,
    "_core._locks._restored": IMPORT,
    "_core._locks.here": OWN,
    "_core._versions.passing": OWN,
    "_core._versions._reading": "a lock, held for a read in C that runs no Python code",
    "implicit._solution._together": SAME,
    "steps._wrappers": "a weak set, which only grows",
    "steps._dynamo.lock": "a lock, held while a step is compiled",
    "steps._dynamo._names": ONE_STEP,
    "steps._shadows.inside": OWN,
    "_core._kernels.registered": LOCKED,
    "_core._kernels.plain_attention": LOCKED,
    "_core._hooks._frames": LOCKED,
    "_core._hooks._hooked": CACHE,
    "_core._hooks._watchers": CACHE,
    "_core._hooks.watch_checkpoints": LOCKED,
    "_core._hooks.watch_hooks": LOCKED,
    "_core._nodes.UNREMARKABLE": GROWS,
    "_core._hooks.watch_modules": LOCKED,
    "memory._blocks.watch_calls": LOCKED,
    "memory._blocks._met": OWN,
    "_core._nodes.HIDING": GROWS,
    "_core._loans._lent": CLAIMED,
    "_core._settings.absent": OWN,
    "_core._settings.opened": OWN,
    "_core._substitutes._TOLD": IMPORT,
    "_core._call.state": OWN,
    "_core._arguments.WHOLE": GROWS,
    "_core._refusals._warned": LOCKED,
    "_core._refusals.said": OWN,
    "_core._reverse._cleared": GROWS,
    "_core._reverse._without_functions": GROWS,
    "_core._settings._flagged": LOCKED,
    "_core._settings._lost": ONE_STEP,
    "_core._settings.eager": LOCKED,
    "_core._settings.no_cudnn": LOCKED,
    "_core._versions._RAW_SAVED": CACHE,
    "_core._versions.load_forward_mode": CACHE,
    "_core._versions.prove": CACHE,
    "_core._messages._state": OWN,
    **dict.fromkeys([f"_core._vectors.{name}" for name in ("_sizes", "dtype", "flat", "shapes", "size")], SAME),
    "curvature._operator.COMPOSED": IMPORT,
    "curvature._process_group._made": LOCKED,
    "curvature._process_group._threads": LOCKED,
    "curvature._staleness._look": OWN,
    "graph._source._with_reruns": "a context variable",
    "graph._growth._serial": ONE_STEP,
    "graph._record._serial": ONE_STEP,
    "graph._names._is_torchs": CACHE,
    "graph._saved._FREED": GROWS,
    "graph._saved.answers": CACHE,
    "graph._saved.works": CACHE,
    "graph._saved._LAYOUTS": GROWS,
    "graph._names.USERS": GROWS,
    "graph._source._joined": CACHE,
    "graph._source.parsed": CACHE,
    "graph._watch._recording": OWN,
    "jets._dispatch._body": CACHE,
    "jets._series.inside": OWN,
    "sparse._tracer._open": OWN,
    "sparse._tracer._watched": LOCKED,
    "sparse._tracer.decompositions": CACHE,
}
"""Every module's state. (That of objects: see `GraphCache`, `LinearOperator._taken`, `ThreadClaim`, `LiveBytes`.)"""

_MADE = {"RLock", "Lock", "Condition", "Counted", "count", "deque", "defaultdict", "Counter", "ContextVar", "set",
         "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}  # fmt: skip


_CHANGE = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def _state_of(module: ast.Module) -> Iterator[str]:
    kinds = [kind for kind in ast.walk(module) if isinstance(kind, ast.ClassDef)]
    bases = {kind.name: {ast.unparse(base).partition("[")[0] for base in kind.bases} for kind in kinds}
    local = {name for name in bases if bases[name] & {"threading.local", "dict"}}
    values: dict[str, ast.expr | None] = {}
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    for name, value in values.items():
        if _changes(value, name.lstrip("_").isupper() or name == "__all__", local):
            yield name
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names
        if isinstance(node, ast.FunctionDef):
            names = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
            if names & {"cache", "lru_cache", "cached_property"}:
                yield node.name
            yield from values.keys() & _changed_in(node)


def _changed_in(function: ast.FunctionDef) -> set[str]:
    """The names of containers that a function changes, whatever their spelling says."""
    return {
        ast.unparse(node.value).partition("[")[0]
        for node in ast.walk(function)
        if (isinstance(node, ast.Attribute) and node.attr in _CHANGE)
        or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load))
    }


def _changes(value: ast.expr | None, constant: bool, local: set[str]) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        filled = bool(value.keys if isinstance(value, ast.Dict) else value.elts)
        return not (filled and constant)
    if isinstance(value, (ast.DictComp, ast.ListComp, ast.SetComp)):
        return not constant
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    contents = value.args[name == "defaultdict" :]
    return name in local or (name in _MADE and not (constant and contents))


def test_all_that_can_change_has_a_discipline() -> None:
    found = {
        f"{module_name(path)}.{name}".removeprefix("hodiff.")
        for path in library_files()
        for name in _state_of(tree(path))
    }
    found = {
        name for name in found if not name.startswith(("graph._case.", "graph._names.at"))
    }  # of one case, made and read in a call
    assert found == set(DISCIPLINE), "say in DISCIPLINE what keeps threads apart there"


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
