"""The tables of a run as they are stored at one moment: its batches, its log and older parts.

A driver may close a batch while somebody reads. What is read is what was stored when `Stored` was
made: the files of batches never change, and the log was read then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.common.files import trim_memory
from orchestrator.common.hashing import bytes_digest
from orchestrator.store.attempt_log import LogContents, read_log
from orchestrator.store.layout import ATTEMPTS, LISTING_FILE
from orchestrator.store.listing import RESTORE, Listing, read_listing
from orchestrator.store.old_parts import read_parts
from orchestrator.store.parquet_file import damage_as_run_error, read_parquet
from orchestrator.store.tables import (
    MEASURED_TABLES,
    SCHEMAS,
    empty_table,
    with_categories,
    with_types,
)

if TYPE_CHECKING:
    import pandas as pd

_READ_TRIES = 5
# Reading takes several times the memory of the result, and pandas takes its time for each frame:
# 16 files are a compromise.
_FILES_AT_ONCE = 16


@dataclass(frozen=True)
class Stored:
    """The tables of a run at one moment. run: its name in messages."""

    folder: Path
    run: str
    listing: Listing
    log: bytes

    @cached_property
    def logged(self) -> LogContents:
        """The attempts in the log. Raise RunError if the log is of another program."""
        with damage_as_run_error(f"{self.run}/{self.listing.log}", RESTORE):
            return read_log(self.log)

    def read(self, table: str, columns: list[str] | None = None) -> pa.Table:
        """Return a table. Raise RunError if an attempt or prediction of it is damaged."""
        schema = SCHEMAS[table]
        parts = [empty_table(schema, columns), *self.parts(table, schema, columns)]
        return pa.concat_tables(parts, promote_options="permissive")

    def read_categories(self, table: str, columns: list[str] | None) -> pd.DataFrame:
        """Return a table as a frame with texts as categories. Raise RunError as `read` does."""
        import pandas as pd

        schema = with_categories(SCHEMAS[table])
        empty = empty_table(schema, columns)
        parts, waiting, series = self.parts(table, schema, columns), [empty], []
        while waiting:  # first for a table without rows
            whole = pa.concat_tables([empty, *waiting], promote_options="permissive")
            whole = whole.unify_dictionaries()
            series.append({name: whole[name].to_pandas() for name in empty.column_names})
            waiting = list(islice(parts, _FILES_AT_ONCE))
        # Each column leaves its files before the next one is joined.
        joined = {name: _join([one.pop(name) for one in series]) for name in empty.column_names}
        trim_memory()
        return pd.DataFrame(joined, copy=False)

    def parts(self, table: str, schema: pa.Schema, columns: list[str] | None) -> Iterator[pa.Table]:
        """Yield the rows of a table by file, with the types of a schema.

        Without an attempt, nobody knows what is missing: RunError is raised if its file is damaged.
        Missing rows of other tables are reported by `Run.incomplete_attempts`.
        """
        for name in self.listing.of_table(table):
            content = self.content(name)
            if content is not None:
                with damage_as_run_error(self.folder / name, RESTORE):
                    rows = read_parquet(content, schema, columns)
                yield rows
            elif table not in MEASURED_TABLES:
                problem = "is missing, or is damaged: it differs from what was written"
                raise RunError(f"{self.run}/{name}: {problem}", RESTORE)
        yield from read_parts(self.folder / table, schema, columns)
        if table == ATTEMPTS:
            self.require_whole_log()
        if table in self.logged.tables:
            rows = self.logged.tables[table]
            yield with_types(rows.select(columns) if columns else rows, schema)

    def content(self, name: str) -> bytes | None:
        """Return the content of a file, None if it is missing, not listed or not what was written."""
        content = _content(self.folder / name)
        return content if bytes_digest(content) == self.listing.files.get(name) else None

    def damaged(self) -> list[str]:
        """Return the listed files that are missing, or not those that were written."""
        names = [name for table in SCHEMAS for name in self.listing.of_table(table)]
        return [name for name in names if self.content(name) is None]

    def require_whole_log(self) -> None:
        """Raise RunError if lines of the log are damaged."""
        if self.logged.damaged:
            raise RunError(
                f"{self.run}/{self.listing.log}: is damaged: {self.logged.damaged} of its lines"
                " differ from what was written",
                RESTORE,
            )


def read_stored(folder: Path, run: str) -> Stored:
    """Return what is stored now. Raise RunError if the list of the batches is damaged."""
    for _ in range(_READ_TRIES):
        before = _content(folder / LISTING_FILE)
        try:
            listing = read_listing(folder, run)
            log = _content(folder / listing.log)
        except RunError:
            if _content(folder / LISTING_FILE) == before:
                raise
            continue
        if _content(folder / LISTING_FILE) == before:
            return Stored(folder, run, listing, log)
    raise RunError(f"{run}: changes faster than it can be read", "Try again")


def _content(path: Path) -> bytes:
    with suppress(FileNotFoundError):
        if path.exists():  # False also where a link leads to itself
            return path.read_bytes()
    return b""


def _join(columns: list[pd.Series]) -> pd.Series | pd.Categorical:
    import pandas as pd
    from pandas.api.types import union_categoricals

    if not isinstance(columns[0].dtype, pd.CategoricalDtype):
        return pd.concat(columns, ignore_index=True)
    # pd.concat would turn categories that differ between files into text.
    # A file of nulls has no categories, not even of text, and cannot be joined with others.
    texts = []
    for column in columns:
        has_values = len(column.cat.categories) > 0
        texts.append(column if has_values else column.cat.set_categories([""]))
    return union_categoricals(texts)
