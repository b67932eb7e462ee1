"""What an operator takes: `H.cost()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hodiff.curvature import _pictures
from hodiff.curvature._memory import readable


@dataclass(frozen=True)
class Cost:
    """What an operator takes, in bytes, evaluations of the function, and reverse passes.

    Attributes:
        size: The number of columns, D.
        dense_bytes: The matrix of `dense()`.
        product_bytes: One product: its result, and about its temporaries.
        cache_bytes: The graphs of all batches, if kept; measured on one batch before the first product.
        free_bytes: What is free on the device.
        batches: How many batches there are; None if that is unknown.
        kept: How many of them have their graph kept.
        evaluations: Graphs of the function per product.
        passes: Reverse passes per product.
        dense_passes: Reverse passes of `dense()`, batched ones counted once.
    """

    size: int
    dense_bytes: int
    product_bytes: int
    cache_bytes: int
    free_bytes: int
    batches: int | None
    kept: int
    evaluations: int
    passes: int
    dense_passes: int

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes of the matrix, the cache and a product beside what is free; returns matplotlib's axes."""
        sizes = {"free": self.free_bytes, "dense()": self.dense_bytes, "cache": self.cache_bytes}
        return _pictures.sizes(axes, {**sizes, "one product": self.product_bytes})

    def __str__(self) -> str:
        return (
            f"dense(): {readable(self.dense_bytes)}, {self.dense_passes} passes\n"
            f"one product: {readable(self.product_bytes)}, {self.evaluations} evaluations, {self.passes} passes\n"
            f"cache: {readable(self.cache_bytes)}, {self.kept} of {self.batches} batches kept\n"
            f"free: {readable(self.free_bytes)}"
        )
