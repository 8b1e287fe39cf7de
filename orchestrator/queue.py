"""What is still to be measured: the attempts of a plan, each made when there is room for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.inference import Witnesses
from orchestrator.plan import Estimator, Past, Plan
from orchestrator.store import Run
from tasks.harness.cell import Cell
from tasks.harness.records import Attempt, Outcome, Settings, Status


@dataclass(frozen=True)
class Inferring:
    """keep: takes the outcome of a cell that was inferred. verify: how many of those are measured all the same, at the end."""

    keep: Callable[[Outcome], None]
    verify: int = 0


class Queue:
    """The attempts of a plan, each made when it is taken; those that would not end in time are passed over."""

    def __init__(
        self,
        run: Run,
        cells: Sequence[Cell],
        plan: Plan,
        settings: Settings,
        deadline: float | None,
        inferring: Inferring | None = None,
    ) -> None:
        """cells: all of the sweep. deadline: by time.monotonic(), or None. inferring: where out-of-memories are inferred."""
        self._run = run
        self._deadline = deadline
        self._settings = settings
        self._history = plan.history
        self._folders = run.highest_attempts()
        self._waiting = sorted(plan.to_run, key=lambda cell: cell.params.device != "cuda")
        self._estimator = Estimator(cells, plan.history)
        self._inferring = inferring
        self._witnesses = Witnesses(cell for cell in cells if plan.history.get(cell.id, Past()).status == Status.OOM)
        self._inferred: list[Cell] = []
        self._verifying: set[str] = set()
        self.refuted: list[Cell] = []
        self._running: dict[str, Cell] = {}
        self._ended_badly: set[str] = set()
        self.not_repeated = 0
        self.late = 0
        self.total = len(self._waiting)
        self.has_results = bool(plan.history)
        self.cells = tuple(dict.fromkeys(self._waiting))
        self.devices: set[str] = {cell.params.device for cell in self._waiting}

    @property
    def infers(self) -> bool:
        return self._inferring is not None

    def __iter__(self) -> Iterator[Attempt]:
        while self._waiting:
            cell = self._waiting.pop(0)
            if cell.id in self._ended_badly:
                self.not_repeated += 1
                continue
            if self._inferring and (witness := self._witnesses.of(cell)):
                self._infer(cell, witness, self._inferring)
                continue
            if not self._would_end_in_time(cell):
                self.late += 1
                continue
            yield self._next_attempt(cell)
        for cell in self._to_verify():
            if self._would_end_in_time(cell):
                self._verifying.add(cell.id)
                self.total += 1
                yield self._next_attempt(cell)

    def leave_out(self, cells: Sequence[Cell]) -> None:
        ids = {cell.id for cell in cells}
        self._waiting = [cell for cell in self._waiting if cell.id not in ids]
        self.total = len(self._waiting)

    def finished(self, outcome: Outcome) -> None:
        cell = outcome.attempt.cell
        self._running.pop(cell.id, None)
        if outcome.status is Status.OOM:
            self._witnesses.add(cell)
        if outcome.status is Status.OK and cell.id in self._verifying:
            self.refuted.append(cell)
        if outcome.status is not Status.OK:
            self._ended_badly.add(cell.id)
        self._estimator.learn(cell, outcome.status, outcome.wall_s)

    def _infer(self, cell: Cell, witness: Cell, inferring: Inferring) -> None:
        attempt = self._number(cell)
        evidence = {"message": f"it asks for no less than {witness.id}, which ran out of memory", "witness": witness.id}
        self._ended_badly.add(cell.id)
        self._inferred.append(cell)
        inferring.keep(Outcome(attempt, Status.OOM_INFERRED, "", "", evidence, {}, (), time.time(), 0.0))

    def _to_verify(self) -> list[Cell]:
        """Evenly from first to last."""
        wanted = min(self._inferring.verify if self._inferring else 0, len(self._inferred))
        return [self._inferred[place * len(self._inferred) // wanted] for place in range(wanted)]

    def _next_attempt(self, cell: Cell) -> Attempt:
        self._running[cell.id] = cell
        return self._number(cell)

    def _number(self, cell: Cell) -> Attempt:
        number = 1 + max(self._folders.get(cell.id, 0), self._history.get(cell.id, Past()).last_number)
        self._folders[cell.id] = number
        return Attempt(cell, number, str(self._run.attempt_folder(cell.id, number)), self._settings)

    def remaining_s(self) -> float | None:
        """Of all that waits or runs, shared by as many as run now."""
        total = self._estimator.total_seconds([*self._waiting, *self._running.values()])
        return total and total / max(1, len(self._running))

    def _would_end_in_time(self, cell: Cell) -> bool:
        if self._deadline is None:
            return True
        estimate = self._estimator.seconds(cell) or 0.0
        return time.monotonic() + estimate < self._deadline
