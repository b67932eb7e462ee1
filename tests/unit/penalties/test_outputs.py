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


SLICED = "sliced_score_matching_loss"  # its outputs are a score, like the point


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


SHAPES = {
    "(N,)": (4,),
    "(N, 1)": (4, 1),
    "(N, 1, 1)": (4, 1, 1),
    "(N, 1, H, W)": (4, 1, 2, 3),
    "(N, 1, L)": (4, 1, 6),
    "(N, K)": (4, 6),
    "(N, H, W)": (4, 2, 3),
    "(N, K, H, W)": (4, 3, 1, 2),
    "(N, H, W, 1)": (4, 2, 3, 1),
}
ANY = {"jacobian_penalty", "jacobian_penalty, exact", "hessian_penalty"}
ONE = ("(N,)", "(N, 1)", "(N, 1, 1)")
MAPS = (*ONE, "(N, 1, H, W)", "(N, 1, L)")
EACH = r"f returned shape \(4, .*expected one element per sample: \(4,\)"
TAKES = {"curvature_penalty": ONE, "sliced_score_matching_loss, density": ONE}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [n for n in PENALTIES if n not in ("gradient_norm_penalty", SLICED)])
def test_how_many_outputs_a_sample_may_have(name, shape):
    """One, or a map of one channel, which is summed; of several, the gradient of their sum would be taken silently."""
    penalty, size = PENALTIES[name][1], SHAPES[shape]
    net = mlp(3, torch.Size(size[1:]).numel())
    f = lambda x: net(x).reshape(size)
    if name in ANY:
        torch.testing.assert_close(penalty(f), penalty(lambda x: net(x).reshape(4, -1)))
    elif shape in TAKES.get(name, MAPS):
        torch.testing.assert_close(penalty(f), penalty(lambda x: net(x).sum(-1)))
    else:
        with pytest.raises(hodiff.InputError, match=EACH):
            penalty(f)


@pytest.mark.parametrize("name", ["gradient_penalty", "curvature_penalty"])
def test_the_ways_out_of_several_outputs(name):
    penalty, net = PENALTIES[name][1], mlp(3, 6)
    for size, total, one in (
        ((4, 6), "f(x).sum(-1)", "f(x)[..., 0]"),
        ((4, 2, 3), "f(x).flatten(1).sum(-1)", "f(x)[..., 0, 0]"),
    ):
        f = lambda x, size=size: net(x).reshape(size)
        with pytest.raises(hodiff.InputError, match=EACH) as caught:
            penalty(f)
        assert f"one at a time (lambda x: {one}), reduce them (lambda x: {total})" in str(caught.value)
        for words, expected in ((total, lambda x: net(x).sum(-1)), (one, lambda x: net(x)[:, 0])):
            torch.testing.assert_close(penalty(eval(f"lambda x: {words}", {"f": f})), penalty(expected))
    with pytest.raises(hodiff.InputError, match=r"f returned shape \(4, 6\), expected"):
        x = X.clone().requires_grad_()
        hodiff.gradient_penalty(net(x), x)  # already computed


def test_several_batch_dimensions():
    points = X.reshape(2, 2, 3)
    net = mlp(3, 6)
    with pytest.raises(hodiff.InputError, match=r"\(2, 2, 6\), expected one element per sample: \(2, 2\)"):
        hodiff.eikonal_penalty(net, points)
    value = hodiff.eikonal_penalty(lambda x: net(x).sum(-1), points)
    torch.testing.assert_close(value, hodiff.eikonal_penalty(lambda x: net(x).sum(-1, keepdim=True), points))


def test_no_penalty_is_left_out():
    names = {name for name in hodiff.__all__ if name.endswith(("_penalty", "_loss", "Penalty"))}
    assert names == {name.partition(",")[0] for name in PENALTIES} | {"PathLengthPenalty"}


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
