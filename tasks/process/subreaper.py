"""Kill the processes that a cell leaves running, even those in another session.

    python -I -S subreaper.py FD COMMAND…

runs a command that leads its own process group, kills what it leaves behind, and then ends. Into
the file descriptor FD it writes the command's process id when it has started, and its exit code
when it has ended, one per line. New processes are started through this script. The children of a
fork server do not need it, because the fork server is itself a subreaper.
"""

# The script runs by path with `-I -S`, which starts within milliseconds and is independent of the
# cell's environment. It may therefore import the standard library only.

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ORPHANS_S = 10.0  # a process that holds a GPU may take seconds to die
_ORPHANS_TICK_S = 0.001
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_CHILDREN = Path("/proc/thread-self/children")


def become_subreaper() -> None:
    """Make this process the parent of all orphans among its descendants (prctl(2))."""
    # Without /proc this process could not find the orphans to kill them, so init keeps them.
    if _CHILDREN.exists():
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans() -> None:
    """Kill all children, so that nothing runs during the next cell."""
    # A child in uninterruptible sleep, in a driver for example, cannot be killed.
    deadline = time.monotonic() + ORPHANS_S
    while (orphans := children()) and time.monotonic() < deadline:
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        # A killed process hands its own children to this one, so look again.
        time.sleep(_ORPHANS_TICK_S)


def children() -> set[int]:
    """Return the process ids of this process's children; empty without /proc."""
    try:
        return set(map(int, _CHILDREN.read_text().split()))
    except OSError:
        return set()


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    become_subreaper()
    process = subprocess.Popen(sys.argv[2:], close_fds=False, process_group=0)
    _write_line(descriptor, process.pid)
    code = process.wait()
    kill_orphans()
    _write_line(descriptor, code)


def _write_line(descriptor: int, number: int) -> None:
    # If the reader is dead, orphans must be killed all the same.
    with suppress(BrokenPipeError):
        os.write(descriptor, f"{number}\n".encode())


if __name__ == "__main__":
    main()
