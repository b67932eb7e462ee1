"""`sparsity_pattern`: one reverse pass, followed by index sets, tells which entries can be other than zero.

The rows of a Jacobian, or of a Hessian as the Jacobian of the gradient, are what a reverse pass makes of unit
cotangents. That pass is linear, so which of its results depend on which entries of its cotangent is the pattern, and
it is followed through the very operations that compute the products later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _reverse, _tree
from hodiff._core._call import Call, call
from hodiff._core._graph import Graph
from hodiff._core._modes import on
from hodiff._core._options import Allowed
from hodiff._core._where import Where
from hodiff.errors import InputError
from hodiff.sparse._pattern import Pattern
from hodiff.sparse._sets import Sets, TooMany
from hodiff.sparse._tracer import Tracer, exits, tensors_in


def sparsity_pattern(
    f: Any,
    x: Any,
    *,
    order: int = 2,
    allow: Allowed = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Pattern:
    r"""Which entries of a Hessian, or of a Jacobian, can be other than zero.

    Args:
        f: A function of *x*: of one element for a Hessian, of a tensor or a container of tensors for a Jacobian.
            Or such a tensor already computed; the pattern then holds at this point alone.
        x: Where, as for `grad`.
        order: 2 for the Hessian, 1 for the Jacobian.
        allow: `@once_differentiable` Functions to accept, as for `grad`.
        args: Further positional arguments for `f`; whatever the dense tensors there hold later, the pattern is valid.
        kwargs: Keyword arguments for `f`, likewise.

    Returns:
        A `Pattern` of shape `(D, D)`, or `(M, D)` for M outputs, in the order of *x* and `f(x)`. It may be wider than
        need be, and misses nothing: at *x*, and wherever `f` does the same in Python, whatever the values. Where Python
        reads a value that follows from *x* (an `if`, `.item()`, the index in `x[x.argmax()]`, the shape of
        `x[x > 0]`), `f` may do something else elsewhere: `values_read` says so, and a plan then checks each matrix.
        A zero in a tensor that `f` closes over counts as one for ever, unless the tensor requires grad: give what
        changes in `args`.

    Raises:
        InputError: *order* is neither 1 nor 2, or the pattern has too many entries to be written down.
        GraphError: As for `hvp` and `jacobian`.

    Cost:
        One evaluation of `f` and one reverse pass, for a Hessian two; some 15 µs for each operation, and for each that
        adds, gathers or scatters some 50 ns for each entry of the sets that pass it. On the processor, wherever *x* is.

    Examples:
        A chain, each of whose terms couples two neighbours:

        >>> import torch, hodiff
        >>> chain = lambda x: ((x[1:] - x[:-1] ** 2) ** 2).sum()
        >>> print(hodiff.sparse.sparsity_pattern(chain, torch.ones(5)).picture())
        xx···
        xxx··
        ·xxx·
        ··xxx
        ···xx

    Reference:
        Walther, A. (2008). Computing sparse Hessians with automatic differentiation. ACM TOMS 34(1).
        doi:10.1145/1322436.1322439. Index sets are propagated there as here; here through the linear pass.
    """
    if not isinstance(order, int) or isinstance(order, bool) or order not in (1, 2):
        raise InputError(f"order: got {order!r}, expected 1 (a Jacobian) or 2 (a Hessian).")
    asked = call(f, Where(x), passes=order, create_graph=False, allow=allow, args=args, kwargs=kwargs)
    return detect(asked, order)


def detect(asked: Call, order: int, noted: list[Any] | None = None) -> Pattern:
    """The pattern of what a call asks for; the structure of what `f` returned is added to `noted`."""
    from hodiff.sparse import rules

    given = [*asked.where.tensors, *tensors_in((list(asked.args), dict(asked.kwargs)))]
    tracer = Tracer(rules.find, given, anywhere=asked.owned)
    with exits(tracer), on(tracer), Graph(asked) as ev:
        outputs = _reverse.gradient(ev, differentiated=True) if order == 2 else ev.tensors()
        if noted is not None:
            noted.append(_tree.flatten(ev.outputs)[2])
        cotangents = [torch.ones_like(output, memory_format=torch.contiguous_format) for output in outputs]
        tracer.begin(cotangents)
        try:
            found = _reverse.pull(ev, outputs, cotangents)
            sets = Sets.joined([tracer.read(part) for part in found])
            columns, rows = (_everything if tracer.lost else Sets.pairs)(sets)
        except TooMany as error:
            raise _too_many(tracer) from error
    names = tuple(tracer.unknown) + ((tracer.lost,) if tracer.lost else ())
    if order == 1:
        return Pattern(rows, columns, (tracer.width, len(sets)), names, tuple(tracer.values_read))
    both = torch.cat([rows, columns]), torch.cat([columns, rows])
    return Pattern(*both, (len(sets), len(sets)), names, tuple(tracer.values_read))


def _everything(sets: Sets) -> tuple[Tensor, Tensor]:
    """All pairs of an element and a number."""
    if len(sets) * sets.width > _DENSE:
        raise TooMany
    return torch.arange(len(sets), device="cpu").repeat_interleave(sets.width), torch.arange(
        sets.width, device="cpu"
    ).repeat(len(sets))


_DENSE = 2**26


def _too_many(tracer: Tracer) -> InputError:
    named = [*([tracer.lost] if tracer.lost else []), *tracer.unknown]
    blamed = f" Without a sparsity rule, and taken to couple all inputs: {', '.join(named)}." if named else ""
    return InputError(
        f"f: its matrix of derivatives is not sparse, or seems not to be: the pattern has too many entries to be "
        f"written down.{blamed} Give a pattern that you know (pattern=), or use products: hodiff.hvp, "
        f"hodiff.HessianOperator, hodiff.jvp."
    )
