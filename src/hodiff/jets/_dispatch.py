"""Dispatch: each operation of PyTorch on jets goes to the rule of its name, or raises."""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor

from hodiff._core import _tree, _versions
from hodiff._core._faults import is_fault
from hodiff.errors import HodiffError
from hodiff.jets._jet import (
    ALIASES,
    BY_A_FUNCTION,
    COMPLEX,
    METADATA,
    RULES,
    Jet,
    JetRule,
    NoRule,
    Several,
    in_one_direction,
    jets_among,
    operation,
    replaced,
    value_of,
    wrap,
)
from hodiff.jets._series import (
    Expansion,
    inside,
    surroundings,
)

_FLAGS = {
    "requires_grad": True,
    "is_leaf": False,
    "grad": None,
    "_grad": None,
    "retains_grad": False,
}


_LAYOUT = frozenset(("stride", "storage_offset", "is_contiguous"))
"""What a jet, which has no memory, answers as its value does."""


_PLACES = frozenset(
    str.split("device is_cpu is_cuda is_meta is_mps is_xpu is_xla is_mtia is_maia is_vulkan is_ipu")
)
"""Attributes that a jet, which lies nowhere, has of its value."""


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation of PyTorch to arguments that hold jets."""
    if not _versions.forward_mode_on():  # see `begin`
        _refuse_hidden()
    name = operation(func)
    if name in METADATA:
        return _metadata(func, args, kwargs)
    if name in _LAYOUT:
        return func(*replaced(args, value_of), **kwargs)
    if name.startswith("__") and ":" in name:
        return _attribute(func, name, args)
    return perform(name, args, kwargs, func)


RULES.dispatch = dispatch


def _refuse_hidden() -> None:
    """Raise inside the forward of an `autograd.Function`, or the user's inference mode."""
    if torch.is_inference_mode_enabled():
        raise NoRule(
            "torch.inference_mode() inside f",
            "its tensors have no derivatives",
            "Use torch.no_grad().",
        )
    raise NoRule(*BY_A_FUNCTION)


def _metadata(func: Any, args: Any, kwargs: Any) -> Any:
    with torch.DisableTorchFunctionSubclass():  # jets are tensors like others
        return func(*args, **kwargs)


def _attribute(func: Any, name: str, args: Any) -> Any:
    how, attribute = name.split(":")
    if how != "__get__":
        raise NoRule(f"setting .{attribute}")
    if attribute in _FLAGS:
        return _FLAGS[attribute]
    if attribute == "grad_fn":
        raise NoRule(
            "autograd inside f",
            "nest hodiff's field operators instead, which expand in series again",
        )
    if attribute in ("T", "mT", "data"):
        return perform({"T": "numpy_T", "mT": "mT", "data": "detach"}[attribute], args, {}, func)
    if attribute in ("real", "imag"):
        return perform(attribute, args, {}, getattr(torch, attribute))
    if attribute in ("H", "mH"):
        raise NoRule(f".{attribute}", "the tensor is real")
    return func(value_of(args[0])) if attribute in _PLACES else _metadata(func, args, {})


def perform(name: str, args: Any, kwargs: Any, func: Any) -> Any:
    """Apply the operation of that name, by its rule."""
    given = (*args, *kwargs.values()) if kwargs else args
    jets = jets_among(given)
    for jet in jets:
        if value_of(jet).dtype.is_complex:
            _check_complex(name)
    # the latest handles the operation
    expansion: Expansion = max(jets, key=attrgetter("expansion.number")).expansion
    if surroundings() != expansion.surroundings:
        raise NoRule(
            "a transform of torch.func or a tracer (make_fx, torch.jit.trace) inside f, "
            f"here of {name}"
        )
    expansion.meet(given)
    if not torch.is_grad_enabled() and not inside.rules:
        return _constant(name, func, args, kwargs)
    if name not in RULES.known and RULES.read is not None:
        RULES.read(name)
    if kwargs:
        if kwargs.get("out") is not None:
            raise NoRule(f"{name}(out=...)", "a jet cannot be written into a tensor")
        if kwargs.get("inplace") is True:
            return _in_place(f"{name}_", args, {**kwargs, "inplace": False}, func)
    if name == "setitem":
        raise NoRule("assignment to an index (h[...] = value)", "use torch.where or torch.cat")
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(name, args, kwargs)
    rule = RULES.known.get(name)
    if rule is None:
        return _without_rule(name, func, expansion, args, kwargs)
    kwargs = _versions.named_by_torch(kwargs) if kwargs else kwargs
    fused = RULES.first.get(name)
    if fused is not None and in_one_direction(expansion, args, kwargs):
        result = _run(fused, name, func, expansion, args, kwargs)
        if result is not NotImplemented:
            return result
    return _run(rule, name, func, expansion, args, kwargs)


def _run(rule: JetRule, name: str, func: Any, expansion: Expansion, args: Any, kwargs: Any) -> Any:
    # else made of operations on jets, which are counted themselves
    plain = rule.kind != "composite"
    expansion.operations += [name] if plain else []
    start = time.perf_counter() if expansion.counter is not None else 0.0
    recording = torch.is_grad_enabled()
    inside.rules += plain
    try:
        if plain and not expansion.record:
            _versions.set_grad_enabled(False)
        result = rule.apply(expansion, func, args, kwargs)
    except Exception as error:
        if isinstance(error, HodiffError) or not is_fault(error):
            raise
        _refuse_arguments(error, name, func, args, kwargs)
    finally:
        inside.rules -= plain
        _versions.set_grad_enabled(recording)
    if not plain:
        return _with_shares(result, args, kwargs)
    if expansion.counter is not None and result is not NotImplemented:
        expansion.counter(name, rule.kind, time.perf_counter() - start)
    if rule.kind in _FRESH and name != "einsum":  # of one operand it may be a view
        return wrapped(result, expansion, name)
    return _with_shares(wrapped(result, expansion, name), args, kwargs)


_FRESH = frozenset(("elementwise", "bilinear", "fused"))
"""The kinds of rules whose results are always new memory."""


def _with_shares(result: Any, args: Any, kwargs: Any) -> Any:
    """The result; it and the arguments are marked where they share memory,
    as their values do in plain PyTorch.
    """
    jets = jets_among((*args, *kwargs.values()) if kwargs else args)
    for part in [result] if isinstance(result, Tensor) else _tree.flatten(result)[0]:
        if isinstance(part, Tensor):
            memory = _memory(part)
            for jet in jets:
                if part is not jet and _memory(jet) == memory:
                    jet.shared = True
                    if isinstance(part, Jet):
                        part.shared = True
    return result


def _memory(value: Any) -> int:
    """The address of the value of a jet, or of a tensor; below a `vmap` around the call."""
    value = value_of(value)
    return _tree.memory_of(_versions.unwrapped(value) if _versions.is_wrapped(value) else value)


def _refuse_arguments(failed: Exception, name: str, func: Any, args: Any, kwargs: Any) -> NoReturn:
    """Raise where a rule has failed: the operation's own error, in the shapes that f knows;
    or that it has no rule.
    """
    try:
        func(*replaced(args, value_of), **replaced(kwargs, value_of))
    except Exception as error:
        raise error from None
    raise NoRule(name, f"with these arguments ({type(failed).__name__}: {failed})") from failed


def wrapped(result: Any, expansion: Expansion, name: str) -> Any:
    """A rule's result, with series as jets."""
    if isinstance(result, list):
        dtype = result[0].dtype
        if dtype.is_complex:
            _check_complex(name)
            result = [c if c is None or c.dtype.is_complex else c.to(dtype) for c in result]
        return wrap(result, expansion)
    if isinstance(result, Several):
        return result.build([wrapped(part, expansion, name) for part in result.parts])
    return result


def _check_complex(name: str) -> None:
    """Raise unless the rule is right of complex coefficients (the derivative is
    by a real variable).
    """
    if name not in COMPLEX and not name.startswith("fft_"):
        raise NoRule(f"{name} of complex tensors", "use .real and .imag, and real arithmetic")


def _constant(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation inside the user's `no_grad`: its result is a constant, by definition of f."""
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        raise NoRule(f"{name} inside torch.no_grad()", "it changes a value that is differentiated")
    return _with_shares(func(*replaced(args, value_of), **replaced(kwargs, value_of)), args, kwargs)


def _in_place(name: str, args: Any, kwargs: Any, func: Any = None) -> Any:
    """`x += y` and the like: the jet gets another series.

    Not where memory may be shared: others would not see it.
    """
    target = args[0]
    if name in ("requires_grad_", "retain_grad_"):
        raise NoRule(
            "autograd inside f",
            "nest hodiff's field operators instead, which expand in series again",
        )
    advice = (
        "write a = a + b instead of a += b, or the operation without its underscore, "
        "which gives a new tensor"
    )
    if not isinstance(target, Jet):
        raise NoRule(f"{name} of a jet into a tensor", advice)
    if target.shared:
        raise NoRule(f"{name} on a view, or on a tensor that has views", advice)
    func = func or getattr(torch, name[:-1], None) or getattr(Tensor, name[:-1], None)
    if func is None:
        raise NoRule(name, "write a new tensor instead")
    result = perform(ALIASES.get(name[:-1], name[:-1]), args, kwargs, func)
    if (
        not isinstance(result, Jet)
        or result.expansion is not target.expansion
        or result.shape != target.shape
    ):
        raise NoRule(
            f"{name} that turns a constant into a variable, or back",
            "write a = a + b instead of a += b",
        )
    if result.dtype != target.dtype:
        raise NoRule(f"{name} that changes the dtype")
    target.series = result.series
    return target


def _without_rule(name: str, func: Any, expansion: Expansion, args: Any, kwargs: Any) -> Any:
    """A Python function of torch runs again, on jets; any other operation goes to the fallback."""
    if isinstance(func, types.FunctionType):
        body = _body(func)
        if body is None or func in inside.bodies:  # one that calls itself would do so for ever
            raise NoRule(name)
        try:
            inside.bodies.append(func)
            return body(*args, **kwargs)
        finally:
            inside.bodies.pop()
    return _run(JetRule("fallback", RULES.fallback), name, func, expansion, args, kwargs)


_HOMES = {f.__module__ for f in (torch.nn.functional.relu, torch.functional.einsum, Tensor.norm)}


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any] | None:
    """A function of `torch` as a copy that does not look for overrides again;
    the original is not touched.
    """
    if func.__module__ not in _HOMES:
        return None
    looks = [name for name in func.__globals__ if name.startswith("has_torch_function")]
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(looks, lambda *args: False)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
