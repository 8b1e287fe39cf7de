"""Store attempts in the log of a run, and close the log as a batch.

Killing the driver between any two lines loses nothing: a line counts once it is whole, and a batch
once it is listed; until then the log with its attempts counts. A log is removed after its batch is
listed, and the log of an earlier batch is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from orchestrator.common.files import flush_folder, replace_file
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import Listing, batches_in, read_listing
from orchestrator.store.stored_tables import Columns, Stored, read_stored, to_line
from orchestrator.store.tables import to_parquet

# Attempts in a batch: reading a file takes about 1 ms, however few rows it has.
BATCH = 128


@dataclass
class BatchWriter:
    """Writer of the attempts of one run.

    run: its name in messages. log: the log that lines were appended to, until it is closed.
    """

    folder: Path
    run: str
    log: Path | None = None
    log_bytes: int = 0
    lines: int = 0

    def append(self, rows: Mapping[str, Columns]) -> None:
        """Store the rows of an attempt, by table. They are on disk when this returns."""
        if self.log is None:
            self.close()
            self.log = self._create_log(read_listing(self.folder, self.run))
        line = to_line(rows)
        with self.log.open("r+b") as file:
            file.truncate(self.log_bytes)  # a full disk may have taken half a line before
            file.seek(self.log_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.log_bytes += len(line)
        self.lines += 1
        if self.lines >= BATCH:
            self.close()

    def close(self, drop_damaged: bool = False) -> None:
        """Write the attempts in the log as a batch, also those of a driver that was killed.

        drop_damaged: leave out lines that differ from what was written. Without it, raise RunError.
        """
        stored = read_stored(self.folder, self.run)
        if not drop_damaged:
            stored.require_whole_log()
        self._set_aside_unlisted(stored.listing)
        if stored.logged.tables:
            self.write(stored.listing, stored.logged.tables)
        else:
            self._remove_logs(stored.listing.next_number)
        self.log, self.log_bytes, self.lines = None, 0, 0

    def write(self, listing: Listing, tables: Mapping[str, pa.Table]) -> None:
        """Write tables as the batch after those of a list, and replace the list."""
        number = listing.next_number
        self._create_log(listing)  # without it, a batch that is not listed counts as lost
        files = self._write_files(number, tables)
        replace(listing, files={**listing.files, **files}, last=number).write(self.folder)
        self._remove_logs(number)

    def rebuild(self, number: int, tables: Mapping[str, pa.Table], lost: Collection[str]) -> None:
        """Write tables of a batch again. lost: names of files that leave the list."""
        listing = read_listing(self.folder, self.run)
        left = {name: digest for name, digest in listing.files.items() if name not in lost}
        self._set_aside_unlisted(replace(listing, files=left))
        left.update(self._write_files(number, tables))
        replace(listing, files=left).write(self.folder)

    def adopt(self, here: Listing, other: Stored, more: Mapping[str, pa.Table]) -> None:
        """Replace the list and the log by those of another folder.

        here: the list of this folder. more: rows to keep that the other folder lacks.
        """
        last = max(here.next_number, other.listing.next_number) - 1
        listing = replace(other.listing, last=last)
        if more:
            joined = {}
            for table in {**other.logged.tables, **more}:
                parts = [rows[table] for rows in (other.logged.tables, more) if table in rows]
                joined[table] = pa.concat_tables(parts, promote_options="permissive")
            return self.write(listing, joined)
        replace_file(self.folder / listing.log, other.log)
        listing.write(self.folder)
        self._remove_logs(last)

    def _create_log(self, listing: Listing) -> Path:
        log = self.folder / listing.log
        log.touch()
        flush_folder(self.folder)
        return log

    def _write_files(self, number: int, tables: Mapping[str, pa.Table]) -> dict[str, str]:
        """Write the files of a batch and return their SHA-256 by name."""
        files = {}
        for table in sorted(tables, key=lambda table: table == ATTEMPTS):
            if tables[table].num_rows:
                name = f"{table}/{number:04}.parquet"
                content = to_parquet(tables[table])
                (self.folder / table).mkdir(exist_ok=True)
                replace_file(self.folder / name, content)
                flush_folder(self.folder / table)
                files[name] = bytes_digest(content)
        return files

    def _set_aside_unlisted(self, listing: Listing) -> None:
        """Move files of batches that are not listed away: pandas reads all files of a folder.

        They are damaged, or a driver was killed before it listed them, and their attempts are in
        the log.
        """
        for name in batches_in(self.folder):
            if name not in listing.files:
                target = self.folder / DAMAGED_FOLDER / name.replace("/", "-")
                target.parent.mkdir(exist_ok=True)
                (self.folder / name).replace(target)

    def _remove_logs(self, last: int) -> None:
        # A driver that was killed may have left that of an earlier batch.
        for log in self.folder.glob("*.log"):
            if log.stem.isdecimal() and int(log.stem) <= last:
                log.unlink()
