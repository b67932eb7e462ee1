"""`hodiff tour`: what the library is for, on one screen; every number is checked as it is printed.

The tour shows what goes wrong elsewhere too, so it is the one place of the library that calls
PyTorch's own second-order routes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.cli import _info
from hodiff.cli._live_bytes import LiveBytes
from hodiff.cli._screen import Screen

HELP = "show what hodiff is for, on one screen; exit with 1 if a number is wrong"

STEPS = 60
DOUBLE = {"dtype": torch.float64}

Loss = Callable[[nn.Module], Tensor]


def configure(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Take the tour; the exit status says whether all numbers were right."""
    screen = Screen()
    screen.title(f"hodiff {_info.version()} with torch {torch.__version__}", "got", "must be")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        second_order(screen)
        source, model, loss = classifier()
        parameters(screen, source, model, loss)
        graphs(screen, model, loss)
    whats_more(screen)
    return screen.end()


def second_order(screen: Screen) -> None:
    """A copied program for "higher-order gradients", and what it should have printed."""
    screen.heading('1  A "second-order gradient" by retain_graph, as often copied: y = x**2, z = y**2, at x = 2')
    x = torch.tensor([2.0], requires_grad=True, **DOUBLE)
    y = x**2
    z = y**2
    z.backward(retain_graph=True)
    screen.check("z.backward(retain_graph=True); x.grad    4 x^3", x.grad.item(), 32, 0)
    x.grad.zero_()
    y.backward(retain_graph=True)
    screen.check("x.grad.zero_(); y.backward(); x.grad     2 x", x.grad.item(), 4, 0, "is dy/dx")
    second = hodiff.nth_derivative(lambda x: (x**2) ** 2, x, 2)
    screen.check("hodiff.nth_derivative(z, x, 2)           12 x^2", second.item(), 48, 1e-12)


def classifier() -> tuple[str, nn.Module, Loss]:
    """A small classifier of handwritten digits, trained a little, and its loss."""
    source, images, digits = data()
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)).double()

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), digits)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    accuracy = (model(images).argmax(1) == digits).double().mean().item()
    return f"{source}, LayerNorm, {STEPS} steps, {accuracy:.0%} right", model, loss


def data() -> tuple[str, Tensor, Tensor]:
    """Images as rows, and their classes: real ones if scikit-learn is there."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        digits = torch.randint(10, (1800,))
        images = torch.randn(10, 64, **DOUBLE)[digits] + 1.5 * torch.randn(1800, 64, **DOUBLE)
        return "1800 generated images (scikit-learn is not installed)", images, digits
    images, digits = load_digits(return_X_y=True)
    return f"{len(images)} handwritten digits", torch.as_tensor(images, **DOUBLE) / 16, torch.as_tensor(digits)


def parameters(screen: Screen, source: str, model: nn.Module, loss: Loss) -> None:
    """A Hessian-vector product in the parameters, against central differences and `torch.func`."""
    screen.heading(f"2  A classifier: {source}")
    vector = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    reference = differences(model, loss, vector)
    curvature = inner(vector, reference)
    routes = {
        "hodiff.hvp(loss, model, v)": hodiff.hvp(loss, model, vector),
        "torch.func.jvp(jacrev(loss), (p,), (v,))": by_torch_func(model, loss, vector),
    }
    for route, product in routes.items():
        error = distance(product, reference) / distance(reference)
        record = screen.check if route.startswith("hodiff") else screen.compare
        record(f"{route}: v'Hv", inner(vector, product), curvature, 1e-6 * abs(curvature))
        record("    error against central differences", error, 0, 1e-6)


def differences(model: nn.Module, loss: Loss, vector: Mapping[str, Tensor], step: float = 1e-4) -> dict[str, Tensor]:
    """The derivative of the gradient along `vector`, by central differences of what `backward()` gives."""

    def gradient_at(shift: float) -> dict[str, Tensor]:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name] + shift * vector[name])
        model.zero_grad()
        loss(model).backward()
        return gradients(model)

    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    up, down = gradient_at(step), gradient_at(-step)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    model.zero_grad()
    return {name: (up[name] - down[name]) / (2 * step) for name in start}


def by_torch_func(model: nn.Module, loss: Loss, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same product as `torch.func.hessian` forms it: forward mode over a batched reverse pass."""
    point = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def of_parameters(point: Mapping[str, Tensor]) -> Tensor:
        return loss(lambda images: torch.func.functional_call(model, point, (images,)))  # type: ignore[arg-type]

    _, product = torch.func.jvp(torch.func.jacrev(of_parameters), (point,), (dict(vector),))
    return product


def graphs(screen: Screen, model: nn.Module, loss: Loss) -> None:
    """Bytes alive before and after a product, given the function and given its value."""
    screen.heading("3  Who builds the graph owns it: bytes of tensors alive")
    vector = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    result = sum(part.nbytes for part in vector.values())  # a product is as large as its vector
    with LiveBytes() as live:
        product = hodiff.hvp(loss, model, vector)
        screen.check("function: after hvp(loss, model, v), the result", live.now, result, 0, f"peak {live.peak:,}")
        del product
        screen.check("function: without the result", live.now, 0, 0, "freed")
        value = loss(model)
        graph = live.now
        product = hodiff.hvp(value, model, vector)
        screen.check("tensor: after hvp(value, model, v), beside result", live.now - result, graph, 0, "your graph stays")
        value.backward()
        error = distance(gradients(model), hodiff.grad(loss, model))
        screen.check("tensor: value.backward() still works; its error", error, 0, 1e-12)
        model.zero_grad()
        del product
        screen.check("tensor: after that, the value alone", live.now, value.nbytes, 0, "freed")


def whats_more(screen: Screen) -> None:
    """Where to read on."""
    screen.heading("4  More")
    for what, page in MAP.items():
        screen.say(f"{what:<68}{page}")


MAP = {
    "which of them do I need?": "docs/choose.md",
    "grad jacobian jvp vjp hvp hessian hessian_diagonal cross_hessian": "docs/api/calculus.md",
    "nth_derivative, derivatives; what retain_graph is not": "docs/recipes/second-order.md",
    "tensors, containers, modules, select(model, 'head.*')": "docs/api/where.md",
    "check_derivatives(f, x): are those of your own function right?": "docs/api/verify.md",
    "which graph is built, freed, kept; create_graph": "docs/explain/graphs.md",
    "which second derivatives PyTorch gets wrong, and what hodiff does": "docs/explain/correctness.md",
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What `backward()` left in the parameters."""
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The inner product of two dicts by name."""
    return sum((a[name] * b[name]).sum().item() for name in a)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor] | None = None) -> float:
    """The Euclidean norm of a difference (of `a` itself, without `b`)."""
    difference = a if b is None else {name: a[name] - b[name] for name in a}
    return inner(difference, difference) ** 0.5
