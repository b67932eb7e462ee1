"""Numbers of Python that change between calls of a step: inputs of its graph, or a graph for each value."""

import copy
import enum
import math
import operator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hodiff
from tests.unit.steps.cases import NETS, forces, plain
from tests.unit.steps.support import MARKS, off, watched

pytestmark = MARKS


@pytest.mark.parametrize("number", [lambda lr: lr, torch.tensor])
def test_a_learning_rate_read_from_an_optimizer_may_vary(number) -> None:
    net = NETS["tanh"]()
    group = torch.optim.SGD(net.parameters(), lr=0.1).param_groups[0]

    def scaled(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean() * number(group["lr"])

    def power(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).abs().pow(number(group["lr"])).mean()

    for loss in (scaled, power):
        step = hodiff.compile_step(loss, net, backend="replay")
        for lr in (0.1, 0.05, 0.02):
            group["lr"] = lr
            assert off([step(torch.ones(2, 3)).detach()], [loss(net, torch.ones(2, 3)).detach()]) <= 1e-14
        assert not step.report.reasons


ARITHMETIC = {
    "+ - *": (lambda n: 1 + 0.1 * n - -n, True),
    "/": (lambda n: n / 3, True),
    "1 /": (lambda n: 1 / (n + 1), False),  # Python raises for 1 / 0, and the interpreter does not
    "**": (lambda n: 0.9**n, False),
    "%": (lambda n: n % 0.7, False),
    "math": (lambda n: math.cos(n) + math.floor(n), False),
    "int": (lambda n: int(n) // 2, None),
    "large": (lambda n: int(n) * 10**12 * int(n) / 1e24, False),  # more than an integer of a kernel holds
}


@pytest.mark.parametrize("numbers", [(0.5, 1.7, 2.0, 3.25), (1, 2, 3000, 4)], ids=["float", "int"])
@pytest.mark.parametrize("kind", ARITHMETIC)
def test_a_number_that_varies_is_an_input_of_the_second_graph(kind: str, numbers, monkeypatch) -> None:
    of, interpreted = ARITHMETIC[kind]
    net, x, made = NETS["tanh"](), torch.randn(4, 3), watched(monkeypatch)

    def loss(net: nn.Module, x: Tensor, n: float) -> Tensor:
        return forces(net, x) * of(n) + x.new_full((2,), n).sum()

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in numbers:
        value, gradient = step.value_and_grad(x, n)
        exact, theirs = hodiff.value_and_grad(loss, net, args=(x, n))
        assert off([value, *gradient.values()], [exact, *theirs.values()]) == 0
    assert made == [True, isinstance(numbers[0], int) if interpreted is None else interpreted]


@pytest.mark.nightly
def test_floats_that_vary_are_inputs_of_kernels() -> None:
    """Also in a process that has compiled one before: Dynamo remembers what it shall take for constants."""
    from torch._dynamo.symbolic_convert import TensorifyState

    net, x = NETS["tanh"](), torch.randn(4, 3)
    for of, _ in ARITHMETIC.values():

        def loss(net: nn.Module, x: Tensor, n: float, of=of) -> Tensor:
            return forces(net, x) * of(n)

        step = hodiff.compile_step(loss, net, fallback="raise")
        for n in (0.5, 1.7, 2.0, 3.25, 2.6):
            value, gradient = step.value_and_grad(x, n)
            exact, theirs = hodiff.value_and_grad(loss, net, args=(x, n))
            assert off([value, *gradient.values()], [exact, *theirs.values()]) <= 1e-10
        assert step.report.graphs == 2 and not TensorifyState.force_specializations


@pytest.mark.nightly
@pytest.mark.parametrize("of", [lambda n: 10 // n, lambda n: 10 % (n - 3)])
def test_kernels_do_not_divide_by_zero(of) -> None:
    """They give 0, or end the process: so each number has a graph."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * of(n), net, fallback="raise")
    for n in (4, 5, 7):
        assert off([step(x, n).detach()], [(plain(net, x) * of(n)).detach()]) <= 1e-12
    with pytest.raises(ZeroDivisionError, match="by zero"):
        step(x, 0 if of(7) == 1 else 3)
    assert step.report.graphs == 3
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * (n // 3 + len(x) % 3), net, fallback="raise")
    for n in (4, 5, 7, 0, -4):
        step(x, n)
    assert step.report.graphs == 2


@pytest.mark.parametrize("calls", [3, 4])
def test_an_error_of_arithmetic_stays_an_error(calls: int) -> None:
    """At a call that is held against eager, and at one that is not."""
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * (1 / n), net, backend="replay", fallback="raise")
    for n in (1.5, 0.7, 0.3, 0.1)[:calls]:
        step(x, n)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        step(x, 0.0)
    assert step(x, 0.2) == plain(net, x) * (1 / 0.2) and step.report.graphs == 2


FACTORS = {"7": 2.0, "7.5": 2.0, "torch.Size([7, 3])": 2.0}
STRINGS = {
    "format": lambda x, n: "{}".format(n),  # noqa: UP032
    "f-string": lambda x, n: f"{n}",
    "str": lambda x, n: str(n),
    "of a size": lambda x, n: f"{x.shape}",
}


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("add", [0, 0.5])
@pytest.mark.parametrize("kind", STRINGS)
def test_a_string_made_of_a_number_that_varies(kind: str, add: float) -> None:
    """PyTorch's tracer compares, and hashes, one that it has not made yet; a size has no graph for each value."""
    text, net = STRINGS[kind], NETS["tanh"]()

    def loss(net: nn.Module, x: Tensor, n: float) -> Tensor:
        return plain(net, x) * FACTORS.get(text(x, n), 3.0) * (2.0 if text(x, n) == "7" else 1.0)

    step = hodiff.compile_step(loss, net, backend="replay")
    step._checked = lambda result, args, kwargs: result
    for n in (2, 3, 4, 7, 8, 7):
        x = torch.randn(n, 3)
        assert off([step(x, n + add).detach()], [loss(net, x, n + add).detach()]) <= 1e-14
    assert bool(step.report.eager) is (kind == "of a size")


WRONG = {
    "1.0 // 0.1 is 10": (lambda n: n // 0.1, (1.0, 0.3, 0.6)),
    "in place": (lambda n: operator.ifloordiv(n, 0.1), (1.0, 0.3, 0.6)),
    "of a float": (lambda n: 1.0 // n, (0.3, 0.1, 0.7)),
    "(-1) ** 2 is -1": (lambda n: (-1) ** n, (3, 5, 4)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_the_tracer_gets_wrong_of_a_number_has_a_graph_for_each_value(kind: str) -> None:
    (of, numbers), net, x = WRONG[kind], NETS["tanh"](), torch.randn(4, 3)

    def loss(net: nn.Module, x: Tensor, n: float) -> Tensor:
        return plain(net, x) * of(n)

    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in (*numbers, *numbers):
        assert step(x, n) == loss(net, x, n)
    assert step.report.graphs == 3


@pytest.mark.parametrize(
    ("of", "told"),
    [(lambda n: n // 0.1, "it uses // with a Python float"), (lambda n: (-1) ** n, "a power of a negative number")],
)
def test_what_the_tracer_gets_wrong_of_a_size_stays_eager(of, told: str) -> None:
    """Sizes stay inputs where numbers become constants."""
    net = NETS["tanh"]()

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return plain(net, x) * of(len(x))

    step = hodiff.compile_step(loss, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=told):
        for x in map(torch.ones, [(3, 3), (5, 3), (4, 3), (6, 3)]):
            assert step(x) == loss(net, x)
    assert step.report.graphs == 1 and step.report.eager == 3


def test_a_number_that_a_tensor_holds_has_a_reason() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=None), NETS["tanh"]())
    step = hodiff.compile_step(plain, net, backend="replay")
    with pytest.warns(hodiff.HodiffWarning, match=r"a number that a tensor holds, .* leave it in the tensor"):
        step(torch.randn(4, 3))


VARYING: dict[str, tuple] = {
    "probability": (lambda: nn.Dropout(0.5), "p", (0.5, 0.25, 0.25, 0.5, 0.75)),
    "momentum": (lambda: nn.BatchNorm1d(3), "momentum", (0.1, 0.2, 0.2, 0.1, 0.3)),
    "negative slope": (lambda: nn.LeakyReLU(0.1), "negative_slope", (0.1, 0.2, 0.2, 0.1, 0.3)),
}


@pytest.mark.parametrize("kind", VARYING)
def test_a_number_that_cannot_be_an_input_has_a_graph_for_each_value(kind: str) -> None:
    layer, name, values = VARYING[kind]
    net = nn.Sequential(layer(), NETS["tanh"]())
    other = copy.deepcopy(net)
    step, x = hodiff.compile_step(plain, net, backend="replay", fallback="raise"), torch.randn(4, 3)
    for value in values:
        setattr(net[0], name, value)
        setattr(other[0], name, value)
        torch.manual_seed(0)
        ours = step(x).detach()
        torch.manual_seed(0)
        assert ours == plain(other, x)
    assert step.report.graphs == (2 if kind == "negative slope" else 3)


def exponent(net: nn.Module, x: Tensor, n: float) -> Tensor:
    return (net(x).square() + 1).pow(n).mean()


def logarithm(net: nn.Module, x: Tensor, n: float) -> Tensor:
    return plain(net, x) * math.log(n)


@pytest.mark.parametrize("numbers", [(1.5, 2.5, 1.5, 3.5), (2, 3, 2, 4)], ids=["float", "int"])
@pytest.mark.parametrize("loss", [exponent, logarithm])
def test_an_argument_that_cannot_be_an_input_has_a_graph_for_each_value(loss, numbers) -> None:
    net, x = NETS["tanh"](), torch.randn(4, 3)
    step = hodiff.compile_step(loss, net, backend="replay", fallback="raise")
    for n in numbers:
        assert step(x, n) == loss(net, x, n)
    assert step.report.graphs <= 3


@pytest.mark.nightly
@pytest.mark.parametrize("of", [lambda x, n: n * n * 0.5, lambda x, n: x.shape[0] * x.shape[0] * 1.0])
def test_products_of_integers_are_not_rounded_to_float32_by_kernels(of) -> None:
    net = NETS["tanh"]()
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * of(x, n), net, fallback="raise")
    for n in (3, 4, 5001, 7001):
        x = torch.randn(n, 3)
        assert abs(step(x, n) / (plain(net, x) * of(x, n)) - 1) <= 1e-12


def test_a_number_of_numpy_is_a_tensor_to_the_tracer() -> None:
    net, x = NETS["tanh"]().float(), torch.randn(4, 3, dtype=torch.float32)
    step = hodiff.compile_step(lambda net, x, n: plain(net, x) * n, net, backend="replay")
    with pytest.warns(
        hodiff.HodiffWarning, match=r"torch.float64, and the eager one torch.float32; .* float\(number\)"
    ):
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
