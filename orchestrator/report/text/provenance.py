"""The line below each table: the hardware, software and protocol that its numbers were measured
with.
"""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.cpu_bound import ran_with_others
from orchestrator.analysis.results import Results
from orchestrator.report.tables.formatters import HOST_MARK


def provenance(results: Results) -> str:
    """Return one line; a value that differs between cells is given as `several`."""
    cells, manifest = results.cells, results.manifest
    parts = [
        f"run {manifest.get('name', '?')}",
        _one_or_several(cells, "gpu") or _one_or_several(cells, "cpu"),
        _labelled("torch", _one_or_several(cells, "torch")),
        _labelled("CUDA", _one_or_several(cells, "cuda")),
        _labelled("driver", _one_or_several(cells, "driver")),
        _labelled("batch", _one_or_several(cells, "batch_size")),
        _protocol(cells),
        _repetitions(cells),
        _flagged(cells, "cpu_bound", f"are CPU-bound ({HOST_MARK})"),
        _flagged(cells, "power_capped_ns", "at a clock that the power limit held down"),
        _flagged(cells, "cpu_contended", "while something else had the cores"),
        _counted(ran_with_others(cells), "are CPU-bound and ran while others used their host"),
        _flagged(cells, "interval_wide", "with an interval wider than 5 %"),
        _labelled("commit", _one_or_several(cells, "commit")),
        _dates(cells),
    ]
    return " · ".join(part for part in parts if part)


def _one_or_several(cells: pd.DataFrame, column: str) -> str:
    values = list(cells[column].dropna().unique()) if column in cells else []
    if len(values) > 1:
        return f"several ({len(values)})"
    return str(values[0]) if values else ""


def _labelled(label: str, text: str) -> str:
    return f"{label} {text}" if text else ""


def _protocol(cells: pd.DataFrame) -> str:
    """Return the numbers of warm-up and measured steps, and `adaptive` if any cell chose its
    own.
    """
    steps = [_one_or_several(cells, axis) for axis in ("warmup_steps", "measured_steps")]
    parts = [" + ".join(filter(None, steps))]
    if "timing" in cells and (cells["timing"] == "adaptive").any():
        parts.append("adaptive")
    text = " and ".join(filter(None, parts))
    return f"{text} steps" if text else ""


def _repetitions(cells: pd.DataFrame) -> str:
    """Return a hint if any cell was measured repeatedly, because a row shows only the last time."""
    most = int(cells["repetitions"].max()) if "repetitions" in cells else 1
    return f"the last of up to {most} times measured" if most > 1 else ""


def _flagged(cells: pd.DataFrame, column: str, text: str) -> str:
    return _counted(cells[column].astype("Float64") > 0, text) if column in cells else ""


def _counted(found: pd.Series[bool], text: str) -> str:
    count = int(found.sum())
    return f"{count} of {len(found)} cells {text}" if count else ""


def _dates(cells: pd.DataFrame) -> str:
    if "started_at" not in cells:
        return ""
    started = pd.to_datetime(cells["started_at"].dropna())
    days = sorted(str(day)[:10] for day in started.dt.normalize().unique())
    if len(days) > 1:
        return f"{days[0]} to {days[-1]}"
    return days[0] if days else ""
