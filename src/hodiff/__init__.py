"""hodiff: higher-order gradients for PyTorch, right, fast, and explained.

A map of the library:

* first derivatives: `grad`, `value_and_grad`, `vjp`, `jvp`, `jacobian`
* second derivatives: `hvp`, `hessian`, `value_grad_and_hessian`, `cross_hessian`, `hessian_diagonal`
* any order, elementwise: `nth_derivative`, `derivatives`
* where: tensors, containers of them, modules, and `select`ed parameters
* verification: `check_derivatives`
* errors and warnings: `HodiffError` and its kin

Every function takes *what* (a function, or a tensor already computed) and *where* (the point). Given a
function, hodiff builds the graph and frees it; given a tensor, the graph is yours and stays.
"""

from hodiff._where import Selection, select
from hodiff.calculus._first import grad, jacobian, value_and_grad, vjp
from hodiff.calculus._forward import jvp
from hodiff.calculus._higher import derivatives, nth_derivative
from hodiff.calculus._second import cross_hessian, hessian, hessian_diagonal, hvp, value_grad_and_hessian
from hodiff.errors import (
    BatchMixingWarning,
    CustomFunctionWarning,
    DerivativeError,
    GraphError,
    HodiffError,
    HodiffWarning,
    InputError,
)
from hodiff.verify._check import check_derivatives

__all__ = [
    "BatchMixingWarning",
    "CustomFunctionWarning",
    "DerivativeError",
    "GraphError",
    "HodiffError",
    "HodiffWarning",
    "InputError",
    "Selection",
    "check_derivatives",
    "cross_hessian",
    "derivatives",
    "grad",
    "hessian",
    "hessian_diagonal",
    "hvp",
    "jacobian",
    "jvp",
    "nth_derivative",
    "select",
    "value_and_grad",
    "value_grad_and_hessian",
    "vjp",
]
