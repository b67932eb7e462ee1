"""What the losses share: whether they are recorded, how they are reduced, and the warnings that they give."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hodiff._core import _checks, _modes, _nodes, _reverse
from hodiff._core._assembly import plain
from hodiff._core._call import call
from hodiff._core._graph import Graph
from hodiff._core._lending import mark_of
from hodiff._core._options import Allowed, ExtremeReduction, Names, allowed
from hodiff.errors import GraphError, HodiffWarning, InputError


def recording(on: bool) -> AbstractContextManager[Any]:
    """Grad mode for what follows the derivatives: an explicit `create_graph=True` also wins under `no_grad`."""
    if torch.compiler.is_compiling():  # the tracer knows grad mode, but no inference mode
        return _modes.grad_mode(on)
    if on and torch.is_inference_mode_enabled():
        return _modes.recording()
    return _AS_IT_IS if torch.is_grad_enabled() is on else _modes.grad_mode(on)


_AS_IT_IS = nullcontext()


def accepted(allow: Allowed) -> Names:
    """`allow`, and the Function that DistributedDataParallel puts behind its outputs, which passes gradients on."""
    return Names((*names, "_DDPSink")) if (names := allowed(allow)) else _PASSES_ON


_PASSES_ON = Names(("_DDPSink",))


def check_critic(f: Any) -> None:
    """Raise unless `f` can be called or is a tensor, and for a wrapper that loses gradients."""
    if not callable(f) and not isinstance(f, Tensor):
        raise InputError(f"f: is a {type(f).__name__}, expected a function, a module, or a tensor computed from x.")
    if isinstance(f, DistributedDataParallel) and f.static_graph:
        raise static_graph_error()


def uncompiled(f: Any) -> Any:
    """The module inside a `torch.compile` wrapper: compiled code has no second derivative, and its wrapper warns."""
    return plain(f) if isinstance(f, nn.Module) else f


def check_function(f: Any) -> None:
    """Raise unless `f` can be called; a tensor will not do."""
    if isinstance(f, Tensor) or not callable(f):
        raise InputError(f"f: is a {type(f).__name__}, expected a function or a module.")


def evaluation(
    f: Any, x: Any, *, passes: int, batch_ndim: int, record: bool, allow: Allowed, args: Any, kwargs: Any
) -> Graph:
    """`f` at `x`, for a loss of its derivatives."""
    check_critic(f)
    return Graph(
        call(
            uncompiled(f),
            x,
            passes=passes,
            batch_ndim=batch_ndim,
            create_graph=record,
            allow=accepted(allow),
            args=args,
            kwargs=kwargs,
        )
    )


def pulled(ev: Graph, outputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Jᵀv for each of the stacked vectors, stacked; one is a plain pass, several go in batches."""
    count = vectors[0].shape[0]
    if count == 1:
        cotangents = _reverse.writable(ev, [v[0] for v in vectors])
        return [part.unsqueeze(0) for part in _reverse.pull(ev, outputs, cotangents)]
    return _reverse.products(ev, outputs, vectors, count, chunk_size=None)


def finished(loss: Tensor, f: Any, outputs: Tensor, leaves: Sequence[Tensor], record: bool) -> Tensor:
    """The loss, once it is known that its graph is worth having."""
    if not record:
        return loss
    refuse_static_graph([outputs])
    warn_if_constant(leaves)
    # Every parameter must take part in the backward, or the ranks are not averaged: a bias of the last
    # layer is in no gradient by the input.
    # (`isinstance` would ask an abstract base class, in Python.)
    return loss + 0 * outputs.sum() if DistributedDataParallel in f.__class__.__mro__ else loss


def check_number(value: Any, name: str, *, least: float) -> None:
    """Raise unless `value` is a finite number of at least `least`."""
    if value.__class__ in (float, int) and least <= value <= _checks.LARGEST:  # as nearly always
        return
    if not _checks.is_number(value) or value < least:
        bound = "" if least == -math.inf else f" of at least {least}"
        raise InputError(f"{name}: got {value!r}, expected a number{bound}.")


def refuse_empty(values: Tensor, reduction: ExtremeReduction) -> None:
    """Raise where there is no value to reduce; their sum is zero."""
    if reduction in ("mean", "max") and not values.numel():
        raise InputError(
            f'x: holds no sample, so there is no {reduction}; use reduction="sum", or skip the empty batch.'
        )


def reduce(values: Tensor, reduction: ExtremeReduction, weight: float) -> Tensor:
    """The values of all samples as one."""
    if reduction == "none":
        return weight * values
    refuse_empty(values, reduction)
    whole = {"max": values.max, "mean": values.mean, "sum": values.sum}[reduction]
    return weight * whole()


def _is_trained(leaf: Tensor) -> bool:
    """Whether a leaf is the caller's, or an enclosing call differentiates by it."""
    mark = mark_of(leaf)
    return leaf.requires_grad and (mark is None or mark[0].open)


def warn_if_constant(gradient: Sequence[Tensor]) -> None:
    """Warn when nothing that is trained can be reached from the gradient. `requires_grad` alone would not show it."""
    if gradient and not any(map(_is_trained, _nodes.leaves_below(gradient))):
        warnings.warn(
            "no trainable tensor is reachable from the gradient, so this penalty is a constant to the optimiser. Usual "
            "causes: all parameters are frozen, f detaches or leaves PyTorch somewhere, or the gradient does not "
            "depend on them. If only the value is wanted: create_graph=False, or call it under torch.no_grad().",
            HodiffWarning,
            stacklevel=_checks.outside(),
        )


_HAS_PROCESSES = torch.distributed.is_available()


def refuse_static_graph(outputs: Sequence[Tensor]) -> None:
    """Raise for a `DistributedDataParallel(static_graph=True)` that a function hides, at its first step."""
    if not (_HAS_PROCESSES and torch.distributed.is_initialized()):
        return
    for function, nodes in _nodes.survey(outputs).functions():
        if function.__name__ == "_DDPSink" and any(node.ddp_weakref().static_graph for node in nodes):
            raise static_graph_error()


def static_graph_error() -> GraphError:
    return GraphError(
        "f runs DistributedDataParallel(static_graph=True), which does not average the gradients of a penalty, "
        "silently: the ranks would drift apart. Give the module inside (ddp.module) to the penalty, and add it to a "
        "loss that goes through the wrapper, or build the wrapper without static_graph."
    )
