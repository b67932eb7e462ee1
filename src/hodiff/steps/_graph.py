"""The graph of a step: loss and gradient as one list of operations, cleaned, and what runs it.

The loss runs as it is, with stand-ins for tensors. Traced with its gradient, it becomes a list in
which nothing is
differentiated any more: so `detach` is the identity there, and equal operations are one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hodiff._core import _settings, _vectors, _versions
from hodiff._core._graph import split
from hodiff._core._settings import Scope, Undo, assign
from hodiff._core._substitutes import ExactNorms
from hodiff.steps._backends import (
    ZEROS_WITHOUT_MEMORY,
    FunctionOperator,
    NotCompiled,
    compiled,
    hooks_for_all,
    replayed,
    trees,
)

_aten: Any = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default)
_BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten.cudnn_batch_norm.default,
    _aten.miopen_batch_norm.default,
)


class StepGraph:
    """Loss and gradient of a step as one function of Dynamo's inputs.

    Attributes:
        operations: How many there are.
        order: Up to which order it holds derivatives, the parameters' gradient included.
        eps: The coarsest precision in it.
        aux: What the loss returned beside, with the places of its tensors among the results, and
            how it is made.
        outputs: How many results there are before the gradients.
        wanted: Which inputs have a gradient.
        written: Which inputs it writes into: buffers.
        leaves: Whether each of those is a leaf: a derivative that the loss takes ends there.
        inner: By which inputs the loss itself differentiates.
        shared: Which inputs share memory, where it writes into one.
        calls: How often it ran.
    """

    def __init__(self, call: Any, given: Sequence[Any], followed: Any, backend: str) -> None:
        stand_ins = followed.stand_ins
        self.order, self.inner = followed.order, followed.inner
        self.calls, self.exact = 0, self.order > 2 or (self.order == 2 and followed.batched)
        places = {id(x): index for index, x in enumerate(given) if isinstance(x, Tensor)}
        first: Any = next((x for x in stand_ins if isinstance(x, Tensor)), None)
        if first is None:
            raise NotCompiled("the loss depends on nothing that requires grad")
        mode = first.fake_mode
        known = len(mode.shape_env.guards)
        with (
            Scope(partial(_as_it_was, given)),
            mode,
            _settings.recording(),
            Scope(partial(_open, mode)),
        ):
            traced = self._trace(call, given, stand_ins, places)
            _inputs_apart(traced, self.stood_for, places, stand_ins, memories(given))
        self.graph = traced.graph
        nodes = list(self.graph.nodes)  # those that go are known to it for ever
        clean(self.graph)
        self.own_results()
        self.written = _written(self.graph)
        self.shared = memories(given) if self.written else []
        self.leaves = [given[i].is_leaf for i in self.wanted]
        self.operations = sum(node.op == "call_function" for node in self.graph.nodes)
        self.eps = self._precision()
        traced.recompile()
        self.traced = traced
        if backend == "replay":
            self.run = replayed(traced)
        else:
            if any(self.shared.count(self.shared[i]) > 1 for i in self.written):
                raise NotCompiled(
                    "it writes into a tensor that shares memory with another; backend='replay' can"
                )
            self.run = compiled(traced, stand_ins, given, backend)
        if len(mode.shape_env.guards) > known:
            raise NotCompiled(
                "what runs depends on a size in a way that PyTorch's tracer has not seen"
            )
        # a tensor whose stand-in is kept cannot be swapped
        for node in [*nodes, *self.graph.nodes]:
            node.meta = {"stack_trace": node.meta.get("stack_trace")}

    def _trace(self, call: Any, given: Any, stand_ins: Any, places: dict[int, int]) -> Any:
        """The loss as it is: the tensors that it reads, the tracer takes in as it meets them.

        Stand-ins take the place of arguments whose sizes vary, and of those that have a graph,
        which the loss's would go on into.
        """
        loss, args, kwargs, has_aux = call
        flat, tree = trees.tree_flatten((args, kwargs))
        at = {index: places[id(x)] for index, x in enumerate(flat) if id(x) in places}
        computed = {
            place for place, x in enumerate(given) if isinstance(x, Tensor) and not x.is_leaf
        }
        if computed - {*at.values()}:
            raise NotCompiled(
                "it reads a tensor that was computed from others and is no argument; pass it as one"
            )
        apart = computed | {place for place in at.values() if _varies(stand_ins[place])}
        self.stood_for = [*apart]

        def whole(*fakes: Tensor) -> list[Any]:
            mine, now = dict(enumerate(given)) | dict(zip(apart, fakes, strict=True)), [*flat]
            for index, place in at.items():
                now[index] = mine[place]
            inner_args, inner_kwargs = trees.tree_unflatten(now, tree)
            with _settings.on(ExactNorms(self.order)) if self.exact else nullcontext():
                result = loss(*inner_args, **inner_kwargs)
            value, aux = split(result) if has_aux else (result, None)
            return self._results(value, aux, mine)

        given_apart = [stand_ins[i] for i in self.stood_for]  # views of others, or with graphs
        return make_fx(whole)(*[x.detach().requires_grad_(x.requires_grad) for x in given_apart])

    def _results(self, value: Any, aux: Any, mine: dict[int, Any]) -> list[Any]:
        """Loss, the tensors beside it, and the gradients by all inputs that have one."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise NotCompiled("the loss depends on nothing that requires grad")
        if value.numel() != 1:
            raise NotCompiled(f"the loss has shape {tuple(value.shape)}, not one element")
        able = [i for i, x in mine.items() if isinstance(x, Tensor) and x.requires_grad]
        with _settings.autocast(value.device.type):
            gradients = torch.autograd.grad(value, [mine[i] for i in able], allow_unused=True)
        used = [(i, g) for i, g in zip(able, gradients, strict=True) if g is not None]
        self.wanted = [i for i, _ in used]
        beside, spec = trees.tree_flatten(aux)
        self.aux = [None if isinstance(x, Tensor) else x for x in beside], spec
        self.of_tensors = [isinstance(x, Tensor) for x in beside]
        tensors = [x.detach() for x in beside if isinstance(x, Tensor)]
        self.outputs = 1 + len(tensors)
        return [value.detach(), *tensors, *(g for _, g in used)]

    def beside(self, results: Sequence[Any]) -> Any:
        """The aux of these results."""
        tensors = iter(results[1 : self.outputs])
        values = [
            next(tensors) if of else x for of, x in zip(self.of_tensors, self.aux[0], strict=True)
        ]
        return trees.tree_unflatten(values, self.aux[1])

    def changed(self, inputs: Sequence[Any]) -> str:
        """The first change that Dynamo does not guard, in words; empty where there is none."""
        leaves = [inputs[i] for i in self.wanted]
        if hooks_for_all():
            return "there are hooks for all modules, or another thread is in a call of hodiff's"
        if len({id(x) for x in leaves}) < len(leaves):
            return "two of its tensors have become one"
        if [x.is_leaf for x in leaves] != self.leaves:
            return (
                "a tensor that it differentiates with respect to has a different graph than when "
                "it was traced"
            )
        if any(inputs[i]._backward_hooks for i in self.inner):
            return "a tensor that the loss differentiates with respect to has a hook"
        if self.shared and memories(inputs) != self.shared:
            return (
                "tensors share memory that did not before, or the reverse, and it writes into one"
            )
        return ""

    def own_results(self) -> None:
        """Copy each result that is an input, a constant, or a view of one or of another result."""
        end = next(iter(reversed(self.graph.nodes)))
        taken = {
            _memory(node) for node in self.graph.nodes if node.op in ("placeholder", "get_attr")
        }
        results = []
        for node in end.args[0]:
            if isinstance(node, fx.Node) and isinstance(node.meta["val"], Tensor):
                if _memory(node) in taken:
                    with self.graph.inserting_before(end):
                        copied = self.graph.call_function(_aten.clone.default, (node,))
                    copied.meta, node = {"val": node.meta["val"].clone()}, copied
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


def _open(mode: Any, undo: Undo) -> None:
    """Let the loss meet tensors as they are, and modules as they are but compiled ones.

    Of stand-ins that the mode makes of them none is left: it knows their tensors weakly, and what
    is known so cannot be swapped.
    """
    known = mode.fake_tensor_converter.meta_converter.describer
    undo += [known.lookup_tensor.clear, known.lookup_storage.clear]
    assign(undo, mode, {"allow_non_fake_inputs": True})
    _settings.eager.enter(undo)


def _as_it_was(given: Sequence[Any], undo: Undo) -> None:
    """Undo what a trace does to tensors, some of which it writes into;
    and hooks are for `backward()`.
    """
    for x in given:
        if isinstance(x, Tensor) and not x.requires_grad and not x._is_zerotensor():
            undo += [partial(x.data.copy_, x.detach().clone())]
        if isinstance(x, Tensor) and x._backward_hooks:
            undo += [partial(x._backward_hooks.update, dict(x._backward_hooks))]
            x._backward_hooks.clear()


def _varies(stand_in: Any) -> bool:
    return isinstance(stand_in, Tensor) and any(
        isinstance(size, torch.SymInt) for size in stand_in.shape
    )


_COPIES = (_aten.lift_fresh_copy.default, _aten.lift_fresh.default)
"""What reads a constant of the loss, as `torch.tensor(2.0)` makes one."""


def _inputs_apart(
    traced: fx.GraphModule,
    stood_for: Sequence[int],
    places: dict[int, int],
    stand_ins: Sequence[Any],
    shared: Sequence[int],
) -> None:
    """One input for each of Dynamo's, in its order,
    in place of the tensors that the trace has met.
    """
    graph, old = traced.graph, [*traced.graph.nodes]
    met = dict(zip([node for node in old if node.op == "placeholder"], stood_for, strict=True))
    for node in old:
        if node.op == "get_attr":
            constant = getattr(traced, str(node.target))
            place = places.get(id(constant))
            if place is not None:
                if place in stood_for or _varies(stand_ins[place]):
                    raise NotCompiled(
                        "a tensor that is no argument, or no argument alone, "
                        "has changed its size or has a graph"
                    )
                met[node] = place
            elif (
                isinstance(constant, Tensor)
                and constant is not _vectors.SOME
                and any(user.target not in _COPIES for user in node.users)
            ):
                raise NotCompiled("it reads a tensor that PyTorch's tracer has not seen")
    if {place for place, x in enumerate(stand_ins) if isinstance(x, Tensor)} - {*met.values()}:
        raise NotCompiled("it reads numbers otherwise than by PyTorch's operations, as NumPy does")
    with graph.inserting_before(old[0]):
        inputs = [graph.placeholder(f"input_{index}") for index in range(len(stand_ins))]
    for node, stand_in, memory in zip(inputs, stand_ins, shared, strict=True):
        node.meta.update(val=stand_in, memory=memory)
    for node, place in met.items():
        node.replace_all_uses_with(inputs[place])
        graph.erase_node(node)
    for name in {node.target for node in met if node.op == "get_attr"}:
        delattr(traced, name)  # else the first call's tensors live as long as the graph


def memories(inputs: Sequence[Any]) -> list[int]:
    """The first input with the same memory, for each input."""
    first: dict[int, int] = {}
    places = [x.untyped_storage()._cdata if isinstance(x, Tensor) else -1 for x in inputs]
    return [first.setdefault(each, index) for index, each in enumerate(places)]


def _memory(node: Any) -> Any:
    """A key of a node's memory: inputs that share it have one number,
    and a view has that of its base.
    """
    while (base := _base(node)) is not None:
        node = base
    return node.meta.get("memory", node)


def _base(node: fx.Node) -> Any:
    """The argument whose memory a result has, by the schema of its operation; the stand-ins of a
    trace do not tell.
    """
    made: Any = node.args[0] if node.target is operator.getitem else node
    schema = _versions.schema_of(made.target)
    if schema is None or not schema.returns or schema.returns[0].alias_info is None:
        return None
    alias = schema.returns[0].alias_info
    for argument, given in zip(schema.arguments, made.args, strict=False):
        named = argument.alias_info.before_set if argument.alias_info is not None else set()
        # several views have no name
        if named & alias.before_set or (named and not alias.before_set):
            return given
    return None


# --- cleaning -------------------------------------------------------------------------------------


def _writes(node: fx.Node) -> bool:
    schema = _versions.schema_of(node.target)
    if schema is None:
        return isinstance(node.target, FunctionOperator)
    return schema.is_mutable or bool(_statistics(node))


def _statistics(node: fx.Node) -> list[fx.Node]:
    """The tensors that a batch norm in training writes into, which its schema does not say."""
    training = node.target in _BATCH_NORMS and node.args[5]
    return [x for x in node.args[3:5] if isinstance(x, fx.Node)] if training else []


def _acts(node: fx.Node) -> bool:
    """Whether it does something beside giving a result; what gives none,
    as the operations of `assert`, does.
    """
    schema = _versions.schema_of(node.target)
    return _writes(node) or _draws(node) or (schema is not None and not schema.returns)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _targets(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes into."""
    schema = _versions.schema_of(node.target)
    if schema is None:
        return [*node.all_input_nodes] if _writes(node) else []
    given = {
        argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)
    } | node.kwargs
    written = _statistics(node)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            written += [
                x
                for x in (value if isinstance(value, (list, tuple)) else [value])
                if isinstance(x, fx.Node)
            ]
    return written


def _written(graph: fx.Graph) -> list[int]:
    """The inputs that the graph writes into, be it by a view."""
    memories = {
        _memory(target)
        for node in graph.nodes
        if node.op == "call_function"
        for target in _targets(node)
    }
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return [i for i, node in enumerate(placeholders) if _memory(node) in memories]


def clean(graph: fx.Graph) -> None:
    """Leave out what changes nothing: detach, equal operations, a transpose of a transpose,
    what nobody reads.
    """
    changed = {
        _memory(target)
        for node in graph.nodes
        if node.op == "call_function"
        for target in _targets(node)
    }
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is ZEROS_WITHOUT_MEMORY:  # forward mode's, without memory: kernels read it
            node.target = _aten.zeros.default
        same = _identical(node)
        if same is None and not _writes(node) and not _draws(node):
            key = node.target, _plain(node.args), _plain(node.kwargs)
            touched = {_memory(each) for each in (node, *node.all_input_nodes)}
            if changed.isdisjoint(touched):
                same = known.setdefault(key, node)
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


def _plain(argument: Any) -> Any:
    """An argument that can be hashed; 1, 1.0 and True are three."""
    if isinstance(argument, (list, tuple)):
        return tuple(_plain(each) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _plain(each)) for name, each in argument.items())
    return argument if isinstance(argument, fx.Node) else (type(argument), repr(argument))
