"""A register of properties: which public name each is about, what it says, and what it is held against.

A property is a test, given to hypothesis, that `law` has put down here. `tests/property/test_every_name.py` demands one
for every public name that gives a derivative, a product, a field or an operator, and writes the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.inputs import CONTAINERS, Scalar, expressions, points, scalars


@dataclass(frozen=True)
class Law:
    """One property.

    Attributes:
        names: The public names that it holds of.
        says: The property, in a formula or a few words.
        oracle: Where the other side of the equation comes from.
    """

    names: tuple[str, ...]
    says: str
    oracle: str


LAWS: list[Law] = []


def law(*names: str, says: str, oracle: str = "`torch.func`") -> Callable[[Any], Any]:
    """Put a property down."""
    LAWS.append(Law(names, says, oracle))
    return lambda test: test


# --- what they draw --------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Two parameters, one of them deeper."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.deep = nn.Module()
        self.first = nn.Parameter(first.clone())
        self.deep.second = nn.Parameter(second.clone())


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    **CONTAINERS,
    "module": (Holder, lambda m: (m.first, m.deep.second)),
}


class Setting(NamedTuple):
    """A random function of a random structure, and the same of one flat vector.

    Attributes:
        f: Of the structure.
        where: The structure: a tensor, a container, or a module.
        flat: Of the vector of all its entries, in order.
        x: That vector.
    """

    f: Callable[[Any], Any]
    where: Any
    flat: Callable[[Tensor], Tensor]
    x: Tensor


@st.composite
def settings(draw: Any, outputs: bool = False) -> Setting:
    """A scalar of two tensors in some container, or (`outputs`) a function of them with the shape of the first."""
    a, b = draw(points), draw(points)
    expression, f, g = draw(expressions(leaves=3)), draw(scalars(leaves=3)), draw(scalars(leaves=3))
    form = draw(st.sampled_from(["tensor", *FORMS]))

    def joint(a: Tensor, b: Tensor) -> Tensor:
        if outputs:
            return expression(a) * torch.sin(g(b)) + a
        return f(a) * g(b) + torch.sin(f(a) + g(b))

    if form == "tensor":
        return Setting(lambda t: joint(t, b), a, lambda v: joint(v.reshape(a.shape), b), a.reshape(-1))
    build, read = FORMS[form]
    where = build(a, b)
    # A module's own parameters come before those of its children, as in all forms here the first before the second.
    split = lambda v: (v[: a.numel()].reshape(a.shape), v[a.numel() :].reshape(b.shape))
    return Setting(
        lambda w: joint(*read(w)), where, lambda v: joint(*split(v)), torch.cat([a.reshape(-1), b.reshape(-1)])
    )


class Field(NamedTuple):
    """Samples, a function that gives one number for each, and the same of one sample."""

    f: Callable[..., Tensor]
    x: Tensor
    one: Callable[[Tensor], Tensor]


@st.composite
def fields(draw: Any, dimension: int | None = None, outputs: bool = False) -> Field:
    """A random field; with `outputs` a vector field with as many components."""
    rows, columns = draw(st.integers(1, 3)), dimension or draw(st.integers(1, 3))
    expression = draw(expressions(roll=True, leaves=4))
    entries = st.lists(
        st.floats(-1.5, 1.5, width=16, allow_subnormal=False), min_size=rows * columns, max_size=rows * columns
    )
    x = torch.tensor(draw(entries), dtype=torch.float64).reshape(rows, columns)
    if outputs:
        function = lambda z: expression(z) + torch.roll(z, 1, -1) * z
        return Field(function, x, function)
    scalar = Scalar(expression, 1)
    return Field(scalar, x, scalar)


def like(setting: Setting, rows: Tensor) -> Any:
    """A flat vector in the structure of the point (a dict for a module), or several stacked (a list for a tensor)."""
    where = dict(setting.where.named_parameters()) if isinstance(setting.where, nn.Module) else setting.where
    pieces = iter(rows.split([t.numel() for t in _tensors(where)], -1))
    found = _rebuilt(where, pieces, rows.shape[:-1])
    return [found] if rows.ndim == 2 and isinstance(found, Tensor) else found  # at a line, as many as entries


def rows(tree: Any, count: int) -> Tensor:
    """The other way: `(count, D)`."""
    return torch.cat([leaf.reshape(count, -1) for leaf in _tensors(tree)], 1)


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [t for part in (tree.values() if isinstance(tree, dict) else tree) for t in _tensors(part)]


def _rebuilt(tree: Any, pieces: Any, lead: torch.Size) -> Any:
    if isinstance(tree, Tensor):
        return next(pieces).reshape((*lead, *tree.shape))
    if isinstance(tree, dict):
        return {key: _rebuilt(part, pieces, lead) for key, part in tree.items()}
    parts = [_rebuilt(part, pieces, lead) for part in tree]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def gradient(setting: Setting) -> Tensor:
    return torch.func.grad(setting.flat)(setting.x)


def hessian(setting: Setting) -> Tensor:
    """Reverse over reverse; right for the operations in these expressions (no norm layers, no determinants)."""
    return torch.func.jacrev(torch.func.grad(setting.flat))(setting.x)


def jacobian(setting: Setting) -> Tensor:
    return torch.func.jacrev(lambda v: setting.flat(v).reshape(-1))(setting.x)
