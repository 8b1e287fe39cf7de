"""The cells of one chart, map or matrix: those that differ only in the axes that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.axes import MAIN, NOTHING, RUN, axis_text, has_value
from orchestrator.analysis.results import Results
from orchestrator.report.text.cell_names import COMPILED, NAME, NAMING, PASSES, names_of

_NAMED = (
    ("precision", "{}"),
    ("compile", "{}"),
    ("batch_size", "batch {}"),
    ("attention", "{} attention"),
    ("memory_limit_gib", "limit {:g} GiB"),
)


def usual_value(axis: str, texts: Iterable[str] | Mapping[str, int]) -> str:
    """Return the value that a slice has of an axis: that of MAIN, or else the most common one.

    texts: the value of each cell, or how often each value occurs.
    """
    counts = Counter(texts)
    main = axis_text(MAIN[axis]) if axis in MAIN else ""
    return main if main in counts else counts.most_common(1)[0][0]


def choose_slice(
    cells: pd.DataFrame, axes: Sequence[str], shown: Collection[str]
) -> tuple[pd.DataFrame, str]:
    """Return cells that are equal in all axes but the shown ones, and what they share as a text."""
    is_shown = {*shown, *(axis for axis, _ in NAMING if NAME in shown)}
    others = [axis for axis in axes if axis not in is_shown and axis in cells]
    # Rows are chosen once: each choice copies several hundred columns.
    columns = list(dict.fromkeys((*shown, *others)))
    left = cells[columns].astype("string").fillna(NOTHING).reset_index(drop=True)
    # The run before axes without a main value: others repeat some of its cells.
    for axis in sorted(others, key=lambda axis: (axis not in MAIN, axis != RUN)):
        if left[axis].nunique() > 1:
            # Each combination of shown values counts once, however often it was measured.
            own = left[[*shown, axis]].drop_duplicates()
            left = left[left[axis] == usual_value(axis, own[axis])]
    left = left[~left.duplicated(list(shown), keep="last")]
    cells = cells.iloc[left.index]
    return cells, shared_settings(cells, is_shown) if len(cells) else ""


def main_cells(results: Results) -> tuple[pd.DataFrame, str]:
    """Return the cells of training steps, or else of attention, and the axis of rows for a grid."""
    cells = results.cells
    for task in ("train_step", "attention"):
        own = cells[cells["task"] == task] if "task" in cells else cells.iloc[:0]
        if len(own):
            varies = task == "attention" and own["attention"].nunique() > 1
            return own.assign(**{NAME: names_of(own)}), "attention" if varies else NAME
    return cells.iloc[:0], NAME


def shared_settings(cells: pd.DataFrame, shown: Collection[str]) -> str:
    """Return the settings that all cells share, such as `training step, eager, batch 4`."""
    row = cells.iloc[0]
    parts = []
    if has_value(row, "pass") and "pass" not in shown:
        parts.append(PASSES.get(str(row["pass"]), str(row["pass"])))
    for axis, form in _NAMED:
        is_shared = axis in cells and axis not in shown and cells[axis].nunique(dropna=False) == 1
        if is_shared and has_value(row, axis):
            parts.append(form.format(COMPILED.get(row[axis], row[axis])))
    return ", ".join(parts)


def evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` values, evenly spaced, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(index * (len(values) - 1) / (most - 1))] for index in range(most)]
