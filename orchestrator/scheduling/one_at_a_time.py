"""Cells that are measured one at a time, so that none has another of its run beside it, whatever there is room for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from orchestrator.scheduling.ray_scheduler import OnStart, Scheduler
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome


@dataclass(frozen=True)
class Placed:
    """Where a cell was measured. gpu: as CUDA_VISIBLE_DEVICES names it there; empty for the CPU. uuid: of that GPU."""

    host: str
    gpu: str
    uuid: str


class OneByOne:
    """A scheduler that measures one cell at a time.

    placed: where each was before, to be there again with all of that host to itself; any place will do for one that is not named.
    """

    def __init__(
        self, scheduler: Scheduler, placed: Mapping[str, Placed] = MappingProxyType({})
    ) -> None:
        self._scheduler = scheduler
        self._placed = placed

    def environments(self) -> list[Mapping[str, Any]]:
        return self._scheduler.environments()

    def places(self, device: str, kind: str | None = None) -> int:
        return min(1, self._scheduler.places(device, kind))

    def prepare(self, attempt: Attempt) -> None:
        """The one place is by its first cell; those of cells that ran beside each other are."""

    def run(self, attempts: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        for attempt in attempts:
            yield from self._scheduler.run([self._where_it_was(attempt)], on_start)

    def close(self) -> None:
        self._scheduler.close()

    def _where_it_was(self, attempt: Attempt) -> Attempt:
        placed = self._placed.get(attempt.cell.id)
        if placed is None:
            return attempt
        env = {
            **attempt.settings.env,
            **({"CUDA_VISIBLE_DEVICES": placed.gpu} if placed.gpu else {}),
        }
        return replace(attempt, settings=replace(attempt.settings, env=env, alone_on=placed.host))
