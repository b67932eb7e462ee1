"""Options at their border: 0, the least count and the default, given by hand, mean what their page says.

A border is where `if option:` takes a value that was given for none that was. The table is held to the signatures of
all public names: a new option with a number needs a row.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff import ConvergenceWarning, InputError, implicit, rules
from tests.support.callers import generator, tensors

D = torch.float64
X = torch.linspace(-0.9, 1.1, 12, dtype=D).reshape(4, 3)
W = torch.tensor([[1.0, 0.3, 0.0], [0.0, 0.7, 0.2], [0.5, 0.0, 1.5]], dtype=D)
A = torch.diag(torch.linspace(1, 3, 40, dtype=D)) + 0.01
B = torch.linspace(1, 2, 40, dtype=D)
SCALE = torch.tensor(1.7, dtype=D, requires_grad=True)

Call = Callable[..., Any]
"""With the option under trial as a keyword; random numbers are the same at each call."""


def rows(x: Tensor) -> Tensor:
    return torch.sin(x @ W).prod(-1) + x.square().sum(-1)


def operator(**options: Any) -> hodiff.MatrixOperator:
    return hodiff.MatrixOperator(A, **options)


def fisher(**options: Any) -> Tensor:
    model = lambda w, batch: batch[0] @ w
    data = [(X, torch.tensor([0, 2, 1, 0]))]
    F = hodiff.FisherOperator(
        model, nn.CrossEntropyLoss(), W.clone(), data=data, generator=generator(), **{"kind": "mc", **options}
    )
    return F @ W


def hessian(**options: Any) -> Tensor:
    return hodiff.HessianOperator(lambda w: rows(X @ w).sum(), W.clone(), **options) @ W


def gauss_newton(**options: Any) -> Tensor:
    loss = lambda outputs, batch: ((outputs - batch[1]).square().sum(), 1)
    data = [(X, X.sin())]
    return hodiff.GaussNewtonOperator(lambda w, batch: (batch[0] @ w).tanh(), loss, W.clone(), data=data, **options) @ W


def jacobian(**options: Any) -> Tensor:
    return hodiff.JacobianOperator(lambda w: (X @ w).tanh(), W.clone(), **options) @ W


def fit(steps: int = 3, **options: Any) -> Tensor:
    p = nn.Parameter(torch.tensor([0.5, 0.5], dtype=D))
    t = torch.linspace(0, 1, 7, dtype=D)
    optimizer = hodiff.LevenbergMarquardt(lambda p: p[0] * torch.exp(-p[1] * t) - 2 * torch.exp(-1.5 * t), p, **options)
    for _ in range(steps):
        optimizer.step()
    return torch.cat([p.detach(), torch.tensor([optimizer.last.damping], dtype=D)])


def solution(of: Call, f: Call, **options: Any) -> Tensor:
    """A solution's derivative by what it depends on."""
    x = torch.ones(3, dtype=D) * SCALE.detach()
    return torch.autograd.grad(of(f, x, **options).sum(), SCALE)[0]


def unrolled(rule: Any, **options: Any) -> Tensor:
    start = torch.tensor([1.0, -2.0], dtype=D)
    value = hodiff.unroll(lambda z: SCALE * (z.square().sum() + z.prod()), start, rule, 4, **options)
    return torch.cat([value.detach(), torch.autograd.grad(value.sum(), SCALE)[0].reshape(1)])


def path_length(**options: Any) -> Tensor:
    penalty = hodiff.PathLengthPenalty(**options)
    torch.manual_seed(0)
    first = penalty(lambda z: (z @ W)[:, None, None], X.clone())
    return torch.stack([first.detach(), penalty.mean_length.to(D)])


CALLS: dict[str, Call] = {
    "FisherOperator": fisher,
    "GaussNewtonOperator": gauss_newton,
    "HessianOperator": hessian,
    "JacobianOperator": jacobian,
    "LevenbergMarquardt": fit,
    "PathLengthPenalty": path_length,
    "check_derivatives": lambda **o: torch.tensor(
        float(len(hodiff.check_derivatives(lambda x: (x**3).sum(), X, **o).checks)), dtype=D
    ),
    "curvature_penalty": lambda **o: hodiff.curvature_penalty(rows, X, **o),
    "diagonal": lambda **o: hodiff.diagonal(operator(), generator=generator(), **o),
    "divergence": lambda **o: hodiff.divergence(lambda x: (x @ W).sin(), X, generator=generator(), **o),
    "dragan_penalty": lambda **o: hodiff.dragan_penalty(rows, X, generator=generator(), **o),
    "eigsh": lambda **o: hodiff.eigsh(operator(), generator=generator(), **o),
    "eikonal_penalty": lambda **o: hodiff.eikonal_penalty(rows, X, **o),
    "gradient_norm_penalty": lambda **o: hodiff.gradient_norm_penalty(lambda w: rows(X @ w).sum(), W.clone(), **o),
    "gradient_penalty": lambda **o: hodiff.gradient_penalty(rows, X, **o),
    "hessian_penalty": lambda **o: hodiff.hessian_penalty(
        lambda x: (x @ W).sin(), X, method="differences", generator=generator(), **o
    ),
    "jacobian_penalty": lambda **o: hodiff.jacobian_penalty(lambda x: (x @ W).sin(), X, generator=generator(), **o),
    "laplacian": lambda **o: hodiff.laplacian(rows, X, generator=generator(), **o),
    "logdet": lambda **o: hodiff.logdet(operator(), generator=generator(), **o),
    "r1_penalty": lambda **o: hodiff.r1_penalty(rows, X, **o),
    "r2_penalty": lambda **o: hodiff.r2_penalty(rows, X, **o),
    "sample_norm": lambda **o: hodiff.sample_norm(X, **o),
    "second_order_operator": lambda **o: hodiff.second_order_operator(rows, X, torch.eye(3, dtype=D), **o),
    "sliced_score_matching_loss": lambda **o: hodiff.sliced_score_matching_loss(
        lambda x: (x @ W).sin(), X, generator=generator(), **o
    ),
    "solve": lambda **o: hodiff.solve(operator(), B, **o),
    "spectral_density": lambda **o: hodiff.spectral_density(operator(), generator=generator(), **o),
    "trace": lambda **o: hodiff.trace(operator(), generator=generator(), **o),
    "unroll": lambda **o: unrolled(rules.SGD(lr=0.1), **o),
    "value_and_divergence": lambda **o: hodiff.value_and_divergence(
        lambda x: (x @ W).sin(), X, generator=generator(), **o
    ),
    "wgan_gp_penalty": lambda **o: hodiff.wgan_gp_penalty(rows, X, X.flip(0), generator=generator(), **o),
    "implicit.argmin": lambda **o: solution(implicit.argmin, lambda x: ((x - SCALE) ** 2).sum(), **o),
    "implicit.root": lambda **o: solution(implicit.root, lambda x: x - SCALE, **o),
    "implicit.fixed_point": lambda **o: solution(implicit.fixed_point, lambda x: (x + SCALE) / 2, **o),
    "sparse.sparsity_pattern": lambda **o: hodiff.sparse.sparsity_pattern(lambda x: (x**2).sum(), X, **o).rows.to(D),
    **{
        f"rules.{name}": lambda name=name, **o: unrolled(getattr(rules, name)(**o))
        for name in rules.__all__
        if name != "Rule"
    },
}


def numbers() -> Iterator[tuple[str, str]]:
    """Each option of a public name that is a number, by its signature."""
    for prefix, module in (("", hodiff), ("implicit.", implicit), ("rules.", rules), ("sparse.", hodiff.sparse)):
        for name in module.__all__:
            of = getattr(module, name)
            if (
                inspect.ismodule(of)
                or not callable(of)
                or (isinstance(of, type) and issubclass(of, (tuple, BaseException)))
            ):
                continue
            for option in inspect.signature(of).parameters.values():
                default, kinds = option.default, set(str(option.annotation).replace(" ", "").split("|"))
                number = type(default) in (int, float) or (default is None and kinds & {"int", "float"})
                if number and option.name not in ELSEWHERE:
                    yield prefix + name, option.name


ELSEWHERE = {"batch_ndim", "k"}
"""`batch_ndim` has properties of its own (tests/property/test_batch.py); `k` is a position."""


def refused(number: float, words: str = "expected a") -> tuple[float, str]:
    return number, words


def like(**options: Any) -> Call:
    """The call's value with other options in place of the one under trial."""
    return lambda call: tensors(call(**options))


def times(factor: float, **options: Any) -> Call:
    return lambda call: [factor * part for part in tensors(call(**options))]


def value(of: Callable[[], Any]) -> Call:
    return lambda call: [torch.as_tensor(part, dtype=D) for part in tensors(of())]


def _noise_of(std: float) -> Tensor:
    """DRAGAN's samples, by its docstring."""
    draws = generator()
    noise = torch.rand(X.shape, dtype=D, generator=draws)
    alpha = torch.rand(4, 1, dtype=D, generator=draws)
    return hodiff.gradient_penalty(rows, X + alpha * std * X.std() * noise, target=1.0, weight=10.0)


COUNT = [refused(0, "expected an integer of at least"), refused(-1, "expected an integer of at least")]
# What an option means wherever it is, but in MEANS: a number that is refused, with words of the message, or that gives
# what a function of the call says.
ANYWHERE: dict[str, list[tuple[float, Any]]] = {
    **dict.fromkeys(
        ("samples", "directions", "tries", "order", "steps", "points", "iterations", "products", "last"), COUNT
    ),
    "memory_budget": [(0, like()), (1, like()), (0.0, like()), refused(-1, "expected bytes")],
    "weight": [(0.0, times(0.0)), (3.0, times(3.0, weight=1.0))],
    "gamma": [(0.0, times(0.0)), (3.0, times(0.3)), refused(-1)],
    "grad_scale": [(64.0, like()), refused(0, "expected a positive number"), refused(-1)],
    "rtol": [refused(0.0, "expected a positive number, or None"), refused(-1)],
    "damping": [(0.0, like()), refused(-1, "at least 0")],
    "momentum": [(0.0, like()), refused(-1, "at least 0")],
    "target": [refused(-1, "at least 0")],
    "power": [refused(0, "at least 1"), refused(0.5, "at least 1")],
    "ord": [refused(0, "expected 2, 1 or"), refused(3, "expected 2, 1 or")],
    "lr": [(0.0, value(lambda: torch.tensor([1.0, -2.0, 0.0]))), refused(-1, "at least 0")],
    "weight_decay": [(0.0, like()), refused(-1, "at least 0")],
    "eps": [refused(-1, "at least 0")],
    "polish": [(0, like()), refused(-1, "at least 0")],
    "gradient_tol": [(0.0, like()), refused(-1, "at least 0, or None")],
    "restart": [refused(0, "expected an integer of at least 1")],
    "scale": [(1.0, like()), refused(0, "expected a positive number")],
}
MEANS: dict[tuple[str, str], list[tuple[float, Any]]] = {
    ("LevenbergMarquardt", "memory_budget"): [
        (1 << 20, like()),
        refused(0, "takes a matrix"),
        refused(-1, "expected bytes"),
    ],
    ("LevenbergMarquardt", "damping"): [refused(0, "expected a positive number"), refused(-1)],
    ("LevenbergMarquardt", "momentum"): [(0.0, like()), refused(1, "below 1"), refused(-1)],
    ("LevenbergMarquardt", "min_damping"): [(0.0, like()), refused(-1, "at least 0")],
    ("PathLengthPenalty", "weight"): [
        (0.0, lambda call: [torch.stack([torch.zeros((), dtype=D), call()[1]])]),
        (3.0, lambda call: [torch.stack([3 / 2 * call()[0], call()[1]])]),
        refused(-1),
    ],
    ("PathLengthPenalty", "decay"): [refused(-1), refused(1.5, "between 0 and 1")],
    ("solve", "damping"): [
        (0.0, like()),
        (0.5, value(lambda: torch.linalg.solve(A + 0.5 * torch.eye(40, dtype=D), B))),
        refused(-1),
    ],
    # H = 2, J = 1 and 1/2: the derivative of x = s by s, three times, is a part of 1
    ("implicit.argmin", "damping"): [(0.0, like()), (1.0, times(2 / 3)), refused(-1)],
    ("implicit.root", "damping"): [(0.0, like()), (1.0, times(1 / 2)), refused(-1)],
    ("implicit.fixed_point", "damping"): [(0.0, like()), (1.0, times(1 / 3)), refused(-1)],
    ("solve", "restart"): [refused(0, "method='gmres'")],
    ("implicit.argmin", "restart"): [refused(0, "method='gmres'")],
    ("eigsh", "basis"): [refused(7, "at least 8"), refused(0, "at least 8")],
    ("hessian_penalty", "samples"): [refused(1, "at least 2"), refused(0, "at least 2")],
    ("spectral_density", "points"): [refused(1, "at least 2"), refused(0, "at least 2")],
    ("spectral_density", "width"): [refused(0.0, "expected a positive number"), refused(-1)],
    ("sparse.sparsity_pattern", "order"): [
        (2, like()),
        (1, value(lambda: torch.zeros(12))),
        refused(0, "expected 1"),
        refused(3, "expected 1"),
    ],
    ("check_derivatives", "directions"): [(1, times(1 / 3)), *COUNT],
    ("check_derivatives", "order"): [(1, times(1 / 2)), *COUNT],
    ("curvature_penalty", "h"): [refused(0.0, "expected a positive number"), refused(-1)],
    ("curvature_penalty", "weight"): [(0.0, times(0.0)), (3.0, times(3 / 4)), refused(-1)],
    ("dragan_penalty", "std"): [(0.0, value(lambda: _noise_of(0.0))), refused(-1)],
    ("hessian_penalty", "epsilon"): [refused(0.0, "expected a positive number"), refused(-1)],
    ("logdet", "shift"): [(0.0, like()), (1.0, value(lambda: torch.logdet(A + torch.eye(40, dtype=D)))), refused(-1)],
    ("second_order_operator", "c"): [(0.0, like()), (0, like()), (2.0, lambda call: [call() + 2 * rows(X)])],
    ("rules.SGD", "dampening"): [(0.0, like())],
    ("rules.AdamW", "weight_decay"): [(0.0, value(lambda: CALLS["rules.Adam"]())), refused(-1)],
    ("gradient_norm_penalty", "target"): [(0.0, like()), refused(-1)],
    ("gradient_penalty", "target"): [(0.0, like()), (1.0, value(lambda: 10 * CALLS["eikonal_penalty"]())), refused(-1)],
    ("eikonal_penalty", "target"): [(0.0, value(lambda: 0.1 * CALLS["gradient_penalty"]())), refused(-1)],
}
OPTIONS = list(numbers())
TRIALS = [
    (name, option, number, meant)
    for name, option in OPTIONS
    for number, meant in MEANS.get((name, option)) or ANYWHERE.get(option) or ()
]


@pytest.mark.names
def test_each_number_has_its_borders() -> None:
    assert not [f"{name}({option}=)" for name, option in OPTIONS if not {(name, option), option} & {*MEANS, *ANYWHERE}]
    missing = {name for name, _ in OPTIONS} - set(CALLS)
    assert not missing, f"say in CALLS how these are called: {sorted(missing)}"
    assert not set(MEANS) - set(OPTIONS)


@pytest.mark.parametrize(("name", "option", "number", "meant"), TRIALS)
def test_a_border_is_what_it_says(name: str, option: str, number: float, meant: Any) -> None:
    call = CALLS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        if isinstance(meant, str):
            with pytest.raises(InputError, match=rf"{option}.*{meant}|{meant}.*{option}"):
                call(**{option: number})
        else:
            torch.testing.assert_close(tensors(call(**{option: number})), tensors(meant(call)), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_the_default_by_hand_is_the_default(name: str, option: str) -> None:
    prefix, _, last = name.rpartition(".")
    default = inspect.signature(getattr(getattr(hodiff, prefix) if prefix else hodiff, last)).parameters[option].default
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        by_hand = tensors(CALLS[name](**{option: default}))
        torch.testing.assert_close(by_hand, tensors(CALLS[name]()), rtol=0, atol=0)


def near(part: float) -> Tensor:
    """Points that are no solutions, by so much."""
    return (1 + part) * SCALE.detach() * torch.ones(3, dtype=D)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize(
    ("off", "tol", "warns"), [(1e-9, None, False), (1e-9, 0.0, True), (0.1, None, True), (0.1, 1.0, False)]
)
@pytest.mark.parametrize("of", ["argmin", "root", "fixed_point"])
def test_a_tolerance_of_nothing_warns_of_anything(
    mode: Any, off: float, tol: float | None, warns: bool, of: str
) -> None:
    f = {
        "argmin": lambda x: ((x - SCALE) ** 2).sum(),
        "root": lambda x: x - SCALE,
        "fixed_point": lambda x: (x + SCALE) / 2,
    }[of]
    with warnings.catch_warnings(record=True) as seen, mode():
        warnings.simplefilter("always")
        getattr(implicit, of)(f, near(off), gradient_tol=tol)
    assert any(issubclass(warning.category, ConvergenceWarning) for warning in seen) == warns
