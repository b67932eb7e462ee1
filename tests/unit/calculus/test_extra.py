"""`has_aux=`: what a function of the calculus returns beside the loss."""

import inspect

import pytest
import torch

import hodiff

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
V = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
CALLS = {
    "grad": hodiff.grad,
    "hvp": lambda f, x, **options: hodiff.hvp(f, x, V, **options),
    "hessian": hodiff.hessian,
    "hessian_diagonal": hodiff.hessian_diagonal,
}


def loss(x):
    return (x**3).sum() * x[0]


def both(x):
    return loss(x), {"doubled": 2 * x, "words": "as they are"}


@pytest.mark.parametrize("name", CALLS)
def test_the_extra_comes_second(name):
    result, extra = CALLS[name](both, X, has_aux=True)
    assert torch.equal(result, CALLS[name](loss, X))
    assert torch.equal(extra["doubled"], 2 * X)
    assert extra["words"] == "as they are"
    assert not extra["doubled"].requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_the_extra_has_its_graph_where_the_result_has(name):
    x = X.clone().requires_grad_()
    result, extra = CALLS[name](both, x, has_aux=True, create_graph=True)
    assert result.requires_grad
    (gradient,) = torch.autograd.grad(extra["doubled"].sum(), x)
    assert gradient.tolist() == [2, 2, 2]


def test_the_hessian_as_a_matrix_and_sample_by_sample():
    point = {"a": X, "b": V}
    matrix, extra = hodiff.hessian(lambda p: (loss(p["a"] * p["b"]), 7), point, matrix=True, has_aux=True)
    assert (matrix.shape, extra) == ((6, 6), 7)
    rows = torch.stack([X, V])
    blocks, extra = hodiff.hessian(lambda z: ((z**3).sum(-1), z), rows, batch_ndim=1, has_aux=True)
    assert blocks.shape == (2, 3, 3)
    assert torch.equal(extra, rows)


@pytest.mark.parametrize("name", [*CALLS, "value_grad_and_hessian"])
def test_a_pair_without_has_aux_names_the_functions_that_take_it(name):
    call = CALLS.get(name, lambda f, x: hodiff.value_grad_and_hessian(f, x))
    with pytest.raises(
        hodiff.InputError, match=r"expected a tensor\. Return the loss alone; .* has_aux=True, which hodiff"
    ):
        call(lambda x: (loss(x), x), X)


@pytest.mark.parametrize("name", CALLS)
def test_has_aux_without_a_pair(name):
    with pytest.raises(hodiff.InputError, match="has_aux=True expects"):
        CALLS[name](loss, X, has_aux=True)


WITH_EXTRA = [
    name
    for name in hodiff.__all__
    if inspect.isfunction(getattr(hodiff, name))
    and "has_aux" in inspect.signature(getattr(hodiff, name)).parameters
    and name != "compile_step"  # which takes no tensor in the place of a function
]
FURTHER = {"hvp": (torch.ones(4, 3),), "second_order_operator": (torch.eye(3),), "partial": (0,), "partials": ([0],)}
OF_FUNCTIONS = {"biharmonic"}  # and of nothing else, which is said first


@pytest.mark.parametrize("name", WITH_EXTRA)
def test_a_tensor_already_computed_has_no_extra(name):
    call, x = getattr(hodiff, name), torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    vectors = name in {"divergence", "value_and_divergence", "curl"}
    batch = {} if inspect.signature(call).parameters["batch_ndim"].default else {"batch_ndim": 1}
    u = x.tanh() if vectors else x.prod(-1)
    if name not in OF_FUNCTIONS:
        call(u, x, *FURTHER.get(name, ()), **batch)
    with pytest.raises(hodiff.InputError, match=r"has_aux: this is about what a function returns.* Leave has_aux out"):
        call(u, x, *FURTHER.get(name, ()), has_aux=True, **batch)


def test_the_functions_with_an_extra_are_found():
    assert {*CALLS, "value_and_grad", "laplacian", "value_and_divergence"} <= {*WITH_EXTRA}


def test_a_pair_of_tensors_is_no_function_either():
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match="has_aux: this is about what a function returns"):
        hodiff.grad((loss(x), x), x, has_aux=True)
