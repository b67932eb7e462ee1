"""Numbers that were once wrong without a word, and errors that were once raw: each right now, or refused with words.

Found by independent testing. The oracles are closed forms and central differences; where a refusal would do as well as
a right value, the test takes either, and holds the words.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hodiff
from tests.support.differences import first_difference

D = torch.float64
ERRORS = (hodiff.InputError, hodiff.GraphError)


def right_or_refused(call: Callable[[], Any], expected: Any, words: str) -> None:
    """The value is the expected one, or an error of ours says the words."""
    try:
        got = call()
    except ERRORS as error:
        assert re.search(words, str(error)), f"the error lacks {words!r}: {error}"
        return
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


def warned(words: str) -> AbstractContextManager[Any]:
    return pytest.warns(hodiff.HodiffWarning, match=words)


# --- 1: Taylor mode never looked whether f uses its argument, unless it records ---------------------------------------

BYPASSES: dict[str, Callable[[Tensor], Any]] = {
    "nth_derivative": lambda x: hodiff.nth_derivative(lambda z: x**3 + 0 * z, x, 3),
    "derivatives": lambda x: hodiff.derivatives(lambda z: x**3 + 0 * z, x, 4),
    "laplacian, create_graph=False": lambda x: hodiff.laplacian(
        lambda z: (z * x).square().sum(-1), x, create_graph=False
    ),
    "jet, create_graph=False": lambda x: hodiff.jet(lambda z: z * x, x, [torch.ones_like(x)], create_graph=False),
    "divergence, create_graph=False": lambda x: hodiff.divergence(lambda z: z * x, x, create_graph=False),
    "partial, create_graph=False": lambda x: hodiff.partial(
        lambda z: (z * x).sum(-1), x, (0, 0, 0, 0), create_graph=False
    ),
    "biharmonic, create_graph=False": lambda x: hodiff.biharmonic(
        lambda z: (z * x).square().sum(-1), x, create_graph=False
    ),
}


@pytest.mark.parametrize("name", BYPASSES)
def test_1_taylor_mode_refuses_a_bypass(name: str) -> None:
    x = torch.ones(2, 3, dtype=D, requires_grad=True)
    with pytest.raises(hodiff.GraphError, match="other than through"):
        BYPASSES[name](x)


def test_1_taylor_mode_refuses_a_bypass_under_no_grad() -> None:
    x = torch.ones(2, 3, dtype=D, requires_grad=True)
    with torch.no_grad(), pytest.raises(hodiff.GraphError, match="other than through"):
        hodiff.laplacian(lambda z: (x**3).sum(-1) + 0 * z.sum(-1), x)


# --- 2: Taylor mode did not see a Python Function (torch 2.14 and 2.15) -----------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


class Straight(torch.autograd.Function):
    """Its derivative is its backward's, not its forward's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


@pytest.mark.parametrize("method", ["auto", "reverse"])
def test_2_fields_through_a_function_of_the_users(method: str) -> None:
    x = torch.tensor([[0.7, -1.3]], dtype=D)
    fresh = type("Fresh", (Cube,), {})  # of each class it is told once
    with pytest.warns(hodiff.HodiffWarning, match=r"Function|Fresh"):
        got = hodiff.laplacian(lambda z: (fresh.apply(z) * z).sum(-1), x, method=method)
    torch.testing.assert_close(got, (12 * x**2).sum(-1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = hodiff.laplacian(lambda z: (Straight.apply(z) * z).sum(-1), x, method=method)
    torch.testing.assert_close(got, torch.full((1,), 4.0, dtype=D))


def test_2_high_orders_through_a_function_of_the_users() -> None:
    x = torch.tensor([0.7, -1.3], dtype=D)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right_or_refused(
            lambda: hodiff.nth_derivative(lambda z: Cube.apply(z) * z, x, 4), torch.full_like(x, 24.0), "Cube"
        )


# --- 3: sparse constructors ------------------------------------------------------------------------------------------

INDEX = torch.tensor([[0, 1, 2], [1, 2, 0]])
CROW, COLUMNS = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 0])
POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


def coo(z: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(INDEX, z, (3, 3)).to_dense().pow(3).sum()


def csr(z: Tensor) -> Tensor:
    return torch.sparse_csr_tensor(CROW, COLUMNS, z, (3, 3)).to_dense().pow(3).sum()


CURVED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "hessian": lambda f: (hodiff.hessian(f, POINT), torch.diag(6 * POINT)),
    "hvp": lambda f: (hodiff.hvp(f, POINT, torch.ones_like(POINT)), 6 * POINT),
    "hessian_diagonal": lambda f: (hodiff.hessian_diagonal(f, POINT), 6 * POINT),
    "HessianOperator": lambda f: (hodiff.HessianOperator(f, POINT) @ torch.ones_like(POINT), 6 * POINT),
    "cross_hessian": lambda f: (
        hodiff.cross_hessian(lambda z, y: f(z) * y.sum(), POINT, torch.ones(1, dtype=D)), 3 * POINT[:, None] ** 2
    ),
    "cross_hvp": lambda f: (
        hodiff.cross_hvp(lambda z, y: f(z) * y.sum(), POINT, *(torch.ones(1, dtype=D),) * 2), 3 * POINT**2
    ),
    "laplacian, reverse": lambda f: (
        hodiff.laplacian(f, POINT, batch_ndim=0, method="reverse").detach(), (6 * POINT).sum()
    ),
    "laplacian": lambda f: (hodiff.laplacian(f, POINT, batch_ndim=0).detach(), (6 * POINT).sum()),
    "grad": lambda f: (hodiff.grad(f, POINT), 3 * POINT**2),
    "jvp": lambda f: (hodiff.jvp(f, POINT, torch.ones_like(POINT))[1], (3 * POINT**2).sum()),
    "GaussNewtonOperator": lambda f: (
        hodiff.GaussNewtonOperator(
            lambda z, batch: f(z).reshape(1), lambda out, batch: ((out**2).sum() / 2, 1), POINT, data=[0]
        ) @ torch.ones_like(POINT),
        3 * POINT**2 * (3 * POINT**2).sum(),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CURVED)
@pytest.mark.parametrize("f", [coo, csr], ids=["coo", "csr"])
def test_3_sparse_constructors(f: Any, name: str) -> None:
    try:
        got, expected = CURVED[name](f)
    except ERRORS as error:
        assert re.search(r"sparse_(coo|csr|compressed)_tensor", str(error)), f"the error lacks the name: {error}"
        return
    got = got[1] if isinstance(got, tuple) else got
    torch.testing.assert_close(got.reshape(expected.shape), expected)


@pytest.mark.filterwarnings("ignore")
def test_3_constant_sparse_matrices_stay_right() -> None:
    A = torch.sparse_coo_tensor(INDEX, POINT, (3, 3))
    f = lambda z: torch.sparse.mm(A, z[:, None]).pow(3).sum()
    dense = A.to_dense()
    expected = dense.T @ torch.diag(6 * (dense @ POINT)) @ dense
    torch.testing.assert_close(hodiff.hessian(f, POINT), expected)


# --- 4: what f leaves behind -----------------------------------------------------------------------------------------


class Squared(nn.Module):
    """It computes from its weight once, and keeps the result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0], dtype=D))
        self.c: Tensor | None = None

    def forward(self) -> Tensor:
        if self.c is None:
            self.c = self.w**2
        return (self.c * self.w).sum()


class Square(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w**2


def test_4_a_lazily_cached_tensor() -> None:
    m = Squared()
    expected = {"w": 3 * m.w.detach() ** 2}
    torch.testing.assert_close(hodiff.grad(lambda m: m(), m), expected)
    right_or_refused(lambda: hodiff.grad(lambda m: m(), m), expected, r"\bc\b")


def test_4_a_lazily_cached_tensor_between_the_batches_of_an_operator() -> None:
    m = Squared()
    w = m.w.detach()
    loss = lambda m, batch: (m() * batch, 1)
    right_or_refused(lambda: hodiff.HessianOperator(loss, m, data=[1.0, 3.0]).dense(), torch.diag(6 * w * 2), r"\bc\b")


def test_4_nothing_of_ours_stays_in_the_users_module() -> None:
    """Their own backward afterwards: right, or it says what happened; not a smaller gradient."""
    m = Squared()
    hodiff.grad(lambda m: m(), m)
    m().backward()
    assert m.w.grad is not None
    torch.testing.assert_close(m.w.grad, 3 * m.w.detach() ** 2)


def test_4_parametrize_cached() -> None:
    m = nn.Linear(2, 1, bias=False).double()
    parametrize.register_parametrization(m, "weight", Square())
    raw = m.parametrizations.weight.original.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=D)
    f = lambda m: (m(x) ** 2).sum()
    y = (raw**2 * x).sum()
    expected = {"parametrizations.weight.original": 4 * y * raw * x}
    with parametrize.cached():
        for _ in range(2):
            torch.testing.assert_close(hodiff.grad(f, m), expected)
        f(m).backward()
    torch.testing.assert_close(m.parametrizations.weight.original.grad, expected["parametrizations.weight.original"])


def test_4_parametrize_cached_already_filled_by_the_user() -> None:
    m = nn.Linear(2, 1, bias=False).double()
    parametrize.register_parametrization(m, "weight", Square())
    raw = m.parametrizations.weight.original.detach().clone()
    x = torch.tensor([[1.0, 2.0]], dtype=D)
    f = lambda m: (m(x) ** 2).sum()
    with parametrize.cached():
        f(m)
        expected = {"parametrizations.weight.original": 4 * (raw**2 * x).sum() * raw * x}
        torch.testing.assert_close(hodiff.grad(f, m), expected)


class Stateful(nn.Module):
    """A recurrent module that keeps its state between calls, without detaching it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=D))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.w * x if self.state is None else self.state * self.w + x
        return self.state


def test_4_a_recurrent_state() -> None:
    m, x = Stateful(), torch.tensor(2.0, dtype=D)
    hodiff.grad(lambda m: m(x), m)
    right_or_refused(lambda: hodiff.grad(lambda m: m(x), m), {"w": x}, "state")


def test_4_a_state_in_a_closure() -> None:
    kept: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        if not kept:
            kept.append(z**2)
        return (kept[0] * z).sum()

    expected = hodiff.grad(f, POINT)
    torch.testing.assert_close(expected, 3 * POINT**2)
    right_or_refused(lambda: hodiff.grad(f, POINT), expected, r"(?i)ended|earlier|previous|kept|evaluation")


# --- 5, 6: multi_grad ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
def test_5_a_hook_at_the_cut_runs_once(release: bool) -> None:
    a = torch.tensor(2.0, dtype=D, requires_grad=True)
    h = a * 1
    h.register_hook(lambda g: 10 * g)
    losses = [h.sum(), (h**2).sum()]
    got = hodiff.multi_grad(losses, a, release=release)
    torch.testing.assert_close(torch.stack([torch.as_tensor(g) for g in got]), torch.tensor([10.0, 40.0], dtype=D))


def test_6_multi_grad_inside_a_call() -> None:
    x = torch.tensor([0.5, 2.0], dtype=D)
    f = lambda x: (hodiff.multi_grad([lambda z: (z**3).sum()], x)[0] * x).sum()
    right_or_refused(lambda: hodiff.grad(f, x), 9 * x**2, "multi_grad")


# --- 7: operators, and changes that count no version -----------------------------------------------------------------

CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    ".data": lambda p: p.data.mul_(1.3),
    "numpy": lambda p: p.detach().numpy().__imul__(1.3),
    "one entry": lambda p: p.data[-1].mul_(1.5),
}


@pytest.mark.parametrize("how", CHANGES)
def test_7_an_operator_sees_that_its_parameters_changed(how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=D))

    m = Net()
    H = hodiff.HessianOperator(lambda m: (m.w @ m.w) ** 2, m)
    v = torch.ones(3, dtype=D)
    H @ v
    CHANGES[how](m.w)
    w = m.w.detach()
    right_or_refused(lambda: H @ v, 8 * w * (w @ v) + 4 * (w @ w) * v, r"refresh")


# --- 8: entrywise, at the order asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4])  # at zeros the first derivative is right: no entry has one by another
@pytest.mark.parametrize("of", ["nth_derivative", "derivatives"])
def test_8_a_function_that_mixes_entries_is_refused(of: str, n: int) -> None:
    with pytest.raises(hodiff.InputError, match=r"(?i)entr|element"):
        getattr(hodiff, of)(lambda x: x * x.roll(1), torch.zeros(3, dtype=D), n)


# --- 9, 13, 14: operations -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_9_embedding_scaled_by_frequency() -> None:
    m = nn.Embedding(3, 2, scale_grad_by_freq=True).double()
    index = torch.tensor([0, 1, 1])
    with pytest.raises(hodiff.GraphError, match=r"scale_grad_by_freq|[Ee]mbedding"):
        hodiff.hessian(lambda m: m(index).prod(), m, matrix=True)
    with pytest.raises(hodiff.GraphError, match=r"scale_grad_by_freq|[Ee]mbedding"):
        hodiff.HessianOperator(lambda m: m(index).prod(), m) @ torch.ones(6, dtype=D)


def test_13_logcumsumexp() -> None:
    x = torch.tensor([0.3, -0.8, 1.4], dtype=D)
    v = torch.tensor([1.0, -0.5, 0.2], dtype=D)
    f = lambda z: (torch.logcumsumexp(z, 0) * torch.tensor([1.0, -2.0, 0.5], dtype=D)).sum()
    gradient = lambda z: torch.autograd.functional.jacobian(f, z)
    expected = first_difference(lambda t: gradient(x + t * v))
    torch.testing.assert_close(hodiff.hvp(f, x, v), expected, rtol=1e-6, atol=1e-8)
    words = "logcumsumexp|[Ll]ogCumSumExp"
    right_or_refused(lambda: _second(hodiff.jvp(lambda z: hodiff.grad(f, z), x, v)), expected, words)
    right_or_refused(lambda: hodiff.jacobian(lambda z: hodiff.grad(f, z), x) @ v, expected, words)


def test_13_logcumsumexp_of_a_tensor_at_third_order() -> None:
    """The function form writes it out; a graph that has it already would give NaN."""
    x = torch.tensor([0.3, -0.8, 1.4], dtype=D, requires_grad=True)
    v = torch.ones(3, dtype=D)
    loss = lambda z: torch.logcumsumexp(z, 0).square().sum()
    torch.testing.assert_close(hodiff.hvp(loss(x), x, v), hodiff.hvp(loss, x.detach(), v))
    with pytest.raises(hodiff.GraphError, match=r"(?s)logcumsumexp.*function"):
        hodiff.hvp(loss(x), x, v, create_graph=True)


def _second(result: Any) -> Tensor:
    return result[1] if isinstance(result, tuple) else result


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda z: z.norm(),
    "sqrt": lambda z: z.square().sum().sqrt(),
    "pow": lambda z: (z.abs() ** 1.5).sum(),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.parametrize("of", ["hessian", "hvp", "HessianOperator"])
def test_14_a_kink_is_told(of: str, name: str) -> None:
    x = torch.zeros(2, dtype=D)
    calls = {
        "hessian": lambda: hodiff.hessian(KINKS[name], x),
        "hvp": lambda: hodiff.hvp(KINKS[name], x, torch.ones(2, dtype=D)),
        "HessianOperator": lambda: hodiff.HessianOperator(KINKS[name], x) @ torch.ones(2, dtype=D),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = calls[of]()
    if not torch.isfinite(got).all():
        ours = [str(w.message) for w in caught if issubclass(w.category, hodiff.HodiffWarning)]
        assert any(re.search("(?i)norm|sqrt|pow", words) for words in ours), ours


# --- 10: hooks that change gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["hessian", "hvp", "HessianOperator"])
def test_10_a_hook_that_changes_gradients_is_told(of: str) -> None:
    x = torch.tensor([1.0, 2.0], dtype=D)

    def f(z: Tensor) -> Tensor:
        h = 2 * z
        if h.requires_grad:
            h.register_hook(lambda g: 3 * g)
        return (h**2).sum()

    calls = {
        "hessian": lambda: hodiff.hessian(f, x),
        "hvp": lambda: hodiff.hvp(f, x, torch.ones_like(x)),
        "HessianOperator": lambda: hodiff.HessianOperator(f, x) @ torch.ones_like(x),
    }
    with warned("hook"):
        calls[of]()


# --- 11: samples that mix --------------------------------------------------------------------------------------------


def mixing(x: Tensor) -> Tensor:
    return (x.cumsum(0) ** 2).sum(1)


FIELDS: dict[str, Callable[..., Any]] = {
    "laplacian": lambda **o: hodiff.laplacian(mixing, torch.ones(3, 2, dtype=D), **o),
    "laplacian, reverse": lambda **o: hodiff.laplacian(mixing, torch.ones(3, 2, dtype=D), method="reverse", **o),
    "grad": lambda **o: hodiff.grad(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hessian": lambda **o: hodiff.hessian(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hvp": lambda **o: hodiff.hvp(mixing, torch.ones(3, 2, dtype=D), torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hessian_diagonal": lambda **o: hodiff.hessian_diagonal(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "divergence": lambda **o: hodiff.divergence(lambda x: x.cumsum(0) ** 2, torch.ones(3, 2, dtype=D), **o),
    "gradient_penalty": lambda **o: hodiff.gradient_penalty(mixing, torch.ones(3, 2, dtype=D), create_graph=False, **o),
}


@pytest.mark.parametrize("name", FIELDS)
def test_11_check_independence_wherever_batch_ndim_is(name: str) -> None:
    with pytest.warns(hodiff.BatchMixingWarning, match="(?i)sample"):
        FIELDS[name](check_independence=True)


def test_11_every_function_with_batch_ndim_has_it() -> None:
    import inspect

    have = {
        name: set(inspect.signature(getattr(hodiff, name)).parameters)
        for name in hodiff.__all__
        if inspect.isfunction(getattr(hodiff, name))
    }
    takes_f = {name for name, parameters in have.items() if parameters & {"f", "critic"} and "batch_ndim" in parameters}
    assert not {name for name in takes_f if "check_independence" not in have[name]}


# --- 12: half precision ----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::hodiff.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_12_estimators_in_half_precision(dtype: torch.dtype) -> None:
    x = torch.ones(100_000, dtype=dtype)
    H = hodiff.HessianOperator(lambda z: (z.float() ** 2).sum(), x)
    found = hodiff.trace(H, samples=4, generator=torch.Generator().manual_seed(0))
    assert abs(float(found.value) / 200_000 - 1) < 1e-2


# --- 15: complex parameters ------------------------------------------------------------------------------------------


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Parameter(torch.ones(2, dtype=D))
        self.c = nn.Parameter(torch.ones(2, dtype=torch.cdouble))

    def forward(self) -> Tensor:
        return (self.r**2).sum() + (self.c.abs() ** 2).sum()


COMPLEX: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "grad": (lambda m: hodiff.grad(lambda m: m(), m), None),
    "hessian": (lambda m: hodiff.hessian(lambda m: m(), m, matrix=True), 2 * torch.eye(6, dtype=D)),
    "jacobian": (lambda m: hodiff.jacobian(lambda m: m(), m), None),
    "multi_grad": (lambda m: hodiff.multi_grad([m()], m), None),
    "gradient_norm_penalty": (
        lambda m: hodiff.gradient_norm_penalty(lambda m: m(), m).detach(),
        torch.tensor(16.0, dtype=D),
    ),
    "HessianOperator": (lambda m: hodiff.HessianOperator(lambda m: m(), m).dense(), 2 * torch.eye(6, dtype=D)),
    "hvp": (lambda m: hodiff.hvp(lambda m: m(), m, {"r": torch.ones(2, dtype=D)}), None),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_15_complex_parameters_do_not_vanish(name: str) -> None:
    call, expected = COMPLEX[name]
    try:
        got = call(Complex())
    except ERRORS as error:
        assert re.search(r"\bc\b.*complex|complex.*\bc\b", str(error), re.DOTALL), str(error)
        return
    if isinstance(got, dict):
        assert "c" in got, f"the complex parameter is not there: {got}"
    elif isinstance(got, (list, tuple)):
        assert all("c" in each for each in got), f"the complex parameter is not there: {got}"
    else:
        torch.testing.assert_close(got, expected)


def test_15_select_says_complex_not_frozen() -> None:
    with pytest.raises(hodiff.InputError, match="complex"):
        hodiff.grad(lambda p: torch.zeros(()), hodiff.select(Complex(), "c"))
    got = hodiff.grad(lambda some: some.module(), hodiff.select(m := Complex(), "r"))  # the way out that is promised
    torch.testing.assert_close(got, {"r": 2 * m.r.detach()})


# --- 16: samples that penalties detach -------------------------------------------------------------------------------

PENALTIES: dict[str, Callable[..., Any]] = {
    "r1_penalty": lambda D, x, **o: hodiff.r1_penalty(D, x, **o),
    "r2_penalty": lambda D, x, **o: hodiff.r2_penalty(D, x, **o),
    "wgan_gp_penalty": lambda D, x, **o: hodiff.wgan_gp_penalty(D, x, x, **o),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_16_a_sample_that_requires_grad_is_told_or_followed(name: str) -> None:
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    features = torch.randn(5, 3, dtype=D, requires_grad=True)
    with warned("detach"):
        PENALTIES[name](critic, features * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PENALTIES[name](critic, features.detach())
        followed = PENALTIES[name](critic, features * 2, detach=False)
    (gradient,) = torch.autograd.grad(followed, features)
    assert gradient.abs().max() > 0


# --- 17: Embedding(max_norm=) ----------------------------------------------------------------------------------------


def test_17_embedding_with_max_norm_leaves_the_weight_alone() -> None:
    m = nn.Embedding(3, 2, max_norm=0.5).double()
    index = torch.tensor([0, 2])
    f = lambda m: (m(index) ** 3).sum()
    twin = nn.Embedding(3, 2, max_norm=0.5).double()
    twin.load_state_dict(m.state_dict())
    before = m.weight.detach().clone()
    f(twin).backward()
    try:
        got = hodiff.grad(f, m)
    except ERRORS as error:
        assert "max_norm" in str(error)
    else:
        torch.testing.assert_close(got["weight"], twin.weight.grad)
    assert torch.equal(m.weight, before)


# --- loud but raw: errors that were not ours -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grad", "hvp", "hessian", "nth_derivative", "partial"])
def test_a_compiled_caller(name: str) -> None:
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "grad": lambda r: hodiff.grad(lambda z: (z**4).sum(), r),
        "hvp": lambda r: hodiff.hvp(lambda z: (z**4).sum(), r, r),
        "hessian": lambda r: hodiff.hessian(lambda z: (z**4).sum(), r),
        "nth_derivative": lambda r: hodiff.nth_derivative(lambda z: z**4, r, 2),
        "partial": lambda r: hodiff.partial(lambda z: (z**4).sum(-1), r[None], (0, 0)),
    }
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(run[name], backend="eager")(POINT), run[name](POINT))


def test_a_detached_laplacian_in_one_graph() -> None:
    torch.compiler.reset()
    run = lambda x: hodiff.laplacian(lambda z: (z**3).sum(-1), x, create_graph=False)
    x = torch.ones(2, 3, dtype=D)
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(x), torch.full((2,), 18.0, dtype=D))


with torch.inference_mode():
    MADE = torch.tensor([0.5, 2.0, -1.0], dtype=D)

INFERENCE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "closure": lambda: (hodiff.grad(lambda z: (z**2 * MADE).sum(), POINT), 2 * POINT * MADE),
    "closure, hvp": lambda: (
        hodiff.hvp(lambda z: (z**3 * MADE).sum(), POINT, torch.ones_like(POINT)), 6 * POINT * MADE
    ),
    "args": lambda: (hodiff.grad(lambda z, c: (z**2 * c).sum(), POINT, args=(MADE,)), 2 * POINT * MADE),
    "kwargs": lambda: (hodiff.grad(lambda z, c: (z**2 * c).sum(), POINT, kwargs={"c": MADE}), 2 * POINT * MADE),
    "data": lambda: (
        hodiff.HessianOperator(lambda z, batch: ((z**3 * batch[0]).sum(), 1), POINT, data=[(MADE,)])
        @ torch.ones_like(POINT),
        6 * POINT * MADE,
    ),
    "where": lambda: (hodiff.grad(lambda z: (z**2).sum(), MADE), 2 * MADE),
    "a field": lambda: (
        hodiff.laplacian(lambda z: (z**3 * MADE).sum(-1), POINT[None], create_graph=False)[0], (6 * POINT * MADE).sum()
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode], ids=["outside", "inside"])
@pytest.mark.parametrize("name", INFERENCE)
def test_data_made_under_inference_mode(name: str, mode: Any) -> None:
    with mode():
        got, expected = INFERENCE[name]()
    torch.testing.assert_close(got.clone(), expected.clone())


class Bare(torch.autograd.Function):
    """Its backward is a Function that has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return WithoutBackward.apply(ctx.saved_tensors[0], g)


class WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        return 3 * x**2 * g


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("name", ["hvp", "hessian", "nth_derivative", "laplacian", "HessianOperator"])
def test_a_function_without_a_backward_is_named(name: str) -> None:
    f = lambda z: Bare.apply(z).sum()
    calls: dict[str, Callable[[], Any]] = {
        "hvp": lambda: hodiff.hvp(f, POINT, POINT),
        "hessian": lambda: hodiff.hessian(f, POINT),
        "nth_derivative": lambda: hodiff.nth_derivative(lambda z: Bare.apply(z), POINT, 2),
        "laplacian": lambda: hodiff.laplacian(f, POINT, batch_ndim=0),
        "HessianOperator": lambda: hodiff.HessianOperator(f, POINT) @ POINT,
    }
    with pytest.raises(hodiff.GraphError, match="WithoutBackward"):
        calls[name]()


def test_meta_tensors() -> None:
    x = torch.ones(3, device="meta", dtype=D)
    try:
        got = hodiff.hvp(lambda z: (z**3).sum(), x, torch.ones_like(x))
    except ERRORS as error:
        assert "meta" in str(error)
    else:
        assert got.shape == x.shape and got.device == x.device


def test_nested_tensors() -> None:
    make = lambda: torch.nested.nested_tensor([torch.ones(2, dtype=D), torch.ones(3, dtype=D)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        constant = make()
        f = lambda z: (torch.nested.to_padded_tensor(constant * 2.0, 0.0) * z).pow(2).sum()
        x = torch.ones(2, 3, dtype=D)
        mask = torch.tensor([[4.0, 4, 0], [4, 4, 4]], dtype=D)
        for _ in range(2):
            torch.testing.assert_close(hodiff.grad(f, x), 2 * mask)
        inner = lambda z: (
            torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([z[0, :2], z[1]]), 0.0).pow(3).sum()
        )
        right_or_refused(lambda: hodiff.grad(inner, x), 3 * torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=D), "nested")
        right_or_refused(
            lambda: (hodiff.HessianOperator(inner, x) @ x).reshape(2, 3),
            6 * torch.tensor([[1.0, 1, 0], [1, 1, 1]], dtype=D),
            "nested",
        )


def test_a_sparse_embedding_of_computed_weights() -> None:
    index = torch.tensor([0, 2])
    f = lambda z: F.embedding(index, (z**2).reshape(3, 1), sparse=True).pow(2).sum()
    expected = 4 * POINT**3 * torch.tensor([1.0, 0, 1], dtype=D)
    right_or_refused(lambda: hodiff.grad(f, POINT), expected, "sparse")
    right_or_refused(lambda: hodiff.hessian(f, POINT), torch.diag(3 * expected / POINT), "sparse")


def test_third_derivative_of_conv_transpose_with_output_padding() -> None:
    w = torch.tensor([[[0.5, -1.0, 0.3]]], dtype=D)
    f = lambda z: F.conv_transpose1d(z[None, None] ** 2, w * z[0], stride=2, output_padding=1).pow(2).sum()
    below = lambda t: hodiff.hvp(f, POINT + t * POINT, POINT)
    expected = first_difference(below, step=1e-3)
    third = lambda: hodiff.jvp(lambda z: hodiff.hvp(f, z, POINT), POINT, POINT)
    right_or_refused(lambda: _second(third()), expected, "conv_transpose|output_padding|[Cc]onvolution")


# --- loud but raw: arguments -----------------------------------------------------------------------------------------

NET = nn.Linear(3, 2).double()
BATCH = (torch.ones(4, 3, dtype=D), torch.zeros(4, 2, dtype=D))
predict = lambda m, batch: m(batch[0])

ARGUMENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "FisherOperator without kind": (
        lambda: hodiff.FisherOperator(predict, nn.MSELoss(), NET, data=[BATCH]),  # type: ignore[call-arg]
        "kind",
    ),
    "Gauss-Newton, a functional loss": (
        lambda: hodiff.GaussNewtonOperator(predict, F.mse_loss, NET, data=[BATCH]) @ torch.ones(8, dtype=D),
        "(?i)loss.*(batch|nn.MSELoss)",
    ),
    "Gauss-Newton, operands swapped": (
        lambda: hodiff.GaussNewtonOperator(nn.MSELoss(), predict, NET, data=[BATCH]) @ torch.ones(8, dtype=D),
        "(?i)predict|loss",
    ),
    "Gauss-Newton, a functional loss in the place of predict": (
        lambda: hodiff.GaussNewtonOperator(F.mse_loss, predict, NET, data=[BATCH]),
        "predict, loss, where: in this order",
    ),
    "a penalty of a critic that takes labels, without them": (
        lambda: hodiff.gradient_penalty(lambda x, labels: (x * labels).sum(-1), torch.ones(3, 2)),
        "f: cannot be called with the 1 positional argument.*'labels'.*args=",
    ),
    "a penalty, samples and critic swapped": (
        lambda: hodiff.gradient_penalty(torch.ones(3, 2), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))),
        "The function comes first and the samples second",
    ),
    "Gauss-Newton, predict of the batch alone": (
        lambda: hodiff.GaussNewtonOperator(lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=[BATCH])
        @ torch.ones(8, dtype=D),
        "predict.*batch",
    ),
    "Fisher, predict of the batch alone": (
        lambda: hodiff.FisherOperator(
            lambda batch: NET(batch[0]), nn.MSELoss(), NET, data=[BATCH], kind="exact"
        ) @ torch.ones(8, dtype=D),
        "predict.*batch",
    ),
    "hessian of two arguments": (
        lambda: hodiff.hessian(lambda a, b: (a * b).sum(), (POINT, POINT)),
        r"(?i)one argument|tuple|f\(\(|unpack",
    ),
    "cross_hessian of one argument": (
        lambda: hodiff.cross_hessian(lambda p: (p[0] * p[1]).sum(), POINT, POINT),
        r"(?i)two arguments|f\(x, y\)",
    ),
    "retain_graph": (
        lambda: hodiff.grad(lambda z: z.sum(), POINT, retain_graph=True),  # type: ignore[call-arg]
        "retain_graph",
    ),
    "a dense Hessian of 160 GB": (
        lambda: hodiff.hessian(lambda z: (z**3).sum(), torch.ones(200_000)),
        "(?i)GB|GiB|HessianOperator|memory",
    ),
    "batch_ndim=2 of several outputs": (
        lambda: hodiff.hessian(lambda z: z, torch.ones(2, 2, 3, dtype=D), batch_ndim=2),
        "(?i)jacobian|sum|one output",
    ),
    "interpolate, a feature mismatch": (
        lambda: hodiff.interpolate(torch.ones(4, 3), torch.ones(4, 5)),
        r"^(?!.*\[:n\]).*\(4, 5\)",
    ),
    "Fisher, a loss that is no likelihood": (
        lambda: hodiff.FisherOperator(predict, nn.HuberLoss(), NET, data=[BATCH], kind="exact")
        @ torch.ones(8, dtype=D),
        "(?i)HuberLoss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_refused_in_our_words(name: str) -> None:
    call, words = ARGUMENTS[name]
    with pytest.raises((*ERRORS, TypeError), match=f"(?s){words}") as caught:
        call()
    if name != "retain_graph":  # Python's own words name it; ours must, where Python's are about something else
        assert isinstance(caught.value, hodiff.HodiffError), repr(caught.value)


def test_jet_does_not_advise_what_it_lacks() -> None:
    """hodiff.jet has no `method=`."""
    with pytest.raises(hodiff.GraphError, match="zeta") as caught:
        hodiff.jet(lambda z: torch.special.zeta(z, z), POINT.abs() + 2, [torch.ones_like(POINT)] * 2)
    assert 'method="reverse"' not in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kind", ["numpy", "list"])
def test_vectors_of_any_kind_are_taken(kind: str) -> None:
    H = hodiff.HessianOperator(lambda m: (m.weight**4).sum() + (m.bias**2).sum(), NET)
    flat = torch.arange(1.0, 9.0, dtype=D)
    given: Any = flat.numpy() if kind == "numpy" else flat.tolist()
    expected = H.dense() @ flat
    as_flat = lambda value: torch.as_tensor(value) if not isinstance(value, dict) else torch.cat(
        [t.reshape(-1) for t in value.values()]
    )  # fmt: skip
    torch.testing.assert_close(as_flat(H @ given), expected)
    solved = hodiff.solve(H + 1.0, given).value
    torch.testing.assert_close((H.dense() + torch.eye(8, dtype=D)) @ as_flat(solved), flat, rtol=1e-3, atol=1e-3)


def test_partials_unpack_in_the_order_asked_for() -> None:
    """A dict unpacks into its keys, which are numbers too."""
    found = hodiff.partials(lambda z: (z**3).sum(-1), torch.ones(1, 2, dtype=D), [0, (1, 1)])
    first, second = found
    assert found[1, 1] is second
    with pytest.raises(hodiff.InputError, match="could be a place or a coordinate"):
        found[0]
    torch.testing.assert_close(first, torch.full_like(first, 3.0))
    torch.testing.assert_close(second, torch.full_like(second, 6.0))


@pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")
def test_pytorchs_own_hooks_are_no_function_of_the_users() -> None:
    """A module hook goes through BackwardHookFunction, which is PyTorch's; that it may change gradients is told."""
    m = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double()
    m[0].register_full_backward_hook(lambda module, given, out: None)
    x = torch.ones(1, 3, dtype=D)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hodiff.hvp(lambda z: m(z).pow(2).sum(), x, x)
    assert not [w for w in caught if issubclass(w.category, hodiff.CustomFunctionWarning)]


# --- found beside the rows, in PyTorch itself: passed on, refused or written out --------------------------------------


def test_linear_cross_entropy_in_chunks() -> None:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("this torch has none")
    W = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
    target = torch.tensor([0, 3])
    x = torch.linspace(-1, 2, 6, dtype=D).reshape(2, 3)
    v = torch.cos(torch.arange(6, dtype=D)).reshape(2, 3)
    expected = first_difference(lambda t: hodiff.grad(lambda z: F.cross_entropy(z @ W.T, target), x + t * v))
    right_or_refused(lambda: hodiff.hvp(lambda z: function(z, W, target), x, v), expected, "(?i)linear_?cross_?entropy")
