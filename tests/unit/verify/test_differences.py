import math

import pytest

from hodiff.verify._differences import slope


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
