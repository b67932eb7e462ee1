"""The calls of `f`, one by one: where values leave the graph, and what follows when such a value is
held.

A value that left the graph (by `detach`, `.data`, `no_grad`, `item`, ...) is a constant to
derivatives, and not to differences. So a cut is to blame exactly if the differences change when its
value is *held* at what it was at the point. That needs no cut to be undone, which often cannot be:
a number, an array, a tensor changed in place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hodiff.errors
from hodiff._core import _arguments, _messages, _settings, _tree, _versions
from hodiff._core._lending import EvaluationContext
from hodiff._core._vectors import draw
from hodiff.curvature._staleness import variables
from hodiff.graph import _record
from hodiff.graph._names import HIDDEN, marked, path_of, user_frames
from hodiff.graph._record import CUT, GRADIENT, PASS, PLAIN, tensors_in
from hodiff.graph._source import Line
from hodiff.verify._differences import Cause, Point, cause

Key = tuple[Any, ...]
Function = Callable[..., Any]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HODIFF = os.path.dirname(hodiff.errors.__file__) + os.sep
_COPIES = (
    "tensor",
    "as_tensor",
    "asarray",
    "new_tensor",
    "__array__",
    "__int__",
    "__index__",
    "__complex__",
)
"""What copies a value out of the graph, besides what `graph` calls a cut."""


class Place(NamedTuple):
    """The place of a call: the innermost line of the user's, and every frame on the way there."""

    line: Line
    frames: tuple[tuple[str, int, str], ...]

    @property
    def inside(self) -> str:
        """The function of a library in which it was called; empty in the user's own code."""
        file, number, name = self.frames[0] if self.frames else ("", 0, "")
        return (
            ""
            if not file or self.line == Line(file, number)
            else f"{name} ({os.path.basename(file)}:{number})"
        )

    def is_named(self, places: Iterable[Any]) -> bool:
        """Whether one of `places` is a function, or a line (`net.py:12`), on the way to it."""
        known = {name for _, _, name in self.frames}
        known |= {f"{os.path.basename(file)}:{number}" for file, number, _ in self.frames}
        return any(isinstance(place, str) and place in known for place in places)


class Site(NamedTuple):
    """A call whose result left the graph, the kind of it (the words of `graph`),
    and the value at the point.
    """

    key: Key
    kind: str
    call: str
    place: Place
    value: Any


class Called(NamedTuple):
    """An operation, with its arguments as they were."""

    func: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.func, "__name__", str(self.func))


class _Counting(TorchFunctionMode):
    """Gives each call of the user's code a key that is the same in every evaluation."""

    def __enter__(self) -> Self:
        self._counts: dict[Key, int] = {}
        self._entered = next(user_frames(sys._getframe(1)), None)
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Show one call, where it concerns the user's code; run it as it is elsewhere."""
        frame, kind = sys._getframe(1), _record.kind_of(func)
        if not self._concerns(func, kind, frame):
            return func(*args, **(kwargs or {}))
        return self.see(func, args, kwargs or {}, kind, frame)

    def see(self, func: Function, args: Any, kwargs: Any, kind: int, frame: FrameType) -> Any:
        """The result of a call, or the one that it is to give."""
        raise NotImplementedError

    def _concerns(self, func: Function, kind: int, frame: FrameType) -> bool:
        """Whether a call is one of the user's that can cut: not of values, no attribute is set, and
        we did not ask.
        """
        if _settings.tracing():  # stand-ins, as in `torch.func.linearize`
            return False
        if kind in (PLAIN, GRADIENT) and getattr(func, "__name__", "") != "__get__":
            return False
        return kind == PASS or not _is_ours(frame)

    def key(self, func: Function, frame: FrameType) -> Key:
        """The user's lines, the function, and how often it was called there before."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = f"get {getattr(getattr(func, '__self__', None), '__name__', '')}"
        path = path_of(frame, marked(self._entered))
        # without the line of who asked
        key = (*(path[:-1] if self._entered is not None else path), name)
        self._counts[key] = number = self._counts.get(key, -1) + 1
        return (*key, number)

    def place(self, frame: FrameType) -> Place:
        """The place of a call."""
        path = path_of(frame, marked(self._entered))
        line = path[0].line if path else Line("", 0)
        frames, each = [], frame
        while each is not None and each is not self._entered:
            file = each.f_code.co_filename
            thin = file.startswith(_TORCH) and file.endswith(
                ("overrides.py", "_tensor.py", "functional.py")
            )
            if not thin:
                frames.append((file, each.f_lineno or 0, each.f_code.co_name))
            each = each.f_back
        return Place(line, tuple(frames))


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a call is the library's own (norms written out, leaves of nested calls),
    not of an `f` of torch's.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is not None and frame.f_code is EvaluationContext.at.__code__:
        return False
    return frame is not None and frame.f_code.co_filename.startswith(_HODIFF)


@final
class Recorder(_Counting):
    """Notes cuts and hooks; with `operations` each call and its arguments, with `choices`
    each decision.

    Attributes:
        sites: Where values left the graph.
        hooks: Where hooks were put on tensors.
        calls: The operations on values with a graph.
        choices: What was decided on values: comparisons, indices, sides of kinks.
        unheld: Cuts inside transforms of `torch.func`, whose values do not outlive them.
    """

    def __init__(self, *, operations: bool = False, choices: bool = False) -> None:
        super().__init__()
        self._operations, self._choices = operations, choices
        self.sites: list[Site] = []
        self.hooks: list[Place] = []
        self.calls: list[Called] = []
        self.choices: dict[Key, tuple[Any, str, Place]] = {}
        self.unheld: list[tuple[str, Place]] = []

    def see(self, func: Function, args: Any, kwargs: Any, kind: int, frame: FrameType) -> Any:
        """Run one call, and note what it did."""
        key, name = self.key(func, frame), getattr(func, "__name__", "")
        if _versions.transforms():
            if kind == CUT or name in _COPIES:
                self.unheld.append((name, self.place(frame)))
            return func(*args, **kwargs)
        attached = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        before = None
        if self._operations and attached and kind not in (CUT, PASS) and torch.is_grad_enabled():
            before = copied(args), copied(kwargs)
        sides = _sides(name, args, kwargs) if self._choices else None
        result = func(*args, **kwargs)
        if name == "register_hook":
            self.hooks.append(self.place(frame))
        if self._choices:
            decided = sides if sides is not None else _decided(result)
            if decided is not None:
                self.choices[key] = decided, name, self.place(frame)
        if attached:
            changed = _changed(name, args, result)
            cut = _cut_of(kind, name, changed, frame)
            if cut not in ("", "inside a Function", "checkpoint"):
                self.sites.append(Site(key, cut, name, self.place(frame), _constants(changed)))
            if before is not None and _differentiable(result):
                self.calls.append(Called(func, *before, self.place(frame)))
        return result


def _cut_of(kind: int, name: str, result: Any, frame: FrameType) -> str:
    """The way in which a call lost the graph of its arguments; empty if it did not."""
    if kind in (GRADIENT, PASS):
        return "gradient" if tensors_in(result) and not _differentiable(result) else ""
    if kind == CUT and name not in _record.LEAVING:
        return "detached"
    leaves = kind == CUT or name in _COPIES
    if not leaves and not _lost(result):
        return ""
    if leaves or torch.is_grad_enabled():
        return "smooth" if name in _messages.CONSTANTS else "constant"
    return _record.surroundings(frame)[0] or "no_grad"


@final
class HeldValues(_Counting):
    """Gives back, at the calls with the keys of `held`, the values that stand there;
    `hooks=False` takes hooks off.
    """

    def __init__(self, held: Mapping[Key, Any], *, hooks: bool = True) -> None:
        super().__init__()
        self._held, self._hooks = held, hooks

    def see(self, func: Function, args: Any, kwargs: Any, kind: int, frame: FrameType) -> Any:
        """Run one call, and put the value in place of its result."""
        key, name = self.key(func, frame), getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        if not self._hooks and name == "register_hook":
            result.remove()
        if key not in self._held:
            return result
        value, changed = self._held[key], _changed(name, args, result)
        if isinstance(changed, Tensor) and any(
            changed is each for each in (*args[:1], kwargs.get("out"))
        ):
            with _settings.grad_mode(False):
                changed.copy_(value)
            return result
        return _constants(value)


def _changed(name: str, args: Sequence[Any], result: Any) -> Any:
    """The tensor that a call gives, or has changed: of `h[i] = x`, h."""
    return args[0] if name in ("__setitem__", "__set__") else result


def copied(value: Any, recorded: bool = True) -> Any:
    """A value with copies of the tensors in it, which nothing changes any more; they say whether
    they had a graph.
    """

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().clone()
        return (
            own.requires_grad_(recorded and leaf.requires_grad) if leaf.is_floating_point() else own
        )

    return _tree.tree_map(copy, value)


def _constants(value: Any) -> Any:
    """A value with the tensors in it as constants."""
    return copied(value, recorded=False)


def _lost(result: Any) -> bool:
    """Whether a result is, or holds, real numbers and no graph."""
    tensors = tensors_in(result)
    real = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return bool(real) and not any(tensor.requires_grad for tensor in real)


def _differentiable(result: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(result))


def _decided(result: Any) -> Any:
    """The decision that a result carries: a truth value, an index; None for real numbers."""
    if isinstance(result, bool):
        return (torch.tensor(result, device="cpu"),)
    values = [
        t.detach().clone()
        for t in tensors_in(result)
        if not (t.is_floating_point() or t.is_complex())
    ]
    return tuple(values) or None


def _sides(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The side of its kinks on which each argument of a piecewise function lies."""
    about = KINKS.get(name)
    given = [tensor.detach() for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    return tuple(about(given, args, kwargs)) if about is not None and given else None


Sides = Callable[[Sequence[Tensor], Sequence[Any], Mapping[str, Any]], Iterable[Tensor]]


def _at(*points: float) -> Sides:
    """Kinks at fixed points."""
    return lambda given, args, kwargs: [(given[0] - point).sign() for point in points]


def _beyond(
    given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[Tensor]:
    """Kinks at plus and minus a number that is the second argument."""
    named = [kwargs[name] for name in ("lambd", "threshold") if name in kwargs]
    bound = [*named, *args[1:], 0.5][0]
    return (given[0] - bound).sign(), (given[0] + bound).sign()


def _clamped(
    given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[Tensor]:
    bounds = [*args[1:], *(kwargs.get(name) for name in ("min", "max", "min_val", "max_val"))]
    return [
        (given[0] - bound).sign() for bound in bounds if isinstance(bound, (int, float, Tensor))
    ]


def _larger(
    given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[Tensor]:
    if len(given) > 1:
        return ((given[0] - given[1]).sign(),)
    whole, dim = given[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dim, int):
        return whole.argmax(dim), whole.argmin(dim)
    return whole.flatten().argmax(), whole.flatten().argmin()


def _pooled(
    name: str, given: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterable[Tensor]:
    """The place of each maximum."""
    options = {key: value for key, value in kwargs.items() if key != "return_indices"}
    return (getattr(F, f"{name}_with_indices")(given[0], *args[1:], **options)[1],)


_POOLS = [f"{kind}max_pool{n}d" for n in (1, 2, 3) for kind in ("", "adaptive_")]

KINKS: dict[str, Sides] = {
    **dict.fromkeys(
        ("relu", "relu_", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu"), _at(0)
    ),
    **dict.fromkeys(("abs", "abs_", "absolute", "__abs__", "sign", "sgn"), _at(0)),
    **dict.fromkeys(("hardswish", "hardsigmoid"), _at(-3, 3)),
    "relu6": _at(0, 6),
    **dict.fromkeys(("hardshrink", "softshrink", "threshold", "_threshold"), _beyond),
    **dict.fromkeys(("clamp", "clamp_", "clip", "clamp_min", "clamp_max", "clamp_min_"), _clamped),
    "hardtanh": lambda given, args, kwargs: [
        *_clamped(given, args, kwargs),
        *_at(-1, 1)(given, args, kwargs),
    ],
    **dict.fromkeys(
        ("floor", "ceil", "round", "trunc", "fix", "frac", "remainder", "fmod", "__mod__"),
        lambda given, args, kwargs: (given[0].floor(), given[0].round(), given[0].sign()),
    ),
    **dict.fromkeys(
        (
            *("max", "min", "amax", "amin", "maximum", "minimum", "fmax", "fmin", "aminmax"),
            "l1_loss",
        ),
        _larger,
    ),
    **dict.fromkeys(
        ("median", "nanmedian", "kthvalue", "quantile"),
        lambda given, args, kwargs: (given[0].flatten().argsort(stable=True),),
    ),
    **{name: partial(_pooled, name) for name in _POOLS},
}
"""How each piecewise function's pieces are told apart, by the function's name."""


# --- `f` at one point, evaluated again and again: its random numbers, its memory of calls ---------


class Attributes:
    """The attributes of the modules that `f` called, as they were before its first run,
    to be put back.
    """

    def __init__(self, borrowed: Mapping[nn.Module, dict[str, Any] | None]) -> None:
        self._before = {
            module: dict(before) for module, before in borrowed.items() if before is not None
        }

    def _others(self) -> Iterator[tuple[nn.Module, str]]:
        """The attributes that are others now."""
        for module, before in self._before.items():
            for name in {**before, **module.__dict__}:
                # what RNNs keep of their parameters
                if name in HIDDEN or name.startswith("_flat_weight"):
                    continue
                if (
                    name not in before
                    or name not in module.__dict__
                    or module.__dict__[name] is not before[name]
                ):
                    yield module, name

    def changed(self) -> list[str]:
        """The names of those that are others now."""
        return [f"{type(module).__name__}.{name}" for module, name in self._others()]

    def restore(self) -> None:
        """Put the attributes back."""
        for module, name in [*self._others()]:
            if name in self._before[module]:
                module.__dict__[name] = self._before[module][name]
            else:
                del module.__dict__[name]


class ScalarEvaluation:
    """The function of a context, as a number: its output times fixed random weights.

    Attributes:
        lending: The state in which it runs.
        point: Where.
        output: What the function returned in the first run.
        drew: Whether it drew random numbers.
        attributes: What its modules keep.
        allowed: Cuts that the caller means: their values are held always.
        steady: Whether each run begins with the attributes that the modules had before the first
            one.
    """

    def __init__(self, context: EvaluationContext, generator: torch.Generator | None) -> None:
        self.context = context
        self.point: Point = tuple(leaf.detach().clone() for leaf in context.leaves())
        self._held: dict[Key, Any] = {}
        self._hooks, self.steady = True, False
        self.allowed: list[Site] = []
        context.remember()
        self.output = _arguments.check_output(self.run(self.point))
        self.drew, self.attributes = context.random.moved(), Attributes(context.borrowed)
        self._weights = (
            torch.ones((), device="cpu")
            if self.output.numel() == 1
            else draw(self.output.shape, self.output, "gaussian", generator)
        )

    def run(self, leaves: Point) -> Any:
        """The function's result: with a graph, for leaves that require grad."""
        if not any(leaf.requires_grad for leaf in leaves):  # f sees such leaves always
            value = self.run(tuple(leaf.detach().clone().requires_grad_() for leaf in leaves))
            return value.detach() if isinstance(value, Tensor) else value
        self.context.random.restore()
        if self.steady:
            self.attributes.restore()
        held = {site.key: site.value for site in self.allowed} | self._held
        with (
            _settings.on(HeldValues(held, hooks=self._hooks))
            if held or not self._hooks
            else nullcontext()
        ):
            return self.context.run(leaves, leaves)

    def allow(self, places: Iterable[Any]) -> None:
        """Hold the values that are cut at these places, now and always."""
        if any(isinstance(place, str) for place in places):
            self.allowed = [site for site in self.recorded().sites if site.place.is_named(places)]

    def scalar(self, leaves: Point) -> Tensor:
        """The function's result, as a number."""
        return (self.run(leaves) * self._weights).sum()

    def recorded(self, leaves: Point | None = None, **what: bool) -> Recorder:
        """The calls of an evaluation, at the point or elsewhere."""
        leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves or self.point)
        self.context.random.restore()
        self.attributes.restore()
        recorder = Recorder(**what)
        with _settings.grad_mode(True), _settings.on(recorder):
            self.context.run(leaves, leaves)
        return recorder

    @contextmanager
    def altered(
        self, held: Mapping[Key, Any] | None = None, *, hooks: bool = True
    ) -> Iterator[None]:
        """A context in which these values are as at the point,
        or hooks on tensors are taken off.
        """
        self._held, self._hooks = dict(held or {}), hooks
        try:
            yield
        finally:
            self._held, self._hooks = {}, True


# --- what else to know of `f` ---------------------------------------------------------------------


SHOWN = 4
ELSEWHERE = "check at another point (move x a little), or write a function that is smooth there."


def states(f: Callable[..., Any]) -> dict[str, Any]:
    """The mark that shows a change, for each variable that a function reads."""
    return {
        name: _state(value)
        for name, (_, _, value) in variables(f, assigned=True).items()
        if not callable(value) or isinstance(value, type)
    }


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, (list, dict, set)):
        return id(value), len(value)
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().sum().item()
    return value if isinstance(value, (int, float, str, bool)) else id(value)


def remarks(
    evaluation: ScalarEvaluation, f: Callable[..., Any], before: Mapping[str, Any]
) -> list[Cause]:
    """The state that `f` leaves behind for its next call, and random numbers; told after the
    first run, and `f` runs once more.

    Args:
        f: The function.
        before: Its `states` before it ran.
    """
    fix = "each evaluation draws the same ones (dropout)."
    random = [cause("random", None, "it draws random numbers", fix)] if evaluation.drew else []
    now = states(f)
    changed = [name for name, state in before.items() if now.get(name, state) != state]
    names = [f"the variable {name}" for name in changed]
    names += evaluation.attributes.changed()
    again = evaluation.run(evaluation.point)
    differs = again.shape != evaluation.output.shape or not torch.equal(again, evaluation.output)
    if not names and not differs:
        return random
    shown = ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
    what = (
        f"it changes {shown}"
        if names
        else "it keeps state between calls (a counter, a cache, a generator of its own)"
    )
    value = (
        "; its value at the same point is another then, so that differences mean nothing"
        if differs
        else ""
    )
    fix = "let f compute what it needs each time, and return what it would keep."
    return [cause("state", None, f"{what}{value}", fix), *random]


# --- kinks and jumps: decisions that fall otherwise right beside a point --------------------------


def kinks(evaluation: ScalarEvaluation, direction: Point, step: float) -> list[Cause]:
    """The decisions that are others at a step to either side of the point:
    at most one for a line and a function.
    """
    right, left = (
        evaluation.recorded(
            tuple(leaf + t * part for leaf, part in zip(evaluation.point, direction, strict=True)),
            choices=True,
        ).choices
        for t in (step, -step)
    )
    by_place: dict[tuple[Line, str], Cause] = {}
    for key in right.keys() & left.keys():
        (one, name, place), (other, *_) = right[key], left[key]
        if len(one) != len(other) or not all(map(torch.equal, one, other)):
            reason = (
                f"{name} has a kink or a jump here, at x: the derivatives of the two sides differ"
            )
            by_place[place.line, name] = cause("kink", place.line, reason, ELSEWHERE)
    return list(by_place.values())
