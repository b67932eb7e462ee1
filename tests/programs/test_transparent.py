"""What `hodiff explain` prints of a program is what Python prints, frame by frame; but for the explanation."""

import os
import re
import signal
import subprocess
import sys
import traceback
import types
from pathlib import Path

import pytest
import torch

from hodiff import cli
from hodiff.__main__ import main
from tests.programs.expected import FAILING
from tests.programs.test_programs import path

PROGRAMS = [path(name) for name in [*FAILING, "crashes"]]
EXCEPTIONS = {
    "chained": """
        import torch
        import torch.nn.functional as F

        def f():
            try:
                F.cross_entropy(torch.rand(3, 4), torch.rand(2))
            except Exception as error:
                raise KeyError("first") from error

        def g(y):
            try:
                f()
            except KeyError:
                y.backward()

        y = torch.rand(3, requires_grad=True).exp().sum()
        y.backward()
        g(y)
        """,
    "handled": """
        import torch

        x = torch.rand(3, requires_grad=True)
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError:
            try:
                torch.autograd.grad(torch.nn.functional.softmax(x.detach(), 0).sum(), x)
            except RuntimeError:
                x.reshape(7)
        """,
    "from another": """
        import torch

        def failing(n):
            try:
                torch.nn.functional.mse_loss(torch.ones(n), torch.ones(n), reduction="other")
            except ValueError as error:
                return error

        raise KeyError("outside of any handler") from failing(3)
        """,
    "in a circle": """
        import torch

        def failing(n):
            try:
                torch.nn.functional.mse_loss(torch.ones(n), torch.ones(n), reduction="other")
            except ValueError as error:
                return error

        first, second, third = failing(3), failing(4), failing(5)
        first.__cause__, second.__cause__, third.__cause__ = second, first, first
        raise third
        """,
    "in a module": """
        import helper_that_fails
        """,
    "in a group": """
        import torch

        def failing(n):
            try:
                torch.ones(2).reshape(n)
            except RuntimeError as error:
                return error

        raise ExceptionGroup("several", [failing(3), ExceptionGroup("inner", [failing(4), ValueError(1)])])
        """,
    "of a hook": """
        import torch

        def hook(gradient):
            return gradient.reshape(5)

        x = torch.rand(3, requires_grad=True)
        y = x.exp()
        y.register_hook(hook)
        y.sum().backward()
        """,
    "under a mode of its own": """
        import torch
        from torch.overrides import TorchFunctionMode

        class Mine(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))

        with Mine():
            torch.nn.functional.mse_loss(torch.rand(2), torch.rand(3), reduction="other")
        """,
    "from a subclass": """
        import torch

        class Mine(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                return super().__torch_function__(func, types, args, kwargs or {})

        torch.nn.functional.layer_norm(torch.rand(2).as_subclass(Mine), (3,))
        """,
    "syntax": """
        x = 1
        y = = 2
        """,
    "recursive": """
        import torch

        def again(n):
            return again(n - 1) if n else torch.ones(2).view(3)

        again(30)
        """,
}


def pythons(path: Path) -> str:
    """The traceback that Python prints, which runs a program in a module of its own."""
    module = types.ModuleType("__main__")
    try:
        exec(compile(path.read_text("utf-8"), str(path), "exec", dont_inherit=True), vars(module))
    except Exception as error:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__.tb_next))
    return ""


def written(name, tmp_path):
    script = tmp_path / "script.py"
    lines = EXCEPTIONS[name].strip("\n").split("\n")
    script.write_text("\n".join(line.removeprefix(" " * 8) for line in lines) + "\n", "utf-8")
    helper = "import torch\n\n\ndef f():\n    return torch.ones(3).view(2)\n\n\nf()\n"
    (tmp_path / "helper_that_fails.py").write_text(helper, "utf-8")
    return script


def compared(script: Path, capsys, monkeypatch) -> str:
    monkeypatch.syspath_prepend(str(script.parent))
    right = pythons(script)
    torch.manual_seed(0)
    capsys.readouterr()
    assert main(["explain", str(script)]) == 1
    text = capsys.readouterr().err
    mine = re.sub(r"hodiff: why.*?(\n(?=\n(?:During|The above))|\Z)", "", text, flags=re.DOTALL)
    assert mine[-len(right) :] == right
    assert "Traceback" not in mine[: -len(right)]  # what the program itself printed comes first
    return right


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda script: Path(script).stem)
def test_of_every_program(script, process, capsys, monkeypatch):
    assert "Traceback" in compared(Path(script), capsys, monkeypatch)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_of_exceptions(name, process, capsys, monkeypatch, tmp_path):
    assert compared(written(name, tmp_path), capsys, monkeypatch).count("Traceback") == {
        "chained": 3,
        "handled": 3,
        "from another": 2,
        "in a circle": 3,
        "in a group": 3,
        "syntax": 0,
    }.get(name, 1)


def both(*arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess, subprocess.CompletedProcess]:
    """A program by Python, and by `hodiff explain`."""
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    commands = [[sys.executable, *arguments], [sys.executable, "-m", "hodiff", "explain", *arguments]]
    running = [
        subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    done = [(*each.communicate(timeout=240), each.returncode) for each in running]
    return tuple(subprocess.CompletedProcess((), status, out, err) for out, err, status in done)


SAID = """
import sys
import torch
import torch.nn.functional as F
import atexit
import __main__

a = torch.rand(4, requires_grad=True)
F.mse_loss(a, torch.rand(4))
print(sys.argv[1:], __file__, sys.path[0], sorted({*vars(__main__)} - {"__annotations__"}))
atexit.register(lambda: print(len(vars(__main__)) > 5, "at the end"))
"""


@pytest.mark.wide
def test_main_is_the_programs(tmp_path):
    (tmp_path / "said.py").write_text(SAID, "utf-8")
    plain, explained = both("said.py", "--flag", cwd=tmp_path)
    assert explained.stderr == plain.stderr
    assert explained.stdout == plain.stdout
    assert "True at the end" in plain.stdout
    assert explained.returncode == plain.returncode == 0


@pytest.mark.wide
def test_an_interrupted_module(tmp_path):
    (tmp_path / "stopped.py").write_text("import torch\n\nprint(__name__)\nraise KeyboardInterrupt\n", "utf-8")
    plain, explained = both("-m", "stopped", cwd=tmp_path)
    assert explained.stderr == re.sub(r'  File "<frozen runpy>".*\n', "", plain.stderr)
    assert "KeyboardInterrupt" in plain.stderr
    assert explained.stdout == plain.stdout == "__main__\n"
    assert explained.returncode == plain.returncode == -signal.SIGINT


def codes(*names: str) -> list[types.CodeType]:
    """Stand-ins for frames: `w` is the watch's, `h` PyTorch's that hands on, others by their letter."""
    found = {"w": cli._watch.WatchMode.__torch_function__.__code__, "h": cli._HANDED_ON}
    return [found.setdefault(name, compile("0", name, "eval")) for name in names]


@pytest.mark.parametrize(
    ("stack", "right"),
    [
        ("u", "u"),
        ("uwwc", "uc"),
        ("uchwwcd", "ucd"),
        ("uchwwdd", "ucdd"),
        ("uchc", "uchc"),  # handed on to a mode or a class of the user's
        ("uchmchwwcd", "uchmcd"),
        ("uchww", "uc"),
        ("chwwc", "c"),
        ("uchwwchwwce", "uce"),  # two watches
        ("ucwwcd", "uccd"),  # no Python of PyTorch's handed it on: a function that met itself again
        ("ucwwhcd", "uccd"),
    ],
)
def test_frames(stack, right):
    kept = cli.seen(codes(*stack))
    assert "".join(stack[index] for index in kept) == right
