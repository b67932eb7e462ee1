"""`unroll`: parameters after some steps of an optimiser, differentiable through all of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from hodiff._core import _checks, _nodes, _tree
from hodiff._core._graph import memory_of
from hodiff._core._options import is_set
from hodiff._core._where import Selection, Where
from hodiff.errors import InputError
from hodiff.implicit._segments import run_segment
from hodiff.implicit._steps import Steps, Update
from hodiff.rules._described import rules_of
from hodiff.rules._rule import Rule, kept, stepped, taken

V = TypeVar("V")
ByName = dict[str, Tensor]
AnyRule = Rule | torch.optim.Optimizer | Callable[[Any, Any, Any, int], tuple[Any, Any]]
"""A rule of `hodiff.rules`, a function with its signature, or a `torch.optim` optimiser as its description."""
Inner = Callable[..., Any]
Count = int | Iterable[Any]
Segments = int | Literal["auto"] | None


class Options(TypedDict, total=False):
    """What overloads pass on; at run time signatures are spelled out."""

    segments: Segments
    last: int | None
    first_order: bool
    state: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None


@overload
def unroll(
    f: Inner,
    where: nn.Module | Selection,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[Options],
) -> ByName: ...


@overload
def unroll(
    f: Inner,
    where: nn.Module | Selection,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[True],
    **options: Unpack[Options],
) -> tuple[ByName, Any]: ...


@overload
def unroll(
    f: Inner,
    where: V,
    rule: AnyRule,
    steps: Count,
    *,
    return_state: Literal[False] = False,
    **options: Unpack[Options],
) -> V: ...


@overload
def unroll(
    f: Inner, where: V, rule: AnyRule, steps: Count, *, return_state: Literal[True], **options: Unpack[Options]
) -> tuple[V, Any]: ...


def unroll(
    f: Inner,
    where: Any,
    rule: AnyRule,
    steps: Count,
    *,
    segments: Segments = None,
    last: int | None = None,
    first_order: bool = False,
    state: Any = None,
    return_state: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    r"""The parameters after *k* steps of an optimiser, as a function of all that went into them.

    \(p_t = u(p_{t-1}, \nabla f(p_{t-1}), s_{t-1})\) with the rule *u* and its state *s*. Derivatives flow to
    the start, to hyperparameters that are tensors, and to whatever `f` depends on besides: data, weights of
    samples, another network.

    Args:
        f: The inner loss: `f(where)` returns one element; with batches, `f(where, batch)`.
        where: The parameters at the start: a tensor, a container of tensors, a module (`f` receives the module,
            with the parameters of the step), or `hodiff.select(module, ...)`. They are left as they are.
        rule: One of `hodiff.rules`; a function `(params, grads, state, step) -> (params, state)`, where
            *params* are like the result and the first *state* is None; or a `torch.optim` optimiser, whose
            class and options are read, and nothing else of it: neither state nor parameters. A rule leaves a parameter
            that `f` does not reach in a step as it is, as `torch.optim` does; a function is given zeros for it.
        steps: How many; or the batches, one for each step.
        segments: None keeps the graphs of all steps. A number of segments, or `"auto"` (\(\lceil\sqrt{k}\,\rceil\)),
            keeps the parameters at the start of each, and runs its steps again in the backward pass, with the
            same random numbers: first derivatives only.
        last: Differentiate through so many last steps; what came before counts as a constant, the start
            included. That is another quantity: measured on a small network, it was off by 63-99 %.
        first_order: Take each step's gradient as a constant (first-order MAML).
        state: Where to go on from: what an earlier call returned with `return_state=True`. It fits the same rule and
            parameters of the same names, whose order in a dict is free. A function's state is its own.
        return_state: Whether to return the optimiser's state as well.
        args: Further positional arguments for `f`, after the batch.
        kwargs: Keyword arguments for `f`.

    Returns:
        The parameters after the last step, in the structure and shapes of *where* (a dict by parameter name for
        a module: give it to `torch.func.functional_call`); with `return_state=True`, `(parameters, state)`.
        Under `no_grad` they are detached, and no graph is kept.

    Raises:
        InputError: A rule, a number of steps or a state that does not fit; or as for `hodiff.grad`.
        GraphError: `f` does not use its argument; a second derivative through `segments`; or as for `hodiff.grad`.

    Cost:
        An evaluation of `f`, a reverse pass and the rule in each step; the pass through it all takes about
        two more of each. Memory: the graphs of all steps; with `segments="auto"`, those of \(\sqrt{k}\) steps
        and as many copies of parameters and state, for one more evaluation of each step.
        Buffers of modules (batch normalisation) are left as they are, and each step begins from them.

    Examples:
        Two steps on \(2 p^2\) from 1 lead to \((1 - 4 \eta)^2\), whose derivative is \(-8(1 - 4 \eta)\):

        >>> import torch, hodiff
        >>> lr = torch.tensor(0.1, requires_grad=True)
        >>> p = hodiff.unroll(lambda p: (2.0 * p**2).sum(), torch.ones(1), hodiff.rules.SGD(lr=lr), 2)
        >>> p.detach(), torch.autograd.grad(p.sum(), lr)[0]
        (tensor([0.3600]), tensor(-4.8000))

    Reference:
        Maclaurin, D., Duvenaud, D., Adams, R. P. (2015). Gradient-based hyperparameter optimization through
        reversible learning. ICML. arXiv:1502.03492.
        Finn, C., Abbeel, P., Levine, S. (2017). Model-agnostic meta-learning. ICML. arXiv:1703.03400.
    """
    return_state, first_order = is_set(return_state, "return_state"), is_set(first_order, "first_order")
    parsed = Where(where, "where")
    if not callable(f) or isinstance(f, Tensor):
        raise InputError(f"f: is a {type(f).__name__}; expected a function of the parameters, evaluated at each step.")
    batches = _batches(steps)
    rules = _rules(rule, parsed)
    inner = Steps(f, parsed, _update(rule, rules, parsed), args, kwargs, first_order=first_order)
    now = inner.resume(state)
    if rules:
        now = now._replace(state=taken(now.state, rules, parsed.tree(), parsed.tensors))
    if torch.is_grad_enabled():
        cut = 0 if last is None else max(0, len(batches) - _checks.check_integer(last, "last", least=1))
        if cut:
            now = inner.run(now, batches[:cut], record=False)
        for some in _split(batches[cut:], segments):
            now = inner.run(now, some, record=True) if segments is None else run_segment(inner, now, some)
        _nodes.mark_results(now.params)
    else:
        now = inner.run(now, batches, record=False)
    result = parsed.result(_apart(now.params, parsed.tensors))
    if not return_state:
        return result
    return result, (now.step, kept(now.state, rules, parsed.tree()) if rules else now.state)


def _batches(steps: Any) -> list[Any]:
    """What each step is given beside the parameters: nothing, or a batch."""
    if isinstance(steps, int):
        return [()] * _checks.check_integer(steps, "steps", least=1)
    if isinstance(steps, Tensor) or not isinstance(steps, Iterable):
        raise InputError(
            f"steps: is a {type(steps).__name__}; expected how many, or an iterable with a batch for each step."
        )
    batches = [(batch,) for batch in steps]
    if not batches:
        raise InputError("steps: is empty; give a batch for each step.")
    return batches


def _split(batches: list[Any], segments: Any) -> list[list[Any]]:
    """The steps of each segment; all of them, where there are no segments."""
    if segments is None:
        return [batches]
    if isinstance(segments, str) and segments == "auto":
        segments = math.ceil(math.sqrt(len(batches)))
    elif isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise InputError(f'segments: got {segments!r}, expected None, "auto", or a number of segments.')
    size = -(-len(batches) // segments)
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def _rules(rule: Any, where: Where) -> list[Rule]:
    """The rule of `hodiff.rules` for each leaf; none, where it is a function of the caller's."""
    if isinstance(rule, torch.optim.Optimizer):
        return rules_of(rule, where.tensors)
    return rule._by_leaf(where.tree(), len(where.tensors)) if isinstance(rule, Rule) else []


def _update(rule: Any, rules: list[Rule], where: Where) -> Update:
    """A rule on lists of leaves; what is fixed for all steps is looked at once."""
    if rules:
        return functools.partial(stepped, rules)
    if not callable(rule) or isinstance(rule, (type, nn.Module)):
        what = f"the class {rule.__name__}, not an instance" if isinstance(rule, type) else f"a {type(rule).__name__}"
        raise InputError(
            f"rule: is {what}; expected a rule such as hodiff.rules.SGD(lr=0.1), a torch.optim optimiser as its "
            f"description, or a function (params, grads, state, step) -> (params, state)."
        )
    tree, given = where.tree(), rule

    def update(params: list[Tensor], grads: list[Tensor | None], state: Any, step: int) -> tuple[list[Tensor], Any]:
        whole = [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
        found = given(where.result(params), where.result(whole), state, step)
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(f"rule: returned a {type(found).__name__}; expected (params, state).")
        different = _tree.difference(tree, _tree.flatten(found[0])[2], "params")
        if different:
            raise InputError(f"rule: the parameters that it returned are not like where: {different}.")
        return _tree.leaves_like(tree, found[0]), found[1]

    return update


def _apart(params: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    """The parameters, copied where a rule gave back what it was given, so that they share no memory with the user's."""
    taken = {memory_of(tensor) for tensor in theirs}
    return [p.clone() if memory_of(p) in taken else p for p in params]
