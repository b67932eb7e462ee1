"""Runs the Python fences of a Markdown page, in order, in one namespace."""

import re
import sys
from pathlib import Path

import torch
from sybil.document import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.codeblock import AbstractCodeBlockParser
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

ROOT = Path(__file__).resolve().parents[2]


class PythonFenceParser(AbstractCodeBlockParser):
    """Every ```python fence, also with options: sybil's own parser silently skips `python exec="true"`."""

    language = "python"

    def __init__(self) -> None:
        info = re.compile(r"(?P<language>python)(?:[ \t]+(?P<options>[^\n]*))?\n")
        lexer = RawFencedCodeBlockLexer(info_pattern=info, mapping={"language": "arguments", "source": "source"})
        super().__init__([lexer], evaluator=PythonEvaluator())


def run_page(path: Path, fences: int | None = None) -> int:
    """Run the page's first fences, or all, and return how many ran; a failing one raises with its own line."""
    document = Document.parse(str(path), PythonFenceParser(), SkipParser())
    count, hook, dtype = 0, sys.excepthook, torch.get_default_dtype()
    try:
        for example in document.examples():
            if count == fences:
                break
            example.evaluate()
            count += isinstance(example.region.evaluator, PythonEvaluator)
    finally:
        torch.set_default_dtype(dtype)  # a page's last fence sets it back
        sys.excepthook = hook  # a process group leaves one that puts the rank before each line of a traceback
    return count
