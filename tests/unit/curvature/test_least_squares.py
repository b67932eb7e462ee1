"""`LevenbergMarquardt`: steps against the SVD's, refusals, and what must not change."""

import copy
import math
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn

import hodiff
from hodiff.calculus._factors import Outer
from hodiff.curvature import _damped_steps, _least_squares

D = torch.float64


def tensor(*values):
    return torch.tensor(values, dtype=D)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def graded(rows, columns, decades=8):
    """A matrix whose singular values fall over some decades."""
    A = torch.randn(rows, columns, dtype=D, generator=generator())
    U, S, V = torch.linalg.svd(A, full_matrices=False)
    return U @ torch.diag(torch.logspace(0, -decades, len(S), dtype=D)) @ V


@pytest.fixture(params=[True, False], ids=["held", "in factors"])
def held(request, monkeypatch):
    """Whether J is small enough to be held where there are fewer residuals than parameters."""
    if not request.param:
        monkeypatch.setattr(_damped_steps, "HELD", -1)
    return request.param


# --- a step


@pytest.mark.parametrize("shape", [(60, 20), (20, 60), (300, 320)], ids=["parameters", "samples", "in blocks"])
@pytest.mark.parametrize(
    ("part", "tolerance"), [(1e-2, 1e-11), (1e-4, 1e-11), (1e-6, 1e-10), (1e-8, 1e-10), (1e-10, 1e-9)]
)
def test_a_step_is_that_of_the_svd(shape, part, tolerance, held):
    """Refined once: by Cholesky alone the last three lose two to four digits more."""
    A, b = graded(*shape), torch.randn(shape[0], dtype=D, generator=generator(1))
    x = torch.zeros(shape[1], dtype=D)
    scale = float(A.square().sum(0).max())
    residuals = lambda x, batch: batch[0] @ x - batch[1]
    optimizer = hodiff.LevenbergMarquardt(residuals, x, damping=part / scale, search=False)
    loss = optimizer.step((A, b))
    U, S, Vt = torch.linalg.svd(A, full_matrices=False)
    expected = Vt.T @ (S / (S**2 + part) * (U.T @ b))
    torch.testing.assert_close(x, expected, rtol=tolerance, atol=tolerance * float(expected.norm()))
    model = lambda d: float((A @ d - b).square().sum() + part * d.square().sum()) / 2
    assert model(x) <= model(expected) * (1 + 1e-6)
    assert float(loss) == pytest.approx(float(b @ b) / 2)
    last = optimizer.last
    assert last.accepted and last.space == ("parameters" if shape[0] > shape[1] else "samples")
    assert last.ratio == pytest.approx(1, rel=1e-6) and last.residual < 1e-5


def test_without_a_batch_each_parameter_is_measured_by_its_column():
    """By the largest norm so far: another unit of a parameter changes nothing."""
    A, b = graded(60, 5, 2), torch.randn(60, dtype=D, generator=generator(1))
    units, ways = torch.logspace(-6, 6, 5, dtype=D), []
    for unit in (torch.ones(5, dtype=D), units):
        x = 1 / unit
        optimizer = hodiff.LevenbergMarquardt(lambda x, unit=unit: (A @ (unit * x)).sinh() - b, x, damping=0.3)
        r, J = A.sum(1).sinh() - b, A.sum(1).cosh().unsqueeze(1) * A
        optimizer.step()
        first = torch.ones(5, dtype=D) + damped(J, r, 0.3 * J.square().sum(0))
        torch.testing.assert_close(unit * x, first, rtol=1e-9, atol=1e-12)
        for _ in range(3):
            optimizer.step()
        ways.append(unit * x)
    torch.testing.assert_close(*ways, rtol=1e-8, atol=1e-10)


def test_a_column_is_measured_by_its_largest_norm_so_far():
    A, b, units = graded(30, 4, 1), torch.randn(30, dtype=D, generator=generator(1)), torch.ones(4, dtype=D)
    x, largest = torch.zeros(4, dtype=D), torch.zeros(4, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(lambda x: A @ (units * x) - b, x, damping=0.3)
    for unit in (1.0, 0.01, 3.0):
        units[:2] = unit
        J, before = A * units, x.clone()
        largest = torch.maximum(largest, J.norm(dim=0))
        optimizer.step()
        expected = damped(J, J @ before - b, torch.diag(optimizer.last.damping * largest**2))
        torch.testing.assert_close(x - before, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(30, 6), (6, 30)], ids=["parameters", "samples"])
@pytest.mark.parametrize("radius", [0.05, 0.4, 1e9])
def test_a_damping_is_that_of_its_radius(shape, radius, held):
    """Or the least, where the full step is shorter."""
    A, b = graded(*shape, 3), torch.randn(shape[0], dtype=D, generator=generator(1))
    system = _damped_steps.DampedSystem([b], shape[1], 1e9)
    system.add([Outer.of(A[:, None], A.shape[1:])])
    system = system.closed()
    system.weights = 0.7
    for start in (1e-9, 1e-3, 1e3):
        damping = system.damping_of(radius, start, 1e-14)
        step = system.step(damping, None)
        norm = 0.7**0.5 * float(torch.linalg.lstsq(A, b.unsqueeze(1), driver="gelsd").solution.norm())
        assert step.norm == pytest.approx(min(radius, norm), rel=0.1001 if radius < norm else 1e-4)
        assert (damping == 1e-14) is (radius > norm)


def equations(seed=0):
    """A network, two functions of residuals, one of which gives two for each sample, and their batches."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    inside = lambda model, x: model(x) * x + x.sin()
    edge = lambda model, batch: model(batch["x"])[:, 0] - batch["y"]
    x = torch.rand(9, 2, dtype=D, generator=generator(seed))
    return model, [inside, edge], (x, {"x": x[:4] + 1, "y": x[:4, 1]})


def dense(model, functions, batches):
    """The residuals and their Jacobian, by one backward pass for each residual."""
    pairs = zip(functions, batches, strict=True)
    r = torch.cat([(f(model) if batch is None else f(model, batch)).reshape(-1) for f, batch in pairs])
    own = list(model.parameters())
    rows = [torch.autograd.grad(each, own, retain_graph=True, materialize_grads=True) for each in r]
    return r.detach(), torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def damped(J, r, damping, drift=None):
    """The damping is one number, or one for each column."""
    eye = torch.eye(J.shape[1], dtype=D)
    drift = torch.zeros(J.shape[1], dtype=D) if drift is None else drift
    return drift - torch.linalg.solve(J.T @ J + damping * eye, J.T @ (J @ drift + r))


@pytest.mark.parametrize("batches", [1, 3], ids=["samples", "parameters"])
def test_functions_with_batches_of_their_own(batches, held):
    model, functions, given = equations()
    given = tuple(
        {k: v.repeat(batches, *[1] * (v.ndim - 1)) for k, v in b.items()}
        if isinstance(b, dict)
        else b.repeat(batches, 1)
        for b in given
    )
    r, J = dense(model, functions, given)
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(functions, model, damping=0.1, search=False)
    loss = optimizer.step(*given)
    assert float(loss) == pytest.approx(float(r @ r) / 2)
    scale = float(J.square().sum(0).max())
    torch.testing.assert_close(flat(model) - before, damped(J, r, 0.1 * scale), rtol=1e-9, atol=1e-12)
    assert optimizer.last.space == ("samples" if batches == 1 else "parameters")
    assert optimizer.last.evaluations == 1
    cosine = (J.T @ r).abs() / J.norm(dim=0) / r.norm()
    assert optimizer.last.gradient == pytest.approx(float(cosine.max()))
    assert all(p.grad is None for p in model.parameters())


def put(model, values):
    model.load_state_dict(
        {k: v.reshape(model.get_parameter(k).shape) for k, v in zip(
            model.state_dict(), values.split([p.numel() for p in model.parameters()]), strict=True
        )}
    )  # fmt: skip


@pytest.mark.parametrize("batches", [1, 3], ids=["samples", "parameters"])
@pytest.mark.parametrize(("damping", "much"), [(1e-4, True), (0.3, False)])
def test_the_search_follows_a_path_that_bends_with_the_residuals(batches, damping, much, held):
    model, functions, (x, edge) = equations()
    given = x.repeat(batches, 1), edge
    r, J = dense(model, functions, given)
    before, scale = flat(model), float(J.square().sum(0).max())
    optimizer = hodiff.LevenbergMarquardt(functions, model, damping=damping)
    optimizer.step(*given)
    after = flat(model)
    d, t = damped(J, r, damping * scale), optimizer.last.length
    put(model, before + 0.1 * d)
    second = (dense(model, functions, given)[0] - r - 0.1 * J @ d) / 0.1**2
    bend = damped(J, second, damping * scale)
    most = 0.25 * float(d.norm() / bend.norm())  # it turns aside by no more than a quarter of its length
    assert (most < t) is much
    step = t * d if t == 0.1 else t * d + t * min(t, most) * bend
    torch.testing.assert_close(after - before, step, rtol=1e-6, atol=1e-9 * float(step.norm()))
    put(model, after)
    new, _ = dense(model, functions, given)
    assert optimizer.last.decrease == pytest.approx(float(r @ r - new @ new) / 2)


def test_the_bend_takes_a_path_to_its_end():
    """Of residuals of second order whose J is square, along the path they vanish but for terms of third order."""
    x = tensor(0.5, 0.5)
    curved = lambda x: torch.stack([x[0] + 0.3 * x[1] ** 2 - 1, x[1] - 0.3 * x[0] ** 2])
    first = float(curved(x).norm())
    optimizer = hodiff.LevenbergMarquardt(curved, x, damping=1e-12, search=True)
    optimizer.step()
    straight = first * 0.3  # of second order
    assert optimizer.last.length == 1 and float(curved(x).norm()) < 0.1 * straight


@pytest.mark.parametrize("seed", range(4))
def test_a_path_bends_by_a_part_of_its_length(seed):
    """Where derivatives change within a step, what they were of second order leads anywhere."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(30, 2, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(lambda m, x: m(x)[:, 0] - (8 * x[:, 0]).sin(), model, damping=1e-8)
    for _ in range(8):
        before = flat(model)
        optimizer.step(x)
        way = float((flat(model) - before).norm())
        assert way == 0 or way <= 1.26 * optimizer.last.length * optimizer.state[model[0].weight]["norm"]


def test_momentum_is_that_of_spring(held):
    A, b = graded(6, 9, 1), torch.ones(6, dtype=D)
    x = torch.zeros(9, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(lambda x: A @ x - b, x, momentum=0.4, damping=0.5, search=False)
    optimizer.step()
    first = x.clone()
    optimizer.step()
    lam = optimizer.last.damping * optimizer.state[x]["scale"]
    expected = damped(A, A @ first - b, lam, 0.4 * first)
    torch.testing.assert_close(x - first, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("budget", [0.5, 30_000], ids=["J", "chunks"])
def test_within_any_budget_it_is_the_same_step(budget):
    model, functions, (x, edge) = equations()
    given, seen = (x.repeat(8, 1), edge), []
    inside = lambda model, x: seen.append(len(x)) or functions[0](model, x)
    r, J = dense(model, functions, given)
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(
        [inside, functions[1]], model, damping=0.1, search=False, memory_budget=budget
    )
    loss = optimizer.step(*given)
    scale, true = optimizer.state[model[0].weight]["scale"], float(J.square().sum(0).max())
    assert float(loss) == pytest.approx(float(r @ r) / 2)
    assert scale == pytest.approx(true, rel=1e-12)
    torch.testing.assert_close(flat(model) - before, damped(J, r, 0.1 * scale), rtol=1e-8, atol=1e-11)
    assert optimizer.last.space == "parameters" and optimizer.last.residual < 1e-10
    assert seen == [72] * (1 + optimizer.last.evaluations)
    assert optimizer.step(*given) < loss


def test_a_sum_over_chunks_serves_momentum_and_the_search():
    model, functions, (x, edge) = equations()
    optimizer = hodiff.LevenbergMarquardt(functions, model, memory_budget=30_000, momentum=0.2)
    losses = [float(optimizer.step(x.repeat(8, 1), edge)) for _ in range(12)]
    assert all(after <= before for before, after in pairwise(losses)) and losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize(
    ("repeats", "budget", "side"), [(8, 11_000, 27), (1, 5_000, 22)], ids=["parameters", "residuals"]
)
def test_what_does_not_fit_is_refused(repeats, budget, side):
    model, functions, (x, edge) = equations()
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(functions, model, memory_budget=budget)
    with pytest.raises(hodiff.InputError, match=rf"takes a matrix {side} x {side} .*: fewer|Give fewer points a step"):
        optimizer.step(x.repeat(repeats, 1), edge)
    assert torch.equal(flat(model), before)
    roomy = hodiff.LevenbergMarquardt(functions, model, memory_budget=16 * side**2)
    roomy.step(x.repeat(repeats, 1), edge)
    assert roomy.last.accepted


class Cubed(nn.Module):
    """A parameter that no reader knows."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=D))

    def forward(self, x):
        return torch.einsum("nd,d->n", x, self.w).sin().unsqueeze(1) + nn.functional.prelu(x, self.w[:1])


def networks():
    """For each its residuals and their batches."""
    torch.manual_seed(0)
    x, image = torch.randn(7, 2, dtype=D), torch.randn(6, 1, 5, 5, dtype=D)
    words = torch.tensor([[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [1, 0]])
    mlp = lambda *sizes: nn.Sequential(
        *[layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())][:-1]
    )
    laplacian = lambda m, x: hodiff.laplacian(lambda x: m(x)[:, 0], x) - x.prod(1)
    edge = lambda m, x: m(x)[:, 0] - x.sum(1)
    convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    missing = nn.Sequential(nn.Linear(2, 4), Cubed(), nn.Linear(4, 2))
    level = lambda m: m(x[:1])[0] - 1
    return {
        "an equation and its edge": (mlp(2, 6, 6, 1), [laplacian, edge], (x, x[:4] + 1)),
        "with a level": (mlp(2, 6, 6, 1), [laplacian, level, edge], (x, None, x[:3])),
        "several numbers": (mlp(2, 6, 2), [lambda m, x: m(x).sin() - x, lambda m, x: m(x)[:, 0] ** 2], (x, x[:3])),
        "convolution": (convolution, [lambda m, x: m(x) - 0.3], (image,)),
        "words": (nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2)), [lambda m, w: m(w) - 1], (words,)),
        "a missing leaf": (missing, [lambda m, x: m(x) - x, lambda m, x: m(x).sum(1)], (x, x[:3] + 1)),
        "the mean of all": (mlp(2, 6, 1), [lambda m, x: (m(x)[:, 0] - m(x).mean() - x[:, 0]) / len(x) ** 0.5], (x,)),
    }


def stepped(model, functions, batches, damping):
    """A step by J from one reverse pass for each residual, bent where it keeps little of its promise."""
    point = flat(model)
    r, J = dense(model, functions, batches)
    U, S, Vt = torch.linalg.svd(J, full_matrices=False)
    S = nn.functional.threshold(S, 1e-13 * float(S.max()), 0.0)
    solved = lambda b: -Vt.T @ (S / (S**2 + damping) * (U.T @ b))

    def at(change):
        put(model, point + change)
        return dense(model, functions, batches)[0]

    d = solved(r)
    promised, new = -float(d @ (J.T @ r) + (J @ d).square().sum() / 2), at(d)
    if float(r @ r - new @ new) / 2 < 0.75 * promised:
        bend = solved(new - r - J @ d)
        bent = at(d + bend)
        if bend.norm() <= 0.25 * d.norm() and bent @ bent < new @ new:
            d = d + bend
    at(d)


@pytest.mark.table(plain=14)
@pytest.mark.parametrize("name", networks())
def test_the_first_losses_are_those_of_rows(name, held):
    model, functions, batches = networks()[name]
    ours = model.double()
    theirs = copy.deepcopy(ours)
    optimizer = hodiff.LevenbergMarquardt(functions, ours, damping=2.0, search=False)
    for _ in range(5):
        r, _ = dense(theirs, functions, batches)
        assert float(optimizer.step(*batches)) == pytest.approx(float(r @ r) / 2, rel=1e-10)
        assert optimizer.last.accepted and optimizer.last.space == "samples"
        damping = optimizer.last.damping * optimizer.state[next(iter(ours.parameters()))]["scale"]
        stepped(theirs, functions, batches, damping)
    units = 1 if name not in DEPENDENT else 1e4
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=1e-8 * units, atol=1e-10 * units)


DEPENDENT = ("with a level", "the mean of all")
"""Rows of J that depend on each other: next to no damping leaves rounding in a step."""


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_damped_until_a_step_is_not_rounding(name, held):
    """Within the radius lies the step of no damping at all, which the normal equations do not give."""
    model, functions, batches = networks()[name]
    optimizer = hodiff.LevenbergMarquardt(functions, model.double(), damping=2.0, search=False)
    losses = [float(optimizer.step(*batches)) for _ in range(8) if optimizer.last is None or check(optimizer.last)]
    assert check(optimizer.last) and losses == sorted(losses, reverse=True)


def check(record):
    return record.residual < 1e-6 and record.damping > 1e-12


@pytest.mark.parametrize("search", [False, True])
def test_damping_that_holds_a_parameter_back_is_no_minimum(search):
    """One parameter is felt 1e9 times less than the other: damped as much, it promises no decrease of the loss."""
    scales = tensor(1e6, 1e-3)
    b = tensor(0.0, 0.0)
    optimizer = hodiff.LevenbergMarquardt(lambda b: scales * b - 1, b, search=search)
    for _ in range(60):
        optimizer.step()
        assert not optimizer.last.converged or float((scales * b - 1).abs().max()) < 1e-5
    assert optimizer.last.converged is not search  # the search keeps some damping, and is still on its way


def test_a_column_whose_squares_underflow_has_no_direction():
    b = tensor(1.0, 1.0)
    optimizer = hodiff.LevenbergMarquardt(lambda b: b[:1] - 2 + 1e-170 * b[1], b)
    optimizer.step()
    assert optimizer.last.gradient == pytest.approx(1)


# --- training


def poisson(points=120, edge=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    u = lambda model: lambda x: model(x)[:, 0]
    source = lambda x: 2 * math.pi**2 * (math.pi * x).sin().prod(1)
    inside = lambda model, x: (hodiff.laplacian(u(model), x) + source(x)) / points**0.5
    boundary = lambda model, x: u(model)(x) / edge**0.5
    x = torch.rand(points, 2, dtype=D)
    e = torch.rand(edge, 2, dtype=D)
    e[: edge // 2, 0], e[edge // 2 :, 1] = (torch.arange(edge // 2) % 2).to(D), (torch.arange(edge // 2) % 2).to(D)
    return model, [inside, boundary], (x, e)


@pytest.mark.parametrize("search", [None, False])
def test_an_equation_with_a_boundary(search):
    model, functions, batches = poisson()
    optimizer = hodiff.LevenbergMarquardt(functions, model, search=search)
    losses = [float(optimizer.step(*batches)) for _ in range(60)]
    assert all(after <= before for before, after in pairwise(losses))
    assert losses[-1] < (1e-4 if search is None else 1e-3) * losses[0]


def counted(model):
    """Residuals whose weight is the caller's to change, and how many samples each evaluation saw."""
    seen, weight = [], [1.0]

    def f(model, x):
        seen.append(len(x))
        return weight[0] * (model(x).sinh() - x.sin())

    return f, seen, weight


def test_a_step_evaluates_once_and_once_for_each_trial():
    """The whole batch, whatever was known of it: it may have been changed."""
    model, _, (x, _) = equations()
    f, seen, _ = counted(model)
    optimizer = hodiff.LevenbergMarquardt(f, model)
    other, moved = torch.rand(9, 2, dtype=D), lambda: model[0].bias.data.add_(0.01)
    for batch, change in [(x, None), (x, None), (other, None), (other, moved), (x, None)]:
        if change:
            change()
        before = float(f(model, batch).detach().square().sum()) / 2
        seen.clear()
        loss = optimizer.step(batch)
        assert float(loss) == pytest.approx(before, rel=1e-12)
        assert optimizer.last.accepted
        assert seen == [9] * (1 + optimizer.last.evaluations)


@pytest.mark.parametrize("change", ["frozen", "single precision", "other modules"])
def test_a_model_that_changed_between_two_steps(change):
    model, _, (x, _) = equations()
    f, seen, _ = counted(model)
    optimizer = hodiff.LevenbergMarquardt(f, model, damping=0.1)
    optimizer.step(x)
    optimizer.step(x)
    if change == "frozen":
        model[2].bias.requires_grad_(False)
    elif change == "single precision":
        model.float()
        x.data = x.float()  # it is the same tensor
    else:
        model[1] = nn.Sigmoid()
    before = float(f(model, x).detach().square().sum()) / 2
    seen.clear()
    loss = optimizer.step(x)
    assert float(loss) == pytest.approx(before, rel=1e-6)
    assert seen == [9] * (1 + optimizer.last.evaluations) and optimizer.last.accepted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("search", [True, False])
def test_what_changed_outside_between_two_steps_is_seen(search):
    """A weight that the residuals take from outside: those of the last step are not taken for these."""
    model, _, (x, _) = equations()
    f, seen, weight = counted(model)
    optimizer = hodiff.LevenbergMarquardt(f, model, search=search, damping=0.1)
    for _ in range(4):
        weight[0] *= 1.5
        r, J = dense(model, [f], [x])
        before = flat(model)
        seen.clear()
        loss = optimizer.step(x)
        assert float(loss) == pytest.approx(float(r @ r) / 2)
        assert optimizer.last.gradient == pytest.approx(float(((J.T @ r).abs() / J.norm(dim=0) / r.norm()).max()))
        assert seen == [9] * (1 + optimizer.last.evaluations)
    if not search and optimizer.last.evaluations == 1:  # else it may have been bent
        lam = optimizer.last.damping * optimizer.state[model[0].weight]["scale"]
        torch.testing.assert_close(flat(model) - before, damped(J, r, lam), rtol=1e-8, atol=1e-12)


def test_points_of_each_step():
    model, functions, (x, e) = poisson()
    optimizer = hodiff.LevenbergMarquardt(functions, model)
    for _ in range(40):
        optimizer.step(torch.rand(120, 2, dtype=D), e)
        assert optimizer.last.decrease >= 0
    assert float(functions[0](model, x).detach().square().sum()) < 0.1


def test_residuals_that_differentiate_by_their_points_themselves():
    """Also at the trials, whose parameters are not recorded."""
    model, _, (x, _) = poisson(20, 8)

    def inside(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1) - 1

    optimizer = hodiff.LevenbergMarquardt(inside, model)
    losses = [optimizer.step(x) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


@pytest.fixture
def tables(monkeypatch):
    """Whether each Jacobian of a whole batch was made by columns, forwards."""
    made, inner = [], _least_squares.tall_jacobian
    noted = lambda *args, **kwargs: made.append(table := inner(*args, **kwargs)) or table
    monkeypatch.setattr(_least_squares, "tall_jacobian", noted)
    return lambda: [table is not None for table in made]


@pytest.mark.parametrize(
    ("rows", "columns", "forwards"), [(400, 3, True), (60, 3, False), (400, 300, False)], ids=["tall", "few", "wide"]
)
def test_without_samples_the_cheaper_mode_is_taken(rows, columns, forwards, tables):
    A, x, calls = torch.randn(rows, columns, dtype=D, generator=generator()), torch.ones(columns, dtype=D), []
    f = lambda x: calls.append(1) or (A @ x).sin()
    J, r = hodiff.jacobian(f, x), f(x)
    squares = J.square().sum(0)
    expected = x + damped(J, r, 0.1 * (squares if rows >= columns else squares.max()))
    calls.clear()
    optimizer = hodiff.LevenbergMarquardt(f, x, damping=0.1)
    optimizer.step()
    assert tables() == [forwards] and len(calls) == 1 + optimizer.last.evaluations
    torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)


def slope_by_grad(model, x):
    return hodiff.grad(lambda x: model(x)[:, 0], x, batch_ndim=1, create_graph=True)[:, 0]


def slope_by_autograd(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0][:, 0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("hidden", [6, 30])
@pytest.mark.parametrize("slope", [slope_by_autograd, slope_by_grad])
def test_derivatives_that_vmap_refuses(slope, hidden, tables):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
    x, seen = torch.rand(300, 2, dtype=D), []
    inside = lambda model, x: seen.append(len(x)) or (slope(model, x) - model(x)[:, 0]) / len(x) ** 0.5
    r, J = dense(model, [inside], [x])
    before = flat(model)
    seen.clear()
    optimizer = hodiff.LevenbergMarquardt(inside, model, damping=0.1, search=False)
    optimizer.step(x)
    assert tables() == [] and seen == [300] * (1 + optimizer.last.evaluations)
    expected = damped(J, r, 0.1 * float(J.square().sum(0).max()))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.filterwarnings("error")
def test_samples_that_mix_are_taken_by_rows_and_buffers_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(6, 2, dtype=D)
    f = lambda model, x: model(x)[:, 0] - x.prod(1)
    r, J = dense(model, [f], [x])
    buffers = copy.deepcopy(dict(model.named_buffers()))
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(f, model, damping=0.1, search=False)
    optimizer.step(x)
    expected = damped(J, r, 0.1 * float(J.square().sum(0).max()))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-9, atol=1e-12)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])


@pytest.mark.filterwarnings("error")
def test_samples_that_mix_beside_a_much_larger_one():
    x = torch.cat([torch.eye(3, dtype=D), torch.full((1, 3), 1e12, dtype=D)])
    f = lambda p, x: x @ p + (x @ p).tanh().mean()
    p = torch.ones(3, dtype=D)
    J = hodiff.jacobian(lambda p: f(p, x), p)
    r = f(p, x)
    optimizer = hodiff.LevenbergMarquardt(f, p, damping=0.1, search=False)
    optimizer.step(x)
    expected = damped(J, r, 0.1 * float(J.square().sum(0).max()))
    torch.testing.assert_close(p - 1, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("budget", "by_rows"), [(0.5, 0), (100_000, 0), (12_000, 1)])
def test_the_budget_bounds_the_derivatives_by_operations(budget, by_rows, monkeypatch):
    """Where it is more than usual: of 360 samples with two numbers each, by layers of five and two."""
    monkeypatch.setattr("hodiff.calculus._factors.LARGEST", 1)
    taken, inner = [], _least_squares.in_rows
    monkeypatch.setattr(_least_squares, "in_rows", lambda *given: taken.append(1) or inner(*given))
    model, functions, (x, edge) = equations()
    x = x.repeat(40, 1)
    r, J = dense(model, functions, (x, edge))
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(functions, model, damping=0.1, search=False, memory_budget=budget)
    optimizer.step(x, edge)
    expected = damped(J, r, 0.1 * float(J.square().sum(0).max()))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-8, atol=1e-11)
    assert len(taken) == by_rows


def test_what_no_factors_were_found_of_is_not_asked_again(monkeypatch):
    """And a copy knows it as well."""
    asked, inner = [], _least_squares.in_factors
    monkeypatch.setattr(_least_squares, "in_factors", lambda *given: asked.append(1) or inner(*given))
    model, x = nn.Sequential(nn.Linear(2, 4), nn.PReLU(), nn.Linear(4, 1)).double(), torch.randn(6, 2, dtype=D)
    optimizer = hodiff.LevenbergMarquardt([lambda m, x: m(x), lambda m, x: m[2](m[0](x))], model)
    for count in (2, 3, 4):
        optimizer.step(x, x)
        assert len(asked) == count
        optimizer = copy.deepcopy(optimizer)


def test_a_gradient_that_only_the_whole_batch_knows():
    """The values of the samples are right, their derivatives are not: J'r tells."""
    model = nn.Linear(2, 1).double()
    x = torch.arange(8, dtype=D).reshape(4, 2).sin()
    level = lambda y: y + y.mean() - y.mean().detach() - 1
    f = lambda model, x: level(model(x)[:, 0])
    r, J = dense(model, [f], [x])
    before = flat(model)
    optimizer = hodiff.LevenbergMarquardt(f, model, damping=0.1, search=False)
    optimizer.step(x)
    expected = damped(J, r, 0.1 * float(J.square().sum(0).max()))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_and_selected_ones():
    model, functions, batches = equations()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    hodiff.LevenbergMarquardt(functions, hodiff.select(model, "0.*"), search=False).step  # noqa: B018
    optimizer = hodiff.LevenbergMarquardt(functions, model)
    optimizer.step(*batches)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert optimizer.last.accepted and changed == {"0.bias", "2.weight", "2.bias"}


def test_single_precision_is_solved_in_double():
    model, functions, batches = equations()
    model.float()
    to = lambda b: {k: v.float() for k, v in b.items()} if isinstance(b, dict) else b.float()
    batches = tuple(map(to, batches))
    optimizer = hodiff.LevenbergMarquardt(functions, model)
    losses = [optimizer.step(*batches) for _ in range(20)]
    assert losses[-1].dtype == torch.float32 and losses[-1] < 1e-3 * losses[0]
    assert optimizer.last.residual < 1e-3 and all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("several", [False, True], ids=["(N,)", "(N, K)"])
def test_single_precision_beside_data_of_double_precision(several):
    """The difference is of double precision, and rounds as the network does: no sample differs from the batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 2 if several else 1))
    x = torch.randn(60, 2)
    y = x.double().sin() if several else x.double().sin().prod(1, keepdim=True)
    f = lambda m, batch: m(batch[0]) - batch[1]
    optimizer = hodiff.LevenbergMarquardt(f, model)
    losses = [optimizer.step((x, y)) for _ in range(30)]
    assert losses[-1].dtype == D and losses[-1] < 1e-3 * losses[0]


def test_a_matrix_without_full_rank():
    """Two parameters that do the same share the step; it is the shortest."""
    x = torch.zeros(2, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(lambda x: (x.sum() - 2).reshape(1) * tensor(1.0, 2.0, 3.0), x, damping=1e-9)
    optimizer.step()
    torch.testing.assert_close(x, torch.ones(2, dtype=D))


# --- what must not change


def test_a_refused_step_changes_nothing():
    """The loss rises along every step: J is that of another function."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return -g

    for search in (True, False):
        x = tensor(1.0, 2.0)
        drawn = lambda x: Wrong.apply(x) + 0 * torch.rand(2, dtype=D)
        optimizer = hodiff.LevenbergMarquardt(drawn, x, search=search)
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(x, tensor(1.0, 2.0)) and torch.equal(torch.get_rng_state(), state)
        last = optimizer.last
        assert not last.accepted and not last.converged and last.decrease == 0 and last.evaluations == 14
        assert "undone" in repr(last)
        assert optimizer.state[x]["damping"] > 1e-3


def test_a_step_into_nan_is_shortened():
    x = tensor(1.0)
    optimizer = hodiff.LevenbergMarquardt(lambda x: x.log().reshape(1) + 10, x, damping=1e-9, search=True)
    optimizer.step()
    assert 0 < optimizer.last.length < 1 and float(x) > 0
    for _ in range(60):
        optimizer.step()
    assert float(x) == pytest.approx(math.exp(-10), rel=1e-12)


@pytest.mark.parametrize("search", [False, True])
def test_no_step_into_nan_is_taken_for_rounding(search):
    """It promises less than what rounding changes."""
    edge = 1 - 1e-8
    x = tensor(edge)
    f = lambda x: torch.cat([torch.where(x > edge, math.nan, x - 1), 0 * x + 1])
    optimizer = hodiff.LevenbergMarquardt(f, x, search=search)
    for _ in range(3):
        assert float(optimizer.step()) == pytest.approx(0.5)
        assert not optimizer.last.accepted and x == edge


def test_the_same_random_numbers_at_every_trial():
    x = tensor(3.0, 4.0)
    torch.manual_seed(0)
    optimizer = hodiff.LevenbergMarquardt(lambda x: x * torch.rand(2, dtype=D), x)
    optimizer.step()
    after = torch.rand(1)
    torch.manual_seed(0)
    torch.rand(2, dtype=D)
    assert torch.equal(after, torch.rand(1))  # as one evaluation draws
    assert optimizer.last.ratio == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("batches", [(), (torch.eye(2, dtype=D),)], ids=["no batch", "a batch"])
@pytest.mark.parametrize("call", range(1, 9))
def test_an_interrupt_loses_nothing(call, batches):
    x, calls = tensor(1.0, 2.0), []

    def f(x, batch=None):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return (x if batch is None else batch @ x) ** 3 - 1

    optimizer = hodiff.LevenbergMarquardt(f, x)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        for _ in range(8):
            before = x.clone()
            optimizer.step(*batches)
    assert torch.equal(x, before)
    loss = optimizer.step(*batches)
    assert float(loss) == pytest.approx(float((before**3 - 1).square().sum()) / 2)
    assert optimizer.last.accepted


def test_state_dict_goes_on(held):
    ways = []
    for resumed in (False, True):
        model, functions, batches = equations()
        optimizer = hodiff.LevenbergMarquardt(functions, model, momentum=0.3)
        for number in range(6):
            if resumed and number == 3:
                state = optimizer.state_dict()
                optimizer = hodiff.LevenbergMarquardt(functions, model, momentum=0.3)
                optimizer.load_state_dict(state)
            optimizer.step(*batches)
        ways.append(flat(model))
    assert torch.equal(*ways)


@pytest.mark.parametrize("dtype", [torch.float32, D], ids=str)
@pytest.mark.parametrize("options", [{}, {"search": False}, {"momentum": 0.5}, {"search": True}], ids=str)
@pytest.mark.parametrize("batched", [False, True], ids=["no batch", "a batch"])
def test_what_is_saved_to_a_file_goes_on_bit_for_bit(batched, options, dtype, tmp_path):
    """What a step leaves is in float64, and `load_state_dict` makes tensors what the parameters are."""
    t = torch.linspace(0, 2, 30, dtype=dtype)
    y = 1.3 * torch.exp(-0.7 * t) + 0.2 * torch.sin(5 * t)
    curve = lambda p, t: p["a"] * torch.exp(-p["b"][0] * t) + p["b"][1] * torch.sin(3 * t)
    f = (lambda p, b: curve(p, b[0]) - b[1]) if batched else (lambda p: curve(p, t) - y)
    batches = ((t, y),) if batched else ()

    def run(cut):
        p = {"a": torch.tensor(0.3, dtype=dtype), "b": torch.tensor([-2.0, 0.1], dtype=dtype)}  # columns shrink
        make = lambda: hodiff.LevenbergMarquardt(f, p, min_damping=0.05, **options)
        optimizer = make()
        for number in range(5):
            if number == cut:
                torch.save(optimizer.state_dict(), tmp_path / "state")
                optimizer = make()
                optimizer.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
            optimizer.step(*batches)
        return flat_of(p), optimizer.last

    found, last = run(None)
    for cut in (1, 3):
        resumed, then = run(cut)
        assert torch.equal(resumed, found)
        assert (then.damping, then.decrease, then.length) == (last.damping, last.decrease, last.length)


def flat_of(p):
    return torch.cat([p["a"].reshape(1), p["b"]])


# --- bad input

OPTIONS = {
    "damping": ({"damping": 0}, r"damping: got 0, expected a positive number"),
    "damping, word": ({"damping": "gain"}, r"damping: got 'gain'"),
    "momentum": ({"momentum": 1.0}, r"momentum: got 1\.0, expected a number of at least 0, below 1\."),
    "min_damping": ({"min_damping": -1}, r"min_damping: got -1"),
    "tries": ({"tries": 0}, r"tries: got 0"),
    "search": ({"search": "yes"}, r"search: got 'yes', expected True or False"),
    "memory_budget": ({"memory_budget": -1}, r"memory_budget: got -1"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name):
    options, message = OPTIONS[name]
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.LevenbergMarquardt(lambda x: x, torch.ones(2), **options)


def residual(x, batch=None):
    return x if batch is None else batch @ x


STEPS = {
    "a closure": (
        residual,
        (lambda: None,),
        r"step: got a closure\. LevenbergMarquardt needs the residuals themselves",
    ),
    "two batches": (residual, (torch.ones(2, 2), torch.ones(2)), r"got 2 batches, expected 1: one for each"),
    "a loss": (
        lambda x, b: (b @ x).square().sum(),
        (torch.ones(2, 2),),
        r"returned shape \(\), .* not the sum of their",
    ),
    "samples crossed": (
        lambda x, b: (b @ x)[:, None] - b[:, 0],
        (torch.eye(3)[:, :2],),
        r"residuals\[0\] returned shape \(3, 3\) for 3 samples and \(2, 2\) for 2: .*\.squeeze\(-1\)",
    ),
    "nan": (lambda x: x / 0 * 0, (), r"residuals\[0\]: 2 of 2 are not finite at the current parameters\. Nothing"),
    "overflow": (lambda x: x.double() * 1e200, (), r"largest is 1\.0e\+200, so half their sum of squares is inf"),
    "underflow": (lambda x: x.double() * 1e-200, (), r"largest is 1\.0e-200, .* is 0\.0 in float64; scale them"),
    "infinite slope": (lambda x: (x - 1).abs().sqrt(), (), r"the derivative is not finite"),
    "constant": (lambda x: torch.ones(2), (), r"carries no graph"),
    "no tensor": (lambda x: [1.0], (), r"is a float|returned"),
    "complex": (lambda x: x * 1j, (), r"complex"),
}


@pytest.mark.parametrize("name", STEPS)
def test_bad_steps(name):
    f, batches, message = STEPS[name]
    x = torch.ones(2)
    with pytest.raises(hodiff.HodiffError, match=message):
        hodiff.LevenbergMarquardt(f, x).step(*batches)
    assert torch.equal(x, torch.ones(2))


@pytest.mark.table(plain=1)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_matrices_of_residuals(dtype):
    """N numbers of N samples are taken; a broadcast with data from outside is said, for it may be meant."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, dtype=dtype), torch.randn(6, dtype=dtype)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    for f, batches in (
        (lambda m: m(x) - y, ()),
        (lambda m, x: m(x) - y, (x,)),
        (lambda m: y[:, None] - m(x)[:, 0], ()),
        (lambda m: m(x) - m(2 * x)[:, 0], ()),
    ):
        with pytest.warns(hodiff.HodiffWarning, match=r"residuals\[0\]: \(6, 6\), are all sums .*squeeze\(-1\)"):
            hodiff.LevenbergMarquardt(f, model).step(*batches)
    with pytest.raises(hodiff.InputError, match=r"\(6, 6\) for 6 samples"):
        hodiff.LevenbergMarquardt(lambda m, b: m(b[0]) - b[1], model).step((x, y))
    several, square = nn.Linear(2, 6).to(dtype), torch.zeros(3, 3, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.LevenbergMarquardt(lambda m, x: m(x) - y, several).step(x)
        hodiff.LevenbergMarquardt(lambda X: X - 1, square).step()


def test_bad_places():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(hodiff.InputError, match=r"where: can't optimize a non-leaf Tensor; expected leaves"):
        hodiff.LevenbergMarquardt(residual, x * 2)
    with pytest.raises(hodiff.InputError, match=r"residuals: expected a function"):
        hodiff.LevenbergMarquardt(x * 2, x)
    with pytest.raises(hodiff.InputError, match=r"param_group: LevenbergMarquardt has one"):
        hodiff.LevenbergMarquardt(residual, x).add_param_group({"params": [torch.ones(2)]})


@pytest.mark.parametrize("made", [torch.optim.lr_scheduler.ReduceLROnPlateau, torch.optim.swa_utils.SWALR])
@pytest.mark.parametrize("resumed", [False, True])
def test_schedules_of_a_rate_are_refused(made, resumed):
    """There is none to schedule."""
    w = torch.ones(2, requires_grad=True)
    optimizer = hodiff.LevenbergMarquardt(residual, w)
    if resumed:
        optimizer.load_state_dict(optimizer.state_dict())
    options = (0.1,) if made is torch.optim.swa_utils.SWALR else ()
    with pytest.raises(hodiff.InputError, match=r"lr: .* has no learning rate to schedule"):
        made(optimizer, *options)
    assert "lr" not in optimizer.param_groups[0] and copy.deepcopy(optimizer).param_groups[0].get("lr") is None


def test_parameters_that_share_memory_are_refused() -> None:
    """Each would be moved by both steps: the loss rises, and the record says that it fell."""
    w = torch.full((3,), 3.5, dtype=D)
    f = lambda p: torch.cat([p["a"] - 2, p["b"] - 5])
    for shared in (w.view(3), w[1:]):
        with pytest.raises(hodiff.InputError, match=r"shares memory with"):
            hodiff.LevenbergMarquardt(f, {"a": w, "b": shared}).step()
    assert torch.equal(w, torch.full((3,), 3.5, dtype=D))
    with pytest.raises(hodiff.InputError, match=r"shares memory with itself"):
        hodiff.LevenbergMarquardt(lambda p: p - 2, torch.ones(1, dtype=D).expand(3)).step()
    both = torch.zeros(4, dtype=D)
    apart = {"a": both[:2], "b": both[2:]}  # of one storage, without overlap
    hodiff.LevenbergMarquardt(f, apart).step()
    torch.testing.assert_close(both, torch.tensor([2.0, 2.0, 5.0, 5.0], dtype=D), rtol=1e-2, atol=0)
    tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(D)
    tied[1].weight = tied[0].weight
    hodiff.LevenbergMarquardt(lambda m, x: m(x) - 1, tied).step(torch.randn(5, 2, dtype=D))


def test_a_mean_without_a_batch_is_told():
    """It would be squared; as the residual that it may be, it has the shape (1,)."""
    model = nn.Linear(2, 1).double()
    x = torch.arange(8, dtype=D).reshape(4, 2).sin()
    with pytest.warns(hodiff.HodiffWarning, match=r"residuals\[0\] returned one number, a mean or a sum.*\(1,\)"):
        hodiff.LevenbergMarquardt(lambda model: model(x).square().mean(), model).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.LevenbergMarquardt(lambda model: model(x).mean().reshape(1), model).step()


def test_a_refused_step_leaves_no_momentum() -> None:
    """Else the step before it goes on after the refusal, here beside an optimizer without momentum."""
    wall: list[torch.Tensor] = []

    def residuals(p: torch.Tensor) -> torch.Tensor:
        if wall and not torch.equal(p.detach(), wall[0]):
            return 1e3 + p.expand(4)
        return (p * slopes).sin() - 2 * slopes

    slopes, found = torch.linspace(0.5, 1.5, 4, dtype=D), []
    for momentum in (0.9, 0.0):
        wall.clear()
        p = torch.tensor([0.2], dtype=D, requires_grad=True)
        optimizer = hodiff.LevenbergMarquardt(residuals, p, damping=1.0, momentum=momentum, search=False)
        optimizer.step()
        assert ("change" in optimizer.state[p]) is bool(momentum)
        wall.append(p.detach().clone())
        optimizer.step()
        assert torch.equal(p.detach(), wall[0]), "the step was to be refused"
        assert "change" not in optimizer.state[p]
        wall.clear()
        optimizer.step()
        found.append(p.detach().clone())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_of_several_functions_the_second_is_the_one_that_crosses() -> None:
    model = nn.Linear(3, 1, dtype=D)
    x, y = torch.randn(5, 3, dtype=D), torch.randn(5, dtype=D)
    fine = lambda m, b: m(b[0])[:, 0] - b[1]
    crossed = lambda m, b: m(b[0]) - b[1]
    optimizer = hodiff.LevenbergMarquardt([fine, crossed], model)
    with pytest.raises(hodiff.InputError, match=r"residuals\[1\] returned shape \(5, 5\) for 5 samples"):
        optimizer.step((x, y), (x, y))


# --- the record of a search, its bounds, and functions of the wrong signature


def test_the_ratio_of_a_shortened_step_is_to_what_the_model_promises_of_that_length():
    A, b = graded(12, 4, 1), torch.arange(12, dtype=D)
    p = torch.full((4,), -1.2, dtype=D, requires_grad=True)
    f = lambda p: (20 * A @ p).atan() - b / 4
    r, J = f(p).detach(), hodiff.jacobian(f, p)
    optimizer = hodiff.LevenbergMarquardt(f, p, damping=1e-9, search=True)
    optimizer.step()
    record, moved = optimizer.last, J @ torch.linalg.lstsq(J, -r.unsqueeze(1)).solution[:, 0]
    promised = r @ r / 2 - (r + record.length * moved).square().sum() / 2
    gained = (r @ r - f(p).detach().square().sum()) / 2
    assert 0 < record.length < 1 and record.ratio == pytest.approx(float(gained / promised), rel=1e-5)


def test_the_damping_of_a_search_does_not_fall_below_its_bound():
    A, b = graded(12, 4, 1), torch.arange(12, dtype=D)
    p = torch.zeros(4, dtype=D, requires_grad=True)
    optimizer = hodiff.LevenbergMarquardt(lambda p: A @ p - b, p, damping=1e-3, search=True, min_damping=2e-4)
    for _ in range(8):
        optimizer.step()
    assert optimizer.last.damping == 2e-4


def test_a_wrong_signature_is_told_in_each_step():
    p = torch.ones(2, dtype=D, requires_grad=True)
    optimizer = hodiff.LevenbergMarquardt(lambda p, x, y: p - x, p)
    for _ in range(2):
        with pytest.raises(hodiff.InputError, match=r"residuals\[0\]"):
            optimizer.step(torch.ones(2, dtype=D))
