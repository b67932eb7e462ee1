"""What a jet is, what it refuses, and that jets nest."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff._core._settings import undo_all
from hodiff.errors import InputError
from hodiff.jets import _pushforward, _series, rules
from hodiff.jets._jet import RULES
from tests.support.limits import in_threads
from tests.support.properties import agree

rules.read("")  # all of them

D = torch.float64


@pytest.fixture
def x():
    return torch.randn(7, 3, dtype=D)


def jets_only(f, x, **kwargs):
    return hodiff.laplacian(f, x, method="jets", **kwargs)


def set_item(x):
    h = x.clone()
    h[:, 0] = x[:, 1]
    return h.pow(3).sum(-1)


def into_a_tensor(x):
    return torch.zeros(7, dtype=D).add_(x.pow(3).sum(-1))


def through_a_view(x):
    h = x.clone()
    h[:, 0].mul_(2)
    return h.pow(3).sum(-1)


class Straight(torch.autograd.Function):
    """Its backward is not its derivative: a jet that ran its forward would give another number."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x**2


class Scripted(nn.Module):
    def forward(self, x):
        return x.pow(3).sum(-1)


LSTM = nn.LSTM(3, 2, batch_first=True).to(D)

REFUSED = {
    "assignment to an index": (set_item, r"assignment to an index"),
    "writing into a tensor": (into_a_tensor, r"add_ of a jet into a tensor"),
    "writing through a view": (through_a_view, r"mul_ on a view"),
    "out=": (lambda x: torch.sin(x, out=torch.empty_like(x)).sum(-1), r"sin\(out=...\)"),
    "vmap inside": (lambda x: torch.func.vmap(lambda z: (z**4).sum())(x), "below Python"),
    "torch.func.grad inside": (lambda x: torch.func.grad(lambda z: (z**4).sum())(x).sum(-1), "below Python"),
    "hodiff.grad inside": (lambda x: hodiff.grad(lambda z: (z**4).sum(), x).sum(-1), "autograd inside f"),
    "complex": (lambda x: torch.fft.fft(x**2).abs().sum(-1), "abs of complex"),
    "view as complex": (lambda x: torch.view_as_complex(x[:, :2] ** 2).abs(), "abs of complex"),
    "LSTM": (lambda x: LSTM(x[:, None] ** 2)[0].sum((1, 2)), "lstm"),
    "custom Function": (lambda x: Straight.apply(x).pow(3).sum(-1), r"autograd\.Function"),
    "NumPy": (lambda x: torch.tensor(x.numpy()).sum(-1), "numpy"),
    "in place under no_grad": (lambda x: torch.no_grad()(lambda h: h.mul_(2))(x.clone()).sum(-1), "no_grad"),
    "training batch norm": (lambda x: F.batch_norm(x, None, None, training=True).sum(-1), "mixes the samples"),
    "bits": (lambda x: x.view(torch.int64).double().sum(-1), "dtype"),
    "native norm": (lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-5)[0].sum(-1), "native_layer_norm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_slip_past_the_rules_raises(name, x):
    f, message = REFUSED[name]
    with pytest.raises(hodiff.GraphError, match=message):
        jets_only(f, x)


def test_torchscript_raises(x):
    scripted = torch.jit.script(Scripted())
    with pytest.raises(hodiff.GraphError, match="forward"):
        jets_only(scripted, x)


FALLS_BACK = ["assignment to an index", "writing into a tensor", "writing through a view", "vmap inside", "complex"]


@pytest.mark.parametrize("name", [*FALLS_BACK, "hodiff.grad inside", "LSTM"])
def test_auto_falls_back_as_a_whole_with_one_warning(name, x):
    f, message = REFUSED[name]
    torch.manual_seed(0)
    expected = hodiff.laplacian(f, x, method="reverse")
    torch.manual_seed(0)
    with pytest.warns(hodiff.HodiffWarning, match=message) as caught:
        got = hodiff.laplacian(f, x)
    assert len(caught) == 1
    agree(got.detach(), expected.detach())


def test_a_custom_function_keeps_the_derivative_that_its_backward_defines(x):
    with pytest.warns(hodiff.HodiffWarning, match="hodiff.errors|autograd") as caught:
        got = hodiff.laplacian(lambda x: Straight.apply(x).pow(2).sum(-1), x)
    assert any("Taylor mode" in str(each.message) for each in caught)
    agree(got.detach(), (2 * x**2 * x**2 + 2 * x.round() * 2 * x).sum(-1))


class Rounded(Straight):
    """Each forward below shows the jet something else; the derivative is always 3 x², by the backward."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * g * x**2


class Recording(Rounded):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.enable_grad():
            return (x * 2).detach()


class OfTheShape(Rounded):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ones(x.shape, dtype=D)


class Passing(Rounded):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x


class InInferenceMode(Rounded):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.inference_mode():
            x.sin()
        return torch.ones(7, 3, dtype=D)


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Rounded.backward


FUNCTIONS = [Rounded, Recording, OfTheShape, Passing, InInferenceMode, WithSetup]


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_forward_of_a_function_hides_it_from_taylor_mode(function, create_graph, x):
    """Not by a constant, not by operations under grad mode, not by the shape alone; nor by a saved `apply`."""
    apply = function.apply
    f = lambda x: (apply(x) * x**2).sum(-1)
    with pytest.raises(
        hodiff.GraphError, match=r"Taylor mode has no rule for (a Python autograd|torch\.inference_mode)"
    ):
        jets_only(f, x, create_graph=create_graph)
    expected = 2 * apply(x) + 4 * x * 3 * x**2 + x**2 * 6 * x
    agree(hodiff.laplacian(f, x, create_graph=create_graph).detach(), expected.sum(-1))


def test_taylor_mode_inside_the_forward_of_a_function(x):
    """There the engine has switched forward mode off, which is how a Function called by f is told from a no_grad."""
    seen = []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            found = jets_only(lambda x: (x**4).sum(-1), x)
            seen.append(torch._C._is_fwd_grad_enabled())
            with pytest.raises(hodiff.GraphError, match=r"a Python autograd\.Function"):
                jets_only(lambda x: Rounded.apply(x).sum(-1), x)
            return found

        @staticmethod
        def backward(ctx, g):
            return g

    agree(Calls.apply(x).detach(), 12 * x.square().sum(-1))
    assert seen == [False] and torch._C._is_fwd_grad_enabled()


def test_an_expansion_that_ends_late_takes_no_number_with_it():
    """An interrupt may keep one open until the collector finds it."""
    left, later, last = [], [], []
    first, second = _series.begin(left), _series.begin(later)
    undo_all(left)
    third = _series.begin(last)
    assert first < second < third
    undo_all(later)
    undo_all(last)
    assert not _series.inside.numbers


def test_no_grad_and_detach_are_part_of_the_function(x):
    def f(x):
        with torch.no_grad():
            frozen = x.sin().sum(-1)
        return frozen * x.square().sum(-1) + (x.detach() * x**2).sum(-1) + (x.data * x**2).sum(-1)

    agree(jets_only(f, x), 6 * x.sin().sum(-1) + 4 * x.sum(-1))


def test_it_works_inside_no_grad_and_inference_mode(x):
    f = lambda x: (x**4).sum(-1)
    with torch.no_grad():
        found = jets_only(f, x)
    assert not found.requires_grad
    agree(found, 12 * x.square().sum(-1))
    with torch.inference_mode():
        found = jets_only(f, x.clone())
    agree(found.clone(), 12 * x.square().sum(-1))


def test_a_jet_looks_like_its_value(x):
    seen = {}

    def f(x):
        seen.update(
            tensor=isinstance(x, torch.Tensor), shape=x.shape, size=x.size(0), dim=x.dim(), dtype=x.dtype, length=len(x)
        )
        seen.update(positive=bool((x.sum() > -1e9).all()), item=x.sum().item(), text=f"{x.sum():.2f}", name=repr(x))
        return x.square().sum(-1)

    jets_only(f, x)
    assert seen["tensor"] and seen["shape"] == (7, 3) and seen["size"] == 7 and seen["dim"] == 2 and seen["length"] == 7
    assert seen["dtype"] == D and seen["positive"] and seen["item"] == float(x.sum())
    assert seen["text"] == f"{x.sum():.2f}" and seen["name"].startswith("Jet(order 2 in 3 direction")


def test_a_rule_leaves_the_grad_mode_of_the_rule_around_it(x, monkeypatch):
    """Coefficients of an an expansion may be jets of an earlier one, whose rules run inside its own."""
    modes, sin = [], RULES.known["sin"]

    def watched(*args):
        result = sin.apply(*args)
        modes.append(torch.is_grad_enabled())
        return result

    monkeypatch.setitem(RULES.known, "sin", sin._replace(apply=watched))
    ones = torch.ones_like(x)
    inner = lambda x: hodiff.laplacian(lambda y: torch.sin(y * x).sum(-1), ones, create_graph=False)
    hodiff.laplacian(lambda x: inner(x) + x.square().sum(-1), x, create_graph=False, method="jets")
    assert modes == [False, False] and torch.is_grad_enabled()


def test_branches_follow_the_value(x):
    f = lambda x: (x**4).sum(-1) if x.sum() > 0 else (x**3).sum(-1)
    agree(jets_only(f, x.abs()), 12 * x.square().sum(-1))
    agree(jets_only(f, -x.abs()), -6 * x.abs().sum(-1))


def test_structural_zeros_and_small_seeds():
    """Identity directions stay independent of the batch until an operation mixes them with it."""
    shapes = []

    def f(x):
        shapes.append([None if c is None else tuple(c.shape) for c in x.series])
        y = F.linear(x, torch.ones(4, 3, dtype=D))
        shapes.append([None if c is None else tuple(c.shape) for c in y.series])
        z = torch.tanh(y)
        shapes.append([None if c is None else tuple(c.shape) for c in z.series])
        return z.sum(-1)

    jets_only(f, torch.randn(7, 3, dtype=D))
    assert shapes[0] == [(7, 3), (3, 1, 3), None]
    assert shapes[1] == [(7, 4), (3, 1, 4), None]
    assert shapes[2] == [(7, 4), (3, 7, 4), (1, 7, 4)]


def test_perturbations_are_not_confused():
    """d/dx (x d/dy (x + y)) = 1 at every point: the inner variable must not be taken for the outer one."""
    x = torch.tensor([2.0], dtype=D)
    one = [torch.ones(1, dtype=D)]

    def outer(x):
        _, (inner,) = hodiff.jet(lambda y: x + y, torch.tensor([3.0], dtype=D), one)
        return x * inner

    _, (found,) = hodiff.jet(outer, x, one)
    assert found.item() == 1.0


def test_nested_operators_of_polynomials_give_zeros(x):
    assert torch.equal(hodiff.biharmonic(lambda x: x.square().sum(-1), x), torch.zeros(7, dtype=D))
    assert torch.equal(hodiff.biharmonic(lambda x: x.sum(-1), x), torch.zeros(7, dtype=D))


def test_threads_do_not_meet(x):
    def work():
        for _ in range(20):
            found = hodiff.biharmonic(lambda x: x.square().sum(-1) ** 2, x)
            torch.testing.assert_close(found, torch.full((7,), 120.0, dtype=D))

    in_threads(work, work, work)


def test_nothing_of_the_users_is_touched(x):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)).to(D).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = x.requires_grad_()
    state = torch.get_rng_state()
    hodiff.laplacian(model, x).sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    hodiff.laplacian(model, x.detach())
    assert _series.inside.rules == 0


def test_dropout_uses_one_mask(x):
    def f(x):
        return F.dropout(x, 0.5, training=True).pow(4).sum(-1)

    torch.manual_seed(3)
    mask = F.dropout(torch.ones_like(x), 0.5)
    torch.manual_seed(3)
    agree(jets_only(f, x), (12 * x.square() * mask**4).sum(-1))


def test_transformer_layers_run_on_jets(x):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).to(D)
    weights = torch.randn(3, 6, dtype=D)
    f = lambda x: (layer(x[:, None].repeat(1, 3, 2).cumsum(1)) * weights).sum((1, 2))
    for mode in (True, False):
        layer.train(mode)
        agree(jets_only(f, x).detach(), hodiff.laplacian(f, x, method="reverse").detach(), 1e-9)


def test_vmap_around(x):
    f = lambda x: x.square().sum(-1) ** 2
    found = torch.vmap(lambda z: hodiff.laplacian(f, z, batch_ndim=0, method="jets"))(x)
    agree(found, hodiff.laplacian(f, x))


def test_checkpoint_inside(x):
    from torch.utils.checkpoint import checkpoint

    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    plain = torch.autograd.grad(hodiff.laplacian(net, x).square().sum(), net[0].weight)[0]
    saved = hodiff.laplacian(lambda x: checkpoint(net, x, use_reentrant=False), x)
    agree(torch.autograd.grad(saved.square().sum(), net[0].weight)[0], plain)


def test_report():
    x = torch.rand(2, 3, dtype=D)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).to(D)
    found = hodiff.jets.report(lambda x: net(x).sum(-1) * torch.atan2(x, x + 1).sum(-1), x)
    kinds = {each.name: (each.kind, each.calls) for each in found.operations}
    assert kinds["linear"] == ("bilinear", 2)
    assert kinds["tanh"] == ("elementwise", 1)
    assert kinds["rsqrt"] == ("elementwise", 1)  # the norm, written out
    assert found.fallbacks == ("atan2",) and found.missing is None
    assert found.order == 2 and found.directions == 3
    assert all(each.seconds > 0 for each in found.operations)
    assert "atan2" in str(found) and "fallback" in str(found)


def test_report_of_what_stops_it():
    found = hodiff.jets.report(set_item, torch.rand(7, 3, dtype=D))
    assert "assignment to an index" in found.missing and "stopped" in str(found)


def test_push_takes_several_points():
    a, b = torch.tensor([2.0], dtype=D), torch.tensor([5.0], dtype=D)
    output, expansion = _pushforward.push(lambda a, b: a * b, [a, b], [[torch.ones(1, 1, dtype=D)]] * 2, 2)
    assert [c.item() for c in _pushforward.coefficients(output, expansion)] == [10.0, 7.0, 1.0]


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


def test_jet_does_not_advise_what_it_lacks() -> None:
    """hodiff.jet has no `method=`."""
    with pytest.raises(hodiff.GraphError, match="zeta") as caught:
        hodiff.jet(lambda z: torch.special.zeta(z, z), POINT.abs() + 2, [torch.ones_like(POINT)] * 2)
    assert 'method="reverse"' not in str(caught.value), str(caught.value)


def test_the_mask_of_feature_alpha_dropout_is_drawn_once():
    x = torch.linspace(0.2, 1, 6, dtype=D)
    f = lambda x: F.feature_alpha_dropout((x**3)[:, None], 0.4, True)[:, 0]
    found = []
    for n in (2, 3):
        torch.manual_seed(0)
        found.append(hodiff.nth_derivative(f, x, n))
    torch.testing.assert_close(found[1], found[0] / x)  # of a x³ + b: 6 a, and 6 a x


@pytest.mark.parametrize("n", [2, 3])
def test_a_detached_derivative_is_refused_inside_torch_func(n):
    with pytest.raises(hodiff.InputError, match=r"inside a torch\.func transform"):
        torch.func.grad(lambda x: hodiff.nth_derivative(lambda x: x**5, x, n).sum())(torch.ones(3))


X = torch.tensor([0.3, -0.7, 1.1])


def test_a_transform_of_forward_mode_is_refused_by_taylor_mode():
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.jvp(lambda z: hodiff.nth_derivative(torch.sin, z, 3), (X,), (X,))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_an_operation_without_a_rule_has_the_keywords_it_was_given() -> None:
    """`axis` is its own name for it, and not NumPy's for `dim`."""
    f = lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 2]), axis=0)
    with pytest.raises(hodiff.GraphError, match="no second derivative of segment_reduce"):
        hodiff.jet(f, torch.ones(3, dtype=torch.float64), [torch.ones(3, dtype=torch.float64)])


@pytest.mark.parametrize(
    ("f", "third"),
    [
        (lambda x: x**3 / 3, 2.0),
        (lambda x: x**3 * 2, 12.0),
        (lambda x: 2 * x**3 - 1, 12.0),
        (lambda x: 6 / x, -36 / 16),
        (lambda x: x**3 / torch.tensor([1.0, 2.0], dtype=D).sum(), 2.0),
    ],
)
def test_a_number_stays_one_through_arithmetic_with_numbers(f, third):
    value = hodiff.nth_derivative(f, torch.tensor(2.0, dtype=D), 3)
    assert value.shape == ()
    assert value.item() == pytest.approx(third, rel=1e-14)


PROGRAM = """
import sys, torch, hodiff
from hodiff.jets._jet import RULES

x = torch.tensor([[0.5, 0.25]], dtype=torch.float64)
rare = lambda: sorted({"bilinear", "composite", "fallback", "special"} & {
    name.rpartition(".")[2] for name in sys.modules if name.startswith("hodiff.jets.rules.")})
print(hodiff.laplacian(lambda x: x.square().sum(-1), x, method="jets").tolist(), rare(), len(RULES.known) > 100)

class Interrupted:
    def find_spec(name, path=None, target=None):
        if name == "hodiff.jets.rules.special":
            sys.meta_path.remove(Interrupted)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted)
matrix = lambda x: (x @ torch.ones(2, 1).double()).square().squeeze(-1)
try:
    hodiff.laplacian(matrix, x, method="jets")
except KeyboardInterrupt:
    print("matmul" in RULES.known, "matmul" in RULES.registered[False], RULES.read is None)
print(hodiff.laplacian(matrix, x, method="jets").tolist(), rare(), RULES.read is None)
"""


def test_rules_that_few_functions_need_are_read_when_an_operation_asks_for_them():
    """Another thread finds none whose file is still being read; after an interrupt the next operation reads them."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=240)
    first, interrupted, second = ran.stdout.splitlines()
    assert first == "[4.0] [] True"
    assert interrupted == "False True False"
    assert second == "[4.0] ['bilinear', 'composite', 'fallback', 'special'] True"


def way_around(x):
    try:
        return set_item(x)
    except Exception:
        return x.sum(-1)


def by_vmap_or_not(x):
    try:
        return torch.vmap(lambda row: row.pow(3).sum())(x)
    except Exception:
        return x.sum(-1)


@pytest.mark.parametrize("f", [way_around, by_vmap_or_not])
def test_a_refusal_that_f_catches_is_not_lost(f, x):
    with pytest.warns(hodiff.HodiffWarning, match="Nested reverse mode is used for the whole call") as told:
        found = hodiff.laplacian(f, x)
    assert ".. " not in str(told[0].message)
    agree(found, hodiff.laplacian(f, x, method="reverse"))
    assert found.abs().max() > 0.1
    with pytest.raises(hodiff.GraphError, match="Taylor mode has no rule for"):
        jets_only(f, x)


def test_a_jet_lies_in_memory_as_its_value_does(x):
    def f(z):
        turned = z.T
        assert turned.stride() == (1, 3) and not turned.is_contiguous() and z[:, 1].storage_offset() == 1
        assert z.stride(0) == 3 and z.is_contiguous()
        return turned.pow(3).sum()

    agree(jets_only(f, x, batch_ndim=0), 6 * x.sum())


def test_a_detached_jet_shares_no_memory_with_what_was_given(x):
    kept, path = x.clone(), torch.ones_like(x)
    value, (first,) = hodiff.jet(lambda z: z, x, [path], create_graph=False)
    value.zero_(), first.zero_()
    assert torch.equal(x, kept) and torch.equal(path, torch.ones_like(x))
