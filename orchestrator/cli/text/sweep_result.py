"""Text and exit code at the end of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.common.errors import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_TIME_LIMIT, EXIT_USER
from orchestrator.common.text import cell_count, format_counts, format_seconds, shell_path

if TYPE_CHECKING:
    from orchestrator.sweep.outcome_log import SweepResult

# What the end of a sweep prints about the cells with each quality flag, and the options that
# measure them again.
_FLAGS = {
    "cpu-contended": (
        "timed while another program used the cores of the host. Once it has ended, measure again",
        "--retry cpu-contended",
    ),
    "interval-wide": (
        "with steps that vary so much that the interval of their median is wider than 5 %."
        " To measure again",
        "--retry interval-wide",
    ),
    "beaten": (
        "timed by `sweep best` until they were surely slower. To measure them as the others",
        "--retry beaten",
    ),
    "concurrent": (
        "CPU-bound while other cells used the same host; the times may be too long."
        " To measure one cell at a time (--where selects cells)",
        # --fresh: what is measured again replaces these times, and they no longer count here.
        "--scheduler serial --fresh",
    ),
}
OUT_OF_MEMORY = ("oom", "oom_inferred")


def conclude(result: SweepResult, command: str, again: str) -> tuple[list[str], int]:
    """Return what to print at the end of a sweep, and the exit code.

    command: the command line that continues the sweep.
    again: the same without its own options that measure cells again.
    """
    lines = _counts(result)
    remaining = result.queue.remaining
    left = f" with {cell_count(remaining)} left" if remaining else ""
    if result.error:
        return [*lines, f"stopped{left}. To continue: {command}"], EXIT_USER
    if result.stop_reason == "time limit" or (result.is_cut_short and not result.stop_reason):
        return [*lines, *_out_of_time(result, left, command)], EXIT_TIME_LIMIT
    if result.stop_reason:
        stopped = f"stopped by {result.stop_reason}{left}. To continue: {command}"
        return [*lines, stopped], EXIT_INTERRUPTED
    folder = shell_path(result.folder)
    for flag, (note, options) in _FLAGS.items():
        if count := result.quality.get(flag):
            lines += [f"{cell_count(count)} {note}: {again} {options}"]
    lines += [f"tables: sweep report {folder}"]
    if result.given_up:
        retry = " ".join(f"--retry {status}" for status in sorted(result.given_up))
        lines += [
            f"skipped {cell_count(sum(result.given_up.values()))}, which failed too often before."
            f" To try again: {again} {retry}"
        ]
    if result.given_up or any(status.is_retried for status in result.counts):
        return [*lines, f"what failed: sweep status {folder}"], EXIT_FAILURES
    return lines, 0


def _counts(result: SweepResult) -> list[str]:
    lines = []
    folder = shell_path(result.folder)
    if result.recovered:
        recovered = cell_count(result.recovered)
        lines += [f"recovered {recovered}, measured by an earlier run that was killed"]
    if result.predicted_oom:
        skipped = cell_count(result.predicted_oom)
        lines += [f"skipped {skipped}, predicted to run out of memory"]
    if not (result.counts or result.is_cut_short) and result.before:
        before = format_counts(sorted(result.before.items()))
        total = cell_count(sum(result.before.values()))
        return [*lines, f"nothing to measure: of {total} {before}; results in {folder}"]
    counts = result.measured_counts
    measured = f"measured {cell_count(len(result.measured))}" if counts else "measured nothing new"
    if sum(counts.values()) > len(result.measured):
        measured += f", {sum(counts.values())} times in all"
    if counts:
        measured += f": {format_counts(counts.items())}"
    if result.queue.inferred:
        measured += f"; inferred that {result.queue.inferred} more run out of memory"
    return [*lines, f"{measured}; results in {folder}"]


def _out_of_time(result: SweepResult, left: str, command: str) -> list[str]:
    out_of_time = f"out of time{left}"
    if result.queue.shortest_skipped_s:
        shortest = format_seconds(result.queue.shortest_skipped_s)
        out_of_time += f"; the shortest is expected to take {shortest}"
    lines = [f"{out_of_time}. To continue: {command}"]
    if not result.measured_counts:
        # A script that repeats the command until its exit code changes would never end.
        lines += [
            "nothing was measured within the time limit: if the next start takes as long,"
            " only a longer limit helps"
        ]
    return lines
