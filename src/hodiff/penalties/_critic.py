"""A user's critic as one number per sample, and the test that samples are independent."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _checks, _reverse, _tree
from hodiff._core._call import Allowed, call
from hodiff._core._graph import Graph
from hodiff.errors import BatchMixingWarning, InputError
from hodiff.penalties import _norm
from hodiff.penalties._loss import check_critic, check_number


class Critic(NamedTuple):
    """A user's critic, made to return one number per sample, and its outputs beside."""

    f: Any
    batch_ndim: int
    patch_reduction: str
    grad_scale: float

    def check(self) -> None:
        """Raise for an option that is not known, and for a wrapper that loses gradients."""
        if self.patch_reduction not in ("sum", "mean"):
            raise InputError(f'patch_reduction: got {self.patch_reduction!r}, expected "sum" or "mean".')
        check_number(self.grad_scale, "grad_scale", least=0)
        if not self.grad_scale:
            raise InputError("grad_scale: is 0, expected a positive number.")
        check_critic(self.f)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """One number per sample, and the outputs as `f` gave them."""
        outputs = self.f(x, *args, **kwargs)
        return self.per_sample(outputs, self.batch_of(x)), outputs

    def batch_of(self, x: Any) -> torch.Size:
        """The shape of the batch; empty for `batch_ndim=0`."""
        return _tree.flatten(x)[0][0].shape[: self.batch_ndim] if self.batch_ndim else torch.Size(())

    def per_sample(self, outputs: Any, batch: torch.Size) -> Tensor:
        """One number per sample; an output without the batch in front is left for the check that names it."""
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"f: returned a {type(outputs).__name__}, expected the tensor of a critic's outputs, one per sample; "
                f"choose it: lambda x: critic(x)[0]."
            )
        scalars = outputs
        if batch and outputs.shape[: len(batch)] == batch and outputs.numel() != batch.numel():
            rows = _norm.wide(outputs).flatten(len(batch))
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


def check_independence(critic: Critic, x: Any, args: Any, kwargs: Any, allow: Allowed) -> None:
    """Compare the gradient of the sum with that of a sum of random signs: equal, up to sign, for independent samples.

    The output of sample i then has no derivative by another sample's input, so both give its own gradient. The signs
    come from a generator of their own, half of them each, so that a small batch has both.
    """
    if not critic.batch_ndim or isinstance(critic.f, Tensor):
        raise InputError("check_independence: needs a function of samples (batch_ndim of at least 1).")
    # Without batch_ndim here: the comparison says more than the warning about BatchNorm.
    with Graph(
        call(critic, x, passes=1, create_graph=False, has_aux=True, allow=allow, args=args, kwargs=kwargs)
    ) as ev:
        [output] = ev.tensors()
        order = torch.randperm(output.numel(), generator=torch.Generator().manual_seed(0))
        signs = (1 - 2 * (order % 2)).to(output).reshape(output.shape)
        pair = torch.stack([torch.ones_like(output), signs])
        chunks = _reverse.pull_many(ev, [output], lambda start, stop: [pair[start:stop]], 2, chunk_size=1)
        found = _reverse.stacked(ev, chunks, 2, ev.leaves)
    error = size = 0.0
    for both in found:
        plain, signed = both.flatten(critic.batch_ndim + 1).flatten(1, critic.batch_ndim) if both.ndim else both
        error = max(error, float((plain * signs.reshape(-1, 1) - signed).abs().max()))
        size = max(size, float(plain.abs().max()))
    if error > 1e-3 * size:
        warnings.warn(
            f"the samples of f are not independent: the gradient of one sample's output by another's input is up to "
            f"{error / size:.2g} times the largest entry of the gradients. The penalty is then not one of each "
            f"sample's own gradient. Usual causes: BatchNorm in training mode, minibatch statistics.",
            BatchMixingWarning,
            stacklevel=_checks.outside(),
        )
