"""Columns of cells about memory: measured, predicted, and from snapshots of the allocator."""

from __future__ import annotations

import pandas as pd

from orchestrator.analysis.pivot import (
    pivot_samples,
    with_text_columns,
    with_text_index,
)

_OPERATION = "saved_operation_bytes"
_SAVED = (
    "saved_bytes",
    "saved_square_bytes",
    "saved_squares",
    "saved_block_bytes",
    "residual_stream_bytes",
)
_SQUARES = (
    "square_bytes",
    "formula_saved_squares",
    "formula_forward_squares",
    "formula_backward_squares",
)


def peaks(samples: pd.DataFrame) -> pd.DataFrame:
    """`peak_allocated_bytes`, … over the steady step; `forward_peak_…` by phase; `first_…` for the first step.

    `forward_held_allocated_bytes` is what is held at the end of a phase, `built_held_…` after the build; `saved_bytes`,
    `saved_squares` of what is kept for the backward pass, `saved_block_bytes` by one block, `residual_stream_bytes` of what
    that hands on.
    """
    chosen = (samples["instrument"] == "memory") & (samples["metric"] != _OPERATION)
    memory = with_text_columns(samples.loc[chosen, ["cell", "mode", "phase", "metric", "value"]])
    prefix = memory["mode"].map({"first": "first_", "steady": "", "built": "built_"})
    whole = memory[~(memory["metric"].str.startswith("held") & (memory["phase"] != ""))]
    whole = whole.assign(column=prefix[whole.index] + whole["metric"])
    parts = memory[memory["phase"] != ""]
    by_phase = parts.assign(column=prefix[parts.index] + parts["phase"] + "_" + parts["metric"])
    return pivot_samples(pd.concat([whole, by_phase]), "max")


def saved_operations(samples: pd.DataFrame) -> pd.DataFrame:
    """Of the operations of a block that save most for the backward pass, by rank: `saved_1_operation`, `saved_1_bytes`, …"""
    operations = with_text_columns(samples[samples["metric"] == _OPERATION])
    if operations.empty:
        return pd.DataFrame()
    stem = "saved_" + operations["step"].astype(int).astype(str)
    named = with_text_index(
        operations.assign(column=stem + "_operation").pivot(
            index="cell", columns="column", values="note"
        )
    )
    return named.join(pivot_samples(operations.assign(column=stem + "_bytes")))


def predicted_columns(predictions: pd.DataFrame | None) -> pd.DataFrame:
    """The columns of `peaks` after `predicted_`, `predicted_how` and `predicted_verdict`, and by role `predicted_of_…_bytes`;
    by formula `closed_form_bytes` and its terms, `square_bytes` and `formula_…_squares`.

    The latest prediction of a cell counts. Where there could be none, `predicted_reason` says why.
    """
    if predictions is None or predictions.empty:
        return pd.DataFrame()
    latest = predictions[
        predictions["predicted_at"] == predictions.groupby("cell")["predicted_at"].transform("max")
    ]
    sizes = latest[latest["metric"].str.startswith(("peak", "held"))]
    saved = latest[latest["metric"].isin(_SAVED)]
    made, not_made = sizes[sizes["value"].notna()], sizes[sizes["value"].isna()]
    roles, verdicts = (
        latest[latest["metric"] == "at_peak_bytes"],
        latest[latest["metric"] == "verdict"],
    )
    columns = [
        peaks(pd.concat([made, saved], ignore_index=True).assign(instrument="memory")).add_prefix(
            "predicted_"
        ),
        saved_operations(latest).add_prefix("predicted_"),
        pivot_samples(
            roles.assign(column="predicted_of_" + roles["note"].map(_column_of_role) + "_bytes"),
            "sum",
        ),
        _closed_forms(latest),
        pivot_samples(latest[latest["metric"].isin(_SQUARES)].rename(columns={"metric": "column"})),
        made.groupby("cell")["note"].first().rename("predicted_how"),
        not_made.groupby("cell")["note"].first().rename("predicted_reason"),
        verdicts.groupby("cell")["note"].first().rename("predicted_verdict"),
    ]
    return pd.concat([column for column in columns if len(column)], axis=1)


def _closed_forms(predictions: pd.DataFrame) -> pd.DataFrame:
    """`closed_form_bytes` of the peak, and by term `closed_form_of_…_bytes`; `at_least_bytes` where activations are unknown."""
    terms = predictions[predictions["metric"] == "closed_form_bytes"]
    if terms.empty:
        return pd.DataFrame()
    by_term = pivot_samples(
        terms.assign(column="closed_form_of_" + terms["note"].map(_column_of_role) + "_bytes"),
        "sum",
    )
    sums, whole = terms.groupby("cell")["value"].sum(), terms[terms["note"] == "temporary"]["cell"]
    is_whole = sums.index.isin(whole)
    found = by_term.assign(
        closed_form_bytes=sums.where(is_whole), at_least_bytes=sums.mask(is_whole)
    )
    return found.dropna(axis=1, how="all")


def _column_of_role(role: str) -> str:
    """Activations of all parts of the model together, but for those that grow with the square of the length."""
    group, _, part = role.partition(": ")
    return (part if part == "attention squares" else group).replace(" ", "_")


def snapshots(samples: pd.DataFrame) -> pd.DataFrame:
    """What the step on the allocator's record comes to: `snapshot_peak_allocated_bytes`, …, `snapshot_replayed_peak_bytes`;
    `snapshot_unlabelled_share` of the peak; `snapshot_events`, `snapshot_wrapped`; `snapshot_processing_ms`.
    """
    taken = with_text_columns(samples[samples["instrument"] == "memory_snapshot"])
    table = pivot_samples(
        taken.assign(
            column="snapshot_" + taken["metric"] + taken["unit"].map({"ms": "_ms"}).fillna("")
        )
    )
    if "snapshot_unlabelled_bytes" in table:
        table["snapshot_unlabelled_share"] = (
            table["snapshot_unlabelled_bytes"] / table["snapshot_peak_allocated_bytes"]
        )
    return table


def with_square_bytes(wide: pd.DataFrame) -> pd.DataFrame:
    """Of attention alone, what it takes beyond what was built, at most: `forward_squares_bytes`, `backward_squares_bytes`,
    and `saved_squares_bytes` of what waits for the backward pass; each also after `predicted_` and `formula_`.
    """
    if "square_bytes" not in wide:
        return wide
    for what in ("saved", "forward", "backward"):
        if f"formula_{what}_squares" in wide:
            wide[f"formula_{what}_squares_bytes"] = (
                wide[f"formula_{what}_squares"] * wide["square_bytes"]
            )
        for prefix in ("", "predicted_"):
            peak, built, saved = (
                wide.get(f"{prefix}{column}")
                for column in (
                    f"{what}_peak_allocated_bytes",
                    "built_held_allocated_bytes",
                    "saved_square_bytes",
                )
            )
            found = (
                saved
                if what == "saved"
                else peak - built
                if peak is not None and built is not None
                else None
            )
            if found is not None:
                wide[f"{prefix}{what}_squares_bytes"] = found.where(wide["square_bytes"].notna())
    return wide
