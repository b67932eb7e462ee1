"""The audit of side effects can fail: what it is there to see is done on purpose, and it says which."""

import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.contract.test_side_effects import test_a_module_in_the_function as audited
from tests.support import audit
from tests.support.audit import Stream, left_behind, strangers, unchanged
from tests.support.callers import Caller
from tests.support.scene import Model, X

Undo = Callable[[], Any] | None
HOOKS = nn.modules.module


def _nothing(*_: Any) -> None:
    """A hook."""


def _put(owner: Any, name: str, value: Any) -> Undo:
    setattr(owner, name, value)


def _kept(model: Model, x: Tensor) -> Undo:
    """In the first container of the library's modules."""
    container = next(value for value in audit._own().values() if isinstance(value, dict))
    container["left"] = x
    return lambda: container.pop("left")


def _ignoring(model: Model, x: Tensor) -> Undo:
    warnings.simplefilter("ignore")
    return lambda: warnings.filters.pop(0)  # pyright: ignore[reportAttributeAccessIssue]


FAULTS: dict[str, tuple[Callable[[Model, Tensor], Any], Undo, str]] = {
    "a hook on a module": (lambda m, x: m.table.register_forward_hook(_nothing), None, "/0/table/.*_forward_hooks"),
    "a hook on a parameter": (lambda m, x: m.scale.register_hook(_nothing), None, "parameter scale.*hooks"),
    "a hook on a module that another one holds": (
        lambda m, x: m.table.drop.register_full_backward_hook(_nothing), None, "/0/table.drop/.*_backward_hooks",
    ),
    "a buffer that moved": (lambda m, x: m.table.norm.running_mean.add_(1), None, "buffer table.norm.running_mean"),
    "a buffer written to, by its own value": (
        lambda m, x: m.table.data.copy_(m.table.data), None, "buffer table.data.*version",
    ),
    "a buffer exchanged for its equal": (
        lambda m, x: _put(m.table, "data", m.table.data.clone()), None, "table/attributes/_buffers/data",
    ),
    "a parameter through .data": (lambda m, x: m.scale.data.mul_(2), None, "parameter scale.*value"),
    "a parameter in other memory": (
        lambda m, x: _put(m.scale, "data", m.scale.data.clone()), None, "parameter scale.*memory",
    ),
    "a .grad where none was": (lambda m, x: _put(x, "grad", torch.ones_like(x)), None, r"/1/grad\[0\]: None became"),
    "a .grad that grew": (lambda m, x: m.scale.grad.add_(1), None, r"parameter scale.*grad\[1\]"),
    "a frozen parameter set free": (
        lambda m, x: m.table.frozen.requires_grad_(), None, r"parameter table.frozen.*graph\[0\]: False became True",
    ),
    "another mode": (lambda m, x: m.table.drop.eval(), None, "table.drop/attributes/training: True became False"),
    "an attribute of a module": (lambda m, x: _put(m.table, "kept", 1), None, "/0/table/attributes/kept"),
    "an attribute of a tensor": (lambda m, x: _put(x, "mark", 1), None, "/1/attributes/mark"),
    "another class": (lambda m, x: _put(m.table.drop, "__class__", nn.Identity), None, "table.drop/class"),
    "a draw": (lambda m, x: torch.rand(()), None, "random state"),
    "a hook on all modules": (
        lambda m, x: HOOKS.register_module_forward_pre_hook(_nothing).remove, None, "hooks of all modules",
    ),
    "attention": (
        lambda m, x: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True), "attention",
    ),
    "grad mode": (
        lambda m, x: torch._C._set_grad_enabled(False), lambda: torch._C._set_grad_enabled(True), "process/grad",
    ),
    "determinism": (
        lambda m, x: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False),
        "deterministic",
    ),
    "the collector": (lambda m, x: gc.disable(), gc.enable, "interpreter"),
    "how deep Python goes": (
        lambda m, x: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
        lambda: sys.setrecursionlimit(sys.getrecursionlimit() - 1), "interpreter",
    ),
    "a filter of warnings": (_ignoring, None, "filters of warnings"),
    "a tensor in a module of the library": (_kept, None, "hodiff's own"),
}  # fmt: skip
"""What is done, how it is undone where it is not the model's (or what the deed itself gives), what the audit says."""


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_changed_is_named(name: str) -> None:
    model, x = Model(), X.clone()
    deed, undo, words = FAULTS[name]
    try:
        with pytest.raises(AssertionError, match=words), unchanged(model, x, random=True):
            given = deed(model, x)
            undo = undo or (given if callable(given) and not isinstance(given, nn.Module) else None)
    finally:
        (undo or _nothing)()
    with unchanged(model, x, random=True):
        pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_numbers_that_f_did_not_draw(when: str) -> None:
    """Also where `f` draws too."""
    stream = Stream()
    f = stream.watched(lambda: torch.rand(3))
    f()
    torch.rand(1)
    if when == "before":
        f()
    with pytest.raises(AssertionError, match="1 of 2 calls of f began" if when == "before" else "the last state"):
        stream.check()


def test_a_state_that_is_set_back_to_where_f_left_it_is_none_of_these() -> None:
    stream = Stream()
    f = stream.watched(lambda: torch.rand(3))
    f()
    state = torch.get_rng_state()
    torch.rand(1)
    torch.set_rng_state(state)
    f()
    stream.check()


def test_memory_that_is_kept() -> None:
    kept: list[Any] = []

    def keeps() -> Tensor:
        kept.append(torch.ones(100))
        return torch.ones(2)

    def cycle() -> Tensor:
        ring: list[Any] = [torch.ones(100)]
        ring.append(ring)
        return torch.ones(2)

    for call in keeps, cycle:
        besides, after, makers = left_behind(call)
        assert (besides, after) == (400, 400) and makers
    assert left_behind(lambda: torch.ones(2))[:2] == (0, 0)


def test_a_public_name_that_draws() -> None:
    """By the same test that goes over all of them."""
    careless = Caller("grad", "scalar", 1, lambda f, x, args: (hodiff.grad(f, x), torch.rand(()))[0])
    with pytest.raises(AssertionError, match="none that f left"):
        audited(careless)


def test_what_is_remembered_has_the_name_that_it_has() -> None:
    """The audit of a later call in one process would not see it."""
    assert not strangers()
