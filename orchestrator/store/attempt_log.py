"""The log of a run: the attempts after its last batch, one a line, so that storing one is an append.

A line is the CRC32 of its JSON, which has the number of rows and the columns of each table:
{"samples": [2, {"unit": "ms", "value": [5.0, 5.1]}]}. A column of equal values is one value. Half a
line at the end belongs to an attempt that is being stored, or whose driver was killed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import pyarrow as pa

from orchestrator.store.tables import SCHEMAS, to_columns, to_table


@dataclass(frozen=True)
class LogContents:
    """The rows of the whole attempts in a log, by table.

    damaged: the number of lines that are not as they were written.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    damaged: int = 0


def to_line(stored: Mapping[str, pa.Table]) -> bytes:
    """Return the line of an attempt from its rows by table."""
    tables = {}
    for table, rows in stored.items():
        columns = to_columns(rows)
        for name, values in columns.items():
            if values.count(values[0]) == len(values):
                columns[name] = values[0]
        tables[table] = [rows.num_rows, columns]
    content = json.dumps(tables, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


@lru_cache(maxsize=1)  # a command reads several tables, one after the other
def read_log(content: bytes) -> LogContents:
    """Return the attempts in the content of a log. A line without its end is left out.

    Raise ValueError, or what a conversion raises, for lines of another program.
    """
    *lines, _ = content.split(b"\n")
    whole = [line[9:] for line in lines if line[:9] == b"%08x " % zlib.crc32(line[9:])]
    joined: dict[str, dict[str, list[object]]] = {}
    for line in whole:
        for table, (rows, columns) in json.loads(line).items():
            if table in SCHEMAS:
                _extend(joined.setdefault(table, {}), rows, columns)
    tables = {table: to_table(columns, SCHEMAS[table]) for table, columns in joined.items()}
    return LogContents(tables, len(lines) - len(whole))


def _extend(joined: dict[str, list[object]], rows: int, columns: Mapping[str, object]) -> None:
    """Add rows to columns. A column that either of them lacks is null."""
    before = len(next(iter(joined.values()), ()))
    for name in {**joined, **columns}:
        values = columns.get(name)
        values = values if isinstance(values, list) else [values] * rows
        if len(values) != rows:
            raise ValueError(f"its column {name} has {len(values)} of {rows} rows")
        joined.setdefault(name, [None] * before).extend(values)
