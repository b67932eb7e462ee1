"""What runs the list of operations of a step: TorchScript's interpreter, Python, or a compiler of PyTorch's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from hodiff._core import _settings
from hodiff._core._faults import interrupts
from hodiff._core._settings import Scope, Undo, assign

_torch: Any = torch._C
_private: Any = torch


class NotCompiled(Exception):
    """Why a step is not compiled, in words that end a sentence."""


def replayed(traced: fx.GraphModule, in_script: bool) -> Callable[..., Any]:
    """The list by TorchScript's interpreter as it stands; by Python, which is slower, where that lacks something."""
    _LazyGraphModule.force_recompile(traced)
    run: Any = partial(type(traced).forward, traced)  # not by the module, which hands each call on three times
    if in_script and hasattr(_torch, "_create_function_from_graph"):
        with suppress(_NotInterpreted):
            run = Script(traced).function()

    def replay(*inputs: Any) -> Any:
        with _torch._AutoDispatchBelowAutograd():
            return run(*inputs)

    return replay


class _NotInterpreted(Exception):
    """An operation, or an argument, that TorchScript's interpreter does not know."""


_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_OF_NUMBERS: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.neg: "neg",
    operator.floordiv: "floordiv",
    operator.truediv: "div",
    torch.sym_float: "Float",
}
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, type(None))


class Script:
    """A list of operations as a graph of TorchScript's, without its compiler: it runs in the same order."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced, self.graph = traced, _torch.Graph()
        self.values: dict[fx.Node, Any] = {}
        for node in traced.graph.nodes:
            self.values[node] = getattr(self, node.op)(node)

    def function(self) -> Callable[..., Any]:
        """The function that runs the graph."""
        self.graph.makeMultiOutputIntoTuple()
        run = _torch._create_function_from_graph("step", self.graph)
        run._set_ignore_amp(True)  # the list holds its casts
        return run

    def placeholder(self, node: fx.Node) -> Any:
        """An input: a tensor, or a number."""
        value = self.graph.addInput()
        if not isinstance(node.meta["val"], Tensor):
            value.setType(_number(node))
        return value

    def get_attr(self, node: fx.Node) -> Any:
        """A constant of the graph."""
        return self.graph.insertConstant(getattr(self.traced, str(node.target)))

    def output(self, node: Any) -> None:
        """The results of the graph."""
        for each in node.args[0]:
            self.graph.registerOutput(self.value(each, _torch.TensorType.get()))

    def call_function(self, node: Any) -> Any:
        """An operation, with all arguments that its schema has."""
        schema = getattr(node.target, "_schema", None)
        integer, tensor = _torch.IntType.get(), _torch.TensorType.get()
        if node.target is operator.getitem and isinstance(self.values[node.args[0]], list):
            return self.values[node.args[0]][node.args[1]]
        if node.target is operator.getitem:
            return self.made("aten::__getitem__", map(self.value, node.args, (tensor, integer)), [tensor])
        if node.target in _OF_NUMBERS:
            if not _as_in_python(node):
                raise _NotInterpreted
            given = [self.value(each, integer) for each in node.args]
            return self.made(f"aten::{_OF_NUMBERS[node.target]}", given, [_number(node)])
        if schema is None:
            raise _NotInterpreted
        named = {each.name: each.default_value for each in schema.arguments} | node.kwargs
        named |= dict(zip(named, node.args, strict=False))
        given = [self.value(named[each.name], each.type) for each in schema.arguments]
        kinds = [each.type for each in schema.returns]
        return self.made(schema.name, given, [_number(node) if kind.kind() == "NumberType" else kind for kind in kinds])

    def made(self, name: str, given: Iterable[Any], kinds: Sequence[Any]) -> Any:
        """The result of an operation, or its several."""
        node = self.graph.insertNode(self.graph.create(name, list(given), len(kinds)))
        if not name.startswith("prim::") and node.schema() == "(no schema)":
            raise _NotInterpreted
        results = list(node.outputs())
        for result, kind in zip(results, kinds, strict=True):
            result.setType(kind)
        return results[0] if len(kinds) == 1 else results

    def value(self, x: Any, kind: Any) -> Any:
        """A result, or a constant, as an argument of its kind."""
        if isinstance(x, fx.Node):
            return self.values[x]
        if x is not None and kind.kind() == "OptionalType":
            kind = kind.getElementType()
        if isinstance(x, (list, tuple)):
            of = kind.getElementType()
            return self.made("prim::ListConstruct", [self.value(each, of) for each in x], [_torch.ListType(of)])
        if isinstance(x, torch.memory_format):
            x = _FORMATS.index(x)
        if not isinstance(x, _CONSTANTS):
            raise _NotInterpreted
        return self.graph.insertConstant(float(x) if type(x) is int and kind.kind() == "FloatType" else x)


def _number(node: fx.Node) -> Any:
    """The type of a number that a size or an argument of the loss gives; `item()` has one, too."""
    value = node.meta["val"]
    if isinstance(value, (float, torch.SymFloat)):
        return _torch.FloatType.get()
    if type(value) in (int, torch.SymInt):
        return _torch.IntType.get()
    raise _NotInterpreted


def _as_in_python(node: Any) -> bool:
    """Whether the interpreter gives what Python does: its 1 / 0 is infinite, 1.0 // 0.1 is 10, integers overflow."""
    if node.target is operator.truediv:
        return isinstance(node.args[1], (int, float)) and node.args[1] != 0
    integer = _number(node) == _torch.IntType.get()
    if node.target is operator.mul and integer:  # of sizes, which are not that large
        return all(_bounds(each.meta["val"]).lower >= 0 for each in node.all_input_nodes)
    return node.target is not operator.floordiv or integer


def _bounds(number: Any) -> Any:
    """The range of a number that varies, as far as the guards go."""
    return number.node.shape_env.bound_sympy(number.node.expr)


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
    lazy = [i for i, x in enumerate(given) if isinstance(x, Tensor) and _is_lazy(x)]
    return partial(_with_copies, run, lazy) if lazy else run


def _is_lazy(x: Any) -> bool:
    """Whether its memory holds other numbers. Dynamo guards it; kernels of inductor read the memory as it is."""
    return x.is_neg() or x.is_conj() or x._is_zerotensor()


def _with_copies(run: Callable[..., Any], lazy: Sequence[int], *inputs: Any) -> Any:
    given = [*inputs]
    for i in lazy:
        x = given[i].detach()
        given[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return run(*given)


def _by_inductor(traced: fx.GraphModule, stand_ins: Sequence[Any]) -> Callable[..., Any]:
    """The list as kernels; on the CPU C++ calls them, too: from Python a call takes longer than a small kernel."""
    from torch._inductor import exc, standalone_compile

    graph, stand_ins = fx.Graph(), [*stand_ins]
    graph.output(graph.graph_copy(traced.graph, {}))  # the list itself stays as it is
    traced = fx.GraphModule(traced, graph)
    numbers = _numbers_apart(traced, stand_ins)
    if any(map(_divides_by_zero, traced.graph.nodes)):
        raise NotCompiled(
            "it has // or % by a Python number that changes and may be 0, where kernels give 0 or end the process; "
            "backend='replay' raises there"
        )
    _draw_as_eager(traced.graph)
    in_cpp = all(isinstance(x, Tensor) for x in stand_ins) and all(map(_on_cpu, traced.graph.nodes))
    failed: Exception | None = None
    for wrapper in (True, False) if in_cpp else (False,):
        with Scope(partial(_set_inductor, wrapper)):
            try:
                run = standalone_compile(traced, stand_ins, dynamic_shapes="from_tracing_context")
                return partial(_with_numbers, run, numbers) if numbers else run
            except Exception as error:  # no compiler; an ASCII locale; an operation that has no form in C++
                known = wrapper or isinstance(error, (exc.InductorError, UnicodeDecodeError))
                if not known or interrupts(error):
                    raise
                failed = error
    why = f"{failed}".partition("\n")[0]
    if "file too short" in why:
        why += "; a process that was killed while it compiled has left that file: delete it"
    raise NotCompiled(f"inductor fails ({why}); backend='replay' needs no compiler") from failed


def _numbers_apart(traced: fx.GraphModule, stand_ins: list[Any]) -> Callable[..., Any] | None:
    """Takes what gives floats out of numbers alone from the list, which gets them as inputs instead; Python does it.

    Kernels round products of integers to float32, let them overflow, and raise nothing.
    """
    graph, alone = traced.graph, dict[fx.Node, None]()
    for node in graph.nodes:
        number = node.op == "call_function" and not isinstance(node.meta["val"], (Tensor, list, tuple))
        if number and all(each in alone or each.op == "placeholder" for each in node.all_input_nodes):
            alone[node] = None
    calls = {node: [user for user in node.users if user.op == "call_function" and user not in alone] for node in alone}
    wanted = [node for node, users in calls.items() if users and isinstance(node.meta["val"], torch.SymFloat)]
    if not wanted:
        return None
    numbers, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "placeholder" or node in alone:
            copies[node] = numbers.node_copy(node, copies.__getitem__)
    numbers.output([copies[node] for node in wanted])
    first = next(node for node in graph.nodes if node.op != "placeholder")
    stand_in: Any = next(x for x in stand_ins if isinstance(x, Tensor))
    with graph.inserting_before(first), stand_in.fake_mode:
        given = [graph.placeholder(f"number_{index}") for index in range(len(wanted))]
        for number, node in zip(given, wanted, strict=True):
            number.meta["val"] = torch.empty((), dtype=torch.float64, device="cpu")
            stand_ins.append(number.meta["val"])
            item = graph.call_function(_private.ops.aten._local_scalar_dense.default, (number,))
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item, calls[node].__contains__)
    for node in reversed(alone):
        if not node.users:
            graph.erase_node(node)
    traced.recompile()
    for node in numbers.nodes:  # a tensor whose stand-in is kept cannot be swapped
        node.meta = {}
    return fx.GraphModule(traced, numbers).forward


def _with_numbers(run: Callable[..., Any], numbers: Callable[..., Any], *inputs: Any) -> Any:
    return run(*inputs, *[torch.scalar_tensor(each, dtype=torch.float64, device="cpu") for each in numbers(*inputs)])


def _divides_by_zero(node: fx.Node) -> bool:
    """Whether it may, as far as the guards go, in numbers of Python."""
    if node.target not in (operator.floordiv, operator.mod):
        return False
    divisor: Any = node.args[1].meta["val"] if isinstance(node.args[1], fx.Node) else node.args[1]
    if not isinstance(divisor, (torch.SymInt, torch.SymFloat)):
        return divisor == 0
    return bool(_bounds(divisor).lower <= 0 <= _bounds(divisor).upper)


def _draw_as_eager(graph: fx.Graph) -> None:
    """`bernoulli(p)` is `empty_like(p).bernoulli_(p)`, which draws the same; inductor has float32 numbers for it."""
    aten: Any = _private.ops.aten
    for node in graph.nodes:
        if node.target is aten.bernoulli.default:
            contiguous: Any = {"memory_format": torch.contiguous_format}
            with graph.inserting_before(node):
                node.args = (graph.call_function(aten.empty_like.default, node.args[:1], contiguous), node.args[0])
            node.target = aten.bernoulli_.Tensor


def _on_cpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.device.type == "cpu"


class _Each(set[str]):
    """Says that it has each name."""

    def __contains__(self, name: object) -> bool:
        return True


_MANY = 4096
"""From how many numbers on a kernel of its own pays for tanh."""


def _set_inductor(wrapper: bool, undo: Undo) -> None:
    """Its settings. MKL takes a third of the time of inductor's loops for tanh of many float32."""
    import torch._inductor.config as settings
    from torch._dynamo.symbolic_convert import TensorifyState
    from torch._inductor import lowering

    assign(undo, settings, {"fallback_random": True, "cpp_wrapper": wrapper})
    # which Python floats Dynamo shall trace anew as constants: none, since they are inputs in the list
    assign(undo, TensorifyState, {"force_specializations": _Each()})
    # PyTorch's cache takes kernels for vectors of one width for those of another
    cached = _private.compiler.config
    assign(undo, cached, {"cache_key_tag": f"{cached.cache_key_tag} {torch.backends.cpu.get_cpu_capability()}"})
    if not torch.backends.mkl.is_available():
        return
    table, tanh = lowering.lowerings, _private.ops.aten.tanh.default
    fused, apart = table[tanh], lowering.fallback_handler(tanh, add_to_fallback_set=False)

    def lowered(x: Any) -> Any:
        count = x.get_numel()
        many = x.get_dtype() == torch.float32 and x.get_device().type == "cpu" and count.is_number and count >= _MANY
        return (apart if many else fused)(x)

    undo += [partial(table.__setitem__, tanh, fused)]
    table[tanh] = lowered
