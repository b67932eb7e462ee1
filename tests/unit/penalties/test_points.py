"""Points between two batches, and random directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hodiff


@given(batch=st.lists(st.integers(1, 5), min_size=1, max_size=2), event=st.lists(st.integers(1, 3), max_size=3))
def test_one_weight_per_sample_for_all_its_entries_and_leaves(batch, event):
    real = {"image": torch.zeros(*batch, *event), "pose": torch.zeros(*batch, 2)}
    fake = {"pose": torch.ones(*batch, 2), "image": torch.ones(*batch, *event)}  # keys in another order
    got = hodiff.interpolate(real, fake, batch_ndim=len(batch))
    assert list(got) == ["image", "pose"]
    assert got["image"].shape == (*batch, *event)
    alpha = got["pose"][..., 0]
    assert ((alpha >= 0) & (alpha < 1)).all()
    for leaf in got.values():
        assert torch.equal(
            leaf.flatten(len(batch)) if leaf.ndim > len(batch) else leaf[..., None],
            alpha[..., None].expand(*batch, leaf[(0,) * len(batch)].numel()),
        )


def test_weights_are_uniform_and_independent():
    alpha = hodiff.interpolate(torch.zeros(20000, 1, dtype=torch.float64), torch.ones(20000, 1, dtype=torch.float64))
    quantiles = alpha.flatten().sort().values
    deviation = (quantiles - torch.linspace(0, 1, 20000, dtype=torch.float64)).abs().max()
    assert deviation < 1.63 / 20000**0.5  # Kolmogorov-Smirnov at 1 %: normal weights would be 0.16 off
    assert abs(torch.corrcoef(torch.stack([alpha[:-1, 0], alpha[1:, 0]]))[0, 1]) < 0.03


def test_points_are_detached_and_the_generator_is_used():
    real, fake = torch.randn(4, 3), torch.randn(4, 3, requires_grad=True)
    draw = lambda: hodiff.interpolate(real, fake * 1, detach=True, generator=torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    assert torch.equal(draw(), draw())
    assert torch.equal(torch.get_rng_state(), state)
    assert not draw().requires_grad
    torch.manual_seed(5)
    first = hodiff.interpolate(real, fake, detach=True)
    torch.manual_seed(5)
    assert torch.equal(first, hodiff.interpolate(real, fake, detach=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype):
    assert hodiff.interpolate(torch.ones(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.ones(8, 3), torch.ones(1, 3), r"b has shape \(1, 3\), but a has \(8, 3\)"),
        (torch.ones(8, 3), torch.ones(6, 3), r"cut the larger batch: a\[:n\], b\[:n\]"),
        (torch.ones(8, 3), torch.ones(8, 1), "samples themselves differ in shape.*bring them to one shape"),
        (torch.ones(8, 3), torch.ones(6, 4), "samples themselves differ in shape"),
        ([torch.ones(8, 3)], (torch.ones(8, 3),), "b is a tuple of 1, expected a list of 1"),
        ({"u": torch.ones(2)}, {"v": torch.ones(2)}, "it must be like a"),
        (torch.ones(8), torch.ones(8, dtype=torch.float64), "b is torch.float64 on cpu, but a is torch.float32"),
        (torch.arange(3), torch.arange(3), "a has dtype torch.int64"),
        (torch.tensor(1.0), torch.tensor(2.0), "too few dimensions"),
        ([], [], "a: got a list of 0"),
    ],
)
def test_what_does_not_match_raises(a, b, message):
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.interpolate(a, b)
