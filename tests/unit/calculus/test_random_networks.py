"""Rows in factors of random networks, made of the operations that have readers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hodiff.calculus import _factors
from tests.unit.calculus.test_factors import compare, factors_of

D = torch.float64
Weight = Callable[..., Tensor]


class Step(NamedTuple):
    """A layer of a network, and whether its weights are those of an earlier one where these fit."""

    name: str
    tied: bool
    seed: int


class Sizes(NamedTuple):
    """Samples, positions of each, entries of each position, and numbers that come out of a sample."""

    samples: int
    positions: int
    width: int
    numbers: int


# --- layers: of values `(N, T, E)` the same ---------------------------------------------------------------------------


def linear(h: Tensor, w: Weight) -> Tensor:
    return F.linear(h, w(h.shape[-1], h.shape[-1]), w(h.shape[-1]))


def product(h: Tensor, w: Weight) -> Tensor:
    return h @ w(h.shape[-1], h.shape[-1])


def from_the_left(h: Tensor, w: Weight) -> Tensor:
    return (w(h.shape[-1], h.shape[-1]) @ h.flatten(0, 1).T).T.view(h.shape)


def by_a_vector(h: Tensor, w: Weight) -> Tensor:
    return h * (h.flatten(0, 1) @ w(h.shape[-1])).view(*h.shape[:2], 1)


def of_all_positions(h: Tensor, w: Weight) -> Tensor:
    size = h.shape[1:].numel()
    return F.linear(h.flatten(1), w(size, size), w(size)).view(h.shape)


def time_first(h: Tensor, w: Weight) -> Tensor:
    return linear(h.transpose(0, 1).contiguous(), w).transpose(0, 1)


def of_each_position(h: Tensor, w: Weight) -> Tensor:
    return torch.stack(
        [linear(part, w) if not n else part @ w(*2 * h.shape[-1:]) for n, part in enumerate(h.unbind(1))], 1
    )


def attention(h: Tensor, w: Weight) -> Tensor:
    width = h.shape[-1]
    q, k, v = F.linear(h, w(3 * width, width), w(3 * width)).chunk(3, -1)
    return h + (q @ k.mT / width**0.5).sin().softmax(-1) @ v


def heads_of_one(h: Tensor, w: Weight) -> Tensor:
    q, k, v = (product(h, w) for _ in "qkv")
    apart = [x.transpose(1, 2).reshape(-1, h.shape[1], 1) for x in (q, k, v)]  # a head for each entry
    mixed = torch.bmm(torch.bmm(apart[0], apart[1].mT).sin().softmax(-1), apart[2])
    return h + mixed.view(len(h), h.shape[-1], h.shape[1]).mT


def convolution(h: Tensor, w: Weight) -> Tensor:
    width = h.shape[-1]
    return F.conv1d(h.mT, w(width, width, 3), w(width), padding=1).mT


def dilated(h: Tensor, w: Weight) -> Tensor:
    width = h.shape[-1]
    return F.conv1d(h.mT, w(width, 1, 3), padding=2, dilation=2, groups=width).mT


def image(h: Tensor, w: Weight) -> Tensor:
    return F.conv2d(h.unsqueeze(1), w(2, 1, 3, 3), w(2), padding=1).prod(1)


def strides(h: Tensor, w: Weight) -> Tensor:
    found = F.conv2d(h.unsqueeze(1).expand(-1, 2, -1, -1), w(2, 1, 2, 2), w(2), stride=2, padding=1, groups=2)
    return h * (1 + found.sum((1, 2, 3)))[:, None, None].sin()


def folded(h: Tensor, w: Weight) -> Tensor:
    """Each position is an image."""
    return F.conv1d(h.reshape(-1, 1, h.shape[-1]), w(1, 1, 3), w(1), padding=1).view(h.shape).sin()


def layer_norm(h: Tensor, w: Weight) -> Tensor:
    return F.layer_norm(h, h.shape[-1:], w(h.shape[-1]), w(h.shape[-1]), eps=0.1)


def norm_of_all(h: Tensor, w: Weight) -> Tensor:
    return F.layer_norm(h, h.shape[1:], w(*h.shape[1:]), w(*h.shape[1:]), eps=0.1)


def rms_norm(h: Tensor, w: Weight) -> Tensor:
    return F.rms_norm(h, h.shape[-1:], w(h.shape[-1]), eps=0.1)


def group_norm(h: Tensor, w: Weight) -> Tensor:
    return F.group_norm(h.mT, 1, w(h.shape[-1]), w(h.shape[-1]), eps=0.1).mT


def batch_norm(h: Tensor, w: Weight) -> Tensor:
    mean, variance = torch.linspace(0, 1, h.shape[-1], dtype=D), torch.linspace(1, 2, h.shape[-1], dtype=D)
    return F.batch_norm(h.mT, mean, variance, w(h.shape[-1]), w(h.shape[-1])).mT


def embedding(h: Tensor, w: Weight) -> Tensor:
    words = torch.arange(h.shape[:2].numel()).view(h.shape[:2]) ** 2 % 5
    return h + F.embedding(words, w(5, h.shape[-1]), padding_idx=1)


def tied_head(h: Tensor, w: Weight) -> Tensor:
    words, weight = torch.arange(len(h)) % 4, w(4, h.shape[-1])
    return (h @ weight.T).softmax(-1) @ weight + F.embedding(words, weight).unsqueeze(1)


def factor(h: Tensor, w: Weight) -> Tensor:
    return h * w(h.shape[-1]) + w(h.shape[1], 1) * h


def number(h: Tensor, w: Weight) -> Tensor:
    return torch.sub(h * w(), w(1, 1, 1), alpha=2.0).sin()


def summand(h: Tensor, w: Weight) -> Tensor:
    return (w(h.shape[-1]) - h).sin() + w(*h.shape[1:])


def recurrence(h: Tensor, w: Weight) -> Tensor:
    width, state, states = h.shape[-1], h[:, 0], list[Tensor]()
    inner, outer, bias = w(width, width), w(width, width), w(width)
    for part in h.unbind(1):
        state = torch.tanh(torch.addmm(bias, part, inner) + state @ outer.T)
        states += [state]
    return torch.stack(states, 1)


def gates(h: Tensor, w: Weight) -> Tensor:
    width = h.shape[-1]
    state, weight, bias = h[:, -1], w(2 * width, 2 * width), w(2 * width)
    for part in h.unbind(1):
        gate, new = F.linear(torch.cat([part, state], 1), weight, bias).chunk(2, 1)
        state = state + gate.sigmoid() * (new.tanh() - state)
    return h + state.unsqueeze(1)


def made_weight(h: Tensor, w: Weight) -> Tensor:
    weight = w(h.shape[-1], h.shape[-1])
    return h @ (weight * w(1, h.shape[-1]) / (1 + weight.square().sum()).sqrt())


def decay(h: Tensor, w: Weight) -> Tensor:
    weight = w(h.shape[-1], h.shape[-1])
    return (h @ weight.T + weight.square().sum()).sin()


def slope(h: Tensor, w: Weight) -> Tensor:
    """A derivative inside of `f`."""
    h = h if h.requires_grad else h.clone().requires_grad_()
    value = F.linear(linear(h, w).tanh(), w(1, h.shape[-1])).sin().sum()
    return torch.autograd.grad(value, h, create_graph=True)[0]


def unused(h: Tensor, w: Weight) -> Tensor:
    w(h.shape[-1])
    return h


LAYERS: dict[str, Callable[[Tensor, Weight], Tensor]] = {
    f.__name__: f
    for f in (
        linear, product, from_the_left, by_a_vector, of_all_positions, time_first, of_each_position, attention,
        heads_of_one, convolution, dilated, image, strides, folded, layer_norm, norm_of_all, rms_norm, group_norm,
        batch_norm, embedding, tied_head, factor, number, summand, recurrence, gates, made_weight, decay, slope, unused,
    )
}  # fmt: skip
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "softplus": F.softplus,
    "flip": lambda h: h.flip(2),
    "roll": lambda h: h.roll(1, 1),
    "cat": lambda h: torch.cat([h[..., 1:], h[..., :1].cos()], -1),
    "sum": lambda h: h - h.sin().mean(2, keepdim=True),
    "mean": lambda h: h + h.mean(1, keepdim=True),
    "reshaped": lambda h: h.reshape(len(h), h.shape[2], h.shape[1]).mT.sin(),
    "residual": lambda h: h + h.tanh() * h.cos(),
}
MIXED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mean": lambda h, times: h + times * h.mean(0),
    "next": lambda h, times: h + times * h.roll(1, 0),
    "sums": lambda h, times: h + times * h.cumsum(0),
    "squares": lambda h, times: h + times * h.square().sum(),
}


class Network:
    """A network of its weights `(f, weights)`, whose samples may be mixed below one of its layers."""

    def __init__(self, steps: Sequence[Step], sizes: Sizes, mixed: tuple[int, str, float] | None = None) -> None:
        self._steps, self._sizes, self._mixed = steps, sizes, mixed
        self._draw = torch.Generator().manual_seed(sum(step.seed for step in steps))
        self._x = torch.randn(*sizes[:3], dtype=D, generator=self._draw)
        self.weights: list[Tensor] = []
        self(None)

    def __call__(self, weights: Any) -> Tensor:
        given = None if weights is None else iter(weights)

        def new(*shape: int) -> Tensor:
            self.weights += [torch.randn(shape, dtype=D, generator=self._draw) / max(1, *shape, 1) ** 0.5]
            return self.weights[-1]

        h, used = self._x, list[Tensor]()
        for place, step in enumerate(self._steps):
            if self._mixed and self._mixed[0] % len(self._steps) == place:
                h = MIXED[self._mixed[1]](h, self._mixed[2])

            def weight(*shape: int, tied: bool = step.tied) -> Tensor:
                for one in used if tied else ():
                    if one.shape == shape:
                        return one
                used.append(new(*shape) if given is None else next(given))
                return used[-1]

            h = LAYERS[step.name](h, weight) if step.name in LAYERS else PLAIN[step.name](h)
        *_, width, numbers = self._sizes
        last = new(width, numbers) if given is None else next(given)
        out = (h.sin() @ last).sin().sum(1)
        return out.squeeze(1) if numbers == 1 else out


steps = st.lists(
    st.builds(Step, st.sampled_from([*LAYERS, *PLAIN]), st.booleans(), st.integers(0, 99)), min_size=1, max_size=6
)
sizes = st.builds(Sizes, st.integers(1, 5), st.integers(2, 4), st.sampled_from([3, 4, 5, 16]), st.integers(1, 3))
by_pairs = st.sampled_from([0, 64])
mixed = st.tuples(st.integers(0, 5), st.sampled_from([*MIXED]), st.sampled_from([1e-8, 1e-6, 1e-3, 1.0]))


def missing(network: Network, pairs: int, units: float = _factors.ROUNDING) -> set[int]:
    """What is missing; of the rest all is right, whichever way products take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_factors.Outer, "shortest", lambda of: of)
        patch.setattr(_factors, "POSITIONS", pairs)
        patch.setattr(_factors, "ROUNDING", units)
        factors, _, rows = factors_of(network, network.weights)
        for number, of in factors.of.items():
            compare(of, rows[number])
    return factors.missing


@given(steps=steps, sizes=sizes, pairs=by_pairs)
def test_every_weight_is_read(steps: list[Step], sizes: Sizes, pairs: int) -> None:
    """Rows, products, norms and squares are those of one reverse pass for each row.

    Where a derivative is a difference of larger ones, it rounds by more than is taken for proved.
    """
    assert not missing(Network(steps, sizes), pairs, 1e10)


@given(steps=steps, sizes=sizes, pairs=by_pairs, mixed=mixed)
def test_mixed_samples_give_no_wrong_row(
    steps: list[Step], sizes: Sizes, pairs: int, mixed: tuple[int, str, float]
) -> None:
    """Where samples meet, down to 1e-8, weights are missing or right."""
    missing(Network(steps, sizes, mixed), pairs)
