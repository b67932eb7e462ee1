"""`python -m tests.torch_ops RESULTS`: judge every operation of PyTorch's database; continue where it was stopped.

python -m tests.torch_ops build/2.13.0.jsonl            # a few hours; stop and start it as you like
python -m tests.torch_ops build/2.13.0.jsonl --only det linalg.solve
python -m tests.torch_ops build/2.13.0.jsonl --publish    # the results, and their page
"""

import argparse
from pathlib import Path

import torch

from tests.torch_ops import page, results, sweep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_ops")
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="OPERATION", help="these alone")
    parser.add_argument("--samples", type=int, default=8, help="how many of each operation")
    parser.add_argument("--publish", action="store_true", help="write what the file holds to the repository")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.publish:
        found = sweep.read(options.results)
        results.write(sweep.release(options.results), found)
        page.write()
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    sweep.run(options.results, options.samples, options.only)


main()
