"""Estimators and solvers inside the caller's autocast: their own linear algebra keeps its precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.operators import D, draw, split

N = 60
Q, _ = torch.linalg.qr(draw(N, N, seed=4))
S = (Q @ torch.diag(torch.linspace(1, 20, N, dtype=D)) @ Q.T).float()
A = hodiff.MatrixOperator((S + S.T) / 2)
B = hodiff.MatrixOperator((torch.triu(draw(N, N, seed=5)) / 20 + torch.diag(torch.linspace(1, 2, N, dtype=D))).float())
V, b = draw(N, 6, seed=6).sign().float(), draw(N, seed=7).float()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


ESTIMATES: dict[str, Callable[[], Tensor]] = {
    "spectral_density": lambda: hodiff.spectral_density(A, vectors=V, steps=40).nodes,
    "logdet": lambda: hodiff.logdet(A, vectors=V, steps=20).value,
    "trace": lambda: hodiff.trace(A, vectors=V).value,
    "hutch++": lambda: hodiff.trace(A, vectors=V, method="hutch++").value,
    "eigsh": lambda: hodiff.eigsh(A, 3, generator=seeded()).value,
    "cg": lambda: hodiff.solve(A, b).value,
    "minres": lambda: hodiff.solve(A, b, method="minres").value,
    "gmres": lambda: hodiff.solve(B, b, method="gmres").value,
    "nystrom": lambda: hodiff.nystrom(A, 10, 0.1, generator=seeded()) @ b,
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_autocast_changes_nothing(name: str) -> None:
    expected = ESTIMATES[name]()
    with torch.autocast("cpu", torch.bfloat16):
        found = ESTIMATES[name]()
    assert torch.equal(found, expected)


def test_a_graph_of_what_was_not_evaluated_yet_is_of_the_callers_precision() -> None:
    """As is the graph that a product builds."""
    seen: list[torch.dtype] = []

    def f(x: Tensor) -> Tensor:
        y = V[:, :6] @ x
        seen.append(y.dtype)
        return y.float().tanh().square().sum()

    for create_graph in (False, True):
        H = hodiff.HessianOperator(f, V[0, :6])
        with torch.autocast("cpu", torch.bfloat16):
            hodiff.trace(H, vectors=V[:6, :2], create_graph=create_graph)
    assert seen == [torch.bfloat16, torch.bfloat16]


X, Y = draw(10, 4, seed=1), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))


PAIRS = split(X, Y)


def layer(dtype: torch.dtype = D) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def test_autocast_does_not_round_matrices_nor_change_what_was_evaluated() -> None:
    A, v = hodiff.MatrixOperator(draw(50, 50).float()), draw(50).float()
    model = layer(torch.float32)
    loss = lambda m, b: (m(b[0].float()).tanh().square().sum(), len(b[0]))
    H = hodiff.HessianOperator(loss, model, data=PAIRS, memory_budget=0)
    plain, product = A @ v, H @ torch.ones(15)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(A @ v, plain) and torch.equal(H @ torch.ones(15), product)
        rounded = hodiff.HessianOperator(loss, model, data=PAIRS, memory_budget=0)
        inside = rounded @ torch.ones(15)
    assert torch.equal(rounded @ torch.ones(15), inside) and not torch.equal(inside, product)
