"""Our own program: which one it is, and in a process of its own, `python -m tasks …`, by which whatever needs torch is done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from orchestrator.common.provenance import SOURCE_ROOT
from tasks.process import subreaper as adoption

PROGRAM = (
    sys.executable,
    "-P",
    "-m",
    "tasks",
)  # -P: not the `model.py` or `tasks.py` of the folder one is in
ADOPTING = (
    sys.executable,
    "-I",
    "-S",
    adoption.__file__,
)  # as quick as Python begins, whatever a cell's environment makes of it


def import_path(beyond: str | None = None) -> str:
    """PYTHONPATH for a process of ours: our packages first, wherever it is started. beyond: what follows, else this process's."""
    return os.pathsep.join(
        filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH") if beyond is None else beyond])
    )


@contextmanager
def lifeline() -> Iterator[int]:
    """A file descriptor for a process that leads a group of its own and is to end with the body, or with this process."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def start_bound(
    words: Sequence[str], environment: Mapping[str, str], said: int, passed: Sequence[int]
) -> tuple[subprocess.Popen[bytes], int]:
    """As `start`, of a process that ends when the file descriptor is closed that is given beside it, or with this process."""
    theirs, ours = os.pipe()
    try:
        return start(
            [*words, "--lifeline", str(theirs)], environment, said, [*passed, theirs]
        ), ours
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    said: int,
    passed: Sequence[int],
    before: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """said: the file descriptor of what takes all that it prints. passed: those that it has too. before: what it is run by."""
    return subprocess.Popen(
        [*before, *PROGRAM, *words],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=said,
        stderr=said,
        pass_fds=passed,
        start_new_session=True,
    )
