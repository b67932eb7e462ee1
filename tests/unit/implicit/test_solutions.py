"""`argmin`, `root` and `fixed_point` against closed forms and solutions found again; what is wrong, refused."""

import math
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

import hodiff
from hodiff import ConvergenceWarning, GraphError, InputError, implicit
from hodiff.curvature import _krylov
from hodiff.curvature._links import ImplicitSystem
from hodiff.curvature._memory import LiveBytes
from hodiff.implicit import _unroll, argmin, fixed_point, root
from tests.support.differences import first_difference, relative_error

D = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


A, Y, C = randn(40, 12), randn(40, seed=1), randn(12, seed=2)
THETA = 0.3 * randn(12, seed=3)


def ridge(x: Tensor, theta: Tensor) -> Tensor:
    return 0.5 * (A @ x - Y).square().sum() + 0.5 * (theta.exp() * x * x).sum()


def closed(theta: Tensor) -> Tensor:
    return torch.linalg.solve(A.T @ A + torch.diag(theta.exp()), A.T @ Y)


def attached(theta: Tensor, **options: object) -> Tensor:
    return argmin(ridge, closed(theta.detach()), args=(theta,), **options)


OUTER = {"cubic": lambda x: (x**3 * C).sum(), "linear": lambda x: C @ x, "square": lambda x: x.square().sum()}


# --- a closed form ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", OUTER)
def test_ridge_to_the_third_order(outer: str) -> None:
    got, expected = lambda t: OUTER[outer](attached(t)), lambda t: OUTER[outer](closed(t))
    assert relative_error(hodiff.grad(got, THETA), hodiff.grad(expected, THETA)) < 1e-12
    assert relative_error(hodiff.hvp(got, THETA, C), hodiff.hvp(expected, THETA, C)) < 1e-12
    assert relative_error(hodiff.hessian(got, THETA), hodiff.hessian(expected, THETA)) < 1e-12
    third = lambda f: hodiff.grad(lambda t: hodiff.hvp(f, t, C) @ C, THETA)
    assert relative_error(third(got), third(expected)) < 1e-12


def test_jacobians_of_the_solution() -> None:
    assert relative_error(hodiff.jacobian(attached, THETA), hodiff.jacobian(closed, THETA)) < 1e-12
    assert relative_error(hodiff.jvp(attached, THETA, C), hodiff.jvp(closed, THETA, C)) < 1e-12


def test_the_usual_surrogate_is_wrong_at_second_order() -> None:
    """x - H⁻¹ ∇f, one link: what `order=1` refuses to differentiate twice."""
    x = closed(THETA)
    H = A.T @ A + torch.diag(THETA.exp())

    def surrogate(theta: Tensor) -> Tensor:
        gradient = A.T @ (A @ x - Y) + theta.exp() * x
        return OUTER["cubic"](x - torch.linalg.solve(H, gradient))

    expected = hodiff.hessian(lambda t: OUTER["cubic"](closed(t)), THETA)
    assert relative_error(hodiff.hessian(surrogate, THETA), expected) > 1e-2
    theta = THETA.clone().requires_grad_()
    (g,) = torch.autograd.grad(OUTER["cubic"](attached(theta)), theta, create_graph=True)
    with pytest.raises(GraphError, match=r"argmin, called at .*test_solutions.py:\d+, .*order 1, .*Pass order=2"):
        g.sum().backward()


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("outer", OUTER)
def test_one_derivative_too_many_raises(order: int, outer: str) -> None:
    theta, found = THETA.clone().requires_grad_(), 0
    value = OUTER[outer](attached(theta, order=order))
    expected = OUTER[outer](closed(theta))
    with pytest.raises(GraphError, match=rf"order {order}, and this one is higher.*order={order + 1}"):
        while True:
            (value,) = torch.autograd.grad(value, theta, create_graph=True)
            (expected,) = torch.autograd.grad(expected, theta, create_graph=True)
            assert relative_error(value.detach(), expected.detach()) < 1e-11
            value, expected, found = value @ C, expected @ C, found + 1
    assert found == order


# --- other problems ---------------------------------------------------------------------------------------------------

LABELS = (randn(40, seed=4) + A @ C > 0).to(D)


def logistic(x: Tensor, theta: Tensor) -> Tensor:
    loss = nn.functional.binary_cross_entropy_with_logits(A @ x, LABELS, reduction="sum")
    return loss + 0.5 * (theta.exp() * x * x).sum()


def fitted(theta: Tensor) -> Tensor:
    """By Newton's method."""
    x = torch.zeros(12, dtype=D)
    for _ in range(10):
        _, g, H = hodiff.value_grad_and_hessian(logistic, x, args=(theta.detach(),))
        x = x - torch.linalg.solve(H, g)
    return x


def test_logistic_against_fits_found_again() -> None:
    outer = lambda t: (argmin(logistic, fitted(t), args=(t,)) ** 2 * C).sum()
    gradient = lambda t: C @ hodiff.grad(outer, t)
    first = first_difference(lambda s: (fitted(THETA + s * C) ** 2 * C).sum())
    assert relative_error(gradient(THETA), first) < 1e-8
    second = first_difference(lambda s: gradient(THETA + s * C))
    assert relative_error(C @ hodiff.hvp(outer, THETA, C), second) < 1e-7


def test_a_cubic_root_to_the_third_order() -> None:
    """x³ + x = θ at x = 1: x' = 1/4, x'' = -6/64, x''' = (108 - 24)/1024 by the chain rule."""
    x = lambda t: root(lambda x: x**3 + x - t, torch.ones((), dtype=D))
    t = torch.tensor(2.0, dtype=D)
    found = [hodiff.grad(x, t), hodiff.hessian(x, t), hodiff.grad(lambda t: hodiff.hessian(x, t), t)]
    for got, expected in zip(found, (1 / 4, -6 / 64, 84 / 1024), strict=True):
        assert got == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("radius", [0.6, 1.08])
def test_a_deep_equilibrium(radius: float) -> None:
    """Also where the iteration, and a Neumann series of its derivative, would diverge."""
    W = randn(24, 24, seed=5)
    W = W * 2.2 / W.norm() if radius < 1 else W * 7.4 / W.norm()
    u = 0.1 * randn(24, seed=6)

    def solved(u: Tensor, W: Tensor) -> Tensor:
        z = torch.zeros(24, dtype=D)
        for _ in range(12):
            J = hodiff.jacobian(lambda z: z - torch.tanh(W @ z + u), z)
            z = z - torch.linalg.solve(J, z - torch.tanh(W @ z + u))
        return z

    def outer(u: Tensor) -> Tensor:
        z = fixed_point(lambda z: torch.tanh(W @ z + u), solved(u.detach(), W))
        return (z**2 * torch.linspace(1, 2, 24, dtype=D)).sum()

    value = torch.no_grad()(outer)
    v = randn(24, seed=7)
    J = (1 - solved(u, W) ** 2)[:, None] * W
    assert (torch.linalg.eigvals(J).abs().max() > 1) == (radius > 1)
    first = first_difference(lambda t: value(u + t * v), 1e-3)
    assert relative_error(v @ hodiff.grad(outer, u), first) < 1e-8
    second = first_difference(lambda t: hodiff.grad(outer, u + t * v), 1e-3)
    assert relative_error(hodiff.hvp(outer, u, v), second) < 1e-7


@pytest.mark.parametrize(("size", "steps"), [(10, 0), (64, 0), (65, 20)])
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_small_system_is_solved_by_its_matrix(
    method: Any, size: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it in one pass, and no steps; but where it is not definite."""
    taken: list[int] = []
    for kind in (_krylov.ConjugateGradients, _krylov.MINRES):
        step = kind.step
        monkeypatch.setattr(kind, "step", lambda block, step=step: (taken.append(1), step(block))[1])
    scale = torch.linspace(1, 30, size, dtype=D)
    t, u = torch.ones(size, dtype=D, requires_grad=True), torch.linspace(1, 2, size, dtype=D)
    f = lambda x: (0.5 * scale * x * x - t * x).sum()
    (found,) = torch.autograd.grad(argmin(f, 1 / scale, method=method), t, u)
    assert relative_error(found, u / scale) < (1e-12 if not steps else 1e-7)
    assert len(taken) >= steps if steps else not taken
    scale[0] = -1.0
    x = argmin(f, 1 / scale, method=method)
    if method == "cg":
        with pytest.raises(GraphError, match="negative or zero curvature"):
            torch.autograd.grad(x, t, u)
    else:
        assert relative_error(torch.autograd.grad(x, t, u)[0], u / scale) < 1e-7


def test_a_saddle_needs_minres() -> None:
    H = torch.tensor([3.0, 1.0, -0.5], dtype=D)
    theta = torch.ones(3, dtype=D, requires_grad=True)
    f = lambda x: 0.5 * (H * x * x).sum() - theta @ x
    x = (1 / H).clone()
    with pytest.raises(GraphError, match=r"negative or zero curvature.*method='minres'.*damping="):
        argmin(f, x).sum().backward()
    (got,) = torch.autograd.grad(argmin(f, x, method="minres").sum(), theta)
    torch.testing.assert_close(got, 1 / H)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_a_singular_problem(method: str) -> None:
    """More parameters than data: fine for a loss that sees the range alone, no derivative otherwise."""
    B, theta = randn(4, 9, seed=8), randn(4, seed=9).requires_grad_()
    x = torch.linalg.pinv(B) @ theta.detach()
    f = lambda x: 0.5 * (B @ x - theta).square().sum()
    seen = argmin(f, x, method=method)
    (got,) = torch.autograd.grad((B @ seen).square().sum(), theta)
    torch.testing.assert_close(got, 2 * theta.detach())
    with pytest.raises(GraphError, match=r"(curvature|singular).*damping="):
        argmin(f, x, method=method).sum().backward()


def test_one_unknown_of_no_dimensions() -> None:
    """TorchOpt gives zero there."""
    theta = torch.tensor(3.0, dtype=D, requires_grad=True)
    x = argmin(lambda x: (x - theta.square()) ** 2, torch.tensor(9.0, dtype=D))
    assert torch.autograd.grad(x, theta)[0] == pytest.approx(6.0)


def test_the_transpose() -> None:
    """A Jacobian that is far from symmetric, of several leaves."""
    M = torch.triu(randn(5, 5, seed=10), 1) * 3 + torch.eye(5, dtype=D)
    theta = randn(5, seed=11).requires_grad_()
    z = torch.linalg.solve(M, theta.detach())
    F = lambda p: {
        "b": M[2:] @ torch.cat([p["a"], p["b"]]) - theta[2:],
        "a": M[:2] @ torch.cat([p["a"], p["b"]]) - theta[:2],
    }
    found = root(F, {"a": z[:2], "b": z[2:]})
    (got,) = torch.autograd.grad((found["a"].sum() + 2 * found["b"].sum()), theta)
    torch.testing.assert_close(got, torch.linalg.solve(M.T, torch.tensor([1.0, 1, 2, 2, 2], dtype=D)))


# --- where ------------------------------------------------------------------------------------------------------------


def weight_decay_problem() -> tuple[nn.Module, Tensor, object]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=D)
    X, y, decay = randn(20, 3), randn(20, 1, seed=1), torch.tensor(0.3, dtype=D, requires_grad=True)
    f = lambda m: (m(X) - y).square().mean() + decay * (m.weight.square().sum() + m.bias.square().sum())
    ones = torch.cat([X, torch.ones(20, 1, dtype=D)], 1)
    solved = lambda t: torch.linalg.solve(ones.T @ ones / 20 + t * torch.eye(4, dtype=D), ones.T @ y / 20)
    with torch.no_grad():
        w = solved(decay)
        model.weight.copy_(w[:3].T)
        model.bias.copy_(w[3])
    return model, decay, (f, solved)


def test_a_module_gives_a_dict_by_name() -> None:
    model, decay, (f, solved) = weight_decay_problem()
    found = argmin(f, model)
    assert list(found) == ["weight", "bias"]
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())  # bit for bit
    outer = functional_call(model, found, (torch.ones(1, 3, dtype=D),)).sum()
    (got,) = torch.autograd.grad(outer, decay)
    expected = hodiff.grad(lambda t: solved(t).sum(), decay.detach())
    assert relative_error(got, expected) < 1e-10
    assert all(p.grad is None for p in model.parameters())
    chosen = argmin(lambda s: f(s.module), hodiff.select(model, "weight"), gradient_tol=math.inf)
    assert list(chosen) == ["weight"]


def test_only_what_f_uses_is_reached() -> None:
    """Not the solver's history, nor its start."""
    start, theta = torch.ones(2, dtype=D, requires_grad=True), torch.ones(2, dtype=D, requires_grad=True)
    x = argmin(lambda x: (x - theta).square().sum(), start * 1.0)
    x.sum().backward()
    assert start.grad is None and torch.equal(theta.grad, torch.ones(2, dtype=D))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_detached_without_grad_mode(context: type) -> None:
    with context():
        x = attached(THETA.clone().requires_grad_())
    assert not x.requires_grad and torch.equal(x, closed(THETA))


def test_it_is_a_copy() -> None:
    theta, x = torch.ones(2, dtype=D, requires_grad=True), torch.ones(2, dtype=D)
    found = argmin(lambda x: (x - theta).square().sum() + (x**4).sum() * 0, x)
    x.zero_()
    assert torch.equal(found, torch.ones(2, dtype=D))
    found.sum().backward()
    assert torch.equal(theta.grad, torch.ones(2, dtype=D))


def test_inside_a_problem_of_another() -> None:
    """A minimum within the function of a minimum: x = θ², y = x θ."""

    def y(theta: Tensor) -> Tensor:
        def upper(y: Tensor) -> Tensor:
            x = argmin(lambda x: (x - theta**2).square().sum(), theta.detach() ** 2)
            return (y - x * theta).square().sum()

        return argmin(upper, theta.detach() ** 3)

    t = torch.tensor([1.5], dtype=D)
    assert hodiff.grad(lambda t: y(t).sum(), t) == pytest.approx(3 * 1.5**2)
    assert hodiff.hessian(lambda t: y(t).sum(), t) == pytest.approx(6 * 1.5)


def test_random_numbers_are_drawn_once() -> None:
    """The residual and its Jacobian are of one function; another draw for each would be of none."""
    theta = torch.tensor(2.0, dtype=D, requires_grad=True)
    draw = lambda: torch.rand(3, dtype=D) + 1
    torch.manual_seed(3)
    a, after = draw(), torch.rand(1)
    torch.manual_seed(3)
    x = argmin(lambda x: (draw() * (x - theta).square()).sum() + x.square().sum(), 2 * a / (a + 1), order=2)
    assert torch.equal(torch.rand(1), after)
    (got,) = torch.autograd.grad((C[:3] * x).sum(), theta)
    assert relative_error(got, (C[:3] * a / (a + 1)).sum()) < 1e-12


def test_derivatives_can_be_checked() -> None:
    assert hodiff.check_derivatives(lambda t: OUTER["cubic"](attached(t)), THETA)


def test_vmap_of_the_backward_pass() -> None:
    theta = THETA.clone().requires_grad_()
    x = attached(theta)
    with pytest.raises(InputError, match=r"argmin: the backward.*torch.vmap.*hodiff.jacobian"):
        torch.vmap(lambda v: torch.autograd.grad(x, theta, v, retain_graph=True))(torch.eye(12, dtype=D))


# --- checks -----------------------------------------------------------------------------------------------------------


def test_far_from_the_solution_it_warns() -> None:
    with pytest.warns(
        ConvergenceWarning, match=r"argmin: x_star is not the solution.*polish=1.*gradient_tol="
    ) as caught:
        found = argmin(ridge, closed(THETA) * 1.1, args=(THETA.clone().requires_grad_(),))
    assert caught[0].filename == __file__
    assert torch.equal(found.detach(), closed(THETA) * 1.1)
    polished = argmin(ridge, closed(THETA) * 1.1, args=(THETA.clone().requires_grad_(),), polish=1)
    assert relative_error(polished.detach(), closed(THETA)) < 1e-12


UNLIKE = {
    "dtype": (lambda x: x.float(), r"for x_star, f returned torch\.float32, \(3,\), expected torch\.float64, \(3,\)"),
    "shape": (lambda x: x[:2], r"for x_star, f returned torch\.float64, \(2,\), expected torch\.float64, \(3,\)"),
}


@pytest.mark.parametrize("solution", [root, fixed_point])
@pytest.mark.parametrize("part", UNLIKE)
def test_what_is_unlike_the_solution_is_named(solution: Any, part: str) -> None:
    wrong, words = UNLIKE[part]
    with pytest.raises(InputError, match=rf"f must return the structure and shapes of x_star.*{words}"):
        solution(lambda x: wrong(x * 2), torch.ones(3, dtype=D))


WHERE = {argmin: "the gradient of f", root: r"F\(x\)", fixed_point: r"x - g\(x\)"}


@pytest.mark.parametrize("solution", WHERE)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_residual_that_is_not_finite_is_refused(solution: Any, bad: float) -> None:
    f = (lambda x: (x * bad).sum()) if solution is argmin else (lambda x: x * bad)
    with pytest.raises(InputError, match=rf"{WHERE[solution]} is not finite at x_star"):
        solution(f, torch.ones(3, dtype=D))


def test_how_far_is_too_far() -> None:
    """At 1.1 times the solution of a quadratic problem the gradient is H x* / 10, an eleventh of that at zero."""
    theta = THETA.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        argmin(ridge, closed(THETA) * 1.1, args=(theta,), gradient_tol=0.092)
    for limit in (0.09, 0.0):
        with pytest.warns(ConvergenceWarning, match=r"not the solution: the gradient of f has 0\.091 times its size"):
            argmin(ridge, closed(THETA) * 1.1, args=(theta,), gradient_tol=limit)


def test_a_tolerance_that_says_nothing_still_leaves_a_derivative() -> None:
    """Zero solves a system to a relative residual of 1."""
    theta = THETA.clone().requires_grad_()
    x = argmin(lambda x: (x**2 / 2 - theta * x).sum(), THETA, rtol=5.0)
    assert relative_error(torch.autograd.grad(x, theta, C)[0], C) < 1e-14


@pytest.mark.parametrize(("size", "relative"), [(1.0, 1e-6), (0.1, 1e-5), (10.0, 1e-6), (1e-5, 0.1), (1.9e-6, None)])
def test_a_small_right_hand_side_beside_a_large_one(
    size: float, relative: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is solved to what the tolerance is of the large one; below that, zero is the solution."""
    seen, solve = [], implicit.attempt
    monkeypatch.setattr(implicit, "attempt", lambda *a, **k: (seen.append(k["rtol"]), solve(*a, **k))[1])
    made: list[ImplicitSystem] = []
    monkeypatch.setattr(ImplicitSystem, "_report", lambda self, found: None)
    init = ImplicitSystem.__init__
    monkeypatch.setattr(ImplicitSystem, "__init__", lambda self, *a, **k: (made.append(self), init(self, *a, **k))[1])
    theta = THETA.clone().requires_grad_()
    x = attached(theta, rtol=1e-6)
    v = size * C / C.norm()
    found = made[-1].solved([v], transposed=True, least=[1.0])
    assert seen == ([] if relative is None else [pytest.approx([relative])])
    assert x.requires_grad and bool(found[0].any()) == (relative is not None)


def test_products_with_many_vectors_at_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """J' and J, at once, as their systems see them one vector at a time."""
    M, seen, solve = torch.triu(randn(5, 5, seed=10)) + 3 * torch.eye(5, dtype=D), [], implicit.attempt
    monkeypatch.setattr(implicit, "attempt", lambda A, *a, **k: (seen.append(A.dense()), solve(A, *a, **k))[1])
    theta = randn(5, seed=11).requires_grad_()
    x = root(lambda x: M @ x - theta, torch.linalg.solve(M, theta).detach(), polish=1)
    x.sum().backward()
    assert [relative_error(got, expected) < 1e-14 for got, expected in zip(seen, (M, M.T), strict=True)] == [True, True]


@pytest.mark.parametrize("kind", [argmin, root, fixed_point])
def test_polish_squares_the_error(kind: object) -> None:
    theta = torch.tensor(2.0, dtype=D, requires_grad=True)
    f = {
        argmin: lambda x: x**4 / 4 + x**2 / 2 - theta * x,
        root: lambda x: x**3 + x - theta,
        fixed_point: lambda x: theta - x**3,
    }[kind]
    near = torch.tensor(1.0 + 1e-3, dtype=D)
    errors = [abs(kind(f, near, polish=k, gradient_tol=1.0).item() - 1) for k in (0, 1, 2)]
    assert errors[1] < 2 * errors[0] ** 2 and errors[2] < 1e-11
    x = kind(f, near, polish=2)
    assert torch.autograd.grad(x, theta)[0] == pytest.approx(0.25, rel=1e-6)


def test_polish_takes_the_jacobian_not_its_transpose() -> None:
    M = torch.triu(randn(5, 5, seed=10), 1) * 3 + torch.eye(5, dtype=D)
    theta = randn(5, seed=11)
    exact = torch.linalg.solve(M, theta)
    with torch.no_grad():
        found = root(lambda x: M @ x - theta, exact + 0.1, polish=1)
    assert relative_error(found, exact) < 1e-7


def test_a_backward_that_does_not_converge_names_the_call() -> None:
    theta = THETA.clone().requires_grad_()
    x = attached(theta, products=3)
    with pytest.warns(ConvergenceWarning, match=r"argmin, called at .*test_solutions.*3 products.*residual") as caught:
        x.sum().backward()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("again", [False, True])
def test_passes_of_different_sizes_have_their_own_tolerance(again: bool) -> None:
    """A tolerance left over from a large pass would make the next one zero; so in passes that are differentiated."""
    theta = THETA.clone().requires_grad_()
    x = attached(theta, order=2)
    expected = hodiff.grad(lambda t: OUTER["cubic"](closed(t)), THETA)
    product = hodiff.hvp(lambda t: OUTER["cubic"](closed(t)), THETA, C)
    for size in (1e9, 1.0, 1e-9):
        (got,) = torch.autograd.grad(size * OUTER["cubic"](x), theta, retain_graph=True, create_graph=again)
        assert relative_error(got.detach() / size, expected) < 1e-9
        for other in (1e9, 1e-9) if again else ():
            (found,) = torch.autograd.grad(other * (got @ C), theta, retain_graph=True)
            assert relative_error(found / size / other, product) < 1e-8


def test_single_precision() -> None:
    a, y, c = A.float(), Y.float(), C.float()
    f = lambda x, t: 0.5 * (a @ x - y).square().sum() + 0.5 * (t.exp() * x * x).sum()
    outer = lambda t: (argmin(f, closed(t.detach().double()).float(), args=(t,)) ** 3 * c).sum()
    theta = THETA.float()
    assert (
        relative_error(hodiff.grad(outer, theta).double(), hodiff.grad(lambda t: OUTER["cubic"](closed(t)), THETA))
        < 1e-3
    )
    got = hodiff.hvp(outer, theta, c).double()
    assert relative_error(got, hodiff.hvp(lambda t: OUTER["cubic"](closed(t)), THETA, C)) < 1e-4


def test_damping_and_a_preconditioner() -> None:
    theta = THETA.clone().requires_grad_()
    (plain,) = torch.autograd.grad(attached(theta).sum(), theta)
    inverse = hodiff.MatrixOperator(torch.linalg.inv(A.T @ A + torch.diag(THETA.exp())), symmetric=None)
    inverse = hodiff.MatrixOperator((inverse.dense() + inverse.dense().T) / 2)
    (got,) = torch.autograd.grad(attached(theta, preconditioner=inverse, products=4).sum(), theta)
    assert relative_error(got, plain) < 1e-9
    x, H = closed(THETA), A.T @ A + torch.diag(THETA.exp())
    (damped,) = torch.autograd.grad(attached(theta, damping=5.0).sum(), theta)
    expected = -THETA.exp() * x * torch.linalg.solve(H + 5 * torch.eye(12, dtype=D), torch.ones(12, dtype=D))
    assert relative_error(damped, expected) < 1e-8


def test_damping_is_one_problem_at_every_order() -> None:
    """The solution that is held where it is: F(x, θ) + λ (x - x*) = 0, x* constant."""
    held = closed(THETA)

    def moved(theta: Tensor) -> Tensor:
        return torch.linalg.solve(A.T @ A + torch.diag(theta.exp()) + 5 * torch.eye(12, dtype=D), A.T @ Y + offset)

    offset = (A.T @ A + torch.diag(THETA.exp()) + 5 * torch.eye(12, dtype=D)) @ held - A.T @ Y
    got, expected = lambda t: OUTER["cubic"](attached(t, damping=5.0)), lambda t: OUTER["cubic"](moved(t))
    once = hodiff.grad(lambda t: OUTER["cubic"](attached(t, damping=5.0, order=1)), THETA)
    twice = hodiff.grad(lambda t: OUTER["cubic"](attached(t, damping=5.0, order=2)), THETA)
    assert relative_error(once, hodiff.grad(expected, THETA)) < 1e-7
    assert relative_error(twice, hodiff.grad(expected, THETA)) < 1e-9
    assert relative_error(hodiff.hessian(got, THETA), hodiff.hessian(expected, THETA)) < 1e-8
    third = lambda f: hodiff.grad(lambda t: hodiff.hvp(f, t, C) @ C, THETA)
    assert relative_error(third(got), third(expected)) < 1e-8


# --- costs ------------------------------------------------------------------------------------------------------------


class Count:
    """Evaluations of f, and the linear systems solved with their products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evaluations, self.systems = 0, []
        solved = ImplicitSystem.solved

        def counted(system: ImplicitSystem, v: object, **options: object) -> list[Tensor]:
            before = system.operator.products
            found = solved(system, v, **options)
            self.systems += [system.operator.products - before]
            return found

        monkeypatch.setattr(ImplicitSystem, "solved", counted)

    def f(self, x: Tensor, theta: Tensor) -> Tensor:
        self.evaluations += 1
        return ridge(x, theta)


def test_the_backward_pass_is_one_system_and_one_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    count, theta = Count(monkeypatch), THETA.clone().requires_grad_()
    x = argmin(count.f, closed(THETA), args=(theta,))
    assert count.evaluations == 1 and not count.systems
    OUTER["cubic"](x).backward()
    assert count.evaluations == 1
    (products,) = count.systems
    assert products <= 15  # 12 unknowns, and a look at the residual


def test_the_conditions_of_a_quadratic_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the equations of the active constraints; GMRES alone takes a pass for each unknown, 80 of them."""
    n, active = 40, 15
    Q, G = randn(n, n, seed=1), randn(n, n, seed=2)
    Q, x = Q @ Q.T / n + 0.1 * torch.eye(n, dtype=D), randn(n, seed=3)
    forces = torch.cat([randn(active, seed=4).abs() + 0.1, torch.zeros(n - active, dtype=D)])
    h = G @ x + (forces == 0).double() * (randn(n, seed=5).abs() + 0.1)
    p = (-(Q @ x) - G.T @ forces).requires_grad_()
    conditions = lambda z: {"x": Q @ z["x"] + p + G.T @ z["forces"], "forces": z["forces"] * (G @ z["x"] - h)}
    solution, passes, one = root(conditions, {"x": x, "forces": forces}), [], implicit.Transposed._times
    monkeypatch.setattr(implicit.Transposed, "_times", lambda J, v: (passes.append(v), one(J, v))[1])
    (found,) = torch.autograd.grad(solution["x"] @ randn(n, seed=6), p)
    K = torch.zeros(n + active, n + active, dtype=D)
    K[:n, :n], K[:n, n:], K[n:, :n] = Q, G[:active].T, G[:active]
    v = torch.cat([randn(n, seed=6), torch.zeros(active, dtype=D)])
    assert relative_error(found, -torch.linalg.solve(K, v)[:n]) < 1e-7
    assert len(passes) <= 10


def test_a_product_with_the_hessian_takes_three_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adjoint; how the solution moves; how the adjoint moves. Four and a half were taken once."""
    count = Count(monkeypatch)
    outer = lambda t: OUTER["cubic"](argmin(count.f, closed(t.detach()), args=(t,), order=2))
    theta = THETA.clone().requires_grad_()
    torch.autograd.grad(outer(theta), theta)
    assert sum(p > 0 for p in count.systems) == 1
    first, count.systems = sum(count.systems), []
    hodiff.hvp(outer, THETA, C)
    assert sum(p > 0 for p in count.systems) == 3
    assert sum(count.systems) <= 3.3 * first
    assert count.evaluations == 2 * 3
    count.systems = []
    hodiff.jvp(lambda t: argmin(count.f, closed(t.detach()), args=(t,)), THETA, C)
    assert sum(p > 0 for p in count.systems) == 2  # of which one, along ones, is there to be differentiated


X2 = torch.ones(2, dtype=D)
THETA2 = torch.ones(2, dtype=D, requires_grad=True)
REFUSED = {
    "not finite": (lambda: argmin(lambda x: (x - THETA2).square().sum(), X2 / 0), InputError, "x_star has entries"),
    "a residual that is not": (lambda: root(lambda x: x / (x - 1) * THETA2, X2), InputError, r"F\(x\) is not finite"),
    "no function": (lambda: argmin(X2, X2), InputError, "f: got a Tensor, expected a function"),
    "another shape": (lambda: root(lambda x: x[:1] - THETA2[:1], X2), InputError, r"equation.*\(1,\), expected"),
    "another structure": (lambda: root(lambda x: (x - THETA2,), X2), InputError, r"of x_star.*F\(x\).*tuple"),
    "another structure of g": (lambda: fixed_point(lambda x: (x / 2,), X2), InputError, r"of x_star.*g\(x\).*tuple"),
    "another dtype": (lambda: fixed_point(lambda x: (x * THETA2).float(), X2), InputError, "float32, .*expected"),
    "a transform": (
        lambda: torch.vmap(lambda t: argmin(lambda x: (x - t).square().sum(), X2))(X2), InputError, "inside a torch"
    ),
    "a method": (lambda: argmin(lambda x: x.sum(), X2, method="newton"), InputError, "method: got 'newton', expected"),
    "an order": (lambda: argmin(lambda x: x.sum(), X2, order=0), InputError, "order: got 0"),
    "past the argument": (
        lambda: argmin(lambda x: (x * THETA2).square().sum(), THETA2), GraphError, "other than through its argument"
    ),
    "not its argument": (lambda: argmin(lambda x: THETA2.sum(), X2), GraphError, "does not depend on x_star"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row: str) -> None:
    call, error, pattern = REFUSED[row]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=pattern):
            call()


# --- many problems ----------------------------------------------------------------------------------------------------


def random_problem(seed: int) -> None:
    """A quadratic and a quartic, of a tensor, a container or a module, in double or single precision."""
    g = torch.Generator().manual_seed(seed)
    n, kind, single = 3 + seed % 5, ("tensor", "dict", "module")[seed % 3], seed % 4 == 3
    make = lambda *shape: torch.randn(*shape, dtype=D, generator=g)
    B, c, q, theta, v = make(n + 2, n), make(n), make(n).square() + 0.1, make(3), make(3)
    mixing = make(3, n)

    def f(x: Tensor, t: Tensor) -> Tensor:
        b, cc, qq, m = (z.to(x.dtype) for z in (B, c, q, mixing))
        return 0.5 * (b @ x).square().sum() + (qq * (x - (t @ m).sin()) ** 4).sum() - cc @ x * t[0].exp()

    def minimum(t: Tensor) -> Tensor:
        x = torch.zeros(n, dtype=D)
        for _ in range(15):
            _, slope, H = hodiff.value_grad_and_hessian(f, x, args=(t.detach().double(),))
            x = x - torch.linalg.solve(H, slope)
        return x

    def whole(t: Tensor) -> Tensor:
        x = minimum(t).to(t.dtype)
        if kind == "tensor":
            return argmin(f, x, args=(t,))
        if kind == "dict":
            found = argmin(lambda p: f(torch.cat([p["b"], p["a"]]), t), {"a": x[1:], "b": x[:1]})
            return torch.cat([found["b"], found["a"]])
        model = nn.Linear(n, 1, bias=False, dtype=t.dtype)
        model.weight.data = x[None]
        return argmin(lambda m: f(m.weight[0], t), model)["weight"][0]

    outer = lambda t: (whole(t).sin() * torch.arange(1, n + 1).to(t.dtype)).sum() + t.square().sum()
    exact = lambda t: (minimum(t).sin() * torch.arange(1, n + 1)).sum() + t.square().sum()
    dtype = torch.float32 if single else D
    first = first_difference(lambda s: exact(theta + s * v), 1e-3)
    assert relative_error((hodiff.grad(outer, theta.to(dtype)) @ v.to(dtype)).double(), first) < (
        5e-3 if single else 1e-7
    )
    second = first_difference(lambda s: v @ hodiff.grad(outer, theta + s * v), 1e-3)
    got = v.to(dtype) @ hodiff.hvp(outer, theta.to(dtype), v.to(dtype))
    assert relative_error(got.double(), second) < (2e-2 if single else 1e-6)


@pytest.mark.table(plain=2)
@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed: int) -> None:
    random_problem(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8, 300))
def test_many_random_problems(seed: int) -> None:
    random_problem(seed)


def test_what_was_made_under_stand_ins_is_known_by_itself_not_by_its_place_in_memory():
    mode = _unroll.SubstituteInputs([], [])
    x = torch.ones(2)
    with mode:
        made = x + 1
    assert mode.made(made)
    mode._made[id(x)] = mode._made[id(made)]  # as where the one is gone, and the other lies in its place
    assert not mode.made(x)


def flat(parts: object) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def test_hypertorch_ridge() -> None:
    """Its `CG` on the map of a gradient step: (1 - J)ᵀ u = ∂E/∂w, and the gradient -uᵀ ∂map/∂λ; and the closed form."""
    A, y, B, z = randn(30, 8), randn(30, seed=1), randn(20, 8, seed=2), randn(20, seed=3)
    theta = 0.2 * randn(8, seed=4)
    inner = lambda w, t: 0.5 * (A @ w - y).square().mean() + 0.5 * (t.exp() * w * w).sum()
    outer = lambda w: 0.5 * (B @ w - z).square().mean()
    solved = lambda t: torch.linalg.solve(A.T @ A / 30 + torch.diag(t.exp()), A.T @ y / 30)
    got = hodiff.grad(lambda t: outer(argmin(inner, solved(t.detach()), args=(t,))), theta)
    mapped = lambda w, t: w - 0.1 * hodiff.grad(inner, w, args=(t,))
    iterated = hodiff.grad(lambda t: outer(fixed_point(mapped, solved(t.detach()), args=(t,))), theta)
    w, t = solved(theta).requires_grad_(), theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(inner(w, t), w, create_graph=True)
    J = torch.stack([torch.autograd.grad(w - 0.1 * slope, w, e, retain_graph=True)[0] for e in torch.eye(8, dtype=D)])
    (b,) = torch.autograd.grad(outer(w), w)
    u = torch.linalg.solve((torch.eye(8, dtype=D) - J).T, b)
    (theirs,) = torch.autograd.grad(w.detach() - 0.1 * slope, t, u)
    closed = hodiff.grad(lambda t: outer(solved(t)), theta)
    for found in (got, iterated, theirs):
        assert relative_error(found, closed) < 1e-10


def conjugate_gradients(product: object, b: Tensor, steps: int) -> Tensor:
    x, r = torch.zeros_like(b), b.clone()
    d, size = r.clone(), r @ r
    for _ in range(steps):
        image = product(d)
        step = size / (d @ image)
        x, r = x + step * d, r - step * image
        size, before = r @ r, size
        d = r + size / before * d
    return x


def test_imaml_the_inner_solve() -> None:
    """Weights near a common start, φ = argmin L(φ) + λ|φ - θ|²/2: the start's gradient is (1 + H/λ)⁻¹ ∇L_val(φ)."""
    torch.manual_seed(1)
    net, lam = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double(), 2.0
    X, y, V, z = randn(10, 2), randn(10, 1, seed=1), randn(10, 2, seed=2), randn(10, 1, seed=3)
    start = {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}
    loss = lambda m: (m(X) - y).square().mean()
    near = lambda m: loss(m) + 0.5 * lam * sum((p - start[n]).square().sum() for n, p in m.named_parameters())
    for _ in range(8):  # Newton's method
        H = hodiff.HessianOperator(near, net)
        with torch.no_grad():
            step = H.unflatten(torch.linalg.solve(H.dense(), H.flatten(H.gradient)))
            for n, p in net.named_parameters():
                p -= step[n]
    adapted = argmin(near, net)
    value = (functional_call(net, adapted, (V,)) - z).square().mean()
    got = flat(torch.autograd.grad(value, list(start.values())))

    b = flat(torch.autograd.grad((net(V) - z).square().mean(), list(net.parameters())))
    H = hodiff.HessianOperator(loss, net)
    theirs = conjugate_gradients(lambda v: v + H @ v / lam, b, 30)
    assert relative_error(got, theirs) < 1e-7
    few = conjugate_gradients(lambda v: v + H @ v / lam, b, 5)  # as many as there; what that leaves is said here
    with pytest.warns(hodiff.ConvergenceWarning, match=r"after 5 products"):
        five = flat(
            torch.autograd.grad(
                (functional_call(net, argmin(near, net, products=5), (V,)) - z).square().mean(), list(start.values())
            )
        )
    assert relative_error(five, got) < 5 * relative_error(few, theirs) + 1e-3


class Layer(nn.Module):
    """The residual layer of the tutorial on deep equilibria: convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((4, 6), (6, 4)))
        self.norms = nn.ModuleList(nn.GroupNorm(2, channels) for channels in (6, 4, 4))
        for convolution in (self.first, self.second):
            convolution.weight.data.normal_(0, 0.01)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        y = self.norms[0](F.softplus(self.first(z)))
        return self.norms[2](F.softplus(z + self.norms[1](x + self.second(y))))


def test_a_deep_equilibrium_by_gmres() -> None:
    torch.manual_seed(0)
    layer, x = Layer().double(), randn(1, 4, 3, 3)
    leaves = [*layer.parameters()]

    def solved() -> Tensor:
        z = torch.zeros(1, 4, 3, 3, dtype=D)
        with torch.no_grad():
            for _ in range(200):
                z = layer(z, x)
        return z

    def value() -> Tensor:
        return (fixed_point(lambda z: layer(z, x), solved()).tanh() * randn(1, 4, 3, 3, seed=1)).sum()

    got = torch.autograd.grad(value(), leaves)
    z = solved().requires_grad_()
    J = hodiff.jacobian(lambda z: layer(z, x), z).reshape(36, 36)
    (b,) = torch.autograd.grad((z.tanh() * randn(1, 4, 3, 3, seed=1)).sum(), z)
    u = torch.linalg.solve((torch.eye(36, dtype=D) - J).T, b.reshape(-1)).reshape(1, 4, 3, 3)
    assert relative_error(flat(got), flat(torch.autograd.grad(layer(z, x), leaves, u))) < 1e-7
    p, v = layer.second.weight, randn(4, 6, 3, 3, seed=2)
    weight = p.detach().clone()

    def moved(t: float) -> Tensor:
        p.data.copy_(weight + t * v)
        found = (solved().tanh() * randn(1, 4, 3, 3, seed=1)).sum()
        p.data.copy_(weight)
        return found

    index = next(i for i, leaf in enumerate(leaves) if leaf is p)
    assert relative_error((got[index] * v).sum(), first_difference(moved, 1e-4)) < 1e-6


# --- inexact on purpose -----------------------------------------------------------------------------------------------


def equilibrium() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights, bias, the fixed point of tanh(W x + bias), and the Jacobian there."""
    W, bias = randn(6, 6, seed=1) / 6, randn(6, seed=2)
    x = torch.zeros(6, dtype=D)
    for _ in range(200):
        x = torch.tanh(W @ x + bias)
    return W, bias.requires_grad_(), x, (1 - x**2)[:, None] * W


@pytest.mark.parametrize("terms", [0, 1, 4])
def test_the_first_terms_of_a_neumann_series(terms: int) -> None:
    """With none it is the Jacobian-free backward pass."""
    W, bias, x, J = equilibrium()
    v = randn(6, seed=3)
    attached = fixed_point(lambda x: torch.tanh(W @ x + bias), x, method="neumann", iterations=terms)
    (found,) = torch.autograd.grad(attached @ v, bias)
    series = sum(torch.linalg.matrix_power(J.T, j) for j in range(terms + 1))
    torch.testing.assert_close(found, (1 - x**2) * (series @ v))


@pytest.mark.parametrize("solution", [argmin, root, fixed_point])
def test_so_many_steps_of_a_linear_system_are_taken_without_a_warning(solution) -> None:
    """Each is an iteration of its method on the transposed system."""
    A, b = torch.diag(torch.tensor([1.0, 2.0, 5.0, 9.0], dtype=D)) / 9, randn(4, seed=4).requires_grad_()
    x, v = torch.linalg.solve(A, b.detach()), randn(4, seed=5)
    residual = {
        argmin: lambda x: x @ A @ x / 2 - b @ x,
        root: lambda x: A @ x - b,
        fixed_point: lambda x: x - A @ x + b,
    }[solution]
    (found,) = torch.autograd.grad(solution(residual, x, iterations=2) @ v, b)
    method = "cg" if solution is argmin else "gmres"
    expected = hodiff.solve(hodiff.MatrixOperator(A), v, method=method, iterations=2).value
    torch.testing.assert_close(found, expected)
    assert float((A @ expected - v).norm()) > 0.1


def test_a_series_that_diverges_raises() -> None:
    bias = randn(3, seed=6).requires_grad_()
    x = fixed_point(lambda x: bias - 3 * x, bias.detach() / 4, method="neumann", iterations=4)
    with pytest.raises(hodiff.GraphError, match=r"fixed_point, called at .*: the Neumann series diverges"):
        x.sum().backward()


def test_a_restart_bounds_what_gmres_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    W, bias, x, J = equilibrium()
    kept, begin = [], _krylov.GMRES._restart
    monkeypatch.setattr(
        _krylov.GMRES, "_restart", lambda block, r: (kept.append(block._basis.shape[-2]), begin(block, r))[1]
    )
    v = randn(6, seed=3)
    attached = fixed_point(lambda x: torch.tanh(W @ x + bias), x, restart=2)
    (found,) = torch.autograd.grad(attached @ v, bias)
    expected = (1 - x**2) * torch.linalg.solve((torch.eye(6, dtype=D) - J).T, v)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert set(kept) == {2}


def outlives_its_use(x: object) -> bool:
    """Whether a caller holds what it gives until the call ends.

    Python 3.11 does not, but where PyTorch evaluates frames; which stays so after a compilation that
    has failed.
    """
    reference = weakref.ref(x)
    del x
    return reference() is not None


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize(("batch", "bound"), [((), 8.02), ((4,), 10.02)])
def test_the_memory_of_a_backward_pass_with_a_restart(batch: tuple[int, ...], bound: float, dtype: torch.dtype) -> None:
    """In vectors like the state: the basis of five, the iterate, and the two that a pass of this g takes by itself.

    Side by side, two more are copied.
    """
    size = 2**14 // math.prod(batch)
    weight, bias = torch.linspace(-0.2, 0.7, size, dtype=dtype), randn(*batch, size).to(dtype).requires_grad_()
    g = lambda x: torch.tanh(weight * x + bias)
    x, v = torch.zeros(*batch, size, dtype=dtype), torch.ones(*batch, size, dtype=dtype)
    with torch.no_grad():
        for _ in range(100):
            x = g(x)
    attached = fixed_point(g, x, batch_ndim=len(batch), restart=5)
    with LiveBytes() as live:
        (found,) = torch.autograd.grad(attached, bias, v)
    assert live.peak / (v.itemsize * v.numel()) < bound + outlives_its_use(nn.Module())
    slope = 1 - x**2
    torch.testing.assert_close(found, slope / (1 - weight * slope), rtol=1e-3, atol=1e-3)


def test_bad_methods() -> None:
    with pytest.raises(hodiff.InputError, match="method: got 'cg', expected \"gmres\" or"):
        root(lambda x: x - 1, torch.ones(2), method="cg")


@pytest.mark.parametrize(
    "solve",
    [
        lambda w, x: argmin(lambda z: (z - w).square().sum(), x),
        lambda w, x: root(lambda z: z - w, x),
        lambda w, x: fixed_point(lambda z: z / 2 + w / 2, x),
    ],
)
def test_a_frozen_layer_gives_its_value_and_the_head_is_trained(solve):
    frozen, x_star = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    solution = solve(frozen, x_star)
    assert torch.equal(solution, x_star)
    assert not solution.requires_grad
    head = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    assert hodiff.grad((head * solution.sum()) ** 2, head) == 2 * 3 * 9
    assert hodiff.grad(lambda h: h * solve(frozen, x_star).sum(), head) == 3


class Exponential(nn.Module):
    """exp(w) - theta w, whose minimum is the logarithm of theta."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w)


def by_hooks(m: Exponential, theta: Tensor) -> Tensor:
    """A checkpoint of somebody's own: what was saved is computed again, of what the module has then."""
    with saved_tensors_hooks(lambda saved: None, lambda packed: m.w.exp()):
        value = m.w.exp()
    return (value - theta * m.w).sum()


def test_what_runs_again_for_the_system_is_at_the_solution() -> None:
    """Whatever has become of the module since."""
    theta = torch.tensor([0.5, 2.0, 3.0], dtype=D, requires_grad=True)
    model = Exponential(theta.detach().log())
    x = argmin(by_hooks, model, args=(theta,))["w"]
    with torch.no_grad():
        model.w.fill_(5.0)
    assert relative_error(torch.autograd.grad(x.sum(), theta)[0], 1 / theta.detach()) < 1e-9


@pytest.mark.parametrize("solution", [argmin, root, fixed_point])
def test_rounding_is_no_distance_from_a_solution_that_is_zero(solution: Any) -> None:
    """Whose product with the Jacobian is no size to compare with."""
    theta = torch.full((2, 3), 1e-12, dtype=D, requires_grad=True)
    f = {
        argmin: lambda x: (x - theta).square().sum(-1) / 2,
        root: lambda x: x - theta,
        fixed_point: lambda x: x / 2 + theta / 2,
    }[solution]
    for zeros in (slice(None), slice(1)):
        start = torch.ones(2, 3, dtype=D) * 1e-12
        start[zeros] = 0
        x = solution(f, start, batch_ndim=1)
        assert relative_error(torch.autograd.grad(x.sum(), theta)[0], torch.ones(2, 3, dtype=D)) < 1e-9


# --- without a derivative, and within tangents ------------------------------------------------------------------------


def test_without_grad_mode_a_solution_is_checked_and_copied() -> None:
    x = closed(THETA) * 1.1
    with torch.no_grad():
        with pytest.warns(ConvergenceWarning, match="x_star is not the solution"):
            found = argmin(ridge, x, args=(THETA,))
        with pytest.raises(InputError, match=r"F\(x\) is not finite at x_star"):
            root(lambda x: x * math.nan, x)
    found.zero_()
    assert bool(x.all())


def test_a_tolerance_of_zero_is_no_default() -> None:
    with pytest.warns(ConvergenceWarning, match="x_star is not the solution"):
        argmin(ridge, closed(THETA) * (1 + 1e-6), args=(THETA.clone().requires_grad_(),), gradient_tol=0.0)


@pytest.mark.parametrize("solution", [argmin, root, fixed_point])
def test_a_tangent_of_the_solution_is_refused(solution: Any) -> None:
    f = (lambda x: x.square().sum()) if solution is argmin else (lambda x: x * 0.0 + x)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.zeros(2, dtype=D), torch.ones(2, dtype=D))
        with pytest.raises(InputError, match="x_star carries a tangent"):
            solution(f, x)
