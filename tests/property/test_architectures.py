"""Each architecture's derivatives, to the third order, in inputs and in parameters, along random directions.

Order k of hodiff is compared with Richardson differences of its order k - 1, once that was found right; order 1 with
differences of values. Where a model is not a function of its point alone (straight-through), its ``oracle`` is moved.
"""

import os
import re
import warnings

import pytest
import torch
from torch import Tensor

import hodiff
from tests.meta.source import ROOT
from tests.support.architectures import ARCHITECTURES
from tests.support.differences import estimated
from tests.support.modules import Case, Setting
from tests.support.oracle import flatten, trainable, unflatten

CELLS = [(case, where) for case in ARCHITECTURES for where in case.wheres]


class Moved:
    """A setting whose point can be moved along directions, and its derivatives there, by hodiff."""

    def __init__(self, setting: Setting, where: str) -> None:
        self.setting, self.where = setting, where
        self.like = setting.x if where == "inputs" else trainable(setting.model)
        self.start = flatten(self.like).clone()
        self.f = setting.of_input if where == "inputs" else setting.of_model
        drawn = torch.randn(3, self.start.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        self.directions = drawn / drawn.norm(dim=1, keepdim=True)

    def point(self, shift: Tensor | float = 0.0) -> object:
        moved = unflatten(self.start + shift, self.like)
        if self.where == "inputs":
            return moved
        for parameter, value in zip(self.like.values(), moved.values(), strict=True):
            parameter.data.copy_(value)
        return self.setting.model

    def along(self, gradient: object, number: int) -> Tensor:
        return flatten(gradient) @ self.directions[number]

    def value(self, point: object) -> Tensor:
        return self.f(point).detach()

    def first(self, point: object) -> Tensor:
        return self.along(hodiff.grad(self.f, point), 0)

    def second(self, point: object) -> Tensor:
        return self.along(hodiff.hvp(self.f, point, unflatten(self.directions[0], self.like)), 1)

    def third(self, point: object) -> Tensor:
        v, w = (unflatten(self.directions[i], self.like) for i in (0, 1))
        if self.where == "inputs":
            return self.along(hodiff.grad(lambda z: (hodiff.hvp(self.f, z, v) * w).sum(), point), 2)
        inner = lambda m: sum((p * w[name]).sum() for name, p in hodiff.hvp(self.f, m, v).items())
        return self.along(hodiff.grad(inner, point), 2)


def build(case: Case, where: str, oracle: bool) -> Moved:
    return Moved((case.oracle if oracle and case.oracle else case.build)(), where)


@pytest.mark.table(wide=50)
@pytest.mark.parametrize(("case", "where"), CELLS, ids=lambda p: str(p).replace(" ", "_"))
def test_derivatives_to_the_third_order(case: Case, where: str) -> None:
    tested, below = build(case, where, oracle=False), build(case, where, oracle=True)
    chain = [Moved.value, Moved.first, Moved.second, Moved.third]
    for order in (1, 2, 3):
        if case.verdict(order, where) != "right":
            with pytest.raises(hodiff.GraphError, match=case.verdict(order, where)):
                chain[order](tested, tested.point())
            continue
        got = chain[order](tested, tested.point())
        truth = estimated(lambda t, k=order: chain[k - 1](below, below.point(t * below.directions[k - 1])), levels=4)
        scale = max(float(truth.value.abs()), 1e-2)
        assert truth.error < 1e-5 * scale, f"order {order}: the differences are rough ({truth.error:.1e})"
        assert float((got - truth.value).abs()) < 1e-7 * scale + 10 * truth.error, f"order {order}: {got}, {truth}"
        assert float(truth.value.abs()) > 1e-12 or order > 1, "a direction along which nothing changes tests nothing"


PAGE = ROOT / "docs" / "generated" / "architectures.md"


def test_published_list_is_fresh() -> None:
    """What is right, refused, or right for what is meant, as the tests above hold it."""
    count = sum(case.verdict(order, where) == "right" for case, where in CELLS for order in (1, 2, 3))
    refused = [case.name for case in ARCHITECTURES if case.verdicts]
    meant = [case.name for case in ARCHITECTURES if case.oracle]
    text = (
        f"# Architectures\n\n{len(ARCHITECTURES)} models and losses, {len(CELLS)} with inputs and parameters, three "
        f"orders each: {count} right, {3 * len(CELLS) - count} refused ({', '.join(refused)}), 0 wrong. "
        f"Right for the function that is meant, and not for the rounding itself: {'; '.join(meant)}.\n\n"
        f"{'; '.join(case.name for case in ARCHITECTURES)}.\n"
    )
    if os.environ.get("HODIFF_WRITE_TABLES") == "1":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_there_are_sixty_of_them() -> None:
    assert len({case.name for case in ARCHITECTURES}) == len(ARCHITECTURES) >= 60


@pytest.mark.parametrize("name", ["quantized weights, straight through", "vector quantized, straight through"])
def test_straight_through_is_found_and_can_be_meant(name: str) -> None:
    setting = next(case for case in ARCHITECTURES if case.name == name).build()
    with pytest.raises(hodiff.DerivativeError, match=r"detach\(\) gives a value without its graph") as info:
        hodiff.check_derivatives(setting.of_model, setting.model)
    (cause,) = info.value.report.causes
    place = re.search(r'allow="([^"]+)"', cause.fix)[1]
    assert hodiff.check_derivatives(setting.of_model, setting.model, allow=place).ok


@pytest.mark.table(wide=50)
@pytest.mark.nightly
@pytest.mark.parametrize(("case", "where"), CELLS, ids=lambda p: str(p).replace(" ", "_"))
def test_check_derivatives_raises_no_false_alarm(case: Case, where: str) -> None:
    if case.oracle is not None or case.verdicts:
        pytest.skip("it has no derivative, or one by definition")
    setting = case.build()
    f, point = (setting.of_input, setting.x) if where == "inputs" else (setting.of_model, setting.model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hodiff.check_derivatives(f, point).ok
