"""The derivatives of a tensor, computed when they are looked at, and once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff._core import _checks, _compiled_callers, _modes, _reverse
from hodiff._core._call import call
from hodiff._core._graph import Graph, detached
from hodiff.calculus._along import entries
from hodiff.errors import InputError
from hodiff.fields._indices import Index, parsed


def derivatives_of(u: Tensor, x: Tensor, *, batch_ndim: int = 1) -> Derivatives:
    r"""The partial derivatives of a tensor already computed, each computed when it is looked at, and once.

    For losses written from pieces, as those of physics-informed networks are: `d[0]` is \(\partial u / \partial x_0\),
    `d[0, 1]` is \(\partial^2 u / \partial x_0 \partial x_1\), to any order, and pieces share what they have in common.

    Args:
        u: Computed from *x*, one number or several for each point: `(N,)`, `(N, 1)` or `(N, m)`, each row from its own
            point alone. Its graph is the caller's and stays.
        x: The points, `(*batch, D)`, which require grad.
        batch_ndim: Leading dimensions of *x* that index independent samples.

    Returns:
        A view. `d[i]` and `d[i, j, ...]` have the shape of *u*, and the order of the coordinates does not matter. With
        grad mode on they are differentiable by all that *u* is; under `torch.no_grad()` they are detached.

    Raises:
        InputError: *u* is a function (evaluate it: `u = f(x)`; or use `partials`), or there is no such coordinate.
        GraphError: *u* does not depend on *x*; or as for `grad`. From the second order on (whose results are
            differentiable, which makes three) that includes layer, batch and instance norm, whose third derivative
            PyTorch gets wrong; `partials` takes the function, and is right there.

    Cost:
        A reverse pass for each gradient that is met first, of *u* or of one of its derivatives: `d[0]` and `d[1]`
        together one, `d[0, 0]` and `d[0, 1]` another; times m for several numbers at each point. All that
        has been computed is kept as long as the view, memory and graphs included.

    Examples:
        u = x² t solves u_xx = 2 u_t / x²:

        >>> import torch, hodiff
        >>> x = torch.tensor([[3.0, 2.0]], requires_grad=True)
        >>> u = x[:, 0] ** 2 * x[:, 1]
        >>> d = hodiff.derivatives_of(u, x)
        >>> d[0].detach(), d[1].detach(), d[0, 0].detach(), d[1, 0] is d[0, 1]
        (tensor([12.]), tensor([9.]), tensor([4.]), True)
    """
    if not isinstance(u, Tensor):
        raise InputError(
            f"u: is a {type(u).__name__}; expected a tensor computed from x: u = f(x). For a function: "
            f"hodiff.partials(f, x, [...])."
        )
    _checks.check_real_tensor(_checks.check_output(u, "u"), "u")
    _checks.check_real_tensor(x, "x")
    batch = _checks.check_batch([x], ["x"], batch_ndim)
    if x.ndim != batch_ndim + 1:
        raise InputError(
            f"x: has points of shape {tuple(x.shape[batch_ndim:])}; partial derivatives need vectors, (D,)."
        )
    if u.shape[:batch_ndim] != batch:
        raise InputError(
            f"u: has shape {tuple(u.shape)}; with batch_ndim={batch_ndim} it must begin with {tuple(batch)}, one row "
            f"per sample."
        )
    return Derivatives(u, x, batch_ndim)


class Derivatives:
    """What `derivatives_of` returns: `d[0, 1]` is a derivative of the tensor, computed at the first look."""

    def __init__(self, u: Tensor, x: Tensor, batch_ndim: int) -> None:
        self._u = u
        self._x = x
        self._batch_ndim = batch_ndim
        self._found: dict[Index, Tensor] = {(): u}
        self._gradients: dict[Index, Tensor] = {}

    def __getitem__(self, index: Any) -> Tensor:
        wanted = parsed(index, self._x.shape[-1])
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with _modes.recording():
            found = self._partial(wanted)
        return found if recorded else detached(found)

    def __iter__(self) -> Any:
        raise TypeError("derivatives of any order have no end to iterate to; ask for each: d[0], d[0, 1].")

    def __repr__(self) -> str:
        known = ", ".join(map(str, sorted(index for index in self._found if index)))
        return f"Derivatives(of {tuple(self._u.shape)} by {tuple(self._x.shape)}, computed: {known or 'none'})"

    def _partial(self, index: Index) -> Tensor:
        if index not in self._found:
            inner, last = self._lower(index)
            if inner not in self._gradients:
                self._gradients[inner] = self._gradient(self._partial(inner), len(index))
            self._found[index] = self._gradients[inner].select(-1, last)
        return self._found[index]

    def _lower(self, index: Index) -> tuple[Index, int]:
        """A derivative of one order less, one whose gradient is known where there is one, and the coordinate left."""
        for place in reversed(range(len(index))):
            inner = index[:place] + index[place + 1 :]
            if inner in self._gradients:
                return inner, index[place]
        return index[:-1], index[-1]

    def _gradient(self, values: Tensor, order: int) -> Tensor:
        """The gradient of each number at each point, `(*values.shape, D)`."""
        # The passes below count too: of the second order on, a differentiable result is a third derivative.
        asked = call(values, self._x, passes=order, create_graph=True, batch_ndim=self._batch_ndim)
        with Graph(asked) as ev:
            columns = entries(values, self._batch_ndim)
            rows = [_reverse.pull(ev, [column], [torch.ones_like(column)])[0] for column in columns]
            stacked = torch.stack(rows, -2) if values.ndim > self._batch_ndim else rows[0]
            return stacked.reshape(*values.shape, self._x.shape[-1])


_compiled_callers.mark("Derivatives", Derivatives)
