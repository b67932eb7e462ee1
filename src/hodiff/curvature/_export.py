"""Operators for SciPy."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.errors import InputError


def to_scipy(operator: Any) -> Any:
    """See `LinearOperator.to_scipy`."""
    try:
        from scipy.sparse.linalg import LinearOperator as ScipyOperator
    except ImportError as error:
        raise ImportError("to_scipy() needs SciPy: pip install 'hodiff[scipy]'") from error
    if operator.dtype is torch.bfloat16:
        raise InputError("to_scipy: NumPy has no bfloat16; make the operator in float32.")
    numpy_dtype = torch.empty((), dtype=operator.dtype).numpy().dtype

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array.astype(numpy_dtype, copy=True)).to(operator.device)

    def forward(array: Any) -> Any:
        return (operator @ tensor(_straight(array))).cpu().numpy()

    def backward(array: Any) -> Any:
        return (operator.T @ tensor(_straight(array))).cpu().numpy()

    products = {"matvec": forward, "rmatvec": backward, "matmat": forward, "rmatmat": backward}
    return ScipyOperator(shape=tuple(operator.shape), dtype=numpy_dtype, **products)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _straight(array: Any) -> Any:
    """A vector that SciPy spells as one column, as a vector."""
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 else array
