"""The ways to run the list of operations of a step: Python, or a compiler of PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _device, _pytree

from hodiff._core import _settings, _versions
from hodiff._core._faults import interrupts
from hodiff._core._settings import Scope, Undo, assign

# --- what steps ask of PyTorch by private names; those of Dynamo, which loads slowly: `_dynamo` ---

_private: Any = torch
_torch: Any = _private._C
trees: Any = _pytree
"""Containers, as Dynamo and `make_fx` know them."""
FunctionOperator: Any = _private._ops.HigherOrderOperator
"""The class of operators that take functions."""
ZEROS_WITHOUT_MEMORY: Any = _private.ops.aten._efficientzerotensor.default
hooks_for_all: Callable[[], object] = torch.nn.modules.module._has_any_global_hook
"""Whether modules have hooks that were given to all of them."""
ON_DEVICE: Any = _device.DeviceContext
"""The class of the mode that `with torch.device(...)` is."""
scaled: Any = _private._foreach_mul
"""A list of tensors times one number."""


def running_wrapper() -> Any:
    """The DistributedDataParallel whose forward runs; None outside of any."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


class NotCompiled(Exception):
    """Why a step is not compiled, in words that end a sentence."""


def replayed(traced: fx.GraphModule) -> Callable[..., Any]:
    """The list as one Python function of nothing but calls."""
    run = _straight(traced)

    def replay(*inputs: Any) -> Any:
        with _torch._AutoDispatchBelowAutograd():
            return run(*inputs)

    return replay


def _straight(traced: fx.GraphModule) -> Callable[..., Any]:
    """The text of that function, run: each operation by name,
    each result gone after its last use.
    """
    names, known = dict[fx.Node, str](), dict[str, Any]()
    inputs, lines = list[str](), list[str]()
    last = {given: node for node in traced.graph.nodes for given in node.all_input_nodes}
    for number, node in enumerate(traced.graph.nodes):
        names[node] = f"v{number}"
        if node.op == "placeholder":
            inputs.append(names[node])
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], names, known)}")
        elif node.op == "get_attr":
            names[node] = _text(getattr(traced, str(node.target)), names, known)
        else:
            given = [_text(x, names, known) for x in node.args]
            given += [f"{name}={_text(x, names, known)}" for name, x in node.kwargs.items()]
            lines.append(
                f"{names[node]} = {_text(_called(node), names, known)}({', '.join(given)})"
            )
            over = [
                names[x]
                for x in node.all_input_nodes
                if last[x] is node and x.op == "call_function"
            ]
            lines.extend([f"del {', '.join(over)}"] if over else [])
    exec("\n ".join([f"def run({', '.join(inputs)}):", *lines]), known)
    return known["run"]


def _text(x: Any, names: dict[fx.Node, str], known: dict[str, Any]) -> str:
    """An argument as it is written; what has no literal gets a name."""
    if isinstance(x, fx.Node):
        return names[x]
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(_text(each, names, known) for each in x)}]"
    if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
        return repr(x)
    known[name := f"c{len(known)}"] = x
    return name


_PLAIN = frozenset({
    "mul.Tensor", "add.Tensor", "sub.Tensor", "div.Tensor", "mul.Scalar", "add.Scalar",
    "sub.Scalar", "div.Scalar", "mm", "addmm", "bmm", "t", "tanh", "neg", "exp", "sin", "cos",
    "sqrt", "pow.Tensor_Scalar", "sum.dim_IntList", "sum", "select.int", "unsqueeze", "squeeze.dim",
    "transpose.int", "permute", "clone", "reciprocal", "cat", "mean", "ones_like", "zeros_like",
    "sigmoid", "where.self", "view", "expand",
})  # fmt: skip
"""Operations that PyTorch calls faster by a function or method of its own,
with the same arguments.
"""


def _called(node: fx.Node) -> Any:
    """The callable that runs the operation of a node in the least time."""
    name = f"{node.target}".removeprefix("aten.").removesuffix(".default")
    if name in _PLAIN:
        plain = name.partition(".")[0]
        return getattr(torch, plain, None) or getattr(Tensor, plain)
    target: Any = node.target
    return target._op if _versions.schema_of(target) is not None else target


def compiled(
    traced: fx.GraphModule, stand_ins: Sequence[Any], given: Sequence[Any], backend: str
) -> Callable[..., Any]:
    """The list by one of the backends that `torch.compile` knows."""
    with _settings.grad_mode(False):
        if backend == "inductor":
            run = _by_inductor(traced, stand_ins)
        else:
            from torch._dynamo.backends.registry import lookup_backend

            run = lookup_backend(backend)(traced, list(stand_ins))
    # of these the memory holds other numbers: Dynamo guards that, and kernels of inductor read the
    # memory as it is
    tensors = [(i, x) for i, x in enumerate(given) if isinstance(x, Tensor)]
    lazy = [i for i, x in tensors if x.is_neg() or x.is_conj() or x._is_zerotensor()]
    return partial(_with_copies, run, lazy) if lazy else run


def _with_copies(run: Callable[..., Any], lazy: Sequence[int], *inputs: Any) -> Any:
    given = [*inputs]
    for i in lazy:
        x = given[i].detach()
        given[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return run(*given)


def _by_inductor(traced: fx.GraphModule, stand_ins: Sequence[Any]) -> Callable[..., Any]:
    """The list as kernels; on the CPU C++ calls them, too:
    from Python a call takes longer than a small kernel.
    """
    from torch._inductor import exc, standalone_compile

    graph, stand_ins = fx.Graph(), [*stand_ins]
    graph.output(graph.graph_copy(traced.graph, {}))  # the list itself stays as it is
    traced = fx.GraphModule(traced, graph)
    _draw_as_eager(traced.graph)
    in_cpp = all(isinstance(x, Tensor) for x in stand_ins) and all(map(_on_cpu, traced.graph.nodes))
    failed: Exception | None = None
    for wrapper in (True, False) if in_cpp else (False,):
        try:
            with Scope(partial(_set_inductor, wrapper)):
                return standalone_compile(traced, stand_ins, dynamic_shapes="from_tracing_context")
        except Exception as error:
            # no compiler; an ASCII locale; an operation that has no form in C++
            known = wrapper or isinstance(error, (exc.InductorError, UnicodeDecodeError))
            if not known or interrupts(error):
                raise
            failed = error
            if isinstance(error, UnicodeDecodeError):  # what is imported by half fails otherwise
                break
    why = f"{failed}".partition("\n")[0]
    if "file too short" in why:
        why += "; a process that was killed while it compiled has left that file: delete it"
    raise NotCompiled(f"inductor fails ({why}); backend='replay' needs no compiler") from failed


def _draw_as_eager(graph: fx.Graph) -> None:
    """`bernoulli(p)` is `empty_like(p).bernoulli_(p)`, which draws the same;
    inductor has float32 numbers for it.
    """
    aten: Any = _private.ops.aten
    for node in graph.nodes:
        if node.target is aten.bernoulli.default:
            contiguous: Any = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                node.args = (
                    graph.call_function(aten.empty_like.default, node.args[:1], contiguous),
                    node.args[0],
                )
            node.target = aten.bernoulli_.Tensor


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.device.type == "cpu"


_MANY = 4096
"""From how many numbers on a kernel of its own pays for tanh."""


def _set_inductor(wrapper: bool, undo: Undo) -> None:
    """Choose inductor's settings.

    MKL takes a third of the time of inductor's loops for tanh of many float32.
    """
    import torch._inductor.config as settings
    from torch._inductor import lowering

    assign(undo, settings, {"fallback_random": True, "cpp_wrapper": wrapper})
    # PyTorch's cache takes kernels for vectors of one width for those of another
    cached = _private.compiler.config
    assign(
        undo,
        cached,
        {"cache_key_tag": f"{cached.cache_key_tag} {torch.backends.cpu.get_cpu_capability()}"},
    )
    if not torch.backends.mkl.is_available():
        return
    table, tanh = lowering.lowerings, _private.ops.aten.tanh.default
    fused, apart = table[tanh], lowering.fallback_handler(tanh, add_to_fallback_set=False)

    def lowered(x: Any) -> Any:
        count = x.get_numel()
        many = (
            x.get_dtype() == torch.float32
            and x.get_device().type == "cpu"
            and count.is_number
            and count >= _MANY
        )
        return (apart if many else fused)(x)

    undo += [partial(table.__setitem__, tanh, fused)]
    table[tanh] = lowered
