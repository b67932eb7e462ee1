"""The type checker infers a result's type from *where*; pyright reads this file, and pytest runs it."""

from typing import assert_type

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


def test_a_container_gives_the_same_container():
    assert_type(hodiff.grad(lambda pair: norm(pair[0]) + norm(pair[1]), (X, X)), tuple[Tensor, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some["a"]), {"a": X}), dict[str, Tensor])
    assert_type(hodiff.grad(lambda some: norm(some[0]), [X]), list[Tensor])


def test_a_module_gives_a_dict_by_name():
    model = nn.Linear(2, 1)
    assert_type(hodiff.grad(output, model), dict[str, Tensor])
    assert_type(hodiff.grad(chosen, hodiff.select(model, "weight")), dict[str, Tensor])
    assert_type(hodiff.hvp(output, model, hodiff.grad(output, model)), dict[str, Tensor])


def test_a_matrix_is_a_tensor_whatever_where_is():
    assert_type(hodiff.hessian(output, nn.Linear(2, 1), matrix=True), Tensor)


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
        lambda: H * None,  # pyright: ignore[reportOperatorIssue, reportOptionalOperand]
        lambda: H @ "nonsense",  # pyright: ignore[reportOperatorIssue]
    ):
        with pytest.raises(hodiff.InputError, match="expected"):
            wrong()


def test_options_are_literals():
    A = hodiff.MatrixOperator(X)
    for wrong in (
        lambda: hodiff.trace(A, method="xtrace"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.trace(A, probes="uniform"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.diagonal(A, method="x"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.eigsh(A, 1, which="LA"),  # pyright: ignore[reportArgumentType]
        lambda: hodiff.solve(A, X, method="gmres"),  # pyright: ignore[reportArgumentType]
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
    assert_type(hodiff.trace(G, samples=4).converged, bool)
