"""A checksum of vectors, exact and quick, that also sees entries exchanged: do all processes have the same?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Digest:
    """A sum of the vectors' bits, each word times a random integer of its place, modulo 2^32.

    Integers wrap around, so that it is the same in any order of summation: with any number of threads, on any device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._factors = torch.empty(0, dtype=torch.int32, device=device)

    def __call__(self, parts: Sequence[Tensor], count: int | None = None) -> int:
        """Of the parts of one vector, or of so many stacked ones."""
        rows = 1 if count is None else count
        total, at = torch.zeros(rows, dtype=torch.int32, device=self._device), 0
        words = [_words(part.detach(), rows) for part in parts]
        size = sum(word.shape[1] for word in words)
        factors = self._up_to(max(rows, size))
        if rows * size <= _SMALL:  # of small leaves the calls take longer than the arithmetic
            words = [torch.cat(words, 1)]
        for word in words:
            # The low bits of round numbers are all zero: fold the high ones onto them.
            mixed = (word >> 15).bitwise_xor_(word).mul_(factors[at : at + word.shape[1]])
            total += mixed.sum(1, dtype=torch.int32)
            at += word.shape[1]
        return int((total * factors[:rows]).sum(dtype=torch.int32))

    def _up_to(self, size: int) -> Tensor:
        """Odd random factors; the first ones stay the same."""
        if size > len(self._factors):
            drawn = torch.randint(-(2**30), 2**30, (size,), generator=torch.Generator().manual_seed(0), device="cpu")
            self._factors = (2 * drawn + 1).to(self._device, torch.int32)
        return self._factors


_SMALL = 2**20


def _words(part: Tensor, rows: int) -> Tensor:
    """The bits as rows of integers of 32 bits."""
    line, size = part.reshape(-1), part.element_size()
    if line.stride(0) != 1:  # `.contiguous()` keeps the stride of a single entry, which bars a view of another dtype
        line = line.clone(memory_format=torch.contiguous_format)
    if size >= 4:
        return line.view(torch.int32).view(rows, -1)
    return line.view(torch.int16 if size == 2 else torch.int8).to(torch.int32).view(rows, -1)
