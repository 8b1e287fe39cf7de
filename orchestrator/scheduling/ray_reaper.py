"""Kills the Ray processes of a dead driver: `python -m orchestrator.scheduling.ray_reaper SESSION`.

Ray's own agents notice only after a minute that their driver is gone, and never end a process that
is stopped. This process waits for the end of its standard input, then kills every process with the
session's mark in its environment, and removes the session's folder.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

MARK = "SWEEP_RAY_SESSION"
_ROUNDS = 20
_PAUSE_S = 0.1


def reap(session: str) -> None:
    """Kill the processes of a session. Those that start meantime are found in the next round."""
    for _ in range(_ROUNDS):
        found = list(_processes_of(session))
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        if not found:
            break
        time.sleep(_PAUSE_S)
    shutil.rmtree(session, ignore_errors=True)


def _processes_of(session: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == session:
                yield process


def main() -> None:
    """Wait for the driver to die. A signal to its process group does not reach this session."""
    sys.stdin.read()
    reap(sys.argv[1])


if __name__ == "__main__":
    main()
