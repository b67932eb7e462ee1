"""One sample, all routes: is each right, refused, told, raw, or wrong?

Order k of a route is compared with central differences of order k - 1 of hodiff's first route, once that was found
right; where it was refused, with second differences of the order below it (the first: differences of the value).
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hodiff
from tests.support.differences import Estimate, estimated, first_difference, largest, second_difference
from tests.torch_ops.database import Problem
from tests.torch_ops.routes import ROUTES, Directions, Route, grad, hvp, jet

Verdict = str
"""`right`; `refused: ...`, by a hodiff error; `told`, not finite and said so; `raises: ...`, anything else;
`wrong 1e-1`; `unsure`, where differences cannot tell; `defined: ...`, where PyTorch means no derivative."""

Scalar = Callable[[Any], Any]


def judge(problem: Problem, routes: tuple[Route, ...] = ROUTES) -> dict[str, Verdict]:
    """The verdict on each route that has one; empty where the operation has no finite value there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad():
                finite = math.isfinite(largest(problem.outputs(problem.x)))
            loss = problem.loss()
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return {}
        if not finite:
            return {}
        directions = _directions(problem.x)
        truths = {
            **{order: _of_loss(loss, problem.x, directions, order) for order in (1, 2, 3)},
            **{-order: _of_outputs(problem.outputs, problem.x, directions, order) for order in (1, 2, 3)},
        }
        verdicts = {}
        for route in routes:
            f = problem.outputs if route.vector else loss
            verdict = _verdict(route, f, problem.x, directions, truths[-route.order if route.vector else route.order])
            if route.ours and problem.defined and verdict is not None and verdict.startswith("wrong"):
                verdict = f"defined: {problem.defined}"
            if verdict is not None:
                verdicts[route.name] = verdict
        return verdicts


def _directions(x: Tensor) -> Directions:
    drawn = torch.randn(2, x.numel(), dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    first, second = drawn / drawn.norm(dim=1, keepdim=True)
    return first, second


UNSURE = Estimate(torch.tensor(math.nan), math.inf)


def _of_loss(loss: Scalar, x: Tensor, d: Directions, order: int) -> Estimate:
    """The derivative of that order by differences of the one below; hodiff's, verified before."""
    u, v = d
    plain = lambda z: loss(z).detach()

    def first(z: Tensor) -> Tensor:
        try:
            return grad(loss, z, d)
        except hodiff.GraphError:
            return first_difference(lambda s: plain(z + s * u))

    try:
        with torch.no_grad():
            if order == 1:
                return estimated(lambda t: plain(x + t * u))
        if order == 2:
            return estimated(lambda t: first(x + t * v))
        try:
            return estimated(lambda t: hvp(loss, x + t * v, d))
        except hodiff.GraphError:
            return Estimate(second_difference(lambda t: first(x + t * v)), 1e-7)
    except Exception:  # what the route itself will say of it
        return UNSURE


def _of_outputs(outputs: Scalar, x: Tensor, d: Directions, order: int) -> Estimate:
    try:
        with torch.no_grad():
            if order == 1:
                return estimated(lambda t: outputs(x + t * d[0]))
            found = estimated(lambda t: jet(order - 1)(outputs, x + t * d[0], d))
            # Nothing is exact to more than some digits of the values (of a saturated softmax of large ones, say).
            return found._replace(error=found.error + 1e-11 * largest(outputs(x)))
    except Exception:
        return UNSURE


def _verdict(route: Route, f: Scalar, x: Tensor, d: Directions, truth: Estimate) -> Verdict | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = route.run(f, x, d)
        except hodiff.HodiffError as error:
            return f"refused: {_line(error)}"
        except Exception as error:
            return f"raises: {type(error).__name__}: {_line(error)}"
    if got is None:
        return None
    told = any(issubclass(w.category, hodiff.HodiffWarning) for w in caught)
    return compare(got.detach(), truth, told)


def compare(got: Tensor, truth: Estimate, told: bool) -> Verdict:
    if not math.isfinite(truth.error) or not math.isfinite(largest(truth.value)):
        return "unsure"
    if got.shape != truth.value.shape:
        return f"wrong shape {tuple(got.shape)}"
    apart, scale = largest(got - truth.value), max(largest(truth.value), 1e-3)
    if apart <= 1e-6 * scale + 10 * truth.error:
        return "right" if truth.error <= 1e-4 * scale else "unsure"
    if not math.isfinite(apart):
        return "told" if told else "wrong, not finite"
    return "unsure" if apart <= 1e3 * truth.error else f"wrong {apart / scale:.0e}"


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
