"""Each program here is explained as is expected beside it: in the small ones, and in those after public reports.

What is said is right, and no printed fix, done as it says, trains anything else.
"""

import functools
import linecache
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
from hodiff.graph import _causes, explain, watch
from hodiff.graph._names import TensorNames
from tests.programs import OF_AUTOGRAD
from tests.programs.expectation import AS_PRINTED, KEPT, RIGHT
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


def test_every_cause_has_a_program():
    missing = {cause.name for cause in _causes.CAUSES} - {case.cause for case in FAILING.values()}
    assert not missing, "write a program that fails so, and say in FAILING what must be said of it"


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
    assert "(likely" not in note
    assert f"`{want.variable}`" in note
    for label, line in (("created at|cut at|changed at", want.created), ("freed by", want.freed)):
        if line:
            assert re.search(rf"(?:{label}) +{name}\.py:\d+ +{re.escape(line)}", note), note
    advice = note[note.index("=>") :]
    assert want.fix in advice
    assert not want.never or want.never not in advice


@pytest.mark.parametrize("name", explainable(FAILING))
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
LEFT_OVER = ("unseen/imitation_steps_twice",)
"""Where the critic keeps a gradient that the next `zero_grad()` clears: the values are compared alone."""

SENTENCES = {
    "carried": ("state from a previous step",),
    "cached": ("keeps it;", "functools keeps"),
    "cached parameters": ("keeps the computed parameters",),
    "stored": ("an earlier step put it into",),
    "hoisted": ("was built once, outside the loop",),
    "two losses": ("both losses depend on it",),
    "same loss twice": ("the same loss is differentiated twice",),
    "stepped": ("was changed in place, after",),
    "changed in place": ("was changed in place, after",),
    "refused in place": ("a leaf that requires grad cannot be changed", "one of several views"),
    "hook": ("a full backward hook",),
    "copied": ("a tensor with a graph cannot be copied",),
    "inference tensor": ("made under inference_mode",),
    "discrete": ("gives integers or booleans",),
    "detached": ("it was detached there",),
    "no_grad": ("gradients were switched off (no_grad",),
    "no graph": ("it was not tracked when the loss was computed",),
    "made a constant": ("turned into a number, a NumPy array or another constant",),
    "constant": ("nothing that it was computed from requires grad",),
    "function": ("inside the forward of an autograd.Function", "in a hook, or in a Function's backward"),
    "no create_graph": ("a gradient that was taken without create_graph=True",),
    "linear": ("the gradient of a function that is linear",),
    "checkpoint": ("a re-entrant checkpoint",),
    "recomputed": ("the checkpoint ran its function again",),
    "unpacked twice": ("something read one twice",),
    "read freed": ("freed what it had saved",),
    "not used": ("the loss was computed without it",),
    "no second derivative": ("can differentiate it only once",),
}
"""The sentence that says a cause."""


def source(name):
    return Path(path(name)).read_text("utf-8")


def patched(text, patch):
    for old, new in patch:
        assert old in text, old
        text = text.replace(old, new)
    return text


def written(text, fix):
    """A fix that says which statements to write after or before which line, done."""
    place, number = re.match(r"(after|change a copy: before) \w+\.py:(\d+) ", fix).groups()
    statements = re.findall(r"^ {4}(\S.*)$", fix, re.MULTILINE)
    lines = text.split("\n")
    index = int(number) - 1
    indent = re.match(r"\s*", lines[index]).group()
    at = index + 1 if place == "after" else index
    return "\n".join([*lines[:at], *[indent + statement for statement in statements], *lines[at:]])


def run(path, text):
    """The trainable leaves that a program leaves behind, by name, with their values and gradients."""
    torch.compiler.reset()
    path.write_text(text, "utf-8")
    linecache.checkcache(str(path))
    left = runpy.run_path(str(path), run_name="__main__")
    names = TensorNames(roots={name: value for name, value in left.items() if not name.startswith("_")})
    found = {}
    for tensor in names.all:
        if tensor.is_leaf and tensor.requires_grad:
            grad = None if tensor.grad is None else tensor.grad.clone()
            found[names.of(tensor)] = (tensor.detach().clone(), grad)
    return found


def same(got, right):
    assert got.keys() >= right.keys()
    for name, (value, grad) in right.items():
        torch.testing.assert_close(got[name][0], value, msg=f"{name} differs")
        assert (got[name][1] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(got[name][1], grad, msg=f"{name}.grad differs")


def is_same(got, right):
    try:
        same(got, right)
    except AssertionError:
        return False
    return True


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


def fixes(note):
    """The printed fixes, each with its further lines."""
    found = re.findall(r"^    fix \d+: (.*(?:\n {11}.*)*)", note, re.MULTILINE)
    return [re.sub(r"\n {11}", "\n", each) for each in found]


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
    assert any(sentence in note for sentence in SENTENCES[want.cause]), note
    assert any(variable in note for variable in want.variables), note
    foretold = name.startswith("unseen/")  # before it was known which part of a statement is shown, and under what
    places = r"\S.*? " if foretold else "(?:created at|cut at|changed at|at|recorded at) +"
    shown = re.findall(rf"^ +{places}{Path(name).name}\.py:\d+   (.*)$", note, re.MULTILINE)
    found = any(line in text or (foretold and text in line) for line in want.lines for text in shown)
    assert found or not want.lines, note
    assert len(fixes(note)) == len(want.fixes), note


@quiet
@pytest.mark.parametrize("name", explainable([n for n in FAILED if n.startswith("reports/") or AFTER_REPORTS[n].fixes]))
def test_no_fix_trains_anything_else(name, tmp_path):
    want, text, place = AFTER_REPORTS[name], source(name), tmp_path / f"{Path(name).name}.py"
    rights = [run(place, patched(text, right)) for right in want.rights]
    assert all(rights)
    for fix, patch in zip(fixes(explained(name)), want.fixes, strict=True):
        if patch in (KEPT, RIGHT):  # the right program is that fix, done
            continue
        got, those = run(place, written(text, fix) if patch == AS_PRINTED else patched(text, patch)), rights
        if name in LEFT_OVER:
            got, *those = ({key: (value, None) for key, (value, _) in each.items()} for each in (got, *rights))
        if len(those) == 1:
            same(got, those[0])
        assert any(is_same(got, right) for right in those), fix
    for patch in want.answers:
        same(run(place, patched(text, patch)), rights[0])


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
