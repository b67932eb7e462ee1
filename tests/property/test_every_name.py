"""No public name that gives a derivative, a product, a field or an operator is without a property; and their table."""

import importlib
import inspect
import os
from pathlib import Path

import pytest

import hodiff
from tests.meta.source import ROOT
from tests.support.choice import EXAMPLES
from tests.support.laws import LAWS

HERE = Path(__file__).parent
TABLE = ROOT / "docs" / "generated" / "properties.md"

NO_DERIVATIVE = {
    "Selection": "names parameters",
    "interpolate": "draws points; `wgan_gp_penalty` is checked at them",
    "select": "names parameters",
}
AWAITED = {"nystrom", "spectral_density", "unroll"}
"""Names that are new and have none yet: a short list, for a short time."""

for file in sorted(HERE.glob("test_laws_of_*.py")):
    importlib.import_module(f"tests.property.{file.stem}")

NAMES = {
    name
    for name in hodiff.__all__
    if not inspect.ismodule(found := getattr(hodiff, name))
    and not (inspect.isclass(found) and issubclass(found, BaseException))
}
COVERED = {name for law in LAWS for name in law.names}


@pytest.mark.names
def test_every_name_has_a_property() -> None:
    missing = NAMES - COVERED - set(NO_DERIVATIVE) - AWAITED
    assert not missing, f"write a property for these, in tests/property/test_laws_of_*.py: {sorted(missing)}"
    assert not COVERED - NAMES, "these are no longer public"
    assert not AWAITED & COVERED, "these have one now"
    assert len(AWAITED) <= 5


def table() -> str:
    drawn = EXAMPLES["wide"]
    lines = [
        "# Properties",
        "",
        "| name | property | held against | examples drawn, in CI |",
        "|---|---|---|---|",
    ]
    for name in sorted(COVERED):
        for law in LAWS:
            if name in law.names:
                lines.append(f"| `{name}` | {law.says.replace('|', chr(92) + '|')} | {law.oracle} | {drawn} |")
    return "\n".join(lines) + "\n"


@pytest.mark.names
def test_published_table_is_fresh() -> None:
    if os.environ.get("HODIFF_WRITE_TABLES") == "1":
        TABLE.write_text(table(), encoding="utf-8")
    assert TABLE.read_text("utf-8") == table(), "stale: run with HODIFF_WRITE_TABLES=1 and look at the difference"
