"""What `hodiff info` says of operations: as published, tried here, and loud where the two differ."""

import json
import re

import pytest
import torch

import hodiff
from hodiff.__main__ import main
from hodiff.cli import _info
from tests.torch_ops import results, shipped


def test_what_is_shipped_is_what_was_found():
    assert shipped.FILE.read_text("utf-8") == shipped.text(), "run: python -m tests.torch_ops RESULTS --publish"


@pytest.mark.parametrize(
    ("installed", "shown"),
    [
        ("2.13.0", "2.13.0"),
        ("2.13.1+cpu", "2.13.0"),
        ("2.14.0", "2.15.0"),  # between two: the newer
        ("2.14.1+cu130", "2.15.0"),
        ("2.15.0a0+git1234", "2.15.0"),
        ("2.16.0", "2.15.0"),
        ("2.8.0+cu128", "2.8.0"),
        ("2.9.0", "2.9.1"),
        ("2.10.0", "2.10.0"),
        ("2.11.0+cu130", "2.11.0"),
        ("2.12.1", "2.12.1"),
        ("3.0", "2.15.0"),
    ],
)
def test_the_nearest_release_is_shown(installed, shown):
    assert _info.published(installed).release == shown


def test_a_refusal_counts_from_its_order_on():
    second, third = (next(spot for spot in _info.spots() if spot.order == order) for order in (2, 3))
    refused = {spot.name: {"order": "3", "why": "here"} for spot in (second, third)}
    sweep = _info.Sweep("2.13.0", 2, 2, refused, {}, {})
    assert [_info.expected(spot, sweep) for spot in (second, third)] == ["right", "refused"]


def test_what_the_sweep_of_213_says():
    sweep = _info.published("2.13.0")
    assert sweep.operations == 536
    assert sweep.refused["cdist"]["order"] == "2"
    assert "use_mm_for_euclid_dist" in sweep.refused["cdist"]["why"]
    assert sweep.refused["to_sparse"]["order"] == "3"
    assert "nn.functional.layer_norm" not in sweep.refused  # written out: right at every order
    assert {"autograd.grad thrice", "func.hessian"} <= set(sweep.wrong["nn.functional.layer_norm"])
    assert "autograd.grad twice" not in sweep.wrong["nn.functional.layer_norm"]
    assert "nn.functional.max_unpool2d" in sweep.defined
    assert "nn.functional.max_unpool2d" not in sweep.wrong
    assert "normal" in sweep.defined
    assert "linalg.inv" not in {**sweep.refused, **sweep.wrong, **sweep.defined}
    assert "cdist" not in _info.published("2.15.0").refused


def test_no_operation_that_is_wrong_is_left_out():
    for release in results.releases():
        sweep = _info.published(release)
        for name, routes in results.read(release)["operations"].items():
            if any(verdict.startswith("wrong") for verdict in routes.values()):
                assert name in {**sweep.wrong, **sweep.defined}, name
            if any(verdict.startswith("refused: PyTorch has no second") for verdict in routes.values()):
                refused = {**sweep.refused, **sweep.wrong}
                assert name in refused or "tensor" in str(routes), name


def test_spots_are_as_published_here():
    sweep = _info.published(torch.__version__)
    found = {spot.name: _info.here(spot) for spot in _info.spots()}
    assert {spot.name: _info.expected(spot, sweep) for spot in _info.spots()} == found
    assert set(found.values()) == {"right", "refused", "wrong in plain PyTorch"}
    assert found["linalg.inv"] == found["nn.functional.group_norm"] == "right"
    assert found["nn.functional.layer_norm"] == found["_weight_norm"] == "wrong in plain PyTorch"
    assert _info.spot_checks(sweep) == (11, [])


@pytest.mark.parametrize("off", [-1e-3, 1e-3])
def test_plain_pytorch_may_be_off_to_either_side(off, monkeypatch):
    spot = next(spot for spot in _info.spots() if spot.name == "linalg.inv")
    plain = _info._by_hand
    monkeypatch.setattr(_info, "_by_hand", lambda *given: plain(*given) + off)
    assert _info.here(spot) == "wrong in plain PyTorch"


@pytest.mark.parametrize(("off", "found"), [(1e-3, "wrong in plain PyTorch"), (1e-9, "right")])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_it_is_off_by_a_share(size, off, found, monkeypatch):
    spot = _info.Spot("exp", 2, lambda x: size * x.exp(), torch.ones(3, dtype=torch.float64))
    plain = _info._by_hand
    monkeypatch.setattr(_info, "_by_hand", lambda *given: plain(*given) * (1 + off))
    assert _info.here(spot) == found


def test_spots_differ_from_a_sweep_of_another_release(monkeypatch, capsys):
    sweep = _info.published(torch.__version__)
    refused = {name: why for name, why in sweep.refused.items() if name != "nn.functional.pdist"}
    wrong = {**sweep.wrong, "linalg.inv": {"autograd.grad thrice": "1e-01"}}
    monkeypatch.setattr(_info, "published", lambda release: sweep._replace(refused=refused, wrong=wrong))
    assert main(["info"]) == 1
    printed = capsys.readouterr().out
    assert "11 operations, 9 as published" in printed
    assert "nn.functional.pdist, order 2: refused (published: right)" in printed
    assert "linalg.inv, order 3: right (published: wrong in plain PyTorch)" in printed


def test_a_nearest_release_is_said_to_be_one(monkeypatch):
    sweep = _info.published("2.13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert _info._swept(sweep) == f"536 swept with torch 2.13.0, {sweep.samples} samples"
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    assert _info._swept(sweep).endswith("(the nearest release that was swept)")


def test_every_operation_is_printed_with_its_reason(capsys):
    main(["info"])
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    sweep = _info.published(torch.__version__)
    for name, found in sweep.refused.items():
        assert name in printed
        assert re.sub(r"\s+", " ", found["why"]) in printed
    for name, routes in sweep.wrong.items():
        assert name in printed
        for route in routes:
            assert route in printed
    for name, why in sweep.defined.items():
        assert name in printed
        assert why in printed
    assert all(len(line) <= _info.WIDTH for line in _info.lines(sweep))


def test_words_are_not_parted():
    text = "second-order fused_ops.of-any kind " * 9
    for indent in range(12):
        lines = _info._wrapped("x" * indent, text)
        assert " ".join(lines).split() == ["x" * indent, *text.split()][not indent :]
        assert all(line[:24].isspace() and not line[24].isspace() for line in lines[1:])


def test_spots_change_nothing():
    state = torch.get_rng_state()
    _info.spot_checks(_info.published("2.13.0"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert _info.spot_checks(_info.published(torch.__version__)) == (11, [])


def test_the_file_is_read_from_the_package():
    assert json.loads(shipped.FILE.read_text("utf-8")).keys() == set(results.releases())
    assert shipped.FILE.parent == type(shipped.FILE)(hodiff.__file__).parent / "cli"
