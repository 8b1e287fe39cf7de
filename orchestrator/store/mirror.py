"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it takes over what the bucket lists: files
of batches never change, so that only those that it lacks are downloaded. A copy that has all of it
and more stays as it is, and the next driver on this host uploads the rest. If another host has
written to the bucket by then, the copy lists what the bucket lists, and the attempts that only this
host has are stored again from their journals; one whose number others have gets the next number.
Their rows stay in `damaged/`.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.common.errors import RunError, RunUnreachable
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.common.output import warn
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.layout import (
    ARTIFACTS,
    ATTEMPTS,
    CACHE,
    CELLS_FILE,
    DAMAGED_FOLDER,
    LISTING_FILE,
    LOCK_FILE,
    REPORT,
)
from orchestrator.store.listing import RESTORE, Listing, is_batch, read_listing
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, RERUN_FILE

_REFRESH_LOCK = ".refresh-lock"
_OF_BUCKET = ".bucket"  # a folder with the list of the bucket as it was read last
_READ_TRIES = 5

Rows: TypeAlias = Mapping[tuple[str, int], Mapping[str, Any]]  # of attempts, by cell and number


class RemoteRun(Run):
    """A run in a bucket, read from its working copy. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.remote = remote

    def __str__(self) -> str:
        return self.remote.address

    def refresh(self, as_driver: bool = False) -> Listing | None:
        """Take over what the bucket has, and return its list, None if it has none.

        Readers leave the copy alone while a driver on this host writes to it: it is ahead of the
        bucket then. Raise RunError if the bucket has another run than the copy, RunUnreachable or
        RunUnwritable.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _REFRESH_LOCK).open("a") as mutex, reaching(self.remote):
                try_lock(mutex, fcntl.LOCK_EX, self.folder)
                return self._take_over() if as_driver or not self._has_driver() else None

    def fetch_artifacts(self, cell: str = "") -> None:
        rows = {f"{cell}/{number}" for cell, number in self.rows(ATTEMPTS, ["cell", "attempt"])}
        with reaching(self.remote), writing(self.folder):
            names = []
            for name in self.remote.sizes(f"{ARTIFACTS}/{cell}".rstrip("/"), recursive=True):
                _, *attempt, last = name.split("/")
                is_read = last in (ATTEMPT_FILE, LOG_FILE, RERUN_FILE)
                is_here = (self.folder / name).exists()
                if is_read and "/".join(attempt[:2]) in rows and not is_here:
                    names.append(name)
            self.remote.download(names, self.folder)

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        super().write_report(files)
        with reaching(self.remote):
            for name in self.files_in(self.folder / REPORT):
                self.remote.put(name, self.folder / name)

    def files_in(self, folder: Path) -> list[str]:
        """Return the files below a folder of the copy.

        Leave out hidden files, which are being written, and what compilers have cached.
        """
        found = []
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(self.folder.absolute())
            if path.is_file() and not path.name.startswith(".") and CACHE not in name.parts:
                found.append(name.as_posix())
        return found

    def _has_driver(self) -> bool:
        with (self.folder / LOCK_FILE).open("a+") as lock:
            return not try_lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)

    def _take_over(self) -> Listing | None:
        manifest, here = self.remote.read(MANIFEST_FILE), self.folder / MANIFEST_FILE
        is_other = here.exists() and _created(manifest) != _created(here.read_bytes())
        # Without an attempt, the first upload may have failed.
        if is_other and (manifest is not None or any(self.rows(ATTEMPTS, ["cell"]))):
            raise RunError(
                f"{self}: does not have the run that is in its working copy {self.folder}",
                "Move that folder away, or name another folder of the bucket",
            )
        bucket = self._stored_in_bucket()
        self._download_old_parts(is_listed=bucket is not None)
        if bucket is not None:
            self._take_over_rows(bucket)
        if manifest is not None:
            replace_file(here, manifest)
        return bucket.listing if bucket else None

    def _stored_in_bucket(self) -> Stored | None:
        """Return what the bucket stores at one moment, None if it has no list.

        Its files are those in the copy.
        """
        folder = self.folder / _OF_BUCKET
        folder.mkdir(exist_ok=True)
        for _ in range(_READ_TRIES):
            content = self.remote.read(LISTING_FILE)
            if content is None:
                return None
            (folder / LISTING_FILE).write_bytes(content)
            listing = read_listing(folder, str(self))
            log = self.remote.read(listing.log) or b""
            # A driver on another host may have closed the log as a batch since.
            if self.remote.read(LISTING_FILE) == content:
                return Stored(self.folder, str(self), listing, log)
        raise RunUnreachable(f"{self}: changes faster than it can be read", "Try again")

    def _download_old_parts(self, is_listed: bool) -> None:
        """Download the parts of older versions, which have no list."""
        missing = []
        for table in SCHEMAS:
            for name, size in self.remote.sizes(table).items():
                file = self.folder / name
                if is_batch(name):
                    if table == ATTEMPTS and not is_listed:
                        raise RunError(f"{self}: its {LISTING_FILE} is gone", RESTORE)
                    continue
                is_part = name.endswith(".parquet") and not file.name.startswith(".")
                if is_part and not (file.exists() and file.stat().st_size == size):
                    missing.append(name)
        self.remote.download(missing, self.folder)

    def _take_over_rows(self, bucket: Stored) -> None:
        """Have the copy store what the bucket stores, unless it has all of that and maybe more.

        After a kill between any two steps, the copy still lacks something, and all are repeated.
        """
        try:
            here = self.stored().undamaged()
        except RunError:  # a torn copy, which is downloaded again
            here = Stored(self.folder, str(self), Listing(), b"")
        ours = _by_key(here.read(ATTEMPTS))
        common = dict(bucket.listing.files.items() & here.listing.files.items())
        lacking = bucket.listing.files.keys() - common
        logged = _by_key(bucket.logged[ATTEMPTS]) if ATTEMPTS in bucket.logged else {}
        if not lacking and logged.items() <= ours.items():
            return
        batches = BatchWriter(self.folder, str(self))
        batches.set_aside_unlisted(Listing(files=common))
        self.remote.download([*lacking, CELLS_FILE], self.folder)
        theirs = _by_key(bucket.undamaged().read(ATTEMPTS))
        if here.log and not ours.items() <= theirs.items():
            (self.folder / DAMAGED_FOLDER).mkdir(exist_ok=True)
            replace_file(self.folder / DAMAGED_FOLDER / here.listing.log, here.log)
        # Before the list is replaced: no folder from here may be taken for one of the bucket.
        self._renumber_folders(ours, theirs)
        replace_file(self.folder / bucket.listing.log, bucket.log)
        bucket.listing.write(self.folder)
        batches.remove_logs(bucket.listing.log)

    def _renumber_folders(self, ours: Rows, theirs: Rows) -> None:
        """Rename the folders of attempts from here whose numbers have others in the bucket."""
        folders, renamed = set(self.attempt_folders()), 0
        for cell, number in sorted(folders & theirs.keys()):
            key, folder = (cell, number), self.folder / ARTIFACTS / cell
            if key in ours:
                is_same = ours[key] == theirs[key]
            else:  # of an attempt that was killed here, unless rows were lost here
                journal = folder / str(number) / JOURNAL_FILE
                there = self.remote.read(f"{ARTIFACTS}/{cell}/{number}/{JOURNAL_FILE}")
                is_same = journal.exists() and journal.read_bytes() == there
            if not is_same:
                free = 1 + max(used for name, used in (*folders, *ours, *theirs) if name == cell)
                (folder / str(number)).rename(folder / str(free))
                folders.add((cell, free))
                renamed += 1
        if renamed:
            warn(
                f"{self}: attempts from here whose numbers others have there: {renamed}; the next"
                " `sweep run` stores those with a whole journal again"
            )


def _by_key(attempts: pa.Table) -> Rows:
    rows = attempts.select(SCHEMAS[ATTEMPTS].names).to_pylist()
    return {(row["cell"], row["attempt"]): row for row in rows}


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
