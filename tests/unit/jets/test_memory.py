"""Operations in place: whoever shares the memory must see them, or they are refused. PyTorch's own reverse mode tells.

A jet gets a new series where a tensor gets new entries, so a second name for the same memory would keep the old ones.
"""

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff.jets import _series
from tests.support.properties import agree

D = torch.float64


@pytest.fixture
def x():
    return torch.randn(7, 3, dtype=D)


# Another name for the memory of h: in plain PyTorch the one sees what happens to the other.
NAMES = {
    "view": lambda h: h.view(-1).reshape(7, 3),
    "view_as": lambda h: h.view_as(h),
    "reshape": lambda h: h.reshape(7, 3),
    "flatten": lambda h: h.flatten(1),
    "squeeze": lambda h: h.squeeze(),
    "unsqueeze": lambda h: h.unsqueeze(0)[0],
    "expand": lambda h: h.expand(7, 3),
    "broadcast_tensors": lambda h: torch.broadcast_tensors(h, torch.ones(7, 3, dtype=D))[0],
    "transpose": lambda h: h.T.T,
    "movedim": lambda h: h.movedim(0, 1).mT,
    "slice": lambda h: h[:],
    "narrow": lambda h: h.narrow(0, 0, 7),
    "hsplit": lambda h: torch.cat(torch.hsplit(h, 3)[:1], 1) + h * 0,
    "atleast_2d": torch.atleast_2d,
    "real": torch.real,
    "contiguous": lambda h: h.contiguous(),
    "to the same dtype": lambda h: h.to(D),
    "double": lambda h: h.double(),
    "no dropout": lambda h: F.dropout(h, 0.0),
    "positive": torch.positive,
}


@pytest.mark.filterwarnings("ignore:laplacian. Taylor mode has no rule")
@pytest.mark.parametrize("changed", ["first", "second"])
@pytest.mark.parametrize("name", NAMES)
def test_two_names_for_one_memory(name, changed, x):
    def f(x):
        h = x.clone()
        other = NAMES[name](h)
        (h if changed == "first" else other).mul_(2)
        return (h**3 + other**4).sum(-1)

    agree(hodiff.laplacian(f, x), hodiff.laplacian(f, x, method="reverse"))


@pytest.mark.filterwarnings("ignore:laplacian. Taylor mode has no rule")
@pytest.mark.parametrize("name", ["detach", "data", "diagonal", "unfold"])
def test_a_constant_or_a_part_of_the_memory(name, x):
    part = {
        "detach": lambda h: h.detach(),
        "data": lambda h: h.data,
        "diagonal": lambda h: h.diagonal(),
        "unfold": lambda h: h.unfold(1, 2, 1),
    }[name]

    def f(x):
        h = x.sin()
        other = part(h)
        h.mul_(2)
        return other.sum() * h.pow(3).sum(-1)

    for method in ("auto", "reverse"):
        expected = hodiff.laplacian(f, x, method="reverse")
        agree(hodiff.laplacian(f, x, method=method), expected)


def test_the_callers_tensor_is_not_for_changing(x):
    def f(x):
        x.detach().mul_(2)
        return (x**3).sum(-1)

    for method in ("jets", "reverse"):
        with pytest.raises(hodiff.GraphError, match=r"f changes its argument|changed in place"):
            hodiff.laplacian(f, x.clone(), method=method)


FRESH = {
    "sine": lambda h: h.sin(),
    "product": lambda h: h * h,
    "sum": lambda h: h + 1,
    "copy": lambda h: h.clone(),
    "converted": lambda h: h.float().double(),
    "joined": lambda h: torch.cat([h, h])[:7],
}


@pytest.mark.parametrize("name", FRESH)
def test_new_memory_may_be_changed(name, x):
    """With jets alone: nothing is refused without a reason."""

    def f(x):
        h = x.sin()
        other = FRESH[name](h)
        h += other
        h *= 2
        return (h**3 + other).sum(-1)

    def copied(x):
        h = x.sin()
        other = FRESH[name](h)
        return ((2 * (h + other)) ** 3 + other).sum(-1)

    agree(hodiff.laplacian(f, x, method="jets"), hodiff.laplacian(copied, x, method="reverse"), 1e-6)


def test_in_place_below_vmap(x):
    def f(z):
        h = z * 2
        h += z
        g = h + 1
        g *= 2
        return (h**3 + g).sum(-1)

    found = torch.vmap(lambda z: hodiff.laplacian(f, z, batch_ndim=0, method="jets"))(x)
    agree(found, 6 * 27 * x.sum(-1))


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x.clone().copy_(x.sin()), "copy_"),
        (lambda x: x.clone().zero_(), "zero_"),
        (lambda x: x.logcumsumexp(-1), "logcumsumexp: its backward takes the logarithm"),
        (lambda x: torch.lu(x.T @ x)[0], "lu"),
    ],
    ids=["copy_", "zero_", "logcumsumexp", "lu"],
)
def test_the_operation_is_named(f, message, x):
    with pytest.raises(hodiff.GraphError, match=message):
        hodiff.jet(f, x, [x])


def test_errors_of_an_operation_are_its_own(x):
    """In the shapes that f knows, without the directions."""
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match the size of tensor b \(4\)"):
        hodiff.laplacian(lambda x: (x.sin() + torch.ones(4, dtype=D)).sum(-1), x, method="jets")
    with pytest.raises(IndexError, match=r"range of \[-2, 1\], but got 2"):
        hodiff.laplacian(lambda x: x.sin().cumsum(2).sum(-1), x, method="jets")
    with pytest.raises(IndexError, match=r"range of \[-2, 1\], but got 5"):
        hodiff.laplacian(lambda x: x.sin().amax(5), x, method="jets")


@pytest.mark.parametrize("f", [torch.square, lambda x: x.amax(0) * x.cumsum(0), lambda x: x.logsumexp(0).sin()])
def test_numbers_without_dimensions(f):
    x, one = torch.tensor(0.7, dtype=D), torch.tensor(1.0, dtype=D)
    _, (first, second) = hodiff.jet(f, x, [one, 0 * one])
    expected = torch.autograd.functional.hessian(f, x)
    agree(second, expected)
    agree(first, torch.autograd.functional.jacobian(f, x))


@pytest.mark.parametrize("tile", [8, 200, 10**9])
def test_products_that_are_made_a_few_directions_at_a_time(tile, monkeypatch):
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    monkeypatch.setattr(_series, "TILE_BYTES", tile)
    found = hodiff.laplacian(lambda x: x.pow(3).sin().prod(-1).exp(), x, create_graph=False)
    dense = hodiff.hessian(lambda x: x.pow(3).sin().prod(-1).exp(), x, batch_ndim=1)
    torch.testing.assert_close(found, dense.diagonal(dim1=-2, dim2=-1).sum(-1))
