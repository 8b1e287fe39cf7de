"""What a cell leaves behind ends with it, also what is in a session of its own, beyond the end of the cell's process group.

    python -I -S adoption.py TOLD COMMAND…

runs a command that leads a group of its own, ends what it leaves behind, and then itself. Into the file descriptor TOLD goes the
command's process id when it has begun, and its exit code when it has ended, a line each. Fresh processes are begun so; of forked
ones their prepared parent sees to it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ORPHANS_S = 10.0  # for them to die: what holds a device may take its time
_ORPHANS_TICK_S = 0.001
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_CHILDREN = Path("/proc/thread-self/children")


def adopt_orphans() -> None:
    """Whatever a child leaves behind becomes ours.

    Where the system does not say what is ours, so that we could not end it, it stays init's.
    """
    if _CHILDREN.exists():
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_others(own: Collection[int] = ()) -> None:
    """Nothing of a cell is to be there beside the next."""
    until = time.monotonic() + ORPHANS_S
    while (orphans := children() - set(own)) and time.monotonic() < until:
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_ORPHANS_TICK_S)


def children() -> set[int]:
    """By their process ids; none where the system does not say."""
    try:
        return set(map(int, _CHILDREN.read_text().split()))
    except OSError:
        return set()


def main() -> None:
    told = int(sys.argv[1])
    os.set_inheritable(told, False)
    adopt_orphans()
    process = subprocess.Popen(sys.argv[2:], close_fds=False, process_group=0)
    _tell(told, process.pid)
    code = process.wait()
    end_others()
    _tell(told, code)


def _tell(told: int, number: int) -> None:
    with suppress(BrokenPipeError):  # who asked is dead: then what is left must end all the same
        os.write(told, f"{number}\n".encode())


if __name__ == "__main__":
    main()
