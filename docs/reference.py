"""The pages of the reference: of each group a table, made from the docstrings, and pages of its functions, those together that are read together.

A group is one file below `docs/api`, with an entry `::: name` for each function.
What a build shows of it is its prose and its table; `split` gives the entries to pages of their own.
"""

import importlib
import inspect
import posixpath
import re
from pathlib import Path

_ENTRY = re.compile(r"^::: (\S+)$|^## (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^::: (?P<name>\S+)\n(?:    .*\n)*\n?", re.MULTILINE)
_EMPTY = re.compile(r"^##+ .+\n+(?=## |\Z)", re.MULTILINE)
_TOGETHER = (  # what stands on one page, whose name is that of the first
    "grad value_and_grad",
    "jacobian jvp vjp",
    "per_sample_grad gram",
    "hessian value_grad_and_hessian hessian_diagonal cross_hessian",
    "hvp cross_hvp",
    "nth_derivative derivatives",
    "gradient_penalty interpolate sample_norm",
    "wgan_gp_penalty dragan_penalty r1_penalty r2_penalty",
    "PathLengthPenalty hessian_penalty",
    "eikonal_penalty sliced_score_matching_loss",
    "jacobian_penalty curvature_penalty gradient_norm_penalty",
    "LinearOperator JacobianOperator MatrixOperator",
    "GaussNewtonOperator FisherOperator",
    "trace diagonal",
    "eigsh spectral_density convergence",
    "logdet TraceRecord DiagonalRecord EigenRecord DensityRecord SolveRecord",
    "solve nystrom",
    "LevenbergMarquardt LeastSquaresRecord",
    "root fixed_point",
    "Rule SGD Adam AdamW",
    "inspect predict shared release monitor",
    "watch explain lifetime multi_grad",
    "Graph NodeRecord Saved Leaf Prediction Finding Shared Explanation Watch Lifetime Released "
    "Monitor Step",
    "laplacian value_grad_and_laplacian second_order_operator biharmonic",
    "divergence value_and_divergence curl",
    "partial partials derivatives_of jet report Report Estimate Partials",
    "sparse_hessian sparse_jacobian",
    "plan_hessian plan_jacobian Plan",
    "sparsity_pattern color Pattern",
)
_PAGES = {name: line.split()[0] for line in _TOGETHER for name in line.split()}
_NAMED = {"Rule": "rules", "Graph": "records"}  # a page that no function gives a name
_WHOLE = ("errors", "memory", "steps", "verify", "where")  # groups of one page


def summary(page: str) -> str:
    """A table of a page's entries: the name, its first line, what it costs if any costs; a row for each heading."""
    rows = [["name", "what it is", "cost"], ["---"] * 3]
    heading, costs = "", []
    text = Path(page).read_text("utf-8")
    own = split(page.removeprefix("docs/"), text)[1]
    for entry, title in _ENTRY.findall(text):
        if title:
            heading = title
            continue
        if heading:
            rows.append([f"**{heading}**", "", ""])
            heading = ""
        module, _, name = entry.rpartition(".")
        document = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
        first = document.partition("\n\n")[0]
        (folder,) = [
            f"{Path(each).stem}/"
            for each, shown in own.items()
            if f"::: {entry}\n" in shown
        ] or [""]
        costs.append(_cell(_cost(document)))
        rows.append([f"[`{name}`]({folder}#{entry})", _cell(first), costs[-1]])
    columns = 3 if any(costs) else 2
    table = "\n".join(f"| {' | '.join(row[:columns])} |" for row in rows)
    return f'<div class="summary" markdown>\n\n{table}\n\n</div>'


def split(page: str, text: str) -> tuple[str, dict[str, str]]:
    """What is left of a group's page such as `api/fields.md`, and the pages of its functions."""
    group = Path(page).stem
    if Path(page).parent.name != "api" or group in _WHOLE:
        return text, {}
    title = text.partition("\n")[0].removeprefix("# ")
    pages: dict[str, list[str]] = {}
    for found in _BLOCK.finditer(text):
        name = found["name"].rpartition(".")[2]
        first = _PAGES.get(name, name)
        pages.setdefault(_NAMED.get(first, first), []).append(found[0])
    below = (
        f"\n[{title}](../{group}.md) lists the functions of this group and the keywords that they "
        "share.\n"
    )
    written = {
        posixpath.join("api", group, f"{name}.md"): _page(name, title, parts) + below
        for name, parts in pages.items()
    }
    return _EMPTY.sub("", _BLOCK.sub("", text)), written


def _page(name: str, group: str, parts: list[str]) -> str:
    if len(parts) == 1:
        head, _, options = parts[0].strip().partition("\n    options: {")
        return f"{head}\n    options: {{heading_level: 1{', ' + options if options else '}'}\n"
    names = [part.split()[1].rpartition(".")[2] for part in parts]
    title = f"{group}: {name}" if name in _NAMED.values() else ", ".join(names)
    return f"# {title}\n\n" + "\n".join(map(_second_level, parts))


def _second_level(part: str) -> str:
    """An entry below the title of its page."""
    head, _, options = part.strip().partition("\n    options: {")
    return (
        f"{head}\n    options: {{heading_level: 2{', ' + options if options else '}'}\n"
    )


def _cost(document: str) -> str:
    """The first sentence of the section Cost."""
    section = re.search(r"^Cost:\n((?:    .*\n?|\n)+)", document, re.MULTILINE)
    if section is None:
        return ""
    return re.split(r"[.;]\s", " ".join(section[1].split()) + " ")[0]


def _cell(text: str) -> str:
    """The text in a table, where a bar ends a cell: in a formula it is a command, elsewhere it is escaped."""
    parts = re.split(r"(\\\(.*?\\\))", " ".join(text.split()))
    formulas = [
        part.replace("|", r"\vert ").replace(r"\\vert ", r"\Vert ")
        for part in parts[1::2]
    ]
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    parts[1::2] = formulas
    return "".join(parts)
