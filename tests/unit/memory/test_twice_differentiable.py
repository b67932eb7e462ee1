"""The context: who is inside, what is served by the closed form, what a checkpoint runs again, what is traced."""

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _kernels, _messages, _versions
from hodiff.curvature._memory import LiveBytes
from hodiff.memory import _attention, _chunked, _cross_entropy
from tests.support.differences import relative_error

D = torch.float64
REENTRANT = checkpoints.CheckpointFunction
attention = F.scaled_dot_product_attention  # by another name


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form at any size, in small pieces."""
    monkeypatch.setattr(_attention, "LEAST", 0)
    monkeypatch.setattr(_cross_entropy, "LEAST", 0)
    monkeypatch.setattr(_chunked, "SIZE", 40)


def given(*shape: int, dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (2, 2, 6, 4)), dtype=D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block(x: Tensor) -> Tensor:
    return attention(x, x.sin(), x.cos())


def written(x: Tensor) -> Tensor:
    """The block from its definition."""
    return (x @ x.sin().mT / x.shape[-1] ** 0.5).softmax(-1) @ x.cos()


def twice(value: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(value.sin().sum(), x, create_graph=True)
    return gradient.detach(), torch.autograd.grad(gradient.sin().sum(), x)[0]


def expected() -> tuple[Tensor, Tensor]:
    x = given().requires_grad_()
    return twice(written(x), x)


def product(x: Tensor) -> Tensor:
    return hodiff.hvp(lambda z: written(z).sin().sum(), x, given(seed=1))


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Tensor:
        self.calls += 1
        return self.function(*args)


def is_ours(value: Tensor) -> bool:
    return type(value.grad_fn).__name__ == "AttentionBackward"


# --- who is inside ----------------------------------------------------------------------------------------------------


def test_nested_in_one_thread_and_not_in_another() -> None:
    x, others = given().requires_grad_(), list[Tensor]()
    with hodiff.twice_differentiable():
        with hodiff.twice_differentiable():
            assert is_ours(block(x))
        assert is_ours(block(x))
        hodiff.grad(lambda z: block(z).sum(), x.detach())
        assert is_ours(block(x))
        thread = threading.Thread(target=lambda: others.append(block(x)), daemon=True)
        thread.start()
        thread.join(10)
    assert not is_ours(others[0]) and not is_ours(block(x)) and not _kernels.included()
    assert checkpoints._CheckpointFrame.__name__ == "_CheckpointFrame"
    assert checkpoints.CheckpointFunction is REENTRANT


def test_overlapping_threads_leave_checkpoints_as_they_were() -> None:
    """One leaves while another is inside, in either order."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with hodiff.twice_differentiable():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other, daemon=True)
    with hodiff.twice_differentiable():
        thread.start()
        inside.wait(10)
        hodiff.grad(lambda z: z.sin().sum(), given(2))
    assert checkpoints._CheckpointFrame.__name__ == "_frame"
    leave.set()
    thread.join(10)
    assert checkpoints._CheckpointFrame.__name__ == "_CheckpointFrame"


def test_a_call_that_ends_after_the_context_leaves_checkpoints_as_they_were() -> None:
    context = hodiff.twice_differentiable()
    context.__enter__()

    def f(z: Tensor) -> Tensor:
        context.__exit__(None, None, None)
        return checkpoint(written, z, use_reentrant=False).sin().sum()

    assert relative_error(hodiff.hvp(f, given(), given(seed=1)), product(given())) < 1e-13
    assert checkpoints._CheckpointFrame.__name__ == "_CheckpointFrame" and not _kernels.included()


def test_a_tensor_made_outside_is_refused_by_name() -> None:
    x = given().requires_grad_()
    with pytest.raises(hodiff.GraphError, match=r"inside `with hodiff\.twice_differentiable\(\):`"):
        hodiff.hvp(block(x).sum(), x, given(seed=1))
    with hodiff.twice_differentiable():
        value = block(x).sin().sum()
    assert relative_error(hodiff.hvp(value, x, given(seed=1)), product(x)) < 1e-13


# --- everything that calls attention ----------------------------------------------------------------------------------


def heads() -> nn.Module:
    return nn.MultiheadAttention(8, 2, batch_first=True, dtype=D)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "MultiheadAttention": (heads, lambda m, x: m(x, x, x, need_weights=False)[0]),
    "with weights": (heads, lambda m, x: m(x, x, x)[0]),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=D), lambda m, x: m(x)),
    "decoder": (lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True, dtype=D), lambda m, x: m(x, x)),
}


@pytest.mark.parametrize("name", MODULES)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, run = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), given(2, 5, 8)
    v = {key: torch.ones_like(p) for key, p in module.named_parameters()}
    f = lambda m: run(m, x).sin().sum()
    found = hodiff.hvp(f, module, v)
    third = hodiff.grad(lambda z: (hodiff.hvp(lambda y: run(module, y).sin().sum(), z, x) * x).sum(), x)
    monkeypatch.setattr(_attention, "LEAST", 2**60)
    right = hodiff.hvp(f, module, v)
    assert max(relative_error(found[key], right[key]) for key in v) < 1e-12
    right = hodiff.grad(lambda z: (hodiff.hvp(lambda y: run(module, y).sin().sum(), z, x) * x).sum(), x)
    assert relative_error(third, right) < 1e-12


@pytest.mark.parametrize("name", ["hvp", "HessianOperator", "laplacian", "jvp"])
def test_functions_of_ours(name: str) -> None:
    def call(f: Callable[[Tensor], Tensor]) -> Tensor:
        x, v = given(1, 3, 2), given(1, 3, 2, seed=1)
        total = lambda z: f(z).sin().sum((-1, -2))
        if name == "laplacian":
            return hodiff.laplacian(lambda z: f(z.reshape(-1, 3, 2)).sum((-1, -2)), x.reshape(1, 6))
        if name == "HessianOperator":
            return hodiff.HessianOperator(lambda z: total(z).sum(), x) @ v
        return hodiff.jvp(f, x, v) if name == "jvp" else hodiff.hvp(lambda z: total(z).sum(), x, v)

    assert relative_error(call(block), call(written)) < 1e-12


SERVED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: attention(x, x, x, dropout_p=0.4),
    "nothing to attend to": lambda x: attention(x, x[..., :0, :], x[..., :0, :]) + x,
    "no rows": lambda x: attention(x[..., :0, :], x, x).sum() + x,
    "causal, a head in pieces": lambda x: attention(*[torch.cat([x, x.cos()], 2)] * 3, is_causal=True),
    "causal, a negative scale": lambda x: attention(x, x.sin(), x.cos(), is_causal=True, scale=-0.3),
}


@pytest.mark.table(plain=5)
@pytest.mark.parametrize("name", SERVED)
def test_by_another_route(name: str) -> None:
    def run(context: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = given().requires_grad_()
        with context:
            value = SERVED[name](x)
        return twice(value, x)

    for a, b in zip(run(hodiff.twice_differentiable()), run(sdpa_kernel(SDPBackend.MATH)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    x = given(dtype=torch.float32 if autocast else dtype)
    leaf = x.requires_grad_()
    with hodiff.twice_differentiable(), torch.autocast("cpu", dtype, enabled=autocast):
        value = block(leaf)
    assert value.dtype == dtype
    for a, b in zip(twice(value, leaf), expected(), strict=True):
        assert relative_error(a.to(D), b) < (3e-2 if dtype == torch.bfloat16 else 4e-3)


WRONG: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "width": (lambda x: attention(x, x[..., :2], x), RuntimeError, "[Ee]xpected size|must match"),
    "batch": (lambda x: attention(x, x[:, :, None].expand(2, 2, 3, 6, 4), x), RuntimeError, "size|dimension"),
    "mask": (lambda x: attention(x, x, x, torch.ones(6, dtype=D)), IndexError, "Dimension out of range"),
    "more dimensions of a mask": (
        lambda x: attention(x[0], x[0], x[0], torch.ones(3, 2, 6, 6, dtype=D)),
        RuntimeError,
        "match the broadcast shape",
    ),
    "a mask of more samples": (
        lambda x: attention(x[:1], x[:1], x[:1], torch.ones(2, 1, 6, 6, dtype=D)),
        RuntimeError,
        "match the broadcast shape",
    ),
    "a mask of other samples": (
        lambda x: attention(x, x, x, torch.ones(3, 1, 6, 6, dtype=D)),
        RuntimeError,
        "must match the size",
    ),
    "label": (lambda x: F.cross_entropy(x[0, 0], torch.full((6,), 9)), IndexError, "Target 9 is out of bounds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_pytorchs(name: str) -> None:
    wrong, kind, words = WRONG[name]
    x = given().requires_grad_()
    with pytest.raises(kind, match=words):
        wrong(x)
    with hodiff.twice_differentiable(), pytest.raises(kind, match=words):
        wrong(x)


# --- transforms -------------------------------------------------------------------------------------------------------

func = torch.func
q = given(2, 2, 4, 3)
q6 = given(1, 2, 6, 3)
mask = given(4, 4, seed=1)
LABELS = torch.tensor([0, 2, 1, 0, 2])
loss = lambda x, m=mask: attention(x, x.sin(), x.cos(), m).sin().sum()
entropy = lambda x: F.cross_entropy(x[0, 0], LABELS[: len(x[0, 0])] % 3, label_smoothing=0.1).sin()
pushed = lambda x, m: func.jvp(lambda *a: attention(a[0], a[0].sin(), a[0].cos(), a[1]), (x, m), (x.cos(), m.cos()))
forward = lambda f, x: func.jvp(f, (x,), (x.cos(),))[1]
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "hessian": lambda: func.hessian(loss, (0, 1))(q, mask),
    "jacrev of jacrev of grad": lambda: func.jacrev(func.jacrev(func.grad(loss)))(q[:1, :1, :2, :2], mask[:2, :2]),
    "vmap of jacrev of grad": lambda: func.vmap(func.jacrev(func.grad(loss)))(q),
    "jvp": lambda: pushed(q, mask),
    "grad of jvp": lambda: func.grad(lambda x, m: pushed(x, m)[1].sin().sum(), (0, 1))(q, mask),
    "grad of grad of jvp": lambda: func.grad(lambda x: func.grad(lambda y: pushed(y, mask)[1].sin().sum())(x).sum())(q),
    "grad of jvp, of the queries alone": lambda: func.grad(
        lambda x: func.jvp(lambda y: attention(y, q.sin(), q, mask), (x,), (q.cos(),))[1].sin().sum()
    )(q),
    "jvp of grad": lambda: func.jvp(func.grad(loss, (0, 1)), (q, mask), (q.cos(), mask.cos())),
    "grad of jvp of grad": lambda: func.grad(lambda x: func.jvp(func.grad(loss), (x,), (x.cos(),))[1].sin().sum())(q),
    "jvp of grad of grad": lambda: forward(func.grad(lambda x: func.grad(loss)(x).sin().sum()), q),
    "jvp of grad of jvp": lambda: forward(func.grad(lambda x: forward(loss, x)), q),
    "jvp of jvp": lambda: forward(lambda x: forward(loss, x), q),
    "vmap along the last dimension": lambda: func.vmap(func.grad(loss), -1)(torch.stack([q, q.sin()], -1)),
    "cross-entropy, jvp of jvp": lambda: forward(lambda x: forward(entropy, x), q),
    "cross-entropy, jvp of grad of grad": lambda: forward(func.grad(lambda x: func.grad(entropy)(x).exp().sum()), q),
    "cross-entropy, jvp of grad of jvp": lambda: forward(func.grad(lambda x: forward(entropy, x)), q),
    "cross-entropy, vmap of grad of jvp": lambda: func.vmap(func.grad(lambda x: forward(entropy, x)))(q[:, None]),
    "cross-entropy, hessian": lambda: func.hessian(entropy)(q),
    "cross-entropy, jacrev thrice": lambda: func.jacrev(func.jacrev(func.jacrev(entropy)))(q[:1, :1]),
    "cross-entropy, grad of jvp": lambda: func.grad(lambda x: func.jvp(entropy, (x,), (x.cos(),))[1])(q),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    with hodiff.twice_differentiable():
        found = TRANSFORMS[name]()
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(found, TRANSFORMS[name](), rtol=1e-11, atol=1e-13)


def test_a_batch_of_passes() -> None:
    x = given().requires_grad_()
    with hodiff.twice_differentiable():
        (gradient,) = torch.autograd.grad(block(x).sin().sum(), x, create_graph=True)
    rows = torch.stack([given(seed=1), given(seed=2)])
    found = torch.vmap(lambda u: torch.autograd.grad(gradient, x, u, retain_graph=True)[0])(rows)
    for row, each in zip(rows, found, strict=True):
        assert relative_error(each, hodiff.hvp(lambda z: written(z).sin().sum(), x.detach(), row)) < 1e-13


OLDER: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: block(x).sin().sum(),
    "attention, mask": lambda x: attention(x, x, x, x @ x.mT).sin().sum(),
    "cross-entropy": lambda x: F.cross_entropy(x[0, 0], LABELS[:2]).sin(),
}


@pytest.mark.parametrize("name", OLDER)
def test_a_batch_of_passes_by_the_older_vmap(name: str) -> None:
    """What `is_grads_batched` and `vectorize` go by, in every pass and with tangents."""
    f, x = OLDER[name], given(1, 1, 2, 3)
    rows = torch.stack([given(1, 1, 2, 3, seed=1), given(1, 1, 2, 3, seed=2)])

    def run(batched: bool) -> list[Any]:
        def passes(y: Tensor, u: Tensor) -> Tensor:
            options: Any = {"create_graph": True, "is_grads_batched": batched}
            return torch.autograd.grad(y, leaf, u, **options)[0]

        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        if not batched:
            second = torch.stack([passes(first, u) for u in rows])
            third = torch.stack([passes(second[0], u) for u in rows])
        else:
            second = passes(first, rows)
            third = passes(second[0], rows)
        found = [second, third, torch.autograd.functional.hessian(f, x, vectorize=batched)]
        strategy = "forward-mode" if batched else "reverse-mode"
        jacobian = torch.autograd.functional.jacobian(f, x, vectorize=batched, strategy=strategy)
        return [*found, jacobian]

    with hodiff.twice_differentiable():
        found = run(True)
    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(found, run(False), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("least", [0, 2**60], ids=["closed form", "plain operations"])
@pytest.mark.parametrize("boolean", [False, True])
def test_a_tangent_of_a_row_that_is_masked_in_full(least: int, boolean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 0, and so are its derivatives: the other rows are left."""
    monkeypatch.setattr(_attention, "LEAST", least)
    live = torch.tensor([0, 1, 2, 4, 5])
    hidden = torch.ones(6, 6, dtype=torch.bool).index_fill(0, live, value=False)
    bias = ~hidden if boolean else torch.zeros(6, 6, dtype=D).masked_fill(hidden, -torch.inf)
    masked = lambda x: attention(x, x.sin(), x.cos(), bias).sin().sum()
    others = lambda x: attention(x[..., live, :], x.sin(), x.cos()).sin().sum()
    mixed = lambda f, x: func.grad(lambda y: forward(f, y))(x)
    with sdpa_kernel(SDPBackend.MATH):
        right = mixed(others, q6), forward(lambda y: forward(others, y), q6)
    with hodiff.twice_differentiable():
        found = mixed(masked, q6), forward(lambda y: forward(masked, y), q6)
        value = func.jvp(lambda x: attention(x, x, x, bias), (q6,), (q6,))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(hodiff.grad(lambda x: forward(masked, x), q6), right[0], rtol=1e-12, atol=1e-13)
    assert not any(x[..., 3, :].any() for x in value)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=str)
@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_logits_of_an_ignored_row_are_not_read(bad: float, options: dict[str, Any]) -> None:
    z, target = given(5, 3), LABELS.clone()
    z[1], target[1] = bad, -100
    rest = torch.tensor([0, 2, 3, 4])

    def run(f: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = z.clone().requires_grad_()
        found = [f(x)]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sin().sum(), x, create_graph=True)
        return [each.detach() for each in found]

    whole = lambda x: F.cross_entropy(x, target, **options)
    with hodiff.twice_differentiable():
        found = run(whole)
        along = func.jvp(whole, (z,), (torch.ones_like(z),))[1]
    right = run(lambda x: F.cross_entropy(x[rest], target[rest], **options))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-13)
    assert along.abs() < 1e-13  # the same for all classes


@pytest.mark.parametrize("offset", [1e2, 1e6])
def test_large_logits_lose_no_digits(offset: float) -> None:
    """What is added to all classes cancels, in a loss and in its derivatives."""
    z = (given(5, 3) + offset).float()

    def run(x: Tensor) -> list[Tensor]:
        value = F.cross_entropy(x, LABELS, label_smoothing=0.1)
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        return [value.detach(), first.detach(), torch.autograd.grad(first, x, given(5, 3, seed=1).to(x.dtype))[0]]

    with hodiff.twice_differentiable():
        found = run(z.clone().requires_grad_())
    for each, right in zip(found, run(z.double().requires_grad_()), strict=True):
        assert relative_error(each.double(), right) < 1e-6


# --- where our kernels cannot be, or PyTorch's first derivative is as good --------------------------------------


LOW = torch.zeros(6, 6, dtype=D).index_fill(0, torch.tensor([2]), torch.finfo(D).min)


@pytest.fixture(params=["no such key", "another library has it"])
def without_a_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_kernels, "registered", [])
    monkeypatch.setattr(_kernels, "included", bool)
    monkeypatch.setattr(_versions, "key_is_taken", lambda: True)
    if request.param == "no such key":
        monkeypatch.setattr(_kernels, "_KEY", None)
    _kernels.available.cache_clear()
    yield
    _kernels.available.cache_clear()


@pytest.mark.usefixtures("without_a_key")
def test_without_a_key_attention_goes_by_matrix_products() -> None:
    _messages.warn_once.cache_clear()
    with pytest.warns(hodiff.HodiffWarning, match=r"No dispatch key is free .* PyTorch's memory"):
        assert not _kernels.available()
    x = given().requires_grad_()
    with hodiff.twice_differentiable():
        value = block(x)
    assert not is_ours(value) and torch.backends.cuda.flash_sdp_enabled()
    assert relative_error(twice(value, x)[1], expected()[1]) < 1e-13
    assert relative_error(hodiff.hvp(lambda z: block(z).sin().sum(), given(), given(seed=1)), product(given())) < 1e-13
    f = Counted(lambda z: attention(z, z, z, LOW).sum())
    right = hodiff.grad(lambda z: ((z @ z.mT / 2 + LOW).softmax(-1) @ z).sum(), given())
    assert relative_error(hodiff.grad(f, given()), right) < 1e-13 and f.calls == 2


PROBED = """
import torch

parse = torch._C._dispatch_key_parse
torch._C._dispatch_key_parse = lambda name: parse({})
import hodiff
from hodiff._core import _versions

print(_versions.KERNEL_KEY is None, hodiff.hvp(lambda x: x.square().sum(), *[torch.ones(1)] * 2).item())
"""


@pytest.mark.parametrize(("name", "without"), [("name", False), ("'NoSuchKey'", True)])
def test_the_key_is_probed(name: str, without: bool) -> None:
    program = [sys.executable, "-c", PROBED.format(name)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True, timeout=240)
    assert ran.stdout == f"{without} 2.0\n"
    assert ("No dispatch key is free" in ran.stderr) == without


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by PyTorch's best kernel; in calls of first order its first derivative, too."""
    monkeypatch.setattr(_attention, "CPU", "other")
    x = given().requires_grad_()
    with hodiff.twice_differentiable():
        value = block(x)
    assert is_ours(value) and value.grad_fn is not None
    for found, right in zip(twice(value, x), expected(), strict=True):
        assert relative_error(found, right) < 1e-13
    f = Counted(lambda z: block(z).sin().sum())
    right = hodiff.grad(lambda z: written(z).sin().sum(), given())
    assert relative_error(hodiff.grad(f, given()), right) < 1e-13 and f.calls == 1
    f = Counted(lambda z: torch.autograd.grad(block(z).sin().sum(), z, create_graph=True)[0].sin().sum())
    assert relative_error(hodiff.grad(f, given()), expected()[1]) < 1e-13 and f.calls == 2


def test_a_thread_of_f() -> None:
    def f(z: Tensor, context: Any = None) -> Tensor:
        def run() -> Tensor:
            with context or nullcontext():
                return block(z)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result().sin().sum()

    with pytest.raises(hodiff.GraphError, match=r"in a thread that f started, or .* inside `with hodiff"):
        hodiff.hvp(f, given(), given(seed=1))
    found = hodiff.hvp(lambda z: f(z, hodiff.twice_differentiable()), given(), given(seed=1))
    assert relative_error(found, product(given())) < 1e-13


def test_a_pass_under_autocast() -> None:
    """Values have another width than keys: no kernel of PyTorch's takes them."""
    v = given(2, 2, 6, 5)
    x, right = given().requires_grad_(), given().requires_grad_()
    narrow = x.float()
    with hodiff.twice_differentiable():
        value = attention(narrow, narrow, v.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = twice(value, x)
    for a, b in zip(found, twice((right @ right.mT / 2).softmax(-1) @ v, right), strict=True):
        assert relative_error(a, b) < 1e-5


def test_the_mean_is_told_from_the_sum() -> None:
    """What an operator warns of, where a mean stands beside a weight."""
    z = given(5, 3).requires_grad_()
    with hodiff.twice_differentiable():
        for how in ("mean", "sum"):
            for options in ({}, {"weight": torch.rand(3, dtype=D)}, {"ignore_index": 1}):
                value = F.cross_entropy(z, LABELS, reduction=how, **options)
                assert _versions.reduction(value)[0] == how
                with torch.no_grad():
                    torch.testing.assert_close(
                        value, F.cross_entropy(z, LABELS, reduction=how, **options), rtol=1e-14, atol=0
                    )


@pytest.mark.wide
def test_nothing_is_registered_or_loaded_before_it_is_needed() -> None:
    modules = "{n for n in sys.modules if n.startswith('hodiff.memory')} - {'hodiff.memory', 'hodiff.memory._chunked'}"
    loaded = f"print(bool(_kernels.registered), sorted({modules}))"
    program = f"""
import sys, torch, hodiff
from hodiff._core import _kernels, _versions
{loaded}
x = torch.ones(2)
hodiff.hvp(lambda x: x.sin().sum(), x, x)
{loaded}
hodiff.hvp(lambda x: torch.nn.functional.cross_entropy(x, x.softmax(0).detach()), x, x)
{loaded}
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.splitlines() == ["False []", "True []", "True ['hodiff.memory._cross_entropy']"]


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes_inside", [0, 1, 2])
def test_checkpoints(passes_inside: int) -> None:
    x, right = given().requires_grad_(), expected()
    with ExitStack() as stack:
        stack.enter_context(hodiff.twice_differentiable())
        value = checkpoint(block, x, use_reentrant=False).sin().sum()
        if passes_inside == 0:
            stack.close()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        if passes_inside == 1:
            stack.close()
        (found,) = torch.autograd.grad(gradient.sin().sum(), x)
    assert relative_error(gradient.detach(), right[0]) < 1e-13 and relative_error(found, right[1]) < 1e-13


@pytest.mark.parametrize("inside", [False, True])
def test_reentrant_checkpoints(inside: bool) -> None:
    """First derivatives alone, of rows where PyTorch's kernel is wrong: they show who ran again."""
    x, y = given().requires_grad_(), given().requires_grad_()
    with ExitStack() as stack:
        stack.enter_context(hodiff.twice_differentiable())
        value = checkpoint(lambda z: attention(z, z, z, LOW), x, use_reentrant=True).sin().sum()
        if not inside:
            stack.close()
        value.backward()
    logits = y @ y.mT / 2 + LOW
    (logits.softmax(-1) @ y).sin().sum().backward()
    assert x.grad is not None and y.grad is not None
    assert relative_error(x.grad, y.grad) < 1e-13


# --- what is traced ---------------------------------------------------------------------------------------------------


warned = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Converting a tensor")


@pytest.fixture
def compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(block(x).sin().sum(), x, create_graph=True)
    return gradient.sin().sum()


@warned
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [False, True])
def test_compiled_callers_are_right_or_raise(backend: str, before: bool) -> None:
    """With `before` they were compiled outside of the context."""
    x, right = given().requires_grad_(), expected()[1]
    whole, parts = (torch.compile(f, backend=backend) for f in (block, step))
    if before:
        whole(x)
    for run in (lambda: twice(whole(x), x)[1], lambda: torch.autograd.grad(parts(x), x)[0]):
        with hodiff.twice_differentiable():
            try:
                found = run()
            except RuntimeError as error:
                assert backend != "eager" and "double backward" in str(error)
            else:
                assert relative_error(found, right) < 1e-13


@warned
@pytest.mark.usefixtures("compiler")
def test_a_compiled_function_that_enters_it() -> None:
    def run(x: Tensor) -> Tensor:
        with hodiff.twice_differentiable():
            return step(x * 1.0)

    x = given().requires_grad_()
    (found,) = torch.autograd.grad(torch.compile(run, backend="eager")(x), x)
    assert relative_error(found, expected()[1]) < 1e-13
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="hodiff"):
        torch.compile(run, backend="eager", fullgraph=True)(x)


@warned
def test_make_fx() -> None:
    x = given().requires_grad_()
    with hodiff.twice_differentiable():
        traced = make_fx(lambda z: twice(block(z), z)[1])(x)
    y = given(seed=3).requires_grad_()
    assert relative_error(traced(y), twice(written(y), y)[1]) < 1e-13


# --- memory -----------------------------------------------------------------------------------------------------------


def peak(call: Callable[[], object]) -> int:
    call()
    with LiveBytes() as live:
        call()
    return live.peak


def test_the_peak_grows_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "SIZE", 2**14)
    sizes = []
    for tokens in (256, 512, 1024):
        x = given(1, 1, tokens, 8, dtype=torch.float32)
        sizes += [peak(lambda x=x: hodiff.hvp(lambda z: block(z).sin().sum(), x, x))]
    assert sizes[2] - sizes[1] < 2.2 * (sizes[1] - sizes[0]) and sizes[2] < 3 * 2**20  # one matrix has 4 MiB


def test_the_peak_of_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "SIZE", 2**12)
    head, x = given(8, 2000, dtype=torch.float32), given(64, 8, dtype=torch.float32)
    f = lambda w: F.cross_entropy(x @ w, torch.arange(64))
    logits = 64 * 2000 * 4
    assert peak(lambda: hodiff.hvp(f, head, head)) < 4.9 * logits
    monkeypatch.setattr(_cross_entropy, "LEAST", 2**60)
    assert peak(lambda: hodiff.hvp(f, head, head)) > 6.5 * logits


def test_the_peak_of_a_gauss_newton_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chunked, "SIZE", 2**12)
    head, inputs, labels = nn.Linear(8, 2000, bias=False), given(64, 8, dtype=torch.float32), torch.arange(64)
    v = {"weight": torch.ones_like(head.weight)}
    data = [(inputs, labels)]

    def call() -> object:
        return hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.CrossEntropyLoss(), head, data=data) @ v

    logits = 64 * 2000 * 4
    assert peak(call) < 5 * logits
    monkeypatch.setattr(_cross_entropy, "LEAST", 2**60)
    assert peak(call) > 5.5 * logits


# --- operators --------------------------------------------------------------------------------------------------------


SHARES = torch.rand(4, 3, dtype=D, generator=torch.Generator().manual_seed(2))
LOSSES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "classes": ({}, LABELS[:4]),
    "weights": ({"weight": torch.tensor([0.3, 1.2, 0.7], dtype=D), "label_smoothing": 0.2}, LABELS[:4]),
    "ignored": ({"ignore_index": 2, "reduction": "sum"}, LABELS[:4]),
    "shares": ({"label_smoothing": 0.1}, SHARES),
    "an image": ({"ignore_index": 1}, LABELS[:4].reshape(2, 2)),
    "one": ({}, LABELS[1]),
}


FORMS = [
    *((name, "Gauss-Newton") for name in LOSSES),
    *((name, "mc") for name in LOSSES if not LOSSES[name][0].keys() & {"weight", "label_smoothing"}),
]


@pytest.mark.parametrize(("name", "kind"), FORMS)
def test_operators(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the closed form and, for small logits, by softmax; the former against the second pass of any function."""
    options, target = LOSSES[name]
    weights = given(3, 2)
    shapes = {"an image": (2, 2, 2), "one": (2,)}

    def predict(w: Tensor, batch: Any) -> Tensor:
        x = batch[0]
        return w.sin() @ x if x.ndim == 1 else torch.einsum("ij,nj...->ni...", w.sin(), x)

    data = [(given(*shapes.get(name, (4, 2)), seed=4), target)]
    loss = nn.CrossEntropyLoss(**options)

    def dense() -> Tensor:
        if kind == "mc":
            draw = torch.Generator().manual_seed(5)
            return hodiff.FisherOperator(predict, loss, weights, data=data, kind="mc", generator=draw).dense()
        return hodiff.GaussNewtonOperator(predict, loss, weights, data=data).dense()

    found = dense()
    total = lambda z, batch: (loss(z, batch[1]), 1)
    if kind != "mc":
        right = hodiff.GaussNewtonOperator(predict, total, weights, data=data).dense()
        assert relative_error(found, right) < 1e-13
    monkeypatch.setattr(_cross_entropy, "LEAST", 2**60)
    assert relative_error(found, dense()) < 1e-13


VIEWS = ("aten.view", "aten.expand", "aten.detach")


class Operations(TorchDispatchMode):
    """How often each operation made a result of so many entries; views, which make none, aside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not str(func).startswith(VIEWS):
            found = [x.numel() for x in (result if isinstance(result, tuple) else [result]) if isinstance(x, Tensor)]
            self.made[str(func), max(found, default=1)] += 1
        return result


def test_a_first_derivative_inside_does_what_one_outside_does() -> None:
    """Beside one look at the logarithms of the sums, of which each row has one."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, found = torch.randn(1, 512, 32), list[Counter[tuple[str, int]]]()
    for context in (hodiff.twice_differentiable(), nullcontext()):
        with context, Operations() as operations:
            torch.autograd.grad(layer(x).sin().sum(), [*layer.parameters()])
        found.append(operations.made)
    more = found[0] - found[1]
    assert not found[1] - found[0]
    assert more.total() <= 4 and max(size for _, size in more) <= 4 * 512


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cotangent_of_an_ignored_row_is_not_read_at_second_order(bad: float, smoothing: float) -> None:
    """As of `reduction="none"` times weights that are padded with what is no number."""
    z, target = given(6, 5).requires_grad_(), torch.tensor([0, 1, -100, 3, 4, 2])
    weights, u = given(6, seed=1), given(6, 5, seed=2)

    def second(padding: float) -> list[Tensor]:
        g = weights.index_fill(0, torch.tensor([2]), padding)
        losses = F.cross_entropy(z, target, reduction="none", label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(losses, z, g, create_graph=True)
        return [gradient.detach(), torch.autograd.grad(gradient, z, u)[0]]

    right = second(0.0)
    with hodiff.twice_differentiable():
        found = second(bad)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_pieces_are_made_in_single_precision(dtype: torch.dtype) -> None:
    """Each row of queries is a piece, and its part of the gradient by the keys is small beside the sum."""
    q, k, v = (given(1, 1, rows, 4, dtype=dtype, seed=seed) for seed, rows in enumerate((2048, 8, 8)))

    def gradients(attend: Callable[..., Tensor], *given: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        gradient = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
        return [*torch.autograd.grad(sum(g.sum() for g in gradient), leaves)]

    right = gradients(lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, *(x.double() for x in (q, k, v)))
    with hodiff.twice_differentiable():
        found = gradients(attention, q, k, v)
    for one, other in zip(found[1:], right[1:], strict=True):
        assert relative_error(one.double(), other) < 2 * torch.finfo(dtype).eps


def test_a_mask_that_varies_in_forward_mode_alone() -> None:
    """The derivative along its tangent has a gradient by the tangent, though none by the mask is asked for."""
    q, k, v, mask = given(), given(seed=1), given(seed=2), given(1, 1, 6, 6, seed=3)
    weights = given(seed=4)

    def by_tangent(attend: Callable[..., Tensor]) -> list[Tensor]:
        tangent, leaf = given(1, 1, 6, 6, seed=5).requires_grad_(), q.clone().requires_grad_()
        with forward_ad.dual_level():
            out = attend(leaf, k, v, forward_ad.make_dual(mask, tangent))
            moved = forward_ad.unpack_dual(out).tangent
        return [*torch.autograd.grad((moved * weights).sum(), (tangent, leaf))]

    def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = (q @ k.mT / 2 + mask).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    right = by_tangent(by_hand)
    with hodiff.twice_differentiable():
        found = by_tangent(attention)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


FIRST_ORDER: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "jet": lambda f, x: hodiff.jet(f, x, [x.cos()], create_graph=True)[1][0].sin().sum(),
    "its value": lambda f, x: hodiff.jet(f, x, [x.cos()], create_graph=True)[0].sin().sum(),
    "divergence": lambda f, x: hodiff.divergence(f, x, create_graph=True).sin().sum(),
    "jvp": lambda f, x: hodiff.jvp(f, x, x.cos(), create_graph=True).sin().sum(),
}


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_a_mask_that_is_learned_keeps_its_gradient(name: str) -> None:
    """A bias of positions, which no tangent goes along: its gradient was not there, and nothing said so."""
    x, bias = given(), given(1, 1, 6, 6, seed=3).requires_grad_()

    def gradient(attend: Callable[..., Tensor]) -> Tensor:
        value = FIRST_ORDER[name](lambda z: attend(z, z.sin(), z.cos(), bias), x)
        return torch.autograd.grad(value, bias)[0]

    right = gradient(lambda q, k, v, mask: (q @ k.mT / 2 + mask).softmax(-1) @ v)
    with hodiff.twice_differentiable():
        found = gradient(attention)
    torch.testing.assert_close(found, right)


def test_autocast_leaves_float64_alone(closed: None) -> None:
    q = given(1, 1, 3, 4).requires_grad_()
    f = lambda q: block(q).square().sum()
    expected = hodiff.hvp(f, q, torch.ones_like(q))
    with torch.autocast("cpu", torch.bfloat16):
        found = hodiff.hvp(f, q, torch.ones_like(q))
    assert found.dtype == D and relative_error(found, expected) <= 1e-12


class Stopped(torch.autograd.Function):
    """A Function whose backward has nothing to give."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> None:
        return None


@pytest.mark.parametrize("f", [block, lambda x: F.cross_entropy(x[0, 0], torch.arange(6) % 4)])
def test_a_pass_that_stops_behind_it(f: Callable[[Tensor], Tensor]) -> None:
    """Behind the value, and behind the gradient: nothing reaches it, by a pass and in a transform."""
    x = given().requires_grad_()
    beside = lambda x: Stopped.apply(f(x)).sum() + x.square().sum()
    with hodiff.twice_differentiable():
        (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        for value in (beside(x), Stopped.apply(slope).sum() + x.square().sum()):
            (got,) = torch.autograd.grad(value, x)
            assert torch.equal(got, 2 * x)
        assert torch.equal(torch.func.grad(beside)(x.detach()), 2 * x)
