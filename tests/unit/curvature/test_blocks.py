"""Traces and eigenvalues of blocks, from the same products; what a callback sees of them."""

import torch
from torch import Tensor

import hodiff
from tests.support.operators import D, draw
from tests.support.properties import agree

N = 60
Q, _ = torch.linalg.qr(draw(N, N, seed=4))
INDEFINITE = Q @ torch.diag(torch.linspace(-5, 10, N, dtype=D)) @ Q.T


def signs(number: int, seed: int = 0) -> Tensor:
    return draw(N, number, seed=seed).sign()


def three() -> tuple[hodiff.HessianOperator, Tensor]:
    point = {"a": draw(4), "b": draw(3, 2), "c": draw(5)}
    f = lambda p: (p["a"].sum() * p["b"].sum() + 3) ** 2 + (p["c"] ** 4).sum() + (p["b"] ** 3).sum()
    H = hodiff.HessianOperator(f, point)
    return H, H.dense()


def test_traces_of_blocks_come_from_the_same_products() -> None:
    H, dense = three()
    V = draw(15, 9)
    before = H.products
    found = hodiff.trace(H, blocks=["a", "b", "[bc]"], vectors=V)
    assert H.products - before == found.products == 9
    terms = V * (dense @ V)
    for name, rows in {"a": slice(0, 4), "b": slice(4, 10), "[bc]": slice(4, 15)}.items():
        part = terms[rows].sum(0)
        agree(found.blocks[name].value, part.mean(), 1e-10)
        agree(found.blocks[name].stderr, part.std() / 3, 1e-10)
    agree(found.value, terms.sum(0).mean(), 1e-10)
    exact = hodiff.trace(H, blocks=["a", "c"], samples=20)
    agree(exact.blocks["c"].value, dense[10:, 10:].trace(), 1e-10)
    assert exact.blocks["a"].stderr == 0 and exact.blocks["a"].converged is None


def test_traces_of_blocks_are_calibrated() -> None:
    H, dense = three()
    runs = [hodiff.trace(H, blocks=["b"], vectors=draw(15, 8, seed=s).sign()).blocks["b"] for s in range(120)]
    truth = float(dense[4:10, 4:10].trace())
    inside = sum(abs(float(run.value) - truth) <= 2.4 * float(run.stderr) for run in runs) / 120  # t with 7 degrees
    assert 0.88 <= inside <= 0.995


def test_blocks_of_a_kept_graph_share_one_evaluation() -> None:
    """The top eigenvalue of each block, from one pass over the data."""
    calls = []

    def loss(p: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, int]:
        calls.append(1)
        return ((batch @ p["a"]).tanh() * p["b"].square().sum()).square().sum(), len(batch)

    H = hodiff.HessianOperator(loss, {"a": draw(3), "b": draw(2)}, data=[draw(6, 3), draw(4, 3, seed=1)])
    top = {name: hodiff.eigsh(H.block(name), 1).value[0] for name in ("a", "b")}
    assert len(calls) == 2
    dense = H.dense()
    agree(top["a"], torch.linalg.eigvalsh(dense[:3, :3])[-1], 1e-8)
    agree(top["b"], torch.linalg.eigvalsh(dense[3:, 3:])[-1], 1e-8)


def test_the_running_mean_by_callback() -> None:
    A, V = hodiff.MatrixOperator(INDEFINITE), signs(20)
    seen: list[hodiff.curvature._records.TraceRecord] = []
    hodiff.trace(A, vectors=V, callback=seen.append)
    forms = (V * (INDEFINITE @ V)).sum(0)
    assert [record.products for record in seen] == [8, 16, 20]
    for record in seen:
        agree(record.value, forms[: record.products].mean(), 1e-12)
    entries: list[hodiff.curvature._records.DiagonalRecord] = []
    hodiff.diagonal(A, vectors=V, callback=entries.append)
    for record in entries:
        agree(record.value, (V * (INDEFINITE @ V))[:, : record.products].mean(1), 1e-12)
