"""explain() after the fact where programs really run: scripts, IPython, Jupyter, pytest, exec."""

import builtins
import multiprocessing.spawn
import re
import runpy
import sys
import textwrap

import pytest
import torch

from hodiff.graph import _source, explain

SETUP = "import torch, hodiff\na = torch.ones(2, requires_grad=True)\nt = torch.eye(2, requires_grad=True)"
LOOP = "for step in range(3):\n    loss = (t @ y).square().mean()\n    loss.backward()"
FEATURES = "loss = (features.sum() - 1) ** 2\nloss.backward()"
TOTAL = "total = total + (a**2).sum()\ntotal.backward()"
SESSIONS = {  # cells; the class, the nearest variable whose graph was freed, its line in the cell at hand
    "a loop in a cell of its own": ([SETUP, "y = t @ a", LOOP], "freed before", "y", None),
    "the same cell twice": (
        [SETUP, "loss = a.exp().sum()", "loss.backward()", "loss.backward()"],
        "freed before",
        "loss",
        None,
    ),
    "two losses in two cells": (
        [SETUP, "c = a.exp()\nd, e = c.mean(), c.sum()", "d.backward()", "e.backward()"],
        "freed before",
        "c",
        None,
    ),
    "a cell run again that uses another": (
        [SETUP, "features = (a * 2).tanh()", FEATURES, FEATURES],
        "freed before",
        "features",
        "In[4]:1",
    ),
    "a sum that goes on": ([SETUP, "total = 0", TOTAL, TOTAL], "freed before", "total", None),
    "cut in another cell": ([SETUP, "b = a.detach() * 2", "b.sum().backward()"], "no graph", "", None),
}


def strings(found):
    line = found.line("part")
    return found.cause, found.variable, None if line is None else str(line)


@pytest.fixture(scope="module")
def shell():
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    made = interactive.InteractiveShell.instance(display_page=False)
    yield made
    made.history_manager.end_session()
    interactive.InteractiveShell.clear_instance()


@pytest.fixture
def last_value(monkeypatch):
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
    monkeypatch.delattr(builtins, "_", raising=False)  # left by doctests; IPython takes it for a translation, and keeps


@pytest.mark.parametrize("name", SESSIONS)
def test_ipython(name, shell, last_value, capsys):
    cells, *right = SESSIONS[name]
    shell.reset(new_session=True)
    for cell in cells:
        shell.run_cell(cell, store_history=True)
    assert isinstance(sys.last_value, RuntimeError)
    shell.run_cell("print(hodiff.graph.explain())\nfound = hodiff.graph.explain()", store_history=True)
    found = shell.user_ns["found"]
    assert strings(found) == tuple(right)
    said = capsys.readouterr().out
    assert "nothing recorded: `hodiff explain SCRIPT`, or hodiff.graph.watch(), names the lines" in said
    assert f"failed       In[{len(cells)}]" in said
    assert not re.search(r"exit|Out\b|`_", said[said.index("hodiff: why") :])


def test_the_value_of_a_cell_is_shown_as_it_prints(shell, last_value, capsys):
    shell.reset(new_session=True)
    for cell in (SETUP, "y = a.exp().sum()\ny.backward()", "y.backward()"):
        shell.run_cell(cell, store_history=True)
    capsys.readouterr()
    shown = shell.run_cell("hodiff.graph.explain()", store_history=True).result
    assert capsys.readouterr().out.strip().endswith(str(shown).strip())
    assert shell.display_formatter.format([shown])[0]["text/plain"] == f"[{shown}]"


def test_ipython_tells_nothing_of_other_errors(shell, last_value, capsys):
    shell.reset(new_session=True)
    shell.run_cell("import hodiff", store_history=True)
    shell.run_cell("1 / 0", store_history=True)
    shell.run_cell("print(hodiff.graph.explain())", store_history=True)
    assert capsys.readouterr().out.endswith("None\n")


def test_a_watch_in_a_cell_names_cells(shell, last_value):
    shell.reset(new_session=True)
    shell.run_cell(SETUP, store_history=True)
    cell = "with hodiff.graph.watch():\n    y = a.exp().sum()\n    y.backward()\n    y.backward()"
    shell.run_cell(cell, store_history=True)
    (note,) = sys.last_value.__notes__
    assert re.search(r"made +In\[2\]:2 +y = a\.exp\(\)\.sum\(\)", note)
    assert re.search(r"freed by +In\[2\]:3 +y\.backward\(\)", note)


def test_the_number_of_a_cell(shell):
    shell.reset(new_session=True)
    shell.run_cell("z = 3", store_history=True)
    shell.run_cell("import sys\nfile = sys._getframe().f_code.co_filename", store_history=True)
    assert _source.cell_of(shell.user_ns["file"]) == 2 and _source.cell_of(__file__) == 0


def test_a_silent_cell_is_not_taken_for_another(shell, last_value):
    shell.reset(new_session=True)
    shell.run_cell(SETUP, store_history=True)
    shell.run_cell("y = a.exp().sum()\ny.backward()", store_history=True)
    shell.run_cell("y.backward()", store_history=False)  # has the number of the next, which is another
    found = explain(sys.last_value)
    assert found is None or found.line("freed by") is None or found.variable == "y"


def test_a_process_can_be_started_beside_a_shell(shell):
    assert multiprocessing.spawn.get_preparation_data("a name")["name"] == "a name"  # asks for `__main__.__spec__`


@pytest.mark.wide
def test_jupyter():
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    sources = [
        SETUP,
        "y = t @ a",
        LOOP,
        "print(hodiff.graph.explain())",
        "hodiff.graph.inspect(a.exp())",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=120, allow_errors=True, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[2][0].ename == "RuntimeError"
    said = outputs[3][0].text
    assert re.search(r"part +`y`: MvBackward0", said)
    assert "ipykernel" not in said
    assert "<table" in outputs[4][0].data["text/html"]


# --- where there is no shell ------------------------------------------------------------------------------------------


def test_pytest():
    y = torch.ones(2, requires_grad=True).exp()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="a second time") as caught:
        y.mean().backward()
    found = explain(caught.value)
    assert (found.cause, found.variable) == ("freed before", "y")
    assert found.line("part").text.startswith("y = torch.ones(2")
    assert found.line("failed").text == "y.mean().backward()"


SCRIPT = """
import torch

a = torch.ones(2, requires_grad=True)
y = a.exp()
d = y.mean()
d.backward()
e = y.sum()
e.backward()
"""


def test_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, "utf-8")
    with pytest.raises(RuntimeError, match="a second time") as caught:
        runpy.run_path(str(script))
    assert strings(explain(caught.value)) == ("freed before", "y", "script.py:5")


def test_exec_has_no_source_and_gets_names_alone():
    with pytest.raises(RuntimeError, match="a second time") as caught:
        exec(SCRIPT, {})
    assert strings(explain(caught.value)) == ("freed before", "y", None)


def test_exec_of_kept_source(monkeypatch):
    import linecache

    lines = textwrap.dedent(SCRIPT).splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<kept>", (len(SCRIPT), None, lines, "<kept>"))
    with pytest.raises(RuntimeError, match="a second time") as caught:
        exec(compile(SCRIPT, "<kept>", "exec"), {})
    assert strings(explain(caught.value)) == ("freed before", "y", "<kept>:5")
