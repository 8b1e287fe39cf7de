"""Ends the Ray processes of a dead driver: `python -m orchestrator.scheduling.ray_reaper SESSION`.

Ray's own agents notice only after a minute that their driver is gone, and never end a process that
is stopped. This process reads its standard input until the driver closes it or dies. It then kills
every process of the session and removes the session's folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.process.minder import set_title

MARK = "SWEEP_RAY_SESSION"  # a variable with the session's folder
RAY_FOLDER = "r"  # Ray's files in the session's folder; a short name, since sockets lie in it
_LIMIT_S = 5.0
_PAUSE_S = 0.1


def reap(session: str, known: Iterable[psutil.Process] = ()) -> None:
    """Kill the processes of a session and remove its folder.

    Args:
        known: processes that belonged to it when they were seen.
    """
    deadline = time.monotonic() + _LIMIT_S
    # A process that starts another while it is killed needs a second round.
    while (found := find_processes(session, known)) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(_PAUSE_S)
    shutil.rmtree(session, ignore_errors=True)


def find_processes(session: str, known: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
    """Return the processes of a session that run, with all their descendants.

    They have the session's mark in their environment or write to Ray's files, or are known. This
    process and its parent, the driver, are left out.
    """
    written = os.path.join(os.path.realpath(session), RAY_FOLDER, "")
    pending, children = list(known), defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
            # Ray's agents and workers call setproctitle, which may write their title over the
            # memory that holds their environment. Each has a log file of Ray's open.
            files = written_files(process.pid)
            if _has_mark(process, session) or any(file.startswith(written) for file in files):
                pending.append(process)
    found = set[psutil.Process]()
    while pending:
        process = pending.pop()
        if process in found or process.pid in (os.getpid(), os.getppid()) or has_ended(process):
            continue
        found.add(process)
        pending += children[process.pid]
    return found


def _has_mark(process: psutil.Process, session: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(MARK) == session
    return False


def written_files(pid: int) -> list[str]:
    """Return the files that a process has open for writing, or an empty list without /proc."""
    files, folder = [], Path(f"/proc/{pid}/fd")
    with suppress(OSError):  # it has ended, or is another user's
        for link in list(folder.iterdir()):
            with suppress(OSError):
                # Others may read Ray's logs, and a driver that removes the folders of dead drivers
                # opens them for reading.
                if link.lstat().st_mode & stat.S_IWUSR:
                    files.append(os.readlink(link))
    return files


def has_ended(process: psutil.Process) -> bool:
    """Return True for a process that does not exist or that nobody has waited for."""
    # psutil takes zombies for running. Nobody waits for them in a container without an init.
    with suppress(psutil.Error):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def main() -> None:
    """Wait for the driver to die. A signal to its process group does not reach this session."""
    session, known = sys.argv[1], set[psutil.Process]()
    set_title("reaper of Ray")
    # The driver writes a line when Ray is up: what lives then may later hide or lose its parent.
    for _ in sys.stdin:
        known |= find_processes(session)
    reap(session, known)


if __name__ == "__main__":
    main()
