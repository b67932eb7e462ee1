"""What the rules have in common: hyperparameters for each leaf, and a state for each leaf."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hodiff._core import _tree
from hodiff.errors import InputError

State = dict[str, Any]
"""What a rule keeps of one leaf: tensors, and numbers."""

Hyper = Any
"""A hyperparameter: a number, a tensor that fits each leaf, or a container like the point that holds one for each."""


@dataclasses.dataclass(frozen=True)
class Rule(ABC):
    """An update rule: hyperparameters, and a pure function of parameters, gradients and a state.

    Each hyperparameter that is a number may be a float, a tensor of one element or of a leaf's shape, or a
    container like the point that holds one for each leaf (a dict by parameter name for a module). Derivatives
    flow to every tensor among them.

    Examples:
        >>> import torch, hodiff
        >>> rule = hodiff.rules.SGD(lr=0.5)
        >>> rule(torch.tensor([1.0]), torch.tensor([4.0]), None, 1)
        (tensor([-1.]), {'SGD': {'params': {}}})
    """

    maximize: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "betas":
                _check_pair(value, type(self).__name__)
            elif isinstance(field.default, bool):
                _check_kind(value, bool, f"{type(self).__name__}: {field.name}")
            else:
                _check_kind(value, (int, float, Tensor), f"{type(self).__name__}: {field.name}")

    def __call__(self, params: Any, grads: Any, state: Any, step: int) -> tuple[Any, dict[str, dict[str, State]]]:
        """New parameters, and the state that the next step needs.

        Args:
            params: The parameters: a tensor, or a container of tensors.
            grads: Their gradients, likewise. One that is None leaves its parameter as it is, as in `torch.optim`.
            state: What the last step returned; None at the first.
            step: The number of the step, from 1.

        Returns:
            `(params, state)`. The state has the rule's name, and for each parameter what is kept of it.

        Raises:
            InputError: A state of another rule, or of other parameters; or *grads* are not like *params*.
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
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        pairs = values.pop("betas", None)
        spread = {name: _spread(value, tree, name) for name, value in values.items() if _tree.is_container(value)}
        if pairs is not None and any(map(_tree.is_container, pairs)):
            both = [_spread(beta, tree, "betas") if _tree.is_container(beta) else [beta] * count for beta in pairs]
            spread["betas"] = list(zip(*both, strict=True))
        if not spread:
            return [self] * count
        return [dataclasses.replace(self, **{name: spread[name][i] for name in spread}) for i in range(count)]


def stepped(
    rules: Sequence[Rule], params: Sequence[Tensor], grads: Sequence[Tensor | None], state: Any, step: int
) -> tuple[list[Tensor], list[State]]:
    """A step by one rule for each leaf; a leaf without a gradient stays as it is, and does not count the step."""
    states = [{} for _ in params] if state is None else state
    found = [
        (p, s | {"missed": s.get("missed", 0) + 1}) if g is None else _leaf(rule, p, g, s, step)
        for rule, p, g, s in zip(rules, params, grads, states, strict=True)
    ]
    return [p for p, _ in found], [s for _, s in found]


def _leaf(rule: Rule, p: Tensor, g: Tensor, state: State, step: int) -> tuple[Tensor, State]:
    missed = state.get("missed", 0)
    p, new = rule._update(p, -g if rule.maximize else g, state, step - missed)
    return p, new | {"missed": missed} if missed else new


def kept(states: Sequence[State], rules: Sequence[Rule], tree: _tree.Tree) -> dict[str, dict[str, State]]:
    """The state as the caller has it: the rule's name, and by the name of each leaf what is kept of it."""
    return {type(rules[0]).__name__: dict(zip(_tree.paths(tree, "params"), states, strict=True))}


def taken(state: Any, rules: Sequence[Rule], tree: _tree.Tree, params: Sequence[Tensor]) -> list[State] | None:
    """The state of each leaf, by its name, of what `kept` made; or a list of them, in the order of the leaves."""
    names, kind = _tree.paths(tree, "params"), type(rules[0]).__name__
    if state is None:
        return None
    if isinstance(state, dict):
        found = state.get(kind)
        if found is None or len(state) != 1:
            raise InputError(f"state: is of {', '.join(map(str, state))}, expected one of {kind}.")
    else:
        found = dict(zip(names, state, strict=True)) if isinstance(state, list) and len(state) == len(names) else {}
    if set(found) != set(names) or len(names) != len(found):
        raise InputError(f"state: is of the parameters {list(found)}, expected {names}.")
    for name, leaf in zip(names, params, strict=True):
        for key, part in found[name].items():
            if isinstance(part, Tensor) and part.shape != leaf.shape and key != "product":
                shapes = f"{tuple(part.shape)}, expected {tuple(leaf.shape)}"
                raise InputError(f"state: its {key} of {name} has shape {shapes}.")
    return [found[name] for name in names]


def _spread(value: Any, tree: _tree.Tree, name: str) -> list[Any]:
    """What a container like the parameters holds for each leaf, in their order."""
    different = _tree.difference(tree, _tree.flatten(value)[2], name)
    if different:
        raise InputError(f"{name}: holds one for each leaf, but is not like the parameters: {different}.")
    return _tree.leaves_like(tree, value)


def _check_pair(value: Any, name: str) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InputError(f"{name}: betas: got {value!r}, expected a pair (beta1, beta2).")
    for beta in value:
        _check_kind(beta, (int, float, Tensor), f"{name}: betas")
        if isinstance(beta, (int, float)) and not 0 <= beta < 1:
            raise InputError(f"{name}: betas: got {value!r}, expected two numbers of 0 or more, below 1.")


def _check_kind(value: Any, kinds: Any, name: str) -> None:
    for item in _tree.flatten(value)[0] if _tree.is_container(value) else [value]:
        if not isinstance(item, kinds) or (isinstance(item, bool) and kinds is not bool):
            expected = "True or False" if kinds is bool else "a number, a tensor, or a container with one for each leaf"
            raise InputError(f"{name}: got {item!r}, expected {expected}.")
