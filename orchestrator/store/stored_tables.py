"""The tables of a run as they are stored at one moment: its batches, its log and older parts.

A driver may close a batch while somebody reads. What is read is what was stored when `Stored` was
made: the files of batches never change, and the log was read then.

The log has the attempts after the last batch, one a line, so that storing one is an append. A line
is the CRC32 of its JSON, which has the number of rows and the columns of each table:
{"samples": [2, {"unit": "ms", "value": [5.0, 5.1]}]}. A column of equal values is one value. Half a
line at the end belongs to an attempt that is being stored, or whose driver was killed.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.common.hashing import sha256
from orchestrator.store.layout import ATTEMPTS, CELLS_FILE, LISTING_FILE
from orchestrator.store.listing import (
    RESTORE,
    Listing,
    parse_listing,
    part_files,
    require_all_listed,
)
from orchestrator.store.manifest import MANIFEST_FILE
from orchestrator.store.old_parts import read_parts
from orchestrator.store.tables import (
    MEASURED_TABLES,
    SCHEMAS,
    damage_as_run_error,
    empty_table,
    read_parquet,
    to_table,
    with_categories,
    with_types,
)

# The values of each column of a table. A time is in microseconds since 1970.
Columns: TypeAlias = Mapping[str, Sequence[Any]]

ReadFile: TypeAlias = Callable[[str], bytes | None]

_READ_TRIES = 5
_KEY = ["cell", "attempt"]


@dataclass(frozen=True)
class Stored:
    """The tables of a run at one moment.

    folder: has the parts of older versions. run: its name in messages. read_file: returns the
    content of a file, None if it is missing.
    """

    folder: Path
    run: str
    read_file: ReadFile
    listing: Listing
    log: bytes

    @cached_property
    def logged(self) -> Mapping[str, pa.Table]:
        """The whole attempts in the log, by table. Raise RunError if another program wrote it."""
        with damage_as_run_error(f"{self.run}/{self.listing.log}", RESTORE):
            return read_log(self.log)

    def read(
        self, table: str, columns: list[str] | None = None, categories: bool = False
    ) -> pa.Table:
        """Return a table. Raise RunError if an attempt or prediction of it is damaged, or all are.

        categories: return text columns as dictionaries.
        """
        schema = with_categories(SCHEMAS[table]) if categories else SCHEMAS[table]
        parts = [empty_table(schema, columns), *self.parts(table, schema, columns)]
        found = pa.concat_tables(parts, promote_options="permissive")
        # A publication has cells.parquet, but no attempts and no manifest.
        if table == ATTEMPTS and not found.num_rows and (self.folder / MANIFEST_FILE).exists():
            with suppress(FileNotFoundError, pa.ArrowInvalid):  # the next run writes it again
                if pq.read_metadata(self.folder / CELLS_FILE).num_rows:
                    raise RunError(
                        f"{self.run}: its table {ATTEMPTS} is gone",
                        f"Copy that folder again, or remove {CELLS_FILE} to measure all cells again",
                    )
        return found

    def parts(
        self, table: str, schema: pa.Schema, columns: list[str] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of a table by file, with the types of a schema.

        Without an attempt, nobody knows what is missing: RunError is raised if its file is damaged.
        Missing rows of other tables are reported by `incomplete_attempts`.
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
        if parts := part_files(self.folder / table):
            yield from read_parts(parts, schema, columns)
        if table == ATTEMPTS:
            self.require_whole_log()
        if table in self.logged:
            rows = self.logged[table]
            yield with_types(rows.select(columns) if columns else rows, schema)

    def incomplete_attempts(self) -> dict[tuple[str, int], str]:
        """Return which rows of attempts are missing from a table, by cell and number.

        An attempt records its numbers of rows; those of older programs do not. Raise RunError for an
        attempt that is in two files, and for damage that hides which attempts there are.
        """
        written: dict[str, dict[tuple[str, int], int]] = {}
        known = set()
        for row in self.read(ATTEMPTS, [*_KEY, "contents"]).to_pylist():
            key = row["cell"], row["attempt"]
            if key in known:
                raise RunError(
                    f"{self.run}/{ATTEMPTS}: attempt {key[1]} of cell {key[0]} is in two files",
                    "Move the one that was copied away",
                )
            known.add(key)
            for table, count in json.loads(row["contents"] or "{}").items():
                # Older versions recorded the number and a digest of the rows.
                rows = count[0] if isinstance(count, list) else count
                written.setdefault(table, {})[key] = rows
        incomplete = {}
        for table in filter(written.get, MEASURED_TABLES):
            count = sum(rows.num_rows for rows in self.parts(table, SCHEMAS[table], ["cell"]))
            # A copy of an old part adds rows, which must not replace lost ones in the count.
            if count == sum(written[table].values()) and len(part_files(self.folder / table)) < 2:
                continue
            found = Counter[tuple[str, int]]()
            # One file at a time: a table may have millions of rows. Grouping imports pandas.
            for rows in self.parts(table, with_categories(SCHEMAS[table]), _KEY):
                grouped = rows.unify_dictionaries().group_by(_KEY, use_threads=False)
                for one in grouped.aggregate([([], "count_all")]).to_pylist():
                    found[one["cell"], one["attempt"]] += one["count_all"]
            for key, expected in written[table].items():
                if found[key] != expected:
                    incomplete[key] = f"{table} has {found[key]} of its {expected} rows"
        return incomplete

    def content(self, name: str) -> bytes | None:
        """Return the content of a file, None if it is missing, not listed or not what was written."""
        content = self.read_file(name)
        is_whole = content is not None and sha256(content) == self.listing.files.get(name)
        return content if is_whole else None

    def damaged(self, *tables: str) -> list[str]:
        """Return the listed files that are missing, or not those that were written.

        tables: all, if none is named.
        """
        names = [name for table in tables or SCHEMAS for name in self.listing.of_table(table)]
        return [name for name in names if self.content(name) is None]

    def select(self, names: Iterable[str]) -> Stored:
        """Return what is in some of the files and in the whole lines of the log."""
        files = {name: self.listing.files[name] for name in names}
        listing = self.listing.model_copy(update={"files": files})
        log = b"".join(line + b"\n" for line in whole_lines(self.log))
        return replace(self, listing=listing, log=log)

    def undamaged(self, *tables: str) -> Stored:
        """Return the same without the damaged files of these tables, or of all."""
        return self.select(self.listing.files.keys() - self.damaged(*tables))

    def require_whole_log(self) -> None:
        """Raise RunError if lines of the log are damaged."""
        damaged = self.log.count(b"\n") - len(whole_lines(self.log))
        if damaged:
            raise RunError(
                f"{self.run}/{self.listing.log}: is damaged: {damaged} of its lines differ from"
                " what was written",
                RESTORE,
            )


def read_stored(folder: Path, run: str, read_file: ReadFile | None = None) -> Stored:
    """Return what is stored now. Raise RunError if the list of the batches is damaged.

    run: its name in messages. read_file: returns a file of the run if that is not in the folder.
    """
    read = read_file or (lambda name: _content(folder / name))
    for _ in range(_READ_TRIES):
        before = read(LISTING_FILE)
        try:
            listing = parse_listing(before, run)
            if read_file is None:
                require_all_listed(folder, listing, run)
        except RunError:
            if read(LISTING_FILE) == before:
                raise
            continue
        log = read(listing.log) or b""
        if read(LISTING_FILE) == before:
            return Stored(folder, run, read, listing, log)
    raise RunError(f"{run}: changes faster than it can be read", "Try again")


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def to_line(rows: Mapping[str, Columns]) -> bytes:
    """Return the line of an attempt from its rows by table. Raise what pyarrow does for wrong values."""
    tables = {}
    for table, columns in rows.items():
        short = {}
        for column in SCHEMAS[table]:
            values = columns.get(column.name, [None])
            if values.count(values[0]) == len(values):
                values = values[:1]
            pa.array(values, column.type)  # what nobody could read later is refused now
            short[column.name] = values if len(values) > 1 else values[0]
        tables[table] = [len(columns["cell"]), short]
    content = json.dumps(tables, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def whole_lines(log: bytes) -> list[bytes]:
    """Return the lines of a log that are as they were written, without a half one at the end."""
    return [line for line in log.split(b"\n")[:-1] if line[:9] == b"%08x " % zlib.crc32(line[9:])]


@lru_cache(maxsize=1)  # a command reads several tables, one after the other
def read_log(log: bytes) -> Mapping[str, pa.Table]:
    """Return the whole attempts in a log, by table.

    Raise what a conversion raises for lines of another program.
    """
    joined: dict[str, dict[str, list[Any]]] = {}
    for line in whole_lines(log):
        for table, (rows, columns) in json.loads(line[9:]).items():
            # All lines have the same columns: one program wrote them.
            found = joined.setdefault(table, {name: [] for name in columns})
            for name, values in columns.items():
                found[name] += values if isinstance(values, list) else [values] * rows
    return {name: to_table(joined[name], SCHEMAS[name]) for name in SCHEMAS.keys() & joined.keys()}
