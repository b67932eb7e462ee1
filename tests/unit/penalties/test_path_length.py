"""StyleGAN2's path length regularization: formula, running mean, state, and what its backward reaches."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import hodiff
from tests.support.modules import two_layers
from tests.unit.penalties.oracles import DOUBLE, parameter_gradients, same


class Synthesis(nn.Module):
    """Latents (N, D) or (N, L, D) to images (N, 2, 3, 3)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 18)).double()

    def forward(self, w):
        return self.layers(w.flatten(1)).unflatten(1, (2, 3, 3))


def lengths(G, w, noise):
    w = w if w.requires_grad else w.detach().requires_grad_()
    (g,) = torch.autograd.grad((G(w) * noise / 3).sum(), w, create_graph=True)  # sqrt(3 · 3)
    return g.square().sum(-1).sqrt() if w.ndim == 2 else g.square().sum(2).mean(1).sqrt()


def noise(seed, n=5):
    return torch.randn(n, 2, 3, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4)])
def test_three_steps_by_the_formula(shape):
    G, w = Synthesis(torch.Size(shape[1:]).numel()), torch.randn(shape, dtype=DOUBLE)
    penalty = hodiff.PathLengthPenalty().double()
    a = torch.zeros((), dtype=DOUBLE)
    for seed in range(3):
        length = lengths(G, w, noise(seed))
        mean = a + 0.01 * (length.mean() - a)
        found = penalty(G, w, generator=torch.Generator().manual_seed(seed))
        same(found, 2 * (length - mean).square().mean(), G)
        a = mean.detach()
        torch.testing.assert_close(penalty.mean_length, a)
        assert not penalty.mean_length.requires_grad


def test_gradient_reaches_the_mapping_network():
    mapping, G = nn.Linear(6, 4).double(), Synthesis(4)
    z = torch.randn(5, 6, dtype=DOUBLE)
    w = mapping(z)
    hodiff.PathLengthPenalty(weight=1.0).double()(G, w, generator=torch.Generator().manual_seed(1)).backward()
    length = lengths(G, mapping(z), noise(1))
    expected = parameter_gradients((length - 0.01 * length.mean()).square().mean(), mapping)
    for p, g in zip(mapping.parameters(), expected, strict=True):
        assert g.any()
        torch.testing.assert_close(p.grad, g)


def test_state_moves_in_training_only_and_is_saved():
    G, w = Synthesis(4), torch.randn(5, 4, dtype=DOUBLE)
    penalty = hodiff.PathLengthPenalty(decay=0.5)
    with torch.no_grad():
        penalty(G, w)
    moved = penalty.mean_length.clone()
    assert moved > 0
    penalty.eval()
    penalty(G, w)
    assert torch.equal(penalty.mean_length, moved)
    restored = hodiff.PathLengthPenalty(decay=0.5)
    restored.load_state_dict(copy.deepcopy(penalty.state_dict()))
    assert torch.equal(restored.mean_length, moved)
    assert repr(restored) == "PathLengthPenalty(weight=2.0, decay=0.5)"


def test_lengths_that_are_not_finite_leave_the_mean_as_it_was():
    G, w = Synthesis(4), torch.randn(5, 4, dtype=DOUBLE)
    penalty = hodiff.PathLengthPenalty(decay=0.5)
    penalty(G, w)
    before = penalty.mean_length.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hodiff.HodiffWarning)
        assert penalty(G, torch.full_like(w, math.nan)).isnan()
    assert torch.equal(penalty.mean_length, before)
    assert penalty(G, w).isfinite() and penalty.mean_length != before


def test_constant_generator_gives_zero_and_no_nan():
    scale = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    value = hodiff.PathLengthPenalty()(lambda w: scale * w[:, :, None, None], torch.randn(3, 4, dtype=DOUBLE))
    value.backward()
    assert value == 0
    assert scale.grad == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p(Synthesis(4), torch.randn(4, dtype=DOUBLE)), r"w has shape \(4,\), expected latents"),
        (lambda p: p(Synthesis(4), torch.zeros(0, 4, dtype=DOUBLE)), r"w has shape \(0, 4\)"),
        (lambda p: p(lambda w: w.sum(), torch.randn(3, 4)), r"f returned shape \(\), expected images \(3, C, ...\)"),
        (lambda p: p(torch.ones(3), torch.randn(3, 4)), "f: got a Tensor, expected a function or a module"),
        (lambda p: hodiff.PathLengthPenalty(decay=2), "decay: got 2, expected a number between 0 and 1"),
        (lambda p: hodiff.PathLengthPenalty(weight="2"), "weight: got '2', expected a number of at least 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call(hodiff.PathLengthPenalty())


def test_the_callers_noise_outputs_and_each_samples_value():
    G, w = Synthesis(4), torch.randn(5, 4, dtype=DOUBLE)
    penalty = hodiff.PathLengthPenalty(weight=3.0, decay=0.0).double()
    each, images = penalty(G, w, vectors=noise(2), reduction="none", return_outputs=True)
    torch.testing.assert_close(images, G(w))
    assert images.requires_grad
    torch.testing.assert_close(each, 3 * lengths(G, w, noise(2)).square())
    for reduction, total in (("mean", each.mean()), ("sum", each.sum())):
        torch.testing.assert_close(penalty(G, w, vectors=noise(2), reduction=reduction), total)
    _, detached = penalty(G, w, return_outputs=True, create_graph=False)
    assert not detached.requires_grad
    with pytest.raises(hodiff.InputError, match="vectors: got 2 vectors like the images, expected one"):
        penalty(G, w, vectors=torch.stack([noise(1), noise(2)]))
    with pytest.raises(hodiff.InputError, match="reduction: got 'max'"):
        penalty(G, w, reduction="max")


D = torch.float64


def test_stylegan2_path_lengths_are_there_to_be_logged():
    net, w, penalty = two_layers(4, 12), torch.randn(6, 4, dtype=D), hodiff.PathLengthPenalty().double()
    noise = torch.randn(6, 3, 2, 2, dtype=D)
    images = lambda w: net(w).reshape(6, 3, 2, 2)
    loss, outputs = penalty(images, w, vectors=noise, return_outputs=True)
    z = w.clone().requires_grad_()
    (pulled,) = torch.autograd.grad((images(z) * noise / 2).sum(), z, create_graph=True)
    lengths = pulled.square().sum(1).sqrt()
    mean = 0.01 * lengths.mean()
    torch.testing.assert_close(penalty.lengths, lengths.detach())
    torch.testing.assert_close(loss, 2 * (lengths - mean).square().mean())
    torch.testing.assert_close(outputs, images(w))


def test_a_flag_is_looked_at_before_anything_is_computed():
    penalty, calls = hodiff.PathLengthPenalty(), []

    def images(w):
        calls.append(w)
        return w[:, :, None] ** 2

    with pytest.raises(hodiff.InputError, match=r"return_outputs: got .*, expected True or False"):
        penalty(images, torch.ones(3, 2), return_outputs=[1])
    assert not calls
    assert float(penalty.mean_length) == 0
