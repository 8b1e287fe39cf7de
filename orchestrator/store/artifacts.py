"""The files of an attempt that people read: the end of its log and how to measure it again."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from orchestrator.common.frames import DUMPED, own_frames, without_other_frames
from orchestrator.common.text import shell_command
from orchestrator.store.layout import ARTIFACTS
from orchestrator.store.run import Run
from orchestrator.store.untrusted_files import is_plain
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE, rank_file

_LINES = 20
_TAIL_BYTES = 16_384  # a log may be larger than memory
_NOT_READ = "(a link or a pipe: not read)"


@dataclass(frozen=True)
class Artifacts:
    """Texts of an attempt's folder, each empty if its file is missing, and where the log is."""

    log: tuple[str, ...]  # its last lines, without the frames of other code than the user's
    log_file: Path
    own_frames: tuple[str, ...]  # of a hang or a crash, the innermost first
    rerun_command: str


def read_artifacts(run: Run, cell: str, number: int, evidence: str = "{}") -> Artifacts:
    """Return what people read of an attempt. Attempts before rerun.sh existed have no command.

    evidence: of the attempt, as JSON. The log is that of the rank at fault, if it names one.
    """
    folder, rank = run.attempt_folder(cell, number), json.loads(evidence).get("rank")
    # The row may be of somebody else, and a text would lead to another file.
    log_file = rank_file(folder / LOG_FILE, rank if isinstance(rank, int) and rank > 0 else 0)
    log = _tail(log_file).splitlines()
    command = _tail(folder / RERUN_FILE).strip()
    return Artifacts(
        tuple(without_other_frames(log)[-_LINES:]),
        log_file,
        tuple(own_frames(list(filter(DUMPED.match, log)))),
        _of_present_folder(command, folder),
    )


def _of_present_folder(command: str, folder: Path) -> str:
    """Return the command that measures an attempt by hand, also if its run was moved since.

    folder: the present folder of the attempt.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # of somebody else
        words = []
    if not words or Path(words[-1]).parts[-4:] != (ARTIFACTS, *folder.parts[-2:], ATTEMPT_FILE):
        return command
    earlier, present = str(Path(words[-1]).parents[3]), str(folder.parents[2])
    return shell_command(word.replace(earlier, present) for word in words)


def _tail(path: Path) -> str:
    """Return the end of a text file of an attempt, or an empty text if it is missing."""
    # Asked first: most published attempts have no files, and looking for links takes longer.
    if not os.path.lexists(path):
        return ""
    if not is_plain(path, path.parents[3]):
        return _NOT_READ
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
