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
    numpy_dtype = torch.empty((), dtype=operator.dtype, device="cpu").numpy().dtype

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(array.astype(numpy_dtype, copy=True)).to(operator.device)

    def product(turned: bool, straight: bool) -> Any:
        def apply(array: Any) -> Any:
            v = tensor(array.reshape(-1) if straight else array)  # SciPy may spell a vector as one column
            return (operator.T if turned else operator)._applied(v, "").cpu().numpy()

        return apply

    products = {
        "matvec": product(False, True),
        "rmatvec": product(True, True),
        "matmat": product(False, False),
        "rmatmat": product(True, False),
    }
    return ScipyOperator(shape=tuple(operator.shape), dtype=numpy_dtype, **products)  # pyright: ignore[reportArgumentType, reportCallIssue]
