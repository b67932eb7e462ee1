"""`per_sample_grad` against one sample at a time, by the routes of layers that are not read in factors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff._core import _reverse
from hodiff.calculus import _per_sample
from tests.support.passes import Count

D = torch.float64
X, Y = torch.linspace(-1, 1, 21, dtype=D).reshape(7, 3).sin(), torch.arange(7) % 2


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Twice(nn.Module):
    """A parameter used in two places; and a checkpoint, whose blocks run again when vmap is over."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2)
        self.outer.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        first = lambda z: torch.tanh(self.inner(z))
        h = checkpoint(first, x, use_reentrant=False) if self.checkpointed else first(x)
        return self.outer(self.inner(h))


class Routed(nn.Linear):
    """Python that looks at values, which vmap refuses."""

    def forward(self, x):
        return torch.stack([super(Routed, self).forward(row) * (2 if row.sum() > 0 else 1) for row in x])


class Straight(nn.Linear):
    """The value of a sample is its own; its gradient is not."""

    def forward(self, x):
        y = super().forward(x)
        return y + (y.mean(0) - y.mean(0).detach())


def models():
    torch.manual_seed(0)
    return {
        "linear": nn.Linear(3, 2),
        "norms": nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)),
        "convolution": nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)),
        "twice": Twice(),
        "twice, checkpointed": Twice(checkpointed=True),
        "batch norm, eval": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(),
        "routed": Routed(3, 2),
        "straight": Straight(3, 2),
        "batch norm": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    }


BY_ROWS = {"twice, checkpointed", "routed", "straight", "batch norm"}


def one_by_one(f, model, batch):
    """By a backward pass for each sample, on the graph of the whole batch."""
    values = f(model, batch)
    names = [name for name, _ in model.named_parameters()]
    rows = [torch.autograd.grad(v, list(model.parameters()), retain_graph=True) for v in values]
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(names)}


@pytest.fixture(autouse=True)
def not_in_factors(monkeypatch):
    """As if no layer were known: `test_rows_in_factors.py` has the others."""
    monkeypatch.setattr(_per_sample, "_factored", lambda *_: None)


@pytest.fixture
def routes(monkeypatch):
    """Which route gave the result."""
    taken, inner = [], _per_sample._by_samples

    def noted(*args):
        found = inner(*args)
        taken.append("rows" if found is None else "samples")
        return found

    monkeypatch.setattr(_per_sample, "_by_samples", noted)
    return taken


@pytest.mark.parametrize("chunk_size", ["auto", 1, 3])
@pytest.mark.parametrize("name", models())
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_against_one_by_one(name, chunk_size, routes):
    model = models()[name].double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = hodiff.per_sample_grad(losses, model, (X, Y), chunk_size=chunk_size)
    assert routes == ["rows" if name in BY_ROWS else "samples"]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    expected = one_by_one(losses, model, (X, Y))
    assert list(found) == list(expected)
    for key in found:
        assert not found[key].requires_grad
        torch.testing.assert_close(found[key], expected[key])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("several", [False, True], ids=["(N,)", "(N, K)"])
@pytest.mark.parametrize("name", sorted(BY_ROWS))
@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
def test_on_the_whole_batch(name, several, routes):
    """Where vmap is none, or a sample alone gives something else."""
    model = models()[name].double()
    f = (lambda m, batch: m(batch[0]).exp()) if several else losses
    found = hodiff.per_sample_grad(f, model, (X, Y))
    assert routes == ["rows"]
    for k in range(2 if several else 1):
        expected = one_by_one((lambda m, b, k=k: f(m, b)[:, k]) if several else f, model, (X, Y))
        for key in found:
            torch.testing.assert_close(found[key][:, k] if several else found[key], expected[key])


def by_autograd(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(1)


def by_grad(model, x):
    return hodiff.grad(lambda x: model(x).sum(1), x, batch_ndim=1, create_graph=True)


@pytest.mark.parametrize("f", [by_autograd, by_grad])
def test_functions_that_differentiate_backwards_see_the_whole_batch(f, routes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, seen = torch.randn(70, 3, dtype=D), []
    found = hodiff.per_sample_grad(lambda m, x: seen.append(len(x)) or f(m, x), model, x, strict=False)
    assert routes == ["rows"] and seen == [70, 1]
    values = f(model, x)
    for n in (0, 31, 32, 69):
        each = hodiff.jacobian(values[n], [model[0].weight, model[2].weight])
        for key, expected in zip(("0.weight", "2.weight"), each, strict=True):
            torch.testing.assert_close(found[key][n], expected)


def test_dropout_takes_the_masks_of_the_whole_batch(routes):
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    torch.manual_seed(1)
    found = hodiff.per_sample_grad(losses, model, (X, Y))
    torch.manual_seed(1)
    expected = one_by_one(losses, model, (X, Y))
    assert routes == []
    for key in found:
        torch.testing.assert_close(found[key], expected[key])


def test_points_of_other_kinds_and_batches_of_other_kinds():
    w = {"a": torch.tensor([1.0, 2.0, 3.0], dtype=D), "b": [torch.tensor(2.0, dtype=D)]}
    f = lambda p, batch: ((batch["x"] @ p["a"]) ** 2 * p["b"][0] * batch["scale"])[:, None]
    found = hodiff.per_sample_grad(f, w, {"x": X, "scale": torch.tensor(3.0, dtype=D), "note": "text"})
    y = X @ w["a"]
    torch.testing.assert_close(found["a"], 2 * 2 * 3 * y[:, None] * X)
    torch.testing.assert_close(found["b"][0], 3 * y**2)


def test_a_constant_of_as_many_entries_is_no_sample(routes):
    weight = torch.arange(1.0, 8.0, dtype=D)  # seven, as there are samples
    f = lambda w, batch: (batch[0] @ w) * batch[1].sum()
    found = hodiff.per_sample_grad(f, torch.ones(3, dtype=D), (X, weight))
    assert routes == ["rows"]
    torch.testing.assert_close(found, X * 28)


@pytest.mark.parametrize(("mixing", "route"), [(0.0, "samples"), (1e-2, "rows")])
def test_coarse_parameters_beside_data_of_double_precision(mixing, route, routes):
    """What they give rounds as they do, though it is promoted; samples that mix are still seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    x, y, seen = torch.randn(300, 3), torch.randn(300, dtype=D), []

    def f(m, batch):
        seen.append(len(batch[0]))
        return (m(batch[0])[:, 0] - batch[1]) ** 2 + mixing * m(batch[0]).mean()

    found = hodiff.per_sample_grad(f, model, (x, y))
    assert seen == [300, 1] and routes == [route] and found["0.weight"].dtype == torch.float32
    expected = one_by_one(f, model, (x, y))
    torch.testing.assert_close(found["0.weight"], expected["0.weight"], rtol=1e-4, atol=1e-5)


TYPES = [(D, torch.float32), (D, torch.bfloat16), (torch.float32, D), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("several", [False, True], ids=["(N,)", "(N, K)"])
@pytest.mark.parametrize(("parameters", "of_losses"), TYPES)
def test_losses_of_another_precision_than_the_parameters(parameters, of_losses, several):
    """As of a residual that a model keeps in float32."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, dtype=parameters), X.to(parameters)
    f = lambda m, batch: m(batch).to(of_losses) ** 2 if several else m(batch).to(of_losses).square().sum(1)
    found = hodiff.per_sample_grad(f, model, x)
    for k in range(2 if several else 1):
        expected = one_by_one((lambda m, b, k=k: f(m, b)[:, k]) if several else f, model, x)
        for key in found:
            torch.testing.assert_close(found[key][:, k] if several else found[key], expected[key], rtol=0.02, atol=1e-3)


def test_samples_that_mix_though_their_gradients_add_up(routes):
    f = lambda w, batch: batch @ w + (batch @ w).mean()
    found = hodiff.per_sample_grad(f, torch.ones(3, dtype=D), X)
    torch.testing.assert_close(found, X + X.mean(0))


@pytest.mark.parametrize("scale", [1e-9, 1e9])
@pytest.mark.parametrize("name", ["norms", "straight"])
def test_what_adds_up_is_known_at_any_scale(name, scale, routes):
    model = models()[name].double()
    f = lambda m, batch: scale * losses(m, batch)
    found = hodiff.per_sample_grad(f, model, (X, Y))
    assert routes == ["rows" if name == "straight" else "samples"]
    expected = one_by_one(f, model, (X, Y))
    for key in found:
        torch.testing.assert_close(found[key] / scale, expected[key] / scale)


@pytest.mark.parametrize("chunk_size", ["auto", 2])
def test_samples_that_mix_beside_a_much_larger_one(chunk_size, routes):
    """A loss of 1e12 hides nothing of what the others do to each other, neither in values nor in sums of gradients."""
    x = torch.cat([X[:6], torch.full((1, 3), 1e12, dtype=D)])
    f = lambda w, batch: batch @ w + torch.tanh(batch @ w).mean()
    w = torch.ones(3, dtype=D)
    found = hodiff.per_sample_grad(f, w, x, chunk_size=chunk_size)
    slopes = x * (1 - torch.tanh(x @ w) ** 2)[:, None]
    torch.testing.assert_close(found, x + slopes.mean(0))
    assert routes == ["rows"]


def test_the_values_alone_tell_what_mixes_beside_a_much_larger_one(routes, monkeypatch):
    """The first of two checks, without the second, which takes a pass."""
    monkeypatch.setattr(_per_sample, "_rows_add_up", lambda *args: True)
    x = torch.cat([X[:6], torch.full((1, 3), 1e12, dtype=D)])
    found = hodiff.per_sample_grad(lambda w, b: b @ w + (b @ w).tanh().mean(), torch.ones(3, dtype=D), x)
    assert routes == ["rows"] and found[0].abs().max() < 10


@pytest.mark.parametrize("least", [0.0, 1.0])
def test_gradients_that_mix_beside_a_much_larger_one(least, routes):
    """The values do not tell: that of each sample is right, and a derivative is not."""
    x = torch.cat([X[:6], torch.full((1, 3), 1e12, dtype=D)])

    def f(w, batch):
        y = torch.tanh(batch @ w)
        return batch @ w + least * (y.mean() - y.mean().detach())

    found = hodiff.per_sample_grad(f, torch.ones(3, dtype=D), x)
    slopes = x * (1 - torch.tanh(x.sum(1)) ** 2)[:, None]
    torch.testing.assert_close(found, x + least * slopes.mean(0))
    assert routes == ["rows" if least else "samples"]


@pytest.mark.parametrize("unit", [2.0**-400, 2.0**-60, 1.0, 2.0**60, 2.0**400])
@pytest.mark.parametrize("norms", [[1.0, 3.0, 2.0, 1e-6], [0.0, 1.0, 4.0], [0.0, 0.0], [5.0]])
def test_all_samples_count_alike_in_any_unit(norms, unit):
    """By their weights each is 0.5 to 1.5 of the usual one, no two alike; what is next to nothing counts less."""
    norms = torch.tensor(norms, dtype=D) * unit
    weights = _per_sample.even_weights(norms)
    assert weights.isfinite().all() and (weights > 0).all() and len(weights.unique()) == len(norms)
    some = norms[norms > 0]
    if len(some):
        sizes = (weights * norms)[norms > 0] / some.median()
        assert (sizes > 0.5).all() and (sizes < 1.5).all()


def test_selected_and_strict(routes):
    model = models()["norms"].double()
    found = hodiff.per_sample_grad(lambda s, b: losses(s.module, b), hodiff.select(model, "3.*"), (X, Y))
    expected = one_by_one(losses, model, (X, Y))
    assert list(found) == ["3.weight", "3.bias"]
    torch.testing.assert_close(found["3.weight"], expected["3.weight"])
    pair = {"a": torch.ones(3, dtype=D), "b": torch.ones(2, dtype=D)}
    f = lambda p, x: x @ p["a"]
    assert hodiff.per_sample_grad(f, pair, X)["b"].shape == (7, 2)
    assert routes == ["samples", "samples"]  # zeros add up to zero
    with pytest.raises(hodiff.GraphError, match="strict=True"):
        hodiff.per_sample_grad(f, pair, X, strict=True)


def test_the_result_can_be_differentiated():
    w = torch.tensor([1.0, 2.0, 3.0], dtype=D, requires_grad=True)
    found = hodiff.per_sample_grad(lambda w, x: (x @ w) ** 3, w, X, create_graph=True)
    (second,) = torch.autograd.grad(found.square().sum(), w)
    v = w.detach().clone().requires_grad_()
    plain = 3 * (X @ v)[:, None] ** 2 * X
    torch.testing.assert_close(second, torch.autograd.grad(plain.square().sum(), v)[0])


def test_the_diagonal_of_the_empirical_fisher_matrix(monkeypatch):
    model = models()["norms"].double()
    rows = hodiff.per_sample_grad(losses, model, (X, Y))
    F_ = hodiff.FisherOperator(
        lambda m, b: m(b[0]), nn.CrossEntropyLoss(), model, data=[(X[:4], Y[:4]), (X[4:], Y[4:])], kind="empirical"
    )
    found = hodiff.diagonal(F_, method="exact")
    assert found.products == 1  # a pass for all samples of a batch, and no product for each of the 34 parameters
    for key, row in rows.items():
        torch.testing.assert_close(found.value[key], row.square().mean(0))


def test_passes(monkeypatch):
    count = Count(monkeypatch)
    model = models()["norms"].double()
    hodiff.per_sample_grad(losses, model, (X, Y))
    assert count.passes == 2  # the whole batch, and all samples
    count.passes = 0
    hodiff.per_sample_grad(losses, model, (X, Y), chunk_size=3)
    assert count.passes == 1 + 3


def test_as_many_samples_at_once_as_keep_within_bounds(monkeypatch):
    """The largest activation has 7 x 4 numbers of 8 bytes, and eight of its kind are allowed for."""
    model, passes = models()["norms"].double(), []
    for bound in (8 * 28 * 8, 8 * 28 * 8 - 1):
        monkeypatch.setattr(_reverse, "CHUNK_BYTES", bound)
        with monkeypatch.context() as context:
            count = Count(context)
            hodiff.per_sample_grad(losses, model, (X, Y))
        passes.append(count.passes)
    assert passes == [2, 8]


@pytest.mark.parametrize("chunk_size", ["auto", 3, 7, 100])
@pytest.mark.parametrize("name", ["norms", "twice", "batch norm, eval", "routed", "straight", "batch norm"])
def test_several_numbers_of_each_sample(name, chunk_size, routes):
    """Whether sample by sample or not, the gradients of each are those of a backward pass of its own."""
    model = models()[name].double()
    several = lambda model, batch: torch.cat([model(batch[0]), batch[0][:, :1] * model(batch[0])[:, 1:].sin()], 1)
    result = hodiff.per_sample_grad(several, model, (X, Y), chunk_size=chunk_size)
    each = [one_by_one(lambda m, b, k=k: several(m, b)[:, k], model, (X, Y)) for k in range(3)]
    for key, rows in result.items():
        assert rows.shape == (7, 3, *dict(model.named_parameters())[key].shape)
        torch.testing.assert_close(rows, torch.stack([one[key] for one in each], 1), rtol=1e-9, atol=1e-12)


def test_no_numbers_of_each_sample():
    model = nn.Linear(3, 2).double()
    result = hodiff.per_sample_grad(lambda m, b: m(b[0])[:, :0], model, (X, Y), strict=False)
    assert result["weight"].shape == (7, 0, 2, 3)


BAD = {
    "a mean": (lambda m, b: losses(m, b).mean(), r"shape \(\), expected one loss per sample"),
    "matrices": (lambda m, b: m(b[0])[..., None], r"shape \(7, 2, 1\), expected one loss .* or several, \(N, K\)"),
    "a tensor": (torch.ones(7), r"f: got a Tensor.*hodiff\.jacobian\(losses, where\)"),
    "no tensor": (lambda m, b: [losses(m, b)], "returned a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    f, message = BAD[name]
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.per_sample_grad(f, nn.Linear(3, 2).double(), (X, Y))


def crossed_twice(model, x):
    """As physics-informed networks are often written: u (N, 1), its slope (N,)."""
    x = x.detach().requires_grad_()
    u = model(x)
    return u * torch.autograd.grad(u.sum(), x, create_graph=True)[0][:, 0]


@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize(
    "f",
    [
        lambda m, b: m(b[0]) - b[1],
        lambda m, b: (m(b[0]) - b[1]) ** 2,
        lambda m, b: b[1] * (m(b[0])[:, :1] - 1),
        lambda m, b: crossed_twice(m, b[0]),
    ],
    ids=["difference", "square", "weight", "autograd"],
)
def test_samples_crossed_with_samples_by_broadcasting(f, count):
    """(N, 1) and (N,) are (N, N): not N numbers of each sample."""
    x = torch.randn(count, 3, dtype=D)
    for model in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))):
        if count == 2 and len(list(model.modules())) > 1:
            continue  # BatchNorm takes no single sample, and is not asked
        with pytest.raises(hodiff.InputError, match=rf"\({count}, {count}\) for {count} samples .*squeeze\(-1\)"):
            hodiff.per_sample_grad(f, model.double(), (x, x.sin().sum(1)))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_as_many_numbers_of_each_sample_as_there_are_samples(count, routes):
    """And what comes after draws the same random numbers."""
    model, x = nn.Linear(3, count).double(), torch.randn(count, 3, dtype=D)
    state = torch.get_rng_state()
    found = hodiff.per_sample_grad(lambda m, x: m(x) ** 2 - 1, model, x)
    assert torch.equal(torch.get_rng_state(), state) and routes == ["samples"]
    expected = torch.diag_embed(2 * model(x).detach())
    if count == 1:
        expected = expected[:, 0]
    torch.testing.assert_close(found["bias"], expected)


def test_a_function_that_takes_one_number_of_samples():
    """It cannot be asked whether the samples are crossed."""

    def f(model, x):
        return model(x.reshape(7, 3)).repeat(1, 7)

    model = nn.Linear(3, 1).double()
    found = hodiff.per_sample_grad(f, model, X)
    torch.testing.assert_close(found["weight"], X[:, None, None].expand(7, 7, 1, 3))


def test_a_function_that_takes_the_model_from_outside():
    model = nn.Linear(3, 2).double()
    with pytest.raises(hodiff.GraphError, match="other than through"):
        hodiff.per_sample_grad(lambda w, b: losses(model, b), list(model.parameters()), (X, Y))


def test_residuals_made_of_partial_derivatives_take_one_batched_pass():
    """Each sample's u_xx - u_y by the parameters, against a loop over the samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    points = torch.randn(6, 2, dtype=torch.float64)
    seen = []

    def residual(model, z):
        seen.append(z)
        u = hodiff.partials(lambda z: model(z).squeeze(-1), z, [(0, 0), (1,)])
        return u[0, 0] - u[1,]

    found = hodiff.per_sample_grad(residual, model, points)
    evaluations = len(seen)
    for n, point in enumerate(points):
        expected = hodiff.grad(lambda m, point=point: residual(m, point[None]).sum(), model)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name][n], gradient)
    assert evaluations == 2  # of the whole batch, and of its samples side by side


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_of_another_dtype_than_the_parameters(wide: torch.dtype, narrow: torch.dtype) -> None:
    """As where a model in double precision has a residual in float32: the rows are those of a loop over samples."""
    m, x = nn.Linear(3, 2, dtype=wide), torch.randn(4, 3, dtype=wide)
    loss = lambda m, b: m(b).to(narrow).square().sum(1)
    found = hodiff.per_sample_grad(loss, m, x)
    for name, rows in found.items():
        right = torch.stack([hodiff.grad(lambda m, row=row: loss(m, row[None]), m)[name] for row in x])
        torch.testing.assert_close(rows, right, rtol=0.05 if narrow is torch.bfloat16 else 1e-5, atol=1e-2)
