"""Looks at values: derivatives that do not exist, are all zero, or have lost their digits; and the
warnings that say so.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _call, _nodes, _versions
from hodiff._core._arguments import outside
from hodiff._core._messages import SMOOTH, STEPS, plain_name
from hodiff.errors import HodiffWarning

__all__ = ["said", "warn_of_non_finite", "warn_of_zeros"]


class Spectrum:
    """Values of a matrix that are so close that the next pass is looked at.

    PyTorch divides by their differences: a derivative of order n has lost as many digits as the
    power n - 1 of those has, or n - 2 where only values that are apart are used, and no vectors. So
    it is with singular values near 0 of a matrix that is not square.
    """

    def __init__(self, node: Any, order: int) -> None:
        values, divides, self.place = _versions.spectrum(node)
        eps, tiny = torch.finfo(values.dtype).eps, torch.finfo(values.dtype).tiny
        self.name, size = type(node).__name__, values.abs().amax(-1, True).clamp(tiny)
        # to itself, to the next
        gaps = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs().sort(-1).values
        self.gaps = (
            gaps[..., 1] / size if values.shape[-1] > 1 else torch.full_like(size, torch.inf)
        )
        self.least = self.gaps.minimum(values / size) if divides else self.gaps
        self.wide = eps ** (0.75 / (order - 1))
        self.tight = eps ** (0.75 / (order - 2)) if order > 2 else -1.0
        self.handles: list[Any] = []

    def used(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether digits are lost of what has these gradients; where they cannot be seen, too."""
        given, *vectors = (
            gradients[self.place],
            *gradients[: self.place],
            *gradients[self.place + 1 :],
        )
        if _versions.levels_entered() or any(part is not None for part in vectors):
            return True
        if given is None or self.name == "LinalgEigBackward0":
            return True
        used = (self.least <= self.tight) | ((self.gaps <= self.wide) & (given != 0))
        return bool(used.any())

    def warn(self, gradients: Sequence[Tensor | None]) -> None:
        """Warn, once, where digits are lost."""
        while self.handles:
            self.handles.pop().remove()
        if not self.used(gradients):
            return
        warnings.warn(
            f"f depends on {_versions.SPECTRA[self.name]} that are equal or nearly equal (or near "
            f"0, if the matrix is not square): PyTorch divides by their differences, so a second "
            f"or higher derivative has few correct digits, or none. If f is smooth there, as a "
            f"symmetric function of all of them is, write it with products, det, inv or matrix_exp "
            f"of the matrix ((x * x).sum() for the sum of the squared singular values), or choose "
            f"another point.",
            HodiffWarning,
            stacklevel=outside(),
        )


def watch_spectrum(order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> None:
    """Look at the next pass through decompositions whose values are close."""
    # In a block that runs again, inside of another: passes read what it saved, no look.
    unseen = [*filter(_versions.is_packed, nodes)] if _versions.hooks_on(True) else []
    if unseen:
        warnings.warn(
            f"f depends on {_versions.SPECTRA[type(unseen[0]).__name__]}, and a checkpoint inside "
            "another one hides whether some are equal or nearly equal: then a second or higher "
            "derivative has few correct digits, or none.",
            HodiffWarning,
            stacklevel=outside(),
        )
        return
    for node in [node for node in nodes if _versions.spectrum(node)[0].numel()]:
        spectrum = Spectrum(node, order)
        if bool((spectrum.least <= spectrum.wide).any()) and _nodes.reaches([node], leaves):
            spectrum.handles += [node.register_prehook(spectrum.warn)]


class _Said(threading.local):
    times = 0  # that this thread was told that a derivative has no value


said = _Said()


def warn_of_non_finite(kinds: Iterable[type]) -> None:
    """Say that a derivative has no value here, and which operations are known for that."""
    said.times += 1
    known = sorted(
        {words for kind in kinds for piece, words in _KINKS.items() if piece in kind.__name__}
    )
    warnings.warn(
        "the result is not finite, although x and f(x) are: the derivative does not exist there, "
        "or PyTorch's formula for it overflows or divides 0 by 0. "
        + (f"Operations in f with such points: {', '.join(known)}. " if known else "")
        + "Write f so that it is smooth there ((x.square().sum() + eps).sqrt() for a norm, "
        "torch.where with a safe argument), or choose another point.",
        HodiffWarning,
        stacklevel=outside(),
    )


_KINKS = {
    "VectorNorm": "norm at 0",
    "NormBackward": "norm at 0",
    "Sqrt": "sqrt at 0",
    "Rsqrt": "rsqrt at 0",
    "Pow": "a power of 0",
    "Abs": "abs at 0",
    "Log": "log at 0",
    "Acos": "acos at 1",
    "Asin": "asin at 1",
    "Atanh": "atanh at 1",
    "Acosh": "acosh at 1",
    "Atan2": "atan2 at the origin",
    "Div": "division by 0",
    "Reciprocal": "division by 0",
    "Xlogy": "xlogy at 0",
    "Cdist": "cdist at 0",
    "Pdist": "pdist at 0",
    "Logaddexp": "logaddexp of -inf",
    "CosineSimilarity": "cosine_similarity at 0",
    "Eigh": "equal eigenvalues",
    "Svd": "equal singular values",
    "Logcumsumexp": "logcumsumexp",
    "Std": "std of equal entries",
    "Prod": "prod with zeros",
}


# --- zeros that are no answer: second derivatives by the inputs of a network of straight pieces ---


_WEIGHTS = re.compile(r"linear|(add)?m[mv]|(badd)?bmm|matmul|einsum|conv.*")

_CURVED = re.compile(
    r"tanh|(log)?sigmoid|exp.*|log.*|sin|cos|pow|(log)?softmax|softplus|[gs]?elu|silu|mish|"
    r"sqrt|erf|atan"
)


def _bend(names: Iterable[str]) -> str:
    """The first operation, in their order, by which a network is made of straight pieces; empty
    where it is not.

    Weights follow it: that of a loss (hinge, L1) stands behind them, and its zeros are right.
    """
    plain = [plain_name(name) for name in names]
    last = max((at for at, name in enumerate(plain) if _WEIGHTS.fullmatch(name)), default=0)
    curved = any(map(_CURVED.fullmatch, plain))
    bends = [name for at, name in enumerate(plain) if name in SMOOTH and at < last and not curved]
    return next((name for name in plain if name in STEPS), (bends or [""])[0])


_looked: set[tuple[str, int]] = set()
"""The lines of the user's whose zeros were looked at: once, for that reads the device."""


def warn_of_zeros(
    names: Callable[[], Iterable[str]], second: Iterable[Any], vectors: Iterable[Any] | None
) -> None:
    """Say, once for each line, that all second derivatives are 0,
    as of any network of straight pieces.
    """
    if _call.nested() or _call.is_followed():
        return
    level = outside()
    frame = sys._getframe(level - 1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place in _looked or not (bend := _bend(names())):
        return
    _looked.add(place)
    if _all_zero(second) and (vectors is None or not _all_zero(vectors)):
        warnings.warn(
            f"all second derivatives here are exactly 0, because {bend} has none: "
            "f is made of straight pieces. "
            "For a network that is to have second derivatives by its inputs, "
            f"use {SMOOTH[bend]} instead. "
            "(This warning appears once for each place that calls.)",
            HodiffWarning,
            stacklevel=level,
        )


def _all_zero(tensors: Iterable[Any]) -> bool:
    """Whether plain tensors are; None is."""
    with _versions.without_modes():
        return all(x is None or (type(x) is Tensor and not bool(x.detach().any())) for x in tensors)
