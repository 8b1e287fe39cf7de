"""Repair what is damaged in a run, before a driver measures into it.

A lost list is written again from the batches. The damaged lines of a log are dropped, and the
damaged files of a batch are built again from the journals of its attempts. An attempt without a
journal is incomplete, or pending if its row is lost, so that its cell is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pyarrow as pa

from orchestrator.common.errors import RunError
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import number_of, part_files, restored_listing
from orchestrator.store.old_parts import read_parts
from orchestrator.store.run_writer import RunWriter, rows_of
from orchestrator.store.stored_tables import Stored
from orchestrator.store.tables import SCHEMAS, read_parquet, to_table
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
    try:
        stored.require_whole_log()
    except RunError as error:
        yield f"{error.message}; dropped"
    writer.close_batch(drop_damaged=True)
    stored = writer.stored()
    damaged = stored.damaged()
    for number in sorted({number_of(name) for name in damaged}):
        names = [name for name in damaged if number_of(name) == number]
        result = _rebuild(writer, stored, names, recover)
        yield (
            f"{writer}: {', '.join(sorted(names))}: damaged or missing; what is left is in"
            f" {DAMAGED_FOLDER}; {result}"
        )
    for table, schema in SCHEMAS.items():
        for _ in read_parts(part_files(writer.folder / table), schema, ["cell"]):
            pass  # a damaged part raises


def _rebuild(writer: RunWriter, stored: Stored, damaged: list[str], recover: Recover) -> str:
    """Write the damaged files of a batch again from journals. Return what became of its attempts."""
    number = number_of(damaged[0])
    content = stored.content(f"{ATTEMPTS}/{number:04}.parquet")
    if content is None:
        # What is in the other files belongs to attempts that are unknown now.
        lost = [name for name in stored.listing.files if number_of(name) == number]
        with writer.writing():
            writer.batches.rebuild(number, {}, lost)
        return "attempts with a journal are stored again"
    keys = ["cell", "attempt", "contents"]
    attempts = read_parquet(content, SCHEMAS[ATTEMPTS], keys).to_pylist()
    tables = {one.partition("/")[0] for one in damaged}
    found: dict[str, list[pa.Table]] = {table: [] for table in tables}
    without = 0
    for cell, attempt_number, contents in (one.values() for one in attempts):
        written = {table: rows for table, rows in json.loads(contents).items() if table in tables}
        rows = {}
        for attempt in writer.attempts_in_folder(cell, attempt_number) if written else ():
            if outcome := recover(attempt):
                for table, columns in rows_of(outcome).items():
                    rows[table] = to_table(columns, SCHEMAS[table])
        if any(table not in rows or rows[table].num_rows != written[table] for table in written):
            without += 1
            continue
        for table in written:
            found[table].append(rows[table])
    joined = {table: pa.concat_tables(parts) for table, parts in found.items() if parts}
    with writer.writing():
        writer.batches.rebuild(number, joined, damaged)
    return f"built again from journals, {without} attempts have none"
