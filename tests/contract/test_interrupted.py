"""Ctrl-C at any moment leaves nothing behind: no switch, no loan, no lock, no leaf of ours; and the next call is right.

The suite interrupts each public name at a few moments, and each context of the library wherever it begins and ends;
`--slow` does all at every moment. `python -m tests.abuse.signals` sends real signals.

What Python gives no place to prevent: an interrupt between a `with` block and `__exit__` finds nothing of ours running.
The state is then put back when the context is forgotten, which is when the interrupt's traceback is; see
`test_forgotten`.
"""

import ast
import contextlib
import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _kernels, _lazy, _settings
from hodiff._core._where import Where
from hodiff.cli._explain import Warnings
from hodiff.curvature._process_group import ProcessGroupSum
from hodiff.graph import _source
from tests.meta.source import ROOT, library_files, tree
from tests.support.audit import taken_locks, unchanged
from tests.support.callers import CALLERS, SCALE, direction, generator, tensors
from tests.support.everything import ALONE, WITH_MODULES, of_module, with_a_module
from tests.support.interrupts import Interrupter, Kind, Seen, Stack
from tests.support.processes import group_of_one
from tests.support.releases import CHECKPOINTS, STEPS
from tests.support.scene import Model, X

pytestmark = [
    pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning"),
    # an interrupt in a finaliser, or in a generator that is thrown away, is printed by Python and lost
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Call = Callable[[Model], Any]
CALLS: dict[str, Call] = {
    **{f"{c}, module in f": lambda m, c=c: c.run(c.shaped(m), X, ()) for c in CALLERS},
    **{f"{c}, module as point": lambda m, c=c: with_a_module(c, m, of_module(c)) for c in WITH_MODULES},
    **{name: lambda m, call=call: call(X) for name, call in ALONE.items()},
}


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


@pytest.mark.drawn(45)
@pytest.mark.parametrize("name", CALLS)
def test_at_some_moments(name: str) -> None:
    interrupt(CALLS[name], 4)


@pytest.mark.parametrize("name", ["hvp, module as point", "laplacian, module in f", "jvp, module in f"])
def test_at_more_moments(name: str) -> None:
    interrupt(CALLS[name], 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calls", "contexts", "lines"])
@pytest.mark.parametrize("name", CALLS)
def test_at_every_moment(name: str, kind: Kind) -> None:
    interrupt(CALLS[name], None, kind)


# --- each context ---------------------------------------------------------------------------------------------------


def _cube(z: Any) -> torch.Tensor:
    return (z**3).sum()


def _with_data(f: Callable[..., Any] = _cube, **options: Any) -> Any:
    return hodiff.HessianOperator(lambda z, batch: (f(z), 1), X, data=[()], **options) @ direction(X)


def _closed(_: Model) -> Any:
    with hodiff.HessianOperator(_cube, X) as H:
        return H @ direction(X)


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
def group() -> Iterator[None]:
    with group_of_one():
        yield


def _shared(_: Model) -> torch.Tensor:
    group_sum = ProcessGroupSum(dist.group.WORLD, Where(X), "HessianOperator", "auto")
    with group_sum.raise_on_all_ranks():
        return group_sum.sum("multiplies", [X])[0][0].clone()


def _entered(context: Callable[[], Any]) -> Call:
    def run(_: Model) -> None:
        with context():
            pass

    return run


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
    "_core/_locks.py: ThreadClaim": CALLS["NewtonCG"],
    "_core/_graph.py: OutputGraph": CALLS["hvp, module as point"],
    "_core/_hooks.py: Counted(_watch_hooks)": CALLS["hvp, module as point"],
    "_core/_kernels.py: Counted(_plain_attention)": _entered(lambda: _settings.Scope(_kernels.plain_attention.enter)),
    "_core/_hooks.py: Counted(_watch_checkpoints)": _entered(hodiff.twice_differentiable),
    "_core/_kernels.py: Scope(include)": _repeated,
    "_core/_lazy.py: Scope(_without_collections)": _entered(_lazy.uncollected),
    "memory/_attention.py: Scope(_by_products)": _plain,
    "memory/__init__.py: Scope(_enter)": _entered(hodiff.twice_differentiable),
    "memory/_blocks.py: Counted(_watch)": _in_blocks,
    "memory/_blocks.py: Scope(_level)": _in_blocks,
    "memory/_blocks.py: Scope(partial(_within, None))": _in_blocks,
    "memory/_blocks.py: Scope(partial(_within, _INSIDE))": _in_blocks,
    "memory/_blocks.py: Scope(self._enter)": _in_blocks,
    "_core/_hooks.py: Counted(_watch_modules)": CALLS["hvp, module in f"],
    "_core/_lending.py: EvaluationContext": _under(torch.inference_mode, CALLS["hvp, module as point"]),
    "_core/_settings.py: Scope(enter)": _under(_bfloat16, lambda _: _with_data(memory_budget=0)),
    "_core/_settings.py: Scope(partial(push_calls, mode))": _of_inference,
    "_core/_settings.py: Scope(partial(_push_operations, mode))": CALLS["sparse_hessian, module in f"],
    "_core/_settings.py: Counted(_keep_flags)": CALLS["sparse_hessian, module in f"],
    "_core/_settings.py: Counted(_eager)": _eager,
    "_core/_settings.py: Counted(_no_cudnn)": _entered(lambda: _settings.Scope(_settings.no_cudnn.enter)),
    "_core/_settings.py: Scope": _inspected,
    "cli/_explain.py: Warnings": _entered(Warnings),
    "curvature/_data_operator.py: DataOperator": _closed,
    "curvature/_newton.py: Scope(_second_derivatives)": CALLS["NewtonCG"],
    "curvature/_process_group.py: _exchanging": _shared,
    "curvature/_process_group.py: raise_on_all_ranks": _shared,
    "curvature/_data.py: told_what_it_got": CALLS["GaussNewtonOperator, module in f"],
    "curvature/_staleness.py: one_look": lambda _: hodiff.HessianOperator(_cube, X).dense(),
    "curvature/_probes.py: EstimatorProgress": CALLS["trace"],
    "_core/_lending.py: Scope(resume)": _swapped,
    "_core/_graph.py: Watched": CALLS["laplacian, reverse, module in f"],
    "graph/_source.py: Scope(_count_reruns)": _entered(_source.reruns),
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
    "verify/_evaluation.py: altered": _checked(_hooked),
    "verify/_blame.py: _watched": _checked(lambda z: _Wrong.apply(z).sum()),
    "verify/_trace.py: _Counting": _checked(_cube),
}  # fmt: skip
"""Each context of the library, by a call that enters it."""

NEW = {_in_blocks: CHECKPOINTS, _OF_STEPS: STEPS, _frozen: STEPS}
NAMES = [pytest.param(name, marks=NEW.get(call, ())) for name, call in ENTERED.items()]


def contexts() -> dict[str, tuple[str, list[str]]]:
    """Each context in the source: its file, and the names of functions one of which runs where it is entered."""
    found: dict[str, tuple[str, list[str]]] = {}
    for path in library_files():
        file = str(path.relative_to(ROOT / "src" / "hodiff"))
        for node in ast.walk(tree(path)):
            match node:
                case ast.ClassDef(name=name, body=body) if any(getattr(n, "name", "") == "__enter__" for n in body):
                    found[f"{file}: {name}"] = file, [f"{name}.__enter__"]
                case ast.FunctionDef(name=name, decorator_list=marks) if any(
                    "contextmanager" in ast.unparse(mark) for mark in marks
                ):
                    found[f"{file}: {name}"] = file, [name]
                case ast.Call(
                    func=ast.Name(id="Scope" | "Counted" as kind) | ast.Attribute(attr="Scope" as kind), args=[argument]
                ):
                    made = re.findall(r"\w+", ast.unparse(argument))
                    found[f"{file}: {kind}({ast.unparse(argument)})"] = file, made
    return found


def test_no_context_is_forgotten() -> None:
    assert set(ENTERED) == set(contexts())


@pytest.mark.parametrize("name", NAMES)
def test_the_call_enters_it(name: str) -> None:
    file, functions = contexts()[name]
    seen = Seen(lambda: ENTERED[name](Model())).names(file)
    assert any(each == function or each.endswith(f".{function}") for each in seen for function in functions), seen


WITHOUT_LINES = "cli/_explain.py: Warnings"  # of `hodiff explain`, whose process ends with the interrupt


@pytest.mark.parametrize("kind", ["contexts", "lines"])
@pytest.mark.parametrize("name", [each for each in NAMES if each.values != (WITHOUT_LINES,)])
def test_each_context(name: str, kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupt(ENTERED[name], 4, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["calls", "contexts", "lines"])
@pytest.mark.parametrize("name", [each for each in NAMES if each.values != (WITHOUT_LINES,)])
def test_each_context_at_every_moment(name: str, kind: Kind) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupt(ENTERED[name], None, kind)


def _least_squares(w: list[torch.Tensor]) -> Callable[[], Any]:
    return hodiff.LevenbergMarquardt(lambda w: torch.cat(w) ** 2 - 30, w, momentum=0.1).step


def _newton(w: list[torch.Tensor]) -> Callable[[], Any]:
    optimizer = hodiff.NewtonCG(w)
    return lambda: optimizer.step(lambda: (torch.cat(w) ** 2 - 30).square().sum())


@pytest.mark.parametrize("optimizer", [_least_squares, _newton])
def test_no_step_is_half_taken(optimizer: Callable[[list[torch.Tensor]], Callable[[], Any]]) -> None:
    """At any moment of its end all parameters are as they were, or all are the new ones."""
    start = lambda: [torch.full((2,), 5.0 + k, dtype=torch.float64, requires_grad=True) for k in range(3)]
    optimizer(start())()  # what only a first call does
    after, count = start(), Interrupter()
    count(optimizer(after))
    taking = [bool({"_take", "_taken"} & {code.co_name for code, _ in stack[1:]}) for stack in count.stacks]
    ends = [at for at, inside in enumerate(taking, 1) if inside]
    assert ends and not any(map(torch.equal, start(), after))
    for at in ends:
        w = start()
        with contextlib.suppress(KeyboardInterrupt):
            Interrupter(at)(optimizer(w))
        assert any(all(map(torch.equal, w, whole)) for whole in (start(), after)), at


def test_forgotten() -> None:
    """Where the interrupt comes before `__exit__`, the end of the traceback is the end of the context."""
    scope = _settings.Scope(_kernels.plain_attention.enter)
    with unchanged():
        scope.__enter__()
        assert not torch.backends.cuda.flash_sdp_enabled()
        del scope


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


def test_forgotten_inside_another() -> None:
    """What an inner context found belongs to the outer one, which ends first; put back later, it would stay."""
    nested(model := Model())
    for at in moments_of(("__exit__", "close", "undo_all")):
        with unchanged(model, X), contextlib.suppress(KeyboardInterrupt):
            Interrupter(at)(lambda: nested(model))


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
