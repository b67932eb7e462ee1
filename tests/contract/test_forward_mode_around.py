"""PyTorch's forward mode and `torch.func` around calls of hodiff: for every public name, right or refused in words.

A result that has lost its tangent counts as a constant, silently. The oracle is differences of the call itself.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import hodiff
from hodiff._core._versions import RELEASE
from tests.support.callers import CALLERS, PLAIN, SCALE, Caller, D, direction, tensors

pytestmark = pytest.mark.filterwarnings("ignore")

X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5]], dtype=D)
V = direction(X)
STEP = 1e-4
NO_TENSORS = ("sparse.sparsity_pattern", "jets.report", "check_derivatives")
"""What says something in numbers of Python."""
REFUSED = r"tangent of PyTorch's forward mode|torch\.func transform|PyTorch traces values"


def g(z: Tensor, *rest: Any) -> Tensor:
    return z.sin() * SCALE + z**3


At = Callable[[Caller, Tensor], list[Tensor]]
ROADS: dict[str, At] = {
    "the point": lambda caller, moved: caller(g, moved),
    "a closure": lambda caller, moved: caller(lambda z, *rest: g(z) * moved, X),
    "an argument": lambda caller, moved: caller(lambda z, w: g(z) * w, X, [moved]),
}
"""How a tensor with a tangent gets into a call."""


def tangents(results: Sequence[Tensor]) -> list[Tensor]:
    found = [forward_ad.unpack_dual(t).tangent for t in results]
    return [torch.zeros_like(t) if each is None else each.clone() for each, t in zip(found, results, strict=True)]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("caller", CALLERS, ids=str)
@pytest.mark.table(wide=80)
def test_a_tangent_is_right_or_refused(caller: Caller, road: str) -> None:
    if caller.name in NO_TENSORS:
        return
    at = ROADS[road]
    try:
        with forward_ad.dual_level():
            found = tangents(at(caller, forward_ad.make_dual(X, V)))
    except hodiff.HodiffError as error:
        assert re.search(REFUSED, str(error)), error
        return
    ahead, behind = ([t.detach() for t in at(caller, X + h * V)] for h in (STEP, -STEP))
    assert len(found) == len(ahead)
    for one, high, low in zip(found, ahead, behind, strict=True):
        torch.testing.assert_close(one, (high - low) / (2 * STEP), rtol=1e-5, atol=1e-5)


SERVED = ("value_and_grad", "value_grad_and_hessian", "nth_derivative", "derivatives", "hessian", "laplacian", "jet")


@pytest.mark.parametrize("name", SERVED)
def test_these_carry_what_their_function_reads(name: str) -> None:
    (caller,) = (caller for caller in CALLERS if caller.name == name)
    with forward_ad.dual_level():
        found = tangents(ROADS["a closure"](caller, forward_ad.make_dual(X, V)))
    assert all(t.any() for t in found)


def test_the_value_itself_where_f_returns_its_argument() -> None:
    """Copied for the caller, with its tangent."""
    with forward_ad.dual_level():
        z = forward_ad.make_dual(X, V)
        value, first = hodiff.derivatives(lambda t: t * z / z.detach(), X, 1)
        torch.testing.assert_close(forward_ad.unpack_dual(value).tangent, V)
        torch.testing.assert_close(forward_ad.unpack_dual(first).tangent, V / X)


def _joined(value: Any) -> Tensor:
    value = getattr(value, "value", value)  # of a record
    found = tensors(torch.as_tensor(value) if isinstance(value, float) else value)
    return torch.cat([t.reshape(-1).to(D) for t in found]) if found else X.sum()


OWN = ("select", "Selection", "derivatives_of", "twice_differentiable", "compile_step")
"""Calls in which the test's own lines, or the user's, meet the transform."""
DRAWN = "called random operation while in randomness error mode"
"""PyTorch's own words, which name its own way out."""
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    **{c.name: lambda x, c=c: _joined(c(g, x)) for c in CALLERS},
    **{n: lambda x, p=p: _joined(p(x)) for n, p in PLAIN.items() if n not in OWN and not n.startswith("graph.")},
}
AROUND: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "vmap": lambda h: torch.vmap(h)(torch.stack([X, X + 0.1])),
    "jacrev": lambda h: torch.func.jacrev(h)(X),
    "jacfwd": lambda h: torch.func.jacfwd(h)(X),
    "linearize": lambda h: torch.func.linearize(h, X)[1](V),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.table(wide=80)
def test_nothing_raw_in_a_transform(name: str, around: str) -> None:
    try:
        AROUND[around](CALLS[name])
    except hodiff.HodiffError:
        pass
    except RuntimeError as error:
        assert DRAWN in str(error) or (RELEASE < (2, 13) and "argument of type" in str(error)), error  # PyTorch's own


MATRICES = torch.stack([torch.eye(3, dtype=D) * 2, torch.eye(3, dtype=D) * 3])
BATCHED: dict[str, Callable[[Tensor], Any]] = {
    "eigsh": lambda A: hodiff.eigsh(hodiff.MatrixOperator(A), 1).values,
    "logdet": lambda A: hodiff.logdet(hodiff.MatrixOperator(A)).value,
    "solve": lambda A: hodiff.solve(hodiff.MatrixOperator(A), torch.ones(3, dtype=D)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_a_matrix_that_is_batched_by_vmap(name: str) -> None:
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.vmap(BATCHED[name])(MATRICES)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3)])
def test_a_fourth_derivative_that_is_a_constant(shape: tuple[int, ...]) -> None:
    """Its last parts are not batched, though those before are."""
    x = torch.rand(4, *shape, dtype=D)
    f = lambda z: (z**4).sum(-1)
    found = torch.vmap(lambda x: hodiff.biharmonic(f, x))(x)
    torch.testing.assert_close(found, torch.stack([hodiff.biharmonic(f, each) for each in x]))


NET = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(torch.float64)
BATCH, ALONG = (torch.linspace(a, 1, 6, dtype=torch.float64).view(3, 2) for a in (-1.0, 0.25))
OF_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "per_sample_grad": lambda b: hodiff.per_sample_grad(lambda m, b: m(b).tanh().sum(1), NET, b)["0.weight"],
    "gram": lambda b: hodiff.gram(lambda m, b: m(b).tanh().sum(1), NET, b),
    "second_order_operator": lambda b: hodiff.second_order_operator(lambda x: x.pow(3).sum(-1), BATCH, b.T @ b),
}


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.table(plain=2)
def test_a_tangent_in_data_is_right_or_refused(name: str) -> None:
    """What a graph has saved is read by value, which has none: rows in factors are not taken."""
    assert _is_right(OF_DATA[name]) is not (name == "second_order_operator")


def _is_right(call: Callable[[Tensor], Any]) -> bool:
    """Whether a result carries its tangent, as differences have it; False where it is refused."""
    high, low = (_joined(call(BATCH + h * ALONG)).detach() for h in (STEP, -STEP))
    try:
        with forward_ad.dual_level():
            (found,) = tangents([_joined(call(forward_ad.make_dual(BATCH, ALONG)))])
    except hodiff.InputError as error:
        assert "carries a tangent of PyTorch's forward mode" in str(error)
        return False
    torch.testing.assert_close(found, (high - low) / (2 * STEP), rtol=1e-5, atol=1e-5)
    return True


# --- operators: each by each public name that takes or has one ------------------------------------

LABELS = torch.tensor([0, 0, 0])


def sums(m: nn.Module, b: Sequence[Tensor]) -> tuple[Tensor, int]:
    return (m(b[0]) - b[1]).square().sum(), len(b[0])


def gauss_newton(b: Tensor, loss: Any, y: Tensor, **options: Any) -> hodiff.LinearOperator:
    predict = lambda m, b: m(b[0])
    return hodiff.GaussNewtonOperator(predict, loss, NET, data=[(b, y)], **options)


def fisher(b: Tensor, kind: Any) -> hodiff.LinearOperator:
    predict, loss = lambda m, b: m(b[0]), nn.CrossEntropyLoss()
    own = torch.Generator().manual_seed(0)
    return hodiff.FisherOperator(predict, loss, NET, data=[(b, LABELS)], kind=kind, generator=own)


def jacobian(b: Tensor) -> hodiff.JacobianOperator:
    return hodiff.JacobianOperator(lambda m: m(b).tanh(), NET)


Y = torch.ones(3, 1, dtype=D)
OPERATORS: dict[str, Callable[[Tensor], hodiff.LinearOperator]] = {
    "HessianOperator": lambda b: hodiff.HessianOperator(lambda m: m(b).tanh().sum(), NET),
    "HessianOperator, data": lambda b: hodiff.HessianOperator(sums, NET, data=[(b, Y)] * 2),
    "JacobianOperator": jacobian,
    "a product": lambda b: jacobian(b).T @ jacobian(b),
    "GaussNewtonOperator": lambda b: gauss_newton(b, nn.MSELoss(), Y),
    "GaussNewtonOperator, classes": lambda b: gauss_newton(b, nn.CrossEntropyLoss(), LABELS),
    "GaussNewtonOperator, blocks": lambda b: gauss_newton(b, nn.MSELoss(), Y, checkpoint="*"),
    "GaussNewtonOperator, targets": lambda b: gauss_newton(BATCH, nn.MSELoss(), b[:, :1]),
    "FisherOperator": lambda b: fisher(b, "exact"),
    "FisherOperator, empirical": lambda b: fisher(b, "empirical"),
    "FisherOperator, mc": lambda b: fisher(b, "mc"),
    "MatrixOperator": lambda b: hodiff.MatrixOperator(b.T @ b),
    "a sum": lambda b: 2 * OPERATORS["HessianOperator"](b) + OPERATORS["GaussNewtonOperator"](b),
    "a multiple": lambda b: OPERATORS["HessianOperator"](BATCH) * b[0, 0],
    "a weight": lambda b: hodiff.HessianOperator(lambda m, x: (m(x).tanh().sum(), 10 + b.sum()), NET, data=[BATCH]),
}
CARRYING = ("HessianOperator", "HessianOperator, data", "JacobianOperator", "a product")


def vector(A: hodiff.LinearOperator, side: int = -1) -> Tensor:
    return torch.linspace(0.1, 1, A.shape[side], dtype=D)


def pair(A: hodiff.LinearOperator, side: int = -1) -> Tensor:
    return torch.stack([vector(A, side), vector(A, side).sin()], 1)


def own() -> torch.Generator:
    return torch.Generator().manual_seed(0)


Use = Callable[[Any], Any]
PRODUCTS: dict[str, Use] = {
    "@": lambda A: A @ vector(A),
    "@, columns": lambda A: A @ pair(A),
    "@, stacked": lambda A: A @ A.unflatten(pair(A)),
    "@, on the left": lambda A: vector(A, 0) @ A,
    "@, rows": lambda A: pair(A, 0).T @ A,
    "T": lambda A: A.T @ vector(A, 0),
    "dense": lambda A: A.dense(),
    "value": lambda A: A.value,
    "gradient": lambda A: A.gradient,
    "block": lambda A: A.block("0.weight").dense(),
    "refresh": lambda A: A.refresh() @ vector(A),
}
"""By these operators that carry tangents do; all else refuses them, or gives them right."""
USES: dict[str, Use] = {
    **PRODUCTS,
    "to_scipy": lambda A: torch.as_tensor(A.to_scipy() @ np.linspace(0.1, 1, A.shape[-1])),
    "eigsh": lambda A: hodiff.eigsh(A, 1),
    "eigsh, differentiable": lambda A: hodiff.eigsh(A, 1, create_graph=True),
    "trace": lambda A: hodiff.trace(A, samples=99),
    "trace, of few": lambda A: hodiff.trace(A, samples=2, generator=own()),
    "trace, hutch++": lambda A: hodiff.trace(A, method="hutch++", samples=6, generator=own()),
    "trace, differentiable": lambda A: hodiff.trace(A, samples=99, create_graph=True),
    "diagonal": lambda A: hodiff.diagonal(A, method="exact"),
    "diagonal, of few": lambda A: hodiff.diagonal(A, samples=2, generator=own()),
    "diagonal, differentiable": lambda A: hodiff.diagonal(A, method="exact", create_graph=True),
    "logdet": lambda A: hodiff.logdet(A + 30, samples=99),
    "logdet, of few": lambda A: hodiff.logdet(A + 30, samples=2, generator=own()),
    "logdet, differentiable": lambda A: hodiff.logdet(A + 30, samples=99, create_graph=True),
    "solve": lambda A: hodiff.solve(A, vector(A), damping=30),
    "solve, several": lambda A: hodiff.solve(A, pair(A), damping=30),
    "solve, gmres": lambda A: hodiff.solve(A + 30, vector(A), method="gmres"),
    "solve, differentiable": lambda A: hodiff.solve(A + 30, vector(A), create_graph=True),
    "nystrom": lambda A: hodiff.nystrom(A, 2, 30, generator=own()) @ vector(A),
    "spectral_density": lambda A: hodiff.spectral_density(A, steps=2, samples=1, generator=own()).nodes,
}
NO_RESULT = {
    *("shape", "dtype", "device", "symmetric", "products"),
    *("cost", "close", "flatten", "unflatten"),
}
"""What says something of an operator, or of a vector, but not what its function is."""


def test_the_table_has_each_way_to_use_an_operator() -> None:
    public = [getattr(hodiff, name) for name in hodiff.__all__]
    classes = [c for c in public if isinstance(c, type) and issubclass(c, hodiff.LinearOperator)]
    names = {name for c in classes for name in dir(c) if not name.startswith("_")}
    functions = [f for f in public if inspect.isfunction(f)]
    names |= {f.__name__ for f in functions if "operator" in inspect.signature(f).parameters}
    assert names == {name.partition(",")[0] for name in USES} - {"@"} | NO_RESULT
    made = {c.__name__ for c in classes} - {"LinearOperator"}
    assert made <= {name.partition(",")[0] for name in OPERATORS}


EACH = [(operator, use) for operator in OPERATORS for use in USES]


def _fits(operator: str, use: str) -> bool:
    """Whether there is such a result without forward mode."""
    try:
        USES[use](OPERATORS[operator](BATCH))
    except (hodiff.HodiffError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(("operator", "use"), EACH)
@pytest.mark.table(plain=4, wide=80)
def test_a_tangent_in_an_operator_is_right_or_refused(operator: str, use: str) -> None:
    if _fits(operator, use):
        right = _is_right(lambda b: USES[use](OPERATORS[operator](b)))
        assert right or operator not in CARRYING or use not in PRODUCTS


FOLLOWED = {**AROUND, "make_fx": lambda h: make_fx(h)(X)}


@pytest.mark.parametrize("around", FOLLOWED)
@pytest.mark.parametrize(("operator", "use"), EACH)
@pytest.mark.table(plain=2, wide=80)
def test_nothing_raw_of_an_operator_in_a_transform(operator: str, use: str, around: str) -> None:
    if _fits(operator, use):
        words = r"torch\.func transform|PyTorch traces"
        with pytest.raises(hodiff.HodiffError, match=words):
            FOLLOWED[around](lambda x: _joined(USES[use](OPERATORS[operator](x.T))))
