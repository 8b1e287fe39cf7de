"""What to do with each cell, and why: the one place that reads what was finished before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from orchestrator.errors import RunError
from tasks.harness.cell import Cell
from tasks.harness.records import Status
from tasks.harness.registry import all_tasks

if TYPE_CHECKING:
    from orchestrator.store import Run

PENDING = "pending"
_MARGIN = 1.25  # cells of one kind differ in how well they use the device
RETRIED = frozenset({Status.FAILED, Status.CRASHED, Status.TIMEOUT, Status.HOST_OOM, Status.LOST})
_NOT_ITS_FAULT = frozenset({Status.LOST})


@dataclass(frozen=True)
class Past:
    """The finished attempts of one cell, oldest first. last_number: of the latest of them."""

    statuses: tuple[Status, ...] = ()
    walls_s: tuple[float, ...] = ()
    last_number: int = 0

    @property
    def status(self) -> str:
        """The state that counts: the latest success, else the latest end that says something."""
        if Status.OK in self.statuses:
            return Status.OK
        telling = [status for status in self.statuses if status not in _NOT_ITS_FAULT]
        return [PENDING, *self.statuses, *telling][-1]

    @property
    def successes(self) -> int:
        return self.statuses.count(Status.OK)

    @property
    def failures(self) -> int:
        return sum(status in RETRIED - _NOT_ITS_FAULT for status in self.statuses)


@dataclass(frozen=True)
class Choice:
    """What the user asked of this run. `only` and `retry` hold statuses, `only` also `pending`.

    infer_oom: whether an out-of-memory that was inferred will do. repeat: how often each cell is to be measured, in all: what
    its repetitions differ in is the noise of the machine.
    """

    infer_oom: bool = False
    repeat: int = 1
    retry: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()
    fresh: bool = False


@dataclass(frozen=True)
class Decision:
    """times: how often the cell will be measured; 0 where it is left alone."""

    cell: Cell
    times: int
    reason: str


@dataclass(frozen=True)
class Plan:
    decisions: tuple[Decision, ...]
    history: Mapping[str, Past] = field(default_factory=dict)

    @property
    def to_run(self) -> list[Cell]:
        """Every cell once before any cell again, so that a drift of the machine strikes repetitions, not cells."""
        rounds = range(max((decision.times for decision in self.decisions), default=0))
        return [decision.cell for done in rounds for decision in self.decisions if decision.times > done]

    def statuses(self) -> Counter[str]:
        return Counter(self.history.get(decision.cell.id, Past()).status for decision in self.decisions)


def read_history(run: Run) -> dict[str, Past]:
    """What a run's folder knows of each cell."""
    history: dict[str, Past] = {}
    for cell, number, status, wall in sorted(run.rows("attempts", ["cell", "attempt", "status", "wall_s"])):
        past = history.get(cell, Past())
        history[cell] = Past((*past.statuses, _status(status, run)), (*past.walls_s, wall), number)
    return history


def _status(word: str, run: Run) -> Status:
    try:
        return Status(word)
    except ValueError as error:
        raise RunError(
            f"{run.folder}/attempts: {word!r} is no status", "Move away the part that is of another program"
        ) from error


def make_plan(cells: Iterable[Cell], history: Mapping[str, Past], choice: Choice, attempts: int) -> Plan:
    """attempts: how often a cell that fails is tried in all, before it is left alone until asked for."""
    return Plan(tuple(_decide(cell, history.get(cell.id, Past()), choice, attempts) for cell in cells), history)


def _decide(cell: Cell, past: Past, choice: Choice, attempts: int) -> Decision:
    status, missing = past.status, choice.repeat - past.successes
    if choice.only and status not in choice.only:
        return Decision(cell, 0, f"left out: {status}, not asked for")
    if status == PENDING:
        return Decision(cell, missing, "new")
    if status in choice.only:
        return Decision(cell, max(missing, 1), f"asked for: was {status}")
    if choice.fresh:
        return Decision(cell, choice.repeat, f"fresh: was {status}")
    if status in choice.retry:
        return Decision(cell, max(missing, 1), f"retry: was {status}")
    if status == Status.OOM_INFERRED and not choice.infer_oom:
        return Decision(cell, missing, "was inferred, not measured")
    if status == Status.OK and missing > 0:
        return Decision(cell, missing, f"repeat: measured {past.successes} of {choice.repeat} times")
    if status not in RETRIED:
        return Decision(cell, 0, f"done: {status}")
    if past.failures >= attempts:
        return Decision(cell, 0, f"given up after {past.failures} attempts: {status}; --retry {status} tries again")
    return Decision(cell, missing, f"retry: was {status}")


class Estimator:
    """How long a cell will take, from how long others took.

    A cell that was measured before takes as long again. Another takes the start-up time, which is the shortest seen among
    cells of the same kind (same task, device, precision, attention and compilation), plus its work at their pace, by
    least squares, so that the long ones count and the scatter of short ones does not, and a margin. With one alike
    finished, all of its time is taken for work. With none alike, it is taken for the longest of all: better to start a
    cell too few than one that is cut off. Before anything is finished nothing is known.
    """

    def __init__(self, cells: Iterable[Cell], history: Mapping[str, Past]) -> None:
        self._walls: dict[str, float] = {}
        self._longest: float | None = None
        self._alike: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        self._rates: dict[tuple[object, ...], tuple[float, float]] = {}  # start-up and pace, until more is learnt
        for cell in cells:
            past = history.get(cell.id, Past())
            for status, wall in zip(past.statuses, past.walls_s, strict=True):
                self.learn(cell, status, wall)

    def learn(self, cell: Cell, status: Status, wall_s: float) -> None:
        if status is Status.OK:
            self._walls[cell.id] = wall_s
            self._longest = max(wall_s, self._longest or 0.0)
            self._alike.setdefault(_kind(cell), []).append((_total_work(cell), wall_s))
            self._rates.pop(_kind(cell), None)

    def seconds(self, cell: Cell) -> float | None:
        kind = _kind(cell)
        if cell.id in self._walls:
            return self._walls[cell.id]
        if kind not in self._alike:
            return self._longest
        start_up, pace = self._rates[kind] = self._rates.get(kind) or self._fit(self._alike[kind])
        return start_up + pace * _total_work(cell)

    def total_seconds(self, cells: Sequence[Cell]) -> float | None:
        """Of several; None before anything is finished."""
        return sum(self.seconds(cell) or 0.0 for cell in cells) if self._walls else None

    @staticmethod
    def _fit(alike: Sequence[tuple[float, float]]) -> tuple[float, float]:
        if len(alike) == 1:
            work, wall = alike[0]
            return 0.0, wall / work
        start_up = min(wall for _, wall in alike)
        pace = sum((wall - start_up) * work for work, wall in alike) / sum(work**2 for work, _ in alike)
        return start_up, pace * _MARGIN


_ALIKE = ("device", "precision", "attention", "compile", "compile_mode", "compile_cache", "model")


@cache
def _kind(cell: Cell) -> tuple[object, ...]:
    values = cell.params.values()
    return cell.task, *(values.get(name) for name in _ALIKE)


@cache
def _total_work(cell: Cell) -> float:
    values = cell.params.values()
    steps = values.get("warmup_steps", 0) + 2 * values.get("measured_steps", 1)
    return float(all_tasks()[cell.task].work(cell.params) * steps)
