"""Python `autograd.Function`s, whose backward alone says what a second derivative through them is.

PyTorch cannot verify that. So a product with the derivative is held, once, against central
differences of the order
below, along the same direction: equal, nothing need be said; settled and another, both numbers are.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _arguments, _call, _messages, _nodes, _settings, _versions
from hodiff._core._faults import interrupts
from hodiff._core._vectors import generic
from hodiff.errors import CustomFunctionWarning, GraphError

Leaves = Sequence[Tensor]
Chain = Callable[[Any, Leaves, Leaves, int], list[list[Tensor]]]
"""Of an evaluation, cotangents, a direction and a number: so many derivatives,
from the gradient on.
"""

Finding = str | None
"""What differences have shown: nothing to say (""), what contradicts, or (None)
that nothing can be told.
"""

STEPS = 4.0, 1.0, 0.25
"""Of the differences, in units of the cube root of the precision:
there their errors are smallest.
"""

EQUAL = 0.02
"""How close differences must be to a product that they confirm, whatever the precision,
in its own size.
"""

SETTLED, ALL = 30, 10
"""How many times closer two differences must be to each other than to a product
that they contradict; all three.
"""

CHANCE = 10
"""The same for kinks, of which right Functions have nothing in their product.

A sum over N of them within a step settles to a part of 1 / sqrt(N), and by chance to a tenth of
that.
"""

FEW, UNLIKELY = 3, 30
"""Fewer entries agree by chance more often, so they must be so many times closer still."""

_findings: weakref.WeakKeyDictionary[type, dict[Any, Finding]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[type, set[tuple[str, int, Any]]] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    compares = False


_thread = _Thread()


def hold(graph: Any, chain: Chain) -> None:
    """Hold the Functions of an evaluation that a derivative of higher order goes through.

    The differences are taken when the evaluation is over: `f` then begins as it began, with the
    same random numbers, and nothing of the call is changed by it.
    """
    functions, graph.context.unheld = graph.context.unheld, {}
    if not functions or _thread.compares:
        return
    code = _code(graph.call.what)
    if code is None or not _can_compare(graph):
        warn_of(functions, code)
        return
    # One code is many functions: of the parameters that are selected, of the module in its closure.
    way = (
        frozenset(graph.call.where.names),
        frozenset(kind.__name__ for kind in graph.kinds),
        frozenset((function.__qualname__, used) for function, used in functions.items()),
    )
    key = code, code.co_filename, graph.call.order, graph.leaves[0].dtype, way
    unknown = [function for function in functions if key not in _findings.setdefault(function, {})]
    comparison = _Comparison(graph, chain) if unknown else None

    # not ours: the graph must go with its last reference, which an interrupt drops
    def finish(graph: Any) -> None:
        if comparison is not None:
            finding = comparison.finding(graph)
            for function in unknown:
                _findings[function][key] = finding
        known = {function: _findings[function][key] for function in functions}
        _say(known, key, loss=graph.create_graph or graph.surrogates)

    if comparison is not None and graph.context.undo:
        graph.last = finish
    else:
        finish(graph)


def _can_compare(graph: Any) -> bool:
    """Whether `f` may be called again, here, and what it returns then means what it means now."""
    functions = [_versions.function_of(kind) for kind in graph.kinds if _nodes.is_function(kind)]
    return (
        graph.repeatable
        # not sharded, nor of another library
        and all(leaf.__class__ is Tensor for leaf in graph.leaves)
        and not _call.is_followed()
        # to run DistributedDataParallel again would count as another step
        and not any({each, each.__name__} & {*graph.call.allow, _SINK} for each in functions)
    )


def _code(f: Any) -> Any:
    """The code of the user's function; None where there is none, or it is ours."""
    inner = "__wrapped__", "__func__", _call.USER
    while names := [name for name in inner if hasattr(f, name)] or ["func"] * isinstance(
        f, partial
    ):
        f = getattr(f, names[0])
    if not hasattr(f, "__code__"):
        f = type(f).forward if isinstance(f, nn.Module) else type(f).__call__
    ours = f"{f.__module__}.".startswith("hodiff.") if hasattr(f, "__code__") else True
    return None if ours else f.__code__


class _Comparison:
    """Derivatives at the point, along one generic direction, and what differences say of them."""

    def __init__(self, graph: Any, chain: Chain) -> None:
        self._chain, self._order = chain, graph.call.order
        survey = _nodes.survey(graph.tensors())
        self._eps = torch.finfo(_nodes.coarsest(survey, graph.leaves[0].dtype)).eps
        self._largest = _nodes.largest_output(survey)
        self._scales = [_size(leaf) / max(1, leaf.numel()) ** 0.5 or 1.0 for leaf in graph.leaves]
        self._weights = [_generic(output) for output in graph.tensors()]
        self._direction = [
            s * _signed(leaf) for leaf, s in zip(graph.leaves, self._scales, strict=True)
        ]
        self._products = chain(graph, self._weights, self._direction, self._order)[1:]

    def finding(self, graph: Any) -> Finding:
        """The verdict of `f` at other points on the products."""
        steps = [step * self._eps ** (1 / 3) for step in STEPS]
        try:
            sides = [(self._at(graph, step), self._at(graph, -step), 2 * step) for step in steps]
        except Exception as error:  # `f` fails beside the point: no more is known than before
            if interrupts(error):
                raise
            return None
        findings = [
            self._compared(
                product,
                [
                    [(r - l) / h for r, l in zip(right[n], left[n], strict=True)]
                    for right, left, h in sides
                ],
            )
            for n, product in enumerate(self._products)
        ]
        return next((words for words in findings if words), None if None in findings else "")

    def _at(self, graph: Any, step: float) -> list[list[Tensor]]:
        """The derivatives below the last, a step on."""
        with _settings.Scope(_comparing), _settings.recording(), graph.context.random.replayed():
            moved = [
                x.detach() + step * v for x, v in zip(graph.leaves, self._direction, strict=True)
            ]
            with graph.beside([*map(Tensor.requires_grad_, moved)]) as other:
                return self._chain(other, self._weights, self._direction, self._order - 1)

    def _compared(self, product: Leaves, differences: Sequence[Leaves]) -> Finding:
        """A comparison where two neighbouring differences are closest:
        whether the product is what they settle at.
        """
        pairs = [[*map(_apart, product, *pair, self._scales)] for pair in pairwise(differences)]
        spreads, wholes = (
            [math.hypot(*(row[n] for row in rows)) for rows in pairs] for n in (0, 2)
        )
        best = spreads.index(min(spreads))
        # A smooth function's are 16 times closer at the smaller steps.
        bound = max(self._settled(product) * spreads[best], ALL * spreads[0] / 16, ALL * spreads[1])
        agree, tolerance = True, self._eps ** (1 / 3)
        for (spread, gap, size), ours, theirs in zip(
            pairs[best], product, differences[best + 1], strict=True
        ):
            size = max(size, 0.01 * wholes[best])
            agree = agree and gap + spread <= min(tolerance, EQUAL) * size
            if gap > max(bound, 3 * tolerance * size):
                at = int((ours.double() - theirs.double()).abs().argmax())
                numbers = [f"{float(part.reshape(-1)[at]):.6g}" for part in (ours, theirs)]
                return " against ".join(numbers)
        return "" if agree else None

    def _settled(self, product: Leaves) -> float:
        kinks = self._largest * STEPS[0] * self._eps ** (1 / 3)
        few = sum(part.numel() for part in product) < FEW
        return max(SETTLED, CHANCE * kinks**0.5) * (UNLIKELY if few else 1)


def _comparing(undo: _settings.Undo) -> None:
    undo += [partial(setattr, _thread, "compares", False)]
    _thread.compares = True


def _apart(
    product: Tensor, coarse: Tensor, fine: Tensor, scale: float
) -> tuple[float, float, float]:
    """The distance of two differences, and of the product from the finer one; the size of them.

    In units of the leaf's.
    """
    parts = (coarse - fine, product - fine, product, coarse, fine)
    spread, gap, *sizes = (scale * _size(part) for part in parts)
    return spread, gap, max(sizes)


def _size(x: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32))
    )


def _generic(like: Tensor) -> Tensor:
    return generic(like.numel()).reshape(like.shape).to(like)


def _signed(like: Tensor) -> Tensor:
    """Numbers in [-1, -1/2) and [1/2, 1): no entry is passed over."""
    numbers = _generic(like) - 1
    return numbers - (numbers < 0.5).to(numbers)


# --- what is said ---------------------------------------------------------------------------------


def _say(findings: dict[type, Finding], key: tuple[Any, ...], *, loss: bool) -> None:
    """Raise where numbers contradict; a loss, for which a surrogate may be meant, warns."""
    wrong = {function: words for function, words in findings.items() if words}
    if not wrong:
        warn_of((function for function, words in findings.items() if words is None), *key)
        return
    names = sorted(function.__name__ for function in wrong)
    text = (
        f"a second derivative through autograd.Function {', '.join(names)} is not the derivative "
        f"of the gradient: {next(iter(wrong.values()))}, the product and the central differences "
        "of the gradient along the same vector, which agree with each other, "
        "in the entry where they were furthest apart when f was first compared. "
        "Its backward is cut off from its arguments (a detach, NumPy, a kernel of its own), "
        "or it is wrong: write it in differentiable operations. If it is meant, "
        "as of a straight-through, surrogate or reversed gradient, "
        f"accept it with allow={names[0]!r}"
        + ("." if len(names) == 1 else f", or all of them: allow={names!r}.")
    )
    if not loss:
        raise GraphError.about(text, functions=names)
    _warn(wrong, text, key)


_COMMUNICATES = (
    "It communicates: the result is the derivative, by this rank's copy of x, of the sum of all "
    "ranks' results. Of a value that every rank returns, by an x that all share, it is the mean of "
    "the ranks' derivatives that is right: add them up, and divide by their number. "
)


def _communicates(function: type) -> bool:
    return (
        function.__module__ == "torch.distributed.nn.functional"
        or "_c10d_functional" in function.__name__
    )


def warn_of(functions: Iterable[type], code: Any = None, *key: Any) -> None:
    """Say that nobody has verified a second derivative, of a function with that code."""
    for function in functions if not _thread.compares else ():
        text = (
            f"{function.__name__} is a Python autograd.Function: its backward alone determines a "
            "second derivative through it, which PyTorch cannot verify, and which differences of "
            f"the gradient could not confirm here{f' ({code.co_qualname})' if code else ''}. "
            "Check it once: hodiff.check_derivatives(f, x). "
            f"{_COMMUNICATES if _communicates(function) else ''}(This warning appears once for "
            "each place that calls, and each f.)"
        )
        _warn([function], text, (code, *key))


def _warn(functions: Iterable[type], text: str, key: tuple[Any, ...]) -> None:
    """Warn once for each line of the user's and each function that it hands over."""
    level = _arguments.outside()
    frame = sys._getframe(level - 1)
    place = frame.f_code.co_filename, frame.f_lineno, key
    known = [_places.setdefault(function, set()) for function in functions]
    if not all(place in places for places in known):
        for places in known:
            places.add(place)
        warnings.warn(text, CustomFunctionWarning, stacklevel=level)


# --- what is known of one before anything is computed ---------------------------------------------


def is_unknown(
    function: type, nodes: list[Any], leaves: Sequence[Tensor], allow: Collection[str | type]
) -> bool:
    """Raise for a Python `autograd.Function` without a second derivative;
    whether that of another may be wrong.
    """
    mended = function.__module__.startswith(_arguments.LOADED_BY) and _versions.mend_from_local()
    if (
        mended
        or function in allow
        or function.__name__ in allow
        or not _nodes.reaches(nodes, leaves)
    ):
        return False
    if function.__name__ in _WITHOUT_SECOND or "CompiledFunction" in function.__name__:
        raise _messages.missing([function.__name__])
    if function.__name__ == _arguments.NODE:
        raise _arguments.freed()
    # PyTorch's own, identities; what hooks do is watched
    if function.__name__ in ("BackwardHookFunction", _SINK):
        return False
    if function.__module__.startswith("hodiff."):  # right, or it says so itself
        for node in nodes if nodes[0].__class__ in _nodes.HIDING else ():
            if node.form.refused is not None:
                raise node.form.refused
        return False
    _refuse_without_backward(function)
    if _versions.is_once_differentiable(function):
        raise GraphError.about(
            f"autograd.Function {function.__name__} is @once_differentiable: its part of a second "
            f"derivative would be silently missing. Remove the decorator if its backward consists "
            f"of differentiable operations, or accept the missing part with "
            f"allow={function.__name__!r}.",
            functions=[function.__name__],
        )
    return True


_SINK = "_DDPSink"
"""The Function that DistributedDataParallel puts behind its outputs: an identity."""

_WITHOUT_SECOND = frozenset({
    "CheckpointFunction",
    "CondAutogradOp",
    "FlexAttentionAutogradOp",
    "ScanAutogradOp",
    "WhileLoopAutogradOp",
})  # fmt: skip
"""PyTorch's own Functions whose backward is cut off from their arguments:
its derivative would be zero, silently.
"""


def refuse_without_backward(graph: _nodes.Survey, inputs: Sequence[Tensor]) -> None:
    """Raise where a gradient was computed by a Function that cannot be differentiated itself."""
    for function, nodes in graph.functions():
        if not _nodes.has_backward(function) and _nodes.reaches(nodes, inputs):
            _refuse_without_backward(function)


def _refuse_without_backward(function: type) -> None:
    if not _nodes.has_backward(function):
        raise GraphError.about(
            f"autograd.Function {function.__name__} has no backward, so it has no derivative. "
            f"Write one, in differentiable operations, or use torch operations instead.",
            functions=[function.__name__],
        )
