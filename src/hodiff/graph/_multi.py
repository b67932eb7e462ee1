"""The gradients of several losses, each on its own, in the memory of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hodiff._core import _checks, _nodes, _reverse, _tree
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._nodes import Node
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.graph import _inspect, _predict, _release, _saved

METHODS = ("auto", "release", "cut", "sequential", "retain")

Rows = list[list[Tensor | None]]


def multi_grad(
    losses: Sequence[Any] | Mapping[Any, Any],
    where: Any,
    *,
    method: str = "auto",
    shared: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> Any:
    r"""Each loss's own gradient, \(\partial L_i / \partial x\) for all i, without retaining everything to the end.

    For losses on one graph, of any topology: heads on a trunk, losses at different layers, skips, a
    parameter used by several. The results are those of one pass per loss with the graph retained.

    **It spends the graph**, as `backward()` does: what the losses saved is freed as soon as no further
    loss needs it (a later use raises, in our words). `method="retain"` frees nothing.

    Args:
        losses: Scalars (one element each) computed from `where`; or functions of `where`, which are
            then evaluated here. A sequence, or a mapping by name.
        where: A tensor, a container of tensors, a module (its trainable parameters), or `select`ed ones.
        method: How.

            * `"cut"`: the losses' own parts are run down to the shared part, and freed; then the shared
              part once per loss. A loss of which one shared edge lies below another falls back to release.
            * `"release"`: one pass per loss; after each, what only it needed is released.
            * `"sequential"`: for functions: one after the other, so that one loss's graph is alive at a
              time. With `shared`, the shared part is computed once and each function gets its value.
            * `"retain"`: one pass per loss, nothing is freed.
            * `"auto"`: sequential for functions, else cut.
        shared: A function of `where`: the trunk. The losses are then functions of `(where, shared(where))`.
        strict: Raise if one of the losses does not depend on one of the tensors of *where*.

    Returns:
        One result per loss, in a list or in a dict by the same names; each like `where`, with its shapes.
        What a loss does not depend on is zeros. The results carry no graph.

    Raises:
        InputError: No losses, a loss that is no scalar, an unknown method, functions where tensors are
            needed, or the reverse.
        GraphError: No loss depends on `where`, or the graph was freed before.

    Cost:
        One pass per loss through its own part, and one per loss through the shared part. The peak is
        about that of the forward: cut and release save what retaining all would keep beyond it (some
        10 %), and leave nothing. Sequential keeps one loss's own part at a time, the largest saving.

    Examples:
        >>> import torch, hodiff
        >>> a = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> b = a**2
        >>> hodiff.multi_grad([b.sum(), b.prod()], a)
        [tensor([2., 4.]), tensor([8., 4.])]
        >>> hodiff.multi_grad({"sum": lambda a: a.sum(), "square": lambda a: a @ a}, a)
        {'sum': tensor([1., 1.]), 'square': tensor([2., 4.])}

    Reference:
        The single cut between heads and trunk: Sener and Koltun, Multi-task learning as multi-objective
        optimization, 2018, https://arxiv.org/abs/1810.04650.
    """
    names, items = _items(losses)
    if method not in METHODS:
        raise InputError(f"method: is {method!r}, expected one of {', '.join(map(repr, METHODS))}.")
    functions = _are_functions(items)
    if shared is not None and not functions:
        raise InputError("shared: is for losses that are functions of (where, shared(where)); these are tensors.")
    if method == "sequential" and not functions:
        raise InputError(
            "method='sequential': evaluates the losses one after the other, so it needs functions; these are tensors, "
            "computed already. Give functions of where, or use method='cut'."
        )
    point = Where(where, "where")
    if functions and shared is not None:
        rows = _with_shared(items, point, shared, strict)
    elif functions and method in ("auto", "sequential"):
        rows = [_one(function, point, strict) for function in items]
    elif functions:
        rows = _together(items, point, method, strict)
    else:
        with Graph(call(list(items), point, passes=1, create_graph=False, strict=strict)) as ev:
            rows = _passes(_scalars(ev.outputs, names), ev.leaves, method)
    results = [point.result(_reverse.own(_filled(row, point.tensors))) for row in rows]
    return dict(zip(names, results, strict=True)) if isinstance(losses, Mapping) else results


def _items(losses: Any) -> tuple[list[Any], list[Any]]:
    if isinstance(losses, Mapping):
        names, items = list(losses), list(losses.values())
    elif isinstance(losses, (list, tuple)):
        names, items = list(range(len(losses))), list(losses)
    else:
        raise InputError(f"losses: is a {type(losses).__name__}; expected a list, tuple or dict of losses.")
    if not items:
        raise InputError("losses: is empty.")
    return names, items


def _are_functions(items: list[Any]) -> bool:
    kinds = {isinstance(item, Tensor) for item in items}
    if len(kinds) > 1:
        raise InputError("losses: tensors and functions are mixed; give one kind.")
    if kinds == {False} and not all(callable(item) for item in items):
        raise InputError(f"losses: holds a {type(items[0]).__name__}; expected scalar tensors, or functions of where.")
    return kinds == {False}


def _scalars(outputs: Sequence[Any], names: Sequence[Any]) -> list[Tensor]:
    found = []
    for output, name in zip(outputs, names, strict=True):
        output = _checks.check_output(output, f"losses[{name!r}]")
        if output.numel() != 1:
            raise InputError(f"losses[{name!r}]: has shape {tuple(output.shape)}, expected one element.")
        found.append(output)
    return found


def _filled(row: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(leaf) if part is None else part.detach() for part, leaf in zip(row, tensors, strict=True)]


def _one(function: Callable[[Any], Any], point: Where, strict: bool) -> list[Tensor | None]:
    """One function's gradient; its graph is gone when the next begins."""
    with Graph(call(function, point, passes=1, create_graph=False, strict=strict)) as ev:
        return list(_reverse.gradient(ev))


def _together(functions: list[Any], point: Where, method: str, strict: bool) -> Rows:
    """All functions evaluated first, on one graph of ours."""
    together = lambda x: [function(x) for function in functions]  # noqa: E731
    with Graph(call(together, point, passes=1, create_graph=False, strict=strict)) as ev:
        return _passes(_scalars(ev.outputs, range(len(functions))), ev.leaves, method)


def _with_shared(functions: list[Any], point: Where, shared: Callable[[Any], Any], strict: bool) -> Rows:
    """The trunk once; then one head at a time on its detached value, and the trunk's pass for each."""
    with Graph(call(shared, point, passes=1, create_graph=False, strict=strict)) as ev:
        trunk = ev.tensors()
        _, _, tree = _tree.flatten(ev.outputs)
        argument = point.argument(ev.leaves)
        rows: Rows = []
        pulled: list[list[Tensor | None]] = []
        for index, function in enumerate(functions):
            cut = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in trunk]
            (loss,) = _scalars([function(argument, _tree.rebuild(tree, iter(cut)))], [index])
            inputs = [*ev.leaves, *(tensor for tensor in cut if tensor.requires_grad)]
            found = (
                _bare([loss], inputs, [torch.ones_like(loss)], keep=False)
                if loss.requires_grad
                else [None] * len(inputs)
            )
            rows.append(list(found[: len(ev.leaves)]))
            pulled.append(list(found[len(ev.leaves) :]))
            del loss
        outputs = [tensor for tensor in trunk if tensor.requires_grad]
        for index, (row, cotangents) in enumerate(zip(rows, pulled, strict=True)):
            keep = index < len(rows) - 1
            rows[index] = _added(row, _trunk(outputs, cotangents, ev.leaves, keep))
        return rows


def _trunk(
    outputs: list[Any], cotangents: Sequence[Tensor | None], leaves: list[Tensor], keep: bool
) -> list[Tensor | None]:
    pairs = [(out, cotangent) for out, cotangent in zip(outputs, cotangents, strict=True) if cotangent is not None]
    if not pairs:
        return [None] * len(leaves)
    return list(_bare([out for out, _ in pairs], leaves, [cotangent for _, cotangent in pairs], keep=keep))


def _added(row: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(row, other, strict=True)]


def _bare(outputs: list[Any], inputs: list[Any], cotangents: list[Tensor], *, keep: bool) -> Sequence[Tensor | None]:
    return _reverse.between(outputs, inputs, cotangents, keep=keep) if inputs else []


# --- one graph, several losses ----------------------------------------------------------------------------------------


def _passes(losses: list[Tensor], leaves: list[Tensor], method: str) -> Rows:
    with _saved.without_modes():
        if method == "retain":
            return [_whole(loss, leaves, keep=True) for loss in losses]
        if method == "release":
            return _by_release(losses, leaves)
        return _by_cut(losses, leaves)


def _whole(loss: Tensor, leaves: list[Tensor], *, keep: bool) -> list[Tensor | None]:
    if not loss.requires_grad:
        return [None] * len(leaves)
    return list(_bare([loss], leaves, [torch.ones_like(loss)], keep=keep))


def _by_release(losses: list[Tensor], leaves: list[Tensor]) -> Rows:
    """One pass per loss; after each, what no later one needs is released."""
    last: dict[Node, int] = {}
    for index, loss in enumerate(losses):
        last.update(dict.fromkeys(_inspect.walk([_nodes.node_of(loss)]), index))
    rows = []
    for index, loss in enumerate(losses):
        rows.append(_whole(loss, leaves, keep=index < len(losses) - 1))
        _release.drop(node for node, user in last.items() if user == index)
    return rows


def _by_cut(losses: list[Tensor], leaves: list[Tensor]) -> Rows:
    """Each loss's own part down to the shared one, then the shared part once per loss.

    The engine has no partial capture: to reach one cut edge through another it would run, and free,
    the shared part in between, and count it twice. Such a loss runs whole, before the others.
    """
    common, private = _predict.split(losses)
    cuts = [_cut_edges(loss, own, common) for loss, own in zip(losses, private, strict=True)]
    apart = [_is_antichain(edges) for edges in cuts]
    mine = [_own_inputs(leaves, set(own)) for own in private]
    inside = [leaf for leaf in leaves if _nodes.node_of(leaf) in common]
    rows: Rows = [[None] * len(leaves) for _ in losses]
    trunk_follows = any(apart)
    whole = [index for index, cuttable in enumerate(apart) if not cuttable]
    for index in whole:
        keep = trunk_follows or index != whole[-1]
        rows[index] = _whole(losses[index], leaves, keep=keep)
        _release.drop(private[index])
        private[index] = []
    pulled = {}
    for index in (index for index, cuttable in enumerate(apart) if cuttable):
        pulled[index] = _head(losses[index], cuts[index], [leaves[i] for i in mine[index]])
        for i, found in zip(mine[index], pulled[index][len(cuts[index]) :], strict=True):
            rows[index][i] = found
        _release.drop(private[index])
        private[index] = []
    _shared_passes(pulled, cuts, inside, leaves, rows)
    _release.drop(common)
    return rows


def _shared_passes(
    pulled: dict[int, list[Tensor | None]],
    cuts: list[list[GradientEdge]],
    inside: list[Tensor],
    leaves: list[Tensor],
    rows: Rows,
) -> None:
    """From the cut edges to those of `leaves` that lie `inside` the shared part."""
    places = [index for index, leaf in enumerate(leaves) if any(leaf is other for other in inside)]
    while pulled:
        index = min(pulled)
        cotangents = pulled.pop(index)[: len(cuts[index])]
        if not inside:
            continue
        found = _trunk(list(cuts[index]), cotangents, [leaves[i] for i in places], keep=bool(pulled))
        for i, part in zip(places, found, strict=True):
            rows[index][i] = part


def _cut_edges(loss: Tensor, own: list[Node], common: set[Node]) -> list[GradientEdge]:
    """The edges from a loss's own part to the shared one."""
    root = _nodes.node_of(loss)
    if root is None:
        return []
    if root in common:
        return [get_gradient_edge(loss)]
    edges = {(child, number) for node in own for child, number in node.next_functions if child in common}
    return [GradientEdge(child, number) for child, number in edges]


def _is_antichain(edges: list[GradientEdge]) -> bool:
    """Whether none of the edges lies below another."""
    nodes = {edge.node for edge in edges}
    return nodes.isdisjoint(_inspect.walk([child for node in nodes for child in _saved.children(node)]))


def _own_inputs(leaves: list[Tensor], own: set[Node]) -> list[int]:
    return [index for index, leaf in enumerate(leaves) if _nodes.node_of(leaf) in own]


def _head(loss: Tensor, edges: list[GradientEdge], inputs: list[Tensor]) -> list[Tensor | None]:
    """The gradients of a loss by the cut edges and by what is its own; frees its own part."""
    if not loss.requires_grad:
        return [None] * (len(edges) + len(inputs))
    return list(_bare([loss], [*edges, *inputs], [torch.ones_like(loss)], keep=False))
