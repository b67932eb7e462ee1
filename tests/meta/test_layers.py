"""Imports point downwards, and each engine of PyTorch has one place that calls it."""

import ast
from graphlib import TopologicalSorter

import pytest

from tests.meta import source
from tests.meta.source import dotted_names, imports, library_files, module_name, tree, where

FOUNDATION = ("errors", "_core")
FEATURES = ("curvature", "penalties", "fields", "sparse", "implicit")

# Which parts of the library a part may import, besides itself.
MAY_IMPORT = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "graph": ("errors", "_core._faults", "_core._nodes", "_core._why", "_core._lazy"),
    "jets": FOUNDATION,  # an engine below the calculus, which takes its high orders from it
    "calculus": (*FOUNDATION, "jets"),
    **dict.fromkeys(FEATURES, (*FOUNDATION, "calculus")),
    "fields": (*FOUNDATION, "calculus", "jets"),
    "rules": ("errors", "_core"),
    "implicit": (*FOUNDATION, "calculus", "curvature", "rules"),
    "plotting": ("errors", "curvature._records", "curvature._pictures"),
    "verify": None,  # None: the public functions, that is `hodiff` itself, and anything below
    "cli": None,
    "__main__": None,
    "": None,
}

# One of graph's modules computes, rather than looks. Another words the errors of the calculus: it registers itself
# with the foundation, which asks it without importing it.
MODULE_MAY_IMPORT = {
    "hodiff.graph._multi": (*FOUNDATION,),
    "hodiff.graph._failure": ("errors", "_core._nodes", "_core._why"),
    "hodiff.graph._missing": ("_core._nodes", "_core._translate"),  # the substitutes that the calculus names
}


def part(module: str) -> str:
    """The part of the library a module belongs to: `hodiff.calculus._first` -> `calculus`."""
    return ([*module.split("."), ""])[1]


def below(name: str, place: str) -> bool:
    """Whether a dotted name is that place, or lies in it."""
    return f"{name}.".startswith(f"{place}.")


LIBRARY = {module_name(path): path for path in library_files()}


def library_imports(path):
    for line, name in imports(path):
        if name.split(".")[0] == "hodiff":
            yield line, name


@pytest.mark.parametrize("module", LIBRARY)
def test_imports_point_downwards(module):
    path = LIBRARY[module]
    assert part(module) in MAY_IMPORT, f"{path.name}: which layer does it belong to? Add it to MAY_IMPORT"
    allowed = MODULE_MAY_IMPORT.get(module, MAY_IMPORT[part(module)])
    for line, name in library_imports(path):
        if allowed is not None and part(name) != part(module):
            assert any(below(name, f"hodiff.{place}") for place in allowed), (
                f"{where(path, line)}: {part(module)} may not import {name}"
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
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def allowed_top(module):
    """The top level collects the public names, and who uses only those may import it lazily."""
    return MAY_IMPORT[part(module)] is None


# Names that only some files, or the files of some folders, may use.
# The tour shows what the stock routes give; it computes nothing else with them.
ONLY_IN = {
    "torch.autograd.grad": (
        "_core._engine",
        "cli._tour",
        "graph._case",
    ),  # the last tells such calls apart, and makes none
    "torch.autograd.backward": ("graph._case",),
    "torch.vmap": ("_core._reverse",),
    "torch.func.vmap": ("_core._reverse",),
    # _nesting refuses points that have tangents, _versions loads it without its warning
    "torch.autograd.forward_ad": ("calculus._forward", "_core._nesting", "_core._versions"),
    "torch.func.jvp": ("calculus._forward", "cli._tour"),
    "torch.func.linearize": ("calculus._forward",),
    "torch.func.jacfwd": (),
    "torch.func.jacrev": ("cli._tour",),
    "torch.func.hessian": (),
    "torch.func.vjp": (),
    "torch.func.grad": ("penalties._compiled",),
    "torch.func.grad_and_value": ("penalties._compiled",),
    "torch.autograd.functional": (),
    "torch.autograd.graph": ("_core._nodes", "graph"),
    "torch.utils._pytree": ("_core._control_flow",),  # which stands in for operators that are made with it
    "torch.fx": ("curvature._compile",),
    "torch._inductor": ("curvature._compile",),
    "torch.jit.script": (),  # deprecated: the tests ignore the warning, because torch itself uses it
    "torch.jit.trace": (),
}
NODE_ATTRIBUTES = {"next_functions", "saved_tensors", "_sequence_nr", "_input_metadata"}


@pytest.mark.parametrize("module", LIBRARY)
def test_each_engine_has_its_callers(module):
    path = LIBRARY[module]
    short = module.removeprefix("hodiff").lstrip(".")
    for line, name in dotted_names(path):
        for banned, callers in ONLY_IN.items():
            if name == banned or name.startswith(banned + "."):
                assert any(below(short, caller) for caller in callers), (
                    f"{where(path, line)}: {name} belongs to {callers or 'nobody'}"
                )


@pytest.mark.parametrize("module", [m for m in LIBRARY if m != "hodiff._core._nodes" and part(m) != "graph"])
def test_only_nodes_and_graph_read_node_attributes(module):
    for node in ast.walk(tree(LIBRARY[module])):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "ctx"):
            private = node.attr.startswith(("_saved_", "_raw_saved_"))
            assert not private and node.attr not in NODE_ATTRIBUTES, (
                f"{where(LIBRARY[module], node.lineno)}: .{node.attr}"
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
