"""What one look at a graph tells before anything is differentiated, and the words for it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Sequence

from torch import Tensor

from hodiff._core import _nodes, _translate
from hodiff._core._checks import outside
from hodiff._core._where import Where
from hodiff.errors import BatchMixingWarning, CustomFunctionWarning, GraphError


def unused(graph: _nodes.Survey, leaves: Sequence[Tensor], names: Sequence[str]) -> list[str]:
    """The names of the leaves that are not in the graph."""
    return [name for leaf, name in zip(leaves, names, strict=True) if not graph.contains(leaf)]


def independent(owned: bool, unused: list[str], has_graph: bool) -> GraphError:
    """The error for a result that depends on nothing it could be differentiated by."""
    names = listed(unused)
    if has_graph:
        return GraphError(
            f"the result does not depend on {names}: it was computed from other tensors. "
            + (
                "Let f compute with the argument that it is given."
                if owned
                else "Give the tensors that it was computed from, not copies, views or detached ones of them."
            )
        )
    source = "the output of f" if owned else "f"
    return GraphError(
        f"{source} carries no graph: between {names} and the result everything was cut.", advice=USUAL_CAUSES
    )


USUAL_CAUSES = (
    "Usual causes: .detach(), .data or .item(), a torch.no_grad() block, NumPy, an integer or boolean step "
    "(argmax, a comparison), or torch.tensor(...) of a result."
)


def listed(names: list[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def refuse_bypass(graph: _nodes.Survey, where: Where) -> None:
    """Raise when the caller's own tensor is in the graph: `f` did not use what it was given."""
    for tensor, name in zip(where.tensors, where.names, strict=True):
        if tensor.requires_grad and graph.contains(tensor):
            raise GraphError(
                f"f reaches {name} other than through its argument, so that path would be missing from the "
                f"derivative. Compute with what f is given; for the parameters of a model pass the model itself: "
                f"hodiff.grad(lambda model: loss(model(x)), model). If f means a constant, close over "
                f"{name}.detach() instead."
            )


def check_functions(graph: _nodes.Survey, leaves: Sequence[Tensor], allow: Collection[str | type]) -> None:
    """Raise for Python `autograd.Function`s without a second derivative; warn, once a class, of the others."""
    for function, nodes in graph.functions():
        if function in allow or function.__name__ in allow or not _nodes.reaches(nodes, leaves):
            continue
        if function.__name__ == "CheckpointFunction" or "CompiledFunction" in function.__name__:
            raise _translate.missing([function.__name__])
        if _nodes.is_once_differentiable(function):
            raise GraphError(
                f"autograd.Function {function.__name__} is @once_differentiable: its part of a second derivative "
                f"would be missing, silently. Remove the decorator if its backward is made of differentiable "
                f"operations, or accept what is there with allow={function.__name__!r}.",
                functions=[function.__name__],
            )
        _warn_once(function)


def refuse_third_order(graph: _nodes.Survey) -> None:
    """Raise where a differentiable pass would form what PyTorch gets wrong: the third derivative of a norm."""
    norms = {type(node).__name__ for node in graph.named(*_translate.NORM_GRADIENTS)}
    if norms:
        layer = "layer_norm" if "NativeLayerNormBackwardBackward0" in norms else "batch_norm or instance_norm"
        raise GraphError(
            f"a third derivative through PyTorch's {layer} is wrong (by 3-81 %), silently, and this graph leads there. "
            f"Give hodiff the function instead of its value: hodiff.hvp(f, x, v, create_graph=True) writes the norm "
            f"out from its definition, and nested hodiff calls do so as well (autograd.grad inside f does not).",
            operations=["nativelayernorm" if layer == "layer_norm" else "nativebatchnorm"],
        )


def refuse_weight_norm(graph: _nodes.Survey, leaves: Sequence[Tensor]) -> None:
    """Raise where a second derivative would pass PyTorch's own weight norm."""
    if _nodes.reaches(graph.named(_translate.WEIGHT_NORM), leaves):
        raise GraphError(
            "a second derivative through PyTorch's weight_norm is wrong (by 30-120 %), silently. Give hodiff "
            "the function instead of its value, which writes the norm out from its definition.",
            operations=["weightnorm"],
        )


def mixes_samples(graph: _nodes.Survey) -> bool:
    """Whether a batch norm in training mode is in the graph."""
    names = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
    return any(getattr(node, "_saved_training", False) for node in graph.named(*names))


def warn_of_mixing(batch_ndim: int) -> None:
    """Say that samples are not independent."""
    warnings.warn(
        f"batch_ndim={batch_ndim} treats samples as independent, but f runs BatchNorm in training mode, "
        f"which mixes them: the result is the derivative of the sum over the batch, not each sample's own. "
        f"Use model.eval(), or another norm.",
        BatchMixingWarning,
        stacklevel=outside(),
    )


_warned: set[type] = set()
_warned_lock = threading.Lock()


def _warn_once(function: type) -> None:
    with _warned_lock:
        if function in _warned:
            return
        _warned.add(function)
    warnings.warn(
        f"{function.__name__} is a Python autograd.Function: a second derivative through it is whatever its backward "
        f"makes it, which PyTorch cannot verify. Check it once: hodiff.check_derivatives(f, x). "
        f"(This is said once per class.)",
        CustomFunctionWarning,
        stacklevel=outside(),
    )
