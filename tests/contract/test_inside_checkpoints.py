"""hodiff inside PyTorch's activation checkpoint, and checkpoints inside of `f`: right, as without one.

A checkpoint keeps nothing of what its block saves, and runs the block again in a pass. What a call of ours saves must
be the same then; with `determinism_check="none"` PyTorch would go on with other tensors, and say nothing.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core._versions import RELEASE
from tests.support.callers import CALLERS, SCALE, Caller, D, tensors

X = torch.tensor([[0.3, -0.5, 0.7], [0.9, 0.2, -0.4]], dtype=D)
WAYS: list[dict[str, Any]] = [{}, {"determinism_check": "none"}]
if "early_stop" in inspect.signature(checkpoint).parameters:  # not in PyTorch 2.8
    WAYS += [{"early_stop": False}]
PURE: dict[str, Any] = {"create_graph": True}


def layers(*between: nn.Module, out: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, out)).double()


MLP, NORMED, ONE = layers(), layers(nn.LayerNorm(4)), layers(nn.LayerNorm(4), out=1)


def checkpointed(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args: checkpoint(f, *args, use_reentrant=False, **options)


def outcome(run: Callable[[], list[Tensor]]) -> Any:
    """The tensors; or what was raised, of which the first words tell enough."""
    torch.manual_seed(3)
    try:
        return [each.detach() for each in run()]
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)[:60]


def agree(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple) or isinstance(found, tuple):
        assert found == expected
        return
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


# --- every public function in a block ---------------------------------------------------------------------------------


def in_a_block(operation: Callable[[Tensor], Tensor], z: Tensor, *rest: Any) -> Tensor:
    return checkpointed(operation)(z) * z.cos() * SCALE


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sin exp": lambda z, *rest: z.sin() * z.exp() * SCALE,
    "prod": lambda z, *rest: z.prod(-1, keepdim=True) * z.cos() * SCALE,
    "cumprod": lambda z, *rest: z.cumprod(-1) * z.exp() * SCALE,
    "layer_norm": lambda z, *rest: F.layer_norm(z * z, (3,)) * z.sin() * SCALE,
    "MLP": lambda z, *rest: torch.tanh(z @ MLP[0].weight.T) @ MLP[2].weight.T * SCALE,  # type: ignore[union-attr]
    "a module": lambda z, *rest: NORMED(z) * SCALE,
    **{
        f"{name}, in a block of f": functools.partial(in_a_block, operation)
        for name, operation in {
            "prod": lambda z: z.prod(-1, keepdim=True),
            "cumprod": lambda z: z.cumprod(-1),
            "pow": lambda z: (z * z + 1) ** z,
            "det": lambda z: torch.linalg.det(torch.diag_embed(z)).unsqueeze(-1),
        }.items()
    },
}


def recording(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the caller's function keep its graph, where it can be told to."""
    *path, name = caller.name.partition(",")[0].split(".")
    home = functools.reduce(getattr, path, hodiff)
    public = getattr(home, name)
    if "create_graph" in inspect.signature(public).parameters:
        monkeypatch.setattr(home, name, functools.partial(public, create_graph=True))


@pytest.mark.table(wide=20)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning", "ignore::UserWarning")
@pytest.mark.parametrize("recorded", [False, True], ids=["as it is", "create_graph"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("caller", CALLERS, ids=repr)
def test_a_call_in_a_block_is_as_without(
    caller: Caller, name: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, gradient and second derivative, of a block that computes with the point before it calls, and after."""
    if recorded:
        recording(caller, monkeypatch)

    def block(x: Tensor) -> Tensor:
        results = [
            part for part in tensors(caller.run(caller.shaped(FUNCTIONS[name]), x * x.cos(), ())) if part.dtype == D
        ]
        return sum([(part * 1.1).sin().sum() for part in results], (x**2).sin().sum())

    def derivatives(f: Callable[..., Tensor]) -> list[Tensor]:
        x = X.clone().requires_grad_()
        value = f(x)
        by_x, by_scale = torch.autograd.grad(value, [x, SCALE], create_graph=True, allow_unused=True)
        assert by_x is not None
        second = torch.autograd.grad((by_x * by_x.detach().cos()).sum(), x)
        return [value, by_x, *second, *([] if by_scale is None else [by_scale])]

    expected = outcome(lambda: derivatives(block))
    for way in WAYS:
        found = outcome(lambda way=way: derivatives(checkpointed(block, **way)))
        if isinstance(found, tuple) and found != expected and "in a block" in name:  # Taylor mode, or the sixth order
            assert caller.name in ("jet", "biharmonic")
            assert "checkpoint" in found[1]
        else:
            agree(found, expected)


# --- several calls, calls over a graph that is there, modules, whatever takes the derivative --------------------------


def total(value: Any) -> Tensor:
    return sum([(each * 1.1).sin().sum() for each in tensors(value)], torch.zeros((), dtype=D))


def halves(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}


MASK, TINY = X.new_tensor([[0.0, -1e9], [-1e9, -1e9]]), X.new_tensor([0.0, 1e-310, 2.0])


def after_a_call(x: Tensor) -> Tensor:
    gradient = hodiff.grad(lambda z: (z.prod(-1) * MLP(z)[:, 0]).sum(), x, create_graph=True)
    return total(hodiff.jacobian(gradient, x, create_graph=True))


BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a gradient of a tensor": lambda x: total(hodiff.grad((x.prod(-1) * MLP(x)[:, 0]).sum(), x, **PURE)),
    "a product of a tensor": lambda x: total(hodiff.hvp(MLP(x).sin().sum(), x, X.cos(), **PURE)),
    "a Hessian of a tensor": lambda x: total(hodiff.hessian(MLP(x).sin().sum(), x, **PURE)),
    "a Jacobian of a tensor": lambda x: total(hodiff.jacobian(NORMED(x).sin(), x, **PURE)),
    "a Jacobian after a call": after_a_call,
    "two calls": lambda x: total(
        hodiff.hvp(lambda z: NORMED(z).sum(), x, X.cos(), **PURE) * hodiff.grad(lambda z: z.prod(-1).sum(), x, **PURE)
    ),
    "a call in a call": lambda x: total(
        hodiff.grad(lambda z: total(hodiff.grad(lambda y: y.prod(-1).sum() * NORMED(y).sum(), z)), x, **PURE)
    ),
    "a checkpoint in f": lambda x: total(
        hodiff.hessian(lambda z: checkpointed(NORMED)(z).sum() + z.prod(), x, **PURE)
    ),
    "a checkpoint in the block": lambda x: checkpointed(
        lambda y: total(hodiff.grad(lambda z: z.prod(-1).sum() * NORMED(z).sum(), y, **PURE))
    )(x * x) * x.sum(),
    "by a module": lambda x: total(hodiff.hvp(lambda m: m(x).sin().sum(), NORMED, halves(NORMED), **PURE)),
    "a Hessian by a module": lambda x: total(hodiff.hessian(lambda m: m(x).sin().sum(), ONE, matrix=True, **PURE)),
    "a tensor, by a module": lambda x: total(hodiff.hvp(MLP(x).sin().sum(), MLP, halves(MLP), **PURE)),
    "blocks of ours": lambda x: total(
        hodiff.hvp(lambda m: m(x).sin().sum(), NORMED, halves(NORMED), checkpoint="0", **PURE)
    ),
    "training": lambda x: total(
        hodiff.unroll(lambda m: m(x).square().sum(), layers(nn.LayerNorm(4)), hodiff.rules.SGD(lr=0.1), 2)
    ),
    "a closure": lambda x: total(hodiff.grad(lambda z: (z * MLP(x)).prod(-1).sum(), X.clone(), **PURE)),
    "a vector": lambda x: total(hodiff.hvp(lambda z: z.cumprod(-1).sum().sin(), X.clone(), x.cumprod(-1), **PURE)),
    "an operator": lambda x: total(
        hodiff.solve(
            hodiff.HessianOperator(lambda z: 2 * z.square().sum() + z.prod(-1).sum(), x), X.cos(), create_graph=True
        ).value
    ),
    "random numbers": lambda x: total(
        hodiff.hvp(lambda z: F.dropout(NORMED(z) * z, 0.5).sin().sum(), F.dropout(x, 0.3), X.cos(), **PURE)
    ),
    "zeros in a product": lambda x: total(hodiff.grad(lambda z: (z * TINY).prod(-1).sum(), x, **PURE)),
    "rows masked in full": lambda x: total(
        hodiff.grad(lambda z: F.scaled_dot_product_attention(*[z[None, None]] * 3, MASK).sin().sum(), x, **PURE)
    ),
    "a determinant": lambda x: total(hodiff.hvp(lambda z: torch.linalg.det(z[:, :2]).sin(), x, X, **PURE)),
    "several losses": lambda x: total(
        hodiff.multi_grad([lambda z: NORMED(z).sum(), lambda z: z.prod(-1).sum()], x, **PURE)
    ),
}  # fmt: skip


def plain_passes(f: Callable[..., Tensor]) -> list[Tensor]:
    x = X.clone().requires_grad_()
    value = f(x.sin())
    [gradient] = torch.autograd.grad(value, x, create_graph=True)
    return [
        value,
        gradient,
        *torch.autograd.grad(gradient.sin().sum(), x, retain_graph=True),
        *torch.autograd.grad(value, x),
    ]


def of_a_tensor(f: Callable[..., Tensor]) -> list[Tensor]:
    x = X.clone().requires_grad_()
    value = f(x.sin())
    return [hodiff.grad(value, x), hodiff.hvp(value, x, X.sin()), hodiff.hessian(value, x)]


PASSES: dict[str, Callable[[Callable[..., Tensor]], list[Tensor]]] = {
    "autograd": plain_passes,
    "ours": lambda f: [hodiff.grad(f, X), hodiff.hvp(f, X, X.sin()), hodiff.hessian(f, X)],
    "ours, of a tensor": of_a_tensor,
}


@pytest.mark.table(wide=20)
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_as_without(name: str, passes: str) -> None:
    """Or is refused in the same words: a third derivative of a fused norm, in a graph that is there."""
    expected = outcome(lambda: PASSES[passes](BLOCKS[name]))
    for way in WAYS:
        agree(outcome(lambda way=way: PASSES[passes](checkpointed(BLOCKS[name], **way))), expected)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # type: ignore[attr-defined]


VALUES = {
    "singular values": lambda z: torch.linalg.svdvals(z).sin().sum(),
    "a nuclear norm": lambda z: torch.linalg.matrix_norm(z, "nuc").sin(),
    "eigenvalues": lambda z: torch.linalg.eigvalsh(z @ z.mT).sin().sum(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_a_matrix_in_a_checkpoint_of_f(name: str) -> None:
    """Whether they are equal is not looked at, for the look would run the block; that is said."""

    def block(f: Callable[[Tensor], Tensor], **way: Any) -> Callable[[Tensor], Tensor]:
        return checkpointed(lambda x: total(hodiff.hvp(f, x, X.cos(), **PURE)), **way)

    expected = plain_passes(lambda x: total(hodiff.hvp(VALUES[name], x, X.cos(), **PURE)))
    for way in WAYS:
        with pytest.warns(hodiff.HodiffWarning, match="inside another one hides whether some are equal"):
            found = plain_passes(block(checkpointed(VALUES[name]), **way))
        agree(found, expected)


def test_what_is_compared_is_mostly_computed() -> None:
    refused = [name for name in BLOCKS if isinstance(outcome(lambda name=name: plain_passes(BLOCKS[name])), tuple)]
    assert refused == ([] if RELEASE >= (2, 13) else ["blocks of ours"])


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_f_runs_once_more_in_the_pass_and_no_more() -> None:
    """By hand it runs three times: the first pass, within the block, runs it again."""
    runs = []

    def f(z: Tensor) -> Tensor:
        runs.append(z)
        return (z.sin() * z.exp()).sum()

    x = X.clone().requires_grad_()
    value = checkpointed(lambda x: hodiff.hessian(f, x, create_graph=True).sin().sum())(x)
    assert len(runs) == 1
    value.backward()
    assert len(runs) == 2


@pytest.mark.parametrize("kept", [False, True], ids=["in a checkpoint", "without"])
def test_the_checkpoint_saves_the_memory_of_the_call(kept: bool) -> None:
    saved = []

    def f(z: Tensor) -> Tensor:
        exponential = z.exp()
        saved.append(StorageWeakRef(exponential.untyped_storage()))
        return (exponential * z.sin()).sum()

    block = lambda x: hodiff.grad(f, x, create_graph=True).sin().sum()
    x = X.clone().requires_grad_()
    value = (block if kept else checkpointed(block))(x)
    assert saved[0].expired() is not kept
    del value


def test_what_is_detached_is_no_concern_of_the_checkpoint() -> None:
    """An operator keeps its graph, in the block and after it."""
    runs, x = [], X.clone().requires_grad_()
    H = hodiff.HessianOperator(lambda z: (z.prod(-1) * z.exp().sum(-1)).sum(), X)

    def f(z: Tensor) -> Tensor:
        runs.append(z)
        return (z.prod(-1) * z.exp().sum(-1)).sum()

    def block(x: Tensor) -> Tensor:
        inner = hodiff.HessianOperator(f, x.detach())
        return ((inner @ X + inner @ X.cos() + H @ X) * x).sin().sum()

    results = [torch.autograd.grad(f(x), x)[0] for f in (block, checkpointed(block))]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert len(runs) == 3


# --- what is still seen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_saved_tensor_that_changes_in_place_is_seen(create_graph: bool) -> None:
    """PyTorch does not look where a hook has what was saved."""

    def f(z: Tensor) -> Tensor:
        wave = z.sin()
        result = wave * wave
        wave.add_(1)
        return result.sum()

    block = lambda x: x.sum() + hodiff.grad(f, x, create_graph=create_graph).sum()
    with pytest.raises(hodiff.GraphError, match="a tensor that the graph needs was changed in place"):
        checkpointed(block)(X.clone().requires_grad_())


def test_derivatives_by_transforms_are_refused_by_pytorch_and_the_note_says_where() -> None:
    block = lambda x: hodiff.grad(
        lambda z: torch.func.grad(lambda y: y.sin().sum())(z).sum(), x, create_graph=True
    ).sum()
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks") as caught:
        checkpointed(block)(X.clone().requires_grad_())
    assert any("inside of an activation checkpoint" in note for note in caught.value.__notes__)


def test_other_hooks_have_what_they_had() -> None:
    """Offloading, by whoever: only checkpoints run a block again."""
    packed = []
    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):  # type: ignore[arg-type]
        found = hodiff.hvp(lambda z: z.prod(-1).sum().sin(), x, X)
    assert packed
    torch.testing.assert_close(found, hodiff.hvp(lambda z: z.prod(-1).sum().sin(), x, X))


# --- blocks that f itself checkpoints, by x ---------------------------------------------------------------------------


def twice(z: Tensor, *again: Any) -> Tensor:
    inner = checkpointed(lambda y: F.layer_norm(y, (3,)) * y.sin())(z)
    return checkpointed(lambda y: y.prod(-1, keepdim=True) * y.cos())(inner * z)


IN_F: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], Tensor]] = {
    name: (lambda z, f=f, **way: checkpointed(f, **way)(z), f, x)
    for name, f, x in (
        ("layers at one point", MLP, X[0]),  # of which vmap computes the linear ones otherwise
        ("a norm", NORMED, X[0]),
        ("a norm of rows", NORMED, X),
        ("a convolution", lambda z: F.conv1d(z[None], X[:1, None, :2]), X[:1]),
        ("a product", lambda z: z.prod(-1, keepdim=True) * z.exp(), X),
        ("a checkpoint in it", twice, X),
    )
}
OF_F: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "jacobian": lambda f, x: hodiff.jacobian(f, x),
    "jacobian, in chunks": lambda f, x: hodiff.jacobian(f, x, chunk_size=2),
    "hessian": lambda f, x: hodiff.hessian(lambda z: f(z).sin().sum(), x),
    "hessian, recorded": lambda f, x: hodiff.grad(
        lambda z: hodiff.hessian(lambda y: f(y).sin().sum(), z, create_graph=True).sin().sum(), x
    ),
    "of a tensor": lambda f, x: hodiff.hessian(f(leaf := x.clone().requires_grad_()).sin().sum(), leaf),
    "an operator": lambda f, x: hodiff.HessianOperator(lambda z: f(z).sin().sum(), x).dense(),
}


@pytest.mark.parametrize("of", OF_F)
@pytest.mark.parametrize("name", IN_F)
def test_derivatives_by_the_input_of_a_block(name: str, of: str) -> None:
    """Many rows in one pass, which runs the block again for one point, not for the rows."""
    block, plain, x = IN_F[name]
    expected = outcome(lambda: [OF_F[of](plain, x)])
    for way in WAYS:
        agree(outcome(lambda way=way: [OF_F[of](functools.partial(block, **way), x)]), expected)


def test_a_block_runs_again_once_for_all_rows() -> None:
    runs = []

    def block(z: Tensor) -> Tensor:
        runs.append(torch._C._functorch.maybe_current_level())  # type: ignore[attr-defined]
        return NORMED(z)

    hodiff.jacobian(checkpointed(block), X)
    assert runs == [None, None]
    runs.clear()
    hodiff.jacobian(checkpointed(block), X, chunk_size=2)
    assert runs == [None] * 4


def test_another_threads_checkpoints_are_left_alone() -> None:
    """It runs a block again while a call is open here."""
    x, results = X.clone().requires_grad_(), []
    value = checkpointed(BLOCKS["a call in a call"])(x)
    expected = torch.autograd.grad(BLOCKS["a call in a call"](x), x)[0]

    def f(z: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: results.extend(torch.autograd.grad(value, x)), daemon=True)
        thread.start()
        thread.join(60)
        return z.sin().sum()

    hodiff.grad(f, X)
    torch.testing.assert_close(results[0], expected)


@pytest.mark.parametrize("method", ["auto", "reverse"])
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_a_block_in_a_block_of_f(method: str) -> None:
    """Taylor mode cannot: the outer block would give the inner one its argument back without its series."""
    w = X[0].clone().requires_grad_()
    inner = lambda z: F.layer_norm(z * w, (3,), w) * z
    results = []
    for f in (inner, checkpointed(inner), checkpointed(checkpointed(inner))):
        value = hodiff.laplacian(lambda z, f=f: f(z).sin().sum(-1), X, method=method)
        results += [torch.autograd.grad(value.sum(), w)[0]]
    torch.testing.assert_close(results[1:], [results[0]] * 2)
