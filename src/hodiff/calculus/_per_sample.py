"""Gradients of each sample's own loss: `per_sample_grad`, and their products, `gram`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _nodes, _refusals, _reverse, _settings, _tree, _vectors
from hodiff._core._call import call
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph
from hodiff._core._modules import Selection
from hodiff.calculus import _factors
from hodiff.calculus._first import ChunkedOptions, T, agree
from hodiff.errors import InputError


@overload
def per_sample_grad(
    f: Callable[..., Tensor],
    where: nn.Module | Selection,
    batch: Any,
    **options: Unpack[ChunkedOptions],
) -> dict[str, Tensor]: ...


@overload
def per_sample_grad(
    f: Callable[..., Tensor], where: T, batch: Any, **options: Unpack[ChunkedOptions]
) -> T: ...


def per_sample_grad(
    f: Callable[..., Tensor],
    where: Any,
    batch: Any,
    *,
    create_graph: bool | None = None,
    strict: bool | None = None,
    allow: _arguments.Allowed = (),
    chunk_size: _arguments.ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The gradient of each sample's own loss, ∇ℓᵢ(θ) for all i: one row for each sample.

    Used for influence functions, private gradient clipping, gradient noise, and the empirical
    Fisher matrix (its diagonal is the mean of the squares).

    Args:
        f: A function of *where* and *batch* that returns one loss for each sample, `(N,)` or `(N,
            1)`, such as `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1],
            reduction="none")`. Or several numbers for each, `(N, K)`, such as the residuals of a
            system of equations.
        where: Where: usually a module; any tensor or container of tensors.
        batch: A tensor, or a container of them, with the samples in the leading dimension.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call.
        strict: What to return for a tensor of *where* that the losses do not depend on. None:
            zeros, and an error if they depend on none. True: always an error. False: always zeros.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many samples one pass takes; `"auto"` bounds its memory.
        args: Further positional arguments for `f`, after the batch.
        kwargs: Keyword arguments for `f`.

    Returns:
        The gradients, with the structure of *where* and shape `(N, *shape)` on every leaf,
        `(N, K, *shape)` of K numbers; for a module a dict by parameter name.

    Raises:
        InputError: `f` does not return a loss for each sample (a mean over the batch has no
            per-sample gradient), or returns `(N, N)` by broadcasting `(N, 1)` with `(N,)`; or *f*
            is a tensor (for losses already computed use `jacobian(losses, where)`).
        GraphError: The losses do not depend on *where*, or reach it other than through the
            argument.

    Cost:
        One evaluation, one pass for each of the K numbers, batched, and one that proves at every
        call that samples are apart, for layers that `hodiff.gram` names; 0.7 to 1 times the time of
        what follows, 0.3 to 0.5 of it for a Laplacian. Under dropout the rows are those of one
        draw.

        Other layers, and all with a `chunk_size` of your own: one evaluation and one pass for each
        chunk of samples (K passes for K numbers), by `torch.vmap` with separate parameters for each
        sample, and one evaluation and pass of the whole batch. The latter checks the losses one by
        one, and a sum of the gradients. If `f` does not run under `vmap` or draws random numbers,
        the check fails (BatchNorm mixes the samples), or the result must be differentiable, N
        passes over the whole batch are taken instead, in chunks.

        Memory: the result, N times the parameters.

    Examples:
        Of \((w x_i - y_i)^2\) it is \(2 x_i (w x_i - y_i)\):

        >>> import torch, hodiff
        >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0])
        >>> hodiff.per_sample_grad(lambda w, b: (w * b[0] - b[1]) ** 2, torch.tensor(1.0), (x, y))
        tensor([ 2.,  8., 12.])

    Reference:
        Goodfellow, I. (2015). Efficient per-example gradient computations. arXiv:1510.01799.
    """
    options = create_graph, strict, allow, args, kwargs
    graph, samples, chunk = _evaluation(f, where, batch, chunk_size, options)
    with graph:
        losses = _checked(graph, samples)
        _reverse.check_fits([losses], graph.leaves, 0, WAY_OUT)
        factors = None if chunk else in_factors(graph, losses)
        if factors is None:
            rows = _rows(graph, samples, losses, chunk)
        else:
            with _settings.grad_mode(False):
                rows = [of.rows().view(*losses.shape, *of.shape) for of in factors]
    return graph.call.where.result(rows)


def gram(
    f: Callable[..., Tensor],
    where: Any,
    batch: Any,
    *,
    create_graph: bool | None = None,
    strict: bool | None = None,
    allow: _arguments.Allowed = (),
    chunk_size: _arguments.ChunkSize = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""The Gram matrix of the samples' gradients, ∇ℓᵢ(θ)·∇ℓⱼ(θ) for all i and j: J Jᵀ.

    The same as of the rows of `per_sample_grad`, without the rows. Used for the empirical neural
    tangent kernel, natural gradients in sample space (min-SR, SPRING), the similarity of samples
    and of tasks; its diagonal has the squares of the gradients' norms. The kernel between two
    batches is a block of that of both, one after the other.

    Args:
        f: A function of *where* and *batch* that returns one number for each sample, `(N,)` or `(N,
            1)`, such as a loss with `reduction="none"`, or several for each, `(N, K)`.
        where: Where: usually a module; any tensor or container of tensors.
        batch: A tensor, or a container of them, with the samples in the leading dimension; indices
            of samples that `f` looks up, too.
        create_graph: Whether the result can be differentiated again. None: only inside the function
            of another hodiff call. Then the rows are held.
        strict: What to do for a tensor of *where* that the numbers do not depend on. None: an error
            if they depend on none. True: always an error. False: never.
        allow: `autograd.Function`s to accept in a second derivative, as they are.
        chunk_size: How many samples one pass takes where rows are needed; `"auto"` bounds its
            memory.
        args: Further positional arguments for `f`, after the batch.
        kwargs: Keyword arguments for `f`.

    Returns:
        A tensor of shape `(N, N)`, or `(N, K, N, K)` of K numbers for each sample.

    Raises:
        InputError: `f` does not return a number for each sample, returns `(N, N)` by broadcasting
            `(N, 1)` with `(N,)`, or is a tensor.
        GraphError: The numbers do not depend on *where*, or reach it other than through the
            argument.

    Cost:
        One evaluation, one pass for each of the K numbers, batched, and one with random weights,
        which proves at every call that samples are apart. Another pass proves that the factors are
        right: once for each structure of a network, at every call where hooks were registered. No
        sample's gradient of a weight is formed in them: each weight adds the products of the inputs
        and of the derivatives at the layers that use it, \(N^2 K^2 (I + O)\) for a layer of I
        inputs and O outputs, and as little memory. That holds for linear layers, `@`,
        convolutions, embeddings, norms, recurrent cells, tied weights, and derivatives inside of
        `f`. Parameters used otherwise, those of layers that mix samples (BatchNorm in training),
        and all with `create_graph`, under forward mode or in bfloat16, take their rows, as by
        `per_sample_grad`.

    Examples:
        Of \((w x_i - y_i)^2\) the gradients are 2, 8 and 12:

        >>> import torch, hodiff
        >>> x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 0.0, 1.0])
        >>> hodiff.gram(lambda w, b: (w * b[0] - b[1]) ** 2, torch.tensor(1.0), (x, y))
        tensor([[  4.,  16.,  24.],
                [ 16.,  64.,  96.],
                [ 24.,  96., 144.]])

    Reference:
        Jacot, A., Gabriel, F., and Hongler, C. (2018). Neural tangent kernel. arXiv:1806.07572.
    """
    options = create_graph, strict, allow, args, kwargs
    graph, samples, chunk = _evaluation(f, where, batch, chunk_size, options)
    with graph:
        losses = _checked(graph, samples)
        product, missing = losses.detach().new_zeros(losses.shape * 2), {*range(len(graph.leaves))}
        factors = _factored(graph, losses)
        if factors is not None:
            missing = factors.missing
            with _settings.grad_mode(False):
                for of in factors.of.values():
                    product += of.gram().view(product.shape)
        if missing:
            _reverse.check_fits([losses], graph.leaves, 0, WAY_OUT)
            rows = _rows(graph, samples, losses, chunk)
            for number in missing:
                flat = rows[number].reshape(losses.numel(), graph.leaves[number].numel())
                product = product + (flat @ flat.T).view(product.shape)
    return product


def _evaluation(
    f: Any, where: Any, batch: Any, chunk_size: _arguments.ChunkSize, options: tuple[Any, ...]
) -> tuple[OutputGraph, Samples, int | None]:
    """The call to evaluate, the function at a batch,
    and the number of samples that a pass takes.
    """
    chunk = _arguments.check_chunk_size(chunk_size)
    if isinstance(f, Tensor) or not callable(f):
        raise InputError(
            f"f: got {_arguments.kind(f)}, expected a function f(where, batch) that returns one "
            f"loss per sample. For losses already computed, use hodiff.jacobian(losses, where)."
        )
    samples = Samples(f, batch)
    _call.in_place_of(f, samples)
    if not any(isinstance(leaf, Tensor) for leaf in _tree.flatten(batch)[0]):
        raise InputError(
            f"batch: got {_arguments.kind(batch)}, expected a tensor, or a container of them."
        )
    return OutputGraph(call(samples, where, 1, *options)), samples, chunk


def _checked(graph: OutputGraph, samples: Samples) -> Tensor:
    """The losses, `(N,)` or `(N, K)`."""
    losses = _arguments.check_output(graph.outputs)
    if losses.ndim > 0 and losses.shape[1:].numel() == 1:
        losses = losses.reshape(-1)
    elif losses.ndim != 2:
        raise InputError(
            f"f returned shape {tuple(losses.shape)}, expected one loss per sample, (N,), or "
            f'several, (N, K): pass reduction="none", and take the mean over all but the leading '
            f"dimension."
        )
    check_not_crossed(graph, samples, losses, "f")
    return losses


def _stays(graph: OutputGraph) -> bool:
    """Whether the graph of the whole batch must give the result, or numbers cannot be compared."""
    return graph.create_graph or len(_call.state.open) > 1 or _settings.tracing()


def _factored(graph: OutputGraph, losses: Tensor, largest: float = 0) -> _factors.Factors | None:
    """The gradients in factors, where these can be asked for."""
    if _stays(graph) or _refusals.MIXING.among(_nodes.survey([losses])):
        return None
    return _factors.Factors(graph, [losses], largest=largest)


def in_factors(
    graph: OutputGraph, values: Tensor, largest: float = 0
) -> list[_factors.Outer] | None:
    """The gradients of the samples' numbers in factors, for each leaf; None:
    one is not known so.
    """
    factors = _factored(graph, values, largest)
    if factors is None or factors.missing:
        return None
    return [factors.of[number] for number in range(len(graph.leaves))]


def in_rows(
    graph: OutputGraph, samples: Samples, values: Tensor, way_out: str
) -> list[_factors.Outer]:
    """The gradients of the samples' numbers themselves, for each leaf, where these fit."""
    _reverse.check_fits([values], graph.leaves, 0, way_out)
    pairs = zip(_rows(graph, samples, values, None), graph.leaves, strict=True)
    sizes = len(values), values.shape[1:].numel()
    return [_factors.Outer.of(row.reshape(*sizes, *leaf.shape), leaf.shape) for row, leaf in pairs]


def _rows(graph: OutputGraph, samples: Samples, losses: Tensor, chunk: int | None) -> list[Tensor]:
    """The gradients of all losses, for each leaf."""
    rows = None
    if not _stays(graph) and not graph.context.random.moved():
        rows = _by_samples(graph, samples, losses, chunk)
    if rows is None:
        [rows] = _reverse.blocks(graph, [losses], chunk_size=chunk)
    return rows


WAY_OUT = (
    "Give fewer samples at a time, take some parameters (hodiff.select), "
    "or keep their norms alone: "
    "hodiff.sample_norm of each part."
)


class Samples:
    """The user's function at a batch, or at some samples of it."""

    def __init__(self, f: Callable[..., Any], batch: Any) -> None:
        self._f = f
        self._whole = batch
        self._seen = batch

    def __call__(self, where: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._f(where, self._seen, *args, **kwargs)
        except (TypeError, AttributeError) as error:
            several = isinstance(self._whole, list) and all(map(_tree.is_container, self._whole))
            together = (
                " containers. If each is a sample, put them together: "
                "torch.utils.data.default_collate(batch)"
            )
            error.add_note(
                f"hodiff: f is called as f(where, batch), batch is {_arguments.kind(self._whole)}"
                f"{together if several else ''}."
            )
            raise

    def tensors(self, count: int) -> list[Tensor]:
        """The tensors of the batch that have a row for each sample."""
        return [leaf for leaf in _tree.flatten(self._whole)[0] if _has_rows(leaf, count)]

    def with_rows(self, rows: Sequence[Tensor], count: int) -> None:
        """Let the function see these rows of the tensors that have as many as there are samples."""
        given = iter(rows)
        self._seen = _tree.tree_map(
            lambda leaf: next(given) if _has_rows(leaf, count) else leaf, self._whole
        )

    def whole(self) -> None:
        """Let the function see the whole batch again."""
        self._seen = self._whole


def _has_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == count


def check_not_crossed(graph: OutputGraph, samples: Samples, output: Tensor, name: str) -> None:
    """Raise where `(N, N)` came of samples crossed with samples, as `(N, 1)` and `(N,)` are by
    broadcasting.

    It may also be N numbers of each of N samples. These are as many where there are fewer samples.
    """
    count = len(output)
    fewer = 1 if count == 2 else 2  # BatchNorm takes no single one
    batch = samples.tensors(count)
    if output.shape != (count, count) or count == 1 or not batch:
        return
    try:
        with graph.context.random.replayed():
            samples.with_rows([leaf[:fewer] for leaf in batch], count)
            some = graph.context.at(graph.leaves)
    except Exception as error:  # it takes no other number of samples
        if not is_fault(error):
            raise
        return
    finally:
        samples.whole()
    if isinstance(some, Tensor) and some.shape == (fewer, fewer):
        raise InputError(
            f"{name} returned shape {(count, count)} for {count:,} samples and {(fewer, fewer)} "
            f"for {fewer}: every sample is combined with every other, as (N, 1) and (N,) are by "
            f"broadcasting. Give both the shape (N,): model(x).squeeze(-1)."
        )


def _by_samples(
    graph: OutputGraph, samples: Samples, losses: Tensor, chunk: int | None
) -> list[Tensor] | None:
    """Each sample with parameters of its own; None where that is not what the whole batch gives.

    The losses are compared one by one, up to rounding of those of the usual size; then the rows.
    """
    batch = samples.tensors(len(losses))
    if not batch or not losses.numel():
        return None
    size, expected = chunk or _auto(graph, losses), losses.detach()
    # Not the mean: beside one that is much larger, the others count too.
    usual = float(expected.abs().median())
    rows: list[Tensor] = []
    try:
        for start in range(0, len(losses), size):
            part = slice(start, start + size)
            values, own = _chunk(graph, samples, [leaf[part] for leaf in batch], losses)
            if not agree(values.detach(), expected[part], usual, graph.leaves):
                return None
            gradients = _gradients(graph, values, own)
            if size >= len(losses):
                rows = gradients
                break
            rows = rows or [leaf.new_empty((*losses.shape, *leaf.shape)) for leaf in graph.leaves]
            for row, gradient in zip(rows, gradients, strict=True):
                row[part] = gradient
    except Exception as error:
        # no batching rule, Python that looks at values, a change in place, the batch's length
        if not is_fault(error):
            error.add_note(
                "hodiff: f was given one sample at a time, under torch.vmap. If f only takes the "
                "whole batch, the rows of hodiff.jacobian(lambda where: f(where, batch), where) "
                "are the same gradients."
            )
            raise
        return None
    finally:
        samples.whole()
    flat, by_row = rows, losses
    if losses.ndim > 1:  # as several numbers lie in memory
        flat, by_row = [row.transpose(0, 1).flatten(0, 1) for row in rows], losses.T.reshape(-1)
    return rows if _rows_add_up(graph, by_row, flat) else None


def _gradients(graph: OutputGraph, values: Tensor, own: list[Tensor]) -> list[Tensor]:
    """The gradients of samples' losses, by the parameters of each."""
    if values.ndim == 1:
        return _reverse.vjp(graph, [values], [None], inputs=own)
    numbers, units = values.shape[1], _factors.units([values])
    [(*_, stacked)] = _reverse.vjps(
        graph, [values], lambda *_: units, numbers, chunk_size=numbers, inputs=own
    )
    return [gradients.transpose(0, 1) for gradients in stacked]


def _chunk(
    graph: OutputGraph, samples: Samples, batch: list[Tensor], losses: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Some samples' losses, and the parameters of each, from which they were computed."""
    number, event = len(batch[0]), losses.shape[1:]
    own = [leaf.detach().expand(number, *leaf.shape).requires_grad_() for leaf in graph.leaves]

    def one(*given: Tensor) -> Tensor:
        samples.with_rows([row.unsqueeze(0) for row in given[len(own) :]], len(losses))
        return graph.context.at(given[: len(own)]).reshape(event)

    [values] = _reverse.batched(one, [*own, *batch])
    return values, own


def _rows_add_up(graph: OutputGraph, losses: Tensor, rows: list[Tensor]) -> bool:
    """Whether the rows of all samples, each counted as if of one size,
    add up to what the whole batch gives.
    """
    # In the order of memory: a pass may give rows whose dimensions are turned, and their sum takes
    # thirty times longer.
    orders = [sorted(range(1, row.ndim), key=row.stride, reverse=True) for row in rows]
    lines = [
        row.permute(0, *order).reshape(len(row), -1)
        for row, order in zip(rows, orders, strict=True)
    ]
    wide = reduce(torch.promote_types, (losses.dtype, *(row.dtype for row in rows)), torch.float32)
    # Named needlessly, it takes twice the time.
    types = [None if line.dtype == wide else wide for line in lines]
    norms = torch.stack(
        [
            torch.linalg.vector_norm(line, dim=1, dtype=dtype).to(losses.device)
            for line, dtype in zip(lines, types, strict=True)
        ]
    )
    weights = even_weights(torch.linalg.vector_norm(norms, dim=0))
    total = _reverse.vjp(graph, [losses], [weights.to(losses).reshape(losses.shape)], more=True)
    # about as large is a sum whose signs are random
    sizes = torch.linalg.vector_norm(norms * weights, dim=1)
    for line, whole, order, size in zip(lines, total, orders, sizes, strict=True):
        own = weights.to(line)
        if line.element_size() < 4:  # whose matrix products may add up in their own dtype
            added = (own.unsqueeze(1) * line).sum(0)
        else:
            with _settings.autocast(line.device.type):
                added = own @ line  # quicker than a sum
        expected = whole.permute([dim - 1 for dim in order]).reshape(-1)
        typical = float(size) / max(1, len(expected)) ** 0.5
        if not agree(added, expected, typical, graph.leaves):
            return False
    return True


def even_weights(norms: Tensor) -> Tensor:
    """Factors that make samples of these norms about as large as the usual one,
    none of them a multiple of another.
    """
    some = norms[norms > 0]
    usual = some.median() if some.numel() else norms.new_ones(())
    return (
        (_vectors.generic(len(norms)).to(norms) - 0.5)
        * usual
        / norms.clamp(min=usual * torch.finfo(norms.dtype).eps ** 0.5)
    )


def _auto(graph: OutputGraph, losses: Tensor) -> int:
    """The number of samples to take at once:
    as many as keep their gradients and activations within bounds.
    """
    largest, count = _nodes.largest_output(_nodes.survey([losses])), losses.shape[0]
    itemsize = max(map(Tensor.element_size, graph.leaves))
    if 8 * largest * itemsize <= _reverse.CHUNK_BYTES:
        return count  # the pass writes the result itself: chunks would be copied into it
    each = (
        8 * largest // count
        + 4 * sum(leaf.numel() for leaf in graph.leaves) * losses.shape[1:].numel()
    )
    return max(1, _reverse.CHUNK_BYTES // max(1, each * itemsize))
