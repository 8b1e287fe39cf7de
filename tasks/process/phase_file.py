"""The phase that a measuring process is in, or what it waits for, readable after it was killed."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WIDTH = 64  # bytes; longer names are cut


class Progress:
    """The current phase, in a page of memory that is shared with a file, if there is one."""

    # Setting a phase takes about 0.2 µs, little enough to do within a timed step. The kernel writes
    # the page to the file, also after SIGKILL.

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._page = mmap.mmap(-1, _WIDTH)
        else:
            with path.open("w+b") as file:
                file.truncate(_WIDTH)
                self._page = mmap.mmap(file.fileno(), _WIDTH)

    @property
    def phase(self) -> str:
        return self._page[:].rstrip(b"\0").decode()

    @phase.setter
    def phase(self, name: str) -> None:
        self._page[:] = name.encode()[:_WIDTH].ljust(_WIDTH, b"\0")

    @contextmanager
    def waiting(self, place: str, limit_s: float) -> Iterator[None]:
        """Show that this process waits at a place for other ranks, which may take so long."""
        before = self.phase
        self.phase = waiting_page(place, limit_s)
        yield
        self.phase = before


def waiting_page(place: str, limit_s: float) -> str:
    """Return the page of a process that waits for other ranks."""
    return f"waits {limit_s:g} s at {place}"


def read_page(path: Path) -> str:
    """Return what a process last wrote to its page; empty if it never started."""
    if path.exists():
        return path.read_bytes().rstrip(b"\0").decode()
    return ""


def read_phase(path: Path) -> str:
    """Return the phase that a dead process was in; empty if it was in none, or waited for ranks."""
    page = read_page(path)
    return "" if parse_wait(page) else page


def parse_wait(page: str) -> tuple[float, str] | None:
    """Return the limit in seconds and the place of a process that waits; None if it does not."""
    found = re.fullmatch(r"waits ([\d.e+-]+) s at (.*)", page)
    return (float(found[1]), found[2]) if found else None
