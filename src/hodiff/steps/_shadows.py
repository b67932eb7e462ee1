"""Stand-ins for the functions of hodiff in a step's loss, which Dynamo follows to see all that the
loss reads.

The numbers of a step come from another trace, of the functions themselves (`_graph`). These forms
call `f` as they do, and give results of the same structure, shapes and dtypes that depend on all
that is given; their numbers mean nothing. A form that is not here is left to a break of the graph,
as every function is in a caller that the user has compiled.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hodiff
from hodiff._core._compiled_callers import REASON
from hodiff._core._where import Selection
from hodiff.fields._second_order import Estimate
from hodiff.steps._backends import trees


class _Making(threading.local):
    on = probing = False
    order = nested = 0


inside = _Making()
"""Whether this thread makes a step's graph, or only asks for guards; what shadows have noted of
that graph: the order of its derivatives, and in how many functions of hodiff the tracer is.
"""


@torch.compiler.assume_constant_result
def _is_on() -> bool:
    return inside.on


@torch.compiler.assume_constant_result
def _note(order: int, nested: int) -> bool:
    """Count; and whether this is inside the `f` of another call."""
    inside.order += order
    inside.nested += nested
    return inside.nested > max(nested, 0)


@torch.compiler.disable(reason=REASON)
def _left() -> None:
    """A break of the graph."""


def _need(condition: bool) -> None:
    if not condition:
        _left()


class _At:
    """`f` at a point: what it gives, and what derivatives are made of."""

    def __init__(self, f: Any, x: Any, args: Any, kwargs: Any, has_aux: bool, others: Any) -> None:
        self.names: Any = None
        if isinstance(x, (nn.Module, Selection)):
            chosen = dict(x.items() if isinstance(x, Selection) else x.named_parameters())
            self.names = [name for name, p in chosen.items() if p.requires_grad]
            self.x, given = [chosen[name] for name in self.names], x
        else:
            leaves, self.tree = trees.tree_flatten(x)
            tensor = isinstance(f, Tensor)
            self.x = leaves if tensor else [each.detach().requires_grad_() for each in leaves]
            given = trees.tree_unflatten(self.x, self.tree)
        with torch.enable_grad():
            value = f if isinstance(f, Tensor) else f(given, *args, **(kwargs or {}))
            self.value, self.aux = value if has_aux else (value, None)
            outputs, self.form = trees.tree_flatten(self.value)
            self.outputs = [each for each in outputs if isinstance(each, Tensor)]
            read = [each for each in trees.tree_leaves(others) if isinstance(each, Tensor)]
            self.total: Any = sum(each.sum() for each in [*self.outputs, *self.x, *read])
            self.slopes, self.result = self.plus(self.x), self.plus(self.value)

    def like(self, parts: list[Any]) -> Any:
        """Parts, in the structure of the point."""
        if self.names is not None:
            return dict(zip(self.names, parts, strict=True))
        return trees.tree_unflatten(parts, self.tree)

    def plus(self, x: Any) -> Any:
        """Sums of a structure's tensors with the total, so that they depend on all that is here."""
        return trees.tree_map(lambda each: each + self.total.to(each), x)


def _rows(x: Tensor, batch_ndim: int) -> Tensor:
    return x.reshape(*x.shape[:batch_ndim], -1)


def _outer(a: Tensor, b: Tensor, batch_ndim: int) -> Tensor:
    flat = _rows(a, batch_ndim).unsqueeze(-1) * _rows(b, batch_ndim).unsqueeze(-2)
    return flat.reshape(*a.shape, *b.shape[batch_ndim:])


def _blocks(
    at: _At, rows: list[Tensor], form: Any, matrix: bool = False, batch_ndim: int = 0, **_: Any
) -> Any:
    """A Jacobian: for each row tensor one like the point."""
    if matrix:
        whole = [
            torch.cat([_rows(each, batch_ndim) for each in part], -1) for part in (rows, at.slopes)
        ]
        return _outer(whole[0], whole[1], batch_ndim)
    return form([at.like([_outer(row, each, batch_ndim) for each in at.slopes]) for row in rows])


def _stacked(parts: list[Tensor], given: Any, model: list[Tensor]) -> list[Tensor]:
    """One of them for each of the vectors given, which are like the model."""
    vectors = trees.tree_leaves(given)
    extra = vectors[0].shape[: vectors[0].ndim - model[0].ndim]
    _need([each.shape for each in vectors] == [(*extra, *each.shape) for each in model])
    return [each.expand((*extra, *each.shape)) for each in parts]


def _estimate(value: Tensor, samples: int | None = None, **_: Any) -> Any:
    if samples is None:
        return value
    return Estimate(value, None if samples == 1 else value, samples)


def _gradient_and_laplacian(at: _At, *, batch_ndim: int = 1, **_: Any) -> Any:
    single = at.value.shape[batch_ndim:].numel() == 1
    return at.slopes[0] if single else _outer(at.value, at.slopes[0], batch_ndim), at.result


def _penalty(at: _At, *_: Any, reduction: str = "mean", batch_ndim: int = 1, **__: Any) -> Tensor:
    rows = _rows(at.slopes[0], batch_ndim).sum(-1)
    return rows if reduction == "none" else rows.sum()


class _Derivatives:
    def __init__(self, u: Tensor, x: Tensor, *, batch_ndim: int = 1) -> None:
        self.result = u + x.sum()

    def __getitem__(self, index: Any) -> Tensor:
        _note(_length(index), 0)
        return self.result


def _length(index: Any) -> int:
    return 1 if isinstance(index, int) else len(index)


def _orders(series: Any) -> int:
    return len(series if isinstance(series[0], Tensor) else series[0])


CALCULUS = {
    "grad": (1, lambda at, **_: at.like(at.slopes)),
    "value_and_grad": (1, lambda at, **_: at.like(at.slopes)),
    "vjp": (1, lambda at, u, **_: at.like(_stacked(at.slopes, u, at.outputs))),
    "jvp": (
        1,
        lambda at, v, **_: trees.tree_unflatten(
            _stacked(trees.tree_leaves(at.result), v, at.x), at.form
        ),
    ),
    "jacobian": (
        1,
        lambda at, **options: _blocks(
            at, at.outputs, lambda parts: trees.tree_unflatten(parts, at.form), **options
        ),
    ),
    "per_sample_grad": (
        1,
        lambda at, batch, **_: at.like([_outer(at.value, each, 0) for each in at.slopes]),
    ),
    "gram": (1, lambda at, batch, **_: _outer(at.value, at.value, 0)),
    "hvp": (2, lambda at, v, **_: at.plus(v)),
    "cross_hvp": (2, lambda at, y, v, **_: at.like(_stacked(at.slopes, v, trees.tree_leaves(y)))),
    "hessian": (2, lambda at, **options: _blocks(at, at.slopes, at.like, **options)),
    "cross_hessian": (
        2,
        lambda at, y, batch_ndim=0, **_: at.like(
            [trees.tree_map(lambda b, a=a: _outer(a, at.plus(b), batch_ndim), y) for a in at.slopes]
        ),
    ),
    "hessian_diagonal": (2, lambda at, **_: at.like(at.slopes)),
    "value_grad_and_hessian": (
        2,
        lambda at, **options: (at.like(at.slopes), _blocks(at, at.slopes, at.like, **options)),
    ),
    "nth_derivative": (lambda n: n, lambda at, n, **_: at.result),
    "derivatives": (lambda n: n, lambda at, n, **_: tuple(at.result for _ in range(n + 1))),
}
"""Of each the order, which its first argument beside `f` and the point may say, and the form."""

LOSSES = {
    "laplacian": (2, lambda at, **options: _estimate(at.result, **options)),
    "value_grad_and_laplacian": (2, _gradient_and_laplacian),
    "second_order_operator": (2, lambda at, *_, **__: at.result),
    "biharmonic": (4, lambda at, **_: at.result),
    "partial": (_length, lambda at, index, **_: at.result),
    "partials": (
        lambda indices: max(map(_length, indices)),
        lambda at, indices, **_: tuple(at.result for _ in indices),
    ),
    **dict.fromkeys(
        ("divergence", "value_and_divergence"),
        (1, lambda at, batch_ndim=1, **options: _estimate(
            _rows(at.result, batch_ndim).sum(-1), **options)),
    ),
    "jet": (
        _orders, lambda at, series, **_: (at.value, [at.result for _ in range(_orders(series))]),
    ),
    "curl": (1, lambda at, **_: at.result if at.value.shape[-1] == 3 else at.result[..., 0]),
    "hessian_penalty": (
        2, lambda at, reduction="max", **_: at.result if reduction == "none" else at.result.sum()
    ),
    "sliced_score_matching_loss": (2, _penalty),
    **dict.fromkeys(
        ("gradient_penalty", "eikonal_penalty", "wgan_gp_penalty", "dragan_penalty", "r1_penalty",
         "r2_penalty", "gradient_norm_penalty", "jacobian_penalty", "curvature_penalty"),
        (1, _penalty),
    ),
}  # fmt: skip
"""Those whose results have their graph unless they are asked for without."""

OTHERS = {
    "derivatives_of": lambda u, x, **_: _Derivatives(u, x),
    "sample_norm": lambda grads, batch_ndim=1, **_: sum(
        _rows(each, batch_ndim).sum(-1) for each in trees.tree_leaves(grads)
    ),
    "interpolate": lambda a, b, **_: trees.tree_map(torch.add, a, b),
}


def _shadow(name: str, order: Any, form: Callable[..., Any], records: bool) -> Callable[..., Any]:
    parameters = inspect.signature(getattr(hodiff, name)).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    passed = name in ("per_sample_grad", "gram", "cross_hvp", "cross_hessian")
    valued = name.startswith("value_")

    def shadow(
        *given,
        has_aux=False,
        create_graph=None,
        return_outputs=False,
        args=(),
        kwargs=None,
        **options,
    ):
        f, x, *others = (
            *given,
            *[options.pop(each) for each in names[len(given) :] if each in options],
        )
        if name == "jet" and isinstance(x, (tuple, list)):
            f = lambda point, of=f: of(*point)  # noqa: E731
        nested = _note(order if isinstance(order, int) else order(others[0]), 1)
        at = _At(f, x, (*others[:passed], *args), kwargs, has_aux, (others, options))
        _note(0, -1)
        with torch.enable_grad():
            result = form(at, *others, **options)
        value = (at.value, at.aux) if has_aux else at.value
        if valued:
            result = (value, *result) if name.startswith("value_grad_and_") else (value, result)
        elif has_aux or return_outputs:
            result = result, at.aux if has_aux else at.value
        default = (records or nested) and torch.is_grad_enabled()
        if not (default if create_graph is None else create_graph):
            return trees.tree_map(
                lambda each: each.detach() if isinstance(each, Tensor) else each, result
            )
        return result

    return shadow


def _stand(name: str, shadow: Callable[..., Any]) -> None:
    """Let Dynamo follow a shadow where it meets the function of that name."""

    def followed(*given, **options):
        _need(_is_on())
        return shadow(*given, **options)

    torch.compiler.substitute_in_graph(getattr(hodiff, name), skip_signature_check=True)(followed)


SHADOWS = {name: _shadow(name, *form, records=False) for name, form in CALCULUS.items()}
SHADOWS |= {name: _shadow(name, *form, records=True) for name, form in LOSSES.items()} | OTHERS

for each in SHADOWS:
    _stand(each, SHADOWS[each])
