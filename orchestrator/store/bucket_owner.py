"""owner.json in a bucket names the one driver that may write there.

A bucket has no locks. A driver that finds the file of another one is refused, unless that process
is known to be dead or the user takes the folder over. Each driver compares the file with its own
before every upload, so that one that was taken over stops writing.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from orchestrator.common.errors import RunLocked, SweepError
from orchestrator.store.remote_folder import RemoteFolder, reaching

OWNER_FILE = "owner.json"


class Owner:
    """This process as the owner of a remote folder."""

    def __init__(self, remote: RemoteFolder) -> None:
        self._remote = remote
        self._content = json.dumps(_this_process()).encode()

    def take(self, take_over: bool) -> None:
        """Write owner.json.

        Raise RunLocked if another driver owns the folder, ConfigError if it is read-only.
        """
        self._remote.require_not_read_only()
        with reaching(self._remote):
            before = self._remote.read(OWNER_FILE)
            if before is not None and not take_over:
                other = _parse(before)
                if not _is_dead(other):
                    raise RunLocked(
                        f"{self._remote}: {_describe(other)} writes to it",
                        "Wait for it, or add --take-over if it was killed",
                    )
            self._remote.put(OWNER_FILE, self._content)
        # Of two drivers that start in the same moment, the one that wrote first sees the other's
        # file here, or before its first upload.
        self.require()

    def require(self) -> None:
        """Raise RunLocked if another driver has taken the folder over since."""
        with reaching(self._remote):
            content = self._remote.read(OWNER_FILE)
        if content != self._content:
            raise RunLocked(
                f"{self._remote}: {_describe(_parse(content or b''))} has taken it over",
                "What was measured here stays here, and the next `sweep run` from here uploads it",
            )

    def release(self) -> None:
        """Remove owner.json, unless another driver has replaced it."""
        with suppress(SweepError):
            self.require()
            with reaching(self._remote):
                self._remote.remove(OWNER_FILE)


@contextmanager
def owned(remote: RemoteFolder, take_over: bool = False) -> Iterator[Owner]:
    """Own the folder during the body. Raise RunLocked or RunUnreachable."""
    owner = Owner(remote)
    owner.take(take_over)
    try:
        yield owner
    finally:
        owner.release()


def _this_process() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "process_started": psutil.Process().create_time(),
    }


def _machine() -> str:
    # A host name is not enough: containers on one machine may share it, although each has its own
    # process ids.
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def _parse(content: bytes) -> Mapping[str, object]:
    with suppress(ValueError):
        found = json.loads(content)
        if isinstance(found, dict):
            return found
    return {}


def _is_dead(owner: Mapping[str, object]) -> bool:
    # Only of a process of this machine can be known that it has ended.
    this = _this_process()
    place = this["host"], this["machine"]
    if not this["machine"] or (owner.get("host"), owner.get("machine")) != place:
        return False
    process, recorded = owner.get("process"), owner.get("process_started")
    if not isinstance(process, int) or not isinstance(recorded, int | float):
        return False
    try:
        started = psutil.Process(process).create_time()
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False
    # Process ids are used again. psutil derives the start from the clock, which may be adjusted.
    return abs(started - recorded) > 1


def _describe(owner: Mapping[str, object]) -> str:
    if "process" not in owner:
        return "another driver"
    return f"process {owner['process']} on {owner.get('host')} (since {owner.get('time')})"
