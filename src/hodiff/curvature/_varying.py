"""What the modules of a point compute with besides parameters: it may vary between passes, and between processes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor, nn

from hodiff._core import _checks
from hodiff._core._where import Where
from hodiff.errors import HodiffWarning, RandomnessWarning


def warn_random(where: Where) -> None:
    """Say that a function was seen to draw."""
    warnings.warn(
        f"the function draws random numbers, so this is the operator of one draw, held fixed until H.refresh()."
        f"{culprits(where)} For the deterministic one use model.eval().",
        RandomnessWarning,
        stacklevel=_checks.outside(),
    )


def culprits(where: Where) -> str:
    """The modules that are known to draw random numbers, or to mix samples, in training mode."""
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for owned in where.owned
        for name, module in owned.module.named_modules()
        if module.training and _varies(module)
    ]
    return f" In training mode: {', '.join(found[:4])}." if found else ""


def _varies(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return True
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    return isinstance(rate, float) and rate > 0


def buffers_of(where: Where) -> list[Tensor]:
    """The buffers that outputs depend on; running statistics only where they are used."""
    return [
        buffer
        for owned in where.owned
        for module in owned.module.modules()
        if not (module.training and isinstance(module, nn.modules.batchnorm._NormBase))
        for buffer in module.buffers(recurse=False)
        if buffer.dtype.is_floating_point
    ]


def warn_buffers(odd: Sequence[int]) -> None:
    """Say that these ranks have other buffers than rank 0."""
    ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    warnings.warn(
        f"process_group: buffers of {ranks} differ from those of rank 0 (running statistics?), so that their data are "
        f"seen by another model. Broadcast them: torch.distributed.broadcast(b, 0) for each b in model.buffers().",
        HodiffWarning,
        stacklevel=_checks.outside(),
    )
