"""The output of a sweep: a live display on a terminal, plain lines in a pipe or a file.

See `common.output` for a reader that ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import rich.console
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.common.output import continue_unread, say
from orchestrator.common.text import end_location, failure_reason, format_seconds
from orchestrator.execution.events import AttemptStarted
from orchestrator.execution.rank_group import step_ms
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

# Statuses that are results; a line about any other one stays on the screen.
_EXPECTED = {Status.OK, Status.OOM, Status.OOM_INFERRED, Status.SKIPPED}
_MOST_FAILURE_LINES = 20
_MOST_RUNNING_LINES = 8  # a host has up to 8 GPUs

Label = Callable[[Cell], str]  # a short name of a cell
RemainingTime = Callable[[], float | None]  # seconds until the last attempt ends, if known


class Display(Protocol):
    """Shows the progress of a sweep."""

    def started(self, started: AttemptStarted) -> None:
        """Show that an attempt runs."""
        ...

    def finished(self, outcome: Outcome) -> None:
        """Show how an attempt ended."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


class Console(Protocol):
    """Prints the messages and the progress of a sweep."""

    def notify(self, message: str) -> None:
        """Print one line."""
        ...

    def open_display(self, total: int, remaining_s: RemainingTime) -> Display:
        """Return a display of this number of attempts."""
        ...


@dataclass(frozen=True)
class SweepConsole:
    """Prints to the standard output. label: names a cell in a line."""

    label: Label

    notify = staticmethod(say)

    def open_display(self, total: int, remaining_s: RemainingTime) -> Display:
        """Return a live display on a terminal, otherwise one that prints lines."""
        console = _RichConsole()
        if console.is_terminal:
            return LiveDisplay(total, remaining_s, self.label, console)
        return PlainDisplay(total, self.label, console)


@dataclass
class PlainDisplay:
    """Prints a line when a cell ends, for logs."""

    total: int
    label: Label
    console: rich.console.Console
    count: int = 0  # of the cells that have ended

    def started(self, started: AttemptStarted) -> None:
        """Do nothing: a log has one line per cell."""

    def finished(self, outcome: Outcome) -> None:
        """Print how a cell ended, and how many have."""
        self.count += 1
        line = f"[{self.count}/{self.total}] {_result_line(outcome, self.label)}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: every line is printed already."""


class LiveDisplay:
    """Shows in a few lines that stay in place a progress bar, the cells that run and the last one.

    The first cells that failed are printed above these lines, and their number at the end.
    """

    def __init__(
        self, total: int, remaining_s: RemainingTime, label: Label, console: rich.console.Console
    ) -> None:
        self._total = total
        self._remaining_s = remaining_s
        self._label = label
        self._console = console
        self._started_s = time.monotonic()
        # By cell and number of the attempt: repetitions may run at the same time.
        self._running: dict[tuple[str, int], AttemptStarted] = {}
        self._counts: Counter[Status] = Counter()
        self._last = ""
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)
        self._live.start()

    def started(self, started: AttemptStarted) -> None:
        """Show a cell among those that run."""
        attempt = started.attempt
        self._running[attempt.cell.id, attempt.number] = started

    def finished(self, outcome: Outcome) -> None:
        """Show how a cell ended; the line of a failure stays."""
        attempt = outcome.attempt
        self._running.pop((attempt.cell.id, attempt.number), None)
        self._counts[outcome.status] += 1
        self._last = _result_line(outcome, self._label)
        if outcome.status not in _EXPECTED and self._failures() <= _MOST_FAILURE_LINES:
            self._console.print(Text(self._last, style="red"), soft_wrap=True)

    def close(self) -> None:
        """End the thread that draws the display."""
        self._live.stop()
        hidden = self._failures() - _MOST_FAILURE_LINES
        if hidden > 0:
            self._console.print(f"{hidden} more failed", style="red", highlight=False)

    def _failures(self) -> int:
        return sum(count for status, count in self._counts.items() if status not in _EXPECTED)

    def _render(self) -> Group:
        # A thread of the display calls this, so that what changes is copied first.
        counts, running = dict(self._counts), list(self._running.values())
        finished = sum(counts.values())
        now, remaining_s = time.monotonic(), self._remaining_s()
        parts = [f"{finished}/{self._total}"]
        for status, count in counts.items():
            parts.append(f"{count} {_words(status)}")
        parts.append(format_seconds(now - self._started_s))
        if remaining_s is not None:
            parts[-1] += f", about {format_seconds(remaining_s)} left"
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(max(self._total, 1), finished, width=30), Text(" · ".join(parts)))
        lines = []
        for one in running[:_MOST_RUNNING_LINES]:
            label, time_s = self._label(one.attempt.cell), now - one.at_s
            lines.append(f"{_device(one)}  {label}  {format_seconds(time_s)}")
        if len(running) > _MOST_RUNNING_LINES:
            lines.append(f"{len(running) - _MOST_RUNNING_LINES} more run")
        if self._last:
            lines.append(f"last   {self._last}")
        # A line that wrapped would make the display jump with every cell.
        cut = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(bar, *cut)


class _RichConsole(rich.console.Console):
    def on_broken_pipe(self) -> None:
        continue_unread()  # Rich would exit


def _device(started: AttemptStarted) -> str:
    if not started.gpu:
        return "CPU  "
    if started.node:
        return f"GPU {started.gpu} of {started.host}"
    return f"GPU {started.gpu}"


def _words(status: Status) -> str:
    if status is Status.OK:
        return "measured"
    return status.replace("_", " ")


def _result_line(outcome: Outcome, label: Label) -> str:
    """Return the status, label, step time, duration and reason of a failure in one line."""
    line = f"{outcome.status:<8} {label(outcome.attempt.cell)}"
    if found_ms := step_ms(outcome.samples):
        line += f"  step {found_ms:.2f} ms"
    line += f"  {outcome.wall_s:.1f} s"
    if outcome.stage:
        line += f" in {end_location(outcome.stage, outcome.phase)}"
    if outcome.status is not Status.OK and (reason := failure_reason(outcome.evidence)):
        line += f": {reason}"
    return line
