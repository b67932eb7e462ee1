"""Update rules of optimizers as pure functions, for `hodiff.unroll`: equal to `torch.optim`,
differentiable by all.

A rule maps parameters, gradients, its state and the number of the step (from 1) to new parameters
and a new
state: `rule(params, grads, state, step) -> (params, state)`. Parameters are like the point; the
state of the first step is None. A function of yours with that signature is a rule as well.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from hodiff._core import _compiled_callers, _tree
from hodiff._core._versions import is_wrapped, uncompiled
from hodiff.errors import InputError

__all__ = ["SGD", "Adam", "AdamW", "Rule"]

State = dict[str, Any]
"""What a rule keeps of one leaf: tensors, and numbers."""

Hyper = Any
"""A hyperparameter: a number, a tensor that fits each leaf, or a container like the point that
holds one for each.
"""


@dataclass(frozen=True)
class Rule(ABC):
    """An update rule: hyperparameters, and a pure function of parameters, gradients and a state.

    Each hyperparameter that is a number may be a float, a tensor of one element or of a leaf's
    shape, or a container like the point that holds one for each leaf (a dict by parameter name for
    a module). Derivatives flow to every tensor among them.

    Examples:
        >>> import torch, hodiff
        >>> rule = hodiff.rules.SGD(lr=0.5)
        >>> rule(torch.tensor([1.0]), torch.tensor([4.0]), None, 1)
        (tensor([-1.]), {'SGD': {'params': {}}})
    """

    maximize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for option in fields(self):
            value, name = getattr(self, option.name), f"{type(self).__name__}: {option.name}"
            if option.name == "betas":
                _check_pair(value, name)
            else:
                _check_kind(
                    value, bool if isinstance(option.default, bool) else (int, float, Tensor), name
                )
                for item in _tree.flatten(value)[0] if option.name != "dampening" else ():
                    if isinstance(item, (int, float)) and not 0 <= item <= math.inf:
                        raise InputError(f"{name}: got {item!r}, expected a number of at least 0.")

    @uncompiled
    def __call__(
        self, params: Any, grads: Any, state: Any, step: int
    ) -> tuple[Any, dict[str, dict[str, State]]]:
        """New parameters, and the state that the next step needs.

        Args:
            params: The parameters: a tensor, or a container of tensors.
            grads: Their gradients, likewise. One that is None leaves its parameter as it is, as in
                `torch.optim`.
            state: What the last step returned; None at the first.
            step: The number of the step, from 1.

        Returns:
            `(params, state)`. The state has the rule's name, and for each parameter what is kept of
            it.

        Raises:
            InputError: A state of another rule, or of other parameters; or *grads* are not like
                *params*.
        """
        leaves, _, tree = _tree.flatten(params)
        rules, given = self._by_leaf(tree, len(leaves)), _spread(grads, tree, "grads")
        new, states = stepped(rules, leaves, given, taken(state, rules, tree, leaves), step)
        return _tree.rebuild(tree, iter(new)), kept(states, rules, tree)

    @abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        """One leaf's new value and state; its hyperparameters are numbers or tensors."""

    def _by_leaf(self, tree: _tree.Tree, count: int) -> list[Any]:
        """The rule for each leaf."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        pairs = values.pop("betas", None)
        spread = {
            name: _spread(value, tree, name)
            for name, value in values.items()
            if _tree.is_container(value)
        }
        if pairs is not None and any(map(_tree.is_container, pairs)):
            both = [
                _spread(beta, tree, "betas") if _tree.is_container(beta) else [beta] * count
                for beta in pairs
            ]
            spread["betas"] = list(zip(*both, strict=True))
        if not spread:
            return [self] * count
        return [replace(self, **{name: spread[name][i] for name in spread}) for i in range(count)]


def stepped(
    rules: Sequence[Rule],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    state: Any,
    step: int,
) -> tuple[list[Tensor], list[State]]:
    """A step by one rule for each leaf; a leaf without a gradient stays as it is,
    and does not count the step.
    """
    states = [{} for _ in params] if state is None else state
    updates = [
        (p, s | {"missed": s.get("missed", 0) + 1}) if g is None else _leaf(rule, p, g, s, step)
        for rule, p, g, s in zip(rules, params, grads, states, strict=True)
    ]
    return [p for p, _ in updates], [s for _, s in updates]


def _leaf(rule: Rule, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
    missed = state.get("missed", 0)
    p, new = rule._update(p, -g if rule.maximize else g, state, step - missed)
    return p, new | {"missed": missed} if missed else new


def kept(
    states: Sequence[State], rules: Sequence[Rule], tree: _tree.Tree
) -> dict[str, dict[str, State]]:
    """The state as the caller has it: the rule's name,
    and by the name of each leaf what is kept of it.
    """
    return {type(rules[0]).__name__: dict(zip(_tree.paths(tree, "params"), states, strict=True))}


def taken(
    state: Any, rules: Sequence[Rule], tree: _tree.Tree, params: Sequence[Tensor]
) -> list[State] | None:
    """The state of each leaf, by its name, of what `kept` made; or a list of them,
    in the order of the leaves.
    """
    names, kind = _tree.paths(tree, "params"), type(rules[0]).__name__
    if state is None:
        return None
    if isinstance(state, dict):
        buffers = state.get(kind)
        if buffers is None or len(state) != 1:
            raise InputError(
                f"state belongs to {', '.join(map(str, state))}, expected one of {kind}."
            )
    else:
        buffers = (
            dict(zip(names, state, strict=True))
            if isinstance(state, list) and len(state) == len(names)
            else {}
        )
    if set(buffers) != set(names) or len(names) != len(buffers):
        raise InputError(f"state belongs to the parameters {list(buffers)}, expected {names}.")
    for name, leaf in zip(names, params, strict=True):
        for key, part in buffers[name].items():
            if isinstance(part, Tensor) and part.shape != leaf.shape:
                shapes = f"{tuple(part.shape)}, expected {tuple(leaf.shape)}"
                raise InputError(f"state: {key} of {name} has shape {shapes}.")
    return [buffers[name] for name in names]


def _spread(value: Any, tree: _tree.Tree, name: str) -> list[Any]:
    """The values that a container like the parameters holds for each leaf, in their order."""
    different = _tree.difference(tree, _tree.flatten(value)[2], name)
    if different:
        raise InputError(
            f"{name} must have one entry for each leaf, like the parameters: {different}."
        )
    return _tree.leaves_like(tree, value)


def _check_pair(value: Any, name: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name}: got {value!r}, expected a pair (beta1, beta2).")
    for beta in value:
        _check_kind(beta, (int, float, Tensor), name)
        if isinstance(beta, (int, float)) and not 0 <= beta < 1:
            raise InputError(
                f"{name}: got {value!r}, expected two numbers of at least 0 and below 1."
            )


def _check_kind(value: Any, kinds: Any, name: str) -> None:
    for item in _tree.flatten(value)[0]:
        if not isinstance(item, kinds) or (isinstance(item, bool) and kinds is not bool):
            expected = (
                "True or False"
                if kinds is bool
                else "a number, a tensor, or a container with one for each leaf"
            )
            raise InputError(f"{name}: got {item!r}, expected {expected}.")


# --- gradient descent with momentum ---------------------------------------------------------------


@final
@dataclass(frozen=True)
class SGD(Rule):
    r"""Steps p ← p - η b with b ← μ b + (1 - τ) g, as `torch.optim.SGD`.

    Unlike PyTorch with `differentiable=True`, the buffer's first value keeps its graph, so that
    derivatives through momentum are correct.

    Args:
        lr: \(\eta\), the learning rate.
        momentum: \(\mu\); 0 for none.
        dampening: \(\tau\), from the second step on.
        weight_decay: Multiplies the parameter, and is added to the gradient.
        nesterov: Whether to use Nesterov momentum, \(g + \mu\, b\) instead of \(b\).
        maximize: Whether to maximize instead of minimize.

    Examples:
        >>> import torch, hodiff
        >>> rule = hodiff.rules.SGD(lr=0.1, momentum=0.9)
        >>> p, state = rule(torch.tensor([1.0]), torch.tensor([2.0]), None, 1)
        >>> p, rule(p, torch.tensor([0.0]), state, 2)[0]
        (tensor([0.8000]), tensor([0.6200]))

    Reference:
        Sutskever, I., Martens, J., Dahl, G., Hinton, G. (2013). On the importance of initialization
        and momentum in deep learning. ICML.
    """

    lr: Hyper = 1e-3
    momentum: Hyper = 0.0
    dampening: Hyper = 0.0
    weight_decay: Hyper = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov is True and (not present(self.momentum) or present(self.dampening)):
            raise InputError("nesterov needs momentum= greater than 0, and no dampening.")

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        g = decayed(g, self.weight_decay, p)
        if not present(self.momentum):
            return plus(p, -self.lr, g), {}
        before = state.get("momentum")
        buffer = g if before is None else plus(self.momentum * before, 1 - self.dampening, g)
        along = plus(g, self.momentum, buffer) if self.nesterov else buffer
        return plus(p, -self.lr, along), {"momentum": buffer}


# --- updates written once for numbers and for tensors ---------------------------------------------


def plus(x: Tensor, a: Any, y: Tensor) -> Tensor:
    """X + a y."""
    return x + a * y if isinstance(a, Tensor) else torch.add(x, y, alpha=a)


def plus_product(x: Tensor, a: Any, y: Tensor, z: Tensor) -> Tensor:
    """X + a y z."""
    return x + a * (y * z) if isinstance(a, Tensor) else torch.addcmul(x, y, z, value=a)


def mixed(x: Tensor, y: Tensor, a: Any) -> Tensor:
    """(1 - a) x + a y."""
    return torch.lerp(x, y, a.to(x) if isinstance(a, Tensor) else a)


def root(v: Tensor) -> Tensor:
    """The square root, with the derivative zero where it is zero.

    `sqrt` has an infinite one there, which times a zero is NaN: one parameter whose gradients were
    exactly zero (below a layer that begins at zero) would make every derivative through Adam NaN.
    There v = (1 - b) g², so its own derivative is zero, and with it that of the update's
    denominator.
    """
    # Values are looked at where no device has to be waited for: transforms and traces have none.
    if v.is_cpu and v.__class__ is Tensor and not is_wrapped(v) and bool(v.all()):
        return v.sqrt()
    zero = v == 0
    return v.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def decayed(g: Tensor, a: Any, p: Tensor) -> Tensor:
    """The gradient g of a loss to which a |p|² / 2 is added."""
    return plus(g, a, p) if present(a) else g


def present(a: Any) -> bool:
    """Whether a term with the factor `a` is there: a tensor's always is,
    since it may be differentiated by.
    """
    return isinstance(a, Tensor) or a != 0


# --- Adam and the like ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Adam(Rule):
    """Running means of the gradient and of its square, and how weights decay."""

    lr: Hyper = 1e-3
    betas: tuple[Hyper, Hyper] = (0.9, 0.999)
    eps: Hyper = 1e-8
    weight_decay: Hyper = 0.0

    def _update(self, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
        beta1, beta2 = self.betas
        if not getattr(self, "decoupled_weight_decay", False):
            g = decayed(g, self.weight_decay, p)
        elif present(self.weight_decay):
            p = p * (1 - self.lr * self.weight_decay)
        zeros = torch.zeros_like(g)
        mean = mixed(state.get("mean", zeros), g, 1 - beta1)
        square = plus_product(state.get("square", zeros) * beta2, 1 - beta2, g, g)
        denominator = root(square) / (1 - beta2**step) ** 0.5 + self.eps
        new = plus(p, -self.lr / (1 - beta1**step), mean / denominator)
        return new, {"mean": mean, "square": square}


@final
@dataclass(frozen=True)
class Adam(_Adam):
    r"""Adam, p ← p - η m̂ / (√v̂ + ε), as `torch.optim.Adam`.

    Where a parameter's gradients were all exactly zero, derivatives are finite and true: the
    derivative of one step by that gradient is \(\eta / \epsilon\), 1e5 with the defaults. Choose a
    larger *eps* if that is too steep.

    Args:
        lr: \(\eta\), the learning rate.
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: Multiplies the parameter, and is added to the gradient.
        decoupled_weight_decay: Whether the parameter decays by itself instead, as in AdamW.
        maximize: Whether to maximize instead of minimize.

    Examples:
        The first step has the length of *lr* in each entry:

        >>> import torch, hodiff
        >>> hodiff.rules.Adam(lr=0.1)(torch.zeros(2), torch.tensor([3.0, -0.5]), None, 1)[0]
        tensor([-0.1000,  0.1000])

    Reference:
        Kingma, D. P., Ba, J. (2015). Adam: a method for stochastic optimization. arXiv:1412.6980.
    """

    decoupled_weight_decay: bool = False


@final
@dataclass(frozen=True)
class AdamW(_Adam):
    r"""Adam with decoupled weight decay, p ← (1 - ηλ) p - …, as `torch.optim.AdamW`.

    Args:
        lr: \(\eta\), the learning rate.
        betas: How slowly the means of the gradient and of its square move.
        eps: Added to the denominator.
        weight_decay: The decay \(\lambda\).
        maximize: Whether to maximize instead of minimize.

    Examples:
        >>> import torch, hodiff
        >>> hodiff.rules.AdamW(lr=0.1, weight_decay=0.5)(torch.ones(1), torch.ones(1), None, 1)[0]
        tensor([0.8500])

    Reference:
        Loshchilov, I., Hutter, F. (2019). Decoupled weight decay regularization. arXiv:1711.05101.
    """

    weight_decay: Hyper = 1e-2

    decoupled_weight_decay: ClassVar[bool] = True


_compiled_callers.publish(vars())
__getattr__, __dir__ = _compiled_callers.names(vars(), {})
