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

from orchestrator.analysis.derived_fields import apply_to_sound_cells
from tasks.spec.fields import Aggregate
from tasks.spec.metrics import CellColumn, Metric
from tasks.spec.order_statistics import coverage, median_rank

INTERVAL_STATISTICS = ("median", "ci_low", "ci_high", "coverage")
STATISTICS = ("n", "mean", "sd", "min", *INTERVAL_STATISTICS)  # the columns of `summarise`
# A placeholder in the name of a column stands for the values of a column of the samples.
_PLACEHOLDERS = {"{phase}": "phase", "{rank}": "step", "{role}": "note", "{when}": "mode"}
_STATISTICS: Mapping[Aggregate, tuple[str, ...]] = {
    Aggregate.SUMMARY: STATISTICS,
    Aggregate.INTERVAL: INTERVAL_STATISTICS,
}

Positions = NDArray[np.intp]  # of samples
# A column of the samples: the index of each sample's value, and the distinct values.
Values = tuple[NDArray[np.intp], NDArray[np.object_]]


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
                    statistics = _STATISTICS.get(column.aggregate, ("",))
                    order += [name.replace("{statistic}", one) for one in statistics]
    frames = []
    for aggregate, rows_by_name in chosen.items():
        aggregated = partial(_aggregated, aggregate, list(rows_by_name))
        frames.append(apply_to_sound_cells(aggregated, _chosen_rows(samples, values, rows_by_name)))
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
    placeholder = next((word for word in _PLACEHOLDERS if word in column.name), None)
    if placeholder is None:
        return {column.name: rows} if len(rows) else {}
    to_text = _PLACEHOLDER_TEXTS.get(placeholder, str)
    numbers, texts = values[_PLACEHOLDERS[placeholder]]
    numbers_by_name = defaultdict(list)
    for number in np.unique(numbers[rows]):
        # Samples without a value, or of no phase, belong to none of the columns.
        is_named = texts[number] != "" if placeholder == "{phase}" else pd.notna(texts[number])
        if is_named:
            name = column.name.replace(placeholder, to_text(texts[number]))
            numbers_by_name[name].append(number)
    return {name: rows[np.isin(numbers[rows], those)] for name, those in numbers_by_name.items()}


def role_name(role: str) -> str:
    """Return the part of a column's name that stands for a role of memory.

    Activations are one role for all modules of the model, except those that grow with the square of
    the context length.
    """
    group, _, module = role.partition(": ")
    return (module if module == "attention squares" else group).replace(" ", "_")


_PLACEHOLDER_TEXTS: dict[str, Callable[..., str]] = {
    "{rank}": lambda step: str(int(step)),
    "{role}": role_name,
}


def _chosen_rows(
    samples: pd.DataFrame, values: Mapping[str, Values], rows_by_name: Mapping[str, Positions]
) -> pd.DataFrame:
    """Return the samples of all names in one frame. `column` is the index of a sample's name."""
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
        signs = rows["mode"].map({"before": -1, "after": 1})
        groups = rows.assign(value=rows["value"] * signs).groupby(keys)["value"]
        # Null if the value before or after is unknown.
        column = groups.sum().where(groups.count() == groups.size())
    elif aggregate is Aggregate.NOTE:
        column = rows.groupby(keys)["note"].first()
    else:
        column = rows.groupby(keys)["value"].agg(aggregate.value)
    table = column.unstack("column")
    numbers: list[Any] = table.columns.tolist()
    return table.set_axis([names[number] for number in numbers], axis=1)


def summarise(samples: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return one row per group: n, mean, sd (with n - 1), min, median, and its interval.

    ci_low and ci_high are order statistics between which the median of all steps lies with a
    probability of `coverage`, at least 95 % if there are enough samples. They assume no
    distribution: step times have a long tail.
    """
    ordered = samples.sort_values([*keys, "value"], kind="stable")
    groups = ordered.groupby(keys, sort=True, observed=True)["value"]
    with np.errstate(over="ignore", invalid="ignore"):  # sums of abnormal values may be infinite
        summary = pd.DataFrame(
            {
                "n": groups.size(),
                "mean": groups.mean(),
                "sd": groups.std(),
                "min": groups.min(),
                "median": groups.median(),
            }
        )
    counts = summary["n"].to_numpy()
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int)
    ranks = np.array(list(map(median_rank, counts.tolist())), dtype=int)
    values = ordered["value"].to_numpy()
    summary["ci_low"] = values[starts + ranks - 1]
    summary["ci_high"] = values[starts + counts - ranks]
    summary["coverage"] = list(map(coverage, counts.tolist(), ranks.tolist()))
    return summary
