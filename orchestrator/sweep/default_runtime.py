"""The runtime of the command line: Ray or this process, and the standard output."""

from __future__ import annotations

from orchestrator.planning.options import ExecutionOptions
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.sweep.console import Label, SweepConsole
from orchestrator.sweep.runtime import Runtime
from tasks.spec.attempt import Attempt


def default_runtime(label: Label) -> Runtime:
    """Return a runtime that measures on Ray or in this process, and prints to the terminal."""
    console = SweepConsole(label)

    def open_scheduler(execution: ExecutionOptions, example: Attempt) -> Scheduler:
        if execution.scheduler == "serial":
            return SerialScheduler(console.notify, example)
        return RayScheduler(console.notify, execution.address, execution.cpu_cells, example)

    return Runtime(open_scheduler, console)
