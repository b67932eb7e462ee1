"""Programs whose graphs grow, and programs whose graphs may: what `hodiff explain` says of them at the end."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from hodiff.__main__ import main
from hodiff.graph._growth import RISES, _Line

HERE = Path(__file__).parent / "growing"
TITLE = "hodiff: graphs that grow from iteration to iteration"
GROWING = {  # what is said, the line that grows, the line of the pass, and words of the advice
    "running_sum": (
        r"`total` holds the graphs of 14 iterations",
        "total += loss",
        "loss.backward()",
        r"helps: store only the value in .*`\.item",
    ),
    "list_of_losses": (
        r"`self\.history\['loss'\]` holds the graphs of 24 iterations",
        'self.history["loss"].append(loss)',
        "loss.backward()",
        r"helps: store only the value in .*`\.detach\(\)`",
    ),
    "attribute": (
        r"`meter\.average` holds the graphs of 29",
        "self.average = 0.9 * self.average + 0.1 * value",
        "loss.backward()",
        r"helps: store only the value in `meter\.average`",
    ),
    "graphs_in_grad": (
        r"`w\.grad` holds the graphs of 23 iterations, and some \d+ B",
        "",
        "loss.backward(create_graph=True)",
        r"helps: if the gradients of all iterations are not to(?s:.*)`\.grad = None`",
    ),
    "state_retained": (
        r"`h` holds the graphs of 19 iterations, and each pass runs all of them again",
        "h = cell(torch.randn(1, 2), h)",
        "loss.backward(retain_graph=True)",
        r"helps: if gradients are not to .*`h = h\.detach\(\)`",
    ),
    "mean_of_an_epoch": (
        r"`e_train` holds the graphs of 199 iterations, whose passes have run",
        "e_train += e_batch / len(loader)",
        "e_batch.backward()",
        r"helps: store only the value in .*`\.item",
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


def test_without_stderr_the_output_is_the_programs(process, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["explain", str(HERE / "running_sum.py")]) == 0
    assert "holds the graphs" not in capsys.readouterr().out


@pytest.mark.parametrize("name", FINE)
def test_silent(name, process, capsys):
    assert explained(HERE / f"{name}.py", capsys) == ""


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


def test_too_few_iterations_are_no_growth(process, capsys, tmp_path):
    assert main(["explain", summed(tmp_path, "", 9)]) == 0
    assert capsys.readouterr().err == ""


def test_of_kept_graphs_it_is_not_said_that_they_are_useless(process, capsys, tmp_path):
    main(["explain", summed(tmp_path, "", 15, "loss.backward(retain_graph=True)")])
    said = capsys.readouterr().err
    # Each saves 12 B; when they were looked at, 10 were alive.
    assert "`total` holds the graphs of 14 iterations, and some 168 B that they saved" in said
    assert "helps: if no other pass goes through them" in said
    assert "useless" not in said


def levels(*counts):
    line = _Line(None)
    looks = [index for index, alive in enumerate(counts) if line.count(alive)]
    return looks, line.idle <= RISES


def test_what_rises():
    assert levels(*range(50)) == ([10, 20, 40], True)
    assert levels(*range(0, 30), *range(0, 30)) == ([10, 20], True)  # emptied after each epoch
    assert levels(*range(10)) == ([], True)
    assert levels(*[index // 5 for index in range(80)]) == ([50], True)  # every fifth iteration
    assert levels(*range(20), *[20] * 12) == ([10, 20], False)  # a buffer that is full
    assert levels(*[1, 2] * 50) == ([], False)
    assert levels(*[n + d for n in range(20) for d in (2, 1)]) == ([16, 36], True)  # every other gives some back
    assert levels(*range(30), *[29] * 10) == ([10, 20], True)
    assert levels(*range(30), *[29] * 11) == ([10, 20], False)
    assert levels(*range(20), *[19] * 22, *range(20, 32)) == ([10, 42], True)  # settled, and risen anew
    assert levels(*range(12), 4, *range(5, 20)) == ([10], True)  # most of it gone: begun anew
    assert levels(*range(30), *[1] * 14) == ([10, 20], False)  # gone for good


# --- what holds them, and parameters that are never trained ---------------------------------------


LOOP = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
opt = torch.optim.{optimizer}
{start}
for step in range({rounds}):
    out = net(torch.randn(5, 3)); loss = out.square().mean()
    opt.zero_grad(); loss.backward()
    opt.step()
    {each}
"""


def looped(tmp_path, capsys, start="", each="pass", *, rounds=30, optimizer="SGD(net.parameters(), lr=0.01)"):
    script = tmp_path / "looped.py"
    script.write_text(LOOP.format(start=start, each=each, rounds=rounds, optimizer=optimizer), "utf-8")
    assert main(["explain", str(script)]) == 0
    return capsys.readouterr().err


HELD = {  # what is run before the loop, what keeps a graph, what is said to hold it
    "a list": ("kept = []", "kept.append(out)", "kept"),
    "a dict": ("kept = {}", "kept[step] = loss", "kept"),
    "keys are modules": ("kept = {}", "kept.setdefault(net[0], []).append(out)", "kept[<Linear 0>]"),
    "keys are parameters": ("kept = {}", "kept.setdefault(net[0].weight, []).append(out)", "kept[<Parameter 0>]"),
    "of an object": ("class Log: kept = None\nlog = Log(); log.kept = []", "log.kept.append(loss)", "log.kept"),
    "a sum": ("total = 0", "total = total + loss", "total"),
    "a buffer of a module": ("net.total = torch.zeros(())", "net.total = net.total + loss", "net.total"),
}


@pytest.mark.table(plain=4)
@pytest.mark.parametrize("name", HELD)
def test_the_holder_is_named_by_its_path(name, process, capsys, tmp_path):
    start, each, holder = HELD[name]
    said = looped(tmp_path, capsys, start, each)
    named = re.findall(r"^  `(.*)` holds the graphs of (\d+)", said, re.MULTILINE)
    assert named == [(holder, "29")]
    lines = re.findall(r"^    grows at +looped\.py:\d+   (.*)$", said, re.MULTILINE)
    assert all(re.search(r"\b(kept|total)\b", line) for line in lines)
    assert len(lines) == 1


def test_the_sum_of_an_epoch_is_named_and_not_the_mean_that_is_made_of_it(process, capsys, tmp_path):
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS, "utf-8")
    assert main(["explain", str(script)]) == 0
    said = capsys.readouterr().err
    assert re.findall(r"`(\w+)` holds the graphs of (\d+)", said) == [("running", "40")]
    assert re.search(r"grows at +epochs\.py:\d+   running \+= loss$", said, re.MULTILINE)


EPOCHS = """
import torch
net = torch.nn.Linear(3, 1)
for epoch in range(2):
    running = 0
    for _ in range(40):
        loss = net(torch.randn(5, 3)).square().mean()
        loss.backward()
        running += loss
    mean = running / 40
"""


def test_of_outputs_and_a_state_the_state_is_named(process, capsys, tmp_path):
    script = tmp_path / "state.py"
    script.write_text(STATE, "utf-8")
    assert main(["explain", str(script)]) == 0
    said = capsys.readouterr().err
    assert re.findall(r"^  `(\w+)` holds", said, re.MULTILINE) == ["hidden"]
    assert "out, hidden = rnn(torch.randn(1, 2, 3), hidden)" in said


STATE = """
import torch
class Net(torch.nn.RNN):
    def forward(self, x, h):
        return super().forward(x * 2, h)
rnn, hidden = Net(3, 4), torch.zeros(1, 2, 4)
for _ in range(300):
    out, hidden = rnn(torch.randn(1, 2, 3), hidden)
    out.mean().backward(retain_graph=True)
"""


RIGHT = {
    "a sum of values": ("total = 0", "total = total + loss.detach()"),
    "a moving average": ("ema = 0", "ema = 0.9 * ema + 0.1 * loss.detach()"),
    "averaged weights": (
        "ema = [p.detach().clone() for p in net.parameters()]",
        "ema = [e.lerp(p.detach(), 0.1) for e, p in zip(ema, net.parameters())]",
    ),
    "the last losses": ("recent = []", "recent = [*recent[-9:], loss]"),
    "a state that is detached": (
        "cell, h = torch.nn.RNNCell(1, 2), torch.zeros(5, 2)",
        "h = cell(out.detach(), h.detach()); h.sum().backward()",
    ),
    "a buffer that is emptied": ("kept = []", "kept.append(loss)\n    if len(kept) == 8: kept.clear()"),
    "outputs without graphs": ("kept = []", "kept.append(out.detach())"),
    "hooks that keep values": ("kept = []; net[0].register_forward_hook(lambda m, i, o: kept.append(o.detach()))", "0"),
    "a second optimizer with a closure": (
        "import torch; w = torch.ones(3, requires_grad=True); second = torch.optim.LBFGS([w])\n"
        "def closure():\n    second.zero_grad(); value = (w - 2).square().sum(); value.backward(); return value",
        "second.step(closure)",
    ),
    "gradients of gradients": (
        "",
        "x = torch.randn(5, 3, requires_grad=True); (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True);"
        " g.square().sum().backward(); opt.step()",
    ),
}


@pytest.mark.table(plain=4)
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_told_nothing(name, process, capsys, tmp_path):
    assert looped(tmp_path, capsys, *RIGHT[name]) == ""


UNTRAINED = {  # what is run before the loop, the optimizer, what is said
    "unused layers": (
        "",
        "Adam([*net.parameters(), *(extra := torch.nn.Linear(2, 2)).parameters()])",
        "stepped 12 times by `opt`, never had a gradient: `extra.weight`, `extra.bias`",
    ),
    "one without a name": (
        "",
        "SGD([*net.parameters(), torch.ones(2, requires_grad=True)], lr=0.1)",
        "never had a gradient: `opt.param_groups[0]['params'][4]`",
    ),
    "frozen on purpose": ("", "SGD([*net.parameters(), torch.nn.Parameter(torch.ones(2), False)], lr=0.1)", ""),
    "trained later": ("late = None", "SGD([*net.parameters(), (w := torch.ones(2, requires_grad=True))], lr=0.1)", ""),
}


@pytest.mark.parametrize("name", UNTRAINED)
@pytest.mark.table(plain=4)
def test_parameters_that_never_had_a_gradient_are_told(name, process, capsys, tmp_path):
    start, optimizer, words = UNTRAINED[name]
    each = "if step == 5: w.sum().backward()" if name == "trained later" else "pass"
    said = looped(tmp_path, capsys, start, each, rounds=12, optimizer=optimizer)
    assert words in said
    assert bool(said) == bool(words)


def test_parameters_of_a_program_that_failed_are_not_called_untrained(process, capsys, tmp_path):
    script = tmp_path / "failed.py"
    script.write_text(LOOP.format(optimizer=UNTRAINED["unused layers"][1], start="", each="1 / (step - 5)", rounds=9))
    assert main(["explain", str(script)]) == 1
    assert "never had" not in capsys.readouterr().err
