"""Limits of this process are found before a library in C ends the process."""

from __future__ import annotations

import errno
import resource
import threading

import pytest

from orchestrator.common import limits
from orchestrator.common.limits import limit_error, require_threads


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Threads that were started; no more than three can run."""
    running: list[threading.Thread] = []
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if len(running) == 3:
            raise RuntimeError("can't start new thread")
        running.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    return running


def test_threads_that_cannot_be_started_are_a_limit(
    started: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (20, 20))
    stack = threading.stack_size()
    with pytest.raises(OSError, match="Resource temporarily unavailable") as raised:
        require_threads(4)
    assert raised.value.errno == errno.EAGAIN
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)
    assert threading.stack_size() == stack
    assert "ulimit -u" in str(limit_error(raised.value))


@pytest.mark.parametrize("most", [resource.RLIM_INFINITY, 60_000])
def test_threads_are_not_started_where_there_is_room(
    most: int, started: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (most, most))
    require_threads(4)
    assert not started
