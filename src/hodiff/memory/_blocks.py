"""Blocks that keep what enters them and no more: each derivative runs them again.

A block is a part of a function: tensors in, tensors out. Its gradient, for a cotangent, is a
function of tensors as well, of what entered and of the cotangent; and so is the gradient of that.
So each derivative of a block is a block: what it needs is made when it is asked for, and gone when
it has been given. (An activation checkpoint of PyTorch runs again in the first pass, and the graph
of that pass holds what it made: it saves nothing in a second one.)
"""

from __future__ import annotations

import difflib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as _checkpoint

from hodiff._core import (
    _call,
    _hooks,
    _kernels,
    _messages,
    _needed,
    _nodes,
    _refusals,
    _reverse,
    _settings,
    _tree,
    _versions,
)
from hodiff._core._arguments import as_called, kind, outside
from hodiff._core._graph import OutputGraph
from hodiff._core._settings import Counted, RandomState, Scope, Undo
from hodiff._core._where import Where
from hodiff.errors import GraphError, HodiffWarning, InputError
from hodiff.memory import _chunked

Tensors = Sequence[Tensor]
Values = Sequence[Tensor | None]

# --- a block, and its derivatives -----------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class BlockForm:
    """The block itself.

    Attributes:
        run: Runs it again, at arguments; what it reads beside them is as it was.
        arguments: How many of its tensors are arguments; the rest it reads by itself.
        first: Its results, until they have been given.
        names: The classes of the nodes of its graph.
        refused: What is to be said of an operation through which a derivative is not right.
        recorded: Whether a pass must be recorded to be right, though its result is detached.
        order: The highest derivative that is taken.
    """

    run: Callable[..., Tensors]
    arguments: int
    first: list[Tensors]
    names: frozenset[str]
    refused: GraphError | None
    recorded: bool
    order: int

    def record(self, tensors: Tensors) -> tuple[list[Tensor], Values]:
        """Run it at leaves."""
        leaves = [x.detach().requires_grad_() for x in tensors[: self.arguments]]
        return [*leaves, *tensors[self.arguments :]], self.run(*leaves)

    def values(self, tensors: Tensors) -> Values:
        """The results of the first run."""
        return self.first.pop()


@final
@dataclass(frozen=True, eq=False)
class Pullback:
    """The gradient of a form, of what that takes and of cotangents for some of its results."""

    form: BlockForm | Pullback
    count: int
    given: Sequence[int]

    names = property(attrgetter("form.names"))
    refused = property(attrgetter("form.refused"))
    recorded = property(attrgetter("form.recorded"))
    order = property(attrgetter("form.order"))

    def record(self, tensors: Tensors) -> tuple[list[Tensor], Values]:
        """The gradient in its graph: linear functions give zeros, for cotangents vary too."""
        variables, results = self.form.record(tensors[: self.count])
        cotangents = [x.detach().requires_grad_() for x in tensors[self.count :]]
        return [*variables, *cotangents], self._pass(variables, results, cotangents, build=True)

    def values(self, tensors: Tensors) -> Values:
        """The gradient, without its graph."""
        with _settings.grad_mode(True):
            variables, results = self.form.record(tensors[: self.count])
        gradients = self._pass(variables, results, tensors[self.count :], build=False)
        return [_dense(g, x) for g, x in zip(gradients, variables, strict=True)]

    def _pass(
        self, inputs: Tensors, results: Values, cotangents: Tensors, *, build: bool
    ) -> Values:
        pairs = zip((results[n] for n in self.given), cotangents, strict=True)
        live = [(y, u) for y, u in pairs if y is not None and y.requires_grad]
        if not live:
            return [None] * len(inputs)
        outputs, given = zip(*live, strict=True)
        options: Any = {"keep": build, "build": build, "recorded": self.recorded}
        gradients = _reverse.vjp_between(outputs, inputs, given, **options)
        if len(live) == len(results) and isinstance(self.form, BlockForm):
            read = [*zip(inputs, gradients, strict=True)][self.form.arguments :]
            _check_reads([x for x, gradient in read if gradient is None], outputs)
        if build:
            made = [g for g in gradients if g is not None and g.requires_grad]
            _reverse.search_block(outputs, made, inputs, self.order)
        return gradients


def _check_reads(without: Tensors, outputs: Tensors) -> None:
    """Raise where the graph of the results lacks a tensor that was in that of the first run."""
    if without and not all(map(_nodes.survey(outputs).contains, without)):
        raise GraphError(
            "a block that runs again (checkpoint=) does not read what its first run read: a module "
            "of it holds its parameters in another place as well, "
            "such as a list or weak references. "
            "Read them as attributes of the module, or leave checkpoint= out."
        )


def _dense(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    """A gradient in the layout of its tensor (an embedding may give a sparse one)."""
    if gradient is None or (gradient.layout is like.layout and not gradient._is_zerotensor()):
        return gradient
    return gradient.to_dense().clone()


@final
class BlockFunction(_chunked.Chunked):
    """A function that computes a form, whose gradient is a block."""

    @staticmethod
    def forward(*given: Any) -> Any:
        """The values, each a tensor of its own: two of one have one place in the graph."""
        *tensors, form = given
        return tuple(None if x is None else x.detach() for x in form.values(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep what entered, until a pass that frees."""
        *tensors, ctx.form = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """The gradient, by a block."""
        tensors = ctx.saved_tensors
        given = [number for number, u in enumerate(cotangents) if u is not None]
        form = Pullback(ctx.form, len(tensors), given)
        return (*BlockFunction.apply(*tensors, *(cotangents[n] for n in given), form), None)


_needed.check("checkpoint=")
_nodes.HIDING.append(BlockFunction._backward_cls)  # pyright: ignore[reportAttributeAccessIssue]

# --- a block of the user's: what it reads, and how it runs again ----------------------------------


class _Met(threading.local):
    """The blocks that are met in this thread: the last ones, each in a list of its own."""

    def __init__(self) -> None:
        self.open: list[list[Any]] = [[None]]


_met = _Met()


def meets(blocks: Any) -> bool:
    """Whether this thread runs the function of these blocks, and none of them."""
    return _met.open[-1][0] is blocks


_INSIDE = object()
"""Met inside of a block is a part of it."""


def _within(blocks: Any, undo: Undo) -> None:
    # where an interrupt makes this end late, that takes off nothing of others
    own, among = [blocks], _met.open
    undo += [lambda: among.__setitem__(slice(None), [each for each in among if each is not own])]
    among.append(own)
    watch_calls.enter(undo)


class BlockRun:
    """A block as it was met, to run again: with its precision, its random numbers, its constants.

    Attributes:
        arguments: Where among what it was given the tensors are that vary.
        places: Where among its results.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._function = function
        self._items, _, self._tree = _tree.flatten((tuple(args), dict(kwargs)))
        self.arguments = [n for n, x in enumerate(self._items) if _varies(x)]
        self.places: list[int] = []
        self._shapes: list[torch.Size] = []
        self._prints: list[Tensor] = []
        device = _call.state.running[-1].random.device
        self._random, self._autocast = RandomState(device), _settings.autocast_now(device.type)
        plain = [x for x in self._items if isinstance(x, Tensor) and not x.is_inference()]
        self._constants = [(x, x._version) for x in plain]
        self._begun = _nodes.age()
        self._inner: list[Tensor] = []
        self._looked = False

    def first(self) -> tuple[Any, list[Tensor], list[Tensor], str]:
        """The results of the first run, its arguments, their stand-ins, and why it cannot run
        again.

        It is given views: what it reads of the same tensors past its arguments is another path.
        """
        arguments = [self._items[n] for n in self.arguments]
        views = [x.view_as(x) for x in arguments] if torch.is_grad_enabled() else arguments
        for n in self.arguments:  # the graph holds them, until they are not needed
            self._items[n] = None
        value = self._run(views, check=True)
        why = CHANGES if self._changed() else ""
        self._constants = [(x, version) for x, version in self._constants if not x.requires_grad]
        return value, arguments, views, why

    def _run(self, arguments: Tensors, *, check: bool = False) -> Any:
        items = _chunked.placed(self.arguments, arguments, self._items)
        args, kwargs = _tree.rebuild(self._tree, iter(items))
        with Scope(partial(_within, _INSIDE)):
            value = self._function(*args, **kwargs)
        if check and [*map(id, _tree.flatten((args, kwargs))[0])] != [*map(id, items)]:
            raise GraphError(
                "a block that runs again (checkpoint=) changes a list or a dict that it is given. "
                "Return the result instead, or leave checkpoint= out."
            )
        return value

    def again(self, *arguments: Tensor) -> list[Tensor]:
        """The results of another run."""
        if self._changed():
            raise GraphError(
                "a block that runs again (checkpoint=) was given a tensor that has been changed in "
                "place since. In f, change a copy instead."
            )
        looks = not self._looked and torch.is_grad_enabled()
        begun, self._looked = _nodes.age() if looks else 0, self._looked or looks
        with self._autocast(), self._random.replayed():
            value = self._run(arguments)
        items = _tree.flatten(value)[0]
        results = [items[n] for n in self.places if n < len(items) and isinstance(items[n], Tensor)]
        same = [x.shape for x in results] == self._shapes
        if looks and any(map(_varies, results)):  # of the first run, which an object may have kept
            same = (
                same
                and _nodes.made_since(begun, results, [*arguments, *self._inner])[1] is not None
            )
        if not same or not all(map(_alike, results, self._prints)):
            raise GraphError(
                "a block that runs again (checkpoint=) computes something different from its first "
                "run: it reads what has changed since (a counter, a cache, its own generator, "
                "NumPy's random numbers). Pass that as an argument, or leave checkpoint= out. "
                "(Models of transformers fill a cache unless they are called with use_cache=False.)"
            )
        return results

    def returns(self, items: Sequence[Any], arguments: Tensors) -> list[Tensor]:
        """The results that vary, once each, but views of arguments: these keep nothing."""
        theirs, at = {*map(_tree.memory_of, arguments)} - {0}, dict[int, int]()
        for n, x in enumerate(items):
            if _varies(x) and _tree.memory_of(x) not in theirs:
                at.setdefault(id(x), n)
        self.places = [*at.values()]
        outputs = [items[n] for n in self.places]
        self._shapes = [x.shape for x in outputs]
        self._prints = [*map(_print, outputs)]
        return outputs

    def reads(
        self, outputs: Tensors, arguments: Tensors, views: Tensors
    ) -> tuple[_nodes.Survey, list[Tensor], str]:
        """The run's graph; the tensors that it reads beside its arguments;
        why it cannot run again.
        """
        known = [x for context in _call.state.running for x in context.stand_ins()]
        known = [*views, *arguments, *known, *_captured(self._function)]
        graph, begins = _nodes.made_since(self._begun, outputs, known)
        theirs = set(map(id, views))
        read = [x for x in begins or () if id(x) not in theirs]
        self._inner = inner = [x for x in read if x.grad_fn is not None]
        pairs = [(x, y) for x in inner for y in read if y is not x]
        if begins is None or any(_nodes.below(x).contains(y) for x, y in pairs):
            return graph, read, READS
        own, theirs = [*map(_tree.memory_of, outputs)], {*map(_tree.memory_of, read)}
        shared = any(memory and (own.count(memory) > 1 or memory in theirs) for memory in own)
        return graph, read, SHARES if shared else ""

    def _changed(self) -> bool:
        return any(x._version != version for x, version in self._constants)


def _print(x: Tensor) -> Tensor:
    """A fingerprint of a tensor: a sum of its entries by weights of their places, and how far it
    may be off.

    No two places have one weight, so that entries, or rows, that have changed places are seen.
    """
    wide, eps = torch.promote_types(x.dtype, torch.float32), torch.finfo(x.dtype).eps
    rows = x.detach().to(wide).reshape(-1, x.shape[-1] if x.ndim and x.numel() else 1)
    weights = [torch.arange(1, n + 1, device=x.device).to(wide).cos() for n in rows.shape]
    slack = torch.maximum(
        eps**0.5 * rows.square().sum().sqrt().abs(), min(64 * eps, eps**0.5) * rows.abs().sum()
    )
    return torch.stack([slack, weights[0] @ (rows @ weights[1])])


def _alike(x: Tensor, sums: Tensor) -> bool:
    """Whether a tensor is the one of these sums,
    up to what kernels may differ in from run to run.
    """
    if _versions.is_wrapped(x) or x.is_complex():
        return True
    return bool((_print(x)[1] - sums[1]).abs() <= sums[0]) or not bool(sums.isfinite().all())


CHANGES = "it changes an argument in place (write x = x + y for x += y)"
READS = "it reads a tensor that is computed outside it (pass that as an argument)"
SHARES = "it returns part of its input, or two tensors that share memory (return a copy)"


def _varies(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _captured(function: Any) -> Iterator[Tensor]:
    """The tensors that a function has beside its arguments."""
    while isinstance(function, partial):
        yield from filter(_varies, (*function.args, *function.keywords.values()))
        function = function.func
    yield from filter(_varies, getattr(function, "__defaults__", None) or ())
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # it is empty
            if _varies(cell.cell_contents):
                yield cell.cell_contents


# --- a function whose blocks are met while it runs ------------------------------------------------


_checkpointed: Any = vars(_checkpoint)["checkpoint"].__wrapped__
_CALLED = "__dynamo_disable"
"""By this attribute of what it wraps, `checkpoint` looks up at each call what to do."""
_OPTIONS = frozenset(
    (
        "use_reentrant",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "preserve_rng_state",
        "respect_saved_tensors_hooks",
    )
)


def _watch(undo: Undo) -> None:
    """Let `torch.utils.checkpoint.checkpoint`, by whatever name, meet blocks of ours."""
    attributes = vars(_checkpointed)
    theirs = attributes.get(_CALLED)

    def called(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        blocks = _met.open[-1][0]
        if blocks is None or function is None or "context_fn" in kwargs:
            with Scope(partial(_within, None)):
                return (theirs or _checkpointed)(function, *args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        return function(*args, **rest) if blocks is _INSIDE else blocks.run(function, args, rest)

    def restore() -> None:
        if attributes.get(_CALLED) is called:
            attributes.pop(_CALLED)
            attributes.update({} if theirs is None else {_CALLED: theirs})

    undo += [restore]
    attributes[_CALLED] = called


watch_calls = Counted(_watch)


class Blocks:
    """A function of the user's; while it runs, its blocks keep only what enters them.

    Attributes:
        named: The modules that are blocks, with their names; none, where checkpoints are.
        met: How many blocks have run.
        needed: Whether one has to.
    """

    needed = True

    def __init__(
        self, f: Callable[..., Any], checkpoint: bool | str, named: dict[nn.Module, str]
    ) -> None:
        self.__wrapped__ = f
        self.checkpoint, self.named = checkpoint, named

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function, block by block."""
        self.met = 0
        with Scope(self._watch):
            result = self.__wrapped__(*args, **kwargs)
        if self.needed and not self.met:
            names = ", ".join([*self.named.values()][:4])
            raise InputError(
                f"checkpoint={self.checkpoint!r}: f calls none of the modules {names}. Name "
                f"modules that f calls, one after the other."
                if self.named
                else "checkpoint=True: f calls torch.utils.checkpoint.checkpoint nowhere (a model "
                "may "
                "call it in train() mode alone). Name the modules that are its blocks: "
                'checkpoint="layers.*".'
            )
        return result

    def tangents(self, graph: OutputGraph) -> Tangents:
        """J v of the function, of which this is an evaluation."""
        return Tangents(graph)

    def inside(self) -> Callable[..., Any]:
        """The function without blocks, for an evaluation that records nothing."""
        return self.__wrapped__

    def _watch(self, undo: Undo) -> None:
        _within(self, undo)
        for part in [part for module in self.named for part in module.modules()]:
            _hooks.lend_module(part, ())  # and no other thread has it
        for module in self.named:
            attributes, name = module.__dict__, "_compiled_call_impl"
            before = {name: attributes[name]} if name in attributes else {}
            undo += [partial(attributes.update, before), partial(attributes.pop, name, None)]
            attributes[name] = partial(self._call, module)

    def _call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not meets(self):  # inside of a block, or in another thread
            return module._call_impl(*args, **kwargs)
        return self.run(module._call_impl, args, kwargs, self.named[module])

    def run(self, function: Any, args: Any, kwargs: Any, name: str = "") -> Any:
        """The results of a block, in a graph that keeps what enters it; in its own,
        where it must.
        """
        self.met += 1
        run, context = BlockRun(function, args, kwargs), _call.state.running[-1]
        again = _kernels.repeatable(context.repeatable(run.again))
        value, arguments, views, why = run.first()
        items, _, tree = _tree.flatten(value)
        theirs = dict(zip(map(id, views), arguments, strict=True))
        items = [theirs.get(id(x), x) for x in items]
        value = _tree.rebuild(tree, iter(items))
        outputs = run.returns(items, arguments)
        plain = all(type(x) in _chunked.PLAIN for x in [*arguments, *outputs])
        if not outputs or not plain or _call.is_followed():  # by forward mode, say
            return value
        graph, read, other = run.reads(outputs, arguments, views)
        if why or other:
            name = name or getattr(function, "__qualname__", "a function")
            text = f"checkpoint=: the block {name} keeps its whole graph, for {why or other}."
            warnings.warn(text, HodiffWarning, stacklevel=outside())
            return value
        tensors = [*arguments, *read]
        told = _refusals.of_a_block(graph, tensors, context)  # by one look at the graph
        form = BlockForm(again, len(arguments), [outputs], *told, context.call.order)
        made = dict(zip(map(id, outputs), BlockFunction.apply(*tensors, form), strict=True))
        return _tree.rebuild(tree, iter([made.get(id(x), x) for x in items]))


def in_blocks(f: Any, where: Where, checkpoint: Any) -> Any:
    """A function whose blocks keep only what enters them, as `checkpoint=` says.

    True: those that it checkpoints itself. A pattern: modules of the point, or of `f`, by name.
    """
    if checkpoint is False:
        return f
    if _needed.RELEASE < (2, 13):  # blocks that run again lose their graphs there
        raise InputError(
            f"checkpoint= needs PyTorch 2.13 or newer; this is {torch.__version__}. Leave it out."
        )
    if isinstance(f, Tensor):
        raise InputError(
            "checkpoint: f is a tensor, whose graph already exists. Give the function."
        )
    if checkpoint is True:
        return Blocks(f, True, {})
    if not isinstance(checkpoint, str):
        raise InputError(
            f'checkpoint: got {kind(checkpoint)}, expected True, False, or names: "layers.*".'
        )
    f = as_called(f)
    roots = [as_called(each.module) for each in where.module_slices]
    roots += [f] if isinstance(f, nn.Module) else []
    modules = {name: part for root in roots for name, part in root.named_modules() if name}
    named = {part: name for name, part in modules.items() if fnmatchcase(name, checkpoint)}
    lists = [part for part in named if isinstance(part, (nn.ModuleList, nn.ModuleDict))]
    for each in lists:  # which is never called; its items are
        named |= {part: f"{named[each]}.{name}" for name, part in each.named_children()}
        del named[each]
    if not named:
        near = difflib.get_close_matches(checkpoint.rstrip(".*"), modules, n=3, cutoff=0.4)
        way_out = "Give the model as the point, or checkpoint=True"
        if modules:
            way_out = f"Its modules: {', '.join(near or [*modules][:4])}"
        raise InputError(f"checkpoint={checkpoint!r} matches no module of {where.name}. {way_out}.")
    return Blocks(f, checkpoint, named)


# --- J v without a graph: PyTorch's forward mode, in an evaluation of its own ---------------------


class _NoTangents(TorchFunctionMode):
    """A context without forward mode: without grad mode PyTorch goes on with it,
    where f means a constant.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call it, without grad mode at the values alone."""
        if not torch.is_grad_enabled() and _versions.forward_mode_on():
            args, kwargs = _tree.tree_map(_value, args), _tree.tree_map(_value, kwargs or {})
        result = func(*args, **(kwargs or {}))
        return _without_padding(result, *args, **(kwargs or {})) if func is F.embedding else result


def _without_padding(
    result: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *rest: Any,
    **given: Any,
) -> Tensor:
    """Rows of an embedding, of which that of the padding is a constant, as in reverse mode."""
    value, tangent = forward_ad.unpack_dual(result)
    if padding_idx is None or tangent is None:
        return result
    varies = (input != padding_idx % len(weight)).unsqueeze(-1)
    return forward_ad.make_dual(value, tangent * varies)


def _value(x: Any) -> Any:
    if isinstance(x, Tensor) and _call.carries_tangent(x):
        return forward_ad.unpack_dual(x).primal
    return x


class Tangents:
    """J v of a function that has been evaluated in blocks, as often as it is asked for.

    It keeps no graph of its own. It is made while the evaluation runs.
    """

    def __init__(self, graph: OutputGraph) -> None:
        context = graph.context
        self._graph, self._random = graph.kept(), context.random
        self._autocast = _settings.autocast_now(graph.leaves[0].device.type)
        # What f differentiates itself, forward mode takes for something else.
        self._forward = context.by_hand is None and not (context.nests or context.forward_mode)

    def along(self, vectors: Sequence[Tensor | None], outputs: Tensors) -> list[Tensor]:
        """J v, for a vector like each leaf; None is zero."""
        if self._forward and not _call.tangents():
            try:
                return self._pushed(vectors, outputs)
            except RuntimeError as error:
                if _messages.kind_of(error) != "no forward mode":
                    raise
                self._forward = False
        pairs = zip(self._graph.leaves, vectors, strict=True)
        whole = [torch.zeros_like(leaf) if v is None else v for leaf, v in pairs]
        return _reverse.jvp(self._graph, [*outputs], whole, None, chunk_size=None)

    def _pushed(self, vectors: Sequence[Tensor | None], first: Tensors) -> list[Tensor]:
        # Checkpoints, which forward mode needs none of (and re-entrant ones do not know), are
        # entered as they are.
        with (
            self._graph.resumed() as context,
            self._autocast(),
            _settings.on(_NoTangents()),
            Scope(partial(_within, _INSIDE)),
        ):
            context.call = context.call._replace(what=context.call.what.inside())
            with self._random.replayed(), Scope(_level):
                given = zip((leaf.detach() for leaf in self._graph.leaves), vectors, strict=True)
                duals = [x if v is None else forward_ad.make_dual(x, v) for x, v in given]
                outputs = _tree.flatten(context.at(duals))[0]
                pairs = [forward_ad.unpack_dual(output) for output in outputs]
        if not all(map(_alike, (value for value, _ in pairs), map(_print, first))):
            raise GraphError(
                "checkpoint: f computes something different when it runs again: it reads what has "
                "changed since (a replaced buffer, a counter, a cache). Leave checkpoint= out."
            )
        return [torch.zeros_like(x) if t is None else t for x, t in pairs]


def _level(undo: Undo) -> None:
    undo += [_leave_level]
    forward_ad.enter_dual_level()


def _leave_level() -> None:
    # an interrupt may have come before PyTorch counted it, or between its two counts
    setattr(forward_ad, _versions.LEVEL, 0)
    with suppress(RuntimeError):
        forward_ad.exit_dual_level(level=0)
    setattr(forward_ad, _versions.LEVEL, -1)
