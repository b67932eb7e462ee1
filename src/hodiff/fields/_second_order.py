"""Operators of second order, each in one pass: `laplacian`, `second_order_operator`; twice,
`biharmonic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from hodiff._core import _arguments, _call
from hodiff._core._arguments import ChunkSize, NoNumber, SupportsArray
from hodiff._core._vectors import standard_error
from hodiff.errors import InputError
from hodiff.fields import _expansions
from hodiff.fields._expansions import Probes, second_order
from hodiff.fields._field import FieldCall, FieldOptions, Method, SecondOrderOptions, choose
from hodiff.jets import _jet

What = Callable[..., Any] | Tensor
Given = SupportsArray | Sequence[Any]
"""Vectors that are there: tensors, arrays, lists."""


@dataclass(frozen=True, repr=False, eq=False)
class Estimate(NoNumber):
    """A randomized result.

    Attributes:
        value: The estimate, shaped like `f(x)`.
        stderr: Its standard error, with the same shape; None for a single sample.
        samples: How many random directions were used.
    """

    value: Tensor
    stderr: Tensor | None
    samples: int

    def __repr__(self) -> str:
        size = "x".join(map(str, self.value.shape)) or "one value"
        error = "" if self.stderr is None else f", ± {self.stderr.max():.3g} at most"
        return f"Estimate({size}, {self.samples} samples{error})"


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
    chunk_size: ChunkSize = "auto",
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
    if samples is None and vectors is None:
        with call.grad_mode():
            return call.with_extra(
                second_order(call, _expansions.of_laplacian(x, batch_ndim, weight)).second[0]
            )
    with call.grad_mode():
        directions, remaining = _expansions.sampled(
            x, batch_ndim, weight, samples, probes, vectors, generator
        )
        return call.with_extra(mean_over(second_order(call, directions).second, remaining, vectors))


def mean_over(each: Any, remaining: float, vectors: Any) -> Estimate | Tensor:
    """The mean over directions; of those that were drawn with its standard error."""
    count = each.shape[0]
    if vectors is not None:
        return each.mean(0)
    if not remaining:
        return Estimate(each.mean(0), torch.zeros_like(each[0]), count)
    error = standard_error(each)
    return Estimate(each.mean(0), None if error is None else error * remaining**0.5, count)


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
    chunk_size: ChunkSize = "auto",
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
    with call.grad_mode():
        value, first, second = second_order(
            call, _expansions.of_laplacian(x, batch_ndim, weight, units=True), first=True
        )
        return call.with_extra(value), gradient(call, value, first), second[0]


def gradient(call: FieldCall, value: Any, first: Any) -> Any:
    """Partial derivatives `(D, *out)` as a gradient,
    or as a Jacobian where f has several components.
    """
    components = tuple(value.shape[call.batch_ndim :])
    last = first.movedim(0, -1)
    single = all(size == 1 for size in components)
    return last.reshape(*call.batch, *(() if single else components), *call.event)


# --- a general linear operator of second order, in one pass; and the biharmonic operator ----------


@overload
def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: Literal[False] = False,
    **options: Unpack[SecondOrderOptions],
) -> Tensor: ...


@overload
def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: bool,
    **options: Unpack[SecondOrderOptions],
) -> Any: ...


def second_order_operator(
    f: What,
    x: Tensor,
    C: Tensor,
    b: Tensor | None = None,
    c: Tensor | float | None = None,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    chunk_size: ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""A linear second-order operator, Σᵢⱼ Cᵢⱼ ∂ᵢ∂ⱼf + b·∇f + c f.

    Fokker-Planck, Kolmogorov, Black-Scholes, convection-diffusion and Laplace-Beltrami operators
    are of this form.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, *event)`, with D coordinates each.
        C: The matrix: a diagonal of shape `(D,)`; a matrix `(D, D)`, which may be indefinite; a
            factor S `(D, R)` with C = S Sᵀ, of lower cost where R < D; or a matrix or factor for
            each sample, `(N, D, D)` or `(N, D, R)`. A square one is always the matrix.
        b: The drift: `(D,)`, or shaped like *x*. None is zero.
        c: A number, or a tensor that broadcasts to `f(x)`. None is zero.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again, also with respect to *C*, *b*
            and *c*.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        chunk_size: How many directions one evaluation of `f` carries, or `"auto"`.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(result, extra)`.

    Raises:
        InputError: *C* or *b* has a shape that does not fit *x*, or *c* one that does not fit
            `f(x)`.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        The same as `laplacian` with R directions, where R is the rank of C. The drift is part of
        the same curves, \(x + t v_r + t^2 b / 2\), and costs nothing. A matrix also takes its
        eigenvectors, and one that requires grad takes D (D + 1) / 2 directions.

    Examples:
        u = sin(x) exp(-t) solves the heat equation, u_xx - u_t = 0:

        >>> import torch, hodiff
        >>> u = lambda z: torch.sin(z[:, 0]) * torch.exp(-z[:, 1])
        >>> C, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, -1.0])
        >>> hodiff.second_order_operator(u, torch.zeros(1, 2), C, b).abs()
        tensor([0.])
    """
    call = FieldCall(
        "second_order_operator",
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
    if isinstance(C, Tensor):
        _call.refuse_tangent(C, "C")
    with call.grad_mode():
        directions = _expansions.of_matrix(x, batch_ndim, C)
        value, _, second = second_order(call, directions, None if b is None else _drift(b, call))
        return call.with_extra(
            second[0] if c is None else second[0] + _factor(c, value.shape) * value
        )


def _factor(c: Any, shape: torch.Size) -> Any:
    if _arguments.is_number(c):
        return c
    if not _jet.is_jet(c):
        if not isinstance(c, Tensor):
            raise InputError(
                f"c: got {c!r}, expected a finite number, or a tensor that broadcasts to f(x)."
            )
        _arguments.check_real_tensor(c, "c")
    if c.ndim > len(shape) or any(
        a not in (1, b) for a, b in zip(c.shape[::-1], shape[::-1], strict=False)
    ):
        raise InputError(
            f"c has shape {tuple(c.shape)}, which does not broadcast to the shape of f(x), "
            f"{tuple(shape)}; give a number, or a tensor that does."
        )
    return c


def _drift(b: Any, call: FieldCall) -> Any:
    if not _jet.is_jet(b):
        _arguments.check_real_tensor(b, "b")
    size = torch.Size(call.event).numel()
    if tuple(b.shape) == (size,):
        return b.reshape(*[1] * call.batch_ndim, *call.event).expand(call.x.shape)
    if tuple(b.shape) != tuple(call.x.shape):
        raise InputError(
            f"b has shape {tuple(b.shape)}, expected ({size},) or the shape of x, "
            f"{tuple(call.x.shape)}."
        )
    return b


@overload
def biharmonic(
    f: What, x: Tensor, *, has_aux: Literal[False] = False, **options: Unpack[FieldOptions]
) -> Tensor: ...


@overload
def biharmonic(f: What, x: Tensor, *, has_aux: bool, **options: Unpack[FieldOptions]) -> Any: ...


def biharmonic(
    f: What,
    x: Tensor,
    *,
    has_aux: bool = False,
    batch_ndim: int = 1,
    create_graph: bool | None = None,
    method: Method = "auto",
    check_independence: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The biharmonic operator, Δ²f = Σᵢⱼ ∂ᵢ²∂ⱼ²f, of plates and slow flows.

    Args:
        f: A function of *x* that returns one or several numbers for each sample, from that sample
            alone; or such a tensor already computed from *x*.
        x: The points, `(*batch, *event)`.
        has_aux: Whether `f` returns `(value, extra)`.
        batch_ndim: How many leading dimensions of *x* index independent samples.
        create_graph: Whether the result can be differentiated again. None: if grad mode is on.
        method: `"jets"` (Taylor mode), `"reverse"`, or `"auto"`, which uses jets if every operation
            has a rule.
        check_independence: Whether to test that samples are independent.
        args: Further positional arguments for `f`.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor with the shape of `f(x)`; with *has_aux* `(result, extra)`.

    Raises:
        InputError: *x* or *weight* is not what the call needs, or `f(x)` lacks the batch
            dimensions.
        GraphError: `f` does not depend on *x*, or BatchNorm in training mode mixes samples.

    Cost:
        A Laplacian of a Laplacian: one evaluation of `f` on (D + 2)² vectors, and memory in
            proportion.
        Reverse: D² passes, on graphs of fourth order.

    Examples:
        \(\Delta^2 \lVert x \rVert^4 = 8 D (D + 2)\):

        >>> import torch, hodiff
        >>> hodiff.biharmonic(lambda x: x.square().sum(-1) ** 2, torch.ones(1, 3))
        tensor([120.])

    Reference:
        Dangel, F. et al. (2025), arXiv:2505.13644, find nested forward Laplacians the fastest
        route.
    """
    call = FieldCall(
        "biharmonic",
        f,
        x,
        batch_ndim,
        create_graph,
        method,
        args,
        kwargs,
        check_independence=check_independence,
        has_aux=has_aux,
    ).checked()
    if not callable(f):
        raise InputError("f: got a tensor already computed; biharmonic needs the function.")
    both = {"batch_ndim": batch_ndim, "has_aux": has_aux}
    inner = {**both, "args": args, "kwargs": kwargs}

    def nested(call: FieldCall, route: Method = "jets") -> Any:
        outer = {**both, "create_graph": call.record, "method": route}
        once = _call.in_place_of(
            f, lambda y: laplacian(f, y, create_graph=True, method=route, **inner)
        )
        return laplacian(once, x, **outer)

    def reverse(call: FieldCall) -> Any:
        with call.watched():
            return nested(call, "reverse")

    with call.grad_mode():
        return choose(call, nested, reverse, nested=True)
