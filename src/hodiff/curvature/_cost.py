"""What an operator takes: `H.cost()` and `H.compiled`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hodiff.curvature import _pictures
from hodiff.curvature._memory import readable
from hodiff.curvature._shown import Shown, number


@dataclass(frozen=True, repr=False)
class CompiledRecord(Shown):
    """What `H.compile()` did.

    Attributes:
        batches: How many batches there are (of this process).
        compiled: How many of them have a compiled pass.
        shapes: How many passes went to the compiler, by shape; others found their code.
        seconds: How long tracing and compiling took.
        error: The largest relative difference from an eager product, of one random vector (or eight) per batch.
        bytes: What compiled passes keep beside the graphs.
        eager: The batches without, by number, and why.
    """

    batches: int
    compiled: int
    shapes: int
    seconds: float
    error: float
    bytes: int
    eager: Mapping[int, str]

    def _facts(self) -> dict[str, str]:
        return {
            "compiled": f"{self.compiled} of {self.batches} batches",
            "shapes": f"{self.shapes} shape{'' if self.shapes == 1 else 's'}",
            "seconds": f"{number(self.seconds)} s",
            "error": f"error {number(self.error)}",
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        reasons = "; ".join(sorted(set(self.eager.values())))
        rest = f" The others stay eager: {reasons}." if self.eager else ""
        return f"{self.compiled} of {self.batches} batches have a compiled pass.{rest}"


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
