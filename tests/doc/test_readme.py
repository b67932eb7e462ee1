"""The README is short, reaches code early, and carries the commands that CI runs."""

import re

import pytest
import torch

import hodiff
from tests.doc.snippets import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def test_short_and_code_early():
    lines = README.splitlines()
    assert len(lines) <= 100
    assert len(README.split()) <= 500
    start = lines.index("```python")
    end = lines.index("```", start)
    assert end + 1 <= 25
    assert end - start - 1 <= 8


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_both_sides_of_the_penalty_agree(page, monkeypatch):
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    lines = diff.splitlines()
    assert sum(line[0] in "-+" for line in lines) == 5
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(torch.Size(_flat(shape)), 0.5))
    torch.manual_seed(0)
    D = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    batches = [(torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2))]
    found = []
    for side in "-+":
        D.zero_grad()
        program = "\n".join(line[1:] for line in lines if line[0] in " " + side)
        scope = {"D": D, "batches": batches, "torch": torch, "hodiff": hodiff}
        exec(program, scope)
        found.append(
            [scope["loss"], *(parameter.grad.clone() for parameter in D.parameters() if parameter.grad is not None)]
        )
    assert len(found[0]) == len(found[1]) > 3
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(before, after)


def _flat(shape):
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


def test_no_badges_and_no_version_numbers():
    assert "![" not in README
    assert README.count("<img ") == 2  # the logo, and a picture of a result
    assert not re.search(r"torch\s*[=<>]=", README)


def test_its_addresses_are_relative_and_lead_somewhere():
    """They work in every host's view of the repository, and need no site that is not published."""
    addresses = ["".join(pair) for pair in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", README)]
    assert len(addresses) >= 10
    for address in addresses:
        name, _, section = address.partition("#")
        assert (ROOT / name).is_file(), address
        headings = re.findall("^#+ (.*)$", (ROOT / name).read_text(), re.MULTILINE) if section else []
        assert not section or section in {h.lower().replace(" ", "-") for h in headings}, address


def test_no_page_leads_to_the_site_before_it_is_published():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text("utf-8")
        assert "hodiff.github.io" not in text and "github.com/hodiff" not in text, page


def test_the_commands_are_complete_on_a_fresh_machine():
    (commands,) = re.findall(r"<!-- commands -->\n```bash\n(.*?)```", README, re.DOTALL)
    install, tour, tests = commands.splitlines()
    assert install == "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e '.[test]'"
    assert tour.startswith(".venv/bin/hodiff tour  # ")
    assert re.fullmatch(r"\.venv/bin/pytest  # about \w+ minutes on one core", tests)


def test_it_claims_no_gpu():
    assert "It is untested on GPUs: " in README
    assert "on GPUs" not in README.replace("untested on GPUs", "")


def test_no_command_installs_without_the_pins():
    for path in [ROOT / "README.md", *(ROOT / ".ci").iterdir(), *(ROOT / "docs").rglob("*.md")]:
        for line in path.read_text("utf-8").splitlines():
            if re.search(r"\bpip install\b.*-e\b", line):
                assert re.search(r"-c \S*constraints\.txt", line), f"{path.name}: {line}"


def test_no_command_or_message_takes_hodiff_from_an_index():
    """It is on none: a stranger may register the name. A path, or a folder of wheels, is ours."""
    texts = [README, *(path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md"))]
    texts += [path.read_text("utf-8") for folder in ("src", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    lines = [line for text in texts for line in text.splitlines() if "pip install" in line]
    assert len(lines) >= 15
    for line in lines:
        by_name = re.search(r"pip install[^`]*[\s'\"]hodiff(?=[\[\s'\"`]|$)", line)
        assert not by_name or "--no-index" in line, line
