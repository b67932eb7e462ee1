"""What a user may call inside of `f`: transforms, checkpoints, compiled, scripted and custom functions.

Each row is one entrywise function in two forms: by the operator or transform, and written plainly, which is the oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask
from torch.utils import checkpoint

from tests.support.callers import SCALE, D, Entrywise


def wave(z: Tensor) -> Tensor:
    return SCALE * z.sin() * z


def once(z: Tensor) -> Tensor:
    """What `wave` is the derivative of."""
    return SCALE * (z.sin() - z * z.cos())


def twice(z: Tensor) -> Tensor:
    """What `wave` is the second derivative of."""
    return -SCALE * (z * z.sin() + 2 * z.cos())


# --- operators that take functions ------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7, dtype=D))

    def forward(self, z: Tensor) -> Tensor:
        return SCALE * self.weight**2 * z.sin() * z


WEIGHTED = Weighted()


def folded(z: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a * b, torch.stack([SCALE * z.sin(), z]), 0, combine_mode="generic")[-1]


def flex(z: Tensor) -> Tensor:
    """Each entry attends itself alone; the other scores are masked."""
    row = wave(z).reshape(1, 1, -1, 1)
    found: Any = flex_attention(row, row, row, score_mod=_itself)
    return found.reshape(z.shape)


def _itself(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q == k, score * SCALE, -torch.inf)


def flex_operator(z: Tensor) -> Tensor:
    """The same, behind the refusal of gradients on a CPU."""
    row = wave(z).reshape(1, 1, -1, 1)
    mask = create_block_mask(noop_mask, 1, 1, row.shape[2], row.shape[2], device="cpu")
    return torch.ops.higher_order.flex_attention(row, row, row, _itself, mask.as_tuple(), 1.0, {})[0].reshape(z.shape)


def lazily(make: Callable[[], Entrywise]) -> Entrywise:
    """The function that is made when it is first called: to compile one loads Dynamo."""
    made = cache(make)
    return lambda z: made()(z)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def reentrant(z: Tensor) -> Tensor:
    return checkpoint.checkpoint(wave, z, use_reentrant=True)  # type: ignore[return-value]


def not_reentrant(z: Tensor) -> Tensor:
    return checkpoint.checkpoint(wave, z, use_reentrant=False)  # type: ignore[return-value]


def selective(z: Tensor) -> Tensor:
    saved = [torch.ops.aten.sin.default]
    contexts = lambda: checkpoint.create_selective_checkpoint_contexts(saved)  # type: ignore[arg-type]
    return checkpoint.checkpoint(wave, z, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]


# --- torch.func ------------------------------------------------------------------------------------------------------


def _total(g: Entrywise) -> Callable[[Tensor], Tensor]:
    return lambda z: g(z).sum()


def func_vjp(z: Tensor) -> Tensor:
    value, pull = torch.func.vjp(once, z)  # type: ignore[misc]
    return pull(torch.ones_like(value))[0]


def func_jvp(z: Tensor) -> Tensor:
    return torch.func.jvp(once, (z,), (torch.ones_like(z),))[1]  # type: ignore[return-value]


def func_jvp_along(z: Tensor) -> Tensor:
    """The tangent depends on the point."""
    return -torch.func.jvp(torch.cos, (z,), (SCALE * z,))[1]  # type: ignore[operator]


def func_linearize(z: Tensor) -> Tensor:
    return -torch.func.linearize(torch.cos, z)[1](SCALE * z)


def linear_part(z: Tensor) -> Tensor:
    """What that is: PyTorch freezes the point at which it linearizes."""
    return SCALE * z.detach().sin() * z


def func_hessian(z: Tensor) -> Tensor:
    return torch.vmap(torch.func.hessian(twice))(z.reshape(-1)).reshape(z.shape)


def func_jacrev(z: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacrev(once))(z.reshape(-1)).reshape(z.shape)


def func_jacfwd(z: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacfwd(once))(z.reshape(-1)).reshape(z.shape)


def func_call(z: Tensor) -> Tensor:
    found = torch.func.functional_call(WEIGHTED, {"weight": SCALE.sqrt()}, (z,))
    return found / SCALE


def in_vmap(z: Tensor) -> Tensor:
    return torch.vmap(wave)(z)


# --- forward mode ----------------------------------------------------------------------------------------------------


def _dual(g: Entrywise, z: Tensor, tangent: Tensor) -> Tensor:
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(g(forward_ad.make_dual(z, tangent))).tangent
    assert found is not None
    return found


def dual(z: Tensor) -> Tensor:
    return _dual(once, z, torch.ones_like(z))


def dual_along(z: Tensor) -> Tensor:
    return -_dual(torch.cos, z, SCALE * z)


def _columns(z: Tensor) -> Tensor:
    """Each entry and its negative, a column for each."""
    return torch.stack([z.reshape(-1), -z.reshape(-1)])


def _rotations(z: Tensor) -> Tensor:
    """A matrix for each entry."""
    one = torch.ones_like(z)
    return torch.stack([torch.stack([z, one], -1), torch.stack([-one, z], -1)], -2)


EPS = 0.5
_normal: Entrywise = lambda z: EPS * (z**2 + EPS) ** -1.5
_part: Entrywise = lambda z: (1 - z**2) / (1 + z**2) ** 2
_first: Entrywise = lambda z: torch.tensor([1.0, 0.0], dtype=z.dtype).expand(*z.shape, 2)

WITH_KEPT: dict[str, tuple[Entrywise, Entrywise]] = {
    "layer_norm": (lambda z: F.layer_norm(_columns(z).mT, (2,), eps=EPS)[:, 0].reshape(z.shape), _normal),
    "nn.LayerNorm": (lambda z: nn.LayerNorm(2, EPS, dtype=D)(_columns(z).mT)[:, 0].reshape(z.shape), _normal),
    "batch_norm": (
        lambda z: F.batch_norm(_columns(z), None, None, training=True, eps=EPS)[0].reshape(z.shape),
        _normal,
    ),
    "instance_norm": (lambda z: F.instance_norm(_columns(z).mT[None], eps=EPS)[0, :, 0].reshape(z.shape), _normal),
    "det": (lambda z: torch.linalg.det(_rotations(z)), lambda z: 2 * z),
    "Tensor.det": (lambda z: _rotations(z).det(), lambda z: 2 * z),
    "slogdet": (lambda z: torch.linalg.slogdet(_rotations(z)).logabsdet, lambda z: 2 * z / (z**2 + 1)),
    "logdet": (lambda z: torch.logdet(_rotations(z)), lambda z: 2 * z / (z**2 + 1)),
    "solve": (lambda z: torch.linalg.solve(_rotations(z), _first(z))[..., 0], _part),
    "solve, columns": (
        lambda z: torch.linalg.solve(_rotations(z), _first(z)[..., None, :], left=False)[..., 0, 0],
        _part,
    ),
    "solve_ex": (lambda z: torch.linalg.solve_ex(_rotations(z), _first(z)[..., None])[0][..., 0, 0], _part),
    "tensorsolve": (
        lambda z: torch.linalg.tensorsolve(torch.block_diag(*_rotations(z).reshape(-1, 2, 2)), _first(z).reshape(-1))[
            ::2
        ].reshape(z.shape),
        _part,
    ),
    "native_layer_norm": (
        lambda z: torch.native_layer_norm(_columns(z).mT, (2,), None, None, EPS)[0][:, 0].reshape(z.shape),
        _normal,
    ),
    "native_batch_norm": (
        lambda z: torch.native_batch_norm(_columns(z), None, None, None, None, True, 0.1, EPS)[0][0].reshape(z.shape),
        _normal,
    ),
    "aten.layer_norm": (
        lambda z: torch.ops.aten.layer_norm(_columns(z).mT, (2,), None, None, EPS)[:, 0].reshape(z.shape),
        _normal,
    ),
    "aten.det": (lambda z: torch.ops.aten.linalg_det.default(_rotations(z)), lambda z: 2 * z),
    "householder_product": (
        lambda z: torch.linalg.householder_product(
            torch.stack([torch.ones_like(z), z], -1)[..., None], (2 / (1 + z**2))[..., None]
        )[..., 1, 0],
        lambda z: -2 * _part(z),
    ),
    "as_strided_scatter": (
        lambda z: (z.reshape(-1) ** 3).as_strided_scatter(z.reshape(-1)[:2] ** 3, (2,), (1,)).reshape(z.shape),
        lambda z: 3 * z**2,
    ),
}
"""Entrywise functions through operations whose tangent reads what they keep beside their result; and their slopes."""

REFUSED = ("native", "aten", "householder", "as_strided", "slogdet", "logdet", "solve", "tensorsolve")
"""Those that are refused where forward mode meets them (some releases have right ones)."""


def _by_jvp(g: Entrywise) -> Entrywise:
    return lambda z: torch.func.jvp(g, (z,), (SCALE * z.cos(),))[1]  # type: ignore[return-value]


def _by_jacfwd(g: Entrywise) -> Entrywise:
    def sums(z: Tensor) -> Tensor:
        return torch.func.jacfwd(lambda y: g(y).sum())(z) * SCALE * z.cos()

    return sums


def _by_levels(g: Entrywise) -> Entrywise:
    return lambda z: _dual(g, z, SCALE * z.cos())


FORWARD = {"func.jvp": _by_jvp, "func.jacfwd": _by_jacfwd, "forward_ad": _by_levels}


# --- derivatives by hand ----------------------------------------------------------------------------------------------


def _attended(z: Tensor) -> Tensor:
    """Each entry attends itself and 0."""
    pairs = torch.stack([z.reshape(-1), torch.zeros_like(z.reshape(-1))], -1)[..., None]
    found = F.scaled_dot_product_attention(torch.ones_like(pairs), pairs, pairs, scale=1.0)
    return found[:, 0, 0].reshape(z.shape)


_MIXED = "Taylor mode has no rule for BatchNorm in training mode"
_sigmoid_slope: Entrywise = lambda z: z.sigmoid() * (1 - z.sigmoid())

BY_ORDER: dict[str, tuple[Entrywise, Entrywise]] = {
    "layer_norm": WITH_KEPT["layer_norm"],
    "batch_norm": WITH_KEPT["batch_norm"],
    "instance_norm": WITH_KEPT["instance_norm"],
    "weight_norm": (
        lambda z: torch._weight_norm(  # pyright: ignore[reportPrivateImportUsage]
            torch.stack([z, torch.ones_like(z)], -1).reshape(-1, 2), torch.ones(z.numel(), 1, dtype=z.dtype), 0
        )[:, 0].reshape(z.shape),
        lambda z: (z**2 + 1) ** -1.5,
    ),
    "logcumsumexp": (lambda z: torch.logcumsumexp(_columns(z), 0)[1].reshape(z.shape), torch.tanh),
    "attention": (_attended, lambda z: z.sigmoid() + z * _sigmoid_slope(z)),
}
"""Entrywise functions whose derivatives PyTorch has right up to some order; and their slopes."""


def _pulled(g: Entrywise, z: Tensor) -> Tensor:
    y = z if z.requires_grad else z.clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(g(y).sum(), y, create_graph=True)[0]


BY_HAND: dict[str, Callable[[Entrywise, Tensor], Tensor]] = {
    "autograd.grad": _pulled,
    "func.grad": lambda g, z: torch.func.grad(_total(g))(z),
    "func.vjp": lambda g, z: torch.func.vjp(_total(g), z)[1](torch.ones((), dtype=z.dtype))[0],  # type: ignore[operator]
    "func.jacrev": lambda g, z: torch.func.jacrev(_total(g))(z),
}


# --- functions of other kinds ----------------------------------------------------------------------------------------


@torch.library.custom_op("hodiff_tests::wave", mutates_args=())
def with_formula(z: Tensor) -> Tensor:
    return z.sin() * z


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _formula(ctx: Any, grad: Tensor) -> Tensor:
    (z,) = ctx.saved_tensors
    return grad * (z.cos() * z + z.sin())


with_formula.register_autograd(_formula, setup_context=_setup)


@torch.library.custom_op("hodiff_tests::unknown", mutates_args=())
def without_formula(z: Tensor) -> Tensor:
    return z.sin() * z


def _sine(z: Tensor) -> Tensor:
    return z.sin() * z


def traced() -> Entrywise:
    made = torch.jit.trace(_sine, torch.ones(2, 3, dtype=D))
    return lambda z: SCALE * made(z)  # type: ignore[operator]


def scripted() -> Entrywise:
    made = torch.jit.script(_sine)
    return lambda z: SCALE * made(z)  # type: ignore[operator]


# --- the rows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inside:
    """A row.

    Attributes:
        function: The function, by an operator or a transform.
        plain: The same, written plainly.
        refused: What an error may say that a name raises in place of a value; nothing where each has to be right.
    """

    function: Entrywise
    plain: Entrywise = wave
    refused: str | None = None


INSIDE: dict[str, Inside] = {
    "associative_scan": Inside(folded, refused="associative_scan .*Python loop"),
    "flex_attention": Inside(flex, refused="FlexAttention does not support backward on CPU"),
    "flex_attention, the operator": Inside(flex_operator),
    "nested_compile_region": Inside(lazily(lambda: torch.compiler.nested_compile_region(wave))),
    "checkpoint, re-entrant": Inside(reentrant, refused="re-entrant (activation )?checkpoint"),
    "checkpoint": Inside(not_reentrant),
    "checkpoint, selective": Inside(selective, refused="a selective activation checkpoint"),
    "func.grad": Inside(torch.func.grad(_total(once))),
    "func.vjp": Inside(func_vjp),
    "func.jvp": Inside(func_jvp),
    "func.jvp along the point": Inside(func_jvp_along),
    "func.jacrev": Inside(func_jacrev),
    "func.jacrev of a sum": Inside(torch.func.jacrev(_total(once))),
    "func.jacfwd": Inside(func_jacfwd),
    "func.jacfwd of a sum": Inside(torch.func.jacfwd(_total(once))),
    "func.hessian": Inside(func_hessian),
    "func.linearize": Inside(  # check_derivatives finds the point that is frozen
        func_linearize, linear_part, refused=r"detach\(\) in _create_param .*gives a value without its graph"
    ),
    "func.functional_call": Inside(func_call),
    "vmap": Inside(in_vmap),
    "forward_ad": Inside(dual),
    "forward_ad along the point": Inside(dual_along),
    "custom_op": Inside(lambda z: SCALE * with_formula(z)),
    "custom_op without a formula": Inside(
        lambda z: SCALE * without_formula(z), refused="no autograd formula was registered"
    ),
    "jit.trace": Inside(lazily(traced)),
    "jit.script": Inside(lazily(scripted)),
    "compile, eager": Inside(lazily(lambda: torch.compile(wave, backend="eager"))),
    "compile, aot_eager": Inside(lazily(lambda: torch.compile(wave, backend="aot_eager"))),
    **{
        f"{way} through {name}": Inside(
            by(function),
            lambda z, slope=slope: SCALE * z.cos() * slope(z),
            refused="forward mode .* through .*instead of|as_strided_scatter (is silently wrong|requires special)"
            if name.startswith(REFUSED)
            else None,
        )
        for way, by in FORWARD.items()
        for name, (function, slope) in WITH_KEPT.items()
    },
    **{
        f"{way} through {name}": Inside(
            lambda z, by=by, function=function: SCALE * z.cos() * by(function, z),
            lambda z, slope=slope: SCALE * z.cos() * slope(z),
            refused=_MIXED if name == "batch_norm" else None,
        )
        for way, by in BY_HAND.items()
        for name, (function, slope) in BY_ORDER.items()
    },
    **{
        f"{way} twice through {name}": Inside(
            lambda z, by=by, function=function: SCALE * z.cos() * by(lambda y: by(function, y), z),
            lambda z, slope=slope: SCALE * z.cos() * torch.func.grad(_total(slope))(z),
            refused=_MIXED if name == "batch_norm" else None,
        )
        for way, by in [*BY_HAND.items()][:2]
        for name, (function, slope) in BY_ORDER.items()
        if name != "attention"  # whose second derivative by hand is PyTorch's own error, without hodiff
    },
}
