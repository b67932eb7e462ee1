"""`nystrom`: an approximate inverse of A + μ I from a few products, as a preconditioner."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from hodiff._core import _checks, _random_vectors, _reverse
from hodiff.curvature._operator import BlockOperator, LinearOperator
from hodiff.curvature._probes import check_square, flat_product, power_of_two, source
from hodiff.curvature._space import Parts, Space, as_given, sum_dtype
from hodiff.errors import InputError


def nystrom(
    operator: LinearOperator, rank: int, shift: float, *, generator: torch.Generator | None = None
) -> LinearOperator:
    r"""A preconditioner for \(A + \mu I\): exact on the largest eigenvalues, a multiple of the identity beside them.

    From \(r\) random vectors \(\Omega\) comes Nyström's approximation
    \(A \approx A\Omega\,(\Omega^\top A \Omega)^{-1} \Omega^\top A = U \Lambda U^\top\), and from that
    \(P^{-1} = U(\Lambda + \mu)^{-1}U^\top + (\lambda_r + \mu)^{-1}(I - UU^\top)\). Where *r* exceeds about twice the
    number of eigenvalues above \(\mu\), conjugate gradients take a few steps, whatever the condition of *A*.

    Args:
        operator: A symmetric positive semidefinite operator.
        rank: The \(r\): how many random vectors.
        shift: The \(\mu\), positive: the `damping` that `hodiff.solve` is given.
        generator: Where the vectors are drawn from; None is the default generator of the operator's device.

    Returns:
        An operator, symmetric and positive definite, of the same shape, to be given as
        `hodiff.solve(A, b, damping=shift, preconditioner=...)`, again and again.

    Raises:
        InputError: The operator is not symmetric or found not to be semidefinite, `rank` exceeds its columns, or
            `shift` is not positive.

    Cost:
        `rank` products, once. Memory: `rank` vectors. Each application: two products with a `(D, rank)` matrix.

    Examples:
        Eigenvalues that fall from 1e6 to nothing, of which some 150 are above the shift:

        >>> import torch, hodiff
        >>> A = hodiff.MatrixOperator(1e6 * 0.9 ** torch.arange(1000, dtype=torch.float64))
        >>> P = hodiff.nystrom(A, 200, 0.1, generator=torch.Generator().manual_seed(0))
        >>> hodiff.solve(A, torch.ones(1000).double(), damping=0.1, preconditioner=P).products < 10
        True

        Without it the same takes more than a thousand.

    Reference:
        Frangella, Z., Tropp, J. A., Udell, M. (2023). Randomized Nyström preconditioning. SIAM J. Matrix Anal. Appl.
        44(2). doi:10.1137/21M1466244.
    """
    operator = check_square(operator, "nystrom", symmetric=True, instead="a preconditioner of your own")
    size = operator.shape[0]
    if _checks.check_integer(rank, "rank", least=1) > size:
        raise InputError(f"rank: got {rank}, and the operator has {size} columns.")
    if not _checks.is_number(shift) or shift <= 0:
        raise InputError(f"shift: got {shift!r}, expected a positive number: the damping of the system.")
    _random_vectors.check_generator(generator)
    like = operator._domain.zeros_flat(0).to(sum_dtype(operator.dtype))
    rows = _random_vectors.draw((rank, size), like, "gaussian", source(operator, generator))
    omega, _ = torch.linalg.qr(rows.T)
    vectors, values = _approximated(omega, flat_product(operator, omega.T).T, operator.dtype)
    return NystromOperator(operator._domain, vectors, values, float(shift), operator._live)


def _approximated(omega: Tensor, images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The eigenvectors, as columns, and eigenvalues of Nyström's approximation, falling."""
    double = images.dtype if images.device.type == "mps" else torch.float64
    unit = power_of_two(images) or 1.0
    omega, images = omega.to(double), images.to(double) / unit
    nu = float(torch.finfo(dtype).eps * images.norm())
    if nu == 0:
        return omega, images.new_zeros(omega.shape[1])
    y = images + nu * omega  # a definite matrix, whose eigenvalues are larger by nu
    inner = omega.T @ y
    factor, failed = torch.linalg.cholesky_ex((inner + inner.T) / 2, upper=True)
    if int(failed):
        raise InputError(
            "nystrom: is for positive semidefinite operators, and this one has a direction of negative curvature; take "
            "hodiff.GaussNewtonOperator, or method='minres' without a preconditioner."
        )
    half = torch.linalg.solve_triangular(factor, y, upper=True, left=False)
    vectors, roots, _ = torch.linalg.svd(half, full_matrices=False)
    return vectors, (roots.square() - nu).clamp_min(0) * unit


@final
class NystromOperator(LinearOperator):
    """U (Λ + μ)⁻¹ U' + (I - U U') / (λ + μ), with the last λ."""

    def __init__(self, domain: Space, vectors: Tensor, values: Tensor, shift: float, live: str) -> None:
        super().__init__()
        self._space = domain
        self._shift = shift
        self._own = live
        dtype = sum_dtype(domain.dtype)
        self._vectors = vectors.to(dtype)
        self._rest = 1 / (float(values[-1]) + shift)
        self._beyond = (1 / (values + shift) - self._rest).to(dtype)

    @property
    def _domain(self) -> Space:
        return self._space

    @property
    def _range(self) -> Space:
        return self._space

    @property
    def symmetric(self) -> bool:
        """Always."""
        return True

    def _multiply(self, parts: Parts, count: int | None) -> Parts:
        rows = self._space.join(parts, count).to(self._vectors.dtype)
        with as_given(rows):
            found = self._rest * rows + ((rows @ self._vectors) * self._beyond) @ self._vectors.T
        return self._space.split(found.to(self._space.dtype))

    def _transposed(self) -> LinearOperator:
        return self

    def _chunk(self, count: int) -> int:
        return max(1, _reverse.CHUNK_BYTES // (4 * self._space.size * self._vectors.element_size()))

    def _blocked(self, chosen: list[int]) -> LinearOperator:
        return BlockOperator(self, chosen)

    def _about(self) -> str:
        return f"rank {self._vectors.shape[1]}, shift {self._shift:g}"
