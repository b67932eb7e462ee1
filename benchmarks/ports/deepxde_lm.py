"""DeepXDE 1.15, PyTorch backend: `model.compile(LevenbergMarquardt(model))`.

DeepXDE's optimizers are told a sum of means; this one takes the residuals behind them.
"""

from typing import Any

import deepxde as dde
import torch
from torch import Tensor, nn

import hodiff


class LevenbergMarquardt(torch.optim.Optimizer):
    """`step` of the residuals of a `PDE` with Dirichlet and initial conditions, at all points."""

    def __init__(self, model: dde.Model, **options: Any) -> None:
        super().__init__(model.net.parameters(), {})
        data, points = model.data, torch.as_tensor(model.data.train_next_batch()[0])
        residuals, self.batches, begin = [self.equations(data, sum(data.num_bcs))], [], 0
        for condition, count in zip(data.bcs, data.num_bcs, strict=True):
            if not isinstance(condition, (dde.icbc.DirichletBC, dde.icbc.IC)):
                raise NotImplementedError(f"{type(condition).__name__}: no residual is known")
            end, zero = begin + count, torch.zeros_like(model.net(points)).detach()
            values = condition.error(data.train_x, points, zero, begin, end)  # less the outputs
            residuals.append(self.condition(condition.component, count))
            self.batches.append((points[begin:end], values[:, 0].detach()))
            begin = end
        self.batches.insert(0, points[begin:])
        self.inner = hodiff.LevenbergMarquardt(residuals, model.net, **options)

    @staticmethod
    def equations(data: Any, known: int) -> Any:
        number = len(data.train_x) - known

        def residual(net: nn.Module, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            found = data.pde(x, net(x))
            dde.grad.clear()
            found = found if isinstance(found, (list, tuple)) else [found]
            return torch.cat(found, 1) / number**0.5

        return residual

    @staticmethod
    def condition(component: int, number: int) -> Any:
        def residual(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return (net(batch[0])[:, component] + batch[1]) / number**0.5

        return residual

    def step(self, closure: Any = None) -> Tensor:
        return self.inner.step(*self.batches)
