"""The log of a run: the attempts after its last batch, one a line, so that storing one is an append.

A line is the CRC32 of its JSON, which has the number of rows and the columns of each table:
{"samples": [2, {"unit": "ms", "value": [5.0, 5.1]}]}. A column of equal values is one value. Half a
line at the end belongs to an attempt that is being stored, or whose driver was killed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import pyarrow as pa

from orchestrator.store.tables import SCHEMAS, to_table

# The values of each column of a table. A time is in microseconds since 1970.
Columns: TypeAlias = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class LogContents:
    """The rows of the whole attempts in a log, by table.

    damaged: the number of lines that are not as they were written.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    damaged: int = 0


def to_line(rows: Mapping[str, Columns]) -> bytes:
    """Return the line of an attempt from its rows by table. Raise what pyarrow does for wrong values."""
    tables = {}
    for table, columns in rows.items():
        short = {}
        for column in SCHEMAS[table]:
            values = columns.get(column.name, [None])
            is_constant = values.count(values[0]) == len(values)
            # What nobody could read later is refused now.
            pa.array(values[:1] if is_constant else values, column.type)
            short[column.name] = values[0] if is_constant else values
        tables[table] = [len(columns["cell"]), short]
    content = json.dumps(tables, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(content), content)


def whole_lines(content: bytes) -> list[bytes]:
    """Return the lines of a log that are as they were written, without a half one at the end."""
    return [
        line for line in content.split(b"\n")[:-1] if line[:9] == b"%08x " % zlib.crc32(line[9:])
    ]


@lru_cache(maxsize=1)  # a command reads several tables, one after the other
def read_log(content: bytes) -> LogContents:
    """Return the attempts in the content of a log.

    Raise what a conversion raises for lines of another program.
    """
    whole = whole_lines(content)
    joined: dict[str, dict[str, list[Any]]] = {}
    for line in whole:
        for table, (rows, columns) in json.loads(line[9:]).items():
            # All lines have the same columns: one program wrote them.
            found = joined.setdefault(table, {name: [] for name in columns})
            for name, values in columns.items():
                found[name] += values if isinstance(values, list) else [values] * rows
    known = SCHEMAS.keys() & joined.keys()
    tables = {table: to_table(joined[table], SCHEMAS[table]) for table in known}
    return LogContents(tables, content.count(b"\n") - len(whole))
