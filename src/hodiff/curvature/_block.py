"""Blocks of operators: which leaves a name means, and the block of an operator that has none of its own."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import final

from torch import Tensor

from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._space import Space
from hodiff.errors import InputError

Parts = list[Tensor]


def chosen_leaves(operator: LinearOperator, patterns: tuple[str, ...]) -> list[int]:
    """The numbers of the leaves whose names match."""
    if operator.shape[0] != operator.shape[1] or not operator._domain.like(operator._range):
        raise InputError(f"block: needs rows and columns of the same kind; {operator!r} has not.")
    names = operator._domain.names
    chosen: set[int] = set()
    for pattern in patterns or ("*",):
        if not isinstance(pattern, str):
            raise InputError(
                f"block: got a {type(pattern).__name__}, expected names of leaves: {', '.join(names[:6])}."
            )
        found = {index for index, name in enumerate(names) if _matches(name, pattern)}
        if not found:
            near = difflib.get_close_matches(pattern.rstrip(".*"), names, n=3, cutoff=0.4) or names[:6]
            raise InputError(f"block: {pattern!r} matches no leaf. Near: {', '.join(near)}.")
        chosen |= found
    return sorted(chosen)


def _matches(name: str, pattern: str) -> bool:
    if name == pattern:  # names like x[0] are no patterns
        return True
    while name:
        if fnmatchcase(name, pattern):
            return True
        name = name.rpartition(".")[0]
    return False


class OfOne(LinearOperator):
    """An operator made of one other."""

    def __init__(self, inner: LinearOperator) -> None:
        super().__init__()
        self._inner = inner

    @property
    def symmetric(self) -> bool:
        """Whether that one is."""
        return self._inner.symmetric

    def _chunk(self, count: int) -> int:
        return self._inner._chunk(count)


@final
class BlockOperator(OfOne):
    """Some rows, and the same columns, of any operator: its vectors are padded with zeros."""

    def __init__(self, inner: LinearOperator, chosen: list[int]) -> None:
        super().__init__(inner)
        self._chosen = chosen
        self._space = inner._domain.only(chosen)

    @property
    def _domain(self) -> Space:
        return self._space

    @property
    def _range(self) -> Space:
        return self._space

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        return self._cut(self._inner._product(self._padded(parts, count), count))

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        return self._cut(self._inner._product_transposed(self._padded(parts, count), count))

    def _padded(self, parts: Parts, count: int | None) -> Parts:
        whole = self._inner._domain.zeros(count)
        for index, part in zip(self._chosen, parts, strict=True):
            whole[index] = part
        return whole

    def _cut(self, parts: Parts) -> Parts:
        return [parts[index] for index in self._chosen]

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return BlockOperator(self._inner, [self._chosen[index] for index in chosen])

    def _about(self) -> str:
        return f"block of {self._inner!r}"
