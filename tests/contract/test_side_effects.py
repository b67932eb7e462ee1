"""Promise 4, audited: every public name is called once, and nothing of the user's, or of the process, is changed.

What is where: `tests/support/audit.py` says what is compared, `tests/support/scene.py` has a module with all that can
be disturbed, `tests/support/callers.py` how each name is called. Abuses of `f` (in place, state kept, exceptions) have
their rows in `test_road.py`; what single networks leave behind is in `test_graph_rule.py` and `tests/unit`; calls that
are interrupted or share a module between threads are in `test_interrupted.py` and `test_threads.py`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

import hodiff
from hodiff._core import _settings
from tests.support.audit import Stream, left_behind, unchanged
from tests.support.callers import CALLERS, SCALE, Caller, public, tensors
from tests.support.everything import ALONE, CALLED_WITH_A_MODULE, WITH_MODULES, of_module, with_a_module
from tests.support.scene import Model, X


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The switch of compiled code loads what it needs at its first use: a test that runs alone would see that."""
    undo: list[Any] = []
    _settings.eager.enter(undo)
    _settings.undo_all(undo)


pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


MODES: dict[str, tuple[Callable[[], Any], ...]] = {
    "no_grad, autocast, deterministic": (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16), _deterministic),
    "inference mode, anomaly, float64": (
        torch.inference_mode, lambda: torch.autograd.detect_anomaly(check_nan=False), _double_by_default,
    ),
}  # fmt: skip
"""Modes that a call has to leave for its own time, together: each is looked at by itself afterwards."""


# --- the rows --------------------------------------------------------------------------------------------------------


@pytest.mark.names
def test_every_public_name_has_a_row() -> None:
    """A new name says how it is called, here or in tests/support/callers.py."""
    rows = {caller.name.partition(",")[0] for caller in CALLERS} | set(ALONE)
    assert not public() - rows, "give these a row, in tests/support/everything.py or tests/support/callers.py"
    assert not rows - public(), "these are no longer public"
    assert {c.name for c in WITH_MODULES} >= set(CALLED_WITH_A_MODULE)


@pytest.mark.table()
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_module_in_the_function(caller: Caller) -> None:
    model, x = Model(), X.clone().requires_grad_()
    x.grad = torch.ones_like(x)
    stream = Stream()
    f = stream.watched(caller.shaped(model))
    with unchanged(model, x, X, SCALE):
        result = caller.run(f, x, ())
    stream.check()
    assert not model.fired
    del result


@pytest.mark.table()
@pytest.mark.parametrize("caller", WITH_MODULES, ids=repr)
def test_a_module_as_the_point(caller: Caller) -> None:
    model = Model()
    stream = Stream()
    f = stream.watched(of_module(caller))
    with unchanged(model, X, SCALE):
        result = with_a_module(caller, model, f)
    if not caller.name.startswith("implicit."):
        stream.check()
    assert not model.fired
    del result


@pytest.mark.table()
@pytest.mark.parametrize("name", sorted(ALONE))
def test_without_a_function(name: str) -> None:
    x = X.clone()
    if name == "compile_step":  # Dynamo's first compilation in a process leaves a hook of its own
        ALONE[name](x)
    with unchanged(x, X, SCALE, random=True), torch.random.fork_rng(enabled="elect" in name):  # it makes its module
        ALONE[name](x)


@pytest.mark.table()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_under_the_modes_of_the_caller(caller: Caller, mode: str) -> None:
    """They are what they were after a call that had to leave them for its own time."""
    model = Model()
    with warnings.catch_warnings(), ExitStack() as modes:
        warnings.simplefilter("ignore")
        for enter in MODES[mode]:
            modes.enter_context(enter())
        with unchanged(model, X):
            caller.run(caller.shaped(model), X, ())


@pytest.mark.table()
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_live_bytes(caller: Caller) -> None:
    """None besides the result; none at all when that is dropped, before any collector runs."""
    model = Model()
    besides, after, makers = left_behind(lambda: caller(model, X))
    assert (besides, after) == (0, 0), makers


@pytest.mark.table()
@pytest.mark.parametrize("caller", WITH_MODULES, ids=repr)
def test_live_bytes_with_a_module_as_the_point(caller: Caller) -> None:
    model = Model()
    besides, after, makers = left_behind(lambda: tensors(with_a_module(caller, model, of_module(caller))))
    assert (besides, after) == (0, 0), makers


@pytest.mark.table()
@pytest.mark.parametrize("name", sorted(ALONE))
def test_live_bytes_without_a_function(name: str) -> None:
    ALONE[name](X)  # figures are drawn by a library that keeps something when it is first used
    besides, after, makers = left_behind(lambda: tensors(ALONE[name](X)))
    assert (besides, after) == (0, 0), makers


def test_a_function_that_edits_its_argument_leaves_it() -> None:
    edits = lambda x: (x.mul_(2) ** 3).sum()
    x, before = X.clone(), X.clone()
    for call in (lambda: hodiff.grad(edits, x), lambda: hodiff.hvp(edits, x, X), lambda: hodiff.jacobian(edits, x)):
        with pytest.raises(RuntimeError, match=r"(?is)in[- ]place.*clone\(\)"):  # f's own error, with a note
            call()
        assert torch.equal(x, before)
