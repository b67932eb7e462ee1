"""Operations whose first gradient PyTorch has wrong: refused by name, at every order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from hodiff import GraphError
from tests.support.differences import first_difference, gradient_by_differences, relative_error

D = torch.float64
X = torch.tensor([0.3, -0.8, 1.4, 0.9, 0.2], dtype=D)
V = torch.tensor([1.0, -0.3, 0.5, 2.0, 0.7], dtype=D)
WEIGHTS = torch.tensor([0.5, -1.0, 2.0, 0.3, 1.1], dtype=D)


def scattered(z: Tensor) -> Tensor:
    return torch.as_strided_scatter(z**3, z[:4].reshape(2, 2) ** 2, (2, 2), (1, 2))


def loss(z: Tensor) -> Tensor:
    return (scattered(z).sin() * WEIGHTS).sum()


def of_tensor(call: Callable[[Tensor, Tensor], Any]) -> Any:
    x = X.clone().requires_grad_()
    return call(loss(x), x)


def by_hand(z: Tensor) -> Tensor:
    return torch.autograd.grad(loss(z), z, create_graph=True)[0].square().sum()


CALLS: dict[str, Callable[[], Any]] = {
    "grad": lambda: hodiff.grad(loss, X),
    "of a method": lambda: hodiff.grad(lambda z: (z * 1).as_strided_scatter(z[:2], (2,), (1,)).sum(), X),
    "create_graph": lambda: hodiff.grad(loss, X, create_graph=True),
    "vjp": lambda: hodiff.vjp(scattered, X, V),
    "jvp": lambda: hodiff.jvp(scattered, X, V),
    "jacobian": lambda: hodiff.jacobian(scattered, X),
    "hvp": lambda: hodiff.hvp(loss, X, V),
    "hessian": lambda: hodiff.hessian(loss, X),
    "third": lambda: hodiff.grad(lambda z: hodiff.hvp(loss, z, V).sum(), X),
    "by hand": lambda: hodiff.grad(by_hand, X),
    "forward mode": lambda: hodiff.grad(lambda z: torch.func.jvp(scattered, (z,), (z.cos(),))[1].sin().sum(), X),
    "multi_grad": lambda: hodiff.multi_grad([loss, torch.sum], X),
    "a head on a trunk": lambda: hodiff.multi_grad([lambda _, t: loss(t)], X, shared=lambda z: z * 1),
    "a tensor": lambda: of_tensor(hodiff.grad),
    "multi_grad of tensors": lambda: of_tensor(lambda y, x: hodiff.multi_grad([y, x.sum()], x)),
    "operator": lambda: hodiff.JacobianOperator(scattered, X).T @ V,
    "penalty": lambda: hodiff.gradient_penalty(lambda z: loss(z), X, batch_ndim=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_strided_scatter(name: str) -> None:
    with pytest.raises(GraphError, match=r"as_strided_scatter is silently wrong: .*copy_\(source\)"):
        CALLS[name]()


def test_pytorch_has_it_wrong() -> None:
    """Should this fail one day, on every supported release, it need not be refused."""
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(x), x)
    assert relative_error(found, gradient_by_differences(loss, X, 1e-3)) > 0.1


def test_where_it_does_not_lead_to_the_point_nothing_is_said() -> None:
    other = X.clone().requires_grad_()
    torch.testing.assert_close(hodiff.grad(lambda z: z.sum() * loss(other).exp(), X), loss(X).exp().expand(5))


def test_the_way_out() -> None:
    def written(z: Tensor) -> Tensor:
        y = (z**3).clone()
        y.as_strided((2, 2), (1, 2)).copy_(z[:4].reshape(2, 2) ** 2)
        return y

    f = lambda z: (written(z).sin() * WEIGHTS).sum()
    assert torch.equal(written(X), scattered(X))
    assert relative_error(hodiff.grad(f, X), gradient_by_differences(f, X, 1e-3)) < 1e-8
    expected = first_difference(lambda t: hodiff.grad(f, X + t * V))
    assert relative_error(hodiff.hvp(f, X, V), expected) < 1e-6
    expected = first_difference(lambda t: written(X + t * V))
    assert relative_error(hodiff.jacobian(written, X) @ V, expected) < 1e-8
    assert relative_error(hodiff.jvp(written, X, V), expected) < 1e-8


def test_each_is_blamed_for_itself() -> None:
    """A determinant and a scatter that do not lead to the point, beside attention that does."""
    q, mask = torch.randn(1, 1, 3, 2, dtype=D, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 3, dtype=D)
    mask[1] = torch.finfo(D).min
    other, x = X.clone().requires_grad_(), q.clone().requires_grad_()
    beside = torch.det(other[:1, None] * 0) + loss(other)
    value = F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sin().sum() * beside
    with pytest.raises(GraphError, match="gradient of PyTorch's fused attention on the CPU is silently wrong"):
        hodiff.grad(value, x)


# --- what a graph does not tell, or not for nothing ------------------------------------------------------------------

INDICES = torch.tensor([0, 2, 2])
FOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda z: (z[:, None] + torch.tensor([0.0, -1e17], dtype=D)).logsumexp(0).sum(),
    "logcumsumexp": lambda z: (z[:, None] + torch.tensor([0.0, -1e17], dtype=D)).logcumsumexp(0)[-1].sum(),
    "index_put": lambda z: z.index_put((INDICES,), z[2:] ** 2).exp().sum(),
    "put": lambda z: z.put(INDICES, z[2:] ** 2).exp().sum(),
    "scatter": lambda z: z.scatter(0, INDICES, z[2:] ** 2).exp().sum(),
    "index_copy": lambda z: z.index_copy(0, INDICES, z[2:] ** 2).exp().sum(),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_page_names_check_derivatives_finds(name: str) -> None:
    """Entries that are written twice, and rows whose log N is lost."""
    with pytest.raises(hodiff.DerivativeError, match=rf"PyTorch's derivative of {name} is wrong at order [12] here"):
        hodiff.check_derivatives(FOUND[name], X)


KIN: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda z: (z * 1).as_strided((3, 3), (1, 1)),
    "select_scatter": lambda z: torch.select_scatter(torch.outer(z, z), z**2, 1, 1),
    "slice_scatter": lambda z: torch.slice_scatter(torch.outer(z, z), torch.outer(z, z[:2]).exp(), 1, 0, 3, 2),
    "diagonal_scatter": lambda z: torch.diagonal_scatter(torch.outer(z, z), z[1:].exp(), 1),
    "masked_scatter": lambda z: z.masked_scatter(z.detach() > 0, z**2),
    "index_put, accumulated": lambda z: z.index_put((INDICES,), z[2:] ** 2, accumulate=True),
    "put, accumulated": lambda z: z.put(INDICES, z[2:] ** 2, accumulate=True),
    "index_put": lambda z: z.index_put((torch.tensor([0, 2, 3]),), z[2:] ** 2),
    "scatter_reduce": lambda z: z.scatter_reduce(0, INDICES, z[2:] ** 2, "prod"),
    "index_reduce": lambda z: z.index_reduce(0, INDICES, z[2:] ** 2, "mean"),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # that it is new
@pytest.mark.parametrize("name", KIN)
def test_their_kin_are_right(name: str) -> None:
    f = KIN[name]
    jacobian, expected = hodiff.jacobian(f, X), first_difference(lambda t: f(X + t * V), step=1e-3)
    assert relative_error(jacobian @ V, expected) < 1e-7


def test_equal_entries_count_for_the_same() -> None:
    """Beside numbers in which they are lost."""
    low, part = torch.finfo(D).min, torch.full((5, 5), 0.2, dtype=D)
    eye = torch.eye(5, dtype=D)
    torch.testing.assert_close(hodiff.jacobian(lambda z: (z + low).softmax(0), X), (eye - part) / 5)
    torch.testing.assert_close(hodiff.jacobian(lambda z: (z + low).log_softmax(0), X), eye - part)
    torch.testing.assert_close(
        hodiff.grad(lambda z: torch.logaddexp(z + low, X + low).sum() / low, X) * low, X * 0 + 0.5
    )
    shifted = lambda z: z.amax(0) + (z - z.amax(0, keepdim=True)).logsumexp(0)
    torch.testing.assert_close(hodiff.grad(lambda z: shifted(z + low), X), part[0])
