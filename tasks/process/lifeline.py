"""End a process with the one that started it, however that one died."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading

_SET_SIGNAL = 10  # F_SETSIG of fcntl(2)


def die_with_parent(pipe: int) -> None:
    """Have the kernel kill this process's group when the other end of a pipe is closed.

    Only the parent holds the other end, and nobody writes to it.
    """
    if not sys.platform.startswith("linux"):
        threading.Thread(target=_kill_group_at_end_of, args=(pipe,), daemon=True).start()
        return
    # The kernel sends the signal itself: no thread or process watches, and a process that is stopped
    # or stuck in C dies as well. PR_SET_PDEATHSIG would kill this process when the thread that
    # started it ends, and would spare the processes that this one has started.
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, _SET_SIGNAL, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    closed, _, _ = select.select([pipe], [], [], 0)
    if closed:  # before the kernel watched it
        os.killpg(0, signal.SIGKILL)


def _kill_group_at_end_of(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
