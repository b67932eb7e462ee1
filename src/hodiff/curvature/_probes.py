"""Random probes: drawn one after the other, so that chunks and devices do not change them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff.curvature._operator import LinearOperator
from hodiff.errors import ConvergenceWarning, InputError

DISTRIBUTIONS = ("rademacher", "normal")


def check_distribution(distribution: str) -> None:
    """Raise unless the distribution is known."""
    if distribution not in DISTRIBUTIONS:
        names = " or ".join(map(repr, DISTRIBUTIONS))
        raise InputError(f"distribution: got {distribution!r}, expected {names}.")


def check_generator(generator: object) -> None:
    """Raise unless this is a generator, or None."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(
            f"generator: is a {type(generator).__name__}; expected torch.Generator().manual_seed(seed), or None."
        )


def probes(operator: LinearOperator, count: int, distribution: str, generator: torch.Generator | None) -> Tensor:
    """`count` random vectors as rows `(count, D)`, of independent entries with mean 0 and variance 1.

    They are drawn on the CPU (or where the generator is) in the operator's precision, so that a seed
    gives the same probes on every device.
    """
    size = operator.shape[1]
    device = torch.device("cpu") if generator is None else generator.device
    rows = torch.empty((count, size), dtype=operator.dtype, device=device)
    for row in rows:
        if distribution == "normal":
            row.normal_(generator=generator)
        else:
            row.random_(0, 2, generator=generator).mul_(2).sub_(1)
    return rows.to(operator.device)


def check_square(operator: object, name: str, *, symmetric: bool = False) -> LinearOperator:
    """The operator, checked to be one, square, and symmetric where that matters."""
    if isinstance(operator, torch.Tensor):
        raise InputError(f"{name}: got a tensor; write hodiff.MatrixOperator(A).")
    if not isinstance(operator, LinearOperator):
        raise InputError(
            f"{name}: got a {type(operator).__name__}, expected an operator (hodiff.HessianOperator, ...)."
        )
    rows, columns = operator.shape
    if rows != columns:
        raise InputError(f"{name}: the operator is {rows} x {columns}; expected a square one (J.T @ J?).")
    if symmetric and not operator.symmetric:
        raise InputError(
            f"{name}: {type(operator).__name__} is not known to be symmetric; for a matrix that is so up to rounding "
            f"write hodiff.MatrixOperator((A + A.T) / 2)."
        )
    return operator


def flat_product(operator: LinearOperator, rows: Tensor) -> Tensor:
    """A times each row, `(K, D)` to `(K, D)`."""
    return (operator @ rows.T).T


def warn_not_converged(text: str) -> None:
    """Say that a tolerance was not reached."""
    warnings.warn(text, ConvergenceWarning, stacklevel=_checks.outside())
