"""The Jacobian in factors, against one reverse pass for each row."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core._call import call
from hodiff._core._graph import OutputGraph
from hodiff.calculus import _factors
from hodiff.calculus._factors import Factors, Outer

D = torch.float64
N = 6
TOLERANCE = 1e-12


def factors_of(f: Callable[[Any], Tensor], where: Any) -> tuple[Factors, list[Tensor], list[list[Tensor]]]:
    """The factors, the leaves, and by a pass for each sample and number the rows: `(N, K, *shape)`."""
    with OutputGraph(call(f, where, 1, None, False, (), (), None)) as graph:
        rows = [
            torch.autograd.grad(number, graph.leaves, retain_graph=True, allow_unused=True)
            for number in graph.outputs.flatten()
        ]
        count = len(graph.outputs)
        like = graph.leaves
        expected = [
            torch.stack([torch.zeros_like(x) if row[i] is None else row[i] for row in rows]).view(count, -1, *x.shape)
            for i, x in enumerate(like)
        ]
        return Factors(graph, [graph.outputs]), like, expected


@pytest.fixture(autouse=True)
def nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_factors, "PROVED", set())


def gram_of(factors: Factors) -> Tensor:
    """The products of all rows with each other, `(N, K, N, K)`."""
    return torch.stack([of.gram() for of in factors.of.values()]).sum(0)


def agree(result: Tensor, expected: Tensor) -> None:
    assert result.shape == expected.shape
    assert float((result - expected).abs().max()) <= TOLERANCE * (1 + float(expected.abs().max()))


# --- networks ---------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function of a point, and how many of its tensors are missing."""

    f: Callable[[Any], Tensor]
    where: Any
    missing: int = 0


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=D)


class Tied(nn.Module):
    """A transformer whose head is its embedding."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(self.words(x))) @ self.words.weight.T


class Recurrent(nn.Module):
    """One layer at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            h = torch.tanh(self.inner(step) + self.outer(h))
        return self.head(h)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * g


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in itertools.pairwise(sizes):
        layers += [nn.Linear(inner, outer), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def chain(first: nn.Module, last: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.Tanh(), last)


def of_module(model: nn.Module, x: Tensor, *, single: bool = False, missing: int = 0) -> Case:
    """Numbers of each sample that are not linear in what the network gives."""
    numbers = lambda m: m(x).sin().flatten(1).square()[:, :1].squeeze(1) if single else m(x).sin().flatten(1)[:, :3]
    return Case(numbers, model.double(), missing)


def laplacian_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    [slope] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return sum(torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1]))


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    return hodiff.laplacian(lambda z: model(z)[:, 0], x)


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    return model[2:](checkpoint(model[:2], x, use_reentrant=False))


def with_draw(model: nn.Module, x: Tensor) -> Tensor:
    """Rows of one draw of dropout."""
    torch.manual_seed(5)
    return model(x)


def slopes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return (torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].norm(dim=1) - 1) ** 2


def heads(words: Tensor, *, batch_first: bool) -> Callable[[nn.Module], Tensor]:
    """Three numbers of each sentence."""
    last = (lambda y: y.mean(1)) if batch_first else (lambda y: y.mean(0))
    return lambda m: last(m(words if batch_first else words.T).tanh())[:, :3]


def single_tensors() -> dict[str, Case]:
    x, row, images = draw(N, 4), draw(N), draw(N, 5, 4)
    return {
        "x @ W": Case(lambda w: (x @ w).sin(), draw(4, 3)),
        "x @ W.T.T": Case(lambda w: (x @ w.T.T).sin(), draw(4, 3)),
        "W @ x.T": Case(lambda w: (w @ x.T).sin().T, draw(3, 4)),
        "W.T @ x.T": Case(lambda w: (w.T @ x.T).sin().T, draw(4, 3)),
        "(N, T, E) @ W": Case(lambda w: (images @ w).sin().sum(1), draw(4, 3)),
        "x @ w": Case(lambda w: (x @ w).sin(), draw(4)),
        "a factor": Case(lambda w: (x * w).sin(), draw(4)),
        "a number": Case(lambda w: (row * w).sin(), draw(1)[0]),
        "a summand": Case(lambda w: (x + w).sin(), draw(4)),
        "subtracted": Case(lambda w: (torch.sub(x, w, alpha=3) - torch.sub(w, x)).sin(), draw(4)),
        "addmm of other weights": Case(lambda w: torch.addmm(x[:, :3], x, w, alpha=2.0).sin(), draw(4, 3), 1),
        "W squared": Case(lambda w: (x @ (w * w)).sin(), draw(4, 3)),
        "twice in one product": Case(lambda w: (x @ (w.T @ w)).sin()[:, :3], draw(3, 4)),
        "decay in each loss": Case(lambda w: (x @ w).sin() + w.square().sum(), draw(4)),
        "not used": Case(lambda w: (x @ w[0]).sin(), [draw(4), draw(3)]),
        "its own Function": Case(lambda w: (x @ Cube.apply(w)).sin(), draw(4)),
        "flipped": Case(lambda w: (x * w).flip(0).sin() * x, draw(4), 1),
        "einsum": Case(lambda w: torch.einsum("ntc,ecd->netd", images, w).sin().sum((1, 2)), draw(2, 4, 3), 1),
        "a sample": Case(lambda w: (x[:1] @ w).sin() + w.sum(), draw(4, 3)),
    }


def modules() -> dict[str, Case]:
    x, images, series = draw(N, 4), draw(N, 4, 5, 5), draw(N, 4, 9)
    steps = draw(N, 5, 3)
    conv = nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.Tanh(),
        nn.Conv2d(6, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    norms = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    evaluated = nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)).eval()
    instance = nn.Sequential(nn.Conv2d(4, 3, 2, bias=False), nn.InstanceNorm2d(3, affine=True))
    lstm, gru = nn.LSTM(3, 4, batch_first=True), nn.GRU(3, 4, batch_first=True)
    words = torch.arange(N * 5).view(N, 5) % 7
    square = mlp(4, N, N, N, 2)  # whose weights look as if of the samples
    transposed = nn.Sequential(nn.ConvTranspose1d(4, 3, 3), nn.Flatten(), nn.Linear(33, 3))
    weighed = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3))
    return {
        "perceptron": of_module(mlp(4, 5, 5, 3), x),
        "perceptron, one number": of_module(mlp(4, 5, 5, 1), x, single=True),
        "as wide as samples": of_module(square, x),
        "as wide, one number": of_module(square, x, single=True),
        "convolutions": of_module(conv, images),
        "channels last": of_module(
            nn.Sequential(nn.Conv2d(4, 3, 3), nn.Tanh()),
            images.contiguous(memory_format=torch.channels_last),
        ),
        "no padding, in words": of_module(
            chain(nn.Conv2d(4, 3, 2, padding="valid", stride=2), nn.Conv2d(3, 2, 1, groups=1)),
            images,
        ),
        "padding, in words": of_module(nn.Conv1d(4, 3, 2, padding="same", dilation=2), series),
        "dilated, one number": of_module(nn.Conv2d(4, 2, 2, dilation=2, bias=False), images, single=True),
        "one dimension": of_module(chain(nn.Conv1d(4, 3, 3, dilation=2), nn.Conv1d(3, 2, 2)), series),
        "folded": Case(lambda m: m(images.reshape(-1, 1, 5, 5)).sin().view(N, 4, -1).sum(1)[:, :3],
                       nn.Conv2d(1, 2, 2).double()),
        "batch norm, eval": of_module(evaluated, images),
        "batch norm": of_module(norms, x, missing=4),
        "instance norm": of_module(chain(instance, nn.Tanh()), images, missing=2),
        "recurrent": of_module(Recurrent(), steps),
        "LSTM": Case(lambda m: m(steps)[0][:, -1], lstm.double()),
        "GRU": Case(lambda m: m(steps)[0][:, -1], gru.double()),
        "transformer": Case(heads(words, batch_first=True), Tied(batch_first=True).double()),
        "transformer, time first": Case(heads(words, batch_first=False), Tied(batch_first=False).double()),
        "embedding": Case(lambda m: m(words).sin().sum(1)[:, :3], nn.Embedding(7, 4).double()),
        "embedding, scaled": Case(lambda m: m(words).sin().sum(1)[:, :3],
                                  nn.Embedding(7, 4, scale_grad_by_freq=True).double(), 1),
        "bag of words": Case(lambda m: m(words).sin()[:, :3], nn.EmbeddingBag(7, 4).double(), 1),
        "PReLU": of_module(nn.Sequential(nn.Linear(4, 3), nn.PReLU(), nn.Linear(3, 2)), x, missing=1),
        "bilinear": Case(lambda m: m(x, x.sin()).sin(), nn.Bilinear(4, 4, 3).double(), 1),
        "RMSNorm": of_module(nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Linear(5, 3)), x),
        "weight norm": of_module(weighed, x),
        "transposed convolution": of_module(transposed, series, missing=1),
        "dropout": Case(lambda m: with_draw(m, x), nn.Sequential(*mlp(4, 8, 8), nn.Dropout(0.5), *mlp(8, 3)).double()),
        "checkpoint": Case(lambda m: checkpointed(m, x), mlp(4, 5, 5, 3)),
        "twice": Case(lambda m: m(m(x.sin()).tanh()), mlp(4, 5, 4)),
        "Laplacian by hand": Case(lambda m: laplacian_by_hand(m, x[:, :2]), mlp(2, 5, 5, 1)),
        "Laplacian by hodiff": Case(lambda m: laplacian(m, x[:, :2]).sin(), mlp(2, 5, 5, 1)),
        "Laplacian, as wide as samples": Case(lambda m: laplacian(m, x[:, :2]), mlp(2, N, N, 1)),
        "gradient penalty": Case(lambda m: slopes(m, x), mlp(4, 5, 5, 1)),
        "many numbers": Case(lambda m: m(x).sin(), mlp(4, 5, 70)),
    }  # fmt: skip


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    return single_tensors() | modules()


NAMES = list(cases())


@pytest.mark.parametrize("name", NAMES)
def test_against_a_pass_for_each_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f, where, missing = cases()[name]
    for shortest in (_factors.Outer.shortest, lambda of: of):  # many of so small ones are rows
        monkeypatch.setattr(_factors.Outer, "shortest", shortest)
        factors, leaves, rows = factors_of(f, where)
        assert len(factors.missing) == missing, f"{name}: {factors.missing}"
        assert sorted([*factors.of, *factors.missing]) == list(range(len(leaves)))
        for number, of in factors.of.items():
            compare(of, rows[number])
        if factors.of:
            flat = torch.cat([rows[number].reshape(*rows[number].shape[:2], -1) for number in factors.of], 2)
            agree(gram_of(factors), torch.einsum("nkp,mlp->nkml", flat, flat))


def test_what_one_network_proves_of_its_formulas_serves_no_other() -> None:
    """All of them with one memory of proofs, and again from the last to the first."""
    for name in [*NAMES, *reversed(NAMES)]:
        f, where, missing = cases()[name]
        factors, _, rows = factors_of(f, where)
        assert len(factors.missing) == missing, name
        for number, of in factors.of.items():
            agree(of.rows(), rows[number])


def test_a_formula_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a structure that is known, no pass goes on to the parameters."""
    inputs: list[int] = []
    between = _factors._reverse.vjp_between

    def counted(outputs: Any, by: Any, *args: Any, **kwargs: Any) -> Any:
        inputs.append(len(by))
        return between(outputs, by, *args, **kwargs)

    monkeypatch.setattr(_factors._reverse, "vjp_between", counted)
    model = mlp(4, 5, 1)
    sums = lambda count: lambda m: m(draw(count, 4)).sin().sum(1)
    for count, expected in ((N, [2, 2, 4]), (N, [2, 2]), (N + 1, [2, 2, 4]), (N, [2, 2])):
        inputs.clear()
        factors, _, rows = factors_of(sums(count), model)
        assert inputs == expected
        for number, of in factors.of.items():
            compare(of, rows[number])
    monkeypatch.setattr(_factors, "REMEMBERED", 7)
    assert len(_factors.PROVED) == 8
    factors_of(sums(N), model)
    assert not _factors.PROVED


HOOKS: dict[str, Callable[[nn.Module, Tensor, Callable[..., Any]], Any]] = {
    "what an operation takes": lambda m, z, double: z.grad_fn.register_prehook(double),
    "what an operation gives": lambda m, z, double: z.grad_fn.register_hook(double),
    "the transpose of a weight": lambda m, z, double: z.grad_fn.next_functions[2][0].register_hook(double),
    "a result": lambda m, z, double: z.register_hook(lambda g: double((g,))[0]),
    "a parameter": lambda m, z, double: m[0].weight.register_hook(lambda g: double((g,))[0]),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_proof_says_nothing_of_what_has_hooks(kind: str) -> None:
    model, x = mlp(4, 5, 2), draw(N, 4)

    def f(model: nn.Module, *, hooked: bool) -> Tensor:
        z = model[0](x)
        double = lambda gradients, *_: tuple(None if g is None else 2 * g for g in gradients)
        _ = hooked and HOOKS[kind](model, z, double)
        return model[2](model[1](z)).sin()

    plain, *_ = factors_of(lambda m: f(m, hooked=False), model)
    assert len(plain.of) == len(_factors.PROVED) == 4
    factors, _, rows = factors_of(lambda m: f(m, hooked=True), model)
    for number, of in factors.of.items():
        agree(of.rows(), rows[number])
    assert len(_factors.PROVED) == 4


class Uses(NamedTuple):
    """Two ways to use a parameter that differ in one thing, and what tells a reader which it is."""

    one: Callable[[Tensor, Tensor], Tensor]
    other: Callable[[Tensor, Tensor], Tensor]
    tells: Callable[[Any], bool]
    shape: tuple[int, ...] = (N, N)


USES = {
    "the operation": Uses(lambda x, w: x + w, lambda x, w: x - w, lambda of: of.use.kind == "Sub", (N,)),
    "the place": Uses(lambda x, w: x * w, lambda x, w: w * x, lambda of: of.use.place == 0, (N,)),
    "the transpose": Uses(lambda x, w: x @ w, lambda x, w: x @ w.T, lambda of: of.turned),
    "the numbers": Uses(lambda x, w: (x @ w)[:, 0], lambda x, w: x @ w, lambda of: len(of.g) > 1),
    "the samples": Uses(
        lambda x, w: (x[..., None] + w).sin().sum(1),
        lambda x, w: (x[..., None] + w).sin().sum(0),
        lambda of: of.at.before > 1,
        (4,),
    ),
    "what is kept": Uses(
        lambda x, w: x.add(w, alpha=2), lambda x, w: x.add(w, alpha=3), lambda of: of.kept("alpha") == 3, (N,)
    ),
    "sizes of what is kept": Uses(
        lambda x, w: x * w, lambda x, w: x[:, :1] * w, lambda of: of.kept("self").shape[1] == 1, (N,)
    ),
    "how often": Uses(lambda x, w: x @ w, lambda x, w: x @ w + (2 * x) @ w, lambda of: len(of.facts) > 10),
}


@pytest.mark.parametrize("kind", USES)
def test_a_proof_serves_the_same_use_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is right of one use, and wrong of another."""
    uses = USES[kind]

    def partly_wrong(reader: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def read(of: Any) -> Any:
            rows = reader(of)
            return _factors.Outer((2 if uses.tells(of) else 1) * rows.left, rows.right, rows.shape)

        return read

    for name in ("Mm", "Add", "Sub", "Mul"):
        monkeypatch.setitem(_factors.READERS, name, partly_wrong(_factors.READERS[name]))
    x, w = draw(N, N), draw(*uses.shape)
    for _ in range(2):
        assert not factors_of(lambda w: uses.one(x, w).sin(), w)[0].missing
        assert factors_of(lambda w: uses.other(x, w).sin(), w)[0].missing == {0}


def test_a_proof_serves_one_shape_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = _factors._factor
    monkeypatch.setitem(_factors.READERS, "Mul", lambda of: Outer.of((len(of.shape)) * factor(of).rows(), of.shape))
    x = draw(N, 4)
    for shape, missing in (((4,), set()), ((1, 4), {0})):
        assert factors_of(lambda w: (x * w).sin(), draw(*shape))[0].missing == missing


def test_nothing_is_proved_of_what_hooks_pack() -> None:
    """They may give another tensor each time. (Before 2.12 only hooks in Python are seen, which alone can do that.)"""
    model, x = mlp(4, 5, 2), draw(N, 4)
    copied = lambda saved: saved.clone()

    def f(model: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(copied, copied):
            return model(x).sin()

    factors, _, rows = factors_of(f, model)
    for number, of in factors.of.items():
        agree(of.rows(), rows[number])
    assert not factors.missing
    assert not _factors.PROVED


def test_a_parameter_without_a_use_proves_nothing_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = lambda of: of.outer(2 * of.at.apart(of.kept("self")[None], 4), of.at.apart(of.g, 3))
    monkeypatch.setitem(_factors.READERS, "Mm", twice)
    x, point = draw(N, 4), (draw(4, 3), draw(2))
    for _ in range(2):
        factors, *_ = factors_of(lambda p: (x @ p[0]).sin(), point)
        assert factors.missing == {0}
        assert not factors.of[1].rows().any()


def compare(of: _factors.Outer, rows: Tensor) -> None:
    """Everything that follows from the factors of one parameter."""
    agree(of.rows(), rows)
    flat = rows.reshape(*rows.shape[:2], -1)
    agree(of.gram(), torch.einsum("nkp,mlp->nkml", flat, flat))
    agree(of.norms().expand(rows.shape[:2]), flat.square().sum(2))
    agree(of.squares(), rows.square().sum((0, 1)))
    weights, vector = draw(*rows.shape[:2]), torch.randn_like(rows[0, 0])
    agree(of.pull(weights), torch.einsum("nk,nk...->...", weights, rows))
    agree(of.push(vector).expand(rows.shape[:2]), flat @ vector.flatten())
    some, own = slice(-3, None), flat[-3:]
    agree(of[some].rows(), rows[some])
    assert of.sizes == rows.shape[:2]
    products = torch.einsum("nkp,mlp->nkml", flat, own)
    like = _factors.Outer.of(rows[some], of.shape)
    for other in (of[some], like, of.double(rows.device)[some]):
        agree(of.gram(other), products)
        agree(other.gram(of), products.permute(2, 3, 0, 1))


@pytest.mark.parametrize("by", ["pairs", "rows", "rows of one column"])
def test_products_with_other_samples(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another number of positions, and of an embedding beside a product; and their squares."""
    torch.manual_seed(0)
    monkeypatch.setattr(_factors, "POSITIONS", 64 if by == "pairs" else 0)
    if by == "rows of one column":
        monkeypatch.setattr(_factors._reverse, "CHUNK_BYTES", 1)
    words = torch.tensor([[1, 1, 2], [0, 6, 2]]).unsqueeze(1)
    sides = {
        "three positions": _factors.Outer(draw(5, 2, 3, 7), draw(5, 2, 3, 4), torch.Size((7, 4))),
        "a shared side": _factors.Outer(draw(4, 3, 2, 7), draw(4, 1, 2, 4), torch.Size((7, 4))),
        "rows": _factors.Outer.of(draw(3, 1, 7, 4), torch.Size((7, 4))),
        "indexed": _factors.Indexed(draw(2, 2, 3, 4), words, torch.Size((7, 4))),
        "indexed, others": _factors.Indexed(draw(1, 1, 3, 4), words[:1].flip(2), torch.Size((7, 4))),
    }
    for one, other in itertools.product(sides.values(), repeat=2):
        agree(one.squares(), one.rows().square().sum((0, 1)))
        agree(one.gram(other), torch.einsum("nkij,mlij->nkml", one.rows(), other.rows()))


# --- proofs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1.0, 1e-4, 1e-8])
@pytest.mark.parametrize("numbers", [1, 3])
def test_mixed_samples_are_refused(times: float, numbers: int) -> None:
    """Though the graph is one that was read before: to whom a position belongs is looked at in each call."""
    torch.manual_seed(1)
    model, x = mlp(4, 5, numbers), draw(N, 4)

    def f(model: nn.Module, times: float) -> Tensor:
        z = model[1](model[0](x))
        return model[2](z + times * z.mean(0)).sin()

    f_of = lambda times: lambda m: f(m, times) if numbers > 1 else f(m, times).squeeze(1)
    assert not factors_of(f_of(0.0), model)[0].missing
    mixed, _, rows = factors_of(f_of(times), model)
    assert mixed.missing == {0, 1}
    for number, of in mixed.of.items():
        compare(of, rows[number])


def test_one_that_is_mixed_beside_much_larger_ones() -> None:
    """Each sample is compared by its own size."""
    scale = torch.tensor([1e-9, *[1.0] * (N - 1)], dtype=D)
    x, w = draw(N, 4), draw(4)
    # A millionth of what the first one's position has.
    f = lambda w, more: scale * (x @ w + more * (x @ w).cumsum(0)).sin()
    assert not factors_of(lambda w: f(w, 0.0), w)[0].missing
    assert factors_of(lambda w: f(w, 1e-15), w)[0].missing == {0}


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_of_nodes_are_noticed(kind: str) -> None:
    """They change what the node makes of its derivative, which the one that it is given does not tell."""
    model, x = mlp(4, 5, 2), draw(N, 4)

    def f(model: nn.Module, times: float) -> Tensor:
        z = model[0](x)
        double = lambda gradients, *_: tuple(None if g is None else times * g for g in gradients)
        getattr(z.grad_fn, kind)(double)
        return model[2](model[1](z)).sin()

    assert not factors_of(lambda m: f(m, 1.0), model)[0].missing
    assert factors_of(lambda m: f(m, 2.0), model)[0].missing == {0, 1}
    bare = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False)).double()
    assert factors_of(lambda m: f(m, 2.0), bare)[0].missing == {0}


def test_a_formula_that_is_not_right_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = draw(N, 4), draw(4, 3)
    twice = lambda of: of.outer(2 * of.at.apart(of.kept("self")[None], 4), of.at.apart(of.g, 3))
    with monkeypatch.context() as patch:
        patch.setitem(_factors.READERS, "Mm", twice)
        assert factors_of(lambda w: (x @ w).sin(), w)[0].missing == {0}
    assert not factors_of(lambda w: (x @ w).sin(), w)[0].missing


def test_a_node_that_keeps_what_its_reader_does_not_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(of: Any) -> Any:
        return of.kept("weight").view(-1, 7)

    monkeypatch.setitem(_factors.READERS, "Convolution", reader)
    factors, *_ = factors_of(lambda m: m(draw(N, 4, 9)).flatten(1)[:, :2], nn.Conv1d(4, 3, 3).double())
    assert factors.missing == {0, 1}


def test_what_a_node_does_not_tell_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that calls it otherwise: no error, and no wrong number."""
    monkeypatch.setitem(_factors.READERS, "Mm", lambda of: of.outer(of.kept("renamed"), of.g))
    x = draw(N, 4)
    assert factors_of(lambda w: (x @ w).sin(), draw(4, 3))[0].missing == {0}


def test_too_large_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_factors, "LARGEST", 8 * N * 3 * 3 - 1)
    x = draw(N, 4)
    assert factors_of(lambda w: (x @ w).sin(), draw(4, 3))[0].missing == {0}
    monkeypatch.setattr(_factors, "LARGEST", 8 * N * 3 * 3)
    assert not factors_of(lambda w: (x @ w).sin(), draw(4, 3))[0].missing


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_samples(count: int) -> None:
    x = draw(count, 4)
    factors, _, rows = factors_of(lambda m: m(x).sin(), mlp(4, 7, 2))
    assert not factors.missing
    for number, of in factors.of.items():
        compare(of, rows[number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_numbers_of_another_kind_are_missing(dtype: torch.dtype) -> None:
    """Inside, where what comes out is float32 or real."""
    x, w = draw(N, 4).to(dtype), torch.randn(4, 3, dtype=dtype)
    real = lambda z: torch.view_as_real(z).sum(-1) if dtype.is_complex else z.float()
    with OutputGraph(call(lambda v: real(x @ v.to(dtype)), w.real, 1, None, False, (), (), None)) as graph:
        assert Factors(graph, [graph.outputs]).missing == {0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_that_hides_what_is_mixed(dtype: torch.dtype) -> None:
    x, model = draw(N, 4).to(dtype), mlp(4, 3).to(dtype)
    mixed = lambda m: (m(x) + 0.2 * m(x).mean(0)).tanh().sum(1)
    with OutputGraph(call(mixed, model, 1, None, False, (), (), None)) as graph:
        assert Factors(graph, [graph.outputs]).missing == {0, 1}


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_missing(layout: torch.layout) -> None:
    parts = [draw(length, 4) for length in range(1, N + 1)]

    def f(model: nn.Module) -> Tensor:
        words = torch.nested.nested_tensor(parts, layout=layout, dtype=D)
        return model(words).to_padded_tensor(0.0).sin().sum((1, 2))

    with OutputGraph(call(f, mlp(4, 3), 1, None, False, (), (), None)) as graph:
        assert Factors(graph, [graph.outputs]).missing == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_a_bias_that_changes_nothing(dtype: torch.dtype) -> None:
    """Of attention's keys: its derivatives at the positions of a sample cancel, but for rounding."""
    torch.manual_seed(0)
    x = draw(N, 5, 4).to(dtype)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).to(dtype)

    def attention(layers: Any) -> Tensor:
        q, k, v = (layer(x) for layer in layers)
        return ((q @ k.mT).softmax(-1) @ v).sin().sum((1, 2))

    factors, _, rows = factors_of(attention, layers)
    assert not factors.missing
    scale = max(float(row.abs().max()) for row in rows)
    for number, of in factors.of.items():
        assert float((of.rows() - rows[number]).abs().max()) <= 100 * torch.finfo(dtype).eps * scale


def test_of_a_single_sample_all_is_read() -> None:
    """Its rows are those of the passes, whatever uses a weight."""
    x = draw(1, 5, 4)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(5), nn.PReLU(), parametrizations.weight_norm(nn.Linear(3, 2)))
    factors, _, rows = factors_of(lambda m: m(x).sin().flatten(1)[:, :3], model.double())
    assert not factors.missing
    for number, of in factors.of.items():
        compare(of, rows[number])


def test_images_that_are_one() -> None:
    """Samples may be the channels of one image."""
    x = draw(1, N, 5, 5)
    f = lambda w: F.conv2d(x, w, groups=N)[0].sin().sum((1, 2))
    assert factors_of(f, draw(N, 1, 2, 2))[0].missing == {0}


def test_no_samples() -> None:
    x = draw(0, 4)
    with OutputGraph(call(lambda m: m(x), mlp(4, 2), 1, None, False, (), (), None)) as graph:
        assert Factors(graph, [graph.outputs]).missing == {0, 1}


# --- several outputs, sums of numbers ---------------------------------------------------------------------------------


def test_two_outputs_and_seeds() -> None:
    """Rows of sums of numbers, weighed for each sample by itself."""
    x, model = draw(N, 4), mlp(4, 5, 5)
    seeds = [draw(2, N, 3), draw(2, N, 2)]
    f = lambda m: torch.split(m(x).sin(), [3, 2], 1)
    with OutputGraph(call(f, model, 1, None, False, (), (), None)) as graph:
        factors = Factors(graph, graph.outputs, seeds)
        sums = sum((seed * output).flatten(2).sum(2).T for seed, output in zip(seeds, graph.outputs, strict=True))
        rows = [torch.autograd.grad(number, graph.leaves, retain_graph=True) for number in sums.flatten()]
    assert not factors.missing
    for number, of in factors.of.items():
        compare(of, torch.stack([row[number] for row in rows]).view(N, 2, *of.shape))


@pytest.mark.parametrize("model", [mlp(4, N, N, 2), Tied(batch_first=True).double()], ids=["perceptron", "transformer"])
def test_samples_in_another_order(model: nn.Module) -> None:
    """Their Gram matrix is that matrix in this order."""
    x = torch.arange(N * 4).view(N, 4) % 7 if isinstance(model, Tied) else draw(N, 4)
    order = torch.randperm(N)
    f = lambda x: lambda m: m(x).sin().flatten(1)[:, :2]
    gram = gram_of(factors_of(f(x), model)[0])
    agree(gram_of(factors_of(f(x[order]), model)[0]), gram[order][:, :, order])


@pytest.mark.parametrize(
    "name", ["perceptron", "embedding", "transformer", "LSTM", "Laplacian by hodiff", "convolutions"]
)
@pytest.mark.parametrize("pairs", [True, False])
def test_by_pairs_and_by_columns(name: str, pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to a Gram matrix, some columns at a time."""
    f, where, _ = cases()[name]
    factors, _, rows = factors_of(f, where)
    expected = gram_of(factors)
    monkeypatch.setattr(_factors, "POSITIONS", 1000 if pairs else 0)
    monkeypatch.setattr(_factors._reverse, "CHUNK_BYTES", 2**9)
    agree(gram_of(factors), expected)
    for number, of in factors.of.items():
        compare(of, rows[number])


def test_a_sample_may_lose_more_digits_than_others_and_none_may_know_of_another():
    """Residuals of an equation met both, at 105 units, and took a pass for each sample ever after."""
    size = torch.rand(2, 3_000, 4, dtype=torch.float64) + 0.5
    unit = torch.finfo(torch.float64).eps
    off = size * unit * torch.randn_like(size)
    assert not _factors._close(size * (1 + 200 * unit), size, size)  # of all of them
    size[:, 7] *= 1e-9  # where paths cancel, the error is that of the summands
    assert _factors._close(size + off, size, size)
    off[:, 7, 0] = 1e4 * unit
    assert not _factors._close(size + off, size, size)
    off[:, 7, 0], off[:, 8, 0] = 0.0, 200 * unit * size[:, 8].amax()  # of one of thousands
    assert _factors._close(size + off, size, size)
    off[:, 8, 0] *= 100
    assert not _factors._close(size + off, size, size)
