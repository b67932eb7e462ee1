"""Which operations of a function have a rule, and what each costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hodiff._core import _checks
from hodiff.jets import _push
from hodiff.jets._registry import NoRule


@dataclass(frozen=True)
class Operation:
    """One operation that `f` used.

    Attributes:
        name: Its name in PyTorch.
        kind: The kind of its rule: elementwise, bilinear, linear, special, constant, or `"fallback"`.
        calls: How often it was called.
        seconds: The time that its rule took, in all.
    """

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """What Taylor mode did with a function; `str` of it is a table.

    Attributes:
        order: The order of the expansion.
        directions: How many directions it carried.
        operations: What `f` used, the dearest first. Composite operations appear as what they are made of.
        missing: The operation that stopped the evaluation, in words; None when all went well.
    """

    order: int
    directions: int
    operations: tuple[Operation, ...]
    missing: str | None

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """The operations that had no rule of their own and went through nested reverse mode."""
        return tuple(each.name for each in self.operations if each.kind == "fallback")

    def __str__(self) -> str:
        lines = [f"Taylor mode, order {self.order}, {self.directions} direction(s)"]
        lines += [
            f"  {each.name:<24} {each.kind:<12} {each.calls:>5} calls {1e3 * each.seconds:>9.2f} ms"
            for each in self.operations
        ]
        if self.missing:
            lines.append(f"  stopped: {self.missing}")
        return "\n".join(lines)


class Tally:
    """Counts the rules of an expansion."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[float]] = {}

    def count(self, name: str, kind: str, seconds: float) -> None:
        """One more call of a rule."""
        entry = self._found.setdefault((name, kind), [0, 0.0])
        entry[0] += 1
        entry[1] += seconds

    def operations(self) -> tuple[Operation, ...]:
        """What was counted, the dearest first."""
        found = [Operation(name, kind, int(n), seconds) for (name, kind), (n, seconds) in self._found.items()]
        return tuple(sorted(found, key=lambda each: -each.seconds))


def report(
    f: Callable[..., Any],
    x: Tensor,
    *,
    order: int = 2,
    batch_ndim: int = 1,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Which operations of `f` Taylor mode knows, which it sends through nested reverse mode, and their times.

    Args:
        f: A function of *x*, as for `hodiff.laplacian`.
        x: A tensor of shape `(*batch, *event)`.
        order: The order of the expansion; 2 is that of a Laplacian.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A record with one row for each operation; printed, it is a table.

    Raises:
        InputError: *x* is not a real floating point tensor.

    Cost:
        One evaluation of `f` in Taylor mode, in as many directions as a sample of *x* has entries.

    Examples:
        >>> import torch, hodiff
        >>> found = hodiff.jets.report(lambda x: torch.logaddexp(x.sin(), x).sum(-1), torch.ones(1, 2))
        >>> sorted((each.name, each.kind) for each in found.operations)
        [('logaddexp', 'fallback'), ('sin', 'elementwise'), ('sum', 'linear')]
    """
    _checks.check_real_tensor(x, "x")
    _checks.check_batch([x], ["x"], batch_ndim)
    _checks.check_integer(order, "order", least=1)
    tally, missing = Tally(), None
    seeds = _push.units(x, batch_ndim)
    try:
        _push.push(f, [x], [[seeds]], order, record=False, tally=tally, args=args, kwargs=kwargs)
    except NoRule as error:
        missing = str(error)
    return Report(order, len(seeds), tally.operations(), missing)
