"""`python -m tests.mutants`: plant bugs by rule in `src/hodiff`, one at a time, and see whether a test fails.

python -m tests.mutants map                      # which test runs which line: as long as the tests, and half again
python -m tests.mutants run build/mutants.jsonl  # 300 drawn bugs; continues where it was stopped
python -m tests.mutants run build/mutants.jsonl --again  # those that lived, with the tests as they are now
python -m tests.mutants control build/mutants.jsonl      # the tests that saw one pass without it
python -m tests.mutants publish build/mutants.jsonl      # the results, and their page
"""

import argparse
import json
import multiprocessing
import shutil
from pathlib import Path

from tests.mutants import page
from tests.mutants.choice import Choice, record
from tests.mutants.rules import Mutant, drawn
from tests.mutants.trial import Copy

MAP = Path("build/mutants")
WHAT = ["tests/unit", "tests/contract", "tests/property", "tests/cost", "tests/programs"]


def run(results: Path, count: int, seed: int, seconds: float, again: bool, processes: int) -> None:
    """Try each bug, with tests that take so many seconds without it."""
    lines = page.read(results)
    done = {line["name"] for line in lines if not (again and line["outcome"] not in page.KILLED)}
    kept = [line for line in lines if line["name"] in done]
    results.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    left = [mutant for mutant in drawn(count, seed) if mutant.name not in done]
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=tried, args=(left[first::processes], results, seconds)) for first in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)


def tried(mutants: list[Mutant], results: Path, seconds: float) -> None:
    """What becomes of these, a line each; other processes write into the same file."""
    choice, copy = Choice(MAP), Copy()
    with results.open("a", encoding="utf-8") as file:
        for mutant in mutants:
            tests = choice.tests(mutant, seconds)
            result = copy.run(mutant, tests, int(30 + 3 * seconds))._asdict() if tests else {"outcome": "no test"}
            line = {"name": mutant.name, "before": mutant.before, "after": mutant.after, "tests": len(tests), **result}
            file.write(json.dumps(line) + "\n")
            file.flush()
    copy.close()


def control(results: Path) -> None:
    """The tests that saw a bug, all at once and without it: a test that fails so has proved nothing."""
    copy = Copy()
    print(copy.run(None, sorted({line["by"] for line in page.read(results) if line.get("by")}), 3600))
    copy.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("do", choices=["map", "run", "control", "publish"])
    parser.add_argument("results", nargs="?", type=Path, default=Path("build/mutants.jsonl"))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30, help="of tests for one bug, as they took without it")
    parser.add_argument("--processes", type=int, default=1, help="how many at a time")
    parser.add_argument("--again", action="store_true", help="try those that lived once more")
    parser.add_argument("--tests", nargs="+", default=WHAT, help="for the map")
    options = parser.parse_args()
    if options.do == "map":
        record(MAP.absolute(), options.tests)
    elif options.do == "run":
        run(options.results, options.count, options.seed, options.seconds, options.again, options.processes)
    elif options.do == "control":
        control(options.results)
    else:
        shutil.copy(options.results, page.RESULTS)
        page.write()


if __name__ == "__main__":
    main()
