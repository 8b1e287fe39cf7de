"""Store attempts in the log of a run, and close the log as a batch.

Killing the driver between any two lines loses nothing: a line counts once it is whole, and a batch
once it is listed; until then the log with its attempts counts. A log is removed after its batch is
listed, and the log of an earlier batch is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from orchestrator.common.files import flush_folder, replace_file
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.attempt_log import to_line
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import Listing, is_batch, read_listing
from orchestrator.store.stored_tables import Stored, read_stored
from orchestrator.store.tables import SCHEMAS, to_parquet

# Attempts in a batch: reading a file takes about 1 ms, however few rows it has.
BATCH = 128


class BatchWriter:
    """Writer of the attempts of one run. run: its name in messages."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self._run = run
        self._log: Path | None = None  # None until an attempt is appended to it
        self._log_bytes = 0
        self._logged: list[Mapping[str, pa.Table]] = []  # the rows of the log, by attempt

    @property
    def has_log(self) -> bool:
        """True if attempts were appended that are in no batch."""
        return self._log is not None

    def append(self, rows: Mapping[str, pa.Table]) -> None:
        """Store the rows of an attempt, by table. They are on disk when this returns."""
        if self._log is None:
            self._log = self._begin_log()
        line = to_line(rows)
        with self._log.open("r+b") as file:
            # A full disk may have taken half a line before.
            if file.seek(0, os.SEEK_END) != self._log_bytes:
                file.truncate(self._log_bytes)
                file.seek(self._log_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._log_bytes += len(line)
        self._logged.append(rows)
        if len(self._logged) >= BATCH:
            self.close()

    def close(self, drop_damaged: bool = False) -> None:
        """Write the attempts in the log as a batch, also those of a driver that was killed.

        drop_damaged: leave out lines that differ from what was written. Without it, raise RunError.
        """
        if self._log is not None and self._log.exists():  # not if the folder was removed
            listing, tables = self.listing(), _joined(self._logged)
        else:
            stored = read_stored(self.folder, self._run)
            if stored.logged.damaged and not drop_damaged:
                raise stored.damaged_log()
            listing, tables = stored.listing, dict(stored.logged.tables)
        self._set_aside_unlisted(listing)
        if tables:
            self._write(listing, tables)
        self._remove_logs(listing.next_number)
        self._log, self._log_bytes, self._logged = None, 0, []

    def write(self, tables: Mapping[str, pa.Table], replaced: Collection[str] = ()) -> None:
        """Write tables as a batch. replaced: damaged files that leave the list."""
        self.close()
        listing = self.listing()
        self._create_log(listing)  # what is not listed is not finished if there is its log
        self._write(listing, tables, replaced)
        self._remove_logs(listing.next_number)
        self._set_aside_unlisted(self.listing())

    def take_over(self, here: Stored, other: Stored, more: Mapping[str, pa.Table]) -> None:
        """Replace the list and the log by those of another folder.

        here: what is stored in this folder. more: rows to keep that the other folder lacks.
        """
        last = max(here.listing.next_number, other.listing.next_number) - 1
        listing = replace(other.listing, last=last)
        log = self._create_log(listing)
        if more:
            self._write(listing, _joined([other.logged.tables, more]))
            self._remove_logs(listing.next_number)
            return
        replace_file(log, other.log)
        listing.write(self.folder)
        self._remove_logs(last)

    def list_cells(self, digest: str) -> None:
        """List the SHA-256 of cells.parquet."""
        listing = self.listing()
        if listing.cells != digest:
            replace(listing, cells=digest).write(self.folder)

    def listing(self) -> Listing:
        """Return the list of the batches. Raise RunError if it is damaged."""
        return read_listing(self.folder, self._run)

    def _begin_log(self) -> Path:
        self.close()
        return self._create_log(self.listing())

    def _create_log(self, listing: Listing) -> Path:
        log = self.folder / listing.log
        log.touch()
        flush_folder(self.folder)
        return log

    def _write(
        self, listing: Listing, tables: Mapping[str, pa.Table], replaced: Collection[str] = ()
    ) -> None:
        number = listing.next_number
        files = {name: digest for name, digest in listing.files.items() if name not in replaced}
        for table in sorted(tables, key=lambda table: table == ATTEMPTS):
            if tables[table].num_rows:
                name = f"{table}/{number:04}.parquet"
                content = to_parquet(tables[table])
                (self.folder / table).mkdir(exist_ok=True)
                replace_file(self.folder / name, content)
                flush_folder(self.folder / table)
                files[name] = bytes_digest(content)
        replace(listing, files=files, last=number).write(self.folder)

    def _set_aside_unlisted(self, listing: Listing) -> None:
        """Move files of batches that are not listed away: pandas reads all files of a folder.

        They were replaced, or a driver was killed before it listed them, and their attempts are in
        the log.
        """
        for table in SCHEMAS:
            for path in (self.folder / table).glob("*.parquet"):
                name = f"{table}/{path.name}"
                if is_batch(name) and name not in listing.files:
                    target = self.folder / DAMAGED_FOLDER / f"{table}-{path.name}"
                    target.parent.mkdir(exist_ok=True)
                    path.replace(target)

    def _remove_logs(self, last: int) -> None:
        # A driver that was killed may have left that of an earlier batch.
        for log in self.folder.glob("*.log"):
            if log.stem.isdecimal() and int(log.stem) <= last:
                log.unlink()


def _joined(parts: Sequence[Mapping[str, pa.Table]]) -> dict[str, pa.Table]:
    """Return the rows of several parts as one, by table."""
    found: dict[str, list[pa.Table]] = {}
    for part in parts:
        for table, rows in part.items():
            found.setdefault(table, []).append(rows)
    joined = {}
    for table, tables in found.items():
        joined[table] = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    return joined
