"""What the sources say, read from their syntax trees: imports, dotted names, calls."""

import ast
from collections.abc import Iterator
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


def dotted_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each imported name used, aliases resolved: `ag.grad` -> `torch.autograd.grad`."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]  # `import a.b` binds a; `import a.b as c` binds a.b
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            aliases.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    yield from imports(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            parts = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id in aliases:
                yield node.lineno, ".".join([aliases[inner.id], *reversed(parts)])


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"
