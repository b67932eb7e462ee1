"""The route through `torch.compile`: a gradient that its tracer can follow.

The rest of the library reads graphs, lends modules and warns, none of which a traced region can hold.
Inside one, the gradient comes from `torch.func.grad`, which Dynamo writes out as plain operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hodiff._core import _checks, _compiled_callers, _tree
from hodiff.errors import GraphError, InputError


def outputs_and_gradient(
    critic: Any, x: Any, *, create_graph: bool, args: Any, kwargs: Any
) -> tuple[Tensor, list[Tensor]]:
    """What the critic returns, and the gradient's leaves, inside a compiled region."""
    if isinstance(x, nn.Module) or isinstance(critic.f, Tensor):
        raise InputError(
            "torch.compile: a penalty inside a compiled region takes a function and tensors. Call it outside the "
            "region for a module's parameters, and for a tensor that was already computed."
        )
    leaves, _, tree = _tree.flatten(x)
    _compiled_callers.check_point(leaves)

    def total(point: list[Tensor]) -> tuple[Tensor, Tensor]:
        batch = point[0].shape[: critic.batch_ndim]
        before = _compiled_callers.functions_traced()
        outputs = critic.f(_tree.rebuild(tree, iter(point)), *args, **(kwargs or {}))
        _compiled_callers.check_functions(before)
        scalars = critic.per_sample(outputs, batch)
        _checks.check_scalars(scalars, critic.batch_ndim, batch)
        if not scalars.requires_grad:  # of this transform, which knows nothing but the point
            raise GraphError(
                "the result of f does not depend on x, or everything between the two was cut (.detach(), .data, a "
                "torch.no_grad() block). Let f compute with the argument that it is given."
            )
        return scalars.sum(), outputs

    with sdpa_kernel(SDPBackend.MATH):  # no second derivative through the fused kernels; nor, of some masks, a first
        gradient, outputs = torch.func.grad(total, has_aux=True)(leaves)
    if not create_graph:
        gradient, outputs = [leaf.detach() for leaf in gradient], outputs.detach()
    return outputs, list(gradient)
