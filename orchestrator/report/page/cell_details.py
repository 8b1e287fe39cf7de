"""Details of each cell for its drawer: attempts with evidence, samples, live memory, end of the log."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

import pandas as pd

from orchestrator.analysis.axes import Row
from orchestrator.analysis.cells import rows_of
from orchestrator.analysis.results import Results, read_attempts
from orchestrator.common.files import trim_memory
from orchestrator.common.text import evidence_text
from orchestrator.report.charts.memory_timeline import timelines
from orchestrator.report.tables.formatters import end_location
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run

_ATTEMPT_COLUMNS = ["cell", "attempt", "status", "stage", "phase", "wall_s", "evidence"]
_SAMPLE_COLUMNS = ["cell", "attempt", "instrument", "mode", "phase", "metric", "value"]
_DIGITS = 4  # the Parquet parts have full precision
_LOG_OF_FAILED, _LOG_OF_OK = 6_000, 1_500  # characters
_MOST_SAMPLES = 200


def read_details(run: Run, results: Results) -> Iterator[dict[str, object]]:
    """Yield the details of each cell as JSON values, in the order of the cells."""
    # A run without any attempt has no such columns.
    shown = results.cells.reindex(columns=["cell", "attempt"])
    samples = _step_samples(run, shown.dropna())
    attempts = read_attempts(run, _ATTEMPT_COLUMNS)
    # One conversion of all rows: a frame for each of 2,500 cells took 8 s more.
    by_cell: dict[str, list[Row]] = defaultdict(list)
    for row in attempts.sort_values("attempt").to_dict("records"):
        by_cell[row["cell"]].append(row)
    live = timelines(results.live())
    trim_memory()  # the samples of other attempts are free now
    for cell, attempt in zip(shown["cell"], shown["attempt"], strict=True):
        details: dict[str, object] = {"attempts": [_attempt(row) for row in by_cell[cell]]}
        if cell in samples:
            details["samples"] = samples[cell]
        if cell in live:
            details["live"] = live[cell]
        if not pd.isna(attempt):
            log = "\n".join(read_artifacts(run, cell, int(attempt)).log)
            is_ok = all(row["status"] == "ok" for row in by_cell[cell])
            details["log"] = log[-(_LOG_OF_OK if is_ok else _LOG_OF_FAILED) :]
        yield details


def _attempt(row: Row) -> dict[str, object]:
    evidence = {}
    for name, value in json.loads(row["evidence"]).items():
        if value != "":
            evidence[name] = evidence_text(name, value)
    return {
        "number": int(row["attempt"]),
        "status": row["status"],
        "where": str(end_location(row)),
        "wall_s": round(row["wall_s"], 1),
        "evidence": evidence,
    }


def _step_samples(run: Run, shown: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the times of the measured steps of each cell, in their order."""
    samples = run.read("samples", _SAMPLE_COLUMNS, categories=True)
    is_step = (samples["instrument"] == "timing") & (samples["metric"] == "duration")
    samples = rows_of(samples[is_step & (samples["phase"] == "step")], shown)
    found: dict[str, list[float | None]] = {}
    # Pipelined steps are the ones that `step_ms` is about; they come second and replace the others.
    for mode in ("synced", "pipelined"):
        own = samples[samples["mode"] == mode]
        for cell, values in own.groupby("cell", observed=True)["value"]:
            times = values.to_numpy()[:_MOST_SAMPLES]
            found[str(cell)] = [
                None if time != time else float(f"{time:.{_DIGITS}g}") for time in times
            ]
    return found
