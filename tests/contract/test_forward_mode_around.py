"""PyTorch's forward mode and `torch.func` around calls of hodiff: for every public name, right or refused in words.

A result that has lost its tangent counts as a constant, silently. The oracle is differences of the call itself.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

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
    found = tensors(value)
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
REFUSED_IN_DATA = {"second_order_operator", "value of Gauss-Newton", "gradient of Gauss-Newton"}


def gauss_newton(b: Tensor) -> hodiff.GaussNewtonOperator:
    return hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.MSELoss(), NET, data=[(b, b[:, :1].detach())])


OF_DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "per_sample_grad": lambda b: hodiff.per_sample_grad(lambda m, b: m(b).tanh().sum(1), NET, b)["0.weight"],
    "gram": lambda b: hodiff.gram(lambda m, b: m(b).tanh().sum(1), NET, b),
    "value": lambda b: hodiff.HessianOperator(lambda m: m(b).tanh().sum(), NET).value,
    "gradient": lambda b: hodiff.HessianOperator(lambda m: m(b).tanh().sum(), NET).gradient["0.weight"],
    "product": lambda b: hodiff.HessianOperator(lambda m: m(b).tanh().sum(), NET) @ torch.ones(13, dtype=b.dtype),
    "diagonal": lambda b: hodiff.diagonal(
        hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.MSELoss(), NET, data=[(b, b[:, :1].detach())]),
        method="exact",
    ).value["0.weight"],
    "value of Gauss-Newton": lambda b: gauss_newton(b).value,
    "gradient of Gauss-Newton": lambda b: gauss_newton(b).gradient["0.weight"],
    "second_order_operator": lambda b: hodiff.second_order_operator(lambda x: x.pow(3).sum(-1), BATCH, b.T @ b),
}


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.table(plain=4)
def test_a_tangent_in_data_is_right_or_refused(name: str) -> None:
    """What a graph has saved is read by value, which has none: rows in factors are not taken then."""
    try:
        with forward_ad.dual_level():
            (found,) = tangents([OF_DATA[name](forward_ad.make_dual(BATCH, ALONG))])
    except hodiff.InputError as error:
        assert re.search("carries a tangent|whose tangents", str(error)) and name in REFUSED_IN_DATA
        return
    high, low = (OF_DATA[name](BATCH + h * ALONG).detach() for h in (STEP, -STEP))
    torch.testing.assert_close(found, (high - low) / (2 * STEP), rtol=1e-5, atol=1e-5)
