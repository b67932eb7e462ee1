"""The one place where a user's function is called, with all that it is lent.

An `EvaluationContext` is the state in which it runs: grad mode on, kernels that have second
derivatives, the modules of the point lent (see `_modules`), so that `f` sees leaves of ours and
nothing of the user's is changed. It stays until the last derivative pass has run. What comes out of
it is a `Graph` (reverse mode) or a series (Taylor mode); both go through `run`, and so through the
same checks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hodiff._core import (
    _arguments,
    _call,
    _hooks,
    _kernels,
    _locks,
    _messages,
    _refusals,
    _settings,
    _tree,
    _versions,
)
from hodiff._core._call import LEAF_TAG, Call, LeafTag, tag_of
from hodiff.errors import InputError

__all__ = ["EvaluationContext", "signature_error"]

_version, _is_cuda = attrgetter("_version"), attrgetter("is_cuda")


_SWITCHES = (_hooks.watch_modules,), (_hooks.watch_modules, _hooks.watch_hooks)
"""What is switched for a first derivative, and for those above."""


class EvaluationContext(_settings.Scope[Any]):
    """The state in which the function of a call runs, until the last pass.

    Attributes:
        call: What was asked.
        leaf_tag: The mark of its leaves.
        borrowed: Those modules, the point's and those that `f` called.
        by_hand: The derivatives that `f` took itself, when it was called last; None where it took
            none.
        forward_mode: Whether PyTorch's forward mode was on as `f` began, or `f` used it.
        nests: Whether `f` makes calls of hodiff itself.
        unheld: The Python Functions in its graph whose second derivatives nobody has verified yet,
            and their use.
        packs_blocks: Whether hooks, as an outer block's, pack what a block in `f` saves.
        hooks: Whether a tensor hook that `f` registered, or one of its modules', changed a
            gradient.
        undo: What undoes all that was switched.
    """

    forward_mode: bool
    borrowed: Mapping[nn.Module, Any] = MappingProxyType({})
    by_hand: _hooks.ByHand | None = None
    nests = packs_blocks = _normal = _ran = _whole = False
    _evaluation: Any = None
    _loan: Any = None
    _watched: Sequence[Tensor] = ()

    def __init__(self, call: Call, leaves: Sequence[Tensor] = ()) -> None:
        """Prepare an evaluation; `leaves` stand at once in place of the parameters of the point."""
        self.call, self._leaves = call, leaves
        self.leaf_tag, self.hooks = LeafTag(), _hooks.Hooks()
        self.unheld: dict[type, frozenset[object]] = {}
        self.leaf_tag.detached = not call.create_graph
        undo: _settings.Undo = []
        self.undo = self._undo = undo

    @property
    def loan(self) -> Any:
        """The loan of the modules, from the first that is met."""
        if self._loan is None:
            from hodiff._core._modules import StateLoan

            loan = StateLoan(self.call)
            self.undo.insert(1, loan.close)  # behind what tells that the context was lost
            self._loan, self.borrowed = loan, loan.attributes
        return self._loan

    # --- the state

    def _enter(self, undo: _settings.Undo) -> EvaluationContext:  # pyright: ignore[reportIncompatibleVariableOverride]
        call = self.call
        if _settings.absent.modes:
            _settings.take_off_absent()
        if torch.is_inference_mode_enabled():
            _settings.record(undo)
        if not torch.is_grad_enabled():
            undo += [_settings.InTime(_versions.set_grad_enabled, False)]
            _versions.set_grad_enabled(True)
        # The checkpoints of a tensor run again as they ran: without.
        if call.builds_graph and not _kernels.included():
            if _kernels.registered:
                undo += [_kernels.leave]
                _kernels.enter()
            elif call.order >= 2 or _kernels.available():
                _kernels.include(undo)
        _settings.enter(_SWITCHES[call.order >= 2], undo)
        # loaded since
        if _hooks.WATCH not in _settings.stance.holders and _versions.DYNAMO in sys.modules:
            _settings.eager.enter(undo)
        _call.enter(self, undo, differentiated=call.order > 0)
        if _versions.parametrizations["_cache_enabled"]:
            self._set_aside_cache()
        if call.where.module_slices:
            self._lend()
            if self._leaves:
                layout = call.where.layout
                self._parameters.put(
                    self._leaves if layout is None else layout.dressed(self._leaves)
                )
        if self._evaluation is not None:
            self._evaluation.put(self, undo, whole=self._whole)
        return self

    def close(self, last: bool = True) -> None:
        """Undo everything, in reverse order; what fails does not keep the rest from being undone.

        An interrupt may keep a step from its beginning, this one too: whoever calls it does so
        twice then.
        """
        try:
            undos = _settings.opened.undos
            if undos and undos[-1] is not self.undo:
                _settings.undo_inner(self.undo)
            _settings.undo_all(self.undo, last)
        except BaseException:
            _settings.undo_all(self.undo, last)
            raise

    def _set_aside_cache(self) -> None:
        """Let `parametrize.cached()` fill a cache of this evaluation's own;
        there is one for all threads.
        """
        theirs: list[Any] = []

        def restore() -> None:
            for cache in theirs:
                _versions.parametrizations[_versions.CACHE] = cache
            _locks.release((parametrize,), self.leaf_tag)

        self.undo += [restore]
        _locks.claim((parametrize,), self.leaf_tag)
        caches, name = _versions.parametrizations, _versions.CACHE
        theirs += [caches[name]]
        caches[name] = {}

    def _lend(self) -> None:
        """Borrow the modules of the point, with all their parameters, buffers and attributes."""
        from hodiff._core._modules import ParameterLoan, unrecorded

        self._parameters = ParameterLoan(self.call.where)
        self.undo += [self._parameters.close]
        # What is not differentiated need not be recorded.
        call = self.call
        self._parameters.take(None if call.create_graph else partial(unrecorded, dtype=call.cast))
        self._borrow_point()

    def _borrow_point(self) -> None:
        for module_slice in self.call.where.module_slices:
            self.loan.take(module_slice.assembly.modules, module_slice.module)

    def _afresh(self, arguments: Sequence[Any]) -> None:
        """Remove the values that `f` left in buffers and attributes, and its hooks on the leaves,
        so that another run at these arguments begins as the first one did.
        """
        for leaf in self._watched:
            if leaf._backward_hooks and any(leaf is x for x in arguments):
                leaf._backward_hooks.clear()
        if self._evaluation is not None:
            self._evaluation.end(self.loan)
            self._evaluation = None
        if self._loan is not None:
            self._loan.close()
        self._borrow_point()

    # --- running f

    def leaves(self, given: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A leaf for each tensor of the point, with its value; or `given` ones, with theirs."""
        call, tag = self.call, self.leaf_tag
        leaves = aliases(call, tangents=self.forward_mode) if given is None else [*given]
        for index, tensor in enumerate(call.where.tensors):
            attributes: Any = leaves[index].__dict__
            attributes[LEAF_TAG] = tag, index
            # as `mark_as_parameter`
            if tensor.__class__ is nn.Parameter or "_is_param" in tensor.__dict__:
                attributes["_is_param"] = True
        self._watched = leaves
        return leaves

    def at(self, arguments: Sequence[Any]) -> Any:
        """The result of `f` when `arguments` stand in place of the point's tensors.

        Nothing is checked.
        """
        if self._ran:
            self._afresh(arguments)
            self.by_hand = None
        self._ran = True
        call = self.call
        if call.where.layout is not None:
            arguments = call.where.layout.dressed(arguments)
        if call.where.module_slices:
            self._parameters.put(arguments)
        argument = call.where.argument(arguments)
        points = argument if call.unpack_point else (argument,)
        if self._normal:
            with _settings.on(NormalTensors()):
                return call.what(*points, *call.args, **call.kwargs)
        return call.what(*points, *call.args, **call.kwargs)

    def resumed(self, leaves: Sequence[Tensor]) -> EvaluationContext:
        """The state of the last run once more; with the leaves in their place,
        where there is no more to it.
        """
        return (
            EvaluationContext(self.call, leaves)
            if self._evaluation is None
            else self._evaluation.resumed(whole=True)
        )

    def repeatable(self, recompute: Callable[..., object]) -> Callable[..., object]:
        """A function that runs a checkpointed block again: by the same definitions, and while the
        modules have what they had.
        """
        from hodiff._core._modules import put, swapped_in

        evaluations = [context.evaluation() for context in _call.state.running]
        swapped = swapped_in()
        modes, begun = _settings.those_on(OfCall), self.loan.at_hand()
        tags = [context.leaf_tag for context in _call.state.running]
        self.packs_blocks = self.packs_blocks or _versions.hooks_on(True) is not None

        def resume(undo: _settings.Undo) -> None:
            _hooks.set_aside(undo, evaluations)
            for tag in tags:  # calls in the block meet their leaves, and those are not leftovers
                undo += [partial(setattr, tag, "open", tag.open)]
                tag.open = True
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
                if mode not in _settings.those_on(OfCall):
                    _settings.push_calls(mode, undo)

        def again(*args: Any) -> object:
            with _settings.Scope(resume):
                return recompute(*args)

        return again

    @property
    def runs_again(self) -> bool:
        """Whether passes will run a part of `f` again."""
        return self._evaluation is not None

    def stand_ins(self) -> list[Tensor]:
        """The tensors that a part of `f` may read without being given them: leaves,
        and parameters of modules.
        """
        parameters = (
            p for module in self.borrowed for p in module._parameters.values() if p is not None
        )
        return [*self._watched, *parameters]

    def evaluation(self) -> Any:
        """The run at hand, for what will run a part of it again."""
        if self._evaluation is None:
            from hodiff._core._modules import Evaluation

            self._evaluation = Evaluation(self)
            self.undo += [partial(self._evaluation.end, self.loan)]
        return self._evaluation

    def run(self, arguments: Sequence[Any], watched: Sequence[Tensor] | None = None) -> Any:
        """The result of `f` at `arguments`, once it is known that it changed none
        of the tensors `watched` in place.
        """
        watched = self._watched if watched is None else watched
        versions = [*map(_version, watched)]
        try:
            value = self.at(arguments)
        except (RuntimeError, ValueError) as error:
            kind = _messages.kind_of(error)
            if not self._normal and kind.startswith("inference"):
                # tensors of inference mode that f brings along are copied, in another run of it
                self._normal = True
                self.random.restore()
                return self.run(arguments, watched)
            if kind in _messages.ADVICE_FOR_F:
                error.add_note(_messages.ADVICE_FOR_F[kind])
            raise
        except (TypeError, AttributeError) as error:
            call = self.call
            argument = call.where.argument(arguments)
            points = argument if call.unpack_point else (argument,)
            ours = signature_error(error, call.what, points, call.args, call.kwargs)
            if ours is None:
                single = call.where.given_tree is _tree.LEAF
                plain = single and isinstance(argument, Tensor) and "not callable" not in str(error)
                known = call.unpack_point or plain or hasattr(error, "__notes__")
                if not known and _is_of(error, call.what, argument):
                    given = (
                        _arguments.kind(argument)
                        if single
                        else _tree.describe(call.where.given_tree)
                    )
                    error.add_note(f"hodiff: f receives x as one argument: {given}.")
                raise
            raise ours from error
        if [*map(_version, watched)] != versions:
            changed = next(
                i for i, version in enumerate(versions) if watched[i]._version != version
            )
            mark = tag_of(watched[changed])
            raise _refusals.changed_in_place(self.call.where.names[mark[1] if mark else 0])
        return value

    # --- random numbers

    def remember(self) -> None:
        """Note the random state that `f` begins with, the hooks, and whether Dynamo is there."""
        self._loaded = _versions.DYNAMO in sys.modules
        self.hooks.before = RemovableHandle.next_id
        tensors = self.call.where.tensors
        first = next(filter(_is_cuda, tensors)) if True in map(_is_cuda, tensors) else tensors[0]
        self.random = _settings.RandomState(first.device)

    @property
    def has_loaded_dynamo(self) -> bool:
        """Whether `f` was the first to load it: that was too late to switch it off."""
        return not self._loaded and _versions.DYNAMO in sys.modules

    def again(self, leaves: Sequence[Tensor]) -> Any:
        """The result of `f` when it is called once more, with the same random numbers;
        they are not drawn twice.
        """
        with self.random.replayed():
            return self.at(leaves)


def aliases(call: Call, *, tangents: bool) -> list[Tensor]:
    """A leaf for each tensor.

    Inside a `torch.func` transform, where PyTorch forbids leaves of our own, raise.
    """
    leaves, tensors = list[Tensor](), call.where.tensors
    try:
        if call.create_graph:
            # refused there, as the leaves of a detached result are
            torch.empty(0, device="cpu").requires_grad_()
        elif not (tangents or call.cast or any(map(Tensor.is_inference, tensors))):
            return [*map(Tensor.requires_grad_, map(Tensor.detach, tensors))]  # as nearly always
        for tensor in tensors:
            if call.create_graph and tensor.requires_grad:
                leaf = _connected(tensor)
            else:
                if tangents:
                    _call.refuse_tangent(tensor)
                leaf = tensor.clone() if tensor.is_inference() else tensor
                leaf = leaf.detach() if call.cast is None else _tree.cast(leaf, call.cast)
            leaves += [leaf.requires_grad_()]
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise InputError(_call.INSIDE_A_TRANSFORM) from error
    return leaves


def _connected(tensor: Tensor) -> Tensor:
    """A leaf that stands for the caller's tensor and is connected to it,
    where the result is differentiable.
    """
    if tensor.is_inference():
        return tensor.clone()
    if tensor.is_leaf:
        return tensor.view_as(tensor)
    # An in-place operation in f must not reach the caller's tensor. PyTorch refuses it on a leaf's
    # view by itself, and on this one because `unbind` may return several.
    return tensor.unsqueeze(0).unbind()[0]


# --- why a function cannot be called as it was: Python's own words name neither the point nor the
# way out


def signature_error(
    error: Exception, f: Any, points: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> InputError | None:
    """The error to raise in place of another, where the call itself failed; else None.

    Asked only once a call has failed: looking at a signature takes longer than many a function.
    """
    if not isinstance(error, TypeError):
        return None
    f = inspect.unwrap(f)  # a penalty calls its critic through an object of its own
    try:
        signature = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
    except (TypeError, ValueError):  # a builtin without one
        return None
    try:
        signature.bind(*points, *args, **kwargs)
    except TypeError as reason:
        return InputError(
            "f cannot be called with the "
            f"{_arguments.plural(len(points) + len(args), 'positional argument')} it is given here"
            f"{f' and {sorted(kwargs)}' if kwargs else ''}: {reason}. "
            f"{_way_out(signature, points, args)}"
        )
    return None


def _is_of(error: BaseException, f: Any, argument: Any) -> bool:
    """Whether an error is of the point, by its words, or of a line of `f` itself,
    and not of what that calls.
    """
    if type(argument).__name__ in str(error).replace("'", " ").split():
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is getattr(
        inspect.unwrap(f), "__code__", None
    )


def _way_out(signature: inspect.Signature, points: Sequence[Any], args: Sequence[Any]) -> str:
    wanted = sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in signature.parameters.values()
    )
    if len(points) > 1 and wanted < len(points):
        return (
            f"It receives the {len(points)} points one by one: f(x, y), as in lambda x, y: "
            "(x * y).sum()."
        )
    if len(points) == 1 and wanted > 1 and not args:
        point = points[0]
        if not isinstance(point, (Tensor, nn.Module)) and _tree.is_container(point):
            return (
                "A container is one point, which f receives as one argument: lambda p: ..., with "
                "p[0] or p['name'] inside. For mixed derivatives with respect to two points: "
                "hodiff.cross_hessian(f, x, y)."
            )
        return "Pass what f needs besides the point in args= or kwargs=: args=(data,)."
    return "f receives the point first, then args= and kwargs=."


# --- modes in which `f` runs ----------------------------------------------------------------------


class OfCall(TorchFunctionMode):
    """A mode of ours in which `f` runs, and each part of it that runs again."""


class NormalTensors(OfCall):
    """A context in which every operation gets ordinary copies of tensors made in inference mode
    (outside of that mode), which cannot be saved for a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the arguments, and call the operation."""
        if func is Tensor.is_inference:
            return func(*args)
        return func(
            *_tree.tree_map(self._normal, args), **_tree.tree_map(self._normal, kwargs or {})
        )

    def _normal(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_inference():
            return value
        if id(value) not in self._copies:
            # the original is held, so that its id stays its own
            self._copies[id(value)] = value, value.clone()
        return self._copies[id(value)][1]
