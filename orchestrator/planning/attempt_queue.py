"""The queue of a sweep: it hands out the attempts of a plan while slots are free.

With one slot, cells run in the order of the grid: no other order is faster, it is easy to follow
on the screen, and an interrupted run leaves the beginning of a grid and not its longest cells.
With several slots, the longest cells run first, so that the others do not wait for a long cell that
starts last. With --infer-oom, the order of the grid stays in both cases: if a small cell runs out
of memory, the larger ones need not run, and a large one says nothing about smaller ones.

The queue numbers attempts, and holds the running, failed and still-to-measure cells. CellOrder
holds the waiting cells, and OomInference, with --infer-oom, those that ran out of memory.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from orchestrator.planning.cell_decisions import Plan
from orchestrator.planning.duration_estimate import (
    DurationConditions,
    DurationEstimator,
    makespan_s,
    shared_graph,
)
from orchestrator.planning.oom_inference import OomInference
from orchestrator.planning.preflight import Preflight, Slots, first_gpu
from orchestrator.store.run import Run
from tasks.spec.attempt import Attempt, Settings
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome
from tasks.spec.status import Status

# Waiting cells are sorted again when more cells have finished since the last time than this share
# of the waiting ones. More often, sorting 10,000 cells would take a noticeable time.
_SORT_SHARE = 0.01
# With more waiting cells than this, an estimate of the remaining time is used for so long: one for
# 10,000 cells takes 28 ms, in which no other thread runs, and the display asks every second.
_MANY_CELLS = 1000
_ESTIMATE_S = 10.0


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


@dataclass(frozen=True)
class QueuedCell:
    """A waiting cell. round: 0 for its first repetition in this run, 1 for the second."""

    cell: Cell
    round: int


@dataclass(frozen=True)
class RunningCell:
    """A cell that runs since `started_s` on the monotonic clock."""

    cell: Cell
    started_s: float


class CellOrder:
    """The waiting cells, in the order in which they are tried. CUDA cells come first."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.waiting: list[QueuedCell] = []
        rounds: Counter[str] = Counter()
        for cell in sorted(cells, key=lambda cell: cell.params.device != "cuda"):
            self.waiting.append(QueuedCell(cell, rounds[cell.id]))
            rounds[cell.id] += 1

    def sort(self, estimator: DurationEstimator) -> None:
        """Put the longest first, but every cell once before any cell again.

        Cells on several GPUs come before the others, which fill the GPUs that are left free.
        """
        seconds = cache(estimator.seconds)  # the repetitions of a cell take equally long

        def precedence(queued: QueuedCell) -> tuple[bool, int, int, float]:
            params = queued.cell.params
            return params.device != "cuda", queued.round, -params.gpu_count, -seconds(queued.cell)

        # One assignment, because the display counts the waiting cells in another thread.
        self.waiting = sorted(self.waiting, key=precedence)

    def candidates(self, running: Iterable[Cell], estimator: DurationEstimator) -> Iterator[Cell]:
        """Yield the cells that may start, each as often as it waits.

        Cells come last if another cell is compiling the same graph: later, they will find that
        graph in the cache.
        """
        if not self.waiting:
            return
        # Cells on CUDA and on the CPU are not mixed: a CPU cell starts when no CUDA cell waits.
        device = self.waiting[0].cell.params.device
        compiling = set(map(shared_graph, running)) - {None}
        uncached = {graph for graph in compiling if not estimator.is_cached(graph)}
        later = []
        for queued in self.waiting:
            if queued.cell.params.device != device:
                break
            if shared_graph(queued.cell) in uncached:
                later.append(queued.cell)
            else:
                yield queued.cell
        yield from later

    def remove(self, cell: Cell) -> None:
        """Remove the first of the waiting repetitions of a cell."""
        index = next(index for index, queued in enumerate(self.waiting) if queued.cell == cell)
        del self.waiting[index]

    def remove_all(self, cell: Cell) -> None:
        """Remove all waiting repetitions of a cell."""
        self.waiting = [queued for queued in self.waiting if queued.cell != cell]


class AttemptQueue:
    """The attempts of a plan, each created when it is taken.

    A scheduler iterates over it and may stop at any time. Outcomes go to `finished`.
    deadline: on the monotonic clock; what would not end before it is skipped. None: no limit.
    beaten_ms: see `Settings`, by the id of a cell.
    """

    def __init__(
        self,
        plan: Plan,
        run: Run,
        settings: Settings,
        deadline: float | None = None,
        beaten_ms: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._plan = plan
        self._run = run
        self._settings, self._beaten_ms = settings, beaten_ms
        self._numbers: Counter[str] = Counter(run.highest_attempts())  # of the last attempts
        for cell, state in plan.states.items():
            self._numbers[cell] = max(self._numbers[cell], state.last_number)
        self._deadline = deadline
        self._skipped = 0
        self._shortest_skipped_s: float | None = None
        self._order = CellOrder(plan.to_run)
        self._slots = Slots()
        self._estimator = DurationEstimator(
            [decision.cell for decision in plan.decisions],
            plan.states,
            DurationConditions.of(settings, None),
        )
        self._inference = OomInference(plan.out_of_memory) if plan.inferable else None
        self._inferred_outcomes: list[Outcome] = []
        self._inferred_count = 0
        self._running: dict[tuple[str, int], RunningCell] = {}
        self._finished_since_sort = 0
        self._remaining: tuple[float | None, float] = None, 0.0  # an estimate, and when
        self._failed: set[str] = set()  # cells that are not repeated
        # Measurements of each cell that the plan asked for and that are still waiting.
        self._measurements_left = Counter(queued.cell.id for queued in self._order.waiting)
        self.total = len(self._order.waiting)

    def begin(self, preflight: Preflight) -> None:
        """Take over what the preflight found out: excluded cells, slots, and the GPU's speed."""
        excluded = {exclusion.cell.id for exclusion in preflight.excluded}
        waiting = self._order.waiting
        self._order.waiting = [queued for queued in waiting if queued.cell.id not in excluded]
        for cell in excluded:
            del self._measurements_left[cell]
        self.total = len(self._order.waiting)
        self._slots = preflight.slots
        conditions = self._estimator.conditions
        self._estimator.conditions = replace(conditions, gpu=first_gpu(preflight.hosts))
        self._sort()

    def __iter__(self) -> Iterator[Attempt]:
        while (cell := next(self.waiting(), None)) is not None:
            attempt = self.take(cell)
            if attempt is not None:
                yield attempt

    def waiting(self) -> Iterator[Cell]:
        """Yield the waiting cells in the order in which they should start."""
        running = [running.cell for running in self._running.values()]
        # Otherwise a cell that is not measured would have GPUs reserved.
        while self._inference or self._deadline is not None:
            first = next(self._order.candidates(running, self._estimator), None)
            if first is None or not self._leave_out(first):
                break
        return self._order.candidates(running, self._estimator)

    def take(self, cell: Cell) -> Attempt | None:
        """Remove a waiting cell. Return its attempt, or None if it is not to be measured now."""
        has_limits = self._inference or self._deadline is not None
        if has_limits and self._leave_out(cell):
            return None
        self._order.remove(cell)
        attempt = self._next_attempt(cell)
        self._running[cell.id, attempt.number] = RunningCell(cell, time.monotonic())
        return attempt

    def expected_s(self, cell: Cell) -> float | None:
        """Return how long a cell that starts now is expected to take, or None if unknown."""
        return self._estimator.seconds(cell) if self._estimator.can_estimate([cell]) else None

    def finished(self, outcome: Outcome) -> None:
        """Learn from an outcome of this queue: OOM, duration, and that its cell has run."""
        cell = outcome.attempt.cell
        self._running.pop((cell.id, outcome.attempt.number), None)
        self._measurements_left[cell.id] -= 1
        if outcome.status is Status.OOM and self._inference:
            self._inference.add(cell)
        if outcome.status is not Status.OK:
            self._failed.add(cell.id)
            self._order.remove_all(cell)
        self._estimator.learn(cell, outcome.status, outcome.wall_s)
        self._finished_since_sort += 1
        if self._finished_since_sort > _SORT_SHARE * len(self._order.waiting):
            self._sort()

    def take_inferred(self) -> list[Outcome]:
        """Return the OOMs that were inferred since the last call. The caller stores them."""
        taken, self._inferred_outcomes = self._inferred_outcomes, []
        return taken

    def state(self) -> QueueState:
        """Return what is left."""
        remaining = sum(
            count > 0 and cell not in self._failed
            for cell, count in self._measurements_left.items()
        )
        return QueueState(remaining, self._skipped, self._shortest_skipped_s, self._inferred_count)

    def remaining_s(self) -> float | None:
        """Return the time until all waiting and running cells have ended, or None if unknown."""
        now, (estimated_s, at_s) = time.monotonic(), self._remaining
        is_recent = len(self._order.waiting) > _MANY_CELLS and now - at_s < _ESTIMATE_S
        if estimated_s is not None and is_recent:
            return max(0.0, estimated_s - (now - at_s))
        self._remaining = self._estimate_remaining_s(now), now
        return self._remaining[0]

    def _estimate_remaining_s(self, now: float) -> float | None:
        # Lists are copied first, because the display calls this in another thread.
        running = list(self._running.values())
        waiting = [queued.cell for queued in list(self._order.waiting)]
        if not self._estimator.can_estimate([*waiting, *(one.cell for one in running)]):
            return None
        busy_s: list[float] = []  # of each slot that is taken, the time until it is free
        for one in running:
            left_s = self._estimator.seconds(one.cell) - (now - one.started_s)
            busy_s += [max(0.0, left_s)] * one.cell.params.slots
        slots = max(len(busy_s), *self._slots.by_device.values(), 1)
        return makespan_s(
            self._estimator.seconds_in_order(waiting),
            slots,
            busy_s,
            [cell.params.slots for cell in waiting],
        )

    def _next_attempt(self, cell: Cell) -> Attempt:
        self._numbers[cell.id] += 1
        number = self._numbers[cell.id]
        folder = str(self._run.attempt_folder(cell.id, number))
        settings = replace(self._settings, beaten_ms=self._beaten_ms.get(cell.id))
        return Attempt(cell, number, folder, settings)

    def _leave_out(self, cell: Cell) -> bool:
        """Return True, and remove it, if a waiting cell is not to be measured now."""
        if self._inference and self._infer(cell, self._inference):
            return True
        is_too_long = self._deadline is not None and self._is_too_long(cell, self._deadline)
        if is_too_long:
            self._order.remove(cell)
        return is_too_long

    def _is_too_long(self, cell: Cell, deadline: float) -> bool:
        """Return True, and count a skipped attempt, if it would not end before the deadline."""
        duration_s = self._estimator.upper_bound_s(cell) or 0.0
        if time.monotonic() + duration_s < deadline:
            return False
        self._skipped += 1
        self._shortest_skipped_s = min(duration_s, self._shortest_skipped_s or math.inf)
        return True

    def _sort(self) -> None:
        has_several_slots = max(self._slots.by_device.values(), default=1) > 1
        if has_several_slots and not self._plan.inferable:
            self._order.sort(self._estimator)
        self._finished_since_sort = 0

    def _infer(self, cell: Cell, inference: OomInference) -> bool:
        """Return True, and keep an outcome, if a smaller cell ran out of memory."""
        if cell.id not in self._plan.inferable:
            return False
        smaller = inference.find_smaller(cell)
        if smaller is None:
            return False
        evidence = {
            "message": f"needs at least as much memory as {smaller.id}, which ran out of memory",
            "witness": smaller.id,
        }
        attempt = self._next_attempt(cell)
        outcome = Outcome(
            attempt, Status.OOM_INFERRED, "", "", evidence, {}, (), time.time(), wall_s=0.0
        )
        self._inferred_outcomes.append(outcome)
        self._inferred_count += 1
        self._failed.add(cell.id)
        self._order.remove_all(cell)
        self._measurements_left[cell.id] = 0
        return True
