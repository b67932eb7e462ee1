"""The road through `torch.compile`: what the tracer (Dynamo) follows in place of functions that it cannot.

`OutputGraph` and the passes are the same for all public functions, so these forms of them serve all.
A graph is judged as outside, by what autograd records of the tracer's stand-ins for tensors: these
have shapes, dtypes and graphs, and no numbers. Where a judgment needs numbers, the trace ends, in
words.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hodiff._core import (
    _arguments,
    _call,
    _graph,
    _independence,
    _kernels,
    _loans,
    _messages,
    _near_zero,
    _nodes,
    _refusals,
    _reverse,
    _settings,
    _substitutes,
    _tree,
    _vectors,
    _versions,
    _where,
)
from hodiff._core._compiled_callers import check_functions, functions_traced, stands_for, uncompiled
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph, Watched
from hodiff._core._substitutes import TAKEN_FOR_CONSTANTS, ExactNorms
from hodiff.errors import GraphError, HodiffError

# --- looks at the trace: evaluated as the tracer comes to them, with the tracer's frames above ----


def at_trace(look: Callable[..., Any]) -> Any:
    """The result of a look is a constant to the tracer. What it reads are locals of the function that calls it."""
    marked: Any = look
    marked._dynamo_marked_constant = True
    return look


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


def _known(variable: Any) -> Any:
    """What a variable of the tracer stands for: a constant, or a tensor's stand-in."""
    variable = variable.realize()
    if variable.is_python_constant():
        return variable.as_python_constant()
    if hasattr(variable, "items"):
        return [_known(item) for item in variable.items]
    return variable.as_proxy().node.meta["example_value"]


def _locals(*names: str) -> list[Any]:
    variables = next(_translators()).symbolic_locals
    return [_known(variables[name]) for name in names]


def _refuse(words: str) -> None:
    """End the trace: without `fullgraph=True` the call is then made as it is."""
    from torch._dynamo.exc import unimplemented

    text = f"hodiff: {words} Leave out fullgraph=True, or call it outside of the compiled function"
    unimplemented(gb_type="hodiff", context="", explanation=text, hints=[])


@at_trace
def enclosing() -> int:
    """The derivatives that the innermost enclosing call takes; 0 where there is none."""
    for translator in _translators():
        if translator.f_code is _evaluate.__code__:
            return _known(translator.symbolic_locals["order"])
    return 0


@at_trace
def _begin() -> None:
    """Let the tracer follow passes, until this trace ends."""
    from torch._dynamo import config

    if torch.is_inference_mode_enabled():
        _refuse("in inference mode nothing is recorded that could be differentiated.")
    if torch._C._functorch.get_interpreter_stack():  # pyright: ignore[reportAttributeAccessIssue]
        _refuse("the tracer has no passes inside of a torch.func transform (vmap, grad, jvp, ...).")
    if not config.trace_autograd_ops:
        next(_translators()).output.add_cleanup_hook(lambda: setattr(config, "trace_autograd_ops", False))
        config.trace_autograd_ops = True


def _nodes_of_trace(translator: Any) -> list[Any]:
    return [node for tracer in translator.output.tracers for node in tracer.graph.nodes]


def _inputs(translator: Any) -> dict[str, Any]:
    """The stand-ins of the tensors that enter the traced region, by where they come from."""
    variables = translator.output.input_source_to_var.items()
    pairs = [(source.name, variable.as_proxy()) for source, variable in variables if variable.is_tensor()]
    return {name: proxy.node.meta["example_value"] for name, proxy in pairs}


_BEFORE = "_hodiff_before"


@at_trace
def _before() -> None:
    """Note what there is before `f` runs."""
    translator = next(_translators())
    watched = [*_inputs(translator).values(), *_known(translator.symbolic_locals["leaves"])]
    setattr(translator, _BEFORE, (len(_nodes_of_trace(translator)), {id(x): x._version for x in watched}))


def _made(translator: Any) -> list[Any]:
    """The nodes that the tracer made as it followed `f`."""
    return _nodes_of_trace(translator)[getattr(translator, _BEFORE)[0] :]


_STATISTICS = {
    F.batch_norm: slice(1, 3),
    F.instance_norm: slice(1, 3),
    torch.batch_norm: slice(3, 5),
    torch.instance_norm: slice(3, 5),
}
"""What these write to, without saying so, as arguments."""


def _check_changed(translator: Any, leaves: list[Tensor]) -> None:
    """Raise where `f` has changed in place what is not put back."""
    versions, inputs = getattr(translator, _BEFORE)[1], _inputs(translator)
    news = {id(x) for x in [*inputs.values(), *leaves] if x._version != versions.get(id(x), 0)}
    for node in _made(translator):
        if node.target in _STATISTICS and True in [*node.args, *node.kwargs.values()]:
            statistics = [*node.args[_STATISTICS[node.target]], *map(node.kwargs.get, ("running_mean", "running_var"))]
            news |= {id(x.meta.get("example_value")) for x in statistics if isinstance(x, torch.fx.Node)}
    if any(id(leaf) in news for leaf in leaves):
        _refuse("f changes its argument in place; begin f with x = x.clone().")
    names = [name for name, x in inputs.items() if "_buffers" in name and id(x) in news]
    if names:
        _refuse(
            f"f changes a buffer of a module that is not the point ({names[0]}), as BatchNorm does in training mode, "
            f"and a traced region cannot put it back."
        )


def _survey(outputs: Sequence[Any], leaves: Sequence[Tensor]) -> _nodes.Survey:
    starts = {leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None}
    return _nodes.Survey([_nodes.node_of(x) for x in outputs if isinstance(x, Tensor)], starts)


def _unseen() -> tuple[type[Exception], ...]:
    """What stand-ins raise where they are asked for numbers."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode


_torch: Any = torch._C
_PASSES = (torch.autograd.grad, torch.Tensor.backward, _torch._functorch._grad_increment_nesting)


@at_trace
def _otherwise() -> int:
    """The order up to which `f` has to be written out from definitions, as `OutputGraph._evaluate` decides it; or 0.

    Nobody can look at the numbers on which that may depend: what may have to be written out, is.
    """
    translator = next(_translators())
    outputs, leaves, order = _locals("outputs", "leaves", "order")
    _check_changed(translator, leaves)
    made = [node.target for node in _made(translator)]
    constant = next((TAKEN_FOR_CONSTANTS[target] for target in made if target in TAKEN_FOR_CONSTANTS), None)
    if constant is not None:
        _refuse(str(_messages.constant(constant)))
    survey, by_hand = _survey(outputs, leaves), sum(target in _PASSES for target in made)
    names, higher = survey.names(), min(order + by_hand, 9)
    if higher < 2:
        return 2 * bool(names & {*_versions.PRODUCTS, _messages.DET})
    some = names & (_messages.WRITTEN_OUT | _messages.WRITTEN_AT_SOME - _messages.NORMS)
    some = some or _refusals.BIASED.among(survey)
    third = higher >= 3 and (_messages.at_third(names) or names & _near_zero.NODES.keys())
    return higher if some or third else 0


_TOLD, _REPLACED = _substitutes._TOLD, _substitutes._REPLACED
_WRITTEN = [*_TOLD.items(), *((f, definition) for f, definition in _REPLACED.items() if f not in _TOLD)]
_PLACES = {function: place for place, (function, _) in enumerate(_WRITTEN)}


@at_trace
def _place(function: Any) -> int:
    """Where the definition of a function stands; below 0 where it has none. The tracer need not guard the table."""
    return _PLACES.get(function, -1)


@stands_for(ExactNorms.__torch_function__)
def written(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    given = kwargs or {}
    place = _place(func) if given.get("out") is None else -1
    if place < 0:
        return func(*args, **given)
    given = _substitutes.named_by_torch(given)
    if place < len(_TOLD):
        return _WRITTEN[place][1](self, *args, **given)
    return _WRITTEN[place][1](*args, **given)


@at_trace
def _judge() -> bool:
    """Raise where the result would not be right, as `OutputGraph._judge` does. Whether passes are to be recorded."""
    outputs, leaves, points, names, order, strict, builds, batch_ndim, allow = _locals(
        "outputs", "leaves", "points", "names", "order", "strict", "builds", "batch_ndim", "allow"
    )
    survey, recorded = _survey(outputs, leaves), False
    try:
        missing = [name for leaf, name in zip(leaves, names, strict=True) if not survey.contains(leaf)]
        if len(missing) == len(leaves) and strict is not False:
            raise _refusals.independent(builds, missing, any(x.requires_grad for x in outputs))
        if missing and strict:
            raise GraphError(f"strict=True: the result does not depend on {_refusals.listed(missing)}.")
        for leaf, point, name in zip(leaves, points, names, strict=True):
            if leaf is not point and survey.contains(point):
                raise _refusals.bypass(name)
        if order < 2:
            recorded = _refusals.refuse_first(survey, leaves)
        else:
            _refusals.refuse_biased(survey, leaves)
            recorded = survey.is_remarkable(order) and _refusals.judge(survey, leaves, order, allow)
    except HodiffError as error:
        _refuse(str(error))
    except _unseen():
        told = [piece for piece, least, _ in _refusals.REMARKS if order >= least]
        known = sorted({name for name in survey.names() if any(piece in name for piece in told)})
        _refuse(
            f"whether a derivative is right depends on numbers that a traced region cannot see: {', '.join(known)}."
        )
    if batch_ndim and _refusals.MIXING.among(survey):
        _refusals.warn_of_mixing(batch_ndim)
    return recorded


@at_trace
def _search() -> None:
    """Raise where a gradient that is differentiated cannot be."""
    outputs, gradients, inputs, order = _locals("outputs", "gradients", "inputs", "order")
    try:
        made = [gradient for gradient in gradients if gradient is not None]
        _reverse._refuse_missing(outputs, made, inputs, third=order >= 3)
    except HodiffError as error:
        _refuse(str(error))


@at_trace
def _chunk() -> int:
    """How many vectors one pass takes, below 0 where they go one by one: but no more than 16 passes by itself."""
    outputs, inputs, rows, count, size, record = _locals("outputs", "inputs", "rows", "count", "size", "record")
    survey = _nodes.survey(outputs)
    size = size or max(_reverse.auto_chunk(survey, inputs), -(-count // 16))
    wrong = next(survey.named(*_versions.BATCHED_WRONGLY), None) is not None
    if wrong or (record and _refusals.has_norm_weights(survey, inputs)):
        return -size
    try:
        torch.autograd.grad(outputs, inputs, rows, True, record, True, True)
    except Exception as error:  # of an operation without a batching rule
        if not is_fault(error):
            raise
        return -size
    return size


@at_trace
def _shared() -> int:
    """Which results lie in memory that is not theirs alone, as bits of a number."""
    results, vectors = _locals("results", "vectors")
    taken, bits = {x.untyped_storage()._cdata for x in vectors}, 0
    for place, part in enumerate(results):
        memory = part.untyped_storage()._cdata
        bits |= (memory in taken or 0 in part.stride()) << place
        taken |= {memory}
    return bits


@at_trace
def _alike() -> None:
    """Raise where two tensors differ, of the numbers with which the region is traced."""
    translator = next(_translators())
    given, expected = (translator.symbolic_locals[name] for name in ("given", "expected"))
    with torch.enable_grad(), torch.random.fork_rng():
        a, b = (variable.get_real_value().detach() for variable in (given, expected))
    if not (a - b).abs().amax() <= torch.finfo(a.dtype).eps ** 0.5 * torch.maximum(a.abs().amax(), b.abs().amax()):
        _refuse(_known(translator.symbolic_locals["words"]))


def check_alike(given: Tensor, expected: Tensor, words: str) -> None:
    """End the trace with these words where two tensors differ by more than rounding."""
    _alike()


# --- the road -------------------------------------------------------------------------------------

NOTHING = torch.zeros(0, device="cpu", requires_grad=True)
"""What leaves depend on, so that they are differentiable: the tracer returns nothing that depends on a leaf it made."""


def leaf_like(tensor: Tensor) -> Tensor:
    """A tensor of the same values, down to the sign of a zero, in whose graph there is nothing."""
    with torch.enable_grad():
        return tensor.detach() - NOTHING.sum().to(tensor)


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
        with torch.enable_grad():
            slots = _slots(call)
            self.leaves = _leaves(call, slots)
        value, exact = _run(call, self.leaves, slots, 0)
        if exact:
            value, _ = _run(call, self.leaves, slots, exact)
        self.outputs, self.aux = _graph.split(value) if call.has_aux else (value, None)
    else:
        self._check_tensors()
        self.outputs, self.leaves = call.what, call.where.tensors
    where, asked = call.where, (call.order, call.strict, call.builds_graph, call.batch_ndim, call.allow)
    self.recorded = _judged(self.tensors(), self.leaves, where.tensors, where.names, *asked)
    return self


@stands_for(Watched.__enter__)
def enter_watched(self: Any) -> Any:
    """What PyTorch takes for constants is refused in each trace."""
    return enter(self)


@stands_for(OutputGraph.__exit__)
def leave(self: Any, *error: object) -> None:
    return None


_Slots = list[tuple[Any, str, int]]


def _leaves(call: Any, slots: _Slots) -> list[Tensor]:
    """A view of each parameter; those of RNNs, which keep a list of them as well, are their own leaves."""
    lent = {number for _, _, number in slots}
    own = {n for part in call.where.module_slices for n in range(part.start, part.start + len(part.names))} - lent
    return [
        x if number in own else _leaf(x, call.create_graph or number in lent)
        for number, x in enumerate(call.where.tensors)
    ]


def _slots(call: Any) -> _Slots:
    """Where `f` finds the leaves of modules, RNNs left out. No other leaf's identity is read: that has a guard."""
    numbers = {
        id(call.where.tensors[number]): number
        for part in call.where.module_slices
        for number in range(part.start, part.start + len(part.names))
    }
    return [
        (module._parameters, name, numbers[id(x)])
        for part in call.where.module_slices
        for module, name, _, x in part.assembly.slots
        if id(x) in numbers and not isinstance(module, nn.RNNBase)
    ]


def _leaf(tensor: Tensor, connected: bool) -> Tensor:
    return tensor.view_as(tensor) if connected and tensor.requires_grad else leaf_like(tensor)


def _run(call: Any, leaves: list[Tensor], slots: _Slots, exact: int) -> tuple[Any, int]:
    """What `f` returns, and the order up to which it has to be written out, where it was not and should be."""
    theirs = [(module._buffers, dict(module._buffers)) for module in _changing(call)]
    for buffers, originals in theirs:
        for name in originals:
            buffers[name] = _copied(originals[name])
    for parameters, name, number in slots:
        theirs += [(parameters, {name: parameters[name]})]
        parameters[name] = leaves[number]
    functions = functions_traced()
    argument = call.where.argument(leaves)
    points = argument if call.unpack_point else (argument,)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        value, otherwise = _evaluate(call.what, points, call.args, call.kwargs, leaves, call.order, exact)
    check_functions(functions)
    for buffers, originals in theirs:
        for name in originals:
            buffers[name] = originals[name]
    return value, 0 if exact else otherwise


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()


def _changing(call: Any) -> list[nn.Module]:
    """The modules of the point, and of `f` where that is one, that may write to their buffers."""
    roots = [part.module for part in call.where.module_slices]
    roots += [call.what] if isinstance(call.what, nn.Module) else []
    return [module for root in roots for module in root.modules() if module.training and module._buffers]


def _evaluate(f: Any, points: Any, args: Any, kwargs: Any, leaves: Any, order: int, exact: int) -> tuple[Any, int]:
    """The frame by which calls inside of `f` know that they are (see `enclosing`)."""
    _before()
    if exact:
        with ExactNorms(exact):
            value = f(*points, *args, **kwargs)
    else:
        value = f(*points, *args, **kwargs)
    outputs = _tree.flatten(value)[0]  # which the look below reads
    return value, _otherwise() if outputs else 0


def _judged(
    outputs: Any,
    leaves: Any,
    points: Any,
    names: Any,
    order: Any,
    strict: Any,
    builds: Any,
    batch_ndim: Any,
    allow: Any,
) -> bool:
    return _judge()


# --- passes ---------------------------------------------------------------------------------------


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
    leaves: Sequence[Tensor] = graph.leaves if inputs is None else inputs
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return joined_to_leaves(graph, [torch.zeros_like(x) for x in leaves])
    outputs = [o for o, _ in pairs]
    given = [torch.ones_like(o) if c is None else c for o, c in pairs]
    gradients = _pass(outputs, leaves, given, graph, build=differentiated or graph.create_graph)
    return joined_to_leaves(graph, gradients)


def _pass(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    graph: Any,
    *,
    build: bool,
    batch: tuple[int, ...] = (),
) -> list[Tensor]:
    """One pass without autocast, with one cotangent for each output or, with `batch`, as many as it says."""
    with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        bare = torch.autograd.grad(
            outputs,
            inputs,
            given,
            retain_graph=True,
            create_graph=build or graph.recorded,
            allow_unused=True,
            is_grads_batched=bool(batch),
        )
    if build:
        _searched(outputs, bare, inputs, graph.call.order)
    gradients = [x.new_zeros((*batch, *x.shape)) if g is None else g for g, x in zip(bare, inputs, strict=True)]
    return gradients if build else [g.detach() for g in gradients]


def _searched(outputs: Any, gradients: Any, inputs: Any, order: int) -> None:
    _search()


@stands_for(_reverse.vjp_ahead)
def vjp_ahead(graph: Any, output: Tensor, cotangent: Tensor) -> Tensor:
    return _pass([output], graph.leaves, [cotangent], graph, build=False)[0]


@stands_for(_reverse.jvp)
def jvp(
    graph: Any, outputs: list[Tensor], tangents: list[Tensor], count: int | None, *, chunk_size: int | None
) -> list[Tensor]:
    cotangents = [leaf_like(torch.ones_like(output)) for output in outputs]
    pulled = vjp(graph, outputs, cotangents, differentiated=True)
    return _reverse.products(graph, pulled, tangents, count, chunk_size=chunk_size, inputs=cotangents)


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
) -> list[tuple[int, int, list[Tensor]]]:
    leaves: list[Tensor] = graph.leaves if inputs is None else inputs
    live = [place for place, output in enumerate(outputs) if output.requires_grad]
    if not live or not count:
        return [(0, count, [x.new_zeros((count, *x.shape)) for x in leaves])]
    outputs, start = [outputs[place] for place in live], 0
    results: list[tuple[int, int, list[Tensor]]] = []
    size = _chunks(outputs, leaves, _of(cotangents(0, count), live), count, chunk_size, graph.create_graph)
    while start < count:
        stop = min(start + abs(size), count)
        rows = _of(cotangents(start, stop), live)
        if size > 0:
            parts = _pass(outputs, leaves, rows, graph, build=graph.create_graph, batch=(stop - start,))
        else:
            parts = _one_by_one(graph, outputs, rows, leaves)
        results.append((start, stop, _reverse.unaliased(parts, rows)))
        start = stop
    return results


def _of(rows: list[Tensor], places: list[int]) -> list[Tensor]:
    return [rows[place] for place in places]


def _chunks(outputs: Any, inputs: Any, rows: Any, count: int, size: int | None, record: bool) -> int:
    return _chunk()


def _one_by_one(graph: Any, outputs: Any, rows: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    each = [
        _pass(outputs, inputs, [row[place] for row in rows], graph, build=graph.create_graph)
        for place in range(len(rows[0]))
    ]
    return [torch.stack(parts) for parts in zip(*each, strict=True)]


@stands_for(_reverse.joined_to_leaves)
def joined_to_leaves(graph: Any, gradients: list[Tensor]) -> list[Tensor]:
    if not graph.create_graph or all(part.requires_grad for part in gradients):
        return gradients
    nothing = torch.stack([x.reshape(-1)[:0].sum().to(graph.leaves[0]) for x in graph.leaves]).sum()
    with torch.enable_grad():
        return [part if part.requires_grad else part + nothing.to(part) for part in gradients]


@stands_for(_reverse.unaliased)
def unaliased(results: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    bits = _shared()
    return [part.clone() if bits >> place & 1 else part for place, part in enumerate(results)]


@stands_for(_reverse.basis)
def basis(output: Tensor, batch_ndim: int) -> tuple[int, Any]:
    """The tracer takes no write to a view of what may be expanded."""
    batch, event = output.shape[:batch_ndim], output.shape[batch_ndim:]
    count = event.numel()

    def rows(start: int, stop: int) -> list[Tensor]:
        units = torch.eye(count, dtype=output.dtype, device=output.device)[start:stop]
        return [units.reshape((stop - start, *[1] * batch_ndim, *event)).expand((stop - start, *batch, *event))]

    return count, rows


# --- what the tracer cannot follow, or need not ---------------------------------------------------


@stands_for(_reverse.writable)
def writable(graph: Any, vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    return vectors


@stands_for(_reverse.warned_if_not_finite)
def warned_if_not_finite(graph: Any, results: list[Tensor], vectors: Sequence[Tensor] = ()) -> list[Tensor]:
    return results


@stands_for(_nodes.mark_results)
def mark_results(tensors: Any) -> None:
    return None


@stands_for(_loans.memory_of)
def memory_of(tensor: Tensor) -> int:
    """All in one memory: what may be the caller's is copied."""
    return 0


@stands_for(_call.nested)
def nested() -> bool:
    """So that no samples go side by side, which would be held against the batch by numbers."""
    return True


@stands_for(_call.refuse_transforms)
def refuse_transforms(*, batched: bool = False) -> None:
    _begin()


@stands_for(_settings.RandomState.__init__)
def random_state(self: Any, device: Any) -> None:
    return None


@stands_for(_settings.RandomState.replayed)
def replayed(self: Any) -> Any:
    """What draws differs then, and is refused."""
    return nullcontext()


@stands_for(_settings.recording)
def recording() -> Any:
    return torch.enable_grad()


@stands_for(_settings.records)
def records() -> bool:
    return torch.is_grad_enabled()


at_trace(_vectors.matches)


@at_trace
def _check_whole() -> None:
    """Raise for what is sharded. No trace may guard which classes are known to be whole: these become more."""
    modules = next(_translators()).symbolic_locals["modules"].realize()
    try:
        _arguments.check_modules([key.vt.value for key in modules.items], *_locals("name"))
    except HodiffError as error:
        _refuse(str(error))


@stands_for(_arguments.check_modules)
def check_modules(modules: Any, name: str) -> None:
    _check_whole()


@stands_for(_where.Assembly.of)
def assembly(root: nn.Module) -> Any:
    made = _where.Assembly({}, [])
    for path, module in _where.plain(root).named_modules():
        made.modules[module] = None
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made.slots.append((module, name, f"{path}.{name}" if path else name, parameter))
    return made


@stands_for(_vectors.Space.structured)
def structured(self: Any, value: Any, name: str, tree: Any) -> Any:
    if tree is _tree.LEAF and isinstance(value, Tensor):
        return [value], _vectors._count(value, self.likes[0], name)
    return self.rearranged(value, name, tree)


uncompiled(_independence.check, "hodiff: check_independence= looks at numbers, which a traced region does not have")
uncompiled(_kernels.in_blocks, "hodiff: checkpoint= runs blocks of f again, which a traced region cannot")
