"""State of a queue at its end, for the summary of a sweep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueState:
    """Cells and attempts that a queue has left.

    remaining: cells that were not measured as often as planned. A cell that failed is not among
    them, because it is not repeated.
    skipped_for_time: attempts that would not have ended before the time limit.
    shortest_skipped_s: expected duration of the shortest of these.
    inferred: cells whose OOM was inferred in this run.
    """

    remaining: int = 0
    skipped_for_time: int = 0
    shortest_skipped_s: float | None = None
    inferred: int = 0
