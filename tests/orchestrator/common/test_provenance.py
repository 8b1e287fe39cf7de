"""Tests of the digest that identifies the code that measures."""

from __future__ import annotations

import os
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
    return source_and_commit(copy)[0]


def source_and_commit(copy: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRINT_SOURCE],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    return done.stdout.split() if done.returncode == 0 else [done.stderr, ""]


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


def test_a_commit_has_a_plus_if_a_file_was_edited_or_added(copy: Path) -> None:
    """The commit alone cannot measure the cells of a new task."""
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "all")):
        subprocess.run(["git", *identity, *words], cwd=copy, check=True)
    (copy / ".gitignore").write_text("__pycache__\n")
    commit = source_and_commit(copy)[1]
    assert len(commit) == 12
    (copy / "tasks" / "another.py").touch()
    assert source_and_commit(copy)[1] == f"{commit}+"


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
