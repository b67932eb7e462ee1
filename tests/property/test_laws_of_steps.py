"""A compiled step against the gradient by the road, for random losses and points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hodiff
from hodiff._core._versions import RELEASE
from tests.support.laws import law

D = torch.float64
ACTIVATIONS = {"tanh": torch.tanh, "softplus": nn.functional.softplus, "sin": torch.sin, "silu": nn.functional.silu}


@pytest.mark.skipif(RELEASE < (2, 13), reason="compile_step asks for PyTorch 2.13")
@law("compile_step", says="value and gradient of a loss with derivatives of order 0 to 2", oracle="`value_and_grad`")
@settings(max_examples=6)
@given(
    order=st.integers(0, 2),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    rows=st.integers(1, 6),
    width=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_a_step(order: int, activation: str, rows: int, width: int, seed: int) -> None:
    torch.manual_seed(seed)
    weights = {"w": torch.randn(width, 2, dtype=D), "v": torch.randn(width, dtype=D)}
    weights = {name: w.requires_grad_() for name, w in weights.items()}

    def loss(weights, x):
        x = x.detach().requires_grad_()
        u = ACTIVATIONS[activation](x @ weights["w"].T) @ weights["v"]
        for _ in range(order):
            u = torch.autograd.grad(u.sum(), x, create_graph=True)[0].sum(1)
        return (u - 1).square().mean()

    step = hodiff.compile_step(loss, weights, backend="replay", fallback="raise")
    for _ in range(2):
        x = torch.randn(rows, 2, dtype=D)
        value, gradient = step.value_and_grad(x)
        expected, by = hodiff.value_and_grad(loss, weights, args=(x,))
        torch.testing.assert_close((value, gradient), (expected, by), rtol=1e-12, atol=1e-13)
