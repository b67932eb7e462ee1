"""What must hold for any derivative, as assertions; each scales its tolerance by the numbers compared."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hodiff


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a structure, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def agree(got: Any, expected: Any, tolerance: float = 1e-9, floor: float = 1e-11) -> None:
    """Equal structures of equal shapes and dtypes, within ``tolerance`` of the largest expected entry."""
    pairs = list(zip(leaves(got), leaves(expected), strict=True))
    scale = max((float(e.detach().abs().max()) for _, e in pairs if e.numel()), default=0.0)
    for g, e in pairs:
        assert g.shape == e.shape, f"shape {tuple(g.shape)}, expected {tuple(e.shape)}"
        assert g.dtype == e.dtype, f"dtype {g.dtype}, expected {e.dtype}"
        assert torch.isfinite(g).all(), "not finite"
        error = float((g - e).detach().abs().max()) if g.numel() else 0.0
        assert error <= tolerance * scale + floor, f"off by {error:.2e} where the largest entry is {scale:.2e}"


def same_structure(got: Any, expected: Any) -> None:
    """Types of containers, keys and their order, shapes."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        assert got.shape == expected.shape
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same_structure(got[key], expected[key])
    else:
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            same_structure(g, e)


def symmetric(matrix: Tensor) -> None:
    agree(matrix, matrix.mT.clone())


def linear(operator: Callable[[Tensor], Any], v: Tensor, w: Tensor, a: float = 1.7, b: float = -0.6) -> None:
    """operator(a v + b w) = a operator(v) + b operator(w)."""
    left = leaves(operator(a * v + b * w))
    for total, first, second in zip(left, leaves(operator(v)), leaves(operator(w)), strict=True):
        agree(total, a * first + b * second)


def adjoint(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor], v: Tensor, u: Tensor) -> None:
    """<u, A v> = <A' u, v>."""
    agree((u * forward(v)).sum(), (backward(u) * v).sum(), floor=1e-10)


ERRORS = (hodiff.InputError, hodiff.GraphError)


def right_or_refused(call: Callable[[], Any], expected: Any, words: str) -> None:
    """The value is the expected one, or an error of ours says the words."""
    try:
        got = call()
    except ERRORS as error:
        assert re.search(words, str(error)), f"the error lacks {words!r}: {error}"
        return
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
