"""How records look: one line, a sentence, a table, a picture."""

import re

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import hodiff
import hodiff.plotting
from hodiff.curvature import _records

mpl.use("Agg")
A = hodiff.MatrixOperator(torch.arange(1.0, 301.0, dtype=torch.float64))


def generator():
    return torch.Generator().manual_seed(0)


def indefinite():
    with pytest.warns(hodiff.ConvergenceWarning, match="negative or zero curvature"):
        return hodiff.solve(hodiff.MatrixOperator(torch.tensor([1.0, -1.0])), torch.ones(2))


def fitted(steps):
    x = torch.ones(2, dtype=torch.float64)
    optimizer = hodiff.LevenbergMarquardt(lambda x: 2 * x - 1, x)
    for _ in range(steps):
        optimizer.step()
    return optimizer.last


CASES = {
    "least squares": (
        lambda: fitted(1),
        r"LeastSquaresRecord\(loss 1, fell by 1, damping 1e-30, length 1, 1 evaluation\)",
    ),
    "least squares, converged": (
        lambda: fitted(20),
        r"LeastSquaresRecord\(loss \S+, converged, .*",
    ),
    "trace": (
        lambda: hodiff.trace(A, samples=4, generator=generator()),
        r"TraceRecord\(4\.515e\+04 ± 0, 4 products, no tolerance asked\)",
    ),
    "trace, gaussian": (
        lambda: hodiff.trace(A, samples=100, probes="gaussian", rtol=0.5, generator=generator()),
        r"TraceRecord\(4\.\d+e\+04 ± \d+(\.\d)?, 16 products, converged\)",
    ),
    "trace, one": (
        lambda: hodiff.trace(A, vectors=torch.ones(300, dtype=torch.float64)),
        r"TraceRecord\(4\.515e\+04, 1 product, no tolerance asked\)",
    ),
    "diagonal": (
        lambda: hodiff.diagonal(A, samples=4, generator=generator()),
        r"DiagonalRecord\(300, ± 0 at most, by vectors, 4 products, no tolerance asked\)",
    ),
    "eigsh": (
        lambda: hodiff.eigsh(A, 4, generator=generator()),
        r"EigenRecord\(300, 299, 298, \.\.\. \(4\), residual \d[-.e\d]+, \d+ products, converged\)",
    ),
    "density": (
        lambda: hodiff.spectral_density(A, samples=4, steps=20, probes="gaussian", generator=generator()),
        r"DensityRecord\(4x20 nodes in \[1\.\d+, 299\.\d+\], width 5\.\d+, 80 products\)",
    ),
    "density, exact": (
        lambda: hodiff.spectral_density(A, samples=10, steps=50),
        r"DensityRecord\(300 eigenvalues in \[1, 300\], width 5\.98, \d+ products\)",
    ),
    "solve": (
        lambda: hodiff.solve(A, torch.ones(300, dtype=torch.float64)),
        r"SolveRecord\(300, residual \d[-.e\d]+, \d+ products, converged\)",
    ),
    "solve, some steps": (
        lambda: hodiff.solve(A, torch.ones(300, dtype=torch.float64), iterations=3),
        r"SolveRecord\(300, residual 0\.\d+, 3 products, iterations\)",
    ),
    "solve, indefinite": (
        indefinite,
        r"SolveRecord\(2, residual \d\.?\d*, \d products, negative curvature\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_line_and_a_table(case):
    make, line = CASES[case]
    record = make()
    assert re.fullmatch(line, repr(record)), repr(record)
    with pytest.raises(
        TypeError, match=rf"{type(record).__name__} is not an array: it is a record with fields \.\w+, "
    ):
        np.asarray(record)
    table = record._repr_html_()
    assert table.count("<tr>") == len(record._facts()) and "<caption>" in table and "<script" not in table


def test_every_record_is_shown():
    from hodiff.curvature import _data_operator, _records
    from hodiff.curvature._records import Shown

    records = {value for name, value in {**vars(_records), **vars(_data_operator)}.items() if name.endswith("Record")}
    assert records == {type(make()) for make, _ in CASES.values()}
    assert all(issubclass(record, Shown) for record in records)


# --- pictures


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def test_a_density_is_drawn_with_its_band(axes):
    record = hodiff.spectral_density(A, samples=4, steps=20, generator=generator())
    assert record.plot(axes) is axes
    (line,) = axes.get_lines()
    drawn = torch.tensor(line.get_ydata())
    torch.testing.assert_close(drawn, record.value.clamp(min=1e-6 * float(record.value.max())))
    assert len(axes.collections) == 1 and axes.get_yscale() == "log"
    exact = hodiff.spectral_density(A, samples=10, steps=50)
    before = len(axes.collections)
    exact.plot(axes)
    assert len(axes.collections) == before  # an exact one has no band


def test_eigenvalues_are_drawn(axes):
    record = hodiff.eigsh(A, 3, generator=generator())
    record.plot(axes)
    assert axes.get_lines()[0].get_ydata() == pytest.approx([300, 299, 298])


def test_convergence_of_a_solution(axes):
    seen = []
    hodiff.solve(A, torch.ones(300, dtype=torch.float64), callback=seen.append)
    hodiff.plotting.convergence(seen, axes=axes, label="CG")
    assert axes.get_lines()[0].get_ydata() == pytest.approx([record.residual for record in seen])
    assert axes.get_lines()[0].get_xdata() == pytest.approx([record.products for record in seen])
    assert axes.get_legend().get_texts()[0].get_text() == "CG"


def test_convergence_of_eigenvalues_and_a_trace(axes):
    seen = []
    hodiff.eigsh(A, 2, generator=generator(), callback=seen.append)
    hodiff.plotting.convergence(seen, axes=axes)
    assert axes.get_lines()[0].get_ydata() == pytest.approx([max(record.residual.tolist()) for record in seen])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("products", "residual")
    traces = []
    hodiff.trace(A, samples=64, probes="gaussian", generator=generator(), callback=traces.append)
    other = hodiff.plotting.convergence(traces)
    assert other.get_lines()[0].get_ydata() == pytest.approx([float(record.value) for record in traces])
    assert len(other.collections) == 1 and other.get_ylabel() == "estimate ± 2 standard errors"
    plt.close(other.figure)


def test_the_style_in_force_decides_the_colors():
    with plt.style.context("dark_background"):
        axes = hodiff.eigsh(A, 3, generator=generator()).plot()
        assert axes.get_facecolor()[:3] == (0, 0, 0)
        assert axes.xaxis.label.get_color() == "white"
        plt.close(axes.figure)


@pytest.mark.parametrize("wrong", [[], None, 3, [object()], [hodiff.diagonal(A, samples=4)]])
def test_nothing_to_draw(wrong):
    with pytest.raises(hodiff.InputError, match=r"expected a list of the records|no convergence history"):
        hodiff.plotting.convergence(wrong)


def test_without_matplotlib(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(_records.MissingMatplotlib, match=r"pip install matplotlib\.$"):
        hodiff.eigsh(A, 1).plot()
