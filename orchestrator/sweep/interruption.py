"""Signals and the time limit of a sweep."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from orchestrator.sweep.result import Summary

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
SAVING_S = 5.0  # kept of a time limit for ending the cells and writing cells.parquet


@contextmanager
def restored_handlers() -> Iterator[None]:
    """What stops a run is handled after the body as it was before it."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(handler: Any) -> None:
    for number in _STOPS:
        signal.signal(number, handler)


@contextmanager
def stoppable(deadline: float | None, summary: Summary) -> Iterator[Callable[[], None]]:
    """Ctrl-C, a polite kill and the time limit end the body, once: what is still to be done then is not interrupted, nor is what
    follows on the body until its handlers are put back.

    They may strike anywhere in it: the store withstands that as it withstands a kill. Gives the function that installs
    the handlers, for after something else has taken them.
    """
    import pandas  # noqa: F401  an import that is interrupted cannot be done again, and pyarrow's first table has this one

    def stop(number: int, frame: FrameType | None) -> None:
        _handle(signal.SIG_IGN)
        summary.stopped = "time limit" if number == signal.SIGALRM else signal.Signals(number).name
        raise KeyboardInterrupt  # the one exception that Ray lets pass while it waits

    with restored_handlers():
        _handle(stop)
        if deadline is not None:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
        try:
            yield lambda: _handle(stop)
        except KeyboardInterrupt:
            if not summary.stopped:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    if summary.stopped:
        _handle(signal.SIG_IGN)
