"""Curvature without the matrix: linear operators, and what can be learned from their products."""

from hodiff._core import _compiled_callers
from hodiff.curvature._density import logdet, spectral_density
from hodiff.curvature._eigen import eigsh
from hodiff.curvature._gauss_newton import FisherOperator, GaussNewtonOperator
from hodiff.curvature._hessian import HessianOperator
from hodiff.curvature._jacobian import JacobianOperator
from hodiff.curvature._least_squares import LevenbergMarquardt
from hodiff.curvature._matrix import MatrixOperator, nystrom
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._solve import solve
from hodiff.curvature._trace import diagonal, trace

__all__ = [
    "FisherOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "JacobianOperator",
    "LevenbergMarquardt",
    "LinearOperator",
    "MatrixOperator",
    "diagonal",
    "eigsh",
    "logdet",
    "nystrom",
    "solve",
    "spectral_density",
    "trace",
]

_compiled_callers.publish(vars())
