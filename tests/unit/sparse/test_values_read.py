"""Where Python reads a value that follows from the point, a plan is right at other points, or says that it is not."""

import copy
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import hodiff
from hodiff._core._versions import RELEASE
from hodiff.sparse import _plan, plan_hessian, sparsity_pattern
from tests.unit.sparse.zoo import ZOO, D, generator

pytestmark = pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning", "ignore:TypedStorage is deprecated")
PLANNED_AT = torch.tensor([3.0, 1.0, 2.0, 1.5, 0.2], dtype=D)
ELSEWHERE = [torch.tensor(p, dtype=D) for p in ([1.0, 0.1, 0.3, 3.0, 2.0], [0.5, 2.0, 0.3, 0.1, 0.9])]


def top(x: Tensor) -> Tensor:
    return x.detach().argmax()


def chain(x: Tensor) -> Tensor:
    return (x[1:] * x[:-1]).sum()


def filled(x: Tensor) -> Tensor:
    y = x.clone()
    y[top(x)] = x[0] * x[1]
    return (y**3).sum()


READ = {
    "x[i]": lambda x: (x * x[top(x)]).sum(),
    "select": lambda x: (x * x.select(0, top(x))).sum(),
    "narrow": lambda x: (x[:2] * x.narrow(0, top(x), 2)).sum(),
    "narrow by an int": lambda x: (x[:2] * x.narrow(0, int(top(x)), 2)).sum(),
    "x[i:]": lambda x: (x * x.roll(1))[top(x) :].sum(),
    "x[i:i + 2]": lambda x: (x[:2] * x[top(x) : top(x) + 2]).sum(),
    "item": lambda x: (x * x[top(x).item()]).sum(),
    "tolist": lambda x: (x * x[top(x).tolist()]).sum(),
    "numpy": lambda x: (x * x[int(top(x).numpy())]).sum(),
    "dlpack": lambda x: (x * x[int(numpy.from_dlpack(top(x)))]).sum(),
    "storage": lambda x: (x * x[top(x).untyped_storage()[0]]).sum(),
    "text": lambda x: (x * x[int(repr(top(x))[7:-1])]).sum(),
    "formatted": lambda x: (x * x[int(f"{top(x)}")]).sum(),
    "if": lambda x: (x**2).sum() if x[0] > 1 else chain(x),
    "equal": lambda x: (x**2).sum() if torch.equal(x.detach().clamp(min=1), x.detach()) else chain(x),
    "allclose": lambda x: (x**2).sum() if torch.allclose(x.detach()[:1], 3 * torch.ones(1, dtype=D)) else chain(x),
    "length of a mask": lambda x: (x[: len(x[x > 1])] ** 2).sum() + (x[1:] * x[:-1])[len(x[x > 1]) :].sum(),
    "length of unique": lambda x: (x[: len(x.detach().round().unique())] ** 3).sum() + chain(x),
    "length of bincount": lambda x: (x[: len(torch.bincount(x.detach().long()))] ** 3).sum() + chain(x),
    "repeat_interleave": lambda x: (x.repeat_interleave((x.detach() > 1).long() + 1)[:5] * x).sum(),
    "tensor_split": lambda x: (x.tensor_split(top(x)[None])[0] ** 3).sum() + chain(x),
    "torch.tensor_split": lambda x: (torch.tensor_split(x, top(x)[None])[0] ** 3).sum() + chain(x),
    "split": lambda x: (x.split([int(top(x)), 5 - int(top(x))])[0] ** 3).sum() + chain(x),
    "pack_padded_sequence": lambda x: (
        (pack_padded_sequence(x[:, None, None], top(x)[None] + 1).data ** 3).sum() + chain(x)
    ),
    "roll": lambda x: (x * x.roll(int(top(x)))).sum(),
    "offset": lambda x: torch.outer(x, x).diagonal(int(top(x))).sum(),
    "arange": lambda x: (x[torch.arange(int(top(x)) + 1)] ** 3).sum() + chain(x),
    "back in a tensor": lambda x: (x[torch.tensor([int(top(x))])] ** 2).sum() * x[0],
    "x[i] = y": filled,
}

FOLLOWED = {  # an index that stays a tensor leads anywhere along its dimension: nothing is read, and all holds
    "x[i[None]]": lambda x: (x * x[top(x)[None]]).sum(),
    "gather": lambda x: (x * x.gather(0, top(x)[None])).sum(),
    "index_select": lambda x: (x * x.index_select(0, top(x))).sum(),
    "take": lambda x: (x * x.take(top(x))).sum(),
    "scatter": lambda x: (x.scatter(0, top(x)[None], x[:1]) ** 2 * x).sum(),
    "index_add": lambda x: (x.index_add(0, top(x)[None], x[:1]) ** 3).sum(),
    "sort": lambda x: (x.sort().values[:3] * x[:3]).sum(),
    "embedding": lambda x: (torch.nn.functional.embedding(top(x), x[:, None]) * x).sum(),
}


@pytest.mark.parametrize("name", READ)
def test_a_plan_is_right_elsewhere_or_says_that_it_is_not(name: str) -> None:
    f = READ[name]
    plan = plan_hessian(f, PLANNED_AT)
    assert plan.pattern.values_read
    assert "checked at each point" in repr(plan)
    for point in (PLANNED_AT, *ELSEWHERE):
        try:
            got = plan(point).to_dense()
        except hodiff.DerivativeError as error:
            assert "does not hold at this point" in str(error)
            assert "Here f reads " in str(error)
            assert point is not PLANNED_AT
        else:
            torch.testing.assert_close(got, hodiff.hessian(f, point))


def test_most_of_these_do_not_hold_elsewhere() -> None:
    """The table is of functions whose pattern moves: with `check=False` they are wrong."""
    wrong = 0
    for f in READ.values():
        plan = plan_hessian(f, PLANNED_AT)
        wrong += not torch.allclose(plan(ELSEWHERE[0], check=False).to_dense(), hodiff.hessian(f, ELSEWHERE[0]))
    assert wrong >= 12


@pytest.mark.parametrize("name", FOLLOWED)
def test_an_index_that_stays_a_tensor_is_followed(name: str) -> None:
    plan = plan_hessian(FOLLOWED[name], PLANNED_AT)
    assert plan.pattern.values_read == ()
    for point in (PLANNED_AT, *ELSEWHERE):
        torch.testing.assert_close(plan(point).to_dense(), hodiff.hessian(FOLLOWED[name], point))


def test_a_number_that_comes_back_in_a_tensor_leads_anywhere() -> None:
    """What was read may stand in any later tensor: its zeros and its indices are not constants."""
    for f in (READ["back in a tensor"], lambda x: (x * torch.tensor([float(v) - 3 for v in x.detach()])).sum() ** 2):
        plan = plan_hessian(f, PLANNED_AT)
        for point in ELSEWHERE:
            torch.testing.assert_close(plan(point, check=False).to_dense(), hodiff.hessian(f, point), check_dtype=False)


READING = {  # the backward of a product asks whether it holds a zero; the others read by themselves
    "scatter products",
    *("solve", "cholesky"),  # which raise where there is none
    *(("determinants",) if RELEASE >= (2, 15) else ()),  # whose backward solves with the matrix since 2.15
    "a value as a number",
    "a Function in NumPy",
}


@pytest.mark.parametrize("name", [name for name in ZOO if name not in READING])
def test_other_functions_read_nothing(name: str) -> None:
    assert sparsity_pattern(ZOO[name], torch.randn(12, dtype=D, generator=generator()) * 0.5).values_read == ()


def test_the_check_is_one_product() -> None:
    evaluations = []

    def f(x: Tensor) -> Tensor:
        evaluations.append(1)
        return (x * x[x.argmax()]).sum()

    plan = plan_hessian(f, PLANNED_AT)
    evaluations.clear()
    plan(PLANNED_AT)
    assert len(evaluations) == 1
    torch.testing.assert_close(plan.lower()(PLANNED_AT).to_dense(), hodiff.hessian(f, PLANNED_AT).tril())
    with pytest.raises(hodiff.DerivativeError, match="does not hold at this point"):
        plan.lower()(ELSEWHERE[0])


CLOSED_OVER = {
    "index": (torch.tensor([0, 1, 2]), torch.tensor([1, 0, 2]), torch.tensor([2, 3, 4]), lambda x, at: x[at] ** 3),
    "mask": (
        torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0]), torch.ones(5),
        lambda x, mask: mask * x.roll(1) ** 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CLOSED_OVER)
def test_what_f_closes_over_is_looked_at_when_it_was_written_into(kind: str) -> None:
    """By one product more, until it has held once; a plan that was refused is refused again."""
    start, same, other, of = CLOSED_OVER[kind]
    held, products = start.clone(), []
    f = lambda x: of(x, held)
    plan = hodiff.sparse.plan_jacobian(f, PLANNED_AT)
    evaluated = plan._evaluated

    def counted(made: Any, chunk: Any, check: bool) -> Tensor:
        products.append(plan.products + check)
        return evaluated(made, chunk, check)

    plan._evaluated = counted
    plan(PLANNED_AT)
    held.copy_(start)  # a write, of the same numbers
    for _ in range(2):
        torch.testing.assert_close(plan(PLANNED_AT).to_dense(), hodiff.jacobian(f, PLANNED_AT))
    assert products == [plan.products, plan.products + 1, plan.products]
    held.copy_(other)
    for _ in range(2):
        with pytest.raises(hodiff.DerivativeError, match="closes over what has changed, make a new plan"):
            plan(PLANNED_AT)
    if kind == "mask":
        held.copy_(same)
        torch.testing.assert_close(plan(PLANNED_AT).to_dense(), hodiff.jacobian(f, PLANNED_AT))


INDEX, OTHER = torch.tensor([1, 2, 3, 4, 0]), torch.tensor([3, 4, 0, 1, 2])
Function = Callable[[Tensor], Tensor]
_j: Any = None


class Neighbors:
    """A function whose index is an attribute."""

    def __init__(self, end: Function) -> None:
        self.j: Any = INDEX.clone()
        self.end = end

    def __call__(self, x: Tensor) -> Tensor:
        return self.end(x**2 * x[self.j])


def of_a_variable(end: Function) -> tuple[Function, Callable[[Any], None]]:
    j = INDEX.clone()

    def bind(other: Any) -> None:
        nonlocal j
        j = other

    return lambda x: end(x**2 * x[j]), bind


def of_a_global(end: Function) -> tuple[Function, Callable[[Any], None]]:
    globals()["_j"] = INDEX.clone()
    return lambda x: end(x**2 * x[_j]), lambda j: globals().update(_j=j)


def of_a_number(end: Function) -> tuple[Function, Callable[[Any], None]]:
    shift = 1

    def bind(_: Any) -> None:
        nonlocal shift
        shift = 3

    return lambda x: end(x**2 * x.roll(shift)), bind


def of_an_attribute(end: Function) -> tuple[Function, Callable[[Any], None]]:
    f = Neighbors(end)
    return f.__call__, lambda j: setattr(f, "j", j)


def of_another_object(end: Function) -> tuple[Function, Callable[[Any], None]]:
    held = Neighbors(end)
    return lambda x: end(x**2 * x[held.j]), lambda j: setattr(held, "j", j)


def of_a_dictionary(end: Function) -> tuple[Function, Callable[[Any], None]]:
    places = {"j": INDEX.clone()}
    return lambda x: end(x**2 * x[places["j"]]), lambda j: places.update(j=j)


BOUND = (of_a_variable, of_a_global, of_a_number, of_an_attribute, of_another_object, of_a_dictionary)
FORMS: dict[str, Callable[[Any], Any]] = {
    "matrix": lambda plan: plan, "values": lambda plan: plan.values, "lower": lambda plan: plan.lower(),
    "copy": copy.copy,  # a deep one may have a function of its own
}  # fmt: skip


@pytest.mark.parametrize("form", [*FORMS, "Jacobian"])
@pytest.mark.parametrize("kind", BOUND, ids=lambda f: f.__name__)
def test_a_neighbor_list_that_is_built_anew_is_looked_at(kind: Any, form: str) -> None:
    """The usual way: a variable is bound to another tensor, and nothing is written into the old one."""
    if form == "Jacobian":
        f, bind = kind(lambda y: y)
        take = hodiff.sparse.plan_jacobian(f, PLANNED_AT)
    else:
        f, bind = kind(torch.sum)
        take = FORMS[form](plan_hessian(f, PLANNED_AT))
    take(PLANNED_AT)
    bind(OTHER.clone())
    for _ in range(2):
        with pytest.raises(hodiff.DerivativeError, match="closes over what has changed, make a new plan"):
            take(PLANNED_AT)


def test_a_frozen_parameter_that_f_closes_over_may_still_be_swapped() -> None:
    held = torch.nn.Parameter(torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=D), requires_grad=False)
    plan = hodiff.sparse.plan_jacobian(lambda x: held * x.roll(1) ** 3, PLANNED_AT)
    torch.utils.swap_tensors(held, torch.nn.Parameter(held.clone(), requires_grad=False))
    plan = hodiff.sparse.plan_jacobian(lambda x: held * x.roll(1) ** 3, PLANNED_AT)
    for _ in range(2):
        plan(PLANNED_AT)
    held.fill_(1.0)
    with pytest.raises(hodiff.DerivativeError, match="closes over what has changed, make a new plan"):
        plan(PLANNED_AT)


def test_a_pattern_of_the_callers_own_is_believed() -> None:
    f = READ["x[i]"]
    full = torch.ones(5, 5).to_sparse()
    plan = plan_hessian(f, PLANNED_AT, pattern=full)
    torch.testing.assert_close(plan(ELSEWHERE[0]).to_dense(), hodiff.hessian(f, ELSEWHERE[0]))
    with pytest.raises(
        hodiff.DerivativeError, match="does not hold at this point"
    ):  # one that hodiff found keeps its remark
        plan_hessian(f, PLANNED_AT, pattern=sparsity_pattern(f, PLANNED_AT))(ELSEWHERE[0])


def test_values_that_leave_by_other_doors() -> None:
    """An exception that `f` catches, the places that a sparse tensor stores, a pickle."""

    def tried(x: Tensor) -> Tensor:
        try:
            torch.linalg.cholesky(x.detach()[:1, None])
        except RuntimeError:
            return (x**3).sum()
        return (x**2 * x.roll(1)).sum()

    def stored(x: Tensor) -> Tensor:
        held = torch.diag(x.detach().relu()).to_sparse()
        return torch.sparse.mm(held, (x**3)[:, None]).squeeze().mul(x.roll(1)).sum()

    pickled = lambda x: (x * x[int(pickle.loads(pickle.dumps(x.detach())).argmax())]).sum()
    for f in (tried, stored, pickled):
        for there, here in ((-PLANNED_AT, PLANNED_AT), (PLANNED_AT, ELSEWHERE[0]), (PLANNED_AT, -PLANNED_AT)):
            plan = plan_hessian(f, there)
            assert plan.pattern.values_read
            try:
                torch.testing.assert_close(plan(here).to_dense(), hodiff.hessian(f, here))
            except hodiff.DerivativeError as error:
                assert "does not hold at this point" in str(error)


OTHERS = {
    "an index": (lambda x, k: x[k] ** 3 * x[0], (1,), (2,)),
    "a shift": (lambda x, k: (x * x.roll(k)).sum(), (1,), (2,)),
    "a flag": (lambda x, k: (x**2).sum() if k else chain(x), (True,), (False,)),
    "pairs": (lambda x, k: sum(x[i] * x[j] for i, j in k), ([(0, 1)],), ([(0, 2)],)),
    "a mapping": (lambda x, k: x[k["at"]] ** 3 * x[0], ({"at": 1},), ({"at": 2},)),
    "a sparse matrix": (
        lambda x, k: (torch.sparse.mm(k, x[:, None]) ** 3).sum(),
        (torch.eye(5, dtype=D).to_sparse(),),
        (torch.ones(5, 5, dtype=D).to_sparse(),),
    ),
    "an object": (lambda x, k: x[int(k)] ** 3 * x[0], (Fraction(1),), (Fraction(2),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_than_dense_tensors_are_checked(name: str) -> None:
    f, before, now = OTHERS[name]
    plan = plan_hessian(f, PLANNED_AT, args=before)
    torch.testing.assert_close(plan(ELSEWHERE[0]).to_dense(), hodiff.hessian(f, ELSEWHERE[0], args=before))
    with pytest.raises(hodiff.DerivativeError, match="does not hold at this point"):
        plan(PLANNED_AT, args=now)
    with pytest.raises(hodiff.DerivativeError, match="does not hold at this point"):
        plan_hessian(lambda x, *, k: f(x, k), PLANNED_AT, kwargs={"k": before[0]})(PLANNED_AT, kwargs={"k": now[0]})


def test_other_dense_tensors_are_taken_as_they_are() -> None:
    counted = []

    def f(x: Tensor, scale: Tensor) -> Tensor:
        counted.append(1)
        return (scale * x[1:] * x[:-1]).sum()

    plan = plan_hessian(f, PLANNED_AT, args=(torch.zeros(4, dtype=D),))
    other = torch.arange(4.0, dtype=D)
    torch.testing.assert_close(plan(PLANNED_AT, args=(other,)).to_dense(), hodiff.hessian(f, PLANNED_AT, args=(other,)))
    assert not _plan._are_other(((torch.zeros(4),), {}), ((torch.ones(4),), {}))
    assert _plan._are_other(((torch.zeros(4),), {}), ((torch.ones(5),), {}))


@pytest.mark.parametrize(
    ("before", "now"),
    [(0, 1), (1, 0), (0.0, 0.5), ("", "a"), (b"", b"a"), (False, True), (1, 1.0), (1, True), (1j, 2j)],
)
@pytest.mark.parametrize("within", [lambda k: k, lambda k: (1, [k]), lambda k: {"at": k}])
def test_numbers_and_words_are_other_where_they_differ(before: Any, now: Any, within: Any) -> None:
    """By kind and by value, from and to one that is nothing."""
    assert not _plan._are_other(within(before), within(before))
    assert _plan._are_other(within(before), within(now))
