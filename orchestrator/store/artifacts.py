"""The files of an attempt that people read: the end of its log and how to measure it again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.store.run import Run
from tasks.spec.attempt import LOG_FILE, RERUN_FILE

_LINES = 20
_TAIL_BYTES = 16_384  # a log may be larger than memory


@dataclass(frozen=True)
class Artifacts:
    """Texts of an attempt's folder, each empty if its file is missing."""

    log: tuple[str, ...]  # its last lines
    rerun_command: str


def read_artifacts(run: Run, cell: str, number: int) -> Artifacts:
    """Return what people read of an attempt. Attempts before rerun.sh existed have no command."""
    folder = run.attempt_folder(cell, number)
    log, command = "", ""
    with suppress(OSError):
        log = _tail(folder / LOG_FILE)
    with suppress(OSError):
        command = (folder / RERUN_FILE).read_text().strip()
    return Artifacts(tuple(log.splitlines()[-_LINES:]), command)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
