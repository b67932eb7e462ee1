import re
import warnings
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import hodiff
from hodiff._core import _arguments, _reverse, _versions


def test_sparse_gradients_come_back_dense():
    table = nn.Embedding(4, 2, sparse=True)
    index = torch.tensor([0, 2, 2])
    g = hodiff.grad(lambda m: (m(index) ** 3).sum(), table)["weight"]
    product = hodiff.hvp(lambda m: (m(index) ** 3).sum(), table, {"weight": torch.ones(4, 2)})["weight"]
    counts = torch.tensor([1.0, 0.0, 2.0, 0.0])[:, None]
    torch.testing.assert_close(g, counts * 3 * table.weight.detach() ** 2)
    torch.testing.assert_close(product, counts * 6 * table.weight.detach())


class NoRule(torch.autograd.Function):
    """x^3, whose backward cannot be batched by vmap. It counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        NoRule.calls += 1
        (x,) = ctx.saved_tensors
        if bool(g.isnan().any()):  # a data-dependent branch: vmap refuses it
            raise ValueError("not a number")
        return 3 * x**2 * g


@pytest.mark.filterwarnings("ignore::hodiff.CustomFunctionWarning")
@pytest.mark.parametrize(("chunk_size", "calls"), [(1, 3), (2, 4), ("auto", 4)])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_loop_where_batching_fails(chunk_size, calls, create_graph):
    """The first batch finds that there is no rule; then each vector goes alone, over a graph that was kept for it.

    The batch frees what it passes on its way, the exponential here, before it meets the operation without a rule.
    """
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    NoRule.calls = 0
    f = lambda x: NoRule.apply(x).exp()
    J = hodiff.jacobian(f, x, chunk_size=chunk_size, create_graph=create_graph, allow=NoRule)  # not held
    torch.testing.assert_close(J, torch.diag(3 * x**2 * (x**3).exp()))
    assert NoRule.calls == calls  # of the batch that failed too


def test_a_failure_that_is_not_of_batching_is_raised():
    """The loop meets it again, and passes it on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError("in backward")

    with pytest.raises(ZeroDivisionError, match="in backward"):
        hodiff.jacobian(lambda x: Fails.apply(x), torch.ones(3))


def test_an_automatic_chunk_is_halved_when_memory_runs_out(monkeypatch):
    sizes = []
    batched = _reverse.batched

    def small(function, vectors):
        sizes.append(vectors[0].shape[0])
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return batched(function, vectors)

    monkeypatch.setattr(_reverse, "batched", small)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(hodiff.hessian(lambda x: (x**3).sum(), x), torch.diag(6 * x))
    assert sizes == [5, 3, 2, 2]
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        hodiff.hessian(lambda x: (x**3).sum(), x, chunk_size=4)


def test_memory_that_runs_out_in_the_pass_that_frees_is_said(monkeypatch):
    """That pass cannot be repeated: what it has freed is gone."""
    sizes, batched = [], _reverse.batched

    def last_fails(function, vectors):
        sizes.append(len(vectors[0]))
        products = batched(function, vectors)
        if len(sizes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return products

    monkeypatch.setattr(_reverse, "batched", last_fails)
    monkeypatch.setattr(_reverse, "auto_chunk", lambda *given: 3)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        hodiff.hessian(lambda x: (x**3).sum(), torch.arange(5.0))
    assert sizes == [3, 2]


@pytest.mark.parametrize("seen", [False, True])
def test_batches_are_entered_by_the_public_function_where_a_mode_is_on(monkeypatch, seen):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    x, calls, vmap = torch.tensor([1.0, 2.0, 3.0]), [], torch.vmap
    call = lambda: hodiff.hessian(lambda x: (x**3).sum(), x)
    call()
    monkeypatch.setattr(torch, "vmap", lambda *args, **options: calls.append(1) or vmap(*args, **options))
    with Mode() if seen else nullcontext():
        assert torch.equal(call(), torch.diag(6 * x))
    assert len(calls) == seen


@pytest.mark.parametrize("enabled", [True, False])
def test_passes_run_without_autocast(enabled):
    x = torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        with torch.autocast("cpu", enabled=False):
            plain = hodiff.hvp(lambda x: (x @ x).sin().sum(), x, x)

        def f(x):
            with torch.autocast("cpu", enabled=False):
                return (x @ x).sin().sum()

        assert torch.equal(hodiff.hvp(f, x, x), plain)
        assert torch.is_autocast_enabled("cpu") == enabled


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, "auto"])
@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_the_ends_of_the_chunks_of_a_diagonal(chunk_size, batch_ndim):
    """Of each chunk of rows the entries on the diagonal, with what lies off it in the way."""
    x = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(2, 5)
    f = lambda x: (x**3).sum(-1) + x.sum(-1) ** 2
    found = hodiff.hessian_diagonal(
        f if batch_ndim else lambda x: f(x).sum(), x, batch_ndim=batch_ndim, chunk_size=chunk_size
    )
    torch.testing.assert_close(found, 6 * x + 2)


def test_samples_scalars_where_a_mode_looks_on():
    """A mode (torch.device is one, and the norms written out for third orders) leads past the engine's direct entry."""
    x = torch.tensor([[0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    with torch.device("cpu"):
        got = hodiff.grad(lambda z: (z**3).sum(-1), x, batch_ndim=1)
    torch.testing.assert_close(got, 3 * x**2)

    def penalized(z):
        return hodiff.gradient_penalty(lambda y: (y**2).sum(-1), z, target=1.0, create_graph=True)

    third = hodiff.grad(lambda z: hodiff.hvp(penalized, z, x).sum(), x)
    flat = hodiff.grad(lambda z: hodiff.hvp(lambda y: (2 * y.norm(dim=1) - 1).square().mean(), z, x).sum(), x)
    torch.testing.assert_close(third, flat)


def test_a_product_that_is_not_finite_is_warned_of():
    with pytest.warns(hodiff.HodiffWarning, match="not finite|norm"):
        hodiff.hvp(lambda x: x.norm(), torch.zeros(2), torch.ones(2))


def bag(w: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(torch.tensor([[0, 1], [2, 3]]), w).tanh()


WITHOUT = {
    "jacobian": lambda w: hodiff.jacobian(bag, w, create_graph=True),
    "vjp of many": lambda w: hodiff.vjp(bag, w, torch.ones(2, 2, 3), create_graph=True),
    "all rows": lambda w: hodiff.jacobian_penalty(bag, w, samples=None, batch_ndim=0),
    "some rows": lambda w: hodiff.jacobian_penalty(bag, w, samples=2, batch_ndim=0),
    "in another call": lambda w: hodiff.grad(lambda z: hodiff.jacobian(bag, z).square().sum(), w),
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("chunk", ["batched", "one at a time"])
def test_rows_that_cannot_be_differentiated_are_refused_before_the_caller_does(
    name: str, chunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by PyTorch's words, in a backward pass of the caller's."""
    if chunk == "one at a time":
        monkeypatch.setattr(_reverse, "auto_chunk", lambda *_: 1)
    w = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    with pytest.raises(hodiff.GraphError, match="no second derivative of embedding_bag; use") as caught:
        WITHOUT[name](w)
    assert "J v" not in str(caught.value)


def test_only_a_product_says_that_it_takes_a_second_derivative() -> None:
    w = torch.linspace(-1, 1, 12).reshape(4, 3)
    with pytest.raises(hodiff.GraphError, match=r"no second derivative of embedding_bag.*A product J v needs one"):
        hodiff.jvp(bag, w, w)
    with pytest.raises(hodiff.GraphError, match=r"no second derivative of embedding_bag") as caught:
        hodiff.hvp(lambda z: bag(z).sum(), w, w)
    assert "J v" not in str(caught.value)


def test_rows_of_what_is_linear_are_constants() -> None:
    w = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    found = hodiff.jacobian(lambda z: F.embedding_bag(torch.tensor([[0, 1]]), z), w, create_graph=True)
    (slope,) = torch.autograd.grad(found.square().sum(), w)
    assert not slope.any()


# --- what is not finite -----------------------------------------------------------------------------------------------


def steep(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh").sum()


def by_hand(f):
    return lambda z: torch.autograd.grad(f(z).sum(), z, create_graph=True)[0]


HIGHER = {
    "nested": lambda x: hodiff.grad(lambda z: hodiff.hvp(steep, z, torch.ones_like(z)).sum(), x),
    "by hand": lambda x: hodiff.grad(lambda z: by_hand(by_hand(steep))(z).sum(), x),
    "rows": lambda x: hodiff.jacobian(lambda z: hodiff.hvp(steep, z, torch.ones_like(z)), x),
    "transposed": lambda x: hodiff.vjp(lambda z: hodiff.hvp(steep, z, torch.ones_like(z)), x, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", HIGHER)
def test_a_third_derivative_that_f_has_a_part_in_is_looked_at(name: str) -> None:
    """PyTorch's formula has infinity times 0, far from 0."""
    with pytest.warns(hodiff.HodiffWarning, match=r"result is not finite, .* divides 0 by 0\."):
        found = HIGHER[name](torch.tensor([40.0, 1.0], dtype=torch.float64))
    assert found.isnan().any()


def test_a_first_derivative_is_given_as_it_is() -> None:
    """NaN is seen; to look for it would cost each gradient a pass over its result."""
    assert hodiff.grad(lambda z: z.sqrt().sum() * 0, torch.zeros(2)).isnan().all()


X = torch.tensor([0.3, -0.7, 1.1])


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


def test_a_sum_that_overflows_is_no_infinite_entry():
    result = quietly(hodiff.hvp, lambda x: 1.5e38 * (x**2).sum(), torch.zeros(2), torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3e38))


def test_the_last_of_single_passes_frees(monkeypatch):
    kept, grad = [], _versions.grad

    def spy(*args, keep, build):
        kept.append(keep)
        return grad(*args, keep=keep, build=build)

    monkeypatch.setattr(_versions, "grad", spy)
    hodiff.hessian(lambda x: (x**3).sum(), X, chunk_size=1)
    assert kept == [True, True, True, False]


def test_a_subclass_sees_the_passes():
    class Watched(torch.Tensor):
        seen: ClassVar[list] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    hodiff.grad(lambda x: (x**2).sum(), X.as_subclass(Watched))
    assert torch.autograd.grad in Watched.seen


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: hodiff.hessian(lambda x: (x**3).sum(), x), r"200,000 x 200,000 numbers, 320 GB.*hodiff\.hvp.*_diag"),
        (lambda x: hodiff.value_grad_and_hessian(lambda x: (x**3).sum(), x, matrix=True), "HessianOperator"),
        (lambda x: hodiff.cross_hessian(lambda x, y: (x * y).sum(), x, x.clone()), "HessianOperator"),
        (lambda x: hodiff.jacobian(lambda x: x**3, x), r"200,000 x 200,000 .*hodiff\.jvp"),
        (
            lambda x: hodiff.hessian(lambda x: (x**3).sum(-1), x.reshape(2, -1), batch_ndim=1),
            "2 x 100,000 x 100,000 numbers, 160 GB",
        ),
    ],
)
def test_what_is_larger_than_the_machine_is_refused_with_its_size(call, words, monkeypatch) -> None:
    monkeypatch.setattr(_arguments, "memory_on", lambda device: 64e9)
    with pytest.raises(hodiff.InputError, match=r"x: the result would hold .* cpu has 64 GB") as caught:
        call(torch.zeros(200_000, dtype=torch.float64))
    assert re.search(words, str(caught.value))


def test_the_machine_says_what_memory_it_has() -> None:
    assert 1e8 < _arguments.memory_on(torch.device("cpu")) < 1e15
    assert _arguments.memory_on(torch.device("meta")) == float("inf")
    with_samples = torch.ones(3, 4, dtype=torch.float64)  # far below: nobody is asked
    assert hodiff.hessian(lambda x: (x**3).sum(-1), with_samples, batch_ndim=1).shape == (3, 4, 4)
