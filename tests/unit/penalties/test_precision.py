"""Half precision on the CPU: penalties in float32 or better, and the recipe with two scales."""

import pytest
import torch
from torch import nn

import hodiff


def critic(gain: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """With a gradient of about `gain`."""
    torch.manual_seed(0)
    D = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    with torch.no_grad():
        D[0].weight.mul_(gain**0.5)
        D[2].weight.mul_(gain**0.5)
    return D.to(dtype)


def autocast(D: nn.Module, x: torch.Tensor, dtype: torch.dtype, **options) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return hodiff.gradient_penalty(D, x, target=1.0, **options)


def error(found: nn.Module, exact: nn.Module, scale: float = 1.0) -> float:
    """Relative error of the penalty's gradient, over all parameters."""
    a = torch.cat([p.grad.double().flatten() / scale for p in found.parameters() if p.grad is not None])
    b = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    return float((a - b).norm() / b.norm())


def reference(D: nn.Module, x: torch.Tensor) -> nn.Module:
    exact = critic(1.0, torch.float64)
    exact.load_state_dict(D.state_dict())
    hodiff.gradient_penalty(exact, x.double(), target=1.0).backward()
    return exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_an_ordinary_gradient(dtype):
    D, x = critic(1.0), torch.randn(16, 64)
    penalty = autocast(D, x, dtype)
    assert penalty.dtype == torch.float32
    penalty.backward()
    assert error(D, reference(D, x)) < 0.05


@pytest.mark.parametrize(
    ("inner", "outer", "low", "high"),
    [
        (1.0, 1.0, 0.5, 2.0),  # most of it is lost
        (1.0, 2.0**16, 0.5, 2.0),  # GradScaler alone does not help: the first pass has underflowed
        (2.0**12, 2.0**16, 0.0, 0.02),  # both scales: right
    ],
)
def test_float16_autocast_of_a_tiny_gradient(inner, outer, low, high):
    """Entries of 1e-9 are below float16's smallest number: they need a scale before the first pass, and one after."""
    D, x = critic(3e-7), torch.randn(16, 64)
    penalty = autocast(D, x, torch.float16, grad_scale=inner, weight=outer)
    penalty.backward()
    found = error(D, reference(D, x), outer)
    assert low <= found <= high


def test_scale_with_a_grad_scaler():
    """The recipe: `grad_scale` inside, `GradScaler` outside; the step equals the float32 one."""
    D, x = critic(1e-3), torch.randn(16, 64)
    before = [p.detach().clone() for p in D.parameters()]
    exact = reference(D, x)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.SGD(D.parameters(), lr=1.0)
    scaler.scale(autocast(D, x, torch.float16, grad_scale=2.0**10)).backward()
    scaler.step(optimizer)
    scaler.update()
    for p, old, reference_p in zip(D.parameters(), before, exact.parameters(), strict=True):
        if reference_p.grad is not None:
            step = (old - p.detach()).double()
            assert (step - reference_p.grad).norm() <= 0.02 * reference_p.grad.norm()


def test_the_scale_changes_nothing_where_nothing_underflows():
    D, x = critic(1.0, torch.float64), torch.randn(8, 64, dtype=torch.float64)
    a, b = (hodiff.gradient_penalty(D, x, target=1.0, grad_scale=scale) for scale in (1.0, 4096.0))
    torch.testing.assert_close(a, b)
    (weight,) = torch.autograd.grad(a, D[0].weight)
    (scaled,) = torch.autograd.grad(b, D[0].weight)
    torch.testing.assert_close(weight, scaled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules(dtype):
    """Sums of squares of 40 and of patches stay in range: they are formed in float32."""
    D = nn.Linear(100, 1, dtype=dtype)
    with torch.no_grad():
        D.weight.fill_(40.0)
    penalty = hodiff.r1_penalty(D, torch.randn(4, 100, dtype=dtype), gamma=2.0)
    assert penalty.dtype == torch.float32
    assert penalty.item() == 160000  # infinite in float16
    patches = lambda x: D(x)[:, :, None].expand(-1, 1, 3000)
    value, outputs = hodiff.gradient_penalty(
        patches, torch.randn(4, 100, dtype=dtype), patch_reduction="mean", return_outputs=True
    )
    assert outputs.dtype == dtype
    assert value.item() == pytest.approx(160000, rel=0.02)


def test_a_float16_gradient_is_unscaled_in_float32():
    """Entries of 3e-8 round to 6e-8 or to 0 in float16."""
    D = nn.Sequential(nn.Linear(50, 1, bias=False), nn.Linear(1, 1, bias=False)).half()
    with torch.no_grad():
        D[0].weight.fill_(1e-4)
        D[1].weight.fill_(3e-4)
    w = D[0].weight.double()[0] * D[1].weight.double()
    norms = hodiff.gradient_penalty(
        D, torch.randn(3, 50, dtype=torch.float16), power=1, grad_scale=4096.0, reduction="none"
    )
    torch.testing.assert_close(norms.double(), w.norm().expand(3), rtol=1e-2, atol=0)


def test_a_scale_that_float16_cannot_hold():
    D = nn.Linear(4, 1, dtype=torch.float16)
    with pytest.raises(hodiff.InputError, match=r"grad_scale: 65536.0 exceeds the largest torch.float16 number"):
        hodiff.gradient_penalty(D, torch.randn(2, 4, dtype=torch.float16), grad_scale=65536.0)
