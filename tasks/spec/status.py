"""The final status of an attempt."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Final status of an attempt, explained in tables.py.

    A cell without an attempt is pending and has no row.
    """

    OK = "ok"
    OOM = "oom"
    OOM_INFERRED = "oom_inferred"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    FAILED = "failed"
    SKIPPED = "skipped"
    LOST = "lost"

    @property
    def is_retried(self) -> bool:
        """True if a second attempt may succeed: the error may lie outside of the cell."""
        return self in _RETRIED

    @property
    def is_environmental(self) -> bool:
        """True if the attempt says nothing about its cell, so that it does not count as a try."""
        return self is Status.LOST


# Statuses of cells that do not fit: into the GPU, measured or inferred, or into the host.
OUT_OF_MEMORY = (Status.OOM.value, Status.OOM_INFERRED.value, Status.HOST_OOM.value)
_RETRIED = frozenset({Status.FAILED, Status.CRASHED, Status.TIMEOUT, Status.HOST_OOM, Status.LOST})
