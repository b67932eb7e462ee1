"""Rules at points where their formula has no value: as reverse mode has it, wherever that has a number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from hodiff._core import _versions

D = torch.float64
ROWS = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]], dtype=D)
NUMBERS = torch.tensor([0.0, 1.0, -2.0], dtype=D)
ENDS = torch.tensor([0.0, 1.0, 0.5], dtype=D)
ZEROS = torch.zeros(3, dtype=D)
POWERS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)

BY_POWER: dict[str, Callable[[Tensor, float], Tensor]] = {
    "norm": lambda z, p: z.norm(p, dim=-1),
    "vector_norm": lambda z, p: torch.linalg.vector_norm(z, p, dim=-1),
    "normalize": lambda z, p: F.normalize(z, p=p, dim=-1),
    "dist": lambda z, p: torch.dist(z, ROWS, p=p),
    "pairwise_distance": lambda z, p: F.pairwise_distance(z, ROWS, p=p, eps=0.0),
    "cdist": lambda z, p: torch.cdist(z, z, p=p),
    "pdist": lambda z, p: F.pdist(z, p=p),
    "abs of a norm": lambda z, p: z.abs() ** p,
}
CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    **{f"{name}, p = {p}": (lambda z, f=f, p=p: f(z, p), ROWS) for name, f in BY_POWER.items() for p in POWERS},
    **{f"norm, p = {p}": (lambda z, p=p: z.norm(p, dim=-1), ROWS) for p in (-1.0, -2.0)},
    "Frobenius norm": (lambda z: torch.linalg.norm(z[:2]), ROWS),
    "norm squared": (lambda z: z.norm(dim=-1) ** 2, ROWS),
    "cdist squared": (lambda z: torch.cdist(z, z).square(), ROWS),
    "cdist to constants": (lambda z: torch.cdist(z, ROWS[1:]), ROWS),
    "cosine_similarity": (lambda z: F.cosine_similarity(z, torch.ones_like(z), dim=-1), ROWS),
    "std": (lambda z: z.std(-1), ROWS),
    "std_mean": (lambda z: torch.stack(torch.std_mean(z, -1)), ROWS),
    "var_mean": (lambda z: torch.stack(torch.var_mean(z, -1, correction=0)), ROWS),
    "elu": (F.elu, NUMBERS),
    "elu, alpha": (lambda z: F.elu(z, 0.5), NUMBERS),
    "selu": (F.selu, NUMBERS),
    "celu": (lambda z: F.celu(z, 0.7), NUMBERS),
    "prelu": (lambda z: F.prelu(z, torch.tensor([0.2], dtype=D)), NUMBERS),
    "leaky_relu": (F.leaky_relu, NUMBERS),
    "relu": (F.relu, NUMBERS),
    "relu6": (F.relu6, 6 * ENDS),
    "hardtanh": (F.hardtanh, 2 * ENDS - 1),
    "softshrink": (F.softshrink, ENDS - 0.5),
    "hardshrink": (F.hardshrink, ENDS - 0.5),
    "clamp": (lambda z: z.clamp(0.0, 1.0), ENDS),
    "clamp_min": (lambda z: z.clamp_min(0.0), ENDS),
    "clamp_max": (lambda z: z.clamp_max(1.0), ENDS),
    "clamp to tensors": (lambda z: torch.clamp(z, ZEROS, torch.ones_like(ZEROS)), ENDS),
    "maximum": (lambda z: torch.maximum(z, -z), NUMBERS),
    "amax": (lambda z: z.amax(-1), ROWS),
    "abs": (torch.abs, NUMBERS),
    "sinc": (lambda z: torch.sinc(z[1:]), NUMBERS),
    "sqrt of a square": (lambda z: (z * z).sqrt()[1:], NUMBERS),
    "x to a power of x": (lambda z: z ** (2 + z), torch.tensor([0.0, 1.0, 0.5], dtype=D)),
    "powers of zero": (lambda z: ZEROS**z, torch.tensor([2.0, 1.5, 1.0], dtype=D)),
    "xlogy": (lambda z: torch.xlogy(z, torch.full_like(z, 2.0)), NUMBERS),
    "hypot": (lambda z: torch.hypot(z, torch.full_like(z, 3.0)), NUMBERS),
    "atan2": (lambda z: torch.atan2(z, z.cos()), NUMBERS),
    "prod": (lambda z: z.prod(-1), ROWS),
}


@pytest.mark.filterwarnings("ignore:the result is not finite:hodiff.HodiffWarning")
@pytest.mark.filterwarnings("ignore:f contains a norm, a standard deviation or a square root")  # of p from 3 on, at 0
@pytest.mark.parametrize("name", CASES)
def test_value_gradient_and_laplacian_are_those_of_reverse_mode(name: str) -> None:
    f, x = CASES[name]
    weights = torch.arange(1.0, 1.0 + f(x).numel(), dtype=D).reshape(f(x).shape)
    g = lambda z: (f(z) * weights).sum()
    got = hodiff.value_grad_and_laplacian(g, x, batch_ndim=0, method="jets", create_graph=False)
    if "dist," in name and "pair" not in name and _versions.RELEASE < (2, 14):
        gradient = hodiff.grad(g, x)  # cdist and pdist have no second derivative there
        torch.testing.assert_close(got[1], gradient)
        return
    try:
        expected = hodiff.value_grad_and_laplacian(g, x, batch_ndim=0, method="reverse", create_graph=False)
    except hodiff.GraphError as error:
        assert "no second derivative of" in str(error) and _versions.RELEASE < (2, 14)
        return
    for mine, theirs in zip(got, expected, strict=True):
        told = theirs.isfinite()
        torch.testing.assert_close(mine[told], theirs[told])


@pytest.mark.filterwarnings("ignore:the result is not finite:hodiff.HodiffWarning")
@pytest.mark.parametrize("p", [1.5, 2.0, 2.5])
def test_a_second_derivative_that_does_not_exist_is_no_number(p: float) -> None:
    """The slope of a norm at 0 is zero by convention; there is none for its curvature, and no zero is made up."""
    f = lambda z: z.norm(p, dim=-1)
    value, gradient, curvature = hodiff.value_grad_and_laplacian(f, ROWS, method="jets")
    assert torch.equal(gradient[0], torch.zeros(2, dtype=D)) and value[0] == 0
    assert curvature[0].isnan() and curvature[2].isfinite()


def test_pairwise_distances_by_closed_form() -> None:
    """Squares: 2 for each ordered pair and end; cubes: 6 |x_i - x_j| for each pair and end; and gradients of those."""
    x = torch.tensor([0.3, 0.5, 0.9], dtype=D, requires_grad=True)
    squares = lambda z: torch.cdist(z[:, None], z[:, None]).square().sum()
    cubes = lambda z: F.pdist(z[:, None]).pow(3).sum()
    torch.testing.assert_close(hodiff.laplacian(squares, x, batch_ndim=0), torch.tensor(24.0, dtype=D))
    laplacian = hodiff.laplacian(cubes, x, batch_ndim=0)
    torch.testing.assert_close(laplacian, torch.tensor(12 * (0.2 + 0.6 + 0.4), dtype=D))
    (gradient,) = torch.autograd.grad(laplacian, x)
    torch.testing.assert_close(gradient, torch.tensor([-24.0, 0.0, 24.0], dtype=D))


def test_equal_entries_of_fmax_are_left_to_reverse_mode() -> None:
    """Whose share each has there differs from release to release."""
    f = lambda z: torch.fmax(z, -z)
    x = NUMBERS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(x).sum(), x)
    torch.testing.assert_close(hodiff.jet(f, NUMBERS, [torch.ones_like(NUMBERS)])[1][0].detach(), expected)


@pytest.mark.parametrize("mask", ["bool", "-inf", "part"])
def test_rows_of_attention_that_are_masked_in_full_are_zero(mask: str) -> None:
    allowed = torch.ones(3, 3, dtype=torch.bool)
    allowed[1] = False
    allowed[1, 2] = mask == "part"
    given = allowed if mask == "bool" else torch.zeros(3, 3, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    x, k = torch.randn(2, 6, dtype=torch.float64), torch.randn(1, 3, 2, dtype=torch.float64)

    def f(z: Tensor, rows: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        q = z.reshape(-1, 3, 2)[:, list(rows)]
        return F.scaled_dot_product_attention(q, k, k.sin() * z.sum(-1)[:, None, None], given[list(rows)]).sum((-1, -2))

    found = hodiff.laplacian(f, x, method="jets")
    torch.testing.assert_close(found, hodiff.laplacian(f, x, method="reverse"))
    if mask != "part":
        torch.testing.assert_close(found, hodiff.laplacian(lambda z: f(z, (0, 2)), x, method="reverse"))
        torch.testing.assert_close(
            hodiff.biharmonic(f, x, method="jets"), hodiff.biharmonic(lambda z: f(z, (0, 2)), x, method="jets")
        )


def test_an_encoder_layer_takes_a_sample_that_is_padded_in_full() -> None:
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64).eval()
    padded = torch.tensor([[True, True, True], [False, False, True]])
    x = torch.randn(2, 12, dtype=torch.float64)
    f = lambda z: layer(z.reshape(2, 3, 4), src_key_padding_mask=padded).square().sum((-1, -2))
    found = hodiff.laplacian(f, x, method="jets")
    assert found.isfinite().all()
    torch.testing.assert_close(found, hodiff.laplacian(f, x, method="reverse"))
