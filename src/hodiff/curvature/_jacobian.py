"""`JacobianOperator`: products with a Jacobian and its transpose, from linearised outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch

from hodiff._core import _tree
from hodiff._core._options import Allowed
from hodiff._core._where import Where
from hodiff.curvature._cache import Piece, Source
from hodiff.curvature._data import Batches
from hodiff.curvature._from_data import DataOperator, Parts
from hodiff.curvature._gauss_newton import Linearised, check_predict, linearised
from hodiff.curvature._operator import LinearOperator
from hodiff.curvature._space import Space, plus
from hodiff.errors import InputError


@final
class JacobianOperator(DataOperator):
    r"""The Jacobian \(J = \partial f / \partial x\) of a network's outputs as an operator; `J.T` for its transpose.

    With several batches the outputs are those of all batches, one after the other along their leading
    dimension.

    Args:
        predict: `predict(where)`, or with `data` `predict(where, batch)`, returns the outputs: a tensor
            or a container of tensors.
        where: As for `hodiff.HessianOperator`.
        data: A re-iterable of batches; unless it is a sequence, those of the first pass are kept, so
            that rows keep their places.
        memory_budget: What the graphs may hold, as for `hodiff.HessianOperator`.
        chunk_size: How many of several vectors one pass takes.
        progress: Whether to show a bar over the batches.
        allow: `@once_differentiable` Functions to accept.

    Attributes:
        value: The outputs, a by-product.

    Raises:
        InputError: Outputs of several batches that cannot be put together; or as for `hodiff.HessianOperator`.
        GraphError: As for `hodiff.HessianOperator`.

    Cost:
        The first product, and `J.shape`, evaluate `predict` once per batch and take one pass to
        linearise it (two, where a Python `autograd.Function` is met). A product with `J` or `J.T` takes
        one pass per batch.

    Examples:
        >>> import torch, hodiff
        >>> J = hodiff.JacobianOperator(lambda x: torch.stack([x[0] * x[1], x[0] ** 2]), torch.tensor([2.0, 3.0]))
        >>> J @ torch.tensor([1.0, 0.0]), J.T @ torch.tensor([1.0, 0.0])
        (tensor([3., 4.]), tensor([3., 2.]))
    """

    def __init__(
        self,
        predict: Callable[..., Any],
        where: Any,
        *,
        data: Any = None,
        memory_budget: float = 0.5,
        chunk_size: int | str = "auto",
        progress: bool = False,
        allow: Allowed = (),
    ) -> None:
        check_predict(predict)
        batches = Batches(data, Where(where).tensors[0].device, keep=data is not None, progress=progress)
        self._outputs = Outputs()
        build = partial(_build, predict, self._outputs, allow)
        super().__init__(Source(build, where, batches, memory_budget), chunk_size)

    @property
    def _passes(self) -> tuple[int, int]:
        return 1, 1

    @property
    def _range(self) -> Space:
        self._source.evaluate()
        return self._outputs.space()

    @property
    def symmetric(self) -> bool:
        """Never, as far as is known."""
        return False

    @property
    def value(self) -> Any:
        """The outputs at the point, of all batches."""
        self._source.evaluate()
        return self._range.result([part.clone() for part in self._outputs.whole()])

    @property
    def gradient(self) -> Any:
        """A Jacobian has none."""
        raise AttributeError("a JacobianOperator has no gradient; J.T @ u is the gradient of the inner product u'f.")

    def refresh(self) -> JacobianOperator:
        """Forget all graphs and outputs. Returns the operator."""
        self._outputs.clear()
        self._source.refresh()
        return self

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        chunk, lead = (1, 0) if count is None else (self._inner_chunk(), 1)
        found = []
        for piece in self._source.pieces():
            with piece.ready():
                found.append(_linear(piece).push(parts, count, self._chosen, chunk))
        if len(found) == 1:
            return found[0]
        return [torch.cat(column, dim=lead) for column in zip(*found, strict=True)]

    def _multiply_transposed(self, parts: Parts, count: int | None) -> Parts:
        chunk, lead = (1, 0) if count is None else (self._inner_chunk(), 1)
        self._source.evaluate()
        single, start, total = self._source.batches == 1, 0, None
        for number, piece in enumerate(self._source.pieces()):
            stop = start + self._outputs.lengths[number]
            own = parts if single else [part.narrow(lead, start, stop - start) for part in parts]
            with piece.ready():
                found = _linear(piece).pull(own, count, self._chosen, chunk)
            total = found if total is None else plus([part.contiguous() for part in total], found)
            start = stop
        leaves = [self._source.where.tensors[index] for index in self._chosen]
        return [part.to(leaf.dtype) for part, leaf in zip(total or [], leaves, strict=True)]

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        raise InputError("block: a Jacobian's rows and columns differ; differentiate at hodiff.select(model, ...).")

    def _route(self) -> str:
        return "linearised outputs"


class Outputs:
    """The outputs of each batch, detached: their values, and where their rows lie in the whole."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._values: dict[int, Parts] = {}
        self._tree: _tree.Tree = _tree.LEAF
        self._space: Space | None = None
        self.lengths: dict[int, int] = {}

    def note(self, number: int, outputs: Parts, tree: _tree.Tree) -> None:
        """The outputs of a batch; a second time changes nothing."""
        if number in self._values:
            return
        first = self._values.get(0)
        if first is not None:
            _check_alike(first, outputs)
        self._values[number], self._tree = outputs, tree
        self.lengths[number] = outputs[0].shape[0] if outputs[0].ndim else 1

    def whole(self) -> Parts:
        """The outputs of all batches."""
        if len(self._values) == 1:
            return self._values[0]
        return [torch.cat(column) for column in zip(*self._values.values(), strict=True)]

    def space(self) -> Space:
        """The space of vectors like them."""
        if self._space is None:
            whole = self.whole()
            names = _tree.paths(self._tree, "f(x)")
            self._space = Space(whole, names, self._tree, "like f(x)")
        return self._space


def _check_alike(first: Parts, outputs: Parts) -> None:
    shapes = [tuple(part.shape) for part in outputs]
    alike = len(first) == len(outputs) and all(
        a.ndim and b.ndim and a.shape[1:] == b.shape[1:] for a, b in zip(first, outputs, strict=True)
    )
    if not alike or len({part.shape[0] for part in outputs}) != 1:
        raise InputError(
            f"predict: the outputs of several batches are put together along their leading dimension, which shapes "
            f"{[tuple(part.shape) for part in first]} and {shapes} do not allow."
        )


def _linear(piece: Piece) -> Linearised:
    if not isinstance(piece, Linearised):
        raise TypeError("expected a linearised batch")
    return piece


def _build(
    predict: Callable[..., Any], outputs: Outputs, allow: Allowed, where: Where, batch: Any, number: int
) -> Linearised:
    piece = linearised(predict, None, allow, where, batch, number)
    _, _, tree = _tree.flatten(piece.ev.outputs)
    outputs.note(number, [output.detach() for output in piece.outputs], tree)
    piece.value = sum((output.detach().sum() for output in piece.outputs), piece.value)
    return piece
