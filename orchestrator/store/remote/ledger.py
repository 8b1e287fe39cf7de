"""Which files of a working copy are the same at its place: by name, size and time of change here when they were carried.

A line is added for each, and a torn last one does not count: a file that is not in it is held against the one there.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path

_FILE = ".carried"
_Mark = tuple[int, int]


class Ledger:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, _Mark] = {}
        with suppress(OSError):
            for line in (folder / _FILE).read_text().splitlines():
                with suppress(ValueError):
                    name, size, changed = json.loads(line)
                    self._known[name] = size, changed

    def has(self, name: str) -> bool:
        """Whether it was carried as it is now, or was, where it is here no more."""
        here = _mark(self._folder / name)
        return name in self._known and here in (None, self._known[name])

    def add(self, name: str, mark: _Mark | None = None) -> None:
        """mark: of the file when it began to be carried, where that took place from here."""
        mark = mark or _mark(self._folder / name)
        if mark is not None:
            with self._lock, (self._folder / _FILE).open("a") as file:
                self._known[name] = mark
                file.write(f"\n{json.dumps([name, *mark])}")

    def mark(self, name: str) -> _Mark | None:
        """Of a file as it is now; None where there is none."""
        return _mark(self._folder / name)


def _mark(path: Path) -> _Mark | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
