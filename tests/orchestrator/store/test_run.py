"""Nothing written is lost or counted twice, whatever is torn, full, read-only or contended."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from orchestrator.analysis.memory_columns import latest_predictions
from orchestrator.common.errors import RunError, RunLocked, RunMismatch, RunUnwritable
from orchestrator.store import batch_writer, run_writer, stored_tables
from orchestrator.store.cell_state import read_states
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run, find_cell
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import ATTEMPT_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample
from tests.conftest import ROOT

MakeOutcome = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_run_whose_attempts_are_gone_is_not_taken_for_a_new_one(
    run: Run, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(run) as writer:
        writer.write_manifest({})
        writer.append(make_outcome(), "abc")
        writer.write_cells(pd.DataFrame({"cell": ["a"]}), "", {})
    shutil.rmtree(run.folder / "attempts")
    (run.folder / "stored.json").unlink()
    for read in (lambda: run.read("attempts"), lambda: read_states(run)):
        with pytest.raises(RunError, match=r"its table attempts is gone\. Copy that folder again"):
            read()


def test_appended_outcomes_are_read_back(run: Run, make_outcome: MakeOutcome) -> None:
    good, bad = make_outcome(), make_outcome(Status.OOM, seed=1)
    with open_for_writing(run) as writer:
        writer.append(good, "abc")
        writer.append(bad, None)
    attempts = run.read("attempts").set_index("cell")
    assert attempts.loc[good.attempt.cell.id, "status"] == "ok"
    assert json.loads(attempts.loc[bad.attempt.cell.id, "evidence"])["asked_bytes"] == 2 * 1024**3
    assert json.loads(attempts.loc[good.attempt.cell.id, "params"])["size"] == "tiny"
    assert len(run.read("samples")) == len(good.samples)
    kernels = run.read("kernels")
    assert set(kernels["cell"]) == {good.attempt.cell.id}
    assert [
        KernelRow(**row) for row in kernels.drop(columns=["cell", "attempt"]).to_dict("records")
    ] == list(good.kernels)


def test_allocations_of_a_failed_attempt_are_stored(run: Run, make_outcome: MakeOutcome) -> None:
    allocations = (
        AllocationRow(
            "out of memory",
            "forward",
            "activations",
            "ffn",
            "part",
            "forward",
            "a.py:1 f",
            7,
            2,
            14,
        ),
    )
    live = (LiveRow(3, 0.25, "forward", "activations", 14),)
    with open_for_writing(run) as writer:
        writer.append(replace(make_outcome(Status.OOM), allocations=allocations, live=live), None)
    for table, kind, rows in (("allocations", AllocationRow, allocations), ("live", LiveRow, live)):
        read = run.read(table).drop(columns=["cell", "attempt"]).to_dict("records")
        assert [kind(**row) for row in read] == list(rows)


@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_kill_while_an_outcome_is_stored_leaves_it_complete_or_absent(
    run: Run, make_outcome: MakeOutcome, left: int
) -> None:
    """Half a line does not count, and the next driver writes its attempts after whole lines."""
    first, second = make_outcome(), make_outcome(seed=1)
    writer = RunWriter(run.folder)
    run.folder.mkdir()
    writer.append(first, None)
    (log,) = run.folder.glob("*.log")
    whole = log.read_bytes()
    writer.append(second, None)
    line = log.read_bytes()[len(whole) :]
    log.write_bytes(whole + line[:left])
    for table in ("attempts", "samples", "kernels"):
        assert set(run.read(table)["cell"]) == {first.attempt.cell.id}
    with open_for_writing(run) as writer:  # the next driver stores it from the journal
        writer.append(second, None)
    assert len(run.read("attempts")) == 2
    assert len(run.read("samples")) == 2 * len(first.samples)
    assert not list(run.folder.glob("*.log"))


def test_closing_a_batch_changes_no_row(run: Run, make_outcome: MakeOutcome) -> None:
    with open_for_writing(run) as writer:
        for seed in range(10):
            writer.append(make_outcome(seed=seed), None)
        assert not list(run.folder.glob("*/*.parquet"))
        before = {table: run.read(table) for table in SCHEMAS}
    for table, frame in before.items():
        pd.testing.assert_frame_equal(run.read(table), frame)
        whole = run.read(table, categories=True)
        texts = dict.fromkeys(whole.select_dtypes("category"), "str")
        pd.testing.assert_frame_equal(whole.astype(texts), frame)
    assert list(before["attempts"]["cell"]) == list(
        pd.read_parquet(run.folder / "attempts")["cell"]
    )
    assert len(pd.read_parquet(run.folder / "samples")) == 10 * 12


def test_a_long_run_has_few_files(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_writer, "BATCH", 4)
    with open_for_writing(run) as writer:
        for seed in range(9):
            writer.append(make_outcome(seed=seed), None)
        assert sorted(path.name for path in (run.folder / "attempts").iterdir()) == [
            "0001.parquet",
            "0002.parquet",
        ]
        assert [path.name for path in run.folder.glob("*.log")] == ["0003.log"]
        assert len(run.read("attempts")) == 9
        assert len(run.read("samples", categories=True)) == 9 * 12


@pytest.mark.parametrize("moment", ["before the log", "after the log"])
def test_a_reader_sees_each_row_once_while_a_batch_is_closed(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    writer = RunWriter(run.folder)
    run.folder.mkdir()
    for seed in range(5):
        writer.append(make_outcome(seed=seed), None)
    whole, real, has_closed = run.read("attempts"), stored_tables._content, []

    def content(path: Path) -> bytes:
        found = real(path) if moment == "after the log" else b""
        if path.suffix == ".log" and not has_closed:
            has_closed.append(True)
            writer.finish()
        return found if moment == "after the log" else real(path)

    monkeypatch.setattr(stored_tables, "_content", content)
    pd.testing.assert_frame_equal(run.read("attempts"), whole)
    assert has_closed


def test_a_run_may_have_more_files_than_a_process_may_open(
    run: Run, make_outcome: MakeOutcome
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_for_writing(run) as writer:
        for seed in range(60):
            writer.append(make_outcome(seed=seed), None)
            writer.finish()
        # Other tests may have left files open in this process.
        most_open = max(map(int, os.listdir("/dev/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_open + 40, hard))
        try:
            assert len(writer.read("attempts")) == 60
            assert len(writer.read("samples")) == 60 * 12
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "name",
    ["~", "~root", "a:b", "s3:x", "file:x", "with space", "é", "a%20b", "a#b", "a?b", "[x]", "*"],
)
def test_a_folder_may_have_any_name(
    name: str, tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relative path could be read as an address or as a home folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    with open_for_writing(Run(Path(name))) as writer:
        for length in (16, 32, 64):
            writer.append(make_outcome(context_length=length), None)
    run = Run(Path(name))
    assert run.read("attempts")["cell"].nunique() == len(list(run.rows("attempts", ["cell"]))) == 3
    assert run.read("samples", categories=True)["cell"].nunique() == 3


def test_categories_are_the_texts_of_all_files(run: Run, make_outcome: MakeOutcome) -> None:
    with open_for_writing(run) as writer:
        for length in (16, 32, 64):
            writer.append(make_outcome(context_length=length), None)
            writer.finish()
    found = run.read("samples", categories=True)
    assert found["cell"].nunique() == len(found["cell"].cat.categories) == 3
    texts = dict.fromkeys(found.select_dtypes("category"), "str")
    pd.testing.assert_frame_equal(found.astype(texts), run.read("samples"))


def test_an_attempt_of_a_changed_task_is_not_recovered(run: Run, make_outcome: MakeOutcome) -> None:
    outcome = make_outcome()
    folder = run.attempt_folder("f" * 12, 1)  # the id before the task version was raised
    folder.mkdir(parents=True)
    (folder / ATTEMPT_FILE).write_text(outcome.attempt.to_json())
    with open_for_writing(run) as writer:
        assert not list(writer.attempts_without_row())


def test_an_attempt_without_a_row_is_found(run: Run, make_outcome: MakeOutcome) -> None:
    done, orphan = make_outcome(), make_outcome(seed=5)
    with open_for_writing(run) as writer:
        for outcome in (done, orphan):
            outcome.attempt.path.mkdir(parents=True)
            (outcome.attempt.path / ATTEMPT_FILE).write_text(outcome.attempt.to_json())
        torn = run.attempt_folder("0" * 12, 1)
        torn.mkdir(parents=True)
        (torn / ATTEMPT_FILE).write_text('{"cell": "0000')
        writer.append(done, None)
        found = list(writer.attempts_without_row())
    assert [attempt.cell.id for attempt in found] == [orphan.attempt.cell.id]
    for odd in ("²", "9" * 20, "1.bak"):
        (torn.parent / odd).mkdir()
    assert run.highest_attempts()["0" * 12] == 1


def test_the_last_prediction_counts_although_the_clock_was_set_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time_ns=lambda: 0, monotonic=time.monotonic)
    with open_for_writing(run) as writer:
        for value in (1.0, 2.0):
            writer.append_predictions({"c": [Sample("", "peak_allocated_bytes", "bytes", value)]})
            monkeypatch.setattr(run_writer, "time", clock)
    (latest,) = latest_predictions(run.read("predictions"))["value"]
    assert latest == 2.0


def _hold(
    folder: Path, held: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event
) -> None:
    with open_for_writing(Run(folder)):
        held.set()
        done.wait(30)


@pytest.mark.process
def test_the_second_driver_is_refused_with_the_process_that_holds_the_folder(run: Run) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(run.folder, held, done))
    holder.start()
    assert held.wait(30)
    with (
        pytest.raises(RunLocked, match=rf"process {holder.pid} on .* \(since"),
        open_for_writing(run),
    ):
        pass
    holder.kill()
    holder.join()
    with open_for_writing(run):  # a lock dies with its holder
        pass


def test_a_file_system_may_refuse_to_sync_folders(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    with open_for_writing(run) as writer:
        for seed in range(4):
            writer.append(make_outcome(seed=seed), None)
    assert len(run.read("attempts")) == 4


def test_a_driver_whose_folder_was_replaced_writes_nothing_into_the_new_one(
    run: Run, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(run) as before:
        before.write_manifest({"name": "before"})
        shutil.rmtree(run.folder)
        with open_for_writing(run) as now:
            now.write_manifest({"name": "now"})
            for write in (
                lambda: before.write_manifest({"name": "before"}),
                lambda: before.append(make_outcome(), None),
            ):
                with pytest.raises(
                    RunUnwritable,
                    match=r"was removed, and another driver writes to a new folder.*--out",
                ):
                    write()
            now.append(make_outcome(), None)
    assert run.read_manifest()["name"] == "now"
    assert len(run.read("attempts")) == 1


def test_a_missing_or_wrong_manifest_is_reported(run: Run) -> None:
    with pytest.raises(RunError, match="holds no run"):
        run.require()
    with open_for_writing(run) as writer:
        writer.write_manifest({"name": "x"})
    assert run.require().read_manifest()["name"] == "x"
    (run.folder / "run.json").write_text('{"schema_version": 99}')
    with pytest.raises(RunMismatch, match="newer"):
        run.read_manifest()
    (run.folder / "run.json").write_text("{torn")
    with pytest.raises(RunError, match="not JSON"):
        run.read_manifest()
    for foreign in ("[]", "null", '{"config": 1}', '{"config": {}, "invocations": 3}'):
        (run.folder / "run.json").write_text(foreign)
        with pytest.raises(RunError, match="of another program"):
            run.read_manifest()


@pytest.mark.parametrize(
    ("prefix", "what", "message"),
    [
        ("ad", "cell", "run: has no cell 'ad'. Allowed: 3f2a, 3fb1, 91c0"),
        ("91c1", "measured cell", "run: has no measured cell '91c1'. Allowed: 3f2a, 3fb1, 91c0"),
        ("3f", "measured cell", "run: '3f' begins 2 measured cells. Write more of one: 3f2a, 3fb1"),
    ],
)
def test_a_cell_is_found_by_the_beginning_of_its_id(prefix: str, what: str, message: str) -> None:
    cells, run = ["3f2a", "3fb1", "91c0"], Run(Path("run"))
    assert [find_cell(begin, cells, run) for begin in ("3f2", "9", "91c0")] == [
        "3f2a",
        "91c0",
        "91c0",
    ]
    with pytest.raises(RunError) as refused:
        find_cell(prefix, cells, run, what)
    assert str(refused.value) == message


def test_a_file_instead_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(RunUnwritable, match="cannot be written"),
        open_for_writing(Run(tmp_path / "run")),
    ):
        pass


def in_mount_namespace(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount name space, where it may mount a small or read-only disk."""
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if probe.returncode:
        pytest.skip("this machine allows no mount name spaces")
    root = ROOT
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "SWEEP": f"{sys.executable} -m orchestrator",
        "STEPS": f"{sys.executable} -P steps.py",
    }
    return subprocess.run(
        ["unshare", "-rm", "bash", "-ec", textwrap.dedent(script)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip


CONFIG = """
cat > c.yaml <<END
name: c
grids: [{task: train_step, axes: {seed: [0, 1, 2]},
         fixed: {device: cpu, size: tiny, context_length: 8, batch_size: 1,
                 warmup_steps: 0, measured_steps: 1}}]
END
"""


# Runs all commands in one process, so that one fork server starts the cells of all sweeps.
STEPS = """
import os, sys
from click.testing import CliRunner
from orchestrator.cli.main import main
from orchestrator.scheduling.serial import SerialScheduler

SerialScheduler.close = lambda scheduler: None
for line in sys.stdin:
    if line.startswith("sweep "):
        done = CliRunner().invoke(main, line.split()[1:], prog_name="sweep")
        print(done.output, f"exit {done.exit_code}", sep="", flush=True)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    else:
        os.system(line)
"""


@pytest.mark.process
def test_a_full_disk_loses_no_finished_cell(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    done = in_mount_namespace(
        CONFIG
        + """
        mkdir r; mount -t tmpfs -o size=200k tmpfs r
        $STEPS <<END
sweep run c.yaml --out r --scheduler serial --where seed=0
dd if=/dev/zero of=r/ballast bs=1k 2> /dev/null
sweep run c.yaml --out r --scheduler serial
rm r/ballast; mount -o remount,size=2m r
sweep run c.yaml --out r --scheduler serial
sweep status r
END
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^exit (\d)$", done.stdout, re.MULTILINE) == ["0", "2", "0", "0"], (
        done.stdout
    )
    assert "No space left on device. Free some space" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "3 ok" in done.stdout
    assert "seed=0" not in done.stdout.split("exit 2")[1]  # not measured twice


@pytest.mark.process
def test_a_read_only_folder_is_reported(tmp_path: Path) -> None:
    done = in_mount_namespace(
        CONFIG
        + """
        mkdir r; mount -t tmpfs -o ro tmpfs r
        $SWEEP run c.yaml --out r/deeper --scheduler serial > out 2> err && exit 1; echo "exit $?"
        cat err
        mkdir w; $SWEEP run c.yaml --out w --scheduler serial --where seed=0 > out
        mount --bind w r; mount -o remount,ro,bind r
        if $SWEEP report r --table timings > out 2> err; then exit 1; else echo "exit $?"; fi
        test -s out; cat err
        if $SWEEP run c.yaml --out r --scheduler serial > out 2> err; then exit 1; else echo "exit $?"; fi
        cat err; mount -o remount,rw,bind r
        $SWEEP run c.yaml --out r --scheduler serial > out; grep -o "measured 2 cells: 2 ok" out
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == [
        "exit 2",
        "sweep: r/deeper: cannot be written: Read-only file system. "
        "Name a writable folder with --out",
        "exit 2",
        "sweep: r: cannot be written: Read-only file system. "
        "Copy the run to a folder of your own, and report that",
        "exit 2",
        "sweep: r: cannot be written: Read-only file system. Name a writable folder with --out",
        "measured 2 cells: 2 ok",
    ], done.stderr
