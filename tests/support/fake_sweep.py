"""A sweep without processes: a scheduler that is a function, and a console that prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.cli.text.plan import describe_status
from orchestrator.config.selection import parse_selection
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.host import HostInfo
from orchestrator.planning.cell_decisions import leave_out_wider, plan_request
from orchestrator.planning.invocation import ExecutionOptions, RunOptions
from orchestrator.planning.request import SweepRequest, resolve, resolve_again
from orchestrator.scheduling.scheduler import Queue, Scheduler
from orchestrator.store.cell_state import CellState, StoredAttempt
from orchestrator.store.run import Run
from orchestrator.store.tables import MEASURED_TABLES
from orchestrator.sweep import pipeline
from orchestrator.sweep.console import RemainingTime
from orchestrator.sweep.outcome_log import SweepResult
from orchestrator.sweep.pipeline import Runtime, run_sweep
from tasks.process.journal import FinalStatus, Journal
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, Attempt
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status
from tasks.spec.tables import Sample

CONFIG = """
name: test
limits: {attempts: 2}
grids:
  - task: train_step
    axes: {context_length: [16, 32, 64, 128]}
    fixed: {device: cpu, size: tiny}
"""
CPU = {"torch": "2.13.0", "cpu": "Test", "cores": 2, "python": "3.11"}  # a fingerprint
Measure = Callable[[Attempt], Outcome]


def status_lines(run: Run) -> list[str]:
    """Return the lines of `sweep status`."""
    request = resolve_again(run)
    host_gpus = run.read_manifest().get("host_gpus", [])
    return list(describe_status(request, leave_out_wider(plan_request(request), host_gpus)))


class ListQueue(Queue):
    """Attempts in a list. seconds: what each cell is expected to take."""

    def __init__(self, attempts: Iterable[Attempt], seconds: float | None = None) -> None:
        self._attempts, self._seconds = list(attempts), seconds

    def __iter__(self) -> Iterator[Attempt]:
        while self._attempts:
            yield self._attempts.pop(0)

    def waiting(self) -> Iterator[Cell]:
        return iter([attempt.cell for attempt in self._attempts])

    def take(self, cell: Cell) -> Attempt:
        index = next(index for index, one in enumerate(self._attempts) if one.cell == cell)
        return self._attempts.pop(index)

    def expected_s(self, cell: Cell) -> float | None:
        return self._seconds


class FakeScheduler(Scheduler):
    """Calls a function where another scheduler would start a process."""

    def __init__(self, measure: Measure, fingerprint: Mapping[str, Any] = CPU) -> None:
        self.measure = measure
        self.fingerprint = fingerprint
        self.closed = False
        self.begun: list[Attempt] = []
        self.more: dict[str, list[Mapping[str, Any]]] = {}
        self.kinds: tuple[str, ...] = ()

    def hosts(self) -> Sequence[HostInfo]:
        return [HostInfo(fingerprints={"cpu": [self.fingerprint], **self.more})]

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        return int(gpu_kind is None or gpu_kind in self.kinds)

    def import_ahead(self, attempt: Attempt) -> None: ...

    def run(self, queue: Queue, on_start: Callable[[AttemptStarted], None]) -> Iterator[Outcome]:
        for attempt in queue:
            self.begun.append(attempt)
            on_start(AttemptStarted(attempt, "here", "", time.monotonic()))
            yield self.measure(attempt)

    def close(self) -> None:
        self.closed = True


class SilentDisplay:
    """Shows nothing."""

    def started(self, started: AttemptStarted) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self) -> None: ...


class SilentConsole:
    """Keeps the messages in `messages` and shows nothing else."""

    def __init__(self, messages: list[str] | None = None) -> None:
        self.messages = [] if messages is None else messages

    def notify(self, message: str) -> None:
        self.messages.append(message)

    def open_display(self, total: int, remaining_s: RemainingTime) -> SilentDisplay:
        return SilentDisplay()


def fake_runtime(scheduler: Scheduler, messages: list[str] | None = None) -> Runtime:
    return Runtime(SilentConsole(messages), lambda *example: closing(scheduler))


def request_for(
    config: Any, sets: Sequence[str] = (), wheres: Sequence[str] = (), out: Any = None, **more: Any
) -> SweepRequest:
    """Return the request of a command line with these options."""
    return resolve(config, parse_selection(sets, wheres, **more), out)


def go(
    request: SweepRequest,
    scheduler: Scheduler,
    options: RunOptions | None = None,
    messages: list[str] | None = None,
    summary: bool = False,
    **execution: Any,
) -> SweepResult:
    """Run a sweep on a fake scheduler.

    summary: whether to write cells.parquet and to count flagged cells, which takes longer than all
        else. Without it, `quality` of the result is empty.
    """
    request = replace(
        request,
        options=options or RunOptions(),
        execution=ExecutionOptions(**execution),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not summary:
            patch.setattr(pipeline, "store_cells", lambda writer: {})
        return run_sweep(request, fake_runtime(scheduler, messages))


def outcome_of(attempt: Attempt, status: Status = Status.OK, wall_s: float = 2.0) -> Outcome:
    samples = (Sample("timing", "duration", "ms", 5.0, "synced", "step", 0),)
    measured = samples if status is Status.OK else ()
    return Outcome(attempt, status, "", "", {}, {}, measured, 1.7e9, wall_s)


def state_of(
    statuses: Sequence[Status],
    walls_s: Sequence[float] = (),
    marks: tuple[int, ...] = (),
    flags: Iterable[str] = (),
) -> CellState:
    """Return the state of a cell after these attempts."""
    attempts = []
    for index, status in enumerate(statuses):
        wall_s = walls_s[index] if walls_s else 1.0
        attempts.append(StoredAttempt("cell", index + 1, status, 0, wall_s))
    return CellState(tuple(attempts), marks, len(attempts), flags=frozenset(flags))


def out_of_memory_from(context: int) -> Measure:
    """Return a function whose cells run out of memory from this context length on."""
    return lambda attempt: outcome_of(
        attempt, Status.OOM if length_of(attempt) >= context else Status.OK
    )


def journalled(attempt: Attempt, measure: Measure = outcome_of) -> Outcome:
    """Write the files that a real child leaves, with the rows that `measure` returns."""
    outcome = measure(attempt)
    attempt.path.mkdir(parents=True)
    (attempt.path / ATTEMPT_FILE).write_text(attempt.to_json())
    with (attempt.path / JOURNAL_FILE).open("w") as stream:
        journal = Journal(stream)
        for table in MEASURED_TABLES:
            journal.rows(table, getattr(outcome, table))
        journal.end(FinalStatus(Status.OK))
    return outcome


def length_of(attempt: Attempt) -> int:
    return int(attempt.cell.params.values()["context_length"])


def lengths_of(scheduler: FakeScheduler) -> list[int]:
    """Return the context lengths of the attempts that started."""
    return [length_of(attempt) for attempt in scheduler.begun]
