"""A PyTorch that lacks a name: one sentence of ours, which says what still works, and no number that is not right."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hodiff
from hodiff._core import _kernels, _messages, _needed
from hodiff.graph import _saved
from tests.meta.source import library_files, private_names

PROGRAM = Path(__file__).with_name("renamed.py")
DYNAMO = {"a compilation", "torch.compile beside hodiff"}
"""Their names are there once Dynamo is loaded, which takes seconds."""

NAMES = {
    (part, name): f"{row.partition(': ')[0]}.{name}"
    for part, rows in _needed.NEEDED.items()
    for row in rows
    for name in row.partition(": ")[2].split()
}


def renamed(names: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """What the doors give where PyTorch calls a name otherwise."""
    command = [sys.executable, str(PROGRAM), json.dumps(names)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3000)
    assert ran.returncode == 0, ran.stderr
    return {name: json.loads(given) for name, given in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("part", sorted(_needed.NEEDED.keys() - DYNAMO - {"sharding"}))
def test_this_release_has_what_each_part_needs(part: str) -> None:
    assert _needed.lacks(part) == ""


def test_all_are_tried_in_five_milliseconds() -> None:
    def seconds() -> float:
        begun = time.perf_counter()
        for part in _needed.NEEDED.keys() - DYNAMO - {"sharding"}:
            _needed.lacks.__wrapped__(part)
        return time.perf_counter() - begun

    assert min(seconds() for _ in range(20)) < 0.005


FIVE = {
    "_InferenceMode": [],
    "_get_sequence_nr": ["grad", "explain", "an error"],
    "_current_graph_task_id": ["grad", "operator"],
    "_make_wrapper_subclass": ["grad", "laplacian"],
    "_dispatch_library": ["grad", "attention"],
}
"""Names, and what is called without them: all else of theirs is tried by night."""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name has a process of its own")
def test_a_name_that_is_gone_is_one_sentence_and_all_else_is_right() -> None:
    given = renamed({name: at or ["grad"] for name, at in FIVE.items()})
    release = torch.__version__
    assert given.pop("_InferenceMode") == {
        "import": "ImportError: hodiff (every call) needs torch._C._InferenceMode_as_of_now, which torch "
        f"{release} does not have. hodiff supports PyTorch 2.8 to 2.15; on this release nothing of hodiff works."
    }
    assert {name: said["grad"].split()[0] for name, said in given.items()} == dict.fromkeys(given, "right")
    sentences = {
        "explain": "HodiffError: hodiff (graph) needs torch._C._autograd._get_sequence_nr_as_of_now, which torch "
        f"{release} does not have. hodiff supports PyTorch 2.8 to 2.15; on this release, all else of hodiff works.",
    }
    assert given["_get_sequence_nr"]["explain"] == sentences["explain"]
    assert given["_get_sequence_nr"]["an error"].endswith("so why a graph cannot give what was asked is not explained.")
    assert given["_current_graph_task_id"]["operator"].startswith(
        "HodiffError: hodiff (curvature) needs torch._C._curr"
    )
    assert given["_make_wrapper_subclass"]["laplacian"].startswith(
        "HodiffError: hodiff (Taylor mode) needs torch.Tensor._make"
    )
    assert given["_dispatch_library"]["grad"].endswith(
        "attention and cross-entropy take PyTorch's memory. All is right."
    )
    assert given["_dispatch_library"]["attention"] == "right"


LAST = {"default", "sparse_dim", "get", "try_get", "SKIP", "PROXY", "PreDispatch", "backward", "run_backward"}
"""Words that mean more than the name of PyTorch's: the part before them is renamed."""


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name has a process of its own")
def test_each_name_that_is_gone_is_one_sentence_and_all_else_is_right() -> None:
    names = {min(name.split(".")[-1:], [name.split(".")[0]], key=lambda each: each[0] in LAST)[0] for _, name in NAMES}
    given = renamed({name: [] for name in sorted(names)})
    supported = "hodiff supports PyTorch 2.8 to 2.15"
    wrong = {
        (name, part): said
        for name, parts in given.items()
        for part, said in parts.items()
        if said.split()[0] != "right" and not (supported in said and f"{name}_as_of_now" in said)
    }
    assert not wrong and given.keys() == names
    raised = {name for name, parts in given.items() if any(said != "right" for said in parts.values())}
    assert len(raised) > 0.9 * len(names)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name has a process of its own")
@pytest.mark.wide
def test_a_public_name_that_is_gone_is_said_in_words() -> None:
    (said,) = renamed({"saved_tensors_hooks|remove_parametrizations|TorchFunctionMode": ["grad"]}).values()
    assert re.match(
        r"ImportError: hodiff cannot use torch .*as_of_now.*\. hodiff supports PyTorch 2\.8 to", said["import"]
    )


def test_explanations_that_are_off_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_saved, "_states_are_told", lambda: False)
    for cached in (_saved.answers, _messages.warn_once):
        cached.cache_clear()
    y = torch.ones(2, requires_grad=True).sin().sum()
    try:
        with pytest.warns(hodiff.HodiffWarning, match="explanations are off") as caught:
            verdicts = [hodiff.graph.predict(y).verdict for _ in range(2)]
        assert verdicts == ["maybe", "maybe"] and len(caught) == 1
    finally:
        _saved.answers.cache_clear()


def test_kernels_that_have_no_key_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _kernels.available()  # its key is taken then, as if by another library
    monkeypatch.setattr(_kernels, "registered", [])
    for cached in (_kernels.available, _messages.warn_once):
        cached.cache_clear()
    try:
        with pytest.warns(hodiff.HodiffWarning, match="No dispatch key is free.* take PyTorch's memory") as caught:
            assert not _kernels.available() and not _kernels.available()
        assert len(caught) == 1
    finally:
        _kernels.available.cache_clear()


ELSEWHERE = {
    r"_(raw_)?saved_\w*": "of nodes: proved, `_versions.LOOKS`",
    r"torch\.ops\.aten\._(native_batch_norm_legit\.no_stats|batch_norm_with_update)": "nodes are made by them: proved",
    r"torch\._inductor\..*": "tried where a step is compiled, whose report says what failed",
    r"torch\.(_tensor|distributed\._composable\.replicate)": "what PyTorch says of itself; unknown, it is as any other",
    r"torch\.utils\._python_dispatch\.__dict__\.update": "a dict's",
    r"torch\._functorch\.predispatch": "read from 2.13 on, by its name among the modules",
}
"""Private names that are not in the table, and why."""


@pytest.mark.wide
def test_each_private_name_is_in_the_table() -> None:
    told = set(NAMES.values())
    for path in library_files():
        for name in private_names(path):
            known = any(f"{name}.".startswith(f"{each}.") or each.startswith(f"{name}.") for each in told)
            assert known or any(re.fullmatch(row, name) for row in ELSEWHERE), f"{path.name}: {name}"


@pytest.mark.wide
def test_what_is_in_the_table_is_said_in_the_library() -> None:
    text = "".join(path.read_text("utf-8") for path in library_files() if path.name != "_needed.py")
    unused = {
        name for _, name in NAMES if not all(re.search(rf"(?<!\w){part}(?!\w)", text) for part in name.split("."))
    }
    assert not unused
