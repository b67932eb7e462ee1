"""Promise 3: a differentiable result is differentiable in everything that required grad and entered.

Each tensor argument of each function in turn, and what `f` closes over, against central differences in float64.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hodiff

D = torch.float64
VALUES = {
    "x": torch.tensor([[0.3, 0.5], [0.7, -0.2]], dtype=D),
    "v": torch.tensor([[1.0, -2.0], [0.5, 0.3]], dtype=D),
    "w": torch.tensor(0.3, dtype=D),
    "C": torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=D),
    "b": torch.tensor([0.5, 2.0], dtype=D),
    "c": torch.tensor(0.7, dtype=D),
}
GRAPH: dict[str, Any] = {"create_graph": True}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def one(w: Any) -> Callable[[Tensor], Tensor]:
    """One number for each sample, of which no derivative up to the fourth is zero."""
    return lambda z: (w * z**3).sum(-1) * z[..., 0].sin()


def two(w: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: w * torch.stack([z[..., 0] ** 2 * z[..., 1], z[..., 1] ** 3], -1)


def loss(w: Any) -> Callable[[Tensor], Tensor]:
    return lambda z: one(w)(z).sum()


def pair(x: Tensor, y: Tensor) -> Tensor:
    return (x**2 * y**3).sum()


CALLS: dict[str, Callable[..., Any]] = {
    "grad": lambda x, w: hodiff.grad(loss(w), x, **GRAPH),
    "value_and_grad": lambda x, w: hodiff.value_and_grad(loss(w), x, **GRAPH),
    "value_and_grad, has_aux": lambda x, w: hodiff.value_and_grad(
        lambda z: (loss(w)(z), w * z), x, has_aux=True, **GRAPH
    ),
    "grad, has_aux": lambda x, w: hodiff.grad(lambda z: (loss(w)(z), w * z), x, has_aux=True, **GRAPH),
    "hessian, has_aux": lambda x, w: hodiff.hessian(lambda z: (loss(w)(z), w * z), x, has_aux=True, **GRAPH),
    "hessian_diagonal, has_aux": lambda x, w: hodiff.hessian_diagonal(
        lambda z: (loss(w)(z), w * z), x, has_aux=True, **GRAPH
    ),
    "hvp, has_aux": lambda x, w, v: hodiff.hvp(lambda z: (loss(w)(z), w * z), x, v, has_aux=True, **GRAPH),
    "vjp": lambda x, w, v: hodiff.vjp(two(w), x, v, **GRAPH),
    "jvp": lambda x, w, v: hodiff.jvp(two(w), x, v, **GRAPH),
    "jacobian": lambda x, w: hodiff.jacobian(two(w), x, **GRAPH),
    "hessian": lambda x, w: hodiff.hessian(loss(w), x, **GRAPH),
    "value_grad_and_hessian": lambda x, w: hodiff.value_grad_and_hessian(loss(w), x, **GRAPH),
    "hvp": lambda x, w, v: hodiff.hvp(loss(w), x, v, **GRAPH),
    "hvp, several": lambda x, w, v: hodiff.hvp(loss(w), x, torch.stack([v, v**2]), **GRAPH),
    "hessian_diagonal": lambda x, w: hodiff.hessian_diagonal(loss(w), x, **GRAPH),
    "cross_hessian": lambda x, v: hodiff.cross_hessian(pair, x, v, **GRAPH),
    "cross_hvp": lambda x, v: hodiff.cross_hvp(pair, x, v + 1, v, **GRAPH),
    "nth_derivative": lambda x, w: hodiff.nth_derivative(lambda z: (w * z).sin(), x, 2, **GRAPH),
    "derivatives": lambda x, w: hodiff.derivatives(lambda z: (w * z).sin(), x, 2, **GRAPH),
    "per_sample_grad": lambda w, v: hodiff.per_sample_grad(lambda w, b: (w**2 * b**3).sum(-1), w, v, **GRAPH),
    "gram": lambda w, v: hodiff.gram(lambda w, b: (w**2 * b**3).sum(-1), w, v, **GRAPH),
    "multi_grad": lambda x, w: hodiff.multi_grad([loss(w), loss(2)], x, **GRAPH),
    "multi_grad, shared": lambda x, w: hodiff.multi_grad(
        [lambda z, h: (w * h).sum(), lambda z, h: (h**3).sum()], x, shared=lambda z: w * z**2, **GRAPH
    ),
    "sparse_hessian": lambda x, w: hodiff.sparse_hessian(lambda z: (w * z**3).sum(), x, **GRAPH).to_dense(),
    "sparse_jacobian": lambda x, w: hodiff.sparse_jacobian(lambda z: (w * z**3).flatten(), x, **GRAPH).to_dense(),
    "trace": lambda x, w, v: hodiff.trace(hodiff.HessianOperator(loss(w), x * 1), vectors=v[None], **GRAPH).value,
    "eigsh": lambda x, w: hodiff.eigsh(hodiff.HessianOperator(loss(w), x * 1), 1, rtol=1e-13, **GRAPH).value,
    "laplacian": lambda x, w, b: hodiff.laplacian(one(w), x, weight=b),
    "laplacian, reverse": lambda x, w, b: hodiff.laplacian(one(w), x, weight=b, method="reverse"),
    "laplacian, vectors": lambda x, w, v: hodiff.laplacian(one(w), x, vectors=v),
    "value_grad_and_laplacian": lambda x, w, b: hodiff.value_grad_and_laplacian(one(w), x, weight=b),
    "second_order_operator": lambda x, w, C, b, c: hodiff.second_order_operator(one(w), x, C, b, c),
    "biharmonic": lambda x, w: hodiff.biharmonic(one(w), x),
    "partial": lambda x, w: hodiff.partial(one(w), x, (0, 1)),
    "partials": lambda x, w: hodiff.partials(one(w), x, [(0, 1), (0,)]),
    "divergence": lambda x, w: hodiff.divergence(two(w), x),
    "divergence, vectors": lambda x, w, v: hodiff.divergence(two(w), x, vectors=v[None]),
    "value_and_divergence": lambda x, w: hodiff.value_and_divergence(two(w), x),
    "curl": lambda x, w: hodiff.curl(two(w), x),
    "jet": lambda x, w, v: hodiff.jet(two(w), x, [v, v**2]),
    "gradient_penalty": lambda x, w, b: hodiff.gradient_penalty(one(w), x, target=b),
    "wgan_gp_penalty": lambda x, w, v: hodiff.wgan_gp_penalty(one(w), x, v, generator=seeded(), detach=False),
    "dragan_penalty": lambda x, w: hodiff.dragan_penalty(one(w), x, generator=seeded(), detach=False),
    "r1_penalty": lambda x, w: hodiff.r1_penalty(one(w), x, detach=False),
    "r2_penalty": lambda x, w: hodiff.r2_penalty(one(w), x, detach=False),
    "eikonal_penalty": lambda x, w: hodiff.eikonal_penalty(one(w), x),
    "gradient_norm_penalty": lambda x, w: hodiff.gradient_norm_penalty(loss(w), x),
    "jacobian_penalty": lambda x, w, v: hodiff.jacobian_penalty(two(w), x, vectors=v[None]),
    "hessian_penalty": lambda x, w, v: hodiff.hessian_penalty(one(w), x, vectors=torch.stack([v, v.flip(0)])),
    "curvature_penalty": lambda x, w: hodiff.curvature_penalty(one(w), x),
    "sliced_score_matching_loss": lambda x, w, v: hodiff.sliced_score_matching_loss(two(w), x, vectors=v[None]),
    "sliced_score_matching_loss, log": lambda x, w, v: hodiff.sliced_score_matching_loss(
        one(w), x, vectors=v[None], log_density=True
    ),
}
"""By the names of the tensors that enter, `w` by what `f` closes over."""
DETACHED = {"solve", "diagonal", "logdet", "spectral_density"}
"""Of these a differentiable result is refused (see test_detached)."""


@pytest.mark.names
def test_every_function_with_a_differentiable_result_is_here() -> None:
    taken = {
        name
        for name in hodiff.__all__
        if inspect.isfunction(getattr(hodiff, name))
        and "create_graph" in inspect.signature(getattr(hodiff, name)).parameters
    }
    rows = {name.partition(",")[0] for name in CALLS} | DETACHED
    assert taken == rows, "say in CALLS how each is called, by the names of what enters"


CELLS = [(name, entering) for name, call in CALLS.items() for entering in inspect.signature(call).parameters]


def total(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        return found.sin().sum()  # a mean of the results would hide what adds up to nothing
    return torch.stack([total(part) for part in found]).sum()


@pytest.mark.table(wide=40)
@pytest.mark.filterwarnings("ignore:no trainable tensor")  # a vector or target is not reached from the gradient
@pytest.mark.parametrize(("name", "entering"), CELLS, ids=str)
def test_the_result_is_differentiable_in_what_entered(name: str, entering: str) -> None:
    call = CALLS[name]
    given = {key: VALUES[key] for key in inspect.signature(call).parameters}
    live = given[entering].clone().requires_grad_()
    (got,) = torch.autograd.grad(total(call(**{**given, entering: live})), live)
    directions = torch.randn(2, *live.shape, dtype=D, generator=seeded())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for direction in directions:
            step = 1e-5 * direction
            ahead, behind = (float(total(call(**{**given, entering: given[entering] + s}))) for s in (step, -step))
            assert float((got * direction).sum()) == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-5)
