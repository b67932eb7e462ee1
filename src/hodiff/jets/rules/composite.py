"""Composite operations, written from their definition on jets: norms and softmax are then right at every order."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hodiff._core import _near_zero, _substitutes
from hodiff.jets import _jet
from hodiff.jets._jet import MixesSamples, NoRule, operation, rule
from hodiff.jets._series import Expansion, aligned
from hodiff.jets.rules.fallback import fallback


def _detached_value(x: Any, expansion: Expansion) -> Any:
    """The value of a jet of this expansion, for shifts that do not change the result."""
    return x.series[0].detach() if _jet.belongs(x, expansion) else x.detach()


def _root(total: Any, power: float = 0.5) -> Any:
    """A power of a sum; at 0 its derivatives of every order are zero, as PyTorch has those of distances."""
    still = _jet.value_of(total).detach() == 0
    safe = torch.where(still, 1.0, total)
    return torch.where(still, 0.0, torch.sqrt(safe) if power == 0.5 else safe**power)


def _powers(x: Any, p: Any, dims: Any, keep: bool) -> Any:
    """The sum of powers Σ |x|^p."""
    if p == 2:
        return x.square().sum(dims, keepdim=keep)
    size = x if _near_zero.is_even(p) else torch.abs(x)
    return (size if p == 1 else size**p).sum(dims, keepdim=keep)


def _norm(expansion: Expansion, total: Any, p: Any) -> Any:
    """(Σ |x|^p)^(1/p). At 0 its slope is zero, as in PyTorch; and, as there, the rest is NaN below p = 3, else zero."""
    if p == 1 or p >= 3:
        return total if p == 1 else _root(total, 1 / p)
    norm: Any = torch.sqrt(total) if p == 2 else total ** (1 / p)
    if not _jet.belongs(norm, expansion) or norm.series[1] is None:
        return norm
    value, slope, *rest = norm.series
    slope = torch.where(_jet.value_of(value).detach() == 0, 0.0, aligned(slope, value.ndim))
    return _jet.wrap([value, slope, *rest], expansion)


def _softmax_parts(expansion: Expansion, x: Any, dim: int) -> tuple[Any, Any, Any]:
    shift = torch.amax(_detached_value(x, expansion), dim, keepdim=True)
    shift = torch.where(torch.isfinite(shift), shift, torch.zeros_like(shift))
    e = torch.exp(x - shift)
    return shift, e, e.sum(dim, keepdim=True)


def _softmax_dim(names: dict[str, Any]) -> int:
    dim = names.get("dim")
    if dim is None:
        raise NoRule("softmax without a dimension")
    return dim


@rule("composite", "softmax", "log_softmax", "softmin", "special_softmax", "special_log_softmax")
def softmax(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Exponentials over their sum, shifted by a constant for safety."""
    names = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x = names["input"] if names.get("dtype") is None else names["input"].to(names["dtype"])
    name = operation(func).removeprefix("special_")
    if name == "softmin":
        x = -x
    dim = _softmax_dim(names)
    shift, e, total = _softmax_parts(expansion, x, dim)
    return x - shift - torch.log(total) if name == "log_softmax" else e * (1 / total)


@rule("composite", "logsumexp", "special_logsumexp")
def logsumexp(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The logarithm of a sum of exponentials."""
    names = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    dim, keep = names["dim"], names.get("keepdim", False)
    shift, _, total = _softmax_parts(expansion, names["input"], dim)
    result = torch.log(total) + shift
    return result if keep else _squeezed(result, dim)


def _squeezed(x: Any, dim: Any) -> Any:
    if not x.ndim:
        return x
    dims = sorted((d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)), reverse=True)
    for d in dims:
        x = x.squeeze(d)
    return x


@rule("composite", "layer_norm")
def layer_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Layer norm from its definition: PyTorch's own is wrong at third order."""
    return _substitutes.layer_norm(*args, **kwargs)


@rule("composite", "batch_norm")
def batch_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """With running statistics only; those of the batch mix its samples."""
    given = _named(func, args, kwargs, "training")
    if given.get("training") or given.get("running_mean") is None:
        raise MixesSamples
    return _substitutes.batch_norm(**given)


@rule("composite", "instance_norm")
def instance_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Instance norm from its definition."""
    return _substitutes.instance_norm(**_named(func, args, kwargs, "use_input_stats"))


def _named(func: Any, args: Any, kwargs: Any, mode: str) -> dict[str, Any]:
    """The arguments of a norm by name: `torch.batch_norm` has another order than `torch.nn.functional.batch_norm`."""
    statistics, affine = ("running_mean", "running_var"), ("weight", "bias")
    kernel = func in (torch.batch_norm, torch.instance_norm)
    names = ("input", *(affine if kernel else statistics), *(statistics if kernel else affine), mode, "momentum", "eps")
    return dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}


@rule("composite", "_weight_norm")
def weight_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Weight norm from its definition: PyTorch's own is wrong at second order."""
    return _substitutes.weight_norm(*args, **kwargs)


@rule("composite", "sinc")
def sinc(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Sinc from its series near 0, where PyTorch's derivatives divide by it."""
    return _near_zero.sinc(*args, **kwargs)


@rule("composite", "i0", *(f"special_{name}" for name in _near_zero.BESSEL))
def bessel(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Bessel functions from their series near 0, by PyTorch's derivatives elsewhere."""
    far = lambda x: _jet.wrap(fallback(expansion, func, (x,), {}), expansion)  # noqa: E731
    return _near_zero.BESSEL[operation(func).removeprefix("special_")](*args, **kwargs, far=far)


@rule("composite", "group_norm")
def group_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """A layer norm of each group of channels."""
    names = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    x = names["input"]
    weight = names.get("weight")
    bias = names.get("bias")
    groups = x.reshape(x.shape[0], names["num_groups"], -1)
    centred = groups - groups.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + names.get("eps", 1e-5))
    normal = normal.reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


@rule("composite", "rms_norm")
def rms_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Over the root of the mean square."""
    names = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    x = names["input"]
    weight = names.get("weight")
    eps = names.get("eps")
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    dims = tuple(range(-len(names["normalized_shape"]), 0))
    normal = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return normal if weight is None else normal * weight


@rule("composite", "var", "std", "var_mean", "std_mean")
def variance(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Mean square deviation, with Bessel's correction unless told otherwise."""
    names = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x = names["input"]
    dim = names.get("dim")
    keep = names.get("keepdim", False)
    if len(args) > 2 or isinstance(dim, bool):
        raise NoRule(operation(func), "with positional flags; use keywords")
    if dim is None:
        dim = tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    count = math.prod(x.shape[d] for d in dims)
    correction = names.get("correction", 1 if names.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    centred = x - x.mean(dims, keepdim=True)
    squares = centred.square().sum(dims, keepdim=keep) * (
        1 / max(count - correction, 0) if count > correction else math.nan
    )
    squares = _root(squares) if operation(func).startswith("std") else squares
    return (squares, x.mean(dims, keepdim=keep)) if operation(func).endswith("mean") else squares


@rule("composite", "norm", "linalg_vector_norm", "linalg_norm")
def vector_norm(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The Euclidean norm, and those of whole and half-whole powers of |x|."""
    name = operation(func)
    first = {"norm": "p", "linalg_vector_norm": "ord", "linalg_norm": "ord"}[name]
    names: dict[str, Any] = dict(zip(("input", first, "dim", "keepdim", "dtype"), args, strict=False))
    names |= kwargs
    x: Any = names.get("input", names.get("x", names.get("A")))
    order = names.get(first)
    dim = names.get("dim")
    keep = names.get("keepdim", False)
    pair = (dim is None and x.ndim == 2) or (isinstance(dim, (tuple, list)) and len(dim) == 2)
    p: Any = 2 if order in (None, "fro") else order  # the Frobenius norm is the Euclidean one of all entries
    spectral = name == "linalg_norm" and pair and order not in (None, "fro")
    if spectral or isinstance(p, str) or p in (math.inf, -math.inf, 0) or names.get("dtype") is not None:
        raise NoRule(f"{name} of this kind")
    if dim is None:
        dim = range(x.ndim)
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return _norm(expansion, _powers(x, p, dims, keep), p)


@rule("composite", "dist", "pairwise_distance")
def norm_of_difference(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The norm of x1 - x2 from its definition."""
    if operation(func) == "dist":
        names = dict(zip(("input", "other", "p"), args, strict=False)) | kwargs
        return torch.linalg.vector_norm(names["input"] - names["other"], names.get("p", 2))
    names = dict(zip(("x1", "x2", "p", "eps", "keepdim"), args, strict=False)) | kwargs
    difference = names["x1"] - names["x2"] + names.get("eps", 1e-6)
    return torch.linalg.vector_norm(difference, names.get("p", 2.0), -1, names.get("keepdim", False))


@rule("composite", "cdist", "pdist")
def distances(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Distances from their definition: the third derivatives of PyTorch's own are NaN, or not there."""
    pairs = operation(func) == "pdist"
    names = dict(zip(("input", "p") if pairs else ("x1", "x2", "p"), args, strict=False)) | kwargs
    p = names.get("p", 2.0)
    if p in (0, math.inf):
        raise NoRule(f"{operation(func)} of this kind")
    if pairs:
        i, j = torch.triu_indices(len(names["input"]), len(names["input"]), 1, device=names["input"].device)
        difference = names["input"][i] - names["input"][j]
    else:
        difference = names["x1"].unsqueeze(-2) - names["x2"].unsqueeze(-3)
    total = _powers(difference, p, -1, False)
    return total if p == 1 else _root(total, 1 / p)


@rule("composite", "prod", "cumprod")
def products(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """By multiplying the entries."""
    return (_near_zero.prod if operation(func) == "prod" else _near_zero.cumprod)(*args, **kwargs)


@rule("composite", "det", "linalg_det")
def det(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """By multiplying it out, up to three rows; larger ones by PyTorch's derivatives."""
    larger = lambda *given, **named: _jet.wrap(fallback(expansion, func, given, named), expansion)  # noqa: E731
    return _near_zero.det(larger)(*args, **kwargs)


@rule("composite", "cosine_similarity")
def cosine_similarity(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The inner product of unit vectors."""
    names = dict(zip(("x1", "x2", "dim", "eps"), args, strict=False)) | kwargs
    a = names["x1"]
    b = names["x2"]
    dim = names.get("dim", 1)
    eps = names.get("eps", 1e-8)
    size = lambda v: torch.clamp(_norm(expansion, v.square().sum(dim), 2), min=eps)  # noqa: E731
    return (a * b).sum(dim) / (size(a) * size(b))


def _safe_softmax(expansion: Expansion, scores: Any) -> Any:
    """Softmax whose rows are zero where they are masked in full, as PyTorch has them in attention."""
    masked = (_detached_value(scores, expansion) == -math.inf).all(-1, keepdim=True)
    return F.softmax(scores.masked_fill(masked, 0.0), dim=-1).masked_fill(masked, 0.0)


@rule("composite", "scaled_dot_product_attention")
def attention(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """softmax(q kᵀ / √d + mask) v."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    q = given["query"]
    k = given["key"]
    v = given["value"]
    mask = given.get("attn_mask")
    if given.get("enable_gqa"):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    scale = given.get("scale")
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ k.mT
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = _safe_softmax(expansion, scores) if given.get("attn_mask") is not None else F.softmax(scores, dim=-1)
    dropped = given.get("dropout_p", 0.0)
    return (F.dropout(weights, p=dropped) if dropped else weights) @ v


@rule("composite", "mish")
def mish(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Mish: x tanh(softplus x)."""
    return args[0] * torch.tanh(F.softplus(args[0]))


@rule("composite", "softsign")
def softsign(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """X / (1 + |x|)."""
    return args[0] / (1 + torch.abs(args[0]))


@rule("composite", "tanhshrink")
def tanhshrink(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """X - tanh x."""
    return args[0] - torch.tanh(args[0])


@rule("composite", "hardsigmoid")
def hardsigmoid(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """The hard sigmoid: a clamped line."""
    return F.hardtanh(args[0] / 6, -0.5, 0.5) + 0.5


@rule("composite", "hardswish")
def hardswish(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """X times a hard sigmoid."""
    return args[0] * (F.hardtanh(args[0] / 6, -0.5, 0.5) + 0.5)


@rule("composite", "glu")
def glu(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """One half times the sigmoid of the other."""
    names = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    a, b = torch.chunk(names["input"], 2, dim=names.get("dim", -1))
    return a * torch.sigmoid(b)


@rule("composite", "logit", "special_logit")
def logit(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """log(x / (1 - x))."""
    if len(args) > 1 or kwargs:
        raise NoRule("logit with eps")
    return torch.log(args[0]) - torch.log1p(-args[0])


@rule("composite", "frac")
def frac(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """X minus its whole part."""
    return args[0] - torch.trunc(_detached_value(args[0], expansion))
