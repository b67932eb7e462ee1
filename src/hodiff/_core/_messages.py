"""Errors of PyTorch, translated: which operation, why, what to write instead; which line,
which variable.
"""

from __future__ import annotations

import html
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _versions
from hodiff._core._faults import interrupts
from hodiff.errors import GraphError, HodiffWarning, printable

__all__ = [
    "BENDS",
    "CONSTANTS",
    "Failure",
    "Reported",
    "explainer",
    "kind_of",
    "note_memory",
    "table",
    "warn_once",
    "way_out",
    "without_derivative",
]


class WayOut(NamedTuple):
    """An operation without a second derivative, in words, and what to do instead."""

    operation: str
    instead: str


_LOOP = "write a Python loop"
CONTROL_FLOW = {
    "cond": WayOut("torch.cond", "write a Python `if`, or use torch.where"),
    "switch": WayOut("torch.switch", "write a Python `if`"),
    "while_loop": WayOut("while_loop (torch._higher_order_ops)", _LOOP),
    "map_impl": WayOut("map (torch._higher_order_ops)", _LOOP),
    "scan": WayOut("scan (torch._higher_order_ops)", _LOOP),
    "associative_scan": WayOut("associative_scan (torch._higher_order_ops)", _LOOP),
}
"""PyTorch's operators for control flow, by their names."""

# Keyed by a piece of a node's name, lower case without underscores: the same key finds the forward
# node (`CdistBackward0`), its derivative (`CdistBackwardBackward0`) and the engine's error text.
_WAYS_OUT = {
    "scaleddotproduct": WayOut(
        "fused scaled_dot_product_attention",
        "the tensor was computed outside hodiff, in a thread that f started, or by calling the "
        "kernel directly. Call F.scaled_dot_product_attention inside `with "
        "hodiff.twice_differentiable():`, or give hodiff the function",
    ),
    "cudnnrnn": WayOut(
        "a cuDNN RNN",
        "compute it under torch.backends.cudnn.flags(enabled=False), or give hodiff the function, "
        "which does that",
    ),
    "cdist": WayOut(
        "cdist", "write (a[:, None] - b).norm(dim=-1), whose derivatives at 0 are finite"
    ),
    "pdist": WayOut("pdist", "index the pairs and write their differences"),
    "embeddingbag": WayOut(
        "embedding_bag", "use nn.Embedding and reduce with .sum(-2) or .mean(-2)"
    ),
    "ctcloss": WayOut("ctc_loss", "there is no differentiable substitute in PyTorch"),
    "segmentreduce": WayOut("segment_reduce", "use index_add"),
    "multimargin": WayOut("multi_margin_loss", "write it with gather and clamp"),
    "multilabelmargin": WayOut("multilabel_margin_loss", "write it with gather and clamp"),
    "hardsigmoid": WayOut("hardsigmoid", "write (x / 6 + 0.5).clamp(0, 1)"),
    "compiledfunction": WayOut(
        "a compiled function",
        "compute it uncompiled, or give hodiff the function, which runs it eagerly",
    ),
    "condautogradop": CONTROL_FLOW["cond"],
    "whileloopautogradop": CONTROL_FLOW["while_loop"],
    "scanautogradop": CONTROL_FLOW["scan"],
    "flexattentionautogradop": WayOut(
        "flex_attention",
        "give hodiff the function, which writes it out, or use scaled_dot_product_attention",
    ),
    "checkpointfunction": WayOut(
        "a re-entrant checkpoint", "use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
    ),
}

# Nodes that carry no marker of their own, yet raise as soon as they are differentiated.
UNMARKED = ("EmbeddingBagBackwardBackward0", *_versions.DISTANCES)

DIVIDING = {
    "SincBackward0": ("sinc", 2),
    "SpecialI0EBackward0": ("special.i0e", 3),
    "SpecialI1Backward0": ("special.i1", 2),
    "SpecialI1EBackward0": ("special.i1e", 2),
    "SpecialBesselJ0Backward0": ("special.bessel_j0", 3),
    "SpecialBesselJ1Backward0": ("special.bessel_j1", 2),
    "SpecialModifiedBesselI0Backward0": ("special.modified_bessel_i0", 3),
    "SpecialModifiedBesselI1Backward0": ("special.modified_bessel_i1", 2),
    "I0Backward0": ("special.i0", 3),
}
"""What divides by its argument, what it is called, and the order that is wrong near 0."""

WEIGHT_NORM = "WeightNormInterfaceBackward0"
POWER = "PowBackward1"  # of two tensors
ZERO_POWER = "PowBackward2"  # of a number, to a tensor
VIEW = "CopySlices"  # a write to a view, of whatever
HIDING = {VIEW, "ForeachPowBackward0"}  # powers of lists
DET = "LinalgDetBackward0"
# at second order for some arguments, at third for all
NORMS = {
    "NativeLayerNormBackward0",
    "NativeGroupNormBackward0",
    "NativeBatchNormBackward0",
    "NativeBatchNormLegitBackward0",
    "NativeBatchNormLegitBackward1",
    "BatchNormWithUpdateBackward0",
    "CudnnBatchNormBackward0",
}
WRITTEN_AT_SOME = {POWER, ZERO_POWER, *_versions.PRODUCTS, DET, VIEW, *NORMS}
DIGITS = "a block loses digits"  # by what is written out at some arguments; no node
WRITTEN_OUT = {
    WEIGHT_NORM,
    "ForeachPowBackward0",
    "HardsigmoidBackward0",
    "LogcumsumexpBackward0",
    "SpecialI0EBackward0",  # for its value at 0, the mean of those on either side
    *(node for node, (_, order) in DIVIDING.items() if order == 2),
}  # at second order; at third all that `_substitutes` has


def at_third(names: Iterable[str]) -> bool:
    """Whether nodes are among those that are written out at third order, and not before."""
    return any(
        piece in name for name in names for piece in ("LayerNorm", "BatchNorm", *WRITTEN_AT_SOME)
    )


def fused(names: Iterable[str]) -> bool:
    """Whether nodes are among those of the fused kernels of attention."""
    return any("ScaledDotProduct" in name for name in names)


_FUNCTION = "write an autograd.Function whose backward multiplies by its derivative, "
_SPECIAL = {
    **(
        {
            "bessel_j0": _FUNCTION + "-bessel_j1(x)",
            "bessel_j1": _FUNCTION + "bessel_j0(x) - bessel_j1(x) / x",
            "bessel_y0": _FUNCTION + "-bessel_y1(x)",
            "bessel_y1": _FUNCTION + "bessel_y0(x) - bessel_y1(x) / x",
            "modified_bessel_i0": "use torch.special.i0",
            "modified_bessel_i1": "use torch.special.i1",
            "modified_bessel_k0": _FUNCTION + "-modified_bessel_k1(x)",
            "modified_bessel_k1": _FUNCTION + "-modified_bessel_k0(x) - modified_bessel_k1(x) / x",
        }
        if _versions.BESSEL_IS_CONSTANT
        else {}
    ),
    "scaled_modified_bessel_k0": _FUNCTION
    + "scaled_modified_bessel_k0(x) - scaled_modified_bessel_k1(x)",
    "scaled_modified_bessel_k1": _FUNCTION
    + "(1 - 1 / x) scaled_modified_bessel_k1(x) - scaled_modified_bessel_k0(x)",
    "spherical_bessel_j0": "use torch.sinc(x / math.pi)",
    "airy_ai": _FUNCTION + "Ai', which PyTorch lacks",
    **dict.fromkeys(
        (
            *(
                f"{shifted}chebyshev_polynomial_{kind}"
                for shifted in ("", "shifted_")
                for kind in "tuvw"
            ),
            *(
                "hermite_polynomial_h",
                "hermite_polynomial_he",
                "laguerre_polynomial_l",
                "legendre_polynomial_p",
            ),
        ),
        "write its recurrence in n",
    ),
}
CONSTANTS = {
    **{f"special_{name}": way for name, way in _SPECIAL.items()},
    "linspace": "write start + (end - start) * torch.linspace(0, 1, steps)",
    "logspace": "write base ** (start + (end - start) * torch.linspace(0, 1, steps))",
}
"""Smooth functions of which PyTorch says that they have no derivative, so that they give constants,
and what to do.

By `__name__`. Nothing in a graph shows them: the road sees them where it sees each call, at third
order and above and in Taylor mode; `check_derivatives` and the explanations know their names.
"""


def constant(name: str) -> GraphError:
    """The error for one of them."""
    return GraphError.about(
        f"PyTorch treats the result of {name} as a constant, although it is smooth in its "
        f"argument, so its part of the derivative would be silently missing. Instead, "
        f"{CONSTANTS[name]}; or, if a constant is meant, detach its argument (.detach())."
    )


_BATCH_NORM = "torch.nn.functional.batch_norm"
WRONG_TANGENTS = {
    **dict.fromkeys(("layer_norm", "native_layer_norm"), "torch.nn.functional.layer_norm"),
    **dict.fromkeys(
        ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), _BATCH_NORM
    ),
    **dict.fromkeys(
        ("_native_batch_norm_legit", "_batch_norm_with_update", "_batch_norm_impl_index"),
        _BATCH_NORM,
    ),
    "instance_norm": "torch.nn.functional.instance_norm",
    **dict.fromkeys(("householder_product", "orgqr"), "products of I - tau v v'"),
    **(
        {
            **dict.fromkeys(
                ("det", "slogdet", "logdet"), "the product of the pivots of torch.linalg.lu_factor"
            ),
            **dict.fromkeys(
                ("solve", "solve_ex", "tensorsolve"),
                "torch.linalg.lu_solve(*torch.linalg.lu_factor(A), B)",
            ),
        }
        if _versions.LU_IS_CONSTANT
        else {}
    ),
}
"""Operations whose tangent in forward mode has a wrong derivative, under the names that no
definition serves.

Their rules read what the operation keeps beside its result, and reverse mode takes that for a
constant.
"""


def wrong_tangent(name: str) -> GraphError:
    """The error for one of them."""
    return GraphError.about(
        f"f uses PyTorch's forward mode (torch.func.jvp, jacfwd, torch.autograd.forward_ad) "
        f"through {name}, and the derivative of that tangent is silently wrong in PyTorch. Instead "
        f"of forward mode, use hodiff.jvp inside f (or torch.func.vjp, jacrev), or write "
        f"{WRONG_TANGENTS[name]} instead of {name}."
    )


def way_out(name: str) -> WayOut | None:
    """The operation behind a node or ATen name, and how to do without it."""
    piece = _piece(name)
    return _WAYS_OUT[piece] if piece is not None else None


def _piece(name: str) -> str | None:
    key = _key(name)
    return next((piece for piece in _WAYS_OUT if piece in key), None)


def _key(name: str) -> str:
    return name.lower().replace("_", "")


def missing(names: list[str], *, product: bool = False) -> GraphError:
    """The error for a graph through operations that have no second derivative; `product`: for J v,
    which takes one.
    """
    pieces = list(dict.fromkeys(piece for name in names if (piece := _piece(name)) is not None))
    if pieces:
        ways_out = "; nor of ".join("; ".join(_WAYS_OUT[piece]) for piece in pieces)
        return GraphError.about(
            "PyTorch has no second derivative of "
            f"{ways_out}.{' (A product J v needs one.)' if product else ''}",
            operations=pieces,
        )
    return GraphError(
        f"an operation in this graph has no second derivative in PyTorch. Operations in it: "
        f"{', '.join(names)}. Express that operation by others, or check it on its own with "
        f"hodiff.check_derivatives."
    )


def collective(name: str) -> GraphError:
    """The error for a collective of `torch.distributed` that writes into a tensor
    which is differentiated.
    """
    return GraphError(
        f"f calls torch.distributed.{name} on a tensor that is differentiated. It writes into that "
        f"tensor unseen by autograd: the value would be that of all ranks, and the derivative that "
        f"of this rank's part. Let f return this rank's part, and add up values and derivatives "
        f"over the ranks; give an operator process_group= and each rank's data; or, if only a "
        f"number is wanted, reduce a detached copy."
    )


# PyTorch's own words are all that it gives: here alone they are read. Of several that are in one
# text the first counts.
_KINDS = {
    "through the graph a second time": "freed",
    "already been freed": "freed",
    "modified by an inplace operation": "changed",
    "leaf Variable that requires grad is being used in an in-place operation": "leaf changed",
    "is being used in an in-place operation": "leaf's view changed",
    "view was created in no_grad mode": "view without gradients",
    "view was created in inference mode": "view without gradients",
    "arguments don't support automatic differentiation": "written out",
    "only change requires_grad flags of leaf": "flag of a result",
    "inside of a function being transformed": "inside transform",
    "t optimize a non-leaf Tensor": "result to optimize",
    "Mismatch in shape: grad_output": "start shape",
    "Expected output to be a torch.Tensor": "no tensor",
    "nference tensors cannot be saved for backward": "inference saved",
    "nplace update to inference tensor": "inference changed",
    "nference tensor": "inference",
    "input matrix is singular": "singular",
    "FlexAttention does not support backward on CPU": "flex on a CPU",
    "BackwardHookFunction": "hooked view changed",
    "is a view and is being modified inplace": "view changed",
    "support the deepcopy protocol": "copied",
    "does not currently support double backward": "compiled",
    "non-empty donated buffers": "compiled",
    "CheckpointFunctionBackward": "reentrant",
    "torch.utils.checkpoint is incompatible": "reentrant",
    "Checkpointing is not compatible with .grad()": "reentrant",
    "computed under selective activation checkpoint": "selective",
    "already unpacked once": "unpacked twice",
    "already been unpacked": "unpacked twice",
    "torch.utils.checkpoint: A different number": "recomputed in number",
    "torch.utils.checkpoint: ": "recomputed",
    "marked with @once_differentiable": "once",
    "out of bounds for storage of size 0": "storage freed",
    "Expected a proper Tensor but got None": "result unused",
    "not implemented for sparse tensors": "sparse rows",
    "output_padding is not supported for non-transposed": "output padding",
    "must have a storage_offset divisible by 2": "odd place",
    "is not implemented": "missing",
    "Can't call numpy() on Tensor": "array",
    "have the same dtype": "dtypes",
    "expected scalar type": "dtypes",
    "and bias type": "dtypes",
    "and weight type": "dtypes",
    "shapes cannot be multiplied": "shapes",
    "must match the size of tensor": "shapes",
    "inconsistent tensor size": "shapes",
    "to match target batch_size": "shapes",
    "must be the same as input size": "shapes",
    "don't yet support saved tensor hooks": "hooked transform",
    "does not require grad": "no graph",
    "appears to not have been used": "not used",
    "implicitly created only for scalar outputs": "not scalar",
    "forward AD": "no forward mode",
    "forward mode AD": "no forward mode",
}


def _about(message: str, **facts: Any) -> Callable[[], GraphError]:
    """A maker of an error of ours."""
    return lambda: GraphError.about(message, **facts)


_OURS: dict[str, Callable[[], GraphError]] = {
    "freed": _about(
        "the graph has already been freed: a backward() or autograd.grad() without retain_graph "
        "ran through part of it.",
        kind="freed",
        advice="Call hodiff before that pass (hodiff never frees your graphs), or give this call "
        "the function instead of its value: f, not f(x).",
    ),
    "changed": _about(
        "a tensor that the graph needs was changed in place after it was used. Compute the result "
        "again after the change, or replace the in-place operation (x += 1) with x = x + 1.",
        kind="changed",
    ),
    "compiled": _about(
        "a compiled function has no second derivative. Compute the tensor uncompiled, "
        "or give hodiff the function, which runs it eagerly.",
        operations=["compiledfunction"],
    ),
    "reentrant": _about(
        "a re-entrant activation checkpoint cannot be differentiated with respect to inputs. "
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
        operations=["checkpointfunction"],
    ),
    "selective": _about(
        "a selective activation checkpoint (context_fn=) allows one backward pass, and this "
        "derivative takes several. Leave context_fn= out, or switch checkpointing off for this "
        "call.",
    ),
    "once": _about(
        "a @once_differentiable autograd.Function was asked for a second derivative. "
        "Remove the decorator if its backward consists of differentiable operations.",
    ),
    "singular": _about(
        "a matrix is singular, and the derivative (as that of slogdet and logdet) solves a linear "
        "system with it: there is none at this point. Choose another point, add a multiple of the "
        "identity to the matrix, or differentiate torch.linalg.det, which has a derivative "
        "everywhere.",
        operations=["linalgslogdet"],
    ),
    "result unused": _about(
        "PyTorch's derivative of an operation with several results fails if only some of them are "
        "used. Use another operation: torch.nn.functional.layer_norm for torch.native_layer_norm, "
        "and so on.",
    ),
    "sparse rows": _about(
        "the gradient of an embedding with sparse=True is a sparse tensor, which the operation "
        "that computed its table does not accept. Use sparse=False.",
        operations=["embedding"],
    ),
    "output padding": _about(
        "PyTorch has no further derivative of a transposed convolution (conv_transpose) with "
        "output_padding. Leave it out, and pad the result (F.pad).",
        operations=["convolution"],
    ),
    "odd place": _about(
        "PyTorch views a gradient as complex numbers, which must begin at an even offset in "
        "memory, and this gradient is a slice of a longer one that begins at an odd offset. "
        "Instead of torch.view_as_real(z) write torch.stack([z.real, z.imag], -1), and instead of "
        "torch.view_as_complex(p) torch.complex(p[..., 0], p[..., 1]).",
        operations=["viewasreal", "viewascomplex"],
    ),
    **dict.fromkeys(
        ("recomputed", "recomputed in number", "unpacked twice"),
        _about(
            "an activation checkpoint recomputed something different from its forward pass: its "
            "block reads something that has changed since (an attribute, a global), or it is "
            "differentiated under modes other than those it was run under. Give the block what it "
            "reads as an argument, or switch checkpointing off for this call; for a checkpoint "
            "inside another one, in a Laplacian or the like that is differentiated, choose "
            'method="reverse".',
        ),
    ),
    "storage freed": _arguments.freed,
}
"""Our words for an error of PyTorch's, by its kind."""

_NOT_IMPLEMENTED = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")


def kind_of(error: BaseException) -> str:
    """The kind of an error of PyTorch; empty if it is none that is known."""
    text = str(error)
    return next((kind for piece, kind in _KINDS.items() if piece in text), "")


def without_derivative(error: BaseException) -> str:
    """The operation of which an error says that its derivative is not implemented;
    empty if it says no such thing.
    """
    match = _NOT_IMPLEMENTED.search(str(error))
    return match.group(1) if match else ""


def engine_error(error: Exception) -> GraphError | None:
    """Our words for an error of PyTorch's autograd engine; None for one that we do not recognize,
    or that is ours.
    """
    if isinstance(error, GraphError):
        return None
    name = without_derivative(error)
    if name:
        if way_out(name):
            return missing([name])
        return GraphError.about(f"PyTorch has no derivative of {name}.", operations=[_key(name)])
    ours = _OURS.get(kind_of(error))
    return ours() if ours is not None else None


def note_memory(error: BaseException) -> None:
    """Add to an error of a second derivative that memory has run out for what takes less."""
    ran_out = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if ran_out and LESS_MEMORY not in getattr(error, "__notes__", ()):
        error.add_note(LESS_MEMORY)


LESS_MEMORY = (
    'hodiff: to use less memory, pass checkpoint="layers.*" (hvp, cross_hvp, curvature operators), '
    "so that these modules run again in each pass, or checkpoint=True for those that the model "
    "checkpoints itself; memory_budget=0, so that an operator keeps no graph; or chunk_size=1 for "
    "several vectors. H.cost().peak_bytes is the peak of an operator."
)


ADVICE_FOR_F = {
    **dict.fromkeys(
        ("leaf changed", "leaf's view changed", "hooked view changed", "view changed"),
        "hodiff: f changes its argument in place; begin it with x = x.clone(), or pass lambda x: "
        "f(x.clone()).",
    ),
    "inference saved": "hodiff: f closes over a tensor created in inference_mode; "
    "clone it outside that mode first.",
    "hooked transform": "hodiff: inside of an activation checkpoint (torch.utils.checkpoint), "
    "PyTorch has no derivatives by torch.func. Use hodiff.grad or torch.autograd.grad in f, "
    "or leave out the checkpoint.",
    "flex on a CPU": "hodiff: on a GPU flex_attention has derivatives of every order inside of f. "
    "On a CPU give the scores as attn_mask= to F.scaled_dot_product_attention, "
    "or write scores.softmax(-1) @ value.",
    "array": "hodiff: NumPy has no derivatives; use PyTorch's functions in f. "
    "After detach() x would be a constant.",
    "dtypes": "hodiff: point, model and data have several dtypes, which PyTorch does not multiply. "
    "Convert what f is given, or what it closes over: x.double(), model.double().",
    "shapes": "hodiff: shapes do not fit in f. It is given the whole point; where samples are "
    "apart (batch_ndim=1, fields, penalties) all of them at once, (N, ...).",
}
"""Notes for exceptions from the user's function that our leaves provoked,
by the kind of PyTorch's error.
"""


# --- operations of straight pieces: all second derivatives of a network of them are 0 -------------


STEPS = ("round", "floor", "ceil", "trunc", "sign")

SMOOTH = {
    **dict.fromkeys(
        ("relu", "relu6", "leakyrelu", "prelu", "prelukernel", "threshold"), "softplus or tanh"
    ),
    **dict.fromkeys(("clamp", "clampmin", "clampmax", "hardtanh"), "tanh or sigmoid"),
    **dict.fromkeys(("max", "min", "amax", "amin", "maximum", "minimum"), "logsumexp or logaddexp"),
    **dict.fromkeys(STEPS, "the value that is not rounded"),
    **{f"maxpool{d}d{how}": "average pooling" for d in (1, 2, 3) for how in ("", "withindices")},
    "abs": "sqrt(x ** 2 + 1e-6)",
    "where": "a mean of both sides, weighted by a sigmoid",
}
"""What has no second derivative, by its name without underscores, and what has one in its place."""


@cache
def plain_name(name: str) -> str:
    """`LeakyReluBackward0`, `leaky_relu` -> `leakyrelu`."""
    return name.partition("Backward")[0].replace("_", "").lower()


class _Bends(dict[Any, bool]):
    """Whether a name or a class of nodes is such an operation's; Functions, which may be made anew,
    are not kept.
    """

    def __missing__(self, kind: Any) -> bool:
        name = kind if isinstance(kind, str) else kind.__name__
        return not name.endswith("Backward") and self.setdefault(kind, plain_name(name) in SMOOTH)


BENDS = _Bends()


# --- which line, which variable: asked of whoever can say -----------------------------------------
# `hodiff.graph` can. It stands beside the calculus, which imports nothing of it; who imports hodiff
# puts its `explainer` here, and it is asked with plain facts. What it answers is added to the
# message. Where it knows nothing, or fails itself, the message stays as it is. Nothing here runs
# unless an error is raised.


class Failure(NamedTuple):
    """The facts of a failure: a graph cannot give what was asked.

    Attributes:
        error: The error that is about to be raised; `__cause__` is the engine's, if it was one.
        function: The user's function; None in the tensor form.
        again: Calls it once more, as the first time; None in the tensor form, and where it cannot
            be called alone.
        outputs: The tensors given, in the tensor form.
        leaves: The tensors that derivatives are taken by: in the function form aliases of `theirs`.
        theirs: The caller's own tensors.
        names: What those are called in messages.
        strict: Whether it is about each of the leaves: one that does not matter is an error.
    """

    error: GraphError
    function: Any
    again: Callable[[], Sequence[Tensor]] | None
    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]
    theirs: Sequence[Tensor]
    names: Sequence[str]
    strict: bool | None


Explainer = Callable[[Failure], str]

explainer: Explainer = lambda failure: ""  # noqa: E731 - nothing is known, until `hodiff` puts its own here


class _ExplainingState(threading.local):
    explaining = False
    last: weakref.ref[GraphError] | None = None


_state = _ExplainingState()


def complete(failure: Failure) -> None:
    """Add to the message of an error what can be said of this very case;
    general advice gives way to that.
    """
    last, _state.last = _state.last, weakref.ref(failure.error)
    if last is not None and last() is failure.error:  # on its way out of another context
        return
    answer = _asked(failure)
    facts = failure.error._facts
    # what is advised then is for a graph of the caller's, and holds whatever was found
    if facts.kind == "freed":
        advice = facts.advice if failure.function is None else ""
    else:
        advice = "" if answer else facts.advice
    if answer or advice != facts.advice:
        words = f"{facts.stem or failure.error} {advice}".rstrip()
        failure.error.args = (f"{words}\n{answer}" if answer else words,)


def _asked(failure: Failure) -> str:
    if _state.explaining:  # f is being called once more, or traced
        return ""
    _state.explaining = True
    try:
        return explainer(failure)
    except Exception as error:  # an explanation must not hide what it explains
        if interrupts(error):
            raise
        return ""
    finally:
        _state.explaining = False


# --- what notebooks show --------------------------------------------------------------------------


class Reported:
    """An object shown by its words: lines in a console, and in a notebook a table of them."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return table([line.strip().partition(": ")[::2] for line in str(self).splitlines()])


def table(rows: Sequence[Sequence[str]], caption: str = "", heads: int = 0) -> str:
    """Rows as a table of HTML, `heads` of them as its head."""
    body = f"<caption>{html.escape(caption)}</caption>" + "".join(
        f"<tr>{''.join(f'<{tag}>{html.escape(printable(cell))}</{tag}>' for cell in row)}</tr>"
        for tag, part in (("th", rows[:heads]), ("td", rows[heads:]))
        for row in part
    )
    return f'<div style="overflow-x:auto"><table>{body}</table></div>'


@cache
def warn_once(text: str) -> None:
    """Say once in a process that something goes otherwise on this release of PyTorch."""
    warnings.warn(text, HodiffWarning, stacklevel=_arguments.outside())
