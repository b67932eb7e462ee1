"""Solutions attached to the graph: of batches of problems, exactly, and by so many steps; against dense matrices."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hodiff
from tests.support.properties import agree

D = torch.float64
seeds = st.integers(0, 2**16)


class Problem(NamedTuple):
    """A contraction g(x, θ) of each of a batch; its fixed points x = tanh(M x + θ), its Jacobians, a cotangent."""

    g: Callable[..., Tensor]
    x: Tensor
    theta: Tensor
    J: Tensor
    v: Tensor


def problem(seed: int, batch: list[int], size: int) -> Problem:
    source = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=D, generator=source)
    M = normal(*batch, size, size)
    M = 0.5 * M / torch.linalg.matrix_norm(M, 2, keepdim=True) if M.numel() else M
    theta = normal(*batch, size)
    g = lambda x, t: torch.tanh((M @ x.unsqueeze(-1)).squeeze(-1) + t)
    x = theta.clone()
    for _ in range(80):
        x = g(x, theta)
    J = torch.eye(size, dtype=D) - (1 - x**2).unsqueeze(-1) * M  # of x - g: tanh' = 1 - tanh²
    return Problem(g, x, theta.requires_grad_(), J, normal(*batch, size))


@given(seed=seeds, batch=st.lists(st.integers(0, 3), max_size=2), size=st.integers(1, 5), restart=st.integers(1, 6))
def test_of_batches_of_problems(seed: int, batch: list[int], size: int, restart: int) -> None:
    """As a root, a fixed point and a minimum: -J⁻¹ ∂F, sample by sample."""
    g, x, theta, J, v = problem(seed, batch, size)
    expected = torch.linalg.solve(J.mT, v.unsqueeze(-1)).squeeze(-1) * (1 - x**2)
    options = {"batch_ndim": len(batch), "rtol": 1e-12}
    solutions = [
        hodiff.implicit.fixed_point(lambda z: g(z, theta), x, restart=restart, **options),
        hodiff.implicit.root(lambda z: z - g(z, theta), x, **options),
        hodiff.implicit.argmin(lambda z: (z - g(z, theta)).square().sum(-1), x, **options),
    ]
    for solution in solutions:
        assert torch.equal(solution, x)
        agree(torch.autograd.grad((solution * v).sum(), theta)[0], expected, 1e-7, 1e-9)


@given(seed=seeds, size=st.integers(1, 5), steps=st.integers(0, 5), scale=st.floats(1, 3))
def test_by_so_many_steps(seed: int, size: int, steps: int, scale: float) -> None:
    """The first terms of a Neumann series, and steps of conjugate gradients: u'∂F with the u that they reach."""
    g, x, theta, J, v = problem(seed, [], size)
    terms = v / scale
    for _ in range(steps):
        terms = terms + (v - J.T @ terms) / scale
    options = {"method": "neumann", "iterations": steps, "scale": scale}
    solution = hodiff.implicit.fixed_point(lambda z: g(z, theta), x, **options)
    agree(torch.autograd.grad(solution @ v, theta)[0], terms * (1 - x**2), 1e-9, 1e-11)
    H = J.T @ J
    quadratic = lambda z: 0.5 * (z - theta) @ H @ (z - theta)
    solution = hodiff.implicit.argmin(quadratic, theta.detach(), iterations=steps + 1)
    u = hodiff.solve(hodiff.MatrixOperator(H, symmetric=True), v, iterations=steps + 1).value
    agree(torch.autograd.grad(solution @ v, theta)[0], H @ u, 1e-8, 1e-10)
