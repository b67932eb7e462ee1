"""No result shares memory with another, with a vector or with the point: writing into one changes nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import _tree

D = torch.float64
x, y = torch.arange(1.0, 5.0, dtype=D), torch.arange(2.0, 6.0, dtype=D)
v, V = torch.full((4,), 3.0, dtype=D), torch.full((2, 4), 3.0, dtype=D)
U = V.T.contiguous()

LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "slice": lambda x: x[1:3],
    "view": lambda x: x.reshape(2, 2),
    "transpose": lambda x: x.reshape(2, 2).T,
    "sum": lambda x: x.sum(),
    "expand": lambda x: x.expand(3, 4),
}
of_sum = lambda p: (p[0] + p[1]).square().sum()


def cotangent(f: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.full(f(x).shape, 2.0, dtype=D)


# Each call, with what it was given that its result must not share.
CALLS: dict[str, Callable[[], tuple[Any, list[Tensor]]]] = {
    "grad": lambda: (hodiff.grad(of_sum, (x, y)), [x, y]),
    "value_and_grad": lambda: (hodiff.value_and_grad(of_sum, (x, y)), [x, y]),
    "hvp": lambda: (hodiff.hvp(of_sum, (x, y), (v, v)), [v]),
    "hvp, several": lambda: (hodiff.hvp(of_sum, (x, y), (V, V)), [V]),
    "value_grad_and_hessian": lambda: (hodiff.value_grad_and_hessian(of_sum, (x, y)), [x, y]),
    "hessian_diagonal": lambda: (hodiff.hessian_diagonal(of_sum, (x, y)), [x, y]),
    "HessianOperator": lambda: (hodiff.HessianOperator(of_sum, (x, y)) @ (v, v), [v]),
    **{f"jvp, {name}": lambda f=f: (hodiff.jvp(f, x, v), [x, v]) for name, f in LINEAR.items()},
    **{f"jvp of several, {name}": lambda f=f: (hodiff.jvp(f, x, V), [x, V]) for name, f in LINEAR.items()},
    **{f"vjp, {name}": lambda f=f: (hodiff.vjp(f, x, u := cotangent(f)), [x, u]) for name, f in LINEAR.items()},
    **{f"jacobian, {name}": lambda f=f: (hodiff.jacobian(f, x), [x]) for name, f in LINEAR.items()},
    "jacobian, of samples": lambda: (hodiff.jacobian(lambda V: V, V, batch_ndim=1), [V]),
    "hessian, of samples": lambda: (hodiff.hessian(lambda V: V.square().sum(1), V, batch_ndim=1), [V]),
    **{f"J, {name}": lambda f=f: (hodiff.JacobianOperator(f, x) @ v, [x, v]) for name, f in LINEAR.items()},
    **{f"J of several, {name}": lambda f=f: (hodiff.JacobianOperator(f, x) @ U, [x, U]) for name, f in LINEAR.items()},
    **{
        f"J', {name}": lambda f=f: (hodiff.JacobianOperator(f, x).T @ (u := cotangent(f).reshape(-1)), [x, u])
        for name, f in LINEAR.items()
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_writing_into_a_result_changes_nothing_else(name: str) -> None:
    result, given = CALLS[name]()
    parts, _, _ = _tree.flatten(result)
    for index, part in enumerate(parts):
        others = [*given, *parts[:index], *parts[index + 1 :]]
        kept = [other.clone() for other in others]
        part.add_(1.0)  # an expanded result would refuse this
        assert all(torch.equal(other, before) for other, before in zip(others, kept, strict=True))
