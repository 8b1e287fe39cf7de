"""Text of `sweep show`: one cell with its attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.common.text import end_location
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run, find_cell
from tasks.spec.attempt import LOG_FILE
from tasks.spec.cell import escape_unprintable

if TYPE_CHECKING:
    import pandas as pd


def describe_cell(run: Run, prefix: str) -> Iterator[str]:
    """One cell: parameters, attempts with their evidence, samples, log, and how to measure it by
    hand.
    """
    attempts = run.require().read("attempts")
    cell = find_cell(prefix, attempts["cell"].unique(), run)
    attempts, samples, predictions = (
        table[table["cell"] == cell]
        for table in (attempts, run.read("samples"), run.read("predictions"))
    )
    rows = attempts.sort_values("attempt").to_dict("records")
    params, last = json.loads(rows[-1]["params"]), rows[-1]
    yield f"cell {cell} of task {last['task']}, version {last['task_version']}"
    yield escape_unprintable(
        "parameters: "
        + ", ".join(f"{name}={value}" for name, value in params.items() if value not in (None, {}))
    )
    for row in rows:
        yield from _attempt(row)
    yield from _result(attempts, samples, predictions)
    yield from _samples(samples[samples["attempt"] == last["attempt"]])
    run.fetch_artifacts(cell)
    left = read_artifacts(run, cell, int(last["attempt"]))
    if left.log:
        yield f"log: {run.attempt_folder(cell, int(last['attempt'])) / LOG_FILE}"
        yield from (f"  {_on_a_terminal(line)}" for line in left.log)
    if left.rerun_command:
        yield f"by hand: {left.rerun_command}"
    if run.is_published:
        yield "logs and artifacts are not published, nor how to measure this cell by hand"


def _attempt(row: Mapping[Any, Any]) -> Iterator[str]:
    where = end_location(row["stage"], row["phase"])
    end = f"{row['status']} in {where}" if where else row["status"]
    yield f"attempt {row['attempt']}: {end}, {row['wall_s']:.1f} s, {row['started_at']}"
    timing = {
        name: value
        for name, value in json.loads(row["facts"]).items()
        if name.startswith("timing_")
    }
    for name, value in {**timing, **json.loads(row["evidence"])}.items():
        text = (
            f"{value:,}"
            if isinstance(value, int) and name.endswith("_bytes")
            else str(value).strip()
        )
        yield f"  {name}: " + "\n    ".join(map(_on_a_terminal, text.split("\n")))


def _on_a_terminal(line: str) -> str:
    """What a cell said, which commands nothing there."""
    return escape_unprintable(line.expandtabs())


def _result(
    attempts: pd.DataFrame, samples: pd.DataFrame, predictions: pd.DataFrame
) -> Iterator[str]:
    """What the tables say of a cell, as far as its own rows tell."""
    from orchestrator.analysis.axes import is_null
    from orchestrator.analysis.cells import derive_cells
    from orchestrator.report.tables.formatters import gib, median_interval, number, of_steps, text

    (row,) = derive_cells(attempts, samples, predictions).to_dict("records")
    shown = {
        "step_ms_median": ("step, ms", of_steps(median_interval("step_ms"))),
        "tokens_per_s": ("tokens a second", number("tokens_per_s", ",.0f")),
        "mfu": ("of the GPU's peak", number("mfu", ".1%")),
        "peak_allocated_bytes": ("peak allocated, GiB", gib("peak_allocated_bytes")),
        "peak_reserved_bytes": ("peak reserved, GiB", gib("peak_reserved_bytes")),
        "gpu": ("on", text("gpu")),
        "torch": ("torch", text("torch")),
        "commit": ("commit", text("commit")),
    }
    known = [
        f"  {name}: {show(row)}"
        for column, (name, show) in shown.items()
        if not is_null(row.get(column))
    ]
    if row["status"] == "ok" and known:
        yield f"result, of attempt {row['attempt']}:"
        yield from known


def _samples(samples: pd.DataFrame) -> Iterator[str]:
    for keys, group in samples.groupby(
        ["instrument", "mode", "phase", "metric", "unit"], sort=False, dropna=False
    ):
        values = ", ".join(_value(value, str(keys[-1])) for value in group["value"])
        *names, unit = (str(key) for key in keys)
        yield f"  {' '.join(filter(None, names))} [{unit}]: {values}"


def _value(value: float, unit: str) -> str:
    if value != value:
        return "null"
    return f"{value:,.0f}" if unit == "bytes" else f"{value:g}"
