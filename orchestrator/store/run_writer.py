"""Write a results folder, as the one process that holds its lock.

Each file is complete or absent, because it is renamed into place; only the log of the attempts is
appended to. A driver that ends closes the log as a batch.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from orchestrator.common.errors import RunLocked, RunUnwritable
from orchestrator.common.files import NAME_ANOTHER, replace_file, try_lock, writing
from orchestrator.store.batch_writer import BatchWriter
from orchestrator.store.layout import ATTEMPTS, LOCK_FILE, SCHEMA_VERSION
from orchestrator.store.manifest import MANIFEST_FILE, Manifest
from orchestrator.store.run import Run
from orchestrator.store.stored_tables import Columns
from orchestrator.store.tables import MEASURED_TABLES, SCHEMAS, to_columns, write_cells_file
from orchestrator.store.untrusted_files import digested_json, require_plain
from tasks.spec.attempt import ATTEMPT_FILE, Attempt, read_attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd


class RunWriter(Run):
    """A run as its one driver sees it."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        """lock: the open file that is locked, None to write without one."""
        super().__init__(folder)
        self.lock = lock
        self.batches = BatchWriter(folder, str(self))
        self.has_appended = False

    def write_manifest(self, manifest: Manifest) -> None:
        with self.writing():
            text = digested_json({**manifest, "schema_version": SCHEMA_VERSION})
            replace_file(self.folder / MANIFEST_FILE, text)

    def append(self, outcome: Outcome, commit: str | None) -> None:
        """Store an outcome. It is on disk when this returns."""
        attempt, cell, rows = outcome.attempt, outcome.attempt.cell, rows_of(outcome)
        contents = {table: len(columns["cell"]) for table, columns in rows.items()}
        row = {
            "cell": cell.id,
            "attempt": attempt.number,
            "task": cell.task,
            "task_version": cell.version,
            "params": json.dumps(cell.params.values()),
            "status": str(outcome.status),
            "stage": outcome.stage,
            "phase": outcome.phase,
            "evidence": json.dumps(dict(outcome.evidence), default=str),
            "facts": json.dumps(dict(outcome.facts), default=str),
            "started_at": round(datetime.fromtimestamp(outcome.started_at, UTC).timestamp() * 1e6),
            "wall_s": outcome.wall_s,
            "timeout_s": attempt.settings.timeout_s,
            "replaces": 0,
            "commit": commit,
            "contents": json.dumps(contents),
        }
        self._append({ATTEMPTS: to_columns([row]), **rows})

    def append_predictions(self, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Store predictions by cell. Earlier ones of a cell stay, but the latest counts."""
        earlier = self.rows("predictions", ["predicted_at"])
        # The clock may have been set back.
        latest_us = max((round(one.timestamp() * 1e6) for (one,) in earlier), default=0)
        now_us = max(time.time_ns() // 1000, latest_us + 1)
        rows = []
        for cell, predicted in samples.items():
            rows += [{"cell": cell, "predicted_at": now_us, **vars(one)} for one in predicted]
        if rows:
            self._append({"predictions": to_columns(rows)})

    def finish(self) -> None:
        """Write the attempts that this driver has in the log as a batch, if there are any."""
        if self.batches.log:
            with self.writing():
                self.batches.close()

    def end(self) -> None:
        """Finish, before the lock is released."""
        self.finish()

    def attempts_without_row(self) -> Iterator[Attempt]:
        """Yield the attempts that left a folder but no row, because their driver was killed.

        Raise RunError for a folder with a link or a pipe.
        """
        known = set(self.rows(ATTEMPTS, ["cell", "attempt"]))
        for cell, number in self.attempt_folders():
            if (cell, number) not in known:
                yield from self.attempts_in_folder(cell, number)

    def attempts_in_folder(self, cell: str, number: int) -> Iterator[Attempt]:
        """Yield the attempt that a folder holds, if its file is whole and of this cell."""
        file = self.attempt_folder(cell, number) / ATTEMPT_FILE
        if not os.path.lexists(file):
            return
        # The journal of such an attempt is read, and its log is shortened in place.
        require_plain(file.parent.parent, ("", file.parent.name))
        with suppress(ValueError, KeyError, TypeError):  # torn, or its task was removed
            attempt = read_attempt(file.read_text())
            # Another id means that the task has changed, so that the numbers belong to another
            # cell. The run may have been moved, or be somebody else's: where the attempt lies
            # counts, and not what the file says of it.
            if attempt.cell.id == cell:
                yield replace(attempt, number=number, folder=str(file.parent))

    def copy_files(self, files: Mapping[str, Path]) -> None:
        """Copy files into the run. files: by their paths in the run."""
        with self.writing():
            for name, file in files.items():
                path = self.folder / name
                if path.resolve() != file.resolve():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(path, file.read_bytes())

    def write_cells(self, cells: pd.DataFrame, key: str, facts: Mapping[str, object]) -> None:
        """Write cells.parquet, a row per cell. key, facts: see `tables`."""
        with self.writing():
            digest = write_cells_file(self.folder, cells, key, facts)
            listing = self.stored().listing
            if listing.cells != digest:
                listing.model_copy(update={"cells": digest}).write(self.folder)

    def write_tables(self, tables: Mapping[str, pd.DataFrame]) -> None:
        """Write all rows of tables as a batch, in their order."""
        found = {}
        for table, rows in tables.items():
            whole = pa.Table.from_pandas(rows, SCHEMAS[table], preserve_index=False)
            # pandas adds metadata with its version, which would change the file's digest.
            found[table] = whole.replace_schema_metadata(None)
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.batches.close()
            self.batches.write(self.stored().listing, found)

    def _append(self, rows: Mapping[str, Columns]) -> None:
        with self.writing():
            self.batches.append(rows)
            self.has_appended = True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise RunUnwritable for what the disk refuses during the body."""
        with writing(self.folder):
            # If the folder was removed, another driver may have begun a new one: the lock of a
            # removed file is still held, but excludes nobody.
            path = self.folder / LOCK_FILE
            if (
                self.lock
                and path.exists()
                and not os.path.samestat(os.fstat(self.lock.fileno()), path.stat())
            ):
                raise RunUnwritable(
                    f"{self}: was removed, and another driver writes to a new folder of that name",
                    "Name another folder with --out",
                )
            yield


@contextmanager
def locked(run: Run) -> Iterator[IO[str]]:
    """Lock the run's folder and yield the locked file. Raise RunLocked or RunUnwritable.

    What was created for a command that was refused before it wrote a manifest is removed again.
    """
    if run.is_published:
        raise RunUnwritable(
            f"{run.folder}: is published and cannot be measured into",
            "Name another folder with --out",
        )
    lock_file = run.folder / LOCK_FILE
    with writing(run.folder, if_missing=NAME_ANOTHER):
        new = [path for path in (lock_file, *lock_file.parents) if not path.exists()]
        run.folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file.open("a+")
    with lock:
        try:
            # The kernel releases this lock when the process dies, also by -9, so that none is ever
            # stale.
            if not try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, run):
                lock.seek(0)
                holder = lock.read().split("\n")[-1] or "another driver"
                raise RunLocked(
                    f"{run}: {holder} writes to it",
                    "Wait for it, stop it, or name another folder with --out",
                )
            with writing(run.folder):
                # Earlier lines name drivers that have ended (see `mirror_writer.owned`).
                started = datetime.now(UTC).isoformat(timespec="seconds")
                lock.write(f"\nprocess {os.getpid()} on {socket.gethostname()} (since {started})")
                lock.flush()
            yield lock
        finally:
            for path in () if run.exists else new:  # each folder comes after its contents
                with suppress(OSError):  # not empty
                    if path.is_dir():
                        path.rmdir()
                    else:
                        path.unlink()


def rows_of(outcome: Outcome) -> dict[str, Columns]:
    """Return what an attempt measured, by table. Tables without a row are left out."""
    key = {"cell": outcome.attempt.cell.id, "attempt": outcome.attempt.number}
    rows = {table: getattr(outcome, table) for table in MEASURED_TABLES}
    return {
        table: to_columns([{**key, **vars(record)} for record in records])
        for table, records in rows.items()
        if records
    }
