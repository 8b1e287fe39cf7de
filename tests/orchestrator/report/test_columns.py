from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pandas as pd
import pytest

import orchestrator as sweep
from orchestrator.analysis.cpu_bound import Decides
from orchestrator.report.column_guide import QUESTIONS
from orchestrator.report.columns import COLUMNS, PARAMETER, PARAMETERS, describe_columns, page
from orchestrator.report.described import Column, TableDoc
from orchestrator.report.raw_columns import RAW_TABLES
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.run import Run
from orchestrator.store.tables import SCHEMAS
from orchestrator.sweep.nsys_import import ImportedParams
from tasks.instruments import instrument_names, stages_of
from tasks.snapshots import attribution as of_snapshots
from tasks.snapshots.summary import OUT_OF_MEMORY, PEAK
from tasks.spec.attempt import BEFORE_ITS_TASK
from tasks.spec.facts import CELL_EVIDENCE, CELL_FACTS
from tasks.spec.parameters import MultiGpuParams, Params, axis_names
from tasks.spec.registry import all_tasks
from tasks.spec.status import Status
from tasks.traces import attribution as of_traces
from tasks.traces.classes import CLASSES
from tests.conftest import ROOT

FINDING = "finding"  # which no instrument measures
RAW = {table.name: table for table in RAW_TABLES}
SOURCES = "".join(
    path.read_text() for path in (*ROOT.glob("tasks/**/*.py"), *ROOT.glob("orchestrator/**/*.py"))
)
PUBLISHED = ROOT / "results" / "published" / "h200"
OF_TASKS: tuple[type[Params], ...] = (
    *(task.params for task in all_tasks().values()),
    MultiGpuParams,
    ImportedParams,
)
AXES = {name for params in OF_TASKS for name in axis_names(params)}
RARE = {"at_least_bytes", "mfu"}  # of no run that is published, or of none that ran here


@cache
def published() -> frozenset[str]:
    """Return the columns of all published runs, derived by this program."""
    return frozenset(sweep.load(PUBLISHED).cells)


def test_what_binds_a_step_is_said_in_the_words_of_the_field() -> None:
    """Wherever somebody reads it: of every table, of the columns, and in the guide."""
    shown = [text for table in TABLES for text in (table.title, table.read, repr(table.layout))]
    assert not [
        text
        for text in (*shown, *page().splitlines())
        if re.search(r"wait\w* for (its|their|the) host|host decides", text)
    ]
    assert [str(one) for one in Decides] == ["GPU-bound", "CPU-bound"]


def test_every_column_is_described(run_of_every_kind: Run) -> None:
    names = {*sweep.load(run_of_every_kind.folder).cells, *published()}
    assert not {column.name for column in describe_columns(names) if column.meaning == PARAMETER}
    assert not {name for name in AXES if any(column.describes(name) for column in COLUMNS)}


def test_every_parameter_is_described_and_no_other() -> None:
    assert {column.name for column in PARAMETERS} == AXES
    assert all(column.meaning for column in PARAMETERS)


def test_each_word_that_a_parameter_may_be_is_said() -> None:
    meanings = {column.name: column.meaning for column in PARAMETERS}
    said = {name: set(re.findall(r"[\w.-]+(?<!\.)", meaning)) for name, meaning in meanings.items()}
    fields = [
        (field.alias or name, field.annotation)
        for params in OF_TASKS
        for name, field in params.model_fields.items()
    ]
    assert not {
        (name, word)
        for name, annotation in fields
        for word in words(annotation)
        if word not in said[name]
    }


def words(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    return {word for inner in get_args(annotation) for word in words(inner)}


def test_what_is_described_is_there(run_of_every_kind: Run) -> None:
    names = {
        *published(),
        *sweep.load(run_of_every_kind.folder).cells,
        *CELL_FACTS,
        *CELL_EVIDENCE,
        *RARE,
    }
    assert [column.name for column in COLUMNS if not any(map(column.describes, names))] == []


def test_a_unit_in_the_name_is_the_unit() -> None:
    for name, unit in {
        "_ms": "ms",
        "_bytes": "bytes",
        "_s": "s",
        "_j": "J",
        "_ns": "ns",
        "_tflops": "TFLOP/s",
    }.items():
        described = [*COLUMNS, *(column for table in RAW_TABLES for column in table.columns)]
        own = [
            column
            for column in described
            if column.name.endswith(name) and not column.name.endswith("per_s")
        ]
        assert {column.unit for column in own} <= {unit}


def test_the_page_is_of_these() -> None:
    assert (ROOT / "docs" / "columns.md").read_text() == page()


def test_it_shows_how_to_join() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("results/", f"{ROOT}/results/"), names)
    assert len(names["joined"]) == len(names["samples"])
    assert set(names["joined"]["cell"]) <= set(names["of_run"]["cell"])


def test_what_answers_a_question_is_a_column() -> None:
    named = {name for _, answer in QUESTIONS for name in re.findall("`(.*?)`", answer)}
    assert not {
        name
        for name in named
        if not any(column.describes(name.replace("{phase}", "forward")) for column in COLUMNS)
    }


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_column_of_a_part_is_described_and_no_other(name: str) -> None:
    assert [column.name for column in RAW[name].columns] == SCHEMAS[name].names
    assert all(column.meaning for column in RAW[name].columns)
    assert {one.column for one in RAW[name].values} <= set(SCHEMAS[name].names)


def test_every_table_of_a_run_is_described() -> None:
    assert list(RAW) == list(SCHEMAS)


@pytest.mark.parametrize(
    ("table", "column", "values"),
    [
        ("attempts", "status", set(Status)),
        (
            "attempts",
            "stage",
            {*BEFORE_ITS_TASK, "build", *(stage.name for stage in stages_of(instrument_names()))}
            - {""},
        ),
        ("samples", "instrument", {*instrument_names(), FINDING}),
        ("kernels", "kernel_class", set(CLASSES)),
        ("kernels", "attributed_by", set(of_traces.How)),
        ("allocations", "role", set(of_snapshots.Role)),
        ("allocations", "attributed_by", set(of_snapshots.How)),
        ("allocations", "moment", {PEAK, OUT_OF_MEMORY}),
    ],
)
def test_the_values_are_those_of_the_program(table: str, column: str, values: set[str]) -> None:
    assert {value.name for value in described(RAW[table], column)} == values


@pytest.mark.parametrize("table", ["samples", "predictions"])
def test_every_number_that_is_published_is_described_in_its_unit(
    table: str, run_of_every_kind: Run
) -> None:
    rows = everything(table, run_of_every_kind)
    known = {
        (instrument, metric.name): metric
        for one in RAW[table].values
        if one.column == "metric"
        for instrument in (one.of if table == "samples" else [""])
        for metric in one.values
    }
    unknown, used = set(), set()
    for instrument, metric, unit in (
        rows[["instrument", "metric", "unit"]].drop_duplicates().itertuples(index=False)
    ):
        found = {
            key
            for key, one in known.items()
            if key[0] == instrument and one.describes(metric) and one.unit == unit
        }
        used |= found
        unknown |= set() if found else {(instrument, metric, unit)}
    assert not unknown
    assert not {name for (_, name) in known.keys() - used if f'"{name}"' not in SOURCES}


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("attempts", ["task_version", "status", "stage", "phase"]),
        ("samples", ["mode", "phase"]),
        ("kernels", ["phase", "module", "kernel_class", "attributed_by"]),
        ("allocations", ["moment", "phase", "role", "attributed_by"]),
        ("live", ["phase"]),
        ("predictions", ["mode", "phase"]),
    ],
)
def test_every_value_that_is_published_is_described(
    table: str, columns: list[str], run_of_every_kind: Run
) -> None:
    rows = everything(table, run_of_every_kind)
    for column in columns:
        values = described(RAW[table], column)
        texts = {text for text in rows[column].unique() if text} if values else set()
        assert not {text for text in texts if not any(value.describes(text) for value in values)}, (
            column
        )


def test_every_mode_is_of_something_published(run_of_every_kind: Run) -> None:
    for table in ("samples", "predictions"):
        assert {value.name for value in described(RAW[table], "mode")} == set(
            everything(table, run_of_every_kind)["mode"]
        )


def test_every_note_of_a_prediction_is_described(run_of_every_kind: Run) -> None:
    rows = everything("predictions", run_of_every_kind)
    for one in RAW["predictions"].values:
        for metric in one.of:
            of_metric = rows["metric"].map(Column(metric, "", "").describes)
            notes = set(rows[of_metric & (rows["value"].notna() | (metric == "verdict"))]["note"])
            assert notes, metric
            assert not {
                note for note in notes if not any(value.describes(note) for value in one.values)
            }, metric


@pytest.mark.parametrize(
    ("column", "in_cells"), [("facts", CELL_FACTS), ("evidence", CELL_EVIDENCE)]
)
def test_what_is_known_of_an_attempt_is_described(
    column: str, in_cells: tuple[str, ...], run_of_every_kind: Run
) -> None:
    known = {one.name for one in described(RAW["attempts"], column)} - {"{part}"}
    found = {
        name
        for text in everything("attempts", run_of_every_kind)[column]
        for name in json.loads(text)
    }
    assert not found - known - set(in_cells)
    assert not {name for name in known - found if f'"{name}"' not in SOURCES}


@cache
def everything(table: str, run: Run) -> pd.DataFrame:
    """What is published of it, and what a run of every kind has. Predictions are of one instrument, which no row names."""
    parts = [
        pd.read_parquet(path)
        for path in sorted((ROOT / "results" / "published").glob(f"*/*/{table}/*.parquet"))
    ]
    rows = pd.concat([*parts, run.read(table)], ignore_index=True)
    return rows if "instrument" in rows else rows.assign(instrument="")


def described(table: TableDoc, column: str) -> list[Column]:
    return [value for one in table.values if one.column == column for value in one.values]


def test_a_run_that_is_loaded_says_what_it_has(run_of_every_kind: Run) -> None:
    run = sweep.load(Path(run_of_every_kind.folder))
    assert run.columns["column"].tolist() == list(run.cells)
    described = run.columns.set_index("column")
    assert described.loc["step_ms_median", "unit"] == "ms"
    assert described.loc["context_length", "unit"] == "tokens"
