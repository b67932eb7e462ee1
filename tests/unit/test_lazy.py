"""What is loaded when: `import hodiff` nothing of what explains, operators no compiler."""

import subprocess
import sys

import pytest

import hodiff.graph
import hodiff.sparse

LOADED = "[name for name in sys.modules if name.startswith('hodiff.graph.')]"


def run(program: str) -> str:
    command = [sys.executable, "-c", f"import sys, torch, hodiff\n{program}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout.strip()


def test_importing_loads_none_of_it():
    assert run(f"print({LOADED})") == "[]"


def test_multi_grad_loads_none_of_it():
    program = f"x = torch.ones(2, requires_grad=True)\nhodiff.multi_grad([x.sum()], x)\nprint({LOADED})"
    assert run(program) == "[]"


def test_an_error_is_explained_in_a_fresh_process():
    program = "try: hodiff.grad(lambda x: x.detach().sum(), torch.ones(2))\nexcept hodiff.GraphError as e: print(e)"
    assert "it was detached there" in run(program)


@pytest.mark.parametrize("package", [hodiff.graph, hodiff.sparse])
def test_each_name_is_there_and_listed(package):
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert getattr(package, name).__module__.startswith(f"{package.__name__}._")
    assert set(package.__all__) <= set(dir(package))


def test_another_name_is_not():
    with pytest.raises(AttributeError, match=r"module 'hodiff\.graph' has no attribute 'inspekt'"):
        _ = hodiff.graph.inspekt
    with pytest.raises(AttributeError, match=r"module 'hodiff\.sparse' has no attribute 'colour'"):
        _ = hodiff.sparse.colour


def test_importing_loads_nothing_of_sparse_either():
    loaded = "[name for name in sys.modules if name.startswith('hodiff.sparse.')]"
    assert run(f"print({loaded})") == "['hodiff.sparse._matrices']"


def test_operators_and_patterns_load_no_compiler():
    """PyTorch's class of modes imports Dynamo, for two seconds, when one of its modes sees the first operation."""
    program = (
        "x = torch.ones(3)\n"
        "hodiff.HessianOperator(lambda x: (x.sin() * x).sum(), x).dense()\n"
        "hodiff.sparse_jacobian(lambda x: x.sin() * x, x)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run(program) == "False"
