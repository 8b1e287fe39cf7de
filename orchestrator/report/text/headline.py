"""The head of the page: what was measured on which device, and the number of cells by status."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.pairs import TIME
from orchestrator.analysis.results import Results
from orchestrator.report.text.provenance import values_of
from tasks.spec.status import OUT_OF_MEMORY

_PEAKS = ("peak_allocated_bytes", "peak_rss_bytes")  # on a GPU, and on a CPU


def headline(results: Results) -> str:
    """Return what was measured on what, for the heading of the page."""
    cells = results.cells
    if cells.empty or "task" not in cells:
        return f"{results.manifest.get('name', 'run')}: nothing is measured yet"
    tasks = set(cells["task"])
    subject = f"Training {_trained(cells)}" if "train_step" in tasks else "Attention"
    if not tasks & {"train_step", "attention"}:
        subject = ", ".join(sorted(task.replace("_", " ") for task in tasks)).capitalize()
    device = _device(cells)
    has_time = TIME in cells and cells[TIME].notna().any()
    has_memory = cells.filter(items=_PEAKS).notna().any(axis=None)
    has_limits = cells["status"].isin(OUT_OF_MEMORY).any()
    parts = [("time", has_time), ("memory", has_memory), ("limits", has_limits)]
    shown = ", ".join(name for name, present in parts if present)
    return f"{subject}{device}{': ' if shown else ''}{shown}"


def _trained(cells: pd.DataFrame) -> str:
    """Return the name of the user's model, if nothing else was trained."""
    models: list[object] = list(cells["model"].unique()) if "model" in cells else []
    is_one = len(models) == 1 and isinstance(models[0], str)
    return str(models[0]) if is_one else "Transformers"


def _device(cells: pd.DataFrame) -> str:
    gpus = values_of(cells, "gpu")
    if len(gpus) == 1:
        return f" on one {gpus[0]}"
    if gpus:
        return f" on {len(gpus)} kinds of GPU"
    return " on a CPU" if _is_on_cpu(cells) else ""


def _is_on_cpu(cells: pd.DataFrame) -> bool:
    return "device" in cells and bool((cells["device"] == "cpu").all())


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
