"""The one place where a user's function is called, with all that it is lent.

An `EvaluationContext` is the state in which it runs: grad mode on, kernels that have second derivatives, the modules
of the point lent (see `StateLoan`), so that `f` sees leaves of ours and nothing of the user's is changed.
It stays until the last derivative pass has run. What comes out of it is a `Graph` (reverse mode) or a
series (Taylor mode); both go through `run`, and so through the same checks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize, stateless
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hodiff._core import (
    _arguments,
    _call,
    _hooks,
    _locks,
    _messages,
    _refusals,
    _settings,
    _substitutes,
    _tree,
    _versions,
)
from hodiff._core._call import Call
from hodiff._core._hooks import Hooks, second_derivatives, watch_modules
from hodiff._core._settings import RandomState
from hodiff._core._where import TRAINABLE, Where, is_trainable
from hodiff.errors import InputError

_substitutes.install()
_versions.where_forward_mode_begins(_call.note_forward_mode)

_version = attrgetter("_version")
LEAF_TAG = "_leaf_of_hodiff"
"""The attribute of a leaf of ours that says whose it is."""


class LeafTag:
    """Whose leaf a tensor is: it is met again, in the graph of a later call, where `f` kept something.

    Attributes:
        open: Whether the evaluation still runs.
        detached: Whether its results are, so that nothing but a leftover leads to its leaves.
    """

    open = True
    detached: bool


class Evaluation:
    """One run of `f`, of which passes that come later may run parts again: activation checkpoints do.

    Attributes:
        over: Whether the modules have something else by now; before, nothing is to be done.
    """

    __slots__ = ("_call", "_kept", "_state", "over")

    def __init__(self, call: Call, state: StateLoan) -> None:
        self._call, self._state, self.over = call, state, False

    def end(self, state: StateLoan) -> None:
        """The modules get something else after this."""
        if not hasattr(self, "_kept"):
            self._kept = state.kept()
            del self._state
        self.over = True

    def back(self, begun: Kept, undo: list[Callable[[], object]]) -> None:
        """Let the modules have what they had as a block began, or as they were met, if later."""
        if hasattr(self, "_state"):  # it has not ended; later it is resumed for whole passes
            put(self._state.as_met(begun), undo)
        put(begun, undo)

    def resumed(self, *, whole: bool = False) -> EvaluationContext:
        """Its state once more: the modules, in no other thread meanwhile, have what they had.

        With `whole`, for the whole of a pass, not for one part of `f`.
        """
        return EvaluationContext(self._call, evaluation=self, whole=whole)

    def put(self, context: EvaluationContext, undo: list[Callable[[], object]], *, whole: bool) -> None:
        """Let the modules have it, once they are borrowed."""
        context.loan.take([module for module in self._kept if module not in context.borrowed])
        put(self._kept, undo)
        if whole:
            undo += [partial(setattr, self, "over", True)]
            self.over = False


class EvaluationContext:
    """The state in which the function of a call runs, until the last pass.

    Attributes:
        call: What was asked.
        leaf_tag: The mark of its leaves.
        loan: What of modules is lent.
        borrowed: Those modules, the point's and those that `f` called.
        by_hand: The derivatives that `f` took itself, when it was called last; None where it took none.
        forward_mode: Whether PyTorch's forward mode was on as `f` began, or `f` used it.
        nests: Whether `f` makes calls of hodiff itself.
        hooks: Whether a tensor hook that `f` registered, or one of its modules', changed a gradient.
    """

    __slots__ = (
        "__weakref__",
        "_evaluation",
        "_leaves",
        "_normal",
        "_parameters",
        "_ran",
        "_undo",
        "_watched",
        "_whole",
        "borrowed",
        "by_hand",
        "call",
        "forward_mode",
        "hooks",
        "leaf_tag",
        "loan",
        "nests",
        "random",
    )

    def __init__(
        self,
        call: Call,
        leaves: Sequence[Tensor] = (),
        *,
        evaluation: Evaluation | None = None,
        whole: bool = False,
    ) -> None:
        """With `leaves`, those stand at once in the place of the parameters of the point; or what an evaluation had."""
        self.call, self._leaves = call, leaves
        self._evaluation, self._whole = evaluation, whole
        self.leaf_tag = LeafTag()
        self.leaf_tag.detached = not call.create_graph
        self._undo: list[Callable[[], object]] = []
        self._normal = self.nests = False
        self.by_hand: _hooks.ByHand | None = None
        self.hooks = Hooks()

    # --- the state

    def __enter__(self) -> EvaluationContext:
        call, undo = self.call, self._undo
        self._ran = False
        try:
            # What an interrupt kept open: no Python code can prevent one between a `with` block and `__exit__`.
            _settings.when_lost(undo, self)
            undo += [partial(setattr, self.leaf_tag, "open", False)]
            if _settings.absent.modes:
                _settings.take_off_absent()
            if torch.is_inference_mode_enabled():
                _settings.record(undo)
            if not torch.is_grad_enabled():
                undo += [_settings.InTime(torch._C._set_grad_enabled, False)]
                torch._C._set_grad_enabled(True)
            if "torch._dynamo" in sys.modules:
                _settings.eager.enter(undo)
            self.loan = StateLoan(call, self.hooks)
            self.borrowed = self.loan.attributes
            undo += [self.loan.close]
            watch_modules.enter(undo)
            if call.order >= 2:
                second_derivatives.enter(undo)
            _call.enter(self, undo, differentiated=call.order > 0)
            if parametrize._cache_enabled:
                self._set_aside_cache()
            if call.where.module_slices:
                self._lend()
                if self._leaves:
                    self._parameters.put(self._leaves)
            if self._evaluation is not None:
                self._evaluation.put(self, undo, whole=self._whole)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Undo everything, in reverse order; what fails does not keep the rest from being undone.

        An interrupt may keep a step from its beginning, this one too: whoever calls it does so twice then.
        """
        try:
            undos = _settings.opened.undos
            if undos and undos[-1] is not self._undo:
                _settings.undo_inner(self._undo)
            _settings.undo_all(self._undo)
        except BaseException:
            _settings.undo_all(self._undo)
            raise

    def also(self, switch: _settings.Counted) -> None:
        """One more switch, left with the rest."""
        switch.enter(self._undo)

    def _set_aside_cache(self) -> None:
        """Let `parametrize.cached()` fill a cache of this evaluation's own; there is one for all threads."""
        theirs: list[Any] = []

        def restore() -> None:
            for cache in theirs:
                parametrize._cache = cache
            _locks.release((parametrize,), self.leaf_tag)

        self._undo += [restore]
        _locks.claim((parametrize,), self.leaf_tag)
        theirs += [parametrize._cache]
        parametrize._cache = {}

    def _lend(self) -> None:
        """Borrow the modules of the point, with all their parameters, buffers and attributes."""
        self._parameters = ParameterLoan(self.call.where)
        self._undo += [self._parameters.close]
        self._parameters.take()
        if not self.call.create_graph:  # what is not differentiated need not be recorded
            self._parameters.put_others(self._unrecorded)
        self._borrow_point()

    def _borrow_point(self) -> None:
        for module_slice in self.call.where.module_slices:
            modules = [module for module in module_slice.assembly.modules if module not in self.borrowed]
            self.loan.take(modules, module_slice.module)

    def _afresh(self) -> None:
        """What `f` left in buffers and attributes goes, so that another run begins as the first one did."""
        if self._evaluation is not None:
            self._evaluation.end(self.loan)
            self._evaluation = None
        self.loan.close()
        self._borrow_point()

    def _unrecorded(self, parameter: Tensor) -> Tensor:
        """A parameter that is not differentiated in: its value, unrecorded."""
        value = cast(parameter.clone() if parameter.is_inference() else parameter, self.call.cast)
        _mark_as_parameter(value, parameter)
        if is_trainable(parameter):  # to calls inside `f` it still is
            setattr(value, TRAINABLE, True)
        return value

    # --- running f

    def leaves(self, given: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A leaf for each tensor of the point, with its value; or `given` ones, with theirs."""
        call, tag = self.call, self.leaf_tag
        renormed = self._renormed() if call.where.module_slices else ()
        if given is None:
            leaves = _aliases(call, renormed, tangents=self.forward_mode)
        else:
            leaves = [leaf.clone() if index in renormed else leaf for index, leaf in enumerate(given)]
        for index, tensor in enumerate(call.where.tensors):
            attributes: dict[str, Any] = leaves[index].__dict__  # pyright: ignore[reportAssignmentType]
            attributes[LEAF_TAG] = tag, index
            if tensor.__class__ is nn.Parameter or "_is_param" in tensor.__dict__:  # as `_mark_as_parameter`
                attributes["_is_param"] = True
        self._watched = [leaf for index, leaf in enumerate(leaves) if index not in renormed] if renormed else leaves
        return leaves

    def _renormed(self) -> Collection[int]:
        """The numbers of leaves that `f` changes in place by itself: tables of `Embedding(max_norm=...)`."""
        tables: list[Any] = []
        for module in self._parameters.modules:
            if "max_norm" in module.__dict__ and module.max_norm is not None:
                tables += [module.weight]
        tensors = self.call.where.tensors
        return {index for table in tables for index, tensor in enumerate(tensors) if tensor is table} if tables else ()

    def at(self, arguments: Sequence[Any]) -> Any:
        """What `f` returns when `arguments` stand in the place of the point's tensors. Nothing is checked."""
        if self._ran:
            self._afresh()
        self._ran = True
        self.by_hand = None
        call = self.call
        if call.where.module_slices:
            self._parameters.put(arguments)
        argument = call.where.argument(arguments)
        if self._normal:
            with _settings.on(NormalTensors()):
                return call.what(*(argument if call.unpack_point else (argument,)), *call.args, **call.kwargs)
        return call.what(*(argument if call.unpack_point else (argument,)), *call.args, **call.kwargs)

    def resumed(self, leaves: Sequence[Tensor]) -> EvaluationContext:
        """The state of the last run once more; with the leaves in their place, where there is no more to it."""
        return (
            EvaluationContext(self.call, leaves) if self._evaluation is None else self._evaluation.resumed(whole=True)
        )

    def repeatable(self, recompute: Callable[..., object]) -> Callable[..., object]:
        """What runs a checkpointed block again: by the same definitions, and while the modules have what they had."""
        evaluations, swapped = [context.evaluation() for context in _call.state.running], _swapped()
        modes, begun = _settings.those_on(_substitutes.ExactNorms), self.loan.at_hand()

        def resume(undo: _settings.Undo) -> None:
            for evaluation in evaluations:
                if evaluation.over:
                    context = evaluation.resumed()
                    undo += [context.close]
                    context.__enter__()
            evaluations[-1].back(begun, undo)
            for module in swapped:
                _hooks.lend_module(module, ())
            if swapped:
                put(swapped, undo)
            for mode in modes:
                if mode not in _settings.those_on(_substitutes.ExactNorms):
                    _settings.push_calls(mode, undo)

        def again(*args: Any) -> None:
            with _settings.Scope(resume):
                recompute(*args)

        return again

    def evaluation(self) -> Evaluation:
        """The run at hand, for what will run a part of it again."""
        if self._evaluation is None:
            self._evaluation = Evaluation(self.call, self.loan)
            self._undo += [partial(self._evaluation.end, self.loan)]
        return self._evaluation

    def run(self, arguments: Sequence[Any], watched: Sequence[Tensor] | None = None) -> Any:
        """What `f` returns at `arguments`, once it is known that it changed none of the tensors `watched` in place."""
        watched = self._watched if watched is None else watched
        versions = [*map(_version, watched)]
        try:
            value = self.at(arguments)
        except RuntimeError as error:
            if not self._normal and _messages.about_inference(error):
                self._normal = True  # tensors of inference mode that f brings along are copied, in another run of it
                self.random.restore()
                return self.run(arguments, watched)
            note = _messages.advice_for_f(error)
            if note:
                error.add_note(note)
            raise
        except TypeError as error:
            call = self.call
            argument = call.where.argument(arguments)
            ours = signature_error(
                error, call.what, argument if call.unpack_point else (argument,), call.args, call.kwargs
            )
            if ours is None:
                raise
            raise ours from error
        if [*map(_version, watched)] != versions:
            changed = next(i for i, version in enumerate(versions) if watched[i]._version != version)
            mark = tag_of(watched[changed])
            raise _refusals.changed_in_place(self.call.where.names[mark[1] if mark else 0])
        return value

    # --- random numbers

    def remember(self) -> None:
        """Note the random state that `f` begins with, and the hooks."""
        self.hooks.before = RemovableHandle.next_id
        device = self.call.where.tensors[0].device
        for tensor in self.call.where.tensors:
            if tensor.is_cuda:
                device = tensor.device
                break
        self.random = RandomState.of(device)

    def again(self, leaves: Sequence[Tensor]) -> Any:
        """What `f` returns when it is called once more, with the same random numbers; they are not drawn twice."""
        now = RandomState.of(self.random.device)
        try:
            self.random.restore()
            return self.at(leaves)
        finally:
            now.restore()


def _swapped() -> Kept:
    """What `torch.func.functional_call` has put into the modules for which it runs at this moment."""
    frame, result = sys._getframe(), list[nn.Module]()
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            result += frame.f_locals["module"].modules()
        frame = frame.f_back
    return {module: (module._parameters.copy(), module._buffers.copy(), {}) for module in result}


def _mark_as_parameter(stand_in: Tensor, theirs: Tensor) -> None:
    """Let `isinstance(p, nn.Parameter)` say of a stand-in what it says of the user's tensor: `f` may ask."""
    if theirs.__class__ is nn.Parameter or "_is_param" in theirs.__dict__:
        stand_in.__dict__["_is_param"] = True  # pyright: ignore[reportIndexIssue]


def tag_of(leaf: Tensor) -> tuple[LeafTag, int] | None:
    """Whose leaf a tensor is, and its number there; None for a tensor of the user's."""
    return leaf.__dict__.get(LEAF_TAG)


def _aliases(call: Call, copied: Collection[int], *, tangents: bool) -> list[Tensor]:
    """A leaf for each tensor. Inside a `torch.func` transform, where PyTorch forbids leaves of our own, raise."""
    leaves: list[Tensor] = []
    try:
        if call.create_graph:
            torch.empty(0, device="cpu").requires_grad_()  # refused there, as the leaves of a detached result are
        for index, tensor in enumerate(call.where.tensors):
            if call.create_graph and tensor.requires_grad:
                leaf = _connected(tensor, index in copied)
            else:
                if tangents:
                    _call.refuse_tangent(tensor)
                leaf = tensor.clone() if index in copied or tensor.is_inference() else tensor
                leaf = leaf.detach() if call.cast is None else cast(leaf, call.cast)
            leaves += [leaf.requires_grad_()]
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise InputError(_call.INSIDE_A_TRANSFORM) from error
    return leaves


def _connected(tensor: Tensor, copied: bool) -> Tensor:
    """A leaf that stands for the caller's tensor and is connected to it, where the result is differentiable."""
    if copied or tensor.is_inference():
        return tensor.clone()
    if tensor.is_leaf:
        return tensor.view_as(tensor)
    # An in-place operation in f must not reach the caller's tensor. PyTorch refuses it on a leaf's
    # view by itself, and on this one because `unbind` may return several.
    return tensor.unsqueeze(0).unbind()[0]


# --- lending modules to an evaluation: parameters replaced by leaves, buffers by clones, attributes put back ----------
# Nothing of the user's may change, and no hook on a parameter may fire, so `f` sees aliases instead of
# the real parameters and clones instead of the real buffers, until the last derivative pass has run
# (an activation checkpoint runs `f`'s blocks again inside the passes). And nothing of ours may stay: a
# tensor that `f` leaves in an attribute of a module (a hidden state, a lazy cache) would hold our graph
# there, to be met by the next call as a constant.
#
# Evaluations nested in one thread share a module's loan; the outermost one puts the originals back.


class _Clones:
    """The buffers of one module while clones stand in for them."""

    __slots__ = ("lent", "originals", "users")

    def __init__(self, module: nn.Module) -> None:
        self.lent: dict[str, Tensor] = {}
        self.users: dict[object, None] = {}
        self.originals = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.requires_grad  # one that requires grad is an input of f
        }

    def begun_with(self, module: nn.Module) -> dict[str, Any]:
        """The buffers that an evaluation began with; those that `f` has put there, where it has."""
        now, begun = module._buffers.copy(), {}
        for name, clone in self.lent.items():
            if now.get(name) is clone:  # changed in place since, or not
                begun[name] = self.originals[name].to(clone.dtype, copy=True) if clone._version else clone
        return now | begun


_KEEP_NOTHING = frozenset(
    kind for kind in vars(nn).values() if isinstance(kind, type) and kind.__module__.startswith("torch.nn.modules.")
)
"""PyTorch's own modules: what they compute they put into no attribute (hooks on them may, and `f` on its point)."""

_lent: dict[nn.Module, _Clones] = {}

Kept = dict[nn.Module, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
"""What modules had at another time: parameters, buffers, and attributes of which tensors with a graph are a part."""


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`tensor` detached, in another floating point dtype if one is given."""
    still = tensor.detach()
    return still.to(dtype) if dtype is not None and still.is_floating_point() else still


class StateLoan:
    """The modules whose buffers and attributes one evaluation has borrowed.

    Attributes:
        attributes: What the attributes of each were, when it was borrowed; None of one that keeps nothing.
        put_back: What else is done when they are given back.
    """

    __slots__ = ("_call", "_claimed", "_cloned", "_hooks", "attributes", "put_back")

    def __init__(self, call: Call, hooks: Hooks) -> None:
        self._call, self._hooks = call, hooks
        self._cloned: list[nn.Module] = []
        self._claimed: list[nn.Module] = []
        self.attributes: dict[nn.Module, dict[str, Any] | None] = {}
        self.put_back: list[Callable[[], object]] = []

    def take(self, modules: Collection[nn.Module], root: nn.Module | None = None) -> None:
        """Borrow modules that `f` calls, below a point's `root` or others, from all other threads.

        Clones stand in for their buffers, attributes are noted, hooks on gradients are watched.
        """
        # Of a module that is sharded a first derivative by inputs is right.
        if root is None and self._call.order >= 2 and _arguments.LOADED_BY in sys.modules:
            _arguments.check_modules(modules, "f")
        held: list[nn.Module] = []
        for module in modules:
            if module._parameters or module._buffers:
                held += [module]
        if held:
            self._claimed += held
            _locks.claim(held, self)
        for module in modules:
            hooked = module._forward_pre_hooks or module._forward_hooks
            plain = module.__class__ in _KEEP_NOTHING and module is not root and not hooked
            self.attributes[module] = None if plain else module.__dict__.copy()
            scripted = isinstance(module, torch.jit.ScriptModule)
            if module._buffers and not scripted:
                self._clone_buffers(module)
            if root is None and "max_norm" in module.__dict__ and module.max_norm is not None:
                self._copy_table(module)
            if module._backward_hooks and not scripted:
                self._hooks.of_module(module, self.put_back)

    def _clone_buffers(self, module: nn.Module) -> None:
        self._cloned += [module]
        if module in _lent:
            _lent[module].users[self] = None
            return
        clones = _Clones(module)
        clones.users[self] = None
        _lent[module] = clones
        clones.lent = {name: cast(buffer, self._call.cast).clone() for name, buffer in clones.originals.items()}
        module._buffers.update(clones.lent)

    def _copy_table(self, module: nn.Module) -> None:
        """Let an `Embedding(max_norm=...)` renormalise a copy of its table."""
        theirs: Any = module._parameters["weight"]
        copy = theirs.clone() if self._call.create_graph else theirs.detach().clone()
        _mark_as_parameter(copy, theirs)

        def restore() -> None:
            module._parameters["weight"] = theirs

        self.put_back += [restore]
        module._parameters["weight"] = copy

    def tidy(self) -> dict[nn.Module, dict[str, Any]]:
        """Put back attributes in which `f` has left tensors with a graph: that is ours, and ends with the call."""
        result: dict[nn.Module, dict[str, Any]] = {}
        for module, before in self.attributes.items():
            if before is None:
                continue
            now = module.__dict__
            left = [name for name in now if not (name in before and now[name] is before[name]) and holds(now[name])]
            for name in left:
                result.setdefault(module, {})[name] = now[name]
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]
        return result

    def at_hand(self) -> Kept:
        """What its modules have at this moment that a block may read, and change.

        Statistics of norms only follow, and masks are large, and constant.
        """
        result = Kept()
        for module, before in self.attributes.items():
            if (before is None and not module._buffers) or isinstance(module, _NormBase):
                continue
            buffers = {
                name: buffer.clone()
                for name, buffer in module._buffers.items()
                if buffer is not None and not buffer.requires_grad and buffer.numel() <= 2**16
            }
            result[module] = {}, buffers, _plain_attributes(module.__dict__ if before else {})
        return result

    def as_met(self, others: Container[nn.Module]) -> Kept:
        """What its modules, but some others, had as they were borrowed, where it is another now."""
        result = Kept()
        for module, before in self.attributes.items():
            if module not in others and (before is not None or module in _lent):
                begun = _lent[module].begun_with(module) if module in _lent else {}
                changed = {n: each for n, each in begun.items() if each is not module._buffers[n]}
                result[module] = {}, changed, _plain_attributes(before or {})
        return result

    def kept(self) -> Kept:
        """What its modules have, for `put`; what was left in attributes without its graph, which may lead here."""
        left, result = self.tidy(), Kept()
        for module in self._claimed:
            buffers = _lent[module].begun_with(module) if module in _lent else module._buffers.copy()
            attributes = _tree.tree_map(_still, left[module]) if module in left else {}
            result[module] = module._parameters.copy(), buffers, attributes
        return result

    def close(self) -> None:
        """Return everything; the last borrower puts the original buffers back. It may be run again."""
        if self.attributes:
            self.tidy()
            self.attributes.clear()
        for step in self.put_back:
            step()
        self.put_back = []
        for module in self._cloned:
            if module in _lent:
                clones = _lent[module]
                if self in clones.users:
                    del clones.users[self]
                if not clones.users:
                    module._buffers.update(clones.originals)
                    del _lent[module]
        self._cloned = []
        if self._claimed:
            _locks.release(self._claimed, self)
            self._claimed = []


def _plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a module has set itself; none with a graph, which may be its holder's."""
    return {name: value for name, value in attributes.items() if name[0] != "_" and not holds(value)}


def put(kept: Kept, undo: list[Callable[[], object]]) -> None:
    """Let modules on loan have what they had; `undo` is given what puts parameters and buffers back."""
    for module, (parameters, buffers, attributes) in kept.items():
        for now, before in ((module._parameters, parameters), (module._buffers, buffers)):
            if before:
                undo += [partial(now.update, now.copy())]
                now.update(before)
        for name, value in buffers.items():
            if value is not None:  # a block may change it in place, each time
                module._buffers[name] = value.clone()
        now = module.__dict__
        other = {name: value for name, value in attributes.items() if now.get(name, now) is not value}
        if other:
            undo += [partial(now.update, {name: now[name] for name in other if name in now})]
            now.update(other)  # a new one the loan takes away


def _still(value: Any) -> Any:
    """A tensor cut from its graph that requires grad as before, so that as much is recorded with it."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def holds(value: Any) -> bool:
    """Whether a value is a tensor with a graph, or a container in which there is one."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, (list, tuple)):
        return any(holds(item) for item in value)
    return isinstance(value, dict) and any(holds(item) for item in value.values())


class ParameterLoan:
    """The parameters of the modules of a point, to be replaced wherever they occur, once taken and until closed."""

    __slots__ = ("_places", "_rest", "_where", "modules")

    def __init__(self, where: Where) -> None:
        self._where, self.modules = where, dict[nn.Module, None]()
        self._places: list[tuple[nn.Module, str, Tensor | None, int]] = []
        self._rest: list[tuple[nn.Module, str, Tensor | None, Tensor]] = []
        for module_slice in where.module_slices:
            self.modules.update(module_slice.assembly.modules)

    def take(self) -> None:
        """Make the modules this thread's. What comes back is what stands there now: of a call around, its leaves."""
        _locks.claim(self.modules, self)
        tensors = self._where.tensors
        numbers = dict(zip(map(id, tensors), range(len(tensors)), strict=True))
        for module_slice in self._where.module_slices:
            for module, name, _, parameter in module_slice.assembly.slots:
                key, now = id(parameter), module._parameters[name]
                if key in numbers:
                    self._places += [(module, name, now, numbers[key])]
                else:
                    self._rest += [(module, name, now, parameter)]

    def put(self, leaves: Sequence[Tensor]) -> None:
        """Put the leaves in place of the parameters of the point."""
        for module, name, _, number in self._places:
            module._parameters[name] = leaves[number]  # type: ignore[assignment]

    def put_others(self, still: Callable[[Tensor], Tensor]) -> None:
        """Put an unrecorded stand-in in place of each other parameter."""
        made: dict[int, Tensor] = {}
        for module, name, _, parameter in self._rest:
            if id(parameter) not in made:
                made[id(parameter)] = still(parameter)
            module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]

    def close(self) -> None:
        """Put the real parameters back, and let other threads have the modules. It may be run again."""
        for module, name, before, _ in [*self._places, *self._rest]:
            module._parameters[name] = before  # type: ignore[assignment]
        for module in self.modules:
            if "_flat_weights" in module.__dict__:  # the list that RNNs keep is refreshed by setting
                for name, parameter in [*module._parameters.items()]:
                    if isinstance(parameter, nn.Parameter) and parameter.is_leaf:  # others are refreshed by `forward`
                        setattr(module, name, parameter)
        _locks.release(self.modules, self)
        self._places, self._rest = [], []


# --- why a function cannot be called as it was: Python's own words name neither the point nor the way out -------------


def signature_error(
    error: TypeError, f: Any, points: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InputError | None:
    """The error to raise in the place of a TypeError, where the call itself failed; None where `f` raised it.

    Asked only once a call has failed: looking at a signature takes longer than many a function.
    """
    f = inspect.unwrap(f)  # a penalty calls its critic through an object of its own
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
    except (TypeError, ValueError):  # a builtin without one
        return None
    try:
        signature.bind(*points, *args, **kwargs)
    except TypeError as reason:
        given = len(points) + len(args)
        return InputError(
            f"f: cannot be called with the {given} positional argument{'s' if given > 1 else ''} that it is given here"
            f"{f' and {sorted(kwargs)}' if kwargs else ''}: {reason}. {_way_out(signature, points, args)}"
        )
    return None


def _way_out(signature: inspect.Signature, points: Sequence[Any], args: Sequence[Any]) -> str:
    wanted = sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in signature.parameters.values()
    )
    if len(points) > 1 and wanted < len(points):
        return f"It receives the {len(points)} points one by one: f(x, y), as in lambda x, y: (x * y).sum()."
    if len(points) == 1 and wanted > 1 and not args:
        point = points[0]
        if not isinstance(point, (Tensor, nn.Module)) and _tree.is_container(point):
            return (
                "A container is one point, which f receives as one argument: "
                "lambda p: ..., with p[0] or p['name'] inside. For mixed derivatives by two points: "
                "hodiff.cross_hessian(f, x, y)."
            )
        return "What f needs beside the point goes in args= or kwargs=: args=(data,)."
    return "f receives the point first, then args= and kwargs=."


# --- tensors made in inference mode, which cannot be saved for a backward pass ----------------------------------------


class NormalTensors(TorchFunctionMode):
    """Inside it, every operation gets ordinary copies of tensors made in inference mode (outside of that mode)."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the arguments, and call the operation."""
        return func(*_tree.tree_map(self._normal, args), **_tree.tree_map(self._normal, kwargs or {}))

    def _normal(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_inference():
            return value
        if id(value) not in self._copies:
            self._copies[id(value)] = value, value.clone()  # the original is held, so that its id stays its own
        return self._copies[id(value)][1]
