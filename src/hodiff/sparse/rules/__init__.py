"""The rules that say on which inputs each output of an operator depends, by family, looked up by
the operator's name.

A rule may give too much, never too little. An operator without one is decomposed into others;
failing that, all its outputs depend on all its arguments, which is always right.
"""

from __future__ import annotations

from typing import Any

import torch

from hodiff.sparse._tracer import Rule
from hodiff.sparse.rules import contraction, movement

RULES: dict[str, Rule] = {
    **contraction.POINTWISE_RULES,
    **movement.RULES,
    **movement.LINE_RULES,
    **contraction.RULES,
}


def find(function: Any) -> Rule | None:
    """The rule of an operator; None where there is none."""
    name = str(function._schema.name)
    if not name.startswith("aten::"):
        return None
    rule = RULES.get(name.removeprefix("aten::").rstrip("_")) or RULES.get(
        name.removeprefix("aten::")
    )
    if rule is not None:
        return rule
    return contraction.pointwise if torch.Tag.pointwise in function.tags else None
