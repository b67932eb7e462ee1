"""Account for what a call leaves behind: live memory, hooks, flags, buffers, versions."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VIEWS = {
    "detach",
    "alias",
    "view",
    "_unsafe_view",
    "expand",
    "t",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "select",
}


class Ledger(TorchDispatchMode):
    """Every storage made while it is on (forward and passes), and the names of the operations.

    A storage first met as an argument is the caller's.  The weak references keep addresses from being used again, so an
    address means one storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.callers: dict[int, StorageWeakRef] = {}
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in storages_of((args, kwargs)):
            if storage._cdata not in self.storages and storage._cdata not in self.callers:
                self.callers[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.operations[name] += 1
        for storage in storages_of(out):
            if storage._cdata not in self.callers and storage._cdata not in self.storages:
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), name)
        return out

    def alive(self, besides: Any = ()) -> int:
        """Bytes of those storages that still live, ``besides`` those under a result."""
        known = {storage._cdata for storage in storages_of(besides)}
        return sum(
            size
            for address, (reference, size, _) in self.storages.items()
            if address not in known and not reference.expired()
        )

    def makers(self) -> list[str]:
        """The operations that made them."""
        return [name for reference, _, name in self.storages.values() if not reference.expired()]

    def work(self) -> int:
        """How many operations that compute something."""
        return sum(self.operations.values())


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """The storages under the tensors of a structure."""
    storages = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            try:
                storages.append(leaf.untyped_storage())
            except (
                NotImplementedError,
                RuntimeError,
            ):  # sparse, or a level of vmap: its memory belongs to another tensor
                continue
    return storages


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing may wait for the cyclic garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def leftovers(call: Callable[[], Any]) -> tuple[int, Any, Ledger]:
    """Bytes that ``call`` allocated, that live on, and that are not part of its result."""
    with Ledger():
        call()  # the first call inside such a mode imports half of torch, and imports keep frames alive
    with without_collector():
        with Ledger() as ledger:
            result = call()
        return ledger.alive(besides=result), result, ledger


def flags() -> dict[str, object]:
    """The process-wide switches a derivative might be tempted to turn."""
    return {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "cudnn": torch.backends.cudnn.enabled,
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
        "forward_hooks": len(nn.modules.module._global_forward_hooks),
        "forward_pre_hooks": len(nn.modules.module._global_forward_pre_hooks),
    }


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything of a module that a call must leave alone: identity, value, version, grad, mode and hooks."""
    state: dict[str, object] = {"training": [m.training for m in model.modules()]}
    for kind, tensors in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            version = None if tensor.is_inference() else tensor._version
            grad = None if tensor.grad is None else tensor.grad.tolist()
            state[f"{kind} {name}"] = (id(tensor), type(tensor), tensor.tolist(), version, tensor.requires_grad, grad)
    state["keys"] = [
        (sorted(m._parameters), sorted(m._buffers), sorted(map(str, m._forward_pre_hooks))) for m in model.modules()
    ]
    return state
