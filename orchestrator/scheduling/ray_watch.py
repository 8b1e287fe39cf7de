"""Watches the two processes of a private Ray without which no cell can be measured.

If gcs_server dies, Ray notices after a minute, and then ends the driver from C++ with exit code 1.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import psutil

from orchestrator.common.errors import EXIT_USER, NoNodeLeft
from orchestrator.scheduling.ray_reaper import has_ended

_VITAL = ("gcs_server", "raylet")
_LOOK_EVERY_S = 0.25
# For the scheduler to end the sweep by itself. It cannot if it waits for the dead process.
_END_S = 3.0


class RayWatch:
    """Notices that gcs_server or raylet, both children of this process, has died.

    The scheduler calls `require_alive` between events. If this process is in a call of Ray's that
    does not return, the watch ends it as `kill -9` would: what was measured is stored.
    """

    def __init__(self) -> None:
        self.died = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, before the processes are ended on purpose."""
        self._stopped.set()
        self._thread.join()

    def require_alive(self) -> None:
        """Raise NoNodeLeft if a process has died."""
        if self.died:
            raise died_error(self.died)

    def _watch(self) -> None:
        found: dict[str, psutil.Process] = {}
        while not self.died:
            if self._stopped.wait(_LOOK_EVERY_S):
                return
            if len(found) < len(_VITAL):
                found |= _vital_children()
            self.died = next((name for name in found if has_ended(found[name])), "")
        if not self._stopped.wait(_END_S):
            with suppress(OSError):
                os.write(2, f"sweep: {died_error(self.died)}\n".encode())
            os._exit(EXIT_USER)


def _vital_children() -> dict[str, psutil.Process]:
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if process.name() in _VITAL:
                    found[process.name()] = process
    return found


def died_error(name: str) -> NoNodeLeft:
    """Return the error of a sweep that has lost one of Ray's own processes."""
    return NoNodeLeft(
        f"Ray's {name} on this machine has died", "Run again: finished cells are not measured again"
    )
