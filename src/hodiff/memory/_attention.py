r"""Attention, twice differentiable at the memory of its gradient.

With \(P = \operatorname{softmax}(s Q K^\top + M)\), \(O = P V\), the cotangent \(G\) of \(O\) and
\(r = \operatorname{rowsum}(G \circ O)\), the first derivative is

\(W = P \circ (G V^\top - r)\), by q: \(s W K\), by k: \(s W^\top Q\), by v: \(P^\top G\), by M:
\(W\).

Its derivative in turn, for cotangents \(U\) of these four, with \(D = G V^\top - r\):

\(A = s (U_q K^\top + Q U_k^\top) + U_M\), \(E = P \circ (A - \operatorname{rowsum}(P \circ A))\),
\(X = E \circ D + P \circ (G U_v^\top)\), \(S = X - P \operatorname{rowsum}(X)\),

by q: \(s (S K + W U_k)\), by k: \(s (S^\top Q + W^\top U_q)\), by v: \(E^\top G\), by M: \(S\), by
G: \(E V + P U_v\).

The last is the derivative of attention along \(U\), too, and the others are that of the first
derivative. None of the matrices is there as a whole: they are made for some heads, or for some rows
of one, at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff._core import _call, _kernels, _needed, _settings, _vectors, _versions
from hodiff.memory import _chunked
from hodiff.memory._chunked import Chunked, Tensors

CPU = "cpu"
"""Where PyTorch's kernel gives the logarithms of its sums; elsewhere its best kernel is taken."""

LEAST = 2**19
"""The elements of the matrix of queries by keys below which plain operations are as good."""

_softmax: Any = vars(torch)["_safe_softmax"]


@final
@dataclass(frozen=True, eq=False)
class AttentionForm:
    """The settings of attention beside its tensors: q `(B, H, N, d)`, k and v `(B, J, M, ...)`, a
    mask.

    Attributes:
        scale: What the products of queries and keys are multiplied with.
        causal: Whether a query sees the keys up to its own place alone.
        fused: Whether PyTorch's kernel takes these.
        mask_varies: Whether a gradient by the mask is asked for.
    """

    scale: float
    causal: bool
    fused: bool
    mask_varies: bool

    @classmethod
    def of(
        cls,
        given: Sequence[Any],
        causal: bool,
        scale: float | None,
        mask_varies: bool,
    ) -> AttentionForm:
        """The form for q, k, v and a mask."""
        q, _, v, _ = given
        factor = q.shape[3] ** -0.5 if scale is None else scale
        # PyTorch's kernel multiplies the -inf of a causal mask by the scale, too: NaN if negative.
        fused = q.device.type == CPU and q.shape[3] == v.shape[3] and factor > 0
        return cls(factor, causal, fused, mask_varies)

    def curvature(self, *given: Any) -> Tensors:
        """The gradients of the first ones by plain operations, in one piece."""
        q, k, v, mask, g, _, *cotangents = given
        every, rows = slice(None), slice(0, q.shape[2])
        piece = Piece(self, every, every, rows, k.shape[2], _vectors.sum_dtype(q.dtype))
        by_q, by_k, by_v, by_mask, by_g = _second(piece, (q, k, v, mask, g, None), cotangents)
        by_q, by_g = (piece.apart(x).flatten(1, 2).to(q.dtype) for x in (by_q, by_g))
        if not self.mask_varies:
            return by_q, by_k.to(q.dtype), by_v.to(q.dtype), None, by_g
        part = piece.apart(by_mask)
        by_mask = part.sum_to_size(piece.of_mask(mask, k.shape[1]).shape).reshape(mask.shape)
        return by_q, by_k.to(q.dtype), by_v.to(q.dtype), by_mask.to(q.dtype), by_g


@final
@dataclass(frozen=True, eq=False)
class Piece:
    """Some rows of the matrix of queries by keys: of some batches, of some heads of the keys."""

    form: AttentionForm
    batch: slice
    head: slice
    row: slice
    keys: int
    dtype: torch.dtype

    @classmethod
    def all(cls, form: AttentionForm, q: Tensor, k: Tensor) -> Iterator[Piece]:
        """Whole heads where some fit, rows of one otherwise, up to the last key that is seen."""
        (batches, heads, rows), (shared, keys) = q.shape[:3], k.shape[1:3]
        row = heads // shared * keys
        fit = max(1, _chunked.size(q) // row)
        at_once = max(1, fit // rows)
        b, h = max(1, at_once // shared), min(at_once, shared)
        starts = range(0, batches, b), range(0, shared, h), range(0, rows, min(fit, rows))
        for batch, head, first in product(*starts):
            last = min(first + fit, rows)
            seen = min(last, keys) if form.causal else keys
            places = slice(batch, batch + b), slice(head, head + h), slice(first, last)
            yield cls(form, *places, seen, _vectors.sum_dtype(q.dtype))

    def place(self, x: Tensor, shared: int) -> Tensor:
        """The place of the piece's queries in a tensor that is like q: `(b, h, group, rows, d)`."""
        return x.unflatten(1, (shared, -1))[self.batch, self.head, :, self.row]

    def queries(self, x: Tensor, shared: int) -> Tensor:
        """The rows of a tensor that is like q, by heads of the keys: keys need no copies."""
        return self.place(x, shared).flatten(2, 3).to(self.dtype)

    def of_keys(self, x: Tensor) -> Tensor:
        """The piece's keys, or values."""
        return x[self.batch, self.head, : self.keys]

    def of_mask(self, mask: Tensor, shared: int) -> Tensor:
        """The piece's part of a mask, or of its like: `(b, h, group, rows, keys)`, some 1."""
        grouped = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (shared, -1))
        every = slice(None)
        places = self.batch, self.head, every, self.row, slice(0, self.keys)
        pairs = zip(grouped.shape, places, strict=True)
        return grouped[tuple(place if n > 1 else every for n, place in pairs)]

    def apart(self, x: Tensor) -> Tensor:
        """Rows told apart by their heads."""
        return x.unflatten(2, (-1, self.row.stop - self.row.start))

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None, shared: int) -> Tensor:
        """The softmax of the piece's rows; 0 in those masked in full by -inf, as PyTorch has it."""
        logits = self.apart((q * self.form.scale) @ k.mT)
        if self.form.causal:
            first, rows = self.row.start, logits.shape[3]
            hidden = torch.ones(rows, self.keys, dtype=torch.bool, device=q.device).triu(first + 1)
            logits = logits.masked_fill(hidden, -math.inf)
        if mask is None:
            return logits.flatten(2, 3).softmax(-1)
        part = self.of_mask(mask, shared)
        logits = logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part
        return _softmax(logits.flatten(2, 3), -1)


def _summed(
    make: Callable[[Piece], Tensors],
    form: AttentionForm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
) -> Tensors:
    """The pieces' results, by q, k, v, mask and cotangent, added up in the precision of sums.

    Keys and values have a part in many pieces, and so may a mask; a query and what it gets are in
    one.
    """
    shared, wide = k.shape[1], _vectors.sum_dtype(q.dtype)
    sums: list[Any] = [None] * 5
    with _settings.autocast(q.device.type):
        for piece in Piece.all(form, q, k):
            for at, (part, like) in enumerate(zip(make(piece), (q, k, v, mask, None), strict=True)):
                if part is None or (at == 3 and not form.mask_varies):
                    continue
                if sums[at] is None:
                    shape = (*q.shape[:3], v.shape[3]) if like is None else like.shape
                    sums[at] = q.new_zeros(shape, dtype=wide)
                if at in (0, 4):
                    piece.place(sums[at], shared).copy_(piece.apart(part))
                elif at == 3:
                    place = piece.of_mask(sums[at], shared)
                    place.add_(piece.apart(part).sum_to_size(place.shape))
                else:
                    piece.of_keys(sums[at]).add_(part)
    return tuple(None if x is None else x.to(q.dtype) for x in sums)


def _first(piece: Piece, *given: Any) -> Tensors:
    """The gradients of one piece."""
    q, k, v, mask, g, out = given
    shared, s = k.shape[1], piece.form.scale
    Q, G, O = (piece.queries(x, shared) for x in (q, g, out))
    K, V = (piece.of_keys(x).to(piece.dtype) for x in (k, v))
    P = piece.weights(Q, K, mask, shared)
    W = (G @ V.mT - (G * O).sum(-1, keepdim=True)) * P
    return s * (W @ K), s * (W.mT @ Q), P.mT @ G, W, None


class _Moved(NamedTuple):
    """The terms common to the second derivative of a piece and its tangent, in the names above."""

    Q: Tensor
    K: Tensor
    V: Tensor
    P: Tensor
    E: Tensor
    U: Tensor | None
    R: Tensor | None
    L: Tensor | None

    @classmethod
    def of(cls, piece: Piece, arguments: Sequence[Any], along: Sequence[Any]) -> _Moved:
        q, k, v, mask = arguments
        shared, s = k.shape[1], piece.form.scale
        Q = piece.queries(q, shared)
        K, V = (piece.of_keys(x).to(piece.dtype) for x in (k, v))
        P = piece.weights(Q, K, mask, shared)
        uq, uk, uv, um = along
        U = None if uq is None else piece.queries(uq, shared) * s
        R, L = (None if x is None else piece.of_keys(x).to(piece.dtype) for x in (uk, uv))
        A = None if U is None else U @ K.mT
        if R is not None:
            A = (Q * s) @ R.mT if A is None else A + (Q * s) @ R.mT
        if um is not None:
            part = piece.of_mask(um, shared).to(piece.dtype)
            A = part.expand(piece.apart(P).shape) if A is None else piece.apart(A) + part
            A = A.flatten(2, 3)
        E = torch.zeros_like(P) if A is None else P * A
        E = torch.addcmul(E, P, E.sum(-1, keepdim=True), value=-1)
        return cls(Q, K, V, P, E, U, R, L)

    def along(self) -> Tensor:
        """The tangent of the piece's result."""
        tangent = self.E @ self.V
        return tangent if self.L is None else tangent + self.P @ self.L


def _second(piece: Piece, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Any:
    """The gradients of the first ones, of one piece; without `out`, by plain operations."""
    *given, g, out = arguments
    moved = Q, K, V, P, E, U, R, L = _Moved.of(piece, given, cotangents)
    shared, s = given[1].shape[1], piece.form.scale
    G = piece.queries(g, shared)
    D = G @ V.mT
    D = D - (P * D if out is None else G * piece.queries(out, shared)).sum(-1, keepdim=True)
    X = E * D if L is None else torch.addcmul(E * D, P, G @ L.mT)
    S = torch.addcmul(X, P, X.sum(-1, keepdim=True), value=-1)
    W = P * D
    by_q, by_k = S @ K * s, S.mT @ Q * s
    if R is not None:
        by_q = by_q + W @ R * s
    if U is not None:
        by_k = by_k + W.mT @ U
    return by_q, by_k, E.mT @ G, S, moved.along()


def _additive(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """A mask as PyTorch's kernel takes it."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])


def _laid_out(*tensors: Tensor) -> list[Tensor]:
    """The tensor as PyTorch's kernel reads it, unchecked:
    with the entries of a row side by side.
    """
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


@final
class Attention(Chunked):
    """Attention, and the logarithms of the sums of its rows, where PyTorch's kernel gives them."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: AttentionForm) -> Any:
        """The output, by the kernel or piece by piece."""
        if form.fused:
            return _chunked.fused_attention(
                *_laid_out(q, k, v),
                0.0,
                form.causal,
                attn_mask=_additive(mask, q, k),
                scale=form.scale,
            )
        if q.device.type != CPU:
            grouped = q.shape[1] != k.shape[1]
            rest = {"is_causal": form.causal, "scale": form.scale, "enable_gqa": grouped}
            return F.scaled_dot_product_attention(q, k, v, mask, **rest), q.new_empty(0)

        def rows(piece: Piece) -> Tensors:
            K, V = (piece.of_keys(x).to(piece.dtype) for x in (k, v))
            return (
                None,
                None,
                None,
                None,
                piece.weights(piece.queries(q, k.shape[1]), K, mask, k.shape[1]) @ V,
            )

        return _summed(rows, form, q, k, v, mask)[4], q.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the result beside the arguments."""
        Chunked.setup_context(ctx, (*inputs[:4], *output, inputs[4]), output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The first derivative, from what was kept."""
        q, k, v, mask, out, rows = ctx.saved_tensors
        return (
            *AttentionGradient.apply(q, k, v, mask, cotangents[0], out.detach(), rows, ctx.form),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The derivative along tangents, which is differentiable itself."""
        *arguments, _ = ctx.saved_tensors
        q, k, v, mask, out = arguments
        return AttentionTangent.apply(q, k, v, mask, out.detach(), *tangents[:4], ctx.form), None


@final
class AttentionGradient(Chunked):
    """The gradients by q, k, v and the mask, as a function of those and of the cotangent."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The gradient, by the kernel; in pieces where that has few digits
        (`_versions.rounds_rows`) or none.
        """
        q, k, v, mask, g, out, rows, form = given
        fused = form.fused and not form.mask_varies
        if fused and rows is not None and not bool((rows.abs() > _versions.LARGEST).any()):
            made = _chunked.fused_attention_backward(
                g,
                *_laid_out(q, k, v),
                out,
                rows,
                0.0,
                form.causal,
                attn_mask=_additive(mask, q, k),
                scale=form.scale,
            )
            return *made, None
        return _summed(lambda piece: _first(piece, *given[:6]), form, q, k, v, mask)[:4]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The second derivative, from what was kept."""
        made = AttentionCurvature.apply(*ctx.saved_tensors[:6], *cotangents, ctx.form)
        return *made, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent: along the arguments the second derivative, which is symmetric;
        linear in the cotangent.
        """
        q, k, v, mask, g, out, rows = ctx.saved_tensors
        made = AttentionCurvature.apply(q, k, v, mask, g, out, *tangents[:4], ctx.form)[:4]
        if tangents[4] is not None:
            moved = AttentionGradient.apply(q, k, v, mask, tangents[4], out, rows, ctx.form)
            made = _chunked.plus(made, moved)
        return made


@final
class AttentionCurvature(Chunked):
    """The gradients of the first ones by q, k, v, mask and cotangent, for their cotangents."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        """The sums of what the pieces give."""
        *given, form = inputs
        return _summed(lambda piece: _second(piece, given[:6], given[6:]), form, *given[:4])

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradient by plain operations, so that every further derivative is right."""
        with _settings.autocast(ctx.saved_tensors[0].device.type):
            return (*_chunked.pulled_back(ctx.form.curvature, ctx.saved_tensors, cotangents), None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """The tangent by plain operations, too."""
        with _settings.autocast(ctx.saved_tensors[0].device.type):
            return _chunked.pushed(ctx.form.curvature, ctx.saved_tensors, tangents)


@final
class AttentionTangent(Chunked):
    """The derivative of attention along tangents of q, k, v and the mask."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, mask: Any, out: Any, *rest: Any) -> Any:
        """The tangent of the output: the part of the second derivative that does
        not depend on the cotangent.
        """
        *tangents, form = rest

        def along(piece: Piece) -> Tensors:
            return *[None] * 4, _Moved.of(piece, (q, k, v, mask), tangents).along()

        return _summed(along, form, q, k, v, mask)[4]

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradient: by the arguments the second derivative again; linear in the tangents."""
        q, k, v, mask, out, *tangents = ctx.saved_tensors
        given = q, k, v, mask, cotangents[0], out
        made = AttentionCurvature.apply(*given, *tangents, ctx.form)[:4]
        along = AttentionGradient.apply(*given, None, ctx.form)
        pairs = zip(along, tangents, strict=True)
        return *made, None, *(None if t is None else by for by, t in pairs), None


# --- the kernel -----------------------------------------------------------------------------------


def _plainly(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Attention by matrix products: PyTorch's other kernels have no second derivative.

    Of a row that is masked in full the derivative of PyTorch's tangent is NaN: it is left out.
    """
    dead = None
    if mask is not None and _call.tangents():
        hidden = ~mask if mask.dtype == torch.bool else mask == -math.inf
        dead = hidden.all(-1, keepdim=True)
        mask = mask.masked_fill(dead, mask.dtype == torch.bool)
    with _settings.Scope(_kernels.plain_attention.enter):
        out = F.scaled_dot_product_attention(q, k, v, mask, *args, **kwargs)
    return out if dead is None else out.masked_fill(dead, 0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, in a thread that has our kernels."""
    with _kernels.without():
        rest = {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value, attn_mask)
        traced = _chunked.is_compiled()
        wrong = attn_mask is not None and attn_mask.ndim < 2  # PyTorch's matrix products take it
        if not any(map(_chunked.varies, given)) or traced or wrong or _first_is_enough(query):
            return F.scaled_dot_product_attention(*given, dropout_p, is_causal, **rest)
        usual = not dropout_p and not (is_causal and attn_mask is not None)
        ours = usual and _chunked.served(*given)
        prepared = _prepared(_cast(given), enable_gqa) if ours else None
        if prepared is None:
            return _plainly(*given, dropout_p, is_causal, **rest)
        *arguments, lead = prepared
        form = AttentionForm.of(arguments, is_causal, scale, _chunked.varies(attn_mask))
        out = Attention.apply(*arguments, form)[0]
        return out.reshape(*lead, *out.shape[2:]) if len(lead) != 2 else out


def attention_along(
    given: Sequence[Any],
    tangents: Sequence[Any],
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The result and its tangent; NotImplemented where plain operations are as good."""
    unusual = dropout_p or (is_causal and given[3] is not None) or _call.tangents()
    if unusual or not _chunked.served(*given, *tangents):
        return NotImplemented
    prepared = _prepared(given, enable_gqa)
    if prepared is None:
        return NotImplemented
    *arguments, lead = prepared
    pairs = zip(given, tangents, strict=True)
    moved = _prepared([x if t is None else t for x, t in pairs], enable_gqa)[:4]
    varies = tangents[3] is not None or _chunked.varies(given[3])
    form = AttentionForm.of(arguments, is_causal, scale, varies)
    with _kernels.without():
        out = Attention.apply(*arguments, form)[0]
        along = [None if t is None else x for x, t in zip(moved, tangents, strict=True)]
        tangent = AttentionTangent.apply(*arguments, out.detach(), *along, form)
    return tuple(x.reshape(*lead, *x.shape[2:]) for x in (out, tangent))


def _first_is_enough(q: Tensor) -> bool:
    """Whether PyTorch's own first derivative will do. Where `f` takes one itself, it runs again."""
    running = _call.state.running
    return q.device.type != CPU and bool(running) and running[-1].call.order < 2


def _cast(given: tuple[Any, ...]) -> list[Any]:
    """Arguments as autocast would have them."""
    device = given[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return [*given]
    to = torch.get_autocast_dtype(device)
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return [x if x is None or x.dtype not in floats else x.to(to) for x in given]


def _prepared(given: Sequence[Any], grouped: bool) -> Any:
    """Arguments with four dimensions, and the result's leading ones; None: plain operations."""
    q, k, v, mask = given
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return None
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or not q.is_floating_point():
        return None
    if mask is not None and mask.dtype not in (torch.bool, q.dtype):
        return None
    if grouped:
        # The kernel of the processor reads beyond the keys of fewer heads than the queries have
        # (measured on 2.8: not finite, or a segmentation fault).
        if _needed.RELEASE < (2, 12):
            return None
        if min(q.ndim, k.ndim, v.ndim) < 3 or k.shape[:-2] != v.shape[:-2]:
            return None
        if q.shape[:-3] != k.shape[:-3] or q.shape[-3] % k.shape[-3]:
            return None
        lead = q.shape[:-2]
    else:
        most = max(q.ndim, k.ndim, v.ndim)
        shapes = [(*[1] * (most - x.ndim), *x.shape[:-2]) for x in (q, k, v)]
        lead = torch.Size(map(max, zip(*shapes, strict=True)))
        if any(n not in (1, of) for shape in shapes for n, of in zip(shape, lead, strict=True)):
            return None
        q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    rows, keys = q.shape[-2], k.shape[-2]
    if lead.numel() * rows * keys < LEAST:
        return None
    if mask is not None:
        mask = _four(mask, lead, rows, keys)
        if mask is None:
            return None
    q, k, v = (x.reshape(-1, *x.shape[-3:]) if x.ndim > 2 else x[None, None] for x in (q, k, v))
    return q, k, v, mask, lead


def _four(mask: Tensor, lead: torch.Size, rows: int, keys: int) -> Tensor | None:
    """A mask with four dimensions, each of them 1 or that of the result."""
    full = (*lead, rows, keys)
    if mask.ndim > len(full):
        return None
    if any(n not in (1, of) for n, of in zip(mask.shape, full[-mask.ndim :], strict=True)):
        return None
    mask = mask.reshape(*[1] * (max(4, len(full)) - mask.ndim), *mask.shape)
    if mask.ndim > 4:
        outer = (1,) * (mask.ndim - 3) if mask.shape[:-3].numel() == 1 else lead[:-1]
        mask = mask.expand(*outer, *mask.shape[-3:]).reshape(-1, *mask.shape[-3:])
    return mask
