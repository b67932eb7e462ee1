"""The public names are the exported ones, each is documented, and each documentation says what it must."""

import importlib
import inspect
import re

import pytest

import hodiff
from tests.meta.source import ROOT

pytestmark = pytest.mark.names

ENTRY = re.compile(r"^::: (\S+)$", re.MULTILINE)
ENTRIES = [
    entry for page in sorted((ROOT / "docs").rglob("*.md")) for entry in ENTRY.findall(page.read_text(encoding="utf-8"))
]
CALLABLES = [name for name in hodiff.__all__ if inspect.isfunction(getattr(hodiff, name))]


def test_all_is_sorted_and_real():
    assert list(hodiff.__all__) == sorted(set(hodiff.__all__))
    members = {name for name, value in vars(hodiff).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert members <= set(hodiff.__all__), "imported at the top level but not exported"
    for name in hodiff.__all__:
        assert hasattr(hodiff, name), f"{name} is exported but not there"


def test_each_public_name_has_an_entry_in_the_reference():
    missing = [name for name in hodiff.__all__ if f"hodiff.{name}" not in ENTRIES and not is_module(name)]
    assert not missing, "add `::: hodiff.<name>` to the page of docs/api that these belong to"


def test_each_entry_of_the_reference_exists():
    assert len(ENTRIES) == len(set(ENTRIES)), "a name is documented twice"
    for entry in ENTRIES:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry


def test_docstring_has_an_example():
    for name in hodiff.__all__:
        if not is_module(name):
            assert re.search(r"^ *Examples?:", documentation(name), re.MULTILINE), (
                f"hodiff.{name} has no Example section"
            )


def test_docstring_states_shapes_and_cost():
    for name in CALLABLES:
        text = documentation(name)
        assert re.search(r"\b[Cc]ost\b", text), f"hodiff.{name} does not state its cost"
        assert re.search(r"\b[Ss]hape", text) or name == "select", f"hodiff.{name} does not state its shapes"


def test_every_argument_is_annotated():
    for name in CALLABLES:
        signature = inspect.signature(getattr(hodiff, name))
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"hodiff.{name}: {parameter.name}"
            # help() and the reference show this signature, not the overloads
            assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, f"hodiff.{name}: spell out **{parameter.name}"


def test_names_follow_the_grammar():
    suffixes = re.compile(r"_(batched|vectorized|fwd|rev|v2|fn|func|matrix|with_aux)$")
    assert not [name for name in hodiff.__all__ if suffixes.search(name)]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "src" / "hodiff" / "py.typed").is_file()


def documentation(name: str) -> str:
    return inspect.getdoc(getattr(hodiff, name)) or ""


def is_module(name: str) -> bool:
    return inspect.ismodule(getattr(hodiff, name, None))


def test_the_tree_of_errors_and_warnings():
    assert issubclass(hodiff.InputError, ValueError) and issubclass(hodiff.InputError, hodiff.HodiffError)
    assert issubclass(hodiff.GraphError, RuntimeError) and issubclass(hodiff.GraphError, hodiff.HodiffError)
    assert issubclass(hodiff.DerivativeError, AssertionError) and issubclass(hodiff.DerivativeError, hodiff.HodiffError)
    assert issubclass(hodiff.HodiffWarning, UserWarning)
    assert issubclass(hodiff.CustomFunctionWarning, hodiff.HodiffWarning)
    assert issubclass(hodiff.BatchMixingWarning, hodiff.HodiffWarning)
