"""One vector, one meaning: everything that takes vectors, in every spelling, against dense matrices.

Operators read a matrix as columns. Functions take several vectors in front, or columns, and refuse what may be either.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
import hodiff.plotting
from hodiff.errors import InputError
from tests.support.operators import D, draw
from tests.support.properties import agree, leaves

SIZE, OUT = 6, 4
A = draw(SIZE, SIZE, seed=1)
H = A @ A.T + torch.eye(SIZE, dtype=D)  # symmetric and positive
S = draw(SIZE, SIZE, seed=2)  # neither
B = draw(OUT, SIZE, seed=3)
Z = draw(SIZE, seed=4)


def linear() -> nn.Module:
    layer = nn.Linear(2, 2, dtype=D)
    nn.utils.vector_to_parameters(Z, layer.parameters())
    return layer


POINTS: dict[str, Any] = {
    "line": Z,
    "matrix": Z.reshape(3, 2),
    "dict": {"a": Z[:2], "b": [Z[2:].reshape(2, 2)]},
    "module": linear(),
}


def flat(point: Any) -> Tensor:
    if isinstance(point, nn.Module):
        return nn.utils.parameters_to_vector(point.parameters())
    return torch.cat([leaf.reshape(-1) for leaf in leaves(point)])


def quadratic(point: Any) -> Tensor:
    return flat(point) @ H @ flat(point) / 2


def mapped(point: Any) -> Tensor:
    return (B @ flat(point)).reshape(2, 2)


def bilinear(x: Any, y: Any) -> Tensor:
    return flat(x) @ S @ flat(y)


# --- every spelling of some rows, and how its results are laid out


def like(point: str, rows: Tensor) -> Any:
    """Rows `(*lead, 6)` with the structure of a point."""
    lead = rows.shape[:-1]
    if point in ("line", "matrix"):
        return rows.reshape(*lead, *POINTS[point].shape)
    first, second = (2, 4) if point == "dict" else (4, 2)
    parts = rows.split([first, second], -1)
    if point == "dict":
        return {"a": parts[0], "b": [parts[1].reshape(*lead, 2, 2)]}
    return {"weight": parts[0].reshape(*lead, 2, 2), "bias": parts[1]}


def arrays(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.numpy()
    return {k: arrays(v) for k, v in value.items()} if isinstance(value, dict) else [arrays(v) for v in value]


def spellings(point: str, rows: Tensor, *, operator: bool) -> dict[str, tuple[Any, str]]:
    """Of several vectors, by name: the spelling, and whether it means rows, columns, or is refused."""
    square, line = len(rows) == SIZE, point == "line"
    in_front = "rows" if not line else ("refused" if not operator else "columns") if square else "rows"
    if operator and line and not square:
        in_front = "refused"
    columns = "refused" if line and square and not operator else "columns"
    stacked = like(point, rows)
    found = {
        "in front": (stacked, in_front),
        "columns": (rows.T, columns),
        "a list of the leaves": (leaves(stacked), "rows"),
        "a tuple of the leaves": (tuple(leaves(stacked)), "rows"),
        "arrays in front": (arrays(stacked), in_front),
        "columns of an array": (rows.T.numpy(), columns),
        "columns of numbers": (rows.T.tolist(), columns),
    }
    if line and square and operator:  # a matrix is columns, whatever was meant
        found["in front"] = (rows.T, "columns")
        del found["arrays in front"]
    return found


def singles(point: str, row: Tensor) -> dict[str, Any]:
    one = like(point, row)
    return {
        "like the point": one,
        "flat": row,
        "a list of the leaves": leaves(one),
        "arrays": arrays(one),
        "a flat array": row.numpy(),
        "numbers": row.tolist(),
    }


def joined(found: Any, *lead: int) -> Tensor:
    return torch.cat([leaf.reshape(*lead, -1) for leaf in leaves(found)], -1)


# --- products: the result is a matrix times the vector


@dataclass(frozen=True)
class Product:
    """What takes a vector and gives its product with a matrix; `points` are those that its vectors may be like."""

    call: Callable[[Any, Any], Any]
    matrix: Tensor
    operator: bool = False
    points: tuple[str, ...] = tuple(POINTS)
    single: bool = False


def solved(x: Any, b: Any, **options: Any) -> Any:
    return hodiff.solve(hodiff.HessianOperator(quadratic, x), b, rtol=1e-12, **options).value


PRODUCTS = {
    "hvp.v": Product(lambda x, v: hodiff.hvp(quadratic, x, v), H),
    "jvp.v": Product(lambda x, v: hodiff.jvp(mapped, x, v), B),
    "vjp.u": Product(lambda x, u: hodiff.vjp(lambda z: S @ z, Z, u), S.T, points=("line",)),
    "vjp.u, like a matrix": Product(
        lambda x, u: hodiff.vjp(lambda z: (S @ z).reshape(3, 2), Z, u), S.T, points=("matrix",)
    ),
    "vjp.u, like a dict": Product(
        lambda x, u: hodiff.vjp(lambda z: like("dict", S @ flat(z)), POINTS["module"], u), S.T, points=("dict",)
    ),
    "cross_hvp.v": Product(lambda y, v: hodiff.cross_hvp(bilinear, Z.reshape(2, 3), y, v), S),
    "HessianOperator.__matmul__.v": Product(lambda x, v: hodiff.HessianOperator(quadratic, x) @ v, H, operator=True),
    "JacobianOperator.__matmul__.v": Product(lambda x, v: hodiff.JacobianOperator(mapped, x) @ v, B, operator=True),
    "MatrixOperator.__matmul__.v": Product(
        lambda x, v: hodiff.MatrixOperator(S) @ v, S, operator=True, points=("line",)
    ),
    "LinearOperator.flatten.v": Product(
        lambda x, v: hodiff.HessianOperator(quadratic, x).flatten(v), torch.eye(SIZE, dtype=D), operator=True
    ),
    "solve.b": Product(solved, torch.linalg.inv(H), operator=True, single=True),
    "solve.start": Product(lambda x, v: solved(x, Z, start=v), torch.zeros(SIZE, SIZE), operator=True, single=True),
}
CASES = [(name, point) for name, product in PRODUCTS.items() for point in product.points]


@pytest.mark.parametrize(("name", "point"), CASES)
def test_products_with_one_vector(name: str, point: str) -> None:
    product, row = PRODUCTS[name], draw(SIZE, seed=5)
    expected = product.matrix.to(D) @ row if name != "solve.start" else torch.linalg.solve(H, Z)
    for spelled in singles(point, row).values():
        agree(joined(product.call(POINTS[point], spelled)), expected)


@pytest.mark.parametrize("count", [1, 2, SIZE])
@pytest.mark.parametrize(("name", "point"), [case for case in CASES if not PRODUCTS[case[0]].single])
def test_products_with_several(name: str, point: str, count: int) -> None:
    product, rows = PRODUCTS[name], draw(count, SIZE, seed=6)
    expected = rows @ product.matrix.T
    for spelling, (spelled, means) in spellings(point, rows, operator=product.operator).items():
        if means == "refused":
            with pytest.raises(InputError, match=_REFUSED if count == SIZE else r"several vectors are columns: give v"):
                product.call(POINTS[point], spelled)
            continue
        found = product.call(POINTS[point], spelled)
        if means == "columns" or name == "LinearOperator.flatten.v":
            assert isinstance(found, Tensor), spelling
            agree(found, expected.T)
        else:
            assert all(leaf.shape[0] == count for leaf in leaves(found)), spelling
            agree(joined(found, count), expected)


_REFUSED = (
    r"(?s)could be its rows or its columns.*\[\w+\] for rows.*\[\w+\.T\] for columns.*H @ \w+ with H = hodiff\.Hessian"
)


def test_the_ways_out_of_the_refusal() -> None:
    """Each of those that the message names, with the product that it promises."""
    V, f = draw(SIZE, SIZE, seed=7), quadratic
    with pytest.raises(InputError, match=_REFUSED):
        hodiff.hvp(f, Z, V)
    [rows], [columns] = hodiff.hvp(f, Z, [V]), hodiff.hvp(f, Z, [V.T])
    agree(rows, V @ H)
    agree(columns.T, H @ V)
    agree(hodiff.HessianOperator(f, Z) @ V, H @ V)
    agree(V @ hodiff.HessianOperator(f, Z), V @ H)


def test_from_the_left_several_vectors_are_rows() -> None:
    J = hodiff.JacobianOperator(lambda z: B @ z, Z)
    for count in (1, 2, OUT):
        rows = draw(count, OUT)
        agree(rows @ J, rows @ B)
        agree(rows.numpy() @ J, rows @ B)
        agree(rows.tolist() @ J, rows @ B)
    agree(draw(OUT) @ J, draw(OUT) @ B)
    with pytest.raises(
        InputError, match=r"u has shape \(4, 2\), expected \(4,\), or \(K, 4\).*several.*rows: give u\.T"
    ):
        draw(OUT, 2) @ J
    structured = hodiff.JacobianOperator(mapped, Z)
    agree(draw(2, 2) @ structured, draw(OUT) @ B)  # like f(x)


@pytest.mark.parametrize("point", POINTS)
def test_unflattened_columns_are_in_front(point: str) -> None:
    operator, rows = hodiff.HessianOperator(quadratic, POINTS[point]), draw(2, SIZE)
    agree(operator.unflatten(rows[0]), like(point, rows[0]))
    agree(operator.unflatten(rows[0].numpy()), like(point, rows[0]))
    agree(operator.unflatten(rows.T), rows.T if point == "line" else like(point, rows))


def test_results_of_columns_can_be_differentiated() -> None:
    V = draw(SIZE, 2).requires_grad_()
    found = hodiff.jvp(lambda z: B @ z**2, Z, V, create_graph=True)
    agree(found, B @ (2 * Z[:, None] * V))
    (by_v,) = torch.autograd.grad(found.sum(), V)
    agree(by_v, (2 * Z * B.sum(0))[:, None].expand(SIZE, 2).contiguous())


# --- what is made of several vectors: the order of them does not matter, and there is one result


def forms(rows: Tensor, matrix: Tensor = H) -> Tensor:
    return ((rows @ matrix) * rows).sum(1)


@dataclass(frozen=True)
class Mean:
    """What takes several vectors and gives one result; `of` finds it from their rows."""

    call: Callable[[Any, Any], Any]
    of: Callable[[Tensor], Any]
    operator: bool = False
    points: tuple[str, ...] = ("line", "matrix")
    counts: tuple[int, ...] = (2, SIZE)


def field_of(x: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: (S @ z.reshape(-1)).reshape(x.shape)


def image_lengths(x: Any, vectors: Any) -> Tensor:
    """Of images (1, 6), or (1, 3, 2), made by the matrix S: |S' y|, from the state that the call leaves."""
    penalty = hodiff.PathLengthPenalty().double()
    penalty(lambda w: (S @ w[0]).reshape(1, *x.shape), Z[None], vectors=vectors, create_graph=False)
    return penalty.lengths


def operator_of(x: Any) -> hodiff.LinearOperator:
    return hodiff.HessianOperator(quadratic, x)


def root_log() -> Tensor:
    values, vectors = torch.linalg.eigh(H)
    return vectors @ torch.diag(values.log()) @ vectors.T


def mean_of_density(record: Any) -> Tensor:
    """v'Av / 6, summed over the vectors: what their quadratures have in common with it for any number of steps."""
    return (record.nodes * record.weights).sum()


def score(rows: Tensor) -> Tensor:
    return (forms(rows, S) + (rows @ (S @ Z)).square() / 2).mean()


MEANS = {
    "laplacian.vectors": Mean(
        lambda x, v: hodiff.laplacian(quadratic, x, vectors=v, batch_ndim=0), lambda rows: forms(rows).mean()
    ),
    "divergence.vectors": Mean(
        lambda x, v: hodiff.divergence(field_of(x), x, vectors=v, batch_ndim=0),
        lambda rows: forms(rows, S).mean(),
    ),
    "value_and_divergence.vectors": Mean(
        lambda x, v: hodiff.value_and_divergence(field_of(x), x, vectors=v, batch_ndim=0)[1],
        lambda rows: forms(rows, S).mean(),
    ),
    "hessian_penalty.vectors": Mean(
        lambda x, v: hodiff.hessian_penalty(quadratic, x, vectors=v, batch_ndim=0, create_graph=False),
        lambda rows: forms(rows).var(),
        points=("line", "matrix", "dict"),
    ),
    "jacobian_penalty.vectors": Mean(
        lambda x, v: hodiff.jacobian_penalty(field_of(x), x, vectors=v, batch_ndim=0, weight=2.0, create_graph=False),
        lambda rows: (rows @ S).square().sum(1).mean(),
    ),
    "sliced_score_matching_loss.vectors": Mean(
        lambda x, v: hodiff.sliced_score_matching_loss(
            field_of(x), x, vectors=v, batch_ndim=0, variance_reduced=False, create_graph=False
        ),
        score,
    ),
    "PathLengthPenalty.forward.vectors": Mean(
        lambda x, v: image_lengths(x, v), lambda rows: (rows @ S).norm(dim=1) / 2**0.5, points=("images",), counts=(1,)
    ),
    "trace.vectors": Mean(
        lambda x, v: hodiff.trace(operator_of(x), vectors=v).value,
        lambda rows: forms(rows).mean(),
        operator=True,
        points=tuple(POINTS),
    ),
    "diagonal.vectors": Mean(
        lambda x, v: flat(hodiff.diagonal(operator_of(x), vectors=v).value),
        lambda rows: (rows * (rows @ H)).mean(0),
        operator=True,
        points=tuple(POINTS),
    ),
    "logdet.vectors": Mean(
        lambda x, v: hodiff.logdet(operator_of(x), vectors=v).value,
        lambda rows: forms(rows, root_log()).mean(),
        operator=True,
        points=tuple(POINTS),
    ),
    "spectral_density.vectors": Mean(
        lambda x, v: mean_of_density(hodiff.spectral_density(operator_of(x), vectors=v, steps=2)),
        lambda rows: forms(rows).sum() / SIZE,
        operator=True,
        points=tuple(POINTS),
    ),
}
SEVERAL = [(name, point, count) for name, mean in MEANS.items() for point in mean.points for count in mean.counts]


@pytest.mark.parametrize(("name", "point", "count"), SEVERAL)
def test_one_result_of_several(name: str, point: str, count: int) -> None:
    mean, rows = MEANS[name], draw(count, SIZE, seed=8)
    if point == "images":  # latents of one sample, and its image
        for spelled in (rows.reshape(1, 3, 2), rows[0], rows.T, [rows.reshape(1, 3, 2)], rows.reshape(1, 3, 2).numpy()):
            agree(mean.call(Z.reshape(3, 2), spelled), mean.of(rows), 1e-6)
        return
    for spelling, (spelled, means) in spellings(point, rows, operator=mean.operator).items():
        if means == "refused":
            with pytest.raises(InputError, match=_REFUSED if count == SIZE else r"several vectors are columns: give v"):
                mean.call(POINTS[point], spelled)
        else:
            assert means in ("rows", "columns"), spelling
            agree(mean.call(POINTS[point], spelled), mean.of(rows), 1e-6)


MADE_OF_ONE = [case for case in MEANS if case not in ("hessian_penalty.vectors", "PathLengthPenalty.forward.vectors")]


@pytest.mark.parametrize(("name", "point"), [(name, point) for name in MADE_OF_ONE for point in MEANS[name].points])
def test_one_result_of_one(name: str, point: str) -> None:
    mean, row = MEANS[name], draw(SIZE, seed=9)
    for spelled in singles(point, row).values():
        agree(mean.call(POINTS[point], spelled), mean.of(row[None]), 1e-6)


# --- that nothing is left out

ELSEWHERE = {
    "LinearOperator.__matmul__.v": "MatrixOperator.__matmul__.v",
    "LinearOperator.__rmatmul__.u": "test_from_the_left_several_vectors_are_rows",
    "LinearOperator.unflatten.flat": "test_unflattened_columns_are_in_front",
}
NAMED_ALIKE = {
    "derivatives_of.u": "a field's values",
    "interpolate.b": "samples",
    "second_order_operator.b": "a coefficient field",
}
VECTORS = {"v", "u", "b", "start", "vectors", "flat"}
WORDS = """
    A a allow args axes backend basis batch batch_ndim batch_weight batches blocks C c call callback check
    check_independence checkpoint chunk_size closure create_graph critic damping data decay detach directions
    epsilon exc exclude F f fake fallback first_order frame g gamma generator grad_scale gradient_tol grads h has_aux
    index indices inputs iterations k keep kind kinds kwargs label last leaf log_density loss losses made_of matrix
    memory_budget method min_damping module momentum more n name names node nodes one_sided operator ord order
    output outputs param_group params patch_reduction path pattern patterns place points polish power preconditioner
    predict primals probes process_group products progress radius rank real records reduction release residuals
    restart return_outputs return_state return_used roots rtol rule samples scale scaled search segments self series
    shared shift since state std steps strict symmetric target tensor tries variance_reduced w weight what where
    which width x x_star y
"""
NO_VECTORS = set(WORDS.split())


def public() -> dict[str, Any]:
    """Every function, and every method that a class of ours defines, by the name that a user writes."""
    found = {}
    for module in (hodiff, hodiff.graph, hodiff.implicit, hodiff.jets, hodiff.plotting, hodiff.sparse):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, BaseException):
                continue
            for owner in value.__mro__ if inspect.isclass(value) else ():
                if owner.__module__.startswith("hodiff."):
                    for method, function in vars(owner).items():
                        called = method[0] != "_" or method in ("__call__", "__matmul__", "__rmatmul__")
                        if inspect.isfunction(function) and called:
                            found[f"{owner.__name__}.{method}"] = function
            if inspect.isfunction(value) or (inspect.isclass(value) and module is hodiff):
                found[name] = value
    return found


@pytest.mark.names
def test_every_parameter_that_is_a_vector_has_its_row() -> None:
    """A new word is a vector, with rows in a table, or is not: then it goes into `NO_VECTORS`."""
    rows = {*PRODUCTS, *MEANS, *ELSEWHERE}
    missing, unknown = set(), set()
    for name, function in public().items():
        for word in inspect.signature(function).parameters:
            row = f"{name}.{word}"
            if word in VECTORS and row not in NAMED_ALIKE and row not in rows:
                missing.add(row)
            if word not in VECTORS | NO_VECTORS:
                unknown.add(row)
    assert not missing, "give these vectors rows, in PRODUCTS, MEANS or ELSEWHERE"
    assert not unknown, "say in VECTORS or NO_VECTORS what these words are"
