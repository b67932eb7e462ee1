import math

import pytest
import torch

from hodiff.verify._differences import norm, random_direction, slope


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        (math.sin, 1.0),
        (math.exp, 1.0),
        (lambda t: t**5 + 2 * t, 2.0),
        (lambda t: math.log(1 + t), 1.0),
        (lambda t: 3.0, 0.0),
    ],
)
def test_slopes_and_their_error_estimates(function, truth):
    found = slope(function, 0.1)
    assert abs(found.value - truth) <= max(10 * found.error, 1e-14)
    assert found.error < 1e-10


def test_a_kink_has_no_small_error_unless_symmetric():
    assert slope(lambda t: max(t - 1e-3, 0.0), 0.1).error > 1e-12


@pytest.mark.parametrize(("power", "levels"), [(3, 2), (5, 4), (7, 5)])
def test_each_extrapolation_takes_away_its_order(power, levels):
    """Of t^3 one is exact, of t^5 two are, where a third agrees; with another factor some of the order would stay."""
    assert abs(slope(lambda t: t**power + t, 0.5, levels=levels).value - 1) < 1e-12


def test_the_error_is_told_by_both_neighbors():
    """Of t^5 + t the third column is exact, and differs from the second by 6e-5."""
    assert slope(lambda t: t**5 + t, 0.5, levels=4).error < 1e-13


@pytest.mark.parametrize("offset", [1e4, 1e8])
def test_the_error_covers_what_rounding_can_do(offset):
    found = slope(lambda t: offset + t, 1e-3)
    assert abs(found.value - 1) <= found.error <= 1e-10 * offset


def test_a_random_direction_has_length_one():
    point = torch.zeros(50, dtype=torch.float64), torch.zeros(2, 30, dtype=torch.float64)
    found = random_direction(point, torch.Generator().manual_seed(0))
    assert [part.shape for part in found] == [part.shape for part in point]
    assert float(norm(found)) == pytest.approx(1)
