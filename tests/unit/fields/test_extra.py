"""`has_aux=`: what a field returns beside its value, by every operator and every route."""

import pytest
import torch
import torch.nn.functional as F

import hodiff
from tests.support.modules import two_layers

D = torch.float64
X = torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3)
C = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=D))


def scalar(x):
    return torch.sin(x).sum(-1) ** 3


def vector(x):
    return torch.tanh(x).cumsum(-1)


def extra(x):
    return {"sign": x.sign().prod(-1), "note": "text", "norm": x.square().sum(-1)}


OPERATORS = {
    "laplacian": (scalar, hodiff.laplacian),
    "laplacian, sampled": (scalar, lambda f, x, **o: hodiff.laplacian(f, x, vectors=torch.ones_like(X), **o)),
    "laplacian, chunks": (scalar, lambda f, x, **o: hodiff.laplacian(f, x, chunk_size=2, **o)),
    "second_order_operator": (scalar, lambda f, x, **o: hodiff.second_order_operator(f, x, C, **o)),
    "biharmonic": (scalar, hodiff.biharmonic),
    "divergence": (vector, hodiff.divergence),
    "curl": (vector, hodiff.curl),
    "partial": (scalar, lambda f, x, **o: hodiff.partial(f, x, (0, 1), **o)),
    "partials": (scalar, lambda f, x, **o: hodiff.partials(f, x, [0, (0, 1), (1, 1)], **o)),
}


@pytest.mark.parametrize("method", ["jets", "reverse"])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_gives_it_beside_its_result(name, method):
    f, operator = OPERATORS[name]
    both = lambda x: (f(x), extra(x))
    plain = operator(f, X, method=method)
    result, found = operator(both, X, method=method, has_aux=True)
    torch.testing.assert_close([*result], [*plain], rtol=0, atol=0)
    assert found["note"] == "text"
    for key in ("sign", "norm"):
        assert type(found[key]) is torch.Tensor
        torch.testing.assert_close(found[key], extra(X)[key])


@pytest.mark.parametrize("method", ["jets", "reverse"])
@pytest.mark.parametrize("operator", [hodiff.value_grad_and_laplacian, hodiff.value_and_divergence])
def test_beside_a_value(operator, method):
    f = scalar if operator is hodiff.value_grad_and_laplacian else vector
    (value, found), *rest = operator(lambda x: (f(x), extra(x)), X, method=method, has_aux=True)
    torch.testing.assert_close((value, *rest), operator(f, X, method=method))
    torch.testing.assert_close(found["norm"], extra(X)["norm"])


@pytest.mark.parametrize("method", ["jets", "reverse"])
def test_it_is_differentiable_with_the_result_and_detached_without(method):
    w = torch.tensor(2.0, dtype=D, requires_grad=True)
    f = lambda x: (torch.sin(w * x).sum(-1), w * x.sum(-1))
    result, found = hodiff.laplacian(f, X, method=method, has_aux=True)
    (by_w,) = torch.autograd.grad((result + found).sum(), w)
    expected = torch.autograd.grad((-(w**2) * torch.sin(w * X).sum(-1) + w * X.sum(-1)).sum(), w)[0]
    torch.testing.assert_close(by_w, expected)
    result, found = hodiff.laplacian(f, X, method=method, has_aux=True, create_graph=False)
    assert not result.requires_grad and not found.requires_grad


def test_it_is_that_of_the_whole_batch_where_blocks_are_taken():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).double()
    x = torch.randn(900, 20, dtype=D)
    seen = []

    def f(x):
        seen.append(len(x))
        return net(x), x[:, 0] * 2

    with torch.no_grad():
        result, found = hodiff.laplacian(f, x, has_aux=True)
    assert min(seen) < 900, "the batch was meant to be taken in blocks"
    torch.testing.assert_close(found, 2 * x[:, 0])
    torch.testing.assert_close(result, hodiff.laplacian(net, x, method="reverse", create_graph=False))


def test_inside_another_field():
    f = lambda x: (scalar(x), x[:, 0] ** 2)
    g = lambda x: hodiff.laplacian(f, x, has_aux=True)
    outer = hodiff.laplacian(lambda x: g(x)[0] + g(x)[1], X)
    torch.testing.assert_close(outer, hodiff.biharmonic(scalar, X) + 2)


def test_what_is_no_pair():
    with pytest.raises(hodiff.InputError, match="has_aux=True expects"):
        hodiff.laplacian(scalar, X, has_aux=True)
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match="has_aux: this is about what a function returns"):
        hodiff.laplacian(scalar(x), x, has_aux=True)


def test_deepqmc_log_and_sign():
    """The local kinetic energy, with the sign of the wave function of the same evaluation."""
    net, r = two_layers(6, 9, 16), torch.randn(5, 6, dtype=D)

    def psi(r):
        sign, log = torch.linalg.slogdet(net(r).reshape(-1, 3, 3))
        return log, sign

    (log, sign), gradient, laplacian = hodiff.value_grad_and_laplacian(psi, r, has_aux=True)
    energy = -0.5 * (laplacian + gradient.square().sum(-1))
    wave = lambda r: torch.linalg.det(net(r).reshape(-1, 3, 3))
    expected = -0.5 * torch.diagonal(hodiff.hessian(wave, r, batch_ndim=1), dim1=1, dim2=2).sum(1) / wave(r)
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(sign * log.exp(), wave(r))


@pytest.mark.parametrize("method", ["jets", "auto", "reverse"])
def test_partials_of_one_draw(method) -> None:
    """One factor, drawn as dropout draws its mask: each derivative is that factor times the one without."""
    x = torch.tensor([[0.4, -0.7], [1.2, 0.3]], dtype=torch.float64)
    g = lambda x: torch.stack([x[:, 0].sin() * x[:, 1] ** 5, x[:, 1].cos() * x[:, 0] ** 5], 1)
    f = lambda x: F.dropout(torch.ones(20, dtype=x.dtype), 0.5, True).mean() * g(x)
    wanted = [(), 0, (0, 1), (1, 1), (0, 0, 1)]
    state = torch.get_rng_state()
    found = hodiff.partials(f, x, wanted, method=method)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    factor = F.dropout(torch.ones(20, dtype=x.dtype), 0.5, True).mean()
    assert torch.equal(torch.get_rng_state(), after)
    for one, plain in zip(found, hodiff.partials(g, x, wanted), strict=True):
        torch.testing.assert_close(one, factor * plain)
