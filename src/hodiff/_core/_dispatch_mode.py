"""Modes that see each operation, without the compiler that PyTorch's own base class loads."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hodiff._core._compiled_callers import uncompiled


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose handler the tracer (Dynamo) leaves alone, by a mark on its code.

    The base class puts `torch.compiler.disable` around it, which imports Dynamo when a mode sees its first operation:
    two seconds, for whoever compiles nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        uncompiled(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def tracing() -> bool:
    """Whether PyTorch follows what runs, with stand-ins for values: Dynamo, `torch.export`, `make_fx`."""
    mode = _get_current_dispatch_mode()
    return (mode is not None and mode.is_infra_mode()) or torch.compiler.is_compiling()
