"""The options of functions, for overloads alone: at run time signatures are spelled out.

Two of them, which few calls ask for, load what they need when they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hodiff._core._arguments import Allowed, Checkpoint, ChunkSize, is_set


class CallOptions(TypedDict, total=False):
    """The options of every function that takes a function.

    For overloads alone: at run time signatures are spelled out.
    """

    create_graph: bool | None
    allow: Allowed
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class CommonOptions(CallOptions, total=False):
    """The options of every function of the calculus."""

    strict: bool | None


class ChunkedOptions(CommonOptions, total=False):
    """The options of functions that take many vectors."""

    chunk_size: ChunkSize


class BatchedOptions(CommonOptions, total=False):
    """The options of functions that know independent samples."""

    batch_ndim: int
    check_independence: bool


class ChunkedBatchedOptions(ChunkedOptions, BatchedOptions, total=False):
    """The options of functions of many vectors at independent samples."""


class ProductOptions(ChunkedBatchedOptions, total=False):
    """The options of products, in which parts of `f` may run again."""

    checkpoint: Checkpoint


class ProductWithoutExtra(ProductOptions, total=False):
    """The options of such a product where `f` returns the loss alone."""

    has_aux: Literal[False]


class WithoutExtra(ChunkedBatchedOptions, total=False):
    """The options of such a function where `f` returns the loss alone."""

    has_aux: Literal[False]


def check_samples(asked: bool, f: Any, where: Any, **given: Any) -> None:
    """Do what `check_independence=` asks for."""
    if is_set(asked, "check_independence"):
        from hodiff._core import _independence

        _independence.check(f, where, **given)


def in_blocks(f: Any, where: Any, checkpoint: Checkpoint) -> Any:
    """The function whose parts run again in each pass, as `checkpoint=` asks for."""
    from hodiff.memory import _blocks

    return _blocks.in_blocks(f, where, checkpoint)
