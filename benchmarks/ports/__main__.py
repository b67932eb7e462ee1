"""Lines of other projects' releases, replaced by hodiff: equal numbers, and times.

`python -m benchmarks.ports [PORT ...]` patches a copy of the installed release, runs both, and puts
the figures into `docs/ports.json`. The releases are optional:
`pip install --no-deps --target DIR nequip==0.19.1 deepxde==1.15.0 laplace-torch==0.3
botorch==0.18.1 torchjd==0.18.0`, and what their imports then miss.
"""

import argparse
import copy
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from benchmarks.table import where

HERE = Path(__file__).parent
FILE = HERE.parents[1] / "docs" / "ports.json"
Row = dict[str, Any]


def patched(module: str) -> Any:
    """The module of a release with our patch, under a name of its own beside the original."""
    origin = importlib.util.find_spec(module).origin
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / Path(origin).name
        shutil.copy(origin, new)
        patch = HERE / "patches" / f"{module}.diff"
        command = ["patch", "--quiet", "--fuzz=0", str(new), str(patch)]
        subprocess.run(command, check=True)
        name = f"{module}_patched"
        spec = importlib.util.spec_from_file_location(name, new)
        changed = importlib.util.module_from_spec(spec)
        sys.modules[name] = changed
        changed.__package__ = module.rpartition(".")[0]
        spec.loader.exec_module(changed)
    return changed


def timed(
    theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int = 15
) -> tuple[float, ...]:
    """CPU milliseconds, medians of interleaved rounds."""
    times: tuple[list[float], ...] = [], []
    for number in range(rounds + 2):
        for call, spent in zip((theirs, ours), times, strict=True):
            start = time.process_time()
            call()
            if number > 1:
                spent.append(1e3 * (time.process_time() - start))
    return tuple(float(f"{statistics.median(spent):.3g}") for spent in times)


def row(case: str, theirs: Callable[[], Any], ours: Callable[[], Any], rounds: int = 15) -> Row:
    pairs = [
        (one.detach().double(), other.detach().double())
        for one, other in zip(tensors(theirs()), tensors(ours()), strict=True)
    ]
    error = max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)
    before, after = timed(theirs, ours, rounds)
    found = {"case": case, "error": float(f"{error:.1e}"), "before": before, "after": after}
    print(found, flush=True)
    return found


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def nequip() -> list[Row]:
    """A small NequIP on 24 atoms in a box."""
    import ase
    from nequip.data import from_ase
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.model import NequIPGNNModel
    from nequip.nn import grad_output
    from nequip.utils.global_state import set_global_state

    set_global_state(allow_tf32=False)
    torch.manual_seed(0)
    model = NequIPGNNModel(
        seed=0, model_dtype="float64", type_names=["C", "H"], r_max=4.0, num_layers=2,
        l_max=1, num_features=8, avg_num_neighbors=12.0, radial_mlp_width=16, compile_mode="eager",
    )  # fmt: skip
    places = torch.rand(24, 3).numpy() * 6
    atoms = ase.Atoms("C8H16", places, cell=[6.0] * 3, pbc=True)
    data = from_ase(atoms)
    for transform in (
        ChemicalSpeciesToAtomTypeMapper(["C", "H"]),
        NeighborListTransform(4.0),
    ):
        data = transform(data)
    inner = next(m for m in model.modules() if isinstance(m, grad_output.ForceStressOutput)).func
    changed, rows = patched("nequip.nn.grad_output"), []
    for name, keys in {
        "ForceStressOutput": ("forces", "stress"),
        "PartialForceOutput": ("partial_forces",),
    }.items():
        before, after = (getattr(of, name)(inner).eval() for of in (grad_output, changed))
        calls = [
            lambda m=m, keys=keys: [m(dict(data))[key] for key in keys] for m in (before, after)
        ]
        rows.append(row(f"{', '.join(keys)} of 24 atoms", *calls))
    return rows


def deepxde() -> list[Row]:
    """Poisson's equation in two dimensions, by each of its optimizers and ours."""
    os.environ["DDE_BACKEND"] = "pytorch"
    import deepxde as dde
    import numpy as np

    from benchmarks.ports.deepxde_lm import LevenbergMarquardt

    dde.config.set_default_float("float64")
    exact = lambda x: np.sin(np.pi * x[:, :1]) * np.sin(np.pi * x[:, 1:])  # noqa: E731

    def pde(x: Tensor, u: Tensor) -> Tensor:
        laplacian = dde.grad.hessian(u, x, i=0, j=0) + dde.grad.hessian(u, x, i=1, j=1)
        return laplacian + 2 * np.pi**2 * torch.sin(np.pi * x).prod(1, keepdim=True)

    rows, seconds = [], 10
    for name in ("adam", "L-BFGS", "LevenbergMarquardt"):
        torch.manual_seed(0)
        np.random.seed(0)
        square = dde.geometry.Rectangle([0, 0], [1, 1])
        edge = dde.icbc.DirichletBC(square, lambda x: 0, lambda x, on: on)
        data = dde.data.PDE(square, pde, edge, num_domain=900, num_boundary=120)
        net = dde.nn.FNN([2, 32, 32, 1], "tanh", "Glorot normal")
        model = dde.Model(data, net)
        ours = LevenbergMarquardt(model) if name == "LevenbergMarquardt" else name
        model.compile(ours, lr=1e-3 if name == "adam" else None)
        fresh, given = np.random.rand(20_000, 2), data.train_next_batch()[0]
        spent, steps = 0.0, 0
        while spent < seconds:
            start = time.process_time()
            model.train_step(given, None, None)
            spent, steps = spent + time.process_time() - start, steps + 1
        found = net(torch.as_tensor(fresh)).detach().numpy()
        error = float(f"{dde.metrics.l2_relative_error(exact(fresh), found):.1e}")
        rows.append({"case": name, "error": error, "steps": steps})
        print(rows[-1], flush=True)
    torch.set_default_dtype(torch.float32)
    return rows


def laplace() -> list[Row]:
    from laplace import Laplace
    from laplace.curvature import GGNInterface

    from benchmarks.ports.laplace_backend import HodiffGGN

    torch.manual_seed(0)
    layers = [
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.Tanh(),
        nn.Conv2d(16, 16, 3), nn.Tanh(), nn.Flatten(), nn.Linear(256, 10),
    ]  # fmt: skip
    net = nn.Sequential(*layers)
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    old, new = (of(net, "classification") for of in (GGNInterface, HodiffGGN))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)

    def evidence(backend: Any) -> Tensor:
        fitted = Laplace(
            net,
            "classification",
            subset_of_weights="all",
            hessian_structure="diag",
            backend=backend,
        )
        fitted.fit(data)
        return fitted.log_marginal_likelihood()

    return [
        row("jacobians", lambda: old.jacobians(x), lambda: new.jacobians(x), 5),
        row("gradients", lambda: old.gradients(x, y)[0], lambda: new.gradients(x, y)[0], 5),
        row("diag", lambda: old.diag(x, y), lambda: new.diag(x, y), 5),
        row(
            "evidence, fit included", lambda: evidence(GGNInterface), lambda: evidence(HodiffGGN), 5
        ),
    ]


def botorch() -> list[Row]:
    """The utilities of a preference model, and their derivative by its length scale."""
    from botorch.models import pairwise_gp

    changed = patched("botorch.models.pairwise_gp")
    x = torch.rand(30, 3, dtype=torch.float64)
    pairs = torch.stack([torch.randperm(30)[:2] for _ in range(60)])
    utility = x.sum(1)
    pairs = torch.where(
        (utility[pairs[:, 0]] > utility[pairs[:, 1]])[:, None], pairs, pairs.flip(1)
    )

    def call(of: Any) -> Callable[[], list[Tensor]]:
        torch.manual_seed(0)
        model = of.PairwiseGP(x, pairs, xtol=1e-12)

        def run() -> list[Tensor]:
            model._update(model.datapoints)
            scale = next(p for n, p in model.named_parameters() if "lengthscale" in n)
            slope = torch.autograd.grad(model.utility.square().sum(), scale)[0]
            return [model.utility, slope]

        return run

    return [row("utilities of 30 points, and their derivative", call(pairwise_gp), call(changed))]


def torchjd() -> list[Row]:
    from torchjd.autogram import Engine

    rows = []
    for width, samples in ((64, 64), (512, 256)):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(64, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 10),
        )
        x, y = torch.randn(samples, 64), torch.randint(10, (samples,))
        engine, other = Engine(net, batch_dim=0), copy.deepcopy(net)
        losses = lambda net, b: F.cross_entropy(net(b[0]), b[1], reduction="none")  # noqa: E731
        rows.append(
            row(
                f"Gramian of {samples} losses, width {width}",
                lambda net=net, e=engine, b=(x, y), f=losses: e.compute_gramian(f(net, b)),
                lambda net=other, b=(x, y), f=losses: hodiff.gram(f, net, b),
                7,
            )
        )
    return rows


PORTS = {
    "nequip": nequip,
    "deepxde": deepxde,
    "laplace": laplace,
    "botorch": botorch,
    "torchjd": torchjd,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ports", description=__doc__)
    parser.add_argument("ports", nargs="*", metavar="PORT", help=f"any of: {', '.join(PORTS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the releases' own
    for name in parser.parse_args().ports or PORTS:
        rows = PORTS[name]()
        stored = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
        stored[name] = {"where": where(), "rows": rows}
        FILE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
