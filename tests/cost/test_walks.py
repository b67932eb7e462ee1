"""How far a reader walks who follows one public call: files and functions of ours that run, and their frames.

The same numbers on every run, on Python 3.11, which counts comprehensions. A bound is what stands, and goes down with
it. The aims: 12 files and 55 functions for hvp of a tensor, 13 and 85 for gradient_penalty, 15 and 85 for laplacian, 20
and 130 for an operator's first product, 10 files for a pass that fails; 60 frames for hvp of a tensor, 95 of a module,
105 for gradient_penalty. One is missed: a first product runs 155 functions. Beside evaluating batches, of which hvp of
a module has 80, it reads what f closes over and the values of the point, counts the bytes that graphs keep, and asks
whether data are batches and how a loss was averaged: each is a promise of its own.
``python -m tests.cost.test_walks [CASE]`` prints the functions, in the order in which they are first called.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.support.calls import Function, walked

BOUNDS = {
    # each public call enters by a function that has words for arguments that do not fit
    "hvp of a tensor": (12, 53, 58),  # one asks whether zeros are no answer
    "hvp of a module": (15, 80, 94),
    "laplacian": (15, 85, 163),  # one asks whether a point is shared by processes
    "gradient penalty": (13, 84, 102),
    # it reads which variables the function names, to compare them later, and whether processes share the point
    "first product": (20, 155, 1314),
    "cached product": (11, 42, 66),
    "failing backward": (10, 110, 450),  # frames: it reads the source of this file
}
"""Files, functions, frames."""
COUNTS = "--counts"


X = torch.linspace(-1, 1, 18).view(6, 3)


def network() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four parameters, and a vector like them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return model, {name: torch.randn_like(p) for name, p in model.named_parameters()}


def loss(model: nn.Module) -> Tensor:
    return model(X).square().mean()


def energy(x: Tensor) -> Tensor:
    return x.pow(3).sum(-1)


@contextmanager
def hvp_of_a_tensor() -> Iterator[Function]:
    yield lambda: hodiff.hvp(energy, X[0], X[1])


@contextmanager
def hvp_of_a_module() -> Iterator[Function]:
    model, v = network()
    yield lambda: hodiff.hvp(loss, model, v)


@contextmanager
def laplacian() -> Iterator[Function]:
    yield lambda: hodiff.laplacian(energy, X)


@contextmanager
def gradient_penalty() -> Iterator[Function]:
    model, _ = network()
    yield lambda: hodiff.gradient_penalty(model, X)


@contextmanager
def first_product() -> Iterator[Function]:
    """Over two batches, by an operator that has computed nothing yet."""
    model, v = network()
    H = hodiff.HessianOperator(lambda model, x: (model(x).square().sum(), len(x)), model, data=[X[:4], X[4:]])
    yield lambda: H @ v


@contextmanager
def cached_product() -> Iterator[Function]:
    model, v = network()
    H = hodiff.HessianOperator(loss, model)
    H @ v
    yield lambda: H @ v


@contextmanager
def failing_backward() -> Iterator[Function]:
    a = torch.rand(4, requires_grad=True)

    def fails() -> None:
        with pytest.raises(RuntimeError, match="second time") as raised:
            second.backward()
        assert "why this Tensor.backward failed" in raised.value.__notes__[0]

    with hodiff.graph.watch():
        b = a**2
        second = b.sum()
        b.mean().backward()
        yield fails


CASES: dict[str, Callable[[], AbstractContextManager[Function]]] = {
    "hvp of a tensor": hvp_of_a_tensor,
    "hvp of a module": hvp_of_a_module,
    "laplacian": laplacian,
    "gradient penalty": gradient_penalty,
    "first product": first_product,
    "cached product": cached_product,
    "failing backward": failing_backward,
}


def measured(case: str) -> dict[str, int]:
    """The second of two that are made anew: the library is warm."""
    with CASES[case]() as function:
        function()
    with CASES[case]() as function:
        return walked(function, Path(hodiff.__file__).parent)


def summed(walk: dict[str, int]) -> tuple[int, int, int]:
    """Files, functions, frames; the frame of a comprehension is one, but no function of its own."""
    files = {place.partition(":")[0] for place in walk}
    functions = [place for place in walk if not place.endswith(("comp>", "<genexpr>"))]
    return len(files), len(functions), sum(walk.values())


@cache
def counts() -> dict[str, list[int]]:
    """In a process of their own: what other tests have loaded (Dynamo) is switched off by calls of ours."""
    program = [sys.executable, "-m", "tests.cost.test_walks", COUNTS]
    root = Path(__file__).parents[2]
    ran = subprocess.run(program, cwd=root, capture_output=True, text=True, check=True, timeout=240)
    return json.loads(ran.stdout)


@pytest.mark.parametrize("case", BOUNDS)
def test_the_walk_is_no_longer_than_it_was(case: str) -> None:
    found = counts()[case]
    print(f"\n{case}: {found} files, functions, frames, of {BOUNDS[case]}")
    assert all(number <= bound for number, bound in zip(found, BOUNDS[case], strict=True)), found


if __name__ == "__main__" and sys.argv[1:] == [COUNTS]:
    print(json.dumps({case: summed(measured(case)) for case in CASES}))
elif __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        walk = measured(case)
        print(f"{case}: {summed(walk)} files, functions, frames")
        for place, times in walk.items():
            print(f"  {times:5d}  {place}")
