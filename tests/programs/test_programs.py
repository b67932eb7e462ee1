"""Each program here, run by `hodiff explain` and by plain Python: the right words where it fails, silence where not."""

import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hodiff
from hodiff.__main__ import main
from hodiff.graph import _causes, explain, watch

HERE = Path(__file__).parent


class Failing:
    """What must be said: the cause, the variable, text of the lines, and words of the first fix; never the last."""

    def __init__(self, cause, variable, created, freed, fix, never="", after=None):
        self.cause, self.variable, self.created, self.freed = cause, variable, created, freed
        self.fix, self.never = fix, never
        self.after = cause if after is None else after  # what explain() says with nothing recorded


FAILING = {
    "reused_in_loop": Failing("hoisted", "y", "y = t @ a", "loss.backward()", "into the loop"),
    "hoisted_and_updated": Failing(
        "hoisted", "y", "y = t @ a", "loss.backward()", "into the loop", "retain_graph=True"
    ),
    "shared_b": Failing("two losses", "c", "c = b * 2", "d.backward()", "(d + e).backward()"),
    "shared_b_retained": Failing("two losses", "c", "c = b * 2", "d.backward()  # also fine", "(d + e)"),
    "losses_at_layers": Failing(
        "two losses", "features", "features = trunk(x).tanh()", "loss1.backward()", "(loss1 + loss2).backward()"
    ),
    "spent_then_extended": Failing("two losses", "b", "b = a * torch.tensor(2)", "c.backward()", "(c + d)"),
    "spent_then_extended_e": Failing("two losses", "c", "c = b * torch.tensor(3)", "c.backward()", "(c + e)"),
    "detached_loss": Failing("detached", "w", "w = z.detach() + 1", "", "remove the detach()", "retain_graph"),
    "running_loss": Failing(
        "carried", "total", "total = total + loss", "total.backward()", "total = total.detach()", "retain_graph"
    ),
    "rnn_state": Failing(
        "carried", "h", "h = cell(torch.ones(2, 3), h)", "loss.backward()", "h = h.detach()", "retain"
    ),
    "rnn_module_state": Failing(
        "carried", "net.h", "self.h = self.cell(x, self.h)", "loss.backward()", "net.h.detach()", "retain_graph"
    ),
    "gan_attached_fake": Failing(
        "two losses", "fake", "fake = generator(torch.randn(8, 2))", "d_loss.backward()", "fake.detach()", "one pass"
    ),
    "cached_logits": Failing(
        "cached", "pi.logits", "loss = -pi.log_prob(action).mean()", "loss.backward()", "create the object `pi` again"
    ),
    "made_with_the_object": Failing(
        "hoisted",
        "self.prior",
        "self.prior = self.w.exp().sum()",
        "loss.backward()",
        "If so, compute it again",
        "retain_graph=True",
    ),
    "embedded_before_the_epochs": Failing(
        "hoisted",
        "table",
        "table = emb(torch.arange(10)).tanh()",
        "loss.backward()",
        "into the loop",
        "retain_graph=True",
    ),
    "lbfgs_closure": Failing(
        "hoisted", "pred", "pred = (A @ w).tanh()", "loss.backward()", "into closure()", "retain_graph=True"
    ),
    "list_of_states": Failing(
        "stored",
        "hs[1]",
        "hs.append(cell(torch.randn(2, 3), hs[-1]))",
        "loss.backward()",
        "hs[:] = [",
        "retain_graph",
        "carried",
    ),
    "replayed_values": Failing(
        "stored", "replay[0]", "value = q(s)", "loss.backward()", "put into `replay`", "retain_graph", "carried"
    ),
    "gan_generator_first": Failing(
        "two losses",
        "fake",
        "fake = generator(torch.randn(4, 2))",
        "g_loss.backward()",
        "fake.detach()",
        "retain_graph=True",
    ),
    "gradient_then_loss": Failing(
        "two losses", "y", "y = (x**3).sum()", "(g,) = torch.autograd.grad(y, x)", "hodiff.grad(y, ...)", "one pass"
    ),
    "own_function": Failing("hoisted", "y", "y = Square.apply(x)", "y.sum().backward()", "into the loop"),
    "same_loss_twice": Failing(
        "same loss twice", "loss", "loss = a.exp().sum()", "loss.backward()", "compute `loss` again"
    ),
    "changed_in_place": Failing("changed in place", "s", "s += 1", "", "s = s.clone()", "retain_graph=True"),
    "stepped_too_early": Failing(
        "changed in place", "model.2.weight", "optimizer.step()", "", "compute `loss` again after", "retain_graph=True"
    ),
    "under_no_grad": Failing("no_grad", "loss", "b = a * 2", "", "outside the no_grad block", "retain_graph"),
    "constant_gradient": Failing(
        "constant gradient",
        "penalty",
        "(g,) = torch.autograd.grad(y, x, create_graph=True)",
        "",
        "zero",
        "retain_graph",
    ),
    "gradient_without_graph": Failing(
        "gradient without create_graph", "penalty", "(g,) = torch.autograd.grad(y, x)", "", "create_graph=True"
    ),
    "not_used": Failing("not used", "w", "", "", "allow_unused=True", "retain_graph"),
}
FINE = [
    "lbfgs_works",
    "reused_works",
    "losses_at_layers_retained",
    "deleted_factor",
    "retained_twice",
    "second_order_claim",
]
OWN = ["crashes", "exits"]
WORDED = {"cut_inside_f": r"cut at +cut_inside_f\.py:15 +return h / h\.detach\(\)(?s:.*)fix: drop the detach\(\)"}

OTHERS = {"__init__", "foretold", "reported", *(path.stem for path in HERE.glob("test_*.py"))}


def test_every_program_is_tested():
    assert {path.stem for path in HERE.glob("*.py")} - OTHERS == {
        *FAILING,
        *FINE,
        *OWN,
        *WORDED,
    }


def test_every_cause_has_a_program():
    missing = {cause.name for cause in _causes.CAUSES} - {case.cause for case in FAILING.values()}
    assert not missing, "write a program that fails so, and say in FAILING what must be said of it"


@pytest.mark.parametrize("name", WORDED)
def test_an_error_of_hodiff_is_worded(name):
    with pytest.raises(hodiff.GraphError, match=WORDED[name]):
        runpy.run_path(path(name), run_name="__main__")


def path(name: str) -> str:
    return str(HERE / f"{name}.py")


@pytest.fixture
def process(monkeypatch):
    """`hodiff explain` sets up a process for a program; a test has one to give back."""
    monkeypatch.setattr(sys, "argv", ["hodiff"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def plainly(name: str) -> BaseException | None:
    try:
        runpy.run_path(path(name), run_name="__main__")
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("name", FAILING)
def test_explained(name, process, capsys):
    want = FAILING[name]
    assert main(["explain", path(name)]) == 1
    text = capsys.readouterr().err
    assert "Traceback (most recent call last):" in text
    note = text[text.index("hodiff: why this") :]
    assert text.index("RuntimeError:") < text.index(note)  # after the traceback
    assert "(likely" not in note
    assert f"`{want.variable}`" in note
    for label, line in (("created at|cut at|changed at", want.created), ("freed by", want.freed)):
        if line:
            assert re.search(rf"(?:{label}) +{name}\.py:\d+ +{re.escape(line)}", note), note
    advice = note[note.index("=>") :]
    assert want.fix in advice
    assert not want.never or want.never not in advice


@pytest.mark.parametrize("name", FAILING)
def test_explained_after_the_fact(name, capsys):
    error = plainly(name)
    found = explain(error)
    want = FAILING[name]
    assert found is not None
    assert found.cause == want.after
    assert found.variable.split(".")[-1] in (want.variable.split(".")[-1], "out")
    assert found.certain == (found.cause == "not used")
    assert ("likely" in str(found)) != found.certain
    assert found.certain or not found.fixes or found.cause in ("changed in place", "no second derivative")


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of 2.8 to 2.11 says it of itself
@pytest.mark.parametrize("name", FINE)
def test_silent_and_transparent(name, process, capsys):
    assert plainly(name) is None
    plain = capsys.readouterr()
    import torch

    torch.manual_seed(0)
    assert main(["explain", path(name)]) == 0
    explained = capsys.readouterr()
    assert explained.err == plain.err == ""
    if "randn" not in Path(path(name)).read_text("utf-8"):
        assert explained.out == plain.out


def command(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", "")]))}
    command, how = [sys.executable, *arguments], {"capture_output": True, "text": True}
    return subprocess.run(command, input=stdin, cwd=cwd, env=environment, check=False, timeout=240, **how)


def test_the_process_is_the_programs(tmp_path):
    explained = command("-m", "hodiff", "explain", path("exits"), "--flag", "-m", "x", stdin="input", cwd=tmp_path)
    plain = command(path("exits"), "--flag", "-m", "x", stdin="input", cwd=tmp_path)
    assert explained.stdout == plain.stdout
    assert "'--flag', '-m', 'x'" in plain.stdout
    assert explained.stderr == plain.stderr == ""
    assert explained.returncode == plain.returncode == 7


def test_a_crash_looks_as_without_us():
    explained = command("-m", "hodiff", "explain", path("crashes"), "a", "b")
    plain = command(path("crashes"), "a", "b")
    assert explained.stderr == plain.stderr
    assert "ZeroDivisionError" in plain.stderr
    assert explained.returncode == plain.returncode == 1


def test_a_module_and_a_picture(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    (package / "train.py").write_text(Path(path("reused_in_loop")).read_text("utf-8"), "utf-8")
    done = command("-m", "hodiff", "explain", "--picture", "p.svg", "-m", "pkg.train", cwd=tmp_path)
    assert done.returncode == 1
    assert "created at   train.py:10   y = t @ a" in done.stderr
    svg = (tmp_path / "p.svg").read_text("utf-8")
    assert svg.startswith("<svg")
    assert "y = t @ a" in svg
    assert svg.count("#d33") == 2  # the legend's, and one cross: y's row, at the second pass


@pytest.mark.parametrize(
    ("name", "held", "words"),
    [
        ("train.py", "loss = 1\n", "takes a file that ends in .svg"),
        ("new.py", None, "takes a file that ends in .svg"),
        ("logo.svg", "<svg/>", "no picture of hodiff's"),
        ("train.svg", "loss = 1\n", "no picture of hodiff's"),
        ("binary.svg", "\udcff\udcfe\x00", "no picture of hodiff's"),
    ],
)
def test_a_picture_is_written_over_nothing_but_pictures(process, capsys, tmp_path, name, held, words):
    """Forget the value of an option, and the script that follows would be it."""
    place = tmp_path / name
    if held is not None:
        place.write_text(held, "utf-8", errors="surrogateescape")
    before = place.read_bytes() if held is not None else b""
    assert main(["explain", "--picture", str(place), path("crashes")]) == 2
    assert words in capsys.readouterr().err
    assert (place.read_bytes() if held is not None else b"") == before
    assert place.exists() == (held is not None)


def test_a_file_that_the_program_writes_where_the_picture_goes_stays(process, capsys, tmp_path):
    program, place = tmp_path / "own.py", tmp_path / "own.svg"
    program.write_text(f"import pathlib\npathlib.Path({str(place)!r}).write_text('<svg/>')\n", "utf-8")
    assert main(["explain", "--picture", str(place), str(program)]) == 0
    assert "no picture of hodiff's" in capsys.readouterr().err
    assert place.read_text("utf-8") == "<svg/>"


def test_a_picture_is_written_over_one_from_before(process, capsys, tmp_path):
    place = tmp_path / "p.svg"
    for _ in range(2):
        assert main(["explain", "--picture", str(place), path("crashes")]) == 1
    assert place.read_text("utf-8").startswith("<svg")


def test_a_picture_that_cannot_be_written_is_told_before_the_program_runs(process, capsys, tmp_path):
    place = tmp_path / "nowhere" / "p.svg"
    assert main(["explain", "--picture", str(place), path("crashes")]) == 2
    assert (
        capsys.readouterr().err == f"hodiff explain: can't write --picture {str(place)!r}: No such file or directory\n"
    )


def test_a_script_that_is_not_there(process, capsys):
    assert main(["explain", path("nowhere")]) == 2
    assert "nowhere.py" in capsys.readouterr().err


def test_keyboard_interrupt(process, capsys, monkeypatch, tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text("raise KeyboardInterrupt('now')\n", "utf-8")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt, match="now"):
        main(["explain", str(script)])
    assert capsys.readouterr().err.count("KeyboardInterrupt: now") == 1


def test_errors_of_hodiff_are_explained_through_their_cause():
    import torch

    a = torch.rand(4, requires_grad=True)
    with watch(), pytest.raises(hodiff.GraphError, match="freed") as caught:
        loss = a.exp().sum()
        loss.backward()
        hodiff.grad(loss, a)
    assert "`loss`" in caught.value.__cause__.__notes__[0]


def test_stdin_stays(process, monkeypatch, tmp_path, capsys):
    script = tmp_path / "reads.py"
    script.write_text("import sys\nprint(sys.stdin.read().upper())\n", "utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("words"))
    assert main(["explain", str(script)]) == 0
    assert capsys.readouterr().out == "WORDS\n"


def test_python_before_the_script_is_left_out(process, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "python", "train.py"]) == 2
    assert "leave python out: hodiff explain SCRIPT" in capsys.readouterr().err
