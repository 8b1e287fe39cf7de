"""Columns of cells about memory that cannot be declared in tasks/spec/metrics.py."""

from __future__ import annotations

from functools import partial

import pandas as pd

from orchestrator.analysis.derived_fields import (
    DERIVED_FIELDS,
    DerivedField,
    derived,
)
from orchestrator.analysis.metric_columns import join_columns
from tasks.spec.metrics import CLOSED_FORM_BYTES, VERDICT

DERIVED_FIELDS += [
    DerivedField(
        "predicted_how",
        "how memory was predicted: tracked, modelled, compiled, as blocks (of a model that is"
        " compiled as a whole), as eager (with `may take more` where that is so), or closed form",
    ),
    DerivedField("predicted_reason", "why there is no prediction"),
    DerivedField(
        "flops_reason",
        "why `counted_flops` is empty: operations of other packages without a formula",
    ),
]


def latest_predictions(predictions: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the latest prediction of each cell, as samples."""
    latest_time = predictions.groupby("cell")["predicted_at"].transform("max")
    latest = predictions[predictions["predicted_at"] == latest_time]
    return latest.assign(instrument="prediction")


def with_value(latest: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of predictions that succeeded. A verdict has no value, but a note."""
    return latest[latest["value"].notna() | (latest["metric"] == VERDICT.name)]


def undeclared_columns(latest: pd.DataFrame) -> pd.DataFrame:
    """Return the closed form, how memory was predicted, and why it or FLOPs are not known."""
    sizes = latest[latest["metric"].str.startswith(("peak", "held"))]
    is_predicted = sizes["value"].notna()
    how = _first_note(sizes[is_predicted], "predicted_how")
    why_not = _first_note(sizes[~is_predicted], "predicted_reason")
    flops = latest[(latest["metric"] == "flops") & latest["value"].isna()]
    uncounted = _first_note(flops, "flops_reason")
    return join_columns([_closed_form(with_value(latest)), how, why_not, uncounted])


def _first_note(rows: pd.DataFrame, name: str) -> pd.Series[str]:
    return rows.groupby("cell")["note"].first().rename(name)


def _closed_form(samples: pd.DataFrame) -> pd.DataFrame:
    """Return `closed_form_bytes`, or `at_least_bytes` if the activations are unknown."""
    terms = samples[samples["metric"] == CLOSED_FORM_BYTES.name]
    if terms.empty:
        return pd.DataFrame()
    sums = terms.groupby("cell")["value"].sum()
    # Only a complete closed form has the term `temporary`.
    is_complete = sums.index.isin(terms.loc[terms["note"] == "temporary", "cell"])
    found = pd.DataFrame(
        {"closed_form_bytes": sums.where(is_complete), "at_least_bytes": sums.mask(is_complete)}
    )
    return found.dropna(axis=1, how="all")


DERIVED_FIELDS += [
    DerivedField(
        "snapshot_unlabelled_share",
        "share of the recorded peak whose role is unknown",
        "ratio",
        ("snapshot_unlabelled_bytes", "snapshot_peak_allocated_bytes"),
        ratio=1,
    ),
]


@derived(
    "formula_{what}_squares_bytes",
    "in `attention`, memory of the tensors over all pairs of positions, by formula: saved for the "
    "backward pass, or at the peak of a pass",
    "bytes",
    needs=("square_bytes",),
)
def formula_squares(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the formula's number of squares times the size of one."""
    columns = {}
    for what in ("saved", "forward", "backward"):
        count = cells.get(f"formula_{what}_squares")
        if count is not None:
            columns[f"formula_{what}_squares_bytes"] = count * cells["square_bytes"]
    return pd.DataFrame(columns, index=cells.index)


def _squares(cells: pd.DataFrame, prefix: str) -> pd.DataFrame:
    columns = {}
    built = cells.get(f"{prefix}built_held_allocated_bytes")
    for phase in ("forward", "backward"):
        peak = cells.get(f"{prefix}{phase}_peak_allocated_bytes")
        if peak is not None and built is not None:
            columns[f"{prefix}{phase}_squares_bytes"] = peak - built
    saved = cells.get(f"{prefix}saved_square_bytes")
    if saved is not None:
        columns[f"{prefix}saved_squares_bytes"] = saved
    # Other tasks have such peaks too, but only `attention` consists of squares.
    is_attention = cells["square_bytes"].notna()
    return pd.DataFrame(columns, index=cells.index).where(is_attention)


derived(
    "{what}_squares_bytes",
    "in `attention`, memory that is saved for the backward pass over all pairs of positions, or "
    "the peak of a pass above the memory after the build",
    "bytes",
    needs=("square_bytes",),
)(partial(_squares, prefix=""))
derived(
    "predicted_{what}_squares_bytes",
    "predicted `{what}_squares_bytes`",
    "bytes",
    needs=("square_bytes",),
)(partial(_squares, prefix="predicted_"))
