"""`batch_ndim=`: independent problems side by side, one backward for all, and what fails named."""

import warnings
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import hodiff
from hodiff import ConvergenceWarning, GraphError, InputError
from hodiff.curvature import _solve
from hodiff.implicit import argmin, fixed_point, root
from tests.support.operators import D, draw
from tests.support.properties import agree

BATCHES = [(), (3,), (2, 3), (0,), (1,)]
SIZE = 5


def matrices(*batch: int, size: int = SIZE) -> Tensor:
    M = draw(*batch, size, size)
    return M @ M.mT + torch.eye(size, dtype=D)


def times(A: Tensor, x: Tensor) -> Tensor:
    return (A @ x.unsqueeze(-1)).squeeze(-1)


def system(A: Tensor, t: Tensor) -> Tensor:
    """What the parameters make of a matrix; not symmetric."""
    return A + torch.diag_embed(t.exp()) + 0.3 * t.unsqueeze(-1) * torch.triu(torch.ones_like(A), 1)


def halves(A: Tensor, t: Tensor) -> Tensor:
    S = system(A, t)
    return (S + S.mT) / 2


PROBLEMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]] = {
    "argmin": (argmin, halves, lambda x, S, b: (x * times(S, x)).sum(-1) / 2 - (b * x).sum(-1)),
    "root": (root, system, lambda x, S, b: times(S, x) - b),
    "fixed_point": (fixed_point, system, lambda x, S, b: x - (times(S, x) - b) / 40),
}


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_closed_forms(kind: str, batch: tuple[int, ...], dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, first and second derivatives of each, and of what all share."""
    monkeypatch.setattr(_solve, "DENSE", dense)
    attach, made, f = PROBLEMS[kind]
    A, b, t = matrices(*batch), draw(*batch, SIZE, seed=1), 0.3 * draw(*batch, SIZE, seed=2)
    closed = lambda t, b: torch.linalg.solve(made(A, t), b.unsqueeze(-1)).squeeze(-1)

    def loss(x: Callable[[Tensor, Tensor], Tensor], t: Tensor, s: Tensor) -> Tensor:
        return (x(t, s * b) ** 3).sum() + x(t * s, b).sin().sum()

    def found(t: Tensor, b: Tensor) -> Tensor:
        start = closed(t.detach(), b.detach())
        x = attach(f, start, batch_ndim=len(batch), rtol=1e-13, args=(made(A, t), b))
        assert torch.equal(x, start)
        return x

    point, v = (t, torch.tensor(1.3, dtype=D)), (draw(*batch, SIZE, seed=3), torch.tensor(0.7, dtype=D))
    for derivative in (hodiff.grad, lambda f, p, **k: hodiff.hvp(f, p, v, **k)):
        results = [derivative(lambda p, x=x: loss(x, *p), point, strict=False) for x in (found, closed)]
        for got, expected in zip(*results, strict=True):
            agree(got, expected, 1e-10)


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
def test_second_derivatives_of_solutions_found_by_newton(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against central differences of what is solved anew."""
    monkeypatch.setattr(_solve, "DENSE", dense)
    f = lambda x, t: (x**4).sum(-1) + (t * x).sin().sum(-1) + (x - 1).square().sum(-1) + x.prod(-1)

    def solved(t: Tensor) -> Tensor:
        x = torch.zeros(2, 3, dtype=D)
        for _ in range(12):
            _, g, H = hodiff.value_grad_and_hessian(f, x, batch_ndim=1, args=(t.detach(),))
            x = x - torch.linalg.solve(H, g)
        return argmin(f, x, batch_ndim=1, order=2, rtol=1e-13, args=(t,)).tanh().sum()

    t = draw(2, 3, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(solved, (t,), eps=1e-6, atol=1e-6, fast_mode=True)
    if dense:  # else in closed form, above
        assert torch.autograd.gradgradcheck(solved, (t,), eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize(("kind", "method"), [("argmin", "cg"), ("argmin", "minres"), ("root", "gmres")])
@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
def test_a_sample_that_fails_is_named_and_spoils_no_other(
    kind: str, method: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_solve, "DENSE", dense)
    attach, _, f = PROBLEMS[kind]
    S = matrices(4)
    S[2] = torch.diag(torch.tensor([1.0, 1, 1, 1, 0], dtype=D))
    b = draw(4, SIZE, seed=1)
    b[2, -1] = 0
    x = times(torch.linalg.pinv(S), b)
    right = b.clone().requires_grad_()
    with pytest.warns(ConvergenceWarning, match=rf"{kind}, called at .*for 1 of 4 samples \(number 2\), whose .* nan"):
        attach(f, x, batch_ndim=1, method=method, args=(S, right)).sum().backward()
    assert right.grad is not None and bool(right.grad[2].isnan().all())
    others = torch.tensor([0, 1, 3])
    agree(right.grad[others], torch.linalg.solve(S[others], torch.ones(3, SIZE, dtype=D)), 1e-6)
    with pytest.raises(GraphError, match=r"is singular|negative or zero curvature"):
        attach(f, x[2], method=method, args=(S[2], b[2].clone().requires_grad_())).sum().backward()


@pytest.mark.parametrize("dense", [0, 64], ids=["by products", "dense"])
def test_a_sample_that_is_no_solution_is_named(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", dense)
    S, b = matrices(2, 3), draw(2, 3, SIZE, seed=1)
    x = torch.linalg.solve(S, b.unsqueeze(-1)).squeeze(-1)
    moved = x.clone()
    moved[1, 0] += 1
    _, _, f = PROBLEMS["root"]
    with pytest.warns(ConvergenceWarning, match=r"not the solution for 1 of 6 samples \(number \[1, 0\]\): F\(x\) has"):
        root(f, moved, batch_ndim=2, args=(S, b))
    agree(root(f, moved, batch_ndim=2, polish=1, args=(S, b)), x, 1e-12)
    moved[0, 2] = torch.inf
    with pytest.raises(InputError, match="x_star has entries that are not finite"):
        root(f, moved, batch_ndim=2, args=(S, b))


def test_a_newton_step_of_a_sample_that_has_none_leaves_it() -> None:
    """And the derivative of a saddle point is that of a stationary point, where matrices are solved."""
    S, b = matrices(3), draw(3, SIZE, seed=1)
    S[1] = 0
    S[2] = torch.diag(torch.tensor([1.0, 2, 3, 4, -5], dtype=D))
    x, (_, _, f) = torch.ones(3, SIZE, dtype=D), PROBLEMS["argmin"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        moved = argmin(f, x, batch_ndim=1, polish=1, args=(S, b))
    assert torch.equal(moved[1], x[1])
    agree(moved[[0, 2]], torch.linalg.solve(S[[0, 2]], b[[0, 2]]), 1e-10)


def test_a_budget_that_runs_out_names_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_solve, "DENSE", 0)
    S = torch.eye(SIZE, dtype=D).repeat(5, 1, 1)
    S[[0, 2, 3, 4]] = matrices(4)
    b = draw(5, SIZE, seed=1).requires_grad_()
    x = torch.linalg.solve(S, b.detach().unsqueeze(-1)).squeeze(-1)
    _, _, f = PROBLEMS["root"]
    with pytest.warns(ConvergenceWarning, match=r"for 4 of 5 samples \(number 0, 2, 3, ...\), and derivatives are off"):
        root(f, x, batch_ndim=1, products=3, args=(S, b)).sum().backward()
    assert b.grad is not None and bool(b.grad.isfinite().all())
    agree(b.grad[1], torch.ones(SIZE, dtype=D), 1e-12)


def test_inexact_on_purpose_is_so_for_each() -> None:
    """The first terms of a series, without a warning; what diverges is named."""
    M = draw(3, 4, 4) / 10
    b = draw(3, 4, seed=1).requires_grad_()
    x = torch.linalg.solve(torch.eye(4, dtype=D) - M, b.detach().unsqueeze(-1)).squeeze(-1)
    g = lambda x, M, b: times(M, x) + b
    fixed_point(g, x, batch_ndim=1, method="neumann", iterations=1, args=(M, b)).sum().backward()
    agree(b.grad, 1 + M.sum(1), 1e-12)
    M[1] = 3 * torch.eye(4, dtype=D)
    x, b = -b.detach() / 2, b.detach().clone().requires_grad_()
    with pytest.warns(ConvergenceWarning, match=r"the Neumann series diverges.*for 1 of 3 samples \(number 1\)"):
        fixed_point(
            g, x, batch_ndim=1, method="neumann", iterations=8, gradient_tol=torch.inf, args=(M, b)
        ).sum().backward()
    assert b.grad is not None and b.grad.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dense", [0, 16], ids=["by products", "dense"])
def test_a_layer_of_quadratic_programs(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """min z'Qz/2 + p'z under Gz <= h, by its conditions; with the active ones as equations in closed form."""
    monkeypatch.setattr(_solve, "DENSE", dense)
    count, n, m = 4, 5, 3
    Q, G, z = matrices(count), draw(count, m, n, seed=1), draw(count, n, seed=2)
    active = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    multipliers = torch.where(active, draw(count, m, seed=3).abs() + 0.5, 0.0)
    p = -times(Q, z) - times(G.mT, multipliers)
    h = times(G, z) + torch.where(active, 0.0, draw(count, m, seed=4).abs() + 0.5)
    given = [part.requires_grad_() for part in (Q, p, G, h)]

    def conditions(x: dict[str, Tensor]) -> dict[str, Tensor]:
        forces = times(Q, x["z"]) + p + times(G.mT, x["multipliers"])
        return {"z": forces, "multipliers": x["multipliers"] * (times(G, x["z"]) - h)}

    found = root(conditions, {"z": z, "multipliers": multipliers}, batch_ndim=1, rtol=1e-12)["z"]
    at = active.to(D)[:, :, None] * G  # equations of those that are not active say that their multipliers are zero
    K = torch.cat([torch.cat([Q, at.mT], 2), torch.cat([at, torch.diag_embed(1 - active.to(D))], 2)], 1)
    right = torch.cat([-p, torch.where(active, h, 0.0)], 1)
    expected = torch.linalg.solve(K, right.unsqueeze(-1))[:, :n, 0]
    agree(found.detach(), expected.detach(), 1e-10)
    for got, true in zip(
        *(torch.autograd.grad(part.pow(3).sum(), given, retain_graph=True) for part in (found, expected)), strict=True
    ):
        agree(got, true, 1e-8)


def test_points_of_several_tensors() -> None:
    t = draw(3, seed=5).requires_grad_()
    x = {"a": t.detach().reshape(3, 1, 1).expand(3, 2, 2).clone(), "b": 2 * t.detach()[:, None]}
    F = lambda x: {"a": x["a"] - x["b"][:, :, None] / 2, "b": x["b"] - 2 * t[:, None]}
    found = root(F, x, batch_ndim=1)
    assert list(found) == ["a", "b"] and found["a"].shape == (3, 2, 2)
    (g,) = torch.autograd.grad((found["a"].sum((1, 2)) ** 2).sum() + found["b"].sum(), t)
    agree(g, 32 * t.detach() + 2, 1e-10)


def test_what_is_refused() -> None:
    x = draw(3, 2)
    with pytest.raises(InputError, match="where: got a module, whose parameters are not samples"):
        argmin(lambda m: m(x).sum(), nn.Linear(2, 1).double(), batch_ndim=1)
    with pytest.raises(InputError, match=r"f returned shape \(\).*expected one element per sample"):
        argmin(lambda x: x.square().sum(), x, batch_ndim=1)
    with pytest.raises(InputError, match=r"x_star has shape \(3, 2\), too few dimensions"):
        root(lambda x: x, x, batch_ndim=3)
    with pytest.raises(InputError, match="with batch_ndim=0 there are no samples"):
        root(lambda x: x, x, check_independence=True)
    for given in (-1, True, 0.5):
        with pytest.raises(InputError, match="batch_ndim: got"):
            argmin(lambda x: x.square().sum(), x, batch_ndim=given)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_samples_that_mix_are_seen() -> None:
    x, t = torch.ones(3, 2, dtype=D), torch.ones(3, 2, dtype=D, requires_grad=True)
    with pytest.warns(hodiff.BatchMixingWarning, match="samples of f are not independent"):
        root(lambda x: x - t + (x.sum(0) - t.sum(0)), x, batch_ndim=1, check_independence=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root(lambda x: x - t, x, batch_ndim=1, check_independence=True)


@hypothesis.given(
    st.integers(0, 2**16), st.sampled_from([(), (1,), (4,), (2, 2)]), st.sampled_from(list(PROBLEMS)), st.booleans()
)
def test_the_gradient_of_each_is_that_of_each_alone(seed: int, batch: tuple[int, ...], kind: str, dense: bool) -> None:
    attach, made, f = PROBLEMS[kind]
    A, b = matrices(*batch), draw(*batch, SIZE, seed=seed)
    t = (0.3 * draw(*batch, SIZE, seed=seed + 1)).requires_grad_()
    x = torch.linalg.solve(made(A, t), b.unsqueeze(-1)).squeeze(-1).detach()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_solve, "DENSE", 64 * dense)
        together = attach(f, x, batch_ndim=len(batch), rtol=1e-12, args=(made(A, t), b))
    (got,) = torch.autograd.grad(together.pow(3).sum(), t)
    rows = [part.reshape(-1, *part.shape[len(batch) :]) for part in (x, made(A, t), b)]
    alone = [attach(f, one, rtol=1e-12, args=(S, right)) for one, S, right in zip(*rows, strict=True)]
    (expected,) = torch.autograd.grad(torch.stack(alone).pow(3).sum(), t)
    agree(got, expected, 1e-8)
