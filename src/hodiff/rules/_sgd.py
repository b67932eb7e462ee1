"""Gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from hodiff.errors import InputError
from hodiff.rules._arithmetic import decayed, minus, plus, present
from hodiff.rules._rule import Hyper, Rule, State


@final
@dataclass(frozen=True)
class SGD(Rule):
    r"""Steps \(p \leftarrow p - \eta\, b\) with \(b \leftarrow \mu\, b + (1 - \tau)\, g\), as `torch.optim.SGD`.

    Unlike there with `differentiable=True`, the buffer's first value keeps its graph, so that derivatives through
    momentum are right.

    Args:
        lr: The step \(\eta\).
        momentum: The \(\mu\); 0 for none.
        dampening: The \(\tau\), from the second step on.
        weight_decay: Times the parameter, added to the gradient.
        nesterov: Whether to look ahead: \(g + \mu\, b\) for \(b\).
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> rule = hodiff.rules.SGD(lr=0.1, momentum=0.9)
        >>> p, state = rule(torch.tensor([1.0]), torch.tensor([2.0]), None, 1)
        >>> p, rule(p, torch.tensor([0.0]), state, 2)[0]
        (tensor([0.8000]), tensor([0.6200]))

    Reference:
        Sutskever, I., Martens, J., Dahl, G., Hinton, G. (2013). On the importance of initialization and
        momentum in deep learning. ICML.
    """

    lr: Hyper = 1e-3
    momentum: Hyper = 0.0
    dampening: Hyper = 0.0
    weight_decay: Hyper = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov is True and (not present(self.momentum) or present(self.dampening)):
            raise InputError("nesterov: looks ahead along a momentum; give momentum= greater than 0, and no dampening.")

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        g = decayed(g, self.weight_decay, p)
        if not present(self.momentum):
            return minus(p, self.lr, g), {}
        before = state.get("momentum")
        buffer = g if before is None else plus(self.momentum * before, 1 - self.dampening, g)
        along = plus(g, self.momentum, buffer) if self.nesterov else buffer
        return minus(p, self.lr, along), {"momentum": buffer}
