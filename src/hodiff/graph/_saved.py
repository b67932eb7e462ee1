"""The facts of nodes under PyTorch's private names, as far as this PyTorch answers as expected.

Every state is then *unknown*, and none becomes wrong.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.optim import optimizer as _optimizer  # type: ignore[attr-defined]

from hodiff._core import _messages, _nodes, _settings
from hodiff._core._nodes import Node
from hodiff._core._settings import Scope, Undo
from hodiff.errors import GraphError


def is_function(node: Node) -> bool:
    """Whether the node belongs to a Python `autograd.Function`."""
    return issubclass(type(node), BackwardCFunction)


function_of: Callable[[type], type] = attrgetter("_forward_cls")
"""That `autograd.Function`, of the class of a node."""


def is_raising(node: Node) -> bool:
    """Whether the node stands for a derivative that does not exist."""
    return _LAYOUTS[type(node)].raising


def slots(node: Node) -> list[SavedTensor]:
    """The saved tensors of a node with their states. Runs no hook."""
    names, opaque, _ = _LAYOUTS[node.__class__]
    if opaque or not answers().states:
        return [SavedTensor("?", UNKNOWN, None)]
    return read(node, names)


def is_whole(node: Node) -> bool:
    """Whether all that a node saved is there as it was saved, as is so of most:
    told without a record of each.
    """
    names, opaque, raising = _LAYOUTS[node.__class__]
    if not names:
        return not (opaque or raising)
    if not answers().states:
        return False
    try:
        for _, raw_name, value_name in names:
            raw = _nodes.saved(node, raw_name)
            if raw.unpack_hook is not None:
                return False
            if raw.data is None:
                raw.unpack()  # raises if freed
            else:
                getattr(node, value_name)  # raises if stale
    except (RuntimeError, AttributeError):  # or it is a list, or a nested tensor
        return False
    return True


def states(node: Node) -> list[str]:
    """The states of a node's saved tensors."""
    return [slot.state for slot in slots(node)]


_FREED: set[tuple[Any, ...]] = set()
"""Nodes that were found freed: their class, and which of their inputs wanted a gradient,
which says what they save.
"""


def is_freed_like_others(node: Node) -> bool:
    """Whether nothing that a node saved is there any more, as of a node of its kind that was found
    freed.

    To be told by PyTorch that a tensor was freed is to catch its exception, at some 30 µs; to be
    told so of each node of a large graph takes seconds. What a node saves depends on its class and
    on which of its inputs want a gradient: if one such was freed, another with nothing left is. For
    sentences; a verdict asks (`states`).
    """
    names = _LAYOUTS[node.__class__].names
    if not names or not answers().states:
        return False
    if _nodes.saved is not getattr:  # it has no data of what was changed
        return FREED in states(node)
    try:
        for _, raw_name, _ in names:
            raw = _nodes.saved(node, raw_name)
            if raw.unpack_hook is not None or raw.data is not None:
                return False
    except (RuntimeError, AttributeError):  # a list, or a nested tensor
        return False
    kind = (node.__class__, *[child is None for child, _ in node.next_functions])
    if kind not in _FREED and FREED not in states(node):
        return False
    _FREED.add(kind)
    return True


def held_by_python(slot: SavedTensor, slots: list[SavedTensor]) -> bool:
    """Whether Python holds that very tensor, besides those slots of a node that hold it now."""
    others = sys.getrefcount(slot.value) - answers().references - 1
    return others > 0 and others >= [other.value is slot.value for other in slots].count(True)


# --- saved tensors --------------------------------------------------------------------------------
# The states of a saved tensor, and how each is told without running a hook or changing anything
# (`raw` is a node's `_raw_saved_x`, a reference into the node that must not outlive it):
#
# * `raw.unpack_hook` is set: *packed* (a checkpoint, `save_on_cpu`, the user's hooks); never
# unpacked here.
# * `raw.data` is a tensor: *alive*; or *stale*, if reading `_saved_x` finds that its version moved.
# * no data, no hook: `raw.unpack()` can run nothing. It gives None (*none*: nothing was to be
# saved), or
#   raises what the engine would raise (*freed*).
#
# Whether this PyTorch answers so is not asked here, but in `_saved`, which all others read.


ALIVE = "alive"
STALE = "stale"
FREED = "freed"
PACKED = "packed"
RELEASED = "released"
NONE = "none"
UNKNOWN = "unknown"

_BUILTIN = re.compile(r".*Backward\d*$")
_EMPTY = frozenset(
    {"AccumulateGrad", "CopyBackwards", "UndefinedGradBackward", "GraphRoot", "Identity"}
)
_RAISING = frozenset({"Error", "DelayedError", "NotImplemented"})


class SavedTensor(NamedTuple):
    """One saved tensor of a node. Do not keep `value`: it is the saved tensor itself."""

    name: str
    state: str
    value: Tensor | None


_RAW = "_raw_saved_"
"""What begins the names under which nodes show what they saved, packed."""


class NodeLayout(NamedTuple):
    """The way to read the nodes of one class."""

    names: tuple[tuple[str, str, str], ...] = ()  # (x, _raw_saved_x, _saved_x)
    opaque: bool = False
    raising: bool = False


class _Layouts(dict[type, NodeLayout]):
    """The layouts by class; that of a Python Function, which may be made anew, is not kept."""

    def __missing__(self, kind: type) -> NodeLayout:
        if issubclass(kind, BackwardCFunction):
            return NodeLayout((("tensors", f"{_RAW}tensors", "saved_tensors"),))
        names = tuple(
            (name.removeprefix(_RAW), name, name.removeprefix("_raw"))
            for name in dir(kind)
            if name.startswith(_RAW)
        )
        known = bool(names) or _BUILTIN.fullmatch(kind.__name__) or kind.__name__ in _EMPTY
        raising = kind.__name__ in _RAISING
        self[kind] = NodeLayout(raising=True) if raising else NodeLayout(names, opaque=not known)
        return self[kind]


_LAYOUTS = _Layouts()


def read(node: Node, names: Iterable[tuple[str, str, str]]) -> list[SavedTensor]:
    """The saved tensors of these names."""
    slots: list[SavedTensor] = []
    for name, raw_name, value_name in names:
        # Most slots are alive, and are read without a further call. A list has no `unpack_hook`.
        try:
            raw = _nodes.saved(node, raw_name)
            if raw.unpack_hook is None:
                value = raw.data
                if value is not None:
                    getattr(node, value_name)  # raises if stale
                    slots += [_slot(SavedTensor, (name, ALIVE, value))]
                    continue
        except (RuntimeError, AttributeError):
            pass
        slots += _read_name(node, name, raw_name, value_name)
    return slots


_slot = tuple.__new__
"""Makes a named tuple at a third of the cost;
`inspect` and `predict` make one for each saved tensor.
"""


def _read_name(node: Node, name: str, raw_name: str, value_name: str) -> list[SavedTensor]:
    """The saved tensor of this name, whatever its state; several, if it is a list."""
    try:
        raw = _nodes.saved(node, raw_name)
    except RuntimeError as error:  # the getter of a list raises by itself
        return [SavedTensor(name, _refused(error), None)]
    except AttributeError:
        return [SavedTensor(name, UNKNOWN, None)]
    several = [
        state_of(part) for part in (raw if isinstance(raw, tuple) else (raw,)) if part is not None
    ]
    states = [state for state, _ in several]
    if ALIVE in states and PACKED not in states and RELEASED not in states:
        now = _read_once(partial(getattr, node, value_name))
        several = [(now if state == ALIVE else state, value) for state, value in several]
    if not isinstance(raw, tuple):
        return [SavedTensor(name, *pair) for pair in several]
    return [SavedTensor(f"{name}[{index}]", *pair) for index, pair in enumerate(several)]


def state_of(raw: Any) -> tuple[str, Tensor | None]:
    """The state of one saved tensor, but for staleness; and the tensor, while it is there."""
    hook = raw.unpack_hook
    if hook is not None:
        released = getattr(hook, "__code__", None) is _raise_released.__code__
        return (RELEASED if released else _packed(hook)), None
    try:
        value = raw.data
    except RuntimeError:  # a strided nested tensor
        return UNKNOWN, None
    if value is not None:
        return ALIVE, value
    try:
        raw.unpack()
    except RuntimeError as error:
        return _refused(error), None
    return NONE, None


def _refused(error: RuntimeError) -> str:
    """The state of a saved tensor that cannot be read."""
    return {"freed": FREED, "changed": STALE}.get(_messages.kind_of(error), UNKNOWN)


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
        states = {slot.state for slot in slots(saver)} if saver is not None else {UNKNOWN}
    return next((state for state in (STALE, UNKNOWN) if state in states), PACKED)


def _unpacked(raw: Any) -> str:
    """The state of a saved value that belongs to no node."""
    state, _ = state_of(raw)
    return _read_once(raw.unpack) if state == ALIVE else state


def _read_once(read: Callable[[], object]) -> str:
    """Whether values that are there are alive, or stale:
    to read them is to compare version counters.
    """
    try:
        read()
    except RuntimeError as error:
        return _refused(error)
    return ALIVE


def release(node: Node) -> int:
    """Drop the saved tensors of a node; a later use raises `RELEASED_TEXT`.

    Returns how many were dropped.
    """
    return drop(node) if answers().states else 0


def drop(node: Node) -> int:
    """Drop them without asking whether this PyTorch is known."""
    dropped = 0
    for _, name, _ in _LAYOUTS[type(node)].names:
        try:
            raws, told = getattr(node, name), _nodes.saved(node, name)
        except (RuntimeError, AttributeError):  # freed already
            continue
        raws = raws if isinstance(raws, tuple) else (raws,)
        for raw, state in zip(
            raws, told if isinstance(told, tuple) else [told] * len(raws), strict=True
        ):
            # a packed one has its hooks, and takes no second pair
            if raw is not None and state_of(state)[0] == ALIVE:
                raw.register_hooks(_forget, _raise_released)
                dropped += 1
    return dropped


RELEASED_TEXT = (
    "this part of the graph was released: by hodiff.graph.release, or by hodiff.multi_grad(..., "
    "release=True). Compute the tensor again, or release later."
)


def _forget(tensor: Tensor) -> None:
    """Pack a saved tensor as nothing."""


def _raise_released(nothing: None) -> Tensor:
    raise GraphError.about(RELEASED_TEXT, kind="released")


# --- what stands in the way of a pass, and where nodes lead ---------------------------------------


def trouble(node: Node) -> str:
    """Why the engine could fail at this node: `freed`, `stale`, `released`, `unknown`, `missing`,
    or nothing.

    Of one with nothing left it is told by others of its kind.
    """
    return FREED if is_freed_like_others(node) else asked_trouble(node)


def asked_trouble(node: Node) -> str:
    """The trouble of a node, as PyTorch tells it of that very node."""
    if is_whole(node):
        return ""
    if is_raising(node):
        return "missing"
    return next((state for state in states(node) if state in _TROUBLES), "")


_TROUBLES = (FREED, RELEASED, STALE, UNKNOWN)
"""The states with which a node cannot be run, or might not be."""


def leading_to(graph: Mapping[Node, Collection[Node]], chosen: Iterable[Node]) -> set[Node]:
    """The nodes of a graph, given with the nodes that each leads to, that lead to one of `chosen`,
    and those.
    """
    above: dict[Node, list[Node]] = {}
    for node, below in graph.items():
        for child in below:
            above.setdefault(child, []).append(node)
    nodes = set(chosen)
    stack = list(nodes)
    while stack:
        fresh = [node for node in above.get(stack.pop(), ()) if node not in nodes]
        nodes.update(fresh)
        stack += fresh
    return nodes


ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The code that runs a pass: what a traceback has below it ran while the pass did."""


def without_modes() -> AbstractContextManager[None]:
    """A context in which reading a tensor's attributes calls no mode and no subclass,
    and meets no inference mode.
    """
    return Scope(_normal) if torch.is_inference_mode_enabled() else torch.DisableTorchFunction()


def _normal(undo: Undo) -> None:
    _settings.record(undo)
    plain = torch.DisableTorchFunction()
    undo += [partial(plain.__exit__, None, None, None)]
    plain.__enter__()


hooks_before_steps: dict[int, Any] = _optimizer._global_optimizer_pre_hooks
"""The hooks before the steps of all optimizers."""


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks around the steps of an optimizer: its own, and those of all optimizers."""
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    hooks += [hooks_before_steps, _optimizer._global_optimizer_post_hooks]
    return [hook for hooks in hooks for hook in hooks.values()]


# --- nodes ----------------------------------------------------------------------------------------


def leaf(node: Node) -> Tensor | None:
    """The leaf tensor into whose `.grad` the node accumulates; None for other nodes."""
    return node.variable if node.__class__ is _nodes.ACCUMULATE else None


def children(node: Node) -> Iterator[Node]:
    """The nodes that a reverse pass runs after this one."""
    return (child for child, _ in node.next_functions if child is not None)


def tags(node: Node) -> dict[str, Any]:
    """The node's own dict, which lives as long as the node and is empty until
    someone writes to it.
    """
    return node.metadata


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


# --- tensors --------------------------------------------------------------------------------------


def leaf_of(value: Tensor) -> Tensor | None:
    """The trainable leaf whose memory a tensor is: itself, or the one that it is a view of."""
    base = value if value.is_leaf and value.requires_grad else value._base
    return base if base is not None and base.is_leaf and base.requires_grad else None


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another."""
    return tensor._base is not None


def version(tensor: Tensor) -> int:
    """The number of the tensor's changes in place; -1 where they are not counted."""
    return -1 if tensor.is_inference() else tensor._version


_WITHOUT_MEMORY = (RuntimeError, NotImplementedError, ValueError)
"""What tensors raise that have no memory of one piece: sparse and nested ones,
and a lazy module's parameters.
"""


def storage(tensor: Tensor) -> tuple[int, int]:
    """An identity for the memory under a tensor, and its size in bytes: none, if it only says how
    many it would be.
    """
    try:
        memory = tensor.untyped_storage()
        return memory._cdata, 0 if tensor.is_meta else memory.nbytes()
    except _WITHOUT_MEMORY:
        return id(tensor), 0


def memory(tensor: Tensor) -> int:
    """An identity for the memory under a tensor."""
    return storage(tensor)[0]


def measure(tensor: Tensor) -> tuple[tuple[int, ...], int, int]:
    """A tensor's shape, empty for a nested tensor, which has none; and what `storage` says."""
    try:  # most have one: told without another call
        memory = tensor.untyped_storage()
        return tuple(tensor.shape), memory._cdata, 0 if tensor.is_meta else memory.nbytes()
    except _WITHOUT_MEMORY:
        nested = tensor.is_nested and tensor.layout is torch.strided
        return () if nested else tuple(tensor.shape), *storage(tensor)


# --- does this PyTorch answer as expected? Tried once, on small graphs of each state --------------


class Answers(NamedTuple):
    """The answers of this PyTorch, asked once.

    Attributes:
        states: Whether the states of saved tensors are told as they are.
        references: The references, besides that of its slot, that are seen of a tensor that only a
            graph holds.
        sequences: Whether nodes and the thread's counter agree on the order of creation.
    """

    states: bool = False
    references: int = 0
    sequences: bool = False


@cache
def answers() -> Answers:
    """Try it all, in a thread of its own, where no mode or hook of the caller is on."""
    lines: list[Answers] = []

    def run() -> None:
        try:
            states = _states_are_told()
            lines.append(Answers(states, _references() if states else 0, _sequences_agree()))
        except Exception:  # whatever is different, it is not what we know
            lines.append(Answers())

    thread = threading.Thread(target=run, name="hodiff self-test")
    thread.start()
    thread.join()
    if not (lines[0].states and lines[0].sequences):
        _messages.warn_once(
            f"torch {torch.__version__} does not tell of graphs what hodiff expects, "
            "so explanations "
            'are off: what was saved is "unknown", predict() says "maybe", and release() frees '
            "nothing. Derivatives are not affected."
        )
    return lines[0]


def _states(node: Node) -> dict[str, str]:
    return {slot.name: slot.state for slot in read(node, _LAYOUTS[type(node)].names)}


def _states_are_told() -> bool:
    """A graph of each state, with the answer that it must give."""

    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.ones(3, device="cpu").requires_grad_()
        y = x * torch.full((3,), 2.0, device="cpu")
        return x, y, (y * y).sum()

    x, y, loss = fresh()
    product = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    told = [
        _states(y.grad_fn) == {"self": NONE, "other": ALIVE},
        _states(product) == {"self": ALIVE, "other": ALIVE},
        leaf(y.grad_fn.next_functions[0][0]) is x,  # type: ignore[union-attr]
    ]
    with _settings.grad_mode(False):
        y.add_(1)
    told += [_states(product) == {"self": STALE, "other": STALE}]
    x, y, loss = fresh()
    loss.backward()
    freed = _states(y.grad_fn)
    told += [freed["other"] == FREED, freed["self"] in (NONE, FREED)]
    ran: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: ran.append(1) or t):
        x, y, loss = fresh()
    told += [_states(y.grad_fn)["other"] == PACKED, not ran]
    x, y, loss = fresh()
    told += [drop(y.grad_fn) == 1, _states(y.grad_fn)["other"] == RELEASED]
    return all(told)


def _references() -> int:
    # no result: 2.10 and 2.11 make a new tensor of that
    factor = torch.ones(3, device="cpu").requires_grad_() * 2.0
    product = (factor * factor).grad_fn
    del factor
    (name, raw_name, _), *_ = _LAYOUTS[type(product)].names
    slot = SavedTensor(name, *state_of(_nodes.saved(product, raw_name)))
    return sys.getrefcount(slot.value) - 1


def _sequences_agree() -> bool:
    before = counter()
    y = torch.ones(3, device="cpu").requires_grad_() * 2.0
    return y.grad_fn is not None and counter() == before + 1 and sequence(y.grad_fn) == before
