"""`python -m tests.abuse`: every bad value for every argument of every public name; prints what went wrong, and counts.

python -m tests.abuse build/abuse.jsonl                       # all; continues where it was stopped
python -m tests.abuse build/abuse.jsonl --only hvp laplacian  # these once more
python -m tests.abuse build/abuse.jsonl --publish             # the counts, as docs/generated/abuse.md
"""

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.abuse import judge
from tests.abuse.calls import Target, arguments, targets
from tests.abuse.values import LAYOUTS, VALUES
from tests.meta.source import ROOT

PAGE = ROOT / "docs" / "generated" / "abuse.md"
NONE = "does not apply"
PATIENCE = 30 * judge.SECONDS
"""How long the process may be silent, on a busy machine."""


LONG = {("sample_norm", "grads", "10^12 entries")}
"""What takes as long as PyTorch itself takes to add up so many squares."""


def judged(name: str, begin: int, pipe: Any) -> None:
    """The cases of one name from `begin` on; each is announced before it is tried, so that a crash can be told."""
    torch.set_num_threads(1)
    target = targets()[name]
    for number, (argument, value) in enumerate(cases(target)[begin:], begin):
        pipe.send((number, None))
        if (name, argument, value) in LONG:
            pipe.send((number, NONE))
        elif value in VALUES:
            pipe.send((number, judge.bad_value(target, argument, value)))
        else:
            pipe.send((number, judge.other_layout(target, argument, value) or NONE))
    pipe.send(None)


def cases(target: Target) -> list[tuple[str, str]]:
    """Each argument with each bad value, and with each layout."""
    return [(argument, value) for argument in arguments(target) for value in (*VALUES, *LAYOUTS)]


def verdicts(name: str, begin: int) -> Iterator[tuple[int, str]]:
    """What became of each case, by its number; the last is one at which the process ended, if it did."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=judged, args=(name, begin, theirs))
    process.start()
    theirs.close()
    number, verdict = begin, None
    try:
        while True:
            if not ours.poll(PATIENCE):  # inside of PyTorch, where no signal is looked at
                process.kill()
            found = ours.recv()
            if found is None:
                break
            number, verdict = found
            if verdict is not None:
                yield number, verdict
    except EOFError:
        yield number, "the process ended, or had to be"
    process.join(60)


def run(name: str) -> tuple[Counter[str], list[str]]:
    """How often each outcome, and the lines of what went wrong."""
    counts, wrong = Counter[str](), []
    every, done = cases(targets()[name]), 0
    while done < len(every):
        for number, verdict in verdicts(name, done):
            done = number + 1
            if verdict == NONE:
                continue
            counts[verdict if verdict in judge.GOOD else "wrong"] += 1
            if verdict not in judge.GOOD:
                wrong.append("{}({}={}): {}".format(name, *every[number], verdict))
                print(wrong[-1], flush=True)
    return counts, wrong


def read(results: Path) -> dict[str, dict[str, Any]]:
    """What a file holds: name -> its counts, and what was wrong; of several runs of a name the last."""
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()] if results.exists() else []
    return {line["name"]: line for line in lines}


def page(found: Iterable[dict[str, Any]]) -> str:
    counts = sum((Counter(line["counts"]) for line in found), Counter[str]())
    release = torch.__version__.partition("+")[0]
    return (
        "# Bad input\n\n"
        f"| bad inputs tried, torch {release} | an error of hodiff | a right answer | an exception of `f`, unchanged | "
        "out of memory, as PyTorch says it | wrong |\n|---|---|---|---|---|---|\n"
        f"| {counts.total():,} | {counts['error of ours']:,} | {counts['answer']:,} | {counts['of f']:,} | "
        f"{counts['no memory']:,} | {counts['wrong']:,} |\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse")
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, and once more if they were tried before")
    parser.add_argument("--publish", action="store_true", help="write the counts to the documentation")
    options = parser.parse_args()
    if options.publish:
        PAGE.write_text(page(read(options.results).values()), encoding="utf-8")
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for name in options.only or [name for name in targets() if name not in read(options.results)]:
        counts, wrong = run(name)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "counts": counts, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main()
