"""Rules of Taylor mode by kind: elementwise, bilinear, linear, composite, fallback, special. Importing registers them.

Some kinds have two files: functions made of pieces are elementwise, and shapes and what is batched are linear.
"""

from hodiff.jets.rules import batched, bilinear, composite, elementwise, fallback, linear, piecewise, shape, special

__all__ = ["batched", "bilinear", "composite", "elementwise", "fallback", "linear", "piecewise", "shape", "special"]
