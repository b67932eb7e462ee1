"""Lending modules to an evaluation: their parameters replaced by leaves, their buffers by clones.

Nothing of the user's may change, and no hook on a parameter may fire, so `f` sees aliases instead of
the real parameters and clones instead of the real buffers, until the last derivative pass has run
(an activation checkpoint runs `f`'s blocks again inside the passes).

A module on loan belongs to one thread at a time: the others wait, so that each evaluation has leaves
of its own, and starts from the user's buffers (the power iteration of spectral norm moves them).
Evaluations nested in one thread share a loan; the outermost one puts the originals back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from hodiff.errors import GraphError

_changed = threading.Condition()  # guards everything below; notified when a module is given back


class _Loan:
    """The buffers of one module while clones stand in for them."""

    __slots__ = ("module", "originals", "users")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.users = 0
        self.originals = {
            name: buffer
            for name, buffer in module._buffers.items()
            if buffer is not None and not buffer.requires_grad  # one that requires grad is an input of f
        }
        for name, buffer in self.originals.items():
            module._buffers[name] = buffer.detach().clone()

    def give_back(self) -> None:
        self.module._buffers.update(self.originals)


_loans: dict[int, _Loan] = {}
_claims: dict[int, tuple[int, int]] = {}  # module -> (owning thread, depth)
_waiting: dict[int, int] = {}  # thread -> the thread it waits for


class BufferLoan:
    """The modules whose buffers one evaluation has borrowed."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[int, nn.Module] = {}

    def take(self, module: nn.Module) -> None:
        """Put clones in place of the module's own buffers, unless this evaluation has done so."""
        if not module._buffers or id(module) in self._held:
            return
        with _changed:
            _claim([module])
            loan = _loans.get(id(module))
            if loan is None:
                loan = _loans[id(module)] = _Loan(module)
            loan.users += 1
        self._held[id(module)] = module

    def close(self) -> None:
        """Return everything; the last borrower puts the originals back."""
        if not self._held:
            return
        with _changed:
            for key in self._held:
                loan = _loans[key]
                loan.users -= 1
                if not loan.users:
                    loan.give_back()
                    del _loans[key]
            _release(self._held.values())
        self._held.clear()


class ParameterLoan:
    """The parameters of some modules, to be replaced wherever they occur, until closed."""

    __slots__ = ("_slots", "modules")

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.modules = modules_below(roots)
        with _changed:
            _claim(self.modules)
        self._slots = [
            (module, name, parameter)
            for module in self.modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def freeze(self, kept: Iterable[Tensor], still: Callable[[Tensor], Tensor]) -> None:
        """Put an unrecorded stand-in in place of each parameter that is not among `kept`."""
        ids = {id(parameter) for parameter in kept}
        rest = {id(parameter): parameter for _, _, parameter in self._slots if id(parameter) not in ids}
        self.put({key: still(parameter) for key, parameter in rest.items()})

    def put(self, replacements: Mapping[int, Tensor]) -> None:
        """Put a tensor in place of each parameter whose `id` is a key; the others stay as they are."""
        for module, name, parameter in self._slots:
            replacement = replacements.get(id(parameter))
            if replacement is not None:
                module._parameters[name] = replacement  # type: ignore[assignment]

    def close(self) -> None:
        """Put the real parameters back, and let other threads have the modules."""
        for module, name, parameter in self._slots:
            module._parameters[name] = parameter
            if isinstance(module, nn.RNNBase) and isinstance(parameter, nn.Parameter):
                setattr(module, name, parameter)  # also refreshes the flat list that RNNs keep
        with _changed:
            _release(self.modules)
        self._slots = []


def _claim(modules: Iterable[nn.Module]) -> None:
    """Make `modules` this thread's, waiting for the others; the lock is held."""
    modules = list(modules)
    if _claims:
        _wait_for(modules)
    me = threading.get_ident()
    for module in modules:
        _claims[id(module)] = (me, _claims.get(id(module), (me, 0))[1] + 1)


def _release(modules: Iterable[nn.Module]) -> None:
    """Undo one `_claim`; the lock is held."""
    for module in modules:
        owner, depth = _claims.pop(id(module))
        if depth > 1:
            _claims[id(module)] = (owner, depth - 1)
    _changed.notify_all()


@contextmanager
def reading(module: nn.Module) -> Iterator[None]:
    """A moment in which no other thread has replaced the module's parameters."""
    with _changed:
        if _claims:
            _wait_for(modules_below([module]))
        yield


def on_loan(modules: Iterable[nn.Module]) -> bool:
    """Whether any of the modules is lent to an evaluation just now, in this thread or another."""
    return any(id(module) in _claims for module in modules)


def modules_below(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Every module at or below `roots`, once."""
    found: dict[int, nn.Module] = {}
    stack = list(roots)
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            stack += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _wait_for(modules: list[nn.Module]) -> None:
    """Wait until no other thread has any of `modules`; the lock is held. A circle of waiting threads raises."""
    me = threading.get_ident()
    while True:
        owner = next((claim[0] for module in modules if (claim := _claims.get(id(module))) and claim[0] != me), None)
        if owner is None:
            return
        _waiting[me] = owner
        try:
            if _in_circle(me):
                raise GraphError(
                    "two threads differentiate in each other's modules and wait for each other. "
                    "Give both calls the same modules (a tuple of them), or use one lock around both."
                )
            _changed.wait()
        finally:
            del _waiting[me]


def _in_circle(start: int) -> bool:
    thread = _waiting.get(start)
    while thread is not None and thread != start:
        thread = _waiting.get(thread)
    return thread == start
