"""Control flow in operators: most have no second derivative in PyTorch, which does not say so."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import hodiff

X = torch.linspace(0.3, 1.4, 6, dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")


def cond(x: Tensor) -> Tensor:
    found: Any = torch.cond(x.sum() > 0, lambda y: (y**3,), lambda y: (y.sin(),), (x,))
    return found[0]


def looped(x: Tensor) -> Tensor:
    return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * y), (torch.tensor(0), x * 1))[1]


def scanned(x: Tensor) -> Tensor:
    return scan(lambda carry, y: (carry * y, carry * y), x[0] * 1, x[1:], dim=0)[1]


def mapped(x: Tensor) -> Tensor:
    found: Any = map_(lambda row: (row.prod(),), x.reshape(3, 2))
    return found[0]


def folded(x: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")


PLAIN = {
    cond: lambda x: x**3,
    looped: lambda x: x**4,
    scanned: lambda x: x.cumprod(0)[1:],
    mapped: lambda x: x.reshape(3, 2).prod(1),
    folded: lambda x: x.cumprod(0),
}
WRONG = {cond: r"torch\.cond; use a Python `if`", looped: r"while_loop.*Python loop", scanned: r"scan .*Python loop"}


@pytest.mark.parametrize("f", [pytest.param(f, marks=pytest.mark.slow) if f is looped else f for f in PLAIN])
def test_first_derivatives_and_their_patterns(f: Any) -> None:
    jacobian = hodiff.jacobian(PLAIN[f], X)
    assert torch.allclose(hodiff.jacobian(f, X), jacobian)
    pattern = hodiff.sparse.sparsity_pattern(f, X, order=1)
    assert not (jacobian.bool() & ~pattern.to_torch().to_dense()).any()
    assert torch.allclose(hodiff.sparse_jacobian(f, X, pattern=pattern.to_torch(), check=True).to_dense(), jacobian)


@pytest.mark.parametrize("f", PLAIN)
def test_second_derivatives_are_right_or_refused_by_name(f: Any) -> None:
    scalar, plain = lambda x: f(x).sum(), lambda x: PLAIN[f](x).sum()
    if f in WRONG:
        for call in (hodiff.hessian, hodiff.sparse.sparsity_pattern, hodiff.sparse_hessian):
            with pytest.raises(hodiff.GraphError, match=WRONG[f]):
                call(scalar, X)
    else:
        hessian = hodiff.hessian(plain, X)
        assert torch.allclose(hodiff.hessian(scalar, X), hessian)
        assert torch.allclose(hodiff.sparse_hessian(scalar, X, check=True).to_dense(), hessian)


def test_an_operator_whose_inside_is_not_seen_is_named() -> None:
    assert hodiff.sparse.sparsity_pattern(cond, X, order=1).without_rule == ("cond",)
