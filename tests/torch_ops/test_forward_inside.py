"""Reverse mode over PyTorch's forward mode, for each operation of its own database: right or refused by name."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff._core import _messages
from hodiff.errors import GraphError
from tests.torch_ops.database import _replace, tensors

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

D = torch.float64
SAMPLES = 6
KINKS = {
    "nn.functional.cosine_embedding_loss": "a margin",
    "nn.functional.hinge_embedding_loss": "a margin",
    "nn.functional.max_unpool1d": "which of several that go to one place is kept",
    "nn.functional.max_unpool2d": "which of several that go to one place is kept",
    "nn.functional.max_unpool3d": "which of several that go to one place is kept",
    "linalg.cholesky": "symmetric samples: along others the triangle that is read changes alone",
    "linalg.cholesky_ex": "symmetric samples",
    "linalg.eigvalsh": "symmetric samples",
    "linalg.pinv hermitian": "symmetric samples",
    "linalg.matrix_sqrth": "symmetric samples; new in 2.15",
}
"""Operations whose samples have no derivative along every direction."""


def _error(op: Any, sample: Any) -> float | None:
    """How far the gradient of a tangent is from differences of it; None where there is nothing to compare."""
    template = (sample.input, tuple(sample.args), dict(sample.kwargs))
    given: list[Tensor] = []
    _replace(template, lambda t: given.append(t) or t)
    chosen = [i for i, t in enumerate(given) if t.requires_grad and t.is_floating_point() and t.numel()]
    if not chosen:
        return None

    def g(*points: Tensor) -> tuple[Tensor, ...]:
        index = iter(range(len(given)))
        replaced = dict(zip(chosen, points, strict=True))

        def put(t: Tensor) -> Tensor:
            i = next(index)
            return replaced[i] * 1 if i in replaced else t.detach()

        input, args, kwargs = _replace(template, put)
        torch.manual_seed(0)
        return tuple(t for t in tensors(op(input, *args, **kwargs)) if t.is_floating_point())

    def f(points: tuple[Tensor, ...]) -> Tensor:
        tangents: Any = torch.func.jvp(g, points, tuple(p.cos() for p in points))[1]
        weights = lambda t: torch.linspace(0.3, 1.7, t.numel(), dtype=t.dtype).reshape(t.shape)
        return sum((t.sin() * weights(t)).sum() for t in tangents)  # type: ignore[return-value]

    base = tuple(given[i].detach().clone() for i in chosen)
    along = tuple(torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype) for p in base)
    try:
        at = lambda h: float(f(tuple(p + h * v for p, v in zip(base, along, strict=True))))
        coarse, fine = ((at(h) - at(-h)) / (2 * h) for h in (1e-5, 5e-6))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # PyTorch has no forward mode of it
    right = (4 * fine - coarse) / 3
    if not abs(coarse - fine) <= 1e-3 * max(1, abs(right)):
        return None
    try:
        found = hodiff.grad(f, base, strict=False)
    except (GraphError, RuntimeError, NotImplementedError):
        return None
    return abs(float(sum((a * v).sum() for a, v in zip(found, along, strict=True))) - right) / max(1e-2, abs(right))


@pytest.mark.nightly
def test_each_operation() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    wrong, compared = [], 0
    for op in op_db:
        name = f"{op.name} {op.variant_test_name}".strip()
        if (
            name in KINKS
            or not op.supports_forward_ad
            or not op.supports_autograd
            or D not in op.supported_dtypes("cpu")
        ):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = [s for _, s in zip(range(SAMPLES), op.sample_inputs("cpu", D, requires_grad=True), strict=False)]
            errors = [_error(op, sample) for sample in samples if isinstance(sample.input, Tensor)]
        compared += any(error is not None for error in errors)
        wrong += [f"{name}: {error}" for error in errors if error is not None and error > 1e-4]
    assert compared > 400
    assert not wrong, "\n".join(wrong)


def test_the_names_are_of_operations() -> None:
    """A name that PyTorch no longer has would be served by nothing."""
    for name in _messages.WRONG_TANGENTS:
        places = (torch, torch.linalg, Tensor, torch.ops.aten)
        assert any(hasattr(place, name) for place in places), name
