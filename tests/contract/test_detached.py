"""Never a constant silently: detached results of what requires grad warn, once for each line that calls."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import hodiff
import hodiff.curvature._operator as detaching

D = torch.float64
K = torch.tensor([[4.0, 1.0, 0.0], [1.0, 3.0, 0.5], [0.0, 0.5, 2.0]], dtype=D)
ODD = K + torch.tensor([[0.0, 0.3, 0.0], [0.0, 0.0, 0.2], [0.0, 0.0, 0.0]], dtype=D)
POINT = torch.tensor([0.5, -0.25, 1.0], dtype=D)
ONES = torch.ones(3, dtype=D)
Operator = hodiff.LinearOperator


def tensor(value: Tensor, live: bool) -> Tensor:
    return value.clone().requires_grad_(live)


def point(live: bool) -> Tensor:
    """One that was computed from something that requires grad, or a leaf, which does not count."""
    leaf = POINT.clone().requires_grad_()
    return leaf * 1 if live else leaf


def quadratic(x: Tensor) -> Tensor:
    return x @ K @ x / 2 + (x**4).sum() / 12


def forward(x: Tensor, batch: Tensor) -> Tensor:
    return batch @ x


def squares(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return (outputs**2).sum() / 2, 1


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


OPERATORS: dict[str, Callable[[bool], Operator]] = {
    "matrix": lambda live: hodiff.MatrixOperator(tensor(K, live)),
    "its transpose": lambda live: hodiff.MatrixOperator(tensor(ODD, live)).T,
    "diagonal": lambda live: hodiff.MatrixOperator(tensor(K.diagonal(), live)),
    "Hessian": lambda live: hodiff.HessianOperator(quadratic, point(live)),
    "Hessian, container": lambda live: hodiff.HessianOperator(
        lambda p: quadratic(p["x"]) + p["y"].square().sum(), {"x": POINT, "y": point(live)}
    ),
    "Hessian, tensor form": lambda live: hodiff.HessianOperator(quadratic(x := point(live)), x),
    "Gauss-Newton": lambda live: hodiff.GaussNewtonOperator(forward, squares, point(live), data=[K]),
    "Fisher": lambda live: hodiff.FisherOperator(
        lambda x, batch: batch[0] @ x, nn.MSELoss(), point(live), data=[(K, ONES)], kind="exact"
    ),
    "Jacobian": lambda live: hodiff.JacobianOperator(forward, point(live), data=[ODD]),
    "Jacobian, transposed": lambda live: hodiff.JacobianOperator(forward, point(live), data=[ODD]).T,
    "sum": lambda live: hodiff.MatrixOperator(K) + OPERATORS["Hessian"](live),
    "shift": lambda live: 2 * OPERATORS["matrix"](live) + 0.1,
    "product": lambda live: (A := hodiff.MatrixOperator(tensor(ODD, live))) @ A.T,
    "block": lambda live: OPERATORS["Hessian, container"](live).block("x"),
    "block of a product": lambda live: (OPERATORS["Hessian"](live) @ hodiff.MatrixOperator(K)).block("x"),
    "preconditioner": lambda live: hodiff.nystrom(OPERATORS["matrix"](live), 2, 0.1, generator=generator()),
}  # fmt: skip
"""For each class one that is made of something that requires grad, or is not."""


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def ones(A: Operator) -> Tensor:
    return torch.ones(A.shape[1], dtype=D)


def solve(A: Operator, b: Any, **options: Any) -> Tensor:
    return hodiff.solve(A, b, method="cg" if A.symmetric else "gmres", **options).value


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "solve": lambda A, **k: solve(A, ones(A), **k),
    "trace": lambda A, **k: hodiff.trace(A, generator=generator(), **k).value,
    "diagonal": lambda A, **k: hodiff.diagonal(A, generator=generator(), **k).value,
    "logdet": lambda A, **k: hodiff.logdet(A, generator=generator(), **k).value,
    "spectral_density": lambda A, **k: hodiff.spectral_density(A, generator=generator(), **k).value,
    "eigsh": lambda A, **k: hodiff.eigsh(A, 1, generator=generator(), **k).value,
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "A @ v": lambda A: A @ ones(A),
    "A.dense()": lambda A: A.dense(),
    "A.to_scipy()": lambda A: A.to_scipy(),
    "A.value": lambda A: A.value,
    "A.gradient": lambda A: A.gradient,
}
SPELLINGS: dict[str, Callable[[Any], Any]] = {
    "u @ A": lambda A: torch.ones(A.shape[0], dtype=D) @ A,
    "A @ several": lambda A: A @ torch.stack([ones(A), ones(A)], 1),
    "A @ like the point": lambda A: A @ A.unflatten(ones(A)),
}
SYMMETRIC = ("logdet", "spectral_density", "eigsh")
RESULTS = {**ESTIMATORS, **METHODS, **SPELLINGS}
NO_RESULT = {
    name: reason
    for reason, names in {
        "an operator, whose products say it": "T block __copy__ __add__ __radd__ __mul__ __rmul__ __truediv__ __neg__ "
        "__sub__ __rsub__",
        "carries the graph of its vector": "flatten unflatten",
        "refused": "__array__ __float__ __getitem__ __pow__ __rtruediv__",
        "no tensors": "symmetric shape dtype device cost refresh close products",
    }.items()
    for name in names.split()
}
LISTED = {"__matmul__", "__rmatmul__", "dense", "to_scipy", "value", "gradient"}
"""The methods of `METHODS` and `SPELLINGS`."""


def classes(kind: type = Operator) -> Iterator[type]:
    for one in kind.__subclasses__():
        if one.__module__.startswith("hodiff.curvature"):
            yield from classes(one)
            if "__final__" in vars(one):
                yield one


def words(name: str) -> str:
    """How the warning of a result begins."""
    return {"A @ v": "A @ v", **dict.fromkeys(SPELLINGS, "A @ v")}.get(name, name)


def applies(operator: str, name: str) -> bool:
    A = OPERATORS[operator](False)
    if name in ("A.value", "A.gradient"):
        return "value" in dir(A) and not (name == "A.gradient" and isinstance(A, hodiff.JacobianOperator))
    return A.symmetric or name not in SYMMETRIC


CELLS = [(operator, name) for operator in OPERATORS for name in RESULTS if applies(operator, name)]
cells = pytest.mark.parametrize(("operator", "name"), CELLS, ids=str)


# --- the table is whole


@pytest.mark.names
def test_every_function_of_an_operator_is_here() -> None:
    taken = {
        name
        for name in hodiff.__all__
        if inspect.isfunction(value := getattr(hodiff, name))
        and next(iter(inspect.signature(value).parameters), "") == "operator"
    }
    assert taken == {*ESTIMATORS, "nystrom"}, "say in ESTIMATORS how each is called"
    for name in ESTIMATORS:
        assert inspect.signature(getattr(hodiff, name)).parameters["create_graph"].default is None
    assert {*ESTIMATORS, *METHODS} == set(detaching.WAYS)


@pytest.mark.names
def test_every_operator_is_here() -> None:
    made = {type(build(False)) for build in OPERATORS.values()}
    assert made == set(classes()), "say in OPERATORS how each is made"


def test_every_method_is_here() -> None:
    found = set()
    for kind in (*classes(), Operator):
        own = {
            n
            for n, v in vars(kind).items()
            if n.startswith("__") and inspect.isfunction(v) and hasattr(object, n) is False
        }
        found |= {name for name in dir(kind) if not name.startswith("_")} | own
    found -= {"__enter__", "__exit__", "__abstractmethods__"}
    assert found == LISTED | NO_RESULT.keys()


# --- what warns, and what does not


@pytest.mark.table()
@cells
def test_a_detached_result_says_so_at_the_line_that_calls(operator: str, name: str) -> None:
    A = OPERATORS[operator](True)
    with pytest.warns(hodiff.HodiffWarning, match="the result is detached, although the") as seen:
        RESULTS[name](A)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert text.startswith(f"{words(name)}: the result is detached, although the ")
    assert "requires grad, so it counts" in text or "has a grad_fn, so it counts" in text
    assert seen[0].filename == __file__
    assert ("create_graph=False" in text.split("say so")[1]) == (name in ESTIMATORS)


@pytest.mark.table()
@cells
def test_one_of_nothing_that_requires_grad_is_silent(operator: str, name: str) -> None:
    RESULTS[name](OPERATORS[operator](False))


@pytest.mark.table()
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@cells
def test_without_grad_mode_it_is_silent(operator: str, name: str, mode: Callable[[], Any]) -> None:
    A = OPERATORS[operator](True)
    with mode():
        RESULTS[name](A)


@pytest.mark.table()
@pytest.mark.parametrize(("operator", "name"), [cell for cell in CELLS if cell[1] in ESTIMATORS], ids=str)
def test_where_a_constant_is_said_to_be_meant_it_is_silent(operator: str, name: str) -> None:
    found = ESTIMATORS[name](OPERATORS[operator](True), create_graph=False)
    leaves = found.values() if isinstance(found, dict) else [found]
    assert not any(leaf.requires_grad for leaf in leaves)


DIFFERENTIABLE = ("trace", "diagonal", "eigsh", "logdet", "solve")


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in DIFFERENTIABLE])
def test_what_cannot_be_differentiated_names_the_way(name: str) -> None:
    with pytest.raises(
        hodiff.InputError, match=f"create_graph: {name} cannot be differentiated. For its derivative, use "
    ):
        ESTIMATORS[name](hodiff.MatrixOperator(K), create_graph=True)
    with pytest.raises(hodiff.InputError, match="create_graph: got 'no'"):
        ESTIMATORS[name](hodiff.MatrixOperator(K), create_graph="no")


# --- vectors

P = hodiff.MatrixOperator
VECTORS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "A @ v": ("v requires grad", lambda v: P(K) @ v),
    "u @ A": ("v requires grad", lambda v: v @ P(K)),
    "columns": ("v requires grad", lambda v: P(K) @ torch.stack([v, v], 1)),
    "in a container": (
        "v requires grad",
        lambda v: hodiff.HessianOperator(lambda p: quadratic(p["x"]), {"x": POINT}) @ {"x": v},
    ),
    "solve": ("b requires grad", lambda v: hodiff.solve(P(K), v)),
    "solve, container": (
        "b requires grad",
        lambda v: hodiff.solve(hodiff.HessianOperator(lambda p: quadratic(p["x"]), {"x": POINT}), {"x": v}),
    ),
    "solve, so many steps": ("start requires grad", lambda v: hodiff.solve(P(K), ONES, start=v, iterations=1)),
    "solve, preconditioned": (
        "preconditioner requires grad",
        lambda v: hodiff.solve(P(K), ONES, preconditioner=P(v), iterations=1),
    ),
    "trace": ("vectors requires grad", lambda v: hodiff.trace(P(K), vectors=v)),
    "diagonal": ("vectors requires grad", lambda v: hodiff.diagonal(P(K), vectors=v)),
    "logdet": ("vectors requires grad", lambda v: hodiff.logdet(P(K), vectors=v)),
    "spectral_density": ("vectors requires grad", lambda v: hodiff.spectral_density(P(K), vectors=v)),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_that_requires_grad(name: str) -> None:
    what, run = VECTORS[name]
    v = ONES.clone().requires_grad_()
    with pytest.warns(hodiff.HodiffWarning, match=f"the result is detached, although {what}"):
        run(v)
    run(v.detach())
    with torch.no_grad():
        run(v)


def test_where_a_solution_starts_does_not_matter_when_it_converges() -> None:
    v = ONES.clone().requires_grad_()
    hodiff.solve(P(K), ONES, start=v, preconditioner=P(v))


def test_each_keyword_that_takes_a_tensor_is_looked_at() -> None:
    """Factors are refused as tensors that require grad; `damping=` and `shift=` are said to; vectors are above."""
    live = torch.tensor(0.5, dtype=D, requires_grad=True)
    for run in (
        lambda: hodiff.nystrom(P(K), 2, live),
        lambda: P(K) + live,
        lambda: live * P(K),
        lambda: P(K) / live,
    ):
        with pytest.raises((hodiff.InputError, TypeError), match=r"shift|requires grad"):
            run()
    with pytest.warns(hodiff.HodiffWarning, match="although damping requires grad"):
        hodiff.solve(P(K), ONES, damping=live)
    with pytest.warns(hodiff.HodiffWarning, match="although shift requires grad"):
        hodiff.logdet(P(K), shift=live)
    with pytest.raises(hodiff.InputError, match="start requires grad, but with create_graph=True a solution"):
        hodiff.solve(P(K), ONES, start=live * ONES, iterations=2, create_graph=True)
    with pytest.raises(hodiff.InputError, match="vectors requires grad, but with create_graph=True"):
        hodiff.logdet(P(K), vectors=live * ONES, create_graph=True)
    taking = {
        (name, word)
        for name in (*ESTIMATORS, "nystrom")
        for word, parameter in inspect.signature(getattr(hodiff, name)).parameters.items()
        if parameter.annotation in ("Any", "V", "LinearOperator | None")
    }
    assert taking == {
        ("solve", "b"), ("solve", "start"), ("solve", "preconditioner"), ("trace", "vectors"), ("diagonal", "vectors"),
        ("logdet", "vectors"), ("spectral_density", "vectors"),
    }  # fmt: skip


# --- once for each place


@pytest.mark.parametrize("name", RESULTS)
def test_once_for_each_place(name: str) -> None:
    A = OPERATORS["Hessian"](True)
    with torch.no_grad():
        RESULTS[name](A)  # what is imported on the way (SciPy) may change filters, and Python then warns anew
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")  # Python's own rule
        for _ in range(3):
            RESULTS[name](A)
    assert len(seen) == 1


def test_another_line_warns_again() -> None:
    A = OPERATORS["matrix"](True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(2):
            A @ ONES
            A @ ONES
    assert len({warning.lineno for warning in seen}) == len(seen) == 2


# --- inside the function of another call


@pytest.mark.parametrize(("operator", "name"), [cell for cell in CELLS if cell[0] in ("matrix", "Hessian")], ids=str)
def test_inside_another_call_it_is_refused_or_differentiated(operator: str, name: str) -> None:
    def f(x: Tensor, **options: Any) -> Tensor:
        A = hodiff.HessianOperator(quadratic, x) if operator == "Hessian" else P(K * x[0])
        found = RESULTS[name](A, **options)
        return x.sum() + (found.sum() if isinstance(found, Tensor) else 0.0)

    if name in DIFFERENTIABLE:
        assert not torch.equal(hodiff.grad(f, POINT), ONES)
    else:
        with pytest.raises((hodiff.GraphError, hodiff.InputError), match=r"are detached, so inside|create_graph: the"):
            hodiff.grad(f, POINT)
    if name in ESTIMATORS:
        assert torch.equal(hodiff.grad(lambda x: f(x, create_graph=False), POINT), ONES)

    def quiet(x: Tensor) -> Tensor:
        with torch.no_grad():
            f(x)
        return x.sum()

    assert torch.equal(hodiff.grad(quiet, POINT), ONES)


@pytest.mark.parametrize("name", ["A @ v", "solve", "A.dense()", "logdet"])
def test_inside_a_transform_it_is_refused(name: str) -> None:
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda k: RESULTS[name](P(k)).sum())(K)
    if name in ("A @ v", "solve"):
        product = {"A @ v": lambda v: P(K) @ v, "solve": lambda v: hodiff.solve(P(K), v).value}[name]
        with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
            torch.func.grad(lambda v: product(v).sum())(ONES)


def test_a_tangent_of_forward_mode_is_kept_or_refused() -> None:
    with forward_ad.dual_level():
        v, matrix = forward_ad.make_dual(ONES, POINT), forward_ad.make_dual(K, K)
        torch.testing.assert_close(forward_ad.unpack_dual(P(K) @ v).tangent, K @ POINT)
        for name, run in {
            "A": lambda: P(matrix),
            "b": lambda: hodiff.solve(P(K), v),
            "vectors": lambda: hodiff.trace(P(K), vectors=v),
        }.items():
            with pytest.raises(hodiff.InputError, match=f"^{name} carries a tangent"):
                run()


# --- what is ours warns of nothing


def test_parameters_of_a_module_do_not_count() -> None:
    model = network()
    H = hodiff.HessianOperator(lambda m: m(K).square().sum(), model) + 1.0
    H @ torch.ones(8, dtype=D), H.dense(), hodiff.eigsh(H, 1), hodiff.solve(H, torch.ones(8, dtype=D))
    at_leaf = hodiff.HessianOperator(quadratic, POINT.clone().requires_grad_())
    at_leaf @ ONES, at_leaf.value, at_leaf.gradient, hodiff.trace(at_leaf)


def test_least_squares_is_silent() -> None:
    model = network()
    optimizer = hodiff.LevenbergMarquardt(lambda model, x: model(x)[:, 0].tanh() - 1, model)
    for _ in range(2):
        optimizer.step(K)


def test_what_solves_inside_is_silent() -> None:
    b = ONES.clone().requires_grad_()
    matrix = K.clone().requires_grad_()
    x = hodiff.implicit.argmin(lambda x: x @ matrix @ x / 2 - b @ x, torch.linalg.solve(K, ONES))
    torch.autograd.grad(x.sum(), (b, matrix))


# --- the ways that are named


def test_the_way_out_of_a_solve_is_its_derivative() -> None:
    for run in (
        lambda matrix, b, x: hodiff.implicit.argmin(lambda x: x @ (matrix @ x) / 2 - b @ x, x),
        lambda matrix, b, x: hodiff.implicit.root(lambda x: matrix @ x - b, x),
    ):
        matrix, b = K.clone().requires_grad_(), ONES.clone().requires_grad_()
        found = hodiff.solve(P(matrix), b, create_graph=False, rtol=1e-13)
        got = torch.autograd.grad((b * run(matrix, b, found.value)).sum(), (matrix, b))
        right = torch.autograd.grad((b * torch.linalg.solve(matrix, b)).sum(), (matrix, b))
        torch.testing.assert_close((got[0] + got[0].T, got[1]), (right[0] + right[0].T, right[1]), rtol=1e-8, atol=1e-9)


HESSIAN_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "A @ v": lambda x: hodiff.hvp(quadratic, x, ONES, create_graph=True),
    "A.dense()": lambda x: hodiff.hessian(quadratic, x, matrix=True, create_graph=True),
    "A.value": lambda x: hodiff.value_and_grad(quadratic, x, create_graph=True)[0],
    "A.gradient": lambda x: hodiff.grad(quadratic, x, create_graph=True),
    "trace": lambda x: hodiff.trace(hodiff.HessianOperator(quadratic, x), create_graph=True).value,
    "eigsh": lambda x: hodiff.eigsh(hodiff.HessianOperator(quadratic, x), 1, create_graph=True, rtol=1e-12).value,
    "diagonal": lambda x: hodiff.diagonal(hodiff.HessianOperator(quadratic, x), create_graph=True).value,
    "logdet": lambda x: hodiff.logdet(hodiff.HessianOperator(quadratic, x), create_graph=True).value,
    "solve": lambda x: hodiff.solve(hodiff.HessianOperator(quadratic, x), ONES, create_graph=True, rtol=1e-13).value,
}  # fmt: skip


@pytest.mark.parametrize("name", HESSIAN_WAYS)
def test_the_ways_give_the_same_value_with_a_derivative(name: str) -> None:
    x = POINT.clone().requires_grad_()
    with torch.no_grad():
        plain = lambda at: RESULTS[name](hodiff.HessianOperator(quadratic, at))
        value = plain(POINT)
    attached = HESSIAN_WAYS[name](x * 1)
    torch.testing.assert_close(attached.detach(), value, rtol=1e-7, atol=1e-9)
    (got,) = torch.autograd.grad(attached.sum(), x)
    for i, unit in enumerate(torch.eye(3, dtype=D)):
        step = 1e-5 * unit
        right = (plain(POINT + step).sum() - plain(POINT - step).sum()) / 2e-5
        assert float(got[i]) == pytest.approx(float(right), rel=1e-4, abs=1e-4)


def test_vectors_of_a_differentiable_trace_are_differentiated_too() -> None:
    v = ONES.clone().requires_grad_()
    V = torch.stack([ONES, POINT], 1).requires_grad_()
    H = hodiff.HessianOperator(quadratic, POINT)
    matrix = H.dense()
    for given in (v, V):
        value = hodiff.trace(2 * H + 0.5, vectors=given, create_graph=True).value
        (got,) = torch.autograd.grad(value, given)
        count = 1 if given.ndim == 1 else given.shape[1]
        torch.testing.assert_close(got, 2 * (2 * matrix + 0.5 * torch.eye(3, dtype=D)) @ given.detach() / count)
