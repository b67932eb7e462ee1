"""`NewtonCG`: Newton's method for training, by products with the Hessian inside a trust region."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff._core import _arguments, _kernels, _locks, _messages, _nodes, _settings
from hodiff._core._call import call
from hodiff._core._faults import is_fault
from hodiff._core._graph import detached
from hodiff._core._lending import EvaluationContext
from hodiff._core._substitutes import ExactNorms
from hodiff.curvature._hessian import HessianOperator
from hodiff.curvature._krylov import dots
from hodiff.curvature._probes import check_finite, power_of_two
from hodiff.curvature._records import End, NewtonRecord
from hodiff.errors import GraphError, InputError

SUFFICIENT = 1e-4
"""What part of the promised decrease a step must keep to be taken."""
POOR = 0.25
"""What part it must keep for the radius to stay."""
GOOD = 0.75
"""What part it must keep for the radius to double."""


class Rateless(torch.optim.Optimizer):
    """An optimizer that chooses the length of its steps: who schedules a learning rate is told."""

    # What a copy, or a pickle, has: PyTorch's own optimizers keep all their options in the groups.
    _own: tuple[str, ...]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.param_groups = [*map(_Group, self.param_groups)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(_Group(param_group))


class _Group(dict[str, Any]):
    """Options and parameters. What else is asked for is what schedules a learning rate."""

    def __missing__(self, key: str) -> Any:
        raise InputError(
            f"{key}: this optimizer has no learning rate to schedule; it chooses the length of each step itself."
        )


class NewtonCG(Rateless):
    r"""Newton's method with conjugate gradients in a trust region, as a PyTorch optimizer.

    A step approximately minimizes the quadratic model \(m(s) = g^\top s + \tfrac12 s^\top (H +
    \lambda I)\, s\) over \(\lVert s \rVert \le \Delta\), by products with the Hessian \(H\). Along
    negative curvature it goes to the boundary, so it leaves saddle points. The loss is then
    evaluated at the new parameters. If it falls by less than a ten-thousandth of the predicted
    decrease, or is not finite, the step is **undone**, bit for bit. The radius \(\Delta\) shrinks
    to a quarter of the step if the model was poor, and doubles if the model was good and the radius
    limited the step.

    The closure returns the loss and does **not** call `backward()`; no `.grad` is written. It is
    called twice per step, and must use the same mini-batch both times. Both calls draw the same
    random numbers (dropout), and what the second call does to buffers (BatchNorm statistics) is
    undone. If the loss contains an operation whose second derivative is wrong in PyTorch
    (`weight_norm`), a third call computes it from its definition.

    Args:
        params: The parameters, or groups of them, as for any optimizer. A group may have its own
            `damping`.
        radius: The initial \(\Delta\).
        damping: \(\lambda\), the Levenberg-Marquardt damping added to the model's curvature. With
            0, only the radius limits the step.
        rtol: Conjugate gradients stop at \(\lVert g + (H + \lambda I) s \rVert \le\) `rtol` \(\lVert g \rVert\);
            None: \(\min(\tfrac12, \sqrt{\lVert g \rVert / \lVert g_1 \rVert})\) with the first step's gradient
            \(g_1\), for which convergence is superlinear, whatever the loss is measured in.
        products: The maximal number of products in a step; None: 50.

    Attributes:
        last: What the last step did, a record: `value` (the loss before), `decrease`, `ratio`, `accepted`,
            `radius` (the next one), `products`, `end`. None before the first.

    Raises:
        InputError: The closure is missing, or its loss is not finite at the current parameters or
            not one element.
        GraphError: The loss does not depend on the parameters, or has no second derivative; or its
            graph is freed, because the closure called `backward()`.

    Cost:
        A step: two calls of the closure (the second without a graph), one gradient, and a reverse
        pass for each product. Memory: the graph of the loss and of its gradient, and about seven
        vectors.

    Examples:
        A quadratic loss is at its minimum after one step, if the radius allows:

        >>> import torch, hodiff
        >>> x = torch.zeros(2, requires_grad=True)
        >>> optimizer = hodiff.NewtonCG([x], radius=10.0, rtol=1e-6)
        >>> loss = optimizer.step(lambda: (x[0] - 1) ** 2 + 5 * (x[1] + 2) ** 2)
        >>> x.detach().round(decimals=4), loss, optimizer.last.end
        (tensor([ 1., -2.]), tensor(21.), 'interior')

    Reference:
        Steihaug, T. (1983). SIAM J. Numer. Anal. 20(3). doi:10.1137/0720042. Nocedal, J., Wright, S. (2006).
        Numerical Optimization, algorithms 4.1 and 7.2. doi:10.1007/978-0-387-40065-5.
    """

    _own = ("_limit", "_rtol", "_first_radius", "last")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        radius: float = 1.0,
        damping: float = 0.0,
        rtol: float | None = None,
        products: int | None = None,
    ) -> None:
        _arguments.check_positive(radius, "radius")
        _arguments.check_number(damping, "damping", least=0)
        if rtol is not None:
            _arguments.check_positive(rtol, "rtol")
        self._limit = 50 if products is None else _arguments.check_integer(products, "products", least=1)
        self._rtol, self._first_radius = rtol, float(radius)
        self.last: NewtonRecord | None = None
        try:
            super().__init__(params, {"damping": damping})
        except (TypeError, ValueError, RuntimeError) as error:
            if not is_fault(error):
                raise
            raise InputError(f"params: {error}; expected model.parameters(), or a list of groups.") from error

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its `damping` checked."""
        _arguments.check_number(param_group.get("damping", self.defaults["damping"]), "damping", least=0)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step, or refuse it (see `last`).

        Args:
            closure: Returns the loss, a tensor of one element with its graph.

        Returns:
            The loss before the step, detached.
        """
        if not callable(closure):
            raise InputError(
                f"closure: got {_arguments.kind(closure)}, expected a function that computes the "
                f"loss: optimizer.step(lambda: loss(model(x), y))."
            )
        with _locks.ThreadClaim(self):  # of several threads one steps
            return self._stepped(closure)

    def _stepped(self, closure: Callable[[], Tensor]) -> Tensor:
        point = self._trainable()
        state = self.state[self.param_groups[0]["params"][0]]
        state.setdefault("radius", self._first_radius)
        random = _settings.RandomState(point.tensors[0].device)
        with _settings.Scope(_second_derivatives), _settings.recording():
            loss = closure()
            value = _finite(loss)
            if not _messages.WRITTEN_OUT.isdisjoint(_nodes.survey([loss]).names()):
                with _settings.on(ExactNorms()):
                    loss = _again(closure, point.tensors, random, record=True)
            step, record = self._proposal(loss, value, point, state)
        record = self._taken(closure, point, step, record, random)
        state["radius"] = record.radius
        self.last = record
        return detached(loss)

    def _proposal(
        self, loss: Tensor, value: float, point: _Point, state: dict[str, float]
    ) -> tuple[list[Tensor], NewtonRecord]:
        """The step that the model proposes, and what it promises."""
        with _operator(loss, point.tensors) as H:
            gradient = H.flatten(H.gradient)
            unit = power_of_two(gradient) or 1.0
            length = unit * float((gradient / unit).norm())
            first = state.setdefault("gradient", length) or 1.0
            rtol = min(0.5, math.sqrt(length / first)) if self._rtol is None else self._rtol
            damping = torch.cat([gradient.new_full((t.numel(),), d) for t, d in zip(*point, strict=True)])
            damped = bool(damping.any())
            proposal = steihaug(
                lambda v: torch.addcmul(H @ v, damping, v) if damped else H @ v,
                gradient, state["radius"], rtol * length, self._limit,
            )  # fmt: skip
            step = H.unflatten(proposal.step)
        return step, NewtonRecord(value, proposal.decrease, math.nan, False, state["radius"], H.products, proposal.end)

    def _taken(
        self,
        closure: Callable[[], Any],
        point: _Point,
        step: Sequence[Tensor],
        record: NewtonRecord,
        random: _settings.RandomState,
    ) -> NewtonRecord:
        """Take the step, look at the loss there, and undo it where that is not small enough."""
        undo = undoing(point.tensors)
        try:
            with _settings.grad_mode(False):
                for tensor, change in zip(point.tensors, step, strict=True):
                    tensor.add_(change)
            value = float(_again(closure, point.tensors, random, record=False))
            # Near the minimum both decreases are rounding errors; then the step is good.
            noise = 10 * torch.finfo(point.tensors[0].dtype).eps * abs(record.value)
            ratio = (record.value - value + noise) / (record.decrease + noise) if record.decrease + noise else 1.0
            ratio = ratio if math.isfinite(value) else -math.inf
            accepted = ratio > SUFFICIENT
            if accepted:
                undo.clear()
        finally:
            _settings.undo_all(undo)
        radius = record.radius
        if ratio < POOR:
            radius = 0.25 * math.sqrt(sum(float(change.double().square().sum()) for change in step))
        elif ratio > GOOD and record.end in ("boundary", "negative curvature"):
            radius = 2 * radius
        decrease = record.value - value if accepted else 0.0
        return replace(record, decrease=decrease, ratio=ratio, accepted=accepted, radius=radius)

    def _trainable(self) -> _Point:
        """The parameters that require grad, and the damping of each."""
        pairs = [(p, float(group["damping"])) for group in self.param_groups for p in group["params"]]
        pairs = [(p, damping) for p, damping in pairs if p.requires_grad]
        if not pairs:
            raise InputError("params: none of the parameters requires grad.")
        return _Point([p for p, _ in pairs], [damping for _, damping in pairs])


class _Point(NamedTuple):
    """Where a step begins."""

    tensors: list[Tensor]
    damping: list[float]


def _second_derivatives(undo: _settings.Undo) -> None:
    """The state in which a closure's graph can be differentiated twice."""
    _kernels.include(undo)
    _settings.eager.enter(undo)


def _operator(loss: Tensor, tensors: list[Tensor]) -> HessianOperator:
    try:
        H = HessianOperator(loss, tensors)
        _ = H.value
    except GraphError as error:
        if error._facts.kind == "freed":
            raise GraphError(
                "closure: the graph of the loss has been freed; NewtonCG's closure returns the "
                "loss and does not call backward()."
            ) from error
        raise
    return H


def _finite(loss: Any) -> float:
    if not isinstance(loss, Tensor):
        raise InputError(
            f"closure returned {_arguments.kind(loss)}, expected the loss, a tensor. NewtonCG's "
            f"closure returns the loss and does not call backward()."
        )
    _arguments.check_scalars(_arguments.check_output(loss, "closure()"), 0, torch.Size())
    value = float(loss.detach())
    if not math.isfinite(value):
        raise InputError(
            f"closure: the loss is {value} at the current parameters, so there is no step to take. Nothing was changed."
        )
    return value


def _again(closure: Callable[[], Any], tensors: list[Tensor], random: _settings.RandomState, *, record: bool) -> Tensor:
    """The loss at the parameters as they are now, with the same random numbers and without side effects."""

    def loss(_: Any) -> Any:
        with _settings.grad_mode(record):
            return closure()

    with EvaluationContext(call(loss, tensors, passes=2, create_graph=False)) as context:
        context.random = random
        return context.again(tensors)


# --- the step of a trust region: where a quadratic model is small, not further than a radius --------------------------


class TrustRegionStep(NamedTuple):
    """Where conjugate gradients left the trust region, or stopped inside.

    Attributes:
        step: The step s, flat.
        decrease: What the model promises: -(g's + s'As/2), never negative.
        end: Why they stopped.
    """

    step: Tensor
    decrease: float
    end: End


def steihaug(
    product: Callable[[Tensor], Tensor], gradient: Tensor, radius: float, tolerance: float, products: int
) -> TrustRegionStep:
    """Minimize g's + s'As/2 over |s| <= radius, roughly: conjugate gradients from zero, in flat vectors.

    They stop inside once |g + As| <= tolerance, and where they meet negative curvature, or the
    radius, they go on along that direction to the boundary (Steihaug 1983). The model falls, and
    |s| grows, with every product.
    """
    unit = power_of_two(gradient) or 1.0  # of the model: squares of large numbers have no place in their dtype
    g, tolerance = gradient / unit, tolerance / unit
    s, image = torch.zeros_like(g), torch.zeros_like(g)  # and A s
    r = g.clone()
    d, rr = -r, dots(r, r)
    end: End = "budget"
    for _ in range(products):
        if math.sqrt(rr) <= tolerance:
            end = "interior"
            break
        turned = product(d) / unit
        curvature = dots(d, turned)
        check_finite(torch.tensor(curvature, device="cpu"), "NewtonCG")
        to_boundary = _to_boundary(s, d, radius)
        length = rr / curvature if curvature > 0 else math.inf
        if curvature <= 0:
            end = "negative curvature"
        elif length >= to_boundary:
            end = "boundary"
        length = min(length, to_boundary)
        s, image = torch.add(s, d, alpha=length), torch.add(image, turned, alpha=length)
        if end != "budget":
            break
        r = torch.add(r, turned, alpha=length)
        before, rr = rr, dots(r, r)
        d = torch.add(-r, d, alpha=rr / before)
    return TrustRegionStep(s, max(0.0, -(dots(g, s) + 0.5 * dots(s, image)) * unit), end)


def _to_boundary(s: Tensor, d: Tensor, radius: float) -> float:
    """The positive t with |s + t d| = radius, by the root that does not cancel."""
    dd = dots(d, d)
    sd = dots(s, d)
    gap = max(0.0, radius**2 - dots(s, s))
    root = math.sqrt(sd**2 + dd * gap)
    return gap / (sd + root) if sd > 0 else (root - sd) / dd


def undoing(tensors: Sequence[Tensor]) -> _settings.Undo:
    """What gives tensors their values back."""
    before = [tensor.detach().clone() for tensor in tensors]

    def put_back() -> None:
        with _settings.grad_mode(False):
            for tensor, old in zip(tensors, before, strict=True):
                tensor.copy_(old)

    return [put_back]
