"""The end of a sweep before its last cell: Ctrl-C, SIGTERM and the time limit, in one object.

All three raise one KeyboardInterrupt where the sweep may stop. After that, signals are ignored, so
that a second Ctrl-C does not interrupt the saving of results.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from types import FrameType
from typing import TypeVar

# Reserved from a time limit to end the running cells and to write cells.parquet.
SAVING_S = 5.0

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

Item = TypeVar("Item")


class StopReason(StrEnum):
    """A reason to end a sweep before its last cell."""

    SIGINT = "SIGINT"
    SIGTERM = "SIGTERM"
    TIME_LIMIT = "time limit"


class Interruption(ExitStack):
    """Owns the signal handlers of a sweep, and restores the earlier ones at the end.

    is_shared: several sweeps use it, one after the other. A signal between two of them is recorded,
    and the next one then measures nothing.
    deadline: monotonic time at which cells must end, so that saving ends within the time limit.
    reason: what stopped the sweep; None: nothing did.
    """

    def __init__(self, time_limit_s: float | None, is_shared: bool = False) -> None:
        super().__init__()
        self.is_shared = is_shared
        self.reason: StopReason | None = None
        self.deadline: float | None = None
        if time_limit_s is not None:
            self.deadline = time.monotonic() + time_limit_s - SAVING_S
        self._is_stoppable = False
        self._earlier = {number: signal.getsignal(number) for number in _SIGNALS}
        self.callback(self._restore)

    @contextmanager
    def stops_here(self) -> Iterator[None]:
        """End the body when a signal comes, at any point of it.

        The store withstands that as it withstands kill -9. A KeyboardInterrupt that does not come
        from here is raised again.
        """
        # An interrupted import cannot be repeated, and pyarrow imports pandas for its first table.
        import pandas  # noqa: F401

        self._is_stoppable = True
        self.install()
        try:
            try:
                yield
            finally:  # a signal before this line is caught below, and one after it raises nothing
                self._is_stoppable = False
        except KeyboardInterrupt:
            if self.reason is None:
                raise
        if self.reason is None and not self.is_shared:
            self._restore()

    @contextmanager
    def timer(self) -> Iterator[None]:
        """Let a signal come at the deadline, within `stops_here`.

        The body does not begin if the deadline is over, or if a signal came before. This is separate
        from `stops_here`, which catches only what is raised within its body.
        """
        left_s = math.inf if self.deadline is None else self.deadline - time.monotonic()
        if left_s <= 0:
            self.reason = self.reason or StopReason.TIME_LIMIT
        if self.reason is not None:
            raise KeyboardInterrupt
        if self.deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, left_s)
        yield

    def until_stopped(self, outcomes: Iterable[Item]) -> Iterator[Item]:
        """Yield the outcomes, and raise KeyboardInterrupt after one during which a signal came.

        Python drops an exception that comes up in a finalizer or in a callback of a library. The
        sweep would continue and ignore all further signals.
        """
        for outcome in outcomes:
            yield outcome
            if self.reason is not None:
                raise KeyboardInterrupt

    def install(self) -> None:
        """Install the handlers, again where something has replaced them: Ray takes SIGTERM."""
        for number in _SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        is_time_limit = number == signal.SIGALRM
        if is_time_limit and not self._is_stoppable:
            return  # all cells have ended within the limit
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        name = signal.Signals(number).name
        self.reason = StopReason.TIME_LIMIT if is_time_limit else StopReason[name]
        if self._is_stoppable:
            raise KeyboardInterrupt  # the one exception that Ray lets pass while it waits

    def _restore(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
