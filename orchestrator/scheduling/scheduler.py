"""The interface of schedulers: they take attempts while slots are free and yield their outcomes.

Whoever makes one closes it, which frees its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from orchestrator.common.output import Notify as Notify
from orchestrator.execution.events import AttemptStarted
from orchestrator.hardware.host import HostInfo
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome

OnStart = Callable[[AttemptStarted], None]


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

    def run(self, queue: Iterable[Attempt], on_start: OnStart) -> Iterator[Outcome]:
        """Run attempts until the queue is empty, and yield each outcome when it is known.

        The next attempt is taken only when a slot is free. Raises NoGpuLeft or NoNodeLeft if no GPU
        or no node is left that could run an attempt.
        """
        ...

    def close(self) -> None:
        """End the processes of this scheduler."""
        ...
