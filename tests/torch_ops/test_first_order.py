"""Taylor mode at first order, and reverse mode over it, through each operation that has a formula of its own there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hodiff.jets import _pushforward, rules
from hodiff.jets._jet import RULES
from tests.torch_ops import results
from tests.torch_ops.database import names, problems
from tests.torch_ops.judge import judge
from tests.torch_ops.routes import Directions, Route

rules.read("")  # all of them

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

OPERATIONS = {
    "matmul": "matmul",
    "mm": "mm",
    "bmm": "bmm",
    "layer_norm": "nn.functional.layer_norm",
    "rms_norm": "nn.functional.rms_norm",
    "relu": "nn.functional.relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "expit": "sigmoid",
    "special_expit": "sigmoid",
    "gelu": "nn.functional.gelu",
    "silu": "nn.functional.silu",
    "softmax": "softmax",
    "special_softmax": "softmax",
    "log_softmax": "log_softmax",
    "special_log_softmax": "log_softmax",
    "scaled_dot_product_attention": "nn.functional.scaled_dot_product_attention",
    "cross_entropy_loss": "nn.functional.cross_entropy",
}
"""The formulas, and an entry of the database for each."""

GENERAL = (
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d",
    "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d", "nn.functional.embedding",
    "nn.functional.group_norm", "nn.functional.instance_norm", "nn.functional.batch_norm", "nn.functional.linear",
)  # fmt: skip
"""Operations that have the rule for any order there, with every argument varying."""

EVERY = sorted({*OPERATIONS.values(), *GENERAL})


def along(f: Callable[[Any], Any], x: Tensor, d: Directions, **options: Any) -> Tensor:
    """The derivative along the first direction, as lean products have it."""
    output, expansion = _pushforward.push(f, [x], [[d[0].unsqueeze(0)]], 1, mixes=True, **options)
    return _pushforward.coefficients(output, expansion)[1].squeeze(0)


def reverse(passes: int) -> Callable[[Any, Tensor, Directions], Tensor]:
    """Passes over that."""

    def run(f: Any, x: Tensor, d: Directions) -> Tensor:
        leaf = x.clone().requires_grad_()
        slope = along(f, leaf, d)
        for left in reversed(range(passes)):
            if not slope.requires_grad:
                return torch.zeros((), dtype=x.dtype)
            options = {"create_graph": left > 0, "allow_unused": True, "materialize_grads": True}
            slope = torch.autograd.grad(slope, leaf, **options)[0] @ d[1]
        return slope

    return run


ROUTES = (
    Route("jet 1, without a graph", 1, lambda f, x, d: along(f, x, d, record=False), vector=True),
    Route("jet 1, with one", 1, lambda f, x, d: along(f, x, d).detach(), vector=True),
    Route("one pass over it", 2, reverse(1)),
    Route("two passes over it", 3, reverse(2)),
)


def test_every_formula_is_judged() -> None:
    assert RULES.first.keys() == OPERATIONS.keys()
    assert not set(EVERY) - set(names())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", EVERY)
def test_right_at_first_order_and_in_passes_over_it(name: str, count: int) -> None:
    found = []
    for problem in problems(name, count):
        verdicts = judge(problem, ROUTES)
        found += verdicts.values()
        for route, verdict in verdicts.items():
            assert results.kind(verdict) in ("right", "unsure", "refused"), f"{route}: {verdict}"
    kinds = [results.kind(verdict) for verdict in found]
    assert "right" in kinds and 4 * kinds.count("refused") <= len(kinds), found
