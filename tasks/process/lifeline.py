"""End a measuring process with its parent, however the parent died."""

from __future__ import annotations

import errno
import os
import signal
from typing import NoReturn

_MOST_DESCRIPTORS = 1024


def die_with_parent(pipe: int) -> None:
    """Kill this process's group when `pipe` reaches end-of-file. Call it before threads start.

    Only the parent holds the other end of the pipe. Raise OSError if no process can be started.
    """
    # A forked process watches it: unlike a thread it needs no interpreter lock, and it still runs
    # while this process is stopped or stuck in C. Unlike the kernel's death signal
    # (PR_SET_PDEATHSIG) it also kills the processes that this one has started. It is not a child
    # of this process: a model that calls os.wait() would wait for it until the cell's time limit.
    between = os.fork()
    if between == 0:
        code = 1
        try:
            if os.fork() == 0:
                _kill_group_at_end_of(pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(pipe)
    if os.waitpid(between, 0)[1] != 0:
        raise OSError(errno.EAGAIN, "no process could be started to watch the lifeline")


def _kill_group_at_end_of(pipe: int) -> NoReturn:
    # An inherited pipe or socket that stays open here would never reach end-of-file at its other
    # end, and its reader would take this process for the one that is watched.
    os.closerange(0, pipe)
    os.closerange(pipe + 1, _MOST_DESCRIPTORS)
    while os.read(pipe, 1):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
