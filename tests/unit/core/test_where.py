import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff._core._where import Where
from hodiff.errors import InputError
from tests.support.properties import ERRORS


def model():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_a_tensor_is_its_own_structure():
    x = torch.ones(2)
    where = Where(x)
    assert where.tensors == [x]
    assert where.argument([1]) == 1
    assert where.result([2]) == 2


def test_a_module_is_its_trainable_parameters_by_name():
    m = model()
    m[0].weight.requires_grad_(False)
    where = Where(m)
    assert where.names == ["0.bias", "2.weight", "2.bias"]
    assert where.argument(where.tensors) is m
    assert where.result([1, 2, 3]) == {"0.bias": 1, "2.weight": 2, "2.bias": 3}


def test_a_container_may_hold_modules():
    m, x = model(), torch.ones(2)
    where = Where({"m": m, "x": x})
    assert where.names[-1] == "x"[:0] + "x['x']"
    assert where.names[0] == "x['m'].0.weight"
    argument = where.argument([*where.tensors[:-1], "leaf"])
    assert argument == {"m": m, "x": "leaf"}
    assert where.result(range(5)) == {"m": {"0.weight": 0, "0.bias": 1, "2.weight": 2, "2.bias": 3}, "x": 4}


def test_joined_points_keep_their_parts():
    m, x = model(), torch.ones(2)
    both = Where.joined(Where(x), Where(m, "y"))
    assert both.names == ["x", "0.weight", "0.bias", "2.weight", "2.bias"]
    assert both.argument(["leaf", *both.tensors[1:]]) == ("leaf", m)
    assert both.module_slices[0].start == 1


def test_tied_parameters_count_once():
    m = model()
    m.append(nn.Linear(3, 1))
    m[3].weight = m[2].weight
    assert Where(m).names == ["0.weight", "0.bias", "2.weight", "2.bias", "3.bias"]


@pytest.mark.parametrize(
    ("patterns", "exclude", "names"),
    [
        (("0",), (), ["0.weight", "0.bias"]),
        (("*.bias",), (), ["0.bias", "2.bias"]),
        (("2.weight", "0.bias"), (), ["0.bias", "2.weight"]),
        ((), "0", ["2.weight", "2.bias"]),
        (("*",), ("*.weight", "0"), ["2.bias"]),
    ],
)
def test_select(patterns, exclude, names):
    m = model()
    chosen = hodiff.select(m, *patterns, exclude=exclude)
    assert list(chosen) == names
    assert all(chosen[name] is m.get_parameter(name) for name in names)
    assert chosen.module is m


def test_select_by_the_name_of_a_tied_alias():
    m = model()
    m.append(nn.Linear(3, 1))
    m[3].weight = m[2].weight
    assert list(hodiff.select(m, "3")) == ["2.weight", "3.bias"]


def test_selection_is_a_mapping():
    chosen = hodiff.select(model(), "0.bias")
    assert len(chosen) == 1
    assert "0.bias" in chosen
    assert repr(chosen) == "Selection(Sequential, ['0.bias'])"
    with pytest.raises(KeyError, match=r"2\.bias"):
        chosen["2.bias"]


def test_a_parameter_given_twice():
    m = model()
    with pytest.raises(hodiff.InputError, match=r"'x\[1\].0.weight' is given twice \(also as 'x\[0\].0.weight'\)"):
        Where((m, m))


def test_lazy_modules_are_refused():
    with pytest.raises(hodiff.InputError, match=r"uninitialized .* forward pass first"):
        Where(nn.LazyLinear(2))


def test_vectors_are_recognized_by_shape():
    space = Where({"a": torch.ones(2), "b": torch.ones(())}).space()
    assert space.parse({"b": torch.ones(()), "a": torch.zeros(2)}).number is None
    vectors = space.parse({"a": torch.zeros(5, 2), "b": torch.ones(5)})
    assert vectors.number == 5
    assert vectors.parts[0].shape == (5, 2)


def test_a_vector_may_be_any_mapping():
    m = model()
    chosen = hodiff.select(m, "0.bias")
    assert Where(chosen).space().parse(chosen).parts[0] is m[0].bias


def test_what_is_neither_tensor_nor_container_is_called_by_its_type():
    for value in (None, 1.5, "x"):
        with pytest.raises(hodiff.InputError, match=r"v: got .*, expected a dict .* like x"):
            Where({"a": torch.ones(2)}).space().parse(value)


D = torch.float64


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.ones(2, dtype=D))
        self.c = nn.Parameter(torch.ones(2, dtype=torch.cdouble))

    def forward(self) -> Tensor:
        return (self.r**2).sum() + (self.c.abs() ** 2).sum()


COMPLEX: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "grad": (lambda m: hodiff.grad(lambda m: m(), m), None),
    "hessian": (lambda m: hodiff.hessian(lambda m: m(), m, matrix=True), 2 * torch.eye(6, dtype=D)),
    "jacobian": (lambda m: hodiff.jacobian(lambda m: m(), m), None),
    "multi_grad": (lambda m: hodiff.multi_grad([m()], m), None),
    "gradient_norm_penalty": (
        lambda m: hodiff.gradient_norm_penalty(lambda m: m(), m).detach(),
        torch.tensor(16.0, dtype=D),
    ),
    "HessianOperator": (lambda m: hodiff.HessianOperator(lambda m: m(), m).dense(), 2 * torch.eye(6, dtype=D)),
    "hvp": (lambda m: hodiff.hvp(lambda m: m(), m, {"r": torch.ones(2, dtype=D)}), None),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_parameters_do_not_vanish(name: str) -> None:
    call, expected = COMPLEX[name]
    try:
        got = call(Complex())
    except ERRORS as error:
        assert re.search(r"\bc\b.*complex|complex.*\bc\b", str(error), re.DOTALL), str(error)
        return
    if isinstance(got, dict):
        assert "c" in got, f"the complex parameter is not there: {got}"
    elif isinstance(got, (list, tuple)):
        assert all("c" in each for each in got), f"the complex parameter is not there: {got}"
    else:
        torch.testing.assert_close(got, expected)


def test_select_says_complex_not_frozen() -> None:
    with pytest.raises(hodiff.InputError, match="complex"):
        hodiff.grad(lambda p: torch.zeros(()), hodiff.select(Complex(), "c"))
    got = hodiff.grad(lambda some: some.module(), hodiff.select(m := Complex(), "r"))  # the way out that is promised
    torch.testing.assert_close(got, {"r": 2 * m.r.detach()})


X = torch.tensor([0.3, -0.7, 1.1])


def test_a_module_that_holds_its_parent_is_walked_once():
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].add_module("parent", model)
    assert Where(model).names == ["0.weight", "0.bias"]


def test_excluded_by_the_second_name_of_a_tied_parameter():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(hodiff.select(model, exclude="1.weight")) == ["0.bias", "1.bias"]


def test_a_module_given_as_both_points():
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match="given twice"):
        hodiff.cross_hessian(lambda a, b: a(X).sum() * b(X).sum(), model, model)


def test_modules_that_share_a_parameter_are_not_two_variables() -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    for call in (hodiff.grad, hodiff.hessian):
        with pytest.raises(hodiff.InputError, match=r"'x\[1\].weight' is given twice \(also as 'x\[0\].weight'\)"):
            call(lambda p: p[1](p[0](torch.ones(2))).sum(), (a, b))
    with pytest.raises(hodiff.InputError, match="given twice"):
        hodiff.cross_hessian(lambda p, q: p(q(torch.ones(2))).sum(), a, a)


def test_a_call_inside_a_selection_takes_all_that_is_trained() -> None:
    """Parameters that are not selected are constants of the call around; to one inside they are what they were."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    m[0].bias.requires_grad_(False)
    x = torch.rand(3, 2, dtype=D)
    trained = [p for p in m.parameters() if p.requires_grad]
    by_hand = torch.autograd.grad(m(x).square().mean(), trained, create_graph=True)
    penalty = torch.cat([part.flatten() for part in by_hand]).norm() ** 2
    expected = torch.autograd.grad(penalty, m[2].weight)[0]
    inner = lambda s: sum(part.square().sum() for part in hodiff.grad(loss, s.module).values())
    loss = lambda m: m(x).square().mean()
    got = hodiff.value_and_grad(inner, hodiff.select(m, "2.*"))
    torch.testing.assert_close(got[0], penalty.detach())
    torch.testing.assert_close(got[1]["2.weight"], expected)
    assert [p.requires_grad for p in m.parameters()] == [True, False, True, True]
