"""The wheel contains every file that the program reads, and the citation names its version."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.conftest import ROOT

PACKAGES = ("model", "tasks", "orchestrator")


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def data_files(package: str) -> set[Path]:
    """Return the files of a package that are not Python code, without build outputs."""
    files = (path for path in (ROOT / package).rglob("*") if path.is_file())
    # A file of bytecode has another suffix while it is written.
    return {path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts}


def test_every_data_file_is_part_of_the_wheel() -> None:
    """A new data file needs an entry in `tool.setuptools.package-data` of pyproject.toml."""
    packaged = {
        path
        for package, patterns in settings()["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    assert {path for package in PACKAGES for path in data_files(package)} == packaged


def test_the_citation_names_the_program_and_its_version() -> None:
    citation = YAML(typ="safe").load(ROOT / "CITATION.cff")
    project = settings()["project"]
    assert (citation["title"], citation["version"]) == (project["name"], project["version"])
    # What version 1.2.0 of the format requires.
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
