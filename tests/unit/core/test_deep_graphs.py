"""A chain of so many operations that freeing them one from within the other would end the process."""

import subprocess
import sys

import pytest

START = """
import sys, threading, time, torch, hodiff
def chain(x, count=20_000):
    for _ in range(count):
        x = x * (1 + 1e-6)
    return x
def waves(x, count=10_000):
    for _ in range(count):
        x = (x * 0.999).sin()
    return x.sum()
def states(x, count=10_000):
    total = 0
    for _ in range(count):
        x = x * (1 + 1e-6)
        total = total + x
    return total.sum()
"""
PROGRAMS = {
    "a gradient": "g = hodiff.grad(lambda x: chain(x).sum(), x); assert abs(g[0] / 1.020201 - 1) < 1e-6",
    "a sum over states": "hodiff.grad(states, x)",
    "two roots": "hodiff.jacobian(lambda x: torch.stack([chain(x)[0], chain(2 * x)[1]]), x)",
    "a product": "hodiff.hvp(lambda x: chain(x).sum() ** 2, x, x)",
    "a differentiable result": "g = hodiff.grad(waves, x.requires_grad_(), create_graph=True); del g",
    "a tensor of the caller's": "y = chain(x.requires_grad_()).sum(); hodiff.grad(y, x); del y",
    "a tensor in the middle": "h = chain(x.requires_grad_()); y = chain(h, 100).sum(); hodiff.grad(y, x); del y; del h",
    "an operator": "H = hodiff.HessianOperator(waves, x); H @ x; del H",
    "an inspection": "y = chain(x.requires_grad_()).sum(); hodiff.graph.inspect(y); del y",
}


END = """
def run():
    for name, program in PROGRAMS.items():
        print(name, flush=True)
        exec(program, {**globals(), "x": torch.ones(2, dtype=torch.float64)})
    print("all", flush=True)
threading.stack_size(2 * 2**20)  # enough for 10,000 nodes, as the usual 8 MiB are for 40,000
thread = threading.Thread(target=run)
thread.start()
thread.join()
time.sleep(0.5)  # what the thread takes down after its Python has ended may not meet the end of the process
"""


@pytest.mark.wide
def test_they_are_freed() -> None:
    script = f"{START}\nPROGRAMS = {PROGRAMS!r}\n{END}"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=240)
    last = done.stdout.splitlines()[-1]
    assert (done.returncode, last, done.stderr) == (0, "all", "")
