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
    assert README.count("<img ") == 1  # the logo
    assert not re.search(r"torch\s*[=<>]=", README)


def test_its_addresses_work_where_the_package_is_published():
    """An index of packages shows this file alone: a relative address leads nowhere there."""
    addresses = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", README)
    assert addresses
    site, source = "https://hodiff.github.io/hodiff/", "https://github.com/hodiff/hodiff/blob/main/"
    elsewhere = ("https://doi.org/", "https://arxiv.org/abs/", "https://github.com/hodiff/hodiff/issues")
    for address in ("".join(pair) for pair in addresses if not "".join(pair).startswith(elsewhere)):
        assert address.startswith((site, source)), address
        inside = address.removeprefix(site).removeprefix(source)
        if address.startswith(source):
            assert (ROOT / inside).is_file(), address
        elif inside.startswith("assets/"):
            assert (ROOT / "docs" / inside).is_file(), address
        else:
            name, _, section = inside.partition("#")
            page = ROOT / "docs" / f"{name.rstrip('/') or 'index'}.md"
            assert page.is_file(), address
            headings = re.findall("^#+ (.*)$", page.read_text(), re.MULTILINE)
            assert not section or section in {h.lower().replace(" ", "-") for h in headings}, address


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
