"""Store attempts in the log of a run, and close the log as a batch.

Killing the driver between any two lines loses nothing: a line counts once it is whole, and a batch
once it is listed; until then the log with its attempts counts. A log is removed after its batch is
listed, and the log of an earlier batch is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from orchestrator.common.files import flush_folder, replace_file
from orchestrator.common.hashing import sha256
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import Listing, batches_in
from orchestrator.store.stored_tables import Columns, read_stored, to_line
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
            self.log = self.folder / read_stored(self.folder, self.run).listing.log
            self.log.touch()
            flush_folder(self.folder)
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

    def close(self) -> None:
        """Write the attempts in the log as a batch, also those of a driver that was killed.

        Raise RunError if lines of it are damaged.
        """
        stored = read_stored(self.folder, self.run)
        stored.require_whole_log()
        if stored.logged:
            self.write(stored.listing, stored.logged)
        else:
            self.set_aside_unlisted(stored.listing)
            self.remove_logs()
        self.log, self.log_bytes, self.lines = None, 0, 0

    def write(self, listing: Listing, tables: Mapping[str, pa.Table], number: int = 0) -> Listing:
        """Write tables as a batch, and replace the list by this one and the batch. Return it.

        number: of a batch that is written again; 0: write the batch that comes next.
        """
        if not number:
            number = listing.next_number
            # Without a log, a batch that is not listed counts as lost.
            (self.folder / listing.log).touch()
            flush_folder(self.folder)
        self.set_aside_unlisted(listing)
        files = dict(listing.files)
        for table in sorted(tables, key=lambda table: table == ATTEMPTS):
            if tables[table].num_rows:
                name = f"{table}/{number:04}.parquet"
                content = to_parquet(tables[table])
                (self.folder / table).mkdir(exist_ok=True)
                replace_file(self.folder / name, content)
                flush_folder(self.folder / table)
                files[name] = sha256(content)
        listing = listing.model_copy(update={"files": files, "last": max(listing.last, number)})
        listing.write(self.folder)
        self.remove_logs(listing.log)
        return listing

    def remove_logs(self, but: str = "") -> None:
        """Remove all logs but one. A driver that was killed may have left others."""
        for log in self.folder.glob("*.log"):
            if log.stem.isdecimal() and log.name != but:
                log.unlink()

    def set_aside_unlisted(self, listing: Listing) -> None:
        """Move files of batches that are not listed away: pandas reads all files of a folder.

        They are damaged, or a driver was killed before it listed them, and their attempts are in
        the log.
        """
        for name in batches_in(self.folder):
            if name not in listing.files:
                target = self.folder / DAMAGED_FOLDER / name.replace("/", "-")
                target.parent.mkdir(exist_ok=True)
                (self.folder / name).replace(target)
