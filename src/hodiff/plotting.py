"""Pictures of what takes several records; a single one draws itself: `record.plot()`.

Needs matplotlib (`pip install matplotlib`). Colors are those of the style in force, so that a
picture is light or dark as the page around it (`matplotlib.style.use("dark_background")`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hodiff.curvature._records import (
    EigenRecord,
    SolveRecord,
    TraceRecord,
    axes_or_new,
    kind,
    with_band,
)
from hodiff.errors import InputError

__all__ = ["convergence"]


def convergence(records: Sequence[Any], *, axes: Any = None, label: str | None = None) -> Any:
    """Draw how an estimate or a solution converged, over the products that it took.

    Residuals (of `hodiff.solve`, `hodiff.eigsh`) are drawn on a logarithmic scale; a trace's or a
    log-determinant's running mean with a band of two standard errors.

    Args:
        records: The records in order: `seen = []`, then `callback=seen.append`.
        axes: The axes to draw into; None: new ones. Several runs can share them.
        label: The label in the legend.

    Returns:
        The axes.

    Raises:
        InputError: There are no records, or records of a kind that does not converge.

    Examples:
        >>> import torch, hodiff, hodiff.plotting
        >>> seen = []
        >>> found = hodiff.solve(
        ...     hodiff.MatrixOperator(torch.arange(1.0, 50.0)), torch.ones(49), callback=seen.append
        ... )
        >>> hodiff.plotting.convergence(seen).get_ylabel()
        'residual'
    """
    if not isinstance(records, Sequence) or not records:
        raise InputError(
            "records: expected a list of the records that a callback collected: seen = []; "
            "hodiff.solve(A, b, callback=seen.append)."
        )
    if label is not None and not isinstance(label, str):
        raise InputError(f"label: got {kind(label)}, expected the text of the legend, or None.")
    spent = [getattr(record, "products", 0) for record in records]
    first = records[0]
    if not isinstance(first, (SolveRecord, EigenRecord, TraceRecord)):
        raise InputError(f"records: got {kind(first)}, which has no convergence history.")
    axes = axes_or_new(axes)
    if isinstance(first, TraceRecord):
        values = torch.stack([record.value for record in records]).double().cpu()
        errors = None
        if all(record.stderr is not None for record in records):
            errors = torch.stack([record.stderr for record in records]).double().cpu()
        with_band(axes, spent, values, errors, label)
        axes.set_ylabel("estimate" if errors is None else "estimate ± 2 standard errors")
    else:
        axes.semilogy(
            spent,
            [float(torch.as_tensor(record.residual).max()) for record in records],
            label=label,
        )
        axes.set_ylabel("residual")
    axes.set_xlabel("products")
    if label is not None:
        axes.legend()
    return axes
