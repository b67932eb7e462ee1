"""Operators against curvlinops, hessian-eigenthings, double backward by hand and `torch.func`.

The peers are optional: where one is not installed its rows say so; one that is installed and does
not run ends the program. They are not among the project's requirements; install them beside it, for
example
`pip install --no-deps --target DIR curvlinops-for-pytorch==3.0.1 hessian-eigenthings==1.0.0a5` with
their own requirements, and set PYTHONPATH=DIR.
"""

import gc
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from benchmarks.models import Problem, networks
from benchmarks.table import Row
from benchmarks.timing import Times, race, ratios, spread
from hodiff.curvature._memory import LiveBytes

CURVLINOPS = "curvlinops-for-pytorch"
EIGENTHINGS = "hessian-eigenthings"
MANY = 8
VECTORS = 20


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peers' deprecations
        for problem in networks():
            yield from against_gradients(problem, 5 if quick else 15)
        for problem, bars in ((networks()[0], SMALL), (middle(), MIDDLE), (large(), LARGE)):
            yield from against_peers(problem, bars, 3 if quick else 9)
        yield from memory(large())
        yield from eigenpairs(networks()[0], 1 if quick else 5)


SMALL = {"product": 0.3, "many": 0.55, "ggn": 0.5}
MIDDLE = {
    "product": 0.3,
    "many": 0.55,
    "ggn": 0.5,
    "ggn many": 0.65,
    "trace": 0.95,
    "diagonal": 0.95,
}
LARGE = {"product": 0.55, "many": 0.65, "ggn": 0.5}


def middle() -> Problem:
    """Eight vectors of its parameters fit one batched pass; of `large`, none do."""
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 10)
    )
    return Problem("MLP 256-256-64-10", mlp, torch.randn(8, 256), torch.randint(10, (8,)))


def large() -> Problem:
    torch.manual_seed(0)
    mlp = nn.Sequential(
        nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 10)
    )
    return Problem("MLP 256-1024-1024-10", mlp, torch.randn(256, 256), torch.randint(10, (256,)))


def module(name: str) -> Any:
    """A peer, or None where it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def operator(problem: Problem) -> hodiff.HessianOperator:
    return hodiff.HessianOperator(problem.loss, problem.model)


def gauss_newton(problem: Problem) -> hodiff.GaussNewtonOperator:
    data = [(problem.inputs, problem.targets)]
    predict = lambda model, batch: model(batch[0])  # noqa: E731
    return hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), problem.model, data=data)


def gradient(problem: Problem) -> Callable[[], object]:
    leaves = list(problem.model.parameters())
    return lambda: torch.autograd.grad(problem.loss(problem.model), leaves)


# --- products -------------------------------------------------------------------------------------


def against_gradients(problem: Problem, rounds: int) -> Iterator[Row]:
    """A cached product in gradients, with the same pass by hand for comparison."""
    leaves = list(problem.model.parameters())
    H, G = operator(problem), gauss_newton(problem)
    v = {name: torch.randn_like(p) for name, p in problem.model.named_parameters()}
    vectors = list(v.values())
    graph = torch.autograd.grad(problem.loss(problem.model), leaves, create_graph=True)
    times = race(
        {
            "hodiff": lambda: H @ v,
            "Gauss-Newton": lambda: G @ v,
            "by hand, cached": lambda: torch.autograd.grad(
                graph, leaves, vectors, retain_graph=True
            ),
            "by hand, fresh": lambda: by_hand(problem, leaves, vectors),
            "gradient": gradient(problem),
            **functional(problem, v),
        },
        rounds=rounds,
    )
    found = ratios(times, "hodiff", "gradient")
    met = statistics.median(found) <= 2.2
    yield Row("cached H @ v / gradient", problem.name, spread(found), "2.2", met, times)
    for name in ("by hand, cached", "by hand, fresh", "jvp(grad)", "Gauss-Newton"):
        yield Row(f"  {name} / gradient", problem.name, spread(ratios(times, name, "gradient")))


def by_hand(problem: Problem, leaves: list[Tensor], vectors: list[Tensor]) -> object:
    first = torch.autograd.grad(problem.loss(problem.model), leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, vectors)


def functional(problem: Problem, v: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """`torch.func`'s forward over reverse."""
    point = {name: p.detach() for name, p in problem.model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        buffers = {name: buffer.clone() for name, buffer in problem.model.named_buffers()}
        return problem.loss(
            lambda x: functional_call(problem.model, {**parameters, **buffers}, (x,))
        )  # type: ignore

    return {"jvp(grad)": lambda: jvp(grad(loss), (point,), (v,))}


def against_peers(problem: Problem, bars: dict[str, float], rounds: int) -> Iterator[Row]:
    """One product and eight, of the Hessian and of Gauss-Newton, over those of curvlinops."""
    peer = module("curvlinops")
    size = sum(p.numel() for p in problem.model.parameters())
    if peer is None:
        yield Row("products against curvlinops", problem.name, f"{CURVLINOPS} is not installed")
        return
    v, V = torch.randn(size), torch.randn(size, MANY)
    H, G = operator(problem), gauss_newton(problem)
    theirs = {
        kind: curvlinops(peer, problem, kind)
        for kind in ("HessianLinearOperator", "GGNLinearOperator")
    }
    check(H @ v, theirs["HessianLinearOperator"] @ v)
    check(G @ v, theirs["GGNLinearOperator"] @ v)
    contenders: dict[str, Callable[[], object]] = {
        "product": lambda: H @ v,
        "product, curvlinops": lambda: theirs["HessianLinearOperator"] @ v,
        "many": lambda: H @ V,
        "many, curvlinops": lambda: theirs["HessianLinearOperator"] @ V,
        "ggn": lambda: G @ v,
        "ggn, curvlinops": lambda: theirs["GGNLinearOperator"] @ v,
        "ggn many": lambda: G @ V,
        "ggn many, curvlinops": lambda: theirs["GGNLinearOperator"] @ V,
        "gradient": gradient(problem),
    }
    hutchinson = theirs["HessianLinearOperator"]
    contenders |= {
        "trace": lambda: hodiff.trace(H, samples=VECTORS),
        "trace, curvlinops": lambda: peer.hutchinson_trace(hutchinson, VECTORS),
        "diagonal": lambda: hodiff.diagonal(H, samples=VECTORS),
        "diagonal, curvlinops": lambda: peer.hutchinson_diag(hutchinson, VECTORS),
    }
    other = eigenthings(problem)
    if other is not None:
        contenders["product, eigenthings"] = lambda: other.matvec(v)
    times = race(contenders, rounds=rounds)
    labels = {
        "product": "H @ v",
        "many": f"H @ V, K = {MANY}",
        "ggn": "G @ v",
        "ggn many": f"G @ V, K = {MANY}",
        "trace": f"trace, {VECTORS} vectors",
        "diagonal": f"diagonal, {VECTORS} vectors",
    }
    for key, label in labels.items():
        yield compared(
            f"{label} / curvlinops",
            f"{problem.name}, D = {size}",
            times,
            key,
            "curvlinops",
            bars.get(key),
        )
    if other is None:
        yield Row("H @ v / hessian-eigenthings", problem.name, f"{EIGENTHINGS} is not installed")
    else:
        yield compared(
            "H @ v / hessian-eigenthings", problem.name, times, "product", "eigenthings", None
        )


def compared(subject: str, case: str, times: Times, key: str, peer: str, bar: float | None) -> Row:
    found = ratios(times, key, f"{key}, {peer}")
    ours, theirs = (statistics.median(times[name]) * 1e3 for name in (key, f"{key}, {peer}"))
    met = None if bar is None else statistics.median(found) <= bar
    measured = f"{spread(found)}; {ours:.2f} ms, {theirs:.2f} ms"
    pair = {"hodiff": times[key], peer: times[f"{key}, {peer}"]}
    return Row(subject, case, measured, "" if bar is None else f"{bar}", met, pair)


def curvlinops(peer: Any, problem: Problem, kind: str) -> Any:
    data = [(problem.inputs, problem.targets)]
    parameters = list(problem.model.parameters())
    return getattr(peer, kind)(
        problem.model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False
    )


def eigenthings(problem: Problem) -> Any:
    """hessian-eigenthings' operator, if it is there."""
    peer = module("hessian_eigenthings")
    if peer is None:
        return None
    loss = peer.supervised_loss(nn.CrossEntropyLoss())
    return peer.HessianOperator(problem.model, [(problem.inputs, problem.targets)], loss)


def check(ours: Tensor, theirs: Any) -> None:
    """The contenders compute the same."""
    assert float((ours - torch.as_tensor(theirs)).norm()) <= 1e-3 * float(ours.norm())


# --- memory ---------------------------------------------------------------------------------------


def memory(problem: Problem, many: int = 64) -> Iterator[Row]:
    """The peak of one product with many vectors, beside what was alive before it."""
    size = sum(p.numel() for p in problem.model.parameters())
    V = torch.randn(size, many)
    H, peer = operator(problem), module("curvlinops")
    case = f"{problem.name}, D = {size}, K = {many}"
    ours = peak(lambda: H @ V)
    if peer is None:
        yield Row("peak memory", case, f"{ours / 2**20:.0f} MiB; {CURVLINOPS} is not installed")
        return
    theirs = curvlinops(peer, problem, "HessianLinearOperator")
    other = peak(lambda: theirs @ V)
    measured = (
        f"{ours / other:.2f}; {ours / 2**20:.0f} MiB, {other / 2**20:.0f} MiB (the result is "
        f"{V.nbytes / 2**20:.0f})"
    )
    yield Row("peak memory / curvlinops", case, measured, "0.33", ours / other <= 1 / 3)


def peak(call: Callable[[], object]) -> int:
    gc.collect()
    call()
    with LiveBytes() as live:
        result = call()
    del result
    return live.peak


# --- eigenpairs -----------------------------------------------------------------------------------


def eigenpairs(problem: Problem, rounds: int, k: int = 5) -> Iterator[Row]:
    """The five largest eigenpairs, against curvlinops' operator under SciPy's Lanczos."""
    peer, case = module("curvlinops"), f"{problem.name}, k = {k}"
    H = operator(problem)
    if peer is None:
        yield Row("top eigenpairs / curvlinops and SciPy", case, f"{CURVLINOPS} is not installed")
        return
    from scipy.sparse.linalg import eigsh

    theirs = curvlinops(peer, problem, "HessianLinearOperator").to_scipy()
    rounds_of: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        start = time.perf_counter()
        found = hodiff.eigsh(operator(problem), k, rtol=1e-7)
        rounds_of["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        values, vectors = eigsh(theirs, k=k, which="LA")
        rounds_of["theirs"].append(time.perf_counter() - start)
    vectors = torch.from_numpy(vectors.copy()).float()
    residual = (H @ vectors - vectors * torch.from_numpy(values.copy()).float()).norm(dim=0).max()
    ratio = [a / b for a, b in zip(rounds_of["ours"], rounds_of["theirs"], strict=True)]
    measured = (
        f"{spread(ratio)}; {statistics.median(rounds_of['ours']) * 1e3:.0f} ms, "
        f"{statistics.median(rounds_of['theirs']) * 1e3:.0f} ms; "
        f"residuals {float(found.residual.max()):.1e}, {float(residual):.1e}; "
        f"{found.products} products"
    )
    met = statistics.median(ratio) <= 0.5 and bool(found.residual.max() <= residual)
    yield Row("top eigenpairs / curvlinops and SciPy", case, measured, "0.5", met)
