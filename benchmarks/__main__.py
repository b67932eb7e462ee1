"""`python -m benchmarks [--quick] [SUBJECT ...]`: what was measured, its bar,
and whether it is met. `python -m benchmarks gpu`: what a GPU does, in two minutes.
"""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import (
    bilevel,
    calibration,
    curvature,
    eager,
    estimators,
    fields,
    gpu,
    graph,
    hessian,
    hvp,
    jacobian,
    language,
    memory,
    penalties,
    rows,
    scale,
    sharded,
    sparse,
    steps,
)
from benchmarks.table import device, header, line, write

SUBJECTS = {
    "bilevel": bilevel,
    "calibration": calibration,
    "estimators": estimators,
    "fields": fields,
    "curvature": curvature,
    "graph": graph,
    "hvp": hvp,
    "hessian": hessian,
    "jacobian": jacobian,
    "language": language,
    "memory": memory,
    "penalties": penalties,
    "rows": rows,
    "scale": scale,
    "sharded": sharded,
    "sparse": sparse,
    "steps": steps,
    "eager": eager,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"any of {', '.join(SUBJECTS)}; default: all"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds each: a trial run, not a measurement"
    )
    parser.add_argument(
        "--device", default="cpu", help="where the models and their data are made, such as cuda"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="put the rows into this file: docs/benchmarks.json",
    )
    options = parser.parse_args()
    if options.subjects == ["gpu"]:
        return gpu.main()
    unknown = set(options.subjects) - set(SUBJECTS)
    if unknown:
        parser.error(
            f"unknown subject {', '.join(sorted(unknown))}; there are {', '.join(SUBJECTS)}"
        )
    torch.set_num_threads(1)
    if options.device != "cpu":  # a default device is a mode, which every operation passes through
        torch.set_default_device(options.device)
    print(f"torch {torch.__version__}, {device()}; median [least - most] over interleaved rounds\n")
    print(header())
    missed = 0
    for name in options.subjects or SUBJECTS:
        rows = []
        for row in SUBJECTS[name].rows(options.quick):
            print(line(row), flush=True)
            rows.append(row)
            missed += row.met is False
            if options.json:  # after each row: what was measured before an interrupt is not lost
                write(options.json, name, rows, quick=options.quick)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
