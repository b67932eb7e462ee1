"""What follows from the rows of a Jacobian without the rows, against TorchJD, opacus and BackPACK.

The peers are optional, as those of `benchmarks.curvature`:
`pip install --no-deps --target DIR torchjd==0.18.0 opacus==1.6.0 backpack-for-pytorch==1.7.1`.
"""

import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from benchmarks.curvature import module
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread

Batch = tuple[Tensor, Tensor]


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 3 if quick else 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' own
        for name, model, inputs in networks():
            batch = inputs, torch.randint(10, (len(inputs),))
            case = f"{name}, {len(inputs)} samples"
            yield from products(case, model, inputs, rounds)
            yield from norms(case, model, batch, 1.5 if "MLP" in name else None, rounds)
            yield from diagonals(case, model, batch, rounds)


def networks() -> Iterator[tuple[str, nn.Module, Tensor]]:
    wide = nn.Sequential(
        nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
    )
    yield "MLP 64-512-512-10", wide, torch.randn(64, 64)
    layers = [layer for n in (1, 32, 32) for layer in (nn.Conv2d(n, 32, 3, padding=1), nn.ReLU())]
    yield (
        "three convolutions",
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10)),
        torch.randn(32, 1, 8, 8),
    )


def against(
    subject: str,
    case: str,
    bar: float | None,
    rounds: int,
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
) -> Row:
    """A row of two that compute the same."""
    one, other = ours().flatten(), theirs().flatten()
    assert float((one - other).norm()) <= 1e-3 * float(other.norm())
    times = race({"ours": ours, "theirs": theirs}, rounds=rounds)
    found = ratios(times, "ours", "theirs")
    both = (f"{statistics.median(times[who]) * 1e3:.1f} ms" for who in ("ours", "theirs"))
    met = None if bar is None else statistics.median(found) <= bar
    return Row(subject, case, f"{spread(found)}; {', '.join(both)}", f"{bar}" if bar else "", met)


def absent(subject: str, case: str, peer: str) -> Row:
    return Row(subject, case, f"{peer} is not installed")


def products(case: str, model: nn.Module, inputs: Tensor, rounds: int) -> Iterator[Row]:
    """The Gram matrix of all samples' numbers, and of their sums."""
    peer = module("torchjd.autogram") if module("torchjd") else None
    if peer is None:
        yield absent("gram / TorchJD", case, "torchjd")
        return
    for what, numbers in (("10 numbers", lambda y: y), ("1 number", lambda y: y.sum(1))):
        theirs = copy.deepcopy(model)
        engine = peer.Engine(theirs, batch_dim=0)
        f = lambda m, x, numbers=numbers: numbers(m(x))  # noqa: E731
        own = partial(hodiff.gram, f, model, inputs)
        other = lambda f=f, m=theirs, engine=engine: engine.compute_gramian(f(m, inputs))  # noqa: E731
        yield against("gram / TorchJD", f"{case}, {what}", 1.2, rounds, own, other)


def losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def norms(
    case: str, model: nn.Module, batch: Batch, bar: float | None, rounds: int
) -> Iterator[Row]:
    """Of the samples' gradients, with the Gram matrix whose diagonal they are."""
    if module("opacus") is None:
        yield absent("norms by gram / opacus, ghost clipping", case, "opacus")
        return
    clipping = module("opacus.grad_sample.grad_sample_module_fast_gradient_clipping")
    wrapped = clipping.GradSampleModuleFastGradientClipping(
        copy.deepcopy(model), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def theirs() -> Tensor:
        wrapped.zero_grad()
        losses(wrapped, batch).sum().backward()
        return wrapped.get_norm_sample()

    own = lambda: hodiff.gram(losses, model, batch).diagonal().sqrt()  # noqa: E731
    yield against("norms by gram / opacus, ghost clipping", case, bar, rounds, own, theirs)


def diagonals(case: str, model: nn.Module, batch: Batch, rounds: int) -> Iterator[Row]:
    """Of the Gauss-Newton matrix, exact, with an operator made anew, and with one at hand."""
    if module("backpack") is None:
        yield absent("exact diagonal / BackPACK", case, "backpack-for-pytorch")
        return
    extension = module("backpack.extensions").DiagGGNExact
    backpack = module("backpack")
    extended, loss = backpack.extend(copy.deepcopy(model)), backpack.extend(nn.CrossEntropyLoss())

    def theirs() -> Tensor:
        extended.zero_grad()
        value = loss(extended(batch[0]), batch[1])
        with backpack.backpack(extension()):
            value.backward()
        return torch.cat(
            [parameter.diag_ggn_exact.flatten() for parameter in extended.parameters()]
        )

    def operator() -> hodiff.GaussNewtonOperator:
        return hodiff.GaussNewtonOperator(
            lambda m, b: m(b[0]), nn.CrossEntropyLoss(), model, data=[batch]
        )

    def diagonal(G: hodiff.GaussNewtonOperator) -> Tensor:
        return torch.cat([part.flatten() for part in hodiff.diagonal(G).value.values()])

    kept = operator()
    made, at_hand = (lambda: diagonal(operator())), (lambda: diagonal(kept))
    yield against(
        "exact diagonal / BackPACK", f"{case}, operator made anew", None, rounds, made, theirs
    )
    yield against(
        "exact diagonal / BackPACK", f"{case}, operator at hand", 1.5, rounds, at_hand, theirs
    )
