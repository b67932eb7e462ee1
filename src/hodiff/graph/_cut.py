"""Derivatives that a pass cannot give: no graph behind the tensor, none with the input,
no formula in PyTorch.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType

import torch
from torch import Tensor

from hodiff._core import _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _saved, _source
from hodiff.graph._case import Explanation, Fact, FailedPass, callers
from hodiff.graph._names import steps_of, users_of
from hodiff.graph._record import COPY, NOTHING, Cut, joined
from hodiff.graph._source import Line, line_of, lines_of

HOW = {
    "detached": "it was detached",
    "gradients off": "gradients were off",
    "first gradient": "a gradient, taken without create_graph=True",
    "zero derivative": "a gradient of what is linear: a constant",
    "Function differentiable once": "a gradient through this Function, whose backward recorded "
    "nothing",
    "made a constant": "a number, an array, a copy of values",
    "discrete": "integers or booleans",
    "undeclared derivative": "PyTorch declares no derivative of it",
    "checkpoint": "a re-entrant checkpoint runs it with gradients off",
    "inside a Function": "in the forward of a Function",
    "frozen": "of parameters with requires_grad=False",
    "left": "the last value that left PyTorch; whether it led here is not known",
}
"""What is said of a cut, by its kind."""
FACTS = 6
"""Facts of one kind that are told."""


def facts_of(case: FailedPass, cuts: Iterable[Cut]) -> list[Fact]:
    """Cuts, those that lead to what an optimizer steps before the others,
    and then those behind them.
    """
    first = sorted(
        cuts, key=lambda cut: not any(case.owners(each.leaves) for each in (cut, *cut.behind))
    )
    series = list(first)
    for cut in series:  # which grows
        series += [each for each in joined(cut.behind) if each not in series][: FACTS - len(series)]
    facts = [fact for cut in series for fact in _of_cut(case, cut)]
    leaves = [leaf for cut in first for leaf in cut.leaves]
    deeper = [leaf for cut in series[len(first) :] for leaf in cut.leaves]
    if first and case.owners(deeper) and not case.owners(leaves):
        what = "this cut" if len(first) == 1 else "these cuts"
        facts.append(
            Fact(
                "behind",
                text=f"without {what} alone the pass would reach nothing that an optimizer steps",
            )
        )
    return facts


def _of_cut(case: FailedPass, cut: Cut) -> list[Fact]:
    """One cut: its line, what is behind it, and what had switched gradients off."""
    kind = cut.kind if cut.kind in ("frozen", "left") else "cut"
    text = (
        HOW[cut.kind]
        if cut.exact
        else f"{HOW[cut.kind]}; what is behind it is as of an earlier call"
    )
    name = {"__get__": "data", COPY: "tensor"}.get(cut.call, cut.call)
    facts = [case.of_leaves(Fact(kind, name, cut.line, text), cut.leaves)]
    if cut.off is not None:
        called = f", called at {cut.off.caller}" if cut.off.caller is not None else ""
        facts.append(Fact("off since", "", cut.off.line, f"{cut.off.how}{called}"))
    switches = {path[0].line: None for leaf in cut.leaves if (path := case.record.switched(leaf))}
    if kind == "frozen":
        facts += [
            Fact("off since", "", line, "requires_grad was set") for line in list(switches)[:FACTS]
        ]
    return facts


def no_graph(case: FailedPass) -> Explanation | None:
    """The explanation of "element 0 of tensors does not require grad"."""
    tensor = next((each for each in case.tensors if not each.requires_grad), None)
    if tensor is None and case.inputs:
        return _input_without_grad(case)
    if tensor is None or case.line is None:
        return None
    variable = case.names.of(tensor)
    facts = [Fact("no graph", variable or "what is differentiated")]
    if in_transform(case.frames):
        return case.explanation("inside a transform", *facts, variable=variable, certain=True)
    return _without(case, tensor, variable, facts)


def _without(case: FailedPass, tensor: Tensor, variable: str, facts: list[Fact]) -> Explanation:
    """The explanation of a tensor without a graph: its cuts; or what made it,
    of which nothing required grad.
    """
    cuts = _concerned(case, tensor)
    origin = case.record.cuts.origin(tensor)
    latest = case.record.cuts.latest
    if origin is not None and not any(cut.kind not in ("left", "frozen") for cut in cuts):
        path = case.record.making(tensor)
        facts += [
            Fact("made", variable, path[0].line, f"by {origin.call}"),
            *callers(path, lines_of(case.path)),
        ]
    if not cuts:
        left = (
            _of_cut(case, Cut("left", 0, latest.path, latest.call))[:1]
            if latest is not None
            else []
        )
        cause = "nothing requires grad" if origin is not None else "no graph"
        return case.explanation(cause, *facts, *left, variable=variable)
    kind = "made a constant" if cuts[0].kind == "left" else cuts[0].kind
    way = _messages.CONSTANTS.get(cuts[0].call, "") if kind == "undeclared derivative" else ""
    more = (f"Of {cuts[0].call}: {way}.",) if way else ()
    return case.explanation(kind, *facts, *facts_of(case, cuts), variable=variable, more=more)


def _concerned(case: FailedPass, tensor: Tensor) -> list[Cut]:
    """The place where a tensor lost its graph.

    What is frozen, as networks are that give features, counts if it is all.
    """
    cuts = list(case.record.cuts.places(tensor))
    real = [cut for cut in cuts if cut.kind not in ("left", "frozen")]
    frozen = [cut for cut in cuts if cut.kind == "frozen"]
    owned = [cut for cut in frozen if case.owners(cut.leaves)]
    return real + owned if real else frozen or cuts


def in_transform(frames: Sequence[FrameType]) -> bool:
    """Whether a transform of torch.func runs these frames, or one within."""
    folder = os.path.dirname(torch.func.functional_call.__code__.co_filename) + os.sep
    if not frames:
        return False
    stack = traceback.walk_stack(frames[0])
    return any(frame.f_code.co_filename.startswith(folder) for frame, _ in stack)


def within_pass(case: FailedPass) -> Explanation | None:
    """A pass that failed while another ran: in a hook, or in a Function's backward."""
    if case.line is None:
        return None
    tensor = next((each for each in case.tensors if not each.requires_grad), None)
    if tensor is not None:
        variable = case.names.of(tensor)
        line = _source.only_assignment(variable, case.line)
        facts = [
            Fact("no graph", variable or "what is differentiated"),
            Fact("made", variable, line),
        ]
        return case.explanation(
            "inside a pass", *facts[: 1 + (line is not None)], variable=variable, certain=True
        )
    facts = [
        Fact(
            "unused", case.leaf(each), text="" if each.requires_grad else "it does not require grad"
        )
        for each in case.given
        if not each.requires_grad or _nodes.node_of(each) not in case.graph
    ]
    if not facts:
        return None
    return case.explanation("inside a pass", *facts[:FACTS], variable=facts[0].name, certain=True)


def not_scalar(case: FailedPass) -> Explanation | None:
    """The explanation of "grad can be implicitly created only for scalar outputs"."""
    loss = next((tensor for tensor in case.tensors if tensor.numel() != 1), None)
    if loss is None:
        return None
    variable = case.names.of(loss)
    shape = Fact("shape", variable, text=f"it has shape {tuple(loss.shape)}")
    line = case.record.made(loss.grad_fn)
    made = Fact("made", variable, line) if line is not None else None
    return case.explanation("several numbers", shape, made, variable=variable, certain=True)


def wrong_start(case: FailedPass) -> Explanation | None:
    """The explanation of "Mismatch in shape":
    the start of the pass is not shaped as what is differentiated.
    """
    for output, given in zip(case.tensors, case.starts or (), strict=False):
        if isinstance(given, Tensor) and given.shape != output.shape:
            names = case.names.of(given), case.names.of(output)
            return case.explanation(
                "wrong start",
                Fact(
                    "shape",
                    names[0],
                    case.record.maker(given),
                    f"the start has shape {tuple(given.shape)}",
                ),
                Fact(
                    "shape",
                    names[1],
                    case.record.maker(output),
                    f"what is differentiated {tuple(output.shape)}",
                ),
                variable=names[0],
                certain=True,
            )
    return None


def no_tensor(case: FailedPass) -> Explanation:
    """The explanation of "Expected output to be a torch.Tensor"."""
    wrong = [
        Fact("no tensor", text=f"element {index} is {str(each)[:40]}, a {type(each).__name__}")
        for index, each in enumerate(case.outputs)
        if not isinstance(each, Tensor)
    ]
    return case.explanation(
        "no tensor", *wrong[:FACTS], *without_gradient(case)[:FACTS], certain=True
    )


def without_gradient(case: FailedPass, line: Line | None = None) -> list[Fact]:
    """The tensors whose `.grad` was read and None, at a line or at all, each once."""
    reads = {id(each): (each, at) for ref, at in case.record.without if (each := ref()) is not None}
    facts = []
    for each, at in reads.values():
        if line in (None, at):
            name = case.leaf(each) if each.is_leaf else case.names.of(each)
            frozen = "" if each.requires_grad else "; it does not require grad"
            facts.append(Fact("no grad", name, at, f"its .grad was None{frozen}"))
    return facts


def between(case: FailedPass, nodes: Iterable[Node], leaves: Iterable[Tensor]) -> list[Cut]:
    """The cuts that some nodes were given values from, and that lead to any of some leaves."""
    ids = set(map(id, leaves))
    cuts = joined(cut for node in nodes for cut in case.record.cuts.entering(node))
    return [
        cut
        for cut in cuts
        if any(id(leaf) in ids for each in (cut, *cut.behind) for leaf in each.leaves)
    ]


def _input_without_grad(case: FailedPass) -> Explanation | None:
    """An input that no graph leads to, as it required no grad when the loss was computed."""
    missing = [tensor for tensor in case.given if not tensor.requires_grad]
    if not missing:
        return None
    facts = [
        Fact("no grad", case.leaf(tensor), case.record.maker(tensor), "it does not require grad")
        for tensor in missing[:FACTS]
    ]
    cuts = [
        cut for cut in case.record.cuts.places(missing[0]) if cut.kind not in ("left", "frozen")
    ]
    cause = cuts[0].kind if cuts else "nothing requires grad"
    return case.explanation(
        cause, *facts, *facts_of(case, cuts), variable=facts[0].name, certain=True
    )


def not_used(case: FailedPass) -> Explanation | None:
    """The explanation of "One of the differentiated Tensors appears to not have
    been used in the graph".
    """
    missing = [tensor for tensor in case.given if _nodes.node_of(tensor) not in case.graph]
    if not missing:
        return None
    record = case.record
    facts = [fact for tensor in missing[:FACTS] for fact in _of_unused(case, tensor)]
    mine = between(case, case.graph, missing)
    built = {call.stack[0] for call in record.passes if call.built and call.path}
    made = dict.fromkeys(map(record.made, case.graph))
    taken = [line for line in made if line is not None and line in built]
    gradients = [
        Fact(
            "made",
            record.functions.get(line, ""),
            line,
            "a gradient with a graph, which the loss was computed from",
        )
        for line in taken[:FACTS]
    ]
    there = [leaf for node in case.graph if (leaf := _saved.leaf(node)) is not None]
    opaque = any(line in record.functions for line in taken)
    return case.explanation(
        "Function differentiable once" if opaque and not mine else "not used",
        *facts,
        *facts_of(case, mine),
        *gradients,
        case.of_leaves(Fact("in graph"), there),
        _loss(case),
        variable=facts[0].name,
        certain=True,
    )


def _loss(case: FailedPass) -> Fact | None:
    """The place where the differentiated tensor was made."""
    line = case.record.made(case.roots[0]) if case.roots else None
    if line is None:
        return None
    return Fact("made", case.names.nodes.get(case.roots[0], ""), line, "what is differentiated")


def _of_unused(case: FailedPass, tensor: Tensor) -> list[Fact]:
    """An input that is not in the graph: what made it, before or after the loss,
    and which lines read it.
    """
    name, record = case.leaf(tensor), case.record
    line = record.maker(tensor)
    if tensor.is_leaf:
        reads = record.cuts.uses(tensor)
        functions = any(map(_saved.is_function, case.graph))
        blind = case.record is NOTHING or functions or in_transform(case.frames)
        text = "" if reads or blind else "no operation was seen to read it"
        return [Fact("unused", name, line, text), *(Fact("read", name, each) for each in reads)]
    last = max(map(_saved.sequence, case.roots), default=0)
    after = _saved.sequence(tensor.grad_fn) > last if _saved.answers().sequences else False
    return [Fact("unused", name, line, "made after the loss" if after else "")]


# --- derivatives that a pass cannot give: second ones that PyTorch lacks, and checkpoints that
# compute otherwise


def second_derivative(case: FailedPass) -> Explanation | None:
    """The explanation of a missing or forbidden double backward."""
    kind = _messages.kind_of(case.error)
    compiled = kind == "compiled"
    once = list(case.record.once) if kind == "once" else []
    marked = sorted({type(node).__name__ for node in case.graph if _saved.is_raising(node)})
    known = ["a compiled function"] if compiled else [*(name for name, _ in once), *marked]
    operation = _messages.without_derivative(case.error) or [*known, "an operation"][0]
    line = (
        once[0][1]
        if once
        else _line(case, [*case.graph, *_nodes.walk(case.names.nodes)], operation, compiled)
    )
    way = _messages.way_out("compiledfunction" if compiled else operation)
    more = (f"Instead of {way.operation}: {way.instead}.",) if way is not None else ()
    cause = "Function differentiable once" if kind == "once" else "no second derivative"
    return case.explanation(
        cause, Fact("lacks", operation, line, "no second derivative"), more=more
    )


def own_function(case: FailedPass) -> Explanation | None:
    """A Function's backward raised in a second derivative, by the code that it raised in."""
    codes = [step.tb_frame.f_code for step in steps_of(case.error.__traceback__)]
    functions = {
        node: _saved.function_of(type(node)) for node in filter(_saved.is_function, case.graph)
    }
    raised = [
        node
        for node, each in functions.items()
        if getattr(each.backward, "__code__", None) in codes
    ]
    for node in raised:
        place = _saved.sequence(node)
        built = [
            call for call in case.record.passes if call.built and call.path and call.place <= place
        ]
        if built:  # it is of a gradient; what is of the forward came before
            users = {child: each for each, children in case.graph.items() for child in children}
            before = [each for each in functions if _saved.sequence(each) < built[0].place]
            return case.explanation(
                "Function differentiable once",
                Fact(
                    "lacks",
                    functions[node].__name__,
                    built[-1].stack[0],
                    "its backward raised this",
                ),
                *(
                    _read(case, functions[each].__name__, users.get(each))
                    for each in before[:FACTS]
                ),
                variable=functions[node].__name__,
            )
    return None


def _read(case: FailedPass, name: str, user: Node | None) -> Fact | None:
    """The line that reads the result of a Function, which no watch sees made."""
    line = case.record.made(user)
    return Fact("read", name, line, "its result") if line is not None else None


def _line(case: FailedPass, nodes: list[Node], operation: str, compiled: bool) -> Line | None:
    """The line of the operation: its forward node is in the graph still."""
    if case.record is NOTHING:
        return None
    key = operation.replace("_", "").lower().removesuffix("backward")
    lines = []
    for node in nodes:
        name = type(node).__name__.lower().removesuffix("backward0").removesuffix("backward")
        if (compiled and "compiled" in name) or (key and name == key):
            line = _of_compiled(case, node) if compiled else case.record.made(node)
            line = line or case.assigned(case.names.nodes.get(node, ""))
            lines += [(_saved.sequence(node), line)] if line is not None else []
    if lines:  # the first is of the forward; those that a pass made come later
        return min(lines)[1]
    made = [case.record.made(node) for node in nodes if _saved.is_raising(node)]
    return next((line for line in made if line is not None), None)


def _of_compiled(case: FailedPass, node: Node) -> Line | None:
    """The line of a compiled call, which no watch sees:
    where what its pass differentiates was assigned, if once.
    """
    made = case.record.made(node)
    return (
        (_source.only_assignment(_source.target_of(made), made) or made)
        if made is not None
        else None
    )


def reentrant(case: FailedPass) -> Explanation:
    """The explanation of a pass by inputs through a checkpoint that serves `backward()` alone."""
    name = "CheckpointFunction"
    line = _line(case, list(case.graph), name, compiled=False)
    above = [
        node
        for node in case.graph
        if any(type(child).__name__.startswith(name) for child in _saved.children(node))
    ]
    read = next(filter(None, map(case.record.made, above)), None) if line is None else None
    return case.explanation(
        "checkpoint", Fact("made", "", line), Fact("read", "", read, "its result")
    )


def recomputed(case: FailedPass) -> Explanation | None:
    """The explanation of a checkpoint whose second forward was not like the first."""
    several = _messages.kind_of(case.error) == "recomputed in number"
    what = "more or fewer tensors" if several else "tensors of another shape, dtype or device"
    lines = {line for node in case.graph for line in lines_of(case.record.path(node))}
    outer = next((line for line in sorted(lines) if _source.calls(line, "checkpoint")), None)
    fact = Fact("made", "checkpoint", outer, f"the second run recorded {what} than the first")
    return case.explanation("recomputed otherwise", fact)


def unpacked_twice(case: FailedPass) -> Explanation | None:
    """The explanation of a Function that reads what it saved twice, under a checkpoint."""
    frames = users_of(steps_of(case.error.__traceback__))
    line = line_of(frames[0]) if frames else None
    fact = Fact("read", "ctx.saved_tensors", line, "for the second time")
    return case.explanation(
        "recomputed otherwise", fact, variable="ctx.saved_tensors", certain=True
    )
