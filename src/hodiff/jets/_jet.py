"""The jet, a tensor that carries a Taylor series, with the registry of its rules.

`Jet` is a tensor to everyone who asks (`isinstance`, shape, dtype), but holds no data of its own:
every operation on it goes to the rule of that name, which works on the coefficients with plain
PyTorch. So gradients by parameters, `vmap` around it and checkpointing need nothing of ours.
Whatever would slip past the rules (a kernel called on the jet itself) raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff._core._messages import CONSTANTS
from hodiff.errors import GraphError
from hodiff.jets._series import Expansion, Series, without_data

# --- operations: their names, their rules, the errors where none is -------------------------------
# Rules are kept by name, since one operation has several functions (`torch.add`, `Tensor.add`,
# `+`), and some functions are made anew at each look (`torch.Tensor.T`).


OTHER_ROUTE = 'Write it with other operations, or use method="reverse".'


class NoRule(GraphError):
    """An operation that Taylor mode cannot pass; the operators catch it to fall back as a whole."""

    def __init__(self, operation: str, why: str = "", way_out: str = OTHER_ROUTE) -> None:
        self.said = (
            f"Taylor mode has no rule for {operation}{': ' + why.rstrip('.') if why else ''}."
        )
        super().__init__(f"{self.said} {way_out}")
        self.operation = operation
        self.why = why


class ByNoRoute(NoRule):
    """An operation that no other route passes rightly either: the operators do not fall back."""


class NoDerivative(ByNoRoute):
    """An operation that PyTorch cannot differentiate, and takes for a constant silently."""

    def __init__(self, operation: str) -> None:
        super().__init__(
            operation,
            "PyTorch has no derivative of it and treats its result as a constant",
            "Write it with other operations, or as .detach() of the result if a constant is meant.",
        )


class NoConstants(TorchFunctionMode):
    """A context in which those operations raise, as in Taylor mode: for evaluations by a route that
    was chosen in its place.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything else through."""
        if (
            getattr(func, "__name__", "") in CONSTANTS
            and torch.is_grad_enabled()
            and any(getattr(arg, "requires_grad", False) for arg in args)
        ):
            raise NoDerivative(operation(func))
        return func(*args, **(kwargs or {}))


class JetRule(NamedTuple):
    """The action of one operation on jets: `apply(expansion, func, args, kwargs)`
    gives a series (or several).
    """

    kind: str
    apply: Callable[..., Any]


class Several(NamedTuple):
    """A result of several parts, and what to make of them."""

    parts: Sequence[Any]
    build: Callable[[Any], Any] = tuple


OPERATORS = str.split("add sub mul matmul pow div neg abs getitem gt lt ge le eq ne")

ALIASES = {
    **{f"__{name}__": name for name in OPERATORS},
    **{f"__r{name}__": name for name in ("add", "mul")},
    "__truediv__": "div",
    "__rsub__": "rsub",
    "__rdiv__": "rdiv",
    "__rtruediv__": "rdiv",
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


METADATA = frozenset(
    str.split(
        "size dim ndimension numel nelement is_floating_point is_complex "
        "element_size is_signed __hash__ is_inference is_conj is_neg is_shared "
        "is_sparse is_tensor"
    )
)


COMPLEX = frozenset(
    str.split(
        "add sub rsub neg mul div rdiv matmul __rmatmul__ mm bmm mv dot einsum linear sum "
        "mean clone contiguous to type type_as cpu cuda alias cfloat cdouble complex real imag "
        "conj conj_physical resolve_conj resolve_neg view_as_real view_as_complex view view_as "
        "reshape reshape_as flatten unflatten ravel permute transpose swapaxes swapdims t mT "
        "movedim moveaxis squeeze unsqueeze expand expand_as broadcast_to getitem select narrow "
        "index_select split chunk unbind cat stack roll flip pad constant_pad_nd repeat tile "
        "diagonal index_add index_copy new_zeros new_ones new_full new_empty zeros_like ones_like "
        "full_like empty_like eq ne isnan isinf isfinite detach"
    )
)
"""What is known to be right of complex coefficients: what is linear, or a product; and `fft_*`."""


class JetRules:
    """The rules of Taylor mode by name, and those who apply them.

    Attributes:
        known: The rules, by the name of the operation; the files of `jets.rules` register theirs.
        first: Those of some operations for first order in one direction, by one formula.
        read: Reads more of them, for an operation of that name; None once all are known.
        registered: The same two tables, by whether they are of first order, with the rules of
            files that are being read: those may not have all that they call.
        fallback: The rule for operations without one.
        dispatch: What an operation on jets is handed to; jets know it by this, and it knows the
            jets.
    """

    def __init__(self) -> None:
        self.known: dict[str, JetRule] = {}
        self.first: dict[str, JetRule] = {}
        self.read: Callable[[str], None] | None = None
        self.registered: dict[bool, dict[str, JetRule]] = {False: {}, True: {}}
        self.fallback: Callable[..., Any]
        self.dispatch: Callable[[Any, Any, Any], Any]

    def register(
        self, kind: str, *names: str
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a rule under the names of its operations."""

        def register(apply: Callable[..., Any]) -> Callable[..., Any]:
            self.registered[kind == "fused"].update(dict.fromkeys(names, JetRule(kind, apply)))
            return apply

        return register


RULES = JetRules()

rule = RULES.register

Formula = Callable[..., Any]


def by_formula(kind: str, *names: str) -> Callable[[Formula], Formula]:
    """Register a function of the operations' own arguments under their names."""

    def register(formula: Formula) -> Formula:
        def apply(expansion: Expansion, func: Any, args: Any, kwargs: Any) -> Any:
            kept = {name: kwargs[name] for name in kwargs if name not in OF_NO_EFFECT}
            made = formula(*args, **kept)
            if kind != "fused" or made is NotImplemented:
                return made
            value, tangent = made
            return [value, tangent.to(value.dtype).expand(value.shape).unsqueeze(0)]

        rule(kind, *names)(apply)
        return formula

    return register


first_order = partial(by_formula, "fused")
"""Register a formula for first order in one direction.

It takes its arguments apart by `value_and_tangent`, and gives such a pair; or NotImplemented, where
the rule for any order is to be asked.
"""


OF_NO_EFFECT = ("inplace", "out", "_stacklevel")
"""Arguments that are seen to before a rule is asked, or of no effect on values."""


def value_and_tangent(x: Any) -> tuple[Any, Any]:
    """The value of an argument, and its tangent, whose shape is the value's; None of a constant."""
    if not isinstance(x, Jet):
        return x, None
    value, tangent = x.series
    return value, tangent.squeeze(0).expand(value.shape)


def in_one_direction(expansion: Expansion, args: Any, kwargs: Any) -> bool:
    """Whether the formulas for first order apply: to plain real tensors, each with one tangent."""
    if expansion.order > 1:
        return False
    for jet in jets_among((*args, *kwargs.values())):
        value, tangent = jet.series
        if jet.expansion is not expansion or type(tangent) is not Tensor or len(tangent) != 1:
            return False
        if type(value) not in (Tensor, torch.nn.Parameter) or not value.is_floating_point():
            return False
        if torch.is_autocast_enabled(value.device.type):
            return False
    return True


def operation(func: Any) -> str:
    """The name under which a rule is kept."""
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name}:{func.__self__.__name__}"
    return ALIASES.get(name, name)


# --- the jet --------------------------------------------------------------------------------------


NOWHERE = torch.device("meta")
BY_A_FUNCTION = (
    "a Python autograd.Function",
    "its backward defines its derivative, which Taylor mode cannot see",
)
BELOW_PYTHON = "it is called below Python (TorchScript, torch.func, or C++)"


class Jet(Tensor):
    """A tensor with a Taylor series; see the module."""

    series: Series
    expansion: Expansion
    shared = False
    """Whether another tensor has the memory of the value:
    an operation in place would have to reach it as well.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation in Python comes through here."""
        if Zeros in types:
            args, kwargs = settled(args), settled(kwargs)
        kwargs = kwargs or {}
        try:
            return RULES.dispatch(func, args, kwargs)
        except NoRule as error:
            _note(error, (args, kwargs))
            raise

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Whatever reaches a kernel has slipped past the rules."""
        error = NoRule(str(func).removeprefix("aten."), BELOW_PYTHON)
        _note(error, (args, kwargs or {}))
        raise error

    def __repr__(self, **kwargs: Any) -> str:
        return (
            f"Jet(order {self.expansion.order} in {self.expansion.directions} direction(s), "
            f"value {self.series[0]!r})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.series[0], spec)

    def __deepcopy__(self, memo: Any) -> Jet:
        raise NoRule(
            "copy.deepcopy",
            "it makes a leaf constant; use .clone(), or .detach() if a constant is meant",
        )


def _note(error: NoRule, given: Any) -> None:
    """Let expansions know what is refused: `f` may catch it, and another error take its place."""
    for jet in jets_among(given):
        jet.expansion.refused = error


class Zeros(Tensor):
    """Zeros that were made by a jet: plain ones, until a jet is added into them, and then what that
    gives.

    Sums over neighbors are made so: `x.new_zeros(n).index_add_(0, i, x)`. What has been used may
    have views, which would not see the jet; and memory that is not read any more is filled with
    NaN, as code below Python might read it.
    """

    jet: Any = None
    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply an operation as to a plain tensor, unless it adds."""
        given, named = settled(args), settled(kwargs or {})
        name = operation(func)
        zeros = next((each for each in args if isinstance(each, Zeros)), None)
        adds = (
            name in ADDING and zeros is not None and args[0] is zeros and jets_among((given, named))
        )
        if zeros is not None and adds and not zeros.used and zeros.jet is None:
            zeros.jet = getattr(Tensor, name[:-1])(*given, **named)
            given[0].fill_(math.nan)
            return zeros.jet
        result = func(*given, **named)
        if zeros is not None:
            zeros.used = zeros.used or type(result) not in _ANSWERS
        return result


ADDING = ("scatter_add_", "index_add_", "index_put_", "add_")
_ANSWERS = (int, bool, torch.Size, torch.dtype, torch.device, torch.UntypedStorage, type(None))
"""Of operations that hand out no memory, but to ask where it lies."""


def wrap(series: Series, expansion: Expansion) -> Any:
    """A jet, whose metadata are its value's, but for the device: it has no data; the plain value
    where every coefficient is zero.

    It requires grad, so that an `autograd.Function` which is given it, and hands on something
    else, leads to it.
    """
    value = series[0]
    for coefficient in series[1:]:
        if coefficient is not None:
            break
    else:
        return value
    if expansion.max_bytes is not None:
        expansion.check_width(value)
    floats = value.dtype.is_floating_point or value.dtype.is_complex
    jet = without_data(Jet, value, device=NOWHERE, requires_grad=floats)
    jet.series = series
    jet.expansion = expansion
    return jet


def is_jet(value: Any) -> bool:
    """Whether `value` is a jet of any expansion."""
    return isinstance(value, Jet)


def series_of(value: Any, expansion: Expansion) -> Series:
    """The coefficients of an argument: its own, or those of a constant."""
    if isinstance(value, Jet) and value.expansion is expansion:
        return value.series
    return expansion.constant(value)


def belongs(value: Any, expansion: Expansion) -> bool:
    """Whether `value` is a jet of this very expansion."""
    return isinstance(value, Jet) and value.expansion is expansion


def jets_among(values: Iterable[Any]) -> list[Any]:
    """The jets among arguments, also inside tuples, lists and dicts."""
    jets = []
    for value in values:
        if isinstance(value, Jet):
            jets += [value]
        elif isinstance(value, (tuple, list)):
            jets += jets_among(value)
        elif isinstance(value, dict):
            jets += jets_among(value.values())
    return jets


def replaced(value: Any, by: Callable[[Any], Any], kind: type = Jet) -> Any:
    """Arguments with each jet (or such a tensor) replaced, also inside tuples, lists and dicts."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, by, kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: replaced(item, by, kind) for key, item in value.items()}
    return value


def _become(zeros: Zeros) -> Any:
    """The jet that zeros have become, or plain zeros."""
    return zeros.as_subclass(Tensor) if zeros.jet is None else zeros.jet


settled = partial(replaced, by=_become, kind=Zeros)
"""Arguments, or a result, with what `Zeros` have become."""


def value_of(value: Any) -> Any:
    """The plain tensor below all jets."""
    while isinstance(value, Jet):
        value = value.series[0]
    return value
