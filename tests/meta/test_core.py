"""The core's contract: each of its modules lists in `__all__` what other rooms may use, and they use nothing else."""

import ast
import re
from collections import defaultdict
from functools import cache

import pytest

from tests.meta.source import PACKAGE, ROOT, dotted_names, library_files, module_name, tree, where

CORE = {module_name(path): path for path in sorted((PACKAGE / "_core").glob("_*.py")) if path.stem != "__init__"}
NAMES = 200
OF_SEVERAL_ROOMS = 120


def room(module: str) -> str:
    return ([*module.split("."), ""])[1]


@cache
def used_by_rooms() -> dict[str, dict[str, dict[str, str]]]:
    """By module of the core: the names that others use of it, and by room where one does."""
    used: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for path in library_files():
        user = room(module_name(path))
        for line, name in dotted_names(path) if user != "_core" else ():
            module = ".".join(name.split(".")[:3])
            if module in CORE and name != module:
                used[module][name.split(".")[3]].setdefault(user, where(path, line))
    return used


def listed(module: str) -> list[str]:
    """The `__all__` of a module; empty where it has none."""
    for node in tree(CORE[module]).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined(module: str) -> set[str]:
    """The names that a module itself defines: no import is one."""
    names: set[str] = set()
    for node in ast.walk(tree(CORE[module])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("module", CORE)
def test_rooms_use_what_a_module_of_the_core_offers(module):
    offered, used = set(listed(module)), used_by_rooms().get(module, {})
    beyond = {name: places for name, places in used.items() if name not in offered}
    assert not beyond, f"put it into __all__ of {module}, with its docstring, or ask for less: {beyond}"
    assert offered <= {*used}, f"no room uses these of {module}: take them out of __all__: {offered - {*used}}"


@pytest.mark.parametrize("module", CORE)
def test_no_module_of_the_core_passes_on_what_another_defines(module):
    passed_on = set(listed(module)) - defined(module)
    assert not passed_on, f"take {passed_on} from the module that defines it, not through {module}"


def test_the_contract_is_small():
    names = [(module, name) for module in CORE for name in listed(module)]
    several = [(module, name) for module, name in names if len(used_by_rooms()[module][name]) > 1]
    assert len(names) <= NAMES, f"{len(names)} names: could one of these be a part of what one room has?"
    assert len(several) <= OF_SEVERAL_ROOMS


def rows_of_the_map() -> dict[str, tuple[list[str], str]]:
    """By module: the names and the rooms that the map gives it."""
    text = (ROOT / "docs/explain/map.md").read_text("utf-8")
    found = re.findall(r"^\| [^|]+ \| `_core/(_\w+)\.py` \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return {
        f"hodiff._core.{module}": (sorted(re.findall(r"`([^`]+)`", names)), rooms) for module, names, rooms in found
    }


def test_the_map_has_the_contract():
    """By task, with the rooms that use it."""
    expected = {}
    for module in CORE:
        rooms = sorted({user or "top" for by_room in used_by_rooms().get(module, {}).values() for user in by_room})
        if listed(module):
            expected[module] = sorted(listed(module)), ", ".join(rooms)
    assert rows_of_the_map() == expected, "docs/explain/map.md, 'The contract of the core'"
