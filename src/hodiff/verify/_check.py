"""`check_derivatives`: does what hodiff (and your function's backward) computes agree with
differences?

Order k is checked against differences of order k-1, along random directions: with
F_0 = f and F_k(x) = <grad F_{k-1}(x), d_k>, the slope of F_{k-1} along d_k must be F_k(x). So each
order stands on one already verified. Where two numbers disagree, `_blame` says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _nodes, _refusals, _settings
from hodiff._core._arguments import Allowed
from hodiff._core._call import call, refuse_stand_ins
from hodiff._core._faults import interrupts
from hodiff._core._lending import EvaluationContext
from hodiff._core._vectors import check_generator
from hodiff._core._where import Where
from hodiff.errors import DerivativeError, HodiffError, HodiffWarning, InputError
from hodiff.verify import _blame, _trace
from hodiff.verify._differences import (
    Cause,
    Check,
    DerivativeReport,
    Point,
    compare,
    derived,
    epsilon,
    random_direction,
)


def check_derivatives(
    f: Callable[..., Any],
    x: Any,
    *,
    order: int = 2,
    allow: Allowed = (),
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
        each evaluation), samples that it mixes (batch norm), random numbers, kinks at *x*.
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
            f"{_because(report)}\n"
            + "\n".join(f"{check}\n{_shown(check.direction, where.names)}" for check in wrong),
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
    allow: Allowed,
    directions: int,
    generator: torch.Generator | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> DerivativeReport:
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(
            "f: check_derivatives evaluates f at many points; give the function, not its value."
        )
    surroundings = _trace.Surroundings(f)
    # No pass of this call's own: it lends and casts; the calls of `grad` below differentiate.
    # Autocast would round what is compared to a few digits.
    device = where.tensors[0].device.type
    with (
        EvaluationContext(
            call(f, where, passes=0, allow=allow, cast=dtype, args=args, kwargs=kwargs)
        ) as context,
        torch.random.fork_rng(),
        _settings.autocast(device),
    ):
        evaluation = _trace.ScalarEvaluation(context, generator)
        try:
            remarks = _trace.remarks(evaluation, surroundings)
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
                        causes = _blame.causes(evaluation, path, checks[-1], allow)
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


def _warn_of_zeros(evaluation: Any) -> None:
    """Say it where a network has no others than the zeros that all second derivatives are."""
    leaves = tuple(part.detach().requires_grad_() for part in evaluation.point)
    with _settings.recording():
        value = evaluation.scalar(leaves)
    _refusals.warn_of_zeros(lambda: _nodes.survey([value]).operations(), [], None)


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


def _shown(direction: Point, names: Sequence[str]) -> str:
    """The first entries of a direction, enough to recognize it."""
    parts = [
        f"{name} += t * [{', '.join(f'{float(entry):+.3f}' for entry in part.flatten()[:4])}"
        + (", ...]" if part.numel() > 4 else "]")
        for name, part in zip(names[:3], direction[:3], strict=True)
    ]
    return (
        "  direction: "
        + ", ".join(parts)
        + (f", and {len(names) - 3} more" if len(names) > 3 else "")
    )
