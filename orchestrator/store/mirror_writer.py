"""Write a run in a bucket: into its working copy, from which a thread uploads what is finished."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from orchestrator.common.errors import RunLocked, RunUnreachable, RunUnwritable, SweepError
from orchestrator.store.bucket_owner import owned
from orchestrator.store.layout import CELLS_FILE
from orchestrator.store.manifest import MANIFEST_FILE, Manifest
from orchestrator.store.mirror import Mirror, RemoteRun, warn
from orchestrator.store.remote_folder import reaching
from orchestrator.store.run_writer import RunWriter, open_folder_for_writing
from tasks.spec.messages import typed_error_text
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd

# During an outage of the bucket the measuring continues, and its results wait in the copy.
RETRY_S = 10.0
PATIENCE_S = 20.0  # at the end of a run, without an upload that succeeds
_UPLOADS = 8  # at a time


@contextmanager
def open_remote_for_writing(run: RemoteRun, take_over: bool) -> Iterator[RunWriter]:
    """Own the bucket's folder during the body and yield a writer that uploads.

    Raise RunLocked if another driver owns it, and at the end RunUnwritable if results could not be
    uploaded.
    """
    mirror = run.mirror
    with open_folder_for_writing(run) as local, owned(mirror.remote, take_over) as owner:
        mirror.refresh(as_driver=True)
        uploader = Uploader(mirror, owner.require)
        for attempt in mirror.pending():
            uploader.put_attempt(attempt)
        try:
            yield MirrorWriter(mirror, local.lock, uploader)
        except BaseException as error:
            try:
                uploader.finish()
            except SweepError as second:
                # The first error is raised below. The second one may be the same.
                if str(second) != str(error):
                    warn(str(second))
            raise
        uploader.finish()


class MirrorWriter(RunWriter):
    """A run's writer that also uploads: each attempt's row after all other files of it."""

    def __init__(self, mirror: Mirror, lock: IO[str] | None, uploader: Uploader) -> None:
        super().__init__(mirror.folder, lock)
        self._mirror, self._uploader = mirror, uploader

    def write_manifest(self, manifest: Manifest) -> None:
        is_new = not self.exists
        super().write_manifest(manifest)
        # A new run is in the bucket before it measures anything. Otherwise a driver on another
        # host could begin a second run there.
        if is_new:
            self._uploader.upload_now(MANIFEST_FILE)
        else:
            self._uploader.put(Upload((MANIFEST_FILE,)))

    def append(self, outcome: Outcome, commit: str | None) -> None:
        attempt = f"{outcome.attempt.cell.id}-{outcome.attempt.number}"
        self._mirror.mark_pending(attempt)
        super().append(outcome, commit)
        self._uploader.put_attempt(attempt)
        if self._uploader.lost is not None:
            raise self._uploader.lost

    def append_predictions(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        before = self._mirror.parts()
        super().append_predictions(samples)
        self._uploader.put(Upload(tuple(self._mirror.parts() - before)))

    def merge_parts(self) -> None:
        before = self._mirror.parts()
        super().merge_parts()
        after = self._mirror.parts()
        if after != before:
            self._uploader.put(Upload(tuple(after - before), removed=tuple(before - after)))

    def may_merge(self, part: Path) -> bool:
        return not self._mirror.is_pending(part.stem)

    def write_cells(self, cells: pd.DataFrame) -> None:
        super().write_cells(cells)
        self._uploader.put(Upload((CELLS_FILE,)))


@dataclass(frozen=True)
class Upload:
    """Files to upload in any order, then a last one, then files to remove from the bucket."""

    files: tuple[str, ...]
    last: str = ""
    removed: tuple[str, ...] = ()
    attempt: str = ""  # whose pending mark is removed at the end


class Uploader:
    """A thread that uploads what the writer has finished, and tries again what failed."""

    def __init__(self, mirror: Mirror, require_owner: Callable[[], None]) -> None:
        """require_owner: raises RunLocked once another driver owns the bucket."""
        self._mirror = mirror
        self._require_owner = require_owner
        self._waiting: deque[Upload] = deque()
        self._wake = threading.Event()
        self._is_finishing = False
        self._last_success_s = 0.0
        self._reason = ""  # of the last failure
        self.lost: RunLocked | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, upload: Upload) -> None:
        self._waiting.append(upload)
        self._wake.set()

    def put_attempt(self, attempt: str) -> None:
        *others, row = self._mirror.files_of(attempt) or [""]
        self.put(Upload(tuple(others), last=row, attempt=attempt))

    def upload_now(self, name: str) -> None:
        """Upload a file in this thread. Raise RunUnreachable if that fails for `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with reaching(self._mirror.remote):
                    self._require_owner()
                    return self._mirror.upload(name)
            except RunUnreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(min(1.0, RETRY_S))

    def finish(self) -> None:
        """Wait until everything is uploaded. Raise RunUnwritable or RunLocked if that fails."""
        self._last_success_s = time.monotonic()
        self._is_finishing = True
        self._wake.set()
        self._thread.join()
        if self.lost is not None:
            raise self.lost
        if self._waiting:
            raise RunUnwritable(
                f"{self._mirror.remote}: results could not be uploaded: {self._reason}",
                f"They are in {self._mirror.folder}; the next `sweep run` from here uploads them",
            )

    def _run(self) -> None:
        _lower_priority()
        while not self._is_done():
            if self._waiting:
                upload = self._waiting.popleft()
                if self._succeeds(upload):
                    self._last_success_s = time.monotonic()
                    continue
                # At the end of the queue, so that a file that can never be read blocks no other.
                self._waiting.append(upload)
            self._wake.wait(min(1.0, RETRY_S) if self._is_finishing else RETRY_S)
            self._wake.clear()

    def _is_done(self) -> bool:
        if self.lost is not None:
            return True
        if not self._is_finishing:
            return False
        return not self._waiting or time.monotonic() - self._last_success_s > PATIENCE_S

    def _succeeds(self, upload: Upload) -> bool:
        remote = self._mirror.remote
        try:
            with reaching(remote):
                self._require_owner()
                self._carry_out(upload)
        except RunLocked as error:
            self.lost = error
            return False
        except SweepError as error:
            self._reason = error.message.removeprefix(f"{remote}: cannot be reached: ")
            return False
        except Exception as error:  # file systems of fsspec raise errors of their own kinds
            self._reason = typed_error_text(error)
            return False
        return True

    def _carry_out(self, upload: Upload) -> None:
        # Leaving the pool waits for the uploads under way, also if one has failed: none may arrive
        # after another driver has taken over.
        with ThreadPoolExecutor(_UPLOADS, initializer=_lower_priority) as pool:
            list(pool.map(self._mirror.upload, upload.files))
        if upload.last:
            self._mirror.upload(upload.last)
        for name in upload.removed:
            self._mirror.remote.remove(name)
        if upload.attempt:
            self._mirror.unmark_pending(upload.attempt)


def _lower_priority() -> None:
    # Uploads must not slow a measured process. On Linux, each thread has its own priority.
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
