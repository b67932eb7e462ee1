"""Reverse passes: the only caller of PyTorch's engine, the only one who decides what is kept.

Two questions are asked of each pass. Does another pass of ours follow over the same graph (`more`)?
And is its result differentiated by a pass of ours (`differentiated`)? What is kept then is one
rule, `_keep`: also where the result is differentiable, where an operator holds on to the graph, or
where it is the caller's. Nothing else in the library knows `retain_graph`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hodiff._core import (
    _arguments,
    _messages,
    _nodes,
    _refusals,
    _settings,
    _tree,
    _versions,
)
from hodiff._core._faults import interrupt_behind, is_fault
from hodiff._core._graph import OutputGraph
from hodiff.errors import GraphError

__all__ = [
    "CHUNK_BYTES",
    "auto_chunk",
    "basis",
    "batched",
    "blocks",
    "check_fits",
    "densified",
    "derivative",
    "fitting",
    "gradient",
    "has_second_derivatives",
    "jvp",
    "products",
    "search_block",
    "transposed_product",
    "unaliased",
    "vjp",
    "vjp_between",
    "vjps",
    "warned_if_not_finite",
    "writable",
]

Cotangents = Callable[[int, int], list[Tensor]]
"""Makes the cotangents of the vectors from `start` to `stop`,
stacked along a new first dimension.
"""


CHUNK_BYTES = 64 * 2**20

_cleared: dict[bool, set[type]] = {False: set(), True: set()}
"""Classes of nodes whose gradients were found to have further derivatives, second ones, and third
ones (True).

Graphs of nothing else need no second search."""


_without_functions: set[type] = set()
"""Classes of nodes that are no Python `autograd.Function`'s, but of ours."""


def vjp(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    more: bool = False,
    differentiated: bool = False,
    inputs: Sequence[Tensor] | None = None,
    missed: set[int] | None = None,
) -> list[Tensor]:
    """A vector-Jacobian product, Jᵀu with J = ∂f/∂x.

    The numbers of those that the engine had nothing for are added to `missed`.

    Where the result is differentiated, by us or by the caller, its graph is searched for operations
    that have no further derivative, before that is paid for.
    """
    inputs = graph.leaves if inputs is None else inputs
    build = differentiated or graph.create_graph
    for output in outputs:
        if not output.requires_grad:
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
            if not pairs:
                return joined_to_leaves(graph, [torch.zeros_like(leaf) for leaf in inputs])
            outputs, cotangents = [o for o, _ in pairs], [c for _, c in pairs]
            break
    keep = build or more or graph.keeps
    bare = _engine_pass(
        outputs, cotangents, inputs, keep=keep, build=build, recorded=graph.recorded
    )
    if missed is not None:
        missed.update(number for number, part in enumerate(bare) if part is None)
    gradients = densified(bare, inputs)
    if build and not graph.kinds <= _cleared[graph.call.order >= 3]:
        _search(
            graph,
            outputs,
            gradients,
            inputs,
            product=any(u is not None and u.requires_grad for u in cotangents),
        )
    if graph.create_graph:
        gradients = joined_to_leaves(graph, gradients)
        _nodes.mark_results(gradients)
    return gradients


def gradient(
    graph: OutputGraph, *, differentiated: bool = False, missed: set[int] | None = None
) -> list[Tensor]:
    """The gradient of the scalar output (of each sample's scalar) by the leaves;
    `missed` as for `vjp`.
    """
    gradients = vjp(graph, [graph.scalars()], [None], differentiated=differentiated, missed=missed)
    if differentiated:  # again, so that it need not be copied
        return gradients
    gradients = unaliased(gradients)
    return (
        warned_if_not_finite(graph, gradients)
        if graph.higher and not graph.create_graph
        else gradients
    )


def products(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    vectors: Sequence[Tensor],
    count: int | None,
    *,
    chunk_size: int | None,
    inputs: list[Tensor] | None = None,
) -> list[Tensor]:
    """The last pass, for one vector (`count` None) or for `count` of them stacked."""
    vectors = writable(graph, vectors)
    if count is None:
        results = unaliased(vjp(graph, outputs, vectors, inputs=inputs), vectors)
        return warned_if_not_finite(graph, results, vectors) if graph.higher else results
    inputs = graph.leaves if inputs is None else inputs
    rows = lambda start, stop: [vector[start:stop] for vector in vectors]  # noqa: E731
    return stacked(
        graph,
        vjps(graph, outputs, rows, count, chunk_size=chunk_size, inputs=inputs),
        count,
        inputs,
    )


def writable(graph: OutputGraph, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Vectors for a pass through Functions that may write into what they are given;
    and none of inference mode.
    """
    if not graph.kinds <= _without_functions:
        _without_functions.update(
            k for k in graph.kinds if not _nodes.is_function(k) or _is_ours(k)
        )
    copied = not graph.kinds <= _without_functions
    if not copied and not any(map(Tensor.is_inference, vectors)):
        return vectors
    return [v.clone() if copied or v.is_inference() else v for v in vectors]


def jvp(
    graph: OutputGraph,
    outputs: list[Tensor],
    tangents: list[Tensor],
    count: int | None,
    *,
    chunk_size: int | None,
) -> list[Tensor]:
    """A Jacobian-vector product, J v with J = ∂f/∂x: a directional derivative."""
    # Ones, though any u would do: the backward of logcumsumexp takes the logarithm of u.
    cotangents = [torch.ones_like(output, requires_grad=True) for output in outputs]
    pulled = transposed_product(graph, outputs, cotangents)
    return products(graph, pulled, tangents, count, chunk_size=chunk_size, inputs=cotangents)


def transposed_product(
    graph: OutputGraph, outputs: list[Tensor], cotangents: list[Tensor]
) -> list[Tensor]:
    """J'u as a function of u, whose derivative is J v.

    The backward of a Python Function may cut it off from u (by a detach, by NumPy), and J v would
    miss its part. That is seen where J'u is no longer linear in u: <u, J J'u> is then not |J'u|^2.
    """
    if not graph.create_graph:
        graph.context.unheld = {}  # no second derivative by the point: what follows is seen here
    pulled = vjp(graph, outputs, cotangents, differentiated=True)
    functions = [kind for kind in graph.kinds if _nodes.is_function(kind) and not _is_ours(kind)]
    if not functions:
        return pulled
    given = [part.detach() for part in pulled]
    layout = graph.call.where.layout
    squares = [part.double().square().sum() for part in given]
    expected = float(sum(squares) if layout is None else layout.total(squares))
    back = (
        vjp(graph, pulled, given, differentiated=True, inputs=cotangents)
        if any(part.requires_grad for part in pulled)
        else [torch.zeros_like(u) for u in cotangents]
    )
    squared = sum(
        float((u.detach().double() * part.detach()).sum())
        for u, part in zip(cotangents, back, strict=True)
    )
    if layout is not None:
        squared = float(layout.mean(torch.tensor(squared, device=given[0].device)))
    if abs(squared - expected) > 10 * torch.finfo(given[0].dtype).eps ** 0.5 * expected:
        names = ", ".join(sorted(kind.__name__.removesuffix("Backward") for kind in functions))
        raise GraphError(
            f"J v is the derivative of J'u with respect to u, and an autograd.Function cuts J'u "
            f"off from u: the backward of one of {names} detaches its argument, or leaves torch. "
            f"Write that backward in differentiable operations. (hodiff.vjp and hodiff.jacobian "
            f"work without that.)"
        )
    return pulled


def derivatives_along(
    graph: OutputGraph, cotangents: Sequence[Tensor], direction: Sequence[Tensor], count: int
) -> list[list[Tensor]]:
    """The gradient of the outputs, weighed, its derivative along a direction, and so on;
    the graph stays.
    """
    outputs, results = graph.tensors(), list[list[Tensor]]()
    for more in reversed(range(count)):
        given = [u.clone() for u in cotangents]  # a Function may write into them
        outputs = vjp(graph, outputs, given, more=True, differentiated=more > 0)
        results += [[part.detach() for part in outputs]]
        cotangents = direction
    return results


def _is_ours(kind: type) -> bool:
    return _versions.function_of(kind).__module__.startswith("hodiff.")


def vjps(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    cotangents: Cotangents,
    count: int,
    *,
    chunk_size: int | None,
    more: bool = False,
    inputs: list[Tensor] | None = None,
) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Passes for `count` vectors, some at a time: `(start, stop, results)` with results stacked.

    Chunks go through `torch.vmap`; where an operation has no batching rule, or a wrong one, one
    vector at a time. An automatic chunk is halved when a CUDA device runs out of memory.
    """
    inputs = graph.leaves if inputs is None else inputs
    live = [index for index, output in enumerate(outputs) if output.requires_grad]
    outputs = [outputs[index] for index in live]
    survey = _nodes.survey(outputs)
    size = chunk_size or min(max(count, 1), auto_chunk(survey, inputs))
    if not live:
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield start, stop, [leaf.new_zeros((stop - start, *leaf.shape)) for leaf in inputs]
        return
    batched, start = next(survey.named(*_versions.BATCHED_WRONGLY), None) is None, 0
    batched = batched and not (graph.create_graph and _refusals.has_norm_weights(survey, inputs))
    del survey  # the last pass frees
    while start < count:
        stop = min(start + size, count)
        chunk = cotangents(start, stop)
        chunk = [chunk[index] for index in live]
        another = more or stop < count
        keep = start == 0 or another or graph.keeps  # the first may find no batching rule
        try:
            if batched and stop - start > 1:
                products = _vjps_batched(graph, outputs, chunk, inputs, keep=keep)
            else:
                products = _vjps_one_by_one(graph, outputs, chunk, inputs, more=another)
        except torch.OutOfMemoryError:
            if chunk_size or size == 1 or not keep:  # a pass that frees has freed a part
                raise
            size = (size + 1) // 2
            continue
        except GraphError:
            raise
        except Exception as error:  # an operation without a batching rule, or a rule that fails
            if not batched or stop - start == 1 or not is_fault(error):
                raise
            batched = False
            continue
        if graph.create_graph and not start and not graph.kinds <= _cleared[graph.call.order >= 3]:
            _search(graph, outputs, products, inputs)
        products = unaliased(products, chunk)
        if graph.create_graph:
            _nodes.mark_results(products)
        done = [(start, stop, products)]
        del products, chunk
        yield done.pop()  # which nothing here holds while the next are made
        start = stop


def stacked(
    graph: OutputGraph,
    chunks: Iterator[tuple[int, int, list[Tensor]]],
    count: int,
    inputs: list[Tensor],
) -> list[Tensor]:
    """All results of `vjps`, stacked; written in place where nothing needs their graph."""
    if graph.create_graph:
        parts = [products for _, _, products in chunks] or [
            [leaf.new_zeros((0, *leaf.shape)) for leaf in inputs]
        ]
        whole = (
            parts[0]
            if len(parts) == 1
            else [torch.cat(column) for column in zip(*parts, strict=True)]
        )
        return joined_to_leaves(graph, whole)
    results: list[Tensor] = []
    for start, stop, products in chunks:
        if stop - start == count:
            return warned_if_not_finite(graph, products)
        if not results:
            results = [part.new_empty((count, *part.shape[1:])) for part in products]
        for result, part in zip(results, products, strict=True):
            result[start:stop] = part
            del part  # before the next chunk is made
        del products
    return warned_if_not_finite(
        graph, results or [leaf.new_zeros((0, *leaf.shape)) for leaf in inputs]
    )


def auto_chunk(graph: _nodes.Survey, inputs: Sequence[Tensor]) -> int:
    """The number of vectors for one batched pass:
    as many as keep its temporaries within `CHUNK_BYTES`.
    """
    if not graph.kinds:
        return 1 << 20
    result = sum(leaf.numel() for leaf in inputs)
    return fitting(
        _nodes.largest_output(graph),
        result,
        max(map(Tensor.element_size, inputs)),
        inputs[0].device,
    )


def fitting(largest: int, elements: int, itemsize: int, device: torch.device) -> int:
    """The number of vectors of `elements` that fit,
    where the largest tensor of a pass has so many elements itself.
    """
    fit = CHUNK_BYTES // max(1, (4 * largest + 6 * elements) * itemsize)
    # Large vectors fill a device one by one, and a processor's caches soon: then batching them
    # costs time.
    least = 12 if device.type == "cpu" else 8
    return fit if fit >= least else 1


def has_second_derivatives(graph: OutputGraph) -> bool:
    """Whether all operations have one, as far as is known: no Python Function,
    none that PyTorch lacks it of.
    """
    return graph.kinds <= _cleared[False] or all(
        _is_harmless(kind, third=False) for kind in graph.kinds
    )


def _is_harmless(kind: type, *, third: bool) -> bool:
    if third and any(
        piece in kind.__name__ for piece in ("LayerNorm", "BatchNorm", "InstanceNorm")
    ):
        return False
    return not _nodes.is_function(kind) and _messages.way_out(kind.__name__) is None


def _engine_pass(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    *,
    keep: bool,
    build: bool,
    device: str = "",
    recorded: bool = False,
) -> Sequence[Tensor | None]:
    """One reverse pass, without autocast (a backward pass has its own precision: that of the
    forward).

    Args:
        recorded: Whether it is recorded even where its result is detached (`build` false).
    """
    if recorded and not build:
        gradients = _engine_pass(outputs, cotangents, inputs, keep=keep, build=True, device=device)
        return [part if part is None else part.detach() for part in gradients]
    try:
        device = device or inputs[0].device.type
        if torch.is_autocast_enabled(device):
            with _settings.autocast(device):
                return _versions.grad(outputs, inputs, cotangents, keep=keep, build=build)
        return _versions.grad(outputs, inputs, cotangents, keep=keep, build=build)
    except (RuntimeError, NotImplementedError) as error:
        ours = _messages.engine_error(error)
        if ours is None:
            raise
        raise ours from error


def vjp_between(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Tensor],
    *,
    keep: bool,
    build: bool = False,
    recorded: bool = False,
) -> Sequence[Tensor | None]:
    """One bare pass, between tensors or edges of a graph, for whoever knows what to keep."""
    options: Any = {"keep": keep, "build": build, "recorded": recorded}
    return _engine_pass(outputs, cotangents, inputs, device=cotangents[0].device.type, **options)


def _vjps_batched(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: list[Tensor],
    *,
    keep: bool,
) -> list[Tensor]:
    """One pass for several vectors at once."""

    def one(*vectors: Tensor) -> tuple[Tensor, ...] | Tensor:
        products = _engine_pass(
            outputs, vectors, inputs, keep=keep, build=graph.create_graph, recorded=graph.recorded
        )
        products = densified(products, inputs)
        # vmap is quicker with a bare tensor
        return products[0] if len(products) == 1 else tuple(products)

    return batched(one, cotangents)


def _vjps_one_by_one(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: list[Tensor],
    *,
    more: bool,
) -> list[Tensor]:
    """One pass per vector; the very last one frees, unless there are `more`."""
    count = cotangents[0].shape[0]
    rows = []
    for index in range(count):
        vectors, keep = (
            [_row(each, index) for each in cotangents],
            more or index < count - 1 or graph.keeps,
        )
        products = _engine_pass(
            outputs, vectors, inputs, keep=keep, build=graph.create_graph, recorded=graph.recorded
        )
        rows.append(densified(products, inputs))
    if count == 1:
        # large vectors come one by one: no copy of them
        return [part.unsqueeze(0).contiguous() for part in rows[0]]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _row(cotangents: Tensor, index: int) -> Tensor:
    """One of them; what begins at an odd place, PyTorch cannot see as pairs of reals,
    which complex numbers are.
    """
    row = cotangents[index]
    return row.clone() if row.layout is torch.strided and row.storage_offset() % 2 else row


def derivative(output: Tensor, by: Tensor) -> Tensor:
    """The derivative of the sum of `output`, itself differentiable,
    in a graph that belongs to no evaluation.
    """
    if not output.requires_grad:
        return torch.zeros_like(by)
    return densified(
        _engine_pass([output], [torch.ones_like(output)], [by], keep=True, build=True), [by]
    )[0]


def batched(
    function: Callable[..., tuple[Tensor, ...] | Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """`function` of each of the stacked vectors, in one batch;
    what it draws at random is drawn once for all.
    """
    entered = _versions.transforms()
    try:
        return _versions.mapped(function, vectors)
    except BaseException as error:
        # between two of its own lines it leaves a level on
        _versions.leave_levels(len(entered or ()))
        behind = interrupt_behind(error)
        if behind is not None and behind is not error:
            raise behind from None
        raise


def _search(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    product: bool = False,
) -> None:
    """Raise where a gradient that is differentiated cannot be;
    what was once searched through is `_cleared`.
    """
    third = graph.call.order >= 3
    _refuse_missing(outputs, gradients, inputs, third=third, product=product)
    if graph.context.unheld:
        from hodiff._core import _python_functions

        _python_functions.hold(graph, derivatives_along)
    hiding = {kind for kind in graph.kinds if kind.__name__ in _messages.HIDING}
    if hiding and outputs[0] is graph.tensors()[0]:
        _refusals.refuse_hidden(
            _nodes.survey(outputs),
            _nodes.survey(gradients),
            inputs,
            graph.call.order,
            given=not graph.call.builds_graph,
        )
    _cleared[third].update(kind for kind in graph.kinds - hiding if _is_harmless(kind, third=third))


def search_block(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], inputs: Sequence[Tensor], order: int
) -> None:
    """Raise where a block's gradient, in a graph of its own, has no derivative."""
    kinds = frozenset(_nodes.survey(outputs).kinds)
    if not kinds <= _cleared[order >= 3]:
        call = SimpleNamespace(order=order, builds_graph=True)
        context = SimpleNamespace(unheld={})
        graph: Any = SimpleNamespace(
            call=call, kinds=kinds, tensors=lambda: outputs, context=context
        )
        _search(graph, outputs, gradients, inputs)


def _refuse_missing(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    third: bool,
    product: bool = False,
) -> None:
    """Raise where the graph of a gradient cannot be differentiated (rightly) once more; `product`:
    for J v.
    """
    survey = _nodes.survey(gradients)
    for name, row in _refusals.THIRD.items() if third else ():
        row(3, [*survey.named(name)], inputs)
    if any(map(_nodes.is_function, survey.kinds)):
        from hodiff._core._python_functions import refuse_without_backward

        refuse_without_backward(survey, inputs)
    bad = list(survey.named("NotImplemented", "Error", *_messages.UNMARKED))
    if not bad or not _nodes.reaches(bad, inputs):
        return
    named = [type(node).__name__ for node in bad if _messages.way_out(type(node).__name__)]
    if not named:  # the marker is anonymous: the operation is known from the graph before
        forward = _nodes.survey(outputs).names()
        named = sorted(name for name in forward if _messages.way_out(name)) or sorted(
            forward - {"AccumulateGrad"}
        )
    raise _messages.missing(named, product=product)


# --- results: dense, each in memory of its own, finite, connected to the point --------------------


def densified(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for what is missing, and dense tensors throughout (an embedding may give sparse ones).

    In memory of their own: the second derivative of a maximum norm is zeros that have none, and
    nobody can change.
    """
    dense: list[Any] = [*gradients]
    if None.__class__ in map(type, gradients) or not _DENSE.issuperset(map(_layout, gradients)):
        for number, (part, leaf) in enumerate(zip(gradients, inputs, strict=True)):
            if part is None:
                dense[number] = torch.zeros_like(leaf)
            elif part.layout is not leaf.layout:
                dense[number] = part.to_dense()
    if any(map(_versions.lacks_memory, dense)):
        return [part.clone() if _versions.lacks_memory(part) else part for part in dense]
    return dense


_DENSE, _layout = frozenset((torch.strided,)), attrgetter("layout")


def joined_to_leaves(graph: OutputGraph, gradients: list[Tensor]) -> list[Tensor]:
    """A differentiable result that came out constant is still a function of the point: its
    derivative is zero.

    The gradient of a linear function carries no graph in PyTorch, and a second `grad` of it would
    fail. The sum of none of a leaf's entries is 0, and depends on the leaf.
    """
    if not graph.create_graph:
        return gradients
    for part in gradients:
        if not part.requires_grad:
            break
    else:
        return gradients
    callers = [
        leaf for leaf in graph.leaves if not graph.call.builds_graph or leaf.grad_fn is not None
    ]
    if not callers:
        return gradients
    nothing = torch.stack([leaf.reshape(-1)[:0].sum().to(callers[0]) for leaf in callers]).sum()
    return [part if part.requires_grad else part + nothing.to(part) for part in gradients]


def unaliased(results: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    """Results that share no memory, so that each may be written into.

    The engine passes one tensor on to both parts of a sum, and spreads one number over all entries
    of another; and the derivative of a linear function may be the vector itself, or a view of it.
    """
    if not vectors and len(results) == 1 and 0 not in results[0].stride():  # as often
        return results
    tensors = [*vectors, *results]
    try:
        memories: list[Any] = [*map(_storage, map(Tensor.untyped_storage, tensors))]
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        memories = [*map(_tree.memory_of, tensors)]
    if len({*memories}) == len(memories) and 0 not in chain.from_iterable(
        map(Tensor.stride, results)
    ):
        return results
    return _copied(results, memories[len(vectors) :], {*memories[: len(vectors)]})


_storage = attrgetter("_cdata")


def _copied(results: list[Tensor], memories: list[Any], taken: set[Any]) -> list[Tensor]:
    """Results, copied where their memory is taken, or holds one number for several entries."""
    result: list[Tensor] = []
    for part, memory in zip(results, memories, strict=True):
        spread = any(
            step == 0 and length > 1 for step, length in zip(part.stride(), part.shape, strict=True)
        )
        result += [
            part.clone(memory_format=torch.contiguous_format) if spread or memory in taken else part
        ]
        taken |= {memory}
    return result


def warned_if_not_finite(
    graph: OutputGraph,
    results: list[Tensor],
    vectors: Sequence[Tensor] = (),
) -> list[Tensor]:
    """The results; with a warning where a derivative of higher order does not exist.

    Not on other devices than the processor, where to look is to wait.
    """
    if not graph.higher or graph.create_graph or _settings.tracing():
        return results
    small, large = results, []
    if not all(map(_is_cpu, results)) or max(map(_nbytes, results), default=0) > _SMALL:
        small = [part for part in results if part.is_cpu and part.nbytes <= _SMALL]
        large = [part for part in results if part.is_cpu and part.nbytes > _SMALL]
    if len(small) > 1:  # one sum for all small ones, whose calls are what it costs
        small = [torch.cat([*map(torch.ravel, small)])]
    for part in small + large:
        # a sum may overflow where no entry does
        if not (math.isfinite(part.sum()) or bool(part.isfinite().all())):
            given = [*graph.leaves, *graph.tensors(), *vectors]
            if all(bool(tensor.detach().isfinite().all()) for tensor in given):
                from hodiff._core._values import warn_of_non_finite

                warn_of_non_finite(graph.kinds)
            break
    return results


_SMALL = 2**15
"""Bytes."""
_is_cpu, _nbytes = attrgetter("is_cpu"), attrgetter("nbytes")


# --- dense blocks of a Jacobian, row by row: the common part of `jacobian`, `hessian` and the like


def blocks(
    graph: OutputGraph,
    outputs: Sequence[Tensor],
    *,
    chunk_size: int | None,
    inputs: list[Tensor] | None = None,
) -> list[list[Tensor]]:
    """Each output by each input: derivatives shaped `(*batch, *output event, *input event)`."""
    inputs = graph.leaves if inputs is None else inputs
    table = []
    for index, output in enumerate(outputs):
        count, rows = basis(output, graph.call.batch_ndim)
        more = index < len(outputs) - 1
        chunks = vjps(graph, [output], rows, count, chunk_size=chunk_size, more=more, inputs=inputs)
        row = stacked(graph, chunks, count, inputs)
        table.append(
            [
                _ordered(part, output, leaf, graph.call.batch_ndim)
                for part, leaf in zip(row, inputs, strict=True)
            ]
        )
    return table


def check_fits(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], batch_ndim: int, way_out: str
) -> None:
    """Raise for a table of derivatives that is larger than the memory of its device."""
    batch = outputs[0].shape[:batch_ndim].numel()
    rows = sum(output.shape[batch_ndim:].numel() for output in outputs)
    columns = sum(leaf.shape[batch_ndim:].numel() for leaf in inputs)
    _arguments.check_room(
        "x: the result", [*[batch][:batch_ndim], rows, columns], inputs[0], way_out
    )


def basis(output: Tensor, batch_ndim: int) -> tuple[int, Cotangents]:
    """The unit vectors of one sample's event, the same for every sample: their number,
    and how to make some.
    """
    batch, event = output.shape[:batch_ndim], output.shape[batch_ndim:]
    count = event.numel()

    def rows(start: int, stop: int) -> list[Tensor]:
        size = stop - start
        units = output.new_zeros((size, count))
        units.diagonal(start).fill_(1)  # a view that PyTorch's tracers follow
        return [units.reshape((size, *[1] * batch_ndim, *event)).expand((size, *batch, *event))]

    return count, rows


def _ordered(stacked: Tensor, output: Tensor, leaf: Tensor, batch_ndim: int) -> Tensor:
    """Move the rows: from (rows, *batch, *input event) to (*batch, *output event, *input event)."""
    batch, event = leaf.shape[:batch_ndim], leaf.shape[batch_ndim:]
    if batch_ndim:
        stacked = stacked.movedim(0, batch_ndim)
    return stacked.reshape((*batch, *output.shape[batch_ndim:], *event))
