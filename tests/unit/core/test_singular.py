"""Derivatives of a determinant that is 0, or nearly: PyTorch divides by pivots or differences of singular values.

Its first, without a graph, is 0 whatever it should be.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _substitutes
from tests.support.differences import first_difference, gradient_by_differences, relative_error

D = torch.float64
A = torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=D)
COFACTORS = torch.tensor([[4.0, -2.0], [-2.0, 1.0]], dtype=D)
BATCH = torch.stack([A, torch.eye(2, dtype=D)])
OF_BATCH = torch.stack([COFACTORS, torch.eye(2, dtype=D)])


def entry(z: Tensor) -> Tensor:
    """A determinant as a vector of one."""
    return torch.det(z).reshape(1)


def tensor_form(call: Callable[[Tensor, Tensor], Any]) -> Any:
    x = A.clone().requires_grad_()
    return call(torch.det(x * 1), x)


RUNS: dict[str, tuple[Callable[[], Any], Tensor]] = {
    "grad": (lambda: hodiff.grad(torch.det, A), COFACTORS),
    "linalg": (lambda: hodiff.grad(torch.linalg.det, A), COFACTORS),
    "create_graph": (lambda: hodiff.grad(torch.det, A, create_graph=True).detach(), COFACTORS),
    "value_and_grad": (lambda: hodiff.value_and_grad(torch.det, A)[1], COFACTORS),
    "vjp": (lambda: hodiff.vjp(torch.det, A, torch.ones((), dtype=D)), COFACTORS),
    "vjp of many": (lambda: hodiff.vjp(torch.det, A, torch.ones(2, dtype=D)), torch.stack([COFACTORS] * 2)),
    "jvp": (lambda: hodiff.jvp(torch.det, A, A.cos()), (COFACTORS * A.cos()).sum()),
    "jacobian": (lambda: hodiff.jacobian(torch.det, A), COFACTORS),
    "rows": (lambda: hodiff.jacobian(torch.det, BATCH).sum(0), OF_BATCH),
    "sparse": (lambda: hodiff.sparse_jacobian(entry, A).to_dense().reshape(2, 2), COFACTORS),
    "a batch": (lambda: hodiff.grad(lambda z: torch.det(z).sum(), BATCH), OF_BATCH),
    "batch_ndim": (lambda: hodiff.grad(torch.det, BATCH, batch_ndim=1), OF_BATCH),
    "transposed operator": (
        lambda: (hodiff.JacobianOperator(entry, A).T @ torch.ones(1, dtype=D)).reshape(2, 2),
        COFACTORS,
    ),
    "a tensor": (lambda: tensor_form(hodiff.grad), COFACTORS),
    "multi_grad": (lambda: hodiff.multi_grad([torch.det, torch.trace], A)[0], COFACTORS),
    "multi_grad, shared": (
        lambda: hodiff.multi_grad([lambda _, t: torch.det(t), lambda _, t: t.sum()], A, shared=lambda z: z * 1)[0],
        COFACTORS,
    ),
    "multi_grad, tensors": (lambda: tensor_form(lambda y, x: hodiff.multi_grad([y, x.sum()], x)[0]), COFACTORS),
    "multi_grad, released": (
        lambda: tensor_form(lambda y, x: hodiff.multi_grad([y, x.sin().sum()], x, release=True)[0]),
        COFACTORS,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_cofactors(name: str) -> None:
    call, expected = RUNS[name]
    found = call()
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_any_rank(rank: int) -> None:
    """Of a rank below n - 1 it is 0."""
    matrix = torch.diag(torch.tensor([2.0, 3.0, 5.0, 7.0][:rank] + [0.0] * (3 - rank), dtype=D))[[1, 0, 2]]
    assert relative_error(hodiff.grad(torch.det, matrix), gradient_by_differences(torch.det, matrix, 1e-3)) < 1e-8
    v = torch.linspace(-1, 1.3, 9, dtype=D).reshape(3, 3)
    expected = first_difference(lambda t: hodiff.grad(torch.det, matrix + t * v))
    if rank == 2:
        assert relative_error(hodiff.hvp(torch.det, matrix, v), expected) < 1e-6


def test_through_steps_of_an_optimizer() -> None:
    def trained(scale: Tensor) -> Tensor:
        return hodiff.unroll(lambda z: torch.det(z * scale), A, hodiff.rules.SGD(lr=0.1), 2).sum()

    one = torch.ones((), dtype=D)
    assert relative_error(hodiff.grad(trained, one), gradient_by_differences(trained, one, 1e-3)) < 1e-7


def test_others_are_as_they_were() -> None:
    f: Callable[[Tensor], Tensor] = lambda z: torch.det(z + torch.eye(2, dtype=D))
    torch.testing.assert_close(hodiff.grad(f, A), torch.tensor([[5.0, -2.0], [-2.0, 2.0]], dtype=D))


V = torch.tensor([[0.5, -0.3], [0.8, 0.2]], dtype=D)
W = torch.linspace(-1, 1.3, 9, dtype=D).reshape(3, 3).cos()
REFUSED = r"det has few correct digits, or none, at a singular or nearly singular matrix"


def cofactors(a: Tensor) -> Tensor:
    """Of two rows: linear, and so the second derivative as well."""
    return torch.stack([torch.stack([a[1, 1], -a[1, 0]]), torch.stack([-a[0, 1], a[0, 0]])])


def polynomial(a: Tensor) -> Tensor:
    """The determinant of three rows, term by term."""
    even = [(0, 1, 2), (1, 2, 0), (2, 0, 1)]
    odd = [(2, 1, 0), (1, 0, 2), (0, 2, 1)]
    term = lambda i, j, k: a[..., 0, i] * a[..., 1, j] * a[..., 2, k]
    return sum(term(*p) for p in even) - sum(term(*p) for p in odd)  # type: ignore[return-value]


def checkpointed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: checkpoint(f, z, use_reentrant=False)  # type: ignore[return-value]


def offloaded(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(z: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return f(z)

    return run


@pytest.mark.parametrize("wrap", [checkpointed, offloaded])
def test_where_a_hook_hides_the_value(wrap: Callable[..., Any]) -> None:
    """A determinant that cannot be read may be 0, so the pass is recorded."""
    ones = torch.ones(2, 2, dtype=D)
    f: Callable[[Tensor], Tensor] = lambda z: torch.linalg.det(z) * z.sum()
    expected = cofactors(ones) * V.sum() + (cofactors(ones) * V).sum() + cofactors(V) * ones.sum()
    torch.testing.assert_close(hodiff.hvp(wrap(f), ones, V), expected)
    found = hodiff.grad(wrap(torch.linalg.det), torch.diag(torch.tensor([1.0, 1, 0], dtype=D)))
    torch.testing.assert_close(found, torch.diag(torch.tensor([0.0, 0, 1], dtype=D)))


@pytest.mark.parametrize("function", [torch.linalg.det, torch.det, Tensor.det])
@pytest.mark.parametrize("distance", [0.0, 1e-12, 1e-9, 1e-5, 1.0])
def test_third_derivatives_near_a_singular_matrix(function: Callable[[Tensor], Tensor], distance: float) -> None:
    """The third derivative of det(B + t E) is 6 det E; that of two rows is 0."""
    two, three = A + distance * torch.eye(2, dtype=D), torch.ones(3, 3, dtype=D) + distance * torch.eye(3, dtype=D)
    for matrix, v, last in ((two, V, 0.0), (three, W, 6 * float(polynomial(W)))):
        zero = torch.zeros_like(v)
        along = lambda t, matrix=matrix, v=v: function(matrix + t * v)
        again = lambda z, v=v: (hodiff.hvp(function, z, v) * v).sum()
        found = [
            hodiff.jet(function, matrix, [v, zero, zero])[1][2],
            hodiff.nth_derivative(along, torch.zeros((), dtype=D), 3),
            (hodiff.grad(again, matrix) * v).sum(),
        ]
        torch.testing.assert_close(torch.stack(found), torch.full((3,), last, dtype=D), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1e-5, 1e-5, 1e-5], [2.0, 1.0, 1e-13]])
@pytest.mark.parametrize("turned", [False, True])
def test_second_derivatives_where_singular_values_are_equal_or_a_pivot_is_small(
    values: list[float], turned: bool
) -> None:
    turn = torch.linalg.qr(W + torch.eye(3, dtype=D))[0] if turned else torch.eye(3, dtype=D)
    matrix = turn @ torch.diag(torch.tensor(values, dtype=D)) @ turn.mT
    v = W + 2 * torch.eye(3, dtype=D)
    torch.testing.assert_close(
        hodiff.hvp(torch.linalg.det, matrix, v), hodiff.hvp(polynomial, matrix, v), rtol=1e-10, atol=1e-15
    )
    x = matrix.clone().requires_grad_()
    with pytest.raises(hodiff.GraphError, match=f"order 2 .*{REFUSED}"):
        hodiff.hvp(torch.linalg.det(x), x, v)


def test_second_derivatives_of_a_complex_matrix() -> None:
    """The rule of complex singular values is wrong; here the real part is twice the determinant of x."""
    f: Callable[[Tensor], Tensor] = lambda z: torch.linalg.det(torch.complex(z, z.flip(0))).real
    ones = torch.ones(2, 2, dtype=D)
    torch.testing.assert_close(hodiff.hvp(f, ones, V), 2 * cofactors(V))
    torch.testing.assert_close(hodiff.hvp(f, ones + V, V), 2 * cofactors(V))
    x = ones.clone().requires_grad_()
    with pytest.raises(hodiff.GraphError, match=f"order 2 .*{REFUSED}"):
        hodiff.hvp(f(x), x, V)


@pytest.mark.parametrize("distance", [0.0, 1e-12])
def test_larger_ones_and_tensors_are_refused_from_the_third_on(distance: float) -> None:
    four = torch.eye(4, dtype=D).index_fill(0, torch.tensor([3]), 0.0) + distance * torch.eye(4, dtype=D)
    t = torch.zeros((), dtype=D)
    along: Callable[[Tensor], Tensor] = lambda t: torch.linalg.det(four + t)
    x = (A + distance * torch.eye(2, dtype=D)).requires_grad_()
    for run in (
        lambda: hodiff.nth_derivative(along, t, 3),
        lambda: hodiff.grad(lambda z: hodiff.hessian(along, z), t),
        lambda: hodiff.jet(along, t, 3 * [t]),
        lambda: hodiff.hvp(torch.linalg.det(x), x, V, create_graph=True),
    ):
        with pytest.raises(hodiff.GraphError, match=f"order 3 .*{REFUSED}.*Expand a larger one"):
            run()
    regular = torch.eye(4, dtype=D) + 1
    assert float(hodiff.nth_derivative(lambda t: torch.linalg.det(regular * t), t + 1, 3)) == pytest.approx(5 * 24)


def test_a_checkpoint_of_one_that_is_written_out_is_right() -> None:
    f = checkpointed(torch.linalg.det)
    at = 0.1 * torch.ones(3, 3, dtype=D)
    torch.testing.assert_close(hodiff.hvp(f, at, W), hodiff.hvp(polynomial, at, W))
    torch.testing.assert_close(hodiff.hvp(f, W, W), 2 * hodiff.grad(polynomial, W))


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.complex128])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4])
def test_values_are_those_of_the_kernel(n: int, dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 2, 2 * n * n).cos().reshape(2, n, n).to(dtype)
    written: Callable[..., Tensor] = _substitutes.det(torch.linalg.det)
    torch.testing.assert_close(written(x), torch.linalg.det(x))
    torch.testing.assert_close(written(A=x[0]), torch.linalg.det(x[0]))
    torch.testing.assert_close(_substitutes.det(torch.det)(input=x), torch.det(x))


@pytest.mark.parametrize("f", [torch.logdet, lambda z: torch.linalg.slogdet(z)[1]])
def test_a_logarithm_of_a_determinant_that_is_0_is_refused_in_words(f: Callable[[Tensor], Tensor]) -> None:
    x = A.clone().requires_grad_()
    for run in (
        lambda: hodiff.grad(f, A, create_graph=True),
        lambda: hodiff.hvp(f, A, V),
        lambda: hodiff.hvp(f(x), x, V),
        lambda: hodiff.grad(lambda z: (hodiff.hvp(f, z, V) * V).sum(), A),
        lambda: hodiff.jet(f, A, [V, V]),
        lambda: hodiff.laplacian(f, A, batch_ndim=0, method="reverse"),
    ):
        with pytest.raises(
            hodiff.GraphError, match=r"singular.*slogdet and logdet.*multiple of the identity.*linalg\.det"
        ):
            run()
    assert not hodiff.grad(f, A).isfinite().any()


# --- eigenvalues and singular values that are equal, or nearly: PyTorch divides by their differences ------------------


def rotated(*values: float, rows: int = 0) -> Tensor:
    """A matrix with these singular values; if it is square, with these eigenvalues."""
    draw = lambda n: torch.linalg.qr(torch.randn(n, n, dtype=D, generator=torch.Generator().manual_seed(n)))[0]
    n = len(values)
    middle = torch.zeros(rows or n, n, dtype=D)
    middle[:n] = torch.diag(torch.tensor(values, dtype=D))
    return draw(rows or n) @ middle @ draw(n).T


def third(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: hodiff.grad(lambda y: (hodiff.hvp(f, y, z.detach().cos()) * z.detach().sin()).sum(), z)


def second(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: hodiff.hvp(f, z, z.detach().cos())


SPECTRAL: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, Any]] = {
    "squares of singular values, one of them 0": (
        lambda z: torch.linalg.svdvals(z).square().sum(),
        rotated(2.0, 1.0, 0.0, rows=4),
        third,
    ),
    "of a decomposition": (
        lambda z: torch.linalg.svd(z, full_matrices=False)[1].pow(4).sum(),
        rotated(2.0, 1.0, 0.0, rows=4),
        third,
    ),
    "equal singular values": (
        lambda z: torch.linalg.svdvals(z).exp().sum(),
        rotated(2.0, 1.0, 1.0 + 1e-14),
        second,
    ),
    "equal eigenvalues": (lambda z: torch.linalg.eigvalsh(z + z.T).exp().sum(), rotated(2.0, 1.0, 1.0), second),
    "beside each other": (lambda z: torch.linalg.eigvalsh(z + z.T).exp().sum(), rotated(1.0, 1.0, 1.0 + 1e-9), third),
    "exactly equal": (lambda z: torch.linalg.eigvalsh(z + z.T).exp().sum(), torch.eye(3, dtype=D), second),
    "a vector": (lambda z: (torch.linalg.eigh(z @ z.T)[1][:, -1] ** 4).sum(), rotated(2.0, 1.0, 1.0), second),
    "a vector beside 0": (lambda z: (torch.linalg.svd(z)[0][:, 0] ** 4).sum(), rotated(2.0, 0.0, rows=3), second),
    "the largest, beside others": (lambda z: torch.linalg.eigvalsh(z @ z.T)[-1], rotated(2.0, 1.0, 1.0), third),
    "the largest, beside 0": (lambda z: torch.linalg.svdvals(z)[0], rotated(2.0, 1.0, 0.0, rows=4), third),
    "zeros": (lambda z: torch.linalg.eigvalsh(z + z.T).exp().sum(), torch.zeros(2, 2, dtype=D), second),
    "of a general matrix": (lambda z: torch.linalg.eigvals(z).exp().real.sum(), torch.eye(3, dtype=D), second),
}


@pytest.mark.filterwarnings("ignore:the result is not finite")
@pytest.mark.parametrize("name", SPECTRAL)
def test_functions_of_values_that_are_equal_or_nearly_are_named(name: str) -> None:
    f, point, derivative = SPECTRAL[name]
    with pytest.warns(hodiff.HodiffWarning, match=r"values .* equal or nearly equal.*few correct digits"):
        derivative(f)(point)
    x = point.clone().requires_grad_()
    with pytest.warns(hodiff.HodiffWarning, match=r"values .* equal or nearly equal.*few correct digits"):
        hodiff.hvp(f(x), x, point.cos(), create_graph=derivative is third)
    with pytest.warns(hodiff.HodiffWarning, match=r"values .* equal or nearly equal.*few correct digits"):
        hodiff.hessian(f, point, create_graph=True)


LARGEST: dict[str, Callable[[Tensor], Tensor]] = {
    "eigvalsh": lambda z: torch.linalg.eigvalsh(z @ z.T)[-1],
    "svdvals": lambda z: torch.linalg.svdvals(z)[0],
    "a norm": lambda z: torch.linalg.matrix_norm(z, 2),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", LARGEST)
def test_a_value_that_is_apart_is_right_beside_others_that_are_equal(name: str) -> None:
    f, point = LARGEST[name], rotated(2.0, 1e-9, 0.0, rows=4)
    v = point.cos()
    found = hodiff.hvp(f, point, v)
    expected = first_difference(lambda t: hodiff.grad(f, point + t * v))
    assert relative_error(found, expected) < 1e-6


@pytest.mark.filterwarnings("error")
def test_values_that_are_apart_are_right() -> None:
    f, point = SPECTRAL["squares of singular values, one of them 0"][0], rotated(2.0, 1.0, 0.1, rows=4)
    assert third(f)(point).abs().max() < 1e-9
    assert hodiff.hvp(f, point, point.cos()).allclose(2 * point.cos())
