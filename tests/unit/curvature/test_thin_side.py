"""Gauss-Newton and Fisher matrices by the few rows of their M: against the matrix, and what they take."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff.curvature import _gauss_newton, _thin
from tests.support.operators import D, draw
from tests.support.passes import Count
from tests.support.properties import agree
from tests.support.releases import CHECKPOINTS

N = 6
X = draw(N, 4, seed=3)
REAL = draw(N, 3, seed=4)
LABELS = torch.arange(N) % 3
LABELS_AT = (torch.arange(2 * N).reshape(N, 2) % 4).clamp(max=2)
WORDS = torch.arange(5 * N).reshape(N, 5) % 7


def dense(last: int = 3, layer: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), layer(), nn.Linear(16, last))


class Words(nn.Module):
    """A sum over words, of which each batch may have another number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.head = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x)).sum(1)


def pair(m: nn.Module, b: Any) -> tuple[Tensor, Tensor]:
    mean, raw = m(b[0]).split([3, 3], 1)
    return mean, nn.functional.softplus(raw) + 0.1


def summed(values: Tensor, b: Any) -> tuple[Tensor, int]:
    return values.sum(), len(b[0])


class Case(NamedTuple):
    """A network, how it is called, a loss, targets, and how many rows each sample has."""

    loss: Any
    rows: int = 3
    target: Tensor = LABELS
    model: Callable[[], nn.Module] = dense
    predict: Callable[[Any, Any], Any] = lambda m, b: m(b[0])
    inputs: Tensor = X

    def batches(self, *, several: bool = True) -> list[Any]:
        parts = [slice(0, 4), slice(4, N)] if several else [slice(0, N)]
        made = [(self.inputs[part], self.target[part]) for part in parts]
        return [made[0], (made[1][0][:, :3], made[1][1])] if several and self.inputs is WORDS else made

    def made(self, kind: str | None = None, *, several: bool = True, **options: Any) -> Any:
        torch.manual_seed(0)
        given = (self.predict, self.loss, self.model().double())
        options["data"] = self.batches(several=several)
        if kind is None:
            return hodiff.GaussNewtonOperator(*given, **options)
        return hodiff.FisherOperator(*given, kind=kind, generator=torch.Generator().manual_seed(1), **options)


WEIGHED = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5], dtype=D), label_smoothing=0.1)
CASES: dict[str, Case] = {
    "classes": Case(nn.CrossEntropyLoss(), 2),
    "classes, weighed and smoothed": Case(WEIGHED, 2),
    "classes, some ignored": Case(nn.CrossEntropyLoss(ignore_index=1), 2),
    "classes at places": Case(
        nn.CrossEntropyLoss(ignore_index=2), 4, LABELS_AT, lambda: dense(6), lambda m, b: m(b[0]).view(-1, 2, 3).mT
    ),
    "squares": Case(nn.MSELoss(), target=REAL),
    "squares, summed": Case(nn.MSELoss(reduction="sum"), target=REAL),
    "one output": Case(nn.MSELoss(), 1, REAL[:, 0], lambda: dense(1), lambda m, b: m(b[0]).squeeze(1)),
    "binary": Case(nn.BCEWithLogitsLoss(), target=(REAL > 0).to(D)),
    "counts": Case(nn.PoissonNLLLoss(), target=REAL.abs().round()),
    "a loss of one's own": Case(lambda z, b: summed(z.logsumexp(1).exp(), b)),
    "two outputs": Case(
        lambda z, b: summed((z[0] - b[1]).square() * 2 + z[1].exp() + z[0] * z[1] * 0.1, b),
        6, REAL, lambda: dense(6), pair,
    ),
    "words": Case(nn.CrossEntropyLoss(), 2, model=Words, inputs=WORDS),
}  # fmt: skip
MADE_OF: dict[str, Callable[[Any], Any]] = {
    "itself": lambda G: G,
    "2 * G + 0.1": lambda G: 2 * G + 0.1,
    "a block": lambda G: (G + 0.2).block("*.weight"),
    "a sum": lambda G: G + 0.5 * (G + 0.3),
}


def check(A: Any, rows: int, precision: float = 1e-10) -> None:
    """All that the rows tell, and the products: one for each row of a sample, those of the vectors."""
    H, b = A.dense(), draw(A.shape[0], 2, seed=7)
    values, whole = torch.linalg.eigvalsh(H).flip(0), torch.eye(len(H), dtype=D)
    before = A.products

    found = hodiff.eigsh(A, 3)
    agree(found.value, values[:3], precision)
    agree(H @ found.vectors, found.vectors * found.value, 100 * precision)
    agree(found.vectors.T @ found.vectors, torch.eye(3, dtype=D), precision)
    assert found.converged and found.products == rows + 3

    x = torch.linalg.solve(H + 0.5 * whole, b)
    for given, expected, more in ((b[:, 0], x[:, 0], 1), (b, x, 2)):
        solved = hodiff.solve(A, given, damping=0.5)
        agree(solved.value, expected, precision)
        rest = (given - (H + 0.5 * whole) @ solved.value).norm(dim=0) / given.norm(dim=0)
        assert float((torch.as_tensor(solved.residual) - rest).abs().max()) < precision
        assert solved.status == "converged" and solved.products == rows + more

    record = hodiff.logdet(A, shift=0.5)
    agree(record.value, torch.linalg.slogdet(H + 0.5 * whole)[1], precision)
    assert float(record.stderr) == 0 and record.products == rows
    record = hodiff.trace(A)
    agree(record.value, H.trace(), precision)
    assert float(record.stderr) == 0 and record.products == rows
    record = hodiff.diagonal(A)
    agree(A.flatten(record.value), H.diagonal(), precision)
    assert not A.flatten(record.stderr).any() and record.products == rows
    assert A.products - before == 6 * rows + 6


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("of", MADE_OF)
@pytest.mark.parametrize("name", CASES)
def test_against_the_matrix(name: str, of: str, several: bool) -> None:
    case = CASES[name]
    check(MADE_OF[of](case.made(several=several)), case.rows)


@pytest.mark.parametrize("kind", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("name", ["classes", "squares", "binary", "counts", "classes, some ignored"])
def test_of_a_fisher_matrix(kind: str, name: str) -> None:
    case = CASES[name]
    F = case.made(kind, memory_budget=0.5)
    check(F, case.rows if kind == "exact" else 1 if name.startswith("classes") or kind == "empirical" else 3)


def test_a_sum_of_matrices_with_other_numbers_of_rows() -> None:
    """Two rows of each sample beside one; products of the sum are those of each."""
    G, E = CASES["classes"].made(), CASES["classes"].made("empirical", several=False)
    check(G + 3 * E + 0.1, 2)
    G, E = CASES["classes"].made(), CASES["classes"].made("empirical")
    A = G + 3 * E
    before = A.products, G.products, E.products
    hodiff.logdet(A, shift=1)
    assert (A.products - before[0], G.products - before[1], E.products - before[2]) == (2, 2, 1)


@pytest.mark.parametrize("checkpoint", [False, pytest.param("0", marks=CHECKPOINTS)])
@pytest.mark.parametrize("budget", [0.5, 0])
def test_graphs_that_are_not_kept(budget: float, checkpoint: Any) -> None:
    case = CASES["classes"]
    A = case.made(memory_budget=budget, checkpoint=checkpoint).block("2.*")
    check(A, case.rows) if checkpoint is False else agree(A.dense(), case.made().block("2.*").dense())


def test_evaluations_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for all rows and one as proof; two for the product that the residual is of. Nothing is evaluated."""
    case, count = CASES["classes"], Count(monkeypatch)
    G = case._replace(predict=count.of(lambda m, b: m(b[0]))).made(several=False)
    b = draw(G.shape[0])
    hodiff.solve(G, b, damping=0.1)
    count.evaluations = count.passes = 0
    for call, passes in (
        (lambda: hodiff.solve(G, b, damping=0.1), 4),
        (lambda: hodiff.logdet(G, shift=0.1), 2),
        (lambda: hodiff.trace(G), 2),
        (lambda: hodiff.diagonal(G), 2),
        (lambda: hodiff.eigsh(G, 1), 4),
    ):
        count.passes = 0
        call()
        assert count.passes == passes
    assert count.evaluations == 0


MEET = Case(lambda z, b: summed(z.sum(0).square() + z.square(), b))
NOT_THIN: dict[str, Any] = {
    "samples that meet in the loss": lambda: MEET.made(several=False),
    "samples that meet a little": lambda: Case(lambda z, b: summed(z.square() + 1e-6 * z.sum(0).square(), b)).made(),
    "not convex": lambda: Case(nn.GaussianNLLLoss(), 6, 3 * REAL, lambda: dense(6), pair).made(),
    "a layer that is not read": lambda: Case(nn.MSELoss(), target=REAL, model=lambda: dense(3, nn.PReLU)).made(),
    "too many rows": lambda: CASES["squares"].made().block("2.bias"),
    "beside another matrix": lambda: CASES["squares"].made() + hodiff.MatrixOperator(torch.ones(131, dtype=D)),
    "a difference": lambda: 2 * CASES["squares"].made() - CASES["squares"].made(),
}


@pytest.mark.parametrize("name", NOT_THIN)
def test_what_has_no_thin_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those of products, to their tolerance."""
    A = NOT_THIN[name]()
    H, b = A.dense(), draw(A.shape[0], seed=7)
    made: list[int] = []
    monkeypatch.setattr(_thin.ThinMatrix, "__init__", lambda *_: made.append(1))
    whole = torch.eye(len(H), dtype=D)
    agree(hodiff.eigsh(A, 2).value, torch.linalg.eigvalsh(H).flip(0)[:2], 1e-7)
    shift = 0.5 - min(0.0, float(torch.linalg.eigvalsh(H)[0]))
    agree(hodiff.solve(A, b, damping=shift).value, torch.linalg.solve(H + shift * whole, b), 1e-7)
    agree(hodiff.logdet(A, shift=shift).value, torch.linalg.slogdet(H + shift * whole)[1], 1e-7)
    assert not made


ASKED: dict[str, Callable[[Any, Tensor], Any]] = {
    "smallest": lambda G, b: hodiff.eigsh(G, 1, which="smallest"),
    "magnitude": lambda G, b: hodiff.eigsh(G, 1, which="magnitude"),
    "a basis": lambda G, b: hodiff.eigsh(G, 1, basis=20),
    "a callback": lambda G, b: hodiff.eigsh(G, 1, callback=lambda record: None),
    "another method": lambda G, b: hodiff.solve(G, b, method="minres", damping=0.1),
    "a preconditioner": lambda G, b: hodiff.solve(
        G, b, damping=0.1, preconditioner=hodiff.MatrixOperator(torch.ones_like(b))
    ),
    "a start": lambda G, b: hodiff.solve(G, b, damping=0.1, start=b),
    "iterations": lambda G, b: hodiff.solve(G, b, damping=0.1, iterations=3),
    "a watched solve": lambda G, b: hodiff.solve(G, b, damping=0.1, callback=lambda record: None),
    "a graph": lambda G, b: hodiff.solve(G, b, damping=0.1, create_graph=True),
    "a graph of eigenvalues": lambda G, b: hodiff.eigsh(G, 1, create_graph=True),
    "a graph of a determinant": lambda G, b: hodiff.logdet(G, shift=1.0, create_graph=True),
    "vectors of one's own": lambda G, b: hodiff.logdet(G, shift=1.0, vectors=b[:, None]),
    "a product or two": lambda G, b: hodiff.logdet(G, shift=1.0, samples=1, steps=1),
}


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(_thin.ThinMatrix, "__init__", lambda *_: made.append(1))
    G = CASES["classes"].made()
    ASKED[name](G, draw(G.shape[0]))
    assert not made


def test_rows_of_several_processes_do_not_meet() -> None:
    """Each has some: the estimates then are those by products."""
    G = CASES["classes"].made()
    assert G._by_rows(30) is not None
    G._group_sum = object()
    assert G._by_rows(30) is None


def test_no_damping() -> None:
    """M'M alone is singular: conjugate gradients find the solution that there is."""
    G = CASES["classes"].made()
    b = G @ draw(G.shape[0])
    found = hodiff.solve(G, b)
    assert found.status == "converged"
    agree(G @ found.value, b, 1e-7)
    with pytest.warns(hodiff.ConvergenceWarning, match="negative or zero curvature"):
        assert not hodiff.solve(G, draw(G.shape[0])).converged


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("damping", [10.0**-n for n in range(1, 10)])
def test_no_residual_is_better_than_it_is(damping: float) -> None:
    """In single precision, up to where the damping is lost in rounding."""
    case = CASES["classes"]
    case = case._replace(loss=nn.CrossEntropyLoss(reduction="sum"), inputs=10 * X)
    torch.manual_seed(0)
    data = [(x.float(), y) for x, y in case.batches()]
    G = hodiff.GaussNewtonOperator(case.predict, case.loss, case.model(), data=data)
    b = draw(G.shape[0]).float()
    H = G.dense().double() + damping * torch.eye(len(b), dtype=D)
    found = hodiff.solve(G, b, damping=damping)
    true = float((b - H @ found.value.double()).norm() / b.norm())
    rounding = 1e-6 * float(H.norm() * found.value.double().norm() / b.norm())
    assert abs(found.residual - true) <= 0.01 * true + rounding
    assert found.converged == (found.residual <= 1e-4)
    assert found.converged or damping < 1e-4 * float(H.norm())


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("products", [4, 6, 8, 12, 20])
def test_no_more_products_than_are_allowed(products: int) -> None:
    """What the rows have taken is not there for the iteration that follows."""
    case = CASES["classes"]
    data = [(10 * x.float(), y) for x, y in case.batches()]
    torch.manual_seed(0)
    G = hodiff.GaussNewtonOperator(case.predict, case.loss, case.model(), data=data)
    found = hodiff.solve(G, draw(G.shape[0]).float(), damping=1e-5, rtol=1e-12, products=products)
    assert found.products <= products and not found.converged
    assert hodiff.eigsh(G, 1, products=products).products <= products


TOO_MANY: dict[str, Any] = {
    "labels": lambda: CASES["classes"].made("mc", samples=70),
    "samples": lambda: CASES["squares"]._replace(model=lambda: nn.Linear(4, 3)).made(),
    "classes": lambda: Case(nn.MSELoss(), 66, draw(N, 66), lambda: dense(66)).made(),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_rows_that_are_too_many_are_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A, made = TOO_MANY[name](), list[int]()
    monkeypatch.setattr(_gauss_newton, "Factors", lambda *_: made.append(1))
    assert A._by_rows(1000) is None and not made


def test_the_refinement() -> None:
    """Without it, or with its sign turned, the residual is ten and twenty times this."""
    G = CASES["squares"]._replace(loss=nn.MSELoss(reduction="sum")).made(several=False)
    H, b, rows = G.dense(), draw(G.shape[0], seed=7), G._by_rows(100)
    damping = 1e-4 * float(torch.linalg.eigvalsh(H)[-1])
    x = rows.solved(b, damping)
    assert float((b - H @ x - damping * x).norm() / b.norm()) < 1e-12


def test_what_is_not_finite_is_said_as_ever() -> None:
    G = CASES["classes"].made()
    with torch.no_grad():
        next(iter(G._graphs.where.tensors)).fill_(torch.nan)
    with pytest.raises(hodiff.GraphError, match="not finite"):
        hodiff.eigsh(G, 1)
    with pytest.raises(hodiff.GraphError, match="not finite"):
        hodiff.solve(G, draw(G.shape[0]), damping=0.1)


def test_more_eigenvalues_than_rows() -> None:
    """Beyond them all are one: Lanczos iteration finds vectors of it."""
    G = CASES["one output"].made() + 0.1
    found = hodiff.eigsh(G, 8)
    values = torch.linalg.eigvalsh(G.dense()).flip(0)[:8]
    agree(found.value, values, 1e-8)
    assert found.converged and found.products > 9


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_samples_that_are_sure_of_their_class(dtype: torch.dtype) -> None:
    """Of these the entries p (1 - p) are differences of larger numbers: rounding is as large as those of the others."""
    torch.manual_seed(0)
    net, x = nn.Linear(5, 4).to(dtype), torch.randn(40, 5, dtype=dtype)
    scale = torch.cat([torch.full((20, 1), 30.0), torch.ones(20, 1)]).to(dtype)
    G = hodiff.GaussNewtonOperator(
        lambda m, b: m(b[0]) * b[2], nn.CrossEntropyLoss(), net, data=[(x, net(x).argmax(1), scale)]
    )
    exact = G.dense().diagonal()
    before = G.products
    found = hodiff.diagonal(G, method="exact").value
    assert G.products - before <= 4
    flat = torch.cat([part.flatten() for part in found.values()])
    torch.testing.assert_close(flat, exact, rtol=1e-4, atol=1e-6 * float(exact.max()))


def test_a_batch_without_samples() -> None:
    """A mean over none is refused in words, not by an error of PyTorch's about shapes."""
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(D)
    empty = torch.randn(0, 3, dtype=D), torch.zeros(0, dtype=torch.int64)
    G = hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.CrossEntropyLoss(), net, data=[empty])
    for ask in (hodiff.diagonal, hodiff.trace, lambda G: hodiff.logdet(G + 0.5), lambda G: hodiff.eigsh(G, 1)):
        with pytest.raises(hodiff.GraphError, match="nothing to average over"):
            ask(G)


def test_least_squares_without_samples() -> None:
    optimizer = hodiff.LevenbergMarquardt(lambda m, x: m(x), nn.Linear(3, 2).to(D))
    assert optimizer.step(torch.randn(0, 3, dtype=D)) == 0
