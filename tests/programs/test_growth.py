"""Programs whose graphs grow, and programs whose graphs may: what `hodiff explain` says of them at the end."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from hodiff.__main__ import main
from hodiff.graph._growth import _Trend

HERE = Path(__file__).parent / "growing"
TITLE = "hodiff: graphs that grow from iteration to iteration"
GROWING = {  # what is said, the line that grows, the line of the pass, and words of the advice
    "running_sum": (
        r"`total` holds the graphs of 14 iterations",
        "total += loss",
        "loss.backward()",
        r"fix: .*`\.item",
    ),
    "list_of_losses": (
        r"`self\.history\['loss'\]` holds the graphs of 24 iterations",
        'self.history["loss"].append(loss)',
        "loss.backward()",
        r"fix: .*`\.detach\(\)`",
    ),
    "attribute": (
        r"`meter\.average` holds the graphs of 29",
        "self.average = 0.9 * self.average + 0.1 * value",
        "loss.backward()",
        r"fix: ",
    ),
    "graphs_in_grad": (
        r"`w\.grad` holds the graphs of 23 iterations, and \d+ B",
        "",
        "loss.backward(create_graph=True)",
        r"not known: should the gradients of all iterations(?s:.*)`\.grad = None`",
    ),
    "cycles_in_grad": (
        r"\d\d tensors and more hold their own graphs in `\.grad`",
        "",
        "(x**4).sum().backward(create_graph=True)",
        r"fix: take the gradient with hodiff\.grad",
    ),
    "state_retained": (
        r"each pass runs the graphs of all iterations before it again: 108 nodes",
        "h = cell(torch.randn(1, 2), h)",
        "loss.backward(retain_graph=True)",
        r"not known: .*`h = h\.detach\(\)`",
    ),
    "mean_of_an_epoch": (
        r"`e_train` holds the graphs of \d+ iterations and more, of losses whose passes have run",
        "e_train += e_batch / len(loader)",
        "",
        r"fix: .*`\.item",
    ),
    "validation": (
        r"`predictions` holds the graphs of \d\d iterations and more, and [\d,]+ B",
        "predictions.append(out)",
        "",
        r"not known: (?s:.*)no_grad",
    ),
}
FINE = ["clean_loop", "consumed_list", "bounded"]

pytestmark = pytest.mark.filterwarnings("ignore:Using backward")


def test_every_program_is_tested():
    assert {path.stem for path in HERE.glob("*.py")} - {"__init__"} == {*GROWING, *FINE}


def explained(path, capsys, *options):
    torch.manual_seed(0)
    runpy.run_path(str(path), run_name="__main__")
    plain = capsys.readouterr()
    torch.manual_seed(0)
    status = main(["explain", *options, str(path)])
    said = capsys.readouterr()
    assert said.out == plain.out
    assert status == 0
    return said.err.removeprefix(plain.err)


@pytest.mark.parametrize("name", GROWING)
def test_named(name, process, capsys):
    what, line, call, advice = GROWING[name]
    said = explained(HERE / f"{name}.py", capsys)
    assert said.startswith(f"\n{TITLE}\n")
    part = next(each for each in said.split("\n\n") if re.search(what, each))
    for label, text in (("grows at", line), ("pass", call)):
        found = re.findall(rf"^    {label} +{name}\.py:\d+   (.*)$", part, re.MULTILINE)
        assert found == ([text] if text else [])
    assert re.search(advice, part)
    assert ("fix: " in part) == advice.startswith("fix")


def test_a_sum_and_a_list_that_no_pass_uses_are_both_named(process, capsys):
    said = explained(HERE / "validation.py", capsys)
    assert re.findall(r"^  `(\w+)` holds", said, re.MULTILINE) == ["total", "predictions"]
    assert "total += nn.functional.cross_entropy(out, y)" in said


def test_without_stderr_the_output_is_the_programs(process, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["explain", str(HERE / "running_sum.py")]) == 0
    assert "holds the graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("name", FINE)
def test_silent(name, process, capsys):
    assert explained(HERE / f"{name}.py", capsys) == ""


def test_with_a_picture(process, capsys, tmp_path):
    said = explained(HERE / "running_sum.py", capsys, "--picture", str(tmp_path / "p.svg"))
    assert "`total` holds" in said
    assert "loss.backward()" in (tmp_path / "p.svg").read_text("utf-8")


SUMMED = """
import sys
import torch

w = torch.ones(3, requires_grad=True)
total = 0
for _ in range(STEPS):
    loss = w.exp().square().sum()
    PASS
    total = total + loss
END
"""


def summed(tmp_path, end, steps=15, call="loss.backward()"):
    script = tmp_path / "summed.py"
    script.write_text(SUMMED.replace("STEPS", str(steps)).replace("PASS", call).replace("END", end), "utf-8")
    return str(script)


def test_the_status_is_the_programs(process, capsys, tmp_path):
    with pytest.raises(SystemExit, match="3"):
        main(["explain", summed(tmp_path, "sys.exit(3)")])
    assert "`total` holds the graphs of 14" in capsys.readouterr().err


def test_after_a_traceback(process, capsys, tmp_path):
    assert main(["explain", summed(tmp_path, "1 / 0")]) == 1
    assert re.search(r"^ZeroDivisionError: .*\n\nhodiff: graphs that grow", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(
    ("end", "said"),
    [("", True), ("1 / 0", False), ("raise MemoryError", True), ("total.backward()", False), ("del total", True)],
)
def test_what_no_pass_used_is_told_of_a_program_that_ended(end, said, process, capsys, tmp_path):
    main(["explain", summed(tmp_path, end, 400, "pass")])
    assert ("no backward pass has gone through them" in capsys.readouterr().err) == said


def test_too_few_iterations_are_no_growth(process, capsys, tmp_path):
    assert main(["explain", summed(tmp_path, "", 9)]) == 0
    assert capsys.readouterr().err == ""


def test_kept_graphs_have_no_fix(process, capsys, tmp_path):
    main(["explain", summed(tmp_path, "", 15, "loss.backward(retain_graph=True)")])
    said = capsys.readouterr().err
    assert re.search(r"`total` holds the graphs of 14 iterations, and \d+ B that they saved", said)
    assert "not known: will another pass" in said
    assert "fix" not in said


def levels(*counts):
    trend = _Trend()
    looks = [index for index, count in enumerate(counts) if trend.step(count)]
    return looks, trend.settled


def test_what_rises():
    assert levels(*range(50)) == ([10, 20, 40], False)
    assert levels(*range(0, 30), *range(0, 30)) == ([10, 20, 40, 50], False)  # emptied after each epoch
    assert levels(*range(10)) == ([], True)
    assert levels(*[index // 5 for index in range(80)]) == ([50], False)  # every fifth iteration
    assert levels(*range(20), *[20] * 22) == ([10, 20], True)  # a buffer that is full
    assert levels(*[1, 2] * 50) == ([], True)
    assert levels(*[n + d for n in range(20) for d in (2, 1)]) == ([18, 38], False)  # every other gives some back
    assert levels(*range(30), *[29] * 20) == ([10, 20], False)  # it has rested for less long than it rose
    assert levels(*range(30), *[29] * 31) == ([10, 20], True)
    assert levels(*range(20), *[19] * 22, *range(20, 32)) == ([10, 51], False)  # settled, and risen anew
    assert levels(*range(20), *[19] * 22, *range(20, 29)) == ([10], True)
    assert levels(*range(12), 4, *range(5, 20)) == ([10, 22], False)  # most of it gone: begun anew
    assert levels(*range(12), 5, *range(6, 20)) == ([10], False)
