"""Smooth functions that PyTorch takes for constants: refused where each call is seen, named wherever one asks."""

import inspect
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _messages
from hodiff._core._substitutes import _REPLACED
from tests.meta.source import ROOT

D = torch.float64
X = torch.tensor([0.3, 0.7], dtype=D)


def function(name: str) -> Callable[[Tensor], Tensor]:
    """One of them as a function of a vector, with values like its argument's."""
    if name in ("linspace", "logspace"):
        return lambda x: getattr(torch, name)(x[0], x[1], 2, dtype=D)
    found = getattr(torch.special, name.removeprefix("special_"))
    return (lambda x: found(x, 3)) if "polynomial" in name else found


def mixed(name: str) -> Callable[[Tensor], Tensor]:
    """Beside another path, so that the result has a graph."""
    return lambda x: (function(name)(x) + x**3).sum()


@pytest.mark.parametrize("name", _messages.CONSTANTS)
def test_the_list_holds_no_other(name: str) -> None:
    """Each moves with its argument, and PyTorch says that it does not."""
    f, x = function(name), X.clone().requires_grad_()
    assert not f(x).requires_grad
    assert float(((f(X + 1e-4) - f(X)) / 1e-4).abs().max()) > 1e-3


@pytest.mark.parametrize("name", _messages.CONSTANTS)
def test_refused_by_name_where_each_call_is_seen(name: str) -> None:
    f = mixed(name)
    for call in (
        lambda: hodiff.grad(lambda x: (hodiff.hvp(f, x, X) * X).sum(), X),
        lambda: hodiff.hvp(f, X, X, create_graph=True),
    ):
        with pytest.raises(hodiff.GraphError, match=rf"{name} as a constant, although it is smooth"):
            call()
    with pytest.raises(hodiff.GraphError, match=name):
        hodiff.laplacian(lambda x: f(x), X, batch_ndim=0)


@pytest.mark.parametrize("name", _messages.CONSTANTS)
def test_a_constant_that_is_meant_stays_one(name: str) -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = function(name)(x)
        return ((constant + function(name)(x.detach())) * x**4).sum()

    constant = 2 * function(name)(X)
    third = hodiff.grad(lambda x: (hodiff.hvp(f, x, X) * X).sum(), X)
    torch.testing.assert_close(third, 24 * constant * X**3)


@pytest.mark.parametrize("name", _messages.CONSTANTS)
def test_check_derivatives_names_it(name: str) -> None:
    way = _messages.CONSTANTS[name]
    with pytest.raises(hodiff.DerivativeError, match=rf"no derivative of {name}, smooth as it is") as caught:
        hodiff.check_derivatives(mixed(name), X, order=1, directions=1, generator=torch.Generator().manual_seed(0))
    assert way in str(caught.value) and "test_constants.py" in str(caught.value)


def declared(message: str, way: str) -> bool:
    """Whether a message says what PyTorch does not know, and what to write; its lines wrap."""
    said = " ".join(message.split())
    return "PyTorch declares no derivative" in said and way in said


@pytest.mark.parametrize("name", _messages.CONSTANTS)
def test_explanations_name_it(name: str) -> None:
    way = _messages.CONSTANTS[name]
    with pytest.raises(hodiff.GraphError, match="carries no graph") as caught:
        hodiff.grad(lambda x: function(name)(x).sum(), X)
    assert declared(str(caught.value), way)
    with hodiff.graph.watch():
        x = X.clone().requires_grad_()
        loss = function(name)(x).sum()
        with pytest.raises(hodiff.GraphError, match="carries no graph") as caught:
            hodiff.grad(loss, x)
    assert declared(str(caught.value), way)
    with pytest.raises(RuntimeError, match="does not require grad") as failed, hodiff.graph.watch():
        function(name)(x).sum().backward()
    assert declared(failed.value.__notes__[0], way)


WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "special_modified_bessel_i0": torch.special.i0,
    "special_modified_bessel_i1": torch.special.i1,
    "special_spherical_bessel_j0": lambda x: torch.sinc(x / math.pi),
    "linspace": lambda x: x[0] + (x[1] - x[0]) * torch.linspace(0, 1, 2, dtype=D),
    "logspace": lambda x: 10 ** (x[0] + (x[1] - x[0]) * torch.linspace(0, 1, 2, dtype=D)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_advised_instead_is_the_same_function(name: str) -> None:
    torch.testing.assert_close(WRITTEN[name](X), function(name)(X), rtol=1e-6, atol=1e-6)
    assert bool(hodiff.check_derivatives(lambda x: WRITTEN[name](x).sum(), X, order=3).ok)


BY_DERIVATIVE = {name: way.rpartition("derivative, ")[2] for name, way in _messages.CONSTANTS.items() if "(x)" in way}


@pytest.mark.parametrize("name", [name for name in BY_DERIVATIVE if name not in WRITTEN])
def test_the_derivative_that_is_advised_is_right(name: str) -> None:
    x, step = torch.linspace(0.5, 2.0, 5, dtype=D), 1e-3
    words = BY_DERIVATIVE[name].replace(") scaled", ") * scaled")
    advised = eval(words, {**vars(torch.special), "x": x})
    f = function(name)
    slope = (8 * (f(x + step) - f(x - step)) - f(x + 2 * step) + f(x - 2 * step)) / (12 * step)
    torch.testing.assert_close(advised, slope, rtol=1e-4, atol=1e-4)


def test_all_that_the_library_refuses_are_in_the_table() -> None:
    refusing = {inspect.getclosurevars(f).nonlocals.get("name") for f in _REPLACED.values() if "refuse" in f.__name__}
    assert refusing == set(_messages.CONSTANTS)


PARTLY = {
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (2,), None, None, 1e-5)[1],
    "lstsq": lambda x: torch.linalg.lstsq(x.outer(x) + torch.eye(2, dtype=D), X[:, None], driver="gelsd")[3],
    "normal": lambda x: torch.normal(x, 1.0),
}
"""Results of operations that have a derivative otherwise; and one of which PyTorch says that it is zero."""


@pytest.mark.parametrize("name", PARTLY)
def test_check_derivatives_names_results_that_are_constants(name: str) -> None:
    with pytest.raises(hodiff.DerivativeError, match=name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hodiff.check_derivatives(lambda x: PARTLY[name](x).sum() + (x**3).sum(), X, order=1, directions=1)


def test_the_page_has_the_whole_list() -> None:
    page = (ROOT / "docs" / "explain" / "stock-pytorch.md").read_text("utf-8")
    section = page[page.index("## Smooth functions that are taken") :]
    named = section[: section.index("```")]
    for name in (*_messages.CONSTANTS, *PARTLY):
        short = name.removeprefix("special_")
        assert short in named or (f"`_{short[-1]}`" in named and short[:-2] in named), name
