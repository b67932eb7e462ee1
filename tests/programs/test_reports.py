"""Programs after public reports: what is said is right, and no printed fix, done as it says, trains anything else."""

import functools
import linecache
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hodiff._core._versions import RELEASE
from hodiff.graph import watch
from hodiff.graph._names import TensorNames
from tests.programs import OF_AUTOGRAD
from tests.programs.reported import AS_PRINTED, KEPT, REPORTS
from tests.support.releases import CHANGES, marked

HERE = Path(__file__).parent / "reports"
FAILING = [name for name in REPORTS if name != "distances_twice" or RELEASE < (2, 14)]
"""All of them; but for one, whose missing derivative PyTorch 2.14 has."""
CHANGED = (
    "memory_state_retained",
    "neurons_trained_online",
    "graph_memory",
    "gan_discriminator_steps_first",
    "factor_vae",
    "maddpg_critic_first",
    "sac_policy_after_critics",
    "residual_added_in_place",
    "gate_then_inplace_relu",
    "dehazing_losses_together",
)
"""What is said of these names the tensor that was changed in place, or the line that changed it."""

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own, on what the reports do


def source(name):
    return (HERE / f"{name}.py").read_text("utf-8")


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


@functools.cache
def explained(name):
    if "torch.compile(" in source(name):  # what was compiled, and how, in this process before, would matter
        command = [sys.executable, "-m", "hodiff", "explain", str(HERE / f"{name}.py")]
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240).stderr
        return said[said.index("hodiff: why") :]
    with watch(), pytest.raises(Exception, match=OF_AUTOGRAD) as caught:
        runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")
    return "\n".join(note for note in getattr(caught.value, "__notes__", ()) if note.startswith("hodiff: why"))


def fixes(note):
    """The printed fixes, each with its further lines."""
    found = re.findall(r"^    fix \d+: (.*(?:\n {11}.*)*)", note, re.MULTILINE)
    return [re.sub(r"\n {11}", "\n", each) for each in found]


def test_every_report_has_its_row_and_its_address():
    assert {path.stem for path in HERE.glob("*.py")} - {"__init__"} == set(REPORTS)
    addresses = {
        re.search(r"After https://github\.com/\S+/(?:issues|pull)/\d+\n", source(name)).group() for name in REPORTS
    }
    assert len(addresses) == len(REPORTS) >= 40


@pytest.mark.parametrize("name", marked(FAILING, CHANGES, CHANGED))
def test_what_is_said(name):
    want, note = REPORTS[name], explained(name)
    assert note
    assert want.variable in note
    shown = re.findall(
        rf"^ +(?:created at|cut at|changed at|at|recorded at) +{name}\.py:\d+   (.*)$", note, re.MULTILINE
    )
    assert not want.line or any(want.line in line for line in shown), note
    assert len(fixes(note)) == len(want.fixes), note


@pytest.mark.parametrize("name", marked(FAILING, CHANGES, CHANGED))
def test_no_fix_trains_anything_else(name, tmp_path):
    want, path = REPORTS[name], tmp_path / f"{name}.py"
    right = run(path, patched(source(name), want.right))
    assert right
    for fix, patch in zip(fixes(explained(name)), want.fixes, strict=True):
        if patch != KEPT:
            same(run(path, written(source(name), fix) if patch == AS_PRINTED else patched(source(name), patch)), right)
    for patch in want.answers:
        same(run(path, patched(source(name), patch)), right)
