"""The jet: a tensor that carries a Taylor series, and the dispatch of operations to rules.

`Jet` is a tensor to everyone who asks (`isinstance`, shape, dtype), but holds no data of its own: every
operation on it goes to the rule of that name, which works on the coefficients with plain PyTorch. So
gradients by parameters, `vmap` around it and checkpointing need nothing of ours. Whatever would slip past
the rules (a kernel called on the jet itself) raises. `TracedJet` is the same without being a tensor, for
`torch.compile`, which cannot trace the making of the former.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.errors import GraphError
from hodiff.jets._series import Expansion, Series


class NoRule(GraphError):
    """An operation that Taylor mode cannot pass; the operators catch it to fall back as a whole."""

    def __init__(self, operation: str, why: str = "") -> None:
        super().__init__(
            f"Taylor mode has no rule for {operation}{': ' + why if why else ''}. Write it with other operations, or "
            f'use method="reverse".'
        )
        self.operation = operation
        self.why = why


class MixesSamples(NoRule):
    """An operation that mixes the samples of a batch: a field has no derivative per sample then, by any route."""

    def __init__(self) -> None:
        super().__init__(
            "BatchNorm in training mode", "it mixes the samples of a batch; use model.eval() or another norm"
        )


class Rule(NamedTuple):
    """How one operation acts on jets: `apply(expansion, func, args, kwargs)` gives a series (or several)."""

    kind: str
    apply: Callable[..., Any]


RULES: dict[str, Rule] = {}


def listed(text: str) -> list[str]:
    """Names of operations, from a list with blanks between."""
    return text.split()


FALLBACK: list[Callable[..., Any]] = []
"""The rule for operations without one; set by `rules.fallback`."""


def rule(kind: str, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule under the names of its operations."""

    def register(apply: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            RULES[name] = Rule(kind, apply)
        return apply

    return register


class Jet(Tensor):
    """A tensor with a Taylor series; see the module."""

    series: Series
    expansion: Expansion
    viewed: bool

    @staticmethod
    def __new__(cls, series: Series, expansion: Expansion, viewed: bool = False) -> Jet:
        """Wrap a series; the metadata are those of its value."""
        value = series[0]
        jet = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device)  # pyright: ignore[reportAttributeAccessIssue]
        jet.series = series
        jet.expansion = expansion
        jet.viewed = viewed
        return jet

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation in Python comes through here."""
        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever reaches a kernel has slipped past the rules."""
        raise NoRule(str(func).removeprefix("aten."), "it is called below Python (TorchScript, torch.func, or C++)")

    def __repr__(self, **kwargs: Any) -> str:
        return (
            f"Jet(order {self.expansion.order} in {self.expansion.directions} direction(s), value {self.series[0]!r})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.series[0], spec)

    def __deepcopy__(self, memo: Any) -> Jet:
        return Jet(list(self.series), self.expansion)


class TracedJet:
    """The jet that `torch.compile` can trace: not a tensor, but with its methods, and known to every operation."""

    def __init__(self, series: Series, expansion: Expansion, viewed: bool = False) -> None:
        self.series = series
        self.expansion = expansion
        self.viewed = viewed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for `Jet`."""
        return dispatch(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        """As of the value."""
        return self.series[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """As of the value."""
        return self.series[0].dtype

    @property
    def device(self) -> torch.device:
        """As of the value."""
        return self.series[0].device

    @property
    def ndim(self) -> int:
        """As of the value."""
        return self.series[0].ndim

    @property
    def T(self) -> Any:
        """As of a tensor."""
        return dispatch(torch.t, (self,), {})

    @property
    def mT(self) -> Any:
        """As of a tensor."""
        return dispatch(torch.transpose, (self, -2, -1), {})

    def size(self, *args: Any) -> Any:
        """As of the value."""
        return self.series[0].size(*args)

    def dim(self) -> int:
        """As of the value."""
        return self.series[0].ndim

    def numel(self) -> int:
        """As of the value."""
        return self.series[0].numel()

    def __len__(self) -> int:
        return self.series[0].shape[0]

    def __getattr__(self, name: str) -> Any:
        return functools.partial(_method, name, self)


def _method(name: str, jet: TracedJet, *args: Any, **kwargs: Any) -> Any:
    return dispatch(getattr(Tensor, name), (jet, *args), kwargs)


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    func = getattr(torch, name, None) or getattr(Tensor, f"__{name}__")

    def operate(self: Any, *others: Any) -> Any:
        return perform(name, (*others, self) if swapped else (self, *others), {}, func)

    return operate


def _refused(self: Any, other: Any) -> Any:
    raise NoRule("an augmented assignment (a += b) under torch.compile", "write a = a + b")


OPERATORS = listed("add sub mul matmul pow div neg abs getitem gt lt ge le eq ne")

for _name in OPERATORS:
    _slot = "truediv" if _name == "div" else _name
    setattr(TracedJet, f"__{_slot}__", _operator(_name))
    if _name in ("add", "sub", "mul", "matmul", "pow", "div"):
        setattr(TracedJet, f"__r{_slot}__", _operator(_name, swapped=True))
        setattr(TracedJet, f"__i{_slot}__", _refused)

JETS = (Jet, TracedJet)


def wrap(series: Series, expansion: Expansion, viewed: bool = False) -> Any:
    """A jet of the kind that the moment needs; the plain value where every coefficient is zero."""
    for coefficient in series[1:]:
        if coefficient is not None:
            break
    else:
        return series[0]
    if torch.compiler.is_compiling():
        return TracedJet(series, expansion, viewed)
    return Jet(series, expansion, viewed)


def is_jet(value: Any) -> bool:
    """Whether `value` is a jet of any expansion."""
    return isinstance(value, JETS)


def series_of(value: Any, expansion: Expansion) -> Series:
    """The coefficients of an argument: its own, or those of a constant."""
    if isinstance(value, JETS) and value.expansion is expansion:
        return value.series
    return expansion.constant(value)


def belongs(value: Any, expansion: Expansion) -> bool:
    """Whether `value` is a jet of this very expansion."""
    return isinstance(value, JETS) and value.expansion is expansion


def jets_among(values: Iterable[Any]) -> list[Any]:
    """The jets among arguments, also inside tuples, lists and dicts."""
    found = []
    for value in values:
        if isinstance(value, JETS):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += jets_among(value)
        elif isinstance(value, dict):
            found += jets_among(value.values())
    return found


def replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """Arguments with each jet replaced, also inside tuples, lists and dicts."""
    if isinstance(value, JETS):
        return by(value)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, by) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, by) for key, item in value.items()}
    return value


def value_of(value: Any) -> Any:
    """The plain tensor below all jets."""
    while isinstance(value, JETS):
        value = value.series[0]
    return value


_ALIASES = {
    **{f"__{name}__": name for name in OPERATORS},
    **{f"__r{name}__": name for name in ("add", "mul")},
    "__truediv__": "div",
    "__rsub__": "rsub",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
    "__rpow__": "rpow",
    "__rmatmul__": "rmatmul",
    "__getitem__": "getitem",
    "__setitem__": "setitem",
    "__eq__": "eq",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
}


NAMES: dict[Any, str] = {}
"""Functions of PyTorch and the names of their rules: `torch.compile` can look a function up, but not read its name."""


PYTHON_NAMES: list[tuple[Any, str]] = []


def index_functions() -> None:
    """Fill `NAMES` from what PyTorch exports, once all rules are there."""
    for home in (torch, Tensor, torch.nn.functional, torch.special, torch.linalg):
        for name in dir(home):
            found = getattr(home, name, None)
            if callable(found) and getattr(found, "__name__", None):
                key = operation(found)
                if key in RULES or key in METADATA:
                    if isinstance(found, types.FunctionType):
                        PYTHON_NAMES.append((found, key))
                    else:
                        NAMES[found] = key
    for name in OPERATORS:
        NAMES[getattr(operator, "truediv" if name == "div" else name)] = name


def _traced_name(func: Any) -> str:
    if func in NAMES:
        return NAMES[func]
    for python, name in PYTHON_NAMES:  # which Dynamo knows by identity, but not as keys
        if func is python:
            return name
    raise NoRule("an operation", "under torch.compile")


def operation(func: Any) -> str:
    """The name under which a rule is kept."""
    if torch.compiler.is_compiling():
        return _traced_name(func)
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name}:{func.__self__.__name__}"
    return _ALIASES.get(name, name)


METADATA = frozenset(
    listed(
        "size dim ndimension numel nelement stride storage_offset is_floating_point is_complex is_contiguous "
        "element_size get_device is_signed __hash__ is_inference is_conj is_neg is_shared is_sparse is_tensor"
    )
)

_FLAGS = {"requires_grad": True, "is_leaf": False, "grad": None, "_grad": None, "retains_grad": False}


class _Running(threading.local):
    """How deep this thread is inside rules, where a disabled grad mode is ours and not the user's."""

    depth = 0


_running = _Running()


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply an operation of PyTorch to arguments that hold jets."""
    name = operation(func)
    if name in METADATA:
        return _metadata(func, args, kwargs)
    if name.startswith("__") and ":" in name:
        return _attribute(func, name, args)
    return perform(name, args, kwargs, func)


def _metadata(func: Any, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return func(*replaced(args, lambda jet: jet.series[0]), **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _attribute(func: Any, name: str, args: Any) -> Any:
    how, attribute = name.split(":")
    if how != "__get__":
        raise NoRule(f"setting .{attribute}")
    if attribute in _FLAGS:
        return _FLAGS[attribute]
    if attribute == "grad_fn":
        raise NoRule("autograd inside f", "nest hodiff's field operators instead, which expand in series again")
    if attribute in ("T", "mT", "data"):
        return perform({"T": "numpy_T", "mT": "mT", "data": "detach"}[attribute], args, {}, func)
    if attribute in ("real", "H", "mH", "imag"):
        raise NoRule(f".{attribute}", "the tensor is real")
    return _metadata(func, args, {})


def perform(name: str, args: Any, kwargs: Any, func: Any) -> Any:
    """Apply the operation of that name, by its rule."""
    expansion = _latest(args, kwargs)
    if not torch.is_grad_enabled() and (torch.compiler.is_compiling() or not _running.depth):
        return _constant(name, func, args, kwargs)
    if kwargs.get("out") is not None:
        raise NoRule(f"{name}(out=...)", "a jet cannot be written into a tensor")
    if name == "setitem":
        raise NoRule("assignment to an index (h[...] = value)", "use torch.where or torch.cat")
    if name.endswith("_") and not name.endswith("__"):
        return _in_place(name, args, kwargs)
    if kwargs.get("inplace"):
        kwargs = {**kwargs, "inplace": False}
    found = RULES.get(name)
    if found is None:
        return _without_rule(name, func, expansion, args, kwargs)
    return _run(found, name, func, expansion, args, kwargs)


def _latest(args: Any, kwargs: Any) -> Expansion:
    """The latest expansion among the jets of the arguments: it handles the operation."""
    found = None
    for jet in jets_among(args):
        if found is None or jet.expansion.number > found.number:
            found = jet.expansion
    for jet in jets_among(kwargs.values()) if kwargs else ():
        if found is None or jet.expansion.number > found.number:
            found = jet.expansion
    if found is None:
        raise NoRule("an operation without a jet")
    return found


def _run(found: Rule, name: str, func: Any, expansion: Expansion, args: Any, kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return wrapped(found.apply(expansion, func, args, kwargs), expansion)
    if found.kind == "composite":  # made of operations on jets, which are counted themselves
        return found.apply(expansion, func, args, kwargs)
    start = time.perf_counter() if expansion.tally is not None else 0.0
    _running.depth += 1
    try:
        if expansion.record:
            result = found.apply(expansion, func, args, kwargs)
        else:
            with torch.no_grad():
                result = found.apply(expansion, func, args, kwargs)
    finally:
        _running.depth -= 1
    if expansion.tally is not None:
        expansion.tally.count(name, found.kind, time.perf_counter() - start)
    return wrapped(result, expansion)


class Several(NamedTuple):
    """A result of several parts, and what to make of them."""

    parts: Sequence[Any]
    build: Callable[[Any], Any] = tuple


class Viewed(NamedTuple):
    """A result that shares memory with the argument in plain PyTorch."""

    series: Series


def wrapped(result: Any, expansion: Expansion) -> Any:
    """What a rule returned, with series as jets."""
    if isinstance(result, list):
        return wrap(_checked(result), expansion)
    if isinstance(result, Viewed):
        return wrap(_checked(result.series), expansion, viewed=True)
    if isinstance(result, Several):
        return result.build([wrapped(part, expansion) for part in result.parts])
    return result


def _checked(series: Series) -> Series:
    if series[0].dtype.is_complex:
        raise NoRule("complex tensors", "use real arithmetic for real and imaginary parts")
    return series


def _constant(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation inside the user's `no_grad`: its result is a constant, by definition of f."""
    if torch.compiler.is_compiling():
        raise NoRule("a no_grad block under torch.compile", "use .detach()")
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename.endswith("function.py"):
            raise NoRule("a Python autograd.Function", "its backward defines its derivative, which a jet cannot see")
        frame = frame.f_back
    if name == "setitem" or (name.endswith("_") and not name.endswith("__")):
        raise NoRule(f"{name} inside torch.no_grad()", "it changes a value that is differentiated")
    return func(*replaced(args, value_of), **replaced(kwargs, value_of))


def _in_place(name: str, args: Any, kwargs: Any) -> Any:
    """`x += y` and its kin: the jet gets another series. Not where memory may be shared: others would not see it."""
    target = args[0]
    if name in ("requires_grad_", "retain_grad_"):
        raise NoRule(name)
    if not isinstance(target, JETS):
        raise NoRule(f"{name} of a jet into a tensor", "write a = a + b instead of a += b, with a new tensor")
    if target.viewed:
        raise NoRule(f"{name} on a view, or on a tensor that has views", "write a = a + b instead of a += b")
    func = getattr(torch, name[:-1], None) or getattr(Tensor, name[:-1], None)
    result = perform(_ALIASES.get(name[:-1], name[:-1]), args, kwargs, func)
    if not isinstance(result, JETS) or result.expansion is not target.expansion or result.shape != target.shape:
        raise NoRule(f"{name} that makes a variable of a constant, or the reverse", "write a = a + b instead of a += b")
    if result.dtype != target.dtype:
        raise NoRule(f"{name} that changes the dtype")
    target.series = result.series
    return target


def _without_rule(name: str, func: Any, expansion: Expansion, args: Any, kwargs: Any) -> Any:
    """A Python function of torch runs again, on jets; any other operation goes to the fallback."""
    if isinstance(func, types.FunctionType):
        body = _body(func)
        if body is None:
            raise NoRule(name)
        return body(*args, **kwargs)
    return _run(Rule("fallback", FALLBACK[0]), name, func, expansion, args, kwargs)


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any] | None:
    """A function of `torch` as a copy that does not look for overrides again; the original is not touched."""
    if func.__module__ not in ("torch.nn.functional", "torch.functional", "torch._tensor"):
        return None
    never = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    copy = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False
