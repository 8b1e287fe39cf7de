"""Rows that are missing, damaged or twice in a run are noticed, whatever the command."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from orchestrator.common.errors import RunError
from orchestrator.planning.request import SweepRequest
from orchestrator.store import run_writer
from orchestrator.store.cell_state import read_states
from orchestrator.store.open import open_for_writing
from orchestrator.store.parquet_parts import read_parts
from orchestrator.store.row_digests import digests_by_attempt
from orchestrator.store.run import Run
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import AllocationRow, KernelRow, LiveRow, Sample
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, lengths_of, outcome_of, request_for

MEASURED = ["samples", "kernels", "allocations", "live"]
KERNEL = KernelRow(
    "forward", "ffn", "GEMM", "scope", "aten::mm", "gemm", 2, 4, 4000, 1e3, 1e3, 900, 1100, 81.6
)
ALLOCATION = AllocationRow("peak", "backward", "inputs", "", "part", "forward", "a < b", 7, 2, 14)
LIVE = LiveRow(3, 0.25, "forward", "activations", 14)


def measure(attempt: Attempt) -> Outcome:
    """Return an outcome with two rows of each table."""
    (sample,) = outcome_of(attempt).samples
    return replace(
        outcome_of(attempt),
        samples=(sample, replace(sample, value=6.0, step=1)),
        kernels=(KERNEL, replace(KERNEL, name="other")),
        allocations=(ALLOCATION, replace(ALLOCATION, count=3)),
        live=(LIVE, replace(LIVE, event=4)),
    )


@pytest.fixture
def request_of(write_config: Callable[..., Path], tmp_path: Path) -> Callable[[], SweepRequest]:
    return lambda: request_for(write_config(CONFIG), out=tmp_path / "run")


@pytest.fixture
def run(request_of: Callable[[], SweepRequest], make_once: Callable[..., None]) -> Run:
    """A run of four cells."""
    request = request_of()
    make_once(request.run.folder, lambda: go(request, FakeScheduler(measure)))
    return request.run


def parts_of(run: Run, table: str) -> list[Path]:
    return sorted((run.folder / table).glob("*.parquet"))


def delete(part: Path) -> None:
    part.unlink()


def halve(part: Path) -> None:
    table = pq.read_table(part)
    pq.write_table(table.slice(0, 1), part)


def halve_without_metadata(part: Path) -> None:
    table = pq.read_table(part).replace_schema_metadata(None)
    pq.write_table(table.slice(0, 1), part)


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("lose", [delete, halve, halve_without_metadata])
@pytest.mark.parametrize("table", MEASURED)
def test_a_cell_whose_rows_are_missing_is_incomplete_and_measured_again(
    run: Run,
    request_of: Callable[[], SweepRequest],
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    lose: Callable[[Path], None],
    is_merged: bool,
) -> None:
    part = parts_of(run, table)[0]
    lose(part)
    if is_merged:
        monkeypatch.setattr(run_writer, "MERGE_BATCH", 2)
        with open_for_writing(run) as writer:
            writer.merge_parts()
    states = read_states(run)
    assert states[part.stem[:-2]].status == "incomplete"
    assert [one.status for one in states.values()].count("ok") == 3
    messages: list[str] = []
    scheduler = FakeScheduler(measure)
    go(request_of(), scheduler, messages=messages)
    assert [attempt.cell.id for attempt in scheduler.begun] == [part.stem[:-2]]
    assert [attempt.number for attempt in scheduler.begun] == [2]
    assert len([message for message in messages if f"{table}: has " in message]) == 1
    assert {one.status for one in read_states(run).values()} == {"ok"}
    again = FakeScheduler(measure)
    go(request_of(), again)
    assert lengths_of(again) == []


def test_commands_name_an_incomplete_cell_and_publish_refuses(
    run: Run, sweep_here: Callable[..., Result]
) -> None:
    for part in parts_of(run, "samples")[:2]:
        part.unlink()
    cell = min(read_states(run))
    expected = f"has 0 of the 2 rows of attempt 1 of cell {cell}; 1 cell more incomplete. Copy"
    for words in (["status"], ["report", "--table", "timings"]):
        done = sweep_here(*words, run.folder)
        assert (done.exit_code, expected in done.stderr) == (0, True), done.output
    assert "2 incomplete" in sweep_here("status", run.folder).stdout
    failures = sweep_here("report", run.folder, "--table", "failures").stdout
    assert failures.count("samples has 0 of its 2 rows") == 2
    done = sweep_here("publish", run.folder, "--out", "published")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert expected in done.stderr


def test_rows_of_older_programs_are_accepted(run: Run) -> None:
    for part in parts_of(run, "attempts"):
        table = pq.read_table(part).drop_columns(["contents"])
        pq.write_table(table.replace_schema_metadata(None), part)
    shutil.rmtree(run.folder / "kernels")
    assert {one.status for one in read_states(run).values()} == {"ok"}


def swap(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def copy_over(first: Path, second: Path) -> None:
    shutil.copy(first, second)


def copy_next_to(first: Path, second: Path) -> None:
    shutil.copy(first, first.with_name(f"{first.stem}-old.parquet"))


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("harm", [swap, copy_over, copy_next_to])
@pytest.mark.parametrize("table", ["attempts", *MEASURED])
def test_a_part_with_the_rows_of_another_is_refused_in_one_line(
    run: Run,
    sweep_here: Callable[..., Result],
    table: str,
    harm: Callable[[Path, Path], None],
    is_old: bool,
) -> None:
    if is_old:
        for part in parts_of(run, table):
            pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    harm(*parts_of(run, table)[:2])
    for words in (["status"], ["report", "--table", "timings"]):
        done = sweep_here(*words, run.folder)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        assert ".parquet: contains the rows of attempt 1 of " in done.stderr
        assert "Move one of the files away" in done.stderr
    with open_for_writing(run) as writer, pytest.raises(RunError, match="contains the rows"):
        writer.require_readable_parts()


def test_a_copy_of_a_merged_part_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 2)
    with open_for_writing(run) as writer:
        writer.merge_parts()
    merged = parts_of(run, "attempts")[0]
    shutil.copy(merged, merged.with_name("merged-1.parquet"))
    with pytest.raises(RunError, match=r"contains the rows of attempt 1 of .* also contains"):
        run.read("attempts")


@pytest.mark.parametrize("table", ["attempts", "samples", "predictions"])
def test_a_flipped_bit_has_no_effect_or_is_refused(run: Run, table: str) -> None:
    with open_for_writing(run) as writer:
        prediction = Sample("", "peak_allocated_bytes", "bytes", 2.0**30, "steady", "forward")
        writer.append_predictions({"c": [prediction]})
    part = parts_of(run, table)[0]
    for other in parts_of(run, table)[1:]:
        other.unlink()
    good, chance = part.read_bytes(), random.Random(1)
    (before,) = read_parts(part.parent, SCHEMAS[table], None)
    refused: list[str] = []
    for number in range(300):
        bad = bytearray(good)
        bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        part.write_bytes(bad)
        os.utime(part, ns=(number, number))  # clocks of file systems may stand still that long
        try:
            (after,) = read_parts(part.parent, SCHEMAS[table], None)
        except RunError as error:
            refused.append(str(error))
        else:
            assert after.equals(before)
    assert len(refused) > 290
    assert "\n" not in "".join(refused)


def test_changed_values_are_damage(run: Run) -> None:
    part = parts_of(run, "samples")[0]
    table = pq.read_table(part)
    changed = table.set_column(table.schema.get_field_index("value"), "value", pa.array([5.0, 7.0]))
    pq.write_table(changed.replace_schema_metadata(None), part)
    expected = (
        r"is damaged: its rows differ from the rows that were written\. Copy it again, or move"
    )
    with pytest.raises(RunError, match=expected):
        run.incomplete_attempts()
    pq.write_table(changed, part)  # with the digest of the rows before
    with pytest.raises(RunError, match=expected):
        run.read("samples")


def test_a_digest_depends_on_values_alone() -> None:
    rows = pa.table(
        {
            "cell": ["a", "b", "a"],
            "attempt": pa.array([1, 1, 1], pa.int32()),
            "value": [1.0, None, -0.0],
            "text": ["x", "y", None],
        }
    )
    expected = digests_by_attempt(rows, "")
    assert {name: one.rows for name, one in expected.items()} == {"a-1": 2, "b-1": 1}
    shuffled = rows.take([2, 1, 0]).select(["text", "value", "attempt", "cell"])
    encoded = rows.set_column(3, "text", rows["text"].dictionary_encode())
    wider = rows.append_column("new", pa.nulls(3, pa.string()))
    large = rows.set_column(3, "text", rows["text"].cast(pa.large_string()))
    halves = pa.concat_tables([rows.slice(0, 2), rows.slice(2)])
    for same in (shuffled, encoded, wider, large, halves):
        assert digests_by_attempt(same, "") == expected
    frame = rows.to_pandas()
    for column, value in (("value", 1.5), ("text", "z")):
        other = pa.Table.from_pandas(frame.assign(**{column: value}), rows.schema)
        assert digests_by_attempt(other, "")["a-1"] != expected["a-1"]
    moved = pa.Table.from_pandas(pd.DataFrame(frame).assign(cell=["a", "a", "b"]), rows.schema)
    assert digests_by_attempt(moved, "") != expected
    with pytest.raises(pa.ArrowInvalid, match="column of type list"):
        digests_by_attempt(rows.append_column("lists", pa.array([[1.0]] * 3)), "")
