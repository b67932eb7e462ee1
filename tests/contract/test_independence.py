"""`check_independence=`, wherever `batch_ndim=` is: samples that mix are seen, and nothing else is."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hodiff
from hodiff._core import _independence
from hodiff._core._call import call
from hodiff.errors import BatchMixingWarning

D = torch.float64
X = torch.randn(5, 3, dtype=D, generator=torch.Generator().manual_seed(0))
V = torch.randn(5, 3, dtype=D, generator=torch.Generator().manual_seed(1))

SCALARS = {  # f gives one number per sample
    "grad": lambda f, x, **k: hodiff.grad(f, x, **k),
    "value_and_grad": lambda f, x, **k: hodiff.value_and_grad(f, x, **k),
    "hvp": lambda f, x, **k: hodiff.hvp(f, x, V[: len(x)], **k),
    "hessian": lambda f, x, **k: hodiff.hessian(f, x, **k),
    "value_grad_and_hessian": lambda f, x, **k: hodiff.value_grad_and_hessian(f, x, **k),
    "hessian_diagonal": lambda f, x, **k: hodiff.hessian_diagonal(f, x, **k),
    "cross_hessian": lambda f, x, **k: hodiff.cross_hessian(lambda x, y: f(x) * y.exp().sum(1), x, x.clone(), **k),
    "cross_hvp": lambda f, x, **k: hodiff.cross_hvp(lambda x, y: f(x) * y.exp().sum(1), x, x.clone(), V[: len(x)], **k),
    "jacobian": lambda f, x, **k: hodiff.jacobian(lambda x: torch.stack([f(x), x.sum(1)], 1), x, **k),
    "gradient_penalty": lambda f, x, **k: hodiff.gradient_penalty(f, x, **k),
    "wgan_gp_penalty": lambda f, x, **k: hodiff.wgan_gp_penalty(f, x, x.flip(0), **k),
    "dragan_penalty": lambda f, x, **k: hodiff.dragan_penalty(f, x, **k),
    "r1_penalty": lambda f, x, **k: hodiff.r1_penalty(f, x, **k),
    "r2_penalty": lambda f, x, **k: hodiff.r2_penalty(f, x, **k),
    "jacobian_penalty": lambda f, x, **k: hodiff.jacobian_penalty(f, x, **k),
    "hessian_penalty": lambda f, x, **k: hodiff.hessian_penalty(f, x, **k),
    "curvature_penalty": lambda f, x, **k: hodiff.curvature_penalty(f, x, **k),
    "sliced_score_matching_loss": lambda f, x, **k: hodiff.sliced_score_matching_loss(f, x, log_density=True, **k),
}
# Fields are `MIXED`, below; these evaluate nothing.
NOT_HERE = {"interpolate", "sample_norm", "derivatives_of"}  # the last takes a tensor, which nobody evaluates again
FIELDS = ("laplacian", "divergence", "curl", "biharmonic", "partial", "second_order_operator")
calls = pytest.mark.parametrize("name", SCALARS)


def separate(x):
    return (x**3).sum(1) + x.prod(1)


def running(x):
    return (x.cumsum(0) ** 2).sum(1)


def by_neighbors(x):
    """Only two samples know of each other."""
    return separate(x) + torch.cat([x[1:2, 0] ** 2, torch.zeros(len(x) - 1, dtype=D)])


def batch(name):
    return {} if "penalty" in name or "loss" in name else {"batch_ndim": 1}


@pytest.mark.names
def test_each_function_with_batch_ndim_has_the_check():
    signatures = {
        n: inspect.signature(getattr(hodiff, n)) for n in hodiff.__all__ if inspect.isfunction(getattr(hodiff, n))
    }
    expected = {
        name
        for name, signature in signatures.items()
        if "batch_ndim" in signature.parameters and not any(word in name for word in FIELDS)
    }
    assert expected - NOT_HERE == set(SCALARS), "say in SCALARS how each is called"


@calls
@pytest.mark.parametrize("mixing", [running, by_neighbors, lambda x: separate(x - x.mean(0))])
def test_samples_that_mix_are_seen(name, mixing):
    with pytest.warns(hodiff.BatchMixingWarning, match=r"samples of f are not independent: .* up to \d") as caught:
        SCALARS[name](mixing, X, check_independence=True, **batch(name), **quiet(name))
    assert caught[0].filename == __file__


@calls
def test_samples_that_do_not_are_left_alone(name):
    state = torch.get_rng_state()
    expected = SCALARS[name](separate, X, **batch(name), **quiet(name))
    torch.set_rng_state(state)
    found = SCALARS[name](separate, X, check_independence=True, **batch(name), **quiet(name))  # warnings are errors
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    SCALARS[name](separate, X[:1], check_independence=True, **batch(name), **quiet(name))


def quiet(name):
    """A penalty of a function without parameters is a constant to the optimizer, and says so."""
    return {"create_graph": False} if not batch(name) else {}


@calls
def test_without_samples_there_is_nothing_to_check(name):
    with pytest.raises(hodiff.InputError, match=r"check_independence: with batch_ndim=0 there are no samples"):
        SCALARS[name](lambda x: separate(x).sum(), X, check_independence=True, batch_ndim=0)


@pytest.mark.parametrize("field", [hodiff.divergence, hodiff.laplacian, hodiff.biharmonic, hodiff.value_and_divergence])
def test_one_point_in_the_place_of_points_is_seen(field):
    """Of D coordinates it looks like D points of one; a vector field mixes them, and a function of one number not."""
    vector = lambda x: (x @ torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=D)).sin()
    with pytest.warns(hodiff.BatchMixingWarning, match=r"one point \(D,\) .* x\[None\], or batch_ndim=0"):
        field(vector, X[0, :2])
    field(vector, X[:1, :2])  # warnings are errors
    field(vector, X[0, :2], batch_ndim=0)
    field(torch.sin, X[0, :2])


@pytest.mark.parametrize("x", [torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(4)])
def test_special_points(x):
    """At zero, the derivative of what mixes may be zero too."""
    f = lambda x: (x.reshape(4, -1) ** 2).sum(1) * (1 + x.sum())
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):
        hodiff.grad(lambda x: f(x) + x.square().sum(), x, batch_ndim=1, check_independence=True)


@pytest.mark.parametrize("unit", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("c", [0.01, 0.3])
def test_the_size_is_that_of_the_mixing(unit, c):
    """Sample i + c times the others: what is said is near c, whatever the units."""
    f = lambda x: unit * ((1 - c) * x[:, 0] + c * x[:, 0].sum())
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent") as caught:
        hodiff.grad(f, X, batch_ndim=1, check_independence=True)
    said = float(str(caught[0].message).split("up to ")[1].split(" times")[0])
    assert c / 3 < said < 10 * c


@pytest.mark.parametrize("large", [1.0, 1e12])
def test_one_large_sample_hides_nothing_of_the_others(large):
    """It mixes with none, and its derivative is so large."""
    scale = torch.tensor([1.0, 1.0, large, 1.0, 1.0], dtype=X.dtype)
    alone = lambda x: scale * x.sin().sum(1)
    hodiff.grad(alone, X, batch_ndim=1, check_independence=True)
    others = lambda x: alone(x) + (scale == 1) * x[:2].prod()
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):
        hodiff.grad(others, X, batch_ndim=1, check_independence=True)


def test_a_tensor_already_computed():
    x = X.clone().requires_grad_()
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):
        hodiff.hessian(running(x), x, batch_ndim=1, check_independence=True)
    y = separate(x)
    hodiff.hessian(y, x, batch_ndim=1, check_independence=True)
    y.sum().backward()  # the caller's graph is whole


def test_two_batch_dimensions_containers_and_arguments():
    point = {"a": X.reshape(1, 5, 3), "b": V.reshape(1, 5, 3)}
    f = lambda p, scale: scale * (p["a"] * p["b"]).sum(-1) ** 2
    hodiff.hessian(f, point, batch_ndim=2, check_independence=True, args=(2.0,))
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):
        hodiff.hessian(
            lambda p, scale: f(p, scale).cumsum(1), point, batch_ndim=2, check_independence=True, args=(2.0,)
        )


def test_batch_norm_is_measured_and_its_statistics_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    before = model[1].running_mean.clone()
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent|BatchNorm in training mode") as caught:
        hodiff.grad(model, X, batch_ndim=1, check_independence=True)
    assert {"BatchNorm in training mode, which" in str(w.message) for w in caught} == {True, False}
    assert torch.equal(model[1].running_mean, before)


def test_the_check_draws_nothing_that_is_seen():
    drop = nn.Dropout(0.5)
    f = lambda x: separate(drop(x))
    torch.manual_seed(0)
    expected, after = hodiff.grad(f, X, batch_ndim=1), torch.get_rng_state()
    torch.manual_seed(0)
    found = hodiff.grad(f, X, batch_ndim=1, check_independence=True)
    assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), after)


def test_half_precision_and_a_softmax_raise_no_alarm():
    hodiff.jacobian(lambda x: x.softmax(1), X.to(torch.bfloat16), batch_ndim=1, check_independence=True)
    hodiff.jacobian(lambda x: x.softmax(1), X.float(), batch_ndim=1, check_independence=True)
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):  # a softmax over the batch
        hodiff.jacobian(lambda x: x.softmax(0), X, batch_ndim=1, check_independence=True)


def test_outputs_that_cancel_are_seen_one_by_one():
    with pytest.warns(hodiff.BatchMixingWarning, match="not independent"):
        hodiff.jacobian(lambda x: torch.stack([running(x), -running(x)], 1), X, batch_ndim=1, check_independence=True)


def mixing(x: Tensor) -> Tensor:
    return (x.cumsum(0) ** 2).sum(1)


MIXED: dict[str, Callable[..., Any]] = {
    "laplacian": lambda **o: hodiff.laplacian(mixing, torch.ones(3, 2, dtype=D), **o),
    "laplacian, reverse": lambda **o: hodiff.laplacian(mixing, torch.ones(3, 2, dtype=D), method="reverse", **o),
    "grad": lambda **o: hodiff.grad(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hessian": lambda **o: hodiff.hessian(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hvp": lambda **o: hodiff.hvp(mixing, torch.ones(3, 2, dtype=D), torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "hessian_diagonal": lambda **o: hodiff.hessian_diagonal(mixing, torch.ones(3, 2, dtype=D), batch_ndim=1, **o),
    "divergence": lambda **o: hodiff.divergence(lambda x: x.cumsum(0) ** 2, torch.ones(3, 2, dtype=D), **o),
    "gradient_penalty": lambda **o: hodiff.gradient_penalty(mixing, torch.ones(3, 2, dtype=D), create_graph=False, **o),
}


@pytest.mark.parametrize("name", MIXED)
def test_check_independence_wherever_batch_ndim_is(name: str) -> None:
    with pytest.warns(hodiff.BatchMixingWarning, match="(?i)sample"):
        MIXED[name](check_independence=True)


def test_every_function_with_batch_ndim_has_it() -> None:
    import inspect

    have = {
        name: set(inspect.signature(getattr(hodiff, name)).parameters)
        for name in hodiff.__all__
        if inspect.isfunction(getattr(hodiff, name))
    }
    takes_f = {name for name, parameters in have.items() if parameters & {"f", "critic"} and "batch_ndim" in parameters}
    assert not {name for name in takes_f if "check_independence" not in have[name]}


def quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args, **kwargs)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_batch_norm_is_told_each_time_it_mixes(create_graph):
    norm, x = nn.BatchNorm1d(3), torch.randn(5, 3)

    def product():
        return hodiff.hvp(lambda x: (norm(x) ** 3).sum(1), x, x, batch_ndim=1, create_graph=create_graph)

    for _ in range(2):
        with pytest.warns(BatchMixingWarning, match="BatchNorm"):
            product()
    norm.eval()
    quietly(product)


def test_one_sample_is_not_evaluated_to_see_whether_it_mixes():
    calls = []

    def f(x):
        calls.append(1)
        return x.square().sum(1)

    _independence.check(call(f, torch.ones(1, 3), 1, batch_ndim=1))
    assert not calls


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 3e-4), (D, 1e-9)])
def test_weak_couplings_are_seen_and_rounding_is_none(dtype: torch.dtype, least: float) -> None:
    """Deep and wide networks, with normalization and attention in each sample; and a part of the mean of all."""
    for seed in range(3):
        torch.manual_seed(seed)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
        net = nn.Sequential(nn.Linear(3, 64), *layers, nn.Linear(64, 1)).to(dtype)
        x = torch.randn(32, 3, dtype=dtype)
        f = lambda x, net=net: net(x)[:, 0] + (1e3 * x).sin().sum(1)
        hodiff.grad(f, x, batch_ndim=1, check_independence=True)  # warnings are errors
        mixed = lambda x, net=net: net(x)[:, 0] + least * net(x)[:, 0].sum()
        with pytest.warns(BatchMixingWarning, match="not independent"):
            hodiff.grad(mixed, x, batch_ndim=1, check_independence=True)


@calls
@pytest.mark.parametrize("share", [1e-3, 0.0])
def test_one_much_larger_sample_hides_nothing_of_what_the_others_do(name, share):
    """By how much the largest gradient outweighs the others does not matter."""
    scale = torch.tensor([1.0, 1.0, 1e12, 1.0, 1.0], dtype=D)
    f = lambda x: scale[: len(x)] * separate(x) + share * (x.flip(0) ** 3).sum(1).roll(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SCALARS[name](f, X, check_independence=True, **batch(name))
    assert any(issubclass(w.category, BatchMixingWarning) for w in seen) == bool(share)


@pytest.mark.filterwarnings("error")
def test_rounding_at_samples_that_do_not_matter_is_no_mixing():
    """What is next to nothing beside the usual gradient is not held against the gradient of the sample that it hits."""
    on = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=D)
    f = lambda x: on * (separate(x) + 1e-20 * x[2, 0])
    hodiff.grad(f, X, batch_ndim=1, check_independence=True)
