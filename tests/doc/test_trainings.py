"""The script that measures what recipes of training show, and what they make of its results."""

import itertools
import json
import math

import pytest
import torch
from benchmarks import training
from docs import trainings


@pytest.mark.parametrize("name", training.RACES)
def test_each_problem_can_be_trained_and_is_stored(name):
    torch.manual_seed(0)
    race = training.RACES[name]
    problem = race.make()
    batches = problem.draw()
    before = float(problem.loss(batches).detach())
    optimizer = training.hodiff.LevenbergMarquardt(problem.residuals, problem.model)
    assert math.isclose(float(optimizer.step(*batches)), before, rel_tol=1e-5)  # one loss for all
    assert float(problem.loss(batches).detach()) < before
    assert all(math.isfinite(error) for error in problem.error())
    assert {*race.variants} <= {*trainings.runs(name)}


def test_the_sharp_front_solves_its_equation():
    """Cole's and Hopf's integral, at DeepXDE's small viscosity and beside the other quadrature at a large one."""
    nu = 0.01 / math.pi
    z = torch.rand(50, 2, dtype=training.D) * torch.tensor([2.0, 0.9]) - torch.tensor([1.0, -0.05])
    u, slope, u_xx = training.hodiff.value_grad_and_laplacian(
        lambda z: training.steep(z, nu), z, weight=torch.tensor([1.0, 0.0], dtype=training.D)
    )
    assert float((slope[:, 1] + u * slope[:, 0] - nu * u_xx).abs().max()) < 1e-9
    torch.testing.assert_close(training.steep(z, training.VISCOSITY), training.burgers_solution(z))


@pytest.mark.parametrize("method", [training.levenberg_marquardt, training.lbfgs, training.adam])
def test_a_curve_ends_where_its_time_is_over(method, monkeypatch):
    """By a clock on which each step takes 0.03 seconds: on a busy machine one step may take all of them."""
    monkeypatch.setattr(training.time, "process_time", itertools.count(0, 0.03).__next__)
    torch.manual_seed(0)
    options = {"lr": 1e-2} if method is training.adam else {}
    curve = training.train(training.poisson((2, 4, 1), inside=20, edge=8), method, 0.1, **options)
    steps, seconds, _ = zip(*curve, strict=True)
    assert list(steps) == sorted(set(steps)) and list(seconds) == sorted(seconds)
    assert seconds[-1] == 0.12 and steps[-1] == 4 and curve[-1] != curve[0]


def test_a_thinned_curve_keeps_its_ends():
    curve = [(step, step / 10, 1 / step) for step in range(1, 500)]
    some = training.thinned(curve)
    assert len(some) <= training.MOST_POINTS + 1 and (some[0], some[-1]) == (curve[0], curve[-1])


def test_a_table_has_the_median_and_the_worst_by_a_time(tmp_path, monkeypatch):
    curves = [[[1, 0.5, 8.0], [2, 1.0, error], [3, 2.1, 1e-9]] for error in (1.0, 3.0, 2.0)]
    stored = {"some": {"runs": [{"method": "Adam", "curve": curve} for curve in curves]}}
    (tmp_path / "training.json").write_text(json.dumps(stored), encoding="utf-8")
    monkeypatch.setattr(trainings, "_FILE", tmp_path / "training.json")
    assert trainings.table("some", (1, 2)).splitlines()[-1] == "| Adam | 3 | 2.0e+00 (3.0e+00) | 2.0e+00 (3.0e+00) |"
