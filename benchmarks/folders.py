"""Where a benchmark's sweeps measure: a results folder for each, which is gone afterwards or kept."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


@contextmanager
def new_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """A new one, so that every round measures all cells. keep: a folder in which a copy is left, however the round ends.

    Also where it is told to end. Without artifacts, caches and locks. What earlier rounds left stays: the second is `NAME-2`.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield Path(folder)
        finally:
            signal.signal(signal.SIGTERM, before)
            if keep:
                left = (keep / (name if number == 1 else f"{name}-{number}") for number in count(1))
                free = next(place for place in left if not place.exists())
                shutil.copytree(
                    folder, free, ignore=shutil.ignore_patterns("artifacts", "cache", ".lock")
                )
