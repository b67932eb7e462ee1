"""Each operation of PyTorch's own database: Taylor mode is right, or raises. No wrong number.

The database needs `expecttest`; it is a development check, not part of the ordinary suite. The oracle is nested
reverse mode of the native operation at order 2, which PyTorch gets right wherever it gives a number.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor

import hodiff
from hodiff.jets import _push
from tests.unit.jets.oracle import derivative

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")
pytestmark = pytest.mark.slow

ORDER = 2
SAMPLES = 6

# Not a derivative that both routes define alike: kinks in the samples, random results, or tensors without entries.
ILL_POSED = {
    "nn.functional.cosine_embedding_loss",  # its samples lie on its kink
    "nn.functional.ctc_loss",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


def operators():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes and op.name not in ILL_POSED]


def first_output(result):
    while isinstance(result, (tuple, list)):
        result = next((r for r in result if isinstance(r, Tensor) and r.is_floating_point()), None)
    return result if isinstance(result, Tensor) and result.is_floating_point() else None


def coefficients(f, x, v):
    """By nested reverse mode; None where PyTorch has no such derivative."""
    t = torch.zeros((), dtype=x.dtype, requires_grad=True)
    y = first_output(f(x + t * v))
    if y is None or not y.requires_grad:
        return None
    u = torch.ones_like(y, requires_grad=True)
    g, out = (u * y).sum(), [y]
    for k in range(1, ORDER + 1):
        g = derivative(g, t)
        out.append(derivative(g, u) / math.factorial(k))
    return out


def as_function(op, sample):
    """The operation as a function of its first floating point tensor."""
    if isinstance(sample.input, (list, tuple)):
        rest = list(sample.input[1:])
        return lambda x: op.op(type(sample.input)([x, *rest]), *sample.args, **sample.kwargs), sample.input[0]
    return lambda x: op.op(x, *sample.args, **sample.kwargs), sample.input


def samples(op):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [s for _, s in zip(range(SAMPLES), op.sample_inputs("cpu", torch.float64), strict=False)]
    for sample in found:
        f, x = as_function(op, sample)
        if isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided and 0 < x.numel() < 400:
            yield f, x.detach()


def verdict(f, x):
    """ "right", "raises", "no oracle", or the error as a number."""
    v = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)
    try:
        torch.manual_seed(0)
        expected = coefficients(f, x, v)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return "no oracle"
    try:
        torch.manual_seed(0)
        output, expansion = _push.push(f, [x], [[v.unsqueeze(0)]], ORDER)
        series = _push.coefficients(first_output(output) if isinstance(output, (tuple, list)) else output, expansion)
        got = [series[0], *(_push.entry(series, k, 1)[0] for k in range(1, ORDER + 1))]
    except (hodiff.HodiffError, NotImplementedError):
        return "raises"
    except Exception as error:  # loud, but not in our words
        return f"fails with {type(error).__name__}"
    if expected is None:
        return "no oracle"
    worst = 0.0
    for a, b in zip(got, expected, strict=True):
        a, b = a.detach(), b.detach()
        if a.shape != b.shape:
            return math.inf
        finite = torch.isfinite(b)
        scale = 1 + float(b[finite].abs().max()) if finite.any() else 1.0
        worst = max(worst, float((a - b)[finite].abs().nan_to_num(math.inf).max()) / scale if finite.any() else 0.0)
    return "right" if worst < 1e-8 else worst


@pytest.mark.filterwarnings("ignore")
def test_right_or_raises():
    """In one test: importing the database takes longer than most of what it checks."""
    found = {}
    for op in operators():
        if op.variant_test_name == "subgradients_at_zero":
            continue  # by name not differentiable there
        for f, x in samples(op):
            found.setdefault(f"{op.name} {op.variant_test_name}".strip(), []).append(verdict(f, x))
    wrong = {name: each for name, each in found.items() if any(not isinstance(v, str) for v in each)}
    count = lambda kind: sum("right" in each if kind == "right" else set(each) == {kind} for each in found.values())
    print(
        f"{len(found)} operations: {count('right')} right, {count('raises')} raise, {count('no oracle')} without oracle"
    )
    print("raise:", sorted(name for name, each in found.items() if "raises" in each))
    failing = sorted(f"{name}: {v}" for name, each in found.items() for v in set(each) if str(v).startswith("fails"))
    assert not wrong, "\n".join(f"{name}: {each}" for name, each in sorted(wrong.items()))
    assert not failing, "errors that are not in our words:\n" + "\n".join(failing)
    assert count("right") > 420
