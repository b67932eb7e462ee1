"""DistributedDataParallel in a group of one process: what two processes rest on (see `test_distributed`)."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import hodiff
from tests.support.processes import group_of_one
from tests.unit.penalties import ddp_worker

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match"),  # a note of DDP on performance
]


@pytest.fixture(scope="module", autouse=True)
def group():
    with group_of_one():
        yield


ALONE = {
    "r1": lambda D, x: hodiff.r1_penalty(D, x),
    "Jacobian": lambda D, x: hodiff.jacobian_penalty(D, x),
    "Hessian": lambda D, x: hodiff.hessian_penalty(D, x),
    "Hessian by differences": lambda D, x: hodiff.hessian_penalty(D, x, method="differences"),
    "curvature": lambda D, x: hodiff.curvature_penalty(D, x),
    "score": lambda D, x: hodiff.sliced_score_matching_loss(D, x, log_density=True),
}


@pytest.mark.parametrize("name", ALONE)
def test_every_parameter_takes_part_in_the_backward(name):
    """The last bias is in no gradient by the input. Left out, its rank would wait for it, or average without it."""
    D, x = DDP(ddp_worker.critic()), ddp_worker.batch()
    ALONE[name](D, x).backward()
    assert all(p.grad is not None for p in D.parameters())
    assert D.module[-1].bias.grad.abs() < 1e-12
    assert any(p.grad.any() for p in D.parameters())


@pytest.mark.parametrize("name", ALONE)
def test_a_static_graph_raises(name):
    with pytest.raises(hodiff.GraphError, match="static_graph=True"):
        ALONE[name](DDP(ddp_worker.critic(), static_graph=True), ddp_worker.batch())


def test_a_hidden_static_graph_raises():
    D, x = DDP(ddp_worker.critic(), static_graph=True), ddp_worker.batch()
    with pytest.raises(hodiff.GraphError, match="static_graph=True"):
        hodiff.r1_penalty(lambda x: D(x), x)
