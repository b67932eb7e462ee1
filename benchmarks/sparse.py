"""Sparse Hessians: against the dense one, at scale, and against asdex (JAX)
where that is installed.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import hodiff
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread
from hodiff.sparse import color, plan_hessian, sparsity_pattern

D = torch.float64
Function = Callable[[Any], Any]


def chain(x: Any) -> Any:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def surface(side: int) -> Function:
    def area(x: Any) -> Any:
        u = x.reshape(side, side)
        right, down = u[:-1, 1:] - u[:-1, :-1], u[1:, :-1] - u[:-1, :-1]
        return ((1 + (right**2 + down**2) * side**2) ** 0.5).sum() / side**2

    return area


def arrow(x: Any) -> Any:
    return x[0] * (x[1:] ** 2).sum() + (x[1:] ** 3).sum()


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for n, side in ((500, 22), (2000, 44)):
        for name, f, x in (
            ("chain", chain, torch.rand(n, dtype=D)),
            ("arrow", arrow, torch.rand(n, dtype=D)),
            ("surface", surface(side), torch.rand(side * side, dtype=D)),
        ):
            yield from against_dense(name, f, x, rounds=3 if quick else 15)
    for name, f, x in (
        ("chain", chain, torch.rand(100_000, dtype=D)),
        ("surface", surface(316), torch.rand(316 * 316, dtype=D)),
    ):
        yield from steps(name, f, x, rounds=1 if quick else 5)
    yield large(torch.rand(1_000_000, dtype=D))
    for name, f, n in (("chain", chain, 10_000), ("surface", surface(100), 10_000)):
        yield from against_asdex(name, f, n, rounds=3 if quick else 9)


def against_dense(name: str, f: Function, x: Tensor, rounds: int) -> Iterator[Row]:
    plan = plan_hessian(f, x)
    times = race(
        {
            "dense": lambda: hodiff.hessian(f, x, matrix=True),
            "plan": lambda: plan(x),
            "once": lambda: hodiff.sparse_hessian(f, x),
        },
        rounds=rounds,
    )
    case = f"{name}, n = {x.numel()}"
    yield Row("dense Hessian / prepared plan", case, spread(ratios(times, "dense", "plan"), 1))
    yield Row("dense Hessian / sparse_hessian", case, spread(ratios(times, "dense", "once"), 1))


def steps(name: str, f: Function, x: Tensor, rounds: int) -> Iterator[Row]:
    """Each step by itself; the bar is a second."""
    pattern = sparsity_pattern(f, x)
    plan = plan_hessian(f, x, pattern=pattern)
    case = f"{name}, n = {x.numel()}, {pattern.nnz} entries, {plan.products} colors"
    for step, call in {
        "pattern": lambda: sparsity_pattern(f, x),
        "colors": lambda: color(pattern),
        "evaluation": lambda: plan.values(x),
    }.items():
        seconds = race({step: call}, rounds=rounds, least=0)[step]
        yield Row(f"{step}, seconds", case, spread(seconds), "1", statistics.median(seconds) <= 1)


def large(x: Tensor) -> Row:
    """A million variables, once: pattern and one evaluation."""
    start = time.thread_time()
    pattern = sparsity_pattern(chain, x)
    detected = time.thread_time() - start
    plan = plan_hessian(chain, x, pattern=pattern)
    start = time.thread_time()
    plan.values(x)
    evaluated = time.thread_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    measured = (
        f"pattern {detected:.1f} s, evaluation {evaluated:.2f} s, peak of the process {peak:.1f} "
        "GiB"
    )
    return Row("a million variables", "chain", measured)


def against_asdex(name: str, f: Function, n: int, rounds: int) -> Iterator[Row]:
    """By wall time: XLA has threads of its own.

    No first call is among them: asdex traces and compiles there.
    """
    if find_spec("asdex") is None:
        yield Row("asdex", name, "not installed: pip install asdex")
        return
    import asdex
    import jax

    jax.config.update("jax_enable_x64", True)
    x = torch.rand(n, dtype=D)
    other = jax.numpy.asarray(x.numpy())
    pattern, sparsity = sparsity_pattern(f, x), asdex.hessian_sparsity(f, other)
    plan, coloring = plan_hessian(f, x), asdex.hessian_coloring_from_sparsity(sparsity)
    theirs = jax.jit(asdex.hessian_from_coloring(f, coloring))
    jax.block_until_ready(theirs(other))
    for what, ours, peer in (
        ("pattern", lambda: sparsity_pattern(f, x), lambda: asdex.hessian_sparsity(f, other)),
        (
            "coloring",
            lambda: color(pattern),
            lambda: asdex.hessian_coloring_from_sparsity(sparsity),
        ),
        ("evaluation", lambda: plan.values(x), lambda: jax.block_until_ready(theirs(other))),
    ):
        least = [1e3 * min(wall(call) for _ in range(rounds)) for call in (ours, peer)]
        yield Row(
            f"{what}, ms, hodiff and asdex",
            f"{name}, n = {n}",
            "{:.1f}, {:.1f} (minima)".format(*least),
        )


def wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
