"""Why a derivative differs from its differences: cuts, hooks, kinks, Functions, operations,
each tried alone.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _locks, _messages, _nodes, _settings, _tree
from hodiff._core._arguments import Allowed
from hodiff._core._faults import interrupts
from hodiff.calculus._first import grad
from hodiff.graph._classes import CLASSES
from hodiff.graph._names import user_frames
from hodiff.graph._record import tensors_in
from hodiff.graph._source import Line, line_of
from hodiff.verify._differences import (
    Cause,
    Check,
    Point,
    Scalar,
    Slope,
    cause,
    compare,
    derived,
    difference,
    epsilon,
    first_step,
    inner,
    random_direction,
)
from hodiff.verify._trace import KINKS, Called, Place, ScalarEvaluation, Site, copied, kinks

LAST = 2**-6
"""The last step of the differences, of the first."""


def causes(
    evaluation: ScalarEvaluation, path: Sequence[Point], failed: Check, allow: Allowed
) -> list[Cause]:
    """The places that explain a disagreement, or why it cannot be told,
    at the lowest order that has one.
    """
    near = kinks(evaluation, path[failed.order - 1], LAST * first_step(epsilon(evaluation.point)))
    if failed.verdict == "inconclusive":
        return near
    function = derived(evaluation.scalar, path[: failed.order - 1], allow)
    blamed, explained = _cuts(evaluation, function, path, failed)
    if explained:
        return blamed
    blamed += _hooks(evaluation, function, path, failed, allow)
    blamed += near
    blamed += functions(evaluation, failed.order, allow)
    if not blamed:
        blamed += operations(evaluation, failed.order)
    return blamed or _inside_transforms(evaluation)


# --- cuts


def _cuts(
    evaluation: ScalarEvaluation, function: Scalar, path: Sequence[Point], failed: Check
) -> tuple[list[Cause], bool]:
    """The cuts whose values matter, and whether all of them together explain the disagreement."""
    allowed = {site.key for site in evaluation.allowed}
    sites = [site for site in evaluation.recorded().sites if site.key not in allowed]
    groups: dict[tuple[Place, str], list[Site]] = {}
    for site in sites:
        groups.setdefault(
            (site.place._replace(frames=site.place.frames[:1]), site.kind), []
        ).append(site)
    whole = _held(evaluation, function, path, failed, sites) if sites else None
    cut_causes = []
    for group in groups.values():
        numeric = whole if len(groups) == 1 else _held(evaluation, function, path, failed, group)
        if numeric is not None and not _agree(
            evaluation.point, failed.differences, numeric, failed
        ):
            cut_causes.append(_of_cut(group[0], failed.differences - numeric.value, failed))
    explained = whole is not None and _agree(evaluation.point, failed.computed, whole, failed)
    return cut_causes, explained and bool(cut_causes)


def _held(
    evaluation: ScalarEvaluation,
    function: Scalar,
    path: Sequence[Point],
    failed: Check,
    sites: Sequence[Site],
) -> Slope | None:
    """The differences with the values of these cuts held; None where they cannot be."""
    with evaluation.altered({site.key: site.value for site in sites}):
        try:
            return difference(function, evaluation.point, path[failed.order - 1])
        except Exception as error:  # f goes another way then, or the value has another shape
            if interrupts(error):
                raise
            return None


def _agree(point: Point, expected: float, numeric: Slope, failed: Check) -> bool:
    tolerance = 10 * numeric.error + epsilon(point) ** 0.4 * max(
        abs(failed.computed), abs(failed.differences)
    )
    return abs(expected - numeric.value) <= tolerance + 100 * epsilon(point)


def _inside_transforms(evaluation: ScalarEvaluation) -> list[Cause]:
    """The cuts whose values cannot be held."""
    fix = (
        "remove it if gradients should flow through this value; or check the transformed function "
        "by itself."
    )
    return [
        cause(
            "cut",
            line,
            f"{_written(name)} inside a torch.func transform may be it: its value cannot be held",
            fix,
        )
        for line, name in dict.fromkeys(
            (place.line, name) for name, place in evaluation.recorded().unheld
        )
    ]


_CALLS = {"__get__": ".data", "__set__": ".data", "__setitem__": "[...] ="} | {
    f"__{name}__": name for name in ("float", "int", "index", "array", "complex")
}
"""How a call is written, where its name is another."""


def _written(call: str) -> str:
    word = _CALLS.get(call, call)
    return word if word.startswith((".", "[")) else f"{word}()"


def _of_cut(site: Site, part: float, failed: Check) -> Cause:
    line = site.place.line
    inside = f" in {site.place.inside}" if site.place.inside else ""
    word = _written(site.call)
    how = {
        "no_grad": f"{word}{inside} runs while gradients are switched off (no_grad or "
        "inference_mode)",
        "gradient": f"the gradient{inside} is taken without create_graph=True",
        "smooth": f"PyTorch declares no derivative of {word.rstrip('()')}, smooth as it is",
    }.get(site.kind, f"{word}{inside} gives a value without its graph")
    reason = (
        f"{how}: it counts as a constant, and {part:+.6e} of the derivative of order "
        f"{failed.order} is missing"
    )
    named = site.place.inside.partition(" ")[0] or str(line)
    way = _messages.CONSTANTS.get(word.rstrip("()")) or CLASSES[_CLASSES[site.kind]].inside
    meant = f'if you mean it as a constant, allow="{named}" checks the rest.'
    fix = f"{way.rstrip('.') or 'write it with operations that are recorded'}; {meant}"
    return cause("cut", line, reason, fix)


_CLASSES = {
    "no_grad": "gradients off",
    "gradient": "first gradient",
    "detached": "detached",
    "constant": "made a constant",
    "smooth": "undeclared derivative",
}
"""The classes of failures of the kinds of cuts, whose words are said of `f` as well."""


# --- hooks


def _hooks(
    evaluation: ScalarEvaluation,
    function: Scalar,
    path: Sequence[Point],
    failed: Check,
    allow: Allowed,
) -> list[Cause]:
    """Hooks without which the derivative is what the differences say."""
    places = evaluation.recorded().hooks
    fix = "remove it for this check, or write what it does into f."
    if places:
        with evaluation.altered(hooks=False):
            without = along(function, evaluation.point, path[failed.order - 1], allow)
        if abs(without - failed.differences) <= max(
            failed.tolerance, 1e-6 * abs(failed.differences)
        ):
            reason = f"a hook on a tensor changes the gradient; without it, it is {without:+.6e}"
            return [cause("hook", place.line, reason, fix) for place in dict.fromkeys(places)]
    hooked = [module for module in evaluation.context.borrowed if module._backward_hooks]
    return [
        cause(
            "hook",
            Line("", 0),
            f"a backward hook of a {type(module).__name__} may change the gradient",
            fix,
        )
        for module in hooked[:3]
    ]


# --- `autograd.Function`s and operations, each checked alone, at the arguments that `f` gave them


CALLS = 300
"""Operations that are tried; there may be thousands, and a report must come."""


def along(function: Scalar, point: Point, direction: Point, allow: Allowed) -> float:
    """The derivative along a direction, as hodiff computes it."""
    return float(inner(grad(function, point, allow=allow), direction))


def functions(evaluation: ScalarEvaluation, order: int, allow: Allowed) -> list[Cause]:
    """The Functions in the graph whose backward is wrong, up to an order."""
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in evaluation.point)
    with _settings.grad_mode(True):
        output = evaluation.run(leaves)
    function_causes = []
    for kind in dict.fromkeys(kind for kind, _ in _nodes.survey([output]).functions()):
        if kind.__module__.startswith(("torch.", "hodiff.")):
            continue
        with _locks.ThreadClaim(kind), _watched(kind) as uses, _settings.grad_mode(True):
            evaluation.run(leaves)
        for args, line in uses[:3]:
            wrong = _first_wrong(kind.apply, args, {}, order, (kind,))  # type: ignore[attr-defined]
            if wrong is not None:
                function_causes.append(_of_function(kind, line, wrong))
                break
    return function_causes


@contextmanager
def _watched(kind: type) -> Iterator[list[tuple[tuple[Any, ...], Line]]]:
    """Note what a Function's forward is called with, and on which line, while this lasts."""
    uses = []
    mine, theirs = threading.get_ident(), kind.forward  # type: ignore[attr-defined]
    own = kind.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            given = args[1:] if args and hasattr(args[0], "save_for_backward") else args
            frame = next(user_frames(sys._getframe(1)), None)
            uses.append(
                (tuple(map(copied, given)), line_of(frame) if frame is not None else Line("", 0))
            )
        return theirs(*args, **kwargs)

    kind.forward = staticmethod(forward)  # type: ignore[attr-defined]
    try:
        yield uses
    finally:
        if own is None:
            del kind.forward  # type: ignore[attr-defined]
        else:
            kind.forward = own  # type: ignore[attr-defined]


def _of_function(kind: type, used: Line, wrong: Check) -> Cause:
    file, number, backward = _definition(kind)
    called = f", called at {used}" if used.file else ""
    fix = (
        "write its backward in differentiable operations, on inputs and outputs that "
        "ctx.save_for_backward was given; "
        "a gradient that is not a derivative on purpose (straight-through) is right as it is, "
        "and cannot be checked."
    )
    reason = (
        f"the backward of autograd.Function {kind.__name__}{called} is wrong at order "
        f"{wrong.order}, alone as well: "
        f"{wrong.computed:+.6e}, differences {wrong.differences:+.6e}."
    )
    return Cause("function", file, number, backward, reason, fix)


def _definition(kind: type) -> tuple[str, int, str]:
    """The file and line where a Function's backward is written."""
    backward: Callable[..., Any] = inspect.unwrap(getattr(kind, "backward", kind))
    try:
        lines, start = inspect.getsourcelines(backward)
        offset = next(
            i
            for i, line in enumerate(lines)
            if line.lstrip().startswith(("def ", "async def ", "class "))
        )
        return inspect.getsourcefile(backward) or "", start + offset, lines[offset].strip()
    except (OSError, TypeError, StopIteration):
        return "", 0, ""


def operations(evaluation: ScalarEvaluation, order: int) -> list[Cause]:
    """The operations of PyTorch whose derivative is wrong, up to an order,
    at the arguments that they had.
    """
    by_place: dict[tuple[Line, str], Cause] = {}
    for called in evaluation.recorded(operations=True).calls[:CALLS]:
        place = called.place.line, called.name
        if place in by_place:
            continue
        wrong = _first_wrong(called.func, called.args, called.kwargs, order, ())
        if wrong is not None:
            by_place[place] = _of_operation(called, wrong)
    return list(by_place.values())


def _of_operation(called: Called, wrong: Check) -> Cause:
    numbers = f"{wrong.computed:+.6e}, differences {wrong.differences:+.6e}"
    elsewhere = (
        "check at another point (move x a little), or write a function that is smooth there."
    )
    if called.name in KINKS:
        reason = (
            f"{called.name} has a kink at its argument, where the two sides differ in slope: "
            f"{numbers}"
        )
        return cause("kink", called.place.line, reason, elsewhere)
    if not math.isfinite(wrong.computed) or not math.isfinite(wrong.differences):
        reason = (
            f"{called.name} has no finite derivative of order {wrong.order} at its argument: "
            f"{numbers}"
        )
        return cause("kink", called.place.line, reason, elsewhere)
    reason = (
        f"PyTorch's derivative of {called.name} is wrong at order {wrong.order} here, "
        f"alone as well: {numbers}"
    )
    fix = "write it with other operations."
    return cause("operation", called.place.line, reason, fix)


def _first_wrong(
    func: Callable[..., Any], args: Any, kwargs: Any, order: int, allow: Sequence[type]
) -> Check | None:
    """The first order at which a call's derivatives disagree with differences; None where none
    does, or none can.
    """
    generator = torch.Generator().manual_seed(0)
    point = tuple(tensor.detach() for tensor in tensors_in((args, kwargs)) if _varies(tensor))
    if not point:
        return None
    state = torch.get_rng_state()

    def run(leaves: Point) -> list[Tensor]:
        torch.set_rng_state(state)
        given = iter(leaves)
        result = func(*_put(args, given), **_put(kwargs, given))
        return [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]

    def scalar(leaves: Point) -> Tensor:
        return torch.stack(
            [(part * w).sum() for part, w in zip(run(leaves), weights, strict=True)]
        ).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = [each.detach() for each in run(point)]
            weights = [
                torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu").to(
                    each
                )
                for each in outputs
            ]
            origin = tuple(part.cpu() for part in point)
            drawn = [random_direction(origin, generator) for _ in range(order)]
            path = [tuple(part.to(point[0].device) for part in direction) for direction in drawn]
            for level in range(order):
                lower = derived(scalar, path[:level], allow)
                check = compare(lower, point, path[level], level + 1, allow, [""] * len(point))
                if check.verdict == "disagrees":
                    return check
        except Exception as error:
            # it cannot be called alone, or has no derivative there: nothing is known of it
            if interrupts(error):
                raise
            return None
        finally:
            torch.set_rng_state(state)
    return None


def _varies(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _put(value: Any, given: Iterator[Tensor]) -> Any:
    """An argument with the leaves in place of the tensors that vary,
    in the order of `tensors_in`.
    """

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return next(given) * 1 if _varies(leaf) else leaf.clone()  # it may be changed in place

    return _tree.tree_map(put, value)
