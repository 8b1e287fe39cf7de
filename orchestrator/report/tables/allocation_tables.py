"""The tables of what memory is made of, as data."""

from __future__ import annotations

from orchestrator.report.tables.allocation_layouts import (
    Composition,
    LargestByRole,
    PredictedRoles,
    TopAllocations,
)
from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.formatters import gib, number, over, where_known
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

_TOP = 10

ALLOCATION_TABLES: tuple[Table, ...] = (
    Table(
        "composition",
        "What the peak is made of",
        "GiB at the moment of a steady step at which most is live, or when memory ran out, by role; what the forward pass made "
        "and kept to its end is an activation, by the part of the model that made it. `slack` is by how much the allocator's "
        "blocks are larger than what was asked of them; nobody knows what `unlabelled` is for.",
        Composition(),
    ),
    Table(
        "largest-allocations",
        "The largest allocation of each role",
        "MiB, how many are as large, the phase that made it and the call chain, the innermost first. The backward pass runs "
        "on a thread without Python: there it is the part that tells.",
        LargestByRole(),
    ),
    Table(
        "top-allocations",
        "What takes most of the peak",
        "Allocations alike in role, part, place in the code and size, taken together; columns as in `largest-allocations`.",
        TopAllocations(_TOP),
    ),
    Table(
        "composition-predicted",
        "What the peak is made of: predicted against measured",
        "GiB by role at the steady peak, predicted without a GPU and then measured, and by how much of the whole peak the "
        "prediction is off. Activations are all of them, attention's squares included; buffers count among the inputs.",
        PredictedRoles(),
        having("predicted_of_parameters_bytes"),
    ),
    Table(
        "snapshots",
        "How much of the peak the record explains",
        "The peaks of the recorded step in GiB, as the allocator counts them; replayed: what its record adds up to, which is "
        "what was asked of it. Unlabelled: the share of the peak of which nobody knows what it is for. Wrapped: the record was "
        "too short for the step.",
        CellRows(
            (
                ("allocated", gib("snapshot_peak_allocated_bytes")),
                ("requested", gib("snapshot_peak_requested_bytes")),
                ("replayed", gib("snapshot_replayed_peak_bytes")),
                (
                    "replayed / requested",
                    over("snapshot_replayed_peak_bytes", "snapshot_peak_requested_bytes"),
                ),
                ("reserved", gib("snapshot_peak_reserved_bytes")),
                ("unlabelled", number("snapshot_unlabelled_share", ".2%")),
                ("events", number("snapshot_events", ".0f")),
                (
                    "wrapped",
                    where_known(
                        "snapshot_wrapped", lambda row: "yes" if row["snapshot_wrapped"] else "no"
                    ),
                ),
            )
        ),
        having("snapshot_peak_allocated_bytes"),
    ),
)
