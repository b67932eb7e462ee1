"""What pages show as stored results of some minutes of one core.

`python -m benchmarks.proofs [PROOF ...]` puts them into `docs/proofs.json`: the sharpness along
trainings of full-batch gradient descent ("edge"), and the energies of a neural quantum state
("quantum"). PINNs are in `benchmarks.training`.
"""

import argparse
import json
import math
import re
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


def quantum() -> dict[str, Any]:
    """For three seeds: errors of the energy after each step, and the seconds of the core."""
    page = (DOCS / "recipes" / "quantum-state.md").read_text("utf-8")
    program: dict[str, Any] = {}
    for fence in re.findall(r"^```python[^\n]*source[^\n]*\n(.*?)^```", page, re.M | re.S)[:2]:
        exec(fence, program)
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


PROOFS: dict[str, Callable[[], dict[str, Any]]] = {"edge": edge, "quantum": quantum}


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
