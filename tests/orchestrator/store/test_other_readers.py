"""pandas, polars and DuckDB read the files of a run without this program, as the docs say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from orchestrator.store import batch_writer
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

Rows = list[dict[str, Any]]


def with_pandas(folder: Path) -> Rows:
    return pd.read_parquet(folder).to_dict("records")


def with_polars(folder: Path) -> Rows:
    polars = pytest.importorskip("polars")
    found: Rows = polars.scan_parquet(folder / "*.parquet").collect().to_dicts()
    return found


def with_duckdb(folder: Path) -> Rows:
    duckdb = pytest.importorskip("duckdb")
    found: Rows = duckdb.sql(f"select * from '{folder}/*.parquet'").to_arrow_table().to_pylist()
    return found


READERS = [with_pandas, with_polars, with_duckdb]


def values(rows: Rows) -> list[tuple[str, ...]]:
    """Return the rows as texts, in one order, with one text for every kind of null."""
    found = []
    for row in rows:
        found.append(tuple("" if pd.isna(one) else f"{one}" for one in row.values()))
    return sorted(found)


@pytest.fixture
def outcomes(make_outcome: Callable[..., Outcome]) -> Iterator[Outcome]:
    """Five attempts, of which the second ran out of memory and has no samples."""
    statuses = [Status.OK, Status.OOM, Status.OK, Status.OK, Status.OK]
    return iter([make_outcome(status, seed=seed) for seed, status in enumerate(statuses)])


@pytest.mark.parametrize("read", READERS)
def test_a_finished_run_is_read_whole(
    read: Callable[[Path], Rows], outcomes: Iterator[Outcome], tmp_path: Path
) -> None:
    with open_for_writing(Run(tmp_path)) as writer:
        for number, outcome in enumerate(outcomes):
            writer.append(outcome, "abc" if number else None)
            if number % 2:
                writer.finish()
    for table in ("attempts", "samples", "kernels"):
        own = Run(tmp_path).read(table)
        assert len(own)
        assert values(read(tmp_path / table)) == values(own.to_dict("records"))


@pytest.mark.parametrize("read", READERS)
def test_the_closed_batches_of_a_running_sweep_are_read(
    read: Callable[[Path], Rows],
    outcomes: Iterator[Outcome],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_writer, "BATCH", 2)
    cells = []
    with open_for_writing(Run(tmp_path)) as writer:
        for outcome in outcomes:
            writer.append(outcome, None)
            cells.append(outcome.attempt.cell.id)
        assert sorted(row["cell"] for row in read(tmp_path / "attempts")) == sorted(cells[:4])
        assert {row["cell"] for row in read(tmp_path / "samples")} == {*cells[:4]} - {cells[1]}
        assert sorted(Run(tmp_path).read("attempts")["cell"]) == sorted(cells)
    assert sorted(row["cell"] for row in read(tmp_path / "attempts")) == sorted(cells)
