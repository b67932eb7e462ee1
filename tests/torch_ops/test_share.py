"""A fixed share of the sweep over PyTorch's operations (`python -m tests.torch_ops` runs the whole), and its page."""

from pathlib import Path

import pytest
import torch

import hodiff
from tests.support.differences import estimated
from tests.support.passes import by
from tests.support.releases import since
from tests.torch_ops import page, results, sweep
from tests.torch_ops.database import Problem, names, problems
from tests.torch_ops.judge import compare
from tests.torch_ops.more import MORE
from tests.torch_ops.routes import ROUTES

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

# One of each kind of rule, and what has a history. Two samples of each; all of the sweep's have some seconds to spend.
SHARE = (
    "add", "atan2", "cat", "cdist", "cumprod", "div no_rounding_mode", "einsum", "exp", "fft.rfft", "gather",
    "index_put", "linalg.cholesky", "linalg.det", "linalg.solve", "linalg.vector_norm", "log_softmax", "logcumsumexp",
    "masked.softmax", "matmul", "max reduction_with_dim", "nn.functional.batch_norm", "nn.functional.conv2d",
    "nn.functional.cross_entropy", "nn.functional.embedding_bag", "nn.functional.gelu", "nn.functional.group_norm",
    "nn.functional.layer_norm", "nn.functional.pdist", "nn.functional.scaled_dot_product_attention",
    "nn.functional.softplus", "norm", "pow", "prod", "scatter_add", "split", "sort", "special.ndtr",
    "tril", "var", "where", *MORE,
)  # fmt: skip
SAMPLES = 2
CHUNKED = since((2, 13), "there is no linear_cross_entropy")
ALLOWED = ("right", "refused", "told", "unsure", "defined")

OURS = {route.name for route in ROUTES if route.ours}
RELEASE = torch.__version__.partition("+")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [pytest.param(n, marks=CHUNKED if n.endswith("chunked") else ()) for n in SHARE])
def test_right_or_refused(name: str) -> None:
    samples = sweep.of_operation(name, SAMPLES)
    assert any(samples), "no sample: the share is of operations that are judged"
    told = results.read(RELEASE)["operations"].get(name, {}) if RELEASE in results.releases() else {}
    for verdicts in samples:
        for route in OURS & verdicts.keys():
            kind, page_says = results.kind(verdicts[route]), told.get(route, "")
            assert kind in ALLOWED, f"{route}: {verdicts[route]}"
            # Of Taylor mode a refusal is the operation's, whatever the sample.
            stale = kind == "right" and route.startswith("jet") and page_says.startswith("refused: Taylor")
            stale &= "(in " not in page_says
            assert not stale, f"{route} is right, and the page says {page_says}: python -m tests.torch_ops"
    assert any(results.kind(v) == "right" for verdicts in samples for v in verdicts.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARE)
def test_columns_of_a_jacobian_are_its_rows(name: str) -> None:
    """Or there are no columns: PyTorch has no second derivative, or something is not finite."""
    for problem in problems(name, SAMPLES):
        columns, rows = (one_way(problem, columns) for columns in (True, False))
        if isinstance(rows, str):
            assert columns == rows and name in WRONG_AT_ONCE
            continue
        size = float(rows.abs().nan_to_num().sum())
        torch.testing.assert_close(columns, rows, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


WRONG_AT_ONCE = {"as_strided_scatter"}
"""Operations whose first gradient is wrong in PyTorch already, and refused."""


def one_way(problem: Problem, columns: bool) -> torch.Tensor | str:
    with by(columns=columns):
        try:
            return hodiff.jacobian(problem.outputs, problem.x)
        except hodiff.GraphError as error:
            return f"{error}"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_columns_of_any_jacobian_are_its_rows() -> None:
    failed = []
    for name in sorted(set(names()) - set(SHARE)):
        try:
            test_columns_of_a_jacobian_are_its_rows(name)
        except Exception as error:  # the others are looked at, too
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.table(plain=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not RELEASE.startswith("2.13."), reason="other releases' results come from fewer samples")
@pytest.mark.parametrize("name", ["linalg.solve", "nn.functional.layer_norm", *MORE])
def test_plain_pytorch_is_wrong_where_the_page_says_so(name: str) -> None:
    """And nowhere else; so that a page that went stale is seen, and a check that sees nothing, too."""
    published = results.read(RELEASE)["operations"][name]
    found = results.digest({name: sweep.of_operation(name, 6)})[name]
    kinds = lambda verdicts: {r: results.kind(v) for r, v in verdicts.items() if r != "samples"}
    assert kinds(found) == kinds(published)
    assert "wrong" in kinds(found).values() or "refused" in kinds(found).values()


def test_published_results_hold_no_wrong_number_of_ours() -> None:
    assert results.releases(), "nothing is published"
    for release in results.releases():
        for name, routes in results.read(release)["operations"].items():
            for route in OURS & routes.keys():
                kind = results.kind(routes[route])
                last_pass_is_the_callers = route.startswith("backward of")  # and so is PyTorch's error in it
                assert kind in ALLOWED or kind == "none" or (kind == "raises" and last_pass_is_the_callers), name


def test_the_page_is_that_of_the_results() -> None:
    for path, text in ((page.PAGE, page.text()), (page.DATA, page.data())):
        assert path.read_text("utf-8") == text, f"{path.name} is stale: python -m tests.torch_ops RESULTS --publish"


def test_the_tables_are_written_as_they_are_read() -> None:
    for name, text in results.tables({release: results.read(release) for release in results.releases()}).items():
        assert (results.FOLDER / name).read_text("utf-8") == text, name


def test_a_sweep_is_read_as_it_was_written_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    first = {"b": [{"hvp": "wrong 1e-01", "jvp": "right"}], "a": [{"hvp": "refused: why"}, {"hvp": "refused: why"}]}
    later = {"a": [{"hvp": "refused: why"}], "c": [{"hvp": "right"}]}
    for release, found in ("2.10.0", later), ("2.9.1", later), ("2.9.1", first):
        results.write(release, found)
    assert results.releases() == ["2.9.1", "2.10.0"]
    for release, found in ("2.9.1", first), ("2.10.0", later):
        assert results.read(release)["operations"] == results.digest(found)
    assert results.read("2.9.1")["hodiff"] == {"refused": 2, "right": 1, "wrong": 1}


# --- the judge ------------------------------------------------------------------------------------------------------


def test_a_kink_is_no_oracle() -> None:
    """Its central difference converges, to a number that is not a derivative."""
    for kinked in (torch.abs, torch.relu, lambda t: torch.maximum(t, -3 * t)):
        truth = estimated(lambda t, f=kinked: f(torch.tensor([t], dtype=torch.float64)) + 5)
        assert compare(torch.zeros(1, dtype=torch.float64), truth, told=False) == "unsure"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e8])
def test_the_judge_sees_one_part_in_ten_thousand(scale: float) -> None:
    x = torch.tensor([0.3, -0.8], dtype=torch.float64)
    truth = estimated(lambda t: scale * torch.sin(x + t))
    right = scale * torch.cos(x)
    assert truth.error < 1e-8 * scale
    assert compare(right, truth, told=False) == "right"
    if scale >= 1:  # below, what differs is a millionth of nothing
        assert compare(right * (1 + 1e-4), truth, told=False).startswith("wrong")
    assert compare(right * torch.nan, truth, told=False) == "wrong, not finite"
    assert compare(right * torch.nan, truth, told=True) == "told"
    assert compare(right[:1], truth, told=False).startswith("wrong shape")


def test_samples_are_merged_to_the_worst() -> None:
    merged = results.merged
    assert merged([]) == "none"
    assert merged(["right", "unsure"]) == "right"
    assert merged(["unsure"]) == "unsure"
    assert merged(["right", "wrong 1e-03", "wrong 2e+00"]) == "wrong 2e+00 (in 2 of 3)"
    assert merged(["refused: why", "right"]) == "refused: why (in 1 of 2)"
