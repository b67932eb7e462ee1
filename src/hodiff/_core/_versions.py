"""The parts of PyTorch without a promise: differences of releases; facts of nodes, proved; the
engine's entry.

What differs between the supported releases has an entry that names the ones it serves. Private
attributes of nodes are read here alone, and no class of nodes is told by its name that `LOOKS` does
not prove: on first use each builds a tiny graph, and a PyTorch that answers otherwise than expected
is refused, for a wrong derivative would pass unseen. (Explanations have their own proof,
`graph._saved`: they may know nothing.)
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import repeat, starmap
from operator import attrgetter
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, overrides
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.nn.utils import parametrize, stateless
from torch.utils import _python_dispatch, checkpoint

from hodiff._core import _needed
from hodiff._core._needed import NEWEST, OLDEST, RELEASE
from hodiff.errors import HodiffError

__all__ = [
    "LARGEST",
    "LEVEL",
    "count_below",
    "forward_mode_on",
    "fsdp_groups",
    "hooks_on",
    "is_batched",
    "is_included",
    "is_wrapped",
    "named_by_torch",
    "pass_at_hand",
    "reduction",
    "schema_of",
    "set_forward_mode",
    "set_grad_enabled",
    "transforms",
    "uncompiled",
    "unwrapped",
]

levels: Any = torch._C if RELEASE < (2, 13) else sys.modules["torch._functorch.predispatch"]
"""Where all use of forward mode looks up `_enter_dual_level`: from 2.13 on a module,
which has another name below.
"""
_ENTER_LEVEL = "_enter_dual_level" if levels is torch._C else "_enter_dual_level_impl"

# --- the engine's entry: PyTorch's autograd engine, called where all arguments are our own --------
# `torch.autograd.grad` looks at each argument in Python before it calls the engine: 40 calls and
# more for six inputs, in each pass; `torch.vmap` takes 130 calls. Shapes, dtypes and numbers are
# right here, so both are entered directly; by the public function where a tensor subclass or a mode
# wants to see the call.


class _Passing(threading.local):
    ours = 0


passing = _Passing()
"""How many passes of ours go through PyTorch's public function now, in this thread."""

_run = torch.autograd.Variable._execution_engine.run_backward


def grad(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Tensor | None],
    *,
    keep: bool,
    build: bool,
) -> Sequence[Tensor | None]:
    """The gradient of a scalar function, ∇f(x)."""
    outputs, inputs = tuple(outputs), tuple(inputs)
    ones: list[Tensor] = []
    # ones for samples' scalars, too
    for output, cotangent in zip(outputs, cotangents, strict=True):
        ones += [torch.ones_like(output) if cotangent is None else cotangent]
    if overrides.has_torch_function(outputs + inputs):
        return public(outputs, inputs, ones, keep=keep, build=build)
    return _run(
        outputs, tuple(ones), keep, build, inputs, allow_unreachable=True, accumulate_grad=False
    )


def public(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    cotangents: Sequence[Tensor | None],
    *,
    keep: bool,
    build: bool,
) -> Sequence[Tensor | None]:
    """A pass by the public `torch.autograd.grad`, which checks everything."""
    passing.ours += 1
    try:
        return torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=keep, create_graph=build, allow_unused=True
        )
    finally:
        passing.ours -= 1


_torch: Any = torch._C
node_at_hand: Callable[[], Any] = _torch._current_autograd_node
"""The node whose backward runs in this thread; None outside of any."""
ACCUMULATE: type = _torch._functions.AccumulateGrad
weight_norm: Any = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
lacks_memory: Callable[[Any], bool] = Tensor._is_zerotensor
"""Whether a tensor is one of zeros that stand nowhere, which no operation may write to."""
REPLICATED_BY = "torch.distributed._composable.replicate"
"""The module whose `replicate` makes one of DistributedDataParallel, without a wrapper."""
without_modes = _python_dispatch._disable_current_modes
"""A block that no mode sees."""
DYNAMO = "torch._dynamo"
"""The package that compiles; it takes seconds to load, and is not loaded before it is used."""
COMPILER, STANCE = "torch._dynamo.eval_frame", "_stance"
"""Where it keeps whether compiled functions run as they are, and under which name."""

# The state of a thread. PyTorch's own contexts set it in Python, where an interrupt may come
# between.
inference: Any = _torch._InferenceMode
"""A guard, from when it is made until it goes, or `__exit__` in C:
it puts back both modes of grad.
"""
set_grad_enabled: Callable[[bool], None] = _torch._set_grad_enabled
"""Set whether operations are recorded."""
forward_mode_on: Callable[[], bool] = _torch._is_fwd_grad_enabled
"""Whether tangents are carried: not in the forward of a Function."""
set_forward_mode: Callable[[bool], None] = _torch._set_fwd_grad_enabled
"""Set whether tangents are carried."""

# The modes that see calls, from the outermost on; below them those that see operations.
modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack
count_below: Callable[[], int] = _torch._len_torch_dispatch_stack
pop_below: Callable[[None], Any] = _torch._pop_torch_dispatch_stack
mode_below: Callable[[], Any] = _python_dispatch._get_current_dispatch_mode
"""The innermost of those."""
DispatchMode: Any = _python_dispatch.TorchDispatchMode
flags_of_modes: Any = vars(_python_dispatch)
"""Whether any is on, as PyTorch keeps it in Python: for the process, not for a thread."""

# Where PyTorch looks up what `_hooks` takes the place of while calls run, and under which names.
PASSES: Any = vars(torch.autograd), "_engine_run_backward"
SWAPS: Any = vars(stateless), "_reparametrize_module"
FRAMES: Any = vars(checkpoint), "_CheckpointFrame"
REPEATS: Any = vars(checkpoint), "_recomputation_hook"
WRAPPED: Any = vars(torch.nn.modules.module), "_WrappedHook"
before_modules: dict[Any, Any] = torch.nn.modules.module._global_forward_pre_hooks
"""The hooks that run before each module, of whatever class."""
FUNCTIONAL_CALL = stateless._functional_call.__code__
"""What runs a module for `torch.func.functional_call`."""
parametrizations: Any = vars(parametrize)
CACHE = "_cache"
"""Where, and as what, `parametrize.cached()` keeps what it has computed, for all threads."""
forward, LEVEL = vars(forward_ad), "_current_level"
"""Where, and as what, PyTorch keeps the level of forward mode that is on; below 0 none is."""
_dynamo: Any = _torch._dynamo
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


class _Batches:
    direct = False
    """Whether they are entered directly: after the first, with which PyTorch loads their rules."""


def mapped(
    function: Callable[..., tuple[Tensor, ...] | Tensor], vectors: Sequence[Tensor]
) -> list[Tensor]:
    """`function` of each of the stacked vectors, in one batch.

    An error may leave the batch's level on.
    """
    if not _Batches.direct or overrides.has_torch_function(tuple(vectors)):
        result = torch.vmap(function, randomness="same")(*vectors)
        _Batches.direct = True
        return [result] if isinstance(result, Tensor) else list(result)
    count = len(vectors[0])
    level = _functorch._vmap_increment_nesting(count, "same")
    result = function(*[_functorch._add_batch_dim(vector, 0, level) for vector in vectors])
    parts = (result,) if isinstance(result, Tensor) else result
    whole = [_functorch._remove_batch_dim(part, level, count, 0) for part in parts]
    _functorch._vmap_decrement_nesting()
    return whole


transforms: Callable[[], Any] = _functorch.get_interpreter_stack
"""The levels of `torch.func` that are on, from the outermost on; None without any."""


def levels_entered() -> int:
    """The number of levels of `torch.func` that are on."""
    return len(transforms() or ())


is_batched: Callable[[Tensor], bool] = _functorch.is_batchedtensor
"""Whether `torch.vmap` hides a dimension of a tensor."""

is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a transform of `torch.func` hides the values of a tensor, as `vmap` does."""


def unwrapped(tensor: Tensor) -> Tensor:
    """A tensor without what `torch.func` has wrapped around it: its graph has all of the record."""
    while is_wrapped(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def pass_at_hand() -> int:
    """The number of the pass that runs in this thread; -1 outside of any."""
    return _torch._current_graph_task_id()


def set_aside_levels(undo: list[Callable[[], object]]) -> None:
    """Take them off until it is undone: plain tensors are then computed with as outside of them."""
    entered, off = levels_entered(), list[Any]()

    def restore() -> None:
        while (now := levels_entered()) < entered:
            _functorch.push_dynamic_layer_stack(off[entered - 1 - now])

    undo += [restore]
    # interrupted nowhere
    off.extend(starmap(_functorch.pop_dynamic_layer_stack, repeat((), entered)))


def leave_levels(depth: int) -> None:
    """Leave those beyond so many. Until 2.11 PyTorch's own way leaves too many, and raises."""
    while RELEASE < (2, 12) and levels_entered() > depth:
        _functorch._vmap_decrement_nesting()
    _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


# --- what differs between releases ----------------------------------------------------------------

# Until 2.13: the pairwise distances have no second derivative. Their nodes carry no marker that
# says so.
DISTANCES = ("CdistBackwardBackward0", "PdistBackwardBackward0") if RELEASE < (2, 14) else ()

# All: each functional collective has this one behind it, and a batch of vectors is read before it
# has arrived.
_COLLECTIVE = "GeneratedBackwardFor__c10d_functional__wrap_tensor_autograd_defaultBackward"

# All: their backward has a batching rule that is wrong silently, so vectors pass them one at a
# time. (masked_select: where its argument is broadcast to the mask.) That of the CPU's recurrent
# layers has none: PyTorch would take one at a time itself, and ask the user to file an issue.
BATCHED_WRONGLY = (
    "CdistBackward0",
    "CdistBackwardBackward0",
    "MaskedSelectBackward0",
    "MkldnnRnnLayerBackward0",
    _COLLECTIVE,
)

# Until 2.14: Bessel functions, too, are constants to autograd; see `_messages.CONSTANTS`.
BESSEL_IS_CONSTANT = RELEASE < (2, 15)

# Until 2.14: to forward mode the LU factors that solve, det and the like keep are constants.
LU_IS_CONSTANT = RELEASE < (2, 15)


def remember_in_thread(key: str, value: object) -> None:
    """2.8 to 2.11 give back a reference to what PyTorch keeps for a thread that they never took:
    the process ends.
    """
    references = sys.getrefcount(value)
    _torch._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == references:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


remembered: Callable[[str], Any] = _torch._get_obj_in_tls
"""What was, also in the engine's threads of its passes. Where nothing was, a RuntimeError."""


def telling_where_forward_mode_begins(
    tell: Callable[[], object],
) -> tuple[dict[str, Any], str, Any, Any]:
    """A stand-in that calls `tell` where a level of forward mode is entered: its place, its name,
    itself, its purpose.

    Under the names that users call, all pass here. Dynamo does not look into what calls this name.
    """
    theirs = getattr(levels, _ENTER_LEVEL)

    def enter() -> int:
        tell()
        return theirs()

    return vars(levels), _ENTER_LEVEL, enter, theirs


def mend_from_local() -> bool:
    """2.13 to 2.15: give `DTensor.from_local` a backward that can be differentiated also where it
    redistributes.

    PyTorch's returns a tensor without a graph there, so that second derivatives lack a part. First
    ones stay PyTorch's.

    Returns:
        Whether further derivatives through DTensors are right then. Before, `redistribute` cuts the
        graph as well.
    """
    module = sys.modules.get("torch.distributed.tensor._api")
    if module is None or RELEASE < (2, 13):
        return False
    _needed.check("sharding")
    theirs = module._FromTorchTensor.backward
    if theirs.__module__ != __name__:

        def backward(ctx: Any, gradient: Any) -> Any:
            if gradient is None or not (torch.is_grad_enabled() and gradient.requires_grad):
                return theirs(ctx, gradient)
            placements = ctx.grad_placements or [
                module.Replicate() if each.is_partial() else each
                for each in ctx.forward_input_placements
            ]
            ours = gradient.redistribute(ctx.forward_input_device_mesh, placements)
            return ours.to_local(), *[None] * (len(ctx.needs_input_grad) - 1)

        module._FromTorchTensor.backward = staticmethod(backward)
    return True


def fsdp_groups(module: Any) -> list[Any]:
    """The parameters that `fully_shard` gathers together when a module is called,
    with its policies.
    """
    _needed.check("fully_shard")
    return module._get_fsdp_state()._fsdp_param_groups


# --- the key under which kernels of ours stand (see `_kernels`) -----------------------------------

KERNEL_KEY_NAME = "TESTING_ONLY_GenericMode"
"""PyTorch has it for tests of its dispatcher, written in C++."""


_ops: Any = torch._ops


_Operator: Any = type(torch.ops.aten.add.Tensor)


def schema_of(operator: Any) -> Any:
    """The schema of an operator's arguments; None of operators that take functions."""
    return operator._schema if isinstance(operator, _Operator) else None


def named_by_torch(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by PyTorch's names, where they were given by those of NumPy,
    which it takes as well.
    """
    return {_NUMPYS.get(name, name): value for name, value in kwargs.items()}


_NUMPYS = {"axis": "dim", "keepdims": "keepdim"}


KERNEL_KEY: Any = None
if not _needed.lacks(_needed.KERNELS):
    with suppress(RuntimeError):  # no such key
        KERNEL_KEY = _torch._dispatch_key_parse(KERNEL_KEY_NAME)


is_included: Callable[[Any], bool] = _torch._dispatch_tls_is_dispatch_key_included
"""Whether a thread has what stands under a key."""
include: Callable[..., object] = (
    bool if KERNEL_KEY is None else _torch._dispatch_tls_set_dispatch_key_included
)
"""Give it to a thread, or take it away."""


def library(namespace: str, home: str) -> Any:
    """The library under our key, for the operations of one namespace."""
    return _torch._dispatch_library("IMPL", namespace, KERNEL_KEY_NAME, home, 0)


def key_left_out(key: Any) -> Any:
    """A block in which a thread lacks what stands under a key. It begins when it is entered."""
    return _torch._ExcludeDispatchKeyGuard(torch.DispatchKeySet(key))


OPERATORS: dict[str, Any] = _ops._higher_order_ops
"""PyTorch's operators that take functions, by their names."""


def plain_flex_attention(*args: Any, **kwargs: Any) -> Any:
    """`flex_attention` by its definition, in operations that have derivatives of every order."""
    _needed.check("flex_attention inside hodiff")
    return sys.modules[type(OPERATORS["flex_attention"]).__module__].math_attention(*args, **kwargs)


def key_is_taken() -> bool:
    """Whether another library has the key for something."""
    return _torch._dispatch_has_backend_fallback(KERNEL_KEY)


def let_higher_order_operators_pass() -> None:
    """Make the key no concern of PyTorch's operators that take functions, now and to come."""
    for operator in OPERATORS.values():
        operator.fallthrough(KERNEL_KEY)
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(KERNEL_KEY)


def skip(code: CodeType) -> None:
    """Let Dynamo run a function as it is, with all below; its `skip_code` does so for one frame."""
    strategy = _dynamo.eval_frame._FrameExecStrategy
    action = _dynamo.eval_frame._FrameAction.SKIP
    _dynamo.eval_frame.set_code_exec_strategy(code, strategy(action, action))


Given = TypeVar("Given", bound=Callable[..., Any])

REASON = (
    "hodiff: this call needs PyTorch's own graphs, which a traced region does not have. "
    "Leave out fullgraph=True: the graph then breaks around the call, which runs uncompiled; "
    "or call it outside of the compiled function. A training step is compiled as a whole by "
    "hodiff.compile_step"
)


class Spelled(str):
    """An annotation that `help` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def uncompiled(function: Given, reason: str = REASON) -> Given:
    """`function` itself, marked: the tracer breaks its graph there and leaves
    everything below alone.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    skip(marked.__code__)
    marked.__annotations__.update(  # what is around a function shares its own
        {
            name: Spelled(note)
            for name, note in marked.__annotations__.items()
            if isinstance(note, str)
        }
    )
    return function


# --- what nodes tell under private names ----------------------------------------------------------

Node = Any


class _Read:
    """The facts of a saved tensor from 2.12 on, read from the node."""

    def __init__(
        self, data: Tensor | None = None, hook: object = None, error: RuntimeError | None = None
    ) -> None:
        self.data = data
        self.unpack_hook = hook
        self._error = error

    def unpack(self) -> Tensor | None:
        if self._error is not None:  # a new one: what is raised holds frames, and so the node
            raise RuntimeError(*self._error.args)
        return self.data


class _Packed(Exception):
    """Python code was about to run as a saved tensor was read: its hook, made anew."""


def _stop(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        code, known = frame.f_code, frame.f_locals
        cells = (CellType(*[known[n]] if n in known else []) for n in code.co_freevars)
        raise _Packed(FunctionType(code, frame.f_globals, None, None, tuple(cells)))


_reading = threading.RLock()
"""Held while the collector is off for `_read`:
no thread takes another's "off" for what it is to put back.
"""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_reading.acquire, after_in_parent=_reading.release, after_in_child=_reading.release
    )


def _read(node: Node, name: str) -> Any:
    """2.8 to 2.11: the hook that would be called is told by what a profiler sees,
    and stopped before it runs.
    """
    profiled = sys.getprofile() is not None
    put: Any = sys.settrace if profiled else sys.setprofile
    theirs = sys.gettrace() if profiled else None
    public = name.removeprefix("_raw_" if isinstance(node, BackwardCFunction) else "_raw")
    fault = kept = None
    with without_modes(), _reading:  # modes are Python code, too, and no hooks
        collects = gc.isenabled()
        try:
            gc.disable()  # a collection calls finalizers, which are not to be stopped
            put(_stop)
            kept = getattr(node, public)
        except (_Packed, RuntimeError) as error:  # or it was freed, or changed in place
            fault = error.with_traceback(None)  # which holds the node
        finally:
            try:
                put(theirs)
            finally:
                if collects:
                    gc.enable()
    if isinstance(fault, _Packed):
        return _Read(hook=fault.args[0])
    return tuple(map(_Read, kept)) if isinstance(kept, (tuple, list)) else _Read(kept, error=fault)


SAVED = "_saved_"
RAW = "_raw_saved_"
"""What begins the names under which nodes show what they saved, and that packed."""

look = _read if RELEASE < (2, 12) else getattr
"""For "_raw_saved_x" its `data`, its `unpack_hook` (2.8 to 2.11: one of the same code),
and `unpack()`.
"""


def kept(node: Node, name: str) -> Any:
    """The value that a node has saved under a name, by the prefix that PyTorch documents. Names
    change.

    Those that are read here are proved by `LOOKS`; who else asks holds it against a pass.
    """
    return getattr(node, SAVED + name)


def saved(node: Node, name: str) -> Any:
    """A saved value, as by `look`; inside of a checkpoint it is as if saved without."""
    raw = look(node, name)
    if raw.__class__ in (tuple, list) or not _is_kept(raw):
        return raw
    return _Read(getattr(node, name.removeprefix("_raw")))


class Kept:
    """A tensor that a call saves inside of a checkpoint of the caller's.

    Attributes:
        tensor: It, without its graph, which its node knows; None once the call has ended.
        version: How often it had been changed in place as it was saved.
        unpack: What the checkpoint gives it back by, from then on.
        packed: What the checkpoint has made of it.
    """

    def __init__(self, tensor: Tensor, unpack: Callable[[Any], Tensor], packed: Any) -> None:
        self.tensor: Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version
        self.unpack, self.packed = unpack, packed


def given_back(kept: Kept) -> Tensor:
    """The saved tensor; if it was changed since, an error as of PyTorch's, which does not look at
    what a hook has.
    """
    tensor = kept.tensor
    if tensor is None:
        return kept.unpack(kept.packed)
    if tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {[*tensor.shape]}] is at version {tensor._version}; "
            f"expected version {kept.version} instead."
        )
    return tensor


def _is_kept(raw: Any) -> bool:
    """Whether a saved tensor is one that a call keeps, or has kept."""
    return getattr(raw.unpack_hook, "__code__", None) is given_back.__code__


def scales_by_frequency(node: Node) -> bool:
    """Whether the node of an embedding scales gradients by how often a row was used."""
    return kept(node, "scale_grad_by_freq")


is_training = attrgetter(SAVED + "training")
"""Whether the node of a batch norm took the statistics of its batch."""


def weight(node: Node) -> Node | None:
    """The node of the weight that a norm multiplies by; None where it has none,
    or none that is differentiated.
    """
    return node.next_functions[1][0]


def lacks_weight(node: Node) -> bool:
    """Whether a norm has a bias, and nothing to multiply by: PyTorch's second derivative by the
    bias is then zero.
    """
    (weight, _), (bias, _) = node.next_functions[1:3]
    return weight is None and bias is not None and kept(node, "weight") is None


def was_training(node: Node) -> bool:
    """Whether the node of a batch norm's gradient is that of a norm by the
    statistics of its batch.
    """
    return kept(node, "train")


def argument(node: Node) -> Tensor:
    """The value that the node of a function of one tensor has kept of its argument."""
    return kept(node, "self")


def factors(node: Node) -> list[Tensor]:
    """The factors or divisors that the node of a product has kept; nothing of another reduction."""
    if node.__class__.__name__ not in ("ScatterReduceBackward0", "IndexReduceBackward0"):
        return [
            kept(node, "other") if node.__class__.__name__ == "DivBackward0" else kept(node, "self")
        ]
    if kept(node, "reduce") != "prod":
        return []
    by_index = node.__class__.__name__ == "IndexReduceBackward0"
    return [kept(node, "self"), kept(node, "source") if by_index else kept(node, "src")]


def underflows(node: Node) -> bool:
    """Whether a product has results that are 0, or nearly, by factors that are not; not told where
    a hook packed it.

    PyTorch's derivatives are the result divided by the factors.
    """
    kept = saved(node, RAW + "result")
    if kept.unpack_hook is not None or not _has_numbers(kept):
        return False
    with without_modes():  # it is we who look, not `f`
        least = torch.finfo(kept.data.dtype).tiny
        return bool((kept.data.abs() < least).any()) and any(
            bool(((x != 0) & (x.abs() < least**0.5)).any()) for x in factors(node)
        )


LARGEST = 1e3
"""The absolute value of a row's log-sum-exp beyond which the fused kernel's
gradient loses digits that count.
"""


def rounds_rows(node: Node) -> bool | None:
    """Whether a node of fused attention has rows, masked in full by large finite numbers, whose
    gradient is wrong.

    The kernel takes softmax anew as exp(S - lse), and lse = -1e9 + log N has no digit left of log
    N: each weight is 1 in place of 1/N. None: it cannot be seen, for an activation checkpoint (or
    another hook) packed it.
    """
    mask, kept = saved(node, RAW + "attn_mask"), saved(node, RAW + "logsumexp")
    if mask.unpack_hook is not None:
        return None
    # no mask; or the graph was freed, which the pass will say
    if mask.data is None or kept.data is None:
        return False
    if not _has_numbers(kept):  # a tracer's
        return None
    return bool((kept.data.abs() > LARGEST).any())


def is_singular(node: Node) -> bool:
    """Whether a node of det has a determinant that came out as 0, or may have: a hook packed it."""
    kept = saved(node, RAW + "result")
    if kept.unpack_hook is not None:
        return True
    if not _has_numbers(kept):  # a tracer's; or the graph was freed
        return False
    with without_modes():  # it is we who look, not `f`
        return bool((kept.data == 0).any())


def power(node: Node) -> tuple[Tensor, Tensor, bool] | None:
    """Base and exponent of a power of two tensors, and whether the base varies; None where the
    exponent does not.

    None also where the graph was freed, which the pass will say, and where a tracer keeps the
    numbers.
    """
    raw = saved(node, RAW + "exponent")
    if node.next_functions[1][0] is None or (raw.unpack_hook is None and not _has_numbers(raw)):
        return None
    return kept(node, "self"), kept(node, "exponent"), node.next_functions[0][0] is not None


def has_numbers(x: Any) -> bool:
    """Whether a tensor is there and has numbers, as a parameter has; a tracer's has none."""
    plain: Any = Tensor
    return getattr(x.__class__, "__torch_dispatch__", None) is plain.__torch_dispatch__


def _has_numbers(kept: Any) -> bool:
    """Whether what a node has saved is there and has numbers."""
    return has_numbers(kept.data)


def determinant(node: Node) -> tuple[Tensor, Tensor, Tensor]:
    """The values that a node of det has kept: the matrix, its pivots, and its determinant."""
    return kept(node, "A"), kept(node, "LU").diagonal(dim1=-2, dim2=-1), kept(node, "result")


def spectrum(node: Node) -> tuple[Tensor, bool, int]:
    """The values that a decomposition has kept, whether it divides by them,
    and which result they are.
    """
    if node.__class__.__name__ == "LinalgSvdBackward0":
        return kept(node, "S"), kept(node, "U").shape[-2] != kept(node, "Vh").shape[-1], 1
    return kept(node, "eigenvalues"), False, 0


def norm_of(node: Node) -> tuple[float, Tensor]:
    """The power that the node of a norm takes, and of what."""
    if node.__class__.__name__ == "DistBackward0":
        return kept(node, "p"), kept(node, "self") - kept(node, "other")
    return _power_of(node), kept(node, "self")


def _power_of(node: Node) -> float:
    return kept(node, "ord") if node.__class__.__name__.startswith("Linalg") else kept(node, "p")


def root_of(node: Node) -> tuple[float, Tensor]:
    """The power of a norm, 2 for a square root, and its value."""
    name = node.__class__.__name__
    square = name in ("SqrtBackward0", "HypotBackward0") or name in DEVIATIONS
    return 2.0 if square else _power_of(node), kept(node, DEVIATIONS.get(name, "result"))


_LOSSES = {
    f"{loss}Backward0"
    for loss in ("NllLoss", "NllLoss2D", "MseLoss", "BinaryCrossEntropy",
                 "BinaryCrossEntropyWithLogits", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss")
}  # fmt: skip
_SUMS, _MEANS = {"SumBackward0", "SumBackward1"}, {"MeanBackward0", "MeanBackward1"}


def reduction(value: Tensor) -> tuple[Literal["mean", "sum"] | None, torch.Size | None]:
    """The way in which the last operation made one number of many, where that can be seen, and the
    shape of the many.
    """
    node = value.grad_fn
    kind = type(node).__name__
    if kind in _LOSSES:
        return ("mean" if getattr(node, SAVED + "reduction") == 1 else "sum"), None
    if kind in _MEANS or kind in _SUMS:
        return ("mean" if kind in _MEANS else "sum"), torch.Size(
            getattr(node, SAVED + "self_sym_sizes")
        )
    return None, None


def received(node: Node) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """The shape and dtype of each gradient that a node receives;
    nothing where PyTorch cannot tell (nested tensors).
    """
    try:
        return [(tuple(data.shape), data.dtype) for data in node._input_metadata]
    except (RuntimeError, NotImplementedError):
        return []


class _RawSaved(dict[type, tuple[str, ...]]):
    """The attributes under which nodes of a class show what they saved, packed;
    of Functions none is kept.
    """

    def __missing__(self, kind: type) -> tuple[str, ...]:
        if issubclass(kind, BackwardCFunction):
            return (RAW + "tensors",)
        self[kind] = tuple(name for name in dir(kind) if name.startswith(RAW))
        return self[kind]


_RAW_SAVED = _RawSaved()


def is_packed(node: Node) -> bool:
    """Whether reading what a node saved calls a hook: an activation checkpoint, offloading.

    Runs none.
    """
    for name in _RAW_SAVED[node.__class__]:
        raw = look(node, name)
        for each in raw if raw.__class__ in (tuple, list) else (raw,):
            if each.unpack_hook is not None and not _is_kept(each):
                return True
    return False


hooks_on: Callable[[bool], Any] = _torch._autograd._top_saved_tensors_default_hooks
"""The two that have what is saved at this moment, asked with True; None where there are none."""


function_of: Callable[[type], type] = attrgetter("_forward_cls")
"""The Python `autograd.Function` whose backward a class of nodes is."""


# Every `@once_differentiable` wrapper runs this code object: the one sign of the decorator that is
# visible before the backward pass it guards.
_ONCE_CODE = once_differentiable(lambda ctx: None).__code__


def is_once_differentiable(function: type) -> bool:
    """Whether an `autograd.Function`'s backward wears `@once_differentiable`."""
    return getattr(getattr(function, "backward", None), "__code__", None) is _ONCE_CODE


# --- proof ----------------------------------------------------------------------------------------


def _below(result: Any) -> list[Node]:
    """The nodes below a result."""
    nodes = [result.grad_fn]
    for node in nodes:  # which grows
        nodes += [
            below for below, _ in node.next_functions if below is not None and below not in nodes
        ]
    return nodes


def _names(result: Any) -> dict[str, Node]:
    """The nodes below a result, by the names of their classes."""
    return {node.__class__.__name__: node for node in _below(result)}


def _raised(x: Tensor) -> Tensor:
    """A write to a view: of a power, to a differentiated exponent of 0."""
    whole = x.sin()
    whole[0].pow_(x[0, 0] * 0)
    return whole


def _gradient(result: Tensor, x: Tensor) -> Tensor:
    (gradient,) = grad([result.sum()], [x], [None], keep=True, build=True)
    return gradient  # type: ignore[return-value]


def _attention(x: Tensor, row: float) -> Node:
    q = x.expand(1, 1, 3, 4)
    mask = x.new_zeros(3, 3).index_fill(0, _ROWS[1:] - 3, row)
    # whatever kernels are switched off
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(q, q, q, attn_mask=mask)[0].grad_fn


def _embedding(x: Tensor, scaled: bool) -> Node:
    return F.embedding(_INDICES[0, :1], x, scale_grad_by_freq=scaled).grad_fn


def _triangle(x: Tensor) -> Tensor:
    return (x[0, :3].detach() * 0 + x.new_tensor([1.0, 2.0, 3.0])).diag() + 0 * x[:, :3]


def _packed(x: Tensor) -> bool:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        sine, attention = x.sin().grad_fn, _attention(x, 0.0)
    return is_packed(sine) and not is_packed(x.sin().grad_fn) and rounds_rows(attention) is None


_WITHOUT = () if DISTANCES else ("PdistBackwardBackward0",)
"""Classes that matter in other releases alone."""


def _says(function: Any, *names: str) -> bool:
    """Whether the code of a function has these names."""
    code = getattr(function, "__code__", function)
    return {*names} <= {*getattr(code, "co_names", ()), *getattr(code, "co_varnames", ())}


def _levels_are_told() -> bool:
    """Whether all use of forward mode passes the name that `_hooks` takes while a call runs."""
    way = (
        (eager_transforms._jvp_with_argnums, "dual_level"),
        (forward_ad.dual_level.__enter__, "enter_dual_level"),
        (forward_ad.enter_dual_level, "_enter_dual_level"),
        (
            forward_ad.enter_dual_level if levels is torch._C else levels._enter_dual_level,
            _ENTER_LEVEL,
        ),
    )
    return _ENTER_LEVEL in vars(levels) and all(_says(*each) for each in way)


def _passes_are_told() -> bool:
    """Whether all that users write for a reverse pass goes by the name that
    `_hooks` takes while a call runs.
    """
    home, name = PASSES
    return _says(eager_transforms._autograd_grad, "grad") and all(
        _says(home[each], name) and home[each].__globals__ is home for each in ("grad", "backward")
    )


def _repeats_are_told() -> bool:
    """Whether checkpoints make what runs their blocks again, and run them,
    by the names that `_hooks` takes.
    """
    home, name = vars(checkpoint), "_checkpoint_without_reentrant_generator"
    within = home.get(f"{name}_impl", home[name])  # from 2.14 on; before
    hooks = home["_checkpoint_hook"].__init__
    return (
        any(_says(code, REPEATS[1]) for code in hooks.__code__.co_consts)
        and _says(within, FRAMES[1])
        and within.__globals__ is hooks.__globals__ is home
    )


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0] * 1


class _Once(_Plain):
    backward = staticmethod(once_differentiable(_Plain.backward))  # pyright: ignore[reportAssignmentType]


_INDICES, _ROWS = torch.tensor([[0, 1, 2, 3]], device="cpu"), torch.tensor([0, 4], device="cpu")

GRAPHS: dict[str, Callable[[Tensor], Any]] = {
    "NativeLayerNormBackwardBackward0": lambda x: _gradient(F.layer_norm(x, (4,)).sin(), x),
    "NativeBatchNormBackwardBackward0": lambda x: _gradient(
        F.batch_norm(x, None, None, training=True).sin(), x
    ),
    "WeightNormInterfaceBackward0": lambda x: weight_norm(x, x[:, :1], 0),
    "SparseCooTensorWithDimsAndTensorsBackward0": lambda x: torch.sparse_coo_tensor(
        _INDICES, x[0], (4,), device="cpu", check_invariants=False
    ),
    "SparseCompressedTensorBackward0": lambda x: torch.sparse_csr_tensor(
        _ROWS, _INDICES[0], x[0], (1, 4), device="cpu"
    ),
    "HardsigmoidBackward0": F.hardsigmoid,
    "SincBackward0": torch.sinc,
    "I0Backward0": torch.special.i0,
    "SpecialI0EBackward0": torch.special.i0e,
    "SpecialI1Backward0": torch.special.i1,
    "SpecialI1EBackward0": torch.special.i1e,
    "LogcumsumexpBackward0": lambda x: torch.logcumsumexp(x, 0),
    "NativeLayerNormBackward0": lambda x: F.layer_norm(x, (4,)),
    "NativeGroupNormBackward0": lambda x: F.group_norm(x, 1),
    "NativeBatchNormLegitBackward0": lambda x: torch.ops.aten._native_batch_norm_legit(
        x, None, None, x[0].detach(), x[0].detach(), True, 0.1, 1e-5
    )[0],
    "NativeBatchNormLegitBackward1": lambda x: torch.ops.aten._native_batch_norm_legit.no_stats(
        x, None, None, True, 0.1, 1e-5
    )[0],
    "BatchNormWithUpdateBackward0": lambda x: torch.ops.aten._batch_norm_with_update(
        x, None, None, x[0].detach(), x[0].detach(), 0.1, 1e-5
    )[0],
    "SqrtBackward0": torch.sqrt,
    "HypotBackward0": lambda x: torch.hypot(x, x),
    "StdBackward0": torch.std,
    "StdMeanBackward0": lambda x: torch.std_mean(x)[0],
    "PdistBackward0": torch.pdist,
    "CdistBackward0": lambda x: torch.cdist(x, x, p=3.0),
    "CdistBackwardBackward0": lambda x: _gradient(torch.cdist(x, x + 1, p=3.0).sin(), x),
    "PdistBackwardBackward0": lambda x: _gradient(torch.pdist(x).sin(), x),
    "EmbeddingBagBackwardBackward0": lambda x: _gradient(
        F.embedding_bag(_INDICES[:, :3], x).sin(), x
    ),
    "LinalgDetBackward0": lambda x: torch.linalg.det(x[:, :3]),
    "CopySlices": _raised,
    "DivBackward0": lambda x: x / x,
    "ForeachPowBackward0": lambda x: torch._foreach_pow([x], [x])[0],  # pyright: ignore[reportPrivateImportUsage]
    "LinalgEigBackward0": lambda x: torch.linalg.eigvals(x[:, :3]),
    "LinalgEighBackward0": lambda x: torch.linalg.eigvalsh(x[:, :3]),
    "LinalgSvdBackward0": torch.linalg.svdvals,
    "PowBackward1": lambda x: x**x,
    "PowBackward2": lambda x: 2.0**x,
    "ProdBackward0": torch.prod,
    "ProdBackward1": lambda x: x.prod(0),
    "CumprodBackward0": lambda x: x.cumprod(0),
    "ScatterReduceBackward0": lambda x: x.scatter_reduce(0, _INDICES[:, :1], x, "prod"),
    "IndexReduceBackward0": lambda x: x.index_reduce(0, _INDICES[0, :3], x, "prod"),
    "LinalgVectorNormBackward0": lambda x: torch.linalg.vector_norm(x, 4),
    "NormBackward1": lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 4, [0]),
    "DistBackward0": lambda x: torch.dist(x, x.detach() + 1, 4),
    "RenormBackward0": lambda x: torch.renorm(x, 4, 0, 0.5),
    "AsStridedScatterBackward0": lambda x: torch.as_strided_scatter(x, x[0], (4,), (1,)),
    "MaskedSelectBackward0": lambda x: x.masked_select(x > 0),
    "NotImplemented": lambda x: torch.bincount(_ROWS, x[0, :2]),
    "Error": lambda x: _gradient(_Once.apply(x).sin(), x),
}
"""For each class of nodes that is told by its name, how a graph comes to have one."""

PRODUCTS = {
    **dict.fromkeys(("ProdBackward0", "ProdBackward1"), "prod"),
    "CumprodBackward0": "cumprod",
    "ScatterReduceBackward0": "scatter_reduce",
    "IndexReduceBackward0": "index_reduce",
}
"""Those of products, and what these are called."""

NORMS = ("LinalgVectorNormBackward0", "NormBackward1", "DistBackward0", "RenormBackward0")
"""Those of a power of |x|."""

DEVIATIONS = {"StdBackward0": "result", "StdMeanBackward0": "result0"}
"""Those of standard deviations, where PyTorch has zeros at 0; as what they save their value."""

SPECTRA = {
    "LinalgSvdBackward0": "singular values",
    "LinalgEighBackward0": "eigenvalues",
    "LinalgEigBackward0": "eigenvalues",
}
"""Those of decompositions, and the values that they divide by differences of."""

ROOTS = ("SqrtBackward0", "HypotBackward0", "PdistBackward0", "CdistBackward0", *DEVIATIONS)
"""Others that are near 0."""

LOOKS: dict[str, Callable[[Tensor], bool]] = {
    "whether an embedding scales gradients": lambda x: (
        [scales_by_frequency(_embedding(x, scaled)) for scaled in (True, False)] == [True, False]
    ),
    "whether a batch norm mixes samples": lambda x: (
        [
            is_training(
                _names(F.batch_norm(x, x[0].detach(), x[0].detach().abs(), training=t))[
                    "NativeBatchNormBackward0"
                ]
            )
            for t in (True, False)
        ]
        == [True, False]
    ),
    "the weights of norms": lambda x: (
        [
            weight(norm.grad_fn) is part.grad_fn
            for part in (x[0],)
            for norm in (
                F.layer_norm(x, (4,), part),
                F.batch_norm(x, None, None, part, training=True),
            )
        ]
        == [True, True]
    ),
    "whether the gradient of a batch norm does": lambda x: (
        [
            was_training(
                _names(
                    _gradient(
                        F.batch_norm(x, x[0].detach(), x[0].detach().abs(), training=t).sin(), x
                    )
                )["NativeBatchNormBackwardBackward0"]
            )
            for t in (True, False)
        ]
        == [True, False]
    ),
    "what a function was applied to": lambda x: (
        argument(torch.sinc(x).grad_fn).data_ptr() == x.data_ptr()
    ),
    "whether attention loses digits": lambda x: (
        [rounds_rows(_attention(x, row)) for row in (torch.finfo(x.dtype).min, -1.0, -torch.inf)]
        == [True, False, False]
    ),
    "whether a determinant is 0": lambda x: (
        [is_singular(torch.linalg.det(matrix).grad_fn) for matrix in (x[:2, :2], x[:2, :2] * 0)]
        == [False, True]
    ),
    "what was divided by": lambda x: factors((x / x[0]).grad_fn)[0].shape == x[0].shape,
    "what a product has multiplied": lambda x: (
        [len(factors(GRAPHS[name](x).grad_fn)) for name in PRODUCTS] == [1, 1, 1, 2, 2]
        and [underflows((x * scale).prod().grad_fn) for scale in (1.0, 1e-200)] == [False, True]
        and not factors(x.scatter_reduce(0, _INDICES[:, :1], x, "amax").grad_fn)
    ),
    "what was raised to what power": lambda x: (
        power((x ** x.detach()).grad_fn) is None
        and [getattr(part, "shape", part) for part in power((x ** x[0]).grad_fn) or ()]
        == [x.shape, x.shape[1:], True]
    ),
    "what a write to a view hides": lambda x: any(
        node.__class__.__name__ == "PowBackward1" and bool((kept(node, "exponent") == -1).all())
        for node in _below(_gradient(_raised(x), x))
    ),
    "of what a determinant was taken": lambda x: (
        [
            part
            for matrix in (_triangle(x), 2 * _triangle(x))
            for kept in (determinant(torch.linalg.det(matrix).grad_fn),)
            for part in (kept[0].trace(), kept[1].prod(), kept[2])
        ]
        == [6.0, 6.0, 6.0, 12.0, 48.0, 48.0]
    ),
    "what values a matrix has": lambda x: (
        [
            (part.shape, *rest, values.output_nr)
            for values in (
                torch.linalg.svdvals(x),
                torch.linalg.svdvals(x[:, :3]),
                torch.linalg.eigvalsh(x[:, :3]),
            )
            for part, *rest in [spectrum(values.grad_fn)]
        ]
        == [((3,), True, 1, 1), ((3,), False, 1, 1), ((3,), False, 0, 0)]
    ),
    "of what a norm was taken": lambda x: (
        [norm_of(f(x).grad_fn)[0] for f in (GRAPHS[name] for name in NORMS)] == [4.0] * len(NORMS)
        and norm_of(GRAPHS["DistBackward0"](x).grad_fn)[1].allclose(x.new_tensor(-1))
        and norm_of(GRAPHS[NORMS[0]](x).grad_fn)[1].data_ptr() == x.data_ptr()
    ),
    "what a norm or a root is": lambda x: (
        [root_of(y.grad_fn)[0] for y in (x.norm(3.0), x.sqrt(), torch.dist(x, x.detach() + 1, 4))]
        == [3.0, 2.0, 4.0]
        and all(
            root_of(y.grad_fn)[1].equal(y) for y in (x.sqrt(), x.std(0), torch.std_mean(x, 0)[0])
        )
    ),
    "what a node receives": lambda x: received(x.sin().grad_fn) == [((3, 4), x.dtype)],
    "whether a checkpoint packed what a node saved": _packed,
    "by what a loss made one number of many": lambda x: (
        [reduction(value) for value in (x.sum(), x.sum(0), x.mean(0), x.mean())]
        == [("sum", x.shape), ("sum", x.shape), ("mean", x.shape), ("mean", x.shape)]
        and [reduction(F.mse_loss(x, x, reduction=how))[0] for how in ("mean", "sum")]
        == ["mean", "sum"]
    ),
    "which Function a node belongs to": lambda x: (
        function_of(_Once.apply(x).grad_fn.__class__) is _Once
    ),
    "whether a Function is once_differentiable": lambda x: (
        is_once_differentiable(_Once) and not is_once_differentiable(_Plain)
    ),
    "whether f uses forward mode": lambda x: _levels_are_told(),
    "whether f takes derivatives itself": lambda x: _passes_are_told(),
    "how a checkpoint runs again": lambda x: _repeats_are_told(),
    "which functions checkpoints run": lambda x: (
        _says(vars(checkpoint)["checkpoint"], "__dynamo_disable")
        and hasattr(vars(checkpoint)["checkpoint"], "__wrapped__")
    ),
    "for which module functional_call runs": lambda x: (
        _says(torch.func.functional_call, "_functional_call")
        and _says(FUNCTIONAL_CALL, "module", SWAPS[1])
    ),
    "which hooks a module runs": lambda x: any(
        _says(code, "BackwardHook", WRAPPED[1])
        for code in torch.nn.Module._call_impl.__code__.co_consts
    ),
    **{
        f"what {name} is": lambda x, name=name, graph=graph: name in _names(graph(x))
        for name, graph in GRAPHS.items()
        if name not in _WITHOUT
    },
}
"""What is to be told of a graph, and whether it can be told of a tiny one: some 5 ms together."""


@cache
def prove() -> None:
    """Raise where this PyTorch does not answer as expected.

    In a thread of its own, where no mode of the caller is on.

    Whoever looks at a graph calls it where it meets a class of nodes for the first time.
    """
    failed: dict[str, BaseException | None] = {}

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = (
                torch.linspace(0.1, 1.2, 12, dtype=torch.float64, device="cpu")
                .reshape(3, 4)
                .requires_grad_()
            )
            for what, told in LOOKS.items():
                try:
                    if not told(x):
                        failed[what] = None
                except Exception as error:  # whatever is different, it is not what we know
                    failed[what] = error

    thread = threading.Thread(target=run, name="hodiff looks at PyTorch")
    thread.start()
    thread.join()
    if failed:
        cause = next((error for error in failed.values() if error is not None), None)
        raise HodiffError(
            f"torch {torch.__version__} does not report what hodiff needs to detect wrong "
            f"derivatives: {'; '.join(failed)}. So hodiff computes none. Use a supported release "
            f"of PyTorch ({'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}), or a "
            f"newer hodiff."
        ) from cause
