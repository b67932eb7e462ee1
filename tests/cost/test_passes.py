"""Promise 6: the cost is stated and met.  Evaluations of f, reverse passes, operations.

The numbers here are those of the docstrings; a change of either must change both.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from tests.support.ledger import Ledger
from tests.support.passes import Count

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
V = torch.cos(torch.arange(6, dtype=D))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def scalar(x: Tensor) -> Tensor:
    return torch.tanh(x.cumsum(0) * x).square().sum()


def elementwise(x: Tensor) -> Tensor:
    return torch.sin(x) * torch.exp(-(x**2))


def both(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x).sum() * torch.exp(y).sum()


def samples(x: Tensor) -> Tensor:
    return torch.tanh(x.cumsum(-1) * x).square().sum(-1)


BATCH = torch.randn(5, 3, dtype=D, generator=torch.Generator().manual_seed(0))
MANY = torch.stack([V] * 7)

COSTS = {  # name: (call, f, evaluations, passes); the derivatives of elementwise functions are paid twice, to
    # check that they are: in passes; from order 3 on in one evaluation in Taylor mode, unless it is recorded
    "grad": (lambda f: hodiff.grad(f, X), scalar, 1, 1),
    "grad, batch": (lambda f: hodiff.grad(f, BATCH, batch_ndim=1), samples, 1, 1),
    "value_and_grad": (lambda f: hodiff.value_and_grad(f, X), scalar, 1, 1),
    "vjp": (lambda f: hodiff.vjp(f, X, V), elementwise, 1, 1),
    "vjp, 7 vectors, chunks of 3": (lambda f: hodiff.vjp(f, X, MANY, chunk_size=3), elementwise, 1, 3),
    "hvp": (lambda f: hodiff.hvp(f, X, V), scalar, 1, 2),
    "hvp, batch": (lambda f: hodiff.hvp(f, BATCH, BATCH, batch_ndim=1), samples, 1, 2),
    "hvp, 7 vectors, chunks of 3": (lambda f: hodiff.hvp(f, X, MANY, chunk_size=3), scalar, 1, 1 + 3),
    "jacobian, all rows at once": (lambda f: hodiff.jacobian(f, X, chunk_size=6), elementwise, 1, 1),
    "jacobian, chunks of 4": (lambda f: hodiff.jacobian(f, X, chunk_size=4), elementwise, 1, 2),
    "hessian, all rows at once": (lambda f: hodiff.hessian(f, X, chunk_size=6), scalar, 1, 1 + 1),
    "hessian, chunks of 4": (lambda f: hodiff.hessian(f, X, chunk_size=4), scalar, 1, 1 + 2),
    "hessian, row by row": (lambda f: hodiff.hessian(f, X, chunk_size=1), scalar, 1, 1 + 6),
    "hessian, auto": (lambda f: hodiff.hessian(f, X), scalar, 1, 1 + 1),
    "hessian, matrix": (lambda f: hodiff.hessian(f, X, matrix=True, chunk_size=2), scalar, 1, 1 + 3),
    "hessian, batch": (lambda f: hodiff.hessian(f, BATCH, batch_ndim=1, chunk_size=3), samples, 1, 1 + 1),
    "value_grad_and_hessian": (lambda f: hodiff.value_grad_and_hessian(f, X, chunk_size=2), scalar, 1, 1 + 3),
    "hessian_diagonal": (lambda f: hodiff.hessian_diagonal(f, X, chunk_size=2), scalar, 1, 1 + 3),
    "laplacian, reverse": (lambda f: hodiff.laplacian(f, BATCH, method="reverse"), samples, 1, 1 + 1),
    "laplacian, reverse, chunks of 2": (
        lambda f: hodiff.laplacian(f, BATCH, method="reverse", chunk_size=2),
        samples,
        1,
        1 + 2,
    ),
    "laplacian, reverse, two components, one by one": (
        lambda f: hodiff.laplacian(f, BATCH, method="reverse", chunk_size=1),
        lambda x: torch.stack([samples(x), samples(2 * x)], 1),
        1,
        2 * (1 + 3),
    ),
    "partials": (lambda f: hodiff.partials(f, BATCH, [0, (1, 1)]), samples, 1, 2),
    "partials, three components, which are counted and then expanded together": (
        lambda f: hodiff.partials(f, BATCH, [0, (1, 1)]),
        lambda x: torch.stack([samples(k * x) for k in range(3)], 1),
        1 + 1,
        0,
    ),
    "partials, three components, reverse": (
        lambda f: hodiff.partials(f, BATCH, [0, (1, 1)], method="reverse"),
        lambda x: torch.stack([samples(k * x) for k in range(3)], 1),
        1,
        3 * 2,
    ),
    "nth_derivative, 0": (lambda f: hodiff.nth_derivative(f, X, 0), elementwise, 1, 0),
    "nth_derivative, 1": (lambda f: hodiff.nth_derivative(f, X, 1), elementwise, 1, 1 + 1),
    "nth_derivative, 2": (lambda f: hodiff.nth_derivative(f, X, 2), elementwise, 1, 0),
    "nth_derivative, 2, recorded": (
        lambda f: hodiff.nth_derivative(f, X, 2, create_graph=True), elementwise, 1, 2 + 2
    ),
    "nth_derivative, 4": (lambda f: hodiff.nth_derivative(f, X, 4), elementwise, 1, 0),
    "nth_derivative, 4, recorded": (
        lambda f: hodiff.nth_derivative(f, X, 4, create_graph=True), elementwise, 1 + 1, 0
    ),
    "derivatives, 4": (lambda f: hodiff.derivatives(f, X, 4), elementwise, 1, 0),
    "cross_hvp": (lambda f: hodiff.cross_hvp(f, X, X[:2], V[:2]), both, 1, 2),
    "cross_hvp, 7 vectors, chunks of 3": (lambda f: hodiff.cross_hvp(f, X[:2], X, MANY, chunk_size=3), both, 1, 1 + 3),
    "cross_hessian, the smaller side is looped over": (
        lambda f: hodiff.cross_hessian(f, X, X[:2], chunk_size=1), both, 1, 1 + 2
    ),
    "cross_hessian, the other way round": (
        lambda f: hodiff.cross_hessian(f, X[:2], X, chunk_size=1), both, 1, 1 + 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COSTS)
def test_evaluations_and_passes(name: str, count: Count) -> None:
    call, f, evaluations, passes = COSTS[name]
    call(count.of(f))
    assert (count.evaluations, count.passes) == (evaluations, passes)


def test_jvp_evaluates_once(count: Count) -> None:
    """Forward mode, or two reverse passes where that is impossible."""
    hodiff.jvp(count.of(elementwise), X, V)
    assert count.evaluations == 1
    assert count.passes <= 2


@pytest.mark.parametrize(("name", "passes"), [("grad", 1), ("hvp", 2), ("hessian", 2)])
def test_tensor_form_costs_the_same_passes(name: str, passes: int, count: Count) -> None:
    x = X.clone().requires_grad_()
    loss = scalar(x)
    {
        "grad": lambda: hodiff.grad(loss, x),
        "hvp": lambda: hodiff.hvp(loss, x, V),
        "hessian": lambda: hodiff.hessian(loss, x, chunk_size=6),
    }[name]()
    assert count.passes == passes


def test_linear_functions_need_no_second_evaluation(count: Count) -> None:
    hodiff.hvp(count.of(lambda x: (2 * x).sum()), X, V)
    assert count.evaluations == 1


def test_bad_vector_is_refused_before_anything_is_paid(count: Count) -> None:
    with pytest.raises(hodiff.InputError, match=r"^v has shape \(2,\)"):
        hodiff.hvp(count.of(scalar), X, V[:2])
    assert (count.evaluations, count.passes) == (0, 0)


def test_missing_second_derivative_is_found_before_the_second_pass(count: Count) -> None:
    pairs = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(hodiff.GraphError, match="embedding_bag"):
        hodiff.hvp(count.of(lambda x: F.embedding_bag(pairs, x).exp().sum()), X.reshape(3, 2), V.reshape(3, 2))
    assert (count.evaluations, count.passes) == (2, 1)  # the second evaluation finds the line for the message


# --- operations -------------------------------------------------------------------------------------------------------

FEW = 4
"""Additions to what double backward by hand needs: aliases of leaves, a copy of the result."""


def work(call: object) -> int:
    with Ledger() as ledger:
        call()
    return ledger.work()


def by_hand(f: object, x: Tensor, v: Tensor) -> None:
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    torch.autograd.grad(g, leaf, v)


@pytest.mark.parametrize("depth", [1, 10])
def test_hvp_does_the_work_of_double_backward_by_hand(depth: int) -> None:
    def deep(x: Tensor) -> Tensor:
        for _ in range(depth):
            x = torch.tanh(x) * torch.sin(x)
        return x.square().sum()

    hodiff.hvp(deep, X, V)
    ours, hand = work(lambda: hodiff.hvp(deep, X, V)), work(lambda: by_hand(deep, X, V))
    assert ours <= hand + FEW


def test_hvp_of_a_module_does_the_work_of_double_backward_by_hand() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    vector = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    parameters = list(model.parameters())

    def hand() -> None:
        gs = torch.autograd.grad(model(X).square().sum(), parameters, create_graph=True)
        torch.autograd.grad(gs, parameters, list(vector.values()))

    call = lambda: hodiff.hvp(lambda m: m(X).square().sum(), model, vector)
    call()
    assert work(call) <= work(hand) + FEW + len(parameters)


def test_hessian_work_does_not_grow_with_rows_inside_one_chunk() -> None:
    """Vectorized rows: the number of operations is that of one product, not of D."""
    counts = []
    for size in (4, 40):
        x = torch.linspace(-1, 1, size, dtype=D)
        counts.append(work(lambda x=x: hodiff.hessian(scalar, x, chunk_size=len(x))))
    assert counts[1] <= counts[0] + FEW


def test_one_vector_does_not_pay_for_vmap() -> None:
    assert work(lambda: hodiff.hvp(scalar, X, V)) <= work(lambda: hodiff.hvp(scalar, X, V[None])) + FEW


def test_frozen_part_records_no_graph() -> None:
    """A head-only product must not store the frozen trunk's activations (3.61 MiB instead of 0.19)."""
    trunk = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(8)])
    model = torch.nn.Sequential(trunk, torch.nn.Linear(16, 1)).double()
    x = torch.randn(32, 16, dtype=D)
    head = hodiff.select(model, "1.*")
    saved = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal saved
        saved += t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hodiff.grad(lambda s: s.module(x).square().sum(), head)
    one_activation = 32 * 16 * 8
    assert saved <= 4 * one_activation


def test_the_counters_count(count: Count) -> None:
    """cumsum, mul, tanh, pow, sum; and one pass."""
    assert work(lambda: scalar(X)) == 5
    by_hand(scalar, X, V)
    assert count.passes == 2
