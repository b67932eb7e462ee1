"""Dynamo in front of a step: it traces the loss, and guards what the loss reads; what it would not guard is closed.

Measured on 56 ways in which a traced loss can be out of date, Dynamo's guards as they are miss three. Of those one is
a setting (hooks of modules), one is refused (Python `autograd.Function`s), and one is looked at in each call (hooks of
parameters). A key that is looked up in vain in an object's `__dict__` has no guard: it is refused.
"""

from __future__ import annotations

import difflib
import functools
import gc
import inspect
import itertools
import logging
import math
import os
import re
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo import exc, variables
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

from hodiff._core import _settings
from hodiff._core._settings import Scope, Undo, assign
from hodiff.errors import InputError
from hodiff.steps._backends import NotCompiled
from hodiff.steps._graph import StepGraph

_torch: Any = torch._C

FAILED = (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)
"""What Dynamo raises where it does not compile; errors of the loss itself come out of it in one of these, too."""

_SETTINGS = {
    "trace_autograd_ops": True,
    "skip_nnmodule_hook_guards": False,
    "allow_rnn": True,
    "optimize_ddp": False,
    "suppress_errors": False,
    "replay_record_enabled": False,
    "invalidate_compile_context_weakrefs": True,  # so that `torch.utils.swap_tensors` may swap parameters
}


_names = itertools.count()


def fresh(function: Any) -> Any:
    """The function with code of its own: by that Dynamo keeps graphs, limits, and which sizes vary."""
    code = function.__code__.replace(co_name=f"step_{next(_names)}")
    return types.FunctionType(code, function.__globals__, closure=function.__closure__)


class _Compiling(threading.local):
    on = False


_compiling = _Compiling()


def settings(constants: bool = False) -> Scope[None]:
    """The settings of a compilation, in which numbers that vary may be constants.

    They take longer to set than many a step, so calls begin without them.
    """
    return Scope(partial(_enter, constants))


def _enter(constants: bool, undo: Undo) -> None:
    import torch._functorch.config as functorch

    assign(undo, torch._dynamo.config, {**_SETTINGS, "specialize_int": constants, "specialize_float": constants})
    assign(undo, functorch, {"remat_using_tags_for_fwd_loss_bwd_graph": False})
    assign(undo, _compiling, {"on": True})
    for name in _LOGGERS:
        assign(undo, logging.getLogger(f"torch.{name}"), {"disabled": True})
    undo += [partial(sys.setrecursionlimit, sys.getrecursionlimit())]  # inductor raises it
    # PyTorch's own calls of what it deprecates, which end a compilation where warnings are errors
    warned: Any = warnings.filters
    own = ("ignore", None, Warning, re.compile(r"torch\b"), 0)
    undo += [lambda: warned.__setitem__(slice(None), [each for each in warned if each is not own])]
    warned.insert(0, own)
    # a graph of `Script`'s that runs first in this mode is never rewritten
    undo += [partial(_torch._jit_set_profiling_mode, _torch._jit_set_profiling_mode(False))]


_LOGGERS = (
    "_subclasses.fake_tensor",  # wrong shapes, which the eager loss reports
    "_inductor.ir",  # operations without a form in C
    "_inductor.standalone_compile",  # graphs that cannot be saved
    "_dynamo.convert_frame",  # the limit of graphs, which the step tells
)


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), functools.__file__, inspect.__file__)
"""Whose own lookups are right."""


def _refuse(self: Any, what: str) -> None:
    if _compiling.on and not self.f_code.co_filename.startswith(_OWN):
        exc.unimplemented(gb_type="hodiff: no guard", context="", explanation=what, hints=[])


def _key_of_an_object(self: Any, tx: Any, args: Any) -> None:
    """In the place of a method of Dynamo's that does nothing: there is no guard that the key is not there."""
    _refuse(tx, "it looks up a key in the __dict__ of an object, which is not guarded; use getattr")


_NOT_THERE = (
    exc.ObservedLookupError,
    exc.ObservedAttributeError,
    exc.get_dynamo_observed_exception(NameError),  # since 2.14; before that Dynamo traced no missing name
)


def _handled(self: Any, raised: exc.ObservedException) -> Any:
    """Before an exception is handled: that what was looked up is not there has no guard either."""
    if isinstance(raised, _NOT_THERE):
        _refuse(self, "it catches a missing key, attribute or name, which is not guarded; use get or getattr")
    return _handler(self, raised)


def _formatted(*args: Any) -> Any:
    """A string of constants: one of anything else Dynamo compares and hashes before it knows it."""
    variable = _format(*args)
    if _compiling.on and not variable.is_python_constant():
        _refuse_string()
    return variable


def _formatted_number(self: Any, *args: Any) -> None:
    """In an f-string, of one number."""
    if _compiling.on and isinstance(self.stack[-1], SymNodeVariable):
        _refuse_string()
    _format_number(self, *args)


def _refuse_string() -> None:
    told = "it makes a string of a number that changes, or of a tensor, which PyTorch's tracer gets wrong"
    exc.unimplemented(gb_type="hodiff: no string", context="", explanation=told, hints=[])


def _equal(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
    """Dynamo's guard of a constant, and of the sign of a zero, which equals the other one."""
    _equals(self, guard, *args, **kwargs)
    value = self.get(guard)
    if _compiling.on and type(value) is float and not value:
        same = partial(_same_sign, math.copysign(1.0, value))
        self.get_guard_manager(guard).add_lambda_guard(
            same, [f"the sign of {guard.name} is the same"], guard.user_stack
        )


def _same_sign(sign: float, value: float) -> bool:
    return math.copysign(1.0, value) == sign


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    """Put ours in the place of a method of Dynamo's, with the name and marks by which that knows it."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(replacement))
    return method


_handler = _replace(InstructionTranslatorBase, "exception_handler", _handled)
_format = _replace(variables.misc.StringFormatVariable, "create", _formatted)
_format_number = _replace(InstructionTranslatorBase, "_format_value", _formatted_number)
_equals = _replace(GuardBuilder, "EQUALS_MATCH", _equal)
variables.dicts.DunderDictVariable.install_dict_contains_guard = _key_of_an_object


def compiler(
    build: weakref.WeakMethod[Callable[..., StepGraph]], ran: weakref.WeakMethod[Callable[..., Any]]
) -> Callable[..., Any]:
    """Dynamo's backend for a step, which it does not keep alive.

    Args:
        build: Makes the graph from Dynamo's, given the inputs.
        ran: Is given the graph and the inputs in each call, and gives the outputs.
    """

    def backend(module: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        made: Any = build()
        if not _compiling.on:
            raise NotCompiled("compiled without its settings")
        _check_side_effects()
        attributes, sizes = _attributes()
        graph = made(module, given)
        graph.attributes, graph.sizes = attributes, sizes

        def run(*inputs: Any) -> Any:
            called: Any = ran()
            return called(graph, inputs)

        return run

    return backend


def check_backend(name: str) -> None:
    """Raise unless there is a backend of that name."""
    known = ["replay", *torch._dynamo.list_backends(exclude_tags=None)]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else []
        raise InputError(
            f"backend: got {name!r}, expected 'inductor', 'replay', or a name that torch.compile "
            f"knows" + (f"; did you mean {near[0]!r}?" if near else f" ({', '.join(map(repr, known[1:]))}).")
        )


def _check_side_effects() -> None:
    """Refuse a loss that changes Python objects: what is held against eager would change them twice."""
    tracer = InstructionTranslator.current_tx()
    if tracer.output.random_calls:
        raise NotCompiled("it draws from Python's random; draw outside, and pass the number as an argument")
    if os.getenv.__code__ in tracer.output.tracing_context.traced_code:
        raise NotCompiled("it calls os.getenv, which is not guarded; use os.environ")
    effects = tracer.output.side_effects
    for changed in effects._get_modified_vars():
        new = isinstance(changed.mutation_type, (AttributeMutationNew, ValueMutationNew))
        attributes = effects.store_attr_mutations.get(changed, {})
        if not new and not _restored(changed, attributes):
            source = getattr(changed, "source", None)
            name = f"{source.name if source else changed}".replace("L['where']", "where")
            what = f"{name}.{next(iter(attributes))}" if attributes else name
            way = next((way for end, way in _WAYS.items() if what.endswith(end)), "return that as aux")
            raise NotCompiled(f"it changes a Python object, {what}; {way}")


_WAYS = {
    "._buffers": "write into a buffer in place, as self.count.add_(1) does",
    ".training": "call train() or eval() outside of the loss",
}


_IMMUTABLE = 1 << 8
"""The flag of a class of Python's own, as `dict`: it stays as it is."""


def _attributes() -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, int]]]:
    """What classes have that a loss meets, methods and what is inherited; and how much.

    That one of them is replaced has no guard, nor that a new one hides another.
    """
    effects = InstructionTranslator.current_tx().output.side_effects
    classes: dict[type, bool] = {}
    sizes: list[tuple[Any, int]] = []
    for variable in effects.id_to_variable.values():
        if isinstance(variable, (variables.ConstDictVariable, variables.UserDefinedObjectVariable)):
            _check_order(variable)
        if isinstance(variable, variables.UserDefinedObjectVariable):
            kind = type(variable.value)
            classes[kind] = classes.get(kind, False)
            classes.update(dict.fromkeys(kind.__mro__[1:-1], True))
            # its own, not its metaclass's, which enumerations have
            hidden = [vars(cls)["__getattr__"] for cls in kind.__mro__ if "__getattr__" in vars(cls)]
            if hidden and hidden[0] is not torch.nn.Module.__getattr__:
                if kind.__setattr__ is object.__setattr__:
                    raise NotCompiled(f"it reads a {kind.__name__}, whose __getattr__ a later attribute may hide")
                sizes.append((vars(variable.value), len(vars(variable.value))))
    attributes: list[tuple[Any, str, Any]] = []
    for cls, inherited in classes.items():
        if cls.__flags__ & _IMMUTABLE:
            continue
        names = {"forward", "__call__", "_call_impl", "__getattr__"}
        if not cls.__module__.startswith(("torch.", "hodiff.")):
            names |= {name for name, value in vars(cls).items() if inherited or callable(value)}
            sizes.append((vars(cls), len(vars(cls))))
        attributes += [(vars(cls), name, vars(cls).get(name)) for name in names]
    return attributes, sizes


def _check_order(variable: Any) -> None:
    """Refuse an `OrderedDict`: the guard of its keys does not see their order."""
    if variable.source and issubclass(variable.python_type(), OrderedDict) and "_hooks" not in variable.source.name:
        of_users = isinstance(variable, variables.UserDefinedObjectVariable)
        entries: Any = variable.value if of_users else variable.items
        if len(entries) > 1:
            raise NotCompiled("it reads an OrderedDict, whose order is not guarded")


def _restored(changed: Any, attributes: dict[str, Any]) -> bool:
    """Whether an object is in the end what it was: `functional_call` changes modules so."""
    if isinstance(changed, TorchFunctionModeStackVariable):
        return True  # modes within the loss
    if changed.source is not None and changed.source.name.startswith("G['__import_hodiff_"):
        return True  # switches of ours
    if attributes:
        return all(
            now.is_python_constant() and now.as_python_constant() is getattr(changed.value, name, _restored)
            for name, now in attributes.items()
        )
    before, now = getattr(changed, "original_items", None), getattr(changed, "items", None)
    if not isinstance(before, dict) or not isinstance(now, dict):
        return False
    now = {key.vt.as_python_constant(): value.source for key, value in now.items() if key.vt.is_python_constant()}
    before = {key.as_python_constant(): value.source for key, value in before.items() if key.is_python_constant()}
    return None not in now.values() and now == before and len(now) == len(changed.items)


def forget() -> None:
    """Collect what a failed compilation left: some of it puts back the thread's dispatch keys when it goes."""
    with _settings.recording(), _torch._PreserveDispatchKeyGuard():
        gc.collect()


_REASONS = {
    r"expression .*\bzuf\d|NYI SymInt equality": (
        "a Python number that it reads has changed, and what runs would depend on the new one; keep it, or write "
        "torch.tensor(number) where a tensor can stand"
    ),
    r"(Unsupported|setattr\(\) on) Tensor\.requires_grad": (
        "it assigns x.requires_grad, or sets it on a tensor from outside of it; write x = x.detach().requires_grad_(), "
        "or pass a tensor that requires grad"
    ),
    r"autograd\.grad\(\) received an argument of type": (
        "it gives torch.autograd.grad an iterator or a view of a dict, such as net.parameters(); write list(...)"
    ),
    r"_LegacyVariableBase": "it uses torch.autograd.Variable; write x, or x.detach().requires_grad_()",
    r"mutating `\.data`": "it writes to .data; compute a tensor: z = (z + step).detach().requires_grad_()",
    r"function \w+_norm .*GradTrackingTensor": (
        "PyTorch's tracer cannot follow its forward mode through this norm layer; hodiff.jvp(f, x, v, "
        "create_graph=True) compiles"
    ),
    r"FakeTensorDeviceMismatch.*\bmeta\b|fake tensors[\s\S]*GradTrackingTensor[\s\S]*BatchedTensor": (
        "PyTorch's tracer cannot follow forward mode within a vmap, as torch.func.hessian has it; use hodiff.hessian, "
        "or torch.func.jacrev of torch.func.grad"
    ),
    r"Missing `as_proxy\(\)`": "it uses an object that PyTorch's tracer does not know, such as a torch.Generator",
    r"Could not guard on data-dependent expression": (
        "what runs would depend on a number that a tensor holds, as in BatchNorm(momentum=None) or if x.item() > 0; "
        "leave it in the tensor"
    ),
    r"TensorReferenceAnalysis": (
        "inductor cannot do its arithmetic on a Python number that changes; pass a tensor, or take backend='replay'"
    ),
    r"recompile_limit": (
        "it has eight graphs, for as many kinds of arguments, attributes and settings; pass what changes in every "
        "step as a tensor"
    ),
    r"aten::_scaled_dot_product\w+_backward is not implemented": (
        "it differentiates attention twice, which PyTorch's fused kernels cannot; call it under "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), in eager mode, too"
    ),
    r"expected to contain only concrete integers|with symbolic sizes/strides": (
        "it has an operation that PyTorch's tracer cannot follow for batches of several sizes; keep the size"
    ),
    r"tp_iternext_impl": "it calls next() on an iterator of Python's; call it outside, and pass what it gives",
    r"Observed exception[\s\S]*\bdata_ptr\b": "it reads where a tensor lies, by data_ptr()",
    r"function `(manual_seed|[gs]et_rng_state)`": "it reads or sets the state of random numbers; do that outside",
    r"requires_grad_\(\) called on it": (
        "it stores a tensor in a Python object, as self.features = y in a forward does; return that as aux"
    ),
}
"""Ours for words of PyTorch's that say nothing to a caller: `zuf0` is a number that changes."""


def inner(error: BaseException) -> BaseException | None:
    """What Dynamo made its own exception of."""
    return getattr(error, "inner_exception", None) or error.__cause__


def reason(error: BaseException) -> str:
    """What kept a step from being compiled, and the line of the loss, in a line."""
    frames = [each for each in getattr(error, "real_stack", None) or () if not each.filename.startswith(_OWN)]
    if not frames:
        return _words(error)
    code = f": `{frames[-1].line[:100]}`" if frames[-1].line else ""
    return f"{_words(error)} (line {frames[-1].lineno} of {Path(frames[-1].filename).name}{code})"


def _words(error: BaseException) -> str:
    if isinstance(cause := inner(error), NotCompiled):
        return str(cause)
    if told := [words for pattern, words in _REASONS.items() if re.search(pattern, f"{error}\n{cause}")]:
        return told[0]
    if cause is not None and not isinstance(error, exc.Unsupported):
        error = cause
    first, _, text = str(error).partition("\n")
    explained = re.search(r"Explanation:(.*?)\n\s*(?:Hint|Developer debug)", text, re.DOTALL)
    if explained is None:
        first = f"{type(error).__name__}: {first}"
    return " ".join(((explained and explained[1].strip()) or first).split())[:300].rstrip(".")
