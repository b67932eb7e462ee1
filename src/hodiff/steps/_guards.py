"""Dynamo in front of a step: it traces the loss, and guards what the loss reads; what it would not guard is closed.

Measured on 56 ways in which a traced loss can be out of date, Dynamo's guards as they are miss three. Of those one is
a setting (hooks of modules), one is refused (Python `autograd.Function`s), and one is looked at in each call (hooks of
parameters). A key that is looked up in vain in an object's `__dict__` has no guard: it is refused.
"""

from __future__ import annotations

import functools
import gc
import threading
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo import exc, variables
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

from hodiff._core import _settings
from hodiff._core._settings import Scope, Undo
from hodiff.steps._graph import Refused, StepGraph

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
}


def fresh(function: types.FunctionType) -> Any:
    """The function with a code object of its own: Dynamo keeps what it compiled, and its limits, by code object."""
    copied = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Compiling(threading.local):
    on = False


_compiling = _Compiling()


def settings() -> Scope[None]:
    """The settings of a compilation. They take longer to set than many a step, so calls begin without them."""
    return Scope(_enter)


def _enter(undo: Undo) -> None:
    import torch._functorch.config as functorch

    for config, values in (
        (torch._dynamo.config, _SETTINGS),
        (functorch, {"remat_using_tags_for_fwd_loss_bwd_graph": False}),
    ):
        patch = config.patch(values)
        undo += [partial(patch.__exit__, None, None, None)]
        patch.__enter__()
    undo += [partial(setattr, _compiling, "on", _compiling.on)]
    _compiling.on = True


def _no_guard(self: Any, tx: Any, args: Any) -> None:
    """Refuse a look for a key in an object's `__dict__`, whose absence Dynamo does not guard; PyTorch's own is right."""
    if _compiling.on and not tx.f_code.co_filename.startswith(_OWN):
        exc.unimplemented(
            gb_type="a key of __dict__",
            context="",
            explanation="it looks up a key in the __dict__ of an object, which is not guarded; getattr is",
            hints=[],
        )


_OWN = tuple(str(Path(module.__file__).parent) for module in (torch,)) + (functools.__file__,)
variables.dicts.DunderDictVariable.install_dict_contains_guard = _no_guard


def compiler(build: Callable[..., StepGraph], ran: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo's backend for a step.

    Args:
        build: Makes the graph from Dynamo's, given the inputs.
        ran: Is given the graph and the inputs in each call, and gives the outputs.
    """

    def backend(module: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        if not _compiling.on:
            raise Refused("compiled without its settings")
        _check_side_effects()
        graph = build(module, given)
        return lambda *inputs: ran(graph, inputs)

    return backend


def _check_side_effects() -> None:
    """Refuse a loss that changes Python objects: what is held against eager would change them twice."""
    tracer = InstructionTranslator.current_tx()
    if tracer.output.random_calls:
        raise Refused("it draws from Python's random; draw outside, and give it as an argument")
    effects = tracer.output.side_effects
    for changed in effects._get_modified_vars():
        if not isinstance(changed.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            if not _restored(changed, effects.store_attr_mutations.get(changed, {})):
                source = getattr(changed, "source", None)
                raise Refused(f"it changes a Python object, {source.name if source else changed}; return it as aux")


def _restored(changed: Any, attributes: dict[str, Any]) -> bool:
    """Whether an object is in the end what it was: `functional_call` changes modules so."""
    if getattr(changed.source, "name", "").startswith("G['__import_hodiff_"):
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
    """Collect what a compilation that failed has left: some of it, when it goes, puts back the thread's dispatch keys."""
    with _settings.recording(), _torch._PreserveDispatchKeyGuard():
        gc.collect()


def reason(error: BaseException) -> str:
    """What kept a step from being compiled, in a line."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    if isinstance(inner, Refused):
        return str(inner)
    if inner is not None and not isinstance(error, exc.Unsupported):
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Explanation:", "hodiff:"))]
    text = told[0].removeprefix("Explanation:").strip() if told else f"{type(error).__name__}: {lines[0] if lines else ''}"
    return text[:300]
