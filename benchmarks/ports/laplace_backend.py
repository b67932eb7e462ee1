"""laplace-torch 0.3: `Laplace(model, ..., backend=HodiffGGN)`."""

from typing import Any

import torch
from laplace.curvature import GGNInterface
from torch import Tensor

import hodiff


def flat(tree: dict[str, Tensor], batch_ndim: int = 0) -> Tensor:
    return torch.cat([part.flatten(batch_ndim) for part in tree.values()], batch_ndim)


class HodiffGGN(GGNInterface):
    """Rows by one forward and a few batched passes, the diagonal without them."""

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        rows = hodiff.per_sample_grad(
            lambda model, x: model(x), self.model, x, create_graph=enable_backprop
        )
        f, Js = self.model(x), flat(rows, 2)
        if self.subnetwork_indices is not None:
            Js = Js[:, :, self.subnetwork_indices]
        return (Js, f) if enable_backprop else (Js, f.detach())

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        each = lambda model, b: torch.vmap(self.lossfunc)(model(b[0]), b[1])  # noqa: E731
        Gs = flat(hodiff.per_sample_grad(each, self.model, (x, y)), 1)
        if self.subnetwork_indices is not None:
            Gs = Gs[:, self.subnetwork_indices]
        return Gs, self.lossfunc(self.model(x), y)

    def operator(self, x: Any, y: Tensor) -> hodiff.GaussNewtonOperator:
        return hodiff.GaussNewtonOperator(
            lambda model, b: model(b[0]), self.lossfunc, self.model, data=[(x, y)], reduction="sum"
        )

    def full(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.stochastic or self.last_layer or self.subnetwork_indices is not None:
            return super().full(x, y, **kwargs)
        G = self.operator(x, y)
        return self.factor * torch.as_tensor(G.value), self.factor * G.dense()

    def diag(self, x: Any, y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.stochastic or self.last_layer or self.subnetwork_indices is not None:
            return super().diag(x, y, **kwargs)
        G = self.operator(x, y)
        diagonal = flat(hodiff.diagonal(G, method="exact").value)
        return self.factor * torch.as_tensor(G.value), self.factor * diagonal
