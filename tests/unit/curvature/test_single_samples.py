"""What is no batch: items of a Dataset and rows of a list that have no batch dimension."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hodiff
from tests.support.properties import agree

D = torch.float64
torch.manual_seed(0)
X, Y, LABELS = torch.randn(12, 5, dtype=D), torch.randn(12, 3, dtype=D), torch.randint(3, (12,))
NET, IMAGES = nn.Linear(5, 3, dtype=D), torch.randn(12, 3, 4, 4, dtype=D)
CONV = nn.Sequential(nn.Conv2d(3, 2, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(-3)).double()
AUTO = nn.Linear(5, 5, dtype=D)
LINE = nn.Sequential(nn.Linear(5, 1), nn.Flatten(-2)).double()


def squares(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return F.mse_loss(m(b[0]), b[1], reduction="sum"), len(b[1])


def half_squares(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return 0.5 * (m(b[0]) - b[1]).square().sum() + 1, len(b[0])


def entropy(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(m(b[0]), torch.as_tensor(b[1]), reduction="sum"), len(b[0])


def entropy_by_labels(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(m(b[0]), b[1], reduction="sum"), len(b[1])


def predict(m: nn.Module, b: Any) -> Tensor:
    return m(b[0])


Make = Callable[[Any], hodiff.LinearOperator]
OPERATORS: dict[str, tuple[Make, Any]] = {
    "Hessian, squares": (lambda data: hodiff.HessianOperator(squares, NET, data=data), (X, Y)),
    "Hessian, half squares": (lambda data: hodiff.HessianOperator(half_squares, NET, data=data), (X, Y)),
    "Hessian, entropy": (lambda data: hodiff.HessianOperator(entropy, NET, data=data), (X, LABELS)),
    "Hessian, labels": (lambda data: hodiff.HessianOperator(entropy_by_labels, NET, data=data), (X, LABELS)),
    "Hessian, mean": (
        lambda data: hodiff.HessianOperator(
            lambda m, b: F.mse_loss(m(b[0]), b[1]), NET, data=data, batch_weight=lambda b: len(b[1])
        ),
        (X, Y),
    ),
    "Hessian, images": (lambda data: hodiff.HessianOperator(entropy, CONV, data=data), (IMAGES, LABELS % 2)),
    "Hessian, one output": (
        lambda data: hodiff.HessianOperator(half_squares, LINE, data=data),
        (X, Y[:, 0]),
    ),
    "Hessian, of a tensor": (
        lambda data: hodiff.HessianOperator(
            lambda w, b: ((b[0] @ w - b[1]).square().sum(), len(b[0])), torch.ones(5, dtype=D), data=data
        ),
        (X, Y[:, 0]),
    ),
    "autoencoder": (
        lambda data: hodiff.HessianOperator(squares, AUTO, data=data),
        (X, X),
    ),
    "Gauss-Newton": (lambda data: hodiff.GaussNewtonOperator(predict, nn.MSELoss(), NET, data=data), (X, Y)),
    "Gauss-Newton, own": (
        lambda data: hodiff.GaussNewtonOperator(
            predict, lambda z, b: ((z - b[1]).square().sum(), len(b[1])), NET, data=data
        ),
        (X, Y),
    ),
    "Fisher": (
        lambda data: hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), NET, data=data, kind="exact"),
        (X, LABELS),
    ),
    "Fisher, empirical": (
        lambda data: hodiff.FisherOperator(predict, nn.MSELoss(), NET, data=data, kind="empirical"),
        (X, Y),
    ),
    "Jacobian": (lambda data: hodiff.JacobianOperator(predict, NET, data=data), (X, Y)),
}  # fmt: skip
operators = pytest.mark.parametrize("name", OPERATORS)


class Pairs(Dataset):
    """Map-style, with plain numbers for labels."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return tuple(c[index] if c.ndim > 1 else c[index].item() for c in self.columns)


@pytest.mark.parametrize("kind", [TensorDataset, Pairs])
@operators
def test_a_dataset_of_samples_is_refused_and_the_way_out_is_right(name: str, kind: Any) -> None:
    make, columns = OPERATORS[name]
    data, state = kind(*columns), torch.get_rng_state()
    A = make(data)
    v = torch.ones(A.shape[1] if name != "Jacobian" else 18, dtype=D)
    with pytest.raises(hodiff.InputError, match=rf"items of this {kind.__name__} are single.*DataLoader\(data, batch"):
        A @ v
    assert torch.equal(torch.get_rng_state(), state)
    agree(make(DataLoader(data, batch_size=5)) @ v, make([columns]) @ v, 1e-10)


class Listed(Dataset):
    """Map-style, over given items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Streamed(IterableDataset):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


BATCHES = [(X[:6], Y[:6]), (X[6:], Y[6:])]
TAKEN: dict[str, Any] = {
    "dataset of batches": Listed(BATCHES),
    "dataset of ragged batches": Listed([(X[:5], Y[:5]), (X[5:], Y[5:])]),
    "dataset of batches of one": Listed([(x[None], y[None]) for x, y in zip(X, Y, strict=True)]),
    "stream": Streamed(BATCHES),
    "list of batches": BATCHES,
    "loader": DataLoader(TensorDataset(X, Y), batch_size=6),
}
ON_PAIRS = [name for name, (_, columns) in OPERATORS.items() if columns[1] is Y]


@pytest.mark.parametrize("data", TAKEN)
@pytest.mark.parametrize("name", ON_PAIRS)
def test_batches_are_taken(name: str, data: str) -> None:
    make, _ = OPERATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = make(TAKEN[data]) @ torch.ones(18, dtype=D)
    agree(found, make([(X, Y)]) @ torch.ones(18, dtype=D), 1e-10)


ADJACENCY = torch.rand(4, 4, dtype=D)
GRAPHS = [(X[:4], ADJACENCY, torch.tensor(1)), (X[4:8], ADJACENCY.T, torch.tensor(2))]


def of_graph(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return F.cross_entropy((b[1] @ m(b[0])).tanh().sum(0), b[2]), 1


def of_nodes(m: nn.Module, b: Any) -> tuple[Tensor, int]:
    return (b[1] @ m(b[0]).sum(-1)).square().sum(), len(b[0])


@pytest.mark.parametrize("loss", [of_graph, of_nodes])
@pytest.mark.parametrize("kind", [list, Listed])
def test_graphs_are_taken(kind: Any, loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hodiff.HessianOperator(loss, NET, data=kind(GRAPHS)) @ torch.ones(18, dtype=D)

    def total(m: nn.Module) -> Tensor:
        sums, weights = zip(*(loss(m, b) for b in GRAPHS), strict=True)
        return sum(sums) / sum(weights)

    agree(found, hodiff.HessianOperator(total, NET) @ torch.ones(18, dtype=D), 1e-10)


# --- rows of a list ---------------------------------------------------------------------------------------------------


ROWS: dict[str, Callable[[], Any]] = {
    "squares": lambda: hodiff.HessianOperator(squares, NET, data=[*zip(X, Y, strict=True)]),
    "entropy": lambda: hodiff.HessianOperator(entropy, NET, data=[*zip(X, LABELS, strict=True)]),
    "autoencoder": lambda: hodiff.HessianOperator(squares, AUTO, data=[*zip(X, X, strict=True)]),
    "one tensor": lambda: hodiff.HessianOperator(
        lambda m, x: (m(x).square().sum(), len(x)), NET, data=list(X)
    ),
    "Gauss-Newton": lambda: hodiff.GaussNewtonOperator(
        predict, lambda z, b: ((z - b[1]).square().sum(), len(b[1])), NET, data=[*zip(X, Y, strict=True)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_list_warn_once(name: str) -> None:
    A = ROWS[name]()
    with pytest.warns(hodiff.HodiffWarning, match=r"looks like a single sample\. The weight \d would") as said:
        A @ torch.ones(A.shape[1], dtype=D)
        A @ torch.ones(A.shape[1], dtype=D)
    assert len(said) == 1 and said[0].filename == __file__


LINES = {
    "each row counts as one": lambda: hodiff.HessianOperator(
        lambda m, x: (m(x).square().sum(), 1), NET, data=list(X), reduction="sum"
    ),
    "outputs (B,)": lambda: hodiff.HessianOperator(half_squares, LINE, data=[(X[:7], Y[:7, 0]), (X[7:], Y[7:, 0])]),
    "inputs (B,)": lambda: hodiff.HessianOperator(
        lambda w, b: ((w[0] * b[0] - b[1]).square().sum(), len(b[0])), torch.ones(1, dtype=D),
        data=[(X[:7, 0], Y[:7, 0]), (X[7:, 0], Y[7:, 0])],
    ),
    "empirical Fisher, outputs (B,)": lambda: hodiff.FisherOperator(
        predict, nn.MSELoss(), LINE, data=[(X[:7], Y[:7, 0]), (X[7:], Y[7:, 0])], kind="empirical"
    ),
    "empirical Fisher, inputs (B,)": lambda: hodiff.FisherOperator(
        lambda w, b: w[0] * b[0], nn.MSELoss(), torch.ones(1, dtype=D), data=[(X[:, 0], Y[:, 0])], kind="empirical"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_batches_of_one_dimension_are_silent(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        A = LINES[name]()
        A @ torch.ones(A.shape[1], dtype=D)


EMPIRICAL = {
    "rows": [*zip(X, Y, strict=True)],
    "one row": [(X[0], Y[0])],
    "a tuple of rows": tuple(zip(X, Y, strict=True)),
    "a stream of rows": Streamed([*zip(X, Y, strict=True)]),
}


@pytest.mark.parametrize("data", EMPIRICAL)
@pytest.mark.parametrize("loss", [nn.MSELoss(), lambda z, b: ((z - b[1]).square().sum(), len(b[1]))])
def test_empirical_fisher_takes_no_outputs_for_samples(data: str, loss: Any) -> None:
    F = hodiff.FisherOperator(predict, loss, NET, data=EMPIRICAL[data], kind="empirical")
    with pytest.raises(hodiff.InputError, match="would take its 3 outputs for 3 samples"):
        F @ torch.ones(18, dtype=D)
