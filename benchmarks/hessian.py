"""Dense Hessians against the stock routes of PyTorch."""

import statistics
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import hodiff
from benchmarks.models import dense, network_of_input
from benchmarks.table import Row
from benchmarks.timing import best, race, ratios, spread

STOCK = ["torch.func.hessian", "jacrev(jacrev)", "functional.hessian(vectorize)"]


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for n in (50, 300, 1000):
        rounds = {50: 31, 300: 15, 1000: 7}[n] if not quick else 3
        for name, f in {"log-sum-exp": dense(n), "MLP of its input": network_of_input(n)}.items():
            x = torch.randn(n)
            field = contenders(f, x)
            heat = race(field, rounds=2)
            fastest = best(heat, STOCK)
            near = [route for route in STOCK if min(heat[route]) < 2 * min(heat[fastest])]
            times = race({route: field[route] for route in ("hodiff", *near)}, rounds=rounds)
            fastest = best(times, near)
            found = ratios(times, "hodiff", fastest)
            ours, theirs = (statistics.median(times[key]) * 1e3 for key in ("hodiff", fastest))
            measured = f"{spread(found)}; {ours:.2f} ms, {fastest} {theirs:.2f}"
            met = statistics.median(found) <= 1
            yield Row(
                "hessian / fastest stock route", f"{name}, n = {n}", measured, "1", met, times
            )


def contenders(f: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Callable[[], object]]:
    return {
        "hodiff": lambda: hodiff.hessian(f, x),
        "torch.func.hessian": lambda: torch.func.hessian(f)(x),
        "jacrev(jacrev)": lambda: torch.func.jacrev(torch.func.jacrev(f))(x),
        "functional.hessian(vectorize)": lambda: quietly(
            lambda: torch.autograd.functional.hessian(f, x, vectorize=True)
        ),
    }


def quietly(call: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()
