"""Where a measuring process stands: a breadcrumb that outlives a SIGKILL."""

from __future__ import annotations

import mmap
from pathlib import Path

_WIDTH = 64


class Progress:
    """The phase in work, kept in a page of memory shared with a file: some 0.2 µs to set, readable after any death."""

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


def read_phase(path: Path) -> str:
    """The phase that a process left behind; empty where it was in none, or never came so far."""
    return path.read_bytes().rstrip(b"\0").decode() if path.exists() else ""
