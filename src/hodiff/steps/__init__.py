"""A training step, loss and gradient in one exact graph: `compile_step`."""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from hodiff._core import _needed, _settings, _tree, _versions
from hodiff._core._arguments import kind, outside
from hodiff._core._call import tangents
from hodiff._core._faults import interrupt_behind, interrupts
from hodiff._core._graph import split
from hodiff._core._hooks import met
from hodiff._core._lending import signature_error
from hodiff._core._modules import Selection
from hodiff._core._records import Unlike
from hodiff._core._settings import Scope, Undo
from hodiff._core._versions import uncompiled
from hodiff._core._where import Where
from hodiff.errors import GraphError, HodiffError, HodiffWarning, InputError
from hodiff.steps._alarm import Before, EagerCheck, has_graph
from hodiff.steps._backends import ON_DEVICE, running_wrapper, scaled, trees

if TYPE_CHECKING:
    from hodiff.steps._graph import StepGraph


class StepReport:
    """The state of a step when it is read: how it runs, and why.

    Attributes:
        calls: How often the step was called with grad mode on.
        eager: How many of these ran uncompiled.
        graphs: How many graphs were made: one for each kind of arguments and settings.
        operations: How many operations the latest has.
        order: The order of the highest derivative in it, the gradient included; at most, as passes
            one after another count like nested ones. From 3 on norm layers are written out.
        seconds: What tracing and compiling took.
        checks: How many calls were held against the eager loss.
        difference: The largest difference met there, relative to the gradient and the loss.
        reasons: Why calls ran uncompiled, each once.
    """

    def __init__(self) -> None:
        self.calls = self.eager = self.graphs = self.operations = self.order = self.checks = 0
        self.seconds = self.difference = 0.0
        self.reasons: list[str] = []

    def __repr__(self) -> str:
        return f"StepReport({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


_ELSEWHERE = "another thread was in a call of hodiff's, which keeps PyTorch from compiling"


class Different(Exception):
    """The part of a call that no graph was traced with, in words that end a sentence; without
    words, its guards say so.
    """


_AS_TENSOR = "pass torch.tensor(number), which one graph takes with all its values"


class _Call(threading.local):
    """The traces of a thread's call: the graph that ran, its inputs and results,
    the state before.
    """

    graph: StepGraph | None = None
    inputs: tuple[Any, ...] = ()
    outputs: Sequence[Any] = ()
    gradients: Sequence[Tensor] = ()
    before: Before | None = None
    arguments: Any = None
    beside: bool = False

    def forget(self) -> None:
        """Hold nothing of a call that has ended."""
        self.__dict__.clear()


def _traceable(loss: Callable[..., Any], where: Any, has_aux: bool) -> Callable[..., Any]:
    """The function that Dynamo follows: the loss, for all that it reads."""
    mine = type("Mine", (), {})  # goes with the step, and guards go with a class that they name

    def traceable(state: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling() or mine in state:
            raise Different
        value, aux = (
            split(loss(where, *args, **kwargs)) if has_aux else (loss(where, *args, **kwargs), None)
        )
        # so that their inputs are known
        beside = [x for x in trees.tree_leaves(aux) if isinstance(x, Tensor)]
        return sum([x.detach().sum().to(value) for x in beside], value.detach())

    return traceable


def _called(loss: Callable[..., Any], where: Any, has_aux: bool, *args: Any, **kwargs: Any) -> Any:
    result = loss(where, *args, **kwargs)
    if not has_aux:
        return result
    value, aux = split(result)
    return value, trees.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, aux)


def _watched() -> str:
    """The caller's modes or hooks that see the operations of the eager loss, or change them."""
    if tangents():
        return "forward mode is on"
    if _versions.count_below():
        return "a mode sees each operation"
    if not all(isinstance(mode, ON_DEVICE) for mode in _settings.those_on(TorchFunctionMode)):
        return "a mode sees each call"
    if _versions.hooks_on(False) is not None:
        return "hooks see what is saved for the backward pass"
    return ""


R = TypeVar("R")


class CompiledStep(Unlike, Generic[R]):
    """A step made by `compile_step`, which says what its methods do.

    Attributes:
        report: A `StepReport`.
    """

    def __init__(
        self, loss: Callable[..., Any], where: Any, has_aux: bool, backend: str, fallback: Any
    ) -> None:
        self.report = StepReport()
        self._loss, self._where = loss, where
        self._has_aux = has_aux
        self._backend, self._fallback = backend, fallback
        self._selects = bool(_selections(where))
        self._whole = partial(_called, loss, where, has_aux)
        self._dynamo: Any = None
        self._traceable: Any = None
        self._compiler: Any = None
        self._settled = False
        # sizes may vary until a loss that cannot be traced so
        self._dynamic: Literal[False] | None = None
        self._told: set[str] = set()
        self._call = _Call()

    def __reduce__(self) -> Any:
        """A copy is a step of its own, of its own parameters: nothing compiled goes with it."""
        made = partial(
            compile_step, has_aux=self._has_aux, backend=self._backend, fallback=self._fallback
        )
        return made, (self._loss, self._where)

    def __repr__(self) -> str:
        return f"compile_step({self._loss!r}, backend={self._backend!r})"

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The loss, with a graph that holds its gradient; `(loss, aux)` with *has_aux*."""
        if not torch.is_grad_enabled():
            return self._whole(*args, **kwargs)
        result = self._run(args, kwargs)
        call = self._call
        if call.graph is None:
            return result
        leaves = [call.inputs[i] for i in call.graph.wanted]
        check_wrappers(leaves)
        value, aux = result if self._has_aux else (result, None)
        value = HandOver.apply(value, call.gradients, *leaves)
        call.forget()
        return (value, aux) if self._has_aux else value  # pyright: ignore[reportReturnType]

    @uncompiled
    def value_and_grad(self, *args: Any, **kwargs: Any) -> Any:
        """`(loss, gradient)`, or `((loss, aux), gradient)`: the gradient like *where*;
        nothing is written.
        """
        where = Where(self._where, "where")
        with _settings.recording():
            result = self._run(args, kwargs)
            value, aux = result if self._has_aux else (result, None)
            call = self._call
            if call.graph is None:
                gradients = torch.autograd.grad(value, where.tensors, allow_unused=True)
            else:
                leaves = [call.inputs[i] for i in call.graph.wanted]
                if has_graph(leaves):
                    gradients = torch.autograd.grad(
                        leaves, where.tensors, call.gradients, allow_unused=True
                    )
                else:
                    of = dict(zip(map(id, leaves), call.gradients, strict=True))
                    gradients = [of.get(id(x)) for x in where.tensors]
                call.forget()
        if all(gradient is None for gradient in gradients):
            raise GraphError(
                "loss does not depend on where, so its gradient would be zero everywhere."
            )
        filled = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip(where.tensors, gradients, strict=True)
        ]
        value = value.detach()
        return (value, aux) if self._has_aux else value, where.result(filled)

    # --- how a call runs --------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the loss; `_call.graph` is what gave it, or None,
        and then it has PyTorch's own graph.
        """
        call = self._call
        call.graph = call.before = None
        self.report.calls += 1
        with Scope(self._freeze) if self._selects else nullcontext():
            if self._settled:
                return self._for_once(self.report.reasons[-1], args, kwargs)
            if watched := _watched():
                return self._for_once(watched, args, kwargs)
            result, failure = None, ""
            try:
                result = self._traced(args, kwargs)
            except (RuntimeError, ArithmeticError) as error:
                if call.before is None or call.graph is not None or interrupts(error):
                    raise
                failure = f"its graph cannot be run: {' '.join(f'{error}'.split())[-300:]}"
            if failure:
                return self._failed(failure, args, kwargs)
            return result if call.before is None else self._checked(result, args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graphs, changed = self.report.graphs, None
        if self._traceable is not None:
            try:
                self._dynamo.run(self._traceable, args, kwargs)
                return self._result()
            except Different as error:
                changed = str(error)
        result = self._for_once(changed, args, kwargs) if changed else self._compiled(args, kwargs)
        if changed == "" and self._call.graph is not None and self.report.graphs == graphs:
            warnings.warn(
                "compile_step: PyTorch's guards failed, and held when they were asked again: an "
                "exception that the handler of a signal raised in them, such as KeyboardInterrupt, "
                "may be lost.",
                HodiffWarning,
                stacklevel=outside(),
            )
        return result

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result by a graph that is made for this call."""
        Where(self._where, "where")  # raises where that has been sharded since
        if self._traceable is None:
            if lacking := _needed.lacks("a compilation"):
                return self._failed(lacking, args, kwargs)
            from hodiff.steps import _dynamo

            _dynamo.check_backend(self._backend)
            # one of each for all threads: by the compiler Dynamo knows what another has compiled
            with _dynamo.lock:
                build, ran = weakref.WeakMethod(self._build), weakref.WeakMethod(self._replay)
                self._dynamo, self._compiler = (
                    _dynamo,
                    self._compiler or _dynamo.compiler(build, ran),
                )
                self._traceable = self._traceable or _dynamo.fresh(
                    _traceable(self._loss, self._where, self._has_aux)  # each has code of its own
                )
        try:
            if self._make(args, kwargs) and not self._call.beside:
                self._settle(
                    "it cannot be compiled: it changes a Python object that it reads; "
                    "return that as aux"
                )
                self._call.before = None
            return self._result()
        except Different as error:
            reason = str(error) or (
                _ELSEWHERE if self._call.beside else "torch.compile is switched off"
            )
            return self._for_once(reason, args, kwargs)
        except self._dynamo.SizesVary:
            self._dynamic, self._traceable = False, None
            return self._compiled(args, kwargs)
        except Exception as error:  # whatever PyTorch raises where it cannot compile
            # the graph is there, and ran or failed
            if self._settled or self._call.before is not None:
                raise
            if limit := interrupt_behind(self._dynamo.inner(error) or error):
                raise limit from None
            reason = "" if self._call.beside else self._dynamo.reason(error)
            self._traceable = None  # whose guards hold, for a graph that is not there
        self._dynamo.forget()
        if not reason:
            return self._for_once(_ELSEWHERE, args, kwargs)
        return self._failed(f"it cannot be compiled: {reason}", args, kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Make a graph for this call, and run it; whether it has changed what it reads."""
        begun, before = time.perf_counter(), random.getstate()
        call, dynamo = self._call, self._dynamo
        call.arguments = args, kwargs
        try:
            with dynamo.lock, dynamo.settings():
                if met.others():
                    raise Different(_ELSEWHERE)
                try:
                    varying, changes = self._make_inside(args, kwargs)
                finally:
                    call.beside = met.others()
        finally:
            if call.graph is None:  # nothing ran, and the eager loss draws the same
                random.setstate(before)
            call.arguments = None
            self.report.seconds += time.perf_counter() - begun
        self._told.update(varying)
        if varying:
            warnings.warn(
                f"compile_step: a Python number, {', '.join(varying)}, has changed. "
                f"A third value runs uncompiled: {_AS_TENSOR}.",
                HodiffWarning,
                stacklevel=outside(),
            )
        return changes

    def _make_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[str], bool]:
        dynamo = self._dynamo
        compiled = torch.compile(
            self._traceable, backend=self._compiler, fullgraph=True, dynamic=self._dynamic
        )
        varying = (
            dynamo.numbers(dynamo.unheld(compiled, args, kwargs)) if self.report.graphs else []
        )
        if known := sorted(self._told.intersection(varying)):
            raise Different(f"it reads a Python number that varies, {known[0]}; {_AS_TENSOR}")
        compiled(dynamo.state(), *args, **kwargs)
        return varying, self._call.graph is not None and bool(dynamo.unheld(compiled, args, kwargs))

    def _result(self) -> Any:
        """The graph's results, as the loss returns them."""
        graph, results = self._call.graph, self._call.outputs
        if graph is None:
            return None
        return (results[0], graph.beside(results)) if self._has_aux else results[0]

    def _failed(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The eager result, for good; where the loss itself is wrong its own error,
        which has the line.
        """
        if (before := self._call.before) is not None:
            before.restore()
        result = self._plain(args, kwargs)
        self._settle(reason)
        return result

    def _for_once(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._tell(reason, "This call")
        return self._plain(args, kwargs)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._call.graph = self._call.before = None
        self.report.eager += 1
        try:
            result = self._whole(*args, **kwargs)
        except TypeError as error:
            if signature_error(error, self._loss, (self._where,), args, kwargs):
                raise InputError(
                    f"step: {error}. The step gives the loss the model itself, and then what it is "
                    f"called with, one by one: step(*batch) is loss(model, *batch)."
                ) from None
            error.add_note(
                "hodiff: the loss is given what the step was called with: "
                f"{', '.join(map(kind, [*args, *kwargs.values()])) or 'nothing'}."
            )
            raise
        value = result[0] if self._has_aux else result
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(
                "loss returned "
                + (f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind(value))
                + ", expected one element."
            )
        return result

    def _build(self, given: Sequence[Any], followed: Any) -> StepGraph:
        from hodiff.steps._graph import NotCompiled, StepGraph

        call, before = (
            (partial(self._loss, self._where), *self._call.arguments, self._has_aux),
            random.getstate(),
        )
        try:
            graph = StepGraph(call, given, followed, self._backend)
        finally:
            if random.getstate() != before:
                raise NotCompiled(
                    "it draws from Python's random; draw outside, and pass the number as an "
                    "argument"
                )
        self.report.graphs += 1
        self.report.operations, self.report.order = graph.operations, graph.order
        return graph

    def _replay(self, graph: StepGraph, inputs: tuple[Any, ...]) -> Any:
        """Called by what Dynamo made of the loss."""
        call = self._call
        if changed := graph.changed(inputs):
            raise Different(changed)
        graph.calls += 1
        if graph.calls & (graph.calls - 1) == 0 or graph.calls % 1000 == 0:
            call.before = Before(graph, inputs)
        results = graph.run(*inputs)
        call.graph, call.inputs = graph, inputs
        call.outputs, call.gradients = results[: graph.outputs], results[graph.outputs :]
        return call.outputs[:1]

    def _freeze(self, undo: Undo) -> None:
        """Take the parameters that a selection leaves out for constants."""
        for selection in _selections(self._where):
            chosen = {id(parameter) for parameter in selection.values()}
            for parameter in selection.module.parameters():
                if id(parameter) not in chosen and parameter.requires_grad:
                    undo += [partial(parameter.requires_grad_, True)]
                    parameter.requires_grad_(False)

    def _checked(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, if the eager loss gives the same from the same state;
        otherwise the eager one, for good.
        """
        call = self._call
        before, call.before = call.before, None
        if before is None or call.graph is None:
            return result
        value, aux = result if self._has_aux else (result, None)
        check = EagerCheck(
            call.graph, call.inputs, before, lambda: self._whole(*args, **kwargs), self._has_aux
        )
        check.run([value, *call.gradients], aux, call.outputs)
        self.report.checks += 1
        self.report.difference = max(self.report.difference, check.difference)
        if not check.wrong:
            return result
        self._settle(check.wrong)
        return self._plain(args, kwargs)

    def _settle(self, reason: str) -> None:
        """Run the loss as it is from now on."""
        self._settled, self._traceable = True, None
        self._tell(reason, "This step")

    def _tell(self, reason: str, what: str) -> None:
        known = reason in self.report.reasons
        if known and self._fallback == "warn":  # as in each later call
            return
        if not known:
            self.report.reasons.append(reason)
        text = f"compile_step: {reason}. {what} runs uncompiled."
        if self._fallback == "raise":
            raise GraphError(text)
        warnings.warn(text, HodiffWarning, stacklevel=outside())


def _selections(where: Any) -> list[Selection]:
    return [leaf for leaf in _tree.flatten(where, "where")[0] if isinstance(leaf, Selection)]


# --- the hand-over --------------------------------------------------------------------------------


class HandOver(torch.autograd.Function):
    """The value of a step; its backward pass multiplies the gradients,
    and looks whether the point has changed.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        """Keep gradients and leaves: PyTorch raises where a leaf has been changed
        in place since.
        """
        ctx.count = len(gradients)
        ctx.save_for_backward(*gradients, *leaves)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        """The gradients, times what arrives."""
        if torch.is_grad_enabled():
            raise GraphError(
                "the value of a compiled step can be differentiated once, without "
                "create_graph=True. Take the further derivative inside the loss, or differentiate "
                "the loss itself."
            )
        return None, None, *scaled(ctx.saved_tensors[: ctx.count], given[0].reshape(()))


# --- DistributedDataParallel: gradients are reduced only after its own forward --------------------

_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()


def _note(module: Any, name: str, below: Any) -> None:
    if any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
        _wrappers.add(module)


@cache
def watch_wrappers() -> None:
    """Know each DistributedDataParallel from now on, and those that are there."""
    modules.register_module_module_registration_hook(_note)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parallel = torch.nn.parallel.DistributedDataParallel
        _wrappers.update(each for each in gc.get_objects() if issubclass(type(each), parallel))


def check_wrappers(leaves: Sequence[Tensor]) -> None:
    """Raise where gradients of these would not be reduced,
    because their wrapper's forward is not running.
    """
    for wrapper in _wrappers:
        ours = {id(leaf) for leaf in leaves}.intersection(map(id, wrapper.module.parameters()))
        if ours and wrapper is not running_wrapper():
            raise InputError(
                "where: the parameters belong to a DistributedDataParallel whose forward is not "
                "running, so their gradients would not be reduced. Write a module whose forward "
                "calls the step, and wrap that."
            )


@overload
def compile_step(
    loss: Callable[..., Any],
    where: Any,
    *,
    has_aux: Literal[False] = False,
    backend: str = "inductor",
    fallback: Literal["warn", "raise"] = "warn",
) -> CompiledStep[Tensor]: ...


@overload
def compile_step(
    loss: Callable[..., Any],
    where: Any,
    *,
    has_aux: bool,
    backend: str = "inductor",
    fallback: Literal["warn", "raise"] = "warn",
) -> CompiledStep[Any]: ...


def compile_step(
    loss: Callable[..., Any],
    where: Any,
    *,
    has_aux: bool = False,
    backend: Literal["inductor", "replay"] | str = "inductor",
    fallback: Literal["warn", "raise"] = "warn",
) -> CompiledStep[Any]:
    r"""A training step whose loss contains derivatives, compiled: loss and gradient as one exact
    graph.

    Functions compiled by `torch.compile` have no second derivative, and a trace of forces that is
    differentiated afterwards is silently wrong. `compile_step` traces the whole step: the loss, the
    derivatives in it, and its gradient \(\nabla_\theta L\). Nothing is differentiated afterwards.

        step = hodiff.compile_step(loss, model)
        for batch in loader:
            optimizer.zero_grad()
            value = step(*batch)
            value.backward()
            optimizer.step()

    `step(*args)` returns what `loss(where, *args)` returns, and its `backward()` has the same
    effect: it adds gradients to the `.grad` of *where* and of whatever else requires grad and
    matters (arguments, tensors in closures). Parameter hooks, scalers, clipping, accumulation, sums
    with other losses and LBFGS work as usual. Otherwise the call raises an error. The call computes
    all gradients; `backward()` multiplies them and hands them over.

    The loss may use `torch.autograd.grad(..., create_graph=True)`, `torch.func`, and hodiff's
    calculus, penalties, and fields such as `laplacian`. At third order and above, norm layers and
    other operations whose derivatives PyTorch gets wrong (`logcumsumexp`) are computed from their
    definitions, as in all of hodiff.

    A step runs eagerly, with one warning that names the reason, if Dynamo cannot trace the loss or
    if its trace would be wrong: branches on data, NumPy and `.item()`, losses that change Python
    objects (return those as *aux*), float16 (whose gradients are scaled inside the backward pass),
    random numbers that are not from PyTorch's default generator. Guards are those of PyTorch: they
    cover settings, shapes, attributes and nearly everything else that the loss reads (the page
    lists what they do not), and a change compiles another graph; after eight graphs the step stays
    eager.
    Pass values that change every step, such as an annealed weight, as tensors: a Python number is a
    constant, with a warning at its second value, and a third runs eagerly.

    At calls 1, 2, 4, 8, ... of each graph, and at every 1,000th, the result is compared with that
    of the eager loss, from the same random state and buffers. If they differ by more than rounding,
    which is measured then, or by one percent, the step stays eager, with a warning. A change
    that has no guard may be wrong until then. What *aux* holds may differ by one percent: a metric
    that counts samples may count one more by rounding.

    Args:
        loss: A function of *where* and of the arguments of each call that returns one element.
        where: A module, which `loss` receives; tensors that require grad, or containers of them; or
            a `hodiff.select`ion, whose other parameters are constants in the loss.
        has_aux: Whether `loss` returns `(loss, aux)`. The step returns aux detached, in new
            tensors.
        backend: `"inductor"` needs a C++ compiler and takes 10 to 40 seconds; `"replay"` needs no
            compiler and runs the cleaned list of operations one by one. Other names are those that
            `torch.compile` knows.
        fallback: Whether a call that cannot be compiled runs eagerly with a warning, or raises.

    Returns:
        The step, a function of the arguments that `loss` takes after *where*. With grad mode off it
        calls the loss as it is. `step.value_and_grad(*args)` returns `(value, gradient)`, detached,
        with the gradient like *where* (zeros for what the loss does not use), and writes nothing;
        with *has_aux* it returns `((value, aux), gradient)`. `step.report` says what was compiled,
        what ran eagerly and why, and what was compared. A copy or pickle of a step is a step of its
        own parameters, and compiles for itself.

    Raises:
        InputError: *where* has nothing to train; the loss is not one element; *backend* is unknown;
            or the parameters belong to a `DistributedDataParallel` whose forward is not running.
            For several processes, write a module whose forward calls the step, and wrap that.
        GraphError: A call cannot be compiled and *fallback* is `"raise"`; a second derivative of
            the step's value; or, by `value_and_grad`, the loss does not depend on *where*.
        RuntimeError: PyTorch's own, as in eager mode: a parameter was changed in place between the
            call and `backward()`, or `backward()` runs twice.
        HodiffError: PyTorch is older than 2.13.

    Cost:
        In addition to the graph, each call takes about 50 µs, and 1 µs for each parameter tensor;
        for a network, whose modules are guarded one by one, about twice that. The first call traces
        the
        loss: seconds with replay, 10 to 40 with inductor.

    Examples:
        The gradient of \((f'(x) - 6)^2\) for \(f(x) = w x^2\), with respect to *w*, is
        \(2 (2 w x - 6) 2 x\):

        >>> import torch, hodiff
        >>> w = torch.tensor(2.0, requires_grad=True)
        >>> def loss(w, x):
        ...     x = x.detach().requires_grad_()
        ...     (slope,) = torch.autograd.grad(w * x**2, x, create_graph=True)
        ...     return (slope - 6) ** 2
        >>> step = hodiff.compile_step(loss, w, backend="replay")
        >>> value = step(torch.tensor(1.0))
        >>> value.backward()
        >>> value.item(), w.grad.item()
        (4.0, -8.0)
    """
    if _needed.RELEASE < (2, 13):
        raise HodiffError(f"compile_step needs PyTorch 2.13 or newer; this is {torch.__version__}.")
    if not callable(loss):
        raise InputError(
            f"loss: got {kind(loss)}, expected a function of where and of a step's arguments."
        )
    for tensor, name in zip((parsed := Where(where, "where")).tensors, parsed.names, strict=True):
        if not tensor.requires_grad:
            raise InputError(
                f"{name} does not require grad, so a step cannot train it. "
                "Call requires_grad_() on it."
            )
    if fallback not in ("warn", "raise"):
        raise InputError(f"fallback: got {fallback!r}, expected 'warn' or 'raise'.")
    watch_wrappers()
    return CompiledStep(loss, where, has_aux, backend, fallback)
