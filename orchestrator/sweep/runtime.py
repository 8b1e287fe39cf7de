"""The live objects that a sweep uses: the scheduler that it opens, and the console."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from orchestrator.planning.options import ExecutionOptions
from orchestrator.scheduling.ray_scheduler import RayScheduler
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.serial import SerialScheduler
from orchestrator.sweep.console import Console, Label, SweepConsole
from tasks.spec.attempt import Attempt

# Opens a scheduler that runs attempts like this example, for which this machine prepares while Ray
# starts.
OpenScheduler = Callable[[ExecutionOptions, Attempt], AbstractContextManager[Scheduler]]


@dataclass(frozen=True)
class Runtime:
    """The scheduler and the console of a sweep. Tests replace both."""

    open_scheduler: OpenScheduler
    console: Console


class SharedScheduler(ExitStack):
    """A scheduler that several runs use one after the other, so that Ray starts only once."""

    def __init__(self, open_scheduler: OpenScheduler) -> None:
        super().__init__()
        self._open_scheduler = open_scheduler
        self._scheduler: Scheduler | None = None

    def opened(
        self, execution: ExecutionOptions, example: Attempt
    ) -> AbstractContextManager[Scheduler]:
        """Return the scheduler, which is opened for the first run and stays open after each."""
        if self._scheduler is None:
            self._scheduler = self.enter_context(self._open_scheduler(execution, example))
        return nullcontext(self._scheduler)


def default_runtime(label: Label) -> Runtime:
    """Return a runtime that measures on Ray or in this process, and prints to the terminal."""
    console = SweepConsole(label)

    def open_scheduler(execution: ExecutionOptions, example: Attempt) -> Scheduler:
        if execution.scheduler == "serial":
            return SerialScheduler(console.notify, example)
        return RayScheduler(console.notify, execution.address, execution.cpu_cells, example)

    return Runtime(open_scheduler, console)
