"""Promise 1: for every layer of the zoo a derivative is right, or an error names the operation and the way out.

The oracle of each order are differences of the order below; torch's own derivative of that order is never trusted.
The measured table is published as docs/generated/never-silently-wrong.md; HODIFF_WRITE_TABLES=1 rewrites it.
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hodiff
from tests.support.differences import first_difference, relative_error
from tests.support.modules import BY_NAME, ZOO, Case
from tests.support.oracle import Oracle, flatten, unflatten
from tests.support.properties import right_or_refused
from tests.support.table import TOLERANCE, Cell, measure, measure_stock, target, unit_direction

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "generated" / "never-silently-wrong.md"
CELLS = [(case, order, where) for case in ZOO for order in (1, 2, 3) for where in case.wheres]


@pytest.mark.table(wide=130)
@pytest.mark.parametrize(("case", "order", "where"), CELLS, ids=lambda p: str(p).replace(" ", "_"))
def test_derivative_is_right_or_raises(case: Case, order: int, where: str) -> None:
    verdict, cell = case.verdict(order, where), measure(case.name, order, where)
    if verdict == "right":
        assert cell.raised is None, f"raised: {cell.raised}"
        assert cell.error < TOLERANCE
    elif verdict == "nan":
        assert cell.raised is not None or cell.error != cell.error
    else:
        assert cell.raised is not None, f"answered, with relative error {cell.error:.1e}"
        assert re.search(verdict, str(cell.raised)), f"the error lacks the way out: {cell.raised}"


@pytest.mark.parametrize("case", [c for c in ZOO if c.warns], ids=repr)
def test_custom_function_warns_at_second_order_only(case: Case) -> None:
    assert hodiff.CustomFunctionWarning not in measure(case.name, 1, "inputs").warned


@pytest.mark.table(wide=45)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["inputs", "parameters"])
@pytest.mark.parametrize("case", ZOO, ids=repr)
def test_jvp_is_right_or_raises(case: Case, where: str) -> None:
    """Forward mode where it exists, two reverse passes elsewhere; some operations have neither."""
    f, point, like = target(case.build(), where)
    v = unit_direction(flatten(like).numel(), 3)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = Oracle(case).gradient_along(where, v) if case.verdict(1, where) == "right" else None
    try:
        got = hodiff.jvp(f, point, unflatten(v, like))
    except hodiff.GraphError as error:
        assert case.verdict(2, where) != "right", f"raised: {error}"
        return
    assert expected is not None and relative_error(got, expected) < TOLERANCE


# --- third order through the norm layers, elementwise and in the tensor form ------------------------------------------

WEIGHT = torch.tensor([0.7, -1.2, 1.9], dtype=torch.float64)
BIAS = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64)


def features(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x**2, torch.sin(3 * x)], -1)


NORMED = {  # each entry of the result depends on its own entry of x alone
    "layer_norm": lambda x: F.layer_norm(features(x), (3,), WEIGHT, BIAS) @ WEIGHT,
    "batch_norm": lambda x: WEIGHT @ torch.tanh(F.batch_norm(features(x).T, None, None, training=True)),
    "instance_norm": lambda x: F.instance_norm(features(x)[None]).tanh()[0] @ WEIGHT,
    "group_norm": lambda x: F.group_norm(features(x), 1, WEIGHT, BIAS) @ WEIGHT,
    "rms_norm": lambda x: F.rms_norm(features(x), (3,), WEIGHT) @ WEIGHT,
}


@pytest.mark.parametrize("name", NORMED)
@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_nth_derivative_through_norms(name: str, order: int) -> None:
    x = torch.tensor([0.3, -0.8, 1.4, 0.9], dtype=torch.float64)
    got = hodiff.nth_derivative(NORMED[name], x, order)
    below = lambda t: hodiff.nth_derivative(NORMED[name], x + t, order - 1)
    assert relative_error(got, first_difference(below, step=1e-3)) < 1e-6


SENSITIVE = [
    "LayerNorm", "InstanceNorm1d", "BatchNorm1d, train", "BatchNorm1d, no statistics", "TransformerEncoderLayer",
]  # fmt: skip


@pytest.mark.parametrize("name", SENSITIVE)
def test_tensor_form_refuses_third_order_through_native_norms(name: str) -> None:
    setting = BY_NAME[name].build()
    x = setting.x.requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = setting.of_input(x)
    with pytest.raises(hodiff.GraphError, match=r"(?is)norm.*function"):
        hodiff.hvp(loss, x, torch.ones_like(x), create_graph=True)


@pytest.mark.parametrize("name", SENSITIVE)
def test_tensor_form_is_right_at_second_order(name: str) -> None:
    setting, twin = BY_NAME[name].build(), BY_NAME[name].build()
    x = setting.x.requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = setting.of_input(x)
    v = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).reshape(x.shape)
    assert relative_error(hodiff.hvp(loss, x, v), hodiff.hvp(twin.of_input, twin.x, v)) < 1e-9


def test_what_is_right_at_one_order_is_looked_at_again_at_another() -> None:
    """A first derivative inside f, which `check_derivatives` differences, had weight_norm count as right at second."""
    v = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    f = lambda v: torch._weight_norm(v, v[:, :1].detach(), 0).sin().sum()

    def slope(v: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(f(v), v, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(hodiff.DerivativeError, match="disagrees"):
        hodiff.check_derivatives(slope, v)
    x = v.clone().requires_grad_()
    with pytest.raises(hodiff.GraphError, match="weight_norm is silently wrong"):
        hodiff.hvp(f(x), x, v)


@pytest.mark.parametrize("name", ["weight_norm", "weight_norm, by hook"])
def test_tensor_form_refuses_second_order_through_native_weight_norm(name: str) -> None:
    """PyTorch's double backward of weight_norm forgets that the norm depends on v (31-126 % off, no error)."""
    setting = BY_NAME[name].build()
    parameters = dict(setting.model.named_parameters())
    loss = setting.of_model(setting.model)
    v = {n: torch.ones_like(p) for n, p in parameters.items()}
    with pytest.raises(hodiff.GraphError, match=r"(?is)weight_?norm.*function"):
        hodiff.hvp(loss, parameters, v)


def test_tensor_form_names_fused_attention_and_the_way_out() -> None:
    setting = BY_NAME["scaled_dot_product_attention, causal"].build()
    x = setting.x.requires_grad_()
    loss = setting.of_input(x)
    with pytest.raises(hodiff.GraphError, match=r"(?is)attention.*twice_differentiable.*function"):
        hodiff.hvp(loss, x, torch.ones_like(x))


@pytest.mark.parametrize("name", ["LSTM", "GRU", "Conv2d, MaxPool2d, Linear", "LayerNorm", "TransformerEncoderLayer"])
def test_single_precision_has_kernels_of_its_own(name: str) -> None:
    """float32 on a CPU goes through oneDNN; its second derivative must be that of float64 all the same."""
    exact, single = BY_NAME[name].build(), BY_NAME[name].build()
    single.model.float()
    v = {n: torch.cos(p.detach()) for n, p in exact.model.named_parameters()}
    expected = hodiff.hvp(exact.of_model, exact.model, v)
    loss = lambda m: single.loss(m, single.x.float())
    got = hodiff.hvp(loss, single.model, {n: t.float() for n, t in v.items()})
    assert all(t.dtype == torch.float32 for t in got.values())
    assert relative_error(flatten(got).double(), flatten(expected)) < 1e-4


# --- the published table ----------------------------------------------------------------------------------------------

HEAD = """\
# Right, or an error

Measured by `tests/contract/test_never_silently_wrong.py` (float64, CPU): a small network with each layer, its loss
differentiated once, twice and three times. "right": the relative error against central differences of the order below
is under 1e-6. "refused": a `hodiff.GraphError` names the operation and the way out. "3rd" is the parameters' gradient
of vᵀHv, with H and v in the inputs or in the parameters. The last four columns are plain torch on the same networks
(fused attention off). Bold: a wrong number without any error, and its relative error.

| layer | 1st inputs | 1st parameters | 2nd inputs | 2nd parameters | 3rd inputs | 3rd parameters \
| `torch.func.hessian`, 2nd parameters | `jvp(jacrev)`, 2nd parameters | `autograd.grad`, 2nd parameters \
| `autograd.grad`, 3rd inputs |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def show(cell: Cell) -> str:
    return "refused" if isinstance(cell.raised, hodiff.GraphError) else str(cell)


def row(case: Case) -> str:
    ours = [show(measure(case.name, order, where)) for order in (1, 2, 3) for where in ("inputs", "parameters")]
    stock = [str(measure_stock(case.name, kind)) for kind in ("hessian", "jvp(jacrev)", "twice", "thrice")]
    return "| " + " | ".join([case.name, *ours, *stock]) + " |\n"


def ways_out() -> str:
    lines = []
    for case in ZOO:
        raised = [measure(case.name, order, where).raised for order in (1, 2, 3) for where in case.wheres]
        message = next((str(e) for e in raised if e is not None), None)
        if message is not None:
            first = message.splitlines()[0]  # below come the lines of this very program
            lines.append(f"* **{case.name}**: {first}\n")
    return "\n## What the errors say\n\n" + "".join(lines)


def pinned() -> str:
    """The release whose table is published; on others the tests above hold hodiff's columns."""
    return re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE).group(1)


@pytest.mark.wide
@pytest.mark.skipif(torch.__version__.split("+")[0] != pinned(), reason=f"the table is that of torch {pinned()}")
def test_published_table_is_fresh() -> None:
    fresh = HEAD + "".join(row(case) for case in ZOO) + ways_out()
    if os.environ.get("HODIFF_WRITE_TABLES") == "1":
        TABLE.parent.mkdir(parents=True, exist_ok=True)
        TABLE.write_text(fresh, encoding="utf-8")
    assert TABLE.exists(), "run once with HODIFF_WRITE_TABLES=1"
    assert TABLE.read_text(encoding="utf-8") == fresh, (
        "stale: run with HODIFF_WRITE_TABLES=1 and look at the difference"
    )


def test_the_oracle_sees_what_is_wrong_in_stock_torch() -> None:
    """The table could not fail if the differences agreed with everything."""
    assert measure_stock("LayerNorm", "hessian").error > 1e-2
    assert measure_stock("LayerNorm", "thrice").error > 1e-2
    assert measure_stock("weight_norm", "twice").error > 1e-2
    assert measure_stock("GroupNorm", "thrice").error < TOLERANCE


D = torch.float64


POINT = torch.tensor([0.5, -1.5, 2.0], dtype=D)


@pytest.mark.filterwarnings("ignore::hodiff.HodiffWarning")
def test_embedding_scaled_by_frequency() -> None:
    m = nn.Embedding(3, 2, scale_grad_by_freq=True).double()
    index = torch.tensor([0, 1, 1])
    with pytest.raises(hodiff.GraphError, match=r"scale_grad_by_freq|[Ee]mbedding"):
        hodiff.hessian(lambda m: m(index).prod(), m, matrix=True)
    with pytest.raises(hodiff.GraphError, match=r"scale_grad_by_freq|[Ee]mbedding"):
        hodiff.HessianOperator(lambda m: m(index).prod(), m) @ torch.ones(6, dtype=D)


def test_logcumsumexp() -> None:
    x = torch.tensor([0.3, -0.8, 1.4], dtype=D)
    v = torch.tensor([1.0, -0.5, 0.2], dtype=D)
    f = lambda z: (torch.logcumsumexp(z, 0) * torch.tensor([1.0, -2.0, 0.5], dtype=D)).sum()
    gradient = lambda z: torch.autograd.functional.jacobian(f, z)
    expected = first_difference(lambda t: gradient(x + t * v))
    torch.testing.assert_close(hodiff.hvp(f, x, v), expected, rtol=1e-6, atol=1e-8)
    words = "logcumsumexp|[Ll]ogCumSumExp"
    right_or_refused(lambda: _second(hodiff.jvp(lambda z: hodiff.grad(f, z), x, v)), expected, words)
    right_or_refused(lambda: hodiff.jacobian(lambda z: hodiff.grad(f, z), x) @ v, expected, words)


MASK = torch.tensor([1.0, 0.0, 1.0], dtype=D)
BY_PARTS = lambda z: torch.stack([z[:n].logsumexp(0) for n in (1, 2, 3)])


@pytest.mark.table(plain=3)
@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, v: hodiff.hvp(lambda z: (MASK * f(z)).sum().square(), x, v),
        lambda f, x, v: hodiff.HessianOperator(lambda z: (MASK * f(z)).sum().square(), x) @ v,
        lambda f, x, v: hodiff.sparse_hessian(lambda z: (MASK * f(z)).sum().square(), x).to_dense(),
        lambda f, x, v: hodiff.grad(lambda z: hodiff.jacobian(lambda z: f(z).tanh(), z).sum(), x),
        lambda f, x, v: hodiff.jvp(lambda z: MASK * f(z), x, v),
    ],
    ids=["hvp", "operator", "sparse", "gradient of a Jacobian", "jvp"],
)
def test_logcumsumexp_under_a_mask(call) -> None:
    """PyTorch's backward takes the logarithm of the incoming gradient: of its zeros, silently, from order two on."""
    x, v = torch.tensor([0.4, -0.7, 1.2], dtype=D), torch.ones(3, dtype=D)
    torch.testing.assert_close(call(lambda z: z.logcumsumexp(0), x, v), call(BY_PARTS, x, v))


AT: dict[str, list[float]] = {
    "ties": [0.3, 0.3, 0.3],
    "a large one": [0.3, 1e4, -0.2],
    "masked before": [-1e17, -1e17, 0.3],
    "masked after": [0.3, -1e17, -1e17],
    "one": [0.3],
}


@pytest.mark.table(plain=2)
@pytest.mark.parametrize("name", AT)
def test_logcumsumexp_where_entries_are_far_apart(name: str) -> None:
    """Written out by logaddexp it would not be finite: in its formula an infinity meets one."""
    x = torch.tensor(AT[name], dtype=D)
    v = torch.linspace(0.5, -1, len(x), dtype=D)
    size = 1 + x.abs().max()

    def shifted(z: Tensor) -> Tensor:
        parts = [z[: n + 1] for n in range(len(z))]
        return torch.stack([p.max() + (p - p.max()).exp().sum().log() for p in parts])

    for call in (hodiff.hvp, lambda f, x, v: hodiff.grad(lambda z: hodiff.hvp(f, z, v) @ v, x)):
        mine, theirs = (
            call(lambda z, f=f: (f(z) / size).sin().cumsum(0).sum(), x, v)
            for f in (lambda z: z.logcumsumexp(0), shifted)
        )
        torch.testing.assert_close(mine * size, theirs * size)


def test_logcumsumexp_of_a_number() -> None:
    """It is its own."""
    x = torch.tensor(0.7, dtype=D)
    torch.testing.assert_close(hodiff.hvp(lambda z: z.logcumsumexp(0).sin(), x, x), -x.sin() * x)


def test_logcumsumexp_of_a_tensor() -> None:
    """The function form writes it out; a graph that has it already is wrong, or not finite."""
    x = torch.tensor([0.3, -0.8, 1.4], dtype=D, requires_grad=True)
    v = torch.ones(3, dtype=D)
    loss = lambda z: (MASK * torch.logcumsumexp(z, 0)).square().sum()
    for create_graph in (False, True):
        with pytest.raises(hodiff.GraphError, match=r"(?s)logcumsumexp.*function"):
            hodiff.hvp(loss(x), x, v, create_graph=create_graph)


def test_standard_deviations_that_are_zero() -> None:
    """The variance is smooth; PyTorch's derivative of its root is masked to 0 at 0, so the second of its square is."""
    rows, v = torch.tensor([[0.5, 0.5, 0.5], [1.0, 2.0, 4.0]], dtype=D), torch.ones(2, 3, dtype=D)
    for loss in (lambda x: x.std(1).square().sum(), lambda x: torch.std_mean(x, 1)[0].square().sum()):
        with pytest.warns(hodiff.HodiffWarning, match=r"standard deviation.*x\.var"):
            hodiff.hvp(loss, rows, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right = hodiff.hvp(lambda x: x.std(1).square().sum(), rows[1:], v[1:])
    torch.testing.assert_close(right, hodiff.hvp(lambda x: x.var(1).sum(), rows[1:], v[1:]))


def _second(result: Any) -> Tensor:
    return result[1] if isinstance(result, tuple) else result


KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda z: z.norm(),
    "sqrt": lambda z: z.square().sum().sqrt(),
    "pow": lambda z: (z.abs() ** 1.5).sum(),
}


@pytest.mark.parametrize("name", KINKS)
@pytest.mark.parametrize("of", ["hessian", "hvp", "HessianOperator"])
def test_a_kink_is_told(of: str, name: str) -> None:
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


def test_third_derivative_of_conv_transpose_with_output_padding() -> None:
    w = torch.tensor([[[0.5, -1.0, 0.3]]], dtype=D)
    f = lambda z: F.conv_transpose1d(z[None, None] ** 2, w * z[0], stride=2, output_padding=1).pow(2).sum()
    below = lambda t: hodiff.hvp(f, POINT + t * POINT, POINT)
    expected = first_difference(below, step=1e-3)
    third = lambda: hodiff.jvp(lambda z: hodiff.hvp(f, z, POINT), POINT, POINT)
    right_or_refused(lambda: _second(third()), expected, "conv_transpose|output_padding|[Cc]onvolution")


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


def test_an_operation_whose_derivative_fails_over_its_unused_results_is_told_in_our_words() -> None:
    x = torch.linspace(-1, 1, 6, dtype=D).reshape(2, 3)
    f = lambda bias: (torch.native_layer_norm(x * bias, (3,), None, bias, 1e-5)[0] ** 3).sum()
    with pytest.raises(hodiff.GraphError, match="layer_norm"):
        hodiff.hvp(f, x[0].clone(), x[1].clone())
