"""Bytes of tensors alive during and after a dense Hessian, counted exactly."""

import gc
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import hodiff
from benchmarks.models import dense, network_of_input
from benchmarks.table import Row
from hodiff._core._memory import LiveBytes
from hodiff._core._reverse import CHUNK_BYTES

SIZE = 1000


class Bytes(NamedTuple):
    result: int
    peak: int
    after: int  # beside the result


def rows(quick: bool) -> Iterator[Row]:
    """Peak bytes by chunk_size. A line through two sizes tells what a row takes; the others must lie on it."""
    torch.manual_seed(0)
    for name, f in {"log-sum-exp": dense(SIZE), "MLP of its input": network_of_input(SIZE)}.items():
        case = f"{name}, n = {SIZE}"
        x = torch.randn(SIZE)
        peaks = {chunk: count(hodiff_route(f, x, chunk)).peak for chunk in (16, 32)}
        row = (peaks[32] - peaks[16]) / 16
        fixed = peaks[16] - 16 * row
        for chunk in (8, 64, "auto"):
            found = count(hodiff_route(f, x, chunk))
            allowed = fixed + (CHUNK_BYTES if chunk == "auto" else chunk * row)
            of = mib(CHUNK_BYTES) if chunk == "auto" else f"{chunk} rows of {row / 2**10:.1f} KiB"
            measured = f"{mib(found.peak)}, of it {mib(found.result)} the result; {found.after} B left beside it"
            met = found.peak <= 1.05 * allowed and not found.after
            subject = f"peak memory of hessian, chunk_size={chunk}"
            yield Row(subject, case, measured, f"{mib(fixed)} + {of} = {mib(allowed)}; 0 B left", met)
        for route, call in {
            "torch.func.hessian": lambda f=f, x=x: torch.func.hessian(f)(x),
            "jacrev(jacrev)": lambda f=f, x=x: torch.func.jacrev(torch.func.jacrev(f))(x),
        }.items():
            yield Row(f"peak memory of {route}", case, mib(count(call).peak))


def hodiff_route(f: Callable[[Tensor], Tensor], x: Tensor, chunk: int | str) -> Callable[[], Tensor]:
    return lambda: hodiff.hessian(f, x, chunk_size=chunk)


def count(call: Callable[[], Tensor]) -> Bytes:
    call()  # what is made once and kept (caches of PyTorch) is not this call's
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            result = call()
        size = result.untyped_storage().nbytes()
        return Bytes(size, live.peak, live.now - size)
    finally:
        gc.enable()


def mib(size: float) -> str:
    return f"{size / 2**20:.2f} MiB"
