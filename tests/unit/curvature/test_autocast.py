"""Estimators and solvers inside the caller's autocast: their own linear algebra keeps its precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff
from tests.support.operators import D, draw

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
    "xtrace": lambda: hodiff.trace(A, vectors=V, method="xtrace").value,
    "xnystrace": lambda: hodiff.trace(A, vectors=V, method="xnystrace").value,
    "xdiag": lambda: hodiff.diagonal(A, vectors=V, method="xdiag").value,
    "eigsh": lambda: hodiff.eigsh(A, 3, generator=seeded()).value,
    "eigs": lambda: hodiff.eigs(B, 2, rtol=1e-3, generator=seeded()).value.abs(),
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
