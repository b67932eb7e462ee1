"""As the interpreter ends: what still computes computes right, and nothing of ours is printed.

Python stops a thread that nobody has joined inside of PyTorch, which aborts the process: also without hodiff.
"""

import subprocess
import sys

import pytest

CALL = "hodiff.hvp(lambda z: (z**3).sum(), torch.ones(2), torch.ones(2))"
PROGRAMS = {
    "a function of atexit, from before PyTorch": f"""
import atexit
atexit.register(lambda: print({CALL}.tolist()))
import torch, hodiff
{CALL}
""",
    "a thread that nobody joins": f"""
import sys, threading, torch, hodiff
expected, known = {CALL}, threading.Event()
def work():
    while True:
        if not torch.equal({CALL}, expected):
            print("wrong", file=sys.stderr)
        known.set()
threading.Thread(target=work, daemon=True).start()
known.wait(60)
print(expected.tolist(), flush=True)
""",
}


ABORTED = "terminate called without an active exception\n"


@pytest.mark.wide
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_ours_is_said(name: str) -> None:
    program = [sys.executable, "-c", PROGRAMS[name]]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, timeout=240)
    assert (ran.stdout, ran.stderr.replace(ABORTED, "")) == ("[6.0, 6.0]\n", "")
    assert ran.returncode == 0 or ran.stderr == ABORTED
