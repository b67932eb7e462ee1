"""Derivatives that a pass cannot give: no graph behind the tensor, none with the input, no formula in PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _messages, _nodes
from hodiff._core._nodes import Node
from hodiff.graph import _saved, _source
from hodiff.graph._case import Explanation, FailedPass
from hodiff.graph._record import COPY, Lost
from hodiff.graph._source import Line, at, line_of, lines_of, quoted

_INDICES = ("argmax", "argmin", "max", "min", "argsort", "sort", "topk", "multinomial", "bucketize", "searchsorted")
_ROUNDING = ("long", "int", "to", "type", "short", "round", "bool")


class Cut(NamedTuple):
    """A way to lose a graph: its reason, what to do, what to do in a function that hodiff was given, the cause's name.

    Texts have `{where}` for the place, and `{call}` for the function. What to do may depend on
    that: `by_call`.
    """

    reason: str
    fix: str = ""
    inside: str = ""
    cause: str = ""
    by_call: Mapping[str, str] = {}


CUTS = {
    "detached": Cut(
        "it was detached there, so nothing below is part of the graph.",
        "remove the detach() or .data{where} if gradients should flow through this value.",
        "drop the detach() (or .data) there if you want a derivative through it.",
    ),
    "no_grad": Cut(
        "it was computed while gradients were switched off (no_grad or inference_mode).",
        "compute it outside the no_grad block, or under torch.enable_grad(){where}.",
        "move it out of the no_grad block, or compute it under torch.enable_grad().",
    ),
    "inference": Cut(
        "it was computed while gradients were switched off, by inference_mode, which enable_grad() leaves on.",
        "compute it outside the inference_mode block, or under torch.inference_mode(False){where}.",
        "move it out of the inference_mode block, or compute it under torch.inference_mode(False).",
        "no_grad",
    ),
    "checkpoint": Cut(
        "a re-entrant checkpoint computed it with gradients switched off. It attaches a result only if that is\n       "
        "a tensor, or a tuple of them, and a tensor among its arguments requires grad.",
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    ),
    "inside a Function": Cut(
        "it was computed inside the forward of an autograd.Function, which records nothing.",
        "compute it outside the Function; or, if a gradient is needed in its forward,\n"
        "under torch.enable_grad(){where} from a copy that requires grad (x.detach().requires_grad_()).",
    ),
    "inside a pass": Cut(
        "it was computed in a hook, or in a Function's backward, where nothing is recorded.",
        "compute it under torch.enable_grad(){where}, from what requires grad.",
    ),
    "discrete": Cut(
        "that operation gives integers or booleans, which have no derivative.",
        "write a smooth function for `{call}`{where}: sigmoid(x / t) for x > 0, abs or square for a difference.",
        by_call={
            **dict.fromkeys(
                _INDICES,
                "give the loss the scores that {call} picks from{where}: cross_entropy takes logits;\n"
                "softmax and gumbel_softmax are smooth.",
            ),
            **dict.fromkeys(_ROUNDING, "leave the values as they are{where}: rounded, they have no derivative."),
        },
    ),
    "gradient": Cut(
        "it is a gradient that was taken without create_graph=True, so it has no graph of its own.",
        "take it with hodiff.grad(f, x, create_graph=True), or autograd.grad(..., create_graph=True).",
        "take that gradient with hodiff.grad, which is differentiable inside f, or with "
        "autograd.grad(..., create_graph=True).",
        "gradient without create_graph",
    ),
    "constant gradient": Cut(
        "it is the gradient of a function that is linear: a constant, with no graph to differentiate.",
        "its derivative is zero; hodiff.nth_derivative and hodiff.hvp return that.",
        "its derivative is zero; hodiff.grad inside f gives zeros there, instead of a constant.",
    ),
    "opaque gradient": Cut(
        "it is a gradient that was taken through an autograd.Function whose backward recorded nothing.",
        "write {call} with plain operations; or its backward so that it can be differentiated: from\n"
        "ctx.saved_tensors, by operations of PyTorch, without @once_differentiable.",
        cause="no second derivative",
    ),
    "constant": Cut(
        "it was turned into a number, a NumPy array or another constant there, and carries no graph from then on.",
        "stay with tensor operations{where}: {call} gives a constant.",
        "stay with tensor operations: item(), float(), NumPy and torch.tensor(...) give constants, "
        "torch.stack and torch.cat do not.",
        by_call={
            COPY: "use the tensor itself, with no torch.tensor(...) around it{where}: that copies values alone.",
            **dict.fromkeys(
                ("tensor", "as_tensor"),
                "put the tensors together with torch.stack{where}: torch.{call} copies values alone.",
            ),
        },
    ),
    "smooth": Cut(
        "PyTorch declares no derivative of that function, although it is smooth, and treats its result as a constant.",
        by_call={name: f"{way}." for name, way in _messages.CONSTANTS.items()},
    ),
    "frozen": Cut("all parameters that it was computed from have requires_grad=False."),
    "no graph": Cut("nothing that it was computed from requires grad, or the graph was cut on the way."),
}


_COPY = r"^\s*(\w+) *= *(\w+)\.(?:detach\(\)|data)\s*(?:#|$)"


def fix_of(kind: str, line: Line | None, call: str) -> str:
    """What can be done where the graph was cut."""
    where = f" at {at(line)}" if line is not None else ""
    cut = CUTS[kind]
    fix = cut.by_call.get(call, cut.fix).replace("{where}", where).replace("{call}", call or "that")
    copied = re.search(_COPY, line.text) if kind == "detached" and line is not None else None
    if copied is not None and copied[1] != copied[2]:  # left out, what is kept would hold the graph
        fix += f"\nIf {copied[1]} is only stored (statistics), leave it, and return or use {copied[2]} afterwards."
    return fix


def no_graph(case: FailedPass) -> Explanation | None:
    """The explanation of "element 0 of tensors does not require grad"."""
    tensor = next((each for each in case.tensors if not each.requires_grad), None)
    if tensor is None and case.inputs:
        return _input_without_grad(case)
    if tensor is None or case.line is None:
        return None
    variable = case.names.of(tensor)
    places = _concerned(case, tensor)
    certain = bool(places)
    lost, beside = places[0] if places else _likely(case, tensor, variable), places[1:]
    kind, line = (lost.kind, lost.line) if lost is not None else ("no graph", None)
    if lost is not None and kind == "frozen":
        return _of_frozen(case, lost, tensor, certain=certain)
    made = _source.only_assignment(variable, case.line) if line is None else None
    fix = _fix(case, lost, beside) if lost is not None and certain else ""
    unknown = _which(case, beside) if beside else ""
    return case.explanation(
        CUTS[kind].cause or kind,
        _without_graph(variable),
        ("cut at", line),
        ("computed at", made),
        *(("frozen in" if each.kind == "frozen" else "cut at", each.line) for each in beside),
        ("switched off", _switched_off(case, kind, line)),
        ("failing call", case.line),
        _silenced(line),
        variable=variable,
        created=line,
        reason=CUTS[kind].reason,
        fixes=(fix,),
        unknown=(unknown if fix or beside else _ask(case, kind, line, made),),
        certain=certain,
    )


def _without_graph(variable: str) -> str:
    return f"`{variable}` has no graph" if variable else "the value that is differentiated has no graph"


def _concerned(case: FailedPass, tensor: Tensor) -> list[Lost]:
    """Where a tensor lost its graph, for certain: where optimizers are in sight, those cuts that lead to their leaves.

    Of those the ones whose leaves this very line has trained before, if some are. Elsewhere what is
    frozen, as are networks that give features, is of interest only where nothing else was cut.
    """
    cuts, trained = case.record.cuts, case.names.trained
    places = list(cuts.places(tensor))
    concerned = [place for place in places if any(id(leaf) in trained for leaf in cuts.leaves(place))]
    mine = [place for place in concerned if _trained_here(case, cuts.leaves(place))]
    return mine or concerned or [place for place in places if place.kind != "frozen"] or places


def _trained_here(case: FailedPass, leaves: Iterable[Tensor]) -> bool:
    """Whether an optimizer has stepped some leaves after an earlier pass of the line that fails."""
    return case.call is not None and any(case.record.trained_by(leaf) == case.path for leaf in leaves)


def _of_frozen(case: FailedPass, lost: Lost, loss: Tensor, *, certain: bool) -> Explanation:
    """The explanation of a loss that was computed from parameters alone that require no grad."""
    variable = case.names.of(loss)
    leaves = _frozen(case, case.record.cuts.places(loss) or [lost])
    switches = dict.fromkeys(path for leaf in leaves if (path := case.record.switched(leaf)))
    lines = [line for path in switches for line in dict.fromkeys((path[0].line, path[-1].line))]
    names = _listed(_parameters(case, leaves)) or f"the parameters that {at(lost.line)} computes with"
    again = f"call requires_grad_(True) on them before {at(lost.line)}"
    before = _trained_here(case, leaves)
    fix = f"{again}: earlier passes of this line trained them." if before else ""
    ask = (
        f"what this loss should train. If it is {names}, {again}.\nIf they should stay frozen, compute the loss "
        "from something else that requires grad: a layer on\ntop of them, or their input (x.requires_grad_())."
    )
    return case.explanation(
        "frozen",
        _without_graph(variable),
        ("computed at", lost.line),
        ("frozen", names),
        *(("switched off", line) for line in lines[:NAMES_SHOWN]),
        ("failing call", case.line),
        variable=variable,
        created=lost.line,
        reason=CUTS["frozen"].reason,
        fixes=(fix,),
        unknown=("" if fix else ask,),
        certain=certain,
    )


def _parameters(case: FailedPass, leaves: Iterable[Tensor]) -> Iterator[str]:
    """Parameters by the names that their modules give them, not those of a loop over them."""
    for leaf in leaves:
        yield max(case.names.paths.get(id(leaf), [""]), key=lambda path: "." in path)


def _frozen(case: FailedPass, places: Iterable[Lost]) -> list[Tensor]:
    """The parameters that are frozen at some places; without a record those of the modules that the lines call."""
    if case.recorded is not None:
        leaves = [leaf for place in places if place.kind == "frozen" for leaf in case.record.cuts.leaves(place)]
        return [leaf for leaf in leaves if not leaf.requires_grad]
    values = [case.names.values.get(name) for place in places for name in _source.loaded(place.line)]
    return [leaf for value in values if isinstance(value, nn.Module) for leaf in value.parameters()]


def _fix(case: FailedPass, lost: Lost, beside: Sequence[Lost]) -> str:
    """What to do where a graph was cut; at each place, if it was cut in the same way at several; else nothing."""
    if any((other.kind, other.call) != (lost.kind, lost.call) for other in beside):
        return ""
    if lost.kind in OFF:
        blocks = {_switched_off(case, each.kind, each.line) for each in (lost, *beside)}
        return _recorded(case, lost) if len(blocks) == 1 else ""
    fix = fix_of(lost.kind, lost.line, lost.call)
    if not beside:
        return fix
    also = "".join(f"\nLikewise at {at(other.line)}." for other in beside)
    return f"where gradients should flow through the value, {fix}{also}"


OFF = {"no_grad": "torch.enable_grad()", "inference": "torch.inference_mode(False)"}
"""Kinds of cuts that hold for all lines of a block, and what lifts them."""


def _recorded(case: FailedPass, lost: Lost) -> str:
    """The lines between which gradients are to be on: a block that one line leaves is entered again by the next."""
    until = " on" if torch.is_grad_enabled() else f"\nto {at(case.line)}"
    block = "inference_mode" if lost.kind == "inference" else "no_grad"
    return (
        f"compute it outside the {block} block, or put `with {OFF[lost.kind]}:` around everything that\n"
        f"computes the loss, from {at(lost.line)}{until}."
    )


def _switched_off(case: FailedPass, kind: str, line: Line | None) -> Line | None:
    """The line that switched gradients off, if the user's source shows one."""
    if kind not in OFF or line is None or case.recorded is None:
        return None
    around = case.record.cuts.stack(Lost(kind, line, ""))
    return next((off for each in around if (off := _source.switched_off(each)) is not None), None)


def _which(case: FailedPass, beside: Sequence[Lost]) -> str:
    frozen = _frozen(case, beside)
    if frozen:
        return (
            f"what this pass should train: what was cut off, or {_listed(_parameters(case, frozen))}, which is frozen. "
            "Remove\nthe cut in the first case; in the second call requires_grad_(True) before "
            f"{at(next(each.line for each in beside if each.kind == 'frozen'))}."
        )
    several = "either" if len(beside) == 1 else "each"
    return (
        f"whether {several} is intended. What you train must reach the loss without a cut: if one cut stays, the\n"
        "program may run, but nothing behind that cut gets a gradient."
    )


def within_pass(case: FailedPass) -> Explanation | None:
    """A pass that failed while another ran: in a hook, or in a Function's backward."""
    tensor = next((each for each in case.tensors if not each.requires_grad), None)
    if case.line is None:
        return None
    if tensor is None:
        return _inputs_within(case)
    variable = case.names.of(tensor)
    line = _source.only_assignment(variable, case.line)
    return case.explanation(
        "inside a pass",
        _without_graph(variable),
        ("cut at", line),
        ("failing call", case.line),
        variable=variable,
        created=line,
        reason=CUTS["inside a pass"].reason,
        fixes=(fix_of("inside a pass", line, ""),),
        certain=True,
    )


def _inputs_within(case: FailedPass) -> Explanation | None:
    """Inputs of such a pass that it does not reach: a Function's backward gives None for those."""
    missing = [each for each in case.given if not each.requires_grad or _nodes.node_of(each) not in case.graph]
    if not missing:
        return None
    names = list(filter(None, _parameters(case, missing)))
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in missing[:NAMES_SHOWN])
    untracked = [each for each in missing if not each.requires_grad]
    fix = "pass allow_unused=True there: the gradient is then None, which a Function's backward may return."
    alone = (
        "pass only those that require grad, [p for p in inputs if p.requires_grad], and return None\nfor the others."
    )
    return case.explanation(
        "not used",
        f"not in the graph: {_listed(names) or f'tensors of shape {shapes}'}",
        ("failing call", case.line),
        variable=next(iter(names), ""),
        reason="a hook or a Function's backward asks for gradients of inputs, some of which "
        + ("do not require grad." if untracked else "are not part of what it differentiates."),
        fixes=(alone if untracked else fix,),
        certain=True,
    )


def not_scalar(case: FailedPass) -> Explanation | None:
    """The explanation of "grad can be implicitly created only for scalar outputs"."""
    loss = next((tensor for tensor in case.tensors if tensor.numel() != 1), None)
    if loss is None:
        return None
    variable = case.names.of(loss)
    line = case.record.made(loss.grad_fn) or _source.only_assignment(variable, case.line)
    name = variable or "the value"
    rows = [each for each in case.given if each.shape[:1] == loss.shape[:1]]
    fix = (
        f"differentiate {name}.sum(): each row of {case.names.of(rows[0]) or 'the input'} gets "
        "its own derivative, "
        f"where rows are independent\nsamples. {name}.mean() would give 1 / {loss.numel()} of that."
        if rows
        else f"differentiate {name}.mean() or {name}.sum(): the second gives gradients {loss.numel()} times as large."
    )
    return case.explanation(
        "not scalar",
        f"`{variable}` has shape {tuple(loss.shape)}" if variable else f"the loss has shape {tuple(loss.shape)}",
        ("computed at", line),
        ("failing call", case.line),
        variable=variable,
        created=line,
        reason="a gradient is defined for one number, and this tensor holds several.",
        fixes=(
            fix,
            "take each element's gradient with hodiff.jacobian." if case.name == "autograd.grad" else "",
        ),
        certain=True,
    )


def _ask(case: FailedPass, kind: str, line: Line | None, made: Line | None) -> str:
    if kind == "no graph":
        given = _source.loaded(made) if made is not None else []
        values = {name: case.names.values.get(name) for name in given}
        trained = [name for name, each in values.items() if _requires_grad(each)]
        if trained and made is not None:
            hint = "" if case.recorded is not None else "\nUnder `hodiff explain` most cuts are recorded."
            return f"where it was cut off. `{trained[0]}`, which {at(made)} reads, requires grad.{hint}"
        tensors = {name: each for name, each in values.items() if isinstance(each, Tensor) and each.is_floating_point()}
        if tensors:
            listed = " and ".join(f"`{name}`" for name in tensors)
            return f"what it should depend on. It was computed from {listed}, without requires_grad."
        return "what it should depend on: look for an input without requires_grad; hodiff.graph.inspect shows graphs."
    there = f" at {line}" if line is not None else ""
    hint = "" if case.recorded is not None else " Under `hodiff explain` most cuts are recorded."
    return f"whether that cut{there} is the cause.{hint}"


def _requires_grad(value: object) -> bool:
    """Whether a tensor requires grad, or a parameter of a module."""
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, Tensor) and value.requires_grad


def _likely(case: FailedPass, tensor: Tensor, variable: str) -> Lost | None:
    """Where a tensor may have lost its graph: as a number, or as its source says; a record would show another cut."""
    if case.recorded is not None:
        return case.record.cuts.latest
    name = variable or _source.target_of(case.line) if case.line is not None else variable
    cuts = _source.cuts(name, case.line, case.names.values) if name and case.line is not None else []
    if cuts:
        return Lost(cuts[0][1], cuts[0][0], "")
    made = _source.only_assignment(name, case.line)
    modules = [case.names.values.get(each) for each in _source.loaded(made)] if made is not None else []
    parameters = [leaf for module in modules if isinstance(module, nn.Module) for leaf in module.parameters()]
    frozen = bool(parameters) and not any(leaf.requires_grad for leaf in parameters)
    return Lost("frozen", made, "") if frozen and made is not None else None


def _silenced(line: Line | None) -> str:
    """What the gradient no longer reaches: the names in the cut line."""
    names = re.findall(r"([A-Za-z_][\w.]*?)\.(?:detach_?\(|data\b)", line.text if line is not None else "")
    return f"  no gradient reaches: {', '.join(dict.fromkeys(names))}" if names else ""


def _input_without_grad(case: FailedPass) -> Explanation | None:
    """An input that no graph leads to, as it required no grad when the loss was computed."""
    missing = [tensor for tensor in case.given if not tensor.requires_grad]
    if not missing:
        return None
    among = len(missing) < len(case.given)
    variable = case.names.of(missing[0])
    name = variable or "input"
    lost = case.record.cuts.of(missing[0])
    if lost is not None and lost.kind in ("gradient", "opaque gradient", "constant gradient"):
        return _by_gradient(case, name, lost)
    leave = "pass only the inputs that require grad, [p for p in inputs if p.requires_grad], and update only those."
    ask = f"call {name}.requires_grad_() before the computation, or give hodiff the function: hodiff.grad(f, x)."
    frozen = (
        f"do you want a gradient of `{name}`? Other inputs require grad, and it may have been\n"
        f"frozen on purpose. If so, {ask}"
    )
    return case.explanation(
        "no graph",
        f"the input `{name}` does not require grad, so no graph leads to it",
        ("nor does", _listed(map(case.names.of, missing[1:]))),
        ("failing call", case.line),
        variable=variable,
        reason="it was not tracked when the loss was computed.",
        fixes=(leave if among else ask,),
        unknown=(frozen if among else "",),
    )


def _by_gradient(case: FailedPass, name: str, lost: Lost) -> Explanation:
    """The explanation of a gradient among the inputs: nothing was computed from it."""
    of = ", ".join(f"`{each}`" for each in map(case.names.of, case.tensors) if each) or "what is differentiated"
    return case.explanation(
        CUTS[lost.kind].cause or lost.kind,
        f"the input `{name}` is a gradient, and {of} was not computed from it",
        ("taken at", lost.line),
        ("failing call", case.line),
        variable=name,
        created=lost.line,
        reason="it has no graph, and nothing that was computed before it can depend on it.",
        unknown=(
            f"which derivative you want. For a second one, take `{name}` with create_graph=True,\n"
            f"and differentiate what is computed from `{name}` with respect to the same variables as before;\n"
            "hodiff.hessian(f, x) and "
            "hodiff.hvp(f, x, v) do both.",
        ),
        certain=True,
    )


def _listed(names: Iterable[str]) -> str:
    """Some names for a sentence; those that were found."""
    quoted_names = [f"`{name}`" for name in names if name]
    return ", ".join(quoted_names[:NAMES_SHOWN]) + (" ..." if len(quoted_names) > NAMES_SHOWN else "")


def not_used(case: FailedPass) -> Explanation | None:
    """The explanation of "One of the differentiated Tensors appears to not have been used in the graph"."""
    missing = [tensor for tensor in case.given if _nodes.node_of(tensor) not in case.graph]
    if not missing:
        return None
    names = [case.names.of(tensor) or f"a tensor of shape {tuple(tensor.shape)}" for tensor in missing]
    there = sorted(case.names.of(leaf) for node in case.graph if (leaf := _saved.leaf(node)) is not None)
    among = _listed(filter(None, there)).removesuffix(" ...")
    loss = case.record.made(case.roots[0]) if case.roots else None
    known = _why_not_used(case, missing[0], names[0])
    if known is not None:
        return known
    since = _made(case, missing[0])
    made = [(f"`{names[0]}`", since), ("the loss", loss)]
    leave = (
        f"if the loss does not depend on {names[0]}, leave it out of the inputs; or pass allow_unused=True: its\n"
        "gradient is then None, and the update must skip it."
    )
    depends = (
        f"should the loss depend on `{names[0]}`? If so, compute it from that very tensor: what a view,\nan index, "
        ".to() or detach() makes after the loss, or beside it, is another one"
        + (f"; what was computed before\n{at(since)} is a constant." if missing[0].is_leaf and since else ".")
    )
    return case.explanation(
        "not used",
        f"not in the graph: {_listed(names)}",
        f"  in the graph: {among}" if among else "",
        *(f"  {what} made {quoted(line)}" for what, line in made if line is not None),
        ("failing call", case.line),
        variable=names[0],
        reason="the loss was computed without it: from another tensor of that name, a copy, or a detached one.",
        fixes=(leave if len(missing) < len(case.given) else "",),
        unknown=(depends,),
        certain=True,
    )


def _why_not_used(case: FailedPass, tensor: Tensor, name: str) -> Explanation | None:
    """The explanation of an input that was cut off, or made too late, or is that of a line."""
    taken = _taken_by(case, name)
    function = None if taken is None else case.record.functions.get(taken)
    if function is not None:
        return _unused(
            case,
            CUTS["opaque gradient"].cause,
            name,
            ("gradient at", taken),
            f"that gradient was taken through {function}, whose backward recorded nothing that leads to `{name}`.",
            fixes=(fix_of("opaque gradient", None, function),),
        )
    cut = _cut_off(case, tensor)
    if cut is not None:
        return _used_cut(case, name, cut)
    if taken is not None:
        return _unused(
            case,
            "constant gradient",
            name,
            ("gradient at", taken),
            f"that gradient does not depend on `{name}`: what was differentiated there is linear in it.",
            fixes=(
                "the derivative is zero: pass allow_unused=True, materialize_grads=True, "
                "which gives zeros;\n"
                "hodiff.hvp, hodiff.hessian and hodiff.nth_derivative return them.",
            ),
        )
    written = _made_by(case, tensor)
    if not written:
        return None
    return _unused(
        case,
        "not used",
        written,
        ("made at", case.line),
        "it was made after the loss, which cannot depend on it.",
        unknown=(
            f"which derivative you want. One with respect to `{written}` needs a loss that was computed\n"
            f"from it: before, write y = {written}, and compute the loss from y.\n"
            "Otherwise differentiate with respect to what it is made of.",
        ),
    )


def _unused(
    case: FailedPass, cause: str, name: str, made: tuple[str, Line | None], reason: str, **advice: tuple[str, ...]
) -> Explanation:
    """The explanation of an input that no graph leads to, whose cause is known."""
    return case.explanation(
        cause,
        f"not in the graph: `{name}`",
        made,
        ("failing call", case.line),
        variable=name,
        created=made[1],
        reason=reason,
        certain=True,
        **advice,
    )


def _taken_by(case: FailedPass, name: str) -> Line | None:
    """The line of a gradient with a graph, by a variable, that the loss was computed from."""
    built = {call.stack[0] for call in case.record.passes if call.built and call.path}
    lines = dict.fromkeys(map(case.record.made, case.graph))
    taken = [line for line in lines if line is not None and line in built]
    return next((line for line in taken if name in _source.inputs_of(line)), None)


def _made_by(case: FailedPass, tensor: Tensor) -> str:
    """How the failing call makes an input itself, too late for the loss: `-x`; or empty."""
    here = case.record.made(tensor.grad_fn)
    written = _source.inputs_of(here) if here is not None and here == case.line else []
    return next((text for each, text in zip(case.given, written, strict=False) if each is tensor), "")


def _cut_off(case: FailedPass, leaf: Tensor) -> Lost | None:
    """Where a leaf was cut off on its way to the loss."""
    cuts = case.record.entering(case.graph)
    return next((cut for cut in cuts if any(each is leaf for each in case.record.cuts.leaves(cut))), None)


def _used_cut(case: FailedPass, name: str, cut: Lost) -> Explanation:
    """The explanation of an input that enters the loss by a way that was cut alone."""
    return _unused(
        case,
        "not used",
        name,
        ("cut at", cut.line),
        CUTS[cut.kind].reason,
        unknown=(
            f"should the loss depend on `{name}`? If so, {fix_of(cut.kind, cut.line, cut.call)}\n"
            f"If not (an index, a mask, a target), leave `{name}` out of the inputs, or pass allow_unused=True.",
        ),
    )


def _made(case: FailedPass, tensor: Tensor) -> Line | None:
    """The line that made a tensor, or that said of a leaf that it requires grad."""
    path = case.record.path(tensor.grad_fn) if tensor.grad_fn is not None else case.record.switched(tensor)
    return path[0].line if path else None


NAMES_SHOWN = 6


# --- derivatives that a pass cannot give: second ones that PyTorch lacks, and checkpoints that compute otherwise ------


def second_derivative(case: FailedPass) -> Explanation | None:
    """The explanation of a missing or forbidden double backward."""
    kind = _messages.kind_of(case.error)
    compiled = kind == "compiled"
    once = list(case.record.once) if kind == "once" else []
    marked = sorted({type(node).__name__ for node in case.graph if _saved.is_raising(node)})
    operation = "a compiled function" if compiled else [*(name for name, _ in once), *marked, "an operation"][0]
    operation = _messages.without_derivative(case.error) or operation
    line = once[0][1] if once else _line(case, [*case.graph, *_nodes.walk(case.names.nodes)], operation, compiled)
    way = _messages.way_out("compiledfunction" if compiled else operation)
    where = f"at {line}: " if line is not None else ""
    forbidden = f"a second derivative of {operation}: its backward forbids one. Write it without the Function."
    without = f"what to use instead of {operation}: hodiff.hvp(f, x, v) finds a substitute, or names one."
    unknown = forbidden if kind == "once" else without
    return case.explanation(
        "no second derivative",
        f"no second derivative: {operation}",
        ("recorded at", line),
        ("failing call", case.line),
        created=line,
        reason="PyTorch can differentiate it only once.",
        fixes=(f"{where}{way.instead}." if way is not None else "",),
        unknown=(unknown if way is None else "",),
    )


def _line(case: FailedPass, nodes: list[Node], operation: str, compiled: bool) -> Line | None:
    """The line of the operation: its forward node is in the graph still."""
    if case.recorded is None:
        return None
    key = operation.replace("_", "").lower().removesuffix("backward")
    lines = []
    for node in nodes:
        name = type(node).__name__.lower().removesuffix("backward0").removesuffix("backward")
        if (compiled and "compiled" in name) or (key and name == key):
            line = (_of_compiled(case, node) if compiled else case.record.made(node)) or _assigned(case, node)
            lines += [(_saved.sequence(node), line)] if line is not None else []
    if lines:  # the first is of the forward; those that a pass made come later
        return min(lines)[1]
    made = [case.record.made(node) for node in nodes if _saved.is_raising(node)]
    return next((line for line in made if line is not None), None)


def _of_compiled(case: FailedPass, node: Node) -> Line | None:
    """The line of a compiled call, which no watch sees: where what its pass differentiates was assigned, if once."""
    made = case.record.made(node)
    return (_source.only_assignment(_source.target_of(made), made) or made) if made is not None else None


def _assigned(case: FailedPass, node: Node) -> Line | None:
    """Where the variable that holds a node's output is assigned, if that is one place."""
    variable = case.names.nodes.get(node, "")
    return next(filter(None, (_source.only_assignment(variable, line_of(frame)) for frame in case.frames)), None)


def reentrant(case: FailedPass) -> Explanation:
    """The explanation of a pass by inputs through a checkpoint that serves `backward()` alone."""
    name = "CheckpointFunction"
    line = _line(case, list(case.graph), name, compiled=False)
    above = [
        node for node in case.graph if any(type(child).__name__.startswith(name) for child in _saved.children(node))
    ]
    read = next(filter(None, map(case.record.made, above)), None) if line is None else None
    return case.explanation(
        "checkpoint",
        "a re-entrant checkpoint has no gradients with respect to inputs",
        ("computed at", line),
        ("read at", read),
        ("failing call", case.line),
        created=line or read,
        reason="it runs its function again during the pass, and does not know which inputs were asked for.",
        fixes=(CUTS["checkpoint"].fix,),
    )


def recomputed(case: FailedPass) -> Explanation | None:
    """The explanation of a checkpoint whose second forward was not like the first."""
    several = _messages.kind_of(case.error) == "recomputed in number"
    what = "more or fewer tensors" if several else "tensors of another shape, dtype or device"
    outer, changes = _checkpointed(case)
    return case.explanation(
        "recomputed otherwise",
        "a checkpointed function computes something different the second time",
        ("at", outer),
        *(("it changes", line) for line in changes[:CHANGES_SHOWN]),
        ("failing call", case.call or case.line),
        created=outer,
        reason=f"the checkpoint ran its function again, in the pass, and it recorded {what} than in the forward.",
        unknown=(
            "what differs. It reads something that changed in between: a cache or a counter that its first run\n"
            "filled, autocast or no_grad that are on in one run only, the global random state. To see the\n"
            "operation, put `with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):` around the step.",
        ),
    )


def _checkpointed(case: FailedPass) -> tuple[Line | None, list[Line]]:
    """The line of the checkpoint, and those within it that leave something in an object for the second run to meet."""
    changes: dict[Line, None] = {}
    outer: Line | None = None
    for node in case.graph:
        lines = lines_of(case.record.path(node))
        index = next((number for number, line in enumerate(lines) if _source.calls(line, "checkpoint")), None)
        if index is not None:
            outer = lines[index]
            for line in lines[:index]:
                changes.update(dict.fromkeys(_source.kept_at(line)))
    return outer, sorted(changes)


CHANGES_SHOWN = 4


def unpacked_twice(case: FailedPass, line: Line | None) -> Explanation | None:
    """The explanation of a Function that reads what it saved twice, under a checkpoint."""
    return case.explanation(
        "recomputed otherwise",
        "`ctx.saved_tensors` was read twice",
        ("at", line),
        ("failing call", case.call or case.line),
        variable="ctx.saved_tensors",
        created=line,
        reason="a checkpoint computes each saved tensor again for one reading, and something read one twice.",
        fixes=("read ctx.saved_tensors once in a backward, into a variable, and use that.",),
        certain=True,
    )
