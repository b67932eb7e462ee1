"""Operations of a step's graph that are nearly the same stay two; and a step's copy has each of its options."""

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff
from tests.unit.steps.support import MARKS

pytestmark = MARKS
K = torch.tensor([2, 3])

# Two values that differ in one thing alone: a type, a sign, a dimension, an order of what is given.
ALIKE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "an integer and a float": lambda x: (K * 2, K * 2.0),
    "a bool and an integer": lambda x: ((K > 0) * True, (K > 0) * 1),
    "a zero and its negative": lambda x: (1 / (x.abs() * 0.0), 1 / (x.abs() * -0.0)),
    "a power's exponent": lambda x: (K**2, K**2.0),
    "dimensions": lambda x: (x.reshape(2, 2, 2).sum(0), x.reshape(2, 2, 2).sum(1)),
    "a negative dimension": lambda x: (x.reshape(2, 2, 2).cumsum(-1), x.reshape(2, 2, 2).cumsum(1)),
    "transpositions": lambda x: (x.reshape(2, 2, 2).transpose(0, 1), x.reshape(2, 2, 2).transpose(1, 2)),
    "two transpositions": lambda x: (
        x.reshape(2, 2, 2).transpose(0, 1).transpose(1, 2),
        x.reshape(2, 2, 2).transpose(0, 1).transpose(0, 1),
    ),
    "permutations": lambda x: (x.reshape(2, 2, 2).permute(1, 2, 0), x.reshape(2, 2, 2).permute(2, 0, 1)),
    "operands": lambda x: (x - x.flip(0), x.flip(0) - x),
    "halves of a division": lambda x: (x / (1 + x**2), (1 + x**2) / x),
    "dtypes": lambda x: (x.to(torch.float32), x.to(torch.bfloat16).to(torch.float32)),
    "an option": lambda x: (torch.var(x, correction=0), torch.var(x, correction=1)),
    "kinds of rounding": lambda x: (torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, 0.3, rounding_mode="trunc")),
    "draws": lambda x: (torch.rand_like(x), torch.rand_like(x)),
    "slices": lambda x: (x[::2], x[1::2]),
    "what is left after a change": lambda x: ((y := x * 1.0).sum(), y.add_(1.0).sum()),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_alike_stays_two(name: str) -> None:
    x = torch.linspace(-1.3, 1.7, 8)
    w = torch.ones(8, requires_grad=True)
    part = ALIKE[name]

    def loss(w: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        pair = part(w.detach() * x)
        first, second = (torch.nan_to_num(each.to(w.dtype), posinf=7.0, neginf=-5.0) for each in pair)
        return (w * x).square().sum() + (w.sum() * (first.sum() + 3 * second.sum())), pair

    step = hodiff.compile_step(loss, w, has_aux=True, backend="replay", fallback="raise")
    for _ in range(3):
        torch.manual_seed(0)
        (value, aux), gradient = step.value_and_grad(x)
        torch.manual_seed(0)
        (expected, pair), by = hodiff.value_and_grad(loss, w, has_aux=True, args=(x,))
        torch.testing.assert_close((value, aux, gradient), (expected, pair, by), rtol=1e-12, atol=1e-14)
        assert [each.dtype for each in aux] == [each.dtype for each in pair]
    assert step.report.eager == 0 and step.report.checks == 2


@pytest.mark.parametrize("twice", [False, True])
def test_a_buffer_is_read_before_and_after_it_changes(twice: bool) -> None:
    w, buffer = torch.ones(3, requires_grad=True), torch.arange(3.0)

    def loss(w: Tensor) -> Tensor:
        before = buffer.sum()
        buffer.add_(1.0)
        after = buffer.sum()
        if twice:
            buffer.mul_(2.0)
            after = after + 5 * buffer.sum()
        return (w * (before + 10 * after)).sum()

    step = hodiff.compile_step(loss, w, backend="replay", fallback="raise")
    mine = buffer.clone()
    for _ in range(3):
        value, _ = step.value_and_grad()
        first, second = mine.sum(), (mine + 1).sum()
        mine = (mine + 1) * (2 if twice else 1)
        torch.testing.assert_close(value, 3 * (first + 10 * (second + (5 * mine.sum() if twice else 0))))
        torch.testing.assert_close(buffer, mine)
    assert step.report.eager == 0


OPTIONS = {"has_aux": True, "backend": "aot_eager", "fallback": "raise"}


def test_each_option_is_tried() -> None:
    options = inspect.signature(hodiff.compile_step).parameters.values()
    assert {option.name for option in options if option.kind is option.KEYWORD_ONLY} == set(OPTIONS)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_its_options(copied: Callable[[object], object]) -> None:
    w = torch.ones(3, requires_grad=True)

    def loss(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return (w * x).sum() if float(x.sum()) < 1e9 else w.sum(), x

    step = copied(hodiff.compile_step(loss, w, **OPTIONS))
    assert "aot_eager" in repr(step)
    with pytest.raises(hodiff.GraphError, match="cannot be compiled"):
        step(torch.ones(3))
