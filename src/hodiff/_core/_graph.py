"""The graph of reverse mode: the outputs of a call, its leaves, and who owns the graph between
them.

An `OutputGraph` is a context: the modules of the point stay lent and the switches set (see
`_lending`) until the last pass inside it has run. What operators keep of it afterwards is the graph
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from hodiff._core import (
    _arguments,
    _hooks,
    _messages,
    _nodes,
    _refusals,
    _settings,
    _tree,
    _versions,
)
from hodiff._core._call import LEAF_TAG, Call, LeafTag, cut, tag_of
from hodiff._core._kernels import plain_attention
from hodiff._core._lending import EvaluationContext
from hodiff.errors import GraphError, InputError

__all__ = ["OutputGraph", "Watched", "detached", "split"]


class OutputGraph:
    """The outputs of `f` at a point, ready to be differentiated.

    Attributes:
        call: What was asked.
        context: The state in which `f` runs.
        create_graph: Whether the final result stays differentiable.
        keeps: Whether passes leave the graph of the outputs as it is.
        leaves: The tensors to differentiate by: aliases in the function form, the caller's own in
            the tensor form.
        outputs: What `f` returned, or the tensors given in its place.
        aux: What it returned beside them.
        kinds: The classes of the nodes in the outputs' graph.
        higher: Whether results are derivatives of an order above the first, those that `f` takes
            itself counted.
        recorded: Whether passes must be recorded to be right, though their results are detached.
        surrogates: Whether a second derivative that is none may be meant, as of a loss.
        last: What else is done when the evaluation is over and has succeeded.
    """

    outputs: Any = None
    aux: Any = None
    kinds: Set[type] = frozenset()
    higher = recorded = surrogates = _mixes = _common = False
    last: Callable[[OutputGraph], object] | None = None
    _first: Sequence[Tensor] = ()  # where there are several evaluations, the leaves of the first
    _starts: Collection[_nodes.Node] = ()  # of leaves that stand for the caller's own graph

    def __init__(self, call: Call, leaves: Sequence[Tensor] | None = None) -> None:
        """Evaluate `f`; with `leaves`, at those, of other values than the point's: a step on,
        a solution.
        """
        self.call = call
        self.create_graph = call.create_graph
        self.keeps = call.create_graph or call.keep or not call.builds_graph
        self._at = leaves
        self.leaves: list[Tensor] = []

    # --- the evaluation

    def __enter__(self) -> OutputGraph:
        if not self.call.builds_graph:
            self._check_tensors()
        self.context = EvaluationContext(self.call).__enter__()
        try:
            if self.call.builds_graph:
                theirs = _versions.hooks_on(True)
                if theirs is not None:
                    shared = self.call.create_graph and not self.call.keep
                    _hooks.keep(theirs, self.context.undo, shared=shared)
                survey = self._evaluate(self._at)
            else:
                self.outputs, self.leaves = self.call.what, self.call.where.tensors
                survey = _nodes.survey(_tensors(self.outputs), self._starts)
            self._judge(survey)
        except BaseException as error:
            self._note_memory(error)
            self.context.__exit__()
            raise
        return self

    def move(self, leaves: Sequence[Tensor], args: Sequence[Any]) -> None:
        """Evaluate `f` once more, at other leaves and with other arguments;
        what it was before is forgotten here.
        """
        self.call = self.context.call = self.call._replace(args=args)
        self._first = self._first or self.leaves
        self._judge(self._evaluate(leaves))

    def __exit__(self, kind: object, error: object, *rest: object) -> None:
        context = self.context
        try:
            if error is not None and isinstance(error, GraphError):
                self._explain(error)
            if error is not None:
                self._note_memory(error)
            context.close(last=False)
        except BaseException:
            context.__exit__()
            raise
        last, self.last = self.last, None
        if context.hooks.changed and self.call.order >= 2 and error is None:
            _refusals.warn_of_hooks()
        if last is not None and error is None:
            last(self)
        if self.create_graph and self.call.builds_graph:
            for leaf in self.leaves:
                # A leaf of ours stays in the result's graph. It must not collect a `.grad` nobody
                # can see; but it must go on requiring grad, for an activation checkpoint records as
                # much again as at first.
                if leaf.is_leaf:
                    leaf.register_post_accumulate_grad_hook(_forget)

    def _note_memory(self, error: object) -> None:
        if self.call.order >= 2 and isinstance(error, BaseException):
            _messages.note_memory(error)

    def beside(self, leaves: Sequence[Tensor]) -> OutputGraph:
        """The function at other leaves, in an evaluation of its own,
        for numbers that nobody is given.
        """
        call = self.call._replace(
            create_graph=False, keep=False, batch_ndim=0, batch=torch.Size(), strict=False
        )
        return OutputGraph(call, leaves)

    def kept(self) -> OutputGraph:
        """A copy of this graph for passes whose results are detached and that leave it as it is."""
        other = copy.copy(self)
        # what is lent to a pass that calls back is lent as to `f`
        other.call = self.call._replace(keep=True)
        other.create_graph, other.keeps = False, True
        return other

    def resumed(self) -> EvaluationContext:
        """The state of the evaluation once more, for a pass over a kept graph that calls back into
        Python.

        An activation checkpoint runs `f`'s blocks again inside the pass: parameters and buffers
        must be lent then, and the switches set, as they were in the forward pass.
        """
        return self.context.resumed(self.leaves if self.call.builds_graph else ())

    def _check_tensors(self) -> None:
        """The tensor form: outputs with a graph, and the leaves they were computed from."""
        outputs, names, _ = _tree.flatten(self.call.what, "f")
        for value, name in zip(outputs, names, strict=True):
            if not isinstance(value, Tensor):
                raise InputError(
                    f"{name}: got {_arguments.kind(value)}, expected a function of "
                    f"{self.call.where.name}, or a tensor computed from it."
                )
        twice = self.call.where.duplicate(range(len(self.call.where.tensors)))
        if twice:
            raise InputError(
                f"{twice[0]}: the same tensor is given twice, and a tensor already computed cannot "
                f"tell the two apart. Give it once, or give a function, which takes each as its "
                f"own variable."
            )
        for tensor, name in zip(self.call.where.tensors, self.call.where.names, strict=True):
            if not tensor.requires_grad:
                error = GraphError(
                    f"{name} does not require grad, so f was computed without tracking it. Give "
                    f"the function instead of its value: f, not f(x). Where the call takes {name} "
                    f"as it is, {name}.requires_grad_() before computing f(x) does as well."
                )
                self._explain(error)
                raise error

    def _evaluate(self, given: Sequence[Tensor] | None) -> _nodes.Survey:
        """Run `f`; once more, as the first time,
        where operations stand in the way of a right derivative.
        """
        context, order = self.context, self.call.order
        self.leaves = context.leaves(given)
        if self.call.create_graph or given is not None:
            self._starts = {*map(_nodes.grad_fn, self.leaves)} - {None}
        context.remember()
        exact = order >= 3 or context.forward_mode
        survey = failure = None
        try:
            survey = self._run(exact=order if exact else 0)
        except RuntimeError as error:
            # of a second pass by hand, where there is no second derivative
            if context.by_hand is None and not context.has_loaded_dynamo:
                raise
            failure = error
        rare = _refusals.WRONG_AT_ONCE if order < 2 else _refusals.WRITTEN
        self._common = not (
            survey is None or context.by_hand or context.forward_mode or rare.among(survey)
        )
        if survey is not None and self._common:
            return survey  # as nearly always
        return self._evaluate_otherwise(survey, failure, exact=exact)

    def _evaluate_otherwise(
        self,
        survey: _nodes.Survey | None,
        failure: RuntimeError | None,
        *,
        exact: bool,
    ) -> _nodes.Survey:
        """The outputs, or those of `f` once more,
        by routes that are right for the operations that were met.
        """
        context = self.context
        by_hand = context.by_hand
        names = survey.names() if survey is not None and self.call.order >= 2 else set()
        if by_hand is not None:
            names = names | by_hand.names
        order = self.call.order + (by_hand.count if by_hand is not None else 0)
        at_once = (
            _refusals.WRONG_AT_ONCE.among(survey)
            if survey is not None and self.call.order < 2
            else ()
        )
        wrong = {type(node).__name__ for node in at_once}
        inexact = context.forward_mode or names & _messages.WRITTEN_OUT or _messages.DIGITS in names
        inexact = inexact or (wrong and wrong & _versions.PRODUCTS.keys())
        some = names & _messages.WRITTEN_AT_SOME
        if some and not exact:
            inexact = inexact or (by_hand is not None and not some <= _messages.NORMS)
            # A block that runs again gives each value back once: no look before the pass.
            unseen = context.runs_again and some - _messages.NORMS - {_messages.VIEW}
            inexact = inexact or survey is None or unseen or _refusals.loses_digits(survey)
        if by_hand is not None and (by_hand.batched or order >= 3):
            inexact = inexact or _messages.at_third(names)
        if self.call.order < 2 and _messages.fused(names | wrong):
            plain_attention.enter(context.undo)
        elif "CudnnRnnBackward0" in names:
            _settings.no_cudnn.enter(context.undo)
        elif failure is not None and context.has_loaded_dynamo:
            _settings.eager.enter(context.undo)
        elif failure is not None:
            raise failure
        elif survey is not None and (exact or not inexact):
            return survey
        context.random.restore()
        return self._run(exact=max(order, 2) if exact or inexact or failure else 0)

    def _run(self, *, exact: int) -> _nodes.Survey:
        """Evaluate `f`, where `exact` is an order of derivatives by definitions
        that are right up to it.
        """
        if exact:  # which few calls need
            from hodiff._core._substitutes import ExactNorms

            with _settings.on(ExactNorms(exact)) as norms:
                outputs = self.context.run(self.leaves)
            self._mixes = norms.mixes_samples
        else:
            outputs = self.context.run(self.leaves)
        self.outputs, self.aux = split(outputs) if self.call.has_aux else (outputs, None)
        outputs = [self.outputs] if self.outputs.__class__ is Tensor else _tensors(self.outputs)
        return _nodes.survey(outputs, self._starts)

    # --- what came out

    def warn_of_zeros(self, second: Iterable[Any], vectors: Iterable[Any] | None = None) -> None:
        """Say that second derivatives by tensors are 0 where a network has no others."""
        if not self.call.where.module_slices and any(map(_messages.BENDS.__getitem__, self.kinds)):
            from hodiff._core._values import warn_of_zeros

            warn_of_zeros(lambda: _nodes.survey(self.tensors()).operations(), second, vectors)

    def tensors(self) -> list[Tensor]:
        """The outputs as a flat list, each checked to be a real tensor."""
        if self.outputs.__class__ is Tensor or isinstance(self.outputs, Tensor):
            return [
                _arguments.check_output(self.outputs, "f(x)" if self.call.builds_graph else "f")
            ]
        leaves, names, _ = _tree.flatten(self.outputs, "f(x)" if self.call.builds_graph else "f")
        return [
            _arguments.check_output(leaf, name) for leaf, name in zip(leaves, names, strict=True)
        ]

    def scalars(self) -> Tensor:
        """The single output, checked to be one element, or one per sample."""
        output = (
            self.outputs
            if self.outputs.__class__ is Tensor
            else _arguments.check_output(self.outputs)
        )
        if self.call.batch_ndim or output.numel() != 1:
            _arguments.check_scalars(output, self.call.batch_ndim, self.call.batch)
        return output

    def value(self) -> Any:
        """The outputs as the caller gets to see them: detached,
        unless the result is differentiable.
        """
        return self._given(self.outputs)

    def extra(self) -> Any:
        """The values that `f` returned beside the loss, likewise."""
        return self._given(self.aux)

    def _given(self, value: Any) -> Any:
        if self.create_graph:
            _nodes.mark_results(_tensors(value))
            return value
        # Copied where it is the caller's tensor or a view of it, as where f returns its argument.
        theirs = [
            *self.call.where.tensors,
            *([] if self.call.builds_graph else _tensors(self.call.what)),
        ]
        return detached(value, {_tree.memory_of(tensor) for tensor in theirs})

    # --- what one look at the graph tells

    def _judge(self, survey: _nodes.Survey) -> None:
        """Judge all that the result depends on: custom Functions, norms, samples that mix."""
        call, context = self.call, self.context
        self.kinds = survey.kinds
        self.higher = call.order >= 2 or context.nests or context.by_hand is not None
        try:
            if context.by_hand is not None and context.by_hand.refused is not None:
                raise context.by_hand.refused
            outputs = self.tensors()
            missing = self._unreached(survey)
            if missing:
                everything = len(missing) == len(self.leaves)
                if everything and (call.strict is not False or self._by_copies(survey)):
                    has_graph = any(output.requires_grad for output in outputs)
                    raise _refusals.independent(call.builds_graph, missing, has_graph)
                if call.strict:
                    raise GraphError(
                        f"strict=True: the result does not depend on {_refusals.listed(missing)}."
                    )
            if call.order >= 2:
                if biased := _refusals.BIASED.among(survey):
                    _refusals.BIAS(2, biased, self.leaves)
                # of which nothing need be said
                known = survey.kinds <= _nodes.UNREMARKABLE[call.order]
                self.recorded = not known and _refusals.judge(
                    survey, self.leaves, call.order, call.allow, context.unheld
                )
            else:  # of which nothing rare was found before, mostly
                self.recorded = not self._common and _refusals.refuse_first(survey, self.leaves)
        except GraphError as error:
            self._explain(error)
            raise
        if call.batch_ndim and (self._mixes or _refusals.MIXING.among(survey)):
            _refusals.warn_of_mixing(call.batch_ndim)

    def unreached(self, outputs: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> list[str]:
        """The names of the leaves that do not matter to some outputs.

        Raise where tensors matter that must not.

        Args:
            outputs: What a pass begins at.
            beside: What it leads to beside the leaves.
        """
        survey = _nodes.survey(outputs, self._starts)
        if self.call.order < 2:
            self.recorded |= _refusals.refuse_first(survey, [*self.leaves, *beside])
        return self._unreached(survey)

    def _unreached(self, survey: _nodes.Survey) -> list[str]:
        names = self.call.where.names
        if not self.call.builds_graph:
            pairs = zip(self.leaves, names, strict=True)
            return [name for leaf, name in pairs if not survey.contains(leaf)]
        variables = survey.variables()
        if (
            not self._first
            and not self._starts
            and {*map(id, variables)} == {*map(id, self.leaves)}
        ):
            return []  # as nearly always: these, and no others
        mine, reached = self.context.leaf_tag, set[int]()
        theirs, own = list[Tensor](), 0
        if self._first:  # it has been moved
            past = [
                leaf
                for leaf in self._first
                if leaf.grad_fn and not any(leaf is now for now in self.leaves)
            ]
            if any(leaf.grad_fn in survey.visited for leaf in past):
                raise _refusals.leftover(self._kept_by(mine))
        if self._starts:
            reached |= {
                n
                for n, leaf in enumerate(self.leaves)
                if leaf.grad_fn and leaf.grad_fn in survey.visited
            }
        for variable in variables:
            if LEAF_TAG not in variable.__dict__:
                theirs += [variable]
                continue
            tag, number = variable.__dict__[LEAF_TAG]
            if tag is mine and variable is self.leaves[number]:
                reached |= {number}
                own += 1
            elif tag is mine or (
                not tag.open and (tag.detached or _nodes.leads_past_results(survey, variable))
            ):
                raise _refusals.leftover(self._kept_by(tag))
        if own < len(variables):
            self._refuse_bypass(survey, {*map(id, theirs)})
        if len(reached) == len(names):
            return []
        return [name for number, name in enumerate(names) if number not in reached]

    def _refuse_bypass(self, survey: _nodes.Survey, theirs: Container[int]) -> None:
        """Raise when the caller's own tensor is in the graph: `f` did not use what it was given."""
        for tensor, name in zip(self.call.where.tensors, self.call.where.names, strict=True):
            if survey.uses(tensor) if tensor.grad_fn is not None else id(tensor) in theirs:
                raise _refusals.bypass(name)

    def _by_copies(self, survey: _nodes.Survey) -> bool:
        """Whether the outputs depend on tensors over the point's own memory: `f` used those, in
        place of the point.
        """
        own = {_tree.memory_of(tensor) for tensor in self.call.where.tensors if tensor.numel()}
        return not own.isdisjoint(map(_tree.memory_of, survey.variables()))

    def _kept_by(self, tag: LeafTag) -> str:
        """The attribute of a module that holds a value of an evaluation that has ended,
        in words.
        """
        for module_slice in self.call.where.module_slices:
            for path, module in module_slice.module.named_modules():
                for name, value in module.__dict__.items():
                    kept = [
                        item
                        for item in _tree.flatten(value)[0]
                        if isinstance(item, Tensor) and item.requires_grad
                    ]
                    marks = map(tag_of, _nodes.survey(kept).variables())
                    if any(mark is not None and mark[0] is tag for mark in marks):
                        return (
                            f" (attribute {'.'.join(filter(None, (path, name)))!r} of the module)"
                        )
        return ""

    # --- errors

    def _explain(self, error: GraphError) -> None:
        """Let the message say which line and which variable it is about,
        where that can be told (see `_messages`).
        """
        _messages.complete(
            _messages.Failure(
                error,
                self.call.what if self.call.builds_graph else None,
                self._again if self.repeatable else None,
                [] if self.call.builds_graph else _tensors(self.call.what),
                self.leaves or self.call.where.tensors,
                self.call.where.tensors,
                self.call.where.names,
                self.call.strict,
            )
        )

    @property
    def repeatable(self) -> bool:
        """Whether there is a function that may be called again: it may wait for other processes,
        which would not.
        """
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return self.call.builds_graph and not distributed

    def _again(self) -> list[Tensor]:
        """The outputs of `f` when it is called once more."""
        outputs = self.context.again(self.leaves)
        return _tensors(split(outputs)[0] if self.call.has_aux else outputs)


class Watched(OutputGraph):
    """An evaluation under a mode.

    No generator runs `f`: it would turn a StopIteration of `f` into a RuntimeError.
    """

    def __init__(self, call: Call, mode: Callable[[], Any]) -> None:
        super().__init__(call)
        self._mode = mode

    def __enter__(self) -> OutputGraph:
        with self._mode():
            return super().__enter__()


def _tensors(outputs: Any) -> list[Tensor]:
    if outputs.__class__ is Tensor or isinstance(outputs, Tensor):
        return [outputs]
    return [leaf for leaf in _tree.flatten(outputs)[0] if isinstance(leaf, Tensor)]


def detached(value: Any, theirs: Container[int] = ()) -> Any:
    """`value` with its tensors cut from any graph, copied from memory that is `theirs`; other
    leaves as they are.
    """

    def apart(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return cut(leaf.clone() if theirs and _tree.memory_of(leaf) in theirs else leaf)

    return apart(value) if value.__class__ is Tensor else _tree.tree_map(apart, value)


def _forget(leaf: Tensor) -> None:
    leaf.grad = None


def split(outputs: Any) -> tuple[Any, Any]:
    """The result of `f` under `has_aux=True`, checked to be a pair."""
    if isinstance(outputs, tuple) and len(outputs) == 2:
        return outputs
    raise InputError(
        f"f returned {_tree.describe(_tree.flatten(outputs)[2])}; has_aux=True expects (loss, "
        "extra)."
    )
