"""The module zoo: small float64 networks, one per layer whose derivatives have a history of going wrong.

A ``Case`` builds the same ``Setting`` (model, input, loss) every time it is called, so that a test can compare hodiff
on one copy with an oracle on another.  ``verdicts`` says what must happen where the answer is not "right": a regular
expression that the ``GraphError`` must match, because it names the operation and the way out.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hodiff._core._versions import RELEASE

Loss = Callable[[nn.Module, Tensor], Tensor]
DOUBLE = torch.float64
OF_GRIDS_NONE = RELEASE < (2, 12)  # second derivatives of grid_sample
OF_DISTANCES_NONE = RELEASE < (2, 14)  # second derivatives; since then all, and pdist's third is nan


@dataclass
class Setting:
    """A model, an input and ``loss(model, x)``, a scalar."""

    model: nn.Module
    x: Tensor
    loss: Loss

    def of_input(self, x: Tensor) -> Tensor:
        return self.loss(self.model, x)

    def of_model(self, model: nn.Module) -> Tensor:
        return self.loss(model, self.x)


@dataclass(frozen=True)
class Case:
    """One row of the table: how to build it, and what each call must do where it is not "right".

    The keys of ``verdicts`` are ``(order, where)``, ``where`` being "inputs" or "parameters"; order 3 with "inputs" is
    the parameters' gradient of v' H_xx v.  ``oracle`` builds a model with the same derivatives for the differences,
    where those of the original are not the function's (a power iteration under ``no_grad`` counts as constant).
    """

    name: str
    build: Callable[[], Setting]
    verdicts: dict[tuple[int, str], str] = field(default_factory=dict)
    oracle: Callable[[], Setting] | None = None
    wheres: tuple[str, ...] = ("inputs", "parameters")
    warns: bool = False

    def verdict(self, order: int, where: str) -> str:
        """``"right"``, or the pattern of the error."""
        return self.verdicts.get((order, where), "right")

    def __repr__(self) -> str:
        return self.name


def weighted_sum(out: Tensor) -> Tensor:
    """A loss without symmetries: every output counts differently, and no derivative vanishes."""
    weights = torch.cos(1.3 * torch.arange(out.numel(), dtype=out.dtype)).reshape(out.shape) + 0.2
    return (weights * (torch.tanh(out) + 0.1 * out**2)).sum()


def apply_loss(model: nn.Module, x: Tensor) -> Tensor:
    return weighted_sum(model(x))


def make_input(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def seeded(build: Callable[[], nn.Module], shape: tuple[int, ...], loss: Loss = apply_loss) -> Setting:
    """Build a module from a fixed seed, in float64, with generic (not 0 or 1) affine parameters and statistics."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the hook-based weight_norm announces its retirement
            model = build().double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
            for name, b in model.named_buffers():
                if name.endswith("running_var"):
                    b.add_(torch.rand_like(b))
                elif name.endswith("running_mean"):
                    b.add_(0.3 * torch.randn_like(b))
    finally:
        torch.random.set_rng_state(state)
    return Setting(model, make_input(*shape), loss)


# --- modules that torch has only as functions ------------------------------------------------------------------------


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class First(nn.Module):
    """The first element of what a layer returns (recurrent layers, attention)."""

    def __init__(self, layer: nn.Module, copies: int = 1, **kwargs: object) -> None:
        super().__init__()
        self.layer, self.copies, self.kwargs = layer, copies, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(*([x] * self.copies), **self.kwargs)[0]


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(3, 3), block, nn.Linear(3, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.block, self.before(x), use_reentrant=self.use_reentrant)
        return self.after(torch.tanh(h))


class Tied(nn.Module):
    """One weight, two names: an encoder whose decoder is its transpose, and a twin of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.twin = nn.Linear(3, 3), nn.Linear(3, 3)
        self.twin.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.twin(torch.tanh(self.encoder(x)))) @ self.encoder.weight.T


class Unused(nn.Module):
    """A parameter that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Bag(nn.Module):
    """Indices are part of the layer; its variables are the table's rows."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(3, 2)
        self.register_buffer("index", torch.tensor([[0, 2, 1], [3, 3, 0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(self.index))) + x.mean()


class Decoder(nn.Module):
    """A decoder layer whose target and memory both depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(4, 2, 5, dropout=0.0, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, torch.sin(x))


class TwoBranches(nn.Module):
    """Several heads on one input; catches gradients that are added to the wrong leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 4)
        self.both = nn.Bilinear(2, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(torch.tanh(self.left(x)), self.right(x))


class Cube(torch.autograd.Function):
    """A custom function that is right at every order: its backward is made of differentiable operations."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class CubeOnce(torch.autograd.Function):
    """The same, promising a can be differentiated once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def between(layer: nn.Module | Callable[[Tensor], Tensor], width: int = 3, out: int | None = None) -> nn.Sequential:
    """The layer under test between two linear ones, so that its input and its output both vary with the parameters."""
    layer = layer if isinstance(layer, nn.Module) else Apply(layer)
    return nn.Sequential(nn.Linear(3, width), layer, nn.Linear(width if out is None else out, 2))


def dropout_loss(model: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)  # one mask for every evaluation: one function
        return weighted_sum(model(x))


def cross_entropy_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), torch.tensor([0, 1, 1, 0]), label_smoothing=0.1)


def ctc_loss(model: nn.Module, x: Tensor) -> Tensor:
    scores = torch.log_softmax(model(x), -1)[:, None, :]
    return F.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


def multi_margin_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.multi_margin_loss(torch.tanh(model(x)), torch.tensor([0, 1, 1, 0]), p=2)


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def square_matrices(x: Tensor) -> Tensor:
    """(4, 9) -> (4, 3, 3), well conditioned."""
    return x.reshape(-1, 3, 3) * 0.3 + 2 * torch.eye(3, dtype=x.dtype)


def power_iterated(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Setting:
    """Spectral norm after its power iteration, the vectors held: what train mode differentiates, as a function."""
    setting = seeded(build, shape)
    with torch.no_grad():
        setting.model(setting.x)
    setting.model.eval()
    return setting


def _norm_in_net(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, 4), build(), nn.Tanh(), nn.Linear(4, 2))


def _spectral(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))


def _case(name: str, build: Callable[[], nn.Module], *shape: int, loss: Loss = apply_loss, **kwargs: object) -> Case:
    return Case(name, partial(seeded, build, shape or (4, 3), loss), **kwargs)  # type: ignore[arg-type]


def _refused(pattern: str, *orders: int) -> dict[tuple[int, str], str]:
    return {(order, where): pattern for order in orders for where in ("inputs", "parameters")}


def _attention(**kwargs: object) -> nn.Module:
    return First(nn.MultiheadAttention(4, 2, batch_first=True), copies=3, **kwargs)


def _encoder(**kwargs: object) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, activation="gelu", **kwargs)


ZOO: tuple[Case, ...] = (
    # normalization: where stock torch is silently wrong
    _case("LayerNorm", _norm_in_net(lambda: nn.LayerNorm(4))),
    _case("LayerNorm, no affine", _norm_in_net(lambda: nn.LayerNorm(4, elementwise_affine=False))),
    _case("LayerNorm, two dimensions", lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm((2, 3))), 2, 2, 3),
    _case("InstanceNorm1d", lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True)), 2, 2, 5),
    _case(
        "InstanceNorm1d, tracking, train",
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        2, 2, 5,
    ),
    _case(
        "InstanceNorm1d, tracking, eval",
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True)).eval(),
        2, 2, 5,
    ),
    _case("BatchNorm1d, train", _norm_in_net(lambda: nn.BatchNorm1d(4)), 5, 3),
    _case("BatchNorm1d, no statistics", _norm_in_net(lambda: nn.BatchNorm1d(4, track_running_stats=False)), 5, 3),
    _case("BatchNorm1d, no affine", _norm_in_net(lambda: nn.BatchNorm1d(4, affine=False)), 5, 3),
    _case("BatchNorm1d, eval", lambda: _norm_in_net(lambda: nn.BatchNorm1d(4))().eval(), 5, 3),
    _case("BatchNorm2d, train", lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), 2, 1, 3, 3),
    _case("GroupNorm", _norm_in_net(lambda: nn.GroupNorm(2, 4))),
    _case("RMSNorm", _norm_in_net(lambda: nn.RMSNorm(4))),
    _case("LocalResponseNorm", lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.LocalResponseNorm(2)), 2, 2, 4),
    # attention
    _case("MultiheadAttention", lambda: _attention(need_weights=False), 2, 3, 4),
    _case("MultiheadAttention, need_weights", lambda: _attention(need_weights=True), 2, 3, 4),
    _case("TransformerEncoderLayer", lambda: _encoder(), 2, 3, 4),
    _case("TransformerEncoderLayer, norm_first, eval", lambda: _encoder(norm_first=True).eval(), 2, 3, 4),
    _case("TransformerDecoderLayer", Decoder, 2, 3, 4),
    _case(
        "scaled_dot_product_attention, causal",
        lambda: nn.Sequential(
            nn.Linear(3, 4), Apply(lambda h: F.scaled_dot_product_attention(h, h, torch.sin(h), is_causal=True))
        ),
        2, 1, 3, 3,
    ),
    # recurrence and convolution
    _case("LSTM", lambda: nn.Sequential(First(nn.LSTM(3, 2)), nn.Linear(2, 2)), 3, 2, 3),
    _case("LSTM, two layers, both ways", lambda: nn.Sequential(
        First(nn.LSTM(3, 2, num_layers=2, bidirectional=True)), nn.Linear(4, 2)
    ), 2, 1, 3),
    _case("GRU", lambda: nn.Sequential(First(nn.GRU(3, 2)), nn.Linear(2, 2)), 3, 2, 3),
    _case(
        "Conv2d, MaxPool2d, Linear",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 2)),
        2, 1, 4, 4,
    ),
    _case("ConvTranspose2d", lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 2), nn.Softplus()), 1, 1, 3, 3),
    _case("Upsample, bicubic", lambda: nn.Sequential(
        nn.Conv2d(1, 1, 2), nn.Upsample(scale_factor=2, mode="bicubic"), nn.Conv2d(1, 1, 2)
    ), 1, 1, 3, 3),
    _case("grid_sample", lambda: nn.Sequential(
        nn.Linear(4, 4),
        Apply(lambda h: F.grid_sample(
            h.reshape(1, 1, 4, 4), 0.5 * torch.tanh(h.reshape(1, 2, 4, 2)), align_corners=False
        )),
    ), 4, 4, verdicts=_refused("no second derivative(?s:.*)GridSampler2D", 2, 3) if OF_GRIDS_NONE else {}),
    # embeddings
    _case("Embedding", lambda: Bag(nn.Embedding(4, 3))),
    _case(
        "EmbeddingBag", lambda: Bag(nn.EmbeddingBag(4, 3, mode="sum")),
        verdicts={
            (2, "parameters"): r"(?is)embedding_?bag.*\bembedding\b",
            (3, "parameters"): r"(?is)embedding_?bag.*\bembedding\b",
        },
    ),
    # reparametrization
    _case("weight_norm", lambda: between(parametrizations.weight_norm(nn.Linear(3, 3)))),
    _case("weight_norm, by hook", lambda: between(nn.utils.weight_norm(nn.Linear(3, 3)))),
    _case(
        "spectral_norm", _spectral(parametrizations.spectral_norm),
        oracle=partial(power_iterated, _spectral(parametrizations.spectral_norm), (4, 3)),
    ),
    _case(
        "spectral_norm, by hook", _spectral(nn.utils.spectral_norm),
        oracle=partial(power_iterated, _spectral(nn.utils.spectral_norm), (4, 3)),
    ),
    _case("orthogonal", lambda: between(parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"))),
    _case("tied weights", Tied),
    _case("frozen first layer", frozen_first),
    _case("unused parameter", Unused),
    # checkpoints
    _case("checkpoint, non-reentrant", lambda: Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), False)),
    _case(
        "checkpoint of BatchNorm1d",
        lambda: Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), False), 5, 3,
    ),
    _case(
        "checkpoint, reentrant", lambda: Checkpointed(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), True),
        verdicts=_refused(r"(?is)checkpoint.*use_reentrant=False", 1, 2, 3),
    ),
    # activations and losses
    _case("ReLU", lambda: between(nn.ReLU())),
    _case("GELU", lambda: between(nn.GELU())),
    _case("SiLU", lambda: between(nn.SiLU())),
    _case("GLU", lambda: between(nn.GLU(), 4, 2)),
    _case("PReLU", lambda: between(nn.PReLU())),
    _case("Dropout, seeded", lambda: between(nn.Dropout(0.3)), loss=dropout_loss),
    _case("Bilinear", TwoBranches),
    _case("cross_entropy, smoothed", lambda: between(nn.Tanh()), loss=cross_entropy_loss),
    _case("cosine_similarity", lambda: between(lambda h: F.cosine_similarity(h[:, None], h[None] + 1, dim=-1), 3, 4)),
    # linear algebra, transforms, scans
    _case("det", lambda: nn.Sequential(nn.Linear(3, 9), Apply(lambda h: torch.linalg.det(square_matrices(h))))),
    _case(
        "slogdet", lambda: nn.Sequential(nn.Linear(3, 9), Apply(lambda h: torch.linalg.slogdet(square_matrices(h))[1]))
    ),
    _case(
        "solve",
        lambda: nn.Sequential(
            nn.Linear(3, 9), Apply(lambda h: torch.linalg.solve(square_matrices(h), h[:, :3].sin().unsqueeze(-1)))
        ),
    ),
    _case("fft", lambda: between(lambda h: torch.fft.rfft(h).abs().square(), 4, 3)),
    _case("cumprod", lambda: between(lambda h: torch.cumprod(h + 2, -1))),
    _case("index, gather, scatter", lambda: between(
        lambda h: h.cos().index_add(1, torch.tensor([2, 0, 0]), h.gather(1, torch.tensor([[0, 2, 1]] * 4))) ** 2
    )),
    _case("cdist, by matrix product", lambda: between(
        lambda h: torch.cdist(h, torch.sin(h) + 3, compute_mode="use_mm_for_euclid_dist"), 3, 4
    )),
    _case("logcumsumexp", lambda: between(lambda h: torch.logcumsumexp(h, -1))),
    _case("eigvalsh", lambda: nn.Sequential(
        nn.Linear(3, 9), Apply(lambda h: torch.linalg.eigvalsh(torch.diag(torch.tensor([0.0, 1.0, 3.0], dtype=h.dtype))
                                                               + square_matrices(h) + square_matrices(h).mT))
    )),
    # custom functions
    _case("autograd.Function", lambda: between(Cube.apply), warns=True),
    _case(
        "autograd.Function, once_differentiable", lambda: between(CubeOnce.apply),
        verdicts=_refused(r"(?is)CubeOnce.*once_differentiable.*allow|once_differentiable.*CubeOnce.*allow", 2, 3),
    ),
    # operations without a second derivative, some or all of the supported releases
    _case(
        "cdist", lambda: between(lambda h: torch.cdist(h, torch.sin(h) + 3), 3, 4),
        verdicts=_refused(r"(?is)cdist.*norm\(dim=-1\)", 2, 3) if OF_DISTANCES_NONE else {},
    ),
    _case(
        "pdist", lambda: nn.Sequential(nn.Linear(3, 3), Apply(F.pdist)),
        verdicts=_refused(r"(?is)pdist", 2, 3) if OF_DISTANCES_NONE else _refused("nan", 3),
    ),
    _case(
        "ctc_loss", lambda: nn.Linear(3, 3), 5, 3, loss=ctc_loss,
        verdicts=_refused(r"(?is)ctc_?loss", 2, 3),
    ),
    _case(
        "multi_margin_loss", lambda: between(nn.Tanh()), loss=multi_margin_loss,
        verdicts=_refused(r"(?is)multi_?margin", 2, 3),
    ),
    _case(
        "segment_reduce",
        lambda: nn.Sequential(
            nn.Linear(3, 2),
            Apply(lambda h: torch.segment_reduce(h, "mean", lengths=torch.tensor([1, 3]), axis=0, unsafe=True)),
        ),
        verdicts=_refused(r"(?is)segment_?reduce.*index_add", 2, 3),
    ),
)  # fmt: skip

BY_NAME = {case.name: case for case in ZOO}


def two_layers(inputs: int, outputs: int, width: int = 8) -> nn.Sequential:
    """The network of many examples, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).double()
