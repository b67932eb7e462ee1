"""Fields: differential operators of functions of coordinates."""

from typing import TYPE_CHECKING

from hodiff._core import _compiled_callers

if TYPE_CHECKING:
    from hodiff.fields._expansions import Estimate
    from hodiff.fields._partial import Partials

__all__ = ["Estimate", "Partials"]

__getattr__, __dir__ = _compiled_callers.names(
    globals(), {"_expansions": ("Estimate",), "_partial": ("Partials",)}
)
