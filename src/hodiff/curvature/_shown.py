"""How records look: one line in a console, a small table in a notebook, a sentence, a picture."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from hodiff._core import _tree


class Shown(ABC):
    """A record that shows what a reader asks first: the value, how good it is, what it took."""

    @abstractmethod
    def _facts(self) -> dict[str, str]:
        """What is shown, by the heading that it has in a table; short."""

    @property
    @abstractmethod
    def message(self) -> str:
        """How it went, in a sentence."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._facts().values())})"

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        """NumPy would make an array without dimensions that holds the record, and fail later and elsewhere."""
        raise TypeError(f"a {type(self).__name__} is no array but a record of .{', .'.join(vars(self))}.")

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th style="text-align: left">{html.escape(name)}</th>'
            f'<td style="text-align: left">{html.escape(text)}</td></tr>'
            for name, text in self._facts().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def number(value: Any) -> str:
    """A number with four digits."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    return f"{value:.4g}"


def numbers(values: Tensor) -> str:
    """The first three of several, and that there are more."""
    shown = [number(value) for value in values[:3]]
    return ", ".join([*shown, f"... ({len(values)})"] if len(values) > 3 else shown)


def measured(value: Tensor, error: Tensor | None) -> str:
    """A value and its standard error."""
    return number(value) if error is None else f"{number(value)} ± {number(error)}"


def shape(value: Any) -> str:
    """The shape of a tensor, or how many numbers a container holds."""
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return f"{sum(leaf.numel() for leaf in leaves)} numbers in {len(leaves)} tensors" if leaves else "vector"


def flat(value: Any) -> Tensor:
    """All numbers of a tensor or a container, in one row."""
    leaves = [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, Tensor)]
    return torch.cat([leaf.detach().reshape(-1) for leaf in leaves])


def after(products: int) -> str:
    """How many products."""
    return f"{products} product{'' if products == 1 else 's'}"


def outcome(converged: bool | None) -> str:
    """Whether it converged, where that was asked."""
    return {True: "converged", False: "not converged", None: "no tolerance asked"}[converged]
