"""Small calls in a process that has made an optimizer, as every training loop has: what the
interpreter costs.

An optimizer loads Dynamo and DTensor, after which each call has more to switch and to ask. Beside
each function stands the same by hand, or the fastest of PyTorch's own.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import functional
from torch.func import functional_call, vmap

import hodiff
from benchmarks.bilevel import by_conjugate_gradients, ridge
from benchmarks.models import tiny
from benchmarks.table import Row
from benchmarks.timing import instructions, quick_ratio, race, under_valgrind

Call = Callable[[], object]


class Case(NamedTuple):
    """A call, the same by hand, and how many times as long it may take."""

    ours: Call
    by_hand: Call
    bar: float | None = None


def rows(quick: bool) -> Iterator[Row]:
    _as_in_training()
    printed = None if quick else under_valgrind(__name__)
    counts = json.loads(printed) if printed else {}
    for name, case in cases().items():
        times = race(
            {"ours": case.ours, "by hand": case.by_hand}, rounds=9 if quick else 300, least=5e-4
        )
        found = quick_ratio(times, "ours", "by hand")
        ours, theirs = (min(times[who]) * 1e6 for who in ("ours", "by hand"))
        measured = f"{found:.2f}; {ours:.0f} and {theirs:.0f} us"
        met = None if case.bar is None else found <= case.bar
        if name in counts:
            measured += f"; of instructions {counts[name][0] / counts[name][1]:.2f}"
        yield Row("a small call / by hand", name, measured, f"{case.bar}" if case.bar else "", met)


def _as_in_training() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # loads Dynamo and DTensor
    torch.manual_seed(0)


def cases() -> dict[str, Case]:
    return {
        **first_derivatives(),
        **second_derivatives(),
        **of_modules(),
        **penalties(),
        **laplacians(),
        **through_steps(),
        **elementwise(),
        **several_gradients(),
        **eigenvalues(),
    }


def network(*widths: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), act())]
    return nn.Sequential(*layers[:-1])


def first_derivatives() -> dict[str, Case]:
    x, v, u = torch.randn(10), torch.randn(10), torch.randn(10)

    def leaf() -> Tensor:
        return x.detach().requires_grad_()

    def gradient() -> object:
        point = leaf()
        return torch.autograd.grad(tiny(point), point)[0]

    def value_and_gradient() -> object:
        point = leaf()
        value = tiny(point)
        return value.detach(), torch.autograd.grad(value, point)[0]

    def pulled() -> object:
        point = leaf()
        return torch.autograd.grad(point.sin(), point, u)[0]

    def pushed() -> object:
        point = leaf()
        y = point.sin()
        w = torch.ones_like(y, requires_grad=True)
        (back,) = torch.autograd.grad(y, point, w, create_graph=True)
        return torch.autograd.grad(back, w, v)[0]

    return {
        "grad, 10 variables": Case(lambda: hodiff.grad(tiny, x), gradient, 2.0),
        "value_and_grad, 10 variables": Case(
            lambda: hodiff.value_and_grad(tiny, x), value_and_gradient, 2.0
        ),
        "vjp, sin of 10": Case(lambda: hodiff.vjp(torch.sin, x, u), pulled),
        "jvp, sin of 10": Case(lambda: hodiff.jvp(torch.sin, x, v), pushed),
    }


def second_derivatives() -> dict[str, Case]:
    x, v = torch.randn(10), torch.randn(10)

    def product() -> object:
        point = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(tiny(point), point, create_graph=True)
        return torch.autograd.grad(gradient, point, v)[0]

    def dense(n: int) -> Case:
        y = torch.randn(n)
        return Case(
            lambda: hodiff.hessian(tiny, y),
            lambda: functional.hessian(tiny, y, vectorize=True),
            1.0,
        )

    found = {
        f"hessian, {n} variables / functional.hessian(vectorize)": dense(n) for n in (3, 10, 50)
    }
    return {"hvp, 10 variables": Case(lambda: hodiff.hvp(tiny, x, v), product, 1.7), **found}


def of_modules() -> dict[str, Case]:
    model, inputs = network(4, 16, 1), torch.randn(16, 4)
    leaves = list(model.parameters())
    v = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    vectors = list(v.values())

    def loss(model: nn.Module) -> Tensor:
        return model(inputs).square().mean()

    def product() -> object:
        return torch.autograd.grad(
            torch.autograd.grad(loss(model), leaves, create_graph=True), leaves, vectors
        )

    H = hodiff.HessianOperator(loss, model)
    kept = torch.autograd.grad(loss(model), leaves, create_graph=True)
    cached = lambda: torch.autograd.grad(kept, leaves, vectors, retain_graph=True)  # noqa: E731
    gradient = lambda: torch.autograd.grad(loss(model), leaves)  # noqa: E731
    three, wide = network(32, 32, 32, 1), torch.randn(16, 32)
    of_three, parameters = lambda m: m(wide).square().mean(), list(three.parameters())
    deeper = lambda: torch.autograd.grad(of_three(three), parameters)  # noqa: E731
    return {
        "grad, module": Case(lambda: hodiff.grad(loss, model), gradient, 2.0),
        "grad, module of three layers": Case(lambda: hodiff.grad(of_three, three), deeper, 2.2),
        "hvp, module": Case(lambda: hodiff.hvp(loss, model, v), product, 1.5),
        "H @ v, cached": Case(lambda: H @ v, cached, 1.5),
    }


def penalties() -> dict[str, Case]:
    critic, samples = network(4, 16, 16, 1), torch.randn(16, 4)
    leaves = list(critic.parameters())

    def by_hand() -> Tensor:
        x = samples.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    ours = lambda: hodiff.gradient_penalty(critic, samples, target=1.0)  # noqa: E731
    after = lambda f: lambda: torch.autograd.grad(f(), leaves, allow_unused=True)  # noqa: E731
    return {
        "gradient_penalty": Case(ours, by_hand),
        "gradient_penalty and its backward": Case(after(ours), after(by_hand), 1.6),
    }


def laplacians() -> dict[str, Case]:
    net, points = network(2, 32, 32, 1), torch.randn(1000, 2)
    leaves = list(net.parameters())

    def by_hand(train: bool) -> Tensor:
        x = points.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        parts = [
            torch.autograd.grad(gradient[:, i].sum(), x, create_graph=train, retain_graph=True)[0][
                :, i
            ]
            for i in range(2)
        ]
        return parts[0] + parts[1]

    def trained(value: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(value().square().mean(), leaves, allow_unused=True)

    ours = lambda: hodiff.laplacian(net, points, create_graph=False)  # noqa: E731
    training = trained(lambda: hodiff.laplacian(net, points).squeeze(-1))
    return {
        "laplacian, 2-32-32-1, 1,000 points, value": Case(ours, lambda: by_hand(False), 1.1),
        "laplacian, the same, training": Case(training, trained(lambda: by_hand(True)), 0.9),
    }


def through_steps() -> dict[str, Case]:
    model, inputs = network(4, 16, 1), torch.randn(16, 4)
    leaves, rule = list(model.parameters()), hodiff.rules.SGD(lr=0.1)

    def loss(model: nn.Module) -> Tensor:
        return model(inputs).square().mean()

    def of(parameters: dict[str, Any]) -> Tensor:
        return functional_call(model, parameters, (inputs,)).square().mean()

    def unrolled() -> object:
        found = hodiff.unroll(loss, model, rule, 1)
        return torch.autograd.grad(of(found), leaves)

    def by_hand() -> object:
        p = dict(model.named_parameters())
        gradient = torch.autograd.grad(of(p), list(p.values()), create_graph=True)
        moved = {name: part - 0.1 * g for (name, part), g in zip(p.items(), gradient, strict=True)}
        return torch.autograd.grad(of(moved), leaves)

    small = ridge(40, 10)

    def attached() -> object:
        found = hodiff.implicit.argmin(small.f, small.x, args=(small.theta,), rtol=1e-10)
        return torch.autograd.grad(small.outer(found), small.theta)[0]

    return {
        "unroll of one step, and backward": Case(unrolled, by_hand, 1.4),
        "argmin, ridge 40 x 10, and backward": Case(
            attached, lambda: by_conjugate_gradients(small), 1.6
        ),
    }


def elementwise() -> dict[str, Case]:
    net, points = network(1, 32, 32, 32, 1), torch.randn(500, 1)

    def nested(n: int) -> object:
        x = points.detach().requires_grad_()
        y = net(x)
        for order in range(1, n + 1):
            (y,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=order < n)
        return y

    def of_order(n: int) -> Case:
        bar = {1: 1.9, 2: 1.7, 3: 1.5, 4: 0.9}[n]
        return Case(lambda: hodiff.nth_derivative(net, points, n), lambda: nested(n), bar)

    return {f"nth_derivative, n = {n} / nested grad": of_order(n) for n in (1, 2, 3, 4)}


def several_gradients() -> dict[str, Case]:
    model, inputs, labels = network(64, 64, 64, 10), torch.randn(64, 64), torch.randint(10, (64,))
    leaves = list(model.parameters())
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    mapped = vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    batch = inputs, labels
    samples = Case(
        lambda: hodiff.per_sample_grad(losses, model, batch), lambda: mapped(detached, *batch), 1.4
    )

    def heads(count: int) -> list[Tensor]:
        out = model(inputs)
        return [out[:, i].square().mean() for i in range(count)]

    def multi(count: int, release: bool) -> Case:
        def by_hand() -> object:
            found = heads(count)
            kept = [True] * count if not release else [True] * (count - 1) + [False]
            return [
                torch.autograd.grad(one, leaves, retain_graph=keep)
                for one, keep in zip(found, kept, strict=True)
            ]

        return Case(lambda: hodiff.multi_grad(heads(count), model, release=release), by_hand)

    kept = {f"multi_grad, {n} losses, kept": multi(n, False) for n in (2, 8)}
    released = {f"multi_grad, {n} losses, released": multi(n, True) for n in (2, 8)}
    return {"per_sample_grad, 64 samples / vmap(grad)": samples, **kept, **released}


def eigenvalues() -> dict[str, Case]:
    """By SciPy, with products by the same operator: it looks for no multiple eigenvalues,
    and tells no residuals.
    """
    from scipy.sparse.linalg import eigsh

    model, inputs = network(10, 32, 32, 1), torch.randn(64, 10)
    H = hodiff.HessianOperator(lambda m: (m(inputs) - inputs[:, :1]).square().mean(), model)
    A, start = H.to_scipy(), torch.randn(H.shape[0]).numpy()
    tolerance: Any = 1e-4  # SciPy's signature has an integer

    def ours(k: int) -> object:
        return hodiff.eigsh(H, k, rtol=tolerance, generator=torch.Generator().manual_seed(0))

    return {
        f"eigsh, {k} of 1,441 / SciPy's": Case(
            lambda k=k: ours(k), lambda k=k: eigsh(A, k=k, which="LA", tol=tolerance, v0=start)
        )
        for k in (1, 6)
    }


if __name__ == "__main__":  # as `rows` runs it
    _as_in_training()
    print(
        json.dumps(
            {
                name: [instructions(case.ours), instructions(case.by_hand)]
                for name, case in cases().items()
            }
        )
    )
