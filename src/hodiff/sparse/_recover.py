"""Where in the compressed products each entry of a matrix stands: one gather, worked out once."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.sparse._pattern import Pattern


def symmetric(pattern: Pattern, colors: Tensor) -> Tensor:
    """For each entry its place in the flat products `B[color, row]` of a symmetric matrix.

    Entry (i, j) is B[c(j), i] where c(j) occurs once among the columns of row i, else B[c(i), j].
    """
    count = pattern.shape[0]
    here = colors[pattern.columns] * count + pattern.rows
    there = colors[pattern.rows] * count + pattern.columns
    alone = _alone(here)
    turned = _alone(there)
    _check(alone | turned, pattern)
    return torch.where(alone, here, there)


def by_columns(pattern: Pattern, colors: Tensor) -> Tensor:
    """For each entry its place in the flat products `B[color, row]` with sums of columns."""
    here = colors[pattern.columns] * pattern.shape[0] + pattern.rows
    _check(_alone(here), pattern)
    return here


def by_rows(pattern: Pattern, colors: Tensor) -> Tensor:
    """For each entry its place in the flat products `B[color, column]` with sums of rows."""
    here = colors[pattern.rows] * pattern.shape[1] + pattern.columns
    _check(_alone(here), pattern)
    return here


def seeds(colors: Tensor, count: int, like: Tensor) -> Tensor:
    """The sums of the unit vectors of each colour, `(colors, n)`, of the dtype and on the device of a tensor."""
    return like.new_zeros(count, len(colors)).scatter_(0, colors.to(like.device).reshape(1, -1), 1)


def _alone(places: Tensor) -> Tensor:
    """Which places occur once."""
    return torch.bincount(places)[places] == 1 if len(places) else places.bool()


def _check(found: Tensor, pattern: Pattern) -> None:
    if not bool(found.all()):
        entry = int((~found).nonzero()[0, 0])
        raise AssertionError(
            f"the colouring does not tell entry ({int(pattern.rows[entry])}, {int(pattern.columns[entry])}) apart"
        )
