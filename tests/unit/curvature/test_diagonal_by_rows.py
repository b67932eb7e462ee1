"""Diagonals and traces of J' B J by its rows, against a pass for each output and `torch.func.hessian` of the loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.operators import D
from tests.support.passes import Count
from tests.support.properties import agree
from tests.support.releases import CHECKPOINTS

N = 6
X = torch.linspace(-1, 1, 4 * N, dtype=D).reshape(N, 4).mul(9).sin()
REAL = torch.linspace(-2, 2, 3 * N, dtype=D).reshape(N, 3).mul(5).cos()
LABELS = torch.arange(N) % 3
LABELS_AT = (torch.arange(2 * N).reshape(N, 2) % 4).clamp(max=2)


def summed(values: Tensor, b: Any) -> tuple[Tensor, int]:
    return values.sum(), len(b[0])


class Case(NamedTuple):
    """A network, how it is called, a loss, targets, and whether rows give the diagonal."""

    model: Callable[[], nn.Module]
    loss: Any
    target: Tensor = LABELS
    predict: Callable[[Any, Any], Any] = lambda m, b: m(b[0])
    passes: int | None = 3
    each: bool = False
    """Whether each sample takes these passes for itself."""


def dense(last: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, last))


def other(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3))


def at_places(m: nn.Module, b: Any) -> Tensor:
    """Three classes at two places."""
    return m(b[0]).view(-1, 2, 3).mT


def pair(m: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    mean, raw = m(b[0]).split([3, 3], 1)
    return mean, F.softplus(raw) + 0.1


CASES: dict[str, Case] = {
    "classes": Case(dense, nn.CrossEntropyLoss(), passes=2),
    "classes, weighed and smoothed": Case(
        dense, nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=D), label_smoothing=0.1), passes=2
    ),
    "classes, some ignored": Case(dense, nn.CrossEntropyLoss(ignore_index=1), passes=2),
    "classes at places": Case(lambda: dense(6), nn.CrossEntropyLoss(ignore_index=2), LABELS_AT, at_places, 4),
    "squares": Case(dense, nn.MSELoss(), REAL),
    "squares, summed": Case(dense, nn.MSELoss(reduction="sum"), REAL),
    "one output": Case(lambda: dense(1), nn.MSELoss(), REAL[:, 0], lambda m, b: m(b[0]).squeeze(1), 1),
    "binary": Case(dense, nn.BCEWithLogitsLoss(), (REAL > 0).to(D)),
    "binary, weighed": Case(dense, nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0, dtype=D)), (REAL > 0).to(D)),
    "counts": Case(dense, nn.PoissonNLLLoss(), REAL.abs().round()),
    "a loss of one's own": Case(dense, lambda z, b: summed(z.logsumexp(1).exp(), b), passes=3),
    "two outputs": Case(
        lambda: dense(6),
        lambda z, b: summed((z[0] - b[1]).square() * 2 + z[1].exp() + z[0] * z[1] * 0.1, b),
        REAL,
        pair,
        6,
    ),
    "a layer that is not read": Case(other(nn.PReLU()), nn.CrossEntropyLoss(), passes=2, each=True),
    "samples that mix": Case(other(nn.BatchNorm1d(5)), nn.CrossEntropyLoss(), passes=2, each=True),
    "samples that meet in the loss": Case(dense, lambda z, b: summed(z.sum(0).square(), b), passes=None),
    "a little": Case(dense, lambda z, b: summed(z.square() + 1e-6 * z.sum(0).square(), b), passes=None),
    "not convex": Case(lambda: dense(6), nn.GaussianNLLLoss(), 3 * REAL, pair, None),
}


def by_hand(case: Case, model: nn.Module, batch: Any) -> tuple[list[Tensor], Tensor]:
    """Of the sum over a batch: for each parameter the diagonal, and all of the matrix."""
    outputs = case.predict(model, batch)
    parts = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    own, sizes = list(model.parameters()), [part.numel() for part in parts]
    rows = [torch.autograd.grad(z, own, retain_graph=True) for part in parts for z in part.flatten()]
    J = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])

    def total(flat: Tensor) -> Tensor:
        shaped = [x.view_as(part) for x, part in zip(flat.split(sizes), parts, strict=True)]
        z = shaped[0] if isinstance(outputs, Tensor) else tuple(shaped)
        if isinstance(case.loss, nn.GaussianNLLLoss):
            return F.gaussian_nll_loss(z[0], batch[1], z[1], reduction="sum")
        if not isinstance(case.loss, nn.Module):
            return case.loss(z, batch)[0]
        reduction, case.loss.reduction = case.loss.reduction, "sum"
        try:
            return case.loss(z, batch[1])
        finally:
            case.loss.reduction = reduction

    H = torch.autograd.functional.hessian(total, torch.cat([part.detach().flatten() for part in parts]))
    assert isinstance(H, Tensor)
    G = J.T @ H @ J
    return [part.view_as(p) for part, p in zip(G.diagonal().split([p.numel() for p in own]), own, strict=True)], G


def weight_of(case: Case, batches: list[Any]) -> float:
    """What the sums of all batches are divided by."""
    loss = case.loss
    if not isinstance(loss, nn.Module):
        return float(sum(len(x) for x, _ in batches))
    if loss.reduction == "sum":
        return 1.0
    if not isinstance(loss, nn.CrossEntropyLoss):
        return float(sum(target.numel() for _, target in batches))
    targets = torch.cat([target.flatten() for _, target in batches])
    weight = torch.ones(3, dtype=D) if loss.weight is None else loss.weight
    return float(weight[targets[targets != loss.ignore_index]].sum())


@pytest.mark.parametrize("budget", [0.5, 0])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_against_a_pass_for_each_output(name: str, budget: float) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().double()
    batches = [(X[:4], case.target[:4]), (X[4:], case.target[4:])]
    if "mix" in name:
        batches = [(X, case.target)]
    G = hodiff.GaussNewtonOperator(case.predict, case.loss, model, data=batches, memory_budget=budget)
    parts, weight = [by_hand(case, model, batch) for batch in batches], weight_of(case, batches)
    whole = sum(part[1] for part in parts) / weight
    own = [torch.stack(column).sum(0) / weight for column in zip(*(part[0] for part in parts), strict=True)]
    found = hodiff.diagonal(G, method="exact")
    for (key, _), expected in zip(model.named_parameters(), own, strict=True):
        agree(found.value[key], expected, 1e-11)
    passes = len(whole) if case.passes is None else case.passes
    assert found.products == passes * (max(len(x) for x, _ in batches) if case.each else 1)
    for A, expected in {
        G: whole.trace(),
        2 * G + 0.1: 2 * whole.trace() + 0.1 * len(whole),
        G.block("2.*"): torch.cat([x.flatten() for x in own[-2:]]).sum(),
    }.items():
        before = A.products
        record = hodiff.trace(A, samples=len(whole))
        agree(record.value, expected, 1e-11)
        assert record.products == A.products - before and float(record.stderr) == 0


@pytest.mark.parametrize("kind", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("name", ["classes", "classes at places", "squares", "binary", "counts", "not convex"])
def test_of_a_fisher_matrix(kind: Any, name: str) -> None:
    """The variance that makes a Gauss-Newton matrix indefinite has a Fisher information that is not."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().double()
    batches = [(X[:4], case.target[:4]), (X[4:], case.target[4:])]
    fisher = hodiff.FisherOperator(
        case.predict, case.loss, model, data=batches, kind=kind, samples=2, generator=torch.Generator().manual_seed(1)
    )
    whole = fisher.dense()
    found = hodiff.diagonal(fisher, method="exact")
    assert found.products < len(whole)
    agree(fisher.flatten(found.value), whole.diagonal(), 1e-11)


def test_an_estimate_that_takes_as_many_passes_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation, one pass to linearize, one for two classes of three, one to prove it, and once the formula's."""
    torch.manual_seed(0)
    model = dense().double()
    G = hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.CrossEntropyLoss(), model, data=[(X, LABELS)])
    whole = G.dense()
    hodiff.trace(G, samples=3)
    count = Count(monkeypatch)
    record = hodiff.trace(G, samples=3)
    agree(record.value, whole.trace(), 1e-12)
    assert record.products == 2 and count.passes == 2
    assert hodiff.trace(G, samples=1).stderr is None
    assert float(hodiff.diagonal(G, samples=3).stderr["0.weight"].max()) == 0
    assert float(hodiff.diagonal(G, vectors=torch.ones(len(whole), 2, dtype=D)).value["0.weight"].abs().max()) > 0


def test_one_batch_of_two_by_rows() -> None:
    """A diagonal of which a part came by rows is taken by products as a whole."""
    torch.manual_seed(0)
    model = dense().double()
    loss = lambda z, b: ((z**3 * b[1][:, None]).sum(), len(z))
    signs = torch.cat([torch.ones(4), -torch.ones(2)]).to(D)
    with torch.no_grad():
        model[2].bias.fill_(10.0)
    made = lambda *parts: hodiff.GaussNewtonOperator(
        lambda m, b: m(b[0]), loss, model, data=[(X[part], signs[part]) for part in parts]
    )
    first, second = slice(0, 4), slice(4, N)
    assert hodiff.diagonal(made(first), method="exact").products == 3
    for G in (made(first, second), made(second, first)):
        found = hodiff.diagonal(G, method="exact")
        assert found.products == G.shape[1]
        agree(G.flatten(found.value), G.dense().diagonal(), 1e-11)


@CHECKPOINTS
@pytest.mark.parametrize("budget", [0.5, 0])
@pytest.mark.parametrize("checkpoint", ["0", "*"])
def test_checkpointed_blocks(checkpoint: str, budget: float) -> None:
    """Whose parameters take their rows sample by sample; of others' they do not stand in the way."""
    torch.manual_seed(0)
    model = dense().double()
    made = lambda **options: hodiff.GaussNewtonOperator(
        lambda m, b: m(b[0]), nn.CrossEntropyLoss(), model, data=[(X, LABELS)], **options
    )
    plain, blocks = made().dense(), made(checkpoint=checkpoint, memory_budget=budget)
    for _ in range(2):
        agree(blocks.flatten(hodiff.diagonal(blocks, method="exact").value), plain.diagonal(), 1e-11)
        v = torch.ones(len(plain), dtype=D)
        agree(blocks @ v, plain @ v, 1e-11)
