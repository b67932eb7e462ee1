"""`hodiff info`: versions, settings, the operations whose derivatives are missing or wrong on this PyTorch."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from hodiff._core import _settings, _versions

HELP = "print versions, devices, and which operations have no second derivative, or a wrong one, on this PyTorch"

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*\bextra *== *['\"](?P<extra>[\w-]+)['\"]")


def configure(parser: argparse.ArgumentParser) -> None:
    """This command has no options."""


def run(options: argparse.Namespace) -> int:
    """Print one line per fact, then what is known of operations; 1 where one does otherwise here than published."""
    sweep = published(torch.__version__)
    tried, others = spot_checks(sweep)
    facts = {
        "hodiff": hodiff.__version__,
        "torch": release(),
        "python": f"{platform.python_version()} ({sys.platform}, {platform.machine()})",
        "devices": ", ".join(devices()),
        "threads": f"{torch.get_num_threads()}",
        "default dtype": f"{torch.get_default_dtype()}".removeprefix("torch."),
        **{f"extra {extra!r}": state for extra, state in extras().items()},
        "operations": _swept(sweep),
        "tried here": f"{tried} operations, {tried - len(others)} as published",
    }
    width = max(map(len, facts)) + 2
    for name, fact in facts.items():
        print(f"{name:<{width}}{fact}")
    for other in others:
        print(f"{'':<{width}}{other}")
    print()
    for line in lines(sweep):
        print(line)
    return 1 if others else 0


def release() -> str:
    """The release of PyTorch, and whether it is one that was tested."""
    newer = _versions.newer()
    return f"{torch.__version__}: {newer}" if newer else torch.__version__


def _swept(sweep: Sweep) -> str:
    """Which sweep is shown."""
    exact = torch.__version__.partition("+")[0] == sweep.release
    nearest = "" if exact else " (the nearest release that was swept)"
    return f"{sweep.operations} swept with torch {sweep.release}, {sweep.samples} samples{nearest}"


def devices() -> list[str]:
    """The devices that PyTorch can use here."""
    described = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    described += [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        described.append("mps")
    return described


def extras() -> dict[str, str]:
    """For each extra of the package, whether it is installed, or what of it is missing."""
    try:
        requirements = importlib.metadata.requires("hodiff") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    needed: dict[str, list[str]] = {}
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and match["name"] != "hodiff":  # an extra may be made of others
            needed.setdefault(match["extra"], []).append(match["name"])
    return {extra: _state(names) for extra, names in sorted(needed.items())}


def _state(names: list[str]) -> str:
    missing = [name for name in names if not _installed(name)]
    return f"missing {', '.join(missing)}" if missing else "installed"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- what the published sweep over PyTorch's operations says of this release, and whether it is so here ---------------
# `operations.json` is written by the sweep (`python -m tests.torch_ops`);
# docs/explain/operations.md is its page.


WIDTH = 92


class Sweep(NamedTuple):
    """What was found with one release.

    Attributes:
        release: Of PyTorch.
        operations: How many were judged.
        samples: Of them all.
        refused: Operation -> the order from which hodiff refuses it, and why.
        defined: Operation -> why its gradient is not a derivative, on purpose.
        wrong: Operation -> the routes of plain PyTorch that are wrong silently, and how
            wrong.
    """

    release: str
    operations: int
    samples: int
    refused: dict[str, dict[str, str]]
    defined: dict[str, str]
    wrong: dict[str, dict[str, str]]


def published(release: str) -> Sweep:
    """The sweep of a release, or of the nearest one that was published; of two, the newer."""
    text = resources.files("hodiff.cli").joinpath("operations.json").read_text(encoding="utf-8")
    values: dict[str, dict[str, Any]] = json.loads(text)
    nearest = min(values, key=lambda name: (abs(_number(name) - _number(release)), -_number(name)))
    return Sweep(nearest, **values[nearest])


def _number(release: str) -> int:
    """A version as one number: 2.13.1 as 21301."""
    major, minor, patch = [*map(int, re.findall(r"\d+", release.partition("+")[0])), 0, 0][:3]
    return 10_000 * major + 100 * minor + patch


# --- here


class Spot(NamedTuple):
    """One operation, tried here: a function, a point, the order, and what the sweep calls it."""

    name: str
    order: int
    function: Callable[[Tensor], Tensor]
    point: Tensor


def spots() -> list[Spot]:
    """Operations with a history, the cheapest of each kind."""
    x = torch.linspace(-1.3, 1.7, 12, dtype=torch.float64).sin().reshape(4, 3)
    index, weight = torch.tensor([[0, 2], [1, 0]]), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    norm = torch._weight_norm  # pyright: ignore[reportPrivateImportUsage]
    return [
        Spot("cdist", 2, lambda x: torch.cdist(x, x.cos() + 3), x),
        Spot("nn.functional.pdist", 2, F.pdist, x),
        Spot("nn.functional.embedding_bag", 2, lambda x: F.embedding_bag(index, x), x),
        Spot("nn.functional.multi_margin_loss", 2, lambda x: F.multi_margin_loss(x, index[0], p=2), x[:2]),
        Spot(
            "nn.functional.ctc_loss",
            2,
            lambda x: F.ctc_loss(x[:, None].log_softmax(-1), index[1:, :1], torch.tensor([4]), torch.tensor([1])),
            x,
        ),
        Spot(
            "_segment_reduce lengths",
            2,
            lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([1, 3]), unsafe=True),
            x,
        ),
        Spot(
            "sparse_coo_tensor of values",
            2,
            lambda x: torch.sparse_coo_tensor(index, x[0, :2].square(), (3, 3), check_invariants=False).to_dense(),
            x,
        ),
        Spot("_weight_norm", 2, lambda x: norm(x, x[:, :1].exp(), 0), x),
        Spot("nn.functional.layer_norm", 3, lambda x: F.layer_norm(x, (3,), weight), x),
        Spot("nn.functional.group_norm", 3, lambda x: F.group_norm(x, 1, weight), x),
        Spot("linalg.inv", 3, lambda x: torch.linalg.inv(x[:3] + 2 * torch.eye(3, dtype=x.dtype)), x),
    ]


def here(spot: Spot) -> str:
    """What hodiff, and what plain reverse passes, do with an operation on this machine."""
    loss = lambda z: (spot.function(z).sin() + spot.function(z).square()).sum()  # noqa: E731
    v = torch.cos(torch.arange(spot.point.numel(), dtype=spot.point.dtype)).reshape(spot.point.shape)
    try:
        ours = hodiff.hvp(loss, spot.point, v)
        if spot.order > 2:
            ours = hodiff.grad(lambda z: (hodiff.hvp(loss, z, v) * v).sum(), spot.point)
    except hodiff.GraphError:
        return "refused"
    try:
        with _settings.grad_mode(True):
            plain = _by_hand(loss, spot.point, v, spot.order)
    except RuntimeError:  # of PyTorch's own, which says something at least
        return "right"
    error = float((ours - plain).abs().max() / ours.abs().max())
    return "right" if error < 1e-7 else "wrong in plain PyTorch"


def _by_hand(loss: Callable[[Tensor], Tensor], point: Tensor, v: Tensor, order: int) -> Tensor:
    """The derivative by `autograd.grad` again and again."""
    leaf = point.clone().requires_grad_()
    value, derivative = loss(leaf), leaf
    for number in range(order):
        (gradient,) = _versions.public([value], [leaf], [None], keep=True, build=number < order - 1)
        derivative = torch.zeros_like(leaf) if gradient is None else gradient
        value = (derivative * v).sum()
    return derivative


def expected(spot: Spot, sweep: Sweep) -> str:
    """What the sweep says of it."""
    refused = sweep.refused.get(spot.name)
    if refused is not None and int(refused["order"]) <= spot.order:
        return "refused"
    route = {2: "autograd.grad twice", 3: "autograd.grad thrice"}[spot.order]
    return "wrong in plain PyTorch" if route in sweep.wrong.get(spot.name, {}) else "right"


# --- in words


def lines(sweep: Sweep) -> Iterator[str]:
    """What hodiff refuses and why; where plain PyTorch is wrong."""
    yield "operations without a further derivative, or without a right one (hodiff refuses them):"
    yield from _grouped({name: (f"order {each['order']}", each["why"]) for name, each in sweep.refused.items()})
    yield ""
    yield "operations whose gradient is not a derivative by PyTorch's definition (hodiff passes it on):"
    yield from _grouped({name: ("", why) for name, why in sweep.defined.items()})
    yield ""
    yield "operations with a silently wrong derivative in plain PyTorch (hodiff is right, or refuses):"
    routes: dict[str, list[str]] = {}
    for name, result in sorted(sweep.wrong.items()):
        for route in result:
            routes.setdefault(route, []).append(name)
    for route, names in sorted(routes.items()):
        yield from _wrapped(route, ", ".join(names))


def _grouped(values: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Each reason once, with the operations that it is about."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, reason in sorted(values.items()):
        reasons.setdefault(reason, []).append(name)
    for (head, why), names in sorted(reasons.items()):
        yield from _wrapped(head, f"{', '.join(names)}: {why}")


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(f"  {head:<22}{text}", WIDTH, subsequent_indent=" " * 24, break_on_hyphens=False)


def spot_checks(sweep: Sweep) -> tuple[int, list[str]]:
    """How many operations were tried here, and those that do otherwise than published."""
    tried = [(spot, here(spot), expected(spot, sweep)) for spot in spots()]
    others = [
        f"{spot.name}, order {spot.order}: {result} (published: {was})" for spot, result, was in tried if result != was
    ]
    return len(tried), others
