"""Numbers of Python that change between calls of a step: constants of its graphs, of which there are two."""

import copy
import enum
import operator
import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.unit.steps.cases import NETS, plain
from tests.unit.steps.support import MARKS, off

pytestmark = [*MARKS, pytest.mark.table(plain=1)]
NUMBERS = (0.5, 0.25, 0.5, 0.75, 0.25, 1.5, 0.75)
"""The second value is told; the third, the fourth and the third again run uncompiled."""


def of_an_argument() -> tuple:
    return (lambda net, x, n: plain(net, x) * n), lambda n: (n,), r"args\[1\]"


def of_a_keyword() -> tuple:
    held: dict[str, float] = {}
    return (lambda net, x, held: plain(net, x) * held["n"]), lambda n: held.update(n=n) or (held,), r"args\[1\]\['n'\]"


def of_a_closure() -> tuple:
    number = 0.0

    def change(n: float) -> tuple:
        nonlocal number
        number = n
        return ()

    return (lambda net, x: plain(net, x) * number), change, "cell_contents|number"


def of_an_attribute() -> tuple:
    net = NETS["tanh"]()

    def change(n: float) -> tuple:
        net.scale = n
        return ()

    return (lambda _, x: plain(net, x) * net.scale), change, r"scale"


def of_an_optimizer() -> tuple:
    group = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).param_groups[0]
    return (lambda net, x: plain(net, x) * group["lr"]), lambda n: group.update(lr=n) or (), "lr"


WHERE = (of_an_argument, of_a_keyword, of_a_closure, of_an_attribute, of_an_optimizer)


@pytest.mark.parametrize("kind", [float, int, operator.neg])
@pytest.mark.parametrize("where", WHERE, ids=lambda f: f.__name__)
def test_a_number_that_varies_is_told_at_its_second_value_and_has_no_third_graph(where, kind) -> None:
    (loss, change, name), net, x = where(), NETS["tanh"](), torch.randn(4, 3)
    step, told = hodiff.compile_step(loss, net, backend="replay"), []
    for n in NUMBERS:
        given = change(kind(4 * n))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ours = step(x, *given)
        told.append([str(each.message) for each in seen if each.category is hodiff.HodiffWarning])
        assert off([ours.detach()], [loss(net, x, *given).detach()]) == 0
    assert [len(each) for each in told] == [0, 1, 0, 1, 0, 0, 0]
    assert "torch.tensor(number)" in told[1][0] and "has changed" in told[1][0]

    assert re.search(name, told[1][0]) and re.search(name, told[3][0]) and "uncompiled" in told[3][0]
    assert step.report.graphs == 2 and step.report.eager == 3


def test_a_third_value_raises_where_nothing_may_run_uncompiled() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * n, net, backend="replay", fallback="raise")
    step(x, 0.5)
    with pytest.warns(hodiff.HodiffWarning, match="A third value runs uncompiled"):
        step(x, 0.25)
    with pytest.raises(hodiff.GraphError, match=r"varies, args\[1\]; pass torch.tensor"):
        step(x, 0.75)
    assert step(x, 0.25) == plain(net, x) * 0.25


def test_a_tensor_that_varies_has_one_graph() -> None:
    """Which is what the warning says to pass."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * n, net, backend="replay", fallback="raise")
    for n in NUMBERS:
        assert step(x, torch.tensor(n)) == plain(net, x) * torch.tensor(n)
    assert step.report.graphs == 1


ARITHMETIC = {
    "1.0 // 0.1 is 9": (lambda n: n // 0.1, (1.0, 0.3)),
    "of a float": (lambda n: 1.0 // n, (0.3, 0.1)),
    "(-1) ** 2 is 1": (lambda n: (-1) ** n, (2, 3)),
    "a string": (lambda n: {"7": 2.0, "7.5": 3.0}.get(f"{n}", 1.0), (7, 7.5)),
    "the sign of zero": (lambda n: 2.0 if str(n) == "-0.0" else 1.0, (-0.0, 1.0)),
    "large": (lambda n: n * 10**12 * n / 1e24, (3000, 4)),
}


@pytest.mark.parametrize("kind", ARITHMETIC)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_arithmetic_of_numbers_is_pythons(kind: str) -> None:
    (of, numbers), net, x = ARITHMETIC[kind], NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * of(n), net, backend="replay", fallback="raise")
    for n in (*numbers, *numbers):
        assert step(x, n) == plain(net, x) * of(n)
    assert step.report.graphs == 2


STRINGS = {"7": 2.0, "torch.Size([7, 3])": 2.0}
OF_SIZES = {
    "string of a number": lambda x: STRINGS.get(f"{len(x)}", 3.0),
    "floor": lambda x: len(x) // 0.1,
    "power": lambda x: (-1) ** len(x),
    "product": lambda x: x.shape[0] * x.shape[0] * 1.0,
    "branch": lambda x: 2.0 if len(x) > 4 else 3.0,
    "rest": lambda x: 1.0 + len(x) % 3,
}


@pytest.mark.wide
@pytest.mark.table(plain=1)
@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("kind", OF_SIZES)
def test_arithmetic_of_sizes_is_pythons(kind: str) -> None:
    """With the alarm off: compiled for all sizes, for each, or not."""
    of, net = OF_SIZES[kind], NETS["tanh"]()
    step = hodiff.compile_step(lambda net, x: plain(net, x) * of(x), net, backend="replay")
    step._checked = lambda result, args, kwargs: result
    for n in (2, 3, 4, 7, 8, 7, 5, 6):
        x = torch.randn(n, 3)
        assert off([step(x).detach()], [(plain(net, x) * of(x)).detach()]) <= 1e-14


def test_a_string_of_a_size_that_varies_is_seen_by_the_alarm() -> None:
    """The tracer's string names the size, s77, and nothing guards it: as docs/api/steps.md says."""
    net = NETS["tanh"]()
    step = hodiff.compile_step(lambda net, x: plain(net, x) * STRINGS.get(f"{x.shape}", 3.0), net, backend="replay")
    for n in (2, 3, 4, 5):
        step(torch.randn(n, 3))
    with pytest.warns(hodiff.HodiffWarning, match="differs from the eager one"):
        step(torch.randn(7, 3))


VARYING: dict[str, tuple] = {
    "probability": (lambda: nn.Dropout(0.5), "p", (0.5, 0.25, 0.25, 0.5, 0.75)),
    "momentum": (lambda: nn.BatchNorm1d(3), "momentum", (0.1, 0.2, 0.2, 0.1, 0.3)),
    "negative slope": (lambda: nn.LeakyReLU(0.1), "negative_slope", (0.1, 0.2, 0.2, 0.1, 0.3)),
}


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("kind", VARYING)
def test_a_number_that_a_layer_has_may_change(kind: str) -> None:
    layer, name, values = VARYING[kind]
    net = nn.Sequential(layer(), NETS["tanh"]())
    other = copy.deepcopy(net)
    step, x = hodiff.compile_step(plain, net, backend="replay"), torch.randn(4, 3)
    for value in values:
        setattr(net[0], name, value)
        setattr(other[0], name, value)
        torch.manual_seed(0)
        ours = step(x).detach()
        torch.manual_seed(0)
        assert ours == plain(other, x)
        assert off([*net.buffers()], [*other.buffers()]) == 0
    assert step.report.graphs == 2 and step.report.eager == 1


def test_an_error_of_arithmetic_stays_an_error() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * (1 / n), net, backend="replay")
    step(x, 1.5)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        step(x, 0.0)
    assert step(x, 1.5) == plain(net, x) * (1 / 1.5)


def test_a_number_of_numpy_is_a_tensor_to_the_tracer() -> None:
    net, x = NETS["tanh"]().float(), torch.randn(4, 3, dtype=torch.float32)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * n, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match="This step runs uncompiled"):
        assert step(x, np.float64(0.5)).dtype == torch.float32


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


def test_an_enumeration_chooses() -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)

    def loss(net: nn.Module, x: Tensor, kind: Kind) -> Tensor:
        return plain(net, x) * (2 if kind is Kind.ONE else 3)

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for kind in (Kind.ONE, Kind.TWO, Kind.ONE):
        assert step(x, kind) == loss(net, x, kind)
    assert step.report.graphs == 2
