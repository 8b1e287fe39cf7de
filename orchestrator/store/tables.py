"""The tables of a run as Parquet files: their schemas, and how one file is read and written.

The schemas are generated from `tasks/spec/tables.py`. cells.parquet, a row per cell, has the key of
what it was derived from in its metadata. That file costs time alone: one that is missing, damaged,
or of another key is derived again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.common.errors import RunError
from orchestrator.common.files import replace_file
from orchestrator.common.hashing import sha256
from orchestrator.store.layout import CELLS_FILE
from tasks.spec.fields import Dtype
from tasks.spec.messages import error_text
from tasks.spec.tables import STORED_TABLES

if TYPE_CHECKING:
    import pandas as pd

# Tables of an attempt's measured rows, under the names of the attributes of `Outcome`.
MEASURED_TABLES = ("samples", "kernels", "allocations", "live", "ranks")

_ARROW_TYPES = {
    Dtype.TEXT: pa.string(),
    Dtype.JSON: pa.string(),
    Dtype.INT32: pa.int32(),
    Dtype.INT64: pa.int64(),
    Dtype.FLOAT: pa.float64(),
    Dtype.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    Dtype.BOOL: pa.bool_(),
}
SCHEMAS: dict[str, pa.Schema] = {}
for _table in STORED_TABLES:
    _types = [(field.name, _ARROW_TYPES[field.dtype or Dtype.TEXT]) for field in _table.fields]
    SCHEMAS[_table.name] = pa.schema(_types)
_FIELDS = [field for table in STORED_TABLES for field in table.fields]
JSON_COLUMNS = frozenset(field.name for field in _FIELDS if field.dtype is Dtype.JSON)
REQUIRED_COLUMNS = frozenset(field.name for field in _FIELDS if field.required)
_KEY, _FACTS = b"sweep_key", b"sweep_facts"  # metadata of cells.parquet


def empty_table(schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a table without rows. `pa.array` and `pa.Schema.empty_table` would import pandas."""
    return pa.Table.from_batches([], schema).select(columns or schema.names)


def with_categories(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text columns as dictionaries, which pandas reads as categories."""
    categories = pa.dictionary(pa.int32(), pa.string())
    fields = []
    for field in schema:
        fields.append(field.with_type(categories) if pa.types.is_string(field.type) else field)
    return pa.schema(fields)


def to_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns. All rows have the same names."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def to_table(columns: Mapping[str, Sequence[Any]], schema: pa.Schema) -> pa.Table:
    """Return columns as a table with the columns of a schema; those that are missing are null."""
    nulls = [None] * len(next(iter(columns.values()), ()))
    arrays = [pa.array(columns.get(field.name, nulls), field.type) for field in schema]
    return pa.table(arrays, schema)


def with_types(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the types of a schema. A column of a newer program stays as it is."""
    types = {field.name: field.type for field in schema}
    fields = [field.with_type(types.get(field.name, field.type)) for field in rows.schema]
    typed = pa.schema(fields, rows.schema.metadata)
    # A cast imports pyarrow.compute, which takes a tenth of the time of `sweep status`.
    return rows if rows.schema == typed else rows.cast(typed)


def to_parquet(table: pa.Table) -> bytes:
    """Return the content of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


@contextmanager
def damage_as_run_error(file: object, remedy: str) -> Iterator[None]:
    """Raise RunError if the body fails. It converts the content of a file, and opens none."""
    try:
        yield
    except Exception as error:  # pyarrow and JSON of another program raise many kinds
        reason = error_text(error).splitlines()[0]
        raise RunError(f"{file}: cannot be read: {reason}", remedy) from error


def read_parquet(content: bytes, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Table:
    """Return rows with the types of a schema. Columns that the file lacks are left out.

    schema: text columns of dictionaries are read as such. Raise ArrowInvalid, or what pyarrow
    raises, for the file of another program.
    """
    metadata = pq.read_metadata(pa.BufferReader(content))
    names = metadata.schema.names
    missing = sorted(REQUIRED_COLUMNS.intersection(schema.names).difference(names))
    if missing:
        raise pa.ArrowInvalid(f"it is no part of a run: it has no column {', '.join(missing)}")
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise pa.ArrowInvalid(f"it is no part of a run: it has two columns {', '.join(twice)}")
    texts = {field.name for field in schema if pa.types.is_dictionary(field.type)}
    file = pq.ParquetFile(
        pa.BufferReader(content),
        metadata=metadata,
        read_dictionary=[name for name in names if name in texts],
    )
    if columns is not None:
        columns = [name for name in columns if name in names]
    # The files are too small to gain from threads, and every thread would hold on to memory.
    table = file.read(columns=columns, use_threads=False)
    table.validate(full=True)  # text that is not UTF-8 would raise an error far from here
    return with_types(table, schema)


def write_cells_file(
    folder: Path, cells: pd.DataFrame, key: str, facts: Mapping[str, object]
) -> str:
    """Write cells.parquet and return its SHA-256. facts: stored with the cells, as JSON."""
    content = cells_content(cells, key, facts)
    replace_file(folder / CELLS_FILE, content)
    return sha256(content)


def cells_content(cells: pd.DataFrame, key: str, facts: Mapping[str, object]) -> bytes:
    """Return the content of cells.parquet. facts: stored with the cells, as JSON."""
    table = pa.Table.from_pandas(cells, preserve_index=False)
    own = {_KEY: key, _FACTS: json.dumps(facts)}
    return to_parquet(table.replace_schema_metadata({**table.schema.metadata, **own}))


def read_cells_file(
    folder: Path, digest: str, key: str
) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """Return the cells and facts that were written with a key; None if there are none.

    digest: the SHA-256 that the file must have.
    """
    with suppress(OSError):
        content = (folder / CELLS_FILE).read_bytes()
        # Damaged bytes may crash pyarrow.
        return read_cells(content, key) if sha256(content) == digest else None
    return None


def read_cells(content: bytes, key: str) -> tuple[pd.DataFrame, dict[str, Any]] | None:
    """Return the cells and facts that were written with a key; None if there are none."""
    try:
        file = pq.ParquetFile(pa.BufferReader(content))  # `read_table` imports pyarrow.dataset
        if file.schema_arrow.metadata.get(_KEY) != key.encode():
            return None
        table = file.read(use_threads=False)
        return table.to_pandas(), json.loads(table.schema.metadata[_FACTS])
    except (ValueError, KeyError, pa.ArrowException):
        return None
