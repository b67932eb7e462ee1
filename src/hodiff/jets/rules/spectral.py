"""Fourier transforms, and the little of complex arithmetic that stands between one and its inverse.

The variable is real, so the coefficients of a complex value are complex, and the rules of sums, products and shapes
hold for them as they are. What is no holomorphic function of a complex value (its absolute value) is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from hodiff.jets import _jet
from hodiff.jets._jet import series_of
from hodiff.jets._registry import NoRule, listed, operation, rule
from hodiff.jets._series import Expansion, full, linear_combination
from hodiff.jets.rules.batched import generic
from hodiff.jets.rules.linear import each

rule(
    "linear",
    *listed(
        "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn "
        "fft_irfftn fft_hfft fft_ihfft fft_hfft2 fft_ihfft2 fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift"
    ),
)(generic)


@rule("linear", "real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg")
def part(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation, coefficient by coefficient: linear over the real numbers."""
    name, x = operation(func), series_of(args[0] if args else kwargs["input"], expansion)
    if not x[0].is_complex():
        if name == "imag":
            raise NoRule("imag", "the tensor is real")
        return x
    return each(x, getattr(torch, name))


@rule("linear", "view_as_real", "view_as_complex")
def viewed(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Complex numbers as pairs, and pairs as complex numbers."""
    x, name = series_of(args[0] if args else kwargs["input"], expansion), operation(func)
    if _jet.is_jet(x[0]):
        raise NoRule(name, "inside nested expansions")
    view = getattr(torch, name)
    return [view(x[0]), *(None if c is None else view(full(c, x[0].shape).contiguous()) for c in x[1:])]


@rule("linear", "complex")
def combined(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A + i b."""
    a, b = (series_of(value, expansion) for value in (*args, *kwargs.values()))
    return linear_combination([(1, a), (1j, b)], expansion.order)
