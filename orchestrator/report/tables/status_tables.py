"""Tables about the measuring itself: time spent, and failed cells."""

from __future__ import annotations

from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.formatters import end_location, failure_reason, number, text
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

TIME_SPENT = Table(
    "time-spent",
    "Time spent measuring",
    "Seconds of an attempt: starting and ending its process, building (device included), compiling"
    " and warming up, timed steps, and all other instruments.",
    CellRows(
        (
            ("all", number("wall_s", ".2f")),
            ("process", number("time_process_s", ".2f")),
            ("build", number("time_build_s", ".2f")),
            ("warm-up", number("time_warm_up_s", ".2f")),
            ("timed steps", number("time_timing_s", ".2f")),
            ("instruments", number("time_instruments_s", ".2f")),
        )
    ),
    having("time_process_s"),
)

FAILURES = Table(
    "failures",
    "Cells without a result",
    "`sweep show` prints everything that is known about a cell.",
    CellRows(
        (
            ("cell", text("cell")),
            ("status", text("status")),
            ("where", end_location),
            ("why", failure_reason),
        )
    ),
    lambda cells: cells[cells["status"] != "ok"],
    first=("status", "where", "why"),
    is_default=True,
)
