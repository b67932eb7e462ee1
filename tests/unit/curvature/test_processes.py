"""Operators whose data several processes share: the answers of one process, and errors on all of them."""

import contextlib
import datetime
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from hodiff.curvature import _memory
from hodiff.curvature._process_group import Digest
from tests.support.limits import in_threads
from tests.support.operators import LABELS, D, X, draw, network, predict, squares, sum_of_cross_entropy
from tests.support.processes import TIMEOUT, Ranks, group_of_one

CUTS = (4, 5, 1)  # ragged batches of the ten samples
SHARES = {1: [[0, 1, 2]], 2: [[0, 1, 2], []], 3: [[1], [0, 2], []]}
"""Which batches each rank has, by the number of ranks; the last has none."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    ranks = Ranks(3, __name__)
    yield ranks
    ranks.close()


def batches(targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(X.split(CUTS), targets.split(CUTS), strict=True))


def share(targets: Tensor, group: Any) -> list[tuple[Tensor, Tensor]]:
    """This rank's batches; all of them without a group."""
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    return [batches(targets)[number] for number in SHARES[world][rank]]


def build(kind: str, group: Any, **options: Any) -> Any:
    options = {"process_group": group, **options}
    if kind == "Hessian":
        return hodiff.HessianOperator(sum_of_cross_entropy, network(), data=share(LABELS, group), **options)
    if kind == "Gauss-Newton":
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=D), ignore_index=2)
        return hodiff.GaussNewtonOperator(predict, loss, network(), data=share(LABELS, group), **options)
    if kind == "any loss":
        return hodiff.GaussNewtonOperator(predict, squares, network(), data=share(X, group), **options)
    if kind == "undivided":
        loss = nn.CrossEntropyLoss(reduction="sum")
        return hodiff.GaussNewtonOperator(predict, loss, network(), data=share(LABELS, group), **options)
    loss, kind = nn.CrossEntropyLoss(), kind.rpartition(" ")[2]
    return hodiff.FisherOperator(predict, loss, network(), data=share(LABELS, group), kind=kind, **options)  # type: ignore


KINDS = ("Hessian", "Gauss-Newton", "any loss", "undivided", "Fisher exact", "Fisher empirical")


def answers(kind: str, group: Any) -> dict[str, Any]:
    seeded = lambda: torch.Generator().manual_seed(0)
    H = build(kind, group)
    V = draw(39, 4, seed=1)
    block = H.block("0")
    kept = H @ H.unflatten(V[:, 0])
    H @ H.unflatten(V[:, 1])  # a result is nobody else's: the next product does not write into it
    kept = H.flatten(kept)
    found = {
        "value": H.value,
        "gradient": H.flatten(H.gradient),
        "one": H @ V[:, 0],
        "four": H @ V,
        "structured": H.flatten(H @ H.unflatten(V)),
        "kept": kept,
        "block": block @ draw(16, seed=2),
        "block, three": block @ draw(16, 3, seed=3),
        "dense": H.dense(),
        "by chunks": build(kind, group, chunk_size=3) @ V,
        "not kept": build(kind, group, memory_budget=0) @ V,
        "trace": hodiff.trace(H, samples=6, generator=seeded()).value,
        "diagonal": hodiff.diagonal(H, method="exact").value,
        "eigsh": hodiff.eigsh(H, 3, generator=seeded()).value,
        "solve": hodiff.solve(H + 200.0, V[:, 0], start=torch.zeros_like(V[:, 0])).value,  # no direct one
        "minres": hodiff.solve(H + 50.0, V[:, 0], method="minres").value,
    }
    found["diagonal"] = H.flatten(found["diagonal"])
    H.refresh()
    found["refreshed"] = H @ V[:, 0]
    return found


def in_the_world(rank: int, kind: str) -> dict[str, Any]:
    return answers(kind, dist.group.WORLD)


def in_a_subgroup(rank: int, kind: str) -> dict[str, Any] | None:
    group = dist.new_group([0, 2])
    return answers(kind, group) if rank != 1 else None


@functools.cache
def of_one_process(kind: str) -> dict[str, Any]:
    return answers(kind, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", [in_the_world, in_a_subgroup])
def test_the_answers_of_one_process(three: Ranks, kind: str, of: Any) -> None:
    expected = of_one_process(kind)
    outcomes = [outcome for rank, outcome in enumerate(three(of, kind)) if of is in_the_world or rank != 1]
    for outcome in outcomes:
        assert not outcome.error, outcome
        for name, value in expected.items():
            scale = float(value.abs().max())
            assert float((outcome.value[name] - value).abs().max()) <= 1e-12 * scale, (name, scale)
            assert torch.equal(outcome.value[name], outcomes[0].value[name]), name  # to the last bit, on every rank


# --- one collective ---------------------------------------------------------------------------------------------------


class Counted:
    """The collectives of a block of code, with their sizes."""

    def __enter__(self) -> list[tuple[int, torch.dtype | None]]:
        self._reduce, self._gather, found = dist.all_reduce, dist.all_gather_object, []

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append((tensor.numel(), tensor.dtype))
            return self._reduce(tensor, *args, **kwargs)

        def all_gather_object(*args: Any, **kwargs: Any) -> Any:
            found.append((0, None))
            return self._gather(*args, **kwargs)

        dist.all_reduce, dist.all_gather_object = all_reduce, all_gather_object
        return found

    def __exit__(self, *exc: object) -> None:
        dist.all_reduce, dist.all_gather_object = self._reduce, self._gather


def collectives(rank: int) -> dict[str, int]:
    H = build("Hessian", dist.group.WORLD)
    v, numbers = draw(39), {}

    def count(name: str, call: Any) -> None:
        with Counted() as found:
            call()
        numbers[name] = len(found)

    count("repr and cost", lambda: (repr(H), H.cost()))
    count("first product", lambda: H @ v)
    count("product", lambda: H @ v)
    count("eight", lambda: H @ draw(39, 8))
    count("block", lambda: H.block("0") @ draw(16))
    count("by-products", lambda: (H.value, H.gradient, repr(H), H.cost(), H.flatten(H.unflatten(v))))
    count("trace of six", lambda: hodiff.trace(H, samples=6, generator=torch.Generator().manual_seed(0)))
    return numbers


def test_one_collective_for_each_product(three: Ranks) -> None:
    for outcome in three(collectives):
        assert outcome.value == {
            "repr and cost": 0,
            "first product": 4,  # the points are compared, once; the first pass, with its facts; the product
            "product": 1,
            "eight": 2,  # the first vector, with which the ranks find out what they agree about; the others
            "block": 1,
            "by-products": 0,
            "trace of six": 2,
        }, outcome


def in_half_precision(rank: int) -> tuple[Tensor, Tensor, Tensor, set[torch.dtype]]:
    model = network().to(torch.bfloat16)
    data = [(x.to(torch.bfloat16), y) for x, y in share(LABELS, dist.group.WORLD)]
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD)
    whole = hodiff.HessianOperator(
        sum_of_cross_entropy, model, data=[(x.to(torch.bfloat16), y) for x, y in batches(LABELS)]
    )
    v = draw(39).to(torch.bfloat16)
    with Counted() as found:
        got = H @ v
    return got, whole @ v, H.value, {dtype for size, dtype in found if size}


def test_half_precision_is_added_in_single(three: Ranks) -> None:
    """And rounded in the end, on a rank without data, too."""
    for outcome in three(in_half_precision):
        got, expected, value, dtypes = outcome.value
        assert got.dtype == value.dtype == torch.bfloat16 and dtypes == {torch.float32}
        assert float((got - expected).norm()) <= 2e-2 * float(expected.norm())


# --- chunks, which each rank would choose otherwise -------------------------------------------------------------------


def kept_by_some(rank: int) -> Tensor:
    """A rank that keeps no graphs would take as many vectors at once as there is room for."""
    return build("Hessian", dist.group.WORLD, chunk_size=2, memory_budget=0 if rank == 1 else 0.5) @ draw(39, 5)


def large_on_some(rank: int) -> Tensor:
    """Only the first rank has tensors that bound the chunk."""
    loss = lambda w, batch: ((batch @ w).square().sum() / 2, 1.0)
    data = [torch.eye(3, dtype=D).repeat(20_000, 1)] if rank == 0 else []
    H = hodiff.HessianOperator(loss, torch.zeros(3, dtype=D), data=data, process_group=dist.group.WORLD)
    return H @ draw(3, 100)


def in_need_of_memory(rank: int) -> tuple[Tensor, int]:
    """What one rank has no room for, no rank takes at once."""
    free = _memory.free_bytes
    try:
        _memory.free_bytes = lambda device: 1000 if rank == 1 else free(device)
        H = build("Hessian", dist.group.WORLD, chunk_size=2, memory_budget=0)
        H @ draw(39)
        with Counted() as found:
            return H @ draw(39, 5), len(found)
    finally:
        _memory.free_bytes = free


def test_the_least_memory_decides(three: Ranks) -> None:
    expected = build("Hessian", None) @ draw(39, 5)
    for outcome in three(in_need_of_memory):
        assert not outcome.error, outcome
        found, collectives = outcome.value
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert collectives == 2 + 2 + 1  # two vectors, two, and one


def test_ranks_take_as_many_vectors_at_once(three: Ranks) -> None:
    expected = build("Hessian", None) @ draw(39, 5), 20_000 * draw(3, 100)
    for function, wanted in zip((kept_by_some, large_on_some), expected, strict=True):
        for outcome in three(function):
            assert not outcome.error, outcome
            torch.testing.assert_close(outcome.value, wanted, rtol=1e-12, atol=1e-12)


# --- random vectors ---------------------------------------------------------------------------------------------------


def unseeded(rank: int) -> list[Tensor]:
    H = build("Hessian", dist.group.WORLD)
    torch.manual_seed(rank)  # building the model has seeded all alike
    first, second = (hodiff.trace(H + 1.0, samples=6).value for _ in range(2))
    return [first, second, hodiff.eigsh(H, 2).value, hodiff.diagonal(H, samples=6).stderr["0.weight"]]


def test_random_vectors_are_the_same_on_every_rank(three: Ranks) -> None:
    outcomes = three(unseeded)
    for outcome in outcomes:
        assert not outcome.error, outcome
        for mine, theirs in zip(outcome.value, outcomes[0].value, strict=True):
            assert torch.equal(mine, theirs)
    assert outcomes[0].value[0] != outcomes[0].value[1]  # drawn anew each time


def seeded_by_rank(rank: int) -> None:
    hodiff.trace(build("Hessian", dist.group.WORLD), samples=6, generator=torch.Generator().manual_seed(rank))


def seeded_on_one(rank: int) -> None:
    generator = torch.Generator().manual_seed(0) if rank == 0 else None
    hodiff.trace(build("Hessian", dist.group.WORLD), samples=6, generator=generator)


ENTRIES = 300


def sampled(rank: int, seeded: bool) -> Tensor:
    """Sampled Fisher informations of many parameters, outputs z = w of each of eight samples, and labels z + noise."""
    generator = torch.Generator().manual_seed(0) if seeded else None
    torch.manual_seed(7)  # as whoever builds the same model on every rank
    data = [] if rank == 2 else [(torch.zeros(8, ENTRIES, dtype=D),) * 2]
    predict = lambda w, batch: batch[0] + w
    F_ = hodiff.FisherOperator(
        predict, nn.MSELoss(), torch.zeros(ENTRIES, dtype=D), data=data, kind="mc", generator=generator,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    found = ENTRIES * F_.dense().diagonal()
    assert torch.equal(ENTRIES * F_.dense().diagonal(), found)  # labels stay
    assert not torch.equal(ENTRIES * F_.refresh().dense().diagonal(), found)
    F_.cost()
    hodiff.trace(F_, samples=2, generator=generator)  # the generators are in step, on the rank without data too
    return found


@pytest.mark.parametrize("seeded", [True, False])
def test_labels_of_the_ranks_are_independent(three: Ranks, seeded: bool) -> None:
    """The mean of 16 values 2 e² with normal e: its variance is 8 / 16, and 8 / 8 where two ranks draw the same."""
    outcomes = three(sampled, seeded)
    for outcome in outcomes:
        assert not outcome.error, outcome
        values = outcome.value
        assert torch.equal(values, outcomes[0].value)
        assert abs(float(values.mean()) - 2) < 5 * (0.5 / ENTRIES) ** 0.5
        assert 0.36 < float(values.var()) < 0.7  # within some 9 % (one standard deviation)


def approximated(rank: int) -> Tensor:
    A = build("Fisher exact", dist.group.WORLD)
    torch.manual_seed(rank)
    return hodiff.nystrom(A, 5, shift=0.1) @ draw(39)


def test_a_preconditioner_draws_alike(three: Ranks) -> None:
    outcomes = three(approximated)
    for outcome in outcomes:
        assert not outcome.error, outcome
        assert torch.equal(outcome.value, outcomes[0].value)


def differentiated(rank: int) -> list[str]:
    found, H = [], build("Hessian", dist.group.WORLD)
    for estimate in (
        lambda: hodiff.trace(H, samples=4, create_graph=True),
        lambda: hodiff.trace(2 * H + 1.0, samples=100, create_graph=True),
        lambda: hodiff.eigsh(H.block("0"), 2, create_graph=True),
    ):
        with pytest.raises(hodiff.InputError, match="create_graph cannot") as caught:
            estimate()
        found.append(str(caught.value))
    return found


def test_a_graph_of_this_ranks_data_alone_is_refused(three: Ranks) -> None:
    """Its value would be the trace of one share, silently."""
    for outcome in three(differentiated):
        assert not outcome.error, outcome
        assert all("create_graph cannot be combined with process_group=" in message for message in outcome.value), (
            outcome
        )


class Mixed(nn.Module):
    """In single precision, with a value in double."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x.float())).double()


def buffers_differ(rank: int, training: bool) -> tuple[list[str], Tensor]:
    """As after a step of DistributedDataParallel, each rank with the statistics of its own batch."""
    torch.manual_seed(0)
    model = Mixed().train(training)
    model.norm.running_mean += rank == 1
    data = share(LABELS, dist.group.WORLD)
    data = [(x, y) for x, y in data if len(x) > 1]
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = H.value
    return [str(warning.message) for warning in caught], value


@pytest.mark.parametrize("training", [False, True])
def test_buffers_that_differ_are_named(three: Ranks, training: bool) -> None:
    outcomes = three(buffers_differ, training)
    for outcome in outcomes:
        assert not outcome.error, outcome
        messages, value = outcome.value
        expected = "process_group: buffers of rank 1 differ from those of rank 0"
        assert any(message.startswith(expected) for message in messages) is not training, messages
        assert value.dtype == D and torch.equal(value, outcomes[0].value[1])  # on the rank without data, too


# --- errors end on all ranks ------------------------------------------------------------------------------------------


class Stumble(ValueError):
    """What a user's function raises."""


def stumbling(rank: int, culprit: int, later: bool) -> Any:
    """A rank's function fails, at once or at the third product."""
    calls = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(batch)
        if rank == culprit and len(calls) > (2 * len(data) if later else 0):
            raise Stumble("no such file")
        return sum_of_cross_entropy(model, batch)

    data = [batches(LABELS)[rank]]
    H = hodiff.HessianOperator(loss, network(), data=data, process_group=dist.group.WORLD, memory_budget=0)
    for _ in range(4):
        H @ draw(39)


def stumbling_again(rank: int, culprit: int) -> None:
    """One operator fails twice, and the second time as well all know of it."""

    def loss(model: nn.Module, batch: Any) -> Any:
        if rank == culprit:
            raise Stumble("no such file")
        return sum_of_cross_entropy(model, batch)

    data = [batches(LABELS)[rank]]
    H = hodiff.HessianOperator(loss, network(), data=data, process_group=dist.group.WORLD)
    with contextlib.suppress(Stumble, hodiff.GraphError):
        H @ draw(39)
    H @ draw(39)


def healthy(rank: int) -> None:
    """The group is as good as before."""
    build("Hessian", dist.group.WORLD) @ draw(39)


def short(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    H @ draw(39 if rank else 38)


def stale(rank: int) -> None:
    model = network()
    data = share(LABELS, dist.group.WORLD)
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD)
    H @ draw(39)
    if rank == 1:
        with torch.no_grad():
            model[0].bias += 1
    H @ draw(39)


def shuffled(rank: int) -> None:
    drawn = torch.Generator().manual_seed(0)

    class Loader:
        def __iter__(self) -> Any:
            yield from [(torch.randn(2, 3, dtype=D, generator=drawn), LABELS[:2])] if rank else batches(LABELS)

    data = Loader()
    H = hodiff.HessianOperator(
        sum_of_cross_entropy, network(), data=data, process_group=dist.group.WORLD, memory_budget=0
    )
    H @ draw(39)


def closed(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    H @ draw(39)
    if rank == 2:
        H.close()
    assert rank == 2 or H.value > 0  # known already: nobody is asked
    H @ draw(39)


def closed_before(rank: int) -> None:
    """A summand, which the others are about to evaluate while this rank is at the sum of both."""
    H, other = build("Hessian", dist.group.WORLD), build("Hessian", dist.group.WORLD)
    H @ draw(39)
    if rank == 1:
        other.close()
    (H + other) @ draw(39)


def looking_on(rank: int) -> None:
    def callback(record: Any) -> None:
        if rank == 1:
            raise Stumble("no such file")

    hodiff.solve(build("Hessian", dist.group.WORLD) + 200.0, draw(39), callback=callback)


FAILURES = {
    "first pass, 0": (stumbling, (0, False), [0], "Stumble: no such file"),
    "first pass, 1": (stumbling, (1, False), [1], "Stumble: no such file"),
    "a second time": (stumbling_again, (1,), [1], "Stumble: no such file"),
    "later, 0": (stumbling, (0, True), [0], "Stumble: no such file"),
    "later, 2": (stumbling, (2, True), [2], "Stumble: no such file"),
    "a vector of another size": (short, (), [0], "InputError: v has shape (38,)"),
    "changed parameters": (stale, (), [1], "GraphError: parameters have changed"),
    "data that differ": (shuffled, (), [1, 2], "GraphError: two passes over data disagree"),
    "closed": (closed, (), [2], "GraphError: the operator is closed"),
    "closed before": (closed_before, (), [1], "GraphError: the operator is closed"),
    "the callback of an estimator": (looking_on, (), [1], "Stumble: no such file"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_ends_on_all_ranks(three: Ranks, case: str) -> None:
    function, args, culprits, message = FAILURES[case]
    for rank, outcome in enumerate(three(function, *args)):
        assert outcome.seconds < TIMEOUT
        if rank in culprits:
            assert outcome.error.startswith(message), outcome
        else:
            named = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits}"
            assert outcome.error.startswith(f"GraphError: process_group: {named} failed"), outcome
            assert message in outcome.error, outcome
    assert not any(outcome.error for outcome in three(healthy))


def other_vector(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    v = torch.zeros(39, dtype=D)
    v[7 + (rank == 1)] = 1  # unit vectors: the same entries, elsewhere
    H @ v


def other_vectors(rank: int) -> None:
    build("Hessian", dist.group.WORLD) @ draw(39, 4)[:, [0, 1, 2, 3] if rank < 2 else [1, 0, 2, 3]]


def other_count(rank: int) -> None:
    build("Hessian", dist.group.WORLD) @ draw(39, 3 + (rank == 2))


def other_parameters(rank: int) -> None:
    model = network()
    if rank == 2:
        with torch.no_grad():
            model[3].weight[1, 2] += 1e-9
    data = share(LABELS, dist.group.WORLD)
    hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD).value.item()


def other_shapes(rank: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4 + rank), nn.Tanh(), nn.Linear(4 + rank, 3)).double()
    data = share(LABELS, dist.group.WORLD)
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD)
    for _ in range(2):  # and it is said again
        try:
            H @ draw(H.shape[1])
        except hodiff.InputError as error:
            found = error
    raise found


def other_chunks(rank: int) -> None:
    build("Hessian", dist.group.WORLD, chunk_size=2 + (rank == 1)) @ draw(39, 4)


def other_kind(rank: int) -> None:
    build("Hessian" if rank else "Gauss-Newton", dist.group.WORLD) @ draw(39)


def other_block(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    H.block("0.weight" if rank else "3.weight") @ draw(12)


def other_step(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    H @ draw(39)
    if rank == 0:
        H.refresh()
    H @ draw(39)


def other_dtype(rank: int) -> None:
    model = network().to(torch.float32 if rank == 1 else D)
    data = [(x.to(model[0].weight), y) for x, y in share(LABELS, dist.group.WORLD)]
    H = hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=dist.group.WORLD)
    H @ draw(39).to(H.dtype)


def other_order(rank: int) -> None:
    """Of two operators at one point: what their products add up to would look like one."""
    H, other = (build("Hessian", dist.group.WORLD) for _ in range(2))
    for A in (H, other):
        A @ draw(39)
    for A in (H, other) if rank else (other, H):
        A @ draw(39)


def other_order_at_first(rank: int) -> None:
    operators = [build("Hessian", dist.group.WORLD) for _ in range(2)]
    operators[rank == 2].value.item()


def other_rounding(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 + (rank == 1))
        H @ (draw(39) * (1 + 1e-15 * (rank == 1)))
    finally:
        torch.set_num_threads(threads)


DIFFERENCES = {
    other_vector: "process_group: rank 1 multiplies a different vector",
    other_vectors: "process_group: rank 2 multiplies a different vector",
    other_count: r"v: the ranks multiply different numbers of vectors: [3, 3, 4]",
    other_parameters: "process_group: the parameters of rank 2 differ",
    other_shapes: "process_group: the points of the ranks differ in names, shapes or dtypes (sizes [31, 38, 45])",
    other_chunks: "chunk_size differs between the ranks: [2, 3, 2]",
    other_kind: "process_group: the ranks use operators of different kinds",
    other_block: "process_group: the ranks are at different steps, operators or blocks",
    other_step: "process_group: the ranks are at different steps, operators or blocks (rank 0 evaluates, rank 1 mul",
    seeded_by_rank: "process_group: ranks [1, 2] multiply a different vector",
    seeded_on_one: "process_group: the ranks are at different steps, operators or blocks (rank 0 evaluates,",
    other_dtype: "process_group: the points of the ranks differ in names, shapes or dtypes (sizes [39, 39, 39]); rank ",
    other_order: "process_group: the ranks are at different steps, operators or blocks (rank 0 multiplies, rank 1 mul",
    other_order_at_first: "process_group: the ranks use different operators at the same time: numbers",
    other_rounding: "process_group: rank 1 multiplies a different vector from rank 0, so the sum would be meaningless. "
    "Draw it from generators with the same seed, or broadcast it; estimators draw the same vectors on all ranks, "
    "unless generator= differs. (Other numbers of threads round differently: torch.set_num_threads.)",
}


@pytest.mark.parametrize("function", DIFFERENCES, ids=lambda function: function.__name__)
def test_ranks_that_differ_are_found_on_all(three: Ranks, function: Any) -> None:
    for outcome in three(function):
        assert outcome.error.startswith(f"InputError: {DIFFERENCES[function]}"), outcome
        assert (function is other_dtype) <= ("0.bias (4,) float" in outcome.error), outcome
        assert outcome.seconds < TIMEOUT
    assert not any(outcome.error for outcome in three(healthy))


def bias_of_one_entry(rank: int) -> Tensor:
    model = nn.Linear(3, 1, dtype=D)
    with torch.no_grad():
        [parameter.fill_(0.5) for parameter in model.parameters()]
    data = [(X[rank::3].contiguous(), X[rank::3, :1])]
    H = hodiff.HessianOperator(lambda m, b: ((m(b[0]) - b[1]).pow(2).sum(), len(b[1])), model, data=data,
                               process_group=dist.group.WORLD)  # fmt: skip
    V = draw(4, 3)
    several = [
        H @ V,
        torch.stack([H @ column for column in V.T], 1),
        H @ V.T.contiguous().T,
        (H @ V[:, :1]).repeat(1, 3),
    ]
    return torch.stack(several)


def test_columns_at_a_leaf_of_one_entry(three: Ranks) -> None:
    for outcome in three(bias_of_one_entry):
        assert not outcome.error, outcome
        columns, one_by_one, rows, first = outcome.value
        assert torch.allclose(columns, one_by_one, rtol=1e-12)
        assert torch.equal(columns, rows)
        assert torch.allclose(first[:, 0], columns[:, 0], rtol=1e-12)


def other_thread(rank: int) -> tuple[list[Any], list[str]]:
    """Products in the thread of the group, in one beside it, and in one after it."""
    group = dist.new_group([0, 1, 2])
    H, v = build("Hessian", group), draw(39)
    again = build("Gauss-Newton", group)
    found: list[Any] = []
    refused: list[str] = []

    def multiply(H: Any) -> None:
        try:
            found.append(H @ v)
        except hodiff.GraphError as error:
            refused.append(str(error))

    def owner() -> None:
        multiply(H)
        in_threads(*[lambda operator=operator: multiply(operator) for operator in (H, again)])
        multiply(H)

    in_threads(owner)
    multiply(H)  # that thread has ended, and this one takes its place
    return found, refused


def test_several_threads_of_several_processes_are_refused(three: Ranks) -> None:
    expected = build("Hessian", None) @ draw(39)
    for outcome in three(other_thread):
        assert not outcome.error, outcome
        found, refused = outcome.value
        assert len(found) == 3
        assert all(torch.allclose(value, expected, rtol=1e-12) for value in found)
        assert len(refused) == 2
        assert all("is used in several threads, whose order may differ" in text for text in refused)
        assert "a group of its own: torch.distributed.new_group()" in refused[0]
        assert outcome.seconds < TIMEOUT


def in_eight_threads(rank: int, often: int) -> tuple[list[list[Any]], list[list[Any]]]:
    """Products of one operator over a group of two, then of operators on one model, each over a group of its own."""
    groups = [dist.new_group([0, 1]) for _ in range(9)]
    if rank == 2:
        return [], []
    model, V, interval = network(), draw(39, 8), sys.getswitchinterval()
    make = lambda group, **options: hodiff.HessianOperator(
        sum_of_cross_entropy, model, data=share(LABELS, group), process_group=group, **options
    )
    one, begun, end = make(groups[8]), threading.Event(), threading.Barrier(8)
    own = [make(group, memory_budget=0.5 * (number % 2)) for number, group in enumerate(groups[:8])]

    def multiply(number: int) -> Any:
        try:
            return one @ V[:, number]
        except hodiff.GraphError as error:
            return str(error)

    def of_one(number: int) -> list[Any]:
        assert number == 0 or begun.wait(TIMEOUT)
        found = [multiply(number)]
        begun.set()
        found += [multiply(number) for _ in range(often - 1)]
        end.wait(TIMEOUT)  # the first thread lives as long as the others use its group
        return found

    def of_its_own(number: int) -> list[Any]:
        H, seeded = own[number], torch.Generator().manual_seed(number)
        found = [H @ V[:, number] for _ in range(often)]
        H.refresh()
        return [*found, hodiff.eigsh(H, 2, generator=seeded).value if often > 3 else None]

    sys.setswitchinterval(1e-4)
    try:
        first, second = ([functools.partial(task, number) for number in range(8)] for task in (of_one, of_its_own))
        return in_threads(*first), in_threads(*second)
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("often", [3, pytest.param(125, marks=pytest.mark.nightly)])
def test_eight_threads_of_two_processes_are_right_or_refused(three: Ranks, often: int) -> None:
    H, V = build("Hessian", None), draw(39, 8)
    expected, largest = H @ V, torch.linalg.eigvalsh(H.dense())[-2:].flip(0)
    for outcome in three(in_eight_threads, often)[:2]:
        assert not outcome.error, outcome
        (allowed, *refused), own = outcome.value
        assert all(torch.allclose(value, expected[:, 0], rtol=1e-12) for value in allowed)
        assert all("is used in several threads, whose order" in text for found in refused for text in found)
        for number, (*products, values) in enumerate(own):
            assert all(torch.allclose(value, expected[:, number], rtol=1e-12) for value in products)
            assert len(products) == often and (often == 3 or torch.allclose(values, largest, rtol=1e-9))


# --- the group itself fails -------------------------------------------------------------------------------------------


def dying(rank: int) -> None:
    H = build("Hessian", dist.group.WORLD)
    H @ draw(39)
    if rank == 1:
        os._exit(3)
    H @ draw(39)


def absent(rank: int) -> None:
    """In a group of its own, which waits a second; the other one is as good as before."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    if rank == 0:
        build("Hessian", group) @ draw(39)


MISSED = "GraphError: process_group: rank 0 could not exchange sums with the others"


def test_a_rank_that_is_dead() -> None:
    two = Ranks(2, __name__)
    alive, dead = two(dying)
    two.close()
    assert alive.error.startswith(MISSED), alive
    assert alive.seconds < TIMEOUT  # noticed at once, not when the group gives up
    assert dead.error == "exit code 3"


def test_a_rank_that_never_calls(three: Ranks) -> None:
    waiting, *others = three(absent)
    assert waiting.error.startswith(MISSED), waiting
    assert 1 <= waiting.seconds < TIMEOUT
    assert not any(outcome.error for outcome in [*others, *three(healthy)])


# --- arguments --------------------------------------------------------------------------------------------------------


def refusals(rank: int) -> list[str]:
    group, found = dist.group.WORLD, []
    model = nn.parallel.DistributedDataParallel(network())
    data = share(LABELS, group)

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for build_one in (
        lambda: hodiff.HessianOperator(sum_of_cross_entropy, model, data=data, process_group=group),
        lambda: hodiff.HessianOperator(sum_of_cross_entropy, nn.Sequential(model), data=data, process_group=group),
        lambda: hodiff.HessianOperator(lambda m: m(X).sum(), network(), process_group=group),
        lambda: hodiff.HessianOperator(sum_of_cross_entropy, network(), data=data, process_group=True),
        lambda: hodiff.HessianOperator(mean, network(), data=batches(LABELS)[:1], process_group=group).value,
        lambda: hodiff.HessianOperator(sum_of_cross_entropy, network(), data=[], process_group=group).value,
    ):
        try:
            build_one()
            found.append("")
        except hodiff.HodiffError as error:
            found.append(str(error))
    weighed = hodiff.HessianOperator(
        mean, network(), data=share(LABELS, group), process_group=group, batch_weight=lambda batch: len(batch[1])
    )
    return [*found, float(weighed.value)]


def test_what_cannot_be_shared_is_refused(three: Ranks) -> None:
    whole = hodiff.HessianOperator(sum_of_cross_entropy, network(), data=batches(LABELS))
    for outcome in three(refusals):
        assert not outcome.error, outcome
        wrapped, inside, dataless, no_group, bare, nothing, weighed = outcome.value
        assert wrapped.startswith("x is wrapped in DistributedDataParallel") and "pass model.module" in wrapped
        assert "DistributedDataParallel" in inside
        assert dataless.startswith("process_group: there are no data to share among processes")
        assert no_group.startswith("process_group: got a bool, expected a group that this process belongs to")
        assert bare.startswith("f returned one value, but there are several batches (or processes)")
        assert nothing.startswith("the weights of all batches add up to 0.0")
        assert abs(weighed - float(whole.value)) < 1e-13


def test_a_group_of_one_process_is_none() -> None:
    """A script that runs without torchrun: what a group refuses is there, and no rank is named."""
    with group_of_one() as group:
        H = hodiff.HessianOperator(sum_of_cross_entropy, network(), data=batches(LABELS), process_group=group)
        v = draw(39, seed=1).requires_grad_()
        value = hodiff.trace(H, vectors=v, create_graph=True).value  # v'H v
        (found,) = torch.autograd.grad(value, v)
        torch.testing.assert_close(found, 2 * (H @ v.detach()), rtol=1e-10, atol=1e-12)


# --- the checksum -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_sees_values_places_and_leaves(dtype: torch.dtype) -> None:
    digest = Digest(torch.device("cpu"))
    parts = [draw(5, 3).to(dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    mine = digest(parts)
    assert digest([part.clone() for part in parts]) == mine == Digest(torch.device("cpu"))(parts)
    assert digest([parts[0].T.contiguous().T, *parts[1:]]) == mine
    for change in (lambda p: p.flip(0), lambda p: p.flip(1), lambda p: p * 2, lambda p: -p):
        assert digest([change(parts[0]), *parts[1:]]) != mine
    many = [torch.stack([part, 2 * part]) for part in parts]
    assert digest(many, 2) != digest([part.flip(0) for part in many], 2)
    units = torch.eye(600, dtype=dtype)
    assert len({digest([row]) for row in units}) == 600
    grown = digest.__class__(torch.device("cpu"))
    grown([torch.zeros(10000, dtype=dtype)])
    assert grown(parts) == mine  # whatever came before


# --- sharded parameters -----------------------------------------------------------------------------------------------


def sharded(rank: int) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, found = init_device_mesh("cpu", (3,)), []
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    fully_shard(model, mesh=mesh)
    entire = model(X).detach()
    for call in (
        lambda: hodiff.hessian(lambda m: m(X).sum(), model),
        lambda: hodiff.vjp(lambda p: p["2.bias"], hodiff.select(model, "2.bias"), X[0]),
        lambda: hodiff.FisherOperator(predict, nn.CrossEntropyLoss(), model, data=batches(LABELS), kind="mc"),
        lambda: hodiff.hvp(lambda x: model(x).sin().sum(), X, X),
        lambda: hodiff.laplacian(lambda x: model(x).sum(-1), X),
    ):
        try:
            call()
            found.append("")
        except hodiff.InputError as error:
            found.append(str(error))
    assert torch.equal(model(X), entire)  # today's next forward would fail
    with torch.no_grad():
        first = hodiff.grad(lambda x: model(x).sum(), X)
    assert first.shape == X.shape
    return found


def test_sharded_parameters_are_refused_elsewhere_with_the_way_out(three: Ranks) -> None:
    for outcome in three(sharded):
        assert not outcome.error, outcome
        for message in outcome.value:
            assert "is sharded (fully_shard)" in message and "p.full_tensor()" in message, outcome.value


# --- forks --------------------------------------------------------------------------------------------------------


def forked(rank: int, times: int) -> list[Any]:
    """How children end that were forked while another thread was inside a call on the module that they use."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to(D)
    v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    inside, go = threading.Event(), threading.Event()

    def plain(model: nn.Module) -> Tensor:
        return model(X).square().mean()

    def slow(model: nn.Module) -> Tensor:
        loss = plain(model)
        inside.set()
        go.wait(TIMEOUT)
        return loss

    kept = {**model.state_dict(keep_vars=True)}
    values = {name: tensor.detach().clone() for name, tensor in kept.items()}
    expected = hodiff.hvp(plain, model, v)

    def child() -> int:
        now = model.state_dict(keep_vars=True)
        own = all(now[name] is kept[name] and torch.equal(now[name], values[name]) for name in kept)
        still = torch.is_grad_enabled() and torch.backends.cuda.flash_sdp_enabled()
        hooks = len(nn.modules.module._global_forward_pre_hooks)
        found = hodiff.hvp(plain, model, v)
        right = all(torch.allclose(found[name], expected[name], rtol=1e-12) for name in v)
        return 0 if own and still and not hooks and right else 1

    ends = []
    for number in range(times):
        inside.clear(), go.clear()
        H = hodiff.HessianOperator(slow, model)
        calls = [lambda: hodiff.hvp(slow, model, v), lambda H=H: H @ v, lambda H=H: H.gradient]
        thread = threading.Thread(target=calls[number % 3], daemon=True)
        thread.start()
        inside.wait(TIMEOUT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any fork beside threads
            pid = os.fork()
        if not pid:
            end = 2
            try:
                end = child()
            finally:
                os._exit(end)
        ends += [_end_of(pid)]
        go.set()
        thread.join(TIMEOUT)
        ends += ["the thread hangs"] * thread.is_alive()
    return ends


def _end_of(pid: int) -> Any:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "hangs"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_while_a_thread_is_inside_a_call(three: Ranks) -> None:
    for outcome in three(forked, 4):
        assert not outcome.error, outcome
        assert outcome.value == [0] * 4


def forked_inside(rank: int) -> list[Any]:
    """A fork in the midst of `f`, by the thread itself: parent and child both go on with it."""
    pids: list[int] = []

    def f(x: Tensor) -> Tensor:
        if not pids:
            pids.append(os.fork())
        return x.pow(3).sum()

    x, right = torch.ones(3, dtype=D), False
    try:
        right = torch.equal(hodiff.hvp(f, x, x), 6 * x) and torch.equal(hodiff.hvp(f, x, x), 6 * x)
    finally:
        if pids == [0]:
            os._exit(0 if right and torch.backends.cuda.flash_sdp_enabled() else 1)
    return [right, _end_of(pids[0])]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_inside_a_function(three: Ranks) -> None:
    for outcome in three(forked_inside):
        assert not outcome.error, outcome
        assert outcome.value == [True, 0]
