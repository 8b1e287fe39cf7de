"""The live objects that a sweep uses: the scheduler that it opens, and the console."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.planning.options import ExecutionOptions
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.sweep.console import Console
from tasks.spec.attempt import Attempt

# Opens a scheduler that runs attempts like this example, for which this machine prepares while Ray
# starts.
OpenScheduler = Callable[[ExecutionOptions, Attempt], Scheduler]


@dataclass(frozen=True)
class Runtime:
    """The scheduler and the console of a sweep. Tests replace both."""

    open_scheduler: OpenScheduler
    console: Console
