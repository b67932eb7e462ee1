"""The Laplacian, in one pass, with value and gradient or alone.

One expansion along the coordinates gives it as twice its summed second coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _settings
from hodiff._core._versions import is_wrapped
from hodiff.fields import _field
from hodiff.fields._field import (
    Curves,
    Directions,
    FieldCall,
    Method,
    Probes,
    SecondOrderOptions,
    What,
    by_jets,
    choose,
    of_laplacian,
)
from hodiff.jets import _jet

if TYPE_CHECKING:
    from hodiff.fields._expansions import Estimate

Given = _arguments.SupportsArray | Sequence[Any]
"""Vectors that are there: tensors, arrays, lists."""


class LaplacianOptions(SecondOrderOptions, total=False):
    """The further options of `laplacian`; for overloads alone."""

    weight: Tensor | None
    probes: Probes
    generator: torch.Generator | None


@overload
def laplacian(
    f: What,
    x: Tensor,
    *,
    samples: None = None,
    vectors: Given | None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[LaplacianOptions],
) -> Tensor: ...


@overload
def laplacian(
    f: What,
    x: Tensor,
    *,
    samples: int,
    vectors: None = None,
    has_aux: Literal[False] = False,
    **options: Unpack[LaplacianOptions],
) -> Estimate: ...


@overload
def laplacian(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    vectors: Any = None,
    has_aux: Literal[True],
    **options: Unpack[LaplacianOptions],
) -> tuple[Any, Any]: ...


@overload
def laplacian(
    f: What,
    x: Tensor,
    *,
    samples: int | None = None,
    vectors: Any = None,
    has_aux: bool = False,
    **options: Unpack[LaplacianOptions],
) -> Any: ...


def laplacian(
    f: What,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    samples: int | None = None,
    probes: Probes = "rademacher",
    vectors: Any = None,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    chunk_size: _arguments.ChunkSize = "auto",
    generator: torch.Generator | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The Laplacian Δf = Σᵢ ∂ᵢ²f, or Σᵢ wᵢ ∂ᵢ²f.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, of shape `(*batch, *event)`; usually `(N, D)`.
        weight: A factor \(w_i\) for each coordinate, `(D,)`, of either sign. (For a matrix use
            `second_order_operator`.)
        samples: Estimate it from this many random directions instead of D.
        probes: The distribution of the directions: `"rademacher"` (signs) or `"gaussian"`, drawn
            separately for each sample; or `"coordinates"`, drawn without replacement, the same for
            the whole batch.
        vectors: Your own directions instead of `samples`, like *x*, or K of them with one extra
            leading dimension, with independent entries of mean 0 and variance 1. Then none is
            drawn, and the result, a tensor, is a fixed function of *x*.
        has_aux: Whether `f` returns `(value, extra)`. The result is then also a pair, with the
            extra of the same evaluation, detached unless the result is differentiable.
        batch_ndim: How many leading dimensions of *x* index independent samples; 0 for a single
            point.
        create_graph: Whether the result can be differentiated again, with respect to the parameters
            of `f`, *x* and *weight*. None: if grad mode is on, because a Laplacian is usually part
            of a loss.
        method: `"jets"` (collapsed Taylor mode), `"reverse"` (double backward), or `"auto"`: jets,
            or reverse mode with a warning if an operation of `f` has no rule.
        check_independence: Whether to test that samples are independent.
        chunk_size: How many directions one evaluation of `f` (in reverse mode: one pass) carries,
            or `"auto"`; see Cost.
        generator: The source of the random directions; None: the device's default generator.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`: with *vectors* the mean over them. With *samples*, an
        `Estimate` with `value` and `stderr` of that shape (the standard error of the mean over
        directions; with one sample it is None). With *has_aux* `(result, extra)`.

    Raises:
        InputError: *x* or *weight* is not what the call needs, or `f(x)` lacks the batch
            dimensions.
        GraphError: `f` does not depend on *x*; BatchNorm in training mode mixes samples; or, with
            `method="jets"`, an operation has no rule.

    Cost:
        Jets: one evaluation of `f` on D + 2 vectors (the value, D first derivatives and the sum of
        second ones), and memory in proportion; 2 S + 1 vectors for S samples. Reverse mode, and
        always for a tensor already computed: for each component of `f(x)` one pass for the gradient
        and one batched pass per chunk of directions. If no graph is recorded and one coefficient
        would take more than 32 MiB, `chunk_size="auto"` takes the directions in chunks of at most
        that size, each with an evaluation of `f` at the whole batch. If such a chunk has fewer than
        16 directions, it takes the batch in blocks of 16 MiB: `f` is evaluated once on the whole
        batch in one direction, and every block is compared with that. If `f` is not a function of
        each sample alone (it draws random numbers, or holds data for each sample), the whole batch
        is computed at once instead. A number makes ⌈D / chunk_size⌉ evaluations of `f` at the whole
        batch.

    Examples:
        \(\Delta \lVert x \rVert^4 = 4 (D + 2) \lVert x \rVert^2\):

        >>> import torch, hodiff
        >>> hodiff.laplacian(
        ...     lambda x: x.square().sum(-1) ** 2, torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        ... )
        tensor([16., 32.])

    Reference:
        Dangel, F. et al. (2025). Collapsing Taylor Mode Automatic Differentiation.
        arXiv:2505.13644. Li, R. et al. (2024). A computational framework for neural network-based
        variational Monte Carlo with Forward Laplacian. Nature Machine Intelligence 6.
        doi:10.1038/s42256-024-00794-x. Hutchinson, M. F. (1989). A stochastic estimator of the
        trace of the influence matrix. doi:10.1080/03610918908812806.
    """
    call = FieldCall(
        "laplacian",
        f,
        x,
        batch_ndim,
        create_graph,
        method,
        args,
        kwargs,
        chunk_size,
        check_independence=check_independence,
        has_aux=has_aux,
    ).checked()
    with _settings.grad_mode(call.record):
        if samples is None and vectors is None:
            return call.with_extra(
                second_order(call, of_laplacian(x, batch_ndim, weight)).second[0]
            )
        from hodiff.fields._expansions import mean_over, sampled

        directions, remaining = sampled(x, batch_ndim, weight, samples, probes, vectors, generator)
        return call.with_extra(mean_over(second_order(call, directions).second, remaining, vectors))


class ValueGradLaplacianOptions(SecondOrderOptions, total=False):
    """The further options of `value_grad_and_laplacian`; for overloads alone."""

    weight: Tensor | None


@overload
def value_grad_and_laplacian(
    f: What,
    x: Tensor,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[ValueGradLaplacianOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def value_grad_and_laplacian(
    f: What, x: Tensor, *, has_aux: bool, **options: Unpack[ValueGradLaplacianOptions]
) -> tuple[Any, Tensor, Tensor]: ...


def value_grad_and_laplacian(
    f: What,
    x: Tensor,
    *,
    weight: Tensor | None = None,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    chunk_size: _arguments.ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""Value, gradient and Laplacian, f, ∇f, Δf, from one evaluation.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, *event)`.
        weight: A factor for each coordinate. A zero removes a coordinate from the Laplacian but not
            from the gradient, which gives u_t and Δu together.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the results can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        chunk_size: How many directions one evaluation of `f` carries, or `"auto"`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        `(value, gradient, laplacian)`, with *has_aux* `((value, extra), gradient, laplacian)`:
        value and Laplacian with the shape of `f(x)`. The gradient is shaped like *x* where `f`
        gives one number per sample, and is the Jacobian `(*batch, *output event, *event)` where it
        gives several.

    Raises:
        InputError: *x* or *weight* is not what the call needs, or `f(x)` lacks the batch
            dimensions.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        The same as `laplacian`; value and gradient are by-products.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.value_grad_and_laplacian(lambda x: (x**3).sum(-1), torch.tensor([[1.0, 2.0]]))
        (tensor([9.]), tensor([[ 3., 12.]]), tensor([18.]))
    """
    call = FieldCall(
        "value_grad_and_laplacian",
        f,
        x,
        batch_ndim,
        create_graph,
        method,
        args,
        kwargs,
        chunk_size,
        check_independence=check_independence,
        has_aux=has_aux,
    ).checked()
    with _settings.grad_mode(call.record):
        value, first, second = second_order(
            call, of_laplacian(x, batch_ndim, weight, units=True), first=True
        )
        # partial derivatives `(D, *out)`; of several components they are a Jacobian
        components = tuple(value.shape[call.batch_ndim :])
        single = all(size == 1 for size in components)
        shape = (*call.batch, *(() if single else components), *call.event)
        return call.with_extra(value), first.movedim(0, -1).reshape(shape), second[0]


def second_order(
    call: FieldCall, directions: Directions, drift: Any = None, *, first: bool = False
) -> Curves:
    """The function and its derivatives along straight lines; with `drift` b, second ones gain b·∇f.

    First derivatives are there where they are by-products, or wanted.
    """
    small = call.record or _jet.is_jet(call.x) or len(directions.vectors) < _field.WORTHWHILE
    # where values are wrapped nobody can look at them
    whole = is_wrapped(_jet.value_of(call.x)) or (call.chunk_size == "auto" and small)
    reverse = partial(_by_reverse, first=first)
    return choose(call, by_jets if whole else _in_parts, reverse, directions, drift)


def _in_parts(*given: Any) -> Curves:
    from hodiff.fields._expansions import in_parts

    return in_parts(*given)


def _by_reverse(*given: Any, first: bool) -> Curves:
    from hodiff.fields._expansions import by_reverse

    return by_reverse(*given, first=first)
