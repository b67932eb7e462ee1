"""PyTorch's own database of operations, each sample of it as a function of one flat vector.

The database (`torch.testing._internal`, which needs `expecttest`) is meant for PyTorch's developers: these tests alone
use it. A sample varies in all its tensors that are differentiated, weights and biases too: some derivatives are wrong
only where two of them vary.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.torch_ops.more import MORE

LARGEST = 1200  # entries; a larger sample is taken where an operation has no smaller one

# Not functions (entries that nobody has written), or casts to a precision in which there are no differences to take.
LEFT_OUT = {
    "bfloat16",
    "cfloat",
    "chalf",
    "float",
    "half",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


OVERWRITTEN = "entries of the result that several entries are written to hold one of them, and each gets the gradient"
DEFINED = {  # gradients that are not derivatives of PyTorch's values, by definition or by rounding, in some samples
    "normal": "PyTorch has no derivative of what it draws by the mean or the deviation, and says that it is zero",
    "nn.functional.max_unpool1d": OVERWRITTEN,
    "nn.functional.max_unpool2d": OVERWRITTEN,
    "nn.functional.max_unpool3d": OVERWRITTEN,
    "special.bessel_y1": "values are right to 8e-7 in double precision (2.15), and the derivative to 3e-7",
}


@dataclass(frozen=True)
class Problem:
    """A function of a flat vector with a flat result, and the point.

    Attributes:
        outputs: The operation.
        x: The point.
        defined: Where PyTorch defines its gradient otherwise than as the derivative, how.
    """

    outputs: Callable[[Any], Any]
    x: Tensor
    defined: str = ""

    def loss(self) -> Callable[[Any], Any]:
        """A scalar of the outputs: a cubic, so that no derivative of it up to the third is a constant."""
        with torch.no_grad():
            y = self.outputs(self.x)
        scale = 1 / (1 + float(y.abs().max())) if y.numel() else 1.0
        weight = torch.cos(1.3 * torch.arange(y.numel(), dtype=y.dtype)) + 0.2

        def loss(x: Any) -> Any:
            h = scale * self.outputs(x)
            return (weight * (h + h**2 / 2 + h**3 / 6)).sum()

        return loss


def problems(name: str, count: int) -> Iterator[Problem]:
    """Some of the samples of an operation, evenly drawn from all that are small."""
    if name in MORE:
        yield from (Problem(*problem) for problem in MORE[name]())
        return
    found = [sample for op in _operations()[name] for sample in _samples(op)]
    found = [each for each in found if each.x.numel() <= LARGEST] or sorted(found, key=lambda each: each.x.numel())[:1]
    step = max(1, len(found) / count)
    yield from (found[int(index * step)] for index in range(min(count, len(found))))


def names() -> list[str]:
    """The operations, those that the database lacks last."""
    return [*sorted(_operations()), *MORE]


_found: dict[str, list[Any]] = {}


def _operations() -> dict[str, list[Any]]:
    if not _found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
        for op in op_db:
            kinked = op.variant_test_name == "subgradients_at_zero"
            if op.supports_autograd and torch.float64 in op.dtypes and op.name not in LEFT_OUT and not kinked:
                _found.setdefault(f"{op.name} {op.variant_test_name}".strip(), []).append(op)
    return _found


def _samples(op: Any) -> list[Problem]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = [_problem(op, sample) for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True)]
    return [problem for problem in found if problem is not None]


def _problem(op: Any, sample: Any) -> Problem | None:
    given: list[Tensor] = []
    template = _replace((sample.input, tuple(sample.args), dict(sample.kwargs)), lambda t: given.append(t) or t)
    varied = [t for t in given if _varies(t)]
    x = torch.cat([t.detach().reshape(-1) for t in varied]) if varied else torch.zeros(0)
    if not x.numel() or any(t.requires_grad and not _varies(t) for t in given):
        return None
    sizes = [t.numel() for t in varied]

    def results(flat: Any) -> list[Any]:
        # Clones, since an operation on strides (`as_strided`) looks at all the memory behind its argument.
        parts = iter([part.reshape(t.shape).clone() for part, t in zip(flat.split(sizes), varied, strict=True)])
        put = lambda t: next(parts) if _varies(t) else t.detach().clone()
        input, args, kwargs = _replace(template, put)
        torch.manual_seed(0)
        return tensors(sample.output_process_fn_grad(op.gradcheck_wrapper(op.op, input, *args, **kwargs)))

    try:  # what an operation returns beside its result, saved statistics say, has no derivative
        taken = [t.requires_grad for t in results(x.clone().requires_grad_())]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    if not any(taken):
        return None
    chosen = lambda flat: flattened([t for t, is_taken in zip(results(flat), taken, strict=True) if is_taken])
    return Problem(chosen, x, DEFINED.get(op.name, ""))


def _varies(t: Tensor) -> bool:
    return t.requires_grad and t.dtype == torch.float64 and t.layout is torch.strided


def _replace(value: Any, put: Callable[[Tensor], Any]) -> Any:
    """The same structure, with each tensor replaced."""
    if isinstance(value, Tensor):
        return put(value)
    if isinstance(value, dict):
        return {key: _replace(item, put) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replace(item, put) for item in value)
    return value


def tensors(result: Any) -> list[Any]:
    """All tensors in a result, in order."""
    found: list[Any] = []
    _replace(tuple(result) if isinstance(result, tuple) else result, lambda t: found.append(t))
    return found


def flattened(result: list[Any]) -> Any:
    """The real numbers of some tensors, as one vector."""
    parts = []
    for t in result:
        if t.layout is not torch.strided:
            t = t.to_dense()
        parts.append((torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).reshape(-1))
    return torch.cat(parts)
