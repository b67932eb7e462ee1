"""The road through `torch.compile`: what the tracer (Dynamo) follows in place of functions that it cannot.

`OutputGraph` and the passes are the same for all public functions, so these forms of them serve all. The tracer finds
them by a mark on the function that they stand for, which costs no call anything. A graph is judged as outside: by what
autograd records of the tracer's stand-ins, which have shapes, dtypes and graphs, and no numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hodiff._core import _arguments, _call, _graph, _loans, _nodes, _refusals, _reverse, _tree, _vectors, _where
from hodiff._core._graph import OutputGraph
from hodiff.errors import GraphError, HodiffError


def stands_for(function: Any) -> Callable[[Callable[..., Any]], Any]:
    """What the tracer follows in place of a function."""

    def mark(form: Callable[..., Any]) -> Any:
        getattr(function, "__func__", function)._torchdynamo_inline = form
        return form

    return mark


def at_trace(look: Callable[[], Any]) -> Any:
    """What is evaluated as the tracer comes to it, with the tracer's frames above; its result is a constant."""
    marked: Any = look
    marked._dynamo_marked_constant = True
    return look


# --- at trace time ----------------------------------------------------------------------------------------------------


def _translators() -> Iterator[Any]:
    """The tracer's translators, that of the innermost function first."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    frame, last = sys._getframe(1), None
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase) and translator is not last:
            last = translator
            yield translator
        frame = frame.f_back


def _real(variable: Any) -> Any:
    """What a variable of the tracer stands for: stand-ins for tensors, themselves for constants."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if hasattr(variable, "items"):
        return [_real(item) for item in variable.items]
    return variable.as_proxy().node.meta["example_value"]


def _local(*names: str) -> list[Any]:
    """Local variables of the function that is traced."""
    translator = next(_translators())
    return [_real(translator.symbolic_locals[name]) for name in names]


def refuse(words: str) -> Any:
    """End the trace."""
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type="hodiff", context="", explanation=f"hodiff: {words}", hints=[])


@at_trace
def enclosing() -> int:
    """The derivatives that the innermost enclosing call takes; 0 where there is none."""
    for translator in _translators():
        if translator.f_code is evaluate.__code__:
            return _real(translator.symbolic_locals["order"])
    return 0


@at_trace
def _begin() -> None:
    """Let the tracer follow passes, until this trace ends."""
    from torch._dynamo import config

    if not config.trace_autograd_ops:
        output = next(_translators()).output
        output.add_cleanup_hook(lambda: setattr(config, "trace_autograd_ops", False))
        config.trace_autograd_ops = True


@at_trace
def _judge() -> None:
    """Raise where the result would not be right, as far as it can be seen without numbers."""
    outputs, leaves, points, names, _, strict, builds = _local(
        "outputs", "leaves", "points", "names", "order", "strict", "builds"
    )
    survey = _nodes.Survey(
        [_nodes.node_of(x) for x in outputs], {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
    )
    try:
        missing = [name for leaf, name in zip(leaves, names, strict=True) if not survey.contains(leaf)]
        if len(missing) == len(leaves) and strict is not False:
            raise _refusals.independent(builds, missing, any(x.requires_grad for x in outputs))
        if missing and strict:
            raise GraphError(f"strict=True: the result does not depend on {_refusals.listed(missing)}.")
        for leaf, point, name in zip(leaves, points, names, strict=True):
            if leaf is not point and survey.contains(point):
                raise _refusals.bypass(name)
    except HodiffError as error:
        refuse(str(error))


# --- the road ---------------------------------------------------------------------------------------------------------

NOTHING = torch.zeros(0, device="cpu", requires_grad=True)


@stands_for(_call.recorded)
def recorded(create_graph: bool | None) -> bool:
    if create_graph is None:
        return enclosing() > 0 and torch.is_grad_enabled()
    return _arguments.is_set(create_graph, "create_graph")


@stands_for(_call.outer_order)
def outer_order() -> int:
    return max(1, enclosing())


@stands_for(OutputGraph.__enter__)
def enter(self: Any) -> Any:
    call = self.call
    _begin()
    if call.builds_graph:
        self.leaves = leaves(call)
        self.outputs, self.aux = evaluate(call, self.leaves, call.order)
    else:
        self.outputs, self.leaves = call.what, call.where.tensors
    outputs, _, _ = _tree.flatten(self.outputs)
    judge(outputs, self.leaves, call.where.tensors, call.where.names, call.order, call.strict, call.builds_graph)
    return self


def leaves(call: Any) -> list[Tensor]:
    """Parameters of modules are their own leaves, for `f` finds them in the module."""
    own: set[int] = set()
    for part in call.where.module_slices:
        own.update(range(part.start, part.start + len(part.names)))
    return [
        tensor
        if number in own
        else tensor.view_as(tensor)
        if call.create_graph and tensor.requires_grad
        else tensor.detach() - NOTHING.sum().to(tensor)
        for number, tensor in enumerate(call.where.tensors)
    ]


def evaluate(call: Any, leaves: list[Tensor], order: int) -> tuple[Any, Any]:
    argument = call.where.argument(leaves)
    points = argument if call.unpack_point else (argument,)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        outputs = call.what(*points, *call.args, **call.kwargs)
    return _graph.split(outputs) if call.has_aux else (outputs, None)


def judge(
    outputs: list[Tensor],
    leaves: list[Tensor],
    points: list[Tensor],
    names: list[str],
    order: int,
    strict: bool | None,
    builds: bool,
) -> None:
    """A frame in which the look at the trace finds these."""
    _judge()


@stands_for(OutputGraph.__exit__)
def leave(self: Any, *error: object) -> None:
    return None


@stands_for(_reverse.vjp)
def vjp(
    graph: Any,
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    *,
    more: bool = False,
    differentiated: bool = False,
    inputs: Sequence[Tensor] | None = None,
    missed: set[int] | None = None,
) -> list[Tensor]:
    inputs = graph.leaves if inputs is None else inputs
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return joined_to_leaves(graph, [torch.zeros_like(x) for x in inputs])
    outputs = [o for o, _ in pairs]
    cotangents = [torch.ones_like(o) if c is None else c for o, c in pairs]
    build = differentiated or graph.create_graph
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=True, create_graph=build, allow_unused=True
        )
    gradients = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)]
    return joined_to_leaves(graph, gradients)


@stands_for(_reverse.joined_to_leaves)
def joined_to_leaves(graph: Any, gradients: list[Tensor]) -> list[Tensor]:
    if not graph.create_graph or all(part.requires_grad for part in gradients):
        return gradients
    with torch.enable_grad():
        nothing = sum(x.reshape(-1)[:0].sum().to(graph.leaves[0]) for x in graph.leaves)
        return [part if part.requires_grad else part + nothing.to(part) for part in gradients]


@stands_for(_reverse.vjps)
def vjps(
    graph: Any,
    outputs: Sequence[Tensor],
    cotangents: Any,
    count: int,
    *,
    chunk_size: int | None,
    more: bool = False,
    inputs: list[Tensor] | None = None,
) -> Any:
    inputs = graph.leaves if inputs is None else inputs
    pairs = [(o, c) for o, c in zip(outputs, cotangents(0, count), strict=True) if o.requires_grad]
    if not pairs:
        return [(0, count, [x.new_zeros((count, *x.shape)) for x in inputs])]
    outputs, rows = [o for o, _ in pairs], [c for _, c in pairs]
    with torch.enable_grad():
        gradients = torch.autograd.grad(
            outputs,
            inputs,
            rows,
            retain_graph=True,
            create_graph=graph.create_graph,
            allow_unused=True,
            is_grads_batched=True,
        )
    return [
        (0, count, [x.new_zeros((count, *x.shape)) if g is None else g for g, x in zip(gradients, inputs, strict=True)])
    ]


@stands_for(_reverse.unaliased)
def unaliased(results: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    return [part.clone() for part in results]


@stands_for(_reverse.basis)
def basis(output: Tensor, batch_ndim: int) -> tuple[int, Any]:
    batch, event = output.shape[:batch_ndim], output.shape[batch_ndim:]
    count = event.numel()

    def rows(start: int, stop: int) -> list[Tensor]:
        units = torch.eye(count, dtype=output.dtype, device=output.device)[start:stop]
        return [units.reshape((stop - start, *[1] * batch_ndim, *event)).expand((stop - start, *batch, *event))]

    return count, rows


@stands_for(_reverse.jvp)
def jvp(
    graph: Any, outputs: list[Tensor], tangents: list[Tensor], count: int | None, *, chunk_size: int | None
) -> list[Tensor]:
    cotangents = [torch.ones_like(output) - NOTHING.sum().to(output) for output in outputs]
    pulled = vjp(graph, outputs, cotangents, differentiated=True)
    return _reverse.products(graph, pulled, tangents, count, chunk_size=chunk_size, inputs=cotangents)


@stands_for(_reverse.writable)
def writable(graph: Any, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    return vectors


@stands_for(_reverse.warned_if_not_finite)
def warned_if_not_finite(graph: Any, results: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    return results


@stands_for(_vectors.Space.structured)
def structured(self: Any, value: Any, name: str, tree: Any) -> Any:
    if tree is _tree.LEAF and isinstance(value, Tensor):
        return [value], _vectors._count(value, self.likes[0], name)
    return self.rearranged(value, name, tree)


@stands_for(_nodes.mark_results)
def mark_results(tensors: Any) -> None:
    return None


@stands_for(_loans.memory_of)
def memory_of(tensor: Tensor) -> int:
    return 0


@stands_for(_where.Assembly.of)
def assembly(cls: Any, root: Any) -> Any:
    made = cls({}, [])
    made._add(_where.plain(root), "")
    return made
