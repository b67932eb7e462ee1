"""Giving back what chosen nodes saved, without running them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from hodiff._core import _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _predict, _saved, _traits


class Released(NamedTuple):
    """What was released: how many nodes, and the bytes of what they had saved that could be seen.

    A storage that something else holds as well is not returned by it.
    """

    nodes: int
    bytes: int


def release(loss: Tensor | Sequence[Tensor], keep: Tensor | Sequence[Tensor] = ()) -> Released:
    """Drop what the nodes of a graph saved, after the forward and without a backward pass.

    Released are the nodes that `loss` reaches and nothing in `keep` does. A pass that needs one of them
    raises `GraphError`, in our words. Tensors, `.grad` and the nodes themselves stay.

    Args:
        loss: A tensor of any shape, or several.
        keep: Tensors whose graphs must stay usable.

    Returns:
        How many nodes had something released, and its bytes.

    Raises:
        InputError: Something that is no tensor.

    Cost:
        No pass; some 10 µs per node. What is packed (checkpoints, `save_on_cpu`) or cannot be seen
        stays as it is: it has hooks of its own.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.rand(1000, requires_grad=True)
        >>> trunk = x.exp()
        >>> first, second = trunk.sin().sum(), trunk.cos().sum()
        >>> hodiff.graph.release(first, keep=second)
        Released(nodes=1, bytes=4000)
        >>> hodiff.graph.predict(first).verdict, hodiff.graph.predict(second).verdict
        ('fail', 'ok')
    """
    given = _predict.tensors(loss, "loss")
    kept = [] if isinstance(keep, (tuple, list)) and not keep else _predict.tensors(keep, "keep")
    with _traits.without_modes():
        stay = set(_nodes.walk([_nodes.node_of(tensor) for tensor in kept]))
        return drop(node for node in _nodes.walk([_nodes.node_of(tensor) for tensor in given]) if node not in stay)


def drop(nodes: Iterable[Node]) -> Released:
    """Release these nodes."""
    count, sizes = 0, {}
    for node in nodes:
        mine: dict[Any, int] = {}
        for slot in _saved.slots(node):
            if slot.value is not None:
                identity, size = _traits.storage(slot.value)
                mine[identity] = size
        slot = None
        if _saved.release(node):
            count += 1
            sizes.update(mine)
    return Released(count, sum(sizes.values()))
