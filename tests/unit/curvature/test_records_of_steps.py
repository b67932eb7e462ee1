"""What a step of LevenbergMarquardt says of itself is true: each number by hand, for each way that a step can go."""

import itertools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hodiff

D = torch.float64
A = torch.tensor([[1.0, 0.2, 0.0], [0.3, 2.0, 0.0], [0.0, -0.4, 0.0], [0.7, 0.1, 0.0], [0.2, 0.9, 0.0]], dtype=D)
B = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.3], dtype=D)
START = torch.tensor([0.9, -1.4, 0.6], dtype=D)

# Of rows of A, and the parameters. The third parameter matters to none but "all matter".
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda rows, x: rows @ x - B[: len(rows)],
    "all matter": lambda rows, x: torch.cat([rows @ x - B[: len(rows)], x[2:] - 0.1]),
    "fewer than parameters": lambda rows, x: rows[:2] @ x - B[:2],
    "curved": lambda rows, x: torch.exp(rows @ x) - B[: len(rows)] - 2,
    "steep": lambda rows, x: (rows @ x) ** 3 - B[: len(rows)],
    "random": lambda rows, x: (rows @ x) * (1 + torch.rand(len(rows), dtype=D)) - B[: len(rows)],
    "random and curved": lambda rows, x: torch.exp((rows @ x) * torch.rand(len(rows), dtype=D)) - B[: len(rows)],
    "a plateau": lambda rows, x: torch.round(rows @ x) + 0 * (rows @ x).sin() - 0.3,
    "a promise alone": lambda rows, x: rows @ x - (rows @ x).detach() + 0.7,
    "nothing left": lambda rows, x: rows @ (x - START),
    "a kink": lambda rows, x: (rows @ x - 3).relu() + (rows @ x).abs(),
}
LINEAR = {"linear", "all matter", "fewer than parameters", "random"}
WAYS = [
    way
    for way in itertools.product(RESIDUALS, [True, False], [True, False], [0.0, 0.6], [D, torch.float32])
    if not way[2] or way[0] not in ("all matter", "fewer than parameters")  # which are not one for each sample
]


@pytest.mark.parametrize(("name", "search", "batched", "momentum", "dtype"), WAYS)
def test_each_number_of_a_record(name: str, search: bool, batched: bool, momentum: float, dtype: torch.dtype) -> None:
    calls = []
    x = START.to(dtype).clone()

    def of_all(x: Tensor) -> Tensor:
        calls.append(1)
        return RESIDUALS[name](A, x.to(D))

    def of_rows(x: Tensor, rows: Tensor) -> Tensor:
        calls.append(1)
        return RESIDUALS[name](rows, x.to(D))

    optimizer = hodiff.LevenbergMarquardt(of_rows if batched else of_all, x, search=search, momentum=momentum)
    for number in range(5):
        before, seed = x.clone(), 10 + number
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = optimizer.step(A) if batched else optimizer.step()
        after, last = torch.rand(1), optimizer.last
        residuals = []
        for at in (before, x):
            torch.manual_seed(seed)
            residuals.append(RESIDUALS[name](A, at.to(D)))
        assert name in ("a kink", "a plateau") or torch.equal(after, torch.rand(1))  # draws of one evaluation
        first, second = (0.5 * float(r.square().sum()) for r in residuals)
        assert float(loss) == pytest.approx(first, rel=1e-6 if dtype == torch.float32 else 1e-12, abs=1e-300)
        assert last.value == pytest.approx(first, rel=1e-12, abs=1e-300)
        assert last.accepted or torch.equal(x, before)
        close = 1e-9 * first + 1e-300
        if last.accepted:
            assert last.decrease == pytest.approx(first - second, rel=1e-6, abs=close)
            assert second <= first * (1 + 1e-12)
        if last.accepted and name in LINEAR and last.decrease > max(1e-4 * first, 1e-12) and dtype == D:
            assert last.ratio == pytest.approx(1, rel=1e-6)  # a linear model is exact
        assert math.isfinite(last.gradient) and 0 <= last.gradient <= 1 + 1e-9
        J = torch.autograd.functional.jacobian(
            lambda at, seed=seed: (torch.manual_seed(seed), RESIDUALS[name](A, at))[1], before.to(D)
        )
        sizes, size = J.norm(dim=0), residuals[0].norm()
        cosines = torch.where(sizes * size > 0, (J.T @ residuals[0]).abs() / (sizes * size), 0.0)
        if dtype == D:
            assert last.gradient == pytest.approx(float(cosines.max()), rel=1e-6, abs=1e-9)
        assert 0 <= last.length <= 1 and last.damping >= 0
        if name == "a plateau" or (name == "a promise alone" and search):  # the other rule polishes below rounding
            assert not last.accepted
            assert torch.equal(x, before)


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_a_warning_of_the_first_step_is_one(search: bool, batched: bool) -> None:
    x = torch.ones(3, dtype=D)
    f = lambda x, rows=A: (rows @ x)[:, None] - B[: len(rows)]
    optimizer = hodiff.LevenbergMarquardt(
        (lambda x, rows: f(x, rows)) if batched else (lambda x: f(x)), x, search=search
    )
    seen: list[int] = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                optimizer.step(*([A] if batched else []))
            except hodiff.InputError as error:
                assert batched
                assert "crossed" in str(error) or "broadcast" in str(error)
                return
        seen.append(len(caught))
    assert seen == [1, 0, 0]
