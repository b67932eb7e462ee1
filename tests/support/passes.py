"""Count evaluations of a function, and runs of the reverse engine."""

import pytest
import torch

import hodiff
from hodiff._core import _engine


class Count:
    """Evaluations of f, and runs of the reverse engine however it was reached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.evaluations = self.passes = 0
        hodiff.graph.inspect(torch.ones(1, requires_grad=True).exp().sum())  # it tests itself, by passes, at first use
        engine = torch.autograd._engine_run_backward

        def counted(*args: object, **kwargs: object) -> object:
            self.passes += 1
            return engine(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", counted)
        monkeypatch.setattr(_engine, "_run", counted)

    def of(self, f: object) -> object:
        def counted(*args: object) -> object:
            self.evaluations += 1
            return f(*args)

        return counted
