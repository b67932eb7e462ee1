"""The gradients of several losses, each on its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _nodes, _reverse, _tree
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph
from hodiff._core._modules import Selection
from hodiff._core._where import Where
from hodiff.calculus._first import T, What
from hodiff.errors import GraphError, InputError
from hodiff.memory import _chunked

K = TypeVar("K")

Row = list[Tensor]
"""One loss's gradient by each leaf."""


class MultiGradOptions(TypedDict, total=False):
    """The options of `multi_grad`; for overloads alone."""

    shared: Callable[[Any], Any] | None
    create_graph: bool | None
    strict: bool | None
    release: bool


@overload
def multi_grad(
    losses: Sequence[What],
    where: nn.Module | Selection,
    *,
    return_used: Literal[False] = False,
    **options: Unpack[MultiGradOptions],
) -> list[dict[str, Tensor]]: ...


@overload
def multi_grad(
    losses: Sequence[What],
    where: T,
    *,
    return_used: Literal[False] = False,
    **options: Unpack[MultiGradOptions],
) -> list[T]: ...


@overload
def multi_grad(
    losses: Mapping[K, What],
    where: nn.Module | Selection,
    *,
    return_used: Literal[False] = False,
    **options: Unpack[MultiGradOptions],
) -> dict[K, dict[str, Tensor]]: ...


@overload
def multi_grad(
    losses: Mapping[K, What],
    where: T,
    *,
    return_used: Literal[False] = False,
    **options: Unpack[MultiGradOptions],
) -> dict[K, T]: ...


@overload
def multi_grad(
    losses: Sequence[What],
    where: Any,
    *,
    return_used: Literal[True],
    **options: Unpack[MultiGradOptions],
) -> tuple[list[Any], list[Any]]: ...


@overload
def multi_grad(
    losses: Mapping[K, What],
    where: Any,
    *,
    return_used: Literal[True],
    **options: Unpack[MultiGradOptions],
) -> tuple[dict[K, Any], dict[K, Any]]: ...


@overload
def multi_grad(
    losses: Any, where: Any, *, return_used: bool, **options: Unpack[MultiGradOptions]
) -> Any: ...


def multi_grad(
    losses: Sequence[What] | Mapping[Any, What],
    where: Any,
    *,
    shared: Callable[[Any], Any] | None = None,
    create_graph: bool | None = None,
    return_used: bool = False,
    strict: bool | None = None,
    release: bool = False,
) -> Any:
    r"""Each loss's own gradient, ∂Lᵢ/∂x for all i.

    The losses may share one graph of any structure: heads on a trunk, losses at different layers,
    skip connections, a parameter used by several. The results equal those of one pass per loss with
    the graph retained.

    Args:
        losses: Scalars (one element each) computed from `where`, whose graphs are left intact; or
            functions of `where`, evaluated one after the other, so that only one loss's graph is
            alive at a time. A sequence, or a mapping by name.
        where: A tensor, a container of tensors, a module (its trainable parameters), or `select`ed
            ones.
        shared: A function of `where`: the trunk, computed once. The losses are then functions of
            `(where, shared(where))`.
        create_graph: Whether the results can be differentiated again. None: only inside the
            function of another hodiff call.
        return_used: Whether to also return which tensors of *where* each loss depends on, as far as
            its graph shows. This distinguishes a gradient that vanishes from one that does not
            exist.
        strict: What to return for a tensor of *where* that a loss does not depend on. None: zeros,
            and an error if the loss depends on none. True: always an error. False: always zeros.
        release: Free each graph as it is used, as `backward()` would: what a loss saved is freed as
            soon as no further loss needs it, and a later use raises. For losses that are tensors;
            the graphs of functions are always freed.

    Returns:
        One result per loss, in a list or in a dict by the same names, each with the structure and
        shapes of `where`, and zeros for what the loss does not depend on. The results carry no
        graph, unless `create_graph` is True. With *return_used* `(gradients, used)`, where `used`
        has True or False for each tensor.

    Raises:
        InputError: No losses, a loss that is not a scalar, or tensors and functions mixed; `shared`
            for tensors; `release` for a result that keeps its graph.
        GraphError: One of the losses does not depend on `where` (unless `strict=False`), or the
            graph was freed before.

    Cost:
        One pass per loss; with `shared`, one per loss through its own part and one through the
        trunk. The peak memory is that of the forward pass with its graphs retained. `release=True`
        saves what retaining would keep beyond that, and leaves no graph. Functions with `shared`
        keep only one loss's own part at a time, which saves most.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> b = a**2
        >>> hodiff.multi_grad([b.sum(), b.prod()], a)
        [tensor([2., 4.]), tensor([8., 4.])]
        >>> hodiff.multi_grad({"sum": lambda a: a.sum(), "square": lambda a: a @ a}, a)
        {'sum': tensor([1., 1.]), 'square': tensor([2., 4.])}

    Reference:
        The cut between heads and trunk, which `shared` makes: Sener and Koltun, Multi-task learning
        as multi-objective optimization, 2018, https://arxiv.org/abs/1810.04650.
    """
    named = _named(losses)
    functions = _are_functions(named.values())
    release, return_used = (
        _arguments.is_set(release, "release"),
        _arguments.is_set(return_used, "return_used"),
    )
    strict = strict if strict is None else _arguments.is_set(strict, "strict")
    options = _Options(_call.recorded(create_graph), strict, return_used, [])
    if shared is not None and not functions:
        raise InputError(
            "shared: with it, losses are functions of (where, shared(where)), "
            "but these are tensors."
        )
    if release and options.create_graph:
        raise InputError(
            "release frees the graphs of the losses, which a differentiable result needs "
            "(create_graph=True, or a call inside the f of another hodiff call). Leave it out; if "
            "a constant is meant, pass create_graph=False."
        )
    point = Where(where, "where")
    if not functions:
        rows = _of_tensors(named, point, options, release)
    elif shared is None:
        rows = [_of_function(function, point, options) for function in named.values()]
    elif options.create_graph:
        rows = _together(named, point, shared, options)
    else:
        rows = _with_shared(named, point, shared, options)
    like = lambda values: (  # noqa: E731
        dict(zip(named, values, strict=True)) if isinstance(losses, Mapping) else values
    )
    gradients = like([point.result(_reverse.unaliased(row)) for row in rows])
    if not return_used:
        return gradients
    return gradients, like(
        [point.result([name not in missing for name in point.names]) for missing in options.unused]
    )


class _Options(NamedTuple):
    """Options, and the names of the tensors that each loss does not use,
    noted as they become known.
    """

    create_graph: bool
    strict: bool | None
    noting: bool
    unused: list[list[str]]

    @property
    def together(self) -> bool | None:
        """`strict=` for all losses at once, whose rule is for each by itself."""
        return False if self.strict is False else None

    def look(self, graph: OutputGraph, losses: Mapping[Any, Tensor]) -> None:
        """Look at the independence of each loss before any pass: where that is wanted,
        or no pass will tell.
        """
        if (
            self.strict
            or self.noting
            or (graph.create_graph and self.strict is None and len(losses) > 1)
        ):
            for name, loss in losses.items():
                self.note_missing(graph.unreached([loss]), name, len(graph.leaves))

    def filled(
        self, graph: OutputGraph, row: Sequence[Tensor | None], loss: Tensor, name: Any
    ) -> Row:
        """Zeros for what a pass did not reach; where that is all of it,
        a look at whether the loss leads there.
        """
        if self.strict is None and not self.noting and all(part is None for part in row):
            self.note_missing(graph.unreached([loss]), name, len(row))
        return _reverse.densified(row, graph.leaves)

    def note_missing(self, missing: list[str], name: Any, count: int) -> None:
        """Note which of so many leaves are missing in a loss, and raise where they may not be."""
        self.unused.append(missing)
        strict = "" if self.strict is None else "strict=True: "
        if missing and self.strict is not False and (strict or len(missing) == count):
            raise GraphError(
                f"{strict}losses[{name!r}] does not depend on {', '.join(missing)}."
                + (
                    ""
                    if strict
                    else " Was it detached, or computed from others? For zeros, pass strict=False."
                )
            )


def _named(losses: Any) -> dict[Any, Any]:
    """The losses by name; those of a list by number."""
    if not isinstance(losses, (Mapping, list, tuple)):
        raise InputError(
            f"losses: got {_arguments.kind(losses)}, expected a list, tuple or dict of losses."
        )
    if not losses:
        raise InputError("losses: got none, expected at least one.")
    return dict(losses if isinstance(losses, Mapping) else enumerate(losses))


def _are_functions(items: Collection[Any]) -> bool:
    wrong = next(
        (item for item in items if not isinstance(item, Tensor) and not callable(item)), None
    )
    if wrong is not None:
        raise InputError(
            f"losses: one is {_arguments.kind(wrong)}; expected scalar tensors, "
            "or functions of where."
        )
    kinds = {isinstance(item, Tensor) for item in items}
    if len(kinds) > 1:
        raise InputError("losses: got both tensors and functions; give one kind.")
    return kinds == {False}


def _scalar(loss: Any, name: Any) -> Tensor:
    loss = _arguments.check_output(loss, f"losses[{name!r}]")
    if loss.numel() != 1:
        raise InputError(f"losses[{name!r}] has shape {tuple(loss.shape)}, expected one element.")
    return loss


# --- tensors: the caller's graphs -----------------------------------------------------------------


def _of_tensors(
    losses: dict[Any, Any], point: Where, options: _Options, release: bool
) -> list[Row]:
    with OutputGraph(
        call(
            [*losses.values()],
            point,
            passes=1,
            create_graph=options.create_graph,
            strict=options.together,
        )
    ) as graph:
        scalars = {name: _scalar(loss, name) for name, loss in losses.items()}
        options.look(graph, scalars)
        return (_released if release else _whole)(graph, scalars, options)


def _whole(graph: OutputGraph, losses: Mapping[Any, Tensor], options: _Options) -> list[Row]:
    """One pass from each loss to the leaves, over a graph that stays."""
    if graph.create_graph:
        return [_reverse.vjp(graph, [loss], [None]) for loss in losses.values()]
    return [
        options.filled(graph, _bare(graph, [loss], graph.leaves, None, keep=True), loss, n)
        for n, loss in losses.items()
    ]


def _turns(losses: Sequence[Tensor]) -> list[tuple[int, set[_nodes.Node], bool]]:
    """The losses' numbers in the order of their turns; the nodes of each that no later turn needs.

    And whether those are all, but for leaves: then its pass may free them itself. The larger its
    graph, the sooner is the turn of a loss, and so the more can go early.
    """
    reached = [{*_nodes.survey([loss]).nodes} for loss in losses]
    turns: list[tuple[int, set[_nodes.Node], bool]] = []
    later: set[_nodes.Node] = set()
    for index in sorted(range(len(losses)), key=lambda index: len(reached[index])):
        nodes, shared = reached[index] - later, reached[index] & later
        turns.append((index, nodes, {*map(type, shared)} <= {_nodes.ACCUMULATE}))
        later |= nodes
    return turns[::-1]


def _released(graph: OutputGraph, named: Mapping[Any, Tensor], options: _Options) -> list[Row]:
    """One pass per loss; after each, what no later one needs is released."""
    from hodiff.graph import _saved

    names, losses = list(named), list(named.values())
    with _saved.without_modes():
        turns = _turns(losses)
    rows: dict[int, Row] = {}
    for number, nodes, alone in turns:
        gradients = _bare(graph, [losses[number]], graph.leaves, None, keep=not alone)
        rows[number] = options.filled(graph, gradients, losses[number], names[number])
        with _saved.without_modes():
            for node in nodes:
                if node.__class__ is not _nodes.ACCUMULATE:
                    _saved.release(node)
    return [rows[index] for index in range(len(losses))]


# --- functions: graphs of ours --------------------------------------------------------------------


def _of_function(function: Callable[[Any], Any], point: Where, options: _Options) -> Row:
    """One function's gradient; its graph is gone when the next begins."""
    with OutputGraph(
        call(function, point, passes=1, create_graph=options.create_graph, strict=options.strict)
    ) as graph:
        if options.noting:
            options.unused.append(graph.unreached(graph.tensors()))
        return _reverse.gradient(graph)


def _together(
    functions: dict[Any, Any], point: Where, shared: Callable[[Any], Any], options: _Options
) -> list[Row]:
    """All functions on one graph, which a differentiable result keeps."""

    def losses(argument: Any) -> list[Any]:
        trunk = shared(argument)
        return [_scalar(function(argument, trunk), name) for name, function in functions.items()]

    with OutputGraph(
        call(losses, point, passes=1, create_graph=True, strict=options.together)
    ) as graph:
        named = dict(zip(functions, graph.outputs, strict=True))
        options.look(graph, named)
        return _whole(graph, named, options)


def _with_shared(
    functions: dict[Any, Any], point: Where, shared: Callable[[Any], Any], options: _Options
) -> list[Row]:
    """The trunk once; then one head at a time on its detached value,
    and the trunk's pass for each.
    """
    with OutputGraph(
        call(shared, point, passes=1, create_graph=False, strict=options.together)
    ) as graph:
        trunk, leaves = graph.tensors(), graph.leaves
        live = [output for output in trunk if output.requires_grad]
        _, _, tree = _tree.flatten(graph.outputs)
        argument = point.argument(leaves)
        heads = []
        for name, function in functions.items():
            cut = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in trunk]
            loss = _scalar(function(argument, _tree.rebuild(tree, iter(cut))), name)
            graph.unreached([loss], cut)  # which raises where it uses what it was not given
            inputs = [*leaves, *(tensor for tensor in cut if tensor.requires_grad)]
            heads.append(_bare(graph, [loss], inputs, None, keep=False))
            del loss  # and its graph, before the next one is made
        rows = []
        for name, head in zip(functions, heads, strict=True):
            by_trunk = zip(live, head[len(leaves) :], strict=True)
            pairs = [(output, by) for output, by in by_trunk if by is not None]
            outputs, cotangents = [output for output, _ in pairs], [by for _, by in pairs]
            below = _bare(graph, outputs, leaves, cotangents, keep=head is not heads[-1])
            row = _chunked.plus(head[: len(leaves)], below)
            options.note_missing(
                [n for n, part in zip(point.names, row, strict=True) if part is None],
                name,
                len(row),
            )
            rows.append(_reverse.densified(row, leaves))
        return rows


def _bare(
    graph: OutputGraph,
    outputs: list[Tensor],
    inputs: list[Tensor],
    cotangents: list[Tensor] | None,
    *,
    keep: bool,
) -> Sequence[Tensor | None]:
    """One pass of the engine; nothing from outputs that carry no graph."""
    if not any(output.requires_grad for output in outputs):
        return [None] * len(inputs)
    ones = cotangents or [torch.ones_like(output) for output in outputs]
    return _reverse.vjp_between(outputs, inputs, ones, keep=keep, recorded=graph.recorded)
