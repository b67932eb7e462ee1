"""Faults that one look at a graph tells before anything is differentiated,
and the words for them.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import (
    _arguments,
    _call,
    _messages,
    _nodes,
    _versions,
)
from hodiff._core._arguments import outside
from hodiff.errors import BatchMixingWarning, GraphError, HodiffWarning

__all__ = [
    "BENDS",
    "MIXING",
    "bypass",
    "is_even",
    "judge",
    "of_a_block",
    "said",
    "warn_if_near",
    "warn_of_non_finite",
    "warn_of_zeros",
]


def independent(module_slice: bool, unused: list[str], has_graph: bool) -> GraphError:
    """The error for a result that depends on nothing it could be differentiated by."""
    names = listed(unused)
    if has_graph:
        return GraphError(
            f"the result does not depend on {names}; it was computed from other tensors. "
            + (
                "Use the argument that f is given; .data and .item() of it cut the path, "
                "and leave no trace."
                if module_slice
                else "Give the tensors it was computed from, not copies, "
                "views or detached versions of them."
            )
        )
    source = "the output of f" if module_slice else "f"
    return GraphError.about(
        f"{source} carries no graph: every path from {names} to the result is cut.",
        advice=USUAL_CAUSES,
    )


USUAL_CAUSES = (
    "Usual causes: a gradient taken without create_graph=True, .detach(), .data or .item(), a "
    "torch.no_grad() block, NumPy, an integer or boolean step (argmax, a comparison), a function "
    "that PyTorch treats as constant (torch.special.airy_ai), or torch.tensor(...) of a result."
)


def listed(names: list[str]) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def bypass(name: str) -> GraphError:
    """The error for an `f` that does not use what it was given."""
    return GraphError(
        f"f reaches {name} other than through its argument, and that path would be missing from "
        f"the derivative. Use the argument that f is given; for the parameters of a model, pass "
        f"the model itself: hodiff.grad(lambda model: loss(model(x)), model). If it is meant as a "
        f"constant, close over {name}.detach() instead."
    )


def judge(
    graph: _nodes.Survey,
    leaves: Sequence[Tensor],
    order: int,
    allow: Collection[str | type],
    unheld: dict[type, frozenset[object]] | None = None,
) -> bool:
    """Raise, or warn, for every operation through which a derivative of that order is not right.

    Python Functions that nobody has verified are added to `unheld`, with the operations beside them
    and the arguments of which they are functions; without that, they are warned of.

    Returns:
        Whether a pass must be recorded to be right, though its result is detached.
    """
    unremarkable, recorded = _nodes.UNREMARKABLE[order], False
    functions: dict[type, frozenset[object]] = {}
    _versions.prove()
    for kind in graph.kinds:
        if kind in unremarkable:
            continue
        remarks = [
            remark for name, least, remark in REMARKS if order >= least and name in kind.__name__
        ]
        for remark in remarks:
            recorded |= _said(remark, min(order, HIGHEST), graph.of(kind), leaves)
        if remarks:
            continue
        if _nodes.is_function(kind):
            function = _versions.function_of(kind)
            if _is_unknown(function, graph.of(kind), leaves, allow):
                functions[function] = _nodes.varying(graph.of(kind)) | graph.names()
        else:
            unremarkable.add(kind)
    if unheld is None and functions:
        from hodiff._core import _python_functions

        _python_functions.warn_of(functions)
    elif unheld is not None:
        unheld.update(
            {each: way | unheld.get(each, frozenset()) for each, way in functions.items()}
        )
    return recorded


def _said(remark: Remark, order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> bool:
    """Make a remark, for which what nodes have saved may be read: of a graph that is there no more,
    say that.
    """
    try:
        with _versions.without_modes():  # it is we who look, not `f`
            return remark(order, nodes, leaves) is True
    except RuntimeError as error:
        ours = _messages.engine_error(error)
        if ours is None:
            raise
        raise ours from error


def _is_unknown(
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
    # PyTorch's own, an identity; what hooks do is watched
    if function.__name__ == "BackwardHookFunction":
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


_STATISTICS = _nodes.Rare(
    "NativeLayerNormBackward0",
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    "NativeBatchNormLegitBackward0",
    "NativeBatchNormLegitBackward1",
    "BatchNormWithUpdateBackward0",
    of_which=lambda node: (
        "NativeBatchNorm" not in node.__class__.__name__ or _versions.is_training(node)
    ),
)
"""Norms by the statistics of what they are given: layer norm, instance norm,
batch norm in training mode.
"""


def has_norm_weights(graph: _nodes.Survey, leaves: Sequence[Tensor]) -> bool:
    """Whether weights of such norms are among the leaves, or depend on them.

    The batching rule of the norms' backward writes the gradient by a weight with the statistics as
    constants: the graph of a batched pass is wrong there, silently.
    """
    weights = map(_versions.weight, _STATISTICS.among(graph))
    return _nodes.reaches([weight for weight in weights if weight is not None], leaves)


def batched_norm() -> GraphError:
    """The error for a batched pass of `f`'s own through such a norm,
    where that is not written out.
    """
    return GraphError.about(
        "f takes derivatives in a batched pass (torch.vmap, torch.func.jacrev) through PyTorch's "
        "kernel of a norm, with respect to its weights among others. Their derivative is silently "
        "wrong: PyTorch treats the statistics as constants there. Instead of "
        "torch.native_layer_norm or native_batch_norm call F.layer_norm or F.batch_norm, which "
        "hodiff computes from their definitions, or take the derivatives with hodiff.jacobian.",
        operations=["nativelayernorm", "nativebatchnorm"],
    )


def of_a_block(
    graph: _nodes.Survey, tensors: Sequence[Any], context: Any
) -> tuple[frozenset[str], GraphError | None, bool]:
    """The verdict on a block, whose graph is hidden from the evaluation that it runs in.

    Returns:
        The names of its nodes; what is refused, which the evaluation raises if it cannot be fixed;
        and whether a pass must be recorded.
    """
    names = graph.names()
    if names & _messages.WRITTEN_AT_SOME and loses_digits(graph):
        names |= {_messages.DIGITS}
    refused, recorded = None, False
    try:
        recorded = judge(graph, tensors, context.call.order, context.call.allow, context.unheld)
    except GraphError as error:
        refused = error
    if context.call.batch_ndim and MIXING.among(graph):
        warn_of_mixing(context.call.batch_ndim)
    return frozenset(names), refused, recorded


def loses_digits(graph: _nodes.Survey) -> bool:
    """Whether second derivatives of powers, products or determinants must be written out here."""
    with _versions.without_modes():  # as there
        for node in graph.named(_messages.POWER):
            kept = _versions.power(node)
            # At a base of 0 the second derivative by the exponent is not a number.
            if kept is not None and (bool((kept[0] == 0).any()) or _loses_part(node, 0)):
                return True
        return (
            any(_versions.argument(node) == 0 for node in graph.named(_messages.ZERO_POWER))
            or any(
                _divides(node, 2) or _meets_zeros(node) for node in graph.named(*_versions.PRODUCTS)
            )
            or any(_inverts(node, 2) for node in graph.named(_messages.DET))
            or any(map(_nodes.hides, graph.named(_messages.VIEW)))
            or any(map(_versions.lacks_weight, graph.named(*_messages.NORMS)))
        )


def _divides(node: Any, order: int) -> bool:
    """Whether a product has entries, not 0 and so small that few digits are left
    of a derivative of that order; of a first one, whichever was found to underflow.
    """
    if order < 2:
        return True
    sizes = [x.detach().abs() for x in _versions.factors(node)]
    return any(
        bool(((x != 0) & (x < torch.finfo(x.dtype).eps ** (1 / (2 * order - 2)))).any())
        for x in sizes
    )


def _meets_zeros(node: Any) -> bool:
    """Whether a scattered product has zeros:
    PyTorch has no second derivative where two are in one place.
    """
    factors = _versions.factors(node)
    return len(factors) > 1 and any(bool((x == 0).any()) for x in factors)


def _inverts(node: Any, order: int) -> bool:
    """Whether few digits are left of a derivative of that order of a determinant.

    PyTorch divides by the pivots; where the determinant is below a bound of its own, by differences
    of singular values, which is wrong for complex matrices, and from the third order on for all.
    """
    matrix, pivots, value = (part.detach() for part in _versions.determinant(node))
    size, eps = pivots.abs(), torch.finfo(pivots.dtype).eps
    least = eps ** (0.75 / (order - 1))
    tiny = value.abs() < 100 * eps
    if bool((~tiny & (size < least * size.amax(-1, True)).any(-1)).any()):
        return True
    if order >= 3 or matrix.is_complex() or not bool(tiny.any()):
        return bool(tiny.any())
    values = torch.linalg.svdvals(matrix[tiny])
    return bool((values.diff() >= -least * values[..., :-1]).any())


SPECTRA = {
    "LinalgSvdBackward0": "singular values",
    "LinalgEighBackward0": "eigenvalues",
    "LinalgEigBackward0": "eigenvalues",
}


class _Spectrum:
    """Values of a matrix that are so close that the next pass is looked at.

    PyTorch divides by their differences: a derivative of order n has lost as many digits as the
    power n - 1 of those has, or n - 2 where only values that are apart are used, and no vectors. So
    it is with singular values near 0 of a matrix that is not square.
    """

    def __init__(self, node: Any, order: int) -> None:
        values, divides, self.place = _versions.spectrum(node)
        eps, tiny = torch.finfo(values.dtype).eps, torch.finfo(values.dtype).tiny
        self.name, size = type(node).__name__, values.abs().amax(-1, True).clamp(tiny)
        # to itself, to the next
        gaps = (values.unsqueeze(-1) - values.unsqueeze(-2)).abs().sort(-1).values
        self.gaps = (
            gaps[..., 1] / size if values.shape[-1] > 1 else torch.full_like(size, torch.inf)
        )
        self.least = self.gaps.minimum(values / size) if divides else self.gaps
        self.wide = eps ** (0.75 / (order - 1))
        self.tight = eps ** (0.75 / (order - 2)) if order > 2 else -1.0
        self.handles: list[Any] = []

    def used(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether digits are lost of what has these gradients; where they cannot be seen, too."""
        given, *vectors = (
            gradients[self.place],
            *gradients[: self.place],
            *gradients[self.place + 1 :],
        )
        if _versions.levels_entered() or any(part is not None for part in vectors):
            return True
        if given is None or self.name == "LinalgEigBackward0":
            return True
        used = (self.least <= self.tight) | ((self.gaps <= self.wide) & (given != 0))
        return bool(used.any())

    def warn(self, gradients: Sequence[Tensor | None]) -> None:
        """Warn, once, where digits are lost."""
        while self.handles:
            self.handles.pop().remove()
        if not self.used(gradients):
            return
        warnings.warn(
            f"f depends on {SPECTRA[self.name]} that are equal or nearly equal (or near 0, if the "
            f"matrix is not square): PyTorch divides by their differences, so a second or higher "
            f"derivative has few correct digits, or none. If f is smooth there, as a symmetric "
            f"function of all of them is, write it with products, det, inv or matrix_exp of the "
            f"matrix ((x * x).sum() for the sum of the squared singular values), or choose "
            f"another point.",
            HodiffWarning,
            stacklevel=outside(),
        )


def _watch_spectrum(order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> None:
    # In a block that runs again, inside of another: passes read what it saved, no look.
    unseen = [*filter(_versions.is_packed, nodes)] if _versions.hooks_on(True) else []
    if unseen:
        warnings.warn(
            f"f depends on {SPECTRA[type(unseen[0]).__name__]}, and a checkpoint inside another "
            "one hides whether some are equal or nearly equal: then a second or higher derivative "
            "has few correct digits, or none.",
            HodiffWarning,
            stacklevel=outside(),
        )
        return
    for node in [node for node in nodes if _versions.spectrum(node)[0].numel()]:
        spectrum = _Spectrum(node, order)
        if bool((spectrum.least <= spectrum.wide).any()) and _nodes.reaches([node], leaves):
            spectrum.handles += [node.register_prehook(spectrum.warn)]


def is_even(p: Any) -> bool:
    """Whether the norm of that power is smooth where single entries are 0, and PyTorch's is not."""
    return isinstance(p, (int, float)) and p >= 4 and p % 2 == 0 and not math.isinf(p)


def _is_near(order: int, size: Tensor, *, at_zero: bool = False) -> bool:
    """Whether a norm or a root has entries so small that few digits of such a derivative are left.

    A derivative of what is smooth there, as its square is: it is made of parts that are as large as
    the root's power 2 - order, and cancel. With `at_zero`, entries that are 0 count: PyTorch has
    zeros there.
    """
    if _call.is_hidden(size) or not _versions.has_numbers(size):
        return False
    near = size.detach() < (torch.finfo(size.dtype).eps ** (0.75 / (order - 2)) if order > 2 else 0)
    return bool(((near & (size != 0)) | ((size == 0) & at_zero)).any())


NEAR = (
    "f contains a norm, a standard deviation or a square root that is near 0. "
    "A derivative of order {order} has few correct digits, or none, "
    "if f itself is smooth there, as norm(x) ** 2 is: large terms cancel. "
    "Write x.square().sum(), or x.var() for std(x) ** 2. (If f has a kink or a cusp there, "
    "ignore this warning.)"
)


def warn_if_near(order: int, size: Tensor, *, at_zero: bool = False) -> None:
    """Say that a derivative of that order is lost, where it is."""
    if _is_near(order, size, at_zero=at_zero):
        warnings.warn(NEAR.format(order=order), HodiffWarning, stacklevel=outside())


def _is_small(node: Any, order: int) -> bool:
    """Whether a norm or a root is near 0, or a norm is 0, where PyTorch's second derivative is."""
    name = type(node).__name__
    # of lists, or another that its name is a part of
    if name not in {*_versions.NORMS, *_versions.ROOTS} - {"RenormBackward0"}:
        return False
    p, size = _versions.root_of(node)
    zeros = name in _versions.DEVIATIONS or (3 <= p < torch.inf and name not in _versions.ROOTS)
    return size.is_floating_point() and _is_near(order, size, at_zero=zeros)


def _loses_part(node: Any, most: int, least: int = 0) -> bool:
    """Whether a power has entries with a positive base whose varying exponent is `least`, ...,
    `most`.

    PyTorch's rule for the base is 0 where the exponent is, as if that were constant; the rule of
    the gradient's power is so at 1, and so on.
    """
    kept = _versions.power(node)
    if kept is None or not kept[2]:
        return False
    base, exponent, _ = kept
    positive = base != 0 if base.is_complex() else base > 0
    return any(bool((positive & (exponent == k)).any()) for k in range(least, most + 1))


def refuse_hidden(
    graph: _nodes.Survey,
    gradient: _nodes.Survey,
    leaves: Sequence[Tensor],
    order: int,
    *,
    given: bool,
) -> None:
    """Raise, or warn, for what a graph hides, and its gradient's graph shows: powers, lower by 1.

    Where the graph was `given`, nothing that a write to a view hides has been written out.
    """
    unary = given and any(map(_nodes.hides, graph.named(_messages.VIEW)))
    divided = [*_versions.PRODUCTS, *(["DivBackward0"] if unary else [])]
    for remark, names in (HIDDEN_POWER, [_messages.POWER]), (HIDDEN_PRODUCT, divided):
        hidden = [node for node in gradient.named(*names) if node not in graph.visited]
        _said(remark, order, hidden, leaves)


Remark = Callable[[int, list[Any], Sequence[Tensor]], bool | None]
"""Raises or warns of such a derivative; True where a pass must be recorded to be right."""


class Row(NamedTuple):
    """A remark on nodes of which something holds, and that lead to a leaf.

    Attributes:
        operation: A piece of their names, for who looks for the place; empty where it is a warning.
        text: What is said, of a derivative of `{order}`; of the first of them, by `told`, `{it}`.
        wrong: What holds of such a node, for that order.
        told: What is said of it.
    """

    operation: str
    text: str
    wrong: Callable[[Any, int], object] = lambda node, order: True
    told: Callable[[Any], object] = str

    def __call__(self, order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> None:
        """Raise, or warn, where it holds of a node that leads to a leaf."""
        met = [node for node in nodes if self.wrong(node, order)]
        if not _nodes.reaches(met, leaves):
            return
        powers = " or ".join(map(str, range(order - 1)))
        text = self.text.format(order=order, powers=powers, it=self.told(met[0]))
        if self.operation:
            raise GraphError.about(text, operations=[self.operation])
        warnings.warn(text, HodiffWarning, stacklevel=outside())


SCATTER = "AsStridedScatterBackward0"
# the kernels of other devices have not been tried
ATTENTION = "ScaledDotProductFlashAttentionForCpuBackward0"
_IS_WRONG: dict[str, Callable[[Any], bool]] = {
    SCATTER: lambda node: True,
    _messages.DET: _versions.is_singular,
    ATTENTION: lambda node: _versions.rounds_rows(node) is not False,
    **dict.fromkeys(_versions.PRODUCTS, _versions.underflows),
}
WRONG_AT_ONCE = _nodes.Rare(*_IS_WRONG, of_which=lambda node: _IS_WRONG[type(node).__name__](node))
"""What has a wrong first gradient, or may, where that cannot be seen; `det`,
in a pass not recorded.
"""


WRITTEN = _nodes.Rare(
    "CudnnRnnBackward0",
    "BlockFunctionBackward",  # which hides what is below
    *_messages.WRITTEN_OUT,
    *_messages.WRITTEN_AT_SOME,
    of_which=lambda node: (
        type(node).__name__ not in _messages.NORMS or _versions.lacks_weight(node)
    ),
)
"""What may be written out at second order, or done by another kernel."""


BIASED = _nodes.Rare(*_messages.NORMS, of_which=_versions.lacks_weight)


FUNCTION = "Give hodiff the function instead of its value"
KERNEL = "the gradient of PyTorch's fused attention on the CPU is"
MASKED = "a row that is fully masked by a large finite number (finfo.min, -1e9)"
MASK_WAY_OUT = (
    "Compute it inside `with hodiff.twice_differentiable():`, use a boolean or -inf mask for such "
    "rows, or give hodiff the function instead of its value."
)
SPARSE_WAY_OUT = (
    "is silently wrong: PyTorch treats the backward of that constructor as a constant. "
)


def _third(layer: str) -> str:
    return (
        f"a third derivative through PyTorch's {layer} is silently wrong (by 3-81 %), and this "
        f"graph allows one. {FUNCTION}: hodiff.hvp(f, x, v, create_graph=True) and nested hodiff "
        "calls compute the norm from its definition."
    )


def _sparse(operation: str, constructor: str) -> tuple[Row, Row]:
    """The sparse matrices that we return, and a constructor of the user's."""
    ours = (
        "a second derivative through the sparse matrix that sparse_hessian or sparse_jacobian "
        f"returned {SPARSE_WAY_OUT}Use its entries, hodiff.sparse.plan_hessian(f, x).values(x) (or "
        "plan_jacobian), or the dense matrix, hodiff.hessian or hodiff.jacobian with matrix=True; "
        "these have derivatives of any order."
    )
    theirs = (
        f"a second derivative through torch.{constructor} of values that are differentiated "
        f"{SPARSE_WAY_OUT}Write the values into a dense tensor, x.new_zeros(shape).index_put("
        "indices, values), or gather and sum them (index_add); a constant sparse matrix and "
        "dense.to_sparse() are right as they are."
    )
    return Row(operation, ours, lambda node, order: _nodes.is_result(node)), Row(operation, theirs)


BIAS = Row(
    "norm",
    "a second derivative with respect to the bias of a norm without a weight is silently wrong. "
    f"{FUNCTION}, or add the bias after the norm.",
)
POWER = Row(
    "pow",
    "a derivative of order {order} of a ** b is silently wrong in PyTorch where b is {powers} and "
    f"is differentiated: a part of it is taken as 0. {FUNCTION}, or write torch.exp(b * a.log()); "
    "if the power is written into a view (x[i].pow_(b)), make it a new tensor.",
    lambda node, order: _loses_part(node, order - 2),
)
SMALL = Row("", NEAR, _is_small)
HIDDEN_POWER = POWER._replace(wrong=lambda node, order: _loses_part(node, order - 3, -1))
HIDDEN_PRODUCT = Row(
    "",
    "an operation was written into a view in place (y[i].cumprod_(0), y[i].sinc_()), which hides "
    "it, and its gradient divides by a number near 0: if it is a product or sinc, a derivative of "
    f"order {{order}} has few correct digits, or none. {FUNCTION}, or use the version that makes a "
    "new tensor (no underscore).",
    _divides,
)
THIRD = {
    "NativeLayerNormBackwardBackward0": Row("nativelayernorm", _third("layer_norm")),
    # by fixed statistics it is right
    "NativeBatchNormBackwardBackward0": Row(
        "nativebatchnorm",
        _third("batch_norm or instance_norm"),
        lambda node, order: _versions.was_training(node),
    ),
}
FIRST = {
    SCATTER: [
        Row(
            "asstridedscatter",
            "the gradient of PyTorch's as_strided_scatter is silently wrong: it goes to the "
            "entries that are overwritten, and not to those that stay. Write y = x.clone() and "
            "then y.as_strided(size, stride, offset).copy_(source), or use slice_scatter, "
            "select_scatter, diagonal_scatter or index_put.",
        )
    ],
    ATTENTION: [
        Row(
            "scaleddotproduct",
            f"{KERNEL} silently wrong (by 100 % and more) for {MASKED}. {MASK_WAY_OUT}",
            lambda node, order: _versions.rounds_rows(node),
        ),
        Row(
            "",
            f"{KERNEL} wrong for {MASKED}, and an activation checkpoint (or a hook) hides whether "
            f"there is such a row here. {MASK_WAY_OUT}",
        ),
    ],
    **{
        node: [
            Row(
                name,
                f"a derivative of order {{order}} through PyTorch's {name} is wrong where an entry "
                "is near 0 (it divides by the entries), as one is here. "
                f"{FUNCTION}; it then multiplies the entries one by one.",
                _divides,
            )
        ]
        for node, name in _versions.PRODUCTS.items()
    },
}
"""What is said of a first derivative, too."""


def _close(node: Any) -> float:
    """The size of an argument below which derivatives of what divides by it lose all digits."""
    return torch.finfo(_versions.argument(node).dtype).eps ** (1 / 6)


def _loses_power(node: Any, order: int) -> bool:
    """Whether a norm of an even power has lost a derivative at an entry that is 0."""
    if type(node).__name__ not in _versions.NORMS:
        return False
    p, x = _versions.norm_of(node)
    return is_even(p) and p <= order and bool((x == 0).any())


def _recorded(order: int, nodes: list[Any], leaves: Sequence[Tensor]) -> bool:
    """Without a graph the gradient of a determinant that is 0 is 0, whatever it should be."""
    return any(map(_versions.is_singular, nodes))


_GIVEN: dict[str, Row] = {
    "WeightNormInterfaceBackward0": Row(
        "weightnorm",
        "a second derivative through PyTorch's weight_norm is silently wrong (by 30-120 %). "
        f"{FUNCTION}; it then computes the norm from its definition.",
    ),
    "EmbeddingBackward0": Row(
        "embedding",
        "a second derivative through an embedding with scale_grad_by_freq=True is wrong in "
        "PyTorch: its second backward leaves the scaling out. Use scale_grad_by_freq=False (it "
        "scales gradients and is not part of the function).",
        lambda node, order: _versions.scales_by_frequency(node),
    ),
    "linear_cross_entropy": Row(
        "linearcrossentropy",
        "a second derivative through linear_cross_entropy in its chunked form (options=...) is "
        "missing: PyTorch silently treats its gradient as a constant. Call it without options, "
        "or write F.cross_entropy(F.linear(x, weight), target).",
    ),
    "LogcumsumexpBackward0": Row(
        "logcumsumexp",
        "a second derivative through PyTorch's logcumsumexp is silently wrong where an incoming "
        "gradient is 0, and a third one not finite: its backward takes the logarithm. "
        f"{FUNCTION}.",
    ),
    _messages.DET: Row(
        "linalgdet",
        "a derivative of order {order} through PyTorch's det has few correct digits, or none, at a "
        "singular or nearly singular matrix, as there is here (it divides by pivots, or by "
        f"differences of singular values). {FUNCTION}; it then multiplies out determinants of up "
        "to three rows. Expand a larger one along a row, as det = a * d - b * c for two rows.",
        _inverts,
    ),
    _messages.POWER: POWER,
}
"""What is said of a second derivative, and of those above."""

HIGHEST = 9
"""The order of derivative up to which bounds on digits grow."""

REMARKS: list[tuple[str, int, Remark]] = [
    *((node, 2, row) for node, row in {**THIRD, **_GIVEN}.items()),
    *((node, 2, row) for node, rows in FIRST.items() if node != ATTENTION for row in rows),
    (_messages.DET, 2, _recorded),
    *(
        ("SparseCooTensorWithDimsAndTensorsBackward0", 2, row)
        for row in _sparse("sparsecootensor", "sparse_coo_tensor")
    ),
    *(
        ("SparseCompressedTensorBackward0", 2, row)
        for row in _sparse("sparsecompressedtensor", "sparse_csr_tensor (or csc, bsr)")
    ),
    *(
        (
            node,
            least,
            Row(
                name.rpartition(".")[2],
                f"higher derivatives through PyTorch's {name} are wrong near 0 (its formula "
                "divides by x), and an entry of its argument is closer to 0 than {it:.1g}. "
                f"{FUNCTION}; it then uses the series of {name} there.",
                lambda node, order: bool((_versions.argument(node).abs() < _close(node)).any()),
                _close,
            ),
        )
        for node, (name, least) in _messages.DIVIDING.items()
    ),
    *((name, 2, _watch_spectrum) for name in SPECTRA),
    *(
        (
            name,
            2,
            Row(
                "norm",
                "the derivative of order {it:g} of PyTorch's {it:g}-norm is 0 where an entry is 0, "
                f"as one is here, even where the true derivative is not. {FUNCTION}, and use "
                "torch.linalg.vector_norm in it, or write x.pow({it:g}).sum().pow(1 / {it:g}).",
                _loses_power,
                lambda node: _versions.norm_of(node)[0],
            ),
        )
        for name in _versions.NORMS
    ),
    *((name, 2, SMALL) for name in (*_versions.NORMS, *_versions.DEVIATIONS)),
    *((name, 3, SMALL) for name in _versions.ROOTS if name not in _versions.DEVIATIONS),
    (
        "BatchNormWithUpdateBackward0",
        3,
        Row(
            "batchnormwithupdate",
            "a third derivative through torch's _batch_norm_with_update is silently wrong. Use "
            "F.batch_norm, which hodiff computes from its definition.",
        ),
    ),
]
"""A piece of a node's class name, the order of derivative from which it matters,
and what is done about it.
"""


def refuse_first(graph: _nodes.Survey, leaves: Sequence[Tensor]) -> bool:
    """Refuse a first derivative: each operation is blamed for itself,
    where it leads to one of `leaves`.
    """
    nodes = WRONG_AT_ONCE.among(graph)
    for name, rows in FIRST.items() if nodes else ():
        for row in rows:
            row(1, [node for node in nodes if type(node).__name__ == name], leaves)
    return any(type(node).__name__ == _messages.DET for node in nodes)


def changed_in_place(name: str) -> GraphError:
    """The error for an `f` that writes into its argument."""
    return GraphError(
        f"f changes its argument ({name}) in place, so its derivative with respect to the original "
        f"value is lost; begin f with x = x.clone()."
    )


def leftover(names: str) -> GraphError:
    """The error for a value of an evaluation that has ended, met again in another."""
    return GraphError(
        f"f uses a value that it kept from an earlier hodiff call{names}: it was computed from "
        f"that call's leaves, so here it would be a constant, and its part of the derivative would "
        f"be missing. Clear what f keeps between calls (a cache, a global, a list, a hidden "
        f"state), or compute it inside f each time; if a constant is meant, keep it detached."
    )


def warn_of_hooks() -> None:
    """Say that a hook takes part in every pass."""
    warnings.warn(
        "a tensor hook (or a module's backward hook) inside f changes gradients. It acts in each "
        "reverse pass, as in plain PyTorch, so a second derivative contains its change twice and "
        "is not the derivative of the first. Remove the hook for this call, or write what it does "
        "into f.",
        HodiffWarning,
        stacklevel=outside(),
    )


class _Said(threading.local):
    times = 0  # that this thread was told that a derivative has no value


said = _Said()


def warn_of_non_finite(kinds: Iterable[type]) -> None:
    """Say that a derivative has no value here, and which operations are known for that."""
    said.times += 1
    known = sorted(
        {words for kind in kinds for piece, words in _KINKS.items() if piece in kind.__name__}
    )
    warnings.warn(
        "the result is not finite, although x and f(x) are: the derivative does not exist there, "
        "or PyTorch's formula for it overflows or divides 0 by 0. "
        + (f"Operations in f with such points: {', '.join(known)}. " if known else "")
        + "Write f so that it is smooth there ((x.square().sum() + eps).sqrt() for a norm, "
        "torch.where with a safe argument), or choose another point.",
        HodiffWarning,
        stacklevel=outside(),
    )


_KINKS = {
    "VectorNorm": "norm at 0",
    "NormBackward": "norm at 0",
    "Sqrt": "sqrt at 0",
    "Rsqrt": "rsqrt at 0",
    "Pow": "a power of 0",
    "Abs": "abs at 0",
    "Log": "log at 0",
    "Acos": "acos at 1",
    "Asin": "asin at 1",
    "Atanh": "atanh at 1",
    "Acosh": "acosh at 1",
    "Atan2": "atan2 at the origin",
    "Div": "division by 0",
    "Reciprocal": "division by 0",
    "Xlogy": "xlogy at 0",
    "Cdist": "cdist at 0",
    "Pdist": "pdist at 0",
    "Logaddexp": "logaddexp of -inf",
    "CosineSimilarity": "cosine_similarity at 0",
    "Eigh": "equal eigenvalues",
    "Svd": "equal singular values",
    "Logcumsumexp": "logcumsumexp",
    "Std": "std of equal entries",
    "Prod": "prod with zeros",
}


MIXING = _nodes.Rare(
    "NativeBatchNormBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    of_which=_versions.is_training,
)
"""Batch norms in training mode."""


def warn_of_mixing(batch_ndim: int) -> None:
    """Say that samples are not independent."""
    warnings.warn(
        f"batch_ndim={batch_ndim} treats samples as independent, but f runs BatchNorm in training "
        "mode, which mixes them: the result is the derivative of the sum over the batch, "
        "not each sample's own. Use model.eval(), or another norm.",
        BatchMixingWarning,
        stacklevel=outside(),
    )


# --- zeros that are no answer: second derivatives by the inputs of a network of straight pieces ---


_STEPS = ("round", "floor", "ceil", "trunc", "sign")

_SMOOTH = {
    **dict.fromkeys(
        ("relu", "relu6", "leakyrelu", "prelu", "prelukernel", "threshold"), "softplus or tanh"
    ),
    **dict.fromkeys(("clamp", "clampmin", "clampmax", "hardtanh"), "tanh or sigmoid"),
    **dict.fromkeys(("max", "min", "amax", "amin", "maximum", "minimum"), "logsumexp or logaddexp"),
    **dict.fromkeys(_STEPS, "the value that is not rounded"),
    **{f"maxpool{d}d{how}": "average pooling" for d in (1, 2, 3) for how in ("", "withindices")},
    "abs": "sqrt(x ** 2 + 1e-6)",
    "where": "a mean of both sides, weighted by a sigmoid",
}
"""What has no second derivative, by its name without underscores, and what has one in its place."""

_WEIGHTS = re.compile(r"linear|(add)?m[mv]|(badd)?bmm|matmul|einsum|conv.*")

_CURVED = re.compile(
    r"tanh|(log)?sigmoid|exp.*|log.*|sin|cos|pow|(log)?softmax|softplus|[gs]?elu|silu|mish|"
    r"sqrt|erf|atan"
)


@cache
def _plain(name: str) -> str:
    """`LeakyReluBackward0`, `leaky_relu` -> `leakyrelu`."""
    return name.partition("Backward")[0].replace("_", "").lower()


class _Bends(dict[Any, bool]):
    """Whether a name or a class of nodes is such an operation's; Functions, which may be made anew,
    are not kept.
    """

    def __missing__(self, kind: Any) -> bool:
        name = kind if isinstance(kind, str) else kind.__name__
        return not name.endswith("Backward") and self.setdefault(kind, _plain(name) in _SMOOTH)


BENDS = _Bends()


def _bend(names: Iterable[str]) -> str:
    """The first operation, in their order, by which a network is made of straight pieces; empty
    where it is not.

    Weights follow it: that of a loss (hinge, L1) stands behind them, and its zeros are right.
    """
    plain = [_plain(name) for name in names]
    last = max((at for at, name in enumerate(plain) if _WEIGHTS.fullmatch(name)), default=0)
    curved = any(map(_CURVED.fullmatch, plain))
    bends = [name for at, name in enumerate(plain) if name in _SMOOTH and at < last and not curved]
    return next((name for name in plain if name in _STEPS), (bends or [""])[0])


_looked: set[tuple[str, int]] = set()
"""The lines of the user's whose zeros were looked at: once, for that reads the device."""


def warn_of_zeros(
    names: Callable[[], Iterable[str]], second: Iterable[Any], vectors: Iterable[Any] | None
) -> None:
    """Say, once for each line, that all second derivatives are 0,
    as of any network of straight pieces.
    """
    if _call.nested() or _call.is_followed():
        return
    level = outside()
    frame = sys._getframe(level - 1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place in _looked or not (bend := _bend(names())):
        return
    _looked.add(place)
    if _all_zero(second) and (vectors is None or not _all_zero(vectors)):
        warnings.warn(
            f"all second derivatives here are exactly 0, because {bend} has none: "
            "f is made of straight pieces. "
            "For a network that is to have second derivatives by its inputs, "
            f"use {_SMOOTH[bend]} instead. "
            "(This warning appears once for each place that calls.)",
            HodiffWarning,
            stacklevel=level,
        )


def _all_zero(tensors: Iterable[Any]) -> bool:
    """Whether plain tensors are; None is."""
    with _versions.without_modes():
        return all(x is None or (type(x) is Tensor and not bool(x.detach().any())) for x in tensors)
