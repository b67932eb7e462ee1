"""The classes of failures: what each is, and what helps; the page of each is a section of
docs/explain/failures.md.

What helps is said of the class and not of a program, so that it is right of each program of the
class: it names no line, and `retain_graph` only together with its condition.
"""

from __future__ import annotations

from typing import NamedTuple

PAGE = "docs/explain/failures.md"


class FailureClass(NamedTuple):
    """A class of failures.

    Attributes:
        what: What it is: one sentence.
        helps: What helps: two or three.
        typed: Words that people search for, and PyTorch's own.
        inside: What helps in a function that hodiff was given, if that is something else.
    """

    what: str
    helps: tuple[str, ...]
    typed: tuple[str, ...] = ()
    inside: str = ""


_NO_GRAD = "element 0 of tensors does not require grad and does not have a grad_fn"
_SECOND = "Trying to backward through the graph a second time"
_IN_PLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace operation"
)

CLASSES = {
    # --- no graph ---
    "detached": FailureClass(
        "The value was detached (detach(), .data), so the graph ends there.",
        (
            "Decide whether gradients should flow through that value: if so, "
            "leave the detach() out.",
            "If it is a constant on purpose (a target, a statistic), the loss must depend on the "
            "parameters in another way.",
        ),
        (_NO_GRAD,),
        "drop the detach() (or .data) there if you want a derivative through it.",
    ),
    "gradients off": FailureClass(
        "The value was computed while gradients were switched off (no_grad, inference_mode, "
        "set_grad_enabled).",
        (
            "If this code trains something, compute it where recording is on; "
            "enable_grad() does not lift inference_mode.",
            "If it is an evaluation, the pass and the step belong in the training branch only.",
        ),
        (_NO_GRAD, "requires_grad=False under no_grad"),
        "move it out of the no_grad block, or compute it under torch.enable_grad().",
    ),
    "first gradient": FailureClass(
        "The value is a gradient that was taken without create_graph=True, "
        "so it has no graph of its own.",
        (
            "To differentiate a gradient, take it with create_graph=True, "
            "at a point that is itself in the graph of what is trained: "
            "taken at a fresh or detached copy it trains nothing.",
            "hodiff.grad inside a function that hodiff differentiates has its graph by itself.",
        ),
        (_NO_GRAD, "create_graph", "second order MAML", "GradNorm", "virial"),
        "take that gradient with hodiff.grad, which is differentiable inside f, or with "
        "autograd.grad(..., create_graph=True).",
    ),
    "zero derivative": FailureClass(
        "The value is the gradient of a function that is linear, or linear in pieces, "
        "so its own derivative is zero (almost everywhere) and has no graph.",
        (
            "Zeros are the right answer: hodiff.hvp, hodiff.hessian and hodiff.nth_derivative "
            "return them.",
            "For another answer the function itself must be smooth: softplus for relu, "
            "logsumexp for max.",
        ),
        (_NO_GRAD, "Hessian of a ReLU network", "second derivative is None"),
        "its derivative is zero; hodiff.grad inside f gives zeros there, instead of a constant.",
    ),
    "made a constant": FailureClass(
        "The value was made a number, a NumPy array or a copy of values there, "
        "and carries no graph from then on.",
        (
            "Stay with tensors: use the tensor itself instead of torch.tensor(x), "
            "torch.stack or torch.cat for a list.",
            "item(), tolist(), float() and numpy() are for printing and logging.",
        ),
        (_NO_GRAD, "torch.tensor(list of tensors)", "item()", "numpy()"),
        "stay with tensor operations: item(), float(), NumPy and torch.tensor(...) give constants, "
        "torch.stack and torch.cat do not.",
    ),
    "discrete": FailureClass(
        "An operation gave integers or booleans (argmax, a comparison, a cast), "
        "which have no derivative.",
        (
            "Give the loss the smooth quantity that the step came from: "
            "scores for argmax (cross_entropy, softmax, "
            "gumbel_softmax), sigmoid(x / t) for x > 0.",
            "What is rounded or cast to integers is better left as it is.",
        ),
        (_NO_GRAD, "argmax is not differentiable", "accuracy as a loss", "dice loss"),
        "use a smooth substitute (softmax, sigmoid, a soft mask) where a derivative is wanted.",
    ),
    "undeclared derivative": FailureClass(
        "PyTorch declares no derivative of that function, although it is smooth, "
        "and treats its result as a constant.",
        ("Write the function with operations that have a derivative.",),
        (_NO_GRAD, "torch.special", "bessel", "linspace"),
    ),
    "frozen": FailureClass(
        "All parameters that the value was computed from have requires_grad=False.",
        (
            "Decide what this loss should train. If those parameters, "
            "switch them on (requires_grad_(True)) before the forward pass.",
            "If they stay frozen, the loss must depend on something else that requires grad: "
            "a layer on top of them, "
            "or their input.",
        ),
        (_NO_GRAD, "requires_grad = False", "freeze layers"),
    ),
    "nothing requires grad": FailureClass(
        "Nothing that the value was computed from requires grad.",
        (
            "Decide what the derivative is by: parameters (are they the ones that were called?), "
            "or an input, which then requires grad (x.requires_grad_()) before the computation.",
            "hodiff.grad(f, x) takes the function, and needs no flags.",
        ),
        (_NO_GRAD, "One of the differentiated Tensors does not require grad"),
    ),
    "no graph": FailureClass(
        "The value has no graph: it was cut off on the way, or nothing that it was computed from "
        "requires grad.",
        (
            "Look for detach(), .data, no_grad, item(), NumPy or argmax on the way, "
            "and for what requires grad at all.",
            "Run the program under `hodiff explain SCRIPT`, or in hodiff.graph.watch(): "
            "then each cut is named.",
        ),
        (_NO_GRAD,),
    ),
    "several numbers": FailureClass(
        "The tensor that is differentiated holds several numbers, and a gradient is defined for "
        "one.",
        (
            "Take mean() or sum() of it: the second gives gradients as many times as large as "
            "there are elements.",
            "Or give a start of the same shape; "
            "hodiff.jacobian takes the gradient of each element.",
        ),
        (
            "grad can be implicitly created only for scalar outputs",
            "implicitly created",
            "per layer losses",
        ),
    ),
    "wrong start": FailureClass(
        "The start of the pass (gradient=, grad_outputs=) has another shape than what is "
        "differentiated.",
        (
            "Give a start of exactly that shape: torch.ones_like(output), "
            "or torch.tensor(-1.0) for one number.",
        ),
        (
            "Mismatch in shape: grad_output[0] has a shape of ... and output[0] has a shape of ...",
            "mone",
        ),
    ),
    "no tensor": FailureClass(
        "Among what is differentiated is something that is no tensor.",
        (
            "Leave it out; a gradient that is None, of a parameter that no pass has reached, "
            "is none either.",
            "hodiff.hvp and hodiff.hessian give zeros for parameters that do not matter.",
        ),
        (
            "Expected output to be a torch.Tensor",
            "'float' object has no attribute 'shape'",
            "PyHessian",
        ),
    ),
    "inside a Function": FailureClass(
        "The value was computed inside the forward of an autograd.Function, which records nothing.",
        (
            "Compute it outside the Function.",
            "If a gradient is needed in its forward, compute it under torch.enable_grad(), "
            "from a copy that requires grad (x.detach().requires_grad_()).",
        ),
        (_NO_GRAD, "autograd.grad inside forward of autograd.Function"),
    ),
    "inside a pass": FailureClass(
        "The pass was asked for in a hook or in a Function's backward, where nothing is recorded.",
        (
            "Compute what it differentiates under torch.enable_grad() there, "
            "from what requires grad.",
            "Inputs that it does not reach are left out, or allow_unused=True gives None for them, "
            "which a Function's backward may return.",
        ),
        (_NO_GRAD, "autograd.grad in a hook", "autograd.grad in backward"),
    ),
    "checkpoint": FailureClass(
        "A re-entrant checkpoint computes with gradients switched off, "
        "and serves backward() alone; it attaches a result only if that is a tensor, "
        "or a tuple of them, and an argument requires grad.",
        ("Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",),
        (
            "Checkpointing is not compatible with .grad()",
            "None of the inputs have requires_grad=True",
            "use_reentrant",
        ),
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    ),
    "inside a transform": FailureClass(
        "This ran inside a transform of torch.func (vmap, grad, jvp), "
        "whose slices and copies never require grad as far as torch.autograd can see.",
        (
            "Use the transforms inside each other: torch.func.grad or torch.func.vjp instead of "
            "torch.autograd and requires_grad_().",
            "Or leave the batch to hodiff: hodiff.grad(f, x, batch_ndim=1) is one gradient for "
            "each row.",
        ),
        (
            "You are attempting to call Tensor.requires_grad_() (or perhaps using "
            "torch.autograd.functional.* APIs) inside of a function being transformed by a "
            "functorch transform",
            "autograd.grad inside vmap",
            "diagonal of the Hessian",
        ),
    ),
    # --- a part that was freed ---
    "same loss twice": FailureClass(
        "The same loss is differentiated twice, and the first pass freed its graph.",
        (
            "Usually one of the two calls is not needed, or the loss is to be computed again "
            "before the second.",
            "If both gradients are wanted and nothing in the graph was changed in between, "
            "keep it in the first call (retain_graph=True).",
        ),
        (_SECOND, "Specify retain_graph=True"),
    ),
    "shared part": FailureClass(
        "Two losses share a part of their graphs, and the pass of the first freed it.",
        (
            "Decide what each loss is to train. A detached copy keeps one from training the shared "
            "part (as a GAN's discriminator). The sum in one pass, (first + second).backward(), "
            "trains all by both. Computed again, the part is the second loss's own; "
            "gradients are cleared (zero_grad) before the pass that a step follows.",
            "Each loss's own gradients at once: hodiff.multi_grad. If nothing was changed in "
            "between, and both losses are to train the shared part, the first pass may keep the "
            "graph (retain_graph=True).",
            "A loss made of the other's gradient needs create_graph=True there, or hodiff.grad; "
            "with a kept graph, or computed again, that gradient is a constant.",
        ),
        (_SECOND, "retain_graph GAN", "two losses one backward", "actor critic"),
    ),
    "carried over": FailureClass(
        "The pass runs into what an earlier step left: state, a sum, or values that a container "
        "holds.",
        (
            "State between steps is usually detached where the step ends (h = h.detach()), "
            "and a container emptied.",
            "If the steps belong together, add up their losses and run one pass after the last.",
        ),
        (
            _SECOND,
            _IN_PLACE,
            "hidden state",
            "retain_graph RNN",
            "loss accumulates",
            "replay buffer",
        ),
    ),
    "made once": FailureClass(
        "It was computed once, and every pass differentiates through it again.",
        (
            "If it is to be trained, compute it again for each pass: in the loop, "
            "or where it is read. A cache (an attribute, functools, parametrize.cached()) is "
            "cleared after each step, or holds for one pass.",
            "If it stands for what was (old log-probabilities, advantages, a target), "
            "detach it where it is made.",
        ),
        (_SECOND, "cached weight", "positional encoding", "lru_cache"),
    ),
    "freed before": FailureClass(
        "A part of the graph was freed by an earlier pass, which was not recorded.",
        (
            "What was computed once is computed again for each pass; what one step hands to the "
            "next is detached where the step ends; two losses of one value are added up for one "
            "pass.",
            "Run the program under `hodiff explain SCRIPT`, or in hodiff.graph.watch(): "
            "then it is known which pass freed what, and where it was made.",
        ),
        (_SECOND,),
    ),
    "released": FailureClass(
        "hodiff freed this part of the graph: by hodiff.graph.release, or by multi_grad(..., "
        "release=True).",
        ("Compute the tensor again, or release later.",),
        ("was released: by hodiff",),
    ),
    "read after freeing": FailureClass(
        "A pass ran over that node before, and freed what it had saved.",
        (
            "Read it before the pass that frees it; hodiff.graph.inspect(tensor) shows states "
            "without reading.",
        ),
        (
            "Trying to backward through the graph a second time (or directly access saved tensors)",
            "torchviz",
        ),
    ),
    # --- values that were changed ---
    "changed value": FailureClass(
        "A value was changed in place after an operation had saved it for its derivative.",
        (
            "Make a new tensor instead of the change: x = x + 1, torch.where, torch.stack, "
            "inplace=False; or change a clone().",
            "A kept graph does not help: it holds the same changed value.",
        ),
        (_IN_PLACE, "is at version 1; expected version 0 instead", "inplace=True"),
    ),
    "changed parameter": FailureClass(
        "A parameter was changed (by a step, say) between the forward pass that used it and this "
        "pass.",
        (
            "Compute the loss after the change, from the forward pass on, "
            "with gradients cleared before its pass (zero_grad).",
            "A kept graph does not help: it would be of the old values.",
        ),
        (_IN_PLACE, "optimizer.step() before backward()", "two optimizers"),
    ),
    "refused in place": FailureClass(
        "PyTorch refuses this change in place: of a leaf that requires grad, of a view whose base "
        "could not follow (one of several that an operation returned, one that a Function or a "
        "full backward hook made), or by out=, which has no derivative.",
        (
            "A parameter is updated under torch.no_grad(). Where the new value should be part of "
            "the graph, make a new tensor under another name (w = p + ...).",
            "Elsewhere make a new tensor, and go on with that one: by the form without an "
            "underscore, without out=, by inplace=False; or change a clone().",
        ),
        (
            "a leaf Variable that requires grad is being used in an in-place operation",
            "a view of a leaf Variable that requires grad is being used in an in-place operation",
            "Output 0 of UnbindBackward0 is a view and is being modified inplace",
            "Output 0 of BackwardHookFunctionBackward is a view and is being modified inplace",
            "This view was created inside a custom Function",
            "functions with out=... arguments don't support automatic differentiation",
        ),
    ),
    "view made without gradients": FailureClass(
        "The tensor is a view that was made while gradients were off, and it is changed in place "
        "where they are on.",
        (
            "Make the view and the change in the same place: both where gradients are on, "
            "or both where they are off.",
            "Or change a clone() of the view.",
        ),
        (
            "A view was created in no_grad mode and is being modified inplace with grad mode "
            "enabled",
            "A view was created in inference mode",
        ),
    ),
    "inference tensor": FailureClass(
        "The tensor was made under inference_mode: no graph can save it, and it cannot be changed "
        "outside.",
        (
            "Make it under torch.no_grad() instead of inference_mode(), or use a clone() of it, "
            "made outside, which is an ordinary constant.",
        ),
        (
            "Inference tensors cannot be saved for backward",
            "Inplace update to inference tensor outside InferenceMode",
        ),
    ),
    # --- inputs, and leaves ---
    "not used": FailureClass(
        "No graph leads from the loss to that input: the loss does not depend on it, "
        "or its derivative is zero.",
        (
            "If the loss does not depend on it, leave it out of the inputs; "
            "or allow_unused=True gives None for it, "
            "and materialize_grads=True zeros.",
            "If it should, compute the loss from that very tensor: a copy, a view made beside it, "
            ".to(), or what was computed before it was made are others. If its derivative is zero "
            "by its formula (a bias under a second derivative), zeros are right.",
        ),
        (
            "One of the differentiated Tensors appears to not have been used in the graph",
            "allow_unused",
        ),
    ),
    "not a leaf": FailureClass(
        "The tensor is the result of an operation, and what was asked is for leaves: "
        "gradients are kept in .grad, "
        "flags can be set, and optimizers step leaves alone.",
        (
            "An update makes a leaf again with x = x.detach().requires_grad_(); "
            "or take torch.autograd.grad(loss, x), "
            "which returns the gradient of any tensor.",
            "What comes from a tensor that requires grad requires it already: "
            "leave the flag alone. An optimizer takes the leaf, and the slice or the scaled value "
            "is computed in each step.",
        ),
        (
            "'NoneType' object has no attribute 'sign' (abs, data, zero_, numpy, clone)",
            "unsupported operand type(s) for *: 'float' and 'NoneType'",
            "can't optimize a non-leaf Tensor",
            "you can only change requires_grad flags of leaf variables",
            "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
            "retain_grad",
            "Langevin",
        ),
    ),
    "no gradient yet": FailureClass(
        "A .grad was read that is None: no pass has reached this leaf since it was made or its "
        "gradient was reset.",
        (
            "Read it after the pass. If there was one, this leaf does not require grad, the loss "
            "does not depend on it (a layer that is not used), it was cut off on the way "
            "(detach(), no_grad), or the pass was asked for other inputs.",
            "hodiff.graph.inspect(loss, names=model).unreached lists the parameters that a loss "
            "does not reach.",
        ),
        (
            "'NoneType' object has no attribute 'data'",
            "'NoneType' object has no attribute 'zero_'",
            "grad is None",
        ),
    ),
    # --- derivatives that are missing ---
    "no second derivative": FailureClass(
        "PyTorch can differentiate this operation only once.",
        ("hodiff.hvp(f, x, v) finds a substitute of the operation, or names one.",),
        (
            "derivative for aten::... is not implemented",
            "does not currently support double backward",
            "donated buffers",
        ),
    ),
    "Function differentiable once": FailureClass(
        "The backward of an autograd.Function can itself not be differentiated: "
        "it recorded nothing, forbids it, or raised when it was asked for.",
        (
            "Write the Function with plain operations; or its backward so that it can be "
            "differentiated: from ctx.saved_tensors, by operations of PyTorch, "
            "without @once_differentiable.",
            "For a fast library (a hash grid, a fused network), switch to its plain PyTorch "
            "version for this loss.",
        ),
        (
            "trying to differentiate twice a function that was marked with @once_differentiable",
            "backward_backward_input_impl: not implemented error",
            "eikonal loss",
        ),
    ),
    # --- checkpoints, copies ---
    "recomputed otherwise": FailureClass(
        "A checkpoint ran its function again in the pass, and that computed or read something else "
        "than in the forward.",
        (
            "The function reads something that changed in between: a cache or a counter that its "
            "first run filled, "
            "autocast or no_grad that are on in one run only, the global random state.",
            "torch.utils.checkpoint.set_checkpoint_debug_enabled(True) shows the operation. "
            "A Function's backward reads ctx.saved_tensors once, into a variable.",
        ),
        (
            "torch.utils.checkpoint: Recomputed values for the following tensors have different "
            "metadata",
            "A different number of tensors was saved during the original forward and recomputation",
            "already been unpacked once",
        ),
    ),
    "copied": FailureClass(
        "A tensor with a graph cannot be copied, and an attribute of the object holds one: "
        "a result of its forward, or what its constructor computed from parameters.",
        (
            "What is computed from parameters is computed in forward, "
            "and kept in a local variable; "
            "an attribute that is only looked at stores a detached value. "
            "Or copy before the first forward.",
        ),
        (
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment",
        ),
    ),
}
"""By the names that `Explanation.cause` has."""
