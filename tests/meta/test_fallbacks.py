"""Nothing is caught that was not meant: a fallback that hides its own failure looks like one that is never needed."""

import ast
from collections.abc import Iterator

from tests.meta.source import library_files, module_name, tree

# Classes of exceptions that mean one thing each.
NARROW = {
    "ByNoRoute", "Different", "GraphError", "HodiffError", "ImportError", "InputError", "NoRule", "StopIteration",
    "SyntaxError", "SystemExit", "TooMany", "CoefficientTooLarge", "_jet.NoRule", "hodiff.GraphError",
    "importlib.metadata.PackageNotFoundError", "torch.OutOfMemoryError",
}  # fmt: skip

GETTER = "one attribute or method of PyTorch, which raises where a node or a tensor has none"
SIGNATURE = "`inspect` has no signature of what is built in, or the arguments do not fit it"

# What catches more, does not raise it again, and does not ask `_core._faults` what it is: why it may.
STANDING = {
    ("_core._lending", "signature_error", "(TypeError, ValueError)"): SIGNATURE,
    ("_core._lending", "signature_error", "TypeError"): SIGNATURE,
    ("cli", "main", "OSError"): "a stream that takes no more: the reader of a pipe has read enough, or a full disk",
    ("cli", "flush", "suppress(OSError)"): "the same of the program's, which Python says at its end",
    ("memory._blocks", "Tangents.along", "RuntimeError"): "raised again, unless forward mode is what is missing",
    ("memory._blocks", "_leave_level", "suppress(RuntimeError)"): "none was entered: an interrupt came first",
    ("memory._blocks", "_captured", "suppress(ValueError)"): "a cell that is empty yet, as Python has it",
    ("_core._needed", "_is_there", "(AttributeError, ImportError)"): "a name that is missing, which is said",
    ("_core._locks", "_me", "RuntimeError"): "PyTorch's, of a thread that has kept nothing yet",
    ("_core._versions", "", "suppress(RuntimeError)"): "PyTorch's, of a key of which it has none by that name",
    ("_core._locks", "claim", "RuntimeError"): "the identity of a thread that has none yet",
    ("_core._graph", "OutputGraph._evaluate", "RuntimeError"): "raised again unless f is to run once more, otherwise",
    ("_core._tree", "memory_of", "(RuntimeError, NotImplementedError)"): GETTER,
    ("curvature._memory", "_storages", "suppress(NotImplementedError)"): GETTER,
    ("_core._versions", "prove.run", "Exception"): "in a thread of its own; each becomes an error",
    ("_core._versions", "_read", "(_Packed, RuntimeError)"): "kept, and raised by `unpack`",
    ("_core._versions", "received", "(RuntimeError, NotImplementedError)"): GETTER,
    ("_core._reverse", "unaliased", "(RuntimeError, NotImplementedError)"): GETTER,
    ("cli", "explain", "BaseException"): "the exception of the script that is run: it is the command's subject",
    (
        "curvature._data_operator",
        "GraphCache._shape",
        "(RuntimeError, TypeError, ValueError, LookupError, AttributeError)",
    ): "what the user's function raises for one row of a batch, or for two samples stacked: it does not take them",
    ("curvature._data", "_length", "TypeError"): "an iterable without a length",
    ("curvature._data", "check_signature", "(TypeError, ValueError)"): SIGNATURE,
    ("graph._names", "TensorNames._add", "(RuntimeError, ValueError)"): GETTER,
    ("graph._names", "_inside", "TypeError"): "an object without `__dict__`",
    ("graph._saved", "is_freed_like_others", "(RuntimeError, AttributeError)"): GETTER,
    ("graph._saved", "is_whole", "(RuntimeError, AttributeError)"): GETTER,
    ("graph._saved", "answers.run", "Exception"): "in a thread of its own, where no signal is handled",
    ("graph._saved", "_read_once", "RuntimeError"): GETTER,
    ("graph._saved", "_read_name", "AttributeError"): GETTER,
    ("graph._saved", "_read_name", "RuntimeError"): GETTER,
    ("graph._saved", "_packed", "(KeyError, ValueError)"): GETTER,
    ("graph._saved", "drop", "(RuntimeError, AttributeError)"): GETTER,
    ("graph._saved", "read", "(RuntimeError, AttributeError)"): GETTER,
    ("graph._saved", "state_of", "RuntimeError"): GETTER,
    ("graph._source", "parsed", "(SyntaxError, ValueError)"): "source that does not parse",
    ("graph._saved", "measure", "_WITHOUT_MEMORY"): GETTER,
    ("graph._saved", "storage", "_WITHOUT_MEMORY"): GETTER,
    ("graph._saved", "shape", "(AttributeError, IndexError, RuntimeError, TypeError, ValueError)"): GETTER,
    ("jets.rules.linear", "_batched", "RuntimeError"): "raised again where its text is not of a batching rule",
    ("sparse._pattern", "sorted_unique", "(ImportError, RuntimeError)"): "PyTorch without NumPy",
    ("steps", "CompiledStep._compiled", "Exception"): "what is behind an interrupt is raised; else said why, and eager",
    ("steps", "CompiledStep._compiled", "self._dynamo.SizesVary"): "our own: compiled once more, for one size",
    ("steps._dynamo", "unheld", "(exc.RecompileError, Held)"): "it names the guards; ours, in place of a run",
    ("verify", "_definition", "(OSError, TypeError, StopIteration)"): "a definition without source",
}


def caught() -> Iterator[tuple[tuple[str, str, str], bool]]:
    """Where exceptions are caught and go no further: module, function, classes; and whether `_faults` is asked."""
    for path in library_files():
        yield from _below(tree(path), module_name(path).removeprefix("hodiff."), "")


def _below(node: ast.AST, module: str, function: str) -> Iterator[tuple[tuple[str, str, str], bool]]:
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
        elif isinstance(child, ast.ExceptHandler) and not isinstance(child.body[-1], ast.Raise):
            kinds = ast.unparse(child.type) if child.type else "everything"
            yield (module, inner, kinds), "is_fault(" in ast.unparse(child) or "interrupts(" in ast.unparse(child)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("suppress"):
            yield (module, inner, f"suppress({', '.join(map(ast.unparse, child.args))})"), False
        yield from _below(child, module, inner)


def is_narrow(kinds: str) -> bool:
    return {kind.strip(" ()") for kind in kinds.removeprefix("suppress").split(",")} <= NARROW


def test_what_catches_more_than_it_means_says_why():
    found = {place for place, asked in caught() if not asked and not is_narrow(place[2])}
    assert not found - STANDING.keys(), "ask `_core._faults.is_fault`, name the condition, or give the reason here"
    assert not STANDING.keys() - found, "these are caught no longer"


def test_who_asks_what_a_failure_is():
    """Each has its row in tests/unit/core/test_faults.py, or is one of those that ask again or explain."""
    assert {place[:2] for place, asked in caught() if asked} == {
        ("_core._arguments", "is_set"),
        ("_core._reverse", "vjps"),
        ("_core._python_functions", "_Comparison.finding"),
        ("_core._messages", "_asked"),
        ("calculus._factors", "_Reading._pulled"),
        ("calculus._factors", "_Reading._attempt"),
        ("calculus._first", "tall_jacobian"),
        ("calculus._per_sample", "check_not_crossed"),
        ("calculus._per_sample", "_by_samples"),
        ("curvature._memory", "_number"),
        ("fields._expansions", "_by_samples"),
        ("graph._explain", "note"),
        ("jets._dispatch", "_run"),
        ("jets.rules.fallback", "_along"),
        ("sparse._tracer", "Tracer._decomposed"),
        ("steps", "CompiledStep._run"),
        ("steps._backends", "_by_inductor"),
        ("verify", "_held"),
        ("verify", "check_derivatives"),
        ("verify", "_first_wrong"),
    }


SOURCE = """
def f():
    try:
        g()
    except Exception:
        return None
    with contextlib.suppress(OSError):
        g()
"""


def test_a_new_one_is_seen():
    found = list(_below(ast.parse(SOURCE), "m", ""))
    assert found == [(("m", "f", "Exception"), False), (("m", "f", "suppress(OSError)"), False)]
