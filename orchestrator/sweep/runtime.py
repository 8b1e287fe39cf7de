"""The live objects that a sweep uses: scheduler and display."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.sweep.console import Display
from tasks.spec.attempt import Attempt, StartMethod


@dataclass(frozen=True)
class Means:
    """How a run goes about it.

    open_scheduler: for attempts like the one it is given.
    mixed: whether results of another fingerprint may join those of the folder. start_method: of each cell's process.
    skip_predicted_oom: whether cells are left out that are predicted to run out of memory. say: tells the user what happens
    before the first cell begins.
    """

    open_scheduler: Callable[[Attempt], Scheduler]
    open_display: Callable[[int, Callable[[], float | None]], Display]
    time_limit_s: float | None = None
    mixed: bool = False
    take_over: bool = False  # of a bucket's folder that another driver owns
    start_method: StartMethod | None = None
    skip_predicted_oom: bool = False
    say: Callable[[str], None] = lambda text: None
