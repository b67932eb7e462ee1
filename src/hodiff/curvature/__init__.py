"""Curvature without the matrix: linear operators, and what can be learnt from their products."""

from hodiff.curvature import _algebra as _algebra  # to import it is to register it: what `A + B` makes
