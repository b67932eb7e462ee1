"""What pages show as stored results of some minutes of one core.

`python -m benchmarks.proofs [PROOF ...]` puts them into `docs/proofs.json`: the sharpness along
trainings of full-batch gradient descent ("edge"), the energies of a neural quantum state
("quantum"), sampled Laplacians in up to a million dimensions ("million"), and what trainings
without some of the data do to single losses ("metagradients"). PINNs are in `benchmarks.training`.
"""

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import hodiff
from benchmarks.table import where

DOCS = Path(__file__).parents[1] / "docs"
FILE = DOCS / "proofs.json"


def edge() -> dict[str, Any]:
    """For three step sizes: step, loss, sharpness and products of each point of a training."""
    digits, runs = load_digits(), {}
    x = torch.tensor(digits.data[:200] / 16, dtype=torch.float32)
    y = F.one_hot(torch.tensor(digits.target[:200]), 10).float()

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return 0.5 * (model(x) - y).square().sum(1).mean()

    for eta in (0.1, 0.2, 0.4):
        torch.manual_seed(0)
        layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
        model = torch.nn.Sequential(*layers)
        H, points = hodiff.HessianOperator(loss, model), []
        optimizer = torch.optim.SGD(model.parameters(), lr=eta)
        for step in range(3001):
            if step % 50 == 0:
                H.refresh()
                top = hodiff.eigsh(H, 1, rtol=0.1)
                sharpness = round(top.value.item(), 4)
                points.append((step, round(H.value.item(), 6), sharpness, top.products))
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
        runs[str(eta)] = points
        last = [sharpness * eta / 2 for step, _, sharpness, _ in points if step > 1500]
        most = max(products for *_, products in points)
        print(f"eta {eta}: {min(last):.2f} to {max(last):.2f} of 2 / eta, {most} products at most")
    return runs


def of_recipe(page: str, fences: int) -> dict[str, Any]:
    """The names that the first programs of a recipe leave."""
    text = (DOCS / "recipes" / f"{page}.md").read_text("utf-8")
    names: dict[str, Any] = {}
    for fence in re.findall(r"^```python[^\n]*source[^\n]*\n(.*?)^```", text, re.M | re.S)[:fences]:
        exec(fence, names)
    return names


def quantum() -> dict[str, Any]:
    """For three seeds: errors of the energy after each step, and the seconds of the core."""
    program = of_recipe("quantum-state", 2)
    runs: dict[str, Any] = {}
    for name, momentum in {"SPRING": 0.9, "min-SR": 0.0}.items():
        runs[name] = []
        for seed in range(3):
            start = time.process_time()
            errors = program["train"](momentum, steps=600, seed=seed)[1]
            seconds = round(time.process_time() - start, 2)
            thinned = [float(f"{error:.3e}") for error in errors[::6]]
            runs[name].append({"seconds": seconds, "errors": thinned})
            print(f"{name}, seed {seed}: {errors[-1]:.1e} after {seconds} s")
            assert math.isfinite(errors[-1])
    return runs


def million() -> dict[str, Any]:
    """For each dimension: seconds of a plain gradient and of a step, and the estimates' errors."""
    points, coordinates, runs = 16, 16, {}
    for dimension in (100, 1_000, 10_000, 100_000, 1_000_000):
        torch.manual_seed(0)
        first, last = torch.nn.Linear(dimension, 32), torch.nn.Linear(32, 1)
        net = torch.nn.Sequential(first, torch.nn.Tanh(), last)
        x = torch.randn(points, dimension)
        with torch.no_grad():
            first.weight *= torch.rand(dimension).sqrt()
            s = first(x).tanh()
            norms = first.weight.square().sum(1)
            exact = (2 * s * (s.square() - 1)) @ (last.weight[0] * norms)

        def plain(net: Any = net, x: Any = x) -> None:
            net(x).square().mean().backward()

        def estimate(net: Any = net, x: Any = x) -> Any:
            u = lambda x: net(x).squeeze(-1)  # noqa: E731
            return hodiff.laplacian(u, x, samples=coordinates, probes="coordinates")

        def step(estimate: Callable[[], Any] = estimate) -> None:
            estimate().value.square().mean().backward()

        found = [estimate() for _ in range(100 if dimension < 10**6 else 20)]
        scores = [(each.value - exact) / each.stderr for each in found]
        close = torch.cat([(each.value - exact) / exact.norm() for each in found])
        times = {"plain": seconds_of(plain, net), "step": seconds_of(step, net)}
        runs[str(dimension)] = {
            **{name: float(f"{seconds:.3g}") for name, seconds in times.items()},
            "in two errors": round((torch.cat(scores).abs() < 2).double().mean().item(), 3),
            "relative error": float(f"{close.norm() / len(found) ** 0.5:.2g}"),
        }
        print(dimension, runs[str(dimension)])
    return runs


def seconds_of(call: Callable[[], None], net: torch.nn.Module, rounds: int = 7) -> float:
    """CPU seconds, the median."""
    times = []
    for _ in range(rounds):
        net.zero_grad()
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def metagradients() -> dict[str, Any]:
    """For each share that is left out: rank correlations of predicted and found losses, by image,
    for each way to predict them; and the seconds of a training and of a metagradient.
    """
    program = of_recipe("metagradients", 3)
    ones, trained = program["ones"], program["trained"]
    seconds = {}
    for name, call in {
        "training": lambda: trained(ones),
        "metagradient": lambda: hodiff.grad(program["first_loss"], ones),
        "metagradient, segments": lambda: hodiff.grad(program["by_segments"], ones),
    }.items():
        seconds[name] = round(seconds_of(call, program["model"], 5), 3)
        print(name, seconds[name])
    ways, runs = predictions(program), {}
    for share in (0.01, 0.05, 0.1, 0.2):
        generator = torch.Generator().manual_seed(1)
        left_out = program["subsets"](share, 100, generator)
        lost, agreement = program["without"](left_out), program["agreement"]
        runs[str(share)] = {
            name: [round(float(each), 3) for each in agreement(scores, left_out, lost)]
            for name, scores in ways.items()
        }
        for name, each in runs[str(share)].items():
            print(f"{share:.0%} left out, {name}: {statistics.mean(each):.3f}")
    return {"seconds": seconds, "agreement": runs}


def predictions(program: dict[str, Any]) -> dict[str, torch.Tensor]:
    """For each way the scores `(test images, training images)`, of the weights' derivatives."""
    number, ones = program["N"], program["ones"]
    fitted, x, y = program["trained"](ones), program["x"], program["y"]
    test = torch.arange(program["test"].start, program["test"].stop)

    def each(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x[images]), y[images], reduction="none")

    G = hodiff.GaussNewtonOperator(
        lambda m, b: m(b[0]), torch.nn.CrossEntropyLoss(), fitted, data=[(x[:number], y[:number])]
    )
    J = hodiff.JacobianOperator(lambda m: each(m, torch.arange(number)), fitted)
    g = hodiff.jacobian(lambda m: each(m, test), fitted)
    K = hodiff.gram(each, fitted, torch.cat([torch.arange(number), test])) / number
    ways = {"metagradients": hodiff.jacobian(program["losses"], ones)}
    ways["gradients"] = -K[number:, :number]
    for damping in (1e-1, 1e-2, 1e-3, 1e-4):
        s = hodiff.solve(G, g, damping=damping, rtol=1e-4).value
        ways[f"influence, {damping:g}"] = -(J @ s) / number
    return ways


PROOFS: dict[str, Callable[[], dict[str, Any]]] = {
    "edge": edge,
    "quantum": quantum,
    "million": million,
    "metagradients": metagradients,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs", description=__doc__)
    parser.add_argument("proofs", nargs="*", metavar="PROOF", help=f"any of: {', '.join(PROOFS)}")
    torch.set_num_threads(1)
    for name in parser.parse_args().proofs or PROOFS:
        start = time.process_time()
        runs = PROOFS[name]()
        stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
        seconds = round(time.process_time() - start)
        stored[name] = {"where": where(), "seconds": seconds, "runs": runs}
        FILE.write_text(json.dumps(stored, indent=None) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
