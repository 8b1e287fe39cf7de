"""Have the working copy of a bucket list what the bucket lists.

Files of batches never change, so that only those that the copy lacks are downloaded. Rows that are
only in the copy become its next batch. If the bucket has another attempt of the same number by then,
the one from here gets the next number.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.common.errors import RunError, RunUnreachable
from orchestrator.store.attempt_log import whole_lines
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
from orchestrator.store.parquet_file import damage_as_run_error, read_parquet
from orchestrator.store.remote_folder import RemoteFolder
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS, empty_table
from tasks.spec.attempt import JOURNAL_FILE

_DOWNLOADS = 16  # at a time; a bucket takes tens of milliseconds to answer each request
_READ_TRIES = 5
_SCRATCH = ".bucket"
_PREDICTIONS, _PREDICTED_AT = "predictions", "predicted_at"

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
    in_log = _attempts(replace(bucket, listing=replace(bucket.listing, files={})))
    if not lacking and (is_same_log or in_log.items() <= _attempts(here).items()):
        return bucket.listing
    if bucket.listing.cells:
        lacking.append(CELLS_FILE)
    download(remote, lacking, bucket.scratch)
    renumbered = _renumbered(remote, run, here, bucket)
    # What was measured here comes first, because it is nowhere else. A listed file that is not
    # moved into place before a kill is downloaded again.
    rows = _rows_of_copy(here, bucket, renumbered)
    BatchWriter(run.folder, str(run)).adopt(here.listing, bucket, rows)
    for name in lacking:
        if (bucket.scratch / name).exists():
            (run.folder / name).parent.mkdir(exist_ok=True)
            (bucket.scratch / name).replace(run.folder / name)
    for (cell, number), new in renumbered.items():
        with suppress(FileNotFoundError):
            folder = run.folder / ARTIFACTS / cell
            (folder / str(number)).rename(folder / str(new))
    return bucket.listing


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
        found = run.stored()
    except RunError:  # a torn copy: its batches are compared with those of the bucket
        restored_listing(run.folder).write(run.folder)
        found = run.stored()
    damaged = found.damaged()
    files = {name: one for name, one in found.listing.files.items() if name not in damaged}
    log = b"".join(line + b"\n" for line in whole_lines(found.log))
    return replace(found, listing=replace(found.listing, files=files), log=log)


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


def _renumbered(
    remote: RemoteFolder, run: Run, here: Stored, bucket: Stored
) -> dict[AttemptKey, int]:
    """Return new numbers for attempts from here, whose numbers have others in the bucket."""
    folders = set(run.attempt_folders())
    ours, theirs, highest = _attempts(here), _attempts(bucket), Counter[str]()
    for cell, number in (*folders, *ours, *theirs):
        highest[cell] = max(number, highest[cell])
    renumbered = {}
    for (cell, number), row in theirs.items():
        key, is_same = (cell, number), True
        if key in ours:
            is_same = ours[key] == row
        elif key in folders:  # of an attempt that was killed here, unless rows were lost here
            name = f"{ARTIFACTS}/{cell}/{number}/{JOURNAL_FILE}"
            journal = run.folder / name
            is_same = journal.exists() and journal.read_bytes() == remote.read(name)
        if not is_same:
            highest[cell] += 1
            renumbered[key] = highest[cell]
    return renumbered


def _rows_of_copy(
    here: Stored, bucket: Stored, renumbered: Mapping[AttemptKey, int]
) -> dict[str, pa.Table]:
    """Return the rows that only a copy has, by table."""
    # Batches of two hosts may have one number, and some files in common.
    unlisted = here.listing.files.items() - bucket.listing.files.items()
    numbers = {number_of(name) for name, _ in unlisted}
    files = {name: one for name, one in here.listing.files.items() if number_of(name) in numbers}
    only_here = replace(here, listing=replace(here.listing, files=files))
    new_numbers: dict[AttemptKey, int | None] = {key: key[1] for key in _attempts(only_here)}
    new_numbers.update(dict.fromkeys(_attempts(bucket)))
    new_numbers.update(renumbered)
    found = {}
    for table in SCHEMAS:
        rows = _rows(only_here, table)
        if table == _PREDICTIONS:
            known = set(_rows(bucket, table)[_PREDICTED_AT].to_pylist())
            keep = [time not in known for time in rows[_PREDICTED_AT].to_pylist()]
        else:
            keys = zip(rows["cell"].to_pylist(), rows["attempt"].to_pylist(), strict=True)
            new = [new_numbers.get(key) for key in keys]
            keep = [number is not None for number in new]
            index = rows.schema.get_field_index("attempt")
            rows = rows.set_column(index, rows.schema.field(index), pa.array(new, pa.int32()))
        if any(keep):
            found[table] = rows.filter(pa.array(keep))
    return found


def _attempts(stored: Stored) -> Attempts:
    rows = _rows(stored, ATTEMPTS).select(SCHEMAS[ATTEMPTS].names).to_pylist()
    return {(row["cell"], row["attempt"]): tuple(row.values()) for row in rows}


def _rows(stored: Stored, table: str) -> pa.Table:
    """Return the rows in the batches and the log. What is damaged is left out."""
    schema = SCHEMAS[table]
    empty = empty_table(schema)
    parts = [empty, stored.logged.tables.get(table, empty)]
    for name in stored.listing.of_table(table):
        content = stored.content(name)
        if content is not None:
            with damage_as_run_error(f"{stored.run}/{name}", RESTORE):
                parts.append(read_parquet(content, schema, None))
    return pa.concat_tables(parts, promote_options="permissive")
