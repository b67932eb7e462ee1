"""What differs between releases of PyTorch is dealt with, and what torch says about itself reaches no user of ours."""

import gc
import importlib
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hodiff
from hodiff._core import _arguments, _messages, _needed, _nodes, _python_functions, _refusals, _versions
from hodiff.jets.rules import linear
from tests.meta.source import ROOT
from tests.support import releases
from tests.support.differences import first_difference, relative_error
from tests.support.processes import group_of_one

X = torch.tensor([[0.3, -0.7], [1.1, 0.4], [-0.9, 0.2]], dtype=torch.float64)
V = torch.tensor([[0.5, 0.1], [-0.3, 0.8], [0.2, -0.6]], dtype=torch.float64)


def test_the_release_is_read_from_its_number() -> None:
    assert ".".join(map(str, _versions.RELEASE)) == re.match(r"\d+\.\d+", torch.__version__).group()


def python(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.wide
def test_older_releases_are_refused_in_one_sentence() -> None:
    """Before anything is imported that such a release lacks."""
    ran = python(
        "import sys, torch\ntorch.__version__ = '2.7.1+cu126'\n"
        "try:\n    import hodiff\n"
        "except ImportError as error:\n    print(error)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('hodiff.')))"
    )
    sentence, imported = ran.stdout.splitlines()
    assert sentence == 'hodiff needs PyTorch 2.8 or newer, and this is 2.7.1+cu126: pip install "torch>=2.8".'
    assert imported == "hodiff._core._needed hodiff.errors"


@releases.since((2, 13), "names that newer releases have are missing")
@pytest.mark.wide
def test_newer_releases_are_warned_of_once() -> None:
    ran = python(
        "import torch\ntorch.__version__ = '2.16.0.dev20270101+cpu'\n"
        "import hodiff, hodiff.graph, hodiff.jets\nfrom hodiff import cli\n"
        "print(hodiff.grad(torch.sin, torch.zeros(())))\ncli.main(['info'])"
    )
    assert ran.stderr.count("is newer than 2.15, the newest release") == 1, ran.stderr
    assert ran.stderr.startswith("<string>:3: HodiffWarning: torch 2.16.0.dev20270101+cpu is newer")  # who imports it
    assert ran.stdout.startswith("tensor(1.)\n")
    said = "2.16.0.dev20270101+cpu: newer than 2.15, the newest release of PyTorch that hodiff was tested with"
    assert said in ran.stdout


@pytest.mark.wide
def test_known_releases_are_not() -> None:
    assert _needed.OLDEST <= _needed.RELEASE <= _needed.NEWEST and not _needed.newer()
    ran = python("import hodiff", "-Werror::UserWarning")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("release", [(1, 13), (2, 0), (2, 7)])
def test_what_is_older(monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]) -> None:
    monkeypatch.setattr(_needed, "RELEASE", release)
    with pytest.raises(ImportError, match=r"hodiff needs PyTorch 2\.8 or newer"):
        _needed.check_release()


@pytest.mark.parametrize("release", [(2, 16), (3, 0)])
def test_what_is_newer(monkeypatch: pytest.MonkeyPatch, release: tuple[int, int]) -> None:
    monkeypatch.setattr(_needed, "RELEASE", release)
    with pytest.warns(hodiff.HodiffWarning, match=r"newer than 2\.15"):
        _needed.check_release()


# --- what is private to PyTorch ---------------------------------------------------------------------------------------


def second(x: torch.Tensor) -> torch.Tensor:
    return hodiff.hvp(lambda x: x.sin().sum(), x, x)


def first(x: torch.Tensor) -> torch.Tensor:
    return hodiff.grad(lambda x: x.sin().sum(), x)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has looked at no graph yet."""
    for look in (_refusals.WRONG_AT_ONCE, _refusals.MIXING):
        monkeypatch.setattr(look, "_others", set())
    monkeypatch.setattr(_nodes, "UNREMARKABLE", defaultdict(set))
    _versions.prove.cache_clear()
    monkeypatch.setattr(_versions, "LOOKS", dict(_versions.LOOKS))
    return monkeypatch


@pytest.fixture(autouse=True, scope="module")
def proved_again():
    yield
    _versions.prove.cache_clear()


@pytest.mark.parametrize("call", [first, second])
@pytest.mark.parametrize("what", _versions.LOOKS)
def test_what_cannot_be_told_is_an_error_at_the_first_use(
    fresh: pytest.MonkeyPatch, what: str, call: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Each look, as if this PyTorch answered otherwise, or had no such name."""
    with pytest.raises(hodiff.HodiffError, match=re.escape(what)):
        fresh.setitem(_versions.LOOKS, what, lambda x: False)
        call(X)
    with pytest.raises(hodiff.HodiffError, match=re.escape(what)) as caught:
        fresh.setitem(_versions.LOOKS, what, lambda x: x.grad_fn._saved_under_another_name)
        call(X)
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("reader", "what"),
    [
        ("scales_by_frequency", "whether an embedding scales"),
        ("is_training", "whether a batch norm mixes"),
        ("argument", "what a function was applied to"),
        ("rounds_rows", "whether attention loses digits"),
        ("received", "what a node receives"),
        ("reduction", "by what a loss made one number"),
        ("is_packed", "whether a checkpoint packed"),
        ("function_of", "which Function"),
        ("is_once_differentiable", "whether a Function is once_differentiable"),
        ("_names", "what NotImplemented is"),
    ],
)
def test_a_reader_that_fails_is_found(fresh: pytest.MonkeyPatch, reader: str, what: str) -> None:
    def gone(*args: object) -> object:
        raise AttributeError("gone")

    fresh.setattr(_versions, reader, gone)
    with pytest.raises(hodiff.HodiffError, match=what):
        second(X)


def test_the_proof_disturbs_nothing_and_is_made_once(fresh: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    fresh.setitem(_versions.LOOKS, "how often", lambda x: not looked.append(1))
    state = torch.get_rng_state()
    with (
        torch.device("meta"),
        torch.inference_mode(),
        torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]),
    ):
        first(X), second(X)
    torch.set_default_dtype(torch.float16)
    try:
        _versions.prove.cache_clear()
        _versions.prove()
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(looked) == 2 and torch.equal(state, torch.get_rng_state())


def test_names_of_classes_that_are_used_are_proved() -> None:
    names = {name for name, _, _ in _refusals.REMARKS}
    names |= {*_messages.UNMARKED, *_messages.WRITTEN_OUT, *_refusals.THIRD, *_versions.BATCHED_WRONGLY}
    assert names <= {*_versions.GRAPHS, *releases.NOT_TRIED, *releases.LOOKED_AT}


@pytest.mark.skipif(_versions.RELEASE < (2, 13), reason="new in 2.13")
def test_a_chunked_loss_is_still_told_by_its_name() -> None:
    """It takes seconds, so `prove` does not try it."""
    x = torch.ones(2, 3, requires_grad=True)
    options = torch.nn.LinearCrossEntropyOptions()
    loss = torch.nn.functional.linear_cross_entropy(x, torch.ones(4, 3), torch.tensor([0, 1]), options=options)
    assert any("linear_cross_entropy" in name for name in _nodes.survey([loss]).names())


def test_functions_of_torch_are_still_called_so() -> None:
    """Those that `_python_functions` and `_arguments` know by name: an unknown one is warned of as any Function."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    homes = [f"torch._higher_order_ops.{name}" for name in ("cond", "flex_attention", "scan", "while_loop")]
    known = {name for home in (*homes, "torch.utils.checkpoint") for name in vars(importlib.import_module(home))}
    assert known >= _python_functions._WITHOUT_SECOND - (
        {"WhileLoopAutogradOp"} if _versions.RELEASE < (2, 12) else set()
    )
    assert hasattr(_fsdp_param_group, _arguments.NODE)
    assert hasattr(torch.nn.modules._functions, "BackwardHookFunction")


@pytest.mark.wide
def test_no_user_sees_what_torch_deprecates() -> None:
    """In a process of its own: such warnings come once, when forward mode is first used. The tour shows some of it."""
    shown = [f"-Werror::{category}" for category in ("FutureWarning", "UserWarning")]
    ran = python("from hodiff.__main__ import main; raise SystemExit(main(['tour']))", *shown)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
def test_distances_have_the_second_derivatives_that_torch_has(p: float) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, x.sin() + 3, p=p, compute_mode="donot_use_mm_for_euclid_dist").sin().sum()

    if _versions.RELEASE < (2, 14):
        with pytest.raises(hodiff.GraphError, match="second derivative of cdist"):
            hodiff.hvp(f, X, V)
    else:
        expected = first_difference(lambda t: hodiff.grad(f, X + t * V))
        assert relative_error(hodiff.hvp(f, X, V), expected) < 1e-6


def distances(x: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, V + 2, p=3.0).sin().flatten()


def selected(x: torch.Tensor) -> torch.Tensor:
    """The argument is broadcast to the mask."""
    return x.sin()[0].masked_select(torch.tensor([[True] * x.shape[1], [False] + [True] * (x.shape[1] - 1)]))


@pytest.mark.parametrize("f", [distances, selected])
def test_vectors_pass_one_at_a_time_where_their_batch_would_be_wrong(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    expected = torch.stack([hodiff.grad(lambda x, i=i: f(x)[i], X) for i in range(len(f(X)))])
    assert relative_error(hodiff.jacobian(f, X), expected) < 1e-12
    assert relative_error(hodiff.vjp(f, X, [torch.eye(len(f(X)), dtype=X.dtype)]), expected) < 1e-12
    for size in (1, 2, 4):
        assert relative_error(hodiff.jacobian(f, X, chunk_size=size), expected) < 1e-12


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_nobody_is_asked_to_file_an_issue_for_recurrent_layers(layer: type[torch.nn.Module]) -> None:
    """PyTorch's batch of vectors does so of an LSTM in float32, which has no batching rule on the CPU."""
    torch.manual_seed(0)
    rnn, x = layer(2, 3), torch.randn(4, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hodiff.jacobian(lambda x: rnn(x)[0], x)
    rows = [hodiff.grad(lambda x, i=i: rnn(x)[0].flatten()[i], x) for i in range(12)]
    torch.testing.assert_close(found, torch.stack(rows).reshape(4, 1, 3, 4, 1, 2))


def test_torch_batches_distances_wrongly() -> None:
    """Should this fail one day, on every supported release, `BATCHED_WRONGLY` can be shorter."""
    expected = torch.stack([hodiff.grad(lambda x, i=i: distances(x)[i], X) for i in range(9)])
    assert relative_error(torch.func.jacrev(distances)(X), expected) > 0.1


@pytest.mark.parametrize("read", {_versions.saved, _versions._read})
def test_what_a_node_saved_is_told_and_no_hook_is_run(read: Callable[[object, str], Any]) -> None:
    """2.8 to 2.11 do not tell it: there `_read` does, which answers on each release as PyTorch does since 2.12."""
    x, ran = X.clone().requires_grad_(), []

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        ran.append(packed)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        packed = x.sin().grad_fn
    kept, product, profiled = read(packed, "_raw_saved_self"), x.exp(), sys.getprofile()
    assert kept.unpack_hook.__code__ is unpack.__code__ and not ran and sys.getprofile() is profiled
    assert torch.equal(read(product.grad_fn, "_raw_saved_result").data, product)
    product.sum().backward()
    freed = read(product.grad_fn, "_raw_saved_result")
    assert freed.data is None and freed.unpack_hook is None
    with pytest.raises(RuntimeError, match="second time") as raised:
        freed.unpack()
    assert raised.value is not getattr(freed, "_error", None)  # it would hold frames, and the node


def test_threads_that_read_leave_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looked while another had it off left it off for good."""
    node = X.clone().requires_grad_().exp().grad_fn

    read = lambda: _versions._read(node, "_raw_saved_result")
    threads, is_off = [threading.Thread(target=read, daemon=True) for _ in range(2)], threading.Event()

    def off() -> None:
        if threading.current_thread() is threads[1]:
            threads[0].join(10)  # which has put it back
        gc.disable()
        is_off.set()
        time.sleep(0.1)  # the other looks

    monkeypatch.setattr(_versions, "gc", SimpleNamespace(isenabled=gc.isenabled, disable=off, enable=gc.enable))
    try:
        threads[0].start()
        assert is_off.wait(10)
        threads[1].start()
        threads[1].join(10)
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_dense_tensor_of_one_that_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.8 transforms no other: Taylor mode refused transforms of a constant coefficient."""
    x = torch.ones(1).expand(4)
    monkeypatch.setattr(_needed, "RELEASE", (2, 8))
    assert linear._dense(x).stride() == (1,) and torch.equal(linear._dense(x), x)
    monkeypatch.setattr(_needed, "RELEASE", (2, 12))
    assert linear._dense(x) is x


def test_the_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its page is tested on the pinned release alone (tests/doc)."""
    text = (ROOT / "README.md").read_text("utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {})
    assert capsys.readouterr().out.split() == ["tensor(48.)"]


@pytest.mark.wide
def test_what_a_thread_remembers_outlives_its_maker() -> None:
    """Until 2.11 PyTorch gives back a reference that it never took: the process ended by a segmentation fault."""
    ran = python(
        "import torch, hodiff\nfrom hodiff._core import _versions\n"
        "for number in range(100):\n    _versions.remember_in_thread('a test of hodiff', 2**40 + number)\n"
        "print(torch._C._get_obj_in_tls('a test of hodiff') - 2**40)\n"
        "print(*hodiff.grad(lambda m: m(torch.ones(1, 1)).sum(), torch.nn.Linear(1, 1)))"
    )
    assert ran.stdout.split() == ["99", "weight", "bias"] and ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_levels_are_left_to_that_depth(depth: int) -> None:
    for _ in range(3):
        _versions._functorch._vmap_increment_nesting(2, "same")
    _versions.leave_levels(depth)
    left = _versions.levels_entered()
    _versions.leave_levels(0)
    assert (left, _versions.levels_entered()) == (depth, 0)


def test_heads_in_groups_take_plain_operations_where_the_kernel_reads_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    from hodiff.memory import _attention

    monkeypatch.setattr(_attention, "LEAST", 0)
    given = (torch.ones(2, 4, 3, 4), torch.ones(2, 2, 3, 4), torch.ones(2, 2, 3, 4), None)
    for groups in (True, False):
        monkeypatch.setattr(_needed, "RELEASE", (2, 12) if groups else (2, 11))
        assert (_attention._prepared(given, True) is not None) == groups


def test_checkpoint_is_refused_before_213(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_needed, "RELEASE", (2, 12))
    with pytest.raises(hodiff.InputError, match=r"checkpoint= needs PyTorch 2\.13 or newer"):
        hodiff.hvp(lambda x: x.sin().sum(), X, V, checkpoint="layers.*")


def test_sharded_models_are_refused_before_213(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setattr(_needed, "RELEASE", (2, 12))
    monkeypatch.setattr(_versions, "fsdp_groups", None)  # older ones have groups of another name
    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    with group_of_one(), pytest.raises(hodiff.InputError, match=r"is sharded over processes, .* 2\.13 or newer"):
        fully_shard(model)
        hodiff.grad(lambda model: model(torch.ones(2, 3)).square().sum(), model)
