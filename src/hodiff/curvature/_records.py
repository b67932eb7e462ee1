"""What estimators return: small frozen records, printed in a line, a table or a picture."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from hodiff._core import _tree
from hodiff._core._vectors import standard_error
from hodiff.errors import HodiffError, InputError

# --- how records look: a line in a console, a table in a notebook, a sentence, a picture ------------------------------


class Shown(ABC):
    """A record that shows what a reader asks first: the value, how good it is, what it took."""

    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """What is shown, by the heading that it has in a table; short."""

    @property
    @abstractmethod
    def message(self) -> str:
        """How it went, in a sentence."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts().values())})"

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """NumPy would make an array without dimensions that holds the record, and fail later and elsewhere."""
        raise TypeError(f"a {type(self).__name__} is no array but a record of .{', .'.join(vars(self))}.")

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align: left">{html.escape(name)}</th>'
            f'<td style="text-align: left">{html.escape(text)}</td></tr>'
            for name, text in self._facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def number(value: Any) -> str:
    """A number with four digits."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.4g}"


def numbers(values: Tensor) -> str:
    """The first three of several, and that there are more."""
    shown = [number(value) for value in values[:3]]
    return ", ".join([*shown, f"... ({len(values)})"] if len(values) > 3 else shown)


def measured(value: Tensor, error: Tensor | None) -> str:
    """A value and its standard error."""
    return number(value) if error is None else f"{number(value)} ± {number(error)}"


def shape(value: Any) -> str:
    """The shape of a tensor, or how many numbers a container holds."""
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return f"{sum(leaf.numel() for leaf in leaves)} numbers in {len(leaves)} tensors" if leaves else "vector"


def flat(value: Any) -> Tensor:
    """All numbers of a tensor or a container, in one row."""
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves])


def after(products: int) -> str:
    """A number of products, in words."""
    return f"{products} product{'' if products == 1 else 's'}"


def outcome(converged: bool | None) -> str:
    """Whether it converged, where that was asked."""
    return {True: "converged", False: "not converged", None: "no tolerance asked"}[converged]


# --- records ----------------------------------------------------------------------------------------------------------


V = TypeVar("V")
Status = Literal["converged", "negative curvature", "budget", "stagnation", "iterations", "running"]
End = Literal["interior", "boundary", "negative curvature", "budget"]


@dataclass(frozen=True, repr=False)
class TraceRecord(Shown):
    """An estimated trace, or log-determinant.

    Attributes:
        value: The estimate, a tensor without dimensions.
        stderr: Its standard error (zero where the value is exact); None where a single vector says nothing about it.
        converged: Whether the tolerance was reached; None where none was asked for.
        products: How many products it took.
        blocks: Of a trace, the records of the diagonal blocks asked for, by pattern.
    """

    value: Tensor
    stderr: Tensor | None
    converged: bool | None
    products: int
    blocks: Mapping[str, TraceRecord] = field(default_factory=dict[str, "TraceRecord"])

    def _facts(self) -> dict[str, str]:
        return {
            "value": measured(self.value, self.stderr),
            "products": after(self.products),
            "outcome": outcome(self.converged),
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        if self.stderr is None or not bool(self.stderr):
            return _without_error(self.stderr, self.products)
        relative = number(self.stderr / self.value.abs())
        return f"The standard error is {relative} of the value after {_asked(self.products, self.converged)}."


@dataclass(frozen=True, repr=False)
class DiagonalRecord(Shown):
    """A diagonal, estimated or exact.

    Attributes:
        value: The diagonal, like the point.
        stderr: The standard error of each entry, likewise (zero where exact); None where a single vector says
            nothing about it.
        converged: Whether the tolerance was reached; None where none was asked for.
        products: How many products it took.
    """

    value: Any
    stderr: Any
    converged: bool | None
    products: int

    def _facts(self) -> dict[str, str]:
        errors = None if self.stderr is None else flat(self.stderr)
        return {
            "value": shape(self.value),
            "error": "no error known" if errors is None else f"± {number(errors.max())} at most",
            "products": after(self.products),
            "outcome": outcome(self.converged),
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        errors = None if self.stderr is None else flat(self.stderr)
        if errors is None or not bool(errors.any()):
            return _without_error(errors, self.products)
        relative = number(errors.norm() / flat(self.value).norm())
        return f"The standard errors are {relative} of the diagonal after {_asked(self.products, self.converged)}."


@dataclass(frozen=True, repr=False)
class EigenRecord(Shown):
    """Some eigenpairs.

    Attributes:
        value: The eigenvalues, `(k,)`: the one asked for first comes first. Complex from `eigs`.
        vectors: The eigenvectors as columns, `(D, k)`, of length 1, and orthogonal where the operator is symmetric;
            `A.unflatten(vectors)` shapes real ones.
        residual: |A x - λ x| of each pair, `(k,)`, computed from products (in what a callback is given, estimated).
        converged: Whether every residual is within the tolerance; None while it runs.
        products: How many products it took.
    """

    value: Tensor
    vectors: Tensor
    residual: Tensor
    converged: bool | None
    products: int

    def _facts(self) -> dict[str, str]:
        return {
            "value": numbers(self.value),
            "residual": f"residual {number(self.residual.max())}",
            "products": after(self.products),
            "outcome": _running(self.converged),
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        text = f"{len(self.value)} eigenvalue{'s' if len(self.value) != 1 else ''}, {after(self.products)}"
        return f"{text}: the largest residual is {number(self.residual.max())}, {_running(self.converged)}."

    def plot(self, axes: Any = None) -> Any:
        """Draw the eigenvalues with their residuals (complex ones in the plane); returns matplotlib's axes."""
        return eigenvalues(axes, self.value, self.residual)


@dataclass(frozen=True, repr=False)
class RadiusRecord(Shown):
    """A spectral radius.

    Attributes:
        value: The largest magnitude of an eigenvalue, a tensor without dimensions.
        residual: |A x - λ x| of that eigenpair, likewise.
        converged: Whether the residual is within the tolerance; None while it runs.
        products: How many products it took.
    """

    value: Tensor
    residual: Tensor
    converged: bool | None
    products: int

    def _facts(self) -> dict[str, str]:
        return {
            "value": number(self.value),
            "residual": f"residual {number(self.residual)}",
            "products": after(self.products),
            "outcome": _running(self.converged),
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        return f"The residual is {number(self.residual)} after {after(self.products)}, {_running(self.converged)}."


@dataclass(frozen=True, repr=False)
class DensityRecord(Shown):
    """A spectral density: Gauss rules of random vectors, and what they give on a grid.

    Attributes:
        value: The density on the grid, `(points,)`; it integrates to 1.
        stderr: Its standard error over random vectors, likewise (zero where exact); None for a single vector.
        grid: Where it was taken.
        nodes: The rules' nodes, `(samples, steps)`; the eigenvalues, `(1, D)`, where exact.
        weights: Their weights: the part of all eigenvalues that each stands for.
        width: The width of the Gaussian that each node is drawn as.
        exact: Whether the nodes are the eigenvalues.
        products: How many products it took.
    """

    value: Tensor
    stderr: Tensor | None
    grid: Tensor
    nodes: Tensor
    weights: Tensor
    width: float
    exact: bool
    products: int

    def mean(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None]:
        """The mean of an elementwise function over all eigenvalues, and its standard error."""
        means = (torch.where(self.weights > 0, f(self.nodes), 0.0) * self.weights).sum(1)
        return means.mean(), _error(means, self.exact)

    def at(self, grid: Tensor, width: float) -> tuple[Tensor, Tensor | None]:
        """The density on another grid `(G,)`, with another width, and its standard error."""
        heights = torch.stack([
            torch.exp(-0.5 * ((grid[:, None] - theta) / width) ** 2) @ tau
            for theta, tau in zip(self.nodes.to(grid), self.weights.to(grid), strict=True)
        ]) / math.sqrt(2 * math.pi)  # fmt: skip
        error = _error(heights, self.exact)  # squares of densities may have no place in their dtype
        return heights.mean(0) / width, None if error is None else error / width

    def _facts(self) -> dict[str, str]:
        rows, columns = self.nodes.shape
        kind = f"{columns} eigenvalues" if self.exact else f"{rows}x{columns} nodes"
        return {
            "nodes": f"{kind} in [{number(self.nodes.min())}, {number(self.nodes.max())}]",
            "width": f"width {number(self.width)}",
            "products": after(self.products),
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        if self.exact:
            return f"Exact: all {self.nodes.numel()} eigenvalues, by {after(self.products)}."
        if self.stderr is None:
            return _without_error(None, self.products)
        worst = number(self.stderr.max() / self.value.max())
        return f"The standard error is at most {worst} of the peak, after {after(self.products)}."

    def plot(self, axes: Any = None) -> Any:
        """Draw the density, and a band of two standard errors; returns matplotlib's axes."""
        return density(axes, self.grid, self.value, None if self.exact else self.stderr)


def _error(values: Tensor, exact: bool) -> Tensor | None:
    return torch.zeros_like(values[0]) if exact else standard_error(values)


@dataclass(frozen=True, repr=False)
class SolveRecord(Shown, Generic[V]):
    """The solution of a linear system.

    Attributes:
        value: The solution, in the spelling of the right-hand side.
        residual: |b - A x| / |b|, computed from a product at the end; where a number of iterations was asked for,
            and in what a callback is given, by the method's own recurrence.
        converged: Whether that is within the tolerance; None where none was asked for.
        products: How many products it took.
        status: `"converged"`, `"negative curvature"` (CG met d with d'A d <= 0), `"budget"` (the products
            ran out), `"stagnation"` (rounding, or a singular system, allows no better), `"iterations"` (as many
            as were asked for) or, for a callback, `"running"`.
        direction: The d of negative curvature, where CG met one; else None.
    """

    value: V
    residual: float
    converged: bool | None
    products: int
    status: Status
    direction: V | None = None

    def _facts(self) -> dict[str, str]:
        return {
            "value": shape(self.value),
            "residual": f"residual {number(self.residual)}",
            "products": after(self.products),
            "outcome": self.status,
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        why = {
            "converged": "within the tolerance",
            "negative curvature": "where negative curvature was met: the operator is not positive definite",
            "budget": "where the products ran out",
            "stagnation": "and no longer falls: the system is singular, or rounding allows no better",
            "iterations": "after as many steps as were asked for",
            "running": "and it goes on",
        }[self.status]
        return f"After {after(self.products)} the relative residual is {number(self.residual)}, {why}."


@dataclass(frozen=True, repr=False)
class NewtonRecord(Shown):
    """What one step of `NewtonCG` did.

    Attributes:
        value: The loss before.
        decrease: By how much it fell; 0 where the step was refused.
        ratio: What came true of the decrease that the model promised; -inf where the loss was not finite there.
        accepted: Whether the step was taken; if not, the parameters are as they were.
        radius: The radius of the next step.
        products: How many products it took.
        end: `"interior"` (a Newton step), `"boundary"` (the radius bound it), `"negative curvature"` or
            `"budget"` (the products ran out).
    """

    value: float
    decrease: float
    ratio: float
    accepted: bool
    radius: float
    products: int
    end: End

    def _facts(self) -> dict[str, str]:
        return {
            "value": f"loss {number(self.value)}",
            "decrease": f"- {number(self.decrease)}" if self.accepted else "undone",
            "ratio": f"ratio {number(self.ratio)}",
            "radius": f"radius {number(self.radius)}",
            "products": after(self.products),
            "end": self.end,
        }

    @property
    def message(self) -> str:
        """How it went, in a sentence."""
        if not self.accepted:
            return f"The loss did not fall enough: the step was undone; the radius is {number(self.radius)} now."
        how = {
            "interior": "a Newton step",
            "boundary": "a step to the radius",
            "negative curvature": "a step along negative curvature",
            "budget": "a step that ran out of products",
        }[self.end]
        return f"The loss fell by {number(self.decrease)}, {number(self.ratio)} of what was promised, by {how}."


def _without_error(error: Tensor | None, products: int) -> str:
    """What is said of an estimate of one vector (whose error is unknown), or of all."""
    if error is None:
        return f"One vector, {after(products)}: nothing can be said about the error."
    return f"Exact, by {after(products)}."


def _asked(products: int, converged: bool | None) -> str:
    wanted = {True: "; the tolerance is met", False: "; the tolerance is not met: allow more samples", None: ""}
    return after(products) + wanted[converged]


def _running(converged: bool | None) -> str:
    return {True: "converged", False: "not converged", None: "running"}[converged]


# --- pictures, from plain numbers; matplotlib is imported when something is drawn -------------------------------------
# Colours are those of the style in force, so that a picture is light or dark as the page around it.


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
