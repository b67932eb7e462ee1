"""Sparse Hessians and Jacobians: which entries there are, which products find them, and the matrix
at many points.

* `sparsity_pattern` detects which entries can be other than zero, `color` says which columns share
  a product.
* `plan_hessian` and `plan_jacobian` do both once, for many points; `hodiff.sparse_hessian` and
  `hodiff.sparse_jacobian` for one.
"""

from typing import TYPE_CHECKING

from hodiff._core import _compiled_callers

if TYPE_CHECKING:
    from hodiff.sparse._pattern import Pattern, color
    from hodiff.sparse._plan import Plan, plan_hessian, plan_jacobian, sparsity_pattern

__all__ = ["Pattern", "Plan", "color", "plan_hessian", "plan_jacobian", "sparsity_pattern"]

# Few programs need these.
__getattr__, __dir__ = _compiled_callers.names(
    globals(),
    {
        "_pattern": ("Pattern", "color"),
        "_plan": ("Plan", "plan_hessian", "plan_jacobian", "sparsity_pattern"),
    },
)
