"""The names of PyTorch that hodiff needs and PyTorch does not promise, tried before they are used.

What every call needs is tried at import, in a millisecond; what one part needs, before its first
use. So a release that has renamed something gets one sentence, which says what is missing and what
works. What a name does is proved elsewhere (`_versions.prove`, `graph._saved.answers`).
"""

from __future__ import annotations

import pkgutil
import re
import warnings
from functools import cache
from operator import attrgetter

import torch

from hodiff.errors import HodiffError, HodiffWarning

__all__ = ["RELEASE", "check", "in_words", "lacks", "newer"]

OLDEST, NEWEST = (2, 8), (2, 15)
"""The releases that the tests have run on, those between them included."""

RELEASE = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])

_SUPPORTED = "hodiff supports PyTorch {}.{} to {}.{}".format(*OLDEST, *NEWEST)

EVERY_CALL = "every call"
KERNELS = "attention and cross-entropy in little memory"

NEEDED: dict[str, tuple[str, ...]] = {
    EVERY_CALL: (
        "torch: _foreach_pow _weight_norm",
        "torch._C: _InferenceMode _current_autograd_node",
        "torch._C: _is_fwd_grad_enabled _set_fwd_grad_enabled",
        "torch._C: _set_grad_enabled",
        "torch._C: _get_obj_in_tls _stash_obj_in_tls",
        "torch._C: _len_torch_dispatch_stack _pop_torch_dispatch_stack",
        "torch.overrides: _get_current_function_mode_stack",
        "torch._C: _dispatch_tls_is_dispatch_key_included",
        "torch._C._autograd: SavedTensor _top_saved_tensors_default_hooks",
        "torch._C._dynamo.eval_frame: _FrameAction.SKIP _FrameExecStrategy set_code_exec_strategy",
        "torch._C._functions: AccumulateGrad",
        "torch._C._functorch: _add_batch_dim _remove_batch_dim _vmap_increment_nesting",
        "torch._C._functorch: _vmap_decrement_nesting",
        "torch._C._functorch: pop_dynamic_layer_stack",
        "torch._C._functorch: push_dynamic_layer_stack",
        "torch._C._functorch: pop_dynamic_layer_stack_and_undo_to_depth get_interpreter_stack",
        "torch._C._functorch: get_unwrapped is_batchedtensor is_functorch_wrapped_tensor",
        "torch._C: _enter_dual_level"
        if RELEASE < (2, 13)
        else "torch._functorch.predispatch: _enter_dual_level",
        "torch._functorch.eager_transforms: _autograd_grad _jvp_with_argnums",
        "torch._ops: HigherOrderOperator _higher_order_ops",
        "torch.autograd: _engine_run_backward",
        "torch.autograd.Variable: _execution_engine.run_backward",
        "torch.autograd.forward_ad: _current_level",
        "torch.Tensor: _backward_hooks _base _is_zerotensor _version",
        "torch.UntypedStorage: _cdata",
        "torch.nn.Module: _call_impl",
        "torch.nn.Module: _buffers _modules _parameters _backward_hooks _forward_hooks",
        "torch.nn.Module: _forward_pre_hooks",
        "torch.nn.modules.module: BackwardHook _WrappedHook _global_forward_pre_hooks",
        "torch.nn.utils.parametrize: _cache _cache_enabled",
        "torch.nn.utils.stateless: _functional_call _reparametrize_module",
        "torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu",
        "torch.ops.aten.add.Tensor: _op _schema",
        "torch.utils._python_dispatch: TorchDispatchMode _disable_current_modes",
        "torch.utils._python_dispatch: _get_current_dispatch_mode",
        "torch.utils.checkpoint: _CheckpointFrame _recomputation_hook",
        "torch.utils.hooks.RemovableHandle: next_id",
    ),
    KERNELS: (
        "torch: _add_batch_dim _remove_batch_dim",
        "torch._C._functorch: is_legacy_batchedtensor",
        "torch._C: _dispatch_has_backend_fallback _dispatch_key_parse",
        "torch._C: _dispatch_library",
        "torch._C: _dispatch_tls_set_dispatch_key_included _ExcludeDispatchKeyGuard",
        "torch._guards: TracingContext.try_get",
        "torch._ops: _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS",
        "torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "checkpoint=": (
        "torch.autograd.Function: _backward_cls",
        "torch._C._functorch: is_legacy_batchedtensor",
    ),
    "Taylor mode": ("torch.Tensor: _make_wrapper_subclass",),
    "sparse": (
        "torch.ops.aten: _linalg_check_errors _pack_padded_sequence",
        "torch.ops.aten: _to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr",
    ),
    "curvature": ("torch._C: _current_graph_task_id",),
    "graph": (
        "torch._C._autograd: _get_sequence_nr",
        "torch.autograd.graph: _engine_run_backward",
        "torch.optim.Optimizer: _optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "torch.optim.optimizer: _global_optimizer_pre_hooks _global_optimizer_post_hooks",
    ),
    "steps": (
        "torch: _foreach_mul",
        "torch._C: _AutoDispatchBelowAutograd _PreserveDispatchKeyGuard",
        "torch.nn.modules.module: _has_any_global_hook",
        "torch.nn.parallel.DistributedDataParallel: _get_active_ddp_module",
        "torch.ops.aten: _efficientzerotensor.default",
        "torch.utils._device: DeviceContext",
        "torch.utils._pytree: tree_flatten tree_leaves tree_map tree_unflatten",
    ),
    "a compilation": (
        "torch._C._dynamo.eval_frame: set_eval_frame",
        "torch._dynamo.backends.registry: lookup_backend",
        "torch._dynamo.config: allow_rnn error_on_nested_fx_trace error_on_recompile",
        "torch._dynamo.config: invalidate_compile_context_weakrefs optimize_ddp",
        "torch._dynamo.config: skip_nnmodule_hook_guards",
        "torch._dynamo.config: specialize_float specialize_int suppress_errors trace_autograd_ops",
        "torch._dynamo.eval_frame: _callback_from_stance",
        "torch._dynamo.exc: RecompileError Unsupported",
        "torch._guards: TracingContext.get tracing",
    ),
    "torch.compile beside hodiff": ("torch._dynamo.eval_frame: DynamoStance _stance",),
    "flex_attention inside hodiff": ("torch._higher_order_ops.flex_attention: math_attention",),
    "sharding": ("torch.distributed.tensor._api: _FromTorchTensor.backward",),
    "fully_shard": ("torch.distributed.fsdp: FSDPModule._get_fsdp_state",),
}
"""For each part of the library, by the name that users know, what it needs: whose names, and which.

All calls need the first.
"""


_owner = cache(pkgutil.resolve_name)


@cache
def lacks(part: str) -> str:
    """The names that a part needs and this PyTorch lacks, in one sentence;
    empty where it has all.
    """
    rows = [row.split(": ") for row in NEEDED.get(part, ())]
    needed = [(home, name) for home, names in rows for name in names.split()]
    missing = ", ".join(f"{home}.{name}" for home, name in needed if not _is_there(home, name))
    said = f"hodiff ({part}) needs {missing}, which torch {torch.__version__} does not have."
    return f"{said} {_SUPPORTED}" if missing else ""


def _is_there(home: str, name: str) -> bool:
    try:
        owner = _owner(home)
        if name not in getattr(owner, "__annotations__", ()):  # of what instances of a class have
            attrgetter(name)(owner)
    except (AttributeError, ImportError):
        return False
    return True


@cache  # what is cached costs no call
def check(part: str) -> None:
    """Raise where this PyTorch lacks a name that a part of the library needs."""
    if said := lacks(part):
        raise HodiffError(f"{said}; on this release, all else of hodiff works.")


def newer() -> str:
    """A sentence about a release that is newer than all that were tested; empty where it is not."""
    if RELEASE <= NEWEST:
        return ""
    return (
        f"newer than {'.'.join(map(str, NEWEST))}, the newest release of PyTorch that hodiff was "
        "tested with"
    )


def check_release() -> None:
    """Refuse a release that is too old or lacks what every call needs; warn of one not known."""
    if RELEASE < OLDEST:
        raise ImportError(
            f"hodiff needs PyTorch {'.'.join(map(str, OLDEST))} or newer, "
            f"and this is {torch.__version__}: "
            f'pip install "torch>={".".join(map(str, OLDEST))}".'
        )
    if said := lacks(EVERY_CALL):
        raise ImportError(f"{said}; on this release nothing of hodiff works.")
    if newer():
        warnings.warn(
            f"torch {torch.__version__} is {newer()}, so its changes to derivatives are unknown "
            "to this version of hodiff. hodiff.check_derivatives tests your function.",
            HodiffWarning,
            stacklevel=4,  # who imports hodiff
        )


def in_words(error: Exception) -> ImportError:
    """A sentence about a name of PyTorch that an import missed and the table does not know."""
    return ImportError(f"hodiff cannot use torch {torch.__version__}: {error}. {_SUPPORTED}.")
