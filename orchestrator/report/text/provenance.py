"""Heading of the page, counts by status, and the line below each table: what was measured and how."""

from __future__ import annotations

from typing import Any

import pandas as pd

from orchestrator.analysis.axes import RUN
from orchestrator.analysis.cpu_bound import is_true, ran_with_others
from orchestrator.analysis.pairs import TIME
from orchestrator.analysis.results import Results
from orchestrator.common.text import cell_count, first_of
from orchestrator.report.text.numbers import HOST_MARK
from tasks.spec.status import OUT_OF_MEMORY

_MOST_LISTED = 3  # values of a column; of more, the line has their number
_PEAKS = ("peak_allocated_bytes", "peak_rss_bytes")  # on a GPU, and on a CPU
_SOFTWARE = (("torch", "torch"), ("CUDA", "cuda"), ("driver", "driver"), ("batch", "batch_size"))


def provenance(results: Results) -> str:
    """Return one line on how the cells were measured.

    Where cells differ in a value, it lists up to three values, or says how many there are.
    """
    cells = results.cells
    runs = values_of(cells, RUN)
    unrequested = len(cells) - int(results.manifest.get("asked", 0))
    repetitions = max(_column(cells, "repetitions"), default=1)
    has_changed = cells.filter(items=["settings_changed"]).notna().any(axis=1)
    parts = [
        f"run {first_of(runs) or results.manifest.get('name', '?')}",
        _value(cells, "gpu") or _value(cells, "cpu"),
        *(labelled(label, _value(cells, column)) for label, column in _SOFTWARE),
        _protocol(cells),
        # A row shows only the last of its repetitions.
        f"the last of up to {repetitions} times measured" if repetitions > 1 else "",
        _counted(is_true(cells, "cpu_bound"), f"are CPU-bound ({HOST_MARK})"),
        _counted(is_true(cells, "power_capped_ns"), "at a clock that the power limit held down"),
        _counted(is_true(cells, "cpu_contended"), "while other processes used their cores"),
        _counted(ran_with_others(cells), "are CPU-bound and ran while others used their host"),
        _counted(is_true(cells, "interval_wide"), "with an interval wider than 5 %"),
        _counted(has_changed, "changed settings of their process (settings_changed)"),
        # By the last command of the folder, at least.
        f"{unrequested:,} of {len(cells):,} cells are from an earlier config or selection"
        * (0 < unrequested < len(cells)),
        labelled("commit", _value(cells, "commit")),
        measured_days(cells),
    ]
    return " · ".join(filter(None, parts))


def _column(cells: pd.DataFrame, name: str) -> pd.Series[Any]:
    """Return the known values of a column, or none if the run lacks it."""
    return cells.get(name, pd.Series(dtype=object)).dropna()


def values_of(cells: pd.DataFrame, column: str) -> list[str]:
    """Return the distinct values of a column as texts."""
    return list(map(str, _column(cells, column).unique()))


def _value(cells: pd.DataFrame, column: str) -> str:
    # By length first, which sorts whole numbers by their size.
    values = sorted(values_of(cells, column), key=lambda text: (len(text), text))
    return ", ".join(values) if len(values) <= _MOST_LISTED else f"several ({len(values)})"


def labelled(label: str, text: str) -> str:
    """Return a label with its text; empty without a text."""
    return f"{label} {text}" if text else ""


def _protocol(cells: pd.DataFrame) -> str:
    """Return the numbers of warm-up and measured steps, and `adaptive` if a cell chose its own."""
    warmup, measured = _value(cells, "warmup_steps"), _value(cells, "measured_steps")
    parts = [f"{warmup} warm-up + {measured} measured"] if measured else []
    parts += ["adaptive"] if _column(cells, "timing").eq("adaptive").any() else []
    return f"{' and '.join(parts)} steps" if parts else ""


def _counted(found: pd.Series[bool], text: str) -> str:
    if not found.any():
        return ""
    if len(found) == 1:
        text = text.replace("are ", "is ", 1)
    return f"{found.sum():,} of {cell_count(len(found))} {text}"


def measured_days(cells: pd.DataFrame, form: str = "%Y-%m-%d") -> str:
    """Return the first and the last day of measuring, such as `2026-11-21 to 2026-11-24`."""
    started = pd.to_datetime(_column(cells, "started_at")).dropna()
    if started.empty:
        return ""
    ends = [day.strftime(form).lstrip("0") for day in (started.min(), started.max())]
    return " to ".join(dict.fromkeys(ends))


def headline(results: Results) -> str:
    """Return what was measured on what, for the heading of the page."""
    cells = results.cells
    if cells.empty or "task" not in cells:
        return f"{results.manifest.get('name', 'run')}: nothing is measured yet"
    tasks = set(cells["task"])
    models: list[object] = list(cells["model"].unique()) if "model" in cells else []
    is_one = len(models) == 1 and isinstance(models[0], str)
    subject = "Attention"
    if "train_step" in tasks:
        subject = f"Training {models[0] if is_one else 'Transformers'}"
    if not tasks & {"train_step", "attention"}:
        subject = ", ".join(sorted(task.replace("_", " ") for task in tasks)).capitalize()
    gpus, device = values_of(cells, "gpu"), ""
    if gpus:
        device = f" on {_gpus_of_a_cell(cells)} {gpus[0]}"
        if len(gpus) > 1:
            device = f" on {len(gpus)} kinds of GPU"
    elif "device" in cells and (cells["device"] == "cpu").all():
        device = " on a CPU"
    has_time = TIME in cells and cells[TIME].notna().any()
    has_memory = cells.filter(items=_PEAKS).notna().any(axis=None)
    has_limits = cells["status"].isin(OUT_OF_MEMORY).any()
    parts = [("time", has_time), ("memory", has_memory), ("limits", has_limits)]
    shown = ", ".join(name for name, present in parts if present)
    return f"{subject}{device}{': ' if shown else ''}{shown}"


def _gpus_of_a_cell(cells: pd.DataFrame) -> str:
    """Return the number of GPUs of a cell as a word, such as `one`, `4` or `1 to 4`."""
    counts = cells.get("gpus", pd.Series(1, cells.index)).fillna(1).astype(int)
    low, high = counts.min(), counts.max()
    if low < high:
        return f"{low} to {high}"
    return "one" if high == 1 else str(high)


def counts_by_status(results: Results, pending: int) -> list[tuple[str, str]]:
    """Return texts such as `1,265 measured`, each with its kind: ok, bad or quiet.

    pending: number of cells without a result.
    """
    statuses = results.cells["status"]
    ok, skipped = int((statuses == "ok").sum()), int((statuses == "skipped").sum())
    oom = int(statuses.isin(OUT_OF_MEMORY).sum())
    failed = len(statuses) - ok - skipped - oom
    counts = [
        (ok, "measured", "ok"),
        (oom, "out of memory", "bad"),
        (failed, "failed", "bad"),
        (skipped, "impossible", "quiet"),
        (pending, "not measured", "quiet"),
    ]
    return [(f"{count:,} {text}", kind) for count, text, kind in counts if count or kind == "ok"]
