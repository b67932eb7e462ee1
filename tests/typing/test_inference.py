# pyright: reportUnnecessaryTypeIgnoreComment=true
"""The type checker infers a result's type from *where*; pyright reads this file, and pytest runs it."""

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import hodiff


def norm(x: Tensor) -> Tensor:
    return x.square().sum()


def output(model: nn.Module) -> Tensor:
    return model(torch.ones(2)).square().sum()


def chosen(some: hodiff.Selection) -> Tensor:
    return output(some.module)


def of_pair(pair: tuple[Tensor, Tensor]) -> Tensor:
    return norm(pair[0] * pair[1])


def of_dict(some: dict[str, Tensor]) -> Tensor:
    return norm(some["a"])


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


X = torch.ones(2)
ROWS = torch.ones(3, 2)


def critic(x: Tensor) -> Tensor:
    return x.square().sum(1)


def test_a_tensor_gives_a_tensor():
    assert_type(hodiff.grad(norm, X), Tensor)
    assert_type(hodiff.hvp(norm, X, X), Tensor)
    assert_type(hodiff.hessian(norm, X), Tensor)
    assert_type(hodiff.hessian_diagonal(norm, X), Tensor)
    assert_type(hodiff.nth_derivative(torch.sin, X, 2), Tensor)
    assert_type(hodiff.derivatives(torch.sin, X, 2), tuple[Tensor, ...])
    assert_type(hodiff.jacobian(torch.sin, X), Tensor)
    assert_type(hodiff.vjp(torch.sin, X, X), Tensor)
    assert_type(hodiff.value_and_grad(norm, X), tuple[Tensor, Tensor])
    assert_type(hodiff.value_grad_and_hessian(norm, X), tuple[Tensor, Tensor, Tensor])
    assert_type(hodiff.cross_hessian(lambda x, y: norm(x * y), X, X), Tensor)


def test_a_container_gives_the_same_container():
    assert_type(hodiff.grad(lambda pair: norm(pair[0]) + norm(pair[1]), (X, X)), tuple[Tensor, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some["a"]), {"a": X}), dict[str, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some[0]), [X]), list[Tensor])
    assert_type(hodiff.jacobian(of_dict, {"a": X}), dict[str, Tensor])
    assert_type(hodiff.hessian_diagonal(of_dict, {"a": X}), dict[str, Tensor])
    assert_type(hodiff.cross_hessian(lambda x, y: norm(x * y["a"]), X, {"a": X}), dict[str, Tensor])


def test_a_hessian_of_a_container_is_a_container_of_containers():
    assert_type(hodiff.hessian(of_dict, {"a": X}), dict[str, dict[str, Tensor]])
    assert_type(hodiff.hessian(lambda some: norm(some[0]), [X]), list[list[Tensor]])
    pair = hodiff.hessian(of_pair, (X, X))
    assert_type(pair, tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]])
    _, gradient, second = hodiff.value_grad_and_hessian(of_dict, {"a": X})
    assert_type(gradient, dict[str, Tensor])
    assert_type(second, dict[str, dict[str, Tensor]])


def test_a_module_gives_a_dict_by_name():
    model = nn.Linear(2, 1)
    assert_type(hodiff.grad(output, model), dict[str, Tensor])
    assert_type(hodiff.grad(chosen, hodiff.select(model, "weight")), dict[str, Tensor])
    assert_type(hodiff.hvp(output, model, hodiff.grad(output, model)), dict[str, Tensor])
    assert_type(hodiff.jacobian(output, model), dict[str, Tensor])
    assert_type(hodiff.hessian(output, model), dict[str, dict[str, Tensor]])
    assert_type(hodiff.hessian_diagonal(output, model), dict[str, Tensor])
    assert_type(hodiff.cross_hessian(lambda m, x: m(x).square().sum(), model, X), dict[str, Tensor])
    value, gradient, second = hodiff.value_grad_and_hessian(output, model)
    assert_type(value, Tensor)
    assert_type(gradient, dict[str, Tensor])
    assert_type(second, dict[str, dict[str, Tensor]])


def test_several_losses_give_one_result_each():
    model = nn.Linear(2, 1)
    assert_type(hodiff.multi_grad([norm, norm], X), list[Tensor])
    assert_type(hodiff.multi_grad({"a": norm}, X), dict[str, Tensor])
    assert_type(hodiff.multi_grad([output], model), list[dict[str, Tensor]])
    assert_type(hodiff.multi_grad({1: output(model)}, hodiff.select(model, "weight")), dict[int, dict[str, Tensor]])


def test_a_matrix_is_a_tensor_whatever_where_is():
    assert_type(hodiff.hessian(output, nn.Linear(2, 1), matrix=True), Tensor)
    assert_type(
        hodiff.value_grad_and_hessian(output, nn.Linear(2, 1), matrix=True), tuple[Tensor, dict[str, Tensor], Tensor]
    )


def test_a_product_along_a_direction_is_like_what_f_returns():
    assert_type(hodiff.jvp(torch.sin, X, X), Tensor)
    assert_type(hodiff.jvp(two, X, X), tuple[Tensor, Tensor])
    assert_type(hodiff.jacobian(two, X), Any)


def test_a_value_with_something_beside_it():
    (value, extra), gradient = hodiff.value_and_grad(lambda x: (norm(x), "extra"), X, has_aux=True)
    assert_type(gradient, Tensor)
    assert extra == "extra" and value == 2


def test_a_penalty_with_outputs_is_a_pair():
    assert_type(hodiff.gradient_penalty(critic, ROWS, create_graph=False), Tensor)
    assert_type(hodiff.gradient_penalty(critic, ROWS, return_outputs=True, create_graph=False), tuple[Tensor, Tensor])
    assert_type(hodiff.r1_penalty(critic, ROWS, create_graph=False), Tensor)
    assert_type(hodiff.r2_penalty(critic, ROWS, return_outputs=True, create_graph=False), tuple[Tensor, Tensor])
    assert_type(hodiff.eikonal_penalty(critic, ROWS, return_outputs=True, create_graph=False), tuple[Tensor, Tensor])
    penalty, loss = hodiff.gradient_norm_penalty(norm, X, return_outputs=True, create_graph=False)
    assert_type(loss, Tensor)
    assert penalty == 8


def test_what_is_no_option_is_a_type_error():
    """Each line is wrong on purpose: pyright reports a comment that is not needed."""
    wrong: list[Any] = [
        lambda: hodiff.grad(norm, X, retain_graph=True),  # pyright: ignore[reportCallIssue]
        lambda: hodiff.hessian(norm, X, chunk_size="all"),  # pyright: ignore[reportCallIssue, reportArgumentType]
        lambda: hodiff.r1_penalty(critic, ROWS, reduction="avg"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.jacobian_penalty(critic, ROWS, probes="cube"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.hessian_penalty(critic, ROWS, method="forward"),  # pyright: ignore[reportArgumentType]
    ]
    for call in wrong:
        try:
            call()
        except (TypeError, hodiff.InputError):
            continue
        raise AssertionError(call)
