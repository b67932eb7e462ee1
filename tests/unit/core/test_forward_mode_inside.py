"""PyTorch's forward mode inside of `f`, through operations whose tangent has a wrong derivative.

Its rules for norms (and, in some releases, solve and det) read what the kernel keeps beside its result, and autograd
takes that for a constant. The values are right: the oracle is differences of these. Every public name, and every
spelling, is in `tests/contract/test_inside.py`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.forward_ad import enter_dual_level, exit_dual_level
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _versions
from hodiff.errors import GraphError
from tests.support.differences import directional_derivative, gradient_by_differences, relative_error

D = torch.float64
X = torch.tensor([[0.3, -0.8, 1.4], [0.9, 0.2, -0.5], [-0.4, 1.1, 0.7]], dtype=D)
U = torch.tensor([[0.5, 1.0, -0.3], [0.2, -0.7, 0.4], [1.2, 0.1, -0.6]], dtype=D)
W = torch.linspace(0.3, 1.7, 3, dtype=D)
EYE = 3 * torch.eye(3, dtype=D)

Function = Callable[[Tensor], Tensor]

SERVED: dict[str, Function] = {
    "layer_norm": lambda z: F.layer_norm(z, (3,), W, W.cos()),
    "torch.layer_norm": lambda z: torch.layer_norm(z, (3,)),
    "batch_norm": lambda z: F.batch_norm(z, None, None, W, W.cos(), training=True),
    "batch_norm, eval": lambda z: F.batch_norm(z, W.cos(), W, W),
    "instance_norm": lambda z: F.instance_norm(z[None], weight=W),
    "group_norm": lambda z: F.group_norm(z[None], 1, W),
    "det": lambda z: torch.linalg.det(z @ z.mT + EYE * z),
    "det of a batch": lambda z: torch.stack([z, z.sin()]).det(),
}


def along(g: Function) -> Function:
    def f(z: Tensor) -> Tensor:
        tangent: Any = torch.func.jvp(g, (z,), (z.cos(),))[1]
        return (tangent.sin() * torch.linspace(0.3, 1.7, tangent.numel(), dtype=D).reshape(tangent.shape)).sum()

    return f


class Counted:
    """A function that knows how often it was called."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.function(*args)


@pytest.mark.table(plain=2)
@pytest.mark.parametrize("name", SERVED)
def test_three_orders(name: str) -> None:
    f = along(SERVED[name])
    gradient: Any = lambda z: hodiff.grad(f, z)
    assert relative_error(gradient(X), gradient_by_differences(f, X, 2e-3)) < 1e-7
    product: Any = lambda z: hodiff.hvp(f, z, U)
    assert relative_error(product(X), directional_derivative(gradient, X, U, 2e-3)) < 1e-7
    third = hodiff.grad(lambda z: (hodiff.hvp(f, z, U) * U).sum(), X)
    assert relative_error(third, gradient_by_differences(lambda z: (product(z) * U).sum(), X, 2e-3)) < 1e-6


@pytest.mark.parametrize("name", SERVED)
def test_the_value_is_the_kernels(name: str) -> None:
    torch.testing.assert_close(hodiff.value_and_grad(along(SERVED[name]), X)[0], along(SERVED[name])(X))


def _in_levels(z: Tensor) -> Tensor:
    level = enter_dual_level()  # a name that was bound before, perhaps before hodiff was imported
    try:
        found = forward_ad.unpack_dual(F.layer_norm(forward_ad.make_dual(z, z.cos()), (3,)), level=level).tangent
        assert found is not None
        return found.sin().sum()
    finally:
        exit_dual_level()


def test_the_other_way_in() -> None:
    assert relative_error(hodiff.grad(_in_levels, X), gradient_by_differences(_in_levels, X, 2e-3)) < 1e-7


def test_forward_mode_over_forward_mode() -> None:
    """Its values, too, are wrong in PyTorch: the function is that of the definition."""

    def nested(norm: Function, z: Tensor) -> Tensor:
        inner = lambda y: torch.func.jvp(norm, (y,), (W.expand(3, 3),))[1]
        return torch.func.jvp(inner, (z,), (z.cos(),))[1].sin().sum()  # type: ignore[union-attr,return-value]

    def written(z: Tensor) -> Tensor:
        centered = z - z.mean(-1, keepdim=True)
        return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    value, found = hodiff.value_and_grad(lambda z: nested(lambda y: F.layer_norm(y, (3,)), z), X)
    torch.testing.assert_close(value, nested(written, X))
    assert relative_error(found, gradient_by_differences(lambda z: nested(written, z), X, 2e-3)) < 1e-7


def test_how_often_f_runs() -> None:
    """Twice where it uses forward mode, and the first run does not have everything written out; else once."""
    by_forward_mode = along(SERVED["layer_norm"])
    plain = lambda z: F.layer_norm(z, (3,)).sin().sum()
    cubic = lambda f: lambda: hodiff.hvp(f, X.clone().requires_grad_(), U, create_graph=True)
    for f, calls in ((by_forward_mode, 2), (plain, 1)):
        for run in (lambda f: hodiff.grad(f, X), lambda f: hodiff.hvp(f, X, U)):
            counted = Counted(f)
            run(counted)
            assert counted.calls == calls
        counted = Counted(f)
        cubic(counted)()
        assert counted.calls == 1


def test_a_level_that_was_open_before() -> None:
    def f(z: Tensor) -> Tensor:
        found = forward_ad.unpack_dual(F.layer_norm(forward_ad.make_dual(z, z.cos()), (3,))).tangent
        assert found is not None
        return found.sin().sum()

    counted = Counted(f)
    with forward_ad.dual_level():
        found = hodiff.grad(counted, X)
        value = forward_ad.unpack_dual(found).primal.clone()
    assert relative_error(value, hodiff.grad(_in_levels, X)) < 1e-12
    assert counted.calls == 1


def test_the_second_run_draws_what_the_first_drew() -> None:
    def f(z: Tensor) -> Tensor:
        scale = torch.rand(3, dtype=D)
        return torch.func.jvp(lambda t: F.layer_norm(scale * t, (3,)), (z,), (z.cos(),))[1].sum()  # type: ignore[union-attr]

    def seeded(z: Tensor) -> Tensor:
        torch.manual_seed(3)
        return f(z)

    torch.manual_seed(3)
    found, after = hodiff.grad(f, X), torch.rand(())
    assert relative_error(found, gradient_by_differences(seeded, X, 2e-3)) < 1e-7
    seeded(X)
    assert torch.equal(after, torch.rand(()))


def test_running_statistics_move_in_neither_run() -> None:
    norm = nn.BatchNorm1d(3, dtype=D)
    hodiff.grad(along(norm), X)
    assert torch.equal(norm.running_mean, torch.zeros(3, dtype=D))  # type: ignore[arg-type]


def test_samples_that_a_norm_mixes_are_said() -> None:
    f = lambda z: torch.func.jvp(SERVED["batch_norm"], (z,), (z.cos(),))[1].sum(-1)  # type: ignore[union-attr]
    with pytest.warns(hodiff.BatchMixingWarning, match="BatchNorm in training mode"):
        hodiff.gradient_penalty(f, X, create_graph=False)


def test_by_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(m: nn.Module) -> Tensor:
        return torch.func.jvp(m, (X,), (U,))[1].square().sum()  # type: ignore[union-attr,return-value]

    found = hodiff.grad(loss, model)
    weight: Any = model[0].weight

    def at(w: Tensor) -> Tensor:
        return loss(lambda z: torch.func.functional_call(model, {"0.weight": w}, (z,)))  # type: ignore[arg-type]

    assert relative_error(found["0.weight"], gradient_by_differences(at, weight, 2e-3)) < 1e-7


REFUSED: dict[str, Function] = {
    "householder_product": lambda z: torch.linalg.householder_product(z, W),
    "orgqr": lambda z: z.orgqr(W),
    "native_layer_norm": lambda z: torch.native_layer_norm(z, (3,), None, None, 1e-5)[0],
    "_native_batch_norm_legit": lambda z: torch._native_batch_norm_legit(z, None, None, True, 0.1, 1e-5)[0],  # type: ignore[attr-defined]
    "layer_norm": lambda z: torch.ops.aten.layer_norm.default(z, (3,)),
    "instance_norm": lambda z: torch.ops.aten.instance_norm(z[None], None, None, None, None, True, 0.1, 1e-5, False),
}
if _versions.LU_IS_CONSTANT:
    REFUSED |= {
        "det": lambda z: torch.ops.aten.linalg_det(z),
        "solve_ex": lambda z: torch.linalg.solve_ex(z, z.sin())[0],
        "slogdet": lambda z: torch.slogdet(z).logabsdet,
        "logdet": lambda z: torch.logdet(z @ z.mT + EYE),
        "solve": lambda z: torch.linalg.solve(z + EYE, z),
        "tensorsolve": lambda z: torch.linalg.tensorsolve(z, z[0]),
    }


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("run", [hodiff.grad, hodiff.hessian])
def test_others_are_refused_by_name(name: str, run: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match=f"forward mode .* through {name}, .*use hodiff.jvp inside f .*instead of"):
        run(along(REFUSED[name]), X)


@pytest.mark.parametrize("name", REFUSED)
def test_but_not_where_nothing_carries_a_tangent(name: str) -> None:
    f = lambda z: along(torch.sin)(z) + REFUSED[name](z).sin().sum()
    assert relative_error(hodiff.grad(f, X), gradient_by_differences(f, X, 2e-3)) < 1e-6


def test_the_way_out() -> None:
    f = lambda z: hodiff.jvp(REFUSED["householder_product"], z, z.cos()).sin().sum()
    oracle = lambda z: torch.func.jvp(REFUSED["householder_product"], (z,), (z.cos(),))[1].sin().sum()  # type: ignore[union-attr]
    assert relative_error(hodiff.grad(f, X), gradient_by_differences(oracle, X, 2e-3)) < 1e-7


def test_in_a_checkpoint() -> None:
    """It runs again as it ran, with norm layers written out."""
    block = lambda z: torch.func.jvp(SERVED["layer_norm"], (z,), (z.cos(),))[1].sin()
    f = lambda z: checkpoint(block, z, use_reentrant=False).sum()  # type: ignore[union-attr]
    assert relative_error(hodiff.grad(f, X), gradient_by_differences(lambda z: block(z).sum(), X, 2e-3)) < 1e-6


def test_inside_of_a_compiled_caller() -> None:
    f = lambda z: torch.func.jvp(SERVED["torch.layer_norm"], (z,), (z.cos(),))[1].sin().sum(-1)  # type: ignore[union-attr]
    penalty = lambda z: hodiff.gradient_penalty(f, z, create_graph=False)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(penalty, backend="eager")(X), penalty(X))


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="the tracer does not take enter_dual_level before 2.13")
def test_compiled_functions_that_enter_levels_are_as_they_were() -> None:
    def f(z: Tensor) -> Any:
        forward_ad.enter_dual_level()
        found = forward_ad.unpack_dual(forward_ad.make_dual(z, z.cos()).sin()).tangent
        forward_ad.exit_dual_level()
        return found

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(X), X.cos() ** 2)


def test_a_release_where_levels_are_not_noted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "_ENTER_LEVEL", "_enter_another_level")
    assert not _versions.LOOKS["whether f uses forward mode"](X)
    monkeypatch.undo()
    assert _versions.LOOKS["whether f uses forward mode"](X)
