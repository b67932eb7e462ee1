"""The type checker infers a result's type from *where*; pyright reads this file, and pytest runs it."""

from typing import assert_type

import torch
from torch import Tensor, nn

import hodiff


def norm(x: Tensor) -> Tensor:
    return x.square().sum()


def output(model: nn.Module) -> Tensor:
    return model(torch.ones(2)).square().sum()


def chosen(some: hodiff.Selection) -> Tensor:
    return output(some.module)


X = torch.ones(2)


def test_a_tensor_gives_a_tensor():
    assert_type(hodiff.grad(norm, X), Tensor)
    assert_type(hodiff.hvp(norm, X, X), Tensor)
    assert_type(hodiff.hessian(norm, X), Tensor)
    assert_type(hodiff.hessian_diagonal(norm, X), Tensor)
    assert_type(hodiff.nth_derivative(torch.sin, X, 2), Tensor)
    assert_type(hodiff.derivatives(torch.sin, X, 2), tuple[Tensor, ...])


def test_a_container_gives_the_same_container():
    assert_type(hodiff.grad(lambda pair: norm(pair[0]) + norm(pair[1]), (X, X)), tuple[Tensor, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some["a"]), {"a": X}), dict[str, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some[0]), [X]), list[Tensor])


def test_a_module_gives_a_dict_by_name():
    model = nn.Linear(2, 1)
    assert_type(hodiff.grad(output, model), dict[str, Tensor])
    assert_type(hodiff.grad(chosen, hodiff.select(model, "weight")), dict[str, Tensor])
    assert_type(hodiff.hvp(output, model, hodiff.grad(output, model)), dict[str, Tensor])


def test_several_losses_give_one_result_each():
    model = nn.Linear(2, 1)
    assert_type(hodiff.multi_grad([norm, norm], X), list[Tensor])
    assert_type(hodiff.multi_grad({"a": norm}, X), dict[str, Tensor])
    assert_type(hodiff.multi_grad([output], model), list[dict[str, Tensor]])
    assert_type(hodiff.multi_grad({1: output(model)}, hodiff.select(model, "weight")), dict[int, dict[str, Tensor]])


def test_a_matrix_is_a_tensor_whatever_where_is():
    assert_type(hodiff.hessian(output, nn.Linear(2, 1), matrix=True), Tensor)
