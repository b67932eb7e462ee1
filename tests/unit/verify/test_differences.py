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
