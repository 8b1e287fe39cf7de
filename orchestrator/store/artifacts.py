"""What an attempt left in its folder, as people read it: the end of its log, and how to measure it again by hand."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.execution.attempt import rerun_command
from orchestrator.store.run import Run
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, Attempt

_LINES = 20
_TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Artifacts:
    """log: its last lines. by_hand: a command of the shell. Each is empty where the folder does not have it."""

    log: tuple[str, ...]
    by_hand: str


def read_artifacts(run: Run, cell: str, number: int) -> Artifacts:
    folder = run.attempt_folder(cell, number)
    log, command = "", ""
    with suppress(OSError):
        log = _tail(folder / LOG_FILE)
    with suppress(
        OSError, ValueError, KeyError, TypeError
    ):  # not here, torn, or of a task that has changed since
        command = rerun_command(Attempt.from_json((folder / ATTEMPT_FILE).read_text()))
    return Artifacts(tuple(log.splitlines()[-_LINES:]), command)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
