"""The earlier attempts of each cell, read from a results folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from orchestrator.common.errors import RunError
from orchestrator.planning.options import PENDING, QUALITY_FLAGS
from orchestrator.store.run import INCOMPLETE, Run, StoredRow
from tasks.spec.status import Status

if TYPE_CHECKING:
    import pandas as pd

HISTORY_COLUMNS = ["cell", "attempt", "status", "wall_s", "replaces", "contents"]


@dataclass(frozen=True)
class CellHistory:
    """The finished attempts of one cell, oldest first.

    last_number: the number of the latest attempt.
    replaced: successes that a later measurement replaces.
    flags: quality flags of the valid success.
    incomplete: the number of attempts with missing rows; the other fields leave them out.
    obsolete: the number of attempts at another source of the model; they are left out, too.
    """

    statuses: tuple[Status, ...] = ()
    walls_s: tuple[float, ...] = ()
    last_number: int = 0
    replaced: int = 0
    flags: frozenset[str] = frozenset()
    incomplete: int = 0
    obsolete: int = 0

    @property
    def status(self) -> str:
        """The latest success, else the latest status that says something about the cell."""
        if Status.OK in self.statuses:
            return Status.OK
        # An attempt that was lost with its host says nothing about the cell.
        meaningful = [status for status in self.statuses if not status.is_environmental]
        if known := meaningful or self.statuses:
            return known[-1]
        return INCOMPLETE if self.incomplete else PENDING

    @property
    def successes(self) -> int:
        """The number of valid successes."""
        return self.statuses.count(Status.OK) - self.replaced

    @property
    def failures(self) -> int:
        """The number of tries that failed through the fault of the cell."""
        return sum(status.is_retried and not status.is_environmental for status in self.statuses)

    @property
    def misses(self) -> int:
        """The number of tries without a result, including those that ran out of memory."""
        return self.failures + self.statuses.count(Status.OOM)


def read_histories(run: Run, obsolete: Collection[tuple[str, int]] = ()) -> dict[str, CellHistory]:
    """Return the history of every cell in a results folder, by cell id.

    obsolete: attempts to leave out, by cell and number.
    """
    return histories_of(run.rows("attempts", HISTORY_COLUMNS), run, obsolete)


def histories_of(
    rows: Iterable[StoredRow], run: Run, obsolete: Collection[tuple[str, int]] = ()
) -> dict[str, CellHistory]:
    """Return the histories in these rows of attempts, which have HISTORY_COLUMNS."""
    rows = sorted(rows, key=itemgetter(0, 1))
    incomplete = run.incomplete_of(map(itemgetter(0, 1, 5), rows))
    histories = {}
    for cell, attempts in groupby(rows, key=itemgetter(0)):
        own = list(attempts)
        current = [row for row in own if row[:2] not in obsolete]
        complete = [row for row in current if row[:2] not in incomplete]
        statuses, walls_s, replaced = _valid_attempts(complete, run)
        histories[cell] = CellHistory(
            statuses=statuses,
            walls_s=walls_s,
            last_number=own[-1][1],
            replaced=replaced,
            incomplete=len(current) - len(complete),
            obsolete=len(own) - len(current),
        )
    return histories


def with_quality_flags(histories: Mapping[str, CellHistory], run: Run) -> dict[str, CellHistory]:
    """Return the histories with the quality flags of each cell's valid success."""
    from orchestrator.analysis.results import load_results

    flagged = dict(histories)
    for flag, cells in cells_by_flag(load_results(run).cells).items():
        for cell in cells:
            flagged[cell] = replace(flagged[cell], flags=flagged[cell].flags | {flag})
    return flagged


def cells_by_flag(cells: pd.DataFrame) -> dict[str, set[str]]:
    """Return the ids of the cells that have each quality flag."""
    from orchestrator.analysis.cpu_bound import flagged

    return {flag: flagged(cells, column) for flag, column in QUALITY_FLAGS.items()}


def _valid_attempts(
    attempts: Iterable[StoredRow], run: Run
) -> tuple[tuple[Status, ...], tuple[float, ...], int]:
    """Return the statuses and durations of attempts, and how many successes were replaced."""
    successes: list[int] = []
    replaced_until = 0
    statuses, walls_s = [], []
    for _, number, status, wall_s, replaces, _ in attempts:
        statuses.append(_status(status, run))
        walls_s.append(wall_s)
        if status == Status.OK:
            successes.append(number)
            # A success of --fresh or --retry replaces the successes up to the number that it names.
            replaced_until = max(replaced_until, replaces or 0)
    replaced = sum(success <= replaced_until for success in successes)
    return tuple(statuses), tuple(walls_s), replaced


def _status(text: str, run: Run) -> Status:
    try:
        return Status(text)
    except ValueError as error:
        raise RunError(
            f"{run}/attempts: unknown status {text!r}",
            "Move the part away: another program wrote it",
        ) from error
