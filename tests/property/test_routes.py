"""All routes to one derivative agree: with each other, with torch.func where it is right, with differences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad as func_grad
from torch.func import jacrev
from torch.func import vjp as func_vjp

import hodiff
from tests.support.differences import directional_derivative, gradient_by_differences
from tests.support.inputs import Expression, Scalar, direction, expressions, points, scalars
from tests.support.problems import PROBLEMS, Problem
from tests.support.properties import adjoint, agree, linear, symmetric

problems = pytest.mark.parametrize("problem", PROBLEMS, ids=repr)


def as_matrix(hessian: Tensor, x: Tensor) -> Tensor:
    return hessian.reshape(x.numel(), x.numel())


# --- closed forms -----------------------------------------------------------------------------------------------------


@problems
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_closed_forms(problem: Problem, dtype: torch.dtype) -> None:
    x, f = problem.point(dtype), problem.function
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    gradient, hessian = problem.gradient(x), problem.hessian(x)
    v = direction(x)
    agree(hodiff.grad(f, x), gradient, tolerance)
    agree(hodiff.hvp(f, x, v), hessian @ v, tolerance, floor=1e-5 if dtype == torch.float32 else 1e-11)
    agree(hodiff.hessian(f, x), hessian, tolerance)
    agree(hodiff.hessian(f, x, matrix=True), hessian, tolerance)
    agree(
        hodiff.hessian_diagonal(f, x),
        hessian.diagonal().clone(),
        tolerance,
        floor=1e-5 if dtype == torch.float32 else 1e-11,
    )
    value, g, h = hodiff.value_grad_and_hessian(f, x)
    agree((value, g, h), (f(x), gradient, hessian), tolerance)
    value, g = hodiff.value_and_grad(f, x)
    agree((value, g), (f(x), gradient), tolerance)
    (value, aux), g = hodiff.value_and_grad(lambda t: (f(t), "aux"), x, has_aux=True)
    agree((value, g), (f(x), gradient), tolerance)
    assert aux == "aux"


@problems
def test_hand_written_derivatives_agree_with_differences(problem: Problem) -> None:
    """The oracle's own oracle."""
    x = problem.point()
    v = direction(x)
    agree(problem.gradient(x), gradient_by_differences(problem.function, x), 1e-8, 1e-9)
    agree(problem.hessian(x) @ v, directional_derivative(problem.gradient, x, v), 1e-8, 1e-9)


@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 1e8])
def test_quadratics_are_exact(scale: float) -> None:
    a = torch.tensor([[2.0, 3.0, 0.0], [-1.0, 4.0, 5.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    x = scale * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert torch.equal(hodiff.hessian(lambda t: t @ a @ t, x), a + a.T)
    assert torch.equal(hodiff.hessian_diagonal(lambda t: t @ a @ t, x), 2 * a.diagonal())
    assert torch.equal(hodiff.cross_hessian(lambda s, t: s @ a @ t, x, x), a)
    assert torch.equal(hodiff.jacobian(lambda t: a @ t, x), a)


# --- random functions -------------------------------------------------------------------------------------------------


@given(f=scalars(), x=points)
def test_first_order(f: Scalar, x: Tensor) -> None:
    g = hodiff.grad(f, x)
    agree(g, func_grad(f)(x))
    agree(g, gradient_by_differences(f, x), 1e-5, 1e-7)
    agree(hodiff.value_and_grad(f, x), (f(x), g))


@given(f=scalars(), x=points)
def test_second_order_routes(f: Scalar, x: Tensor) -> None:
    v = direction(x)
    product = hodiff.hvp(f, x, v)
    agree(product, func_vjp(func_grad(f), x)[1](v)[0])  # torch.func's reverse over reverse is right
    agree(product, directional_derivative(func_grad(f), x, v), 1e-5, 1e-7)
    hessian = hodiff.hessian(f, x)
    assert hessian.shape == (*x.shape, *x.shape)
    matrix = as_matrix(hessian, x)
    symmetric(matrix)
    agree((matrix @ v.reshape(-1)).reshape(x.shape), product)
    agree(hessian, jacrev(func_grad(f))(x))
    agree(hodiff.hessian(f, x, matrix=True), matrix)
    agree(hodiff.hessian_diagonal(f, x), matrix.diagonal().reshape(x.shape).clone())
    agree(hodiff.value_grad_and_hessian(f, x), (f(x), hodiff.grad(f, x), hessian))


@given(f=scalars(), x=points)
def test_nested_calls_are_the_second_order(f: Scalar, x: Tensor) -> None:
    v, g = direction(x), lambda t: f(t) + (t**4).sum()  # not linear: the gradient of a linear function has no graph
    hessian, product = hodiff.hessian(g, x), hodiff.hvp(g, x, v)
    agree(hodiff.jacobian(lambda t: hodiff.grad(g, t), x), hessian)
    agree(hodiff.jvp(lambda t: hodiff.grad(g, t), x, v), product)
    agree(hodiff.vjp(lambda t: hodiff.grad(g, t), x, v), product)
    agree(hodiff.grad(lambda t: (hodiff.grad(g, t) * v).sum(), x), product)


@given(f=scalars(), x=points)
def test_tensor_form_equals_function_form(f: Scalar, x: Tensor) -> None:
    v = direction(x)
    leaf = x.clone().requires_grad_()
    loss = f(leaf)
    agree(hodiff.grad(loss, leaf), hodiff.grad(f, x))
    agree(hodiff.hvp(loss, leaf, v), hodiff.hvp(f, x, v))
    agree(hodiff.hessian(loss, leaf), hodiff.hessian(f, x))
    agree(hodiff.hessian_diagonal(loss, leaf), hodiff.hessian_diagonal(f, x))


@given(f=scalars(), x=points)
def test_products_are_linear(f: Scalar, x: Tensor) -> None:
    v, w = direction(x, 1), direction(x, 2)
    linear(lambda u: hodiff.hvp(f, x, u), v, w)
    linear(lambda u: hodiff.jvp(f.expression, x, u), v, w)
    linear(lambda u: hodiff.vjp(f.expression, x, u), v, w)
    agree((w * hodiff.hvp(f, x, v)).sum(), (v * hodiff.hvp(f, x, w)).sum())


@given(f=expressions(), x=points)
def test_jacobian_routes(f: Expression, x: Tensor) -> None:
    v, u = direction(x, 1), direction(x, 2)
    jacobian = hodiff.jacobian(f, x)
    agree(jacobian, jacrev(f)(x))
    matrix = jacobian.reshape(x.numel(), x.numel())
    agree(hodiff.jvp(f, x, v), (matrix @ v.reshape(-1)).reshape(x.shape))
    agree(hodiff.vjp(f, x, u), (matrix.T @ u.reshape(-1)).reshape(x.shape))
    adjoint(lambda t: hodiff.jvp(f, x, t), lambda t: hodiff.vjp(f, x, t), v, u)
    agree(hodiff.jvp(f, x, v, create_graph=True).detach(), hodiff.jvp(f, x, v))


@given(f=scalars(), x=points, many=st.integers(1, 4), chunk=st.sampled_from([1, 2, 3, 100, "auto"]))
def test_many_vectors_are_single_ones_stacked(f: Scalar, x: Tensor, many: int, chunk: int | str) -> None:
    vectors = direction(x, 5, many)
    agree(hodiff.hvp(f, x, [vectors], chunk_size=chunk), [torch.stack([hodiff.hvp(f, x, v) for v in vectors])])
    e = f.expression
    agree(hodiff.jvp(e, x, [vectors], chunk_size=chunk), torch.stack([hodiff.jvp(e, x, v) for v in vectors]))
    agree(hodiff.vjp(e, x, [vectors], chunk_size=chunk), torch.stack([hodiff.vjp(e, x, v) for v in vectors]))


@given(f=scalars(), x=points, chunk=st.sampled_from([1, 2, 3]))
def test_chunk_size_changes_nothing(f: Scalar, x: Tensor, chunk: int) -> None:
    agree(hodiff.hessian(f, x, chunk_size=chunk), hodiff.hessian(f, x))
    agree(hodiff.hessian_diagonal(f, x, chunk_size=chunk), hodiff.hessian_diagonal(f, x))
    agree(hodiff.jacobian(f.expression, x, chunk_size=chunk), hodiff.jacobian(f.expression, x))
    agree(hodiff.value_grad_and_hessian(f, x, chunk_size=chunk), hodiff.value_grad_and_hessian(f, x))


@given(f=scalars(leaves=4), x=points, y=points)
def test_cross_hessian_is_the_block_of_the_joint_hessian(f: Scalar, x: Tensor, y: Tensor) -> None:
    n = x.numel()

    def joint(z: Tensor) -> Tensor:
        return f(torch.cat([z, torch.sin(z) * z.sum()]))

    def split(a: Tensor, b: Tensor) -> Tensor:
        return joint(torch.cat([a.reshape(-1), b.reshape(-1)]))

    whole = hodiff.hessian(joint, torch.cat([x.reshape(-1), y.reshape(-1)]))
    for chunk in (1, "auto"):
        block = hodiff.cross_hessian(split, x, y, chunk_size=chunk)
        agree(block, whole[:n, n:].reshape(x.shape + y.shape).clone())
        many = direction(y, 0, 3)
        products = torch.einsum("ij,kj->ki", whole[:n, n:], many.reshape(3, -1)).reshape(3, *x.shape)
        agree(hodiff.cross_hvp(split, x, y, [many], chunk_size=chunk), products)
        agree(hodiff.cross_hvp(split, x, y, many[0]), products[0].clone())
    agree(hodiff.cross_hessian(lambda b, a: split(a, b), y, x), whole[n:, :n].reshape(y.shape + x.shape).clone())


@given(f=scalars(leaves=4), x=points)
def test_create_graph_result_differentiates_to_the_third_order(f: Scalar, x: Tensor) -> None:
    """d/dt H(x + t w) v, by differences and by differentiating the product."""
    v, w, g = direction(x, 1), direction(x, 2), lambda t: f(t) + (t**4).sum()
    third = hodiff.jvp(lambda t: hodiff.hvp(g, t, v), x, w)
    agree(third, directional_derivative(lambda t: hodiff.hvp(g, t, v), x, w), 1e-5, 1e-6)
    leaf = x.clone().requires_grad_()
    product = hodiff.hvp(g, leaf, v, create_graph=True)
    agree(torch.autograd.grad(product, leaf, w)[0], third)


@given(f=expressions(roll=False), x=points)
def test_nth_derivative_two_is_the_hessian_diagonal(f: Expression, x: Tensor) -> None:
    agree(hodiff.nth_derivative(f, x, 2), hodiff.hessian_diagonal(lambda t: f(t).sum(), x))
    agree(hodiff.nth_derivative(f, x, 1), hodiff.grad(lambda t: f(t).sum(), x))
    agree(hodiff.derivatives(f, x, 3), tuple(hodiff.nth_derivative(f, x, n) for n in range(4)))
