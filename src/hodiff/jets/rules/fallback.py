r"""The rule for operations without one: nested reverse mode, which is right wherever PyTorch's
backward is.

With the path \(x(t) = \sum_j x_j t^j\) and \(g(u, t) = \langle u, f(x(t)) \rangle\), coefficient k
of f is \(\frac{1}{k!} \partial_u \partial_t^k g\) at t = 0: k passes in t, one in u. Forward mode
is never nested: through some operations (`slogdet`, `solve`, ...) its second derivative is silently
wrong.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _nodes, _refusals, _reverse, _settings, _tree, _versions
from hodiff._core._faults import is_fault
from hodiff._core._messages import CONSTANTS
from hodiff.errors import GraphError
from hodiff.jets import _jet
from hodiff.jets._jet import RULES, ByNoRoute, NoDerivative, NoRule, Several, operation, rule
from hodiff.jets._series import Expansion, Series, full

REFUSED = {
    "native_layer_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit "
    "native_group_norm": "its native kernel has a wrong third derivative; use "
    "torch.nn.functional's norms",
    "polar stft hilbert to_sparse": "its result is not real",
    "grad checkpoint handle_torch_function": "jets do not pass through nested autograd",
    "_make_dual _unpack_dual _fwd_primal": "forward mode inside f (torch.func.jvp, "
    "torch.autograd.forward_ad) treats the tangent as a constant",
    "as_strided as_strided_scatter as_strided_copy": "it reads memory as it lies; use slices",
    "backward": "call hodiff's functions around f, not inside",
    "numpy __array__": "NumPy cuts the graph; use torch",
    "tolist": "the result would be a constant; use .detach().tolist()",
    "logcumsumexp": "its backward takes the logarithm of the cotangent, which a series cannot pass",
    "feature_alpha_dropout": "its mask would be drawn once more; draw it yourself and multiply",
    "select_scatter": "its batched form has a wrong derivative in PyTorch; use slice_scatter or "
    "torch.where",
    "lstm gru rnn_tanh rnn_relu": "use rnn cells",
    "register_hook storage untyped_storage data_ptr set_ rrelu aminmax": "",
}
"""What must not reach nested reverse mode, and why."""


def fallback(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
    """Coefficients of any differentiable operation of PyTorch."""
    name = operation(func)
    if name in CONSTANTS:
        raise NoDerivative(name)
    native = isinstance(
        func, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
    )
    if not native:
        raise NoRule(name)
    jets = _jet.jets_among((args, kwargs))
    if any(_jet.is_jet(jet.series[0]) or jet.expansion is not expansion for jet in jets):
        raise NoRule(name, "inside nested expansions")
    with _settings.grad_mode(True):
        value = func(*_jet.replaced(args, _jet.value_of), **_jet.replaced(kwargs, _jet.value_of))
        items, _, tree = _tree.flatten(value)
        places = [
            i
            for i, item in enumerate(items)
            if isinstance(item, Tensor) and item.is_floating_point()
        ]
        if any(isinstance(item, Tensor) and item.is_complex() for item in items):
            raise NoRule(name, "its result is complex")
        parts = [items[place] for place in places] + [
            c for jet in jets for c in jet.series if c is not None
        ]
        if places and any(map(_versions.is_batched, parts)):
            raise ByNoRoute(
                name,
                "it takes nested reverse mode of that operation, whose graph torch.vmap around a "
                "call hides",
                "Give the whole batch in one call, with batch_ndim=1, in place of torch.vmap.",
            )
        for place in places:
            items[place] = _coefficients(
                expansion, name, func, args, kwargs, jets, place, items[place]
            )
    return (
        items[0] if tree is None else Several(items, lambda parts: _tree.rebuild(tree, iter(parts)))
    )


def _coefficients(
    expansion: Expansion,
    name: str,
    func: Any,
    args: Any,
    kwargs: Any,
    jets: list[Any],
    place: int,
    value: Tensor,
) -> Series:
    """The series of one output. A summed top coefficient passes on its own: it enters linearly."""

    def one(*points: Tensor) -> tuple[Tensor, ...]:
        given = iter(points)
        replaced = lambda jet: next(given)  # noqa: E731 - jets come in the order in which they were collected
        result = func(*_jet.replaced(args, replaced), **_jet.replaced(kwargs, replaced))
        return (_tree.flatten(result)[0][place],)

    order, summed = expansion.order, expansion.top == expansion.order
    orders = range(1, order if summed else order + 1)
    try:
        rows = expansion.directions
        coefficients = _along(
            one, [_path(jet.series, orders, rows) for jet in jets], rows, order, value
        )
        if coefficients is None:
            return expansion.constant(value)
        if summed:
            coefficients[-1] = expansion.collapse(coefficients[-1])
            if any(jet.series[order] is not None for jet in jets):
                rows = next(len(jet.series[order]) for jet in jets if jet.series[order] is not None)
                steps = [[jet.series[0], jet.series[order]] for jet in jets]
                linear = _along(
                    one, [_path(step, range(1, 2), rows) for step in steps], rows, 1, value
                )
                coefficients[-1] = coefficients[-1] + linear[0] if linear else coefficients[-1]
    except GraphError as error:
        raise NoRule(name, str(error)) from error
    out = [value, *coefficients]
    return out if expansion.record else [part.detach() for part in out]


Path = Callable[[Tensor], Tensor]


def _path(series: Series, orders: range, rows: int) -> Path:
    """T -> the points x(t), one for each row of t."""
    base = series[0].unsqueeze(0).expand(rows, *series[0].shape)
    terms = [(k, full(series[k], series[0].shape)) for k in orders if series[k] is not None]

    def at(t: Tensor) -> Tensor:
        point = base
        for k, coefficient in terms:
            point = point + coefficient * t.reshape(-1, *[1] * (base.ndim - 1)) ** k
        return point

    return at


def _along(
    one: Callable[..., tuple[Tensor, ...]], paths: list[Path], rows: int, order: int, value: Tensor
) -> list[Tensor] | None:
    """The coefficients 1 to `order` of the operation along the paths;
    None where its result is a constant.
    """
    t = torch.zeros(rows, dtype=value.dtype, device=value.device, requires_grad=True)
    points = [path(t) for path in paths]
    try:
        output = _reverse.batched(one, points)[0]
    except RuntimeError as error:  # no batching rule
        if not is_fault(error):
            raise
        output = torch.stack([one(*each)[0] for each in zip(*points, strict=True)])
    if not output.requires_grad:
        return None
    if order > 1:
        _refusals.judge(_nodes.survey([output]), [t], order, ())
    u = torch.ones_like(output, requires_grad=True)
    g = (u * output).sum()
    derivatives = []
    for k in range(1, order + 1):
        g = _reverse.derivative(g, t).sum()
        derivatives.append(_reverse.derivative(g, u) / float(math.factorial(k)))
    return derivatives


def _refusing(why: str) -> Callable[..., Any]:
    def refuse(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
        raise NoRule(operation(func), why)

    return refuse


for _names, _why in REFUSED.items():
    rule("none", *_names.split())(_refusing(_why))

RULES.fallback = fallback
