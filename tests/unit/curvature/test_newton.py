"""`NewtonCG`: steps, refusals, and what must not change."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import hodiff
from hodiff.curvature._newton import steihaug
from tests.support.properties import agree

DOUBLE = torch.float64


def rosenbrock(x):
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def start(*values):
    return torch.tensor(values, dtype=DOUBLE, requires_grad=True)


# --- the step inside a trust region


def random_model(seed, eigenvalues):
    generator = torch.Generator().manual_seed(seed)
    n = len(eigenvalues)
    Q = torch.linalg.qr(torch.randn(n, n, dtype=DOUBLE, generator=generator))[0]
    return Q @ torch.diag(torch.tensor(eigenvalues, dtype=DOUBLE)) @ Q.T, torch.randn(
        n, dtype=DOUBLE, generator=generator
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_convex_model_is_minimized_inside(seed):
    A, g = random_model(seed, [1.0, 2.0, 3.0, 10.0])
    found = steihaug(lambda v: A @ v, g, 100.0, 1e-12, 10)
    assert found.end == "interior"
    torch.testing.assert_close(found.step, -torch.linalg.solve(A, g))
    assert found.decrease == pytest.approx(0.5 * float(g @ torch.linalg.solve(A, g)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("eigenvalues", [[1.0, 2.0, 3.0, 10.0], [-1.0, 2.0, 3.0, 10.0], [-5.0, -1.0, 0.0, 1.0]])
def test_a_bound_step_ends_on_the_boundary_below_the_steepest_descent(seed, eigenvalues):
    A, g = random_model(seed, eigenvalues)
    radius = 0.05
    found = steihaug(lambda v: A @ v, g, radius, 1e-12, 10)
    assert float(found.step.norm()) == pytest.approx(radius)
    assert found.end == ("boundary" if min(eigenvalues) > 0 else found.end) and found.end != "interior"
    assert found.decrease == pytest.approx(-float(g @ found.step + 0.5 * found.step @ A @ found.step))
    # The Cauchy point: the best of the model along -g inside the region.
    curvature, size = float(g @ A @ g), float(g.norm())
    t = radius / size if curvature <= 0 else min(radius / size, size**2 / curvature)
    assert found.decrease >= (t * size**2 - 0.5 * t**2 * curvature) * (1 - 1e-12)


def test_negative_curvature_is_followed_to_the_boundary():
    A = torch.diag(torch.tensor([1.0, -1.0], dtype=DOUBLE))
    g = torch.tensor([0.0, 1e-3], dtype=DOUBLE)
    found = steihaug(lambda v: A @ v, g, 2.0, 1e-12, 10)
    assert found.end == "negative curvature"
    torch.testing.assert_close(found.step, torch.tensor([0.0, -2.0], dtype=DOUBLE))


def test_the_products_are_bounded():
    A, g = random_model(0, [1.0, 2.0, 3.0, 10.0])
    calls = []
    found = steihaug(lambda v: calls.append(1) or A @ v, g, 100.0, 1e-12, 2)
    assert found.end == "budget" and len(calls) == 2


# --- steps


def test_rosenbrock_in_few_gradients():
    x, calls = start(-1.2, 1.0), []
    optimizer = hodiff.NewtonCG([x])

    def closure():
        calls.append(1)
        return rosenbrock(x)

    for _ in range(40):
        optimizer.step(closure)
    torch.testing.assert_close(x.detach(), torch.ones(2, dtype=DOUBLE), rtol=0, atol=1e-12)
    assert len(calls) == 80  # two a step, whatever happens
    assert x.grad is None


def test_convergence_is_at_least_superlinear():
    x = start(1.05, 1.1)
    optimizer = hodiff.NewtonCG([x])
    errors = []
    for _ in range(8):
        optimizer.step(lambda: rosenbrock(x))
        errors.append(float((x.detach() - 1).norm()))
    errors = [error for error in errors if error > 1e-13]
    assert errors[-1] < errors[-2] ** 1.5


def test_a_quadratic_is_solved_in_one_step_and_damping_shortens_it():
    A, g = random_model(3, [1.0, 2.0, 3.0, 10.0])
    for damping in (0.0, 0.5):
        x = torch.zeros(4, dtype=DOUBLE, requires_grad=True)
        optimizer = hodiff.NewtonCG([x], radius=100.0, rtol=1e-13, damping=damping)
        optimizer.step(lambda x=x: g @ x + 0.5 * x @ A @ x)
        expected = -torch.linalg.solve(A + damping * torch.eye(4, dtype=DOUBLE), g)
        torch.testing.assert_close(x.detach(), expected)
        assert optimizer.last is not None and optimizer.last.accepted and optimizer.last.products == 4


def test_each_group_has_its_damping():
    a, b = start(1.0), start(1.0)
    optimizer = hodiff.NewtonCG([{"params": [a]}, {"params": [b], "damping": 3.0}], radius=10.0, rtol=1e-13)
    optimizer.step(lambda: 0.5 * (a.square() + b.square()).sum())
    assert float(a.detach()) == pytest.approx(0.0) and float(b.detach()) == pytest.approx(1 - 1 / 4)


def test_a_saddle_is_left():
    x = start(0.5, 1e-9)
    optimizer = hodiff.NewtonCG([x])
    ends = set()
    for _ in range(12):
        optimizer.step(lambda: x[0] ** 2 + (x[1] ** 2 - 1) ** 2)
        ends.add(optimizer.last.end)
    torch.testing.assert_close(x.detach().abs(), torch.tensor([0.0, 1.0], dtype=DOUBLE), rtol=0, atol=1e-10)
    assert "negative curvature" in ends


def test_the_radius_doubles_and_shrinks():
    x = start(10.0)
    optimizer = hodiff.NewtonCG([x], radius=0.5)
    optimizer.step(lambda: x.square().sum())
    assert optimizer.last.end == "boundary" and optimizer.last.radius == 1.0
    assert float(x.detach()) == 9.5
    y = start(0.5)  # the Newton step leads to -0.5, where the loss is the same
    optimizer = hodiff.NewtonCG([y], radius=4.0, rtol=1e-12)
    optimizer.step(lambda: 1 - (-y.square().sum()).exp())
    assert not optimizer.last.accepted and optimizer.last.radius == pytest.approx(0.25)
    assert float(y.detach()) == 0.5


# --- refusals: a step that does not lower the loss is undone


@pytest.mark.parametrize("bad", [math.nan, math.inf, 100.0])
def test_a_bad_loss_at_the_new_place_undoes_the_step(bad):
    x = start(0.3, -0.7)
    before = x.detach().clone()
    optimizer = hodiff.NewtonCG([x])
    calls = []

    def closure():
        calls.append(1)
        loss = x.square().sum()
        return loss if len(calls) == 1 else loss * 0 + bad

    loss = optimizer.step(closure)
    assert torch.equal(x.detach(), before) and float(loss) == pytest.approx(0.58)
    last = optimizer.last
    assert (
        not last.accepted and last.decrease == 0 and last.ratio == (-math.inf if not math.isfinite(bad) else last.ratio)
    )
    assert last.radius == pytest.approx(0.25 * float(before.norm()))  # a quarter of the Newton step


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_undoes_the_step_and_passes(interruption):
    x = start(0.3, -0.7)
    before, calls = x.detach().clone(), []
    optimizer = hodiff.NewtonCG([x])
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise interruption("stop")
        return x.square().sum()

    with pytest.raises(interruption, match="stop"):
        optimizer.step(closure)
    assert torch.equal(x.detach(), before)
    assert flags == (torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled())
    optimizer.step(closure)
    assert float(x.detach().norm()) < 1e-6


def test_a_loss_that_is_not_finite_at_first_changes_nothing():
    x = start(1.0)
    with pytest.raises(hodiff.InputError, match="the loss is nan at the current parameters"):
        hodiff.NewtonCG([x]).step(lambda: (x * math.nan).sum())
    assert float(x.detach()) == 1.0


def test_a_closure_that_calls_backward_is_told():
    x = start(1.0)

    def closure():
        loss = x.square().sum()
        loss.backward()
        return loss

    with pytest.raises(hodiff.GraphError, match="returns the loss and does not call"):
        hodiff.NewtonCG([x]).step(closure)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: hodiff.NewtonCG([x], radius=0), "radius: got 0, expected a positive number"),
        (lambda x: hodiff.NewtonCG([x], rtol=-1.0), "rtol: got -1.0, expected a positive number"),
        (lambda x: hodiff.NewtonCG([x], products=0), "products: got 0, expected an integer of at least 1"),
        (lambda x: hodiff.NewtonCG([x], damping=-1), "damping: got -1, expected a number of at least 0"),
        (lambda x: hodiff.NewtonCG([{"params": [x], "damping": "1"}]), "damping: got '1'"),
        (lambda x: hodiff.NewtonCG([x]).step(None), "closure: got None"),
        (lambda x: hodiff.NewtonCG([x]).step(), "closure: got None"),
        (lambda x: hodiff.NewtonCG([x]).step(lambda: 1.0), "returned a float"),
        (lambda x: hodiff.NewtonCG([x]).step(lambda: x * 1), r"shape \(2,\), expected one element"),
        (lambda x: hodiff.NewtonCG([x.detach()]).step(lambda: x.sum()), "none of the parameters requires grad"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(hodiff.InputError, match=message):
        make(start(1.0, 2.0))


def test_a_loss_that_was_cut_is_told():
    x = start(1.0)
    with pytest.raises(hodiff.GraphError, match="carries no graph"):
        hodiff.NewtonCG([x]).step(lambda: x.detach().sum())


# --- networks


def test_the_trial_draws_the_same_dropout_and_leaves_the_statistics_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    X, y = torch.randn(16, 3, dtype=DOUBLE), torch.randn(16, 1, dtype=DOUBLE)
    optimizer = hodiff.NewtonCG(model.parameters(), radius=1e-4)
    counter = model[1].num_batches_tracked.clone()
    torch.manual_seed(1)
    optimizer.step(lambda: (model(X) - y).square().mean())
    drawn = torch.rand(1)
    assert int(model[1].num_batches_tracked - counter) == 1
    assert optimizer.last.ratio == pytest.approx(1.0, abs=1e-3)  # another mask would be far off
    torch.manual_seed(1)
    with torch.no_grad():
        model(X)
    assert torch.equal(drawn, torch.rand(1))  # one forward's worth was drawn
    assert all(p.grad is None for p in model.parameters())


def test_a_physics_loss_stays_differentiable():
    torch.manual_seed(0)
    u = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.linspace(0, 1, 20, dtype=DOUBLE)[:, None]
    ends = torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    optimizer = hodiff.NewtonCG(u.parameters())

    def loss():  # u'' = -pi^2 sin(pi x), u(0) = u(1) = 0
        residual = hodiff.laplacian(lambda x: u(x)[:, 0], x) + math.pi**2 * torch.sin(math.pi * x[:, 0])
        return residual.square().mean() + 10 * u(ends).square().mean()

    first = float(optimizer.step(loss))
    for _ in range(60):
        value = float(optimizer.step(loss))
    assert value < 1e-4 * first
    error = (u(x) - torch.sin(math.pi * x)).abs().max()
    assert float(error.detach()) < 0.03


def test_logistic_regression_takes_fewer_gradients_than_lbfgs_and_adam():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(200, 10, dtype=DOUBLE, generator=generator) * torch.logspace(-1, 1, 10, dtype=DOUBLE)
    y = X @ torch.randn(10, dtype=DOUBLE, generator=generator) + torch.randn(200, dtype=DOUBLE, generator=generator) > 0
    y = y.to(DOUBLE)

    def run(make, steps):
        w = torch.zeros(10, dtype=DOUBLE, requires_grad=True)
        calls = 0

        def loss():
            nonlocal calls
            calls += 1
            return nn.functional.binary_cross_entropy_with_logits(X @ w, y) + 0.005 * w.square().sum()

        step = make(w, loss)
        for _ in range(steps):
            step()
            if gradient(w) < 1e-6:
                return calls
        return math.inf

    def gradient(w):
        with torch.no_grad():
            return float((X.T @ ((X @ w).sigmoid() - y) / 200 + 0.01 * w).norm())

    def newton(w, loss):
        optimizer = hodiff.NewtonCG([w], radius=10.0)
        return lambda: optimizer.step(loss)

    def with_backward(optimizer, loss):
        def closure():
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        return lambda: optimizer.step(closure)

    found = run(newton, 100)
    options = {"line_search_fn": "strong_wolfe", "max_iter": 20, "tolerance_grad": 1e-7, "tolerance_change": 0}
    lbfgs = run(lambda w, loss: with_backward(torch.optim.LBFGS([w], **options), loss), 200)
    adam = run(lambda w, loss: with_backward(torch.optim.Adam([w], lr=0.05), loss), 300)
    assert found < lbfgs < adam


def test_mini_batches_train_a_network():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    X = torch.randn(256, 4, generator=generator)
    y = torch.sin(X.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = hodiff.NewtonCG(model.parameters(), products=10, radius=0.5)

    def full():
        return float((model(X) - y).square().mean().detach())

    first = full()
    for _ in range(6):
        for rows in torch.randperm(256, generator=generator).split(64):
            optimizer.step(lambda rows=rows: (model(X[rows]) - y[rows]).square().mean())
    assert full() < 0.2 * first


def test_the_state_is_restored():
    x = start(-1.2, 1.0)
    optimizer = hodiff.NewtonCG([x], damping=0.1)
    for _ in range(7):
        optimizer.step(lambda: rosenbrock(x))
    y = x.detach().clone().requires_grad_()
    other = hodiff.NewtonCG([y])
    other.load_state_dict(optimizer.state_dict())
    for _ in range(5):
        optimizer.step(lambda: rosenbrock(x))
        other.step(lambda: rosenbrock(y))
    assert torch.equal(x, y)
    assert dataclasses.astuple(other.last) == dataclasses.astuple(optimizer.last)
    assert other.param_groups[0]["damping"] == 0.1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_grad_mode_does_not_matter(mode):
    x = start(2.0)
    with mode():
        loss = hodiff.NewtonCG([x], radius=10.0).step(lambda: x.square().sum())
    assert float(x.detach()) == pytest.approx(0.0) and float(loss) == 4.0


def test_a_frozen_parameter_stays():
    a, b = start(1.0), start(1.0).requires_grad_(False)
    hodiff.NewtonCG([a, b], radius=10.0).step(lambda: (a + b).square().sum())
    assert float(b) == 1.0 and float(a.detach()) == pytest.approx(-1.0)


def test_the_process_is_left_as_it_was():
    x = start(2.0)
    seen = []

    def closure():
        seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled()))
        return x.square().sum()

    hodiff.NewtonCG([x]).step(closure)
    assert seen == [(True, True), (True, False)]  # attention is not a reason to switch its kernels off
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_step_that_the_radius_cuts_a_little_is_bound_by_it():
    A, g = random_model(0, [1.0, 1.0, 1.0, 1.0])
    assert steihaug(lambda v: A @ v, g, 0.75 * float(g.norm()), 1e-12, 10).end == "boundary"


def test_how_accurately_a_step_is_solved_does_not_depend_on_units():
    spent = []
    for unit in (1e-6, 1.0, 1e6):
        A, g = random_model(2, [1.0, 3.0, 10.0, 30.0, 100.0])
        x = torch.zeros(5, dtype=DOUBLE, requires_grad=True)
        optimizer = hodiff.NewtonCG([x], radius=1e3)
        spent.append([])
        for _ in range(4):
            optimizer.step(lambda x=x, unit=unit, A=A, g=g: unit * (g @ x + 0.5 * x @ A @ x))
            spent[-1].append(optimizer.last.products)
    assert spent[0] == spent[1] == spent[2]
    assert spent[1][0] < 5  # roughly at first


@pytest.mark.parametrize("scale", [1e-12, 1e12, 1e25])
def test_steps_do_not_depend_on_the_size_of_the_loss(scale: float) -> None:
    """d'Ad of a gradient of 1e13 is infinite in single precision: the step was zero, and taken."""
    x = torch.zeros(2, requires_grad=True)
    optimizer = hodiff.NewtonCG([x], radius=10.0, rtol=1e-5)
    optimizer.step(lambda: scale * ((x[0] - 1) ** 2 + 5 * (x[1] + 2) ** 2))
    agree(x.detach(), torch.tensor([1.0, -2.0]), 1e-4)


def test_a_product_that_is_not_finite_changes_nothing() -> None:
    x = torch.zeros(2, requires_grad=True)
    optimizer = hodiff.NewtonCG([x])
    for _ in range(2):
        with (
            pytest.warns(hodiff.HodiffWarning, match="a power of 0"),
            pytest.raises(hodiff.GraphError, match="NewtonCG: a product is not finite"),
        ):
            optimizer.step(lambda: (x[0] - 1) ** 2 + x[1].abs() ** 1.5)
    assert not x.any() and x.grad is None


def test_a_decrease_below_the_rounding_of_the_loss_is_believed() -> None:
    x = torch.full((2,), 1e-7, dtype=DOUBLE, requires_grad=True)
    optimizer = hodiff.NewtonCG([x])
    optimizer.step(lambda: 1e6 + x.square().sum())
    assert optimizer.last is not None and optimizer.last.accepted
    assert float(x.detach().norm()) < 1e-12


# --- what PyTorch differentiates wrongly


def test_a_weight_norm_in_the_loss_is_written_out():
    """Its second derivative is wrong in PyTorch; the same model with v g / |v| written by hand takes the same steps."""
    torch.manual_seed(0)
    x, calls = torch.randn(6, 3, dtype=DOUBLE), []
    norm = nn.BatchNorm1d(1).double()
    v, g = torch.randn(1, 3, dtype=DOUBLE), torch.rand(1, 1, dtype=DOUBLE) + 0.5

    def steps(weight, count):
        theirs = [v.clone().requires_grad_(), g.clone().requires_grad_()]
        norm.reset_running_stats()
        optimizer = hodiff.NewtonCG(theirs)
        for _ in range(count):
            calls.clear()
            optimizer.step(lambda: calls.append(1) or (norm(x @ weight(*theirs).T) - x[:, :1].sin()).square().sum())
        return [*theirs, norm.running_mean.clone(), norm.num_batches_tracked.clone()]

    found = steps(lambda v, g: torch._weight_norm(v, g, 0), 3)
    assert len(calls) == 3
    expected = steps(lambda v, g: v * (g / torch.linalg.vector_norm(v, dim=1, keepdim=True)), 3)
    assert len(calls) == 2
    torch.testing.assert_close(found, expected)
    assert int(found[-1]) == 3
