"""Objects that are no tensors, nor those of another library: their errors say what to write
instead.
"""

from __future__ import annotations

import numbers
from abc import ABC
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from hodiff._core import _tree
from hodiff._core._arguments import kind
from hodiff._core._elsewhere import ELSEWHERE, Misfit
from hodiff.errors import HodiffError, InputError

__all__ = ["NoNumber", "Unlike"]


class NoAttribute(HodiffError, AttributeError):
    """A name that an object does not have: `hasattr` is False, and the error says what to write."""


class Unlike(ABC):  # noqa: B024
    """A value taken for a tensor or for another library's object:
    its errors say what to write instead.
    """

    def _instead(self, name: str) -> str:
        """The spelling to use for an attribute of this name."""
        keys = (f"{cls.__name__}.{end}" for cls in type(self).__mro__ for end in (name, "*"))
        return next(ELSEWHERE[key] for key in keys if key in ELSEWHERE)

    if not TYPE_CHECKING:  # a checker of types says it before anything runs

        def __getattr__(self, name: str) -> Any:
            """Names of other libraries, and slips."""
            # a property whose computation met such an error: that is the one to show
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)
            words = f"{kind(self)} has no attribute {name!r}: {self._instead(name)}"
            raise NoAttribute(words, name=name, obj=None)  # Python would add names that are near

        def __format__(self, spec: str) -> str:
            """Refuse the format of a number."""
            if spec:
                raise InputError(
                    f"{kind(self)} has no format {spec!r}: {self._instead('__format__')}"
                )
            return str(self)

        def __len__(self) -> NoReturn:
            """PyTorch and NumPy ask it of sequences."""
            raise TypeError(f"{kind(self)} has no length: {self._instead('__len__')}")

        def __bool__(self) -> bool:
            """Without a length it is an object as any other."""
            return True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse the value as an argument of PyTorch; of an operator such as `@`, whose other side
        is a tensor, Python asks the value itself then.
        """
        given = _tree.flatten([*args, *(kwargs or {}).values()])[0]
        raise next(
            Misfit(f"{kind(value)} is no tensor: {value._instead(func.__name__)}")
            for value in given
            if isinstance(value, Unlike)
        )


class NoNumber(Unlike):
    """A record whose number is its value: arithmetic with the record itself is a slip."""

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """NumPy would make an array that holds the record, and fail later and elsewhere."""
        raise TypeError(f"{kind(self)} is not an array: {self._instead('')}")

    def _instead(self, name: str) -> str:
        return f"it is a record with fields .{', .'.join(vars(self))}."

    def _refuse(self, *others: object) -> NoReturn:
        raise InputError(f"{kind(self)} is not a number: {self._instead('')}")

    if not TYPE_CHECKING:
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
        __rtruediv__ = __neg__ = __matmul__ = __rmatmul__ = __pow__ = __float__ = _refuse
        __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __abs__ = __int__ = __round__ = _refuse
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            """Whether it is the same record; a number is no record, and `False` would hide that."""
            return self._refuse() if isinstance(other, (numbers.Number, Tensor)) else self is other
