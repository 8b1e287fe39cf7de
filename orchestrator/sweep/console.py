"""What a person sees while a sweep runs: a live line on a terminal, plain lines elsewhere.

Where nobody reads it any more, as after `| head` or where a `tee` was killed, the sweep goes on: its rows are what it is for.
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
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from orchestrator.common.text import end_location, failure_reason, format_seconds
from orchestrator.execution.events import AttemptStarted
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_STYLES = {Status.OK: "green", Status.OOM: "yellow", Status.SKIPPED: "dim"}

Remaining = Callable[[], float | None]
Label = Callable[[Cell], str]  # what a cell is called


def say(line: str) -> None:
    try:
        click.echo(line)
    except BrokenPipeError:
        _go_on_unread()


class SweepConsole(Console):
    def on_broken_pipe(self) -> None:  # Rich would exit
        _go_on_unread()


def _go_on_unread() -> None:
    drop_output(sys.stdout)
    try:
        click.echo(
            "sweep: its output is not read any more: it goes on without, and `sweep status` says how far it is",
            err=True,
        )
    except BrokenPipeError:
        drop_output(sys.stderr)


def drop_output(stream: Any) -> None:
    """What is still to be printed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Display(Protocol):
    def started(self, started: AttemptStarted) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """One line as each cell begins and ends: for logs."""

    def __init__(self, total: int, label: Label, console: Console) -> None:
        self._total = total
        self._label = label
        self._done = 0
        self._console = console

    def started(self, started: AttemptStarted) -> None:
        self._print(f"start   {self._label(started.attempt.cell)}{_place(started)}")

    def finished(self, outcome: Outcome) -> None:
        self._done += 1
        self._print(f"[{self._done}/{self._total}] {_result_line(outcome, self._label)}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A line for each cell that ended, and below them what runs where, how many are left, and for how long."""

    def __init__(self, total: int, label: Label, console: Console, remaining: Remaining) -> None:
        self._total = total
        self._label = label
        self._console = console
        self._remaining = remaining
        self._began = time.monotonic()
        self._running: dict[str, AttemptStarted] = {}
        self._ended: Counter[Status] = Counter()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=1)
        self._live.start()

    def started(self, started: AttemptStarted) -> None:
        self._running[started.attempt.cell.id] = started

    def finished(self, outcome: Outcome) -> None:
        self._running.pop(outcome.attempt.cell.id, None)
        self._ended[outcome.status] += 1
        style = _STYLES.get(outcome.status, "red")
        self._console.print(
            f"[{style}]{escape(_result_line(outcome, self._label))}[/]", highlight=False
        )

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Text:
        ended, running = (
            dict(self._ended),
            list(self._running.values()),
        )  # the display has a thread of its own
        done, counts = (
            sum(ended.values()),
            "  ".join(f"{status} {count}" for status, count in ended.items()),
        )
        left = self._remaining()
        to_go = f", about {format_seconds(left)} to go" if left is not None else ""
        lines = [
            f"{done}/{self._total} done  {counts}  left {self._total - done - len(running)}"
            f"  after {format_seconds(time.monotonic() - self._began)}{to_go}"
        ]
        for started in running:
            label = self._label(started.attempt.cell)
            lines.append(
                f"  {format_seconds(time.monotonic() - started.at_s)} {label}{_place(started)}"
            )
        return Text("\n".join(lines))


def make_display(total: int, label: Label, console: Console, remaining: Remaining) -> Display:
    live = console.is_terminal
    return (
        LiveDisplay(total, label, console, remaining)
        if live
        else PlainDisplay(total, label, console)
    )


def _place(started: AttemptStarted) -> str:
    return f"  on GPU {started.gpu} of {started.host}" if started.gpu else ""


def _result_line(outcome: Outcome, label: Label) -> str:
    whole = [
        s
        for s in outcome.samples
        if (s.phase, s.metric) == ("step", "duration") and s.value is not None
    ]
    by_mode = {
        mode: [s.value for s in whole if s.mode == mode and s.value]
        for mode in ("pipelined", "synced")
    }
    steps = by_mode["pipelined"] or by_mode["synced"]
    measured = f"  step {statistics.median(steps):.2f} ms" if steps else ""
    where = f" in {end_location(outcome.stage, outcome.phase)}" if outcome.stage else ""
    why = failure_reason(outcome.evidence)
    said = f": {why}" if why and outcome.status is not Status.OK else ""
    return f"{outcome.status:<8} {label(outcome.attempt.cell)}{measured}  {outcome.wall_s:.1f} s{where}{said}"
