"""What differs between the PyTorch releases that are supported, 2.13 to 2.15: each entry names those it serves."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch
from torch.autograd import forward_ad

RELEASE = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

# 2.13 alone: the pairwise distances have no second derivative. Their nodes carry no marker that says so.
DISTANCES = ("CdistBackwardBackward0", "PdistBackwardBackward0") if RELEASE < (2, 14) else ()

# From 2.14 on, clamp has slope 0 at a bound, and 1/2 where the bound is a tensor; before, it had slope 1 at either.
CLAMPED = (1.0, 1.0) if RELEASE < (2, 14) else (0.0, 0.5)

# All: their backward has a batching rule that is wrong without a word, so vectors pass them one at a time.
# (masked_select: where its argument is broadcast to the mask.)
BATCHED_WRONGLY = ("CdistBackward0", "CdistBackwardBackward0", "AsStridedScatterBackward0", "MaskedSelectBackward0")


@cache
def load_forward_mode() -> None:
    """2.14, 2.15: PyTorch compiles helpers when forward mode is first used, by what it deprecates with a FutureWarning.

    Python shows that to users, in the midst of a call of ours of which they can change nothing.
    (2.13 says it by a DeprecationWarning, which Python hides.)
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit", FutureWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros((), device="cpu"), torch.zeros((), device="cpu"))
