"""`unroll`: parameters after some steps of an optimizer, differentiable through all of them."""

from __future__ import annotations

import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hodiff._core import _arguments, _nodes, _reverse, _settings, _tree
from hodiff._core._call import Call, call, tag_of
from hodiff._core._graph import OutputGraph, detached
from hodiff._core._modules import Selection
from hodiff._core._where import Where
from hodiff.calculus._first import ByName, T
from hodiff.curvature._operator import normal
from hodiff.errors import GraphError, InputError
from hodiff.rules import Rule, kept, stepped, taken

AnyRule = Rule | Callable[[Any, Any, Any, int], tuple[Any, Any]]
"""A rule of `hodiff.rules`, or a function with its signature."""
Inner = Callable[..., Any]
Count = int | Iterable[Any]
Segments = int | Literal["auto"] | None


class UnrollOptions(TypedDict, total=False):
    """The options that overloads pass on; at run time signatures are spelled out."""

    segments: Segments
    last: int | None
    first_order: bool
    state: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def unroll(
    f: Inner,
    where: nn.Module | Selection,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[UnrollOptions],
) -> ByName: ...


@overload
def unroll(
    f: Inner,
    where: nn.Module | Selection,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[True],
    **options: Unpack[UnrollOptions],
) -> tuple[ByName, Any]: ...


@overload
def unroll(
    f: Inner,
    where: T,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[UnrollOptions],
) -> T: ...


@overload
def unroll(
    f: Inner,
    where: T,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[True],
    **options: Unpack[UnrollOptions],
) -> tuple[T, Any]: ...


def unroll(
    f: Inner,
    where: Any,
    rule: AnyRule,
    steps: Count,
    *,
    segments: Segments = None,
    last: int | None = None,
    first_order: bool = False,
    state: Any = None,
    return_state: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The parameters after *k* steps of an optimizer, as a function of everything that went into
    them.

    \(p_t = u(p_{t-1}, \nabla f(p_{t-1}), s_{t-1})\) with the rule *u* and its state *s*.
    Derivatives flow to the initial parameters, to hyperparameters that are tensors, and to
    everything else that `f` depends on: data, sample weights, another network.

    Args:
        f: The inner loss: `f(where)` returns one element; with batches, `f(where, batch)`.
        where: The initial parameters: a tensor, a container of tensors, a module (`f` receives the
            module, with the parameters of the step), or `hodiff.select(module, ...)`. They are not
            changed.
        rule: One of `hodiff.rules`; or a function `(params, grads, state, step) -> (params,
            state)`, where *params* are like the result, *step* counts from 1, and the first *state*
            is None (later what it returned: a tensor or any nesting of tuples, lists and dicts,
            which keeps its graph). It may call another rule: a schedule.
            A rule leaves a parameter unchanged that `f` does not use in a step, as
            `torch.optim` does; a function receives zeros for it.
        steps: The number of steps; or the batches, one for each step.
        segments: None keeps the graphs of all steps. A number of segments, or `"auto"`
            (\(\lceil\sqrt{k}\,\rceil\)), keeps only the parameters at the start of each segment,
            and the backward pass runs the steps again, with the same random numbers. Only for first
            derivatives.
        last: Differentiate only through this many last steps; everything before, including the
            start, counts as a constant. This is another quantity: on a small network it differed by
            63-99 %.
        first_order: Treat each step's gradient as a constant (first-order MAML).
        state: The state to continue from, as returned by an earlier call with `return_state=True`,
            for the same rule and the same parameter names in any order.
        return_state: Whether to return `(parameters, (steps taken, the rule's state))`.
        args: Further positional arguments for `f`, after the batch.
        kwargs: Keyword arguments for `f`.

    Returns:
        The parameters after the last step, in the structure and shapes of *where* (a dict by
        parameter name for
        a module: pass it to `torch.func.functional_call`); with `return_state=True`,
        `(parameters, state)`. Under `no_grad` they are detached, and no graph is kept.

    Raises:
        InputError: A rule, a number of steps or a state does not fit, or `f` does not return one
            element.
        GraphError: `f` does not use its argument; a second derivative through `segments`; or as for
            `hodiff.grad`.

    Cost:
        One evaluation of `f`, one reverse pass and the rule in each step; the pass through all
        steps takes about two more of each. Memory: the graphs of all steps; with `segments="auto"`,
        those of \(\sqrt{k}\) steps and as many copies of parameters and state, at the cost of one
        more evaluation of each step. Buffers of modules (batch normalization) are not changed, and
        each step starts from them.

    Examples:
        Two steps on \(2 p^2\) from 1 lead to \((1 - 4 \eta)^2\), whose derivative is \(-8(1 - 4
        \eta)\):

        >>> import torch, hodiff
        >>> lr = torch.tensor(0.1, requires_grad=True)
        >>> p = hodiff.unroll(
        ...     lambda p: (2.0 * p**2).sum(), torch.ones(1), hodiff.rules.SGD(lr=lr), 2
        ... )
        >>> p.detach(), torch.autograd.grad(p.sum(), lr)[0]
        (tensor([0.3600]), tensor(-4.8000))

    Reference:
        Maclaurin, D., Duvenaud, D., Adams, R. P. (2015). Gradient-based hyperparameter optimization
        through reversible learning. ICML. arXiv:1502.03492. Finn, C., Abbeel, P., Levine, S.
        (2017). Model-agnostic meta-learning. ICML. arXiv:1703.03400.
    """
    return_state = _arguments.is_set(return_state, "return_state")
    first_order = _arguments.is_set(first_order, "first_order")
    parsed = Where(where, "where")
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(
            f"f: got {_arguments.kind(f)}, expected a function of the parameters, "
            "evaluated at each step."
        )
    batches = _batches(steps)
    rules = rule._by_leaf(parsed.tree, len(parsed.tensors)) if isinstance(rule, Rule) else []
    inner = UnrolledSteps(
        f, parsed, _update(rule, rules, parsed), args, kwargs, first_order=first_order
    )
    now = inner.resume(state)
    if rules:
        now = now._replace(state=taken(now.state, rules, parsed.tree, parsed.tensors))
    if torch.is_grad_enabled():
        cut = (
            0
            if last is None
            else max(0, len(batches) - _arguments.check_integer(last, "last", least=1))
        )
        if cut:
            now = inner.run(now, batches[:cut], record=False)
        for some in _split(batches[cut:], segments):
            now = (
                inner.run(now, some, record=True)
                if segments is None
                else run_segment(inner, now, some)
            )
        _nodes.mark_results(now.params)
    else:
        now = inner.run(now, batches, record=False)
    # A rule may give back what it was given: results share no memory with the user's.
    result = parsed.result(_reverse.unaliased(now.params, parsed.tensors))
    if not return_state:
        return result
    return result, (now.step, kept(now.state, rules, parsed.tree) if rules else now.state)


def _batches(steps: Any) -> list[Any]:
    """The argument of each step beside the parameters: nothing, or a batch."""
    if isinstance(steps, int):
        return [()] * _arguments.check_integer(steps, "steps", least=1)
    if isinstance(steps, Tensor) or not isinstance(steps, Iterable):
        raise InputError(
            f"steps: got {_arguments.kind(steps)}, expected a number, or an iterable with a batch "
            "for each step."
        )
    batches = [(batch,) for batch in steps]
    if not batches:
        raise InputError("steps: got none; give a batch for each step.")
    return batches


def _split(batches: list[Any], segments: Any) -> list[list[Any]]:
    """The steps of each segment; all of them, where there are no segments."""
    if segments is None:
        return [batches]
    if isinstance(segments, str) and segments == "auto":
        segments = math.ceil(math.sqrt(len(batches)))
    elif isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise InputError(
            f'segments: got {segments!r}, expected None, "auto", or a number of segments.'
        )
    size = -(-len(batches) // segments)
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def _update(rule: Any, rules: list[Rule], where: Where) -> Update:
    """A rule on lists of leaves; what is fixed for all steps is looked at once."""
    if rules:
        return functools.partial(stepped, rules)
    if not callable(rule) or isinstance(rule, (type, nn.Module)):
        what = _arguments.kind(rule) + (", not an instance" if isinstance(rule, type) else "")
        raise InputError(
            f"rule: got {what}; expected a rule such as hodiff.rules.SGD(lr=0.1), or a function "
            f"(params, grads, state, step) -> (params, state)."
        )

    def update(
        params: list[Tensor], grads: list[Tensor | None], state: Any, step: int
    ) -> tuple[list[Tensor], Any]:
        whole = [
            torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)
        ]
        updated = rule(where.result(params), where.result(whole), state, step)
        if not isinstance(updated, tuple) or len(updated) != 2:
            raise InputError(f"rule returned {_arguments.kind(updated)}, expected (params, state).")
        different = _tree.difference(where.tree, _tree.flatten(updated[0])[2], "params")
        if different:
            raise InputError(f"rule returned parameters unlike where: {different}.")
        return _tree.leaves_like(where.tree, updated[0]), updated[1]

    return update


# --- checkpoints for `unroll`: a segment of steps keeps its start, and is taken again in the
# backward pass `torch.utils.checkpoint` around a segment saves nothing: each gradient inside
# unpacks saved tensors, and so takes the segment again within itself. Here the steps are taken
# without a lasting graph; a Function stands for the segment, and its backward takes them once more
# from the saved start, this time with their graph.
#
# What `f` and the rule reach besides the parameters (closures, tensors of batches, parameters that
# are not in
# *where*) is met while the steps are taken, as arguments of operations. The second time stand-ins
# take their place, so that the segment's own part of a derivative ends there. What was not met
# would be missing: it is seen, in the graph of the second time, and raises.


def run_segment(steps: UnrolledSteps, now: Progress, batches: Sequence[Any]) -> Progress:
    """Some steps, behind one node."""
    met, replay = CaptureInputs(), Replay(steps, now, batches)
    ends = steps.under(met).run(now, batches, record=False)
    start, thetas = (
        [*map(normal, (*now.params, *_tensors(now.state)))],
        [*met.tensors.values(), *_others(steps.where)],
    )
    replay.number, replay.thetas = len(start), thetas
    outputs = [*ends.params, *_tensors(ends.state)]
    replay.ends = [(output, output._version) for output in outputs]
    outcome = Segment.apply(replay, outputs, *start, *thetas)
    count = len(now.params)
    return Progress(list(outcome[:count]), _replaced(ends.state, outcome[count:]), ends.step)


def _others(where: Where) -> list[Tensor]:
    """The parameters of the point's modules that are not differentiated by:
    stand-ins hide them from the capture.
    """
    own = set(map(id, where.tensors))
    slots = [
        parameter
        for module_slice in where.module_slices
        for _, _, _, parameter in module_slice.assembly.slots
    ]
    return list({id(p): p for p in slots if p.requires_grad and id(p) not in own}.values())


class Replay:
    """The recipe for taking a segment once more.

    Attributes:
        number: How many of the Function's tensors are the start: parameters, then the rule's state.
        thetas: The others, which the steps met.
        ends: The values that the steps led to, and the versions of those.
    """

    def __init__(self, steps: UnrolledSteps, now: Progress, batches: Sequence[Any]) -> None:
        device = steps.where.tensors[0].device
        self._steps, self._batches = steps, batches
        self._state, self._step = now.state, now.step
        self._random = _settings.RandomState(device)
        self._autocast = _settings.autocast_now(device.type)
        self.number, self.thetas = 0, []
        self.ends: list[tuple[Tensor, int]] = []

    def vjp(self, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
        """The cotangents of the start and of everything that the steps met,
        from those of the end.
        """
        aliases = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        start, count = aliases[: self.number], len(self._steps.where.tensors)
        mode = SubstituteInputs(self.thetas, aliases[self.number :])
        begin = Progress(start[:count], _replaced(self._state, start[count:]), self._step)
        with (
            self._random.replayed(),
            _settings.grad_mode(True),
            self._autocast(),
        ):
            ends = self._steps.under(mode).run(begin, self._batches, record=True)
        outputs = [*ends.params, *_tensors(ends.state)]
        self._compare(outputs)
        self._refuse_unmet(outputs, aliases, mode)
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        wanted = [alias for alias in aliases if alias.requires_grad]
        gradients = iter(
            _reverse.vjp_between([o for o, _ in pairs], wanted, [c for _, c in pairs], keep=False)
        )
        return [next(gradients) if alias.requires_grad else None for alias in aliases]

    def _compare(self, outputs: Sequence[Tensor]) -> None:
        """Raise where the steps ended elsewhere than the first time."""
        for output, (end, version) in zip(outputs, self.ends, strict=True):
            if end._version != version or not end.is_floating_point() or not end.numel():
                continue
            off = float((output - end).abs().max())
            if off > torch.finfo(end.dtype).eps ** 0.5 * float(end.abs().max()):
                raise GraphError(
                    f"segments: recomputed in the backward pass, the steps ended elsewhere (by "
                    f"{off:.2g}): something that f uses has changed since, or f draws random "
                    f"numbers from other than PyTorch's default generators. Call backward before "
                    f"anything changes (data, buffers, train() and eval()), or use segments=None."
                )

    @staticmethod
    def _refuse_unmet(
        outputs: Sequence[Tensor], aliases: Sequence[Tensor], mode: SubstituteInputs
    ) -> None:
        known = set(map(id, aliases))
        for leaf in _nodes.survey([o for o in outputs if o.requires_grad]).variables():
            if id(leaf) not in known and tag_of(leaf) is None and not mode.made(leaf):
                raise GraphError(
                    f"segments: f reaches a tensor of shape {tuple(leaf.shape)} that requires grad "
                    f"in a way that hodiff cannot see (through an autograd.Function, or below "
                    f"PyTorch's modes), so its part of the derivative would be missing. Use "
                    f"segments=None."
                )


class Segment(torch.autograd.Function):
    """The steps of a segment, as one node."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, outputs: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The end, which is known already."""
        ctx.replay = replay
        ctx.save_for_backward(*tensors)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        """Take the steps once more, and pull back through their graph."""
        if torch.is_grad_enabled():
            raise GraphError(
                "unroll: segments= allows first derivatives only, but this pass is to be "
                "differentiated again. Use segments=None."
            )
        return None, None, *ctx.replay.vjp(ctx.saved_tensors, cotangents)


def _tensors(state: Any) -> list[Tensor]:
    """The tensors that a rule keeps from step to step."""
    tensors = []
    for leaf in _tree.flatten(state)[0]:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif not (leaf is None or isinstance(leaf, (bool, int, float, str))):
            raise InputError(
                f"rule: the state holds {_arguments.kind(leaf)}; with segments= it must consist of "
                f"tensors and numbers, in tuples, lists and dicts, so that it can be kept."
            )
    return tensors


def _replaced(state: Any, tensors: Sequence[Tensor]) -> Any:
    """A state with other tensors in place of its own."""
    new = iter(tensors)
    return _tree.tree_map(lambda leaf: next(new) if isinstance(leaf, Tensor) else leaf, state)


# --- the steps of an inner optimization, on flat lists of tensors: a gradient by the road, and the
# rule


Update = Callable[[list[Tensor], list[Tensor | None], Any, int], tuple[list[Tensor], Any]]
"""A rule, on lists of leaves; the gradient is None by what `f` does not reach in a step."""


class Progress(NamedTuple):
    """The state of an optimization: the parameters, the rule's state, the steps taken."""

    params: list[Tensor]
    state: Any
    step: int


class UnrolledSteps:
    """An inner loss and a rule, ready to take steps."""

    def __init__(
        self,
        f: Callable[..., Any],
        where: Where,
        update: Update,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        *,
        first_order: bool,
    ) -> None:
        self.where = where
        self._update = update
        self._first_order = first_order
        self._met: CaptureInputs | None = None
        self._recorded, self._plain = (
            call(f, where, passes=1, create_graph=create_graph, args=args, kwargs=kwargs)
            for create_graph in (True, False)
        )

    def under(self, mode: TorchFunctionMode) -> UnrolledSteps:
        """A copy of the steps, whose function and rule run under a mode."""
        other = copy.copy(self)
        other._recorded, other._plain = (
            given._replace(what=_under(mode, given.what)) for given in (self._recorded, self._plain)
        )
        other._update = _under(mode, self._update)
        other._met = mode if isinstance(mode, CaptureInputs) else None
        return other

    def resume(self, state: Any) -> Progress:
        """The start; or a point further on, from a state that was returned."""
        if state is None:
            return Progress(self.where.tensors, None, 0)
        if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], int)):
            raise InputError(
                "state: expected the state that hodiff.unroll(..., return_state=True) returned."
            )
        return Progress(self.where.tensors, state[1], state[0])

    def run(self, now: Progress, batches: Sequence[Any], *, record: bool) -> Progress:
        """Some steps; with `record` their graph is kept, in everything."""
        if not record:
            with _settings.recording(), _settings.grad_mode(False):
                start = [p.detach() for p in now.params]
                return self._take(Progress(start, detached(now.state), now.step), batches)
        return self._take(now, batches, through=not self._first_order)

    def _take(self, now: Progress, batches: Sequence[Any], *, through: bool = False) -> Progress:
        """Some steps: `through` them, or by gradients that are constants, of which no graph stays.

        The rule runs in the caller's mode.
        """
        recorded = torch.is_grad_enabled()
        given, leaves = (self._recorded, _tracked) if through else (self._plain, self._begun)
        begins = through and now.params is self.where.tensors
        with OutputGraph(_with(given, batches[0]), None if begins else leaves(now.params)) as graph:
            for number, batch in enumerate(batches):
                if number:
                    graph.move(leaves(now.params), _with(given, batch).args)
                if self._met is not None:
                    self._met.end()
                missed: set[int] = set()
                gradient = _reverse.gradient(graph, differentiated=through, missed=missed)
                with _settings.grad_mode(recorded):
                    now = self._step(graph.leaves if through else now.params, gradient, missed, now)
        return now

    def _begun(self, params: Sequence[Tensor]) -> list[Tensor]:
        leaves = [_leaf(p) for p in params]
        if self._met is not None:
            self._met.begin(leaves)
        return leaves

    def _step(
        self, params: list[Tensor], gradient: list[Tensor], missed: set[int], now: Progress
    ) -> Progress:
        """One step of the rule."""
        reached = [None if number in missed else part for number, part in enumerate(gradient)]
        new, state = self._update(params, reached, now.state, now.step + 1)
        for before, after, name in zip(params, new, self.where.names, strict=True):
            if (
                not isinstance(after, Tensor)
                or after.shape != before.shape
                or after.dtype != before.dtype
            ):
                got = (
                    f"{after.dtype}, {tuple(after.shape)}"
                    if isinstance(after, Tensor)
                    else _arguments.kind(after)
                )
                raise InputError(
                    f"rule returned {got} for {name}, which is {before.dtype}, "
                    f"{tuple(before.shape)}; a tensor hyperparameter must have one element, or the "
                    f"leaf's shape, and the leaf's dtype."
                )
        return Progress(new, state, now.step + 1)


def _tracked(params: Sequence[Tensor]) -> list[Tensor]:
    """Parameters that can be differentiated by, constants (the end of steps that were not recorded)
    too.
    """
    return [p if p.requires_grad else _leaf(p) for p in params]


def _leaf(tensor: Tensor) -> Tensor:
    """A leaf with a tensor's value."""
    return normal(tensor).detach().requires_grad_()


def _with(given: Call, batch: Sequence[Any]) -> Call:
    return given._replace(args=(*batch, *given.args)) if batch else given


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with _settings.on(mode):
            return function(*args, **kwargs)

    return functools.update_wrapper(inside, function)


# --- what steps reach besides the parameters ------------------------------------------------------


class CaptureInputs(TorchFunctionMode):
    """A context that notes tensors that require grad and come from outside.

    Attributes:
        tensors: What has been noted, by identity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self.begin([])

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """A step, at these leaves."""
        # held, so that identities stay their own
        self._inside = {id(leaf): leaf for leaf in leaves}
        self._leaves = set(self._inside)
        self._new: list[Tensor] = []

    def end(self) -> None:
        """The end of it.

        What a nested call computed of the leaves looked as if it came from outside, and does not.
        """
        for tensor in self._new:
            if tensor.grad_fn is not None and any(
                id(v) in self._leaves for v in _nodes.survey([tensor]).variables()
            ):
                del self.tensors[id(tensor)]
        self.begin([])

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Note the arguments and what becomes of them, and call the operation."""
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for item in _tree.flatten(value)[0]:
                known = id(item) in self._inside or id(item) in self.tensors
                if isinstance(item, Tensor) and item.requires_grad and not known:
                    self.tensors[id(item)] = item
                    self._new.append(item)
        result = func(*args, **kwargs)
        for item in _tree.flatten(result)[0]:
            if isinstance(item, Tensor) and id(item) not in self.tensors:
                self._inside[id(item)] = item
        return result


class SubstituteInputs(TorchFunctionMode):
    """A context in which operations get stand-ins for some tensors, which live longer than it."""

    def __init__(self, tensors: Sequence[Tensor], stand_ins: Sequence[Tensor]) -> None:
        super().__init__()
        self._stand_ins = dict(zip(map(id, tensors), stand_ins, strict=True))
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the arguments, and call the operation."""
        result = func(
            *_tree.tree_map(self._other, args), **_tree.tree_map(self._other, kwargs or {})
        )
        if isinstance(result, Tensor) and result.grad_fn is None:
            self._made[id(result)] = weakref.ref(result)
        return result

    def _other(self, value: Any) -> Any:
        return self._stand_ins.get(id(value), value)

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor without a graph was made inside."""
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor
