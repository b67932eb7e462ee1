"""Vectors in every spelling: flat, columns, like the point, lists of its leaves, NumPy arrays, lists of numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.operators import CASES, Case, D, X, draw, network
from tests.support.properties import agree


def operator() -> hodiff.HessianOperator:
    return hodiff.HessianOperator(lambda m: m(X).pow(3).mean(), network())


def leaves(H: hodiff.LinearOperator, flat: Tensor) -> list[Tensor]:
    return list(H.unflatten(flat).values())


def test_a_list_of_the_leaves_in_the_order_of_the_point() -> None:
    H, v, V = operator(), draw(39), draw(39, 3)
    dense = H.dense()
    for kind in (list, tuple):
        found = H @ kind(leaves(H, v))
        assert type(found) is kind
        agree(found, leaves(H, dense @ v), 1e-11)
        many = H @ kind(leaves(H, V))
        agree(many, leaves(H, dense @ V), 1e-11)
    gradient = torch.autograd.grad(network()(X).sum(), list(network().parameters()), allow_unused=True)
    with pytest.raises(hodiff.InputError, match=r"v is a tuple of 6, expected a dict"):
        H @ gradient  # None among them


def test_a_list_for_a_nested_point() -> None:
    point = {"a": draw(2), "b": [draw(2, 2)]}
    H = hodiff.HessianOperator(lambda p: (p["b"][0] @ p["a"]).pow(3).sum(), point)
    v = draw(6)
    agree(H @ [v[:2], v[2:].reshape(2, 2)], [(H @ v)[:2], (H @ v)[2:].reshape(2, 2)])
    pair = hodiff.HessianOperator(lambda p: (p[0] * p[1]).pow(3).sum(), (draw(2), draw(2, seed=1)))
    assert type(pair @ [v[:2], v[2:4]]) is list and type(pair @ (v[:2], v[2:4])) is tuple


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
def test_arrays_are_tensors(dtype: type) -> None:
    H = operator()
    v, V = (10 * draw(39)).numpy().astype(dtype), (10 * draw(39, 3)).numpy().astype(dtype)
    flat, columns = torch.from_numpy(v).to(D), torch.from_numpy(V).to(D)
    kept = v.copy()
    agree(H @ v, H @ flat, 0)
    agree(H @ v[::-1], H @ flat.flip(0), 0)
    agree(H @ V, H @ columns, 0)
    agree(v @ H, H @ flat, 1e-12)
    agree(H @ {name: part.numpy() for name, part in H.unflatten(flat).items()}, H @ H.unflatten(flat), 0)
    agree(H @ [part.numpy() for part in leaves(H, flat)], H @ leaves(H, flat), 0)
    assert isinstance(H @ v, Tensor) and np.array_equal(v, kept)
    assert torch.equal(H.flatten(v), flat)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_an_operator_is_no_array(case: Case) -> None:
    """NumPy would wrap it in an array without dimensions, and fail later and elsewhere."""
    H, dense = case.build()
    for convert in (np.asarray, np.array, lambda H: np.array([H, H]), lambda H: np.linalg.norm(H)):
        with pytest.raises(TypeError, match=r"is not an array.*H\.to_scipy\(\).*H\.dense\(\)\.numpy\(\)"):
            convert(H)
    with pytest.raises(hodiff.InputError, match="not a function or a number"):
        float(H)
    with pytest.raises(
        (TypeError, RuntimeError, hodiff.InputError), match=f"{type(H).__name__}|not a function or a number"
    ):
        torch.as_tensor(H)
    ones = np.ones(len(dense.T))
    np.testing.assert_allclose(
        H.dense().numpy() @ ones, (dense @ torch.ones(len(dense.T), dtype=D)).numpy(), 1e-9, 1e-9
    )
    np.testing.assert_allclose(H.to_scipy() @ ones, (dense @ torch.ones(len(dense.T), dtype=D)).numpy(), 1e-9, 1e-9)


def test_lists_of_numbers() -> None:
    H = hodiff.HessianOperator(lambda x: (X @ x).pow(3).sum(), draw(3))
    agree(H @ [1, 2.5, np.float32(3)], H @ torch.tensor([1, 2.5, 3], dtype=D))
    agree(H @ [[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]], H @ torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0]], dtype=D))
    with pytest.raises(hodiff.InputError, match="rows differ in length"):
        H @ [[1.0], [1.0, 2.0], [3.0]]
    with pytest.raises(hodiff.InputError, match=r"has shape \(2,\), expected \(3,\)"):
        H @ [1.0, 2.0]


@pytest.mark.parametrize("bad", [np.ones(39, dtype=complex), np.array([None] * 39), np.ones(39, dtype=bool)])
def test_arrays_that_are_not_real_numbers(bad: object) -> None:
    with pytest.raises(hodiff.InputError, match=r"v: got an array of .*, expected real numbers"):
        operator() @ bad


def test_other_things_are_told_what_is_expected() -> None:
    H = operator()
    with pytest.raises(hodiff.InputError, match=r"v: got a str, expected a dict.*or flat: \(39,\)"):
        H @ "x"
    with pytest.raises(hodiff.InputError, match=r"v\[0\] has shape \(3,\), expected \(4, 3\)"):
        H @ leaves(H, draw(39))[::-1]


def test_a_mapping_that_is_no_dict() -> None:
    model = network()
    H = hodiff.HessianOperator(lambda m: m(X).pow(3).mean(), model)
    with torch.no_grad():  # parameters as a vector: a constant is meant
        found, again = H @ hodiff.select(model), H @ dict(model.named_parameters())
    agree(list(found.values()), list(again.values()))


def test_solve_answers_in_the_spelling_of_the_right_hand_side() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    G = hodiff.GaussNewtonOperator(lambda m, b: m(b), lambda z, b: (z.square().sum(), 1), model, data=[X]) + 1.0
    b = draw(8)
    x = torch.linalg.solve(G.dense(), b)
    for spelled in (b, b.numpy(), b.tolist()):
        agree(hodiff.solve(G, spelled, rtol=1e-12).value, x, 1e-10)
    found = hodiff.solve(G, leaves(G, b), rtol=1e-12).value
    assert type(found) is list
    agree(found, leaves(G, x), 1e-10)
    assert hodiff.solve(G, b, start=x.numpy(), rtol=1e-8).products == 1


def test_blocks_of_containers_by_keys_alone() -> None:
    H = hodiff.HessianOperator(lambda p: (p["a"].sum() * p["b"][0].sum()) ** 2, {"a": draw(2), "b": [draw(3)]})
    for name in ("a", "x['a']"):
        agree(H.block(name).dense(), H.dense()[:2, :2])
    for name in ("b", "b.0", "b.*"):
        agree(H.block(name).dense(), H.dense()[2:, 2:])


def test_products_of_parts_count_in_the_whole() -> None:
    H = operator()
    A = hodiff.MatrixOperator(draw(3, 4))
    J = hodiff.JacobianOperator(lambda m: m(X), network())
    H.block("0") @ draw(16)
    (2 * H + 1.0).block("0").block("0.bias") @ draw(4)
    assert H.products == 2
    A.T @ draw(3), draw(3) @ A, (A.T @ A) @ draw(4)
    assert A.products == 4
    J.T @ draw(30), J @ draw(39)
    assert J.products == 2
    whole = H @ hodiff.MatrixOperator(draw(39, 39))
    whole.block("0") @ draw(16)
    assert whole.products == 1 and H.products == 3


def test_the_transpose_of_a_sum_that_is_not_symmetric() -> None:
    J, B = hodiff.JacobianOperator(lambda m: m(X), network()), draw(30, 39)
    for A in (2 * J - hodiff.MatrixOperator(B), hodiff.MatrixOperator(-B) + J * 2):
        dense = 2 * J.dense() - B
        u = draw(10, 3)
        agree(A.T.dense(), dense.T, 1e-12)
        agree(A.flatten(A.T @ u), dense.T @ u.reshape(-1), 1e-12)
        assert list(A.T @ u) == list(A.unflatten(draw(39))) and A.T.T is A


@pytest.mark.parametrize("size", [2, 3])
def test_columns_are_turned_some_at_a_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    H = hodiff.HessianOperator(lambda m: m(X).pow(3).mean(), network(), chunk_size=size)
    V, dense = draw(39, 7), H.dense()
    monkeypatch.setattr("hodiff._core._vectors.TURNED_BYTES", 1)
    before = H.products
    agree(H @ V, dense @ V, 1e-11)
    assert H.products == before + 7


def test_a_dict_of_parameters_in_their_order_is_looked_at_too() -> None:
    net = torch.nn.Linear(2, 3, dtype=torch.float64)
    f = lambda net: net(torch.ones(1, 2, dtype=torch.float64)).square().sum()
    several = {name: torch.randn(4, *p.shape, dtype=p.dtype) for name, p in net.named_parameters()}
    wrong = {name: torch.randn(*p.shape, 2, dtype=p.dtype) for name, p in net.named_parameters()}
    for product in (lambda v: hodiff.hvp(f, net, v), lambda v: hodiff.HessianOperator(f, net) @ v):
        found = product(several)
        for k in range(4):
            one = product({name: part[k] for name, part in several.items()})
            assert all(torch.allclose(found[name][k], part) for name, part in one.items())
        with pytest.raises(hodiff.InputError, match=r"v\['weight'\] has shape \(3, 2, 2\), expected \(3, 2\)"):
            product(wrong)


NET = nn.Linear(3, 2).double()


@pytest.mark.parametrize("kind", ["numpy", "list"])
def test_vectors_of_any_kind_are_taken(kind: str) -> None:
    H = hodiff.HessianOperator(lambda m: (m.weight**4).sum() + (m.bias**2).sum(), NET)
    flat = torch.arange(1.0, 9.0, dtype=D)
    given: Any = flat.numpy() if kind == "numpy" else flat.tolist()
    expected = H.dense() @ flat
    as_flat = lambda value: torch.as_tensor(value) if not isinstance(value, dict) else torch.cat(
        [t.reshape(-1) for t in value.values()]
    )  # fmt: skip
    torch.testing.assert_close(as_flat(H @ given), expected)
    solved = hodiff.solve(H + 1.0, given).value
    torch.testing.assert_close((H.dense() + torch.eye(8, dtype=D)) @ as_flat(solved), flat, rtol=1e-3, atol=1e-3)


def test_a_point_of_two_dimensions_on_the_left() -> None:
    f = lambda z: ((z @ z).sin() * torch.arange(9.0, dtype=D).reshape(3, 3)).sum()
    W, V = draw(3, 3), draw(3, 3, seed=1)
    H = hodiff.HessianOperator(f, W)
    agree(V @ H, H @ V)
    agree(V.reshape(1, 9) @ H, (H @ V).reshape(1, 9))
    wide = hodiff.HessianOperator(lambda z: z.pow(3).sum(), draw(3, 4))
    agree(draw(3, 4, seed=2) @ wide, wide @ draw(3, 4, seed=2))
    with pytest.raises(hodiff.InputError, match=r"has shape \(4, 3\), expected"):
        draw(4, 3) @ wide


def test_scipy_keeps_blocks_of_one_column() -> None:
    A = draw(3, 3)
    S, column = hodiff.MatrixOperator(A).to_scipy(), draw(3, 1)
    agree(torch.from_numpy(S.matmat(column.numpy())), A @ column)
    agree(torch.from_numpy(S.rmatmat(column.numpy())), A.T @ column)
    agree(torch.from_numpy(S @ column[:, 0].numpy()), (A @ column)[:, 0])


def test_arrays_on_the_left_reach_us() -> None:
    import numpy as np

    M = hodiff.MatrixOperator(draw(3, 3))
    agree(np.ones(3) @ M, M.dense().sum(0))
    agree(np.ones((2, 3)) @ M, M.dense().sum(0).expand(2, 3))
    with pytest.raises(hodiff.InputError, match="NumPy array"):
        np.ones(3) * M
    with pytest.raises(hodiff.InputError, match="sparse"):
        hodiff.MatrixOperator(torch.eye(3).to_sparse())
