"""The display of a sweep that runs."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from orchestrator.execution.events import AttemptStarted
from orchestrator.sweep.console import LiveDisplay, PlainDisplay
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.registry import make_cell
from tasks.spec.status import Status


def cell_of(context_length: int) -> Cell:
    return make_cell("train_step", {"size": "tiny", "context_length": context_length})


def outcome_of(context_length: int, status: Status, message: str = "") -> Outcome:
    attempt = Attempt(cell_of(context_length), 1, "", Settings())
    evidence = {"message": message} if message else {}
    return Outcome(
        attempt, status, "build", "", evidence, {}, samples=(), started_at=1.7e9, wall_s=2.5
    )


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def rendered(display: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(display._render())
    return printed(console)


def test_the_live_lines_hold_the_counts_the_running_cells_and_the_last_one() -> None:
    display = LiveDisplay(4, lambda: 40.0, lambda cell: cell.id, terminal())
    try:
        running = Attempt(cell_of(256), 1, "", Settings())
        display.started(AttemptStarted(running, "host", "1", 0.0))
        display.finished(outcome_of(128, Status.OK))
        display.finished(outcome_of(512, Status.OOM))
        first, second, last = rendered(display).splitlines()
    finally:
        display.close()
    assert "2/4 · 1 measured · 1 oom · 0 s, about 40 s left" in first
    assert second.startswith(f"GPU 1  {running.cell.id}")
    assert last.startswith(f"last   oom      {cell_of(512).id}")


def test_repetitions_of_a_cell_that_run_at_the_same_time_have_a_line_each() -> None:
    display = LiveDisplay(2, lambda: None, lambda cell: cell.id, terminal())
    first, second = (Attempt(cell_of(128), number, "", Settings()) for number in (1, 2))
    try:
        for gpu, attempt in enumerate((first, second)):
            display.started(AttemptStarted(attempt, "host", str(gpu), 0.0))
        assert len(rendered(display).splitlines()) == 3
        display.finished(replace(outcome_of(128, Status.OK), attempt=first))
        assert rendered(display).splitlines()[1].startswith("GPU 1 ")
    finally:
        display.close()


def test_a_line_of_the_display_never_wraps_so_that_it_stays_in_place() -> None:
    display = LiveDisplay(4, lambda: None, lambda cell: "a long label " * 20, terminal())
    try:
        display.finished(outcome_of(128, Status.OK))
        assert len(rendered(display).splitlines()) == 2
    finally:
        display.close()


def test_only_failures_stay_on_the_screen_and_from_the_21st_on_they_are_counted() -> None:
    console = terminal()
    display = LiveDisplay(30, lambda: None, lambda cell: cell.id, console)
    for number in range(25):
        failed = outcome_of(16 * (number + 1), Status.FAILED, f"reason {number}.")
        display.finished(failed)
    display.finished(outcome_of(4096, Status.OOM))
    display.close()
    lines = printed(console)
    assert "reason 19." in lines
    assert "5 more failed" in lines
    assert lines.count("\x1b[2Kfailed ") + lines.startswith("\x1b[?25lfailed ") == 20


def test_a_log_has_one_line_per_cell() -> None:
    console = Console(file=io.StringIO(), width=80)
    display = PlainDisplay(2, lambda cell: cell.id, console)
    done = outcome_of(128, Status.OK)
    display.started(AttemptStarted(done.attempt, "host", "", 0.0))
    display.finished(done)
    display.finished(replace(done, status=Status.TIMEOUT))
    assert [line[:16] for line in printed(console).splitlines()] == [
        "[1/2] ok       " + done.attempt.cell.id[0],
        "[2/2] timeout  " + done.attempt.cell.id[0],
    ]
