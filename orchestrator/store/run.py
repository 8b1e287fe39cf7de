"""A run's folder: what is in it, how it is written so that nothing is lost, how it is read.

    run.json        the config, the fingerprint, who ran what when: rewritten by rename
    attempts/       one Parquet part an attempt, written last: its presence is completion
    samples/        one Parquet part an attempt that measured something
    kernels/        one Parquet part an attempt whose kernels were watched
    allocations/    one Parquet part an attempt of which a snapshot of the device's memory was taken
    live/           how much memory lived when in those
    predictions/    one Parquet part a run that predicted the memory of its cells
    artifacts/      CELL/NUMBER/: attempt.json, journal.jsonl, log.txt, and what instruments leave
    cells.parquet   one wide row a cell: derived from the parts, rewritten by rename
    report/         what `sweep report` renders
    cache/          compiled kernels, shared by the cells of the run

Runs that were published (publishing) lie side by side in a folder with a list of their files, and are read only.

Only the driver that holds the lock writes. Parts are merged, a batch at a time, into larger ones; a merged part names
the parts it replaces, so that a crash between the two writes leaves nothing counted twice. How a part is read
and written says `parts`. A run may also lie elsewhere, with its working copy here (remote).
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from orchestrator.common.errors import RunError, RunLocked, RunUnwritable, nearest
from orchestrator.store.manifest import MANIFEST_FILE, WRITTEN_AGAIN, read_manifest
from orchestrator.store.parquet_parts import (
    ATTEMPTS,
    PREDICTIONS,
    SCHEMAS,
    Content,
    empty_table,
    give_back_memory,
    is_merged,
    merge,
    read_parts,
    replace_file,
    replaced_parts,
    require_parts,
    with_categories,
    write_part,
    writing,
)
from tasks.spec.attempt import ATTEMPT_FILE, Attempt
from tasks.spec.outcome import Outcome
from tasks.spec.tables import Sample

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1  # 1: attempts and samples; kernels, allocations and live since, which an older program passes over
MERGE_BATCH = 128
PUBLICATION_FILE = "publication.json"  # in a folder of published runs: what is in it
CONFIG_FILE = "config.yaml"  # in each of them
REDACTED = "…"  # there, for what is of the machine that measured it
_BATCH_ROWS = 10_000
_PARTS_AT_ONCE = 16
_SUGGESTED, _NAMED = (
    20,
    5,
)  # of the cells of a run, where one is looked for in vain, or several are found

_MEASURED = (
    "samples",
    "kernels",
    "allocations",
    "live",
)  # by the names that they have in an outcome


class Run:
    """One results folder, to read. `opened_for_writing` gives it to one driver at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __str__(self) -> str:
        """As the command line names it."""
        return str(self.folder)

    @property
    def exists(self) -> bool:
        return (self.folder / MANIFEST_FILE).exists()

    @property
    def is_published(self) -> bool:
        """Whether it is a publication, or one of its runs: to read only."""
        return any(
            (folder / PUBLICATION_FILE).exists() for folder in (self.folder, self.folder.parent)
        )

    def bring_artifacts(self, cell: str = "") -> None:
        """Has here what people read of attempts, of one cell or of all: of a folder of this host it is. Raises RunUnreachable."""

    def require(self) -> Run:
        """Raises RunError where there is no run."""
        if (self.folder / PUBLICATION_FILE).exists() and not self.exists:
            within = ", ".join(
                sorted(shlex.quote(str(path.parent)) for path in self.folder.glob("*/run.json"))
            )
            raise RunError(
                f"{self.folder}: holds runs that were published", f"Name one of them: {within}"
            )
        if not self.exists and any((self.folder / "attempts").glob("*.parquet")):
            raise RunError(f"{self}: its {MANIFEST_FILE} is gone", f"Restore it: {WRITTEN_AGAIN}")
        if not self.exists:
            raise RunError(
                f"{self}: holds no run",
                "Name a folder that `sweep run` wrote, such as results/demo",
            )
        return self

    def read_manifest(self) -> dict[str, Any]:
        """run.json; empty before the first run. Raises RunError for what is none, RunMismatch for one of a newer program."""
        return (
            read_manifest(self.folder / MANIFEST_FILE, f"{self}/{MANIFEST_FILE}", SCHEMA_VERSION)
            if self.exists
            else {}
        )

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pd.DataFrame:
        """One of the tables as a frame, all parts with their schemas unified; missing columns are null.

        categories: texts as such, which of millions of rows that name few things takes a tenth of the memory.
        """
        if categories:
            return self._read_categories(table, columns)
        frame: pd.DataFrame = self._read_table(table, columns).to_pandas()
        return frame

    def _read_categories(self, table: str, columns: list[str] | None) -> pd.DataFrame:
        """Some parts at a time: they take several times as much while they are read, and pandas its time for each time."""
        import pandas as pd
        from pandas.api.types import union_categoricals

        schema = with_categories(SCHEMAS[table])
        empty = empty_table(schema, columns)

        def as_columns(parts: list[pa.Table]) -> dict[str, pd.Series[Any]]:
            whole = pa.concat_tables(
                [empty, *parts], promote_options="permissive"
            ).unify_dictionaries()
            return {name: whole[name].to_pandas() for name in whole.column_names}

        parts = [
            as_columns([]),
            *read_parts(self.folder / table, schema, columns, as_columns, _PARTS_AT_ONCE),
        ]
        joined: dict[str, Any] = {
            name: union_categoricals([_of_texts(part.pop(name)) for part in parts])
            if isinstance(parts[0][name].dtype, pd.CategoricalDtype)
            else pd.concat([part.pop(name) for part in parts], ignore_index=True)
            for name in empty.column_names
        }
        give_back_memory()
        return pd.DataFrame(joined, copy=False)

    def rows(self, table: str, columns: list[str]) -> Iterator[tuple[Any, ...]]:
        """The same row by row, for what should not wait until pandas is imported, or not have all of it in memory."""
        for batch in self._read_table(table, columns).to_batches(_BATCH_ROWS):
            yield from zip(*(batch.column(name).to_pylist() for name in columns), strict=True)

    def missing(self) -> int:
        """How many of the cells that the last command asked for, at least, have not ended yet."""
        asked = int(self.read_manifest().get("asked", 0))
        return max(0, asked - len(set(self.rows("attempts", ["cell"])))) if asked else 0

    def unmeasured(self) -> dict[str, str]:
        """`121 of 360` under the name of each run of which so much is missing."""
        missing = self.missing()
        return (
            {self.folder.name: f"{missing} of {self.read_manifest()['asked']}"} if missing else {}
        )

    def write_report(self, files: Iterable[tuple[str, Content]]) -> None:
        """Each by its path in the report. Raises RunUnwritable: a run may be somebody else's, to read only."""
        give_back_memory()
        with writing(self.folder, "Copy the run to a folder of your own, and report that"):
            for name, content in files:
                path = self.folder / "report" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, content)

    def attempt_folder(self, cell: str, number: int) -> Path:
        return self.folder.absolute().joinpath("artifacts", cell, str(number))

    def highest_attempts(self) -> dict[str, int]:
        """The highest attempt number of each cell of which anything is here, finished or not: its folder, or what it measured."""
        highest: dict[str, int] = {}
        for cell, number in (*self._attempt_folders(), *self._measured_attempts()):
            highest[cell] = max(number, highest.get(cell, 0))
        return highest

    def unrecorded(self, recorded: Iterable[tuple[str, int]]) -> Iterator[Attempt]:
        """Attempts that left a folder but no row: their driver died before it could write one."""
        known = set(recorded)
        for cell, number in self._attempt_folders():
            file = self.attempt_folder(cell, number) / ATTEMPT_FILE
            if (cell, number) in known or not file.exists():
                continue
            with suppress(ValueError, KeyError, TypeError):  # torn, or of a task that is no more
                attempt = Attempt.from_json(file.read_text())
                if (
                    attempt.cell.id == cell
                ):  # else its task has changed since: those numbers are of another cell
                    yield replace(attempt, folder=str(file.parent))  # the run may have been moved

    def _read_table(self, table: str, columns: list[str] | None) -> pa.Table:
        parts = read_parts(self.folder / table, SCHEMAS[table], columns)
        return pa.concat_tables(
            [empty_table(SCHEMAS[table], columns), *parts], promote_options="permissive"
        )

    @contextmanager
    def opened_for_writing(self) -> Iterator[RunWriter]:
        """Raises RunLocked, saying who holds it, or RunUnwritable."""
        if self.is_published:
            raise RunUnwritable(
                f"{self.folder}: is published, and no more is measured into it",
                "Name another folder with --out",
            )
        own = [self.folder / name for name in (".lock", "artifacts", *SCHEMAS)]
        with writing(self.folder):
            new = [path for path in (*own, self.folder, *self.folder.parents) if not path.exists()]
            for folder in own[1:]:
                folder.mkdir(parents=True, exist_ok=True)
            lock = own[0].open("a+")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                raise RunLocked(
                    f"{self}: another driver is at work in it: {lock.read().strip() or 'unknown'}",
                    "Wait for it, stop it, or name another folder with --out",
                ) from error
            with writing(self.folder):
                lock.truncate(0)
                started = datetime.now(UTC).isoformat(timespec="seconds")
                lock.write(f"process {os.getpid()} on {socket.gethostname()} since {started}")
                lock.flush()
            try:
                yield RunWriter(self.folder, lock)
            finally:
                if not self.exists:  # it was refused before anything ran
                    _take_away(new)

    def _attempt_folders(self) -> Iterator[tuple[str, int]]:
        for path in sorted((self.folder / "artifacts").glob("*/*")):
            if path.name.isdigit():
                yield path.parent.name, int(path.name)

    def _measured_attempts(self) -> Iterator[tuple[str, int]]:
        """With or without a row: another host's driver, cut off from where the run is, may have left what it measured alone."""
        for table in _MEASURED:
            folder = self.folder / table
            for name in {path.name for path in folder.glob("*.parquet")} | replaced_parts(folder):
                cell, _, number = name.removesuffix(".parquet").rpartition("-")
                if cell and number.isdigit() and not is_merged(Path(name)):
                    yield cell, int(number)


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
            for table in _MEASURED:
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

    def require_parts(self) -> None:
        """Raises RunError for a part that is torn or of another program: before hours are measured beside it, not after."""
        for table, schema in SCHEMAS.items():
            require_parts(self.folder / table, schema)

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

    def write_whole(self, table: str, rows: pd.DataFrame) -> None:
        """All rows of a table as its one part, in their order."""
        if len(rows):
            with self._writing():
                (self.folder / table).mkdir(parents=True, exist_ok=True)
                whole = pa.Table.from_pandas(rows, SCHEMAS[table], preserve_index=False)
                write_part(self.folder / table / "all.parquet", whole.replace_schema_metadata(None))


def _take_away(paths: Iterable[Path]) -> None:
    """A lock, and folders that are empty, each before what it is in."""
    for path in paths:
        with suppress(OSError):  # something is in it
            path.rmdir() if path.is_dir() else path.unlink()


def find_cell(prefix: str, cells: Iterable[str], run: Run, what: str = "cell") -> str:
    """The one of these cells of a run whose id begins so. what: as which they are named. Raises RunError for none, or several."""
    known = list(map(str, cells))
    found = [cell for cell in known if cell.startswith(prefix)]
    if not found:
        raise RunError(f"{run}: has no {what} {prefix!r}", nearest(prefix, known[:_SUGGESTED]))
    if len(found) > 1:
        raise RunError(
            f"{run}: {prefix!r} begins {len(found)} {what}s",
            f"Say which: {', '.join(found[:_NAMED])}",
        )
    return found[0]


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


def _of_texts(column: pd.Series[Any]) -> pd.Series[Any]:
    """A categorical column, which is one of texts also where it is all null."""
    return column if len(column.cat.categories) else column.cat.set_categories([""])
