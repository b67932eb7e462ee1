"""Operators with their dense matrix, found without hodiff: closed forms and plain `autograd.grad`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff

D = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


X = draw(10, 3, seed=1)
LABELS = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 2])
SIGNS = (LABELS > 0).to(D)
TARGETS = draw(10, 3, seed=2)


def split(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """A ragged pair of batches: 7 and 3."""
    return [tuple(t[:7] for t in tensors), tuple(t[7:] for t in tensors)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).double()


def plain_hessian(value: Tensor, leaves: list[Tensor]) -> Tensor:
    """Double backward, row by row."""
    grads = torch.autograd.grad(value, leaves, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in grads])
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True, materialize_grads=True) for entry in flat]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def plain_jacobian(outputs: Tensor, leaves: list[Tensor]) -> Tensor:
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True) for entry in outputs.reshape(-1)]
    return torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])


def predict(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(batch[0])


def sum_of_cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def squares(outputs: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """A loss that is not convex, with Hessian entries off the diagonal."""
    return ((outputs.cumsum(-1) - batch[1]).square() * 0.5 + torch.sin(outputs)).sum(), len(outputs)


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], tuple[hodiff.LinearOperator, Tensor]]
    symmetric: bool = True

    def __repr__(self) -> str:
        return self.name


def logistic() -> tuple[hodiff.LinearOperator, Tensor]:
    """Logistic regression: X' diag(p (1 - p)) X / n."""
    w = draw(3, seed=3)

    def loss(w: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        return F.binary_cross_entropy_with_logits(batch[0] @ w, batch[1], reduction="sum"), len(batch[1])

    p = torch.sigmoid(X @ w)
    return hodiff.HessianOperator(loss, w, data=split(X, SIGNS)), X.T @ ((p * (1 - p))[:, None] * X) / 10


def least_squares(budget: float = 0.5) -> tuple[hodiff.LinearOperator, Tensor]:
    """2 X'X / n for each of the two columns of W, which is (3, 2): the Kronecker product with I."""
    W = draw(3, 2, seed=4)

    def loss(W: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        return (batch[0] @ W - batch[1][:, :2]).square().sum(), len(batch[0])

    operator = hodiff.HessianOperator(loss, W, data=split(X, TARGETS), memory_budget=budget)
    return operator, torch.kron(2 * X.T @ X / 10, torch.eye(2, dtype=D))


def of_network(budget: float = 0.5) -> tuple[hodiff.LinearOperator, Tensor]:
    model = network()
    operator = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS), memory_budget=budget)
    return operator, plain_hessian(F.cross_entropy(model(X), LABELS), list(model.parameters()))


def of_container() -> tuple[hodiff.LinearOperator, Tensor]:
    point = {"a": draw(2, seed=5), "b": [draw(2, 2, seed=6)]}
    f = lambda p: (p["b"][0] @ torch.sin(p["a"])).prod() + (p["a"] ** 4).sum()
    leaves = [point["a"].clone().requires_grad_(), point["b"][0].clone().requires_grad_()]
    return hodiff.HessianOperator(f, point), plain_hessian(f({"a": leaves[0], "b": [leaves[1]]}), leaves)


def of_tensor() -> tuple[hodiff.LinearOperator, Tensor]:
    """The tensor form: x' diag(c) x summed with a product."""
    x = draw(4, seed=7).requires_grad_()
    c = draw(4, seed=8)
    return hodiff.HessianOperator((c * x**2).sum() / 2 + x.sum() ** 2, x), torch.diag(c) + 2


def gauss_newton(loss: object, targets: Tensor, budget: float = 0.5) -> tuple[hodiff.LinearOperator, Tensor]:
    """J' H_out J, with the Jacobian and the Hessian of the loss by plain passes over the union of the batches."""
    model = network()
    operator = hodiff.GaussNewtonOperator(predict, loss, model, data=split(X, targets), memory_budget=budget)
    J = plain_jacobian(model(X), list(model.parameters()))
    z = model(X).detach().requires_grad_()
    if isinstance(loss, nn.Module):
        value = loss(z, targets)
    else:
        total, count = loss(z, (X, targets))  # type: ignore[operator]
        value = total / count
    return operator, J.T @ plain_hessian(value, [z]) @ J


def fisher(kind: str) -> tuple[hodiff.LinearOperator, Tensor]:
    model = network()
    leaves = list(model.parameters())
    options = {"samples": 3, "generator": torch.Generator().manual_seed(0)} if kind == "mc" else {}
    operator = hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), model, data=split(X, LABELS), kind=kind, **options)
    if kind == "exact":  # the expectation over labels, written out
        total = torch.zeros(39, 39, dtype=D)
        p = torch.softmax(model(X), 1).detach()
        for i in range(10):
            for label in range(3):
                g = plain_jacobian(F.cross_entropy(model(X[i : i + 1]), torch.tensor([label])).reshape(1), leaves)
                total += p[i, label] * g.T @ g
        return operator, total / 10
    if kind == "mc":  # drawn labels are its own; the matrix must be rebuilt from them
        operator @ torch.zeros(39, dtype=D)
        scores = torch.cat([part for number in (0, 1) for part in operator._graphs.builder.scores[number]], 1)
        J = plain_jacobian(model(X), leaves).reshape(10, 3, -1)
        g = torch.einsum("sic,icd->sid", scores, J).reshape(-1, 39)
        return operator, g.T @ g / 30
    g = torch.cat([
        plain_jacobian(F.cross_entropy(model(X[i : i + 1]), LABELS[i : i + 1]).reshape(1), leaves) for i in range(10)
    ])  # fmt: skip
    return operator, g.T @ g / 10


def jacobian(budget: float = 0.5) -> tuple[hodiff.LinearOperator, Tensor]:
    model = network()
    operator = hodiff.JacobianOperator(predict, model, data=split(X), memory_budget=budget)
    return operator, plain_jacobian(model(X), list(model.parameters()))


def algebra() -> tuple[hodiff.LinearOperator, Tensor]:
    H, dense = of_network()
    other = hodiff.MatrixOperator(torch.diag(draw(39, seed=9)))
    return 2 * H - other / 4 + 0.3, 2 * dense - other.dense() / 4 + 0.3 * torch.eye(39, dtype=D)


def product() -> tuple[hodiff.LinearOperator, Tensor]:
    H, dense = of_network()
    other = hodiff.MatrixOperator(torch.tril(draw(39, 39, seed=10)))
    return H @ other, dense @ other.dense()


def block(build: Callable[[], tuple[hodiff.LinearOperator, Tensor]]) -> tuple[hodiff.LinearOperator, Tensor]:
    """The rows and columns of the layer norm and the last bias."""
    operator, dense = build()
    index = torch.cat([torch.arange(16, 24), torch.arange(36, 39)])
    return operator.block("1", "3.b*"), dense[index][:, index]


def matrix(rows: int, columns: int) -> tuple[hodiff.LinearOperator, Tensor]:
    A = draw(rows, columns, seed=11)
    return hodiff.MatrixOperator(A), A


def turned(build: Callable[[], tuple[hodiff.LinearOperator, Tensor]]) -> tuple[hodiff.LinearOperator, Tensor]:
    operator, dense = build()
    return operator.T, dense.T


SMOOTH = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0], dtype=D), label_smoothing=0.2)
IGNORED = torch.where(torch.arange(10) < 3, -100, LABELS)
POSITIVE = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.5, 2.0, 1.0], dtype=D), weight=SMOOTH.weight)

CASES = (
    Case("Hessian, logistic regression", logistic),
    Case("Hessian, least squares", least_squares),
    Case("Hessian, least squares, nothing kept", lambda: least_squares(0)),
    Case("Hessian, network", of_network),
    Case("Hessian, network, nothing kept", lambda: of_network(0)),
    Case("Hessian, container", of_container),
    Case("Hessian, tensor form", of_tensor),
    Case("Hessian, block", lambda: block(of_network)),
    Case("Gauss-Newton, cross-entropy", lambda: gauss_newton(nn.CrossEntropyLoss(), LABELS)),
    Case("Gauss-Newton, cross-entropy, ignored", lambda: gauss_newton(nn.CrossEntropyLoss(), IGNORED)),
    Case("Gauss-Newton, weights and smoothing", lambda: gauss_newton(SMOOTH, IGNORED)),
    Case("Gauss-Newton, probabilities", lambda: gauss_newton(SMOOTH, torch.softmax(TARGETS, 1))),
    Case("Gauss-Newton, sum", lambda: gauss_newton(nn.CrossEntropyLoss(reduction="sum"), LABELS)),
    Case("Gauss-Newton, squared error", lambda: gauss_newton(nn.MSELoss(), TARGETS)),
    Case("Gauss-Newton, binary", lambda: gauss_newton(POSITIVE, (TARGETS > 0).to(D))),
    Case("Gauss-Newton, any loss", lambda: gauss_newton(squares, TARGETS)),
    Case("Gauss-Newton, nothing kept", lambda: gauss_newton(squares, TARGETS, 0)),
    Case("Gauss-Newton, block", lambda: block(lambda: gauss_newton(squares, TARGETS))),
    Case("Fisher, exact", lambda: fisher("exact")),
    Case("Fisher, mc", lambda: fisher("mc")),
    Case("Fisher, empirical", lambda: fisher("empirical")),
    Case("Jacobian", jacobian, symmetric=False),
    Case("Jacobian, nothing kept", lambda: jacobian(0), symmetric=False),
    Case("Jacobian, transposed", lambda: turned(jacobian), symmetric=False),
    Case("matrix", lambda: matrix(4, 6), symmetric=False),
    Case("diagonal matrix", lambda: (hodiff.MatrixOperator(draw(5)), torch.diag(draw(5)))),
    Case("sum, difference, multiple, shift", algebra),
    Case("product", product, symmetric=False),
    Case("product, transposed", lambda: turned(product), symmetric=False),
    Case("block of a product", lambda: block(product), symmetric=False),
    Case("block of a sum", lambda: block(algebra)),
)
