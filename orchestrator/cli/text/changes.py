"""The cheapest changes that make a cell fit, as `sweep plan --memory` and `sweep show` print them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from orchestrator.analysis.results import read_attempts
from orchestrator.common.text import shell_word
from orchestrator.hardware.gpu_catalog import GpuModel, gpu_from_driver
from orchestrator.planning.fitting_changes import find_changes
from orchestrator.planning.prediction_requests import cap_bytes, predicting
from orchestrator.planning.request import import_paths
from orchestrator.report.tables.formatters import to_gib
from orchestrator.store.run import Run, find_cell
from tasks.prediction.records import predictable
from tasks.spec.cell import Cell
from tasks.spec.messages import assignments
from tasks.spec.registry import make_cell
from tasks.spec.status import Status

_MOST_SHOWN = 8
_SMALL = 0.0005  # a change of the FLOPs that one digit of a percentage does not show


def changes_of(
    cell: Cell, label: str, gpu: GpuModel | None, import_paths: tuple[str, ...]
) -> Iterator[str]:
    """Predict the changes of a cell that does not fit on this GPU, and yield them in lines.

    There is a line for each change that fits, or for the one that comes nearest.
    """
    with predicting(gpu, import_paths) as predict:
        changes = find_changes(cell, gpu, predict)
    if not changes:
        yield f"{label}: no option that trains the same can be predicted"
        return
    if changes[0].verdict == "fits":
        yield f"{label}: the cheapest changes that fit and train the same, as predicted"
    else:
        yield f"{label}: no option that trains the same makes it fit, nor two of them. The nearest:"
    words = [
        " ".join(f"--set {shell_word(word)}" for word in assignments(one.values))
        for one in changes[:_MOST_SHOWN]
    ]
    width = max(map(len, words))
    for text, one in zip(words, changes, strict=False):
        line = f"  {text:{width}}  {to_gib(one.peak_bytes)} GiB"
        if one.more_flops is None:
            line += ", FLOPs not counted"
        elif abs(one.more_flops) >= _SMALL:
            what = "more" if one.more_flops > 0 else "less"
            line += f", {abs(100 * one.more_flops):.1f} % {what} FLOPs"
        yield line


def changes_of_stored(run: Run, prefix: str) -> Iterator[str]:
    """Yield what would make a cell of a run fit on the GPU where its last attempt had no room."""
    attempts = read_attempts(run, ["cell", "attempt", "task", "params", "status", "facts"])
    found = find_cell(prefix, attempts["cell"].unique(), run)
    last = attempts[attempts["cell"] == found].sort_values("attempt").iloc[-1]
    if last["status"] not in (Status.OOM, Status.OOM_INFERRED):
        return
    try:
        cell = make_cell(last["task"], json.loads(last["params"]))
    except (KeyError, ValidationError):  # it has a task or a parameter that is gone
        yield f"cell {found}: another version measured it, so that no changes can be predicted"
        return
    facts = json.loads(last["facts"])
    gpu = None
    if facts.get("gpu") and facts.get("gpu_memory_bytes"):
        gpu = gpu_from_driver(facts["gpu"], facts["gpu_memory_bytes"])
    if predictable([cell]) and cap_bytes(cell, gpu) is not None:
        config = Path(str(run.read_manifest().get("config_path", "")))
        model = getattr(cell.params, "model", None)
        paths = import_paths(config, run, [model] if model else [])
        yield from changes_of(cell, f"cell {cell.id}", gpu, paths)
