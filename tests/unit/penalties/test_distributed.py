"""Two gloo processes: each step is that of one process with the whole batch, on both ranks."""

import pytest
import torch

from tests.unit.penalties import ddp_worker

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(ddp_worker.main, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", ddp_worker.SCENARIOS)
def test_ranks_agree_with_one_process(ranks, name):
    loss, _ = ddp_worker.SCENARIOS[name]
    expected = ddp_worker.train(ddp_worker.critic(), loss, ddp_worker.batch())
    start = list(ddp_worker.critic().parameters())
    assert not torch.equal(expected[0], start[0])
    for rank in ranks:
        for a, b in zip(rank[name], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ddp_worker.RAISES)
def test_a_static_graph_raises(ranks, name):
    for rank in ranks:
        assert "static_graph=True), which silently does not average the gradients" in rank[name]
