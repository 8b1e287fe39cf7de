"""The one writer of a results folder, which holds its lock.

A part is written next to its final name and renamed, and an attempt's row is written last: its presence
is completion. Full batches of small parts are merged into larger ones.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from orchestrator.common.errors import RunError, RunLocked, RunUnwritable
from orchestrator.common.files import replace_file, writing
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.parquet_parts import (
    is_merged,
    merge,
    replaced_parts,
    require_readable_parts,
    write_part,
)
from orchestrator.store.run import Run
from orchestrator.store.tables import (
    ATTEMPTS,
    MEASURED_TABLES,
    PREDICTIONS,
    SCHEMA_VERSION,
    SCHEMAS,
)
from tasks.spec.attempt import ATTEMPT_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd

MERGE_BATCH = 128


class RunWriter(Run):
    """The one driver's view. Every write is aside and renamed, so that a reader never sees half a file."""

    def __init__(self, folder: Path, lock: IO[str] | None = None) -> None:
        """lock: the file that is locked."""
        super().__init__(folder)
        self.lock = lock
        self._appended = 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises RunUnwritable, also where the folder was taken away and another driver has begun one of that name."""
        with writing(self.folder):
            self._require_lock()
            yield

    def _require_lock(self) -> None:
        lock = self.folder / ".lock"
        if (
            self.lock
            and lock.exists()
            and not os.path.samestat(os.fstat(self.lock.fileno()), lock.stat())
        ):
            raise RunUnwritable(
                f"{self}: was taken away meanwhile, and another driver is at work in a new one",
                "Name another folder with --out",
            )

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps({"schema_version": SCHEMA_VERSION, **manifest}, indent=1)
        with self._writing():
            replace_file(self.folder / MANIFEST_FILE, text.encode())

    def append(self, outcome: Outcome, commit: str | None) -> None:
        """Keeps an outcome: what it measured first, its attempt last."""
        key = {"cell": outcome.attempt.cell.id, "attempt": outcome.attempt.number}
        name = f"{key['cell']}-{key['attempt']}.parquet"
        with self._writing():
            for table in MEASURED_TABLES:
                if records := getattr(outcome, table):
                    rows = [{**key, **asdict(record)} for record in records]
                    write_part(
                        self.folder / table / name, pa.Table.from_pylist(rows, SCHEMAS[table])
                    )
            row = {**key, **_attempt_row(outcome), "commit": commit}
            write_part(self.folder / "attempts" / name, pa.Table.from_pylist([row], ATTEMPTS))
        self._appended += 1
        if self._appended % MERGE_BATCH == 0:
            self.merge_parts()

    def append_predictions(self, samples: Mapping[str, Iterable[Sample]]) -> None:
        """By cell. What was predicted of a cell before stays, and counts no more."""
        now = datetime.now(UTC)
        rows = [
            {"cell": cell, "predicted_at": now, **asdict(sample)}
            for cell, own in samples.items()
            for sample in own
        ]
        if rows:
            with self._writing():
                name = f"{time.time_ns()}.parquet"
                write_part(
                    self.folder / "predictions" / name, pa.Table.from_pylist(rows, PREDICTIONS)
                )

    def require_readable_parts(self) -> None:
        """Raises RunError for a part that is torn or of another program: before hours are measured beside it, not after."""
        for table, schema in SCHEMAS.items():
            require_readable_parts(self.folder / table, schema)

    def attempts_without_row(self, recorded: Iterable[tuple[str, int]]) -> Iterator[Attempt]:
        """Yield the attempts that left a folder but no row, because their driver was killed."""
        known = set(recorded)
        for cell, number in self._attempt_folders():
            file = self.attempt_folder(cell, number) / ATTEMPT_FILE
            if (cell, number) in known or not file.exists():
                continue
            with suppress(ValueError, KeyError, TypeError):  # torn, or its task was removed
                attempt = Attempt.from_json(file.read_text())
                # Another id means that the task has changed, so that the numbers belong to
                # another cell. The folder is set anew, because the run may have been moved.
                if attempt.cell.id == cell:
                    yield replace(attempt, folder=str(file.parent))

    def merge_parts(self) -> None:
        """Turns each full batch of small parts into one, so that ten thousand attempts are not ten thousand files."""
        with self._writing():
            for table in SCHEMAS:
                for name in replaced_parts(
                    self.folder / table
                ):  # left by a kill in the middle of this
                    (self.folder / table / name).unlink(missing_ok=True)
                small = [
                    p
                    for p in sorted((self.folder / table).glob("*.parquet"))
                    if not is_merged(p) and self.may_merge(p)
                ]
                for start in range(0, len(small) - MERGE_BATCH + 1, MERGE_BATCH):
                    with suppress(RunError):  # measuring goes on; who reads the run is told
                        merge(small[start : start + MERGE_BATCH], SCHEMAS[table])

    def may_merge(self, part: Path) -> bool:
        """Whether a small part may go into a larger one already."""
        return True

    def write_cells(self, cells: pd.DataFrame) -> None:
        with self._writing():
            write_part(
                self.folder / "cells.parquet", pa.Table.from_pandas(cells, preserve_index=False)
            )

    def write_table(self, table: str, rows: pd.DataFrame) -> None:
        """All rows of a table as its one part, in their order."""
        if len(rows):
            with self._writing():
                (self.folder / table).mkdir(parents=True, exist_ok=True)
                whole = pa.Table.from_pandas(rows, SCHEMAS[table], preserve_index=False)
                write_part(self.folder / table / "all.parquet", whole.replace_schema_metadata(None))


@contextmanager
def open_folder_for_writing(run: Run) -> Iterator[RunWriter]:
    """Lock the run's folder and return its writer. Raise RunLocked or RunUnwritable."""
    if run.is_published:
        raise RunUnwritable(
            f"{run.folder}: is published, and no more is measured into it",
            "Name another folder with --out",
        )
    own = [run.folder / name for name in (".lock", "artifacts", *SCHEMAS)]
    with writing(run.folder):
        new = [path for path in (*own, run.folder, *run.folder.parents) if not path.exists()]
        for folder in own[1:]:
            folder.mkdir(parents=True, exist_ok=True)
        lock = own[0].open("a+")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            raise RunLocked(
                f"{run}: another driver is at work in it: {lock.read().strip() or 'unknown'}",
                "Wait for it, stop it, or name another folder with --out",
            ) from error
        with writing(run.folder):
            lock.truncate(0)
            started = datetime.now(UTC).isoformat(timespec="seconds")
            lock.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")
            lock.flush()
        try:
            yield RunWriter(run.folder, lock)
        finally:
            if not run.exists:  # it was refused before anything ran
                _take_away(new)


def _take_away(paths: Iterable[Path]) -> None:
    """A lock, and folders that are empty, each before what it is in."""
    for path in paths:
        with suppress(OSError):  # something is in it
            path.rmdir() if path.is_dir() else path.unlink()


def _attempt_row(outcome: Outcome) -> dict[str, Any]:
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
        "replaces": outcome.attempt.replaces,
    }
