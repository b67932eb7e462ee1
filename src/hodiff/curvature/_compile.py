"""A pass over a kept graph, traced and compiled.

Only the pass is traced, as a function of its vectors: saved tensors, which do not depend on them, enter the compiled
code as constant arguments. (The parts of formulas that need these alone are computed in it, at each product: kept
instead, they take two to three times the memory, and reading that takes longer than fused code does.) The forward
pass and the first reverse pass ran eagerly, with all their checks, lent buffers and random draws, and stay as they are.
Two batches of one shape have the same code, and differ in their constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _claims, _modes, _results
from hodiff.curvature._space import Parts
from hodiff.errors import GraphError

Pass = Callable[..., "tuple[Tensor, ...]"]
"""A function of vectors, part by part."""
Key = tuple[Any, ...]
"""What two traced passes share if one piece of compiled code does for both."""


_ALONE = "the compiler"
"""Of several threads one traces: PyTorch has one flag for it, and two may leave it set."""


class NotCompiled(Exception):
    """Why a pass stays eager, in words."""


class Miscompiled(NotCompiled):
    """The operations are the pass's own, and the code that the compiler made of them is not."""


class Traced(NamedTuple):
    """A pass as a graph of operations, with what it takes besides vectors.

    Attributes:
        module: The graph, whose arguments are the constants, then the vectors.
        constants: Tensors of the kept graph.
        key: Its code, and how its arguments lie in memory.
    """

    module: torch.fx.GraphModule
    constants: list[Tensor]
    key: Key


class CompiledPass:
    """A pass over the graph of one batch."""

    __slots__ = ("_code", "_constants", "_versions")

    def __init__(self, code: Pass, constants: list[Tensor]) -> None:
        self._code, self._constants = code, constants
        self._versions = [tensor._version for tensor in constants]

    def __call__(self, vectors: Sequence[Tensor]) -> Parts:
        """The results, each in memory of its own: an eager pass copies where it must, and these copies are traced."""
        if [tensor._version for tensor in self._constants] != self._versions:
            raise GraphError(
                "a tensor that the kept graphs need was changed in place since they were built (a batch of the data?); "
                "H.refresh() evaluates anew."
            )
        given = [vector.contiguous() for vector in vectors]
        with _modes.grad_mode(False), _modes.autocast(given[0].device.type):
            return list(self._code(*self._constants, *given))


def trace(function: Callable[[Parts], Parts], vectors: Sequence[Tensor]) -> Traced:
    """The operations that a pass runs on its vectors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with _claims.Held(_ALONE), _results.unseen(), _modes.grad_mode(False), _modes.autocast(vectors[0].device.type):
        traced = make_fx(lambda *parts: tuple(function(list(parts))))(*vectors)
    graph = traced.graph
    drawn = sorted({str(node.target) for node in graph.nodes if _draws(node.target)})
    if drawn:
        raise NotCompiled(
            f"it draws random numbers ({', '.join(drawn)}), as an activation checkpoint with dropout does"
        )
    first = next(node for node in graph.nodes if node.op == "placeholder")
    places: dict[str, torch.fx.Node] = {}
    constants: list[Tensor] = []
    for node in list(graph.nodes):  # constants become arguments: the same code for every batch
        if node.op != "get_attr":
            continue
        if node.target not in places:
            with graph.inserting_before(first):
                places[node.target] = graph.placeholder(f"constant_{len(constants)}")
            constants += [_attribute(traced, node.target).detach()]
        node.replace_all_uses_with(places[node.target])
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module = torch.fx.GraphModule({}, graph)  # whatever else hangs on the traced one would stand in a cache's way
    layouts = [(t.shape, t.stride(), t.dtype, str(t.device)) for t in (*constants, *vectors)]
    return Traced(module, constants, (module.code, *layouts))


def _attribute(module: torch.nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _draws(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def compile_traced(traced: Traced, vectors: Sequence[Tensor]) -> Pass:
    """Code for the graph, from the compiler or from its caches on disk."""
    inductor: Any = __import__("torch._inductor", fromlist=["standalone_compile"])
    with _claims.Held(_ALONE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        with _modes.grad_mode(False), _modes.autocast(vectors[0].device.type):
            # Shapes of its own: those that tracing left on the graph keep PyTorch 2.14 and later from their cache.
            return inductor.standalone_compile(
                traced.module, [*traced.constants, *vectors], dynamic_shapes="from_example_inputs"
            )
