"""The causes that `check_derivatives` names, what it remarks, and that nothing of the user's is changed."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff
from hodiff import verify
from tests.support.modules import BY_NAME

HERE = Path(__file__)
LINES = HERE.read_text(encoding="utf-8").splitlines()


def point(*shape):
    return torch.randn(shape or (3,), dtype=torch.float64)


def number(mark):
    """The line that ends with a mark."""
    return next(i for i, line in enumerate(LINES, 1) if line.endswith(f"# {mark}"))


def failed(f, x, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        with pytest.raises(hodiff.DerivativeError, match="because of") as info:
            hodiff.check_derivatives(f, x, **options)
    return info.value.report, str(info.value)


def lines(report):
    return [(cause.kind, cause.line) for cause in report.causes]


def two_cuts(x):
    a = x.exp().detach()  # cut one
    b = x.sin().data  # cut two
    return (a * b * x).sum()


def test_each_cut_is_named_with_its_own_part():
    x = torch.tensor([0.3, -0.7], dtype=torch.float64)
    report, text = failed(two_cuts, x)
    assert lines(report) == [("cut", number("cut one")), ("cut", number("cut two"))]
    assert {cause.file for cause in report.causes} == {str(HERE)}
    assert report.causes[0].text == "a = x.exp().detach()  # cut one"
    missing = [float(re.search(r"and ([-+.\de]+) of the derivative of order 1", c.reason)[1]) for c in report.causes]
    (d,) = report.checks[0].direction
    assert missing[0] == pytest.approx(float((x.exp() * x.sin() * x * d).sum()), rel=1e-5)
    assert missing[1] == pytest.approx(float((x.exp() * x.cos() * x * d).sum()), rel=1e-5)
    assert "drop the detach()" in text


def test_higher_orders_are_not_tried_above_one_that_disagrees():
    report, _ = failed(two_cuts, point(), order=3)
    assert {check.order for check in report.checks} == {1}
    assert len(report.checks) == 3


@pytest.mark.parametrize("spelling", ["line", "function", "both of the lines"])
def test_cuts_that_are_meant_are_held_and_the_rest_is_checked(spelling):
    both = tuple(f"test_blame.py:{number(mark)}" for mark in ("cut one", "cut two"))
    if spelling == "line":
        report, _ = failed(two_cuts, point(), allow=both[0])
        assert lines(report) == [("cut", number("cut two"))]
        return
    assert hodiff.check_derivatives(two_cuts, point(), order=3, allow="two_cuts" if "f" in spelling[:1] else both).ok


def test_what_remains_wrong_beside_a_cut_that_is_meant():
    def f(x):
        return two_cuts(x) + Doubled.apply(x, 2).sum()

    report, _ = failed(f, point(), allow="two_cuts")
    assert [cause.kind for cause in report.causes] == ["function"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x, power):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx, g):  # doubled
        (x,) = ctx.saved_tensors
        return 2 * ctx.power * x ** (ctx.power - 1) * g, None


def test_a_function_of_the_new_style_is_checked_alone_and_left_as_it_was():
    forward = Doubled.__dict__["forward"]
    report, text = failed(lambda x: (Doubled.apply(x, 3) * x).sum(), point())  # applied
    assert lines(report) == [("function", number("doubled"))]
    assert f"Doubled, called at test_blame.py:{number('applied')}" in text
    assert Doubled.__dict__["forward"] is forward


class Inherits(Doubled):
    pass


def test_a_forward_that_is_inherited_stays_inherited():
    failed(lambda x: Inherits.apply(x, 2).sum(), point())
    assert "forward" not in Inherits.__dict__


def test_a_function_that_cannot_be_differentiated_twice_is_found_where_it_is_accepted():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):  # once
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    report, _ = failed(lambda x: (Once.apply(x) * x).sum(), point(), allow="Once")
    assert lines(report) == [("function", number("once"))]
    assert report.checks[-1].order == 2


def test_an_operation_that_pytorch_gets_wrong_is_found_alone():
    def f(table):
        rows = F.embedding(torch.tensor([0, 0, 1]), table, scale_grad_by_freq=True)  # scaled
        return rows.pow(3).sum()

    report, text = failed(f, point(2, 3))
    assert lines(report) == [("operation", number("scaled"))]
    assert "embedding is wrong at order 1 here, alone as well" in text


def test_a_hook_of_a_module_is_named():
    layer = nn.Linear(3, 2).double()
    layer.register_full_backward_hook(lambda module, given, got: tuple(3 * g for g in given))
    report, text = failed(lambda x: layer(x * 2).square().sum(), point(2, 3), order=1)
    assert [cause.kind for cause in report.causes] == ["hook"]
    assert "a backward hook of a Linear" in text
    assert len(layer._backward_hooks) == 1


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: (x - 1).relu().sum(), "relu"),  # kink
        (lambda x: (x - 1).abs().sum(), "abs"),  # kink
        (lambda x: torch.where(x > 1, x**2, x).sum(), "gt"),  # kink
        (lambda x: x.clamp(max=1.0).sum(), "clamp"),  # kink
        (lambda x: (x * (x - 0.5).round()).sum() + (x * x.floor()).sum(), "round"),  # kink
        (lambda x: torch.maximum(x, x**2).sum(), "maximum"),  # kink
        (lambda x: x**2 if x.sum() > 3 else x, "gt"),  # kink
        (lambda x: F.hardtanh(x).sum(), "hardtanh"),  # kink
        (lambda x: F.threshold(x, 1.0, 0.0).sum(), "threshold"),  # kink
        (lambda x: F.hardshrink(x, 1.0).sum(), "hardshrink"),  # kink
        (lambda x: F.max_pool1d(x.unsqueeze(0), 2).sum(), "max_pool1d"),  # kink
        (lambda x: F.l1_loss(x, torch.ones_like(x)), "l1_loss"),  # kink
    ],
)
def test_a_kink_at_the_point_is_named(f, name):
    x = torch.ones(3, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hodiff.HodiffWarning)
        try:
            report = hodiff.check_derivatives(f, x, order=1)
        except hodiff.DerivativeError as error:
            report = error.report
    found = [*report.causes, *report.remarks]
    assert any(c.kind == "kink" and name in c.reason for c in found), (report, caught)
    assert all(LINES[c.line - 1].endswith("# kink") for c in found)


@pytest.mark.parametrize(("f", "at"), [(nn.Hardtanh(), 1.0), (F.hardtanh, 1.0), (torch.abs, 0.0)])
def test_a_kink_of_a_function_of_torch_itself(f, at):
    """No line of the user's is between hodiff and the operation."""
    try:
        report = hodiff.check_derivatives(f, torch.tensor([at], dtype=torch.float64), order=1)
    except hodiff.DerivativeError as error:
        report = error.report
    assert {found.kind for found in (*report.causes, *report.remarks)} == {"kink"}


def test_what_is_too_rough_to_compare_is_not_called_wrong(monkeypatch):
    """An operation, alone: only what disagrees is blamed."""
    x = point().requires_grad_()
    wrong = lambda: verify._first_wrong(torch.sin, (x,), {}, 1, ())
    monkeypatch.setattr(verify, "compare", lambda *_: SimpleNamespace(verdict="disagrees"))
    assert wrong() is not None
    monkeypatch.setattr(verify, "compare", lambda *_: SimpleNamespace(verdict="inconclusive"))
    assert wrong() is None


def test_a_cut_that_is_written_into_a_tensor():
    def f(x):
        h = torch.empty_like(x)
        with torch.no_grad():
            torch.exp(x, out=h)  # out
        return (h * x).sum()

    report, _ = failed(f, point())
    assert lines(report) == [("cut", number("out"))]


def test_a_kink_beside_the_point_is_none():
    """The first steps reach over it; smaller ones do not."""
    x = torch.tensor([1e-3, -2e-3, 3.0], dtype=torch.float64)
    report = hodiff.check_derivatives(lambda x: (x.relu() ** 2 + x.abs()).sum(), x)
    assert report.ok
    assert report.remarks == ()


def test_a_kink_that_every_first_step_reaches_over_is_none():
    x = torch.tensor([2e-5, -3e-5, 3.0], dtype=torch.float64)
    assert hodiff.check_derivatives(lambda x: (x.abs() + x.relu()).sum(), x).ok


def test_what_no_mode_sees_is_said_to_be_unseen():
    def f(x):
        return (nn.Parameter(x * 2) * x).sum()

    with pytest.raises(hodiff.DerivativeError, match=r"No cut, Function, hook or operation was found.*NumPy"):
        hodiff.check_derivatives(f, point())


# --- state


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.cache, self.count = nn.Parameter(torch.randn(3)), None, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        self.calls += 1
        if self.cache is None:
            self.cache = self.weight.detach() ** 2  # cached
        return (self.cache * self.weight * x).sum()


def test_a_cache_is_a_cut_and_attributes_are_put_back():
    model = Keeps()
    before = dict(vars(model))
    report, text = failed(lambda m: m(torch.ones(3, dtype=torch.float64)), model)
    assert lines(report) == [("cut", number("cached"))]
    assert [remark.kind for remark in report.remarks] == ["state"]
    assert "it changes Keeps.count, Keeps.cache" in text or "it changes Keeps.cache, Keeps.count" in text
    assert vars(model) == before
    assert model.calls == 0
    assert model.weight.dtype == torch.float32


def test_state_in_a_closure_is_named():
    calls = []

    def f(x):
        calls.append(1)
        return x.square().sum() * len(calls)

    with pytest.warns(hodiff.HodiffWarning, match=r"it changes the variable calls; its value at the same point"):
        report = hodiff.check_derivatives(f, point())
    assert not report.ok


def test_a_generator_of_its_own_is_state():
    generator = torch.Generator()

    def f(x):
        return (x.square() * torch.rand(3, dtype=x.dtype, generator=generator)).sum()

    with pytest.warns(hodiff.HodiffWarning, match=r"it changes the variable generator"):
        hodiff.check_derivatives(f, point())


def test_what_is_only_written_down_is_a_remark():
    seen = {}

    def f(x):
        seen["norm"] = x.detach().norm()
        return x.square().sum()

    report = hodiff.check_derivatives(f, point())
    assert report.ok
    assert "it changes the variable seen." in str(report)


# --- remarks


def test_random_numbers_are_remarked():
    report = hodiff.check_derivatives(lambda x: F.dropout(x, 0.5).square().sum(), point(9))
    assert [remark.kind for remark in report.remarks] == ["random"]


# --- where f is not a plain function


def test_a_cut_inside_a_library_names_the_users_line_and_the_place():
    setting = BY_NAME["spectral_norm"].build()
    with pytest.raises(hodiff.DerivativeError, match=r"mv\(\) in _power_method \(parametrizations\.py:\d+\)") as info:
        hodiff.check_derivatives(setting.of_model, setting.model, order=1)
    assert Path(info.value.report.causes[0].file).name == "modules.py"
    assert hodiff.check_derivatives(setting.of_model, setting.model, allow="_power_method").ok


def test_a_module_called_by_hodiff_itself_is_recorded():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).double()
    report = hodiff.check_derivatives(net, point(4, 3), order=1)
    assert [remark.kind for remark in report.remarks] == ["random"]


def test_in_single_precision_too():
    data = torch.randn(3)  # f cannot run in float64

    def f(x):
        return torch.dot(x.tanh().detach(), data) * torch.dot(x, data)  # single

    report, _ = failed(f, torch.randn(3))
    assert report.dtype == torch.float32
    assert lines(report) == [("cut", number("single"))]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_the_callers_modes(mode):
    with mode():
        report, _ = failed(two_cuts, point())
    assert len(report.causes) == 2


def test_inside_another_call():
    def outer(z):
        report, _ = failed(two_cuts, z.detach())
        assert len(report.causes) == 2
        return (z**2).sum()

    x = point()
    assert torch.equal(hodiff.grad(outer, x), 2 * x)


# --- functions of functions


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.func.hessian(lambda z: (z**4).sum())(x).sum(),
        lambda x: torch.func.jacrev(lambda z: (z.relu() * z**2).sum(0))(x).sum(),
        lambda x: torch.func.vmap(lambda z: (z**3).sum() + (z > 0).sum() + z.argmax() * 0)(x).sum(),
        lambda x: hodiff.laplacian(lambda z: z.sin().prod(-1), x).sum(),
    ],
)
def test_transforms_inside_f_pass(f):
    assert hodiff.check_derivatives(f, point(2, 3)).ok


def test_a_cut_inside_a_transform_is_named_as_what_may_be_it():
    def f(x):
        return torch.func.vmap(lambda z: (z.detach() * z).sum())(x).sum()  # mapped

    report, text = failed(f, point(2, 3))
    assert lines(report) == [("cut", number("mapped"))]
    assert "detach() inside a torch.func transform may be it" in text


def test_a_gradient_that_a_nested_call_detaches_is_a_cut():
    def f(x):
        g = hodiff.hvp(lambda z: z.pow(4).sum(), x, x, create_graph=False)  # nested
        return (g * x).sum()

    report, _ = failed(f, point())
    assert lines(report) == [("cut", number("nested"))]


def test_a_linear_layer_has_zero_second_derivative():
    report = hodiff.check_derivatives(nn.Linear(3, 2).double(), point(2, 3), order=3)
    assert report.ok
    assert {check.computed for check in report.checks if check.order > 1} == {0.0}


def test_where_a_derivative_is_not_finite_the_operation_is_named():
    report, text = failed(lambda x: x.norm(), torch.zeros(3, dtype=torch.float64))  # norm0
    assert lines(report) == [("kink", number("norm0"))]
    assert "norm has no finite derivative of order 2" in text


@pytest.mark.parametrize(
    ("f", "x"),
    [
        (lambda x: F.max_pool2d(F.pad(x, (2, 2)), 2).square().sum(), torch.ones(1, 1, 4, 4)),
        (lambda x: x.norm() + F.softshrink(x, 0.7).sum() + F.relu6(x).sum(), torch.tensor([0.0, 1.0, 2.0]) + 0.2),
        (lambda x: x.norm() + x.square().median(), torch.tensor([0.0, 1.0, 2.0])),
    ],
)
def test_what_is_smooth_at_the_point_is_no_kink(f, x):
    x = x.double() + 0.01 * torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
    report = hodiff.check_derivatives(f, x)
    assert report.ok
    assert report.remarks == ()


def test_hooks_are_put_on_again():
    seen = []

    def f(x):
        h = x * 2
        h.register_hook(lambda g: seen.append(g.shape) or 3 * g)
        return h.square().sum()

    failed(f, point())
    before = len(seen)
    hodiff.grad(f, point())
    assert len(seen) == before + 1
