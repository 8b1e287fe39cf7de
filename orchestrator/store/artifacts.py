"""The files of an attempt that people read: the end of its log and how to measure it again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.store.plain_files import is_plain
from orchestrator.store.run import Run
from tasks.spec.attempt import LOG_FILE, RERUN_FILE

_LINES = 20
_TAIL_BYTES = 16_384  # a log may be larger than memory
_NOT_READ = "(a link or a pipe: not read)"


@dataclass(frozen=True)
class Artifacts:
    """Texts of an attempt's folder, each empty if its file is missing."""

    log: tuple[str, ...]  # its last lines
    rerun_command: str


def read_artifacts(run: Run, cell: str, number: int) -> Artifacts:
    """Return what people read of an attempt. Attempts before rerun.sh existed have no command."""
    folder = run.attempt_folder(cell, number)
    log = _tail(folder / LOG_FILE, run)
    return Artifacts(tuple(log.splitlines()[-_LINES:]), _tail(folder / RERUN_FILE, run).strip())


def _tail(path: Path, run: Run) -> str:
    """Return the end of a text file, or an empty text if it is missing."""
    if not is_plain(path, run.folder.absolute()):
        return _NOT_READ if os.path.lexists(path) else ""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
