"""No result shares memory with another, with a vector or with the point: writing into one changes nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _tree

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
X, Y = x.clone().requires_grad_(), y.clone().requires_grad_()
LAYER = torch.nn.Linear(1, 1, dtype=D)
of_sum = lambda p: (p[0] + p[1]).square().sum()


def cotangent(f: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.full(f(x).shape, 2.0, dtype=D)


# Each call, with what it was given that its result must not share.
CALLS: dict[str, Callable[[], tuple[Any, list[Tensor]]]] = {
    "grad": lambda: (hodiff.grad(of_sum, (x, y)), [x, y]),
    "value_and_grad": lambda: (hodiff.value_and_grad(of_sum, (x, y)), [x, y]),
    "hvp": lambda: (hodiff.hvp(of_sum, (x, y), (v, v)), [v]),
    "hvp, several": lambda: (hodiff.hvp(of_sum, (x, y), (V, V)), [V]),
    "cross_hvp": lambda: (hodiff.cross_hvp(lambda x, y: (x * y).sum(), x, y, v), [x, y, v]),
    "cross_hvp, several": lambda: (hodiff.cross_hvp(lambda x, y: (x * y).sum(), x, y, V), [x, y, V]),
    "value_grad_and_hessian": lambda: (hodiff.value_grad_and_hessian(of_sum, (x, y)), [x, y]),
    "hessian_diagonal": lambda: (hodiff.hessian_diagonal(of_sum, (x, y)), [x, y]),
    "HessianOperator": lambda: (hodiff.HessianOperator(of_sum, (x, y)) @ (v, v), [v]),
    "value, the argument": lambda: (hodiff.value_and_grad(lambda x: x, s := x[:1].clone()), [s]),
    "value, a parameter": lambda: (hodiff.value_and_grad(lambda m: m.bias, LAYER)[0], [LAYER.bias.detach()]),
    "value, a tensor computed": lambda: (hodiff.value_and_grad(y2 := of_sum((X, X)), X)[0], [y2.detach()]),
    "aux": lambda: (hodiff.value_and_grad(lambda x: (x.sum(), x[1:]), x, has_aux=True), [x]),
    **{
        f"aux of {f.__name__}": lambda f=f: (f(lambda x: (x.square().sum(), x[1:]), x, has_aux=True), [x])
        for f in (hodiff.grad, hodiff.hessian, hodiff.hessian_diagonal)
    },
    "aux of hvp": lambda: (hodiff.hvp(lambda x: (x.square().sum(), x[1:]), x, v, has_aux=True), [x, v]),
    "derivatives, order 1": lambda: (hodiff.derivatives(lambda x: x, x, 1), [x]),
    "derivatives, order 4": lambda: (hodiff.derivatives(lambda x: x, x, 4), [x]),
    "outputs of a penalty": lambda: (
        hodiff.gradient_penalty(lambda V: V[:, 0], V, return_outputs=True, create_graph=False),
        [V],
    ),
    "a field's value": lambda: (hodiff.value_grad_and_laplacian(lambda V: V[:, 0], V, create_graph=False), [V]),
    "a field's gradient": lambda: (hodiff.value_grad_and_laplacian(lambda V: V @ v, V, create_graph=False), [V, v]),
    "multi_grad": lambda: (hodiff.multi_grad([of_sum((X, Y)), (X + Y).sum()], [X, Y]), [x, y]),
    "multi_grad, functions": lambda: (hodiff.multi_grad([of_sum, of_sum], (x, y)), [x, y]),
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


def largest(x: Tensor) -> Tensor:
    """Its second derivative is zeros that have no memory in PyTorch, and cannot be changed."""
    return torch.linalg.vector_norm(x, float("inf"))


ZEROS: dict[str, Callable[[], Any]] = {
    "hvp": lambda: hodiff.hvp(largest, x, v),
    "hvp, differentiable": lambda: hodiff.hvp(largest, X, v, create_graph=True).detach(),
    "cross_hvp": lambda: hodiff.cross_hvp(lambda x, y: largest(x) * 0 + largest(y), x, x, v),
    "jvp of a gradient": lambda: hodiff.jvp(lambda x: hodiff.grad(largest, x), x, v),
    "gradient of a product": lambda: hodiff.grad(lambda x: hodiff.hvp(largest, x, v).sum(), x),
    "HessianOperator": lambda: hodiff.HessianOperator(largest, x) @ v,
    "HessianOperator, batches": lambda: hodiff.HessianOperator(lambda x, _: (largest(x), 1), x, data=[0, 1]) @ v,
    "laplacian": lambda: hodiff.laplacian(largest, x, batch_ndim=0, method="reverse").detach(),
    "hessian_diagonal": lambda: hodiff.hessian_diagonal(largest, x),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_ordinary_tensors(name: str) -> None:
    found = ZEROS[name]()
    assert not found._is_zerotensor()
    assert not found.numpy().any()
    found.add_(1)
    assert bool((found == 1).all())


class WritesIntoItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g *= 3 * x**2
        return g


def test_a_vector_of_the_users_is_not_written_into():
    u, x = torch.ones(3, dtype=D), torch.tensor([1.0, 2.0, 3.0], dtype=D)
    torch.testing.assert_close(hodiff.vjp(WritesIntoItsGradient.apply, x, u), 3 * x**2)
    assert torch.equal(u, torch.ones(3, dtype=D))


def test_a_gradient_spread_over_two_entries_has_memory_for_both():
    result = hodiff.grad(lambda x: x.sum(), torch.zeros(2))
    result[0] = 5
    assert result.tolist() == [5, 1]


def test_values_are_copies() -> None:
    x = torch.ones(3, dtype=D)
    for f in (lambda x: x, torch.tanh):
        J = hodiff.JacobianOperator(f, x)
        kept = J.value.clone()
        J.value.mul_(9)
        assert torch.equal(J.value, kept) and torch.equal(x, torch.ones(3, dtype=D))
        J @ x
