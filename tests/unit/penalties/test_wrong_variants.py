"""The variants that circulate, as negative tests: what each converges to, beside what ours does."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.unit.penalties.oracles import DOUBLE, gradient

N, SIDE = 64, 28
REAL = torch.randn(N, 1, SIDE, SIDE, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
FAKE = torch.randn(N, 1, SIDE, SIDE, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))

# The published penalties of a gradient g of shape (N, C, H, W), and the norm of a linear critic's weight that
# minimizes each. All of them can reach 0, so that the loss curve looks right.
NORMS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "per sample (right)": (lambda g: (g.flatten(1).norm(dim=1) - 1).square().mean(), 1.0),
    "over channels only, norm(dim=1)": (lambda g: (g.norm(dim=1) - 1).square().mean(), 28.0),
    "over the whole batch": (lambda g: (g.norm() - 1).square(), 0.125),
    "over the batch dimension": (lambda g: (g.flatten(1).norm(dim=0) - 1).square().mean(), 3.5),
}


def equilibrium(penalty: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> float:
    """The norm of a linear critic's weight where the penalty is least."""
    w = torch.full((SIDE * SIDE,), 0.01, dtype=DOUBLE, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = penalty(lambda x: x.flatten(1) @ w)
        loss.backward()
        return loss

    optimizer.step(step)
    assert step() < 1e-9, "a wrong penalty is as content as the right one"
    return float(w.detach().norm())


@pytest.mark.parametrize("name", NORMS)
def test_wrong_dimensions_have_another_equilibrium(name):
    penalty, expected = NORMS[name]
    assert equilibrium(lambda D: penalty(gradient(D, REAL))) == pytest.approx(expected, rel=1e-3)


def test_our_equilibrium_is_one():
    assert equilibrium(lambda D: hodiff.wgan_gp_penalty(D, REAL, FAKE)) == pytest.approx(1.0, rel=1e-5)
    assert equilibrium(lambda D: hodiff.dragan_penalty(D, REAL)) == pytest.approx(1.0, rel=1e-5)


def test_a_mean_over_the_batch_has_an_equilibrium_of_n():
    """`critic(x).mean()`: each sample's gradient is divided by N, so |w| grows to 64. Ours raises."""
    wrong = lambda D: NORMS["per sample (right)"][0](gradient(lambda x: D(x).mean(), REAL))
    assert equilibrium(wrong) == pytest.approx(N, rel=1e-3)
    with pytest.raises(hodiff.InputError, match="scale every gradient by 1/N"):
        equilibrium(lambda D: hodiff.wgan_gp_penalty(lambda x: D(x).mean(), REAL, FAKE))


# f = c |x|² / 2 between 0 and u, |u| = 1: the gradient's norm is c |x|, so the best c is E|x| / E|x|².
WEIGHTS: dict[str, tuple[Callable[[int, int], Tensor], float]] = {
    "per sample, uniform (right)": (lambda n, d: torch.rand(n, 1, dtype=DOUBLE), 3 / 2),
    "normal": (lambda n, d: torch.randn(n, 1, dtype=DOUBLE), math.sqrt(2 / math.pi)),
    "per entry, uniform": (lambda n, d: torch.rand(n, d, dtype=DOUBLE), math.sqrt(3)),  # for many entries
}


def best_c(points: Tensor) -> float:
    """The minimizer of mean (c |x| - 1)², found with hodiff's own penalty: a parabola in c, from three values."""
    with torch.no_grad():
        low, middle, high = (
            float(hodiff.gradient_penalty(lambda x, c=c: c * x.square().sum(1) / 2, points, target=1.0))
            for c in (1.0, 2.0, 3.0)
        )
    return 2 - (high - low) / 2 / (high - 2 * middle + low)


@pytest.mark.parametrize("name", WEIGHTS)
def test_wrong_weights_have_another_equilibrium(name):
    draw, expected = WEIGHTS[name]
    n, d = 20000, 64
    u = torch.full((n, d), d**-0.5, dtype=DOUBLE)
    assert best_c(draw(n, d) * u) == pytest.approx(expected, rel=0.02)


def test_our_weights():
    u = torch.full((20000, 64), 64**-0.5, dtype=DOUBLE)
    points = hodiff.interpolate(torch.zeros_like(u), u)
    assert best_c(points) == pytest.approx(1.5, rel=0.02)
    # A third of normal weights on either side lies off the segment; none of ours does.
    off = lambda weight: float(((weight < 0) | (weight > 1)).double().mean())
    assert off(points[:, 0] * 8) == 0
    assert off(torch.randn(20000)) == pytest.approx(0.6587, abs=0.02)


# --- a dead sample ---------------------------------------------------------------------------------------------------


def relu_critic() -> nn.Sequential:
    """Without biases, so that inputs for which all hidden units are off have a zero gradient."""
    critic = nn.Sequential(nn.Linear(4, 10, bias=False), nn.ReLU(), nn.Linear(10, 1, bias=False)).double()
    with torch.no_grad():
        critic[0].weight.abs_()
    return critic


def published(D: nn.Module, x: Tensor) -> Tensor:
    return (gradient(D, x).square().sum(1).sqrt() - 1).square().mean()


def test_a_dead_sample_among_others():
    D = relu_critic()
    alive = torch.rand(3, 4, dtype=DOUBLE)
    x = torch.cat([alive, -torch.ones(1, 4, dtype=DOUBLE)])

    penalty = published(D, x)
    penalty.backward()
    assert penalty.isfinite(), "the loss looks well"
    assert D[0].weight.grad.isnan().all()

    D.zero_grad()
    penalty = hodiff.gradient_penalty(D, x, target=1.0)
    penalty.backward()
    others = published(D, alive)
    torch.testing.assert_close(penalty, (3 * others + 1) / 4)  # the dead one: (0 - 1)²
    for p, g in zip(D.parameters(), torch.autograd.grad(others, list(D.parameters())), strict=True):
        torch.testing.assert_close(p.grad, 3 / 4 * g)  # and gives no gradient


def test_training_goes_on_with_a_dead_sample():
    x = torch.cat([torch.rand(7, 4, dtype=DOUBLE), -torch.ones(1, 4, dtype=DOUBLE)])

    def train(penalty: Callable[[nn.Module, Tensor], Tensor]) -> list[float]:
        torch.manual_seed(0)
        D = relu_critic()
        optimizer = torch.optim.Adam(D.parameters(), lr=1e-2)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = penalty(D, x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ours = train(lambda D, x: hodiff.gradient_penalty(D, x, target=1.0))
    assert ours[-1] < ours[0] / 2
    theirs = train(published)
    assert math.isfinite(theirs[0]) and all(math.isnan(loss) for loss in theirs[1:])


def test_a_hessian_vector_product_of_the_penalty_is_finite_there():
    D = relu_critic()
    x = torch.cat([torch.rand(3, 4, dtype=DOUBLE), -torch.ones(1, 4, dtype=DOUBLE)])
    v = {name: torch.randn_like(p) for name, p in D.named_parameters()}
    ours = hodiff.hvp(lambda D: hodiff.gradient_penalty(D, x, target=1.0), D, v)
    assert all(part.isfinite().all() and part.any() for part in ours.values())

    def by_norm(D):  # finite at the first order, and no further
        g = hodiff.grad(D, x, batch_ndim=1)
        return (g.norm(dim=1) - 1).square().mean()

    with pytest.warns(hodiff.HodiffWarning, match="not finite(?s:.*)norm at 0"):
        assert any(part.isnan().any() for part in hodiff.hvp(by_norm, D, v).values())
