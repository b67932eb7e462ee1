"""The two ways in, and what `info` says."""

import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import torch

import hodiff
from hodiff import cli
from hodiff.__main__ import main
from tests.meta.source import ROOT, imports, library_files


def test_info_names_versions_and_devices(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert facts["torch"] == torch.__version__
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert "cpu" in facts["devices"]


def test_info_names_the_versions_of_what_extras_need(monkeypatch, capsys):
    def version(name):
        if name == "matplotlib":
            raise cli.importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(cli.importlib.metadata, "version", version)
    main(["info"])
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["matplotlib"] == "missing" and facts["scipy"] == facts["numpy"] == "1.2.3"


def test_extras_of_users_are_among_them():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {name for extra in ("scipy", "plot") for name in needed[extra]} <= {*cli.EXTRAS}


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/hodiff/__init__.py"
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert cited
    assert cited[1] == hodiff.__version__


@pytest.mark.wide
def test_module_and_script_are_the_same_program():
    command = [sys.executable, "-m", "hodiff", "info"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert f"torch          {torch.__version__}" in ran.stdout
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"hodiff": "hodiff.__main__:main"}


def test_a_folder_and_an_archive_are_run_by_the_main_in_them(monkeypatch, capsys, tmp_path):
    for name, changed in (("argv", []), ("path", [*sys.path]), ("modules", dict(sys.modules))):
        monkeypatch.setattr(sys, name, changed)
    (tmp_path / "__main__.py").write_text("import sys\nprint(__name__, *sys.argv)", "utf-8")
    archive = tmp_path / "program.zip"
    with zipfile.ZipFile(archive, "w") as written:
        written.write(tmp_path / "__main__.py", "__main__.py")
    for place in (tmp_path, archive):
        cli.run_program(str(place), ["given"], is_module=False)
        assert capsys.readouterr().out == f"__main__ {place} given\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["info", "--nonsense"]])
def test_misuse_exits_with_two_and_says_how_to_use_it(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: hodiff" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "info" in printed
    assert "tour" in printed


def test_importing_the_library_does_not_import_the_command_line():
    for path in library_files():
        if "cli" not in path.parts and path.name != "__main__.py":
            assert not [name for _, name in imports(path) if name.startswith("hodiff.cli")], path.name
