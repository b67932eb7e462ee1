"""Passes for several vectors that are differentiated again, through norms whose weights are in the point.

The batching rule of the norms' backward takes the statistics for constants in the gradient by a weight, so that the
second derivative of a batched pass is silently wrong in PyTorch. The oracle are central differences.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff._core import _reverse
from tests.support.differences import directional_derivative, relative_error

D = torch.float64
P = torch.linspace(-1, 1.4, 14, dtype=D).sin() + torch.linspace(0.3, 5, 14, dtype=D).cos()
STEP = torch.linspace(0.2, 3, 14, dtype=D).cos()
U = torch.linspace(-2, 5, 16, dtype=D).sin().reshape(2, 8)
V = torch.linspace(-1, 6, 28, dtype=D).sin().reshape(2, 14)
Function = Callable[[Tensor], Tensor]


def parts(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is normed, weights and biases."""
    return p[:8], p[8:10], p[10:12]


def layer(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return F.layer_norm(x.reshape(4, 2), (2,), w, b, 0.5).reshape(-1)


def layer_of_a_function(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return (F.layer_norm(x.reshape(4, 2), (2,), (x[:2] * w).sin(), None, 0.5) + b).reshape(-1)


def batch(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return F.batch_norm(x.reshape(4, 2), None, None, w, b, True, 0.1, 0.5).reshape(-1)


def batch_in_evaluation(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return F.batch_norm(x.reshape(4, 2), x.new_ones(2), x.new_ones(2), w, b, False, 0.1, 0.5).reshape(-1)


def instance(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return F.instance_norm(x.reshape(1, 2, 4), None, None, w, b, eps=0.5).reshape(-1)


def group(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return F.group_norm(x.reshape(1, 2, 4), 1, w, b, 0.5).reshape(-1)


def root_mean_square(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return (F.rms_norm(x.reshape(4, 2), (2,), w, 0.5) + b).reshape(-1)


NORMS = (layer, layer_of_a_function, batch, batch_in_evaluation, instance, group, root_mean_square)


def number(f: Function) -> Function:
    return lambda p: f(p).sin().sum()


def square(f: Function) -> Function:
    """As many outputs as inputs."""
    return lambda p: torch.cat([f(p), f(p)[:6]])


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def of_tensors(run: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor form, which has no other graph than the caller's."""
    return lambda f, p, **options: run(f(p), p, **options) if p.requires_grad else run(f, p)


WHOLE = {"batch_ndim": 0}
NAMES: dict[str, Callable[..., Any]] = {
    "jacobian": lambda f, p, **o: hodiff.jacobian(f, p, **o),
    "jacobian, chunks": lambda f, p, **o: hodiff.jacobian(f, p, chunk_size=3, **o),
    "jacobian, a tensor": of_tensors(hodiff.jacobian),
    "vjp": lambda f, p, **o: hodiff.vjp(f, p, U, **o),
    "jvp": lambda f, p, **o: hodiff.jvp(f, p, V, **o),
    "per_sample_grad": lambda f, p, **o: hodiff.per_sample_grad(lambda q, _: f(q), p, torch.zeros(8), **o),
    "gram": lambda f, p, **o: hodiff.gram(lambda q, _: f(q), p, torch.zeros(8), **o),
    "hvp": lambda f, p, **o: hodiff.hvp(number(f), p, V, **o),
    "hessian": lambda f, p, **o: hodiff.hessian(number(f), p, **o),
    "hessian_diagonal": lambda f, p, **o: hodiff.hessian_diagonal(number(f), p, **o),
    "cross_hessian": lambda f, p, **o: hodiff.cross_hessian(lambda a, b: number(f)(a * b), p, p.sin(), **o),
    "sparse_jacobian": lambda f, p, **o: hodiff.sparse_jacobian(
        f, p, pattern=torch.ones(8, 14).to_sparse(), **o
    ).to_dense(),
    "sparse_hessian": lambda f, p, **o: hodiff.sparse_hessian(
        number(f), p, pattern=torch.ones(14, 14).to_sparse(), **o
    ).to_dense(),
    "jacobian_penalty": lambda f, p, **o: hodiff.jacobian_penalty(f, p, samples=2, generator=generator(), **WHOLE, **o),
    "jacobian_penalty, all": lambda f, p, **o: hodiff.jacobian_penalty(f, p, samples=None, **WHOLE, **o),
    "sliced_score_matching_loss": lambda f, p, **o: hodiff.sliced_score_matching_loss(
        square(f), p, samples=2, generator=generator(), **WHOLE, **o
    ),
    "laplacian": lambda f, p, **o: hodiff.laplacian(f, p, method="reverse", **WHOLE, **o),
    "divergence": lambda f, p, **o: hodiff.divergence(square(f), p, method="reverse", **WHOLE, **o),
    "an operator's trace": lambda f, p, **o: (
        hodiff.trace(
            hodiff.HessianOperator(number(f), p), vectors=V.T, **({"create_graph": True} if p.requires_grad else o)
        ).value
    ),
}


@pytest.mark.filterwarnings("ignore")  # of vmap without rules, of what is detached
@pytest.mark.parametrize("f", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_next_derivative(name: str, f: Function) -> None:
    def size(p: Tensor, **options: Any) -> Tensor:
        return (NAMES[name](f, p, **options) / 4).sin().sum()

    with torch.no_grad():
        expected = directional_derivative(size, P, STEP, 2e-3)
    p = P.clone().requires_grad_()
    recorded = torch.autograd.grad(size(p, create_graph=True), p)[0] @ STEP
    assert relative_error(recorded, expected) < 1e-6
    assert relative_error(hodiff.grad(size, P) @ STEP, expected) < 1e-6


def test_of_a_model() -> None:
    """The Gram matrix of gradients sample by sample (a neural tangent kernel), as a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = P[:8].reshape(4, 2)

    def loss() -> Tensor:
        rows = hodiff.per_sample_grad(lambda m, z: m(z)[:, 0], model, x, create_graph=True)
        flat = torch.cat([row.reshape(4, -1) for row in rows.values()], 1)
        return (flat @ flat.T).square().sum()

    weights = list(model.parameters())
    found = torch.nn.utils.parameters_to_vector(torch.autograd.grad(loss(), weights))
    start = torch.nn.utils.parameters_to_vector(weights).detach()
    direction = torch.arange(len(start), dtype=D).cos()

    def at(vector: Tensor) -> Tensor:
        torch.nn.utils.vector_to_parameters(vector, weights)
        return loss()

    assert relative_error(found @ direction, directional_derivative(at, start, direction, 2e-3)) < 1e-6


@pytest.mark.parametrize(("weights", "batches"), [(False, 1), (True, 0)])
def test_batched_where_no_weight_is_in_the_point(monkeypatch: pytest.MonkeyPatch, weights: bool, batches: int) -> None:
    seen: list[int] = []
    theirs = _reverse.batched
    monkeypatch.setattr(_reverse, "batched", lambda *args: seen.append(1) or theirs(*args))

    def size(w: Tensor) -> Tensor:
        f = lambda where: F.layer_norm(where[0].reshape(4, 2), (2,), where[1] if weights else w, None, 0.5)
        return sum(part.sin().sum() for part in hodiff.jacobian(f, (P[:8], w if weights else P[8:10]), **options))

    options = {"create_graph": True, "strict": False}
    w = P[8:10].clone().requires_grad_()
    found = torch.autograd.grad(size(w), w)[0] @ STEP[:2]
    assert len(seen) == batches
    assert relative_error(found, directional_derivative(size, w.detach(), STEP[:2], 2e-3)) < 1e-6


BY_HAND: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "torch.func.jacrev": lambda f, p: torch.func.jacrev(f)(p),  # type: ignore[dict-item,return-value]
    "vmap of torch.func.grad": lambda f, p: torch.vmap(lambda u: torch.func.grad(lambda q: f(q) @ u)(p))(U),
    "vmap of torch.autograd.grad": lambda f, p: _rows(f, p),
    "is_grads_batched": lambda f, p: torch.autograd.grad(f(p), p, U, create_graph=True, is_grads_batched=True)[0],
}


def _rows(f: Function, p: Tensor) -> Tensor:
    y = f(p)
    return torch.vmap(lambda u: torch.autograd.grad(y, p, u, create_graph=True)[0])(U)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("f", [f for f in NORMS if f is not group])  # which `is_grads_batched` cannot pass
def test_a_batched_pass_of_fs_own(f: Function, way: str) -> None:
    size = lambda p: (BY_HAND[way](f, p) / 4).sin().sum()
    expected = directional_derivative(lambda p: size(p.requires_grad_()), P, STEP, 2e-3)
    assert relative_error(hodiff.grad(size, P) @ STEP, expected) < 1e-6


def native_layer(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return torch.native_layer_norm(x.reshape(4, 2), (2,), w, b, 0.5)[0].reshape(-1)


def of_aten(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return torch.ops.aten.native_layer_norm(x.reshape(4, 2), (2,), w, b, 0.5)[0].reshape(-1)


def native_batch(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return torch.native_batch_norm(x.reshape(4, 2), w, b, None, None, True, 0.1, 0.5)[0].reshape(-1)


def without_statistics(p: Tensor) -> Tensor:
    x, w, b = parts(p)
    return torch.ops.aten._native_batch_norm_legit.no_stats(x.reshape(4, 2), w, b, True, 0.1, 0.5)[0].reshape(-1)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("way", BY_HAND)
@pytest.mark.parametrize("f", [native_layer, of_aten, native_batch, without_statistics])
def test_a_batched_pass_of_fs_own_through_a_kernel_is_refused_where_it_is_wrong(f: Function, way: str) -> None:
    size = lambda p: (BY_HAND[way](f, p) / 4).sin().sum()
    expected = directional_derivative(lambda p: size(p.requires_grad_()), P, STEP, 2e-3)
    if way == "is_grads_batched":
        assert relative_error(hodiff.grad(size, P) @ STEP, expected) < 1e-6
    else:
        with pytest.raises(hodiff.GraphError, match=r"batched pass .* kernel of a norm.* weights.*F\.layer_norm"):
            hodiff.grad(size, P)


def test_a_batched_pass_by_what_is_normed_alone_is_right() -> None:
    w = P[8:10]

    def size(x: Tensor) -> Tensor:
        f: Function = lambda x: torch.native_layer_norm(x.reshape(4, 2), (2,), w, w.sin(), 0.5)[0].reshape(-1)
        return (torch.func.jacrev(f)(x) / 4).sin().sum()  # type: ignore[operator,arg-type]

    expected = directional_derivative(size, P[:8], STEP[:8], 2e-3)
    assert relative_error(hodiff.grad(size, P[:8]) @ STEP[:8], expected) < 1e-6
