"""Have the working copy of a bucket list what the bucket lists.

Files of batches never change, so that only those that the copy lacks are downloaded. Rows that are
only in the copy become its next batch. If the bucket has another attempt of the same number by then,
the folder of the one from here gets the next number first. It has no row from then on, and `sweep
run` stores its outcome again from its journal.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.common.errors import RunError, RunUnreachable
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CELLS_FILE, LISTING_FILE
from orchestrator.store.listing import (
    RESTORE,
    Listing,
    is_batch,
    number_of,
    read_listing,
    restored_listing,
)
from orchestrator.store.remote_folder import RemoteFolder
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored, whole_lines
from orchestrator.store.tables import SCHEMAS
from tasks.spec.attempt import JOURNAL_FILE

_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
_READ_TRIES = 5
_SCRATCH = ".bucket"
_PREDICTIONS = "predictions"

AttemptKey: TypeAlias = tuple[str, int]  # cell and number
Attempts: TypeAlias = Mapping[AttemptKey, tuple[Any, ...]]  # rows


@dataclass(frozen=True)
class _StoredInBucket(Stored):
    """The tables that a bucket lists. scratch: has the files that are not in the copy."""

    scratch: Path

    def content(self, name: str) -> bytes | None:
        downloaded = Stored(self.scratch, self.run, self.listing, self.log)
        return super().content(name) or downloaded.content(name)


def refresh_copy(remote: RemoteFolder, run: Run) -> Listing | None:
    """Take over what a bucket lists, and its log. Return the list, None if the bucket has none."""
    shutil.rmtree(run.folder / _SCRATCH, ignore_errors=True)
    bucket = _stored_in(remote, run.folder)
    _download_old_parts(remote, run.folder, is_listed=bucket is not None)
    if bucket is None:
        return None
    here, listed = _stored_here(run), bucket.listing.files
    lacking = [name for name in listed if here.listing.files.get(name) != listed[name]]
    is_same_log = here.listing.log == bucket.listing.log and here.log.startswith(bucket.log)
    in_log = _attempts(_undamaged(replace(bucket, listing=replace(bucket.listing, files={}))))
    if not lacking and (is_same_log or in_log.items() <= _attempts(here).items()):
        return bucket.listing
    if bucket.listing.cells:
        lacking.append(CELLS_FILE)
    download(remote, lacking, bucket.scratch)
    # Each step may be the last one before a kill. A folder that was renamed is not taken for that of
    # the bucket's attempt. What was measured here is stored before the list of the bucket counts,
    # because it is nowhere else. A listed file that is not moved into place is downloaded again.
    whole = _undamaged(bucket)
    _renumber_folders(remote, run, _attempts(here), _attempts(whole))
    BatchWriter(run.folder, str(run)).adopt(here.listing, bucket, _rows_of_copy(here, whole))
    for name in lacking:
        if (bucket.scratch / name).exists():
            (run.folder / name).parent.mkdir(exist_ok=True)
            (bucket.scratch / name).replace(run.folder / name)
    return bucket.listing


def warn(text: str) -> None:
    with suppress(OSError):  # nobody reads stderr
        print(f"sweep: {text}", file=sys.stderr)


def download(remote: RemoteFolder, names: Iterable[str], folder: Path) -> None:
    """Download files into a folder. One that is missing is left out: readers report it."""

    def fetch(name: str) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):
            remote.fetch(name, partial)
            partial.rename(path)

    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        list(pool.map(fetch, names))


def _stored_in(remote: RemoteFolder, folder: Path) -> _StoredInBucket | None:
    """Return what a bucket has at one moment, None if it has no list."""
    scratch = folder / _SCRATCH
    scratch.mkdir(exist_ok=True)
    for _ in range(_READ_TRIES):
        content = remote.read(LISTING_FILE)
        if content is None:
            return None
        (scratch / LISTING_FILE).write_bytes(content)
        listing = read_listing(scratch, str(remote))
        log = remote.read(listing.log) or b""
        # A driver on another host may have closed the log as a batch since.
        if remote.read(LISTING_FILE) == content:
            return _StoredInBucket(folder, str(remote), listing, log, scratch)
    raise RunUnreachable(f"{remote}: changes faster than it can be read", "Try again")


def _stored_here(run: Run) -> Stored:
    """Return what is stored in the copy, without what is damaged."""
    try:
        return _undamaged(run.stored())
    except RunError:  # a torn copy: its batches are compared with those of the bucket
        restored_listing(run.folder).write(run.folder)
        return _undamaged(run.stored())


def _undamaged(stored: Stored) -> Stored:
    """Return what is stored without files that are missing or damaged, and lines of the log."""
    damaged = stored.damaged()
    files = {name: one for name, one in stored.listing.files.items() if name not in damaged}
    log = b"".join(line + b"\n" for line in whole_lines(stored.log))
    return replace(stored, listing=replace(stored.listing, files=files), log=log)


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
    download(remote, missing, folder)


def _renumber_folders(remote: RemoteFolder, run: Run, ours: Attempts, theirs: Attempts) -> None:
    """Rename the folders of attempts from here whose numbers have others in the bucket."""
    folders, renamed = set(run.attempt_folders()), 0
    for cell, number in sorted(folders & theirs.keys()):
        key, folder = (cell, number), run.folder / ARTIFACTS / cell
        if key in ours:
            is_same = ours[key] == theirs[key]
        else:  # of an attempt that was killed here, unless rows were lost here
            journal = folder / str(number) / JOURNAL_FILE
            there = remote.read(f"{ARTIFACTS}/{cell}/{number}/{JOURNAL_FILE}")
            is_same = journal.exists() and journal.read_bytes() == there
        if not is_same:
            used = {one for name, one in (*folders, *ours, *theirs) if name == cell}
            (folder / str(number)).rename(folder / str(max(used) + 1))
            folders.add((cell, max(used) + 1))
            renamed += 1
    if renamed:
        warn(
            f"{remote}: attempts from here whose numbers others have there: {renamed}; the next"
            " `sweep run` stores those with a whole journal again"
        )


def _rows_of_copy(here: Stored, bucket: Stored) -> dict[str, pa.Table]:
    """Return the rows that only a copy has, by table."""
    # Batches of two hosts may have one number, and some files in common.
    unlisted = here.listing.files.items() - bucket.listing.files.items()
    numbers = {number_of(name) for name, _ in unlisted}
    files = {name: one for name, one in here.listing.files.items() if number_of(name) in numbers}
    here = replace(here, listing=replace(here.listing, files=files))
    new = _keys(here, ATTEMPTS) - _keys(bucket, ATTEMPTS)
    new |= _keys(here, _PREDICTIONS) - _keys(bucket, _PREDICTIONS)
    found = {}
    for table in SCHEMAS:
        rows = here.read(table)
        keep = [key in new for key in _keys_of(rows)]
        if any(keep):
            found[table] = rows.filter(pa.array(keep))
    return found


def _keys(stored: Stored, table: str) -> set[tuple[Any, ...]]:
    return set(_keys_of(stored.read(table)))


def _keys_of(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    names = ["cell", "attempt"] if "attempt" in rows.column_names else ["predicted_at"]
    return zip(*(rows[name].to_pylist() for name in names), strict=True)


def _attempts(stored: Stored) -> Attempts:
    rows = stored.read(ATTEMPTS, SCHEMAS[ATTEMPTS].names).to_pylist()
    return {(row["cell"], row["attempt"]): tuple(row.values()) for row in rows}
