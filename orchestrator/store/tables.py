"""The Arrow schemas of the tables that a run consists of, generated from `tasks/spec/tables.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.spec.fields import Dtype, Field
from tasks.spec.tables import STORED_TABLES

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


def arrow_schema(fields: Iterable[Field]) -> pa.Schema:
    """Return the schema of a table with these columns."""
    return pa.schema([(field.name, _ARROW_TYPES[field.dtype or Dtype.TEXT]) for field in fields])


SCHEMAS = {table.name: arrow_schema(table.fields) for table in STORED_TABLES}
_FIELDS = [field for table in STORED_TABLES for field in table.fields]
JSON_COLUMNS = frozenset(field.name for field in _FIELDS if field.dtype is Dtype.JSON)
REQUIRED_COLUMNS = frozenset(field.name for field in _FIELDS if field.required)


def empty_table(schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a table without rows. `pa.Schema.empty_table` would import pandas."""
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
    """Return columns as a table with all columns of the schema; those that are missing are null.

    A column of a newer program stays as it is.
    """
    rows = len(next(iter(columns.values()), ()))
    arrays = {}
    for field in schema:
        arrays[field.name] = pa.array(columns.get(field.name, [None] * rows), field.type)
    for name, values in columns.items():
        if name not in arrays:
            arrays[name] = pa.array(values)
    return pa.table(arrays)


def with_types(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the types of a schema. A column of a newer program stays as it is."""
    types = {field.name: field.type for field in schema}
    fields = [field.with_type(types.get(field.name, field.type)) for field in rows.schema]
    return rows.cast(pa.schema(fields, rows.schema.metadata))


def to_parquet(table: pa.Table) -> bytes:
    """Return the content of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content
