"""StyleGAN2's path length regularization: the one penalty with a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _locks, _reverse, _settings
from hodiff._core._arguments import Allowed, check_option, is_set
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.penalties import _critic
from hodiff.penalties._critic import Reduction
from hodiff.penalties._gradient import Function


class PathLengthPenalty(nn.Module):
    r"""Path length regularization, w · meanᵢ (ℓᵢ - a)², with a running mean a of the lengths ℓᵢ.

    \(\ell_i = \lVert J_i^\top y_i\rVert\) with \(y \sim N(0, I) / \sqrt{HW}\): a step in latent
    space should change the image by the same amount everywhere. For latents `(N, L, D)` of L
    layers, the square is averaged over the layers.

    Each call in training mode updates the mean, \(a \leftarrow (1 - d)\,a + d\,\mathrm{mean}_i
    \ell_i\), which is saved in the state dict. As in StyleGAN2, the derivative includes the current
    call's contribution to the mean. A call whose lengths are not finite leaves the saved mean as it was.

    Args:
        weight: \(w\), 2 in StyleGAN2. For a lazy penalty every k steps, pass k times the value.
        decay: \(d\), 0.01 in StyleGAN2.

    Attributes:
        mean_length: The running mean, a buffer.
        lengths: The path lengths of the last call, `(N,)`, detached, as StyleGAN2 logs them; None
            before the first.

    Shapes:
        Called with a generator and latents `(N, D)` or `(N, L, D)`; images `(N, C, *size)`; the
        penalty is a scalar.

    Cost:
        One evaluation of the generator and one reverse pass, and a second in the loss's backward.

    Examples:
        Images that are three times the latents: all paths are 3 |y| long, and |y| is about the root
        of its dimension.

        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> penalty = hodiff.PathLengthPenalty(decay=1.0)
        >>> scale = torch.tensor(3.0, requires_grad=True)
        >>> latents = torch.randn(4, 10_000)
        >>> value = penalty(lambda w: scale * w[:, :, None, None], latents)
        >>> round(penalty.mean_length.item() / 100, 1)
        3.0

    Reference:
        Karras, T. et al. (2020). Analyzing and improving the image quality of StyleGAN.
        arXiv:1912.04958, appendix B. Other code: labml leaves out the factor of the lazy interval;
        NVIDIA's has NaN at a zero gradient.
    """

    mean_length: Tensor
    lengths: Tensor | None

    def __init__(self, weight: float = 2.0, decay: float = 0.01) -> None:
        super().__init__()
        _arguments.check_number(weight, "weight", least=0)
        _arguments.check_number(decay, "decay", least=0)
        if decay > 1:
            raise InputError(f"decay: got {decay!r}, expected a number between 0 and 1.")
        self.weight = weight
        self.decay = decay
        self.register_buffer("mean_length", torch.zeros(()))
        self.lengths = None

    def forward(
        self,
        f: Function,
        w: Tensor,
        *,
        vectors: Tensor | None = None,
        reduction: Reduction = "mean",
        create_graph: bool | None = None,
        return_outputs: bool = False,
        allow: Allowed = (),
        generator: torch.Generator | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        r"""The penalty at some latents, differentiable by the generator and, where they require grad, the latents.

        Args:
            f: The synthesis network, a function of *w* with images `(N, C, *size)`.
            w: Latents, `(N, D)` or `(N, L, D)`.
            vectors: The caller's own noise like the images, of which y is the \(1/\sqrt{HW}\)-th
                part; then nothing is drawn.
            reduction: `"mean"` or `"sum"` over the samples, or `"none"` for one value each.
            create_graph: Whether the penalty can be differentiated. None: if grad mode is on.
            return_outputs: Whether to return the images too, from the same evaluation.
            allow: `autograd.Function`s to accept in a second derivative, as they are.
            generator: What y is drawn from; None: the device's default generator.
            args: Further positional arguments for `f`.
            kwargs: Keyword arguments for `f`.

        Returns:
            A scalar tensor, or shape `(N,)` with `reduction="none"`; with *return_outputs*
            `(penalty, images)`.
        """
        check_option(reduction, Reduction, "reduction")
        return_outputs = is_set(return_outputs, "return_outputs")
        _arguments.check_real_tensor(w, "w")
        if w.ndim not in (2, 3) or not w.shape[0]:
            raise InputError(f"w has shape {tuple(w.shape)}, expected latents (N, D) or (N, L, D).")
        _critic.check_function(f)
        record = _call.loss_recorded(create_graph)
        with _critic.evaluation(
            f, w, passes=1, batch_ndim=1, record=record, allow=allow, args=args, kwargs=kwargs
        ) as graph:
            images = _arguments.check_output(graph.outputs)
            if images.ndim < 2 or images.shape[0] != w.shape[0]:
                raise InputError(f"f returned shape {tuple(images.shape)}, expected images ({w.shape[0]}, C, ...).")
            with _settings.grad_mode(False):
                [noise] = _critic.vectors_like(Where(images.detach(), "f(w)"), vectors, 1, "gaussian", generator)
                if noise.shape[0] != 1:
                    raise InputError(f"vectors: got {noise.shape[0]} vectors like the images, expected one.")
                noise = noise[0] / images.shape[2:].numel() ** 0.5
            outputs = graph.value()
            gradient = _reverse.vjp(graph, [images], [noise])
        with _critic.recording(record):
            layers = w.shape[1] if w.ndim == 3 else 1
            lengths = _critic.norm(gradient, 1) / layers**0.5
            self.lengths = lengths.detach()
            with _locks.lock:  # of several threads each moves what another has left
                mean = self.mean_length.to(lengths)
                if self.training:
                    moved = mean.lerp(lengths.mean(), self.decay)
                    with _settings.grad_mode(False):
                        self.mean_length.copy_(torch.where(moved.isfinite(), moved, mean))  # or it would stay nan
                    mean = moved
            loss = _critic.reduce((lengths - mean).square(), reduction, self.weight)
            loss = _critic.finished(loss, f, images, gradient, record)
        return (loss, outputs) if return_outputs else loss

    def extra_repr(self) -> str:
        """The settings, for `repr`."""
        return f"weight={self.weight}, decay={self.decay}"
