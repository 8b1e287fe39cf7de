"""Tables of memory by phase: measured, predicted without a GPU, and by formula."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from orchestrator.report.tables.cell_filters import both, having, of_task
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.formatters import (
    SAVED_RANKS,
    Value,
    col,
    gib,
    gib_predicted,
    memory_need,
    mib_measured,
    peak_gib,
    predicted,
    ratio,
    saved_mib_predicted,
    saving_operation,
    share_of_block,
)
from orchestrator.report.tables.layouts import CellRows, ContextColumns, PhaseRows
from orchestrator.report.tables.table import Table

_PHASES = ("forward", "backward", "optimizer")
_PREDICTED_ROLES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "attention_squares",
    "activations",
    "autocast_weight_copies",
    "temporary",
    "workspace",
    "slack",
)
_WHOLE = {"predicted": "predicted_peak_allocated_bytes", "closed_form": "closed_form_bytes"}


def _with_peaks(cells: pd.DataFrame) -> pd.DataFrame:
    """Return all cells of a run that measured memory: a cell that failed shows its status."""
    has_peaks = {"peak_allocated_bytes", "peak_rss_bytes"} & set(cells)
    return cells if has_peaks else cells.iloc[:0]


def _prediction_ratio(column: str) -> Value:
    return ratio(f"predicted_{column}", column, ".4f")


def _of_role(role: str) -> Callable[[str], Value]:
    return lambda source: gib_predicted(f"{source}_of_{role}_bytes")


MEMORY_TABLES: tuple[Table, ...] = (
    Table(
        "memory",
        "Peak memory",
        "GiB as the allocator counts it; on a CPU the process's resident set, which includes the"
        " interpreter and libraries and is an upper bound of what the tensors take. The first step"
        " has no optimizer state yet; steady state is what training needs.",
        CellRows(
            (
                ("first step", peak_gib("first_")),
                ("forward", peak_gib("forward_")),
                ("backward", peak_gib("backward_")),
                ("optimizer step", peak_gib("optimizer_")),
                ("peak", peak_gib()),
                ("predicted", gib_predicted("predicted_peak_allocated_bytes")),
                col("peak_reserved_bytes", "peak reserved"),
            )
        ),
        _with_peaks,
        first=("first step", "peak", "peak reserved", "predicted"),
        is_default=True,
    ),
    Table(
        "memory-prediction",
        "Predicted and measured memory",
        "Peaks in GiB, as the allocator counts them: predicted without a GPU, then measured."
        " `tracked`: every storage was followed; `modelled`: all but those inside of fused kernels;"
        " `as eager`: compiled code may need less.",
        PhaseRows(
            (
                *((f"first_{phase}", f"first {phase}") for phase in _PHASES),
                *((phase, phase) for phase in _PHASES),
            ),
            (
                (
                    "predicted GiB",
                    lambda phase: gib_predicted(f"predicted_{phase}_peak_allocated_bytes"),
                ),
                ("measured GiB", lambda phase: gib(f"{phase}_peak_allocated_bytes")),
                ("ratio", lambda phase: _prediction_ratio(f"{phase}_peak_allocated_bytes")),
                (
                    "predicted reserved",
                    lambda phase: gib_predicted(f"predicted_{phase}_peak_reserved_bytes"),
                ),
                ("measured reserved", lambda phase: gib(f"{phase}_peak_reserved_bytes")),
                ("reserved ratio", lambda phase: _prediction_ratio(f"{phase}_peak_reserved_bytes")),
                ("how", lambda phase: predicted("predicted_how", Entry)),
            ),
            ("predicted_{}_peak_allocated_bytes",),
        ),
        having("predicted_peak_allocated_bytes"),
    ),
    Table(
        "memory-parts",
        "Parts of the predicted peak",
        "GiB at the moment of the steady peak, predicted by running the model without a GPU, and by"
        " formula. Slack: how much larger the allocator's blocks are than what was requested."
        " N parameters, A bytes of activations: the formula is the largest of 12 N + A + 2·4·BSV,"
        " 16 N + A/L and 16 N + T. It is for fp32 with naive attention. At least: what the"
        " parameters of a model need that cannot run without data.",
        PhaseRows(
            (("predicted", "prediction"), ("closed_form", "formula")),
            (
                *((role.replace("_", " "), _of_role(role)) for role in _PREDICTED_ROLES),
                ("at least", lambda source: gib_predicted("at_least_bytes")),
                ("in all", lambda source: gib_predicted(_WHOLE[source])),
                ("measured", lambda source: gib("peak_allocated_bytes")),
                ("ratio", lambda source: ratio(_WHOLE[source], "peak_allocated_bytes", ".4f")),
            ),
            ("{}_of_parameters_bytes",),
            "source",
        ),
        having("predicted_of_parameters_bytes", "closed_form_of_parameters_bytes"),
        first=("in all", "measured", "parameters", "gradients", "optimizer state", "activations"),
        is_default=True,
    ),
    Table(
        "saved-tensors",
        "Tensors that a block saves for the backward pass",
        "MiB of one block, each storage once; the five operations that save most, by the part of"
        " the block and the node of the graph; and what the block passes on to the next one."
        " Compiled code is predicted as if it were eager, and is not examined.",
        PhaseRows(
            (
                ("saved_block", "one block"),
                *((f"saved_{rank}", f"{rank}.") for rank in SAVED_RANKS),
                ("residual_stream", "residual stream"),
            ),
            (
                ("saved by", saving_operation),
                ("predicted MiB", saved_mib_predicted),
                ("measured MiB", lambda stem: mib_measured(f"{stem}_bytes")),
                ("of the block", share_of_block),
            ),
            ("{}_bytes", "predicted_{}_bytes"),
            "what",
        ),
        both(of_task("train_step"), having("saved_block_bytes", "predicted_saved_block_bytes")),
    ),
    Table(
        "oom-map",
        "Out-of-memory map",
        "Peak memory reserved and the smallest GPU that has this memory, with room for its CUDA"
        " context, and that precision; or OOM, with the size of the refused allocation. Then the"
        " predicted reserved memory, and whether it would fit.",
        ContextColumns(memory_need),
        of_task("train_step"),
        is_default=True,
    ),
)
