"""What estimators and `cost` return: small frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from hodiff.curvature._memory import readable

V = TypeVar("V")
Status = Literal["converged", "negative curvature", "budget", "stagnation", "iterations", "running"]
End = Literal["interior", "boundary", "negative curvature", "budget"]


@dataclass(frozen=True)
class TraceRecord:
    """An estimated trace.

    Attributes:
        value: The estimate, a tensor without dimensions.
        stderr: Its standard error (zero where the trace is exact).
        converged: Whether the tolerance was reached; True where none was asked for.
        products: How many products it took.
    """

    value: Tensor
    stderr: Tensor
    converged: bool
    products: int


@dataclass(frozen=True)
class DiagonalRecord:
    """A diagonal, estimated or exact.

    Attributes:
        value: The diagonal, like the point.
        stderr: The standard error of each entry, likewise (zero where exact).
        converged: Whether the tolerance was reached; True where none was asked for.
        products: How many products it took.
    """

    value: Any
    stderr: Any
    converged: bool
    products: int


@dataclass(frozen=True)
class EigenRecord:
    """Some eigenpairs.

    Attributes:
        value: The eigenvalues, `(k,)`: the one asked for first comes first. Complex from `eigs`.
        vectors: The eigenvectors as columns, `(D, k)`, of length 1, and orthogonal where the operator is symmetric;
            `A.unflatten(vectors)` shapes real ones.
        residual: |A x - λ x| of each pair, `(k,)`, computed from products (in what a callback is given, estimated).
        converged: Whether every residual is within the tolerance; None while it runs.
        products: How many products it took.
    """

    value: Tensor
    vectors: Tensor
    residual: Tensor
    converged: bool | None
    products: int


@dataclass(frozen=True)
class RadiusRecord:
    """A spectral radius.

    Attributes:
        value: The largest magnitude of an eigenvalue, a tensor without dimensions.
        residual: |A x - λ x| of that eigenpair, likewise.
        converged: Whether the residual is within the tolerance; None while it runs.
        products: How many products it took.
    """

    value: Tensor
    residual: Tensor
    converged: bool | None
    products: int


@dataclass(frozen=True)
class SolveRecord(Generic[V]):
    """The solution of a linear system.

    Attributes:
        value: The solution, in the spelling of the right-hand side.
        residual: |b - A x| / |b|, computed from a product at the end; where a number of iterations was asked for,
            and in what a callback is given, by the method's own recurrence.
        converged: Whether that is within the tolerance; None where none was asked for.
        products: How many products it took.
        status: `"converged"`, `"negative curvature"` (CG met d with d'A d <= 0), `"budget"` (the products
            ran out), `"stagnation"` (rounding, or a singular system, allows no better), `"iterations"` (as many
            as were asked for) or, for a callback, `"running"`.
        direction: The d of negative curvature, where CG met one; else None.
    """

    value: V
    residual: float
    converged: bool | None
    products: int
    status: Status
    direction: V | None = None


@dataclass(frozen=True)
class NewtonRecord:
    """What one step of `NewtonCG` did.

    Attributes:
        value: The loss before.
        decrease: By how much it fell; 0 where the step was refused.
        ratio: What came true of the decrease that the model promised; -inf where the loss was not finite there.
        accepted: Whether the step was taken; if not, the parameters are as they were.
        radius: The radius of the next step.
        products: How many products it took.
        end: `"interior"` (a Newton step), `"boundary"` (the radius bound it), `"negative curvature"` or
            `"budget"` (the products ran out).
    """

    value: float
    decrease: float
    ratio: float
    accepted: bool
    radius: float
    products: int
    end: End


@dataclass(frozen=True)
class Cost:
    """What an operator takes, in bytes, evaluations of the function, and reverse passes.

    Attributes:
        size: The number of columns, D.
        dense_bytes: The matrix of `dense()`.
        product_bytes: One product: its result, and about its temporaries.
        cache_bytes: The graphs of all batches, if kept; measured on one batch before the first product.
        free_bytes: What is free on the device.
        batches: How many batches there are; None if that is unknown.
        kept: How many of them have their graph kept.
        evaluations: Graphs of the function per product.
        passes: Reverse passes per product.
        dense_passes: Reverse passes of `dense()`, batched ones counted once.
    """

    size: int
    dense_bytes: int
    product_bytes: int
    cache_bytes: int
    free_bytes: int
    batches: int | None
    kept: int
    evaluations: int
    passes: int
    dense_passes: int

    def __str__(self) -> str:
        return (
            f"dense(): {readable(self.dense_bytes)}, {self.dense_passes} passes\n"
            f"one product: {readable(self.product_bytes)}, {self.evaluations} evaluations, {self.passes} passes\n"
            f"cache: {readable(self.cache_bytes)}, {self.kept} of {self.batches} batches kept\n"
            f"free: {readable(self.free_bytes)}"
        )
