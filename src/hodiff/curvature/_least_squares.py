"""`LevenbergMarquardt`: training on residuals, by their Jacobian in sample or parameter space."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _locks, _reverse, _settings, _versions
from hodiff._core._call import call, refuse_stand_ins
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph
from hodiff._core._vectors import generic
from hodiff._core._where import Where
from hodiff.calculus._factors import Outer, Stack
from hodiff.calculus._first import tall_jacobian
from hodiff.calculus._per_sample import Samples, check_not_crossed, in_factors, in_rows
from hodiff.curvature import _data, _memory, _probes
from hodiff.curvature._process_group import is_wrapped
from hodiff.curvature._records import LeastSquaresRecord
from hodiff.errors import HodiffWarning, InputError

ROUNDING = 1e-12
"""Decreases below this part of the loss are rounding: a step is then judged by its length."""
DEVIATIONS = 4
"""How many standard deviations of the loss, by rounding of the residuals, are rounding."""
SHORTER = 0.9
"""Steps below rounding go on while each is shorter than the last by this factor."""
SUFFICIENT, POOR, GOOD = 1e-4, 0.25, 0.75
"""What part of the promised decrease a step must keep to be taken; for the radius to stay;
for it to grow.
"""
CUT = 0.25
"""Of a poor step, the part that is the next radius."""
SHORT = 0.1
"""The length of the trial that shows the residuals' second order, beside the first length."""
BENT = 0.25
"""The most that a path turns aside, as a part of its length:
what is known of second order holds no further.
"""
LOWER_FROM, RAISE_BELOW = 0.25, 0.125
"""The lengths of steps from which the damping falls, and below which it grows."""
FALL, GROWTH, AFTER_FAILURE = 0.1, 4.0, 100.0
FREER = 100.0
"""How many times less damping is tried before a minimum is said to be reached."""
FIRST = 1e-3
"""The first damping."""
LEAST, MOST = 1e-13, 1e8
"""The bounds of the search's damping."""
SMALL = 2**20
"""Bytes of a Jacobian that are kept without asking the system how much is free."""
NONE = 1e-30
"""Less damping than this holds no parameter back."""
SOLVED = 1e-6
"""The residual up to which equations are solved: where rows of J depend on each other, and damping
is next to nothing, the step is rounding.
"""


_State = dict[str, Any]
"""What a step leaves to the next: damping, scale, radius, the columns' largest norms,
the last length and norm.
"""


class _Group(dict[str, Any]):
    """Options and parameters. What else is asked for is what schedules a learning rate."""

    def __missing__(self, key: str) -> Any:
        raise InputError(
            f"{key}: this optimizer has no learning rate to schedule; it chooses the length of "
            "each step itself."
        )


class LevenbergMarquardt(torch.optim.Optimizer):
    r"""Levenberg's and Marquardt's method: nonlinear least squares, as an optimizer on residuals.

    The loss is **half the sum of the squares** of all that the functions return,
    \(\tfrac12 \lVert r(\theta) \rVert^2\). For a mean divide by the root of the number of samples,
    `/ len(x) ** 0.5`. With the Jacobian \(J\) of \(r\) a step is
    \(d = -(J^\top J + \lambda I)^{-1} J^\top r\), computed as
    \(-J^\top (J J^\top + \lambda I)^{-1} r\) where there are no more residuals than parameters: in
    float64, by Cholesky and one refinement, whatever the parameters' dtype is. Then \(J\) is not
    formed: the matrix follows from the layers' inputs and derivatives, as by `hodiff.gram`.

    Two rules choose \(\lambda\) and the length of the step. By **search**, the length is halved
    until the loss falls, along a path that bends as the residuals do: a short trial shows what they
    are of second order, and one more solve with the same matrix undoes it. \(\lambda\) follows the
    lengths, and becomes tiny. That trains networks on differential equations. By the **gain
    ratio**, \(\lambda\) is that of a step as long as a radius, which follows what came true of the
    promised decrease (Moré's rule). A step that keeps less than three quarters of it is tried bent
    as well, by what the residuals were beside their linear model. Without a batch, and with no more
    parameters than residuals, each parameter is measured in the unit of its column:
    \(\lambda I\) is \(\lambda\) times the diagonal of the largest squared norms so far. That
    fits curves: close to the minimum it goes on below the rounding of the loss, to the last digits
    of the parameters.

    No step raises the loss of its batch (but by rounding): one that would is **refused**, and the
    parameters and the state of the random numbers are as they were. No `.grad` is written, and
    buffers (BatchNorm statistics) do not change.

    Args:
        residuals: A function of *where* and a batch that returns residuals `(N,)`, or several for
            each sample, `(N, K)`. Or a list of such functions: the equation, its boundary, data.
            Without a batch, a function of *where* alone that returns residuals of any shape.
        where: Where, as for `grad`: usually a module, whose frozen parameters stay; or tensors,
            which are changed in place.
        damping: The first \(\lambda\), as a part of the largest squared norm of a column of the
            first \(J\) (of each column's own, where parameters are measured so). None: 1e-3 by
            search; by the gain ratio that of a step as long as the parameters are.
        momentum: How much of the last step is added before the linear model is solved (SPRING). It
            may help where each step has other points.
        search: The rule, see above. None: by search where a function has a batch, by the gain ratio
            where none has.
        min_damping: What \(\lambda\) does not fall below, a part as `damping` is; None: 1e-13 by
            search, 0 by the gain ratio. Small noisy batches need a larger one.
        tries: How often a step may be shortened, or solved again with more damping, before it is
            refused.
        memory_budget: What the matrices of a step may take: bytes (an int), or a fraction of the
            memory that is free. With more residuals than parameters, a \(J\) beyond it stays
            in factors, and \(J^\top J\) is summed some samples at a time.

    Attributes:
        last: What the last step did, a record: `value` (the loss before), `decrease`, `ratio`,
            `damping` (that of the step, in the unit of `damping`), `length` (the part of the full
            step), `accepted`, `converged`, `gradient`, `residual`, `evaluations`, `space`. None
            before the first. Of a fit it has `covariance()`, `standard_errors()` and `leverages()`,
            until the next step.

    Raises:
        InputError: Residuals or their derivatives that are not finite at the parameters as they
            are; residuals `(N, N)` of samples crossed with samples, by broadcasting `(N, 1)` with
            `(N,)`; another number of batches than functions; a closure in the manner of
            `torch.optim`; more residuals and parameters than `memory_budget` has room for.
        GraphError: As for `grad`.

    Cost:
        A step: an evaluation, a pass for each of the K residuals of a sample, batched, and one that
        proves that samples are apart; a product of \(J\) with itself, a Cholesky decomposition,
        and an evaluation for each trial. Layers that `hodiff.gram` does not name take rows, as by
        `per_sample_grad`. Without a batch, \(J\) as by `jacobian`. Memory: three matrices of the
        shorter side of \(J\), and what `hodiff.gram` takes; with more residuals than parameters,
        \(J\) in float64 as well.

    Examples:
        A curve is fitted; the loss is half the sum of the squares:

        >>> import torch, hodiff
        >>> t = torch.linspace(0, 1, 8, dtype=torch.float64)
        >>> y = 3 * torch.exp(-2 * t)
        >>> b = torch.tensor([1.0, 1.0], dtype=torch.float64)
        >>> optimizer = hodiff.LevenbergMarquardt(lambda b: b[0] * torch.exp(-b[1] * t) - y, b)
        >>> for _ in range(10):
        ...     loss = optimizer.step()
        >>> b
        tensor([3., 2.], dtype=torch.float64)
        >>> bool((optimizer.last.standard_errors() < 1e-12).all())  # there is no noise
        True

        An equation and its boundary, one batch for each; both are means:

        >>> _ = torch.manual_seed(0)
        >>> layers = torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        >>> model = torch.nn.Sequential(*layers).double()
        >>> inside = lambda model, x: (hodiff.laplacian(lambda x: model(x)[:, 0], x) + 1) / 32**0.5
        >>> edge = lambda model, x: model(x)[:, 0] / 2**0.5
        >>> optimizer = hodiff.LevenbergMarquardt([inside, edge], model)
        >>> x = torch.linspace(0, 1, 32, dtype=torch.float64).reshape(-1, 1)
        >>> losses = [optimizer.step(x, x[[0, -1]]) for _ in range(30)]
        >>> bool(losses[-1] < 1e-4 * losses[0])
        True

    Reference:
        Moré, J. J. (1978). The Levenberg-Marquardt algorithm. doi:10.1007/BFb0067700. Müller, J.,
        Zeinhofer, M. (2023). arXiv:2302.13163. Guzmán-Cordero, A. et al. (2025). arXiv:2505.12149
        (sample space, SPRING). Transtrum, M. K., Sethna, J. P. (2012). arXiv:1201.5885 (the bend,
        "geodesic acceleration").
    """

    # What a copy, or a pickle, has: PyTorch's own optimizers keep all their options in the groups.
    _own = (
        *("_functions", "_where", "_damping", "_momentum", "_least"),
        *("_search", "_tries", "_budget", "_unread", "last"),
    )
    _alone: Sequence[bool] = ()
    """For which functions it is known that they take *where* alone, or a batch beside it."""

    def __init__(
        self,
        residuals: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
        where: Any,
        *,
        damping: float | None = None,
        momentum: float = 0.0,
        search: bool | None = None,
        min_damping: float | None = None,
        tries: int = 14,
        memory_budget: float = 0.5,
    ) -> None:
        several = isinstance(residuals, (list, tuple))
        self._functions: list[Callable[..., Any]] = [*residuals] if several else [residuals]  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        good = [callable(f) and not isinstance(f, Tensor) for f in self._functions]
        if not good or not all(good):
            raise InputError(
                "residuals: expected a function of where and a batch, or a list of such functions."
            )
        _probes.check_positive(FIRST if damping is None else damping, "damping")
        _arguments.check_number(0 if min_damping is None else min_damping, "min_damping", least=0)
        _arguments.check_number(momentum, "momentum", least=0, below=1.0)
        self._damping, self._momentum = damping, float(momentum)
        self._least = min_damping
        self._search = search if search is None else _arguments.is_set(search, "search")
        self._tries = _arguments.check_integer(tries, "tries", least=1)
        _memory.check_budget(memory_budget)
        self._budget = memory_budget
        self._where, self._unread = where, set[int]()
        self.last: LeastSquaresRecord | None = None
        point = call(lambda where: None, Where(where, "where"), 1, False).where
        if is_wrapped(point):
            raise InputError(
                "where: the model is wrapped in DistributedDataParallel. "
                "A step is one of this rank's residuals alone, so the ranks' parameters would "
                "drift apart. Give each rank all residuals, and model.module."
            )
        if any(tensor._is_zerotensor() for tensor in point.tensors):
            raise InputError(
                "where is an efficient zero tensor, which has no memory to change; "
                "give its .clone()."
            )
        try:
            super().__init__(point.tensors, {})
        except (TypeError, ValueError, RuntimeError) as error:
            if not is_fault(error):
                raise
            raise InputError(f"where: {error}; expected leaves, which the steps change.") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: *where* is one point."""
        if self.param_groups:
            raise InputError(
                "param_group: LevenbergMarquardt has one group, its where; make another optimizer."
            )
        super().add_param_group(_Group(param_group))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = [*map(_Group, self.param_groups)]

    def step(self, *batches: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step, or refuse it (see `last`).

        Args:
            *batches: One for each function of residuals: a tensor, or a container of them, with
                the samples in the leading dimension. None for a function of *where* alone; nothing
                at all where each is.

        Returns:
            The loss before the step, half the sum of the squares.
        """
        batches = batches or (None,) * len(self._functions)
        if any(callable(batch) and not isinstance(batch, Tensor) for batch in batches):
            raise InputError(
                "step: got a closure. LevenbergMarquardt needs the residuals themselves, "
                "not the sum of their squares: give LevenbergMarquardt(residuals, "
                "model) a function that returns them, and step(batch) its batch; "
                "nothing calls backward()."
            )
        if len(batches) != len(self._functions):
            raise InputError(
                f"step: got {len(batches)} batch{'es' * (len(batches) != 1)}, "
                f"expected {len(self._functions)}: one for each function of residuals (a batch of "
                "several tensors as a tuple), or None."
            )
        self._check_signatures([batch is None for batch in batches])
        refuse_stand_ins()
        with _locks.ThreadClaim(self):  # of several threads one steps
            return self._stepped(batches)

    def _check_signatures(self, alone: list[bool]) -> None:
        """Raise where a function does not take what it is given; looked at once,
        not in each step.
        """
        if alone == self._alone:
            return
        for number, (function, without) in enumerate(zip(self._functions, alone, strict=True)):
            names, given = (
                (("where",), "in step()") if without else (("where", "batch"), "in step(batch)")
            )
            _data.check_signature(function, f"residuals[{number}]", names, given=given)
        self._alone = alone

    def _stepped(self, batches: Sequence[Any]) -> Tensor:
        joint = _Joint(self._functions, batches)
        asked = call(joint, self._where, passes=1, create_graph=False, keep=True)
        tensors = asked.where.tensors
        _check_apart(asked.where.names, tensors)
        search = self._search
        if search is None:
            search = any(batch is not None for batch in batches)
        state: _State = self.state[self.param_groups[0]["params"][0]]
        if self.last is not None:
            self.last._fit.clear()  # there may be no room for two
        with OutputGraph(asked) as graph:
            system = self._system(graph, joint)
            state["step"] = state.get("step", 0) + 1
            value = graph.outputs[0].new_tensor(system.loss)
            graph.outputs = None
            state.setdefault("scale", system.scale or 1.0)
            state.setdefault("damping", FIRST if self._damping is None else self._damping)
            system.weights = state["scale"]
            if not (search or system.in_samples or any(b is not None for b in batches)):
                norms, before = system.norms, state.get("norms", ())
                if len(before) == len(norms):  # else some were frozen since
                    norms = norms.maximum(norms.new_tensor(before))
                # No tensor: `load_state_dict` makes tensors what the parameters are, float32.
                state["norms"], system.weights = (
                    norms.tolist(),
                    torch.where(norms > 0, norms**2, state["scale"]),
                )
            rule = self._by_search if search else self._by_gain
            at = _Trials(graph, system)
            record, trial = rule(system, at, state, self._drift(tensors))
            if trial is None:
                graph.context.random.restore()  # the random numbers will be drawn again
                for tensor in tensors:
                    self.state[tensor].pop("change", None)
        if trial is not None:
            self._take(tensors, trial.leaves)
        self.last = replace(record, evaluations=at.number)
        return value

    # --- the linear model

    def _system(self, graph: OutputGraph, joint: _Joint) -> DampedSystem:
        """The residuals and their Jacobian, checked."""
        outputs = [self._checked(graph, joint, output, i) for i, output in enumerate(graph.outputs)]
        columns = sum(leaf.numel() for leaf in graph.leaves)
        size = 8 * columns * sum(output.numel() for output in outputs)
        asked = self._budget.__class__ is not float or not self._budget or size > SMALL
        budget = _memory.budget(self._budget, outputs[0].device) if asked else math.inf
        system = DampedSystem(outputs, columns, budget)
        first = "step" not in self.state[self.param_groups[0]["params"][0]]
        if not math.isfinite(system.loss) or (first and not system.loss and system.r.any()):
            largest = float(system.r.abs().max())
            raise InputError(
                f"residuals: the largest is {largest:.1e}, so half their sum of squares is "
                f"{system.loss} in float64; scale them. Nothing was changed."
            )
        for i, output in enumerate(outputs):
            system.add(self._rows(graph, joint, output, i, budget))
        return system.closed()

    def _rows(
        self, graph: OutputGraph, joint: _Joint, output: Tensor, number: int, budget: float
    ) -> list[Outer]:
        """The rows of one function's residuals, by each leaf: in factors, where these are known."""
        samples = joint.parts[number]
        if isinstance(samples, Samples):
            values = output.reshape(-1) if output.shape[1:].numel() == 1 else output
            rows = None if number in self._unread else in_factors(graph, values, budget)
            if rows is None:
                self._unread.add(number)  # nor will it be in the next step
                joint.only = number
                rows = in_rows(graph, samples, values, "Give fewer points a step.")
                joint.only = None
            return rows
        table = tall_jacobian(graph, [output], chunk_size=None)
        [blocks] = table or _reverse.blocks(graph, [output], chunk_size=None)
        pairs = zip(blocks, graph.leaves, strict=True)
        return [Outer.of(part.reshape(output.numel(), 1, *x.shape), x.shape) for part, x in pairs]

    def _checked(self, graph: OutputGraph, joint: _Joint, given: Any, number: int) -> Tensor:
        """The residuals of one function: finite,
        and not samples crossed with samples by broadcasting.
        """
        name, samples = f"residuals[{number}]", joint.parts[number]
        output = _arguments.check_output(given, name)
        wrong = int((~output.detach().isfinite()).sum())
        if wrong:
            raise InputError(
                f"{name}: {wrong:,} of {output.numel():,} are not finite at the current "
                f"parameters. Nothing was changed."
            )
        if isinstance(samples, Samples) and output.ndim not in (1, 2):
            raise InputError(
                f"{name} returned shape {tuple(output.shape)}, expected one residual per sample, "
                "(N,), or several, (N, K): the residuals, not the sum of their squares. "
                "(For a mean loss, return what it squares.)"
            )
        if not output.ndim and _versions.reduction(output)[0]:
            warnings.warn(
                f"{name} returned one number, a mean or a sum, which counts as one residual and is "
                "squared. Return the residuals themselves, (N,), not the loss; or, "
                "if one residual is meant, give it the shape (1,).",
                HodiffWarning,
                stacklevel=_arguments.outside() + 1,
            )
        if output.ndim == 2 and output.shape[0] == output.shape[1] > 1:
            if isinstance(samples, Samples):
                joint.only = number
                check_not_crossed(graph, samples, output, name)
                joint.only = None
            if "step" not in self.state[self.param_groups[0]["params"][0]] and _are_sums(
                graph, output
            ):
                warnings.warn(
                    f"{name}: {tuple(output.shape)}, are all sums of a number of the row and one "
                    "of the column, as a difference of (N, 1) and (N,) has by broadcasting. "
                    "For N residuals give both the shape (N,): model(x).squeeze(-1).",
                    HodiffWarning,
                    stacklevel=_arguments.outside() + 1,
                )
        return output

    # --- the two rules

    def _by_gain(
        self, system: DampedSystem, at: _Trials, state: _State, drift: Tensor | None
    ) -> _Outcome:
        """Take a step as long as a radius, bent where little of the promise comes true;
        else a shorter one.
        """
        least = self._least or NONE
        if self._damping is None and at.start.any():
            state.setdefault("radius", system.norm(at.start))
        while True:
            if "radius" in state:
                state["damping"] = system.damping_of(state["radius"], state["damping"], least)
            damping = state["damping"]
            step = system.step(damping, drift)
            while system.in_samples and step.residual > SOLVED:
                state["damping"] = damping = 10 * damping + 1e-16
                step = system.step(damping, drift)
            trial = at(step.change)
            polished = self._polished(system, step, trial, at, state) if at.number == 1 else None
            if polished:
                return polished
            if -math.inf < trial.gain < GOOD * step.decrease and at.number < self._tries:
                bend = system.bend(trial.r - system.r - step.moved)
                if system.norm(bend) <= BENT * step.norm:
                    trial = max(trial, at(step.change + bend), key=lambda trial: trial.gain)
            ratio = trial.gain / step.decrease if step.decrease > 0 else -math.inf
            state.setdefault("radius", step.norm)
            if ratio < POOR:
                state["radius"] = CUT * step.norm
            elif ratio > GOOD:
                state["radius"] = max(state["radius"], 2 * step.norm)
            accepted = ratio > SUFFICIENT
            if accepted or at.number >= self._tries:
                state["norm"] = step.norm if accepted else state.get("norm", math.inf)
                return _outcome(system, step, trial, damping, accepted=accepted)
            drift = None  # which may have led uphill

    def _by_search(
        self, system: DampedSystem, at: _Trials, state: _State, drift: Tensor | None
    ) -> _Outcome:
        """Halve the step until the loss falls, along a path that bends as the residuals do.

        A short trial shows what they are of second order, and the bend undoes that, as far as the
        model can. It stays small beside the way ahead: a long one leads to where no model holds,
        and networks end with all their units saturated. The damping follows the length.
        """
        damping = state["damping"]
        least = LEAST if self._least is None else self._least
        step = system.step(damping, drift)
        if step.decrease <= at.rounding():
            polished = self._polished(system, step, at(step.change), at, state)
            if polished:
                return polished
        length = min(1.0, 4 * state.get("length", 1.0))
        best = at(SHORT * length * step.change)._replace(length=SHORT * length)
        bend = torch.zeros_like(step.change)
        if best.gain > -math.inf:
            second = (best.r - system.r - best.length * step.moved) / best.length**2
            bend = system.bend(second)
        if best.gain <= 0:
            best = _Trial([], 0.0, 0.0)
        most = BENT * step.norm / max(system.norm(bend), torch.finfo(bend.dtype).tiny)
        while at.number < self._tries and length > best.length:
            trial = at(length * (step.change + min(length, most) * bend))
            if trial.gain > best.gain:
                best = trial._replace(length=length)
            length /= 2
        if not best.leaves:
            state["damping"], state["length"] = min(MOST, damping * AFTER_FAILURE), 1.0
            return _outcome(system, step, best, damping, accepted=False)
        if best.length >= LOWER_FROM:
            state["damping"] = max(least, damping * FALL)
        elif best.length < RAISE_BELOW:
            state["damping"] = min(MOST, damping * GROWTH)
        state["length"], state["norm"] = best.length, step.norm
        return _outcome(system, step, best, damping, accepted=True)

    def _polished(
        self, system: DampedSystem, step: DampedStep, trial: _Trial, at: _Trials, state: _State
    ) -> _Outcome | None:
        """The result of a step below rounding, taken while steps shorten; None: a larger one."""
        least = at.rounding()
        if step.decrease > least or abs(trial.gain) > least:
            return None
        still = all(map(torch.equal, trial.leaves, at.graph.leaves))
        if still or not 0 < step.norm < SHORTER * state.get("norm", math.inf):
            return self._freer(system, step, at, state)
        state["norm"] = step.norm
        return _outcome(system, step, trial, state["damping"], accepted=True)

    def _freer(
        self, system: DampedSystem, step: DampedStep, at: _Trials, state: _State
    ) -> _Outcome:
        """Take a step of less damping that gains more than rounding; none: the loss is at its
        minimum.

        The step in hand promises nothing: for there is nothing to gain, or since its damping holds
        back parameters that are large beside the others.
        """
        damping = state["damping"]
        least, floor = at.rounding(), NONE if self._least is None else self._least
        while damping > floor and at.number < self._tries:
            damping = max(floor, damping / FREER)
            freer = system.step(damping, None)
            trial = at(freer.change) if freer.decrease > least else None
            if trial is not None and trial.gain > least:
                state["damping"] = damping
                state["norm"] = state["radius"] = freer.norm
                return _outcome(system, freer, trial, damping, accepted=True)
        return _outcome(
            system, step, _Trial([], 0.0), state["damping"], accepted=False, converged=True
        )

    # --- what changes

    def _drift(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The part of the last step that is added to this one."""
        changes = [self.state[tensor].get("change") for tensor in tensors]
        if not self._momentum or any(change is None for change in changes):
            return None
        return self._momentum * flat(changes, tensors[0].device)

    def _take(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        undo = _undoing(tensors)
        try:
            with _settings.grad_mode(False):
                for tensor, leaf in zip(tensors, leaves, strict=True):
                    if self._momentum:
                        self.state[tensor]["change"] = leaf.detach() - tensor
                    tensor.copy_(leaf.detach())
            undo.clear()
        finally:
            _settings.undo_all(undo)


def _undoing(tensors: Sequence[Tensor]) -> _settings.Undo:
    """A function that gives tensors their values back."""
    before = [tensor.detach().clone() for tensor in tensors]

    def put_back() -> None:
        with _settings.grad_mode(False):
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)

    return [put_back]


class _Joint:
    """The functions of residuals at their batches: all, or a single one of them at some samples."""

    def __init__(self, functions: Sequence[Callable[..., Any]], batches: Sequence[Any]) -> None:
        self.only: int | None = None
        self._batches = batches
        pairs = zip(functions, batches, strict=True)
        self.parts = [f if batch is None else Samples(f, batch) for f, batch in pairs]

    def __call__(self, where: Any) -> Any:
        if self.only is not None:
            return self.parts[self.only](where)
        results: list[Any] = []
        for number, (part, batch) in enumerate(zip(self.parts, self._batches, strict=True)):
            with _data.told_what_it_got(
                f"residuals[{number}]", _data.NONE if batch is None else batch
            ):
                results.append(part(where))
        return results


class _Trial(NamedTuple):
    """Parameters after a step, and by how much the loss is smaller there; -inf: not finite."""

    leaves: list[Tensor]
    gain: float
    length: float = 1.0
    r: Any = None


_Outcome = tuple[LeastSquaresRecord, _Trial | None]


def _outcome(
    system: DampedSystem,
    step: DampedStep,
    trial: _Trial,
    damping: float,
    *,
    accepted: bool,
    converged: bool = False,
) -> _Outcome:
    length = trial.length
    promised = step.decrease * length * (2 - length)
    record = LeastSquaresRecord(
        system.loss,
        trial.gain if accepted else 0.0,
        trial.gain / promised if promised > 0 else math.nan,
        damping,
        length,
        accepted,
        converged,
        system.cosine(),
        step.residual,
        0,
        "samples" if system.in_samples else "parameters",
        [] if system.jacobian is None else [system.jacobian],
    )
    return record, trial if accepted else None


class _Trials:
    """The residuals at other parameters; how often they were evaluated."""

    def __init__(self, graph: OutputGraph, system: DampedSystem) -> None:
        self.graph, self._system = graph, system
        self.number = 0
        self.start = flat(graph.leaves, system.r.device)

    def rounding(self) -> float:
        """A change of the loss that rounding makes, of the residuals or of the parameters."""
        loss, rows = self._system.loss, max(1, len(self._system.r))
        eps = max(torch.finfo(leaf.dtype).eps for leaf in self.graph.leaves)
        # About what the residuals round by: they may be small differences of large terms.
        change = eps * float((self._system.norms * self.start).norm())
        return max(ROUNDING * loss, change**2, DEVIATIONS * change * math.sqrt(2 * loss / rows))

    def __call__(self, change: Tensor) -> _Trial:
        """The residuals after a step."""
        self.number += 1
        leaves = [
            part.reshape(leaf.shape).to(leaf)
            for part, leaf in zip(
                (self.start + change).split([leaf.numel() for leaf in self.graph.leaves]),
                self.graph.leaves,
                strict=True,
            )
        ]
        self.graph.context.random.restore()
        r, new = self._system.r, flat(self.graph.context.at(leaves), self.start.device)
        gain = float((r - new) @ (r + new)) / 2  # not a difference of sums, which would round
        return _Trial(leaves, gain if math.isfinite(gain) else -math.inf, r=new)


def _are_sums(graph: OutputGraph, output: Tensor) -> bool:
    """Whether a matrix is a_i + b_j, in value and in derivative:
    what adds up to 0 in each row and column, is 0.
    """
    some = generic(output.numel()).to(output).reshape(output.shape)
    even = some - some.mean(0)
    even = even - even.mean(1, keepdim=True)
    device = output.device
    slopes = [
        flat(_reverse.vjp(graph, [output], [w], more=True), device).norm() for w in (even, some)
    ]
    small = torch.finfo(output.dtype).eps ** 0.5 * even.norm()
    alike = (even * output.detach()).sum().abs() <= small * output.detach().norm()
    return bool(alike and slopes[0] <= small * slopes[1] / some.norm())


def _check_apart(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise where parameters share memory: what a step adds to one is added to
    the other as well.
    """
    last, end = "", 0
    for start, name, x in sorted(
        (x.data_ptr(), name, x) for name, x in zip(names, tensors, strict=True) if x.numel()
    ):
        span = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1
        if start < end or span < x.numel():
            other = last if start < end else "itself"
            raise InputError(
                f"where: {name} shares memory with {other}, so a step of one would change both. "
                f"Use one parameter in both places (m.b = m.a; f may transpose it), or give each "
                f"its own memory (.clone())."
            )
        last, end = name, start + span * x.element_size()


# --- the damped linear system: J in factors or in rows; its solution by Cholesky ------------------


DOUBLE = torch.float64

HELD = 2**24
"""Bytes of a wide J up to which its rows take less time than its factors."""

NARROW = 512
"""Up to so many columns a tall J lies column by column, for its products; more fill slowly."""

ROUNDS, LOOSE = 10, 0.1
"""How often the damping of a radius is sought, and how far the length may be from it,
relatively.
"""


class DampedStep(NamedTuple):
    """The step that the linear model proposes.

    Attributes:
        change: The step, flat.
        moved: How it changes the residuals, J d.
        norm: Its length.
        decrease: By how much the model falls.
        residual: How exactly the damped equations are solved, relatively.
    """

    change: Tensor
    moved: Tensor
    norm: float
    decrease: float
    residual: float


class DampedSystem:
    """Residuals r and their Jacobian J, in float64, and the steps of the damped linear model.

    J is held where it is small, or has more rows than columns and fits. Else it stays in factors,
    for each function the rows by each leaf.

    Attributes:
        r: The residuals.
        loss: Half the sum of their squares.
        gradient: J'r.
        in_samples: Whether it is solved with J J', else with J'J.
        norms: Those of the columns of J.
        scale: The largest of their squares.
        weights: What damping is multiplied by, one number for all columns or one for each; they
            weigh the squares of a step in its `norm` too.
    """

    weights: Tensor | float = 1.0
    _damping = math.nan

    def __init__(self, outputs: Sequence[Tensor], columns: int, budget: float) -> None:
        self.r = flat(outputs, outputs[0].device)
        self.loss = float(self.r @ self.r) / 2
        rows = len(self.r)
        side = min(rows, columns)
        if 16 * side**2 > budget:
            raise InputError(
                f"residuals: a step of {rows:,} residuals and {columns:,} parameters takes a "
                f"matrix {side:,} x {side:,} and its factor in float64, "
                f"{_memory.readable(16 * side**2)}, "
                f"but memory_budget is {_memory.readable(budget)}. Give fewer points a step."
            )
        self.in_samples = rows <= columns
        size = 8 * rows * columns
        self._factored = size > (HELD if self.in_samples else budget)
        self._parts = list[list[Outer]]()
        kept = 0 if self._factored else rows
        tall = columns <= NARROW and not self.in_samples
        self._J = self.r.new_empty(columns, kept).T if tall else self.r.new_empty(kept, columns)
        self._block_rows = max(1, int(min(budget, size) / 4) // max(1, 8 * columns))
        self._begin = 0

    # --- J

    def add(self, rows: list[Outer]) -> None:
        """Take the rows of one function's residuals, by each leaf."""
        if self._factored:
            self._parts += [[of.double(self.r.device) for of in rows]]
            return
        begin, column = self._begin, 0
        self._begin += rows[0].sizes.numel()
        block = self._J[begin : self._begin]
        for of in rows:
            width, part = of.shape.numel(), of.rows()
            block[:, column : column + width].view(part.shape).copy_(part)
            column += width

    def closed(self) -> DampedSystem:
        """The system, once all rows are in."""
        if self._factored:
            self._stack = Stack(self._parts)
        self.gradient = self._pull(self.r)
        if not bool(self.gradient.isfinite().all()):
            raise InputError(
                "residuals: the derivative is not finite at the current parameters (a square root "
                "of 0, a norm of 0?). Nothing was changed."
            )
        if not self.in_samples:
            self._matrix = self._normal() if self._factored else _lower_product(self._J.T)
            squares = self._matrix.diagonal()
        elif self._factored:
            self._matrix, squares = self._stack.gram(), self._stack.squares()
        else:
            self._matrix, squares = _lower_product(self._J), self._J.square().sum(0)
        self.norms, self.scale = squares.sqrt(), float(squares.max()) if len(squares) else 0.0
        return self

    def _normal(self) -> Tensor:
        """J'J, by some rows at a time."""
        matrix = self.r.new_zeros(len(self.gradient), len(self.gradient))
        for rows in self._parts:
            samples, numbers = rows[0].sizes
            step = max(1, self._block_rows // numbers)
            for start in range(0, samples, step):
                some = [of[start : start + step].rows().flatten(2).flatten(0, 1) for of in rows]
                block = torch.cat(some, 1)
                matrix.addmm_(block.T, block)
        return matrix

    def _push(self, change: Tensor) -> Tensor:
        """The change of the residuals by a step in the linear model, J d."""
        return self._stack.push(change) if self._factored else self._J @ change

    def _pull(self, weights: Tensor) -> Tensor:
        """The sum of the rows of J, weighed, J'u."""
        return self._stack.pull(weights) if self._factored else self._J.T @ weights

    @property
    def jacobian(self) -> Tensor | None:
        """J, where it is held."""
        return None if self._factored or self.in_samples else self._J

    # --- solving

    def cosine(self) -> float:
        """The largest cosine between the residuals and a column of J: 0 at a minimum."""
        size = self.norms * math.sqrt(2 * self.loss)
        # A column of nothing, or of squares that underflow, has no direction.
        return float(torch.where(size > 0, self.gradient.abs() / size, 0.0).max())

    def norm(self, change: Tensor) -> float:
        """The length of a step, in the units of the weights."""
        return float((self.weights * change**2).sum().sqrt())

    def damping_of(self, radius: float, damping: float, least: float) -> float:
        """The damping of the step that is as long as the radius, to a tenth (Moré); or the least.

        By Newton's method for the inverse of the length, from the damping given.
        """
        lower, upper = 0.0, math.inf
        for _ in range(ROUNDS):
            self._factor(damping)
            solved = self._solve(self.r if self.in_samples else self.gradient)
            change = self._pull(solved) if self.in_samples else solved
            part = self.norm(change) / radius
            if part > 1 + LOOSE:
                lower = damping
            elif part < 1 - LOOSE and damping > least:
                upper = damping
            else:
                break
            again = self._solve(self.weights * solved)
            fall = (self.weights * change) @ (self._pull(again) if self.in_samples else again)
            damping = max(
                least, damping + (part - 1) * (part * radius) ** 2 / (float(fall) or math.inf)
            )
            if not lower < damping < upper:  # as from far, where J has not full rank
                damping = (
                    10 * lower if upper == math.inf else math.sqrt(max(lower, upper / 1e6) * upper)
                )
        return damping

    def step(self, damping: float, drift: Tensor | None) -> DampedStep:
        """The minimum of |J d + r|^2 + damping |d - drift|^2, of weighted entries."""
        self._factor(damping)
        added = damping * self.weights
        if drift is None:
            change, moved, residual = self._solved(self.r, added)
        else:
            pushed = self._push(drift)
            change, moved, residual = self._solved(self.r + pushed, added)
            change, moved = change + drift, moved + pushed
        decrease = -float(change @ self.gradient + moved @ moved / 2)
        return DampedStep(change, moved, self.norm(change), decrease, residual)

    def bend(self, second: Tensor) -> Tensor:
        """The change that undoes a term of second order in the residuals,
        as the last step would.
        """
        if self.in_samples:
            return -self._pull(self._solve(second))
        return -self._solve(self._pull(second))

    def _solved(self, b: Tensor, damping: Tensor | float) -> tuple[Tensor, Tensor, float]:
        """The minimum d of |J d + b|^2 + damping |d|^2, J d, and how exactly it is solved, refined
        once. The products with J are what costs, where one side of it is short.
        """
        if self.in_samples:
            y = self._solve(-b)
            y = y - self._solve(b + self._push(self._pull(y)) + damping * y)
            change = self._pull(y)
            moved = self._push(change)
            rest = b + moved + damping * y
        else:
            slope = self.gradient if b is self.r else self._pull(b)
            change = self._solve(-slope)
            # of J'(J d + b) the sum comes first, for it is small
            rest = self._pull(self._push(change) + b) + damping * change
            change = change - self._solve(rest)
            moved = self._push(change)
            rest = self._pull(moved + b) + damping * change
            b = slope
        size = float(b.norm())
        return change, moved, float(rest.norm()) / size if size else 0.0

    def _factor(self, damping: float) -> None:
        """Have what solves the equations that are damped so."""
        if damping != self._damping:
            self._damping, self._solve = damping, self._solver(damping * self.weights)

    def _solver(self, damping: Tensor | float) -> Callable[[Tensor], Tensor]:
        """The solver of the damped equations, the diagonal divided out;
        damped more where it must.
        """
        while True:
            damped = self._matrix.clone()
            damped.diagonal().add_(damping)
            d = damped.diagonal().clamp(min=torch.finfo(DOUBLE).tiny).rsqrt()
            factor, failed = torch.linalg.cholesky_ex(damped.mul_(d).mul_(d.unsqueeze(1)))
            if not failed:
                return partial(_by_factor, factor, d)
            damping = 10 * damping + 1e-16 * self.weights


def _by_factor(factor: Tensor, d: Tensor, b: Tensor) -> Tensor:
    """The solution of L L' x / d d' = b, in a tenth of the time of `torch.cholesky_solve`."""
    half = torch.linalg.solve_triangular(factor, (d * b).unsqueeze(1), upper=False)
    return d * torch.linalg.solve_triangular(factor.T, half, upper=True).squeeze(1)


def _lower_product(J: Tensor) -> Tensor:
    """J J', of which only the lower half is needed: the blocks above the diagonal are zero."""
    product, size = J.new_zeros(len(J), len(J)), max(64, -(-len(J) // 4))
    for start in range(0, len(J), size):
        stop = min(start + size, len(J))
        torch.mm(J[start:stop], J[:stop].T, out=product[start:stop, :stop])
    return product


def flat(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).to(device, DOUBLE) for tensor in tensors])
