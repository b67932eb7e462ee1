"""The one place where a user's function is called.

A `Lending` is the state in which it runs: grad mode on, kernels that have second derivatives, the modules
of the point lent (see `_loans`), so that `f` sees leaves of ours and nothing of the user's is changed.
It stays until the last derivative pass has run. What comes out of it is a `Graph` (reverse mode) or a
series (Taylor mode); both go through `run`, and so through the same checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from hodiff._core import (
    _binding,
    _by_hand,
    _claims,
    _control_flow,
    _modes,
    _nesting,
    _refusals,
    _sharded,
    _switches,
    _translate,
    _versions,
)
from hodiff._core._call import Call
from hodiff._core._hooks import Hooks, watch_hooks, watch_modules
from hodiff._core._inference import NormalTensors
from hodiff._core._loans import ParameterLoan, StateLoan, cast
from hodiff._core._random_state import RandomState
from hodiff.errors import InputError

_control_flow.install()
_versions.where_forward_mode_begins(_nesting.note_forward_mode)

MARK = "_leaf_of_hodiff"
"""The attribute of a leaf of ours that says whose it is."""


class Ticket:
    """Whose leaf a tensor is: it is met again, in the graph of a later call, where `f` kept something.

    Attributes:
        open: Whether the evaluation still runs.
        detached: Whether its results are, so that nothing but a leftover leads to its leaves.
    """

    __slots__ = ("detached", "open")

    def __init__(self, detached: bool) -> None:
        self.open, self.detached = True, detached


class Lending:
    """The state in which the function of a call runs, until the last pass.

    Attributes:
        call: What was asked.
        ticket: The mark of its leaves.
        borrowed: The modules that are lent, the point's and those that `f` called.
        by_hand: The derivatives that `f` took itself, when it was called last; None where it took none.
        forward_mode: Whether PyTorch's forward mode was on as `f` began, or `f` used it.
        nests: Whether `f` makes calls of hodiff itself.
        hooks: Whether a tensor hook that `f` registered, or one of its modules', changed a gradient.
    """

    __slots__ = (
        "__weakref__",
        "_leaves",
        "_normal",
        "_parameters",
        "_ran",
        "_state",
        "_undo",
        "_watched",
        "borrowed",
        "by_hand",
        "call",
        "forward_mode",
        "hooks",
        "nests",
        "random",
        "ticket",
    )

    def __init__(self, call: Call, leaves: Sequence[Tensor] = ()) -> None:
        """With `leaves`, those stand at once in the place of the parameters of the point."""
        self.call, self._leaves = call, leaves
        self.ticket = Ticket(not call.create_graph)
        self._undo: list[Callable[[], object]] = []
        self._normal = self.nests = False
        self.by_hand: _by_hand.ByHand | None = None
        self.hooks = Hooks()

    # --- the state

    def __enter__(self) -> Lending:
        call, undo = self.call, self._undo
        self._ran = False
        try:
            # What an interrupt kept open: no Python code can prevent one between a `with` block and `__exit__`.
            _switches.when_lost(undo, self)
            undo += [partial(setattr, self.ticket, "open", False)]
            if _modes.absent.modes:
                _modes.take_off_absent()
            if torch.is_inference_mode_enabled():
                _modes.record(undo)
            if not torch.is_grad_enabled():
                undo += [_switches.InTime(torch._C._set_grad_enabled, False)]
                torch._C._set_grad_enabled(True)
            if call.order >= 2:
                _switches.plain_attention.enter(undo)
            if "torch._dynamo" in sys.modules:
                _switches.eager.enter(undo)
            self._state = StateLoan(call.cast)
            self.borrowed = self._state.attributes
            undo += [self._state.close]
            watch_modules.enter(undo)
            if call.order >= 2:
                watch_hooks.enter(undo)
            _nesting.enter(self, undo, differentiated=call.order > 0)
            if parametrize._cache_enabled:
                self._set_aside_cache()
            if call.where.owned:
                self._lend()
                if self._leaves:
                    self.put(self._leaves)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Undo everything, in reverse order; what fails does not keep the rest from being undone."""
        _switches.undo_all(self._undo)

    def also(self, switch: _switches.Counted) -> None:
        """One more switch, left with the rest."""
        switch.enter(self._undo)

    def _set_aside_cache(self) -> None:
        """Let `parametrize.cached()` fill a cache of this evaluation's own; there is one for all threads."""
        theirs: list[Any] = []

        def restore() -> None:
            for cache in theirs:
                parametrize._cache = cache
            _claims.release((parametrize,), self.ticket)

        self._undo += [restore]
        _claims.claim((parametrize,), self.ticket)
        theirs += [parametrize._cache]
        parametrize._cache = {}

    def _lend(self) -> None:
        """Borrow the modules of the point, with all their parameters, buffers and attributes."""
        self._parameters = ParameterLoan(self.call.where)
        self._undo += [self._parameters.close]
        self._parameters.take()
        if not self.call.create_graph:  # what is not differentiated need not be recorded
            self._parameters.put_others(self._still)
        self._borrow_point()

    def _borrow_point(self) -> None:
        for owned in self.call.where.owned:
            for module in owned.assembly.modules:
                if module not in self.borrowed:
                    self.borrow(module, root=module is owned.module)

    def _afresh(self) -> None:
        """What `f` left in buffers and attributes goes, so that another run begins as the first one did."""
        self._state.close()
        self._borrow_point()

    def _still(self, parameter: Tensor) -> Tensor:
        """A parameter that is not differentiated in: its value, unrecorded."""
        still = cast(parameter.clone() if parameter.is_inference() else parameter, self.call.cast)
        _pass_for(still, parameter)
        return still

    def borrow(self, module: nn.Module, *, root: bool = False) -> None:
        """Lend one module that `f` calls, whether it belongs to the point or not."""
        if _sharded.LOADED_BY in sys.modules and self.call.order >= 2 and not root:  # by inputs, a first one is right
            _sharded.check_modules((module,), "f")
        self._state.take(module, root=root)
        if "max_norm" in module.__dict__ and module.max_norm is not None and not self._is_point(module):
            self._copy_table(module)
        if module._backward_hooks and not isinstance(module, torch.jit.ScriptModule):
            self.hooks.of_module(module, self._state.put_back)

    def _is_point(self, module: nn.Module) -> bool:
        return any(module in owned.assembly.modules for owned in self.call.where.owned)

    def _copy_table(self, module: nn.Module) -> None:
        """Let an `Embedding(max_norm=...)` renormalise a copy of its table."""
        theirs: Any = module._parameters["weight"]
        copy = theirs.clone() if self.call.create_graph else theirs.detach().clone()
        _pass_for(copy, theirs)

        def restore() -> None:
            module._parameters["weight"] = theirs

        self._state.put_back += [restore]
        module._parameters["weight"] = copy

    # --- running f

    def leaves(self, given: Sequence[Tensor] | None = None) -> list[Tensor]:
        """A leaf for each tensor of the point, with its value; or `given` ones, with theirs."""
        call, ticket = self.call, self.ticket
        renormed = self._renormed() if call.where.owned else ()
        if given is None:
            found = _aliases(call.where.tensors, call.create_graph, call.cast, renormed)
        else:
            found = [leaf.clone() if index in renormed else leaf for index, leaf in enumerate(given)]
        for index, leaf in enumerate(found):
            leaf.__dict__[MARK] = ticket, index  # pyright: ignore[reportIndexIssue]
            _pass_for(leaf, call.where.tensors[index])
        self._watched = [leaf for index, leaf in enumerate(found) if index not in renormed] if renormed else found
        return found

    def _renormed(self) -> set[int]:
        """The numbers of leaves that `f` changes in place by itself: tables of `Embedding(max_norm=...)`."""
        tables = [m.weight for m in self._parameters.modules if "max_norm" in m.__dict__ and m.max_norm is not None]
        return {i for i, tensor in enumerate(self.call.where.tensors) if any(tensor is t for t in tables)}

    def at(self, arguments: Sequence[Any]) -> Any:
        """What `f` returns when `arguments` stand in the place of the point's tensors. Nothing is checked."""
        if self._ran:
            self._afresh()
        self._ran = True
        self.by_hand = None
        call = self.call
        if call.where.owned:
            self.put(arguments)
        argument = call.where.argument(arguments)
        if self._normal:
            with _modes.on(NormalTensors()):
                return call.what(*(argument if call.spread else (argument,)), *call.args, **call.kwargs)
        return call.what(*(argument if call.spread else (argument,)), *call.args, **call.kwargs)

    def put(self, leaves: Sequence[Any]) -> None:
        """Let the borrowed modules, where the point has any, have `leaves` for parameters."""
        if self.call.where.owned:
            self._parameters.put(leaves)

    def run(self, arguments: Sequence[Any], watched: Sequence[Tensor] | None = None) -> Any:
        """What `f` returns at `arguments`, once it is known that it changed none of the tensors `watched` in place."""
        watched = self._watched if watched is None else watched
        versions = [tensor._version for tensor in watched]
        try:
            value = self.at(arguments)
        except RuntimeError as error:
            if not self._normal and _translate.about_inference(error):
                self._normal = True  # tensors of inference mode that f brings along are copied, in another run of it
                self.restart()
                return self.run(arguments, watched)
            note = _translate.advice_for_f(error)
            if note:
                error.add_note(note)
            raise
        except TypeError as error:
            call = self.call
            argument = call.where.argument(arguments)
            ours = _binding.refused(error, call.what, argument if call.spread else (argument,), call.args, call.kwargs)
            if ours is None:
                raise
            raise ours from error
        if [tensor._version for tensor in watched] != versions:
            changed = next(i for i, version in enumerate(versions) if watched[i]._version != version)
            raise _refusals.changed_in_place(self._name_of(watched[changed]))
        return value

    def _name_of(self, leaf: Tensor) -> str:
        """What the caller calls a leaf."""
        mark = mark_of(leaf)
        return self.call.where.names[mark[1] if mark else 0]

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

    def restart(self) -> None:
        """Let `f` draw again what it drew."""
        self.random.restore()

    def drew_random(self) -> bool:
        """Whether `f` drew random numbers (from PyTorch's default generators)."""
        return self.random.moved()

    def again(self, leaves: Sequence[Tensor]) -> Any:
        """What `f` returns when it is called once more, with the same random numbers; they are not drawn twice."""
        now = RandomState.of(self.random.device)
        try:
            self.random.restore()
            return self.at(leaves)
        finally:
            now.restore()


def _pass_for(stand_in: Tensor, theirs: Tensor) -> None:
    """Let `isinstance(p, nn.Parameter)` say of a stand-in what it says of the user's tensor: `f` may ask."""
    if theirs.__class__ is nn.Parameter or "_is_param" in theirs.__dict__:
        stand_in.__dict__["_is_param"] = True  # pyright: ignore[reportIndexIssue]


def mark_of(leaf: Tensor) -> tuple[Ticket, int] | None:
    """Whose leaf a tensor is, and its number there; None for a tensor of the user's."""
    return leaf.__dict__.get(MARK)


def _aliases(
    tensors: Sequence[Tensor], create_graph: bool, dtype: torch.dtype | None, copied: Collection[int]
) -> list[Tensor]:
    """A leaf for each tensor. Inside a `torch.func` transform, where PyTorch forbids leaves of our own, raise."""
    try:
        if create_graph:
            torch.empty(0, device="cpu").requires_grad_()  # refused there, as the leaves of a detached result are
            return [
                _connected(tensor, index in copied).requires_grad_()
                if tensor.requires_grad
                else _leaf(tensor, dtype, index in copied)
                for index, tensor in enumerate(tensors)
            ]
        return [_leaf(tensor, dtype, index in copied) for index, tensor in enumerate(tensors)]
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise InputError(_nesting.INSIDE_A_TRANSFORM) from error


def _leaf(tensor: Tensor, dtype: torch.dtype | None, copied: bool) -> Tensor:
    """A leaf of its own, with the tensor's value."""
    _nesting.refuse_tangent(tensor)
    if copied or tensor.is_inference():
        tensor = tensor.clone()
    if dtype is not None:
        return cast(tensor, dtype).requires_grad_()
    return tensor.detach().requires_grad_()


def _connected(tensor: Tensor, copied: bool) -> Tensor:
    """A leaf that stands for the caller's tensor and is connected to it, where the result is differentiable."""
    if copied or tensor.is_inference():
        return tensor.clone()
    if tensor.is_leaf:
        return tensor.view_as(tensor)
    # An in-place operation in f must not reach the caller's tensor. PyTorch refuses it on a leaf's
    # view by itself, and on this one because `unbind` may return several.
    return tensor.unsqueeze(0).unbind()[0]
