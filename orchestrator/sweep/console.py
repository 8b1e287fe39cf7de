"""The output of a sweep: a live display on a terminal, plain lines in a pipe or a file.

If the reader of the output ends, as in `| head`, the sweep continues without output, because its
purpose is the rows that it stores.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import click
import rich.console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from orchestrator.common.text import end_location, failure_reason, format_seconds
from orchestrator.execution.events import AttemptStarted
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_STYLES = {Status.OK: "green", Status.OOM: "yellow", Status.SKIPPED: "dim"}

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


class SweepConsole:
    """Prints to the standard output. label: names a cell in a line."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._console = _RichConsole()

    def notify(self, message: str) -> None:
        """Print one line."""
        say(message)

    def open_display(self, total: int, remaining_s: RemainingTime) -> Display:
        """Return a live display on a terminal, otherwise one that prints lines."""
        if self._console.is_terminal:
            return LiveDisplay(total, remaining_s, self._label, self._console)
        return PlainDisplay(total, self._label, self._console)


class PlainDisplay:
    """Prints a line when a cell starts and when it ends, for logs."""

    def __init__(self, total: int, label: Label, console: rich.console.Console) -> None:
        self._total = total
        self._label = label
        self._console = console
        self._finished = 0

    def started(self, started: AttemptStarted) -> None:
        """Print which cell starts."""
        self._print(f"start   {_running_line(started, self._label)}")

    def finished(self, outcome: Outcome) -> None:
        """Print how a cell ended, and how many have."""
        self._finished += 1
        self._print(f"[{self._finished}/{self._total}] {_result_line(outcome, self._label)}")

    def close(self) -> None:
        """Do nothing: every line is printed already."""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Prints a line when a cell ends, and below these lines which cells run and what is left."""

    def __init__(
        self,
        total: int,
        remaining_s: RemainingTime,
        label: Label,
        console: rich.console.Console,
    ) -> None:
        self._total = total
        self._remaining_s = remaining_s
        self._label = label
        self._console = console
        self._started_s = time.monotonic()
        self._running: dict[str, AttemptStarted] = {}
        self._counts: Counter[Status] = Counter()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)
        self._live.start()

    def started(self, started: AttemptStarted) -> None:
        """Show a cell among those that run."""
        self._running[started.attempt.cell.id] = started

    def finished(self, outcome: Outcome) -> None:
        """Print how a cell ended."""
        self._running.pop(outcome.attempt.cell.id, None)
        self._counts[outcome.status] += 1
        style = _STYLES.get(outcome.status, "red")
        line = escape(_result_line(outcome, self._label))
        self._console.print(f"[{style}]{line}[/]", highlight=False)

    def close(self) -> None:
        """End the thread that draws the display."""
        self._live.stop()

    def _render(self) -> Text:
        # A thread of the display calls this, so that what changes is copied first.
        counts, running = dict(self._counts), list(self._running.values())
        finished, total = sum(counts.values()), self._total
        now, remaining_s = time.monotonic(), self._remaining_s()
        parts = [f"{finished}/{total} done", *(f"{status} {n}" for status, n in counts.items())]
        parts += [f"left {total - finished - len(running)}"]
        parts += [f"after {format_seconds(now - self._started_s)}"]
        if remaining_s is not None:
            parts[-1] += f", about {format_seconds(remaining_s)} to go"
        lines = ["  ".join(parts)]
        for started in running:
            elapsed = format_seconds(now - started.at_s)
            lines.append(f"  {elapsed} {_running_line(started, self._label)}")
        return Text("\n".join(lines))


def say(line: str) -> None:
    """Print a line, unless the reader of the output has ended."""
    try:
        click.echo(line)
    except BrokenPipeError:
        _continue_unread()


def drop_output(stream: Any) -> None:
    """Redirect what is still printed to a stream to /dev/null."""
    # Python flushes the stream when it exits, which would fail with a traceback otherwise.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class _RichConsole(rich.console.Console):
    def on_broken_pipe(self) -> None:
        _continue_unread()  # Rich would exit


def _continue_unread() -> None:
    drop_output(sys.stdout)
    try:
        click.echo(
            "sweep: the output is closed; the sweep continues without it,"
            " and `sweep status` shows its progress",
            err=True,
        )
    except BrokenPipeError:
        drop_output(sys.stderr)


def _running_line(started: AttemptStarted, label: Label) -> str:
    line = label(started.attempt.cell)
    return f"{line}  on GPU {started.gpu} of {started.host}" if started.gpu else line


def _result_line(outcome: Outcome, label: Label) -> str:
    """Return the status, label, step time, duration and reason of a failure in one line."""
    line = f"{outcome.status:<8} {label(outcome.attempt.cell)}"
    # Steps without a synchronisation between them are what training takes.
    steps_ms = _step_durations_ms(outcome, "pipelined") or _step_durations_ms(outcome, "synced")
    if steps_ms:
        line += f"  step {statistics.median(steps_ms):.2f} ms"
    line += f"  {outcome.wall_s:.1f} s"
    if outcome.stage:
        line += f" in {end_location(outcome.stage, outcome.phase)}"
    reason = failure_reason(outcome.evidence)
    return line if outcome.status is Status.OK or not reason else f"{line}: {reason}"


def _step_durations_ms(outcome: Outcome, mode: str) -> list[float]:
    return [
        sample.value
        for sample in outcome.samples
        if (sample.phase, sample.metric, sample.mode) == ("step", "duration", mode) and sample.value
    ]
