"""What differs between releases of PyTorch is dealt with, and what torch says about itself reaches no user of ours."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import hodiff
from hodiff._core import _versions
from tests.support.differences import first_difference, relative_error

X = torch.tensor([[0.3, -0.7], [1.1, 0.4], [-0.9, 0.2]], dtype=torch.float64)
V = torch.tensor([[0.5, 0.1], [-0.3, 0.8], [0.2, -0.6]], dtype=torch.float64)


def test_the_release_is_read_from_its_number() -> None:
    assert ".".join(map(str, _versions.RELEASE)) == re.match(r"\d+\.\d+", torch.__version__).group()


def test_no_user_sees_what_torch_deprecates() -> None:
    """In a process of its own: such warnings come once, when forward mode is first used. The tour shows some of it."""
    shown = [f"-Werror::{category}" for category in ("FutureWarning", "UserWarning")]
    ran = subprocess.run([sys.executable, *shown, "-m", "hodiff", "tour"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_distances_have_the_second_derivatives_that_torch_has(p: float) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, x.sin() + 3, p=p, compute_mode="donot_use_mm_for_euclid_dist").sin().sum()

    if _versions.RELEASE < (2, 14):
        with pytest.raises(hodiff.GraphError, match="second derivative of cdist"):
            hodiff.hvp(f, X, V)
    else:
        expected = first_difference(lambda t: hodiff.grad(f, X + t * V))
        assert relative_error(hodiff.hvp(f, X, V), expected) < 1e-6


def distances(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, V + 2, p=3.0).sin().flatten()


def patch(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided_scatter(x.sin(), x[:2].exp(), (2, 2), (1, 2)).flatten()


def selected(x: torch.Tensor) -> torch.Tensor:
    """The argument is broadcast to the mask."""
    return x.sin()[0].masked_select(torch.tensor([[True] * x.shape[1], [False] + [True] * (x.shape[1] - 1)]))


def patch_alone(x: torch.Tensor) -> torch.Tensor:
    """Nothing stands between the cotangent and what reads its memory."""
    return torch.as_strided_scatter(x.flatten() ** 3, x.flatten()[:4].reshape(2, 2) ** 2, (2, 2), (2, 1), 1)


@pytest.mark.parametrize("f", [distances, patch, patch_alone, selected])
def test_vectors_pass_one_at_a_time_where_their_batch_would_be_wrong(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = torch.stack([hodiff.grad(lambda x, i=i: f(x)[i], X) for i in range(len(f(X)))])
    assert relative_error(hodiff.jacobian(f, X), expected) < 1e-12
    assert relative_error(hodiff.vjp(f, X, [torch.eye(len(f(X)), dtype=X.dtype)]), expected) < 1e-12
    for size in (1, 2, 4):
        assert relative_error(hodiff.jacobian(f, X, chunk_size=size), expected) < 1e-12


def test_torch_batches_distances_wrongly() -> None:
    """Should this fail one day, on every supported release, `BATCHED_WRONGLY` can be shorter."""
    expected = torch.stack([hodiff.grad(lambda x, i=i: distances(x)[i], X) for i in range(9)])
    assert relative_error(torch.func.jacrev(distances)(X), expected) > 0.1
