"""What the user's source says of lines: changes in place, passes, and what a loop hands from round to round."""

import pytest

from hodiff.graph import _source
from hodiff.graph._source import Line


@pytest.fixture
def line(tmp_path):
    """A line of a file."""

    def of(text, number=1):
        path = tmp_path / f"source{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text, "utf-8")
        return Line(str(path), number)

    return of


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("x += 1", ["x"]),
        ("x[0] = y = 1", ["x[0]"]),
        ("x.sub_(m).div_(s)", ["x"]),
        ("self.w.mul_(2)", ["self.w"]),
        ("x.mul(2)", []),
        ("x = 1", []),
    ],
)
def test_what_a_line_changes(line, text, changed):
    assert _source.changed_at(line(text)) == changed


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("loss.backward()", "loss"),
        ("torch.autograd.backward(loss)", "loss"),
        ("g = torch.autograd.grad(loss, x)", "loss"),
        ("loss.exp()", ""),
    ],
)
def test_what_a_pass_differentiates(line, text, target):
    assert _source.target_of(line(text)) == target


LOOPS = """
for step in range(3):
    y = f(h)
    if step:
        pass
    else:
        k = g(k)
    for t in range(2):
        y.backward()
        z = y
    h = y
"""


def test_what_one_round_hands_to_the_next(line):
    inner = line(LOOPS, 9)
    assert [_source.hands_on(name, inner) for name in "hkyz"] == [True, True, False, False]
    assert [loop.lineno for loop in _source.loops(inner)] == [8, 2]


def test_a_file_whose_name_is_bytes_to_python() -> None:
    """In the locale C, Python knows a name beyond ASCII by bytes that it cannot print."""
    assert str(Line("/tmp/\udcc3\udc96k script.py", 5)) == "Ök script.py:5"
    assert str(Line("/tmp/\udcff.py", 5)) == "\N{REPLACEMENT CHARACTER}.py:5"
