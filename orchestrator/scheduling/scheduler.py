"""The interface of schedulers: they take attempts while slots are free and yield their outcomes.

Whoever makes one closes it, which frees its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from orchestrator.common.output import Notify as Notify
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.host import HostInfo
from tasks.spec.attempt import Attempt
from tasks.spec.cell import Cell
from tasks.spec.outcome import Outcome

OnStart = Callable[[AttemptStarted], None]


class Queue(Protocol):
    """The attempts of a sweep that wait. Iterating takes one after another."""

    def __iter__(self) -> Iterator[Attempt]: ...

    def waiting(self) -> Iterator[Cell]:
        """Yield the cells that wait, in the order in which they should start."""
        ...

    def take(self, cell: Cell) -> Attempt | None:
        """Remove a waiting cell. Return its attempt, or None if it is not to be measured now."""
        ...

    def expected_s(self, cell: Cell) -> float | None:
        """Return how long a cell is expected to take, or None if that is unknown."""
        ...


class Scheduler(Protocol):
    """Runs attempts."""

    def hosts(self) -> Sequence[HostInfo]:
        """Probe every host and return those that could measure. Raises PlatformError."""
        ...

    def slots(self, device: str, gpu_kind: str | None = None) -> int:
        """Return how many cells of a device type or kind of GPU can run at the same time.

        The result is 0 for a kind of GPU that no host has.
        """
        ...

    def import_ahead(self, attempt: Attempt) -> None:
        """Have each slot import what attempts like this one need, without waiting for it."""
        ...

    def run(self, queue: Queue, on_start: OnStart) -> Iterator[Outcome]:
        """Run attempts until the queue is empty, and yield each outcome when it is known.

        An attempt is taken only when its slots are free. Raises NoGpuLeft or NoNodeLeft if no GPU
        or no node is left that could run an attempt.
        """
        ...

    def close(self) -> None:
        """End the processes of this scheduler."""
        ...
