"""Inside `torch.compile`: which functions the tracer may follow, and which run as they are, between two graphs.

hodiff reads graphs, lends modules, switches settings and warns; none of that can be held by a traced region. So what
needs it is marked when it is imported, at no cost for any call: the tracer (Dynamo) ends its graph before a marked
function, calls it as plain Python together with everything below it, and begins a new graph behind it. Where no break
is allowed (`fullgraph=True`) it raises, and says `REASON`. That is what `torch.compiler.disable` does, but that
imports Dynamo (seconds), and puts a wrapper around each function. What stands for a function in a trace is a mark,
too (`stands_for`): `_traced` has the forms that the road takes there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, TypeVar

from torch import Tensor

from hodiff._core import _versions

F = TypeVar("F", bound=Callable[..., Any])

TRACED: set[Callable[..., Any]] = set()
"""The public functions that have a route through the tracer, into one graph with the caller's; see `traced`."""

REASON = (
    "hodiff: this call needs PyTorch's own graphs, which a traced region does not have. Leave out fullgraph=True: the "
    "graph then breaks around the call, which runs uncompiled; or call it outside of the compiled function. Inside "
    "one graph run, from PyTorch 2.13 on, the calculus (hodiff.grad, hvp, hessian and the like), and from 2.12 on the "
    "functions of a field by Taylor mode (hodiff.laplacian and the like), and of the penalties only gradient_penalty "
    "and its recipes, with a function and tensors"
)


POINT_REASON = (
    "hodiff: a point that requires grad can be reached by f past its argument, and a traced region cannot tell. Give "
    "x.detach(), or leave out fullgraph=True, or call it outside of the compiled function"
)


def uncompiled(function: F, reason: str = REASON) -> F:
    """`function` itself, marked: the tracer breaks its graph there and leaves everything below alone."""
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason
    _skip(marked.__code__)
    return function


def traced(function: F) -> F:
    """`function` itself, marked: the tracer follows it whole, or not at all. Half a route would be switched half.

    Of a class, its methods.
    """
    TRACED.add(function)
    if _versions.RELEASE < (2, 12):  # whose tracer gives up halfway
        return uncompiled(function)
    for each in _methods(function) if inspect.isclass(function) else [function]:
        if _is_ours(each):
            _skip(each.__code__)
    return function


def by_passes(function: F) -> F:
    """As `traced`, of a function that takes reverse passes: which the tracer follows from 2.13 on (see `_traced`)."""
    if _versions.RELEASE >= (2, 13):
        return traced(function)
    mark(function)
    return function


def stands_for(function: Any) -> Callable[[F], F]:
    """What the tracer follows in place of a function, by a mark on that; it costs no call anything."""

    def mark(form: F) -> F:
        if _versions.RELEASE >= (2, 13):  # see `by_passes`
            function._torchdynamo_inline = form
        return form

    return mark


def check_point(leaves: Iterable[Tensor]) -> None:
    """While tracing: leave the route through the tracer where `f` could reach the point past its argument unseen."""
    if any(leaf.requires_grad for leaf in leaves):
        _leave_the_trace()


FUNCTION_REASON = (
    "hodiff: f applies a Python autograd.Function, whose backward, or its derivative, the tracer would lose. Leave out "
    "fullgraph=True, or call it outside of the compiled function"
)


def functions_traced() -> int:
    """While tracing: how many `autograd.Function`s and levels of forward mode the graph has so far.

    Dynamo evaluates this as it traces, with its own frames above. Were its names others, this would raise.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._functorch.autograd_function import autograd_function_apply

    frame = sys._getframe()
    while frame is not None:
        translator = frame.f_locals.get("self")
        if isinstance(translator, InstructionTranslatorBase):
            nodes = (node for tracer in translator.output.tracers for node in tracer.graph.nodes)
            return sum(node.target in (autograd_function_apply, _versions.levels._enter_dual_level) for node in nodes)
        frame = frame.f_back
    return 0


# What torch.compiler.assume_constant_result does, which would import Dynamo at once.
functions_traced._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def check_functions(before: int) -> None:
    """While tracing: leave the route through the tracer where `f` applied a Function, or used forward mode, since."""
    if functions_traced() != before:
        leave_for_a_function()


def leave_for_a_function() -> None:
    """Nothing: the tracer ends its graph here, as at `_leave_the_trace`."""


def _leave_the_trace() -> None:
    """Nothing: the tracer ends its graph here, so that the public function is called as it is."""


def break_graphs(namespace: dict[str, Any]) -> None:
    """Mark what a module makes public, by its `__all__`; what is loaded when it is asked for is marked then."""
    for name in namespace.keys() & namespace["__all__"]:
        mark(namespace[name])


def mark(function: Any) -> None:
    """Mark what is public: a function that is not traced, or the methods of a class."""
    if function in TRACED:
        return
    if inspect.isclass(function):
        if not issubclass(function, BaseException):
            _mark_all(_methods(function))
    elif inspect.isfunction(function):
        uncompiled(function)


def _mark_all(functions: Iterable[Any]) -> None:
    for function in functions:
        if _is_ours(function):
            uncompiled(function)


def _is_ours(function: Any) -> bool:
    """Whether a method is ours: what a namedtuple brings along is every namedtuple's."""
    return inspect.isfunction(function) and function.__globals__.get("__name__", "").partition(".")[0] == "hodiff"


def _methods(cls: type) -> list[Any]:
    """The functions behind the methods and properties of a class; not the handler that the tracer goes through."""
    return [
        getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if name != "__torch_function__"
    ]


def _skip(code: CodeType) -> None:
    """Let the frames of this code, and all below, run as they are when a compiled caller reaches them."""
    # torch 2.13 to 2.15; `torch._dynamo.eval_frame.skip_code` has the same from there, for one frame alone
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


uncompiled(_leave_the_trace, POINT_REASON)
uncompiled(leave_for_a_function, FUNCTION_REASON)
