"""The Arrow schemas of the tables that a run consists of, generated from `tasks/spec/tables.py`."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from tasks.spec.fields import Dtype, Field
from tasks.spec.tables import STORED_TABLES

# Tables of an attempt's measured rows, under the names of the attributes of `Outcome`.
MEASURED_TABLES = ("samples", "kernels", "allocations", "live")

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


def tables() -> tuple[str, ...]:
    """Return the names of the tables of a run."""
    return tuple(SCHEMAS)


def empty_table(schema: pa.Schema, columns: list[str] | None) -> pa.Table:
    """Return a table without rows. `pa.Schema.empty_table` would import pandas."""
    return pa.Table.from_batches([], schema).select(columns or schema.names)


def with_categories(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text columns as dictionaries, which pandas reads as categories."""
    categories = pa.dictionary(pa.int32(), pa.string())
    fields = []
    for field in schema:
        fields.append(field.with_type(categories) if pa.types.is_string(field.type) else field)
    return pa.schema(fields)
