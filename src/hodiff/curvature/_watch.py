"""Who looks on while an estimator loops: a bar, and the caller's own function."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from hodiff.curvature._operator import LinearOperator, together
from hodiff.errors import InputError

Callback = Callable[[Any], object]
"""`callback=`: is given the record as it stands, again and again; what it returns is ignored."""


class Watch:
    """The bar and the callback of one call: `with Watch(...) as watch`, and `watch(record)` at each look.

    Attributes:
        spent: How many products the call has taken.
    """

    def __init__(
        self, name: str, operator: LinearOperator, total: int | None, callback: Callback | None, progress: bool
    ) -> None:
        if callback is not None and not callable(callback):
            raise InputError(
                f"callback: is a {type(callback).__name__}; expected a function of the record as it stands."
            )
        self._operator = operator
        self._before = operator.products
        self._callback = callback
        self._bar = _bar(name, total) if progress else None
        self._together = together(operator)

    @property
    def spent(self) -> int:
        return self._operator.products - self._before

    def __call__(self, record: Callable[[int], Any]) -> None:
        """Show how far it is; `record` makes the record, given the number of products."""
        if self._bar is not None:
            self._bar.update(self.spent - self._bar.n)
        if self._callback is not None:
            self._callback(record(self.spent))

    def __enter__(self) -> Watch:
        self._together.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        self._together.__exit__(kind, error, at)


def _bar(name: str, total: int | None) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc=f"hodiff: {name}", unit="product", leave=False)
