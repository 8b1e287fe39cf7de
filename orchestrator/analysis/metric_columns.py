"""Columns of `cells` that are made of samples, as tasks/spec/metrics.py declares them.

`metric_columns` makes all columns that have an aggregate. Other modules make those whose rule
cannot be declared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pandas as pd

from orchestrator.analysis.pivot import (
    join_columns,
    pivot_samples,
    with_text_columns,
    with_text_index,
)
from orchestrator.analysis.sound_cells import apply_to_sound_cells
from orchestrator.analysis.statistics import INTERVAL_STATISTICS, STATISTICS, summarise
from tasks.spec.fields import Aggregate
from tasks.spec.metrics import CellColumn, Metric

# A placeholder in the name of a column stands for the values of a column of the samples.
_PLACEHOLDERS = {"{phase}": "phase", "{rank}": "step", "{role}": "note", "{when}": "mode"}
_PANDAS_NAMES: Mapping[Aggregate, str] = {
    Aggregate.FIRST: "first",
    Aggregate.MAX: "max",
    Aggregate.SUM: "sum",
    Aggregate.SIZE: "size",
}
_STATISTICS: Mapping[Aggregate, tuple[str, ...]] = {
    Aggregate.SUMMARY: STATISTICS,
    Aggregate.INTERVAL: INTERVAL_STATISTICS,
}


def metric_columns(samples: pd.DataFrame, metrics: Iterable[Metric]) -> pd.DataFrame:
    """Return the columns that the metrics declare, with one row per cell, by the cells' ids.

    A column without samples is left out.
    """
    rows_of = _rows_by_metric(samples)
    frames = []
    for metric in metrics:
        rows = rows_of.get((metric.instrument, metric.name))
        if rows is not None:
            for column in metric.columns:
                if column.aggregate:
                    frames.append(apply_to_sound_cells(partial(_columns, column), rows))
    return join_columns(frames)


def _rows_by_metric(samples: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the samples of each instrument and metric."""
    # One pass over the samples, which may be millions: to compare all rows with each of the
    # declared metrics would take about 60 passes.
    groups = samples.groupby(["instrument", "metric"], observed=True, sort=False)
    columns = ["cell", "mode", "phase", "step", "value", "note"]
    return {(str(key[0]), str(key[1])): rows[columns] for key, rows in groups}


def _columns(column: CellColumn, rows: pd.DataFrame) -> pd.DataFrame:
    if column.mode is not None:
        rows = rows[rows["mode"] == column.mode]
    if column.phase is not None:
        rows = rows[rows["phase"] == column.phase]
    elif "{phase}" in column.name:
        rows = rows[rows["phase"] != ""]
    if rows.empty or column.aggregate is None:
        return pd.DataFrame()
    if column.aggregate in _STATISTICS:
        return _summary_columns(column, rows, _STATISTICS[column.aggregate])
    named = with_text_columns(rows).assign(column=_column_names(column.name, rows))
    if column.aggregate is Aggregate.DIFFERENCE:
        return _differences(named)
    if column.aggregate is Aggregate.NOTE:
        return pivot_samples(named.assign(value=named["note"]))
    return pivot_samples(named, _PANDAS_NAMES[column.aggregate])


def _column_names(template: str, rows: pd.DataFrame) -> pd.Series[str]:
    """Return the name of the column that each sample belongs to."""
    for placeholder, source in _PLACEHOLDERS.items():
        if placeholder not in template:
            continue
        to_text = _PLACEHOLDER_TEXTS.get(placeholder, str)
        names = {}
        for value in rows[source].unique():
            names[value] = template.replace(placeholder, to_text(value))
        return rows[source].astype(object).map(names)
    return pd.Series(template, index=rows.index)


def role_name(role: str) -> str:
    """Return the part of a column's name that stands for a role of memory.

    Activations are one role for all modules of the model, except those that grow with the square of
    the context length.
    """
    group, _, module = role.partition(": ")
    return (module if module == "attention squares" else group).replace(" ", "_")


_PLACEHOLDER_TEXTS: dict[str, Callable[[str], str]] = {
    "{rank}": lambda step: str(int(step)),
    "{role}": role_name,
}


def _summary_columns(
    column: CellColumn, rows: pd.DataFrame, statistics: tuple[str, ...]
) -> pd.DataFrame:
    rows = rows[rows["value"].notna()]
    if rows.empty:
        return pd.DataFrame()
    summary = summarise(rows, ["cell", "phase"])[list(statistics)]
    if "n" in statistics:
        summary["n"] = summary["n"].astype("Int64")  # stays a count next to cells without one
    frames = []
    for phase in sorted(summary.index.unique("phase")):
        frame = with_text_index(pd.DataFrame(summary.xs(phase, level="phase")))
        template = column.name.replace("{phase}", str(phase))
        names = [template.replace("{statistic}", statistic) for statistic in statistics]
        frames.append(frame.set_axis(names, axis=1))
    # A single step has no interval: where no cell has more, there is no column of it.
    return pd.concat(frames, axis=1).dropna(axis=1, how="all")


def _differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the value after the timing less the value before it, null if one is unknown."""
    signed = rows.assign(value=rows["value"] * rows["mode"].map({"before": -1, "after": 1}))
    is_known = signed["value"].notna().groupby(signed["cell"], observed=True).all()
    differences = pivot_samples(signed, "sum")
    return differences.where(is_known.set_axis(is_known.index.astype(str)), axis=0)
