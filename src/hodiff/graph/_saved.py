"""Every underscored or undocumented attribute of PyTorch that hodiff.graph reads, and nothing else.

The states of a saved tensor, and how each is told without running a hook or changing anything
(`raw` is a node's `_raw_saved_x`, a reference into the node that must not outlive it):

* `raw.unpack_hook` is set: *packed* (a checkpoint, `save_on_cpu`, the user's hooks); never unpacked here.
* `raw.data` is a tensor: *alive*; or *stale*, if reading `_saved_x` finds that its version moved.
* no data, no hook: `raw.unpack()` can run nothing. It gives None (*none*: nothing was to be saved), or
  raises what the engine would raise (*freed*).

`works()` tries all of this once on a small graph in a thread of its own, where no mode or hook of the
caller is on. If a future PyTorch answers differently, every state becomes *unknown*; none becomes wrong.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hodiff._core._nodes import Node
from hodiff.errors import GraphError

ALIVE, STALE, FREED, PACKED, RELEASED, NONE, UNKNOWN = (
    "alive",
    "stale",
    "freed",
    "packed",
    "released",
    "none",
    "unknown",
)

FREED_TEXT = "a second time"
STALE_TEXT = "modified by an inplace operation"
ENGINE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The code that runs a pass: what a traceback has below it ran while the pass did. None: it cannot be told."""

_BUILTIN = re.compile(r".*Backward\d*$")
_EMPTY = frozenset({"AccumulateGrad", "CopyBackwards", "UndefinedGradBackward", "GraphRoot", "Identity"})
_RAISING = frozenset({"Error", "DelayedError", "NotImplemented"})


class Slot(NamedTuple):
    """One saved tensor of a node. Do not keep `value`: it is the saved tensor itself."""

    name: str
    state: str
    value: Tensor | None


class _Plan(NamedTuple):
    """How to read the nodes of one class."""

    names: tuple[tuple[str, str, str], ...]  # (x, _raw_saved_x, _saved_x)
    function: bool
    opaque: bool


@cache
def _plan(kind: type) -> _Plan:
    if issubclass(kind, BackwardCFunction):
        return _Plan((), True, False)
    names = tuple(
        (name.removeprefix("_raw_saved_"), name, name.removeprefix("_raw"))
        for name in dir(kind)
        if name.startswith("_raw_saved_")
    )
    opaque = not names and not _BUILTIN.fullmatch(kind.__name__) and kind.__name__ not in _EMPTY | _RAISING
    return _Plan(names, False, opaque)


def is_function(node: Node) -> bool:
    """Whether the node is a Python `autograd.Function`, of which only its backward knows what it needs."""
    return issubclass(type(node), BackwardCFunction)


def is_raising(node: Node) -> bool:
    """Whether the node stands for a derivative that does not exist."""
    return type(node).__name__ in _RAISING


def slots(node: Node) -> list[Slot]:
    """The saved tensors of a node with their states. Runs no hook."""
    names, function, opaque = _plan(type(node))
    if not works():
        return [Slot("?", UNKNOWN, None)] if names or function or opaque else []
    if function:
        return _function_slots(node)
    if opaque:
        return [Slot("?", UNKNOWN, None)]
    return _builtin_slots(node, names)


def states(node: Node) -> list[str]:
    """The states of a node's saved tensors; once one was freed, all were, and the others are not looked at."""
    names, function, opaque = _plan(type(node))
    if function or opaque or not works():
        return [slot.state for slot in slots(node)]
    found: list[str] = []
    for each in names:
        found += [slot[1] for slot in _builtin_slots(node, (each,))]
        if found and found[-1] is FREED:
            break
    return found


_FREED: set[tuple[Any, ...]] = set()
"""Nodes that were found freed: their class, and which of their inputs wanted a gradient, which says what they save."""


def is_freed_like_others(node: Node) -> bool:
    """Whether nothing that a node saved is there any more, as of a node of its kind that was found freed.

    To be told by PyTorch that a tensor was freed is to catch its exception, at some 30 µs; to be told so of each
    node of a large graph takes seconds. What a node saves depends on its class and on which of its inputs want a
    gradient: if one such was freed, another with nothing left is. For sentences; a verdict asks (`states`).
    """
    names = _plan(type(node)).names
    if not names:
        return False
    try:
        for _, raw_name, _ in names:
            raw = getattr(node, raw_name)
            if raw.unpack_hook is not None or raw.data is not None:
                return False
    except (RuntimeError, AttributeError):  # a list, or a nested tensor
        return False
    kind = (node.__class__, *[child is None for child, _ in node.next_functions])
    if kind in _FREED:
        return True
    if FREED in states(node):
        _FREED.add(kind)
        return True
    return False


def _builtin_slots(node: Node, names: Iterable[tuple[str, str, str]]) -> list[Slot]:
    found: list[Slot] = []
    for name, raw_name, value_name in names:
        # Most slots are alive, and are read without a further call. A list has no `unpack_hook`.
        try:
            raw = getattr(node, raw_name)
            if raw.unpack_hook is None:
                value = raw.data
                if value is not None:
                    getattr(node, value_name)  # raises if stale
                    found.append(_slot(Slot, (name, ALIVE, value)))
                    continue
        except (RuntimeError, AttributeError):
            pass
        found += _one_slot(node, name, raw_name, value_name)
    return found


_slot = tuple.__new__
"""Makes a named tuple at a third of the cost; `inspect` and `predict` make one for each saved tensor."""


def _one_slot(node: Node, name: str, raw_name: str, value_name: str) -> list[Slot]:
    """The slot of this name, whatever its state; several, if it is a list."""
    try:
        raw = getattr(node, raw_name)
    except RuntimeError as error:  # the getter of a list raises by itself
        return [Slot(name, FREED if FREED_TEXT in str(error) else UNKNOWN, None)]
    if isinstance(raw, tuple):
        several = [_state(part) for part in raw]
        if any(state == ALIVE for state, _ in several) and not any(state == PACKED for state, _ in several):
            several = [(_check(node, value_name, state), value) for state, value in several]
        return [Slot(f"{name}[{index}]", *pair) for index, pair in enumerate(several)]
    state, value = _state(raw)
    if state == ALIVE:
        state = _check(node, value_name, state)
    return [Slot(name, state, value)]


def _state(raw: Any) -> tuple[str, Tensor | None]:
    hook = raw.unpack_hook
    if hook is not None:
        return (RELEASED if hook is _raise_released else _packed(hook)), None
    try:
        value = raw.data
    except RuntimeError:  # a strided nested tensor
        return UNKNOWN, None
    if value is not None:
        return ALIVE, value
    try:
        raw.unpack()
    except RuntimeError as error:
        return (FREED if FREED_TEXT in str(error) else UNKNOWN), None
    return NONE, None


def _packed(hook: Any) -> str:
    """Packed; but stale, where it is a checkpoint whose own saved input was changed in place."""
    if getattr(hook, "__module__", "") != "torch.utils.checkpoint":
        return PACKED
    names = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    cells: dict[str, Any] = dict(zip(names, getattr(hook, "__closure__", None) or (), strict=False))
    try:
        frame = cells["frame"].cell_contents
    except (KeyError, ValueError):
        return UNKNOWN
    arguments = getattr(frame, "saved_args", None)
    if arguments is not None:
        states = {_unpacked(raw) for raw in arguments if hasattr(raw, "unpack_hook")}
    else:  # until torch 2.12 or so: a node that saves them
        saver = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
        states = {slot.state for slot in _function_slots(saver)} if saver is not None else {UNKNOWN}
    return STALE if STALE in states else UNKNOWN if UNKNOWN in states else PACKED


def _unpacked(raw: Any) -> str:
    """The state of a saved value that belongs to no node."""
    state, _ = _state(raw)
    if state == ALIVE:
        try:
            raw.unpack()
        except RuntimeError as error:
            return STALE if STALE_TEXT in str(error) else UNKNOWN
    return state


def _check(node: Node, name: str, state: str) -> str:
    """`state`, if it is not alive or the value can be read; reading compares version counters."""
    if state != ALIVE:
        return state
    try:
        getattr(node, name)
    except RuntimeError as error:
        return STALE if STALE_TEXT in str(error) else UNKNOWN
    return ALIVE


def _function_slots(node: Node) -> list[Slot]:
    try:
        raws = node._raw_saved_tensors or ()
    except RuntimeError as error:
        return [Slot("tensors", FREED if FREED_TEXT in str(error) else UNKNOWN, None)]
    except AttributeError:
        return [Slot("tensors", UNKNOWN, None)]
    found = [Slot(f"tensors[{index}]", *_state(raw)) for index, raw in enumerate(raws)]
    if not any(slot.state == ALIVE for slot in found) or any(slot.state in (PACKED, RELEASED) for slot in found):
        return found
    if _check(node, "saved_tensors", ALIVE) == ALIVE:
        return found
    return [slot._replace(state=STALE) if slot.state == ALIVE else slot for slot in found]


def release(node: Node) -> int:
    """Drop the saved tensors of a node; a later use raises `RELEASED_TEXT`. Returns how many were dropped."""
    return _release(node) if works() else 0


def _release(node: Node) -> int:
    plan = _plan(type(node))
    dropped = 0
    for name in ("_raw_saved_tensors",) if plan.function else (raw_name for _, raw_name, _ in plan.names):
        try:
            raws = getattr(node, name)
        except (RuntimeError, AttributeError):  # freed already
            continue
        for raw in raws if isinstance(raws, tuple) else (raws,) if raws is not None else ():
            if _state(raw)[0] in (ALIVE, STALE):  # a packed one has its hooks, and takes no second pair
                raw.register_hooks(_forget, _raise_released)
                dropped += 1
    return dropped


RELEASED_TEXT = (
    "this part of the graph was released: by hodiff.graph.release, or by hodiff.multi_grad(..., release=True). "
    "Compute the tensor again, or release later."
)


def _forget(tensor: Tensor) -> None:
    """Pack: nothing."""


def _raise_released(nothing: None) -> Tensor:
    raise GraphError.about(RELEASED_TEXT, kind="released")


def leaf(node: Node) -> Tensor | None:
    """The leaf tensor into whose `.grad` the node accumulates; None for other nodes."""
    return getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None


def leaf_of(value: Tensor) -> Tensor | None:
    """The trainable leaf whose memory a tensor is: itself, or the one that it is a view of."""
    base = value if value.is_leaf and value.requires_grad else value._base
    return base if base is not None and base.is_leaf and base.requires_grad else None


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._base is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run around a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def version(tensor: Tensor) -> int:
    """How often the tensor was changed in place; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def shape(node: Node) -> tuple[int, ...] | None:
    """The shape of the node's (first) output; None where it is not told."""
    try:
        return tuple(node._input_metadata[0].shape)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def sequence(node: Node) -> int:
    """The node's place in the order of creation within its thread; leaves come last of all."""
    return node._sequence_nr()


counter: Callable[[], int] = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The place that this thread's next node will get."""


def storage(tensor: Tensor) -> tuple[int, int]:
    """An identity for the memory under a tensor, and its size in bytes."""
    try:
        memory = tensor.untyped_storage()
        return memory._cdata, _bytes(memory)
    except (RuntimeError, NotImplementedError):  # sparse, nested and the like: parts of its own
        return id(tensor), 0


def memory(tensor: Tensor) -> int:
    """An identity for the memory under a tensor."""
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _bytes(memory: torch.UntypedStorage) -> int:
    """The bytes that a storage takes: none, if it only says how many it would."""
    return 0 if memory.device.type == "meta" else memory.nbytes()


def measure(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """A tensor's shape, empty for a nested tensor, which has none; and what `storage` says."""
    try:
        memory = tensor.untyped_storage()
        return tuple(tensor.shape), memory._cdata, _bytes(memory)
    except (RuntimeError, NotImplementedError):
        nested = tensor.is_nested and tensor.layout is torch.strided
        return () if nested else tuple(tensor.shape), *storage(tensor)


def held_by_python(slot: Slot, times: int = 1) -> bool:
    """Whether Python holds that very tensor, besides `times` slots that hold it now."""
    return sys.getrefcount(slot.value) > _baseline() + times


@contextmanager
def without_modes() -> Iterator[None]:
    """A context in which reading a tensor's attributes calls no mode and no subclass, and meets no inference mode."""
    inside = torch.is_inference_mode_enabled()
    with torch._C.DisableTorchFunction(), torch.inference_mode(False) if inside else nullcontext():
        yield


@cache
def _baseline() -> int:
    """The references, besides those of slots, that are seen of a tensor that only a graph holds."""
    return _tests()[1]


@cache
def works() -> bool:
    """Whether this PyTorch answers as this module expects."""
    return _tests()[0]


@cache
def sequences_work() -> bool:
    """Whether nodes and the thread's counter agree on the order of creation."""
    return _tests()[2]


@cache
def _tests() -> tuple[bool, int, bool]:
    answer: list[tuple[bool, int, bool]] = []

    def run() -> None:
        try:
            states = _test_states()
            answer.append((states, _test_references() if states else 0, _test_sequence()))
        except Exception:  # whatever is different, it is not what we know
            answer.append((False, 0, False))

    thread = threading.Thread(target=run, name="hodiff self-test")
    thread.start()
    thread.join()
    return answer[0]


def _states(node: Node) -> dict[str, str]:
    return {slot.name: slot.state for slot in _builtin_slots(node, _plan(type(node)).names)}


def _test_states() -> bool:
    """A graph of each state, with the answer that it must give."""

    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.ones(3).requires_grad_()
        y = x * torch.full((3,), 2.0)
        return x, y, (y * y).sum()

    x, y, loss = fresh()
    if _states(y.grad_fn) != {"self": NONE, "other": ALIVE}:
        return False
    product = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    if _states(product) != {"self": ALIVE, "other": ALIVE} or leaf(y.grad_fn.next_functions[0][0]) is not x:  # type: ignore[union-attr]
        return False
    with torch.no_grad():
        y.add_(1)
    if _states(product) != {"self": STALE, "other": STALE}:
        return False
    x, y, loss = fresh()
    loss.backward()
    if _states(y.grad_fn)["other"] != FREED or _states(y.grad_fn)["self"] not in (NONE, FREED):
        return False
    ran: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: ran.append(1) or t):
        x, y, loss = fresh()
    if _states(y.grad_fn)["other"] != PACKED or ran:
        return False
    x, y, loss = fresh()
    return _release(y.grad_fn) == 1 and _states(y.grad_fn)["other"] == RELEASED


def _test_references() -> int:
    product = (torch.ones(3).requires_grad_() * 2.0).exp().grad_fn
    (name, raw_name, _), *_ = _plan(type(product)).names
    slot = Slot(name, *_state(getattr(product, raw_name)))
    return sys.getrefcount(slot.value) - 1


def _test_sequence() -> bool:
    before = counter()
    y = torch.ones(3).requires_grad_() * 2.0
    return y.grad_fn is not None and counter() == before + 1 and sequence(y.grad_fn) == before


def tags(node: Node) -> dict[str, Any]:
    """The node's own dict, which lives as long as the node and is empty until someone writes to it."""
    return node.metadata


def children(node: Node) -> Iterator[Node]:
    """The nodes that a reverse pass runs after this one."""
    return (child for child, _ in node.next_functions if child is not None)
