"""The size of the library, counted. A bound is what stands, and goes down with it; who raises one says why.

The aims: 124 modules, 22,900 statements, and 5,200 of them behind the five calls that most people come for.
"""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import hodiff
from tests.meta import source
from tests.meta.source import (
    PACKAGE,
    ROOT,
    imports,
    library_files,
    module_name,
    private_names,
    statements,
    tree,
    where,
)

# 135 before modules joined those that they were a part of; 5 are models that processes share
# the damped steps of least squares are a noun of their own; 1 is the table of other libraries' names
MODULES = 123
# Of strings that stand alone none is counted: a docstring costs nothing.
# Rows in factors came with 523 more, and least squares took the place of what they did by groups and products.
# The thin side came with 164: exact determinants, direct solutions and eigenpairs, of sums and several batches too.
# 38: PyTorch's private names, each as a name of ours in one place. 19: at 100 columns eight functions got longer than
# 45 lines, and gave parts of themselves a name.
# 39: an error where `f` waits for a thread that waits for `f`, one door for tangents in operators, logcumsumexp of
# entries far apart, padding in words.
# 562: models that processes share (their layout, blocks that gather, the protocol), of which 460 are a room of its own.
# 44: products of a Jacobian with its transpose by rows, rows of single samples, sums that cancel.
# 38: calls without shards cost what they did, a sum of rows is held against a pass between vectors, dependent rows are
# damped, the tensors of a traced call do not live as long as its graph, an interrupt at the border of a level of
# forward mode is not lost, a cell's name that goes on is told no line.
# 32: words for the names, keywords and positions of other libraries at every public name, from one table that took
# the place of three mechanisms; the types of plans and compiled steps (14 are overloads), annotations without quotes.
# 200: estimators on vectors that processes share (inner products that all have alike, random vectors and unit vectors
# by parts, passes that all agree about), copies of an entry that differ are refused.
# 6: the error of a diagonal whose squares have no place in its dtype, a step of nothing is refused.
# 11: matrices of a stack whose systems have converged are not read: a tenth of the time where few are hard.
# 37: operators compare buffers, frozen parameters and what functions close over by value; sums that signs do not
# cancel; a refusal that f catches; no collection while frames of other threads are read, where Python 3.11 may hang.
STATEMENTS = 22788
# What `grad`, `jacobian`, `hessian`, `hvp` and `laplacian` import.
# 3: a function that runs again finds no hooks of its own on the point.
MODULES_OF_FIVE_CALLS = 35
# 20: of those.
STATEMENTS_OF_FIVE_CALLS = 5119
ROOMS_OF_THEIR_OWN = ("steps", "memory", "curvature", "graph")
LONGEST_BODY = 45
IMPORTED_ONCE = 7
PRIVATE_NAMES = {
    "_core._versions": 56,
    "graph._saved": 5,
    "jets._series": 1,
    "memory._chunked": 6,
    "steps._backends": 14,
    "steps._dynamo": 8,
}
"""Names of PyTorch's that it may change without a word, by the module of ours that says them."""
RAISED = "is something said twice, or of no use any more? What is new and needed raises the bound, with its reason"

LIBRARY = {module_name(path): path for path in library_files()}


def test_the_number_of_modules() -> None:
    """A new file is a noun of the field; two join where the first line of the docstring needs no "and"."""
    assert len(LIBRARY) <= MODULES, f"{len(LIBRARY)} modules: {RAISED}"


def test_the_number_of_statements() -> None:
    """Statements, not lines: none is saved by packing, none is lost to wrapping."""
    number = sum(map(statements, LIBRARY.values()))
    assert number <= STATEMENTS, f"{number} statements: {RAISED}"


FIVE_CALLS = """
import json, sys, torch, hodiff

x = torch.linspace(0.1, 1, 6, dtype=torch.float64)
f = lambda x: x.sin().square().sum()
hodiff.grad(f, x), hodiff.jacobian(torch.sin, x), hodiff.hessian(f, x), hodiff.hvp(f, x, x)
hodiff.laplacian(lambda x: x.pow(3).sum(-1), x.view(2, 3))
print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "hodiff"]))
"""


@cache
def behind_five_calls() -> dict[str, int]:
    """The modules that a fresh process has imported after them, each with its statements."""
    program = [sys.executable, "-c", FIVE_CALLS]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return {name: statements(LIBRARY[name]) for name in json.loads(ran.stdout)}


def test_what_five_calls_import() -> None:
    """A reader of `hodiff.hvp`, and each start of a program, goes through all of these."""
    found = behind_five_calls()
    number = sum(found.values())
    said = f"{len(found)} modules of {number} statements: import what is new where it is called, or {RAISED}\n"
    assert len(found) <= MODULES_OF_FIVE_CALLS, f"{said}{found}"
    assert number <= STATEMENTS_OF_FIVE_CALLS, f"{said}{found}"
    early = {name for name in found if name.split(".")[1:2] in ([room] for room in ROOMS_OF_THEIR_OWN)}
    assert not early, f"they are for other calls, and loaded by those: {early}"


def test_the_private_names_of_pytorch() -> None:
    """Each may go with the next release; `_core._versions` proves those that it reads."""
    found = {short(module): sorted(private_names(path)) for module, path in LIBRARY.items()}
    more = {module: names for module, names in found.items() if len(names) > PRIVATE_NAMES.get(module, 0)}
    assert not more, (
        f"is there a public way, or a function of `_core._versions`? Else raise the row, saying why: {more}"
    )
    gone = [module for module in PRIVATE_NAMES if not found.get(module)]
    assert not gone, f"these say none any more: take their rows out of PRIVATE_NAMES: {gone}"


def short(module: str) -> str:
    return module.removeprefix("hodiff").lstrip(".")


def test_the_longest_function() -> None:
    """Lines of the body, its docstring left out."""
    for path in LIBRARY.values():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = node.end_lineno - body[0].lineno + 1 if body else 0
                assert lines <= LONGEST_BODY, (
                    f"{where(path, node.lineno)}: {node.name} has {lines} lines, of at most {LONGEST_BODY}: "
                    "give a part of it a name of its own"
                )


def test_modules_that_one_other_imports() -> None:
    """They may be a part of that other. Doors are not counted: packages, which collect, and the command line."""
    users = defaultdict(set)
    for module, path in LIBRARY.items():
        for _, name in imports(path):
            users[name if name in LIBRARY else name.rpartition(".")[0]].add(module)
    single = {module: (users[module] - {module}).pop() for module in LIBRARY if len(users[module] - {module}) == 1}
    inside = {module: user for module, user in single.items() if not is_door(user)}
    assert len(inside) <= IMPORTED_ONCE, f"could one of these be a part of what imports it? {inside}"


def is_door(module: str) -> bool:
    return LIBRARY[module].name == "__init__.py" or module.startswith("hodiff.cli")


def test_the_foundation_has_no_list_of_what_stands_on_it() -> None:
    """What is true of a public function is said where that is defined, as by `_compiled_callers.traced`."""
    upper = {name for name in hodiff.__all__ if defined_above(getattr(hodiff, name))}
    assert {"hvp", "laplacian", "LevenbergMarquardt"} <= upper and "InputError" not in upper
    for path in [*(PACKAGE / "_core").rglob("*.py"), PACKAGE / "errors.py"]:
        offered = [node.value for node in tree(path).body if ast.unparse(node).startswith("__all__ = ")]
        for node in ast.walk(tree(path)):
            keys = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            listed = set() if node in offered else upper & {key.value for key in keys if isinstance(key, ast.Constant)}
            assert len(listed) < 2, (
                f"{where(path, node.lineno)} lists {sorted(listed)}: mark each where it is defined instead"
            )


def defined_above(value: object) -> bool:
    return not getattr(value, "__module__", "").startswith(("hodiff._core", "hodiff.errors"))


SAYS = """
import sys
import torch
from torch._dynamo import config
from torch.func import vmap

_torch: Any = torch._C

class A:
    '''Of a class.'''

    size = 1
    '''Of an attribute.'''

    def f(self, node):
        "Of a method."
        frame = sys.modules["torch._dynamo.eval_frame"]
        return _torch._functorch.level(), frame._stance, node._saved_self, getattr(node, "_raw_saved_x")
"""
"""Ten statements, strings that stand alone, and private names in every form."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "src" / "hodiff"
    package.mkdir(parents=True)
    monkeypatch.setattr(source, "PACKAGE", package)
    (package / "a.py").write_text(SAYS, "utf-8")
    return package / "a.py"


def test_strings_that_stand_alone_are_no_statements(file: Path) -> None:
    assert statements(file) == 10


def test_private_names_are_seen_in_every_form(file: Path) -> None:
    assert private_names(file) == {
        "torch._dynamo.config",
        "torch._C._functorch.level",
        "torch._dynamo.eval_frame._stance",
        "_saved_self",
        "_raw_saved_x",
    }
