"""A part is read as it was written, or its damage is reported with the remedy."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.common.errors import RunError
from orchestrator.store import run as run_module
from orchestrator.store import run_writer
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome

MakeOutcome = Callable[..., Outcome]
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
    return Run(tmp_path / "run")


@pytest.mark.parametrize(
    "name",
    ["~", "~root", "a:b", "s3:x", "file:x", "with space", "é", "a%20b", "a#b", "a?b", "[x]", "*"],
)
def test_a_folder_may_have_any_name(
    name: str, tmp_path: Path, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relative path could be read as an address or as a home folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 2)
    with open_for_writing(Run(Path(name))) as writer:
        for length in (16, 32, 64):
            writer.append(make_outcome(context_length=length), None)
        writer.require_readable_parts()
    run = Run(Path(name))
    assert run.read("attempts")["cell"].nunique() == len(list(run.rows("attempts", ["cell"]))) == 3
    assert run.read("samples", categories=True)["cell"].nunique() == 3


def test_a_run_of_an_older_program_has_no_kernels(run: Run, make_outcome: MakeOutcome) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    shutil.rmtree(run.folder / "kernels")
    assert run.read("kernels").empty


def test_parts_of_older_programs_have_nulls_for_newer_columns(
    run: Run, make_outcome: MakeOutcome
) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    old = pa.table({**ROW, "cell": ["zzz"], "since_dropped": [1]})
    pq.write_table(old, run.folder / "attempts" / "zzz-1.parquet")
    frame = run.read("attempts")
    assert set(frame["status"]) == {"ok"}
    assert len(frame) == 2
    assert frame.set_index("cell")["wall_s"].isna()["zzz"]
    assert list(run.read("attempts", ["cell", "status"]).columns) == ["cell", "status"]


def test_categories_do_not_depend_on_the_number_of_parts_in_a_batch(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_PARTS_AT_ONCE", 2)
    with open_for_writing(run) as writer:
        for length in (16, 32, 64):
            writer.append(make_outcome(context_length=length), None)
    found = run.read("samples", categories=True)
    assert (
        found["cell"].nunique() == len(found["cell"].cat.categories) - 1 == 3
    )  # and the empty text
    texts = dict.fromkeys(found.select_dtypes("category"), "str")
    pd.testing.assert_frame_equal(found.astype(texts), run.read("samples"))


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ({"a": [1.5], "b": ["of another program"]}, "no column attempt, cell"),
        (
            {"cell": ["c"], "attempt": ["first"], "status": ["ok"], "wall_s": [1.0]},
            "cannot be read",
        ),
    ],
)
@pytest.mark.parametrize("table", ["attempts", "samples"])
def test_a_part_of_another_program_is_reported(
    run: Run, make_outcome: MakeOutcome, foreign: dict[str, list[object]], message: str, table: str
) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    part = run.folder / table / "foreign.parquet"
    pq.write_table(pa.table(foreign), part)
    with pytest.raises(
        RunError, match=r"foreign\.parquet: cannot be read: .*move it away"
    ) as caught:
        run.read(table)
    assert message in str(caught.value)
    assert (
        "to measure its cells again" in str(caught.value)
        if table == "attempts"
        else "with --retry ok" in str(caught.value)
    )
    part.unlink()
    assert len(run.read(table))


@pytest.mark.parametrize(
    "copy", ["{} (copy)", "{} 2", "{}.sync-conflict-20261123-101010-ABCDEFG", "{}~"]
)
@pytest.mark.parametrize("table", ["attempts", "samples"])
def test_a_copy_of_a_part_is_reported(
    run: Run, make_outcome: MakeOutcome, table: str, copy: str
) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    (part,) = (run.folder / table).glob("*.parquet")
    shutil.copy(part, part.with_name(f"{copy.format(part.stem)}.parquet"))
    for read in (
        lambda: run.read(table),
        lambda: list(run.rows(table, ["cell"])),
        lambda: run.read(table, categories=True),
    ):
        with pytest.raises(
            RunError,
            match=r"is not the name of a part\. Move it away: a copy of a part would count twice",
        ):
            read()
    with (
        open_for_writing(run) as writer,
        pytest.raises(RunError, match="is not the name of a part"),
    ):
        writer.require_readable_parts()


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
    run: Run, table: str, foreign: dict[str, Any], message: str, categories: bool
) -> None:
    (run.folder / table).mkdir(parents=True)
    pq.write_table(pa.table(foreign), run.folder / table / "foreign.parquet")
    with pytest.raises(
        RunError, match=r"foreign\.parquet: cannot be read: .*move it away"
    ) as caught:
        run.read(table, categories=categories)
    assert message in str(caught.value)


def test_samples_of_an_older_program_are_read_as_categories(run: Run) -> None:
    (run.folder / "samples").mkdir(parents=True)
    pq.write_table(
        pa.table({"cell": ["c"], "attempt": FIRST, "value": [1.0]}),
        run.folder / "samples" / "c-1.parquet",
    )
    (row,) = run.read("samples", categories=True).to_dict("records")
    assert (row["cell"], row["value"]) == ("c", 1.0)
    assert pd.isna(row["instrument"])


@pytest.mark.parametrize("table", ["samples", "attempts"])
@pytest.mark.parametrize("spoilt", ["half a copy", "another program's"])
def test_a_damaged_part_stops_no_merge_of_others(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch, table: str, spoilt: str
) -> None:
    """Readers report it, and nothing else is lost."""
    monkeypatch.setattr(run_writer, "MERGE_BATCH", 4)
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
        (bad,) = (run.folder / table).glob("*.parquet")
        if spoilt == "half a copy":
            bad.write_bytes(bad.read_bytes()[:-50])
        else:
            pq.write_table(pa.table({"a": ["of another program"]}), bad)
        for seed in range(1, 8):
            writer.append(make_outcome(seed=seed), None)
        expected = "is damaged" if spoilt == "half a copy" else "cannot be read"
        with pytest.raises(RunError, match=f"{bad.name}: {expected}"):
            writer.require_readable_parts()
    with pytest.raises(RunError, match=f"{bad.name}: {expected}"):
        run.read(table)
    bad.unlink()
    assert run.read(table)["cell"].nunique() == 7


def test_a_torn_part_of_samples_names_the_row_to_move_away(
    run: Run, make_outcome: MakeOutcome
) -> None:
    # If its row stayed, the cell would count as measured.
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    (samples,) = (run.folder / "samples").glob("*.parquet")
    samples.write_bytes(samples.read_bytes()[:-100])
    with pytest.raises(
        RunError, match=rf"move it away with .*/attempts/{samples.name} to measure its cell again"
    ):
        run.read("samples")


def test_a_part_with_two_columns_of_one_name_is_reported(run: Run) -> None:
    (run.folder / "attempts").mkdir(parents=True)
    twice = pa.table(ROW).append_column("status", pa.array(["ok"]))
    pq.write_table(twice, run.folder / "attempts" / "twice.parquet")
    with pytest.raises(RunError, match=r"twice\.parquet: cannot be read: .*two columns status"):
        run.read("attempts")


def test_partial_files_are_ignored(run: Run, make_outcome: MakeOutcome) -> None:
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)
    for name in (".torn.parquet.123", "._c-1.parquet"):
        (run.folder / "attempts" / name).write_bytes(b"PAR1 half a file")
    assert len(run.read("attempts")) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_a_part_that_this_process_cannot_open_is_not_reported_as_damaged(
    run: Run, make_outcome: MakeOutcome, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The remedy is another limit or permission, not another copy of the file."""
    with open_for_writing(run) as writer:
        writer.append(make_outcome(), None)

    def refuse(path: Path, *arguments: object) -> NoReturn:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        run.read("samples")
    assert caught.value.errno == number
