"""Order k against differences of order k - 1 along random directions: nothing here says how many orders there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hodiff._core._options import Allowed
from hodiff.calculus._first import grad
from hodiff.verify._differences import Slope, slope
from hodiff.verify._report import Check

Point = tuple[Tensor, ...]
Scalar = Callable[[Point], Tensor]

FINER = 1 / 64
"""How much smaller the second try's steps are: a kink that only the first reached is no fault."""


def derived(function: Scalar, path: Sequence[Point], allow: Allowed) -> Scalar:
    """F_k from F_0: the derivative along each direction of `path` in turn."""
    for direction in path:
        function = _along(function, direction, allow)
    return function


def _along(function: Scalar, direction: Point, allow: Allowed) -> Scalar:
    # The zeros connect a slope that does not depend on the leaves (of a linear function): its derivative is 0.
    return lambda leaves: inner(grad(function, leaves, allow=allow), direction) + 0 * sum(leaf.sum() for leaf in leaves)


def compare(
    function: Scalar, point: Point, direction: Point, order: int, allow: Allowed, names: Sequence[str]
) -> Check:
    """The derivative of `function`, itself of order `order - 1`, along a direction, by both ways."""
    gradient = grad(function, point, allow=allow)
    first = _judged(function, point, direction, order, gradient, names, 1.0)
    if first.verdict == "agrees":
        return first
    second = _judged(function, point, direction, order, gradient, names, FINER)
    return second if second.verdict == "agrees" else first


def _judged(
    function: Scalar,
    point: Point,
    direction: Point,
    order: int,
    gradient: Point,
    names: Sequence[str],
    finer: float,
) -> Check:
    eps = epsilon(point)
    computed = float(inner(gradient, direction))
    numeric = difference(function, point, direction, finer)
    scale = max(
        abs(value(function, point)),
        abs(computed),
        abs(numeric.value),
        float(norm(gradient) * norm(direction)) / size(point) ** 0.5,
    )
    tolerance = 10 * numeric.error + eps**0.4 * scale + 100 * eps
    apart = abs(computed - numeric.value)
    if apart <= max(tolerance, 3 * numeric.spread):
        clear = apart <= tolerance and numeric.error <= 1e-2 * scale + 100 * eps
        verdict = "agrees" if clear else "inconclusive"
        return Check(order, computed, numeric.value, tolerance, verdict, direction=direction)
    parts = _parts(function, point, direction, gradient, names) if len(point) > 1 else tuple(names)
    return Check(order, computed, numeric.value, tolerance, "disagrees", parts, direction)


def value(function: Scalar, point: Point) -> float:
    """A value of the function, as a number."""
    return float(function(point).detach())


def difference(function: Scalar, point: Point, direction: Point, finer: float = 1.0) -> Slope:
    """The slope of `function` along a direction, numerically."""
    eps = epsilon(point)

    def line(t: float) -> float:
        return value(function, tuple(leaf + t * part for leaf, part in zip(point, direction, strict=True)))

    return slope(line, finer * first_step(eps), eps)


def first_step(eps: float) -> float:
    """The largest step of the differences."""
    return eps ** (1 / 7)


def _parts(function: Scalar, point: Point, direction: Point, gradient: Point, names: Sequence[str]) -> tuple[str, ...]:
    """The leaves along which alone the disagreement shows."""
    found, eps = [], epsilon(point)
    for index, name in enumerate(names):
        alone = tuple(part if i == index else torch.zeros_like(part) for i, part in enumerate(direction))
        computed, numeric = float(inner(gradient, alone)), difference(function, point, alone)
        if abs(computed - numeric.value) > 10 * numeric.error + eps**0.4 * max(abs(computed), abs(numeric.value)):
            found.append(name)
    return tuple(found)


def epsilon(point: Point) -> float:
    """The relative precision of a point."""
    return torch.finfo(point[0].dtype).eps


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Random numbers, shaped like a tensor."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def random_direction(point: Point, generator: torch.Generator | None) -> Point:
    """A random direction of length about 1, so that one step suits every number of variables."""
    parts = tuple(normal(leaf, generator) for leaf in point)
    length = norm(parts).clamp_min(torch.finfo(torch.float32).tiny)
    return tuple(part / length for part in parts)


def inner(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The inner product of two points."""
    products = [(a * b).sum() for a, b in zip(left, right, strict=True)]
    return torch.stack(products).sum()


def norm(parts: Sequence[Tensor]) -> Tensor:
    """The length of a point."""
    return torch.stack([part.detach().double().square().sum() for part in parts]).sum().sqrt()


def size(point: Point) -> int:
    """How many numbers a point has."""
    return max(1, sum(leaf.numel() for leaf in point))
