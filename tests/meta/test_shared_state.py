"""What can change in a module of ours, and why threads may share it."""

import ast
from collections.abc import Iterator

from tests.meta.source import library_files, module_name, tree

LOCKED, CLAIMED, OWN = "under _locks.lock", "claimed", "one for each thread"
GROWS = "only grows, one entry at a time; who misses one looks again"
CACHE = "functools keeps a result once it is whole, and the same again is as good"
IMPORT = "filled while its module is imported"
ONE_STEP = "changed in one step of the interpreter"
SAME = "worked out once from what does not change: whoever comes second finds the same"

DISCIPLINE = {
    "_core._locks.lock": "the lock",
    "_core._locks._changed": LOCKED,
    "_core._locks._claims": LOCKED,
    "_core._locks._waiting": LOCKED,
    "_core._locks._restored": IMPORT,
    "_core._locks.here": OWN,
    "_core._needed.check": CACHE,
    "_core._needed.lacks": CACHE,
    "_core._messages.warn_once": CACHE,
    "_core._versions.passing": OWN,
    "_core._versions._reading": "a lock, held for a read in C that runs no Python code",
    "steps.watch_wrappers": CACHE,
    "steps._wrappers": "a weak set, which only grows",
    "steps._dynamo.lock": "a lock, held while a step is compiled",
    "steps._dynamo._names": ONE_STEP,
    "steps._dynamo.inside": OWN,
    "_core._kernels.OURS": IMPORT,
    "_core._kernels.available": CACHE,
    "_core._kernels.registered": LOCKED,
    "_core._kernels.plain_attention": LOCKED,
    "_core._hooks._frames": LOCKED,
    "_core._hooks._hooked": CACHE,
    "_core._hooks._watchers": CACHE,
    "_core._hooks._repeats": LOCKED,
    "_core._hooks._within": GROWS,
    "_core._nodes.saved": ONE_STEP,
    "_core._python_functions._findings": GROWS,
    "_core._python_functions._places": GROWS,
    "_core._python_functions._thread": OWN,
    "_core._hooks.watch_checkpoints": LOCKED,
    "_core._hooks.watch_hooks": LOCKED,
    "_core._nodes.UNREMARKABLE": GROWS,
    "_core._hooks.watch_modules": LOCKED,
    "memory._blocks.watch_calls": LOCKED,
    "memory._blocks._met": OWN,
    "_core._nodes.HIDING": GROWS,
    "_core._modules._lent": CLAIMED,
    "_core._settings.absent": OWN,
    "_core._settings.opened": OWN,
    "_core._call.state": OWN,
    "_core._modules.WHOLE": GROWS,
    "_core._messages.BENDS": GROWS,
    "_core._values._looked": GROWS,
    "_core._messages.plain_name": CACHE,
    "_core._values.said": OWN,
    "_core._reverse._cleared": GROWS,
    "_core._reverse._without_functions": GROWS,
    "_core._settings._flagged": LOCKED,
    "_core._settings._lost": ONE_STEP,
    "_core._settings.eager": LOCKED,
    "_core._settings.no_cudnn": LOCKED,
    "_core._versions._RAW_SAVED": CACHE,
    "_core._versions.prove": CACHE,
    "_core._messages._state": OWN,
    **dict.fromkeys([f"_core._vectors.{name}" for name in ("_sizes", "dtype", "flat", "shapes", "size")], SAME),
    "calculus._factors.PROVED": GROWS,
    "curvature._process_group._made": LOCKED,
    "curvature._process_group._threads": LOCKED,
    "curvature._staleness._names": CACHE,
    "graph._growth._serial": ONE_STEP,
    "graph._record._serial": ONE_STEP,
    "graph._names._is_torchs": CACHE,
    "graph._saved._FREED": GROWS,
    "graph._saved.answers": CACHE,
    "graph._saved._LAYOUTS": GROWS,
    "graph._names.USERS": GROWS,
    "graph._source.parsed": CACHE,
    "graph._watch._recording": OWN,
    "graph._watch._told": LOCKED,
    "jets._dispatch._body": CACHE,
    "jets._series.inside": OWN,
    "sparse._tracer._open": OWN,
    "sparse._tracer._watched": LOCKED,
    "sparse._tracer.decompositions": CACHE,
}
"""Every module's state. (That of objects: see `GraphCache`, `LinearOperator._taken`, `LiveBytes`.)"""

_MADE = {"RLock", "Lock", "Condition", "Counted", "count", "deque", "defaultdict", "Counter", "ContextVar", "set",
         "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}  # fmt: skip


_CHANGE = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


def _state_of(module: ast.Module) -> Iterator[str]:
    kinds = [kind for kind in ast.walk(module) if isinstance(kind, ast.ClassDef)]
    bases = {kind.name: {ast.unparse(base).partition("[")[0] for base in kind.bases} for kind in kinds}
    local = {name for name in bases if bases[name] & {"threading.local", "dict"}}
    values: dict[str, ast.expr | None] = {}
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    for name, value in values.items():
        if _changes(value, name.lstrip("_").isupper() or name == "__all__", local):
            yield name
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names
        if isinstance(node, ast.FunctionDef):
            names = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
            if names & {"cache", "lru_cache", "cached_property"}:
                yield node.name
            yield from values.keys() & _changed_in(node)


def _changed_in(function: ast.FunctionDef) -> set[str]:
    """The names of containers that a function changes, whatever their spelling says."""
    return {
        ast.unparse(node.value).partition("[")[0]
        for node in ast.walk(function)
        if (isinstance(node, ast.Attribute) and node.attr in _CHANGE)
        or (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load))
    }


def _changes(value: ast.expr | None, constant: bool, local: set[str]) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set)):
        filled = bool(value.keys if isinstance(value, ast.Dict) else value.elts)
        return not (filled and constant)
    if isinstance(value, (ast.DictComp, ast.ListComp, ast.SetComp)):
        return not constant
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2]
    contents = value.args[name == "defaultdict" :]
    return name in local or (name in _MADE and not (constant and contents))


def test_all_that_can_change_has_a_discipline() -> None:
    found = {
        f"{module_name(path)}.{name}".removeprefix("hodiff.")
        for path in library_files()
        for name in _state_of(tree(path))
    }
    found = {
        name for name in found if not name.startswith(("graph._case.", "graph._unusable.", "graph._names.at"))
    }  # of one case, made and read in a call
    assert found == set(DISCIPLINE), "say in DISCIPLINE what keeps threads apart there"
