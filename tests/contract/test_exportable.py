"""Each call can be exported by `make_fx`, and gives the same at other numbers; or it stays out for a reason."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hodiff import InputError
from tests.contract.test_compiled_callers import RUNS, D, X
from tests.support.callers import tensors
from tests.support.releases import since

pytestmark = [since((2, 13), "what a compiled step asks for"), pytest.mark.filterwarnings("ignore")]

BY_NUMBERS = "it decides by numbers"
OPERATOR = "it looks at numbers of a vector or a matrix before it multiplies"
NO_TENSOR = "it gives no tensor"
STAYS_OUT = {
    **dict.fromkeys(
        (
            "implicit.argmin", "implicit.root", "implicit.fixed_point", "LevenbergMarquardt",
            "check_derivatives", "eigsh", "solve", "logdet", "spectral_density", "nystrom",
            "trace", "diagonal",
        ), BY_NUMBERS,
    ),
    **dict.fromkeys(
        (
            "HessianOperator", "JacobianOperator", "GaussNewtonOperator", "FisherOperator", "MatrixOperator",
            "LinearOperator",
        ), OPERATOR,
    ),
    **dict.fromkeys(
        (
            "sparse_hessian", "sparse_jacobian", "sparse.sparsity_pattern", "sparse.plan_hessian",
            "sparse.plan_jacobian", "sparse.color",
        ), "a pattern is found by numbers",
    ),
    **dict.fromkeys(
        (
            "jets.report", "select", "Selection", "graph.inspect", "graph.predict", "graph.shared", "graph.release",
            "graph.explain",
        ), NO_TENSOR,
    ),
}  # fmt: skip
OTHER = 0.7 * X + 0.1


@pytest.fixture
def without_generators(monkeypatch) -> None:
    monkeypatch.setattr("tests.support.callers.generator", lambda: None)


def results(name: str, x: Tensor) -> list[Any]:
    torch.manual_seed(0)
    return tensors(RUNS[name](x))


@pytest.mark.parametrize("name", [name for name in RUNS if name not in STAYS_OUT])
def test_an_exported_call_gives_the_same_at_another_point(name: str, without_generators) -> None:
    exported = make_fx(lambda x: [each for each in results(name, x) if each is not None])(X)
    torch.manual_seed(0)
    found, expected = exported(OTHER), results(name, OTHER)
    assert found and len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert all(each.dtype == D for each in found if each.is_floating_point()) or name == "twice_differentiable"


@pytest.mark.parametrize("name", [name for name in RUNS if name in STAYS_OUT])
def test_what_stays_out_cannot_be_exported(name: str, without_generators) -> None:
    if STAYS_OUT[name] is NO_TENSOR:
        assert not results(name, X)
        return
    with pytest.raises(InputError, match="PyTorch traces"):
        make_fx(lambda x: results(name, x))(X)
