"""PyTorch's words turned into ways out: which operation, why, and what to write instead."""

from __future__ import annotations

import re

from hodiff._core import _versions
from hodiff.errors import GraphError

# Keyed by a piece of a node's name, lower case without underscores: the same key finds the forward
# node (`CdistBackward0`), its derivative (`CdistBackwardBackward0`) and the engine's error text.
_WAYS_OUT = {
    "scaleddotproduct": (
        "fused scaled_dot_product_attention; f switched it on itself, or the tensor was computed outside. Compute it "
        "under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or give hodiff the function, which does that"
    ),
    "cudnnrnn": (
        "a cuDNN RNN; compute it under torch.backends.cudnn.flags(enabled=False), or give hodiff the function, "
        "which does that"
    ),
    "cdist": 'cdist; use compute_mode="use_mm_for_euclid_dist", or write (a[:, None] - b).square().sum(-1).sqrt()',
    "pdist": "pdist; index the pairs and write their differences",
    "embeddingbag": "embedding_bag; use nn.Embedding and reduce with .sum(-2) or .mean(-2)",
    "ctcloss": "ctc_loss; there is no differentiable substitute in PyTorch",
    "segmentreduce": "segment_reduce; use index_add",
    "multimargin": "multi_margin_loss; write it with gather and clamp",
    "multilabelmargin": "multilabel_margin_loss; write it with gather and clamp",
    "hardsigmoid": "hardsigmoid; write (x / 6 + 0.5).clamp(0, 1)",
    "compiledfunction": (
        "a compiled function; compute it uncompiled, or give hodiff the function, which runs it eagerly"
    ),
    "checkpointfunction": "a re-entrant checkpoint; use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
}

# Nodes that carry no marker of their own, yet raise as soon as they are differentiated.
UNMARKED = ("EmbeddingBagBackwardBackward0", *_versions.DISTANCES)

WEIGHT_NORM = "WeightNormInterfaceBackward0"

NORM_GRADIENTS = ("NativeLayerNormBackwardBackward0", "NativeBatchNormBackwardBackward0")


def way_out(name: str) -> str | None:
    """The operation behind a node or ATen name, and how to do without it."""
    key = name.lower().replace("_", "")
    return next((advice for piece, advice in _WAYS_OUT.items() if piece in key), None)


def blames(message: str, name: str) -> bool:
    """Whether a message of ours is about the nodes of a class, forward or backward, by the class's name."""
    advice = way_out(name)
    return (advice is not None and advice in message) or any(
        words in message and piece in name for piece, words in _BLAMED.items()
    )


_BLAMED = {"WeightNorm": "weight_norm", "NativeLayerNorm": "layer_norm", "NativeBatchNorm": "batch_norm"}


def missing(names: list[str]) -> GraphError:
    """The error for a graph through operations that have no second derivative."""
    known = [advice for name in names if (advice := way_out(name))]
    if known:
        return GraphError("PyTorch has no second derivative of " + "; nor of ".join(dict.fromkeys(known)) + ".")
    return GraphError(
        f"an operation in this graph has no second derivative in PyTorch. Operations in it: {', '.join(names)}. "
        f"Write that operation with others, or check it alone with hodiff.check_derivatives."
    )


FREED_WAY_OUT = (
    "Call hodiff before that pass (hodiff never frees a graph of yours), or give hodiff the function instead of its "
    "value: hodiff.hvp(f, x, v)."
)
_FREED = (
    "the graph has already been freed: a backward() or autograd.grad() without retain_graph ran through part of it. "
    + FREED_WAY_OUT
)
_CHANGED = (
    "a tensor that the graph needs was changed in place after it was used. Compute the result again after the change, "
    "or replace the in-place operation (x += 1) by x = x + 1."
)
_COMPILED = (
    "a compiled function has no second derivative. Compute the tensor uncompiled, or give hodiff the function, which "
    "runs it eagerly."
)
_REENTRANT = (
    "a re-entrant activation checkpoint cannot be differentiated by inputs. "
    "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
_RECOMPUTED = (
    "an activation checkpoint recomputed something else than its forward pass. A third or higher derivative writes "
    "norm layers out from their definition, which a recomputation does not repeat: switch checkpointing off for this "
    "call."
)
_ONCE = (
    "a @once_differentiable autograd.Function was asked for a second derivative. "
    "Remove the decorator if its backward is made of differentiable operations."
)

_TEXTS = {
    "backward through the graph a second time": _FREED,
    "Trying to access the saved tensors after they have already been freed": _FREED,
    "modified by an inplace operation": _CHANGED,
    "does not currently support double backward": _COMPILED,
    "non-empty donated buffers": _COMPILED,
    "CheckpointFunctionBackward": _REENTRANT,
    "torch.utils.checkpoint is incompatible": _REENTRANT,
    "Checkpointing is not compatible with .grad()": _REENTRANT,
    "torch.utils.checkpoint: ": _RECOMPUTED,
    "marked with @once_differentiable": _ONCE,
}

_NOT_IMPLEMENTED = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")


def engine_error(error: Exception) -> GraphError | None:
    """Our words for an error of PyTorch's autograd engine; None for one that we do not recognise."""
    text = str(error)
    found = _NOT_IMPLEMENTED.search(text)
    if found:
        advice = way_out(found.group(1))
        return missing([found.group(1)]) if advice else GraphError(f"PyTorch has no derivative of {found.group(1)}.")
    return next((GraphError(words) for piece, words in _TEXTS.items() if piece in text), None)


_IN_PLACE = "is being used in an in-place operation"
_INFERENCE = "Inference tensors cannot be saved for backward"


def about_inference(error: Exception) -> bool:
    """Whether an operation refused a tensor that was made in inference mode."""
    return "nference tensor" in str(error)


def advice_for_f(error: Exception) -> str | None:
    """A note for an exception from the user's function that our leaves provoked."""
    text = str(error)
    if _IN_PLACE in text or "is a view and is being modified inplace" in text:
        return "hodiff: f changes its argument in place; begin it with x = x.clone(), or pass lambda x: f(x.clone())."
    if _INFERENCE in text:
        return "hodiff: a tensor that f closes over was made in inference_mode; clone it outside that mode first."
    return None
