"""Does the graph behind some tensors grow, step by step?"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from hodiff._core import _nodes
from hodiff.errors import HodiffWarning, InputError
from hodiff.graph import _predict, _source, _traits, _variables
from hodiff.graph._line import Line, line_of
from hodiff.graph._names import is_users

RISES = 3


class Step(NamedTuple):
    """Nodes behind a root, and bytes saved in them, at one step."""

    nodes: int
    bytes: int


class Monitor:
    """Follows graphs over the steps of a loop; made by `monitor`.

    Attributes:
        history: For each root, one `Step` per call of `step`.

    Examples:
        >>> import torch, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> growth = hodiff.graph.monitor()
        >>> for _ in range(3):
        ...     growth.step(loss=x.exp().sum())
        >>> growth.history["loss"][-1]
        Step(nodes=3, bytes=8)
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.history: dict[str, list[Step]] = {}
        self._roots = roots
        self._warned: set[str] = set()

    def step(self, **roots: Any) -> None:
        """Measure `roots`, and those given to `monitor`; warn once per root after three rises in a row."""
        for name, root in {**self._roots, **roots}.items():
            with _traits.without_modes():
                nodes = list(_nodes.walk([_nodes.node_of(tensor) for tensor in _tensors(root, name)]))
                past = self.history.setdefault(name, [])
                past.append(Step(len(nodes), _predict.saved_bytes(nodes)))
            if name not in self._warned and _grows(past):
                self._warned.add(name)
                self._warn(name, past, nodes)

    def _warn(self, name: str, past: list[Step], nodes: list[Any]) -> None:
        frame, level = sys._getframe(1), 1
        while frame.f_back is not None and not is_users(frame.f_code):
            frame, level = frame.f_back, level + 1
        line = line_of(frame)
        loop = next(iter(_source.loops(line)), None)
        numbers = [n for n in _variables.assignments(name, line) if loop is not None and _source.within(loop, n)]
        where = f" Line {numbers[-1]} ({Line(line.file, numbers[-1]).text}) extends it." if numbers else ""
        used = _most_used(nodes)
        nodes_then = " -> ".join(str(step.nodes) for step in past[-RISES - 1 :])
        warnings.warn(
            f"the graph behind {name} grows with every step: {nodes_then} nodes, "
            f"{past[-1].bytes:,} B saved in them now.{where}{used} Detach what is carried from step to step.",
            HodiffWarning,
            stacklevel=level + 1,
        )

    def __str__(self) -> str:
        lines = []
        for name, past in self.history.items():
            shown = " -> ".join(str(step.nodes) for step in past[:3] + past[-3:][max(0, 6 - len(past)) :])
            verdict = "grows" if _grows(past) else "no growth"
            lines.append(f"{name}: {verdict}; nodes {shown}; {past[-1].bytes:,} B saved at the last step")
        return "\n".join(lines) or "no step yet"


def _grows(past: list[Step]) -> bool:
    last = [step.nodes for step in past[-RISES - 1 :]]
    return len(last) == RISES + 1 and all(a < b for a, b in pairwise(last))


def _most_used(nodes: list[Any]) -> str:
    counts: dict[Any, int] = {}
    for node in nodes:
        for child in _traits.children(node):
            if _traits.leaf(child) is not None:
                counts[child] = counts.get(child, 0) + 1
    most = max(counts.values(), default=1)
    return f" One parameter is used {most} times in it." if most > 1 else ""


DEEPEST = 100
"""Containers in containers; more is a list in itself."""


def _tensors(root: Any, name: str, depth: int = 0) -> list[Tensor]:
    """The tensors of a root: it may be a tensor, a container, a module (its gradients), or a function of these."""
    if depth > DEEPEST:
        raise InputError(f"{name}: containers are nested deeper than {DEEPEST}.")
    if isinstance(root, nn.Module):
        return [parameter.grad for parameter in root.parameters() if parameter.grad is not None]
    if isinstance(root, Tensor):
        return [root]
    if isinstance(root, dict):
        root = list(root.values())
    if isinstance(root, (list, tuple)):
        return [tensor for item in root for tensor in _tensors(item, name, depth + 1)]
    if callable(root):
        return _tensors(root(), name, depth + 1)
    if root is None or isinstance(root, (int, float)):
        return []
    raise InputError(f"{name}: is a {type(root).__name__}; expected tensors, a module, or a function that gives them.")


def monitor(**roots: Tensor | nn.Module | Callable[[], Any] | Any) -> Monitor:
    """Follow the graphs behind some tensors over a training loop, and warn when one grows.

    A graph that grows in each step is one that a step hands to the next: a running sum of losses, a
    hidden state, a list of losses. After three rises in a row a `HodiffWarning` names the line.

    Args:
        **roots: What to follow: a function that gives tensors (`total=lambda: total`), a module (the
            graphs of its parameters' `.grad`, which `backward(create_graph=True)` leaves behind), or
            tensors that stay the same. Those that change may be given to `.step(total=total)` instead.

    Returns:
        A `Monitor`: call its `.step()` once per step; print it at the end. `.history` has the figures.

    Raises:
        InputError: On `.step()`: a root of another kind. Tensors may have any shape.

    Cost:
        No pass; `.step()` walks the graphs, some 10 µs per node. No memory of tensors is kept.

    Examples:
        >>> import torch, warnings, hodiff
        >>> x = torch.ones(2, requires_grad=True)
        >>> total, growth = torch.zeros(()), hodiff.graph.monitor()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     for _ in range(4):
        ...         total = total + x.exp().sum()
        ...         growth.step(total=total)
        >>> print(growth)
        total: grows; nodes 4 -> 7 -> 10 -> 13; 32 B saved at the last step
    """
    for name, root in roots.items():
        if not callable(root):
            _tensors(root, name)
    return Monitor(roots)
