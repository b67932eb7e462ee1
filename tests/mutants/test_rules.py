"""Planted bugs are one change each, of code that is still Python; and their page is as published."""

import ast

import pytest

from tests.mutants import page
from tests.mutants.rules import SOURCE, of_file


@pytest.mark.wide
def test_each_bug_is_one_change_that_python_reads() -> None:
    file = SOURCE / "hodiff" / "_core" / "_vectors.py"
    source = file.read_text("utf-8")
    found = list(of_file(file))
    assert {"comparison", "constant", "and, or", "return", "raise"} <= {mutant.rule for mutant in found}
    for mutant in found:
        planted = mutant.planted(source)
        assert planted.count("\n") <= source.count("\n")
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(source)), mutant
        assert mutant.before in source
    assert len({mutant.name for mutant in found}) == len(found)


def test_the_page_is_as_published() -> None:
    assert page.PAGE.read_text("utf-8") == page.text(page.read(page.RESULTS))
