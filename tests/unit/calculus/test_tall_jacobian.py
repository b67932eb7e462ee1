"""A Jacobian of many more rows than columns is made by columns, and is what its rows would be."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff._core import _call
from hodiff.curvature._memory import LiveBytes
from tests.support.differences import first_difference, relative_error
from tests.support.inputs import Expression, expressions, points
from tests.support.modules import Cube
from tests.support.passes import Count, by
from tests.support.properties import agree

D = torch.float64
X = torch.linspace(-1, 1.5, 6, dtype=D)
A = torch.cos(torch.arange(400 * 6, dtype=D)).reshape(400, 6)
BATCH = torch.randn(5, 6, dtype=D, generator=torch.Generator().manual_seed(0))
ROWS, COLUMNS = 400, 6


def both(call: Callable[[], Any]) -> tuple[Any, Any]:
    with by(columns=True) as made:
        columns = call()
    assert made == [True]
    with by(columns=False) as made:
        rows = call()
    assert made == [False]
    return columns, rows


def tall(x: Tensor) -> Tensor:
    return torch.sin(x @ A.T)


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def attention(x: Tensor) -> Tensor:
    q = (x * A.reshape(1, 100, 4, 6)).reshape(1, 4, 100, 6)
    return F.scaled_dot_product_attention(q, q, q).reshape(-1)


# --- one evaluation, and a pass for all columns


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        (lambda f: hodiff.jacobian(f, X), 1 + 1),
        (lambda f: hodiff.jacobian(f, X, matrix=True), 1 + 1),
        (lambda f: hodiff.jacobian(f, X, chunk_size=4), 1 + 2),
        (lambda f: hodiff.jacobian(f, BATCH, batch_ndim=1), 1 + 1),
        (lambda f: hodiff.jacobian(lambda p: f(p["a"] + p["b"]), {"a": X, "b": X}), 1 + 2),
        (lambda f: hodiff.jacobian(lambda x: (f(x), x.sum()), X), 1 + 1),
        (lambda f: hodiff.jacobian(lambda m: f(m.weight), nn.Embedding(1, 6, dtype=D)), 1 + 1),
        (lambda f: hodiff.jacobian(lambda x, s: f(s * x), X, args=(2.0,)), 1 + 1),
        (lambda f: hodiff.jacobian(lambda x: F.dropout(f(x), 0.5), X), 1 + 1),
    ],
    ids=["tensor", "matrix", "chunks", "batch", "dict", "two outputs", "module", "args", "random"],
)
def test_one_evaluation_and_a_pass_for_all_columns(call: Callable[[Any], Any], passes: int, count: Count) -> None:
    call(count.of(tall))
    assert (count.evaluations, count.passes) == (1, passes)


@pytest.mark.wide
def test_columns_through_attention(count: Count) -> None:
    """Whose backward is of ours, and has a derivative."""
    columns, rows = both(lambda: hodiff.jacobian(attention, X))
    torch.testing.assert_close(columns, rows)


def test_nested_in_another_call(count: Count) -> None:
    outer = hodiff.jacobian(lambda x: x * hodiff.jacobian(count.of(tall), X, create_graph=False).sum(), X)
    assert (count.evaluations, count.passes) == (1, 2 + 1)
    torch.testing.assert_close(outer, torch.eye(6, dtype=D) * (torch.cos(A @ X) @ A).sum())


def hooked(x: Tensor) -> Tensor:
    y = tall(x)
    y.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return y


def hooked_node(x: Tensor) -> Tensor:
    y = tall(x)
    y.grad_fn.register_hook(lambda gradients, _: tuple(g / 2 for g in gradients))
    return y


def fused(x: Tensor) -> Tensor:
    """Attention by the name of PyTorch's kernel, whose backward has no derivative."""
    q = (x * A.reshape(1, 100, 4, 6)).reshape(1, 4, 100, 6)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0].reshape(-1)


@pytest.mark.table(plain=1)
@pytest.mark.parametrize(
    ("call", "f", "passes"),
    [  # and one pass for all rows, after what was tried
        (lambda f: hodiff.jacobian(f, X, create_graph=True), tall, 1),
        (
            lambda f: hodiff.jacobian(f, X),
            lambda x: tall(torch.outer(x, torch.ones(50, dtype=D)).reshape(-1, 6)).reshape(-1)[: 2 * 300 - 1],
            1,
        ),
        (lambda f: hodiff.jacobian(f, X), lambda x: tall(x)[:100], 1),
        (lambda f: hodiff.jacobian(f, X), lambda x: Cube.apply(tall(x)), 1),
        (lambda f: hodiff.jacobian(f, X), hooked, 1),
        (lambda f: hodiff.jacobian(f, X), hooked_node, 1),
        (lambda f: hodiff.jacobian(f, X), lambda x: F.hardsigmoid(tall(x)), 1),
        (lambda f: hodiff.jacobian(f, X), fused, 1 + 1),
        (lambda f: hodiff.jacobian(f, X), lambda x: tall(x - X.mean()).relu().sqrt(), 1 + 1 + 1),
    ],
    ids=["create_graph", "few rows", "small", "Function", "hook", "hook of a node", "known", "marked", "infinite"],
)
def test_rows_where_columns_do_not_pay_or_would_not_do(
    call: Callable[[Any], Any], f: Callable[[Tensor], Tensor], passes: int, count: Count
) -> None:
    found = call(lambda x: count.of(f)(x))
    assert count.evaluations == 1
    rows = -(-len(found) // 400)
    assert count.passes >= passes * rows
    with by(columns=False):
        before = count.passes
        assert torch.equal(call(f).isnan(), found.isnan())
        torch.testing.assert_close(call(f), found, equal_nan=True)
    assert count.passes - before >= 2


def test_a_tensor_already_computed_goes_by_rows() -> None:
    """Its graph may have hooks that nothing shows."""
    x = X.clone().requires_grad_()
    y = tall(x)
    y.register_hook(lambda g: g.clamp(-0.5, 0.5))
    with by(columns=True) as made:
        found = hodiff.jacobian(y, x)
    assert made == [False]
    torch.testing.assert_close(found, (torch.eye(400, dtype=D) * 0.5 * torch.cos(A @ X)) @ A)


class Operations(TorchDispatchMode):
    """The operations of a call that made at least so many numbers, and all of them."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.names: list[str] = []
        self.large: list[str] = []
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        self.names.append(name := func.overloadpacket.__name__)
        views = func.is_view or name == "_unsafe_view"
        self.large += [name] if isinstance(found, Tensor) and not views and found.numel() >= self._least else []
        return found


@pytest.mark.parametrize(
    ("call", "large"),
    [
        (lambda: hodiff.jacobian(lambda x: torch.sin(A @ x), X), ["mm", "mul"]),
        (lambda: hodiff.jacobian(lambda x: x @ A.T, BATCH, batch_ndim=1), ["mm", "clone"]),  # and turned
    ],
    ids=["tensor", "batch"],
)
def test_operations_as_large_as_the_result(call: Callable[[], Tensor], large: list[str]) -> None:
    with Operations(call().numel()) as seen:
        call()
    assert seen.large == large
    assert "bmm" not in seen.names  # one product for all samples


@pytest.mark.parametrize(("chunk_size", "results"), [(None, 2.3), (5, 1.5)])
def test_the_peak_of_its_memory(chunk_size: int | None, results: float) -> None:
    """What is made, and one chunk as it comes."""
    wide = torch.cos(torch.arange(2_000 * 50, dtype=D)).reshape(2_000, 50)
    call = lambda: hodiff.jacobian(lambda x: torch.sin(wide @ x), X.repeat(9)[:50], chunk_size=chunk_size or "auto")
    size = call().numel() * 8
    with LiveBytes() as live:
        call()
    assert size < live.peak < results * size


def test_under_autocast() -> None:
    """The check is not made in half the digits."""
    f = lambda x: torch.sin((A.float() * x).sum(-1))
    with torch.autocast("cpu"):
        columns, rows = both(lambda: hodiff.jacobian(f, X.float()))
    torch.testing.assert_close(columns, rows)
    torch.testing.assert_close(columns.double(), torch.cos(A @ X)[:, None] * A, rtol=1e-5, atol=1e-5)


def test_numbers_whose_squares_overflow_go_by_rows() -> None:
    """Within a tolerance that is infinite anything would agree."""
    with by(columns=True) as made:
        found = hodiff.jacobian(lambda x: 1e30 * tall(x).float(), X)
    assert made == [False]
    torch.testing.assert_close(found, 1e30 * torch.cos(A @ X)[:, None] * A, rtol=1e-5, atol=1e24)


# --- columns and rows are equal


@given(f=expressions(), x=points)
def test_any_expression(f: Expression, x: Tensor) -> None:
    def several(t: Tensor) -> dict[str, Any]:
        return {"y": f(t), "z": (f(t).sum(), 2 * t)}

    agree(*both(lambda: hodiff.jacobian(several, x)))
    agree(*both(lambda: hodiff.jacobian(lambda p: f(p[0]) * p[1]["s"], (x, {"s": x + 2}))))


@given(f=expressions(), x=points)
def test_any_expression_of_samples(f: Expression, x: Tensor) -> None:
    batch = torch.stack([x, 0.5 * x, x + 0.25])
    samples = lambda z: torch.stack([f(each) for each in z])
    agree(*both(lambda: hodiff.jacobian(samples, batch, batch_ndim=1, chunk_size=2)))
    agree(*both(lambda: hodiff.jacobian(samples, batch, batch_ndim=1, matrix=True)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: F.layer_norm(tall(x), (400,)),
        lambda x: F.group_norm(tall(x).reshape(1, 8, 50), 4).reshape(-1),
        lambda x: F.softmax(tall(x), 0),
        lambda x: torch.linalg.inv(torch.outer(tall(x), tall(x))[:3, :3] + torch.eye(3, dtype=D)).reshape(-1),
        lambda x: torch.logcumsumexp(tall(x), 0),
        lambda x: tall(x * x.detach()) + tall(x.data),
        lambda x: tall(x) if x.sum() > 0 else -tall(x),
        lambda x: torch.where(tall(x) > 0, tall(x), tall(x).cumsum(0)),
        lambda x: tall(x).sort().values[: int((tall(x) > 0).sum())],
        lambda x: tall(x).clone().mul_(2).add_(x.sum()),
        lambda x: torch.cdist(tall(x)[:20, None], x[:, None], compute_mode="use_mm_for_euclid_dist").reshape(-1),
        lambda x: hodiff.grad(lambda z: (tall(z) ** 3).sum(), x).repeat(8),
    ],
    ids=[
        "layer norm", "group norm", "softmax", "inverse", "logcumsumexp", "detached", "branch", "where", "indices",
        "in place", "distances", "nested",
    ],
)  # fmt: skip
def test_columns_are_rows(f: Callable[[Tensor], Tensor]) -> None:
    columns, rows = both(lambda: hodiff.jacobian(f, X))
    assert relative_error(columns, rows) < 1e-10
    assert columns.is_contiguous()
    assert columns.shape == (*f(X).shape, 6)


def test_no_grad_inside_f_cuts() -> None:
    """Forward mode goes through it."""

    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = tall(x)
        return factor * tall(x)

    columns, rows = both(lambda: hodiff.jacobian(f, X))
    torch.testing.assert_close(columns, rows)
    torch.testing.assert_close(columns, (torch.sin(A @ X) * torch.cos(A @ X))[:, None] * A)


def test_against_differences() -> None:
    direction = torch.cos(torch.arange(6, dtype=D))
    expected = first_difference(lambda t: F.layer_norm(tall(X + t * direction), (400,)))
    assert relative_error(hodiff.jacobian(lambda x: F.layer_norm(tall(x), (400,)), X) @ direction, expected) < 1e-7


def test_random_numbers_are_drawn_once() -> None:
    torch.manual_seed(3)
    columns = hodiff.jacobian(lambda x: F.dropout(tall(x), 0.5), X)
    torch.manual_seed(3)
    expected = (F.dropout(torch.ones(400, dtype=D), 0.5) * torch.cos(A @ X))[:, None] * A
    torch.testing.assert_close(columns, expected)


def test_buffers_are_left_alone() -> None:
    norm = nn.BatchNorm1d(6, dtype=D)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    columns, rows = both(lambda: hodiff.jacobian(lambda x: tall(norm(BATCH * x)).reshape(-1), X))
    torch.testing.assert_close(columns, rows)
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_samples_that_mix_are_warned_of() -> None:
    with by(columns=True), pytest.warns(hodiff.BatchMixingWarning, match="batch_ndim=1"):
        hodiff.jacobian(lambda x: tall(F.batch_norm(x, None, None, training=True)), BATCH, batch_ndim=1)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: tall(x.mul_(2)), "in place"),
        (lambda x: tall(X_LEAF), "does not depend on|other than through"),
        (lambda x: (tall(x), "word"), "returned a str"),
    ],
)
def test_the_same_errors(f: Callable[[Tensor], Any], message: str) -> None:
    for columns in (True, False):
        with by(columns=columns), pytest.raises((hodiff.HodiffError, RuntimeError), match=message):
            hodiff.jacobian(f, X_LEAF)


X_LEAF = X.clone().requires_grad_()


@pytest.mark.parametrize(("dtype", "other"), [(torch.float32, D), (D, torch.float32), (torch.bfloat16,) * 2])
def test_other_dtypes(dtype: torch.dtype, other: torch.dtype) -> None:
    f = lambda x: tall(x.to(D)).to(other)
    columns, rows = both(lambda: hodiff.jacobian(f, X.to(dtype)))
    assert columns.dtype == rows.dtype == dtype
    torch.testing.assert_close(columns, rows)


def test_results_are_new() -> None:
    c = torch.ones(30, 6, dtype=D)
    with by(columns=True):
        hodiff.jacobian(lambda x: c * x, X).zero_()
        hodiff.jacobian(lambda x: c @ x, X).zero_()
    assert bool((c == 1).all())


def test_no_samples_and_no_entries() -> None:
    columns, rows = both(lambda: hodiff.jacobian(lambda x: tall(x), BATCH[:0], batch_ndim=1))
    assert columns.shape == rows.shape == (0, 400, 6)
    with by(columns=True) as made:
        assert hodiff.jacobian(lambda x: (tall(x["a"]), x["b"]), {"a": X, "b": X[:0]})[1]["b"].shape == (0, 0)
    assert made == [True]


THREE = torch.tensor([0.3, -0.7, 1.1])


def test_a_tall_jacobian_in_the_function_of_another():

    def tall(x):
        return torch.outer(x, x).flatten().sin()

    def outer(x):
        inner = hodiff.jacobian(tall, THREE, create_graph=False).sum()
        return tall(x) * inner

    expected = hodiff.jacobian(tall, THREE) * hodiff.jacobian(tall, THREE).sum()
    torch.testing.assert_close(hodiff.jacobian(outer, THREE), expected)
    assert not _call.inside()
