"""Patterns miss nothing: against dense matrices at several points, for a zoo of functions; some are exact."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.sparse import _plan, _rules, _tracer, sparsity_pattern
from tests.support.releases import GRID_SAMPLE
from tests.unit.sparse.zoo import BAND, MASK, ZOO, D, generator

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
POINTS = [torch.randn(12, dtype=D, generator=generator()) * scale for scale in (1.0, 0.3)]
POINTS += [POINTS[0].flip(0)]


def dense(pattern: hodiff.sparse.Pattern) -> Tensor:
    return pattern.to_torch().to_dense()


def held(matrix: Tensor) -> Tensor:
    """Where a matrix is not zero; products of many factors leave a rounding error where it is."""
    return matrix.abs() > 1e-14 * matrix.abs().max()


def missed(matrix: Tensor, pattern: hodiff.sparse.Pattern) -> int:
    return int((held(matrix) & ~dense(pattern)).sum())


@pytest.mark.parametrize("name", ZOO)
def test_the_pattern_of_a_hessian_misses_nothing_at_any_point(name: str) -> None:
    f = ZOO[name]
    pattern = sparsity_pattern(f, POINTS[0])
    assert pattern == pattern.transposed()
    for point in POINTS:
        assert not missed(hodiff.hessian(f, point), pattern)


@pytest.mark.parametrize("name", ZOO)
def test_the_pattern_of_a_jacobian_misses_nothing_at_any_point(name: str) -> None:
    f = lambda x: torch.stack([ZOO[name](x), ZOO[name](x.roll(1)), x[3]])
    pattern = sparsity_pattern(f, POINTS[0], order=1)
    for point in POINTS:
        assert not missed(hodiff.jacobian(f, point), pattern)


def test_the_zoo_is_large() -> None:
    assert len(ZOO) >= 40


def test_every_rule_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that no function of the zoo reaches is not proven."""
    used = set()
    find = _rules.find

    def found(function: Any) -> Any:
        used.add(find(function))
        return find(function)

    monkeypatch.setattr(_rules, "find", found)
    for f in ZOO.values():
        sparsity_pattern(f, POINTS[0])
    unproven = {name for name, rule in _rules.RULES.items() if rule not in used}
    assert not unproven, "add to ZOO, in tests/unit/sparse/zoo.py, functions whose derivatives perform these"


TIGHT = [
    "linear", "square", "chain", "arrow", "full", "logsumexp", "band matrix", "sparse matrix", "gather",
    "scatter", "index_put", "pad", "reflect", "points of a network",
    "layer norm", "stencil", "roll and flip", "masked scatter", "masked select", "steps", "outer", "transposed",
    "average pooling",
]  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_these_patterns_are_exact(name: str) -> None:
    pattern = sparsity_pattern(ZOO[name], POINTS[0])
    assert torch.equal(dense(pattern), held(hodiff.hessian(ZOO[name], POINTS[0])))
    assert pattern.without_rule == ()


PARTS = {
    "unbound": lambda x: tuple(row**2 for row in x.reshape(3, 4).unbind()),
    "split": lambda x: tuple(part.sin() for part in x.split([2, 3, 7])),
    "columns": lambda x: tuple(row.flip(0) ** 2 for row in x.reshape(3, 4).unbind(1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_adjoint_of_taking_apart_puts_each_in_its_place(name: str) -> None:
    pattern = dense(sparsity_pattern(PARTS[name], POINTS[0], order=1))
    jacobian = torch.cat([block.reshape(-1, 12) for block in hodiff.jacobian(PARTS[name], POINTS[0])])
    assert torch.equal(pattern, held(jacobian))


class Biased(torch.autograd.Function):
    """Its gradient is what a convolution of zeros adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.roll(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return F.conv1d(g.new_zeros(1, 1, 1), g.new_ones(12, 1, 1), bias=g.roll(-1)).reshape(-1)


class InHalves(torch.autograd.Function):
    """Its gradient is written half a number at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.roll(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        out = g.clone()
        out.view(torch.int32)[:-2] = g.view(torch.int32)[2:]
        out.view(torch.int32)[-2:] = g.view(torch.int32)[:2]
        return out


@pytest.mark.parametrize("function", [Biased, InHalves])
def test_the_backward_of_a_function_may_do_it_in_any_way(function: Any) -> None:
    pattern = dense(sparsity_pattern(function.apply, POINTS[0], order=1))
    assert pattern[torch.arange(12), torch.arange(12).roll(1)].all()


@pytest.mark.parametrize("resized", ["interpolate", "adaptive_avg_pool2d"])
def test_images_that_are_resized_stay_apart(resized: str) -> None:
    size = {"size": (4, 3), "mode": "bilinear"} if resized == "interpolate" else {"output_size": (2, 1)}
    f = lambda x: getattr(F, resized)(x.reshape(3, 1, 2, 2), **size).flatten(1).prod(1).sum()
    pattern = sparsity_pattern(f, POINTS[0])
    assert pattern.without_rule == ()
    assert torch.equal(dense(pattern), torch.block_diag(*[torch.ones(4, 4)] * 3).bool())


# --- what the numbers are does not matter ----------------------------------------------------------------------------


def test_a_zero_of_the_point_is_no_zero_of_the_pattern() -> None:
    f = lambda x: (x[1:] * x[:-1]).pow(2).sum()
    assert sparsity_pattern(f, torch.zeros(5)) == sparsity_pattern(f, torch.ones(5))


def test_a_zero_that_follows_from_the_point_is_none() -> None:
    f = lambda x: ((x > 0).to(x) * x**2).sum() + (torch.where(x > 0, 0.0, 1.0).to(x) @ x) ** 2
    at_one, at_minus_one = torch.ones(4, dtype=D), -torch.ones(4, dtype=D)
    pattern = sparsity_pattern(f, at_one)
    for point in (at_one, at_minus_one):
        assert not missed(hodiff.hessian(f, point), pattern)


def test_a_zero_of_a_constant_is_one_but_not_of_a_parameter_or_an_argument() -> None:
    weight = torch.tensor([1.0, 0.0, 2.0], dtype=D)
    x = torch.ones(3, dtype=D)
    assert sparsity_pattern(lambda x: (weight * x).pow(2).sum(), x).nnz == 2
    trainable = weight.clone().requires_grad_()
    assert sparsity_pattern(lambda x: (trainable * x).pow(2).sum(), x).nnz == 3
    assert sparsity_pattern(lambda x, w: (w * x).pow(2).sum(), x, args=(weight,)).nnz == 3
    assert sparsity_pattern(lambda x, w=None: (w * x).pow(2).sum(), x, kwargs={"w": weight}).nnz == 3
    assert sparsity_pattern(lambda x, w: (w.clone() * x).pow(2).sum(), x, args=(weight,)).nnz == 3


def test_a_zero_number_is_none() -> None:
    """It may be a parameter of the function, which another call changes."""
    factor = 0.0
    assert (
        sparsity_pattern(lambda x: (factor * x**2).sum() + (torch.tensor(factor) * x[0] * x[1]), torch.ones(3)).nnz == 5
    )


def test_values_that_left_are_not_trusted_when_they_come_back() -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.from_numpy((x.detach().numpy() > 0).astype("float64"))
        other = torch.tensor([float(v > 0) for v in x.detach().tolist()], dtype=D)
        return (mask * x**2).sum() + (other * x**2).sum()

    assert sparsity_pattern(f, torch.tensor([1.0, -1.0], dtype=D)).nnz == 2


def test_a_mask_and_a_matrix_of_constants_narrow_it() -> None:
    x = POINTS[0]
    assert sparsity_pattern(lambda x: (x * MASK).pow(3).sum(), x).nnz == int(MASK.sum())
    assert sparsity_pattern(lambda x: (BAND @ x).pow(3).sum(), x).nnz == 12 * 5 - 2 - 4


# --- the backward of a Function ---------------------------------------------------------------------------------------


class Leaves(torch.autograd.Function):
    """Its backward computes in NumPy."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.detach().numpy()[::-1].copy())


class StraightThrough(torch.autograd.Function):
    """Depends on nothing, says its forward; its backward says otherwise."""

    @staticmethod
    def forward(ctx, x):
        return torch.ones_like(x)

    @staticmethod
    def backward(ctx, g):
        return g.flip(0)


def test_a_backward_that_leaves_torch_couples_everything_and_says_so() -> None:
    x = torch.arange(1.0, 5.0, dtype=D)
    pattern = sparsity_pattern(Leaves.apply, x, order=1)
    assert not missed(hodiff.jacobian(Leaves.apply, x), pattern)
    assert pattern.nnz == 16
    assert "numpy" in pattern.without_rule[0]


def test_a_backward_is_believed_over_its_forward() -> None:
    x = torch.arange(1.0, 5.0, dtype=D)
    pattern = sparsity_pattern(StraightThrough.apply, x, order=1)
    assert torch.equal(dense(pattern), hodiff.jacobian(StraightThrough.apply, x) != 0)


# --- where ------------------------------------------------------------------------------------------------------------


def test_the_order_is_that_of_the_point() -> None:
    point = {"b": torch.ones(2, dtype=D), "a": (torch.ones(1, 2, dtype=D), torch.ones((), dtype=D))}
    f = lambda p: (p["b"] ** 2).sum() * p["a"][1] + p["a"][0][0, 0] * p["a"][0][0, 1] ** 2
    assert torch.equal(dense(sparsity_pattern(f, point)), hodiff.hessian(f, point, matrix=True) != 0)


def test_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    f = lambda model: model(torch.ones(4, 2, dtype=D)).pow(2).sum()
    assert not missed(hodiff.hessian(f, model, matrix=True), sparsity_pattern(f, model))


def test_a_tensor_already_computed() -> None:
    x = POINTS[0].clone().requires_grad_()
    for name in ("chain", "gather", "max over rows", "mask", "relu"):
        assert not missed(hodiff.hessian(ZOO[name], x.detach()), sparsity_pattern(ZOO[name](x), x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    f = ZOO["chain"]
    assert sparsity_pattern(f, torch.ones(6, dtype=dtype)) == sparsity_pattern(f, torch.ones(6, dtype=D))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inside_other_modes(mode) -> None:
    x = torch.ones(6, dtype=D)
    with mode():
        assert sparsity_pattern(ZOO["chain"], x[:6]).nnz == 16


def test_inside_another_call() -> None:
    found = []

    def f(x: Tensor) -> Tensor:
        found.append(sparsity_pattern(ZOO["chain"], x.detach()))
        return (x**2).sum()

    hodiff.hvp(f, torch.ones(6, dtype=D), torch.ones(6, dtype=D))
    assert found[0].nnz == 16


# --- what it says -----------------------------------------------------------------------------------------------------


@GRID_SAMPLE
def test_an_operation_without_a_rule_is_named() -> None:
    f = ZOO["grid sample"]
    pattern = sparsity_pattern(f, POINTS[0])
    assert pattern.without_rule == ("grid_sampler_2d_backward",)
    assert "grid_sampler_2d_backward" in repr(pattern)
    assert not missed(hodiff.hessian(f, POINTS[0]), pattern)


@pytest.mark.parametrize("order", [0, 3, True, "2"])
def test_order(order) -> None:
    with pytest.raises(hodiff.InputError, match=r"order: got .*, expected 1 \(a Jacobian\) or 2"):
        sparsity_pattern(ZOO["chain"], POINTS[0], order=order)


def test_what_is_not_sparse_is_refused_before_memory_is_full() -> None:
    with pytest.raises(hodiff.InputError, match=r"not sparse.*pattern="):
        sparsity_pattern(lambda x: x.sum() ** 2, torch.ones(30_000))


@pytest.mark.parametrize("f", [Leaves.apply, lambda x: x.sum() * x])
def test_how_many_entries_a_pattern_may_have(f: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a backward pass that could be followed and of one that could not."""
    for module, bound in ((_plan, "_DENSE"), (_tracer, "LIMIT")):
        monkeypatch.setattr(module, bound, 12)
    x = torch.arange(1.0, 4.0, dtype=D)
    assert sparsity_pattern(f, x, order=1).nnz == 9
    with pytest.raises(hodiff.InputError, match=r"too many entries to store"):
        sparsity_pattern(f, torch.arange(1.0, 5.0, dtype=D), order=1)


def test_a_small_picture_only() -> None:
    with pytest.raises(hodiff.InputError, match="spy"):
        sparsity_pattern(lambda x: (x**2).sum(), torch.ones(101)).picture()
    assert sparsity_pattern(lambda x: (x**2).sum(), torch.ones(100)).picture().count("x") == 100


def test_nothing_of_the_users_changes() -> None:
    x = POINTS[0].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsity_pattern(ZOO["chain"], x)
    assert x.grad is None and x._version == 0


def test_a_fourier_transform_couples_the_entries_of_a_line_alone() -> None:
    found = sparsity_pattern(lambda x: torch.fft.rfft(x.reshape(3, 4)).abs().pow(4).sum(), POINTS[0])
    assert found.without_rule == ()
    assert torch.equal(dense(found), torch.block_diag(*[torch.ones(4, 4)] * 3).bool())
