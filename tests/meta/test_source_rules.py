"""Rules that hold in every file."""

import ast
import re
import tomllib

import pytest

from tests.meta.source import ROOT, files_of_tests, library_files, tree, where


def test_no_assert_in_the_library():
    for path in library_files():
        for node in ast.walk(tree(path)):
            assert not isinstance(node, ast.Assert), f"{where(path, node.lineno)}: raise an error with words instead"


MAKERS = re.compile(
    r"torch\.(zeros|ones|full|empty|eye|arange|linspace|tensor|rand|randn|randint|randperm|sparse_\w+_tensor)"
)


ANYWHERE = {
    ("_jacobian.py", "torch.zeros(())"): "a module's buffer, which is made where the user makes modules",
}


def test_what_the_library_makes_says_on_which_device():
    """A user's default device (`torch.set_default_device`, `with torch.device`) is for what the user makes."""
    for path in library_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and MAKERS.fullmatch(ast.unparse(node.func)) and "cli" not in path.parts:
                said = "device" in {keyword.arg for keyword in node.keywords}
                made = ast.unparse(node)
                assert said or (path.name, made) in ANYWHERE, f"{where(path, node.lineno)}: {made}"


PACKS = 10


def test_a_statement_says_one_thing():
    """A swap, or what a call returns as a tuple, is one; three values that are packed to be unpacked are three."""
    packs, nested = [], []
    for path in library_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) >= 3:
                packs += [where(path, node.lineno) for target in node.targets if isinstance(target, ast.Tuple)]
            if isinstance(node, ast.IfExp):
                inner = [each for part in (node.test, node.body, node.orelse) for each in ast.walk(part)]
                nested += [where(path, node.lineno) for each in inner if isinstance(each, ast.IfExp)][:1]
    assert len(packs) <= PACKS, packs
    assert not nested, "a conditional expression inside another; write an if statement"


def test_a_class_has_a_name_of_its_own():
    """Two classes of one name are two things to hold apart for whoever reads, searches or is shown an error."""
    places: dict[str, list[str]] = {}
    for path in library_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(where(path, node.lineno))
    assert len(places) > 200
    assert not {name: several for name, several in places.items() if len(several) > 1}


PRONOUNS = ("That ", "Those ", "The same", "And ", "It ", "They ", "These ", "What ", "Whose ", "Which ", "How ", "Of ")


def test_a_docstring_names_its_noun():
    """It is read alone: in a tooltip, in a search. A formula alone does not say what it is of."""
    wrong = []
    for path in library_files():
        for node in ast.walk(tree(path)):
            text = ast.get_docstring(node) or "" if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""
            short = 0 < len(text.split()) <= 3
            if short or text.startswith(PRONOUNS):
                wrong.append(f"{where(path, node.lineno)}: {text}")
    assert not wrong, "\n".join(wrong)


def test_no_variable_is_called_found():
    """A variable is called by what it holds; that it was found says nothing of it."""
    for path in library_files():
        for node in ast.walk(tree(path)):
            name = node.arg if isinstance(node, ast.arg) else getattr(node, "id", "")
            assert name != "found", where(path, node.lineno)


def test_no_benchmark_catches_an_exception():
    """What cannot run is said by a condition; a row that hides a crash reads like one that has nothing to say."""
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(tree(path)):
            assert not isinstance(node, ast.ExceptHandler), f"{where(path, node.lineno)}: ask if it can run"


@pytest.mark.wide
def test_raises_and_warns_match_a_message():
    """Without match= any accident of the same class passes for the error that was meant."""
    for path in files_of_tests():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                owner = getattr(getattr(node.func, "value", None), "id", "pytest")
                if owner == "pytest" and called in ("raises", "warns"):
                    said = {keyword.arg: keyword.value for keyword in node.keywords}
                    assert "match" in said, f"{where(path, node.lineno)}: {called}"
                    assert says_something(said["match"]) or ast.unparse(node.args[0]) == "SystemExit", (
                        f"{where(path, node.lineno)}: {ast.unparse(said['match'])} matches nearly any message"
                    )


def says_something(pattern: ast.expr) -> bool:
    """A word, or the whole of an empty message; what is put together or has a name is not looked into."""
    if not isinstance(pattern, ast.Constant) or pattern.value == "^$":
        return True
    return len(re.findall("[A-Za-z]", re.sub(r"\\.|\(\?\w+\)", "", pattern.value))) >= 3


@pytest.mark.parametrize(("pattern", "says"), [(".", False), (r"\w\w\w", False), ("(?s)^.+", False), ("cut", True)])
def test_a_pattern_that_matches_nearly_anything_says_nothing(pattern, says):
    assert says_something(ast.Constant(pattern)) == says


@pytest.mark.wide
def test_no_test_waits_for_good():
    """For a thread (see `in_threads`), a process, an event; and no thread keeps the process from its end."""
    for path in files_of_tests():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            called, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
            method = called.rpartition(".")[2]
            waits = method in ("join", "wait", "communicate") and not node.args and "timeout" not in given
            runs = called.endswith("subprocess.run") and "timeout" not in given
            stays = called.endswith("threading.Thread") and "daemon" not in given
            assert not (waits or runs or stays), f"{where(path, node.lineno)}: {called} with timeout=, or daemon=True"


def test_dependencies_are_torch_and_tqdm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = [re.match(r"[\w-]+", item).group() for item in project["dependencies"]]
    assert required == ["torch", "tqdm"]


def test_every_requirement_is_pinned_for_ci():
    pins = re.findall(r"^([\w.-]+)==\S+$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    pinned = {normal(name) for name in pins}
    assert [normal(name) for name in pins] == sorted(pinned)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in [project["dependencies"], *project["optional-dependencies"].values()]:
        for item in extra:
            name = re.match(r"[\w-]+", item).group()
            assert name == "hodiff" or normal(name) in pinned, f"constraints.txt does not pin {name}"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


OWN = ("_fields", "_fixed", "_kept", "_loan", "_state")
"""Of namedtuples, and of objects of the library."""


def test_no_default_for_a_private_name():
    """A release that renamed it would pass unseen. `_core._needed` tries each; what differs asks for the release."""
    for path in library_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                has_default = node.func.id == "hasattr" or len(node.args) == 3
                private = name[:1] == "_" and name[-2:] != "__"
                assert not (has_default and private) or name in OWN, where(path, node.lineno)


TRACE_LOOKS = 13  # 12 before points of classes that compute by themselves were refused
"""How often the library asks whether it is traced: where numbers are read on the road."""


def test_who_asks_whether_a_trace_runs():
    """Each answer is a second road. Steps may ask Dynamo: their loss must not run where it was to be followed.

    And `watch`, whose mode is on while a user's own compiled code is traced: it must leave no trace there.
    """
    asked = []
    for path in library_files():
        for node in ast.walk(tree(path)):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if "steps" not in path.parts and path.name != "_watch.py":
                assert not re.fullmatch(r"is_(dynamo_)?(compiling|exporting)", name), where(path, node.lineno)
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "tracing":
                asked += [where(path, node.lineno)] if "steps" not in path.parts else []
    assert len(asked) <= TRACE_LOOKS, asked
