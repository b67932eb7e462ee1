"""Field operators against the stock routes of PyTorch,
and against `jet-for-pytorch` where it is installed.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jvp, vmap

import hodiff
from benchmarks.table import Row
from benchmarks.timing import best, race, ratios, spread
from hodiff.curvature._memory import LiveBytes

Route = Callable[[nn.Module, Tensor, bool], Tensor]
LOOP = "loop"


def network(
    inputs: int, width: int, layers: int = 4, activation: type[nn.Module] = nn.Tanh
) -> nn.Sequential:
    sizes = [inputs, *[width] * layers]
    pairs = [(nn.Linear(a, b), activation()) for a, b in pairwise(sizes)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair), nn.Linear(width, 1))


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    rounds = 2 if quick else 9
    yield from laplacians(rounds)
    yield from memory()
    yield from few_dimensions(2 * rounds)
    yield from plates(rounds)
    yield from high_orders(rounds)
    yield from navier_stokes(rounds)
    yield from overhead(20 * rounds)


def ours(f: nn.Module, x: Tensor, train: bool) -> Tensor:
    return hodiff.laplacian(f, x, create_graph=train)


def by_loop(f: nn.Module, x: Tensor, train: bool) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    parts = [
        torch.autograd.grad(g[:, i].sum(), x, create_graph=train, retain_graph=True)[0][:, i]
        for i in range(x.shape[1])
    ]
    return torch.stack(parts).sum(0)


def by_hessian(f: nn.Module, x: Tensor, train: bool) -> Tensor:
    with torch.set_grad_enabled(train):
        return vmap(lambda z: hessian(lambda y: f(y)[0])(z).diagonal().sum())(x)


def by_jvp_of_grad(f: nn.Module, x: Tensor, train: bool) -> Tensor:
    units = torch.eye(x.shape[1])
    g = grad(lambda y: f(y)[0])

    def one(z: Tensor) -> Tensor:
        return vmap(lambda v: jvp(g, (z,), (v,))[1] @ v)(units).sum()

    with torch.set_grad_enabled(train):
        return vmap(one)(x)


STOCK: dict[str, Route] = {
    LOOP: by_loop,
    "vmap(hessian)": by_hessian,
    "vmap(jvp(grad))": by_jvp_of_grad,
}


def navier_stokes(rounds: int) -> Iterator[Row]:
    """Three outputs and their derivatives, as PINO's residual takes them,
    with the loss's gradient.
    """

    def residual(o: Tensor, x: Tensor, y: Tensor, t: Tensor, xx: Tensor, yy: Tensor) -> Tensor:
        u, v = o[:, :1], o[:, 1:2]
        momentum = t[:, :2] + u * x[:, :2] + v * y[:, :2] - 0.01 * (xx + yy)[:, :2]
        pressure = torch.stack([x[:, 2], y[:, 2]], 1)
        return (momentum + pressure).square().sum(1).mean() + (x[:, 0] + y[:, 1]).square().mean()

    def by_hand(net: nn.Module, x: Tensor) -> Tensor:
        """Seven passes: three outputs by all coordinates,
        and the two velocities twice by two of them.
        """
        z = x.clone().requires_grad_()
        o = net(z)
        by = lambda column: torch.autograd.grad(column.sum(), z, create_graph=True)[0]  # noqa: E731
        first = torch.stack([by(column) for column in o.T], 1)
        second = [torch.stack([by(first[:, i, k])[:, k] for i in (0, 1)], 1) for k in (0, 1)]
        return residual(o, *first.unbind(2), *second)

    def step(
        f: Callable[[nn.Module, Tensor], Tensor], net: nn.Module, x: Tensor
    ) -> Callable[[], object]:
        return lambda: torch.autograd.grad(f(net, x), list(net.parameters()))

    def ours(net: nn.Module, x: Tensor) -> Tensor:
        return residual(*hodiff.partials(net, x, [(), 0, 1, 2, (0, 0), (1, 1)]))

    for width, number in ((50, 1000), (128, 500)):
        net, x = network(3, width)[:-1].append(nn.Linear(width, 3)), torch.rand(number, 3)
        assert torch.allclose(ours(net, x), by_hand(net, x), rtol=1e-4)
        times = race({"ours": step(ours, net, x), "by hand": step(by_hand, net, x)}, rounds=rounds)
        found = ratios(times, "ours", "by hand")
        case = f"three outputs, width {width}, {number} points"
        met = statistics.median(found) <= 1
        yield Row(
            "Navier-Stokes by partials and its gradient / by hand", case, spread(found), "1", met
        )


def peer(f: nn.Sequential, dimension: int) -> tuple[Route, float] | None:
    """The collapsed Laplacian of `jet-for-pytorch`,
    and the seconds that tracing and simplifying it took.
    """
    if importlib.util.find_spec("jet") is None:
        return None
    from jet.laplacian import laplacian  # pyright: ignore[reportMissingImports]
    from jet.simplify import simplify  # pyright: ignore[reportMissingImports]

    start = time.perf_counter()
    example = torch.randn(dimension)
    made = simplify(laplacian(f, example), example)  # of one sample: (value, Jacobian, Laplacian)

    def route(f: nn.Module, x: Tensor, train: bool) -> Tensor:
        with torch.set_grad_enabled(train):
            return vmap(made)(x)[-1]

    return route, time.perf_counter() - start


def run(route: Route, f: nn.Module, x: Tensor, train: bool) -> Callable[[], object]:
    """The route in value, or a training step's gradient with it."""
    parameters = [p for p in f.parameters() if p.requires_grad]

    def step() -> object:
        result = route(f, x, train)
        return (
            torch.autograd.grad(result.square().mean(), parameters, allow_unused=True)
            if train
            else result
        )

    return step


def laplacians(rounds: int) -> Iterator[Row]:
    f = network(50, 256)
    theirs, seconds = peer(f, 50) or (None, 0.0)
    yield Row(
        "jet-for-pytorch", "D = 50", f"{seconds:.1f} s to set up" if theirs else "not installed"
    )
    for batch in (64, 256, 512):
        x = torch.randn(batch, 50)
        routes: dict[str, Route] = {
            "hodiff": ours,
            **STOCK,
            **({"jet-for-pytorch": theirs} if theirs else {}),
        }
        if batch == 512:
            del routes["vmap(hessian)"]  # the slowest in memory
        for train, bar in ((False, 2.0), (True, 1.8)):
            times = race(
                {name: run(route, f, x, train) for name, route in routes.items()}, rounds=rounds
            )
            case = f"D = 50, 4x256 tanh, batch {batch}, {'training' if train else 'value'}"
            yield against(times, [name for name in STOCK if name in routes], "laplacian", case, bar)
            if theirs:
                yield against(times, ["jet-for-pytorch"], "laplacian", case, 0.9)


def against(times: dict, others: list[str], subject: str, case: str, bar: float) -> Row:
    """Other over ours."""
    fastest = best(times, others)
    found = ratios(times, fastest, "hodiff")
    milliseconds = {name: statistics.median(times[name]) * 1e3 for name in ("hodiff", fastest)}
    measured = (
        f"{spread(found)}; {milliseconds['hodiff']:.1f} ms, {fastest} {milliseconds[fastest]:.1f}"
    )
    return Row(
        f"{subject}: other / ours", case, measured, f"{bar}", statistics.median(found) >= bar, times
    )


def memory() -> Iterator[Row]:
    f = network(50, 256)
    for batch, train, bar in ((256, False, 0.5), (256, True, 0.6), (4096, False, 0.5)):
        x, peaks = torch.randn(batch, 50), {}
        for name, route in {"hodiff": ours, **STOCK}.items():
            call = run(route, f, x, train)
            call()
            with LiveBytes() as live:
                call()
            peaks[name] = live.peak / 2**20
        least = min(STOCK, key=lambda name: peaks[name])
        share = peaks["hodiff"] / peaks[least]
        measured = f"{share:.2f}; {peaks['hodiff']:.0f} MiB, {least} {peaks[least]:.0f}"
        case = f"D = 50, 4x256 tanh, batch {batch}, {'training' if train else 'value'}"
        yield Row(
            "peak memory of laplacian: ours / least other", case, measured, f"{bar}", share <= bar
        )


def few_dimensions(rounds: int) -> Iterator[Row]:
    for dimension, width, batch in ((2, 64, 256), (2, 64, 2048), (3, 128, 1024)):
        f, x = network(dimension, width), torch.randn(batch, dimension)
        for train in (False, True):
            times = race(
                {"hodiff": run(ours, f, x, train), LOOP: run(by_loop, f, x, train)}, rounds=rounds
            )
            case = (
                f"D = {dimension}, 4x{width} tanh, batch {batch}, "
                f"{'training' if train else 'value'}"
            )
            yield against(times, [LOOP], "laplacian", case, 1.0)


def plates(rounds: int) -> Iterator[Row]:
    f, x = network(3, 64), torch.randn(256, 3)
    units = torch.eye(3)

    def laplacian_of(g: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda z: vmap(lambda v: jvp(grad(g), (z,), (v,))[1] @ v)(units).sum()

    def nested(f: nn.Module, x: Tensor, train: bool) -> Tensor:
        with torch.set_grad_enabled(train):
            return vmap(laplacian_of(laplacian_of(lambda y: f(y)[0])))(x)

    def loops(f: nn.Module, x: Tensor, train: bool) -> Tensor:
        x = x.detach().requires_grad_()
        u = f(x)
        for _ in range(2):
            (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            u = sum(
                torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)
            )
        return u

    mine: Route = lambda f, x, train: hodiff.biharmonic(f, x, create_graph=train)  # noqa: E731
    for train in (False, True):
        contenders = {"hodiff": mine, "nested HVPs": nested, "nested loops": loops}
        times = race(
            {name: run(route, f, x, train) for name, route in contenders.items()}, rounds=rounds
        )
        case = f"D = 3, 4x64 tanh, batch 256, {'training' if train else 'value'}"
        yield against(times, ["nested HVPs"], "biharmonic", case, 3.0)
        yield against(times, ["nested loops"], "biharmonic", case, 1.0)


def high_orders(rounds: int) -> Iterator[Row]:
    f, x, order = network(1, 128, 3), torch.randn(512, 1), 6

    def nested(f: nn.Module, x: Tensor, train: bool) -> Tensor:
        x = x.detach().requires_grad_()
        found = [f(x)]
        for k in range(order):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=train or k < order - 1)
        return torch.stack(found)

    mine: Route = lambda f, x, train: torch.stack(  # noqa: E731
        hodiff.derivatives(f, x, order, create_graph=train)
    )
    for train, bar in ((False, 6.0), (True, 9.0)):
        times = race(
            {"hodiff": run(mine, f, x, train), "nested grad": run(nested, f, x, train)},
            rounds=rounds,
        )
        case = f"orders 0 to 6, 3x128 tanh, batch 512, {'training' if train else 'value'}"
        yield against(times, ["nested grad"], "derivatives", case, bar)


def overhead(rounds: int) -> Iterator[Row]:
    f, x = network(2, 64), torch.randn(1, 2)
    times = race(
        {"laplacian": lambda: hodiff.laplacian(f, x, create_graph=False), "forward": lambda: f(x)},
        rounds=rounds,
    )
    each = {name: statistics.median(values) / len(f) * 1e6 for name, values in times.items()}
    yield Row(
        "time of one operation",
        "D = 2, batch 1",
        f"{each['laplacian']:.0f} us, plain {each['forward']:.0f} us",
    )
