"""Densities, traces, diagonals and log-determinants, against PyHessian, matfree and curvlinops.

PyHessian and matfree are given the very same matrix and random vectors, so that values are to
agree; a density of a
larger network is then timed. The peers are optional: `pip install pyhessian matfree jax`.
"""

import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hodiff
from benchmarks.curvature import curvlinops
from benchmarks.models import Problem, networks
from benchmarks.table import Row
from benchmarks.timing import spread

VECTORS, STEPS = 10, 50


def rows(quick: bool) -> Iterator[Row]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' deprecations
        problem = digits()
        if (pyhessian := module("pyhessian")) is None:
            yield Row("values against PyHessian", problem.name, "pyhessian is not installed")
        else:
            yield from same_as_pyhessian(pyhessian, problem)
        if module("matfree") is None:
            yield Row("values against matfree", problem.name, "matfree is not installed")
        else:
            yield from same_as_matfree(problem)
        yield from times(networks()[0], 1 if quick else 5)


def module(name: str) -> Any:
    """A peer, or None where it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def digits() -> Problem:
    """A classifier of digits, trained, in double precision."""
    torch.manual_seed(0)
    data = load_digits()
    inputs, targets = torch.tensor(data.data[:300] / 16), torch.tensor(data.target[:300])
    model = nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double()
    problem = Problem("digits, 64-6-10", model, inputs, targets)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    return problem


def off(ours: Any, theirs: Any) -> float:
    """The largest difference, over the largest entry."""
    a, b = (torch.as_tensor(x).double().reshape(-1) for x in (ours, theirs))
    return float((a - b).abs().max() / b.abs().max())


# --- the same matrix and vectors ------------------------------------------------------------------


def signs(leaves: list[Tensor], number: int) -> list[list[Tensor]]:
    """The random vectors that PyHessian draws."""
    found = [[torch.randint_like(leaf, high=2) for leaf in leaves] for _ in range(number)]
    return [[torch.where(v == 0, -1.0, v) for v in vector] for vector in found]


def modern_eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    """`torch.eig`, which PyHessian calls and PyTorch no longer has."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return torch.stack([values, torch.zeros_like(values)], 1), vectors


def same_as_pyhessian(pyhessian: Any, problem: Problem) -> Iterator[Row]:
    """Its `density` as published, but for the eigenvalues of the small matrix."""
    leaves = [p.detach() for p in problem.model.parameters()]
    peer = pyhessian.hessian(  # calls eval(): before our operator, which refuses a changed model
        problem.model, F.cross_entropy, data=(problem.inputs, problem.targets), cuda=False
    )
    problem.model.zero_grad()
    H = hodiff.HessianOperator(problem.loss, problem.model)
    largest = float(torch.linalg.eigvalsh(H.dense())[-1])
    for steps in (10, 40):
        torch.manual_seed(1)
        with mock.patch.object(torch, "eig", modern_eig, create=True):
            nodes, weights = (torch.tensor(x) for x in peer.density(iter=steps, n_v=4))
        torch.manual_seed(1)
        flat = torch.stack(
            [torch.cat([v.reshape(-1) for v in vector]) for vector in signs(leaves, 4)], 1
        )
        found = hodiff.spectral_density(H, vectors=flat, steps=steps)
        means = [
            float((w * x.abs().sqrt()).sum(1).mean())
            for x, w in ((found.nodes, found.weights), (nodes, weights))
        ]
        measured = (
            f"nodes {off(found.nodes, nodes):.0e}, "
            f"mean of a root {abs(means[0] / means[1] - 1):.0e}"
        )
        ends = [abs(float(x.max()) / largest - 1) for x in (found.nodes, nodes)]
        case = f"{problem.name}, 4 vectors of {steps} steps"
        yield Row("relative difference from PyHessian's density", case, measured)
        yield Row(
            "its largest eigenvalue, relative error: ours, theirs",
            case,
            f"{ends[0]:.0e}, {ends[1]:.0e}",
        )


def same_as_matfree(problem: Problem) -> Iterator[Row]:
    """Its estimators with our vectors, in double precision."""
    jax, decomp, funm, stochtrace = (importlib.import_module(n) for n in ("jax", *MATFREE))
    jax.config.update("jax_enable_x64", True)
    G = hodiff.GaussNewtonOperator(
        lambda model, batch: model(batch[0]),
        nn.CrossEntropyLoss(),
        problem.model,
        data=[(problem.inputs, problem.targets)],
    )
    matrix = G.dense()
    A = hodiff.MatrixOperator(
        (matrix + matrix.T) / 2 + 0.01 * torch.eye(len(matrix), dtype=matrix.dtype)
    )
    theirs = jax.numpy.asarray(A.dense().numpy())
    product = lambda v: theirs @ v  # noqa: E731
    draws = torch.Generator().manual_seed(0)
    V = torch.randn(len(matrix), 20, generator=draws, dtype=matrix.dtype).sign()
    samples = jax.numpy.asarray(V.T.numpy())
    given = lambda key: samples  # noqa: E731
    key = jax.random.PRNGKey(0)
    tridiagonal = decomp.tridiag_sym(STEPS)
    with jax.default_matmul_precision("highest"):
        many = stochtrace.estimator_monte_carlo_mean_and_sem
        pairs = {
            "logdet": (
                hodiff.logdet(A, vectors=V, steps=STEPS),
                many(funm.monte_carlo_funm_sym_logdet(tridiagonal), given)(product, key),
                float(torch.logdet(A.dense())),
            ),
            "trace": (
                hodiff.trace(A, vectors=V),
                many(stochtrace.monte_carlo_trace(), given)(product, key),
                float(A.dense().trace()),
            ),
        }
    for name, (ours, (value_of, error), exact) in pairs.items():
        measured = (
            f"{abs(float(ours.value) / float(value_of) - 1):.0e}; "
            f"true error {float(ours.value) - exact:+.2g}, "
            f"ours ± {float(ours.stderr):.2g}, theirs ± {float(error):.2g}"
        )
        yield Row(
            f"relative difference from matfree's {name}", f"{problem.name}, 20 vectors", measured
        )


MATFREE = ("matfree.decomp", "matfree.funm", "matfree.stochtrace")


# --- times ----------------------------------------------------------------------------------------


def times(problem: Problem, rounds: int) -> Iterator[Row]:
    """A density of 10 vectors of 50 steps, with its operator made anew, in turns with the peers."""
    size = sum(p.numel() for p in problem.model.parameters())
    case = f"{problem.name}, D = {size}, {VECTORS} x {STEPS}"
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: hodiff.spectral_density(
            hodiff.HessianOperator(problem.loss, problem.model), samples=VECTORS, steps=STEPS
        )
    }
    if (pyhessian := module("pyhessian")) is not None:
        contenders["PyHessian's density"] = lambda: density(pyhessian, problem)
    if (peer := module("curvlinops")) is not None:
        theirs, v = curvlinops(peer, problem, "HessianLinearOperator"), torch.randn(size)
        # their products alone, a tenth of them: a Lanczos process comes on top
        contenders["500 products of curvlinops"] = lambda: [
            theirs @ v for _ in range(VECTORS * STEPS // 10)
        ]
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.thread_time()
            call()
            found[name].append((time.thread_time() - start) * (10 if "curvlinops" in name else 1))
    for name in contenders:
        if name != "ours":
            ratio = [a / b for a, b in zip(found["ours"], found[name], strict=True)]
            seconds = [f"{statistics.median(found[key]):.2f} s" for key in ("ours", name)]
            measured = f"{spread(ratio)}; {', '.join(seconds)}"
            yield Row(
                f"spectral_density / {name}",
                case,
                measured,
                "0.35",
                statistics.median(ratio) <= 0.35,
            )


def density(pyhessian: Any, problem: Problem) -> None:
    with mock.patch.object(torch, "eig", modern_eig, create=True):
        peer = pyhessian.hessian(
            problem.model, F.cross_entropy, data=(problem.inputs, problem.targets), cuda=False
        )
        problem.model.zero_grad()
        peer.density(iter=STEPS, n_v=VECTORS)
