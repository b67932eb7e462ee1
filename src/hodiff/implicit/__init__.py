"""Derivatives through solutions: of a minimum, a root, a fixed point that any solver found.

The solution is attached to the graph of everything that it depends on, by the implicit function
theorem. `hodiff.unroll` differentiates through the steps of an optimizer instead.
"""

from hodiff._core import _compiled_callers
from hodiff.implicit._solution import argmin, fixed_point, root

__all__ = ["argmin", "fixed_point", "root"]

_compiled_callers.publish(vars())
