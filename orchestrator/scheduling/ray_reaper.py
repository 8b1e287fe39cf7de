"""Ends what a killed driver leaves of its Ray: `python -m orchestrator.scheduling.ray_reaper SESSION`.

Ray's own agents notice only after a minute that their driver is gone, and what it has stopped they never end. This process
waits for the end of its standard input, then kills whatever was started with the session's mark in its environment, and
removes the session's folder.
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
    """What is being started while it looks is found in the next round."""
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
    """In a session of its own: what stops a driver's whole group leaves this the time to see to what is left."""
    sys.stdin.read()
    reap(sys.argv[1])


if __name__ == "__main__":
    main()
