"""`autograd.Function`s and operations, each checked alone, at the arguments that `f` gave them."""

from __future__ import annotations

import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _claims, _modes, _nodes
from hodiff._core._faults import interrupts
from hodiff._core._options import Allowed
from hodiff.calculus._first import grad
from hodiff.graph._calls import tensors_in
from hodiff.graph._line import Line, line_of
from hodiff.graph._names import user_frames
from hodiff.verify._compare import Point, Scalar, compare, derived, inner, random_direction
from hodiff.verify._evaluation import Evaluation
from hodiff.verify._report import Cause, Check, cause
from hodiff.verify._trace import KINKS, Called, copied

CALLS = 300
"""Operations that are tried; there may be thousands, and a report must come."""


def along(function: Scalar, point: Point, direction: Point, allow: Allowed) -> float:
    """The derivative along a direction, as hodiff computes it."""
    return float(inner(grad(function, point, allow=allow), direction))


def functions(evaluation: Evaluation, order: int, allow: Allowed) -> list[Cause]:
    """The Functions in the graph whose backward is wrong, up to an order."""
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in evaluation.point)
    with _modes.grad_mode(True):
        output = evaluation.run(leaves)
    kinds = {kind: None for kind, _ in _nodes.survey([output]).functions() if not _is_known(kind)}
    found = []
    for kind in kinds:
        with _claims.Held(kind), _watched(kind) as uses, _modes.grad_mode(True):
            evaluation.run(leaves)
        for use in uses[:3]:
            wrong = _first_wrong(kind.apply, use.args, {}, order, (kind,))  # type: ignore[attr-defined]
            if wrong is not None:
                found.append(_of_function(kind, use.line, wrong))
                break
    return found


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("torch.", "hodiff."))


class _Use(NamedTuple):
    args: tuple[Any, ...]
    line: Line


@contextmanager
def _watched(kind: type) -> Iterator[list[_Use]]:
    """Note what a Function's forward is called with, while this lasts."""
    uses: list[_Use] = []
    mine, theirs = threading.get_ident(), kind.forward  # type: ignore[attr-defined]
    own = kind.__dict__.get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            given = args[1:] if args and hasattr(args[0], "save_for_backward") else args
            frame = next(user_frames(sys._getframe(1)), None)
            uses.append(_Use(tuple(map(copied, given)), line_of(frame) if frame is not None else Line("", 0)))
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
        "write its backward in differentiable operations, on inputs and outputs that ctx.save_for_backward was given; "
        "a gradient that is no derivative on purpose (straight-through) is right as it is, and cannot be checked."
    )
    reason = (
        f"the backward of autograd.Function {kind.__name__}{called} is wrong at order {wrong.order}, alone as well: "
        f"{wrong.computed:+.6e}, differences {wrong.differences:+.6e}."
    )
    return Cause("function", file, number, backward, reason, fix)


def _definition(kind: type) -> tuple[str, int, str]:
    """The file and line where a Function's backward is written."""
    backward: Callable[..., Any] = inspect.unwrap(getattr(kind, "backward", kind))
    try:
        lines, start = inspect.getsourcelines(backward)
        offset = next(i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "async def ", "class ")))
        return inspect.getsourcefile(backward) or "", start + offset, lines[offset].strip()
    except (OSError, TypeError, StopIteration):
        return "", 0, ""


def operations(evaluation: Evaluation, order: int) -> list[Cause]:
    """The operations of PyTorch whose derivative is wrong, up to an order, at the arguments that they had."""
    found: dict[tuple[Line, str], Cause] = {}
    for called in evaluation.recorded(operations=True).calls[:CALLS]:
        place = called.place.line, called.name
        if place in found:
            continue
        wrong = _first_wrong(called.func, called.args, called.kwargs, order, ())
        if wrong is not None:
            found[place] = _of_operation(called, wrong)
    return list(found.values())


def _of_operation(called: Called, wrong: Check) -> Cause:
    numbers = f"{wrong.computed:+.6e}, differences {wrong.differences:+.6e}"
    elsewhere = "check at another point (move x a little), or write a function that is smooth there."
    if called.name in KINKS:
        reason = f"{called.name} has a kink at its argument, where the two sides differ in slope: {numbers}"
        return cause("kink", called.place.line, reason, elsewhere)
    if not math.isfinite(wrong.computed) or not math.isfinite(wrong.differences):
        reason = f"{called.name} has no finite derivative of order {wrong.order} at its argument: {numbers}"
        return cause("kink", called.place.line, reason, elsewhere)
    reason = f"PyTorch's derivative of {called.name} is wrong at order {wrong.order} here, alone as well: {numbers}"
    fix = "write it with other operations; `hodiff info` lists what is known to be wrong on this installation."
    return cause("operation", called.place.line, reason, fix)


def _first_wrong(func: Callable[..., Any], args: Any, kwargs: Any, order: int, allow: Sequence[type]) -> Check | None:
    """The first order at which a call's derivatives disagree with differences; None where none does, or none can."""
    generator = torch.Generator().manual_seed(0)
    point = tuple(tensor.detach() for tensor in tensors_in((args, kwargs)) if _varies(tensor))
    if not point:
        return None
    state = torch.get_rng_state()

    def run(leaves: Point) -> list[Tensor]:
        torch.set_rng_state(state)
        given = iter(leaves)
        put = lambda value: _put(value, given)  # noqa: E731
        result = func(*map(put, args), **{name: put(value) for name, value in kwargs.items()})
        return [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]

    def scalar(leaves: Point) -> Tensor:
        return torch.stack([(part * w).sum() for part, w in zip(run(leaves), weights, strict=True)]).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outputs = [each.detach() for each in run(point)]
            weights = [
                torch.randn(each.shape, dtype=each.dtype, generator=generator, device="cpu").to(each)
                for each in outputs
            ]
            path = [tuple(part.to(point[0].device) for part in _directions(point, generator)) for _ in range(order)]
            for level in range(order):
                lower = derived(scalar, path[:level], allow)
                check = compare(lower, point, path[level], level + 1, allow, [""] * len(point))
                if check.verdict == "disagrees":
                    return check
        except Exception as error:  # it cannot be called alone, or has no derivative there: nothing is known of it
            if interrupts(error):
                raise
            return None
        finally:
            torch.set_rng_state(state)
    return None


def _directions(point: Point, generator: torch.Generator) -> Point:
    return random_direction(tuple(part.cpu() for part in point), generator)


def _varies(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _put(value: Any, given: Iterator[Tensor]) -> Any:
    """An argument with the leaves in the place of the tensors that vary, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(given) * 1 if _varies(value) else value.clone()  # it may be changed in place
    if isinstance(value, dict):
        return {name: _put(item, given) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_put(item, given) for item in value)
    return value
