"""What a check prints, and when it fails."""

import math

import pytest

from hodiff.cli._tour import Screen, number


@pytest.mark.parametrize("got", [1.1, math.nan, math.inf])
def test_a_wrong_number_fails(got, capsys):
    screen = Screen()
    screen.check("right", 1.0, 1.0, 0)
    screen.check("wrong", got, 1.0, 0.01)
    assert screen.end() == 1
    right, wrong, _, verdict = capsys.readouterr().out.splitlines()
    assert right.endswith("ok")
    assert wrong.endswith("FAILED")
    assert verdict == "1 of hodiff's numbers FAILED."


def test_the_number_of_someone_else_is_no_failure(capsys):
    screen = Screen()
    screen.compare("theirs", 0.5, 0, 1e-6)
    screen.compare("theirs", 0.5, 0.5, 0, "by chance")
    assert screen.end() == 0
    wrong, right, _, verdict = capsys.readouterr().out.splitlines()
    assert wrong.endswith("wrong  silently")
    assert right.endswith("right  by chance")
    assert verdict == "0 of hodiff's numbers checked."


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (32, "32"),
        (1234567, "1,234,567"),
        (3.2e-10, "3.2e-10"),
        (0.512345, "0.51"),
        (48.000001, "48"),
        (math.nan, "nan"),
    ],
)
def test_numbers_fit_their_column(value, text):
    assert number(value) == text
    assert len(text) <= 11
