"""Errors over CPU seconds: `LevenbergMarquardt`, L-BFGS and Adam on the problems of the recipes.

`python -m benchmarks.training [PROBLEM ...]` puts its results into `docs/training.json`, which the
pages draw. All problems take twenty minutes of one core. The clock is the CPU time of the process,
and stands still while an error is measured.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import least_squares
from torch import Tensor, nn

import hodiff
from benchmarks.table import where

FILE = Path(__file__).parents[1] / "docs" / "training.json"
D, PI = torch.float64, math.pi
RATES = (1e-2, 3e-3, 1e-3)
"""Of Adam, at the start; a cosine takes them to 0 over the time.

All at the first seed, then the best.
"""
LBFGS = {"history_size": 100, "max_iter": 10, "tolerance_grad": 0, "tolerance_change": 0}
"""With strong Wolfe line searches."""
MOST_POINTS = 60
"""Of a stored curve."""

Residual = Callable[..., Tensor]


@dataclass
class Problem:
    """What is trained, on what, and how far it is from the solution."""

    model: nn.Module
    residuals: list[Residual]
    draw: Callable[[], tuple[Any, ...]]
    error: Callable[[], tuple[float, ...]]
    new_points: bool = False
    for_others: list[Residual] | None = None  # the same, where a whole batch is cheaper otherwise
    # calls what it is given at each evaluation
    scipy: Callable[[Callable[[], object]], object] | None = None

    def loss(self, batches: tuple[Any, ...]) -> Tensor:
        """Half the sum of the squares."""
        batches = batches or (None,)
        given = [(self.model,) if batch is None else (self.model, batch) for batch in batches]
        pairs = zip(self.for_others or self.residuals, given, strict=True)
        return torch.stack([f(*of).square().sum() for f, of in pairs]).sum() / 2


# --- optimizers: each takes a step, and then another; it is told which part of its time is over


Steps = Iterator[None]


def levenberg_marquardt(problem: Problem, clock: "Clock", **options: Any) -> Steps:
    optimizer = hodiff.LevenbergMarquardt(problem.residuals, problem.model, **options)
    batches = problem.draw()
    while True:
        optimizer.step(*batches)
        yield
        if optimizer.last and optimizer.last.converged:
            return
        if problem.new_points:
            batches = problem.draw()


def lbfgs(problem: Problem, clock: "Clock") -> Steps:
    """On the first points, which stay."""
    optimizer = torch.optim.LBFGS(
        problem.model.parameters(), line_search_fn="strong_wolfe", **LBFGS
    )
    batches = problem.draw()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(batches)
        loss.backward()
        return loss

    while True:
        optimizer.step(closure)
        yield


def adam(problem: Problem, clock: "Clock", lr: float) -> Steps:
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=lr)
    batches = problem.draw()
    while True:
        optimizer.param_groups[0]["lr"] = lr * (1 + math.cos(PI * min(1.0, clock.part()))) / 2
        optimizer.zero_grad()
        problem.loss(batches).backward()
        optimizer.step()
        yield
        if problem.new_points:
            batches = problem.draw()


class Clock:
    """CPU seconds of what is trained."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0

    def part(self) -> float:
        return self.spent / self.seconds


Curve = list[tuple[float, ...]]
END = object()


def train(problem: Problem, method: Callable[..., Steps], seconds: float, **options: Any) -> Curve:
    """Step, seconds and errors: after each of few steps, and ever less often of many."""
    clock, curve, mark = Clock(seconds), Curve(), 0.0
    steps = method(problem, clock, **options)
    number = 0
    going = True
    while going and clock.spent < seconds:
        before = time.process_time()
        going = next(steps, END) is not END
        clock.spent += time.process_time() - before
        number += 1
        if not going or clock.spent >= mark or clock.spent >= seconds:
            curve.append(
                (number, round(clock.spent, 2), *(float(f"{e:.3g}") for e in problem.error()))
            )
            mark = max(clock.spent, 0.05) * (1.0 if method is levenberg_marquardt else 1.1)
    return curve


def by_scipy(problem: Problem) -> Curve:
    """As `train`: after each evaluation of the residuals."""
    curve, spent, begun = Curve(), 0.0, time.process_time()

    def evaluated() -> None:
        nonlocal spent, begun
        spent += time.process_time() - begun
        curve.append(
            (len(curve) + 1, round(spent, 4), *(float(f"{e:.3g}") for e in problem.error()))
        )
        begun = time.process_time()

    problem.scipy(evaluated)
    return curve


def thinned(curve: Curve) -> Curve:
    """The last point, and others at about equal distances of the logarithm of their steps."""
    steps = {round(len(curve) ** (i / MOST_POINTS)) for i in range(MOST_POINTS + 1)}
    return [point for i, point in enumerate(curve, 1) if i in steps or i == len(curve)]


# --- problems


def network(*widths: int, dtype: torch.dtype = D) -> nn.Sequential:
    """A perceptron with tanh, as PyTorch initializes it."""
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def sines(z: Tensor) -> Tensor:
    """Of two coordinates; its Laplacian is -2 pi² times it."""
    return torch.sin(PI * z[:, 0]) * torch.sin(PI * z[:, 1])


def cosines(z: Tensor) -> Tensor:
    """Of any number of coordinates; its Laplacian is -pi² times it."""
    return torch.cos(PI * z).sum(-1)


def poisson(
    widths: tuple[int, ...],
    exact: Callable[[Tensor], Tensor] = sines,
    *,
    eigenvalue: float = 2 * PI**2,
    inside: int = 900,
    edge: int = 120,
    new_points: bool = False,
    dtype: torch.dtype = D,
    fresh: int = 20_000,
) -> Problem:
    """The equation in the unit cube, and the solution's values on its faces; both are means."""
    dimension = widths[0]
    net = network(*widths, dtype=dtype)

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        return (
            hodiff.laplacian(lambda z: net(z).squeeze(-1), z) + eigenvalue * exact(z)
        ) / inside**0.5

    def boundary(net: nn.Module, z: Tensor) -> Tensor:
        return (net(z).squeeze(-1) - exact(z)) / edge**0.5

    def draw() -> tuple[Tensor, Tensor]:
        faces = torch.rand(edge, dimension, dtype=dtype)
        faces[torch.arange(edge), torch.randint(dimension, (edge,))] = torch.randint(2, (edge,)).to(
            dtype
        )
        return torch.rand(inside, dimension, dtype=dtype), faces

    z = torch.rand(fresh, dimension, dtype=dtype)

    def error() -> tuple[float]:
        with torch.no_grad():
            return (relative(net(z).squeeze(-1), exact(z)),)

    return Problem(net, [equation, boundary], draw, error, new_points)


NODES, VISCOSITY = 80, 0.1 / PI


def burgers_solution(z: Tensor) -> Tensor:
    """By Cole and Hopf, from -sin(pi x): an integral over a Gaussian,
    by Gauss's and Hermite's rule.
    """
    import numpy as np

    nodes, weights = (torch.tensor(part) for part in np.polynomial.hermite.hermgauss(NODES))
    y = z[:, :1] - (4 * VISCOSITY * z[:, 1:]).sqrt() * nodes
    phi = weights * torch.exp(-torch.cos(PI * y) / (2 * PI * VISCOSITY))
    return -(torch.sin(PI * y) * phi).sum(-1) / phi.sum(-1)


class Viscous(nn.Module):
    """u(x, t), and the viscosity, by its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(2, 20, 20, 20, 1)
        self.log_viscosity = nn.Parameter(torch.tensor(0.3, dtype=D).log())

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z).squeeze(-1)


def burgers() -> Problem:
    """The viscosity is unknown; it starts at 0.3. The solution is known at 200 points."""
    inside, known = 800, 200
    model, only_x = Viscous(), torch.tensor([1.0, 0.0], dtype=D)

    def equation(model: Viscous, z: Tensor) -> Tensor:
        value, gradient, u_xx = hodiff.value_grad_and_laplacian(model, z, weight=only_x)
        u_x, u_t = gradient.unbind(-1)
        return (u_t + value * u_x - model.log_viscosity.exp() * u_xx) / inside**0.5

    def data(model: Viscous, batch: tuple[Tensor, Tensor]) -> Tensor:
        z, u = batch
        return (model(z) - u) * (10 / known) ** 0.5

    def points(number: int) -> Tensor:
        return torch.rand(number, 2, dtype=D) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])

    z, where_known = points(inside), points(known)
    fresh = points(5_000)
    truth = burgers_solution(fresh)

    def error() -> tuple[float, float]:
        with torch.no_grad():
            return relative(model(fresh), truth), abs(
                float(model.log_viscosity.exp()) / VISCOSITY - 1
            )

    return Problem(
        model, [equation, data], lambda: (z, (where_known, burgers_solution(where_known))), error
    )


class Columns(nn.Module):
    """A network that has its two coordinates one by one, as many have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 5), *(nn.Linear(5, 5) for _ in range(4))]).to(D)
        self.last = nn.Linear(5, 1).to(D)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = torch.cat([x, t], dim=1)
        for layer in self.layers:
            h = torch.sigmoid(layer(h))
        return self.last(h)


def transport() -> Problem:
    """The problem of https://github.com/nanditadoloi/PINN: u_x = 2 u_t + u, and u = 6 exp(-3 x)
    at the start.
    """
    net, number, size = Columns(), 500, torch.tensor([2.0, 1.0], dtype=D)

    def exact(z: Tensor) -> Tensor:
        return 6 * torch.exp(-3 * z[:, :1] - 2 * z[:, 1:])

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        u = lambda z: net(z[:, :1], z[:, 1:]).squeeze(-1)  # noqa: E731
        u_x, u_t = hodiff.partials(u, z, [(0,), (1,)])
        return (u_x - 2 * u_t - u(z)) / number**0.5

    def start(net: nn.Module, z: Tensor) -> Tensor:
        return (net(z[:, :1], z[:, 1:]) - exact(z)) / number**0.5

    at_zero, fresh = torch.rand(number, 2, dtype=D) * size, torch.rand(5_000, 2, dtype=D) * size
    at_zero[:, 1] = 0

    def error() -> tuple[float]:
        with torch.no_grad():
            return (relative(net(fresh[:, :1], fresh[:, 1:]), exact(fresh)),)

    draw = lambda: (torch.rand(number, 2, dtype=D) * size, at_zero)  # noqa: E731
    return Problem(net, [equation, start], draw, error, new_points=True)


def oscillator() -> Problem:
    """The problem of https://github.com/benmoseley/harmonic-oscillator-pinn: ten values,
    30 points of the equation.
    """
    damping, frequency = 2.0, 20.0
    net = network(1, 32, 32, 32, 1)
    omega = (frequency**2 - damping**2) ** 0.5

    def exact(t: Tensor) -> Tensor:
        return torch.exp(-damping * t) * (
            torch.cos(omega * t) + damping / omega * torch.sin(omega * t)
        )

    def equation(net: nn.Module, t: Tensor) -> Tensor:
        u = lambda t: net(t).squeeze(-1)  # noqa: E731
        u_t, u_tt = hodiff.partials(u, t, [(0,), (0, 0)])
        return (u_tt + 2 * damping * u_t + frequency**2 * u(t)) * (1e-4 / 30) ** 0.5

    def data(net: nn.Module, t: Tensor) -> Tensor:
        return (net(t) - exact(t)) / 10**0.5

    fresh = torch.linspace(0, 1, 500, dtype=D).unsqueeze(1)
    batches = torch.linspace(0, 1, 30, dtype=D).unsqueeze(1), fresh[0:200:20]

    def error() -> tuple[float]:
        with torch.no_grad():
            return (relative(net(fresh), exact(fresh)),)

    return Problem(net, [equation, data], lambda: batches, error)


PAIRS = torch.triu_indices(4, 4, offset=1)
REST = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], dtype=D) / 8**0.5


def distances(x: Tensor) -> Tensor:
    return (x[..., PAIRS[0], :] - x[..., PAIRS[1], :]).norm(dim=-1)


def morse(x: Tensor) -> Tensor:
    """The energies of molecules (N, 12): Morse's potential between each two atoms."""
    return (1 - torch.exp(-2 * (distances(x.unflatten(-1, (4, 3))) - 1))).square().sum(-1)


def forces(molecules: int = 60) -> Problem:
    """A pair potential, learned from the forces on four atoms."""
    net = network(1, 16, 16, 1)

    scale = (12 * molecules) ** 0.5

    def energy(net: nn.Module, x: Tensor) -> Tensor:
        return net(distances(x.unflatten(-1, (4, 3)))[..., None]).sum((-2, -1))

    def errors(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, F = batch
        slopes = hodiff.partials(lambda x: energy(net, x), x, [(i,) for i in range(12)])
        return (-torch.stack(slopes, -1) - F) / scale

    def by_one_pass(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, F = batch
        return (
            -hodiff.grad(lambda x: energy(net, x), x, batch_ndim=1, create_graph=True) - F
        ) / scale

    def sample(number: int) -> tuple[Tensor, Tensor]:
        x = (REST + 0.15 * torch.randn(number, 4, 3, dtype=D)).flatten(1)
        return x, -hodiff.grad(morse, x, batch_ndim=1)

    known, (x, truth) = sample(molecules), sample(2_000)
    of_known, of_new = distances(known[0].unflatten(-1, (4, 3))), distances(x.unflatten(-1, (4, 3)))
    # nothing is known beyond
    met = ((of_new >= of_known.min()) & (of_new <= of_known.max())).all(dim=1)
    x, truth = x[met], truth[met]

    def error() -> tuple[float]:
        return (relative(-hodiff.grad(lambda x: energy(net, x), x, batch_ndim=1), truth),)

    return Problem(net, [errors], lambda: (known,), error, for_others=[by_one_pass])


# MGH09 of NIST's reference data, https://www.itl.nist.gov/div898/strd, a work of the US government.
MGH09_X = [4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625]
MGH09_Y = [0.1957, 0.1947, 0.1735, 0.16, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246]
MGH09_CERTIFIED = [1.9280693458e-01, 1.9128232873e-01, 1.2305650693e-01, 1.3606233068e-01]


def curve_fit() -> Problem:
    """From the far one of NIST's two starts."""
    x, y = torch.tensor(MGH09_X, dtype=D), torch.tensor(MGH09_Y, dtype=D)
    certified = torch.tensor(MGH09_CERTIFIED, dtype=D)
    model = nn.ParameterList([torch.tensor([25, 39, 41.5, 39], dtype=D)])

    def at(b: Tensor) -> Tensor:
        return b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]) - y

    def scipy(evaluated: Callable[[], object]) -> None:
        def f(b: Any) -> Any:
            model[0].data = torch.tensor(b)
            evaluated()
            return at(model[0].detach()).numpy()

        jacobian = lambda b: hodiff.jacobian(at, torch.tensor(b)).numpy()  # noqa: E731
        least_squares(f, model[0].detach().numpy(), jac=jacobian, method="lm", **EXACT)

    def error() -> tuple[float]:
        return (float((model[0].detach() / certified - 1).abs().max()),)

    return Problem(model, [lambda model: at(model[0])], tuple, error, scipy=scipy)


EXACT = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 2_000}


def rotated(vector: Tensor, x: Tensor) -> Tensor:
    """x turned about a vector, by its length (Rodrigues)."""
    angle = (vector.square().sum(-1, keepdim=True) + 1e-12).sqrt()
    axis = vector / angle
    inner = (axis * x).sum(-1, keepdim=True)
    return (
        angle.cos() * x
        + angle.sin() * torch.linalg.cross(axis, x)
        + (1 - angle.cos()) * inner * axis
    )


def bundle(cameras: int = 6, points: int = 200, each: int = 4) -> Problem:
    """The scene of the recipe."""
    place = torch.rand(points, 3, dtype=D) * 2 - 1
    pose = torch.zeros(cameras, 6, dtype=D)
    pose[:, 1], pose[:, 5] = torch.linspace(-0.5, 0.5, cameras), 5.0
    of_point = torch.arange(points).repeat_interleave(each)
    by = torch.stack([torch.randperm(cameras)[:each] for _ in range(points)]).reshape(-1)

    def project(unknowns: Any, by: Tensor, of_point: Tensor) -> Tensor:
        camera, point = unknowns["cameras"][by], unknowns["points"][of_point]
        moved = rotated(camera[:, :3], point) + camera[:, 3:]
        return moved[:, :2] / moved[:, 2:]

    def errors(unknowns: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        by, of_point, observed = batch
        return project(unknowns, by, of_point) - observed

    batch = by, of_point, project({"cameras": pose, "points": place}, by, of_point)
    start = {"cameras": pose, "points": place}
    model = nn.ParameterDict(
        {key: value + 0.02 * torch.randn_like(value) for key, value in start.items()}
    )

    def scipy(evaluated: Callable[[], object]) -> None:
        sizes, parts = [6 * cameras, 3 * points], [(cameras, 6), (points, 3)]
        unpacked = lambda x: dict(  # noqa: E731
            zip(
                model,
                (v.reshape(s) for v, s in zip(torch.tensor(x).split(sizes), parts, strict=True)),
                strict=True,
            )
        )

        def f(x: Any) -> Any:
            for key, value in unpacked(x).items():
                model[key].data = value
            evaluated()
            return errors(unpacked(x), batch).reshape(-1).numpy()

        at = {key: value.detach() for key, value in model.items()}
        plan = hodiff.sparse.plan_jacobian(
            lambda at: errors(at, batch).reshape(-1), at, output="scipy"
        )
        x = torch.cat([value.reshape(-1) for value in at.values()]).numpy()
        least_squares(f, x, jac=plan, method="trf", tr_solver="lsmr", x_scale="jac")

    def error() -> tuple[float]:
        with torch.no_grad():
            return (float(errors(model, batch).square().mean().sqrt()),)

    return Problem(model, [errors], lambda: (batch,), error, scipy=scipy)


def noisy(size: int = 64) -> Problem:
    """A regression whose noise is as large as the signal, new data at each step."""
    net = network(8, 64, 64, 1)
    direction = torch.randn(8, dtype=D) / 8**0.5

    def clean(x: Tensor) -> Tensor:
        return torch.sin(2 * x @ direction)

    def errors(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (net(x).squeeze(-1) - y) / size**0.5

    def draw() -> tuple[tuple[Tensor, Tensor]]:
        x = torch.randn(size, 8, dtype=D)
        return ((x, clean(x) + 0.3 * torch.randn(size, dtype=D)),)

    fresh = torch.randn(5_000, 8, dtype=D)

    def error() -> tuple[float]:
        with torch.no_grad():
            return (relative(net(fresh).squeeze(-1), clean(fresh)),)

    return Problem(net, [errors], draw, error, new_points=True)


# --- examples of DeepXDE 1.15 (examples/pinn_forward): its networks, numbers of points by its
# sequence, hard conditions and weights, all in float64


def hammersley(number: int, least: tuple[float, float], most: tuple[float, float]) -> Tensor:
    """DeepXDE's points of a rectangle: Hammersley's, without the first."""
    whole = torch.arange(1, number + 1)
    digits = (whole[:, None] >> torch.arange(24)) & 1
    inverse = (digits.to(D) * 0.5 ** torch.arange(1, 25, dtype=D)).sum(1)
    points = torch.stack([whole / (number + 1), inverse], 1)
    return torch.tensor(least, dtype=D) + points * (
        torch.tensor(most, dtype=D) - torch.tensor(least, dtype=D)
    )


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def fnn(*widths: int, sine: bool = False) -> nn.Sequential:
    """DeepXDE's `FNN`, by Glorot's rule, from a normal or, with sines, a uniform distribution."""
    net = network(*widths)
    for place, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            (nn.init.xavier_uniform_ if sine else nn.init.xavier_normal_)(layer.weight)
            nn.init.zeros_(layer.bias)
        elif sine:
            net[place] = Sine()
    return net


def steep(z: Tensor, viscosity: float, nodes: int = 1_601) -> Tensor:
    """Cole's and Hopf's solution by the trapezoidal rule, also where the viscosity is small."""
    s = torch.linspace(-12, 12, nodes, dtype=D)
    y = z[:, :1] - (4 * viscosity * z[:, 1:]).sqrt() * s
    phi = torch.softmax(-torch.cos(PI * y) / (2 * PI * viscosity) - s.square(), 1)
    return -(torch.sin(PI * y) * phi).sum(1)


def on_grid(
    net: Callable[[Tensor], Tensor], points: Tensor, truth: Tensor
) -> Callable[[], tuple[float]]:
    def error() -> tuple[float]:
        with torch.no_grad():
            return (relative(net(points), truth),)

    return error


def deepxde_burgers() -> Problem:
    """Burgers.py: the viscosity 0.01 / pi makes a front at x = 0."""
    net, viscosity = fnn(2, 20, 20, 20, 1), 0.01 / PI
    u, only_x = (lambda z: net(z).squeeze(-1)), torch.tensor([1.0, 0.0], dtype=D)
    inside = hammersley(2_540, (-1, 0), (1, 0.99))
    edge, start = hammersley(80, (-1, 0), (1, 0.99)), hammersley(160, (-1, 0), (1, 0))
    edge[:, 0] = edge[:, 0].sign()
    everywhere = torch.cat([inside, edge, start])

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        value, gradient, u_xx = hodiff.value_grad_and_laplacian(u, z, weight=only_x)
        return (gradient[:, 1] + value * gradient[:, 0] - viscosity * u_xx) / len(z) ** 0.5

    def boundary(net: nn.Module, z: Tensor) -> Tensor:
        return u(z) / len(z) ** 0.5

    def initial(net: nn.Module, z: Tensor) -> Tensor:
        return (u(z) + torch.sin(PI * z[:, 0])) / len(z) ** 0.5

    grid = torch.cartesian_prod(
        torch.linspace(-1, 1, 256, dtype=D), torch.linspace(0, 0.99, 100, dtype=D)
    )[::5]
    error = on_grid(u, grid, steep(grid, viscosity))
    batches = everywhere, edge, start
    return Problem(net, [equation, boundary, initial], lambda: batches, error)


def burgers_by_construction() -> Problem:
    """The same network and equation: start and edges are met by construction,
    and the points lie closer to the front.
    """
    net, viscosity = fnn(2, 20, 20, 20, 1), 0.01 / PI
    only_x, inside = torch.tensor([1.0, 0.0], dtype=D), hammersley(2_540, (-1, 0), (1, 0.99))
    inside[:, 0] *= inside[:, 0].abs()

    def u(z: Tensor) -> Tensor:
        x, t = z.unbind(-1)
        return -torch.sin(PI * x) + t * (1 - x**2) * net(z).squeeze(-1)

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        value, gradient, u_xx = hodiff.value_grad_and_laplacian(u, z, weight=only_x)
        return (gradient[:, 1] + value * gradient[:, 0] - viscosity * u_xx) / len(z) ** 0.5

    grid = torch.cartesian_prod(
        torch.linspace(-1, 1, 256, dtype=D), torch.linspace(0, 0.99, 100, dtype=D)
    )[::5]
    return Problem(net, [equation], lambda: (inside,), on_grid(u, grid, steep(grid, viscosity)))


def allen_cahn_reference(degree: int = 600) -> tuple[Tensor, Tensor]:
    """Points and values, by Chebyshev's collocation in x and Radau's method of order 5 in t."""
    import numpy as np
    from scipy.integrate import solve_ivp
    from scipy.interpolate import BarycentricInterpolator

    k = np.arange(degree + 1)
    x = np.cos(PI * k / degree)
    scale = np.where((k == 0) | (k == degree), 2.0, 1.0) * (-1.0) ** k
    with np.errstate(divide="ignore"):
        first = np.outer(scale, 1 / scale) / (x[:, None] - x[None, :] + np.eye(degree + 1))
    first -= np.diag(first.sum(1))
    second = 0.001 * (first @ first)[1:-1]
    whole = lambda v: np.concatenate([[-1.0], v, [-1.0]])  # noqa: E731

    times, at = np.linspace(0, 1, 101), np.linspace(-1, 1, 201)
    found = solve_ivp(
        lambda t, v: second @ whole(v) + 5 * (v - v**3),
        (0, 1),
        (x**2 * np.cos(PI * x))[1:-1],
        method="Radau",
        t_eval=times,
        jac=lambda t, v: second[:, 1:-1] + np.diag(5 - 15 * v**2),
        rtol=1e-9,
        atol=1e-11,
    )
    values = [BarycentricInterpolator(x, whole(v))(at) for v in found.y.T]
    grid = torch.cartesian_prod(torch.tensor(times), torch.tensor(at)).flip(1)
    return grid, torch.tensor(np.concatenate(values))


def allen_cahn() -> Problem:
    """Allen_Cahn.py: start and edges are met by construction."""
    net, only_x = fnn(2, 20, 20, 20, 1), torch.tensor([1.0, 0.0], dtype=D)
    inside = hammersley(8_000, (-1, 0), (1, 1))
    edge, start = hammersley(400, (-1, 0), (1, 1)), hammersley(800, (-1, 0), (1, 0))
    edge[:, 0] = edge[:, 0].sign()
    everywhere = torch.cat([inside, edge, start])

    def u(z: Tensor) -> Tensor:
        x, t = z.unbind(-1)
        return x**2 * torch.cos(PI * x) + t * (1 - x**2) * net(z).squeeze(-1)

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        value, gradient, u_xx = hodiff.value_grad_and_laplacian(u, z, weight=only_x)
        return (gradient[:, 1] - 0.001 * u_xx - 5 * (value - value**3)) / len(z) ** 0.5

    return Problem(net, [equation], lambda: (everywhere,), on_grid(u, *allen_cahn_truth()))


allen_cahn_truth = functools.cache(allen_cahn_reference)


def helmholtz() -> Problem:
    """Helmholtz_Dirichlet_2d.py: two waves in each direction, zero edges by construction."""
    net, wave = fnn(2, 150, 150, 150, 1, sine=True), 4 * PI
    line, zero = torch.arange(1, 21, dtype=D) / 21, torch.zeros(20, dtype=D)
    sides = [(line, zero), (line, zero + 1), (zero, line), (zero + 1, line)]
    edge = torch.cat([torch.stack(side, 1) for side in sides])
    everywhere = torch.cat([hammersley(400, (0, 0), (1, 1)), edge])

    def exact(z: Tensor) -> Tensor:
        return torch.sin(wave * z).prod(-1)

    def u(z: Tensor) -> Tensor:
        return (z * (1 - z)).prod(-1) * net(z).squeeze(-1)

    def equation(net: nn.Module, z: Tensor) -> Tensor:
        value, _, laplacian = hodiff.value_grad_and_laplacian(u, z)
        return (laplacian + wave**2 * (value + exact(z))) / len(z) ** 0.5

    axis = torch.linspace(0, 1, 61, dtype=D)
    grid = torch.cartesian_prod(axis, axis)
    return Problem(net, [equation], lambda: (everywhere,), on_grid(u, grid, exact(grid)))


@dataclass
class Race:
    """A problem, how long each has, which seeds each gets, and in which variants it is run."""

    make: Callable[[], Problem]
    seconds: float
    seeds: int = 5
    of_others: int = 3
    rates: tuple[float, ...] = RATES
    variants: Mapping[str, dict[str, Any]] = field(
        default_factory=lambda: {"Levenberg-Marquardt": {}}
    )


def five_dimensions(*hidden: int, inside: int, edge: int, new_points: bool = True) -> Problem:
    return poisson(
        (5, *hidden, 1),
        cosines,
        eigenvalue=PI**2,
        inside=inside,
        edge=edge,
        new_points=new_points,
        fresh=30_000,
    )


LM = "Levenberg-Marquardt"
BOTH = {LM: {}, "by the gain ratio": {"search": False}}
DAMPED = {LM: {}, "min_damping=1": {"damping": 1.0, "min_damping": 1.0}}
SMALLER = {
    LM: {},
    "with momentum 0.063": {"momentum": 0.0633},
    "damping=1e-6": {"damping": 1e-6},
    "damping=1e-6, momentum=0.063": {"damping": 1e-6, "momentum": 0.0633},
}
RACES = {
    "poisson": Race(lambda: poisson((2, 32, 1)), 10, variants=BOTH),
    "poisson, wide": Race(lambda: poisson((2, 32, 32, 1)), 20, 3, 1),
    "burgers": Race(burgers, 8, variants=BOTH),
    "forces": Race(forces, 5, variants=BOTH),
    "transport": Race(transport, 6, 3, 1, variants=BOTH),
    "oscillator": Race(oscillator, 8, 3, 1, variants=BOTH),
    "curve": Race(curve_fit, 1, 1, 1, (10, 1, 0.1)),
    "bundle": Race(bundle, 3, 1, 1),
    "five dimensions": Race(
        # of arXiv:2505.12149, its smallest sampling
        lambda: five_dimensions(64, 64, 48, 48, inside=800, edge=200),
        60,
        3,
        1,
        variants=SMALLER,
    ),
    "float32": Race(lambda: poisson((2, 32, 1), dtype=torch.float32), 5, 3, 0),
    "float32, wide": Race(lambda: poisson((2, 32, 32, 1), dtype=torch.float32), 20, 2, 0),
    "few points, fixed": Race(
        lambda: five_dimensions(64, inside=250, edge=100, new_points=False), 6, 3, 0
    ),
    "few points, new": Race(lambda: five_dimensions(64, inside=250, edge=100), 6, 3, 0),
    "DeepXDE, Burgers": Race(deepxde_burgers, 60, 3, 1, (1e-3,)),
    "DeepXDE, Allen-Cahn": Race(allen_cahn, 60, 3, 1, (1e-3,)),
    "DeepXDE, Burgers, by construction": Race(burgers_by_construction, 30, 2, 0),
    "DeepXDE, Helmholtz": Race(helmholtz, 30, 1, 1, (1e-3,)),
    "noisy": Race(noisy, 6, 3, 3, variants=DAMPED),
    "noisy, 1,000": Race(lambda: noisy(1_000), 8, 2, 2),
}
"""What has more seconds has fewer seeds."""


def runs(race: Race) -> Iterator[dict[str, Any]]:
    def run(method: str, call: Callable[..., Steps], seed: int, **options: Any) -> dict[str, Any]:
        torch.manual_seed(seed)
        curve = train(race.make(), call, race.seconds, **options)
        return {"method": method, "seed": seed, "options": options, "curve": thinned(curve)}

    for name, options in race.variants.items():
        for seed in range(race.seeds):
            yield run(name, levenberg_marquardt, seed, **options)
    if race.of_others and race.make().scipy:
        torch.manual_seed(0)
        yield {"method": "SciPy", "seed": 0, "options": {}, "curve": thinned(by_scipy(race.make()))}
    if not race.of_others:
        return
    for seed in range(race.of_others):
        yield run("L-BFGS", lbfgs, seed)
    first = [run("Adam", adam, 0, lr=lr) for lr in race.rates]
    best = min(first, key=lambda each: each["curve"][-1][2])
    yield best
    for seed in range(1, race.of_others):
        yield run("Adam", adam, seed, **best["options"])


def write(name: str, race: Race, done: list[dict[str, Any]]) -> None:
    """Puts the runs of a problem into the file, one line each,
    in the place of those of the same methods.
    """
    stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    methods = {run["method"] for run in done}
    others = [run for run in stored.get(name, {}).get("runs", []) if run["method"] not in methods]
    stored[name] = {"where": where(), "seconds": race.seconds, "runs": done + others}
    lines = []
    for problem, of in sorted(stored.items()):
        head = json.dumps({key: value for key, value in of.items() if key != "runs"})[1:-1]
        body = ",\n".join(json.dumps(run, separators=(",", ":")) for run in of["runs"])
        lines.append(f'{json.dumps(problem)}: {{{head}, "runs": [\n{body}\n]}}')
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument(
        "problems", nargs="*", metavar="PROBLEM", help=f"any of: {'; '.join(RACES)}. Default: all"
    )
    parser.add_argument(
        "--ours",
        nargs="*",
        metavar="VARIANT",
        help="of Levenberg-Marquardt, alone; none: all of them",
    )
    options = parser.parse_args()
    unknown = set(options.problems) - set(RACES)
    if unknown:
        parser.error(f"unknown problem {', '.join(sorted(unknown))}; there are {'; '.join(RACES)}")
    torch.set_num_threads(1)
    # what is imported and compiled by the first steps
    for method in (levenberg_marquardt, lbfgs, adam):
        train(poisson((2, 4, 1)), method, 0.1, **({"lr": 1e-3} if method is adam else {}))
    for name in options.problems or RACES:
        done = []
        race = RACES[name]
        if options.ours is not None:
            chosen = options.ours or race.variants
            race = replace(race, of_others=0, variants={key: race.variants[key] for key in chosen})
        for run in runs(race):
            done.append(run)
            steps, seconds, *errors = run["curve"][-1]
            shown = ", ".join(f"{error:.1e}" for error in errors)
            print(
                f"{name}: {run['method']} {run['options']} seed {run['seed']}: "
                f"{shown} ({steps} steps, {seconds} s)"
            )
            sys.stdout.flush()
        write(name, race, done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
