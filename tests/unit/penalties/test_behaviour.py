"""What a penalty does beside its number: modes, memory, side effects, warnings, errors."""

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff.curvature._memory import LiveBytes
from hodiff.penalties import _gradient
from tests.support.differences import directional_derivative
from tests.support.ledger import flags, snapshot
from tests.unit.penalties.oracles import DOUBLE, conv, mlp, same

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
Y = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)


def score(model):
    return lambda x: -model(x) * x


ALL = {
    "gradient": lambda D: hodiff.gradient_penalty(D, X),
    "wgan_gp": lambda D: hodiff.wgan_gp_penalty(D, X, Y),
    "dragan": lambda D: hodiff.dragan_penalty(D, X),
    "r1": lambda D: hodiff.r1_penalty(D, X),
    "r2": lambda D: hodiff.r2_penalty(D, X),
    "eikonal": lambda D: hodiff.eikonal_penalty(D, X),
    "gradient_norm": lambda D: hodiff.gradient_norm_penalty(lambda D: D(X).mean(), D),
    "jacobian": lambda D: hodiff.jacobian_penalty(D, X),
    "jacobian, 3": lambda D: hodiff.jacobian_penalty(D, X, samples=3),
    "jacobian, exact": lambda D: hodiff.jacobian_penalty(D, X, samples=None),
    "hessian": lambda D: hodiff.hessian_penalty(D, X),
    "hessian, differences": lambda D: hodiff.hessian_penalty(D, X, method="differences"),
    "curvature": lambda D: hodiff.curvature_penalty(D, X),
    "score": lambda D: hodiff.sliced_score_matching_loss(score(D), X),
    "score, log-density": lambda D: hodiff.sliced_score_matching_loss(D, X, log_density=True, samples=2),
    "path length": lambda D: hodiff.PathLengthPenalty()(D, X),
}


@pytest.mark.parametrize("name", ALL)
def test_no_grad_and_inference_mode_give_the_detached_value(name):
    D = mlp()
    torch.manual_seed(0)
    expected = ALL[name](D)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode():
            found = ALL[name](D)
        assert not found.requires_grad
        torch.testing.assert_close(found.clone(), expected.detach())


def test_inference_tensors_and_an_explicit_create_graph():
    D = mlp()
    with torch.inference_mode():
        points = X.clone()
        detached = hodiff.wgan_gp_penalty(D, points, points)
        recorded = hodiff.gradient_penalty(D, points, create_graph=True, target=1.0, weight=10.0)
    assert not detached.requires_grad
    same(recorded, hodiff.gradient_penalty(D, X, target=1.0, weight=10.0), D)
    with torch.no_grad():
        recorded = hodiff.gradient_penalty(D, X, create_graph=True)
    same(recorded, hodiff.gradient_penalty(D, X), D)
    assert not hodiff.gradient_penalty(D, X, create_graph=False).requires_grad


@pytest.mark.parametrize("name", ALL)
def test_nothing_of_the_users_changes(name):
    D = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(5, 6)), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)
    )
    D = D.double().eval()
    D[0].train()  # the power iteration moves its vectors
    before, switches, points = snapshot(D), flags(), (X.clone(), X._version, Y.clone())
    ALL[name](D)
    assert snapshot(D) == before
    assert flags() == switches
    assert torch.equal(X, points[0]) and X._version == points[1] and torch.equal(Y, points[2])
    assert not X.requires_grad and X.grad is None


@pytest.mark.parametrize("name", ALL)
def test_the_losses_backward_frees_everything(name):
    """Nothing but the gradients lives after a step; nothing at all under `no_grad`. Without the collector."""
    D = mlp()
    with LiveBytes():
        ALL[name](D).backward()  # the gradients now exist, and later steps add to them
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            loss = ALL[name](D)
            assert live.now > 100 * loss.nbytes  # the graphs of the value and of the gradient
            loss.backward()
            # What is left are the points that were made, one or a few: the graph's leaf is one of them.
            assert live.now - loss.nbytes in [count * X.nbytes for count in range(5)]
            del loss
            assert live.now == 0
            with torch.no_grad():
                value = ALL[name](D)
            assert live.now == value.untyped_storage().nbytes()
    finally:
        gc.enable()


def test_fakes_are_detached_and_return_outputs_saves_a_forward():
    G, D, calls = nn.Linear(3, 5).double(), mlp(), []
    D.register_forward_hook(lambda *_: calls.append(1))
    fake = G(torch.randn(6, 3, dtype=DOUBLE))
    penalty, logits = hodiff.r1_penalty(D, X, return_outputs=True)
    assert len(calls) == 1
    of_fakes = hodiff.wgan_gp_penalty(D, X, fake, detach=True) + hodiff.r2_penalty(D, fake, detach=True)
    loss = F.softplus(-logits).mean() + penalty + of_fakes
    loss.backward()
    assert all(p.grad is None for p in G.parameters())
    expected = mlp()
    expected.load_state_dict(D.state_dict())
    F.softplus(-expected(X)).mean().backward()
    assert D[-1].bias.grad.allclose(expected[-1].bias.grad)  # the penalties have no gradient by it


def test_a_penalty_is_a_function_that_hodiff_can_differentiate():
    D = mlp()
    names = [name for name, _ in D.named_parameters()]
    v = {name: torch.randn_like(p) for name, p in D.named_parameters()}
    f = lambda D: hodiff.gradient_penalty(D, X, target=1.0)
    found = hodiff.hvp(f, D, v)
    flat = torch.cat([found[name].flatten() for name in names])

    def gradient(theta):
        copy = mlp()
        nn.utils.vector_to_parameters(theta, copy.parameters())
        g = hodiff.grad(f, copy)
        return torch.cat([g[name].flatten() for name in names])

    theta = nn.utils.parameters_to_vector(D.parameters())
    expected = directional_derivative(gradient, theta, torch.cat([v[name].flatten() for name in names]), step=1e-3)
    torch.testing.assert_close(flat, expected, rtol=1e-6, atol=1e-8)


# --- modules ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.mha(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


@pytest.mark.parametrize("module", [Attention, Recurrent])
def test_attention_and_recurrent_critics(module):
    D, x = module().double(), torch.randn(3, 5, 4, dtype=DOUBLE)
    leaf = x.clone().requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (g,) = torch.autograd.grad(D(leaf).sum(), leaf, create_graph=True)
        same(hodiff.gradient_penalty(D, x, target=1.0), (g.flatten(1).norm(dim=1) - 1).square().mean(), D)


def test_what_has_no_second_derivative_is_named():
    a, own = torch.randn(6, 5, dtype=DOUBLE, requires_grad=True), torch.arange(6).unsqueeze(1)
    bags = lambda x: (F.embedding_bag(own, x) * a).exp()
    with pytest.raises(hodiff.GraphError, match="no second derivative of embedding_bag"):
        hodiff.gradient_penalty(lambda x: bags(x).sum(1), X)
    for projections in (1, 2):
        with pytest.raises(hodiff.GraphError, match="no second derivative of embedding_bag"):
            hodiff.jacobian_penalty(bags, X, samples=projections)
    with torch.no_grad():  # as a number it exists
        hodiff.gradient_penalty(lambda x: bags(x).sum(1), X)


def test_in_place_first_layer():
    D = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 1)).double()
    with pytest.raises((RuntimeError, hodiff.GraphError), match=r"in-place operation|in place") as caught:
        hodiff.gradient_penalty(D, X)
    assert "x.clone()" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert hodiff.gradient_penalty(lambda x: D(x.clone()), X).requires_grad


# --- samples that mix ------------------------------------------------------------------------------------------------


def test_batch_norm_in_training_mode_warns():
    D = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.warns(hodiff.BatchMixingWarning, match="BatchNorm in training mode"):
        hodiff.r1_penalty(D, X)
    D.eval()
    hodiff.r1_penalty(D, X, check_independence=True)  # silent: warnings are errors here


@pytest.mark.parametrize("n", [2, 7])
def test_the_probe_finds_what_is_not_batch_norm(n):
    D, x = mlp(), torch.randn(n, 5, dtype=DOUBLE)
    state = torch.get_rng_state()
    hodiff.gradient_penalty(D, x, check_independence=True)
    hodiff.gradient_penalty(conv(), torch.randn(n, 2, 8, 8, dtype=DOUBLE), check_independence=True)
    hodiff.gradient_penalty(D, x[None], batch_ndim=2, check_independence=True)
    assert not torch.equal(state, torch.get_rng_state())  # that was randn: the probe's signs are its own
    deviation = lambda x: D(x - x.mean(0))  # as minibatch statistics do
    with pytest.warns(hodiff.BatchMixingWarning, match=r"samples of f are not independent: .* up to \d"):
        found = hodiff.gradient_penalty(deviation, x, check_independence=True)
    same(found, hodiff.gradient_penalty(deviation, x), D)


def test_the_probe_draws_nothing():
    D = mlp()
    state = torch.get_rng_state()
    hodiff.gradient_penalty(D, X, check_independence=True)
    assert torch.equal(state, torch.get_rng_state())


# --- nothing to train ------------------------------------------------------------------------------------------------


class Cut(torch.autograd.Function):
    """Through NumPy: `requires_grad` is set, and nothing is behind it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x * w).sum(1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return torch.from_numpy((g[:, None] * w).detach().numpy()), (g[:, None] * x).sum(0)


def frozen_smooth():
    return mlp().requires_grad_(False)


@pytest.mark.parametrize(
    "call",
    [
        lambda: hodiff.gradient_penalty(frozen_smooth(), X),  # requires grad, through our own leaf alone
        lambda: hodiff.jacobian_penalty(frozen_smooth(), X),
        lambda: hodiff.curvature_penalty(frozen_smooth(), X),
        lambda: hodiff.sliced_score_matching_loss(score(frozen_smooth()), X),
        lambda: hodiff.hessian_penalty(frozen_smooth(), X),
        lambda: hodiff.gradient_penalty(lambda x: x.sum(1), X),
        lambda: hodiff.gradient_penalty(lambda x: Cut.apply(x, torch.ones(5, dtype=DOUBLE, requires_grad=True)), X),
        lambda: hodiff.hessian_penalty(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).double(), X),
    ],
)
def test_a_constant_penalty_warns(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.CustomFunctionWarning)
        with pytest.warns(hodiff.HodiffWarning, match="no trainable tensor is reachable from the gradient"):
            call()
    with torch.no_grad():
        call()


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(hodiff.HodiffWarning, match="no trainable") as caught:
        hodiff.r1_penalty(frozen_smooth(), X)
    assert caught[0].filename == __file__


def test_a_hessian_penalty_of_relus_is_zero_and_differences_are_not():
    torch.manual_seed(1)
    f = nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 2)).double()
    with torch.no_grad():
        assert hodiff.hessian_penalty(f, X) == 0
        assert hodiff.hessian_penalty(f, X, method="differences") > 0


# --- input -----------------------------------------------------------------------------------------------------------

D = mlp()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hodiff.gradient_penalty(lambda x: D(x).mean(), X), r"a mean over the batch .* 1/N"),
        (lambda: hodiff.r1_penalty(lambda x: F.softplus(D(x)).mean(), X), "expected one element per sample"),
        (lambda: hodiff.curvature_penalty(lambda x: D(x).mean(), X), "expected one element per sample"),
        (lambda: hodiff.gradient_penalty(lambda x: D(x)[:3], X), r"returned shape \(3, 1\)"),
        (lambda: hodiff.gradient_penalty(lambda x: (D(x), x), X), r"f returned a tuple.*critic\(x\)\[0\]"),
        (lambda: hodiff.gradient_penalty(D, X, power=0.5), "power: got 0.5, expected a number of at least 1"),
        (lambda: hodiff.gradient_penalty(D, X, target=-1.0), "target: got -1.0"),
        (lambda: hodiff.gradient_penalty(D, X, target=torch.ones(4)), r"target has shape \(4,\)"),
        (lambda: hodiff.gradient_penalty(D, X, weight=float("nan")), "weight: got nan"),
        (lambda: hodiff.gradient_penalty(D, X, reduction="avg"), 'reduction: got .avg., expected "mean"'),
        (lambda: hodiff.gradient_penalty(D, X, patch_reduction="max"), "patch_reduction: got"),
        (lambda: hodiff.gradient_penalty(D, X, ord=3), "ord: got 3"),
        (lambda: hodiff.gradient_penalty(D, X, grad_scale=0), "grad_scale: got 0"),
        (lambda: hodiff.gradient_penalty(3, X), "f: got an int, expected a function"),
        (lambda: hodiff.gradient_penalty(D, X.long()), "x has dtype torch.int64"),
        (lambda: hodiff.gradient_penalty(D, X[:0]), "x: the batch is empty"),
        (lambda: hodiff.gradient_penalty(lambda m: m(X).mean(), D, batch_ndim=0, check_independence=True), "samples"),
        (lambda: hodiff.wgan_gp_penalty(D, X, X[:1]), r"fake has shape \(1, 5\), but real has \(6, 5\)"),
        (lambda: hodiff.dragan_penalty(D, X.long()), "real has dtype torch.int64"),
        (lambda: hodiff.dragan_penalty(D, X, std=-1.0), "std: got -1.0"),
        (lambda: hodiff.r1_penalty(D, X, gamma=-1.0), "gamma: got -1.0"),
        (lambda: hodiff.eikonal_penalty(D, X[0]), r"points has shape \(5,\).*points\[None\]"),
        (lambda: hodiff.eikonal_penalty(D, [X]), "points: got a list"),
        (lambda: hodiff.jacobian_penalty(D, X, samples=0), "samples: got 0"),
        (
            lambda: hodiff.jacobian_penalty(D, X, probes="cube"),
            "probes: got .cube., expected .rademacher. or .gaussian.",
        ),
        (lambda: hodiff.jacobian_penalty(lambda x: D(x).sum(), X), r"f returned shape \(\), expected \(6,\) in front"),
        (lambda: hodiff.hessian_penalty(D, X, samples=1), "samples: got 1"),
        (lambda: hodiff.hessian_penalty(D, X, method="forward"), "method: got .forward."),
        (lambda: hodiff.hessian_penalty(D, X, reduction="median"), 'reduction: got .median., expected "max"'),
        (lambda: hodiff.hessian_penalty(X, X), "f: got a Tensor, expected a function"),
        (lambda: hodiff.curvature_penalty(X, X), "f: got a Tensor, expected a function"),
        (lambda: hodiff.sliced_score_matching_loss(D, X), "needs log_density=True"),
        (lambda: hodiff.sliced_score_matching_loss(lambda x: torch.stack([x, x]), X), "returned 2 vectors"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call()


def test_tensor_targets():
    target = torch.linspace(0, 1, 6, dtype=DOUBLE)
    one_by_one = [hodiff.gradient_penalty(D, X[i : i + 1], target=float(t), power=1) for i, t in enumerate(target)]
    found = hodiff.gradient_penalty(D, X, target=target, power=1, reduction="none")
    torch.testing.assert_close(found, torch.stack(one_by_one))


def r1_of_attached(critic, x):
    return hodiff.r1_penalty(critic, x, detach=True)


@pytest.mark.parametrize("penalty", [hodiff.gradient_penalty, r1_of_attached, hodiff.jacobian_penalty])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_activation_checkpoints_in_a_differentiable_penalty(penalty, requires_grad):
    """The recomputation in the user's backward records as much as the forward did: our leaf still requires grad."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=requires_grad)
    found = []
    for critic in (net, lambda x: torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)):
        net.zero_grad()
        penalty(critic, x).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True)) and len(found[0]) >= 3
    assert requires_grad or x.grad is None


@pytest.mark.parametrize("method", ["exact", "differences"])
def test_hessian_penalty_of_one_draw(method):
    """Different masks in its evaluations would make a penalty of thousands out of nothing."""
    torch.manual_seed(0)
    drop, z = nn.Dropout(0.5), torch.randn(4, 6, dtype=torch.float64)
    state = torch.get_rng_state()
    drop(z)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    options = {"generator": torch.Generator().manual_seed(0), "method": method, "create_graph": False}
    assert hodiff.hessian_penalty(lambda z: drop(z) * 3, z, **options) <= 1e-12
    assert torch.equal(torch.get_rng_state(), after)


def test_curvature_penalty_of_one_draw():
    """The gradient there and here is that of one mask."""
    torch.manual_seed(0)
    drop, z = nn.Dropout(0.5), torch.randn(4, 6, dtype=torch.float64)
    assert hodiff.curvature_penalty(lambda z: (drop(z) * 3).sum(1), z, create_graph=False) == 0


def test_hessian_penalty_without_a_step():
    with pytest.raises(hodiff.InputError, match="epsilon: got 0"):
        hodiff.hessian_penalty(lambda z: z**2, torch.ones(2, 2), method="differences", epsilon=0.0)


# --- the caller's own random vectors ---------------------------------------------------------------------------------


def signs(count, *shape):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(4), dtype=DOUBLE).sign()


WITH_VECTORS = {
    "jacobian": lambda f, **k: hodiff.jacobian_penalty(f, X, **k),
    "jacobian, exact": lambda f, **k: hodiff.jacobian_penalty(f, X, samples=None, **k),
    "hessian": lambda f, **k: hodiff.hessian_penalty(f, X, **k),
    "hessian, differences": lambda f, **k: hodiff.hessian_penalty(f, X, method="differences", **k),
    "score": lambda f, **k: hodiff.sliced_score_matching_loss(f, X, **k),
}


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_the_callers_vectors_are_those_used(name, monkeypatch):
    f, v = mlp(5, 5), signs(3, 6, 5)
    state = torch.get_rng_state()
    found = WITH_VECTORS[name](f, vectors=v)
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn
    monkeypatch.setattr(_gradient, "draw", lambda *_: v)
    same(found, WITH_VECTORS["jacobian" if "exact" in name else name](f), f)


@pytest.mark.parametrize("name", WITH_VECTORS)
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_callers_vectors_may_be_of_inference_mode(name, create_graph):
    f, v = mlp(5, 5), signs(3, 6, 5)
    for given in (v, v[:1])[: 1 if "hessian" in name else 2]:
        with torch.inference_mode():
            made = given.clone()
        found = WITH_VECTORS[name](f, vectors=made, create_graph=create_graph)
        assert torch.equal(found, WITH_VECTORS[name](f, vectors=given, create_graph=create_graph))


class Doubled(torch.autograd.Function):
    """Its backward writes into what it is given."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return g.mul_(2)


@pytest.mark.parametrize("name", ["jacobian", "score"])
def test_a_backward_that_writes_does_not_write_into_the_callers_vectors(name):
    v = torch.linspace(-1, 1, 30, dtype=DOUBLE).view(6, 5)
    before, plain = v.clone(), WITH_VECTORS[name](lambda x: 2 * x.sin(), vectors=v, create_graph=False)
    found = WITH_VECTORS[name](lambda x: Doubled.apply(x.sin()), vectors=v, create_graph=False)
    assert torch.equal(v, before)
    torch.testing.assert_close(found, plain)


def test_vectors_that_do_not_fit():
    f = mlp(5, 5)
    one = signs(1, 6, 5)[0]
    same(hodiff.jacobian_penalty(f, X, vectors=one), hodiff.jacobian_penalty(f, X, vectors=one[None]), f)
    for call, words in [
        (lambda: hodiff.jacobian_penalty(f, X, vectors=one[:2]), r"vectors has shape \(2, 5\), expected \(6, 5\)"),
        (lambda: hodiff.jacobian_penalty(f, X, vectors=signs(0, 6, 5)), "vectors: got none"),
        (lambda: hodiff.hessian_penalty(f, X, vectors=one), "vectors: got one vector, expected at least two"),
        (lambda: hodiff.sliced_score_matching_loss(f, X, vectors=one.float()), "vectors is torch.float32"),
    ]:
        with pytest.raises(hodiff.InputError, match=words):
            call()


def test_an_empty_batch_has_no_largest():
    with pytest.raises(hodiff.InputError, match="x: the batch is empty and has no max"):
        hodiff.hessian_penalty(mlp(), X[:0], create_graph=False)


@pytest.mark.parametrize("penalty", [hodiff.jacobian_penalty, hodiff.sliced_score_matching_loss])
def test_an_empty_batch_has_no_mean(penalty):
    with pytest.raises(hodiff.InputError, match="x: the batch is empty and has no mean"):
        penalty(lambda x: -x, X[:0], create_graph=False)


@pytest.mark.filterwarnings("ignore::hodiff.BatchMixingWarning")
@pytest.mark.parametrize("method", ["exact", "differences"])
def test_a_penalty_of_values_alone_moves_no_buffer(method):
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    with torch.no_grad():
        hodiff.hessian_penalty(m, torch.randn(4, 3), method=method)
    assert m[1].num_batches_tracked == 0


def test_a_penalty_of_values_alone_is_of_one_function():
    def penalty(grad_mode):
        torch.manual_seed(0)
        m = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Tanh()).double()
        with torch.set_grad_enabled(grad_mode):
            return hodiff.hessian_penalty(m, torch.ones(2, 3, dtype=DOUBLE), samples=3).detach()

    torch.testing.assert_close(penalty(False), penalty(True))


def test_what_a_penalty_of_the_parameters_gradient_does_not_reach_has_zeros_and_what_is_left_out_has_none():
    model = nn.ModuleDict({"body": nn.Linear(2, 1), "head": nn.Linear(2, 1)})
    loss = lambda _: model["body"](torch.ones(3, 2)).square().mean()
    hodiff.gradient_norm_penalty(loss, hodiff.select(model, "body")).backward()
    assert model["body"].weight.grad.any() and model["head"].weight.grad is None
    hodiff.r1_penalty(model["body"], torch.ones(3, 2)).backward()
    hodiff.gradient_norm_penalty(loss, model).backward()
    assert model["head"].weight.grad.equal(torch.zeros(1, 2))
