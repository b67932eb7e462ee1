"""What tests of `hodiff explain` share."""

import sys

import pytest


@pytest.fixture
def process(monkeypatch):
    """`hodiff explain` sets up a process for a program; a test has one to give back."""
    monkeypatch.setattr(sys, "argv", ["hodiff"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
