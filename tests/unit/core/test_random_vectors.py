"""Random vectors: one place draws them, for penalties, fields and estimators alike."""

import ast

import pytest
import torch

import hodiff
from hodiff._core import _vectors
from hodiff._core._vectors import draw
from tests.meta.source import library_files, module_name, tree


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_vectors_have_the_identity_as_covariance(probes):
    v = draw((20000, 2, 3, 2), torch.zeros(0, dtype=torch.float64), probes, None)
    assert v.shape == (20000, 2, 3, 2)
    rows = v.reshape(20000, 12)
    torch.testing.assert_close(rows.T @ rows / 20000, torch.eye(12, dtype=torch.float64), atol=0.05, rtol=0)
    assert bool((v.abs() == 1).all()) == (probes == "rademacher")


@pytest.mark.parametrize("probes", ["rademacher", "gaussian"])
def test_a_seed_gives_the_same_vectors_everywhere(probes):
    """What a field, a penalty and an estimator draw from one seed are the same numbers."""
    x, A = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    seeded = lambda: torch.Generator().manual_seed(5)
    v = draw((2, 4, 3), x, probes, seeded())
    options = {"samples": 2, "probes": probes}
    found = hodiff.divergence(lambda x: x @ A, x, generator=seeded(), **options)
    torch.testing.assert_close(found.value, torch.einsum("sni,ji,snj->sn", v, A.T, v).mean(0))
    penalty = hodiff.jacobian_penalty(
        lambda x: x @ A, x, generator=seeded(), weight=2.0, create_graph=False, reduction="none", **options
    )
    torch.testing.assert_close(penalty, (v @ A.T).square().sum(-1).mean(0))


def test_nobody_else_draws_them():
    """Points between samples, labels, and points beside a point are other things; signs and normals are drawn once."""
    elsewhere = {
        "hodiff._core._vectors",
        "hodiff._core._independence",
        "hodiff.curvature._process_group",  # the factors of a checksum, a seed for all processes
        "hodiff.sharded._layout",  # a seed for all processes
        "hodiff.steps._backends",  # the name of an operation, for which it has another
        "hodiff.cli._tour",
    }
    found = {
        f"{module_name(path)}:{node.lineno}"
        for path in library_files()
        if module_name(path) not in elsewhere
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("randn", "randn_like", "normal_", "bernoulli_", "randint")
    }
    assert not found


def test_half_precision_is_drawn_in_single():
    like = torch.empty((), dtype=torch.float16)
    for law in ("gaussian", "rademacher"):
        given = [torch.Generator().manual_seed(3) for _ in range(2)]
        half = _vectors.draw((50,), like, law, given[0])
        single = _vectors.draw((50,), like.float(), law, given[1])
        assert torch.equal(half, single.half())


@pytest.mark.parametrize("count", [5, 2**12, 2**12 + 1])
def test_generic_numbers_are_the_same_whoever_wrote_into_those_given_before(count):
    """The same whatever the default dtype is, and however many are asked for."""
    expected = 1 + torch.rand(2**13, generator=torch.Generator().manual_seed(0), dtype=torch.float32)[:count]
    _vectors.generic(count).zero_()
    assert torch.equal(_vectors.generic(count), expected)
