"""A user's names may hold control characters: no terminal is given them raw."""

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff

BAD = "a\x1b[31m\x07b"
X = torch.ones(2)


def model() -> nn.Module:
    m = nn.Module()
    for name in (BAD, "ok"):
        m.register_parameter(name, nn.Parameter(torch.ones(2)))
    return m


def squared(x: Tensor) -> Tensor:
    kind: Any = type(BAD, (torch.autograd.Function,), {"forward": forward, "backward": backward})
    return kind.apply(x).sum()


@staticmethod
def forward(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return x**2


@staticmethod
def backward(ctx: Any, gradient: Tensor) -> Tensor:
    return 2 * gradient * ctx.saved_tensors[0]


def stale() -> Any:
    m = model()
    H = hodiff.HessianOperator(lambda m: (getattr(m, BAD) ** 3).sum(), m)
    _ = H @ torch.ones(4)
    with torch.no_grad():
        getattr(m, BAD).mul_(2)
    return H @ torch.ones(4)


def given() -> Tensor:
    return squared(X.clone().requires_grad_())


SAID: dict[str, Callable[[], Any]] = {
    "near names": lambda: hodiff.select(model(), "ax[31"),
    "all names": lambda: hodiff.select(model(), "zzz"),
    "strict=": lambda: hodiff.grad(lambda m: m.ok.sum(), model(), strict=True),
    "a stale operator": stale,
    "a wrong derivative": lambda: hodiff.check_derivatives(
        lambda m: getattr(m, BAD).detach().square().sum() + (getattr(m, BAD) * m.ok).sum(), model()
    ),
    "a Function": lambda: hodiff.hvp(squared, X, X),
    "inspect": lambda: hodiff.graph.inspect(given()),
    "inspect, in a notebook": lambda: hodiff.graph.inspect(given())._repr_html_(),
    "predict": lambda: hodiff.graph.predict(given()),
}


@pytest.mark.parametrize("name", SAID)
def test_names_are_shown_in_printable_signs(name: str) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            shown = str(SAID[name]())
        except hodiff.HodiffError as error:
            shown = "".join(traceback.format_exception_only(error))
    shown += "".join(warnings.formatwarning(each.message, each.category, "", 1) for each in warned)
    assert shown and not {"\x1b", "\x07"} & {*shown}
