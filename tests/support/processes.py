"""Several processes with a process group, kept for many checks: to start one takes longer than any check."""

import contextlib
import datetime
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 20
"""Seconds after which a process of the group gives up waiting for another."""


@dataclass(frozen=True)
class Outcome:
    """What one rank returned, or raised, and after how many seconds."""

    value: Any
    error: str
    seconds: float

    def __repr__(self) -> str:
        return self.error or repr(self.value)


class Ranks:
    """`world` processes that call the same function of a module, each with its rank first."""

    def __init__(self, world: int, module: str, timeout: float = TIMEOUT) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, module, "torch._dynamo"])  # imported once
        self._folder = tempfile.TemporaryDirectory()
        self.timeout, self._hang = timeout, False
        pipes = [context.Pipe() for _ in range(world)]
        self._ends = [ours for ours, _ in pipes]
        meeting = str(Path(self._folder.name) / "meeting")
        self.processes = [
            context.Process(target=_serve, args=(rank, world, theirs, meeting, timeout), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """What every rank returned or raised; a process that has ended gives its exit code."""
        assert not self._hang, "a rank hung in a call before"
        for end in self._ends:
            end.send((function, args))
        until = time.monotonic() + 4 * self.timeout + 40
        return [self._outcome(rank, until) for rank in range(len(self._ends))]

    def _outcome(self, rank: int, until: float) -> Outcome:
        end = self._ends[rank]
        try:
            self._hang = not end.poll(max(0.0, until - time.monotonic()))
            assert not self._hang, f"rank {rank} hangs"
            return Outcome(*end.recv())
        except EOFError:
            self.processes[rank].join(self.timeout)
            return Outcome(None, f"exit code {self.processes[rank].exitcode}", 0.0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(self.timeout)
        self._folder.cleanup()


def _serve(rank: int, world: int, end: Any, meeting: str, timeout: float) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=limit)
    while True:
        try:
            function, args = end.recv()
        except EOFError:
            return
        torch.manual_seed(rank)  # what is drawn by default differs from rank to rank
        start = time.perf_counter()
        try:
            value, error = function(rank, *args), ""
        except BaseException as raised:
            value, error = None, f"{type(raised).__name__}: {raised}"
            if not isinstance(raised, (ValueError, RuntimeError)):
                error += "\n" + "".join(traceback.format_exception(raised))
        end.send((value, error, time.perf_counter() - start))


@contextlib.contextmanager
def group_of_one() -> Iterator[Any]:
    """A process group of this process alone; PyTorch leaves a hook that puts its rank before each traceback."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
