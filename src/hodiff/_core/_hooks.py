"""Events behind a user's function: modules it calls, passes, checkpoints, hooks on gradients.

Every module that `f` calls is lent (see `_modules`), however `f` reaches it. A hook that replaces a
gradient acts in each pass through its place: the second derivative is then that of no function, as
in plain PyTorch. So hooks that `f` registers, or that its modules have, are watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hodiff._core import (
    _call,
    _kernels,
    _locks,
    _messages,
    _nodes,
    _refusals,
    _settings,
    _versions,
)
from hodiff._core._settings import Counted, Undo
from hodiff.errors import GraphError

__all__ = ["lend_module", "met", "serve"]

# --- derivatives that `f` takes itself, by `torch.autograd.grad` or `torch.func.grad` -------------
# Each is seen where it begins, with the graph that it goes over: afterwards that may be out of
# reach, for what PyTorch takes for a constant leaves no trace. What was seen is judged when `f` has
# returned, by the rules of the total order.


class ByHand:
    """The differentiable passes that `f` has made in one evaluation.

    Attributes:
        count: How many; none is nested deeper.
        names: The class names of the nodes that they went over.
        batched: Whether one ran inside `torch.vmap`, as in `torch.func.jacrev`.
        refused: What is to be said of the first through which a derivative of the total order is
            not right.
    """

    __slots__ = ("batched", "count", "names", "refused")

    def __init__(self) -> None:
        self.count = 0
        self.batched = False
        self.names: set[str] = set()
        self.refused: GraphError | None = None


def note(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Let the innermost evaluation know that its `f` begins a pass whose result
    is differentiable.
    """
    if not _call.state.running or _versions.passing.ours:
        return
    context = _call.state.running[-1]
    if not context.call.builds_graph:
        return
    roots = [node for node in map(_node, outputs) if node is not None]
    if not roots:  # of constants alone
        return
    by_hand = context.by_hand = context.by_hand or ByHand()
    graph = _nodes.Survey(roots)
    by_hand.count += 1
    by_hand.batched |= (batched := _call.inside_vmap())
    by_hand.names |= graph.names()
    by = [_versions.unwrapped(each) for each in inputs if isinstance(each, Tensor)]
    try:
        by = by if by and len(by) == len(inputs) else graph.variables()
        _refusals.judge(graph, by, context.call.order + by_hand.count, context.call.allow)
        if batched and _refusals.has_norm_weights(graph, by):
            raise _refusals.batched_norm()
    except GraphError as error:
        by_hand.refused = by_hand.refused or error


def _node(output: Any) -> Any:
    return (
        _nodes.node_of(_versions.unwrapped(output)) if isinstance(output, Tensor) else output.node
    )


# --- modules, passes and hooks --------------------------------------------------------------------


Hook = Callable[..., Any]
(autograd, PASSES), (stateless, SWAPS) = _versions.PASSES, _versions.SWAPS
(checkpoints, FRAMES), (_, REPEATS) = _versions.FRAMES, _versions.REPEATS
modules, WRAPPED = _versions.WRAPPED


class Hooks:
    """Whether hooks of one evaluation changed a gradient.

    Attributes:
        changed: Whether one did.
        before: The number of the next hook, as `f` began.
    """

    changed = False
    before = 0

    def registered(self) -> bool:
        """Whether a hook was registered since `before`, on whatever:
        each gets a handle with a number.
        """
        return RemovableHandle.next_id != self.before

    def watched(self, hook: Hook) -> Hook:
        """The hook, seen when it returns another gradient."""

        def observe(*args: Any) -> Any:
            result = hook(*args)
            if result is not None:
                self.changed = True
            return result

        return observe


WATCH = "hodiff"
"""What the hook of modules is called, and the holder of the stance."""


@functools.lru_cache(1)
def _watchers(theirs: Hook, swap: Hook) -> tuple[Hook, Hook, Callable[[], None]]:
    """The stand-ins for PyTorch's entry of passes and for its swap of parameters,
    and the way to put those back.
    """

    def passes(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _, _, create_graph, inputs, *_ = args
        if create_graph:
            note(outputs, inputs)
        return theirs(outputs, *args, **kwargs)

    def swapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # before it has what `torch.func.functional_call` puts into it
        for part in module.modules():
            lend_module(part, ())
        return swap(module, *args, **kwargs)

    taken = [
        (autograd, PASSES, passes, theirs),
        (stateless, SWAPS, swapped, swap),
        *WHILE_CALLS,
    ]

    def restore() -> None:
        _versions.before_modules.pop(WATCH, None)
        # To ask whether the other is `on` is a call.
        if checkpoints[FRAMES] is _frame and not watch_checkpoints._restore:
            checkpoints[FRAMES] = _frames[0]
        if checkpoints[REPEATS] is _again:
            checkpoints[REPEATS] = _repeats[0]
        for place, name, ours, before in taken:
            if name in place and place[name] is ours:
                if before is None:
                    del place[name]
                else:
                    place[name] = before
        if _settings.stance.holders:
            _settings.as_compiled(WATCH)

    return passes, swapped, restore


def _watch_modules(undo: Undo) -> None:
    """Let the innermost evaluation know of each module that is called or swapped, and of each
    differentiable pass.

    `torch.autograd.grad`, `backward` and the transforms of `torch.func` look their way to the
    engine up under a name of `torch.autograd`; passes of ours enter the engine past it, and pay
    nothing.
    """
    passes, swapped, restore = _watchers(autograd[PASSES], stateless[SWAPS])
    # Not by another `nn.Module.__call__`: to set a method of a class takes 0.4 ms, for each of its
    # subclasses forgets what it had looked up, and slows what comes after.
    undo += [restore]
    if met.threads is not None:
        met.threads[_locks.here.thread] = None
    _versions.before_modules[WATCH] = lend_module
    autograd[PASSES] = passes
    if checkpoints[FRAMES] is not _frame:
        _frames[0], checkpoints[FRAMES] = checkpoints[FRAMES], _frame
    if checkpoints[REPEATS] is not _again:
        _repeats[0], checkpoints[REPEATS] = checkpoints[REPEATS], _again
    stateless[SWAPS] = swapped
    for place, name, ours, _ in WHILE_CALLS:
        place[name] = ours
    if not _settings.eager.needs:
        _settings.force_eager(WATCH)


class _Beginners:
    """The threads that have begun calls, while that is noted: what one switches, all have."""

    threads: dict[int, None] | None = None

    def others(self) -> bool:
        """Whether other threads are among them, or in calls now."""
        with _locks.lock:
            threads = {*(self.threads or ()), *watch_modules._users.values()}
        return bool(threads - {_locks.here.thread})


met = _Beginners()


# Operators that take functions. PyTorch traces what such an operator runs, to lift what its
# functions capture into arguments. Where nothing is traced (compiled functions run as they are, or
# a mode sees each operation) it takes what they capture for constants, silently; and where it is
# right, its derivative has none. So control flow is refused, and attention is computed by its
# definition. Both stand in the operators' way while a call of hodiff runs, in whatever thread: its
# switch for compiled functions is everybody's.


def _refused(name: str, *args: Any, **kwargs: Any) -> Any:
    operation, instead = _messages.CONTROL_FLOW[name]
    raise GraphError(
        f"{operation} inside the function of a hodiff call, or in another thread meanwhile: "
        "compiled functions run as they are then, so what its branches or steps capture would "
        f"silently count as constants; {instead}."
    )


DEFINITIONS: dict[str, Callable[..., Any]] = {
    **{name: partial(_refused, name) for name in _messages.CONTROL_FLOW},
    "flex_attention": _versions.plain_flex_attention,
}
"""What is done in the place of each operator, by its name."""


def operators() -> Iterator[tuple[str, Any]]:
    """Operators that this PyTorch has (`switch` is new in 2.15), with their names."""
    yield from ((n, each) for n, each in _versions.OPERATORS.items() if n in DEFINITIONS)


def _instead(
    theirs: Callable[..., Any], definition: Callable[..., Any], key: Any, *args: Any, **kwargs: Any
) -> Any:
    """An operator's own way, or what stands for it where a call of hodiff runs
    and nothing is traced.
    """
    node = _versions.node_at_hand()
    if _settings.tracing() or (node is not None and "AutogradOp" in node.name()):
        # in the backward pass of such an operator nothing is captured
        return theirs(key, *args, **kwargs)
    return definition(*args, **kwargs)


WHILE_CALLS: list[tuple[dict[str, Any], str, Any, Any]] = [
    _versions.telling_where_forward_mode_begins(_call.note_forward_mode),
    *(
        (vars(each), "dispatch", partial(_instead, each.dispatch, DEFINITIONS[n]), None)
        for n, each in operators()
    ),
]
"""What else stands in PyTorch's place while calls run: in a namespace, under a name, ours for
theirs (or a class's).
"""


_frames = [checkpoints[FRAMES]]
"""What makes a checkpoint's frame: PyTorch's, or what stood there as ours came."""


def _frame(recompute: Hook, *args: Any) -> Any:
    """Let a checkpointed block that a pass runs again have what it had: modules, our kernels."""
    running = _call.state.running
    run = running[-1].repeatable(recompute) if running else recompute
    frame = _frames[0](_kernels.repeatable(run), *args)
    if running:
        _within.add(frame)
    return frame


_repeats = [checkpoints[REPEATS]]
"""What has what a block saves as it runs again: PyTorch's, or what stood there as ours came."""

_within: weakref.WeakSet[Any] = weakref.WeakSet()
"""The frames of checkpoints within functions of calls."""


def set_aside(undo: Undo, evaluations: Sequence[Any] = ()) -> None:
    """Let what runs be inside of these evaluations alone,
    and not of the call whose pass runs it.
    """
    stacks = {"running": _call.state.running, "open": _call.state.open}
    kept = {
        name: [each for each in stack if each._evaluation in evaluations]
        for name, stack in stacks.items()
    }
    _settings.assign(undo, _call.state, kept)


def _again(reference: Callable[[], Any], task: Any) -> Any:
    """Let a block that a pass of ours runs again run as it did: not on stacked vectors, nor inside
    of the call.

    One of a checkpoint within `f` is inside of those calls that it ran in (see `repeatable`).
    """
    hooks = _repeats[0](reference, task)
    within = reference() in _within

    def enter(undo: Undo) -> None:
        _versions.set_aside_levels(undo)
        if not within:
            set_aside(undo)
        push_hooks(undo, hooks)

    return _settings.Scope(enter)


# A checkpoint of the caller's keeps nothing that its block saves, and runs the block again where a
# pass needs some of it. A pass of ours would run it in the middle of the call: with the modules
# lent, and the call once more inside of itself, for a higher order and so by other operations; what
# is saved then is not what was counted. So a call keeps what it saves. The checkpoint counts along
# what a differentiable result needs, and has it alone when the call ends.


def keep(theirs: tuple[Hook, Hook], undo: Undo, *, shared: bool) -> None:
    """Keep what is saved from now on until it is undone, if hooks of a checkpoint would have it.

    Args:
        theirs: The hooks that would have it.
        undo: Where to note what undoes it.
        shared: Whether the checkpoint has it from then on; if not, it is kept as long as its graph.
    """
    if getattr(theirs[0], "__module__", "") != checkpoints["__name__"]:
        return
    _nodes.see_kept()
    made: weakref.WeakSet[_versions.Kept] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _versions.Kept:
        kept = _versions.Kept(tensor, theirs[1], theirs[0](tensor) if shared else None)
        if shared:
            made.add(kept)
        return kept

    def release() -> None:
        for kept in made:
            kept.tensor = None

    undo += [release]
    push_hooks(undo, torch.autograd.graph.saved_tensors_hooks(pack, _versions.given_back))


def push_hooks(undo: Undo, hooks: Any) -> None:
    """Let hooks have what is saved until it is undone."""

    def leave() -> None:
        top = _versions.hooks_on(True)
        if top is not None and top[0] is hooks.pack_hook:
            hooks.__exit__(None, None, None)

    undo += [leave]
    hooks.__enter__()


def _watch_checkpoints(undo: Undo) -> None:
    """Let checkpoints of both kinds run again with our kernels, in any pass, if with them now."""
    reentrant = checkpoints["CheckpointFunction"]

    def apply(run: Hook, *args: Any) -> Any:
        return reentrant.apply(_kernels.repeatable(run), *args)

    ours = SimpleNamespace(apply=apply)

    def restore() -> None:
        if checkpoints["CheckpointFunction"] is ours:
            checkpoints["CheckpointFunction"] = reentrant
        if checkpoints[FRAMES] is _frame and not watch_modules.on:
            checkpoints[FRAMES] = _frames[0]

    undo += [restore]
    checkpoints["CheckpointFunction"] = ours
    if checkpoints[FRAMES] is not _frame:
        _frames[0], checkpoints[FRAMES] = checkpoints[FRAMES], _frame


def serve(undo: Undo) -> None:
    """Let the thread have our kernels until it is undone, also where a checkpoint runs again;
    and mend what DTensors lose.
    """
    _versions.mend_from_local()
    watch_checkpoints.enter(undo)
    _kernels.include(undo)


def lend_module(module: nn.Module, args: Any) -> None:
    running = _call.state.running
    if running and module not in running[-1].borrowed:
        running[-1].loan.take_called(module)


@functools.lru_cache(1)
def _hooked(register: Hook, full: Hook, other: Hook) -> tuple[Undo, Undo]:
    """The steps that put stand-ins for PyTorch's way to give a tensor a hook, and for its two of
    modules; and those back.
    """

    def watched(hook: Hook) -> Hook:
        running = _call.state.running
        return running[-1].hooks.watched(hook) if running else hook

    def register_hook(self: Tensor, hook: Hook) -> Any:  # by this name a jet refuses it
        return register(self, watched(hook))

    def of_module(module: nn.Module, *kinds: Sequence[Hook]) -> Any:
        return full(module, *([watched(hook) for hook in hooks] for hooks in kinds))

    def wrapped(hook: Hook, *module: nn.Module) -> Any:
        return other(watched(hook), *module)

    ways = (register_hook, of_module, wrapped), (register, full, other)
    ours, theirs = (
        [
            partial(setattr, Tensor, "register_hook", of_tensor),
            partial(modules.update, {"BackwardHook": both, WRAPPED: single}),
        ]
        for of_tensor, both, single in ways
    )
    return ours, theirs


def _watch_hooks(undo: Undo) -> None:
    """Let the innermost evaluation know of each hook that a tensor is given, or that a module runs.

    A module has gathered its hooks before anybody is told that it is called; then it looks up, by
    name, what runs them.
    """
    ours, theirs = _hooked(Tensor.register_hook, modules["BackwardHook"], modules[WRAPPED])
    undo += theirs
    for step in ours:
        step()


watch_modules = Counted(_watch_modules)
watch_checkpoints = Counted(_watch_checkpoints)
watch_hooks = Counted(_watch_hooks)
