"""Tall Jacobians, of many more rows than columns, against PyTorch's forward mode."""

import statistics
from collections.abc import Iterator

import torch
from torch import nn

import hodiff
from benchmarks.models import bundle_adjustment
from benchmarks.table import Row
from benchmarks.timing import race, ratios, spread

BAR = 1.2


def rows(quick: bool) -> Iterator[Row]:
    torch.manual_seed(0)
    tall, wide = torch.randn(10_000, 6), torch.randn(2_000, 50)
    residuals, cameras = bundle_adjustment()
    problems = {
        "sin(A x), 10,000 x 6": (lambda x: torch.sin(tall @ x), torch.randn(6), 0),
        "sin(A x), 2,000 x 50": (lambda x: torch.sin(wide @ x), torch.randn(50), 0),
        f"bundle adjustment, 2,000 x {len(cameras)}": (residuals, cameras, 0),
        "Linear(6, 1,000) of 32 samples": (
            nn.Linear(6, 1_000).requires_grad_(False),
            torch.randn(32, 6),
            1,
        ),
    }
    for name, (f, x, batch_ndim) in problems.items():
        forward = torch.func.jacfwd(f)
        forward = torch.vmap(forward) if batch_ndim else forward
        contenders = {
            "hodiff": lambda f=f, x=x, k=batch_ndim: hodiff.jacobian(f, x, batch_ndim=k),
            "jacfwd": lambda g=forward, x=x: g(x),
        }
        torch.testing.assert_close(contenders["hodiff"](), contenders["jacfwd"]())
        times = race(contenders, rounds=(3 if quick else 15) if len(x) > 100 else 151)
        found = ratios(times, "hodiff", "jacfwd")
        ours, theirs = (statistics.median(times[key]) * 1e3 for key in ("hodiff", "jacfwd"))
        measured = f"{spread(found)}; {ours:.2f} ms, jacfwd {theirs:.2f}"
        yield Row(
            "jacobian / torch.func.jacfwd",
            name,
            measured,
            f"{BAR}",
            statistics.median(found) <= BAR,
            times,
        )
