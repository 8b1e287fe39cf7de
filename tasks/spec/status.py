"""How an attempt ended."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Final status of an attempt. A cell without an attempt is pending and has no row."""

    OK = "ok"
    OOM = "oom"  # out of the device's memory, or over the cap on it
    OOM_INFERRED = "oom_inferred"  # not measured: a cell that needs no more memory ran out of it
    HOST_OOM = "host_oom"  # out of the host's memory
    TIMEOUT = "timeout"
    CRASHED = "crashed"  # ended by a signal, or without a final line in its journal
    FAILED = "failed"  # an exception
    SKIPPED = "skipped"  # cannot be measured on this hardware; the evidence has the reason
    LOST = "lost"  # its node or its supervisor disappeared

    @property
    def is_retried(self) -> bool:
        """True if a second attempt may succeed: the error may lie outside of the cell."""
        return self in _RETRIED

    @property
    def is_environmental(self) -> bool:
        """True if the attempt says nothing about its cell, so that it does not count as a try."""
        return self is Status.LOST


_RETRIED = frozenset({Status.FAILED, Status.CRASHED, Status.TIMEOUT, Status.HOST_OOM, Status.LOST})
