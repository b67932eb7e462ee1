"""Fields: differential operators of functions of coordinates."""

from hodiff.fields._partial import Partials
from hodiff.fields._second_order import Estimate

__all__ = ["Estimate", "Partials"]
