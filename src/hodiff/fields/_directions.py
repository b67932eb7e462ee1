r"""Directions for second-order operators: vectors \(v_r\) and signs with \(\sum_r \pm v_r v_r^\top = C\).

One expansion along them gives \(C : \nabla^2 f\) as twice its summed second coefficient.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hodiff._core import _checks
from hodiff._core._random_vectors import check_generator, draw
from hodiff._core._vectors import match
from hodiff.errors import InputError
from hodiff.jets import _jet, _push

Probes = Literal["rademacher", "gaussian", "coordinates"]
PROBES = get_args(Probes)


class Directions(NamedTuple):
    """Vectors `(R, *batch or ones, *event)`, their weights (None: all one), and how many sums are kept apart."""

    vectors: Any
    weights: Any = None
    groups: int = 1


def of_laplacian(x: Any, batch_ndim: int, weight: Any = None, *, units: bool = False) -> Directions:
    """Coordinate directions, each with its factor.

    With `units` they keep their lengths, so that first coefficients are partial derivatives.
    """
    axes = _push.units(x, batch_ndim)
    return Directions(axes) if weight is None else _diagonal(axes, _factors(weight, x, len(axes)), units=units)


def of_matrix(x: Any, batch_ndim: int, weight: Any) -> Directions:
    """Directions of the operator with the matrix C, here `weight`."""
    axes = _push.units(x, batch_ndim)
    weight = _matrix(weight, x, batch_ndim, len(axes))
    if weight.ndim == 1:
        return _diagonal(axes, weight, units=False)
    if weight.ndim == 2 and weight.shape[1] != weight.shape[0]:
        return Directions(_shaped(weight.mT, x, batch_ndim))
    if weight.ndim > 2 and weight.shape[-1] != weight.shape[-2]:
        return Directions(_per_sample(weight, x, batch_ndim))
    if _differentiable(weight):
        return _pairs(weight, x, batch_ndim)
    return _eigenvectors(weight, x, batch_ndim)


def _factors(weight: Any, x: Any, size: int) -> Tensor:
    """A factor for each coordinate."""
    if not _jet.is_jet(weight):
        _checks.check_real_tensor(weight, "weight")
    if tuple(weight.shape) != (size,):
        raise InputError(
            f"weight: has shape {tuple(weight.shape)}; expected a factor for each of the {size} coordinates, "
            f"({size},). For a matrix use hodiff.second_order_operator(f, x, C)."
        )
    return _like(weight, x, "weight")


def _matrix(C: Any, x: Any, batch_ndim: int, size: int) -> Tensor:
    """The matrix of an operator, in any of its forms."""
    if not _jet.is_jet(C):
        _checks.check_real_tensor(C, "C")
    batch, shape = tuple(x.shape[:batch_ndim]), tuple(C.shape)
    fits = (
        shape == (size,)
        or (len(shape) == 2 and shape[0] == size)
        or (batch_ndim > 0 and len(shape) == batch_ndim + 2 and shape[:batch_ndim] == batch and shape[-2] == size)
    )
    if not fits:
        raise InputError(
            f"C: has shape {shape}; with {size} coordinates it must be a diagonal ({size},), a matrix ({size}, "
            f"{size}), a factor ({size}, R), or one of the last two for each sample, {(*batch, size, 'R')}."
        )
    return _like(C, x, "C")


def _like(weight: Any, x: Any, name: str) -> Any:
    if weight.dtype != x.dtype or weight.device != x.device:
        raise InputError(
            f"{name}: is {weight.dtype} on {weight.device}, x is {x.dtype} on {x.device}; convert it: {name}.to(x)."
        )
    return weight


def _differentiable(weight: Any) -> bool:
    return _jet.is_jet(weight) or (weight.requires_grad and torch.is_grad_enabled())


def _diagonal(axes: Tensor, weight: Any, *, units: bool) -> Directions:
    """Coordinate directions, scaled by the roots where all weights are positive constants."""
    if units or _differentiable(weight) or torch.compiler.is_compiling():
        return Directions(axes, weight)
    kept = weight != 0
    if not bool(kept.any()):
        return Directions(axes[:1], weight[:1])
    axes, weight = axes[kept], weight[kept]
    scaled = axes * weight.abs().sqrt().reshape(-1, *[1] * (axes.ndim - 1))
    return Directions(scaled, None if bool((weight > 0).all()) else weight.sign())


def _shaped(rows: Any, x: Any, batch_ndim: int) -> Any:
    """`(R, D)` as directions that are the same for every sample."""
    return rows.reshape(rows.shape[0], *[1] * batch_ndim, *x.shape[batch_ndim:])


def _per_sample(factor: Any, x: Any, batch_ndim: int) -> Any:
    """`(*batch, D, R)` as directions."""
    return factor.movedim(-1, 0).reshape(factor.shape[-1], *x.shape)


def _eigenvectors(weight: Tensor, x: Any, batch_ndim: int) -> Directions:
    """The eigenvectors of the symmetric part, scaled by the roots of |λ|, with the signs of λ."""
    weight = weight.detach()
    wide = weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight  # there is no eigh of halves
    values, vectors = (part.to(weight.dtype) for part in torch.linalg.eigh((wide + wide.mT) / 2))
    if weight.ndim == 2:
        negligible = values.abs() <= values.abs().amax() * weight.shape[0] * torch.finfo(weight.dtype).eps
        if not torch.compiler.is_compiling() and not bool(negligible.all()):
            values, vectors = values[~negligible], vectors[:, ~negligible]
        rows = _shaped((vectors * values.abs().sqrt()).mT, x, batch_ndim)
        if torch.compiler.is_compiling() or not bool((values > 0).all()):
            return Directions(rows, values.sign())
        return Directions(rows)
    # Signs differ from sample to sample: one block of directions for each, empty entries being zero.
    up = _per_sample(vectors * values.clamp(min=0).sqrt().unsqueeze(-2), x, batch_ndim)
    if not torch.compiler.is_compiling() and bool((values >= 0).all()):
        return Directions(up)
    down = _per_sample(vectors * values.clamp(max=0).neg().sqrt().unsqueeze(-2), x, batch_ndim)
    signs = torch.cat([values.new_ones(len(up)), -values.new_ones(len(down))])
    return Directions(torch.cat([up, down]), signs)


def _pairs(weight: Any, x: Any, batch_ndim: int) -> Directions:
    r"""For a weight that is differentiated by: eigenvectors have no derivative where eigenvalues meet.

    \(C : H = \sum_{i \le j} w_{ij} \, (e_i + e_j)^\top H (e_i + e_j)\) with coefficients linear in C. One
    weight per sample becomes a pair of directions, \(w = ((1 + w)/2)^2 - ((1 - w)/2)^2\) times a square.
    """
    size = weight.shape[-1]
    symmetric = (weight + weight.mT) * 0.5
    axes = torch.eye(size, dtype=x.dtype, device=x.device)
    rows, columns = torch.triu_indices(size, size, 1, device=x.device)
    own = torch.diagonal(symmetric, dim1=-2, dim2=-1) * 2 - symmetric.sum(-1)
    vectors = torch.cat([axes, axes[rows] + axes[columns]])
    weights = torch.cat([own, symmetric[..., rows, columns]], -1)
    if weight.ndim == 2:
        return Directions(_shaped(vectors, x, batch_ndim), weights)
    plus, minus = (1 + weights) * 0.5, (1 - weights) * 0.5
    each = torch.cat([plus.unsqueeze(-2) * vectors.mT, minus.unsqueeze(-2) * vectors.mT], -1)
    signs = torch.cat([axes.new_ones(len(vectors)), -axes.new_ones(len(vectors))])
    return Directions(_per_sample(each, x, batch_ndim), signs)


def sampled(
    x: Any,
    batch_ndim: int,
    weight: Any,
    samples: int | None,
    probes: str,
    vectors: Any,
    generator: torch.Generator | None,
) -> tuple[Directions, float]:
    """Random directions whose mean square is the identity (or weight); and the part of the variance left."""
    if probes not in PROBES:
        raise InputError(f'probes: got {probes!r}, expected "rademacher", "gaussian" or "coordinates".')
    check_generator(generator)
    samples = _checks.check_integer(1 if samples is None else samples, "samples", least=1)
    if weight is not None:
        weight = _factors(weight, x, torch.Size(x.shape[batch_ndim:]).numel())
    plain = _jet.value_of(x)
    if vectors is not None:
        drawn = _given(vectors, plain)
    elif probes == "coordinates":
        return _coordinates(x, batch_ndim, weight, samples, generator)
    else:
        drawn = draw((samples, *plain.shape), plain, probes, generator)  # pyright: ignore[reportArgumentType]
    if weight is not None:
        if _differentiable(weight) or (not torch.compiler.is_compiling() and bool((weight < 0).any())):
            raise InputError(
                "weight: random directions carry its roots, so it must not be negative, nor differentiated by. "
                'Use probes="coordinates".'
            )
        drawn = drawn * weight.sqrt().reshape(x.shape[batch_ndim:])
    return Directions(drawn, None, len(drawn)), 1.0


def _given(vectors: Any, x: Tensor) -> Tensor:
    """The caller's own directions, stacked."""
    [found], count, *_ = match(vectors, None, [x], "vectors", "like x")
    if count == 0:
        raise InputError("vectors: holds no vector, expected at least one.")
    if not torch.compiler.is_compiling() and found.is_inference():
        found = found.clone()
    return found if count else found.unsqueeze(0)


def _coordinates(
    x: Any, batch_ndim: int, weight: Any, samples: int, generator: torch.Generator | None
) -> tuple[Directions, float]:
    """Some coordinates, drawn without replacement, the same for every sample."""
    axes = _push.units(x, batch_ndim)
    if samples > len(axes):
        raise InputError(f"samples: got {samples}, more than the {len(axes)} coordinates there are.")
    order = torch.randperm(len(axes), generator=generator, device=generator.device if generator else None)
    chosen = order[:samples].to(axes.device)
    weights = axes.new_ones(len(axes)) if weight is None else weight
    return Directions(axes[chosen], weights[chosen] * len(axes), samples), 1 - samples / len(axes)
