"""Sparse Hessians and Jacobians: which entries there are, which products find them, and the matrix at many points.

* `sparsity_pattern` detects which entries can be other than zero, `color` says which columns share a product.
* `plan_hessian` and `plan_jacobian` do both once, for many points; `hodiff.sparse_hessian` and
  `hodiff.sparse_jacobian` for one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hodiff._core import _compiled_callers

if TYPE_CHECKING:
    from hodiff.sparse._coloring import color
    from hodiff.sparse._detect import sparsity_pattern
    from hodiff.sparse._pattern import Pattern
    from hodiff.sparse._plan import Plan, plan_hessian, plan_jacobian

__all__ = ["Pattern", "Plan", "color", "plan_hessian", "plan_jacobian", "sparsity_pattern"]

# Few programs need these: they are loaded when they are asked for, not with `import hodiff`.
_HOME = {
    "Pattern": "_pattern",
    "Plan": "_plan",
    "color": "_coloring",
    "plan_hessian": "_plan",
    "plan_jacobian": "_plan",
    "sparsity_pattern": "_detect",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    _compiled_callers.mark(name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
