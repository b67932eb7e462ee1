"""Dynamo in front of a step: it follows the loss, and guards what the loss reads.

All that is known of it is here.
"""

from __future__ import annotations

import difflib
import gc
import itertools
import logging
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._guards
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import eval_frame, exc

from hodiff._core import _hooks, _settings
from hodiff._core._faults import interrupts
from hodiff._core._settings import Scope, Undo, assign
from hodiff.errors import InputError
from hodiff.steps import _shadows
from hodiff.steps._backends import NotCompiled, trees

_torch: Any = torch._C

_SETTINGS = {
    "trace_autograd_ops": True,
    "skip_nnmodule_hook_guards": False,
    "allow_rnn": True,
    "optimize_ddp": False,
    "suppress_errors": False,
    "error_on_nested_fx_trace": False,  # what the user has compiled runs as it is in the loss
    "specialize_int": True,  # Python numbers are constants, each with a graph
    "specialize_float": True,
    # so that `torch.utils.swap_tensors` may swap parameters
    "invalidate_compile_context_weakrefs": True,
}

_names = itertools.count()

lock = threading.RLock()
"""Held for a compilation: its settings are those of the process."""


def fresh(function: Any) -> Any:
    """The function with code of its own: by that Dynamo keeps graphs, limits,
    and which sizes vary.
    """
    code = function.__code__.replace(co_name=f"step_{next(_names)}")
    return types.FunctionType(code, function.__globals__, closure=function.__closure__)


def settings() -> Scope[None]:
    """The settings of a compilation.

    They take longer to set than many a step, so calls begin without them.
    """
    return Scope(_enter)


def _enter(undo: Undo) -> None:
    assign(undo, torch._dynamo.config, _SETTINGS)
    assign(undo, _shadows.inside, {"on": True, "order": 0})
    assign(undo, _hooks.met, {"threads": {}})
    for name in _LOGGERS:
        assign(undo, logging.getLogger(f"torch.{name}"), {"disabled": True})
    undo += [partial(sys.setrecursionlimit, sys.getrecursionlimit())]  # inductor raises it
    # PyTorch's own calls of what it deprecates, which end a compilation where warnings are errors
    warned: Any = warnings.filters
    own = ("ignore", None, Warning, re.compile(r"torch\b"), 0)
    undo += [lambda: warned.__setitem__(slice(None), [each for each in warned if each is not own])]
    warned.insert(0, own)


_LOGGERS = (
    "_subclasses.fake_tensor",  # wrong shapes, which the eager loss reports
    "_inductor.ir",  # operations without a form in C
    "_inductor.standalone_compile",  # graphs that cannot be saved
    "_dynamo.convert_frame",  # the limit of graphs, which the step tells
)


def state() -> tuple[torch.dtype, torch.dtype]:
    """Global state that a loss may read and Dynamo does not guard,
    to be guarded as an argument is.
    """
    return torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")


class Held(Exception):
    """Guards hold, and nothing ran; without words."""


def run(function: Any, args: Any, kwargs: Any) -> None:
    """Run what has been compiled of a function, if its guards hold; nothing is compiled."""
    prior = set_eval_frame(eval_frame._callback_from_stance(False))
    try:
        function(state(), *args, **kwargs)
    finally:
        set_eval_frame(prior)


def unheld(compiled: Any, args: Any, kwargs: Any) -> str:
    """The guards that do not hold, in PyTorch's words; empty where those of a graph do.

    Nothing runs.
    """
    with Scope(_ask):
        try:
            compiled(state(), *args, **kwargs)
        except (exc.RecompileError, Held) as error:
            return str(error)
    return ""


def _ask(undo: Undo) -> None:
    assign(undo, torch._dynamo.config, {"error_on_recompile": True})
    assign(undo, _shadows.inside, {"probing": True})


def numbers(guards: str) -> list[str]:
    """The Python numbers among them."""
    return [re.sub(r"G\['__import_\w+'\]\.", "", name) for name in _NUMBER.findall(guards)]


_NUMBER = re.compile(r"- \d+/\d+: ((?!len\()\S+) == -?[\d.]+(?:e[-+]?\d+)?\s")
"""Of the guards that do not hold those of numbers; how long something is, is none."""


def compiler(build: Any, ran: Any) -> Any:
    """Dynamo's backend for a step, which it does not keep alive: it is given weak methods.

    Args:
        build: Makes the graph from the inputs, given what Dynamo has seen.
        ran: Is given the graph and the inputs in each call, and gives the loss.
    """

    def backend(module: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        if not _shadows.inside.on:
            raise NotCompiled("compiled without its settings")
        followed = Followed(module)
        graphs: list[Any] = []

        def run(*inputs: Any) -> Any:
            if _shadows.inside.probing:
                raise Held
            if not graphs:
                with lock:
                    # not before the guards are made: the loss may change what they hold
                    if not graphs:
                        graphs.append(_made(build(), inputs, followed))
            return ran()(graphs[0], inputs)

        return run

    return backend


def _made(build: Any, inputs: Any, followed: Followed) -> Any:
    """The graph, for one size alone where it cannot be for all."""
    try:
        with torch._guards.tracing(followed.context):
            return build(inputs, followed)
    except Exception as error:
        if followed.varies and not interrupts(error):
            raise SizesVary from error
        raise
    finally:
        followed.forget()


class SizesVary(Exception):
    """A loss cannot be traced with sizes that vary."""


class Followed:
    """The code and values of a loss that Dynamo has seen.

    Attributes:
        context: Its context of tracing.
        stand_ins: Its tensors for the inputs, and its sizes for those that vary.
        varies: Whether any does.
        order: Up to which order the loss has derivatives, the gradient included, at most.
        inner: By which inputs the loss itself differentiates.
        batched: Whether a derivative of it may be batched.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
        nodes = [node for part in parts for node in part.graph.nodes]
        (results,) = nodes[len(module.graph.nodes) - 1].args
        if len(results) != 1:
            raise NotCompiled("it stores a tensor in a Python object; return that as aux")
        if any(
            node.target in ("item", "tolist", torch.Tensor.item, torch.Tensor.tolist)
            for node in nodes
        ):
            raise NotCompiled("it reads the number that a tensor holds; leave it in the tensor")
        grads = [node for node in nodes if node.target is torch.autograd.grad]
        increments = sum("_grad_increment_nesting" in str(node.target) for node in nodes)
        self.order = 1 + len(grads) + increments + _shadows.inside.order
        self.batched = any("_vmap_increment_nesting" in str(node.target) for node in nodes)
        self.batched |= (
            any(node.kwargs.get("is_grads_batched") for node in grads) or _shadows.inside.order > 0
        )
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.inner = [
            i
            for i, node in enumerate(inputs)
            if any(node in trees.tree_leaves(grad.args[1:2]) for grad in grads)
        ]
        self.stand_ins: Any = [node.meta["example_value"] for node in inputs]
        # the others are sizes
        self.varies = not all(isinstance(x, torch.Tensor) for x in self.stand_ins)
        self.context: Any = torch._guards.TracingContext.get()

    def forget(self) -> None:
        """Hold no stand-ins: a tensor whose stand-in is kept cannot be swapped."""
        self.context = self.stand_ins = None


def forget() -> None:
    """Collect what a failed compilation left:
    some of it puts back the thread's dispatch keys when it goes.
    """
    with _settings.recording(), _torch._PreserveDispatchKeyGuard():
        gc.collect()


def check_backend(name: str) -> None:
    """Raise unless there is a backend of that name."""
    known = [
        "replay",  # the list of the others takes long: it imports them
        *(torch.compiler.list_backends(exclude_tags=None) if name != "replay" else ()),
    ]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
        raise InputError(
            f"backend: got {name!r}, expected 'inductor', 'replay', or a name that torch.compile "
            f"knows"
            + (f"; did you mean {near[0]!r}?" if near else f" ({', '.join(map(repr, known[1:]))}).")
        )


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))

_REASONS = {
    r"Skip inlining function <function (\w+) [\s\S]*reason: hodiff: ": (
        "it calls hodiff's \\1, which PyTorch's tracer cannot follow; call it outside, "
        "and pass what it gives"
    ),
    r"Cannot access data pointer": "it reads numbers otherwise than by PyTorch's operations, "
    "as NumPy does",
    r"(Unsupported|setattr\(\) on) Tensor\.requires_grad|through calling `requires_grad_": (
        "it assigns x.requires_grad, or sets it on a tensor from outside of it; "
        "write x = x.detach().requires_grad_(), "
        "or pass a tensor that requires grad"
    ),
    r"requires_grad_\(\) called on it": "it stores a tensor in a Python object; return that as aux",
    r"autograd\.grad\(\) received an argument of type": (
        "it gives torch.autograd.grad an iterator or a view of a dict, such as net.parameters(); "
        "write list(...)"
    ),
    r"_LegacyVariableBase": "it uses torch.autograd.Variable; write x, or "
    "x.detach().requires_grad_()",
    r"mutating `\.data`": "it writes to .data; compute a tensor: z = (z + "
    "step).detach().requires_grad_()",
    r"function \w+_norm .*GradTrackingTensor": (
        "PyTorch's tracer cannot follow its forward mode through this norm layer; hodiff.jvp(f, x, "
        "v, create_graph=True) compiles"
    ),
    r"FakeTensorDeviceMismatch.*\bmeta\b|"
    r"fake tensors[\s\S]*GradTrackingTensor[\s\S]*BatchedTensor": (
        "PyTorch's tracer cannot follow forward mode within a vmap, as torch.func.hessian has it; "
        "use hodiff.hessian, or torch.func.jacrev of torch.func.grad"
    ),
    r"Missing `as_proxy\(\)`": "it uses an object that PyTorch's tracer does not know, such as a "
    "torch.Generator",
    r"[gG]uard on data-dependent expression": (
        "what runs would depend on a number that a tensor holds, as in BatchNorm(momentum=None) "
        "or if x.item() > 0; "
        "leave it in the tensor"
    ),
    r"[rR]ecompile_?[lL]imit": (
        "it has eight graphs, for as many kinds of arguments, attributes and settings; "
        "pass what changes in every step as a tensor"
    ),
    r"aten::_scaled_dot_product\w+_backward is not implemented": (
        "it differentiates attention twice, which PyTorch's fused kernels cannot; call it under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), in eager mode, too"
    ),
    r"unknown module>\.Random\.": "it draws from Python's random; draw outside, "
    "and pass the number as an argument",
    r"tp_iternext_impl": "it calls next() on an iterator of Python's; call it outside, "
    "and pass what it gives",
    r"Observed exception[\s\S]*\bdata_ptr\b": "it reads where a tensor lies, by data_ptr()",
    r"function `(manual_seed|[gs]et_rng_state)`": "it reads or sets the state of random numbers; "
    "do that outside",
}
"""Ours for words of PyTorch's that say nothing to a caller."""


def inner(error: BaseException) -> BaseException | None:
    """The exception behind Dynamo's own."""
    return getattr(error, "inner_exception", None) or error.__cause__


def reason(error: BaseException) -> str:
    """The reason why a step was not compiled, and the line of the loss, in a line."""
    frames = [
        each
        for each in getattr(error, "real_stack", None) or ()
        if not each.filename.startswith(_OWN)
    ]
    if not frames:
        return _words(error)
    code = f": `{frames[-1].line[:100]}`" if frames[-1].line else ""
    return f"{_words(error)} (line {frames[-1].lineno} of {Path(frames[-1].filename).name}{code})"


def _words(error: BaseException) -> str:
    cause = inner(error)
    if ours := [each for each in (error, cause) if isinstance(each, NotCompiled)]:
        return str(ours[0])
    text = f"{type(error).__name__}: {error}\n{cause}"
    if told := [
        match.expand(words)
        for pattern, words in _REASONS.items()
        if (match := re.search(pattern, text))
    ]:
        return told[0]
    if cause is not None and not isinstance(error, exc.Unsupported):
        error = cause
    explained = re.search(r"Explanation:(.*?)\n\s*(?:Hint|Developer debug)", str(error), re.DOTALL)
    words = explained[1].strip() if explained else ""
    words = words or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return " ".join(words.split())[:300].rstrip(".")
