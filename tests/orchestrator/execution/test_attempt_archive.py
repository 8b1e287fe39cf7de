"""A host that does not share the driver's folder, as the supervisor there and the scheduler here see it."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.execution import measurement
from orchestrator.execution.attempt_archive import (
    AttemptArchive,
    in_local_folder,
    move_into_archive,
    shares_folder,
    unpack,
    write_folder_token,
)
from orchestrator.execution.events import AttemptStarted, Event
from orchestrator.scheduling import ray_task
from orchestrator.scheduling.ray_scheduler import _unpack_if_possible
from orchestrator.scheduling.ray_task import SweepHosts
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

MakeAttempt = Callable[..., Attempt]


@pytest.fixture
def supervise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Attempt, str | None], list[Event]]:
    """What a supervisor sends, of a cell that leaves a log, a file in a folder and a cache of its own."""

    def execute(attempt: Attempt) -> Outcome:
        attempt.path.mkdir(parents=True, exist_ok=True)
        (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
        for name in (LOG_FILE, "deep/trace.json", "cache/inductor/kernel.py"):
            (attempt.path / name).parent.mkdir(parents=True, exist_ok=True)
            (attempt.path / name).write_text(f"{name} of {attempt.cell.id}")
        return Outcome(attempt, Status.OK, "", "", {}, {}, (), 0.0, 1.0)

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there"))
    monkeypatch.setattr(measurement, "execute", execute)
    return lambda attempt, mark: list(ray_task.supervise(attempt, 1, SweepHosts("", {}), mark))


def test_a_folder_that_somebody_else_made_is_not_used(
    make_attempt: MakeAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled there is run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = in_local_folder(make_attempt()).path.parents[2]
    assert (ours.parent, ours.stat().st_mode & 0o777) == (tmp_path, 0o700)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    ours.rename(ours.with_name(ours.name.replace(f"-{theirs - 1}-", f"-{theirs}-")))
    with pytest.raises(PermissionError, match="is another user's"):
        in_local_folder(make_attempt())


def test_where_the_folder_is_shared_nothing_is_sent(
    supervise: Callable[[Attempt, str | None], list[Event]],
    make_attempt: MakeAttempt,
    tmp_path: Path,
) -> None:
    attempt = make_attempt()
    started, outcome = supervise(attempt, write_folder_token(attempt))
    assert isinstance(started, AttemptStarted)
    assert isinstance(outcome, Outcome)
    assert (attempt.path / LOG_FILE).exists()
    assert not list((tmp_path / "there").iterdir())


def test_files_of_an_attempt_on_another_host_are_sent_to_the_driver(
    supervise: Callable[[Attempt, str | None], list[Event]],
    make_attempt: MakeAttempt,
    tmp_path: Path,
) -> None:
    attempt = make_attempt()
    write_folder_token(attempt)
    started, parcel, outcome = supervise(attempt, "another driver's")
    assert isinstance(outcome, Outcome)
    assert isinstance(parcel, AttemptArchive)
    assert (started.attempt, parcel.attempt, outcome.attempt) == (attempt, attempt, attempt)
    assert not (attempt.path / LOG_FILE).exists()
    _unpack_if_possible(parcel)
    assert (attempt.path / LOG_FILE).read_text() == f"{LOG_FILE} of {attempt.cell.id}"
    assert (attempt.path / "deep" / "trace.json").exists()
    assert str(attempt.path / ATTEMPT_FILE) in (attempt.path / RERUN_FILE).read_text()
    assert not (attempt.path / "cache").exists()
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]


def test_the_cells_of_a_run_share_what_they_compile_there(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    first, second = (in_local_folder(make_attempt(seed=seed)) for seed in (0, 1))
    assert first.path.parents[2] == second.path.parents[2] != make_attempt().path.parents[2]
    assert first.path != second.path


def test_variables_that_lead_to_the_drivers_folders_are_left_out(make_attempt: MakeAttempt) -> None:
    run = make_attempt().path.parents[2]
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(run.parent / "cache"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert in_local_folder(make_attempt(settings={"env": env})).settings.env == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8"
    }


def test_a_new_folder_token_invalidates_the_earlier_one(make_attempt: MakeAttempt) -> None:
    attempt = make_attempt()
    assert not shares_folder(attempt, "")
    mark = write_folder_token(attempt)
    assert shares_folder(attempt, mark)
    assert write_folder_token(attempt) != mark
    assert not shares_folder(attempt, mark)


def test_an_archive_writes_nothing_outside_its_attempt_folder(
    make_attempt: MakeAttempt, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("../../stray"))
    attempt = make_attempt()
    with pytest.raises(tarfile.TarError):
        unpack(AttemptArchive(attempt, stream.getvalue()))
    _unpack_if_possible(AttemptArchive(attempt, b"torn"))  # the result itself comes apart from it
    assert not list(tmp_path.rglob("stray"))


def test_an_archive_without_files_can_be_unpacked(make_attempt: MakeAttempt) -> None:
    unpack(move_into_archive(make_attempt(), make_attempt()))
