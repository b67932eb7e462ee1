"""`LevenbergMarquardt`: training on residuals, checked, differentiated, and stepped on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff._core import _arguments, _reverse, _settings, _versions
from hodiff._core._call import call, refuse_stand_ins
from hodiff._core._faults import is_fault
from hodiff._core._graph import OutputGraph
from hodiff._core._vectors import generic
from hodiff._core._where import Where
from hodiff.calculus._factors import Outer
from hodiff.calculus._first import tall_jacobian
from hodiff.calculus._per_sample import Samples, check_not_crossed, in_factors, in_rows
from hodiff.curvature import _data, _memory
from hodiff.curvature._damped_steps import (
    FIRST,
    DampedSystem,
    GainRatio,
    PathSearch,
    State,
    flat,
)
from hodiff.curvature._process_group import is_wrapped
from hodiff.curvature._records import LeastSquaresRecord
from hodiff.errors import HodiffWarning, InputError

SMALL = 2**20
"""Bytes of a Jacobian that are kept without asking the system how much is free."""


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
        _arguments.check_number(FIRST if damping is None else damping, "damping", positive=True)
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
        for number, (function, batch) in enumerate(zip(self._functions, batches, strict=True)):
            names, given = ("where", "batch"), "in step(batch)"
            if batch is None:
                names, given = ("where",), "in step()"
            _data.check_signature(function, f"residuals[{number}]", names, given=given)
        refuse_stand_ins()
        with _settings.owned(self):  # of several threads one steps
            return self._stepped(batches)

    def _stepped(self, batches: Sequence[Any]) -> Tensor:
        joint = _Joint(self._functions, batches)
        asked = call(joint, self._where, passes=1, create_graph=False, keep=True)
        tensors = asked.where.tensors
        _check_apart(asked.where.names, tensors)
        search = self._search
        if search is None:
            search = any(batch is not None for batch in batches)
        state: State = self.state[self.param_groups[0]["params"][0]]
        if self.last is not None:
            self.last._fit.clear()  # there may be no room for two
        with OutputGraph(asked) as graph:
            system = self._system(graph, joint)
            state["step"] = state.get("step", 0) + 1
            value = graph.outputs[0].new_tensor(system.loss)
            graph.outputs = None
            state.setdefault("scale", system.scale or 1.0)
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
            chosen = PathSearch if search else GainRatio
            rule = chosen(graph, system, state, self._damping, self._least, self._tries)
            record = rule.take(self._drift(tensors))
            if not record.accepted:
                graph.context.random.restore()  # the random numbers will be drawn again
                for tensor in tensors:
                    self.state[tensor].pop("change", None)
        if record.accepted:
            self._take(tensors, rule.leaves)
        self.last = record
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

    # --- what changes

    def _drift(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The part of the last step that is added to this one."""
        changes = [self.state[tensor].get("change") for tensor in tensors]
        if not self._momentum or any(change is None for change in changes):
            return None
        return self._momentum * flat(changes, tensors[0].device)

    def _take(self, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        undo: _settings.Undo = [partial(x.detach().copy_, x.detach().clone()) for x in tensors]
        try:
            with _settings.grad_mode(False):
                for tensor, leaf in zip(tensors, leaves, strict=True):
                    if self._momentum:
                        self.state[tensor]["change"] = leaf.detach() - tensor
                    tensor.copy_(leaf.detach())
            undo.clear()
        finally:
            _settings.undo_all(undo)


class _Joint:
    """The functions of residuals at their batches: all, or a single one of them at some samples."""

    def __init__(self, functions: Sequence[Callable[..., Any]], batches: Sequence[Any]) -> None:
        self.only: int | None = None
        pairs = zip(functions, batches, strict=True)
        self.parts = [f if batch is None else Samples(f, batch) for f, batch in pairs]

    def __call__(self, where: Any) -> Any:
        if self.only is not None:
            return self.parts[self.only](where)
        return [part(where) for part in self.parts]


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
