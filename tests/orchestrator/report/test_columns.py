from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow.parquet as pq

import orchestrator as sweep
from orchestrator.imports import ImportedParams
from orchestrator.report.columns import COLUMNS, PARAMETER, PARAMETERS, describe_columns, page
from orchestrator.report.derive import _EVIDENCE, _FACTS
from orchestrator.store import Run
from tasks.harness.params import Params, SeveralGpusParams, axis_names
from tasks.harness.registry import all_tasks
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published" / "h200" / "cells.parquet"
OF_TASKS: tuple[type[Params], ...] = (*(task.params for task in all_tasks().values()), SeveralGpusParams, ImportedParams)
AXES = {name for params in OF_TASKS for name in axis_names(params)}
RARE = {"at_least_bytes", "mfu"}  # of no run that is published, or of none that ran here


def test_every_column_is_described(run_of_every_kind: Run) -> None:
    names = {*sweep.load(run_of_every_kind.folder).cells, *(pq.read_schema(PUBLISHED).names if PUBLISHED.exists() else ())}
    assert not {column.name for column in describe_columns(names) if column.meaning == PARAMETER}
    assert not {name for name in AXES if any(column.describes(name) for column in COLUMNS)}


def test_every_parameter_is_described_and_no_other() -> None:
    assert {column.name for column in PARAMETERS} == AXES
    assert all(column.meaning for column in PARAMETERS)


def test_each_word_that_a_parameter_may_be_is_said() -> None:
    meanings = {column.name: column.meaning for column in PARAMETERS}
    said = {name: set(re.findall(r"[\w.-]+(?<!\.)", meaning)) for name, meaning in meanings.items()}
    fields = [(field.alias or name, field.annotation) for params in OF_TASKS for name, field in params.model_fields.items()]
    assert not {(name, word) for name, annotation in fields for word in words(annotation) if word not in said[name]}


def words(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    return {word for inner in get_args(annotation) for word in words(inner)}


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
    assert described.loc["context_length", "unit"] == "tokens"
