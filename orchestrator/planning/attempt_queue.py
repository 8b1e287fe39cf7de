"""What is still to be measured: the attempts of a plan, each made when there is room for it.

On one device they come in the grid's order: it is what people follow on the screen, no other takes less time, and a run that is
cut off leaves the beginning of a grid and not the heap of its long cells. Over several the longest come first, so that none of
them is begun last and has the others wait. Where out-of-memories are inferred the grid's order stays on several too: that is
spared by a small cell that runs out which a large one that runs out does not spare.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from orchestrator.planning.duration_estimate import (
    DurationConditions,
    DurationEstimator,
    makespan_s,
)
from orchestrator.planning.history import CellHistory
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.plan import Plan, evenly_spaced
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.compile_groups import shared_graph
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

_RARELY = 100  # at each end where a hundred wait, at each hundredth where ten thousand do: to sort is then no work


@dataclass(frozen=True)
class QueuedCell:
    """A cell that waits. round: how often it was, or will be, measured before."""

    cell: Cell
    round: int


@dataclass(frozen=True)
class RunningCell:
    cell: Cell
    at: float  # by time.monotonic()


class AttemptQueue:
    """The attempts of a plan, each made when it is taken; those that would not end in time are passed over."""

    def __init__(
        self,
        run: Run,
        cells: Sequence[Cell],
        plan: Plan,
        settings: Settings,
        deadline: float | None,
        keep_inferred: Callable[[Outcome], None] | None = None,
    ) -> None:
        """cells: all of the sweep. deadline: by time.monotonic(), or None. keep_inferred: where out-of-memories are inferred,
        what takes the outcome of such a cell.
        """
        self._run = run
        self._deadline = deadline
        self._settings = settings
        self._history = plan.history
        self._replaces = {
            one.cell.id: plan.history[one.cell.id].last_number
            for one in plan.decisions
            if one.replaces
        }
        self._folders = run.highest_attempts()
        self._all = cells
        self._places: Mapping[str, int] = {}
        self._kinds: Mapping[str, int] = {}
        self._estimator = DurationEstimator(
            cells, plan.history, DurationConditions.of(settings, None)
        )
        self._waiting = _turns(sorted(plan.to_run, key=lambda cell: cell.params.device != "cuda"))
        self._keep_inferred = keep_inferred
        self._witnesses, self._inferable = OomInference(plan.witnesses), plan.inferable
        self._inferred: list[Cell] = []
        self._verifying, self._to_verify = set(plan.verifying), plan.to_verify
        self.verified = 0
        self.refuted: list[Cell] = []
        self._running: dict[tuple[str, int], RunningCell] = {}
        self._unsorted = 0  # how many ended since it was sorted
        self._ended_badly: set[str] = set()
        self._owed = Counter(
            turn.cell.id for turn in self._waiting
        )  # how often each cell is still to be measured
        self.late = 0
        self.late_s: float | None = None  # what the shortest of those takes
        self.elsewhere = 0
        self.total = len(self._waiting)
        self.has_results = bool(plan.history)
        self.cells = tuple(dict.fromkeys(turn.cell for turn in self._waiting))
        self.devices: set[str] = {cell.params.device for cell in self.cells}
        self.kinds: set[str] = {
            cell.params.gpu_kind for cell in self.cells if cell.params.gpu_kind is not None
        }

    @property
    def infers(self) -> bool:
        return self._keep_inferred is not None

    @property
    def still_inferred(self) -> int:
        """How many were inferred to run out of memory, and not measured since."""
        return len(self._inferred)

    @property
    def names_kinds(self) -> bool:
        """Whether every cell on a GPU says which kind of GPU it wants."""
        return all(
            cell.params.gpu_kind is not None for cell in self.cells if cell.params.device == "cuda"
        )

    def arrange(
        self,
        places: Mapping[str, int],
        gpu: str | None,
        kinds: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Once it is known where the cells will be measured. places: how many at once, by device; gpu: by its driver's name;
        kinds: how many at once, by the kind of GPU that cells ask for.
        """
        self._places, self._kinds = places, kinds
        self._estimator = DurationEstimator(
            self._all, self._history, DurationConditions.of(self._settings, gpu)
        )
        self._sort()

    def __iter__(self) -> Iterator[Attempt]:
        while self._waiting:
            cell = self._take()
            if cell.id in self._ended_badly:
                continue
            if (
                self._keep_inferred
                and cell.id in self._inferable
                and (witness := self._witnesses.of(cell))
            ):
                self._keep_inferred(self._infer(cell, witness))
                continue
            if self._is_late(cell):
                continue
            yield self._next_attempt(cell)
        to_verify = evenly_spaced(self._inferred, self._to_verify)
        self.total += len(to_verify)
        self._owed.update(dict.fromkeys((cell.id for cell in to_verify), 1))
        self._ended_badly.difference_update(cell.id for cell in to_verify)
        for cell in to_verify:
            if self._is_late(cell):
                continue
            self._verifying.add(cell.id)
            yield self._next_attempt(cell)

    @property
    def left(self) -> int:
        """How many cells have not been measured as often as they were to be; what ends badly is not repeated."""
        return sum(
            times > 0 and cell not in self._ended_badly for cell, times in self._owed.items()
        )

    def example(self) -> Attempt:
        """An attempt at the first cell as it will be made, without number. There must be a cell."""
        cell = self._waiting[0].cell
        return Attempt(cell, 0, str(self._run.attempt_folder(cell.id, 0)), self._settings)

    def defer(self, cells: Sequence[Cell]) -> None:
        """Those that cannot be measured here."""
        self.elsewhere += len(cells)
        self.leave_out(cells)

    def leave_out(self, cells: Sequence[Cell]) -> None:
        ids = {cell.id for cell in cells}
        self._waiting = [turn for turn in self._waiting if turn.cell.id not in ids]
        self.cells = tuple(cell for cell in self.cells if cell.id not in ids)
        self.total = len(self._waiting)
        for cell in ids:
            del self._owed[cell]

    def finished(self, outcome: Outcome) -> None:
        cell = outcome.attempt.cell
        self._running.pop((cell.id, outcome.attempt.number), None)
        self._owed[cell.id] -= 1
        if outcome.status is Status.OOM:
            self._witnesses.add(cell)
        if cell.id in self._verifying and not outcome.status.is_environmental:
            self.verified += 1
            self._inferred = [one for one in self._inferred if one.id != cell.id]
            self.refuted += [cell] if outcome.status is Status.OK else []
        if outcome.status is not Status.OK:
            self._ended_badly.add(cell.id)
        self._estimator.learn(cell, outcome.status, outcome.wall_s)
        self._unsorted += 1
        if self._unsorted * _RARELY > len(self._waiting):
            self._sort()

    def _sort(self) -> None:
        """Every cell once before any again, and of those the longest first where several are measured at once. Before them come
        those that take several GPUs: what is free beside those the others fill."""
        if self.infers or max(self._places.values(), default=1) == 1:
            return
        self._unsorted = 0
        seconds = {
            cell: self._estimator.seconds(cell) for cell in {turn.cell for turn in self._waiting}
        }

        def precedence(turn: QueuedCell) -> tuple[bool, int, int, float]:
            params = turn.cell.params
            return params.device != "cuda", turn.round, -params.gpu_count, -seconds[turn.cell]

        self._waiting = sorted(
            self._waiting, key=precedence
        )  # at once: a display that counts what waits has a thread of its own

    def _take(self) -> Cell:
        """The next in turn. One that compiles what another is just compiling waits for that, and one for whose kind of GPU there
        is none free, but where nothing else is left."""
        device = self._waiting[0].cell.params.device
        compiling = {shared_graph(begun.cell) for begun in self._running.values()} - {None}
        unfilled = {graph for graph in compiling if not self._estimator.is_filled(graph)}
        free = self._free_of_kinds()
        second_best: int | None = None
        for place, turn in enumerate(self._waiting):
            if turn.cell.params.device != device or turn.cell.params.gpu_count > free.get(
                turn.cell.params.gpu_kind, math.inf
            ):
                continue
            if shared_graph(turn.cell) not in unfilled:
                return self._waiting.pop(place).cell
            second_best = place if second_best is None else second_best
        return self._waiting.pop(second_best or 0).cell

    def _free_of_kinds(self) -> Mapping[str | None, int]:
        """How many GPUs of each kind that cells ask for have none of those."""
        taken: Counter[str | None] = Counter()
        for begun in self._running.values():
            taken[begun.cell.params.gpu_kind] += begun.cell.params.gpu_count
        return {kind: places - taken[kind] for kind, places in self._kinds.items()}

    def _infer(self, cell: Cell, witness: Cell) -> Outcome:
        attempt = self._number(cell)
        evidence = {
            "message": f"it asks for no less than {witness.id}, which ran out of memory",
            "witness": witness.id,
        }
        self._ended_badly.add(cell.id)
        self._owed[cell.id] = 0
        self._inferred.append(cell)
        return Outcome(attempt, Status.OOM_INFERRED, "", "", evidence, {}, (), time.time(), 0.0)

    def _next_attempt(self, cell: Cell) -> Attempt:
        attempt = replace(self._number(cell), replaces=self._replaces.get(cell.id, 0))
        self._running[cell.id, attempt.number] = RunningCell(cell, time.monotonic())
        return attempt

    def _number(self, cell: Cell) -> Attempt:
        number = 1 + max(
            self._folders.get(cell.id, 0), self._history.get(cell.id, CellHistory()).last_number
        )
        self._folders[cell.id] = number
        return Attempt(cell, number, str(self._run.attempt_folder(cell.id, number)), self._settings)

    def remaining_s(self) -> float | None:
        """Until all that waits or runs has ended; None while nothing is known."""
        now, running, waiting = (
            time.monotonic(),
            list(self._running.values()),
            [turn.cell for turn in list(self._waiting)],
        )
        if not self._estimator.knows([*waiting, *(begun.cell for begun in running)]):
            return None
        left = [
            (begun.cell, max(0.0, self._estimator.seconds(begun.cell) - (now - begun.at)))
            for begun in running
        ]
        under_way = [seconds for cell, seconds in left for _ in range(_width(cell))]
        at_once = max(len(under_way), *self._places.values(), 1)
        return makespan_s(
            self._estimator.each(waiting), at_once, under_way, [_width(cell) for cell in waiting]
        )

    def _is_late(self, cell: Cell) -> bool:
        """Whether it would not end in time. It is passed over then."""
        takes_s = self._estimator.upper_bound_s(cell) or 0.0
        if self._deadline is None or time.monotonic() + takes_s < self._deadline:
            return False
        self.late += 1
        self.late_s = min(takes_s, self.late_s or math.inf)
        return True


def _width(cell: Cell) -> int:
    """How many places it takes."""
    return max(1, cell.params.gpu_count)


def _turns(cells: Sequence[Cell]) -> list[QueuedCell]:
    before: Counter[str] = Counter()
    turns = []
    for cell in cells:
        turns.append(QueuedCell(cell, before[cell.id]))
        before[cell.id] += 1
    return turns
