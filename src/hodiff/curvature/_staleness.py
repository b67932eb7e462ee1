"""Whether a point is still the one that was evaluated: its modules, their state, its values."""

from __future__ import annotations

import dis
import numbers
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache, partial
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _locks, _versions
from hodiff._core._where import Where
from hodiff.errors import GraphError, HodiffWarning, RandomnessWarning


class Modules:
    """The modules of a point, each by its mode, its hooks, and its parameters and parts."""

    def __init__(self, where: Where) -> None:
        with _locks.lock:
            for each in where.module_slices:  # after it no other thread puts leaves in
                _locks.wait_for(each.module)
            self._assemblies = {module: _assembly(module) for module in _modules_of(where)}

    def check(self) -> None:
        """Raise where a module is put together otherwise than it was."""
        # what is lent just now is looked at another time; what is not, stays so while it is read
        with _locks.lock:
            known = self._assemblies
            if _locks.claimed(known) or known == {m: _assembly(m) for m in known}:
                return
        raise GraphError(
            "the model has changed since the operator was made: a parameter, a buffer, a "
            "submodule or its forward was replaced, a hook was added or removed, or train() or "
            "eval() was called. H.refresh() evaluates it again."
        )


def _modules_of(where: Where) -> set[nn.Module]:
    """The modules at or below those of a point."""
    return {module for each in where.module_slices for module in each.assembly.modules}


def _assembly(module: nn.Module) -> tuple[Any, ...]:
    return (
        module.training,
        module.forward,
        *module._forward_pre_hooks,
        None,  # ends the ones
        *module._forward_hooks,
        *map(id, module._parameters.values()),
        *map(id, module._modules.values()),
        *map(id, module._buffers.values() if module._buffers and _uses_buffers(module) else ()),
    )


def _refuse(changed: list[str], what: str = "parameters have") -> None:
    if changed:
        raise GraphError(
            f"{what} changed since the operator was evaluated "
            f"({', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}). "
            "H.refresh() evaluates it at the new ones."
        )


# --- what functions read besides their arguments --------------------------------------------------


_EMPTY = CellType()


def variables(f: Any, *, assigned: bool = False) -> dict[str, tuple[Any, str, Any]]:
    """The variables that a function reads besides its arguments, by name: the cell or the dict that
    has it, its key there, its value.

    Its closure, the globals and the attributes of its own object that its code names, and what a
    `functools.partial` holds; what it assigns itself only if `assigned`.
    """
    held: dict[str, Any] = {}
    given: dict[str, Any] = {}
    if isinstance(f, partial):
        held, given = {f"argument {n}": value for n, value in enumerate(f.args, 1)}, f.keywords
        f = f.func
    f = f.forward if isinstance(f, nn.Module) else f
    f = f if hasattr(f, "__code__") else f.__call__  # of an object
    owner, code = getattr(f, "__self__", None), getattr(f, "__code__", None)
    held["self"] = owner
    spaces = [("", held, held), ("", given, given)]
    cells: Iterable[tuple[str, Any]] = ()
    names: dict[str, Any] = {}
    if code is not None:
        names, own = _names(code, assigned=assigned), getattr(owner, "__dict__", {})
        spaces += [("self.", own, names["ATTR"]), ("", f.__globals__, names["GLOBAL"])]
        cells = zip(code.co_freevars, f.__closure__ or (), strict=True)
    return {
        prefix + name: (space, name, space[name])
        for prefix, space, read in spaces
        for name in read
        if name in space
    } | {
        name: (cell, "", cell.cell_contents)
        for name, cell in cells
        if name in names["DEREF"] and cell != _EMPTY
    }


@lru_cache(1024)
def _names(code: CodeType, *, assigned: bool) -> dict[str, set[str]]:
    """The names that code reads outside of itself, by where; nested functions' too."""
    steps, parts = list[dis.Instruction](), [code]
    for part in parts:
        steps += dis.get_instructions(part)
        parts += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    stored = {
        step.argval
        for step in steps
        if step.opname in ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")
    }
    read = {
        kind: {step.argval for step in steps if step.opname == f"LOAD_{kind}"}
        for kind in ("ATTR", "GLOBAL")
    }
    read["DEREF"] = {*code.co_freevars}
    return read if assigned else {kind: names - stored for kind, names in read.items()}


class Values:
    """The values of a point's tensors, as they were; and what functions read besides: variables by
    their identity, tensors as those of the point.

    A module counts with its parameters and buffers; one of the point with those that are no part
    of the point.
    """

    def __init__(self, where: Where, functions: Sequence[Any] = ()) -> None:
        self._own: dict[Any, str] = {}
        self._places = [place for f in functions for place in variables(f).items()]
        values = [(name, value) for name, (_, _, value) in self._places]
        parts = [
            (name, p)
            for name, value in values
            for p in (value if isinstance(value, tuple) else (value,))
        ]
        points = _modules_of(where)
        roots = [(name, root) for name, root in parts if isinstance(root, nn.Module)]
        below = {
            module: name
            for name, root in roots
            for module in root.modules()
            if module not in points
        }
        # parts of sharded models come and go
        inner = dict.fromkeys(points, "the model's state") if where.layout is None else {}
        # an enclosing call's leaves stand in what is claimed now
        below, inner = ({} if _locks.claimed(modules) else modules for modules in (below, inner))
        self._modules = {module: (name, _assembly(module)) for module, name in below.items()}
        state = [(name, x) for module, name in (inner | below).items() for x in _state(module)]
        self._point = dict(zip(map(id, where.tensors), where.names, strict=True))
        devices: dict[torch.device, dict[int, tuple[str, Tensor]]] = {}
        for name, x in [*zip(where.names, where.tensors, strict=True), *parts, *state]:
            if isinstance(x, Tensor):
                devices.setdefault(x.device, {}).setdefault(id(x), (name, x))
        self._tensors = [
            ([*known.items()], Fingerprint([x for _, x in known.values()], self._point))
            for known in devices.values()
        ]

    def settle(self) -> None:
        """Leave out what has changed since besides the point: the functions did that themselves,
        as they ran.
        """
        self._own = {key: n for key, n in self._changed().items() if key not in self._point}

    def check(self) -> None:
        """Raise where PyTorch has seen a tensor change, or it has other values, however they came
        there; or where something is another now.
        """
        changed = {key: n for key, n in self._changed().items() if key not in self._own}
        if changed:
            _refuse([self._point[key] for key in changed if key in self._point])
            if not _locks.claimed(self._modules):  # else an enclosing call's leaves stand there
                names = [*dict.fromkeys(changed.values())]
                _refuse(names, "what the function reads besides its arguments has")

    def _changed(self) -> dict[Any, str]:
        """The values that are others now, with the names of variables;
        one that was deleted is as it was.
        """
        changed: dict[Any, str] = {}
        for pairs, fingerprint in self._tensors:
            changed |= {pairs[n][0]: pairs[n][1][0] for n in fingerprint.changed()}
        for name, (holder, key, value) in self._places:
            now = value
            if key:
                now = holder.get(key, value)
            elif holder != _EMPTY:
                now = holder.cell_contents
            if now is not value and not same(now, value):
                changed[id(holder), key] = name
        return changed | {
            m: name for m, (name, assembly) in self._modules.items() if _assembly(m) != assembly
        }


def _state(module: nn.Module) -> list[Tensor | None]:
    return [
        *module._parameters.values(),
        *(module._buffers.values() if _uses_buffers(module) else ()),
    ]


def same(now: Any, before: Any) -> bool:
    """Whether two objects are one, or equal numbers, strings, or tuples of such."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(same, now, before))
    return isinstance(now, (numbers.Number, str)) and now == before


# --- what the modules of a point compute with besides parameters ----------------------------------


def warn_random(where: Where) -> None:
    """Say that a function was seen to draw."""
    warnings.warn(
        f"the function draws random numbers, so this operator is that of one draw, held fixed "
        f"until H.refresh().{culprits(where)} For a deterministic one, use model.eval().",
        RandomnessWarning,
        stacklevel=_arguments.outside(),
    )


def culprits(where: Where) -> str:
    """The modules that are known to draw random numbers, or to mix samples, in training mode."""
    changed = [
        f"{name or 'the model'} ({type(module).__name__})"
        for module_slice in where.module_slices
        for name, module in module_slice.module.named_modules()
        if module.training and _varies(module)
    ]
    return f" In training mode: {', '.join(changed[:4])}." if changed else ""


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _varies(module: nn.Module) -> bool:
    if isinstance(module, BATCH_NORMS):
        return True
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    return isinstance(rate, float) and rate > 0


def buffers_of(where: Where) -> list[Tensor]:
    """The buffers that outputs depend on; running statistics only where they are used."""
    return [
        buffer
        for module_slice in where.module_slices
        for module in module_slice.module.modules()
        if _uses_buffers(module)
        for buffer in module.buffers(recurse=False)
        if buffer.dtype.is_floating_point
    ]


def _uses_buffers(module: nn.Module) -> bool:
    return not (module.training and "track_running_stats" in module.__dict__)


def warn_buffers(odd: Sequence[int]) -> None:
    """Say that these ranks have other buffers than rank 0."""
    ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    warnings.warn(
        f"process_group: buffers of {ranks} differ from those of rank 0 (running statistics?), so "
        f"the ranks evaluate different models. Broadcast them: torch.distributed.broadcast(b, 0) "
        f"for each b in model.buffers().",
        HodiffWarning,
        stacklevel=_arguments.outside(),
    )


# --- a fingerprint of tensors' values -------------------------------------------------------------
# Of a small tensor it is the bits of all entries; of a large one those of some entries, spread
# evenly, and sums of all bits as integers, by columns of a table: exact, the same with any number
# of threads, and such that NaN does not confuse. A change that cancels in one sum (signs of two
# entries, a doubled and a halved one) is seen unless its entries lie a multiple of the table's
# width apart.


SMALL = 1024
"""Up to so many entries all of them are compared."""
_SAMPLED = 64
_WIDTH = 1021  # a prime, so that rows and blocks of a matrix do not meet in one column
_ROWS = 1024  # at most, of what is read beside the point: data may be large, a product is not
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Some tensors as they were; `changed` looks again, through views made once.

    Reading all entries costs about what copying the tensors would, less than any product with a
    vector. So tensors of the `point` (by their identities) are read whole; others may be much
    larger, and of those some rows are.
    """

    def __init__(self, tensors: Sequence[Tensor], point: Container[int]) -> None:
        self._tensors: list[tuple[Tensor, Callable[[], int]]] = []
        self._entries: list[Tensor] = []
        self._summed: list[Tensor] = []
        self._owners: list[int] = []  # of each entry, then of each sum
        summed: list[int] = []
        for number, tensor in enumerate(tensors):
            bits = _bits(tensor)
            self._tensors.append((tensor, int if bits is None else tensor.data_ptr))
            if bits is None:
                continue
            entries = [bits]
            if len(bits) > SMALL:
                whole = len(bits) // _WIDTH * _WIDTH
                table = bits[:whole].view(-1, _WIDTH)
                step = 1 if id(tensor) in point else len(table) // _ROWS + 1
                self._summed.append(table[::step])
                summed += [number] * _WIDTH
                entries = [bits[:: len(bits) // _SAMPLED | 1], bits[whole:]]
            self._entries += entries
            self._owners += [number] * sum(map(len, entries))
        self._owners += summed
        self._before = self._now()

    def _now(self) -> tuple[list[tuple[int, int]], Tensor]:
        """The number of changes of each tensor that PyTorch has seen, and the place of its memory;
        and the bits of all.
        """
        places = [
            (0 if tensor.is_inference() else tensor._version, place())
            for tensor, place in self._tensors
        ]
        # In their own width, where the sum wraps around: a wider one is thirty times slower.
        bits = self._entries + [table.sum(0, dtype=table.dtype) for table in self._summed]
        return places, torch.cat(bits) if bits else torch.empty(0, device="cpu")

    def changed(self) -> list[int]:
        """The numbers of the tensors that differ from those that were."""
        (places, bits), (known, before) = self._now(), self._before
        if places != known:
            return [n for n, place in enumerate(places) if place != known[n]]
        if torch.equal(bits, before):
            return []
        differing = (bits != before).nonzero().flatten().tolist()
        return sorted({self._owners[place] for place in differing})


def _bits(tensor: Tensor) -> Tensor | None:
    """The memory of a tensor as a line of integers, a view; None where there is none,
    as of a negated view.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    odd = tensor.is_nested or tensor.is_quantized or any(getattr(tensor, "names", ()))
    odd = odd or tensor.is_neg() or tensor.is_conj() or _versions.is_wrapped(tensor)
    if odd or not tensor.numel() or not tensor.data_ptr():  # freed, of zeros, or without data
        return None
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = tensor.view(_INTEGERS[tensor.element_size()])
    if bits.is_contiguous():
        return bits.view(-1)
    # a transposed, or channels-last one
    order = sorted(range(bits.ndim), key=bits.stride, reverse=True)
    turned = bits.permute(order)
    return turned.reshape(-1) if turned.is_contiguous() else None
