"""A run in a bucket: a working copy in the user's cache, downloaded before use and uploaded as attempts finish.

The copy is an ordinary results folder. `.pending/CELL-NUMBER` marks an attempt that was written
here and has not been uploaded completely. The next driver on this host uploads it, whatever killed
this one. If the bucket has a row of the same attempt by then, another host has measured it: that
row counts, and the files here are moved to `aside/`. Nothing that was measured is ever deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from orchestrator.common.errors import RunLocked, RunUnreachable, RunUnwritable, SweepError
from orchestrator.common.files import Content, replace_file, writing
from orchestrator.common.user_cache import cache_folder
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CACHE, CELLS_FILE, LOCK_FILE, REPORT
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.parquet_parts import is_merged, replaced_parts
from orchestrator.store.remote.folder import Entry, RemoteFolder, reaching
from orchestrator.store.remote.owner import owned
from orchestrator.store.run import Run
from orchestrator.store.run_writer import RunWriter, open_folder_for_writing
from orchestrator.store.tables import tables
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd

RETRY_S = 10.0  # between attempts to upload what failed
PATIENCE_S = 20.0  # at the end of a run, without any upload that succeeds
_REFRESH_TRIES = 5
_DOWNLOADS, _UPLOADS = 16, 8  # at a time; a bucket answers each request after tens of ms
_PENDING, _ASIDE, _REFRESH_LOCK = ".pending", "aside", ".refresh-lock"
_OTHER_TABLES = tuple(table for table in tables() if table != ATTEMPTS)
_OF_A_RUN = {MANIFEST_FILE, CELLS_FILE, ARTIFACTS, REPORT, _PENDING, *tables()}


class Mirror:
    """The working copy of a remote folder. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder, folder: Path) -> None:
        self.remote = remote
        self.folder = folder

    def refresh(self, as_driver: bool = False) -> None:
        """Make the copy equal to the bucket, except for attempts that are still to be uploaded.

        Readers leave the copy alone while a driver on this host works in it: it is ahead of the
        bucket then. Raise RunUnreachable or RunUnwritable.
        """
        with writing(self.folder), self._refresh_lock():
            if as_driver or not self._has_driver():
                with reaching(self.remote):
                    self._refresh()

    def fetch_artifacts(self, cell: str) -> None:
        """Download what people read of attempts: of one cell, or of all if it is empty."""
        read_by_people = (f"/{ATTEMPT_FILE}", f"/{LOG_FILE}", f"/{RERUN_FILE}")
        rows = self._rows()
        with reaching(self.remote), writing(self.folder):
            found = self.remote.entries(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True)
            names = [name for name in found if name.endswith(read_by_people)]
            missing = [name for name in names if not (self.folder / name).exists()]
            self._download(name for name in missing if _attempt_of(name) in rows)

    def upload(self, name: str) -> None:
        """Upload a file. A part that is gone was merged into another one."""
        with suppress(FileNotFoundError):
            self.remote.put(name, self.folder / name)

    def upload_patiently(self, name: str) -> None:
        """Upload a file now. Raise RunUnreachable if that fails for `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with reaching(self.remote):
                    return self.upload(name)
            except RunUnreachable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(min(1.0, RETRY_S))

    def parts(self) -> set[str]:
        """Return the names of all Parquet parts of the copy."""
        found: set[str] = set()
        for table in tables():
            found.update(f"{table}/{path.name}" for path in (self.folder / table).glob("*.parquet"))
        return found

    def mark_pending(self, attempt: str) -> None:
        """Mark an attempt as not uploaded, before its files are written."""
        (self.folder / _PENDING).mkdir(exist_ok=True)
        replace_file(self.folder / _PENDING / attempt, b"")

    def is_pending(self, attempt: str) -> bool:
        return (self.folder / _PENDING / attempt).exists()

    def pending(self) -> list[str]:
        """Return the attempts that are still to be uploaded, as CELL-NUMBER."""
        return sorted(path.name for path in (self.folder / _PENDING).glob("*-*"))

    def unmark_pending(self, attempt: str) -> None:
        (self.folder / _PENDING / attempt).unlink(missing_ok=True)

    def files_of(self, attempt: str) -> list[str]:
        """Return the files of an attempt: artifacts, then parts, its row last.

        Leave out hidden files, which are being written, and the cache of a compiler.
        """
        cell, _, number = attempt.rpartition("-")
        found = []
        for path in sorted((self.folder / ARTIFACTS / cell / number).rglob("*")):
            name = path.relative_to(self.folder)
            if path.is_file() and not path.name.startswith(".") and CACHE not in name.parts:
                found.append(name.as_posix())
        parts = [f"{table}/{attempt}.parquet" for table in (*_OTHER_TABLES, ATTEMPTS)]
        return [*found, *(name for name in parts if (self.folder / name).exists())]

    def _refresh(self) -> None:
        manifest = self.remote.read(MANIFEST_FILE)
        if self._is_of_another_run(manifest):
            everything = [path.name for path in self.folder.iterdir() if path.name in _OF_A_RUN]
            self._set_aside(everything)
        for table in (ARTIFACTS, *tables()):
            (self.folder / table).mkdir(exist_ok=True)
        known = self._rows()
        for _ in range(_REFRESH_TRIES):
            # A driver elsewhere may merge parts after they were listed.
            with suppress(FileNotFoundError):
                self._refresh_parts()
                break
        else:
            raise RunUnreachable(f"{self.remote}: changes faster than it can be read", "Try again")
        # A driver that was killed here may have left files of an attempt that another host has
        # measured since. They are not those of the row that has just arrived.
        new = (f"{ARTIFACTS}/{attempt.replace('-', '/')}" for attempt in self._rows() - known)
        self._set_aside([name for name in new if (self.folder / name).exists()])
        if manifest is not None:
            replace_file(self.folder / MANIFEST_FILE, manifest)

    def _refresh_parts(self) -> None:
        listed = self._list_parts()
        # A merged part that never arrived holds nothing new: only uploaded parts are merged.
        for name in self.parts() - listed.keys():
            if is_merged(Path(name)):
                (self.folder / name).unlink()
        # Merged parts come first, because they name the attempts whose rows they hold.
        self._download(
            name for name in listed if is_merged(Path(name)) and self._lacks(name, listed)
        )
        self._settle_pending(listed)
        self._download(name for name in listed if self._lacks(name, listed))
        for table in tables():
            replaced = {f"{table}/{name}" for name in replaced_parts(self.folder / table)}
            for name in replaced - listed.keys():
                (self.folder / name).unlink(missing_ok=True)
        gone = self.parts() - listed.keys()
        self._set_aside(sorted(name for name in gone if not self.is_pending(Path(name).stem)))

    def _settle_pending(self, listed: Mapping[str, Entry]) -> None:
        """Keep the bucket's version of attempts that it has a row of."""
        merged = replaced_parts(self.folder / ATTEMPTS)
        for attempt in self.pending():
            row = f"{ATTEMPTS}/{attempt}.parquet"
            if row not in listed and Path(row).name not in merged:
                continue
            own = self.folder / row
            # A row is uploaded last. If it is this one, the driver was killed before it removed
            # the mark.
            if not own.exists() or self.remote.read(row) != own.read_bytes():
                cell, _, number = attempt.rpartition("-")
                artifacts = f"{ARTIFACTS}/{cell}/{number}"
                parts = [f"{table}/{attempt}.parquet" for table in tables()]
                self._set_aside(n for n in (artifacts, *parts) if (self.folder / n).exists())
            self.unmark_pending(attempt)

    def _lacks(self, name: str, listed: Mapping[str, Entry]) -> bool:
        """True if a part is to be downloaded. Its size shows one that a crash has torn here."""
        if self.is_pending(Path(name).stem):
            return False
        try:
            return (self.folder / name).stat().st_size != listed[name].size
        except FileNotFoundError:
            return True

    def _list_parts(self) -> dict[str, Entry]:
        """Return the parts in the bucket.

        Rows of attempts are listed first: what they measured was there before them.
        """
        found: dict[str, Entry] = {}
        for table in (ATTEMPTS, *_OTHER_TABLES):
            for name, entry in self.remote.entries(table).items():
                if name.endswith(".parquet") and not Path(name).name.startswith("."):
                    found[name] = entry
        return found

    def _rows(self) -> set[str]:
        """Return the attempts that have a row in the copy, as CELL-NUMBER."""
        folder = self.folder / ATTEMPTS
        names = {path.name for path in folder.glob("*.parquet")} | replaced_parts(folder)
        return {name.removesuffix(".parquet") for name in names if not is_merged(Path(name))}

    def _is_of_another_run(self, manifest: bytes | None) -> bool:
        """True if the run of the copy was removed from the bucket, perhaps to begin again."""
        own = self.folder / MANIFEST_FILE
        return own.exists() and _created(manifest) != _created(own.read_bytes())

    def _download(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            list(pool.map(self._download_one, list(names)))

    def _download_one(self, name: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        self.remote.fetch(name, partial)
        partial.rename(path)

    def _set_aside(self, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        target = self.folder / _ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).rename(target / name)
        _warn(f"{self.remote}: has other results than this host; those from here are in {target}")

    def _has_driver(self) -> bool:
        with (self.folder / LOCK_FILE).open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextmanager
    def _refresh_lock(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / _REFRESH_LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@dataclass(frozen=True)
class Upload:
    """Files to upload in any order, then one last file, then files to remove from the bucket."""

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
        files = self._mirror.files_of(attempt)
        row = f"{ATTEMPTS}/{attempt}.parquet"
        others = tuple(name for name in files if name != row)
        self.put(Upload(others, last=row if row in files else "", attempt=attempt))

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
        _yield_to_measuring()
        while not self._is_done():
            if self._waiting:
                upload = self._waiting.popleft()
                if self._succeeds(upload):
                    self._last_success_s = time.monotonic()
                    continue
                # At the end of the queue, where a file that can never be read blocks no other.
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
        try:
            with reaching(self._mirror.remote):
                self._require_owner()
                # Leaving the pool waits for the uploads under way, also if one has failed: none
                # may arrive after another driver has taken over.
                with ThreadPoolExecutor(_UPLOADS, initializer=_yield_to_measuring) as pool:
                    list(pool.map(self._mirror.upload, upload.files))
                if upload.last:
                    self._mirror.upload(upload.last)
                for name in upload.removed:
                    self._mirror.remote.remove(name)
        except RunLocked as error:
            self.lost = error
            return False
        except SweepError as error:
            self._reason = error.message.removeprefix(f"{self._mirror.remote}: cannot be reached: ")
            return False
        except Exception as error:  # file systems of fsspec raise errors of their own
            self._reason = f"{type(error).__name__}: {error}"
            return False
        if upload.attempt:
            self._mirror.unmark_pending(upload.attempt)
        return True


class MirroredWriter(RunWriter):
    """A run's writer that also uploads: each attempt's row after all other files of it."""

    def __init__(self, mirror: Mirror, lock: IO[str] | None, uploader: Uploader) -> None:
        super().__init__(mirror.folder, lock)
        self._mirror, self._uploader = mirror, uploader

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        is_new = not self.exists
        super().write_manifest(manifest)
        # A new run is known in the bucket before it measures anything. Otherwise a driver on
        # another host would begin a run of its own there.
        if is_new:
            self._mirror.upload_patiently(MANIFEST_FILE)
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


class RemoteRun(Run):
    """A run in a bucket, read from its working copy."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.mirror = Mirror(remote, self.folder)

    def __str__(self) -> str:
        return self.mirror.remote.address

    def refresh(self) -> None:
        """Download what is new in the bucket."""
        self.mirror.refresh()

    def fetch_artifacts(self, cell: str = "") -> None:
        self.mirror.fetch_artifacts(cell)

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        super().write_report(files)
        try:
            with reaching(self.mirror.remote):
                for path in sorted((self.folder / REPORT).rglob("*")):
                    if path.is_file() and not path.name.startswith("."):
                        self.mirror.upload(path.relative_to(self.folder).as_posix())
        except SweepError as error:
            raise RunUnwritable(
                f"the report is in {self.folder / REPORT}, but was not uploaded: {error.message}",
                error.remedy,
            ) from error


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
            yield MirroredWriter(mirror, local.lock, uploader)
        except BaseException as error:
            try:
                uploader.finish()
            except SweepError as second:
                # The first error is raised below, and may be the same one.
                if str(second) != str(error):
                    _warn(str(second))
            raise
        uploader.finish()


def _attempt_of(artifact: str) -> str:
    """Return CELL-NUMBER of artifacts/CELL/NUMBER/FILE."""
    _, cell, number, *_ = artifact.split("/")
    return f"{cell}-{number}"


def _created(manifest: bytes | None) -> object:
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None


def _yield_to_measuring() -> None:
    """Give this thread the lowest priority, so that uploads do not slow the measured process."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # per thread on Linux


def _warn(text: str) -> None:
    with suppress(OSError):  # nothing reads stderr
        print(f"sweep: {text}", file=sys.stderr)
