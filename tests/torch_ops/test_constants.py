"""The list of smooth functions that PyTorch takes for constants is complete, as far as its own database goes."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hodiff._core import _messages
from tests.torch_ops.database import _replace, tensors

SAMPLES = 40
STEP = 1e-4

PARTLY = {
    "native_batch_norm": "the statistics that it returns beside the result",
    "native_layer_norm": "the statistics that it returns beside the result",
    "_batch_norm_with_update": "the statistics that it returns beside the result",
    "_native_batch_norm_legit": "the statistics that it returns beside the result",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "the log-sum-exp; not in the database of 2.13",
    "linalg.lstsq": "the singular values that it returns beside the solution",
}
EMPTY = {"empty_like", "new_empty", "new_empty_strided", "empty", "empty_permuted", "empty_strided"}  # memory as it was


def _alone(op: Any, sample: Any) -> Iterator[tuple[Callable[[Tensor], list[Tensor]], Tensor]]:
    """The operation as a function of each of its tensors."""
    template = (sample.input, tuple(sample.args), dict(sample.kwargs))
    given: list[Tensor] = []
    _replace(template, lambda t: given.append(t) or t)
    for chosen, point in enumerate(given):
        if not point.is_floating_point() or point.layout != torch.strided:
            continue

        def results(x: Tensor, chosen: int = chosen) -> list[Tensor]:
            index = iter(range(len(given)))
            put = lambda t: x if next(index) == chosen else t.detach().clone()
            input, args, kwargs = _replace(template, put)
            torch.manual_seed(0)
            return [t for t in tensors(op.op(input, *args, **kwargs)) if t.is_floating_point()]

        yield results, point.detach()


def _moves(results: Callable[[Tensor], list[Tensor]], x: Tensor) -> bool:
    """Whether a result without a graph moves with the argument, smoothly: in proportion to the step."""
    try:
        here = results(x.clone().requires_grad_())
        lost = [number for number, t in enumerate(here) if not t.requires_grad and t.layout == torch.strided]
        if not lost:
            return False
        direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
        near, far = results(x + STEP * direction), results(x + 2 * STEP * direction)
    except Exception:  # it cannot be called so
        return False
    for number in lost:
        if not here[number].shape == near[number].shape == far[number].shape:
            continue
        one, two = (near[number] - here[number]) / STEP, (far[number] - here[number]) / (2 * STEP)
        moved = one.isfinite() & two.isfinite() & (one != 0)
        if moved.any() and bool((((one - two).abs() <= 0.05 * one.abs() + 1e-9)[moved]).double().mean() > 0.5):
            return True
    return False


@pytest.mark.nightly
def test_no_other_operation_gives_smooth_constants() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

        found = set()
        for op in op_db:
            if torch.float64 not in op.dtypes or op.name in EMPTY:
                continue
            torch.manual_seed(0)
            samples = [*op.sample_inputs("cpu", torch.float64, requires_grad=False)][:SAMPLES]
            if any(_moves(*each) for sample in samples for each in _alone(op, sample)):
                found.add(op.name)
    known = {name.replace("special_", "special.") for name in _messages.CONSTANTS}
    assert found <= known | set(PARTLY)
    assert len(found) >= len(known) + len(PARTLY) - 2  # it may lack an operation, and samples of logspace
