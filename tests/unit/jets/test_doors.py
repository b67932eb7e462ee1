"""Where a jet could leave Taylor mode unseen: each is right by the automatic route, and refused by name by Taylor mode.

The oracle knows no derivative: second differences of f at plain tensors.
"""

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import hodiff
from hodiff import GraphError
from tests.support.differences import first_difference, gradient_by_differences, relative_error
from tests.support.properties import agree

D = torch.float64
X = torch.tensor([0.3, 0.5, 0.7], dtype=D)
ONES = torch.ones(3, dtype=D)


def second_differences(f: Callable[[Tensor], Tensor]) -> Tensor:
    h, axes = 1e-3, torch.eye(3, dtype=D)
    return sum((f(X + h * e) - 2 * f(X) + f(X - h * e)) / h**2 for e in axes)  # pyright: ignore[reportReturnType]


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(torch.sin(forward_ad.make_dual(primal, tangent))).tangent.sum()


def cube(y: Tensor) -> Tensor:
    return (y**3).sum()


@pytest.fixture(scope="module")
def traced() -> Any:
    return torch.jit.trace(cube, (X,))


@pytest.fixture(scope="module")
def scripted() -> Any:
    return torch.jit.script(cube)


FORWARD = r"forward mode inside f|a transform of torch\.func"
TRANSFORM = r"a transform of torch\.func or a tracer"
BELOW = "called below Python"
FUNCTION = r"a Python autograd\.Function: its backward defines its derivative"
TWICE = hodiff.MatrixOperator(2 * torch.eye(3, dtype=D))


class Attached(torch.autograd.Function):
    """A cube that was computed elsewhere, as solutions are: the argument is not looked at."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return 3 * g * z**2, None


class Written(torch.autograd.Function):
    """The argument, as after a kernel that writes into it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


def _solved(z: Tensor) -> Tensor:
    return hodiff.solve(TWICE, z**3).value * z


DOORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "jvp": (lambda z: torch.func.jvp(torch.sin, (z,), (z**2,))[1].sum(), FORWARD),
    "jvp along a constant": (lambda z: torch.func.jvp(torch.sin, (z,), (ONES,))[1].sum(), FORWARD),
    "jvp at a constant": (lambda z: torch.func.jvp(torch.sin, (ONES,), (z**2,))[1].sum(), FORWARD),
    "jvp, x from outside": (lambda z: torch.func.jvp(lambda y: (y * z**2).sin(), (ONES,), (ONES,))[1].sum(), FORWARD),
    "make_dual": (lambda z: dual(z, z**2), FORWARD),
    "make_dual at a constant": (lambda z: dual(ONES, z**2), FORWARD),
    "jacfwd": (lambda z: torch.func.jacfwd(torch.sin)(z).sum(), TRANSFORM),
    "linearize": (lambda z: torch.func.linearize(torch.sin, z)[1](z**2).sum(), FORWARD),
    "linearize at a constant": (lambda z: torch.func.linearize(torch.sin, ONES)[1](z**2).sum(), "no rule for"),
    "make_fx": (lambda z: make_fx(cube)(z)(z**2), TRANSFORM),
    "make_fx, x from outside": (lambda z: make_fx(lambda y: (y * z**3).sum())(ONES)(0 * ONES) + cube(z), TRANSFORM),
    "make_fx before dispatch": (lambda z: make_fx(cube, pre_dispatch=True)(z)(z**2), TRANSFORM),
    "functionalize": (lambda z: torch.func.functionalize(lambda y: (y * z**3).sum())(ONES), TRANSFORM),
    "vmap, x from outside": (lambda z: torch.vmap(lambda y: y * z**3)(torch.ones(2, dtype=D)).sum(), TRANSFORM),
    "without overrides": (lambda z: _without_overrides(z), BELOW),
    "as a Parameter": (lambda z: (nn.Parameter(z) ** 3).sum() + cube(z), "instance of type Jet"),
    "deepcopy": (lambda z: (copy.deepcopy(z) ** 3).sum() + cube(z), r"copy\.deepcopy"),
    "into .data": (lambda z: _into_data(z) + cube(z), "incompatible tensor type"),
    "a Function that hands on a value": (lambda z: (Attached.apply(z, z.detach() ** 3) * z).sum(), FUNCTION),
    "such a Function alone": (lambda z: Attached.apply(z, z.detach() ** 3).sum(), FUNCTION),
    "such a Function, further": (lambda z: Attached.apply(z, z.detach() ** 3).sin().sum() + cube(z), FUNCTION),
    "a Function that writes into its argument": (lambda z: cube(Written.apply(1 * z)), "what f does"),
    "a solution": (lambda z: (hodiff.solve(TWICE, z**3).value * z).sum(), FUNCTION),
    "a solution in inner calls": (lambda z: (hodiff.nth_derivative(_solved, z, 1) * z).sum(), "no rule for"),
    "to_dlpack": (lambda z: torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(z)).sum() + cube(z), "meta|as_strided"),
}
AS_A_CONSTANT = ("as a Parameter", "deepcopy", "into .data", "to_dlpack")
"""Those that cut the graph in plain PyTorch: beside them `cube` is what is differentiated."""
FROZEN = ("linearize", "make_fx, x from outside")
"""Those whose differences are not their derivative: PyTorch's own record takes x, or what is made of it, for fixed."""


def _without_overrides(z: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cube(z)


def _into_data(z: Tensor) -> Tensor:
    held = torch.zeros(3, dtype=D)
    held.data = z
    return (held**3).sum()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
@pytest.mark.parametrize("name", DOORS)
def test_no_door_leads_out_of_taylor_mode_unseen(name: str) -> None:
    f, words = DOORS[name]
    with pytest.raises(hodiff.GraphError, match=words):
        hodiff.laplacian(f, X, batch_ndim=0, method="jets")
    with pytest.warns(hodiff.HodiffWarning, match="Taylor mode has no rule for"):
        got = hodiff.laplacian(f, X, batch_ndim=0)
    agree(got.detach(), hodiff.laplacian(f, X, batch_ndim=0, method="reverse").detach())
    if name not in FROZEN:
        agree(got.detach(), second_differences(cube if name in AS_A_CONSTANT else f), 1e-5)


FIELDS: dict[str, Callable[..., Any]] = {
    "divergence": lambda f, x: hodiff.divergence(f, x),
    "curl": lambda f, x: hodiff.curl(f, x)[0],
    "second_order_operator": lambda f, x: hodiff.second_order_operator(
        lambda z: f(z).sum(-1), x, torch.eye(3, dtype=D)
    ),
    "partial": lambda f, x: hodiff.partial(lambda z: f(z).sum(-1), x, (0, 0, 1, 1)),
    "nth_derivative": lambda f, x: hodiff.nth_derivative(f, x, 3),
    "biharmonic": lambda f, x: hodiff.biharmonic(lambda z: f(z).sum(-1), x),
}


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("name", FIELDS)
def test_a_tangent_that_depends_on_x_is_differentiated_everywhere(name: str) -> None:
    """d sin along z² is z² cos z."""
    along = lambda z: torch.func.jvp(torch.sin, (z,), (z**2,))[1]
    got, expected = (FIELDS[name](f, X[None]) for f in (along, lambda z: z**2 * z.cos()))
    torch.testing.assert_close(got, expected)


def test_jet_refuses_a_tangent() -> None:
    with pytest.raises(hodiff.GraphError, match=r"hodiff\.jet has no other route"):
        hodiff.jet(lambda z: dual(z, z**2), X, [ONES])


@pytest.mark.parametrize("kind", ["traced", "scripted"])
def test_torchscript_is_refused_by_name_and_served_by_reverse(kind: str, request: pytest.FixtureRequest) -> None:
    f = request.getfixturevalue(kind)
    with pytest.raises(hodiff.GraphError, match=rf"pow.*{BELOW}"):
        hodiff.laplacian(f, X, batch_ndim=0, method="jets")
    with pytest.warns(hodiff.HodiffWarning, match=BELOW):
        got = hodiff.laplacian(f, X, batch_ndim=0)
    agree(got.detach(), 6 * X.sum())


def test_an_error_of_f_is_its_own_though_an_operation_was_refused_before() -> None:
    """What f raises of itself comes from the other route, as it is."""

    def f(z: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            torch.func.functionalize(cube)(z)
        raise KeyError("mine")

    with pytest.warns(hodiff.HodiffWarning, match="Taylor mode"), pytest.raises(KeyError, match="mine"):
        hodiff.laplacian(f, X, batch_ndim=0)


def test_an_error_of_f_passes_unchanged() -> None:
    def f(z: Tensor) -> Tensor:
        raise ValueError(f"mine, of shape {tuple(z.shape)}")

    with pytest.raises(ValueError, match=re.escape("mine, of shape (3,)")):
        hodiff.laplacian(f, X, batch_ndim=0)


def test_the_surroundings_of_the_call_are_no_door() -> None:
    """A transform or a tracer around the call was there first."""
    laplacian = lambda z: hodiff.laplacian(cube, z, batch_ndim=0, method="jets", create_graph=True)
    agree(torch.vmap(laplacian)(X[None]), 6 * X.sum()[None])
    agree(make_fx(laplacian)(X)(2 * X), 12 * X.sum())


CELL = nn.GRUCell(3, 3).to(D)
FALLBACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "ndtri": lambda z: torch.special.ndtri(z / 2),
    "i0": torch.special.i0,
    "cummax": lambda z: z.cummax(0)[0] ** 2,
    "atan2": lambda z: torch.atan2(z, z.flip(0)),
    "inv": lambda z: torch.linalg.inv(z[:, None] * z + torch.eye(3, dtype=D)),
    "GRUCell": lambda z: CELL(z[None]),
}
AROUND: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "laplacian": lambda f, z: hodiff.laplacian(f, z, batch_ndim=0),
    "laplacian, jets": lambda f, z: hodiff.laplacian(f, z, batch_ndim=0, method="jets"),
    "value_grad_and_laplacian": lambda f, z: hodiff.value_grad_and_laplacian(f, z, batch_ndim=0)[2],
    "second_order_operator": lambda f, z: hodiff.second_order_operator(f, z, torch.eye(3, dtype=D), batch_ndim=0),
    "divergence": lambda f, z: hodiff.divergence(lambda y: f(y) * y, z, batch_ndim=0),
    "jet": lambda f, z: hodiff.jet(f, z, [ONES, 0 * ONES])[1][1],
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("operation", FALLBACKS)
def test_vmap_around_an_operation_by_the_fallback(operation: str, name: str) -> None:
    """The graph of one operation, which the fallback needs, is hidden there: its part would be missing."""
    f = lambda z: cube(z) + FALLBACKS[operation](z).sum()
    with pytest.raises(GraphError, match=r"whose graph torch\.vmap around a call hides.* with batch_ndim=1, in place"):
        torch.vmap(lambda z: AROUND[name](f, z))(torch.stack([X, 2 * X]))
    scales = torch.tensor([1.0, 2.0], dtype=D)  # what f alone knows, and what the directions alone do
    with pytest.raises(GraphError, match=r"torch\.vmap around a call hides"):
        torch.vmap(lambda s: AROUND[name](lambda z: f(s * z), X))(scales)
    with pytest.raises(GraphError, match=r"torch\.vmap around a call hides"):
        torch.vmap(lambda s: hodiff.jet(f, X, [s * ONES])[1][0])(scales)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("operation", [name for name in FALLBACKS if name != "GRUCell"])  # a model, see below
def test_other_transforms_around_it(operation: str) -> None:
    f = lambda z: cube(z) + FALLBACKS[operation](z).sum()
    laplacian = lambda z: hodiff.laplacian(f, z, batch_ndim=0, method="jets")
    expected = gradient_by_differences(lambda z: torch.func.hessian(f)(z).diagonal().sum(), X, 1e-3)
    for found in (
        torch.func.grad(laplacian)(X),
        torch.func.jacrev(laplacian)(X),
        torch.vmap(torch.func.grad(laplacian))(X[None])[0],
    ):
        assert relative_error(found, expected) < 1e-5


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(3, 4),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "MultiheadAttention": lambda: nn.MultiheadAttention(3, 1),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_transform_around_a_model(name: str) -> None:
    """Its parameters require grad, and no graph of the transform leads to them."""
    torch.manual_seed(0)
    model = MODELS[name]().to(D)

    def f(z: Tensor) -> Tensor:
        rows = z[None]
        found = model(rows, rows, rows) if name == "MultiheadAttention" else model(rows)
        return (found if isinstance(found, Tensor) else found[0]).sin().square().sum()

    laplacian = lambda z: hodiff.laplacian(f, z, batch_ndim=0)
    values = lambda z: laplacian(z.detach()).detach()
    expected = gradient_by_differences(values, X, 1e-3)
    assert relative_error(values(X)[None], second_differences(f).detach()[None]) < 1e-4
    assert relative_error(torch.func.grad(laplacian)(X).detach(), expected) < 1e-6
    second = torch.func.grad(lambda z: hodiff.jet(f, z, [ONES])[1][0])(X).detach()
    along = lambda z: first_difference(lambda t: f(z + t * ONES).detach(), 1e-3)
    assert relative_error(second, gradient_by_differences(along, X, 1e-3)) < 1e-5


def test_a_jet_tells_the_device_of_its_value_and_has_no_data() -> None:
    seen: list[Any] = []

    def f(z: Tensor) -> Tensor:
        seen[:] = [z.device, z.is_cpu, z.is_meta, z.get_device(), z.new_zeros(2).device, torch.zeros_like(z).device]
        return cube(z)

    hodiff.laplacian(f, X, batch_ndim=0, method="jets")
    cpu = torch.device("cpu")
    assert seen == [cpu, True, False, -1, cpu, cpu]
