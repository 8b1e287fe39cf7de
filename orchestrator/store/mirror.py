"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it downloads what the bucket lists and it
lacks: files of batches never change. A copy that has all of that and more stays as it is, and the
next driver on this host uploads the rest. If the copy has attempts that the bucket lacks, and the
bucket has some that the copy lacks, or another run, then the copy is renamed as a whole and the
bucket is downloaded again: nothing is merged, and nothing is lost.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.common.files import Content, replace_file, try_lock, writing
from orchestrator.common.output import warn
from orchestrator.common.user_cache import cache_folder
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.layout import (
    ARTIFACTS,
    ATTEMPTS,
    CACHE,
    CELLS_FILE,
    LISTING_FILE,
    LOCK_FILE,
    REPORT,
)
from orchestrator.store.listing import RESTORE, Listing, is_batch, restored_listing
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored, read_stored
from orchestrator.store.tables import SCHEMAS, empty_table
from tasks.spec.attempt import ATTEMPT_FILE, LOG_FILE, RERUN_FILE

Rows: TypeAlias = Mapping[tuple[str, int], Mapping[str, Any]]  # of attempts, by cell and number


class RemoteRun(Run):
    """A run in a bucket, read from its working copy. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.remote = remote

    def __str__(self) -> str:
        return self.remote.address

    def refresh(self, as_driver: bool = False) -> Listing | None:
        """Download what the bucket has, and return its list, None if it has none.

        Readers leave the copy alone while a driver on this host writes to it: it is ahead of the
        bucket then. Raise RunUnreachable, RunUnwritable or RunError.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # It is next to the copy, because that may be renamed.
            mutex_file = self.folder.with_name(f".{self.folder.name}.refresh-lock")
            with mutex_file.open("a") as mutex, reaching(self.remote):
                try_lock(mutex, fcntl.LOCK_EX, self.folder)
                with (self.folder / LOCK_FILE).open("a+") as lock:
                    is_free = try_lock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB, self.folder)
                return self._take_over() if as_driver or is_free else None

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

    def _take_over(self) -> Listing | None:
        manifest, here = self.remote.read(MANIFEST_FILE), self.folder / MANIFEST_FILE
        is_other = here.exists() and _created(manifest) != _created(here.read_bytes())
        # Without an attempt, the first upload may have failed.
        if is_other and (manifest is not None or any(self.rows(ATTEMPTS, ["cell"]))):
            self._set_aside()
            return self._take_over()
        is_listed = self.remote.read(LISTING_FILE) is not None
        self._download_old_parts(is_listed)
        bucket = read_stored(self.folder, str(self), self.remote.read) if is_listed else None
        if bucket and not self._download_rows(bucket):
            self._set_aside()
            return self._take_over()
        if manifest is not None:
            replace_file(here, manifest)
        return bucket.listing if bucket else None

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

    def _download_rows(self, bucket: Stored) -> bool:
        """Have the copy store what the bucket stores, unless it has all of that and maybe more.

        Return False if the copy has something else. After a kill between any two steps, the copy
        still lacks something, and all are repeated.
        """
        try:
            here = self.stored().undamaged()
        except RunError:  # the list is lost, or older than what a killed reader had downloaded
            restored_listing(self.folder).write(self.folder)
            here = self.stored().undamaged()
        common = dict(bucket.listing.files.items() & here.listing.files.items())
        lacking = bucket.listing.files.keys() - common
        ours, logged = _by_key(here), _by_key(bucket.select(()))
        if not lacking and logged.items() <= ours.items():
            return True
        own = _by_key(here.select(here.listing.files.keys() - common))
        # The folder of an attempt without a row is of one that was killed here.
        killed = set(self.attempt_folders()) - ours.keys()
        if own or killed:
            new = _by_key(bucket.select(lacking).undamaged(ATTEMPTS))
            if not own.items() <= new.items() or killed & new.keys():
                return False
        batches = BatchWriter(self.folder, str(self))
        batches.set_aside_unlisted(Listing(files=common))
        self.remote.download([*lacking, CELLS_FILE], self.folder)
        replace_file(self.folder / bucket.listing.log, bucket.log)
        bucket.listing.write(self.folder)
        batches.remove_logs(bucket.listing.log)
        return True

    def _set_aside(self) -> None:
        """Rename the copy. Raise RunError if a driver on this host has begun to write to it."""
        target = self.folder.with_name(f"{self.folder.name}-{datetime.now(UTC):%Y%m%d-%H%M%S.%f}")
        with (self.folder / LOCK_FILE).open("a+") as lock:
            if not try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, self.folder):
                raise RunError(
                    f"{self}: another host has written to it in this moment", "Run again"
                )
            self.folder.rename(target)
        self.folder.mkdir()
        warn(
            f"{self}: its working copy on this host has other attempts, and is the folder {target}"
            " now, which every command reads. `sweep run` measures what the bucket lacks"
        )


def _by_key(stored: Stored) -> Rows:
    schema = SCHEMAS[ATTEMPTS]
    parts = [empty_table(schema), *stored.parts(ATTEMPTS, schema)]
    rows = pa.concat_tables(parts, promote_options="permissive").select(schema.names)
    return {(row["cell"], row["attempt"]): row for row in rows.to_pylist()}


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
