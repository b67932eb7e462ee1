"""Each program here is explained as is expected beside it: in the small ones, and in those after public reports.

The class of the failure is right, and facts name the variable and the lines.
"""

import functools
import re
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import hodiff
from hodiff.__main__ import main
from hodiff._core._versions import RELEASE
from hodiff.graph import explain, watch
from tests.programs import OF_AUTOGRAD
from tests.programs.expected import FAILING, FINE, OWN, WORDED
from tests.programs.reports.expected import EXPECTED as REPORTS
from tests.programs.unseen.expected import EXPECTED as UNSEEN
from tests.support.releases import CHANGES, marked

HERE = Path(__file__).parent
FOLDERS = {"reports": REPORTS, "unseen": UNSEEN}
AFTER_REPORTS = {f"{folder}/{name}": row for folder, rows in FOLDERS.items() for name, row in rows.items()}
OTHERS = {"__init__", "conftest", "expectation", "expected", *(path.stem for path in HERE.glob("test_*.py"))}


def path(name: str) -> str:
    return str(HERE / f"{name}.py")


CHANGED = (
    "changed_in_place",
    "stepped_too_early",
    "reports/memory_state_retained",
    "reports/neurons_trained_online",
    "reports/graph_memory",
    "reports/gan_discriminator_steps_first",
    "reports/factor_vae",
    "reports/maddpg_critic_first",
    "reports/sac_policy_after_critics",
    "reports/residual_added_in_place",
    "reports/gate_then_inplace_relu",
    "reports/dehazing_losses_together",
    "unseen/edges_discriminator_steps",
    "unseen/cycle_of_generators",
    "unseen/one_fake_many_steps",
    "unseen/imitation_steps_twice",
    "unseen/skills_update_order",
    "unseen/inpainting_losses_by_name",
    "unseen/agents_of_a_network",
    "unseen/adversary_more_generator_steps",
    "unseen/sharpness_second_step",
    "unseen/attention_on_the_same_memory",
    "unseen/pitch_thresholded",
    "unseen/vae_of_three_optimizers",
    "unseen/gates_biased_after_the_sigmoid",
)
"""What is said of these names the tensor that was changed in place, or the line that changed it."""


def explainable(names):
    """The programs among some; where PyTorch does not tell of a changed tensor, those of it are skipped."""
    return marked(names, CHANGES, set(CHANGED) & set(names))


# --- small programs ---------------------------------------------------------------------------------------------------


def test_every_program_is_tested():
    assert {path.stem for path in HERE.glob("*.py")} - OTHERS == {
        *FAILING,
        *FINE,
        *OWN,
        *WORDED,
    }


@pytest.mark.parametrize("name", WORDED)
def test_an_error_of_hodiff_is_worded(name):
    with pytest.raises(hodiff.GraphError, match=WORDED[name]):
        runpy.run_path(path(name), run_name="__main__")


def plainly(name: str) -> BaseException | None:
    try:
        runpy.run_path(path(name), run_name="__main__")
    except Exception as error:
        return error
    return None


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", explainable(FAILING))
def test_explained(name, process, capsys):
    want = FAILING[name]
    assert main(["explain", path(name)]) == 1
    text = capsys.readouterr().err
    assert "Traceback (most recent call last):" in text
    note = text[text.index("hodiff: why this") :]
    assert text.index("RuntimeError:") < text.index(note)  # after the traceback
    assert f"`{want.variable}`" in told(note)
    assert f"=> {want.cause}: " in note
    for kinds, line in (("made|cut|changed", want.created), ("freed by", want.freed)):
        assert not line or re.search(rf"\n  (?:{kinds}) +{name}\.py:\d+ +{re.escape(line)}", note), note
    assert len(note.strip().splitlines()) <= 21


def told(note: str) -> str:
    """The facts of an explanation, without what is said of its class."""
    return note[: note.index("\n    => ")]


@pytest.mark.parametrize("name", explainable(FAILING))
def test_explained_after_the_fact(name, capsys):
    error = plainly(name)
    found = explain(error)
    want = FAILING[name]
    assert found is not None
    assert found.cause == want.after
    assert found.variable
    if found.cause != "freed before":  # there it is the nearest value in sight whose graph was freed
        assert found.variable.split(".")[-1] == want.variable.split(".")[-1]
    assert not found.watched
    assert found.line("freed by") is None  # which pass it was, is told by a record alone


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of 2.8 to 2.11 says it of itself
@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", FINE)
def test_silent_and_transparent(name, process, capsys):
    assert plainly(name) is None
    plain = capsys.readouterr()
    torch.manual_seed(0)
    assert main(["explain", path(name)]) == 0
    explained = capsys.readouterr()
    assert explained.err == plain.err == ""
    if "randn" not in Path(path(name)).read_text("utf-8"):
        assert explained.out == plain.out


# --- programs after public reports ------------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("ignore")  # PyTorch's own, on what the reports do
FAILED = [name for name in AFTER_REPORTS if name != "reports/distances_twice" or RELEASE < (2, 14)]
"""All of them; but for one, whose missing derivative PyTorch 2.14 has."""


def source(name):
    return Path(path(name)).read_text("utf-8")


@functools.cache
def explained(name):
    if "torch.compile(" in source(name):  # what was compiled, and how, in this process before, would matter
        command = [sys.executable, "-m", "hodiff", "explain", path(name)]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240).stderr
        return said[said.index("hodiff: why") :]
    torch.compiler.reset()
    with pytest.raises(Exception, match=OF_AUTOGRAD) as caught, watch():
        runpy.run_path(path(name), run_name="__main__")
    return "\n".join(note for note in getattr(caught.value, "__notes__", ()) if note.startswith("hodiff: why"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_program_has_its_row_and_its_address(folder):
    rows = FOLDERS[folder]
    assert {path.stem for path in (HERE / folder).glob("*.py")} - OTHERS == set(rows)
    address = r"After (https://github\.com/\S+/(?:issues|pull)/\d+|https://discuss\.pytorch\.org/t/\S+)\n"
    assert len({re.search(address, source(f"{folder}/{name}")).group(1) for name in rows}) == len(rows) >= 40


@quiet
@pytest.mark.parametrize("name", explainable(FAILED))
def test_what_is_said(name):
    want, note = AFTER_REPORTS[name], explained(name)
    facts, words = told(note), " ".join(note.split())
    assert f"=> {want.cause}: " in words, note
    assert any(variable in facts for variable in want.variables), note
    foretold = name.startswith("unseen/")  # before it was known which part of a statement is shown
    shown = re.findall(rf"^ +\S.*? {Path(name).name}\.py:\d+   (.*)$", facts, re.MULTILINE)
    assert not want.lines or any(
        line in text or (foretold and text.partition(" ...")[0].partition("   (")[0] in line)
        for line in want.lines
        for text in shown
    ), note
    assert len(note.strip().splitlines()) <= 21


@quiet
@pytest.mark.parametrize("name", UNSEEN)
def test_the_program_runs_as_under_python(name, capsys, monkeypatch):
    program = path(f"unseen/{name}")
    torch.compiler.reset()
    with pytest.raises(Exception, match=OF_AUTOGRAD) as plain:
        runpy.run_path(program, run_name="__main__")
    torch.compiler.reset()
    monkeypatch.setattr("sys.argv", ["hodiff"])
    monkeypatch.setattr("sys.path", [*sys.path])
    status = main(["explain", program])
    said = capsys.readouterr()
    frames = [each for each in traceback.extract_tb(plain.value.__traceback__) if each.filename == program]
    assert status == 1
    assert said.out == ""
    assert re.findall(rf'File "{program}", line (\d+), in (\S+)\n', said.err) == [
        (str(each.lineno), each.name) for each in frames
    ]
    assert f"{type(plain.value).__name__}: {str(plain.value).splitlines()[0]}" in said.err
