"""Text and exit code at the end of a sweep."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from orchestrator.common.errors import (
    EXIT_FAILURES,
    EXIT_INTERRUPTED,
    EXIT_TIME_LIMIT,
)

FLAW_NOTES = {
    "cpu-contended": "depend on the CPU and were timed while other processes used it. "
    "--retry cpu-contended measures them again",
    "interval-wide": "have a median whose interval is wider than 5 %. "
    "--retry interval-wide measures them again",
}


def conclude(summary: Any, request: Any) -> None:
    """What came of a run, what to do next, and the exit code."""
    from orchestrator.common.text import cell_count, format_seconds
    from orchestrator.sweep.console import say

    folder, again = shlex.quote(str(request.run)), shlex.join(["sweep", *sys.argv[1:]])
    if summary.recovered:
        say(f"kept {cell_count(summary.recovered)}, finished by an earlier run that was killed")
    counts = ", ".join(f"{count} {status}" for status, count in summary.measured.items())
    if summary.foreseen:
        say(f"left out {cell_count(summary.foreseen)}, predicted to run out of memory")
    inferred = (
        f"; inferred that {summary.inferred} more run out of memory" if summary.inferred else ""
    )
    times = summary.measured.total()
    often = f", {times} times in all" if times > summary.cells else ""
    if (
        any(summary.statuses.values())
        or summary.stopped
        or summary.late
        or summary.broken
        or not summary.before
    ):
        say(
            f"measured {cell_count(summary.cells)}{often}{f': {counts}' if counts else ''}{inferred}; kept in {folder}"
        )
    else:
        before = ", ".join(f"{count} {status}" for status, count in sorted(summary.before.items()))
        say(
            f"nothing to measure: of {cell_count(sum(summary.before.values()))} {before}; kept in {folder}"
        )
    if summary.refuted:
        cells = ", ".join(request.expansion.label(cell) for cell in summary.refuted)
        say(
            f"inferred to run out of memory, and yet they fit: {cells}. Without --infer-oom all of them are measured"
        )
    if summary.broken:
        say(f"{cell_count(summary.left)} left. To go on: {again}")
        raise summary.broken
    if summary.stopped and summary.stopped != "time limit":
        say(f"stopped by {summary.stopped} with {cell_count(summary.left)} left. To go on: {again}")
        sys.exit(EXIT_INTERRUPTED)
    if summary.stopped or summary.late:
        shortest = (
            f", the shortest of which is expected to take {format_seconds(summary.late_s)}"
            if summary.late_s
            else ""
        )
        say(f"out of time with {cell_count(summary.left)} left{shortest}. To go on: {again}")
        if not times:
            say(
                "nothing was measured within that time: where it takes as long to begin again, only a longer one goes on"
            )
        sys.exit(EXIT_TIME_LIMIT)
    for flaw, what in FLAW_NOTES.items():
        if count := summary.flaws[flaw]:
            say(f"{cell_count(count)} {what}")
    if count := summary.flaws["concurrent"]:
        # --fresh: what is measured again replaces these times, and their cells no longer count here.
        say(
            f"{count} CPU-bound {'cell' if count == 1 else 'cells'} ran while other cells used the same host;"
            " their times may be too long. --scheduler serial --fresh measures one cell at a time"
            " (--where selects cells)"
        )
    say(f"the tables: sweep report {folder}")
    if summary.given_up:
        say(f"left alone {cell_count(summary.given_up)} that failed too often before")
    bad = {"failed", "crashed", "timeout", "host_oom", "lost"} & set(summary.statuses)
    if bad or summary.given_up:
        say(f"what went wrong: sweep status {folder}")
    if bad or summary.given_up or summary.refuted:
        sys.exit(EXIT_FAILURES)
