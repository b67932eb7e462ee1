"""Operators and what is estimated from them, against matrices made by `torch.func`."""

import copy
import math
from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hodiff
from tests.support.inputs import Expression, direction, expressions, values
from tests.support.laws import Setting, hessian, jacobian, law, like, rows, settings
from tests.support.oracle import flatten
from tests.support.properties import agree

D = torch.float64
matrices = st.tuples(st.integers(1, 5), st.integers(0, 2**16)).map(
    lambda drawn: torch.randn(drawn[0], drawn[0], dtype=D, generator=torch.Generator().manual_seed(drawn[1]))
)


@law("HessianOperator", says="H as a matrix, Hv, and the gradient beside it")
@given(setting=settings(), budget=st.sampled_from([0.0, 0.5]))
def test_hessian_operator(setting: Setting, budget: float) -> None:
    operator, H = hodiff.HessianOperator(setting.f, setting.where, memory_budget=budget), hessian(setting)
    v = direction(setting.x)
    agree(operator.dense(), H, floor=1e-10)
    agree(flatten(operator @ like(setting, v)), H @ v, floor=1e-10)
    agree(operator @ v, H @ v, floor=1e-10)


@law("LevenbergMarquardt", says="a step is the damped one of J, bent or not, and lowers the loss, or is undone")
@given(setting=settings(outputs=True), search=st.booleans(), damping=st.sampled_from([1e-4, 0.1, 10.0]))
def test_levenberg_marquardt(setting: Setting, search: bool, damping: float) -> None:
    J, r = jacobian(setting), setting.flat(setting.x).reshape(-1)
    where = copy.deepcopy(setting.where)
    optimizer = hodiff.LevenbergMarquardt(setting.f, where, search=search, damping=damping)
    optimizer.step()
    last, squares = optimizer.last, J.square().sum(0).max()
    assert last is not None
    damped = J.T @ J + last.damping * (squares or 1.0) * torch.eye(J.shape[1], dtype=D)
    step = -torch.linalg.solve(damped, J.T @ r) * last.length if last.accepted else torch.zeros(J.shape[1], dtype=D)
    tensors = dict(where.named_parameters()) if isinstance(where, nn.Module) else where
    change = flatten(tensors).detach() - setting.x
    at = lambda change: setting.flat(setting.x + change).reshape(-1)
    if search:  # along a path that is bent
        assert last.accepted or not change.any()
    else:
        gain = float(r @ r - at(step) @ at(step)) / 2
        promised = -float((J.T @ r) @ step + (J @ step) @ (J @ step) / 2)
        bend = -torch.linalg.solve(damped, J.T @ (at(step) - r - J @ step))
        # What keeps less than three quarters of the promise is tried bent, and taken so where that is better.
        closer = (change - step - bend).norm() < (change - step).norm()
        bent = last.accepted and gain < 0.75 * promised and bool(closer)
        agree(change, step + bend if bent else step, floor=1e-8)
        assert not bent or at(change) @ at(change) <= at(step) @ at(step)
    after = at(change)
    assert float(after @ after) <= float(r @ r) * (1 + 1e-9) + 1e-20


@law("JacobianOperator", says="Jv and Jᵀu over several batches")
@given(setting=settings(outputs=True))
def test_jacobian_operator(setting: Setting) -> None:
    batches = [(torch.tensor(1.5, dtype=D),), (torch.tensor(-0.5, dtype=D),)]
    predict = lambda w, batch: setting.f(w).reshape(1, -1) * batch[0]
    operator = hodiff.JacobianOperator(predict, setting.where, data=batches)
    J = jacobian(setting)
    whole = torch.cat([J * 1.5, J * -0.5])
    v, u = direction(setting.x), direction(whole[:, 0].clone(), seed=4)
    agree((operator @ v).reshape(-1), whole @ v, floor=1e-10)
    agree(flatten(operator.T @ u), u @ whole, floor=1e-10)


def _readings(setting: Setting, classes: int = 3) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Two batches of weights and labels, and the Jacobian of the logits `(5, classes, D)`."""
    J = jacobian(setting)
    weights = torch.randn(5, classes, J.shape[0], dtype=D, generator=torch.Generator().manual_seed(3))
    labels = torch.tensor([0, 2, 1, 1, 0])
    return [(weights[:3], labels[:3]), (weights[3:], labels[3:])], weights @ J


def _logits(setting: Setting) -> object:
    return lambda w, batch: batch[0] @ setting.f(w).reshape(-1)


@law("GaussNewtonOperator", says="Jᵀ H_loss J, the mean over two batches")
@given(setting=settings(outputs=True))
def test_gauss_newton(setting: Setting) -> None:
    batches, J = _readings(setting)
    loss = lambda outputs, batch: ((outputs**4).sum() / 12, outputs.shape[0])
    operator = hodiff.GaussNewtonOperator(_logits(setting), loss, setting.where, data=batches)
    logits = torch.cat([w for w, _ in batches]) @ setting.flat(setting.x).reshape(-1)
    expected = torch.einsum("ncd,nc,nce->de", J, logits**2, J) / 5
    agree(operator.dense(), expected, floor=1e-9)


@law("FisherOperator", says="Jᵀ (diag p - p pᵀ) J for a cross-entropy, the mean over two batches")
@given(setting=settings(outputs=True))
def test_fisher(setting: Setting) -> None:
    batches, J = _readings(setting)
    operator = hodiff.FisherOperator(_logits(setting), nn.CrossEntropyLoss(), setting.where, data=batches, kind="exact")
    p = torch.softmax(torch.cat([w for w, _ in batches]) @ setting.flat(setting.x).reshape(-1), 1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    agree(operator.dense(), torch.einsum("ncd,nck,nke->de", J, inner, J) / 5, floor=1e-9)


@law("per_sample_grad", says="the Jacobian of the losses, each by its own sample")
@given(setting=settings(outputs=True), chunk=st.sampled_from([1, 2, "auto"]))
def test_per_sample_grad(setting: Setting, chunk: int | Literal["auto"]) -> None:
    J = jacobian(setting)
    weights = torch.randn(5, J.shape[0], dtype=D, generator=torch.Generator().manual_seed(3))
    losses = lambda w, batch: (batch @ setting.f(w).reshape(-1)).sin()
    found = hodiff.per_sample_grad(losses, setting.where, weights, chunk_size=chunk)
    slopes = (weights @ setting.flat(setting.x).reshape(-1)).cos()
    agree(rows(found, 5), slopes[:, None] * (weights @ J), floor=1e-10)


@law("gram", says="J Jᵀ of several numbers for each sample")
@given(setting=settings(outputs=True), numbers=st.sampled_from([1, 2]))
def test_gram(setting: Setting, numbers: int) -> None:
    J = jacobian(setting)
    weights = torch.randn(5, numbers, J.shape[0], dtype=D, generator=torch.Generator().manual_seed(3))
    losses = lambda w, batch: (batch @ setting.f(w).reshape(-1)).sin()
    slopes = (weights @ setting.flat(setting.x).reshape(-1)).cos()
    rows = slopes[:, :, None] * (weights @ J)
    expected = torch.einsum("nkp,mlp->nkml", rows, rows)
    result = hodiff.gram(losses, setting.where, weights)
    agree(result.view_as(expected), expected, floor=1e-10)


@law("MatrixOperator", says="A v, Aᵀv, A", oracle="matrix products")
@law("LinearOperator", says="2A - BAᵀ + 0.3, its products and its transpose", oracle="matrix products")
@given(A=matrices)
def test_algebra(A: Tensor) -> None:
    operator, v = hodiff.MatrixOperator(A), direction(A[0])
    B = A.flip(0) * 0.5
    agree((operator @ v, operator.T @ v, operator.dense()), (A @ v, A.T @ v, A))
    combined = 2 * operator - hodiff.MatrixOperator(B) @ operator.T + 0.3
    expected = 2 * A - B @ A.T + 0.3 * torch.eye(len(A), dtype=D)
    agree(combined.dense(), expected, floor=1e-10)
    agree(combined @ v, expected @ v, floor=1e-10)
    agree(combined.T @ v, expected.T @ v, floor=1e-10)


@law("trace", says="the trace of H, from all unit vectors")
@law("diagonal", says="the diagonal of H, from all unit vectors")
@law("eigsh", says="the eigenvalues of H at both ends, and H w = λ w")
@law("solve", says="(H + c)⁻¹ b, and the same of several b")
@law("logdet", says="log det (H + c)")
@given(setting=settings())
def test_estimates(setting: Setting) -> None:
    operator, H = hodiff.HessianOperator(setting.f, setting.where), hessian(setting)
    n = len(H)
    units = torch.eye(n, dtype=D)
    if n > 1:  # several vectors, to tell the error from their spread
        vectors = units * math.sqrt(n)  # whose outer products have the mean 1
        agree(torch.as_tensor(hodiff.trace(operator, vectors=vectors).value, dtype=D), H.trace(), floor=1e-9)
        agree(flatten(hodiff.diagonal(operator, vectors=vectors).value), H.diagonal().clone(), floor=1e-9)
    values = torch.linalg.eigvalsh(H)
    for which, expected in (("largest", values[-1]), ("smallest", values[0])):
        found = hodiff.eigsh(operator, 1, which=which, generator=torch.Generator().manual_seed(1))
        agree(found.value.reshape(()), expected.clone(), 1e-5, 1e-6 * float(1 + values.abs().max()))
    shift = 1.5 * float(values.abs().max()) + 0.5
    b = direction(setting.x)
    solution = hodiff.solve(operator + shift, b)
    agree(flatten(solution.value), torch.linalg.solve(H + shift * units, b), 1e-4, 1e-6)
    several = torch.stack([b, -2 * b, direction(setting.x, seed=6)], 1)
    solutions = hodiff.solve(operator + shift, several)
    agree(solutions.value, torch.linalg.solve(H + shift * units, several), 1e-4, 1e-6)
    assert solutions.converged.tolist() == [True] * 3
    found = hodiff.logdet(operator, shift=shift, generator=torch.Generator().manual_seed(1))
    agree(torch.as_tensor(found.value, dtype=D), torch.logdet(H + shift * units), 1e-6, 1e-6)


@law("MatrixOperator", says="a stack of matrices: the solutions, traces and log-determinants of each")
@given(
    seed=st.integers(0, 2**16),
    batch=st.lists(st.integers(0, 3), max_size=2),
    size=st.integers(1, 6),
    count=st.integers(1, 3),
    dense=st.booleans(),
)
def test_stacks(seed: int, batch: list[int], size: int, count: int, dense: bool) -> None:
    source = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=D, generator=source)
    A = normal(*batch, size, size)
    A = A @ A.mT + torch.eye(size, dtype=D)
    operator, b = hodiff.MatrixOperator(A, batch_ndim=len(batch)), normal(count, *batch, size)
    options = {} if dense else {"callback": lambda record: None}  # who looks on sees iterations
    found = hodiff.solve(operator, [b], rtol=1e-11, **options)
    agree(found.value[0], torch.linalg.solve(A, b.unsqueeze(-1)).squeeze(-1), 1e-6, 1e-8)
    assert bool(torch.as_tensor(found.converged).all()) and found.residual.shape == (count, *batch)
    agree(hodiff.logdet(operator).value, torch.logdet(A), 1e-8, 1e-8)
    agree(hodiff.trace(operator).value, A.diagonal(dim1=-2, dim2=-1).sum(-1), 1e-9)


@law("solve", says="its derivatives by matrix, right-hand side and damping", oracle="`torch.linalg.solve`")
@law("solve", says="bases of any length; and the terms of a Neumann series", oracle="`torch.linalg.solve`, a loop")
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 6),
    restart=st.integers(1, 7),
    steps=st.integers(0, 5),
    scale=st.floats(0.7, 3),
)
def test_solutions(seed: int, size: int, restart: int, steps: int, scale: float) -> None:
    source = torch.Generator().manual_seed(seed)
    A, b, v = (torch.randn(*shape, dtype=D, generator=source) for shape in ((size, size), (size,), (size,)))
    near = torch.eye(size, dtype=D) + 0.4 * A / torch.linalg.matrix_norm(A, 2)
    leaves = [part.requires_grad_() for part in (near, b, torch.tensor(0.2, dtype=D))]

    def derivatives(x: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(x.pow(3) @ v, leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(part.square().sum() for part in first), leaves)]

    operator, damping = hodiff.MatrixOperator(near, symmetric=False), leaves[2]
    options = {"method": "gmres", "restart": restart, "rtol": 1e-12, "damping": damping, "create_graph": True}
    found = hodiff.solve(operator, b, **options).value
    expected = torch.linalg.solve(near + damping * torch.eye(size, dtype=D), b)
    agree(found.detach(), expected.detach(), 1e-8, 1e-9)
    for one, other in zip(derivatives(found), derivatives(expected), strict=True):
        agree(one.detach(), other.detach(), 1e-6, 1e-7)
    with torch.no_grad():
        terms = b / scale
        for _ in range(steps):
            terms = terms + (b - near @ terms) / scale
        agree(hodiff.solve(operator, b, method="neumann", iterations=steps, scale=scale).value, terms, 1e-9, 1e-12)


@law("trace", says="its derivatives by the matrix", oracle="`torch.linalg`")
@law("diagonal", says="its derivatives by the matrix", oracle="`torch.linalg`")
@law("logdet", says="its derivatives by the matrix and by shift", oracle="`torch.linalg`")
@law("eigsh", says="its two derivatives by the matrix", oracle="`torch.linalg.eigvalsh`")
@given(seed=st.integers(0, 2**16), size=st.integers(2, 6))
def test_derivatives_of_estimates(seed: int, size: int) -> None:
    source = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=D, generator=source)).Q
    leaf = (basis * torch.arange(1.0, size + 1, dtype=D)) @ basis.T  # eigenvalues apart
    leaf, shift = leaf.requires_grad_(), torch.tensor(0.3, dtype=D, requires_grad=True)
    w, units = torch.randn(size, dtype=D, generator=source), torch.eye(size, dtype=D)
    A = (leaf + leaf.T) / 2
    operator = hodiff.MatrixOperator(A, symmetric=True)
    vectors = units * math.sqrt(size)
    draw = lambda: torch.Generator().manual_seed(1)
    values = torch.linalg.eigvalsh(A)
    pairs = [
        (hodiff.trace(operator, vectors=vectors, create_graph=True).value, A.trace()),
        (hodiff.diagonal(operator, vectors=vectors, create_graph=True).value @ w, A.diagonal() @ w),
        (
            hodiff.logdet(operator, shift=shift, generator=draw(), create_graph=True).value,
            torch.logdet(A + shift * units),
        ),
        (hodiff.eigsh(operator, 1, rtol=1e-10, generator=draw(), create_graph=True).value.sum(), values[-1]),
    ]
    for bends, (found, expected) in zip([False, False, True, True], pairs, strict=True):
        agree(found.detach(), expected.detach(), 1e-6, 1e-8)
        first = [torch.autograd.grad(x, leaf, create_graph=True)[0] for x in (found, expected)]
        agree(first[0].detach(), first[1].detach(), 1e-6, 1e-7)
        if bends:
            bent = [(g * g.detach().sin()).sum() for g in first]
            second = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in bent]
            agree(second[0], second[1], 1e-5, 1e-6)


@law("solve", says="exactly so many steps of conjugate gradients", oracle="a loop")
@given(seed=st.integers(0, 2**16), size=st.integers(1, 6), steps=st.integers(1, 6))
def test_iterations(seed: int, size: int, steps: int) -> None:
    source = torch.Generator().manual_seed(seed)
    A, b = (torch.randn(*shape, dtype=D, generator=source) for shape in ((size, size), (size,)))
    A = A @ A.T + torch.eye(size, dtype=D)
    x, r = torch.zeros_like(b), b.clone()
    p = r.clone()
    for _ in range(min(steps, size)):
        if r.norm() < 1e-12 * b.norm():
            break
        alpha = r @ r / (p @ A @ p)
        x, rest = x + alpha * p, r - alpha * A @ p
        p, r = rest + (rest @ rest) / (r @ r) * p, rest
    found = hodiff.solve(hodiff.MatrixOperator(A, symmetric=True), b, method="cg", iterations=steps)
    agree(found.value, x, 1e-7, 1e-9)


@law("HessianOperator", says="the Hessian of each sample; the sum over all data, whatever the weights")
@law("JacobianOperator", says="the Jacobian of each sample")
@given(f=expressions(roll=False, leaves=3), x=values((3, 4)), weight=st.floats(0.1, 10))
def test_samples(f: Expression, x: Tensor, weight: float) -> None:
    outputs = lambda z: f(z) * z.sum(-1, keepdim=True).sin()
    g = lambda z: outputs(z).sum(-1) + z.square().sum(-1)
    H = torch.func.vmap(torch.func.jacrev(torch.func.grad(g)))(x)
    agree(hodiff.HessianOperator(g, x, batch_ndim=1).dense(), H, floor=1e-9)
    J = torch.func.vmap(torch.func.jacrev(lambda z: outputs(z) + z))(x)
    agree(hodiff.JacobianOperator(lambda z: outputs(z) + z, x, batch_ndim=1).dense(), J, floor=1e-9)
    pair = lambda z, factor: (g(z) * factor, weight)
    data = [torch.tensor(1.5, dtype=D), torch.tensor(-0.5, dtype=D)]
    agree(hodiff.HessianOperator(pair, x[0], data=data, reduction="sum").dense(), H[0], floor=1e-9)


@law("sparse_hessian", says="H, of a function whose entries meet their neighbors")
@law("sparse_jacobian", says="J of the same")
@given(f=expressions(roll=False, leaves=3), g=expressions(roll=False, leaves=3), x=values((7,)))
def test_sparse_matrices(f: Expression, g: Expression, x: Tensor) -> None:
    chain = lambda z: f(z[1:]) * torch.sin(g(z[:-1])) + z[1:] * z[:-1]
    H = torch.func.jacrev(torch.func.grad(lambda z: chain(z).sum()))(x)
    agree(hodiff.sparse_hessian(lambda z: chain(z).sum(), x).to_dense(), H, floor=1e-9)
    agree(hodiff.sparse_jacobian(chain, x).to_dense(), torch.func.jacrev(chain)(x), floor=1e-9)
