"""A call inside the function of another, whose own function closes over the outer variable: every name in every name.

The oracle are differences of the inner call's values.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff import GraphError
from tests.support.callers import CALLERS, Caller, tensors
from tests.support.differences import first_difference, relative_error, second_difference

D = torch.float64
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
T = torch.tensor([0.37], dtype=D)
ONE = torch.ones(1, dtype=D)
ENTRY = ([0], [0])
Number = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore")  # of routes that Taylor mode leaves to others

OUTER: dict[str, tuple[int, Callable[[Number, Tensor], Any]]] = {
    "grad": (1, hodiff.grad),
    "value_and_grad": (1, lambda q, t: hodiff.value_and_grad(q, t)[1]),
    "vjp": (1, lambda q, t: hodiff.vjp(q, t, ONE)),
    "jvp": (1, lambda q, t: hodiff.jvp(q, t, ONE)),
    "jacobian": (1, hodiff.jacobian),
    "multi_grad": (1, lambda q, t: hodiff.multi_grad([q], t)),
    "JacobianOperator": (1, lambda q, t: hodiff.JacobianOperator(lambda z, _: q(z), t, data=[0]) @ ONE),
    "sparse_jacobian": (1, lambda q, t: hodiff.sparse_jacobian(q, t, pattern=ENTRY).to_dense()),
    "hvp": (2, lambda q, t: hodiff.hvp(q, t, ONE)),
    "hessian": (2, hodiff.hessian),
    "hessian_diagonal": (2, hodiff.hessian_diagonal),
    "nth_derivative": (2, lambda q, t: hodiff.nth_derivative(q, t, 2)),
    "HessianOperator": (2, lambda q, t: hodiff.HessianOperator(q, t) @ ONE),
    "sparse_hessian": (2, lambda q, t: hodiff.sparse_hessian(q, t, pattern=ENTRY).to_dense()),
    "laplacian": (2, lambda q, t: hodiff.laplacian(q, t, batch_ndim=0)),
    "laplacian, reverse": (2, lambda q, t: hodiff.laplacian(q, t, batch_ndim=0, method="reverse")),
}
DETACHED = ("HessianOperator", "JacobianOperator", "GaussNewtonOperator", "FisherOperator")
SPARSE = ("sparse_hessian", "sparse_jacobian", "sparse.plan_hessian", "sparse.plan_jacobian")
NO_FUNCTION = ("sparse.sparsity_pattern", "check_derivatives", "jets.report", "implicit.argmin", "implicit.root")
"""What gives no function of the outer variable; solutions have their own tests."""
INNER = [caller for caller in CALLERS if caller.name not in (*NO_FUNCTION, "implicit.fixed_point")]


def inner(caller: Caller) -> Number:
    """The inner call as a function of the variable that its function closes over."""

    def q(t: Tensor) -> Tensor:
        found = caller(lambda s: (s * t).sin() * s + (s + t) ** 3 * t / 4, X)
        return torch.stack([part.sin().sum() for part in found]).sum().reshape(1)

    return q


def fault(caller: Caller, names: list[str]) -> str:
    """What is wrong of one inner call in some outer ones; nothing where all is right, or refused by name."""
    q, expected = inner(caller), {}
    with torch.no_grad():
        expected[1] = first_difference(lambda h: q(T + h), 4e-3)
        expected[2] = second_difference(lambda h: q(T + h), 8e-3)
    for name in names:
        order, run = OUTER[name]
        try:
            found = tensors(run(q, T))[0].detach().reshape(1)
        except GraphError as error:
            detached = caller.name in DETACHED and "an operator's products are detached" in str(error)
            sparse = caller.name in SPARSE and "the sparse matrix that sparse_hessian or sparse_jac" in str(error)
            if not detached and not (sparse and (order == 2 or name in ("jvp", "JacobianOperator"))):
                return f"{caller.name} in {name}: {error}"
            continue
        if not relative_error(found, expected[order]) < 1e-4:
            return f"{caller.name} in {name}: {found}, right {expected[order]}"
    return ""


@pytest.mark.parametrize("caller", INNER, ids=str)
def test_in_the_main_names(caller: Caller) -> None:
    assert not fault(caller, ["grad", "hvp"])


@pytest.mark.nightly
@pytest.mark.parametrize("caller", INNER, ids=str)
def test_in_every_name(caller: Caller) -> None:
    assert not fault(caller, [*OUTER])


SPARSE_FORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "values": lambda f, x: hodiff.sparse.plan_hessian(f, x).values(x),
    "hessian": lambda f, x: hodiff.hessian(f, x, matrix=True),
}


@pytest.mark.parametrize("form", SPARSE_FORMS)
def test_the_ways_out_of_a_sparse_matrix(form: str) -> None:
    def q(t: Tensor) -> Tensor:
        return SPARSE_FORMS[form](lambda s: ((s[:, 1:] * s[:, :-1] + t) ** 4).sum(), X).sin().sum().reshape(1)

    with torch.no_grad():
        expected = second_difference(lambda h: q(T + h), 4e-3)
    assert relative_error(hodiff.hvp(q, T, ONE), expected) < 1e-4


@pytest.mark.parametrize("output", ["torch", "csr"])
def test_a_sparse_matrix_of_ours_is_not_blamed_on_the_caller(output: Any) -> None:
    def q(t: Tensor) -> Tensor:
        return hodiff.sparse_hessian(lambda s: ((s + t) ** 4).sum(), X, output=output).to_dense().sum()

    with pytest.raises(GraphError, match=r"the sparse matrix that sparse_hessian .*plan_hessian\(f, x\)\.values\(x\)"):
        hodiff.hvp(q, T, ONE)


def test_but_what_f_keeps_is_refused_as_before() -> None:
    kept: list[Tensor] = []

    def f(s: Tensor, t: Tensor) -> Tensor:
        kept.append(s * t)
        return (kept[0] * s).sum() ** 2

    def q(t: Tensor) -> Tensor:
        return sum(hodiff.hessian_diagonal(lambda s: f(s, t), x).sum() for x in (X, 2 * X))

    with pytest.raises(GraphError, match="kept from an earlier hodiff call"):
        hodiff.grad(q, T)


VALUES = {
    "partials": lambda f, x: hodiff.partials(f, x, [(), (0,)])[()],
    "partials, alone": lambda f, x: hodiff.partials(f, x, [()])[()],
    "derivatives": lambda f, x: hodiff.derivatives(f, x[:, 0], 2)[0],
    "derivatives, none": lambda f, x: hodiff.derivatives(f, x[:, 0], 0)[0],
}


@pytest.mark.parametrize("name", VALUES)
def test_the_value_beside_derivatives_is_a_result(name: str) -> None:
    """It has f's own graph, which leads to the leaf of a call that has ended."""
    f = lambda t: lambda s: (t * (s if s.ndim == 1 else s.sum(1))).sin()
    given = lambda t: VALUES[name](f(t), X).square().sum()
    x = X[:, 0] if "derivatives" in name else X.sum(1)
    slope = (2 * (0.37 * x).sin() * (0.37 * x).cos() * x).sum()
    torch.testing.assert_close(hodiff.grad(given, T), slope[None])


def test_residuals_of_a_value_and_its_derivatives() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()

    def decay(model: Any, x: Tensor) -> Tensor:
        u, u_x = hodiff.partials(lambda x: 1 + x[:, 0] * model(x)[:, 0], x, [(), (0,)])
        return u + u_x

    optimizer = hodiff.LevenbergMarquardt(decay, model)
    x = torch.linspace(0, 1, 12, dtype=D).reshape(-1, 1)
    for _ in range(30):
        optimizer.step(x)
    torch.testing.assert_close(1 + x * model(x), torch.exp(-x), atol=1e-4, rtol=0)
