"""What went wrong silently, or without a word of ours, before: one test for each."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.limits import in_threads
from tests.support.modules import Cube
from tests.support.operators import D, draw, split
from tests.support.properties import agree

X, Y = draw(10, 4, seed=1), torch.randint(3, (10,), generator=torch.Generator().manual_seed(0))
PAIRS = split(X, Y)


def linear(m: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return m(batch[0])


def layer(dtype: torch.dtype = D) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_batches_do_not_saturate(dtype: torch.dtype) -> None:
    H = hodiff.HessianOperator(
        lambda w, b: ((w**2).sum() * b, 1), torch.tensor([1.0, 2.0], dtype=dtype), data=[1.0] * 3000
    )
    one = torch.ones(2, dtype=dtype)
    assert torch.equal(H @ one, 2 * one) and H.value == 5 and H.gradient.tolist() == [2, 4]
    assert H.value.dtype == H.gradient.dtype == (H @ one).dtype == dtype
    J = hodiff.JacobianOperator(lambda w, b: w * b, torch.ones(2, dtype=dtype), data=[1.0] * 3000)
    assert torch.equal(J.T @ torch.ones(6000, dtype=dtype), 3000 * one)


def test_sampled_fisher_does_not_shrink_with_the_number_of_samples() -> None:
    make = lambda kind, **options: hodiff.FisherOperator(
        linear, nn.CrossEntropyLoss(), layer(torch.bfloat16), data=[(X.bfloat16(), Y)], kind=kind, **options
    )
    sampled = make("mc", samples=3000, generator=torch.Generator().manual_seed(0)).dense().double().trace()
    assert sampled == pytest.approx(float(make("exact").dense().double().trace()), rel=0.03)


def test_hutchpp_in_half_precision() -> None:
    A = hodiff.MatrixOperator(torch.diag(2.0 ** -torch.arange(60.0)).bfloat16())
    assert float(hodiff.trace(A, method="hutch++", samples=30).value) == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e15, 1e30])
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_right_hand_sides_whose_squares_leave_the_dtype(method: str, scale: float) -> None:
    A, b = torch.linspace(0.5, 2, 10), torch.full((10,), scale)
    found = hodiff.solve(hodiff.MatrixOperator(A), b, method=method, start=b)
    assert found.converged
    agree(found.value.double() / scale, 1 / A.double(), 1e-3)


def test_autocast_does_not_round_matrices_nor_change_what_was_evaluated() -> None:
    A, v = hodiff.MatrixOperator(draw(50, 50).float()), draw(50).float()
    model = layer(torch.float32)
    loss = lambda m, b: (m(b[0].float()).tanh().square().sum(), len(b[0]))
    H = hodiff.HessianOperator(loss, model, data=PAIRS, memory_budget=0)
    plain, product = A @ v, H @ torch.ones(15)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(A @ v, plain) and torch.equal(H @ torch.ones(15), product)
        rounded = hodiff.HessianOperator(loss, model, data=PAIRS, memory_budget=0)
        inside = rounded @ torch.ones(15)
    assert torch.equal(rounded @ torch.ones(15), inside) and not torch.equal(inside, product)


# --- spellings --------------------------------------------------------------------------------------------------------


def test_a_point_of_two_dimensions_on_the_left() -> None:
    f = lambda z: ((z @ z).sin() * torch.arange(9.0, dtype=D).reshape(3, 3)).sum()
    W, V = draw(3, 3), draw(3, 3, seed=1)
    H = hodiff.HessianOperator(f, W)
    agree(V @ H, H @ V)
    agree(V.reshape(1, 9) @ H, (H @ V).reshape(1, 9))
    wide = hodiff.HessianOperator(lambda z: z.pow(3).sum(), draw(3, 4))
    agree(draw(3, 4, seed=2) @ wide, wide @ draw(3, 4, seed=2))
    with pytest.raises(hodiff.InputError, match=r"has shape \(4, 3\), expected"):
        draw(4, 3) @ wide


def test_operators_over_dicts_in_another_order_are_not_combined() -> None:
    f = lambda w: (w["a"] ** 3).sum() + (w["b"] ** 2).sum() * w["a"].sum()
    A = hodiff.HessianOperator(f, {"a": draw(2), "b": draw(2)})
    B = hodiff.HessianOperator(f, {"b": draw(2), "a": draw(2)})
    for combine in (lambda: A - B, lambda: A @ B):
        with pytest.raises(hodiff.InputError, match="order of keys"):
            combine()


def test_scipy_keeps_blocks_of_one_column() -> None:
    A = draw(3, 3)
    S, column = hodiff.MatrixOperator(A).to_scipy(), draw(3, 1)
    agree(torch.from_numpy(S.matmat(column.numpy())), A @ column)
    agree(torch.from_numpy(S.rmatmat(column.numpy())), A.T @ column)
    agree(torch.from_numpy(S @ column[:, 0].numpy()), (A @ column)[:, 0])


def test_arrays_on_the_left_reach_us() -> None:
    import numpy as np

    M = hodiff.MatrixOperator(draw(3, 3))
    agree(np.ones(3) @ M, M.dense().sum(0))
    agree(np.ones((2, 3)) @ M, M.dense().sum(0).expand(2, 3))
    with pytest.raises(hodiff.InputError, match="ndarray"):
        np.ones(3) * M
    with pytest.raises(hodiff.InputError, match="sparse"):
        hodiff.MatrixOperator(torch.eye(3).to_sparse())


# --- points and models ------------------------------------------------------------------------------------------------


def test_modules_that_share_a_parameter_are_not_two_variables() -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    for call in (hodiff.grad, hodiff.hessian):
        with pytest.raises(hodiff.InputError, match=r"'x\[1\].weight' is given twice \(also as 'x\[0\].weight'\)"):
            call(lambda p: p[1](p[0](torch.ones(2))).sum(), (a, b))
    with pytest.raises(hodiff.InputError, match="given twice"):
        hodiff.cross_hessian(lambda p, q: p(q(torch.ones(2))).sum(), a, a)


def change_by_assignment(model: nn.Sequential) -> None:
    model.load_state_dict({name: 2 * p.detach() for name, p in model.state_dict().items()}, assign=True)


def change_a_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(2, 1, dtype=D)


def change_an_activation(model: nn.Sequential) -> None:
    model[1] = nn.Sigmoid()


class Moody(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def change_the_mode(model: nn.Sequential) -> None:
    model.eval()


@pytest.mark.parametrize("change", [change_by_assignment, change_a_layer, change_an_activation, change_the_mode])
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_model_that_is_put_together_anew_is_noticed(change, evaluated: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1), Moody()).double()
    f = lambda m: m(X).square().mean()
    H = hodiff.HessianOperator(f, model)
    if evaluated:
        H.dense()
    change(model)
    with pytest.raises(hodiff.GraphError, match=r"model was changed.*H\.refresh\(\)"):
        H.dense()
    agree(H.refresh().dense(), hodiff.HessianOperator(f, model).dense())


def test_refresh_of_a_point_with_other_leaves() -> None:
    model = layer()
    H = hodiff.HessianOperator(lambda m: m(X).square().mean(), model)
    H.dense()
    model.bias.requires_grad_(False)
    with pytest.raises(hodiff.InputError, match="refresh: the point has other leaves"):
        H.refresh()


def test_products_inside_a_loan_of_the_model() -> None:
    """Inside another call's f the parameters are lent, which is no change of the model."""
    model = layer()
    H = hodiff.HessianOperator(lambda m: m(X).pow(3).mean(), model)
    expected = H @ torch.ones(15, dtype=D)

    def f(m: nn.Module) -> Tensor:
        with torch.no_grad():
            agree(H @ torch.ones(15, dtype=D), expected)
        return m(X).sum()

    hodiff.grad(f, model)


def test_values_are_copies() -> None:
    x = torch.ones(3, dtype=D)
    for f in (lambda x: x, torch.tanh):
        J = hodiff.JacobianOperator(f, x)
        kept = J.value.clone()
        J.value.mul_(9)
        assert torch.equal(J.value, kept) and torch.equal(x, torch.ones(3, dtype=D))
        J @ x


def test_one_operator_in_several_threads() -> None:
    H = hodiff.HessianOperator(lambda m, b: (linear(m, b).tanh().square().sum(), len(b[0])), layer(), data=PAIRS)
    found = in_threads(*[lambda: H @ torch.ones(15, dtype=D)] * 4)
    assert all(torch.equal(part, found[0]) for part in found)


# --- losses -----------------------------------------------------------------------------------------------------------


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        each = F.cross_entropy(input, target, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


def test_losses_that_are_not_what_their_class_says() -> None:
    make = lambda loss, **options: hodiff.GaussNewtonOperator(linear, loss, layer(), data=PAIRS, **options)
    with pytest.raises(hodiff.InputError, match="Focal is not one whose sums"):
        make(Focal())
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, given, found: 3 * found)
    with pytest.raises(hodiff.InputError, match="has forward hooks"):
        make(hooked)
    with pytest.raises(hodiff.InputError, match="CrossEntropyLoss says itself how much a batch counts"):
        make(nn.CrossEntropyLoss(), batch_weight="equal")


def test_empirical_fisher_knows_its_samples_or_says_so() -> None:
    make = lambda loss, data=((X, Y),), **options: hodiff.FisherOperator(
        linear, loss, layer(), data=list(data), kind="empirical", **options
    )
    mean = lambda outputs, batch: F.cross_entropy(outputs, batch[1])
    agree(make(mean, batch_weight=lambda b: len(b[1])).dense(), make(nn.CrossEntropyLoss()).dense(), 1e-12)
    for options in ({}, {"batch_weight": "equal"}):
        with pytest.raises(hodiff.InputError, match="of how many samples it is the mean"):
            make(mean, **options) @ torch.ones(15, dtype=D)
    with pytest.raises(hodiff.InputError, match="needs samples in the leading dimension"):
        make(nn.CrossEntropyLoss(), data=[(X[0], Y[0])]) @ torch.ones(15, dtype=D)


def test_weights_from_numpy() -> None:
    import numpy as np

    for pair in (tuple, list):
        H = hodiff.HessianOperator(lambda w, b, pair=pair: pair([(w**2).sum(), np.int64(3)]), torch.ones(2), data=[0])
        agree(H.dense(), torch.eye(2) * 2 / 3)


# --- Functions whose backward is no function of what it is given -----------------------------------------------------


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, g):
        return (2 * ctx.saved_tensors[0] * g).detach()


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_functions_that_cut_the_backward_off() -> None:
    x, one = torch.tensor([1.0, 2.0], dtype=D), torch.ones(2, dtype=D)
    loss = lambda outputs, batch: (outputs.square().sum(), 1)
    for f in (Square.apply, lambda x: Square.apply(x) + x.sin()):
        agree(hodiff.vjp(f, x, one), hodiff.jacobian(f, x).T @ one)
        for call in (
            lambda f=f: hodiff.jvp(f, x, one),
            lambda f=f: hodiff.JacobianOperator(f, x) @ one,
            lambda f=f: hodiff.GaussNewtonOperator(lambda w, b: f(w), loss, x, data=[0]).dense(),
            lambda f=f: hodiff.FisherOperator(lambda w, b: f(w), loss, x, data=[0], kind="empirical").dense(),
        ):
            with pytest.raises(hodiff.GraphError, match=r"backward of one of Square detaches"):
                call()
    agree(hodiff.jvp(Cube.apply, x, one), 3 * x**2)
    agree(hodiff.JacobianOperator(Cube.apply, x).dense(), torch.diag(3 * x**2))
