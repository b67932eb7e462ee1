"""Attention and cross-entropy in closed form against PyTorch's plain operations; blocks that run again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.memory import _attention, _chunked, _cross_entropy
from tests.support.laws import law
from tests.support.releases import CHECKPOINTS
from tests.unit.jets.oracle import lean, twice

D = torch.float64


@pytest.fixture(autouse=True, scope="module")
def closed() -> Any:
    """The closed form for sizes at which plain operations would do, in pieces of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "LEAST", 0)
        patch.setattr(_cross_entropy, "LEAST", 0)
        yield


def derivatives(value: Tensor, by: list[Tensor]) -> list[Tensor]:
    """The value and its derivatives along fixed directions, one order after the other."""
    draw = torch.Generator().manual_seed(1)
    along = lambda x: (x * torch.randn(x.shape, generator=draw, dtype=D)).sum()
    found, total = [value], along(value.sin())
    for _ in range(3):
        gradients = torch.autograd.grad(total, by, create_graph=True)
        found += gradients
        total = torch.stack([along(each) for each in gradients]).sum()
    return [each.detach() for each in found]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    """To 12 digits of the largest entry, or of 1: some are 0, and sums of what is of that size."""
    for order, (x, y) in enumerate(zip(found, expected, strict=True)):
        assert x.shape == y.shape and x.dtype == y.dtype
        size = max(1.0, float(y.abs().max()))
        assert float((x - y).abs().max()) < 3e-12 * size, order


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: torch.stack([x, x + 1], -1).flatten(-2)[..., ::2],
    "one for all": lambda x: x[..., :1].expand(x.shape),
    "heads last": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
}
"""How the entries of a tensor lie in memory: PyTorch's kernel reads rows, whatever the strides say."""


@st.composite
def attentions(draw: Any) -> tuple[list[Tensor], Any, dict[str, Any]]:
    """Queries, keys and values in any form, and what is asked beside them."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=D)
    lead = draw(st.sampled_from([(), (2,), (2, 4), (3, 1), (2, 1, 2)]))
    rows, keys, width, depth = (draw(st.integers(1, 6)) for _ in range(4))
    heads = lead
    options: dict[str, Any] = {"scale": draw(st.sampled_from([None, 0.4, -0.3]))}
    if len(lead) == 2 and draw(st.booleans()):
        heads, options["enable_gqa"] = (lead[0], draw(st.sampled_from([1, lead[1]]))), True
    tensors = [normal(*lead, rows, width), normal(*heads, keys, width), normal(*heads, keys, depth)]
    layout = draw(st.sampled_from(list(LAYOUTS)))
    tensors = [LAYOUTS[layout](x) for x in tensors]
    kind = draw(st.sampled_from(["none", "causal", "boolean", "additive", "infinite", "large"]))
    if kind in ("none", "causal"):
        options["is_causal"] = kind == "causal"
        return tensors, None, options
    shape = draw(st.sampled_from([(rows, keys), (1, keys), (rows, 1), (*lead, rows, keys), (*lead[1:], 1, keys)]))
    mask = normal(*shape)
    if kind == "boolean":
        return tensors, mask > -0.5, options
    if kind != "additive":
        mask[..., draw(st.integers(0, shape[-2] - 1)), :] = -torch.inf if kind == "infinite" else torch.finfo(D).min
    return tensors, mask, options


@law("twice_differentiable", says="attention: value and derivatives of order 1 to 3", oracle="PyTorch's math backend")
@given(form=attentions(), piece=st.sampled_from([1, 13, 2**18]))
def test_attention(form: tuple[list[Tensor], Any, dict[str, Any]], piece: int) -> None:
    def run(context: Any) -> list[Tensor]:
        given, mask, options = form
        by = [x.detach().requires_grad_() for x in given]
        bias = mask if mask is None or mask.dtype == torch.bool else mask.clone().requires_grad_()
        with context:
            value = F.scaled_dot_product_attention(by[0], by[1], by[2], bias, **options)
        return derivatives(value, by if bias is None or bias.dtype == torch.bool else [*by, bias])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chunked, "SIZE", piece)
        found = run(hodiff.twice_differentiable())
    close(found, run(sdpa_kernel(SDPBackend.MATH)))


@law("jet", says="attention: its tangent, and reverse mode over it", oracle="PyTorch's math backend")
@given(form=attentions(), piece=st.sampled_from([1, 13, 2**18]))
def test_attention_of_first_order(form: tuple[list[Tensor], Any, dict[str, Any]], piece: int) -> None:
    given, mask, options = form
    by = given if mask is None or mask.dtype == torch.bool else [*given, mask]
    v = [x.sin() for x in given] + [x.clamp(-1, 1).sin() for x in by[3:]]

    def loss(*tensors: Tensor) -> Tensor:
        value = F.scaled_dot_product_attention(*(tensors if len(tensors) == 4 else (*tensors, mask)), **options)
        return value.sin().sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chunked, "SIZE", piece)
        slope, gradients = lean(loss, by, v)
    expected, others = twice(loss, by, v)
    close([slope, *gradients], [expected, *others])


@st.composite
def losses(draw: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits of some dimensions, targets of either kind, and options."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    classes = draw(st.integers(1, 5))
    shape = draw(st.sampled_from([(classes,), (4, classes), (3, classes, 2), (2, classes, 2, 3)]))
    batch = shape[:0] if len(shape) == 1 else (shape[0], *shape[2:])
    target: Tensor = torch.randint(0, classes, batch, generator=random)
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(["mean", "sum", "none"]))}
    options["label_smoothing"] = draw(st.sampled_from([0.0, 0.2]))
    if draw(st.booleans()):
        options["weight"] = torch.rand(classes, generator=random, dtype=D) + 0.1
    if draw(st.booleans()):
        target = torch.rand(shape, generator=random, dtype=D)
    elif target.numel() > 1 and draw(st.booleans()):
        target.view(-1)[0] = options["ignore_index"] = -7
    return torch.randn(shape, generator=random, dtype=D), target, options


@law("twice_differentiable", says="cross-entropy: value and derivatives of order 1 to 3", oracle="PyTorch's own")
@given(form=losses(), piece=st.sampled_from([1, 13, 2**18]))
def test_cross_entropy(form: tuple[Tensor, Tensor, dict[str, Any]], piece: int) -> None:
    logits, target, options = form

    def run() -> list[Tensor]:
        z = logits.clone().requires_grad_()
        return derivatives(F.cross_entropy(z, target, **options), [z])

    with pytest.MonkeyPatch.context() as patch, hodiff.twice_differentiable():
        patch.setattr(_chunked, "SIZE", piece)
        found = run()
    close(found, run())


@law("jet", says="cross-entropy: its tangent, and reverse mode over it", oracle="PyTorch's own")
@given(form=losses(), piece=st.sampled_from([1, 13, 2**18]))
def test_cross_entropy_of_first_order(form: tuple[Tensor, Tensor, dict[str, Any]], piece: int) -> None:
    logits, target, options = form
    loss = lambda z: F.cross_entropy(z, target, **options).sin().sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chunked, "SIZE", piece)
        slope, gradients = lean(loss, [logits], [logits.cos()])
    expected, others = twice(loss, [logits], [logits.cos()])
    close([slope, *gradients], [expected, *others])


# --- blocks: products of small networks of all kinds ------------------------------------------------------------------

WIDTH, ROWS = 4, 3
ACTIVATIONS = (nn.GELU, nn.SiLU, nn.Tanh, nn.Softplus)


class Perceptron(nn.Module):
    """Of features `(ROWS, WIDTH)`."""

    norms = (nn.Identity, lambda: nn.LayerNorm(WIDTH), lambda: nn.RMSNorm(WIDTH), lambda: nn.BatchNorm1d(WIDTH))
    shape = (ROWS, WIDTH)

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.norm, self.activation = draw(st.sampled_from(self.norms))(), draw(st.sampled_from(ACTIVATIONS))()
        self.drop, self.residual = nn.Dropout(draw(st.sampled_from([0.0, 0.4]))), draw(st.booleans())
        self.build(draw)

    def build(self, draw: Any) -> None:
        self.wide = nn.Linear(WIDTH, 5, bias=draw(st.booleans()))
        self.narrow = nn.Linear(5, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        return self.narrow(self.activation(self.wide(x)))

    def forward(self, x: Tensor, *, scale: Tensor | float = 1.0) -> Tensor:
        mixed = self.drop(self.mixed(self.norm(x))) * scale
        return x + mixed if self.residual else mixed


class Convolution(Perceptron):
    norms = (
        nn.Identity,
        lambda: nn.GroupNorm(2, WIDTH),
        lambda: nn.BatchNorm2d(WIDTH),
        lambda: nn.InstanceNorm2d(WIDTH),
    )
    shape = (2, WIDTH, 3, 3)

    def build(self, draw: Any) -> None:
        self.wide, self.narrow = nn.Conv2d(WIDTH, 3, 3, padding=1), nn.ConvTranspose2d(3, WIDTH, 3, padding=1)


class Attention(Perceptron):
    norms = Perceptron.norms[:3]
    shape = (2, ROWS, WIDTH)

    def build(self, draw: Any) -> None:
        super().build(draw)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, draw(st.sampled_from([4, 8])))
        self.causal = draw(st.booleans())
        self.bias = None if self.causal or draw(st.booleans()) else nn.Parameter(torch.randn(2, ROWS, ROWS))

    def mixed(self, x: Tensor) -> Tensor:
        split = lambda z: z.unflatten(-1, (-1, 2)).transpose(1, 2)
        k, v = map(split, self.kv(x).chunk(2, -1))
        options: Any = {"is_causal": self.causal, "enable_gqa": k.shape[1] == 1}
        y = F.scaled_dot_product_attention(split(self.q(x)), k, v, self.bias, **options)
        return super().mixed(y.transpose(1, 2).flatten(2))


class Network(nn.Module):
    """Blocks of one kind; under the model's own checkpoints, where it is told to."""

    def __init__(self, kind: type[Perceptron], draw: Any) -> None:
        super().__init__()
        torch.manual_seed(draw(st.integers(0, 99)))
        self.before = nn.Linear(kind.shape[-1], kind.shape[-1])
        self.layers = nn.ModuleList([kind(draw) for _ in range(draw(st.integers(1, 3)))])
        self.order = draw(st.lists(st.sampled_from([*self.layers]), min_size=1, max_size=3))
        self.scaled, self.own, self.reentrant = draw(st.booleans()), False, False
        self.train(draw(st.booleans()))
        for p in [*self.parameters()][:: draw(st.sampled_from([100, 4]))]:
            p.requires_grad_(p.ndim < 2)
        self.to(D)
        self.inputs = [torch.randn(kind.shape, dtype=D) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        for layer in self.order:
            given = {"scale": h.sin().mean()} if self.scaled else {}
            run = checkpoint if self.own else lambda f, *args, use_reentrant, **rest: f(*args, **rest)
            h = run(layer, h, use_reentrant=self.reentrant, **given)
        return h.flatten(1) if h.ndim > 2 else h


@st.composite
def blocks(draw: Any, kind: type[Perceptron]) -> tuple[Network, bool | str]:
    """A network, and which of its parts are blocks."""
    model = Network(kind, draw)
    pattern = draw(st.sampled_from(["layers.*", "layers", "*", "layers.?.*", "before", True]))
    model.own = pattern is True or draw(st.booleans())
    model.reentrant = pattern is True and not model.scaled and draw(st.booleans())  # which takes no keywords
    return model, pattern


def operator(name: str, model: Network, **options: Any) -> Any:
    predict, data = lambda m, batch: m(batch), [(x,) for x in model.inputs]
    loss = lambda outputs, batch: (outputs.cosh().sum(), len(outputs))
    if name == "HessianOperator":
        return hodiff.HessianOperator(lambda m, batch: loss(m(batch[0]), batch), model, data=data, **options)
    data = [(x, torch.ones(len(x), dtype=torch.long)) for x in model.inputs]
    predict = lambda m, batch: m(batch[0])
    if name == "GaussNewtonOperator":
        return hodiff.GaussNewtonOperator(predict, loss, model, data=data, **options)
    return hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), model, data=data, kind="empirical", **options)


def product(name: str, model: Network, v: Any, **options: Any) -> Any:
    if name == "hvp":
        return hodiff.hvp(lambda m: m(m.inputs[0]).cosh().sum(), model, v, **options)
    if name == "cross_hvp":
        return hodiff.cross_hvp(lambda x, m: m(x).cosh().sum(), model.inputs[0], model, v, **options)
    return operator(name, model, **options) @ v


PRODUCTS = ("hvp", "cross_hvp", "HessianOperator", "GaussNewtonOperator", "FisherOperator")


@CHECKPOINTS
@pytest.mark.table(plain=2, wide=2)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("kind", [Perceptron, Convolution, Attention])
@pytest.mark.parametrize("name", PRODUCTS)
@law(*PRODUCTS, says="of a network in blocks that run again (`checkpoint=`)", oracle="without blocks")
@given(drawn=st.data())
def test_products_by_blocks(name: str, kind: type[Perceptron], drawn: Any) -> None:
    model, pattern = drawn.draw(blocks(kind))
    v = {key: torch.randn_like(p) for key, p in model.named_parameters() if p.requires_grad}
    buffers = [each.clone() for each in model.buffers()]
    found: list[list[Tensor]] = []
    for options in ({"checkpoint": pattern}, {}):
        torch.manual_seed(1)
        made = product(name, model, v, **options)
        found += [[*made.values()] if isinstance(made, dict) else [made]]
        assert all(map(torch.equal, model.buffers(), buffers))
        model.reentrant = False
    close(*found)
