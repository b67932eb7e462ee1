"""Jets that are added into fresh zeros, as by libraries of message passing and mixtures of experts."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff

D = torch.float64
I = torch.tensor([0, 1, 0, 2, 1])
X = torch.linspace(-1, 1.5, 15, dtype=D).reshape(5, 3)
Function = Callable[[Tensor], Tensor]


def _named(z: Tensor) -> Tensor:
    out = z.new_zeros(4, 3)
    out.index_add_(0, I, z**3)
    return (out.sin() + out.shape[0]).sum()


def _twice(z: Tensor) -> Tensor:
    out = torch.zeros_like(z)
    out.scatter_add_(0, I[:, None].expand(5, 3), z**3)
    out.index_add_(0, I, z.sin())
    return (z[:2] @ out.mT).sin().sum() + torch.cat([z, out]).pow(3).sum()


def _returned(z: Tensor) -> Tensor:
    out = z.new_zeros(5)
    out.index_add_(0, torch.arange(5), z.pow(4).sum(-1))
    return out


def _mask(z: Tensor) -> Tensor:
    mask = torch.zeros_like(z)
    mask[2:] = 2.0
    mask[:, 0].fill_(3)
    return (z**3 * mask).sum()


def _drawn(z: Tensor) -> Tensor:
    return (z**3 * torch.zeros_like(z).fill_(0.5) * (z.new_zeros(3) + 2)).sum()


RIGHT: dict[str, tuple[int, Function]] = {
    "scatter_add_": (0, lambda z: z.new_zeros(4, 3).scatter_add_(0, I[:, None].expand(5, 3), z**3).sin().sum()),
    "index_add_": (0, lambda z: z.new_zeros(4, 3).index_add_(0, I, z**3).sin().sum()),
    "index_add_, alpha": (0, lambda z: z.new_zeros(4, 3).index_add_(0, I, z**3, alpha=2).sin().sum()),
    "index_put_": (0, lambda z: z.new_zeros(4, 3).index_put_((I,), z**3, accumulate=True).sin().sum()),
    "index_put": (0, lambda z: torch.ones(4, 3, dtype=D).index_put((I,), z**3, accumulate=True).sin().sum()),
    "index_put, no sum": (0, lambda z: z.index_put((torch.tensor([1]),), z[0] ** 3).sin().sum()),
    "add_": (0, lambda z: z.new_zeros(5, 3).add_(z**3).sin().sum()),
    "a name": (0, _named),
    "twice": (0, _twice),
    "what f returns": (1, _returned),
    "a mask": (0, _mask),
    "filled": (0, _drawn),
}


@pytest.mark.parametrize("name", RIGHT)
def test_taylor_mode_has_a_rule(name: str) -> None:
    batch_ndim, f = RIGHT[name]
    found = hodiff.laplacian(f, X, batch_ndim=batch_ndim, method="jets")
    torch.testing.assert_close(found, hodiff.laplacian(f, X, batch_ndim=batch_ndim, method="reverse"))
    if not batch_ndim:
        (second, third) = (hodiff.jet(f, X, [X.cos(), torch.zeros_like(X), torch.zeros_like(X)])[1][k] for k in (1, 2))
        along = lambda t: f(X + t * X.cos())
        zero = torch.zeros((), dtype=D)
        torch.testing.assert_close(second, hodiff.derivatives(along, zero, 3)[2])
        torch.testing.assert_close(third, hodiff.derivatives(along, zero, 3)[3])


def _viewed(z: Tensor) -> Tensor:
    out = z.new_zeros(4, 3)
    row = out[0]
    out.index_add_(0, I, z**3)
    return out.sin().sum() + row.sum()


def _of_torch(z: Tensor) -> Tensor:
    out = torch.zeros(4, 3, dtype=D)
    out.index_add_(0, I, z**3)
    return out.sin().sum()


@pytest.mark.parametrize("f", [_viewed, _of_torch])
def test_elsewhere_reverse_mode_takes_over(f: Function) -> None:
    with pytest.warns(hodiff.HodiffWarning, match="the operation without its underscore"):
        found = hodiff.laplacian(f, X, batch_ndim=0)
    torch.testing.assert_close(found, hodiff.laplacian(f, X, batch_ndim=0, method="reverse"))


def test_nothing_is_added_in_what_is_returned() -> None:
    """Zeros alone are a constant, and said to be one; nor is their class seen outside."""
    with pytest.raises(hodiff.GraphError, match="does not depend on x"):
        hodiff.laplacian(lambda z: z.new_zeros(5), X, method="jets")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value, found = hodiff.laplacian(
            lambda z: ((z**3).sum(), z.new_zeros(2)), X, batch_ndim=0, method="jets", has_aux=True
        )
    assert type(found) is Tensor and type(value) is Tensor
