"""The tables of a run as they are stored at one moment: its batches, its log and older parts.

A driver may close a batch while somebody reads. What is read is what was stored when `Stored` was
made: the files of batches never change, and the log was read then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.common.files import trim_memory
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.attempt_log import LogContents, read_log
from orchestrator.store.layout import ATTEMPTS, LISTING_FILE
from orchestrator.store.listing import RESTORE, Listing, read_listing
from orchestrator.store.old_parts import PartOwners, current_parts, is_checked
from orchestrator.store.parquet_file import (
    is_as_written,
    open_parquet,
    read_rows,
    require_valid_rows,
)
from orchestrator.store.tables import MEASURED_TABLES, SCHEMAS, empty_table, with_categories
from tasks.spec.messages import error_text

if TYPE_CHECKING:
    import pandas as pd

Built = TypeVar("Built")
_READ_TRIES = 5
_FILES_AT_ONCE = 16


@dataclass(frozen=True)
class Stored:
    """The tables of a run at one moment. run: its name in messages."""

    folder: Path
    run: str
    listing: Listing
    log: bytes = b""

    @cached_property
    def logged(self) -> LogContents:
        """The attempts in the log. Raise RunError if the log is of another program."""
        try:
            return read_log(self.log)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
            pa.ArrowException,
        ) as error:
            reason = error_text(error).splitlines()[0]
            raise RunError(
                f"{self.run}/{self.listing.log}: cannot be read: {reason}", RESTORE
            ) from error

    def read(self, table: str, schema: pa.Schema, columns: list[str] | None) -> pa.Table:
        """Return a table. Raise RunError if an attempt or prediction of it is damaged."""
        found = self.build(table, schema, columns, lambda parts: parts[0], 1)
        return pa.concat_tables(
            [empty_table(schema, columns), *found], promote_options="permissive"
        )

    def build(
        self,
        table: str,
        schema: pa.Schema,
        columns: list[str] | None,
        build: Callable[[list[pa.Table]], Built],
        batch_size: int,
    ) -> list[Built]:
        """Call `build` with as many files of a table at a time and return the results.

        Only one file is open at a time: a run may have more files than a process may open.
        """
        built, waiting = [], []
        for rows in self._each(table, schema, columns):
            waiting.append(rows)
            if len(waiting) == batch_size:
                built.append(build(waiting))
                waiting = []
        return [*built, build(waiting)] if waiting else built

    def read_file(self, name: str) -> pa.Table:
        """Return all rows of a listed file."""
        schema = SCHEMAS[name.partition("/")[0]]
        with open_parquet(self.folder / name, schema, RESTORE) as file:
            return read_rows(file, schema, None)

    def damaged(self, table: str) -> list[str]:
        """Return the listed files of a table that are missing, or not those that were written."""
        names = self.listing.of_table(table)
        return [name for name in names if not self._is_whole(name)]

    def count(self, table: str, schema: pa.Schema) -> int:
        """Return the number of rows of a table, by the footers of its files."""
        rows: int = self._of_log(table).num_rows
        for name in self._names(table):
            with open_parquet(self.folder / name, schema, RESTORE) as file:
                rows += file.metadata.num_rows
        owners = PartOwners()
        for path in current_parts(self.folder / table):
            with owners.opened(path, schema) as part:
                rows += part.metadata.num_rows
        return rows

    def versions(self, table: str) -> list[tuple[str, str]]:
        """Return what changes with every change of a table."""
        versions = [(name, self.listing.files[name]) for name in self.listing.of_table(table)]
        for path in current_parts(self.folder / table):
            status = path.stat()
            versions.append((path.name, f"{status.st_size} {status.st_mtime_ns}"))
        return [*versions, (self.listing.log, bytes_digest(self.log))]

    def damaged_log(self) -> RunError:
        """Return the error for a log with damaged lines."""
        return RunError(
            f"{self.run}/{self.listing.log}: is damaged: {self.logged.damaged} of its lines differ"
            " from what was written",
            RESTORE,
        )

    def _each(self, table: str, schema: pa.Schema, columns: list[str] | None) -> Iterator[pa.Table]:
        for name in self._names(table):
            with open_parquet(self.folder / name, schema, RESTORE) as file:
                rows = read_rows(file, schema, columns)
            yield rows
        owners = PartOwners()
        for path in current_parts(self.folder / table):
            with owners.opened(path, schema) as part:
                rows = read_rows(part, schema, columns)
                # A part with a checksum was written by this program, and its rows are valid.
                if not is_checked(path):
                    require_valid_rows(rows)
            yield rows
        logged = self._of_log(table)
        if logged.num_rows:
            rows = logged.select(columns) if columns is not None else logged
            yield _with_types(rows, schema)

    def _names(self, table: str) -> Iterator[str]:
        """Yield the files of a table that are as they were written.

        Without an attempt, nobody knows what is missing. Missing rows of other tables are reported
        by `Run.incomplete_attempts`.
        """
        for name in self.listing.of_table(table):
            if self._is_whole(name):
                yield name
            elif table not in MEASURED_TABLES:
                raise RunError(f"{self.run}/{name}: {self._damage(name)}", RESTORE)

    def _is_whole(self, name: str) -> bool:
        return is_as_written(self.folder / name, self.listing.files[name])

    def _damage(self, name: str) -> str:
        if not (self.folder / name).exists():
            return "is missing"
        return "is damaged: it differs from what was written"

    def _of_log(self, table: str) -> pa.Table:
        if table == ATTEMPTS and self.logged.damaged:
            raise self.damaged_log()
        return self.logged.tables.get(table, _NO_ROWS)


_NO_ROWS = pa.table({})


def read_categories(stored: Stored, table: str, columns: list[str] | None) -> pd.DataFrame:
    """Return a table as a frame with texts as categories."""
    import pandas as pd

    # Reading takes several times the memory of the result, and pandas takes its time for each
    # batch: 16 files are a compromise.
    schema = with_categories(SCHEMAS[table])
    empty = empty_table(schema, columns)

    def to_columns(parts: list[pa.Table]) -> dict[str, pd.Series]:
        batch = pa.concat_tables([empty, *parts], promote_options="permissive")
        batch = batch.unify_dictionaries()
        return {name: batch[name].to_pandas() for name in batch.column_names}

    built = stored.build(table, schema, columns, to_columns, _FILES_AT_ONCE)
    batches = [to_columns([]), *built]
    # Each column leaves its batches before the next one is joined.
    joined: dict[str, pd.Series | pd.Categorical] = {}
    for name in empty.column_names:
        joined[name] = _join([batch.pop(name) for batch in batches])
    trim_memory()
    return pd.DataFrame(joined, copy=False)


def read_stored(folder: Path, run: str) -> Stored:
    """Return what is stored now. Raise RunError if the list of the batches is damaged."""
    for _ in range(_READ_TRIES):
        before = _version(folder / LISTING_FILE)
        try:
            listing = read_listing(folder, run)
            log = _content(folder / listing.log)
        except RunError:
            if _version(folder / LISTING_FILE) == before:
                raise
            continue
        if _version(folder / LISTING_FILE) == before:
            return Stored(folder, run, listing, log)
    raise RunError(f"{run}: changes faster than it can be read", "Try again")


def _content(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        if path.exists():  # False also where a link leads to itself
            return path.read_bytes()
    return b""


def _version(path: Path) -> tuple[int, ...]:
    if not path.exists():
        return ()
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _with_types(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the types of a schema, whose texts may be dictionaries."""
    fields = []
    for field in rows.schema:
        fields.append(schema.field(field.name) if field.name in schema.names else field)
    return rows.cast(pa.schema(fields))


def _join(columns: list[pd.Series]) -> pd.Series | pd.Categorical:
    import pandas as pd
    from pandas.api.types import union_categoricals

    if not isinstance(columns[0].dtype, pd.CategoricalDtype):
        return pd.concat(columns, ignore_index=True)
    # pd.concat would turn categories that differ between batches into text.
    # A batch of nulls has no categories, not even of text, and cannot be joined with others.
    texts = []
    for column in columns:
        has_values = len(column.cat.categories) > 0
        texts.append(column if has_values else column.cat.set_categories([""]))
    return union_categoricals(texts)
