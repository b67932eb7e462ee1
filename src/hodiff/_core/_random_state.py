"""The state of PyTorch's default generators: kept, put back, compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """The state of the default generators that a function on a device may draw from."""

    device: torch.device
    states: tuple[Tensor, ...]

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        """The state now: the CPU's, and the GPU's where the device is one."""
        cpu = torch.get_rng_state()
        return cls(device, (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,))

    def restore(self) -> None:
        """Put this state back."""
        torch.set_rng_state(self.states[0])
        if len(self.states) > 1:
            torch.cuda.set_rng_state(self.states[1], self.device)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        return any(not torch.equal(a, b) for a, b in zip(self.states, self.of(self.device).states, strict=True))
