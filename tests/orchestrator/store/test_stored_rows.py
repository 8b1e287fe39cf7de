"""Rows that are missing or damaged in a run are noticed, built again or measured again."""

from __future__ import annotations

import os
import random
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import Result

from orchestrator.analysis.results import load_results
from orchestrator.common.errors import RunError, RunMismatch, SweepError
from orchestrator.planning.request import SweepRequest
from orchestrator.store import batch_writer
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.cell_state import read_states
from orchestrator.store.listing import Listing
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.tables import MEASURED_TABLES, SCHEMAS
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, RankRow, Sample
from tests.support.fake_sweep import (
    CONFIG,
    FakeScheduler,
    go,
    journalled,
    lengths_of,
    outcome_of,
    request_for,
)

KERNEL = KernelRow(
    "forward", "ffn", "GEMM", "scope", "aten::mm", "gemm", 2, 4, 4000, 1e3, 1e3, 900, 1100, 81.6
)
ALLOCATION = AllocationRow("peak", "backward", "inputs", "", "part", "forward", "a < b", 7, 2, 14)
LIVE = LiveRow(3, 0.25, "forward", "activations", 14)
RANK = RankRow(0, "a GPU", "0-3", "ok", 10.0, 2, 7, 14, 1980.0, 300.0, 1.5)
# The tables of a cell with one rank.
JOURNALLED = [name for name in MEASURED_TABLES if name != "ranks"]


def measure(attempt: Attempt) -> Outcome:
    """Return an outcome with two rows of each table."""
    (sample,) = outcome_of(attempt).samples
    return replace(
        outcome_of(attempt),
        samples=(sample, replace(sample, value=6.0, step=1)),
        kernels=(KERNEL, replace(KERNEL, name="other")),
        allocations=(ALLOCATION, replace(ALLOCATION, count=3)),
        live=(LIVE, replace(LIVE, event=4)),
        ranks=(RANK, replace(RANK, rank=1)),
    )


def measure_alone(attempt: Attempt) -> Outcome:
    """Return the outcome of a cell with one rank: rows of ranks follow from several journals."""
    return replace(measure(attempt), ranks=())


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[[], SweepRequest]:
    return lambda: request_for(write_config(CONFIG), out=tmp_path / "run")


@pytest.fixture
def run(request_of: Callable[[], SweepRequest], make_once: Callable[..., None]) -> Run:
    """A run of four cells without journals, in batches of one, two and one attempts."""
    request = request_of()

    def measure_in_batches(attempt: Attempt) -> Outcome:
        if lengths_of(scheduler)[-1] in (32, 128):
            writers[-1].close()
        return measure(attempt)

    scheduler, writers, real = FakeScheduler(measure_in_batches), [], BatchWriter.append

    def append(writer: BatchWriter, rows: Any) -> None:
        writers.append(writer)
        real(writer, rows)

    def make() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchWriter, "append", append)
            go(request, scheduler)

    make_once(request.run.folder, make)
    return request.run


@pytest.fixture
def with_journals(request_of: Callable[[], SweepRequest]) -> Run:
    """A run of four cells with journals, of which one has a log."""
    request = request_of()
    go(request, FakeScheduler(partial(journalled, measure=measure_alone)))
    return request.run


def delete(path: Path) -> None:
    path.unlink()


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


HARMS = [delete, tear, flip, empty]


def harmed(tables: Iterable[str]) -> list[Any]:
    """Return each table with each harm, all but each table and each harm once in a slow tier."""
    return [
        pytest.param(table, harm, marks=() if row % len(HARMS) == column else pytest.mark.slow)
        for row, table in enumerate(tables)
        for column, harm in enumerate(HARMS)
    ]


@pytest.mark.parametrize(("table", "harm"), harmed(MEASURED_TABLES))
def test_cells_of_a_damaged_file_are_incomplete_and_measured_again(
    run: Run, request_of: Callable[[], SweepRequest], table: str, harm: Callable[[Path], None]
) -> None:
    before = read_states(run)
    (second,) = read_columns(run, "attempts", "0002.parquet")
    harm(run.folder / table / "0002.parquet")
    states = read_states(run)
    assert {cell for cell, one in states.items() if one.status == "incomplete"} == second
    assert {states[cell].status for cell in states.keys() - second} == {"ok"}
    messages: list[str] = []
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler, messages=messages)
    assert {attempt.cell.id for attempt in scheduler.begun} == second
    assert {attempt.number for attempt in scheduler.begun} == {2}
    assert len([line for line in messages if f"incomplete: {table} has " in line]) == 1
    assert len([line for line in messages if f"{table}/0002.parquet: damaged or" in line]) == 1
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert read_states(run).keys() == before.keys()
    again = FakeScheduler(measure)
    go(request_of(), again)
    assert lengths_of(again) == []


def read_columns(run: Run, table: str, name: str) -> list[set[str]]:
    return [set(pd.read_parquet(run.folder / table / name)["cell"])]


@pytest.mark.parametrize("harm", HARMS)
def test_attempts_of_a_damaged_file_are_refused_and_measured_again(
    run: Run,
    request_of: Callable[[], SweepRequest],
    sweep_here: Callable[..., Result],
    harm: Callable[[Path], None],
) -> None:
    (second,) = read_columns(run, "attempts", "0002.parquet")
    harm(run.folder / "attempts" / "0002.parquet")
    for words in (["status"], ["report", "--table", "timings"]):
        done = sweep_here(*words, run.folder)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        assert re.search(r"attempts/0002\.parquet: is (missing|damaged).*`sweep run`", done.stderr)
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler)
    assert {attempt.cell.id for attempt in scheduler.begun} == second
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert run.incomplete_attempts() == {}
    # What is left of the damaged batch is nowhere counted, and is not removed.
    assert len(run.read("samples")) == len(pd.read_parquet(run.folder / "samples")) == 8
    assert (run.folder / "damaged" / "samples-0002.parquet").exists()


@pytest.mark.parametrize(("table", "harm"), harmed(["attempts", *JOURNALLED]))
def test_a_damaged_file_is_built_again_from_journals(
    with_journals: Run,
    request_of: Callable[[], SweepRequest],
    table: str,
    harm: Callable[[Path], None],
) -> None:
    run = with_journals
    before = {name: run.read(name) for name in SCHEMAS}
    lost = request_of().expansion.cells[0].id
    if table != "attempts":
        shutil.rmtree(run.folder / "artifacts" / lost)
    harm(run.folder / table / "0001.parquet")
    scheduler = FakeScheduler(measure)
    result = go(request_of(), scheduler)
    if table == "attempts":
        assert (result.recovered, lengths_of(scheduler)) == (4, [])
    else:
        assert (result.recovered, lengths_of(scheduler)) == (0, [16])
    assert {one.status for one in read_states(run).values()} == {"ok"}
    for name in JOURNALLED:
        first = run.read(name).query("attempt == 1 and cell != @lost")
        expected = before[name].query("cell != @lost")
        key = list(expected.columns)
        pd.testing.assert_frame_equal(
            first.sort_values(key, ignore_index=True), expected.sort_values(key, ignore_index=True)
        )
    assert len(pd.read_parquet(run.folder / table)) == len(run.read(table))


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_file_of_predictions_alone_leaves_the_list(
    run: Run, request_of: Callable[[], SweepRequest], harm: Callable[[Path], None]
) -> None:
    """A driver may be killed after its predictions, before it stores an attempt."""
    with open_for_writing(run) as writer:
        writer.append_predictions({"c": (Sample("prediction", "peak", "GiB", 1.0, "", "step", 0),)})
    harm(run.folder / "predictions" / "0004.parquet")
    scheduler, messages = FakeScheduler(measure), list[str]()
    go(request_of(), scheduler, messages=messages)
    assert lengths_of(scheduler) == []
    assert any("predictions/0004.parquet: damaged or missing" in line for line in messages)
    assert run.read("predictions").empty


@pytest.mark.parametrize("harm", HARMS)
def test_a_lost_list_is_written_again(
    run: Run,
    request_of: Callable[[], SweepRequest],
    sweep_here: Callable[..., Result],
    harm: Callable[[Path], None],
) -> None:
    before = {name: run.read(name) for name in SCHEMAS}
    harm(run.folder / "stored.json")
    done = sweep_here("status", run.folder)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert "stored.json: " in done.stderr
    messages: list[str] = []
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler, messages=messages)
    assert lengths_of(scheduler) == []
    assert [line for line in messages if "written again from the batches" in line]
    for name, frame in before.items():
        pd.testing.assert_frame_equal(run.read(name), frame)


def test_an_older_list_is_noticed(run: Run, request_of: Callable[[], SweepRequest]) -> None:
    listing = run.stored().listing
    older = {name: digest for name, digest in listing.files.items() if "0003" not in name}
    listing.model_copy(update={"files": older, "last": 2}).write(run.folder)
    with pytest.raises(RunError, match=r"stored\.json: is missing, or older than attempts/0003"):
        read_states(run)
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler)
    assert lengths_of(scheduler) == []
    assert run.stored().listing.files == listing.files


@pytest.fixture
def logged(request_of: Callable[[], SweepRequest], tmp_path: Path) -> Run:
    """A run whose driver was killed: its four attempts have journals and are in the log."""
    request = request_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunWriter, "finish", lambda writer: None)
        go(request, FakeScheduler(partial(journalled, measure=measure_alone)))
    assert [path.name for path in request.run.folder.glob("*.log")] == ["0001.log"]
    return request.run


def test_a_damaged_line_of_the_log_is_stored_again_from_the_journal(
    logged: Run, request_of: Callable[[], SweepRequest], sweep_here: Callable[..., Result]
) -> None:
    log = logged.folder / "0001.log"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1].replace(b"5.0", b"6.0", 1) + b"".join(lines[2:]))
    done = sweep_here("status", logged.folder)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
    assert "0001.log: is damaged: 1 of its lines differ" in done.stderr
    messages: list[str] = []
    scheduler = FakeScheduler(measure)
    result = go(request_of(), scheduler, messages=messages)
    assert (result.recovered, lengths_of(scheduler)) == (1, [])
    assert any("0001.log: is damaged" in line for line in messages)
    assert sorted(logged.read("samples")["value"]) == [5.0] * 4 + [6.0] * 4


def test_a_lost_log_is_stored_again_from_the_journals(
    logged: Run, request_of: Callable[[], SweepRequest]
) -> None:
    (logged.folder / "0001.log").unlink()
    scheduler = FakeScheduler(measure)
    assert (go(request_of(), scheduler).recovered, lengths_of(scheduler)) == (4, [])
    assert len(logged.read("samples")) == 8


@pytest.mark.parametrize(
    "entry", [b"[]", b"7", b'{"samples": 1}', b'{"samples": [1, {"cell": ["a"], "attempt": []}]}',
              b'{"samples": [1, {"cell": [{}]}]}', b'{"attempts": [1, {"attempt": ["x"]}]}', b"[" * 100_000],
)  # fmt: skip
def test_a_line_of_another_program_is_one_line(logged: Run, entry: bytes) -> None:
    log = logged.folder / "0001.log"
    log.write_bytes(log.read_bytes() + b"%08x %s\n" % (zlib.crc32(entry), entry))
    with pytest.raises(RunError, match=r"0001\.log: cannot be read") as caught:
        read_states(logged)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["../../thesis.tex", "/etc/passwd", "samples/../x.parquet", "samples/0001.txt", "0001.parquet",
     "samples/0001.parquet/..", "samples/1.parquet", "SAMPLES/0001.parquet", "samples/٠٠٠١.parquet",
     "samples/0001.parquet\n", "samples//0001.parquet", "", "."],
)  # fmt: skip
def test_a_listed_name_that_is_no_batch_refuses_the_run(
    run: Run, name: str, tmp_path: Path, request_of: Callable[[], SweepRequest]
) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("thesis")
    listing = run.stored().listing
    Listing(files={**listing.files, name: "0" * 64}).write(run.folder)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"is not the name of a batch\. Do not use") as caught:
        read_states(run)
    assert "\n" not in str(caught.value).replace("\\n", "")
    assert sorted(tmp_path.rglob("*")) == files
    assert precious.read_text() == "thesis"


def test_a_list_of_a_newer_program_asks_for_an_update(run: Run) -> None:
    (run.folder / "stored.json").write_text('{"schema_version": 99, "files": []}')
    with pytest.raises(RunMismatch, match="newer than"):
        read_states(run)


def test_a_table_of_a_newer_program_is_ignored_and_stays_listed(
    run: Run, make_outcome: Callable[..., Outcome]
) -> None:
    listing = run.stored().listing
    Listing(files={**listing.files, "traces/0001.parquet": "0" * 64}).write(run.folder)
    assert {one.status for one in read_states(run).values()} == {"ok"}
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    assert "traces/0001.parquet" in run.stored().listing.files


def test_commands_name_an_incomplete_cell_and_publish_refuses(
    run: Run, sweep_here: Callable[..., Result]
) -> None:
    (run.folder / "samples" / "0002.parquet").unlink()
    cell = min(cell for cell, one in read_states(run).items() if one.status == "incomplete")
    expected = (
        f"attempt 1 of cell {cell} is incomplete: samples has 0 of its 2 rows;"
        " 1 cell more incomplete. Copy"
    )
    for words in (["status"], ["report", "--table", "timings"]):
        done = sweep_here(*words, run.folder)
        assert (done.exit_code, expected in done.stderr) == (0, True), done.output
    assert "2 incomplete" in sweep_here("status", run.folder).stdout
    failures = sweep_here("report", run.folder, "--table", "failures").stdout
    assert failures.count("samples has 0 of its 2 rows") == 2
    done = sweep_here("publish", run.folder, "--out", "published")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert expected in done.stderr


class Killed(BaseException):
    """The end of a driver by -9, as far as files are concerned."""


def every_eighth_in_the_default_tier(count: int) -> list[Any]:
    """Return the numbers from 1 on as parameters, most of them slow."""
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(number, marks=marks[number % 8 == 0]) for number in range(1, count)]


@pytest.mark.parametrize("kill_at", every_eighth_in_the_default_tier(60))
def test_a_kill_at_any_write_loses_and_repeats_nothing(
    kill_at: int, tmp_path: Path, make_outcome: Callable[..., Outcome]
) -> None:
    """Every write, rename, sync and removal while attempts are stored and batches are closed."""
    run, outcomes = Run(tmp_path / "run"), [make_outcome(seed=seed) for seed in range(6)]
    run.folder.mkdir()
    stored: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_writer, "BATCH", 2)
        steps = patch_writes(patch, kill_at)
        try:
            writer = RunWriter(run.folder)
            for outcome in outcomes[:5]:
                writer.append(outcome, None)
                stored.append(outcome.attempt.cell.id)
            writer.finish()
        except Killed:
            assert steps[0] >= kill_at
        else:
            pytest.skip(f"there are only {steps[0]} writes")
    found = list(run.read("attempts")["cell"])
    assert found[: len(stored)] == stored
    assert len(found) <= len(stored) + 1  # the one that was being stored
    assert Counter(run.read("samples")["cell"]) == dict.fromkeys(found, 12)
    assert run.incomplete_attempts() == {}
    with open_for_writing(run) as writer:
        left = [outcome for outcome in outcomes if outcome.attempt.cell.id not in found]
        for outcome in left:
            writer.append(outcome, None)
    assert sorted(run.read("attempts")["cell"]) == sorted(one.attempt.cell.id for one in outcomes)
    assert len(pd.read_parquet(run.folder / "samples")) == len(run.read("samples")) == 6 * 12
    assert not list(run.folder.glob("*.log"))


def patch_writes(patch: pytest.MonkeyPatch, kill_at: int) -> list[int]:
    """Have a write of this number end the driver. Return a list with the number of writes so far.

    Before a file is renamed, replaced, removed or synced, and in the middle of an append.
    """
    steps = [0]

    def before(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            steps[0] += 1
            if steps[0] >= kill_at:  # nothing is cleaned up afterwards
                raise Killed
            return real(*arguments, **named)

        return call

    for name in ("rename", "replace", "unlink", "touch"):
        patch.setattr(Path, name, before(getattr(Path, name)))
    patch.setattr(os, "fsync", before(os.fsync))
    return steps


@pytest.mark.parametrize("table", ["attempts", "samples"])
@pytest.mark.parametrize("kill_at", every_eighth_in_the_default_tier(40))
def test_a_kill_while_a_batch_is_built_again_loses_nothing(
    kill_at: int, table: str, with_journals: Run, request_of: Callable[[], SweepRequest]
) -> None:
    run = with_journals
    flip(run.folder / table / "0001.parquet")
    with pytest.MonkeyPatch.context() as patch:
        steps = patch_writes(patch, kill_at)
        try:
            go(request_of(), FakeScheduler(measure))
        except Killed:
            pass
        else:
            if steps[0] < kill_at:
                pytest.skip(f"there are only {steps[0]} writes")
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler)
    assert lengths_of(scheduler) == []
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert len(run.read("attempts")) == 4
    for name in JOURNALLED:
        assert len(pd.read_parquet(run.folder / name)) == len(run.read(name)) == 8


FLIPS = 2000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    ["stored.json", "0002.log", "attempts/0001.parquet", "samples/0001.parquet",
     "kernels/0001.parquet", "cells.parquet", "run.json"],
)  # fmt: skip
def test_a_flipped_bit_never_changes_a_value(
    name: str, request_of: Callable[[], SweepRequest], make_outcome: Callable[..., Outcome]
) -> None:
    """It has no effect, is refused in one line, or makes the damaged cells incomplete."""
    go(request_of(), FakeScheduler(measure), summary=True)
    run = request_of().run
    writer = RunWriter(run.folder)
    if name == "0002.log":
        writer.append(make_outcome(context_length=512), None)
    truth = values_of(run, name == "cells.parquet")
    path, chance = run.folder / name, random.Random(name)
    good, ended = path.read_bytes(), Counter[str]()
    for _ in range(FLIPS if name != "cells.parquet" else FLIPS // 20):
        bad = bytearray(good)
        bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        try:
            found = values_of(run, name == "cells.parquet")
        except SweepError as error:
            ended["refused" if "\n" not in str(error) else "refused in several lines"] += 1
            continue
        for cell, values in found.items():
            if values[0] != "incomplete":
                assert values == truth[cell]
        missing = truth.keys() - found.keys()
        assert not missing or name == "0002.log"  # its end is half a line then
        ended["same" if found == truth else "less"] += 1
    path.write_bytes(good)
    print(name, dict(ended))
    assert ended.keys() <= {"refused", "same", "less"}
    assert values_of(run, name == "cells.parquet") == truth


def values_of(run: Run, is_derived: bool) -> dict[str, tuple[str, str]]:
    """Return the status and all values of each cell."""
    states = read_states(run)
    if is_derived:
        cells = load_results(run).cells.set_index("cell", drop=False)
        return {cell: (states[cell].status, cells.loc[cell].to_json()) for cell in cells.index}
    found: dict[str, list[object]] = {cell: [] for cell in states}
    for table in ("attempts", "samples", "kernels"):
        for row in run.rows(table, SCHEMAS[table].names):
            found[row[0]].append(row)
    run.read_manifest()
    return {cell: (states[cell].status, repr(rows)) for cell, rows in found.items()}
