"""Calls that look wrong and are right: what is taken at the edge of what `test_wrong_calls.py` refuses."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import hodiff
from tests.contract.test_wrong_calls import FLAGS, SIX, D, H, M, W, X, f, loss, m, tied, x
from tests.support.modules import weighted_sum


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_one_element_is_a_scalar_of_any_shape(shape: tuple[int, ...]) -> None:
    torch.testing.assert_close(hodiff.grad(lambda x: f(x).reshape(shape), SIX), 3 * SIX**2)
    torch.testing.assert_close(hodiff.hvp(lambda x: f(x).reshape(shape), SIX, W), 6 * SIX * W)


def test_order_zero_is_the_function() -> None:
    torch.testing.assert_close(hodiff.nth_derivative(torch.sin, X, 0), torch.sin(X))
    (only,) = hodiff.derivatives(torch.sin, X, 0)
    torch.testing.assert_close(only, torch.sin(X))


def test_the_order_of_a_dict_means_nothing() -> None:
    vector = {name: torch.full_like(p, number) for number, (name, p) in enumerate(m.named_parameters())}
    torch.testing.assert_close(hodiff.hvp(loss, m, dict(reversed(vector.items()))), hodiff.hvp(loss, m, vector))


def test_a_tied_parameter_goes_by_its_first_name() -> None:
    assert list(hodiff.grad(lambda m: weighted_sum(m(torch.ones(1, 2, dtype=D))), tied())) == ["0.weight"]


def test_one_tensor_in_two_places_of_a_point_is_two_variables() -> None:
    """In the function form; in the tensor form stock PyTorch gives the total in both, and we refuse."""
    torch.testing.assert_close(hodiff.grad(lambda p: (p[0] ** 2 * p[1]).sum(), (SIX, SIX)), (2 * SIX * SIX, SIX**2))


def test_a_function_of_a_module_may_read_the_module_itself() -> None:
    """It is the same object, so that nothing goes past the argument."""
    torch.testing.assert_close(hodiff.grad(lambda _: loss(m), m), hodiff.grad(loss, m))


def test_what_is_selected() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    assert list(hodiff.select(model)) == [name for name, _ in model.named_parameters()]  # no pattern: all of them
    model[0].requires_grad_(False)
    assert list(hodiff.select(model, "*.weight")) == ["2.weight"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_module(backend: str) -> None:
    """Derivatives of a compiled module are right: hodiff calls the original."""
    warnings.simplefilter("ignore")  # torch's own deprecations while Dynamo is imported
    model, data = m, X
    compiled = torch.compile(model, backend=backend)
    vector = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    expected = hodiff.hvp(lambda m: weighted_sum(m(data)), model, vector)
    got = hodiff.hvp(lambda m: weighted_sum(m(data)), compiled, vector)
    for name in expected:
        torch.testing.assert_close(got[name.removeprefix("_orig_mod.")], expected[name])
    by_closure = hodiff.hvp(lambda x: weighted_sum(compiled(x)), data, torch.ones_like(data))
    torch.testing.assert_close(by_closure, hodiff.hvp(lambda x: weighted_sum(model(x)), data, torch.ones_like(data)))


def test_what_an_object_lacks_it_has_not() -> None:
    """Tools ask by `hasattr`; an error of a property is its own; and an object without a length is true."""
    for value in (H, hodiff.trace(M), hodiff.sparse.plan_hessian(f, x)):
        assert value
        assert not hasattr(value, "toarray")
        assert f"{value}" == str(value)
    absent = nn.Module()
    with pytest.raises(AttributeError, match="'Module' object has no attribute 'w'"):
        hodiff.HessianOperator(lambda z: absent.w, x).value  # noqa: B018


def test_a_tangent_of_forward_mode_goes_through_f() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        found = hodiff.grad(lambda z: (z**3 * dual).sum(), X)
        torch.testing.assert_close(forward_ad.unpack_dual(found).tangent, 3 * X**2)


def test_an_operator_at_a_negated_view() -> None:
    point = torch._neg_view(-X)
    found = hodiff.HessianOperator(lambda z: (z**3).sum(), point) @ torch.ones_like(X)
    torch.testing.assert_close(found, 6 * X)


@pytest.mark.parametrize("option", FLAGS, ids=" ".join)
def test_flags_of_numpy_and_numbers(option: tuple[str, str]) -> None:
    FLAGS[option](np.bool_(False))
    FLAGS[option](0)


def test_a_small_matrix_that_is_a_view_of_one_number() -> None:
    found = hodiff.MatrixOperator(torch.ones(()).expand(3, 3)) @ torch.ones(3)
    torch.testing.assert_close(found, torch.full((3,), 3.0))


@pytest.mark.parametrize("c", [2, 2.0, np.float64(2), torch.tensor(2.0), torch.full((5,), 2.0), torch.full((1,), 2.0)])
def test_a_factor_of_an_operator(c: object) -> None:
    square = lambda z: z.square().sum(-1)
    found = hodiff.second_order_operator(square, X, torch.ones(3, dtype=D), c=c)  # type: ignore[arg-type]
    torch.testing.assert_close(found, 6 + 2 * square(X))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("output", ["torch", "csr", "scipy"])
def test_sparse_matrices_of_no_numbers(shape: tuple[int, ...], output: str) -> None:
    for found in (
        hodiff.sparse_hessian(lambda z: (z.sin() * z).sum(), torch.ones(shape), output=output),  # type: ignore[arg-type]
        hodiff.sparse_jacobian(lambda z: z.sin() * z, torch.ones(shape), output=output),  # type: ignore[arg-type]
    ):
        assert found.shape == (0, 0)


def test_arguments_that_hold_themselves() -> None:
    endless: list[object] = [X]
    endless.append(endless)
    cubes = lambda z, held, rest: (held * z).pow(3).sum()
    assert hodiff.sparse.sparsity_pattern(cubes, X, args=endless).nnz == 15
    found = hodiff.sparse_hessian(cubes, X, args=endless).to_dense()
    torch.testing.assert_close(found, (6 * X**4).flatten().diag())
