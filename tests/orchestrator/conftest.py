"""A run that has rows for every table there is, and the version of this program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from orchestrator.analysis import comparison, results
from orchestrator.analysis.cell_timing import RunTimings
from orchestrator.analysis.results import Results, load_results
from orchestrator.common import files
from orchestrator.common.provenance import git_commit, program_source
from orchestrator.config import schema
from orchestrator.report.page import html
from orchestrator.report.tables.registry import TABLES
from orchestrator.store import stored_tables
from orchestrator.store.open import open_for_writing
from orchestrator.store.run import Run
from orchestrator.store.run_collection import RunCollection
from orchestrator.store.tables import read_parquet
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status
from tasks.spec.tables import Sample
from tests.conftest import FAST, ROOT

MEASURED = ROOT / "tests" / "data" / "h200_cells"


@pytest.fixture(autouse=True, scope="session")
def _one_program() -> Iterator[None]:
    """No test edits this program: sweeps share its digest and commit, a third of what a fake one takes.

    Configs of the same text are parsed once, and Parquet files of the same content. Memory stays with the
    process: of one that has torch, to return what is free takes 10 ms, and a report does it several times.
    No derived cells are cached: a test may have replaced a function that derives them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.planning.request.program_source", cache(program_source))
        patch.setattr("orchestrator.planning.request.git_commit", cache(git_commit))
        patch.setattr(results, "code_digest", cache(results.code_digest))
        patch.setattr(results, "read_cached", lambda *_: None)
        patch.setattr(results, "write_cached", lambda *_: None)
        patch.setattr(schema, "load_yaml", lru_cache(maxsize=64)(schema.load_yaml))
        patch.setattr(stored_tables, "read_parquet", _read_parquet_once)
        patch.setattr(files, "_c_library", lambda: None)
        # Templates are compiled once, not for each page.
        patch.setattr(html, "_environment", cache(html._environment))
        yield


def _read_parquet_once(
    content: bytes, schema: pa.Schema, columns: Sequence[str] | None
) -> pa.Table:
    return _read_columns_once(content, schema, None if columns is None else tuple(columns))


@lru_cache(maxsize=128)
def _read_columns_once(
    content: bytes, schema: pa.Schema, columns: tuple[str, ...] | None
) -> pa.Table:
    return read_parquet(content, schema, columns)


@pytest.fixture(scope="session")
def _derived() -> dict[str, tuple[pd.DataFrame, dict[str, object]]]:
    return {}


@pytest.fixture
def derive_once(
    _derived: dict[str, tuple[pd.DataFrame, dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Derive the cells of equal tables once for all tests, as if all runs had cells.parquet.

    A test that compares a run again and again reads its timings once. Tests of the derivation, and
    of cells.parquet, do without it.
    """
    derive = results.derive_results

    def derive_and_remember(run: Run, every_version: bool, *read_samples: Any) -> Results:
        key = results.cells_key(run, every_version)
        derived = derive(run, every_version, *read_samples)
        _derived[key] = (derived.cells.copy(), results.cells_facts(derived))
        return derived

    monkeypatch.setattr(results, "derive_results", derive_and_remember)
    for kind in (Run, RunCollection):
        read = kind.read_cells

        def read_remembered(run: Run, key: str, read: Any = read) -> Any:
            if key not in _derived:
                return read(run, key)
            cells, facts = _derived[key]
            return cells.copy(), facts

        monkeypatch.setattr(kind, "read_cells", read_remembered)

    load_timings, loaded = comparison.load_timings, dict[tuple[object, ...], RunTimings]()

    def load_or_remember(run: Run) -> RunTimings:
        tables = results.cells_key(run, every_version=True)
        key = (str(run), tables, json.dumps(run.read_manifest()))
        if key not in loaded:
            loaded[key] = load_timings(run)
        return loaded[key]

    monkeypatch.setattr(comparison, "load_timings", load_or_remember)


@pytest.fixture
def brief_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make whole reports of the step times alone, for tests of what is around the report."""
    timings = tuple(table for table in TABLES if table.name == "timings")
    monkeypatch.setattr("orchestrator.report.build.TABLES", timings)
    for make in ("drawn_figures", "findings"):
        monkeypatch.setattr(f"orchestrator.report.build.{make}", lambda results: [])


@pytest.fixture(scope="session")
def run_of_every_kind(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Cells as an H200 measured them, of each task and with each instrument, at most six samples a series; and of a CPU."""
    folder = Path(shutil.copytree(MEASURED, tmp_path_factory.mktemp("every") / "run"))
    with open_for_writing(Run(folder)) as writer:
        for warmup in (0, 5):
            writer.append(_of_the_cpu("train_step", {**FAST, "warmup_steps": warmup}), None)
        writer.append(
            _of_the_cpu("train_step", {**FAST, "warmup_steps": 5, "checkpointing": "blocks"}), None
        )
        again = _of_the_cpu("train_step", {**FAST, "warmup_steps": 5})
        writer.append(replace(again, attempt=replace(again.attempt, number=2)), None)
        writer.append(_of_the_cpu("matmul", {"device": "cpu", "matrix_size": 64}), None)
    return Run(folder)


@pytest.fixture(scope="session")
def results_of_every_kind(run_of_every_kind: Run) -> Results:
    return load_results(run_of_every_kind)


def _of_the_cpu(task: str, params: dict[str, Any]) -> Outcome:
    times = [
        Sample("timing", "duration", "ms", 10.0 + step, "synced", "step", step) for step in range(3)
    ]
    # Adaptive timing looks at two steps that run on before it decides how to time.
    times += [Sample("timing", "duration", "ms", 10.0, "check", "step", step) for step in range(2)]
    memory = [
        Sample("memory", "peak_rss_bytes", "bytes", 2.0**30, "steady", phase)
        for phase in ("forward", "backward")
    ]
    waited = Sample("telemetry", "waited_for_core", "", 0.25, "timing")
    power = Sample("telemetry", "timed_power", "W", 350.0, "timing")
    paces = [Sample("telemetry", "host_pace", "1/ms", 200.0, when) for when in ("before", "after")]
    seconds = {"start": 0.5, "build": 0.25, "warm-up": 0.5, "timing synced": 1.0, "process": 0.25}
    facts = {
        "cpu": "Test CPU",
        "torch": "2.13.0",
        "tokens": 16,
        "flops": {"forward": 10**9},
        "stage_s": seconds,
    }
    attempt = Attempt(make_cell(task, params), 1, "/nowhere", Settings())
    return Outcome(
        attempt, Status.OK, "", "", {}, facts, (*times, *memory, waited, power, *paces), 1.7e9, 2.5
    )
