"""Patterns of programs that hypothesis draws: straight lines of operations on a few tensors, some written in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from hodiff.sparse import plan_hessian, plan_jacobian
from tests.unit.sparse.zoo import D, generator

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
N = 8
A = torch.where((torch.arange(N)[:, None] * 7 + torch.arange(N) * 3) % 5 < 2, 1.0, 0.0).to(D)
B = torch.randn(N, N, dtype=D, generator=generator())
INDEX = torch.tensor([5, 0, 0, 3, 7, 2, 2, 6])
MASK = torch.tensor([True, False, True, True, False, False, True, False])
Step = Callable[[Tensor, Tensor], Tensor]
"""From two vectors of length N to one."""


def written(a: Tensor, b: Tensor) -> Tensor:
    out = a.clone()
    out[::2] = b[1::2] * 0.5
    out[3:5] += b[:2]
    return out


def in_view(a: Tensor, b: Tensor) -> Tensor:
    out = a.clone().reshape(2, 4)
    out.T[1].mul_(b[:2])
    return out.reshape(-1)


STEPS: dict[str, Step] = {
    "add": lambda a, b: a + 0.5 * b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / (2 + b**2),
    "sin": lambda a, b: a.sin(),
    "square": lambda a, b: a**2 / 3,
    "exp": lambda a, b: (-(a**2)).exp(),
    "roll": lambda a, b: a.roll(3),
    "flip": lambda a, b: a.flip(0),
    "shifted": lambda a, b: torch.cat([a[2:], b[:2]]),
    "stacked": lambda a, b: torch.stack([a[:4], b[4:]], 1).reshape(-1),
    "transposed": lambda a, b: a.reshape(2, 4).T.reshape(-1),
    "by matrix": lambda a, b: A @ a,
    "by full matrix": lambda a, b: (B @ a) / 4,
    "by sparse matrix": lambda a, b: torch.sparse.mm(A.to_sparse(), a[:, None])[:, 0],
    "row times matrix": lambda a, b: (a.reshape(2, 4) @ A[:4, :4]).reshape(-1),
    "stack of products": lambda a, b: torch.bmm(a.reshape(2, 2, 2), b.reshape(2, 2, 2)).reshape(-1) / 3,
    "gather": lambda a, b: a[INDEX],
    "scatter": lambda a, b: b.index_add(0, INDEX, a),
    "put": lambda a, b: b.index_put((INDEX[:4],), a[:4]),
    "mask": lambda a, b: a * MASK,
    "where constant": lambda a, b: torch.where(MASK, a, b),
    "where value": lambda a, b: torch.where(a > b, a, b**2),
    "masked fill": lambda a, b: a.masked_fill(MASK, 0.0) + b,
    "selected": lambda a, b: b.masked_scatter(MASK, a),
    "sum": lambda a, b: a + b.sum() / 8,
    "sums of rows": lambda a, b: (a.reshape(4, 2) * b.reshape(4, 2).sum(1, keepdim=True)).reshape(-1),
    "mean of part": lambda a, b: torch.cat([a[:6], a[2:4].mean()[None], b[7:]]),
    "softmax": lambda a, b: a.reshape(4, 2).softmax(1).reshape(-1),
    "cumsum": lambda a, b: a.reshape(2, 4).cumsum(1).reshape(-1) / 3,
    "largest": lambda a, b: a.reshape(4, 2).amax(1).repeat_interleave(2),
    "sort": lambda a, b: a.reshape(4, 2).sort(1).values.reshape(-1),
    "pad": lambda a, b: torch.nn.functional.pad(a[1:7], (1, 1)),
    "windows": lambda a, b: torch.nn.functional.pad(a, (0, 2)).unfold(0, 3, 1).sum(1) / 2,
    "convolution": lambda a, b: torch.nn.functional.conv1d(a[None, None], B[:1, None, :3], padding=1)[0, 0],
    "outer": lambda a, b: torch.outer(a[:2], b[:4]).reshape(-1),
    "expanded": lambda a, b: a[:1].expand(N) * b,
    "detached": lambda a, b: a.detach() * b,
    "complex": lambda a, b: torch.view_as_real(torch.view_as_complex(a.reshape(4, 2)) ** 2).reshape(-1),
    "written": written,
    "in view": in_view,
}
Program = list[tuple[str, int, int]]
programs = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=5
)
points = st.lists(st.floats(-1.5, 1.5, width=32), min_size=N, max_size=N, unique=True)


def run(program: Program, x: Tensor) -> Tensor:
    values = [x, x.cos(), x, x]
    for name, first, second in program:
        values = [*values[1:], STEPS[name](values[first], values[second])]
    return values[-1]


def agree(got: Tensor, expected: Tensor) -> None:
    assert float((got - expected).abs().max()) <= 1e-11 * max(1.0, float(expected.abs().max()))


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": [HealthCheck.too_slow],
}


@settings(max_examples=25, **SETTINGS)
@given(programs, points, points)
def test_hessians_of_programs(program: Program, here: list[float], there: list[float]) -> None:
    """The plan is made at one point, and is right at both."""
    f = lambda x: (run(program, x) ** 2).sum() + x[0] ** 2
    plan = plan_hessian(f, torch.tensor(here, dtype=D))
    for values in (here, there):
        x = torch.tensor(values, dtype=D)
        agree(plan(x, check=True).to_dense(), hodiff.hessian(f, x))


@settings(max_examples=25, **SETTINGS)
@given(programs, points, points)
def test_jacobians_of_programs(program: Program, here: list[float], there: list[float]) -> None:
    f = lambda x: torch.cat([run(program, x), x[:2]])  # an even number: PyTorch views rows as complex
    plan = plan_jacobian(f, torch.tensor(here, dtype=D))
    for values in (here, there):
        x = torch.tensor(values, dtype=D)
        agree(plan(x, check=True).to_dense(), hodiff.jacobian(f, x))


@pytest.mark.parametrize("name", STEPS)
def test_each_step_alone(name: str) -> None:
    x = torch.linspace(-1.3, 1.1, N, dtype=D)[INDEX.argsort()]
    f = lambda x: (run([(name, 0, 1), ("multiply", 3, 0)], x) ** 2).sum() + x[0] ** 2
    plan = plan_hessian(f, x)
    for point in (x, x.flip(0)):
        agree(plan(point, check=True).to_dense(), hodiff.hessian(f, point))
