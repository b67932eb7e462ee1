"""Derivatives that `f` takes itself, by `torch.autograd.grad` or `torch.func.grad`: they raise the order of a call.

Each is seen where it begins, with the graph that it goes over: afterwards that may be out of reach, for what PyTorch
takes for a constant leaves no trace. What was seen is judged when `f` has returned, by the rules of the total order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _engine, _nesting, _nodes, _refusals
from hodiff.errors import GraphError


class ByHand:
    """The differentiable passes that `f` has made in one evaluation.

    Attributes:
        count: How many; none is nested deeper.
        names: The class names of the nodes that they went over.
        refused: What is to be said of the first through which a derivative of the total order is not right.
    """

    __slots__ = ("count", "names", "refused")

    def __init__(self) -> None:
        self.count = 0
        self.names: set[str] = set()
        self.refused: GraphError | None = None


def note(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Let the innermost evaluation know that its `f` begins a pass whose result is differentiable."""
    if not _nesting.state.running or _engine.passing.ours:
        return
    lending = _nesting.state.running[-1]
    if not lending.call.owned:
        return
    roots = [node for node in map(_node, outputs) if node is not None]
    if not roots:  # of constants alone
        return
    found = lending.by_hand = lending.by_hand or ByHand()
    graph = _nodes.Survey(roots)
    found.count += 1
    found.names |= graph.names()
    by = [_base(each) for each in inputs if isinstance(each, Tensor)]
    try:
        order = lending.call.order + found.count
        _refusals.judge(graph, by if by and len(by) == len(inputs) else graph.variables(), order, lending.call.allow)
    except GraphError as error:
        found.refused = found.refused or error


def _base(tensor: Tensor) -> Tensor:
    """A tensor without what `torch.func` has wrapped around it: its graph has all that the transforms record."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _node(output: Any) -> Any:
    return _nodes.node_of(_base(output)) if isinstance(output, Tensor) else output.node
