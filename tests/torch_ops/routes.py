"""The routes to a derivative of order 1, 2 and 3: hodiff's, and those of plain PyTorch.

Each is a function of a `Problem`'s loss (of its outputs, for `jvp` and the jets) and three directions; what it gives
is a derivative along them. Directions two and three are the same, so that where a second derivative is refused, a
third one can still be checked against second differences of the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hodiff

Directions = tuple[Tensor, Tensor]
WHOLE = 24  # entries up to which a whole Hessian is made


@dataclass(frozen=True)
class Route:
    """One way to a derivative.

    Attributes:
        name: What it is called in the tables.
        order: Of the derivative.
        run: `run(f, x, (u, v))`: f' u, f'' u v, or f''' u v v.
        ours: Whether it is hodiff's.
        vector: Whether `f` is the operation with all its outputs, and not a scalar of them.
    """

    name: str
    order: int
    run: Callable[[Callable[[Any], Any], Tensor, Directions], Tensor]
    ours: bool = True
    vector: bool = False


def _dot(a: Any, b: Any) -> Any:
    return (a * b).sum()


# --- hodiff ----------------------------------------------------------------------------------------------------------


def grad(f: Any, x: Tensor, d: Directions) -> Tensor:
    return _dot(hodiff.grad(f, x), d[0])


def jvp(f: Any, x: Tensor, d: Directions) -> Tensor:
    return hodiff.jvp(f, x, d[0])


def jet(order: int) -> Callable[[Any, Tensor, Directions], Tensor]:
    def run(f: Any, x: Tensor, d: Directions) -> Tensor:
        return hodiff.jet(f, x, [d[0], *[torch.zeros_like(x)] * (order - 1)])[1][order - 1]

    return run


def hvp(f: Any, x: Tensor, d: Directions) -> Tensor:
    return _dot(hodiff.hvp(f, x, d[0]), d[1])


def hvp_of_a_tensor(f: Any, x: Tensor, d: Directions) -> Tensor:
    leaf = x.clone().requires_grad_()
    return _dot(hodiff.hvp(f(leaf), leaf, d[0]), d[1])


def hessian(f: Any, x: Tensor, d: Directions) -> Tensor | None:
    return d[0] @ hodiff.hessian(f, x, matrix=True) @ d[1] if x.numel() <= WHOLE else None


def nested(f: Any, x: Tensor, d: Directions) -> Tensor:
    return _dot(hodiff.grad(lambda z: _dot(hodiff.hvp(f, z, d[0]), d[1]), x), d[1])


def loss_of_hvp(f: Any, x: Tensor, d: Directions) -> Tensor:
    leaf = x.clone().requires_grad_()
    loss = _dot(hodiff.hvp(f, leaf, d[0], create_graph=True), d[1])
    return _dot(torch.autograd.grad(loss, leaf)[0], d[1])


def loss_of_a_tensor(f: Any, x: Tensor, d: Directions) -> Tensor:
    leaf = x.clone().requires_grad_()
    loss = _dot(hodiff.hvp(f(leaf), leaf, d[0], create_graph=True), d[1])
    return _dot(torch.autograd.grad(loss, leaf)[0], d[1])


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


def _pull(y: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(y, leaf, create_graph=True, allow_unused=True, materialize_grads=True)[0]


def backward(order: int) -> Callable[[Any, Tensor, Directions], Tensor]:
    """`autograd.grad` again and again."""

    def run(f: Any, x: Tensor, d: Directions) -> Tensor:
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        for direction in (d[0], d[1], d[1])[:order]:
            y = _dot(_pull(y, leaf), direction) if y.requires_grad else torch.zeros(())
        return y.detach()

    return run


def func_hessian(f: Any, x: Tensor, d: Directions) -> Tensor | None:
    return d[0] @ torch.func.hessian(f)(x) @ d[1] if x.numel() <= WHOLE else None


def forward(f: Any, x: Tensor, d: Directions) -> Tensor:
    return torch.func.jvp(f, (x,), (d[0],))[1]


def forward_over_reverse(f: Any, x: Tensor, d: Directions) -> Tensor:
    return _dot(torch.func.jvp(torch.func.grad(f), (x,), (d[0],))[1], d[1])


def reverse_over_forward(f: Any, x: Tensor, d: Directions) -> Tensor:
    return _dot(torch.func.grad(lambda z: torch.func.jvp(f, (z,), (d[0],))[1])(x), d[1])


def forward_twice_over_reverse(f: Any, x: Tensor, d: Directions) -> Tensor:
    second = lambda z: torch.func.jvp(torch.func.grad(f), (z,), (d[0],))[1]
    return _dot(torch.func.jvp(second, (x,), (d[1],))[1], d[1])


ROUTES = (
    Route("grad", 1, grad),
    Route("jvp", 1, jvp, vector=True),
    Route("jet 1", 1, jet(1), vector=True),
    Route("hvp", 2, hvp),
    Route("hvp of a tensor", 2, hvp_of_a_tensor),
    Route("hessian", 2, hessian),
    Route("jet 2", 2, jet(2), vector=True),
    Route("grad of hvp", 3, nested),
    Route("backward of hvp", 3, loss_of_hvp),
    Route("backward of hvp of a tensor", 3, loss_of_a_tensor),
    Route("jet 3", 3, jet(3), vector=True),
    Route("`autograd.grad` twice", 2, backward(2), ours=False),
    Route("`func.hessian`", 2, func_hessian, ours=False),
    Route("`jvp(grad)`", 2, forward_over_reverse, ours=False),
    Route("`grad(jvp)`", 2, reverse_over_forward, ours=False),
    Route("`autograd.grad` thrice", 3, backward(3), ours=False),
    Route("`jvp(jvp(grad))`", 3, forward_twice_over_reverse, ours=False),
)
