"""Tables of the allocations that were live at the peak, or when memory ran out."""

from __future__ import annotations

from orchestrator.report.tables.allocation_layouts import (
    Composition,
    PredictedRoles,
    TopAllocations,
)
from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.table import Table

_TOP = 10

ALLOCATION_TABLES: tuple[Table, ...] = (
    Table(
        "composition",
        "Parts of the peak",
        "GiB by role at the moment of a steady step with the most live memory, or when memory ran"
        " out. An activation was made in the forward pass and lived until its end; the part of the"
        " model that made it has a row. Slack: how much larger the allocator's blocks are than what"
        " was requested. Unlabelled: of unknown use.",
        Composition(),
        first=("GiB", "share"),
    ),
    Table(
        "top-allocations",
        "Largest allocations at the peak",
        "The allocations that take most, and the largest one of each role. A row stands for"
        " allocations of the same role, part, place in the code and size, with the phase that made"
        " them and the call chain, the innermost call first. The backward pass runs on a thread"
        " without Python frames: its chain is that of its module's forward pass. Slack is in the"
        " order too.",
        TopAllocations(_TOP),
        first=("GiB", "share", "role", "part", "made in"),
    ),
    Table(
        "composition-predicted",
        "Parts of the peak: predicted and measured",
        "GiB by role at the steady peak, predicted without a GPU and then measured, and the error"
        " as a share of the whole peak. Activations include the squares of attention; buffers count"
        " as inputs.",
        PredictedRoles(),
        having("predicted_of_parameters_bytes"),
    ),
)
