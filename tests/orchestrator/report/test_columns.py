from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

import orchestrator as sweep
from orchestrator.report.columns import COLUMNS, PARAMETER, describe_columns, page
from orchestrator.report.derive import _EVIDENCE, _FACTS
from orchestrator.store import Run
from tasks.harness.params import axis_names
from tasks.harness.registry import all_tasks
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published" / "h200" / "cells.parquet"
PARAMETERS = {name for task in all_tasks().values() for name in axis_names(task.params)}
RARE = {"at_least_bytes", "mfu"}  # of no run that is published, or of none that ran here


def test_every_column_is_described_or_a_parameter(run_of_every_kind: Run) -> None:
    names = {*sweep.load(run_of_every_kind.folder).cells, *(pq.read_schema(PUBLISHED).names if PUBLISHED.exists() else ())}
    unknown = {column.name for column in describe_columns(names) if column.meaning == PARAMETER} - PARAMETERS
    assert not unknown
    assert not {name for name in PARAMETERS & names if any(column.describes(name) for column in COLUMNS)} - {"task"}


def test_what_is_described_is_there(run_of_every_kind: Run) -> None:
    names = {*pq.read_schema(PUBLISHED).names, *sweep.load(run_of_every_kind.folder).cells, *_FACTS, *_EVIDENCE, *RARE}
    assert [column.name for column in COLUMNS if not any(map(column.describes, names))] == []


def test_a_unit_in_the_name_is_the_unit() -> None:
    for name, unit in {"_ms": "ms", "_bytes": "bytes", "_s": "s", "_j": "J", "_ns": "ns", "_tflops": "TFLOP/s"}.items():
        own = [column for column in COLUMNS if column.name.endswith(name) and not column.name.endswith("per_s")]
        assert {column.unit for column in own} <= {unit}


def test_the_page_is_of_these() -> None:
    assert (ROOT / "docs" / "columns.md").read_text() == page()


def test_a_run_that_is_loaded_says_what_it_has(run_of_every_kind: Run) -> None:
    run = sweep.load(Path(run_of_every_kind.folder))
    assert run.columns["column"].tolist() == list(run.cells)
    described = run.columns.set_index("column")
    assert described.loc["step_ms_median", "unit"] == "ms"
    assert described.loc["size", "meaning"] == PARAMETER
