"""The results of estimators: small frozen records, printed in a line, a table or a picture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from hodiff._core import _tree
from hodiff._core._arguments import kind, plural
from hodiff._core._messages import table
from hodiff._core._records import NoNumber
from hodiff._core._vectors import standard_error
from hodiff.errors import HodiffError, InputError

# --- how records look: a line in a console, a table in a notebook, a sentence, a picture ----------


class Described(ABC):
    """Something that is shown by some facts."""

    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """The facts to show, by their headings in a table; short."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(filter(None, self._facts().values()))})"

    def _repr_html_(self) -> str:
        return table(
            [(at, _bare(text, at)) for at, text in self._facts().items()], type(self).__name__
        )


class Shown(Described, NoNumber):
    """A record that shows what a reader asks first: the value, how good it is, what it took."""


def _bare(text: str, heading: str) -> str:
    """The text of a fact, without the heading that stands before it."""
    return (
        text.removeprefix(f"{heading} ")
        .removesuffix(f" {heading}")
        .removesuffix(f" {heading.removesuffix('s')}")
    )


def number(value: Any) -> str:
    """A number with four digits."""
    return f"{value.item() if isinstance(value, Tensor) else value:.4g}"


def numbers(values: Tensor) -> str:
    """The first three of several, and that there are more."""
    shown = [number(value) for value in values[:3]]
    return ", ".join([*shown, f"... ({len(values)})"] if len(values) > 3 else shown)


def largest(values: float | Tensor) -> float:
    """The largest of some numbers, if there are any."""
    values = torch.as_tensor(values, device="cpu")
    return float(values.max()) if values.numel() else 0.0


def shape(value: Any) -> str:
    """The shape of a tensor, or how many numbers a container holds."""
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return (
        f"{sum(leaf.numel() for leaf in leaves)} numbers in {len(leaves)} tensors"
        if leaves
        else "vector"
    )


def flat(value: Any) -> Tensor:
    """All numbers of a tensor or a container, in one row."""
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves])


# --- records --------------------------------------------------------------------------------------


V = TypeVar("V")
Route = Literal["rows", "columns", "vectors"]
"""How a diagonal was found: by rows M of M'M, by a product for each column, by random vectors."""
Status = Literal[
    "converged", "negative curvature", "budget", "stagnation", "divergence", "iterations", "running"
]


def _outcome(converged: bool | Tensor | None, unasked: str) -> str:
    """Whether a tolerance is met, everywhere, in words."""
    if converged is None:
        return unasked
    return "converged" if bool(torch.as_tensor(converged, device="cpu").all()) else "not converged"


@dataclass(frozen=True, repr=False, eq=False)
class _Estimate(Shown):
    """The common part of records of random estimates, with their standard errors."""

    value: Any
    stderr: Any
    converged: bool | Tensor | None
    products: int

    def _facts(self) -> dict[str, str]:
        error = "" if self.stderr is None else f" ± {numbers(self.stderr.reshape(-1))}"
        return {"value": numbers(self.value.reshape(-1)) + error, **self._taken()}

    def _taken(self) -> dict[str, str]:
        return {
            "products": plural(self.products, "product"),
            "outcome": _outcome(self.converged, "no tolerance asked"),
        }


@dataclass(frozen=True, repr=False, eq=False)
class TraceRecord(_Estimate):
    """An estimated trace, or log-determinant; of a stack of matrices, tensors of the batch's shape.

    Attributes:
        value: The estimate, a tensor without dimensions.
        stderr: Its standard error (zero where the value is exact); None where a single vector says
            nothing about it.
        converged: Whether the tolerance was reached; None where none was asked for.
        products: How many products it took.
        blocks: Of a trace, the records of the diagonal blocks asked for, by pattern.
    """

    value: Tensor
    stderr: Tensor | None
    blocks: Mapping[str, TraceRecord] = field(default_factory=dict[str, "TraceRecord"])


@dataclass(frozen=True, repr=False, eq=False)
class DiagonalRecord(_Estimate):
    """A diagonal, estimated or exact.

    Attributes:
        value: The diagonal, like the point.
        stderr: The standard error of each entry, likewise (zero where exact); None where a single
            vector says nothing about it.
        converged: Whether the tolerance was reached; None where none was asked for.
        products: How many products it took; by rows, how many passes for each batch, beside the
            one that proves them.
        route: `"rows"`, exact by the rows of M, of a matrix M'M; `"columns"`, exact by a product
            for each; `"vectors"`, estimated from random ones.
    """

    route: Route = "vectors"

    def _facts(self) -> dict[str, str]:
        error = "no error known"
        if self.stderr is not None and flat(self.stderr).numel():
            error = f"± {number(flat(self.stderr).max())} at most"
        return {
            "value": shape(self.value), "error": error, "by": f"by {self.route}", **self._taken()
        }  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class EigenRecord(Shown):
    """Some eigenpairs.

    Attributes:
        value: The eigenvalues, `(k,)`: the one asked for first comes first.
        vectors: The eigenvectors as orthonormal columns, `(D, k)`; `A.unflatten(vectors)` shapes
            them. At a sharded point they are like it, stacked: DTensors `(k, ...)`.
        residual: |A x - λ x| of each pair, `(k,)`, computed from products (in what a callback is
            given, estimated).
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
            "residual": f"residual {number(largest(self.residual))}",
            "products": plural(self.products, "product"),
            "outcome": _outcome(self.converged, "running"),
        }

    def plot(self, axes: Any = None) -> Any:
        """Draw the eigenvalues with their residuals; returns matplotlib's axes."""
        axes, value = axes_or_new(axes), self.value.cpu()
        axes.errorbar(range(1, len(value) + 1), value, yerr=self.residual.cpu(), fmt="o", capsize=3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="number", ylabel="eigenvalue ± residual")
        return axes


@dataclass(frozen=True, repr=False, eq=False)
class DensityRecord(Shown):
    """A spectral density: Gauss rules of random vectors, and what they give on a grid.

    Attributes:
        value: The density on the grid, `(points,)`; it integrates to 1.
        stderr: Its standard error over random vectors, likewise (zero where exact); None for a
            single vector.
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
            "products": plural(self.products, "product"),
        }

    def plot(self, axes: Any = None) -> Any:
        """Draw the density, and a band of two standard errors; returns matplotlib's axes."""
        axes, value = axes_or_new(axes), self.value.cpu()
        error = None if self.exact or self.stderr is None else self.stderr.cpu()
        least = 1e-6 * float(value.max())  # six decades
        with_band(axes, self.grid.cpu(), value, error, None, least)
        label = "density" if error is None else "density ± 2 standard errors"
        axes.set(yscale="log", ylim=(least, 2e6 * least), xlabel="eigenvalue", ylabel=label)
        return axes


def _error(values: Tensor, exact: bool) -> Tensor | None:
    return torch.zeros_like(values[0]) if exact else standard_error(values)


@dataclass(frozen=True, repr=False, eq=False)
class SolveRecord(Shown, Generic[V]):
    """The solution of a linear system, or of several.

    Attributes:
        value: The solution, in the spelling of the right-hand side.
        residual: |b - A x| / |b|, computed from a product at the end; where a number of iterations
            was asked for, and in what a callback is given, by the method's own recurrence. Of
            several, a tensor with one for each.
        converged: Whether that is within the tolerance, likewise; None where none was asked for.
        products: How many products it took.
        status: `"converged"`, `"negative curvature"` (CG met d with d'A d <= 0), `"budget"` (the
            products ran out), `"stagnation"` (rounding, or a singular system, allows no better),
            `"divergence"` (the terms of a Neumann series grew), `"iterations"` (as many as were
            asked for) or, for a callback, `"running"`. Of several, the worst.
        direction: The d of negative curvature, where CG met one (of several, zero where it has
            not); else None.
    """

    value: V
    residual: float | Tensor
    converged: bool | Tensor | None
    products: int
    status: Status
    direction: V | None = None

    def _facts(self) -> dict[str, str]:
        return {
            "value": shape(self.value),
            "residual": f"residual {number(largest(self.residual))}",
            "products": plural(self.products, "product"),
            "outcome": self.status,
        }


@dataclass(frozen=True, repr=False, eq=False)
class LeastSquaresRecord(Shown):
    """The outcome of one step of `LevenbergMarquardt`.

    Attributes:
        value: The loss before, half the sum of the squares.
        decrease: By how much it fell; 0 where the step was refused.
        ratio: What came true of the decrease that the linear model promised for a step of that
            length.
        damping: That of the step, in the unit of the optimizer's `damping`; 1e-30 and less is none.
        length: The part of the full step that was taken.
        accepted: Whether the step was taken; if not, the parameters are as they were.
        converged: Whether rounding allows no better: the step was refused for that.
        gradient: The largest cosine between the residuals and a column of the Jacobian: 0 at a
            minimum.
        residual: The relative residual of the damped equations, as they were solved.
        evaluations: How often the residuals were evaluated at other parameters.
        space: In which the equations were solved, `"samples"` or `"parameters"`.
    """

    value: float
    decrease: float
    ratio: float
    damping: float
    length: float
    accepted: bool
    converged: bool
    gradient: float
    residual: float
    evaluations: int
    space: Literal["samples", "parameters"]
    _fit: list[Tensor] = field(default_factory=list[Tensor])
    """The Jacobian, where it is held, until the next step."""

    def covariance(self, *, absolute_sigma: bool = False) -> Tensor:
        r"""The covariance of the fitted parameters, \(s^2 (J^\top J)^{-1}\).

        With \(s^2 = r^\top r / (N - D)\), that of the least-squares estimate, where the residuals'
        errors are independent, of one variance, and small enough for the linear model. \(J\) is
        that
        of N residuals by D parameters where the step began: once `converged`, at the solution.

        Args:
            absolute_sigma: Whether the residuals are in units of their known standard deviations,
                so that \(s^2\) is 1; as in SciPy's `curve_fit`.

        Returns:
            `(D, D)`, in float64; the parameters in the order of *where*, each flattened.

        Raises:
            InputError: There are no more residuals than parameters, or they do not determine all;
                a later step was taken, or \(J\) was summed within `memory_budget`.

        Examples:
            Of a mean of four numbers it is their variance by four:

            >>> import torch, hodiff
            >>> y = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
            >>> mean = torch.zeros(1, dtype=torch.float64)
            >>> optimizer = hodiff.LevenbergMarquardt(lambda mean: mean - y, mean)
            >>> while not (optimizer.last and optimizer.last.converged):
            ...     loss = optimizer.step()
            >>> optimizer.last.covariance(), y.var() / 4
            (tensor([[1.1667]], dtype=torch.float64), tensor(1.1667, dtype=torch.float64))

        Reference:
            Seber, G. A. F., Wild, C. J. (1989). Nonlinear Regression. doi:10.1002/0471725315,
            section 2.1.
        """
        _, root = self._root()
        rows, columns = self._fit[0].shape
        return root @ root.T * (1.0 if absolute_sigma else 2 * self.value / (rows - columns))

    def standard_errors(self, *, absolute_sigma: bool = False) -> Tensor:
        """The roots of the diagonal of `covariance`, `(D,)`."""
        return self.covariance(absolute_sigma=absolute_sigma).diagonal().sqrt()

    def leverages(self) -> Tensor:
        r"""The leverage of each residual, the share in which it determines its own fit, \((J
        (J^\top J)^{-1} J^\top)_{ii}\), `(N,)`.

        From 0 to 1, with the sum D. Raises as `covariance`.
        """
        return self._root()[0].square().sum(1)

    def _root(self) -> tuple[Tensor, Tensor]:
        """An orthonormal basis of the columns of J, and a root of (J'J)^-1."""
        if not self._fit:
            raise InputError(
                "covariance: the Jacobian is at hand in the last step's record alone, with more "
                "residuals than parameters, and where memory_budget has room for it."
            )
        [J] = self._fit
        norms = torch.linalg.vector_norm(J, dim=0)
        Q, R = torch.linalg.qr(J / norms)
        least = R.diagonal().abs().min()
        if not least > len(J) * torch.finfo(J.dtype).eps:
            raise InputError(
                "covariance: the residuals do not determine all parameters: J'J is singular. Fix "
                "one that another makes up for (requires_grad_(False)), or give it a residual."
            )
        unit = torch.eye(len(R), dtype=R.dtype, device=R.device)
        return Q, torch.linalg.solve_triangular(R, unit, upper=True) / norms.unsqueeze(1)

    def _facts(self) -> dict[str, str]:
        refused = "converged" if self.converged else "undone"
        return {
            "value": f"loss {number(self.value)}",
            "decrease": f"fell by {number(self.decrease)}" if self.accepted else refused,
            "damping": f"damping {number(self.damping)}",
            "length": f"length {number(self.length)}",
            "evaluations": plural(self.evaluations, "evaluation"),
        }


# --- pictures, from plain numbers; matplotlib is imported when something is drawn -----------------
# Colors are those of the style in force, so that a picture is light or dark as the page around it.


class MissingMatplotlib(HodiffError, ImportError):
    """Matplotlib is needed, and is not there."""


def axes_or_new(axes: Any) -> Any:
    """The axes given, or those of a new figure."""
    if axes is not None:
        if not hasattr(axes, "set_xlabel"):
            raise InputError(
                f"axes: got {kind(axes)}, expected Matplotlib axes, or None for new ones."
            )
        return axes
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingMatplotlib("pictures need matplotlib: pip install matplotlib.") from error
    return plt.subplots()[1]


def with_band(
    axes: Any,
    x: Any,
    value: Tensor,
    error: Tensor | None,
    label: str | None,
    least: float = -math.inf,
) -> None:
    """A line, and a band of two standard errors about it, neither below `least`."""
    (line,) = axes.plot(x, value.clamp(min=least), label=label)
    if error is not None:
        low, high = (value - 2 * error).clamp(min=least), (value + 2 * error).clamp(min=least)
        axes.fill_between(x, low, high, alpha=0.3, color=line.get_color(), linewidth=0)
