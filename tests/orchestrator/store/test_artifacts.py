"""The end of a log and the command of an attempt, of one run and of several read as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from tasks.spec.attempt import LOG_FILE

CELL = "0123456789ab"


@pytest.fixture
def two_runs(tmp_path: Path) -> RunCollection:
    runs = {}
    for name in ("before", "after"):
        run = Run(tmp_path / name)
        folder = run.attempt_folder(CELL, 1)
        folder.mkdir(parents=True)
        (folder / LOG_FILE).write_text(f"the log of {name}\n")
        runs[name] = run
    return RunCollection(runs, tmp_path / "before" / "with-after")


@pytest.mark.parametrize("name", ["before", "after"])
def test_a_log_is_read_from_the_run_that_has_it(two_runs: RunCollection, name: str) -> None:
    found = read_artifacts(two_runs, f"{name}:{CELL}", 1)
    assert found.log == (f"the log of {name}",)


def test_a_log_behind_a_link_is_not_read(two_runs: RunCollection, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / LOG_FILE).write_text("secret")
    folder = two_runs.runs["after"].attempt_folder(CELL, 1)
    (folder / LOG_FILE).unlink()
    folder.rmdir()
    folder.symlink_to(secret)
    assert "secret" not in str(read_artifacts(two_runs, f"after:{CELL}", 1))


@pytest.mark.parametrize(
    ("evidence", "name"),
    [
        ("{}", "log.txt"),
        ('{"rank": 2}', "log_2.txt"),
        ('{"rank": -1}', "log.txt"),
        ('{"rank": "/x"}', "log.txt"),
    ],
)
def test_the_log_is_that_of_a_rank_that_is_a_number(
    two_runs: RunCollection, evidence: str, name: str
) -> None:
    assert read_artifacts(two_runs, f"after:{CELL}", 1, evidence).log_file.name == name
