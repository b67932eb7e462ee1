"""Advice that can be followed: it names the caller's arguments, functions that take them, and no way into an error."""

import pytest
import torch
from torch import nn

import hodiff

X, T = torch.randn(5, 2), torch.randn(5, 1)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
POINT = torch.randn(3)
BATCH = torch.randn(4, 3)


def joined(p):
    return NET(torch.cat(p, 1))


def freed():
    x = torch.randn(3, requires_grad=True)
    y = (x**3).sum()
    y.backward()
    return y, x


CALLS = {
    "columns in a tuple": (
        lambda: hodiff.laplacian(joined, (X, T)), r"x: got a tuple of 2, .*torch\.cat\(\[x, t\], 1\).*args="
    ),
    "columns, partial": (lambda: hodiff.partial(joined, [X, T], 0), r"x: got a list of 2, .*torch\.cat.*args=\(t,\)"),
    "columns of a tensor": (
        lambda: hodiff.derivatives_of(joined((X, T)), (X, T)), r"torch\.cat.*derivatives_of\(u, t\)"
    ),
    "a sparse Hessian of several": (
        lambda: hodiff.sparse_hessian(lambda x: x**2, POINT), r"expected one element.*hodiff\.sparse_jacobian"
    ),
    "two batches": (
        lambda: hodiff.wgan_gp_penalty(NET, BATCH, BATCH[:3]), r"fake has shape \(3, 3\), but.*real\[:n\], fake"
    ),
    "images": (lambda: hodiff.wgan_gp_penalty(NET, BATCH.to(torch.uint8), BATCH), r"real has dtype torch\.uint8"),
    "two batches, interpolate": (lambda: hodiff.interpolate(BATCH, BATCH[:3]), r"b has shape.*a\[:n\], b\[:n\]"),
    "a flag for a number": (
        lambda: hodiff.grad(lambda z: z.sum(1), BATCH, batch_ndim=True), "got True, expected an integer of at least 0"
    ),
    "a list of patterns": (lambda: hodiff.select(NET, ["0.*"]), r'expected strings, one by one: "head'),
    "weight and sum": (
        lambda: hodiff.HessianOperator(lambda m, b: (len(b), m(b).sum()), NET, data=[BATCH]).value,
        r"The pair is \(sum, weight\), in this order",
    ),
    "a plan with its function": (
        lambda: hodiff.sparse.plan_hessian(lambda x: (x**3).sum(), POINT)(lambda x: x.sum(), POINT), r"plan\(x\)"
    ),
    "no entries": (lambda: hodiff.MatrixOperator(torch.zeros(0, 0)), r"has shape \(0, 0\), expected at least one row"),
    "a singular log-determinant": (
        lambda: hodiff.logdet(hodiff.MatrixOperator(torch.zeros(3))), r"give a larger shift=\.$"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_is_said_can_be_done(name):
    call, words = CALLS[name]
    with pytest.raises(hodiff.InputError, match=rf"(?s){words}"):
        call()


def test_a_freed_graph_names_no_other_function():
    with pytest.raises(hodiff.GraphError, match=r"the function instead of its value: f, not f\(x\)") as caught:
        hodiff.grad(*freed())
    assert "hvp" not in str(caught.value)


def test_what_is_shown_for_columns_is_right():
    x = torch.cat([X, T], 1).double()
    u = lambda z: (z[:, 0] ** 2 * z[:, 1] * z[:, 2]).unsqueeze(1)
    by_x = hodiff.laplacian(lambda z, t: u(torch.cat([z, t], 1)), x[:, :2], args=(x[:, 2:],))
    assert torch.allclose(by_x, 2 * x[:, 1:2] * x[:, 2:])
    assert torch.allclose(hodiff.laplacian(u, x), by_x)


VALUES = {
    "wgan_gp_penalty": (hodiff.wgan_gp_penalty, BATCH + 1),
    "r1_penalty": (hodiff.r1_penalty,),
    "r2_penalty": (hodiff.r2_penalty,),
    "dragan_penalty": (hodiff.dragan_penalty,),
    "laplacian": (hodiff.laplacian,),
    "sliced_score_matching_loss": (lambda f, x: hodiff.sliced_score_matching_loss(f, x, log_density=True),),
}


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_for_its_function_is_told_what_works(name):
    """Also where `requires_grad_()` does not, as of what makes points of its own."""
    call, *more = VALUES[name]
    for x in (BATCH, BATCH.clone().requires_grad_()):
        try:
            call(NET(x), x, *more)
        except hodiff.GraphError as error:
            assert "Give the function instead of its value: f, not f(x)." in str(error)
        else:
            assert x.requires_grad
        assert torch.isfinite(call(NET, x, *more)).all()


def test_a_gradient_without_its_graph_is_the_first_of_the_causes():
    with pytest.raises(hodiff.GraphError, match=r"Usual causes: a gradient taken without create_graph=True, "):
        gradient = hodiff.grad(lambda net: net(BATCH).square().sum(), NET)
        hodiff.grad(sum(each.square().sum() for each in gradient.values()), NET)
    gradient = hodiff.grad(lambda net: net(BATCH).square().sum(), NET, create_graph=True)
    hodiff.grad(sum(each.square().sum() for each in gradient.values()), NET)


def test_a_single_point_is_told_of_batch_ndim():
    f = lambda x: x.pow(3).sum()
    with pytest.raises(hodiff.InputError, match=r"\(A single point is batch_ndim=0\.\)"):
        hodiff.laplacian(f, POINT)
    assert torch.allclose(hodiff.laplacian(f, POINT, batch_ndim=0), 6 * POINT.sum())


def test_another_equation_is_told_which_there_are():
    t = torch.tensor([1.0, 2.0])
    with pytest.warns(hodiff.ConvergenceWarning, match=r"x - g\(x\) has inf .*\(argmin, root and fixed_"):
        hodiff.implicit.fixed_point(lambda w: w - t, t)
    assert torch.equal(hodiff.implicit.root(lambda w: w - t, t), t)
