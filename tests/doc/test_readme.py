"""The README is short, reaches code early, and carries the two commands that CI runs."""

import re

from tests.doc.snippets import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_short_and_code_early():
    lines = README.splitlines()
    assert len(lines) <= 120
    start = lines.index("```python")
    end = lines.index("```", start)
    assert end + 1 <= 25
    assert end - start - 1 <= 8


def test_no_badges_and_no_version_numbers():
    assert "![" not in README
    assert not re.search(r"torch\s*[=<>]=", README)


def test_the_commands_are_complete_on_a_fresh_machine():
    for name in ("tour", "tests"):
        (command,) = re.findall(rf"<!-- {name} -->\n```bash\n(.*?)```", README, re.DOTALL)
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
        assert command.count("\n") == 1
    assert command.rstrip().endswith(".venv/bin/pytest")


def test_no_command_installs_without_the_pins():
    for path in [ROOT / "README.md", *(ROOT / ".ci").iterdir(), *(ROOT / "docs").rglob("*.md")]:
        for line in path.read_text("utf-8").splitlines():
            if re.search(r"\bpip install\b.*-e\b", line):
                assert re.search(r"-c \S*constraints\.txt", line), f"{path.name}: {line}"
