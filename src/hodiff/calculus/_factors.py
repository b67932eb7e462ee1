r"""The Jacobian of samples' numbers by parameters, in factors.

An operation z = W a uses the weight at the positions t of a sample: its row is Σ_t g_t ⊗ a_t,
with g the derivative of the sample's number by z. The graph has saved a, and one pass for all
samples gives g: a Gram matrix, norms and products follow without the rows. Weights that are tied,
modules that are called twice, and derivatives inside of `f` are more positions.

Nothing is taken on trust. At every call one pass with a random weight w for each sample must give g
times the weight of one sample at each position: so it is known to whom a position belongs, and that
samples do not mix. And J'w as it follows from the factors must be what a pass gives, between two
random pairs of vectors; once for each way to use a parameter, since what follows from an operation
of the same kind and sizes is the same of all numbers. A parameter of which this is not so is
*missing*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations_with_replacement, product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from hodiff._core import _nodes, _reverse, _settings, _vectors
from hodiff._core._call import tangents
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph

ROUNDING = 100
"""Units of rounding by which two results may differ."""

FORMS = 2
"""Pairs of random vectors between which a sum is compared: one may be unlucky."""

ROUNDS = 6
"""Passes to find out which operations have a result for each sample."""

LARGEST = 2**28
"""Bytes of the derivatives by all operations that use a parameter."""

PATCHES = 2**24
"""Bytes of the patches that a kernel was laid on."""

POSITIONS = 64
"""Up to so many positions are compared in pairs."""

FEW = 10
"""Up to so many positions the squares of rows are summed by pairs, without a row."""


PROVED: set[tuple[Any, ...]] = set()
"""Uses of a parameter whose formula was held against a pass: operations, sizes, what was kept.

Nobody asks it where a hook was registered since the function began, or packs what is saved: one
may change what an operation makes of its derivative.
"""

REMEMBERED = 10_000
"""So many, at most."""


class Unread(Exception):
    """A use of a parameter that no reader knows."""


def expect(known: bool) -> None:
    """Raise unless a use is as the reader knows it."""
    if not known:
        raise Unread


# --- the rows of one parameter --------------------------------------------------------------------


class Outer:
    """Rows Σ_t left_t ⊗ right_t, for N samples with K numbers each.

    Attributes:
        left: `(N, K, T, O)`, of T positions; 1 in place of K for what all numbers share.
        right: `(N, K, T, I)`, likewise.
        shape: The parameter's, of O · I entries.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: Size) -> None:
        self.left, self.right = left, right
        self.shape = shape
        self.width = right.shape[-1]

    @property
    def sizes(self) -> Size:
        """The number of samples, N, and of numbers of each, K."""
        return Size((len(self.left), max(self.left.shape[1], self.right.shape[1])))

    @classmethod
    def of(cls, rows: Tensor, shape: Size) -> Outer:
        """Rows as they are, `(N, K, *shape)`."""
        return Outer(
            rows.new_ones(len(rows), 1, 1, 1),
            rows.reshape(*rows.shape[:2], 1, shape.numel()),
            shape,
        )

    def __getitem__(self, part: slice) -> Outer:
        """The rows of some samples."""
        return type(self)(self.left[part], self.right[part], self.shape)

    def double(self, device: torch.device) -> Outer:
        """The rows in double precision, on a device."""
        dtype = torch.float64 if self.right.is_floating_point() else None
        return type(self)(
            self.left.to(device, torch.float64), self.right.to(device, dtype), self.shape
        )

    def shortest(self) -> Outer:
        """The rows as they are, where these are fewer numbers."""
        longer = self.left.numel() + self.right.numel() > self.sizes.numel() * self.shape.numel()
        return Outer.of(self.rows(), self.shape) if longer else self

    def join(self, other: Outer) -> Outer:
        """The sum of both."""
        here, there = type(self), type(other)
        if here is there is Outer and self.left.shape[-1] == other.left.shape[-1] > 1:
            left, right = _joined(self.left, other.left), _joined(self.right, other.right)
            return Outer(left, right, self.shape)
        return Outer.of(self.rows() + other.rows(), self.shape)

    def rows(self) -> Tensor:
        """The rows themselves, `(N, K, *shape)`."""
        whole = self._some(slice(None))
        return self._shaped(whole).reshape(*whole.shape[:2], *self.shape)

    def norms(self) -> Tensor:
        """The squares of the rows' norms, `(N, K)`."""
        positions, width = self.left.shape[2:]
        if positions * (width + self.width) <= width * self.width:
            return (self.left @ self.left.mT * self._alike()).sum((2, 3))
        return sum((part.square().sum((2, 3)) for part in self._parts()), self.left.new_zeros(()))

    def squares(self) -> Tensor:
        """The sum of squares over all rows, for each entry of the parameter."""
        positions = self.left.shape[2]
        if positions <= FEW and type(self) is Outer:
            total = torch.zeros((), dtype=self.left.dtype, device=self.left.device)
            for apart in range(positions):  # each pair of positions once
                left, right = (
                    x[:, :, apart:] * x[:, :, : positions - apart] for x in (self.left, self.right)
                )
                total = total + Outer(left, right, self.shape).pull(None) * (2 if apart else 1)
            return total
        squares = torch.cat([part.square().sum((0, 1)) for part in self._parts()])
        return self._shaped(squares).reshape(self.shape)

    def pull(self, weights: Tensor | None) -> Tensor:
        """The sum of the rows, weighed by `(N, K)`."""
        left, right = self.left, self.right
        if weights is not None:
            left = left * weights[:, :, None, None]
        if right.shape[1] == 1:
            left = left.sum(1, keepdim=True)
        left = left.expand(-1, right.shape[1], -1, -1)
        return (left.flatten(0, 2).T @ right.flatten(0, 2)).reshape(self.shape)

    def push(self, vector: Tensor) -> Tensor:
        """Each row times a vector of the parameter's shape, `(N, K)`."""
        return (self.left * self._right_by(self.matrix(vector).T)).sum((2, 3))

    def forms(self, one: Tensor, other: Tensor) -> Tensor:
        """Each position's matrix between vectors, `(O, r)` and `(I, r)`: `(N, K, T, r)`."""
        return (self.left @ one) * self._right_by(other)

    def gram(self, other: Outer | None = None) -> Tensor:
        """The products of all rows with each other, `(N, K, N, K)`, or with others'."""
        one, two = self, self if other is None else other
        if other is not None and not type(one) is type(two) is Indexed:
            width = max(of.left.shape[-1] for of in (one, two) if type(of) is Outer)
            one, two = one._of_width(width), two._of_width(width)
        many, others = one.sizes.numel(), two.sizes.numel()
        out = one.left.new_zeros(*one.sizes, *two.sizes)
        (positions, width), more = one.left.shape[2:], two.left.shape[2]
        by_pairs = many * others * positions * more * (width + one.width + 15)
        by_rows = many * positions + many * others + (0 if other is None else others * more)
        if max(positions, more) > POSITIONS or by_pairs > by_rows * width * one.width:
            step = min(one._step(), two._step())
            for start in range(0, width, step):
                parts = [
                    of._some(slice(start, start + step))
                    for of in ([one] if other is None else [one, two])
                ]
                lines = [part.flatten(0, 1).flatten(1) for part in parts]
                out.view(many, others).addmm_(lines[0], lines[-1].T)
            return out
        beside = torch.zeros_like(out) if other is None else out
        (left, right), (left_2, right_2) = (
            (of.left.movedim(2, 0).contiguous(), of._turned()) for of in (one, two)
        )
        pairs = combinations_with_replacement(range(positions), 2)
        for t, s in pairs if other is None else product(range(positions), range(more)):
            into = out if t == s else beside
            into.addcmul_(_products(left[t], left_2[s]), one._pair(right[t], right_2[s]))
        if other is None and positions > 1:
            out.add_(beside).add_(beside.permute(2, 3, 0, 1))
        return out

    def _of_width(self, width: int) -> Outer:
        """Rows like these whose left sides have a width: unit vectors, where it is another."""
        if type(self) is Outer and self.left.shape[-1] == width:
            return self
        rows = self.rows()
        unit = torch.eye(width, dtype=rows.dtype, device=rows.device)
        apart = rows.reshape(*rows.shape[:2], width, -1)
        return Outer(unit.expand(len(rows), 1, -1, -1), apart, self.shape)

    def _parts(self) -> Iterator[Tensor]:
        """The rows of some columns at a time, `(N, K, some of O, I)`."""
        step = self._step()
        for start in range(0, self.left.shape[-1], step):
            yield self._some(slice(start, start + step))

    def _step(self) -> int:
        """The number of columns of all rows to have at hand."""
        line = self.sizes.numel() * self.width * self.left.element_size()
        return max(1, _reverse.CHUNK_BYTES // max(1, line))

    def _some(self, columns: slice) -> Tensor:
        left, right = self.left[..., columns].mT, self.right
        if left.shape[-1] == 1:
            return left * right
        if right.shape[1] < left.shape[1]:  # without a copy of the right side for each number
            return (left.flatten(1, 2) @ right[:, 0]).unflatten(1, left.shape[1:3])
        return left @ right

    def _alike(self) -> Tensor:
        """The products of the right sides of one row, `(N, K, T, T)`."""
        return self.right @ self.right.mT

    def matrix(self, entries: Tensor) -> Tensor:
        """A tensor of the parameter's shape, `(O, I)`."""
        return self._shaped(entries).reshape(self.left.shape[-1], self.width)

    def _right_by(self, vectors: Tensor) -> Tensor:
        return self.right @ vectors

    def _turned(self) -> Tensor:
        return self.right.movedim(2, 0).contiguous()

    def _pair(self, one: Tensor, other: Tensor) -> Tensor:
        return _products(one, other)

    def _shaped(self, result: Tensor) -> Tensor:
        return result


class Indexed(Outer):
    """The rows of an embedding: right sides are unit vectors, by their numbers `(N, 1, T)`."""

    def __init__(self, left: Tensor, right: Tensor, shape: Size) -> None:
        super().__init__(left, right, shape)
        self.width = shape[0]

    def pull(self, weights: Tensor | None) -> Tensor:
        left = self.left if weights is None else self.left * weights[:, :, None, None]
        left = left.sum(1).flatten(0, 1)
        return left.new_zeros(self.shape).index_add_(0, self.right.flatten(), left)

    def _some(self, columns: slice) -> Tensor:
        left = self.left[..., columns].mT
        result = left.new_zeros(*left.shape[:-1], self.width)
        return result.scatter_add_(-1, self.right.unsqueeze(2).expand(left.shape), left)

    def _alike(self) -> Tensor:
        return (self.right.unsqueeze(3) == self.right.unsqueeze(2)).to(self.left)

    def _right_by(self, vectors: Tensor) -> Tensor:
        return vectors[self.right]

    def _turned(self) -> Tensor:
        return self.right[:, 0].T

    def _pair(self, one: Tensor, other: Tensor) -> Tensor:
        return (one[:, None, None, None] == other[:, None]).to(self.left)

    def _shaped(self, result: Tensor) -> Tensor:
        return result.mT


class Stack:
    """Rows of several functions, or batches, one under the other: of each those by each parameter.

    Attributes:
        lengths: How many rows each has.
        like: A tensor of the dtype of its results.
    """

    def __init__(self, parts: Sequence[Sequence[Outer]]) -> None:
        self._parts, self.like = parts, parts[0][0].left
        self.lengths = [part[0].sizes.numel() for part in parts]
        self._shapes = [of.shape for of in parts[0]]

    def push(self, vector: Tensor) -> Tensor:
        """Each row times a flat vector."""
        own = vector.split([shape.numel() for shape in self._shapes])
        return self._of_rows(lambda number, of: of.push(own[number].view(of.shape)))

    def _of_rows(self, of_one: Callable[[int, Outer], Tensor]) -> Tensor:
        """A number for each row, the sum of those by the leaves."""
        return _flat(
            reduce(torch.add, map(of_one, range(len(part)), part)).expand(part[0].sizes)
            for part in self._parts
        )

    def pull(self, weights: Tensor) -> Tensor:
        """The sum of all rows, weighed, flat."""
        given = zip(self._parts, weights.split(self.lengths), strict=True)
        lines = [_flat(of.pull(u.view(of.sizes)) for of in part) for part, u in given]
        return reduce(torch.add, lines)

    def squares(self) -> Tensor:
        """The sum of squares over all rows, for each entry of the parameters, flat."""
        return reduce(torch.add, [_flat(of.squares() for of in part) for part in self._parts])

    def norms(self) -> Tensor:
        """The squares of the rows' norms."""
        return self._of_rows(lambda number, of: of.norms())

    def gram(self) -> Tensor:
        """The products of all rows with each other; zeros above the blocks of the diagonal."""
        product = self.like.new_zeros(sum(self.lengths), sum(self.lengths))
        for i, lines in enumerate(product.split(self.lengths)):
            for j, block in enumerate(lines.split(self.lengths, dim=1)[: i + 1]):
                for one, two in zip(self._parts[i], self._parts[j], strict=True):
                    block += one.gram(None if i == j else two).view(block.shape)
        return product


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Inner products of `(N, K, width)` with `(M, L, width)` at another position:
    `(N, K, M, L)`.
    """
    return (one.flatten(0, 1) @ other.flatten(0, 1).T).view(*one.shape[:2], *other.shape[:2])


def _joined(one: Tensor, other: Tensor) -> Tensor:
    """The positions of both."""
    numbers = max(one.shape[1], other.shape[1])
    return torch.cat([one.expand(-1, numbers, -1, -1), other.expand(-1, numbers, -1, -1)], 2)


# --- readers: what an operation's node says of a parameter that it uses ---------------------------


class SamplesAxis(NamedTuple):
    """The place of the samples in a result: flattened it is `(before, samples, after)`."""

    before: int
    samples: int
    after: int

    def apart(self, x: Tensor, width: int) -> Tensor:
        """The vectors at each position, `(K, ...)`, as `(N, K, T, width)`."""
        parts = x.reshape(len(x), self.before, self.samples, -1, width)
        return parts.permute(2, 0, 1, 3, 4).flatten(2, 3)


class Derivative(NamedTuple):
    """A use of a parameter, and the derivatives by the operation's result.

    Attributes:
        summands: Takes what the reader adds up over the positions of a sample.
        facts: Takes what the formula depends on, besides the numbers in tensors.
    """

    use: _nodes.Use
    turned: bool
    shape: Size
    g: Tensor
    at: SamplesAxis
    summands: list[Tensor]
    facts: list[Any]

    def kept(self, name: str) -> Any:
        """The value that the operation has saved under a name."""
        try:
            value = self.use.kept(name)
        except AttributeError:  # in another release
            raise Unread from None
        self.facts.append((value.shape, value.dtype) if isinstance(value, Tensor) else value)
        return value

    def outer(self, left: Tensor, right: Tensor) -> Outer:
        """Rows of the parameter; `left` is for its first dimension, unless it is used turned."""
        return Outer(right, left, self.shape) if self.turned else Outer(left, right, self.shape)

    def entries(self, factor: Tensor | float = 1.0, shape: Size | None = None) -> Outer:
        """Rows where entries of the result are the parameter's, times a factor, by broadcasting."""
        x = self.g if factor.__class__ is float and factor == 1 else self.g * factor
        sizes = x.shape[1:]
        before, count, _ = self.at
        like = [1] * (len(sizes) - len(shape or self.shape)) + [*(shape or self.shape)]
        dim, left = 0, 1
        while dim < len(sizes) and (left * sizes[dim]) % (before * count):
            left *= sizes[dim]
            dim += 1
        expect(dim < len(sizes) and not before % left and not self.turned)
        expect(like[dim] == 1)
        x = x.reshape(len(x), *sizes[:dim], before // left, count, -1, *sizes[dim + 1 :])
        x = x.movedim(dim + 2, 0).flatten(dim + 2, dim + 3)
        self.summands.append(x)
        return Outer.of(x.sum_to_size(count, len(self.g), *like), self.shape)

    def channels(self, factor: Tensor | float = 1.0) -> Outer:
        """Rows of a parameter with an entry for each channel, the result's second dimension."""
        return self.entries(factor, Size([*self.shape, *[1] * (self.g.ndim - 3)]))


def _product(of: Derivative) -> Outer:
    """Rows of z = a W, of z = W a, and of what is added."""
    use, *_, g, at, _, _ = of
    added = use.kind == "Addmm"
    expect(not added or of.kept("alpha") == of.kept("beta") == 1)
    if added and use.place == 0:
        return of.entries()
    if use.place == added:  # W a: the positions are columns
        a, width = of.kept("mat2"), g.shape[1]
        expect(at.before % width == 0)
        at = SamplesAxis(at.before // width, at.samples, at.after * width)
        return of.outer(at.apart(g.mT, width), at.apart(a.T[None], a.shape[0]))
    a = of.kept("mat1" if added else "self")
    expect(at.after % g.shape[-1] == 0)
    return of.outer(at.apart(a[None], a.shape[-1]), at.apart(g, g.shape[-1]))


def _product_with_vector(of: Derivative) -> Outer:
    """Rows of z = a w."""
    a = of.kept("self")
    expect(of.use.place == 1)
    return of.outer(of.at.apart(a[None], a.shape[-1]), of.at.apart(of.g, 1))


def _convolution(of: Derivative) -> Outer:
    """Rows of a kernel, by the patches that it was laid on, and of a bias."""
    use, _, shape, g, at, *_ = of
    if use.place == 2:
        return of.channels()
    x, groups, transposed = map(of.kept, ("input", "groups", "transposed"))
    expect(use.place == 1 and at.before == 1 and x.ndim in (3, 4) and not transposed)
    expect(len(x) % at.samples == 0)
    laid = map(of.kept, ("stride", "padding", "dilation"))  # or one number for all dimensions
    stride, padding, dilation = (tuple(n) * (x.ndim - 2 if len(n) == 1 else 1) for n in laid)
    sizes = (1, *shape[2:])[-2:]
    if x.ndim == 3:  # a row of pixels
        x, dilation = x.unsqueeze(2), (1, *dilation)
        stride, padding = (1, *stride), (0, *padding)
    numbers = len(x) * groups * shape[1:].numel() * g.shape[3:].numel()
    expect(numbers * x.element_size() <= PATCHES)
    patches = F.unfold(x, sizes, dilation, padding, stride)
    images, entries, number = patches.shape
    g = g.reshape(len(g), images, groups, -1, number)
    if groups == 1:
        left = g.reshape(len(g), at.samples, images // at.samples, -1, number)
        right = patches.mT.reshape(at.samples, 1, -1, entries)
        return of.outer(left.permute(1, 0, 2, 4, 3).flatten(2, 3), right)
    rows = torch.einsum("kmgol,mgil->mkgoi", g, patches.reshape(images, groups, -1, number))
    return Outer.of(rows.reshape(at.samples, -1, len(g), *shape).sum(1), shape)


def _embedding(of: Derivative) -> Outer:
    *_, g, at, _, _ = of
    width, padding = g.shape[-1], of.kept("padding_idx")
    plain = not of.kept("sparse") and not of.kept("scale_grad_by_freq")
    expect(at.after % width == 0 and plain)
    numbers = at.apart(of.kept("indices")[None], 1).squeeze(3)
    left = at.apart(g, width)
    if padding >= 0:
        left = left * (numbers != padding).unsqueeze(3)
    return Indexed(left, numbers, of.shape)


def _layer_norm(of: Derivative) -> Outer:
    if of.use.place == 2:
        return of.entries()
    return of.entries((of.kept("input") - of.kept("result1")) * of.kept("result2"))


def _group_norm(of: Derivative) -> Outer:
    if of.use.place == 2:
        return of.channels()
    x, mean, scale = map(of.kept, ("input", "result1", "result2"))
    apart = x.reshape(*mean.shape, -1)
    return of.channels(((apart - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(x.shape))


def _batch_norm(of: Derivative) -> Outer:
    x, mean, variance, eps = map(of.kept, ("input", "running_mean", "running_var", "eps"))
    expect(not of.kept("training"))
    if of.use.place == 2:
        return of.channels()
    like = (-1, *[1] * (x.ndim - 2))
    return of.channels((x - mean.view(like)) * (variance.view(like) + eps).rsqrt())


def _factor(of: Derivative) -> Outer:
    other = of.kept("self" if of.use.place else "other")
    expect(other is not None)
    return of.entries(other)


def _summand(of: Derivative) -> Outer:
    sign = -1.0 if of.use.kind == "Sub" and of.use.place else 1.0
    return of.entries(sign * of.kept("alpha") if of.use.place else sign)


READERS: dict[str, Callable[[Derivative], Outer]] = {
    "Addmm": _product,
    "Mm": _product,
    "Mv": _product_with_vector,
    "Convolution": _convolution,
    "Embedding": _embedding,
    "NativeLayerNorm": _layer_norm,
    "NativeGroupNorm": _group_norm,
    "NativeBatchNorm": _batch_norm,
    "Mul": _factor,
    "Add": _summand,
    "Sub": _summand,
}
"""For each operation, by the name of its node, how the rows of a parameter that it uses follow.

What a node has saved is not proved to be what it seems: the rows are held against a pass.
"""


# --- all parameters -------------------------------------------------------------------------------


class End(NamedTuple):
    """A tensor that samples share: a parameter,
    or the result of an operation on parameters alone.
    """

    node: _nodes.Node
    shape: Size
    edge: object


class Factors:
    """The Jacobian of outputs `(N, ...)` by a graph's leaves, K rows for each sample.

    Attributes:
        of: For each leaf that is not missing, by its number, its rows.
        missing: The numbers of the others: what uses them was not read, or samples mix there.
    """

    def __init__(
        self,
        graph: OutputGraph,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor] | None = None,
        largest: float = 0,
    ) -> None:
        """Find the factors of the numbers of samples, `(N,)` or `(N, K)`; with seeds `(K, N, ...)`,
        of sums.

        The derivatives by operations may take as many bytes as are given, or the usual ones.
        """
        self.of: dict[int, Outer] = {}
        with _settings.grad_mode(False), _settings.autocast(outputs[0].device.type):
            seeds = units(outputs) if seeds is None else seeds
            numbers, count = seeds[0].shape[:2]
            precise = seeds[0].element_size() >= 4  # else rounding would hide what is mixed
            precise = precise and not tangents()  # what a node has saved carries none
            if precise and count and numbers and all(x.grad_fn is not None for x in outputs):
                self.of = _Reading(graph, outputs, seeds, largest).read()
        self.missing = {*range(len(graph.leaves))} - self.of.keys()


class _Reading:
    """The search for the rows of a graph's leaves."""

    def __init__(
        self,
        graph: OutputGraph,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor],
        largest: float,
    ) -> None:
        self._graph, self._outputs = graph, outputs
        self._seeds, self._largest = seeds, max(largest, LARGEST)
        self._numbers, self._count = seeds[0].shape[:2]
        weights = _vectors.generic(self._count * self._numbers) - 0.5
        self._weights = weights.to(seeds[0]).reshape(self._count, -1)
        """A random number for each row, `(N, K)`."""
        survey = _nodes.survey(outputs)
        self._users = survey.users()
        self._hooked = graph.context.hooks.registered() or _nodes.runs_hooks(survey)
        self._shared: set[_nodes.Node] = set()
        """Operations whose results belong to no single sample, though they could by their shape."""
        self._sums: dict[int, Tensor] = {}
        """The derivatives of the weighed sum of all numbers, by some leaves."""

    def read(self) -> dict[int, Outer]:
        """The rows of each leaf that is not missing."""
        for _ in range(ROUNDS):
            self._find_uses()
            if not self._place():
                return {}
            lost = self._sampled.keys() - self._places.keys()
            self._shared |= lost
            if not lost:
                break
        of: dict[int, Outer] = {}
        unproved: dict[int, tuple[tuple[Any, ...], list[Tensor]]] = {}
        for number, ends in enumerate(self._ends):
            leaf, seed = self._graph.leaves[number], self._seeds[0]
            self._facts, self._summands = [leaf.dtype, seed.dtype, seed.device], []
            rows = self._attempt(self._rows_of, ends)
            if rows is not None:
                of[number] = rows
                if number in self._sums or tuple(self._facts) not in PROVED:
                    unproved[number] = tuple(self._facts), self._summands
        if late := unproved.keys() - self._sums.keys():
            self._take_sums([*late])
        for number, (facts, summands) in unproved.items():
            if not self._attempt(self._is_right, of[number], self._sums[number], summands):
                del of[number]
            elif not self._hooked:
                PROVED.add(facts)
        if len(PROVED) > REMEMBERED:
            PROVED.clear()
        alone = {n: self._alone(ends[0]) for n, ends in enumerate(self._ends) if n not in of}
        return of | {number: rows for number, rows in alone.items() if rows is not None}

    def _attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """Result of a call; None where a node keeps what its reader does not expect."""
        try:
            return call(*args)
        except Exception as error:
            if not isinstance(error, Unread) and not is_fault(error):
                raise
            return None

    def _find_uses(self) -> None:
        """The ends of each leaf: itself, and results that are made of it alone,
        each with its uses.
        """
        self._ends: list[list[End]] = []
        self._uses: dict[_nodes.Node, list[tuple[_nodes.Use, bool]]] = {}
        self._sampled: dict[_nodes.Node, _nodes.Use] = {}
        for leaf in self._graph.leaves:
            ends = [End(_nodes.node_of(leaf), leaf.shape, leaf)]
            met = {ends[0].node}
            for end in ends:  # which grows
                self._uses[end.node] = own = []
                for use, turned in self._arguments(end.node, end.shape):
                    shapes = [shape for shape, _ in use.results()]
                    if not all(n.__class__ is int for shape in shapes for n in shape):  # nested
                        shapes = []
                    sampled = any(n and n % self._count == 0 for shape in shapes[:1] for n in shape)
                    if sampled and use.node not in self._shared:
                        self._sampled[use.node] = use
                        own += [(use, turned)]
                    elif len(shapes) != 1:  # each with uses of its own
                        own += [(use, turned)]
                    elif use.node not in met:
                        met.add(use.node)
                        ends += [End(use.node, Size(shapes[0]), use.edge)]
            self._ends += [ends]

    def _arguments(self, node: _nodes.Node, shape: Size) -> Iterator[tuple[_nodes.Use, bool]]:
        """The arguments where a parameter is used, and whether by its transpose."""
        for use in self._users.get(node, ()):
            if use.kind in ("Permute", "T", "Transpose") and len(shape) == 2:
                for below, turned in self._arguments(use.node, shape):
                    yield below, not turned
            else:
                yield use, False

    # --- passes

    def _place(self) -> bool:
        """Whether the derivatives by what has samples could be taken, and where these lie."""
        edges = [use.edge for use in self._sampled.values()]
        shapes = [Size(use.results()[0][0]) for use in self._sampled.values()]
        size = sum(map(Size.numel, shapes)) * self._numbers * self._seeds[0].element_size()
        if size > self._largest:
            return False
        derivatives = self._pulled(self._outputs, self._seeds, edges, shapes)
        if any(g.__class__ is not Tensor for g in derivatives):  # sharded
            return False
        self._derivatives = dict(zip(self._sampled, derivatives, strict=True))
        # in one pass with those by leaves whose proof is not remembered
        always = [n for n, ends in enumerate(self._ends) if self._hooked or len(ends) > 1]
        weighed = self._take_sums(always, edges, shapes)
        places = map(_place_of, derivatives, weighed, [self._weights] * len(edges))
        placed = zip(self._sampled, places, strict=True)
        self._places = {node: place for node, place in placed if place is not None}
        return True

    def _take_sums(
        self, numbers: Sequence[int], edges: Sequence[object] = (), shapes: Sequence[Size] = ()
    ) -> list[Tensor]:
        """The derivatives of all numbers' weighed sum, by results; those by leaves are kept."""
        weights, leaves = self._weights.unsqueeze(0), [self._graph.leaves[n] for n in numbers]
        own = [torch.einsum("ank,kn...->an...", weights, seed) for seed in self._seeds]
        sizes = [*shapes, *(leaf.shape for leaf in leaves)]
        parts = [part[0] for part in self._pulled(self._outputs, own, [*edges, *leaves], sizes)]
        self._sums |= zip(numbers, parts[len(edges) :], strict=True)
        return parts[: len(edges)]

    def _pulled(
        self,
        outputs: Sequence[object],
        seeds: Sequence[Tensor],
        inputs: Sequence[object],
        shapes: Sequence[Size],
    ) -> list[Tensor]:
        """The derivatives `(K, *shape)` for K cotangents, by tensors or results of operations."""

        def one(*given: Tensor) -> tuple[Tensor, ...]:
            recorded = self._graph.recorded
            parts = _reverse.vjp_between(outputs, inputs, given, keep=True, recorded=recorded)
            like = zip(parts, shapes, strict=True)
            return tuple(given[0].new_zeros(n) if part is None else part for part, n in like)

        if not inputs:
            return []
        if len(seeds[0]) > 1:
            try:
                return _reverse.batched(one, seeds)
            except Exception as error:  # no batching rule
                if not is_fault(error):
                    raise
        rows = [one(*each) for each in zip(*seeds, strict=True)]
        if len(rows) == 1:
            return [part.unsqueeze(0) for part in rows[0]]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    # --- rows

    def _rows_of(self, ends: list[End]) -> Outer:
        """The rows of a leaf: by its own uses, and by way of what is made of it alone."""
        parts = [self._through(end, ends[0]) for end in ends[1:] if self._uses[end.node]]
        parts += [self._own(ends[0])] if self._uses[ends[0].node] else []
        if not parts:
            zero = self._seeds[0].new_zeros(self._count, self._numbers, *ends[0].shape)
            parts = [Outer.of(zero, ends[0].shape)]
        return reduce(Outer.join, parts).shortest()

    def _own(self, end: End) -> Outer:
        """The rows by the operations that use it, each of which has a result for each sample."""
        parts = []
        for use, turned in self._uses[end.node]:
            expect(use.node in self._places and use.kind in READERS)
            g = self._derivatives[use.node]
            expect((g.dtype, g.device) == (self._seeds[0].dtype, self._seeds[0].device))
            at = self._places[use.node]
            self._facts += [use.kind, use.place, turned, end.shape, g.shape, at]
            given = Derivative(use, turned, end.shape, g, at, self._summands, self._facts)
            parts += [READERS[use.kind](given)]
        return reduce(Outer.join, parts)

    def _through(self, end: End, leaf: End) -> Outer:
        """The rows of a leaf by way of what is made of it alone."""
        entries = self._count * self._numbers * (end.shape.numel() + leaf.shape.numel())
        expect(entries * self._seeds[0].element_size() <= _reverse.CHUNK_BYTES)
        rows = self._own(end).rows()
        self._summands.clear()
        [parts] = self._pulled([end.edge], [rows.flatten(0, 1)], [leaf.edge], [leaf.shape])
        return Outer.of(parts.reshape(*rows.shape[:2], *leaf.shape), leaf.shape)

    def _alone(self, leaf: End) -> Outer | None:
        """The rows of a single sample, which are those of the passes; None of several samples."""
        size = self._numbers * leaf.shape.numel() * self._seeds[0].element_size()
        if self._count > 1 or size > _reverse.CHUNK_BYTES:
            return None
        [rows] = self._pulled(self._outputs, self._seeds, [leaf.edge], [leaf.shape])
        return Outer.of(rows.unsqueeze(0), leaf.shape)

    def _is_right(self, rows: Outer, expected: Tensor, summands: list[Tensor]) -> bool:
        """Whether the weighed sum S of the rows is what the pass gives, by a'S b of random a and b.

        Their unit is that of the parts: a bias of attention's keys changes nothing, and its
        derivatives at all positions sum to rounding.

        Reference:
            Freivalds, R. (1977). Probabilistic machines can use less running time. IFIP Congress.
        """
        if rows.left.dtype != expected.dtype:
            return False
        sizes = rows.left.shape[-1], rows.width
        chance = (_vectors.generic(FORMS * sum(sizes)) - 1.5) * 12**0.5  # of variance 1
        one, other = chance.to(expected).view(-1, FORMS).split(sizes)
        parts = rows.forms(one, other) * self._weights[:, :, None, None]
        apart = parts.sum((0, 1, 2)) - (one * (rows.matrix(expected) @ other)).sum(0)
        norms = [_norm(x) for x in (parts, expected, *summands)]
        bound = ROUNDING * torch.finfo(expected.dtype).eps * math.hypot(*norms)
        return float(apart.abs().max()) <= bound < math.inf


def units(outputs: Sequence[Tensor]) -> list[Tensor]:
    """For each number of a sample the unit vectors of all samples, `(K, N, ...)` of each output."""
    sizes, like = [output.shape[1:].numel() for output in outputs], outputs[0]
    each = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, 1)
    return [
        unit.reshape(-1, 1, *output.shape[1:]).expand(-1, *output.shape)
        for unit, output in zip(each, outputs, strict=True)
    ]


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))


def _place_of(g: Tensor, weighed: Tensor, weights: Tensor) -> SamplesAxis | None:
    """The place of samples in a result; None where each position is not one sample's."""
    count, (numbers, *sizes) = len(weights), g.shape
    before, total = 1, math.prod(sizes)
    tried = set[int]()
    for size in sizes:
        times = size // count if size % count == 0 else 0
        for outer in (n for n in range(1, times + 1) if times % n == 0):
            place = SamplesAxis(before * outer, count, total // (before * outer * count))
            if place.before not in tried and place.before * count * place.after == total:
                tried.add(place.before)
                parts, own = g.reshape(numbers, *place), weighed.new_zeros(place)
                for part, weight in zip(parts, weights.to(g).T.unsqueeze(-1), strict=True):
                    own.addcmul_(part, weight)
                if _close(own, weighed.reshape(place), parts.abs().amax(0)):
                    return place
        before *= size
    return None


def _close(result: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Whether two results agree up to rounding for each of the middle dimension, the samples.

    Where paths cancel, a sample keeps fewer digits: it is held against one of the usual size; and
    of thousands, some have lost more than others: the sum of the rows is proved besides.
    """
    if not result.numel():
        return True
    apart, size = (result - expected).abs().amax((0, 2)), size.amax((0, 2))
    unit = ROUNDING * torch.finfo(result.dtype).eps * size.maximum(size.median())
    return bool((apart <= 30 * unit).all()) and _norm(apart) <= _norm(unit)
