"""Results folders for the sweeps of a benchmark: temporary, with a copy if the user wants one."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_NOT_COPIED = shutil.ignore_patterns("artifacts", "cache", ".lock")


@contextmanager
def new_folder(name: str, keep: Path | None) -> Iterator[Path]:
    """Provide an empty folder, so that every round measures all cells and compiles afresh.

    keep: the folder for a copy, which is written even if the round fails or SIGTERM ends it. The
        copy of a second round is `NAME-2`.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        # By default SIGTERM ends Python without running `finally`.
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            yield Path(folder)
        finally:
            signal.signal(signal.SIGTERM, before)
            if keep:
                shutil.copytree(folder, _free_path(keep, name), ignore=_NOT_COPIED)


def _free_path(folder: Path, name: str) -> Path:
    path = folder / name
    for number in count(2):
        if not path.exists():
            break
        path = folder / f"{name}-{number}"
    return path
