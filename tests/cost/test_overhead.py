"""Promise 6, the interpreter's part: Python and builtin calls of ours beyond those of the same work by hand.

Time on a shared machine is noise; these counts are the same on every run.  Between large matrix products a call costs
some 1.5 µs, so a hundred of them are 0.15 ms of a step.
``python -m tests.cost.test_overhead [CASE]`` prints where they are made.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from tests.support.calls import Function, by_place, count

BOUNDS = {
    "hvp of a module": (-87, -75),
    "hvp of a tensor": (22, 24),
    "gradient of a module": (48, 60),
    "gradient of a tensor": (33, 35),
    "vjp": (36, 38),
    "cached product": (-25, -25),  # one asks whether a tracer looks on
    "gradient penalty": (184, 193),
    "tall jacobian": (-47, -45),  # one asks for room, one takes a view that tracers follow
    # three ask whether a product has lost a tangent; steps have names of their own; four ask whether processes share
    # the vectors, once in a solution, and how long a process's part of one is
    "three steps of a solve": (420, 420),
    "solution and its backward pass": (475, 477),
}
"""How many; and in a process that has made an optimizer, as every training loop has: that loads Dynamo and DTensor.

Each public call enters by a function that has words for arguments that do not fit. One call asks whether a checkpoint
of the caller's would have what is saved; one of a product, whether its function has operations without second
derivatives.
"""
PLAIN, TRAINING = "plain", "training"
SHOWN = 25
COUNTS = "--counts"


def network() -> nn.Sequential:
    """Six parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def hvp_of_a_module() -> tuple[Function, Function]:
    model, inputs = network(), torch.randn(16, 4)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    vectors = list(v.values())

    def loss(model: nn.Module) -> torch.Tensor:
        return model(inputs).square().mean()

    def by_hand() -> object:
        leaves = list(model.parameters())
        gradient = torch.autograd.grad(loss(model), leaves, create_graph=True)
        return torch.autograd.grad(gradient, leaves, vectors)

    return lambda: hodiff.hvp(loss, model, v), by_hand


def hvp_of_a_tensor() -> tuple[Function, Function]:
    x, v = torch.linspace(-1, 1, 6), torch.ones(6)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).square().sum()

    def by_hand() -> object:
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
        return torch.autograd.grad(gradient, leaf, v)

    return lambda: hodiff.hvp(f, x, v), by_hand


def gradient_of_a_module() -> tuple[Function, Function]:
    model, inputs = network(), torch.randn(16, 4)

    def loss(model: nn.Module) -> torch.Tensor:
        return model(inputs).square().mean()

    return lambda: hodiff.grad(loss, model), lambda: torch.autograd.grad(loss(model), list(model.parameters()))


def gradient_of_a_tensor() -> tuple[Function, Function]:
    x = torch.linspace(-1, 1, 6)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).square().sum()

    def by_hand() -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(f(leaf), leaf)[0]

    return lambda: hodiff.grad(f, x), by_hand


def vjp() -> tuple[Function, Function]:
    x, u = torch.linspace(-1, 1, 6), torch.ones(6)

    def by_hand() -> object:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf.sin(), leaf, u)[0]

    return lambda: hodiff.vjp(torch.sin, x, u), by_hand


def cached_product() -> tuple[Function, Function]:
    model, inputs = network(), torch.randn(16, 4)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    vectors, leaves = list(v.values()), list(model.parameters())

    def loss(model: nn.Module) -> torch.Tensor:
        return model(inputs).square().mean()

    H = hodiff.HessianOperator(loss, model)
    gradient = torch.autograd.grad(loss(model), leaves, create_graph=True)
    return lambda: H @ v, lambda: torch.autograd.grad(gradient, leaves, vectors, retain_graph=True)


def gradient_penalty() -> tuple[Function, Function]:
    critic, samples = network(), torch.randn(16, 4)

    def by_hand() -> object:
        x = samples.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    return lambda: hodiff.gradient_penalty(critic, samples, target=1.0), by_hand


def tall_jacobian() -> tuple[Function, Function]:
    A, x = torch.randn(400, 6), torch.randn(6)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (A @ x).sin()

    def by_hand() -> object:
        leaf = x.detach().requires_grad_()
        y = f(leaf)
        u = torch.ones_like(y).requires_grad_()
        (pulled,) = torch.autograd.grad(y, leaf, u, create_graph=True)
        column = lambda v: torch.autograd.grad(pulled, u, v, retain_graph=True)[0]
        return torch.vmap(column)(torch.eye(6)).T

    return lambda: hodiff.jacobian(f, x), by_hand


def three_steps_of_a_solve() -> tuple[Function, Function]:
    A, b = linear_system()
    operator = hodiff.MatrixOperator(A)

    def by_hand() -> torch.Tensor:
        x, r, d, square = torch.zeros_like(b), b, b, float(b @ b)
        for _ in range(3):
            image = A @ d
            step, before = square / float(d @ image), square
            x, r = torch.add(x, d, alpha=step), torch.add(r, image, alpha=-step)
            square = float(r @ r)
            d = torch.add(r, d, alpha=square / before)
        return x

    return lambda: hodiff.solve(operator, b, iterations=3).value, by_hand


def solution_and_its_backward_pass() -> tuple[Function, Function]:
    """Of a ridge regression of ten unknowns, by its ten steps of conjugate gradients."""
    A, x = linear_system()
    A = A[:10, :10]
    b, theta = A @ x[:10] + x[:10], torch.zeros((), dtype=torch.float64, requires_grad=True)
    x, u = x[:10], torch.linspace(1, 2, 10, dtype=torch.float64)

    def f(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return 0.5 * x @ (A @ x) - b @ x + 0.5 * theta.exp() * x @ x

    def by_hand() -> object:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(f(leaf, theta), leaf, create_graph=True)
        y, r, d, square = torch.zeros_like(u), u, u, u @ u
        for _ in range(10):
            (image,) = torch.autograd.grad(slope, leaf, d, retain_graph=True)
            step, before = square / (d @ image), square
            y, r = y + step * d, r - step * image
            square = r @ r
            d = r + square / before * d
        return torch.autograd.grad(slope, theta, -y)

    def ours() -> object:
        found = hodiff.implicit.argmin(f, x, args=(theta,))
        return torch.autograd.grad(found, theta, u)

    return ours, by_hand


def linear_system() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    factor = torch.randn(20, 20, dtype=torch.float64)
    return factor @ factor.T / 20 + torch.eye(20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)


CASES: dict[str, Callable[[], tuple[Function, Function]]] = {
    "hvp of a module": hvp_of_a_module,
    "hvp of a tensor": hvp_of_a_tensor,
    "gradient of a module": gradient_of_a_module,
    "gradient of a tensor": gradient_of_a_tensor,
    "vjp": vjp,
    "cached product": cached_product,
    "gradient penalty": gradient_penalty,
    "tall jacobian": tall_jacobian,
    "three steps of a solve": three_steps_of_a_solve,
    "solution and its backward pass": solution_and_its_backward_pass,
}


@cache
def counts() -> dict[str, dict[str, tuple[int, int]]]:
    """Ours and by hand, in a process of their own: what other tests have loaded (Dynamo) costs calls to switch off."""
    program = [sys.executable, "-m", "tests.cost.test_overhead", COUNTS]
    root = Path(__file__).parents[2]
    ran = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("how", [PLAIN, TRAINING])
@pytest.mark.parametrize("case", CASES)
def test_calls_beyond_the_same_by_hand(case: str, how: str) -> None:
    found, least = counts()[how][case]
    bound = BOUNDS[case][how == TRAINING]
    print(f"\n{case}, {how}: {found} calls, by hand {least}, overhead {found - least} of {bound}")
    assert found - least <= bound


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_the_same_every_time(case: str) -> None:
    ours, by_hand = CASES[case]()
    assert len({count(ours) for _ in range(3)}) == len({count(by_hand) for _ in range(3)}) == 1


@pytest.mark.parametrize("case", CASES)
def test_ours_and_by_hand_compute_the_same(case: str) -> None:
    ours, by_hand = (torch.utils._pytree.tree_leaves(call()) for call in CASES[case]())
    torch.testing.assert_close(ours, by_hand)


class Operations(TorchDispatchMode):
    """How many operations PyTorch has run."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("method", "bound", "each"), [("cg", 66, 15), ("minres", 88, 19), ("gmres", 101, 24)])
def test_operations_of_a_solve(method: str, bound: int, each: int) -> None:
    """Those of three steps, and of one more; of a single system, whose numbers are Python's own."""
    A, b = linear_system()
    operator = hodiff.MatrixOperator(A)
    numbers = []
    for iterations in (3, 4):
        with Operations() as seen:
            hodiff.solve(operator, b, method=method, iterations=iterations)
        numbers.append(seen.number)
    print(f"\n{method}: {numbers[0]} operations in three steps of {bound}, {numbers[1] - numbers[0]} a step of {each}")
    assert numbers[0] <= bound and numbers[1] - numbers[0] <= each


def test_the_counter_counts() -> None:
    def inner() -> float:
        return abs(-1.0)

    assert count(lambda: [inner() for _ in range(3)]) in (6, 7)  # inner and abs, thrice; a comprehension's frame
    assert count(lambda: None) == 0


def counted() -> dict[str, list[int]]:
    """Of each case, ours and by hand."""
    return {name: [count(call) for call in make()] for name, make in CASES.items()}


def counted_in_both() -> dict[str, dict[str, list[int]]]:
    """All cases before this process has made an optimizer, and after that: nothing unloads Dynamo again."""
    plain = counted()
    if "torch._dynamo" in sys.modules:
        raise RuntimeError("a plain row has loaded Dynamo: the rows after it count what a training loop does")
    torch.optim.SGD(network().parameters())
    return {PLAIN: plain, TRAINING: counted()}


if __name__ == "__main__" and sys.argv[1:] == [COUNTS]:
    print(json.dumps(counted_in_both()))
elif __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        ours, by_hand = CASES[name]()
        print(f"{name}: {count(ours)} calls, by hand {count(by_hand)}")
        for place, times in by_place(ours, within="hodiff").most_common(SHOWN):
            print(f"  {times:5d}  {place}")
