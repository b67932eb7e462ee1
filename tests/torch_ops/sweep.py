"""The whole sweep, in a file that is continued where it ended."""

import json
import time
from pathlib import Path

import torch

from tests.torch_ops.database import names, problems
from tests.torch_ops.judge import Verdict, judge

SECONDS = 60.0  # for one operation: then its other samples are left out, and the file says so


def run(results: Path, count: int, only: list[str]) -> None:
    """Judge every operation that the file does not have yet; one line for each."""
    done = set(read(results)) if results.exists() else set()
    with results.open("a", encoding="utf-8") as file:
        for name in names():
            if name in done or (only and name not in only):
                continue
            line = {"operation": name, "torch": torch.__version__, "samples": of_operation(name, count)}
            file.write(json.dumps(line) + "\n")
            file.flush()


def of_operation(name: str, count: int) -> list[dict[str, Verdict]]:
    """The verdicts on its samples."""
    start, found = time.monotonic(), []
    for problem in problems(name, count):
        found.append(judge(problem))
        if time.monotonic() - start > SECONDS:
            break
    return found


def read(results: Path) -> dict[str, list[dict[str, Verdict]]]:
    """What a file holds: operation -> the verdicts on each sample."""
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    return {line["operation"]: line["samples"] for line in lines}


def release(results: Path) -> str:
    """The release of PyTorch that a file is about; a mixture raises."""
    (found,) = {json.loads(line)["torch"].partition("+")[0] for line in results.read_text("utf-8").splitlines()}
    return found
