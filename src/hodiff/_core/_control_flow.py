"""Control flow in operators (`torch.cond`, `scan`), run as the Python that it is defined to be.

PyTorch traces what such an operator runs, to lift what its functions capture into arguments. Where nothing is traced
(compiled functions run as they are, or a mode sees each operation) it takes what they capture for constants, without a
word; and where it is right, its derivative has none. PyTorch defines each by a few lines of Python: those have
derivatives of every order, in whatever differentiates them.

They stand in the operators' way from import on, which costs no call anything, and are passed by unless a call of hodiff
runs, in whatever thread: its switch for compiled functions is everybody's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import _higher_order_ops
from torch.utils import _pytree

from hodiff._core._hooks import watch_modules
from hodiff._core._modes import tracing


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any]) -> Any:
    if _batched(pred):
        return _pytree.tree_map(functools.partial(torch.where, pred), true_fn(*operands), false_fn(*operands))
    return (true_fn if pred else false_fn)(*operands)


def _batched(pred: Any) -> bool:
    """Whether a condition differs between the samples of a `torch.vmap`."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while isinstance(pred, Tensor) and functorch.is_functorch_wrapped_tensor(pred):
        if functorch.is_batchedtensor(pred):
            return True
        pred = functorch.get_unwrapped(pred)
    return False


def _switch(index: Any, branches: Sequence[Any], operands: Sequence[Any]) -> Any:
    return branches[int(index)](*operands)


def _while_loop(cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
    found = values = tuple(carried)
    while cond_fn(*values, *additional):
        found = body_fn(*values, *additional)
        values = _pytree.tree_leaves(found)
    return found


def _map(f: Any, xs: Sequence[Tensor], pos_args: Sequence[Any]) -> Any:
    return _pytree.tree_map(_stacked, *(f(*row, *pos_args) for row in _rows(xs)))


def _associative_scan(combine_fn: Any, xs: Sequence[Tensor], additional_inputs: Sequence[Any]) -> Any:
    first, *others = _rows(xs)
    outputs, structure = [first], _pytree.tree_structure(combine_fn(*first, *first, *additional_inputs))
    for row in others:
        outputs += [_pytree.tree_leaves(combine_fn(*outputs[-1], *row, *additional_inputs))]
    return _pytree.tree_unflatten([_stacked(*parts) for parts in zip(*outputs, strict=True)], structure)


def _scan(combine_fn: Any, init: Sequence[Any], xs: Sequence[Tensor], additional_inputs: Sequence[Any]) -> Any:
    carry = list(init)
    outputs = []
    structure = None
    for row in _rows(xs):
        found, structure = _pytree.tree_flatten(combine_fn(*carry, *row, *additional_inputs))
        carry = found[: len(init)]
        outputs += [found[len(init) :]]
    stacked = [_stacked(*parts) for parts in zip(*outputs, strict=True)]
    return _pytree.tree_unflatten([*carry, *stacked], structure) if structure is not None else carry


def _rows(xs: Sequence[Tensor]) -> Any:
    return zip(*(x.unbind() for x in xs), strict=True)


def _stacked(*parts: Any) -> Any:
    return torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    from torch._higher_order_ops.flex_attention import math_attention

    return math_attention(*args, **kwargs)


DEFINITIONS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "switch": _switch,
    "while_loop": _while_loop,
    "map_impl": _map,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "flex_attention": _flex_attention,
}
"""What each operator is, by its name."""


def _instead(theirs: Callable[..., Any], definition: Callable[..., Any], key: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator's own way, or its definition where a call of hodiff runs and nothing is traced."""
    if not watch_modules.on or tracing():
        return theirs(key, *args, **kwargs)
    kwargs.pop("mutated_arg_indices", None)  # what the functions change in place, they change
    return definition(*args, **kwargs)


def install() -> None:
    """Put the definitions in the operators' way."""
    for name in DEFINITIONS.keys() & _higher_order_ops.keys():  # `switch` is new in 2.15
        operator: Any = _higher_order_ops[name]
        operator.dispatch = functools.partial(_instead, operator.dispatch, DEFINITIONS[name])
