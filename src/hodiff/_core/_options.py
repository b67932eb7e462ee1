"""The options that several functions share: one alias for each vocabulary, and what overloads pass on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hodiff._core._faults import interrupts
from hodiff.errors import InputError

Allowed = Sequence[str | type] | str | type
"""`allow=`: the `autograd.Function` classes, or their names, whose backward may be `@once_differentiable`."""

ChunkSize = int | Literal["auto"]
"""How many vectors one pass takes; `"auto"` bounds its memory."""

Probes = Literal["rademacher", "gaussian"]
"""The law of random vectors v; E[v vᵀ] = I under both."""

Reduction = Literal["mean", "sum", "none"]
"""From one value for each sample to a loss."""

ExtremeReduction = Literal["max", "mean", "sum", "none"]
"""From values of which the largest may be what counts."""

PatchReduction = Literal["sum", "mean"]
"""From several outputs of one sample to one."""

SecondMethod = Literal["exact", "differences"]
"""How a second directional derivative is computed."""


SparseOutput = Literal["torch", "csr", "scipy", "auto"]
"""In which form a sparse matrix is wanted."""


class Common(TypedDict, total=False):
    """What every function of the calculus takes.

    For overloads alone: at run time signatures are spelled out.
    """

    create_graph: bool | None
    strict: bool | None
    allow: Allowed
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class Chunked(Common, total=False):
    """And what takes many vectors."""

    chunk_size: ChunkSize


class Batched(Common, total=False):
    """And what knows independent samples."""

    batch_ndim: int
    check_independence: bool


class ChunkedBatched(Chunked, Batched, total=False):
    """And what does both."""


def check_option(value: Any, vocabulary: Any, name: str) -> None:
    """Raise unless `value` is a word of the vocabulary, one of the `Literal`s above."""
    words = vocabulary.__args__
    if value.__class__ is not str or value not in words:  # an array would compare by entries
        *others, final = [f'"{word}"' for word in words]
        raise InputError(f"{name}: got {value!r}, expected {', '.join(others)} or {final}.")


class Names(tuple[str | type, ...]):
    """Names and classes, as `allowed` has found them to be."""

    __slots__ = ()


def allowed(allow: Any) -> Sequence[str | type]:
    """`allow=` as a sequence; raise unless it holds names and classes."""
    if allow.__class__ is Names or (allow.__class__ is tuple and not allow):  # as nearly always
        return allow
    found = (allow,) if isinstance(allow, (str, type)) else allow
    if not isinstance(found, (tuple, list, set, frozenset)) or not all(isinstance(n, (str, type)) for n in found):
        raise InputError(f"allow: is a {type(allow).__name__}, expected names or classes of autograd.Functions.")
    return Names(found)


def is_set(value: Any, name: str) -> bool:
    """Whether a flag is on; raise for what is neither true nor false, as an array, or a word: "no" would be true."""
    if value is True or value is False:  # as nearly always
        return value
    try:
        if bool(value == bool(value)):
            return bool(value)
    except Exception as error:  # it is no flag then, whatever it is
        if interrupts(error):
            raise
    shown = f"{value!r}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    raise InputError(f"{name}: is {shown}, expected True or False.")
