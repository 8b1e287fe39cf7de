"""Repair what is damaged in a run, before a driver measures into it.

A lost list is written again from the batches. The damaged lines of a log are dropped, and the
damaged files of a batch are built again from the journals of its attempts. An attempt without a
journal is incomplete, or pending if its row is lost, so that its cell is measured again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import number_of, restored_listing
from orchestrator.store.run_writer import RunWriter, rows_of
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS, empty_table
from tasks.spec.attempt import Attempt
from tasks.spec.outcome import Outcome

# Returns the outcome of an attempt from its journal, None without its end.
Recover = Callable[[Attempt], Outcome | None]


def repair(writer: RunWriter, recover: Recover) -> Iterator[str]:
    """Repair a run and yield a line for each thing that was damaged.

    Raise RunError for a damaged part of an older version, before hours are measured in vain.
    """
    try:
        stored = writer.stored()
    except RunError as error:
        listing = restored_listing(writer.folder)
        if not listing.files:
            raise
        with writer.writing():
            listing.write(writer.folder)
        yield f"{error.message}; written again from the batches"
        stored = writer.stored()
    if stored.logged.damaged:
        yield f"{stored.damaged_log().message}; dropped"
    writer.close_batch(drop_damaged=True)
    stored = writer.stored()
    damaged: dict[int, set[str]] = defaultdict(set)
    for table in SCHEMAS:
        for name in stored.damaged(table):
            damaged[number_of(name)].add(table)
    for number, tables in sorted(damaged.items()):
        yield _rebuild(writer, stored, number, tables, recover)
    stored = writer.stored()
    for table, schema in SCHEMAS.items():
        stored.count(table, schema)


def _rebuild(
    writer: RunWriter, stored: Stored, number: int, damaged: set[str], recover: Recover
) -> str:
    """Write a batch again from its whole files and from journals. Return a line about it."""
    names = [name for name in stored.listing.files if number_of(name) == number]
    files = ", ".join(sorted(name for name in names if name.partition("/")[0] in damaged))
    whole = {}
    for name in names:
        table = name.partition("/")[0]
        if table in SCHEMAS and table not in damaged:
            whole[table] = stored.read_file(name)
    text = f"{writer}: {files}: damaged or missing; what is left is in {DAMAGED_FOLDER}"
    attempts = whole.get(ATTEMPTS)
    if attempts is None:
        # What is in the other files belongs to attempts that are unknown now.
        writer.write_batch({}, replaced=names)
        return f"{text}; attempts with a journal are stored again"
    found, without = _from_journals(writer, attempts, damaged, recover)
    writer.write_batch({**whole, **found}, replaced=names)
    return f"{text}; built again from journals, {without} attempts have none"


def _from_journals(
    writer: RunWriter, attempts: pa.Table, tables: set[str], recover: Recover
) -> tuple[dict[str, pa.Table], int]:
    """Return the rows of these tables from the attempts' journals, and how many have no journal."""
    found: dict[str, list[pa.Table]] = {table: [] for table in tables}
    without = 0
    keys = attempts.select(["cell", "attempt", "contents"]).to_pylist()
    for cell, number, contents in (one.values() for one in keys):
        written = {table: rows for table, rows in json.loads(contents).items() if table in tables}
        rows = _rows_of_journal(writer, cell, number, recover) if written else {}
        if any(table not in rows or rows[table].num_rows != written[table] for table in written):
            without += 1
            continue
        for table in written:
            found[table].append(rows[table])
    joined = {}
    for table, parts in found.items():
        empty = empty_table(SCHEMAS[table], None)
        joined[table] = pa.concat_tables([empty, *parts], promote_options="permissive")
    return joined, without


def _rows_of_journal(
    writer: RunWriter, cell: str, number: int, recover: Recover
) -> dict[str, pa.Table]:
    for attempt in writer.attempts_in_folder(cell, number):
        if outcome := recover(attempt):
            return rows_of(outcome)
    return {}
