"""Hessian-vector products against double backward by hand, and against `torch.func`."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import hodiff
from benchmarks.models import Problem, networks, tiny
from benchmarks.table import Row
from benchmarks.timing import Times, best, differences, race, ratios, spread

RATIO = 1.05
PER_ENTRY = 8e-6
TINY = 60e-6
AGAINST_TORCH_FUNC = 0.75

BY_HAND = ["by hand, grad_outputs", "by hand, inner product"]


def rows(quick: bool) -> Iterator[Row]:
    rounds = 5 if quick else 15
    # which hodiff chooses by itself; without it the others raise
    with sdpa_kernel(SDPBackend.MATH):
        for problem in networks():
            times = race(module_contenders(problem), rounds=rounds)
            yield against_hand("x = module", problem, times, problem.entries())
            yield against_torch_func(problem, times)
        for problem in networks():
            times = race(input_contenders(problem), rounds=rounds)
            yield against_hand("x = inputs", problem, times, 1 + len(list(problem.model.buffers())))
    yield against_hand_tiny(race(tiny_contenders(), rounds=rounds))


def against_hand(kind: str, problem: Problem, times: Times, entries: int) -> Row:
    reference = best(times, BY_HAND)
    allowance = PER_ENTRY * entries
    corrected = [
        (ours - allowance) / theirs
        for ours, theirs in zip(times["hodiff"], times[reference], strict=True)
    ]
    base = statistics.median(times[reference])
    raw = statistics.median(ratios(times, "hodiff", reference))
    gradients = statistics.median(times["gradient"])
    measured = (
        f"{spread(corrected)} without {allowance * 1e6:.0f} us for {entries} entries; "
        f"{raw:.2f} with; {statistics.median(times['hodiff']) * 1e3:.2f} ms, "
        f"by hand {base * 1e3:.2f}, gradient {gradients * 1e3:.2f}"
    )
    return Row(
        f"hvp / best by hand, {kind}",
        problem.name,
        measured,
        f"{RATIO}",
        statistics.median(corrected) <= RATIO,
        times,
    )


def against_torch_func(problem: Problem, times: Times) -> Row:
    found = ratios(times, "hodiff", "jvp(grad)")
    met = statistics.median(found) <= AGAINST_TORCH_FUNC
    return Row(
        "hvp / torch.func jvp(grad)", problem.name, spread(found), f"{AGAINST_TORCH_FUNC}", met
    )


def against_hand_tiny(times: Times) -> Row:
    found = [difference * 1e6 for difference in differences(times, "hodiff", best(times, BY_HAND))]
    met = statistics.median(found) <= TINY * 1e6
    return Row(
        "hvp - best by hand",
        "10-variable tanh",
        f"{spread(found, 0)} us",
        f"{TINY * 1e6:.0f} us",
        met,
    )


def module_contenders(problem: Problem) -> dict[str, Callable[[], object]]:
    model, loss = problem.model, problem.loss
    named = dict(model.named_parameters())
    leaves = list(named.values())
    vector = {name: torch.randn_like(parameter) for name, parameter in named.items()}
    detached = {name: parameter.detach() for name, parameter in named.items()}

    def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
        # Fresh buffers: BatchNorm may not write into captured ones under a transform.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return loss(lambda inputs: functional_call(model, {**parameters, **buffers}, (inputs,)))

    vectors = list(vector.values())
    return {
        "hodiff": lambda: hodiff.hvp(loss, model, vector),
        **by_hand(lambda: loss(model), leaves, vectors),
        "jvp(grad)": lambda: jvp(grad(of_parameters), (detached,), (vector,)),
    }


def input_contenders(problem: Problem) -> dict[str, Callable[[], object]]:
    x, v = problem.inputs, torch.randn_like(problem.inputs)
    leaf = x.clone().requires_grad_()
    return {
        "hodiff": lambda: hodiff.hvp(problem.of_inputs, x, v),
        **by_hand(lambda: problem.of_inputs(leaf), [leaf], [v]),
    }


def tiny_contenders() -> dict[str, Callable[[], object]]:
    x, v = torch.randn(10), torch.randn(10)
    leaf = x.clone().requires_grad_()
    return {"hodiff": lambda: hodiff.hvp(tiny, x, v), **by_hand(lambda: tiny(leaf), [leaf], [v])}


def by_hand(
    value: Callable[[], Tensor], leaves: list[Tensor], vectors: list[Tensor]
) -> dict[str, Callable[[], object]]:
    """Double backward as people write it, and one gradient for scale."""

    def with_grad_outputs() -> object:
        first = torch.autograd.grad(value(), leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, vectors)

    def with_inner_product() -> object:
        first = torch.autograd.grad(value(), leaves, create_graph=True)
        return torch.autograd.grad(
            sum((a * b).sum() for a, b in zip(first, vectors, strict=True)), leaves
        )

    return {
        BY_HAND[0]: with_grad_outputs,
        BY_HAND[1]: with_inner_product,
        "gradient": lambda: torch.autograd.grad(value(), leaves),
    }
