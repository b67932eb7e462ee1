"""Multi-indices: which partial derivatives are wanted, and a record of those found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from hodiff.errors import InputError

Index = tuple[int, ...]


def parsed(index: Any, size: int, name: str = "index") -> Index:
    """A multi-index, sorted; a number is a derivative of first order."""
    index = (index,) if isinstance(index, int) and not isinstance(index, bool) else index
    if not isinstance(index, (tuple, list)):
        raise InputError(f"{name}: got {index!r}, expected a tuple of coordinates such as (0, 0, 1).")
    for coordinate in index:
        if isinstance(coordinate, bool) or not isinstance(coordinate, int) or not 0 <= coordinate < size:
            raise InputError(f"{name}: got {coordinate!r}; x has the coordinates 0 to {size - 1}.")
    return tuple(sorted(index))


class Partials(tuple[Tensor, ...]):
    r"""Some partial derivatives, in the order in which they were asked for: a tuple that also knows them by name.

    `u_x, u_yy = found` unpacks them, and `found[1, 1]` is \(u_{yy}\). A bare number would mean a place to one reader
    and a coordinate to another, so `found[0]` raises.

    Attributes:
        indices: The multi-index of each, sorted.
    """

    indices: tuple[Index, ...]

    def __new__(cls, values: Iterable[Tensor] = (), indices: Sequence[Index] = ()) -> Partials:
        """Values in order, and the multi-index of each."""
        made = super().__new__(cls, values)
        made.indices = tuple(indices)
        return made

    def __getitem__(self, index: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One of them, by its multi-index in any order: `[0, 1]` and `[1, 0]` are the same derivative."""
        if not isinstance(index, tuple):
            raise InputError(
                f"index: got {index!r}, which could be a place or a coordinate. Unpack the derivatives in the order "
                f"asked for, u_x, u_y = ..., or name one by its multi-index, [0,] or [0, 1]."
            )
        wanted = tuple(sorted(index))
        if wanted not in self.indices:
            raise InputError(f"index: {index!r} was not asked for; there are {', '.join(map(str, self.indices))}.")
        return tuple.__getitem__(self, self.indices.index(wanted))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self), self.indices

    def __repr__(self) -> str:
        return f"Partials({', '.join(f'{index}: {value!r}' for index, value in zip(self.indices, self, strict=False))})"
