"""What is loaded when: `import hodiff` nothing of what explains, no operators, no penalties; operators no compiler."""

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import hodiff.graph
import hodiff.sparse
from hodiff._core import _settings

LOADED = "[name for name in sys.modules if name.startswith('hodiff.graph.')]"


FORKS = """
import json, os, sys, traceback, torch, hodiff
for line in sys.stdin:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        try:
            exec(json.loads(line), {"sys": sys, "torch": torch, "hodiff": hodiff})
        except BaseException:
            print(traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with open(reader) as output:
        print(json.dumps(output.read().strip()), flush=True)
    os.wait()
"""
"""A process that has imported hodiff and nothing else: it runs each program in a copy of itself."""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[str], str]]:
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def answer(program: str) -> str:
            process.stdin.write(json.dumps(program) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield answer
        process.stdin.close()


def test_importing_loads_none_of_it(run):
    assert run(f"print({LOADED})") == "[]"


@pytest.mark.wide
def test_importing_is_no_collection_of_what_pytorch_made(run):
    """It took half of the time of an import."""
    program = (
        "import gc, torch\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, told: seen.append(told['generation']))\n"
        "import hodiff\n"
        "print(2 in seen, gc.isenabled())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    assert ran.stdout == "False True\n"


@pytest.mark.wide
def test_importing_takes_a_twentieth_of_the_calls_that_pytorch_takes(run):
    """Python and builtin ones, which are the same on every run."""
    program = (
        "import sys\n"
        "def calls(name):\n"
        "    seen = []\n"
        "    sys.setprofile(lambda frame, event, told: seen.append(event in ('call', 'c_call')))\n"
        "    __import__(name)\n"
        "    sys.setprofile(None)\n"
        "    return sum(seen)\n"
        "print(calls('torch'), calls('hodiff'))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240)
    theirs, ours = map(int, ran.stdout.split())
    assert 0 < ours < 0.05 * theirs


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects):
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError, match="module"), _settings.Scope(_settings.without_collections):
            assert not gc.isenabled()
            raise KeyError("module")
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_importing_loads_no_operators_no_solutions_no_penalties_and_no_checks(run):
    parts = "{'.'.join(name.split('.')[:2]) for name in sys.modules if name.startswith('hodiff.')}"
    others = "{f'hodiff.{name}' for name in ('curvature', 'implicit', 'rules', 'penalties', 'verify')}"
    assert run(f"print({parts} & {others})") == "set()"


def test_what_tools_look_for_loads_none_of_them(run):
    """Doctest and inspect ask each object for a `__wrapped__`."""
    assert run("print(hasattr(hodiff, '__wrapped__'), 'hodiff.implicit' in sys.modules)") == "False False"


def test_they_are_there_when_they_are_asked_for(run):
    program = (
        "names = set(hodiff.__all__)\n"
        "print(names <= set(dir(hodiff)), {'implicit', 'rules'} <= set(dir(hodiff)))\n"
        "exec('from hodiff import *')\n"
        "print(names - set(globals()), names - set(vars(hodiff)))\n"
        "print(hodiff.implicit.argmin.__name__, hodiff.rules.SGD.__name__, hodiff.curvature.__name__)"
    )
    assert run(program).splitlines() == ["True True", "set() set()", "argmin SGD hodiff.curvature"]


def test_they_are_left_alone_by_the_tracer_whichever_is_asked_for_first(run):
    """The methods that an operator inherits, too."""
    program = (
        "hodiff.unroll, hodiff.MatrixOperator\n"
        "found = [hodiff.unroll, hodiff.implicit.argmin, hodiff.MatrixOperator.__matmul__]\n"
        "found += [hodiff.solve, hodiff.multi_grad, hodiff.gradient_penalty, hodiff.PathLengthPenalty.forward]\n"
        "print({getattr(function, '_torchdynamo_disable', False) for function in found})"
    )
    assert run(program) == "{True}"


def test_multi_grad_loads_none_of_it(run):
    program = f"x = torch.ones(2, requires_grad=True)\nhodiff.multi_grad([x.sum()], x)\nprint({LOADED})"
    assert run(program) == "[]"


def test_an_error_is_explained_in_a_fresh_process(run):
    program = "try: hodiff.grad(lambda x: x.detach().sum(), torch.ones(2))\nexcept hodiff.GraphError as e: print(e)"
    assert "The value was detached" in run(program)


@pytest.mark.parametrize("package", [hodiff.graph, hodiff.sparse])
def test_each_name_is_there_and_listed(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert f"{getattr(package, name).__module__}.".startswith(f"{package.__name__}.")
    assert set(package.__all__) <= set(dir(package))


def test_another_name_is_not():
    with pytest.raises(AttributeError, match=r"module 'hodiff\.graph' has no attribute 'inspekt'"):
        _ = hodiff.graph.inspekt
    with pytest.raises(AttributeError, match=r"module 'hodiff\.sparse' has no attribute 'hue'"):
        _ = hodiff.sparse.hue


@pytest.mark.wide
def test_importing_loads_nothing_of_sparse_either(run):
    loaded = "[name for name in sys.modules if name.startswith('hodiff.sparse.')]"
    assert run(f"print({loaded})") == "[]"


@pytest.mark.wide
def test_operators_and_patterns_load_no_compiler(run):
    """PyTorch's class of modes imports Dynamo, for two seconds, when one of its modes sees the first operation."""
    program = (
        "x = torch.ones(3)\n"
        "hodiff.HessianOperator(lambda x: (x.sin() * x).sum(), x).dense()\n"
        "hodiff.sparse_jacobian(lambda x: x.sin() * x, x)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run(program) == "False"
