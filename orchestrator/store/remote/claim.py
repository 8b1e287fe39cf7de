"""Who writes at a place: an object that its driver writes anew every few seconds, and that lapses when it does not.

A place has no lock. Whoever comes writes a claim of his own, looks for others, and withdraws where there is one that lives: of
two at the same moment both may be sent away, and never both let in. How old a claim is goes by the clock there. One of a
process of this host that is no more is dead at once; another that is not heard of is dead after `LAPSE_S`. Whoever comes then
leaves a word beside it that it has lapsed, and removes it: should its driver come back, it finds that word, also where it has
just written its claim anew, and knows that it is driver no more. The word stays for a day.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from orchestrator.common.errors import RunLocked, SweepError
from orchestrator.store.remote.folder import Entry, RemoteFolder, reaching

BEAT_S = 10.0
LAPSE_S = 60.0
_FOLDER = "drivers"
_LAPSED = ".lapsed"
_FORGOTTEN_S = 86400.0
_CLOCK = getattr(
    time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC
)  # which also goes on while a laptop sleeps
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_OTHER = "Wait for it, stop it, or name another folder with --out"


class Claim:
    def __init__(self, place: RemoteFolder) -> None:
        self._place = place
        self._name = f"{_FOLDER}/{secrets.token_hex(8)}.json"
        self._content = json.dumps(
            {**_who(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
        ).encode()
        self._ended = threading.Event()
        self._lost = False
        self._heard_s = 0.0
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def take(self) -> None:
        """Raises RunLocked, saying who is at work there, or RunUnreachable."""
        with reaching(self._place):
            self._place.put(self._name, self._content)
            entries = self._place.entries(_FOLDER)
            now = entries[self._name].at
            for name, entry in entries.items():
                if name == self._name:
                    continue
                if name.endswith(_LAPSED):
                    if _silent_s(entry, now) > _FORGOTTEN_S:
                        self._place.remove(name)
                    continue
                content = self._place.read(name)
                if content is None:
                    continue
                who = _read(content)
                silent_s = _silent_s(entry, now)
                if silent_s < LAPSE_S and not _is_dead(who):
                    self._place.remove(self._name)
                    raise RunLocked(
                        f"{self._place}: another driver is at work in it: {_said(who)}",
                        _remedy(silent_s),
                    )
                self._place.put(name + _LAPSED, b"")
                self._place.remove(name)
        self._heard_s = _clock()
        self._thread.start()

    def require(self) -> None:
        """Raises RunLocked where another driver has taken the place over, since this one was not heard of."""
        if self._lost:
            raise RunLocked(
                f"{self._place}: was not reached for so long that another driver has taken it over",
                f"What was measured is kept. {_OTHER}",
            )

    def require_now(self) -> None:
        """The same, and asks there first where this driver was not heard of for long. Raises RunUnreachable, too."""
        if _clock() - self._heard_s > LAPSE_S - BEAT_S:
            with reaching(self._place):
                self._renew()
        self.require()

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(SweepError), reaching(self._place):
            self._place.remove(self._name)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(Exception):  # whatever keeps us from there now may not do so next time
                self._renew()
            if self._lost:
                return

    def _renew(self) -> None:
        found = self._place.entries(_FOLDER)
        if self._name not in found or self._name + _LAPSED in found:
            self._lost = True
            return
        self._place.put(self._name, self._content)
        self._heard_s = _clock()


@contextmanager
def claimed(place: RemoteFolder) -> Iterator[Claim]:
    claim = Claim(place)
    claim.take()
    try:
        yield claim
    finally:
        claim.release()


def _who() -> dict[str, Any]:
    """This process, told from all others: also from one of that number in another container, or before or after it."""
    return {
        "host": socket.gethostname(), "boot": _boot(), "processes": _processes(), "pid": os.getpid(),
        "began": psutil.Process().create_time(),
    }  # fmt: skip


def _boot() -> str:
    """Of this host, which another one of its name has not; empty where that is not told."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _clock() -> float:
    return time.clock_gettime(_CLOCK)


def _processes() -> int:
    """Which numbers of processes are meant: a container has its own."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def _read(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(content)
        return found if isinstance(found, dict) else {}
    return {}


def _is_dead(who: dict[str, Any]) -> bool:
    if not _boot() or (who.get("host"), who.get("boot"), who.get("processes")) != (
        socket.gethostname(),
        _boot(),
        _processes(),
    ):
        return False
    with suppress(psutil.Error, KeyError, TypeError, ValueError):
        return bool(abs(psutil.Process(who["pid"]).create_time() - who["began"]) > 1)
    return True


def _silent_s(entry: Entry, now: datetime | None) -> float:
    return (now - entry.at).total_seconds() if now and entry.at else 0.0


def _said(who: dict[str, Any]) -> str:
    return (
        f"process {who['pid']} on {who.get('host')} since {who.get('since')}"
        if "pid" in who
        else "unknown"
    )


def _remedy(silent_s: float) -> str:
    lapses = f"It was heard of {silent_s:.0f} s ago: if it was killed, its claim lapses in {max(1.0, LAPSE_S - silent_s):.0f} s"
    return f"{_OTHER}. {lapses}" if silent_s > BEAT_S else _OTHER
