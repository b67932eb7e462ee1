"""Imports point downwards, and each engine of PyTorch has one place that calls it."""

import ast
import re
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.meta import source
from tests.meta.source import dotted_names, imports, library_files, module_name, modules_in_strings, tree, where

FOUNDATION = ("errors", "_core")
FEATURES = ("curvature", "penalties", "fields", "sparse", "implicit")

# Which parts of the library a part may import, besides itself.
MAY_IMPORT = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "graph": (
        "errors",
        "_core._faults",
        "_core._nodes",
        "_core._settings",
        "_core._messages",
        "_core._needed",
        "_core._arguments",  # what a value is called
        "_core._compiled_callers",
    ),
    "memory": FOUNDATION,  # kernels that a function of the user's meets
    "jets": (*FOUNDATION, "memory"),  # an engine below the calculus, which takes its high orders from it
    "calculus": (*FOUNDATION, "memory", "jets"),
    **dict.fromkeys(FEATURES, (*FOUNDATION, "calculus")),
    "curvature": (*FOUNDATION, "memory", "calculus"),
    "sparse": (*FOUNDATION, "calculus", "curvature._staleness"),  # what a function reads besides its arguments
    "fields": (*FOUNDATION, "calculus", "jets"),
    "rules": ("errors", "_core"),
    "steps": FOUNDATION,
    "implicit": (*FOUNDATION, "calculus", "curvature", "rules"),
    # the models that processes share: blocks that gather, and the protocol of several processes
    "sharded": (*FOUNDATION, "memory", "curvature._process_group"),
    "plotting": ("errors", "curvature._records"),
    "verify": None,  # None: the public functions, that is `hodiff` itself, and anything below
    "cli": None,
    "__main__": None,
    "": None,
}

# One module of the calculus frees what it has used. One of graph's words the
# errors of the calculus: the foundation asks it by what `hodiff` has put there, without importing it.
# What stands for the public functions in a step's trace knows them.
MODULE_MAY_IMPORT = {
    "hodiff.steps._dynamo": None,
    "hodiff.calculus._multi": (*FOUNDATION, "memory", "graph._saved"),
    "hodiff.graph._failure": ("errors", "_core._nodes", "_core._settings", "_core._messages"),
}


def part(module: str) -> str:
    """The part of the library a module belongs to: `hodiff.calculus._first` -> `calculus`."""
    return ([*module.split("."), ""])[1]


def below(name: str, place: str) -> bool:
    """Whether a dotted name is that place, or lies in it."""
    return f"{name}.".startswith(f"{place}.")


LIBRARY = {module_name(path): path for path in library_files()}


def library_imports(path):
    """Line and name of what a file imports of the library, by a statement or by a string."""
    for line, name in (*imports(path), *modules_in_strings(path, LIBRARY)):
        if name.split(".")[0] == "hodiff":
            yield line, name


DOWNWARDS = (
    "move what both need below both, or let the upper one register itself with the lower one, "
    "as hodiff/__init__.py lets graph do with _core._messages.explainer"
)


def test_imports_point_downwards():
    for module, path in LIBRARY.items():
        assert part(module) in MAY_IMPORT, f"{path.name}: which layer does it belong to? Add it to MAY_IMPORT"
        allowed = MODULE_MAY_IMPORT.get(module, MAY_IMPORT[part(module)])
        for line, name in library_imports(path):
            if allowed is not None and part(name) != part(module):
                assert any(below(name, f"hodiff.{place}") for place in allowed), (
                    f"{where(path, line)}: {part(module)} may not import {name}, nor load it by its name: {DOWNWARDS}"
                )


def test_no_import_cycles():
    graph = {}
    for module, path in LIBRARY.items():
        if allowed_top(module):
            continue
        targets = set()
        for _, name in library_imports(path):
            parent = name.rpartition(".")[0]
            targets.add(name if name in LIBRARY else parent)
        graph[module] = targets - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{' <- '.join(error.args[1])} is a circle of imports: {DOWNWARDS}")


def allowed_top(module):
    """The top level collects the public names, and who uses only those may import it lazily."""
    return MAY_IMPORT[part(module)] is None


# Names that only some files, or the files of some folders, may use.
# The tour shows what the stock routes give; it computes nothing else with them.
ONLY_IN = {
    "torch.autograd.grad": (
        "_core._versions",
        "cli._tour",
        "graph._record",  # tells such calls apart, and makes none
        "steps",  # what it traces, and holds that against
    ),
    "torch.autograd.backward": ("graph._record",),
    "torch.vmap": ("_core._versions",),
    "torch.func.vmap": ("_core._reverse",),
    # _call refuses points that have tangents, _versions proves where a level begins
    "torch.autograd.forward_ad": ("calculus._first", "_core._call", "_core._versions", "memory._blocks"),
    "torch.func.jvp": ("calculus._first", "cli._tour"),
    "torch.func.linearize": ("calculus._first",),
    "torch.func.jacfwd": (),
    "torch.func.jacrev": ("cli._tour",),
    "torch.func.hessian": (),
    "torch.func.vjp": ("memory._chunked",),
    "torch.func.grad": ("cli._tour",),
    "torch.func.grad_and_value": ("penalties._gradient",),
    "torch.autograd.functional": (),
    # _hooks keeps what a call saves inside of a checkpoint
    "torch.autograd.graph": ("_core._hooks", "_core._nodes", "_core._versions", "graph"),
    # the first stands in for operators that are made with it; Dynamo follows it
    "torch.utils._pytree": ("_core._substitutes", "steps"),
    "torch.fx": ("steps",),
    "torch._inductor": ("steps._backends",),
    # Contexts that an interrupt leaves half done; `_settings` has what to use instead. The tour shows what users write.
    "torch.no_grad": ("cli._tour",),
    "torch.enable_grad": ("steps._dynamo",),  # which Dynamo follows, and nobody runs
    "torch.set_grad_enabled": ("_core._settings",),
    # a watch is told by its two methods who switched it on
    "torch.inference_mode": ("graph._watch",),
    "torch.autocast": (),
    "torch.compiler.set_stance": ("_core._settings",),
    "torch.autograd.forward_ad.dual_level": ("_core._versions",),
    "torch.jit.script": (),  # deprecated: the tests ignore the warning, because torch itself uses it
    "torch.jit.trace": (),
}
NODE_ATTRIBUTES = {"next_functions", "saved_tensors", "_sequence_nr"}


def test_each_engine_has_its_callers():
    for module, path in LIBRARY.items():
        short = module.removeprefix("hodiff").lstrip(".")
        for line, name in dotted_names(path):
            for banned, callers in ONLY_IN.items():
                if name == banned or name.startswith(banned + "."):
                    assert any(below(short, caller) for caller in callers), (
                        f"{where(path, line)}: {name} belongs to {callers or 'nobody'}: "
                        "call a function of these, or give this file its place in ONLY_IN, with the reason"
                    )


PROVED = "hodiff._core._versions"
"""Where what is private to PyTorch is read, once it is proved to be there."""


def test_only_nodes_and_graph_read_node_attributes():
    for module in (m for m in LIBRARY if part(m) != "graph" and m != PROVED):
        for node in ast.walk(tree(LIBRARY[module])):
            if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "ctx"):
                private = node.attr.startswith(("_saved_", "_raw_saved_")) or node.attr in (
                    "_input_metadata",
                    "_forward_cls",
                )
                here = node.attr in NODE_ATTRIBUTES and module != "hodiff._core._nodes"
                assert not private and not here, (
                    f"{where(LIBRARY[module], node.lineno)}: .{node.attr} is read by `_core._nodes` and graph alone, "
                    f"and by {PROVED}, which proves it: ask a function of theirs"
                )


# A name that may be missing, and what is done then, is right either way, or none of numbers.
MAY_BE_MISSING = {
    "_engine": "the public function instead",
    "_schema": "no operation of PyTorch's: every input may matter to every output",
    "_orig_mod": "a module like any other",
    "_fields": "Python's own, of a namedtuple",
    "__code__": "Python's own",
    "_execution_engine": "the public function instead",
    "_undo": "an attribute of ours",
}


def test_no_private_name_has_a_default():
    """`getattr(node, "_saved_x", False)` is silent where PyTorch calls it otherwise one day."""
    for module in (m for m in LIBRARY if part(m) not in ("graph", "cli", "verify")):
        for node in ast.walk(tree(LIBRARY[module])):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) == 3:
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                dunder = name.startswith("__") and name.endswith("__")
                assert dunder or not name.startswith("_") or name in MAY_BE_MISSING, (
                    f"{where(LIBRARY[module], node.lineno)}: {name} belongs to {PROVED}, which proves it"
                )


def test_classes_of_nodes_are_proved():
    """Their names are PyTorch's to change: each that is told by its name is made once, see `_versions.GRAPHS`."""
    for module in (m for m in LIBRARY if part(m) in ("_core", "curvature", "calculus", "implicit")):
        from hodiff._core import _versions
        from tests.support import releases

        known = {*_versions.GRAPHS, *releases.NOT_TRIED, *releases.LOOKED_AT}
        for node in ast.walk(tree(LIBRARY[module])):
            value = str(node.value) if isinstance(node, ast.Constant) else ""
            assert value in known or not re.fullmatch(r"[A-Z]\w*Backward\d+", value), (
                f"{where(LIBRARY[module], node.lineno)}: add a graph that has a {value} to `_versions.GRAPHS`"
            )


def test_aliases_are_seen_through(tmp_path, monkeypatch):
    package = tmp_path / "src" / "hodiff"
    package.mkdir(parents=True)
    file = package / "a.py"
    file.write_text(
        "import torch.autograd as ag\nfrom torch import vmap as v\nimport torch\nag.grad(1)\nv(2)\ntorch.func.jvp(3)\n"
    )
    monkeypatch.setattr(source, "PACKAGE", package)
    names = {name for _, name in source.dotted_names(file)}
    assert {"torch.autograd.grad", "torch.vmap", "torch.func.jvp"} <= names


def test_modules_in_strings_are_seen(tmp_path, monkeypatch):
    package = tmp_path / "src" / "hodiff"
    (package / "low").mkdir(parents=True)
    file = package / "low" / "_a.py"
    file.write_text(
        'import_module("hodiff.high._b")\nOURS = {"hodiff.high:call": "hodiff.high._b.call"}\n'
        'name.startswith("hodiff.low")\nraise E("hodiff.high is not loaded")\nx = "hodiff", "hodiff.hvp"\n'
    )
    monkeypatch.setattr(source, "PACKAGE", package)
    modules = {"hodiff", "hodiff.low", "hodiff.low._a", "hodiff.high", "hodiff.high._b"}
    found = set(modules_in_strings(file, modules))
    assert found == {(1, "hodiff.high._b"), (2, "hodiff.high"), (2, "hodiff.high._b")}
