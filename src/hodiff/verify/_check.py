"""`check_derivatives`: does what hodiff (and your function's backward) computes agree with differences?

Order k is checked against differences of order k-1, along random directions: with
F_0 = f and F_k(x) = <grad F_{k-1}(x), d_k>, the slope of F_{k-1} along d_k must be F_k(x). So each
order stands on one already verified, and the code below says nothing about any particular order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff._core._call import call
from hodiff._core._lending import Lending
from hodiff._core._options import Allowed
from hodiff._core._where import Where
from hodiff.calculus._first import grad
from hodiff.errors import DerivativeError, HodiffError, HodiffWarning, InputError
from hodiff.verify._differences import slope

Point = tuple[Tensor, ...]
Scalar = Callable[[Point], Tensor]


@dataclass(frozen=True)
class Check:
    """One comparison: a derivative along one random direction, computed and by differences.

    Attributes:
        order: The order of the derivative.
        computed: By hodiff.
        differences: By finite differences of the order below.
        tolerance: How far apart the two may be, from the differences' own error estimate.
        verdict: `"agrees"`, `"disagrees"`, or `"inconclusive"` where the differences are too rough to tell.
        where: For a disagreement, the parts of *x* along which it shows.
        direction: The direction, one tensor for each part of *x*.
    """

    order: int
    computed: float
    differences: float
    tolerance: float
    verdict: str
    where: tuple[str, ...] = ()
    direction: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        place = f"  (along {', '.join(self.where)})" if self.where else ""
        return (
            f"order {self.order}: computed {self.computed:+.10e}, differences {self.differences:+.10e}, "
            f"apart {abs(self.computed - self.differences):.1e}, tolerance {self.tolerance:.1e}: {self.verdict}{place}"
        )


@dataclass(frozen=True)
class Report:
    """What `check_derivatives` found; `print` it for a table.

    Attributes:
        dtype: The precision in which the comparison ran.
        checks: One entry for each order and direction.
    """

    dtype: torch.dtype
    checks: tuple[Check, ...]

    @property
    def order(self) -> int:
        """The highest order that was checked."""
        return max(check.order for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether every comparison agrees."""
        return all(check.verdict == "agrees" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join([f"derivatives against central differences, in {self.dtype}:", *map(str, self.checks)])


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
) -> Report:
    r"""Check derivatives of `f` against central differences, up to an order, along random directions.

    It finds what no graph shows: a wrong `backward` of an `autograd.Function`, a `detach` that was
    not meant, an operation whose second derivative PyTorch gets wrong. The comparison runs in
    float64 where `f` lets it (the parameters and buffers of modules in *x* are converted for its
    duration), else in the precision of *x* with a wider tolerance.

    Args:
        f: A function of *x* that returns a tensor of any shape.
        x: Where, as for `hodiff.grad`.
        order: The highest order to check, at least 1.
        allow: `@once_differentiable` Functions to accept, as for `hodiff.grad`.
        directions: How many random directions are tried at each order.
        generator: Where the directions come from; None is the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A `Report`: `.ok`, `.dtype`, and `.checks` with both numbers and the tolerance of each
        comparison. Comparisons that are too rough to tell (a kink at *x*) are marked
        `"inconclusive"`, with a warning.

    Raises:
        DerivativeError: Two numbers disagree. The message shows order, both numbers, tolerance, and
            the parts of *x* concerned; `.report` holds everything.
        InputError: As for `hodiff.grad`.
        GraphError: As for `hodiff.grad`.

    Cost:
        For each order k and direction, 14 evaluations of order k-1 and one of order k. Random
        numbers that `f` draws (dropout) are replayed at each evaluation.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.check_derivatives(lambda x: x.sin().sum(), torch.ones(3)).ok
        True
        >>> hodiff.check_derivatives(lambda x: (x * x.detach()).sum(), torch.ones(3))
        Traceback (most recent call last):
            ...
        hodiff.errors.DerivativeError: a derivative of f disagrees with finite differences ...
    """
    _checks.check_integer(order, "order", least=1)
    _checks.check_integer(directions, "directions", least=1)
    where = Where(x)
    try:
        checks = _run(f, where, torch.float64, order, allow, directions, generator, args, kwargs)
        dtype = torch.float64
    except HodiffError:
        raise
    except Exception:  # f cannot run in float64: data in a closure, or a kernel for float32 only
        dtype = where.tensors[0].dtype
        if dtype == torch.float64:
            raise
        checks = _run(f, where, dtype, order, allow, directions, generator, args, kwargs)
    report = Report(dtype, tuple(checks))
    wrong = [check for check in checks if check.verdict == "disagrees"]
    if wrong:
        raise DerivativeError(
            f"a derivative of f disagrees with finite differences (in {dtype}). Usual causes: detach(), .data, .item() "
            f"or no_grad() inside f, or the backward of an autograd.Function"
            + (".\n" if dtype == torch.float64 else "; in this precision also a kink close to x.\n")
            + "\n".join(f"{check}\n{_shown(check.direction, where.names)}" for check in wrong),
            report,
        )
    if not report.ok:
        warnings.warn(
            "some differences are too rough to compare with (is x at a kink of f, or f noisy?):\n"
            + "\n".join(str(check) for check in checks if check.verdict == "inconclusive"),
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
) -> list[Check]:
    if not callable(f) or isinstance(f, Tensor):
        raise InputError("f: check_derivatives evaluates f at many points; give the function, not its value.")
    # No pass of this call's own: it lends and casts; the calls of `grad` below differentiate.
    # Autocast would round what is compared to a few digits.
    device = where.tensors[0].device.type
    with (
        Lending(call(f, where, passes=0, cast=dtype, args=args, kwargs=kwargs)) as lending,
        torch.random.fork_rng(),
        torch.autocast(device, enabled=False),
    ):
        value, random = lambda leaves: lending.run(leaves, leaves), torch.get_rng_state()
        point = tuple(leaf.detach().clone() for leaf in lending.leaves())
        lending.remember()

        def scalar(leaves: Point) -> Tensor:
            torch.set_rng_state(random)
            return (value(leaves) * weights).sum()

        weights = torch.ones(())
        with torch.no_grad():
            output = _checks.check_output(value(point))
        if output.numel() != 1:
            weights = _normal(output, generator)
        paths = [[_direction(point, generator) for _ in range(order)] for _ in range(directions)]
        return [
            check
            for path in paths
            for level in range(order)
            for check in [
                _compare(_derived(scalar, path[:level], allow), point, path[level], level + 1, allow, where.names)
            ]
        ]


def _derived(function: Scalar, path: Sequence[Point], allow: Allowed) -> Scalar:
    """F_k from F_0: the derivative along each direction of `path` in turn."""
    for direction in path:
        function = _along(function, direction, allow)
    return function


def _along(function: Scalar, direction: Point, allow: Allowed) -> Scalar:
    return lambda leaves: _inner(grad(function, leaves, allow=allow), direction)


def _compare(
    function: Scalar, point: Point, direction: Point, order: int, allow: Allowed, names: Sequence[str]
) -> Check:
    gradient = grad(function, point, allow=allow)
    computed = float(_inner(gradient, direction))
    eps = torch.finfo(point[0].dtype).eps

    def line(t: float) -> float:
        return float(function(tuple(leaf + t * part for leaf, part in zip(point, direction, strict=True))).detach())

    numeric = slope(line, eps ** (1 / 7), eps)
    scale = max(
        abs(line(0.0)),
        abs(computed),
        abs(numeric.value),
        float(_norm(gradient) * _norm(direction)) / _size(point) ** 0.5,
    )
    floor = eps**0.4 * scale
    tolerance = 10 * numeric.error + floor + 100 * eps
    apart = abs(computed - numeric.value)
    if apart <= max(tolerance, 3 * numeric.spread):
        clear = apart <= tolerance and numeric.error <= 1e-2 * scale + 100 * eps
        verdict = "agrees" if clear else "inconclusive"
        return Check(order, computed, numeric.value, tolerance, verdict, direction=direction)
    parts = _blame(function, point, direction, gradient, names, eps) if len(point) > 1 else tuple(names)
    return Check(order, computed, numeric.value, tolerance, "disagrees", parts, direction)


def _shown(direction: Point, names: Sequence[str]) -> str:
    """The first entries of a direction, enough to recognise it."""
    parts = [
        f"{name} += t * [{', '.join(f'{float(entry):+.3f}' for entry in part.flatten()[:4])}"
        + (", ...]" if part.numel() > 4 else "]")
        for name, part in zip(names[:3], direction[:3], strict=True)
    ]
    return "  direction: " + ", ".join(parts) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def _blame(
    function: Scalar, point: Point, direction: Point, gradient: Point, names: Sequence[str], eps: float
) -> tuple[str, ...]:
    """The leaves along which alone the disagreement shows."""
    found = []
    for index, name in enumerate(names):

        def line(t: float, index: int = index) -> float:
            moved = list(point)
            moved[index] = point[index] + t * direction[index]
            return float(function(tuple(moved)).detach())

        computed = float((gradient[index] * direction[index]).sum())
        numeric = slope(line, eps ** (1 / 7), eps)
        if abs(computed - numeric.value) > 10 * numeric.error + eps**0.4 * max(abs(computed), abs(numeric.value)):
            found.append(name)
    return tuple(found)


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _direction(point: Point, generator: torch.Generator | None) -> Point:
    """A random direction of length about 1, so that one step suits every number of variables."""
    parts = tuple(_normal(leaf, generator) for leaf in point)
    length = _norm(parts).clamp_min(torch.finfo(torch.float32).tiny)
    return tuple(part / length for part in parts)


def _inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    products = [(a * b).sum() for a, b in zip(left, right, strict=True)]
    return torch.stack(products).sum()


def _norm(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.detach().double().square().sum() for part in parts]).sum().sqrt()


def _size(point: Point) -> int:
    return max(1, sum(leaf.numel() for leaf in point))
