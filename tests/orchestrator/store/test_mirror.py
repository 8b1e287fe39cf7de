"""Runs in a bucket lose no cell and measure none twice, whatever is killed, fails or races."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import orchestrator as sweep
from orchestrator.cli.main import main
from orchestrator.common.errors import RunError, RunLocked, RunUnwritable, SweepError
from orchestrator.common.run_location import split_cell
from orchestrator.execution.child_environment import write_rerun_script
from orchestrator.planning.request import SweepRequest
from orchestrator.store import batch_writer, mirror_writer
from orchestrator.store.cell_state import read_states
from orchestrator.store.listing import Listing
from orchestrator.store.mirror import RemoteRun
from orchestrator.store.mirror_writer import OWNER_FILE
from orchestrator.store.open import open_for_writing, open_run
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.sweep.outcome_log import SweepResult
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, RERUN_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tests.conftest import ROOT
from tests.support import fake_sweep
from tests.support.fake_sweep import (
    FakeScheduler,
    journalled,
    lengths_of,
    outcome_of,
    request_for,
)
from tests.support.s3 import Bucket

ADDRESS = "s3://bucket/runs/x"
CONFIG = """
name: test
grids:
  - task: train_step
    axes: {context_length: %s}
    fixed: {device: cpu, size: tiny}
"""
Host = Callable[[str], None]


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Return a function that makes this the host of a name, with its own working copies."""

    this = socket.gethostname()

    def go_to(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        monkeypatch.setattr(socket, "gethostname", lambda: this if name == "first" else name)

    go_to("first")
    return go_to


def request_of(tmp_path: Path, *lengths: int) -> SweepRequest:
    path = tmp_path / "test.yaml"
    path.write_text(CONFIG % list(lengths or (16, 32, 64, 128)))
    return request_for(path, [], [], ADDRESS)


def measured(attempt: Attempt) -> Outcome:
    outcome = journalled(attempt)
    (attempt.path / LOG_FILE).write_text("all is well")
    write_rerun_script(attempt)
    return outcome


def go(
    tmp_path: Path,
    *lengths: int,
    measure: Callable[[Attempt], Outcome] = measured,
    take_over: bool = False,
    summary: bool = False,
) -> tuple[SweepResult, list[int]]:
    """Return the result of a run, and what it measured."""
    scheduler = FakeScheduler(measure)
    request = request_of(tmp_path, *lengths)
    result = fake_sweep.go(request, scheduler, take_over=take_over, summary=summary)
    return result, lengths_of(scheduler)


@contextmanager
def cut_off(bucket: Bucket, fails: Callable[[str, str], bool]) -> Iterator[None]:
    """Have requests fail during the body, in which drivers give up after a moment."""
    bucket.fails = fails
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(mirror_writer, "PATIENCE_S", 0.5)
        yield
    bucket.fails = lambda method, key: False


def as_folder(bucket: Bucket, folder: Path) -> Run:
    """Return the run as somebody gets it who copies the whole bucket now."""
    for key, (content, _) in dict(bucket.objects).items():
        path = folder / key.removeprefix("bucket/runs/x/")
        if not key.endswith("/"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return Run(folder)


def rows_in(bucket: Bucket) -> list[tuple[str, int]]:
    """Return cell and number of the attempts in the bucket. Every one must be complete."""
    with tempfile.TemporaryDirectory() as scratch:
        run = as_folder(bucket, Path(scratch))
        assert run.incomplete_attempts() == {}
        return sorted(run.rows("attempts", ["cell", "attempt"]))


@pytest.fixture(autouse=True)
def _brief_report(brief_report: None) -> None:
    """The location of a run changes no table and no chart, and they take longer than all else."""


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="sweep")


def test_another_host_reads_and_continues_a_run(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    assert go(tmp_path, 16, 32, summary=True)[1] == [16, 32]
    assert {"run.json", "cells.parquet"} <= bucket.names("runs/x/")
    assert OWNER_FILE not in bucket.names("runs/x/")
    cell = next(iter(bucket.names("runs/x/artifacts/"))).split("/")[0]
    on_host("second")
    assert go(tmp_path, 16, 32, 64, summary=True)[1] == [64]
    on_host("third")
    loaded = sweep.load(ADDRESS)
    assert sorted(loaded.cells["context_length"]) == [16, 32, 64]
    assert len(loaded.samples) == 3
    assert repr(loaded) == f"LoadedRun('{ADDRESS}', 3 cells)"
    assert "3 ok" in call("status", ADDRESS).output
    assert "3 cells: 3 ok" in call("plan", tmp_path / "test.yaml", "--out", ADDRESS).output
    shown = call("show", ADDRESS, cell).output
    assert "all is well" in shown
    assert f"by hand: env PYTHONPATH={ROOT}" in shown
    assert "1 UNDECIDED" in call("compare", f"{ADDRESS}:{cell}", f"{ADDRESS}:{cell}").output
    assert call("report", ADDRESS, "--table", "timings").exit_code == 0
    assert "timings.md" in bucket.names("runs/x/report/")
    run = open_run(ADDRESS)
    run.fetch_artifacts()  # for the page of a report
    assert {path.name for path in (run.folder / "artifacts").glob("*/1/*")} == {
        ATTEMPT_FILE,
        LOG_FILE,
        RERUN_FILE,
    }


def test_the_manifest_is_uploaded_before_the_first_cell_is_measured(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a second driver could begin another run, and the rows of the first would not count.
    put = RemoteFolder.put

    def put_slowly(remote: RemoteFolder, name: str, source: Path | bytes) -> None:
        time.sleep(0.3 if name == "run.json" else 0.0)
        put(remote, name, source)

    def measure(attempt: Attempt) -> Outcome:
        assert "run.json" in bucket.names("runs/x/")
        return measured(attempt)

    monkeypatch.setattr(RemoteFolder, "put", put_slowly)
    assert go(tmp_path, 16, measure=measure)[1] == [16]


def test_a_bucket_is_a_readable_run_after_every_write(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each request, the bucket has whole attempts, with the files of their folders."""
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    seen: list[int] = []
    missing: list[str] = []

    def look(method: str, key: str) -> bool:
        try:
            rows = rows_in(bucket)
        except Exception as error:  # it would end the server
            missing.append(f"{method} {key}: {error}")
            return False
        for cell, number in rows:
            names = bucket.names(f"runs/x/artifacts/{cell}/{number}/")
            missing.extend({ATTEMPT_FILE, LOG_FILE} - names)
        seen.append(len(rows))
        return False

    bucket.fails = look
    go(tmp_path, *range(8, 48, 8), summary=True)
    bucket.fails = lambda method, key: False
    assert (seen, missing) == (sorted(seen), [])
    assert len(rows_in(bucket)) == 5
    assert {"0001.parquet", "0002.parquet", "0003.parquet"} == bucket.names("runs/x/samples/")
    assert not [name for name in bucket.names("runs/x/") if name.endswith(".log")]


def kill_itself(tmp_path: Path, cache: Path, environment: dict[str, str]) -> None:
    """Run a driver that is killed when its third cell has ended and two are uploaded."""
    os.environ.update(environment, XDG_CACHE_HOME=str(cache))
    remote = RemoteFolder(ADDRESS)

    def measure(attempt: Attempt) -> Outcome:
        if attempt.cell.params.values()["context_length"] == 64:
            while (remote.read("0001.log") or b"").count(b"\n") < 2:
                time.sleep(0.02)
            measured(attempt)
            os.kill(os.getpid(), signal.SIGKILL)
        return measured(attempt)

    go(tmp_path, measure=measure)


@pytest.mark.process
def test_a_killed_driver_loses_no_finished_cell(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """Another host continues after the uploaded cells, the same host after the finished ones."""
    driver = multiprocessing.get_context("spawn").Process(
        target=kill_itself, args=(tmp_path, tmp_path / "first", bucket.environment)
    )
    driver.start()
    driver.join(60)
    assert driver.exitcode == -signal.SIGKILL
    assert len(rows_in(bucket)) == 2
    killed = dict(bucket.objects)

    on_host("second")
    with pytest.raises(RunLocked, match=r"process \d+ on .* writes to it"):
        go(tmp_path)  # this host cannot know that the driver was killed
    assert go(tmp_path, take_over=True)[1] == [64, 128]
    assert len(sweep.load(ADDRESS).samples) == 4
    assert OWNER_FILE not in bucket.names("runs/x/")

    bucket.objects = killed
    on_host("first")
    result, lengths = go(tmp_path)
    assert (result.recovered, lengths) == (1, [128])
    assert len(rows_in(bucket)) == len(sweep.load(ADDRESS).samples) == 4


def test_uploads_that_fail_are_repeated(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteFolder, "put", at_times(RemoteFolder.put, random.Random(1)))
    monkeypatch.setattr(mirror_writer, "RETRY_S", 0.01)
    lengths = [8 * count for count in range(1, 13)]
    assert go(tmp_path, *lengths, summary=True)[1] == lengths
    on_host("second")
    assert len(sweep.load(ADDRESS).samples) == len(lengths)
    assert go(tmp_path, *lengths)[1] == []


def at_times(put: Callable[..., None], chance: random.Random) -> Callable[..., None]:
    def put_or_fail(remote: RemoteFolder, name: str, source: Path | bytes) -> None:
        if name != OWNER_FILE and chance.random() < 0.3:
            raise OSError("the network is not what it was")
        put(remote, name, source)

    return put_or_fail


def is_of_rows(key: str) -> bool:
    return key.endswith((".log", ".parquet"))


def test_results_that_cannot_be_uploaded_are_reported_and_uploaded_by_the_next_run(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and is_of_rows(key)),
        pytest.raises(
            RunUnwritable,
            match=r"results could not be uploaded: .*the next `sweep run` from here uploads them",
        ),
    ):
        go(tmp_path)
    assert not rows_in(bucket)
    result, lengths = go(tmp_path)
    assert (result.recovered, lengths) == (0, [])
    on_host("second")
    assert go(tmp_path)[1] == []
    assert len(sweep.load(ADDRESS).samples) == 4


def test_a_second_driver_is_refused_unless_it_takes_over(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    began: list[Attempt] = []

    def measure(attempt: Attempt) -> Outcome:
        if not began:
            began.append(attempt)
            on_host("second")
            with pytest.raises(
                RunLocked, match=r"process \d+ on .* \(since .*\) writes to it. Wait .*--take-over"
            ):
                go(tmp_path)
            go(tmp_path, 32, take_over=True)
            on_host("first")
        return measured(attempt)

    with pytest.raises(RunLocked, match="has taken it over"):
        go(tmp_path, measure=measure)
    on_host("third")
    assert list(sweep.load(ADDRESS).cells["context_length"]) == [32]
    on_host("first")
    go(tmp_path)  # what the first had measured is uploaded now
    on_host("third")
    assert sorted(sweep.load(ADDRESS).cells["context_length"]) == [16, 32, 64, 128]


def test_a_refused_driver_prints_one_line(bucket: Bucket, on_host: Host, tmp_path: Path) -> None:
    request_of(tmp_path)
    content = {"owner": "process 7 on other (since 2026-11-24T10:00:00+00:00)"}
    bucket.objects[f"bucket/runs/x/{OWNER_FILE}"] = json.dumps(content).encode(), datetime.now(UTC)
    words = ("run", tmp_path / "test.yaml", "--out", ADDRESS, "--scheduler", "serial")
    done = call(*words)
    assert done.exit_code == 2
    assert done.output.removeprefix("preparing: importing torch\n") == (
        f"sweep: {ADDRESS}: process 7 on other (since 2026-11-24T10:00:00+00:00) writes to it. "
        "Wait for it, or add --take-over if it was killed\n"
    )


def test_a_driver_that_was_taken_over_uploads_nothing_afterwards(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    there: dict[str, bytes] = {}

    def measure(attempt: Attempt) -> Outcome:
        if not there:
            on_host("second")
            slow = lambda one: replace(measured(one), wall_s=9.0)  # noqa: E731
            _, lengths = go(tmp_path, measure=slow, take_over=True, summary=True)
            assert lengths == [16, 32, 64, 128]
            for name in bucket.names("runs/x/"):
                there[name] = bucket.objects[f"bucket/runs/x/{name}"][0]
            on_host("first")
        return measured(attempt)

    began = time.monotonic()
    with pytest.raises(RunLocked, match="has taken it over"):
        go(tmp_path, measure=measure, summary=True)
    assert time.monotonic() - began < 15  # it does not try for long
    assert len(rows_in(bucket)) == 4
    assert there == {
        name: bucket.objects[f"bucket/runs/x/{name}"][0] for name in bucket.names("runs/x/")
    }


def test_an_owner_has_ended_only_if_it_had_the_lock_of_this_copy(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path, 16)
    lock = open_run(ADDRESS).folder / ".lock"
    ended = lock.read_text().split("\n")[-1]
    content = json.dumps({"owner": ended}).encode()
    bucket.objects[f"bucket/runs/x/{OWNER_FILE}"] = content, datetime.now(UTC)
    on_host("second")
    with pytest.raises(RunLocked, match=re.escape(f"{ended} writes to it")):
        go(tmp_path, 16)
    on_host("first")
    assert go(tmp_path, 16, 32)[1] == [32]
    assert OWNER_FILE not in bucket.names("runs/x/")


def asides() -> list[Run]:
    """Return the copies on this host that were renamed, the oldest first."""
    copy = RemoteRun(RemoteFolder(ADDRESS)).folder
    return [Run(path) for path in sorted(copy.parent.glob("x-*"))]


def stays_local(method: str, key: str) -> bool:
    return method == "PUT" and (is_of_rows(key) or "/artifacts/" in key)


def test_a_copy_with_attempts_that_the_bucket_lacks_is_renamed_as_a_whole(
    bucket: Bucket, on_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bucket stays as it is, and what a host measured while it was cut off stays a run."""
    go(tmp_path, 16)
    with cut_off(bucket, stays_local), pytest.raises(RunUnwritable):
        go(tmp_path, 16, 32, 64)
    on_host("second")
    slow = lambda attempt: replace(measured(attempt), wall_s=9.0)  # noqa: E731
    assert go(tmp_path, 16, 32, measure=slow)[1] == [32]
    there = {
        name: bucket.objects[f"bucket/runs/x/{name}"][0]
        for name in bucket.names("runs/x/")
        if name.startswith(("artifacts/", "attempts/", "samples/"))
    }
    on_host("first")
    capsys.readouterr()
    assert len(open_run(ADDRESS).read("attempts")) == 2
    (aside,) = asides()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"has other attempts, and is the folder {aside} now" in line
    assert call("status", aside.folder).output.count("3 ok") == 1
    assert aside.read("attempts")["wall_s"].max() == 2.0
    assert len(list(aside.folder.glob(f"artifacts/*/1/{JOURNAL_FILE}"))) == 3
    result, lengths = go(tmp_path, 16, 32, 64)
    assert (result.recovered, lengths) == (0, [64])
    assert there == {name: bucket.objects[f"bucket/runs/x/{name}"][0] for name in there}
    run = open_run(ADDRESS)
    assert set(run.read("attempts")["attempt"]) == {1}
    assert sorted(run.read("attempts")["wall_s"])[-1] == 9.0
    assert len(run.read("samples")) == len(rows_in(bucket)) == 3
    assert go(tmp_path, 16, 32, 64)[1] == []
    assert capsys.readouterr().err == ""


class Killed(BaseException):
    """Ends a driver at once, as -9 does."""


_MOVES = 7


@pytest.mark.parametrize(
    "kill_at",
    [pytest.param(at, marks=() if at == 2 else pytest.mark.slow) for at in range(1, _MOVES + 2)],
)
def test_a_kill_while_a_copy_is_renamed_and_downloaded_again_loses_nothing(
    bucket: Bucket, on_host: Host, tmp_path: Path, kill_at: int
) -> None:
    """Two hosts measured an attempt of one number. Each stays with its samples and its files."""

    def measured_as(duration: float) -> Callable[[Attempt], Outcome]:
        def measure(attempt: Attempt) -> Outcome:
            outcome = outcome_of(attempt)
            (sample,) = outcome.samples
            outcome = replace(outcome, samples=(replace(sample, value=duration),))
            journalled(attempt, lambda _: outcome)
            (attempt.path / LOG_FILE).write_text(str(duration))
            return outcome

        return measure

    with cut_off(bucket, stays_local), pytest.raises(RunUnwritable):
        go(tmp_path, 16, 32, measure=measured_as(1.5))
    on_host("second")
    go(tmp_path, 16, measure=measured_as(2.5))
    on_host("first")
    moves = [0]

    def deadly(move: Callable[..., None]) -> Callable[..., None]:
        def move_or_die(*arguments: Any, **more: Any) -> None:
            moves[0] += 1
            if moves[0] == kill_at:
                raise Killed
            move(*arguments, **more)

        return move_or_die

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in ("rename", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, deadly(getattr(os, name)))
        open_run(ADDRESS)
    assert moves[0] >= min(kill_at, _MOVES)  # one that is killed removes its half file
    assert go(tmp_path, 16, 32, measure=measured_as(3.5))[1] == [32]
    assert go(tmp_path, 16, 32)[1] == []
    (aside,) = asides()
    on_host("third")
    for run, expected in ((aside, [1.5, 1.5]), (open_run(ADDRESS), [2.5, 3.5])):
        run.fetch_artifacts()
        samples = {
            (cell, number): value
            for cell, number, value in run.rows("samples", ["cell", "attempt", "value"])
        }
        assert sorted(samples.values()) == expected
        assert sorted(run.rows("attempts", ["cell", "attempt"])) == sorted(samples)
        for (cell, number), value in samples.items():
            assert (run.attempt_folder(cell, number) / LOG_FILE).read_text() == str(value)


@pytest.mark.parametrize("kill_at", range(1, 12))
def test_a_reader_that_is_killed_while_it_downloads_keeps_its_copy(
    bucket: Bucket, on_host: Host, tmp_path: Path, kill_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken for attempts that the bucket lacks."""
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    on_host("second")
    go(tmp_path, 16)
    on_host("first")
    open_run(ADDRESS)
    on_host("second")
    go(tmp_path, *range(8, 64, 8))
    on_host("first")
    downloads = [0]

    def rename(path: Path, target: Path) -> Path:
        downloads[0] += 1
        if downloads[0] >= kill_at:
            raise Killed
        return path.replace(target)

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(Path, "rename", rename)
        open_run(ADDRESS)
    assert len(open_run(ADDRESS).read("samples")) == len(rows_in(bucket)) == 7
    assert asides() == []


def cell_of(tmp_path: Path, length: int) -> str:
    (cell,) = request_of(tmp_path, length).expansion.cells
    return cell.id


def test_a_copy_takes_over_batches_of_another_host(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host("reader")
    monkeypatch.setattr(batch_writer, "BATCH", 4)
    lengths = [8 * count for count in range(1, 11)]
    go(tmp_path, *lengths[:2])
    on_host("first")
    go(tmp_path, *lengths)
    assert len(bucket.names("runs/x/attempts/")) == 3 == len(bucket.names("runs/x/samples/"))
    on_host("reader")
    before = len(bucket.requests)
    run = open_run(ADDRESS)
    downloads = [one for one in bucket.requests[before:] if "GET" in one and "/samples/0" in one]
    assert len(downloads) == 2  # the first batch is here
    assert len(run.read("attempts")) == len(run.read("samples")) == 10
    assert len(pd.read_parquet(run.folder / "samples")) == 10


def test_a_reader_of_a_running_sweep_takes_over_its_log(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    seen = []

    def measure(attempt: Attempt) -> Outcome:
        while len(rows_in(bucket)) < len(seen):
            time.sleep(0.02)
        on_host("reader")
        run = open_run(ADDRESS)
        seen.append(len(run.read("attempts")))
        assert not list(run.folder.glob("*/*.parquet"))
        on_host("first")
        return measured(attempt)

    go(tmp_path, 16, 32, 64, measure=measure)
    assert seen == [0, 1, 2]
    on_host("reader")
    assert len(open_run(ADDRESS).read("samples")) == 3
    assert len(list(open_run(ADDRESS).folder.glob("samples/*.parquet"))) == 1


def test_rows_that_two_hosts_closed_in_a_batch_count_once(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """One host is cut off before its batch is uploaded, and another closes the same log."""
    began: list[Attempt] = []

    def measure(attempt: Attempt) -> Outcome:
        while len(rows_in(bucket)) < len(began):
            time.sleep(0.02)
        began.append(attempt)
        return measured(attempt)

    with (
        cut_off(bucket, lambda method, key: method == "PUT" and key.endswith(".parquet")),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path, 16, 32, 64, measure=measure)
    # In the log. The last row may come too late for it, and is then in the batch alone.
    uploaded = len(rows_in(bucket))
    assert uploaded in (2, 3)
    on_host("second")
    assert go(tmp_path, 16, 32)[1] == []
    assert not [name for name in bucket.names("runs/x/") if name.endswith(".log")]
    on_host("first")
    assert go(tmp_path, 16, 32, 64)[1] == ([] if uploaded == 3 else [64])
    on_host("third")
    run = open_run(ADDRESS)
    assert (len(run.read("attempts")), len(run.read("samples"))) == (3, 3)
    assert set(run.read("attempts")["attempt"]) == {1}


def test_samples_do_not_join_a_failed_attempt_of_another_host(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """A host that was cut off has samples of an attempt that failed on another host."""
    with cut_off(bucket, stays_local), pytest.raises(RunUnwritable):
        go(tmp_path, 16)
    on_host("second")
    go(tmp_path, 16, measure=lambda attempt: outcome_of(attempt, Status.OOM))
    on_host("first")
    assert not bucket.names("runs/x/artifacts/")
    assert go(tmp_path, 16)[1] == []
    run, (aside,) = open_run(ADDRESS), asides()
    assert dict(run.rows("attempts", ["attempt", "status"])) == {1: "oom"}
    assert run.read("samples").empty
    assert len(aside.read("samples")) == 1


def test_a_failed_upload_waits_for_those_under_way(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a file could arrive after another driver has taken over.
    monkeypatch.setattr(mirror_writer, "PATIENCE_S", 0.1)
    monkeypatch.setattr(mirror_writer, "RETRY_S", 0.05)
    arriving: list[str] = []
    has_begun = threading.Event()

    def fails(method: str, key: str) -> bool:
        if method == "PUT" and "/samples/" in key:
            arriving.append(key)
            has_begun.set()
            time.sleep(0.5)  # longer than the driver tries again
            arriving.remove(key)
        if method == "PUT" and "/attempts/" in key:
            has_begun.wait(30)
            return True
        return False

    bucket.fails = fails
    with pytest.raises(RunUnwritable):
        go(tmp_path, 16)
    assert not arriving
    assert len(bucket.names("runs/x/samples/")) == 1


def test_a_file_that_cannot_be_uploaded_blocks_no_other(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_writer, "RETRY_S", 0.01)
    first = cell_of(tmp_path, 16)
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and f"/{first}/1/log" in key),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path)
    assert len(rows_in(bucket)) == 4
    assert LOG_FILE not in bucket.names(f"runs/x/artifacts/{first}/1/")
    assert go(tmp_path)[1] == []
    assert LOG_FILE in bucket.names(f"runs/x/artifacts/{first}/1/")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_copy_of_another_run_than_that_of_the_bucket_is_renamed(
    bucket: Bucket, on_host: Host, tmp_path: Path, is_replaced: bool
) -> None:
    """The bucket was emptied, or has a run that another host began since."""
    go(tmp_path, 16, 32)
    bucket.objects.clear()
    if is_replaced:
        time.sleep(1.0)  # two runs differ by the second in which they were created
        on_host("second")
        go(tmp_path, 16)
        on_host("first")
    there = dict(bucket.objects)
    assert open_run(ADDRESS).exists == is_replaced
    assert bucket.objects == there
    (aside,) = asides()
    assert len(sweep.load(aside.folder).samples) == 2
    assert go(tmp_path, 16)[1] == ([] if is_replaced else [16])
    assert len(rows_in(bucket)) == 1
    assert asides()[1:] == []


def test_a_copy_is_not_renamed_below_a_driver(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """Another host has continued the run after this one has read it, and before it writes."""
    with cut_off(bucket, stays_local), pytest.raises(RunUnwritable):
        go(tmp_path, 16)
    run = open_run(ADDRESS)
    on_host("second")
    go(tmp_path, 16)
    on_host("first")
    with (
        pytest.raises(RunError, match="another host has written to it in this moment"),
        open_for_writing(run),
    ):
        pass
    assert not asides()
    assert OWNER_FILE not in bucket.names("runs/x/")
    assert go(tmp_path, 16)[1] == []
    assert len(asides()) == 1


def test_readers_do_not_refresh_a_copy_while_a_driver_writes_to_it(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    def measure(attempt: Attempt) -> Outcome:
        before = len(bucket.requests)
        assert open_run(ADDRESS).exists
        assert not [
            asked
            for asked in bucket.requests[before:]
            if asked.startswith("GET") and "parquet" in asked
        ]
        return measured(attempt)

    assert go(tmp_path, 16, 32, measure=measure)[1] == [16, 32]


def test_a_lost_or_torn_copy_is_downloaded_again(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path)
    folder = open_run(ADDRESS).folder
    (torn,) = (folder / "samples").glob("*")
    torn.write_bytes(torn.read_bytes()[:100])
    (folder / "attempts" / torn.name).unlink()
    assert len(sweep.load(ADDRESS).samples) == 4
    assert go(tmp_path)[1] == []
    (folder / "stored.json").unlink()
    assert len(sweep.load(ADDRESS).samples) == 4
    assert go(tmp_path)[1] == []
    assert len(rows_in(bucket)) == 4
    shutil.rmtree(folder)
    assert len(sweep.load(ADDRESS).samples) == 4


def test_artifacts_of_a_killed_attempt_are_not_shown_for_another_host(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    def stop(attempt: Attempt) -> Outcome:
        (attempt.path / LOG_FILE).parent.mkdir(parents=True, exist_ok=True)
        (attempt.path / LOG_FILE).write_text("cut off")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, 16, measure=stop)
    on_host("second")
    assert go(tmp_path, 16)[1] == [16]
    on_host("first")
    cell = sweep.load(ADDRESS).cells["cell"].item()
    assert "all is well" in call("show", ADDRESS, cell).output


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "s3://bukket/x",
            "no such bucket: NoSuchBucket it says. Create the bucket, or name another with --out",
        ),
        ("s3://nobody@bucket/x", "credentials are no part of an address"),
        (
            "s3://bucket/x?endpoint_override=127.0.0.1:1&scheme=http",
            "Check the network and the address",
        ),
        (
            "s3://bucket/x?wrong=1",
            "Unexpected query parameter in S3 URI: 'wrong'. Write s3://bucket/folder",
        ),
        ("s4://bucket/x", "s4://bucket/x: is no folder of a bucket. Name a folder, or write s3://"),
    ],
)
def test_a_wrong_address_is_reported_in_one_line(
    bucket: Bucket, on_host: Host, tmp_path: Path, address: str, message: str
) -> None:
    request_of(tmp_path)
    done = call("run", tmp_path / "test.yaml", "--out", address, "--scheduler", "serial")
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert len(done.output.removeprefix("preparing: importing torch\n").splitlines()) == 1


def test_denied_access_names_the_variables_to_set(
    bucket: Bucket, on_host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    done = call("status", ADDRESS)
    assert done.exit_code == 2
    assert done.output.startswith(
        f"sweep: {ADDRESS}: cannot be reached: access denied. Set AWS_ACCESS_KEY_ID"
    )


def test_files_of_a_bucket_are_listed_read_and_replaced(bucket: Bucket, tmp_path: Path) -> None:
    remote = RemoteFolder("s3://bucket/a/b")
    large = tmp_path / "large"
    large.write_bytes(os.urandom(11_000_000))
    with reaching(remote):
        assert remote.sizes("t") == {}
        assert remote.read("t/x") is None
        remote.put("t/x", b"1")
        remote.put("t/x", b"22")
        remote.put("t/deep/large", large)
        assert remote.sizes("t") == {"t/x": 2}
        assert set(remote.sizes("t", recursive=True)) == {"t/x", "t/deep/large"}
        assert remote.read("t/x") == b"22"
        remote.download(["t/deep/large", "t/none"], tmp_path / "again")
        assert (tmp_path / "again" / "t/deep/large").read_bytes() == large.read_bytes()
        assert not list((tmp_path / "again").rglob("*none*"))
        for _ in range(2):
            remote.remove("t/x")
        assert remote.sizes("t") == {}
        assert remote.sizes("t", recursive=True).keys() == {"t/deep/large"}


def test_an_address_and_a_cell_are_split() -> None:
    assert split_cell("s3://b/run:3f2a") == ("s3://b/run", "3f2a")
    assert split_cell("s3://b/run") == ("s3://b/run", "")
    assert split_cell("s3://b/run?endpoint_override=h:9000") == (
        "s3://b/run?endpoint_override=h:9000",
        "",
    )


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("artifacts/{cell}/1/../../../../outside/rerun.sh", b"harm"),
        pytest.param("artifacts/{cell}/../../../outside/rerun.sh", b"harm", marks=pytest.mark.slow),
        ("samples/x-...parquet", b"harm"),
    ],
)
def test_a_key_that_leaves_the_folder_refuses_the_run(
    key: str, content: bytes, bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path, 16)
    cell = next(iter(bucket.names("runs/x/artifacts/"))).split("/")[0]
    bucket.objects[f"bucket/runs/x/{key.format(cell=cell)}"] = content, datetime.now(UTC)
    on_host("second")
    for words in (["report", ADDRESS], ["show", ADDRESS, cell]):
        done = call(*words)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        assert re.search("no path within it|not the name of a part", done.stderr)
    assert not list(tmp_path.rglob("outside"))
    is_part = key.endswith(".parquet")
    arrived = [
        path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == content
    ]
    assert len(arrived) == int(is_part)  # which is in its table, and is refused by its name


def test_a_merged_part_of_a_bucket_deletes_no_file_of_its_reader(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    put_old_run(bucket)
    precious = tmp_path / "thesis.tex"
    precious.write_text("thesis")
    (name,) = [one for one in bucket.names("runs/x/samples/") if one.startswith("c8e8af5d4a64")]
    content, at = bucket.objects[f"bucket/runs/x/samples/{name}"]
    replaces = json.dumps([str(precious), "../../../../thesis.tex"]).encode()
    merged = pq.read_table(pa.BufferReader(content)).replace_schema_metadata(
        {b"replaces": replaces}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(merged, sink)
    bucket.objects["bucket/runs/x/samples/merged-1.parquet"] = sink.getvalue().to_pybytes(), at
    del bucket.objects[f"bucket/runs/x/samples/{name}"]
    for _ in range(2):
        assert "5 ok" in call("status", ADDRESS).output
    assert precious.read_text() == "thesis"


def put_old_run(bucket: Bucket) -> None:
    """Put a run of an older version into the bucket."""
    for path in (ROOT / "tests" / "data" / "parts").rglob("*.*"):
        name = path.relative_to(ROOT / "tests" / "data" / "parts").as_posix()
        bucket.objects[f"bucket/runs/x/{name}"] = path.read_bytes(), datetime.now(UTC)


def test_a_run_of_an_older_version_is_continued(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    put_old_run(bucket)
    before = dict(bucket.objects)
    assert "5 ok" in call("status", ADDRESS).output
    assert go(tmp_path, 16, 32, 64, 512)[1] == [512]
    assert all(bucket.objects[name] == before[name] for name in before if "run.json" not in name)
    on_host("second")
    assert go(tmp_path, 16, 32, 64, 512)[1] == []
    assert len(open_run(ADDRESS).read("samples")) == 11


@pytest.mark.parametrize("change", [b"", b"{", None])
def test_a_lost_list_of_a_bucket_is_noticed(
    bucket: Bucket, on_host: Host, tmp_path: Path, change: bytes | None
) -> None:
    go(tmp_path, 16)
    key = "bucket/runs/x/stored.json"
    if change is None:
        del bucket.objects[key]
    else:
        bucket.objects[key] = change, datetime.now(UTC)
    on_host("second")
    done = call("status", ADDRESS)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert "stored.json" in done.stderr


@pytest.mark.parametrize("name", ["../../outside.parquet", "samples/../../x.parquet", "/x.parquet"])
def test_a_listed_name_that_is_no_batch_refuses_the_bucket(
    bucket: Bucket, on_host: Host, tmp_path: Path, name: str
) -> None:
    go(tmp_path, 16)
    content = Listing(files={name: "0" * 64}).text().encode()
    bucket.objects["bucket/runs/x/stored.json"] = content, datetime.now(UTC)
    on_host("second")
    done = call("status", ADDRESS)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert "is not the name of a batch" in done.stderr
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", range(1, 60))
def test_a_kill_at_any_upload_loses_and_repeats_nothing(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    """The bucket is a readable run then; another host continues it, and then this one."""
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    monkeypatch.setattr(mirror_writer, "PATIENCE_S", 0.0)
    uploads = [0]

    def fails(method: str, key: str) -> bool:
        if method in ("PUT", "POST", "DELETE") and OWNER_FILE not in key:
            uploads[0] += 1
        return uploads[0] >= kill_at and OWNER_FILE not in key

    bucket.fails = fails
    lengths = [8, 16, 24, 32, 40]
    try:
        go(tmp_path, *lengths, summary=True)
    except SweepError:
        pass
    else:
        pytest.skip(f"there are only {uploads[0]} uploads")
    bucket.fails = lambda method, key: False
    if "run.json" in bucket.names("runs/x/"):
        before = rows_in(bucket)
        on_host("second")
        found = go(tmp_path, *lengths[:3])[1]
        assert len(found) == len(
            set(cells_of(tmp_path, lengths[:3])) - {cell for cell, _ in before}
        )
        assert set(before) <= set(rows_in(bucket))
        on_host("first")
    go(tmp_path, *lengths)
    run = open_run(ADDRESS)
    assert {cell for cell, _ in rows_in(bucket)} == set(cells_of(tmp_path, lengths))
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert len(run.read("attempts")) == len(run.read("samples")) == len(rows_in(bucket))
    assert go(tmp_path, *lengths)[1] == []


def cells_of(tmp_path: Path, lengths: list[int]) -> list[str]:
    return [cell_of(tmp_path, length) for length in lengths]


def test_a_file_in_an_unknown_place_of_a_bucket_is_ignored(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path, 16)
    for name in ("artifacts/log.txt", "artifacts/x/log.txt", "log.txt"):
        bucket.objects[f"bucket/runs/x/{name}"] = b"", datetime.now(UTC)
    on_host("second")
    assert call("report", ADDRESS).exit_code == 0
