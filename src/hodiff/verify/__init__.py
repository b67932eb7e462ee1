"""Checking derivatives against finite differences: `check_derivatives`.

Order k is checked against differences of order k-1, along random directions: with
F_0 = f and F_k(x) = <grad F_{k-1}(x), d_k>, the slope of F_{k-1} along d_k must be F_k(x). So each
order stands on one already verified. Where two numbers disagree, `causes_of` says why.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _messages, _nodes, _settings, _tree, _values
from hodiff._core._call import call, refuse_stand_ins
from hodiff._core._faults import interrupts
from hodiff._core._lending import EvaluationContext
from hodiff._core._vectors import check_generator, draw
from hodiff._core._where import Where
from hodiff.errors import (
    CustomFunctionWarning,
    DerivativeError,
    HodiffError,
    HodiffWarning,
    InputError,
)
from hodiff.graph._classes import CLASSES
from hodiff.graph._names import user_frames
from hodiff.graph._record import tensors_in
from hodiff.graph._source import Line, line_of
from hodiff.verify import _trace
from hodiff.verify._differences import (
    Cause,
    Check,
    DerivativeReport,
    Point,
    Scalar,
    Slope,
    cause,
    compare,
    derived,
    difference,
    epsilon,
    first_step,
    random_direction,
)
from hodiff.verify._trace import (
    ELSEWHERE,
    KINKS,
    Called,
    Place,
    ScalarEvaluation,
    Site,
    copied,
    kinks,
)


def check_derivatives(
    f: Callable[..., Any],
    x: Any,
    *,
    order: int = 2,
    allow: _arguments.Allowed = (),
    directions: int = 3,
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> DerivativeReport:
    r"""Compare the derivatives of `f` with central differences, up to an order, along random
    directions.

    It finds what no graph shows: a wrong `backward` of an `autograd.Function`, an unintended
    `detach`, an operation whose second derivative is wrong in PyTorch. The comparison runs in
    float64 if `f` allows it (parameters and buffers of modules in *x* are converted for its
    duration), and otherwise in the precision of *x* with a wider tolerance.

    If they disagree, it looks for the cause and names the line. A value that left the graph
    (`detach`, `.data`, `no_grad`, `.item()`, `torch.tensor(y)`, NumPy) is the cause exactly if the
    differences change when it is held at its value at *x*; this is tried for each such value. The
    derivative is also tried without hooks. Each `autograd.Function`, and then each operation, is
    checked alone, with the same arguments. Decisions (comparisons, sides of kinks) that differ next
    to *x* are reported as kinks.

    Args:
        f: A function of *x* that returns a tensor of any shape.
        x: Where: a tensor, a container of tensors, a module, or `hodiff.select(module, ...)`.
        order: The highest order to check, at least 1.
        allow: Intended cuts, each by its line (`"net.py:12"`) or by the function that contains it:
            the differences hold their values, and the rest is checked. Also `@once_differentiable`
            Functions to accept.
        directions: How many random directions to try at each order.
        generator: The source of the random directions; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A `DerivativeReport`: `.ok`, `.dtype`, `.checks` with both numbers and the tolerance of each
        comparison, and `.remarks`: state that `f` keeps between calls (attributes are put back for
        each evaluation), random numbers, kinks at *x*.
        Comparisons that are too rough to tell are marked `"inconclusive"`, with a warning.

    Raises:
        DerivativeError: Two numbers disagree. The message shows the causes with their lines and
            ways out, the order, both numbers, tolerance, and the parts of *x* concerned; `.report`
            holds everything. Orders above are not tried then.
        InputError: *x* is not real floating point.
        GraphError: `f` does not depend on *x*, or reaches it other than through its argument.

    Cost:
        For each order k and direction, 14 evaluations of order k-1 and one of order k, and some six
        evaluations of `f`; for a disagreement 14 more for each cut. Random numbers that `f` draws
        (dropout) are replayed at each evaluation.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.check_derivatives(lambda x: x.sin().sum(), torch.ones(3)).ok
        True
        >>> hodiff.check_derivatives(lambda x: (x * x.detach()).sum(), torch.ones(3))
        Traceback (most recent call last):
            ...
        hodiff.errors.DerivativeError: a derivative of f disagrees with finite differences ...

        A cut that is meant is named, and the rest is checked:

        >>> def damped(x):
        ...     return (x * x.detach()).sum()
        >>> hodiff.check_derivatives(damped, torch.ones(3), allow="damped").ok
        True
    """
    _arguments.check_integer(order, "order", least=1)
    _arguments.check_integer(directions, "directions", least=1)
    check_generator(generator)
    refuse_stand_ins()
    where = Where(x)
    try:
        report = _run(f, where, torch.float64, order, allow, directions, generator, args, kwargs)
    except Exception as error:
        # f cannot run in float64: data in a closure, or a kernel for float32 only
        dtype = where.tensors[0].dtype
        if dtype == torch.float64 or isinstance(error, HodiffError) or interrupts(error):
            raise
        report = _run(f, where, dtype, order, allow, directions, generator, args, kwargs)
    checks, dtype = report.checks, report.dtype
    wrong = [check for check in checks if check.verdict == "disagrees"]
    if wrong:
        raise DerivativeError(
            f"a derivative of f disagrees with finite differences (in {dtype}).\n"
            f"{_because(report)}\n" + "\n".join(map(str, wrong)),
            report,
        )
    if not report.ok:
        known = _known(report)
        warnings.warn(
            "some finite differences are too inaccurate to compare with (is x at a kink of f, or f "
            "noisy?):\n"
            + "\n".join(str(check) for check in checks if check.verdict == "inconclusive")
            + (f"\n{known}" if known else ""),
            HodiffWarning,
            stacklevel=2,
        )
    return report


def _run(
    f: Callable[..., Any],
    where: Where,
    dtype: torch.dtype,
    order: int,
    allow: _arguments.Allowed,
    directions: int,
    generator: torch.Generator | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> DerivativeReport:
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(
            "f: check_derivatives evaluates f at many points; give the function, not its value."
        )
    before = _trace.states(f)
    # No pass of this call's own: it lends and casts; the calls of `grad` below differentiate.
    # Autocast would round what is compared to a few digits.
    device = where.tensors[0].device.type
    with (
        EvaluationContext(
            call(f, where, passes=0, allow=allow, cast=dtype, args=args, kwargs=kwargs)
        ) as context,
        torch.random.fork_rng(),
        _settings.autocast(device),
        _settings.Scope(partial(_ignore, CustomFunctionWarning)),
    ):
        evaluation = _trace.ScalarEvaluation(context, generator)
        try:
            remarks = _trace.remarks(evaluation, f, before)
            evaluation.steady = True
            evaluation.allow(context.call.allow)
            point = evaluation.point
            paths = [
                [random_direction(point, generator) for _ in range(order)]
                for _ in range(directions)
            ]
            checks: list[Check] = []
            causes: list[Cause] = []
            for level in range(order):
                for path in paths:
                    lower = derived(evaluation.scalar, path[:level], allow)
                    checks.append(compare(lower, point, path[level], level + 1, allow, where.names))
                    if checks[-1].verdict != "agrees" and not causes:
                        causes = causes_of(evaluation, path, checks[-1], allow)
                if any(check.verdict == "disagrees" for check in checks):
                    break  # nothing stands on this order
            at_x = _trace.kinks(evaluation, paths[0][0], epsilon(point) ** 0.5)
            remarks += [kink for kink in at_x if kink not in causes]
            if order >= 2 and not (
                where.module_slices or any(c.computed for c in checks if c.order >= 2)
            ):
                _warn_of_zeros(evaluation)
        finally:
            evaluation.attributes.restore()
        return DerivativeReport(dtype, tuple(checks), tuple(causes), tuple(remarks))


def _ignore(category: type[Warning], undo: _settings.Undo) -> None:
    """Leave out a category of warnings.

    `warnings.catch_warnings` would put back what other threads have set meanwhile, and stay where
    it is interrupted as it ends.
    """
    filters: Any = warnings.filters
    own = ("ignore", None, category, None, 0)
    undo += [lambda: filters.__setitem__(slice(None), [e for e in filters if e is not own])]
    filters.insert(0, own)


def _warn_of_zeros(evaluation: Any) -> None:
    """Say it where a network has no others than the zeros that all second derivatives are."""
    leaves = tuple(part.detach().requires_grad_() for part in evaluation.point)
    with _settings.recording():
        value = evaluation.scalar(leaves)
    _values.warn_of_zeros(lambda: _nodes.survey([value]).operations(), [], None)


def _because(report: DerivativeReport) -> str:
    """The causes in words, or where to look if none was found."""
    return _known(report) or (
        "No cut, Function, hook or operation was found that explains it alone. What remains: "
        "values that leave PyTorch unseen (NumPy, another library, `nn.Parameter(y)`), "
        "a gradient taken inside f"
        + ("." if report.dtype == torch.float64 else "; in this precision also a kink close to x.")
    )


def _known(report: DerivativeReport) -> str:
    """The causes, and the state that may be one."""
    causes = [*report.causes, *(remark for remark in report.remarks if remark.kind == "state")]
    return "\n".join(["because of", *map(str, causes)]) if causes else ""


# --- why a derivative differs from its differences: each cut, hook, kink, operation tried alone ---


LAST = 2**-6
"""The last step of the differences, of the first."""


def causes_of(
    evaluation: ScalarEvaluation, path: Sequence[Point], failed: Check, allow: _arguments.Allowed
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
    blamed += _hooks(evaluation, path, failed, allow)
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
    path: Sequence[Point],
    failed: Check,
    allow: _arguments.Allowed,
) -> list[Cause]:
    """Hooks without which the derivative is what the differences say."""
    places = evaluation.recorded().hooks
    fix = "remove it for this check, or write what it does into f."
    if places:
        with evaluation.altered(hooks=False):
            slope = derived(evaluation.scalar, path[: failed.order], allow)
            without = float(slope(evaluation.point))
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


def functions(evaluation: ScalarEvaluation, order: int, allow: _arguments.Allowed) -> list[Cause]:
    """The Functions in the graph whose backward is wrong, up to an order."""
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in evaluation.point)
    with _settings.grad_mode(True):
        output = evaluation.run(leaves)
    function_causes = []
    for kind in dict.fromkeys(kind for kind, _ in _nodes.survey([output]).functions()):
        if kind.__module__.startswith(("torch.", "hodiff.")):
            continue
        with _settings.owned(kind), _watched(kind) as uses, _settings.grad_mode(True):
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
    if called.name in KINKS:
        what = "has a kink at its argument, where the two sides differ in slope"
    elif not math.isfinite(wrong.computed - wrong.differences):
        what = f"has no finite derivative of order {wrong.order} at its argument"
    else:
        reason = (
            f"PyTorch's derivative of {called.name} is wrong at order {wrong.order} here, "
            f"alone as well: {numbers}"
        )
        return cause("operation", called.place.line, reason, "write it with other operations.")
    return cause("kink", called.place.line, f"{called.name} {what}: {numbers}", ELSEWHERE)


def _first_wrong(
    func: Callable[..., Any], args: Any, kwargs: Any, order: int, allow: Sequence[type]
) -> Check | None:
    """The first order at which a call's derivatives disagree with differences; None where none
    does, or none can.
    """
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

    with _settings.Scope(partial(_ignore, Warning)):
        try:
            generator = torch.Generator().manual_seed(0)
            weights = [draw(each.shape, each, "gaussian", generator) for each in run(point)]
            path = [random_direction(point, generator) for _ in range(order)]
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
