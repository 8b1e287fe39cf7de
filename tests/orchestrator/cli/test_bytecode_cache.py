"""Where torch has no bytecode beside its sources and nobody may write it there, ours is kept for the next process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT, sweep_command

IMPORTS = """
import subprocess, sys
from orchestrator.cli.bytecode_cache import keep_bytecode
keep_bytecode()
subprocess.run([sys.executable, "-c", "import torch"], check=True)
"""


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A package of that name, as some image has it."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package


def run(torch: Path, cache: Path, **variables: str) -> None:
    path = f"{torch.parent}:{ROOT}"
    subprocess.run(
        [sys.executable, "-c", IMPORTS],
        check=True,
        env=environment(PYTHONPATH=path, XDG_CACHE_HOME=str(cache), **variables),
    )


def environment(**variables: str) -> Mapping[str, str]:
    ours = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **variables}


def kept(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[0] for path in folder.rglob("torch/**/*.pyc"))


def test_bytecode_goes_to_our_cache_if_python_would_not_write_it(
    torch: Path, tmp_path: Path
) -> None:
    run(torch, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert (kept(tmp_path / "cache" / "transformer-sweep" / "bytecode"), kept(torch)) == (
        ["__init__"],
        [],
    )


@pytest.mark.parametrize("variables", [{}, {"PYTHONPYCACHEPREFIX": "elsewhere"}])
def test_bytecode_goes_where_python_is_configured_to_write_it(
    variables: dict[str, str], torch: Path, tmp_path: Path
) -> None:
    told = {name: str(tmp_path / folder) for name, folder in variables.items()}
    run(torch, tmp_path / "cache", **told)
    assert not (tmp_path / "cache").exists()
    assert kept(tmp_path / variables.get("PYTHONPYCACHEPREFIX", "site")) == ["__init__"]


def test_existing_bytecode_is_not_written_to_our_cache(torch: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "import torch"],
        check=True,
        env=environment(PYTHONPATH=str(torch.parent)),
    )
    run(torch, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert not (tmp_path / "cache").exists()


def test_no_bytecode_is_written_if_the_cache_folder_cannot_be_made(
    torch: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run(torch, tmp_path / "file", PYTHONDONTWRITEBYTECODE="1")
    assert kept(tmp_path) == []


def test_ctrl_c_during_imports_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run(
        sweep_command("--help"),
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
