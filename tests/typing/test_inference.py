# pyright: reportUnnecessaryTypeIgnoreComment=true
"""The type checker infers a result's type from *where*; pyright reads this file, and pytest runs it."""

from typing import Any, assert_type

import numpy as np
import pytest
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


def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


X = torch.ones(2)
PAIRS = [(torch.ones(3, 2), torch.ones(3, 1))]


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
    assert_type(hodiff.cross_hvp(lambda x, y: norm(x * y), X, X, X), Tensor)


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
    assert_type(hodiff.cross_hvp(lambda m, x: m(x).square().sum(), model, X, X), dict[str, Tensor])
    assert_type(hodiff.cross_hvp(lambda x, m: m(x).square().sum(), X, model, dict(model.named_parameters())), Tensor)
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
    assert_type(hodiff.jvp(lambda x: x.sin(), X, X), Tensor)
    model = nn.Linear(2, 1)
    assert_type(hodiff.jvp(lambda m: m(X), model, dict(model.named_parameters())), Tensor)
    assert_type(hodiff.jvp(model, X, X), Tensor)
    assert_type(hodiff.jvp(two, X, X), tuple[Tensor, Tensor])
    assert_type(hodiff.jacobian(two, X), Any)


def test_a_value_with_something_beside_it():
    (value, extra), gradient = hodiff.value_and_grad(lambda x: (norm(x), "extra"), X, has_aux=True)
    assert_type(gradient, Tensor)
    assert extra == "extra" and value == 2


def test_what_f_returns_beside_the_loss_comes_second():
    f, module = lambda x: (norm(x), "extra"), nn.Linear(2, 1)
    beside = lambda m: (output(m), "extra")
    assert_type(hodiff.grad(f, X, has_aux=True), tuple[Tensor, Any])
    assert_type(hodiff.grad(beside, module, has_aux=True), tuple[dict[str, Tensor], Any])
    assert_type(hodiff.grad(norm, X, has_aux=False), Tensor)
    assert_type(hodiff.hvp(f, X, X, has_aux=True), tuple[Tensor, Any])
    assert_type(hodiff.hvp(norm, X, X, has_aux=False), Tensor)
    assert_type(hodiff.hessian(f, X, has_aux=True), tuple[Tensor, Any])
    assert_type(hodiff.hessian(norm, X, has_aux=False), Tensor)
    assert_type(hodiff.hessian_diagonal(f, X, has_aux=True), tuple[Tensor, Any])
    assert_type(hodiff.hessian_diagonal(beside, module, has_aux=True), tuple[dict[str, Tensor], Any])


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


def test_a_product_has_the_type_of_its_vector():
    H = hodiff.HessianOperator(output, nn.Linear(2, 1))
    assert_type(H @ torch.ones(3), Tensor)
    assert_type(H @ np.ones(3), Tensor)
    assert_type(H @ [1.0, 2.0, 3.0], Tensor)
    assert_type(torch.ones(3) @ (2 * H - H.T / 4 + 0.1), Tensor)
    v = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    assert_type(H @ v, dict[str, Tensor])
    assert_type(H @ list(v.values()), list[Tensor])
    assert_type(H @ H, hodiff.LinearOperator)
    assert_type(H.block("bias"), hodiff.LinearOperator)


def test_operands_that_are_no_operators_are_errors():
    H = hodiff.HessianOperator(norm, X)
    for wrong in (
        lambda: H + "nonsense",  # pyright: ignore[reportOperatorIssue]
        lambda: H * None,  # pyright: ignore[reportOperatorIssue]
        lambda: H @ "nonsense",  # pyright: ignore[reportOperatorIssue]
    ):
        with pytest.raises(hodiff.InputError, match="expected"):
            wrong()


def test_options_are_literals():
    A = hodiff.MatrixOperator(X)
    for wrong in (
        lambda: hodiff.trace(A, method="x-trace"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.trace(A, probes="uniform"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.diagonal(A, method="x"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.eigsh(A, 1, which="LA"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.solve(A, X, method="lu"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.HessianOperator(norm, X, chunk_size="all"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.FisherOperator(
            forward,
            nn.MSELoss(),
            X,
            data=PAIRS,
            kind="true",  # pyright: ignore[reportArgumentType]
        ),
    ):
        with pytest.raises(hodiff.InputError, match="got"):
            wrong()


def test_a_jacobian_changes_the_structure():
    J = hodiff.JacobianOperator(forward, nn.Linear(2, 2), data=PAIRS)
    assert isinstance(J.T @ torch.ones(3, 2), dict)
    assert_type(J.T @ J, hodiff.LinearOperator)


def test_a_solution_has_the_type_of_the_right_hand_side():
    model = nn.Linear(2, 1)
    G = hodiff.GaussNewtonOperator(forward, nn.MSELoss(), model, data=PAIRS) + 1.0
    assert_type(hodiff.solve(G, hodiff.grad(output, model)).value, dict[str, Tensor])
    assert_type(hodiff.solve(G, torch.ones(3)).value, Tensor)
    assert_type(hodiff.trace(G, samples=4).value, Tensor)
    assert_type(hodiff.trace(G, samples=4).converged, bool | Tensor | None)


def test_what_is_called_often_gives_a_tensor():
    """The matrix of a plan, and the value of a compiled step."""
    assert_type(hodiff.sparse.plan_hessian(norm, X)(X), Tensor)
    assert_type(hodiff.sparse.plan_jacobian(torch.sin, X, output="csr")(X), Tensor)
    assert_type(hodiff.sparse.plan_hessian(norm, X, output="scipy")(X), Any)
    step = hodiff.compile_step(lambda model, x: model(x).square().mean(), nn.Linear(2, 1), backend="replay")
    assert_type(step(ROWS), Tensor)
    beside = lambda model, x: (model(x).square().mean(), x)
    assert_type(hodiff.compile_step(beside, nn.Linear(2, 1), has_aux=True, backend="replay")(ROWS), Any)


def test_submodules_are_known():
    assert_type(hodiff.graph.inspect(X), hodiff.graph.Graph)
    assert_type(hodiff.rules.SGD(lr=0.1), hodiff.rules.SGD)
    assert_type(hodiff.jets.report(torch.sin, X).order, int)
    assert_type(hodiff.sparse.plan_hessian(norm, X).products, int)
    assert_type(hodiff.implicit.argmin(norm, X * 0), Tensor)
    assert_type(hodiff.plotting.__name__, str)
