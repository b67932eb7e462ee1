"""Fields: differential operators of functions of coordinates."""

from hodiff.fields._indices import Partials
from hodiff.fields._laplacian import Estimate

__all__ = ["Estimate", "Partials"]
