"""The table of classes: what it says is right of each program of a class, and stands on its page."""

import re

import pytest

from hodiff.graph._case import Explanation
from hodiff.graph._classes import CLASSES, PAGE
from tests.meta.source import ROOT

HEAD = """# Why a pass failed

Each section is a class of failures, under the name that the line after `=>` of an explanation begins with.
An explanation consists of facts that were recorded: lines, variables, passes, who steps which parameter.
What helps is said of the class, here and in the explanation: only you know what your program is to train.

To have the facts, run the program with `hodiff explain SCRIPT`, or the part that fails under
[`watch`][hodiff.graph.watch].
"""


def address(name: str) -> str:
    """The section of a class, as an explanation gives it."""
    return Explanation("backward", name).body.rpartition("#")[2]


def page() -> str:
    """The page, as the table has it."""
    parts, said = [HEAD], set[str]()
    for name, known in CLASSES.items():
        typed = [f"`{text}`" for text in known.typed if text not in said]  # what several share stands at the first
        said.update(known.typed)
        parts.append(f"## {name[0].upper()}{name[1:]}\n\n{known.what}\n**What helps:** {' '.join(known.helps)}\n")
        parts += [f"Seen as {', '.join(typed)}.\n"] if typed else []
    return "\n".join(parts)


def test_the_page_is_the_table() -> None:
    assert (ROOT / PAGE).read_text("utf-8") == page(), f"write page() to {PAGE}"


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("name", CLASSES)
def test_what_helps_is_right_of_each_program_of_a_class(name: str) -> None:
    known = CLASSES[name]
    assert known.what.endswith(".") and 1 <= len(known.helps) <= 3
    assert known.typed, "what do people search for?"
    for text in (known.what, *known.helps, known.inside):
        assert not re.search(r"\byours?\b|\byou\b", text, re.IGNORECASE) or text == known.inside
        assert not re.search(r"\.py\b|:\d|\bline \d", text)
        assert "retain_graph" not in text or ("nothing" in text and "changed in between" in text)


def test_a_section_of_the_page_has_the_anchor_that_is_printed() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text("utf-8"), re.MULTILINE)
    assert [head.lower().replace(" ", "-") for head in heads] == [address(name) for name in CLASSES]
    assert 25 <= len(CLASSES) <= 40


SEARCHED = (
    "NoneType",
    "can't optimize a non-leaf",
    "only change requires_grad flags",
    "Mismatch in shape",
    "A view was created in no_grad mode",
    "Inference tensors",
    "implicitly created",
    "donated",
    "virial",
    "GradNorm",
    "per layer",
    "diagonal of",
    "Langevin",
    "Expected output to be",
    "inside of a function being transformed",
)


@pytest.mark.table(plain=None)
@pytest.mark.parametrize("words", SEARCHED)
def test_the_words_that_people_type_stand_on_the_page(words: str) -> None:
    assert words in (ROOT / PAGE).read_text("utf-8")
