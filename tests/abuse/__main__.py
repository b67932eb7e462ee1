"""`python -m tests.abuse`: every bad value for every argument of every public name; prints what went wrong, and counts.

python -m tests.abuse                      # all of it: some minutes
python -m tests.abuse --only hvp laplacian
python -m tests.abuse --publish            # and docs/generated/abuse.md
"""

import argparse
import multiprocessing
from collections import Counter
from typing import Any

import torch

import hodiff
from tests.abuse import judge
from tests.abuse.calls import arguments, targets
from tests.abuse.values import LAYOUTS, VALUES
from tests.meta.source import ROOT

PAGE = ROOT / "docs" / "generated" / "abuse.md"


def judged(name: str, pipe: Any) -> None:
    """All values for one name; each is announced before it is tried, so that a crash can be told."""
    torch.set_num_threads(1)
    target = targets()[name]
    for argument in arguments(target):
        for value in VALUES:
            pipe.send((argument, value, None))
            pipe.send((argument, value, judge.bad_value(target, argument, value)))
        for layout in LAYOUTS:
            pipe.send((argument, layout, None))
            pipe.send((argument, layout, judge.other_layout(target, argument, layout) or "does not apply"))
    pipe.send(None)


def run(names: list[str]) -> tuple[Counter[str], list[str]]:
    """How often each outcome, and the lines of what went wrong."""
    context, counts, wrong = multiprocessing.get_context("fork"), Counter[str](), []
    for name in names:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=judged, args=(name, theirs))
        process.start()
        theirs.close()
        last: Any = None
        try:
            while True:
                if not ours.poll(30 * judge.SECONDS):  # inside of PyTorch, where no signal is looked at
                    process.kill()
                found = ours.recv()
                if found is None:
                    break
                last = found
                argument, value, verdict = found
                if verdict is None or verdict == "does not apply":
                    continue
                counts[verdict if verdict in judge.GOOD else "wrong"] += 1
                if verdict not in judge.GOOD:
                    wrong.append(f"{name}({argument}={value}): {verdict}")
                    print(wrong[-1], flush=True)
        except EOFError:
            counts["wrong"] += 1
            wrong.append(f"{name}{last}: the process ended, or had to be")
            print(wrong[-1], flush=True)
        process.join()
    return counts, wrong


def page(counts: Counter[str]) -> str:
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
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    print(f"hodiff {hodiff.__version__ if hasattr(hodiff, '__version__') else ''}, torch {torch.__version__}")
    counts, _ = run(options.only or list(targets()))
    print(f"{counts.total()} bad inputs: {dict(counts)}")
    if options.publish:
        PAGE.write_text(page(counts), encoding="utf-8")


if __name__ == "__main__":
    main()
