"""`hodiff tour`: what the library is for, on one screen; every number of hodiff's is checked as it
is printed.

The tour shows what goes wrong elsewhere too, so it is the one place of the library that calls
PyTorch's own second-order routes.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff._core import _settings
from hodiff.curvature._memory import LiveBytes

HELP = "show what hodiff is for, on one screen; exit with 1 if a number is wrong"

STEPS = 15
DOUBLE = torch.float64

Named = Mapping[str, Tensor]
Loss = Callable[[nn.Module], Tensor]


def run(options: argparse.Namespace) -> int:
    """Take the tour; the exit status says whether all numbers were right."""
    screen = Screen()
    screen.line(f"hodiff {hodiff.__version__} with torch {torch.__version__}", "got", "must be")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        second_order(screen)
        source, model, loss = classifier()
        parameters(screen, source, model, loss)
        graphs(screen, model, loss)
    return screen.end()


def second_order(screen: Screen) -> None:
    """A copied program for "higher-order gradients", and what it should have printed."""
    print(
        '\n1  A "second-order gradient" by retain_graph, as often copied: y = x**2, z = y**2, '
        "at x = 2"
    )
    x: Any = torch.tensor([2.0], requires_grad=True, dtype=DOUBLE)
    y = x**2
    z = y**2
    z.backward(retain_graph=True)
    screen.compare("z.backward(retain_graph=True); x.grad     4 x^3", x.grad.item(), 32, 0)
    x.grad.zero_()
    y.backward(retain_graph=True)
    screen.compare(
        "x.grad.zero_(); y.backward(); x.grad     2 x", x.grad.item(), 4, 0, "y', not z''"
    )
    second: Tensor = hodiff.nth_derivative(lambda x: (x**2) ** 2, x, 2)
    screen.check("hodiff.nth_derivative(z, x, 2)           12 x^2", second.item(), 48, 1e-12)


def classifier() -> tuple[str, nn.Module, Loss]:
    """A small classifier of handwritten digits, trained a little, and its loss."""
    source, images, digits = data()
    model = nn.Sequential(
        nn.Linear(64, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 10)
    ).double()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), digits)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    accuracy = (model(images).argmax(1) == digits).double().mean().item()
    return f"{source}, with LayerNorm, {accuracy:.0%} right", model, loss


def data() -> tuple[str, Tensor, Tensor]:
    """Images as rows, and their classes: real ones if scikit-learn is there."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        digits = torch.randint(10, (1800,))
        images = torch.randn(10, 64, dtype=DOUBLE)[digits] + 1.5 * torch.randn(
            1800, 64, dtype=DOUBLE
        )
        return "1800 generated images (scikit-learn is not installed)", images, digits
    images, digits = load_digits(return_X_y=True)
    return (
        f"{len(images)} handwritten digits",
        torch.as_tensor(images, dtype=DOUBLE) / 16,
        torch.as_tensor(digits),
    )


def parameters(screen: Screen, source: str, model: nn.Module, loss: Loss) -> None:
    """Second and third derivatives in the parameters, and two of PyTorch's own routes to each."""
    print(f"\n2  A classifier of {source}")
    print("   relative errors, against central differences of loss.backward(), in float64")
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    length = distance(vector)
    vector = {name: part / length for name, part in vector.items()}
    second, third = differences(model, loss, vector)

    def curvature(model: nn.Module) -> Tensor:
        return inner(vector, hodiff.hvp(loss, model, vector))

    again = by_hand(model, loss, vector)
    forward = by_torch_func(model, loss, vector)
    screen.check(
        "H v: hodiff.hvp(loss, model, v)", error(hodiff.hvp(loss, model, vector), second), 0, 1e-6
    )
    screen.compare("H v: autograd.grad, twice", error(again[0], second), 0, 1e-6)
    screen.compare("H v: torch.func.jvp(jacrev(loss), ...)", error(forward[0], second), 0, 1e-6)
    screen.check(
        "gradient of v'Hv: hodiff.grad(v'hvp, model)",
        error(hodiff.grad(curvature, model), third),
        0,
        1e-6,
    )
    screen.compare("gradient of v'Hv: autograd.grad, three times", error(again[1], third), 0, 1e-6)
    screen.compare("gradient of v'Hv: torch.func.grad(v'jvp)", error(forward[1], third), 0, 1e-6)


def differences(
    model: nn.Module, loss: Loss, vector: Named, step: float = 1e-2
) -> tuple[Named, Named]:
    """First and second derivative of the gradient along `vector`:
    five-point differences of what `backward()` gives.
    """
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    at = {}
    for multiple in (-2, -1, 1, 2, 0):  # the last one leaves the parameters as they were
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name] + multiple * step * vector[name])
        loss(model).backward()
        at[multiple] = gradients(model)
        model.zero_grad()

    def combine(weights: Mapping[int, float]) -> Named:
        return {
            name: sum(weight * at[multiple][name] for multiple, weight in weights.items())
            for name in start
        }  # type: ignore[misc]

    first = {-2: 1, -1: -8, 1: 8, 2: -1}
    second = {-2: -1, -1: 16, 0: -30, 1: 16, 2: -1}
    return (
        combine({multiple: weight / (12 * step) for multiple, weight in first.items()}),
        combine({multiple: weight / (12 * step**2) for multiple, weight in second.items()}),
    )


def by_torch_func(model: nn.Module, loss: Loss, vector: Named) -> tuple[Named, Named]:
    """H v as `torch.func.hessian` forms it, forward mode over a batched reverse pass;
    and the gradient of v'Hv.
    """
    point = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_parameters(point: Named) -> Tensor:
        return loss(lambda images: torch.func.functional_call(model, point, (images,)))  # type: ignore[arg-type]

    def product(point: Named) -> Named:
        return torch.func.jvp(torch.func.jacrev(of_parameters), (point,), (dict(vector),))[1]

    with warnings.catch_warnings():  # 2.14, 2.15: PyTorch deprecates what it calls there itself
        warnings.filterwarnings("ignore", r".*torch\.jit", FutureWarning)
        return product(point), torch.func.grad(lambda point: inner(vector, product(point)))(point)


def by_hand(model: nn.Module, loss: Loss, vector: Named) -> tuple[Named, Named]:
    """H v and the gradient of v'Hv, by reverse passes through PyTorch's own layer norm."""
    names, leaves = zip(*model.named_parameters(), strict=True)
    vectors = [vector[name] for name in names]
    gradient = torch.autograd.grad(loss(model), leaves, create_graph=True)
    product = torch.autograd.grad(gradient, leaves, vectors, create_graph=True)
    third = torch.autograd.grad(product, leaves, vectors)
    return dict(zip(names, (part.detach() for part in product), strict=True)), dict(
        zip(names, third, strict=True)
    )


def graphs(screen: Screen, model: nn.Module, loss: Loss) -> None:
    """Bytes alive before and after a product, given the function and given its value."""
    print("\n3  Who builds the graph owns it: bytes of tensors alive")
    vector = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    result = sum(part.nbytes for part in vector.values())  # a product is as large as its vector
    with _settings.on(LiveBytes()) as live:
        product = hodiff.hvp(loss, model, vector)
        screen.check(
            "function: after hvp(loss, model, v), the result",
            live.now,
            result,
            0,
            f"peak {live.peak:,}",
        )
        del product
        screen.check("function: without the result", live.now, 0, 0, "freed")
        value = loss(model)
        graph = live.now
        product = hodiff.hvp(value, model, vector)
        screen.check(
            "tensor: after hvp(value, model, v), beside result",
            live.now - result,
            graph,
            0,
            "graph kept",
        )
        value.backward()
        off = error(gradients(model), hodiff.grad(loss, model))
        screen.check("tensor: value.backward() still works; its error", off, 0, 1e-12)
        model.zero_grad()
        del product
        screen.check("tensor: after that, the value alone", live.now, value.nbytes, 0, "freed")


def gradients(model: Any) -> Named:
    """The gradients that `backward()` left in the parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def inner(a: Named, b: Named) -> Tensor:
    """The inner product of two vectors given by name."""
    return sum((a[name] * part).sum() for name, part in b.items())  # type: ignore[return-value]


def distance(a: Named, b: Named | None = None) -> float:
    """The Euclidean norm of a difference (of `a` itself, without `b`)."""
    parts = a.values() if b is None else [a[name] - b[name] for name in a]
    return sum(part.square().sum().item() for part in parts) ** 0.5


def error(got: Named, expected: Named) -> float:
    """The relative error of a vector."""
    return distance(got, expected) / distance(expected)


# --- what a demonstration prints: headings, plain lines, and numbers that are checked as they are
# printed


class Screen:
    """Prints aligned lines, and remembers whether a number was wrong.

    Attributes:
        passed: How many checks have passed.
        failed: How many have not.
    """

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(
        self, label: str, got: float, expected: float, tolerance: float, remark: str = ""
    ) -> None:
        """A number and what it must be; `FAILED` where they differ by more than `tolerance`."""
        right = abs(got - expected) <= tolerance
        self.passed += right
        self.failed += not right
        self.line(f"   {label}", number(got), number(expected), "ok" if right else "FAILED", remark)

    def compare(
        self, label: str, got: float, expected: float, tolerance: float, remark: str = ""
    ) -> None:
        """A number that is not ours, and what it should be: said,
        but neither a check nor a failure of this program.
        """
        right = abs(got - expected) <= tolerance
        verdict = ("right", remark) if right else ("wrong", "silently")
        self.line(f"   {label}", number(got), number(expected), *verdict)

    def end(self) -> int:
        """The verdict, and the exit status."""
        print(
            f"\n{self.failed} of hodiff's numbers FAILED."
            if self.failed
            else f"\n{self.passed} of hodiff's numbers checked."
        )
        return 1 if self.failed else 0

    @staticmethod
    def line(label: str, got: str, expected: str, state: str = "", remark: str = "") -> None:
        """A label, and what stands in the columns beside it."""
        print(f"{label:<51}{got:>9}{expected:>10}  {state:<7}{remark}".rstrip())


def number(value: float) -> str:
    """A number in at most 11 characters: small ones are errors, where two digits tell enough."""
    if math.isfinite(value) and value == int(value) and abs(value) < 10**8:
        return f"{int(value):,}"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.6g}"
