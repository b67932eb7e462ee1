"""`return_outputs=`: every penalty gives what `f` returned, of the same evaluation, attached where the penalty is."""

import pytest
import torch

import hodiff
from tests.unit.penalties.oracles import DOUBLE, mlp

X = torch.linspace(-1, 1, 12, dtype=DOUBLE).reshape(4, 3)
seeded = lambda: torch.Generator().manual_seed(0)

PENALTIES = {
    "gradient_penalty": (1, lambda f, **o: hodiff.gradient_penalty(f, X, **o)),
    "wgan_gp_penalty": (1, lambda f, **o: hodiff.wgan_gp_penalty(f, X, 2 * X, generator=seeded(), **o)),
    "dragan_penalty": (1, lambda f, **o: hodiff.dragan_penalty(f, X, generator=seeded(), **o)),
    "r1_penalty": (1, lambda f, **o: hodiff.r1_penalty(f, X, **o)),
    "r2_penalty": (1, lambda f, **o: hodiff.r2_penalty(f, X, **o)),
    "eikonal_penalty": (1, lambda f, **o: hodiff.eikonal_penalty(f, X, **o)),
    "gradient_norm_penalty": (1, lambda f, **o: hodiff.gradient_norm_penalty(lambda x: f(x).sum(), X, **o)),
    "jacobian_penalty": (2, lambda f, **o: hodiff.jacobian_penalty(f, X, generator=seeded(), **o)),
    "jacobian_penalty, exact": (2, lambda f, **o: hodiff.jacobian_penalty(f, X, samples=None, **o)),
    "hessian_penalty": (2, lambda f, **o: hodiff.hessian_penalty(f, X, generator=seeded(), **o)),
    "curvature_penalty": (1, lambda f, **o: hodiff.curvature_penalty(f, X, **o)),
    "sliced_score_matching_loss": (3, lambda f, **o: hodiff.sliced_score_matching_loss(f, X, generator=seeded(), **o)),
    "sliced_score_matching_loss, density": (
        1,
        lambda f, **o: hodiff.sliced_score_matching_loss(f, X, log_density=True, generator=seeded(), **o),
    ),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_outputs_come_from_the_evaluation_of_the_penalty(name):
    width, penalty = PENALTIES[name]
    net, seen = mlp(3, width), []

    def f(x):
        seen.append(net(x))
        return seen[-1]

    alone = penalty(f)
    evaluations = len(seen)
    seen.clear()
    loss, outputs = penalty(f, return_outputs=True)
    assert len(seen) == evaluations  # no further one
    torch.testing.assert_close(loss, alone, rtol=0, atol=0)
    expected = seen[0].sum() if name == "gradient_norm_penalty" else seen[0]
    torch.testing.assert_close(outputs, expected)
    assert outputs.requires_grad
    found = torch.autograd.grad(loss + outputs.sum(), list(net.parameters()), allow_unused=True)
    assert all(part is not None for part in found)
    loss, outputs = penalty(f, return_outputs=True, create_graph=False)
    assert not loss.requires_grad and not outputs.requires_grad


def test_path_lengths():
    net, w = mlp(3, 8), X
    penalty = hodiff.PathLengthPenalty(decay=0.5).double()
    assert penalty.lengths is None
    noise = torch.randn(4, 2, 2, 2, dtype=DOUBLE, generator=seeded())
    images = lambda w: net(w).reshape(4, 2, 2, 2)
    value, outputs = penalty(images, w, vectors=noise, return_outputs=True)
    J = hodiff.jacobian(net, w, batch_ndim=1)
    expected = (J * (noise / 2).reshape(4, 8, 1)).sum(1).norm(dim=1)
    torch.testing.assert_close(penalty.lengths, expected)
    assert not penalty.lengths.requires_grad and "lengths" not in penalty.state_dict()
    torch.testing.assert_close(penalty.mean_length, expected.mean() / 2)
    torch.testing.assert_close(value, 2 * (expected - expected.mean() / 2).square().mean())
    torch.testing.assert_close(outputs, images(w))
