"""The earlier attempts of each cell, read from a results folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from orchestrator.common.errors import RunError
from orchestrator.store.run import Run
from tasks.spec.status import Status

PENDING = "pending"


@dataclass(frozen=True)
class CellHistory:
    """The finished attempts of one cell, oldest first.

    last_number: of the latest of them. replaced: how many successes count no more. flaws: of the success that counts.
    """

    statuses: tuple[Status, ...] = ()
    walls_s: tuple[float, ...] = ()
    last_number: int = 0
    replaced: int = 0
    flaws: frozenset[str] = frozenset()

    @property
    def status(self) -> str:
        """The state that counts: the latest success, else the latest end that says something."""
        if Status.OK in self.statuses:
            return Status.OK
        telling = [status for status in self.statuses if not status.is_environmental]
        return [PENDING, *self.statuses, *telling][-1]

    @property
    def successes(self) -> int:
        """Those that count."""
        return self.statuses.count(Status.OK) - self.replaced

    @property
    def misses(self) -> int:
        """How many repetitions came to nothing."""
        return self.failures + self.statuses.count(Status.OOM)

    @property
    def was_verified(self) -> bool:
        """Whether it was measured after it was inferred to run out of memory."""
        if Status.OOM_INFERRED not in self.statuses:
            return False
        since = self.statuses[self.statuses.index(Status.OOM_INFERRED) :]
        return not all(status is Status.OOM_INFERRED or status.is_environmental for status in since)

    @property
    def failures(self) -> int:
        return sum(status.is_retried and not status.is_environmental for status in self.statuses)


def read_history(run: Run) -> dict[str, CellHistory]:
    """What a run's folder knows of each cell."""
    return history_of(
        run.rows("attempts", ["cell", "attempt", "status", "wall_s", "replaces"]), run
    )


def history_of(rows: Iterable[tuple[Any, ...]], run: Run) -> dict[str, CellHistory]:
    """rows: of attempts, each with its cell, its number, its status, its seconds and the number that it replaces up to."""
    ordered = sorted(rows, key=lambda row: row[:2])
    return {
        cell: _past([row[1:] for row in own], run)
        for cell, own in groupby(ordered, key=lambda row: row[0])
    }


def _past(attempts: Sequence[tuple[int, str, float, int | None]], run: Run) -> CellHistory:
    """Of a cell's attempts, each with its number, its status, its seconds and the number that it replaces up to."""
    numbers, words, walls, _ = zip(*attempts, strict=True)
    well = [(number, until) for number, word, _, until in attempts if word == Status.OK]
    replaced_until = max((until for _, until in well if until), default=0)
    replaced = sum(number <= replaced_until for number, _ in well) if replaced_until else 0
    return CellHistory(tuple([_status(word, run) for word in words]), walls, numbers[-1], replaced)


def _status(word: str, run: Run) -> Status:
    try:
        return Status(word)
    except ValueError as error:
        raise RunError(
            f"{run}/attempts: {word!r} is no status",
            "Move away the part that is of another program",
        ) from error
