"""A run in a bucket, read from a working copy in the user's cache.

The copy is an ordinary results folder. Before it is used, it takes over what the bucket lists: files
of batches never change, so that only those that it lacks are downloaded. What was measured here and
is not in the bucket stays, as the next batch; the next driver on this host uploads it. If the bucket
has another attempt of the same number by then, the folder of the one from here gets the next number.
It has no row from then on, and `sweep run` stores its outcome again from its journal.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.common.errors import RunError, RunUnreachable, RunUnwritable, SweepError
from orchestrator.common.files import Content, cache_folder, replace_file, try_lock, writing
from orchestrator.common.output import warn
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
from orchestrator.store.listing import (
    RESTORE,
    Listing,
    is_batch,
    number_of,
    read_listing,
    restored_listing,
)
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.remote_folder import RemoteFolder, reaching
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import ATTEMPT_FILE, JOURNAL_FILE, LOG_FILE, RERUN_FILE

_REFRESH_LOCK = ".refresh-lock"
_ASIDE = "aside"
# Files on their way into the copy: until all are there, and until they are moved into place.
_ARRIVING, _ARRIVED = ".arriving", ".arrived"
_READ_TRIES = 5
_PREDICTIONS = "predictions"

Rows: TypeAlias = Mapping[tuple[Any, ...], tuple[Any, ...]]  # of attempts, by cell and number


class RemoteRun(Run):
    """A run in a bucket, read from its working copy. Names are those of files within either."""

    def __init__(self, remote: RemoteFolder) -> None:
        super().__init__(cache_folder("copies") / remote.path)
        self.remote = remote

    def __str__(self) -> str:
        return self.remote.address

    def refresh(self, as_driver: bool = False) -> Listing | None:
        """Take over what the bucket has, and return its list, None if it has none.

        Rows that are only in the copy stay. Readers leave the copy alone while a driver on this host
        writes to it: it is ahead of the bucket then. Raise RunUnreachable or RunUnwritable.
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
        report = self.folder / REPORT
        try:
            with reaching(self.remote):
                for name in self.files_in(report):
                    self.remote.put(name, self.folder / name)
        except SweepError as error:
            raise RunUnwritable(
                f"the report is in {report}, but was not uploaded: {error.message}", error.remedy
            ) from error

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
        # The run may have been removed from the bucket, to start again.
        if here.exists() and _created(manifest) != _created(here.read_bytes()):
            target = self.folder / _ASIDE / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S-%f")
            target.mkdir(parents=True)
            for path in self.folder.iterdir():
                if path.name not in (_ASIDE, LOCK_FILE, _REFRESH_LOCK):
                    path.rename(target / path.name)
            warn(f"{self}: has another run than this host; what was here is in {target}")
        _move_into_place(self.folder)  # what arrived for a command that was killed
        bucket = _stored_in(self.remote, self.folder)
        _download_old_parts(self.remote, self.folder, is_listed=bucket is not None)
        if bucket is not None:
            _merge(self, bucket)
        if manifest is not None:
            replace_file(here, manifest)
        return bucket.listing if bucket else None


@dataclass(frozen=True)
class _BucketTables(Stored):
    """The tables in a bucket: files that are in the copy, and those that have arrived."""

    arriving: Path

    def content(self, name: str) -> bytes | None:
        arrived = Stored(self.arriving, self.run, self.listing, self.log)
        return super().content(name) or arrived.content(name)


def _stored_in(remote: RemoteFolder, folder: Path) -> _BucketTables | None:
    """Return what a bucket stores at one moment, None if it has no list."""
    arriving = folder / _ARRIVING
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir()
    for _ in range(_READ_TRIES):
        content = remote.read(LISTING_FILE)
        if content is None:
            return None
        (arriving / LISTING_FILE).write_bytes(content)
        listing = read_listing(arriving, str(remote))
        log = remote.read(listing.log) or b""
        # A driver on another host may have closed the log as a batch since.
        if remote.read(LISTING_FILE) == content:
            return _BucketTables(folder, str(remote), listing, log, arriving)
    raise RunUnreachable(f"{remote}: changes faster than it can be read", "Try again")


def _merge(run: RemoteRun, bucket: _BucketTables) -> None:
    """Have the copy list what the bucket lists, and then what only the copy has.

    A kill between any two steps loses nothing: until all has arrived, the copy stays as it is.
    """
    try:
        here = run.stored().undamaged()
    except RunError:  # a torn copy: its batches are compared with those of the bucket
        restored_listing(run.folder).write(run.folder)
        here = run.stored().undamaged()
    ours, listed = _by_key(here.read(ATTEMPTS)), bucket.listing.files
    lacking = [name for name in listed if here.listing.files.get(name) != listed[name]]
    logged = _by_key(bucket.logged[ATTEMPTS]) if ATTEMPTS in bucket.logged else {}
    if not lacking and logged.items() <= ours.items():
        return
    if bucket.listing.cells:
        lacking.append(CELLS_FILE)
    run.remote.download(lacking, bucket.arriving)
    whole = bucket.undamaged()
    # First, so that no folder from here is taken for that of an attempt in the bucket.
    _renumber_folders(run, ours, _by_key(whole.read(ATTEMPTS)))
    # No number is used for two batches.
    last = max(here.listing.next_number, bucket.listing.next_number) - 1
    listing = bucket.listing.model_copy(update={"last": last})
    if rows := _rows_of_copy(here, whole):
        writer = BatchWriter(bucket.arriving, str(run))
        writer.write(writer.write(listing, bucket.logged), rows)
    else:
        (bucket.arriving / listing.log).write_bytes(bucket.log)
        listing.write(bucket.arriving)
    bucket.arriving.rename(run.folder / _ARRIVED)
    _move_into_place(run.folder)


def _move_into_place(folder: Path) -> None:
    arrived = folder / _ARRIVED
    if arrived.exists():
        for path in filter(Path.is_file, arrived.rglob("*")):
            target = folder / path.relative_to(arrived)
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
        last = read_listing(folder, str(folder)).next_number - 1
        BatchWriter(folder, str(folder)).remove_logs(last)
        shutil.rmtree(arrived)


def _download_old_parts(remote: RemoteFolder, folder: Path, is_listed: bool) -> None:
    """Download the parts of older versions, which have no list."""
    missing = []
    for table in SCHEMAS:
        for name, size in remote.sizes(table).items():
            file = folder / name
            if is_batch(name):
                if table == ATTEMPTS and not is_listed:
                    raise RunError(f"{remote}: its {LISTING_FILE} is gone", RESTORE)
                continue
            is_part = name.endswith(".parquet") and not file.name.startswith(".")
            if is_part and not (file.exists() and file.stat().st_size == size):
                missing.append(name)
    remote.download(missing, folder)


def _renumber_folders(run: RemoteRun, ours: Rows, theirs: Rows) -> None:
    """Rename the folders of attempts from here whose numbers have others in the bucket."""
    folders, renamed = set(run.attempt_folders()), 0
    for cell, number in sorted(folders & theirs.keys()):
        key, folder = (cell, number), run.folder / ARTIFACTS / cell
        if key in ours:
            is_same = ours[key] == theirs[key]
        else:  # of an attempt that was killed here, unless rows were lost here
            journal = folder / str(number) / JOURNAL_FILE
            there = run.remote.read(f"{ARTIFACTS}/{cell}/{number}/{JOURNAL_FILE}")
            is_same = journal.exists() and journal.read_bytes() == there
        if not is_same:
            free = 1 + max(used for name, used in (*folders, *ours, *theirs) if name == cell)
            (folder / str(number)).rename(folder / str(free))
            folders.add((cell, free))
            renamed += 1
    if renamed:
        warn(
            f"{run}: attempts from here whose numbers others have there: {renamed}; the next"
            " `sweep run` stores those with a whole journal again"
        )


def _rows_of_copy(here: Stored, bucket: Stored) -> dict[str, pa.Table]:
    """Return the rows that only a copy has, by table."""
    # Batches of two hosts may have one number, and some files in common.
    unlisted = here.listing.files.items() - bucket.listing.files.items()
    numbers = {number_of(name) for name, _ in unlisted}
    here = here.select(name for name in here.listing.files if number_of(name) in numbers)
    new, found = _keys(here) - _keys(bucket), {}
    for table in SCHEMAS:
        rows = here.read(table)
        keep = [key in new for key in _keys_of(rows)]
        if any(keep):
            found[table] = rows.filter(pa.array(keep))
    return found


def _keys(stored: Stored) -> set[tuple[Any, ...]]:
    return {key for table in (ATTEMPTS, _PREDICTIONS) for key in _keys_of(stored.read(table))}


def _keys_of(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    names = ["cell", "attempt"] if "attempt" in rows.column_names else ["predicted_at"]
    return zip(*(rows[name].to_pylist() for name in names), strict=True)


def _by_key(attempts: pa.Table) -> Rows:
    rows = attempts.select(SCHEMAS[ATTEMPTS].names).to_pylist()
    return {(row["cell"], row["attempt"]): tuple(row.values()) for row in rows}


def _created(manifest: bytes | None) -> object:
    # The time at which a run was created distinguishes it from other runs.
    try:
        return json.loads(manifest or b"null").get("created")
    except (ValueError, AttributeError):
        return None
