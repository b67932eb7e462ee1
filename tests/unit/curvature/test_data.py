"""The data contract: sums and weights, data that can be read again, caches, staleness, randomness."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hodiff
from hodiff.curvature import _memory
from hodiff.curvature._memory import LiveBytes
from tests.support.ledger import Ledger, flags, snapshot, without_collector
from tests.support.limits import in_threads
from tests.support.operators import (
    IGNORED,
    LABELS,
    TARGETS,
    D,
    X,
    draw,
    network,
    plain_hessian,
    predict,
    split,
    sum_of_cross_entropy,
)
from tests.support.properties import agree

V = draw(39, seed=40)


def union(weight: Tensor | None = None, targets: Tensor = LABELS) -> tuple[nn.Module, Tensor]:
    model = network()
    return model, plain_hessian(F.cross_entropy(model(X), targets, weight=weight), list(model.parameters()))


# --- averages ---------------------------------------------------------------------------------------------------------


def test_ragged_batches_are_the_union() -> None:
    model, dense = union()
    agree(hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS)).dense(), dense, 1e-12)


def test_ignored_targets_are_the_union() -> None:
    """Seven and three, of which four and three count: a mean of means is 16 % off."""
    model, dense = union(targets=IGNORED)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), (batch[1] != -100).sum()

    agree(hodiff.HessianOperator(loss, model, data=split(X, IGNORED)).dense(), dense, 1e-12)


def test_class_weights_are_the_union() -> None:
    weight = torch.tensor([0.2, 3.0, 1.0], dtype=D)
    model, dense = union(weight)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="sum"), weight[batch[1]].sum()

    agree(hodiff.HessianOperator(loss, model, data=split(X, LABELS)).dense(), dense, 1e-12)


def mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def test_bare_mean_of_several_batches_is_refused() -> None:
    for data in (split(X, LABELS), DataLoader(TensorDataset(X, LABELS), batch_size=4), Lazy()):
        with pytest.raises(hodiff.InputError, match=r"(?s)mean of means.*return total, len\(targets\)"):
            hodiff.HessianOperator(mean, network(), data=data) @ V


class Lazy:
    """Batches whose number is not known beforehand."""

    def __iter__(self):
        return iter(split(X, LABELS))


def test_bare_mean_with_batch_weight() -> None:
    model, dense = union()
    weighted = hodiff.HessianOperator(mean, model, data=split(X, LABELS), batch_weight=lambda batch: len(batch[1]))
    agree(weighted.dense(), dense, 1e-12)
    equal = hodiff.HessianOperator(mean, model, data=split(X, LABELS), batch_weight="equal")
    halves = [plain_hessian(mean(model, batch), list(model.parameters())) for batch in split(X, LABELS)]
    agree(equal.dense(), (halves[0] + halves[1]) / 2, 1e-12)
    agree(hodiff.HessianOperator(mean, model, data=[(X, LABELS)]).dense(), dense, 1e-12)


def test_value_and_gradient_are_by_products() -> None:
    model = network()
    expected = F.cross_entropy(model(X), LABELS)
    grads = torch.autograd.grad(expected, list(model.parameters()))
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS))
    G = hodiff.GaussNewtonOperator(lambda m, b: m(b[0]), nn.CrossEntropyLoss(), model, data=split(X, LABELS))
    for operator in (H, G):
        agree(operator.value, expected.detach(), 1e-12)
        agree(list(operator.gradient.values()), list(grads), 1e-12)
        assert operator.products == 0
    agree(list(H.block("3").gradient.values()), list(grads[-2:]), 1e-12)
    assert list(H.block("0").gradient) == ["0.weight", "0.bias"]


BAD_WEIGHTS = {
    r"depends on the parameters": lambda m: m[0].weight.sum().square(),
    r"a number of at least 0": lambda m: -1,
    r"one number": lambda m: torch.ones(2),
    r"expected a number": lambda m: "ten",
}


@pytest.mark.parametrize("pattern", BAD_WEIGHTS)
def test_bad_weights(pattern: str) -> None:
    f = lambda m, b: (m(b[0]).square().sum(), BAD_WEIGHTS[pattern](m))
    with pytest.raises(hodiff.InputError, match=pattern):
        hodiff.HessianOperator(f, network(), data=split(X)) @ V


def test_other_misuse_of_the_contract() -> None:
    model = network()
    with pytest.raises(hodiff.GraphError, match="nothing to average"):
        hodiff.HessianOperator(lambda m, b: (m(b[0]).sum(), 0), model, data=split(X)) @ V
    with pytest.raises(hodiff.InputError, match=r"pair \(sum, weight\) goes with data"):
        hodiff.HessianOperator(lambda m: (m(X).sum(), 10), model) @ V
    with pytest.raises(hodiff.InputError, match="already returns a weight"):
        hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS), batch_weight="equal") @ V
    with pytest.raises(hodiff.InputError, match="tuple of 3"):
        hodiff.HessianOperator(lambda m, b: (m(b[0]).sum(), 1, 2), model, data=split(X)) @ V
    with pytest.raises(hodiff.InputError, match="no data"):
        hodiff.HessianOperator(lambda m: m(X).sum(), model, batch_weight="equal")
    with pytest.raises(hodiff.InputError, match="function of the batch"):
        hodiff.HessianOperator(mean, model, data=split(X, LABELS), batch_weight="mean")


# --- data -------------------------------------------------------------------------------------------------------------

NOT_DATA = {
    r"one-shot iterator \(generator\)": lambda: (batch for batch in split(X, LABELS)),
    r"one-shot iterator \(list_iterator\)": lambda: iter(split(X, LABELS)),
    r"a tuple of 2 tensors.*data=\[batch\]": lambda: (X, LABELS),
    r"a Tensor.*one batch": lambda: X,
    r"a dict.*one batch": lambda: {"x": X},
    r"got an int": lambda: 3,
}


@pytest.mark.parametrize("pattern", NOT_DATA)
def test_what_is_no_data_is_refused_at_once(pattern: str) -> None:
    with pytest.raises(hodiff.InputError, match=pattern):
        hodiff.HessianOperator(sum_of_cross_entropy, network(), data=NOT_DATA[pattern]())


def test_empty_data() -> None:
    with pytest.raises(hodiff.InputError, match="gave no batch"):
        hodiff.HessianOperator(sum_of_cross_entropy, network(), data=[]) @ V


@pytest.mark.parametrize("budget", [0, 3000, 0.5])
def test_shuffled_data_are_one_operator(budget: float) -> None:
    """A budget for one batch of three: none is kept, since the next pass brings others."""
    model, dense = union()
    loader = DataLoader(TensorDataset(X, LABELS), batch_size=4, shuffle=True)
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=loader, memory_budget=budget)
    for _ in range(3):
        agree(H.dense(), dense, 1e-11)
    assert len(H._graphs.kept) == (3 if budget == 0.5 else 0)


def test_a_list_may_be_kept_in_part() -> None:
    model, dense = union()
    data = list(zip(X.split(2), LABELS.split(2), strict=True))
    whole = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data)
    whole @ V
    each = whole.cost().cache_bytes // 5
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, memory_budget=int(2.5 * each))
    agree(H.dense(), dense, 1e-11)
    assert len(H._graphs.kept) == 2
    assert "(2 of 5)" in repr(H)


def test_the_budget_bounds_what_is_alive() -> None:
    model = network()
    data = list(zip(X.split(1), LABELS.split(1), strict=True))
    loss = sum_of_cross_entropy
    hodiff.HessianOperator(loss, model, data=data) @ V
    for budget in (0, 5000):
        with without_collector(), Ledger() as ledger:
            H = hodiff.HessianOperator(loss, model, data=data, memory_budget=budget)
            H @ V
        totals = 2 * 39 * 8 + 100  # value and gradient, as sums
        assert ledger.alive() <= budget + totals, ledger.makers()


def test_an_evaluation_that_fails_keeps_no_graph_while_its_error_is_looked_at() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        if batch[0] is data[-1][0]:
            raise ValueError("the last batch")
        return sum_of_cross_entropy(model, batch)

    data = list(zip(X.split(1), LABELS.split(1), strict=True))
    H = hodiff.HessianOperator(loss, network(), data=data)
    with without_collector(), Ledger() as ledger:
        with pytest.raises(ValueError, match="the last batch") as failure:
            H @ V
        sums = 2 * 39 * 8 + 100
        assert failure.tb is not None and ledger.alive() <= 2 * sums, ledger.makers()


@pytest.mark.parametrize("budget", [True, "much", -1, 1.5])
def test_bad_budget(budget: object) -> None:
    with pytest.raises(hodiff.InputError, match="memory_budget"):
        hodiff.HessianOperator(mean, network(), data=split(X, LABELS), memory_budget=budget)  # type: ignore[arg-type]


def test_progress_shows_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    hodiff.HessianOperator(sum_of_cross_entropy, network(), data=split(X, LABELS), progress=True) @ V
    captured = capsys.readouterr()
    assert "hodiff" in captured.err and not captured.out


# --- evaluations ------------------------------------------------------------------------------------------------------


def counting() -> tuple[list[int], object]:
    calls: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        calls.append(len(batch[0]))
        return sum_of_cross_entropy(model, batch)

    return calls, loss


def test_each_batch_is_evaluated_once() -> None:
    calls, loss = counting()
    H = hodiff.HessianOperator(loss, network(), data=split(X, LABELS))
    assert calls == []
    H @ V, H.dense(), H.block("0").dense(), (H + 0.1) @ V, H.value
    assert calls == [7, 3]


def test_without_a_budget_each_product_evaluates_once_more() -> None:
    calls, loss = counting()
    H = hodiff.HessianOperator(loss, network(), data=split(X, LABELS), memory_budget=0)
    H @ V
    first = len(calls)
    H @ V
    H.dense()
    assert len(calls) - first == 4
    assert H.cost().evaluations == 2 and H.cost().passes == 4


def test_cost_counts_what_a_product_handles() -> None:
    """The largest tensor of the graph, some four of which live at once, and the result."""
    rows = torch.ones(1000, 1, dtype=D)
    cost = hodiff.HessianOperator(lambda x: (x * rows).sin().sum(), torch.ones(3, dtype=D)).cost()
    assert cost.product_bytes == 3 * 8 + 4 * 3000 * 8


def test_cost_says_what_is_needed_before() -> None:
    H = hodiff.HessianOperator(sum_of_cross_entropy, network(), data=split(X, LABELS), chunk_size=10)
    before = H.cost()
    assert (before.size, before.batches, before.kept) == (39, 2, 0)
    assert before.dense_bytes == 39 * 39 * 8
    H @ V
    after = H.cost()
    assert (after.kept, after.evaluations, after.passes, after.dense_passes) == (2, 0, 2, 8)
    assert 0.5 < before.cache_bytes / after.cache_bytes < 2
    assert "dense(): 11.9 KiB, 8 passes" in str(after)


def test_dense_that_does_not_fit_says_how_large_it_is() -> None:
    x = torch.zeros(2_000_000)
    H = hodiff.HessianOperator(lambda x: x.square().sum(), x)
    with pytest.raises(hodiff.InputError, match=r"2000000 x 2000000.*14\.6 TiB.*free.*eigsh"):
        H.dense()


# --- staleness and lifetime -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 0.5])
def test_changed_parameters_raise_until_refresh(budget: float) -> None:
    model = network()
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS), memory_budget=budget)
    before = H @ V
    with torch.no_grad():
        model[3].weight.mul_(1.5)
    for call in (lambda: H @ V, lambda: H.value, lambda: H.gradient, lambda: H.block("0") @ V[:16]):
        with pytest.raises(hodiff.GraphError, match=r"parameters have changed.*3\.weight.*refresh"):
            call()
    assert H.refresh() is H
    expected = plain_hessian(F.cross_entropy(model(X), LABELS), list(model.parameters()))
    agree(H @ V, expected @ V, 1e-11)
    assert (H @ V - before).norm() > 1e-3


def test_optimizer_step_and_load_state_dict_are_seen() -> None:
    model = network()
    H = hodiff.HessianOperator(lambda m: m(X).square().mean(), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for change in (optimizer.step, lambda: model.load_state_dict(network().state_dict()), lambda: model.to(D).float()):
        H.refresh() @ V
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        change()
        with pytest.raises(hodiff.GraphError, match="refresh"):
            H @ V


def test_close_frees_and_says_so() -> None:
    model = network()
    hodiff.HessianOperator(lambda m: m(X).square().mean(), model) @ V
    with without_collector(), Ledger() as ledger:
        H = hodiff.HessianOperator(lambda m: m(X).square().mean(), model)
        H @ V
        assert ledger.alive() > 1000
        H.close()
        assert ledger.alive() <= 6 * 8  # shapes of vectors
    with pytest.raises(hodiff.GraphError, match=r"closed.*refresh"):
        H @ V
    H.refresh() @ V


def test_nothing_of_the_users_changes() -> None:
    model = network()
    model[0].bias.grad = torch.ones(4, dtype=D)
    before, switches, random = snapshot(model), flags(), torch.get_rng_state()
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS))
    H @ V, H.dense(), H.value
    assert snapshot(model) == before and flags() == switches
    assert torch.equal(torch.get_rng_state(), random)


def test_it_works_without_grad_mode_and_in_inference_mode() -> None:
    model, dense = union()
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS))
    with torch.no_grad():
        agree(H @ V, dense @ V, 1e-11)
    with torch.inference_mode():
        found = H @ V.clone()
        again = hodiff.HessianOperator(sum_of_cross_entropy, model, data=split(X, LABELS)) @ V
    agree(found.clone(), dense @ V, 1e-11)
    agree(again.clone(), dense @ V, 1e-11)


def test_inside_another_call_it_refuses_to_be_a_constant() -> None:
    H = hodiff.HessianOperator(lambda x: (x**4).sum(), torch.ones(2))
    with pytest.raises(hodiff.GraphError, match=r"hodiff\.hvp"):
        hodiff.grad(lambda x: (x * (H @ torch.ones(2))).sum(), torch.ones(2))


# --- randomness -------------------------------------------------------------------------------------------------------


def dropout() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()


@pytest.mark.parametrize("budget", [0, 0.5])
def test_dropout_is_named_and_held_fixed(budget: float) -> None:
    model = dropout()
    f = lambda m, b: (m(b[0]).square().sum(), len(b[0]))
    H = hodiff.HessianOperator(f, model, data=split(X), memory_budget=budget)
    with pytest.warns(hodiff.RandomnessWarning, match=r"2 \(Dropout\).*model\.eval\(\)"):
        matrix = H.dense()
    agree(H.dense(), matrix, 1e-12)
    agree(matrix, matrix.T, 1e-12)
    torch.rand(7)  # the state is not what the last product left
    state = torch.get_rng_state()
    H @ draw(H.shape[1])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::hodiff.RandomnessWarning")
def test_passes_that_disagree_are_refused() -> None:
    """Shuffled data with dropout and no cache: every pass would be another operator."""
    model = dropout()
    loader = DataLoader(TensorDataset(X), batch_size=4, shuffle=True)
    f = lambda m, b: (m(b[0]).square().sum(), len(b[0]))
    H = hodiff.HessianOperator(f, model, data=loader, memory_budget=0)
    with pytest.raises(hodiff.GraphError, match=r"two passes over data disagree.*Dropout"):
        for _ in range(5):
            H @ draw(H.shape[1])


def test_augmented_data_are_refused() -> None:
    class Augmented:
        def __iter__(self):
            return iter([(X + 0.1 * torch.randn_like(X), LABELS)])

    H = hodiff.HessianOperator(sum_of_cross_entropy, network(), data=Augmented(), memory_budget=0)
    with pytest.raises(hodiff.GraphError, match="two passes over data disagree"):
        H @ V, H @ V


def test_shuffling_raises_no_false_alarm() -> None:
    loader = DataLoader(TensorDataset(X.float(), LABELS), batch_size=3, shuffle=True)
    H = hodiff.HessianOperator(sum_of_cross_entropy, network().float(), data=loader, memory_budget=0)
    for _ in range(5):
        H @ V.float()


OPERATORS = {
    "Hessian": lambda f, x, data: hodiff.HessianOperator(
        lambda x, b: (f(x, b).sum(), 1), x, data=data, memory_budget=0
    ),
    "Gauss-Newton": lambda f, x, data: hodiff.GaussNewtonOperator(
        f, lambda z, b: (z.square().sum(), 1), x, data=data, memory_budget=0
    ),
    "Jacobian": lambda f, x, data: hodiff.JacobianOperator(f, x, data=data, memory_budget=0),
    "transposed Jacobian": lambda f, x, data: hodiff.JacobianOperator(f, x, data=data, memory_budget=0).T,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_graph_that_is_not_kept_is_gone_before_the_next_is_built(name: str) -> None:
    begun: list[int] = []

    def f(x: Tensor, batch: Tensor) -> Tensor:
        begun.append(live.now)
        return (x * batch).sin().square().sum(0)

    data = [torch.ones(1000, 3, dtype=D)] * 3
    with without_collector(), LiveBytes() as live:
        H = OPERATORS[name](f, torch.ones(3, dtype=D), data)
        v = torch.ones(H.shape[1], dtype=D)
        H @ v
        begun.clear()
        H @ v
    assert len(begun) == 3 and max(begun) - begun[0] < 1000, begun


# --- the slips that the pair invites ----------------------------------------------------------------------------------

SEVERAL, ONE = split(X, LABELS, TARGETS), [(X, LABELS, TARGETS)]
SINGLE = [(X[:1], LABELS[:1], TARGETS[:1]), (X[1:2], LABELS[1:2], TARGETS[1:2])]
MEAN = r"returned a mean with the weight \d+, .*times too small.*reduction='sum'.*batch_weight=lambda batch: len"
UNITS = r"a sum over \d+ samples with the weight 1.*the mean, return \(sum, number of samples\).*pass reduction=\"sum\""
LOSSES = {
    "cross-entropy": lambda z, b, how: F.cross_entropy(z, b[1], reduction=how),
    "cross-entropy of a map": lambda z, b, how: F.cross_entropy(z[..., None], b[1][:, None], reduction=how),
    "squared error": lambda z, b, how: F.mse_loss(z, b[2], reduction=how),
    "logistic": lambda z, b, how: F.binary_cross_entropy_with_logits(z, b[2].sigmoid(), reduction=how),
    "binary": lambda z, b, how: F.binary_cross_entropy(z.sigmoid(), b[2].sigmoid(), reduction=how),
    "smooth": lambda z, b, how: F.smooth_l1_loss(z, b[2], reduction=how),
    "Huber": lambda z, b, how: F.huber_loss(z, b[2], reduction=how),
    "soft margin": lambda z, b, how: F.soft_margin_loss(z, b[2].sign(), reduction=how),
    "Poisson": lambda z, b, how: F.poisson_nll_loss(z, b[2].exp(), reduction=how),
    "by hand": lambda z, b, how: getattr((z - b[2]).pow(4).sum(1), how)(),
    "by hand, with dimensions": lambda z, b, how: getattr((z - b[2]).pow(4), how)((0, 1)),
}
KINDS = {
    "Hessian": lambda pair, data, **o: hodiff.HessianOperator(lambda m, b: pair(m(b[0]), b), network(), data=data, **o),
    "Gauss-Newton": lambda pair, data, **o: hodiff.GaussNewtonOperator(predict, pair, network(), data=data, **o),
    "Fisher": lambda pair, data, **o: hodiff.FisherOperator(predict, pair, network(), data=data, kind="empirical", **o),
}


def over(f: Callable[..., Tensor], data: list[tuple[Tensor, ...]], how: str) -> list[Tensor]:
    """The loss of each batch."""
    model = network()
    return [f(model(batch[0]), batch, how).detach() for batch in data]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_beside_the_number_of_samples(kind: str, loss: str) -> None:
    f, make = LOSSES[loss], KINDS[kind]
    for data in (SEVERAL, ONE):
        H = make(lambda z, b: (f(z, b, "mean"), len(z)), data)
        with pytest.warns(hodiff.HodiffWarning, match=MEAN) as told:
            H @ V
        H @ V, H.refresh() @ V, H.block("0") @ torch.ones(16, dtype=D)
        assert len(told) == 1
        agree(H.value, sum(over(f, data, "mean")) / 10)
        H = make(lambda z, b: (f(z, b, "sum"), len(z)), data)  # the ways out, silent
        agree((H @ V, H.value)[1], sum(over(f, ONE, "sum")) / 10)
        if kind != "Fisher":  # which asks for each one's gradient
            H = make(lambda z, b: f(z, b, "mean"), data, batch_weight=lambda b: len(b[1]))
            agree(H.value, sum(m * len(b[1]) for m, b in zip(over(f, data, "mean"), data, strict=True)) / 10)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_beside_one_over_several_batches(kind: str, loss: str) -> None:
    f, make = LOSSES[loss], KINDS[kind]
    H = make(lambda z, b: (f(z, b, "sum"), 1), SEVERAL)
    with pytest.warns(hodiff.HodiffWarning, match=UNITS) as told:
        H @ V
    H @ V, H.refresh() @ V
    assert len(told) == 1
    [whole] = over(f, ONE, "sum")
    agree(H.value, whole / 2)
    agree(make(lambda z, b: (f(z, b, "sum"), len(z)), SEVERAL).value, whole / 10)  # the ways out, silent
    agree(make(lambda z, b: (f(z, b, "sum"), 1), SEVERAL, reduction="sum").value, whole)
    agree(make(lambda z, b: (f(z, b, "sum"), 1 / 2), SEVERAL).value, whole)
    agree(make(lambda z, b: (f(z, b, "sum"), 1), ONE).value, whole)
    if kind != "Fisher":
        agree(make(lambda z, b: f(z, b, "sum"), SEVERAL, batch_weight="equal").value, whole / 2)


QUIET = {
    "a mean of one sample": (lambda z, b: (F.cross_entropy(z, b[1]), len(z)), [(X[:1], LABELS[:1])]),
    "a mean of means": (lambda z, b: (F.cross_entropy(z, b[1]), 1), SEVERAL),
    "a mean, weighted by hand": (lambda z, b: (F.cross_entropy(z, b[1]) * len(z), len(z)), SEVERAL),
    "the mean over features, summed": (lambda z, b: ((z - b[2]).square().mean(1).sum(), len(z)), SEVERAL),
    "one sample for each batch": (lambda z, b: (F.mse_loss(z, b[2], reduction="sum"), 1), SINGLE),
    "samples without a batch": (lambda z, b: ((z - b[1]).square().sum(), 1), [(X[0], draw(3, 3)), (X[1], draw(2, 3))]),
    "the mean over samples, summed": (lambda z, b: ((z - b[2]).square().mean(0).sum(), 1), SEVERAL),
    "batches of which one has more": (
        lambda z, b: (F.cross_entropy(z, b[1], reduction="sum"), len(z)),
        split(X, LABELS),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_word_about_what_is_meant(name: str, recwarn: pytest.WarningsRecorder) -> None:
    loss, data = QUIET[name]
    for kind in ("Hessian", "Gauss-Newton"):
        KINDS[kind](loss, data) @ V
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["Hessian", "Gauss-Newton", "Jacobian", "transposed", "several vectors", "recorded"])
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_stop_iteration_of_f_ends_no_pass_over_data(kind: str, late: int) -> None:
    """Python takes it for the end of a loop, or of a generator; graphs are not kept, so products call f as well."""
    x, error, calls = torch.tensor([0.3, -0.8], dtype=torch.float64), StopIteration(3), []
    data = [torch.ones(1, 2, dtype=torch.float64), torch.full((1, 2), 2.0, dtype=torch.float64)]

    def outputs(z: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) > late:
            raise error
        return (z * batch).sin()

    def product() -> Any:
        if kind in ("Jacobian", "transposed"):
            J = hodiff.JacobianOperator(outputs, x, data=data, memory_budget=0)
            return J @ x if kind == "Jacobian" else J.T @ torch.ones(4, dtype=torch.float64)
        if kind == "Gauss-Newton":
            loss = lambda y, batch: (y.square().sum(), 2.0)
            return hodiff.GaussNewtonOperator(outputs, loss, x, data=data, memory_budget=0) @ x
        H = hodiff.HessianOperator(lambda z, b: (outputs(z, b).sum(), 2.0), x, data=data, memory_budget=0)
        if kind == "recorded":
            return hodiff.trace(H, vectors=x[:, None], create_graph=True)
        return H @ (torch.eye(2, dtype=torch.float64) if kind == "several vectors" else x)

    try:
        product()
    except StopIteration as caught:
        assert caught is error
    else:
        assert len(calls) <= late, "the exception was swallowed"


SAMPLES, CLASSES = draw(10, 4, seed=1), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))


PAIRS = split(SAMPLES, CLASSES)


def linear(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return m(batch[0])


def layer(dtype: torch.dtype = D) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_batches_do_not_saturate(dtype: torch.dtype) -> None:
    H = hodiff.HessianOperator(
        lambda w, b: ((w**2).sum() * b, 1), torch.tensor([1.0, 2.0], dtype=dtype), data=[1.0] * 3000
    )
    one = torch.ones(2, dtype=dtype)
    assert torch.equal(H @ one, 2 * one) and H.value == 5 and H.gradient.tolist() == [2, 4]
    assert H.value.dtype == H.gradient.dtype == (H @ one).dtype == dtype
    J = hodiff.JacobianOperator(lambda w, b: w * b, torch.ones(2, dtype=dtype), data=[1.0] * 3000)
    assert torch.equal(J.T @ torch.ones(6000, dtype=dtype), 3000 * one)


def test_one_operator_in_several_threads() -> None:
    H = hodiff.HessianOperator(lambda m, b: (linear(m, b).tanh().square().sum(), len(b[0])), layer(), data=PAIRS)
    found = in_threads(*[lambda: H @ torch.ones(15, dtype=D)] * 4)
    assert all(torch.equal(part, found[0]) for part in found)


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input, target, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


def test_losses_that_are_not_what_their_class_says() -> None:
    make = lambda loss, **options: hodiff.GaussNewtonOperator(linear, loss, layer(), data=PAIRS, **options)
    with pytest.raises(hodiff.InputError, match="not of Focal"):
        make(Focal())
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, found: 3 * found)
    with pytest.raises(hodiff.InputError, match="has forward hooks"):
        make(hooked)
    with pytest.raises(hodiff.InputError, match="CrossEntropyLoss determines the weight of a batch itself"):
        make(nn.CrossEntropyLoss(), batch_weight="equal")


def test_empirical_fisher_knows_its_samples_or_says_so() -> None:
    make = lambda loss, data=((SAMPLES, CLASSES),), **options: hodiff.FisherOperator(
        linear, loss, layer(), data=list(data), kind="empirical", **options
    )
    mean = lambda outputs, batch: F.cross_entropy(outputs, batch[1])
    agree(make(mean, batch_weight=lambda b: len(b[1])).dense(), make(nn.CrossEntropyLoss()).dense(), 1e-12)
    for options in ({}, {"batch_weight": "equal"}):
        with pytest.raises(hodiff.InputError, match="how many samples it averages"):
            make(mean, **options) @ torch.ones(15, dtype=D)
    with pytest.raises(hodiff.InputError, match="needs the samples in the leading dimension"):
        make(nn.CrossEntropyLoss(), data=[(SAMPLES[0], CLASSES[0])]) @ torch.ones(15, dtype=D)


def test_weights_from_numpy() -> None:
    import numpy as np

    for pair in (tuple, list):
        H = hodiff.HessianOperator(lambda w, b, pair=pair: pair([(w**2).sum(), np.int64(3)]), torch.ones(2), data=[0])
        agree(H.dense(), torch.eye(2) * 2 / 3)


# --- sums over data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 0.5], ids=["built again", "kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_over_all_data(kind: str, budget: float) -> None:
    """Whatever the weights are: products, by-products and diagonals are those of the sum; after a refresh too."""
    f, make = LOSSES["squared error"], KINDS[kind]
    mean = make(lambda z, b: (f(z, b, "sum"), len(z)), SEVERAL)
    for weight in (1, 0.1, 7):
        pair = lambda z, b, weight=weight: (f(z, b, "sum"), weight)
        S = make(pair, SEVERAL, reduction="sum", memory_budget=budget)
        for H in (S, S.refresh(), S.block("*")):
            agree(S.flatten(H @ V), 10 * (mean @ V), 1e-10)
        agree(S.value, 10 * mean.value, 1e-10)
        agree(S.flatten(S.gradient), 10 * mean.flatten(mean.gradient), 1e-10)
        agree(S.flatten(hodiff.diagonal(S, method="exact").value), 10 * mean.dense().diagonal(), 1e-9)
    with pytest.raises(hodiff.InputError, match=r"reduction: got 'none'"):
        make(lambda z, b: (f(z, b, "sum"), 1), SEVERAL, reduction="none")


def test_the_sum_over_all_data_of_loss_modules_and_bare_means() -> None:
    for loss in (torch.nn.CrossEntropyLoss(), torch.nn.CrossEntropyLoss(reduction="sum")):
        for operator in (hodiff.GaussNewtonOperator, hodiff.FisherOperator):
            options = {"kind": "exact"} if operator is hodiff.FisherOperator else {}
            G = operator(predict, loss, network(), data=SEVERAL, reduction="sum", **options)
            whole = operator(predict, torch.nn.CrossEntropyLoss(reduction="sum"), network(), data=ONE, **options)
            agree(G @ V, whole @ V, 1e-10)
    f = lambda m, b: F.cross_entropy(m(b[0]), b[1])
    H = hodiff.HessianOperator(f, network(), data=SEVERAL, batch_weight=lambda b: len(b[1]), reduction="sum")
    agree(H @ V, 10 * (hodiff.HessianOperator(lambda m: f(m, ONE[0]), network()) @ V), 1e-10)


def test_a_sum_over_all_data_is_differentiated() -> None:
    w, x = torch.tensor(1.5, dtype=D, requires_grad=True), torch.ones(2, dtype=D)
    data = [torch.randn(3, 2, dtype=D), torch.randn(2, 2, dtype=D)]
    quartic = lambda x, b: ((b * x).sum(1) ** 4).sum()
    H = hodiff.HessianOperator(lambda x, b: (w * quartic(x, b), len(b)), x, data=data, reduction="sum")
    (found,) = torch.autograd.grad(hodiff.trace(H, create_graph=True).value, w)
    agree(found, hodiff.hessian(lambda x: sum(quartic(x, b) for b in data), x).trace(), 1e-10)


# --- free memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, _memory.UNKNOWN),
        ({"meminfo": "MemTotal:  9 kB\nMemAvailable:   7 kB\nBuffers: 3 kB\n"}, 7 * 1024),
        ({"meminfo": "MemTotal:  9 kB\n"}, _memory.UNKNOWN),
        ({"meminfo": "MemAvailable:   7 kB\n", "memory.max": "5000\n", "memory.current": "1000\n"}, 4000),
        ({"meminfo": "MemAvailable:   2 kB\n", "memory.max": "5000\n", "memory.current": "1000\n"}, 2048),
        ({"meminfo": "MemAvailable:   7 kB\n", "memory.max": "max\n", "memory.current": "1000\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable:   7 kB\n", "memory.max": "5000\n"}, 7 * 1024),
    ],
)
def test_free_memory_is_what_the_machine_has_within_the_limit_of_a_container(
    files: dict[str, str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(_memory, "MACHINE", tmp_path / "meminfo")
    monkeypatch.setattr(_memory, "GROUP", tmp_path)
    assert _memory.free_bytes(torch.device("cpu")) == free
