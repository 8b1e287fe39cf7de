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
from orchestrator.common.files import replace_file
from orchestrator.store.layout import ATTEMPTS, DAMAGED_FOLDER
from orchestrator.store.listing import number_of, part_files, restored_listing
from orchestrator.store.old_parts import read_parts
from orchestrator.store.run_writer import RunWriter, rows_of
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
        with writer.writing():
            replace_file(writer.folder / stored.listing.log, stored.select(()).log)
        yield f"{error.message}; dropped"
    with writer.writing():
        writer.batches.close()
    damaged = writer.stored().damaged()
    for number in sorted(set(map(number_of, damaged))):
        names = sorted(name for name in damaged if number_of(name) == number)
        result = _rebuild(writer, number, names, recover)
        yield (
            f"{writer}: {', '.join(names)}: damaged or missing; what is left is in"
            f" {DAMAGED_FOLDER}; {result}"
        )
    for table, schema in SCHEMAS.items():
        for _ in read_parts(part_files(writer.folder / table), schema, ["cell"]):
            pass  # a damaged part raises


def _rebuild(writer: RunWriter, number: int, lost: list[str], recover: Recover) -> str:
    """Write the damaged files of a batch again from journals. Return what became of its attempts."""
    stored, tables = writer.stored(), {name.partition("/")[0] for name in lost}
    content = stored.content(f"{ATTEMPTS}/{number:04}.parquet")
    found: dict[str, list[pa.Table]] = {}
    attempts, without = [], 0
    if content is None:
        # What is in the other files belongs to attempts that are unknown now.
        lost = [name for name in stored.listing.files if number_of(name) == number]
    else:
        keys = ["cell", "attempt", "contents"]
        attempts = read_parquet(content, SCHEMAS[ATTEMPTS], keys).to_pylist()
    for row in attempts:
        contents = json.loads(row["contents"]).items()
        written, rows = {table: count for table, count in contents if table in tables}, {}
        for attempt in writer.attempts_in_folder(row["cell"], row["attempt"]) if written else ():
            if outcome := recover(attempt):
                rows = rows_of(outcome)
        counts = {table: len(columns["cell"]) for table, columns in rows.items()}
        if written.items() <= counts.items():
            for table in written:
                found.setdefault(table, []).append(to_table(rows[table], SCHEMAS[table]))
        else:
            without += 1
    with writer.writing():
        left = stored.select(stored.listing.files.keys() - lost).listing
        joined = {table: pa.concat_tables(parts) for table, parts in found.items()}
        writer.batches.write(left, joined, number)
    if content is None:
        return "attempts with a journal are stored again"
    return f"built again from journals, {without} attempts have none"
