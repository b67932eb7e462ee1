"""The graph of a step: loss and gradient as one list of operations, cleaned, and what runs it.

Dynamo gives the loss, with the derivatives that it takes itself. Traced once more, with its gradient, it becomes a
list in which nothing is differentiated any more: so `detach` is the identity there, and equal operations are one.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hodiff._core import _settings
from hodiff._core._substitutes import ExactNorms, weight_norm
from hodiff.steps._backends import NotCompiled, compiled, replayed

_private: Any = torch
_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
_NORMS = {_private._weight_norm, weight_norm}


lock = threading.RLock()
"""Held for a compilation: its settings are those of the process."""


class StepGraph:
    """Loss and gradient of a step as one function of Dynamo's inputs.

    Attributes:
        operations: How many there are.
        order: Up to which order it holds derivatives, the parameters' gradient included.
        eps: The coarsest precision in it.
        value: Which of the outputs is the loss.
        outputs: How many Dynamo wants back; the gradients come behind them.
        wanted: Which inputs have a gradient.
        written: Which inputs it writes into: buffers.
        leaves: Whether each of those is a leaf: a derivative that the loss takes ends there.
        inner: By which inputs the loss itself differentiates.
        shared: Which inputs share memory, where it writes into one.
        attributes: Those of classes that it was traced through, as (namespace, name, value).
        sizes: How many there are in a namespace.
        calls: How often it ran.
    """

    attributes: Sequence[tuple[Any, str, Any]] = ()
    sizes: Sequence[tuple[Any, int]] = ()
    wanted: Sequence[int]
    outputs: int

    def __init__(self, module: fx.GraphModule, given: Sequence[Any], backend: str, mark: Any) -> None:
        self.value = _loss(module, mark)
        _open_checkpoints(module)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        stand_ins: list[Any] = [node.meta["example_value"] for node in placeholders]
        self.calls, self.order = 0, 1 + passes(module)
        self.exact = self.order > 2 or (self.order == 2 and _written_out(module))
        first: Any = next((x for x in stand_ins if isinstance(x, Tensor)), None)
        if first is None:
            raise NotCompiled("the loss depends on nothing that requires grad")
        with first.fake_mode, _settings.recording():
            stand_ins = [_leaf(x) for x in stand_ins]
            differentiable = [index for index, x in enumerate(stand_ins) if isinstance(x, Tensor) and x.requires_grad]
            traced = make_fx(self._whole(module, differentiable))(*stand_ins)
        self.graph = traced.graph
        nodes = list(self.graph.nodes)  # those that go are known to it for ever
        clean(self.graph)
        self.own_results()
        self.written = _written(self.graph)
        self.shared = memories(given) if self.written else []
        self.leaves = [given[i].is_leaf for i in self.wanted]
        self.inner = [i for i, node in enumerate(placeholders) if _differentiated(node)]
        self.operations = sum(node.op == "call_function" for node in self.graph.nodes)
        self.eps = self._precision()
        traced.recompile()
        self.traced = traced
        if backend == "replay":
            self.run = replayed(traced, in_script=not any(map(_acts_unseen, self.graph.nodes)))
        else:
            if any(self.shared.count(self.shared[i]) > 1 for i in self.written):
                raise NotCompiled("it writes into a tensor that shares memory with another; backend='replay' can")
            self.run = compiled(traced, stand_ins, given, backend)
        for node in [*nodes, *self.graph.nodes]:  # a tensor whose stand-in is kept cannot be swapped
            node.meta = {"stack_trace": node.meta.get("stack_trace")}

    def _whole(self, module: fx.GraphModule, differentiable: Sequence[int]) -> Callable[..., list[Tensor]]:
        """The function to trace: Dynamo's outputs, detached, and the gradients that are not None."""

        def whole(*inputs: Any) -> list[Any]:
            with _settings.on(ExactNorms(self.order)) if self.exact else nullcontext():
                outputs = module(*inputs)
            loss, self.outputs = outputs[self.value], len(outputs)
            if not loss.requires_grad:
                raise NotCompiled("the loss depends on nothing that requires grad")
            if loss.numel() != 1:
                raise NotCompiled(f"the loss has shape {tuple(loss.shape)}, not one element")
            with _settings.autocast(loss.device.type):
                gradients = torch.autograd.grad(loss, [inputs[i] for i in differentiable], allow_unused=True)
            used = [(i, g) for i, g in zip(differentiable, gradients, strict=True) if g is not None]
            self.wanted = [i for i, _ in used]
            return [
                *(x.detach() if isinstance(x, Tensor) else x for x in outputs),
                *(g for _, g in used),
            ]

        return whole

    def changed(self, inputs: Sequence[Any]) -> str:
        """What has changed that Dynamo does not guard, in words; empty where nothing has."""
        if self._changed(inputs):
            with lock:  # another thread's trace replaces methods of all modules while it lasts
                return self._changed(inputs)
        return ""

    def _changed(self, inputs: Sequence[Any]) -> str:
        leaves = [inputs[i] for i in self.wanted]
        if torch.nn.modules.module._has_any_global_hook():
            return "there are hooks for all modules"
        if any(namespace.get(name) is not value for namespace, name, value in self.attributes):
            return "an attribute or a method of a class has been replaced"
        if any(len(namespace) != size for namespace, size in self.sizes):
            return "a class, or an object with a __getattr__ of its own, gained or lost an attribute"
        if len({id(x) for x in leaves}) < len(leaves):
            return "two of its tensors have become one"
        if [x.is_leaf for x in leaves] != self.leaves:
            return "a tensor that it differentiates with respect to has a different graph than when it was traced"
        if self.order > 1 and any(inputs[i]._backward_hooks for i in self.inner):
            return "a tensor that the loss differentiates with respect to has a hook"
        if self.shared and memories(inputs) != self.shared:
            return "tensors share memory that did not before, or the reverse, and it writes into one"
        return ""

    def own_results(self) -> None:
        """Copy each result that is an input, a constant, or a view of one or of another result."""
        end = next(iter(reversed(self.graph.nodes)))
        taken = {_memory(node) for node in self.graph.nodes if node.op in ("placeholder", "get_attr")}
        results = []
        for node in end.args[0]:
            if isinstance(node, fx.Node) and isinstance(node.meta["val"], Tensor):
                if _memory(node) in taken:
                    with self.graph.inserting_before(end):
                        node = _like(self.graph.call_function(_aten.clone.default, (node,)), node)
                taken.add(_memory(node))
            results.append(node)
        end.args = (results,)

    def _precision(self) -> float:
        dtypes = {
            x.dtype
            for node in self.graph.nodes
            if isinstance(x := node.meta.get("val"), Tensor)
            if x.is_floating_point()
        }
        if torch.float16 in dtypes:
            raise NotCompiled(
                "it computes in float16, whose gradients a GradScaler must scale inside the "
                "backward pass (bfloat16 needs none)"
            )
        return max(torch.finfo(dtype).eps for dtype in dtypes)


def _loss(module: fx.GraphModule, mark: Any) -> int:
    """Which of the outputs is the loss; it is given back with its graph."""
    end = next(iter(reversed(module.graph.nodes)))
    (results,) = end.args
    marked = [i for i, node in enumerate(results) if getattr(node, "target", None) is mark]
    if len(marked) != 1:
        raise NotCompiled("the loss is not among what it traces")
    end.args = (tuple(node.args[0].args[0] if i == marked[0] else node for i, node in enumerate(results)),)
    module.recompile()
    return marked[0]


def _open_checkpoints(module: fx.GraphModule) -> None:
    """Run the blocks of activation checkpoints as they are: in one graph nothing runs again."""
    parts: list[Any] = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    for part in parts:
        for node in part.graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint:
                if node.kwargs.get("use_reentrant") is not False:
                    raise NotCompiled("it uses torch.utils.checkpoint with use_reentrant=True; False compiles")
                node.target, node.kwargs = _run_block, {}
                part.recompile()


def _run_block(block: Callable[..., Any], *inputs: Any) -> Any:
    return block(*inputs)


def memories(inputs: Sequence[Any]) -> list[int]:
    """Which inputs share memory: for each the first that has its own."""
    first: dict[int, int] = {}
    places = [x.untyped_storage()._cdata if isinstance(x, Tensor) else -1 for x in inputs]
    return [first.setdefault(each, index) for index, each in enumerate(places)]


def passes(module: fx.GraphModule) -> int:
    """How many derivatives Dynamo's graph takes itself, in any of its parts; raises where it has something wrong."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    if any(getattr(node.target, "__name__", "") == "autograd_function_apply" for node in nodes):
        raise NotCompiled("it uses a Python autograd.Function, whose second derivative PyTorch's tracer gets wrong")
    if any(
        "floordiv" in str(node.target) and isinstance(node.meta.get("example_value"), torch.SymFloat) for node in nodes
    ):
        raise NotCompiled(
            "it uses // with a Python float that changes, which PyTorch's tracer takes for floor(a / b), although "
            "1.0 // 0.1 is 9; write math.floor(a / b) if that will do"
        )
    bases: list[Any] = [node.args[0] for node in nodes if node.target is operator.pow]
    if any(isinstance(base, (int, float)) and base < 0 for base in bases):
        raise NotCompiled(
            "it has a power of a negative number whose exponent changes, and PyTorch's tracer takes (-1) ** n for "
            "-(1 ** n); write 1 - 2 * (n % 2)"
        )
    grads = sum(node.target is torch.autograd.grad for node in nodes)
    return grads + sum("_grad_increment_nesting" in str(node.target) for node in nodes)


def _differentiated(node: fx.Node) -> bool:
    return any(user.target is torch.autograd.grad and node in _nodes(user.args[1:2]) for user in node.users)


def _nodes(argument: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return nodes


def _written_out(module: fx.GraphModule) -> bool:
    """Whether a second derivative meets what PyTorch has wrong there: `weight_norm`, norms in a batched pass."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return any(
        node.target in _NORMS or "_vmap_increment_nesting" in str(node.target) or node.kwargs.get("is_grads_batched")
        for node in nodes
    )


def _leaf(x: Any) -> Any:
    """A leaf like Dynamo's stand-in, which may be a view of another, or have a graph."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _memory(node: fx.Node) -> Any:
    """What tells whether two nodes share memory: their stand-ins do."""
    value = node.meta.get("val")
    return (
        torch.multiprocessing.reductions.StorageWeakRef(value.untyped_storage()) if isinstance(value, Tensor) else node
    )


def _like(node: fx.Node, model: fx.Node) -> fx.Node:
    node.meta = {**model.meta, "val": model.meta["val"].clone()}
    return node


# --- cleaning ---------------------------------------------------------------------------------------------------------


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    return schema.is_mutable or bool(_statistics(node))


def _statistics(node: fx.Node) -> list[fx.Node]:
    """What a batch norm in training writes into, which its schema does not say."""
    training = node.target in _BATCH_NORMS and node.args[5]
    return [x for x in node.args[3:5] if isinstance(x, fx.Node)] if training else []


def _acts(node: fx.Node) -> bool:
    """Whether it does something beside giving a result; what gives none, as the operations of `assert`, does."""
    schema = getattr(node.target, "_schema", None)
    return _writes(node) or _draws(node) or (schema is not None and not schema.returns)


def _acts_unseen(node: fx.Node) -> bool:
    """Whether it acts in a way that no schema says: TorchScript leaves it out, or takes two reads for one."""
    writes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
    idle = node.op == "call_function" and _acts(node) and not writes and not node.users
    return idle or any(len(each.users) > 1 for each in _statistics(node))


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _targets(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [*node.all_input_nodes] if _writes(node) else []
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    written = _statistics(node)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            written += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, fx.Node)]
    return written


def _written(graph: fx.Graph) -> list[int]:
    """Which inputs the graph writes into, be it by a view."""
    memories = {_memory(target) for node in graph.nodes if node.op == "call_function" for target in _targets(node)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return [i for i, node in enumerate(placeholders) if _memory(node) in memories]


def clean(graph: fx.Graph) -> None:
    """Leave out what changes nothing: detach, equal operations, a transpose of a transpose, what nobody reads."""
    changed = {_memory(target) for node in graph.nodes if node.op == "call_function" for target in _targets(node)}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _aten._efficientzerotensor.default:  # forward mode's, without memory: kernels read it
            node.target = _aten.zeros.default
        if node.target is _aten.native_batch_norm_backward.default and node.args[7]:
            # in training it reads no running statistics: a second reader would keep TorchScript away
            node.args = (*node.args[:3], None, None, *node.args[5:])
        same = _identical(node)
        if same is None and not _writes(node) and not _draws(node):
            touched = {_memory(each) for each in (node, *node.all_input_nodes)}
            if changed.isdisjoint(touched):
                same = known.setdefault(_key(node), node)
        if same is not None and same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _acts(node))


def _identical(node: Any) -> Any:
    """The node that this one only repeats."""
    if node.target in _SAME:
        return node.args[0]
    if node.target is _aten.t.default and getattr(node.args[0], "target", None) is _aten.t.default:
        return node.args[0].args[0]
    return None


def _key(node: fx.Node) -> Any:
    return node.target, _plain(node.args), _plain(node.kwargs)


def _plain(argument: Any) -> Any:
    """An argument that can be hashed; 1, 1.0 and True are three."""
    if isinstance(argument, (list, tuple)):
        return tuple(_plain(each) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _plain(each)) for name, each in argument.items())
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))
