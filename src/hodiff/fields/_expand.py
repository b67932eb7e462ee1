"""A call of a field operator: what it was given, the choice of its route, and what all routes share."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from hodiff._core import _checks, _compiled_callers, _independence, _modes, _nesting, _nodes, _tree
from hodiff._core._call import call
from hodiff._core._graph import Graph, detached, memory_of
from hodiff._core._options import ChunkSize, check_option, is_set
from hodiff.errors import HodiffWarning, InputError
from hodiff.fields._extra import WithExtra
from hodiff.jets import _jet, _push
from hodiff.jets._registry import ByNoRoute, NoConstants, NoRule

Method = Literal["auto", "jets", "reverse"]
"""`method=`: which route computes."""


class Common(TypedDict, total=False):
    """What every field operator takes.

    For overloads alone: at run time signatures are spelled out.
    """

    batch_ndim: int
    create_graph: bool | None
    method: Method
    check_independence: bool
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


class Chunked(Common, total=False):
    """And those of second order."""

    chunk_size: ChunkSize


@dataclasses.dataclass(frozen=True)
class FieldCall:
    """What every field operator passes on: the function, its point, and how to evaluate."""

    name: str
    f: Any
    x: Any
    batch_ndim: int = 1
    create_graph: bool | None = None
    method: str = "auto"
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    chunk_size: ChunkSize = "auto"
    check_independence: bool = False
    has_aux: bool = False

    def checked(self) -> FieldCall:
        """Itself, with its arguments checked, and its function as one of a single value."""
        if self.x is _checks.MISSING:
            raise InputError(f"x: missing. hodiff evaluates at a point: hodiff.{self.name}(f, x).")
        if not _jet.is_jet(self.x):
            _checks.check_real_tensor(self.x, "x")
            if torch.compiler.is_compiling():
                _compiled_callers.check_point([self.x])
        _checks.check_batch([self.x], ["x"], self.batch_ndim)
        if not torch.Size(self.event).numel():
            raise InputError(f"x: has points of shape {self.event}, without coordinates to differentiate by.")
        _checks.check_arguments(self.args, self.kwargs)
        _checks.check_chunk_size(self.chunk_size)
        check_option(self.method, Method, "method")
        if isinstance(self.f, Tensor) and self.method == "jets":
            raise InputError('method: "jets" needs the function, and f is a tensor already computed.')
        if not callable(self.f) and not isinstance(self.f, Tensor):
            raise InputError(
                f"f: is a {type(self.f).__name__}; expected a function of x, or a tensor computed from it."
            )
        if is_set(self.has_aux, "has_aux") and isinstance(self.f, Tensor):
            raise InputError("has_aux: is about what a function returns, and f is a tensor already computed.")
        if not torch.compiler.is_compiling() and is_set(self.check_independence, "check_independence"):
            _independence.check(
                self.f, self.x, batch_ndim=self.batch_ndim, args=self.args, kwargs=self.kwargs, has_aux=self.has_aux
            )
        return dataclasses.replace(self, f=WithExtra(self.f, self.x)) if self.has_aux else self

    @property
    def record(self) -> bool:
        """Whether the result is to be differentiable: a field is a loss."""
        return _nesting.loss_recorded(self.create_graph)

    def grad_mode(self) -> Any:
        """The context of everything that the result is computed with, also under the caller's `no_grad`."""
        return _modes.grad_mode(self.record)

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of the batch."""
        return tuple(self.x.shape[: self.batch_ndim])

    @property
    def event(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[self.batch_ndim :])

    @contextlib.contextmanager
    def evaluation(self, passes: int) -> Iterator[Graph]:
        """The evaluation of f at x, for nested reverse mode."""
        asked = call(
            self.f.f if self.has_aux else self.f,
            self.x,
            passes=passes,
            batch_ndim=self.batch_ndim,
            create_graph=self.record,
            has_aux=self.has_aux,
            args=self.args,
            kwargs=self.kwargs,
        )
        with contextlib.ExitStack() as stack:
            with self.watched():
                ev = stack.enter_context(Graph(asked))
            yield ev

    def watched(self) -> Any:
        """The context of an evaluation by nested reverse mode: no automatic choice passes what Taylor mode refuses."""
        return _modes.on(NoConstants()) if self.method == "auto" else contextlib.nullcontext()

    def note(self, ev: Graph) -> None:
        """Keep what `f` returned beside its value, of an evaluation for nested reverse mode."""
        if self.has_aux:
            self.f.extra = ev.extra()

    def with_extra(self, value: Any) -> Any:
        """A value, and beside it what `f` returned beside its own, where it did."""
        return (value, self.finish(self.f.given())) if self.has_aux else value

    def finish(self, result: Any) -> Any:
        """A result as the caller gets it."""
        if self.record:
            return _push.connected(result, [self.x])
        if _jet.is_jet(self.x):
            return detached(result)
        if torch.compiler.is_compiling():  # where memory has no address: what may be the caller's is copied
            return _tree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, result)
        whole = _tree.tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, result)
        return detached(whole, {memory_of(self.x)})


def choose(call: FieldCall, jets: Callable[[], Any], reverse: Callable[[], Any], *, prefer: str = "jets") -> Any:
    """The result of one of two routes: as `method` says, else as measured; as a whole, never a mixture."""
    if torch.compiler.is_compiling():  # the engine's passes cannot be traced
        prefer = "jets"
    if isinstance(call.f, Tensor) or call.method == "reverse" or (call.method == "auto" and prefer == "reverse"):
        return call.finish(_by_reverse(reverse))
    try:
        return call.finish(jets())
    except ByNoRoute:
        raise
    except NoRule as error:
        if call.method == "jets" or _jet.is_jet(call.x) or torch.compiler.is_compiling():
            raise
        warnings.warn(
            f"{call.name}: Taylor mode has no rule for {error.operation}{': ' + error.why if error.why else ''}. "
            f"Nested reverse mode is used for the whole call: the same result, slower. Choose it by "
            f'method="reverse".',
            HodiffWarning,
            stacklevel=_checks.outside(),
        )
        return call.finish(_by_reverse(reverse))


@_compiled_callers.uncompiled
def _by_reverse(route: Callable[[], Any]) -> Any:
    """Nested reverse mode reads graphs, so a compiled caller leaves it alone."""
    return route()


def push(call: FieldCall, seeds: Sequence[Any], order: int, **options: Any) -> tuple[Any, Any]:
    """The output's series, and its expansion."""
    record = call.record
    output, expansion = _push.push(
        call.f, [call.x], [seeds], order, record=record, args=call.args, kwargs=call.kwargs, **options
    )
    series = _push.coefficients(output, expansion, call.batch)
    return series, expansion


def released(ev: Graph, results: list[Tensor]) -> list[Tensor]:
    """Results without their graph, where it leads to nothing but the leaf that hodiff made."""
    ours = {id(leaf) for leaf in ev.leaves} if ev.owned else set()
    return results if _nodes.survey(results).leaf_ids() - ours else [result.detach() for result in results]
