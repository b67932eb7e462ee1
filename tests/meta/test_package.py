"""The sdist holds what builds the wheel, and the wheel is whole: installed where no repository is, it runs the tour.

Needs hatchling (the build backend), with which CI runs this file: `pytest --all tests/meta/test_package.py`.
"""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import hodiff
from tests.doc.snippets import ROOT

pytestmark = pytest.mark.nightly
pytest.importorskip("hatchling", reason="pip install hatchling")


def run(*command, cwd, **more):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    how = {"capture_output": True, "text": True, "env": environment, **more}
    done = subprocess.run(command, cwd=cwd, check=False, timeout=1200, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is built from it, not from the repository."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out), cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(out, filter="data")
    unpacked = out / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out), cwd=unpacked)
    (wheel,) = out.glob("*.whl")
    return unpacked, wheel


def test_the_sdist_holds_what_its_readers_need(built):
    unpacked, _ = built
    for name in (
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "constraints.txt",
        "mkdocs.yml",
        "docs/index.md",
        "tests/conftest.py",
    ):
        assert (unpacked / name).is_file(), name
    assert not list(unpacked.rglob("__pycache__"))


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert names == {name for name in files if "__pycache__" not in name}
    assert "hodiff/py.typed" in names


def test_the_tour_runs_where_only_the_wheel_is(built, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", "clean", cwd=tmp_path)
    python = tmp_path / "clean" / "bin" / "python"
    (packages,) = (tmp_path / "clean").glob("lib/python*/site-packages")
    # torch and tqdm are lent; what is beside them is not in the way, as a .pth in there is not read from here.
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", built[1])
    run(sys.executable, *map(str, install), cwd=tmp_path)
    where = run(python, "-c", "import hodiff; print(hodiff.__version__, hodiff.__file__)", cwd=tmp_path).split()
    assert where[0] == hodiff.__version__
    assert Path(where[1]).is_relative_to(tmp_path)
    tour = run(tmp_path / "clean" / "bin" / "hodiff", "tour", cwd=tmp_path)
    assert "http" not in tour
    assert not re.findall(r"\b(?:docs|tests)/", tour)
