"""Data of all cells for the script of the page: columns as JSON, deflated, in base64.

The script reads the columns for the table of all cells, the heat map and the drawer of a cell, and
the details only when the first cell is opened.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import RUN, Row, ordered_values
from orchestrator.analysis.cells import rows_of
from orchestrator.analysis.pairs import HIGH, LOW, TIME
from orchestrator.analysis.results import Results, read_attempts
from orchestrator.common.files import trim_memory
from orchestrator.common.text import evidence_text
from orchestrator.common.units import GIB
from orchestrator.report.charts.memory_timeline import timelines
from orchestrator.report.tables.formatters import end_location
from orchestrator.report.text import cell_names
from orchestrator.report.text.cell_names import LENGTH, NAME, SCOPE_COLUMNS
from orchestrator.report.text.numbers import rounded
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run

# Name in the page: column of the cells and factor.
_NUMBERS: Mapping[str, tuple[str, float]] = {
    "step": (TIME, 1),
    "low": (LOW, 1),
    "high": (HIGH, 1),
    "n": ("step_ms_n", 1),
    "mean": ("step_ms_mean", 1),
    "sd": ("step_ms_sd", 1),
    "forward": ("forward_ms_median", 1),
    "backward": ("backward_ms_median", 1),
    "optimizer": ("optimizer_ms_median", 1),
    "kernels": ("step_kernel_time_ms_median", 1),
    "busy": ("busy_timed", 100),
    "mfu": ("mfu", 100),
    "tokens": ("tokens_per_s", 1),
    "cpu": ("cpu_bound", 1),
    "peak": ("peak_allocated_bytes", 1 / GIB),
    "resident": ("peak_rss_bytes", 1 / GIB),
    "reserved": ("peak_reserved_bytes", 1 / GIB),
    "predicted": ("predicted_peak_allocated_bytes", 1 / GIB),
    "asked": ("asked_bytes", 1 / GIB),
    "allocated": ("allocated_bytes", 1 / GIB),
}
_TEXTS = ("task", "status", "stage", "phase", "gpu", "cpu", "torch", "host", "commit", "reason")


def cell_columns(results: Results) -> dict[str, Any]:
    """Return the columns of all cells: texts as indices of ordered words, numbers, and axes."""
    cells = results.cells
    named = cells.filter(items=SCOPE_COLUMNS).assign(**{NAME: cell_names.names_of(cells)})
    run = str(results.manifest.get("name", "run"))
    runs = cells.get(RUN, pd.Series(run, cells.index)).fillna(run)
    columns = {
        "key": {"v": list(cell_names.cell_keys(results))},
        "title": {"v": cell_names.scopes_of(cells)},
        "run": _words(runs, ordered_values(RUN, runs)),
        "name": _words(named[NAME], cell_names.ordered(NAME, named)),
    }
    for column in _TEXTS:
        if column in cells:
            columns[column] = _words(cells[column], ordered_values(column, cells[column]))
    for name, (column, scale) in _NUMBERS.items():
        if column in cells and cells[column].notna().any():
            values = cells[column].astype(float) * scale
            columns[name] = {"v": _or_null(rounded(values.where(values.abs() < float("inf"))))}
    axes = {}
    for axis in results.axes:
        if axis in (RUN, LENGTH) or axis not in cells or cells[axis].isna().all():
            continue
        values = cells[axis]
        if axis == "attention" and "model" in cells:
            # A model of the user computes its own; one of Hugging Face has a choice of two.
            models = cells["model"].astype("string")
            values = values.mask(models.notna() & ~models.str.startswith("hf:").fillna(False))
        axes[axis] = _words(values, ordered_values(axis, values.astype(str)))
    if LENGTH in cells:
        axes[LENGTH] = {"v": _or_null(cells[LENGTH].astype("Int64"))}
    if "started_at" in cells:
        columns["started"] = {"v": list(cells["started_at"].astype(str).str[:16])}
    return {"n": len(cells), "columns": columns, "axes": axes}


def _words(values: pd.Series[Any], order: Iterable[object]) -> dict[str, object]:
    """Return the distinct words in their order, and the index of each value; -1 if it is null."""
    words = list(map(str, order))
    indices = pd.Index(words).get_indexer(pd.Index(values.astype("string")))
    return {"w": words, "i": indices.tolist()}


def _or_null(values: pd.Series[Any]) -> list[Any]:
    return list(values.astype(object).where(values.notna(), None))


def packed(texts: Iterable[str]) -> str:
    """Return texts as one, deflated and in base64, which HTML need not escape."""
    # One piece at a time: the details of 10,000 cells are never in memory together.
    compressor = zlib.compressobj(9)
    parts = list(map(compressor.compress, map(str.encode, texts)))
    return base64.b64encode(b"".join([*parts, compressor.flush()])).decode("ascii")


def packed_json(values: Iterable[object]) -> str:
    """Return values, at least one, as a packed JSON list."""
    texts = (json.dumps(value, separators=(",", ":")) for value in values)
    parts = (f"{',' if index else '['}{text}" for index, text in enumerate(texts))
    return packed(chain(parts, "]"))


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
            (evidence,) = (row["evidence"] for row in by_cell[cell] if row["attempt"] == attempt)
            log = "\n".join(read_artifacts(run, cell, int(attempt), evidence).log)
            is_ok = all(row["status"] == "ok" for row in by_cell[cell])
            details["log"] = log[-(_LOG_OF_OK if is_ok else _LOG_OF_FAILED) :]
        yield details


def _attempt(row: Row) -> dict[str, object]:
    evidence = json.loads(row["evidence"]).items()
    return {
        "number": int(row["attempt"]),
        "status": row["status"],
        "where": str(end_location(row)),
        "wall_s": round(row["wall_s"], 1),
        "evidence": {name: evidence_text(name, one) for name, one in evidence if one != ""},
    }


def _step_samples(run: Run, shown: pd.DataFrame) -> dict[str, list[float | None]]:
    """Return the times of the measured steps of each cell, in their order."""
    samples = run.read("samples", _SAMPLE_COLUMNS, categories=True)
    is_step = (samples["instrument"] == "timing") & (samples["metric"] == "duration")
    samples = rows_of(samples[is_step & (samples["phase"] == "step")], shown)
    found: dict[str, list[float | None]] = {}
    # Pipelined steps are the ones that `step_ms` is about; they come second and replace the others.
    for mode in ("synced", "pipelined"):
        own = samples[samples["mode"] == mode].groupby("cell", observed=True).head(_MOST_SAMPLES)
        by_cell: dict[str, list[float | None]] = defaultdict(list)
        # As one list: a conversion for each cell took half of the time of the details.
        for cell, value in zip(own["cell"], _or_null(rounded(own["value"], _DIGITS)), strict=True):
            by_cell[str(cell)].append(value)
        found |= by_cell
    return found
