"""Every operator against one dense matrix in float64: all spellings of a product, and the laws of linear algebra."""

from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from tests.support.differences import relative_error
from tests.support.ledger import Ledger, flags, snapshot, without_collector
from tests.support.modules import ZOO
from tests.support.modules import Case as Module
from tests.support.operators import (
    CASES,
    LABELS,
    Case,
    X,
    draw,
    network,
    predict,
    split,
    sum_of_cross_entropy,
)
from tests.support.oracle import Oracle, flatten, trainable, unflatten
from tests.support.properties import adjoint, agree, linear

cases = pytest.mark.parametrize("case", CASES, ids=repr)


def close(got: Tensor, expected: Tensor) -> None:
    agree(got, expected, tolerance=1e-11)


@cases
def test_every_spelling_of_a_product(case: Case) -> None:
    A, dense = case.build()
    M, N = dense.shape
    assert A.shape == (M, N) and A.dtype == torch.float64 and A.device == torch.device("cpu")
    v, V = draw(N, seed=20), draw(N, 5, seed=21)
    close(A @ v, dense @ v)
    close(A @ V, dense @ V)
    close(A @ V[:, :1], dense @ V[:, :1])
    assert (A @ V[:, :0]).shape == (M, 0)
    u, U = draw(M, seed=22), draw(3, M, seed=23)
    close(u @ A, dense.T @ u)
    close(U @ A, U @ dense)
    close(A.T @ u, dense.T @ u)
    close(A.T.T @ v, dense @ v)


@cases
def test_structured_vectors_are_flat_ones_in_another_shape(case: Case) -> None:
    A, dense = case.build()
    v, V = draw(dense.shape[1], seed=20), draw(dense.shape[1], 3, seed=21)
    one, many = A.unflatten(v), A.unflatten(V)
    assert torch.equal(A.flatten(one), v) and torch.equal(A.flatten(many), V)
    close(A.T.flatten(A @ one), dense @ v)
    close(A.T.flatten(A @ many), dense @ V)


@cases
def test_dense_is_the_matrix(case: Case) -> None:
    A, dense = case.build()
    close(A.dense(), dense)
    close(A.T.dense(), dense.T.contiguous())
    assert A.symmetric == case.symmetric
    if case.symmetric:
        agree(A.dense(), A.dense().T)


@cases
def test_linear_and_adjoint(case: Case) -> None:
    A, dense = case.build()
    v, w, u = draw(dense.shape[1], seed=24), draw(dense.shape[1], seed=25), draw(dense.shape[0], seed=26)
    linear(lambda v: A @ v, v, w)
    adjoint(lambda v: A @ v, lambda u: A.T @ u, v, u)


@cases
def test_products_are_counted_and_repeatable(case: Case) -> None:
    A, dense = case.build()
    before, v = A.products, draw(dense.shape[1], seed=27)
    assert torch.equal(A @ v, A @ v)
    A @ torch.stack([v] * 4, 1)
    assert A.products == before + 6


@cases
def test_scipy_has_the_same_products_and_dtype(case: Case) -> None:
    A, dense = case.build()
    S = A.to_scipy()
    v, u = draw(dense.shape[1], 2, seed=28), draw(dense.shape[0], 2, seed=29)
    assert S.dtype == v.numpy().dtype and S.shape == tuple(A.shape)
    close(torch.from_numpy(S @ v.numpy()), dense @ v)
    close(torch.from_numpy(S.rmatmat(u.numpy())), dense.T @ u)
    close(torch.from_numpy(S @ v[:, 0].numpy()), dense @ v[:, 0])


@cases
def test_vectors_are_not_changed_and_results_are_new(case: Case) -> None:
    A, dense = case.build()
    v = draw(dense.shape[1], seed=30).requires_grad_()
    kept = v.detach().clone()
    with pytest.warns(hodiff.HodiffWarning, match="A @ v: the result is detached, although v requires grad"):
        first = A @ v
    assert not first.requires_grad
    copy = first.clone()
    first.zero_()  # writing into a result must not reach a graph
    assert torch.equal(A @ v.detach(), copy)
    assert torch.equal(v, kept) and v.grad is None and v._version == 0


@cases
def test_wrong_vectors_are_refused(case: Case) -> None:
    A, dense = case.build()
    N = dense.shape[1]
    for bad in (draw(N + 1), draw(N).float(), draw(2, N + 3)):
        with pytest.raises(hodiff.InputError, match=r"v(:| has| is) .*expected"):
            A @ bad
    assert repr(A).startswith(f"{type(A).__name__}({dense.shape[0]} x {N}, float64")


@pytest.mark.parametrize("chunk", [1, 2, 3, 40])
def test_chunks_do_not_matter(chunk: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    x = draw(6, 3)
    H = hodiff.HessianOperator(lambda m: m(x).square().mean(), model, chunk_size=chunk)
    V = draw(H.shape[1], 5)
    close(H @ V, torch.stack([H @ V[:, i].contiguous() for i in range(5)], 1))


@pytest.mark.parametrize("chunk", [3, 4])
@pytest.mark.parametrize("budget", [0, 0.5])
def test_chunks_whose_last_is_shorter(budget: float, chunk: int) -> None:
    """Of graphs that are not kept several chunks share one evaluation: the operator then cuts them itself."""
    data, options = split(X, LABELS), {"memory_budget": budget, "chunk_size": chunk}
    entropy = torch.nn.CrossEntropyLoss()
    for A in (
        hodiff.HessianOperator(sum_of_cross_entropy, network(), data=data, **options),
        hodiff.GaussNewtonOperator(predict, entropy, network(), data=data, **options),
        hodiff.FisherOperator(predict, entropy, network(), data=data, kind="empirical", **options),
        hodiff.JacobianOperator(predict, network(), data=data, **options),
    ):
        V, U = draw(39, 10), draw(A.shape[0], 10, seed=1)
        close(A @ V, torch.stack([A @ v for v in V.T], 1))
        close(A.T @ U, torch.stack([A.T @ u for u in U.T], 1))
        many = A @ A.unflatten(V)
        close(A.T.flatten(many), A @ V)


def test_float32_agrees_with_float64() -> None:
    A, dense = next(case for case in CASES if case.name == "Gauss-Newton, any loss").build()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    x = draw(6, 3)
    f = lambda m, x: m(x).square().sum()
    single = hodiff.HessianOperator(lambda m: f(m, x.float()), model).dense()
    double = hodiff.HessianOperator(lambda m: f(m, x), model.double()).dense()
    assert single.dtype == torch.float32
    assert relative_error(single.double(), double) < 1e-5
    assert dense.dtype == A.dtype


def test_mixed_precision_leaves_get_their_own_dtype() -> None:
    point = (torch.ones(2, dtype=torch.float32), torch.ones(3, dtype=torch.float64))
    H = hodiff.HessianOperator(lambda p: (p[0].double() ** 3).sum() * (p[1] ** 2).sum(), point)
    assert H.dtype == torch.float64
    a, b = H @ (torch.ones(2), torch.zeros(3, dtype=torch.float64))
    assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(a, torch.full((2,), 18.0))
    torch.testing.assert_close(b, torch.full((3,), 12.0, dtype=torch.float64))


# --- the module zoo ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")  # custom functions and random numbers
@pytest.mark.parametrize("module", ZOO, ids=lambda case: repr(case).replace(" ", "_"))
def test_modules_are_right_or_raise(module: Module) -> None:
    """After the evaluation the module is as before; the kept graph still gives the product, checkpoints included."""
    setting, verdict = module.build(), module.verdict(2, "parameters")
    if "parameters" not in module.wheres:
        pytest.skip("has no parameters")
    like = trainable(setting.model)
    v = draw(sum(p.numel() for p in like.values()), seed=3)
    v = v / v.norm()
    before, switches = snapshot(setting.model), flags()
    H = hodiff.HessianOperator(setting.of_model, setting.model)
    if verdict != "right":
        with pytest.raises(hodiff.GraphError, match=verdict):
            H @ v
        return
    first = H @ v
    with sdpa_kernel(SDPBackend.MATH):
        expected = Oracle(module).hvp("parameters", v)
    assert relative_error(first, expected) < 1e-6
    again = H @ unflatten(v, like)
    assert relative_error(flatten(again), first) < 1e-12
    assert relative_error((H @ torch.stack([v, 2 * v], 1))[:, 1], 2 * first) < 1e-9
    fresh = hodiff.HessianOperator(setting.of_model, setting.model, memory_budget=0)
    assert relative_error(fresh @ v, first) < 1e-12
    assert snapshot(setting.model) == before
    assert flags() == switches


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[1::3], ids=repr)
def test_nothing_lives_after_the_last_reference(case: Case) -> None:
    import_module("torch._dynamo")  # by an operation under a mode, its import keeps the frames below it
    A, dense = case.build()
    v = draw(dense.shape[1], 3)
    A @ v  # imports
    del A
    with without_collector():
        with Ledger() as ledger:
            A, dense = case.build()
            A @ v
            A @ v[:, 0]
        del A, dense
        assert ledger.alive() == 0, ledger.makers()
