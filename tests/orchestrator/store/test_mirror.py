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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import orchestrator as sweep
from orchestrator.cli.main import main
from orchestrator.common.errors import RunError, RunLocked, RunUnwritable
from orchestrator.common.run_location import split_cell
from orchestrator.execution.child_environment import write_rerun_script
from orchestrator.planning.request import SweepRequest
from orchestrator.store import bucket_owner, mirror_writer, run_writer
from orchestrator.store.bucket_owner import OWNER_FILE
from orchestrator.store.mirror import open_run
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.sweep.result import SweepResult
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE, Attempt
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
from tests.support.s3 import Bucket, serve

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
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    made = Bucket()
    with serve(made):
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


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


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="sweep")


def test_another_host_reads_and_continues_a_run(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    assert go(tmp_path, 16, 32, summary=True)[1] == [16, 32]
    assert {"run.json", "cells.parquet"} <= bucket.names("runs/x/")
    assert OWNER_FILE not in bucket.names("runs/x/")
    cell = next(iter(bucket.names("runs/x/attempts/"))).split("-")[0]
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
    assert "1 AMBIGUOUS" in call("compare", f"{ADDRESS}:{cell}", f"{ADDRESS}:{cell}").output
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
        time.sleep(1.0 if name == "run.json" else 0.0)
        put(remote, name, source)

    def measure(attempt: Attempt) -> Outcome:
        assert "run.json" in bucket.names("runs/x/")
        return measured(attempt)

    monkeypatch.setattr(RemoteFolder, "put", put_slowly)
    assert go(tmp_path, 16, measure=measure)[1] == [16]


def test_a_row_is_uploaded_after_its_samples_and_artifacts(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    early = []

    def look(method: str, key: str) -> bool:
        folder, _, name = key.removeprefix("bucket/runs/x/").rpartition("/")
        if method == "PUT" and folder == "attempts" and name:
            of = f"runs/x/artifacts/{name.removesuffix('.parquet').replace('-', '/')}/"
            early.extend({name} - bucket.names("runs/x/samples/"))
            early.extend({ATTEMPT_FILE, LOG_FILE} - bucket.names(of))
        return False

    bucket.fails = look
    go(tmp_path)
    assert len(bucket.names("runs/x/attempts/")) == 4
    assert not early


def kill_itself(tmp_path: Path, cache: Path, environment: dict[str, str]) -> None:
    """Run a driver that is killed when its third cell has ended and two are uploaded."""
    os.environ.update(environment, XDG_CACHE_HOME=str(cache))
    remote = RemoteFolder(ADDRESS)

    def measure(attempt: Attempt) -> Outcome:
        if attempt.cell.params.values()["context_length"] == 64:
            while len(remote.sizes("attempts")) < 2:
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
    assert len(bucket.names("runs/x/attempts/")) == 2
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
    assert len(bucket.names("runs/x/attempts/")) == len(sweep.load(ADDRESS).samples) == 4


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


def test_results_that_cannot_be_uploaded_are_reported_and_uploaded_by_the_next_run(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 2)  # merges no part that is not uploaded
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and "/samples/" in key),
        pytest.raises(
            RunUnwritable,
            match=r"results could not be uploaded: .*the next `sweep run` from here uploads them",
        ),
    ):
        go(tmp_path)
    assert not bucket.names("runs/x/attempts/")
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
    content = {"host": "other", "process": 7, "time": "2026-11-24T10:00:00+00:00"}
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
    assert len([name for name in there if name.startswith("attempts/")]) == 4
    assert there == {
        name: bucket.objects[f"bucket/runs/x/{name}"][0] for name in bucket.names("runs/x/")
    }


def test_foreign_errors_of_a_file_system_lose_nothing(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # File systems of fsspec raise their own errors. The rows stay here until the next run.
    monkeypatch.setattr(mirror_writer, "PATIENCE_S", 0.1)
    put = RemoteFolder.put

    def refuse(self: RemoteFolder, name: str, source: Path | bytes) -> None:
        if name.startswith("attempts/"):
            raise LookupError("the server went away")
        put(self, name, source)

    with monkeypatch.context() as broken:
        broken.setattr(RemoteFolder, "put", refuse)
        with pytest.raises(
            RunUnwritable,
            match="results could not be uploaded: LookupError: the server went away",
        ):
            go(tmp_path)
    assert go(tmp_path)[1] == []
    assert len(bucket.names("runs/x/attempts/")) == 4


def test_an_owner_is_dead_only_if_its_process_was_on_this_machine() -> None:
    own = bucket_owner._this_process()
    no_process = 2**22 + 1  # above the largest process id of Linux
    assert bucket_owner._is_dead({**own, "process": no_process})
    assert bucket_owner._is_dead({**own, "process_started": own["process_started"] - 60})
    assert not bucket_owner._is_dead(own)
    assert not bucket_owner._is_dead({**own, "process": no_process, "machine": "another"})
    assert not bucket_owner._is_dead({**own, "process": no_process, "host": "another"})


def test_an_attempt_that_two_hosts_measured_counts_once(
    bucket: Bucket,
    on_host: Host,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows in the bucket count; those of a host that was cut off are set aside."""
    go(tmp_path, 16)
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and OWNER_FILE not in key),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path, 16, 32)
    on_host("second")
    assert go(tmp_path, 16, 32, measure=lambda attempt: replace(measured(attempt), wall_s=9.0))[
        1
    ] == [32]
    there = {
        name: bucket.objects[f"bucket/runs/x/{name}"][0]
        for name in bucket.names("runs/x/")
        if name.startswith("a")
    }
    on_host("first")
    capsys.readouterr()
    assert go(tmp_path, 16, 32)[1] == []
    assert f"{ADDRESS}: has other results than this host" in capsys.readouterr().err
    assert there == {name: bucket.objects[f"bucket/runs/x/{name}"][0] for name in there}
    run = open_run(ADDRESS)
    assert len(run.read("attempts")) == len(run.read("samples")) == 2
    aside = [
        path.relative_to(run.folder / "aside").parts[1:]
        for path in (run.folder / "aside").rglob("*.*")
    ]
    assert {part[0] for part in aside} >= {"attempts", "artifacts"}


def test_merged_parts_replace_the_parts_that_they_contain(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host("reader")
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 4)
    lengths = [8 * count for count in range(1, 11)]
    go(tmp_path, *lengths[:2])
    on_host("first")
    go(tmp_path, *lengths)
    go(tmp_path, *lengths)  # merges, because all parts are uploaded
    assert len(bucket.names("runs/x/attempts/")) == 2 + 2 == len(bucket.names("runs/x/samples/"))
    on_host("reader")  # its copy is older than the merged parts
    run = open_run(ADDRESS)
    assert len(run.read("attempts")) == len(run.read("samples")) == 10
    assert len(list((run.folder / "attempts").glob("*.parquet"))) == 4


def test_rows_that_two_hosts_merged_count_once(
    bucket: Bucket, on_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host is cut off before its merged part is uploaded, and another merges the same rows."""
    go(tmp_path, 16, 32)
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 2)
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and "/merged-" in key),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path, 16, 32)
    on_host("second")
    go(tmp_path, 16, 32)
    on_host("first")
    assert go(tmp_path, 16, 32)[1] == []
    on_host("third")
    run = open_run(ADDRESS)
    assert (len(run.read("attempts")), len(run.read("samples"))) == (2, 2)


def test_samples_do_not_join_a_failed_attempt_of_another_host(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """A host that was cut off has samples of an attempt that failed on another host."""
    with (
        cut_off(
            bucket,
            lambda method, key: (
                method == "PUT"
                and ("/attempts/" in key or "/samples/" in key or "/artifacts/" in key)
            ),
        ),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path, 16)
    on_host("second")
    go(tmp_path, 16, measure=lambda attempt: outcome_of(attempt, Status.OOM))
    on_host("first")
    assert go(tmp_path, 16)[1] == []
    assert not bucket.names("runs/x/samples/") | bucket.names("runs/x/artifacts/")
    assert len(list(open_run(ADDRESS).folder.glob("aside/*/samples/*"))) == 1


def test_uploaded_samples_without_a_row_reserve_their_attempt_number(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    """A host was cut off between samples and row: the next host uses another attempt number."""
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and "/attempts/" in key),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path, 16)
    on_host("second")
    go(tmp_path, 16, measure=lambda attempt: outcome_of(attempt, Status.OOM))
    assert list(
        open_run(ADDRESS).read("attempts")[["attempt", "status"]].itertuples(index=False)
    ) == [(2, "oom")]
    on_host("first")
    assert go(tmp_path, 16)[1] == []
    on_host("third")
    run = open_run(ADDRESS)
    assert sorted(run.read("attempts")[["attempt", "status"]].itertuples(index=False)) == [
        (1, "ok"),
        (2, "oom"),
    ]
    assert set(run.read("samples")["attempt"]) == {1}


def test_a_failed_upload_waits_for_those_under_way(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a file could arrive after another driver has taken over.
    monkeypatch.setattr(mirror_writer, "PATIENCE_S", 0.1)
    arriving: list[str] = []
    has_begun = threading.Event()

    def fails(method: str, key: str) -> bool:
        if method == "PUT" and "/samples/" in key:
            arriving.append(key)
            has_begun.set()
            time.sleep(1.5)
            arriving.remove(key)
        if method == "PUT" and "/artifacts/" in key:
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
    first = request_of(tmp_path).expansion.cells[0].id
    with (
        cut_off(bucket, lambda method, key: method == "PUT" and f"/{first}/1/" in key),
        pytest.raises(RunUnwritable),
    ):
        go(tmp_path)
    assert len(bucket.names("runs/x/attempts/")) == 3
    assert go(tmp_path)[1] == []
    assert len(bucket.names("runs/x/attempts/")) == 4


def test_an_emptied_bucket_starts_a_new_run(
    bucket: Bucket, on_host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of the copy are moved to aside/, and do not count."""
    go(tmp_path, 16, 32)
    bucket.objects.clear()
    with pytest.raises(RunError, match=f"{ADDRESS}: holds no run"):
        open_run(ADDRESS).require()
    assert "aside" in capsys.readouterr().err
    assert go(tmp_path, 16)[1] == [16]
    assert len(list(open_run(ADDRESS).folder.glob("aside/*/attempts/*.parquet"))) == 2


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
    torn, *lost = (folder / "samples").glob("*")
    torn.write_bytes(torn.read_bytes()[:100])
    for part in lost:
        part.unlink()
    assert len(sweep.load(ADDRESS).samples) == 4
    assert go(tmp_path)[1] == []
    assert not (folder / "aside").exists()
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
        ("s3://bucket/x?wrong=1", "unexpected keyword argument 'wrong'. Write s3://bucket/folder"),
        ("s4://bucket/x", "Protocol not known: s4"),
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


@pytest.mark.parametrize("scheme", ["s3://bucket", "file://{tmp}", "memory://{tmp}"])
def test_all_file_systems_behave_alike(bucket: Bucket, tmp_path: Path, scheme: str) -> None:
    remote = RemoteFolder(f"{scheme.format(tmp=tmp_path)}/a/b")
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
        remote.fetch("t/deep/large", tmp_path / "again")
        for _ in range(2):
            remote.remove("t/x")
        assert remote.sizes("t") == {}
        with pytest.raises(FileNotFoundError):
            remote.fetch("t/x", tmp_path / "again")
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
        ("artifacts/{cell}/../../../outside/rerun.sh", b"harm"),
        ("samples/x-...parquet", b"harm"),
    ],
)
def test_a_key_that_leaves_the_folder_refuses_the_run(
    key: str, content: bytes, bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path, 16)
    cell = next(iter(bucket.names("runs/x/attempts/"))).split("-")[0]
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
    go(tmp_path, 16)
    precious = tmp_path / "thesis.tex"
    precious.write_text("thesis")
    part = next(iter(bucket.names("runs/x/samples/")))
    content, at = bucket.objects.pop(f"bucket/runs/x/samples/{part}")
    merged = pq.read_table(pa.BufferReader(content)).replace_schema_metadata(
        {b"replaces": json.dumps([part, str(precious)]).encode()}
    )
    sink = pa.BufferOutputStream()
    pq.write_table(merged, sink)
    bucket.objects["bucket/runs/x/samples/merged-1.parquet"] = sink.getvalue().to_pybytes(), at
    on_host("second")
    for _ in range(2):
        done = call("status", ADDRESS)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        assert "not the name of a part" in done.stderr
    assert precious.read_text() == "thesis"


def test_a_file_in_an_unknown_place_of_a_bucket_is_ignored(
    bucket: Bucket, on_host: Host, tmp_path: Path
) -> None:
    go(tmp_path, 16)
    for name in ("artifacts/log.txt", "artifacts/x/log.txt", "log.txt"):
        bucket.objects[f"bucket/runs/x/{name}"] = b"", datetime.now(UTC)
    on_host("second")
    assert call("report", ADDRESS).exit_code == 0
