"""What a field returns beside its value (`has_aux=`), whichever route evaluates it, and however often."""

from __future__ import annotations

from typing import Any

from torch import nn

from hodiff._core import _tree
from hodiff._core._assembly import plain
from hodiff._core._graph import split
from hodiff.jets import _jet


class WithExtra:
    """A function that returns `(value, extra)`, as one that returns the value, and keeps the extra of the whole batch.

    Blocks of samples are evaluated beside the whole batch, not in its place: their extras are passed over.
    """

    def __init__(self, f: Any, x: Any) -> None:
        self.f = plain(f) if isinstance(f, nn.Module) else f
        self.extra: Any = None
        self._x, self._shape = x, tuple(x.shape)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        value, extra = split(self.f(x, *args, **kwargs))
        if tuple(x.shape) == self._shape:
            self.extra = extra
        return value

    def given(self) -> Any:
        """The extra as the caller knows its tensors: without the series of this call."""
        return _tree.tree_map(self._below, self.extra)

    def _below(self, leaf: Any) -> Any:
        own = self._x.expansion.number if _jet.is_jet(self._x) else -1
        while _jet.is_jet(leaf) and leaf.expansion.number > own:
            leaf = leaf.series[0]
        return leaf
