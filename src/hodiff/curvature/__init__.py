"""Curvature without the matrix: linear operators, and what can be learnt from their products."""
