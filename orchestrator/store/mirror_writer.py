"""Write a run in a bucket: into its working copy, from which a thread uploads what the bucket lacks.

The list of the batches is uploaded after its batches, and the log after that, and after what the
attempts in it left in their folders: the bucket is a readable run after every upload.

owner.json in the bucket names the one driver that may write there, because a bucket has no locks. A
driver that finds the file of another one is refused, unless that one wrote into the same working
copy, whose lock this driver holds by now, or the user takes the folder over. Each driver compares the
file with its own before every upload, so that one that was taken over stops writing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from orchestrator.common.errors import RunLocked, RunUnwritable, SweepError
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CELLS_FILE, LISTING_FILE
from orchestrator.store.listing import Listing, part_files
from orchestrator.store.manifest import MANIFEST_FILE, Manifest
from orchestrator.store.mirror import RemoteRun
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run_writer import RunWriter
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS
from tasks.spec.outcome import Outcome

OWNER_FILE = "owner.json"
# During an outage of the bucket the measuring continues, and its results wait in the copy.
PATIENCE_S = 20.0  # at the end of a run, for what failed before
RETRY_S = 1.0
_UPLOADS = 8  # at a time


@contextmanager
def owned(remote: RemoteFolder, lock: IO[str], take_over: bool) -> Iterator[Callable[[], None]]:
    """Own the folder during the body. Yield a function that raises RunLocked once another driver does.

    lock: the locked file of the working copy, with a line for each driver that had it. Raise
    RunLocked if another driver owns the folder, RunUnreachable.
    """
    lock.seek(0)
    *ended, this = lock.read().split("\n")
    own = json.dumps({"owner": this}).encode()

    def require() -> None:
        with reaching(remote):
            content = remote.read(OWNER_FILE)
        if content != own:
            raise RunLocked(
                f"{remote}: {_name(content or b'')} has taken it over",
                "What was measured here stays in the working copy on this host",
            )

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
        return str(json.loads(content)["owner"])
    return "another driver"


class MirrorWriter(RunWriter):
    """A run's writer with a thread that uploads what the bucket lacks.

    It uploads after everything that is stored, and then also what has failed before.
    """

    def __init__(self, run: RemoteRun, lock: IO[str], require_owner: Callable[[], None]) -> None:
        """require_owner: raises RunLocked once another driver owns the bucket."""
        super().__init__(run.folder, lock)
        self._run, self._remote, self._require_owner = run, run.remote, require_owner
        self._listed = run.refresh(as_driver=True)  # in the bucket
        with reaching(run.remote):
            self._waiting = deque(_missing_files(run))
        self._thread = ThreadPoolExecutor(1, initializer=_lower_priority)
        self._next = Future[None]()
        self._error: SweepError | None = None  # of the last try

    def write_manifest(self, manifest: Manifest) -> None:
        is_new = not self.exists
        super().write_manifest(manifest)
        self._waiting.append(MANIFEST_FILE)
        self._upload()
        # A new run is in the bucket before it measures anything. Otherwise a driver on another
        # host could begin a second run there.
        if is_new:
            self.flush()

    def append(self, outcome: Outcome, commit: str | None) -> None:
        folder = self.attempt_folder(outcome.attempt.cell.id, outcome.attempt.number)
        self._waiting.extend(self._run.files_in(folder))
        super().append(outcome, commit)
        if isinstance(self._error, RunLocked):
            raise self._error

    @contextmanager
    def writing(self) -> Iterator[None]:
        with super().writing():
            yield
        self._upload()

    def end(self) -> None:
        try:
            super().end()
        finally:
            self.flush()

    def flush(self) -> None:
        """Upload everything now. Raise RunUnwritable or RunLocked if that fails."""
        self._upload().result()  # may take long: everything that waits
        last_try_s = time.monotonic() + PATIENCE_S
        while self._error:
            if isinstance(self._error, RunLocked):
                raise self._error
            if time.monotonic() > last_try_s:
                reason = self._error.message.removeprefix(f"{self._remote}: cannot be reached: ")
                raise RunUnwritable(
                    f"{self._remote}: results could not be uploaded: {reason}",
                    f"They are in {self.folder}; the next `sweep run` from here uploads them",
                )
            time.sleep(RETRY_S)
            self._upload().result()

    def _upload(self) -> Future[None]:
        """Upload what the bucket lacks in the thread."""
        self._next.cancel()  # if it has not begun yet
        self._next = self._thread.submit(self._try_to_upload)
        return self._next

    def _try_to_upload(self) -> None:
        error = None
        try:
            with reaching(self._remote):
                # The attempts are read first: what they left in their folders is waiting by then.
                stored = self._run.stored()
                names = {self._waiting.popleft() for _ in range(len(self._waiting))}
                try:
                    self._put_all(names)
                finally:  # a file that cannot be uploaded blocks no other
                    self._upload_rows(stored)
        except SweepError as caught:
            error = caught
        self._error = error

    def _upload_rows(self, stored: Stored) -> None:
        """Upload the batches, then their list, and the log of the attempts after them."""
        if self._listed is None:
            # Without a list, nobody knows if the bucket has all batches.
            self._list(Listing())
        listing, before = stored.listing, self._listed or Listing()
        if listing != before:
            # Until a batch is listed, a log of its number shows that it is not finished.
            logs = [f"{number:04}.log" for number in range(before.next_number, listing.next_number)]
            for log in logs:
                if self._remote.read(log) is None:
                    self._put(log, b"")
            new = listing.files.items() - before.files.items()
            self._put_all(name for name, _ in new)
            if listing.cells:
                self._put(CELLS_FILE)
            self._list(listing)
            for log in logs:
                self._remote.remove(log)
        if stored.log:
            self._put(listing.log, stored.log)

    def _list(self, listing: Listing) -> None:
        self._put(LISTING_FILE, listing.text().encode())
        self._listed = listing

    def _put_all(self, names: Iterable[str]) -> None:
        """Upload files of the copy. Those that fail wait for the next try; raise the first error.

        Leaving the pool waits for the uploads under way, also if one has failed: none may arrive
        after another driver has taken over.
        """
        with ThreadPoolExecutor(_UPLOADS, initializer=_lower_priority) as pool:
            futures = {name: pool.submit(self._put, name) for name in names}
        self._waiting.extend(name for name, future in futures.items() if future.exception())
        for future in futures.values():
            future.result()

    def _put(self, name: str, content: bytes | None = None) -> None:
        """Upload a file, of the copy if no content is given. Raise RunLocked or RunUnreachable."""
        source = self.folder / name if content is None else content
        if isinstance(source, Path) and not source.exists():
            return  # it was removed since: a trace by its owner, say
        with reaching(self._remote):
            self._require_owner()
            self._remote.put(name, source)


def _missing_files(run: RemoteRun) -> list[str]:
    """Return artifacts and parts of older versions that the bucket lacks."""
    missing = []
    for table in SCHEMAS:
        parts = {f"{table}/{path.name}" for path in part_files(run.folder / table)}
        missing += sorted(parts - run.remote.sizes(table).keys())
    if any((run.folder / ARTIFACTS).glob("*")):
        there = run.remote.sizes(ARTIFACTS, recursive=True)
        for cell, number in run.rows(ATTEMPTS, ["cell", "attempt"]):
            files = run.files_in(run.attempt_folder(cell, number))
            missing += [name for name in files if name not in there]
    return missing


def _lower_priority() -> None:
    # Uploads must not slow a measured process. On Linux, each thread has its own priority.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
