"""What an operator has computed belongs to one point and one evaluation: nothing of another is left behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from tests.support.operators import LABELS, D, X, draw, network, plain_jacobian, predict, split, sum_of_cross_entropy
from tests.support.properties import agree, right_or_refused
from tests.support.releases import CHECKPOINTS

OPERATORS: dict[str, Callable[[nn.Module, float], hodiff.LinearOperator]] = {
    "Hessian": lambda m, budget: hodiff.HessianOperator(
        sum_of_cross_entropy, m, data=split(X, LABELS), memory_budget=budget
    ),
    "Gauss-Newton": lambda m, budget: hodiff.GaussNewtonOperator(
        predict, nn.CrossEntropyLoss(), m, data=split(X, LABELS), memory_budget=budget
    ),
    "Fisher": lambda m, budget: hodiff.FisherOperator(
        predict, nn.CrossEntropyLoss(), m, data=split(X, LABELS), memory_budget=budget, kind="mc",
        generator=torch.Generator().manual_seed(0),
    ),
    "Jacobian": lambda m, budget: hodiff.JacobianOperator(predict, m, data=split(X), memory_budget=budget),
}  # fmt: skip
operators = pytest.mark.parametrize("name", OPERATORS)


def times_two(p: Tensor) -> None:
    p.data.mul_(2)


def by_numpy(p: Tensor) -> None:
    p.detach().numpy()[0, -1] += 1e-3


def zeroed(p: Tensor) -> None:
    p.data.zero_()


# --- changes that PyTorch does not count ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [times_two, by_numpy, zeroed])
@pytest.mark.parametrize("budget", [0, 0.5])
@operators
def test_values_that_change_without_a_version_are_seen(name: str, budget: float, change: Callable) -> None:
    model = network()
    A = OPERATORS[name](model, budget)
    v = draw(39)
    before, version = A @ v, model[3].weight._version
    change(model[3].weight)
    assert model[3].weight._version == version  # what makes the test one
    calls = [lambda: A @ v, lambda: A.value, lambda: (2 * A.T @ A) @ v, lambda: A.dense()]
    if name != "Jacobian":
        calls += [lambda: A.gradient, lambda: A.block("0") @ v[:16]]
    for call in calls:
        with pytest.raises(hodiff.GraphError, match=r"parameters have changed since.*\(3\.weight\).*H\.refresh\(\)"):
            call()
    after = A.refresh() @ v
    assert (after - before).norm() > 1e-6 * before.norm()
    if name != "Fisher":  # which draws other labels
        agree(after, OPERATORS[name](model, budget) @ v, 0)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.T,
    "channels last": lambda t: t.reshape(10, 10, 5, 10).contiguous(memory_format=torch.channels_last),
    "strided": lambda t: torch.cat([t, t], 1)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "channels last"])
def test_a_single_entry_of_a_large_tensor(layout: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](draw(50, 100).to(dtype))
    H = hodiff.HessianOperator(lambda x: x.pow(3).sum(), x)
    H @ x
    index = tuple(size // 2 for size in x.shape)
    x.data[index] += 0.5
    with pytest.raises(hodiff.GraphError, match="parameters have changed"):
        H @ x
    H.refresh() @ x


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_false_alarm(layout: str) -> None:
    """Where nothing changed nothing is said: NaN, one thread or two, an empty leaf, other grad modes."""
    x = LAYOUTS[layout](draw(50, 100))
    x.flatten()[3] = 1.0
    x[0] = torch.nan
    H = hodiff.HessianOperator(lambda p: p[0].pow(3).sum() + p[1].sum(), (x, torch.ones(0, dtype=D)))
    v = (torch.ones_like(x), torch.ones(0, dtype=D))
    first = H @ v
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with torch.no_grad():
            again = H @ v
        with torch.inference_mode():
            H @ v
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(first[0].nan_to_num(), again[0].nan_to_num())


def written(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def retrained(model: nn.Module) -> None:
    """New running statistics, as of other data."""
    model.train()
    with torch.no_grad():
        model(draw(9, 3) * 5)
    model.eval()


class Scaled(nn.Module):
    """A function of the point that is a module itself, with a number and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.power = 3
        self.register_buffer("scale", torch.ones((), dtype=D))

    def forward(self, model: nn.Module) -> Tensor:
        return (model(INPUTS) * self.scale).pow(self.power).mean()


def powered(model: nn.Module, *, power: int) -> Tensor:
    return model(INPUTS).pow(power).mean()


INPUTS = torch.linspace(-2, 2, 12, dtype=D).view(4, 3)
FROZEN = nn.Linear(3, 2, dtype=D).requires_grad_(False)
TARGETS = torch.ones(4, 2, dtype=D)
SCALED = Scaled()
POWERED = partial(powered, power=3)


def with_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(D).eval()
    model[0].requires_grad_(False)
    return model


PLAIN = partial(powered, power=2)
BESIDE: dict[str, tuple[Callable[[nn.Module], Tensor], Callable[[nn.Module], object]]] = {
    "statistics": (PLAIN, retrained),
    "statistics, unrecorded": (PLAIN, lambda m: m[1].running_var.data.mul_(4)),
    "statistics, replaced": (PLAIN, lambda m: setattr(m[1], "running_mean", torch.ones(4, dtype=D))),
    "a frozen weight": (PLAIN, lambda m: written(m[0].weight)),
    "a frozen weight, unrecorded": (PLAIN, lambda m: m[0].weight.data.mul_(2)),
    "a frozen weight, elsewhere": (PLAIN, lambda m: setattr(m[0].weight, "data", 2 * m[0].weight.data)),
    "another model": (lambda m: (m(INPUTS) - FROZEN(INPUTS)).pow(4).mean(), lambda m: written(FROZEN.weight)),
    "another model, unrecorded": (
        lambda m: (m(INPUTS) - FROZEN(INPUTS)).pow(4).mean(), lambda m: FROZEN.weight.data.mul_(2)
    ),
    "targets": (lambda m: (m(INPUTS) - TARGETS).pow(4).mean(), lambda m: TARGETS.data.mul_(2)),
    "targets, by NumPy": (
        lambda m: (m(INPUTS) - TARGETS).pow(4).mean(), lambda m: np.multiply(TARGETS, 2, TARGETS.numpy())
    ),
    "a number of a module": (SCALED, lambda m: setattr(SCALED, "power", SCALED.power + 1)),
    "a buffer of a module": (SCALED, lambda m: setattr(SCALED, "scale", 2 * SCALED.scale)),
    "a keyword of a partial": (POWERED, lambda m: POWERED.keywords.update(power=POWERED.keywords["power"] + 1)),
}  # fmt: skip
"""What a function reads beside the point, and a change of it."""


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_read_beside_the_point_is_compared(name: str) -> None:
    f, change = BESIDE[name]
    model = with_norm()
    H = hodiff.HessianOperator(f, model)
    v = draw(H.shape[1])
    before = H @ v
    agree(H @ v, before)
    change(model)
    with pytest.raises(hodiff.GraphError, match=r"changed since the operator was|has changed since"):
        H @ v
    assert not torch.allclose(H.refresh() @ v, before, rtol=1e-6)


def test_parameters_that_are_not_selected_are_compared() -> None:
    model = with_norm()
    H = hodiff.HessianOperator(lambda part: PLAIN(part.module), hodiff.select(model, "3.*"))
    H @ draw(H.shape[1])
    written(model[1].weight)
    with pytest.raises(hodiff.GraphError, match=r"what the function reads besides its arguments has .*\(the model's"):
        H @ draw(H.shape[1])


@pytest.mark.parametrize("which", [0, 1])
def test_two_functions_that_read_variables_of_one_name(which: int) -> None:
    factors = torch.ones(2, 1, dtype=D).unbind()

    def network_of(factor: Tensor) -> Callable[..., Tensor]:
        return lambda m, batch: m(batch[0]) * factor

    def loss_of(factor: Tensor) -> Callable[..., Any]:
        return lambda z, batch: ((z * factor).pow(4).sum(), len(z))

    H = hodiff.GaussNewtonOperator(network_of(factors[0]), loss_of(factors[1]), with_norm(), data=[(INPUTS,)])
    v = draw(H.shape[1])
    H @ v
    factors[which].data.mul_(2)
    with pytest.raises(hodiff.GraphError, match=r"what the function reads besides its arguments has .*\(factor\)"):
        H @ v


TURNS: dict[str, Callable[[Tensor], object]] = {
    "signs of a row": lambda w: w[3].neg_(),
    "signs of a column": lambda w: w[:, 3].neg_(),
    "signs of every second row": lambda w: w[1::2].neg_(),
    "all signs": lambda w: w.neg_(),
    "one row doubled, one halved": lambda w: (w[3].mul_(2), w[7].div_(2)),
    "entries doubled and halved in turn": lambda w: (w[5, ::2].mul_(2), w[5, 1::2].div_(2)),
    "two rows exchanged": lambda w: w.copy_(w[torch.arange(128).roll(64)]),
    "transposed": lambda w: w.copy_(w.T.clone()),
}
"""Changes whose differences of bits cancel in one sum over all."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", TURNS)
def test_changes_that_cancel_in_a_sum(name: str, dtype: torch.dtype) -> None:
    w = draw(128, 128).to(dtype)
    H, v = hodiff.HessianOperator(lambda w: w.pow(3).sum(), w), torch.ones(128, 128, dtype=dtype)
    H @ v
    TURNS[name](w.data)
    with pytest.raises(hodiff.GraphError, match=r"parameters have changed since the operator was evaluated \(x\)"):
        H @ v


def test_large_tensors_of_the_point_are_read_whole_and_others_in_part() -> None:
    size = 3 * 1024 * 1021
    w, data = torch.ones(size), torch.ones(size)
    H = hodiff.HessianOperator(lambda w: (w * data).pow(3).mean(), w)
    H @ w
    w.data[1537 * 1021 + 5] = 2
    with pytest.raises(hodiff.GraphError, match=r"parameters have changed since the operator was evaluated \(x\)"):
        H @ w
    H.refresh() @ w
    data.data[size // 2 :] *= 2
    with pytest.raises(hodiff.GraphError, match=r"what the function reads besides its arguments has .*\(data\)"):
        H @ w


def test_all_signs_of_a_table_without_a_rest() -> None:
    """Each sum has two of them."""
    w = draw(2 * 1021)
    H, v = hodiff.HessianOperator(lambda w: w.pow(3).sum(), w), torch.ones_like(w)
    H @ v
    w.data.neg_()
    with pytest.raises(hodiff.GraphError, match=r"parameters have changed since the operator was evaluated \(x\)"):
        H @ v


@pytest.mark.filterwarnings(
    "ignore:torch.quantize_per_tensor:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)
def test_what_has_no_bits_to_compare_is_compared_by_its_writes() -> None:
    """Sparse, complex, boolean, expanded, conjugate, empty and integer tensors beside the point; on several devices."""
    z = torch.complex(draw(3), draw(3))
    beside = [
        torch.eye(3, dtype=D).to_sparse(), z, z.conj(), z.to(torch.complex64), torch.ones(3) > 0,
        torch.ones(3).expand(2, 3), torch.ones(0), torch.arange(3), torch.ones(3, device="meta"), draw(4, 5)[::2, ::3],
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), torch._efficientzerotensor((3,)),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(3).to(torch.float8_e4m3fn),
    ]  # fmt: skip
    H = hodiff.HessianOperator(lambda x, *_: x.pow(3).sum(), draw(3), args=tuple(beside))
    v = torch.ones(3, dtype=D)
    agree(H @ v, H @ v)
    z.data.mul_(2)
    with pytest.raises(hodiff.GraphError, match="what the function reads besides its arguments has changed"):
        H @ v


def test_a_batch_changed_in_place_raises() -> None:
    batches = [(X.clone(), LABELS)]
    H, v = hodiff.HessianOperator(sum_of_cross_entropy, network(), data=batches), draw(39)
    H @ v
    batches[0][0].add_(1)
    with pytest.raises(hodiff.GraphError, match="was changed in place after it was used"):
        H @ v


# --- what an evaluation leaves behind ---------------------------------------------------------------------------------


def looking(take: Callable) -> None:
    x = torch.linspace(1, 2, 60, dtype=D).requires_grad_()
    take(hodiff.HessianOperator(lambda x: (x**4).sum() + x.sum() ** 2, x), lambda record: x.detach().add_(1))


def written_with_its_own_values() -> None:
    x = torch.ones(3, dtype=D, requires_grad=True)
    H = hodiff.HessianOperator(lambda x: (x**4).sum(), x)
    before = H @ x.detach()
    x.detach().mul_(1)
    H @ before


WRITES: dict[str, Callable] = {
    "the same values": written_with_its_own_values,
    "trace": lambda: looking(lambda H, look: hodiff.trace(H, samples=40, callback=look)),
    "diagonal": lambda: looking(lambda H, look: hodiff.diagonal(H, samples=40, callback=look)),
    "logdet": lambda: looking(lambda H, look: hodiff.logdet(H, samples=20, steps=2, callback=look)),
    "eigsh": lambda: looking(lambda H, look: hodiff.eigsh(H, 1, callback=look)),
    "solve": lambda: looking(lambda H, look: hodiff.solve(H, torch.ones(60, dtype=D), callback=look)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_point_that_is_written_to_between_products_is_told(write: str) -> None:
    with pytest.raises(hodiff.GraphError, match=r"parameters have changed since the operator was evaluated \(x\)"):
        WRITES[write]()


def test_refresh_of_a_jacobian_forgets_its_outputs() -> None:
    x = draw(3)
    J = hodiff.JacobianOperator(lambda x: torch.cat([x**2, x[:1]]), x)
    agree(J.value, torch.cat([x**2, x[:1]]))
    x.mul_(2)
    agree(J.refresh().value, torch.cat([x**2, x[:1]]))
    agree(J @ torch.ones(3, dtype=D), torch.cat([2 * x, torch.ones(1, dtype=D)]))


def hessian_with(m: nn.Module, **options: Any) -> hodiff.HessianOperator:
    return hodiff.HessianOperator(
        lambda m, batch, power: m(batch[0]).pow(power).mean(), m, data=split(X, LABELS), args=(3,), **options
    )


def curvature_with(make: Any, **fixed: Any) -> Callable[..., hodiff.LinearOperator]:
    losses = nn.CrossEntropyLoss(reduction="sum")
    return lambda m, **options: make(
        predict, lambda z, batch: (losses(z, batch[-1]), len(z)), m, data=split(X, LABELS), **(fixed | options)
    )


MADE = {
    "Hessian": hessian_with,
    "Gauss-Newton": curvature_with(hodiff.GaussNewtonOperator),
    "Fisher": curvature_with(hodiff.FisherOperator, kind="empirical"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "a sum": {"reduction": "sum", "batch_weight": lambda batch: len(batch[0])},
    "a mean": {"batch_weight": lambda batch: 1.0 + len(batch[0])},
    "batches alike": {"batch_weight": "equal"},
    "without graphs": {"memory_budget": 0, "batch_weight": "equal"},
    "one by one": {"chunk_size": 1, "batch_weight": "equal"},
    "again": {"checkpoint": "*", "batch_weight": "equal"},
}


@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=CHECKPOINTS if "checkpoint" in each else ()) for name, each in OPTIONS.items()]
)
@pytest.mark.parametrize("name", MADE)
def test_a_refreshed_operator_is_one_made_anew_with_its_options(name: str, option: str) -> None:
    """Also after a second refresh, and of a block: numbers, value and gradient."""
    options, m = dict(OPTIONS[option]), network()
    if name != "Hessian":  # whose losses say what they weigh
        options.pop("batch_weight")
    old = MADE[name](m, **options)
    block = old.block("*.weight")
    for _ in range(2):
        before = old.dense()
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(1.1)
        old.refresh()
        new = MADE[name](m, **options)
        expected = new.dense()
        assert (expected - before).abs().max() > 1e-4
        for mine, other in ((old, new), (block, new.block("*.weight"))):
            agree(mine.dense(), other.dense(), 1e-12)
        if name == "Hessian":
            agree(old.value, new.value, 1e-12)
            for mine, other in zip(old.gradient.values(), new.gradient.values(), strict=True):
                agree(mine, other, 1e-12)


def test_refresh_of_a_jacobian_with_other_outputs() -> None:
    rows = [X[:4], X[4:]]
    J = hodiff.JacobianOperator(lambda m, batch: m(batch), network(), data=rows)
    assert J.shape == (30, 39)
    rows[1] = X[4:6]
    J.refresh()
    assert J.shape == (18, 39) and J.value.shape == (6, 3)
    agree(J.T @ draw(18), J.dense().T @ draw(18), 1e-11)


def test_a_first_pass_that_fails_leaves_nothing() -> None:
    model, fails = network(), [True]

    def predict(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        if fails and len(batch[0]) == 3:
            raise OSError("the disk is full")
        return model(batch[0])

    operators = [
        hodiff.JacobianOperator(predict, model, data=split(X)),
        hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), model, data=split(X, LABELS)),
        hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), model, data=split(X, LABELS), kind="mc", samples=500),
    ]
    for A in operators:
        with pytest.raises(OSError, match="disk"):
            A @ draw(39)
    with torch.no_grad():
        model[3].weight.mul_(3)
    fails.clear()
    J, G, mc = operators
    agree(J.value, model(X).detach())
    agree(G.dense(), hodiff.GaussNewtonOperator(predict, nn.CrossEntropyLoss(), model, data=split(X, LABELS)).dense())
    assert float((mc.dense() - G.dense()).norm() / G.dense().norm()) < 0.2  # scores of this point, not of the other


def shuffled() -> DataLoader:
    return DataLoader(TensorDataset(X, LABELS), batch_size=3, shuffle=True)


def test_cost_before_the_first_product_notes_no_batch() -> None:
    """It evaluates one batch; of shuffled data another one comes first later."""
    model = network()
    for seed in range(5):
        torch.manual_seed(seed)
        J = hodiff.JacobianOperator(predict, model, data=shuffled())
        J.cost()
        rows = J.value
        agree(rows.sort(0).values, model(X).detach().sort(0).values, 1e-12)
        agree((J.T @ torch.ones_like(rows))["3.bias"], torch.full((3,), 10.0, dtype=D), 1e-12)
    make = lambda: hodiff.FisherOperator(
        predict, nn.CrossEntropyLoss(), model, data=shuffled(), kind="mc", samples=4000,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    exact = hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), model, data=split(X, LABELS), kind="exact").dense()
    torch.manual_seed(3)
    sampled = make()
    sampled.cost()
    agree(sampled.dense(), exact, 0.1)


def test_a_closed_operator_opens_at_the_new_point() -> None:
    model = network()
    J = hodiff.JacobianOperator(predict, model, data=split(X))
    J.dense()
    J.close()
    with pytest.raises(hodiff.GraphError, match=r"closed; H\.refresh\(\)"):
        J.shape  # noqa: B018
    with torch.no_grad():
        model[0].weight.mul_(2)
    dense = plain_jacobian(model(X), list(model.parameters()))
    agree(J.refresh().dense(), dense, 1e-11)


def test_a_block_sees_the_refresh_of_the_whole() -> None:
    model = network()
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS))
    block = H.block("3")
    before = block.dense()
    with torch.no_grad():
        model[0].weight.mul_(2)
    H.refresh()
    assert (block.dense() - before).norm() > 1e-3
    agree(block.dense(), H.dense()[24:, 24:])
    agree(
        torch.cat([part.reshape(-1) for part in block.gradient.values()]),
        torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(F.cross_entropy(model(X), LABELS), model[3].parameters())]
        ),
    )
    np.testing.assert_allclose(float(block.value), float(H.value))


def test_products_of_many_vectors_look_at_the_values() -> None:
    x = torch.linspace(0.1, 1.0, 5, dtype=D)
    H = hodiff.HessianOperator(lambda x: (x**4).sum() + x.prod(), x, chunk_size=1)
    for product in (lambda: H @ torch.eye(5, dtype=D), lambda: (H + H) @ torch.eye(5, dtype=D) / 2, H.dense):
        agree(product(), H.dense())
    x.data.mul_(2)
    for product in (lambda: H @ torch.eye(5, dtype=D), H.dense, lambda: H @ x):
        with pytest.raises(hodiff.GraphError, match="parameters have changed since"):
            product()


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    ".data": lambda p: p.data.mul_(1.3),
    "numpy": lambda p: p.detach().numpy().__imul__(1.3),
    "one entry": lambda p: p.data[-1].mul_(1.5),
}


@pytest.mark.parametrize("how", CHANGES)
def test_an_operator_sees_that_its_parameters_changed(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=D))

    m = Net()
    H = hodiff.HessianOperator(lambda m: (m.w @ m.w) ** 2, m)
    v = torch.ones(3, dtype=D)
    H @ v
    CHANGES[how](m.w)
    w = m.w.detach()
    right_or_refused(lambda: H @ v, 8 * w * (w @ v) + 4 * (w @ w) * v, r"refresh")


SAMPLES, CLASSES = draw(10, 4, seed=1), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))


def layer(dtype: torch.dtype = D) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def change_by_assignment(model: nn.Sequential) -> None:
    model.load_state_dict({name: 2 * p.detach() for name, p in model.state_dict().items()}, assign=True)


def change_a_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(2, 1, dtype=D)


def change_an_activation(model: nn.Sequential) -> None:
    model[1] = nn.Sigmoid()


class Moody(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def change_the_mode(model: nn.Sequential) -> None:
    model.eval()


def change_by_a_hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: 2 * output)


def change_by_a_hook_before(model: nn.Sequential) -> None:
    model[1].register_forward_pre_hook(lambda module, args: (2 * args[0],))


def change_a_forward(model: nn.Sequential) -> None:
    model[1].forward = torch.sin


ANEW = [
    *(change_by_assignment, change_a_layer, change_an_activation, change_the_mode),
    *(change_by_a_hook, change_by_a_hook_before, change_a_forward),
]


@pytest.mark.parametrize("change", ANEW)
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_model_that_is_put_together_anew_is_noticed(change, evaluated: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1), Moody()).double()
    f = lambda m: m(SAMPLES).square().mean()
    H = hodiff.HessianOperator(f, model)
    if evaluated:
        H.dense()
    change(model)
    with pytest.raises(hodiff.GraphError, match=r"model has changed.*H\.refresh\(\)"):
        H.dense()
    agree(H.refresh().dense(), hodiff.HessianOperator(f, model).dense())


def test_refresh_of_a_point_with_other_leaves() -> None:
    model = layer()
    H = hodiff.HessianOperator(lambda m: m(SAMPLES).square().mean(), model)
    H.dense()
    model.bias.requires_grad_(False)
    with pytest.raises(hodiff.InputError, match="refresh: the leaves of the point have changed"):
        H.refresh()


def test_products_inside_a_loan_of_the_model() -> None:
    """Inside another call's f the parameters are lent, which is not a change of the model."""
    model = layer()
    H = hodiff.HessianOperator(lambda m: m(SAMPLES).pow(3).mean(), model)
    expected = H @ torch.ones(15, dtype=D)

    def f(m: nn.Module) -> Tensor:
        with torch.no_grad():
            agree(H @ torch.ones(15, dtype=D), expected)
        return m(SAMPLES).sum()

    hodiff.grad(f, model)
