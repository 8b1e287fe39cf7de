"""Watches the kernel while a cell runs: its out-of-memory killer, and its log lines on GPUs.

A process that the kernel kills for want of memory dies of a plain SIGKILL. Only the kernel's
counters tell it from any other.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Self

_KERNEL_LOG = "/dev/kmsg"
_RELEVANT = r"NVRM: Xid|[Oo]ut of memory: Killed process|oom-kill:"
_RECORD_BYTES = 8192  # the kernel's own limit of one record
_MAX_LINES = 10
# Version 2 and version 1 of control groups. Both counters include processes of the group that were
# killed because the whole host was out of memory.
_GROUP_COUNTERS = (
    (r"^0::(.+)$", "/sys/fs/cgroup{}/memory.events"),
    (r"^\d+:(?:[\w,]+,)?memory(?:,[\w,]+)?:(.+)$", "/sys/fs/cgroup/memory{}/memory.oom_control"),
)
_HOST_COUNTER = Path("/proc/vmstat")
_COUNT = r"^oom_kill (\d+)$"


class OomKillerWatch:
    """Counts the kernel's out-of-memory kills from the beginning of the block."""

    def __enter__(self) -> Self:
        self._counter, self._before = _find_counter()
        self._log: int | None = None
        with suppress(OSError):  # it needs a permission
            self._log = os.open(_KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._log, 0, os.SEEK_END)
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is not None:
            os.close(self._log)

    def oom_kills(self) -> int:
        """Return how many processes of our control group were killed.

        Where the group has no counter, those of the whole host count.
        """
        found = re.search(_COUNT, _read_text(self._counter), re.MULTILINE)
        return (int(found[1]) if found else 0) - self._before

    def lines(self) -> tuple[str, ...]:
        """Return the kernel's new lines on memory and GPUs, at most the last ten."""
        lines = []
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD_BYTES).decode(errors="replace")
            except BrokenPipeError:
                continue  # the kernel overwrote unread records; the next read skips them
            except OSError:
                break  # EAGAIN: there is no further record
            if not record:
                break
            # A record is "priority,number,time,flags;text" with more lines of properties.
            text = record.split("\n")[0].partition(";")[2]
            if re.search(_RELEVANT, text):
                lines.append(text)
        return tuple(lines[-_MAX_LINES:])


def _find_counter() -> tuple[Path, int]:
    """Return the counter of our control group, else that of the host, and its value."""
    groups, paths = _read_text(Path("/proc/self/cgroup")), []
    for pattern, template in _GROUP_COUNTERS:
        for group in re.findall(pattern, groups, re.MULTILINE):
            paths.append(Path(template.format(group.rstrip("/"))))
    for path in (*paths, _HOST_COUNTER):
        if found := re.search(_COUNT, _read_text(path), re.MULTILINE):
            return path, int(found[1])
    return _HOST_COUNTER, 0


def _read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text()
    return ""
