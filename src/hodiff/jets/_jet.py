"""The jet: a tensor that carries a Taylor series.

`Jet` is a tensor to everyone who asks (`isinstance`, shape, dtype), but holds no data of its own: every
operation on it goes to the rule of that name, which works on the coefficients with plain PyTorch. So
gradients by parameters, `vmap` around it and checkpointing need nothing of ours. Whatever would slip past
the rules (a kernel called on the jet itself) raises. `TracedJet` is the same without being a tensor, for
`torch.compile`, which cannot trace the making of the former.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hodiff.jets._registry import OPERATORS, RULES, NoRule
from hodiff.jets._series import Expansion, Series

NOWHERE = torch.device("meta")
BELOW_PYTHON = "it is called below Python (TorchScript, torch.func, or C++)"


class Jet(Tensor):
    """A tensor with a Taylor series; see the module."""

    series: Series
    expansion: Expansion
    shared: bool
    """Whether another tensor has the memory of the value: an operation in place would have to reach it as well."""

    @staticmethod
    def __new__(cls, series: Series, expansion: Expansion) -> Jet:
        """Wrap a series; the metadata are those of its value, but for the device: without data there is none."""
        value = series[0]
        jet = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=NOWHERE)  # pyright: ignore[reportAttributeAccessIssue]
        jet.series = series
        jet.expansion = expansion
        jet.shared = False
        return jet

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation in Python comes through here."""
        return RULES.dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever reaches a kernel has slipped past the rules."""
        name = str(func).removeprefix("aten.")
        for jet in jets_among((args, kwargs or {})):
            jet.expansion.refused = name
        raise NoRule(name, BELOW_PYTHON)

    def __repr__(self, **kwargs: Any) -> str:
        return (
            f"Jet(order {self.expansion.order} in {self.expansion.directions} direction(s), value {self.series[0]!r})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.series[0], spec)

    def __deepcopy__(self, memo: Any) -> Jet:
        raise NoRule("copy.deepcopy", "of a leaf it is a constant; use .clone(), or .detach() if a constant is meant")


class TracedJet:
    """The jet that `torch.compile` can trace: not a tensor, but with its methods, and known to every operation."""

    def __init__(self, series: Series, expansion: Expansion) -> None:
        self.series = series
        self.expansion = expansion

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As for `Jet`."""
        return RULES.dispatch(func, args, kwargs or {})

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
        return RULES.dispatch(torch.t, (self,), {})

    @property
    def mT(self) -> Any:
        """As of a tensor."""
        return RULES.dispatch(torch.transpose, (self, -2, -1), {})

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
    return RULES.dispatch(getattr(Tensor, name), (jet, *args), kwargs)


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    func = getattr(torch, name, None) or getattr(Tensor, f"__{name}__")

    def operate(self: Any, *others: Any) -> Any:
        return RULES.dispatch(func, (*others, self) if swapped else (self, *others), {})

    return operate


def _refused(self: Any, other: Any) -> Any:
    raise NoRule("an augmented assignment (a += b) under torch.compile", "write a = a + b")


for _name in OPERATORS:
    _slot = "truediv" if _name == "div" else _name
    setattr(TracedJet, f"__{_slot}__", _operator(_name))
    if _name in ("add", "sub", "mul", "matmul", "pow", "div"):
        setattr(TracedJet, f"__r{_slot}__", _operator(_name, swapped=True))
        setattr(TracedJet, f"__i{_slot}__", _refused)

JETS = (Jet, TracedJet)


def wrap(series: Series, expansion: Expansion) -> Any:
    """A jet of the kind that the moment needs; the plain value where every coefficient is zero."""
    for coefficient in series[1:]:
        if coefficient is not None:
            break
    else:
        return series[0]
    if expansion.limit is not None:
        expansion.admit(series[0])
    if torch.compiler.is_compiling():
        return TracedJet(series, expansion)
    return Jet(series, expansion)


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
