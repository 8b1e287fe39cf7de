"""owner.json in a bucket names the one driver that may write there.

A bucket has no locks. A driver that finds the file of another one is refused, unless that one wrote
into the same working copy, whose lock this driver holds by now, or the user takes the folder over.
Each driver compares the file with its own before every upload, so that one that was taken over stops
writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.common.errors import RunLocked, SweepError
from orchestrator.store.remote_folder import RemoteFolder, reaching

OWNER_FILE = "owner.json"


@contextmanager
def owned(remote: RemoteFolder, lock: Path, take_over: bool) -> Iterator[Callable[[], None]]:
    """Own the folder during the body. Yield a function that raises RunLocked once another driver does.

    lock: the locked file of the working copy, with a line for each driver that had it. Raise
    RunLocked if another driver owns the folder, ConfigError if it is read-only, RunUnreachable.
    """
    *ended, this = lock.read_text().split("\n")
    own = json.dumps({"owner": this}).encode()

    def require() -> None:
        with reaching(remote):
            content = remote.read(OWNER_FILE)
        if content != own:
            raise RunLocked(
                f"{remote}: {_name(content or b'')} has taken it over",
                "What was measured here stays here, and the next `sweep run` from here uploads it",
            )

    remote.require_not_read_only()
    with reaching(remote):
        before = remote.read(OWNER_FILE)
        if before is not None and not take_over and _name(before) not in ended:
            raise RunLocked(
                f"{remote}: {_name(before)} writes to it",
                "Wait for it, or add --take-over if it was killed",
            )
        remote.put(OWNER_FILE, own)
    # Of two drivers that start in the same moment, the one that wrote first sees the other's file
    # here, or before its first upload.
    require()
    try:
        yield require
    finally:
        with suppress(SweepError), reaching(remote):
            require()
            remote.remove(OWNER_FILE)


def _name(content: bytes) -> str:
    """Return the name of the driver in an owner.json, as the lock of its copy has it."""
    with suppress(ValueError, TypeError, KeyError):
        found = json.loads(content)
        if "owner" in found:
            return str(found["owner"])
        # Of older versions.
        return f"process {found['process']} on {found['host']} (since {found['time']})"
    return "another driver"
