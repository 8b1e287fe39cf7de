"""Text of `sweep show`: one cell with its attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestrator.common.frames import own_frames
from orchestrator.common.text import (
    end_location,
    evidence_text,
    failure_reason,
    parameter_texts,
    shell_path,
)
from orchestrator.store.artifacts import read_artifacts
from orchestrator.store.run import Run, find_cell
from tasks.spec.axes import leave_out
from tasks.spec.messages import escape_unprintable

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.analysis.axes import Row


# Evidence that says at length what the reason says in one line.
_IMPORTED_FROM = "imported_from"  # a fact
_MOST_FRAMES = 20
_LONG_EVIDENCE = ("reason", "exception", "message", "traceback", "log_tail")


def list_cells(run: Run) -> Iterator[str]:
    """Return the id, the status and the label of each cell."""
    from orchestrator.analysis.comparison import cell_labels
    from orchestrator.analysis.results import load_results

    results = load_results(run.require(), every_version=True)
    statuses = dict(zip(results.cells["cell"], results.cells["status"], strict=True))
    if not statuses:
        yield f"nothing measured yet: `sweep status {shell_path(run)}` lists what is left"
        return
    width = max(map(len, statuses.values()))
    attempts = run.read("attempts", ["cell", "facts"])
    imported = attempts[attempts["facts"].str.contains(_IMPORTED_FROM, regex=False)]
    paths = {
        cell: f"  from {json.loads(facts)[_IMPORTED_FROM]}"
        for cell, facts in zip(imported["cell"], imported["facts"], strict=True)
    }
    for cell, label in cell_labels(results).items():
        line = f"{cell}  {statuses[cell]:{width}}  {label}{paths.get(cell, '')}"
        yield escape_unprintable(line)
    yield f"all about one of them: sweep show {shell_path(run)} CELL"


def describe_cell(run: Run, prefix: str, with_traceback: bool = False) -> Iterator[str]:
    """Return a cell's parameters, attempts with evidence, result, samples, log and command.

    with_traceback: end with the whole message and traceback of the last attempt.
    """
    from orchestrator.analysis.results import load_results, read_attempts

    attempts = read_attempts(run.require())
    cell = find_cell(prefix, attempts["cell"].unique(), run)
    attempts = attempts[attempts["cell"] == cell].sort_values("attempt")
    samples = run.read("samples")
    samples = samples[samples["cell"] == cell]
    rows = attempts.to_dict("records")
    last = rows[-1]
    number = int(last["attempt"])
    yield f"cell {cell} of task {last['task']}, version {last['task_version']}"
    parameters = map("=".join, parameter_texts(last["params"]).items())
    yield escape_unprintable("parameters: " + ", ".join(parameters))
    for row in rows:
        yield from _attempt(row)
    cells = load_results(run, every_version=True).cells
    yield from _result(cells[cells["cell"] == cell])
    yield from _samples(samples[samples["attempt"] == number])
    run.fetch_artifacts(cell)
    artifacts = read_artifacts(run, cell, number, last["evidence"])
    if artifacts.own_frames:
        yield "in your code, the innermost call first:"
        yield from (f"  {_printable(frame)}" for frame in artifacts.own_frames[:_MOST_FRAMES])
    if artifacts.log:
        yield escape_unprintable(f"log: {artifacts.log_file}")
        yield from (f"  {_printable(line)}" for line in artifacts.log)
    if artifacts.rerun_command:
        # The file may be somebody else's.
        yield escape_unprintable(f"by hand: {artifacts.rerun_command}")
    if run.is_published:
        yield "logs and artifacts are not published, nor how to measure this cell by hand"
    evidence = json.loads(last["evidence"])
    texts = {name: evidence_text(name, evidence.get(name) or "") for name in _LONG_EVIDENCE}
    if with_traceback:
        for name, text in texts.items():
            if text:
                yield f"{name}: " + "\n  ".join(map(_printable, text.split("\n")))
        return
    # More than the reason that is printed.
    reason = failure_reason(evidence | {"rank": None})
    exception = str(evidence.get("exception"))
    if set(texts.values()) - {"", exception, reason, reason.removeprefix(f"{exception}: ")}:
        yield f"message and traceback: sweep show {shell_path(run)} {cell} --traceback"


def _attempt(row: Row) -> Iterator[str]:
    end = str(row["status"])
    if where := end_location(row["stage"], row["phase"]):
        end += f" in {where}"
    yield f"attempt {row['attempt']}: {end}, {row['wall_s']:.1f} s, {row['started_at']}"
    evidence = json.loads(row["evidence"])
    if evidence:
        yield f"  {failure_reason(evidence) or 'no reason is known'}"
    traceback = str(evidence.get("traceback") or "").split("\n")
    frames = [line.strip() for line in traceback if line.strip().startswith("File ")]
    own = own_frames(traceback)
    if own and own[-1] != frames[-1]:
        yield f"  in your code: {_printable(own[-1])}"
    if frames:
        yield f"  raised at: {_printable(frames[-1])}"
    # Of the facts, only those on timing: `sweep report` shows the others.
    facts = json.loads(row["facts"])
    shown = {name: value for name, value in facts.items() if name.startswith("timing_")}
    for name, value in {**shown, **leave_out(evidence, _LONG_EVIDENCE)}.items():
        yield f"  {name}: {_printable(evidence_text(name, value))}"


def _printable(line: str) -> str:
    # Escape sequences in the output of a model would change colours or the title of a terminal.
    return escape_unprintable(line.expandtabs())


def _result(cells: pd.DataFrame) -> Iterator[str]:
    """Return the most important columns of a frame of one cell."""
    from orchestrator.report.tables.formatters import gib, median_interval, number, of_steps, text
    from orchestrator.report.tables.layouts import shown_by

    (row,) = cells.to_dict("records")
    columns = (
        ("step, ms", of_steps(median_interval("step_ms"))),
        ("tokens per second", number("tokens_per_s", ",.0f")),
        ("share of the GPU's peak", number("mfu", ".1%")),
        ("peak allocated, GiB", gib("peak_allocated_bytes")),
        ("peak reserved, GiB", gib("peak_reserved_bytes")),
        ("GPU", text("gpu")),
        ("torch", text("torch")),
        ("commit", text("commit")),
    )
    entries = shown_by(columns, row).items()
    known = [f"  {name}: {entry}" for name, entry in entries if not entry.is_missing]
    if row["status"] == "ok" and known:
        yield f"result of attempt {row['attempt']}:"
        yield from known


def _samples(samples: pd.DataFrame) -> Iterator[str]:
    keys = ["instrument", "mode", "phase", "metric", "unit"]
    # dropna=False: the mode or phase of a sample may be null.
    for key, group in samples.groupby(keys, sort=False, dropna=False):
        *names, unit = map(str, key)
        form = ",.0f" if unit == "bytes" else "g"
        values = [f"{value:{form}}" if value == value else "null" for value in group["value"]]
        yield f"  {' '.join(filter(None, names))} [{unit}]: {', '.join(values)}"
