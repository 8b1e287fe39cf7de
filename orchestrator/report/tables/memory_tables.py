"""Tables of memory by phase and by part: measured, predicted without a GPU, and by formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pandas as pd

from orchestrator.report.tables import formatters as show
from orchestrator.report.tables.allocation_layouts import (
    TopAllocations,
    WithMeasuredParts,
    composition,
)
from orchestrator.report.tables.cell_filters import both, having, of_task
from orchestrator.report.tables.entries import Entry
from orchestrator.report.tables.formatters import Value
from orchestrator.report.tables.layouts import CellRows, ContextColumns, PhaseRows
from orchestrator.report.tables.table import Table
from tasks.spec.status import OUT_OF_MEMORY

_PHASES = ("forward", "backward", "optimizer")
_TOP = 10
_ROLES = (
    "parameters", "gradients", "optimizer_state", "activations", "attention_squares",
    "autocast_weight_copies", "temporary", "workspace", "slack", "inputs", "unlabelled",
)  # fmt: skip
_WHOLE = {
    "measured": "peak_allocated_bytes",
    "predicted": "predicted_peak_allocated_bytes",
    "closed_form": "closed_form_bytes",
}


def _with_peaks(cells: pd.DataFrame) -> pd.DataFrame:
    """Return all cells of a run that measured memory: a cell that failed shows its status."""
    columns = {"peak_allocated_bytes", "peak_rss_bytes", "predicted_peak_allocated_bytes"}
    return cells if columns & set(cells) else cells.iloc[:0]


def _with_memory_needs(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the training steps, unless all that is known is that they failed."""
    steps = of_task("train_step")(cells)
    columns = ("peak_reserved_bytes", "peak_rss_bytes", "predicted_peak_reserved_bytes")
    is_known = len(having(*columns)(steps)) or steps["status"].isin(OUT_OF_MEMORY).any()
    return steps if is_known else steps.iloc[:0]


def _prediction_ratio(column: str) -> Value:
    return show.ratio(f"predicted_{column}", column, ".4f")


def _of_role(role: str) -> Callable[[str], Value]:
    return lambda source: show.gib_predicted(f"{source}_of_{role}_bytes")


def _predictions_of_phases() -> Iterator[tuple[str, Value]]:
    """Yield columns for each phase of the first and of a steady step: predicted, and the ratio."""
    for phase in (*(f"first_{phase}" for phase in _PHASES), *_PHASES):
        name, column = phase.replace("_", " "), f"{phase}_peak_allocated_bytes"
        if phase != name:
            yield name, show.gib(column)
        yield f"{name} predicted", show.gib_predicted(f"predicted_{column}")
        yield f"{name} ratio", _prediction_ratio(column)
        reserved = f"{phase}_peak_reserved_bytes"
        yield f"{name} reserved", show.gib(reserved)
        yield f"{name} reserved predicted", show.gib_predicted(f"predicted_{reserved}")
        yield f"{name} reserved ratio", _prediction_ratio(reserved)


MEMORY_TABLES: tuple[Table, ...] = (
    Table(
        "memory",
        "Peak memory",
        "GiB as the allocator counts it; on a CPU the process's resident set, which includes the"
        " interpreter and libraries and is an upper bound of what the tensors take. The first step"
        " has no optimizer state yet; steady state is what training needs. Predicted without a GPU;"
        " ratio: predicted over measured. `tracked`: every storage was followed; `modelled`: all but"
        " those inside of fused kernels; `compiled`: every storage of the generated code; `as blocks`:"
        " that of compiled blocks, for a model that is compiled as a whole; `as eager`: compiled"
        " code usually needs less, unless it may take more.",
        CellRows(
            (
                ("first step", show.peak_gib("first_")),
                ("peak", show.peak_gib()),
                ("predicted", show.gib_predicted("predicted_peak_allocated_bytes")),
                ("ratio", _prediction_ratio("peak_allocated_bytes")),
                show.col("peak_reserved_bytes", "peak reserved"),
                ("formula", show.gib_predicted("closed_form_bytes")),
                ("forward", show.peak_gib("forward_")),
                ("backward", show.peak_gib("backward_")),
                ("optimizer step", show.peak_gib("optimizer_")),
                ("how", show.predicted("predicted_how", lambda how: Entry(str(how)))),
                *_predictions_of_phases(),
            )
        ),
        _with_peaks,
        is_default=True,
    ),
    Table(
        "memory-parts",
        "Parts of the peak",
        "GiB at the moment of the steady peak: measured where allocations were recorded, predicted"
        " by running the model without a GPU, and by formula. Slack: how much larger the"
        " allocator's blocks are than what was requested. Measured activations include the squares"
        " of attention. N parameters, A bytes of activations: the formula is the largest of 12 N + A + 2·4·BSV,"
        " 16 N + A/L and 16 N + T. It is for fp32 with naive attention. At least: what the"
        " parameters of a model need that cannot run without data.",
        WithMeasuredParts(
            PhaseRows(
                (("measured", "measured"), ("predicted", "predicted"), ("closed_form", "formula")),
                (
                    ("in all", lambda source: show.gib_predicted(_WHOLE[source])),
                    *((role.replace("_", " "), _of_role(role)) for role in _ROLES),
                    ("at least", lambda source: show.gib_predicted("at_least_bytes")),
                    ("peak", lambda source: show.gib("peak_allocated_bytes")),
                    ("ratio", lambda source: show.ratio(_WHOLE[source], _WHOLE["measured"], ".4f")),
                ),
                ("{}_of_parameters_bytes",),
                "source",
            )
        ),
        having(
            "predicted_of_parameters_bytes",
            "closed_form_of_parameters_bytes",
            "snapshot_peak_allocated_bytes",
        ),
        is_default=True,
    ),
    Table(
        "composition",
        "Parts of the recorded peak, by part of the model",
        "GiB by role at the moment of a steady step with the most live memory, or when memory ran"
        " out. An activation was made in the forward pass and lived until its end; the part of the"
        " model that made it has a row. Slack: how much larger the allocator's blocks are than what"
        " was requested. Unlabelled: of unknown use.",
        composition,
    ),
    Table(
        "allocations",
        "Largest allocations at the peak",
        "The allocations that take most, and the largest one of each role. A row stands for"
        " allocations of the same role, part, place in the code and size, with the phase that made"
        " them and the call chain, the innermost call first. The backward pass runs on a thread"
        " without Python frames: its chain is that of its module's forward pass. Slack is in the"
        " order too.",
        TopAllocations(_TOP),
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
                *((f"saved_{rank}", f"{rank}.") for rank in show.SAVED_RANKS),
                ("residual_stream", "residual stream"),
            ),
            (
                ("saved by", show.saving_operation),
                ("predicted MiB", show.saved_mib_predicted),
                ("measured MiB", lambda stem: show.mib_measured(f"{stem}_bytes")),
                ("of the block", show.share_of_block),
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
        ContextColumns(show.memory_need),
        _with_memory_needs,
        is_default=True,
    ),
)
