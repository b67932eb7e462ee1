"""Outputs, leaves, and who owns the graph: the one place where a user's function is called.

`Evaluation` takes *what* (a function, or tensors already computed) and *where*, and gives the outputs
with the leaves to differentiate them by. It is a context: parameters and buffers stay lent (see
`_swap`) and switches stay set (see `_safety`) until the last pass inside it has run.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _examine, _nodes, _safety, _translate, _tree, _why
from hodiff._core._norms import ExactNorms
from hodiff._core._swap import ParameterLoan
from hodiff._core._where import Where, plain
from hodiff.errors import GraphError, InputError

Allowed = Sequence[str | type] | str | type
"""`allow=`: the `autograd.Function` classes, or their names, whose backward may be `@once_differentiable`."""


class Evaluation:
    """The outputs of `f` at a point, ready to be differentiated.

    Attributes:
        where: The parsed point.
        leaves: The tensors to differentiate by: aliases in the function form, the caller's own in
            the tensor form.
        outputs: What `f` returned, or the tensors given in its place.
        kinds: The classes of the nodes in the outputs' graph.
        create_graph: Whether the final result stays differentiable.
        owned: Whether the graph is ours, so that the last pass may free it.
        keep: Whether it stays all the same, for passes after this context (see `resumed`).
    """

    def __init__(
        self,
        what: Any,
        where: Any,
        *,
        passes: int,
        create_graph: bool | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        allow: Allowed = (),
        strict: bool = False,
        batch_ndim: int = 0,
        has_aux: bool = False,
        spread: bool = False,
        keep: bool = False,
    ) -> None:
        self.where = where if isinstance(where, Where) else Where(where)
        self.create_graph = _safety.recorded(create_graph)
        self.strict = strict
        self.batch_ndim = batch_ndim
        self.batch = _checks.check_batch(self.where.tensors, self.where.names, batch_ndim)
        self.owned = callable(what) and not isinstance(what, Tensor)
        self.keep = keep
        self.order = _safety.total_order(passes, self.create_graph)
        self.leaves: list[Tensor] = []
        self.outputs: Any = None
        self.aux: Any = None
        _checks.check_arguments(args, kwargs)
        self._what: Any = plain(what) if isinstance(what, nn.Module) else what
        self._args, self._kwargs = args, kwargs or {}
        self._allow = {allow} if isinstance(allow, (str, type)) else set(allow)
        self._spread = spread  # f receives the items of where one by one: f(x, y)
        self._has_aux = has_aux
        self._mixes = False
        self.kinds: frozenset[type] = frozenset()
        if self.owned:
            _check_function(what)
        else:
            self._check_tensors()

    def _check_tensors(self) -> None:
        """The tensor form: outputs with a graph, and the leaves they were computed from."""
        outputs, names, _ = _tree.flatten(self._what, "f")
        for value, name in zip(outputs, names, strict=True):
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name}: is a {type(value).__name__}; expected a function of {self.where.name}, or a tensor "
                    f"that was computed from it."
                )
        if self._args or self._kwargs:
            raise InputError("args, kwargs: are passed to a function, but f is a tensor already computed.")
        twice = self.where.duplicate()
        if twice:
            raise InputError(
                f"{twice}: the same tensor is given twice. A tensor already computed cannot tell the two apart; "
                f"give it once, or use the function form, where each is a variable of its own."
            )
        for tensor, name in zip(self.where.tensors, self.where.names, strict=True):
            if not tensor.requires_grad:
                error = GraphError(
                    f"{name}: does not require grad, so f was computed without tracking it. Call "
                    f"{name}.requires_grad_() before computing f, or give hodiff the function: hodiff.grad(f, x)."
                )
                self._explain(error)
                raise error

    def __enter__(self) -> Evaluation:
        self._held = _safety.Evaluating(self.order)
        try:
            if self.owned:
                self._lend()
                self.leaves = _aliases(self.where.tensors, self.create_graph)
                graph = self._call()
            else:
                self.outputs, self.leaves = self._what, self.where.tensors
                graph = self._survey()
            if self._has_aux:
                self.outputs, self.aux = _split(self.outputs)
            self._inspect(graph)
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, *rest: object) -> None:
        try:
            if isinstance(error, GraphError):
                self._explain(error)
        finally:
            self._held.close()
        if self.create_graph and self.owned:
            for leaf in self.leaves:
                # A leaf of ours stays in the result's graph. It must not collect a `.grad` nobody can see; but it
                # must go on requiring grad, for an activation checkpoint records as much again as at first.
                if leaf.is_leaf:
                    leaf.register_post_accumulate_grad_hook(_forget)
                    setattr(leaf, _OURS, True)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """The state of the evaluation once more, for a pass over a kept graph that calls back into Python.

        An activation checkpoint runs `f`'s blocks again inside the pass: parameters and buffers must
        be lent then, and the switches set, as they were in the forward pass.
        """
        self._held = _safety.Evaluating(self.order)
        try:
            if self.owned:
                self._lend()
                self._put(self.leaves)
            yield
        finally:
            self._held.close()

    def _lend(self) -> None:
        """Borrow the modules of the point, with all their parameters and buffers."""
        roots = [owned.module for owned in self.where.owned]
        if not roots:
            return
        self._loan = ParameterLoan(roots)
        self._held.defer(self._loan.close)
        if not self.create_graph:  # what is not differentiated need not be recorded
            self._loan.freeze(self.where.tensors, _still)
        for module in self._loan.modules:
            self._held.loan.take(module)

    def at(self, leaves: Sequence[Tensor]) -> Any:
        """What `f` returns when `leaves` stand in the place of the point's tensors."""
        self._put(leaves)
        argument = self.where.argument(leaves)
        return self._what(*(argument if self._spread else (argument,)), *self._args, **self._kwargs)

    def _put(self, leaves: Sequence[Tensor]) -> None:
        """Let the borrowed modules have `leaves` for parameters."""
        owned = self.where.owned
        if owned:
            theirs = [i for part in owned for i in range(part.start, part.start + len(part.names))]
            self._loan.put({id(self.where.tensors[i]): leaves[i] for i in theirs})

    def _call(self) -> _nodes.Survey:
        """Run `f`; once more, as the first time, where operations stand in the way of a right second derivative."""
        devices = [leaf.device for leaf in self.leaves]
        self._random = _safety.RandomState.of(next((d for d in devices if d.type == "cuda"), devices[0]))
        self.outputs = self._value()
        graph = self._survey()
        if self.order < 2:
            return graph
        names = graph.names()
        if "CudnnRnnBackward0" in names:
            self._held.also(_safety.no_cudnn)
        elif not (self.order == 2 and _translate.WEIGHT_NORM in names):
            return graph
        self._random.restore()
        self.outputs = self._value(exact=_translate.WEIGHT_NORM in names)
        return self._survey()

    def _survey(self) -> _nodes.Survey:
        """The graph of the outputs, down to the leaves; below an alias begins the caller's own."""
        aliased = self.owned and self.create_graph
        aliases = [leaf.grad_fn for leaf in self.leaves if leaf.grad_fn is not None] if aliased else ()
        if self._has_aux:
            outputs, _ = _split(self.outputs)
            return _nodes.survey(_tensors(outputs), aliases)
        return _nodes.survey(_tensors(self.outputs), aliases)

    def drew_random(self) -> bool:
        """Whether `f` drew random numbers (from PyTorch's default generators)."""
        return self._random.moved()

    def _value(self, exact: bool = False) -> Any:
        versions = [leaf._version for leaf in self.leaves]
        try:
            if self.order < 3 and not exact:
                value = self.at(self.leaves)
            else:
                with ExactNorms() as norms:
                    value = self.at(self.leaves)
                self._mixes = norms.mixes_samples
        except RuntimeError as error:
            note = _translate.advice_for_f(error)
            if note:
                error.add_note(note)
            raise
        for leaf, version, name in zip(self.leaves, versions, self.where.names, strict=True):
            if leaf._version != version:
                raise GraphError(
                    f"f changes its argument ({name}) in place, so its derivative by the original value is lost; "
                    f"begin f with x = x.clone()."
                )
        return value

    def tensors(self) -> list[Tensor]:
        """The outputs as a flat list, each checked to be a real tensor."""
        if isinstance(self.outputs, Tensor):
            return [_checks.check_output(self.outputs, "f(x)" if self.owned else "f")]
        leaves, names, _ = _tree.flatten(self.outputs, "f(x)" if self.owned else "f")
        return [_checks.check_output(leaf, name) for leaf, name in zip(leaves, names, strict=True)]

    def scalars(self) -> Tensor:
        """The single output, checked to be one element, or one per sample."""
        output = _checks.check_output(self.outputs)
        _checks.check_scalars(output, self.batch_ndim, self.batch)
        return output

    def value(self) -> Any:
        """What the caller gets to see of the outputs: detached, unless the result is differentiable."""
        return self.outputs if self.create_graph else self._apart(self.outputs)

    def extra(self) -> Any:
        """What `f` returned beside the loss, likewise."""
        return self.aux if self.create_graph else self._apart(self.aux)

    def _apart(self, value: Any) -> Any:
        """`value` detached; copied where it is the caller's tensor or a view of it, as where f returns its argument."""
        theirs = [*self.where.tensors, *([] if self.owned else _tensors(self._what))]
        return detached(value, {memory_of(tensor) for tensor in theirs})

    def _inspect(self, graph: _nodes.Survey) -> None:
        try:
            self._judge(graph)
        except GraphError as error:
            self._explain(error)
            raise

    def _explain(self, error: GraphError) -> None:
        """Let the message say which line and which variable it is about, where that can be told (see `_why`)."""
        failure = _why.Failure(
            error,
            self._what if self.owned else None,
            self._again if self.owned and not _collective() else None,
            [] if self.owned else _tensors(self._what),
            self.leaves or self.where.tensors,
            self.where.tensors,
            self.where.names,
            self.strict,
        )
        _why.complete(failure)

    def _again(self) -> list[Tensor]:
        """What `f` returns when it is called once more, with the same random numbers; they are not drawn twice."""
        now = _safety.RandomState.of(self._random.device)
        self._random.restore()
        try:
            outputs = self.at(self.leaves)
        finally:
            now.restore()
        return _tensors(_split(outputs)[0] if self._has_aux else outputs)

    def _judge(self, graph: _nodes.Survey) -> None:
        """Look at the graph once: what it depends on, custom Functions, norms, samples that mix."""
        self.kinds = frozenset(graph.by_class)
        outputs = self.tensors()
        if self.owned:
            _examine.refuse_bypass(graph, self.where)
        unused = _examine.unused(graph, self.leaves, self.where.names)
        if len(unused) == len(self.leaves):
            raise _examine.independent(self.owned, unused, any(output.requires_grad for output in outputs))
        if unused and self.strict:
            raise GraphError(f"strict=True: the result does not depend on {_examine.listed(unused)}.")
        if self.order >= 2:
            _examine.check_functions(graph, self.leaves, self._allow)
            _examine.refuse_third_order(graph)
            _examine.refuse_weight_norm(graph, self.leaves)
        if self.batch_ndim and (self._mixes or _examine.mixes_samples(graph)):
            _examine.warn_of_mixing(self.batch_ndim)


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in _tree.flatten(outputs)[0] if isinstance(leaf, Tensor)]


def detached(value: Any, theirs: Container[int] = ()) -> Any:
    """`value` with its tensors cut from any graph, copied from memory that is `theirs`; other leaves as they are."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone() if theirs and memory_of(leaf) in theirs else leaf.detach()

    return _tree.tree_map(cut, value)


def memory_of(tensor: Tensor) -> int:
    """An identity of the memory under a tensor: equal where two share it."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass that has none
        return id(tensor)


def _aliases(tensors: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
    """A leaf for each tensor. Inside a `torch.func` transform, where PyTorch forbids leaves of our own, raise."""
    try:
        if create_graph:
            torch.empty(0).requires_grad_()  # refused there, as the leaves of a detached result are
        return [_alias(tensor, create_graph) for tensor in tensors]
    except RuntimeError as error:
        if "functorch" not in str(error):
            raise
        raise InputError(
            "hodiff was called inside a torch.func transform (vmap, grad, jvp, ...), where it cannot make leaves. "
            "For a batch, call hodiff once with batch_ndim=1; for a derivative of a derivative, nest hodiff calls."
        ) from error


def _alias(tensor: Tensor, create_graph: bool) -> Tensor:
    """A leaf that stands for the caller's tensor; connected to it where the result is differentiable."""
    if tensor.is_inference():
        tensor = tensor.clone()
    if not (create_graph and tensor.requires_grad):
        return tensor.detach().requires_grad_()
    if tensor.is_leaf:
        return tensor.view_as(tensor)
    # An in-place operation in f must not reach the caller's tensor. PyTorch refuses it on a leaf's
    # view by itself, and on this one because `unbind` may return several.
    return tensor.unsqueeze(0).unbind()[0]


def _still(parameter: Tensor) -> Tensor:
    """A parameter that is not differentiated in: its value, unrecorded."""
    return (parameter.clone() if parameter.is_inference() else parameter).detach()


def _forget(leaf: Tensor) -> None:
    leaf.grad = None


_OURS = "_a_leaf_of_hodiff"


def is_ours(leaf: Tensor) -> bool:
    """Whether a leaf, met in the graph of a differentiable result, is one that an evaluation made."""
    return hasattr(leaf, _OURS)


def _collective() -> bool:
    """Whether `f` may wait for other processes, which would not call it again."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _check_function(what: Any) -> None:
    if isinstance(what, type) and issubclass(what, nn.Module):
        raise InputError(f"f: is the class {what.__name__}; give an instance of it.")


def _split(outputs: Any) -> tuple[Any, Any]:
    if isinstance(outputs, tuple) and len(outputs) == 2:
        return outputs
    raise InputError(f"f: returned {_tree.describe(_tree.flatten(outputs)[2])}; has_aux=True expects (loss, extra).")
