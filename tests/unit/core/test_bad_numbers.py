"""Numbers that no method takes, by the public name; and contexts that were never entered."""

import gc
import inspect
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hodiff

D = torch.float64
A, B, POINT = hodiff.MatrixOperator(torch.eye(2, dtype=D)), torch.ones(2, dtype=D), torch.zeros(2, dtype=D)
NET = torch.nn.Linear(2, 1)
DAMPED: dict[str, Callable[[Any], object]] = {
    "solve": lambda damping: hodiff.solve(A, B, damping=damping),
    "solve, a tensor": lambda damping: hodiff.solve(A, B, damping=torch.tensor(float(damping), dtype=D)),
    "LevenbergMarquardt": lambda damping: hodiff.LevenbergMarquardt(lambda m: m(B[None].float()), NET, damping=damping),
    "implicit.argmin": lambda damping: hodiff.implicit.argmin(
        lambda x: x.square().sum(), POINT, damping=damping
    ),
    "implicit.root": lambda damping: hodiff.implicit.root(lambda x: x, POINT, damping=damping),
    "implicit.fixed_point": lambda damping: hodiff.implicit.fixed_point(lambda x: 0 * x, POINT, damping=damping),
}  # fmt: skip


def damped() -> set[str]:
    """The public names that take `damping=`."""
    names = {name: getattr(hodiff, name) for name in hodiff.__all__}
    names |= {f"implicit.{name}": getattr(hodiff.implicit, name) for name in hodiff.implicit.__all__}
    return {name for name, value in names.items() if callable(value) and "damping" in _parameters(value)}


def _parameters(value: Any) -> Any:
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ()


def test_every_name_that_takes_damping_has_a_row() -> None:
    assert damped() == {name.partition(",")[0] for name in DAMPED}


def test_a_negative_shift_of_logdet_is_refused() -> None:
    with pytest.raises(hodiff.InputError, match=r"^shift: got -0\.1, expected a number of at least 0\.$"):
        hodiff.logdet(A, shift=-0.1)


@pytest.mark.parametrize("damping", [-1, -1e-9, math.nan])
@pytest.mark.parametrize("name", DAMPED)
def test_negative_damping_is_refused(name: str, damping: float) -> None:
    with pytest.raises(hodiff.InputError, match=r"^damping: got (-1|nan).*expected a"):
        DAMPED[name](damping)


RULES = [name for name in hodiff.rules.__all__ if name != "Rule"]
FREE = {"dampening", "betas", "maximize", "nesterov", "decoupled_weight_decay"}
"""What may be negative, as in PyTorch; and what is no number."""
NUMBERS = [
    (rule, option)
    for rule in RULES
    for option in inspect.signature(getattr(hodiff.rules, rule)).parameters
    if option not in FREE
]


@pytest.mark.parametrize("value", [-0.1, math.nan])
@pytest.mark.parametrize(("rule", "option"), NUMBERS)
def test_a_rule_refuses_what_torch_refuses(rule: str, option: str, value: float) -> None:
    kind = getattr(hodiff.rules, rule)
    message = rf"^{rule}: {option}: got {value}, expected a number of at least 0"
    for given in (value, {"weight": 0.1, "bias": value}):
        with pytest.raises(hodiff.InputError, match=message):
            kind(**{option: given})
    kind(**{option: 0.0}), kind(**{option: torch.tensor(value)})
    optimizer = getattr(torch.optim, rule)
    if math.isfinite(value) and option in inspect.signature(optimizer).parameters:
        with pytest.raises(ValueError, match="Invalid"):
            optimizer([torch.zeros(1, requires_grad=True)], **{option: value})


CONTEXTS: dict[str, Callable[[], Any]] = {
    "hodiff.graph.watch": hodiff.graph.watch,
    "hodiff.twice_differentiable": hodiff.twice_differentiable,
}
contexts = pytest.mark.parametrize("name", CONTEXTS)


@contexts
def test_a_context_that_is_not_entered_says_so(name: str) -> None:
    with pytest.warns(hodiff.HodiffWarning, match=rf"^{name}\(\) alone does nothing.*`with {name}\(\):`") as said:
        CONTEXTS[name]()
    assert said[0].filename == __file__


@contexts
def test_one_that_is_entered_says_nothing(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CONTEXTS[name]():
            pass
        context = CONTEXTS[name]()
        with context:
            pass
        del context
        gc.collect()


@pytest.mark.wide
@contexts
def test_nothing_at_the_end_of_python(name: str) -> None:
    program = f"import hodiff\ncontext = {name}()\nheld = [context]\nheld.append(held)\nprint('done')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
