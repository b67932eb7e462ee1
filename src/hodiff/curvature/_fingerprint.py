"""A fingerprint of tensors' values: it sees what `Tensor._version` does not, `p.data.mul_(2)` or changes through NumPy.

Of a small tensor it is the bits of all entries; of a large one those of some entries, spread evenly, and the sum of
all bits as integers: exact, the same with any number of threads, and one that NaN does not confuse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SMALL = 1024
"""Up to so many entries all of them are compared."""
_SAMPLED = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """The values of some tensors as they were; `changed` looks again, through views made once.

    Reading all entries costs about what copying the tensors would, less than any product with a vector.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._entries: list[Tensor] = []
        self._summed: list[Tensor] = []
        self._owners: list[int] = []  # of each entry, then of each sum
        summed: list[int] = []
        for number, tensor in enumerate(tensors):
            bits = _bits(tensor)
            if bits is None:
                continue
            large = bits.numel() > SMALL
            entries = bits[:: bits.numel() // _SAMPLED] if large else bits
            self._entries.append(entries)
            self._owners += [number] * len(entries)
            if large:
                self._summed.append(bits)
                summed.append(number)
        self._owners += summed
        self._before = self._now()

    def _now(self) -> Tensor:
        # In their own width, where the sum wraps around: a wider one is thirty times slower.
        sums = [bits.sum(dtype=bits.dtype).reshape(1) for bits in self._summed]
        return torch.cat(self._entries + sums) if self._entries else torch.empty(0, device="cpu")

    def changed(self) -> list[int]:
        """The numbers of the tensors whose values differ from those that were."""
        now = self._now()
        if torch.equal(now, self._before):
            return []
        differing = (now != self._before).nonzero().flatten().tolist()
        return sorted({self._owners[place] for place in differing})


def _bits(tensor: Tensor) -> Tensor | None:
    """The memory of a tensor as a line of integers, a view; None where there is none, as of a negated view."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel() or tensor.is_neg():
        return None
    bits = tensor.detach().view(_INTEGERS[tensor.element_size()])
    if bits.is_contiguous():
        return bits.view(-1)
    order = sorted(range(bits.ndim), key=bits.stride, reverse=True)  # a transposed, or channels-last one
    turned = bits.permute(order)
    return turned.reshape(-1) if turned.is_contiguous() else None
