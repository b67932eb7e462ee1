"""Composite operations, written from their definition on jets:
norms and softmax are then right at every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hodiff._core import _refusals
from hodiff._core._substitutes import BY_DEFINITION
from hodiff.jets import _jet
from hodiff.jets._jet import (
    ByNoRoute,
    NoRule,
    by_formula,
    first_order,
    operation,
    rule,
    value_and_tangent,
)
from hodiff.jets._series import Expansion, aligned, scaled, total
from hodiff.jets.rules.elementwise import looked
from hodiff.jets.rules.fallback import fallback

Definition = Callable[..., Any]

_ATEN = torch.ops.aten


composite = partial(by_formula, "composite")
"""Register a definition under names of operations."""


def _constant(x: Any) -> Any:
    """The value of a jet, for shifts that do not change the result."""
    return _jet.value_of(x).detach()


def _root(total: Any, power: float = 0.5) -> Any:
    """A power of a sum; at 0 its derivatives of every order are zero,
    as PyTorch has those of distances.
    """
    still = _constant(total) == 0
    safe = torch.where(still, 1.0, total)
    return torch.where(still, 0.0, torch.sqrt(safe) if power == 0.5 else safe**power)


def _powers(x: Any, p: Any, dims: Any, keepdim: bool) -> Any:
    """The sum of powers Σ |x|^p."""
    if p == 2:
        return x.square().sum(dims, keepdim=keepdim)
    size = x if _refusals.is_even(p) else torch.abs(x)
    return (size if p == 1 else size**p).sum(dims, keepdim=keepdim)


def _norm(total: Any, p: Any) -> Any:
    """(Σ |x|^p)^(1/p).

    At 0 its slope is zero, as in PyTorch; and, as there, the rest is NaN below p = 3, else zero.
    """
    if p == 1 or p >= 3:
        return total if p == 1 else looked(_root(total, 1 / p), 0, at_zero=True)
    norm: Any = torch.sqrt(total) if p == 2 else total ** (1 / p)
    if not _jet.is_jet(norm) or norm.series[1] is None:
        return norm
    value, slope, *rest = norm.series
    slope = torch.where(_constant(value) == 0, 0.0, aligned(slope, value.ndim))
    return _jet.wrap([value, slope, *rest], norm.expansion)


def _softmax_parts(
    input: Any, dim: Any, dtype: torch.dtype | None = None
) -> tuple[Any, Any, Any, Any]:
    """The largest entry, as a constant; the argument less that; its exponentials; their sum."""
    if dim is None:
        raise NoRule("softmax without a dimension")
    x = input if dtype is None else input.to(dtype)
    shift = torch.amax(_constant(x), dim, keepdim=True)
    shift = torch.where(torch.isfinite(shift), shift, torch.zeros_like(shift))
    shifted = x - shift
    e = torch.exp(shifted)
    return shift, shifted, e, e.sum(dim, keepdim=True)


@composite("softmax", "special_softmax")
def softmax(input: Any, dim: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """Exponentials over their sum, shifted by a constant for safety."""
    *_, e, total = _softmax_parts(input, dim, dtype)
    return e * (1 / total)


@composite("log_softmax", "special_log_softmax")
def log_softmax(input: Any, dim: int | None = None, dtype: torch.dtype | None = None) -> Any:
    """The logarithm of `softmax`."""
    _, shifted, _, total = _softmax_parts(input, dim, dtype)
    return shifted - torch.log(total)


@composite("logsumexp", "special_logsumexp")
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """The logarithm of a sum of exponentials."""
    shift, _, _, total = _softmax_parts(input, dim)
    logarithm = torch.log(total) + shift
    return logarithm if keepdim else logarithm.squeeze(dim)


@rule("composite", "batch_norm")
def batch_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Batch normalization, by the statistics of the batch only where its samples may mix."""
    given = _named(func, args, kwargs, "training")
    mixes = given.get("training") or given.get("running_mean") is None
    if mixes and not expansion.mixes:
        why, way_out = "it mixes the samples of a batch", "Use model.eval() or another norm."
        raise ByNoRoute("BatchNorm in training mode", why, way_out)
    return BY_DEFINITION["batch_norm"](**given).to(given["input"].dtype)


@rule("composite", "instance_norm")
def instance_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Instance norm from its definition."""
    return BY_DEFINITION["instance_norm"](**_named(func, args, kwargs, "use_input_stats"))


@first_order("layer_norm")
def layer_norm_along(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Over the last dimensions."""
    pairs = [value_and_tangent(each) for each in (input, weight, bias)]
    return _norm_along(pairs, len(normalized_shape), eps, centered=True)


@first_order("rms_norm")
def rms_norm_along(
    input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    """Over the root of the mean square."""
    pairs = [value_and_tangent(each) for each in (input, weight, None)]
    least = torch.finfo(input.dtype).eps if eps is None else eps
    return _norm_along(pairs, len(normalized_shape), least, centered=False)


def _norm_along(pairs: Sequence[Any], ndim: int, eps: float, *, centered: bool) -> Any:
    """A norm with weights, and its tangent, with sums in float32, as PyTorch has them."""
    (x, t), (w, u), (b, s) = pairs
    if t is None:
        return NotImplemented
    dims, dtype = tuple(range(-ndim, 0)), x.dtype
    x, t = (each.to(torch.promote_types(dtype, torch.float32)) for each in (x, t))
    if centered:
        x, t = (each - each.mean(dims, keepdim=True) for each in (x, t))
    scale = torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    normal = x * scale
    t = torch.addcmul(t, normal, (normal * t).mean(dims, keepdim=True), value=-1) * scale
    value = total(scaled(normal, 1 if w is None else w), b)
    return value.to(dtype), _affine_along(t, w, scaled(normal, u), s)


def _affine_along(along: Any, weight: Any, moved: Any, bias: Any) -> Any:
    """The tangent of weight · norm + bias; of the weight, that times the norm is given."""
    base = total(moved, bias)
    if along is None or weight is None or base is None:
        return total(along if weight is None else scaled(along, weight), base)
    return torch.addcmul(base.to(along.dtype), along, weight.to(along.dtype))


def _named(func: Any, args: Any, kwargs: Any, mode: str) -> dict[str, Any]:
    """The arguments of a norm by name: `torch.batch_norm` has another order than
    `torch.nn.functional.batch_norm`.
    """
    statistics, affine = ("running_mean", "running_var"), ("weight", "bias")
    kernel = func in (torch.batch_norm, torch.instance_norm)
    names = (
        "input",
        *(affine if kernel else statistics),
        *(statistics if kernel else affine),
        mode,
        "momentum",
        "eps",
    )
    return dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}


@rule("composite", "i0", *(name for name in BY_DEFINITION if name.startswith("special_")))
def bessel(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Bessel functions from their series near 0, by PyTorch's derivatives elsewhere."""
    far = lambda x: _jet.wrap(fallback(expansion, func, (x,), {}), expansion)  # noqa: E731
    name = operation(func).removeprefix("special_")
    return BY_DEFINITION[f"special_{name}"](*args, **kwargs, far=far)


@composite("group_norm")
def group_norm(
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """A layer norm of each group of channels."""
    groups = input.reshape(input.shape[0], num_groups, math.prod(input.shape[1:]) // num_groups)
    normal = F.layer_norm(groups, groups.shape[-1:], eps=eps).reshape(input.shape)
    shape = (1, input.shape[1], *[1] * (input.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


@composite("rms_norm")
def rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    """Over the root of the mean square."""
    dims = tuple(range(-len(normalized_shape), 0))
    least = torch.finfo(input.dtype).eps if eps is None else eps
    normal = input * torch.rsqrt(input.square().mean(dims, keepdim=True) + least)
    return normal if weight is None else normal * weight


@rule("composite", "var", "std", "var_mean", "std_mean")
def variance(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Mean square deviation, with Bessel's correction unless told otherwise."""
    name = operation(func)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if len(args) > 2 or isinstance(dim, bool):
        raise NoRule(name, "with positional flags; use keywords")
    x, keepdim = args[0] if args else kwargs["input"], kwargs.get("keepdim", False)
    dims = _dims(x, dim)
    correction = kwargs.get("correction")
    free = math.prod(x.shape[d] for d in dims) - (
        kwargs.get("unbiased", True) if correction is None else correction
    )
    centered = x - x.mean(dims, keepdim=True)
    squares = centered.square().sum(dims, keepdim=keepdim) * (1 / free if free > 0 else math.nan)
    squares = _root(squares) if name.startswith("std") else squares
    return (squares, x.mean(dims, keepdim=keepdim)) if name.endswith("mean") else squares


def _dims(x: Any, dim: Any) -> tuple[int, ...]:
    """The dimensions that are meant; None means all."""
    if dim is None:
        return tuple(range(x.ndim))
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _vector_norm(name: str, x: Any, order: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """The Euclidean norm, and those of whole and half-whole powers of |x|."""
    # the Frobenius norm is the Euclidean one of all entries
    p = 2 if order in (None, "fro") else order
    if isinstance(p, str) or p in (math.inf, -math.inf, 0) or dtype is not None:
        raise NoRule(f"{name} of this kind")
    return _norm(_powers(x, p, _dims(x, dim), keepdim), p)


@composite("linalg_norm")
def linalg_norm(
    A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """A norm of vectors, or the Frobenius norm of a matrix."""
    pair = A.ndim == 2 if dim is None else isinstance(dim, (tuple, list)) and len(dim) == 2
    if pair and ord not in (None, "fro"):
        raise NoRule("linalg_norm of this kind")
    return _vector_norm("linalg_norm", A, ord, dim, keepdim, dtype)


def _distance(name: str, difference: Any, p: float) -> Any:
    """A norm from its definition: the third derivatives of PyTorch's own distances are NaN,
    or not there.
    """
    if p in (0, math.inf):
        raise NoRule(f"{name} of this kind")
    total = _powers(difference, p, -1, False)
    return total if p == 1 else _root(total, 1 / p)


@composite("pdist")
def pdist(input: Any, p: float = 2.0) -> Any:
    """The distances between all pairs of rows."""
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _distance("pdist", input[i] - input[j], p)


@rule("composite", "det", "linalg_det")
def det(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The determinant: multiplied out, up to three rows; larger ones by PyTorch's derivatives."""
    larger = lambda *given, **named: _jet.wrap(fallback(expansion, func, given, named), expansion)  # noqa: E731
    return BY_DEFINITION["det"](larger)(*args, **kwargs)


@composite("cosine_similarity")
def cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """The inner product of unit vectors."""
    size = lambda v: torch.clamp(_norm(v.square().sum(dim), 2), min=eps)  # noqa: E731
    return (x1 * x2).sum(dim) / (size(x1) * size(x2))


@composite("scaled_dot_product_attention")
def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(q kᵀ / √d + mask) v."""
    if enable_gqa:
        key, value = (
            each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value)
        )
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.mT
    mask = attn_mask
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = F.softmax(scores, dim=-1) if attn_mask is None else _safe_softmax(scores)
    return (F.dropout(weights, p=dropout_p) if dropout_p else weights) @ value


@first_order("scaled_dot_product_attention")
def attention_along(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Attention in closed form where that is leaner, as outside of Taylor mode."""
    given = zip(*map(value_and_tangent, (query, key, value, attn_mask)), strict=True)
    from hodiff.memory import _attention

    along: Any = _attention.attention_along
    return along(*given, *args, **kwargs)


@composite("cross_entropy_loss")
def cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """The targets' mean of the logarithm of `softmax`."""
    from hodiff.memory import _cross_entropy

    return _cross_entropy.written_out(*args, **kwargs)


@first_order("cross_entropy_loss")
def cross_entropy_along(logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Row by row where that is leaner, as outside of Taylor mode."""
    if _jet.jets_among((*args, *kwargs.values())):
        return NotImplemented
    from hodiff.memory import _cross_entropy

    return _cross_entropy.cross_entropy_along(*value_and_tangent(logits), *args, **kwargs)


def _safe_softmax(scores: Any) -> Any:
    """Softmax whose rows are zero where they are masked in full,
    as PyTorch has them in attention.
    """
    masked = (_constant(scores) == -math.inf).all(-1, keepdim=True)
    return F.softmax(scores.masked_fill(masked, 0.0), dim=-1).masked_fill(masked, 0.0)


@composite("glu")
def glu(input: Any, dim: int = -1) -> Any:
    """One half times the sigmoid of the other."""
    a, b = torch.chunk(input, 2, dim=dim)
    return a * torch.sigmoid(b)


@composite("logit", "special_logit")
def logit(input: Any, eps: float | None = None) -> Any:
    """log(x / (1 - x))."""
    if eps is not None:
        raise NoRule("logit with eps")
    return torch.log(input) - torch.log1p(-input)


@composite("prelu", "_prelu_kernel")
def prelu(input: Any, weight: Any) -> Any:
    """A learned slope below zero, one for each channel."""
    shape = () if weight.numel() == 1 else (-1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight.reshape(shape) * input)


DEFINITIONS: dict[str, Definition] = {
    # PyTorch's own derivatives of these are wrong at some order, or divide by the entries.
    **{
        name: BY_DEFINITION[name]
        for name in ("layer_norm", "_weight_norm", "sinc", "prod", "cumprod")
    },
    "cdist": lambda x1, x2, p=2.0, compute_mode=None: _distance(
        "cdist", x1.unsqueeze(-2) - x2.unsqueeze(-3), p
    ),
    "pairwise_distance": lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: torch.linalg.vector_norm(
        x1 - x2 + eps, p, -1, keepdim
    ),
    "dist": lambda input, other, p=2: torch.linalg.vector_norm(input - other, p),
    "norm": lambda input, p="fro", dim=None, keepdim=False, dtype=None: _vector_norm(
        "norm", input, p, dim, keepdim, dtype
    ),
    "linalg_vector_norm": lambda x, ord=2, dim=None, keepdim=False, dtype=None: _vector_norm(
        "linalg_vector_norm", x, ord, dim, keepdim, dtype
    ),
    "softmin": lambda input, dim=None, dtype=None: softmax(-input, dim, dtype),
    "masked_fill": lambda input, mask, value: torch.where(mask, value, input),
    "mish": lambda input: input * torch.tanh(F.softplus(input)),
    "softsign": lambda input: input / (1 + torch.abs(input)),
    "tanhshrink": lambda input: input - torch.tanh(input),
    "hardsigmoid": lambda input: F.hardtanh(input / 6, -0.5, 0.5) + 0.5,
    "hardswish": lambda input: input * F.hardsigmoid(input),
    "frac": lambda input: input - torch.trunc(_constant(input)),
    "outer ger": lambda input, vec2: input.unsqueeze(-1) * vec2,
    "addcmul": lambda input, tensor1, tensor2, value=1: input + tensor1 * tensor2 * value,
    "addcdiv": lambda input, tensor1, tensor2, value=1: input + tensor1 / tensor2 * value,
    "lerp": lambda input, end, weight: input + (end - input) * weight,
}

for _names, _definition in DEFINITIONS.items():
    composite(*_names.split())(_definition)
