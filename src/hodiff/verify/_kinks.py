"""Kinks and jumps: decisions that fall otherwise right beside a point."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.graph._line import Line
from hodiff.verify._compare import Point
from hodiff.verify._evaluation import Evaluation
from hodiff.verify._report import Cause, cause


def kinks(evaluation: Evaluation, direction: Point, step: float) -> list[Cause]:
    """The decisions that are others at a step to either side of the point: at most one for a line and a function."""
    right, left = (
        evaluation.recorded(
            tuple(leaf + t * part for leaf, part in zip(evaluation.point, direction, strict=True)), choices=True
        ).choices
        for t in (step, -step)
    )
    found: dict[tuple[Line, str], Cause] = {}
    for key in right.keys() & left.keys():
        (one, name, place), (other, *_) = right[key], left[key]
        if not _same(one, other):
            reason = f"{name} has a kink or a jump here, at x: the derivatives of the two sides differ"
            fix = "check at another point (move x a little), or write a function that is smooth there."
            found[place.line, name] = cause("kink", place.line, reason, fix)
    return list(found.values())


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return one == other
