"""Detection of an exceeded limit of an attempt: the timeout or `host_memory_gib`.

child_supervision.py ends the process.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import psutil

from orchestrator.common.units import GIB
from tasks.process.journal import read_journal
from tasks.spec.attempt import BEFORE_ITS_TASK, JOURNAL_FILE, PREPARATION_S, Attempt


@dataclass(frozen=True)
class ExceededLimit:
    """A time limit that passed before the attempt was `goal`, such as "done"."""

    goal: str
    limit_s: float


class Timeout:
    """The time that an attempt may take: first to prepare, then for its own task."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._since = time.monotonic()
        # How long importing torch takes depends on the file system and on what else starts, not on
        # the cell. Its own limit counts from the start of its task.
        self._limit = ExceededLimit("ready to begin", PREPARATION_S)
        self._own_limit = ExceededLimit("done", attempt.settings.timeout_s)

    def exceeded(self) -> ExceededLimit | None:
        """Return the limit that has passed, if one has."""
        if self._limit is not self._own_limit:
            stage = read_journal(self._attempt.path / JOURNAL_FILE).stage
            if stage not in BEFORE_ITS_TASK:
                self._limit, self._since = self._own_limit, time.monotonic()
        if time.monotonic() - self._since > self._limit.limit_s:
            return self._limit
        return None


def bytes_over_limit(pid: int, limit_gib: float | None) -> int | None:
    """Return the resident set in bytes of the largest process of a tree, or None below the limit.

    pid: the root of the tree, which may run under a profiler or start workers.
    """
    if limit_gib is None:
        return None
    tree: list[psutil.Process] = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        tree = [process, *process.children(recursive=True)]
    # Forked processes share pages, so the largest process counts, and not the sum.
    largest = 0
    for one in tree:
        with suppress(psutil.Error):  # it may have ended since
            largest = max(largest, one.memory_info().rss)
    return largest if largest > limit_gib * GIB else None
