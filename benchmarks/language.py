"""A decoder of ten million parameters at 1,024 tokens: products and eigenvalues, their times and
their peaks.

Beside curvlinops and hessian-eigenthings, which are optional (see `benchmarks.curvature`).
PyTorch's fused attention has no second derivative, and they raise, so they are given its matrix
products, as their users are told to.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from benchmarks.curvature import check, curvlinops, eigenthings, module
from benchmarks.memory import Decoder, mib, peak
from benchmarks.models import Problem
from benchmarks.table import Row
from hodiff.curvature._memory import LiveBytes

PEERS = {"curvlinops": "curvlinops", "hessian-eigenthings": "hessian_eigenthings"}
BLOCKS = {"checkpoint": "layers.*", "memory_budget": 0}
EIGENVALUES, TOLERANCE = 3, 1e-2


class LanguageModel(Decoder):
    """One prediction in each row, as losses of all three libraries take it."""

    def forward(self, tokens: Tensor, checkpointed: bool = False) -> Tensor:
        return super().forward(tokens, checkpointed).flatten(0, 1)


def decoder(quick: bool) -> Problem:
    torch.manual_seed(0)
    layers, width, words, tokens = (2, 64, 50, 128) if quick else (8, 320, 1000, 1024)
    model = LanguageModel(layers, words, width, tokens, sequences=1)
    size = sum(p.numel() for p in model.parameters())
    return Problem(
        f"decoder, {size / 1e6:.1f} M parameters, {tokens} tokens",
        model,
        model.tokens,
        model.targets[0],
    )


def rows(quick: bool) -> Iterator[Row]:
    problem = decoder(quick)
    names = [name for name, package in PEERS.items() if module(package) is not None]
    for name in sorted({*PEERS} - {*names}):
        yield Row("curvature of a language model", problem.name, f"{name} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' deprecations
        yield from functions(problem)
        for kind in ("Hessian", "Gauss-Newton"):
            yield from products(problem, kind, names)
        yield from eigenvalues(problem, names)


def functions(problem: Problem) -> Iterator[Row]:
    """A gradient, plain and checkpointed, and a product without an operator."""

    def checkpointed(model: Any) -> Tensor:
        return problem.loss(partial(model, checkpointed=True))

    model = problem.model
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    routes: dict[str, Callable[[], object]] = {
        "gradient": lambda: hodiff.grad(problem.loss, model),
        "checkpointed gradient": lambda: hodiff.grad(checkpointed, model),
        "hvp": lambda: hodiff.hvp(problem.loss, model, v),
        "hvp, checkpoint=": lambda: hodiff.hvp(problem.loss, model, v, checkpoint="layers.*"),
    }
    for name, call in routes.items():
        yield Row(name, problem.name, cost(call))


def products(problem: Problem, kind: str, names: list[str]) -> Iterator[Row]:
    """An operator made, and multiplied once."""
    v = torch.randn(sum(p.numel() for p in problem.model.parameters()))
    plain, lean = (
        lambda options=options: ours(problem, kind, **options) @ v for options in ({}, BLOCKS)
    )
    expected = plain()
    check(expected, lean())
    smallest = peak(lean)
    yield Row(f"{kind} product, hodiff", problem.name, cost(plain))
    yield Row(f"{kind} product, hodiff, checkpoint=", problem.name, cost(lean))
    for name in names:  # whose first product by fused attention raises
        call = in_matrix_products(lambda name=name: multiply(theirs(problem, name, kind), v))
        found = torch.as_tensor(call())
        off = float((found - expected).norm() / expected.norm())
        right = "" if off < 1e-3 else f"wrong by {100 * off:.1g} %; "
        share = smallest / peak(call)
        measured = f"{right}{cost(call)}; hodiff's, checkpoint=, is {share:.2f} of its peak"
        subject = f"{kind} product, {name}, attention by matrix products"
        yield Row(subject, problem.name, measured, "at most 0.5", share <= 0.5)


def eigenvalues(problem: Problem, names: list[str]) -> Iterator[Row]:
    """The three largest of the Gauss-Newton matrix; a peak is of PyTorch's tensors,
    without SciPy's arrays.
    """
    routes: dict[str, Callable[[], str]] = {
        "hodiff": partial(of_hodiff, problem),
        "hodiff, checkpoint=, basis=10": partial(of_hodiff, problem, basis=10, **BLOCKS),
    }
    # a search by hessian-eigenthings took more than 18 GiB, and was ended
    if "curvlinops" in names:
        routes["curvlinops, attention by matrix products"] = partial(of_curvlinops, problem)
    for name, call in routes.items():
        start = time.thread_time()
        with LiveBytes() as live:
            found = call()
        measured = f"{found}; {time.thread_time() - start:.0f} s, {mib(live.peak)}"
        yield Row(f"three eigenvalues of Gauss-Newton, {name}", problem.name, measured)


def of_hodiff(problem: Problem, basis: int | None = None, **options: Any) -> str:
    torch.manual_seed(0)
    found = hodiff.eigsh(
        ours(problem, "Gauss-Newton", **options), EIGENVALUES, rtol=TOLERANCE, basis=basis
    )
    return told(
        found.value.tolist(), f"{found.products} products, converged: {bool(found.converged)}"
    )


def of_curvlinops(problem: Problem) -> str:
    from scipy.sparse.linalg import eigsh

    operator = theirs(problem, "curvlinops", "Gauss-Newton").to_scipy()
    with matrix_products():
        values = eigsh(
            operator, k=EIGENVALUES, which="LA", tol=TOLERANCE, return_eigenvectors=False
        )
    return told(values.tolist(), "converged: True")


def told(values: list[float], text: str) -> str:
    return f"{', '.join(f'{value:.3g}' for value in sorted(values, reverse=True))} ({text})"


def ours(problem: Problem, kind: str, **options: Any) -> Any:
    if kind == "Hessian":
        return hodiff.HessianOperator(problem.loss, problem.model, **options)
    data = [(problem.inputs, problem.targets)]
    return hodiff.GaussNewtonOperator(
        lambda model, batch: model(batch[0]),
        nn.CrossEntropyLoss(),
        problem.model,
        data=data,
        **options,
    )


def theirs(problem: Problem, name: str, kind: str) -> Any:
    if name == "curvlinops":
        operator = {"Hessian": "HessianLinearOperator", "Gauss-Newton": "GGNLinearOperator"}[kind]
        return curvlinops(module("curvlinops"), problem, operator)
    if kind == "Hessian":
        return eigenthings(problem)
    peer, loss = module("hessian_eigenthings"), nn.CrossEntropyLoss()
    data = [(problem.inputs, problem.targets)]
    return peer.GGNOperator(
        problem.model, data, peer.supervised_forward, peer.supervised_loss_of_output(loss)
    )


def multiply(operator: Any, v: Tensor) -> Any:
    return operator.matvec(v) if hasattr(operator, "matvec") else operator @ v


def matrix_products() -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.MATH)


def in_matrix_products(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with matrix_products():
            return call()

    return run


def cost(call: Callable[[], object]) -> str:
    """The processor's time of a call, and its peak in another."""
    call()
    start = time.thread_time()
    call()
    return f"{time.thread_time() - start:.1f} s, {mib(peak(call))}"
