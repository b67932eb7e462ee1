"""Adam and its kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hodiff.rules._arithmetic import decayed, minus_ratio, mixed, plus_product, present, root
from hodiff.rules._rule import Hyper, Rule, State


@dataclass(frozen=True)
class _Moments(Rule):
    """Running means of the gradient and of its square, and how weights decay."""

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0

    def _decayed(self, p: Tensor, g: Tensor, *, decoupled: bool) -> tuple[Tensor, Tensor]:
        """The parameter and the gradient, with the decay in one or the other."""
        if decoupled and present(self.weight_decay):
            return p * (1 - self.lr * self.weight_decay), g
        return p, decayed(g, self.weight_decay, p)

    def _moments(self, g: Tensor, state: State) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self.betas
        zeros = torch.zeros_like(g)
        mean = mixed(state.get("mean", zeros), g, 1 - beta1)
        return mean, plus_product(state.get("square", zeros) * beta2, 1 - beta2, g, g)


@dataclass(frozen=True)
class _Adam(_Moments):
    amsgrad: bool = False

    def _stepped(self, p: Tensor, g: Tensor, state: State, step: int, *, decoupled: bool) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        p, g = self._decayed(p, g, decoupled=decoupled)
        mean, square = self._moments(g, state)
        new, largest = {"mean": mean, "square": square}, square
        if self.amsgrad:
            new["largest"] = largest = torch.maximum(state["largest"], square) if "largest" in state else square
        denominator = root(largest) / (1 - beta2**step) ** 0.5 + self.eps
        return minus_ratio(p, self.lr / (1 - beta1**step), mean, denominator), new


@final
@dataclass(frozen=True)
class Adam(_Adam):
    r"""Adam, \(p \leftarrow p - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)\), as `torch.optim.Adam`.

    Where a parameter's gradients were all exactly zero, derivatives are finite and true: the derivative of one
    step by that gradient is \(\eta / \epsilon\), 1e5 with the defaults. Choose a larger *eps* if that is too steep.

    Args:
        lr: The step \(\eta\).
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: Times the parameter, added to the gradient.
        amsgrad: Whether to divide by the largest mean square so far.
        decoupled_weight_decay: Whether the parameter decays by itself instead, as in AdamW.
        maximize: Whether to go uphill.

    Examples:
        The first step has the length of *lr* in each entry:

        >>> import torch, hodiff
        >>> hodiff.rules.Adam(lr=0.1)(torch.zeros(2), torch.tensor([3.0, -0.5]), None, 1)[0]
        tensor([-0.1000,  0.1000])

    Reference:
        Kingma, D. P., Ba, J. (2015). Adam: a method for stochastic optimization. arXiv:1412.6980.
        Reddi, S. J., Kale, S., Kumar, S. (2018). On the convergence of Adam and beyond. arXiv:1904.09237.
    """

    decoupled_weight_decay: bool = False

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        return self._stepped(p, g, state, step, decoupled=self.decoupled_weight_decay)


@final
@dataclass(frozen=True)
class AdamW(_Adam):
    r"""Adam, with a decay \(p \leftarrow (1 - \eta\lambda)\, p - \dots\) beside it, as `torch.optim.AdamW`.

    Args:
        lr: The step \(\eta\).
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: The decay \(\lambda\).
        amsgrad: Whether to divide by the largest mean square so far.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.AdamW(lr=0.1, weight_decay=0.5)(torch.ones(1), torch.ones(1), None, 1)[0]
        tensor([0.8500])

    Reference:
        Loshchilov, I., Hutter, F. (2019). Decoupled weight decay regularization. arXiv:1711.05101.
    """

    weight_decay: Hyper = 1e-2

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        return self._stepped(p, g, state, step, decoupled=True)


@final
@dataclass(frozen=True)
class NAdam(_Moments):
    r"""Adam with Nesterov's momentum, whose coefficient grows with the steps, as `torch.optim.NAdam`.

    PyTorch holds the product of those coefficients in its default dtype; here it is a double.

    Args:
        lr: The step.
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: Times the parameter, added to the gradient.
        momentum_decay: How soon the momentum grows.
        decoupled_weight_decay: Whether the parameter decays by itself instead.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.NAdam(lr=0.1)(torch.zeros(1), torch.ones(1), None, 1)[0]
        tensor([-0.1056])

    Reference:
        Dozat, T. (2016). Incorporating Nesterov momentum into Adam. ICLR workshop.
    """

    lr: Hyper = 2e-3
    momentum_decay: Hyper = 4e-3
    decoupled_weight_decay: bool = False

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        p, g = self._decayed(p, g, decoupled=self.decoupled_weight_decay)
        mean, square = self._moments(g, state)
        now, after = (beta1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay)) for t in (step, step + 1))
        product = state.get("product", 1.0) * now
        denominator = root(square / (1 - beta2**step)) + self.eps
        p = minus_ratio(p, self.lr * (1 - now) / (1 - product), g, denominator)
        p = minus_ratio(p, self.lr * after / (1 - product * after), mean, denominator)
        return p, {"mean": mean, "square": square, "product": product}


@final
@dataclass(frozen=True)
class RAdam(_Moments):
    r"""Adam that waits until the mean square is known well enough to divide by it, as `torch.optim.RAdam`.

    Args:
        lr: The step.
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: Times the parameter, added to the gradient.
        decoupled_weight_decay: Whether the parameter decays by itself instead.
        maximize: Whether to go uphill.

    Examples:
        The first five steps, with the defaults, are those of momentum:

        >>> import torch, hodiff
        >>> hodiff.rules.RAdam(lr=0.1)(torch.zeros(1), torch.tensor([3.0]), None, 1)[0]
        tensor([-0.3000])

    Reference:
        Liu, L. et al. (2020). On the variance of the adaptive learning rate and beyond. arXiv:1908.03265.
    """

    decoupled_weight_decay: bool = False

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        p, g = self._decayed(p, g, decoupled=self.decoupled_weight_decay)
        mean, square = self._moments(g, state)
        update = mean / (1 - beta1**step) * self.lr
        correction, limit = 1 - beta2**step, 2 / (1 - beta2) - 1
        length: Any = limit - 2 * step * beta2**step / correction
        if length > 5:
            rectified = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
            update = update * (correction**0.5 / (root(square) + self.eps)) * rectified**0.5
        return p - update, {"mean": mean, "square": square}


@final
@dataclass(frozen=True)
class Adamax(_Moments):
    r"""Adam with the largest decayed gradient in the place of the mean square, as `torch.optim.Adamax`.

    Args:
        lr: The step.
        betas: How slowly the mean of the gradient and the largest one move.
        eps: Added to the gradient's size.
        weight_decay: Times the parameter, added to the gradient.
        maximize: Whether to go uphill.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.Adamax(lr=0.1)(torch.zeros(1), torch.tensor([3.0]), None, 1)[0]
        tensor([-0.1000])

    Reference:
        Kingma, D. P., Ba, J. (2015). Adam: a method for stochastic optimization. arXiv:1412.6980, section 7.
    """

    lr: Hyper = 2e-3

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        p, g = self._decayed(p, g, decoupled=False)
        zeros = torch.zeros_like(g)
        mean = mixed(state.get("mean", zeros), g, 1 - beta1)
        largest = torch.maximum(state.get("largest", zeros) * beta2, g.abs() + self.eps)
        return minus_ratio(p, self.lr / (1 - beta1**step), mean, largest), {"mean": mean, "largest": largest}
