"""Attention and cross-entropy at the memory of a gradient, for loops of anybody's."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from hodiff._core import _hooks, _messages, _settings
from hodiff._core._versions import uncompiled
from hodiff.errors import GraphError

__all__ = ["twice_differentiable"]


def twice_differentiable() -> AbstractContextManager[None]:
    r"""A context in which attention and cross-entropy have lean second derivatives.

    Inside it `F.scaled_dot_product_attention`, whoever calls it (`nn.MultiheadAttention`,
    `nn.TransformerEncoderLayer`, a function that imported it by name), returns its usual value,
    with a graph that can be differentiated any number of times. So does `F.cross_entropy`. Use it
    in your own loop: `create_graph=True`, MAML, R1 penalties, test-time training, forward mode
    (`torch.func.jvp`) with a graph. Functions that you pass to hodiff always run like this.

    It also serves models on several processes. Second derivatives by the inputs of a
    tensor-parallel module are right, where PyTorch leaves a part out. A model under `fully_shard`
    is sharded again when the context closes, if a backward pass has reduced its gradients there;
    see 'Several processes' in the documentation.

    With \(P = \operatorname{softmax}(s Q K^\top + M)\), \(O = P V\) and a cotangent *G*, the first
    derivative is made of \(W = P \circ (G V^\top - \operatorname{rowsum}(G \circ O))\):
    \(s W K\) by *Q*, \(s W^\top Q\) by *K*, \(P^\top G\) by *V*, *W* by an additive mask *M*.
    These are differentiated in closed form, without ever storing a whole matrix of queries by keys.

    Shapes, dtypes and errors are PyTorch's: masks (causal, boolean, additive, fully masked rows),
    grouped queries, any leading dimensions; class weights, `ignore_index`, label smoothing,
    probabilities, each `reduction`. In half precision, sums are computed in float32. Other cases
    use PyTorch's plain operations, which are correct at every order but take more memory: dropout
    inside attention, tensor subclasses, tracing, forward mode through forward mode, a third
    derivative; cross-entropy under autocast.

    The context belongs to the thread, may be nested, and changes nothing outside of it; a thread
    that your function starts enters it by itself. A graph keeps its derivatives when the context
    ends. Blocks under `torch.utils.checkpoint` made inside the context run again as they ran,
    whenever the backward pass comes; those made outside need their pass outside. The second
    derivative of a compiled function still raises. Not covered: third derivatives through PyTorch's
    layer, batch and instance norm, which hodiff's own calls compute from their definition (for a
    tensor made here they raise), nested tensors, and `flex_attention`. On releases of PyTorch that
    cannot hold such kernels, plain operations are used.

    Returns:
        A context manager.

    Raises:
        RuntimeError: PyTorch does not accept the arguments.
        GraphError: On closing: `fully_shard` has left a parameter without its gradient, or has
            freed parameters that a second pass needs.

    Cost:
        Attention takes the memory of its gradient, and a few MiB more in the second pass: a
        Hessian-vector product of one layer with 4 heads of 64 at 2,048 tokens takes 40 MiB instead
        of 725. Its time equals that of attention by matrix products at 512 tokens; at 2,048 it is
        0.6 of that, and 0.4 with a causal mask. Cross-entropy holds one tensor of the logits' size
        for each pass. Below half a million entries (queries by keys; a quarter of that for logits)
        PyTorch's plain operations are as good, and are used.

    Examples:
        The second derivative of one key's and one query's attention to two values, \(\tanh''(q)\):

        >>> import torch, hodiff
        >>> import torch.nn.functional as F
        >>> q = torch.tensor([[0.5]], requires_grad=True)
        >>> keys = values = torch.tensor([[1.0], [-1.0]])
        >>> with hodiff.twice_differentiable():
        ...     value = F.scaled_dot_product_attention(q, keys, values)
        >>> (slope,) = torch.autograd.grad(value, q, create_graph=True)
        >>> (bend,) = torch.autograd.grad(slope, q)
        >>> torch.allclose(bend, -2 * value * (1 - value**2))
        True

    Reference:
        Dao, T., et al. (2022). FlashAttention: fast and memory-efficient exact attention.
        arXiv:2205.14135.
    """
    return _settings.Offered(_enter, "hodiff.twice_differentiable")


@uncompiled  # until 2.11 the tracer follows what is entered behind a break
def _enter(undo: _settings.Undo) -> None:
    _hooks.serve(undo)
    if "torch.distributed.fsdp" in sys.modules:
        met: dict[Any, Any] = {}
        meet = partial(_meet, met, threading.get_ident())
        undo += [partial(_shard_again, met, sys.exc_info()[1])]
        undo += [register_module_forward_pre_hook(meet).remove]


def _meet(met: dict[Any, Any], thread: int, module: Any, args: Any) -> None:
    """Keep a model under `fully_shard` that runs,
    with what its parameters have in `.grad` before.
    """
    if hasattr(module, "reshard") and threading.get_ident() == thread and _settings.records():
        met.setdefault(module, _gradients(module))


def _gradients(model: Any) -> list[Any]:
    """The parameters' `.grad`, each with its version: changes in place go to the local shards."""
    grads = [p.grad for p in model.parameters()]
    return [(id(g), getattr(g, "to_local", partial(torch.empty, 0))()._version, g) for g in grads]


def _shard_again(met: dict[Any, Any], before: BaseException | None) -> None:
    """End the step of sharded models, if their shards have got gradients; otherwise a graph still
    needs them whole.

    What stays whole is stale after a step of an optimizer, which changes the shards.
    """
    error = sys.exc_info()[1]
    if (
        met
        and error is not before
        and error is not None
        and _messages.kind_of(error) == "storage freed"
    ):
        raise GraphError.about(
            "a second pass through a model under fully_shard needs parameters that the first pass "
            "has freed. Call model.set_reshard_after_backward(False) before the model runs; "
            "twice_differentiable() shards it again when it closes."
        ) from error
    named = {p: name for model in reversed(met) for name, p in model.named_parameters()}
    left = [(name, p) for p, name in named.items() if type(p) in (torch.Tensor, torch.nn.Parameter)]
    parts = [part for model in met for part in model.modules() if hasattr(part, "reshard")]
    parts = parts if left and error is before else []
    for part in parts:
        part.reshard()
    reduced = any(
        a[:2] != b[:2] for model in met for a, b in zip(met[model], _gradients(model), strict=True)
    )
    for part in parts if not reduced else ():
        part.unshard()
    left = [name for name, whole in left if whole.grad is not None]
    met.clear()
    if parts and reduced and left:
        raise GraphError.about(
            f"fully_shard has left {', '.join(left)} without its gradient: "
            "a pass with create_graph=True had ended its watch before. Compute the loss, "
            "and whatever else runs the model, before the penalty, and call backward() once, "
            "on their sum."
        )
