"""Random vectors: their laws, and where their numbers come from. One vocabulary for all that draw them.

`samples=` is how many, `probes=` their law, `generator=` their source, `vectors=` the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff._core import _modes
from hodiff._core._options import Probes, check_option
from hodiff.errors import InputError


def check_probes(probes: object) -> None:
    """Raise unless the law is known."""
    check_option(probes, Probes, "probes")


def check_generator(generator: object) -> None:
    """Raise unless this is a generator, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator: is a {type(generator).__name__}; expected torch.Generator().manual_seed(seed), or None."
        )


def draw(shape: Sequence[int], like: Tensor, probes: Probes, generator: torch.Generator | None) -> Tensor:
    """Independent numbers of mean 0 and variance 1, in the dtype and on the device of `like`.

    They are drawn where the generator is (a CPU generator gives a CUDA tensor the numbers it gives a CPU tensor), by
    default with the default generator of `like`'s device; in single precision at least, which half precision rounds.
    """
    device = like.device if generator is None else generator.device
    drawn = torch.empty(tuple(shape), dtype=torch.promote_types(like.dtype, torch.float32), device=device)
    with _modes.grad_mode(False):
        if probes == "gaussian":
            drawn.normal_(generator=generator)
        else:
            drawn.bernoulli_(generator=generator).mul_(2).sub_(1)
    return drawn.to(like)


def standard_error(estimates: Tensor) -> Tensor | None:
    """That of the mean of independent estimates, along the first dimension; None of a single one."""
    if len(estimates) < 2:
        return None
    unit = near(estimates.detach().abs().amax(0))  # squares of very small or large numbers have no place in their dtype
    return (estimates / unit).std(0) / len(estimates) ** 0.5 * unit


def near(sizes: Tensor) -> Tensor:
    """Powers of two near some sizes, to measure numbers in; 1 for a zero."""
    room = 100 if sizes.dtype is not torch.float64 else 1000
    exponents = torch.frexp(sizes).exponent.clamp(-room, room)
    return torch.ldexp(torch.ones_like(sizes), exponents)
