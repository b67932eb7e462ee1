"""Fields: differential operators of functions of coordinates."""

from typing import TYPE_CHECKING

from hodiff._core import _lazy
from hodiff.fields._second_order import Estimate

if TYPE_CHECKING:
    from hodiff.fields._partial import Partials

__all__ = ["Estimate", "Partials"]

__getattr__, __dir__ = _lazy.names(globals(), {"_partial": ("Partials",)})
