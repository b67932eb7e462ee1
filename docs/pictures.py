"""Pictures of recipes whose programs draw nothing: what one gets, computed as the page is built."""

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from docs.figures import INK, subplots, svg
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import hodiff

_BENCHMARKS = Path(__file__).with_name("benchmarks.json")
_COLORS = ("#5c6bc0", "#ef6c00", "#66a966", "#8d6e63")


def _rows(subject: str) -> list[dict]:
    """The stored rows of a benchmark."""
    return json.loads(_BENCHMARKS.read_text("utf-8"))[subject]["rows"]


def _bars(of: dict[str, list[float]], names: list[str], height: float) -> tuple:
    """Bars for each name, one beside the other for each kind of number."""
    figure, axes = subplots(figsize=(5.2, height))
    thick = 0.76 / len(of)
    for number, (kind, values) in enumerate(of.items()):
        places = [place + thick * number for place in range(len(names))]
        axes.barh(places, values, 0.94 * thick, color=_COLORS[number], label=kind)
    axes.set_yticks([n + thick * (len(of) - 1) / 2 for n in range(len(names))], names)
    axes.invert_yaxis()
    if len(of) > 1:
        axes.legend()
    return figure, axes


def penalties() -> str:
    """Three penalties of a linear critic on images over the length of its gradient."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(6, 3, 8, 8, generator=generator, dtype=torch.float64)
    w = w[:1].expand(6, 3, 8, 8) / w[0].norm()
    slopes = torch.logspace(-1, 1.4, 200, dtype=torch.float64)
    lengths = {
        "of each sample": w.flatten(1).norm(dim=1),
        "of the whole batch": w.norm(),
        "of each pixel's channels": w.norm(dim=1),
    }
    figure, axes = subplots(figsize=(4.6, 2.5))
    for color, (name, length) in zip(_COLORS, lengths.items(), strict=False):
        values = [(slope * length - 1).square().mean() for slope in slopes]
        axes.loglog(slopes, values, color=color, label=name)
    axes.set(
        xlabel="‖w‖, which should become 1", title="penalty by the norm", ylim=1e-4
    )
    axes.legend()
    return svg(figure, says="Penalties by other norms are least at other slopes than 1")


def least_area() -> str:
    """The surface of least area over a square, by SciPy's trust-constr and a sparse Hessian."""
    m = 16
    axis = torch.linspace(0, 1, m + 2, dtype=torch.float64)
    outline = torch.sin(2 * torch.pi * axis)[:, None] * (1 - axis)
    inside = torch.zeros(m + 2, m + 2, dtype=torch.bool)
    inside[1:-1, 1:-1] = True

    def area(x):
        u = outline.masked_scatter(inside, x)
        right, down = u[:-1, 1:] - u[:-1, :-1], u[1:, :-1] - u[:-1, :-1]
        return (1 + (right**2 + down**2) * (m + 1) ** 2).sqrt().sum() / (m + 1) ** 2

    def fun(x):
        value, gradient = hodiff.value_and_grad(area, torch.from_numpy(x))
        return value.item(), gradient.numpy()

    start = torch.zeros(m * m, dtype=torch.float64)
    plan = hodiff.sparse.plan_hessian(area, start, output="scipy")
    found = minimize(fun, start.numpy(), jac=True, hess=plan, method="trust-constr")
    u = outline.masked_scatter(inside, torch.from_numpy(found.x))
    figure, axes = subplots(figsize=(4.6, 3), subplot_kw={"projection": "3d"})
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    axes.plot_surface(
        rows.numpy(), columns.numpy(), u.numpy(), cmap="viridis", linewidth=0
    )
    axes.set(xticks=[0, 1], yticks=[0, 1], zticks=[-1, 0, 1])
    axes.view_init(32, -50)
    return svg(figure, says="A surface of least area, held at the edges of a square")


def spectra() -> str:
    """The eigenvalues of three matrices of a classifier, untrained and trained."""
    digits = load_digits()
    inputs = torch.tensor(digits.data[:150] / 16, dtype=torch.float32)[:, 2::5]
    targets = torch.tensor(digits.target[:150])
    torch.manual_seed(0)
    layers = torch.nn.Linear(13, 6), torch.nn.Tanh(), torch.nn.Linear(6, 10)
    model, data = torch.nn.Sequential(*layers), [(inputs, targets)]
    of = (lambda model, batch: model(batch[0])), torch.nn.CrossEntropyLoss(), model
    operators = {
        "Hessian": hodiff.HessianOperator(
            lambda model: F.cross_entropy(model(inputs), targets), model
        ),
        "Gauss-Newton": hodiff.GaussNewtonOperator(*of, data=data),
        "empirical Fisher": hodiff.FisherOperator(*of, data=data, kind="empirical"),
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    figure, both = subplots(1, 2, figsize=(5.6, 2.5), sharey=True)
    for axes, (title, steps) in zip(
        both, {"untrained": 0, "trained": 60}.items(), strict=True
    ):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        for color, (name, A) in zip(_COLORS, operators.items(), strict=False):
            A.refresh()
            axes.plot(torch.linalg.eigvalsh(A.dense()), color=color, label=name)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(title=title, xlabel="number")
    both[0].set_ylabel("eigenvalue")
    both[0].legend()
    return svg(
        figure, says="Of three matrices only the Hessian has negative eigenvalues"
    )


def memory() -> str:
    """The peaks of products with a language model's curvature: stored results."""
    peaks = {
        row["subject"].removesuffix(", attention by matrix products"): float(peak[1])
        for row in _rows("language")[:12]
        if (peak := re.search(r"s, ([\d.]+) MiB", row["measured"]))
    }
    figure, axes = _bars({"": list(peaks.values())}, list(peaks), 2.8)
    for name, bar in zip(peaks, axes.patches, strict=True):
        bar.set_color(_COLORS["curv" in name or "eigen" in name])
    axes.set(xlabel="peak memory, MiB")
    return svg(figure, says="Memory of products with a language model's curvature")


def growth() -> str:
    """The bytes that a running sum of losses keeps alive, over the steps of a loop."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(9, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1)
    )
    figure, axes = subplots(figsize=(4.6, 2.4))
    sums = {"total += loss": lambda loss: loss, "total += loss.detach()": torch.detach}
    for color, (name, part) in zip(_COLORS, sums.items(), strict=False):
        total, held = torch.zeros(()), []
        for _ in range(12):
            loss = net(torch.randn(50, 9)).square().mean()
            total = total + part(loss)
            kept = loss if total.grad_fn is None else total
            held += [hodiff.graph.inspect(kept).bytes_by_holder["graph"] / 1024]
        axes.plot(range(1, 13), held, "o-", markersize=3, color=color, label=name)
    axes.set(xlabel="step", ylabel="KiB held by graphs", ylim=0)
    axes.legend()
    return svg(
        figure,
        says="A sum of losses keeps the graph of each step, detached the last one alone",
    )


def freed() -> str:
    """Two losses on one value, whose graph the first pass has freed."""
    places = {
        "W, x": (0, 1, _COLORS[0]),
        "y = W @ x": (1.2, 1, _COLORS[1]),
        "loss of step 0": (2.6, 1.5, _COLORS[0]),
        "loss of step 1": (2.6, 0.5, _COLORS[0]),
    }
    figure, axes = subplots(figsize=(4.8, 1.9))
    for name, (x, y, color) in places.items():
        box = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": color}
        axes.text(x, y, name, ha="center", va="center", bbox=box)
    arrow = {"arrowstyle": "->", "color": _COLORS[0], "shrinkA": 26, "shrinkB": 30}
    for start, end in (("loss of step 0", "y = W @ x"), ("y = W @ x", "W, x")):
        axes.annotate("", places[end][:2], places[start][:2], arrowprops=arrow)
    arrow |= {"color": _COLORS[1], "linestyle": "--"}
    axes.annotate(
        "", places["y = W @ x"][:2], places["loss of step 1"][:2], arrowprops=arrow
    )
    axes.text(1.2, 0.6, "freed by the first pass", ha="center", color=_COLORS[1])
    axes.set(xlim=(-0.5, 3.3), ylim=(0.1, 1.9))
    axes.axis("off")
    return svg(
        figure,
        says="The pass of a second step reaches a value whose graph the first has freed",
    )


def compiled() -> str:
    """The times of compiled steps beside eager mode: stored results."""
    times: dict[str, dict[str, float]] = {}
    for row in _rows("steps"):
        if row["subject"].endswith("/ eager"):
            backend = row["subject"].split()[2]
            name = row["case"].replace("the same by hodiff.laplacian", "laplacian")
            name = name.removesuffix(", by hand").replace(
                ", hodiff eager", ", eager: hodiff"
            )
            times.setdefault(name, {})[backend] = float(row["measured"].split(",")[0])
    backends = {
        backend: [of[backend] for of in times.values()]
        for backend in ("replay", "inductor")
    }
    figure, axes = _bars(backends, list(times), 3)
    axes.axvline(1, color=INK, linewidth=0.8)
    axes.set(xlabel="time of a step / eager mode")
    return svg(figure, says="Compiled steps take a part of the time of eager mode")


def shards() -> str:
    """What a Hessian product holds on each rank of a sharded model: stored results."""
    rows = [row for row in _rows("sharded") if "Hessian product" in row["subject"]]
    held: dict[str, list[float]] = {}
    for row in rows:
        for part in row["measured"].split(", "):
            name, number = part.split()
            held.setdefault(name, []).append(float(number))
    figure, axes = _bars(held, [row["case"].partition(",")[0] for row in rows], 2)
    axes.set(xlabel="peak on a rank, numbers per parameter of the whole model")
    return svg(figure, says="The peak on a rank falls with the number of ranks")


def peaks(of: dict[str, float]) -> str:
    """Peaks of memory, in MiB, by name."""
    figure, axes = _bars({"": list(of.values())}, list(of), 1.6)
    axes.set(xlabel="peak memory, MiB")
    return svg(figure, says="One head at a time has the least peak")
