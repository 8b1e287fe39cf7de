"""The state of a cell: which of its attempts count, and which one is shown.

The rows of attempts and the marks of a run enter, a `CellState` for each cell leaves. Plans, status,
tables, comparisons and publications all ask this module, and nothing else compares the numbers of
attempts.

A mark is the number of the last attempt at a cell when `--fresh` or `--retry` asked to measure it
again. Only later attempts count from then on: for the number of repetitions, and for the limit on
failures. Until one of them succeeds, the successes before the mark stay valid and are shown, so that
an interrupted or failed command hides no result. Marks are in run.json, in the entry of the command
that set them; if run.json is lost, all successes of a cell are valid again. Runs of older versions
have no marks: there the success itself names the last attempt that it replaces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from orchestrator.common.errors import RunError
from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.run import INCOMPLETE, Run
from tasks.spec.status import Status

PENDING = "pending"  # the status of a cell without an attempt

Marks = Mapping[str, Sequence[int]]  # by cell


class StoredAttempt(NamedTuple):
    """A row of the table of attempts.

    status: `incomplete` if rows of another table are missing.
    replaces: of older versions, the last attempt that this one replaces if it succeeded.
    """

    cell: str
    number: int
    status: str
    replaces: int | None = None
    wall_s: float = 0.0


@dataclass(frozen=True)
class CellState:
    """The state of a cell, derived from its attempts.

    attempts: oldest first. marks: in ascending order.
    last_number: number of the last attempt, which may be obsolete.
    obsolete: the number of attempts that are left out, because the cell's model has changed.
    flags: quality flags of the shown success.
    """

    attempts: tuple[StoredAttempt, ...] = ()
    marks: tuple[int, ...] = ()
    last_number: int = 0
    obsolete: int = 0
    flags: frozenset[str] = frozenset()

    @property
    def shown(self) -> StoredAttempt | None:
        """The latest success, else the latest attempt that says something about the cell."""
        return max(self.attempts, key=_precedence, default=None)

    @property
    def status(self) -> str:
        """The status of the shown attempt."""
        return self.shown.status if self.shown else PENDING

    @property
    def valid(self) -> tuple[int, ...]:
        """The numbers of the successes that count: those after the last mark before a success."""
        successes = [one.number for one in self.attempts if one.status == Status.OK]
        begin = max((mark for mark in self.marks if mark < max(successes, default=0)), default=0)
        return tuple(number for number in successes if number > begin)

    @cached_property
    def since_mark(self) -> CellState:
        """The state as it would be if there were only the attempts after the last mark."""
        if not self.marks:
            return self
        return CellState(tuple(one for one in self.attempts if one.number > self.marks[-1]))

    @cached_property
    def successes_before_mark(self) -> int:
        """The number of successes that counted at the last mark; it asks for as many new ones."""
        *earlier, last = self.marks or (0,)
        before = tuple(one for one in self.attempts if one.number <= last)
        return len(CellState(before, tuple(earlier)).valid)

    @property
    def is_to_be_replaced(self) -> bool:
        """True if the cell was marked, and has fewer successes since than it had before."""
        return len(self.since_mark.valid) < self.successes_before_mark

    @property
    def failures(self) -> int:
        """The number of tries since the last mark that failed through the fault of the cell."""
        tries = [one for one in self.since_mark.attempts if one.status != INCOMPLETE]
        statuses = [Status(one.status) for one in tries]
        return sum(status.is_retried and not status.is_environmental for status in statuses)

    @property
    def misses(self) -> int:
        """The number of tries since the last mark without a result, also for lack of memory."""
        statuses = [one.status for one in self.since_mark.attempts]
        return self.failures + statuses.count(Status.OOM)


def read_states(run: Run, obsolete: Collection[tuple[str, int]] = ()) -> dict[str, CellState]:
    """Return the state of every cell that has an attempt, by cell id.

    obsolete: attempts to leave out, by cell and number. Raise RunError for an unknown status.
    """
    incomplete, attempts = run.incomplete_attempts(), []
    for row in run.rows(ATTEMPTS, ["cell", "attempt", "status", "replaces", "wall_s"]):
        attempt = StoredAttempt(*row)
        if attempt[:2] in incomplete:
            attempt = attempt._replace(status=INCOMPLETE)
        elif attempt.status not in tuple(Status):
            raise RunError(
                f"{run}/{ATTEMPTS}: unknown status {attempt.status!r}",
                "Move the part away: another program wrote it",
            )
        attempts.append(attempt)
    return states_of(attempts, run.marks(), obsolete)


def states_of(
    attempts: Iterable[StoredAttempt], marks: Marks, obsolete: Collection[tuple[str, int]] = ()
) -> dict[str, CellState]:
    """Return the states of the cells of these attempts, by cell id."""
    states = {}
    for cell, group in groupby(sorted(attempts, key=itemgetter(0, 1)), key=attrgetter("cell")):
        own = list(group)
        current = tuple(one for one in own if one[:2] not in obsolete)
        replaced = {one.replaces or 0 for one in current if one.status == Status.OK} - {0}
        states[cell] = CellState(
            current,
            tuple(sorted(replaced.union(marks.get(cell, ())))),
            last_number=own[-1].number,
            obsolete=len(own) - len(current),
        )
    return states


def _precedence(attempt: StoredAttempt) -> tuple[bool, bool, bool, int]:
    """Order a success before all others, and attempts that were lost with their host last."""
    status = attempt.status
    return status == Status.OK, status != Status.LOST, status != INCOMPLETE, attempt.number
