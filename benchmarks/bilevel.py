"""Through solutions and through optimizers: against loops by hand, and against TorchOpt and higher
where installed.

Both are in the extra `bench`; their rows say so where they are absent.
"""

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread
from hodiff.curvature._memory import LiveBytes
from hodiff.implicit import argmin

D = torch.float64
RTOL = 1e-8


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    for problem in (ridge(400, 100), ridge(2000, 500), ridge(4000, 2000)):
        yield from hypergradients(problem, 3 if quick else (9 if problem.x.numel() > 1000 else 41))
    yield solver_memory()
    for sizes, rule, steps in (
        ((16, 32, 64), "SGD", 50),
        ((16, 32, 64), "Adam", 50),
        ((64, 256, 256), "SGD", 10),
    ):
        yield from loops(Unrolled(*sizes, rule), steps, 3 if quick else 15)
    for steps, bar in ((100, 0.2), (400, 0.1)):
        yield segments(Unrolled(16, 32, 64, "SGD"), steps, bar)
    yield from few_shots(3 if quick else 11)
    for name, net, images in (("MLP", MixedLayers(256), 256), ("CNN", MixedConvolutions(16), 64)):
        yield from crossed(name, net, torch.randn(images, 1, 8, 8), 3 if quick else 9)


def peer(name: str) -> Any:
    """A peer, or None where it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def off(found: object, expected: object) -> float:
    """The largest relative difference among some tensors."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))  # type: ignore[call-overload]


def below(found: list[float], bar: float) -> bool:
    return statistics.median(found) <= bar


# --- solutions ------------------------------------------------------------------------------------


class Ridge(NamedTuple):
    name: str
    f: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    theta: Tensor
    weights: Tensor

    def outer(self, x: Tensor) -> Tensor:
        return (x**3 * self.weights).sum()


def ridge(rows: int, columns: int) -> Ridge:
    A, y = torch.randn(rows, columns, dtype=D), torch.randn(rows, dtype=D)
    theta = 3 + 0.3 * torch.randn(columns, dtype=D)
    x = torch.linalg.solve(A.T @ A + torch.diag(theta.exp()), A.T @ y)
    f = lambda x, t: 0.5 * (A @ x - y).square().sum() + 0.5 * (t.exp() * x * x).sum()  # noqa: E731
    return Ridge(
        f"ridge {rows} x {columns}", f, x, theta.requires_grad_(), torch.randn(columns, dtype=D)
    )


def hypergradients(problem: Ridge, rounds: int) -> Iterator[Row]:
    """A gradient through a solution; and with a product with the Hessian."""
    f, x, theta, weights = problem.f, problem.x, problem.theta, problem.weights

    def ours() -> Tensor:
        found = argmin(f, x, args=(theta,), rtol=RTOL)
        return torch.autograd.grad(problem.outer(found), theta)[0]

    def second() -> Tensor:
        outer = lambda t: problem.outer(argmin(f, x, args=(t,), rtol=RTOL, order=2))  # noqa: E731
        return hodiff.hvp(outer, theta, weights)

    contenders = {
        "ours": ours,
        "by hand": lambda: by_conjugate_gradients(problem),
        "second": second,
    }
    torchopt = peer("torchopt")
    if torchopt is not None:
        solver = torchopt.diff.implicit.custom_root(
            torch.func.grad(f, argnums=0),
            argnums=1,
            solve=torchopt.linear_solve.solve_cg(rtol=RTOL),
        )(lambda start, t: x)
        contenders["TorchOpt"] = lambda: torch.autograd.grad(
            problem.outer(solver(x, theta)), theta
        )[0]
    error = max(
        off([call()], [by_conjugate_gradients(problem)])
        for name, call in contenders.items()
        if name[0] != "s"
    )
    assert error < 1e-6, error
    times = race(contenders, rounds=rounds)
    found = ratios(times, "ours", "by hand")
    measured = f"{spread(found)}; {statistics.median(times['ours']) * 1e3:.1f} ms"
    yield Row(
        "argmin and backward / conjugate gradients by hand",
        problem.name,
        measured,
        "1.2",
        below(found, 1.2),
    )
    found = ratios(times, "second", "ours")
    yield Row(
        "hvp, its gradient included / gradient",
        problem.name,
        spread(found),
        "4.2",
        below(found, 4.2),
    )
    if torchopt is None:
        yield Row("argmin and backward / TorchOpt", problem.name, "torchopt is not installed")
        return
    found = ratios(times, "ours", "TorchOpt")
    yield Row("argmin and backward / TorchOpt", problem.name, spread(found), "1", below(found, 1))


def by_conjugate_gradients(problem: Ridge) -> Tensor:
    """As in hypertorch: a graph of the inner gradient, products through it, one pass;
    nothing is checked.
    """
    w = problem.x.detach().requires_grad_()
    (b,) = torch.autograd.grad(problem.outer(w), w)
    (slope,) = torch.autograd.grad(problem.f(w, problem.theta), w, create_graph=True)
    u, r = torch.zeros_like(b), b
    d, size = r, r @ r
    stop = RTOL**2 * size
    while size > stop:
        (image,) = torch.autograd.grad(slope, w, d, retain_graph=True)
        step = size / (d @ image)
        u, r = u + step * d, r - step * image
        size, before = r @ r, size
        d = r + size / before * d
    return torch.autograd.grad(slope, problem.theta, -u)[0]


def solver_memory() -> Row:
    """Peak bytes of solving, attaching and the backward pass."""
    f, x, theta, weights = ridge(400, 100)[1:]

    def peak(steps: int) -> int:
        with LiveBytes() as live:
            found = x + 1
            with torch.no_grad():
                for _ in range(steps):
                    found = found - 1e-3 * hodiff.grad(f, found, args=(theta,))
            attached = argmin(f, found, args=(theta,), gradient_tol=float("inf"))
            torch.autograd.grad((attached**3 * weights).sum(), theta)
        return live.peak

    few, many = peak(10), peak(1000)
    return Row(
        "peak bytes, a solver of 1000 steps / of 10",
        "ridge 400 x 100",
        f"{many / few:.3f}",
        "1",
        many <= few,
    )


# --- steps ----------------------------------------------------------------------------------------


class Unrolled:
    """A small network, weights of its samples and a learning rate; and the loop by hand."""

    def __init__(self, inputs: int, width: int, samples: int, rule: str) -> None:
        self.name = f"{rule}, {inputs}-{width}-1, {samples} samples"
        self.model = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1))
        self.X, self.y = torch.randn(samples, inputs), torch.randn(samples, 1)
        self.weights = torch.ones(samples, requires_grad=True)
        self.lr = torch.tensor(0.05, requires_grad=True)
        self.wheres = [self.weights, self.lr, *self.model.parameters()]
        rules = {
            "SGD": hodiff.rules.SGD(lr=self.lr, momentum=0.9),
            "Adam": hodiff.rules.Adam(lr=self.lr),
        }
        self.rule, self.update = rules[rule], getattr(self, rule)

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        return (self.weights[:, None] * (model(self.X) - self.y).square()).mean()

    def at(self, parameters: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda X: functional_call(self.model, parameters, (X,))

    def ours(self, steps: int, **options: Any) -> list[Tensor]:
        found = hodiff.unroll(self.loss, self.model, self.rule, steps, **options)
        return list(torch.autograd.grad(self.loss(self.at(found)), self.wheres))

    def by_hand(self, steps: int) -> list[Tensor]:
        p, state = dict(self.model.named_parameters()), {}
        for step in range(1, steps + 1):
            grads = torch.autograd.grad(self.loss(self.at(p)), list(p.values()), create_graph=True)
            p = {
                name: self.update(name, p[name], g, state, step)
                for name, g in zip(p, grads, strict=True)
            }
        return list(torch.autograd.grad(self.loss(self.at(p)), self.wheres))

    def SGD(self, name: str, p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
        state[name] = torch.add(g, state[name], alpha=0.9) if name in state else g
        return p - self.lr * state[name]

    def Adam(self, name: str, p: Tensor, g: Tensor, state: dict[str, Any], step: int) -> Tensor:
        mean, square = state.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
        mean, square = torch.lerp(mean, g, 0.1), torch.addcmul(square * 0.999, g, g, value=0.001)
        state[name] = mean, square
        return p - self.lr / (1 - 0.9**step) * (
            mean / (square.sqrt() / (1 - 0.999**step) ** 0.5 + 1e-8)
        )


def loops(problem: Unrolled, steps: int, rounds: int) -> Iterator[Row]:
    contenders = {"ours": lambda: problem.ours(steps), "by hand": lambda: problem.by_hand(steps)}
    error = off(contenders["ours"](), contenders["by hand"]())
    assert error < 1e-4, error
    case = f"{problem.name}, {steps} steps"
    times = race(contenders, rounds=rounds)
    found = ratios(times, "ours", "by hand")
    measured = (
        f"{spread(found)}; {statistics.median(times['by hand']) / steps * 1e3:.1f} ms a step by "
        "hand"
    )
    yield Row("unroll and backward / the loop by hand", case, measured, "1.1", below(found, 1.1))
    ratio = peak(contenders["ours"]) / peak(contenders["by hand"])
    yield Row("peak bytes of unroll / the loop by hand", case, f"{ratio:.2f}", "1.1", ratio <= 1.1)


def segments(problem: Unrolled, steps: int, bar: float) -> Row:
    ratio = peak(lambda: problem.ours(steps, segments="auto")) / peak(lambda: problem.ours(steps))
    case = f"{problem.name}, {steps} steps"
    return Row('peak bytes, segments="auto" / None', case, f"{ratio:.3f}", f"{bar}", ratio <= bar)


def peak(call: Callable[[], object]) -> int:
    with LiveBytes() as live:
        call()
    return live.peak


# --- higher's example -----------------------------------------------------------------------------


def few_shots(rounds: int) -> Iterator[Row]:
    """Few-shot classification by five steps from a common start,
    as in the example that comes with higher.
    """
    case = "four tasks of five ways and one shot, 28 x 28, three blocks of 64 channels"
    higher = peer("higher")
    if higher is None:
        yield Row("unroll / higher", case, "higher is not installed")
        return
    for dtype in (D, torch.float32):
        torch.manual_seed(0)
        tasks = Tasks(dtype)
        if dtype is D:
            # of biases before a batch norm it is rounding's
            error = off(tasks.ours()[::2], tasks.theirs(higher)[::2])
            yield Row(
                "unroll - higher, relative",
                f"{case}, float64",
                f"{error:.0e}",
                "1e-12",
                error <= 1e-12,
            )
        else:
            times = race(
                {"ours": tasks.ours, "higher": partial(tasks.theirs, higher)}, rounds=rounds
            )
            found = ratios(times, "ours", "higher")
            yield Row(
                "unroll / higher", f"{case}, float32", spread(found), "1.1", below(found, 1.1)
            )


class Tasks:
    """Four tasks, a network, and the gradient by its parameters of the sum of
    losses after five steps.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.net, self.labels = blocks(64).to(dtype), torch.arange(5)
        shape = (4, 5, 1, 28, 28)
        self.images = [
            *zip(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype), strict=True)
        ]
        self.before = {name: value.clone() for name, value in self.net.state_dict().items()}

    def ours(self) -> list[Tensor]:
        for support, query in self.images:
            inner = lambda m, x: F.cross_entropy(m(x), self.labels)  # noqa: E731
            p = hodiff.unroll(inner, self.net, hodiff.rules.SGD(lr=0.1), 5, args=(support,))
            F.cross_entropy(functional_call(self.net, p, (query,)), self.labels).backward()
        return self.collected()

    def theirs(self, higher: Any) -> list[Tensor]:
        rule = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for support, query in self.images:
            with higher.innerloop_ctx(self.net, rule, copy_initial_weights=False) as (fast, steps):
                for _ in range(5):
                    steps.step(F.cross_entropy(fast(support), self.labels))
                F.cross_entropy(fast(query), self.labels).backward()
        return self.collected()

    def collected(self) -> list[Tensor]:
        found = [p.grad for p in self.net.parameters() if p.grad is not None]
        self.net.zero_grad(set_to_none=True)
        self.net.load_state_dict(self.before)
        return found


def blocks(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(3):
        layers += [
            nn.Conv2d(channels if number else 1, channels, 3),
            nn.BatchNorm2d(channels, momentum=1),
        ]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 5))


# --- mixed second derivatives ---------------------------------------------------------------------


class MixedLayers(nn.Module):
    """Three layers, each a mixture of three linear ones and the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width) for _ in range(3)) for _ in range(3)
        )

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        h = self.stem(x.flatten(1))
        for layer, w in zip(self.layers, alpha.softmax(1), strict=True):
            h = torch.tanh(sum(a * op(h) for a, op in zip(w, layer, strict=False)) + w[3] * h)  # type: ignore[call-overload]
        return self.head(h)


class MixedConvolutions(nn.Module):
    """Three cells, each a mixture of convolutions with kernels of 1, 3 and 5, and the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, channels, 3, padding=1), nn.Linear(channels, 10)
        kernels = lambda: (nn.Conv2d(channels, channels, k, padding=k // 2) for k in (1, 3, 5))  # noqa: E731
        self.layers = nn.ModuleList(nn.ModuleList(kernels()) for _ in range(3))

    def forward(self, x: Tensor, alpha: Tensor) -> Tensor:
        h = self.stem(x)
        for layer, w in zip(self.layers, alpha.softmax(1), strict=True):
            h = torch.tanh(sum(a * op(h) for a, op in zip(w, layer, strict=False)) + w[3] * h)  # type: ignore[call-overload]
        return self.head(h.mean((2, 3)))


def crossed(name: str, net: nn.Module, images: Tensor, rounds: int) -> Iterator[Row]:
    """A product with the mixed second derivatives;
    and DARTS' difference of two gradients by the architecture alone.
    """
    alpha, labels = torch.zeros(3, 4, requires_grad=True), torch.randint(0, 10, (len(images),))
    parameters = dict(net.named_parameters())
    v = {key: 0.01 * torch.randn_like(p) for key, p in parameters.items()}
    leaves, vectors = list(parameters.values()), list(v.values())
    loss = lambda a, m: F.cross_entropy(m(images, a), labels)  # noqa: E731
    epsilon = 1e-2 / torch.cat([part.flatten() for part in vectors]).norm()

    def moved(by: float) -> None:
        for p, part in zip(leaves, vectors, strict=True):
            p.data.add_(epsilon * part, alpha=by)

    def difference() -> Tensor:
        moved(1)
        (ahead,) = torch.autograd.grad(loss(alpha, net), alpha)
        moved(-2)
        (behind,) = torch.autograd.grad(loss(alpha, net), alpha)
        moved(1)
        return (ahead - behind) / (2 * epsilon)

    def by_hand() -> Tensor:
        slope = torch.autograd.grad(loss(alpha, net), leaves, create_graph=True)
        return torch.autograd.grad(slope, alpha, vectors)[0]

    contenders = {
        "ours": lambda: hodiff.cross_hvp(loss, alpha, net, v),
        "difference": difference,
        "by hand": by_hand,
    }
    error = off([difference()], [contenders["ours"]()])
    times = race(contenders, rounds=rounds)
    found = ratios(times, "ours", "difference")
    measured = f"{spread(found)}; the difference is {error:.0e} off"
    yield Row("cross_hvp / DARTS' difference", name, measured, "1", below(found, 1))
    yield Row(
        "  two passes by hand / the difference",
        name,
        spread(ratios(times, "by hand", "difference")),
    )
    yield Row("  cross_hvp / two passes by hand", name, spread(ratios(times, "ours", "by hand")))
