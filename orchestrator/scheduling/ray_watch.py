"""Watches the two processes of a private Ray without which no cell can be measured.

If gcs_server dies, Ray notices after a minute, and then ends the driver from C++ with exit code 1.
If the raylet hangs, `ray.wait` does not return, whatever its time-out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from orchestrator.common.errors import EXIT_USER, NoNodeLeft
from orchestrator.common.text import format_seconds
from orchestrator.scheduling.ray_reaper import has_ended

_VITAL = ("gcs_server", "raylet")
_LOOK_EVERY_S = 0.25
# For the scheduler to end the sweep by itself. It cannot if it waits for the dead process.
_END_S = 3.0
# For a call that a working Ray answers within a second. A host under load takes longer.
_CALL_S = 120.0


class RayWatch:
    """Notices that gcs_server or raylet, both children of this process, has died or hangs.

    The scheduler calls `require_alive` between events, and Ray within `call`. If this process is
    in a call of Ray's that does not return, the watch ends it as `kill -9` would: what was measured
    is stored.

    Attributes:
        fault: what is wrong with Ray, or empty.
    """

    def __init__(self) -> None:
        self.fault = ""
        self._call: object | None = None  # a new one for each
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, before the processes are ended on purpose."""
        self._stopped.set()
        self._thread.join()

    def require_alive(self) -> None:
        """Raise NoNodeLeft if a process has died."""
        if self.fault:
            raise ray_error(self.fault)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Limit the time of a call that Ray answers within a second."""
        self._call = object()
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        found: dict[str, psutil.Process] = {}
        call, waited_s = None, 0.0
        while not self.fault:
            if self._stopped.wait(_LOOK_EVERY_S):
                return
            if len(found) < len(_VITAL):
                found |= _vital_children()
            # Not by a clock: it goes on while this process is stopped, by Ctrl-Z for example.
            waited_s = waited_s + _LOOK_EVERY_S if call is not None and call is self._call else 0.0
            call = self._call
            self.fault = _fault(found, waited_s)
        if not self._stopped.wait(_END_S):
            with suppress(OSError):
                os.write(2, f"sweep: {ray_error(self.fault)}\n".encode())
            os._exit(EXIT_USER)


def _fault(found: Mapping[str, psutil.Process], waited_s: float) -> str:
    for name, process in found.items():
        if has_ended(process):
            return died(name)
    if waited_s > _CALL_S:
        return f"Ray on this machine has not answered for {format_seconds(waited_s)}"
    return ""


def _vital_children() -> dict[str, psutil.Process]:
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process().children():
            with suppress(psutil.Error):
                if process.name() in _VITAL:
                    found[process.name()] = process
    return found


def died(name: str) -> str:
    """Return the sentence that one of Ray's own processes has died."""
    return f"Ray's {name} on this machine has died"


def ray_error(fault: str) -> NoNodeLeft:
    """Return the error of a sweep whose private Ray can measure nothing any longer."""
    remedy = "Run again: finished cells are not measured again. --scheduler serial needs no Ray"
    return NoNodeLeft(fault, remedy)
