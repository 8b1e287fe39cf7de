"""Compare the rows of a working copy with those of its bucket, by cell and number of the attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from orchestrator.store.layout import ATTEMPTS
from orchestrator.store.listing import number_of
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS, to_columns, to_table

AttemptKey = tuple[str, int]
_PREDICTIONS = "predictions"


@dataclass(frozen=True)
class Unlisted:
    """Rows of a copy that its bucket lacks, by table.

    renumbered: the new number of each attempt whose number another attempt has in the bucket.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    renumbered: Mapping[AttemptKey, int] = field(default_factory=dict)


def attempts_of(stored: Stored) -> dict[AttemptKey, Mapping[str, Any]]:
    """Return the attempts in the batches and the log, by cell and number. Damage is left out."""
    found = {}
    for rows in _rows(stored, ATTEMPTS, stored.listing.files):
        for row in rows.to_pylist():
            found[row["cell"], row["attempt"]] = row
    return found


def is_ahead(here: Stored, bucket: Stored) -> bool:
    """Return True if a copy has all that its bucket has."""
    if not bucket.listing.files.items() <= here.listing.files.items():
        return False
    if any(here.damaged(table) for table in SCHEMAS):
        return False
    if here.listing.files == bucket.listing.files:
        is_same_log = here.log.startswith(bucket.log)
        return is_same_log and bucket.listing.cells in ("", here.listing.cells)
    known = attempts_of(here)
    return all(known.get(key) == row for key, row in _in_log(bucket).items())


def unlisted_rows(here: Stored, bucket: Stored, highest: Mapping[str, int]) -> Unlisted:
    """Return the rows that only a copy has. highest: the highest known number of each cell."""
    # Batches of two hosts may have one number, and some files in common.
    listed = bucket.listing.files.items()
    numbers_here = {number_of(name) for name, _ in here.listing.files.items() - listed}
    names = [name for name in here.listing.files if number_of(name) in numbers_here]
    there, numbers = attempts_of(bucket), dict(highest)
    known, renumbered = set(), {}
    for rows in _rows(here, ATTEMPTS, names):
        for row in rows.to_pylist():
            key = row["cell"], row["attempt"]
            if there.get(key) == row:
                known.add(key)
            elif key in there:
                numbers[key[0]] += 1
                renumbered[key] = numbers[key[0]]
    tables = {}
    for table, schema in SCHEMAS.items():
        rows = list(_rows(here, table, names))
        if table == _PREDICTIONS:
            predicted = {
                tuple(one)
                for part in _rows(bucket, table, bucket.listing.files)
                for one in _keys(part, "predicted_at")
            }
            left = [_without(part, predicted, "predicted_at") for part in rows]
        else:
            left = [
                _renumbered(_without(part, known, "attempt"), renumbered, schema) for part in rows
            ]
        if sum(part.num_rows for part in left):
            tables[table] = pa.concat_tables(left, promote_options="permissive")
    return Unlisted(tables, renumbered)


def _in_log(stored: Stored) -> dict[AttemptKey, Mapping[str, Any]]:
    rows = stored.logged.tables.get(ATTEMPTS)
    found = rows.to_pylist() if rows is not None else []
    return {(row["cell"], row["attempt"]): row for row in found}


def _rows(stored: Stored, table: str, names: Iterable[str]) -> Iterator[pa.Table]:
    """Yield the rows of a table in some files and in the log."""
    damaged = stored.damaged(table)
    for name in names:
        if name.startswith(f"{table}/") and name not in damaged:
            yield stored.read_file(name)
    if table in stored.logged.tables:
        yield stored.logged.tables[table]


def _keys(rows: pa.Table, column: str) -> list[tuple[Any, ...]]:
    return list(zip(rows["cell"].to_pylist(), rows[column].to_pylist(), strict=True))


def _without(rows: pa.Table, keys: set[Any], column: str) -> pa.Table:
    return rows.filter(pa.array([key not in keys for key in _keys(rows, column)], pa.bool_()))


def _renumbered(rows: pa.Table, numbers: Mapping[AttemptKey, int], schema: pa.Schema) -> pa.Table:
    new = [numbers.get(key, key[1]) for key in _keys(rows, "attempt")]
    return to_table({**to_columns(rows), "attempt": new}, schema)
