"""The wheel contains every file that the program reads at run time."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.conftest import ROOT

PACKAGES = ("model", "tasks", "orchestrator")


def data_files(package: str) -> set[Path]:
    """Return the files of a package that are not Python code, without build outputs."""
    files = (path for path in (ROOT / package).rglob("*") if path.is_file())
    return {path for path in files if path.suffix not in (".py", ".pyc")}


def test_every_data_file_is_part_of_the_wheel() -> None:
    """A new data file needs an entry in `tool.setuptools.package-data` of pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert {path for package in PACKAGES for path in data_files(package)} == packaged
