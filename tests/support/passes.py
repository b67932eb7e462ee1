"""Count evaluations of a function, and runs of the reverse engine; say which of them a Jacobian takes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hodiff
from hodiff._core import _versions
from hodiff.calculus import _first


class Count:
    """Evaluations of f, and runs of the reverse engine however it was reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evaluations = self.passes = 0
        hodiff.graph.inspect(torch.ones(1, requires_grad=True).exp().sum())  # it tests itself, by passes, at first use
        _versions.prove()
        engine = torch.autograd._engine_run_backward

        def counted(*args: object, **kwargs: object) -> object:
            self.passes += 1
            return engine(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", counted)
        monkeypatch.setattr(_versions, "_run", counted)

    def of(self, f: object) -> object:
        def counted(*args: object) -> object:
            self.evaluations += 1
            return f(*args)

        return counted


@contextmanager
def by(columns: bool) -> Iterator[list[bool]]:
    """Columns wherever they are possible, or nowhere; the list says for each Jacobian whether it was made so."""
    made, before, tall = [], (_first.MANY_ROWS, _first.SMALL), _first.tall_jacobian
    _first.MANY_ROWS, _first.SMALL = (0, 0) if columns else (math.inf, math.inf)

    def watched(*args: Any, **kwargs: Any) -> Any:
        found = tall(*args, **kwargs)
        made.append(found is not None)
        return found

    _first.tall_jacobian = watched
    try:
        yield made
    finally:
        _first.MANY_ROWS, _first.SMALL = before
        _first.tall_jacobian = tall
