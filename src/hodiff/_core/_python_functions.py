"""Python `autograd.Function`s, whose backward alone says what a second derivative through them is.

PyTorch cannot verify that. So a product with the derivative is held, once, against central differences of the order
below, along the same direction: equal, nothing need be said; settled and another, both numbers are.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hodiff._core import _call, _nodes, _settings, _versions
from hodiff._core._arguments import outside
from hodiff._core._faults import interrupts
from hodiff._core._vectors import generic
from hodiff.errors import CustomFunctionWarning, GraphError

Leaves = Sequence[Tensor]
Chain = Callable[[Any, Leaves, Leaves, int], list[list[Tensor]]]
"""Of an evaluation, cotangents, a direction and a number: so many derivatives, from the gradient on."""

Finding = str | None
"""What a look has shown: nothing to say (""), what contradicts, or (None) that nothing can be told."""

STEPS = 4.0, 1.0, 0.25
"""Of the differences, in units of the cube root of the precision: there their errors are smallest."""

_findings: weakref.WeakKeyDictionary[type, dict[Any, Finding]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[type, set[tuple[str, int]]] = weakref.WeakKeyDictionary()


class _Looks(threading.local):
    running = False


_looks = _Looks()


def is_allowed(function: type, allow: Collection[str | type]) -> bool:
    """Whether the caller accepts what a Function makes of a second derivative."""
    return function in allow or function.__name__ in allow


def hold(graph: Any, chain: Chain) -> None:
    """Hold the Functions of an evaluation that a derivative of higher order goes through.

    The differences are taken when the evaluation is over: `f` then begins as it began, with the same random numbers,
    and nothing of the call is changed by it.
    """
    functions, graph.context.unheld = graph.context.unheld, {}
    if not functions or _looks.running:
        return
    code = _code(graph.call.what)
    if code is None or not _can_look(graph):
        warn_of(functions)
        return
    survey = _nodes.survey(graph.tensors())
    key = code, code.co_filename, graph.call.order, graph.leaves[0].dtype
    unknown = [function for function in functions if key not in _findings.setdefault(function, {})]
    if not unknown:
        _say(functions, key, recorded=graph.create_graph)
        return
    look = _Look(graph, chain, torch.finfo(_nodes.coarsest(survey, graph.leaves[0].dtype)).eps)

    def finish() -> None:
        finding = look.finding(graph)
        for function in unknown:
            _findings[function][key] = finding
        _say(functions, key, recorded=graph.create_graph)

    graph.afterwards(finish)


def _can_look(graph: Any) -> bool:
    """Whether `f` may be called again, here, and what it returns then means what it means now."""
    functions = [_versions.function_of(kind) for kind in graph.kinds if _nodes.is_function(kind)]
    return (
        graph.repeatable
        and all(leaf.__class__ is Tensor for leaf in graph.leaves)  # not sharded, nor of another library
        and not (_settings.tracing() or _versions.levels_entered() or _call.tangents())
        and not any(is_allowed(function, graph.call.allow) for function in functions)
    )


def _code(f: Any) -> Any:
    """The code of the user's function; None where there is none, or it is ours."""
    while True:
        if isinstance(f, partial):
            f = f.func
        elif isinstance(f, MethodType):
            f = f.__func__
        elif hasattr(f, "__wrapped__"):
            f = f.__wrapped__
        elif _call.USER in getattr(f, "__dict__", ()):
            f = vars(f)[_call.USER]
        else:
            break
    if not hasattr(f, "__code__"):
        f = type(f).forward if isinstance(f, nn.Module) else type(f).__call__
    ours = f"{getattr(f, '__module__', '')}.".startswith("hodiff.")
    return None if ours else getattr(f, "__code__", None)


# --- a look: a product, and six evaluations ---------------------------------------------------------------------------


class _Look:
    """Derivatives at the point, in one generic direction, and what differences say of them."""

    def __init__(self, graph: Any, chain: Chain, eps: float) -> None:
        self._chain, self._eps, self._order = chain, eps, graph.call.order
        self._weights = [_generic(x).to(x) for x in graph.tensors()]
        self._scales = [_size(leaf) / max(1, leaf.numel()) ** 0.5 or 1.0 for leaf in graph.leaves]
        self._direction = [
            (2 * _generic(leaf) - 3).to(leaf) * scale for leaf, scale in zip(graph.leaves, self._scales, strict=True)
        ]
        self._products = chain(graph, self._weights, self._direction, self._order)[1:]

    def finding(self, graph: Any) -> Finding:
        """What differences of `f` at other points say of the products."""
        steps = [step * self._eps ** (1 / 3) for step in STEPS]
        try:
            sides = [[self._at(graph, sign * step) for sign in (1, -1)] for step in steps]
        except Exception as error:  # `f` fails beside the point: no more is known than before
            if interrupts(error):
                raise
            return None
        findings = []
        for level, product in enumerate(self._products):
            differences = [
                [(right - left) / (2 * step) for right, left in zip(both[0][level], both[1][level], strict=True)]
                for both, step in zip(sides, steps, strict=True)
            ]
            findings += [self._compared(product, differences, graph.call.where.names)]
        return next((words for words in findings if words), None if None in findings else "")

    def _at(self, graph: Any, step: float) -> list[list[Tensor]]:
        """The derivatives below the last, a step on."""

        def enter(undo: _settings.Undo) -> None:
            undo += [partial(setattr, _looks, "running", False)]
            _looks.running = True

        with _settings.Scope(enter), _settings.recording(), graph.context.random.replayed():
            leaves = [
                (leaf.detach() + step * part).requires_grad_()
                for leaf, part in zip(graph.leaves, self._direction, strict=True)
            ]
            with graph.beside(leaves) as other:
                return self._chain(other, self._weights, self._direction, self._order - 1)

    def _compared(self, product: Leaves, differences: Sequence[Leaves], names: Sequence[str]) -> Finding:
        """Where two neighbouring differences are closest, whether the product is what they settle at."""
        pairs = [
            [_Row.of(*four) for four in zip(product, coarse, fine, self._scales, strict=True)]
            for coarse, fine in pairwise(differences)
        ]
        rows = min(pairs, key=lambda rows: sum(row.spread for row in rows))
        fine = differences[1 + pairs.index(rows)]
        whole = sum(row.size**2 for row in rows) ** 0.5
        sizes = [max(row.size, 0.01 * whole) for row in rows]
        tolerance = self._eps**0.25
        if all(row.gap + row.spread <= min(tolerance, EQUAL) * size for row, size in zip(rows, sizes, strict=True)):
            return ""
        if self._eps > FINE:  # where large steps meet many kinks, two may agree by chance: all three must
            least = [max(row.spread for row in both) for both in zip(*pairs, strict=True)]
            rows = [row._replace(spread=spread) for row, spread in zip(rows, least, strict=True)]
        for row, size, ours, theirs, name in zip(rows, sizes, product, fine, names, strict=True):
            if row.gap > max(SETTLED * row.spread, 3 * tolerance * size):
                at = int((ours.double() - theirs.double()).abs().argmax())
                numbers = (f"{float(part.reshape(-1)[at]):.6g}" for part in (ours, theirs))
                return f"{next(numbers)} against {next(numbers)}, in the entry of {name} where they are furthest apart"
        return None


SETTLED = 100
"""How many times closer differences must be to each other than to a product that they contradict.

Right Functions behind a million kinks come up to 30 in float32, for sums over so many settle too; wrong ones are
beyond 1000 where nothing has a kink.
"""

EQUAL = 0.02
"""How close they must be to a product that they confirm, whatever the precision."""

FINE = 1e-12
"""Below this precision steps are so small that they meet few kinks."""


class _Row(NamedTuple):
    """Of the part of one leaf: how far two differences are apart, the product from the finer one; its size."""

    spread: float
    gap: float
    size: float

    @classmethod
    def of(cls, product: Tensor, coarse: Tensor, fine: Tensor, scale: float) -> _Row:
        """In units of the leaf's own size."""
        sizes = (coarse - fine, product - fine, product, coarse, fine)
        spread, gap, *others = (scale * _size(part) for part in sizes)
        return cls(spread, gap, max(others))


def _size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.promote_types(x.dtype, torch.float32)))


def _generic(like: Tensor) -> Tensor:
    return generic(like.numel()).reshape(like.shape)


# --- what is said -----------------------------------------------------------------------------------------------------


def _say(functions: Collection[type], key: Any, *, recorded: bool) -> None:
    """Raise where numbers contradict (a loss, for which surrogates may be meant, warns); warn where they tell nothing.

    Args:
        functions: Those of the evaluation.
        key: Under which their findings are.
        recorded: Whether the result is differentiable.
    """
    findings = {function: _findings[function].get(key) for function in functions}
    wrong = {function: words for function, words in findings.items() if words}
    if not wrong:
        warn_of(function for function, words in findings.items() if words is None)
        return
    names = sorted(function.__name__ for function in wrong)
    allow = repr(names[0]) if len(names) == 1 else repr(names)
    text = (
        f"a second derivative through autograd.Function {', '.join(names)} is not the derivative of the gradient: "
        f"{next(iter(wrong.values()))} (the product, and central differences of the gradient along the same vector, "
        f"which agree with each other). Its backward is cut off from its arguments (a detach, NumPy, a kernel of its "
        f"own), or it is wrong: write it in differentiable operations. Where that is meant, as in a straight-through, "
        f"surrogate or reversed gradient, accept it with allow={allow}."
    )
    if not recorded:
        raise GraphError.about(text, functions=names)
    _warn(wrong, text)


def warn_of(functions: Iterable[type]) -> None:
    """Say that nobody has verified a second derivative."""
    for function in functions if not _looks.running else ():
        text = (
            f"{function.__name__} is a Python autograd.Function: its backward alone determines a "
            f"second derivative through it, which PyTorch cannot verify, and which differences of "
            f"the gradient could not confirm here. Check it once: hodiff.check_derivatives(f, x). "
            f"(This warning appears once for each place that calls.)"
        )
        _warn([function], text)


def _warn(functions: Iterable[type], text: str) -> None:
    """Once for each line of the user's."""
    level = outside()
    frame = sys._getframe(level - 1)
    place = frame.f_code.co_filename, frame.f_lineno
    known = [_places.setdefault(function, set()) for function in functions]
    if any(place not in places for places in known):
        for places in known:
            places.add(place)
        warnings.warn(text, CustomFunctionWarning, stacklevel=level)
