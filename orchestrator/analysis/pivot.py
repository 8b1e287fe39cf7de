"""Choose, pivot and join samples, to one wide row per cell."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

ATTEMPT_KEY = ["cell", "attempt"]


def join_columns(frames: Iterable[pd.DataFrame | pd.Series]) -> pd.DataFrame:
    """Return the columns of all frames that are not empty, joined by their index."""
    filled = [frame for frame in frames if len(frame)]
    if not filled:
        return pd.DataFrame()
    return pd.concat(filled, axis=1)


def metric_rows(samples: pd.DataFrame, instrument: str, mode: str, metric: str) -> pd.DataFrame:
    """Return the samples of one metric in one mode."""
    is_chosen = (
        (samples["instrument"] == instrument)
        & (samples["mode"] == mode)
        & (samples["metric"] == metric)
    )
    return samples.loc[is_chosen, ["cell", "phase", "step", "value"]]


def pivot_samples(rows: pd.DataFrame, aggregate: str = "first") -> pd.DataFrame:
    """Return one row per cell and one column per value of `column`, aggregated."""
    if rows.empty:
        return pd.DataFrame()
    table: pd.DataFrame = rows[["cell", "column", "value"]].pivot_table(
        index="cell",
        columns="column",
        values="value",
        aggfunc=aggregate,  # type: ignore[arg-type]
        dropna=False,
        observed=True,
    )
    table.columns.name = None
    return with_text_index(table)


def with_text_columns(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with texts instead of categories, so that they can be joined and renamed."""
    # The ids of cells stay categories: there are many, and nothing is joined to them.
    categorical = rows.drop(columns="cell").select_dtypes("category")
    return rows.astype({name: categorical[name].cat.categories.dtype for name in categorical})


def with_text_index(table: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with text in its index instead of categories."""
    return table.set_axis(table.index.astype(str))
