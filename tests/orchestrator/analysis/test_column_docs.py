"""Descriptions of columns: complete and without superfluous entries; and the guide of docs/columns.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import orchestrator as sweep
from orchestrator.analysis.column_docs import (
    PARAMETER,
    ColumnDoc,
    cell_columns,
    describe_columns,
    parameter_columns,
)
from orchestrator.report.tables.registry import TABLES
from orchestrator.store.run import Run
from tasks.snapshots.attribution import Role
from tasks.snapshots.summary import AT_END_OF_RECORD, OUT_OF_MEMORY, PEAK
from tasks.spec.facts import CELL_EVIDENCE, CELL_FACTS, EVIDENCE, FACTS
from tasks.spec.fields import name_pattern
from tasks.spec.metrics import PREDICTED_METRICS, metric_named
from tasks.spec.tables import KERNEL_CLASSES, MOMENTS, ROLES, STORED_TABLES, WHOLE_STEP
from tasks.traces.kernel_classes import CLASSES
from tests.conftest import ROOT

PUBLISHED = ROOT / "results" / "published" / "h200"
ON_GPUS = [ROOT / "results" / "published" / name for name in ("h200", "h100x2", "h100x4")]
ON_A_CPU = ROOT / "tests" / "data" / "golden" / "old_run"
# Columns that no stored run has: GPUs of other kinds, and a model whose activations are unknown.
# Columns of predictions that count FLOPs, in no published run; test_throughput.py makes them.
COUNTED = {"counted_flops", "recomputed_flops", "hfu"}
RARE = {"at_least_bytes", "mfu", "flops_reason", *COUNTED}
RARE |= {"timing_beaten"}  # of a search; test_best_search.py measures it
RARE |= {"outside_allocator_bytes"}  # newer than the published runs; test_gpu.py measures it
# Of ranks on the CPU, and of ranks that were predicted.
RARE |= {"second_peak_rss_bytes"}
RARE |= {f"predicted_second_peak_{kind}_bytes" for kind in ("allocated", "requested", "reserved")}
MPS = re.compile(r"(first_)?(\w+_)?(allocated|reserved)_after_bytes")
UNITS_OF_SUFFIXES = {
    "_ms": "ms",
    "_bytes": "bytes",
    "_s": "s",
    "_j": "J",
    "_ns": "ns",
    "_tflops": "TFLOP/s",
}


PAGE = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8")


@cache
def published() -> frozenset[str]:
    """Return the columns of all published runs and of one on a CPU, derived by this program."""
    return frozenset(name for run in (*ON_GPUS, ON_A_CPU) for name in sweep.load(run).cells)


@cache
def stored_rows(table: str, run: Run) -> pd.DataFrame:
    """Return the rows of a table of all published runs and of another run."""
    paths = sorted(PUBLISHED.glob(f"*/{table}/*.parquet"))
    parts = [pd.read_parquet(path) for path in paths]
    return pd.concat([*parts, run.read(table)], ignore_index=True)


# ---------------------------------------------------------------------------- cells


# One worker derives the columns of the published runs for both tests.
@pytest.mark.xdist_group("every kind")
@pytest.mark.parametrize(
    "more",
    [
        lambda: sweep.load(ON_A_CPU).cells,
        # Deriving the cells of all published runs takes seconds.
        pytest.param(published, marks=pytest.mark.slow),
    ],
    ids=["of a CPU", "published"],
)
def test_every_column_of_cells_is_described(
    run_of_every_kind: Run, more: Callable[[], Iterable[str]]
) -> None:
    names = {*sweep.load(run_of_every_kind.folder).cells, *more()}
    assert not {column.name for column in describe_columns(names) if column.doc == PARAMETER}


@pytest.mark.slow
@pytest.mark.xdist_group("every kind")
def test_every_described_column_exists(run_of_every_kind: Run) -> None:
    names = {*published(), *sweep.load(run_of_every_kind.folder).cells}
    names |= {*CELL_FACTS, *CELL_EVIDENCE, *RARE}
    unused = [column.name for column in cell_columns() if not any(map(column.matches, names))]
    assert [name for name in unused if not MPS.fullmatch(name.replace("{phase}", "phase"))] == []


def test_every_description_has_a_text() -> None:
    for column in (*cell_columns(), *parameter_columns()):
        assert column.doc, column.name


def test_no_parameter_has_the_name_of_a_column() -> None:
    for parameter in parameter_columns():
        assert not [one.name for one in cell_columns() if one.matches(parameter.name)]


def test_a_suffix_of_a_name_agrees_with_the_unit() -> None:
    for column in cell_columns():
        for suffix, unit in UNITS_OF_SUFFIXES.items():
            if column.name.endswith(suffix) and not column.name.endswith(("per_s", "_gb_s")):
                assert column.unit == unit, column


def test_a_column_of_an_unknown_task_is_a_parameter() -> None:
    assert describe_columns(["my_axis"]) == [ColumnDoc("my_axis", "", PARAMETER)]


def test_the_step_time_is_not_described_as_a_phase() -> None:
    (step, forward) = describe_columns(["step_ms_median", "forward_ms_median"])
    assert "whole step" in step.doc
    assert "a phase" in forward.doc


def test_a_loaded_run_describes_its_columns(run_of_every_kind: Run) -> None:
    run = sweep.load(Path(run_of_every_kind.folder))
    assert run.columns["column"].tolist() == list(run.cells)
    described = run.columns.set_index("column")
    assert described.loc["step_ms_median", "unit"] == "ms"
    assert described.loc["context_length", "unit"] == "tokens"


# ---------------------------------------------------------------------------- docs/columns.md


def test_the_example_joins_samples_with_cells() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("results/", f"{ROOT}/results/"), names)
    assert len(names["joined"]) == len(names["samples"])
    assert set(names["joined"]["cell"]) <= set(names["of_run"]["cell"])


def test_the_guide_names_only_columns_of_cells() -> None:
    guide = PAGE.partition("## Where to look first")[2].partition("## cells")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", guide, re.MULTILINE)[1:]
    assert len(rows) > 5
    for _, answer in rows:
        for name in re.findall("`(.*?)`", answer):
            example = name.replace("{phase}", "forward")
            assert any(one.matches(example) for one in cell_columns()), name


def test_texts_say_cpu_bound_and_not_waiting_for_the_host() -> None:
    texts = [text for table in TABLES for text in (table.title, table.read, repr(table.layout))]
    for text in (*texts, *PAGE.splitlines()):
        assert not re.search(r"wait\w* for (its|their|the) host|host decides", text)


# ---------------------------------------------------------------------------- stored tables


def test_declared_values_are_those_of_the_program() -> None:
    assert set(ROLES) == set(Role)
    assert set(KERNEL_CLASSES) - set(CLASSES) == {"embedding"}  # in stored rows
    assert set(CLASSES) < set(KERNEL_CLASSES)
    assert set(MOMENTS) == {PEAK, WHOLE_STEP, OUT_OF_MEMORY, AT_END_OF_RECORD}


def test_every_stored_metric_is_declared_with_its_unit(run_of_every_kind: Run) -> None:
    samples = stored_rows("samples", run_of_every_kind)
    samples = samples[samples["metric"] != "additions"]  # only older versions measured it
    metrics = samples[["instrument", "metric", "unit"]].drop_duplicates()
    for instrument, metric, unit in metrics.itertuples(index=False):
        assert metric_named(instrument, metric).unit == unit


def test_every_predicted_metric_is_declared_with_its_unit(run_of_every_kind: Run) -> None:
    declared = {(metric.name, metric.unit) for metric in PREDICTED_METRICS}
    rows = stored_rows("predictions", run_of_every_kind)[["metric", "unit"]].drop_duplicates()
    assert set(rows.itertuples(index=False, name=None)) <= declared


@pytest.mark.parametrize("table", STORED_TABLES, ids=lambda table: table.name)
def test_every_stored_value_is_declared(table: Any, run_of_every_kind: Run) -> None:
    rows = stored_rows(table.name, run_of_every_kind)
    for field in table.fields:
        if field.values:
            patterns = [name_pattern(value) for value in field.values]
            texts = {text for text in rows[field.name].unique() if text}
            unknown = {text for text in texts if not any(one.fullmatch(text) for one in patterns)}
            assert not unknown, field.name


def test_every_stored_fact_is_declared(run_of_every_kind: Run) -> None:
    attempts = stored_rows("attempts", run_of_every_kind)
    for column, declared in (("facts", FACTS), ("evidence", EVIDENCE)):
        found = {name for text in attempts[column] for name in json.loads(text)}
        assert found <= {fact.name for fact in declared}
