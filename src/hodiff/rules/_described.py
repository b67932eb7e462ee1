"""A `torch.optim` optimiser read as a description of a rule: its class and its options, nothing else of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.rules._adam import Adam, Adamax, AdamW, NAdam, RAdam
from hodiff.rules._adaptive import Adadelta, Adagrad, RMSprop
from hodiff.rules._rule import Rule
from hodiff.rules._sgd import SGD

RULES: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Adagrad, Adadelta)
}


def rules_of(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> list[Rule]:
    """The rule for each of the tensors; those of several groups must be the optimiser's own."""
    rule = RULES.get(type(optimizer).__name__)
    if rule is None or type(optimizer).__module__.partition(".")[0] != "torch":
        raise InputError(
            f"rule: is a {type(optimizer).__name__}, which has no rule here; there are "
            f"{', '.join(sorted(RULES))} (hodiff.rules). Or write it: a function (params, grads, state, step) -> "
            f"(params, state)."
        )
    names = [field.name for field in dataclasses.fields(rule)]
    made = [rule(**{name: group[name] for name in names if name in group}) for group in optimizer.param_groups]
    if len(made) == 1:
        return made * len(tensors)
    owner: dict[int, Any] = {
        id(p): rule for rule, group in zip(made, optimizer.param_groups, strict=True) for p in group["params"]
    }
    if not all(id(tensor) in owner for tensor in tensors):
        raise InputError(
            f"rule: the {type(optimizer).__name__} has {len(made)} parameter groups, and not all of where is in "
            f"them, so that it is unknown which options are meant. Make it of the parameters of where, or of one group."
        )
    return [owner[id(tensor)] for tensor in tensors]
