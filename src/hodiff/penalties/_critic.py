"""A user's critic as one number per sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _tree
from hodiff._core._checks import check_real_tensor
from hodiff._core._options import PatchReduction, check_option
from hodiff.errors import InputError
from hodiff.penalties import _norm
from hodiff.penalties._loss import check_critic, check_number


class Critic(NamedTuple):
    """A user's critic, made to return one number per sample, and its outputs beside.

    Where it may give `maps` of outputs, `(N, 1, H, W)`, those of a sample are reduced to one.
    """

    f: Any
    batch_ndim: int
    patch_reduction: PatchReduction
    grad_scale: float
    maps: bool = True

    @property
    def __wrapped__(self) -> Any:
        """The critic itself, whose signature is asked for where a call of it fails."""
        return self.f

    def check(self) -> None:
        """Raise for an option that is not known, and for a wrapper that loses gradients."""
        check_option(self.patch_reduction, PatchReduction, "patch_reduction")
        check_number(self.grad_scale, "grad_scale", least=0)
        if not self.grad_scale:
            raise InputError("grad_scale: is 0, expected a positive number.")
        if isinstance(self.f, Tensor):
            check_real_tensor(self.f, "f")
        check_critic(self.f)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One number per sample, and the outputs as `f` gave them."""
        outputs = self.f(x, *args, **kwargs)
        return self.per_sample(outputs, self.batch_of(x)), outputs

    def batch_of(self, x: Any) -> torch.Size:
        """The shape of the batch; empty for `batch_ndim=0`."""
        if not self.batch_ndim:
            return torch.Size(())
        return (x if isinstance(x, Tensor) else _tree.flatten(x)[0][0]).shape[: self.batch_ndim]

    def per_sample(self, outputs: Any, batch: torch.Size) -> Tensor:
        """One number per sample; what is none, and no map of one channel, is left for the check that names it."""
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"f: returned a {type(outputs).__name__}, expected the tensor of a critic's outputs, one per sample; "
                f"choose it: lambda x: critic(x)[0]."
            )
        scalars = outputs
        several = batch and outputs.numel() != batch.numel()
        if several and self.maps and outputs.shape[: self.batch_ndim + 1] == (*batch, 1):
            rows = _norm.wide(outputs).flatten(self.batch_ndim)
            scalars = rows.sum(-1) if self.patch_reduction == "sum" else rows.mean(-1)
        if self.grad_scale == 1:
            return scalars
        largest = torch.finfo(outputs.dtype).max
        if self.grad_scale > largest:
            raise InputError(
                f"grad_scale: {self.grad_scale} is beyond the largest {outputs.dtype} number, {largest}, so the first "
                f"pass would overflow; 4096 is a good value for float16."
            )
        return _norm.wide(scalars) * self.grad_scale

    def unscaled(self, gradient: list[Tensor]) -> list[Tensor]:
        """The gradient without `grad_scale`, divided where it cannot underflow."""
        return gradient if self.grad_scale == 1 else [_norm.wide(leaf) / self.grad_scale for leaf in gradient]
