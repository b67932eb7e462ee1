"""Products in the spelling of their vectors: one vector, or several, some at a time; detached, which is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _call, _settings
from hodiff._core._vectors import Leaves, Space, sum_dtype
from hodiff.curvature._staleness import one_look
from hodiff.errors import GraphError, HodiffWarning

Product = Callable[[Leaves, "int | None"], Leaves]
"""A v, for the parts of one vector (the number is None), or of so many stacked ones."""
Chunk = Callable[[int], int]
"""How many of so many vectors one product should take."""


def as_given(tensor: Tensor) -> _settings.Context:
    """Matrix products in the dtype of their factors, whatever the caller's autocast would have them rounded to."""
    return _settings.autocast(tensor.device.type)


def accumulate(total: Leaves, terms: Sequence[Tensor]) -> Leaves:
    """A running sum, which is the caller's own, in the precision of sums from the second term on."""
    return [sum_.to(sum_dtype(sum_.dtype)).add_(term) for sum_, term in zip(total, terms, strict=True)]


def apply(v: Any, operator: Any, live: str | None = None) -> Any:
    """The product with a vector, or with several, in the spelling of `v`; detached, and `live` as for `say_detached`.

    Where `live` is None, the product is a step on the way to something of which that has been said.
    """
    domain, target = operator._domain, operator._range
    kind, parts, count, tree = domain.parse(v)
    requiring = any(part.requires_grad for part in parts)
    if live is not None:
        say_detached("A @ v", live or ("v requires grad" if requiring else ""))
    if requiring:
        _call.refuse_transforms()
        parts = [part.detach() for part in parts]
    back = tree if target is domain or target.like(domain) else target.tree
    if count is None:
        products = operator._product(parts, None)
        return target.join(products, None) if kind == "flat" else target.result(products, back)
    fixed = operator._fixed()  # for all of them
    with one_look():
        if kind == "columns":
            return _apply_to_columns(parts[0], fixed._chunk(count), fixed._product, domain, target).T
        results = target.empty(count)
        for start, stop in _chunks(count, fixed._chunk(count)):
            products = _some(parts, start, stop, fixed._product)
            for result, part in zip(results, products, strict=True):
                result[start:stop] = part
        return target.result(results, back)


def _apply_to_columns(columns: Tensor, size: int, product: Product, domain: Space, target: Space) -> Tensor:
    """Products with columns `(D, K)`, as rows `(K, M)`."""
    count = columns.shape[1]
    rows = columns.new_empty((count, target.size), dtype=target.dtype)
    block = domain.turned_at_once(size)
    for first in range(0, count, block):
        some = domain.rows(columns[:, first : first + block])
        for start, stop in _chunks(min(block, count - first), size):
            target.join_into(rows[first + start : first + stop], _some(some, start, stop, product))
    return rows


def _chunks(count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _some(parts: Leaves, start: int, stop: int, product: Product) -> Leaves:
    """Products of some of the vectors. One that stands alone is not stacked."""
    if stop - start == 1:
        return [part.unsqueeze(0) for part in product([part[start] for part in parts], None)]
    return product([part[start:stop] for part in parts], stop - start)


def columns_of(product: Product, domain: Space, target: Space, chunk: Chunk) -> Tensor:
    """Products with the unit vectors, each as a row: `(D, M)`."""
    rows = torch.empty((domain.size, target.size), dtype=target.dtype, device=target.device)
    size = chunk(domain.size)
    with one_look():
        for start, stop in _chunks(domain.size, size):
            target.join_into(rows[start:stop], product(domain.split(domain.units(start, stop)), stop - start))
    return rows


WAYS = {
    "A @ v": "hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True; of a matrix, PyTorch's own product",
    "A.dense()": "hodiff.hessian(..., matrix=True) or hodiff.jacobian, with create_graph=True; of a matrix, the matrix",
    "A.to_scipy()": "none by NumPy's arrays; hodiff.hvp, hodiff.jvp or hodiff.vjp with create_graph=True",
    "A.value": "the function itself, or hodiff.value_and_grad with create_graph=True",
    "A.gradient": "hodiff.grad with create_graph=True",
    "trace": "create_graph=True, of a hodiff.HessianOperator, its blocks, sums and multiples; of a matrix, torch.trace",
    "eigsh": (
        "create_graph=True, of a hodiff.HessianOperator, its blocks, sums and multiples; of a matrix, "
        "torch.linalg.eigvalsh"
    ),
    "diagonal": "hodiff.hessian_diagonal with create_graph=True; of a matrix, torch.diagonal",
    "solve": (
        "hodiff.implicit.root(lambda x: A x - b, found.value), or hodiff.implicit.argmin(lambda x: x @ (A x) / 2 - "
        "b @ x, found.value) of a symmetric operator; of a small matrix, torch.linalg.solve"
    ),
    "logdet": "torch.logdet of hodiff.hessian(..., matrix=True, create_graph=True), or of the matrix",
    "eigs": "torch.linalg.eigvals of hodiff.jacobian(..., create_graph=True), or of the matrix",
    "spectral_radius": "torch.linalg.eigvals of hodiff.jacobian(..., create_graph=True), or of the matrix",
    "spectral_density": (
        "torch.linalg.eigvalsh of hodiff.hessian(..., matrix=True, create_graph=True), or of the matrix"
    ),
}
"""Where the derivative of a detached result is to be had."""


def say_detached(name: str, live: str) -> None:
    """Of a result that is made detached: raise inside the `f` of another hodiff call; warn where it should not be.

    The warning is given once for each line of the caller's, by Python's own rule.

    Args:
        name: The result, a key of `WAYS`.
        live: What requires grad of all that it is computed from, in words; nothing, where nothing does.
    """
    if not torch.is_grad_enabled():
        return
    if _call.inside():
        raise GraphError(
            "an operator's products are detached, so inside the function of another hodiff call they would count as "
            "constants, silently. Use hodiff.hvp(f, x, v) there, or compute the product outside; if a constant is "
            "meant, write `with torch.no_grad():` around it, or create_graph=False where there is one."
        )
    if live:
        _call.refuse_transforms()
        said = "" if "." in name or "@" in name else "create_graph=False, "
        warnings.warn(
            f"{name}: the result is detached, although {live}: it counts as a constant in what is computed from it. "
            f"For its derivative: {WAYS[name]}. If a constant is meant, say so: {said}.detach() on what requires grad, "
            f"or torch.no_grad().",
            HodiffWarning,
            stacklevel=_arguments.outside(),
        )
