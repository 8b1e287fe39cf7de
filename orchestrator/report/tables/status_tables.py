"""Tables about the measuring itself: how long it took, and what failed."""

from __future__ import annotations

import pandas as pd

from orchestrator.report.tables.cell_filters import having
from orchestrator.report.tables.formatters import end_location, failure_reason, number, text
from orchestrator.report.tables.layouts import CellRows
from orchestrator.report.tables.table import Table

TIME_SPENT = Table(
    "took",
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


def _failed(cells: pd.DataFrame) -> pd.DataFrame:
    return cells[cells["status"] != "ok"]


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
    _failed,
)
