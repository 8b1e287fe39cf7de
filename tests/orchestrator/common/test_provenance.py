"""Tests of the digest that identifies the code that measures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.common.provenance import PACKAGES, SOURCE_ROOT, describe_program, program_source

PRINT_SOURCE = (
    "from orchestrator.common.provenance import git_commit, program_source\n"
    "print(program_source(), git_commit())"
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(
            SOURCE_ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def source_of(copy: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_SOURCE],
        cwd=copy,
        env={"PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    return done.stdout.split()[0] if done.returncode == 0 else done.stderr


def test_the_digest_does_not_depend_on_the_folder(copy: Path) -> None:
    assert source_of(copy) == program_source()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tasks/train_step.py", True),
        ("model/transformer.py", True),
        ("orchestrator/execution/measurement.py", True),
        ("orchestrator/report/tables/registry.py", False),
        ("orchestrator/analysis/cells.py", False),
        ("orchestrator/cli/main.py", False),
    ],
)
def test_the_digest_changes_with_code_that_measures(copy: Path, file: str, changes: bool) -> None:
    (copy / file).write_text((copy / file).read_text() + "\n# changed\n")
    assert (source_of(copy) != program_source()) == changes


def test_the_program_source_changes_when_a_file_is_added(copy: Path) -> None:
    (copy / "model" / "another.py").write_text((copy / "model" / "__init__.py").read_text())
    assert source_of(copy) != program_source()


def test_the_digest_ignores_files_of_editors(copy: Path) -> None:
    (copy / "tasks" / ".ipynb_checkpoints").mkdir()
    (copy / "tasks" / ".ipynb_checkpoints" / "train_step-checkpoint.py").write_text("an older one")
    (copy / "orchestrator" / ".#run.py").symlink_to("user@host.1234")
    assert source_of(copy) == program_source()


def test_a_program_is_described_by_what_is_known() -> None:
    assert describe_program("a1", "b2+") == "a1 of commit b2+"
    assert (
        describe_program("a1", None),
        describe_program(None, "b2"),
        describe_program(None, None),
    ) == ("a1", "commit b2", "")
