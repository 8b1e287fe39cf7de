"""A driver that is the first process of a container, as in `docker run IMAGE sweep run …`, has an init beside it.

Whatever loses its parent becomes a child of the first process, and stays a zombie until that waits for it. A sweep leaves one or
two a cell, and a container may hold but so many.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def go_on_behind_an_init() -> None:
    """Where this is the first process, it stays as one that buries the dead; its child goes on, and it ends as that does."""
    if os.getpid() == 1:
        become_init()


def become_init() -> None:
    """Returns in a child alone."""
    sys.stdout.flush()
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, FORWARDED
    )  # none is lost before there is somebody to forward it
    driver = os.fork()
    if driver == 0:
        os.setpgid(0, 0)  # a terminal's Ctrl-C then comes by way of the init, and once
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return

    def forward(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(driver, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while True:
        ended, status = os.wait()
        if ended == driver:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
