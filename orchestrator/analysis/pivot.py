"""Turn the long table of samples into one wide row a cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from orchestrator.analysis.statistics import STATISTICS, summarise

ATTEMPT_KEY = ["cell", "attempt"]


def metric_rows(samples: pd.DataFrame, instrument: str, mode: str, metric: str) -> pd.DataFrame:
    chosen = (
        (samples["instrument"] == instrument)
        & (samples["mode"] == mode)
        & (samples["metric"] == metric)
    )
    return samples.loc[chosen, ["cell", "phase", "step", "value"]]


def with_text_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """With the texts that categories stand for, but for those of cells: to be joined or renamed."""
    categorical = [
        name
        for name in rows
        if isinstance(rows[name].dtype, pd.CategoricalDtype) and name != "cell"
    ]
    return rows.astype({name: rows[name].dtype.categories.dtype for name in categorical})  # type: ignore[union-attr]


def summary_columns(
    values: pd.DataFrame, prefix: Callable[[str], str], statistics: Sequence[str] = STATISTICS
) -> pd.DataFrame:
    """By cell, of each phase, after the prefix for that."""
    if values.empty:
        return pd.DataFrame()
    summary = summarise(values, ["cell", "phase"])[list(statistics)]
    by_phase = {
        phase: summary.xs(phase, level="phase") for phase in sorted(summary.index.unique("phase"))
    }
    frames = [
        with_text_index(frame).add_prefix(prefix(str(phase))) for phase, frame in by_phase.items()
    ]
    return pd.concat(frames, axis=1).dropna(axis=1, how="all")


def pivot_samples(rows: pd.DataFrame, how: Any = "first") -> pd.DataFrame:
    if rows.empty:
        return pd.DataFrame()
    table: pd.DataFrame = rows[["cell", "column", "value"]].pivot_table(
        index="cell", columns="column", values="value", aggfunc=how, dropna=False, observed=True
    )
    table.columns.name = None
    return with_text_index(table)


def with_text_index(table: Any) -> pd.DataFrame:
    """By the texts of its index, which may be categories."""
    by_text: pd.DataFrame = table.set_axis(table.index.astype(str))
    return by_text
