"""owner.json in a bucket names the one driver that may write there.

A bucket has no locks. A driver that finds the file of another one is refused, unless that one wrote
into the same working copy, whose lock this driver holds by now, or the user takes the folder over.
Each driver compares the file with its own before every upload, so that one that was taken over stops
writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.common.errors import RunLocked, SweepError
from orchestrator.store.remote_folder import RemoteFolder, reaching

OWNER_FILE = "owner.json"


class Owner:
    """This process as the owner of a remote folder."""

    def __init__(self, remote: RemoteFolder, lock: Path) -> None:
        """lock: the locked file of the working copy, with a line for each driver that had it."""
        self._remote = remote
        *self._ended, this = lock.read_text().split("\n")
        self._content = json.dumps({"owner": this}).encode()

    def take(self, take_over: bool) -> None:
        """Write owner.json.

        Raise RunLocked if another driver owns the folder, ConfigError if it is read-only.
        """
        self._remote.require_not_read_only()
        with reaching(self._remote):
            before = self._remote.read(OWNER_FILE)
            if before is not None and not take_over and _name(before) not in self._ended:
                raise RunLocked(
                    f"{self._remote}: {_name(before)} writes to it",
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
                f"{self._remote}: {_name(content or b'')} has taken it over",
                "What was measured here stays here, and the next `sweep run` from here uploads it",
            )

    def release(self) -> None:
        """Remove owner.json, unless another driver has replaced it."""
        with suppress(SweepError):
            self.require()
            with reaching(self._remote):
                self._remote.remove(OWNER_FILE)


@contextmanager
def owned(remote: RemoteFolder, lock: Path, take_over: bool = False) -> Iterator[Owner]:
    """Own the folder during the body. lock: see `Owner`. Raise RunLocked or RunUnreachable."""
    owner = Owner(remote, lock)
    owner.take(take_over)
    try:
        yield owner
    finally:
        owner.release()


def _name(content: bytes) -> str:
    """Return the name of the driver in an owner.json, as the lock of its copy has it."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(content)
        if "owner" in found:
            return str(found["owner"])
        # Of older versions.
        return f"process {found['process']} on {found['host']} (since {found['time']})"
    return "another driver"
