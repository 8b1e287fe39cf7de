"""Columns of `cells` that are made of samples, as tasks/spec/metrics.py declares them.

`metric_columns` makes all columns that have an aggregate. Other modules make those whose rule
cannot be declared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from orchestrator.analysis.sound_cells import apply_to_sound_cells
from orchestrator.analysis.statistics import INTERVAL_STATISTICS, STATISTICS, summarise
from tasks.spec.fields import Aggregate
from tasks.spec.metrics import CellColumn, Metric

# A placeholder in the name of a column stands for the values of a column of the samples.
_PLACEHOLDERS = {"{phase}": "phase", "{rank}": "step", "{role}": "note", "{when}": "mode"}
_STATISTICS: Mapping[Aggregate, tuple[str, ...]] = {
    Aggregate.SUMMARY: STATISTICS,
    Aggregate.INTERVAL: INTERVAL_STATISTICS,
}

Positions = NDArray[np.intp]  # of samples
Values = tuple[
    NDArray[np.intp], NDArray[np.object_]
]  # the number of each sample's value; the values


def metric_columns(samples: pd.DataFrame, metrics: Iterable[Metric]) -> pd.DataFrame:
    """Return the columns that the metrics declare, with one row per cell, by the cells' ids.

    A column without samples is left out.
    """
    # All columns of one aggregate are made in one pass: each call of pandas takes a millisecond,
    # and there are a hundred columns.
    groups = samples.groupby(["instrument", "metric"], observed=True, sort=False)
    positions: Mapping[object, Any] = groups.indices
    values = {name: _values(samples[name]) for name in ("cell", "mode", "phase", "step", "note")}
    chosen: dict[Aggregate, dict[str, Positions]] = defaultdict(dict)
    order = []
    for metric in metrics:
        here = positions.get((metric.instrument, metric.name), ())
        for column in metric.columns:
            if column.aggregate and len(here):
                for name, rows in sorted(_rows_by_name(column, here, values).items()):
                    chosen[column.aggregate][name] = rows
                    order += _names(name, column.aggregate)
    frames = []
    for aggregate, rows_by_name in chosen.items():
        aggregated = partial(_aggregated, aggregate, list(rows_by_name))
        frames.append(apply_to_sound_cells(aggregated, _long(samples, values, rows_by_name)))
    table = join_columns(frames)
    # A column is missing if all its cells are abnormal, or if no cell has an interval.
    return table[[name for name in order if name in table]]


def join_columns(frames: Iterable[pd.DataFrame | pd.Series]) -> pd.DataFrame:
    """Return the columns of all frames that are not empty, joined by their index."""
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled, axis=1) if filled else pd.DataFrame()


def _values(column: pd.Series) -> Values:
    numbers, values = pd.factorize(column, use_na_sentinel=False)
    return numbers, np.asarray(values, dtype=object)


def _rows_by_name(
    column: CellColumn, rows: Positions, values: Mapping[str, Values]
) -> dict[str, Positions]:
    """Return each name that the column has for samples of its metric, with these samples."""
    for name, wanted in (("mode", column.mode), ("phase", column.phase)):
        if wanted is not None:
            numbers, texts = values[name]
            rows = rows[texts[numbers[rows]] == wanted]
    source = next((_PLACEHOLDERS[word] for word in _PLACEHOLDERS if word in column.name), "")
    if not source:
        return {column.name: rows} if len(rows) else {}
    numbers, texts = values[source]
    numbers_by_name = defaultdict(list)
    for number in np.unique(numbers[rows]):
        # Samples of a placeholder's missing value, or of no phase, belong to none of the columns.
        if pd.notna(texts[number]) and (source, texts[number]) != ("phase", ""):
            numbers_by_name[_filled(column.name, source, texts[number])].append(number)
    return {name: rows[np.isin(numbers[rows], those)] for name, those in numbers_by_name.items()}


def _filled(template: str, source: str, value: object) -> str:
    """Return the name of the column for samples that have a value in their column `source`."""
    placeholder = next(word for word, column in _PLACEHOLDERS.items() if column == source)
    return template.replace(placeholder, _TEXTS.get(source, str)(value))


def role_name(role: str) -> str:
    """Return the part of a column's name that stands for a role of memory.

    Activations are one role for all modules of the model, except those that grow with the square of
    the context length.
    """
    group, _, module = role.partition(": ")
    return (module if module == "attention squares" else group).replace(" ", "_")


_TEXTS: dict[str, Callable[..., str]] = {"step": lambda step: str(int(step)), "note": role_name}


def _long(
    samples: pd.DataFrame, values: Mapping[str, Values], rows_by_name: Mapping[str, Positions]
) -> pd.DataFrame:
    """Return the chosen samples of all names: cell, the number of the name, mode, value and note."""
    rows = np.concatenate(list(rows_by_name.values()))
    counts = [len(those) for those in rows_by_name.values()]
    texts = {name: values[name][1][values[name][0][rows]] for name in ("cell", "mode", "note")}
    return pd.DataFrame(
        {
            "cell": pd.Series(texts["cell"], dtype=object),
            "column": np.repeat(np.arange(len(counts)), counts),
            "mode": pd.Series(texts["mode"], dtype=object),
            "value": samples["value"].to_numpy()[rows],
            "note": pd.Series(texts["note"], dtype=object),
        }
    )


def _names(name: str, aggregate: Aggregate) -> list[str]:
    """Return the names of a column, or several names if it is made of statistics."""
    return [name.replace("{statistic}", one) for one in _STATISTICS.get(aggregate, ("",))]


def _aggregated(aggregate: Aggregate, names: list[str], rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per cell and one column per name, or one per name and statistic."""
    keys = ["cell", "column"]
    if aggregate in _STATISTICS:
        summary = summarise(rows[rows["value"].notna()], keys)
        # Counts stay integers where other cells have none.
        summary["n"] = summary["n"].astype("Int64")
        table = pd.DataFrame(summary[list(_STATISTICS[aggregate])].unstack("column"))
        pairs: list[Any] = table.columns.tolist()
        columns = [names[column].replace("{statistic}", one) for one, column in pairs]
        # A single step has no interval: where no cell has more, there is no column of it.
        return table.set_axis(columns, axis=1).dropna(axis=1, how="all")
    if aggregate is Aggregate.DIFFERENCE:
        rows = rows.assign(value=rows["value"] * rows["mode"].map({"before": -1, "after": 1}))
    groups = rows.groupby(keys)["note" if aggregate is Aggregate.NOTE else "value"]
    if aggregate is Aggregate.DIFFERENCE:
        # Null if the value before or after is unknown.
        column = groups.sum().where(groups.count() == groups.size())
    else:
        column = groups.agg("first" if aggregate is Aggregate.NOTE else aggregate.value)
    table = column.unstack("column")
    numbers: list[Any] = table.columns.tolist()
    return table.set_axis([names[number] for number in numbers], axis=1)
