"""Write a results folder, as the one process that holds its lock.

Each file is complete or absent, because it is renamed into place. An attempt's row is written
last: its presence means that the attempt is stored.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from orchestrator.common.errors import RunError, RunLocked, RunUnwritable
from orchestrator.common.files import replace_file, try_lock, writing
from orchestrator.store.layout import ARTIFACTS, ATTEMPTS, CELLS_FILE, LOCK_FILE, SCHEMA_VERSION
from orchestrator.store.manifest import MANIFEST_FILE, Manifest, manifest_text
from orchestrator.store.parquet_parts import (
    WHOLE_TABLE,
    is_merged,
    merge,
    replaced_parts,
    stored_rows,
    to_parquet,
    write_part,
)
from orchestrator.store.row_digests import RowsDigest
from orchestrator.store.run import Run
from orchestrator.store.tables import MEASURED_TABLES, SCHEMAS
from orchestrator.store.untrusted_files import require_plain_entries
from tasks.spec.attempt import ATTEMPT_FILE, Attempt, read_attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd

# Reading a part takes about 1 ms (measured), however few rows it has: 10,000 parts would take 10 s
# a table.
MERGE_BATCH = 128


class RunWriter(Run):
    """A run as its one driver sees it."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        """lock: the open file that is locked, None to write without one."""
        super().__init__(folder)
        self.lock = lock
        self._appended = 0

    def write_manifest(self, manifest: Manifest) -> None:
        text = manifest_text({"schema_version": SCHEMA_VERSION, **manifest})
        with self._writing():
            replace_file(self.folder / MANIFEST_FILE, text)

    def append(self, outcome: Outcome, commit: str | None) -> None:
        """Store an outcome: first what was measured, then the attempt's row."""
        cell, number = outcome.attempt.cell.id, outcome.attempt.number
        key, name = {"cell": cell, "attempt": number}, f"{cell}-{number}"
        contents = {}
        with self._writing():
            for table in MEASURED_TABLES:
                rows = [{**key, **asdict(record)} for record in getattr(outcome, table)]
                if rows:
                    contents[table] = self._write_rows(table, name, rows)[name]
            row = {**key, **_attempt_row(outcome), "commit": commit}
            self._write_rows(ATTEMPTS, name, [{**row, "contents": json.dumps(contents)}])
        self._appended += 1
        if self._appended % MERGE_BATCH == 0:
            self.merge_parts()

    def append_predictions(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        """Store predictions by cell. Earlier ones of a cell stay, but the latest counts."""
        if not samples:
            return
        now, rows = self._prediction_time(), []
        for cell, predicted in samples.items():
            rows += [{"cell": cell, "predicted_at": now, **asdict(sample)} for sample in predicted]
        if rows:
            with self._writing():
                self._write_rows("predictions", str(time.time_ns()), rows)

    def require_readable_parts(self) -> None:
        """Raise RunError for a damaged part, before hours are measured in vain.

        Only footers are read, and the pages are not checked.
        """
        for table, schema in SCHEMAS.items():
            stored_rows(self.folder / table, schema, ())

    def attempts_without_row(self, recorded: Iterable[tuple[str, int]]) -> Iterator[Attempt]:
        """Yield the attempts that left a folder but no row, because their driver was killed.

        Raise RunError for a folder with a link or a pipe.
        """
        known = set(recorded)
        for cell, number in self._attempt_folders():
            file = self.attempt_folder(cell, number) / ATTEMPT_FILE
            if (cell, number) in known or not os.path.lexists(file):
                continue
            # The journal of such an attempt is read, and its log is shortened in place.
            require_plain_entries(file.parent.parent)
            require_plain_entries(file.parent)
            with suppress(ValueError, KeyError, TypeError):  # torn, or its task was removed
                attempt = read_attempt(file.read_text())
                # Another id means that the task has changed, so that the numbers belong to
                # another cell. The run may have been moved, or be somebody else's: where the
                # attempt lies counts, and not what the file says of it.
                if attempt.cell.id == cell:
                    yield replace(attempt, number=number, folder=str(file.parent))

    def merge_parts(self) -> None:
        """Merge each full batch of small parts."""
        with self._writing():
            for table, schema in SCHEMAS.items():
                folder = self.folder / table
                # A driver that was killed while it merged leaves parts that are replaced.
                for name in replaced_parts(folder):
                    (folder / name).unlink(missing_ok=True)
                parts = sorted(folder.glob("*.parquet"))
                small = [path for path in parts if not is_merged(path) and self.may_merge(path)]
                for start in range(0, len(small) - MERGE_BATCH + 1, MERGE_BATCH):
                    # A damaged part does not stop the measuring. Readers report it.
                    with suppress(RunError):
                        merge(small[start : start + MERGE_BATCH], schema)

    def may_merge(self, part: Path) -> bool:
        """True if a small part may be merged into a larger one now."""
        return True

    def copy_files(self, files: Mapping[str, Path]) -> None:
        """Copy files into the run. files: by their paths in the run."""
        with self._writing():
            for name, file in files.items():
                path = self.folder / name
                if path.resolve() != file.resolve():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(path, file.read_bytes())

    def write_cells(self, cells: pd.DataFrame) -> None:
        """Write cells.parquet, a row per cell."""
        with self._writing():
            table = pa.Table.from_pandas(cells, preserve_index=False)
            replace_file(self.folder / CELLS_FILE, to_parquet(table))

    def write_table(self, table: str, rows: pd.DataFrame) -> dict[str, RowsDigest]:
        """Write all rows of a table as its only part, in their order.

        Return their digests by CELL-NUMBER.
        """
        if not len(rows):
            return {}
        with self._writing():
            (self.folder / table).mkdir(parents=True, exist_ok=True)
            whole = pa.Table.from_pandas(rows, SCHEMAS[table], preserve_index=False)
            # pandas adds metadata with its version, which would change the file's digest.
            part = self.folder / table / f"{WHOLE_TABLE}.parquet"
            return write_part(part, whole.replace_schema_metadata(None))

    def _prediction_time(self) -> datetime:
        """Return the time, or one after all predictions if the clock has been set back."""
        time = datetime.now(UTC)
        for (earlier,) in self.rows("predictions", ["predicted_at"]):
            time = max(time, earlier + timedelta(microseconds=1))
        return time

    def _write_rows(
        self, table: str, name: str, rows: list[dict[str, object]]
    ) -> dict[str, RowsDigest]:
        part = self.folder / table / f"{name}.parquet"
        return write_part(part, pa.Table.from_pylist(rows, SCHEMAS[table]))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with writing(self.folder):
            self._require_lock()
            yield

    def _require_lock(self) -> None:
        # If the folder was removed, another driver may have begun a new one: the lock of a removed
        # file is still held, but excludes nobody.
        path = self.folder / LOCK_FILE
        if self.lock is None or not path.exists():
            return
        if not os.path.samestat(os.fstat(self.lock.fileno()), path.stat()):
            raise RunUnwritable(
                f"{self}: was removed, and another driver writes to a new folder of that name",
                "Name another folder with --out",
            )


@contextmanager
def open_folder_for_writing(run: Run) -> Iterator[RunWriter]:
    """Lock the run's folder and yield its writer. Raise RunLocked or RunUnwritable.

    What was created for a command that was refused before it wrote a manifest is removed again.
    """
    if run.is_published:
        raise RunUnwritable(
            f"{run.folder}: is published and cannot be measured into",
            "Name another folder with --out",
        )
    lock_file = run.folder / LOCK_FILE
    folders = [run.folder / name for name in (ARTIFACTS, *SCHEMAS)]
    with writing(run.folder):
        wanted = (lock_file, *folders, run.folder, *run.folder.parents)
        new = [path for path in wanted if not path.exists()]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file.open("a+")
    with lock:
        try:
            _lock(lock, run)
            yield RunWriter(run.folder, lock)
        finally:
            if not run.exists:
                _remove_empty(new)


def _lock(file: IO[str], run: Run) -> None:
    # The kernel releases this lock when the process dies, also by -9, so that none is ever stale.
    if not try_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, run):
        file.seek(0)
        holder = file.read().strip() or "another driver"
        raise RunLocked(
            f"{run}: {holder} writes to it",
            "Wait for it, stop it, or name another folder with --out",
        )
    with writing(run.folder):
        file.truncate(0)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(f"process {os.getpid()} on {socket.gethostname()} (since {started})")
        file.flush()


def _remove_empty(paths: Iterable[Path]) -> None:
    for path in paths:  # each folder comes after its contents
        with suppress(OSError):  # not empty
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


def _attempt_row(outcome: Outcome) -> dict[str, object]:
    cell = outcome.attempt.cell
    return {
        "task": cell.task,
        "task_version": cell.version,
        "params": json.dumps(cell.params.values()),
        "status": str(outcome.status),
        "stage": outcome.stage,
        "phase": outcome.phase,
        "evidence": json.dumps(dict(outcome.evidence), default=str),
        "facts": json.dumps(dict(outcome.facts), default=str),
        "started_at": datetime.fromtimestamp(outcome.started_at, UTC),
        "wall_s": outcome.wall_s,
        "timeout_s": outcome.attempt.settings.timeout_s,
        "replaces": 0,
    }
