"""Does this PyTorch answer as `_slots` and `_traits` expect? Tried once, on small graphs of each state."""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff._core import _modes
from hodiff._core._nodes import Node
from hodiff.graph import _slots, _traits
from hodiff.graph._slots import ALIVE, FREED, NONE, PACKED, RELEASED, STALE, Slot


class Answers(NamedTuple):
    """What was found.

    Attributes:
        states: Whether the states of saved tensors are told as they are.
        references: The references, besides that of its slot, that are seen of a tensor that only a graph holds.
        sequences: Whether nodes and the thread's counter agree on the order of creation.
    """

    states: bool = False
    references: int = 0
    sequences: bool = False


def answers() -> Answers:
    """Try it all, in a thread of its own, where no mode or hook of the caller is on."""
    found: list[Answers] = []

    def run() -> None:
        try:
            states = _states_are_told()
            found.append(Answers(states, _references() if states else 0, _sequences_agree()))
        except Exception:  # whatever is different, it is not what we know
            found.append(Answers())

    thread = threading.Thread(target=run, name="hodiff self-test")
    thread.start()
    thread.join()
    return found[0]


def _states(node: Node) -> dict[str, str]:
    return {slot.name: slot.state for slot in _slots.read(node, _slots.plan(type(node)).names)}


def _states_are_told() -> bool:
    """A graph of each state, with the answer that it must give."""

    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.ones(3, device="cpu").requires_grad_()
        y = x * torch.full((3,), 2.0, device="cpu")
        return x, y, (y * y).sum()

    x, y, loss = fresh()
    if _states(y.grad_fn) != {"self": NONE, "other": ALIVE}:
        return False
    product = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    if _states(product) != {"self": ALIVE, "other": ALIVE} or _traits.leaf(y.grad_fn.next_functions[0][0]) is not x:  # type: ignore[union-attr]
        return False
    with _modes.grad_mode(False):
        y.add_(1)
    if _states(product) != {"self": STALE, "other": STALE}:
        return False
    x, y, loss = fresh()
    loss.backward()
    if _states(y.grad_fn)["other"] != FREED or _states(y.grad_fn)["self"] not in (NONE, FREED):
        return False
    ran: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: ran.append(1) or t):
        x, y, loss = fresh()
    if _states(y.grad_fn)["other"] != PACKED or ran:
        return False
    x, y, loss = fresh()
    return _slots.drop(y.grad_fn) == 1 and _states(y.grad_fn)["other"] == RELEASED


def _references() -> int:
    product = (torch.ones(3, device="cpu").requires_grad_() * 2.0).exp().grad_fn
    (name, raw_name, _), *_ = _slots.plan(type(product)).names
    slot = Slot(name, *_slots.state_of(getattr(product, raw_name)))
    return sys.getrefcount(slot.value) - 1


def _sequences_agree() -> bool:
    before = _traits.counter()
    y = torch.ones(3, device="cpu").requires_grad_() * 2.0
    return y.grad_fn is not None and _traits.counter() == before + 1 and _traits.sequence(y.grad_fn) == before
