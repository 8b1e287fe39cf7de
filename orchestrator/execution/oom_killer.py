"""What the kernel did meanwhile: whom it killed for want of memory, and what it said of that and of GPUs, if one may read it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_LOG = "/dev/kmsg"
_TELLING = r"NVRM: Xid|[Oo]ut of memory: Killed process|oom-kill:"
_RECORD_BYTES = 8192  # the kernel's own limit of one record
_MOST_LINES = 10
_COUNTERS = (  # by version of the control groups; both also count what was killed because the whole host was out of memory
    (r"^0::(.+)$", "/sys/fs/cgroup{}/memory.events"),
    (r"^\d+:(?:[\w,]+,)?memory(?:,[\w,]+)?:(.+)$", "/sys/fs/cgroup/memory{}/memory.oom_control"),
)
_OF_THE_HOST = Path("/proc/vmstat")
_COUNT = r"^oom_kill (\d+)$"


class OomKillerWatch:
    """From its beginning on."""

    def __enter__(self) -> Self:
        self._counter = _counter()
        self._before = _count(self._counter)
        self._log = _open_log()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._log is not None:
            os.close(self._log)

    def oom_kills(self) -> int:
        """How many processes it killed for want of memory: of our control group, or where that is not told of the host."""
        return _count(self._counter) - self._before

    def said(self) -> tuple[str, ...]:
        """What it said since it was asked last, of memory and of GPUs: at most the last ten lines."""
        texts = [record.split("\n")[0].partition(";")[2] for record in self._records()]
        return tuple(text for text in texts if re.search(_TELLING, text))[-_MOST_LINES:]

    def _records(self) -> Iterator[str]:
        """As many as there are to read by now. What was overwritten before it was read is passed over."""
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:
                continue
            except OSError:  # there is none
                return
            if not record:
                return
            yield record.decode(errors="replace")


def _counter() -> Path:
    groups = _text(Path("/proc/self/cgroup"))
    for pattern, place in _COUNTERS:
        for group in re.findall(pattern, groups, re.MULTILINE):
            path = Path(place.format("" if group == "/" else group))
            if re.search(_COUNT, _text(path), re.MULTILINE):
                return path
    return _OF_THE_HOST


def _count(path: Path) -> int:
    found = re.search(_COUNT, _text(path), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    """Empty where it cannot be read."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _open_log() -> int | None:
    """At its end."""
    with suppress(OSError):
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
        return log
    return None
