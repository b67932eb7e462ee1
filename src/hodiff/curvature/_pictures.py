"""What records draw, from plain numbers; matplotlib is imported when something is drawn.

Colours are those of the style in force, so that a picture is light or dark as the page around it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from hodiff.errors import HodiffError, InputError


class MissingMatplotlib(HodiffError, ImportError):
    """Matplotlib is needed, and is not there."""


def axes_or_new(axes: Any) -> Any:
    """The axes given, or those of a new figure."""
    if axes is not None:
        if not hasattr(axes, "set_xlabel"):
            raise InputError(f"axes: is a {type(axes).__name__}, expected axes of Matplotlib, or None for new ones.")
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingMatplotlib("pictures need matplotlib: pip install 'hodiff[plot]'.") from error
    return plt.subplots()[1]


def with_band(
    axes: Any, x: Any, value: Tensor, error: Tensor | None, label: str | None, least: float = -math.inf
) -> None:
    """A line, and a band of two standard errors about it, neither below `least`."""
    (line,) = axes.plot(x, value.clamp(min=least), label=label)
    if error is not None:
        low, high = (value - 2 * error).clamp(min=least), (value + 2 * error).clamp(min=least)
        axes.fill_between(x, low, high, alpha=0.3, color=line.get_color(), linewidth=0)


def density(axes: Any, grid: Tensor, value: Tensor, error: Tensor | None) -> Any:
    """A density on a logarithmic scale, with six decades of it."""
    axes = axes_or_new(axes)
    grid, value = grid.cpu(), value.cpu()
    peak = float(value.max())
    with_band(axes, grid, value, None if error is None else error.cpu(), None, 1e-6 * peak)
    axes.set_yscale("log")
    axes.set_ylim(1e-6 * peak, 2 * peak)
    axes.set_xlabel("eigenvalue")
    axes.set_ylabel("density" if error is None else "density ± 2 standard errors")
    return axes


def eigenvalues(axes: Any, value: Tensor, residual: Tensor) -> Any:
    """Real ones in their order with an error bar; complex ones in the plane."""
    axes = axes_or_new(axes)
    value = value.cpu()
    if value.is_complex():
        axes.plot(value.real, value.imag, "o")
        axes.set_xlabel("real part")
        axes.set_ylabel("imaginary part")
        return axes
    axes.errorbar(range(1, len(value) + 1), value, yerr=residual.cpu(), fmt="o", capsize=3)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("number")
    axes.set_ylabel("eigenvalue ± residual")
    return axes


def sizes(axes: Any, named: dict[str, int]) -> Any:
    """Bytes as bars, on a logarithmic scale."""
    axes = axes_or_new(axes)
    axes.barh(list(named), [size / 2**20 for size in named.values()])
    axes.set_xscale("log")
    axes.set_xlabel("MiB")
    return axes
