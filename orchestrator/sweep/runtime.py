"""The live objects that a sweep uses: how it opens its scheduler, and where it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.planning.options import ExecutionOptions
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.scheduler import Notify, Scheduler
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.sweep.console import Console, Label, SweepConsole
from tasks.spec.attempt import Attempt

# Opens a scheduler that runs attempts like this example, for which this machine prepares while Ray
# starts.
OpenScheduler = Callable[[ExecutionOptions, Attempt], Scheduler]


@dataclass(frozen=True)
class Runtime:
    """The scheduler and the console of a sweep. Tests replace both."""

    open_scheduler: OpenScheduler
    console: Console


def default_runtime(label: Label) -> Runtime:
    """Return a runtime that measures on Ray or in this process, and prints to the terminal."""
    console = SweepConsole(label)

    def open_scheduler(execution: ExecutionOptions, example: Attempt) -> Scheduler:
        return _open_scheduler(execution, example, console.notify)

    return Runtime(open_scheduler, console)


def _open_scheduler(execution: ExecutionOptions, example: Attempt, notify: Notify) -> Scheduler:
    if execution.scheduler == "serial":
        return SerialScheduler(notify)
    return RayScheduler(notify, execution.address, execution.cpu_cells, example)
