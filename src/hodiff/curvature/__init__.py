"""Curvature without the matrix: linear operators, and what can be learnt from their products."""

from hodiff.curvature import _algebra as _algebra  # what `A + B` makes: it enters itself into `_operator.ALGEBRA`
