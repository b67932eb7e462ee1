"""Dynamo in front of a step: it follows the loss, and guards what the loss reads.

All that is known of it is here.
"""

from __future__ import annotations

import difflib
import gc
import inspect
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
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import eval_frame, exc

import hodiff
from hodiff._core import _hooks, _settings
from hodiff._core._faults import interrupts
from hodiff._core._modules import Selection
from hodiff._core._settings import Scope, Undo, assign
from hodiff._core._versions import uncompiled
from hodiff.errors import InputError
from hodiff.fields._expansions import Estimate
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
    assign(undo, inside, {"on": True, "order": 0})
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
    assign(undo, inside, {"probing": True})


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
        if not inside.on:
            raise NotCompiled("compiled without its settings")
        followed = Followed(module)
        graphs: list[Any] = []

        def run(*inputs: Any) -> Any:
            if inside.probing:
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
        self.order = 1 + len(grads) + increments + inside.order
        self.batched = (
            inside.order > 0
            or any("_vmap_increment_nesting" in str(node.target) for node in nodes)
            or any(node.kwargs.get("is_grads_batched") for node in grads)
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


# --- stand-ins for the functions of hodiff, which Dynamo follows to see all that a loss reads -----


class _Making(threading.local):
    on = probing = False
    order = nested = 0


inside = _Making()
"""Whether this thread makes a step's graph, or only asks for guards; what shadows have noted of
that graph: the order of its derivatives, and in how many functions of hodiff the tracer is.
"""


@torch.compiler.assume_constant_result
def _is_on() -> bool:
    return inside.on


@torch.compiler.assume_constant_result
def _note(order: int, nested: int) -> bool:
    """Count; and whether this is inside the `f` of another call."""
    inside.order += order
    inside.nested += nested
    return inside.nested > max(nested, 0)


@uncompiled
def _left() -> None:
    """A break of the graph."""


def _need(condition: bool) -> None:
    if not condition:
        _left()


class _At:
    """`f` at a point: what it gives, and what derivatives are made of."""

    def __init__(self, f: Any, x: Any, args: Any, kwargs: Any, has_aux: bool, others: Any) -> None:
        self.names: Any = None
        if isinstance(x, (nn.Module, Selection)):
            chosen = dict(x.items() if isinstance(x, Selection) else x.named_parameters())
            self.names = [name for name, p in chosen.items() if p.requires_grad]
            self.x, given = [chosen[name] for name in self.names], x
        else:
            leaves, self.tree = trees.tree_flatten(x)
            tensor = isinstance(f, Tensor)
            self.x = leaves if tensor else [each.detach().requires_grad_() for each in leaves]
            given = trees.tree_unflatten(self.x, self.tree)
        with torch.enable_grad():
            value = f if isinstance(f, Tensor) else f(given, *args, **(kwargs or {}))
            self.value, self.aux = value if has_aux else (value, None)
            outputs, self.form = trees.tree_flatten(self.value)
            self.outputs = [each for each in outputs if isinstance(each, Tensor)]
            read = [each for each in trees.tree_leaves(others) if isinstance(each, Tensor)]
            self.total: Any = sum(each.sum() for each in [*self.outputs, *self.x, *read])
            self.slopes, self.result = self.plus(self.x), self.plus(self.value)

    def like(self, parts: list[Any]) -> Any:
        """Parts, in the structure of the point."""
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return trees.tree_unflatten(parts, self.tree)

    def plus(self, x: Any) -> Any:
        """Sums of a structure's tensors with the total, so that they depend on all that is here."""
        return trees.tree_map(lambda each: each + self.total.to(each), x)


def _rows(x: Tensor, batch_ndim: int) -> Tensor:
    return x.reshape(*x.shape[:batch_ndim], -1)


def _outer(a: Tensor, b: Tensor, batch_ndim: int) -> Tensor:
    flat = _rows(a, batch_ndim).unsqueeze(-1) * _rows(b, batch_ndim).unsqueeze(-2)
    return flat.reshape(*a.shape, *b.shape[batch_ndim:])


def _blocks(
    at: _At, rows: list[Tensor], form: Any, matrix: bool = False, batch_ndim: int = 0, **_: Any
) -> Any:
    """A Jacobian: for each row tensor one like the point."""
    if matrix:
        whole = [
            torch.cat([_rows(each, batch_ndim) for each in part], -1) for part in (rows, at.slopes)
        ]
        return _outer(whole[0], whole[1], batch_ndim)
    return form([at.like([_outer(row, each, batch_ndim) for each in at.slopes]) for row in rows])


def _stacked(parts: list[Tensor], given: Any, model: list[Tensor]) -> list[Tensor]:
    """One of them for each of the vectors given, which are like the model."""
    vectors = trees.tree_leaves(given)
    extra = vectors[0].shape[: vectors[0].ndim - model[0].ndim]
    _need([each.shape for each in vectors] == [(*extra, *each.shape) for each in model])
    return [each.expand((*extra, *each.shape)) for each in parts]


def _estimate(value: Tensor, samples: int | None = None, **_: Any) -> Any:
    if samples is None:
        return value
    return Estimate(value, None if samples == 1 else value, samples)


def _gradient_and_laplacian(at: _At, *, batch_ndim: int = 1, **_: Any) -> Any:
    single = at.value.shape[batch_ndim:].numel() == 1
    return at.slopes[0] if single else _outer(at.value, at.slopes[0], batch_ndim), at.result


def _penalty(at: _At, *_: Any, reduction: str = "mean", batch_ndim: int = 1, **__: Any) -> Tensor:
    rows = _rows(at.slopes[0], batch_ndim).sum(-1)
    return rows if reduction == "none" else rows.sum()


class _Derivatives:
    def __init__(self, u: Tensor, x: Tensor, *, batch_ndim: int = 1) -> None:
        self.result = u + x.sum()

    def __getitem__(self, index: Any) -> Tensor:
        _note(_length(index), 0)
        return self.result


def _length(index: Any) -> int:
    return 1 if isinstance(index, int) else len(index)


def _orders(series: Any) -> int:
    return len(series if isinstance(series[0], Tensor) else series[0])


CALCULUS = {
    "grad": (1, lambda at, **_: at.like(at.slopes)),
    "value_and_grad": (1, lambda at, **_: at.like(at.slopes)),
    "vjp": (1, lambda at, u, **_: at.like(_stacked(at.slopes, u, at.outputs))),
    "jvp": (
        1,
        lambda at, v, **_: trees.tree_unflatten(
            _stacked(trees.tree_leaves(at.result), v, at.x), at.form
        ),
    ),
    "jacobian": (
        1,
        lambda at, **options: _blocks(
            at, at.outputs, lambda parts: trees.tree_unflatten(parts, at.form), **options
        ),
    ),
    "per_sample_grad": (
        1,
        lambda at, batch, **_: at.like([_outer(at.value, each, 0) for each in at.slopes]),
    ),
    "gram": (1, lambda at, batch, **_: _outer(at.value, at.value, 0)),
    "hvp": (2, lambda at, v, **_: at.plus(v)),
    "cross_hvp": (2, lambda at, y, v, **_: at.like(_stacked(at.slopes, v, trees.tree_leaves(y)))),
    "hessian": (2, lambda at, **options: _blocks(at, at.slopes, at.like, **options)),
    "cross_hessian": (
        2,
        lambda at, y, batch_ndim=0, **_: at.like(
            [trees.tree_map(lambda b, a=a: _outer(a, at.plus(b), batch_ndim), y) for a in at.slopes]
        ),
    ),
    "hessian_diagonal": (2, lambda at, **_: at.like(at.slopes)),
    "value_grad_and_hessian": (
        2,
        lambda at, **options: (at.like(at.slopes), _blocks(at, at.slopes, at.like, **options)),
    ),
    "nth_derivative": (lambda n: n, lambda at, n, **_: at.result),
    "derivatives": (lambda n: n, lambda at, n, **_: tuple(at.result for _ in range(n + 1))),
}
"""Of each the order, which its first argument beside `f` and the point may say, and the form."""

LOSSES = {
    "laplacian": (2, lambda at, **options: _estimate(at.result, **options)),
    "value_grad_and_laplacian": (2, _gradient_and_laplacian),
    "second_order_operator": (2, lambda at, *_, **__: at.result),
    "biharmonic": (4, lambda at, **_: at.result),
    "partial": (_length, lambda at, index, **_: at.result),
    "partials": (
        lambda indices: max(map(_length, indices)),
        lambda at, indices, **_: tuple(at.result for _ in indices),
    ),
    **dict.fromkeys(
        ("divergence", "value_and_divergence"),
        (1, lambda at, batch_ndim=1, **options: _estimate(
            _rows(at.result, batch_ndim).sum(-1), **options)),
    ),
    "jet": (
        _orders, lambda at, series, **_: (at.value, [at.result for _ in range(_orders(series))]),
    ),
    "curl": (1, lambda at, **_: at.result if at.value.shape[-1] == 3 else at.result[..., 0]),
    "hessian_penalty": (
        2, lambda at, reduction="max", **_: at.result if reduction == "none" else at.result.sum()
    ),
    "sliced_score_matching_loss": (2, _penalty),
    **dict.fromkeys(
        ("gradient_penalty", "eikonal_penalty", "wgan_gp_penalty", "dragan_penalty", "r1_penalty",
         "r2_penalty", "gradient_norm_penalty", "jacobian_penalty", "curvature_penalty"),
        (1, _penalty),
    ),
}  # fmt: skip
"""Those whose results have their graph unless they are asked for without."""

OTHERS = {
    "derivatives_of": lambda u, x, **_: _Derivatives(u, x),
    "sample_norm": lambda grads, batch_ndim=1, **_: sum(
        _rows(each, batch_ndim).sum(-1) for each in trees.tree_leaves(grads)
    ),
    "interpolate": lambda a, b, **_: trees.tree_map(torch.add, a, b),
}


def _shadow(name: str, order: Any, form: Callable[..., Any], records: bool) -> Callable[..., Any]:
    parameters = inspect.signature(getattr(hodiff, name)).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    passed = name in ("per_sample_grad", "gram", "cross_hvp", "cross_hessian")
    valued = name.startswith("value_")

    def shadow(
        *given,
        has_aux=False,
        create_graph=None,
        return_outputs=False,
        args=(),
        kwargs=None,
        **options,
    ):
        f, x, *others = (
            *given,
            *[options.pop(each) for each in names[len(given) :] if each in options],
        )
        if name == "jet" and isinstance(x, (tuple, list)):
            f = lambda point, of=f: of(*point)  # noqa: E731
        nested = _note(order if isinstance(order, int) else order(others[0]), 1)
        at = _At(f, x, (*others[:passed], *args), kwargs, has_aux, (others, options))
        _note(0, -1)
        with torch.enable_grad():
            result = form(at, *others, **options)
        value = (at.value, at.aux) if has_aux else at.value
        if valued:
            result = (value, *result) if name.startswith("value_grad_and_") else (value, result)
        elif has_aux or return_outputs:
            result = result, at.aux if has_aux else at.value
        default = (records or nested) and torch.is_grad_enabled()
        if not (default if create_graph is None else create_graph):
            return trees.tree_map(
                lambda each: each.detach() if isinstance(each, Tensor) else each, result
            )
        return result

    return shadow


def _stand(name: str, shadow: Callable[..., Any]) -> None:
    """Let Dynamo follow a shadow where it meets the function of that name."""

    def followed(*given, **options):
        _need(_is_on())
        return shadow(*given, **options)

    torch.compiler.substitute_in_graph(getattr(hodiff, name), skip_signature_check=True)(followed)


SHADOWS = {name: _shadow(name, *form, records=False) for name, form in CALCULUS.items()}
SHADOWS |= {name: _shadow(name, *form, records=True) for name, form in LOSSES.items()} | OTHERS

for each in SHADOWS:
    _stand(each, SHADOWS[each])
