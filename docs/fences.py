"""Executed snippets whose lines can be read: what names a line shows it, as it does in a program."""

import html
import linecache
import re
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count(1)
NAME = "page"  # what stands before the number of a line, where a program has its file
WIDEST = 88  # columns of a block that a desktop shows whole
_SOURCE = re.compile(r'<div class="[^"]*highlight">.*?</div>', re.DOTALL)
_OUTPUT = re.compile(
    r'<div class="(?:language-text '
    r')?highlight">(?=<pre[^>]*>(?:<span></span>)?<code>([^<]*)</code>)'
)


def traceable(execute: Callable[..., None]) -> Callable[..., None]:
    """Runs blocks like `execute`; their modules have what they define, which `torch.compile` looks up there."""

    def run(code: str, name: str, defined: dict[str, Any]) -> None:
        def lookup(attribute: str) -> Any:
            if attribute in defined:
                return defined[attribute]
            raise AttributeError(attribute)

        sys.modules[defined["__name__"]].__dict__["__getattr__"] = lookup
        execute(code, name, defined)

    return run


def readable(formatter: Callable[..., str]) -> Callable[..., str]:
    """A formatter of fences like `formatter`, for code that is known by its lines.

    `folded="Program"` folds the code below that word, and shows what it prints.
    """

    def shown(
        source: str,
        language: str,
        css_class: str,
        options: dict[str, Any],
        md: Any,
        **more: Any,
    ) -> str:
        number = f"{NAME} {next(_numbers)}"
        name = f"<code block: id {number}>"  # as markdown-exec calls a block that has an id
        linecache.cache[name] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            name,
        )
        prefix, folded = options["id_prefix"], options["extra"].pop("folded", None)
        options = {
            **options,
            "id": number,
            "id_prefix": f"{number.replace(' ', '-')}-" if prefix is None else prefix,
        }
        made = formatter(source, language, css_class, options, md, **more)
        text = str(made).replace(html.escape(name), NAME)  # not what escapes in joins
        if folded:
            head = f"<details><summary>{html.escape(folded)}</summary>"
            text = _SOURCE.sub(rf"{head}\g<0></details>", text, count=1)
        return _OUTPUT.sub(_wrapped, text)

    return shown


def _wrapped(output: re.Match[str]) -> str:
    """What was printed in lines of prose, as messages of errors are, is wrapped rather than scrolled."""
    lines = html.unescape(output[1]).splitlines()
    wide = max(map(len, lines), default=0) > WIDEST
    return output[0].replace('highlight"', 'highlight prose"') if wide else output[0]
