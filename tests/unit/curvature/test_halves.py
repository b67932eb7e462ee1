"""Half precision, of weights or by autocast: what records say holds, for each kind of operator and each estimator."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.operators import D, draw

DTYPES = {torch.float16: 0.03, torch.bfloat16: 0.12, torch.float32: 0.03}
"""What rounding may change, of the whole; with weights in float32, the network runs under autocast."""

LABELS = torch.randint(3, (7,), generator=torch.Generator().manual_seed(0))


class Network(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=input.dtype == torch.float32):
            return super().forward(input)


def network() -> nn.Sequential:
    """Weights that bfloat16 has, in float64."""
    torch.manual_seed(0)
    return Network(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3)).bfloat16().to(D)


X, TARGETS = draw(7, 4, seed=1).bfloat16().to(D), draw(7, 3, seed=2).bfloat16().to(D)


def _predict(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0])


def _summed(of: Callable[[Tensor], Tensor]) -> Callable[[Tensor, tuple[Tensor, Tensor]], tuple[Tensor, int]]:
    return lambda outputs, batch: (F.cross_entropy(of(outputs), batch[1], reduction="sum"), len(outputs))


def _gauss_newton(loss: Any, model: nn.Module, x: Tensor, **options: Any) -> Any:
    return hodiff.GaussNewtonOperator(_predict, loss, model, data=[(x, LABELS)], **options)


def _jacobian(model: nn.Module, x: Tensor) -> Any:
    return hodiff.JacobianOperator(_predict, model, data=[(x, LABELS)])


OPERATORS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "H": lambda m, x: hodiff.HessianOperator(
        lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[0])), m, data=[(x, LABELS)]
    ),
    "G": lambda m, x: _gauss_newton(nn.CrossEntropyLoss(), m, x),
    "G, smoothed": lambda m, x: _gauss_newton(nn.CrossEntropyLoss(label_smoothing=0.1), m, x),
    "G of squares": lambda m, x: hodiff.GaussNewtonOperator(_predict, nn.MSELoss(), m, data=[(x, TARGETS.to(x.dtype))]),
    "G of a function": lambda m, x: _gauss_newton(_summed(lambda outputs: outputs), m, x),
    "G where samples meet": lambda m, x: _gauss_newton(_summed(lambda outputs: outputs - 0.5 * outputs.mean(0)), m, x),
    "G of a loss that is curved alike": lambda m, x: _gauss_newton(lambda o, b: (o.pow(4).sum(), len(o)), m, x),
    "F": lambda m, x: hodiff.FisherOperator(_predict, nn.CrossEntropyLoss(), m, data=[(x, LABELS)], kind="exact"),
    "F, empirical": lambda m, x: hodiff.FisherOperator(
        _predict, nn.CrossEntropyLoss(), m, data=[(x, LABELS)], kind="empirical"
    ),
    "J J'": lambda m, x: _jacobian(m, x) @ _jacobian(m, x).T,
    "J' J": lambda m, x: _jacobian(m, x).T @ _jacobian(m, x),
}


def _size(x: Any) -> float:
    parts = x.values() if isinstance(x, dict) else [torch.as_tensor(x)]
    return float(torch.cat([part.detach().double().reshape(-1) for part in parts]).norm())


def _eigenvalues(M: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(M).flip(0)[:2]


ESTIMATORS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor], str]] = {
    "trace": (lambda A: hodiff.trace(A, generator=torch.Generator().manual_seed(0)), torch.trace, "stderr"),
    "diagonal": (lambda A: hodiff.diagonal(A, generator=torch.Generator().manual_seed(0)), torch.diagonal, "stderr"),
    "eigsh": (lambda A: hodiff.eigsh(A, 2), _eigenvalues, "residual"),
}


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("estimator", "name"),
    [(e, name) for e in ESTIMATORS for name in OPERATORS if e != "eigsh" or name[0] != "J"],  # it takes no products
)
def test_the_truth_lies_within_what_is_said(estimator: str, name: str, dtype: torch.dtype) -> None:
    estimate, exact, said = ESTIMATORS[estimator]
    true = exact(OPERATORS[name](network(), X).dense())
    record = estimate(OPERATORS[name](copy.deepcopy(network()).to(dtype), X.to(dtype)))
    parts = record.value.values() if isinstance(record.value, dict) else [record.value]
    value = torch.cat([part.double().reshape(-1) for part in parts])
    assert (value - true).norm() <= DTYPES[dtype] * true.norm() + 4 * _size(getattr(record, said))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_small_weight_of_an_operator_of_second_order_counts(dtype: torch.dtype) -> None:
    C = torch.diag(torch.tensor([1.0, 0.01, 0.0, 0.0], dtype=dtype))
    found = hodiff.second_order_operator(lambda x: 50 * x[..., 1] ** 2, torch.ones(1, 4, dtype=dtype), C)
    assert float(found) == pytest.approx(1, rel=0.01)
