"""What the sources say, read from their syntax trees: imports, dotted names, calls."""

import ast
import re
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hodiff"


def library_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that the file imports, at any depth."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def modules_in_strings(path: Path, modules: Container[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each of these modules that the file names in a string, as `import_module` takes it.

    The packages that the file lies in are left out: Python has loaded them before it.
    """
    here = module_name(path)
    for node in ast.walk(tree(path)):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        name = text.partition(":")[0]  # `module:attribute`, as an entry point is written
        parent = name.rpartition(".")[0]
        found = name if name in modules else parent
        if found in modules and not f"{here}.".startswith(f"{found}."):
            yield node.lineno, found


def statements(path: Path) -> int:
    """How many there are in a file; a docstring, or any other string that stands alone, is none."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(tree(path)))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def dotted_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each imported name used, aliases resolved: `ag.grad` -> `torch.autograd.grad`."""
    aliases = _aliases(path)
    yield from imports(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            first, *rest = _chain(node) or [""]
            if first in aliases:
                yield node.lineno, ".".join([aliases[first], *rest])


def _aliases(path: Path) -> dict[str, str]:
    """What each imported name stands for."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]  # `import a.b` binds a; `import a.b as c` binds a.b
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return aliases


def _chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; none where it begins with anything but a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


SAVED = re.compile(r"_(raw_)?saved_\w*")
"""What the nodes of a graph call the values that they keep."""


def private_names(path: Path) -> set[str]:
    """The private names of PyTorch in a file: imported, used, or written in a string; the longest of each.

    What a variable holds is followed: after `_torch = torch._C`, `_torch.x` is `torch._C.x`.
    """
    names, held = {name for _, name in dotted_names(path)}, _held(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute):
            first, *rest = _chain(node) or [""]
            names.update(".".join([value, *rest]) for value in held.get(first, ()))
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    private = {name for name in names if SAVED.fullmatch(name) or _is_private_to_torch(name)}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def _is_private_to_torch(name: str) -> bool:
    first, *parts = name.split(".")
    dotted = first == "torch" and all(part.isidentifier() for part in parts)
    return dotted and any(part.startswith("_") and not part.endswith("__") for part in parts)


def _held(path: Path) -> dict[str, set[str]]:
    """What of PyTorch each variable holds: `x = torch._C`, or `x = sys.modules["torch._C"]`."""
    aliases = _aliases(path)
    held: dict[str, set[str]] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            if isinstance(node.value, ast.Subscript) and ast.unparse(node.value.value) == "sys.modules":
                values = {str(getattr(node.value.slice, "value", ""))}
            else:
                first, *rest = _chain(node.value) or [""]
                starts = held.get(first, {aliases.get(first, "")})
                values = {".".join([start, *rest]) for start in starts}
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    held.setdefault(target.id, set()).update(v for v in values if f"{v}.".startswith("torch."))
    return held


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
