"""What a call must leave as it was: the process, modules, tensors, random numbers, memory. `unchanged` compares all.

Beyond `ledger.snapshot` (a module's tensors, for tests that change them on purpose) this looks at whatever a careless
library could touch: classes, `__dict__`s, every kind of hook, every switch of the process.
"""

import functools
import gc
import importlib
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy  # torch imports it when it first traces something, and it adds a filter of warnings  # noqa: F401
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import optimizer  # type: ignore[attr-defined]
from torch.utils import _python_dispatch, checkpoint

import hodiff
from tests.support.callers import tensors
from tests.support.ledger import Ledger, storages_of, without_collector
from tests.support.limits import in_threads
from tests.support.releases import UNLOADED

REMEMBERED = {
    "MIXING", "WRONG_AT_ONCE", "WRITTEN", "BIASED", "_STATISTICS", "UNREMARKABLE", "_cleared", "_without_functions",
    "_RAW_SAVED", "_LAYOUTS", "BENDS",  # classes of nodes
    "WHOLE",  # classes of tensors and modules
    "_state",  # what was said
    "registered",  # kernels, which PyTorch keeps
    "_lost", "absent",  # guards of modes that were not undone in time, and modes
    "USERS", "RULES", "OPERATORS",  # code, files and operations, PyTorch's among them
}  # fmt: skip
"""What the library knows better after a call, and is meant to; it holds no tensors, or weakly."""


@functools.cache
def _globals() -> dict[str, Any]:
    """The globals of the library's modules, also of those that a call would load first."""
    return {
        f"{module.name.removeprefix('hodiff.')}.{name}": value
        for module in pkgutil.walk_packages(hodiff.__path__, "hodiff.")
        if not module.name.endswith(("__main__", *UNLOADED))
        for name, value in vars(importlib.import_module(module.name)).items()
        if not name.startswith("__")
    }


def strangers() -> set[str]:
    """What is remembered under a name that no module has any more: under its new one it is a side effect."""
    return REMEMBERED - {path.rpartition(".")[2] for path in _globals()}


@functools.cache
def _own() -> dict[str, Any]:
    """What can change in the library's own modules: containers, counters, switches; no global is bound anew."""
    return {
        path: value
        for path, value in _globals().items()
        if path.rpartition(".")[2] not in REMEMBERED
        and not (isinstance(value, dict) and "__spec__" in value)  # what a module of PyTorch's has
        and (
            isinstance(value, (dict, list, set, ContextVar))
            or (type(value).__module__.startswith("hodiff.") and hasattr(value, "__dict__"))
        )
    }


def library() -> dict[str, Any]:
    """All of that as it is now."""
    found: dict[str, Any] = {}
    for path, value in _own().items():
        if isinstance(value, ContextVar):
            found[path] = _seen(value.get())
        elif isinstance(value, (dict, list, set)):
            found[path] = _seen(value)
        else:  # what this thread has not set yet is its class's
            parts = {**vars(type(value)), **vars(value)} if isinstance(value, threading.local) else vars(value)
            left_out = ("_lock", "needs")  # a module that was loaded meanwhile stays loaded
            found[path] = {
                part: _seen(parts[part]) for part in parts if part not in left_out and not part.startswith("__")
            }
    return found


def taken_locks() -> list[str]:
    """The library's locks that another thread cannot have."""
    kinds, taken = (type(threading.RLock()), type(threading.Lock()), threading.Condition), []

    def look() -> None:
        for path, lock in locks.items():
            if lock.acquire(timeout=1):
                lock.release()
            else:
                taken.append(path)

    locks = {path: value for path, value in _globals().items() if isinstance(value, kinds)}
    locks |= {f"{path}._lock": value._lock for path, value in _own().items() if hasattr(value, "_lock")}
    in_threads(look)
    return taken


def _seen(value: Any) -> Any:
    """A container by what is in it now, anything else as it is."""
    return [id(item) for item in value] if isinstance(value, (dict, list, set)) else value


def process() -> dict[str, Any]:
    """Every switch of the process and of this thread that a derivative might be tempted to turn."""
    cuda, module = torch.backends.cuda, nn.modules.module
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return {
        "attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "cudnn": (
            torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
        ),
        "mkldnn": torch.backends.mkldnn.flags,
        "mkldnn enabled": torch._C._get_mkldnn_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "grad": torch.is_grad_enabled(),
        "forward gradients": torch._C._is_fwd_grad_enabled(),
        "replay of views": torch._C._is_view_replay_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "passes in several threads": torch._C._is_multithreading_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ] + [torch.is_autocast_cache_enabled()],
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "compiler's stance": dynamo._stance.stance if dynamo else "default",
        "hooks of all modules": [
            list(getattr(module, f"_global_{kind}_hooks").items())
            for kind in ("forward_pre", "forward", "backward_pre", "backward")
        ] + [
            len(getattr(module, f"_global_{kind}_registration_hooks")) for kind in ("buffer", "parameter", "module")
        ],
        "subclasses and modes are asked": torch._C._get_torch_function_state(),
        "hooks of all optimizers": [
            list(getattr(optimizer, f"_global_optimizer_{when}_hooks").items()) for when in ("pre", "post")
        ],
        "function modes": [id(mode) for mode in torch.overrides._get_current_function_mode_stack()],
        "dispatch modes": len(_python_dispatch._get_current_dispatch_mode_stack()),
        "the way to the engine": (
            torch.autograd._engine_run_backward, checkpoint._CheckpointFrame, checkpoint._recomputation_hook,
            Tensor.register_hook,
        ),
        "transforms": len(torch._C._functorch.get_interpreter_stack() or ()),
        "forward mode": torch.autograd.forward_ad._current_level,
        "saved tensors": (
            torch._C._autograd._saved_tensors_hooks_is_enabled(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
        ),
        "parametrizations": (parametrize._cache_enabled, id(parametrize._cache)),
        "methods of tensors": (Tensor.register_hook, Tensor.backward, Tensor.__torch_function__.__func__),
        "methods of modules": (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__),
        "interpreter": (
            gc.isenabled(), sys.gettrace(), sys.getprofile(), sys.excepthook, sys.displayhook, sys.getrecursionlimit(),
            signal.getsignal(signal.SIGINT),
        ),
        "filters of warnings": (list(warnings.filters), warnings.showwarning),
        "hodiff's own": library(),
    }  # fmt: skip


def of_tensor(tensor: Tensor) -> dict[str, Any]:
    """What a tensor is: its identity, value, flags, hooks and `.grad`."""
    inference = tensor.is_inference()
    return {
        "class": type(tensor),
        "value": tensor.detach().clone(),
        "memory": tensor.untyped_storage().data_ptr(),
        "layout": (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device),
        "version": None if inference else tensor._version,
        "graph": (tensor.requires_grad, tensor.is_leaf, tensor.grad_fn, tensor.retains_grad),
        "grad": (tensor.grad, None if tensor.grad is None else tensor.grad.clone()) if tensor.is_leaf else None,
        "hooks": (dict(tensor._backward_hooks or {}), dict(tensor._post_accumulate_grad_hooks or {})),
        "attributes": dict(vars(tensor)),
    }


def of_module(model: nn.Module) -> dict[str, Any]:
    """What a module is: the identities of its parts, all attributes, modes, hooks; and each tensor by `of_tensor`."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[path] = {
            "class": type(module),
            "attributes": {
                name: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
                for name, value in vars(module).items()
            },
        }
    for kind, theirs in ("parameter", model.named_parameters()), ("buffer", model.named_buffers()):
        found |= {f"{kind} {path}": (id(tensor), of_tensor(tensor)) for path, tensor in theirs}
    return found


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two records are not the same, tensors by identity or, where both are clones of ours, by value."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        gone = object()
        return [
            line for key in keys for line in differences(before.get(key, gone), after.get(key, gone), f"{path}/{key}")
        ]
    if isinstance(before, (list, tuple)) and type(before) is type(after) and len(before) == len(after):
        return [
            line
            for index, pair in enumerate(zip(before, after, strict=True))
            for line in differences(*pair, f"{path}[{index}]")
        ]
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        same = before is after or (path.endswith(("value", "grad[1]")) and torch.equal(before, after))
    else:
        same = before is after or bool(type(before) is type(after) and before == after)
    return [] if same else [f"{path}: {before!r} became {after!r}"]


@contextmanager
def unchanged(*things: nn.Module | Tensor, random: bool = False) -> Iterator[None]:
    """Fail where the block changes the process, one of the things, or (`random`) draws from the default generator."""

    def look() -> dict[str, Any]:
        found: dict[str, Any] = {"process": process()}
        for number, thing in enumerate(things):
            found[str(number)] = of_module(thing) if isinstance(thing, nn.Module) else of_tensor(thing)
        if random:
            found["random state value"] = torch.get_rng_state()
        return found

    before = look()
    yield
    changed = differences(before, look())
    assert not changed, "\n".join(changed)


class Stream:
    """The default generator's states where `f` begins and ends: what else draws, or where it is set, shows."""

    def __init__(self) -> None:
        self.begun = torch.get_rng_state()
        self.seen = [self.begun]
        self.strange = 0
        self.calls = 0

    def watched(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """`f`, watched."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.strange += not self._known()
            try:
                return f(*args, **kwargs)
            finally:
                self.seen.append(torch.get_rng_state())

        return observed

    def _known(self) -> bool:
        now = torch.get_rng_state()
        return any(torch.equal(now, state) for state in self.seen)

    def check(self) -> None:
        """Fail where anything but `f` drew. It may run again with the numbers that it drew: then the state is known."""
        assert not self.strange, f"{self.strange} of {self.calls} calls of f began from a state that f did not leave"
        assert self._known(), "the last state is none that f left"


@functools.cache
def _warm() -> None:
    """The first call inside a dispatch mode imports half of torch, and imports keep frames alive."""
    x = torch.ones(2, requires_grad=True)
    with Ledger():
        torch.vmap(torch.func.jacfwd(torch.sin))(x)
        torch.autograd.grad(torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum(), x)


def left_behind(call: Callable[[], Any]) -> tuple[int, int, list[str]]:
    """Bytes alive besides the result, and once it is gone, with no help of the collector; and what made those.

    Bytes besides the result count only where no tensor of it has a graph, which holds what it needs.
    """
    _warm()
    with without_collector():
        with Ledger() as ledger:
            result = call()
        found = tensors(result)
        graph = any(tensor.requires_grad for tensor in found)
        known = {storage._cdata for storage in storages_of(found)}
        besides = 0 if graph else sum(
            size for address, (reference, size, _) in ledger.storages.items()
            if address not in known and not reference.expired()
        )  # fmt: skip
        del result, found
        return besides, ledger.alive(), ledger.makers()
