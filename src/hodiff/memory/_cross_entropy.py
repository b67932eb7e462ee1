r"""Cross-entropy, twice differentiable at the memory of its gradient.

Of a row of logits *z* with weights *t* of its classes, whose sum is *a*, and \(p =
\operatorname{softmax}(z)\): \(a \log \sum e^z - t^\top z\). With the cotangent *g* its gradient is
\(g (a p - t)\), and the gradients of that for a cotangent *u* are \(g a\, p \circ (u - p^\top u)\)
by *z* and \(a\, p^\top u - t^\top u\) by *g*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hodiff._core import _call, _kernels, _versions
from hodiff.memory import _chunked
from hodiff.memory._chunked import Chunked, Tensors

LEAST = 2**17
"""The elements of logits below which PyTorch's plain operations are as good."""


@final
@dataclass(frozen=True, eq=False)
class CrossEntropyForm:
    """The settings of cross-entropy beside its tensors.

    Attributes:
        smoothing: The part of a target's weight that all classes share.
        ignored: The class index that stands for no target.
    """

    smoothing: float
    ignored: int

    def curvature(self, z: Tensor, target: Tensor, weight: Any, _: Any, g: Any, u: Any) -> Tensors:
        """The gradients of the first one by plain operations, in one piece."""
        targets = Targets(self, target, weight, z.dtype)
        p = targets.counted(z).softmax(1)
        inner, total = (p * u).sum(1, keepdim=True), targets.total(z.shape[1])
        return total * targets.counted(g) * p * (u - inner), total * inner - targets.along(u)


class Targets(NamedTuple):
    """The weights t of the classes: `share` for all, times their own, and `hot` at one."""

    form: CrossEntropyForm
    given: Tensor
    weight: Tensor | None
    dtype: torch.dtype

    @property
    def dense(self) -> bool:
        """Whether probabilities are given, and not the index of a class."""
        return self.given.is_floating_point()

    def live(self) -> Tensor:
        """The rows that count, with a dimension for the classes."""
        return (self.given != self.form.ignored).unsqueeze(1)

    def indices(self) -> Tensor:
        """The index of the class; of rows that do not count any."""
        return torch.where(self.live(), self.given.unsqueeze(1), 0).long()

    def hot(self) -> Tensor:
        """The weight at the index."""
        each = self.live().to(self.dtype) * (1 - self.form.smoothing)
        return each if self.weight is None else each * self.weight.to(self.dtype)[self.indices()]

    def share(self, classes: int) -> Tensor | float:
        """The weights that all rows have alike."""
        each = self.form.smoothing / classes
        return each if self.weight is None else each * self.weight.to(self.dtype)[:, None]

    def probabilities(self, classes: int) -> Tensor:
        """The weights of all classes, where probabilities are given."""
        t = self.given.to(self.dtype) * (1 - self.form.smoothing) + self.form.smoothing / classes
        return t if self.weight is None else t * self.weight.to(self.dtype)[:, None]

    def counted(self, x: Tensor) -> Tensor:
        """Logits or a cotangent, 0 where the row does not count, for neither may be finite there.

        Where no row counts their mean divides by 0.
        """
        return x if self.dense else torch.where(self.live(), x, 0)

    def total(self, classes: int) -> Tensor:
        """The sum a of the weights."""
        if self.dense:
            return self.probabilities(classes).sum(1, keepdim=True)
        if not self.form.smoothing:
            return self.hot()
        share = self.share(classes)
        alike = share.sum() if isinstance(share, Tensor) else share * classes
        return self.hot() + self.live().to(self.dtype) * alike

    def along(self, u: Tensor) -> Tensor:
        """The inner products of the weights with u, row by row."""
        classes = u.shape[1]
        if self.dense:
            return (self.probabilities(classes) * u).sum(1, keepdim=True)
        inner = self.hot() * u.gather(1, self.indices())
        if not self.form.smoothing:
            return inner
        return inner + torch.where(self.live(), (self.share(classes) * u).sum(1, keepdim=True), 0)

    def taken_from(self, x: Tensor, g: Tensor) -> Tensor:
        """Take g t from x, in place."""
        classes = x.shape[1]
        if self.dense:
            return x.addcmul_(self.probabilities(classes), g, value=-1)
        x.scatter_add_(1, self.indices(), -g * self.hot())
        return x.sub_(g * self.share(classes)) if self.form.smoothing else x


_Piece = tuple[slice, slice, slice]


def _pieces(z: Tensor) -> Iterator[_Piece]:
    """Parts of logits `(N, C, L)` of whole rows, which are along the second dimension."""
    fit = max(1, _chunked.size(z) // max(1, z.shape[1]))
    n, length = max(1, fit // max(1, z.shape[2])), min(fit, z.shape[2])
    for first in range(0, z.shape[0], n):
        for start in range(0, z.shape[2], length):
            yield slice(first, first + n), slice(None), slice(start, start + length)


def _taken(
    piece: _Piece, form: CrossEntropyForm, z: Tensor, target: Tensor, weight: Any, *rest: Tensor
) -> tuple[Tensor, Targets, list[Tensor]]:
    """Logits of some rows, with what belongs to them."""
    wide = torch.promote_types(z.dtype, torch.float32)
    at = piece if target.is_floating_point() else (piece[0], piece[2])
    targets = Targets(form, target[at], weight, wide)
    return targets.counted(z[piece].to(wide)), targets, [x[piece].to(wide) for x in rest]


@final
class CrossEntropy(Chunked):
    """The loss of each row, `(N, 1, L)`, of logits `(N, C, L)`."""

    @staticmethod
    def forward(z: Tensor, target: Tensor, weight: Tensor | None, form: CrossEntropyForm) -> Any:
        """Piece by piece; beside it the largest logits, and the sums of the exponentials.

        The two are apart, for a logarithm of the latter has few digits beside a large logit.
        """
        loss = z.new_empty(z.shape[0], 1, z.shape[2])
        wide = torch.promote_types(z.dtype, torch.float32)
        sums = z.new_empty(z.shape[0], 2, z.shape[2], dtype=wide)
        for piece in _pieces(z):
            logits, targets, _ = _taken(piece, form, z, target, weight)
            largest = logits.amax(1, keepdim=True)
            logits = logits - largest
            total = logits.exp().sum(1, keepdim=True)
            loss[piece] = targets.total(z.shape[1]) * total.log() - targets.along(logits)
            sums[piece] = torch.cat([largest, total], 1)
        return loss, sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the sums beside the arguments."""
        Chunked.setup_context(ctx, (*inputs[:3], output[1], inputs[3]), output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The first derivative, from what was kept."""
        return (
            CrossEntropyGradient.apply(*ctx.saved_tensors, cotangents[0], ctx.form),
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The derivative along a tangent, which is differentiable itself."""
        return CrossEntropyTangent.apply(*ctx.saved_tensors, tangents[0], ctx.form), None


@final
class CrossEntropyTangent(Chunked):
    """The derivative of each row's loss along a tangent of the logits."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        """The tangent of the loss: the part of the second derivative that does
        not depend on the cotangent.
        """
        *arguments, along, form = given
        result = arguments[0].new_empty(arguments[3][:, :1].shape)
        for piece in _pieces(arguments[0]):
            logits, targets, (each, u) = _taken(piece, form, *arguments, along)
            largest, normal = each.split(1, 1)
            inner = (torch.sub(logits, largest).exp_() * u).sum(1, keepdim=True) / normal
            result[piece] = targets.total(logits.shape[1]) * inner - targets.along(u)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradient: by the logits the second derivative; linear in the tangent."""
        *arguments, along = ctx.saved_tensors
        given = (*arguments, cotangents[0])
        by_z = CrossEntropyCurvature.apply(*given, along, ctx.form)[0]
        return by_z, None, None, None, CrossEntropyGradient.apply(*given, ctx.form), None


@final
class CrossEntropyGradient(Chunked):
    """The gradient by the logits, as a function of those and of the cotangent."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        """The results of all pieces, put together."""
        z, target, weight, sums, g, form = given
        result = torch.empty_like(z)
        for piece in _pieces(z):
            logits, targets, (each, part) = _taken(piece, form, z, target, weight, sums, g)
            part = targets.counted(part)
            largest, total = each.split(1, 1)
            p = torch.sub(logits, largest).exp_().mul_(targets.total(z.shape[1]) * part / total)
            result[piece] = targets.taken_from(p, part)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The second derivative, from what was kept."""
        by_z, by_g = CrossEntropyCurvature.apply(*ctx.saved_tensors, cotangents[0], ctx.form)
        return by_z, None, None, None, by_g, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent: along the logits the second derivative, which is symmetric;
        linear in the cotangent.
        """
        *arguments, g = ctx.saved_tensors
        parts: list[Any] = []
        if tangents[0] is not None:
            parts += CrossEntropyCurvature.apply(*arguments, g, tangents[0], ctx.form)[:1]
        if tangents[4] is not None:
            parts += [CrossEntropyGradient.apply(*arguments, tangents[4], ctx.form)]
        return reduce(torch.add, parts)


@final
class CrossEntropyCurvature(Chunked):
    """The gradients of the first one by the logits and by its cotangent, for a cotangent."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The results of all pieces, put together."""
        z, target, weight, sums, g, u, form = given
        by_z, by_g = torch.empty_like(z), torch.empty_like(g)
        for piece in _pieces(z):
            rows = _taken(piece, form, z, target, weight, sums, g, u)
            logits, targets, (each, part, along) = rows
            largest, normal = each.split(1, 1)
            p = torch.sub(logits, largest).exp_()
            inner, total = (p * along).sum(1, keepdim=True) / normal, targets.total(z.shape[1])
            by_g[piece] = total * inner - targets.along(along)
            by_z[piece] = p.mul_(along - inner).mul_(total * targets.counted(part) / normal)
        return by_z, by_g

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradient by plain operations, so that every further derivative is right."""
        return (*_chunked.pulled_back(ctx.form.curvature, ctx.saved_tensors, cotangents), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent by plain operations, too."""
        return _chunked.pushed(ctx.form.curvature, ctx.saved_tensors, tangents)


@final
class AtLogits(NamedTuple):
    """Cross-entropy at given logits, for what needs no graph: piece by piece.

    Attributes:
        loss: Its sum.
        gradient: By the logits.
        arguments: Logits `(N, C, L)`, what belongs to them, and cotangents that are 1.
        form: What it is beside them.
    """

    loss: Tensor
    gradient: Tensor
    arguments: tuple[Any, ...]
    form: CrossEntropyForm

    @classmethod
    def of(cls, z: Tensor, target: Tensor, weight: Any, form: CrossEntropyForm) -> AtLogits:
        """The function at detached logits of any dimensions."""
        whole, targets = _three(z, target)
        loss, sums = CrossEntropy.forward(whole, targets, weight, form)
        arguments = whole, targets, weight, sums, torch.ones_like(loss)
        gradient = CrossEntropyGradient.forward(*arguments, form)
        return cls(loss.sum(), gradient.reshape(z.shape), arguments, form)

    def times(self, u: Tensor) -> Tensor:
        """The product of the Hessian with a tangent."""
        along = u.reshape(self.arguments[0].shape)
        return CrossEntropyCurvature.forward(*self.arguments, along, self.form)[0].reshape(u.shape)

    def scale(self) -> Tensor:
        """The sum of the weights of each row, with a dimension for the classes."""
        z, target, weight, *_ = self.arguments
        total = Targets(self.form, target, weight, z.dtype).total(z.shape[1])
        one = self.gradient.ndim == 1
        return total.reshape(1 if one else (len(z), 1, *self.gradient.shape[2:]))


def _three(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `(N, C, L)`, and their targets."""
    whole = z[None, :, None] if z.ndim == 1 else z.reshape(*z.shape[:2], z.shape[2:].numel())
    dense = target.is_floating_point()
    return whole, target.reshape(whole.shape if dense else (whole.shape[0], whole.shape[2]))


def _rows_of(z: Tensor) -> tuple[int, ...]:
    """The shape of logits without their classes."""
    return () if z.ndim == 1 else (z.shape[0], *z.shape[2:])


# --- the kernel -----------------------------------------------------------------------------------


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy`, in a thread that has our kernels."""
    with _kernels.without():
        rest = (weight, reduction, ignore_index, label_smoothing)
        if not _chunked.varies(logits) or not _is_ours(logits, target, weight, ignore_index):
            return torch.ops.aten.cross_entropy_loss(logits, target, *rest)
        z, t = _three(logits, target)
        loss = CrossEntropy.apply(z, t, weight, CrossEntropyForm(label_smoothing, ignore_index))[0]
        return _reduced(loss, reduction, _rows_of(logits), t, weight, ignore_index)


def _reduced(
    loss: Any,
    reduction: int,
    rows: tuple[int, ...],
    t: Any,
    weight: Any,
    ignored: int,
) -> Any:
    """The losses of rows as they are asked for."""
    if reduction == 0:
        return loss.reshape(rows)
    if reduction == 2:
        return loss.sum()
    if not t.is_floating_point():  # a mean is the last operation, for `_versions.reduction`
        live = t != ignored
        counted = live if weight is None else weight[torch.where(live, t, 0)] * live
        wide = torch.promote_types(loss.dtype, torch.float32)
        loss = loss * (loss.numel() / counted.sum(dtype=wide))
    return loss.mean()


def written_out(
    logits: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Cross-entropy by plain operations, which series pass through; sums in float32 at least."""
    z, t = _three(logits, target)
    wide = torch.promote_types(z.dtype, torch.float32)
    targets = Targets(CrossEntropyForm(label_smoothing, ignore_index), t, weight, wide)
    loss = -targets.along(torch.log_softmax(targets.counted(z.to(wide)), 1))
    return _reduced(loss, reduction, _rows_of(logits), t, weight, ignore_index).to(z.dtype)


def cross_entropy_along(
    logits: Tensor,
    tangent: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """The result and its tangent; NotImplemented where plain operations are as good."""
    if _call.tangents() or not _is_ours(logits, target, weight, ignore_index):
        return NotImplemented
    (z, t), along = _three(logits, target), tangent.reshape(_three(logits, target)[0].shape)
    form = CrossEntropyForm(label_smoothing, ignore_index)
    with _kernels.without():
        loss, sums = CrossEntropy.apply(z, t, weight, form)
        parts = loss, CrossEntropyTangent.apply(z, t, weight, sums, along, form)
    rest = (reduction, _rows_of(logits), t, weight, ignore_index)
    return tuple(_reduced(part, *rest) for part in parts)


def _is_ours(z: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> bool:
    """Whether cross-entropy is computed by us; where an argument is wrong, PyTorch says so."""
    if _chunked.varies(target) or _chunked.varies(weight):
        return False
    if z.numel() < LEAST or not z.is_floating_point() or not _chunked.served(z, target, weight):
        return False
    devices = {x.device for x in (z, target, weight) if x is not None}
    if torch.is_autocast_enabled(z.device.type) or len(devices) > 1:
        return False
    classes = z.shape[1 if z.ndim > 1 else 0]
    if weight is not None and (weight.dtype != z.dtype or weight.shape != (classes,)):
        return False
    if target.is_floating_point():
        return target.shape == z.shape and target.dtype == z.dtype
    if target.dtype != torch.long or target.shape != _rows_of(z):
        return False
    if z.device.type != "cpu" or _versions.is_wrapped(target):
        return True
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    return not bool(wrong.any())
