"""What a check of derivatives says: comparisons, causes, remarks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hodiff.graph._line import Line  # not loaded by `import hodiff`

Kind = Literal["cut", "function", "operation", "kink", "hook", "state", "mixing", "random"]


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
class Cause:
    """A place in the user's code that a disagreement, or a remark, is about.

    Attributes:
        kind: `"cut"` (a value that counts as a constant), `"function"` (the backward of an `autograd.Function`),
            `"operation"` (a derivative of PyTorch's), `"kink"`, `"hook"`, `"state"` (kept between calls), `"mixing"`
            (of samples), `"random"`.
        file: The file of the user's code; empty where no line is known.
        line: The number of the line.
        text: What stands there.
        reason: What it does.
        fix: The way out.
    """

    kind: Kind
    file: str
    line: int
    text: str
    reason: str
    fix: str

    def __str__(self) -> str:
        place = [f"{self.file}:{self.line}   {self.text}"] if self.file else []
        return "\n".join([*place, *(f"    {each}" for each in (self.reason, self.fix) if each)])


def cause(kind: Kind, line: Line | None, reason: str, fix: str) -> Cause:
    """A cause at a line of the user's code; None where no line is to blame."""
    if line is None:
        return Cause(kind, "", 0, "", f"{reason}.", fix)
    return Cause(kind, line.file, line.number, line.text if line.file else "", f"{reason}.", fix)


@dataclass(frozen=True)
class Report:
    """What `check_derivatives` found; `print` it for a table.

    Attributes:
        dtype: The precision in which the comparison ran.
        checks: One entry for each order and direction.
        causes: Where a disagreement comes from, as far as it was found; empty where everything agrees.
        remarks: What else to know of `f`: state that it keeps, samples that it mixes, random numbers, kinks at *x*.
    """

    dtype: torch.dtype
    checks: tuple[Check, ...]
    causes: tuple[Cause, ...] = ()
    remarks: tuple[Cause, ...] = ()

    @property
    def order(self) -> int:
        """The highest order that was checked."""
        return max(check.order for check in self.checks)

    @property
    def ok(self) -> bool:
        """Whether every comparison agrees."""
        return all(check.verdict == "agrees" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"derivatives against central differences, in {self.dtype}:",
                *map(str, self.checks),
                *(["because of"] if self.causes else []),
                *map(str, self.causes),
                *(["to know of f:"] if self.remarks else []),
                *map(str, self.remarks),
            ]
        )
