"""RMSprop, Adagrad, Adadelta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from hodiff.rules._arithmetic import decayed, minus, minus_ratio, mixed, plus_product, present, root
from hodiff.rules._rule import Hyper, Rule, State


@final
@dataclass(frozen=True)
class RMSprop(Rule):
    r"""Steps \(g / (\sqrt{v} + \epsilon)\), with *v* the running mean of \(g^2\), as `torch.optim.RMSprop`.

    Args:
        lr: The step.
        alpha: How slowly the mean moves.
        eps: Added to the denominator.
        weight_decay: Times the parameter, added to the gradient.
        momentum: Of the steps; 0 for none.
        centered: Whether *v* is a variance.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.RMSprop(lr=0.1)(torch.zeros(1), torch.tensor([3.0]), None, 1)[0]
        tensor([-1.0000])

    Reference:
        Tieleman, T., Hinton, G. (2012). Lecture 6.5, RMSprop. Coursera: neural networks for machine learning.
    """

    lr: Hyper = 1e-2
    alpha: Hyper = 0.99
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0
    momentum: Hyper = 0.0
    centered: bool = False

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        g = decayed(g, self.weight_decay, p)
        zeros = torch.zeros_like(g)
        square = plus_product(state.get("square", zeros) * self.alpha, 1 - self.alpha, g, g)
        new, spread = {"square": square}, square
        if self.centered:
            new["mean"] = mean = mixed(state.get("mean", zeros), g, 1 - self.alpha)
            spread = torch.addcmul(square, mean, mean, value=-1)
        denominator = root(spread) + self.eps
        if not present(self.momentum):
            return minus_ratio(p, self.lr, g, denominator), new
        new["momentum"] = along = minus_ratio(state.get("momentum", zeros) * self.momentum, -1, g, denominator)
        return minus(p, self.lr, along), new


@final
@dataclass(frozen=True)
class Adagrad(Rule):
    r"""Steps \(g / (\sqrt{v} + \epsilon)\), with *v* the sum of all \(g^2\), as `torch.optim.Adagrad`.

    Args:
        lr: The step.
        lr_decay: It is divided by 1 + (t - 1) times this.
        weight_decay: Times the parameter, added to the gradient.
        initial_accumulator_value: Where the sum begins.
        eps: Added to the denominator.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.Adagrad(lr=0.1)(torch.zeros(1), torch.tensor([3.0]), None, 1)[0]
        tensor([-0.1000])

    Reference:
        Duchi, J., Hazan, E., Singer, Y. (2011). Adaptive subgradient methods for online learning and
        stochastic optimization. JMLR 12.
    """

    lr: Hyper = 1e-2
    lr_decay: Hyper = 0.0
    weight_decay: Hyper = 0.0
    initial_accumulator_value: Hyper = 0.0
    eps: Hyper = 1e-10

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        g = decayed(g, self.weight_decay, p)
        before = state["sum"] if "sum" in state else torch.zeros_like(g) + self.initial_accumulator_value
        total = torch.addcmul(before, g, g)
        p = minus_ratio(p, self.lr / (1 + (step - 1) * self.lr_decay), g, root(total) + self.eps)
        return p, {"sum": total}


@final
@dataclass(frozen=True)
class Adadelta(Rule):
    r"""Steps in proportion to the mean size of earlier ones, as `torch.optim.Adadelta`.

    Args:
        lr: A factor of each step.
        rho: How slowly the means move.
        eps: Added below the square roots.
        weight_decay: Times the parameter, added to the gradient.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.Adadelta(eps=0.01)(torch.zeros(1), torch.tensor([3.0]), None, 1)[0]
        tensor([-0.3145])

    Reference:
        Zeiler, M. D. (2012). Adadelta: an adaptive learning rate method. arXiv:1212.5701.
    """

    lr: Hyper = 1.0
    rho: Hyper = 0.9
    eps: Hyper = 1e-6
    weight_decay: Hyper = 0.0

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        g = decayed(g, self.weight_decay, p)
        zeros = torch.zeros_like(g)
        square = plus_product(state.get("square", zeros) * self.rho, 1 - self.rho, g, g)
        moved = state.get("moved", zeros)
        delta = root(moved + self.eps) / root(square + self.eps) * g
        return minus(p, self.lr, delta), {
            "square": square,
            "moved": plus_product(moved * self.rho, 1 - self.rho, delta, delta),
        }
