"""Attention and cross-entropy with every combination of their options: PyTorch's numbers to second order, or its error.

And blocks by every kind of name, of modules with everything that users hang on them.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.memory import _attention, _chunked, _cross_entropy
from tests.support.releases import CHECKPOINTS

D = torch.float64


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed form at any size, in small pieces."""
    monkeypatch.setattr(_attention, "LEAST", 0)
    monkeypatch.setattr(_cross_entropy, "LEAST", 0)
    monkeypatch.setattr(_chunked, "SIZE", 40)


def given(*shape: int, dtype: torch.dtype = D, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(f: Callable[..., Tensor], *points: Tensor) -> Any:
    """The value, first and second derivatives; or the kind of error."""
    points = tuple(x.clone().requires_grad_() for x in points)
    try:
        value = f(*points)
    except Exception as error:
        return type(error)
    first = torch.autograd.grad((value * given(*value.shape, seed=8)).sum(), points, create_graph=True)
    mixed = sum((g * given(*g.shape, seed=9)).sum() for g in first)
    second = torch.autograd.grad(mixed, points, allow_unused=True)
    return value.detach(), [g.detach() for g in first], [torch.zeros(()) if g is None else g for g in second]


def alike(f: Callable[..., Tensor], *points: Tensor) -> None:
    """What PyTorch does without the context and what it does within it."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = outcome(f, *points)
    with hodiff.twice_differentiable():
        found = outcome(f, *points)
    if isinstance(expected, type):
        assert found is expected
    else:
        assert not isinstance(found, type), found
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


LABELS = {
    "indices": torch.tensor([0, 3, 1, 4, 0, 2]),
    "ignored": torch.tensor([0, -100, 1, 4, -100, 2]),
    "a class ignored": torch.tensor([0, 2, 1, 4, 2, 2]),
    "all ignored": torch.full((6,), -100),
    "probabilities": given(6, 5, seed=3).softmax(-1),
}
WEIGHTS = {
    "no weights": None,
    "weights": torch.tensor([3.0, 0.5, 0.0, 1.0, 2.0], dtype=D),
    "narrow weights": torch.tensor([3.0, 0.5, 0.0, 1.0, 2.0]),
    "too few weights": torch.ones(4, dtype=D),
}
IGNORED = {"a class ignored": {"ignore_index": 2}}


@pytest.mark.parametrize(
    ("labels", "weights", "smoothing", "reduction"),
    list(itertools.product(LABELS, WEIGHTS, [0.0, 0.2], ["mean", "sum", "none"])),
)
def test_cross_entropy(labels: str, weights: str, smoothing: float, reduction: str) -> None:
    options = IGNORED.get(labels, {})

    def f(z: Tensor) -> Tensor:
        return F.cross_entropy(
            z,
            LABELS[labels],
            WEIGHTS[weights],
            label_smoothing=smoothing,
            reduction=reduction,
            **options,
        )

    if labels == "all ignored" and reduction == "mean":  # 0 / 0, in PyTorch and here
        with hodiff.twice_differentiable():
            found = outcome(f, given(6, 5))
        assert found is outcome(f, given(6, 5)) if isinstance(found, type) else bool(found[0].isnan())
    else:
        alike(f, given(6, 5))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("what", ["weights", "probabilities"])
def test_what_is_learned_beside_the_logits(what: str, reduction: str, smoothing: float) -> None:
    def f(z: Tensor, learned: Tensor) -> Tensor:
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        if what == "weights":
            return F.cross_entropy(z, LABELS["ignored"], learned.exp(), **options)
        return F.cross_entropy(z, learned.softmax(-1), **options)

    alike(f, given(6, 5), given(5, seed=2) if what == "weights" else given(6, 5, seed=2))


MASKS = {
    "no mask": lambda l, s: None,
    "a bool mask": lambda l, s: given(l, s, seed=4) > -0.5,
    "a mask of numbers": lambda l, s: given(l, s, seed=4),
    "a mask for each head": lambda l, s: given(2, 2, l, s, seed=4),
    "a narrow mask": lambda l, s: given(l, s, seed=4, dtype=torch.float32),
    "a mask of integers": lambda l, s: torch.ones(l, s, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("mask", "causal", "scale", "shape", "grouped"),
    list(itertools.product(MASKS, [False, True], [None, 0.3, -0.7], [(6, 6), (6, 4), (3, 7), (1, 5)], [False, True])),
)
def test_attention(mask: str, causal: bool, scale: float | None, shape: tuple[int, int], grouped: bool) -> None:
    rows, columns = shape
    heads = 1 if grouped else 2

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, MASKS[mask](rows, columns), is_causal=causal, scale=scale, enable_gqa=grouped
        )

    alike(f, given(2, 2, rows, 3, seed=1), given(2, heads, columns, 3, seed=2), given(2, heads, columns, 4, seed=3))


# --- blocks -----------------------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """One kind of container, its items called one after another."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {f"n{i}": nn.Sequential(nn.Linear(3, 3, dtype=D), nn.Tanh()) for i in range(3)}
        self.blocks = kind(layers if kind is nn.ModuleDict else list(layers.values()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values() if isinstance(self.blocks, nn.ModuleDict) else self.blocks:
            x = block(x)
        return x


X = given(4, 3, seed=5)
loss = lambda model: model(X).square().sum()


@CHECKPOINTS
@pytest.mark.parametrize("name", ["blocks", "blocks.*", "*", "b*s", "blocks.?1", "blocks.?"])
@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_containers_by_name(kind: type[nn.Module], name: str) -> None:
    model = Blocks(kind)
    v = {key: given(*p.shape, seed=6) for key, p in model.named_parameters()}
    if any(_matches(name, key) for key, _ in model.named_modules()):
        torch.testing.assert_close(hodiff.hvp(loss, model, v, checkpoint=name), hodiff.hvp(loss, model, v))
    else:
        with pytest.raises(hodiff.InputError, match="matches no module"):
            hodiff.hvp(loss, model, v, checkpoint=name)


def _matches(pattern: str, name: str) -> bool:
    from fnmatch import fnmatchcase

    return bool(name) and fnmatchcase(name, pattern)


HUNG: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda m: setattr(m, "_compiled_call_impl", lambda *args: nn.Module._call_impl(m, *args)),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x, m=m: type(m).forward(m, x)),
    "a hook": lambda m: m.register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "a hook of gradients": lambda m: m.register_full_backward_hook(lambda *_: None),
    "an attribute": lambda m: setattr(m, "mine", [1, 2]),
    "a buffer": lambda m: m.register_buffer("count", torch.zeros(2, dtype=D)),
}


@CHECKPOINTS
@pytest.mark.parametrize("name", ["blocks.*", "blocks", "*", True])
@pytest.mark.parametrize("hung", HUNG)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_what_hangs_on_a_block_stays(hung: str, name: Any, fails: bool) -> None:
    model = Blocks(nn.ModuleList)
    for block in model.blocks:
        HUNG[hung](block)
    before = [
        (m, {**vars(m)}, [(key, {**part}) for key, part in vars(m).items() if isinstance(part, dict)])
        for m in model.modules()
    ]
    v = {key: given(*p.shape, seed=6) for key, p in model.named_parameters()}

    def f(model: nn.Module) -> Tensor:
        value = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False).square().sum()
        if fails:
            raise KeyError("of the user's")
        return value

    try:
        hodiff.hvp(f, model, v, checkpoint=name)
    except (KeyError, hodiff.HodiffError) as error:
        assert isinstance(error, KeyError) == fails
    for module, attributes, dicts in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items())
        assert [(key, {**vars(module)[key]}) for key, _ in dicts] == dicts


def test_a_context_that_closes_leaves_no_hook_for_all_modules() -> None:
    """Where PyTorch's sharding is loaded, models that are met are known while it is open."""
    pytest.importorskip("torch.distributed.fsdp")
    from torch.nn.modules import module

    hooks = [value for name, value in vars(module).items() if name.startswith("_global_") and isinstance(value, dict)]
    before = [{**value} for value in hooks]
    for _ in range(2):
        with hodiff.twice_differentiable():
            loss(Blocks(nn.ModuleList)).backward()
        with pytest.raises(KeyError, match="of the user's"), hodiff.twice_differentiable():
            raise KeyError("of the user's")
    assert len(hooks) > 3
    assert [{**value} for value in hooks] == before
