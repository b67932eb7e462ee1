"""What `H.compile()` keeps: compiled passes for the batches whose graphs are kept, and a record of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _checks, _claims, _random_vectors
from hodiff._core._faults import interrupts
from hodiff.curvature import _memory
from hodiff.curvature._batch_graph import BatchGraph
from hodiff.curvature._cache import GraphCache
from hodiff.curvature._compile import CompiledPass, Key, Miscompiled, NotCompiled, Pass, compile_traced, trace
from hodiff.curvature._cost import CompiledRecord
from hodiff.curvature._space import Parts, Space
from hodiff.errors import HodiffWarning

Apply = Callable[[Any, Parts, "int | None", int], Parts]
"""The eager product of one batch's sum."""
MANY, SMALL = 8, 10_000
"""How many vectors a compiled pass takes at once, of up to so many entries; larger ones come one by one."""
SHAPES = 8
"""Batches of so many different shapes are compiled."""


class Passes(NamedTuple):
    """Of one batch: a pass for one vector, and perhaps one for `MANY`."""

    one: CompiledPass
    many: CompiledPass | None


class Compilation:
    """Compiled passes of one operator (or block), made once for each shape of a batch."""

    def __init__(self, chosen: Sequence[int], space: Space, many: bool) -> None:
        self._key, self._space = tuple(chosen), space
        self._many = many and space.size <= SMALL
        self._code: dict[Key, Pass] = {}
        self.record: CompiledRecord | None = None

    def passes(self, graphs: GraphCache[Any, Any], apply: Apply) -> dict[int, Passes]:
        """Those of the batches by number; made now, by one thread, where the graphs are new."""
        found = graphs.attached.get(self._key)
        if found is None:
            with _claims.Held(self):
                found = graphs.attached.get(self._key)
                return self.make(graphs, apply) if found is None else found
        return found

    def bytes(self, graphs: GraphCache[Any, Any]) -> int:
        """What the constants take that are not the graphs' own."""
        return 0 if self.record is None or self._key not in graphs.attached else self.record.bytes

    def make(self, graphs: GraphCache[Any, Any], apply: Apply) -> dict[int, Passes]:
        """Trace the pass over each kept graph, and compile those of new shapes."""
        start, found, eager, error, size, before = time.perf_counter(), {}, {}, 0.0, 0, len(self._code)
        for number, graph in graphs.kept_graphs().items():
            try:
                found[number], own, extra = self._compiled(graph, apply)
            # Of any kind: what tracer and compiler raise is not written down anywhere, and eager products go on.
            except Exception as reason:
                if interrupts(reason):
                    raise
                eager[number] = _words(reason)
                continue
            error, size = max(error, own), size + extra
        count, seconds = graphs.batches or 0, time.perf_counter() - start
        eager |= dict.fromkeys(set(range(count)) - set(found) - set(eager), "its graph is not kept (memory_budget=)")
        first = self.record is None
        compiled = len(self._code) - before
        self.record = CompiledRecord(count, len(found), compiled, seconds, error, size, dict(sorted(eager.items())))
        graphs.attached[self._key] = found
        if eager and first:
            _warn(self.record)
        return found

    def _compiled(self, graph: BatchGraph, apply: Apply) -> tuple[Passes, float, int]:
        """The passes of one batch, once they agree with eager ones; their error, and what they keep."""
        if graph.calls_back:
            raise NotCompiled("its passes run Python (an activation checkpoint or a hook)")
        one, error, size = self._checked(graph, apply, None)
        if not self._many:
            return Passes(one, None), error, size
        try:
            many, other, more = self._checked(graph, apply, MANY)
        except Miscompiled:  # the pass for one vector is right, and serves all
            return Passes(one, None), error, size
        return Passes(one, many), max(error, other), size + more

    def _checked(self, graph: BatchGraph, apply: Apply, count: int | None) -> tuple[CompiledPass, float, int]:
        """One pass, compared with the eager one on other vectors than those traced."""
        generator = torch.Generator().manual_seed(0)

        def eager(vectors: Parts) -> Parts:
            return apply(graph, vectors, count, count or 1)

        with graph.ready():
            vectors = self._draw(count, generator)
            traced, size = _memory.measured(lambda: trace(eager, vectors), vectors[0].device)
            if traced.key not in self._code:
                if len(self._code) >= SHAPES * (1 + self._many):
                    raise NotCompiled(f"more than {SHAPES} shapes of batches are not compiled")
                self._code[traced.key] = compile_traced(traced, vectors)
            found = CompiledPass(self._code[traced.key], traced.constants)
            vectors = self._draw(count, generator)
            expected = eager(vectors)
            error, right = _disagreement(found(vectors), expected)
            if right:
                return found, error, size
            differs = f"the compiled product differs from the eager one, by {error:.1g}"
            if _disagreement(CompiledPass(traced.module, traced.constants)(vectors), expected)[1]:
                raise Miscompiled(f"{differs}: PyTorch's compiler makes wrong code of these operations")
            raise NotCompiled(
                f"{differs}: a backward that leaves torch (NumPy), draws random numbers, or decides by values"
            )

    def _draw(self, count: int | None, generator: torch.Generator) -> Parts:
        likes = self._space.zeros(count)
        return [_random_vectors.draw(like.shape, like, "gaussian", generator) for like in likes]


def through(passes: Passes, parts: Parts, count: int | None) -> Parts:
    """The product of one vector, or of several, by compiled passes."""
    if count is None:
        return passes.one(parts)
    found = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
    start = 0
    while start < count:
        if passes.many is not None and count - start >= MANY:
            own, stop = passes.many([part[start : start + MANY] for part in parts]), start + MANY
        else:
            own, stop = [part.unsqueeze(0) for part in passes.one([part[start] for part in parts])], start + 1
        for whole, part in zip(found, own, strict=True):
            whole[start:stop] = part
        start = stop
    return found


def _disagreement(got: Parts, expected: Parts) -> tuple[float, bool]:
    """The relative error of a compiled product, and whether it is rounding, as a whole and in each leaf."""
    errors, sizes = _norms([a.double() - b.double() for a, b in zip(got, expected, strict=True)]), _norms(expected)
    whole, dtype = float(sizes.norm()), expected[0].dtype
    allowed = _ALLOWED.get(dtype, 5e-2)
    floor = 30 * torch.finfo(dtype).eps * whole  # a leaf may be rounding noise itself: a bias before a batch norm
    return float(errors.norm()) / (whole or 1.0), bool((errors <= allowed * sizes + floor).all())


_ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2}


def _norms(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.double().norm().cpu() for part in parts])


def _words(reason: Exception) -> str:
    text = str(reason)
    if isinstance(reason, NotCompiled):
        return text
    name = type(reason).__name__
    if "InvalidCxxCompiler" in f"{name} {text}" or "TritonMissing" in f"{name} {text}":
        return "there is no compiler on this machine (for a CPU PyTorch needs g++ or clang; CXX= names another)"
    if "tracing tensor" in text:
        return "its backward, or a hook, reads a value (float(), .item()), which a traced pass cannot"
    return f"{name}: {text.strip().splitlines()[0] if text.strip() else 'no message'}"


def _warn(record: CompiledRecord) -> None:
    reasons: dict[str, list[int]] = {}
    for number, reason in record.eager.items():
        reasons.setdefault(reason, []).append(number)
    listed = "; ".join(f"{_numbers(numbers)}: {reason}" for reason, numbers in reasons.items())
    warnings.warn(
        f"compile: {record.batches - record.compiled} of {record.batches} batches stay eager, whose products are as "
        f"before. {listed}. (H.compiled.eager has the reasons.)",
        HodiffWarning,
        stacklevel=_checks.outside(),
    )


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    return f"batch {shown}" if len(numbers) == 1 else f"batches {shown}"
