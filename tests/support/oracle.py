"""A module's loss as a function of one flat vector, differentiated without hodiff.

The oracle owns its copy of the model and writes into it through ``.data``; buffers are put back before each
evaluation, so that every evaluation is of one function.  First derivatives come from a plain ``autograd.grad``
(itself checked against differences of the value), second and third ones from differences of that gradient.
"""

import torch
from torch import Tensor, nn

from tests.support.differences import first_difference, second_difference
from tests.support.modules import Case, Setting


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters by name, tied ones once under their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flatten(tree: object) -> Tensor:
    """A tensor, or the tensors of a (nested) container in order, as one vector."""
    if isinstance(tree, Tensor):
        return tree.detach().reshape(-1)
    leaves = tree.values() if isinstance(tree, dict) else tree
    parts = [flatten(leaf) for leaf in leaves]  # type: ignore[attr-defined]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def unflatten(vector: Tensor, like: dict[str, Tensor] | Tensor) -> dict[str, Tensor] | Tensor:
    """The inverse of ``flatten`` for a tensor or a dict of tensors."""
    if isinstance(like, Tensor):
        return vector.reshape(like.shape)
    pieces = vector.split([p.numel() for p in like.values()])
    return {name: piece.reshape(p.shape) for (name, p), piece in zip(like.items(), pieces, strict=True)}


class Oracle:
    """Value and plain gradient of a zoo case at any point near its own."""

    def __init__(self, case: Case) -> None:
        self.setting: Setting = (case.oracle or case.build)()
        self.parameters = trainable(self.setting.model)
        self.buffers = [(b, b.detach().clone()) for b in self.setting.model.buffers()]
        self.start = {"inputs": flatten(self.setting.x), "parameters": flatten(self.parameters)}

    def _evaluate(self, shifts: dict[str, Tensor], differentiate: str | None) -> Tensor:
        for buffer, value in self.buffers:
            buffer.data.copy_(value)
        zero = {where: start + shifts.get(where, 0.0) for where, start in self.start.items()}
        x = zero["inputs"].reshape(self.setting.x.shape).requires_grad_(differentiate == "inputs")
        for p, value in zip(
            self.parameters.values(), unflatten(zero["parameters"], self.parameters).values(), strict=True
        ):
            p.data.copy_(value)
        loss = self.setting.loss(self.setting.model, x)
        if differentiate is None:
            return loss.detach()
        leaves = [x] if differentiate == "inputs" else list(self.parameters.values())
        return flatten(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    def gradient(self, where: str) -> Tensor:
        return self._evaluate({}, where)

    def gradient_along(self, where: str, direction: Tensor) -> Tensor:
        """The gradient's component along ``direction``, from values alone."""
        return first_difference(lambda t: self._evaluate({where: t * direction}, None))

    def hvp(self, where: str, direction: Tensor) -> Tensor:
        """H v from gradients."""
        return first_difference(lambda t: self._evaluate({where: t * direction}, where))

    def third(self, where: str, direction: Tensor) -> Tensor:
        """The parameters' gradient of v' H v, v in ``where``: their gradient, twice differentiated along v."""
        return second_difference(lambda t: self._evaluate({where: t * direction}, "parameters"))
