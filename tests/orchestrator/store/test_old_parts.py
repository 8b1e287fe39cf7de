"""Runs of older versions are read as they were written, or their damage is reported."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from orchestrator.common.errors import RunError
from orchestrator.store.cell_state import read_states
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.tables import SCHEMAS
from tasks.spec.outcome import Outcome
from tests.conftest import ROOT
from tests.support.fake_sweep import CONFIG, FakeScheduler, go, lengths_of, outcome_of, request_for

MakeOutcome = Callable[..., Outcome]
# Single and merged parts, and parts that a killed driver did not remove after it had merged them.
STORED = ROOT / "tests" / "data" / "parts"
SINGLE = "c8e8af5d4a64-1.parquet"
FIRST = pa.array([1], pa.int32())
ROW = {
    "cell": ["c"],
    "attempt": FIRST,
    "task": ["train_step"],
    "status": ["ok"],
    "params": ["{}"],
    "evidence": ["{}"],
    "facts": ["{}"],
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(STORED, tmp_path / "run")))


@pytest.fixture
def empty(tmp_path: Path) -> Run:
    return Run(tmp_path / "empty")


def write(run: Run, name: str, columns: dict[str, Any]) -> Path:
    """Write a part as a program without any metadata."""
    path = run.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("categories", [False, True])
def test_every_row_is_read_once(run: Run, categories: bool) -> None:
    expected = json.loads(STORED.with_suffix(".json").read_text())
    for table in SCHEMAS.keys() - {"ranks"}:  # no older version has it
        frame = run.read(table, categories=categories)
        texts = dict.fromkeys(frame.select_dtypes("category"), "object")
        frame = frame.astype(texts)
        key = [name for name in ("cell", "attempt", "predicted_at") if name in frame]
        frame = frame.sort_values(key + [name for name in frame if name not in key])
        assert json.loads(frame.to_json(orient="records", date_format="iso")) == expected[table]
    assert run.incomplete_attempts() == {}
    assert [one.status for one in read_states(run).values()] == 5 * ["ok"]


def test_a_run_is_continued_and_its_parts_stay_as_they_are(
    run: Run, write_config: Callable[..., Path]
) -> None:
    before = {path: path.read_bytes() for path in run.folder.glob("*/*.parquet")}
    request = request_for(write_config(CONFIG.replace("128]", "128, 256, 512]")), out=run.folder)
    scheduler = FakeScheduler(outcome_of)
    go(request, scheduler, summary=True)
    assert lengths_of(scheduler) == [512]
    assert {path: path.read_bytes() for path in before} == before
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert len(pd.read_parquet(run.folder / "cells.parquet")) == 6
    # Parts and batches have the same columns, so that pandas reads a folder as one table.
    for table in ("kernels", "live", "allocations"):
        pd.testing.assert_frame_equal(
            pd.read_parquet(run.folder / table).sort_values(
                ["cell", "attempt"], kind="stable", ignore_index=True
            ),
            run.read(table).sort_values(["cell", "attempt"], kind="stable", ignore_index=True),
        )
    samples = pd.read_parquet(run.folder / "samples")
    assert len(samples.drop_duplicates()) == len(run.read("samples")) == 11
    assert list(samples.columns) == SCHEMAS["samples"].names
    again = FakeScheduler(outcome_of)
    go(request, again)
    assert lengths_of(again) == []


def test_a_single_part_is_read_without_pandas(tmp_path: Path) -> None:
    """It is imported for groups of rows, which a part without another one needs not have."""
    shutil.copytree(ROOT / "results" / "published" / "h200" / "warmup", tmp_path / "run")
    code = (
        "import sys; from pathlib import Path; from orchestrator.store.cell_state import read_states"
        "; from orchestrator.store.run import Run"
        f"; assert read_states(Run(Path({str(tmp_path / 'run')!r}))); print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"]


def test_a_lost_part_makes_its_cells_incomplete(run: Run) -> None:
    (run.folder / "samples" / SINGLE).unlink()
    states = read_states(run)
    assert states.pop("c8e8af5d4a64").status == "incomplete"
    assert {one.status for one in states.values()} == {"ok"}
    (missing,) = run.incomplete_attempts().values()
    assert missing == "samples has 0 of its 2 rows"


def test_half_of_the_rows_make_a_cell_incomplete(run: Run) -> None:
    path = run.folder / "live" / SINGLE
    pq.write_table(pq.read_table(path).slice(0, 1), path)
    (missing,) = run.incomplete_attempts().values()
    assert missing == "live has 1 of its 2 rows"


def test_a_row_without_contents_is_accepted(run: Run) -> None:
    for path in (run.folder / "attempts").glob("*.parquet"):
        table = pq.read_table(path).drop_columns(["contents"])
        pq.write_table(table, path)
    shutil.rmtree(run.folder / "kernels")
    assert {one.status for one in read_states(run).values()} == {"ok"}
    assert run.read("kernels").empty


@pytest.mark.parametrize(
    "name", ["../../thesis.tex", "{}/thesis.tex", "../attempts/all.parquet", "thesis.tex", "."]
)
def test_a_merged_part_that_names_other_files_changes_none(
    name: str, run: Run, tmp_path: Path, write_config: Callable[..., Path]
) -> None:
    precious = tmp_path / "thesis.tex"
    precious.write_text("thesis")
    merged = next((run.folder / "samples").glob("merged-*"))
    table = pq.read_table(merged)
    replaces = [*json.loads(table.schema.metadata[b"replaces"]), name.format(tmp_path)]
    metadata = {b"replaces": json.dumps(replaces).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), merged)
    files = sorted(path for path in tmp_path.rglob("*.parquet"))
    assert len(run.read("samples")) == 10
    request = request_for(write_config(CONFIG), out=run.folder)
    go(request, FakeScheduler(outcome_of))
    assert sorted(tmp_path.rglob("*.parquet")) == files
    assert precious.read_text() == "thesis"


def test_newer_columns_are_null_and_dropped_ones_stay(run: Run) -> None:
    write(run, "attempts/zzz-1.parquet", {**ROW, "cell": ["zzz"], "since_dropped": [1]})
    frame = run.read("attempts").set_index("cell")
    assert pd.isna(frame["wall_s"]["zzz"])
    assert frame["since_dropped"]["zzz"] == 1
    assert list(run.read("attempts", ["cell", "status"]).columns) == ["cell", "status"]


@pytest.mark.parametrize("table", ["attempts", "samples"])
@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ({"a": [1.5], "b": ["of another program"]}, "no column attempt, cell"),
        ({"cell": ["c"], "attempt": ["first"], "status": ["ok"]}, "cannot be read"),
    ],
)
def test_a_part_of_another_program_is_reported(
    run: Run, foreign: dict[str, list[object]], message: str, table: str
) -> None:
    part = write(run, f"{table}/c-first.parquet", foreign)
    with pytest.raises(
        RunError, match=r"c-first\.parquet: cannot be read: .*move it away"
    ) as caught:
        run.read(table)
    assert message in str(caught.value)
    assert "to measure its cells again" in str(caught.value)
    part.unlink()
    assert len(run.read(table))


@pytest.mark.parametrize("copy", ["{} (copy)", "{} 2", "{}.sync-conflict-20261123", "{}~", "x-.."])
@pytest.mark.parametrize("table", ["attempts", "samples"])
def test_a_copy_of_a_part_is_reported(run: Run, table: str, copy: str) -> None:
    part = run.folder / table / SINGLE
    shutil.copy(part, part.with_name(f"{copy.format(part.stem)}.parquet"))
    for read in (
        lambda: run.read(table),
        lambda: list(run.rows(table, ["cell"])),
        lambda: run.read(table, categories=True),
        lambda: read_states(run),
    ):
        with pytest.raises(
            RunError,
            match=r"is not the name of a part\. Move it away: a copy of a part would count twice",
        ):
            read()


@pytest.mark.parametrize(
    ("table", "foreign", "message"),
    [
        ("attempts", {**ROW, "cell": pa.nulls(1, pa.string())}, "rows without cell"),
        ("attempts", {**ROW, "task": pa.nulls(1, pa.string())}, "rows without task"),
        ("attempts", {**ROW, "facts": ["no JSON"]}, "cannot be read"),
        ("attempts", {**ROW, "params": ["[]"]}, "its params are no JSON objects"),
        ("attempts", {**ROW, "facts": ["[" * 100_000]}, "maximum recursion depth exceeded"),
        ("attempts", {**ROW, "facts": [r'{"x": "\uD800"}']}, "surrogates not allowed"),
        (
            "samples",
            {"cell": ["c"], "attempt": pa.nulls(1, pa.int32()), "value": [1.0]},
            "rows without attempt",
        ),
        ("predictions", {"cell": ["c"], "value": [1.0]}, "no column predicted_at"),
    ],
)
@pytest.mark.parametrize("categories", [False, True])
def test_rows_of_another_program_are_reported(
    empty: Run, table: str, foreign: dict[str, Any], message: str, categories: bool
) -> None:
    write(empty, f"{table}/c-1.parquet", foreign)
    with pytest.raises(RunError, match=r"c-1\.parquet: cannot be read: .*move it away") as caught:
        empty.read(table, categories=categories)
    assert message in str(caught.value)


def test_samples_without_most_columns_are_read_as_categories(empty: Run) -> None:
    write(empty, "samples/c-1.parquet", {"cell": ["c"], "attempt": FIRST, "value": [1.0]})
    (row,) = empty.read("samples", categories=True).to_dict("records")
    assert (row["cell"], row["value"]) == ("c", 1.0)
    assert pd.isna(row["instrument"])


def test_a_part_with_two_columns_of_one_name_is_reported(empty: Run) -> None:
    (empty.folder / "attempts").mkdir(parents=True)
    twice = pa.table(ROW).append_column("status", pa.array(["ok"]))
    pq.write_table(twice, empty.folder / "attempts" / "twice.parquet")
    with pytest.raises(RunError, match=r"twice\.parquet: cannot be read: .*two columns status"):
        empty.read("attempts")


def test_a_torn_part_is_moved_away_to_measure_its_cell_again(run: Run) -> None:
    samples = run.folder / "samples" / SINGLE
    samples.write_bytes(samples.read_bytes()[:-100])
    with pytest.raises(RunError, match=rf"{SINGLE}: cannot be read: .* move it away to measure"):
        run.read("samples")
    samples.unlink()
    assert read_states(run)["c8e8af5d4a64"].status == "incomplete"


def test_an_unknown_status_is_reported(run: Run) -> None:
    write(run, "attempts/c-1.parquet", {**ROW, "status": ["marvellous"]})
    with pytest.raises(RunError, match=r"unknown status 'marvellous'\. Move the part away"):
        read_states(run)


def test_partial_files_are_ignored(run: Run) -> None:
    for name in (".torn.parquet.123", "._c-1.parquet"):
        (run.folder / "attempts" / name).write_bytes(b"PAR1 half a file")
    assert len(run.read("attempts")) == 5


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_part_that_this_process_cannot_open_is_not_reported_as_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The remedy is another limit or permission, not another copy of the file."""

    def refuse(path: Path, *arguments: object, **named: object) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        run.read("samples")
    assert caught.value.errno == number


def copy_over(first: Path, second: Path) -> None:
    shutil.copy(first, second)


def copy_next_to(first: Path, second: Path) -> None:
    shutil.copy(first, first.with_name(f"{first.stem}-old.parquet"))


def test_a_part_may_have_another_name(run: Run) -> None:
    before = run.read("samples")
    part = run.folder / "samples" / SINGLE
    part.rename(part.with_name("renamed-1.parquet"))
    assert sorted(run.read("samples")["value"]) == sorted(before["value"])
    assert run.incomplete_attempts() == {}


@pytest.mark.parametrize("has_metadata", [False, True])
@pytest.mark.parametrize("harm", [copy_over, copy_next_to])
@pytest.mark.parametrize("table", ["attempts", "samples"])
def test_a_part_with_the_rows_of_another_is_refused_in_one_line(
    run: Run,
    sweep_here: Callable[..., Result],
    table: str,
    harm: Callable[[Path, Path], None],
    has_metadata: bool,
) -> None:
    for merged in (run.folder / table).glob("merged-*"):
        merged.unlink()
    parts = sorted((run.folder / table).glob("*.parquet"))
    if not has_metadata:
        for part in parts:
            pq.write_table(pq.read_table(part).replace_schema_metadata(None), part)
    harm(*parts[:2])
    for words in (["status"], ["report", "--table", "timings"]):
        done = sweep_here(*words, run.folder)
        assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.output
        assert ".parquet: contains the rows of attempt 1 of " in done.stderr
        assert "Move one of the files away" in done.stderr


def test_a_copy_of_a_merged_part_is_refused(run: Run) -> None:
    merged = next((run.folder / "attempts").glob("merged-*"))
    shutil.copy(merged, merged.with_name("merged-1.parquet"))
    with pytest.raises(RunError, match=r"contains the rows of attempt 1 of .* also contains"):
        run.read("attempts")


def test_a_copy_of_a_batch_is_no_merged_part(run: Run, make_outcome: MakeOutcome) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    shutil.copy(
        run.folder / "samples" / "0001.parquet", run.folder / "samples" / "merged-7.parquet"
    )
    with pytest.raises(RunError, match=r"merged-7\.parquet: cannot be read: it names no parts"):
        run.read("samples")


def test_rows_of_a_copied_batch_do_not_stand_in_for_lost_ones(
    run: Run, make_outcome: MakeOutcome
) -> None:
    outcomes = [make_outcome(seed=seed) for seed in range(2)]
    with open_for_writing(run) as writer:
        for outcome in outcomes:
            writer.append(outcome, None)
            writer.finish()
    samples = run.folder / "samples"
    shutil.copy(samples / "0001.parquet", samples / "all.parquet")
    (samples / "0002.parquet").unlink()
    states = read_states(run)
    for outcome in outcomes:
        assert states[outcome.attempt.cell.id].status == "incomplete"
    shutil.copy(samples / "0001.parquet", samples / "x-1.parquet")
    with pytest.raises(RunError, match=r"contains the rows of attempt 1 of .*also contains"):
        read_states(run)


def test_a_part_of_an_attempt_that_is_in_a_batch_is_refused(
    run: Run, make_outcome: MakeOutcome
) -> None:
    outcome = make_outcome()
    with open_for_writing(run) as writer:
        writer.append(outcome, None)
    cell = outcome.attempt.cell.id
    write(run, f"attempts/{cell}-1.parquet", {**ROW, "cell": [cell]})
    with pytest.raises(RunError, match=rf"attempt 1 of cell {cell} is in two files\. Move"):
        read_states(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("table", ["attempts", "samples"])
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_flipped_bit_has_no_effect_or_is_refused(run: Run, table: str, is_merged: bool) -> None:
    pattern = "merged-*" if is_merged else SINGLE
    part = next((run.folder / table).glob(pattern))
    good, chance = part.read_bytes(), random.Random(1)
    before, refused = run.stored().read(table), 0
    for number in range(2000):
        bad = bytearray(good)
        bad[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        part.write_bytes(bad)
        os.utime(part, ns=(number, number))  # clocks of file systems may stand still that long
        try:
            after = run.stored().read(table)
        except RunError:
            refused += 1
        else:
            assert after.equals(before)
    assert refused > 1900
