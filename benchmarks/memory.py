"""Bytes of tensors alive during and after a dense Hessian, counted exactly."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hodiff
from benchmarks.models import Problem, deep, dense, network_of_input
from benchmarks.table import Row
from benchmarks.timing import race, ratios
from hodiff._core._reverse import CHUNK_BYTES
from hodiff.curvature._memory import LiveBytes
from hodiff.jets import rules
from hodiff.jets._jet import RULES
from hodiff.memory import _attention

SIZE = 1000


class Bytes(NamedTuple):
    result: int
    peak: int
    after: int  # beside the result


def rows(quick: bool) -> Iterator[Row]:
    """Peak bytes by chunk_size.

    A line through two sizes tells what a row takes; the others must lie on it.
    """
    torch.manual_seed(0)
    for name, f in {"log-sum-exp": dense(SIZE), "MLP of its input": network_of_input(SIZE)}.items():
        case = f"{name}, n = {SIZE}"
        x = torch.randn(SIZE)
        peaks = {chunk: count(hodiff_route(f, x, chunk)).peak for chunk in (16, 32)}
        row = (peaks[32] - peaks[16]) / 16
        fixed = peaks[16] - 16 * row
        for chunk in (8, 64, "auto"):
            found = count(hodiff_route(f, x, chunk))
            allowed = fixed + (CHUNK_BYTES if chunk == "auto" else chunk * row)
            of = mib(CHUNK_BYTES) if chunk == "auto" else f"{chunk} rows of {row / 2**10:.1f} KiB"
            measured = (
                f"{mib(found.peak)}, of it {mib(found.result)} the result; "
                f"{found.after} B left beside it"
            )
            met = found.peak <= 1.05 * allowed and not found.after
            subject = f"peak memory of hessian, chunk_size={chunk}"
            yield Row(
                subject, case, measured, f"{mib(fixed)} + {of} = {mib(allowed)}; 0 B left", met
            )
        for route, call in {
            "torch.func.hessian": lambda f=f, x=x: torch.func.hessian(f)(x),
            "jacrev(jacrev)": lambda f=f, x=x: torch.func.jacrev(torch.func.jacrev(f))(x),
        }.items():
            yield Row(f"peak memory of {route}", case, mib(count(call).peak))
    yield from of_attention(quick)
    yield from of_long_attention()
    yield from of_training(quick)
    yield from of_a_vocabulary()
    yield from of_lean_products(quick)
    yield from of_blocks(quick)


def of_attention(quick: bool) -> Iterator[Row]:
    """A Hessian-vector product by the weights of one layer, beside matrix products;
    the medians of runs in turn.
    """
    torch.manual_seed(0)
    bounds = {(1024, False): 1.0, (2048, False): 0.75, (2048, True): 0.5}
    for (tokens, causal), bound in bounds.items():
        layer, x = Attending(causal), torch.randn(1, tokens, 256)
        v = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
        routes = {least: partial(product, layer, x, v, least) for least in (LEAST, 2**60)}
        ours, plain = medians(routes, 3 if quick else 7).values()
        case = f"{tokens} tokens, 4 heads of 64{', causal' if causal else ''}"
        measured = f"{ours / plain:.2f} of matrix products ({ours * 1e3:.0f} ms)"
        yield Row(
            "time of hvp through attention",
            case,
            measured,
            f"at most {bound}",
            ours <= bound * plain,
        )
        peaks = [peak(call) for call in routes.values()]
        measured = f"{mib(peaks[0])}, matrix products {mib(peaks[1])}: {peaks[0] / peaks[1]:.3f}"
        share = 0.08 if tokens == 2048 else 0.2
        met = peaks[0] <= share * peaks[1]
        yield Row("peak memory of hvp through attention", case, measured, f"at most {share}", met)


def of_long_attention() -> Iterator[Row]:
    """The same by closed form alone, where matrix products do not fit:
    its peak grows as the tokens do.
    """
    torch.manual_seed(0)
    layer = Attending(causal=True)
    v = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    least = 0
    for tokens in (2048, 4096, 8192):
        x = torch.randn(1, tokens, 256)
        of_one = seconds(
            lambda x=x: torch.autograd.grad(layer(x).sin().sum(), [*layer.parameters()])
        )
        of_ours = seconds(partial(product, layer, x, v, LEAST))
        taken = peak(partial(product, layer, x, v, LEAST))
        least = least or taken
        growth, most = taken / least, 1.05 * tokens / 2048
        measured = f"{mib(taken)}, {growth:.2f} times; {of_ours / of_one:.1f} gradients"
        case = f"{tokens} tokens, 4 heads of 64, causal"
        yield Row(
            "peak memory of hvp through attention",
            case,
            measured,
            f"at most {most:.2f} times",
            growth <= most,
        )


def of_training(quick: bool) -> Iterator[Row]:
    """A first derivative inside of `twice_differentiable()`, beside one outside."""
    torch.manual_seed(0)
    layer = Attending(causal=True)

    def step(x: Tensor, context: Callable[[], AbstractContextManager[None]]) -> None:
        with context():
            torch.autograd.grad(layer(x).sin().sum(), [*layer.parameters()])

    for tokens in (64, 1024, 2048):
        x = torch.randn(1, tokens, 256)
        calls = {
            "inside": partial(step, x, hodiff.twice_differentiable),
            "outside": partial(step, x, nullcontext),
        }
        times = race(calls, rounds=5 if quick else 41, least=2e-2)
        inside, outside = (statistics.median(times[name]) for name in calls)
        share = statistics.median(ratios(times, "inside", "outside"))
        measured = f"{share:.3f} of one outside, {1e6 * (inside - outside):.0f} µs more"
        bar, met = ("at most 1.03", share <= 1.03) if tokens > 64 else ("", None)
        case = f"{tokens} tokens, 4 heads of 64, causal"
        yield Row("gradient inside of twice_differentiable()", case, measured, bar, met)


def of_lean_products(quick: bool) -> Iterator[Row]:
    """H v as the gradient of J v, which Taylor mode gives: by formulas for first order,
    and by its general rules.
    """
    for problem in deep():
        v = [torch.randn_like(p) for p in problem.model.parameters()]
        calls = {
            "gradient": lambda p=problem: torch.autograd.grad(
                p.loss(p.model), [*p.model.parameters()]
            ),
            "hvp": lambda p=problem, v=v: hodiff.hvp(
                p.loss, p.model, torch.cat([x.flatten() for x in v])
            ),
            "general": lambda p=problem, v=v: lean_product(p, v, {}),
            "fused": lambda p=problem, v=v: lean_product(p, v, FORMULAS),
        }
        times = race(calls, rounds=3 if quick else 9)
        shares = {name: statistics.median(ratios(times, name, "gradient")) for name in [*calls][1:]}
        peaks = {name: peak(call) for name, call in calls.items()}
        parts = [
            f"{name} {share:.2f} gradients, {mib(peaks[name])}" for name, share in shares.items()
        ]
        met = shares["fused"] <= shares["general"] and peaks["fused"] <= 1.02 * peaks["general"]
        measured = f"{'; '.join(parts)} (a gradient {mib(peaks['gradient'])})"
        yield Row(
            "reverse mode over Taylor mode", problem.name, measured, "fused at most general", met
        )


rules.read("")  # all of them
FORMULAS = dict(RULES.first)


def lean_product(problem: Problem, v: list[Tensor], formulas: dict[str, Any]) -> Sequence[Tensor]:
    """A Hessian-vector product by the parameters, with some formulas for first order."""
    names = [name for name, _ in problem.model.named_parameters()]
    leaves = tuple(p.detach().requires_grad_() for p in problem.model.parameters())

    def loss(*parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        outputs = torch.func.functional_call(problem.model, state, problem.inputs)
        return F.cross_entropy(outputs, problem.targets)

    RULES.first.clear()
    RULES.first.update(formulas)
    try:
        _, (slope,) = hodiff.jet(loss, leaves, tuple([each] for each in v), create_graph=True)
        return torch.autograd.grad(slope, leaves)
    finally:
        RULES.first.update(FORMULAS)


def seconds(call: Callable[[], object]) -> float:
    """The median of three."""
    return statistics.median(race({"": call}, rounds=3)[""])


def of_a_vocabulary() -> Iterator[Row]:
    """Products by a head of 20,000 words and 1,024 rows, with what each makes first,
    in tensors of the logits' size.
    """
    torch.manual_seed(0)
    rows, words = 1024, 20_000
    head, x, words_of = (
        nn.Linear(32, words, bias=False),
        torch.randn(rows, 32),
        torch.randint(0, words, (rows,)),
    )
    v = {"weight": torch.randn_like(head.weight)}
    predict, data = lambda m, batch: m(batch[0]), [(x, words_of)]
    routes = {
        "hvp": (lambda: hodiff.hvp(lambda m: F.cross_entropy(m(x), words_of), head, v), 4.5),
        "Gauss-Newton product": (
            lambda: hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), head, data=data) @ v,
            5.0,
        ),
    }
    for name, (call, bound) in routes.items():
        share = peak(call) / (4 * rows * words)
        measured = f"{share:.2f} of the logits"
        yield Row(
            f"peak memory of {name}",
            "cross-entropy of 20,000 words, 1,024 rows",
            measured,
            f"at most {bound}",
            share <= bound,
        )


def of_blocks(quick: bool) -> Iterator[Row]:
    """Products with a decoder of 8 blocks that run again in each pass, beside its gradient,
    plain and checkpointed.
    """
    case = "decoder of 8 blocks, width 128, 8 x 64 tokens"
    model, loss, v = decoder(8)
    size = sum(p.nbytes for p in model.parameters())
    predict, data = lambda m, batch: m(batch[0]).transpose(1, 2), [(model.tokens, model.targets)]

    def gauss_newton(**options: Any) -> Any:
        return (
            hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), model, data=data, **options)
            @ v
        )

    routes: dict[str, Callable[[], Any]] = {
        "gradient": lambda: hodiff.grad(loss, model),
        "checkpointed gradient": lambda: hodiff.grad(lambda m: loss(m, checkpointed=True), model),
        "hvp": lambda: hodiff.hvp(loss, model, v),
        "hvp, double backward with checkpoints": lambda: hodiff.hvp(
            lambda m: loss(m, checkpointed=True), model, v
        ),
        "hvp, checkpoint=": lambda: hodiff.hvp(loss, model, v, checkpoint="layers.*"),
        "Gauss-Newton": gauss_newton,
        "Gauss-Newton, checkpoint=": lambda: gauss_newton(checkpoint="layers.*", memory_budget=0),
    }
    peaks = {name: peak(call) for name, call in routes.items()}
    times = medians(routes, 3 if quick else 9)
    for name, of, memory, time_of, bound in (
        ("hvp, checkpoint=", "gradient", 0.9, "gradient", 6.0),
        ("Gauss-Newton, checkpoint=", "checkpointed gradient", 1.1, "Gauss-Newton", 1.1),
    ):
        measured = f"{mib(peaks[name])}: {peaks[name] / peaks[of]:.2f} of a {of}'s"
        yield Row(
            f"peak memory of {name}",
            case,
            measured,
            f"at most {memory}",
            peaks[name] <= memory * peaks[of],
        )
        share = times[name] / times[time_of]
        yield Row(
            f"time of {name}", case, f"{share:.2f} of {time_of}", f"at most {bound}", share <= bound
        )
    for name in (
        "gradient",
        "checkpointed gradient",
        "hvp",
        "hvp, double backward with checkpoints",
        "Gauss-Newton",
    ):
        yield Row(f"peak memory of {name}", case, mib(peaks[name]))
    deep, deep_loss, deep_v = decoder(24)
    more = peak(lambda: hodiff.hvp(deep_loss, deep, deep_v, checkpoint="layers.*"))
    # Beside the product itself, and the parameters and the vector, which were there before.
    beside, beside_deep = (
        peaks["hvp, checkpoint="] - size,
        more - sum(p.nbytes for p in deep.parameters()),
    )
    growth = beside_deep / beside
    measured = f"{mib(beside)}, with 24 blocks {mib(beside_deep)}: {growth:.2f}"
    yield Row(
        "peak memory of hvp, checkpoint=, beside the product",
        case,
        measured,
        "at most 1.7",
        growth <= 1.7,
    )


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Decoder(nn.Module):
    """With its embedding tied to its head."""

    def __init__(
        self, layers: int, words: int = 64, width: int = 128, tokens: int = 64, sequences: int = 8
    ) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        # it is the head, too, whose softmax would be saturated
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(tokens, width) / 50)
        self.layers = nn.ModuleList([DecoderBlock(width) for _ in range(layers)])
        self.tokens, self.targets = (torch.randint(0, words, (sequences, tokens)) for _ in range(2))

    def forward(self, tokens: Tensor, checkpointed: bool = False) -> Tensor:
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return self.norm(x) @ self.embedding.weight.T


def decoder(layers: int) -> tuple[Decoder, Callable[..., Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Decoder(layers)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(m: Decoder, checkpointed: bool = False) -> Tensor:
        return F.cross_entropy(m(m.tokens, checkpointed).transpose(1, 2), m.targets)

    return model, loss, v


def medians(routes: dict[Any, Callable[[], object]], runs: int) -> dict[Any, float]:
    """Of the processor's time, in runs in turn."""
    spent: dict[Any, list[float]] = {name: [] for name in routes}
    for _ in range(runs):
        for name, call in routes.items():
            start = time.process_time()
            call()
            spent[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in spent.items()}


class Attending(nn.Module):
    """One layer of attention, whose parameters are its four matrices."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(256, 256) / 16) for _ in range(4)]
        )
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).view(1, -1, 4, 64).transpose(1, 2) for w in self.weights[:3])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return out.transpose(1, 2).reshape(1, -1, 256) @ self.weights[3]


LEAST = _attention.LEAST


def product(layer: nn.Module, x: Tensor, v: dict[str, Tensor], least: int) -> dict[str, Tensor]:
    """By the closed form, or by matrix products."""
    _attention.LEAST = least
    try:
        return hodiff.hvp(lambda m: m(x).sin().sum(), layer, v)
    finally:
        _attention.LEAST = LEAST


def peak(call: Callable[[], object]) -> int:
    call()
    gc.collect()
    with LiveBytes() as live:
        call()
    return live.peak


def hodiff_route(
    f: Callable[[Tensor], Tensor], x: Tensor, chunk: int | str
) -> Callable[[], Tensor]:
    return lambda: hodiff.hessian(f, x, chunk_size=chunk)


def count(call: Callable[[], Tensor]) -> Bytes:
    call()  # what is made once and kept (caches of PyTorch) is not this call's
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            result = call()
        size = result.untyped_storage().nbytes()
        return Bytes(size, live.peak, live.now - size)
    finally:
        gc.enable()


def mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"
