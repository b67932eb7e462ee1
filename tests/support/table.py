"""Measure each row of the zoo once per session: hodiff's error or the exception it raised; stock torch beside."""

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.func import functional_call, hessian, jacrev, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from tests.support.differences import relative_error
from tests.support.modules import BY_NAME, Case, Setting
from tests.support.oracle import Oracle, flatten, trainable, unflatten

TOLERANCE = 1e-6
"""Far above what differences of these small smooth functions lose, far below the smallest mistake ever seen."""


@dataclass(frozen=True)
class Cell:
    """The relative error of an answer, or the exception in its place; and the warnings on the way."""

    error: float | None
    raised: Exception | None = None
    warned: tuple[type[Warning], ...] = ()

    def __str__(self) -> str:
        if self.error is None:
            return "raises"
        if self.error != self.error:
            return "nan"
        return "right" if self.error < TOLERANCE else f"**{self.error:.0e}**".replace("e-0", "e-").replace("e+0", "e+")


def unit_direction(size: int, seed: int) -> Tensor:
    v = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return v / v.norm()


def target(setting: Setting, where: str) -> tuple:
    """What to differentiate, with respect to what, and how a flat vector looks there."""
    if where == "inputs":
        return setting.of_input, setting.x, setting.x
    return setting.of_model, setting.model, trainable(setting.model)


def _worst(*errors: float) -> float:
    return float("nan") if any(e != e for e in errors) else max(errors)  # noqa: PLR0124


def _first(case: Case, where: str) -> float:
    f, point, _ = target(case.build(), where)
    got = flatten(hodiff.grad(f, point))
    with sdpa_kernel(SDPBackend.MATH):
        oracle = Oracle(case)
        along = [unit_direction(got.numel(), seed) for seed in range(3)]
        expected = torch.stack([oracle.gradient_along(where, v) for v in along])
        return _worst(
            relative_error(torch.stack([got @ v for v in along]), expected),
            relative_error(got, oracle.gradient(where)),
        )


def _second(case: Case, where: str) -> float:
    setting = case.build()
    f, point, like = target(setting, where)
    v = unit_direction(flatten(like).numel(), 3)
    got = flatten(hodiff.hvp(f, point, unflatten(v, like)))
    with sdpa_kernel(SDPBackend.MATH):
        expected = Oracle(case).hvp(where, v)
    errors = [relative_error(got, expected)]
    if v.numel() <= 40:
        matrix = hodiff.hessian(f, point, matrix=True)
        errors += [relative_error(matrix @ v, expected), relative_error(matrix, matrix.T)]
    return _worst(*errors)


def _third(case: Case, where: str) -> float:
    setting = case.build()
    _, _, like = target(setting, where)
    v = unit_direction(flatten(like).numel(), 3)
    vector = unflatten(v, like)

    def curvature(model: torch.nn.Module) -> Tensor:
        if where == "inputs":
            return (hodiff.hvp(lambda x: setting.loss(model, x), setting.x, vector) * vector).sum()
        product = hodiff.hvp(setting.of_model, model, vector)
        return sum((product[name] * vector[name]).sum() for name in vector)

    got = flatten(hodiff.grad(curvature, setting.model))
    with sdpa_kernel(SDPBackend.MATH):
        expected = Oracle(case).third(where, v)
    return relative_error(got, expected)


@cache
def measure(name: str, order: int, where: str) -> Cell:
    """hodiff's answer of one order for one row, against the differences."""
    case = BY_NAME[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.manual_seed(0)
            cell = Cell((_first, _second, _third)[order - 1](case, where))
        except hodiff.GraphError as error:
            cell = Cell(None, error.with_traceback(None))
    return Cell(cell.error, cell.raised, tuple(w.category for w in caught))


def _stock_product(kind: str, case: Case) -> Tensor:
    setting = (case.oracle or case.build)()
    like = trainable(setting.model)
    z = flatten(like)
    v = unit_direction(z.numel(), 3)

    def loss(flat: Tensor) -> Tensor:
        view = unflatten(flat, like)

        class Call(torch.nn.Module):
            def forward(self, *inputs: Tensor) -> Tensor:
                return functional_call(setting.model, view, inputs)

        return setting.loss(Call(), setting.x)

    if kind == "hessian":
        return hessian(loss)(z) @ v
    return jvp(jacrev(loss), (z,), (v,))[1]


def _stock_second(case: Case) -> Tensor:
    setting = (case.oracle or case.build)()
    parameters = list(trainable(setting.model).values())
    v = unit_direction(sum(p.numel() for p in parameters), 3).split([p.numel() for p in parameters])
    options = {"allow_unused": True, "materialize_grads": True}
    g = torch.autograd.grad(setting.of_model(setting.model), parameters, create_graph=True, **options)
    inner = sum((a * b.reshape(a.shape)).sum() for a, b in zip(g, v, strict=True))
    return flatten(torch.autograd.grad(inner, parameters, **options))


def _stock_third(case: Case) -> Tensor:
    setting = (case.oracle or case.build)()
    x, parameters = setting.x.requires_grad_(), list(trainable(setting.model).values())
    v = unit_direction(x.numel(), 3).reshape(x.shape)
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    (g,) = torch.autograd.grad(setting.of_input(x), x, **options)
    (h,) = torch.autograd.grad((g * v).sum(), x, **options)
    return flatten(torch.autograd.grad((h * v).sum(), parameters, allow_unused=True, materialize_grads=True))


@cache
def measure_stock(name: str, kind: str) -> Cell:
    """What plain torch gives: "hessian", "jvp(jacrev)", "twice" for the parameters; "thrice": the third order."""
    case = BY_NAME[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sdpa_kernel(SDPBackend.MATH):
            try:
                torch.manual_seed(0)
                stock = {"twice": _stock_second, "thrice": _stock_third}
                got = stock[kind](case) if kind in stock else _stock_product(kind, case)
            except Exception as error:  # whatever it says, it did not answer
                return Cell(None, error.with_traceback(None))
            oracle = Oracle(case)
            if kind == "thrice":
                v = unit_direction(oracle.start["inputs"].numel(), 3)
                return Cell(relative_error(got.detach(), oracle.third("inputs", v)))
            v = unit_direction(oracle.start["parameters"].numel(), 3)
            return Cell(relative_error(got.detach(), oracle.hvp("parameters", v)))
